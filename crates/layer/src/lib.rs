//! Layers: image files of other makers' formats, each answering one question, *what is at this range?*
//!
//! ```text
//! descriptor   the text that names a VMDK's extents and its parent
//! flat         bytes as they are: raw, monolithicFlat, vmfs (thin, zeroed thick, eager zeroed thick)
//! vmfssparse   ESX redo logs, 512-byte grains
//! sesparse     space-efficient redo logs, 4 KiB grains
//! vsansparse   delta objects, allocated in 4 MiB units
//! hosted       Workstation's sparse extents
//! stream       streamOptimized: compressed, written once from front to back
//! qcow2        QEMU's, to read
//! image        opening what a user names: which files belong together, which may be opened, and the chain they make
//! ova          no layer: the archive that carries streamOptimized disks with their description
//! ```
//!
//! A layer covers its own files only. It never looks at a parent: what it does not hold it calls
//! [`Content::Absent`], and the chain asks the layer below. What holds for every format:
//!
//! 1. Bytes of an image are untrusted. Each offset, size and count is checked before it is used, and what a header
//!    claims never decides how much memory is taken or how long a loop runs beyond the named limits.
//! 2. An image opened for reading is never changed, not even its "in use" mark.
//! 3. After [`Layer::flush`] everything written before it survives power loss: payload is durable before any table that
//!    names it is written. What was not flushed may be lost, whole or in part by sectors, and a crash leaves at worst
//!    space that nothing names.
//! 4. A full file system refuses what needs room, before it is acknowledged ([`backing`]): a write, never a flush, an
//!    overwrite of what has its place, a discard or a close. [`ErrorKind::NoSpace`] leaves a layer as it was, open for
//!    what fits.
//! 5. A range is never called [`Content::Data`] before its bytes are in the file, so that reads need no lock: the map
//!    is asked first, the I/O is done without it. Places are not reused while [`Layer::epoch`] of an older answer is
//!    held ([`epochs`], [`retirement`]).
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

/// The unit in which VMware's formats count.
pub const SECTOR: u64 = 512;

/// Largest capacity of any layer, in bytes: 64 TiB.
pub const CAPACITY_MAX: u64 = 64 << 40;

/// The part of a discard that is tried by itself where the whole finds no room: what a table maps in most formats.
const DISCARD_PART: u64 = 2 << 20;

/// A block of the file system, at the most.
const BLOCK: u64 = 4096;
/// Extents asked for at a time where a range is looked through.
const EXTENTS_AT_A_TIME: usize = 256;

/// What a layer has at a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: the parent's content shows through, or zeros where there is no parent.
    Absent,
    /// Zeros that hide the parent.
    Zero,
    /// Bytes as they are, at `offset` of file number `file` of this layer.
    Data {
        /// Which of the layer's files, as [`Layer::file`] counts them.
        file: u16,
        /// Byte offset in it.
        offset: u64,
    },
    /// Bytes that only [`Layer::read_encoded`] can deliver: compressed grains.
    Encoded,
}

/// A run of bytes with one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Byte offset in the layer.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// What is there.
    pub content: Content,
}

/// Figures of a layer that are shown to users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that its files take in the file system.
    pub allocated: u64,
    /// Bytes of guest data that it holds, in whole grains.
    pub mapped: u64,
    /// Bytes in its files that nothing names any more: what wipe and shrink can return.
    pub dead: u64,
}

/// One level of a chain. All methods may be called from any thread at once. Ranges are bytes within the capacity, at
/// any multiple of 512 for reading and of [`Layer::grain`] for changing, but for the end of the layer.
pub trait Layer: Send + Sync {
    /// Capacity in bytes.
    fn capacity(&self) -> u64;

    /// Unit of mapping in bytes: changes cover whole grains, the chain fills partial ones up from the parent.
    fn grain(&self) -> u64;

    /// The name of the format, as `lamina convert -d` takes it.
    fn format(&self) -> &'static str;

    /// True when it was opened for writing.
    fn writable(&self) -> bool;

    /// Appends what `range` is: extents in order, adjoining, beginning at `range.start`, equal neighbours merged where
    /// that is cheap. May stop early, after `most` extents and at least one.
    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()>;

    /// File number `index`, as [`Content::Data`] names it.
    fn file(&self, index: u16) -> Result<&Arc<dyn File>>;

    /// The caller of [`Layer::map`] holds this while it uses the answer: freed places wait for it. Taken **before** the
    /// map is asked. `None` where places are never reused.
    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
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

    /// Writes sectors, the slices one after another at `start`, where this layer holds every grain they touch as
    /// [`Content::Data`] and writes in place: a small write into a large grain then costs what it is. `Ok(false)`, and
    /// nothing changed, where that is not so; the chain then fills the grains up and calls [`Layer::write`].
    fn overwrite(&self, start: u64, slices: &[&[u8]]) -> Result<bool> {
        let _ = (start, slices);
        Ok(false)
    }

    /// Makes whole grains read as zeros, hiding the parent. The space of what was there is given back where the format
    /// can say so (`unmap`), and may be kept where `keep` asks for it.
    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        let _ = (range, keep);
        Err(read_only(self.format()))
    }

    /// Makes whole grains read as zeros as far as that needs no room, and gives their space back: what finds no room
    /// keeps its content. Says whether all of it is zeros now.
    fn discard(&self, range: Range<u64>) -> Result<bool> {
        match self.zero(range.clone(), false) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {}
            other => return other.map(|()| true),
        }
        // Some parts may have what others lack.
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

    /// Bytes of the file system, at the most, that writing all of a range of whole grains would take: what a copy into
    /// this layer needs, found out before it is begun.
    fn room_needed(&self, range: Range<u64>) -> Result<u64> {
        let mut extents = Vec::new();
        let (mut at, mut needed) = (range.start, 0);
        while at < range.end {
            extents.clear();
            self.map(at..range.end, EXTENTS_AT_A_TIME, &mut extents)?;
            for extent in &extents {
                let has_place = matches!(extent.content, Content::Data { .. } | Content::Encoded);
                if !has_place {
                    // Its first and last bytes may be alone in a block of the file system.
                    let end = extent.start.saturating_add(extent.length);
                    needed += end.next_multiple_of(BLOCK) - extent.start / BLOCK * BLOCK;
                }
            }
            at = extents.last().map_or(range.end, |last| last.start.saturating_add(last.length).max(at + 1));
        }
        Ok(needed)
    }

    /// Bytes of the disk that one table of the format maps, and bytes that a new table takes with its copies: what a
    /// write to a part without a table takes beside [`Layer::room_needed`]. No bytes for formats without tables.
    fn table_size(&self) -> (u64, u64) {
        (u64::MAX, 0)
    }

    /// Takes the space of a range before it is written, where the format can say which that is; what is read stays the
    /// same.
    fn take_room(&self, range: Range<u64>) -> Result<()> {
        let _ = range;
        Ok(())
    }

    /// Makes everything written before this call durable.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Flushes, and marks the image as closed properly. Later changes fail.
    fn close(&self) -> Result<()> {
        self.flush()
    }

    /// Figures for people.
    fn usage(&self) -> Result<Usage>;
}

/// The error for changing what is only read.
pub(crate) fn read_only(format: &str) -> Error {
    Error::new(ErrorKind::ReadOnly, format!("this {format} image is open for reading only"))
}

/// The answer of [`Layer::file`] for a layer that is one file.
pub(crate) fn only_file<'a>(index: u16, file: &'a Arc<dyn File>, image: &str) -> Result<&'a Arc<dyn File>> {
    match index {
        0 => Ok(file),
        _ => Err(Error::new(ErrorKind::Invalid, format!("{image}: it has one file only"))),
    }
}
