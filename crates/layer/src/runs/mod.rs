//! A table of a sparse format in memory, as runs: consecutive entries that continue each other are one run of eight
//! bytes, however many they are. A layer written sequentially needs a few bytes per table; a layer written at random in
//! blocks of 4 KiB needs eight bytes per block. A lookup returns extents, without a step per entry.
//!
//! 1. Runs are sorted, disjoint and not empty; entries in no run are absent.
//! 2. Two runs of which one continues the other are joined.

pub(crate) mod cache;
pub(crate) mod marks;
pub(crate) mod options;
#[cfg(test)]
mod tests;

use std::ops::Range;

/// The most entries of a table.
pub(crate) const ENTRIES_MAX: u32 = 1 << 12;

/// The greatest location that a run can store.
pub(crate) const PLACE_MAX: u64 = (1 << PLACE_BITS) - 1;

const PLACE_BITS: u32 = 38;
const KIND_SHIFT: u32 = PLACE_BITS;
const COUNT_SHIFT: u32 = KIND_SHIFT + 2;
const FIRST_SHIFT: u32 = COUNT_SHIFT + 12;

/// Consecutive entries of the same kind, at consecutive locations or all without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryRun {
    /// The first entry of the run.
    pub(crate) first: u32,
    /// The number of entries.
    pub(crate) count: u32,
    /// The kind of the entries, as the format numbers them: 0 to 3.
    pub(crate) kind: u8,
    /// The location of the first entry; 0 for none.
    pub(crate) place: u64,
}

impl EntryRun {
    fn end(&self) -> u32 {
        self.first + self.count
    }

    fn pack(self) -> Packed {
        debug_assert!(self.count > 0 && self.end() <= ENTRIES_MAX && self.kind < 4 && self.place <= PLACE_MAX);
        let (first, count) = (u64::from(self.first), u64::from(self.count - 1));
        Packed(first << FIRST_SHIFT | count << COUNT_SHIFT | u64::from(self.kind) << KIND_SHIFT | self.place)
    }

    /// The part of the run within `range`, which the run must overlap.
    fn within(self, range: &Range<u32>, stride: u32) -> Self {
        let first = self.first.max(range.start);
        let count = self.end().min(range.end) - first;
        let skipped = u64::from(first - self.first) * u64::from(stride);
        Self { first, count, place: if self.place == 0 { 0 } else { self.place + skipped }, ..self }
    }

    fn is_continued_by(&self, next: &Self, stride: u32) -> bool {
        let place = if self.place == 0 { 0 } else { self.place + u64::from(self.count) * u64::from(stride) };
        self.end() == next.first && self.kind == next.kind && place == next.place
    }
}

/// A run as a number of eight bytes. The order of these numbers is the order of the first entries of the runs.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Packed(u64);

impl Packed {
    fn first(self) -> u32 {
        (self.0 >> FIRST_SHIFT) as u32
    }

    fn end(self) -> u32 {
        self.first() + (self.0 >> COUNT_SHIFT) as u32 % ENTRIES_MAX + 1
    }

    fn unpack(self) -> EntryRun {
        EntryRun {
            first: self.first(),
            count: self.end() - self.first(),
            kind: (self.0 >> KIND_SHIFT) as u8 & 3,
            place: self.0 & PLACE_MAX,
        }
    }
}

/// Consecutive entries of a table: a run, a part of a run, or absent entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryPiece {
    /// The first entry of the piece.
    pub(crate) first: u32,
    /// The number of entries.
    pub(crate) count: u32,
    /// Kind and location; `None` if the entries are absent.
    pub(crate) what: Option<(u8, u64)>,
}

/// A table in memory, as runs.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RunList {
    runs: Vec<Packed>,
    /// The distance between the locations of consecutive entries in a run.
    stride: u32,
    /// A value that the format stores with a table.
    pub(crate) note: u32,
}

impl RunList {
    /// A table of absent entries. The locations of consecutive entries are `stride` apart.
    pub(crate) fn new(stride: u32) -> Self {
        Self { runs: Vec::new(), stride, note: 0 }
    }

    /// Appends entries after all others, for reading a table.
    pub(crate) fn push(&mut self, run: EntryRun) {
        if let Some(last) = self.runs.last_mut() {
            let before = last.unpack();
            debug_assert!(before.end() <= run.first);
            if before.is_continued_by(&run, self.stride) {
                *last = EntryRun { count: before.count + run.count, ..before }.pack();
                return;
            }
        }
        self.runs.push(run.pack());
    }

    /// Returns unused memory.
    pub(crate) fn shrink_to_fit(&mut self) {
        self.runs.shrink_to_fit();
    }

    /// Bytes of memory beyond the structure itself.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.runs.capacity() * size_of::<Packed>()
    }

    /// All runs, in order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = EntryRun> + '_ {
        self.runs.iter().map(|run| run.unpack())
    }

    /// The entries of `range`, in order and without gaps.
    pub(crate) fn pieces(&self, range: Range<u32>) -> Pieces<'_> {
        let from = self.runs.partition_point(|run| run.end() <= range.start);
        Pieces { runs: &self.runs[from..], range, stride: self.stride }
    }

    /// Sets the entries of `range` to one kind, at consecutive locations from `place` on.
    pub(crate) fn set(&mut self, range: Range<u32>, kind: u8, place: u64) {
        if !range.is_empty() {
            let run = EntryRun { first: range.start, count: range.end - range.start, kind, place };
            self.replace(range, Some(run));
        }
    }

    /// Makes the entries of `range` absent.
    #[cfg(test)]
    pub(crate) fn clear(&mut self, range: Range<u32>) {
        if !range.is_empty() {
            self.replace(range, None);
        }
    }

    fn replace(&mut self, range: Range<u32>, run: Option<EntryRun>) {
        // In a table that is filled in order, the run is appended.
        if self.runs.last().is_none_or(|last| last.end() <= range.start) {
            if let Some(run) = run {
                self.push(run);
            }
            return;
        }
        // The runs that overlap the range, and the adjacent ones, which the new run may continue.
        let mut from = self.runs.partition_point(|run| run.end() <= range.start);
        let mut to = from + self.runs[from..].partition_point(|run| run.first() < range.end);
        let first = self.runs[from..to].first().map(|run| run.unpack()).filter(|run| run.first < range.start);
        let last = self.runs[from..to].last().map(|run| run.unpack()).filter(|run| run.end() > range.end);
        let left = first.map(|run| run.within(&(run.first..range.start), self.stride));
        let right = last.map(|run| run.within(&(range.end..run.end()), self.stride));
        let mut around = [None, left, run, right, None];
        if left.is_none() && from > 0 {
            from -= 1;
            around[0] = Some(self.runs[from].unpack());
        }
        if right.is_none() && to < self.runs.len() {
            around[4] = Some(self.runs[to].unpack());
            to += 1;
        }
        let mut new: [Packed; 5] = [Packed(0); 5];
        let mut count = 0;
        let mut open: Option<EntryRun> = None;
        for next in around.into_iter().flatten() {
            match &mut open {
                Some(run) if run.is_continued_by(&next, self.stride) => run.count += next.count,
                _ => {
                    if let Some(done) = open.replace(next) {
                        new[count] = done.pack();
                        count += 1;
                    }
                }
            }
        }
        if let Some(done) = open {
            new[count] = done.pack();
            count += 1;
        }
        match to - from == count {
            true => self.runs[from..to].copy_from_slice(&new[..count]),
            false => drop(self.runs.splice(from..to, new[..count].iter().copied())),
        }
    }
}

/// The iterator of [`RunList::pieces`].
pub(crate) struct Pieces<'a> {
    runs: &'a [Packed],
    range: Range<u32>,
    stride: u32,
}

impl Iterator for Pieces<'_> {
    type Item = EntryPiece;

    fn next(&mut self) -> Option<EntryPiece> {
        if self.range.is_empty() {
            return None;
        }
        let first = self.range.start;
        let piece = match self.runs.first().map(|run| run.unpack()) {
            Some(run) if run.first <= first => {
                self.runs = &self.runs[1..];
                let run = run.within(&self.range, self.stride);
                EntryPiece { first, count: run.count, what: Some((run.kind, run.place)) }
            }
            next => {
                let end = next.map_or(self.range.end, |run| run.first.min(self.range.end));
                EntryPiece { first, count: end - first, what: None }
            }
        };
        self.range.start += piece.count;
        Some(piece)
    }
}
