//! Which page leaves memory: not one that is needed all the time, however many others are needed once.
//!
//! The scheme is that of S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023). New pages
//! stand in a short queue and leave at its end, unless they were used again meanwhile; then, and when they are wanted
//! again soon after they have left, they come to the long queue. A page there goes round once more for each use, up to
//! [`USES_MAX`]. A request looks at a page several times in a row: that is one use.

use super::{PageKey, Pages};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;
use std::sync::Arc;

/// Uses of a page that count.
const USES_MAX: u8 = 3;
/// The short queue is one part in so many of the cache.
const NEW_PART: usize = 8;
/// Pages looked at for each one that comes in.
const LOOKS_MAX: usize = 64;

/// How much a page is used.
#[derive(Clone, Copy, Default)]
pub(super) struct Uses {
    count: u8,
    /// Pages that had come in when it was used last.
    last: u64,
}

/// The queues. They may name pages that are gone.
#[derive(Default)]
pub(super) struct Queues {
    new: VecDeque<PageKey>,
    others: VecDeque<PageKey>,
    /// Pages that left the short queue last.
    left: FxHashSet<PageKey>,
    left_order: VecDeque<PageKey>,
    /// Pages that have come in.
    came: u64,
    /// Uses of a page within so many others that come in are one.
    apart: u64,
    new_max: usize,
    left_max: usize,
}

impl Queues {
    /// For a cache of so many pages.
    pub fn new(limit: usize) -> Self {
        let new_max = limit / NEW_PART;
        Self { apart: new_max as u64 / 2, new_max, left_max: limit, ..Self::default() }
    }

    /// A page comes in; what its uses begin with.
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

    /// A page is used.
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

    /// These pages only, all of them old.
    pub fn restart(&mut self, keys: impl Iterator<Item = PageKey>) {
        self.new.clear();
        self.others = keys.collect();
    }

    /// Drops the names of pages that are gone, and what is named twice.
    fn tidy(&mut self, is_there: impl Fn(&PageKey) -> bool) {
        let mut seen = FxHashSet::default();
        let mut stays = |key: &PageKey| is_there(key) && seen.insert(*key);
        self.others.retain(&mut stays);
        self.new.retain(&mut stays);
    }
}

impl Pages {
    /// Makes room for a page that comes in, if pages can leave.
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
                // Captured by a checkpoint that still holds it: its file has an older one.
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
        // Names of forgotten pages must not pile up.
        if self.queues.len() > 2 * self.slots.len() + 1024 {
            let slots = &self.slots;
            self.queues.tidy(|key| slots.contains_key(key));
        }
    }
}
