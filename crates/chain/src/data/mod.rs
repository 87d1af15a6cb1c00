//! The data cache: 4 KiB blocks that were read, for disks with memory set aside for it.
//!
//! Blocks are kept under their guest address, so a snapshot or a merge does not affect them. Eviction follows S3-FIFO
//! ([`queue`]): a block that is read only once passes through a small queue and displaces no block that is read often.
//!
//! 1. A cached block equals what a read of the chain returns. Ranges under change have no cached blocks.
//! 2. A block is inserted only if no change of the block was under way when its lookup began, and none has begun since
//!    ([`crate::changes`]).
//! 3. Memory stays within the configured size. The memory of a block that a reply refers to is freed only after the
//!    reply was sent; after the eviction of the block it is not counted.

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
/// Consecutive blocks in one shard.
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

    /// Sets the size, at once; 0 switches the cache off and empties it.
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

    /// Block number `block`, if it is cached.
    pub fn get(&self, block: u64) -> Option<SharedSlice> {
        self.shard(block).lock().get(block)
    }

    /// Inserts a block that was read, unless it changed meanwhile.
    pub fn fill(&self, changes: &Changes, token: &Token, block: u64, content: Buffer) {
        let range = block * BLOCK..(block + 1) * BLOCK;
        let content = SharedSlice::new(Arc::new(content), 0..BLOCK_SIZE);
        let mut blocks = self.shard(block).lock();
        if changes.unchanged(token, &range) {
            blocks.insert(block, content);
        }
    }

    /// Drops the blocks of `range`; called before `range` changes.
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
