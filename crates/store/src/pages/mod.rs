//! Metadata pages: 4 KiB each, in a few files, cached in a limited amount of memory.
//!
//! What must hold:
//!
//! 1. A page to which the last checkpoint refers is overwritten in its file only while the next checkpoint has complete
//!    images of the pages that it writes. So between checkpoints the files have exactly the state of the last one, and
//!    a page may be changed in memory, freed and reused in any order. A page to which the last checkpoint does not
//!    refer (a map node at a place that was free at that checkpoint) may be written at any time.
//! 2. Every page that is read from a file is verified before a caller gets it: its checksum, its file kind and its
//!    number. A page of zeros was never written and counts as a page without entries, except in the map, where it is
//!    damage, and in the tables, if blocks that the page describes are in use ([`emptied`]).
//! 3. A dirty page stays in memory until a checkpoint has written it, because the file has an older page. While the
//!    checkpoint writes a captured page, it holds a reference on the page. The limit of the cache holds because a
//!    checkpoint is requested before dirty pages fill the cache.
//!
//! # Loading without the lock
//!
//! Every request needs the lock of the cache, so no thread reads from the medium under it. A lookup that *defers*
//! ([`Pages::defer`]) records the pages that are not in memory and fails. Its caller releases the lock, reads the
//! pages, inserts them and looks up again. Each read is registered ([`Pages::begin_load`]), so that no two threads read
//! the same page. All other ways to insert or invalidate a page cancel the registration: [`Pages::create`],
//! [`Pages::forget`], and a load under the lock. The page is inserted only if its registration is still valid
//! ([`Pages::end_load`]).
//!
//! Loading in this way inserts no outdated page. While a registration is valid, the page was at no time in `slots`.
//! Only pages in `slots` are changed and captured, and a captured page stays in `slots` until it is collected and its
//! checkpoint has written it, or until it is forgotten, which cancels the registration. So the place of the page is not
//! written between the registration and its end, and the page that was read is complete and current. (A captured page
//! that was forgotten belongs to a free node: no lookup reaches it until it is created again, which inserts it into
//! `slots`.)
//!
//! A thread that waits for a page holds a reference on it until it has looked the page up. Like the reference of a
//! checkpoint, this reference keeps the page in memory. So even with a very small cache, each attempt of a lookup finds
//! more of its pages than the attempt before.

mod capture;
mod emptied;
mod eviction;
mod home;
mod kept;
mod layout;
mod load;
mod mend;

pub use capture::{Captured, Capturing};
pub use emptied::emptied;
pub use home::write_home;
pub use kept::{Keeping, Kept, KeptPages};
pub use layout::{HEADER_SIZE, PageFile, PageKey, blank, has_no_entries, sealed, verify};
pub use load::{Load, patiently, read_home};
pub use mend::{ImageIndex, Mender, Proof, restore_bit, restore_bit_of};

use crate::{Error, Result};
use backend::{BLOCK_SIZE, Block, File};
use capture::Changes;
use eviction::{Queues, Uses};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;

struct Slot {
    page: Arc<Block>,
    uses: Uses,
    /// The number of the checkpoint that will write the page, or [`CLEAN`].
    dirty: u64,
    /// Whether the last checkpoint does not refer to the place of the page.
    unknown: bool,
}

/// The state of a page that no checkpoint has to write.
const CLEAN: u64 = 0;

/// The most freed nodes that are remembered between two checkpoints. If more are freed, every new node counts as one to
/// which the last checkpoint refers.
const RETIRED_MAX: usize = 1 << 16;

/// Counters of the cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageStatistics {
    /// Lookups answered from memory.
    pub hits: u64,
    /// Pages read from the medium.
    pub misses: u64,
    /// The part of `misses` that was read while the caller held the lock of the cache.
    pub locked: u64,
    /// Clean pages evicted.
    pub evictions: u64,
}

/// The page cache.
pub struct Pages {
    files: [Arc<dyn File>; PageFile::COUNT],
    slots: FxHashMap<PageKey, Slot>,
    queues: Queues,
    changes: Changes,
    /// The number of dirty pages to which the last checkpoint does not refer.
    dirty_unknown: usize,
    /// Nodes freed since the last capture to which the last checkpoint refers: a page created at their place needs an
    /// image.
    retired: FxHashSet<PageKey>,
    limit: usize,
    statistics: PageStatistics,
    /// True while lookups record the pages that they miss in `absent`, and fail.
    deferring: bool,
    absent: Vec<PageKey>,
    /// While `deferring`: pages that are lost. A lookup that misses such a page fails with the error of its read.
    lost: FxHashMap<PageKey, Error>,
    /// Pages being read without the lock.
    loading: FxHashMap<PageKey, Arc<Load>>,
    /// Number of hits at the last miss.
    hits_at_miss: u64,
    /// Grows whenever damaged pages were replaced.
    replaced: u64,
    /// For a reader of an older state: the copies of pages that checkpoints have overwritten since then.
    kept: Option<Arc<KeptPages>>,
    /// Restores damaged pages, during a repair and for a salvage.
    mender: Option<Arc<Mender>>,
    /// See [`emptied`].
    emptied: FxHashSet<PageKey>,
}

impl Pages {
    /// A cache of at most `limit` bytes over `files`, in the order of [`PageFile`].
    pub fn new(files: [Arc<dyn File>; PageFile::COUNT], limit: usize) -> Self {
        let limit = (limit / BLOCK_SIZE).max(64);
        Self {
            files,
            slots: FxHashMap::default(),
            queues: Queues::new(limit),
            changes: Changes::default(),
            dirty_unknown: 0,
            retired: FxHashSet::default(),
            limit,
            statistics: PageStatistics::default(),
            deferring: false,
            absent: Vec::new(),
            lost: FxHashMap::default(),
            loading: FxHashMap::default(),
            hits_at_miss: 0,
            replaced: 0,
            kept: None,
            mender: None,
            emptied: FxHashSet::default(),
        }
    }

    /// A cache of the pages as they were when `kept` began, for reading only.
    pub fn as_kept(files: [Arc<dyn File>; PageFile::COUNT], limit: usize, kept: Arc<KeptPages>) -> Self {
        Self { kept: Some(kept), ..Self::new(files, limit) }
    }

    /// Sets the mender that restores damaged pages, or removes it.
    pub fn set_mender(&mut self, mender: Option<Arc<Mender>>) {
        // The pages that the earlier mender has restored are not counted one by one.
        self.replaced += 1;
        self.mender = mender;
    }

    /// The mender of damaged pages.
    pub fn mender(&self) -> Option<&Arc<Mender>> {
        self.mender.as_ref()
    }

    /// The file with the pages of a kind.
    pub fn file(&self, file: PageFile) -> &Arc<dyn File> {
        &self.files[file as usize]
    }

    /// Counters of the cache.
    pub fn statistics(&self) -> PageStatistics {
        self.statistics
    }

    /// Number of pages in memory.
    pub fn cached(&self) -> usize {
        self.slots.len()
    }

    /// Number of pages that the next checkpoint has to write.
    pub fn dirty(&self) -> usize {
        self.changes.dirty.len()
    }

    /// Number of pages of a file that the next checkpoint has to write.
    pub fn dirty_in(&self, file: PageFile) -> u64 {
        self.changes.dirty.iter().filter(|key| key.file() == file).count() as u64
    }

    /// The number of dirty pages that need an image.
    pub fn dirty_known(&self) -> usize {
        self.changes.dirty.len() - self.dirty_unknown
    }

    /// The page. It is read from its file if necessary, unless the cache defers. Each request gets several pages, and
    /// without the attribute the compiler calls a function for each.
    #[inline(always)]
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

    /// The page, to be changed. It becomes dirty.
    #[inline]
    pub fn get_mut(&mut self, key: PageKey) -> Result<&mut Block> {
        if !self.slots.contains_key(&key) {
            self.miss(key)?;
        }
        let slot = self.slots.get_mut(&key).expect("loaded above");
        self.queues.note(&mut slot.uses);
        self.changes.mark(key, slot);
        Ok(Arc::make_mut(&mut slot.page))
    }

    /// A new page for a free node. It has no entries, whatever its file holds.
    pub fn create(&mut self, key: PageKey) -> Result<&mut Block> {
        self.collect_early(key);
        self.make_room();
        let unknown = self.retired.len() < RETIRED_MAX && !self.retired.contains(&key);
        let uses = self.queues.enter(key);
        self.loading.remove(&key);
        self.slots.insert(key, Slot { page: Arc::new(blank(key)), uses, dirty: self.changes.next, unknown });
        self.changes.dirty.insert(key);
        self.dirty_unknown += usize::from(unknown);
        self.get_mut(key)
    }

    /// A page without entries, in place of a damaged page to which the last checkpoint refers.
    pub fn replace(&mut self, key: PageKey) -> &mut Block {
        self.collect_early(key);
        self.make_room();
        self.replaced += 1;
        self.emptied.remove(&key);
        self.loading.remove(&key);
        let uses = self.queues.enter(key);
        self.changes.dirty.insert(key);
        self.slots.insert(key, Slot { page: Arc::new(blank(key)), uses, dirty: self.changes.next, unknown: false });
        Arc::make_mut(&mut self.slots.get_mut(&key).expect("inserted above").page)
    }

    /// A number that grows whenever damaged pages were replaced or restored: meanwhile lost pages stay lost.
    pub fn replaced(&self) -> u64 {
        self.replaced
    }

    /// Has the next checkpoint write a page from memory, because the page in the file is damaged. False if the page is
    /// not in memory.
    pub fn write_again(&mut self, key: PageKey) -> bool {
        let Some(slot) = self.slots.get_mut(&key) else { return false };
        self.changes.mark(key, slot);
        true
    }

    /// Inserts the restored content of a damaged page that is not in memory. The next checkpoint writes it.
    pub fn restore(&mut self, key: PageKey, mut page: Block) {
        if key.file() == PageFile::DataTable {
            crate::space::forget_holds(&mut page);
        }
        *self.replace(key) = page;
    }

    /// Whether no checkpoint has written a page yet, so that the bytes at its place in the file have no meaning.
    pub fn is_new(&self, key: PageKey) -> bool {
        self.slots.get(&key).is_some_and(|slot| slot.unknown)
    }

    /// Whether a page was never written to its file and is not dirty.
    pub fn is_unwritten(&self, key: PageKey) -> bool {
        !self.changes.dirty.contains(&key) && self.is_zero_in_file(key)
    }

    /// Whether the file has zeros in the place of a page. False if the bytes at this place cannot be read, because
    /// unreadable bytes are no page of zeros.
    fn is_zero_in_file(&self, key: PageKey) -> bool {
        self.read_raw(key).is_some_and(|page| page.0 == [0; BLOCK_SIZE])
    }

    /// The bytes in the file of a page, unverified. `None` if they cannot be read.
    pub fn read_raw(&self, key: PageKey) -> Option<Block> {
        let mut page = Block([0; BLOCK_SIZE]);
        self.file(key.file()).read_at(&mut page.0, key.offset()).is_ok().then_some(page)
    }

    /// Removes the page of a freed node from memory: it need not be written.
    pub fn forget(&mut self, key: PageKey) {
        self.collect_early(key);
        self.loading.remove(&key);
        let unknown = self.slots.remove(&key).is_some_and(|slot| slot.unknown);
        if self.changes.dirty.remove(&key) && unknown {
            self.dirty_unknown -= 1;
        }
        if !unknown && self.retired.len() < RETIRED_MAX {
            self.retired.insert(key);
        }
    }

    /// Reads a page from its file, without the cache, and verifies it.
    pub fn read_home(&self, key: PageKey) -> Result<Block> {
        let page = self.read_verified(key)?;
        self.refuse_emptied(key, &page)?;
        Ok(page)
    }

    fn read_verified(&self, key: PageKey) -> Result<Block> {
        if let Some(kept) = &self.kept {
            return load::verified(kept.read(&**self.file(key.file()), key)?, key);
        }
        let read = load::read_one(&**self.file(key.file()), key);
        let Some(mender) = &self.mender else { return read };
        // If the last checkpoint has an image of the page, the page was written: if its place in the file reads as
        // zeros, the page is lost.
        let lost = read.is_err() || mender.has_image(key) && self.is_zero_in_file(key);
        match lost.then(|| mender.restore(key, self.read_raw(key).as_ref())).flatten() {
            Some(page) => load::verified(page, key),
            None => read,
        }
    }

    /// Removes every clean page from memory, so that a check reads the medium.
    pub fn drop_clean(&mut self) {
        self.slots.retain(|_, slot| slot.dirty != CLEAN);
        self.queues.restart(self.slots.keys().copied());
    }
}

#[cfg(test)]
mod tests;
