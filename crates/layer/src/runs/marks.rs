//! Which units of a file are used: a bit each, for a window of the file at a time, so that memory stays small whatever
//! the size of the file.

use std::ops::Range;

/// Most units looked at together: 16 MiB of memory, for 64 GiB of a file in sectors.
pub(crate) const WINDOW: u64 = 1 << 27;

/// A bit for each unit of a window of the file.
pub(crate) struct Marks {
    pub(crate) window: Range<u64>,
    words: Vec<u64>,
}

impl Marks {
    pub(crate) fn new(window: Range<u64>) -> Self {
        let words = vec![0; (window.end - window.start).div_ceil(64) as usize];
        Self { window, words }
    }

    /// Marks a range as far as it lies in the window; true when a part of it was marked before.
    pub(crate) fn mark(&mut self, range: Range<u64>) -> bool {
        let mut at = range.start.max(self.window.start) - self.window.start;
        let end = range.end.min(self.window.end).saturating_sub(self.window.start);
        let mut before = false;
        while at < end {
            let (word, bit) = ((at / 64) as usize, at % 64);
            let count = (64 - bit).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << bit;
            before |= self.words[word] & mask != 0;
            self.words[word] |= mask;
            at += count;
        }
        before
    }

    /// Runs of units that are not marked, in order.
    pub(crate) fn unmarked(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let length = self.window.end - self.window.start;
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, length, false);
            if start >= length {
                return None;
            }
            at = self.next(start, length, true);
            Some(self.window.start + start..self.window.start + at)
        })
    }

    /// The first unit from `at` on that is marked, or is not; `length` if there is none.
    fn next(&self, mut at: u64, length: u64, marked: bool) -> u64 {
        while at < length {
            let word = self.words[(at / 64) as usize];
            let wanted = if marked { word } else { !word } >> (at % 64);
            if wanted != 0 {
                return (at + u64::from(wanted.trailing_zeros())).min(length);
            }
            at = (at / 64 + 1) * 64;
        }
        length
    }
}
