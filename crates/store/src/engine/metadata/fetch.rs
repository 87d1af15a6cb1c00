//! Reads metadata into memory without waiting for the medium under the metadata lock.
//!
//! A lookup that misses pages releases the lock, reads the pages and starts again ([`Metadata::look`], [`Fetch`]). If
//! such a page is lost (damaged or unreadable), the restarted lookup gets the error of the read when it accesses the
//! page. The lookup may continue without the page: a search for free blocks skips the region that the page describes.
//!
//! A change cannot start again, so its pages are read before it starts: a survey under the lock (`survey.rs`) finds the
//! missing pages, and the pages are read without the lock. Survey and reading are repeated until no page is missing
//! ([`Metadata::bring_in`]). If the metadata changes in between, or the survey was skipped, the change may still miss
//! pages. Write-back, flushes, direct writes and discards begin with lookups that notice it ([`Fetch::require`]): the
//! caller releases its locks, reads the pages and decides everything again. After [`RESTARTS_MAX`] restarts, and in
//! other changes, the pages are read under the lock; [`crate::pages::PageStatistics::locked`] counts these reads.

use super::{Meta, Metadata};
use crate::pages::{Load, PageKey, read_home};
use crate::sync::time::Instant;
use crate::{Error, ErrorKind, Result, is_lost};
use backend::{BLOCK_SIZE, Block};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// How often a lookup releases the lock to read missing pages: several times the height of a tree and its tables. After
/// that the tree changes faster than it can be read, and the lookup reads under the lock.
const LOOKS_MAX: usize = 256;
/// How often a change starts again to read the pages that its lookups miss. A restarted change is surveyed, so that few
/// restarts suffice, unless other changes of the map invalidate each survey.
const RESTARTS_MAX: usize = 16;
/// The most surveys of the pages that a change needs. Afterwards the change is made even if pages are missing.
const SURVEYS_MAX: usize = 48;
/// The most pages that one request keeps in memory (16 MiB). Further pages may be evicted.
const HELD_MAX: usize = 4096;
/// Pages read at a time (1 MiB). A lookup or survey that misses more pages reads the others when it runs again.
pub(crate) const ABSENT_MAX: usize = 256;
/// The most adjacent pages read with one request: the table pages of a region.
const GROUP_MAX: usize = crate::space::REGION_PAGES as usize;

/// Divides pages in file order into groups of adjacent ones. Each group is read with one request.
fn groups<T>(pages: &[T], key: impl Fn(&T) -> PageKey) -> impl Iterator<Item = &[T]> {
    pages.chunk_by(move |a, b| key(a).raw() + 1 == key(b).raw()).flat_map(|group| group.chunks(GROUP_MAX))
}

/// Pages that a request has read. They stay in memory until this value is dropped.
#[derive(Default)]
pub(crate) struct Fetch {
    looks: usize,
    /// When the change began, before it started again.
    began: Option<Instant>,
    /// How often the change has started again.
    restarts: usize,
    held: Vec<Arc<Block>>,
    /// Lost pages that the lookups have missed, with the errors of their reads.
    lost: FxHashMap<PageKey, Error>,
    /// Lost pages that other threads have read while this thread waited for them, with the errors.
    lost_to_others: FxHashMap<PageKey, Error>,
    /// The pages that [`Fetch::require`] has missed.
    missing: Vec<PageKey>,
    /// Whether the change has failed before, and nothing was found that prevents it.
    failed_in_vain: bool,
}

impl Fetch {
    /// Runs `look`. If pages are missing, returns them in `Err`: the caller reads them with [`Metadata::load_pages`]
    /// without the lock, and runs `look` again. `look` must not change metadata before it has all pages.
    pub fn look<T>(
        &mut self,
        meta: &mut Meta,
        look: impl FnOnce(&mut Meta) -> Result<T>,
    ) -> std::result::Result<Result<T>, Vec<PageKey>> {
        if self.looks >= LOOKS_MAX {
            return Ok(look_at_once(meta, look));
        }
        meta.pages.defer(std::mem::take(&mut self.lost));
        let outcome = look(meta);
        let absent;
        (absent, self.lost) = meta.pages.undefer();
        if absent.is_empty() {
            return Ok(outcome);
        }
        self.looks += 1;
        Err(absent)
    }

    /// A value with which a change reads all pages under the lock.
    #[cfg(test)]
    pub fn under_the_lock() -> Self {
        Self { restarts: RESTARTS_MAX, ..Self::default() }
    }

    fn hold(&mut self, pages: impl IntoIterator<Item = Arc<Block>>) {
        self.held.extend(pages);
        let surplus = self.held.len().saturating_sub(HELD_MAX);
        self.held.drain(..surplus);
    }

    /// Runs lookups of a change, before the change or the step of it that needs them. If pages are missing, fails with
    /// `Busy`: the caller undoes what it has prepared, releases all locks, calls [`Metadata::load_missing`], and starts
    /// again.
    pub fn require<T>(&mut self, meta: &mut Meta, look: impl FnOnce(&mut Meta) -> Result<T>) -> Result<T> {
        if self.restarts >= RESTARTS_MAX {
            return look_at_once(meta, look);
        }
        match self.look(meta, look) {
            Ok(outcome) => outcome,
            Err(absent) => {
                self.missing = absent;
                Err(Error::new(ErrorKind::Busy, "metadata that a change needs is not in memory"))
            }
        }
    }

    /// Notes that an attempt of the change begins, and returns when it began. After [`Metadata::load_missing`] this is
    /// still the same attempt, although the medium may have taken many seconds to fail a read. After
    /// [`Fetch::after_failure`] it is another one.
    pub fn begin(&mut self) -> Instant {
        *self.began.get_or_insert_with(Instant::now)
    }

    /// As [`Fetch::require`], for the pages that the allocation of blocks needs.
    pub fn require_allocation(&mut self, meta: &mut Meta, blocks: u64) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        self.require(meta, |meta| {
            meta.survey_allocation(blocks);
            Ok(())
        })
    }

    /// Whether pages are lost that the lookups need. A survey would read them again.
    pub fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Forgets the errors of reads, so that the pages are read again.
    pub fn forget_lost(&mut self) {
        self.lost.clear();
    }

    /// Notes that nothing was found that prevents the change. False if that was noted before.
    pub fn note_failed_in_vain(&mut self) -> bool {
        !std::mem::replace(&mut self.failed_in_vain, true)
    }

    /// The value for the next attempt of the change, if that attempt must know of this one.
    pub fn after_failure(self) -> Option<Self> {
        self.failed_in_vain.then(|| Self { failed_in_vain: true, ..Self::default() })
    }
}

/// Runs lookups that read missing pages under the lock.
fn look_at_once<T>(meta: &mut Meta, look: impl FnOnce(&mut Meta) -> Result<T>) -> Result<T> {
    let outcome = look(meta);
    // Surveys among the lookups have recorded missing pages. The change reads these pages itself.
    drop(meta.pages.take_absent());
    outcome
}

impl Metadata {
    /// Runs a lookup under the lock, repeatedly until all its pages are in memory.
    pub(crate) fn look<T>(&self, look: impl FnMut(&mut Meta) -> Result<T>) -> Result<T> {
        self.look_holding(&mut Fetch::default(), look)
    }

    /// As [`Metadata::look`]. The pages that it reads stay in memory until `fetch` is dropped.
    pub(crate) fn look_holding<T>(&self, fetch: &mut Fetch, mut look: impl FnMut(&mut Meta) -> Result<T>) -> Result<T> {
        fetch.looks = 0;
        loop {
            let looked = fetch.look(&mut self.lock(), &mut look);
            match looked {
                Ok(outcome) => return outcome,
                Err(absent) => match self.load_pages(absent, fetch) {
                    // The next call of `look` gets this error when it accesses the page, and may continue without it.
                    Err(error) if is_lost(&error) => {}
                    other => other?,
                },
            }
        }
    }

    /// Reads the pages that `survey` reports as missing. Pages that cannot be read are skipped: the change then reports
    /// the error.
    pub(crate) fn bring_in(&self, survey: impl Fn(&mut Meta)) -> Fetch {
        let mut fetch = Fetch::default();
        for _ in 0..SURVEYS_MAX {
            let absent = {
                let mut meta = self.lock();
                if meta.pages.is_warm() {
                    break;
                }
                survey(&mut meta);
                meta.pages.take_absent()
            };
            if absent.is_empty() || self.load_pages(absent, &mut fetch).is_err() || !fetch.lost_to_others.is_empty() {
                break;
            }
        }
        // The change reads a lost page again, because the next read may succeed.
        fetch.lost.clear();
        fetch.lost_to_others.clear();
        fetch
    }

    /// As [`Metadata::bring_in`], before an attempt of a change that uses `fetch`. A change that needs lost pages is
    /// not surveyed, because the survey would read them again.
    pub(crate) fn bring_in_for(&self, fetch: &Fetch, survey: impl Fn(&mut Meta)) -> Fetch {
        if fetch.has_lost() { Fetch::default() } else { self.bring_in(survey) }
    }

    /// Called after a change has failed, without locks: reads the pages that [`Fetch::require`] has missed. False if it
    /// has missed none, so that the change has failed for another reason. If pages are lost, the next attempt fails
    /// with the errors of their reads.
    pub(crate) fn load_missing(&self, fetch: &mut Fetch) -> Result<bool> {
        let missing = std::mem::take(&mut fetch.missing);
        if missing.is_empty() {
            return Ok(false);
        }
        fetch.restarts += 1;
        fetch.lost_to_others.clear();
        let loaded = self.load_pages(missing, fetch);
        // If each change read a lost page itself, changes that miss the same page would wait for each other's reads in
        // turn, once for each restart.
        fetch.lost.extend(fetch.lost_to_others.drain());
        match loaded {
            Err(error) if is_lost(&error) => Ok(true),
            loaded => loaded.map(|()| true),
        }
    }

    /// Starts to read pages of the files into the page cache, without waiting.
    pub(crate) fn read_ahead(&self, absent: &[PageKey]) {
        let absent = &absent[..absent.len().min(ABSENT_MAX)];
        groups(absent, |key| *key).for_each(|group| self.will_need(group[0], group.len()));
    }

    fn will_need(&self, first: PageKey, pages: usize) {
        self.file(first.file()).will_need(first.offset(), (pages * BLOCK_SIZE) as u64);
    }

    /// Reads pages without the lock. If another thread is reading a page, waits for that read.
    pub(crate) fn load_pages(&self, absent: Vec<PageKey>, fetch: &mut Fetch) -> Result<()> {
        let mut own: Vec<(PageKey, Arc<Load>)> = Vec::new();
        let mut others: Vec<(PageKey, Arc<Load>)> = Vec::new();
        {
            let mut meta = self.lock();
            for key in absent.into_iter().take(ABSENT_MAX) {
                match meta.pages.begin_load(key) {
                    Some((true, load)) => own.push((key, load)),
                    Some((false, load)) => others.push((key, load)),
                    None => {}
                }
            }
        }
        let groups: Vec<&[(PageKey, Arc<Load>)]> = groups(&own, |(key, _)| *key).collect();
        if groups.len() > 1 {
            // Read-ahead lets the device read all groups while this thread waits for the first.
            groups.iter().for_each(|group| self.will_need(group[0].0, group.len()));
        }
        let mut result = Ok(());
        for group in groups {
            let pages = read_home(self.file(group[0].0.file()), group[0].0, group.len());
            let mut meta = self.lock();
            for ((key, load), mut page) in group.iter().zip(pages) {
                if (page.is_err() || meta.pages.is_emptied(*key)) && meta.pages.mender().is_some() {
                    page = meta.pages.read_home(*key);
                }
                match meta.pages.end_load(*key, load, page) {
                    Ok(page) => fetch.held.extend(page),
                    Err(error) => {
                        if is_lost(&error) {
                            fetch.lost.insert(*key, error.repeated());
                        }
                        result = Err(error);
                    }
                }
            }
        }
        let mut read_by_others = Vec::new();
        for (key, load) in others {
            match load.wait() {
                Ok(page) => read_by_others.extend(page),
                Err(error) if is_lost(&error) => {
                    fetch.lost_to_others.insert(key, error);
                }
                // The next lookup reads the page again.
                Err(_) => {}
            }
        }
        fetch.hold(read_by_others);
        result
    }
}
