//! The map in memory: the root, which has the state of each page, and the pages, which are read on demand.
//!
//! 1. The part of the root for the used part of the disk is in memory: a quarter of a byte per 2 MiB of the disk. It is
//!    read without a lock.
//! 2. A page with the state `Stored` is in the cache, or has a valid copy in the file. So a new page enters the cache,
//!    marked as changed, before the root gets that state, and is written before the root block is.
//! 3. A page is changed under its lock in the cache, and the change is added to the log under the same lock: so the log
//!    has the changes of a page in the order in which they were made.

use super::header::Header;
use super::layout::{BLOCK, COPIES, Layout, PAGE_GRAINS, ROOT_PAGES};
use super::page::{self, Identity, Kind, ZERO};
use crate::aligned::AlignedFile;
use crate::runs::RunList;
use crate::runs::cache::RunCache;
use crate::runs::options::OpenOptions;
use crate::{Error, ErrorKind, IoContext, Result};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const WORDS: usize = ROOT_PAGES as usize * 2 / 64;

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageState {
    /// All grains are absent.
    Absent = 0,
    /// The page is stored in the file.
    Stored = 1,
    /// All grains are zeros that hide the parent; no page is stored.
    Zero = 2,
    /// The part of the root with the state is lost, or replay could not change the page. Only in an object that is open
    /// for salvage.
    Lost = 3,
}

/// A block of the root.
struct RootBlock {
    words: [AtomicU64; WORDS],
    changed: AtomicBool,
    /// The current copy, counted from 1; 0 for none.
    copy: AtomicU32,
}

impl Default for RootBlock {
    fn default() -> Self {
        Self { words: [const { AtomicU64::new(0) }; WORDS], changed: AtomicBool::new(false), copy: AtomicU32::new(0) }
    }
}

/// A captured root block.
pub(super) struct CapturedRoot {
    pub(super) index: u32,
    pub(super) body: Vec<u8>,
    copy: u32,
}

/// The map of an object.
pub(super) struct Map {
    pub(super) layout: Layout,
    pub(super) pages: RunCache,
    image: String,
    id: [u8; 16],
    root: Box<[OnceLock<Box<RootBlock>>]>,
    /// The end of the blocks to which an entry may refer.
    limit: AtomicU64,
    /// Held while the state of a page changes in the root.
    births: Mutex<()>,
    /// Whether the log is being replayed. Then a torn copy is accepted as the effect of an interrupted checkpoint.
    replaying: AtomicBool,
}

impl Map {
    /// Reads the root of the map.
    pub(super) fn open(file: &AlignedFile, header: &Header, options: &OpenOptions) -> Result<Self> {
        let image = &options.image;
        let layout = Layout::new(header.capacity)?;
        let length = file.file().len().during(|| format!("{image}: cannot find out its length"))?;
        if length < layout.data * BLOCK {
            let what = format!("{image}: it has {length} bytes, its map alone takes {}", layout.data * BLOCK);
            return Err(Error::new(ErrorKind::Corrupt, format!("{what}: the file was truncated")));
        }
        let root = (0..layout.root_blocks).map(|_| OnceLock::new()).collect();
        let map = Self {
            pages: RunCache::new(options.cache_bytes),
            image: image.clone(),
            id: header.id,
            root,
            limit: AtomicU64::new(length.div_ceil(BLOCK)),
            births: Mutex::new(()),
            replaying: AtomicBool::new(!header.clean),
            layout,
        };
        for index in 0..map.layout.root_blocks {
            match map.read_root(file, index) {
                Err(error) if options.salvage && matches!(error.kind(), ErrorKind::Io | ErrorKind::Corrupt) => {
                    tracing::warn!(image, %error, "the ranges of this part of the map are lost");
                    let block = RootBlock::default();
                    block.words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
                    let _ = map.root[index as usize].set(Box::new(block));
                }
                read => read?,
            }
        }
        Ok(map)
    }

    fn read_root(&self, file: &AlignedFile, index: u32) -> Result<()> {
        let mut copies = [0; (BLOCK * COPIES) as usize];
        let context = || format!("{}: cannot read root block {index}", self.image);
        file.read_at(&mut copies, self.layout.root_copies(index) * BLOCK).during(context)?;
        let current = page::choose(self.identity(Kind::Root, index), &copies);
        self.check_copies(&current, Kind::Root, index)?;
        if current.copy.is_none() && !current.broken {
            return Ok(());
        }
        let block = RootBlock::default();
        for (word, bytes) in block.words.iter().zip(current.body.chunks_exact(8)) {
            let mut field = [0; 8];
            field.copy_from_slice(bytes);
            let value = u64::from_le_bytes(field);
            // The state 3 is invalid.
            if value & (value >> 1) & 0x5555_5555_5555_5555 != 0 {
                return Err(self.corrupt(format!("root block {index} is invalid")));
            }
            word.store(value, Ordering::Relaxed);
        }
        block.copy.store(current.copy.map_or(0, |copy| copy as u32 + 1), Ordering::Relaxed);
        // If a copy is torn, the block counts as changed: the next checkpoint overwrites the torn copy before another
        // write can tear the valid one.
        block.changed.store(current.broken, Ordering::Relaxed);
        let _ = self.root[index as usize].set(Box::new(block));
        Ok(())
    }

    fn check_copies(&self, current: &page::Current<'_>, kind: Kind, index: u32) -> Result<()> {
        match current.broken && !self.replaying.load(Ordering::Relaxed) {
            true => Err(self.corrupt(format!("a copy of {kind:?} {index} of the map fails its checksum"))),
            false => Ok(()),
        }
    }

    pub(super) fn corrupt(&self, what: String) -> Error {
        Error::new(ErrorKind::Corrupt, format!("{}: {what}", self.image))
    }

    pub(super) fn identity(&self, kind: Kind, index: u32) -> Identity {
        Identity { id: self.id, kind, index }
    }

    /// Ends replay.
    pub(super) fn replayed(&self) {
        self.replaying.store(false, Ordering::Relaxed);
    }

    /// The end of the blocks to which an entry may refer.
    pub(super) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    /// Raises the limit to `block`, because the blocks before it are in use.
    pub(super) fn raise_limit(&self, block: u64) {
        self.limit.fetch_max(block, Ordering::AcqRel);
    }

    /// The state of page `index`.
    pub(super) fn state(&self, index: u32) -> PageState {
        let Some(block) = self.root.get((index / ROOT_PAGES) as usize).and_then(OnceLock::get) else {
            return PageState::Absent;
        };
        let at = index % ROOT_PAGES;
        match block.words[at as usize / 32].load(Ordering::Acquire) >> (at % 32 * 2) & 3 {
            1 => PageState::Stored,
            2 => PageState::Zero,
            3 => PageState::Lost,
            _ => PageState::Absent,
        }
    }

    /// Sets the state of a page. The caller holds `births`.
    fn set_state(&self, index: u32, state: PageState) {
        let block = self.root[(index / ROOT_PAGES) as usize].get_or_init(Box::default);
        let at = index % ROOT_PAGES;
        let word = &block.words[at as usize / 32];
        let value = word.load(Ordering::Relaxed) & !(3 << (at % 32 * 2)) | (state as u64) << (at % 32 * 2);
        word.store(value, Ordering::Release);
        block.changed.store(true, Ordering::Relaxed);
    }

    /// Gives up a page whose content cannot be determined.
    pub(super) fn give_up(&self, index: u32) {
        let _births = self.births.lock();
        self.set_state(index, PageState::Lost);
    }

    /// Makes all grains of an absent page zeros, and calls `log` if that is a change. Returns false if the page is
    /// stored.
    pub(super) fn zero_whole(&self, index: u32, log: impl FnOnce()) -> bool {
        let _births = self.births.lock();
        match self.state(index) {
            PageState::Stored | PageState::Lost => return false,
            PageState::Zero => {}
            PageState::Absent => {
                self.set_state(index, PageState::Zero);
                log();
            }
        }
        true
    }

    /// Reads page `index` from the file.
    pub(super) fn load(&self, file: &AlignedFile, index: u32) -> Result<RunList> {
        let mut copies = [0; (BLOCK * COPIES) as usize];
        let context = || format!("{}: cannot read page {index} of the map", self.image);
        file.read_at(&mut copies, self.layout.page_copies(index) * BLOCK).during(context)?;
        let current = page::choose(self.identity(Kind::Page, index), &copies);
        self.check_copies(&current, Kind::Page, index)?;
        let Some(copy) = current.copy else {
            return Err(self.corrupt(format!("page {index} of the map is missing")));
        };
        let valid = self.layout.data..self.limit();
        let list = page::decode_entries(current.body, self.layout.page_grains(index), &valid);
        let mut list = list.ok_or_else(|| self.corrupt(format!("page {index} of the map is invalid")))?;
        list.note = copy as u32 + 1;
        Ok(list)
    }

    /// Changes page `index`, which is created if missing. The caller holds `order`, so that nothing is captured
    /// meanwhile.
    pub(super) fn change<R>(
        &self,
        file: &AlignedFile,
        index: u32,
        change: impl FnOnce(&mut RunList) -> (R, u64),
    ) -> Result<R> {
        if self.state(index) != PageState::Stored {
            let _births = self.births.lock();
            let mut list = RunList::new(1);
            let state = self.state(index);
            if state == PageState::Zero {
                list.set(0..self.layout.page_grains(index), ZERO, 0);
            }
            if state != PageState::Stored {
                self.pages.insert_new(index, list, 1);
                self.set_state(index, PageState::Stored);
            }
        }
        self.pages.change(index, || self.load(file, index), change)
    }

    /// Captures all changed root blocks. Only one capture may exist at a time.
    pub(super) fn capture_root(&self) -> Vec<CapturedRoot> {
        let blocks = (0..).zip(self.root.iter()).filter_map(|(index, block)| Some((index, block.get()?)));
        let changed = blocks.filter(|(_, block)| block.changed.swap(false, Ordering::Relaxed));
        let captured = changed.map(|(index, block)| CapturedRoot {
            index,
            body: block.words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect(),
            copy: block.copy.load(Ordering::Relaxed),
        });
        captured.collect()
    }

    /// Writes a page or root block over its older copy; returns the index of that copy.
    pub(super) fn write_copy(
        &self,
        file: &AlignedFile,
        identity: Identity,
        sequence: u64,
        current: u32,
        body: &[u8],
    ) -> Result<u32> {
        let copy = if current == 1 { 1 } else { 0 };
        let first = match identity.kind {
            Kind::Page => self.layout.page_copies(identity.index),
            Kind::Root => self.layout.root_copies(identity.index),
        };
        let block = page::encode(identity, sequence, body);
        let context = || format!("{}: cannot write the map", self.image);
        file.write_at(&[&block], (first + copy) * BLOCK, false).during(context)?;
        Ok(copy as u32 + 1)
    }

    /// Writes a captured root block.
    pub(super) fn write_root(&self, file: &AlignedFile, root: &CapturedRoot, sequence: u64) -> Result<()> {
        let identity = self.identity(Kind::Root, root.index);
        let copy = self.write_copy(file, identity, sequence, root.copy, &root.body)?;
        if let Some(block) = self.root[root.index as usize].get() {
            block.copy.store(copy, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Page `index` for a scan of all pages, bypassing the cache; `None` if no page is stored.
    pub(super) fn survey(&self, file: &AlignedFile, index: u32) -> Result<Option<Arc<RunList>>> {
        if self.state(index) != PageState::Stored {
            return Ok(None);
        }
        if let Some(list) = self.pages.peek(index) {
            return Ok(Some(list));
        }
        match self.load(file, index) {
            // Meanwhile the page may have been changed, and a checkpoint may have written one of its copies during the
            // read. So the page is read again while no checkpoint writes it.
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.pages.peek_or_load(index, || self.load(file, index)).map(Some)
            }
            loaded => Ok(Some(Arc::new(loaded?))),
        }
    }
}

const _: () = assert!(PAGE_GRAINS <= crate::runs::ENTRIES_MAX as u64);
