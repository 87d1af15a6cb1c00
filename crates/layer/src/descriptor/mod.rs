//! The VMDK descriptor: a short text that names the files of a disk in their order, and its parent.
//!
//! ```text
//! # Disk DescriptorFile         header: key=value
//! version=1
//! CID=8f67ca74                  changes with the content
//! parentCID=0172e8a4            the parent's CID when this delta was made
//! createType="vmfsSparse"
//! parentFileNameHint="vm.vmdk"
//! # Extent description          one line per extent, in the order of the disk
//! RW 4096 VMFSSPARSE "vm-000001-delta.vmdk"
//! # The Disk Data Base          all other entries, which lamina keeps unchanged
//! ddb.longContentID = "4b98b55ba6a6bc2e8fd6eb368f67ca74"
//! ```
//!
//! [docs/format/vmdk-descriptor.md](../../../../docs/format/vmdk-descriptor.md) describes every key, its source, and
//! how other readers treat it. Invariants:
//!
//! 1. [`Descriptor::parse`] returns a descriptor or an error for any bytes, in linear time, with memory within the
//!    limits below.
//! 2. Text that two readers could interpret differently is refused: keys given twice with different values, invalid
//!    extent lines, sizes that overflow.
//! 3. Entries of the data base keep their order and their bytes. Comments and header keys that lamina does not use are
//!    dropped when the text is written again, as VMware does.
//! 4. The result of [`Descriptor::to_bytes`] parses to the same descriptor, and QEMU, which searches for strings where
//!    other readers parse lines, reads the same values.
//! 5. A descriptor file is replaced whole or not at all ([`storage`]).

mod database;
mod encoding;
mod extents;
mod geometry;
mod identity;
mod parse;
pub mod storage;
mod write;

#[cfg(test)]
pub(crate) mod tests;

pub use database::Database;
pub use encoding::Encoding;
pub use extents::{Access, ExtentKind, ExtentLine};
pub use geometry::{Adapter, Geometry};
pub use identity::{ContentId, Uuid};
pub(crate) use parse::starts_like_one;

use crate::{Error, ErrorKind, Result, SECTOR};

/// The longest descriptor that is read or written, in bytes. Descriptors usually take one to four kilobytes; a
/// descriptor of 4096 extents takes a quarter of this limit.
pub const TEXT_MAX: usize = 1 << 20;
/// The longest line, in bytes.
pub const LINE_MAX: usize = 8192;
/// The most extents of one disk: 16 TiB in pieces of 2 GiB, each of which is an open file.
pub const EXTENTS_MAX: usize = 8192;
/// The most entries of the data base; descriptors usually have up to 30.
pub const DATABASE_MAX: usize = 4096;
/// The longest file name or path in a descriptor, in bytes. QEMU accepts 511; names that lamina makes are shorter.
pub const PATH_MAX: usize = 4096;
/// CID and parentCID have to end within this many bytes, or QEMU does not find them.
pub const QEMU_HEAD_MAX: usize = 20 * SECTOR as usize;

/// The kind of image that a descriptor describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CreateType {
    /// One sparse extent of VMware Workstation, with the descriptor inside.
    MonolithicSparse,
    /// One flat extent, as VMware Workstation makes it.
    MonolithicFlat,
    /// Sparse extents of at most 2 GiB.
    TwoGbMaxExtentSparse,
    /// Flat extents of at most 2 GiB.
    TwoGbMaxExtentFlat,
    /// One compressed extent with the descriptor inside.
    StreamOptimized,
    /// One flat extent on VMFS: thin, zeroed thick or eager zeroed thick.
    Vmfs,
    /// A redo log with 512-byte grains.
    VmfsSparse,
    /// A redo log with 4 KiB grains.
    SeSparse,
    /// A delta object of a vSAN store.
    VsanSparse,
    /// Any other kind of disk, by its name: device mappings, and unknown kinds.
    Other(String),
}

impl CreateType {
    const NAMES: [(&str, Self); 14] = [
        ("monolithicSparse", Self::MonolithicSparse),
        ("monolithicFlat", Self::MonolithicFlat),
        ("twoGbMaxExtentSparse", Self::TwoGbMaxExtentSparse),
        ("twoGbMaxExtentFlat", Self::TwoGbMaxExtentFlat),
        ("streamOptimized", Self::StreamOptimized),
        ("vmfs", Self::Vmfs),
        ("vmfsSparse", Self::VmfsSparse),
        ("seSparse", Self::SeSparse),
        ("vsanSparse", Self::VsanSparse),
        // Other names for the same kinds, which were documented or used in the past.
        ("2GbMaxExtentSparse", Self::TwoGbMaxExtentSparse),
        ("2GbMaxExtentFlat", Self::TwoGbMaxExtentFlat),
        ("vmfsThin", Self::Vmfs),
        ("vmfsPreallocated", Self::Vmfs),
        ("vmfsEagerZeroedThick", Self::Vmfs),
    ];

    /// The kind with this name, in upper or lower case.
    pub fn named(name: &str) -> Self {
        let known = Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        known.map_or_else(|| Self::Other(name.to_owned()), |(_, kind)| kind.clone())
    }

    /// The name of the kind as lamina writes it.
    pub fn name(&self) -> &str {
        match self {
            Self::Other(name) => name,
            kind => Self::NAMES.iter().find(|(_, known)| known == kind).map_or("custom", |(name, _)| name),
        }
    }
}

/// A descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// 1, or 3 while changed blocks are tracked. 2 and 4 also exist.
    pub version: u32,
    /// The encoding of names in the text.
    pub encoding: Encoding,
    /// The CID of the image.
    pub content: ContentId,
    /// The parent's CID when this image was made; `None` without a parent.
    pub parent_content: Option<ContentId>,
    /// Whether the storage array made the snapshot, so the parent's data is in no file.
    pub native_snapshot: Option<bool>,
    /// The kind of image.
    pub create_type: CreateType,
    /// Path of the parent's descriptor when this image was made.
    pub parent_hint: Option<String>,
    /// The file in which VMware tracks changed blocks.
    pub change_tracking: Option<String>,
    /// The extents in the order of the disk.
    pub extents: Vec<ExtentLine>,
    /// The `ddb.` entries.
    pub database: Database,
}

impl Descriptor {
    /// A base disk that was never written: content `fffffffe`, no parent.
    pub fn base(create_type: CreateType, extents: Vec<ExtentLine>) -> Self {
        Self {
            version: 1,
            encoding: Encoding::Utf8,
            content: ContentId::INITIAL,
            parent_content: None,
            native_snapshot: None,
            create_type,
            parent_hint: None,
            change_tracking: None,
            extents,
            database: Database::default(),
        }
    }

    /// An empty delta above `parent`. The parent's descriptor is at `hint`, a name in the same folder or a path. The
    /// CID is derived from `random`.
    pub fn delta(
        parent: &Self,
        hint: &str,
        create_type: CreateType,
        extents: Vec<ExtentLine>,
        random: &mut dyn FnMut() -> u64,
    ) -> Self {
        let mut delta = Self::base(create_type, extents);
        delta.encoding = parent.encoding.clone();
        delta.content = parent.content;
        delta.parent_content = Some(parent.content);
        delta.native_snapshot = Some(false);
        delta.parent_hint = Some(hint.to_owned());
        delta.database.set_long_content(delta.content, random);
        if delta.create_type == CreateType::SeSparse {
            delta.database.set("ddb.grain", "8");
        }
        delta
    }

    /// Size of the disk in sectors: the sum of the extents, which parsing has checked.
    pub fn sectors(&self) -> u64 {
        self.extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.sectors))
    }

    /// Size of the disk in bytes.
    pub fn capacity(&self) -> u64 {
        self.sectors().saturating_mul(SECTOR)
    }

    /// Whether the disk is marked as thin.
    pub fn thin(&self) -> bool {
        self.database.get("ddb.thinProvisioned") == Some("1")
    }

    /// Marks the disk as thin or not.
    pub fn set_thin(&mut self, thin: bool) {
        match thin {
            true => self.database.set("ddb.thinProvisioned", "1"),
            false => self.database.remove("ddb.thinProvisioned"),
        }
    }

    /// Gives the image a new CID: required before the first change after each opening, so that a delta made above the
    /// old content is never combined with the new content. Also ends VMware's change tracking, because lamina does not
    /// record changed blocks.
    pub fn renew_content(&mut self, random: &mut dyn FnMut() -> u64) {
        self.content = ContentId::after(self.content, 8, random);
        self.database.set_long_content(self.content, random);
        if self.change_tracking.take().is_some() && self.version == 3 {
            self.version = 1;
        }
    }
}

/// The error for a text that contradicts itself or the format.
fn corrupt(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, message)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

/// Text of a descriptor for an error message: short, and without control characters.
fn shown(bytes: &[u8]) -> String {
    const SHOWN_MAX: usize = 80;
    let cut = &bytes[..bytes.len().min(SHOWN_MAX)];
    let dots = if cut.len() < bytes.len() { ".." } else { "" };
    format!("'{}{dots}'", cut.escape_ascii())
}
