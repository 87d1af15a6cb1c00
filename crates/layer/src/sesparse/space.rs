//! Which grains are free: runs of free grains known, and the end of what was ever handed out.
//!
//! Places for new grains come from three sources, in this order:
//!
//! 1. a free run near the last allocation that is worth breaking a stream for ([`WORTHWHILE`] grains, or all of what is
//!    wanted), so that what is written together lies together;
//! 2. the end of the grain area;
//! 3. free runs however small, when the end is the capacity, or when so much is free in the middle that the file would
//!    grow to no purpose ([`slack`]).
//!
//! What must hold, all of it under the lock of the layer:
//!
//! 1. A grain in `runs` is not named by any table, in memory or on the medium, nobody reads it any more, and its bit in
//!    the bitmap is clear.
//! 2. Grains from `fresh` on were never handed out, or are as good as that.
//! 3. `fresh <= length <= limit`; the file reaches to `length`.

use super::entry::Run;
use std::collections::BTreeMap;

/// Shortest free run that is used while there is room at the end, in grains: 64 KiB.
const WORTHWHILE: u64 = 16;
/// Free runs kept in memory; more are forgotten, and found again in the bitmap.
const RUNS_MAX: usize = if cfg!(test) { 16 } else { 1 << 15 };
/// Free runs looked at for one allocation.
const LOOKS_MAX: usize = 32;
/// Free grains beyond which even the smallest runs are used: 64 MiB, or an eighth of the file.
const SLACK: u64 = 1 << 14;

fn slack(fresh: u64) -> u64 {
    SLACK.max(fresh / 8)
}

/// Where an allocation can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// Here.
    Run(Run),
    /// At the end, once the file is longer.
    Growth,
    /// Nowhere now: all of the grain area is taken, or waits for a commit or a reader.
    Full,
}

/// Free grains.
#[derive(Debug)]
pub(super) struct Space {
    /// Count by start; disjoint, never adjoining.
    runs: BTreeMap<u64, u64>,
    free: u64,
    /// Where the last allocation from a run ended.
    next: u64,
    pub(super) fresh: u64,
    pub(super) length: u64,
    pub(super) limit: u64,
    /// Page of the bitmap to be searched next; `None` when all have been, or must not be.
    cursor: Option<u64>,
    /// Runs were forgotten since the search began.
    forgot: bool,
}

impl Space {
    /// The space of a file that holds `length` grains. Where the bitmap is to be trusted, it is searched bit by bit.
    pub(super) fn new(length: u64, limit: u64, trusted: bool) -> Self {
        let length = length.min(limit);
        let cursor = (trusted && length > 0).then_some(0);
        Self { runs: BTreeMap::new(), free: 0, next: 0, fresh: length, length, limit, cursor, forgot: false }
    }

    /// The page of the bitmap to search before the next allocation.
    pub(super) fn to_search(&self) -> Option<u64> {
        self.cursor
    }

    /// That page has been searched; `pages` is how many there are.
    pub(super) fn searched(&mut self, pages: u64) {
        self.cursor = self.cursor.map(|page| page + 1).filter(|page| *page < pages);
    }

    /// Searches the bitmap once more from the start.
    pub(super) fn search_again(&mut self) {
        self.cursor = Some(0);
        self.forgot = false;
    }

    /// Free grains known.
    pub(super) fn free(&self) -> u64 {
        self.free
    }

    /// Chooses a place for up to `want` grains, without taking it.
    pub(super) fn choose(&mut self, want: u64) -> Choice {
        let least = if self.free > slack(self.fresh) { 1 } else { want.min(WORTHWHILE) };
        if let Some(run) = self.run_near(least) {
            return Choice::Run(Run { start: run.start, count: run.count.min(want) });
        }
        if self.runs.len() < RUNS_MAX / 2 {
            self.search_forgotten();
        }
        if self.fresh < self.length {
            return Choice::Run(Run { start: self.fresh, count: want.min(self.length - self.fresh) });
        }
        if self.length < self.limit {
            return Choice::Growth;
        }
        if let Some(run) = self.run_near(1) {
            return Choice::Run(Run { start: run.start, count: run.count.min(want) });
        }
        self.search_forgotten();
        Choice::Full
    }

    /// Searches again for runs that were forgotten, if there are any; whether it will.
    pub(super) fn search_forgotten(&mut self) -> bool {
        let again = self.forgot && self.cursor.is_none();
        if again {
            self.search_again();
        }
        again
    }

    /// A run of at least `least` grains from the last allocation onwards, then from the start.
    fn run_near(&self, least: u64) -> Option<Run> {
        if self.free < least {
            return None;
        }
        let behind = self.runs.range(self.next..).chain(self.runs.range(..self.next));
        let found = behind.take(LOOKS_MAX).find(|(_, count)| **count >= least);
        found.map(|(&start, &count)| Run { start, count })
    }

    /// The lowest free run, for moving grains down.
    pub(super) fn lowest(&self) -> Option<Run> {
        self.runs.first_key_value().map(|(&start, &count)| Run { start, count })
    }

    /// Takes grains that [`Space::choose`] or [`Space::lowest`] named.
    pub(super) fn take(&mut self, run: Run) {
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

    /// Takes free grains back. Those known to be free already may be among them.
    pub(super) fn put(&mut self, run: Run) {
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
        // The lowest are kept: these the file is filled up with when it shrinks.
        if self.runs.len() > RUNS_MAX
            && let Some((_, count)) = self.runs.pop_last()
        {
            self.free -= count;
            self.forgot = true;
        }
    }

    /// Takes back grains that were just handed out at the end and never used.
    pub(super) fn put_last(&mut self, run: Run) -> bool {
        let last = run.end() == self.fresh;
        if last {
            self.fresh = run.start;
        }
        last
    }

    /// Lowers the end of what was handed out: nothing from `fresh` on is in use.
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

    fn run(start: u64, count: u64) -> Run {
        Run { start, count }
    }

    #[test]
    fn small_holes_wait_until_they_are_many() {
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
    fn runs_merge_and_known_ones_are_not_counted_twice() {
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
