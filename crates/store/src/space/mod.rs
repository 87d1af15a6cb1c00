//! Physical blocks: their references and checksums, which blocks are free, and which have space in the file system.
//!
//! One [`Space`] describes the data files, another the nodes of the map. The durable state of a block is its entry in
//! the table (reference count, checksum, backed flag). The bitmaps of free blocks in memory are derived from the table
//! when a region is first used for allocation.
//!
//! What must hold:
//!
//! 1. A block may be allocated only while its `used` bit is clear. The bit is set by the allocation, before the table
//!    has a reference. After the last reference is dropped, the bit stays set until the engine has made the freeing
//!    durable and no read that may refer to the block is under way ([`Space::release`]).
//! 2. A backed block has space in the file system: a write to it cannot fail with ENOSPC. The flag is set after the
//!    reservation, and cleared durably before the hole is punched.
//! 3. Summaries (used and backed blocks per region) equal the counts in the table, so opening reads only the summaries.

mod allocation;
mod backing;
mod region;
mod survey;
mod table;

pub use backing::ExtensionSearch;
pub use region::{REGION_BLOCKS, REGION_PAGES, SUMMARY_ENTRIES};
pub use table::{BlockEntry, TABLE_ENTRIES, forget_holds};

use crate::pages::{PageFile, PageKey, Pages, has_no_entries, patiently};
use crate::{Error, ErrorKind, Result, is_lost};
use allocation::UnreadRegion;
use backend::{BLOCK_SIZE, Block};
use region::Region;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Regions per data file.
pub const FILE_REGIONS: u64 = crate::FILE_BLOCKS / REGION_BLOCKS;
/// The most regions that one operation may add. Operations name new regions in order, so a larger step is damage.
const REGIONS_AHEAD_MAX: u64 = 8;

/// What a space describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceKind {
    /// Map nodes: all blocks below the reserved length of the map file are backed.
    Map,
    /// Data blocks: each has a backed flag.
    Data,
}

/// A run of physical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// First block.
    pub start: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// Counts of a space, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceCounts {
    /// Blocks with references.
    pub used: u64,
    /// Blocks with space in the file system.
    pub backed: u64,
    /// Blocks that are backed and free to allocate.
    pub free: u64,
}

/// The blocks of the data files, or of the map file.
pub struct Space {
    kind: SpaceKind,
    table: PageFile,
    summary: PageFile,
    regions: Vec<Region>,
    loaded: usize,
    dirty_regions: BTreeSet<u64>,
    counts: SpaceCounts,
    cursor: u64,
    /// Whether the last search for a free run of the preferred length ([`allocation::GOOD_RUN`]) found none, and since
    /// then no run of this length was released in one call, and the file system has allocated no more space.
    fragmented: bool,
    /// While `fragmented`: the starts of runs that have reached the preferred length because adjacent shorter runs were
    /// released. Searching all regions for these few runs would take too long.
    grown: VecDeque<u64>,
    extension_hint: u64,
    /// See [`Space::losses`].
    losses: u64,
    /// Map only: blocks below this are backed.
    backed_length: u64,
    derived: Vec<(PageKey, Error)>,
}

impl Space {
    fn without_regions(kind: SpaceKind) -> Self {
        let (table, summary) = match kind {
            SpaceKind::Map => (PageFile::MapTable, PageFile::MapSummary),
            SpaceKind::Data => (PageFile::DataTable, PageFile::DataSummary),
        };
        Self {
            kind,
            table,
            summary,
            regions: Vec::new(),
            loaded: 0,
            dirty_regions: BTreeSet::new(),
            counts: SpaceCounts::default(),
            cursor: 0,
            fragmented: false,
            grown: VecDeque::new(),
            extension_hint: 0,
            losses: 0,
            backed_length: 0,
            derived: Vec::new(),
        }
    }

    /// A space without reading its summaries, because they may be damaged.
    pub fn table_only(kind: SpaceKind, regions: u64) -> Self {
        let mut space = Self::without_regions(kind);
        space.grow_regions(regions);
        space
    }

    /// Opens the space as of the last checkpoint. `backed_length` is the reserved length of the map file in blocks.
    /// Summary pages that cannot be read or fail their checksum are rebuilt from the table.
    pub fn open(kind: SpaceKind, regions: u64, backed_length: u64, pages: &mut Pages) -> Result<Self> {
        let mut space = Self::without_regions(kind);
        let summary = space.summary;
        for first in (0..regions).step_by(SUMMARY_ENTRIES as usize) {
            let key = PageKey::new(summary, first / SUMMARY_ENTRIES);
            let numbers = first..(first + SUMMARY_ENTRIES).min(regions);
            let read: Vec<Region> = match patiently(|| pages.get(key).map(drop)) {
                Ok(()) => {
                    let page = pages.get(key)?;
                    let read =
                        numbers.map(|number| Region::read(page, number % SUMMARY_ENTRIES).possible(summary, number));
                    read.collect::<Result<_>>()?
                }
                Err(error) if is_lost(&error) => {
                    let counted = numbers.clone().map(|number| space.count_region(pages, number)).collect();
                    space.derived.push((key, error));
                    pages.replace(key);
                    space.dirty_regions.extend(numbers);
                    counted
                }
                Err(error) => return Err(error),
            };
            for mut region in read {
                if kind == SpaceKind::Map {
                    region.backed = 0;
                }
                space.counts.used += u64::from(region.used);
                space.counts.backed += u64::from(region.backed);
                space.counts.free += region.estimate();
                space.regions.push(region);
            }
        }
        if kind == SpaceKind::Map {
            space.set_backed_length(backed_length);
            // The used blocks lie below the reserved length, so `set_backed_length` counted them as free.
            space.counts.free = space.regions.iter().map(Region::estimate).sum();
        }
        Ok(space)
    }

    /// Summary pages that were lost at opening and were rebuilt.
    pub fn take_derived(&mut self) -> Vec<(PageKey, Error)> {
        std::mem::take(&mut self.derived)
    }

    /// Counts a region in its table. If a part of the table cannot be read, the region is not used for allocation.
    fn count_region(&self, pages: &mut Pages, number: u64) -> Region {
        let mut region = Region::empty();
        for page in number * REGION_PAGES..(number + 1) * REGION_PAGES {
            match pages.get(PageKey::new(self.table, page)) {
                Ok(page) => {
                    for index in 0..TABLE_ENTRIES as usize {
                        let entry = table::read(page, index);
                        region.used += u16::from(entry.references > 0);
                        region.backed += u16::from(entry.backed);
                    }
                }
                Err(error) => {
                    tracing::error!(%error, region = number, "a region is not used for allocation: its table is lost");
                    region.lose(&error);
                }
            }
        }
        region
    }

    /// Counts of the space, in blocks.
    pub fn counts(&self) -> SpaceCounts {
        self.counts
    }

    /// Number of regions.
    pub fn regions(&self) -> u64 {
        self.regions.len() as u64
    }

    /// Number of blocks, backed or not.
    pub fn blocks(&self) -> u64 {
        self.regions() * REGION_BLOCKS
    }

    pub(super) fn grow_regions(&mut self, count: u64) {
        while self.regions() < count {
            self.regions.push(Region::empty());
        }
    }

    /// The entry of a block.
    #[inline]
    pub fn entry(&self, pages: &mut Pages, block: u64) -> Result<BlockEntry> {
        let (key, index) = self.locate(block);
        Ok(table::read(pages.get(key)?, index))
    }

    /// The number of references of a block that is in use. Fails if its page has no entries.
    #[inline]
    pub fn references_in_use(&self, pages: &mut Pages, block: u64) -> Result<u32> {
        let (key, index) = self.locate(block);
        let page = pages.get(key)?;
        match table::read(page, index).references {
            0 if has_no_entries(&page.0) => Err(pages.lose_emptied(key)),
            references => Ok(references),
        }
    }

    fn locate(&self, block: u64) -> (PageKey, usize) {
        (PageKey::new(self.table, block / TABLE_ENTRIES), (block % TABLE_ENTRIES) as usize)
    }

    /// Calls `change` for the entries of a run, page by page.
    fn change(
        &self,
        pages: &mut Pages,
        run: Run,
        mut change: impl FnMut(u64, &mut BlockEntry) -> Result<()>,
    ) -> Result<()> {
        let mut block = run.start;
        let end = run.start + run.blocks;
        while block < end {
            let (key, first) = self.locate(block);
            let count = (TABLE_ENTRIES - first as u64).min(end - block);
            let page = pages.get_mut(key)?;
            for i in 0..count as usize {
                let mut entry = table::read(page, first + i);
                change(block + i as u64, &mut entry)?;
                table::write(page, first + i, entry);
            }
            block += count;
        }
        Ok(())
    }

    /// Appends the checksums of a run that is in use. Fails if a page with entries of the run has no entries at all.
    pub fn checksums(&self, pages: &mut Pages, run: Run, out: &mut Vec<u32>) -> Result<()> {
        let mut block = run.start;
        let end = run.start + run.blocks;
        while block < end {
            let (key, first) = self.locate(block);
            let count = (TABLE_ENTRIES - first as u64).min(end - block) as usize;
            let page = pages.get(key)?;
            if table::read(page, first).references == 0 && has_no_entries(&page.0) {
                return Err(pages.lose_emptied(key));
            }
            out.extend((first..first + count).map(|i| table::read(page, i).checksum));
            block += count as u64;
        }
        Ok(())
    }

    /// Changes the entries of a run, but neither reference counts nor backed flags.
    pub fn annotate(&self, pages: &mut Pages, run: Run, mut note: impl FnMut(u64, &mut BlockEntry)) -> Result<()> {
        self.check_range(run)?;
        self.change(pages, run, |block, entry| {
            let before = (entry.references, entry.backed);
            note(block, entry);
            debug_assert_eq!(before, (entry.references, entry.backed));
            Ok(())
        })
    }

    /// Adds the regions up to the end of a run. Fails if the run lies too far beyond the existing regions.
    pub(super) fn grow_for(&mut self, run: Run) -> Result<()> {
        let needed = run.start.saturating_add(run.blocks).div_ceil(REGION_BLOCKS);
        if needed > self.regions() + REGIONS_AHEAD_MAX {
            return self.check_range(run);
        }
        self.grow_regions(needed);
        Ok(())
    }

    fn check_range(&self, run: Run) -> Result<()> {
        match run.start.checked_add(run.blocks) {
            Some(end) if end <= self.blocks() => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "blocks {}+{} lie past the {} blocks of {}; run 'lamina check'",
                    run.start,
                    run.blocks,
                    self.blocks(),
                    self.table.name()
                ),
            )),
        }
    }

    /// Calls `each` with every block of a run and the number of its references. Fails if the entries of the run cannot
    /// be read, or if a block of it has no reference.
    pub fn references(&self, pages: &mut Pages, run: Run, each: &mut dyn FnMut(u64, u32)) -> Result<()> {
        self.check_range(run)?;
        let (mut block, end) = (run.start, run.start + run.blocks);
        while block < end {
            let (key, first) = self.locate(block);
            let count = (TABLE_ENTRIES - first as u64).min(end - block) as usize;
            let page = pages.get(key)?;
            for index in first..first + count {
                match table::read(page, index).references {
                    0 if has_no_entries(&page.0) => return Err(pages.lose_emptied(key)),
                    0 => return Err(impossible(self.table, block, 0)),
                    references => each(block, references),
                }
                block += 1;
            }
        }
        Ok(())
    }

    /// Marks blocks as used until [`Space::release`], after the bitmaps were rebuilt from the table.
    pub fn retain(&mut self, run: Run) {
        self.mark(run, true);
    }

    /// Adds the first reference to each block of a run. Fails if a block already has a reference.
    pub fn adopt(&mut self, pages: &mut Pages, run: Run) -> Result<()> {
        if self.kind == SpaceKind::Data {
            // Replay meets blocks in regions that did not exist at the last checkpoint.
            self.grow_for(run)?;
        }
        self.check_range(run)?;
        self.change(pages, run, |block, entry| {
            if entry.references != 0 {
                return Err(twice(self.table, block));
            }
            entry.references = 1;
            Ok(())
        })?;
        self.count_used(run, true);
        self.mark(run, true);
        Ok(())
    }

    /// Adds a reference to each block of a run. The count of a data block ends at [`BlockEntry::REFERENCES_MAX`], and
    /// never decreases from there, because the number of its references is then not known any more.
    pub fn add_references(&mut self, pages: &mut Pages, run: Run) -> Result<()> {
        self.check_range(run)?;
        let holds_data = self.kind == SpaceKind::Data;
        self.change(pages, run, |block, entry| {
            match entry.references {
                BlockEntry::REFERENCES_MAX if holds_data => {}
                references @ (0 | BlockEntry::REFERENCES_MAX) => return Err(impossible(self.table, block, references)),
                _ => entry.references += 1,
            }
            Ok(())
        })
    }

    /// Removes a reference from each block of a run. Blocks without references are added to `freed` and stay
    /// unallocatable, the others are added to `left`. Data blocks with [`BlockEntry::REFERENCES_MAX`] references keep
    /// them.
    pub fn drop_references(
        &mut self,
        pages: &mut Pages,
        run: Run,
        freed: &mut Vec<Run>,
        left: &mut Vec<Run>,
    ) -> Result<()> {
        self.check_range(run)?;
        let (first, first_left) = (freed.len(), left.len());
        let holds_data = self.kind == SpaceKind::Data;
        // The bitmaps must be loaded before the table entries become free: until release they mark the blocks as used.
        // A region that has lost a part of its table is not used for allocation.
        for (number, _, _) in region::parts(run) {
            // A run has few regions, and each of them is needed, so all unreadable ones are excluded.
            self.load_whole(pages, number, &mut UnreadRegion::default())?;
        }
        for (number, first_block, blocks) in region::parts(run) {
            // To load the last regions of the run, the bitmaps of its first ones may have been removed from memory.
            self.load_whole(pages, number, &mut UnreadRegion::default())?;
            let part = Run { start: number * REGION_BLOCKS + first_block, blocks };
            let mut freed_here = 0;
            self.change(pages, part, |block, entry| {
                if entry.references == 0 {
                    return Err(impossible(self.table, block, 0));
                }
                if !(holds_data && entry.references == BlockEntry::REFERENCES_MAX) {
                    entry.references -= 1;
                }
                let (list, first) = if entry.references == 0 { (&mut *freed, first) } else { (&mut *left, first_left) };
                if entry.references == 0 {
                    entry.clear_notes();
                    freed_here += 1;
                }
                match list[first..].last_mut() {
                    Some(last) if last.start + last.blocks == block => last.blocks += 1,
                    _ => list.push(Run { start: block, blocks: 1 }),
                }
                Ok(())
            })?;
            // From here on the bitmaps stay in memory, because they have more used blocks than the table.
            self.count_used_in(number, freed_here, false);
        }
        Ok(())
    }

    /// Sets the reference count of one block to what `check` counted.
    pub fn repair_references(&mut self, pages: &mut Pages, block: u64, references: u32) -> Result<()> {
        let run = Run { start: block, blocks: 1 };
        self.check_range(run)?;
        let before = self.entry(pages, block)?.references;
        let holds_data = self.kind == SpaceKind::Data && references > 0;
        self.regions[(block / REGION_BLOCKS) as usize].forget_bounds();
        self.change(pages, run, |_, entry| {
            entry.references = references;
            // A mapped block was written, so it has space in the file system.
            entry.backed |= holds_data;
            Ok(())
        })?;
        // Without bitmaps the counts of the region may be wrong too: [`Space::recount`] corrects them.
        let exact = self.regions[(block / REGION_BLOCKS) as usize].bitmaps.is_some();
        if exact && (before == 0) != (references == 0) {
            self.count_used(run, references > 0);
            self.mark(run, references > 0);
        }
        Ok(())
    }

    /// Counts every region without bitmaps in memory, at the end of a repair. A lost region with bitmaps in memory is
    /// used again if its whole table can be read. The blocks of `unreleased` stay marked as used until
    /// [`Space::release`].
    pub fn recount(&mut self, pages: &mut Pages, unreleased: impl Iterator<Item = Run>) -> Result<()> {
        let mut retained: BTreeMap<u64, Vec<Run>> = BTreeMap::new();
        for (number, first, blocks) in unreleased.flat_map(region::parts) {
            retained.entry(number).or_default().push(Run { start: number * REGION_BLOCKS + first, blocks });
        }
        for number in 0..self.regions() {
            let region = &mut self.regions[number as usize];
            if region.bitmaps.is_some() {
                // The counts of a region with bitmaps are exact. The repair may have restored its table.
                if region.is_lost()
                    && let Err(error) = self.regain(pages, number)
                    && !is_lost(&error)
                {
                    return Err(error);
                }
                continue;
            }
            let before = region.estimate();
            let known = (region.used, region.backed);
            self.counts.used -= u64::from(std::mem::take(&mut region.used));
            self.counts.backed -= u64::from(std::mem::take(&mut region.backed));
            self.counts.free -= before;
            region.damaged = false;
            region.forget_bounds();
            // With a count of zero, loading the region replaces the count by that of the table.
            self.dirty_regions.insert(number);
            match self.load(pages, number) {
                Err(error) if is_lost(&error) => {
                    // The table of the region cannot be read completely: the old counts stay.
                    let region = &mut self.regions[number as usize];
                    (region.used, region.backed) = known;
                    region.lose(&error);
                    self.counts.used += u64::from(known.0);
                    self.counts.backed += u64::from(known.1);
                }
                other => other?,
            }
            // The blocks are marked before the next region is loaded: that may remove these bitmaps from memory, unless
            // they have more used blocks than the table.
            let freed = retained.remove(&number).unwrap_or_default();
            freed.into_iter().for_each(|run| self.retain(run));
        }
        Ok(())
    }

    /// Updates the `used` counts of the regions of a run.
    fn count_used(&mut self, run: Run, used: bool) {
        for (number, _, count) in region::parts(run) {
            self.count_used_in(number, count, used);
        }
    }

    /// Updates the `used` count of a region.
    fn count_used_in(&mut self, number: u64, count: u64, used: bool) {
        if count == 0 {
            return;
        }
        let region = &mut self.regions[number as usize];
        let before = region.estimate();
        if used {
            region.used += count as u16;
            self.counts.used += count;
        } else {
            // A lost region may count too few blocks, until its table can be read.
            let counted = count.min(u64::from(region.used));
            region.used -= counted as u16;
            self.counts.used -= counted;
        }
        // With bitmaps in memory the difference is zero: `mark` updates the free count then.
        self.counts.free = self.counts.free + region.estimate() - before;
        self.dirty_regions.insert(number);
    }

    /// Has the next checkpoint write a page of summaries from memory.
    pub fn renew_summaries(&mut self, pages: &mut Pages, page: u64) {
        pages.replace(PageKey::new(self.summary, page));
        self.dirty_regions.extend(page * SUMMARY_ENTRIES..((page + 1) * SUMMARY_ENTRIES).min(self.regions()));
    }

    /// Rebuilds a damaged page of the table. `renew` gets each block with its old entry, as far as that is readable,
    /// and returns the new entry.
    pub fn renew_table(&mut self, pages: &mut Pages, page: u64, renew: &mut dyn FnMut(u64, BlockEntry) -> BlockEntry) {
        let key = PageKey::new(self.table, page);
        let raw = pages.read_raw(key).unwrap_or(Block([0; BLOCK_SIZE]));
        let fresh = pages.replace(key);
        for index in 0..TABLE_ENTRIES {
            let entry = renew(page * TABLE_ENTRIES + index, table::read(&raw, index as usize));
            table::write(fresh, index as usize, entry);
        }
        let region = (page / REGION_PAGES) as usize;
        if let Some(region) = self.regions.get_mut(region) {
            region.forget_bounds();
            if region.bitmaps.take().is_some() {
                self.loaded -= 1;
                // The estimate is used instead of the bitmaps until the region is counted again.
                self.counts.free = self.regions.iter().map(Region::estimate).sum();
            }
        }
    }

    /// Number of table pages.
    pub fn table_pages(&self) -> u64 {
        self.regions() * REGION_PAGES
    }

    /// Number of regions with summaries that have changed since the last checkpoint.
    pub fn changed_regions(&self) -> u64 {
        self.dirty_regions.len() as u64
    }

    /// Copies the summaries of changed regions into the cached summary pages, as a step of a checkpoint.
    pub fn store_summaries(&mut self, pages: &mut Pages) -> Result<()> {
        while let Some(number) = self.dirty_regions.first().copied() {
            let key = PageKey::new(self.summary, number / SUMMARY_ENTRIES);
            match pages.get_mut(key) {
                Ok(page) => self.regions[number as usize].write(page, number % SUMMARY_ENTRIES),
                // All counts of the page are in memory.
                Err(error) if is_lost(&error) => {
                    tracing::error!(%error, "a lost page of summaries is rewritten from memory");
                    pages.replace(key);
                    let first = number - number % SUMMARY_ENTRIES;
                    self.dirty_regions.extend(first..(first + SUMMARY_ENTRIES).min(self.regions()));
                    continue;
                }
                Err(error) => return Err(error),
            }
            self.dirty_regions.remove(&number);
        }
        Ok(())
    }
}

fn twice(file: PageFile, block: u64) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!("block {block} in {} would be allocated twice; run 'lamina check'", file.name()),
    )
}

fn impossible(file: PageFile, block: u64, references: u32) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!(
            "block {block} in {} has {references} references, which is impossible; run 'lamina check'",
            file.name()
        ),
    )
}

#[cfg(test)]
mod tests;
