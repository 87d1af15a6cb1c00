//! Cached extents in order of address: leaves of packed entries under one sorted index.
//!
//! 1. Entries do not overlap; leaves are not empty; `firsts[n]` is the start of the first entry of leaf `n`.
//! 2. A leaf has at most [`LEAF_MAX`] entries, and spare memory for at most two steps of [`LEAF_STEP`] entries. So the
//!    memory per entry stays close to 16 bytes, however often entries are split, cut and evicted.
//! 3. The eviction hand moves from high addresses to low, a leaf at a time. Most sequential requests move upwards: a
//!    hand that moved with them would evict the extents just fetched.

use super::entry::CachedExtent;
use super::holders::Holders;
use super::{REGION, SHARDS};
use crate::mapping::{Mapping, push};
use layer::SECTOR;

/// The most entries of a leaf.
pub(super) const LEAF_MAX: usize = 64;
/// Entries for which memory is allocated at a time.
const LEAF_STEP: usize = 8;

const REGION_SECTORS: u64 = REGION / SECTOR;

/// Linear steps from the estimated position before a binary search.
const STEPS_MAX: usize = 6;

/// One shard of the cache.
#[derive(Default)]
pub(super) struct Shard {
    firsts: Vec<u64>,
    leaves: Vec<Vec<CachedExtent>>,
    /// The number of entries in all leaves.
    pub entries: usize,
    /// The position behind the leaf that is swept next.
    hand: usize,
    /// Lookups that found all extents, and those that did not.
    pub hits: u64,
    pub misses: u64,
    /// Prefetched entries that were used.
    pub used: u64,
    /// Which level stores a block that has no entry.
    pub holders: Holders,
}

/// The result of a sweep.
#[derive(Default)]
pub(super) struct Swept {
    pub evicted: usize,
    /// The number of evicted entries that were prefetched and never used.
    pub unused: usize,
    /// Whether the hand has completed a round of this shard.
    pub round: bool,
}

impl Shard {
    /// The last leaf that begins at or before `sector`. The search starts at the position that a uniform distribution
    /// would give, and advances in linear steps, for the reason given in [`Shard::at_or_before`].
    fn leaf_at_or_before(&self, sector: u64) -> Option<usize> {
        // Between two regions of this shard lie the regions of other shards.
        let own = |sector: u64| sector / (REGION_SECTORS * SHARDS as u64) * REGION_SECTORS + sector % REGION_SECTORS;
        let last = self.firsts.len().checked_sub(1)?;
        let (from, to) = (own(self.firsts[0]), own(self.firsts[last]));
        let guess = own(sector).saturating_sub(from).min(to - from) as usize * last / ((to - from) as usize).max(1);
        let mut leaf = guess.min(last);
        for _ in 0..STEPS_MAX {
            if self.firsts[leaf] > sector {
                leaf = leaf.checked_sub(1)?;
            } else if self.firsts.get(leaf + 1).is_some_and(|next| *next <= sector) {
                leaf += 1;
            } else {
                return Some(leaf);
            }
        }
        self.firsts.partition_point(|first| *first <= sector).checked_sub(1)
    }

    /// The last entry that starts at or before `sector`.
    fn at_or_before(&self, sector: u64) -> Option<(usize, usize)> {
        let leaf = self.leaf_at_or_before(sector)?;
        let entries = &self.leaves[leaf];
        // The search starts at the position that extents of equal size would give, and advances in linear steps.
        // Entries are rarely in the processor's cache: this search touches one or two cache lines of a leaf, a binary
        // search four.
        let (first, next) = (self.firsts[leaf], self.firsts.get(leaf + 1));
        let span = next.map_or(entries[entries.len() - 1].end(), |next| *next) - first;
        let guess = (sector - first).min(span) * entries.len() as u64 / span.max(1);
        let mut index = (guess as usize).min(entries.len() - 1);
        let mut steps = 0;
        loop {
            if entries[index].start() > sector {
                // The first entry of the leaf starts at or before `sector`.
                index -= 1;
            } else if entries.get(index + 1).is_some_and(|next| next.start() <= sector) {
                index += 1;
            } else {
                return Some((leaf, index));
            }
            steps += 1;
            if steps == STEPS_MAX {
                return Some((leaf, entries.partition_point(|entry| entry.start() <= sector) - 1));
            }
        }
    }

    /// Appends the extents of sectors `from..to`; false if any is missing.
    pub fn lookup(&mut self, from: u64, to: u64, out: &mut Vec<Mapping>) -> bool {
        let Some((mut leaf, mut index)) = self.at_or_before(from) else { return false };
        let mut at = from;
        loop {
            let Some(entry) = self.leaves.get_mut(leaf).and_then(|leaf| leaf.get_mut(index)) else { return false };
            if entry.start() > at || entry.end() <= at {
                return false;
            }
            if !entry.seen() {
                entry.set_seen(true);
                if entry.prefetched() {
                    entry.set_prefetched(false);
                    self.used += 1;
                }
            }
            let end = entry.end().min(to);
            push(out, entry.mapping().clipped(at * SECTOR, end * SECTOR));
            at = end;
            if at >= to {
                return true;
            }
            index += 1;
            if index == self.leaves[leaf].len() {
                (leaf, index) = (leaf + 1, 0);
            }
        }
    }

    /// True when no entry overlaps sectors `from..to`.
    pub fn is_free(&self, from: u64, to: u64) -> bool {
        let before = self.at_or_before(to.saturating_sub(1));
        before.is_none_or(|(leaf, index)| self.leaves[leaf][index].end() <= from)
    }

    /// Removes sectors `from..to` from all entries.
    pub fn remove(&mut self, from: u64, to: u64) {
        let Some(mut leaf) = self.firsts.partition_point(|first| *first < to).checked_sub(1) else { return };
        // Leaves are visited from the last to the first, so that removals do not move leaves that are not visited yet.
        loop {
            let entries = &mut self.leaves[leaf];
            let first = entries.partition_point(|entry| entry.end() <= from);
            let last = entries.partition_point(|entry| entry.start() < to);
            let reached_start = entries[0].start() <= from;
            if first < last {
                let head = (entries[first].start() < from).then(|| entries[first].part(entries[first].start(), from));
                let end = entries[last - 1].end();
                let tail = (end > to).then(|| entries[last - 1].part(to, end));
                let kept = [head, tail].into_iter().flatten();
                let before = entries.len();
                if head.is_some() && tail.is_some() && last - first == 1 {
                    reserve(entries);
                }
                entries.splice(first..last, kept);
                self.entries = self.entries + entries.len() - before;
                self.settle(leaf);
            }
            if reached_start || leaf == 0 {
                return;
            }
            leaf -= 1;
        }
    }

    /// The parts of `from..to` with entries in a level that `wanted` selects.
    pub fn parts_of(&self, from: u64, to: u64, wanted: impl Fn(u8) -> bool) -> Vec<(u64, u64)> {
        let mut parts = Vec::new();
        let leaf = self.firsts.partition_point(|first| *first <= from).saturating_sub(1);
        for entry in self.leaves[leaf.min(self.leaves.len())..].iter().flatten() {
            if entry.start() >= to {
                break;
            }
            if entry.end() > from && entry.level().is_some_and(&wanted) {
                parts.push((entry.start().max(from), entry.end().min(to)));
            }
        }
        parts
    }

    /// Inserts an entry into a free range, joined with adjacent entries where one continues the other.
    pub fn insert(&mut self, mut entry: CachedExtent) {
        let Some(leaf) = self.leaf_for(entry.start()) else {
            self.firsts.push(entry.start());
            let mut entries = Vec::new();
            reserve(&mut entries);
            entries.push(entry);
            self.leaves.push(entries);
            self.entries += 1;
            return;
        };
        let entries = &mut self.leaves[leaf];
        let mut index = entries.partition_point(|other| other.start() < entry.start());
        if let Some(joined) = entries.get(index).and_then(|next| entry.joined(*next)) {
            entries.remove(index);
            self.entries -= 1;
            entry = joined;
        }
        if let Some(joined) = index.checked_sub(1).and_then(|before| entries[before].joined(entry)) {
            index -= 1;
            entries[index] = joined;
        } else {
            reserve(entries);
            entries.insert(index, entry);
            self.entries += 1;
        }
        self.firsts[leaf] = entries[0].start();
        if entries.len() > LEAF_MAX {
            self.split(leaf, index);
        }
    }

    fn leaf_for(&self, start: u64) -> Option<usize> {
        if self.leaves.is_empty() {
            return None;
        }
        Some(self.firsts.partition_point(|first| *first <= start).saturating_sub(1))
    }

    /// Splits a leaf in the middle; or, if the last entry was inserted, before that entry, as sequential requests
    /// insert entries.
    fn split(&mut self, leaf: usize, inserted: usize) {
        let entries = &mut self.leaves[leaf];
        let at = if inserted + 1 == entries.len() { entries.len() - 1 } else { entries.len() / 2 };
        let mut right = Vec::with_capacity((entries.len() - at).next_multiple_of(LEAF_STEP));
        right.extend_from_slice(&entries[at..]);
        entries.truncate(at);
        trim(entries);
        self.firsts.insert(leaf + 1, right[0].start());
        self.leaves.insert(leaf + 1, right);
        if self.hand > leaf + 1 {
            self.hand += 1;
        }
    }

    /// Called after entries were removed from a leaf: drops the leaf, joins it with the next one, or returns memory.
    fn settle(&mut self, leaf: usize) {
        let length = self.leaves[leaf].len();
        if length > LEAF_MAX {
            return self.split(leaf, 0);
        }
        if length == 0 {
            self.firsts.remove(leaf);
            self.leaves.remove(leaf);
            if self.hand > leaf {
                self.hand -= 1;
            }
            return;
        }
        self.firsts[leaf] = self.leaves[leaf][0].start();
        trim(&mut self.leaves[leaf]);
        if length <= LEAF_MAX / 4 && self.leaves.get(leaf + 1).is_some_and(|next| length + next.len() <= LEAF_MAX / 2) {
            let next = self.leaves.remove(leaf + 1);
            self.firsts.remove(leaf + 1);
            let entries = &mut self.leaves[leaf];
            entries.reserve_exact((length + next.len()).next_multiple_of(LEAF_STEP) - length);
            entries.extend_from_slice(&next);
            if self.hand > leaf + 1 {
                self.hand -= 1;
            }
        }
    }

    /// Moves the hand until `wanted` entries are evicted, or the hand has completed a round. Entries that were used
    /// since the hand last passed stay.
    pub fn sweep(&mut self, wanted: usize) -> Swept {
        let mut swept = Swept::default();
        while swept.evicted < wanted {
            if self.hand == 0 || self.leaves.is_empty() {
                self.hand = self.leaves.len();
                swept.round = true;
                return swept;
            }
            self.hand = (self.hand - 1).min(self.leaves.len() - 1);
            let leaf = self.hand;
            let before = self.leaves[leaf].len();
            self.leaves[leaf].retain_mut(|entry| {
                let kept = entry.seen();
                entry.set_seen(false);
                swept.unused += usize::from(!kept && entry.prefetched());
                kept
            });
            let evicted = before - self.leaves[leaf].len();
            if evicted > 0 {
                swept.evicted += evicted;
                self.entries -= evicted;
                self.settle(leaf);
            }
        }
        swept
    }

    /// Drops all extents in level `number`.
    pub fn purge(&mut self, number: u8) {
        for leaf in (0..self.leaves.len()).rev() {
            let before = self.leaves[leaf].len();
            self.leaves[leaf].retain(|entry| entry.level() != Some(number));
            let removed = before - self.leaves[leaf].len();
            if removed > 0 {
                self.entries -= removed;
                self.settle(leaf);
            }
        }
    }

    /// Bytes of memory in use, without the allocator's own headers.
    pub fn memory(&self) -> usize {
        let leaves: usize = self.leaves.iter().map(|leaf| leaf.capacity() * size_of::<CachedExtent>()).sum();
        leaves + self.leaves.capacity() * size_of::<Vec<CachedExtent>>() + self.firsts.capacity() * size_of::<u64>()
    }

    /// Panics if an invariant is violated.
    #[cfg(test)]
    pub fn check(&self) {
        assert_eq!(self.entries, self.leaves.iter().map(Vec::len).sum::<usize>());
        assert_eq!(self.firsts.len(), self.leaves.len());
        let mut end = 0;
        for (first, leaf) in self.firsts.iter().zip(&self.leaves) {
            assert_eq!(*first, leaf[0].start());
            assert!(leaf.len() <= LEAF_MAX && leaf.capacity() <= leaf.len() + 3 * LEAF_STEP, "{}", leaf.capacity());
            for entry in leaf {
                assert!(entry.start() >= end && entry.length() > 0);
                end = entry.end();
            }
        }
    }
}

/// Reserves memory for one more entry. Memory grows in fixed steps, not by doubling.
fn reserve(entries: &mut Vec<CachedExtent>) {
    if entries.len() == entries.capacity() {
        entries.reserve_exact(LEAF_STEP);
    }
}

/// Returns memory that will not be needed soon.
fn trim(entries: &mut Vec<CachedExtent>) {
    if entries.capacity() >= entries.len() + 2 * LEAF_STEP {
        entries.shrink_to(entries.len() + LEAF_STEP / 2);
    }
}
