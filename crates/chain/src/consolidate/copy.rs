//! The copying of a merge: one step at a time, each with its range locked.
//!
//! 1. A step maps its range again after it has locked it: the mapping of a pass only selects the next range to copy.
//! 2. A target grain that the sources store only in part is completed: in a merge down, with the visible content of the
//!    sources and the levels below; in a merge up, with that of the target and the levels below. Levels above are never
//!    read for this: their newer content does not belong to the target.
//! 3. Cache entries of a source become entries of the target, so that the caches stay warm when the sources are
//!    removed.

use super::Job;
use crate::Result;
use crate::chain::Chain;
use crate::levels::{Level, Levels};
use crate::limits::DISCARD_STEP;
use crate::mapping::{Mapping, To, push};
use crate::walk::Walk;
use crate::write::Flux;
use backend::Buffer;
use std::ops::Range;
use std::sync::Arc;

/// The search for the next range to copy looks up this many bytes at first. The number doubles until a lookup finds
/// something, so that levels that store little take few lookups, whatever their capacity.
const LOOK_AHEAD: u64 = 64 << 20;
/// The most extents that one lookup of this search returns.
const LOOK_AHEAD_EXTENTS: usize = 128;
/// Extents of a copied range that are inserted into the caches.
const EXTENTS_MAX: usize = 64;

/// The direction of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Into the level below.
    Down,
    /// Into the level above.
    Up,
}

/// The result of a copy step.
pub(super) struct Copied {
    /// Where the next step begins.
    pub next: u64,
    /// Bytes written.
    pub bytes: u64,
}

/// The positions of a merge's levels in the current stack: the sources, and the target.
struct Places {
    sources: Range<usize>,
    target: usize,
    /// The topmost level that is read to complete a partial grain.
    view: usize,
}

fn places(levels: &Levels, job: &Job) -> Option<Places> {
    let first = levels.position(*job.sources.first()?)?;
    let target = levels.position(job.target.key())?;
    Some(Places { sources: first..first + job.sources.len(), target, view: first.min(target) })
}

/// The whole grains of the target that a step writes, as runs. The flag is true for a run of zeros.
fn grains(target: &Level, found: &[Mapping]) -> Vec<(Range<u64>, bool)> {
    let mut runs: Vec<(Range<u64>, bool)> = Vec::new();
    let mut add = |run: Range<u64>, zero: bool| match runs.last_mut() {
        _ if run.is_empty() => {}
        Some((last, was_zero)) if *was_zero == zero && run.start <= last.end => last.end = last.end.max(run.end),
        // A data run already includes the whole of a grain that it shares with a run of zeros.
        _ => runs.push((run, zero)),
    };
    for mapping in found.iter().filter(|mapping| mapping.to != To::Absent) {
        let whole = target.widened(&(mapping.start..mapping.end()));
        if mapping.to != To::Zero {
            add(whole, false);
            continue;
        }
        let first = mapping.start.next_multiple_of(target.grain).min(whole.end);
        let at_end = mapping.end() == whole.end;
        let last = if at_end { whole.end } else { mapping.end() / target.grain * target.grain };
        if first >= last {
            add(whole, false);
        } else {
            add(whole.start..first, false);
            add(first..last, true);
            add(last..whole.end, false);
        }
    }
    runs
}

impl Chain {
    /// Finds the next range to copy at or after `at`, and copies up to `most` bytes of it.
    pub(super) fn copy_next(&self, job: &Job, at: u64, most: u64) -> Result<Copied> {
        let levels = self.levels();
        let capacity = job.target.layer.capacity();
        let Some(places) = places(&levels, job) else { return Ok(Copied { next: capacity, bytes: 0 }) };
        let grain = job.target.grain;
        let (mut known, mut ahead) = (at, LOOK_AHEAD);
        loop {
            let from = known / grain * grain;
            let demand = from..(from + grain).min(capacity);
            let window = from..from.saturating_add(ahead).min(capacity).max(demand.end);
            let end = window.end;
            let among = places.sources.clone();
            let walk = Walk { levels: &levels, among, demand, window, most: LOOK_AHEAD_EXTENTS };
            for mapping in walk.run().map_err(|error| error.context(&self.name))?.mappings {
                if mapping.start > known {
                    break;
                }
                known = mapping.end();
                if mapping.to == To::Absent {
                    continue;
                }
                // Zeroing is cheap, so a step may zero more bytes than it may copy.
                let zero_most = mapping.length.clamp(most, DISCARD_STEP.max(most));
                let most = if mapping.to == To::Zero { zero_most } else { most };
                return self.copy_within(job, mapping.start / grain * grain..capacity, most);
            }
            if known < end || known >= capacity {
                return Ok(Copied { next: known / grain * grain, bytes: 0 }.at_least(known, capacity));
            }
            // The sources store nothing in the whole window.
            ahead = ahead.saturating_mul(2);
        }
    }

    /// Copies the content of the first `most` bytes of `range`.
    pub(super) fn copy_within(&self, job: &Job, range: Range<u64>, most: u64) -> Result<Copied> {
        let target = &job.target;
        let most = (most / target.grain).max(1) * target.grain;
        let range = target.widened(&range);
        let range = range.start..range.end.min(range.start.saturating_add(most));
        let _held = self.ranges.lock(range.clone());
        let levels = self.levels();
        let Some(places) = places(&levels, job) else { return Ok(Copied { next: range.end, bytes: 0 }) };
        let walk = |among: Range<usize>| {
            let (demand, window) = (range.clone(), range.clone());
            Walk { levels: &levels, among, demand, window, most: 0 }.run().map(|found| found.mappings)
        };
        let mut found = walk(places.sources.clone())?;
        if job.side == Side::Up {
            let last = places.sources.end == levels.stack.len();
            found = within_gaps(&found, &walk(places.target..places.target + 1)?);
            // With no level below the sources, absent ranges read as zeros too, so zeros need no copy.
            found.retain(|mapping| !(last && mapping.to == To::Zero));
        }
        let bytes = self.copy_runs(&levels, job, places.view, &found)?;
        Ok(Copied { next: range.end, bytes })
    }

    /// Copies the ranges of `found`, in whole grains; returns the bytes written. The caller has locked the range.
    fn copy_runs(&self, levels: &Arc<Levels>, job: &Job, view: usize, found: &[Mapping]) -> Result<u64> {
        let mut bytes = 0;
        for (run, zero) in grains(&job.target, found) {
            bytes += if zero { 0 } else { run.end - run.start };
            let copied = self.copy_run(levels, job, view, run.clone(), zero);
            if job.leaves_target_out() && !covers(found, &run) {
                self.completed.note(&run);
            }
            copied.map_err(|error| error.context(&self.name))?;
        }
        Ok(bytes)
    }

    /// Copies whole grains. The caller has locked the range.
    fn copy_run(&self, levels: &Arc<Levels>, job: &Job, view: usize, run: Range<u64>, zero: bool) -> Result<()> {
        let target = &job.target;
        let length = (run.end - run.start) as usize;
        let mut buffer = Buffer::default();
        if !zero {
            buffer = Buffer::recycled(length.div_ceil(backend::BLOCK_SIZE));
            self.read_held(levels, view, run.start, &mut buffer[..length])?;
        }
        let _flux = Flux::begin(&self.changes, run.clone());
        if target.reuses {
            self.metadata.forget_level(&run, target.number());
        }
        let changing = target.changing();
        let written = match zero {
            true => target.layer.zero(run.clone(), false),
            false => target.layer.write(run.start, &[&buffer[..length]]),
        };
        drop(changing);
        // In a merge down, the sources hide the target if this write is lost, until the owner's record is replaced. But
        // plans may refer to the target.
        if job.side == Side::Up || job.commits() {
            self.rearranged.note(&run);
        } else {
            self.copied.note(&run);
        }
        if let Err(error) = written {
            self.metadata.forget(&run);
            return Err(error);
        }
        let mut extents = Vec::new();
        let mut found = Vec::new();
        if target.layer.map(run.clone(), EXTENTS_MAX, &mut extents).is_ok() {
            for extent in extents {
                let to = To::of(extent.content, target.number()).unwrap_or(To::Zero);
                push(&mut found, Mapping { start: extent.start, length: extent.length, to });
            }
        }
        self.metadata.retarget(&run, job.numbers, &found);
        Ok(())
    }

    /// Zeroes the target past the end of the shortest source: there the sources hide the levels below, which would
    /// become visible without the sources. In a merge down, ranges that a longer source stores have their content in
    /// the target already, and in a merge up, ranges that the target stores hide the levels below by themselves.
    pub(super) fn hide_tail(&self, job: &Job) -> Result<()> {
        let target = &job.target;
        let levels = self.levels();
        let Some(places) = places(&levels, job) else { return Ok(()) };
        let shown = levels.visible(places.sources.start, places.sources.end - 1);
        let below = levels.stack.get(places.sources.end).map_or(0, |level| level.layer.capacity());
        let end = target.layer.capacity();
        let (needed, keeping) = match job.side {
            Side::Down => (shown < end, places.sources.clone()),
            Side::Up => (shown < end.min(below), places.target..places.target + 1),
        };
        let mut at = shown;
        while needed && at < end {
            let step = (DISCARD_STEP / target.grain).max(1) * target.grain;
            let stop = (at / step + 1).saturating_mul(step).min(end);
            let range = target.widened(&(at..stop));
            let _held = self.ranges.lock(range.clone());
            let tail = [Mapping { start: at, length: stop - at, to: To::Zero }];
            let (demand, window) = (range.clone(), range);
            let kept = Walk { levels: &levels, among: keeping.clone(), demand, window, most: 0 }.run()?.mappings;
            let found = within_gaps(&tail, &kept);
            self.copy_runs(&levels, job, places.view, &found)?;
            at = stop;
        }
        Ok(())
    }
}

impl Copied {
    /// Sets the end of the disk as the next position if nothing up to the end needs a copy.
    fn at_least(mut self, known: u64, capacity: u64) -> Self {
        if known >= capacity {
            self.next = capacity;
        }
        self
    }
}

/// Whether every byte of a range is stored according to `found`.
fn covers(found: &[Mapping], range: &Range<u64>) -> bool {
    let stored = found.iter().filter(|mapping| mapping.to != To::Absent);
    let within = |mapping: &Mapping| mapping.end().min(range.end).saturating_sub(mapping.start.max(range.start));
    stored.map(within).sum::<u64>() == range.end - range.start
}

/// The parts of `found` that are absent in `held`.
fn within_gaps(found: &[Mapping], held: &[Mapping]) -> Vec<Mapping> {
    let mut out = Vec::new();
    for mapping in found {
        for gap in held.iter().filter(|held| held.to == To::Absent) {
            if gap.start < mapping.end() && mapping.start < gap.end() {
                out.push(mapping.clipped(gap.start, gap.end()));
            }
        }
    }
    out
}
