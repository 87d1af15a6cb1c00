//! Runs of duplicates with one content, in leaves that have no room for an entry for each block.
//!
//! Blocks with one content that is repeated get an entry each when all of them are mapped to a single block. A leaf
//! that several trees share cannot be split for these. But a run of them that has one entry can be mapped to another
//! such run as a whole: it has one entry again. So the pass keeps a run of each content, and maps the others to it.
//!
//! The code in this file is pure: no I/O, no locks.

use crate::tree::EXTENT_BLOCKS_MAX;
use std::cmp::Reverse;

/// The other blocks of the entry that maps a block: how many lie before it, and how many after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WithinEntry {
    pub before: u64,
    pub after: u64,
}

impl WithinEntry {
    /// More than the blocks of any entry.
    pub const LONGEST: Self = Self { before: EXTENT_BLOCKS_MAX, after: EXTENT_BLOCKS_MAX };
}

/// Adjacent blocks of one entry with the same checksum, by the index of the print of the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOfPrints {
    pub first: u32,
    pub blocks: u32,
}

/// A run, and the one that is kept instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replacement {
    pub kept: RunOfPrints,
    pub run: RunOfPrints,
}

/// The runs that a pass has found.
#[derive(Default)]
pub struct Runs {
    /// Runs that were noted since the others were put in order.
    noted: Vec<RunOfPrints>,
    /// In descending order of their checksums, the longest one of each checksum last.
    ordered: Vec<RunOfPrints>,
    /// The run that others are compared with.
    kept: Option<RunOfPrints>,
}

impl Runs {
    /// Notes a run. A single block is no repetition.
    pub fn add(&mut self, run: RunOfPrints) {
        if run.blocks > 1 && self.noted.last() != Some(&run) {
            self.noted.push(run);
        }
    }

    /// The next run, and the one that is to replace it: the longest one with the same checksum, because a longer run
    /// would have to be divided.
    pub fn next(&mut self, sum_of: impl Fn(u32) -> u32) -> Option<Replacement> {
        if self.ordered.is_empty() {
            self.kept = None;
            self.ordered = std::mem::take(&mut self.noted);
            self.ordered.sort_unstable_by_key(|run| (sum_of(run.first), run.blocks, Reverse(run.first)));
        }
        while let Some(run) = self.ordered.last().copied() {
            match self.kept.filter(|kept| sum_of(kept.first) == sum_of(run.first)) {
                Some(kept) => return Some(Replacement { kept, run }),
                None => self.kept = self.ordered.pop(),
            }
        }
        None
    }

    /// Ends with the run that was next.
    pub fn pass(&mut self) {
        self.ordered.pop();
    }

    /// Keeps the run that was next, because the one that was kept cannot replace it.
    pub fn keep(&mut self) {
        self.kept = self.ordered.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_run_of_a_checksum_replaces_the_others() {
        let mut runs = Runs::default();
        let sum_of = |first: u32| first / 100;
        for (first, blocks) in [(10, 5), (110, 2), (20, 8), (20, 8), (30, 8), (40, 1), (150, 3)] {
            runs.add(RunOfPrints { first, blocks });
        }
        let next = |runs: &mut Runs| runs.next(sum_of).map(|of| (of.kept.first, of.run.first));
        assert_eq!(next(&mut runs), Some((150, 110)));
        assert_eq!(next(&mut runs), Some((150, 110)), "until it was processed");
        runs.pass();
        assert_eq!(next(&mut runs), Some((20, 30)));
        runs.keep();
        assert_eq!(next(&mut runs), Some((30, 10)));
        runs.add(RunOfPrints { first: 60, blocks: 9 });
        runs.pass();
        assert_eq!(next(&mut runs), None, "a single run");
        runs.add(RunOfPrints { first: 70, blocks: 2 });
        runs.add(RunOfPrints { first: 80, blocks: 2 });
        assert_eq!(next(&mut runs), Some((70, 80)));
    }
}
