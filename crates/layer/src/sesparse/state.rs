//! The state of the layer in memory, behind one lock that is never held during I/O.
//!
//! Work on the state is a closure that may run several times: if it lacks a page, it returns a [`Need`] before it has
//! changed anything. [`super::SeSparse::settle`] then releases the lock, fetches what is needed, and runs the closure
//! again.

use super::cache::{Cache, Kind, PageBytes, PageKey};
use super::entry::{Entry, Grain, GrainRun, Owner, Table, decode_slot, encode_slot};
use super::header::{Layout, PAGE_BITS, PAGE_ENTRIES, TABLE_PAGES, Volatile};
use super::recover::NamedTables;
use super::space::{Choice, Space};
use super::touched::Touched;
use super::wipe::Census;
use crate::retirement::Retirement;
use crate::{Error, ErrorKind};
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;
use std::sync::Arc;

/// The most runs of retired grains. Further grains stay allocated until the image is opened again.
pub(super) const RETIRED_RUNS_MAX: usize = if cfg!(test) { 1 << 12 } else { 1 << 20 };

/// The number of runs of retired grains at which a commit is due, far below the limit.
const FREED_MAX: usize = RETIRED_RUNS_MAX / 16;

/// The most grains that are examined in one step for an owner although the bitmap marks them as free: each may need a
/// page of a table.
const OWNERS_MAX: usize = 64;

/// What a closure that works on the state lacks, so that it must run again.
pub(super) enum Need {
    /// A page in memory.
    Page(PageKey),
    /// Space in the file for a page of zeros.
    Room(PageKey),
    /// Space in the file for a new table.
    TableRoom(Table),
    /// A longer file.
    Growth,
    /// A commit: too many pages are dirty, or too many grains freed.
    Commit,
    /// A free grain. A commit may free some, but only after the caller has released its epoch.
    Full,
    /// The work failed.
    Failed(Error),
}

impl From<Error> for Need {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The result of one attempt.
pub(super) type Step<T> = std::result::Result<T, Need>;

/// The data that the lock protects.
pub(super) struct LayerState {
    pub name: Arc<str>,
    pub layout: Layout,
    pub cache: Cache,
    pub space: Space,
    pub header: Volatile,
    pub header_dirty: bool,
    /// Tables that were allocated and that no slot names.
    pub spare_tables: Vec<Table>,
    /// Tables for which there is space in the file.
    pub table_room: Range<u32>,
    /// Regions marked in this opening or in earlier ones; `None` while the bitmap cannot be relied on.
    pub touched: Option<Touched>,
    /// Whether the next commit has to write the mark, changed or not.
    pub mark_dirty: bool,
    /// Marked regions of earlier openings that were not recounted.
    pub suspect: Option<Touched>,
    pub retirement: Retirement,
    /// Grains being moved; true if a write has disturbed one.
    pub moving: FxHashMap<Grain, bool>,
    pub census: Option<Census>,
    /// The number of grains in the file: an entry for a later grain is damaged.
    pub readable: u64,
    /// Pages that are being read, each with the number of its read. Allocating a table removes its pages.
    pub loading: FxHashMap<PageKey, u64>,
    /// The number of reads so far.
    pub loads: u64,
    /// A known hole of the file per kind of page: pages in it are zeros and need not be read. Pages that a commit
    /// writes are removed from the hole before they may be evicted.
    pub holes: [Range<u64>; Kind::ALL],
    /// The number of commits that have written pages: what was recorded about holes before the last of them may be out
    /// of date.
    pub settled: u64,
    /// Tables that two directory slots name: one slot is wrong, and it is not proven which.
    pub shared_tables: FxHashSet<Table>,
    /// Tables that slots name, kept while the image is open for writing. Other tables may have content from before a
    /// crash.
    pub named_tables: NamedTables,
    /// Tables that directory slots named when the image was opened, although the tables were not allocated.
    pub uncounted_tables: FxHashSet<Table>,
}

impl LayerState {
    pub(super) fn corrupt(&self, what: &str) -> Need {
        Need::Failed(Error::new(ErrorKind::Corrupt, format!("{}: {what}; check the image", self.name)))
    }

    /// Requires a page to be in memory.
    #[inline]
    pub(super) fn need(&self, key: PageKey) -> Step<()> {
        if self.cache.contains(key) { Ok(()) } else { Err(Need::Page(key)) }
    }

    /// Requires a page that can be written without an allocation in the file system.
    pub(super) fn need_backed(&self, key: PageKey) -> Step<()> {
        match self.cache.is_backed(key) {
            Some(true) => Ok(()),
            Some(false) => Err(Need::Room(key)),
            None => Err(Need::Page(key)),
        }
    }

    /// Word `index` of a page.
    #[inline]
    pub(super) fn word(&mut self, key: PageKey, index: usize) -> Step<u64> {
        self.cache.get(key).map(|page| page.word(index)).ok_or(Need::Page(key))
    }

    /// Requires that no commit is due. Must not be called in the middle of a change, because the closure would run
    /// again.
    pub(super) fn need_no_commit(&self) -> Step<()> {
        let pressed = self.cache.is_pressed() || self.retirement.open().len() > FREED_MAX;
        if pressed { Err(Need::Commit) } else { Ok(()) }
    }

    /// The table that directory slot `slot` names.
    #[inline]
    pub(super) fn table_of(&mut self, slot: u64) -> Step<Option<Table>> {
        let raw = self.word(PageKey::new(Kind::Directory, slot / PAGE_ENTRIES), (slot % PAGE_ENTRIES) as usize)?;
        match decode_slot(raw) {
            Some(None) => Ok(None),
            Some(Some(table)) if self.shared_tables.contains(&table) => {
                Err(self
                    .corrupt(&format!("slot {slot} of the grain directory and another slot name table {}", table.0)))
            }
            Some(Some(table)) if u64::from(table.0) < self.layout.tables_max() => Ok(Some(table)),
            _ => Err(self.corrupt(&format!("slot {slot} of the grain directory is {raw:#018x}"))),
        }
    }

    /// The table of `slot`, which is allocated if there is none.
    pub(super) fn table_for_change(&mut self, slot: u64) -> Step<Table> {
        if let Some(table) = self.table_of(slot)? {
            return Ok(table);
        }
        let directory = PageKey::new(Kind::Directory, slot / PAGE_ENTRIES);
        self.need_backed(directory)?;
        let next = u32::try_from(self.header.free_table).ok().map(Table);
        let table = match self.spare_tables.last().copied().or(next) {
            Some(table) if u64::from(table.0) < self.layout.tables_max() => table,
            _ => return Err(self.corrupt("all grain tables are allocated")),
        };
        if !self.table_room.contains(&table.0) {
            return Err(Need::TableRoom(table));
        }
        self.named_tables.insert(table);
        // The directory page is changed only after all pages are loaded, so that loading cannot evict a dirty page.
        self.cache.set(directory, (slot % PAGE_ENTRIES) as usize, encode_slot(table));
        for page in 0..TABLE_PAGES {
            let key = table_page(table, page * PAGE_ENTRIES);
            self.loading.remove(&key);
            self.cache.insert_fresh(key);
        }
        if self.spare_tables.pop().is_none() {
            self.header.free_table += 1;
            self.header_dirty = true;
        }
        Ok(table)
    }

    /// Decodes an entry of a table.
    pub(super) fn decode(&self, raw: u64) -> Step<Entry> {
        match Entry::decode(raw) {
            Some(Entry::Data(grain)) if grain.0 >= self.readable => {
                Err(self.corrupt(&format!("a table names grain {}, the file ends at {}", grain.0, self.readable)))
            }
            Some(entry) => Ok(entry),
            None => Err(self.corrupt(&format!("a table entry is {raw:#018x}"))),
        }
    }

    /// Sets an entry of a table page that is in memory, and retires the grain that the entry named before.
    pub(super) fn set_entry(&mut self, owner: Owner, entry: Entry) -> Step<()> {
        let (key, index) = (table_page(owner.table, u64::from(owner.entry)), page_index(u64::from(owner.entry)));
        let before = Entry::decode(self.word(key, index)?);
        if let Entry::Data(grain) = entry {
            self.set_owner(grain.0, Some(owner));
            if let Some(census) = &mut self.census {
                census.account(GrainRun { start: grain.0, count: 1 });
            }
        }
        self.cache.set(key, index, entry.encode());
        // A damaged entry may name a grain after the end of the file, of which neither bit nor owner exist: freeing it
        // would change other bytes of the file.
        if let Some(Entry::Data(grain)) = before
            && Entry::Data(grain) != entry
            && grain.0 < self.readable
        {
            if !self.retirement.give_up(grain.0..grain.0 + 1) {
                // Too many grains wait: this grain stays allocated. The mark of its region is kept after closing, so
                // that the next opening finds the grain.
                for marks in [&mut self.touched, &mut self.suspect].into_iter().flatten() {
                    self.mark_dirty |= marks.insert(grain.0);
                }
            }
            if let Some(census) = &mut self.census {
                census.account(GrainRun { start: grain.0, count: 1 });
            }
        }
        Ok(())
    }

    /// Marks the regions of the grains that entries have dropped since the last batch of retired grains was closed.
    /// Called before a batch is closed, so that the next commit makes the mark durable before the tables without these
    /// grains.
    pub(super) fn mark_dropped(&mut self) {
        let Some(touched) = &mut self.touched else { return };
        for part in self.retirement.open().iter().flat_map(|run| by_bitmap_page(run.clone().into())) {
            self.mark_dirty |= touched.insert(part.start);
        }
    }

    /// Sets consecutive entries in one page of a table to consecutive grains. All pages needed are in memory.
    pub(super) fn set_entries(&mut self, first: Owner, run: GrainRun) -> Step<()> {
        let (key, index) = (table_page(first.table, u64::from(first.entry)), page_index(u64::from(first.entry)));
        let before = self.cache.get(key).ok_or(Need::Page(key))?.words_from(index).take(run.count as usize);
        if before.map(Entry::decode).any(|entry| matches!(entry, Some(Entry::Data(_)))) {
            // Another writer has entered grains for some of these entries first. The entries are set one by one, which
            // retires that writer's grains.
            for (entry, grain) in (first.entry..).zip(run.start..run.end()) {
                self.set_entry(Owner { entry, ..first }, Entry::Data(Grain(grain)))?;
            }
            return Ok(());
        }
        self.set_owners(run, Some(first));
        if let Some(census) = &mut self.census {
            census.account(run);
        }
        self.cache.set_all(key, index, (run.start..run.end()).map(|grain| Entry::Data(Grain(grain)).encode()));
        Ok(())
    }

    /// Sets the owners of grains: the first grain belongs to entry `first`, the others to the following entries. Their
    /// backmap pages are in memory.
    fn set_owners(&mut self, run: GrainRun, first: Option<Owner>) {
        let mut start = run.start;
        while start < run.end() {
            let end = (start / PAGE_ENTRIES + 1).saturating_mul(PAGE_ENTRIES).min(run.end());
            let owner = |grain: u64| {
                first.map_or(0, |first| Owner { entry: first.entry + (grain - run.start) as u16, ..first }.encode())
            };
            self.cache.set_all(backmap_page(start), page_index(start), (start..end).map(owner));
            start = end;
        }
    }

    /// Sets the owner of a grain. Its backmap page is in memory.
    pub(super) fn set_owner(&mut self, grain: u64, owner: Option<Owner>) {
        self.cache.set(backmap_page(grain), page_index(grain), owner.map_or(0, Owner::encode));
    }

    /// The owner of a grain according to the backmap.
    pub(super) fn owner(&mut self, grain: u64) -> Step<Option<Owner>> {
        Ok(Owner::decode(self.word(backmap_page(grain), page_index(grain))?))
    }

    /// Requires the backmap pages for grains of one bitmap page.
    pub(super) fn need_backmap(&self, run: GrainRun) -> Step<()> {
        let last = backmap_page(run.end().saturating_sub(1)).index();
        for index in backmap_page(run.start).index()..=last {
            self.need(PageKey::new(Kind::Backmap, index))?;
        }
        Ok(())
    }

    /// Allocates up to `want` consecutive grains, the first for grain `guest` of the disk.
    pub(super) fn claim(&mut self, guest: u64, want: u64) -> Step<GrainRun> {
        if let Some(page) = self.space.to_search() {
            self.search(page)?;
        }
        loop {
            let run = match self.space.set_aside(guest, want) {
                Choice::Run(run) => run,
                Choice::Growth => return Err(Need::Growth),
                Choice::Full => return Err(Need::Full),
            };
            let run = self.before_one_in_use(run)?;
            if run.count == 0 {
                // The bitmap is wrong for this grain: the bit is set, and the grain is skipped.
                self.set_bits(GrainRun { count: 1, ..run }, true)?;
                self.space.skip_aside(guest);
                continue;
            }
            let run = self.allocate(run)?;
            self.space.use_aside(guest, run.count);
            return Ok(run);
        }
    }

    /// Cuts a free run before a grain that backmap and table show to be in use, although the bitmap marks the grain as
    /// free. If that grain were allocated, two entries would name it.
    fn before_one_in_use(&mut self, run: GrainRun) -> Step<GrainRun> {
        let run = GrainRun { count: run.count.min(PAGE_BITS - run.start % PAGE_BITS), ..run };
        if self.touched.is_none() {
            return Ok(run);
        }
        self.need_backed(bitmap_page(run.start))?;
        let mut looked = 0;
        for grain in run.start..run.end() {
            let raw = self.word(backmap_page(grain), page_index(grain))?;
            let Some(owner) = Owner::decode(raw).filter(|owner| self.named_tables.contains(u64::from(owner.table.0)))
            else {
                continue;
            };
            if looked == OWNERS_MAX {
                return Ok(GrainRun { count: grain - run.start, ..run });
            }
            looked += 1;
            let entry = u64::from(owner.entry);
            let entry = self.word(table_page(owner.table, entry), page_index(entry))?;
            if Entry::decode(entry) == Some(Entry::Data(Grain(grain))) {
                let image = &*self.name;
                tracing::warn!(image, grain, "the bitmap marks a used grain as free; check the image");
                return Ok(GrainRun { count: grain - run.start, ..run });
            }
        }
        Ok(run)
    }

    /// Allocates a free run, up to the end of its bitmap page.
    pub(super) fn claim_run(&mut self, run: GrainRun) -> Step<GrainRun> {
        let run = self.before_one_in_use(run)?;
        if run.count == 0 {
            return Err(self.corrupt(&format!("grain {} is in use and free in the bitmap", run.start)));
        }
        let run = self.allocate(run)?;
        self.space.take(run);
        Ok(run)
    }

    /// Marks grains as allocated, up to the end of their bitmap page.
    fn allocate(&mut self, run: GrainRun) -> Step<GrainRun> {
        let run = GrainRun { count: run.count.min(PAGE_BITS - run.start % PAGE_BITS), ..run };
        self.need_backed(bitmap_page(run.start))?;
        for index in backmap_page(run.start).index()..=backmap_page(run.end() - 1).index() {
            self.need_backed(PageKey::new(Kind::Backmap, index))?;
        }
        self.set_bits(run, true)?;
        if let Some(census) = &mut self.census {
            census.account(run);
        }
        Ok(run)
    }

    /// Sets or clears bits of one page of the bitmap.
    pub(super) fn set_bits(&mut self, run: GrainRun, allocated: bool) -> Step<()> {
        let key = bitmap_page(run.start);
        let words = self.cache.edit(key).ok_or(Need::Page(key))?.as_chunks_mut::<8>().0;
        let (mut bit, end) = (run.start % PAGE_BITS, run.start % PAGE_BITS + run.count);
        while bit < end {
            let within = bit % 64;
            let count = (64 - within).min(end - bit);
            let mask = (u64::MAX >> (64 - count)) << within;
            if let Some(place) = words.get_mut((bit / 64) as usize) {
                let word = u64::from_le_bytes(*place);
                *place = if allocated { word | mask } else { word & !mask }.to_le_bytes();
            }
            bit += count;
        }
        Ok(())
    }

    /// Searches a page of the bitmap for free grains.
    pub(super) fn search(&mut self, page: u64) -> Step<()> {
        self.space.end_streams();
        let bytes = self.page(PageKey::new(Kind::Bitmap, page))?;
        let mut free: Option<GrainRun> = None;
        for (base, word) in (page * PAGE_BITS..).step_by(64).zip(bytes.words()) {
            let mut bit = 0;
            while bit < 64 {
                let start = bit + u64::from((word >> bit).trailing_ones());
                if start >= 64 {
                    break;
                }
                let count = u64::from((word >> start).trailing_zeros()).min(64 - start);
                bit = start + count;
                match &mut free {
                    Some(run) if run.end() == base + start => run.count += count,
                    _ => {
                        if let Some(run) = free.replace(GrainRun { start: base + start, count }) {
                            self.space.put(run);
                        }
                    }
                }
            }
        }
        if let Some(run) = free {
            self.space.put(run);
        }
        self.space.searched(self.space.fresh.div_ceil(PAGE_BITS));
        Ok(())
    }

    /// A copy of a page, so that it can be examined while the state changes.
    pub(super) fn page(&mut self, key: PageKey) -> Step<PageBytes> {
        self.cache.get(key).cloned().ok_or(Need::Page(key))
    }

    /// Frees grains of one bitmap page: no table names them and no reader uses them.
    pub(super) fn release(&mut self, run: GrainRun) -> Step<()> {
        self.need(bitmap_page(run.start))?;
        self.need_backmap(run)?;
        self.set_owners(run, None);
        self.set_bits(run, false)?;
        if self.touched.is_some() {
            self.space.put(run);
        }
        Ok(())
    }

    /// Frees grains that were allocated and not used.
    pub(super) fn give_back(&mut self, run: GrainRun) -> Step<()> {
        self.set_bits(run, false)?;
        if !self.space.put_last(run) && self.touched.is_some() {
            self.space.put(run);
        }
        Ok(())
    }
}

/// The page of a table with entry `entry`.
#[inline]
pub(super) fn table_page(table: Table, entry: u64) -> PageKey {
    PageKey::new(Kind::Table, u64::from(table.0) * TABLE_PAGES + entry / PAGE_ENTRIES)
}

#[inline]
pub(super) fn page_index(entry: u64) -> usize {
    (entry % PAGE_ENTRIES) as usize
}

pub(super) fn backmap_page(grain: u64) -> PageKey {
    PageKey::new(Kind::Backmap, grain / PAGE_ENTRIES)
}

pub(super) fn bitmap_page(grain: u64) -> PageKey {
    PageKey::new(Kind::Bitmap, grain / PAGE_BITS)
}

/// Splits a run at the boundaries of bitmap pages.
pub(super) fn by_bitmap_page(run: GrainRun) -> impl Iterator<Item = GrainRun> {
    let mut start = run.start;
    std::iter::from_fn(move || {
        let count = (PAGE_BITS - start % PAGE_BITS).min(run.end().saturating_sub(start));
        start += count;
        (count > 0).then(|| GrainRun { start: start - count, count })
    })
}
