//! Surveys: determine which table pages an operation will need. Pages in memory count as used, missing ones are
//! recorded. Nothing is changed.

use super::allocation::{GOOD_RUN, SEARCH_REGIONS};
use super::backing::RECLAIM_REGIONS;
use super::region::{self, REGION_BLOCKS, REGION_PAGES};
use super::table::{self, TABLE_ENTRIES};
use super::{BlockEntry, Run, SUMMARY_ENTRIES, Space};
use crate::pages::{PageKey, Pages};

impl Space {
    /// The entry of a block, if its page is in memory.
    pub fn peek(&self, pages: &mut Pages, block: u64) -> Option<BlockEntry> {
        let (key, index) = self.locate(block);
        pages.peek(key).map(|page| table::read(page, index))
    }

    /// Surveys the entries of a run.
    pub fn survey_entries(&self, pages: &mut Pages, run: Run) {
        let end = run.start.saturating_add(run.blocks).min(self.blocks());
        if run.start < end {
            for page in run.start / TABLE_ENTRIES..=(end - 1) / TABLE_ENTRIES {
                pages.peek(PageKey::new(self.table, page));
            }
        }
    }

    /// Determines the pages that are needed to drop references on a run.
    pub fn survey_drop(&self, pages: &mut Pages, run: Run) {
        self.survey_entries(pages, run);
        let blocks = run.blocks.min(self.blocks().saturating_sub(run.start));
        for (number, _, _) in region::parts(Run { blocks, ..run }) {
            self.survey_region(pages, number);
        }
    }

    /// Surveys an overwrite of a run. Blocks with one durable reference are overwritten in place, references on the
    /// others are dropped. Returns the number of blocks overwritten in place.
    pub fn survey_overwrite(&self, pages: &mut Pages, run: Run) -> u64 {
        let mut own = 0;
        let end = run.start.saturating_add(run.blocks).min(self.blocks());
        let mut block = run.start;
        while block < end {
            let (key, first) = self.locate(block);
            let count = (TABLE_ENTRIES - first as u64).min(end - block) as usize;
            if let Some(page) = pages.peek(key) {
                let entries = (first..first + count).map(|index| table::read(page, index));
                let here = entries.filter(|entry| entry.references == 1 && !entry.held).count();
                own += here as u64;
                if here < count {
                    self.survey_region(pages, block / REGION_BLOCKS);
                }
            }
            block += count as u64;
        }
        own
    }

    /// Surveys the bitmaps of a region.
    pub(super) fn survey_region(&self, pages: &mut Pages, number: u64) {
        if self.regions.get(number as usize).is_some_and(|region| region.bitmaps.is_none() && !region.damaged) {
            for page in 0..REGION_PAGES {
                pages.peek(PageKey::new(self.table, number * REGION_PAGES + page));
            }
        }
    }

    /// Surveys the allocation of up to `want` contiguous blocks, including their first reference.
    pub fn survey_allocation(&self, pages: &mut Pages, want: u64) {
        if let Some(run) = self.next_grown(want) {
            return self.survey_entries(pages, run);
        }
        let least = if self.fragmented { 1 } else { want.min(GOOD_RUN) };
        self.survey_search(pages, least, want);
    }

    /// Surveys [`Space::allocate_whole`].
    pub fn survey_allocation_whole(&self, pages: &mut Pages, blocks: u64) {
        self.survey_search(pages, blocks, blocks);
    }

    fn survey_search(&self, pages: &mut Pages, least: u64, want: u64) {
        let count = self.regions();
        let (start, mut from) = (self.cursor / REGION_BLOCKS, self.cursor % REGION_BLOCKS);
        for step in 0..count.min(SEARCH_REGIONS) {
            let number = (start + step) % count;
            let region = &self.regions[number as usize];
            if region.may_have_free(least) {
                let Some(bitmaps) = &region.bitmaps else { return self.survey_region(pages, number) };
                if let Some((first, blocks)) = bitmaps.find_free(from, least, want) {
                    let run = Run { start: number * REGION_BLOCKS + first, blocks };
                    return self.survey_entries(pages, run);
                }
            }
            from = 0;
        }
    }

    /// Surveys a search for blocks to return to the file system, from `region` on.
    pub fn survey_reclaim(&self, pages: &mut Pages, region: u64, least: u64) {
        let candidates = (region..self.regions()).filter(|number| self.regions[*number as usize].may_have_free(least));
        for number in candidates.take(RECLAIM_REGIONS) {
            self.survey_entries(pages, Run { start: number * REGION_BLOCKS, blocks: REGION_BLOCKS });
        }
    }

    /// Surveys the summaries of changed regions.
    pub fn survey_summaries(&self, pages: &mut Pages) {
        for number in &self.dirty_regions {
            pages.peek(PageKey::new(self.summary, number / SUMMARY_ENTRIES));
        }
    }
}
