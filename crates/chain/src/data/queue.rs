//! S3-FIFO over blocks (Yang and others, SOSP 2023: "FIFO queues are all you need for cache eviction").
//!
//! ```text
//!             no ghost of the block             read again
//!   insert ------------------> small (10 %) ------------------------> main --+ read again: requeued
//!      |                         |                                     ^ |---+
//!      |                         v not read again                      | v not read again
//!      |                       ghost (block numbers only)              | evicted
//!      +--- the block is a ghost --------------------------------------+
//! ```
//!
//! 1. A block is in at most one queue, once; a slot is free or in exactly one queue.
//! 2. The memory of an invalidated block is freed at once, its slot only when the slot is next considered for eviction.
//!    If the block is read again before, it uses the same slot. The number of slots without memory never exceeds the
//!    number of blocks that the cache may have.

use crate::statistics::DataStatistics;
use backend::{BLOCK_SIZE, SharedSlice};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::ops::Range;

/// Memory per block besides its content: slot, queue, map, headers.
const OVERHEAD: u64 = 160;
/// Bytes that a block counts against the size.
pub(super) const COST: u64 = BLOCK_SIZE as u64 + OVERHEAD;
/// The highest read count that is kept for a block.
const READS_MAX: u8 = 3;
/// Reads that move a block from the small queue to the main queue.
const READS_TO_STAY: u8 = 1;

struct Slot {
    block: u64,
    content: Option<SharedSlice>,
    reads: u8,
}

/// The blocks of one shard.
#[derive(Default)]
pub(super) struct Blocks {
    slots: Vec<Slot>,
    free: Vec<u32>,
    index: FxHashMap<u64, u32>,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    ghosts: VecDeque<u64>,
    ghost_set: FxHashSet<u64>,
    /// The number of blocks with memory.
    live: usize,
    live_max: usize,
    hits: u64,
    misses: u64,
    insertions: u64,
    evictions: u64,
    invalidations: u64,
}

impl Blocks {
    pub fn set_size(&mut self, bytes: u64) {
        self.live_max = (bytes / COST) as usize;
        while self.live > self.live_max {
            self.evict();
        }
        if self.live_max == 0 {
            let (hits, misses, insertions) = (self.hits, self.misses, self.insertions);
            let (evictions, invalidations) = (self.evictions, self.invalidations);
            *self = Self { hits, misses, insertions, evictions, invalidations, ..Self::default() };
        }
    }

    pub fn get(&mut self, block: u64) -> Option<SharedSlice> {
        let found = self.index.get(&block).and_then(|slot| {
            let slot = &mut self.slots[*slot as usize];
            let content = slot.content.clone()?;
            slot.reads = (slot.reads + 1).min(READS_MAX);
            Some(content)
        });
        match found {
            Some(_) => self.hits += 1,
            None => self.misses += 1,
        }
        found
    }

    pub fn insert(&mut self, block: u64, content: SharedSlice) {
        if self.live_max == 0 {
            return;
        }
        if let Some(slot) = self.index.get(&block) {
            let slot = &mut self.slots[*slot as usize];
            if slot.content.replace(content).is_none() {
                self.live += 1;
                self.insertions += 1;
            }
        } else {
            let new = Slot { block, content: Some(content), reads: 0 };
            let number = match self.free.pop() {
                Some(number) => {
                    self.slots[number as usize] = new;
                    number
                }
                None => {
                    self.slots.push(new);
                    (self.slots.len() - 1) as u32
                }
            };
            self.index.insert(block, number);
            self.live += 1;
            self.insertions += 1;
            if self.ghost_set.contains(&block) { self.main.push_back(number) } else { self.small.push_back(number) }
        }
        while self.live > self.live_max || self.small.len() + self.main.len() > 2 * self.live_max {
            self.evict();
        }
    }

    /// Evicts the first slot of a queue. If its block was read again, moves it to the end of the main queue instead.
    fn evict(&mut self) {
        if self.small.len() > self.live_max / 10 || self.main.is_empty() {
            let Some(number) = self.small.pop_front() else { return };
            let slot = &mut self.slots[number as usize];
            if slot.content.is_some() && slot.reads > READS_TO_STAY {
                slot.reads = 0;
                self.main.push_back(number);
                return;
            }
            if slot.content.is_some() {
                let block = slot.block;
                self.remember(block);
            }
            self.release(number);
        } else {
            let Some(number) = self.main.pop_front() else { return };
            let slot = &mut self.slots[number as usize];
            if slot.content.is_some() && slot.reads > 0 {
                slot.reads -= 1;
                self.main.push_back(number);
                return;
            }
            self.release(number);
        }
    }

    fn remember(&mut self, block: u64) {
        if self.ghost_set.insert(block) {
            self.ghosts.push_back(block);
        }
        while self.ghosts.len() > self.live_max.max(1) {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.ghost_set.remove(&oldest);
            }
        }
    }

    fn release(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        if slot.content.take().is_some() {
            self.live -= 1;
            self.evictions += 1;
        }
        self.index.remove(&slot.block);
        self.free.push(number);
    }

    /// Drops the content of a block that changes.
    pub fn remove(&mut self, block: u64) {
        if let Some(slot) = self.index.get(&block)
            && self.slots[*slot as usize].content.take().is_some()
        {
            self.live -= 1;
            self.invalidations += 1;
        }
    }

    /// As [`Blocks::remove`], for a range of blocks.
    pub fn remove_range(&mut self, blocks: &Range<u64>) {
        if (self.slots.len() as u64) < blocks.end - blocks.start {
            for slot in &mut self.slots {
                if blocks.contains(&slot.block) && slot.content.take().is_some() {
                    self.live -= 1;
                    self.invalidations += 1;
                }
            }
        } else {
            for block in blocks.clone() {
                self.remove(block);
            }
        }
    }

    pub fn add_statistics(&self, sum: &mut DataStatistics) {
        sum.hits += self.hits;
        sum.misses += self.misses;
        sum.insertions += self.insertions;
        sum.evictions += self.evictions;
        sum.invalidations += self.invalidations;
        sum.blocks += self.live as u64;
        sum.memory += self.live as u64 * COST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::Buffer;
    use std::sync::Arc;

    fn content(block: u64) -> SharedSlice {
        SharedSlice::new(Arc::new(Buffer::copy_of(&block.to_le_bytes())), 0..BLOCK_SIZE)
    }

    fn read(blocks: &mut Blocks, block: u64) -> bool {
        if let Some(found) = blocks.get(block) {
            assert_eq!(found[..8], block.to_le_bytes());
            return true;
        }
        blocks.insert(block, content(block));
        false
    }

    #[test]
    fn a_scan_evicts_no_block_that_is_read_again() {
        let mut blocks = Blocks::default();
        blocks.set_size(1000 * COST);
        for _ in 0..4 {
            for block in 0..500 {
                read(&mut blocks, block);
            }
        }
        for block in 10_000..60_000 {
            read(&mut blocks, block);
        }
        let stayed = (0..500).filter(|block| blocks.get(*block).is_some()).count();
        assert!(stayed > 450, "{stayed} of 500 blocks stayed in the cache");
        assert!(blocks.live <= 1000 && blocks.slots.len() <= 2001);
    }

    #[test]
    fn the_data_cache_keeps_its_limit_under_reads_and_writes() {
        let mut blocks = Blocks::default();
        blocks.set_size(64 * COST);
        let mut seed = 1u64;
        for step in 0..200_000u64 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let block = (seed >> 33) % 200;
            match (seed >> 60) % 4 {
                0 => blocks.remove(block),
                1 if step % 100 == 0 => blocks.remove_range(&(block..block + 1000)),
                _ => drop(read(&mut blocks, block)),
            }
            assert!(blocks.live <= 64 && blocks.small.len() + blocks.main.len() <= 128);
            assert_eq!(blocks.index.len(), blocks.small.len() + blocks.main.len());
        }
        assert_eq!(blocks.slots.iter().filter(|slot| slot.content.is_some()).count(), blocks.live);
        blocks.set_size(0);
        assert!(blocks.slots.is_empty() && blocks.live == 0 && blocks.hits > 0);
    }
}
