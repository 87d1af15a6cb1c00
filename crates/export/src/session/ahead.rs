//! Reading ahead for clients that read in order from a cold medium.
//!
//! Linux reads ahead in files. What follows on a disk may lie anywhere in several files: grains in the order in which
//! they were written, blocks of many levels. Only who knows the disk can tell what comes next, and has it brought into
//! the page cache while the client still waits for what it asked for. Nothing is brought as long as reads find their
//! bytes there, and nothing where files are open past the page cache.

use std::ops::Range;

/// Requests in order before it counts as a stream.
const STREAK_MIN: u32 = 2;
/// How far ahead of the client.
const AHEAD: u64 = 4 << 20;
/// Less than this is not worth a look at the map.
const STEP_MIN: u64 = AHEAD / 4;

/// What one client has been reading.
#[derive(Debug, Default)]
pub struct Ahead {
    /// Where it would go on.
    next: u64,
    streak: u32,
    /// Some read of the stream had to wait for the medium.
    cold: bool,
    /// Brought up to here.
    until: u64,
}

impl Ahead {
    /// A read begins.
    pub fn saw(&mut self, offset: u64, length: u64) {
        if offset == self.next {
            self.streak = self.streak.saturating_add(1);
        } else {
            *self = Self::default();
        }
        self.next = offset.saturating_add(length);
    }

    /// It did not find its bytes in memory.
    pub fn missed(&mut self) {
        self.cold = true;
    }

    /// What to bring now, on a disk of this capacity.
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
    fn nothing_is_brought_for_warm_streams_and_random_reads() {
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
