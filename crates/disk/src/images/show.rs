//! Describing an image together with its parents.

use crate::convert::ImageOptions;
use backend::{Access, IoMode};
use error::Result;
use layer::descriptor::Descriptor;
use layer::image::{Image, ImageKind, Place, open_chain};
use layer::qcow2;
use layer::stream::Stream;
use layer::{Layer, SECTOR};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use work::NoProgress;

/// The format of images that can have internal snapshots.
const QCOW2: &str = "qcow2";

/// An image and its parents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageInfo {
    /// The levels, newest first. If a parent cannot be opened, only the levels above that parent.
    pub levels: Vec<ImageLevel>,
    /// Why the levels below the last one cannot be opened.
    pub problem: Option<String>,
}

/// One level of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageLevel {
    /// The file by which the level is opened.
    pub path: String,
    /// The level's format, by its name for `lamina convert -d`.
    pub format: String,
    /// The `createType` of the descriptor.
    pub create_type: Option<String>,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes that the level's files occupy in the file system.
    pub allocated: u64,
    /// Bytes of guest data that the level maps.
    pub mapped: u64,
    /// Bytes in the level's files that nothing references.
    pub dead: u64,
    /// Number of snapshots inside a qcow2 image, which are not read.
    pub internal_snapshots: u32,
    /// Provisioning type of a flat disk.
    pub provisioning: Option<String>,
    /// Blocks of 1 MiB that a flat disk has (VMware's nb).
    pub blocks_allocated: Option<u64>,
    /// The number of these blocks that are zeroed on first write (VMware's tbz).
    pub blocks_to_be_zeroed: Option<u64>,
    /// Number of contiguous runs in which the file system stores a flat disk.
    pub fragments: Option<u64>,
    /// Content ID (CID).
    pub content_id: Option<String>,
    /// Content ID that the parent had when this level was created.
    pub parent_content_id: Option<String>,
    /// Path of the parent when this level was created.
    pub parent: Option<String>,
    /// The disk adapter that the descriptor names.
    pub adapter: Option<String>,
    /// Identity of the disk.
    pub uuid: Option<String>,
    /// The extents of the image.
    pub extents: Vec<ImageExtent>,
}

/// One extent of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageExtent {
    /// The file, as the descriptor names it; `None` for zeros.
    pub file: Option<String>,
    /// The extent's type in the descriptor.
    pub kind: String,
    /// Length in bytes.
    pub length: u64,
}

/// Opens the image at a path and describes it.
pub fn show(path: &Path, options: &ImageOptions) -> Result<ImageInfo> {
    let place = options.place(path)?;
    if crate::convert::is_archive(&place, options.format)? {
        return show_member(&place, options);
    }
    let opening = options.opening(false);
    match open_chain(place.clone(), &opening) {
        Ok(chain) => {
            let levels = chain.images().iter().map(level).collect::<Result<_>>()?;
            Ok(ImageInfo { levels, problem: None })
        }
        Err(problem) => {
            // The description of the image alone helps the user to find the missing parent.
            let Ok(image) = Image::open(place, &opening) else { return Err(problem) };
            Ok(ImageInfo { levels: vec![level(&image)?], problem: Some(problem.to_string()) })
        }
    }
}

fn level(image: &Image) -> Result<ImageLevel> {
    let mut shown = of_layer(image.place().label(), &**image.layer())?;
    shown.provisioning = image.provisioning().map(|provisioning| provisioning.name().to_owned());
    if let Some(kind) = ImageKind::of(image) {
        shown.format = kind.to_string();
    }
    let counters = image.counters();
    shown.blocks_allocated = counters.map(|counters| counters.nb);
    shown.blocks_to_be_zeroed = counters.map(|counters| counters.tbz);
    shown.fragments = image.fragments()?;
    if image.layer().format() == QCOW2 {
        shown.internal_snapshots = internal_snapshots(image.place())?;
    }
    shown.parent = image.parent().map(|parent| parent.hint.clone());
    if let Some(descriptor) = image.descriptor() {
        described(&mut shown, &descriptor);
    }
    Ok(shown)
}

/// The number of snapshots inside the qcow2 image at a place.
fn internal_snapshots(place: &Place) -> Result<u32> {
    let file = place.open(IoMode::Buffered, Access::Read)?;
    let header = qcow2::Header::read(&*file).map_err(|error| error.context(format!("'{}'", place.label())))?;
    Ok(header.internal_snapshots())
}

/// As [`unread_snapshots`], for an open image of any format.
pub(crate) fn unread_snapshots_of(image: &Image) -> Result<Option<String>> {
    if image.layer().format() == QCOW2 { unread_snapshots(image.place()) } else { Ok(None) }
}

/// What the user has to know about the snapshots inside the qcow2 image at a place, because they are not read. `None`
/// if there are none.
pub(crate) fn unread_snapshots(place: &Place) -> Result<Option<String>> {
    let count = internal_snapshots(place)?;
    let text = || {
        format!(
            "'{}' has internal snapshots ({count}), which are not read: 'qemu-img snapshot -l' lists them, and \
             'qemu-img convert -l NAME' writes one into a file of its own",
            place.label()
        )
    };
    Ok((count > 0).then(text))
}

fn of_layer(path: String, layer: &dyn Layer) -> Result<ImageLevel> {
    let usage = layer.usage()?;
    Ok(ImageLevel {
        path,
        format: layer.format().to_owned(),
        capacity: layer.capacity(),
        allocated: usage.allocated,
        mapped: usage.mapped,
        dead: usage.dead,
        ..ImageLevel::default()
    })
}

fn described(shown: &mut ImageLevel, descriptor: &Descriptor) {
    shown.create_type = Some(descriptor.create_type.name().to_owned());
    shown.content_id = Some(descriptor.content.to_string());
    shown.parent_content_id = descriptor.parent_content.map(|content| content.to_string());
    shown.adapter = descriptor.database.get("ddb.adapterType").map(ToOwned::to_owned);
    shown.uuid = descriptor.database.get("ddb.uuid").map(ToOwned::to_owned);
    let extent = |extent: &layer::descriptor::ExtentLine| ImageExtent {
        file: extent.file.clone(),
        kind: extent.kind.name().to_owned(),
        length: extent.sectors.saturating_mul(SECTOR),
    };
    shown.extents = descriptor.extents.iter().map(extent).collect();
}

/// The disk in an archive.
fn show_member(place: &Place, options: &ImageOptions) -> Result<ImageInfo> {
    let mut warnings = Vec::new();
    let (disk, file) = crate::convert::open_member(place, options, &NoProgress, &mut warnings)?;
    let label = format!("{}:{}", place.label(), disk.file);
    let stream = Arc::new(Stream::open(file, &label)?);
    if let Err(error) = disk.check_capacity(stream.capacity()) {
        warnings.push(error.to_string());
    }
    let mut shown = of_layer(label, &*stream)?;
    if let Some(text) = stream.descriptor()? {
        described(&mut shown, &Descriptor::parse(&text)?);
    }
    Ok(ImageInfo { levels: vec![shown], problem: (!warnings.is_empty()).then(|| warnings.join("; ")) })
}
