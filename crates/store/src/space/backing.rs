//! Backed blocks: those for which the file system has allocated space. Finds blocks to reserve and blocks to return.

use super::allocation::SEARCH_REGIONS;
use super::region::{self, REGION_BLOCKS};
use super::{Run, Space, SpaceKind, UnreadRegion};
use crate::pages::Pages;
use crate::{Result, is_lost};

/// The shortest run of unbacked blocks in existing regions that is reserved again, in blocks (1 MiB).
const EXTENSION_RUN: u64 = 256;
/// Regions surveyed for a search for blocks to return, and the most that it loads, because the metadata is locked
/// meanwhile. Their table pages are read at a time (1 MiB).
pub(super) const RECLAIM_REGIONS: usize = 8;

/// What a search for blocks to reserve keeps while its lookup is repeated.
#[derive(Default)]
pub struct ExtensionSearch {
    unread: UnreadRegion,
    /// The number of regions loaded.
    loaded: u64,
}

impl Space {
    /// Number of backed blocks of a region; 0 if the region does not exist.
    pub fn backed_in(&self, region: u64) -> u64 {
        self.regions.get(region as usize).map_or(0, |region| u64::from(region.backed))
    }

    /// For the map only: the file is reserved up to this many blocks.
    pub fn set_backed_length(&mut self, blocks: u64) {
        debug_assert_eq!(self.kind, SpaceKind::Map);
        self.counts.backed += blocks.saturating_sub(self.backed_length);
        let from = self.backed_length;
        self.backed_length = self.backed_length.max(blocks);
        self.grow_regions(self.backed_length.div_ceil(REGION_BLOCKS));
        for number in from / REGION_BLOCKS..self.regions() {
            let length = self.backed_length;
            let region = &mut self.regions[number as usize];
            let before = region.estimate();
            region.backed = length.saturating_sub(number * REGION_BLOCKS).min(REGION_BLOCKS) as u16;
            if let Some(bitmaps) = &mut region.bitmaps {
                bitmaps.set_backed(0, u64::from(region.backed), true);
            }
            region.forget_bounds();
            self.counts.free += region.estimate() - before;
        }
    }

    /// Chooses about `want` blocks to reserve: an unbacked run in existing regions, or new regions at the end. The
    /// search ends after two unreadable regions, and after it has loaded [`SEARCH_REGIONS`] regions, because requests
    /// wait for it. Later searches pass over these regions and load others. The caller passes the same `search` to all
    /// repetitions of the lookup.
    pub fn plan_extension(&mut self, pages: &mut Pages, want: u64, search: &mut ExtensionSearch) -> Result<Run> {
        debug_assert_eq!(self.kind, SpaceKind::Data);
        let (count, least) = (self.regions(), EXTENSION_RUN.min(want));
        for step in 0..count {
            let number = (self.extension_hint + step) % count;
            let region = &self.regions[number as usize];
            if !region.may_have_unbacked(least) {
                continue;
            }
            let is_loaded = region.bitmaps.is_some();
            if !is_loaded && search.loaded >= SEARCH_REGIONS {
                break;
            }
            match self.load_whole(pages, number, &mut search.unread) {
                Ok(true) => search.loaded += u64::from(!is_loaded),
                Ok(false) => continue,
                // A new region needs no read.
                Err(error) if is_lost(&error) => break,
                Err(error) => return Err(error),
            }
            if let Some((first, blocks)) = self.regions[number as usize].find_unbacked(least, want) {
                let run = Run { start: number * REGION_BLOCKS + first, blocks };
                match self.has_entries(pages, run, &mut search.unread) {
                    Ok(true) => {
                        self.extension_hint = number;
                        return Ok(run);
                    }
                    Ok(false) => {}
                    Err(error) if is_lost(&error) => break,
                    Err(error) => return Err(error),
                }
            }
        }
        self.extension_hint = count;
        self.grow_regions(count + 1);
        Ok(Run { start: count * REGION_BLOCKS, blocks: want.min(REGION_BLOCKS) })
    }

    /// Records that the file system has allocated space for a run, or is about to free it.
    pub fn set_backed(&mut self, pages: &mut Pages, run: Run, backed: bool) -> Result<()> {
        debug_assert_eq!(self.kind, SpaceKind::Data);
        self.grow_for(run)?;
        for (number, first, count) in region::parts(run) {
            if !backed {
                // Loading the region makes its counts exact, before blocks are subtracted from them. Replay must not
                // fail because of a lost page of the region that has no entry of the run.
                self.load_whole(pages, number, &mut UnreadRegion::default())?;
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
                // A lost region may count too few blocks, until its table can be read.
                let counted = changed.min(u64::from(region.backed));
                region.backed -= counted as u16;
                self.counts.backed -= counted;
            }
            if let Some(bitmaps) = &mut region.bitmaps {
                bitmaps.set_backed(first, count, backed);
            }
            region.review(first, count);
            let after = region.estimate();
            self.counts.free = (self.counts.free + after).saturating_sub(before);
            self.dirty_regions.insert(number);
            if backed {
                self.fragmented = false;
            }
        }
        Ok(())
    }

    /// Marks free backed runs of at least `least` blocks, up to `most` blocks in all, as used, so that they cannot be
    /// allocated. The search begins at region `*region`, which is advanced, and ends after it has loaded
    /// [`RECLAIM_REGIONS`] regions. The caller clears the backed flags, punches the runs and releases them.
    pub fn take_reclaimable(&mut self, pages: &mut Pages, region: &mut u64, least: u64, most: u64) -> Result<Vec<Run>> {
        let (mut runs, mut unread) = (Vec::new(), UnreadRegion::default());
        let (mut taken, mut loads) = (0, 0);
        while *region < self.regions() && taken + least <= most {
            let number = *region;
            let candidate = &self.regions[number as usize];
            let may_have = candidate.may_have_free(least);
            if may_have && candidate.bitmaps.is_none() {
                if loads == RECLAIM_REGIONS {
                    break;
                }
                loads += 1;
            }
            let loaded = may_have
                && match self.load_whole(pages, number, &mut unread) {
                    Ok(loaded) => loaded,
                    // The runs found before are enough for now. The next search begins at this region and returns the
                    // error.
                    Err(_) if !runs.is_empty() => break,
                    Err(error) => return Err(error),
                };
            if !loaded {
                *region += 1;
                continue;
            }
            let searched = &mut self.regions[number as usize];
            let mut from = 0;
            let mut found = Vec::new();
            // The total never exceeds `most`, because other free blocks are reserved.
            while taken + least <= most
                && let Some((first, blocks)) = searched.find_free(from, least, most - taken)
            {
                found.push(Run { start: number * REGION_BLOCKS + first, blocks });
                from = first + blocks;
                taken += blocks;
            }
            let mut whole = Ok(true);
            for run in &found {
                whole = self.has_entries(pages, *run, &mut unread);
                if !matches!(whole, Ok(true)) {
                    break;
                }
            }
            let whole = match whole {
                Err(_) if !runs.is_empty() => break,
                whole => whole?,
            };
            if !whole {
                taken -= found.iter().map(|run| run.blocks).sum::<u64>();
                *region += 1;
                continue;
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

    /// Number of free blocks, which could be returned to the file system.
    pub fn reclaimable(&self) -> u64 {
        self.counts.free
    }
}
