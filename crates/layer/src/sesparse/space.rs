//! Free grains: the known runs, and the end of the allocated part of the file.
//!
//! New grains are allocated from three sources, in this order:
//!
//! 1. a free run near the last allocation, if it has at least [`WORTHWHILE`] grains or all that are requested: then
//!    grains written together are adjacent, and a sequential write is rarely interrupted;
//! 2. the end of the grain area;
//! 3. free runs of any length, if the file has reached its capacity, or if so much is free in the middle that growing
//!    the file would be a waste ([`slack`]).
//!
//! Guests write several files at once, so several streams of requests alternate. For a stream of sequential requests,
//! grains after the last allocated ones are set aside, more of them each time. So each stream is contiguous, however
//! the streams alternate.
//!
//! Invariants, under the lock of the layer:
//!
//! 1. A grain in `runs`, or set aside for a stream, is named by no table, in memory or on the device. No reader uses
//!    it, and its bit in the bitmap is clear.
//! 2. Grains from `fresh` on were never allocated, or are free in the sense of invariant 1.
//! 3. `fresh <= length <= limit`; the file reaches to `length`.
//! 4. A free grain is in one of `runs`, set aside for one stream, or not remembered. The bitmap does not show which, so
//!    streams release their grains before the bitmap is searched, and before the end is lowered.

use super::entry::GrainRun;
use std::collections::BTreeMap;

/// The shortest free run that is used while there is room at the end, in grains: 64 KiB.
const WORTHWHILE: u64 = 16;
/// The most free runs kept in memory; others are dropped, and found again in the bitmap.
const RUNS_MAX: usize = if cfg!(test) { 16 } else { 1 << 15 };
/// The most free runs examined for one allocation.
const LOOKS_MAX: usize = 32;
/// Free grains beyond which even the smallest runs are used: 64 MiB, or an eighth of the file.
const SLACK: u64 = 1 << 14;

/// The number of streams that are distinguished.
const STREAMS: usize = 8;
/// Grains set aside for a stream, at first and at most: 64 KiB, 1 MiB.
const AHEAD_MIN: u64 = 16;
const AHEAD_MAX: u64 = 256;

/// Sequential requests of a guest.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The grain of the disk with which the stream would continue.
    next: u64,
    aside: GrainRun,
    /// How many grains to set aside next time.
    ahead: u64,
    /// The value of `clock` when the stream last allocated grains.
    used: u64,
}

fn slack(fresh: u64) -> u64 {
    SLACK.max(fresh / 8)
}

/// Where an allocation is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The allocation is possible in this run.
    Run(GrainRun),
    /// The allocation is possible at the end, after the file has grown.
    Growth,
    /// No grain is free at present: all are allocated or retired.
    Full,
}

/// The free grains of an image.
#[derive(Debug)]
pub(super) struct Space {
    /// The number of grains of each run by its start; disjoint, never adjacent.
    runs: BTreeMap<u64, u64>,
    free: u64,
    /// Where the last allocation from a run ended.
    next: u64,
    pub(super) fresh: u64,
    pub(super) length: u64,
    pub(super) limit: u64,
    /// The next page of the bitmap to search; `None` when the search is complete, or not permitted.
    cursor: Option<u64>,
    /// Whether the bitmap can be relied on.
    trusted: bool,
    /// Whether runs were dropped since the search began.
    forgot: bool,
    streams: [Stream; STREAMS],
    /// A counter that grows with each allocation of a stream.
    clock: u64,
}

impl Space {
    /// The space of a file with `length` grains. If the bitmap can be relied on, it is searched in parts.
    pub(super) fn new(length: u64, limit: u64, trusted: bool) -> Self {
        let length = length.min(limit);
        let cursor = (trusted && length > 0).then_some(0);
        let idle = Stream { next: u64::MAX, aside: GrainRun { start: 0, count: 0 }, ahead: 0, used: 0 };
        Self {
            runs: BTreeMap::new(),
            free: 0,
            next: 0,
            fresh: length,
            length,
            limit,
            cursor,
            trusted,
            forgot: false,
            streams: [idle; STREAMS],
            clock: 0,
        }
    }

    /// The page of the bitmap to search before the next allocation, if any.
    pub(super) fn to_search(&self) -> Option<u64> {
        self.cursor
    }

    /// Notes that the page has been searched; `pages` is the number of pages.
    pub(super) fn searched(&mut self, pages: u64) {
        self.cursor = self.cursor.map(|page| page + 1).filter(|page| *page < pages);
    }

    /// Starts the search of the bitmap again. From now on the bitmap can be relied on.
    pub(super) fn search_again(&mut self) {
        self.trusted = true;
        self.cursor = Some(0);
        self.forgot = false;
    }

    /// The number of known free grains.
    pub(super) fn free(&self) -> u64 {
        self.free
    }

    /// Sets aside up to `want` grains, the first for grain `guest` of the disk. Repeated calls return the same grains
    /// until [`Space::use_aside`] allocates them.
    pub(super) fn set_aside(&mut self, guest: u64, want: u64) -> Choice {
        let going_on = self.streams.iter().position(|stream| stream.next == guest);
        let index = going_on.unwrap_or_else(|| {
            let oldest = self.streams.iter().enumerate().min_by_key(|(_, stream)| stream.used);
            let index = oldest.map_or(0, |(index, _)| index);
            self.end_stream(index);
            self.streams[index].next = guest;
            self.streams[index].ahead = 0;
            index
        });
        self.clock += 1;
        self.streams[index].used = self.clock;
        if self.streams[index].aside.count == 0 {
            let ahead = self.streams[index].ahead;
            let chosen = match self.choose(want.max(ahead)) {
                Choice::Full if self.streams.iter().any(|stream| stream.aside.count > 0) => {
                    self.end_streams();
                    self.choose(want)
                }
                chosen => chosen,
            };
            let Choice::Run(run) = chosen else { return chosen };
            self.take(run);
            self.streams[index].aside = run;
        }
        let Stream { aside, .. } = self.streams[index];
        Choice::Run(GrainRun { start: aside.start, count: aside.count.min(want) })
    }

    /// Allocates the first `count` grains that were set aside for `guest`.
    pub(super) fn use_aside(&mut self, guest: u64, count: u64) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.next == guest) {
            let count = count.min(stream.aside.count);
            stream.next += count;
            stream.aside = GrainRun { start: stream.aside.start + count, count: stream.aside.count - count };
            stream.ahead = (stream.ahead * 2).clamp(AHEAD_MIN, AHEAD_MAX);
        }
    }

    /// Drops the first grain that was set aside for `guest`, because it was found to be in use.
    pub(super) fn skip_aside(&mut self, guest: u64) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.next == guest) {
            let count = 1.min(stream.aside.count);
            stream.aside = GrainRun { start: stream.aside.start + count, count: stream.aside.count - count };
        }
    }

    /// Releases all grains that were set aside.
    pub(super) fn end_streams(&mut self) {
        // The last grains are released first, so that grains at the end of the file lower `fresh` again.
        let mut order: [usize; STREAMS] = std::array::from_fn(|index| index);
        order.sort_unstable_by_key(|index| std::cmp::Reverse(self.streams[*index].aside.start));
        order.into_iter().for_each(|index| self.end_stream(index));
    }

    fn end_stream(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        let aside = std::mem::replace(&mut stream.aside, GrainRun { start: 0, count: 0 });
        if aside.count > 0 && !self.put_last(aside) {
            self.put(aside);
        }
    }

    /// Chooses up to `want` grains without allocating them.
    fn choose(&mut self, want: u64) -> Choice {
        let least = if self.free > slack(self.fresh) { 1 } else { want.min(WORTHWHILE) };
        if let Some(run) = self.run_near(least) {
            return Choice::Run(GrainRun { start: run.start, count: run.count.min(want) });
        }
        if self.runs.len() < RUNS_MAX / 2 {
            self.search_forgotten();
        }
        if self.fresh < self.length {
            return Choice::Run(GrainRun { start: self.fresh, count: want.min(self.length - self.fresh) });
        }
        if self.length < self.limit {
            return Choice::Growth;
        }
        if let Some(run) = self.run_near(1) {
            return Choice::Run(GrainRun { start: run.start, count: run.count.min(want) });
        }
        self.search_forgotten();
        Choice::Full
    }

    /// Searches the bitmap again for dropped runs; returns false if there are none.
    pub(super) fn search_forgotten(&mut self) -> bool {
        let again = self.trusted && self.forgot && self.cursor.is_none();
        if again {
            self.search_again();
        }
        again
    }

    /// A run of at least `least` grains. The search begins at the end of the last allocation, and continues from the
    /// start.
    fn run_near(&self, least: u64) -> Option<GrainRun> {
        if self.free < least {
            return None;
        }
        let behind = self.runs.range(self.next..).chain(self.runs.range(..self.next));
        let found = behind.take(LOOKS_MAX).find(|(_, count)| **count >= least);
        found.map(|(&start, &count)| GrainRun { start, count })
    }

    /// The lowest free run, for moving grains down.
    pub(super) fn lowest(&self) -> Option<GrainRun> {
        self.runs.first_key_value().map(|(&start, &count)| GrainRun { start, count })
    }

    /// Allocates grains that [`Space::lowest`] returned, or that were chosen.
    pub(super) fn take(&mut self, run: GrainRun) {
        if run.start == self.fresh {
            self.fresh = run.end();
            return;
        }
        self.next = run.end();
        let Some(count) = self.runs.remove(&run.start) else { return };
        self.free -= run.count;
        if count > run.count {
            self.runs.insert(run.end(), count - run.count);
        }
    }

    /// Frees grains, some of which may be in `runs` already.
    pub(super) fn put(&mut self, run: GrainRun) {
        if run.count == 0 || run.start >= self.fresh {
            return;
        }
        let (mut start, mut end) = (run.start, run.end().min(self.fresh));
        while let Some((&other, &count)) = self.runs.range(..=end).next_back() {
            if other + count < start {
                break;
            }
            self.runs.remove(&other);
            self.free -= count;
            start = start.min(other);
            end = end.max(other + count);
        }
        self.runs.insert(start, end - start);
        self.free += end - start;
        // The lowest runs are kept, because a shrink fills the file from there.
        if self.runs.len() > RUNS_MAX
            && let Some((_, count)) = self.runs.pop_last()
        {
            self.free -= count;
            self.forgot = true;
        }
    }

    /// Frees grains at the end of the allocated part that were never used; returns false, without a change, if the
    /// grains are not at the end.
    pub(super) fn put_last(&mut self, run: GrainRun) -> bool {
        let last = run.end() == self.fresh;
        if last {
            self.fresh = run.start;
        }
        last
    }

    /// Lowers the end of the allocated grains: no grain from `fresh` on is in use.
    pub(super) fn lower(&mut self, fresh: u64) {
        while let Some((&start, &count)) = self.runs.last_key_value() {
            if start + count <= fresh {
                break;
            }
            self.runs.remove(&start);
            self.free -= count;
            if start < fresh {
                self.runs.insert(start, fresh - start);
                self.free += fresh - start;
            }
        }
        self.fresh = self.fresh.min(fresh);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, count: u64) -> GrainRun {
        GrainRun { start, count }
    }

    #[test]
    fn large_writes_use_small_holes_only_when_the_image_cannot_grow() {
        let mut space = Space::new(1000, 100_000, false);
        space.put(run(10, 3));
        space.put(run(100, 20));
        assert_eq!(space.choose(1), Choice::Run(run(10, 1)));
        assert_eq!(space.choose(8), Choice::Run(run(100, 8)));
        assert_eq!(space.choose(128), Choice::Run(run(100, 20)));
        space.take(run(100, 20));
        assert_eq!(space.choose(128), Choice::Growth);
        space.limit = 1000;
        assert_eq!(space.choose(128), Choice::Run(run(10, 3)));
        space.take(run(10, 3));
        assert_eq!((space.choose(1), space.free()), (Choice::Full, 0));
    }

    #[test]
    fn grains_of_each_stream_are_adjacent_when_streams_interleave() {
        let mut space = Space::new(0, 100_000, false);
        space.length = 100_000;
        let mut places: [Vec<u64>; 3] = Default::default();
        for step in 0..1000 {
            for (stream, places) in places.iter_mut().enumerate() {
                let guest = stream as u64 * 50_000 + step;
                let Choice::Run(found) = space.set_aside(guest, 1) else { panic!("there is room") };
                assert_eq!(space.set_aside(guest, 1), Choice::Run(found), "the same run until it is used");
                space.use_aside(guest, found.count);
                places.push(found.start);
            }
            // Another stream writes at scattered locations.
            let Choice::Run(found) = space.set_aside(1_000_000 + step * 7, 1) else { panic!("there is room") };
            space.use_aside(1_000_000 + step * 7, found.count);
        }
        let mut all: Vec<u64> = places.concat();
        for places in &places {
            let breaks = places.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
            assert!(breaks < 12, "{breaks}");
        }
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 3000);
        space.end_streams();
        assert_eq!(space.fresh - space.free(), 4000, "grains set aside and not used are free");
    }

    #[test]
    fn grains_reserved_for_streams_are_used_when_no_others_are_free() {
        let mut space = Space::new(0, 64, false);
        space.length = 64;
        for guest in 0..64 {
            let guest = guest % 2 * 1000 + guest / 2;
            let Choice::Run(found) = space.set_aside(guest, 1) else { panic!("grains for {guest}") };
            space.use_aside(guest, found.count);
        }
        assert_eq!(space.set_aside(5000, 1), Choice::Full);
    }

    #[test]
    fn freed_runs_are_joined_and_counted_once() {
        let mut space = Space::new(1000, 1000, false);
        for (start, count) in [(10, 5), (20, 5), (15, 5), (12, 9), (990, 50), (25, 0)] {
            space.put(run(start, count));
        }
        assert_eq!((space.free(), space.lowest()), (15 + 10, Some(run(10, 15))));
        space.lower(992);
        assert_eq!((space.free(), space.fresh), (15 + 2, 992));
        space.put(run(995, 5));
        assert_eq!(space.free(), 17);
    }
}
