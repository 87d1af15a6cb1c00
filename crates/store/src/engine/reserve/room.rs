//! Finds unclaimed space: space of the data files that the table counts neither as backed nor as in use. A crash leaves
//! it between a reservation and its record, or between the record and the punching of a hole.
//!
//! A region without unclaimed space takes exactly as much of the file system as its summary counts as backed. So the
//! search costs one query of the file system per region, and a region is compared block by block only if the two
//! numbers differ. Over a fragmented file of 500 GiB the queries take about a second, so a store with threads opens
//! first and searches then, region by region. A write that finds the file system full before the search has ended
//! completes it.
//!
//! A page of the table that has lost its entries describes blocks in use as holes. Its region counts more backed blocks
//! than the table, and nothing is punched there.
//!
//! What must hold: nothing is reserved or punched in a region while it is compared. So `extending`, which every
//! reservation locks, is held while a region is compared. `punching` is held for the same time, unless the caller holds
//! it or the store has no threads. The metadata lock is held only to read counts and entries.

use crate::engine::Engine;
use crate::space::{BlockEntry, REGION_BLOCKS, Run, TABLE_ENTRIES};
use crate::{IoContext, Result, is_lost};
use backend::{BLOCK_SIZE, File};
use std::ops::Range;

/// An offset past the end of any file.
const END: u64 = i64::MAX as u64;

/// The place that a search has reached.
#[derive(Clone, Copy, Default)]
struct Position {
    /// Number of the data file.
    file: usize,
    /// Offset in the file, in bytes.
    offset: u64,
}

/// The search for the unclaimed space that a crash left.
#[derive(Default)]
pub struct Search {
    position: Position,
    /// Blocks returned to the file system so far.
    returned: u64,
    /// Whether a query of the file system failed. Then the next opening searches again.
    failed: bool,
}

impl Engine {
    /// Calls `each` for every run of blocks that occupies space of the file system and does not count as backed.
    /// `running` is true when another thread may punch holes meanwhile.
    pub(crate) fn unclaimed_room(
        &self,
        running: bool,
        each: &mut dyn FnMut(&dyn File, Run) -> Result<()>,
    ) -> Result<()> {
        let mut position = Position::default();
        while self.compare_next_region(&mut position, running, each)? {}
        Ok(())
    }

    /// Compares the next region that occupies space of the file system. False if there is none.
    fn compare_next_region(
        &self,
        position: &mut Position,
        running: bool,
        each: &mut dyn FnMut(&dyn File, Run) -> Result<()>,
    ) -> Result<bool> {
        let files = self.files.all();
        while let Some(file) = files.get(position.file) {
            // On media other than local files, space follows the length of the file, so no unclaimed space exists.
            // The data files are sparse: regions without space are skipped.
            let found = if file.local().is_some() { next(&**file, position.offset)? } else { None };
            let Some(first) = found else {
                *position = Position { file: position.file + 1, offset: 0 };
                continue;
            };
            let base = position.file as u64 * crate::FILE_BLOCKS;
            let start = first.start.max(position.offset) / BLOCK_SIZE as u64;
            let region = base + start / REGION_BLOCKS * REGION_BLOCKS;
            let _punching = running.then(|| self.reserves.lock_punching());
            let _extending = self.reserves.lock_extending();
            let end = self.unclaimed_in_region(&**file, base, region, each)?;
            position.offset = end.max(position.offset + 1);
            return Ok(true);
        }
        Ok(false)
    }

    /// Compares one region. Returns the byte offset of its end in the file.
    fn unclaimed_in_region(
        &self,
        file: &dyn File,
        base: u64,
        region: u64,
        each: &mut dyn FnMut(&dyn File, Run) -> Result<()>,
    ) -> Result<u64> {
        let size = BLOCK_SIZE as u64;
        let bytes = (region - base) * size..(region - base + REGION_BLOCKS) * size;
        let mut taken: Vec<Range<u64>> = Vec::new();
        let mut blocks = 0;
        let mut at = bytes.start;
        while let Some(found) = next(file, at)?
            && found.start < bytes.end
        {
            // Partial blocks are ignored. They exist only if the file ends within a block.
            let range = found.start.max(bytes.start).div_ceil(size)..found.end.min(bytes.end) / size;
            if !range.is_empty() {
                blocks += range.end - range.start;
                taken.push(range);
            }
            at = found.end.max(at + 1);
            if at >= bytes.end {
                break;
            }
        }
        let (backed, known) = {
            let meta = self.meta.lock();
            (meta.data.backed_in(region / REGION_BLOCKS), meta.data.blocks())
        };
        if blocks == backed || self.has_lost_entries(region / REGION_BLOCKS)? {
            return Ok(bytes.end);
        }
        let mut found: Vec<Run> = Vec::new();
        for range in taken {
            for part in crate::engine::write::chunks(range.start + base..range.end + base, TABLE_ENTRIES) {
                let mut unclaimed: Vec<Run> = Vec::new();
                let looked = self.meta.look(|meta| {
                    unclaimed.clear();
                    for block in part.start..part.start + part.blocks {
                        // A block in use keeps its space, even if a repair of an earlier version did not count it.
                        let entry = if block < known { meta.entry(block)? } else { BlockEntry::default() };
                        if entry.backed || entry.references > 0 {
                            continue;
                        }
                        match unclaimed.last_mut() {
                            Some(last) if last.start + last.blocks == block => last.blocks += 1,
                            _ => unclaimed.push(Run { start: block, blocks: 1 }),
                        }
                    }
                    Ok(())
                });
                match looked {
                    // Nothing is known of the blocks that a damaged page of the table describes. Repairs rebuild the
                    // page, and return the space of the free ones.
                    Err(error) if is_lost(&error) && self.running.goes_on() => {
                        tracing::debug!(%error, block = part.start, "unclaimed space is not looked for");
                        continue;
                    }
                    looked => looked?,
                }
                for run in unclaimed {
                    match found.last_mut() {
                        Some(last) if last.start + last.blocks == run.start && run.start > range.start + base => {
                            last.blocks += run.blocks;
                        }
                        _ => found.push(run),
                    }
                }
            }
        }
        for run in found {
            each(file, run)?;
        }
        Ok(bytes.end)
    }

    /// Whether a page of a region's table has lost its entries: then blocks that it describes may be in use although
    /// they do not count as backed. Pages that cannot be read are passed over one by one.
    fn has_lost_entries(&self, region: u64) -> Result<bool> {
        let (missing, unread) = self.meta.look(|meta| meta.data.missing_in(&mut meta.pages, region))?;
        let is_lost = missing > unread * TABLE_ENTRIES;
        if is_lost {
            tracing::error!(region, missing, "the table has lost blocks in use: unused space is not looked for");
        }
        Ok(is_lost)
    }

    /// Continues the search for the unclaimed space that a crash left, and punches this space. `goes_on` is called
    /// before each region; if it returns false, the search pauses. `running` as in [`Engine::unclaimed_room`]. Returns
    /// true if the search has ended, because it is complete or because it failed. If punching fails, maintenance tries
    /// again later.
    pub(crate) fn return_unclaimed_room(&self, running: bool, goes_on: impl Fn() -> bool) -> bool {
        let mut search = self.reserves.lock_search();
        let Some(Search { position, returned, failed }) = search.as_mut() else { return true };
        let mut each = |file: &dyn File, run: Run| {
            self.files.touch(run);
            match punch(file, run) {
                Ok(()) => *returned += run.blocks,
                Err(error) => {
                    tracing::warn!(%error, "space that a crash left reserved is returned later");
                    self.reserves.note_unreturned(run);
                }
            }
            Ok(())
        };
        loop {
            if *failed || !goes_on() {
                return *failed;
            }
            match self.compare_next_region(position, running, &mut each) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    tracing::warn!(%error, "unused space is returned to the file system when the datastore is opened next");
                    *failed = true;
                }
            }
        }
        if *returned > 0 {
            tracing::info!(
                blocks = *returned,
                "returned unused space to the file system that a crash had left reserved"
            );
        }
        *search = None;
        true
    }
}

/// Punches a hole for a run.
pub(crate) fn punch(file: &dyn File, run: Run) -> Result<()> {
    let (_, offset, length) = crate::buffer::place(run);
    file.punch(offset, length).during(|| format!("returning {length} unused bytes to the file system"))
}

fn next(file: &dyn File, from: u64) -> Result<Option<Range<u64>>> {
    if from >= END {
        return Ok(None);
    }
    file.next_allocated(from).during(|| "querying which space a data file takes in the file system".into())
}
