//! A bitmap of the parts of a disk that still have to be copied.
//!
//! Marks are only set, never cleared. The copier reads them once, in order of offset, and marks before its cursor have
//! no effect. A write sets marks while it holds the lock of its range, and the copier reads them under the same lock.
//! So the bitmap needs no lock of its own.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Least number of bytes per bit: the size of a block.
const UNIT_MIN: u64 = 4096;
/// Most bits in the bitmap: 8 MiB of memory, which suffices for one bit per block in disks up to 256 GiB.
const UNITS_MAX: u64 = 64 << 20;

/// A bitmap of the parts of a disk that the copier has to copy.
pub(super) struct Work {
    words: Box<[AtomicU64]>,
    unit: u64,
    capacity: u64,
}

impl Work {
    /// A bitmap without marks for a disk of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        let unit = capacity.div_ceil(UNITS_MAX).max(UNIT_MIN).next_power_of_two();
        let words = capacity.div_ceil(unit).div_ceil(64) as usize;
        Self { words: (0..words).map(|_| AtomicU64::new(0)).collect(), unit, capacity }
    }

    /// Marks every part that overlaps `range`.
    pub fn mark(&self, range: &Range<u64>) {
        let end = range.end.min(self.capacity).div_ceil(self.unit);
        let mut unit = range.start / self.unit;
        while unit < end {
            let (word, bit) = ((unit / 64) as usize, unit % 64);
            let bits = (end - unit).min(64 - bit);
            let mask = (u64::MAX >> (64 - bits)) << bit;
            // The word is read first: on a busy disk most marks are set already, and a read costs less than an atomic
            // write to a shared cache line.
            if self.words[word].load(Ordering::SeqCst) & mask != mask {
                self.words[word].fetch_or(mask, Ordering::SeqCst);
            }
            unit += bits;
        }
    }

    /// The marked run that begins at `at`, cut to at most `most` bytes; `None` if byte `at` is not marked.
    pub fn run_at(&self, at: u64, most: u64) -> Option<Range<u64>> {
        if at >= self.capacity || !self.is_marked(at / self.unit) {
            return None;
        }
        let mut end = (at / self.unit + 1) * self.unit;
        while end - at < most && end < self.capacity && self.is_marked(end / self.unit) {
            end += self.unit;
        }
        Some(at..end.min(at.saturating_add(most)).min(self.capacity))
    }

    /// The first marked byte at or after `from` and before `until`. If there is none: `until`, or the capacity if that
    /// is lower. Reads only the part of the bitmap up to the result.
    pub fn first_marked(&self, from: u64, until: u64) -> u64 {
        self.first(from, until, |word| word)
    }

    /// As [`Work::first_marked`], for the first byte that is not marked.
    pub fn first_unmarked(&self, from: u64, until: u64) -> u64 {
        self.first(from, until, |word| !word)
    }

    fn first(&self, from: u64, until: u64, wanted: impl Fn(u64) -> u64) -> u64 {
        let until = until.min(self.capacity);
        let (mut unit, end) = (from / self.unit, until.div_ceil(self.unit));
        while unit < end {
            let word = self.words.get((unit / 64) as usize).map_or(0, |word| word.load(Ordering::SeqCst));
            let bits = wanted(word) & (u64::MAX << (unit % 64));
            if bits != 0 {
                let first = unit / 64 * 64 + u64::from(bits.trailing_zeros());
                return (first * self.unit).max(from).min(until);
            }
            unit = (unit / 64 + 1) * 64;
        }
        until
    }

    /// Number of marked bytes, in whole parts.
    pub fn bytes(&self) -> u64 {
        let bits: u64 = self.words.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum();
        (bits * self.unit).min(self.capacity)
    }

    fn is_marked(&self, unit: u64) -> bool {
        let word = self.words.get((unit / 64) as usize).map_or(0, |word| word.load(Ordering::SeqCst));
        word & (1 << (unit % 64)) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first marked run at or after `from`, cut to at most `most` bytes.
    fn next(work: &Work, from: u64, most: u64) -> Option<Range<u64>> {
        work.run_at(work.first_marked(from, u64::MAX), most)
    }

    #[test]
    fn runs_are_returned_in_order_and_limited_in_size() {
        let work = Work::new((1 << 20) + 512);
        assert_eq!(next(&work, 0, 1 << 18), None);
        assert_eq!(work.first_marked(0, u64::MAX), (1 << 20) + 512);
        work.mark(&(5000..5001));
        work.mark(&(300 << 10..700 << 10));
        work.mark(&(1 << 20..(1 << 20) + 512));
        assert_eq!(next(&work, 0, 1 << 18), Some(4096..8192));
        assert_eq!(next(&work, 6000, 1 << 18), Some(6000..8192));
        assert_eq!(next(&work, 8192, 1 << 18), Some(300 << 10..556 << 10));
        assert_eq!(next(&work, 556 << 10, 1 << 18), Some(556 << 10..700 << 10));
        assert_eq!(next(&work, 700 << 10, 1 << 18), Some(1 << 20..(1 << 20) + 512));
        assert_eq!(next(&work, (1 << 20) + 512, 1 << 18), None);
        assert_eq!(work.bytes(), 4096 + (400 << 10) + 4096);
        assert_eq!(work.run_at(4000, 1 << 18), None);
    }

    #[test]
    fn a_search_ends_where_it_has_to() {
        let work = Work::new(64 << 20);
        work.mark(&(32 << 20..33 << 20));
        assert_eq!(work.first_marked(0, 1000), 1000);
        assert_eq!(work.first_marked(0, 32 << 20), 32 << 20);
        assert_eq!(work.first_marked(5000, (32 << 20) + 1), 32 << 20);
        assert_eq!(work.first_marked((32 << 20) + 700, 64 << 20), (32 << 20) + 700);
        assert_eq!(work.first_marked(33 << 20, 34 << 20), 34 << 20);
        assert_eq!(work.first_marked(33 << 20, u64::MAX), 64 << 20);
        assert_eq!(work.first_unmarked(700, 32 << 20), 700);
        assert_eq!(work.first_unmarked(32 << 20, 32 << 20), 32 << 20);
        assert_eq!(work.first_unmarked((32 << 20) + 5000, u64::MAX), 33 << 20);
        assert_eq!(work.first_unmarked(32 << 20, (33 << 20) - 1), (33 << 20) - 1);
    }

    #[test]
    fn a_long_mark_covers_exactly_its_blocks() {
        let work = Work::new(64 << 20);
        work.mark(&(3 * 4096 + 1..200 * 4096 + 1));
        assert_eq!(next(&work, 0, u64::MAX), Some(3 * 4096..201 * 4096));
        assert_eq!(next(&work, 201 * 4096, u64::MAX), None);
        assert_eq!(work.bytes(), 198 * 4096);
    }

    #[test]
    fn memory_is_limited_for_disks_of_any_capacity() {
        let work = Work::new(64 << 40);
        assert!(work.words.len() as u64 * 64 <= UNITS_MAX);
        work.mark(&(0..64 << 40));
        assert_eq!(next(&work, 1 << 40, 256 << 10), Some(1 << 40..(1 << 40) + (256 << 10)));
    }
}
