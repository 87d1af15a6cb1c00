//! Filling a disk that nobody uses yet, past the buffer: full clones, eager zeroing, imports.

use super::Engine;
use super::write::chunks;
use super::zeroes::UNMAP_MAX;
use crate::buffer::Checksums;
use crate::journal::{Operation, RUN_MAX};
use crate::{IoContext, Result};
use backend::{BLOCK_SIZE, IoMode};
use parking_lot::MutexGuard;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Writes a disk that nobody else writes, from as many threads as there are; of two writes to a block the later counts.
pub struct BulkWriter<'a> {
    engine: &'a Engine,
    disk: u64,
}

impl<'a> BulkWriter<'a> {
    /// For a disk marked incomplete: whatever happens before [`Engine::complete_disk`] leaves no disk behind.
    pub fn new(engine: &'a Engine, disk: u64) -> Self {
        Self { engine, disk }
    }

    /// Writes whole blocks at `logical`, to new places, at once.
    pub fn write(&self, logical: u64, data: &[u8]) -> Result<()> {
        self.write_summed(logical, data, &Checksums::of(data))
    }

    /// The same, of data whose checksums are known.
    pub fn write_summed(&self, logical: u64, data: &[u8], sums: &Checksums) -> Result<()> {
        let engine = self.engine;
        engine.check_running()?;
        engine.make_journal_room()?;
        let blocks = (data.len() / BLOCK_SIZE) as u64;
        let mut at = 0;
        while at < blocks {
            let claim = engine.claim_blocks(blocks - at)?;
            let run = {
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
            // The medium works while the next piece is read, instead of when all of it is flushed.
            file.write_out(offset, bytes.len() as u64, false);
            engine.files.touch(run);
            let gate = engine.written.fetch_add(1, Ordering::AcqRel) + 1;
            let checksums = sums.as_slice()[at as usize..(at + run.blocks) as usize].to_vec();
            let operation = Operation::Map { disk: self.disk, logical: logical + at, run, checksums };
            let mut meta = engine.meta.lock();
            engine.carry_out_new(&mut meta, operation, gate)?;
            at += run.blocks;
        }
        self.bound_pending()
    }

    /// Takes space for a range without writing it: it reads as zeros.
    pub fn reserve(&self, range: Range<u64>) -> Result<()> {
        let engine = self.engine;
        let mut at = range.start;
        while at < range.end {
            engine.check_running()?;
            engine.make_journal_room()?;
            let claim = engine.claim_blocks((range.end - at).min(RUN_MAX))?;
            let mut meta = engine.meta.lock();
            let run = engine.allocate(&mut meta, (range.end - at).min(RUN_MAX))?;
            let operation = Operation::Unwritten { disk: self.disk, logical: at, run, fresh: true };
            engine.carry_out_new(&mut meta, operation, 0)?;
            engine.update_headroom(&meta);
            drop(meta);
            drop(claim);
            at += run.blocks;
            self.bound_pending()?;
        }
        Ok(())
    }

    /// Lets go of a range: it reads as zeros. For disks that begin as a clone; nothing of it may be buffered.
    pub fn discard(&self, range: Range<u64>) -> Result<()> {
        let engine = self.engine;
        for part in chunks(range, UNMAP_MAX) {
            engine.check_running()?;
            engine.make_journal_room()?;
            let operation = Operation::Unmap { disk: self.disk, logical: part.start, blocks: part.blocks };
            let mut meta = engine.meta.lock();
            engine.carry_out(&mut meta, operation, 0)?;
            engine.update_headroom(&meta);
            drop(meta);
            self.bound_pending()?;
        }
        Ok(())
    }

    /// Makes everything durable that was written or let go of before.
    pub fn commit(&self) -> Result<()> {
        self.engine.commit_changes()
    }

    /// File systems let one writer at a time into the cached pages of a file, and the kernel burns the time of all
    /// others: whoever waits for this instead leaves the processor to who has something to do. Past the page cache they
    /// write side by side.
    fn turn(&self) -> Option<MutexGuard<'a, ()>> {
        (self.engine.options.mode == IoMode::Buffered).then(|| self.engine.copying.lock())
    }

    fn bound_pending(&self) -> Result<()> {
        let (pending, checkpoint_due) = {
            let meta = self.engine.meta.lock();
            (meta.pending_bytes, self.engine.is_checkpoint_due(&meta.pages))
        };
        if checkpoint_due {
            self.engine.checkpoint_if_needed()?;
        } else if pending > self.engine.pending_limit() {
            self.engine.commit_changes()?;
        }
        Ok(())
    }
}
