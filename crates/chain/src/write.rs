//! Writing: to the top level, in whole grains.
//!
//! 1. A change locks its range, widened to whole grains, before it reads the rest of a partial grain, and until the
//!    caches have the result. So two writes to parts of one grain run one after the other, and neither is lost.
//! 2. A change stays inside the gate of its levels. If other levels have become current, it starts again.
//! 3. The rest of a partial grain is the visible content of the chain, read while the range is locked.
//! 4. Steps at the caches: begin, drop the range (if grains are reused), change the layer, insert the new extents, end.
//!    After a failure the range is dropped, because its content is unknown.
//! 5. While a merge has the top as a source, each write is also made in the target (in the last pass), or marked in the
//!    dirty log (before). If the write to the target fails, the merge fails and the client's write succeeds. A write
//!    that was made only in part in the top, after an error or for lack of space, is marked too; in the last pass it
//!    ends the merge. While the owner of the chain replaces its record, the merge cannot end any more: then the range
//!    is copied into the target again, and if that fails, the chain stops and the range is not read.
//! 6. A discard never fails for lack of space: a range that cannot be recorded as discarded keeps its content. Where
//!    there is no space to record zeros, zeros are written over the grains that the top stores.

use crate::Result;
use crate::chain::Chain;
use crate::changes::Changes;
use crate::consolidate::Job;
use crate::levels::{Level, Levels};
use crate::limits::DISCARD_STEP;
use crate::mapping::{Mapping, To, push};
use crate::walk::Walk;
use crate::{Error, ErrorKind};
use backend::Buffer;
use layer::SECTOR;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most extents of a changed range that are inserted into the caches.
const EXTENTS_MAX: usize = 64;

/// Bytes of zeros per write, where zeros are written over grains.
const ZEROS_STEP: u64 = 256 << 10;

/// The new content of a range.
#[derive(Clone, Copy)]
enum Change<'a> {
    /// Data at an offset.
    Write(u64, &'a [u8]),
    /// Zeros over whole grains.
    Clear(Clear),
    /// Zeros over a part of a grain, unless that part reads as zeros already.
    ZeroPart(u64, &'a [u8]),
}

/// How a range becomes zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clear {
    /// The range keeps its space, or gets space.
    Keep,
    /// The space may be freed.
    Zero,
    /// The space is freed, where there is room to record that; elsewhere the range keeps its content.
    Discard,
}

impl Clear {
    /// Makes the range zeros. Returns whether the whole range reads as zeros now.
    fn carry_out(self, level: &Level, range: Range<u64>) -> Result<bool> {
        match self {
            Self::Keep => level.layer.zero(range, true).map(|()| true),
            Self::Zero => level.layer.zero(range, false).map(|()| true),
            Self::Discard => level.layer.discard(range),
        }
    }
}

/// Tells the caches that a change of a range is under way, until this value is dropped.
pub(crate) struct Flux<'a> {
    changes: &'a Changes,
    range: Range<u64>,
}

impl<'a> Flux<'a> {
    pub fn begin(changes: &'a Changes, range: Range<u64>) -> Self {
        changes.begin(&range);
        Self { changes, range }
    }
}

impl Drop for Flux<'_> {
    fn drop(&mut self) {
        self.changes.end(&self.range);
    }
}

impl Chain {
    /// Writes `data` at `offset`, at any alignment.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.check_writable()?;
        self.check_request(data.len() as u64)?;
        if data.is_empty() {
            return self.check_range(self.capacity(), offset, 0);
        }
        loop {
            let levels = self.levels();
            self.check_range(levels.capacity(), offset, data.len() as u64)?;
            let range = offset..offset + data.len() as u64;
            if self.change(&levels, range, Change::Write(offset, data))? {
                return Ok(());
            }
        }
    }

    /// Makes a range read as zeros, whatever the levels below store. With `keep`, the range keeps its space or gets
    /// space.
    pub fn zero(&self, offset: u64, length: u64, keep: bool) -> Result<()> {
        self.clear_range(offset, length, if keep { Clear::Keep } else { Clear::Zero })
    }

    /// Discards a range: it reads as zeros, except for parts where there was no space to record that. These parts keep
    /// their content.
    pub fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.clear_range(offset, length, Clear::Discard)
    }

    fn clear_range(&self, offset: u64, length: u64, clear: Clear) -> Result<()> {
        self.check_writable()?;
        self.check_range(self.capacity(), offset, length)?;
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let levels = self.levels();
            self.check_range(levels.capacity(), at, end - at)?;
            let (grain, capacity) = (levels.top().grain, levels.capacity());
            let last = if end == capacity { end } else { end / grain * grain };
            let (stop, outcome) = if at.is_multiple_of(grain) && at < last {
                let step = (DISCARD_STEP / grain).max(1) * grain;
                let stop = (at / step + 1).saturating_mul(step).min(last);
                (stop, self.change(&levels, at..stop, Change::Clear(clear)))
            } else {
                let stop = ((at / grain + 1) * grain).min(end);
                let zeros = Buffer::with_bytes((stop - at) as usize);
                let zeros = &zeros[..(stop - at) as usize];
                let change = if clear == Clear::Keep { Change::Write(at, zeros) } else { Change::ZeroPart(at, zeros) };
                (stop, self.change(&levels, at..stop, change))
            };
            match outcome {
                Err(error) if error.kind() == ErrorKind::NoSpace && clear == Clear::Discard => at = stop,
                done => at = if done? { stop } else { at },
            }
        }
        Ok(())
    }

    /// Calls `change`, which changes a range of the top layer by another way than through this chain. As for a change
    /// through the chain, the range is locked, and the caches forget it: so a later write to a part of a grain is
    /// completed with the new content.
    pub fn change_beside<T>(&self, range: &Range<u64>, change: impl FnOnce() -> T) -> T {
        let whole = self.levels().top().widened(range);
        let _held = self.ranges.lock(whole.clone());
        let _flux = Flux::begin(&self.changes, whole.clone());
        self.metadata.forget(&whole);
        self.data.forget(&whole);
        change()
    }

    /// Changes `range`; returns false without a change if the levels were not current any more.
    fn change(&self, levels: &Arc<Levels>, range: Range<u64>, change: Change<'_>) -> Result<bool> {
        let top = levels.top();
        let whole = top.widened(&range);
        let mut span = whole.clone();
        if let Some(job) = levels.live_job() {
            let other = job.target.widened(&whole);
            span = span.start.min(other.start)..span.end.max(other.end);
        }
        let _held = self.ranges.lock(span.clone());
        let Some(_inside) = levels.gate.enter() else { return Ok(false) };
        self.check_running()?;
        if matches!(change, Change::ZeroPart(..)) && self.is_zero_held(levels, &whole)? {
            return Ok(true);
        }
        let _flux = Flux::begin(&self.changes, span.clone());
        if top.reuses || levels.live_job().is_some() {
            self.metadata.forget(&span);
        }
        self.data.forget(&range);
        let result = match change {
            Change::Write(offset, data) | Change::ZeroPart(offset, data) => {
                self.put(levels, top, offset, data).map(|()| true)
            }
            Change::Clear(clear) => match self.clear(levels, top, &whole, clear) {
                Err(refused) if refused.kind() == ErrorKind::NoSpace && clear != Clear::Discard => {
                    self.clear_in_place(levels, &whole, clear, refused)
                }
                cleared => cleared,
            },
        };
        self.unflushed.note(&span);
        match &result {
            Ok(_) => self.metadata.replace(&whole, &levels.lasting(&self.answer(levels, &whole))),
            Err(error) => {
                self.metadata.forget(&span);
                // The top layer has stopped after a failure to write or flush its own metadata.
                if error.kind() == ErrorKind::Stopped || top.layer.has_stopped() {
                    self.stop(error);
                }
            }
        }
        if let Some(job) = levels.live_job() {
            let told = match result {
                Ok(true) => self.tell(levels, job, &range, change),
                _ => self.tell_of_a_part(job, &range),
            };
            // A flush that began before the change was made in the target does not cover it there, and may have dropped
            // the first note.
            self.unflushed.note(&span);
            // If the change itself failed, the error of the change is returned instead.
            if result.is_ok() {
                told?;
            }
        }
        result.map(|_| true).map_err(|error| error.context(&self.name))
    }

    /// True when no level has data in a range that the caller has locked.
    fn is_zero_held(&self, levels: &Arc<Levels>, range: &Range<u64>) -> Result<bool> {
        let among = 0..levels.stack.len();
        let walk = Walk { levels, among, demand: range.clone(), window: range.clone(), most: 0 };
        Ok(walk.run()?.mappings.iter().all(|found| found.to.is_zero()))
    }

    /// The extents of a range that was just written, as the top level maps them.
    fn answer(&self, levels: &Levels, range: &Range<u64>) -> Vec<Mapping> {
        let top = levels.top();
        let mut extents = Vec::new();
        if top.layer.map(range.clone(), EXTENTS_MAX, &mut extents).is_err() {
            return Vec::new();
        }
        let mut found = Vec::with_capacity(extents.len());
        let alone = levels.stack.len() == 1;
        for extent in extents {
            let to = match To::of(extent.content, top.number()) {
                None if alone => To::Absent,
                None => continue,
                Some(to) => to,
            };
            let end = extent.start.saturating_add(extent.length).min(range.end);
            if extent.start >= range.start && extent.start < end {
                push(&mut found, Mapping { start: extent.start, length: end - extent.start, to });
            }
        }
        found
    }

    /// Reports to a merge that has the top as a source that a change may have been made only in part.
    fn tell_of_a_part(&self, job: &Job, range: &Range<u64>) -> Result<()> {
        if !job.mirrors() {
            job.dirty.mark(range);
            return Ok(());
        }
        let text = format!("{}: a change during the last part of a merge was executed only partly", self.name);
        job.fail(Error::new(ErrorKind::NoSpace, text), range)
    }

    /// Writes to one level in whole grains; partial grains at the ends are completed with the visible content of the
    /// chain.
    fn put(&self, levels: &Arc<Levels>, level: &Level, offset: u64, data: &[u8]) -> Result<()> {
        let end = offset + data.len() as u64;
        let whole = level.widened(&(offset..end));
        let _changing = level.changing();
        if whole == (offset..end) {
            return level.layer.write(offset, &[data]);
        }
        if offset.is_multiple_of(SECTOR) && end.is_multiple_of(SECTOR) && level.layer.overwrite(offset, &[data])? {
            return Ok(());
        }
        self.fills.fetch_add(1, Ordering::Relaxed);
        // `head_end` is the end of a partial first grain, and `body_end` the end of the whole grains after it. If the
        // range lies in one grain, both are the end of that grain.
        let head_end = if offset > whole.start { (whole.start + level.grain).min(whole.end) } else { whole.start };
        let body_end = if end < whole.end { (end / level.grain * level.grain).max(head_end) } else { whole.end };
        let fill = |grain: Range<u64>| -> Result<(Buffer, usize)> {
            let length = (grain.end - grain.start) as usize;
            let mut buffer = Buffer::with_bytes(length);
            let (from, to) = (offset.max(grain.start), end.min(grain.end));
            let (before, behind) = ((from - grain.start) as usize, (to - grain.start) as usize);
            self.read_held(levels, 0, grain.start, &mut buffer[..before])?;
            self.read_held(levels, 0, to, &mut buffer[behind..length])?;
            buffer[before..behind].copy_from_slice(&data[(from - offset) as usize..(to - offset) as usize]);
            Ok((buffer, length))
        };
        let mut slices: Vec<&[u8]> = Vec::with_capacity(3);
        let (head, tail);
        if head_end > whole.start {
            head = fill(whole.start..head_end)?;
            slices.push(&head.0[..head.1]);
        }
        if body_end > head_end {
            let from = head_end.max(offset);
            slices.push(&data[(from - offset) as usize..(body_end.min(end) - offset) as usize]);
        }
        if body_end.max(head_end) < whole.end {
            tail = fill(body_end.max(head_end)..whole.end)?;
            slices.push(&tail.0[..tail.1]);
        }
        level.layer.write(whole.start, &slices)
    }

    /// Zeroes whole grains of one level. Ranges that no level holds read as zeros already and are not changed. Returns
    /// whether the whole range reads as zeros now.
    fn clear(&self, levels: &Arc<Levels>, level: &Level, range: &Range<u64>, clear: Clear) -> Result<bool> {
        let _changing = level.changing();
        if clear == Clear::Keep || levels.stack.len() == 1 {
            return clear.carry_out(level, range.clone());
        }
        let among = 0..levels.stack.len();
        let walk = Walk { levels, among, demand: range.clone(), window: range.clone(), most: 0 };
        let mut run = range.start..range.start;
        let mut whole = true;
        for found in walk.run()?.mappings {
            if found.to == To::Absent {
                if !run.is_empty() {
                    whole &= clear.carry_out(level, level.widened(&run))?;
                }
                run = found.end()..found.end();
            } else {
                run.end = found.end();
            }
        }
        Ok(whole & (run.is_empty() || clear.carry_out(level, level.widened(&run))?))
    }

    /// Writes zeros over whole grains that the top stores as data, which needs no space, after recording zeros has
    /// failed with `refused`. Returns `refused` if a lower level has data in the range, or, with [`Clear::Keep`], if a
    /// part of the range has no space in the top.
    fn clear_in_place(&self, levels: &Arc<Levels>, range: &Range<u64>, clear: Clear, refused: Error) -> Result<bool> {
        let top = levels.top();
        let among = 0..levels.stack.len();
        let walk = Walk { levels, among, demand: range.clone(), window: range.clone(), most: 0 };
        let mut placed: Vec<Range<u64>> = Vec::new();
        for found in walk.run()?.mappings {
            match (found.to, placed.last_mut()) {
                (To::Data { level, .. }, Some(last)) if level == top.number() && last.end == found.start => {
                    last.end = found.end();
                }
                (To::Data { level, .. }, _) if level == top.number() => placed.push(found.start..found.end()),
                (to, _) if to.is_zero() && clear == Clear::Zero => {}
                _ => return Err(refused),
            }
        }
        let _changing = top.changing();
        let step = (ZEROS_STEP / top.grain).max(1) * top.grain;
        let zeros = Buffer::with_bytes(step.min(range.end - range.start) as usize);
        for range in placed {
            let mut at = range.start;
            while at < range.end {
                let end = range.end.min((at / step + 1) * step);
                let part: &[&[u8]] = &[&zeros[..(end - at) as usize]];
                if !top.layer.overwrite(at, part)? {
                    top.layer.write(at, part)?;
                }
                at = end;
            }
        }
        Ok(true)
    }

    /// Reports a change to a merge that has the top as a source.
    fn tell(&self, levels: &Arc<Levels>, job: &Job, range: &Range<u64>, change: Change<'_>) -> Result<()> {
        if !job.mirrors() {
            job.dirty.mark(range);
            return Ok(());
        }
        let target = &job.target;
        let result = match change {
            Change::Write(offset, data) | Change::ZeroPart(offset, data) => self.put(levels, target, offset, data),
            Change::Clear(clear) => self.clear_any(levels, target, range, clear == Clear::Keep),
        };
        let whole = target.widened(range);
        if whole != *range && job.leaves_target_out() {
            self.completed.note(&whole);
        }
        match result {
            Ok(()) => Ok(()),
            Err(error) => {
                job.fail(error.context(format_args!("writing to both sides of a merge of {}", self.name)), range)
            }
        }
    }

    /// Zeroes any range of one level.
    fn clear_any(&self, levels: &Arc<Levels>, level: &Level, range: &Range<u64>, keep: bool) -> Result<()> {
        let grain = level.grain;
        let first = range.start.next_multiple_of(grain).min(range.end);
        let at_end = range.end == level.layer.capacity();
        let last = if at_end { range.end } else { (range.end / grain * grain).max(first) };
        for partial in [range.start..first, last..range.end] {
            if !partial.is_empty() {
                let length = (partial.end - partial.start) as usize;
                self.put(levels, level, partial.start, &Buffer::with_bytes(length)[..length])?;
            }
        }
        if first >= last {
            return Ok(());
        }
        let _changing = level.changing();
        level.layer.zero(first..last, keep)
    }
}
