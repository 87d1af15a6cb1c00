//! The bytes of a disk that the file systems of its guest do not use, read from their free maps.
//!
//! A guest writes every byte that is decoded here, so the content is hostile. Everything is read through [`Source`].
//!
//! 1. A range is reported as free only if the free map says so, and if everything on which this depends is consistent:
//!    checksums, counts, bounds, and the metadata, which no free range touches.
//! 2. The unit of doubt is the part of a file system that has a map of its own: a block group of ext4, an allocation
//!    group of XFS, the volume of NTFS. Everything that is inconsistent counts as in use, as does every unit whose map
//!    cannot be read without damage.
//! 3. A file system that is not cleanly unmounted, or that uses a feature that is not known here, is refused as a
//!    whole.
//! 4. Ranges are reported unit by unit, after the unit was checked completely. They lie within the volume, ascend
//!    within a unit, and do not overlap.

#![forbid(unsafe_code)]

mod bitmap;
mod ext;
mod fields;
mod ntfs;
mod partitions;
mod signatures;
mod xfs;

pub use partitions::{Layout, Partition, Scheme, partitions};

use error::{Error, ErrorKind, Result};
use std::ops::Range;

/// Most bytes of one read.
const READ_MAX: u64 = 1 << 20;
/// Most doubts that a summary names.
const DOUBTS_MAX: usize = 8;

/// The disk.
pub trait Source {
    /// Fills `buffer` with the bytes from `offset` on. Only ranges within the capacity are requested. The kind
    /// *corrupt* marks the range as unreadable; every other error ends the reading.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()>;
}

/// Why reading a map ended.
#[derive(Debug)]
enum Stop {
    /// The volume, or a unit of it, counts as in use, with the reason.
    Refused(String),
    /// The disk cannot be read, or the caller ended the reading.
    Failed(Error),
}

type Outcome<T> = std::result::Result<T, Stop>;

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Corrupt => Self::Refused(error.to_string()),
            _ => Self::Failed(error),
        }
    }
}

fn refused<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Stop::Refused(reason.into()))
}

/// A part of a disk: a partition, or the whole disk.
#[derive(Clone)]
pub struct Volume<'a> {
    source: &'a dyn Source,
    start: u64,
    length: u64,
}

impl<'a> Volume<'a> {
    /// The `length` bytes of a disk from `start` on, which must lie within the disk.
    pub fn new(source: &'a dyn Source, start: u64, length: u64) -> Self {
        Self { source, start, length }
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The bytes of a range; a range outside the volume is refused.
    fn read(&self, offset: u64, length: u64) -> Outcome<Vec<u8>> {
        if length > READ_MAX || offset.checked_add(length).is_none_or(|end| end > self.length) {
            return refused(format!("the {length} bytes at {offset} lie outside the volume"));
        }
        let mut bytes = vec![0; length as usize];
        self.source.read_at(self.start.saturating_add(offset), &mut bytes)?;
        Ok(bytes)
    }
}

/// What a volume contains.
pub enum Content<'a> {
    /// A file system whose free map can be read.
    FileSystem(FileSystem<'a>),
    /// Something whose free map is not read.
    Other {
        /// What it is, such as "swap space"; `None` if nothing is recognised.
        name: Option<String>,
        /// Why its free map is not read.
        reason: String,
    },
}

/// A cleanly unmounted file system.
pub struct FileSystem<'a> {
    kind: Kind<'a>,
}

enum Kind<'a> {
    Ext(Box<ext::Ext<'a>>),
    Xfs(Box<xfs::Xfs<'a>>),
    Ntfs(Box<ntfs::Ntfs<'a>>),
}

/// The units of a file system that were read, and those that count as in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Free bytes that were reported.
    pub free: u64,
    /// Number of units.
    pub units: u64,
    /// Number of units that count as in use, because something in them is inconsistent.
    pub doubted: u64,
    /// The reasons for the first of these units.
    pub doubts: Vec<String>,
}

impl Summary {
    fn doubt(&mut self, unit: &str, number: u64, reason: &str) {
        self.doubted += 1;
        if self.doubts.len() < DOUBTS_MAX {
            self.doubts.push(format!("{unit} {number}: {reason}"));
        }
    }
}

/// Receives free ranges, in bytes from the beginning of the volume. An error ends the reading.
pub type EachFree<'f> = &'f mut dyn FnMut(Range<u64>) -> Result<()>;

impl FileSystem<'_> {
    /// The name of the file system: `ext4`, `xfs`, `ntfs`, ...
    pub fn name(&self) -> &'static str {
        match &self.kind {
            Kind::Ext(ext) => ext.name(),
            Kind::Xfs(_) => "xfs",
            Kind::Ntfs(_) => "ntfs",
        }
    }

    /// Size in bytes, as the file system states it.
    pub fn size(&self) -> u64 {
        match &self.kind {
            Kind::Ext(ext) => ext.size(),
            Kind::Xfs(xfs) => xfs.size(),
            Kind::Ntfs(ntfs) => ntfs.size(),
        }
    }

    /// Calls `each` for every free range. Fails only if the disk cannot be read or `each` fails.
    pub fn free_ranges(&self, each: EachFree<'_>) -> Result<Summary> {
        let mut summary = Summary::default();
        let unit = match &self.kind {
            Kind::Ext(_) => "block group",
            Kind::Xfs(_) => "allocation group",
            Kind::Ntfs(_) => "volume",
        };
        summary.units = match &self.kind {
            Kind::Ext(ext) => ext.groups(),
            Kind::Xfs(xfs) => xfs.groups(),
            Kind::Ntfs(_) => 1,
        };
        for number in 0..summary.units {
            let (mut free, mut ended) = (0, None);
            // An error of `each` is kept apart, because its kind says nothing about the map.
            let mut report = |range: Range<u64>| {
                free += range.end.saturating_sub(range.start);
                each(range).map_err(|error| {
                    ended = Some(error);
                    Error::new(ErrorKind::Interrupted, "the caller ended the reading")
                })
            };
            let outcome = match &self.kind {
                Kind::Ext(ext) => ext.free_of(number, &mut report),
                Kind::Xfs(xfs) => xfs.free_of(number, &mut report),
                Kind::Ntfs(ntfs) => ntfs.free(&mut report),
            };
            if let Some(error) = ended {
                return Err(error);
            }
            summary.free += free;
            match outcome {
                Ok(()) => {}
                Err(Stop::Refused(reason)) => summary.doubt(unit, number, &reason),
                Err(Stop::Failed(error)) => return Err(error),
            }
        }
        Ok(summary)
    }
}

/// Recognises what a volume contains. Fails only if the disk cannot be read.
pub fn examine<'a>(volume: &Volume<'a>) -> Result<Content<'a>> {
    match recognise(volume) {
        Ok(content) => Ok(content),
        Err(Stop::Refused(reason)) => Ok(Content::Other { name: None, reason }),
        Err(Stop::Failed(error)) => Err(error),
    }
}

fn recognise<'a>(volume: &Volume<'a>) -> Outcome<Content<'a>> {
    let found = signatures::find(volume)?;
    let [signature] = &found[..] else {
        let reason = match found.len() {
            0 => "no file system is recognised".to_owned(),
            _ => format!("there are signatures of {}", found.join(" and of ")),
        };
        // A hibernated system also matters to the other partitions.
        let hibernated = found.iter().find(|name| **name == signatures::HIBERNATED);
        return Ok(Content::Other { name: hibernated.map(|name| (*name).to_owned()), reason });
    };
    let kind = match *signature {
        signatures::EXT => ext::Ext::open(volume.clone()).map(|ext| Kind::Ext(Box::new(ext))),
        signatures::XFS => xfs::Xfs::open(volume.clone()).map(|xfs| Kind::Xfs(Box::new(xfs))),
        signatures::NTFS => ntfs::Ntfs::open(volume.clone()).map(|ntfs| Kind::Ntfs(Box::new(ntfs))),
        _ => refused("it has no free map that is read"),
    };
    match kind {
        Ok(kind) => Ok(Content::FileSystem(FileSystem { kind })),
        Err(Stop::Refused(reason)) => Ok(Content::Other { name: Some((*signature).to_owned()), reason }),
        Err(failed) => Err(failed),
    }
}
