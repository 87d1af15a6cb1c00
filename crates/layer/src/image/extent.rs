//! Opening one extent: the one place that knows all formats by name.

use crate::descriptor::ExtentKind;
use crate::flat::{Flat, FlatOptions};
use crate::{Error, ErrorKind, IoContext, Layer, Result};
use backend::{File, IoMode};
use std::sync::Arc;

/// What an extent, or a file that is a disk by itself, is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Bytes as they are.
    Flat,
    /// Workstation's sparse extent, live or compressed: its header says which.
    HostedSparse,
    /// A redo log with 512-byte grains.
    VmfsSparse,
    /// A redo log with 4 KiB grains.
    SeSparse,
    /// QEMU's.
    Qcow2,
}

impl Format {
    /// The format of an extent line's type; `None` for zeros.
    ///
    /// # Errors
    /// `Unsupported` for what is no file.
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
            ExtentKind::VsanSparse => return foreign("an object of a vSAN store, which no file holds"),
            ExtentKind::VmfsRdm | ExtentKind::VmfsRaw => return foreign("a device of an ESXi host"),
        }))
    }

    /// How the file of an extent of this format is opened where `wanted` was asked for: formats with tables are read
    /// and written in pieces smaller than direct I/O carries.
    pub(super) fn mode(self, wanted: IoMode, offset: u64, capacity: Option<u64>) -> IoMode {
        match (self, capacity) {
            (Self::Flat, Some(capacity)) => Flat::mode_for(wanted, offset, capacity),
            (Self::Flat, None) => wanted,
            _ => IoMode::Buffered,
        }
    }
}

/// An open extent.
pub(super) struct OpenExtent {
    pub(super) layer: Arc<dyn Layer>,
    /// The same once more, if it is flat: for counters, filling and punching.
    pub(super) flat: Option<Arc<Flat>>,
    /// The file below it, where its own header names one.
    pub(super) parent: Option<super::ParentReference>,
}

/// Opens `file`, which errors call `name`, as an extent of `format`. `options` matters to flat extents, and its
/// `writable` to all.
pub(super) fn open_extent(format: Format, file: Arc<dyn File>, name: &str, options: FlatOptions) -> Result<OpenExtent> {
    let layer = match format {
        Format::Flat => {
            let flat = Flat::open(file, name, options)?;
            let layer: Arc<dyn Layer> = Arc::<Flat>::clone(&flat);
            return Ok(OpenExtent { layer, flat: Some(flat), parent: None });
        }
        Format::HostedSparse if is_compressed(&*file, name)? => Arc::new(crate::stream::Stream::open(file, name)?) as _,
        Format::HostedSparse => {
            let options =
                crate::hosted::OpenOptions { image: name.to_owned(), writable: options.writable, parent: true };
            Arc::new(crate::hosted::Hosted::open(file, &options)?) as _
        }
        Format::VmfsSparse => {
            let reading = crate::vmfssparse::OpenOptions::reading(name);
            let options = crate::vmfssparse::OpenOptions { writable: options.writable, ..reading };
            Arc::new(crate::vmfssparse::VmfsSparse::open(file, &options)?) as _
        }
        Format::SeSparse => {
            let options = crate::sesparse::Options { write: options.writable, ..Default::default() };
            Arc::new(crate::sesparse::SeSparse::open(file, name, options)?) as _
        }
        Format::Qcow2 => not_there(name, "qcow2")?,
    };
    Ok(OpenExtent { layer, flat: None, parent: None })
}

fn not_there(name: &str, format: &str) -> Result<Arc<dyn Layer>> {
    let text = format!("'{name}' is of the {format} format, which this version cannot open");
    Err(Error::new(ErrorKind::Unsupported, text))
}

/// Whether a hosted sparse extent holds compressed grains: bit 16 of the flags in its header.
fn is_compressed(file: &dyn File, name: &str) -> Result<bool> {
    let mut header = [0; 12];
    file.read_at(&mut header, 0).during(|| format!("reading the header of '{name}'"))?;
    Ok(header[10] & 1 != 0)
}
