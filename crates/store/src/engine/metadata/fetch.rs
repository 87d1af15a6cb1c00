//! Reads metadata into memory without waiting for the medium under the metadata lock.
//!
//! A lookup that misses pages releases the lock, reads the pages and starts again ([`Metadata::look`], [`Fetch`]). If
//! such a page is lost (damaged or unreadable), the restarted lookup gets the error of the read when it accesses the
//! page. The lookup may continue without the page: a search for free blocks skips the region that the page describes.
//!
//! A change cannot start again, so its pages are read before it starts: a survey under the lock (`survey.rs`) finds the
//! missing pages, and the pages are read without the lock. Survey and reading are repeated until no page is missing
//! ([`Metadata::bring_in`]). If the metadata changes in between, the change may still miss pages. The change reads
//! these pages under the lock; [`crate::pages::PageStatistics::locked`] counts them.

use super::{Meta, Metadata};
use crate::pages::{Load, PageKey, read_home};
use crate::{Error, Result, is_lost};
use backend::{BLOCK_SIZE, Block};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// How often a lookup releases the lock to read missing pages: several times the height of a tree and its tables. After
/// that the tree changes faster than it can be read, and the lookup reads under the lock.
const LOOKS_MAX: usize = 256;
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
    held: Vec<Arc<Block>>,
    /// Lost pages that the lookup has missed, with the errors of their reads.
    lost: FxHashMap<PageKey, Error>,
}

impl Fetch {
    /// Runs `look`. If pages are missing, returns them in `Err`: the caller reads them with [`Metadata::load_pages`]
    /// without the lock, and runs `look` again. `look` must not change metadata before it has all pages.
    pub fn look<T>(
        &mut self,
        meta: &mut Meta,
        look: impl FnOnce(&mut Meta) -> Result<T>,
    ) -> std::result::Result<Result<T>, Vec<PageKey>> {
        self.looks += 1;
        if self.looks > LOOKS_MAX {
            return Ok(look(meta));
        }
        meta.pages.defer(std::mem::take(&mut self.lost));
        let outcome = look(meta);
        let absent;
        (absent, self.lost) = meta.pages.undefer();
        if absent.is_empty() { Ok(outcome) } else { Err(absent) }
    }
}

impl Metadata {
    /// Runs a lookup under the lock, repeatedly until all its pages are in memory.
    pub(crate) fn look<T>(&self, mut look: impl FnMut(&mut Meta) -> Result<T>) -> Result<T> {
        let mut fetch = Fetch::default();
        loop {
            let looked = fetch.look(&mut self.lock(), &mut look);
            match looked {
                Ok(outcome) => return outcome,
                Err(absent) => match self.load_pages(absent, &mut fetch) {
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
            if absent.is_empty() || self.load_pages(absent, &mut fetch).is_err() {
                break;
            }
        }
        fetch
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
        let mut others: Vec<Arc<Load>> = Vec::new();
        {
            let mut meta = self.lock();
            for key in absent.into_iter().take(ABSENT_MAX) {
                match meta.pages.begin_load(key) {
                    Some((true, load)) => own.push((key, load)),
                    Some((false, load)) => others.push(load),
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
                if page.is_err() && meta.pages.mender().is_some() {
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
        for load in others {
            fetch.held.extend(load.wait());
        }
        let surplus = fetch.held.len().saturating_sub(HELD_MAX);
        fetch.held.drain(..surplus);
        result
    }
}
