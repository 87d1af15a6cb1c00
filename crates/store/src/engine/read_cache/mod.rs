//! The read cache: verified content of blocks, by the place where the block is stored. Disks, snapshots and clones that
//! share a place share its cached content.
//!
//! In buffered mode the page cache of the kernel holds what is stored, so only content that was decompressed is kept
//! here, when it is read a second time: to read and decompress a block from the page cache costs little more than to
//! keep it. In direct mode plain blocks are kept too. In both modes the cache keeps indexes of packs, with which a
//! short read fetches only the stored blocks that it needs.
//!
//! What must hold:
//!
//! 1. The content of a place changes only under the metadata lock, and under the same lock [`ReadCache::forget`] is
//!    called. Changes are: a pack gets a place; a checksum of a plain block is recorded. A block that is freed keeps
//!    its content until it is allocated again, which ends with one of these changes.
//! 2. Content is looked up under the metadata lock, for a place that the map names at that moment, and that has no
//!    journalled payload. With 1 it is the content that a read of the medium would have returned.
//! 3. A read plans under the metadata lock and reads without it. Its content is refused if the place was forgotten
//!    since the plan. [`ReadCache::changes`] numbers the changes for that. An index of a pack is not refused: no other
//!    pack can have got the place, because the guard of the plan ends after the index is kept. A read whose index was
//!    refused would be planned again and again beside many writes.
//! 4. Only content that has the checksum in the plan, or in the index of its pack, is kept. The index is kept from a
//!    first block that has the checksum in the plan.
//! 5. The locks of the shards are held for a few instructions, and no other lock is acquired under them.

mod queue;

use crate::pack::Index;
use crate::space::Run;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use backend::{BLOCK_SIZE, SharedSlice};
use queue::Queue;
use std::ops::Range;
use std::sync::Arc;

/// The most shards of a small cache.
const SHARDS_USUAL: usize = 16;
/// The most shards.
const SHARDS_MAX: usize = 4096;
/// The fewest entries of a shard, if there are several.
const SHARD_ENTRIES_MIN: usize = 1024;
/// Places whose first read is remembered, for each block for which there is memory.
const SEEN_PER_ENTRY: usize = 4;
/// The most places whose first read is remembered.
const SEEN_MAX: usize = 1 << 24;
/// The most memory of a shard in units, thus the most entries, up to [`SHARDS_MAX`] shards. A lookup under the metadata
/// lock may wait for another thread that passes over all entries of the shard, to find one that may leave the cache, or
/// to drop stale items.
const SHARD_UNITS_MAX: usize = 8192;
/// Blocks with adjacent numbers that are in one shard. The groups take turns, so that the shards get equal parts of
/// what was written in order.
const GROUP: u64 = 32;
/// Places that a shard distinguishes when it remembers changes.
const SLOTS: u64 = 256;
/// Fewer cached blocks than this (128 KiB) in the middle of a run are read from the medium with the rest.
const MIDDLE_MIN: usize = 32;
/// Memory of an entry beside its content: its nodes in the tree and in the queues, also as a ghost.
const OVERHEAD: usize = 384;
/// The unit of memory of entries. The index of a usual pack takes one, a block seven.
const UNIT: usize = 640;
/// Memory of a block in units.
const BLOCK_UNITS: usize = (BLOCK_SIZE + OVERHEAD).div_ceil(UNIT);
/// The smallest memory of a cache that keeps indexes. In a smaller one they could leave before they are used.
const INDEXES_MIN: usize = 512 << 10;
/// The index of content that is not in a pack.
const PLAIN: u16 = u16::MAX;
/// The index of the index of a pack.
const INDEX: u16 = u16::MAX - 1;

/// Where content is stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// The block, or the first block of the pack.
    block: u64,
    /// The index in the pack.
    index: u16,
}

impl Place {
    /// A plain block.
    pub fn plain(block: u64) -> Self {
        Self { block, index: PLAIN }
    }

    /// A block in the pack that begins at `block`.
    pub fn packed(block: u64, index: usize) -> Self {
        Self { block, index: index as u16 }
    }
}

/// What is cached.
enum Value {
    /// The content of a block.
    Block(SharedSlice),
    /// The index of a pack.
    Index(Arc<Index>),
}

impl Value {
    fn bytes(&self) -> usize {
        match self {
            Self::Block(_) => BLOCK_SIZE,
            Self::Index(index) => index.memory(),
        }
    }
}

/// What a cache keeps beside indexes of packs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
    /// Plain blocks and blocks of packs.
    All,
    /// Blocks of packs.
    Packed,
    /// Blocks of packs that are read a second time.
    PackedAgain,
}

struct Shard {
    queue: Queue<Place, Value>,
    /// Number of the last change of a place, by its [`ReadCache::slot`].
    changed: Box<[u64]>,
}

/// How many blocks were found in the cache, and how many were not, of those that it may hold.
#[derive(Default)]
pub struct Lookups {
    hits: AtomicU64,
    misses: AtomicU64,
}

impl Lookups {
    /// Counts a read.
    pub fn count(&self, hits: u64, misses: u64) {
        for (counter, blocks) in [(&self.hits, hits), (&self.misses, misses)] {
            if blocks > 0 {
                counter.fetch_add(blocks, Ordering::Relaxed);
            }
        }
    }

    /// Hits and misses in blocks.
    pub fn counts(&self) -> (u64, u64) {
        (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed))
    }
}

/// Counters of the read cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCacheStatistics {
    /// Bytes that the cache holds, without what it needs to find them.
    pub resident: u64,
    /// Blocks that were read from the cache.
    pub hits: u64,
    /// Blocks that the cache may hold, and that were read from the medium.
    pub misses: u64,
}

/// The read cache of a store.
pub struct ReadCache {
    /// None if the cache is off.
    shards: Box<[Mutex<Shard>]>,
    kept: Kept,
    /// Fingerprints of places that were read once, if content is kept when it is read a second time.
    seen: Box<[AtomicU16]>,
    holds_indexes: bool,
    /// Number of changes so far.
    changes: AtomicU64,
    /// Bytes of blocks and indexes in the cache.
    resident: AtomicU64,
    /// Lookups of all disks and snapshots.
    pub lookups: Lookups,
}

/// The parts of a run that are in one group.
fn groups(run: Run) -> impl Iterator<Item = Range<u64>> {
    let (mut at, end) = (run.start, run.start + run.blocks);
    std::iter::from_fn(move || {
        let from = at;
        at = end.min((from / GROUP + 1) * GROUP);
        (from < at).then_some(from..at)
    })
}

/// The cached blocks of a run that a read uses. A few in the middle would divide the read of the rest into two
/// requests, which cost more than reading these blocks too: a sequential read of a range of which every second block is
/// cached would become one request for each block.
pub fn worth_using(run: Run, cached: Vec<(u64, SharedSlice)>) -> Vec<(u64, SharedSlice)> {
    if cached.is_empty() || cached.len() as u64 == run.blocks {
        return cached;
    }
    let is_worth = |part: &&[(u64, SharedSlice)]| {
        let (first, last) = (part[0].0, part[part.len() - 1].0);
        first == run.start || last + 1 == run.start + run.blocks || part.len() >= MIDDLE_MIN
    };
    cached.chunk_by(|a, b| a.0 + 1 == b.0).filter(is_worth).flatten().cloned().collect()
}

impl ReadCache {
    /// An empty cache that takes at most `bytes` of memory. If they do not suffice for one block, the cache is off.
    pub fn new(bytes: usize, kept: Kept) -> Self {
        let entries = bytes / (BLOCK_SIZE + OVERHEAD);
        let count = (entries / SHARD_ENTRIES_MIN).clamp(entries.min(1), SHARDS_USUAL);
        let count = (entries * BLOCK_UNITS).div_ceil(SHARD_UNITS_MAX).clamp(count, SHARDS_MAX);
        let shard = |_| {
            let changed = vec![0; SLOTS as usize].into_boxed_slice();
            Mutex::new(Shard { queue: Queue::new(entries / count * BLOCK_UNITS), changed })
        };
        let seen = if kept == Kept::PackedAgain { (entries * SEEN_PER_ENTRY).min(SEEN_MAX) } else { 0 };
        Self {
            shards: (0..count).map(shard).collect(),
            kept,
            seen: (0..seen).map(|_| AtomicU16::new(0)).collect(),
            holds_indexes: bytes >= INDEXES_MIN,
            changes: AtomicU64::new(0),
            resident: AtomicU64::new(0),
            lookups: Lookups::default(),
        }
    }

    /// Whether plain blocks are kept.
    pub fn holds_plain(&self) -> bool {
        self.kept == Kept::All && !self.shards.is_empty()
    }

    /// Whether indexes of packs are kept.
    pub fn holds_indexes(&self) -> bool {
        self.holds_indexes
    }

    /// The number of changes so far. Called under the metadata lock, by a read that is being planned.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Counters for `status` and tests.
    pub fn statistics(&self) -> ReadCacheStatistics {
        let (hits, misses) = self.lookups.counts();
        ReadCacheStatistics { resident: self.resident.load(Ordering::Relaxed), hits, misses }
    }

    fn shard(&self, block: u64) -> &Mutex<Shard> {
        &self.shards[(block / GROUP) as usize % self.shards.len()]
    }

    /// The class of a block within its shard. The groups of a shard are numbered one by one, because their distance is
    /// the number of shards, and a multiple of it would leave most classes unused.
    fn slot(&self, block: u64) -> usize {
        let group = block / GROUP / self.shards.len() as u64;
        ((group * GROUP + block % GROUP) % SLOTS) as usize
    }

    fn is_empty(&self) -> bool {
        self.resident.load(Ordering::Relaxed) == 0
    }

    /// The cached blocks of a pack that begins at `block`, by index. Called under the metadata lock.
    pub fn packed(&self, block: u64, indexes: Range<u64>) -> Vec<(u64, SharedSlice)> {
        let mut found = Vec::new();
        if !self.is_empty() {
            let places = Place::packed(block, indexes.start as usize)..Place::packed(block, indexes.end as usize);
            self.shard(block).lock().queue.read(places, |place, value| {
                let Value::Block(content) = value else { return false };
                found.push((u64::from(place.index), content.clone()));
                true
            });
        }
        found
    }

    /// The index of the pack that begins at `block`, if it is cached. Called under the metadata lock.
    pub fn index(&self, block: u64) -> Option<Arc<Index>> {
        let mut found = None;
        if !self.is_empty() {
            let places = Place { block, index: INDEX }..Place { block, index: PLAIN };
            self.shard(block).lock().queue.read(places, |_, value| {
                let Value::Index(index) = value else { return false };
                found = Some(Arc::clone(index));
                true
            });
        }
        found
    }

    /// The cached plain blocks of a run. Called under the metadata lock.
    pub fn plain(&self, run: Run) -> Vec<(u64, SharedSlice)> {
        let mut found = Vec::new();
        if self.kept == Kept::All && !self.is_empty() {
            for part in groups(run) {
                let places = Place::packed(part.start, 0)..Place::packed(part.end, 0);
                self.shard(part.start).lock().queue.read(places, |place, value| match value {
                    Value::Block(content) if place.index == PLAIN => {
                        found.push((place.block, content.clone()));
                        true
                    }
                    _ => false,
                });
            }
        }
        found
    }

    /// Keeps the content of blocks that a read has verified, unless a place was forgotten since the read was planned,
    /// after `planned` changes.
    pub fn keep<'a>(&self, blocks: impl Iterator<Item = (Place, &'a [u8])>, planned: u64) {
        if self.shards.is_empty() {
            return;
        }
        for (place, content) in blocks {
            if !self.is_kept(place) {
                continue;
            }
            // The memory is copied, allocated and freed outside of the lock.
            self.insert(place, Value::Block(SharedSlice::copy_of(content)), BLOCK_UNITS, planned);
        }
    }

    /// Whether content is kept now. Places that are not distinguished are kept a little earlier or later.
    fn is_kept(&self, place: Place) -> bool {
        if self.seen.is_empty() {
            return true;
        }
        // Fibonacci hashing: the upper bits of the product depend on all bits of the place.
        let hash = (place.block << 8 | u64::from(place.index)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let fingerprint = (hash >> 16) as u16 | 1;
        let seen = &self.seen[(hash >> 32) as usize % self.seen.len()];
        seen.load(Ordering::Relaxed) == fingerprint || {
            seen.store(fingerprint, Ordering::Relaxed);
            false
        }
    }

    /// Keeps the index of the pack that begins at `block`. Called by a read that has verified it, while its plan holds
    /// the place, or under the metadata lock when the map gets the pack.
    pub fn keep_index(&self, block: u64, index: Arc<Index>) {
        if self.holds_indexes {
            let units = (index.memory() + OVERHEAD).div_ceil(UNIT);
            self.insert(Place { block, index: INDEX }, Value::Index(index), units, u64::MAX);
        }
    }

    fn insert(&self, place: Place, value: Value, units: usize, planned: u64) {
        let (bytes, mut dropped) = (value.bytes(), Vec::new());
        let mut shard = self.shard(place.block).lock();
        if shard.changed[self.slot(place.block)] <= planned {
            shard.queue.insert(place, value, units, &mut dropped);
            self.count(bytes, &dropped);
        }
    }

    /// Counts what was added to the cache, and what has left it.
    fn count(&self, added: usize, dropped: &[Value]) {
        let removed: usize = dropped.iter().map(Value::bytes).sum();
        self.resident.fetch_add((added as u64).wrapping_sub(removed as u64), Ordering::Relaxed);
    }

    /// Removes what is stored in a run of blocks. Called under the metadata lock, when the blocks get other content.
    pub fn forget(&self, run: Run) {
        if self.shards.is_empty() {
            return;
        }
        let change = self.changes.fetch_add(1, Ordering::Relaxed) + 1;
        for part in groups(run) {
            let mut dropped = Vec::new();
            let mut shard = self.shard(part.start).lock();
            for block in part.clone() {
                shard.changed[self.slot(block)] = change;
            }
            shard.queue.remove(Place::packed(part.start, 0)..Place::packed(part.end, 0), &mut dropped);
            self.count(0, &dropped);
        }
    }

    /// Like [`ReadCache::forget`], for blocks that are not in packs.
    pub fn forget_plain(&self, run: Run) {
        if self.kept == Kept::All {
            self.forget(run);
        }
    }
}

#[cfg(test)]
mod tests;
