//! S3-FIFO (Yang et al., SOSP 2023): a cache of three queues.
//!
//! A new entry goes to the end of the small queue, which has a tenth of the room. At its front, an entry that was read
//! again goes to the main queue, and any other leaves the cache; its key is remembered as a ghost. A key that is a
//! ghost goes to the main queue at once. At the front of the main queue, an entry that was read since goes to its end,
//! up to three times, and any other leaves the cache. So entries that are read once, as by a backup, only pass through
//! the small queue.
//!
//! What must hold:
//!
//! 1. The entries that have a value have together at most the weight `limit`, and so have the ghosts.
//! 2. Each entry has a number, and an item in a queue stands for the entry only if both have the same number. So an
//!    entry is removed without a search for its item, and the item is dropped when it reaches the front. Items without
//!    an entry are at most as many as those with one, and [`STALE_MAX`].

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// The part of the room that the small queue has.
const SMALL_PART: usize = 10;
/// Items without an entry that a queue may have, beside as many as it has entries.
const STALE_MAX: usize = 64;
/// How many reads of an entry are remembered at most.
const READS_MAX: u8 = 3;

/// Where an entry is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Small,
    Main,
    Ghost,
}

struct Entry<V> {
    /// `None` for a ghost.
    value: Option<V>,
    place: Place,
    /// Reads since the entry was put into its queue, or since it passed the front of the main queue.
    reads: u8,
    number: u64,
    weight: usize,
}

/// A cache of values by ordered keys.
pub struct Queue<K, V> {
    /// The most weight of the entries with a value.
    limit: usize,
    entries: BTreeMap<K, Entry<V>>,
    /// The items of the small queue, of the main queue, and of the ghosts.
    items: [VecDeque<(K, u64)>; 3],
    /// How many entries are in each.
    counts: [usize; 3],
    /// The weight of the entries in each.
    weights: [usize; 3],
    numbers: u64,
}

impl<K: Ord + Copy, V> Queue<K, V> {
    /// An empty cache of values of at most the weight `limit`, at least that of the heaviest.
    pub fn new(limit: usize) -> Self {
        let (items, counts, weights) = Default::default();
        Self { limit, entries: BTreeMap::new(), items, counts, weights, numbers: 0 }
    }

    /// The weight of the entries with a value.
    fn weight(&self) -> usize {
        self.weights[Place::Small as usize] + self.weights[Place::Main as usize]
    }

    /// Shows the values in a range of keys, in order. `each` returns whether it uses the value.
    pub fn read(&mut self, keys: Range<K>, mut each: impl FnMut(K, &V) -> bool) {
        for (key, entry) in self.entries.range_mut(keys) {
            if let Some(value) = &entry.value
                && each(*key, value)
            {
                entry.reads = (entry.reads + 1).min(READS_MAX);
            }
        }
    }

    /// Adds an entry with a weight, if its key has no value yet. Values that leave the cache, or do not enter it, are
    /// moved to `dropped`.
    pub fn insert(&mut self, key: K, value: V, weight: usize, dropped: &mut Vec<V>) {
        let known = self.entries.get(&key).map(|entry| entry.place);
        if !matches!(known, None | Some(Place::Ghost)) || weight > self.limit {
            dropped.push(value);
            return;
        }
        let place = if known.is_some() { Place::Main } else { Place::Small };
        while self.weight() + weight > self.limit {
            dropped.extend(self.advance());
        }
        self.numbers += 1;
        let new = Entry { value: Some(value), place, reads: 0, number: self.numbers, weight };
        if let Some(ghost) = self.entries.insert(key, new) {
            self.uncount(ghost.place, ghost.weight);
        }
        self.push(place, key, self.numbers, weight);
    }

    /// Removes all entries and ghosts in a range of keys.
    pub fn remove(&mut self, keys: Range<K>, dropped: &mut Vec<V>) {
        while let Some((key, _)) = self.entries.range(keys.start..keys.end).next() {
            let key = *key;
            if let Some(entry) = self.entries.remove(&key) {
                self.uncount(entry.place, entry.weight);
                dropped.extend(entry.value);
            }
        }
        for place in [Place::Small, Place::Main, Place::Ghost] {
            self.drop_stale(place);
        }
    }

    /// Drops items without an entry, if there are many.
    fn drop_stale(&mut self, place: Place) {
        let items = &mut self.items[place as usize];
        if items.len() > 2 * self.counts[place as usize] + STALE_MAX {
            let entries = &self.entries;
            items.retain(|(key, number)| entries.get(key).is_some_and(|entry| entry.number == *number));
        }
    }

    fn push(&mut self, place: Place, key: K, number: u64, weight: usize) {
        self.items[place as usize].push_back((key, number));
        self.counts[place as usize] += 1;
        self.weights[place as usize] += weight;
    }

    fn uncount(&mut self, place: Place, weight: usize) {
        self.counts[place as usize] -= 1;
        self.weights[place as usize] -= weight;
    }

    /// Takes the first item from a queue, and its entry out of the count. `None` for an item without an entry.
    fn pop(&mut self, place: Place) -> Option<K> {
        let (key, number) = self.items[place as usize].pop_front()?;
        let weight = self.entries.get(&key).filter(|entry| entry.number == number)?.weight;
        self.uncount(place, weight);
        Some(key)
    }

    /// Takes one item from the front of the small or main queue. Returns the value that leaves the cache, if one does.
    fn advance(&mut self) -> Option<V> {
        let (small, main) = (self.weights[Place::Small as usize], self.weights[Place::Main as usize]);
        let from = if small > self.limit / SMALL_PART || main == 0 { Place::Small } else { Place::Main };
        let key = self.pop(from)?;
        let entry = self.entries.get_mut(&key)?;
        let (number, weight) = (entry.number, entry.weight);
        if entry.reads > 0 {
            entry.reads = if from == Place::Main { entry.reads - 1 } else { 0 };
            entry.place = Place::Main;
            self.push(Place::Main, key, number, weight);
            return None;
        }
        if from == Place::Main {
            return self.entries.remove(&key)?.value;
        }
        let value = entry.value.take();
        entry.place = Place::Ghost;
        self.push(Place::Ghost, key, number, weight);
        while self.weights[Place::Ghost as usize] > self.limit {
            if let Some(oldest) = self.pop(Place::Ghost) {
                self.entries.remove(&oldest);
            }
        }
        self.drop_stale(Place::Ghost);
        value
    }
}

#[cfg(test)]
mod tests;
