//! Loads pages into memory, with or without holding the lock of the cache. The [cache](super) states the invariants.

use super::{CLEAN, PageFile, PageKey, Pages, Slot, verify};
use crate::sync::{Condvar, Mutex};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Block, File};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::time::Duration;

/// After this many hits since the last miss, operations skip their surveys. At this rate of misses, all surveys
/// together take more time than the waits for rare misses under the lock.
const WARM_HITS: u64 = 1 << 16;
/// How often a failing read of the medium is tried before the bytes count as lost.
const READS_MAX: u32 = 3;
/// The pause before a failed read is tried again.
const READ_PAUSE: Duration = Duration::from_millis(50);

/// Repeats a failing read of the medium, for a caller that otherwise treats the bytes as lost. The medium may fail a
/// single read only.
pub fn patiently<T>(mut read: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..READS_MAX {
        match read() {
            Err(error) if error.kind() == ErrorKind::Io => crate::sync::thread::sleep(READ_PAUSE),
            other => return other,
        }
    }
    read()
}

/// A page that is being read without the lock.
#[derive(Default)]
pub struct Load {
    outcome: Mutex<Outcome>,
    ended: Condvar,
}

#[derive(Default)]
enum Outcome {
    #[default]
    UnderWay,
    /// The page, if it was read and inserted.
    Ended(Option<Arc<Block>>),
    Failed(Error),
}

impl Load {
    /// Waits for the end of the read. `None`: the caller has to look the page up again. Errors are returned only if the
    /// registration was valid at the end of the read.
    pub fn wait(&self) -> Result<Option<Arc<Block>>> {
        let mut outcome = self.outcome.lock();
        loop {
            match &*outcome {
                Outcome::UnderWay => self.ended.wait(&mut outcome),
                Outcome::Ended(page) => return Ok(page.clone()),
                Outcome::Failed(error) => return Err(error.repeated()),
            }
        }
    }

    fn end(&self, outcome: Outcome) {
        *self.outcome.lock() = outcome;
        self.ended.notify_all();
    }
}

/// Reads adjacent pages from their file and verifies them.
pub fn read_home(file: &dyn File, first: PageKey, count: usize) -> Vec<Result<Block>> {
    let mut pages = vec![Block([0; BLOCK_SIZE]); count];
    let whole = file.read_at(bytemuck::cast_slice_mut(&mut pages), first.offset()).is_ok();
    let mut out = Vec::with_capacity(count);
    for (number, page) in (first.number()..).zip(pages) {
        let key = PageKey::new(first.file(), number);
        // If a sector is unreadable, the pages are read one by one.
        out.push(if whole { verified(page, key) } else { read_one(file, key) });
    }
    out
}

/// Reads a page from its file and verifies it.
pub(super) fn read_one(file: &dyn File, key: PageKey) -> Result<Block> {
    let mut page = Block([0; BLOCK_SIZE]);
    file.read_at(&mut page.0, key.offset()).during(|| format!("reading {key} of the datastore's metadata"))?;
    verified(page, key)
}

/// Verifies a page that was read from its file, and makes it ready for use.
pub(super) fn verified(mut page: Block, key: PageKey) -> Result<Block> {
    verify(&mut page, key)?;
    if key.file() == PageFile::DataTable {
        crate::space::forget_holds(&mut page);
    }
    Ok(page)
}

impl Pages {
    /// From now until [`Pages::undefer`], a lookup that misses a page records the page and fails. A page in `lost` is
    /// not recorded: its lookup fails with the page's error.
    pub fn defer(&mut self, lost: FxHashMap<PageKey, Error>) {
        debug_assert!(self.absent.is_empty());
        self.deferring = true;
        self.lost = lost;
    }

    /// Ends [`Pages::defer`]: lookups read from the files again. Returns the missed pages that are not lost, in file
    /// order, and the lost pages that were given to [`Pages::defer`].
    pub fn undefer(&mut self) -> (Vec<PageKey>, FxHashMap<PageKey, Error>) {
        self.deferring = false;
        (self.take_absent(), std::mem::take(&mut self.lost))
    }

    /// True between [`Pages::defer`] and [`Pages::undefer`].
    pub fn is_deferring(&self) -> bool {
        self.deferring
    }

    /// The pages missed since the last call, in file order.
    pub fn take_absent(&mut self) -> Vec<PageKey> {
        let mut absent = std::mem::take(&mut self.absent);
        absent.sort_unstable();
        absent.dedup();
        absent
    }

    /// Number of missed pages.
    pub fn absent(&self) -> usize {
        self.absent.len()
    }

    /// The page if it is in memory. Otherwise it is recorded as missed.
    pub fn peek(&mut self, key: PageKey) -> Option<&Block> {
        match self.slots.get_mut(&key) {
            Some(slot) => {
                self.queues.note(&mut slot.uses);
                Some(&slot.page)
            }
            None => {
                if !self.lost.contains_key(&key) {
                    self.absent.push(key);
                }
                None
            }
        }
    }

    /// True if no page was missed for a long time.
    pub fn is_warm(&self) -> bool {
        self.statistics.hits - self.hits_at_miss > WARM_HITS
    }

    #[cold]
    pub(super) fn miss(&mut self, key: PageKey) -> Result<()> {
        self.hits_at_miss = self.statistics.hits;
        if self.deferring {
            if let Some(error) = self.lost.get(&key) {
                return Err(error.repeated());
            }
            self.absent.push(key);
            return Err(Error::new(ErrorKind::Busy, format!("{key} is not in memory")));
        }
        self.statistics.locked += 1;
        let page = Arc::new(self.read_home(key)?);
        // Cancels a concurrent read of the page that does not hold the lock.
        self.loading.remove(&key);
        self.insert(key, page);
        Ok(())
    }

    fn insert(&mut self, key: PageKey, page: Arc<Block>) {
        self.make_room();
        self.statistics.misses += 1;
        let uses = self.queues.enter(key);
        self.slots.insert(key, Slot { page, uses, dirty: CLEAN, unknown: false });
    }

    /// Registers the caller as the reader of a page and returns true, or returns false with the read that another
    /// thread has registered. `None` if the page is in memory.
    pub fn begin_load(&mut self, key: PageKey) -> Option<(bool, Arc<Load>)> {
        if self.slots.contains_key(&key) {
            return None;
        }
        self.hits_at_miss = self.statistics.hits;
        if let Some(load) = self.loading.get(&key) {
            return Some((false, Arc::clone(load)));
        }
        let load = Arc::new(Load::default());
        self.loading.insert(key, Arc::clone(&load));
        Some((true, load))
    }

    /// Ends a read: inserts the page if its registration is still valid, and wakes the threads that wait for it.
    /// Returns the page if it is in memory now, and `None` if it has to be looked up again. Errors are returned only if
    /// the registration is valid.
    pub fn end_load(&mut self, key: PageKey, load: &Arc<Load>, read: Result<Block>) -> Result<Option<Arc<Block>>> {
        if self.loading.get(&key).is_none_or(|registered| !Arc::ptr_eq(registered, load)) {
            load.end(Outcome::Ended(None));
            return Ok(None);
        }
        self.loading.remove(&key);
        let read = read.and_then(|page| self.refuse_emptied(key, &page).map(|()| page));
        match read {
            Ok(page) => {
                let page = Arc::new(page);
                self.insert(key, Arc::clone(&page));
                load.end(Outcome::Ended(Some(Arc::clone(&page))));
                Ok(Some(page))
            }
            Err(error) => {
                load.end(Outcome::Failed(error.repeated()));
                Err(error)
            }
        }
    }
}
