//! Conversion: copies the content of any disk or image into a new disk or image of any format.
//!
//! ```text
//! source                       pieces of 1 MiB                sink
//!   chain of images      --->  reader  ===>  writer  --->     an image of any kind
//!   disk, snapshot             finds zeros   (the caller's)   streamOptimized, OVA
//!   disk of an archive                                        native disk
//! ```
//!
//! Invariants:
//!
//! 1. **All or nothing.** The target has a temporary name until all of it is durable, so after an error, an
//!    interruption or a crash no file has the target's name. After a crash, the files with temporary names are removed
//!    when the datastore is opened next, or in a folder by the next conversion to the same name.
//! 2. **The source is not changed**, and does not change during the copy: if the disk is in use, a snapshot of it is
//!    read.
//! 3. **Zeros are not written.** Ranges that are not allocated in the source are skipped, and the others are searched
//!    for zeros. A thin target is as small as its format allows; a thick target has all its space allocated.
//! 4. **Memory is limited**: [`copy::PIECES`] parts, whatever the size of the disk.
//! 5. The user states the format of a source. The content is untrusted: the rules of [`layer::image`] for foreign
//!    images apply.

mod archive;
mod copy;
mod device;
mod export;
mod format;
mod image;
mod skipping;
mod source;
mod target;

pub(crate) use copy::copy as copy_all;
pub use copy::{CopyPiece, Pieces, Sink, Source, SourceRun, Zeros};
pub use device::{DeviceSink, DeviceSource, HoldingSource};
pub use export::{ArchiveCard, ArchiveController, ArchiveExport, ArchiveMachine};
pub use format::{SourceFormat, TargetFormat};
pub use source::{ChainSource, descriptor_of, member_capacity};
pub(crate) use source::{is_archive, open_member};
pub(crate) use target::folder_of;

use crate::salvage::{ByteRange, LostRanges, image_source};
use crate::{Datastore, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use skipping::SkippingSource;
use std::path::PathBuf;
use work::{Progress, Throttled};

/// Source or target of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Address {
    /// A file, by its path.
    Path(PathBuf),
    /// `DISK` or `DISK@SNAPSHOT` of the datastore.
    Disk(String),
}

/// How foreign images are opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageOptions {
    /// The format of the file; if `None`, it is detected from the first bytes.
    pub format: Option<SourceFormat>,
    /// Whether to accept a parent that was changed since its child was made.
    pub force_parent: bool,
    /// Whether to replay the journal of a SEsparse image that was not closed cleanly, as far as its records are
    /// provably complete.
    pub replay_journal: bool,
    /// Folders, besides the image's own, that contain files to which the image may refer.
    pub permitted: Vec<PathBuf>,
    /// The disk to read from an archive, by the name of its file in the archive.
    pub member: Option<String>,
    /// Whether the path is canonical and was permitted before, so that a link in it is refused.
    pub resolved: bool,
}

/// A conversion to carry out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conversion {
    /// The source of the conversion.
    pub from: Address,
    /// The target, which must not exist.
    pub to: Address,
    /// Format of the target.
    pub format: TargetFormat,
    /// How the source is opened, if it is a file.
    pub options: ImageOptions,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
    /// Whether damaged and unreadable ranges of the source become zeros, instead of ending the conversion.
    #[serde(default)]
    pub skip_damaged: bool,
}

/// The result of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Converted {
    /// The target: a path or the name of a disk.
    pub target: String,
    /// Format of the target.
    pub format: TargetFormat,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes that were not zeros.
    pub copied: u64,
    /// Files that were created, with their paths; none for disks of a datastore.
    pub files: Vec<PathBuf>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// Ranges of the source that were skipped, and read as zeros in the target.
    pub lost: Vec<ByteRange>,
}

impl Conversion {
    /// Whether the source or the target is a disk of a datastore.
    pub fn needs_datastore(&self) -> bool {
        matches!(self.from, Address::Disk(_)) || matches!(self.to, Address::Disk(_))
    }

    /// Carries out the conversion.
    pub fn run(&self, datastore: Option<&Datastore>, progress: &dyn Progress) -> Result<Converted> {
        let datastore = || {
            let missing = || Error::new(ErrorKind::Invalid, "a disk is named without a datastore: give --datastore");
            datastore.ok_or_else(missing)
        };
        // The target is checked first, so that no source is read for a target that cannot be created.
        target::check(&self.to, self.format)?;
        let mut warnings = Vec::new();
        let _use = match &self.from {
            Address::Disk(name) => Some(datastore()?.uses.share(crate::names::split(name).0)?),
            Address::Path(_) => None,
        };
        let lost = LostRanges::default();
        let source: Box<dyn Source + '_> = match (&self.from, self.skip_damaged) {
            (Address::Path(path), false) => source::open(path, &self.options, progress, &mut warnings)?,
            (Address::Path(path), true) => Box::new(image_source(path, &self.options, &lost, &mut warnings, progress)?),
            (Address::Disk(name), false) => disk_source(datastore()?, name)?,
            (Address::Disk(name), true) => {
                Box::new(SkippingSource::new(disk_source(datastore()?, name)?, lost.clone()))
            }
        };
        let datastore = match &self.to {
            Address::Disk(_) => Some(datastore()?),
            Address::Path(_) => None,
        };
        let made = copy_into(source, &self.to, self.format, datastore, self.rate, progress)?;
        Ok(Converted { warnings, lost: lost.merged(), ..made })
    }
}

/// Copies a source into a new target.
pub(crate) fn copy_into(
    source: Box<dyn Source + '_>,
    to: &Address,
    format: TargetFormat,
    datastore: Option<&Datastore>,
    rate: u64,
    progress: &dyn Progress,
) -> Result<Converted> {
    target::check(to, format)?;
    let capacity = source.capacity().next_multiple_of(layer::SECTOR);
    // Reserves the name, so that no other operation can use it before the disk exists.
    let mut reservation = None;
    let made = match (to, datastore) {
        (Address::Path(path), _) => target::make(path, format, capacity, progress)?,
        (Address::Disk(name), Some(datastore)) => {
            reservation = Some(datastore.reserve(name)?);
            disk_target(datastore, name, format, capacity, progress)?
        }
        (Address::Disk(_), None) => {
            return Err(Error::new(ErrorKind::Invalid, "a disk is named without a datastore: give --datastore"));
        }
    };
    let files = made.files;
    let copied = copy::copy(source, made.sink, &Throttled { progress, rate })?;
    if let (Address::Disk(name), Some(datastore)) = (to, datastore) {
        datastore.give_defaults(name);
    }
    drop(reservation);
    let target = match to {
        Address::Path(path) => path.display().to_string(),
        Address::Disk(name) => name.clone(),
    };
    Ok(Converted { target, format, capacity, copied, files, warnings: Vec::new(), lost: Vec::new() })
}

/// A disk or snapshot of a datastore to read.
fn disk_source<'a>(datastore: &'a Datastore, name: &str) -> Result<Box<dyn Source + 'a>> {
    let (disk, snapshot) = crate::names::split(name);
    match datastore.foreign.find(disk) {
        Some(entry) => datastore.foreign.conversion_source(&entry, snapshot),
        None => datastore.native.conversion_source(disk, snapshot),
    }
}

/// A new disk of a datastore, whose name is reserved.
fn disk_target<'a>(
    datastore: &'a Datastore,
    name: &str,
    format: TargetFormat,
    capacity: u64,
    progress: &dyn Progress,
) -> Result<target::Target<'a>> {
    let sink = match format {
        TargetFormat::Native => datastore.native.conversion_target(name, capacity)?,
        TargetFormat::Image(kind) => datastore.foreign.conversion_target(name, kind, capacity, progress)?,
        TargetFormat::StreamOptimized | TargetFormat::Ova => {
            let text = format!(
                "disk '{name}' cannot be {format}, because files of this format are never changed: name a file as the \
                 target, or give --format native or another format of disks"
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
    };
    Ok(target::Target { sink, files: Vec::new() })
}
