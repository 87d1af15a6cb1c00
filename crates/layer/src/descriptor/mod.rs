//! The VMDK descriptor: a small text that names the files of a disk in their order, and its parent.
//!
//! ```text
//! # Disk DescriptorFile         header: key=value
//! version=1
//! CID=8f67ca74                  changes when the content does
//! parentCID=0172e8a4            the parent's CID when this delta was made
//! createType="vmfsSparse"
//! parentFileNameHint="vm.vmdk"
//! # Extent description          one line per extent, in the order of the disk
//! RW 4096 VMFSSPARSE "vm-000001-delta.vmdk"
//! # The Disk Data Base          everything else, ours to keep and not to touch
//! ddb.longContentID = "4b98b55ba6a6bc2e8fd6eb368f67ca74"
//! ```
//!
//! [docs/format/vmdk-descriptor.md](../../../../docs/format/vmdk-descriptor.md) has every key, its source, and how
//! other readers treat it. Invariants:
//!
//! 1. [`Descriptor::parse`] is total: any bytes give a descriptor or an error, in time linear in their number, and with
//!    memory within the limits below.
//! 2. Text that two readers could interpret differently is refused: keys given twice with different values, invalid
//!    extent lines, sizes that overflow.
//! 3. Entries of the data base keep their order and their bytes. Comments and header keys that lamina does not use are
//!    dropped when the text is written again, as VMware does.
//! 4. The result of [`Descriptor::to_bytes`] parses to the same descriptor, and QEMU, which searches for strings where
//!    other readers parse lines, reads the same.
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

/// Longest descriptor read or written, in bytes. Real ones take one to four kilobytes; a disk of 4096 extents a quarter
/// of this.
pub const TEXT_MAX: usize = 1 << 20;
/// Longest line.
pub const LINE_MAX: usize = 8192;
/// Most extents of one disk: 8 TiB in pieces of 2 GiB, each of which is an open file.
pub const EXTENTS_MAX: usize = 8192;
/// Most entries of the data base; real ones have up to 30.
pub const DATABASE_MAX: usize = 4096;
/// Longest file name or path inside a descriptor, in bytes. QEMU takes 511; names that we make are shorter.
pub const PATH_MAX: usize = 4096;
/// CID and parentCID have to end within this many bytes, or QEMU does not find them.
pub const QEMU_HEAD_MAX: usize = 20 * SECTOR as usize;

/// The kind of image that the text describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CreateType {
    /// One sparse extent of Workstation with the descriptor inside.
    MonolithicSparse,
    /// One flat extent, as Workstation makes it.
    MonolithicFlat,
    /// Sparse extents of 2 GiB and less.
    TwoGbMaxExtentSparse,
    /// Flat extents of 2 GiB and less.
    TwoGbMaxExtentFlat,
    /// One compressed extent with the descriptor inside.
    StreamOptimized,
    /// One flat extent on VMFS: thin, zeroed thick or eager zeroed thick.
    Vmfs,
    /// A redo log with 512-byte grains.
    VmfsSparse,
    /// A redo log with 4 KiB grains.
    SeSparse,
    /// A delta object.
    VsanSparse,
    /// Any other, by its name: device mappings, and unknown kinds.
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
        // Names that were documented or used once for the same kinds.
        ("2GbMaxExtentSparse", Self::TwoGbMaxExtentSparse),
        ("2GbMaxExtentFlat", Self::TwoGbMaxExtentFlat),
        ("vmfsThin", Self::Vmfs),
        ("vmfsPreallocated", Self::Vmfs),
        ("vmfsEagerZeroedThick", Self::Vmfs),
    ];

    /// The kind of that name, in upper or lower case.
    pub fn named(name: &str) -> Self {
        let known = Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        known.map_or_else(|| Self::Other(name.to_owned()), |(_, kind)| kind.clone())
    }

    /// The name as it is written.
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
    /// 1, or 3 while changes are tracked; 2 and 4 have been seen.
    pub version: u32,
    /// How names in the text are encoded.
    pub encoding: Encoding,
    /// Identity of the content.
    pub content: ContentId,
    /// The parent's content when this was made above it; `None` without a parent.
    pub parent_content: Option<ContentId>,
    /// Whether the array that holds the disk made the snapshot, so that the parent's data is in no file.
    pub native_snapshot: Option<bool>,
    /// The kind of image.
    pub create_type: CreateType,
    /// Path of the parent's descriptor when this was made.
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

    /// An empty delta above `parent`, whose descriptor is at `hint` (a name in the same folder, or a path). `random`
    /// provides its identity.
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

    /// Whether the disk was made thin.
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

    /// Gives the content a new identity: necessary before the first change after each opening, so that a delta made
    /// above the old content is never combined with the new one. Change tracking ends, because lamina does not record
    /// changes.
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

/// Text from outside for an error: short, and without control characters.
fn shown(bytes: &[u8]) -> String {
    const SHOWN_MAX: usize = 80;
    let cut = &bytes[..bytes.len().min(SHOWN_MAX)];
    let dots = if cut.len() < bytes.len() { ".." } else { "" };
    format!("'{}{dots}'", cut.escape_ascii())
}
