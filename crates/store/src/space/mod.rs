//! Physical blocks: who refers to them, what they must hash to, which are free, which the file system has given.
//!
//! One [`Space`] describes the data files, another the nodes of the map. A block's lasting state is its entry in the
//! table (reference count, checksum, backed flag); the free-block bitmaps in memory follow from it, region by region,
//! and are built when a region is first allocated from.
//!
//! What must hold:
//!
//! 1. A block may be allocated only while its `used` bit is clear. The bit is set from allocation on, before the table
//!    says so, and stays set after the last reference is gone until the engine has made the freeing durable and no read
//!    that may still name the block is under way ([`Space::release`]).
//! 2. A block flagged backed takes real space in the file system: a write to it cannot fail with ENOSPC. The flag is
//!    set after the reservation and cleared (durably) before the hole is punched.
//! 3. Summaries (used and backed per region) equal the counts in the table; they are all that opening reads.

mod region;
mod table;

pub use region::{REGION_BLOCKS, REGION_PAGES, SUMMARY_ENTRIES};
pub use table::{Entry, TABLE_ENTRIES, forget_fresh};

use crate::pages::{PageFile, PageKey, Pages};
use crate::{Error, ErrorKind, Result};
use region::{Bitmaps, Region};
use std::collections::BTreeSet;

/// Regions per data file: just under 1 TiB, below the file size limits of every file system in use.
pub const FILE_REGIONS: u64 = 16_384;
/// Blocks per data file.
pub const FILE_BLOCKS: u64 = FILE_REGIONS * REGION_BLOCKS;
/// Regions whose bitmaps are kept in memory (4 KiB each); few in tests, so that they meet the end of it.
const LOADED_REGIONS_MAX: usize = if cfg!(test) { 8 } else { 4096 };
/// Regions that one operation may add: replay meets new ones in order, so a record that jumps further is damaged.
const REGIONS_AHEAD_MAX: u64 = 8;
/// The shortest run that a first search takes, in blocks (64 KiB): shorter ones only when no longer one is left.
const GOOD_RUN: u64 = 16;
/// The shortest unbacked run inside existing regions worth reserving again, in blocks (1 MiB).
const EXTENSION_RUN: u64 = 256;

/// What a space describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceKind {
    /// Nodes of the trees: all blocks below the reserved length of the map file are backed.
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
    /// With references.
    pub used: u64,
    /// Given by the file system.
    pub backed: u64,
    /// Backed and free to allocate.
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
    /// No good run was found since the last long run came free.
    fragmented: bool,
    extension_hint: u64,
    /// Map only: blocks below this are backed.
    backed_length: u64,
}

impl Space {
    /// The space as the last checkpoint left it. `backed_length` (in blocks) is the reserved length of the map file.
    pub fn open(kind: SpaceKind, regions: u64, backed_length: u64, pages: &mut Pages) -> Result<Self> {
        let (table, summary) = match kind {
            SpaceKind::Map => (PageFile::MapTable, PageFile::MapSummary),
            SpaceKind::Data => (PageFile::DataTable, PageFile::DataSummary),
        };
        let mut space = Self {
            kind,
            table,
            summary,
            regions: Vec::new(),
            loaded: 0,
            dirty_regions: BTreeSet::new(),
            counts: SpaceCounts::default(),
            cursor: 0,
            fragmented: false,
            extension_hint: 0,
            backed_length: 0,
        };
        for number in 0..regions {
            let page = pages.get(PageKey::new(summary, number / SUMMARY_ENTRIES))?;
            let mut region = Region::read(page, number % SUMMARY_ENTRIES);
            if u64::from(region.used) > REGION_BLOCKS || u64::from(region.backed) > REGION_BLOCKS {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "region {number} in {} counts more blocks than it has; run 'lamina check --repair'",
                        summary.name()
                    ),
                ));
            }
            if kind == SpaceKind::Map {
                region.backed = 0;
            }
            space.counts.used += u64::from(region.used);
            space.counts.backed += u64::from(region.backed);
            space.counts.free += u64::from(region.backed.saturating_sub(region.used));
            space.regions.push(region);
        }
        if kind == SpaceKind::Map {
            space.set_backed_length(backed_length);
            // What is used lies below the reserved length: it was counted as free with the rest of it.
            space.counts.free = space.regions.iter().map(Region::estimate).sum();
        }
        Ok(space)
    }

    /// Counts, in blocks.
    pub fn counts(&self) -> SpaceCounts {
        self.counts
    }

    /// Regions that exist.
    pub fn regions(&self) -> u64 {
        self.regions.len() as u64
    }

    /// Blocks of a region that the file system gave; none where there is no such region.
    pub fn backed_in(&self, region: u64) -> u64 {
        self.regions.get(region as usize).map_or(0, |region| u64::from(region.backed))
    }

    /// Blocks that exist, backed or not.
    pub fn blocks(&self) -> u64 {
        self.regions() * REGION_BLOCKS
    }

    /// Map only: the file is now reserved up to this many blocks.
    pub fn set_backed_length(&mut self, blocks: u64) {
        debug_assert_eq!(self.kind, SpaceKind::Map);
        let more = blocks.saturating_sub(self.backed_length);
        self.counts.backed += more;
        self.counts.free += more;
        let from = self.backed_length;
        self.backed_length = self.backed_length.max(blocks);
        self.grow_regions(self.backed_length.div_ceil(REGION_BLOCKS));
        for number in from / REGION_BLOCKS..self.regions() {
            let length = self.backed_length;
            let region = &mut self.regions[number as usize];
            region.backed = length.saturating_sub(number * REGION_BLOCKS).min(REGION_BLOCKS) as u16;
            if let Some(bitmaps) = &mut region.bitmaps {
                bitmaps.set_backed(0, u64::from(region.backed), true);
            }
        }
    }

    fn grow_regions(&mut self, count: u64) {
        while self.regions() < count {
            self.regions.push(Region::empty());
        }
    }

    // ---- entries ----------------------------------------------------------------------------------------------

    /// The entry of a block.
    #[inline]
    pub fn entry(&self, pages: &mut Pages, block: u64) -> Result<Entry> {
        let (key, index) = self.locate(block);
        Ok(table::read(pages.get(key)?, index))
    }

    fn locate(&self, block: u64) -> (PageKey, usize) {
        (PageKey::new(self.table, block / TABLE_ENTRIES), (block % TABLE_ENTRIES) as usize)
    }

    /// Runs `change` over the entries of a run, page by page.
    fn change(&self, pages: &mut Pages, run: Run, mut change: impl FnMut(u64, &mut Entry) -> Result<()>) -> Result<()> {
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

    /// Appends the checksums of a run.
    pub fn checksums(&self, pages: &mut Pages, run: Run, out: &mut Vec<u32>) -> Result<()> {
        let mut block = run.start;
        let end = run.start + run.blocks;
        while block < end {
            let (key, first) = self.locate(block);
            let count = (TABLE_ENTRIES - first as u64).min(end - block) as usize;
            let page = pages.get(key)?;
            out.extend((first..first + count).map(|i| table::read(page, i).checksum));
            block += count as u64;
        }
        Ok(())
    }

    /// Changes the entries of a run in a way that leaves reference counts and the backed flag alone.
    pub fn annotate(&self, pages: &mut Pages, run: Run, mut note: impl FnMut(u64, &mut Entry)) -> Result<()> {
        self.check_range(run)?;
        self.change(pages, run, |block, entry| {
            let before = (entry.references, entry.backed);
            note(block, entry);
            debug_assert_eq!(before, (entry.references, entry.backed));
            Ok(())
        })
    }

    /// Adds the regions up to the end of a run, unless it lies absurdly far beyond what there is.
    fn grow_for(&mut self, run: Run) -> Result<()> {
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

    /// Gives a run its first reference. It must have none.
    pub fn adopt(&mut self, pages: &mut Pages, run: Run) -> Result<()> {
        if self.kind == SpaceKind::Data {
            // Replay meets blocks of regions that the last checkpoint did not know.
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

    /// One more reference on each block of a run.
    pub fn add_references(&mut self, pages: &mut Pages, run: Run) -> Result<()> {
        self.check_range(run)?;
        self.change(pages, run, |block, entry| {
            if entry.references == 0 || entry.references == Entry::REFERENCES_MAX {
                return Err(impossible(self.table, block, entry.references));
            }
            entry.references += 1;
            Ok(())
        })
    }

    /// One reference less on each block of a run; what has none left goes to `freed`, still not allocatable.
    pub fn drop_references(&mut self, pages: &mut Pages, run: Run, freed: &mut Vec<Run>) -> Result<()> {
        self.check_range(run)?;
        let first = freed.len();
        // The bitmaps must be there before the table forgets the blocks: they are what holds them until release.
        for (number, _, _) in region::parts(run) {
            self.load(pages, number)?;
        }
        self.change(pages, run, |block, entry| {
            if entry.references == 0 {
                return Err(impossible(self.table, block, 0));
            }
            entry.references -= 1;
            if entry.references == 0 {
                entry.clear_notes();
                match freed[first..].last_mut() {
                    Some(last) if last.start + last.blocks == block => last.blocks += 1,
                    _ => freed.push(Run { start: block, blocks: 1 }),
                }
            }
            Ok(())
        })?;
        for run in &freed[first..] {
            self.count_used(*run, false);
        }
        Ok(())
    }

    /// Sets the reference count of one block to what `check` counted.
    pub fn repair_references(&mut self, pages: &mut Pages, block: u64, references: u32) -> Result<()> {
        let run = Run { start: block, blocks: 1 };
        self.check_range(run)?;
        let before = self.entry(pages, block)?.references;
        let holds_data = self.kind == SpaceKind::Data && references > 0;
        self.change(pages, run, |_, entry| {
            entry.references = references;
            // Whoever is mapped was written: the space is there.
            entry.backed |= holds_data;
            Ok(())
        })?;
        // Without bitmaps the counts may be wrong as well: they are made anew by [`Space::recount`].
        let exact = self.regions[(block / REGION_BLOCKS) as usize].bitmaps.is_some();
        if exact && (before == 0) != (references == 0) {
            self.count_used(run, references > 0);
            self.mark(run, references > 0);
        }
        Ok(())
    }

    /// Counts every region anew whose bitmaps are not in memory: the end of a repair.
    pub fn recount(&mut self, pages: &mut Pages) -> Result<()> {
        for number in 0..self.regions() {
            let region = &mut self.regions[number as usize];
            if region.bitmaps.is_some() {
                continue;
            }
            let before = region.estimate();
            self.counts.used -= u64::from(std::mem::take(&mut region.used));
            self.counts.backed -= u64::from(std::mem::take(&mut region.backed));
            self.counts.free -= before;
            region.damaged = false;
            // A summary that counts nothing is lower than any table, and put right.
            self.dirty_regions.insert(number);
            self.load(pages, number)?;
        }
        Ok(())
    }

    /// Keeps `used` counts true. A run may span regions.
    fn count_used(&mut self, run: Run, used: bool) {
        for (number, _, count) in region::parts(run) {
            let region = &mut self.regions[number as usize];
            let before = region.estimate();
            if used {
                region.used += count as u16;
                self.counts.used += count;
            } else {
                region.used -= count as u16;
                self.counts.used -= count;
            }
            // Changes nothing where bitmaps are in memory: allocation and release count there.
            self.counts.free = self.counts.free + region.estimate() - before;
            self.dirty_regions.insert(number);
        }
    }

    // ---- bitmaps ----------------------------------------------------------------------------------------------

    /// Sets or clears `used` bits where bitmaps are in memory, keeping the free count.
    fn mark(&mut self, run: Run, used: bool) {
        for (number, first, count) in region::parts(run) {
            if let Some(bitmaps) = &mut self.regions[number as usize].bitmaps {
                let changed = bitmaps.set_used(first, count, used);
                if used {
                    self.counts.free -= changed;
                } else {
                    self.counts.free += changed;
                }
            }
        }
    }

    fn load(&mut self, pages: &mut Pages, number: u64) -> Result<()> {
        let region = &self.regions[number as usize];
        if region.damaged {
            return Err(lost(self.table, number));
        }
        if region.bitmaps.is_some() {
            return Ok(());
        }
        if self.loaded >= LOADED_REGIONS_MAX {
            self.unload_some();
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
        let region = &mut self.regions[number as usize];
        let before = region.estimate();
        let known = (u64::from(region.used), u64::from(region.backed));
        let counted = (bitmaps.used(), backed_count);
        if counted.0 < known.0 || counted.1 < known.1 {
            // Pages of the table are gone: what they described must not be taken for free space.
            region.damaged = true;
            self.counts.free -= before;
            return Err(lost(self.table, number));
        }
        if known != counted {
            // A summary that was lost is made anew from the table (invariant 3).
            tracing::warn!(region = number, file = self.summary.name(), ?known, ?counted, "a summary is put right");
            (region.used, region.backed) = (counted.0 as u16, counted.1 as u16);
            self.counts.used = self.counts.used + counted.0 - known.0;
            self.counts.backed = self.counts.backed + counted.1 - known.1;
            self.dirty_regions.insert(number);
        }
        self.counts.free = self.counts.free + bitmaps.free() - before;
        region.bitmaps = Some(bitmaps);
        self.loaded += 1;
        Ok(())
    }

    /// Why there may be less to allocate than the file system has: a region that is damaged.
    pub fn damage(&self) -> Option<Error> {
        (0..).zip(&self.regions).find(|(_, region)| region.damaged).map(|(number, _)| lost(self.table, number))
    }

    /// Loads a region to allocate from it; false when it is damaged: then it is passed over.
    fn load_whole(&mut self, pages: &mut Pages, number: u64) -> Result<bool> {
        if self.regions[number as usize].damaged {
            return Ok(false);
        }
        match self.load(pages, number) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::error!(%error, "a region is not allocated from any more");
                let region = &mut self.regions[number as usize];
                self.counts.free -= region.estimate();
                region.damaged = true;
                Ok(false)
            }
            other => other.map(|()| true),
        }
    }

    /// Gives up bitmaps that hold nothing the table does not know.
    fn unload_some(&mut self) {
        let mut give_up = LOADED_REGIONS_MAX / 8;
        for region in &mut self.regions {
            let Some(bitmaps) = &region.bitmaps else { continue };
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

    /// Takes up to `want` free backed blocks that lie next to each other; `None` when nothing is free. The run is
    /// held until [`Space::adopt`] and, if that never comes, [`Space::release`].
    pub fn allocate(&mut self, pages: &mut Pages, want: u64) -> Result<Option<Run>> {
        let good = want.min(GOOD_RUN);
        if !(self.fragmented && good > 1) {
            if let Some(run) = self.search(pages, good, want)? {
                return Ok(Some(run));
            }
            self.fragmented = good > 1;
        }
        if good > 1 { self.search(pages, 1, want) } else { Ok(None) }
    }

    fn search(&mut self, pages: &mut Pages, least: u64, want: u64) -> Result<Option<Run>> {
        let count = self.regions();
        if count == 0 || self.counts.free == 0 {
            return Ok(None);
        }
        let (start, mut from) = (self.cursor / REGION_BLOCKS, self.cursor % REGION_BLOCKS);
        // The region of the cursor comes twice: its part before the cursor last.
        for step in 0..=count {
            let number = (start + step) % count;
            let region = &self.regions[number as usize];
            if region.estimate() >= least && self.load_whole(pages, number)? {
                let bitmaps = self.regions[number as usize].bitmaps.as_ref().expect("loaded above");
                if let Some((first, blocks)) = bitmaps.find_free(from, least, want) {
                    let run = Run { start: number * REGION_BLOCKS + first, blocks };
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

    /// Makes a run allocatable again: its freeing is durable and nobody reads it, or it was never adopted.
    pub fn release(&mut self, run: Run) {
        self.mark(run, false);
        if run.blocks >= GOOD_RUN {
            self.fragmented = false;
        }
    }

    // ---- room in the file system -------------------------------------------------------------------------------

    /// Where to reserve about `want` more blocks: an unbacked hole inside, or new regions at the end.
    pub fn plan_extension(&mut self, pages: &mut Pages, want: u64) -> Result<Run> {
        debug_assert_eq!(self.kind, SpaceKind::Data);
        let count = self.regions();
        for step in 0..count {
            let number = (self.extension_hint + step) % count;
            if u64::from(self.regions[number as usize].backed) + EXTENSION_RUN.min(want) > REGION_BLOCKS {
                continue;
            }
            if !self.load_whole(pages, number)? {
                continue;
            }
            let bitmaps = self.regions[number as usize].bitmaps.as_ref().expect("loaded above");
            if let Some((first, blocks)) = bitmaps.find_unbacked(EXTENSION_RUN.min(want), want) {
                self.extension_hint = number;
                return Ok(Run { start: number * REGION_BLOCKS + first, blocks });
            }
        }
        self.extension_hint = count;
        self.grow_regions(count + 1);
        Ok(Run { start: count * REGION_BLOCKS, blocks: want.min(REGION_BLOCKS) })
    }

    /// Notes that the file system gave (or is about to take back) a run.
    pub fn set_backed(&mut self, pages: &mut Pages, run: Run, backed: bool) -> Result<()> {
        debug_assert_eq!(self.kind, SpaceKind::Data);
        self.grow_for(run)?;
        for (number, first, count) in region::parts(run) {
            if !backed {
                // What is taken away must have been counted: see there.
                self.load(pages, number)?;
            }
            let part = Run { start: number * REGION_BLOCKS + first, blocks: count };
            let mut changed = 0u64;
            self.change(pages, part, |_, entry| {
                changed += u64::from(entry.backed != backed);
                entry.backed = backed;
                Ok(())
            })?;
            let region = &mut self.regions[number as usize];
            let before = region.estimate();
            if backed {
                region.backed += changed as u16;
                self.counts.backed += changed;
            } else {
                region.backed -= changed as u16;
                self.counts.backed -= changed;
            }
            if let Some(bitmaps) = &mut region.bitmaps {
                bitmaps.set_backed(first, count, backed);
            }
            let after = region.estimate();
            self.counts.free = (self.counts.free + after).saturating_sub(before);
            self.dirty_regions.insert(number);
            if backed {
                self.fragmented = false;
            }
        }
        Ok(())
    }

    /// Takes free backed runs of at least `least` blocks out of allocation, up to `most` blocks in all, from region
    /// `*region` on (advanced past what was searched). The caller clears their backed flags, punches and releases.
    pub fn take_reclaimable(&mut self, pages: &mut Pages, region: &mut u64, least: u64, most: u64) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        let mut taken = 0;
        while *region < self.regions() && taken + least <= most {
            let number = *region;
            let candidate = &self.regions[number as usize];
            if candidate.estimate() < least || !self.load_whole(pages, number)? {
                *region += 1;
                continue;
            }
            let bitmaps = self.regions[number as usize].bitmaps.as_ref().expect("loaded above");
            let mut from = 0;
            let mut found = Vec::new();
            // Never more than was asked for: the rest is promised to somebody.
            while taken + least <= most
                && let Some((first, blocks)) = bitmaps.find_free(from, least, most - taken)
            {
                found.push(Run { start: number * REGION_BLOCKS + first, blocks });
                from = first + blocks;
                taken += blocks;
            }
            for run in &found {
                self.mark(*run, true);
            }
            runs.append(&mut found);
            if taken + least <= most {
                *region += 1;
            }
        }
        Ok(runs)
    }

    /// Writes the summaries of changed regions into their pages: part of a checkpoint.
    pub fn store_summaries(&mut self, pages: &mut Pages) -> Result<()> {
        while let Some(number) = self.dirty_regions.pop_first() {
            let page = pages.get_mut(PageKey::new(self.summary, number / SUMMARY_ENTRIES))?;
            self.regions[number as usize].write(page, number % SUMMARY_ENTRIES);
        }
        Ok(())
    }

    /// Free blocks that the file system could have back.
    pub fn reclaimable(&self) -> u64 {
        self.counts.free
    }
}

fn twice(file: PageFile, block: u64) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!("block {block} in {} would be given out twice; run 'lamina check'", file.name()),
    )
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

fn impossible(file: PageFile, block: u64, references: u32) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!("block {block} in {} has {references} references, which cannot be; run 'lamina check'", file.name()),
    )
}

#[cfg(test)]
mod tests;
