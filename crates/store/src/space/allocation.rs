//! Allocation: uses bitmaps in memory, which are built from the table when a region is first needed.

use super::region::{self, Bitmaps, REGION_BLOCKS, REGION_PAGES};
use super::table::{self, TABLE_ENTRIES};
use super::{Run, Space, SpaceKind};
use crate::pages::{PageFile, PageKey, Pages};
use crate::{Error, ErrorKind, Result, is_lost};

/// The most regions with bitmaps in memory (4 KiB each). Few in tests, so that the limit is reached.
pub(super) const LOADED_REGIONS_MAX: usize = if cfg!(test) { 8 } else { 4096 };
/// The shortest run that the first search accepts, in blocks (64 KiB). Shorter runs are used only after a search has
/// found no such run.
pub(super) const GOOD_RUN: u64 = 16;
/// Regions surveyed for a search for free blocks, and searched for a run that may exist nowhere. Other searches rarely
/// need more.
pub(super) const SEARCH_REGIONS: u64 = if cfg!(test) { 4 } else { 64 };
/// The most entries of `Space::grown`. Further runs that have grown to [`GOOD_RUN`] blocks are allocated when the
/// search for any free block reaches them.
const GROWN_MAX: usize = 256;

/// Whether a search has excluded a region because the medium could not read its table. A search excludes at most one
/// such region, and fails at the next one: otherwise one search during a short failure of the whole medium would take
/// all regions out of use. Damaged regions are passed over without limit, because no later read of them succeeds.
#[derive(Default)]
pub struct UnreadRegion(bool);

impl Space {
    /// Sets or clears `used` bits in those bitmaps that are in memory, and updates the free count.
    pub(super) fn mark(&mut self, run: Run, used: bool) {
        for (number, first, count) in region::parts(run) {
            let region = &mut self.regions[number as usize];
            let before = region.estimate();
            if let Some(bitmaps) = &mut region.bitmaps {
                bitmaps.set_used(first, count, used);
                self.counts.free = self.counts.free + region.estimate() - before;
            }
            if !used {
                region.review(first, count);
            }
        }
    }

    pub(super) fn load(&mut self, pages: &mut Pages, number: u64) -> Result<()> {
        let region = &self.regions[number as usize];
        if region.damaged {
            return Err(lost(self.table, number));
        }
        if region.bitmaps.is_some() {
            return Ok(());
        }
        if pages.is_deferring() {
            // Records all missing pages in one pass.
            self.survey_region(pages, number);
        }
        let mut bitmaps = Box::new(Bitmaps::new());
        let mut backed_count = 0;
        let base = number * REGION_BLOCKS;
        for page in 0..REGION_PAGES {
            let key = PageKey::new(self.table, number * REGION_PAGES + page);
            let page_bytes = pages.get(key)?;
            for index in 0..TABLE_ENTRIES {
                let entry = table::read(page_bytes, index as usize);
                let block = page * TABLE_ENTRIES + index;
                if entry.references > 0 {
                    bitmaps.set_used(block, 1, true);
                }
                let backed = match self.kind {
                    SpaceKind::Data => entry.backed,
                    SpaceKind::Map => base + block < self.backed_length,
                };
                if backed {
                    bitmaps.set_backed(block, 1, true);
                    backed_count += 1;
                }
            }
        }
        if self.loaded >= LOADED_REGIONS_MAX {
            self.unload_some();
        }
        let region = &mut self.regions[number as usize];
        let before = region.estimate();
        let known = (u64::from(region.used), u64::from(region.backed));
        let counted = (bitmaps.used(), backed_count);
        if counted.0 < known.0 || counted.1 < known.1 {
            // Pages of the table are lost: their blocks must not count as free.
            region.damaged = true;
            self.counts.free -= before;
            return Err(lost(self.table, number));
        }
        if known != counted {
            // A lost summary is rebuilt from the table (invariant 3).
            tracing::warn!(
                region = number,
                file = self.summary.name(),
                ?known,
                ?counted,
                "a wrong summary is corrected from the table"
            );
            (region.used, region.backed) = (counted.0 as u16, counted.1 as u16);
            region.forget_bounds();
            self.counts.used = self.counts.used + counted.0 - known.0;
            self.counts.backed = self.counts.backed + counted.1 - known.1;
            self.dirty_regions.insert(number);
        }
        self.counts.free = self.counts.free + bitmaps.free() - before;
        (region.bitmaps, region.unreadable) = (Some(bitmaps), false);
        self.loaded += 1;
        Ok(())
    }

    /// How many blocks of a region its counts have and its table lacks, used ones or those with space, and how many
    /// pages of its table cannot be read. The table of an undamaged region lacks none.
    pub fn missing_in(&self, pages: &mut Pages, number: u64) -> Result<(u64, u64)> {
        let Some(region) = self.regions.get(number as usize) else { return Ok((0, 0)) };
        let counts_backed = self.kind == SpaceKind::Data;
        if region.used == 0 && (region.backed == 0 || !counts_backed) {
            return Ok((0, 0));
        }
        if pages.is_deferring() {
            // Records all missing pages in one pass.
            for page in 0..REGION_PAGES {
                pages.peek(PageKey::new(self.table, number * REGION_PAGES + page));
            }
        }
        let (mut used, mut backed, mut unread) = (0, 0, 0);
        for page in number * REGION_PAGES..(number + 1) * REGION_PAGES {
            match pages.get(PageKey::new(self.table, page)) {
                Ok(page) => {
                    for index in 0..TABLE_ENTRIES as usize {
                        let entry = table::read(page, index);
                        used += u64::from(entry.references > 0);
                        backed += u64::from(entry.backed);
                    }
                }
                Err(error) if is_lost(&error) => unread += 1,
                Err(error) => return Err(error),
            }
        }
        let backed = if counts_backed { u64::from(region.backed).saturating_sub(backed) } else { 0 };
        Ok((u64::from(region.used).saturating_sub(used).max(backed), unread))
    }

    /// The error of a damaged or unreadable region, if there is one. Such a region is the reason why fewer blocks are
    /// free than the file system has allocated.
    pub fn damage(&self) -> Option<Error> {
        let found = (0..).zip(&self.regions).find(|(_, region)| region.is_lost());
        found.map(|(number, region)| if region.damaged { lost(self.table, number) } else { unread(self.table, number) })
    }

    /// Loads a region to allocate from it. False if the region is damaged or unreadable and has to be skipped.
    pub(super) fn load_whole(&mut self, pages: &mut Pages, number: u64, unread: &mut UnreadRegion) -> Result<bool> {
        if self.regions[number as usize].is_lost() {
            return Ok(false);
        }
        match self.load(pages, number) {
            Err(error) if is_lost(&error) => self.pass_over(number, error, unread),
            other => other.map(|()| true),
        }
    }

    /// Excludes a region from allocation, so that a search continues without it. Fails with `error` instead if the
    /// search has excluded an unreadable region before.
    fn pass_over(&mut self, number: u64, error: Error, unread: &mut UnreadRegion) -> Result<bool> {
        if error.kind() == ErrorKind::Io {
            if unread.0 {
                return Err(error);
            }
            unread.0 = true;
        }
        self.lose(number, &error);
        Ok(false)
    }

    /// Excludes a region from allocation, because a part of its table is lost. Bitmaps in memory stay and are updated,
    /// because they also have allocations and releases of blocks that the table does not show yet.
    fn lose(&mut self, number: u64, error: &Error) {
        tracing::error!(%error, region = number, "a region is not used for allocation: its table is lost");
        let region = &mut self.regions[number as usize];
        self.counts.free -= region.estimate();
        self.losses += u64::from(!region.is_lost());
        region.lose(error);
    }

    /// How many times a region was excluded from allocation because its table was lost. If the number has increased
    /// during a change that failed, another attempt uses other regions.
    pub fn losses(&self) -> u64 {
        self.losses
    }

    /// Fails if the table entry of a block in a run cannot be read, and excludes the region from allocation if the page
    /// is lost. The bitmaps of the region may be in memory although the page is not.
    pub fn check_entries(&mut self, pages: &mut Pages, run: Run) -> Result<()> {
        self.read_entries(pages, run).map_err(|(region, error)| {
            if is_lost(&error) {
                self.lose(region, &error);
            }
            error
        })
    }

    /// Whether all table entries of a run can be read. If they cannot, the search that calls this skips the region.
    pub(super) fn has_entries(&mut self, pages: &mut Pages, run: Run, unread: &mut UnreadRegion) -> Result<bool> {
        match self.read_entries(pages, run) {
            Err((region, error)) if is_lost(&error) => self.pass_over(region, error, unread),
            other => other.map(|()| true).map_err(|(_, error)| error),
        }
    }

    /// Reads the table entries of a run. An error comes with the region whose entries cannot be read.
    fn read_entries(&self, pages: &mut Pages, run: Run) -> std::result::Result<(), (u64, Error)> {
        for page in run.start / TABLE_ENTRIES..(run.start + run.blocks).div_ceil(TABLE_ENTRIES) {
            pages.get(PageKey::new(self.table, page)).map_err(|error| (page / REGION_PAGES, error))?;
        }
        Ok(())
    }

    /// Reads the table entries of the next blocks that allocations of single blocks will return. If an entry of a
    /// region is lost, excludes the region from allocation and continues with the next one ([`UnreadRegion`]).
    pub fn check_next(&mut self, pages: &mut Pages, blocks: u64) -> Result<()> {
        let (count, mut unread) = (self.regions(), UnreadRegion::default());
        let (start, mut from) = (self.cursor / REGION_BLOCKS, self.cursor % REGION_BLOCKS);
        let mut left = blocks;
        for step in 0..=count {
            let number = if count == 0 { return Ok(()) } else { (start + step) % count };
            let left_before = left;
            while left > 0
                && self.regions[number as usize].estimate() > 0
                && self.load_whole(pages, number, &mut unread)?
            {
                let bitmaps = self.regions[number as usize].bitmaps.as_ref().expect("loaded above");
                let Some((first, found)) = bitmaps.find_free(from, 1, left) else { break };
                let run = Run { start: number * REGION_BLOCKS + first, blocks: found };
                left = if self.has_entries(pages, run, &mut unread)? { left - found } else { left_before };
                from = first + found;
            }
            if left == 0 {
                return Ok(());
            }
            from = 0;
        }
        Ok(())
    }

    /// Makes a lost region with bitmaps in memory available for allocation again, if its whole table can be read.
    pub(super) fn regain(&mut self, pages: &mut Pages, number: u64) -> Result<()> {
        let table = number * REGION_PAGES..(number + 1) * REGION_PAGES;
        if pages.is_deferring() {
            // Records all missing pages in one pass.
            for page in table.clone() {
                pages.peek(PageKey::new(self.table, page));
            }
        }
        for page in table {
            pages.get(PageKey::new(self.table, page))?;
        }
        let region = &mut self.regions[number as usize];
        (region.damaged, region.unreadable) = (false, false);
        self.counts.free += region.estimate();
        Ok(())
    }

    /// The regions with a table that the medium could not read.
    pub fn unreadable(&self) -> Vec<u64> {
        (0..).zip(&self.regions).filter(|(_, region)| region.unreadable).map(|(number, _)| number).collect()
    }

    /// Reads the table of an unreadable region again. If that succeeds, its blocks can be allocated.
    pub fn load_again(&mut self, pages: &mut Pages, number: u64) -> Result<()> {
        let region = &self.regions[number as usize];
        if region.unreadable && !region.damaged && region.bitmaps.is_some() {
            return self.regain(pages, number);
        }
        self.load(pages, number)
    }

    /// Removes bitmaps that can be rebuilt from the table.
    fn unload_some(&mut self) {
        let mut give_up = LOADED_REGIONS_MAX / 8;
        for region in &mut self.regions {
            let Some(bitmaps) = region.bitmaps.as_ref().filter(|_| !region.is_lost()) else { continue };
            if bitmaps.used() == u64::from(region.used) {
                let estimate = u64::from(region.backed.saturating_sub(region.used));
                self.counts.free = self.counts.free + estimate - bitmaps.free();
                region.bitmaps = None;
                self.loaded -= 1;
                give_up -= 1;
                if give_up == 0 {
                    return;
                }
            }
        }
    }

    /// Allocates a contiguous run of up to `want` free backed blocks. `None` if none are free. The run stays marked as
    /// used until [`Space::adopt`] or [`Space::release`]. Fails if the tables of two regions cannot be read
    /// ([`UnreadRegion`]).
    pub fn allocate(&mut self, pages: &mut Pages, want: u64) -> Result<Option<Run>> {
        let (good, mut unread) = (want.min(GOOD_RUN), UnreadRegion::default());
        if self.fragmented && good > 1 {
            while let Some(start) = self.grown.pop_front() {
                if let Some(run) = self.take_grown(pages, start, good, want, &mut unread)? {
                    return Ok(Some(run));
                }
            }
        } else {
            if let Some(run) = self.search(pages, u64::MAX, good, want, &mut unread)? {
                return Ok(Some(run));
            }
            self.fragmented = good > 1;
            self.grown.clear();
        }
        if good > 1 { self.search(pages, u64::MAX, 1, want, &mut unread) } else { Ok(None) }
    }

    /// Like [`Space::allocate`], but allocates a run of exactly `blocks` blocks, and searches only the next
    /// [`SEARCH_REGIONS`] regions: if the free space is fragmented, there may be no such run.
    pub fn allocate_whole(&mut self, pages: &mut Pages, blocks: u64) -> Result<Option<Run>> {
        self.search(pages, SEARCH_REGIONS, blocks, blocks, &mut UnreadRegion::default())
    }

    /// The next search for free blocks begins at `block`.
    pub fn search_from(&mut self, block: u64) {
        self.cursor = block;
    }

    /// The run of `grown` that the next allocation of `want` blocks returns; `None` if that allocation uses none.
    pub(super) fn next_grown(&self, want: u64) -> Option<Run> {
        let good = want.min(GOOD_RUN);
        let mut starts = self.grown.iter().filter(|_| self.fragmented && good > 1);
        starts.find_map(|start| self.grown_run(*start, good, want))
    }

    /// The run of up to `want` free blocks at `start`, if at least `least` blocks are still free there.
    fn grown_run(&self, start: u64, least: u64, want: u64) -> Option<Run> {
        let region = &self.regions[(start / REGION_BLOCKS) as usize];
        let bitmaps = region.bitmaps.as_ref().filter(|_| !region.is_lost())?;
        let (first, blocks) = bitmaps.find_free(start % REGION_BLOCKS, 1, want)?;
        (first == start % REGION_BLOCKS && blocks >= least).then_some(Run { start, blocks })
    }

    /// Allocates at `start`, if at least `least` blocks are still free there.
    fn take_grown(
        &mut self,
        pages: &mut Pages,
        start: u64,
        least: u64,
        want: u64,
        unread: &mut UnreadRegion,
    ) -> Result<Option<Run>> {
        let Some(run) = self.grown_run(start, least, want) else { return Ok(None) };
        if !self.has_entries(pages, run, unread)? {
            return Ok(None);
        }
        self.mark(run, true);
        let end = start + run.blocks;
        if run.blocks == want && end / REGION_BLOCKS == start / REGION_BLOCKS {
            self.grown.push_front(end);
        }
        Ok(Some(run))
    }

    /// Allocates a run of `least` to `want` blocks in one of the next `regions` regions, from the cursor on.
    fn search(
        &mut self,
        pages: &mut Pages,
        regions: u64,
        least: u64,
        want: u64,
        unread: &mut UnreadRegion,
    ) -> Result<Option<Run>> {
        let count = self.regions();
        if count == 0 || self.counts.free == 0 {
            return Ok(None);
        }
        let (start, mut from) = (self.cursor / REGION_BLOCKS, self.cursor % REGION_BLOCKS);
        // The first region is searched twice: at the end for the part before the cursor.
        for step in 0..=count.min(regions) {
            let number = (start + step) % count;
            if self.regions[number as usize].may_have_free(least)
                && self.load_whole(pages, number, unread)?
                && let Some((first, blocks)) = self.regions[number as usize].find_free(from, least, want)
            {
                let run = Run { start: number * REGION_BLOCKS + first, blocks };
                // The table may have been lost after the bitmaps were loaded. A change that uses the run would then
                // fail half-way.
                if self.has_entries(pages, run, unread)? {
                    self.mark(run, true);
                    self.cursor = run.start + run.blocks;
                    if self.cursor >= self.blocks() {
                        self.cursor = 0;
                    }
                    return Ok(Some(run));
                }
            }
            from = 0;
        }
        Ok(None)
    }

    /// Makes a run allocatable again: its freeing is durable and no read uses it, or it was allocated and never
    /// adopted.
    pub fn release(&mut self, run: Run) {
        self.mark(run, false);
        if run.blocks >= GOOD_RUN {
            self.fragmented = false;
        } else if self.fragmented && self.grown.len() < GROWN_MAX {
            let bitmaps = self.regions[(run.start / REGION_BLOCKS) as usize].bitmaps.as_ref();
            let grown = bitmaps.and_then(|bitmaps| bitmaps.free_around(run.start % REGION_BLOCKS, GOOD_RUN));
            self.grown.extend(grown.map(|first| run.start - run.start % REGION_BLOCKS + first));
        }
    }
}

fn lost(file: PageFile, region: u64) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!(
            "region {region} in {} has lost blocks that are in use: it was damaged; run 'lamina check --repair'",
            file.name()
        ),
    )
}

fn unread(file: PageFile, region: u64) -> Error {
    let text = format!("region {region} in {} cannot be read, so its free blocks are not used", file.name());
    Error::new(ErrorKind::Io, text)
}
