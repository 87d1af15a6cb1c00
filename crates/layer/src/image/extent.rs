//! Opening one extent: the only module that uses every format.

use super::maintain::Engine;
use super::{OpenOptions, ParentReference, Place};
use crate::descriptor::ExtentKind;
use crate::flat::{Flat, FlatOptions};
use crate::hosted::{self, Hosted};
use crate::qcow2::{self, Qcow2};
use crate::sesparse::{self, DirtyJournal, SeSparse};
use crate::stream::Stream;
use crate::vmfssparse::{self, VmfsSparse};
use crate::vsansparse::{self, VsanSparse};
use crate::{Error, ErrorKind, IoContext, Layer, Result};
use backend::{Access, File, IoMode};
use std::sync::Arc;

/// The format of an extent, or of a file that is an image by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Raw bytes.
    Flat,
    /// A sparse extent of VMware Workstation, writable or compressed: the header decides.
    HostedSparse,
    /// A redo log with 512-byte grains.
    VmfsSparse,
    /// A redo log with 4 KiB grains.
    SeSparse,
    /// A delta object, as in a vSAN store.
    VsanSparse,
    /// QEMU's qcow2.
    Qcow2,
    /// Any VMDK, recognised by its content; other files are refused. Used for a parent that an image calls a VMDK.
    Vmdk,
}

impl Format {
    /// The format for the type in an extent line; `None` for a zero extent.
    ///
    /// # Errors
    /// `Unsupported` for an extent that is not a file.
    pub(super) fn of_line(kind: ExtentKind) -> Result<Option<Self>> {
        let foreign = |what: &str| {
            let text = format!("an extent of type {} is {what}; copy the disk out with the host's tools", kind.name());
            Err(Error::new(ErrorKind::Unsupported, text))
        };
        Ok(Some(match kind {
            ExtentKind::Zero => return Ok(None),
            ExtentKind::Flat | ExtentKind::Vmfs => Self::Flat,
            ExtentKind::Sparse => Self::HostedSparse,
            ExtentKind::VmfsSparse => Self::VmfsSparse,
            ExtentKind::SeSparse => Self::SeSparse,
            ExtentKind::VsanSparse => Self::VsanSparse,
            ExtentKind::VmfsRdm | ExtentKind::VmfsRaw => return foreign("a device of an ESXi host"),
        }))
    }

    /// The I/O mode for an extent file of this format when `wanted` was requested: formats with tables make smaller
    /// reads and writes than direct I/O permits.
    pub(super) fn mode(self, wanted: IoMode, offset: u64, capacity: Option<u64>) -> IoMode {
        match (self, capacity) {
            (Self::Flat, Some(capacity)) => Flat::mode_for(wanted, offset, capacity),
            (Self::Flat, None) => wanted,
            _ => IoMode::Buffered,
        }
    }
}

/// Options for opening an extent.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExtentOptions {
    /// The part of the file that a flat extent occupies; `writable` in it applies to all formats.
    pub(super) flat: FlatOptions,
    /// Whether the image has a parent, so that zeros have to be recorded.
    pub(super) parent: bool,
    /// How to treat a journal that was not replayed.
    pub(super) journal: DirtyJournal,
    /// Whether a truncated stream is accepted as far as it can be read.
    pub(super) force: bool,
    /// Whether an extent with lost parts is opened.
    pub(super) salvage: bool,
}

impl ExtentOptions {
    /// Options for a file that is an image by itself.
    pub(super) fn alone(options: &OpenOptions) -> Self {
        let flat = FlatOptions { offset: 0, capacity: None, writable: options.writable, thin: false };
        Self { flat, parent: false, journal: options.journal, force: options.force, salvage: options.salvage }
    }
}

/// An open extent.
pub(super) struct OpenExtent {
    pub(super) layer: Arc<dyn Layer>,
    /// `layer` as its own type, if it is flat: for counters, filling and punching.
    pub(super) flat: Option<Arc<Flat>>,
    /// `layer` as its own type, if its format has maintenance operations.
    pub(super) engine: Option<Engine>,
    /// The parent that the extent's own header names.
    pub(super) parent: Option<ParentReference>,
}

/// Opens the extent of `format` at `place` through `file`.
pub(super) fn open_extent(
    format: Format,
    place: &Place,
    file: Arc<dyn File>,
    options: ExtentOptions,
) -> Result<OpenExtent> {
    let image = place.label();
    let writable = options.flat.writable;
    let parent = options.parent;
    let engine = match format {
        Format::Flat => {
            let flat = Flat::open(file, &image, options.flat)?;
            let layer: Arc<dyn Layer> = Arc::<Flat>::clone(&flat);
            return Ok(OpenExtent { layer, flat: Some(flat), engine: None, parent: None });
        }
        Format::HostedSparse if is_compressed(&*file, &image)? => {
            let open = match (options.salvage, options.force) {
                (true, _) => Stream::open_incomplete,
                (false, true) => Stream::salvage,
                (false, false) => Stream::open,
            };
            let layer: Arc<dyn Layer> = Arc::new(open(file, &image)?);
            return Ok(OpenExtent { layer, flat: None, engine: None, parent: None });
        }
        Format::HostedSparse => {
            let options = hosted::OpenOptions { image, writable, parent, force: options.force };
            Engine::Hosted(Arc::new(Hosted::open(file, &options)?))
        }
        Format::VmfsSparse => {
            let usual = vmfssparse::OpenOptions::reading(image);
            let options = vmfssparse::OpenOptions { writable, parent, salvage: options.salvage, ..usual };
            Engine::VmfsSparse(Arc::new(VmfsSparse::open(file, &options)?))
        }
        Format::VsanSparse => {
            let usual = vsansparse::OpenOptions::reading(image);
            let options = vsansparse::OpenOptions { writable, parent, salvage: options.salvage, ..usual };
            Engine::VsanSparse(Arc::new(VsanSparse::open(file, &options)?))
        }
        Format::SeSparse => {
            let (journal, repair) = (options.journal, options.salvage);
            let options = sesparse::Options { write: writable, journal, repair, ..Default::default() };
            Engine::SeSparse(Arc::new(SeSparse::open(file, &image, options)?))
        }
        Format::Qcow2 if writable => return Err(crate::read_only("qcow2").context(image)),
        Format::Qcow2 => return open_qcow2(place, file),
        Format::Vmdk => {
            let text = format!("'{image}' is no extent: a VMDK is opened by its descriptor");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    };
    let layer: Arc<dyn Layer> = match &engine {
        Engine::Hosted(layer) => Arc::<Hosted>::clone(layer),
        Engine::VmfsSparse(layer) => Arc::<VmfsSparse>::clone(layer),
        Engine::SeSparse(layer) => Arc::<SeSparse>::clone(layer),
        Engine::VsanSparse(layer) => Arc::<VsanSparse>::clone(layer),
    };
    Ok(OpenExtent { layer, flat: None, engine: Some(engine), parent: None })
}

/// Opens a qcow2 image, and reads its backing file from the header.
fn open_qcow2(place: &Place, file: Arc<dyn File>) -> Result<OpenExtent> {
    let image = place.label();
    let header = qcow2::Header::read(&*file).map_err(|error| error.context(&image))?;
    let data = match (header.external_data(), header.data_file()) {
        (false, _) => None,
        (true, Some(name)) => Some(place.folder.resolve(name)?.open(IoMode::Buffered, Access::Read)?),
        (true, None) => {
            let text = format!("'{image}' has its data in another file, and does not say in which");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
    };
    let parent = header.backing().map(|backing| backing_reference(backing, &image)).transpose()?;
    let layer: Arc<dyn Layer> = Arc::new(Qcow2::open(file, data, &image)?);
    Ok(OpenExtent { layer, flat: None, engine: None, parent })
}

/// The backing file of a qcow2 image. Its format is never guessed, because the guest controls the content of a raw
/// disk.
fn backing_reference(backing: &qcow2::Backing, image: &str) -> Result<ParentReference> {
    let refused = |what: String| Err(Error::new(ErrorKind::Unsupported, format!("'{image}' {what}")));
    let name = backing.name.as_str();
    // QEMU writes "nbd:..", "json:{..}" and the like for other protocols; in a path with a colon, a slash precedes the
    // colon.
    let scheme = name.split('/').next().and_then(|first| first.split_once(':')).map(|(scheme, _)| scheme);
    let hint = match scheme {
        Some("file") => name.trim_start_matches("file:"),
        Some(_) => return refused(format!("has a backing file that only QEMU can open: '{}'", name.escape_debug())),
        None => name,
    };
    let format = match backing.format.as_deref() {
        Some("raw") => Format::Flat,
        Some("qcow2") => Format::Qcow2,
        Some("vmdk") => Format::Vmdk,
        Some(other) => {
            return refused(format!("has a backing file of format '{}', which cannot be read", other.escape_debug()));
        }
        None => {
            return refused(format!(
                "does not say of which format its backing file '{}' is, and guessing is not safe: \
                 'qemu-img rebase -u -F FORMAT -b FILE' writes it down",
                name.escape_debug()
            ));
        }
    };
    Ok(ParentReference { hint: hint.to_owned(), content: None, format: Some(format) })
}

/// Whether a hosted sparse extent has compressed grains: bit 16 of the flags in its header.
pub(super) fn is_compressed(file: &dyn File, name: &str) -> Result<bool> {
    let mut header = [0; 12];
    file.read_at(&mut header, 0).during(|| format!("reading the header of '{name}'"))?;
    Ok(header[10] & 1 != 0)
}
