//! The interface between disks and exports: a range of bytes that can be read, written, discarded and flushed.
//!
//! A read has two steps, so that the exporter decides how it waits. [`Device::plan_read`] looks up the map without
//! waiting for data. The exporter then fetches the [`Segment::Media`] parts, directly if they are in the page cache,
//! otherwise through its [`backend::Queue`]. [`Device::finish_read`] verifies or decodes the fetched bytes.
//!
//! 1. Offset and length of the fetched bytes may differ from those of the delivered bytes: a file opened with O_DIRECT
//!    can be read only in whole blocks, and encoded data is shorter than its decoded form. [`Media`] has both ranges.
//! 2. The checksums for the verification are in the guard of the plan, which only the device uses.

use crate::full::SpaceWait;
use backend::{BLOCK_SIZE, Buffer, File, SharedSlice};
use error::{Error, Result};
use std::any::Any;
use std::io;
use std::ops::Range;
use std::sync::Arc;

static ZEROS: [u8; 16 * BLOCK_SIZE] = [0; 16 * BLOCK_SIZE];

/// A part of a planned read.
pub enum Segment {
    /// A range that reads as zeros.
    Zero {
        /// Length in bytes.
        length: usize,
    },
    /// Bytes that are in memory already.
    Memory(SharedSlice),
    /// Bytes in a file, which the exporter fetches.
    Media(Media),
}

/// A part of a file that contains the bytes of a segment.
pub struct Media {
    /// The file that contains the bytes.
    pub file: Arc<dyn File>,
    /// Byte offset in the file: a multiple of 4 KiB if the file is opened with O_DIRECT, otherwise of 512 bytes.
    pub offset: u64,
    /// Bytes to fetch from `offset`.
    pub length: usize,
    /// The memory into which the caller writes the fetched bytes: `length` bytes, rounded up to whole blocks.
    /// [`Device::finish_read`] may replace them by their decoded form.
    pub buffer: Option<Buffer>,
    /// The bytes of `buffer` that belong to the reply, once the read is finished.
    pub delivered: Range<usize>,
    /// CRC32C of each delivered block, if the device verifies blocks one by one.
    pub verified: Option<Vec<u32>>,
    /// Whether the device verifies each fetched block, and may not need all of them. Then blocks of 4 KiB that cannot
    /// be read may be zeros in `buffer`.
    pub may_lack_blocks: bool,
}

impl Media {
    /// A part of a file from which the fetched bytes are delivered unchanged.
    pub fn new(file: Arc<dyn File>, offset: u64, length: usize) -> Self {
        Self { file, offset, length, buffer: None, delivered: 0..length, verified: None, may_lack_blocks: false }
    }

    /// Reads the bytes into `buffer`, and blocks until they are read.
    pub fn read_into(&self, buffer: &mut [u8]) -> io::Result<()> {
        match self.file.read_at(buffer, self.offset) {
            Err(error) if self.may_lack_blocks => self.read_again_into(buffer, &error),
            read => read,
        }
    }

    /// As [`Media::read_into`], after a read of all bytes has failed with `error`.
    pub fn read_again_into(&self, buffer: &mut [u8], error: &io::Error) -> io::Result<()> {
        tracing::warn!(offset = self.offset, length = self.length, %error, "a part of a pack cannot be read");
        self.file.read_readable_at(buffer, self.offset)
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
    /// The segments contain the content of the range.
    Good,
    /// The range was changed during the read: the caller has to plan the read again.
    Again,
}

/// A planned read. While it exists, no location that it names is reused for other data.
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
    /// Data of the device for the read. Until the guard is dropped, no location in the plan is reused for other data.
    pub guard: Option<Box<dyn Any + Send>>,
}

impl ReadPlan {
    /// The parts of the reply: the index of each segment, and the range of its bytes that belongs to the reply.
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

    /// True if the segments have every byte of the reply in memory. Call this after a finished read.
    pub fn is_whole(&self) -> bool {
        let there = |(index, range): (usize, Range<usize>)| match &self.segments[index] {
            Segment::Zero { .. } => range.len(),
            segment => segment.delivered().get(range).map_or(0, <[u8]>::len),
        };
        self.parts().map(there).sum::<usize>() == self.length
    }

    /// The bytes of the reply in order, as slices of the segments. Call this after a finished read.
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

    /// The CRC32C of the reply. Call this after a finished read.
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

    /// Fetches the parts that are in files, and blocks until they are read: for callers without a queue.
    pub fn fetch(&mut self) -> io::Result<()> {
        for segment in &mut self.segments {
            if let Segment::Media(media) = segment {
                let mut buffer = Buffer::recycled(media.length.div_ceil(BLOCK_SIZE));
                media.read_into(&mut buffer)?;
                media.buffer = Some(buffer);
            }
        }
        Ok(())
    }
}

/// A requested flush. [`Device::finish_flush`] completes it, on the thread that calls this method.
#[derive(Default)]
pub struct FlushTicket {
    /// The last acknowledged write that the flush covers, as a number that the device assigns.
    pub number: u64,
    /// Whether the flush is that of a client that can only read. A loss of acknowledged writes, which is reported once,
    /// is not reported by such a flush, because a client that writes has to learn of it.
    pub of_reader: bool,
    /// A value that the device needs until the flush has completed.
    pub guard: Option<Box<dyn Any + Send>>,
}

/// Allocation state of a range, for block status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// The range contains data.
    Data,
    /// The range occupies space and reads as zeros.
    Zero,
    /// The range occupies no space and reads as zeros.
    Hole,
}

/// A run of bytes with one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length in bytes.
    pub length: u64,
    /// Allocation state of all these bytes.
    pub allocation: Allocation,
}

/// A run of bytes that either all changed since a snapshot, or did not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyExtent {
    /// Length in bytes.
    pub length: u64,
    /// True if the range may differ from the snapshot.
    pub dirty: bool,
}

/// Identifies a snapshot of a disk, also after a later snapshot got its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseIdentity {
    /// The number of the snapshot in the disk's format.
    pub number: u64,
    /// When the snapshot was taken, in a unit of the format; 0 if numbers are never used again.
    pub created: u64,
}

/// A disk or snapshot opened for I/O. Offsets and lengths are bytes at any alignment; ranges must lie within the
/// capacity (`Invalid` otherwise). Every method may be called from any thread at once.
pub trait Device: Send + Sync {
    /// The name under which the device was opened: `disk` or `disk@snapshot`.
    fn name(&self) -> &str;

    /// Current capacity in bytes, which a resize changes.
    fn capacity(&self) -> u64;

    /// Whether writes are refused.
    fn read_only(&self) -> bool;

    /// Looks up where the bytes of a range are.
    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan>;

    /// Plans a read if that needs no metadata from the medium. Otherwise the device starts to read that metadata and
    /// returns `None`. The caller can then try other reads, so that the metadata of all of them is read concurrently.
    /// Afterwards the caller calls [`Device::load_for_read`] for each read, and tries again.
    fn try_plan_read(&self, offset: u64, length: usize) -> Result<Option<ReadPlan>> {
        self.plan_read(offset, length).map(Some)
    }

    /// Waits for the metadata that [`Device::try_plan_read`] missed. Further metadata, to which this metadata refers,
    /// may be missing then.
    fn load_for_read(&self, _offset: u64, _length: usize) -> Result<()> {
        Ok(())
    }

    /// Verifies the fetched bytes, and decodes them where they are encoded. A block whose checksum fails twice gives
    /// `Corrupt`, and is counted and logged.
    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict>;

    /// Writes bytes at an offset. `data` may have any alignment in memory. A device that buffers whole blocks need not
    /// copy them from `data` if `data` has the same position within a block of memory ([`SharedSlice::lead`]) as
    /// `offset` within a block of the disk. With `fua` the bytes are durable on return. The call may wait while the
    /// write buffer is full.
    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()>;

    /// What happens to writes that fail for lack of space ([`error::ErrorKind::NoSpace`]): with `None`, the error is
    /// passed to the client. Sessions carry out the policy; the device itself never waits for space.
    fn space_wait(&self) -> Option<&Arc<SpaceWait>> {
        None
    }

    /// Whether the device flushes its medium without a request, for changes that wait.
    fn is_flushing(&self) -> bool {
        false
    }

    /// Fill level of the write buffer in percent. Background work pauses while it is high.
    fn pressure(&self) -> u32 {
        0
    }

    /// Discards a range, which then reads as zeros. Parts of the range may keep their data if a full file system has no
    /// space to record the discard.
    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()>;

    /// Makes a range read as zeros. With `allocate` the range stays allocated or is allocated, so that later writes to
    /// it cannot fail for lack of space.
    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()>;

    /// Requests that all writes that were acknowledged before, on any connection, become durable. This call never
    /// waits.
    fn begin_flush(&self) -> Result<FlushTicket> {
        // A device that does not number its writes flushes all writes in `finish_flush`, which covers at least the
        // requested ones.
        Ok(FlushTicket::default())
    }

    /// Makes the writes that the ticket covers durable, or waits for another flush that covers them.
    fn finish_flush(&self, ticket: FlushTicket) -> Result<()>;

    /// Begins and finishes a flush on this thread.
    fn flush(&self) -> Result<()> {
        self.finish_flush(self.begin_flush()?)
    }

    /// How often the device is known to have lost acknowledged writes. A device may report a loss by its first flush
    /// and its first durable write only, whichever client they are for.
    fn losses(&self) -> u64 {
        0
    }

    /// Hints that a range will be read soon, so that the device can load it into its caches.
    fn prefetch(&self, offset: u64, length: u64) -> Result<()>;

    /// Grows or shrinks the disk.
    fn resize(&self, capacity: u64) -> Result<()>;

    /// Bytes that a resize to `capacity` maps at once, such as the new end of a thick disk.
    fn mapped_by_resize(&self, _capacity: u64) -> Result<u64> {
        Ok(0)
    }

    /// The allocation state of a range as at most `limit` extents, which cover the whole range unless the limit is
    /// reached.
    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>>;

    /// The snapshots that [`Device::changed_since`] accepts. Each has a [`Device::base_identity`].
    fn dirty_bases(&self) -> Vec<String>;

    /// The identity of the snapshot with this name; `None` if [`Device::changed_since`] does not accept the name.
    fn base_identity(&self, _base: &str) -> Option<BaseIdentity> {
        None
    }

    /// The ranges that changed since snapshot `base` of the same disk, as at most `limit` extents.
    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>>;

    /// Plans, fetches and finishes a read, blocking the thread: for callers without a queue.
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

    /// Reads into memory, blocking the thread.
    fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        Ok(self.read_plan(offset, length)?.slices().concat())
    }
}
