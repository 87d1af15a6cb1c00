//! Tables in memory: a bounded cache of tables that can be read again, and all tables with unwritten changes.
//!
//! 1. A table that is changed or being written stays until its write has ended ([`RunCache::release`]). All others
//!    together use no more memory than the limit; CLOCK eviction selects them.
//! 2. A table is read from the file by one thread at a time, and inserted into the cache before it can be changed. So a
//!    table that is read again is never older than the version that was evicted.
//! 3. A captured table does not change any more: a table that is changed while it is written is copied first.
//!
//! Locks: `loading` of a shard, then its `tables`. No I/O is done while `tables` is held.

use super::RunList;
use crate::Result;
use parking_lot::{Mutex, RwLock};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Shards, so that threads rarely wait for each other. Consecutive tables are in different shards.
const SHARDS: usize = 16;

/// Memory of a table besides its runs: entry of the hash map, reference counts, entry in the CLOCK order.
const TABLE_OVERHEAD: usize = 112;

/// The most tables examined to evict one. The limit keeps an insertion short when many tables have to stay.
const CLOCK_STEPS_MAX: usize = 64;

/// A table at the time of its capture.
pub(crate) struct Captured {
    /// The table's index.
    pub(crate) index: u32,
    /// The content of the table.
    pub(crate) list: Arc<RunList>,
    /// The parts of the table that changed since its last capture, as a bit mask of the format.
    pub(crate) parts: u64,
}

struct Slot {
    list: Arc<RunList>,
    /// Parts changed since the last capture; 0 for none.
    changed: u64,
    writing: bool,
    used: AtomicBool,
}

#[derive(Default)]
struct Tables {
    by_index: FxHashMap<u32, Slot>,
    /// The CLOCK order: each table once.
    clock: VecDeque<u32>,
    /// Tables with changed parts.
    changed: Vec<u32>,
    bytes: usize,
}

#[derive(Default)]
struct Shard {
    loading: Mutex<()>,
    tables: RwLock<Tables>,
}

type Exclusive<'a> = parking_lot::RwLockWriteGuard<'a, Tables>;

/// The cache of the tables of one image.
pub(crate) struct RunCache {
    shards: Box<[Shard]>,
    shard_bytes_max: usize,
    changed: AtomicUsize,
}

impl RunCache {
    /// An empty cache with about `bytes_max` bytes for unchanged tables.
    pub(crate) fn new(bytes_max: usize) -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self { shards, shard_bytes_max: bytes_max / SHARDS, changed: AtomicUsize::new(0) }
    }

    fn shard(&self, index: u32) -> &Shard {
        &self.shards[index as usize % SHARDS]
    }

    /// The number of tables changed since their last capture.
    pub(crate) fn changed(&self) -> usize {
        self.changed.load(Ordering::Relaxed)
    }

    /// Bytes of memory in use.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.tables.read().bytes).sum()
    }

    /// Reads table `index`, which `load` reads from the file if it is not cached.
    pub(crate) fn read<R>(
        &self,
        index: u32,
        load: impl FnOnce() -> Result<RunList>,
        look: impl FnOnce(&RunList) -> R,
    ) -> Result<R> {
        let shard = self.shard(index);
        if let Some(slot) = shard.tables.read().by_index.get(&index) {
            return Ok(look(slot.touched()));
        }
        let _loading = shard.loading.lock();
        if let Some(slot) = shard.tables.read().by_index.get(&index) {
            return Ok(look(slot.touched()));
        }
        let list = load()?;
        let answer = look(&list);
        shard.tables.write().insert(index, list, self.shard_bytes_max);
        Ok(answer)
    }

    /// Table `index` if it is cached, without marking it as used.
    pub(crate) fn peek(&self, index: u32) -> Option<Arc<RunList>> {
        self.shard(index).tables.read().by_index.get(&index).map(|slot| Arc::clone(&slot.list))
    }

    /// As [`RunCache::peek`]; a table that is not cached is read by `load`, and is not cached afterwards. While `load`
    /// runs, the table is neither changed nor written.
    pub(crate) fn peek_or_load(&self, index: u32, load: impl FnOnce() -> Result<RunList>) -> Result<Arc<RunList>> {
        let _loading = self.shard(index).loading.lock();
        self.peek(index).map_or_else(|| load().map(Arc::new), Ok)
    }

    /// Changes table `index`, which `load` reads from the file if it is not cached. `change` returns the parts it
    /// changed; 0 for none.
    pub(crate) fn change<R>(
        &self,
        index: u32,
        load: impl FnOnce() -> Result<RunList>,
        change: impl FnOnce(&mut RunList) -> (R, u64),
    ) -> Result<R> {
        let shard = self.shard(index);
        let tables = shard.tables.write();
        if tables.by_index.contains_key(&index) {
            return Ok(self.apply(tables, index, change));
        }
        drop(tables);
        let _loading = shard.loading.lock();
        let mut tables = shard.tables.write();
        if !tables.by_index.contains_key(&index) {
            drop(tables);
            let list = load()?;
            tables = shard.tables.write();
            tables.insert(index, list, self.shard_bytes_max);
        }
        Ok(self.apply(tables, index, change))
    }

    /// Inserts a new table, with all its parts marked as changed.
    pub(crate) fn insert_new(&self, index: u32, list: RunList, parts: u64) {
        let mut tables = self.shard(index).tables.write();
        tables.insert(index, list, self.shard_bytes_max);
        self.apply(tables, index, |_| ((), parts));
    }

    /// Changes a cached table.
    fn apply<R>(&self, mut tables: Exclusive<'_>, index: u32, change: impl FnOnce(&mut RunList) -> (R, u64)) -> R {
        let tables = &mut *tables;
        let Some(slot) = tables.by_index.get_mut(&index) else { unreachable!("inserted under the same lock") };
        slot.touched();
        let before = slot.list.heap_bytes();
        let (answer, parts) = change(Arc::make_mut(&mut slot.list));
        let after = slot.list.heap_bytes();
        if parts != 0 && slot.changed == 0 {
            tables.changed.push(index);
            self.changed.fetch_add(1, Ordering::Relaxed);
        }
        slot.changed |= parts;
        tables.bytes = tables.bytes + after - before;
        answer
    }

    /// Captures all changed tables, to be written. They stay cached until [`RunCache::release`]. Only one capture may
    /// exist at a time.
    pub(crate) fn capture(&self) -> Vec<Captured> {
        let mut captured = Vec::with_capacity(self.changed());
        for shard in &self.shards {
            let mut tables = shard.tables.write();
            for index in std::mem::take(&mut tables.changed) {
                let Some(slot) = tables.by_index.get_mut(&index) else { continue };
                slot.writing = true;
                let parts = std::mem::take(&mut slot.changed);
                captured.push(Captured { index, list: Arc::clone(&slot.list), parts });
            }
        }
        self.changed.fetch_sub(captured.len(), Ordering::Relaxed);
        captured
    }

    /// Marks captured tables as changed again, because writing them failed.
    pub(crate) fn restore(&self, captured: &[Captured]) {
        for table in captured {
            let tables = self.shard(table.index).tables.write();
            self.apply(tables, table.index, |_| ((), table.parts));
        }
        self.release(captured);
    }

    /// Releases captured tables, which are durable.
    pub(crate) fn release(&self, captured: &[Captured]) {
        for table in captured {
            let mut tables = self.shard(table.index).tables.write();
            if let Some(slot) = tables.by_index.get_mut(&table.index) {
                slot.writing = false;
            }
            tables.evict(self.shard_bytes_max);
        }
    }
}

impl Slot {
    fn touched(&self) -> &RunList {
        // A plain load first: hot tables are shared between threads, and their cache line should stay shared.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        &self.list
    }
}

impl Tables {
    fn insert(&mut self, index: u32, list: RunList, bytes_max: usize) {
        self.evict(bytes_max);
        self.bytes += list.heap_bytes() + TABLE_OVERHEAD;
        let slot = Slot { list: Arc::new(list), changed: 0, writing: false, used: AtomicBool::new(false) };
        self.by_index.insert(index, slot);
        self.clock.push_back(index);
    }

    /// Evicts tables until memory is within the limit, or until all remaining tables must stay.
    fn evict(&mut self, bytes_max: usize) {
        let mut left = CLOCK_STEPS_MAX;
        while self.bytes > bytes_max && left > 0 {
            left -= 1;
            let Some(index) = self.clock.pop_front() else { return };
            let Some(slot) = self.by_index.get(&index) else { continue };
            if slot.changed != 0 || slot.writing || slot.used.swap(false, Ordering::Relaxed) {
                self.clock.push_back(index);
                continue;
            }
            self.bytes -= slot.list.heap_bytes() + TABLE_OVERHEAD;
            self.by_index.remove(&index);
        }
    }
}
