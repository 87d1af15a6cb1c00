//! A bitmap of the used units of a file, for one window of the file at a time, so that memory does not grow with the
//! file.

use std::ops::Range;

/// The most units in a window: 16 MiB of memory, for 64 GiB of a file in sectors.
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

    /// Marks the part of a range that is in the window; returns true when some of it was marked before.
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

    /// Runs of unmarked units, in order.
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

    /// The first unit at or after `at` with a mark equal to `marked`; `length` if there is none.
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
