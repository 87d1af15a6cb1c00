//! Prints: the checksums of blocks, by which a pass finds blocks that may have the same content.
//!
//! The table of data blocks has the CRC32C of each block, so no data is read to find candidates. Equal checksums do not
//! prove equal content: the blocks are compared before one replaces the other.
//!
//! The memory of a pass is limited. A round collects the prints of a range of checksums. If there are too many, the
//! upper half of the range is left to later rounds. So a pass finds all pairs, however much data there is.
//!
//! The code in this file is pure: no I/O, no locks.

use super::runs::{RunOfPrints, WithinEntry};
use std::cmp::Reverse;
use std::ops::Range;

/// The number of all checksums.
pub const SUMS: u64 = 1 << 32;
/// The most references of a block with which others are shared. Each leaf that is copied after a snapshot adds its
/// references again, and the table has room for 16,384 times as many.
pub const KEPT_REFERENCES_MAX: u32 = if cfg!(test) { 256 } else { 1 << 14 };
/// Bits of [`Print::place`] that hold the logical block.
const LOGICAL_BITS: u32 = 40;
/// The bit of [`Print::place`] of a block in a pack.
const IN_PACK: u64 = 1 << 63;

/// A block that a disk or snapshot maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Print {
    pub sum: u32,
    /// The number of the disk or snapshot in the pass.
    pub object: u32,
    /// The logical block in bits 0 to 39, above them the references of the block, and [`IN_PACK`].
    place: u64,
}

impl Print {
    /// The print of a block with this checksum and less than [`KEPT_REFERENCES_MAX`] references.
    pub fn new(sum: u32, object: u32, logical: u64, references: u32) -> Self {
        Self { sum, object, place: logical | u64::from(references.min(KEPT_REFERENCES_MAX)) << LOGICAL_BITS }
    }

    /// The print of a block in a pack.
    pub fn in_pack(self) -> Self {
        Self { place: self.place | IN_PACK, ..self }
    }

    fn is_in_pack(&self) -> bool {
        self.place & IN_PACK != 0
    }

    pub fn logical(&self) -> u64 {
        self.place & ((1 << LOGICAL_BITS) - 1)
    }

    fn references(&self) -> u32 {
        ((self.place & !IN_PACK) >> LOGICAL_BITS) as u32
    }

    /// Whether the other print is of the next block of the same disk or snapshot.
    pub fn precedes(&self, other: &Self) -> bool {
        self.object == other.object && self.logical() + 1 == other.logical()
    }
}

/// The prints of a round.
pub struct Prints {
    /// In the order in which they were added.
    all: Vec<Print>,
    /// The most prints.
    limit: usize,
    /// The checksums of the round.
    range: Range<u64>,
}

impl Prints {
    pub fn new(limit: usize) -> Self {
        Self { all: Vec::new(), limit, range: 0..SUMS }
    }

    pub fn get(&self, index: u32) -> Print {
        self.all[index as usize]
    }

    /// The checksums of the round.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Adds a print, unless its checksum belongs to another round. False if there is no room, because too many blocks
    /// have the same checksum: the prints collected so far have to be processed first.
    pub fn add(&mut self, print: Print) -> bool {
        if !self.range.contains(&u64::from(print.sum)) {
            return true;
        }
        while self.all.len() >= self.limit {
            if self.range.end - self.range.start == 1 {
                return false;
            }
            self.narrow();
            if !self.range.contains(&u64::from(print.sum)) {
                return true;
            }
        }
        if self.all.len() == self.all.capacity() {
            // A vector that doubles its capacity by itself would exceed the limit.
            let more = self.all.len().max(1024).min(self.limit - self.all.len());
            self.all.reserve_exact(more);
        }
        self.all.push(print);
        true
    }

    /// Leaves the upper half of the prints to later rounds.
    fn narrow(&mut self) {
        let mut sums: Vec<u32> = self.all.iter().map(|print| print.sum).collect();
        let middle = sums.len() / 2;
        let (_, middle, _) = sums.select_nth_unstable(middle);
        self.range.end = u64::from(*middle).max(self.range.start + 1);
        let end = self.range.end;
        self.all.retain(|print| u64::from(print.sum) < end);
    }

    /// Begins the next round. False if there is none.
    pub fn next_round(&mut self) -> bool {
        let width = self.range.end - self.range.start;
        let width = if self.all.len() < self.limit / 2 { 2 * width } else { width };
        self.all.clear();
        self.range = self.range.end..(self.range.end + width).min(SUMS);
        !self.range.is_empty()
    }

    /// For each print the one with the same checksum that is kept instead; `None` for a print that is itself kept. Also
    /// returns the prints that are kept beside others with the same checksum.
    pub fn kept(&self) -> (Vec<Option<u32>>, Vec<u32>) {
        let mut kept = vec![None; self.all.len()];
        let several = self.assign(&mut (0..self.all.len() as u32).collect::<Vec<u32>>(), &mut kept, |_| 0);
        (kept, several)
    }

    /// Determines for each of these prints which of them is kept instead: of those with the same checksum and the same
    /// `hash_of` one in a pack, because no plain block replaces it, and of these the one with the most references, as
    /// long as it can get more, then the next one. Returns those that are kept beside others.
    pub fn assign(&self, indexes: &mut [u32], kept: &mut [Option<u32>], hash_of: impl Fn(u32) -> u64) -> Vec<u32> {
        let mut several = Vec::new();
        let group_of = |index: u32| (self.get(index).sum, hash_of(index));
        indexes.sort_unstable_by_key(|index| {
            let print = self.get(*index);
            (group_of(*index), !print.is_in_pack(), Reverse(print.references()), *index)
        });
        for group in indexes.chunk_by(|a, b| group_of(*a) == group_of(*b)) {
            let mut rest = group;
            while let Some((first, others)) = rest.split_first() {
                let room = KEPT_REFERENCES_MAX.saturating_sub(self.get(*first).references()).max(1);
                let (replaced, others) = others.split_at(others.len().min(room as usize));
                kept[*first as usize] = None;
                replaced.iter().for_each(|index| kept[*index as usize] = Some(*first));
                rest = others;
                if replaced.len() + 1 < group.len() {
                    several.push(*first);
                }
            }
        }
        several
    }

    /// The blocks of an entry around the one with this print that have the same checksum, as far as no other block lies
    /// between them.
    pub fn repeated(&self, index: u32, entry: WithinEntry) -> RunOfPrints {
        let joins = |at: &usize| {
            self.all.get(*at..*at + 2).is_some_and(|two| two[0].sum == two[1].sum && two[0].precedes(&two[1]))
        };
        let at = index as usize;
        let before = (0..at).rev().take(entry.before as usize).take_while(joins).count();
        let after = (at..self.all.len()).take(entry.after as usize).take_while(joins).count();
        RunOfPrints { first: (at - before) as u32, blocks: (before + 1 + after) as u32 }
    }

    /// Notes that a block has got the references of another one.
    pub fn note_shared(&mut self, kept: u32, duplicate: u32) {
        let of = |index: u32| self.get(index).references();
        let more = of(duplicate).max(1).min(KEPT_REFERENCES_MAX.saturating_sub(of(kept)));
        self.all[kept as usize].place += u64::from(more) << LOGICAL_BITS;
    }

    /// Removes all prints except those that are kept and can get more references. They fill a part of the room at most.
    pub fn retain_kept(&mut self, kept: &[Option<u32>]) {
        let mut at = 0;
        self.all.retain(|print| {
            at += 1;
            kept[at - 1].is_none() && print.references() < KEPT_REFERENCES_MAX
        });
        self.all.truncate(self.limit / 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(sum: u32, logical: u64, references: u32) -> Print {
        Print::new(sum, 0, logical, references)
    }

    #[test]
    fn of_equal_checksums_the_one_with_the_most_references_is_kept_and_then_the_first() {
        let mut prints = Prints::new(100);
        for (logical, (sum, references)) in [(7, 1), (8, 1), (7, 3), (7, 3), (9, 0), (8, 1)].into_iter().enumerate() {
            assert!(prints.add(print(sum, logical as u64, references)));
        }
        let (mut kept, several) = prints.kept();
        assert!(several.is_empty());
        assert_eq!(kept, [Some(2), None, None, Some(2), None, Some(1)]);
        // Two of the blocks turn out to differ from the one that was kept, and then from each other.
        prints.assign(&mut [3, 0], &mut kept, |_| 5);
        assert_eq!(kept, [Some(3), None, None, None, None, Some(1)]);
        prints.assign(&mut [3, 0], &mut kept, u64::from);
        assert_eq!(kept, [None, None, None, None, None, Some(1)]);
        assert!(prints.get(0).precedes(&prints.get(1)) && !prints.get(0).precedes(&prints.get(2)));
    }

    /// Otherwise the remaining ones would be compared with each of these blocks in turn.
    #[test]
    fn a_block_that_can_get_no_more_references_is_not_kept_for_others() {
        let mut prints = Prints::new(1000);
        (0..700).for_each(|logical| assert!(prints.add(print(7, logical, if logical == 5 { 250 } else { 1 }))));
        let (kept, several) = prints.kept();
        assert_eq!(several, [5, 7, 263, 519]);
        let of = |index: u32| kept.iter().filter(|kept| **kept == Some(index)).count();
        assert_eq!([5, 7, 263, 519].map(of), [6, 255, 255, 180]);
    }

    #[test]
    fn a_repetition_ends_with_its_entry_and_before_other_checksums_and_gaps() {
        let mut prints = Prints::new(100);
        for (logical, sum) in [(0, 7), (1, 7), (2, 7), (3, 8), (5, 7), (6, 7), (8, 7)] {
            assert!(prints.add(print(sum, logical, 1)));
        }
        let repeated = |index, before, after| {
            let RunOfPrints { first, blocks } = prints.repeated(index, WithinEntry { before, after });
            (first, blocks)
        };
        assert_eq!((repeated(1, 9, 9), repeated(1, 0, 9), repeated(1, 9, 0)), ((0, 3), (1, 2), (0, 2)));
        assert_eq!((repeated(5, 9, 9), repeated(6, 9, 9), repeated(3, 9, 9)), ((4, 2), (6, 1), (3, 1)));
    }

    /// Every pair of equal checksums is found, however little memory there is.
    #[test]
    fn rounds_find_all_pairs() {
        for limit in [8, 40, 1000] {
            let sums: Vec<u32> = (0..300u32).map(|at| (at % 150).wrapping_mul(0x9e37_79b9)).collect();
            let mut prints = Prints::new(limit);
            let (mut found, mut rounds) = (0, 0);
            loop {
                sums.iter().zip(0..).for_each(|(sum, logical)| assert!(prints.add(print(*sum, logical, 1))));
                found += prints.kept().0.iter().flatten().count();
                rounds += 1;
                if !prints.next_round() {
                    break;
                }
            }
            assert_eq!(found, 150, "limit {limit}");
            assert!(rounds > 1 || limit == 1000, "{rounds} rounds");
        }
    }

    #[test]
    fn too_many_equal_checksums_are_processed_in_parts() {
        let mut prints = Prints::new(8);
        let mut added = 0;
        while added < 100 && (prints.add(print(5, added, 1)) || prints.range().end <= 5) {
            if prints.range().end <= 5 {
                assert!(prints.next_round());
                added = 0;
                continue;
            }
            added += 1;
        }
        assert_eq!((prints.range(), added), (5..6, 8));
        prints.retain_kept(&prints.kept().0);
        assert!(prints.add(print(5, 200, 1)) && prints.kept().0 == [None, Some(0)]);
        // The block that was kept can get no more references.
        (0..300).for_each(|_| prints.note_shared(0, 1));
        prints.retain_kept(&[None, Some(0)]);
        assert!(prints.add(print(5, 201, 1)) && prints.kept().0 == [None]);
    }
}
