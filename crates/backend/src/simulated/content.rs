//! The bytes of a simulated file: its length, its written pages, and its allocated space.
//!
//! 1. Every page lies within `space`; space without a page is reserved and reads as zeros.
//! 2. Bytes of pages past the length are zeros, except between the steps of a power cut (see
//!    [`Content::write_within`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Unit of allocation and of sharing between versions of a file.
pub(super) const PAGE: u64 = 4096;

type Page = [u8; PAGE as usize];

/// A set of numbers as ranges: sorted, disjoint, never adjacent, never empty.
#[derive(Clone, Default)]
pub(super) struct Ranges {
    /// The end of each range by its start.
    ends: BTreeMap<u64, u64>,
    total: u64,
}

impl Ranges {
    /// How many numbers are in the set.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&other_start, &other_end)) = self.ends.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            self.ends.remove(&other_start);
            self.total -= other_end - other_start;
            start = start.min(other_start);
            end = end.max(other_end);
        }
        self.ends.insert(start, end);
        self.total += end - start;
    }

    pub(super) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&start, &end)) = self.ends.range(..range.end).next_back() {
            if end <= range.start {
                break;
            }
            self.ends.remove(&start);
            self.total -= end - start;
            // The parts of the old range outside `range` stay. The later part begins at `range.end`, so the search does
            // not find it.
            for rest in [start..range.start, range.end..end] {
                if !rest.is_empty() {
                    self.total += rest.end - rest.start;
                    self.ends.insert(rest.start, rest.end);
                }
            }
            if start < range.start {
                break;
            }
        }
    }

    /// The first range that ends after `from`, without its part before `from`.
    pub(super) fn next(&self, from: u64) -> Option<Range<u64>> {
        let within = self.ends.range(..=from).next_back().filter(|(_, end)| **end > from);
        let (&start, &end) = within.or_else(|| self.ends.range(from..).next())?;
        Some(start.max(from)..end)
    }

    /// How many numbers of `range` are not in the set.
    pub(super) fn missing(&self, range: Range<u64>) -> u64 {
        let mut missing = 0;
        let mut at = range.start;
        while at < range.end {
            match self.next(at) {
                Some(found) if found.start < range.end => {
                    missing += found.start - at;
                    at = found.end;
                }
                _ => {
                    missing += range.end - at;
                    break;
                }
            }
        }
        missing
    }
}

/// The pages that a range of bytes touches.
pub(super) fn pages_touched(offset: u64, length: u64) -> Range<u64> {
    if length == 0 {
        return 0..0;
    }
    offset / PAGE..(offset + length).div_ceil(PAGE)
}

/// One version of a file.
#[derive(Clone, Default)]
pub(super) struct Content {
    length: u64,
    pages: BTreeMap<u64, Arc<Page>>,
    space: Ranges,
}

impl Content {
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// The allocated pages.
    pub(super) fn space(&self) -> &Ranges {
        &self.space
    }

    /// Fills `buffer` from `offset`; unwritten bytes read as zeros.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) {
        for (page, within, part) in pieces(offset, buffer.len()) {
            match self.pages.get(&page) {
                Some(bytes) => buffer[part].copy_from_slice(&bytes[within]),
                None => buffer[part].fill(0),
            }
        }
    }

    /// Writes, growing the file if need be.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.write_within(offset, bytes);
        if !bytes.is_empty() {
            self.length = self.length.max(offset + bytes.len() as u64);
        }
    }

    /// Writes without growing the file. Later growth makes bytes past the end visible; [`Content::settle`] removes
    /// them.
    pub(super) fn write_within(&mut self, offset: u64, bytes: &[u8]) {
        self.space.insert(pages_touched(offset, bytes.len() as u64));
        for (page, within, part) in pieces(offset, bytes.len()) {
            let page = self.pages.entry(page).or_insert_with(|| Arc::new([0; PAGE as usize]));
            Arc::make_mut(page)[within].copy_from_slice(&bytes[part]);
        }
    }

    /// Grows the file to at least `length`.
    pub(super) fn grow(&mut self, length: u64) {
        self.length = self.length.max(length);
    }

    pub(super) fn set_length(&mut self, length: u64) {
        self.length = length;
        self.settle();
    }

    /// Removes pages and bytes past the end of the file.
    pub(super) fn settle(&mut self) {
        let end = self.length.div_ceil(PAGE);
        self.pages.split_off(&end);
        self.space.remove(end..u64::MAX);
        if !self.length.is_multiple_of(PAGE)
            && let Some(last) = self.pages.get_mut(&(self.length / PAGE))
        {
            Arc::make_mut(last)[(self.length % PAGE) as usize..].fill(0);
        }
    }

    pub(super) fn reserve(&mut self, offset: u64, length: u64) {
        self.space.insert(pages_touched(offset, length));
        self.grow(offset + length);
    }

    /// Zeros a range; pages wholly within it are freed.
    pub(super) fn punch(&mut self, offset: u64, length: u64) {
        let end = offset + length;
        let (first, last) = (offset.div_ceil(PAGE), end / PAGE);
        if first < last {
            let gone: Vec<u64> = self.pages.range(first..last).map(|(page, _)| *page).collect();
            for page in gone {
                self.pages.remove(&page);
            }
            self.space.remove(first..last);
        }
        for edge in [offset..end.min(first * PAGE), offset.max(last * PAGE)..end] {
            // Within one page both edges are the same range, which is then zeroed twice.
            if !edge.is_empty()
                && let Some(page) = self.pages.get_mut(&(edge.start / PAGE))
            {
                let start = (edge.start % PAGE) as usize;
                Arc::make_mut(page)[start..start + (edge.end - edge.start) as usize].fill(0);
            }
        }
    }

    /// Zeros a range within the file; all of it is allocated afterwards.
    pub(super) fn zero_range(&mut self, offset: u64, length: u64) {
        self.punch(offset, length);
        self.space.insert(pages_touched(offset, length));
    }

    /// The first run of allocated pages at or after `page` that are all written or all unwritten; true for written.
    pub(super) fn next_alike(&self, page: u64) -> Option<(Range<u64>, bool)> {
        let taken = self.space.next(page)?;
        let mut written = self.pages.range(taken.clone()).map(|(page, _)| *page);
        let Some(first) = written.next() else { return Some((taken, false)) };
        if first > taken.start {
            return Some((taken.start..first, false));
        }
        let mut end = first + 1;
        while written.next() == Some(end) {
            end += 1;
        }
        Some((taken.start..end, true))
    }

    /// Inverts one bit if something is stored there.
    pub(super) fn flip_bit(&mut self, offset: u64, bit: u8) {
        if let Some(page) = self.pages.get_mut(&(offset / PAGE)) {
            Arc::make_mut(page)[(offset % PAGE) as usize] ^= 1 << (bit % 8);
        }
    }
}

/// Cuts a range of bytes at page borders: page, range within the page, range within the whole.
fn pieces(offset: u64, length: usize) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == length {
            return None;
        }
        let at = offset + done as u64;
        let start = (at % PAGE) as usize;
        let part = (PAGE as usize - start).min(length - done);
        let piece = (at / PAGE, start..start + part, done..done + part);
        done += part;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulated::unflushed::Random;
    use std::collections::BTreeSet;

    #[test]
    fn a_set_of_ranges_equals_a_set_of_numbers() {
        for seed in 0..50 {
            let mut random = Random::new(seed);
            let (mut ranges, mut set) = (Ranges::default(), BTreeSet::new());
            for _ in 0..200 {
                let start = random.below(60);
                let range = start..start + random.below(12);
                match random.below(2) {
                    0 => {
                        ranges.insert(range.clone());
                        set.extend(range);
                    }
                    _ => {
                        ranges.remove(range.clone());
                        set.retain(|number| !range.contains(number));
                    }
                }
                assert_eq!(ranges.total(), set.len() as u64);
                let from = random.below(80);
                let next = set.range(from..).next().copied();
                assert_eq!(ranges.next(from).map(|range| range.start), next);
                if let Some(range) = ranges.next(from) {
                    assert!(range.clone().all(|number| set.contains(&number)) && !set.contains(&range.end));
                }
                let missing = (from..from + 20).filter(|number| !set.contains(number)).count() as u64;
                assert_eq!(ranges.missing(from..from + 20), missing);
            }
        }
    }
}
