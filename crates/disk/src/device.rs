//! What an export serves: a range of bytes that can be read, written, discarded and flushed.
//!
//! Reads come in two steps so that the exporter decides how to wait: [`Device::plan_read`] asks the map (short, never
//! waits for data), the exporter fetches the [`Segment::Media`] parts in its own way (at once from the page cache, or
//! through its [`backend::Queue`]), and [`Device::finish_read`] verifies every block against its checksum.

use backend::{BLOCK_SIZE, Buffer};
use error::Result;

pub use store::engine::{Media, Segment, Verdict};

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
    /// Keeps freed blocks from being reused under this read.
    pub guard: Option<Box<dyn std::any::Any + Send>>,
}

impl ReadPlan {
    /// The bytes of the reply, slice by slice, in order. Call after a finished read.
    pub fn slices(&self) -> Vec<&[u8]> {
        static ZEROS: [u8; 16 * BLOCK_SIZE] = [0; 16 * BLOCK_SIZE];
        let mut out: Vec<&[u8]> = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            match segment {
                Segment::Zero { length } => {
                    let mut left = *length;
                    while left > 0 {
                        let part = left.min(ZEROS.len());
                        out.push(&ZEROS[..part]);
                        left -= part;
                    }
                }
                Segment::Memory(slice) => out.push(slice),
                Segment::Media(media) => out.push(media.contents()),
            }
        }
        let (mut skip, mut left) = (self.skip, self.length);
        out.retain_mut(|slice| {
            let from = skip.min(slice.len());
            skip -= from;
            let part = left.min(slice.len() - from);
            left -= part;
            *slice = &slice[from..from + part];
            part > 0
        });
        out
    }

    /// The checksum of the reply. Call after a finished read.
    pub fn checksum(&self) -> u32 {
        // What was verified block by block just now need not be summed again.
        let mut known = Vec::with_capacity(self.length / BLOCK_SIZE);
        for segment in &self.segments {
            match segment {
                Segment::Media(media) if media.checksums.len() * BLOCK_SIZE == media.length => {
                    known.extend_from_slice(&media.checksums);
                }
                _ => break,
            }
        }
        match self.skip == 0 && known.len() * BLOCK_SIZE == self.length {
            true => store::checksum_of_blocks(known),
            false => store::checksum_of(&self.slices()),
        }
    }
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

    /// Verifies what was fetched. A block that fails its checksum twice is `Corrupt`: counted and logged.
    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict>;

    /// Writes `length` bytes at `offset`. Byte `i` of `data` belongs at device offset `round_down(offset, 4096) + i`:
    /// the bytes to write are `data[offset % 4096..][..length]`, the rest of the buffer is ignored. With `fua` it is
    /// durable on return. May wait while the write buffer is full.
    fn write(&self, offset: u64, data: Buffer, length: usize, fua: bool) -> Result<()>;

    /// How full the write buffer is, in percent: background work lets it empty first.
    fn pressure(&self) -> u32 {
        0
    }

    /// Gives a range back: it reads as zeros afterwards, but for what a full file system has no room to say that of.
    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()>;

    /// Makes a range read as zeros. With `allocate` it keeps or takes space so that later writes there cannot run out.
    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()>;

    /// Makes everything acknowledged before, by whatever connection, durable.
    fn flush(&self) -> Result<()>;

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

    /// Reads into memory at once: for callers without a queue.
    fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        loop {
            let mut plan = self.plan_read(offset, length)?;
            for segment in &mut plan.segments {
                if let Segment::Media(media) = segment {
                    let mut buffer = Buffer::with_bytes(media.length);
                    media.file.read_at(&mut buffer, media.offset).map_err(|e| {
                        error::Error::io(format!("reading {} bytes at {offset} of {}", media.length, self.name()), e)
                    })?;
                    media.buffer = Some(buffer);
                }
            }
            if self.finish_read(&mut plan)? == Verdict::Good {
                return Ok(plan.slices().concat());
            }
        }
    }
}
