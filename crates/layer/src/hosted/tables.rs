//! Grain tables in memory: a bounded cache of committed tables, and the tables changed since the last commit.
//!
//! 1. A table is in memory once: readers and writers share its entries.
//! 2. A changed table stays in memory until a commit has written it: first in `changed`, then in `writing`; after that
//!    it may be evicted. So a table read from the file is never older than the last commit.
//! 3. Tables are loaded one at a time (`loading`): between a miss and the insertion no other thread can have loaded,
//!    changed, committed and evicted the same table. A change of a table that is not in memory loads the table under
//!    the same lock: a version that a caller got before the eviction may be out of date.
//! 4. A table with entries that neither copy proves is read as far as possible, and never changed.

use super::directory::{Directories, ENTRY_ABSENT, ENTRY_BAD, Places, Warnings};
use crate::cache::ClockCache;
use crate::{Error, ErrorKind, Result, SECTOR};
use backend::File;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Memory for unchanged grain tables per image: with the usual grains, the tables of 128 GiB.
const CACHE_BYTES: usize = 8 << 20;

/// Entries in a sector of a table.
const ENTRIES_PER_SECTOR: usize = SECTOR as usize / 4;

/// A grain table.
pub(crate) struct Table {
    entries: Box<[AtomicU32]>,
    places: Places,
    damaged: bool,
    /// A bit for each sector changed since the last commit.
    changed: AtomicU32,
    /// Bit 1: no directory on the device names the table yet.
    fresh: AtomicU32,
}

impl Table {
    fn new(entries: Vec<u32>, places: Places, damaged: bool) -> Self {
        let entries = entries.into_iter().map(AtomicU32::new).collect();
        Self { entries, places, damaged, changed: AtomicU32::new(0), fresh: AtomicU32::new(0) }
    }

    /// Entry `at` of the table.
    pub(crate) fn entry(&self, at: usize) -> u32 {
        self.entries.get(at).map_or(ENTRY_BAD, |entry| entry.load(Ordering::Acquire))
    }

    /// Number of entries of the table.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The sectors of the table's copies.
    pub(super) fn places(&self) -> Places {
        self.places
    }
}

/// The tables that a commit writes.
#[derive(Default)]
pub(super) struct Batch {
    /// Changed sectors of tables that the directories name already.
    pub(super) sectors: Vec<(u64, [u8; SECTOR as usize])>,
    /// New tables: index, sectors of the copies, and all content.
    pub(super) fresh: Vec<(usize, Places, Vec<u8>)>,
}

impl Batch {
    /// True when there is nothing to write.
    pub(super) fn is_empty(&self) -> bool {
        self.sectors.is_empty() && self.fresh.is_empty()
    }
}

struct TablesState {
    cache: ClockCache<usize, Arc<Table>>,
    changed: FxHashMap<usize, Arc<Table>>,
    writing: FxHashMap<usize, Arc<Table>>,
}

impl TablesState {
    fn get(&self, index: usize) -> Option<&Arc<Table>> {
        self.changed.get(&index).or_else(|| self.writing.get(&index)).or_else(|| self.cache.get(index))
    }
}

/// The grain tables of one file.
pub(crate) struct Tables {
    image: String,
    directories: RwLock<Directories>,
    state: RwLock<TablesState>,
    loading: Mutex<()>,
    table_entries: usize,
}

impl Tables {
    pub(crate) fn new(image: &str, directories: Directories, table_entries: u32) -> Self {
        let table_entries = table_entries as usize;
        let state = TablesState {
            cache: ClockCache::new(CACHE_BYTES / (table_entries * 4)),
            changed: FxHashMap::default(),
            writing: FxHashMap::default(),
        };
        Self {
            image: image.to_owned(),
            directories: RwLock::new(directories),
            state: RwLock::new(state),
            loading: Mutex::new(()),
            table_entries,
        }
    }

    /// Number of tables changed since the last commit.
    pub(super) fn changed(&self) -> usize {
        self.state.read().changed.len()
    }

    /// A copy of the directories.
    pub(crate) fn directories(&self) -> Directories {
        self.directories.read().clone()
    }

    /// Table `index`; `None` if the table does not exist, so that all its grains are absent.
    pub(crate) fn get(&self, file: &dyn File, index: usize, warnings: &Warnings) -> Result<Option<Arc<Table>>> {
        if let Some(table) = self.state.read().get(index) {
            return Ok(Some(Arc::clone(table)));
        }
        if self.directories.read().named(index) == [0, 0] {
            return Ok(None);
        }
        self.load(&self.loading.lock(), file, index, warnings)
    }

    /// Table `index` from memory, or else from the file.
    fn load(
        &self,
        _loading: &MutexGuard<'_, ()>,
        file: &dyn File,
        index: usize,
        warnings: &Warnings,
    ) -> Result<Option<Arc<Table>>> {
        if let Some(table) = self.state.read().get(index) {
            return Ok(Some(Arc::clone(table)));
        }
        let read = self.directories.read().read_table(file, index, &self.image, warnings)?;
        let Some(read) = read else { return Ok(None) };
        let table = Arc::new(Table::new(read.entries, read.places, !read.doubts.is_empty()));
        if read.differ {
            // One copy on the device is damaged, so the next commit of the table rewrites both copies completely.
            table.changed.store(u32::MAX, Ordering::Relaxed);
        }
        let mut state = self.state.write();
        // A repair may have replaced the table since it was read.
        if let Some(newer) = state.get(index) {
            return Ok(Some(Arc::clone(newer)));
        }
        state.cache.insert(index, Arc::clone(&table));
        Ok(Some(table))
    }

    /// As [`Tables::get`] for a scan of all tables: tables that are not in memory are read and not cached.
    pub(crate) fn peek(
        &self,
        file: &dyn File,
        directories: &Directories,
        index: usize,
        warnings: &Warnings,
    ) -> Result<Option<Arc<Table>>> {
        if let Some(table) = self.state.read().get(index) {
            return Ok(Some(Arc::clone(table)));
        }
        let read = directories.read_table(file, index, &self.image, warnings)?;
        Ok(read.map(|read| Arc::new(Table::new(read.entries, read.places, !read.doubts.is_empty()))))
    }

    /// Adds a new, empty table at `places`. Returns false if another thread has added the table meanwhile.
    pub(super) fn add(&self, index: usize, places: Places) -> bool {
        let mut state = self.state.write();
        // A table that another thread has added is in memory, unless it was committed and evicted since.
        if state.get(index).is_some() || self.directories.read().named(index) != [0, 0] {
            return false;
        }
        let table = Table::new(vec![ENTRY_ABSENT; self.table_entries], places, false);
        table.changed.store(u32::MAX, Ordering::Relaxed);
        table.fresh.store(1, Ordering::Relaxed);
        state.changed.insert(index, Arc::new(table));
        true
    }

    /// Table `index`, if its version in memory may be newer than the file.
    pub(super) fn unwritten(&self, index: usize) -> Option<Arc<Table>> {
        let state = self.state.read();
        state.changed.get(&index).or_else(|| state.writing.get(&index)).map(Arc::clone)
    }

    /// Called when the effects of a crash are repaired: from now on differing copies count as damage.
    pub(super) fn judge_strictly(&self, force: bool) {
        self.directories.write().judge_strictly(force);
    }

    /// Replaces a table in memory by the version that a repair has written. The caller prevents other changes of the
    /// table.
    pub(super) fn replace(&self, index: usize, entries: Vec<u32>, places: Places, damaged: bool) {
        self.state.write().cache.insert(index, Arc::new(Table::new(entries, places, damaged)));
    }

    /// Refuses to change a table with entries in doubt.
    pub(super) fn check_changeable(&self, index: usize, table: &Table) -> Result<()> {
        if !table.damaged {
            return Ok(());
        }
        let what = format!(
            "{}: grain table {index} is damaged, and its two copies do not prove the right entries",
            self.image
        );
        let advice =
            "check the image with --repair; a table in doubt cannot be changed: copy the other data to a new image";
        Err(Error::new(ErrorKind::Corrupt, format!("{what}; {advice}")))
    }

    /// Whether the directory has copy `copy`.
    pub(super) fn has_copy(&self, copy: usize) -> bool {
        self.directories.read().has(copy)
    }

    /// Sets consecutive entries of table `index`, which exists, from entry `first` on; calls `replaced` with the old
    /// value of each entry that changed.
    pub(super) fn set(
        &self,
        file: &dyn File,
        index: usize,
        warnings: &Warnings,
        first: usize,
        values: impl Iterator<Item = u32>,
        mut replaced: impl FnMut(u32),
    ) -> Result<()> {
        let mut state = self.state.write();
        let found = state.get(index).map(Arc::clone);
        let table = match found {
            Some(table) => table,
            None => {
                drop(state);
                let loading = self.loading.lock();
                let table = self.load(&loading, file, index, warnings)?.ok_or_else(|| {
                    let what = format!("{}: grain table {index} is missing", self.image);
                    Error::new(ErrorKind::Corrupt, what)
                })?;
                // `loading` stays locked until `state` is locked. So if the table is evicted meanwhile, no other thread
                // can load it a second time and change the second version.
                state = self.state.write();
                table
            }
        };
        self.check_changeable(index, &table)?;
        let mut sectors = 0;
        for (at, value) in (first..).zip(values) {
            let Some(entry) = table.entries.get(at) else { break };
            let old = entry.swap(value, Ordering::AcqRel);
            if old != value {
                replaced(old);
                sectors |= 1 << (at / ENTRIES_PER_SECTOR);
            }
        }
        if sectors == 0 {
            return Ok(());
        }
        table.changed.fetch_or(sectors, Ordering::Relaxed);
        state.changed.insert(index, table);
        Ok(())
    }

    /// Begins a commit of all changes so far. [`Tables::written`] ends it; commits do not overlap.
    pub(super) fn take_changes(&self) -> Batch {
        let mut state = self.state.write();
        let changed = std::mem::take(&mut state.changed);
        let mut batch = Batch::default();
        for (&index, table) in &changed {
            let mask = table.changed.swap(0, Ordering::Relaxed);
            let mut bytes: Vec<u8> =
                table.entries.iter().flat_map(|entry| entry.load(Ordering::Acquire).to_le_bytes()).collect();
            bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
            if table.fresh.swap(0, Ordering::Relaxed) == 1 {
                batch.fresh.push((index, table.places, bytes));
                continue;
            }
            for (number, sector) in bytes.chunks_exact(SECTOR as usize).enumerate() {
                if mask & (1 << number) == 0 {
                    continue;
                }
                let mut content = [0; SECTOR as usize];
                content.copy_from_slice(sector);
                let places = table.places.into_iter().filter(|place| *place != 0);
                batch.sectors.extend(places.map(|place| (u64::from(place) + number as u64, content)));
            }
        }
        state.writing = changed;
        batch
    }

    /// Sets the locations of tables in the directories; returns copy, directory sector, and content of each sector to
    /// write.
    pub(super) fn enter_places(&self, tables: impl Iterator<Item = (usize, Places)>) -> Vec<(usize, u64, Vec<u8>)> {
        let mut directories = self.directories.write();
        let mut sectors: Vec<(usize, usize)> = Vec::new();
        for (index, places) in tables {
            directories.set(index, places);
            let copies = [0, 1].into_iter().filter(|copy| directories.has(*copy));
            sectors.extend(copies.map(|copy| (copy, index / ENTRIES_PER_SECTOR * ENTRIES_PER_SECTOR)));
        }
        sectors.sort_unstable();
        sectors.dedup();
        let content = |(copy, index)| {
            let (sector, bytes) = directories.sector_of(copy, index);
            (copy, sector, bytes)
        };
        sectors.into_iter().map(content).collect()
    }

    /// Ends a commit: the written tables may be evicted.
    pub(super) fn written(&self) {
        let mut state = self.state.write();
        for (index, table) in std::mem::take(&mut state.writing) {
            state.cache.insert(index, table);
        }
    }
}

#[cfg(test)]
mod tests;
