//! Stored blocks that were compared for a batch of write-back or a long write already: repeated content of the batch is
//! compared with them without another read.
//!
//! What must hold: such a block is equal to the data to which it was equal when it was read, because it was watched all
//! the time. The caller keeps the watches under which the blocks were read.

use crate::engine::placement::Watch;
use crate::engine::sharing::Hint;
use crate::space::Run;
use rustc_hash::{FxHashMap, FxHashSet};

/// What is known about stored blocks.
pub(super) struct KnownBlocks<'a> {
    /// Blocks that were read, each with its watch and the new data to which it is equal.
    equal: FxHashMap<u64, (Watch, &'a [u8])>,
    /// The disks and logical blocks of the hints for them.
    places: FxHashSet<(u64, u64)>,
    /// How many more runs may be read.
    reads: usize,
}

impl<'a> KnownBlocks<'a> {
    /// Nothing is known, and so many runs may be read.
    pub fn new(reads: usize) -> Self {
        Self { equal: FxHashMap::default(), places: FxHashSet::default(), reads }
    }

    /// Whether another run may be read.
    pub fn may_read(&self) -> bool {
        self.reads > 0
    }

    /// Counts a run that is read.
    pub fn note_read(&mut self) {
        self.reads = self.reads.saturating_sub(1);
    }

    /// Whether the block of a hint may be compared: without another read it must be known.
    pub fn may_compare(&self, hint: &Hint) -> bool {
        self.may_read() || self.places.contains(&(hint.disk, hint.logical))
    }

    /// The first blocks of a run that are all known, or all unknown, and whether they are known.
    pub fn first_of(&self, run: Run) -> (Run, bool) {
        let is_known = |block: u64| self.equal.contains_key(&block);
        let known = is_known(run.start);
        let others = (run.start..run.start + run.blocks).skip(1).take_while(|block| is_known(*block) == known);
        (Run { start: run.start, blocks: 1 + others.count() as u64 }, known)
    }

    /// Adds the stored blocks of hints from this one on, which were read under these watches, and are equal to this
    /// data.
    pub fn add(&mut self, first: &Hint, watches: &[Watch], data: impl Iterator<Item = &'a [u8]>) {
        self.places.extend((first.logical..).take(watches.len()).map(|logical| (first.disk, logical)));
        self.equal.extend(watches.iter().zip(data).map(|(watch, data)| (watch.block(), (*watch, data))));
    }

    /// Whether known blocks are equal to this data, and were watched until these watches of them began.
    pub fn are_equal<'d>(&self, watches: &[Watch], data: impl Iterator<Item = &'d [u8]>) -> bool {
        watches.iter().zip(data).all(|(watch, data)| {
            // A watch that begins after the known one has ended has another number.
            self.equal.get(&watch.block()).is_some_and(|(known, equal)| known == watch && *equal == data)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::placement::InFlight;

    const HINT: Hint = Hint { number: 1, disk: 5, logical: 70 };

    #[test]
    fn a_known_block_is_equal_to_its_data_as_long_as_it_is_watched() {
        let (mut in_flight, data, other) = (InFlight::default(), [7; 16], [8; 16]);
        let mut known = KnownBlocks::new(1);
        let run = Run { start: 100, blocks: 2 };
        let watches = [100, 101].map(|block| in_flight.watch(block));
        known.add(&HINT, &watches, [&data[..], &other].into_iter());
        let again = [100, 101].map(|block| in_flight.watch(block));
        assert!(known.are_equal(&again, [&data[..], &other].into_iter()));
        assert!(!known.are_equal(&again, [&data[..], &data].into_iter()), "other content with the same checksum");
        assert!(!known.are_equal(&[in_flight.watch(102)], [&data[..]].into_iter()), "not known");
        // A write of the second block begins.
        in_flight.claim(Run { start: 101, blocks: 1 });
        in_flight.release(Run { start: 101, blocks: 1 });
        let later = [100, 101].map(|block| in_flight.watch(block));
        assert!(known.are_equal(&later[..1], [&data[..]].into_iter()));
        assert!(!known.are_equal(&later, [&data[..], &other].into_iter()));
        assert_eq!(known.first_of(run), (run, true));
    }

    #[test]
    fn only_known_blocks_are_compared_when_all_reads_are_done() {
        let (mut in_flight, data) = (InFlight::default(), [7; 16]);
        let mut known = KnownBlocks::new(1);
        let next = Hint { logical: 71, ..HINT };
        assert!(known.may_compare(&next));
        known.note_read();
        known.add(&HINT, &[in_flight.watch(100)], [&data[..]].into_iter());
        assert!(!known.may_read() && known.may_compare(&HINT) && !known.may_compare(&next));
        assert!(!known.may_compare(&Hint { disk: 6, ..HINT }));
        let part = |start: u64, blocks: u64| Run { start, blocks };
        assert_eq!(known.first_of(part(100, 3)), (part(100, 1), true));
        assert_eq!(known.first_of(part(98, 3)), (part(98, 2), false));
    }
}
