//! The data cache: blocks of 4 KiB that were read, where a disk is given memory for it.
//!
//! Blocks are kept under the address that the guest uses, so a snapshot or a merge does not touch them. Which stay is
//! decided by S3-FIFO ([`queue`]): what is read once and never again leaves through a small queue and takes nothing
//! from what is read again and again.
//!
//! 1. A block in the cache is what a read of the chain returns, but for ranges under change, of which it has none.
//! 2. What was read goes in only if nothing there has begun to change since before it was looked for
//!    ([`crate::changes`]).
//! 3. Memory stays within the size set; a block lent to a reply lives until the reply is sent, counted or not.

mod queue;

use crate::changes::{Changes, Token};
use crate::limits::DATA_CACHE_MAX;
use crate::statistics::DataStatistics;
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, Buffer, SharedSlice};
use parking_lot::Mutex;
use queue::Blocks;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: u64 = BLOCK_SIZE as u64;
const SHARDS: u64 = 8;
/// Neighbouring blocks that share a shard.
const RUN: u64 = 16;

#[derive(Default)]
#[repr(align(128))]
struct Padded(Mutex<Blocks>);

/// The cache of one chain.
pub(crate) struct DataCache {
    shards: [Padded; SHARDS as usize],
    size: AtomicU64,
}

impl DataCache {
    pub fn new(size: u64) -> Result<Self> {
        let cache = Self { shards: Default::default(), size: AtomicU64::new(0) };
        cache.set_size(size)?;
        Ok(cache)
    }

    /// Takes effect at once; 0 switches the cache off and empties it.
    pub fn set_size(&self, size: u64) -> Result<()> {
        if size > DATA_CACHE_MAX {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a data cache has at most {DATA_CACHE_MAX} bytes, not {size}"),
            ));
        }
        self.size.store(size, Ordering::Relaxed);
        for shard in &self.shards {
            shard.0.lock().set_size(size / SHARDS);
        }
        Ok(())
    }

    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    pub fn is_on(&self) -> bool {
        self.size() > 0
    }

    fn shard(&self, block: u64) -> &Mutex<Blocks> {
        &self.shards[(block / RUN % SHARDS) as usize].0
    }

    /// Block number `block`, if it is here.
    pub fn get(&self, block: u64) -> Option<SharedSlice> {
        self.shard(block).lock().get(block)
    }

    /// Takes in a block that was read, unless it changed meanwhile.
    pub fn fill(&self, changes: &Changes, token: &Token, block: u64, content: Buffer) {
        let range = block * BLOCK..(block + 1) * BLOCK;
        let content = SharedSlice::new(Arc::new(content), 0..BLOCK_SIZE);
        let mut blocks = self.shard(block).lock();
        if changes.unchanged(token, &range) {
            blocks.insert(block, content);
        }
    }

    /// Before a change of `range`.
    pub fn forget(&self, range: &Range<u64>) {
        if !self.is_on() {
            return;
        }
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        if blocks.end - blocks.start <= SHARDS * RUN {
            for block in blocks {
                self.shard(block).lock().remove(block);
            }
        } else {
            for shard in &self.shards {
                shard.0.lock().remove_range(&blocks);
            }
        }
    }

    pub fn statistics(&self) -> DataStatistics {
        let mut sum = DataStatistics { memory_max: self.size(), ..DataStatistics::default() };
        for shard in &self.shards {
            shard.0.lock().add_statistics(&mut sum);
        }
        sum
    }
}
