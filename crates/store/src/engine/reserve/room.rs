//! Finds unclaimed space: space of the data files that the table does not count as backed. A crash leaves it between a
//! reservation and its record, or between the record and the punching of a hole.
//!
//! A region without unclaimed space takes exactly as much of the file system as its summary counts as backed. So the
//! search costs one query of the file system per region, and only a region that takes more is compared block by block.
//!
//! What must hold: nothing is reserved or punched in a region while it is compared. `extending`, which reservations
//! take, is held for one region at a time. `punching` is held as long, unless the caller holds it or the store has no
//! threads. The metadata lock is held only to read counts and entries.

use crate::engine::Engine;
use crate::space::{REGION_BLOCKS, Run, TABLE_ENTRIES};
use crate::{ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, File};
use std::ops::Range;
use std::sync::Arc;

/// An offset past the end of any file.
const END: u64 = i64::MAX as u64;

impl Engine {
    /// Calls `each` for every run of blocks that takes space of the file system and is not backed. `running` is true
    /// when another thread may punch holes meanwhile.
    pub(crate) fn unclaimed_room(
        &self,
        running: bool,
        each: &mut dyn FnMut(&dyn File, Run) -> Result<()>,
    ) -> Result<()> {
        // On media other than local files, space follows the length of the file, so no unclaimed space exists.
        let local = |file: &Arc<dyn File>| file.local().is_some();
        for (number, file) in (0u64..).zip(self.files.all()).filter(|(_, file)| local(file)) {
            let base = number * crate::space::FILE_BLOCKS;
            let mut at = 0;
            // The data files are sparse: regions without space are skipped.
            while let Some(first) = next(&*file, at)? {
                let region = base + first.start.max(at) / BLOCK_SIZE as u64 / REGION_BLOCKS * REGION_BLOCKS;
                let _punching = running.then(|| self.reserves.lock_punching());
                let _extending = self.reserves.lock_extending();
                let end = self.unclaimed_in_region(&*file, base, region, each)?;
                at = end.max(at + 1);
            }
        }
        Ok(())
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
        if blocks == backed {
            return Ok(bytes.end);
        }
        let mut found: Vec<Run> = Vec::new();
        for range in taken {
            for part in crate::engine::write::chunks(range.start + base..range.end + base, TABLE_ENTRIES) {
                let mut unclaimed: Vec<Run> = Vec::new();
                self.meta.look(|meta| {
                    unclaimed.clear();
                    for block in part.start..part.start + part.blocks {
                        if block < known && meta.entry(block)?.backed {
                            continue;
                        }
                        match unclaimed.last_mut() {
                            Some(last) if last.start + last.blocks == block => last.blocks += 1,
                            _ => unclaimed.push(Run { start: block, blocks: 1 }),
                        }
                    }
                    Ok(())
                })?;
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

    /// Punches the unclaimed space that a crash left. If punching fails because the file system is full, maintenance
    /// tries again later.
    pub(crate) fn return_unclaimed_room(&self) -> Result<()> {
        let mut returned = 0;
        self.unclaimed_room(false, &mut |file, run| {
            self.files.touch(run);
            match punch(file, run) {
                Ok(()) => returned += run.blocks,
                Err(error) if error.kind() == ErrorKind::NoSpace => self.reserves.note_unreturned(run),
                Err(error) => return Err(error),
            }
            Ok(())
        })?;
        if returned > 0 {
            tracing::info!(
                blocks = returned,
                "returned unused space to the file system that a crash had left reserved"
            );
        }
        Ok(())
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
