//! The queues of the read cache: their bound, what a scan evicts, and hits beside those of LRU.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::testbed::Random;

impl<K: Ord + Copy, V: Copy> Queue<K, V> {
    fn len(&self) -> usize {
        self.counts[Place::Small as usize] + self.counts[Place::Main as usize]
    }

    fn get(&mut self, key: K) -> Option<V> {
        let found = self.entries.get_mut(&key)?;
        let value = found.value?;
        found.reads = (found.reads + 1).min(READS_MAX);
        Some(value)
    }
}

/// A cache that removes what was used longest ago.
struct Lru {
    limit: usize,
    used: BTreeMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    time: u64,
}

impl Lru {
    /// Reads a key, and adds it if it is missing. True if it was there.
    fn read(&mut self, key: u64) -> bool {
        self.time += 1;
        let before = self.used.insert(key, self.time);
        if let Some(before) = before {
            self.order.remove(&before);
        } else if self.used.len() > self.limit {
            let (_, oldest) = self.order.pop_first().unwrap();
            self.used.remove(&oldest);
        }
        self.order.insert(self.time, key);
        before.is_some()
    }
}

#[test]
fn random_operations_return_the_last_value_of_a_key_within_the_bounds() {
    for (seed, limit, heaviest) in [(1, 1, 1), (2, 3, 1), (3, 3, 3), (4, 10, 2), (5, 100, 7)] {
        let (mut queue, mut random) = (Queue::new(limit), Random(seed));
        let mut model = BTreeMap::new();
        for step in 0..20_000u64 {
            let key = random.below(4 * limit as u64);
            match random.below(10) {
                0..5 => {
                    if let Some(value) = queue.get(key) {
                        assert_eq!(model.get(&key), Some(&value));
                    }
                }
                5..9 => {
                    let mut dropped = Vec::new();
                    let known = queue.entries.get(&key).is_some_and(|entry| entry.value.is_some());
                    let before = queue.len();
                    queue.insert(key, step, 1 + key as usize % heaviest, &mut dropped);
                    assert_eq!(queue.len() + dropped.len(), before + 1);
                    if !known {
                        model.insert(key, step);
                        assert_eq!(queue.get(key), Some(step));
                    }
                }
                _ => {
                    let keys = key..key + random.below(limit as u64) + 1;
                    queue.remove(keys.clone(), &mut Vec::new());
                    model.retain(|key, _| !keys.contains(key));
                    assert!(keys.clone().all(|key| !queue.entries.contains_key(&key)));
                }
            }
            let of = |place| queue.entries.values().filter(move |entry| entry.place == place);
            let places = [Place::Small, Place::Main, Place::Ghost];
            let sums = places.map(|place| of(place).map(|entry| entry.weight).sum::<usize>());
            assert_eq!((places.map(|place| of(place).count()), sums), (queue.counts, queue.weights));
            assert!(sums[0] + sums[1] <= limit && sums[2] <= limit, "{sums:?}");
            assert!(queue.items.iter().all(|items| items.len() <= 2 * limit + STALE_MAX));
        }
    }
}

#[test]
fn what_is_read_once_does_not_displace_what_is_read_again() {
    let mut queue = Queue::new(100);
    (0..50).for_each(|key| queue.insert(key, (), 1, &mut Vec::new()));
    assert!((0..50).all(|key| queue.get(key).is_some()));
    (1000..20_000).for_each(|key| queue.insert(key, (), 1, &mut Vec::new()));
    assert!((0..50).all(|key| queue.get(key).is_some()));
    assert_eq!(queue.len(), 100);
}

#[test]
fn a_key_that_left_the_small_queue_too_early_gets_into_the_main_queue() {
    let mut queue = Queue::new(100);
    (0..150).for_each(|key| queue.insert(key, (), 1, &mut Vec::new()));
    assert!(queue.get(0).is_none());
    queue.insert(0, (), 1, &mut Vec::new());
    (1000..20_000).for_each(|key| queue.insert(key, (), 1, &mut Vec::new()));
    assert!(queue.get(0).is_some());
}

/// Reads with a frequency in proportion to 1/rank, with and without a scan of 1000 other keys after each 2000 of them.
/// Counted are the hits of these reads. The scans cost LRU a part of its hits.
#[test]
fn more_reads_hit_than_with_lru_and_scans_cost_none() {
    const KEYS: u64 = 4000;
    const READS: u64 = 60_000;
    let mut sums = vec![0];
    (1..=KEYS).for_each(|rank| sums.push(sums[sums.len() - 1] + 1_000_000 / rank));
    let hits = |scans: bool| {
        let mut random = Random(1);
        let mut queue = Queue::new(200);
        let mut lru = Lru { limit: 200, used: BTreeMap::new(), order: BTreeMap::new(), time: 0 };
        let (mut found, mut found_by_lru, mut scanned) = (0, 0, KEYS);
        for number in 0..READS {
            let chosen = random.below(sums[KEYS as usize]);
            let key = sums.partition_point(|sum| *sum <= chosen) as u64;
            found += u64::from(queue.get(key).is_some());
            found_by_lru += u64::from(lru.read(key));
            queue.insert(key, (), 1, &mut Vec::new());
            if scans && number % 2000 == 0 {
                for _ in 0..1000 {
                    scanned += 1;
                    queue.insert(scanned, (), 1, &mut Vec::new());
                    lru.read(scanned);
                }
            }
        }
        (found * 100 / READS, found_by_lru * 100 / READS)
    };
    let (alone, alone_by_lru) = hits(false);
    let (beside_scans, beside_scans_by_lru) = hits(true);
    println!("without scans {alone} % (LRU {alone_by_lru} %), with {beside_scans} % (LRU {beside_scans_by_lru} %)");
    assert!(alone >= alone_by_lru + 5 && beside_scans >= beside_scans_by_lru + 7);
    assert!(beside_scans + 1 >= alone);
}

#[test]
fn a_light_entry_takes_little_room() {
    let mut queue = Queue::new(70);
    (0..50).for_each(|key| queue.insert(key, (), 1, &mut Vec::new()));
    assert!((0..50).all(|key| queue.get(key).is_some()));
    (1000..1100).for_each(|key| queue.insert(key, (), 7, &mut Vec::new()));
    assert!((0..50).all(|key| queue.get(key).is_some()));
    assert_eq!((queue.len(), queue.weight()), (52, 64));
    // What is heavier than the room does not enter, and displaces nothing.
    let mut dropped = Vec::new();
    queue.insert(9, (), 71, &mut dropped);
    assert_eq!((queue.len(), dropped.len()), (52, 1));
}
