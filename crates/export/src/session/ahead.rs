//! Read-ahead for clients that read sequentially from a disk whose blocks are not in the page cache.
//!
//! Linux reads ahead within a file only. Consecutive ranges of a disk may be at any location in several files: grains
//! are in the order in which they were written, and blocks are in the files of many levels. So the session predicts the
//! next ranges of the disk and loads them into the page cache while the client waits for the current range. The session
//! reads ahead only after a read has missed the page cache, and not in files opened with O_DIRECT.

use std::ops::Range;

/// Number of consecutive requests from which on a client counts as one that reads sequentially.
const STREAK_MIN: u32 = 2;
/// Distance ahead of the client, in bytes.
const AHEAD: u64 = 4 << 20;
/// Smallest amount, in bytes, for which the map is queried.
const STEP_MIN: u64 = AHEAD / 4;

/// State of one client's sequential reads.
#[derive(Debug, Default)]
pub struct Ahead {
    /// Offset at which the next sequential read would begin.
    next: u64,
    streak: u32,
    /// Whether a read of the sequence missed the page cache.
    cold: bool,
    /// End of the range that is already loaded.
    until: u64,
}

impl Ahead {
    /// Records a read.
    pub fn saw(&mut self, offset: u64, length: u64) {
        if offset == self.next {
            self.streak = self.streak.saturating_add(1);
        } else {
            *self = Self::default();
        }
        self.next = offset.saturating_add(length);
    }

    /// Records that a read missed the page cache.
    pub fn missed(&mut self) {
        self.cold = true;
    }

    /// The range to load now, on a disk with this capacity.
    pub fn wanted(&mut self, capacity: u64) -> Option<Range<u64>> {
        if !self.cold || self.streak < STREAK_MIN {
            return None;
        }
        let start = self.until.max(self.next);
        let end = self.next.saturating_add(AHEAD).min(capacity);
        if start >= end || (end - start < STEP_MIN && end < capacity) {
            return None;
        }
        self.until = end;
        Some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u64 = 64 << 20;
    const STEP: u64 = 64 << 10;

    #[test]
    fn a_cold_stream_is_read_ahead_once_and_to_the_end() {
        let mut ahead = Ahead::default();
        let mut brought: Vec<Range<u64>> = Vec::new();
        for offset in (8 << 20..CAPACITY).step_by(STEP as usize) {
            ahead.saw(offset, STEP);
            ahead.missed();
            if let Some(range) = ahead.wanted(CAPACITY) {
                assert!(range.start >= offset + STEP && range.end <= offset + STEP + AHEAD);
                brought.push(range);
            }
        }
        assert_eq!(brought[0].start, (8 << 20) + 3 * STEP, "the third request makes it a stream");
        assert!(brought.windows(2).all(|pair| pair[0].end == pair[1].start), "{brought:?}");
        assert_eq!(brought.last().map(|last| last.end), Some(CAPACITY));
        assert!(brought.len() as u64 <= CAPACITY / STEP_MIN);
    }

    #[test]
    fn warm_streams_and_random_reads_are_not_read_ahead() {
        let mut ahead = Ahead::default();
        for offset in (0..CAPACITY).step_by(STEP as usize) {
            ahead.saw(offset, STEP);
            assert_eq!(ahead.wanted(CAPACITY), None);
        }
        let mut at = 0;
        for _ in 0..1000 {
            at = (at + 37 * STEP) % CAPACITY;
            ahead.saw(at, STEP);
            ahead.missed();
            assert_eq!(ahead.wanted(CAPACITY), None);
        }
    }
}
