//! Room of the file system that no block claims: what a crash leaves between reserving space and the journal knowing of
//! it, or between the journal letting go of space and the hole being punched.
//!
//! A region without such room takes exactly as much of the file system as its summary says is backed, so that looking
//! for it costs one question to the file system per region; only a region that takes more is looked at block by block.
//!
//! What must hold: nothing is reserved or punched in a region while it is looked at. Reserving happens under
//! `extending`, which is held for one region at a time; punching under `punching`, which is held as long, unless the
//! caller holds it or has no threads to fear. The metadata lock is held to look at counts and entries only.

use crate::engine::Engine;
use crate::space::{REGION_BLOCKS, Run, TABLE_ENTRIES};
use crate::{ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, File};
use std::ops::Range;
use std::sync::Arc;

/// As long as a file can be.
const END: u64 = i64::MAX as u64;

impl Engine {
    /// Calls `each` for every run of blocks that takes room of the file system and is not backed. `running` when holes
    /// may be punched meanwhile.
    pub(crate) fn unclaimed_room(
        &self,
        running: bool,
        each: &mut dyn FnMut(&dyn File, Run) -> Result<()>,
    ) -> Result<()> {
        // Space that follows the length of a file is not left behind in it.
        let local = |file: &Arc<dyn File>| file.local().is_some();
        for (number, file) in (0u64..).zip(self.files.all()).filter(|(_, file)| local(file)) {
            let base = number * crate::space::FILE_BLOCKS;
            let mut at = 0;
            // Files are sparse: regions that take no room are never met.
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

    /// Looks at one region; returns the byte offset of its end in the file.
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
            // Blocks that are taken in part, at an end of file that is none of ours, count for nothing.
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

    /// Gives back what a crash left. Where the file system has no room for a hole, maintenance does it later.
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
            tracing::info!(blocks = returned, "gave back space that a crash had left without an owner");
        }
        Ok(())
    }
}

/// Gives a run back to the file system.
pub(crate) fn punch(file: &dyn File, run: Run) -> Result<()> {
    let (_, offset, length) = crate::buffer::place(run);
    file.punch(offset, length).during(|| format!("giving {length} bytes without an owner back"))
}

fn next(file: &dyn File, from: u64) -> Result<Option<Range<u64>>> {
    if from >= END {
        return Ok(None);
    }
    file.next_allocated(from).during(|| "asking the file system which space a data file takes".into())
}
