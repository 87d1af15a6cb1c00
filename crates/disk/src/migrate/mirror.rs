//! A device that mirrors a disk to a second copy, the target, and the copier that fills the target while clients use
//! the disk.
//!
//! ```text
//!   byte 0                    cursor                                  capacity
//!     | both copies are equal  |  target has its initial content         |
//!     +------------------------+-----------------------------------------+
//!   write:   source and target |  source only, and a mark in the work    ->  waits only for an overlapping copy step
//!
//!   Copying ---- copy() at the end, settle() ----> Settled ---- commit() ----> Committed
//!      \------------ target failed, cancelled: the target is dropped, the source stays the disk
//! ```
//!
//! 1. **Before the cursor both copies are equal**, except for requests under way. A change holds its range from before
//!    its first write to the source until after its last write to the target, and so does each step of the copier; the
//!    cursor moves while the step's range is held. So changes of a range are made on both copies in the same order, and
//!    none is missed.
//! 2. **After the cursor the target has its initial content.** Of a change that crosses the cursor, only the part
//!    before the cursor is made on the target. So ranges that the copier skips (never written, equal to the base, or
//!    zeros in both copies) have the right content already.
//! 3. **Every write acknowledged before [`MirrorDevice::settle`] begins is in the target when it ends**, and durable
//!    there if it was flushed. From then on a flush covers both copies, so that the migration's record can be committed
//!    at any moment.
//! 4. **A failure of the target before the record is committed** ends the migration, but fails no request. While the
//!    record is being committed ([`MirrorDevice::commit`]), a request whose write to the target failed waits for the
//!    outcome.
//! 5. One step of the copier copies at most [`STEP_MAX`] bytes with its range locked, fewer if steps are slow. No
//!    request waits for longer than one step.
//! 6. **A lack of space on the source** fails the request and does not end the migration, which may be the way to get
//!    space. The request may be carried out in part, so its range is copied again before it is unlocked.

mod passing;

use super::work::Work;
use crate::device::{BaseIdentity, Device, DirtyExtent, FlushTicket, ReadPlan, StatusExtent, Verdict};
use crate::stride::Stride;
use crate::zeros::is_zero;
use backend::{BLOCK_SIZE, SharedSlice};
use chain::Ranges;
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use passing::Reaches;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use work::Progress;
use work::Throttle;

/// Most bytes that one step of the copier moves.
pub const STEP_MAX: u64 = 256 << 10;
/// Least bytes that a step moves if steps are slow: the size from which writes to a native target bypass its write
/// buffer. Smaller steps would have to wait for room in the buffer, which the guests' writes fill.
const STEP_MIN: u64 = 128 << 10;
/// If a step takes longer than this, the next step is smaller.
const STEP_TIME: Duration = Duration::from_millis(10);
/// The target is flushed each time this many bytes were copied, so that later flushes have little of the copied data to
/// write. More frequent flushes would cost more: each flush writes the guests' buffered writes to the target's journal,
/// and they are written once more to their place later.
const CHECKPOINT: u64 = 32 << 20;
/// Fill level of the target's write buffer, in percent, above which the copier pauses so that the guests' writes can be
/// buffered.
const PRESSURE_MAX: u32 = 25;
/// Interval at which the paused copier checks the fill level.
const PRESSURE_PAUSE: Duration = Duration::from_millis(2);
/// Average bytes per second that the copier reaches even if the buffer stays full, so that the migration ends.
const RATE_MIN: u64 = 32 << 20;
/// Largest part of a discard during which the range is locked.
const DISCARD_STEP: u64 = 16 << 20;
/// Most extents that one query of a map returns.
const EXTENTS: usize = 1024;

/// Content of the target before the copier starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The target reads as zeros.
    Zeros,
    /// The target has an earlier state of the disk. The copier reads and compares it, and writes only differences.
    State,
}

/// Statistics of the copier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Bytes of the source that were read.
    pub read: u64,
    /// Bytes written to the target, without those that were zeroed.
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
    /// The error after which the target is no longer an equal copy.
    failure: Option<Error>,
}

/// A disk that is being copied. It serves requests from the source and applies changes to the target too, as described
/// at the top of this file.
pub struct MirrorDevice {
    source: Arc<dyn Device>,
    target: Arc<dyn Device>,
    base: Base,
    capacity: u64,
    ranges: Ranges,
    cursor: AtomicU64,
    work: Work,
    /// Whether flushes cover the target too.
    settled: AtomicBool,
    /// Whether nothing is written to the target any more.
    failed: AtomicBool,
    state: Mutex<MirrorState>,
}

/// The error of a migration that was cancelled.
pub(super) fn stopped() -> Error {
    Error::new(ErrorKind::Interrupted, "stopped on request; the disk is unchanged")
}

impl MirrorDevice {
    /// A mirror without copied ranges. From now on all writes must be made through the mirror: a write that is made
    /// directly to the source would be missing in the target.
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

    /// The source: the disk that is copied.
    pub fn source(&self) -> &Arc<dyn Device> {
        &self.source
    }

    /// The target: the copy.
    pub fn target(&self) -> &Arc<dyn Device> {
        &self.target
    }

    /// Marks a range to be copied.
    pub fn mark(&self, range: Range<u64>) {
        self.work.mark(&range);
    }

    /// Marks all ranges that contain data. The map is read without a lock, because a concurrent write marks its own
    /// range.
    pub fn mark_data(&self, progress: &dyn Progress) -> Result<()> {
        let (mut at, mut stride) = (0, Stride::default());
        while at < self.capacity {
            if progress.cancelled() {
                return Err(stopped());
            }
            let extents = stride.ask(self.capacity - at, |length| self.source.status(at, length, EXTENTS))?;
            at = self.mark_extents(at, extents.iter().map(|e| (e.length, e.allocation == crate::Allocation::Data)))?;
        }
        Ok(())
    }

    /// Marks all ranges that may differ from snapshot `base` of the source.
    pub fn mark_changes(&self, base: &str, progress: &dyn Progress) -> Result<()> {
        let (mut at, mut stride) = (0, Stride::default());
        while at < self.capacity {
            if progress.cancelled() {
                return Err(stopped());
            }
            let extents =
                stride.ask(self.capacity - at, |length| self.source.changed_since(base, at, length, EXTENTS))?;
            at = self.mark_extents(at, extents.iter().map(|extent| (extent.length, extent.dirty)))?;
        }
        Ok(())
    }

    /// Marks the extents with a true flag, beginning at `from`; returns the end of the last extent.
    fn mark_extents(&self, from: u64, extents: impl Iterator<Item = (u64, bool)>) -> Result<u64> {
        let mut at = from;
        for (length, wanted) in extents {
            if wanted {
                self.work.mark(&(at..at + length));
            }
            at += length;
        }
        if at == from {
            let text = format!("{}: the source's map returns no extent for byte {at}", self.source.name());
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        Ok(at)
    }

    /// Copies the marked ranges in order of offset. Afterwards both copies are equal and stay equal. Called once.
    pub fn copy(&self, progress: &dyn Progress) -> Result<Copied> {
        let throttle = Throttle::new(progress);
        let began = Instant::now();
        let mut copied = Copied::default();
        let (mut step, mut unflushed) = (STEP_MAX, 0);
        let marked = self.work.bytes();
        // Marked bytes that are passed over, because they are zeros in both copies.
        let (mut at, mut zeros, mut reaches) = (0, 0, Reaches::default());
        while at < self.capacity {
            self.check()?;
            if progress.cancelled() {
                return Err(stopped());
            }
            let Some(run) = self.work.run_at(at, step) else {
                at = self.pass(at, &mut reaches);
                continue;
            };
            let passed = self.pass_zeros(at, &mut reaches)?;
            if passed > at {
                zeros += passed - at;
                at = passed;
                progress.update(copied.read + zeros, marked.max(copied.read + zeros));
                continue;
            }
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
            progress.update(copied.read + zeros, marked.max(copied.read + zeros));
            if !throttle.wait(length) {
                return Err(stopped());
            }
            self.give_way(began, copied.read, progress)?;
        }
        self.check()?;
        progress.update(copied.read + zeros, copied.read + zeros);
        Ok(copied)
    }

    /// Pauses while the guests' writes fill the target's write buffer, unless the copier is slower than [`RATE_MIN`].
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

    /// Makes the target equal to the source in a locked range; returns the bytes written.
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
                    // Each run begins at a block boundary, because marks cover whole blocks, and so do all steps except
                    // the last.
                    self.target.write(offset, SharedSlice::copy_of(&wanted[begin..at]), false)?;
                    written += (at - begin) as u64;
                }
            }
        }
        Ok(written)
    }

    /// Makes both copies durable and equal. From then on a flush covers both copies.
    pub fn settle(&self) -> Result<()> {
        debug_assert_eq!(self.cursor.load(Ordering::SeqCst), self.capacity);
        // This first flush writes most of the data before the flushes of clients have to wait for the target too.
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

    /// Commits the migration by calling `record`, which writes the record durably. Afterwards the target is the current
    /// disk. If the target has failed before, `record` is not called. If `record` fails, the source stays the current
    /// disk, so `record` may fail only if the record was not written.
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

    /// Stops writing to the target. Changes in progress may still be made on the target.
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

    /// Handles a failed change of the target: before the commit, the migration is ended; afterwards the request fails.
    fn target_failed(&self, error: Error) -> Result<()> {
        let mut state = self.state.lock();
        if state.stage == Stage::Committed {
            return Err(error);
        }
        self.failed.store(true, Ordering::SeqCst);
        state.failure.get_or_insert(error.context(format_args!("writing to the new copy of {}", self.source.name())));
        Ok(())
    }

    /// Handles a failed change of a locked range on the source, of which the first `part` bytes are mirrored.
    fn change_failed(&self, range: &Range<u64>, part: u64, error: Error) -> Error {
        if error.kind() == ErrorKind::NoSpace && self.copy_again(range.start..range.start + part).is_ok() {
            return error;
        }
        self.source_failed(error)
    }

    /// Makes the target equal to the source in a locked range, whatever content the target has there.
    fn copy_again(&self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + STEP_MAX);
            let wanted = self.source.read(at, (end - at) as usize)?;
            match is_zero(&wanted) {
                true => self.target.write_zeroes(at, end - at, false, false)?,
                false => self.target.write(at, SharedSlice::copy_of(&wanted), false)?,
            }
            at = end;
        }
        Ok(())
    }

    /// Handles a failed change of the source: the change may be made in part, so the target may differ from the source.
    fn source_failed(&self, error: Error) -> Error {
        let mut state = self.state.lock();
        if state.stage != Stage::Committed {
            self.failed.store(true, Ordering::SeqCst);
            let text = format!("{} failed while it was copied: {error}", self.source.name());
            state.failure.get_or_insert_with(|| Error::new(error.kind(), text));
        }
        error
    }

    /// Marks the part of a locked range after the cursor. The part before the cursor has to be changed on the target
    /// too; returns its length.
    fn mirrored(&self, range: &Range<u64>) -> u64 {
        let cursor = self.cursor.load(Ordering::SeqCst);
        if cursor < range.end {
            self.work.mark(&(range.start.max(cursor)..range.end));
        }
        if self.failed.load(Ordering::SeqCst) { 0 } else { range.end.min(cursor).saturating_sub(range.start) }
    }

    /// Changes a range on the source, and on the target up to the cursor.
    fn change(&self, range: Range<u64>, apply: impl Fn(&dyn Device, u64) -> Result<()>) -> Result<()> {
        let _held = self.ranges.lock(range.clone());
        let part = self.mirrored(&range);
        apply(&*self.source, range.end - range.start).map_err(|error| self.change_failed(&range, part, error))?;
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

    /// Changes a long range in parts, each with its own lock.
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

/// How a block of the target has to be changed to equal the source.
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

    fn try_plan_read(&self, offset: u64, length: usize) -> Result<Option<ReadPlan>> {
        self.source.try_plan_read(offset, length)
    }

    fn load_for_read(&self, offset: u64, length: usize) -> Result<()> {
        self.source.load_for_read(offset, length)
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
            self.source.write(offset, data, false).map_err(|error| self.change_failed(&range, part, error))?;
            if let Some(mirrored) = mirrored
                && let Err(error) = self.target.write(offset, mirrored, false)
            {
                self.target_failed(error)?;
            }
        }
        // The range is unlocked before the flush, so that another write to it need not wait for the flush.
        self.finish(fua)
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.check_writable(offset, length)?;
        // Both copies must have the same content afterwards. A discard does not ensure this on a full file system, so
        // the range is zeroed. Without space for zeros, the discarded range may keep its content, in both copies.
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
        // `settled` is read after the source was flushed. If it is not set yet, this flush completed before the second
        // flush of the target in `settle`, which then covers the same writes.
        if self.settled.load(Ordering::SeqCst)
            && !self.failed.load(Ordering::SeqCst)
            && let Err(error) = self.target.flush()
        {
            self.target_failed(error)?;
        }
        Ok(())
    }

    fn losses(&self) -> u64 {
        // A loss of the target ends the migration.
        self.source.losses()
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

    fn base_identity(&self, base: &str) -> Option<BaseIdentity> {
        self.source.base_identity(base)
    }

    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        self.source.changed_since(base, offset, length, limit)
    }
}
