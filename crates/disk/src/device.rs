//! What an export serves: a range of bytes that can be read, written, discarded and flushed.
//!
//! Reads come in two steps so that the exporter decides how to wait: [`Device::plan_read`] asks the map (short, never
//! waits for data), the exporter fetches the [`Segment::Media`] parts in its own way (at once from the page cache, or
//! through its [`backend::Queue`]), and [`Device::finish_read`] makes of what was fetched what the reply delivers.
//!
//! 1. What is fetched and what is delivered may differ in place and length: a file past the page cache takes whole
//!    blocks only, and encoded data is shorter than what it decodes to. [`Media`] says both.
//! 2. What proves that fetched bytes are right is the device's own: it stays with the device, in the guard of the plan.

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
    /// Held in memory.
    Memory(SharedSlice),
    /// To be fetched from a medium.
    Media(Media),
}

/// A part of a file that holds a segment.
pub struct Media {
    /// The file.
    pub file: Arc<dyn File>,
    /// Byte offset in it: a multiple of 4 KiB in every file past the page cache, of 512 bytes elsewhere.
    pub offset: u64,
    /// Bytes to fetch from there.
    pub length: usize,
    /// Where the caller puts what it fetched: `length` bytes, rounded up to whole blocks. [`Device::finish_read`] may
    /// put what they decode to in their place.
    pub buffer: Option<Buffer>,
    /// Which bytes of `buffer` the reply gets when the read is finished.
    pub delivered: Range<usize>,
    /// CRC32C of each delivered block, where the device has verified block by block.
    pub verified: Option<Vec<u32>>,
}

impl Media {
    /// A part that is delivered as it is fetched.
    pub fn new(file: Arc<dyn File>, offset: u64, length: usize) -> Self {
        Self { file, offset, length, buffer: None, delivered: 0..length, verified: None }
    }

    /// What was fetched; nothing before.
    pub fn fetched(&self) -> &[u8] {
        self.buffer.as_deref().and_then(|bytes| bytes.get(..self.length)).unwrap_or(&[])
    }
}

impl Segment {
    /// The bytes for the reply, once the read is finished. None of zeros.
    pub fn delivered(&self) -> &[u8] {
        match self {
            Self::Zero { .. } => &[],
            Self::Memory(slice) => slice,
            Self::Media(media) => {
                media.buffer.as_deref().and_then(|bytes| bytes.get(media.delivered.clone())).unwrap_or(&[])
            }
        }
    }

    /// Length of what it delivers, in bytes.
    pub fn length(&self) -> usize {
        match self {
            Self::Zero { length } => *length,
            Self::Memory(slice) => slice.len(),
            Self::Media(media) => media.delivered.len(),
        }
    }
}

/// What the end of a read found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The segments deliver what the device holds.
    Good,
    /// The range changed under the read: plan it again.
    Again,
}

/// A read whose places are known. While it lives, no place it names is given to another owner.
pub struct ReadPlan {
    /// The parts in order; together they cover the request, widened to whole blocks, or to whole sectors where the
    /// device has no blocks.
    pub segments: Vec<Segment>,
    /// Bytes of the first parts that lie before the request.
    pub skip: usize,
    /// Length of the request in bytes.
    pub length: usize,
    /// Byte offset of the request.
    pub offset: u64,
    /// What the device keeps for the read: until it is finished, no place in the plan is given to another owner.
    pub guard: Option<Box<dyn Any + Send>>,
}

impl ReadPlan {
    /// What each segment contributes to the reply: its index, and which of its bytes.
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

    /// True when the segments have every byte of the reply in memory. Call after a finished read.
    pub fn is_whole(&self) -> bool {
        let there = |(index, range): (usize, Range<usize>)| match &self.segments[index] {
            Segment::Zero { .. } => range.len(),
            segment => segment.delivered().get(range).map_or(0, <[u8]>::len),
        };
        self.parts().map(there).sum::<usize>() == self.length
    }

    /// The bytes of the reply, slice by slice, in order. Call after a finished read.
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

    /// The checksum of the reply. Call after a finished read.
    pub fn checksum(&self) -> u32 {
        // What was verified block by block just now need not be summed again.
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

    /// Fetches what lies on media, at once: for callers without a queue.
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

/// A flush that was asked for. It completes in [`Device::finish_flush`], on whichever thread that is called.
#[derive(Default)]
pub struct FlushTicket {
    /// Which acknowledged writes it covers, as the device numbers them.
    pub number: u64,
    /// What the device keeps until it has completed.
    pub guard: Option<Box<dyn Any + Send>>,
}

/// What a range is, for block status.
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
    /// What it is.
    pub allocation: Allocation,
}

/// A run of bytes that changed, or did not, since a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyExtent {
    /// Length in bytes.
    pub length: u64,
    /// True when it may differ from the snapshot.
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

    /// Finds where a range is.
    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan>;

    /// Verifies what was fetched, and decodes it where it is encoded. A block that fails its checksum twice is
    /// `Corrupt`: counted and logged.
    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict>;

    /// Writes bytes at an offset. They may lie anywhere in memory; where they lie as far from the beginning of a block
    /// of memory ([`SharedSlice::lead`]) as `offset` from that of a block, a device that keeps them copies none of the
    /// whole blocks. With `fua` they are durable on return. May wait while the write buffer is full.
    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()>;

    /// How full the write buffer is, in percent: background work lets it empty first.
    fn pressure(&self) -> u32 {
        0
    }

    /// Gives a range back: it reads as zeros afterwards, but for what a full file system has no room to say that of.
    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()>;

    /// Makes a range read as zeros. With `allocate` it keeps or takes space so that later writes there cannot run out.
    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()>;

    /// Asks for everything acknowledged before, by whatever connection, to be made durable. Never waits.
    fn begin_flush(&self) -> Result<FlushTicket> {
        // A device without numbers of its own counts from when the flush is carried out: that covers no less.
        Ok(FlushTicket::default())
    }

    /// Waits until what the ticket covers is durable, and makes it so unless another flush does.
    fn finish_flush(&self, ticket: FlushTicket) -> Result<()>;

    /// Both at once, on this thread.
    fn flush(&self) -> Result<()> {
        self.finish_flush(self.begin_flush()?)
    }

    /// Brings a range towards the caches; a hint.
    fn prefetch(&self, offset: u64, length: u64) -> Result<()>;

    /// Grows or shrinks the disk.
    fn resize(&self, capacity: u64) -> Result<()>;

    /// What a range is, at most `limit` extents; covers the whole range unless the limit cut it.
    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>>;

    /// Names of the snapshots that [`Device::changed_since`] takes.
    fn dirty_bases(&self) -> Vec<String>;

    /// What changed since snapshot `base` of the same disk, at most `limit` extents.
    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>>;

    /// Plans, fetches and finishes a read at once: for callers without a queue.
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

    /// Reads into memory at once.
    fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        Ok(self.read_plan(offset, length)?.slices().concat())
    }
}
