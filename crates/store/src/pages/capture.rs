//! Captures the dirty pages of one moment for a checkpoint.
//!
//! All requests wait while a checkpoint captures, so [`Pages::capture`] looks at no page: it only begins a new number
//! of changes. Each page has the number of its changes, so the captured pages are those with an older number.
//! Afterwards they are collected in parts ([`Pages::collect`]), and requests go on between the parts. A page that is
//! about to be changed or removed before it is collected is collected first, as it is.

use super::{CLEAN, PageKey, Pages, Slot};
use backend::Block;
use rustc_hash::FxHashSet;
use std::sync::Arc;

/// The most pages that are collected at a time. Requests wait meanwhile.
const PART: usize = if cfg!(any(test, feature = "schedules")) { 2 } else { 256 };

/// The dirty pages at the moment of a checkpoint, in file order.
#[derive(Default)]
pub struct Captured {
    /// Pages to which the last checkpoint refers: they need images before they are written in place.
    pub known: Vec<(PageKey, Arc<Block>)>,
    /// Pages to which the last checkpoint does not refer: they are written in place before the checkpoint is committed.
    pub unknown: Vec<(PageKey, Arc<Block>)>,
}

impl Captured {
    /// Adds a page unless it is clean, and marks it clean.
    pub(super) fn collect(&mut self, key: PageKey, slot: &mut Slot) {
        if std::mem::replace(&mut slot.dirty, CLEAN) != CLEAN {
            let list = if std::mem::take(&mut slot.unknown) { &mut self.unknown } else { &mut self.known };
            list.push((key, Arc::clone(&slot.page)));
        }
    }

    /// All captured pages in file order, for tests without crashes.
    pub fn all(&self) -> Vec<(PageKey, Arc<Block>)> {
        let mut all = [self.known.as_slice(), self.unknown.as_slice()].concat();
        all.sort_unstable_by_key(|(key, _)| *key);
        all
    }
}

/// The pages that the next checkpoint writes.
pub(super) struct Changes {
    pub dirty: FxHashSet<PageKey>,
    /// The number of the next checkpoint, which writes the pages in `dirty`. Pages with a lower number are captured and
    /// not collected yet.
    pub next: u64,
    /// Pages that were captured, and collected because they were about to be changed or removed.
    early: Captured,
}

impl Default for Changes {
    fn default() -> Self {
        Self { dirty: FxHashSet::default(), next: CLEAN + 1, early: Captured::default() }
    }
}

impl Changes {
    /// Marks a page as dirty.
    #[inline]
    pub fn mark(&mut self, key: PageKey, slot: &mut Slot) {
        if slot.dirty != self.next {
            self.early.collect(key, slot);
            slot.dirty = self.next;
            self.dirty.insert(key);
        }
    }

    fn collect_early(&mut self, key: PageKey, slot: &mut Slot) {
        if slot.dirty != self.next {
            self.early.collect(key, slot);
        }
    }
}

/// The captured pages, to be collected.
#[must_use]
pub struct Capturing(FxHashSet<PageKey>);

impl Capturing {
    /// Collects the pages. `with_pages` locks the cache and calls the function that it gets, once for each part.
    pub fn collect(self, mut with_pages: impl FnMut(&mut dyn FnMut(&mut Pages))) -> Captured {
        let mut keys: Vec<PageKey> = self.0.into_iter().collect();
        keys.sort_unstable();
        let mut captured = Captured::default();
        for part in keys.chunks(PART) {
            with_pages(&mut |pages| pages.collect(part, &mut captured));
        }
        with_pages(&mut |pages| {
            let early = std::mem::take(&mut pages.changes.early);
            captured.known.extend(early.known);
            captured.unknown.extend(early.unknown);
        });
        captured.known.sort_unstable_by_key(|(key, _)| *key);
        captured.unknown.sort_unstable_by_key(|(key, _)| *key);
        captured
    }
}

impl Pages {
    /// Captures all dirty pages: later changes belong to the next checkpoint. The caller collects the pages, and writes
    /// them ([`super::sealed`]) durably before it releases the part of the journal that contains their changes. The
    /// previous checkpoint must have ended.
    pub fn capture(&mut self) -> Capturing {
        self.changes.next += 1;
        self.dirty_unknown = 0;
        self.retired.clear();
        Capturing(std::mem::take(&mut self.changes.dirty))
    }

    /// Captures and collects all dirty pages, for tests without other threads.
    pub fn capture_now(&mut self) -> Captured {
        self.capture().collect(|work| work(self))
    }

    fn collect(&mut self, keys: &[PageKey], captured: &mut Captured) {
        for key in keys {
            if let Some(slot) = self.slots.get_mut(key).filter(|slot| slot.dirty != self.changes.next) {
                captured.collect(*key, slot);
            }
        }
    }

    /// Called before a page is removed: if it is captured, the checkpoint still writes it.
    pub(super) fn collect_early(&mut self, key: PageKey) {
        if let Some(slot) = self.slots.get_mut(&key) {
            self.changes.collect_early(key, slot);
        }
    }
}
