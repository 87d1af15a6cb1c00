//! Flat extents, which store the disk's bytes unchanged: raw files, and the flat extents of Workstation and VMFS.
//!
//! The file contains the disk, or a part of it, from a given offset on; there is no header and no table. The
//! provisioning type describes the allocation in the file system:
//!
//! ```text
//! thin                holes where no data was written; zeroing frees the space
//! zeroed thick        all space reserved; blocks never written are unwritten extents of the file system
//! eager zeroed thick  all space reserved and written
//! ```
//!
//! [docs/format/flat.md](../../../../docs/format/flat.md) describes the effect of each operation on the allocation, and
//! how VMware's counters follow from it. Invariants:
//!
//! 1. A flat extent has no parent: blocks never written read as zeros.
//! 2. The counters ([`Flat::counters`]) are exact whenever no change is under way, and after each opening: see
//!    [`blocks`] for the model and [`locks`] for the changes that may run at the same time.
//! 3. Filling ([`Flat::fill`]) and punching ([`Flat::punch_zeros`]) never change the content, also during guest writes
//!    and across power cuts.
//! 4. After a failed flush the state of earlier writes is unknown: every later change and flush fails until the image
//!    is opened again.

mod blocks;
mod create;
mod fill;
mod locks;
mod punch;
mod room;
mod zero;

#[cfg(test)]
mod tests;

pub use blocks::FILE_BLOCK;
pub use create::{NewDisk, NewKind, create, create_raw};
pub(crate) use create::{SPLIT_SECTORS, check_capacity, fill_extent};

use crate::{CAPACITY_MAX, Content, Error, ErrorKind, Extent, IoContext, Layer, Result, SECTOR, Usage, read_only};
use backend::{BLOCK_SIZE, Buffer, File, IoMode};
use blocks::{BlockType, Blocks};
use error::text::size;
use locks::Locks;
use parking_lot::{Mutex, MutexGuard};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

/// The provisioning type of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provisioning {
    /// Space is allocated on first write.
    Thin,
    /// Space is allocated at creation, and zeroed on first write.
    ZeroedThick,
    /// Space is allocated and zeroed at creation.
    EagerZeroedThick,
}

impl Provisioning {
    const ALL: [Self; 3] = [Self::Thin, Self::ZeroedThick, Self::EagerZeroedThick];

    /// The name that `vmkfstools -d` and `lamina` accept.
    pub fn name(self) -> &'static str {
        match self {
            Self::Thin => "thin",
            Self::ZeroedThick => "zeroedthick",
            Self::EagerZeroedThick => "eagerzeroedthick",
        }
    }
}

/// VMware's counters for a flat extent, in blocks of [`FILE_BLOCK`] bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of blocks that the extent covers.
    pub blocks: u64,
    /// `nb`: number of blocks that have space.
    pub nb: u64,
    /// `tbz`: number of blocks that have space and have to be zeroed when they are first written.
    pub tbz: u64,
}

impl std::ops::Add for Counters {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { blocks: self.blocks + other.blocks, nb: self.nb + other.nb, tbz: self.tbz + other.tbz }
    }
}

/// The location of an extent in its file, and how it is opened.
#[derive(Clone, Copy, Debug)]
pub struct FlatOptions {
    /// Where the extent begins in the file, in bytes.
    pub offset: u64,
    /// Length of the extent in bytes; `None` for everything in the file after `offset`, rounded up to sectors.
    pub capacity: Option<u64>,
    /// Whether the extent may be changed.
    pub writable: bool,
    /// Whether the descriptor marks the disk as thin. A file without this mark and without holes counts as thick.
    pub thin: bool,
}

/// Values of `state` in [`Flat`]: only an extent in state `OPEN` can be changed.
const OPEN: u8 = 0;
const CLOSED: u8 = 1;
const FAILED: u8 = 2;

/// An open flat extent.
pub struct Flat {
    name: String,
    file: Arc<dyn File>,
    /// The extent's bytes in the file.
    bytes: Range<u64>,
    /// Whether the extent ends with the file, so that no other extent shares its last page.
    owns_tail: bool,
    writable: bool,
    /// Index in [`Provisioning::ALL`].
    provisioning: AtomicU8,
    state: AtomicU8,
    blocks: Blocks,
    locks: Locks,
    /// Held during filling and punching, so that only one of them runs at a time.
    work: Mutex<()>,
    /// Held during a flush. The file system reports a failed write-back to one flush only, so that another one at the
    /// same time would succeed.
    flushing: Mutex<()>,
}

impl Flat {
    /// Opens the extent in `file`; error messages call it `name`.
    ///
    /// # Errors
    /// `Corrupt` when the file is too short, `Invalid` when the extent's borders are not aligned for direct I/O.
    pub fn open(file: Arc<dyn File>, name: &str, options: FlatOptions) -> Result<Arc<Self>> {
        let length = file.len().during(|| format!("querying the length of '{name}'"))?;
        let too_short = || {
            let wanted = options.capacity.map_or(options.offset, |capacity| options.offset.saturating_add(capacity));
            let text = format!("'{name}' is truncated: it has {length} bytes, and its extent reaches to byte {wanted}");
            Error::new(ErrorKind::Corrupt, text)
        };
        let capacity = match options.capacity {
            Some(capacity) => capacity,
            None => length.checked_sub(options.offset).ok_or_else(too_short)?.next_multiple_of(SECTOR),
        };
        if capacity == 0 || capacity > CAPACITY_MAX || !capacity.is_multiple_of(SECTOR) {
            let (largest, capacity) = (size(CAPACITY_MAX), size(capacity));
            let text = format!("'{name}' contains {capacity}; a disk has whole sectors of 512 bytes up to {largest}");
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let end = options.offset.checked_add(capacity).ok_or_else(too_short)?;
        if options.capacity.is_some() && end > length {
            return Err(too_short());
        }
        let aligned = options.offset.is_multiple_of(BLOCK_SIZE as u64) && capacity.is_multiple_of(BLOCK_SIZE as u64);
        if file.mode() == IoMode::Direct && !aligned {
            let text = format!("'{name}' does not begin and end at multiples of 4 KiB: open it for buffered I/O");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let bytes = options.offset..end;
        let blocks = Blocks::new(bytes.clone());
        blocks.load(&*file, name)?;
        let (nb, tbz) = blocks.counters();
        let provisioning = match tbz {
            _ if options.thin || nb < blocks.count() => Provisioning::Thin,
            0 => Provisioning::EagerZeroedThick,
            _ => Provisioning::ZeroedThick,
        };
        Ok(Arc::new(Self {
            name: name.to_owned(),
            file,
            owns_tail: length <= bytes.end,
            bytes,
            writable: options.writable,
            provisioning: AtomicU8::new(provisioning as u8),
            state: AtomicU8::new(OPEN),
            blocks,
            locks: Locks::new(),
            work: Mutex::new(()),
            flushing: Mutex::new(()),
        }))
    }

    /// The I/O mode for an extent at `offset` of `capacity` bytes: `wanted`, or buffered if the extent's borders are
    /// not aligned for direct I/O.
    pub fn mode_for(wanted: IoMode, offset: u64, capacity: u64) -> IoMode {
        let block = BLOCK_SIZE as u64;
        let aligned = offset.is_multiple_of(block) && capacity.is_multiple_of(block);
        if aligned { wanted } else { IoMode::Buffered }
    }

    /// The current provisioning type.
    pub fn provisioning(&self) -> Provisioning {
        let index = usize::from(self.provisioning.load(Ordering::SeqCst));
        Provisioning::ALL.get(index).copied().unwrap_or(Provisioning::Thin)
    }

    fn set_provisioning(&self, provisioning: Provisioning) {
        self.provisioning.store(provisioning as u8, Ordering::SeqCst);
    }

    /// VMware's counters, kept up to date by every change.
    pub fn counters(&self) -> Counters {
        let (nb, tbz) = self.blocks.counters();
        Counters { blocks: self.blocks.count(), nb, tbz }
    }

    /// Number of contiguous runs of the extent on the device; `None` if the file system does not report them.
    pub fn fragments(&self) -> Result<Option<u64>> {
        let mut runs = 0u64;
        let mut known = true;
        let mut expected = None;
        let mut at = self.bytes.start;
        while at < self.bytes.end {
            let placements =
                self.file.placements(at).during(|| format!("querying where the bytes of '{}' are", self.name))?;
            let Some(last) = placements.last() else { break };
            at = last.range.end.max(at + 1);
            for placement in placements.iter().filter(|placement| placement.range.start < self.bytes.end) {
                known &= placement.physical.is_some();
                if expected.is_none() || expected != placement.physical {
                    runs += 1;
                }
                expected = placement.physical.map(|from| from + (placement.range.end - placement.range.start));
            }
        }
        Ok(known.then_some(runs))
    }

    /// Checks a range of the extent, and returns its bytes in the file.
    fn checked(&self, start: u64, length: u64) -> Result<Range<u64>> {
        let end = start.checked_add(length).filter(|end| *end <= self.capacity());
        match end {
            Some(end) => Ok(self.bytes.start + start..self.bytes.start + end),
            None => {
                let text = format!("{length} bytes at {start} reach past the end of '{}'", self.name);
                Err(Error::new(ErrorKind::Invalid, text))
            }
        }
    }

    /// As [`Flat::checked`], for changes.
    fn checked_change(&self, start: u64, length: u64) -> Result<Range<u64>> {
        self.check_open()?;
        let range = self.checked(start, length)?;
        let grain = self.grain();
        if !start.is_multiple_of(grain) || !(length.is_multiple_of(grain) || start + length == self.capacity()) {
            let text = format!("a change of {length} bytes at {start} of '{}' is not in whole grains", self.name);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(range)
    }

    /// Fails unless changes are allowed.
    fn check_open(&self) -> Result<()> {
        match self.state.load(Ordering::Acquire) {
            OPEN if self.writable => Ok(()),
            OPEN => Err(read_only(self.format())),
            CLOSED => Err(Error::new(ErrorKind::Invalid, format!("'{}' was closed", self.name))),
            _ => {
                let text = format!("'{}' accepts no changes, because a flush of it failed; open it again", self.name);
                Err(Error::new(ErrorKind::Stopped, text))
            }
        }
    }

    /// The bytes to punch for `part`. If the part ends with the file, they include the rest of the last page, which
    /// would stay allocated otherwise.
    fn whole_pages(&self, part: &Range<u64>) -> Range<u64> {
        match part.end == self.bytes.end && self.owns_tail {
            true => part.start..part.end.next_multiple_of(BLOCK_SIZE as u64),
            false => part.clone(),
        }
    }

    /// Begins filling or punching. Refused while either is under way, because each would undo the other.
    fn begin_work(&self) -> Result<MutexGuard<'_, ()>> {
        self.check_open()?;
        self.work
            .try_lock()
            .ok_or_else(|| Error::new(ErrorKind::Busy, format!("'{}' is being filled or punched already", self.name)))
    }

    /// Writes the slices at `range.start` of the file; unaligned ones are copied to aligned memory for direct I/O.
    fn put(&self, range: &Range<u64>, slices: &[&[u8]]) -> Result<()> {
        let aligned =
            |slice: &&[u8]| slice.len().is_multiple_of(BLOCK_SIZE) && slice.as_ptr().addr().is_multiple_of(BLOCK_SIZE);
        if self.file.mode() == IoMode::Buffered || slices.iter().all(aligned) {
            return self.file.write_at(slices, range.start, false).during(|| self.while_writing(range));
        }
        /// Bytes copied at a time.
        const COPY_MAX: usize = FILE_BLOCK as usize;
        let total = (range.end - range.start) as usize;
        let mut memory = Buffer::recycled(total.min(COPY_MAX).div_ceil(BLOCK_SIZE));
        let mut at = range.start;
        let mut filled = 0;
        for mut slice in slices.iter().copied() {
            while !slice.is_empty() {
                let (part, rest) = slice.split_at(slice.len().min(memory.len() - filled));
                memory[filled..filled + part.len()].copy_from_slice(part);
                filled += part.len();
                slice = rest;
                let whole = filled == memory.len() || at + filled as u64 == range.end;
                if whole {
                    self.file.write_at(&[&memory[..filled]], at, false).during(|| self.while_writing(range))?;
                    at += filled as u64;
                    filled = 0;
                }
            }
        }
        Ok(())
    }

    fn while_writing(&self, range: &Range<u64>) -> String {
        let start = range.start - self.bytes.start;
        format!("writing {} bytes at {start} of '{}'", range.end - range.start, self.name)
    }

    /// Writes guest data: locks the blocks shared, and marks them as written.
    fn write_shared(&self, range: &Range<u64>, slices: &[&[u8]]) -> Result<()> {
        let blocks = self.blocks.touched(range);
        let shared = self.locks.share(blocks.clone());
        match self.put(range, slices) {
            Ok(()) => {
                self.blocks.write(blocks);
                Ok(())
            }
            Err(error) => {
                // A part of the data may have been written, with newly allocated space.
                drop(shared);
                self.look_again(blocks);
                Err(error)
            }
        }
    }

    /// Loads the state of blocks from the file system after a change of these blocks failed.
    fn look_again(&self, blocks: Range<u64>) {
        for block in blocks {
            let alone = self.locks.alone(block..block + 1);
            if self.blocks.state(block) != BlockType::Written {
                self.blocks.set(block, self.look(block).unwrap_or(BlockType::Written));
            }
            drop(alone);
        }
    }

    /// The state of one block according to the file system.
    fn look(&self, block: u64) -> std::io::Result<BlockType> {
        let bytes = self.blocks.bytes_of(block..block + 1);
        let mut state = BlockType::Hole;
        let mut at = bytes.start;
        while at < bytes.end {
            let placements = self.file.placements(at)?;
            let Some(last) = placements.last() else { break };
            at = last.range.end.max(at + 1);
            for placement in placements.iter().filter(|placement| placement.range.start < bytes.end) {
                match placement.written {
                    true => return Ok(BlockType::Written),
                    false => state = BlockType::Unwritten,
                }
            }
        }
        Ok(state)
    }
}

impl Layer for Flat {
    fn capacity(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    fn grain(&self) -> u64 {
        match self.file.mode() {
            IoMode::Buffered => SECTOR,
            IoMode::Direct => BLOCK_SIZE as u64,
        }
    }

    fn format(&self) -> &'static str {
        self.provisioning().name()
    }

    fn writable(&self) -> bool {
        self.writable
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        let bytes = self.checked(range.start, range.end.saturating_sub(range.start))?;
        let blocks = self.blocks.touched(&bytes);
        let (mut block, mut at) = (blocks.start, bytes.start);
        let mut left = most.max(1);
        while at < bytes.end && left > 0 {
            let (written, end) = self.blocks.written_run(block, blocks.end);
            let to = self.blocks.bytes_of(block..end).end.min(bytes.end);
            let content = if written { Content::Data { file: 0, offset: at } } else { Content::Zero };
            out.push(Extent { start: at - self.bytes.start, length: to - at, content });
            (block, at) = (end, to);
            left -= 1;
        }
        Ok(())
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        match index {
            0 => Ok(&self.file),
            _ => Err(Error::new(ErrorKind::Invalid, format!("'{}' has one file, and no number {index}", self.name))),
        }
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        let length = slices.iter().map(|slice| slice.len() as u64).sum();
        let range = self.checked_change(start, length)?;
        if length == 0 {
            return Ok(());
        }
        self.write_shared(&range, slices)
    }

    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        let bytes = self.checked_change(range.start, range.end.saturating_sub(range.start))?;
        self.zero_bytes(&bytes, keep)
    }

    fn room_needed(&self, range: Range<u64>) -> Result<u64> {
        self.holes_of(&self.checked(range.start, range.end.saturating_sub(range.start))?)
    }

    fn take_room(&self, range: Range<u64>) -> Result<()> {
        self.take_holes_of(&self.checked_change(range.start, range.end.saturating_sub(range.start))?)
    }

    fn flush(&self) -> Result<()> {
        if !self.writable {
            return Ok(());
        }
        let _flushing = self.flushing.lock();
        // The image may have been closed since the caller has found something to flush.
        if self.state.load(Ordering::Acquire) != CLOSED {
            self.check_open()?;
        }
        self.file.sync().map_err(|error| {
            self.state.store(FAILED, Ordering::Release);
            Error::io(format!("flushing '{}'; it takes no more changes until it is opened again", self.name), error)
        })
    }

    fn has_stopped(&self) -> bool {
        self.state.load(Ordering::Acquire) == FAILED
    }

    fn close(&self) -> Result<()> {
        if self.state.load(Ordering::Acquire) == CLOSED {
            return Ok(());
        }
        self.flush()?;
        self.state.store(CLOSED, Ordering::Release);
        Ok(())
    }

    fn usage(&self) -> Result<Usage> {
        let allocated = self.file.allocated().during(|| format!("querying the space of '{}'", self.name))?;
        let Counters { nb, tbz, .. } = self.counters();
        let mapped = (nb - tbz.min(nb)).saturating_mul(FILE_BLOCK).min(self.capacity());
        Ok(Usage { allocated, mapped, dead: 0 })
    }
}

/// A file block of zeros, aligned for direct I/O.
fn zeros() -> &'static Buffer {
    static ZEROS: OnceLock<Buffer> = OnceLock::new();
    ZEROS.get_or_init(|| Buffer::with_bytes(FILE_BLOCK as usize))
}

/// The error of work that was cancelled.
fn interrupted(what: &str, name: &str) -> Error {
    Error::new(
        ErrorKind::Interrupted,
        format!("{what} '{name}' was stopped; its changes so far are kept, and it can be repeated"),
    )
}
