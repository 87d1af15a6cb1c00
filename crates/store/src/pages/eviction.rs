//! Decides which page leaves memory: not one that is used all the time, however many others are used once.
//!
//! The scheme is that of S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023). New pages
//! enter a short queue and leave at its end. Pages that were used again meanwhile, or are wanted again soon after they
//! left, enter the long queue. There a page goes round once more for each use, up to [`USES_MAX`]. A request reads a
//! page several times in a row: that counts as one use.

use super::{PageKey, Pages};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;
use std::sync::Arc;

/// Uses of a page that count, at most.
const USES_MAX: u8 = 3;
/// The short queue is one part in this many of the cache.
const NEW_PART: usize = 8;
/// Pages examined for each page that enters.
const LOOKS_MAX: usize = 64;

/// How much a page is used.
#[derive(Clone, Copy, Default)]
pub(super) struct Uses {
    count: u8,
    /// Number of pages that had entered when it was used last.
    last: u64,
}

/// The queues. They may name pages that are not in memory any more.
#[derive(Default)]
pub(super) struct Queues {
    new: VecDeque<PageKey>,
    others: VecDeque<PageKey>,
    /// Pages that left the short queue last.
    left: FxHashSet<PageKey>,
    left_order: VecDeque<PageKey>,
    /// Number of pages that have entered.
    came: u64,
    /// Uses of a page within this many entering pages count as one.
    apart: u64,
    new_max: usize,
    left_max: usize,
}

impl Queues {
    /// For a cache of this many pages.
    pub fn new(limit: usize) -> Self {
        let new_max = limit / NEW_PART;
        Self { apart: new_max as u64 / 2, new_max, left_max: limit, ..Self::default() }
    }

    /// Notes that a page enters; returns its initial uses.
    pub fn enter(&mut self, key: PageKey) -> Uses {
        self.came += 1;
        let known = self.left.remove(&key);
        if known {
            self.others.push_back(key);
        } else {
            self.new.push_back(key);
        }
        Uses { count: u8::from(known), last: self.came }
    }

    /// Notes a use of a page.
    #[inline]
    pub fn note(&self, uses: &mut Uses) {
        if self.came - uses.last > self.apart {
            uses.last = self.came;
            uses.count = (uses.count + 1).min(USES_MAX);
        }
    }

    fn leave(&mut self, key: PageKey) {
        if self.left.insert(key) {
            self.left_order.push_back(key);
        }
        while self.left_order.len() > self.left_max {
            if let Some(oldest) = self.left_order.pop_front() {
                self.left.remove(&oldest);
            }
        }
    }

    /// Names in the queues.
    pub fn len(&self) -> usize {
        self.new.len() + self.others.len()
    }

    /// Sets the queues to these pages, all of them old.
    pub fn restart(&mut self, keys: impl Iterator<Item = PageKey>) {
        self.new.clear();
        self.others = keys.collect();
    }

    /// Drops duplicates, and the names of pages that are not in memory any more.
    fn tidy(&mut self, is_there: impl Fn(&PageKey) -> bool) {
        let mut seen = FxHashSet::default();
        let mut stays = |key: &PageKey| is_there(key) && seen.insert(*key);
        self.others.retain(&mut stays);
        self.new.retain(&mut stays);
    }
}

impl Pages {
    /// Makes room for a page that enters, if pages can leave.
    pub(super) fn make_room(&mut self) {
        let mut looks = self.queues.len().min(LOOKS_MAX);
        while self.slots.len() >= self.limit && looks > 0 {
            looks -= 1;
            let queues = &mut self.queues;
            let is_new = queues.new.len() > queues.new_max || queues.others.is_empty();
            let next = if is_new { queues.new.pop_front() } else { queues.others.pop_front() };
            let Some(key) = next else { return };
            match self.slots.get_mut(&key) {
                None => {}
                Some(slot) if slot.dirty => queues.others.push_back(key),
                // A checkpoint that captured it still holds it: its file has an older page.
                Some(slot) if Arc::strong_count(&slot.page) > 1 && is_new => queues.new.push_back(key),
                Some(slot) if Arc::strong_count(&slot.page) > 1 => queues.others.push_back(key),
                Some(slot) if slot.uses.count > 0 => {
                    slot.uses.count -= 1;
                    queues.others.push_back(key);
                }
                Some(_) => {
                    self.slots.remove(&key);
                    self.statistics.evictions += 1;
                    if is_new {
                        self.queues.leave(key);
                    }
                }
            }
        }
        // Names of pages that left must not accumulate.
        if self.queues.len() > 2 * self.slots.len() + 1024 {
            let slots = &self.slots;
            self.queues.tidy(|key| slots.contains_key(key));
        }
    }
}
