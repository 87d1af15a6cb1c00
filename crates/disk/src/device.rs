//! The interface between disks and exports: a range of bytes that can be read, written, discarded and flushed.
//!
//! A read has two steps, so that the exporter decides how to wait. [`Device::plan_read`] looks up the map without
//! waiting for data. The exporter then fetches the [`Segment::Media`] parts, from the page cache at once or through its
//! [`backend::Queue`]. [`Device::finish_read`] verifies or decodes what was fetched.
//!
//! 1. Offset and length of what is fetched may differ from what is delivered: a file opened with O_DIRECT takes whole
//!    blocks only, and encoded data is shorter than its decoded form. [`Media`] has both.
//! 2. Checksums and whatever else verifies fetched data stay with the device, in the guard of the plan.

use backend::{BLOCK_SIZE, Buffer, File, SharedSlice};
use error::{Error, Result};
use std::any::Any;
use std::io;
use std::ops::Range;
use std::sync::Arc;

static ZEROS: [u8; 16 * BLOCK_SIZE] = [0; 16 * BLOCK_SIZE];

/// A part of a planned read.
pub enum Segment {
    /// Reads as zeros.
    Zero {
        /// Length in bytes.
        length: usize,
    },
    /// Bytes in memory.
    Memory(SharedSlice),
    /// Bytes in a file, which the exporter fetches.
    Media(Media),
}

/// A part of a file that holds a segment.
pub struct Media {
    /// The file.
    pub file: Arc<dyn File>,
    /// Byte offset in the file: a multiple of 4 KiB if the file is opened with O_DIRECT, otherwise of 512 bytes.
    pub offset: u64,
    /// Bytes to fetch from `offset`.
    pub length: usize,
    /// Where the caller puts the fetched bytes: `length` bytes, rounded up to whole blocks. [`Device::finish_read`] may
    /// replace them by their decoded form.
    pub buffer: Option<Buffer>,
    /// The bytes of `buffer` that belong to the reply, once the read is finished.
    pub delivered: Range<usize>,
    /// CRC32C of each delivered block, if the device verifies blocks one by one.
    pub verified: Option<Vec<u32>>,
}

impl Media {
    /// A part whose fetched bytes are delivered unchanged.
    pub fn new(file: Arc<dyn File>, offset: u64, length: usize) -> Self {
        Self { file, offset, length, buffer: None, delivered: 0..length, verified: None }
    }

    /// The fetched bytes; empty before they are fetched.
    pub fn fetched(&self) -> &[u8] {
        self.buffer.as_deref().and_then(|bytes| bytes.get(..self.length)).unwrap_or(&[])
    }
}

impl Segment {
    /// The bytes for the reply, once the read is finished. Empty for zeros.
    pub fn delivered(&self) -> &[u8] {
        match self {
            Self::Zero { .. } => &[],
            Self::Memory(slice) => slice,
            Self::Media(media) => {
                media.buffer.as_deref().and_then(|bytes| bytes.get(media.delivered.clone())).unwrap_or(&[])
            }
        }
    }

    /// Number of bytes that the segment delivers.
    pub fn length(&self) -> usize {
        match self {
            Self::Zero { length } => *length,
            Self::Memory(slice) => slice.len(),
            Self::Media(media) => media.delivered.len(),
        }
    }
}

/// The outcome of [`Device::finish_read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The segments hold the content of the range.
    Good,
    /// The range was changed during the read: plan the read again.
    Again,
}

/// A planned read. While it lives, no location that it names is reused for other data.
pub struct ReadPlan {
    /// The parts in order. Together they cover the request, widened to whole blocks, or to whole sectors on devices
    /// without blocks.
    pub segments: Vec<Segment>,
    /// Bytes at the beginning of the segments that lie before the request.
    pub skip: usize,
    /// Length of the request in bytes.
    pub length: usize,
    /// Byte offset of the request.
    pub offset: u64,
    /// What the device needs for the read. Until it is dropped, no location in the plan is reused for other data.
    pub guard: Option<Box<dyn Any + Send>>,
}

impl ReadPlan {
    /// The parts of the reply: the index of each segment, and which of its bytes.
    pub fn parts(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (mut skip, mut left) = (self.skip, self.length);
        self.segments.iter().enumerate().filter_map(move |(index, segment)| {
            let length = segment.length();
            let from = skip.min(length);
            skip -= from;
            let part = left.min(length - from);
            left -= part;
            (part > 0).then_some((index, from..from + part))
        })
    }

    /// True if the segments hold every byte of the reply in memory. Call after a finished read.
    pub fn is_whole(&self) -> bool {
        let there = |(index, range): (usize, Range<usize>)| match &self.segments[index] {
            Segment::Zero { .. } => range.len(),
            segment => segment.delivered().get(range).map_or(0, <[u8]>::len),
        };
        self.parts().map(there).sum::<usize>() == self.length
    }

    /// The bytes of the reply in order, as slices of the segments. Call after a finished read.
    pub fn slices(&self) -> Vec<&[u8]> {
        let mut out: Vec<&[u8]> = Vec::with_capacity(self.segments.len());
        for (index, range) in self.parts() {
            match &self.segments[index] {
                Segment::Zero { .. } => {
                    let mut left = range.len();
                    while left > 0 {
                        let part = left.min(ZEROS.len());
                        out.push(&ZEROS[..part]);
                        left -= part;
                    }
                }
                segment => out.push(&segment.delivered()[range]),
            }
        }
        out
    }

    /// The CRC32C of the reply. Call after a finished read.
    pub fn checksum(&self) -> u32 {
        // Checksums of blocks that were just verified are combined instead of being computed again.
        let mut known = Vec::with_capacity(self.length / BLOCK_SIZE);
        for segment in &self.segments {
            match segment {
                Segment::Media(Media { verified: Some(sums), .. }) => known.extend_from_slice(sums),
                _ => break,
            }
        }
        match self.skip == 0 && known.len() * BLOCK_SIZE == self.length {
            true => checksums::checksum_of_blocks(known),
            false => checksums::checksum_of(&self.slices()),
        }
    }

    /// Fetches the parts that lie in files, blocking: for callers without a queue.
    pub fn fetch(&mut self) -> io::Result<()> {
        for segment in &mut self.segments {
            if let Segment::Media(media) = segment {
                let mut buffer = Buffer::recycled(media.length.div_ceil(BLOCK_SIZE));
                media.file.read_at(&mut buffer, media.offset)?;
                media.buffer = Some(buffer);
            }
        }
        Ok(())
    }
}

/// A requested flush. It completes in [`Device::finish_flush`], on the thread that calls it.
#[derive(Default)]
pub struct FlushTicket {
    /// Which acknowledged writes the flush covers, as a number of the device.
    pub number: u64,
    /// What the device keeps until the flush has completed.
    pub guard: Option<Box<dyn Any + Send>>,
}

/// Allocation state of a range, for block status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Holds data.
    Data,
    /// Takes space and reads as zeros.
    Zero,
    /// Takes no space and reads as zeros.
    Hole,
}

/// A run of bytes with one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length in bytes.
    pub length: u64,
    /// Its state.
    pub allocation: Allocation,
}

/// A run of bytes that changed, or did not, since a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyExtent {
    /// Length in bytes.
    pub length: u64,
    /// True if the range may differ from the snapshot.
    pub dirty: bool,
}

/// A disk or snapshot opened for I/O. Offsets and lengths are bytes at any alignment; ranges must lie within the
/// capacity (`Invalid` otherwise). Every method may be called from any thread at once.
pub trait Device: Send + Sync {
    /// The name it was opened under: `disk` or `disk@snapshot`.
    fn name(&self) -> &str;

    /// Capacity in bytes, now: a resize changes it.
    fn capacity(&self) -> u64;

    /// True when writes are refused.
    fn read_only(&self) -> bool;

    /// Looks up where the bytes of a range are.
    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan>;

    /// Plans a read if that needs no metadata from the medium. Otherwise the device starts to read that metadata and
    /// returns `None`, so that the caller can try other reads meanwhile and have all of them wait for the medium at the
    /// same time: it then calls [`Device::load_for_read`] for each, and tries again.
    fn try_plan_read(&self, offset: u64, length: usize) -> Result<Option<ReadPlan>> {
        self.plan_read(offset, length).map(Some)
    }

    /// Waits for the metadata that [`Device::try_plan_read`] missed. More may be missing then, because metadata refers
    /// to metadata.
    fn load_for_read(&self, _offset: u64, _length: usize) -> Result<()> {
        Ok(())
    }

    /// Verifies the fetched bytes, and decodes them where they are encoded. A block whose checksum fails twice gives
    /// `Corrupt`, and is counted and logged.
    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict>;

    /// Writes bytes at an offset. `data` may have any alignment in memory. A device that keeps whole blocks of `data`
    /// copies none of them if the position of `data` within a block of memory ([`SharedSlice::lead`]) equals that of
    /// `offset` within a block. With `fua` the bytes are durable on return. May wait while the write buffer is full.
    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()>;

    /// Fill level of the write buffer in percent. Background work pauses while it is high.
    fn pressure(&self) -> u32 {
        0
    }

    /// Discards a range, which then reads as zeros. Parts of it may keep their data if a full file system has no room
    /// to record the discard.
    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()>;

    /// Makes a range read as zeros. With `allocate` the range keeps or gets space, so that later writes to it cannot
    /// fail for lack of space.
    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()>;

    /// Requests that all writes acknowledged before, on any connection, become durable. Never waits.
    fn begin_flush(&self) -> Result<FlushTicket> {
        // A device that does not number its writes flushes everything in `finish_flush`, which covers at least as much.
        Ok(FlushTicket::default())
    }

    /// Makes durable what the ticket covers, or waits for another flush that does.
    fn finish_flush(&self, ticket: FlushTicket) -> Result<()>;

    /// Begins and finishes a flush on this thread.
    fn flush(&self) -> Result<()> {
        self.finish_flush(self.begin_flush()?)
    }

    /// Hints that a range will be read soon, so that the device can load it into its caches.
    fn prefetch(&self, offset: u64, length: u64) -> Result<()>;

    /// Grows or shrinks the disk.
    fn resize(&self, capacity: u64) -> Result<()>;

    /// Allocation state of a range as at most `limit` extents, which cover the whole range unless the limit is reached.
    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>>;

    /// The snapshots that [`Device::changed_since`] accepts.
    fn dirty_bases(&self) -> Vec<String>;

    /// What changed since snapshot `base` of the same disk, at most `limit` extents.
    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>>;

    /// Plans, fetches and finishes a read, blocking: for callers without a queue.
    fn read_plan(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        loop {
            let mut plan = self.plan_read(offset, length)?;
            plan.fetch()
                .map_err(|error| Error::io(format!("reading {length} bytes at {offset} of {}", self.name()), error))?;
            if self.finish_read(&mut plan)? == Verdict::Good {
                return Ok(plan);
            }
        }
    }

    /// Reads into memory, blocking.
    fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        Ok(self.read_plan(offset, length)?.slices().concat())
    }
}
