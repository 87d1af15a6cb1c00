//! Maps buffered data, or that of a write which bypasses the buffer, to the stored blocks to which it is equal: under
//! the locks, where everything that was found without them is tested once more. The rules are those of [`super`].

use super::{EqualRun, EqualRuns};
use crate::Result;
use crate::buffer::{DirtyPiece, Held};
use crate::engine::locked_buffers::LockedBuffers;
use crate::engine::sharing::Equal;
use crate::engine::writeback::BATCH_STRIDE;
use crate::engine::{Buffer, Engine, Head, Meta};
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;

impl Engine {
    /// The disks whose buffers must be locked to map these runs, in ascending order.
    pub(in crate::engine::writeback) fn kept_disks(runs: &[EqualRun], own: Option<u64>) -> Vec<u64> {
        let mut disks: Vec<u64> = runs.iter().map(|run| run.hint.disk).chain(own).collect();
        disks.sort_unstable();
        disks.dedup();
        disks
    }

    /// Whether the stored blocks of a run can still be mapped. Called with the metadata and the buffers locked.
    pub(in crate::engine::writeback) fn is_still_equal(
        &self,
        meta: &mut Meta,
        disk: u64,
        equal: &EqualRun,
        kept: &mut LockedBuffers<'_>,
    ) -> Result<bool> {
        let together = {
            let hints = self.writeback.equal.hints.lock();
            // Numbers are given again after all disks have left their domains.
            hints.number_of(disk) == Some(equal.number)
                && hints.number_of(equal.hint.disk) == Some(equal.hint.number)
                && hints.belong_together(equal.number, equal.hint.number)
        };
        let watched = equal.watches.iter().all(|watch| meta.in_flight.is_watched(*watch));
        if !together || !watched {
            return Ok(false);
        }
        let place = (equal.hint.disk, equal.hint.logical);
        let planned = meta.plan_equal(disk, equal.logical.clone(), place, &equal.checksums)?;
        if planned == Equal::Gone {
            // A block that has all references gives way to the newest copy, which is about to be written.
            self.forget_hints(equal);
        }
        let Equal::Blocks(found) = planned else { return Ok(false) };
        let is_free = |buffer: &mut Buffer| !buffer.gone && buffer.layers.is_free(&equal.kept());
        Ok(equal.is_of(&found) && (!found.alone || kept.of(equal.hint.disk).is_none_or(is_free)))
    }

    /// The number of writes to the data files that must be durable before the stored blocks of a run are mapped.
    pub(in crate::engine::writeback) fn gate_of(&self, equal: &EqualRun) -> u64 {
        if equal.stored.packed.is_some() { 0 } else { self.log.clocks.wrote_home() }
    }

    /// Maps the stored blocks of these runs, and removes the entries from the buffer. The caller has locked the gate.
    /// True if any were mapped. What is not mapped stays buffered.
    pub(in crate::engine) fn map_equal_runs(&self, head: &Head, equal: &EqualRuns<'_>) -> Result<bool> {
        let mut any = false;
        for runs in equal.runs.chunks(BATCH_STRIDE) {
            let _fetch = self.meta.bring_in(|meta| {
                runs.iter().for_each(|equal| meta.survey_operation(&equal.operation(head.id)));
            });
            let disks = Self::kept_disks(runs, Some(head.id));
            let heads = self.buffers.of_disks(&disks);
            if !heads.iter().any(|own| std::ptr::eq(&**own, head)) {
                return Ok(any);
            }
            let mut buffers = LockedBuffers::lock(&heads);
            let mut meta = self.meta.lock();
            if !buffers.are_current(&self.buffers, &disks) {
                return Ok(any);
            }
            let mut gone = Held::default();
            let mut mapped = Ok(true);
            for equal in runs {
                mapped = match self.map_equal_run(&mut meta, head.id, equal, &mut buffers, &mut gone) {
                    // The data is written instead. If that fails too, its error is reported.
                    Err(error) if self.running.goes_on() => {
                        tracing::debug!(%error, disk = head.id, "new data is not mapped to stored blocks");
                        Ok(true)
                    }
                    mapped => mapped,
                };
                if !matches!(mapped, Ok(true)) {
                    break;
                }
            }
            self.update_headroom(&meta);
            let commit_wanted = self.is_commit_due(&meta);
            MutexGuard::unlock_fair(meta);
            drop(buffers);
            any |= gone != Held::default();
            self.give_back(gone);
            if commit_wanted {
                self.request(|work| work.commit = true);
            }
            if !mapped? {
                break;
            }
        }
        Ok(any)
    }

    /// Maps the stored blocks of one run, unless something has changed. False if there was no room for the operation.
    fn map_equal_run(
        &self,
        meta: &mut Meta,
        disk: u64,
        equal: &EqualRun,
        buffers: &mut LockedBuffers<'_>,
        gone: &mut Held,
    ) -> Result<bool> {
        let Some(own) = buffers.of(disk) else { return Ok(true) };
        if own.gone || !has_only(own, equal) || !self.is_still_equal(meta, disk, equal, buffers)? {
            return Ok(true);
        }
        let gate = self.gate_of(equal);
        if self.try_carry_out(meta, equal.operation(disk), gate)?.is_some() {
            return Ok(false);
        }
        self.note_mapped(equal);
        if let Some(own) = buffers.of(disk) {
            for (part, stamp) in &equal.parts {
                *gone += own.layers.oldest().0.remove(part.start, part.end - part.start, *stamp);
            }
        }
        Ok(true)
    }

    /// Notes that a run was mapped for a write.
    pub(in crate::engine::writeback) fn note_mapped(&self, equal: &EqualRun) {
        self.writeback.equal.mapped.fetch_add(equal.blocks(), Ordering::Relaxed);
    }
}

/// Whether a buffer still has the data of a run in its oldest layer, and nothing else for its blocks: another write may
/// have no claim on a block, because it would overwrite the block that is mapped now in place.
fn has_only(buffer: &mut Buffer, equal: &EqualRun) -> bool {
    let is_mine = |piece: &DirtyPiece| {
        equal.parts.iter().any(|(part, stamp)| piece.entry.stamp == *stamp && part.contains(&piece.logical))
    };
    let oldest = buffer.layers.oldest().0.pieces(&equal.logical);
    let whole: u64 = oldest.iter().filter(|piece| is_mine(piece)).map(|piece| piece.entry.blocks).sum();
    let mut later = buffer.layers.iter().skip(1).map(|layer| layer.pieces(&equal.logical));
    whole == equal.blocks()
        && oldest.iter().all(|piece| piece.is_data() && piece.entry.covered)
        && later.all(|pieces| pieces.is_empty())
}
