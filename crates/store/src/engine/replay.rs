//! Replay: applies the operations in the journal since the last checkpoint.
//!
//! [`crate::engine::placement::Doubts`] tracks the blocks with announced writes that may have been cut off.
//!
//! What must hold at the end: the table entry of each block in use has the checksum of the content on the medium, or
//! the block is marked as suspect. A suspect block was being overwritten by a write that was not acknowledged as
//! durable: any content that is found in it is valid.

mod drops;
mod parts;
mod redirects;

use self::drops::Drops;
use super::left_out::{LeftOut, Tolerance};
use super::metadata::Effects;
use super::placement::Doubts;
use super::{Engine, Meta};
use crate::journal::{Batch, BatchKind, Operation, Place, Reader};
use crate::space::Run;
use crate::{Error, ErrorKind, IoContext, Result, checksum};
use backend::{Buffer, File};

fn blocks(run: &Run) -> std::ops::Range<u64> {
    run.start..run.start + run.blocks
}

/// The outcome of a replay.
pub(super) struct Replayed {
    /// Number of operations that were applied.
    pub operations: u64,
    pub doubts: Doubts,
}

/// What a replay knows beside the metadata.
struct ReplayState<'a> {
    doubts: Doubts,
    drops: Drops,
    left_out: &'a mut LeftOut,
    /// Position in the journal of the batch that is replayed.
    position: u64,
}

impl Engine {
    /// Applies the operations from `from` to `end`: all urgent ones, and the others from `ordered` on. The data files
    /// are neither read nor written, which [`Engine::put_payload_home`] does then.
    pub(super) fn replay(&self, from: Place, ordered: Place, end: Place, left_out: &mut LeftOut) -> Result<Replayed> {
        self.find_reserved_nodes()?;
        let mut state = ReplayState { doubts: Doubts::default(), drops: Drops::default(), left_out, position: 0 };
        let mut count = 0;
        let mut place = from;
        while place != end {
            let batch = {
                let commit = self.log.lock();
                commit.read(place)?
            };
            let Some(Batch { kind, body, next, .. }) = batch else {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("the journal could be read before, and cannot be read again at {}", place.position),
                ));
            };
            // The pages already contain the changes that were pending when the checkpoint captured them.
            if kind == BatchKind::Urgent || kind == BatchKind::Operations && place >= ordered {
                state.position = place.position;
                let mut reader = Reader::new(&body);
                while let Some(operation) = reader.next_operation()? {
                    let replayed = self.replay_one(&mut state, &operation);
                    replayed.map_err(|error| {
                        error.context(format!("replaying the journal at {} failed", place.position))
                    })?;
                    count += 1;
                }
            }
            place = next;
        }
        Ok(Replayed { operations: count, doubts: state.doubts })
    }

    fn replay_one(&self, state: &mut ReplayState<'_>, operation: &Operation) -> Result<()> {
        let mut guard = self.meta.lock();
        let meta = &mut *guard;
        let ready = self.drop_before(meta, state, operation);
        if state.left_out.leaves_out(meta, operation)? {
            state.drops.note_left_out();
            return Ok(());
        }
        let replayed = ready.and_then(|()| match operation {
            Operation::Drop { object, steps } => self.drop_again(meta, state, *object, *steps),
            Operation::Pack { .. } | Operation::Share { .. } | Operation::SharePack { .. } => {
                self.redirect_again(meta, state, operation)
            }
            Operation::MapShared { run, checksums, .. } | Operation::MapSharedPack { run, checksums, .. }
                if state.left_out.tolerance() != Tolerance::Nothing =>
            {
                self.map_shared_again(meta, state, operation, *run, checksums)
            }
            _ if state.left_out.leaves_out_parts() => self.carry_out_parts(meta, state, operation),
            _ => self.carry_out_again(meta, state, operation),
        });
        match replayed {
            Err(error) if state.left_out.tolerates(meta, operation, &error) => Ok(()),
            other => other,
        }
    }

    fn carry_out_again(&self, meta: &mut Meta, state: &mut ReplayState<'_>, operation: &Operation) -> Result<()> {
        // If the file system is full, replay uses only space that was reserved before the crash.
        self.ensure_nodes(meta, crate::engine::metadata::NODES_PER_OPERATION)?;
        match operation {
            Operation::Overwrite { run, checksums } => {
                for (block, sum) in blocks(run).zip(checksums) {
                    let has_payload = meta.logged.contains_key(&block);
                    state.doubts.announced(block, state.position, *sum, has_payload);
                }
            }
            Operation::Announce { run } => {
                for block in blocks(run) {
                    state.doubts.permitted(block, state.position, meta.entry(block)?.suspect);
                }
            }
            Operation::Synced { position: settled } => meta.settle(&mut state.doubts, *settled)?,
            _ => {}
        }
        if let Operation::Map { run, .. }
        | Operation::MapPack { run, .. }
        | Operation::Pack { run, .. }
        | Operation::Share { run, .. }
        | Operation::SharePack { run, .. }
        | Operation::MapShared { run, .. }
        | Operation::MapSharedPack { run, .. } = operation
        {
            // Payload from before may be kept: if the operation that freed the blocks was left out, or because nothing
            // else says that an overwrite of a shared block was durable before the share.
            meta.forget_logged(*run);
        }
        let mut effects = Effects::default();
        meta.apply(operation, &mut effects)?;
        meta.release_again(&mut state.doubts, effects.freed);
        match operation {
            Operation::Map { run, .. }
            | Operation::MapData { run, .. }
            | Operation::MapPack { run, .. }
            | Operation::Written { run, .. }
            | Operation::OverwriteData { run, .. }
            | Operation::Pack { run, .. }
            | Operation::Checksums { run, .. } => {
                blocks(run).for_each(|block| state.doubts.told(block));
                meta.doubt(&state.doubts, *run)
            }
            // Blocks that the map of another disk refers to from now on stay in doubt.
            Operation::Share { run, .. }
            | Operation::SharePack { run, .. }
            | Operation::MapShared { run, .. }
            | Operation::MapSharedPack { run, .. } => meta.doubt(&state.doubts, *run),
            // The read that resolved the block may have overlapped an overwrite, so a later announcement still leaves
            // the block in doubt.
            Operation::Resolve { block, .. } => {
                state.doubts.resolved(*block);
                meta.doubt(&state.doubts, Run { start: *block, blocks: 1 })
            }
            _ => Ok(()),
        }
    }

    /// Writes journalled payload to its blocks, also to those of announced overwrites that are not settled. A flush
    /// returns only when all overwrites announced before it are settled, so the payload is the newest flushed content.
    /// The checksum in the announcement does not tell whether the overwrite was complete, because older content may
    /// have the same one: versions of a block of ext4 that ends with a CRC32C of its own all do.
    ///
    /// If the end of the journal is lost, so may be the record of a flush that settled the overwrites. Programs that
    /// wrote version 1 did not wait for this record. In these cases, blocks that have the checksum of one of their
    /// overwrites are left out: these are in the doubts `unsettled`. It need not be the last one, which may not have
    /// been written any more after a flush of the one before.
    pub(super) fn put_payload_home(&self, unsettled: Option<&Doubts>) -> Result<()> {
        let logged = std::mem::take(&mut self.meta.lock().logged);
        for (block, slice) in logged {
            let run = Run { start: block, blocks: 1 };
            let (file, offset) = self.files.locate(run)?;
            let announced = unsettled.map(|doubts| doubts.awaited(block)).unwrap_or_default();
            if !announced.is_empty()
                && self.has_content(&*file, offset, &announced).during(|| format!("writing block {block} again"))?
            {
                self.files.touch(run);
                continue;
            }
            file.write_at(&[&slice], offset, false)
                .during(|| format!("writing journalled block {block} to its place"))?;
            self.files.touch(run);
            let mut guard = self.meta.lock();
            let Meta { data, pages, .. } = &mut *guard;
            let sum = checksum(&slice);
            data.annotate(pages, run, |_, entry| {
                entry.checksum = sum;
                entry.suspect = false;
            })?;
        }
        self.files.sync()
    }

    /// Whether a block has the content with one of these checksums. If that content is in the page cache, it is written
    /// again: the cache was dropped before, so another process has the file mapped, and after a failed flush the medium
    /// may lack the content.
    fn has_content(&self, file: &dyn File, offset: u64, sums: &[u32]) -> std::io::Result<bool> {
        let mut found = Buffer::zeroed(1);
        let cached = file.read_cached_at(&mut found, offset).unwrap_or(false);
        if !cached && let Err(error) = file.read_at(&mut found, offset) {
            // The block does not have the complete content. Writing it makes it readable again.
            tracing::warn!(%error, "a block that was being overwritten cannot be read");
            return Ok(false);
        }
        let complete = sums.contains(&checksum(&found));
        if complete && cached {
            file.write_at(&[&found], offset, false)?;
        }
        Ok(complete)
    }
}

impl Meta {
    /// Makes the blocks that an operation has freed allocatable, and forgets journalled payload for them.
    fn release_again(&mut self, doubts: &mut Doubts, freed: Vec<Run>) {
        for run in freed {
            self.forget_logged(run);
            blocks(&run).for_each(|block| doubts.told(block));
            self.data.release(run);
        }
    }

    /// Called when a flush of the data files covered the overwrites announced before `settled`.
    fn settle(&mut self, doubts: &mut Doubts, settled: u64) -> Result<()> {
        for one in doubts.settle(settled) {
            let run = Run { start: one.block, blocks: 1 };
            if one.overwritten {
                self.forget_logged(run);
            }
            if one.certain {
                self.data.annotate(&mut self.pages, run, |_, entry| entry.suspect = false)?;
            }
        }
        Ok(())
    }

    /// Marks blocks in doubt as suspect, in a run that has just got new checksums.
    fn doubt(&mut self, doubts: &Doubts, run: Run) -> Result<()> {
        for block in blocks(&run).filter(|block| doubts.contains(*block)) {
            self.data.annotate(&mut self.pages, Run { start: block, blocks: 1 }, |_, entry| entry.suspect = true)?;
        }
        Ok(())
    }
}
