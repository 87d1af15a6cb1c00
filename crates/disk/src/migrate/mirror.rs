//! A device over two copies of a disk, and the copier that makes the second one while clients use the first.
//!
//! ```text
//!   byte 0                    cursor                                  capacity
//!     | both copies are alike  |  target is as it began                  |
//!     +------------------------+-----------------------------------------+
//!   write:   source and target |  source only, and a mark in the work    ->  never waits but for an overlapping step
//!
//!   Copying ---- copy() at the end, settle() ----> Settled ---- commit() ----> Committed
//!      \------------ target failed, cancelled: drop it, the source is the disk as ever
//! ```
//!
//! 1. **Behind the cursor both copies are alike**, but for requests under way. A change holds its range from its
//!    first byte on the source to its last on the target, and so does each step of the copier; the cursor moves while
//!    the step's range is held. So changes of one place reach both copies in one order, and none is missed.
//! 2. **Ahead of the cursor the target is what it was.** A change that crosses the cursor reaches the target only up to
//!    it, so that what the copier need not look at (never written, or not different from the base) is right as it is.
//! 3. **A write acknowledged before [`MirrorDevice::settle`] has begun is in the target when it ends**, durably if it
//!    was flushed. From then on a flush covers both copies, so that the owner's record may turn at any moment.
//! 4. **The target may fail until the record has turned**: that ends the migration, never a request. While the record
//!    is being turned ([`MirrorDevice::commit`]), a request whose target part failed waits to learn which way it went.
//! 5. One step moves at most [`STEP_MAX`] with its range held, less where that takes long: a request waits for no more.

use super::work::Work;
use crate::device::{Device, DirtyExtent, FlushTicket, ReadPlan, StatusExtent, Verdict};
use backend::{BLOCK_SIZE, SharedSlice};
use chain::Ranges;
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use work::Progress;
use work::Throttle;

/// Bytes that one step of the copier moves, at the most and where steps turn out slow.
pub const STEP_MAX: u64 = 256 << 10;
///
/// No less than what a native target takes past its write buffer: a smaller step would wait, again and again, for room
/// in a buffer that the guest's own writes fill.
const STEP_MIN: u64 = 128 << 10;
/// A step that takes longer is followed by a smaller one.
const STEP_TIME: Duration = Duration::from_millis(10);
/// Bytes that the cursor passes at once where there is nothing to do.
const PASS_MAX: u64 = 64 << 20;
/// Bytes after which what was copied is made durable, so that no flush ever finds much of it left. A native target puts
/// what guests have in its write buffer into its journal each time, and writes it home once more later.
const CHECKPOINT: u64 = 32 << 20;
/// How full the target's write buffer may be, in percent, before the copier leaves the target to guests.
const PRESSURE_MAX: u32 = 25;
/// Between two looks whether it has emptied.
const PRESSURE_PAUSE: Duration = Duration::from_millis(2);
/// Bytes per second that the copier comes to, on the whole, however full the buffer stays: it ends.
const RATE_MIN: u64 = 32 << 20;
/// Largest part of a discard that holds its range at once.
const DISCARD_STEP: u64 = 16 << 20;
/// Extents asked for at a time.
const EXTENTS: usize = 1024;
/// Bytes asked about at a time.
const LOOK: u64 = 1 << 30;

/// What the target holds when the copying begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// Zeros.
    Zeros,
    /// Another state of the disk: it is read and compared, and only what differs is written.
    State,
}

/// What a copier did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Bytes of the source that were read.
    pub read: u64,
    /// Bytes written to the target, zeroed ones not counted.
    pub written: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Copying,
    Settled,
    Committed,
}

struct MirrorState {
    stage: Stage,
    /// Why the target is not a copy any more.
    failure: Option<Error>,
}

/// A disk between two copies. Serves as the source does; see the module for what it does with the target.
pub struct MirrorDevice {
    source: Arc<dyn Device>,
    target: Arc<dyn Device>,
    base: Base,
    capacity: u64,
    ranges: Ranges,
    cursor: AtomicU64,
    work: Work,
    /// Flushes cover the target.
    settled: AtomicBool,
    /// The target is not written any more.
    failed: AtomicBool,
    state: Mutex<MirrorState>,
}

/// The error of what was stopped on request.
pub(super) fn stopped() -> Error {
    Error::new(ErrorKind::Interrupted, "stopped on request; the disk is as before")
}

impl MirrorDevice {
    /// A mirror with nothing copied. From now on a write to the source that bypasses the mirror corrupts the copy.
    pub fn new(source: Arc<dyn Device>, target: Arc<dyn Device>, base: Base) -> Result<Self> {
        let capacity = source.capacity();
        if target.capacity() != capacity || target.read_only() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} of {capacity} bytes cannot be copied to {} of {} bytes{}",
                    source.name(),
                    target.name(),
                    target.capacity(),
                    if target.read_only() { ", which is open for reading only" } else { "" }
                ),
            ));
        }
        Ok(Self {
            work: Work::new(capacity),
            source,
            target,
            base,
            capacity,
            ranges: Ranges::default(),
            cursor: AtomicU64::new(0),
            settled: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            state: Mutex::new(MirrorState { stage: Stage::Copying, failure: None }),
        })
    }

    /// The disk as it is.
    pub fn source(&self) -> &Arc<dyn Device> {
        &self.source
    }

    /// The disk as it will be.
    pub fn target(&self) -> &Arc<dyn Device> {
        &self.target
    }

    /// Has the copier look at a range.
    pub fn mark(&self, range: Range<u64>) {
        self.work.mark(&range);
    }

    /// Has the copier look at everything that holds data. Maps are read without any lock: a write meanwhile marks its
    /// own range.
    pub fn mark_data(&self, progress: &dyn Progress) -> Result<()> {
        let mut at = 0;
        while at < self.capacity {
            if progress.cancelled() {
                return Err(stopped());
            }
            let extents = self.source.status(at, LOOK.min(self.capacity - at), EXTENTS)?;
            at = self.mark_extents(at, extents.iter().map(|e| (e.length, e.allocation == crate::Allocation::Data)))?;
        }
        Ok(())
    }

    /// Has the copier look at everything that may differ from snapshot `base` of the source.
    pub fn mark_changes(&self, base: &str, progress: &dyn Progress) -> Result<()> {
        let mut at = 0;
        while at < self.capacity {
            if progress.cancelled() {
                return Err(stopped());
            }
            let extents = self.source.changed_since(base, at, LOOK.min(self.capacity - at), EXTENTS)?;
            at = self.mark_extents(at, extents.iter().map(|extent| (extent.length, extent.dirty)))?;
        }
        Ok(())
    }

    /// Marks the extents from `at` on that are wanted; where they end.
    fn mark_extents(&self, from: u64, extents: impl Iterator<Item = (u64, bool)>) -> Result<u64> {
        let mut at = from;
        for (length, wanted) in extents {
            if wanted {
                self.work.mark(&(at..at + length));
            }
            at += length;
        }
        if at == from {
            let text = format!("{}: the source's map has no answer for byte {at}", self.source.name());
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        Ok(at)
    }

    /// Copies what is marked, front to back, and from then on keeps both copies alike. Once only.
    pub fn copy(&self, progress: &dyn Progress) -> Result<Copied> {
        let throttle = Throttle::new(progress);
        let began = Instant::now();
        let mut copied = Copied::default();
        let (mut step, mut unflushed) = (STEP_MAX, 0);
        let marked = self.work.bytes();
        let mut at = 0;
        while at < self.capacity {
            self.check()?;
            if progress.cancelled() {
                return Err(stopped());
            }
            let Some(run) = self.work.next(at, step).filter(|run| run.start == at) else {
                at = self.pass(at);
                continue;
            };
            let begun = Instant::now();
            let length = run.end - run.start;
            let written = {
                let _held = self.ranges.lock(run.clone());
                let written = self.copy_run(&run)?;
                self.cursor.store(run.end, Ordering::SeqCst);
                written
            };
            at = run.end;
            copied.read += length;
            copied.written += written;
            unflushed += written;
            step = match begun.elapsed() {
                slow if slow > STEP_TIME => (step / 2).max(STEP_MIN),
                fast if fast < STEP_TIME / 4 => (step * 2).min(STEP_MAX),
                _ => step,
            };
            if unflushed >= CHECKPOINT {
                unflushed = 0;
                self.target.flush()?;
            }
            progress.update(copied.read, marked.max(copied.read));
            if !throttle.wait(length) {
                return Err(stopped());
            }
            self.give_way(began, copied.read, progress)?;
        }
        self.check()?;
        progress.update(copied.read, copied.read);
        Ok(copied)
    }

    /// Leaves the target to guests while they fill its write buffer, unless the copier has fallen behind by that.
    fn give_way(&self, began: Instant, copied: u64, progress: &dyn Progress) -> Result<()> {
        let due = Duration::from_secs_f64(copied as f64 / RATE_MIN as f64);
        while self.target.pressure() > PRESSURE_MAX && began.elapsed() < due {
            std::thread::sleep(PRESSURE_PAUSE);
            self.check()?;
            if progress.cancelled() {
                return Err(stopped());
            }
        }
        Ok(())
    }

    /// Moves the cursor over what is not marked.
    fn pass(&self, at: u64) -> u64 {
        let until = |most: u64| self.work.next(at, 1).map_or(most, |run| run.start.min(most));
        let end = until(self.capacity.min(at + PASS_MAX));
        if end <= at {
            return at;
        }
        let _held = self.ranges.lock(at..end);
        // A write may have marked a piece of it before the range was locked.
        let end = until(end);
        self.cursor.store(end, Ordering::SeqCst);
        end
    }

    /// Makes the target like the source in a range that is held; bytes written.
    fn copy_run(&self, range: &Range<u64>) -> Result<u64> {
        let length = (range.end - range.start) as usize;
        let wanted = self.source.read(range.start, length)?;
        let present = match self.base {
            Base::Zeros => None,
            Base::State => Some(self.target.read(range.start, length)?),
        };
        let mut written = 0;
        let mut at = 0;
        while at < length {
            let kind = difference(&wanted, present.as_deref(), at);
            let begin = at;
            while at < length && difference(&wanted, present.as_deref(), at) == kind {
                at = (at + BLOCK_SIZE).min(length);
            }
            let offset = range.start + begin as u64;
            match kind {
                Difference::None => {}
                Difference::Zeroed => self.target.write_zeroes(offset, (at - begin) as u64, false, false)?,
                Difference::Data => {
                    // Runs begin at blocks: marks are whole ones, and so are steps but for the last.
                    self.target.write(offset, SharedSlice::copy_of(&wanted[begin..at]), false)?;
                    written += (at - begin) as u64;
                }
            }
        }
        Ok(written)
    }

    /// Ends with both copies durable and alike, and stays so: from here on a flush covers both.
    pub fn settle(&self) -> Result<()> {
        debug_assert_eq!(self.cursor.load(Ordering::SeqCst), self.capacity);
        // Most of the data, before flushes of clients have to wait for the target too.
        self.target.flush()?;
        self.settled.store(true, Ordering::SeqCst);
        self.target.flush()?;
        let mut state = self.state.lock();
        if let Some(error) = state.failure.take() {
            return Err(error);
        }
        state.stage = Stage::Settled;
        Ok(())
    }

    /// Turns the owner's record, durably, by `record`: after it the target is the disk. Where the target has failed
    /// before, `record` is not called. If `record` fails, the source is the disk: it must be sure of that.
    pub fn commit<T>(&self, record: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut state = self.state.lock();
        debug_assert_eq!(state.stage, Stage::Settled);
        if let Some(error) = state.failure.take() {
            return Err(error);
        }
        let outcome = record()?;
        state.stage = Stage::Committed;
        Ok(outcome)
    }

    /// Lets go of the target: what is under way may still reach it, nothing that begins later does.
    pub fn give_up(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    fn check(&self) -> Result<()> {
        if !self.failed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let failure = self.state.lock().failure.take();
        Err(failure.unwrap_or_else(stopped))
    }

    /// A change did not reach the target: the end of the migration, or of the request if the target is the disk.
    fn target_failed(&self, error: Error) -> Result<()> {
        let mut state = self.state.lock();
        if state.stage == Stage::Committed {
            return Err(error);
        }
        self.failed.store(true, Ordering::SeqCst);
        state.failure.get_or_insert(error.context(format_args!("writing to the new copy of {}", self.source.name())));
        Ok(())
    }

    /// The source may have changed in part: whether the target is equal to it is unknown.
    fn source_failed(&self, error: Error) -> Error {
        let mut state = self.state.lock();
        if state.stage != Stage::Committed {
            self.failed.store(true, Ordering::SeqCst);
            let text = format!("{} failed while it was copied: {error}", self.source.name());
            state.failure.get_or_insert_with(|| Error::new(error.kind(), text));
        }
        error
    }

    /// What of a held range the target has to be told, and a mark on the rest.
    fn mirrored(&self, range: &Range<u64>) -> u64 {
        let cursor = self.cursor.load(Ordering::SeqCst);
        if cursor < range.end {
            self.work.mark(&(range.start.max(cursor)..range.end));
        }
        if self.failed.load(Ordering::SeqCst) { 0 } else { range.end.min(cursor).saturating_sub(range.start) }
    }

    /// One change of a range: on the source, then as far as the cursor on the target.
    fn change(&self, range: Range<u64>, apply: impl Fn(&dyn Device, u64) -> Result<()>) -> Result<()> {
        let _held = self.ranges.lock(range.clone());
        let part = self.mirrored(&range);
        apply(&*self.source, range.end - range.start).map_err(|error| self.source_failed(error))?;
        if part > 0
            && let Err(error) = apply(&*self.target, part)
        {
            self.target_failed(error)?;
        }
        Ok(())
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.capacity => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{}: {length} bytes at offset {offset} lie past its capacity of {} bytes",
                    self.source.name(),
                    self.capacity
                ),
            )),
        }
    }

    fn check_writable(&self, offset: u64, length: u64) -> Result<()> {
        if self.source.read_only() {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open for reading only", self.source.name())));
        }
        self.check_range(offset, length)
    }

    fn finish(&self, fua: bool) -> Result<()> {
        if fua { self.flush() } else { Ok(()) }
    }

    /// Changes a long range part by part.
    fn change_long(&self, offset: u64, length: u64, apply: impl Fn(&dyn Device, u64, u64) -> Result<()>) -> Result<()> {
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let stop = ((at / DISCARD_STEP + 1) * DISCARD_STEP).min(end);
            self.change(at..stop, |device, part| apply(device, at, part))?;
            at = stop;
        }
        Ok(())
    }
}

/// What a block of the target needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Difference {
    None,
    Zeroed,
    Data,
}

fn difference(wanted: &[u8], present: Option<&[u8]>, at: usize) -> Difference {
    let end = (at + BLOCK_SIZE).min(wanted.len());
    let block = &wanted[at..end];
    match present {
        Some(present) if present[at..end] == *block => Difference::None,
        None if is_zero(block) => Difference::None,
        Some(_) if is_zero(block) => Difference::Zeroed,
        _ => Difference::Data,
    }
}

fn is_zero(block: &[u8]) -> bool {
    // In words, as the compiler does not by itself.
    let (words, rest) = block.as_chunks::<64>();
    words.iter().all(|word| word == &[0; 64]) && rest.iter().all(|byte| *byte == 0)
}

impl Device for MirrorDevice {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn read_only(&self) -> bool {
        self.source.read_only()
    }

    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.source.plan_read(offset, length)
    }

    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        self.source.finish_read(plan)
    }

    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        self.check_writable(offset, data.len() as u64)?;
        if !data.is_empty() {
            let range = offset..offset + data.len() as u64;
            let _held = self.ranges.lock(range.clone());
            let part = self.mirrored(&range);
            let mirrored = (part > 0).then(|| data.slice(0..part as usize));
            self.source.write(offset, data, false).map_err(|error| self.source_failed(error))?;
            if let Some(mirrored) = mirrored
                && let Err(error) = self.target.write(offset, mirrored, false)
            {
                self.target_failed(error)?;
            }
        }
        // The range is released first: another write to it does not wait for this one's flush.
        self.finish(fua)
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.check_writable(offset, length)?;
        // Both sides have to read alike afterwards, which a discard does not guarantee where there is no room. Without
        // room for zeros the migration has ended, and what was discarded may keep its content.
        match self.change_long(offset, length, |device, at, part| device.write_zeroes(at, part, false, false)) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {}
            done => done?,
        }
        self.finish(fua)
    }

    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()> {
        self.check_writable(offset, length)?;
        self.change_long(offset, length, |device, at, part| device.write_zeroes(at, part, allocate, false))?;
        self.finish(fua)
    }

    fn begin_flush(&self) -> Result<FlushTicket> {
        self.source.begin_flush().map_err(|error| self.source_failed(error))
    }

    fn finish_flush(&self, ticket: FlushTicket) -> Result<()> {
        self.source.finish_flush(ticket).map_err(|error| self.source_failed(error))?;
        // Read afterwards: a flush acknowledged before `settle` began to flush the target is covered by that flush.
        if self.settled.load(Ordering::SeqCst)
            && !self.failed.load(Ordering::SeqCst)
            && let Err(error) = self.target.flush()
        {
            self.target_failed(error)?;
        }
        Ok(())
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.source.prefetch(offset, length)
    }

    fn resize(&self, _capacity: u64) -> Result<()> {
        let text = format!("{} is being migrated: it can be resized when that has ended", self.source.name());
        Err(Error::new(ErrorKind::Busy, text))
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        self.source.status(offset, length, limit)
    }

    fn dirty_bases(&self) -> Vec<String> {
        self.source.dirty_bases()
    }

    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        self.source.changed_since(base, offset, length, limit)
    }
}
