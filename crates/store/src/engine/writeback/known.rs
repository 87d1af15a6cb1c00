//! Stored blocks that were compared for a batch of write-back or a long write already: repeated content of the batch is
//! compared with them without another read.
//!
//! What must hold: such a block is equal to the data to which it was equal when it was read, because it was watched all
//! the time. The caller keeps the watches under which the blocks were read.

use crate::engine::placement::Watch;
use crate::engine::sharing::{Hint, Stored};
use crate::space::Run;
use rustc_hash::{FxHashMap, FxHashSet};

/// What is known about stored blocks.
pub(super) struct KnownBlocks<'a> {
    /// Blocks that were read, each with its watch, or that of the first block of its pack, and the new data to which it
    /// is equal.
    equal: FxHashMap<Stored, (Watch, &'a [u8])>,
    /// The disks and logical blocks of the hints for them.
    places: FxHashSet<(u64, u64)>,
    /// How many more runs may be read.
    reads: usize,
    /// The end of the run that was read last, and that of the logical blocks of its hints.
    last: Option<(u64, (u64, u64))>,
}

impl<'a> KnownBlocks<'a> {
    /// Nothing is known, and so many runs may be read.
    pub fn new(reads: usize) -> Self {
        Self { equal: FxHashMap::default(), places: FxHashSet::default(), reads, last: None }
    }

    /// Whether a run may be read. One that follows the last one on the medium may always be: packs that were written
    /// one after the other cost no more than one plain run.
    pub fn may_read(&self, run: Run) -> bool {
        self.reads > 0 || self.last.is_some_and(|(end, _)| end == run.start)
    }

    /// Counts a run that is read, of which the first of `blocks` blocks has this hint.
    pub fn note_read(&mut self, run: Run, hint: &Hint, blocks: u64) {
        let follows = self.last.is_some_and(|(end, _)| end == run.start);
        self.reads = self.reads.saturating_sub(usize::from(!follows));
        self.last = Some((run.start + run.blocks, (hint.disk, hint.logical + blocks)));
    }

    /// Whether the block of a hint may be compared: without another read it must be known, or follow the blocks that
    /// were read last.
    pub fn may_compare(&self, hint: &Hint) -> bool {
        let place = (hint.disk, hint.logical);
        self.reads > 0 || self.places.contains(&place) || self.last.is_some_and(|(_, next)| next == place)
    }

    /// How many of the `blocks` blocks from `first` on are all known, or all unknown, and whether they are known.
    pub fn first_of(&self, first: Stored, blocks: u64) -> (u64, bool) {
        let is_known = |at: u64| first.after(at).is_some_and(|stored| self.equal.contains_key(&stored));
        let known = is_known(0);
        (1 + (1..blocks).take_while(|at| is_known(*at) == known).count() as u64, known)
    }

    /// Adds the stored blocks of hints from this one on, which were read under these watches, and are equal to this
    /// data.
    pub fn add(&mut self, hint: &Hint, first: Stored, watches: &[Watch], data: impl Iterator<Item = &'a [u8]>) {
        for (at, data) in (0..).zip(data) {
            if let Some((stored, watch)) = watched(first, watches, at) {
                self.places.insert((hint.disk, hint.logical + at));
                self.equal.insert(stored, (watch, data));
            }
        }
    }

    /// Whether known blocks are equal to this data, and were watched until these watches of them began.
    pub fn are_equal<'d>(&self, first: Stored, watches: &[Watch], data: impl Iterator<Item = &'d [u8]>) -> bool {
        (0..).zip(data).all(|(at, data)| {
            let Some((stored, watch)) = watched(first, watches, at) else { return false };
            // A watch that begins after the known one has ended has another number.
            self.equal.get(&stored).is_some_and(|(known, equal)| *known == watch && *equal == data)
        })
    }
}

/// The block that is `at` blocks after `first`, and its watch. The blocks of a pack are in use and free together, so
/// that of its first block is the watch of all.
fn watched(first: Stored, watches: &[Watch], at: u64) -> Option<(Stored, Watch)> {
    let watch = if first.packed.is_some() { 0 } else { at as usize };
    Some((first.after(at)?, *watches.get(watch)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::placement::InFlight;
    use crate::tree::Packed;

    const HINT: Hint = Hint { number: 1, disk: 5, logical: 70 };

    fn plain(physical: u64) -> Stored {
        Stored { physical, packed: None }
    }

    fn packed(index: u8) -> Stored {
        Stored { physical: 100, packed: Some(Packed { index, stored: 2 }) }
    }

    fn write(in_flight: &mut InFlight, start: u64) {
        in_flight.claim(Run { start, blocks: 1 });
        in_flight.release(Run { start, blocks: 1 });
    }

    #[test]
    fn a_known_block_is_equal_to_its_data_as_long_as_it_is_watched() {
        let (mut in_flight, data, other) = (InFlight::default(), [7; 16], [8; 16]);
        let mut known = KnownBlocks::new(1);
        let watches = [100, 101].map(|block| in_flight.watch(block));
        known.add(&HINT, plain(100), &watches, [&data[..], &other].into_iter());
        let again = [100, 101].map(|block| in_flight.watch(block));
        assert!(known.are_equal(plain(100), &again, [&data[..], &other].into_iter()));
        let collides = known.are_equal(plain(100), &again, [&data[..], &data].into_iter());
        assert!(!collides, "other content with the same checksum");
        assert!(!known.are_equal(plain(102), &[in_flight.watch(102)], [&data[..]].into_iter()), "not known");
        write(&mut in_flight, 101);
        let later = [100, 101].map(|block| in_flight.watch(block));
        assert!(known.are_equal(plain(100), &later[..1], [&data[..]].into_iter()));
        assert!(!known.are_equal(plain(100), &later, [&data[..], &other].into_iter()));
        assert_eq!(known.first_of(plain(100), 2), (2, true));
    }

    #[test]
    fn the_blocks_of_a_pack_are_known_by_their_indexes() {
        let (mut in_flight, data, other) = (InFlight::default(), [7; 16], [8; 16]);
        let mut known = KnownBlocks::new(1);
        let watches = [100, 101].map(|block| in_flight.watch(block));
        known.add(&HINT, packed(3), &watches, [&data[..], &other, &data].into_iter());
        assert_eq!((known.first_of(packed(3), 5), known.first_of(packed(2), 3)), ((3, true), (1, false)));
        assert_eq!(known.first_of(plain(100), 1), (1, false), "a plain block is another one");
        assert!(known.are_equal(packed(4), &watches, [&other[..], &data].into_iter()));
        assert!(!known.are_equal(packed(3), &watches, [&other[..]].into_iter()));
        // The pack is freed, and its blocks are used again.
        in_flight.end_watches(Run { start: 100, blocks: 2 });
        let again = [100, 101].map(|block| in_flight.watch(block));
        assert!(!known.are_equal(packed(4), &again, [&other[..]].into_iter()));
    }

    #[test]
    fn only_known_blocks_are_compared_when_all_reads_are_done() {
        let (mut in_flight, data) = (InFlight::default(), [7; 16]);
        let mut known = KnownBlocks::new(1);
        let next = Hint { logical: 71, ..HINT };
        assert!(known.may_compare(&next));
        known.note_read(Run { start: 100, blocks: 1 }, &HINT, 1);
        let later = Hint { logical: 72, ..HINT };
        assert!(known.may_compare(&next) && !known.may_compare(&later), "the next block follows what was read");
        known.note_read(Run { start: 300, blocks: 1 }, &later, 1);
        known.add(&HINT, plain(100), &[in_flight.watch(100)], [&data[..]].into_iter());
        assert!(known.may_compare(&HINT) && !known.may_compare(&next));
        assert!(!known.may_compare(&Hint { disk: 6, ..HINT }));
        assert_eq!((known.first_of(plain(100), 3), known.first_of(plain(98), 3)), ((1, true), (2, false)));
    }

    #[test]
    fn runs_that_follow_each_other_on_the_medium_count_as_one_read() {
        let mut known = KnownBlocks::new(2);
        let run = |start| Run { start, blocks: 17 };
        let hint = |logical| Hint { logical, ..HINT };
        for at in 0..5 {
            assert!(known.may_compare(&hint(32 * at)) && known.may_read(run(100 + 17 * at)));
            known.note_read(run(100 + 17 * at), &hint(32 * at), 32);
        }
        assert!(known.may_read(run(500)), "one of two");
        known.note_read(run(500), &hint(700), 32);
        assert!(!known.may_read(run(100)) && known.may_read(run(517)));
        assert!(known.may_compare(&hint(732)) && !known.may_compare(&hint(0)));
    }
}
