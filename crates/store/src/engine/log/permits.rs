//! Permits: the journal has durably announced these blocks, so they may be overwritten in place until the next flush of
//! the data files.

use crate::space::Run;
use std::collections::BTreeMap;

/// The most permitted ranges. If there are more, all are dropped, and writes announce their blocks again.
const PERMITS_MAX: usize = 4096;

/// The permitted physical ranges: start to end.
#[derive(Default)]
pub struct Permits {
    ranges: BTreeMap<u64, u64>,
}

impl Permits {
    /// Whether every block of a run is permitted.
    pub fn covers(&self, run: Run) -> bool {
        self.ranges.range(..=run.start).next_back().is_some_and(|(_, end)| *end >= run.start + run.blocks)
    }

    /// Permits a run.
    pub fn add(&mut self, run: Run) {
        if self.ranges.len() >= PERMITS_MAX {
            self.ranges.clear();
        }
        let (mut start, mut end) = (run.start, run.start + run.blocks);
        while let Some((&from, &to)) = self.ranges.range(..=end).next_back()
            && to >= start
        {
            self.ranges.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.ranges.insert(start, end);
    }

    /// Ends all permits.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_cover_added_runs_and_join_adjacent_ones() {
        let mut permits = Permits::default();
        permits.add(Run { start: 100, blocks: 50 });
        permits.add(Run { start: 200, blocks: 50 });
        assert!(permits.covers(Run { start: 100, blocks: 50 }));
        assert!(!permits.covers(Run { start: 140, blocks: 20 }));
        permits.add(Run { start: 150, blocks: 50 });
        assert!(permits.covers(Run { start: 100, blocks: 150 }));
        permits.clear();
        assert!(!permits.covers(Run { start: 100, blocks: 1 }));
    }
}
