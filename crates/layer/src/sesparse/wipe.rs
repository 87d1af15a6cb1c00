//! Wiping: finds grains that no table names, or that contain only zeros, and frees them.
//!
//! Which grains the tables name is known only after all tables were read, and guests write meanwhile. So the bitmap is
//! compared with a [`Census`], which may count too many grains but never too few. It counts the grains that the tables
//! name when the walk reads them, and all that were allocated, entered or dropped since the census began. At the start
//! of the census, retired grains that are not free yet are counted, and the wipe waits for writers that have allocated
//! grains and not entered them. So an allocated grain that is not in the census belongs to no entry.
//!
//! The census covers one window of the grain area at a time, so that its memory does not depend on the disk's size.
//!
//! In an image that another program wrote last, the bitmap is not used until a wipe has completed: new grains come only
//! from the end of the file. After the wipe, the mark states that lamina maintains the bitmap.

use super::SeSparse;
use super::cache::{Kind, PageBytes, PageKey};
use super::entry::{Entry, GRAIN, Grain, GrainRun, Owner, Table};
use super::header::{PAGE_BITS, PAGE_ENTRIES, TABLE_PAGES};
use super::maintain::Work;
use super::relocate::{Held, names};
use super::state::{LayerState, Step, backmap_page, bitmap_page, table_page};
use super::touched::Touched;
use crate::{IoContext, Result};
use backend::{BLOCK_SIZE, Buffer};
use std::ops::Range;
use work::Progress;

/// Grains per window: 512 GiB of data, 32 MiB of memory.
const WINDOW: u64 = 1 << 27;
/// Tables examined per step.
const TABLES_PER_STEP: u64 = 16;

/// The result of a wipe, in grains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WipeReport {
    /// Grains that no table named, and that were freed.
    pub unnamed: u64,
    /// Grains that contained only zeros, and were freed.
    pub zeros: u64,
    /// Grains that a table named although they were free in the bitmap, and that were marked as allocated.
    pub repaired: u64,
}

/// A set of grains in a window.
pub(super) struct GrainSet {
    window: Range<u64>,
    words: Vec<u64>,
}

impl GrainSet {
    pub(super) fn new(window: Range<u64>) -> Self {
        let words = vec![0; (window.end - window.start).div_ceil(64) as usize];
        Self { window, words }
    }

    fn contains(&self, grain: u64) -> bool {
        self.window.contains(&grain) && self.word(grain / 64 * 64) >> (grain % 64) & 1 == 1
    }

    /// The range of grains that the set covers.
    pub(super) fn window(&self) -> Range<u64> {
        self.window.clone()
    }

    /// Adds a grain; returns true if it is in the window and was in the set before.
    pub(super) fn insert(&mut self, grain: u64) -> bool {
        if !self.window.contains(&grain) {
            return false;
        }
        let bit = grain - self.window.start;
        let word = &mut self.words[(bit / 64) as usize];
        let before = *word >> (bit % 64) & 1 == 1;
        *word |= 1 << (bit % 64);
        before
    }

    /// The bits of 64 grains from `first` on, which is a multiple of 64.
    pub(super) fn word(&self, first: u64) -> u64 {
        let bit = first.wrapping_sub(self.window.start);
        self.words.get((bit / 64) as usize).copied().unwrap_or(0)
    }
}

/// Grains of a window that were allocated, entered or dropped since the census began, or retired before and not free
/// yet. For all others, tables, bitmap and backmap do not change during the census.
pub(super) struct Census {
    accounted: GrainSet,
}

impl Census {
    /// Counts grains that may belong to an entry, even if no table names them yet.
    pub(super) fn account(&mut self, run: GrainRun) {
        for grain in run.start..run.end() {
            self.accounted.insert(grain);
        }
    }

    pub(super) fn contains(&self, grain: u64) -> bool {
        self.accounted.contains(grain)
    }

    /// The bits of 64 grains from `first` on, which is a multiple of 64.
    pub(super) fn word(&self, first: u64) -> u64 {
        self.accounted.word(first)
    }
}

/// Ranges of the file with data: tables in holes need not be read.
#[derive(Default)]
pub(super) struct Holes {
    /// The first range with data in `searched`; `None` if there is none. What precedes it in `searched` is a hole.
    known: Option<Range<u64>>,
    /// The range that was searched last.
    searched: Range<u64>,
    /// The number of commits with pages at the time when the ranges were read.
    settled: u64,
}

impl Holes {
    /// Drops the ranges if a commit has written pages: a table in a hole may have been written and evicted since.
    fn renew(&mut self, settled: u64) {
        if self.settled != settled {
            *self = Self { settled, ..Self::default() };
        }
    }

    /// Whether a range of the file is a hole.
    pub(super) fn contain(&mut self, file: &dyn backend::File, range: Range<u64>) -> std::io::Result<bool> {
        if range.start < self.searched.start || range.end > self.searched.end {
            self.known = file.next_allocated(range.start)?;
            let end = self.known.as_ref().map_or(u64::MAX, |known| known.end);
            self.searched = range.start..end.max(range.end);
            if end < range.end {
                // More data may follow within the range, but another query would cost more than it saves.
                return Ok(false);
            }
        }
        Ok(self.known.as_ref().is_none_or(|known| range.end <= known.start))
    }
}

impl SeSparse {
    /// Frees grains that no table names and, with `zeros`, also grains that contain only zeros; their entries become
    /// zero entries. Guests may be active. When cancelled, fails with [`crate::ErrorKind::Interrupted`]; the grains
    /// freed so far remain free.
    pub fn wipe(&self, zeros: bool, progress: &dyn Progress) -> Result<WipeReport> {
        let mut work = self.begin_work(progress, "wiping")?;
        self.check_changeable()?;
        let mut report = WipeReport::default();
        let windows = self.state.lock().space.fresh.div_ceil(WINDOW);
        work.expect(self.layout.slots() * (windows + u64::from(zeros)));
        if zeros {
            self.wipe_zeros(&mut work, &mut report)?;
        }
        let mut window = 0..WINDOW;
        while window.start < self.state.lock().space.fresh {
            let counted = self.wipe_window(window.clone(), &mut work, &mut report);
            self.state.lock().census = None;
            counted?;
            window = window.end..window.end + WINDOW;
        }
        // The first commit writes the corrections and frees the dropped grains; the second writes the bitmap after
        // that. The mark states that bitmap and backmap are right, so it must not be durable before they are.
        self.commit_at_once()?;
        {
            let mut state = self.state.lock();
            if state.touched.is_none() {
                state.touched = Some(Touched::new(self.layout.grains_max()));
                state.mark_dirty = true;
            }
            state.suspect = None;
            state.space.search_again();
        }
        self.commit_at_once()?;
        Ok(report)
    }

    fn wipe_window(&self, window: Range<u64>, work: &mut Work, report: &mut WipeReport) -> Result<()> {
        let counted = {
            let end = window.end.min(self.state.lock().readable.max(window.start));
            window.start..end.next_multiple_of(64)
        };
        let mut named = GrainSet::new(counted.clone());
        self.begin_census(counted);
        let others_wrote = self.state.lock().touched.is_none();
        // From here on all new grains are counted, and writers that allocated grains earlier have entered them.
        drop(self.announce(&[], work)?);
        // If too many grains wait to be freed, further dropped grains are recorded nowhere. Such grains may be freed
        // only after the tables that no longer name them are durable.
        self.commit_at_once()?;
        let mut holes = Holes::default();
        let (slots, mut slot) = (self.layout.slots(), 0);
        while slot < slots {
            let begun = slot;
            for _ in 0..TABLES_PER_STEP {
                slot = self.next_slot(slot)?;
                if slot >= slots {
                    break;
                }
                if let Some((table, content)) = self.read_table(slot, &mut holes)? {
                    work.moved(TABLE_PAGES * BLOCK_SIZE as u64);
                    self.settle(|state| count(state, &mut named, slot, &content, others_wrote))?;
                    if others_wrote {
                        self.adopt(table, &content)?;
                    }
                }
                slot += 1;
            }
            work.step(slot.min(slots) - begun)?;
        }
        let end = self.state.lock().readable.min(self.layout.grains_max()).min(window.end);
        for page in window.start / PAGE_BITS..end.div_ceil(PAGE_BITS) {
            self.settle(|state| {
                let Some(census) = state.census.take() else { return Ok(()) };
                let swept = sweep(state, &named, &census, page, report);
                state.census = Some(census);
                swept
            })?;
            work.moved(BLOCK_SIZE as u64);
            work.step(0)?;
        }
        Ok(())
    }

    /// Begins a census of a window. Grains that were allocated before and are not entered yet are counted only when
    /// they are entered.
    pub(super) fn begin_census(&self, window: Range<u64>) {
        let mut census = Census { accounted: GrainSet::new(window) };
        // While the turn to commit is held, no retired grain is being freed.
        let _no_commit = self.commits.turn();
        let mut state = self.state.lock();
        for run in state.retirement.waiting() {
            census.account(run.into());
        }
        state.census = Some(census);
    }

    /// The first slot in use from `from` on, or the first slot of the next directory page: usually most of a disk is
    /// unused.
    pub(super) fn next_slot(&self, from: u64) -> Result<u64> {
        let slots = self.layout.slots();
        if from >= slots {
            return Ok(slots);
        }
        self.settle(|state| {
            let (page, index) = (from / PAGE_ENTRIES, from % PAGE_ENTRIES);
            let bytes = state.page(PageKey::new(Kind::Directory, page))?;
            let unused = bytes.words_from(index as usize).take_while(|raw| *raw == 0).count() as u64;
            Ok((from + unused).min(slots))
        })
    }

    /// Sets `slot` to the next slot in use, and counts the skipped ones as done; returns false if there is none.
    pub(super) fn find_slot(&self, slot: &mut u64, work: &mut Work<'_, '_>) -> Result<bool> {
        while *slot < self.layout.slots() {
            let begun = std::mem::replace(slot, self.next_slot(*slot)?);
            if *slot == begun {
                return Ok(true);
            }
            work.step(*slot - begun)?;
        }
        Ok(false)
    }

    /// The table of a slot and its content, from memory or from the file. `None` if the slot names no table, or if the
    /// table is a hole of the file.
    pub(super) fn read_table(&self, slot: u64, holes: &mut Holes) -> Result<Option<(Table, Vec<PageBytes>)>> {
        let Some(table) = self.settle(|state| state.table_of(slot))? else { return Ok(None) };
        // Memory is checked before the file: a page that is not in memory is current in the file until it is loaded.
        let cached: Vec<Option<PageBytes>> = {
            let state = self.state.lock();
            holes.renew(state.settled);
            let keys = (0..TABLE_PAGES).map(|page| table_page(table, page * PAGE_ENTRIES));
            keys.map(|key| state.cache.peek(key).cloned()).collect()
        };
        let offset = self.page_offset(table_page(table, 0));
        let mut buffer = Buffer::zeroed(TABLE_PAGES as usize);
        if cached.iter().any(Option::is_none) {
            let range = offset..offset + buffer.len() as u64;
            let hole = holes.contain(&*self.file, range);
            if !hole.during(|| format!("looking for holes in {}", self.name))? || !self.overlay.is_empty() {
                self.read_metadata(&mut buffer, offset)?;
            } else if cached.iter().all(Option::is_none) {
                return Ok(None);
            }
        }
        let read = buffer.chunks_exact(BLOCK_SIZE);
        let pages = cached.into_iter().zip(read);
        Ok(Some((
            table,
            pages.map(|(cached, read)| cached.unwrap_or_else(|| PageBytes::new(Buffer::copy_of(read)))).collect(),
        )))
    }

    /// Sets the owners in the backmap to match a table. Another program may have used the backmap's entries in another
    /// way.
    fn adopt(&self, table: Table, content: &[PageBytes]) -> Result<()> {
        for (entry, raw) in (0..).zip(content.iter().flat_map(PageBytes::words)) {
            let Some(Entry::Data(grain)) = Entry::decode(raw) else { continue };
            let owner = Owner { table, entry };
            self.settle(|state| {
                state.need_no_commit()?;
                if names(state, owner, grain)? && state.owner(grain.0)? != Some(owner) {
                    state.need_backed(backmap_page(grain.0))?;
                    state.set_owner(grain.0, Some(owner));
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Frees grains that contain only zeros.
    fn wipe_zeros(&self, work: &mut Work, report: &mut WipeReport) -> Result<()> {
        let mut slot = 0;
        while self.find_slot(&mut slot, work)? {
            for page in 0..TABLE_PAGES {
                let held = self.settle(|state| held_by_page(state, slot, page))?;
                if held.is_empty() {
                    continue;
                }
                let zeros = self.holding_zeros(&held)?;
                work.moved(held.len() as u64 * GRAIN);
                if !zeros.is_empty() {
                    let _announced = self.announce(&zeros, work)?;
                    // The grains are read again, because a guest may have written to them before they were announced.
                    for held in self.holding_zeros(&zeros)? {
                        report.zeros += u64::from(self.repoint(held, Entry::Zero)?);
                    }
                }
                work.step(0)?;
            }
            slot += 1;
            work.step(1)?;
        }
        Ok(())
    }

    /// The grains among `held` that contain only zeros.
    fn holding_zeros(&self, held: &[Held]) -> Result<Vec<Held>> {
        let content = self.read_grains(held)?;
        let is_zero = |grain: &[u8]| grain.as_chunks::<64>().0.iter().all(|part| *part == [0; 64]);
        let grains = held.iter().zip(content.chunks_exact(GRAIN as usize));
        Ok(grains.filter(|(_, grain)| is_zero(grain)).map(|(held, _)| *held).collect())
    }
}

/// The grains that a page of a table names, in the order of the disk.
fn held_by_page(state: &mut LayerState, slot: u64, page: u64) -> Step<Vec<Held>> {
    let Some(table) = state.table_of(slot)? else { return Ok(Vec::new()) };
    let first = page * PAGE_ENTRIES;
    let words = state.page(table_page(table, first))?;
    let mut held = Vec::new();
    for (entry, raw) in (first..).zip(words.words()) {
        if let Entry::Data(grain) = state.decode(raw)? {
            held.push(Held { grain, owner: Owner { table, entry: entry as u16 } });
        }
    }
    Ok(held)
}

fn count(state: &LayerState, named: &mut GrainSet, slot: u64, content: &[PageBytes], others_wrote: bool) -> Step<()> {
    for raw in content.iter().flat_map(PageBytes::words) {
        if let Entry::Data(Grain(grain)) = state.decode(raw)?
            && named.insert(grain)
            && others_wrote
        {
            return Err(state.corrupt(&format!("grain {grain} is named twice, once by table slot {slot}")));
        }
    }
    Ok(())
}

/// Frees the grains of a bitmap page that are allocated and not in the census.
fn sweep(state: &mut LayerState, named: &GrainSet, census: &Census, page: u64, report: &mut WipeReport) -> Step<()> {
    state.need_no_commit()?;
    let bytes = state.page(PageKey::new(Kind::Bitmap, page))?;
    let end = state.layout.grains_max().min(named.window.end);
    let mut dead: Vec<GrainRun> = Vec::new();
    let mut unmarked: Vec<u64> = Vec::new();
    for (first, bits) in (page * PAGE_BITS..end).step_by(64).zip(bytes.words()) {
        let (named, accounted) = (named.word(first), census.word(first));
        let mut lost = bits & !(named | accounted);
        // Grains that changed since the census began may be free by now. Only a grain that a table names and that did
        // not change must be allocated.
        let mut missing = named & !bits & !accounted;
        while lost != 0 {
            let grain = first + u64::from(lost.trailing_zeros());
            lost &= lost - 1;
            match dead.last_mut() {
                Some(run) if run.end() == grain => run.count += 1,
                _ => dead.push(GrainRun { start: grain, count: 1 }),
            }
        }
        while missing != 0 {
            unmarked.push(first + u64::from(missing.trailing_zeros()));
            missing &= missing - 1;
        }
    }
    for run in &dead {
        for index in backmap_page(run.start).index()..=backmap_page(run.end() - 1).index() {
            state.need(PageKey::new(Kind::Backmap, index))?;
        }
    }
    if !unmarked.is_empty() {
        state.need_backed(bitmap_page(page * PAGE_BITS))?;
    }
    for run in dead {
        state.release(run)?;
        report.unnamed += run.count;
    }
    for grain in unmarked {
        state.set_bits(GrainRun { start: grain, count: 1 }, true)?;
        report.repaired += 1;
    }
    Ok(())
}

const _: () = assert!(WINDOW.is_multiple_of(PAGE_BITS));
