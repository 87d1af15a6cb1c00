//! Decides which page is evicted: a page that is used often stays, even if many others are used once.
//!
//! The scheme is that of S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023). New pages
//! enter a short queue and are evicted at its end. Pages that were used again meanwhile, or are loaded again soon after
//! eviction, enter the long queue. A page that reaches the end of the long queue enters it again once for each use, up
//! to [`USES_MAX`]. A request often reads a page several times in a row, which counts as one use.

use super::{CLEAN, PageKey, Pages};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;
use std::sync::Arc;

/// The most uses of a page that count.
const USES_MAX: u8 = 3;
/// The size of the short queue is the size of the cache divided by this number.
const NEW_PART: usize = 8;
/// The most pages examined to evict one.
const LOOKS_MAX: usize = 64;

/// How often a page was used.
#[derive(Clone, Copy, Default)]
pub(super) struct Uses {
    count: u8,
    /// The number of pages that had entered the cache when the last use of this page was counted.
    last: u64,
}

/// The queues. They may contain keys of pages that are not in memory any more.
#[derive(Default)]
pub(super) struct Queues {
    new: VecDeque<PageKey>,
    others: VecDeque<PageKey>,
    /// Pages recently evicted from the short queue.
    left: FxHashSet<PageKey>,
    left_order: VecDeque<PageKey>,
    /// The number of pages that have entered the cache.
    came: u64,
    /// A use of a page counts only if more than this many pages have entered the cache since its last counted use.
    apart: u64,
    new_max: usize,
    left_max: usize,
}

impl Queues {
    /// Queues for a cache of this many pages.
    pub fn new(limit: usize) -> Self {
        let new_max = limit / NEW_PART;
        Self { apart: new_max as u64 / 2, new_max, left_max: limit, ..Self::default() }
    }

    /// Called when a page enters the cache. Returns its initial uses.
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

    /// Counts a use of a page.
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

    /// Number of keys in the queues.
    pub fn len(&self) -> usize {
        self.new.len() + self.others.len()
    }

    /// Sets the long queue to these pages.
    pub fn restart(&mut self, keys: impl Iterator<Item = PageKey>) {
        self.new.clear();
        self.others = keys.collect();
    }

    /// Removes duplicates, and keys of pages that are not in memory any more.
    fn tidy(&mut self, is_there: impl Fn(&PageKey) -> bool) {
        let mut seen = FxHashSet::default();
        let mut stays = |key: &PageKey| is_there(key) && seen.insert(*key);
        self.others.retain(&mut stays);
        self.new.retain(&mut stays);
    }
}

impl Pages {
    /// Evicts a page for one that enters, if possible.
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
                Some(slot) if slot.dirty != CLEAN => queues.others.push_back(key),
                // A checkpoint that has captured the page still needs it: the file has an older page.
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
        // Keys of evicted pages must not accumulate.
        if self.queues.len() > 2 * self.slots.len() + 1024 {
            let slots = &self.slots;
            self.queues.tidy(|key| slots.contains_key(key));
        }
    }
}
