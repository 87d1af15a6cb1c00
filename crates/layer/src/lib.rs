//! Layers: image files in VMware's and QEMU's formats. Each layer answers one question: *what does this image store at
//! this range?*
//!
//! ```text
//! descriptor   the text that names a VMDK's extents and its parent
//! flat         raw bytes: raw, monolithicFlat, vmfs (thin, zeroed thick, eager zeroed thick)
//! vmfssparse   ESX redo logs, 512-byte grains
//! sesparse     space-efficient redo logs, 4 KiB grains
//! vsansparse   delta objects, allocated in 4 MiB units
//! hosted       sparse extents of VMware Workstation
//! stream       streamOptimized: compressed, written once from front to back
//! qcow2        QEMU's format, read only
//! image        opening the image that a user names: its files, access control for them, and its chain of parents
//! ova          no layer: the archive that contains streamOptimized disks with their description
//! ```
//!
//! A layer covers its own files only. It never reads a parent: it reports ranges that it does not store as
//! [`Content::Absent`], and the chain queries the layer below. Invariants of every format:
//!
//! 1. Bytes of an image are untrusted. Each offset, size and count is checked before it is used. Values in a header
//!    never let memory or loops grow beyond the named limits.
//! 2. An image opened for reading is never changed, not even its "in use" mark.
//! 3. After [`Layer::flush`] everything written before it survives power loss: payload is durable before any table that
//!    names it is written. Unflushed data may be lost, completely or by single sectors; the worst other effect of a
//!    crash is allocated space that no table names.
//! 4. On a full file system, a write that needs space is refused before it is acknowledged ([`backing`]). A flush, an
//!    overwrite of allocated data, a discard or a close is never refused. [`ErrorKind::NoSpace`] leaves a layer
//!    unchanged and open for requests that need no space.
//! 5. A range is never reported as [`Content::Data`] before its bytes are in the file, so that reads need no lock: they
//!    look up the map first, and do the I/O without a lock. File locations are not reused while [`Layer::epoch`] of an
//!    older lookup is held ([`epochs`], [`retirement`]).
//! 6. All callers that wait for a commit share the next one ([`group_commit`]).

#![forbid(unsafe_code)]

mod aligned;
mod backing;
mod cache;
pub mod descriptor;
mod epochs;
mod extents;
pub mod flat;
mod group_commit;
pub mod hosted;
pub mod image;
mod inflate;
#[cfg(test)]
mod model;
pub mod ova;
#[cfg(test)]
mod proving;
pub mod qcow2;
mod retirement;
mod runs;
pub mod sesparse;
pub mod stream;
pub mod vmfssparse;
pub mod vsansparse;

use backend::File;
pub(crate) use error::{Error, ErrorKind, IoContext, Result};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// The unit of sizes and offsets in VMware's formats.
pub const SECTOR: u64 = 512;

/// The largest capacity of any layer, in bytes: 64 TiB.
pub const CAPACITY_MAX: u64 = 64 << 40;

/// If a whole discard fails for lack of space, parts of this size are tried one by one. In most formats, it is the
/// range of one table.
const DISCARD_PART: u64 = 2 << 20;

/// The block size that is assumed for the file system: the largest usual one.
const BLOCK: u64 = 4096;
/// Extents requested per call when a whole range is scanned.
const EXTENTS_AT_A_TIME: usize = 256;

/// The content of a range of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// This layer stores nothing here: the parent's content is visible, or zeros without a parent.
    Absent,
    /// Zeros that hide the parent.
    Zero,
    /// Data, at `offset` of file number `file` of this layer.
    Data {
        /// Index of the file for [`Layer::file`].
        file: u16,
        /// Byte offset in the file.
        offset: u64,
    },
    /// Data that only [`Layer::read_encoded`] can return: compressed grains.
    Encoded,
}

/// A range of bytes with one kind of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Byte offset in the layer.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// The content of the range.
    pub content: Content,
}

/// Statistics of a layer for users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes allocated to the layer's files in the file system.
    pub allocated: u64,
    /// Bytes of guest data in the layer, in whole grains.
    pub mapped: u64,
    /// Bytes in the layer's files to which no table refers any more: wipe and shrink free them.
    pub dead: u64,
}

/// One level of a chain. All methods may be called from any thread at once. Ranges are in bytes within the capacity.
/// Their borders are multiples of 512 for reading and of [`Layer::grain`] for changes, or the end of the layer.
pub trait Layer: Send + Sync {
    /// Capacity in bytes.
    fn capacity(&self) -> u64;

    /// Unit of mapping in bytes: changes cover whole grains, and the chain completes partial ones with the parent's
    /// data.
    fn grain(&self) -> u64;

    /// The name of the format, as for `lamina convert -d`.
    fn format(&self) -> &'static str;

    /// True when the layer was opened for writing.
    fn writable(&self) -> bool;

    /// Appends the extents of `range`: in order, adjacent, beginning at `range.start`, and merged with equal neighbours
    /// where that is cheap. Appends at least one extent and at most `most`, so the result may end before `range` does.
    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()>;

    /// The file with number `index` in [`Content::Data`].
    fn file(&self, index: u16) -> Result<&Arc<dyn File>>;

    /// A caller of [`Layer::map`] holds this epoch while it uses the result: meanwhile, freed locations are not reused.
    /// The epoch must be entered **before** `map` is called. `None` for a format that never reuses locations.
    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }

    /// Called after [`Layer::map`] has failed for a range that begins at `at`: the end of the range that the same
    /// damaged table or file describes.
    fn damage_end(&self, at: u64) -> u64 {
        grain_end(self, at)
    }

    /// Reads `out.len()` bytes at `start` of a range that is [`Content::Encoded`].
    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        let _ = out;
        Err(Error::new(ErrorKind::Corrupt, format!("nothing is encoded at {start}")))
    }

    /// Writes whole grains: the slices one after another at `start`.
    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        let _ = (start, slices);
        Err(read_only(self.format()))
    }

    /// Overwrites sectors, the slices one after another at `start`, if this layer stores every touched grain as
    /// [`Content::Data`] and overwrites it in place: then a small write into a large grain costs no more than its size.
    /// Otherwise returns `Ok(false)` without a change; the chain then completes the grains and calls [`Layer::write`].
    fn overwrite(&self, start: u64, slices: &[&[u8]]) -> Result<bool> {
        let _ = (start, slices);
        Ok(false)
    }

    /// Makes whole grains read as zeros, hiding the parent. With `keep`, the grains may keep their space; without it,
    /// space is freed where the format can record that.
    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        let _ = (range, keep);
        Err(read_only(self.format()))
    }

    /// Makes whole grains read as zeros and frees their space, except for grains whose change would need space in the
    /// file system: these keep their content. Returns whether all of the range reads as zeros now.
    fn discard(&self, range: Range<u64>) -> Result<bool> {
        match self.zero(range.clone(), false) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {}
            other => return other.map(|()| true),
        }
        // The whole range lacks space, but some parts may need none.
        let mut at = range.start;
        while at < range.end {
            let end = ((at / DISCARD_PART + 1) * DISCARD_PART).min(range.end);
            match self.zero(at..end, false) {
                Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error),
                _ => at = end,
            }
        }
        Ok(false)
    }

    /// The most bytes that the file system has to allocate if a whole range of grains is written: checked before a copy
    /// into this layer begins.
    fn room_needed(&self, range: Range<u64>) -> Result<u64> {
        let mut extents = Vec::new();
        let (mut at, mut needed) = (range.start, 0);
        while at < range.end {
            extents.clear();
            self.map(at..range.end, EXTENTS_AT_A_TIME, &mut extents)?;
            for extent in &extents {
                let has_place = matches!(extent.content, Content::Data { .. } | Content::Encoded);
                if !has_place {
                    // The first and the last byte of the extent may each be in a block of the file system that the
                    // extent does not fill.
                    let end = extent.start.saturating_add(extent.length);
                    needed += end.next_multiple_of(BLOCK) - extent.start / BLOCK * BLOCK;
                }
            }
            at = extents.last().map_or(range.end, |last| last.start.saturating_add(last.length).max(at + 1));
        }
        Ok(needed)
    }

    /// Two sizes for the check of free space: bytes of the disk that one table maps, and bytes that a new table
    /// occupies with its copies. A write to a range without a table allocates the table in addition to
    /// [`Layer::room_needed`]. The second size is 0 for formats without tables.
    fn table_size(&self) -> (u64, u64) {
        (u64::MAX, 0)
    }

    /// Allocates the space of a range before it is written, where the format knows the location in advance; the content
    /// stays the same.
    fn take_room(&self, range: Range<u64>) -> Result<()> {
        let _ = range;
        Ok(())
    }

    /// Makes everything written before this call durable.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Whether so many changes wait that the layer should be flushed soon, by a thread for which no request waits. If
    /// that does not happen, a later write makes the changes durable, and takes as long as the device needs for that.
    fn is_commit_due(&self) -> bool {
        false
    }

    /// True after a failure that leaves unknown which recent changes are on the device. The layer then refuses changes
    /// until it is opened again.
    fn has_stopped(&self) -> bool {
        false
    }

    /// Flushes, and marks the image as properly closed. Later changes fail. Flushes succeed, because one may have begun
    /// before.
    fn close(&self) -> Result<()> {
        self.flush()
    }

    /// Statistics for users.
    fn usage(&self) -> Result<Usage>;
}

/// The end of the grain with byte `at`.
pub(crate) fn grain_end(layer: &(impl Layer + ?Sized), at: u64) -> u64 {
    let grain = layer.grain();
    (at / grain + 1).saturating_mul(grain).min(layer.capacity())
}

/// The error for a change of an image that is open for reading.
pub(crate) fn read_only(format: &str) -> Error {
    Error::new(ErrorKind::ReadOnly, format!("this {format} image is open for reading only"))
}

/// [`Layer::file`] for a layer with a single file.
pub(crate) fn only_file<'a>(index: u16, file: &'a Arc<dyn File>, image: &str) -> Result<&'a Arc<dyn File>> {
    match index {
        0 => Ok(file),
        _ => Err(Error::new(ErrorKind::Invalid, format!("{image}: it has one file only"))),
    }
}
