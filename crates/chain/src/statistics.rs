//! Statistics of an open chain for users and monitoring systems. All counters only grow.

use crate::levels::LevelKey;
use serde::{Deserialize, Serialize};

/// Statistics of the metadata cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetadataStatistics {
    /// Lookups answered from the cache.
    pub hits: u64,
    /// Lookups that needed a walk.
    pub misses: u64,
    /// Extents that were evicted.
    pub evictions: u64,
    /// Walks down the chain.
    pub walks: u64,
    /// Levels queried in all walks together; divided by `walks`, the mean length of a walk.
    pub walk_levels: u64,
    /// Levels queried in the longest walk.
    pub walk_levels_max: u64,
    /// Extents inserted into the cache before any request looked them up.
    pub prefetched: u64,
    /// Prefetched extents that were used later.
    pub prefetched_used: u64,
    /// Extents in the cache now.
    pub entries: u64,
    /// Bytes of memory that the cache uses now.
    pub memory: u64,
}

impl MetadataStatistics {
    /// Levels queried per walk.
    pub fn walk_levels_mean(&self) -> f64 {
        if self.walks == 0 { 0.0 } else { self.walk_levels as f64 / self.walks as f64 }
    }

    /// Share of lookups answered from the cache.
    pub fn hit_rate(&self) -> f64 {
        let all = self.hits + self.misses;
        if all == 0 { 0.0 } else { self.hits as f64 / all as f64 }
    }
}

/// Statistics of the data cache. Blocks are 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataStatistics {
    /// Blocks read from the cache.
    pub hits: u64,
    /// Blocks that were missing.
    pub misses: u64,
    /// Blocks inserted.
    pub insertions: u64,
    /// Blocks that were evicted.
    pub evictions: u64,
    /// Blocks that a write, discard or zeroing invalidated.
    pub invalidations: u64,
    /// Blocks in the cache now.
    pub blocks: u64,
    /// Bytes of memory that the cache uses now.
    pub memory: u64,
    /// The limit on the cache's memory in bytes.
    pub memory_max: u64,
}

/// Statistics of one level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LevelStatistics {
    /// The key of the level in this chain.
    pub key: LevelKey,
    /// The layer's format, as named by `lamina convert -d`.
    pub format: &'static str,
    /// The layer's capacity in bytes.
    pub capacity: u64,
    /// Unit of mapping in bytes.
    pub grain: u64,
    /// Whether the layer is open for writing.
    pub writable: bool,
}

/// Statistics of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The levels, newest first.
    pub levels: Vec<LevelStatistics>,
    /// The metadata cache.
    pub metadata: MetadataStatistics,
    /// The data cache.
    pub data: DataStatistics,
    /// Writes of partial grains, which had to be completed with data of levels below.
    pub fills: u64,
}
