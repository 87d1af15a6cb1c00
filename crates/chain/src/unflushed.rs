//! The ranges of a chain, or of a level of it, that changed since the last flush, in units of at least 1 MiB.
//!
//! After a failed flush the operating system may drop data that was written before, and return the old content of the
//! device without an error. Formats without checksums cannot detect that. So after a failed flush, parts that changed
//! since the last successful flush are not read any more.
//!
//! 1. A change is noted when it has ended, after its level has been marked as written. So a flush that finds the note
//!    also flushes the level. A change that is made in two levels is noted after each of them.
//! 2. A flush separates the notes made before its beginning from later ones, and drops them when it has succeeded.
//!    After a failed flush they remain.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most parts of a disk; a larger disk has larger parts.
const PIECES_MAX: u64 = 1 << 18;
/// The smallest part in bytes.
const PIECE_MIN: u64 = 1 << 20;

/// A set of parts, one bit each. `used` has a bit for each word that is not zero, so that a flush reads only these
/// words.
struct Marks {
    words: Box<[AtomicU64]>,
    used: Box<[AtomicU64]>,
}

impl Marks {
    fn new(pieces: u64) -> Self {
        let zeros = |count: u64| (0..count).map(|_| AtomicU64::new(0)).collect();
        let words = pieces.div_ceil(64);
        Self { words: zeros(words), used: zeros(words.div_ceil(64)) }
    }

    fn add(&self, word: usize, bits: u64) {
        // A plain load is tried first, because most parts are written more than once.
        if self.words[word].load(Ordering::SeqCst) & bits != bits {
            self.words[word].fetch_or(bits, Ordering::SeqCst);
            self.used[word / 64].fetch_or(1 << (word % 64), Ordering::SeqCst);
        }
    }

    /// Clears the set, and calls `each` for every word that was not zero.
    fn take(&self, mut each: impl FnMut(usize, u64)) {
        for (i, used) in self.used.iter().enumerate() {
            let mut left = if used.load(Ordering::SeqCst) == 0 { 0 } else { used.swap(0, Ordering::SeqCst) };
            while left != 0 {
                let word = i * 64 + left.trailing_zeros() as usize;
                left &= left - 1;
                each(word, self.words[word].swap(0, Ordering::SeqCst));
            }
        }
    }
}

/// The parts changed since the last flush of the chain.
pub(crate) struct Unflushed {
    piece: u64,
    pieces: u64,
    /// Changed since the last flush began.
    since: Marks,
    /// Ranges that changed before the last flush began, and are not flushed successfully yet.
    before: Marks,
}

impl Unflushed {
    /// The notes for a disk of this many bytes. If the disk grows, parts beyond this capacity share the bits of earlier
    /// parts.
    pub fn new(capacity: u64) -> Self {
        let piece = capacity.div_ceil(PIECES_MAX).next_power_of_two().max(PIECE_MIN);
        let pieces = capacity.div_ceil(piece).max(1);
        Self { piece, pieces, since: Marks::new(pieces), before: Marks::new(pieces) }
    }

    fn pieces_of(&self, range: &Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<'_> {
        let (first, end) = (range.start / self.piece, range.end.div_ceil(self.piece));
        (first..end.min(first + self.pieces)).map(|piece| {
            let piece = piece % self.pieces;
            ((piece / 64) as usize, 1 << (piece % 64))
        })
    }

    /// Notes a change of a range.
    pub fn note(&self, range: &Range<u64>) {
        self.pieces_of(range).for_each(|(word, bit)| self.since.add(word, bit));
    }

    /// Called when a flush begins.
    pub fn begin_flush(&self) {
        self.since.take(|word, bits| self.before.add(word, bits));
    }

    /// Called when a flush has succeeded.
    pub fn end_flush(&self) {
        self.before.take(|_, _| {});
    }

    /// Whether nothing was changed since the last successful flush.
    pub fn is_empty(&self) -> bool {
        let none = |marks: &Marks| marks.used.iter().all(|used| used.load(Ordering::SeqCst) == 0);
        none(&self.since) && none(&self.before)
    }

    /// Whether any part of a range may have changed since the last successful flush.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        let has = |marks: &Marks, word: usize, bit| marks.words[word].load(Ordering::SeqCst) & bit != 0;
        self.pieces_of(range).any(|(word, bit)| has(&self.since, word, bit) || has(&self.before, word, bit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn unflushed_ranges_stay_until_a_flush_succeeds() {
        let unflushed = Unflushed::new(300 * MIB + 5);
        assert!(unflushed.is_empty());
        unflushed.note(&(70 * MIB - 1..70 * MIB + 1));
        let covered = |at: u64| unflushed.covers(&(at * MIB..at * MIB + 1));
        assert_eq!([68, 69, 70, 71].map(covered), [false, true, true, false]);
        assert!(!unflushed.is_empty());
        unflushed.begin_flush();
        assert!(!unflushed.is_empty(), "a flush that has not ended");
        unflushed.note(&(299 * MIB..300 * MIB + 5));
        // A flush has failed, and the next one begins.
        unflushed.begin_flush();
        unflushed.note(&(5 * MIB..6 * MIB));
        assert_eq!([5, 69, 299, 300].map(covered), [true; 4]);
        unflushed.end_flush();
        assert_eq!([5, 69, 299, 300].map(covered), [true, false, false, false]);
        assert!(!unflushed.is_empty());
        unflushed.begin_flush();
        unflushed.end_flush();
        assert!(unflushed.is_empty());
    }

    #[test]
    fn unflushed_ranges_are_tracked_on_disks_of_any_size() {
        for capacity in [0, 1, MIB, 62 << 40, u64::MAX >> 1] {
            let unflushed = Unflushed::new(capacity);
            assert!(unflushed.pieces <= PIECES_MAX);
            unflushed.note(&(capacity.saturating_sub(1)..capacity.max(1)));
            assert!(unflushed.covers(&(capacity.saturating_sub(1)..capacity.max(1))));
            // The disk has grown.
            unflushed.begin_flush();
            unflushed.end_flush();
            unflushed.note(&(2 * capacity..2 * capacity + 1));
            assert!(unflushed.covers(&(2 * capacity..2 * capacity + 1)));
            assert!(!unflushed.covers(&(0..0)));
        }
    }
}
