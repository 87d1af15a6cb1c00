//! The dirty log of a merge: a bit for each part of the disk that was written while the merge ran.

use crate::limits::{DIRTY_UNIT_MIN, DIRTY_UNITS_MAX};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The dirty log of a merge.
pub(crate) struct DirtyLog {
    words: Box<[AtomicU64]>,
    unit: u64,
    capacity: u64,
}

impl DirtyLog {
    /// A log for a disk of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        let unit = capacity.div_ceil(DIRTY_UNITS_MAX).max(DIRTY_UNIT_MIN).next_power_of_two();
        let words = capacity.div_ceil(unit).div_ceil(64) as usize;
        Self { words: (0..words).map(|_| AtomicU64::new(0)).collect(), unit, capacity }
    }

    /// Marks `range` as written.
    pub fn mark(&self, range: &Range<u64>) {
        for unit in range.start / self.unit..range.end.min(self.capacity).div_ceil(self.unit) {
            if let Some(word) = self.words.get((unit / 64) as usize) {
                word.fetch_or(1 << (unit % 64), Ordering::SeqCst);
            }
        }
    }

    /// Marked bytes, in whole parts.
    pub fn bytes(&self) -> u64 {
        let bits: u64 = self.words.iter().map(|word| u64::from(word.load(Ordering::SeqCst).count_ones())).sum();
        bits * self.unit
    }

    /// Returns the first marked part at or after `from`, and clears its mark.
    pub fn take(&self, from: u64) -> Option<Range<u64>> {
        let mut unit = from.div_ceil(self.unit);
        while let Some(word) = self.words.get((unit / 64) as usize) {
            let bits = word.load(Ordering::SeqCst) & (u64::MAX << (unit % 64));
            if bits != 0 {
                let bit = u64::from(bits.trailing_zeros());
                word.fetch_and(!(1 << bit), Ordering::SeqCst);
                let start = (unit / 64 * 64 + bit) * self.unit;
                return Some(start..(start + self.unit).min(self.capacity));
            }
            unit = (unit / 64 + 1) * 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marked_range_is_taken_once() {
        let log = DirtyLog::new(100 << 20);
        log.mark(&(70_000..70_001));
        log.mark(&(99 << 20..100 << 20));
        assert_eq!(log.bytes(), 17 * DIRTY_UNIT_MIN);
        assert_eq!(log.take(0), Some(65_536..131_072));
        let mut at = 0;
        let mut taken = 0;
        while let Some(piece) = log.take(at) {
            assert!(piece.start >= 99 << 20 && piece.end <= 100 << 20);
            at = piece.end;
            taken += 1;
        }
        assert_eq!((taken, log.bytes()), (16, 0));
    }

    #[test]
    fn memory_is_limited_for_disks_of_any_capacity() {
        let log = DirtyLog::new(64 << 40);
        assert!(log.words.len() <= (1 << 20) / 8);
        log.mark(&(0..64 << 40));
        assert_eq!(log.take(u64::from(u32::MAX)).map(|piece| piece.start % (8 << 20)), Some(0));
    }
}
