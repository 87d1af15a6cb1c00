//! Writes a disk that is not in use yet, bypassing the buffer: for full clones, eager zeroing and imports.

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

/// Writes a disk that no client uses, from any number of threads. If a block is written twice, the later write replaces
/// the earlier one.
pub struct BulkWriter<'a> {
    engine: &'a Engine,
    disk: u64,
}

impl<'a> BulkWriter<'a> {
    /// Writes a disk that is marked as incomplete. If a failure prevents [`Engine::complete_disk`], the next opening
    /// deletes the disk.
    pub fn new(engine: &'a Engine, disk: u64) -> Self {
        Self { engine, disk }
    }

    /// Allocates blocks for the data, writes them at once, and maps them at `logical`.
    pub fn write(&self, logical: u64, data: &[u8]) -> Result<()> {
        self.write_summed(logical, data, &Checksums::of(data))
    }

    /// Like [`BulkWriter::write`], for data with known checksums.
    pub fn write_summed(&self, logical: u64, data: &[u8], sums: &Checksums) -> Result<()> {
        let engine = self.engine;
        engine.check_running()?;
        engine.pace()?;
        let blocks = (data.len() / BLOCK_SIZE) as u64;
        let mut at = 0;
        while at < blocks {
            let claim = engine.claim_blocks(blocks - at)?;
            let bulk = engine.writeback.share_bulk();
            let run = {
                let _fetch = engine.meta.bring_in(|meta| meta.survey_allocation(blocks - at));
                let mut meta = engine.meta.lock();
                let run = engine.allocate(&mut meta, blocks - at)?;
                engine.update_headroom(&meta);
                run
            };
            drop(claim);
            let bytes = &data[at as usize * BLOCK_SIZE..(at + run.blocks) as usize * BLOCK_SIZE];
            let located = engine.files.locate(run);
            let (file, offset) = located.inspect_err(|_| engine.release_new(&mut engine.meta.lock(), Some(run)))?;
            let turn = self.turn();
            file.write_at(&[bytes], offset, false)
                .during(|| format!("writing {} bytes of a new disk", bytes.len()))
                .map_err(|error| engine.stop(error))?;
            drop(turn);
            // Starts writing to the device now, so that the final flush has less to write.
            file.write_out(offset, bytes.len() as u64, false);
            engine.files.touch(run);
            let gate = engine.log.clocks.wrote_home();
            let sums = &sums.as_slice()[at as usize..(at + run.blocks) as usize];
            let mut mapped = 0;
            self.map(logical + at, run, sums, gate, &mut mapped).inspect_err(|_| {
                let left = Run { start: run.start + mapped, blocks: run.blocks - mapped };
                engine.release_new(&mut engine.meta.lock(), Some(left));
            })?;
            drop(bulk);
            at += run.blocks;
        }
        engine.bound_pending()
    }

    /// Maps the written blocks, in steps if the range is mapped in many extents. `at` is the number of blocks mapped so
    /// far, also after an error.
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

    /// Allocates blocks for a range without writing them: the range reads as zeros.
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

    /// Unmaps a range, which then reads as zeros: needed for disks that begin as a clone. No block of the range may be
    /// buffered.
    pub fn discard(&self, range: Range<u64>) -> Result<()> {
        self.engine.unmap_waiting(self.disk, range)
    }

    /// Makes the writes and discards so far durable.
    pub fn commit(&self) -> Result<()> {
        self.engine.commit_pending(true)
    }

    /// Locks buffered writes, so that one thread writes at a time. The page cache admits one writer of a file at a
    /// time, and further writers spin in the kernel; a thread that waits for this lock leaves the processor to others.
    /// With direct I/O, writes run in parallel, and the lock is not taken.
    fn turn(&self) -> Option<MutexGuard<'a, ()>> {
        (self.engine.options.mode == IoMode::Buffered).then(|| self.engine.writeback.lock_copying())
    }
}

impl Engine {
    /// Starts a checkpoint or a commit if many changes are pending. Must not be called under a lock that a checkpoint
    /// takes.
    pub(super) fn bound_pending(&self) -> Result<()> {
        if self.is_checkpoint_due() {
            self.checkpoint_if_needed()?;
        } else if self.is_commit_due(&self.meta.lock()) {
            self.commit_pending(true)?;
        }
        Ok(())
    }
}
