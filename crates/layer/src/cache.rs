//! A bounded cache of small items that cost a read or a decompression: tables, slices of tables, grains.
//!
//! 1. The cache never has more than `capacity` entries.
//! 2. A hit changes only one bit, so that many readers can share the lock around the cache.
//! 3. Eviction is by the CLOCK algorithm: entries used since the hand last passed stay for another round.

use rustc_hash::FxHashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};

struct Slot<K, V> {
    key: K,
    value: V,
    used: AtomicBool,
}

/// The cache; its owner locks it.
pub(crate) struct ClockCache<K, V> {
    slots: Vec<Slot<K, V>>,
    index: FxHashMap<K, usize>,
    hand: usize,
    capacity: usize,
}

impl<K: Copy + Eq + Hash, V> ClockCache<K, V> {
    /// An empty cache of at most `capacity` entries, at least one.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { slots: Vec::new(), index: FxHashMap::default(), hand: 0, capacity: capacity.max(1) }
    }

    /// The entry of `key`.
    pub(crate) fn get(&self, key: K) -> Option<&V> {
        let slot = self.slots.get(*self.index.get(&key)?)?;
        // A plain load first: hot entries are shared between threads, and their cache line should stay shared.
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some(&slot.value)
    }

    /// Inserts an entry, in place of the one with the same key, or of one that was not used recently.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if let Some(&at) = self.index.get(&key) {
            self.slots[at].value = value;
            return;
        }
        let slot = Slot { key, value, used: AtomicBool::new(false) };
        if self.slots.len() < self.capacity {
            self.index.insert(key, self.slots.len());
            self.slots.push(slot);
            return;
        }
        while self.slots[self.hand].used.swap(false, Ordering::Relaxed) {
            self.hand = (self.hand + 1) % self.capacity;
        }
        self.index.remove(&self.slots[self.hand].key);
        self.index.insert(key, self.hand);
        self.slots[self.hand] = slot;
        self.hand = (self.hand + 1) % self.capacity;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_bounded_and_keeps_used_entries() {
        let mut cache = ClockCache::new(8);
        cache.insert(1000, 0u64);
        for key in 0..100u64 {
            cache.insert(key, key * 2);
            assert_eq!(cache.get(1000), Some(&0), "used between any two insertions");
            assert!(cache.slots.len() <= 8 && cache.index.len() == cache.slots.len());
            assert_eq!(cache.index.get(&key).map(|at| cache.slots[*at].value), Some(key * 2));
        }
        cache.insert(99, 7);
        assert_eq!(cache.get(99), Some(&7));
        assert_eq!(cache.get(1), None);
    }
}
