//! Fills a disk that is not in use yet, past the buffer: for full clones, eager zeroing and imports.

use super::Engine;
use super::admit::STEP_PAGES;
use super::reserve::KEPT;
use crate::journal::{Operation, RUN_MAX};
use crate::space::Run;
use crate::sync::MutexGuard;
use crate::tree::Aim;
use crate::{IoContext, Result};
use backend::{BLOCK_SIZE, IoMode};
use checksums::Checksums;
use std::ops::Range;

/// Writes a disk that no client writes, from any number of threads. Of two writes to a block the later counts.
pub struct BulkWriter<'a> {
    engine: &'a Engine,
    disk: u64,
}

impl<'a> BulkWriter<'a> {
    /// For a disk marked as incomplete: a failure before [`Engine::complete_disk`] leaves no disk behind.
    pub fn new(engine: &'a Engine, disk: u64) -> Self {
        Self { engine, disk }
    }

    /// Writes whole blocks at `logical` to new places, immediately.
    pub fn write(&self, logical: u64, data: &[u8]) -> Result<()> {
        self.write_summed(logical, data, &Checksums::of(data))
    }

    /// The same for data whose checksums are known.
    pub fn write_summed(&self, logical: u64, data: &[u8], sums: &Checksums) -> Result<()> {
        let engine = self.engine;
        engine.check_running()?;
        engine.pace()?;
        let blocks = (data.len() / BLOCK_SIZE) as u64;
        let mut at = 0;
        while at < blocks {
            let claim = engine.claim_blocks(blocks - at)?;
            let run = {
                let _fetch = engine.meta.bring_in(|meta| meta.survey_allocation(blocks - at));
                let mut meta = engine.meta.lock();
                let run = engine.allocate(&mut meta, blocks - at)?;
                engine.update_headroom(&meta);
                run
            };
            drop(claim);
            let bytes = &data[at as usize * BLOCK_SIZE..(at + run.blocks) as usize * BLOCK_SIZE];
            let (file, offset) = engine.files.locate(run)?;
            let turn = self.turn();
            file.write_at(&[bytes], offset, false)
                .during(|| format!("writing {} bytes of a new disk", bytes.len()))
                .map_err(|error| engine.stop(error))?;
            drop(turn);
            // The medium works while the next part is read, instead of when everything is flushed.
            file.write_out(offset, bytes.len() as u64, false);
            engine.files.touch(run);
            let gate = engine.log.clocks.wrote_home();
            let sums = &sums.as_slice()[at as usize..(at + run.blocks) as usize];
            let mut mapped = 0;
            self.map(logical + at, run, sums, gate, &mut mapped).inspect_err(|_| {
                let left = Run { start: run.start + mapped, blocks: run.blocks - mapped };
                engine.release_new(&mut engine.meta.lock(), Some(left));
            })?;
            at += run.blocks;
        }
        engine.bound_pending()
    }

    /// Maps what was written, in steps if the range is already mapped in many extents. `at` returns the number of
    /// mapped blocks, also after an error.
    fn map(&self, logical: u64, run: Run, sums: &[u32], gate: u64, at: &mut u64) -> Result<()> {
        while *at < run.blocks {
            let range = logical + *at..logical + run.blocks;
            let (end, _) = self.engine.meta.lock().reach(self.disk, range, false, STEP_PAGES)?;
            let part = Run { start: run.start + *at, blocks: end - (logical + *at) };
            let checksums = sums[*at as usize..(*at + part.blocks) as usize].to_vec();
            let operation = Operation::Map { disk: self.disk, logical: logical + *at, run: part, checksums };
            self.engine.carry_out_waiting(operation, gate)?;
            *at += part.blocks;
        }
        Ok(())
    }

    /// Takes space for a range without writing it: the range reads as zeros.
    pub fn reserve(&self, range: Range<u64>) -> Result<()> {
        let engine = self.engine;
        let mut at = range.start;
        while at < range.end {
            engine.check_running()?;
            engine.pace()?;
            let most = (range.end - at).min(RUN_MAX);
            let claim = engine.claim_blocks(most)?;
            let _fetch = engine.meta.bring_in(|meta| {
                meta.survey_allocation(most);
                meta.survey_disk(self.disk, at..at + most, Aim::Map);
            });
            let mut meta = engine.meta.lock();
            let (end, _) = meta.reach(self.disk, at..range.end, false, STEP_PAGES)?;
            let run = engine.allocate(&mut meta, (end - at).min(most))?;
            let operation = Operation::Unwritten { disk: self.disk, logical: at, run, fresh: true };
            let nodes = meta.nodes_of(&operation).inspect_err(|_| engine.release_new(&mut meta, Some(run)))?;
            if !engine.are_spare(&meta, nodes, KEPT) {
                engine.release_new(&mut meta, Some(run));
                drop(meta);
                engine.make_spare(nodes, KEPT)?;
                continue;
            }
            let refused = engine.try_carry_out_new(&mut meta, operation, 0)?;
            engine.update_headroom(&meta);
            drop(meta);
            drop(claim);
            match refused {
                Some(cost) => engine.make_room(cost)?,
                None => at += run.blocks,
            }
            engine.bound_pending()?;
        }
        Ok(())
    }

    /// Unmaps a range, which then reads as zeros. For disks that begin as a clone; no block of the range may be
    /// buffered.
    pub fn discard(&self, range: Range<u64>) -> Result<()> {
        self.engine.unmap_waiting(self.disk, range)
    }

    /// Makes durable what was written or unmapped before.
    pub fn commit(&self) -> Result<()> {
        self.engine.commit_changes()
    }

    /// File systems let one writer at a time into the cached pages of a file, and the kernel spins in all other
    /// writers: waiting for this lock instead leaves the processor to other threads. Past the page cache they write in
    /// parallel.
    fn turn(&self) -> Option<MutexGuard<'a, ()>> {
        (self.engine.options.mode == IoMode::Buffered).then(|| self.engine.writeback.lock_copying())
    }
}

impl Engine {
    /// Starts a checkpoint or a commit if much is pending. Not to be called under a lock that a checkpoint takes.
    pub(super) fn bound_pending(&self) -> Result<()> {
        if self.is_checkpoint_due() {
            self.checkpoint_if_needed()?;
        } else if self.meta.lock().pending.bytes() > self.pending_limit() {
            self.commit_changes()?;
        }
        Ok(())
    }
}
