//! Pages of metadata in memory: directory, tables, bitmap and backmap in one bounded cache of 4 KiB pages.
//!
//! 1. The page in memory is current; the file may be older only while the page is dirty or being written.
//! 2. A page is evicted only when it is neither dirty nor being written, so a miss reads a current page from the file.
//!    The cache grows beyond its limit if necessary; to prevent that, a thread that changes pages makes a commit before
//!    half of the pages are dirty.
//! 3. A commit captures the pages at one instant and shares their bytes; a change made while they are being written
//!    copies the page first.
//! 4. A page marked `backed` has space in the file, so that writing it cannot fail for lack of space.

use super::header::{TABLE_PAGES, Words, put};
use backend::Buffer;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The kind of a page, in the order in which a commit may write them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Bitmap,
    Backmap,
    Table,
    Directory,
}

impl Kind {
    /// Number of kinds of pages.
    pub(super) const ALL: usize = 4;
}

const KIND_SHIFT: u32 = 60;

/// The key of a page: its area, and its index in the area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PageKey(u64);

impl PageKey {
    pub(super) fn new(kind: Kind, index: u64) -> Self {
        Self((kind as u64) << KIND_SHIFT | index)
    }

    pub(super) fn kind(self) -> Kind {
        match self.0 >> KIND_SHIFT {
            0 => Kind::Bitmap,
            1 => Kind::Backmap,
            2 => Kind::Table,
            _ => Kind::Directory,
        }
    }

    pub(super) fn index(self) -> u64 {
        self.0 & ((1 << KIND_SHIFT) - 1)
    }

    /// The key of the page `by` pages after this one in the same area.
    pub(super) fn plus(self, by: u64) -> Self {
        Self(self.0 + by)
    }

    /// The key of the preceding page, if both pages belong to the same table.
    pub(super) fn before_in_table(self) -> Option<Self> {
        (self.kind() == Kind::Table && !self.index().is_multiple_of(TABLE_PAGES)).then(|| Self(self.0 - 1))
    }
}

/// One page's bytes, as words.
#[derive(Clone)]
pub(super) struct PageBytes(Arc<Buffer>);

impl PageBytes {
    /// Uses a buffer of one block.
    pub(super) fn new(block: Buffer) -> Self {
        Self(Arc::new(block))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Word `index` of the page; `index` is below 512.
    #[inline]
    pub(super) fn word(&self, index: usize) -> u64 {
        Words(&self.0).get(index * 8)
    }

    /// All words in order.
    pub(super) fn words(&self) -> impl Iterator<Item = u64> + Clone {
        self.words_from(0)
    }

    /// Words from index `first` on.
    pub(super) fn words_from(&self, first: usize) -> impl Iterator<Item = u64> + Clone {
        let words = self.0.as_chunks().0.get(first..).unwrap_or_default();
        words.iter().map(|word| u64::from_le_bytes(*word))
    }
}

struct Page {
    bytes: PageBytes,
    used: bool,
    dirty: bool,
    writing: bool,
    backed: bool,
    /// Whether the page belongs to a table that no directory on the device names yet.
    fresh: bool,
}

/// A page as a commit writes it.
pub(super) struct Captured {
    pub key: PageKey,
    pub bytes: PageBytes,
    pub fresh: bool,
}

/// The pages in memory.
pub(super) struct Cache {
    pages: FxHashMap<PageKey, Page>,
    /// Every page once; the clock hand evicts pages that were not used since it last passed.
    ring: Vec<PageKey>,
    hand: usize,
    most: usize,
    dirty: Vec<PageKey>,
}

impl Cache {
    /// A cache of at most `most` pages.
    pub(super) fn new(most: usize) -> Self {
        Self { pages: FxHashMap::default(), ring: Vec::new(), hand: 0, most, dirty: Vec::new() }
    }

    #[inline]
    pub(super) fn get(&mut self, key: PageKey) -> Option<&PageBytes> {
        let page = self.pages.get_mut(&key)?;
        page.used = true;
        Some(&page.bytes)
    }

    /// As [`Cache::get`], without marking the page as used.
    pub(super) fn peek(&self, key: PageKey) -> Option<&PageBytes> {
        self.pages.get(&key).map(|page| &page.bytes)
    }

    pub(super) fn contains(&self, key: PageKey) -> bool {
        self.pages.contains_key(&key)
    }

    /// Sets a word of a page, which must be in memory.
    pub(super) fn set(&mut self, key: PageKey, index: usize, word: u64) {
        let page = self.pages.get_mut(&key);
        debug_assert!(page.is_some(), "{key:?} was not required before it was changed");
        let Some(page) = page.filter(|page| page.bytes.word(index) != word) else { return };
        let bytes: &mut Buffer = Arc::make_mut(&mut page.bytes.0);
        put(bytes, index * 8, word);
        page.used = true;
        page.backed = true;
        if !page.dirty {
            page.dirty = true;
            self.dirty.push(key);
        }
    }

    /// The bytes of a page for a change; `None` if it is not in memory.
    pub(super) fn edit(&mut self, key: PageKey) -> Option<&mut [u8]> {
        let page = self.pages.get_mut(&key)?;
        page.used = true;
        page.backed = true;
        if !page.dirty {
            page.dirty = true;
            self.dirty.push(key);
        }
        let bytes: &mut Buffer = Arc::make_mut(&mut page.bytes.0);
        Some(bytes)
    }

    /// Sets words of a page, which must be in memory, from word `index` on. If the words are equal already, the page is
    /// not changed: so a page without space in the file does not become dirty.
    pub(super) fn set_all(&mut self, key: PageKey, index: usize, words: impl Iterator<Item = u64> + Clone) {
        if self.peek(key).is_some_and(|page| page.words_from(index).zip(words.clone()).all(|(has, word)| has == word)) {
            return;
        }
        let bytes = self.edit(key);
        debug_assert!(bytes.is_some(), "{key:?} was not required before it was changed");
        let places = bytes.and_then(|bytes| bytes.as_chunks_mut().0.get_mut(index..)).unwrap_or_default();
        for (place, word) in places.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
    }

    /// Whether the page has space in the file, so that writing it needs no allocation; `None` if it is not in memory.
    pub(super) fn is_backed(&self, key: PageKey) -> Option<bool> {
        self.pages.get(&key).map(|page| page.backed)
    }

    pub(super) fn set_backed(&mut self, key: PageKey) {
        if let Some(page) = self.pages.get_mut(&key) {
            page.backed = true;
        }
    }

    /// Inserts a page that was read from the file.
    pub(super) fn insert(&mut self, key: PageKey, bytes: PageBytes) {
        let backed = bytes.bytes().iter().any(|byte| *byte != 0);
        self.add(key, Page { bytes, used: true, dirty: false, writing: false, backed, fresh: false });
    }

    /// Inserts a page of zeros for a new table. The page is dirty from the start, whatever bytes the file contains
    /// there.
    pub(super) fn insert_fresh(&mut self, key: PageKey) {
        let bytes = PageBytes::new(Buffer::zeroed(1));
        self.add(key, Page { bytes, used: true, dirty: true, writing: false, backed: true, fresh: true });
        self.dirty.push(key);
    }

    fn add(&mut self, key: PageKey, page: Page) {
        if self.pages.insert(key, page).is_some() {
            return;
        }
        // Each step evicts a page, clears its mark of use, or skips a page that has to stay. After two rounds without
        // an eviction, all pages have to stay.
        let mut looks = self.ring.len() * 2;
        while self.ring.len() >= self.most && looks > 0 {
            looks -= 1;
            self.hand = if self.hand >= self.ring.len() { 0 } else { self.hand };
            let candidate = self.ring[self.hand];
            match self.pages.get_mut(&candidate) {
                Some(page) if page.dirty || page.writing => self.hand += 1,
                Some(page) if page.used => {
                    page.used = false;
                    self.hand += 1;
                }
                _ => {
                    self.pages.remove(&candidate);
                    self.ring.swap_remove(self.hand);
                }
            }
        }
        self.ring.push(key);
    }

    /// Pages that the next commit has to write.
    pub(super) fn dirty(&self) -> &[PageKey] {
        &self.dirty
    }

    /// Whether so many pages are dirty that a commit is due.
    pub(super) fn is_pressed(&self) -> bool {
        self.dirty.len() >= self.most / 2
    }

    /// Whether background work should wait.
    pub(super) fn is_half_pressed(&self) -> bool {
        self.dirty.len() >= self.most / 4
    }

    /// Captures all dirty pages as they are now, sorted.
    pub(super) fn capture(&mut self) -> Vec<Captured> {
        let mut keys = std::mem::take(&mut self.dirty);
        keys.sort_unstable();
        let mut captured = Vec::with_capacity(keys.len());
        for key in keys {
            if let Some(page) = self.pages.get_mut(&key) {
                let fresh = std::mem::take(&mut page.fresh);
                page.dirty = false;
                page.writing = true;
                captured.push(Captured { key, bytes: page.bytes.clone(), fresh });
            }
        }
        captured
    }

    /// Notes that captured pages are durable.
    pub(super) fn settled(&mut self, captured: &[Captured]) {
        for page in captured {
            if let Some(page) = self.pages.get_mut(&page.key) {
                page.writing = false;
            }
        }
    }

    /// Memory used by pages, in bytes.
    pub(super) fn memory(&self) -> u64 {
        (self.pages.len() * backend::BLOCK_SIZE) as u64
    }
}
