//! Metadata pages: 4 KiB each, in a few files, cached in a limited amount of memory.
//!
//! What must hold:
//!
//! 1. A page that the last checkpoint refers to changes in its file only while the next one writes pages of which it
//!    has complete images. Between checkpoints the files hold exactly the state of the last one, as far as that refers
//!    to them. So a page may be changed in memory, freed and reused at any time without any ordering. A page that the
//!    last checkpoint does not refer to, a node of the map in a place that was free then, may be written at any time.
//! 2. Every page read from a file passes its checksum and names itself (file kind and number) before a caller gets it.
//!    A page of zeros was never written and reads as blank, except in the map, where it is corruption.
//! 3. A dirty page stays in memory until a checkpoint has written it to its place: a read of the file before that
//!    returns an older page. A reference on the captured page shows that the checkpoint still writes it. The limit of
//!    the cache holds because a checkpoint is requested before dirty pages fill it.
//!
//! # Loading without the lock
//!
//! Every request needs the lock of the cache, so no thread waits for the medium under it. A look-up that *defers*
//! ([`Pages::defer`]) notes the pages that are not in memory and fails; its caller releases the lock, reads the pages,
//! inserts them and looks again. Reads under way are registered ([`Pages::begin_load`]), so that no two threads read
//! the same page. Every other way in which a page enters memory or becomes invalid cancels the registration:
//! [`Pages::create`], [`Pages::forget`] and a load under the lock. The read page is inserted only while its
//! registration is valid ([`Pages::end_load`]).
//!
//! This admits no stale page. While a registration is valid, the page was at no time in `slots`. Only pages in `slots`
//! are changed and captured, and a captured page stays in `slots` until the checkpoint that holds it has written it, or
//! until it is forgotten, which cancels. So nothing is written to the place of the page between the registration and
//! its end: the read page is complete and current. (A page that was captured and then forgotten is free; nothing that a
//! look-up meets names it until it is created again, which puts it into `slots`.)
//!
//! A thread that waits for a page holds a reference on it, which keeps it in memory, as that of a checkpoint does,
//! until the thread has looked again: even in a very small cache each look gets further than the one before.

mod eviction;
mod home;
mod kept;
mod layout;
mod load;
mod mend;

pub use home::write_home;
pub use kept::{Keeping, Kept};
pub use layout::{HEADER_SIZE, PageFile, PageKey, blank, sealed, verify};
pub use load::{Load, read_home};
pub use mend::{ImageIndex, Mender, Proof, restore_bit, restore_bit_of};

use crate::Result;
use backend::{BLOCK_SIZE, Block, File};
use eviction::{Queues, Uses};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;

struct Slot {
    page: Arc<Block>,
    uses: Uses,
    dirty: bool,
    /// The last checkpoint does not refer to its place.
    unknown: bool,
}

/// Dirty pages as of the moment of a checkpoint, in file order.
#[derive(Default)]
pub struct Captured {
    /// Those that the last checkpoint refers to: they need images before they are written to their places.
    pub known: Vec<(PageKey, Arc<Block>)>,
    /// The others: to be written to their places before the checkpoint ends.
    pub unknown: Vec<(PageKey, Arc<Block>)>,
}

impl Captured {
    /// All of them, in file order: for tests without crashes in between.
    pub fn all(&self) -> Vec<(PageKey, Arc<Block>)> {
        let mut all = [self.known.as_slice(), self.unknown.as_slice()].concat();
        all.sort_unstable_by_key(|(key, _)| *key);
        all
    }
}

/// Freed nodes remembered between two checkpoints. Beyond this every new node counts as one that the last checkpoint
/// refers to.
const RETIRED_MAX: usize = 1 << 16;

/// Counters of the cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageStatistics {
    /// Look-ups answered from memory.
    pub hits: u64,
    /// Pages read from the medium.
    pub misses: u64,
    /// Of these, pages read while the caller held the lock of the cache.
    pub locked: u64,
    /// Clean pages evicted.
    pub evictions: u64,
}

/// The page cache.
pub struct Pages {
    files: [Arc<dyn File>; PageFile::COUNT],
    slots: FxHashMap<PageKey, Slot>,
    queues: Queues,
    dirty: FxHashSet<PageKey>,
    /// Of these, pages that the last checkpoint does not refer to.
    dirty_unknown: usize,
    /// Nodes freed since the last capture to which the checkpoint before it refers.
    retired: FxHashSet<PageKey>,
    limit: usize,
    statistics: PageStatistics,
    /// Look-ups note the pages that they miss in `absent`, and fail.
    deferring: bool,
    absent: Vec<PageKey>,
    /// Pages being read without the lock.
    loading: FxHashMap<PageKey, Arc<Load>>,
    /// Number of hits at the last miss.
    hits_at_miss: u64,
    /// For a reader of an older state: pages that were overwritten since.
    kept: Option<Arc<Kept>>,
    /// Restores damaged pages, during a repair and for a salvage.
    mender: Option<Arc<Mender>>,
}

impl Pages {
    /// A cache of at most `limit` bytes over `files`, in the order of [`PageFile`].
    pub fn new(files: [Arc<dyn File>; PageFile::COUNT], limit: usize) -> Self {
        let limit = (limit / BLOCK_SIZE).max(64);
        Self {
            files,
            slots: FxHashMap::default(),
            queues: Queues::new(limit),
            dirty: FxHashSet::default(),
            dirty_unknown: 0,
            retired: FxHashSet::default(),
            limit,
            statistics: PageStatistics::default(),
            deferring: false,
            absent: Vec::new(),
            loading: FxHashMap::default(),
            hits_at_miss: 0,
            kept: None,
            mender: None,
        }
    }

    /// The pages as of the moment when `kept` began, for reading only.
    pub fn as_kept(files: [Arc<dyn File>; PageFile::COUNT], limit: usize, kept: Arc<Kept>) -> Self {
        Self { kept: Some(kept), ..Self::new(files, limit) }
    }

    /// From now on damaged pages are restored if they can be proven; with `None`, no longer.
    pub fn set_mender(&mut self, mender: Option<Arc<Mender>>) {
        self.mender = mender;
    }

    /// The mender of damaged pages.
    pub fn mender(&self) -> Option<&Arc<Mender>> {
        self.mender.as_ref()
    }

    /// The file behind a kind of page.
    pub fn file(&self, file: PageFile) -> &Arc<dyn File> {
        &self.files[file as usize]
    }

    /// Counters.
    pub fn statistics(&self) -> PageStatistics {
        self.statistics
    }

    /// Pages in memory.
    pub fn cached(&self) -> usize {
        self.slots.len()
    }

    /// Pages that the next checkpoint has to write.
    pub fn dirty(&self) -> usize {
        self.dirty.len()
    }

    /// Of these, pages that need an image first.
    pub fn dirty_known(&self) -> usize {
        self.dirty.len() - self.dirty_unknown
    }

    /// The page, read from its file if necessary, unless the cache defers.
    #[inline]
    pub fn get(&mut self, key: PageKey) -> Result<&Block> {
        if !self.slots.contains_key(&key) {
            self.miss(key)?;
        } else {
            self.statistics.hits += 1;
        }
        let slot = self.slots.get_mut(&key).expect("loaded above");
        self.queues.note(&mut slot.uses);
        Ok(&slot.page)
    }

    /// The page for changing; it is dirty from now on.
    #[inline]
    pub fn get_mut(&mut self, key: PageKey) -> Result<&mut Block> {
        if !self.slots.contains_key(&key) {
            self.miss(key)?;
        }
        let slot = self.slots.get_mut(&key).expect("loaded above");
        self.queues.note(&mut slot.uses);
        if !slot.dirty {
            slot.dirty = true;
            self.dirty.insert(key);
        }
        Ok(Arc::make_mut(&mut slot.page))
    }

    /// The page of a node in a free place; it starts blank whatever its file holds.
    pub fn create(&mut self, key: PageKey) -> Result<&mut Block> {
        self.make_room();
        let unknown = self.retired.len() < RETIRED_MAX && !self.retired.contains(&key);
        let uses = self.queues.enter(key);
        self.loading.remove(&key);
        self.slots.insert(key, Slot { page: Arc::new(blank(key)), uses, dirty: true, unknown });
        self.dirty.insert(key);
        self.dirty_unknown += usize::from(unknown);
        self.get_mut(key)
    }

    /// A blank page in the place of a damaged one to which the last checkpoint refers.
    pub fn replace(&mut self, key: PageKey) -> &mut Block {
        self.make_room();
        self.loading.remove(&key);
        let uses = self.queues.enter(key);
        self.dirty.insert(key);
        self.slots.insert(key, Slot { page: Arc::new(blank(key)), uses, dirty: true, unknown: false });
        Arc::make_mut(&mut self.slots.get_mut(&key).expect("inserted above").page)
    }

    /// Whether nothing was ever written at the place of a page, and nothing will be.
    pub fn is_unwritten(&self, key: PageKey) -> bool {
        !self.dirty.contains(&key) && self.read_raw(key).0 == [0; BLOCK_SIZE]
    }

    /// The bytes at the place of a page, unchecked; zeros if they cannot be read.
    pub fn read_raw(&self, key: PageKey) -> Block {
        let mut page = Block([0; BLOCK_SIZE]);
        match self.file(key.file()).read_at(&mut page.0, key.offset()) {
            Ok(()) => page,
            Err(_) => Block([0; BLOCK_SIZE]),
        }
    }

    /// Drops the page of a free node: no look-up reads it again, so it need not be written.
    pub fn forget(&mut self, key: PageKey) {
        self.loading.remove(&key);
        let unknown = self.slots.remove(&key).is_some_and(|slot| slot.unknown);
        if self.dirty.remove(&key) && unknown {
            self.dirty_unknown -= 1;
        }
        if !unknown && self.retired.len() < RETIRED_MAX {
            self.retired.insert(key);
        }
    }

    /// Reads a page from its file, past the cache, and verifies it.
    pub fn read_home(&self, key: PageKey) -> Result<Block> {
        if let Some(kept) = &self.kept {
            return load::verified(kept.read(&**self.file(key.file()), key)?, key);
        }
        let read = load::read_one(&**self.file(key.file()), key);
        let Some(mender) = &self.mender else { return read };
        // If there is an image, a page of zeros was lost, not never written.
        let lost = read.is_err() || mender.has_image(key) && self.read_raw(key).0 == [0; BLOCK_SIZE];
        match lost.then(|| mender.restore(key, Some(&self.read_raw(key)))).flatten() {
            Some(page) => load::verified(page, key),
            None => read,
        }
    }

    /// Takes all dirty pages as they are now and marks them clean: later changes belong to the next checkpoint. The
    /// caller makes them durable, [`sealed`], before it releases the journal behind them. The checkpoint before this
    /// one has ended. All requests wait meanwhile, so checksums are computed later.
    pub fn capture(&mut self) -> Captured {
        let mut keys: Vec<PageKey> = self.dirty.drain().collect();
        keys.sort_unstable();
        self.dirty_unknown = 0;
        self.retired.clear();
        let mut captured = Captured::default();
        for key in keys {
            let slot = self.slots.get_mut(&key).expect("a dirty page is in memory");
            slot.dirty = false;
            let list = if std::mem::take(&mut slot.unknown) { &mut captured.unknown } else { &mut captured.known };
            list.push((key, Arc::clone(&slot.page)));
        }
        captured
    }

    /// Drops every clean page, so that a check reads the medium instead of memory.
    pub fn drop_clean(&mut self) {
        self.slots.retain(|_, slot| slot.dirty);
        self.queues.restart(self.slots.keys().copied());
    }
}

#[cfg(test)]
mod tests;
