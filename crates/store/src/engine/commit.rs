//! Flush: making what was acknowledged durable, once for everybody who waits.
//!
//! A flush that finds little buffered puts it into the journal, payload and all, behind the pending changes: one
//! durable append. One that finds much writes it home first. Pending changes that point at data written home wait for
//! a flush of the data files.
//!
//! Two kinds of operations are appended ahead of what is pending, because they commute with it:
//!
//! * announcements of overwrites: they name only blocks whose mapping is durable (others are held and
//!   never overwritten in place, see [`super::placement`]), so nothing pending can concern them but their being freed,
//!   which makes them irrelevant;
//! * the record of a new unsealed snapshot: everything pending for its disk was written before it and belongs to it
//!   too, and the operation that completes it ([`Operation::Seal`]) keeps its place in the order.

use super::admission::Cost;
use super::apply::Effects;
use super::fetch::Fetch;
use super::others::{STEPS_MAX, Step};
use super::placement::Holds;
use super::{Committer, Engine, Head, Meta, Pending};
use crate::Result;
use crate::buffer::{Content, Piece};
use crate::journal::{BODY_MAX, BatchKind, Operation, Writer};
use crate::space::Run;
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::tree;
use backend::{BLOCK_SIZE, SharedSlice};
use std::sync::Arc;

/// Blocks of data that a flush brings into the map at a time.
const LOG_STEP: u64 = 64;
/// The most payload that a flush puts into the journal instead of writing it home: 4 MiB.
const PAYLOAD_MAX: u64 = 4 << 20;

impl Engine {
    /// Makes everything acknowledged before this call durable.
    pub fn flush(&self) -> Result<()> {
        let ticket = self.clock.load(Ordering::Acquire);
        self.flush_to(ticket)
    }

    /// Makes every change of the map and the catalog carried out before this call durable; what is only buffered is
    /// left alone.
    pub(super) fn commit_changes(&self) -> Result<()> {
        self.commit_pending(false)
    }

    /// The same; `gently` where nobody waits for it, but others for the medium.
    pub(super) fn commit_pending(&self, gently: bool) -> Result<()> {
        self.check_running()?;
        self.make_journal_room()?;
        let _appends = self.admit_append()?;
        self.append_changes(gently)
    }

    /// The same for what has room in the journal already: under a grant, and without waiting for a checkpoint.
    pub(super) fn append_changes(&self, gently: bool) -> Result<()> {
        self.append_pending(&mut self.commit.lock())?;
        if self.meta.lock().pending.is_empty() {
            return Ok(());
        }
        if gently {
            self.files.write_out();
        }
        // What is left waits for data; whatever was pending when this was called waits for no more than this flush.
        self.sync_data()?;
        self.append_pending(&mut self.commit.lock())
    }

    fn flush_to(&self, ticket: u64) -> Result<()> {
        loop {
            self.check_running()?;
            if self.durable.load(Ordering::Acquire) >= ticket {
                return Ok(());
            }
            self.make_journal_room()?;
            let buffered = self.buffered.load(Ordering::Acquire) * BLOCK_SIZE as u64;
            if buffered > self.payload_max() {
                self.write_back_once()?;
                continue;
            }
            let _fetch = self.bring_in_buffered();
            let appends = self.admit_append()?;
            self.flushes_waiting.fetch_add(1, Ordering::AcqRel);
            let gate = self.gate.lock();
            self.flushes_waiting.fetch_sub(1, Ordering::AcqRel);
            let mut commit = self.commit.lock();
            if self.durable.load(Ordering::Acquire) >= ticket {
                return Ok(());
            }
            if self.buffered.load(Ordering::Acquire) * BLOCK_SIZE as u64 > 2 * self.payload_max() {
                continue;
            }
            let covered = self.clock.load(Ordering::Acquire);
            let left = self.log_buffers()?;
            drop(gate);
            if self.needs_sync() {
                drop(commit);
                self.sync_data()?;
                commit = self.commit.lock();
            }
            self.append_pending(&mut commit)?;
            if let Some(cost) = left {
                drop(commit);
                drop(appends);
                self.make_room(cost)?;
                continue;
            }
            // Whoever came in between appended what we had queued; either way it is durable now.
            self.durable.fetch_max(covered, Ordering::AcqRel);
            return Ok(());
        }
    }

    /// The most payload one flush journals: bounded by the ring too.
    pub(super) fn payload_max(&self) -> u64 {
        PAYLOAD_MAX.min(self.journal_size() / 16)
    }

    /// Pending changes beyond this many bytes ask for a commit of their own.
    pub(super) fn pending_limit(&self) -> usize {
        (self.journal_size() / 8).min(16 << 20) as usize
    }

    fn needs_sync(&self) -> bool {
        self.written.load(Ordering::Acquire) > self.synced.load(Ordering::Acquire)
    }

    /// Makes everything written home so far durable.
    pub(super) fn sync_data(&self) -> Result<()> {
        let wanted = self.written.load(Ordering::Acquire);
        let _sync = self.sync.lock();
        // After a flush that failed the next one succeeds without what was lost.
        self.check_running()?;
        if self.synced.load(Ordering::Acquire) >= wanted {
            return Ok(());
        }
        let through = self.through.write();
        let (settled, written) = self.begin_sync();
        drop(through);
        self.end_sync(settled, written)
    }

    /// As [`Engine::sync_data`], and whatever else was written to the data files: payload taken home does not count as
    /// written, because flushes need not wait for it.
    pub(super) fn sync_all_data(&self) -> Result<()> {
        let _sync = self.sync.lock();
        self.check_running()?;
        let through = self.through.write();
        let (settled, written) = self.begin_sync();
        drop(through);
        self.end_sync(settled, written)
    }

    /// Ends all permits; what a flush of the data files from now on settles: (announcements before this journal
    /// position, home writes).
    fn begin_sync(&self) -> (u64, u64) {
        // One critical section: a permit given between its two statements would be settled and live on.
        let mut permits = self.permits.lock();
        permits.clear();
        // The order matters: an announcement made after the head was read lies behind it.
        let head = self.journal_head.load(Ordering::Acquire);
        drop(permits);
        let settled = head.min(self.announced.load(Ordering::Acquire));
        (settled, self.written.load(Ordering::Acquire))
    }

    fn end_sync(&self, settled: u64, written: u64) -> Result<()> {
        self.files.sync().map_err(|error| self.stop(error))?;
        self.counters.data_syncs.fetch_add(1, Ordering::Relaxed);
        self.synced.fetch_max(written, Ordering::AcqRel);
        if self.settled.fetch_max(settled, Ordering::AcqRel) < settled {
            // Behind the checksums of what it settles: they are pending already.
            let operation = Operation::Synced { position: settled };
            self.meta.lock().enqueue(operation, 0)?;
        }
        Ok(())
    }

    /// What the buffered pieces will need of the metadata, before any lock is taken for them.
    fn bring_in_buffered(&self) -> Vec<Fetch> {
        if self.meta.lock().pages.is_warm() {
            return Vec::new();
        }
        let mut fetched = Vec::new();
        for head in self.existing_heads() {
            let pieces = self.oldest_pieces(&head, u64::MAX);
            if !pieces.is_empty() {
                fetched.push(self.bring_in(|meta| meta.survey_pieces(head.id, &pieces)));
            }
        }
        fetched
    }

    /// Moves what is buffered into the map and the pending list, payload by reference. Under gate and commit. `None`
    /// when that was everything; else the cost of what there was no room for, or nothing if it was enough for one turn.
    pub(super) fn log_buffers(&self) -> Result<Option<Cost>> {
        let mut steps = STEPS_MAX;
        for head in self.existing_heads() {
            let mut buffer = head.buffer.lock();
            if buffer.layers.is_empty() {
                continue;
            }
            loop {
                let (layer, closed) = buffer.layers.oldest();
                for piece in layer.take(0, u64::MAX) {
                    let left = self.log_entry(&mut buffer, &head, &piece, &mut steps)?;
                    if left.is_some() {
                        return Ok(left);
                    }
                }
                if !closed {
                    break;
                }
                self.seal_oldest(&mut buffer)?;
            }
        }
        Ok(None)
    }

    /// One entry of the oldest layer, in steps; what there was room for leaves the buffer.
    pub(super) fn log_entry(
        &self,
        buffer: &mut super::Buffer,
        head: &Head,
        piece: &Piece,
        steps: &mut usize,
    ) -> Result<Option<Cost>> {
        let end = piece.logical + piece.entry.blocks;
        let mut at = piece.logical;
        while at < end {
            let mut meta = self.meta.lock();
            let step = match &piece.entry.content {
                Content::Data(..) => self.log_step(&mut meta, head, &piece.part(at..end.min(at + LOG_STEP)))?,
                _ if *steps == 0 => return Ok(Some(Cost::default())),
                content => {
                    *steps -= 1;
                    self.apply_other(&mut meta, head.id, at..end, content)?
                }
            };
            self.update_headroom(&meta);
            drop(meta);
            let (layer, _) = buffer.layers.oldest();
            let gone = layer.remove(at, step.end - at, piece.entry.stamp);
            self.give_back(gone);
            if step.refused.is_some() {
                return Ok(step.refused);
            }
            at = step.end;
        }
        Ok(None)
    }

    /// Data of a few blocks, if there is room for it.
    fn log_step(&self, meta: &mut Meta, head: &Head, piece: &Piece) -> Result<Step> {
        let blocks = piece.entry.blocks;
        let end = piece.logical + blocks;
        let (_, pages) = meta.reach(head.id, piece.logical..end, false, u64::MAX)?;
        // At worst each block gets a record and a place of its own.
        let cost = Cost { bytes: blocks * (BLOCK_SIZE as u64 + 64), pages: pages + blocks };
        let Some(_grant) = self.admission.try_admit(cost) else {
            return Ok(Step { end: piece.logical, refused: Some(cost) });
        };
        self.log_piece(meta, head, piece)?;
        Ok(Step { end, refused: None })
    }

    fn log_piece(&self, meta: &mut Meta, head: &Head, piece: &Piece) -> Result<()> {
        let Content::Data(slice, sums) = &piece.entry.content else { return Ok(()) };
        let range = piece.logical..piece.logical + piece.entry.blocks;
        let root = meta.catalog.get(head.id)?.root;
        let mut extents = Vec::new();
        if let Some(root) = root {
            // Payload follows what is pending in the journal, and goes home when the journal has it: what matters is
            // who shares the blocks now.
            let (none, mut effects) = (Holds::default(), Effects::default());
            let mut nodes = meta.current_nodes(&none, &mut effects);
            tree::lookup_exclusive(&mut nodes, root, range.clone(), &mut extents)?;
        }
        let part = |from: u64, to: u64| -> SharedSlice {
            let at = |block: u64| (block - piece.logical) as usize * BLOCK_SIZE;
            slice.slice(at(from)..at(to))
        };
        let mut at = range.start;
        for extent in extents {
            let mut own = Vec::new();
            if !extent.shared_path {
                // Runs of blocks that are this head's alone: overwritten, the journal protecting them.
                for i in 0..extent.blocks {
                    if meta.entry(extent.physical + i)?.references == 1 {
                        match own.last_mut() {
                            Some((start, blocks)) if *start + *blocks == extent.logical + i => *blocks += 1,
                            _ => own.push((extent.logical + i, 1)),
                        }
                    }
                }
            }
            for (logical, blocks) in own {
                self.log_new(meta, head, at..logical, &part)?;
                let run = Run { start: extent.physical + (logical - extent.logical), blocks };
                let data = vec![part(logical, logical + blocks)];
                let gate = self.synced.load(Ordering::Acquire);
                if extent.unwritten {
                    // Space that a thick disk set aside: the map learns that it is written, together with the content.
                    let from = (logical - piece.logical) as usize;
                    let checksums = sums.as_slice()[from..from + blocks as usize].to_vec();
                    let written = Operation::Written { disk: head.id, logical, run, checksums };
                    self.carry_out(meta, written, gate)?;
                    meta.join_last();
                }
                self.carry_out(meta, Operation::OverwriteData { run, data }, gate)?;
                at = logical + blocks;
            }
        }
        self.log_new(meta, head, at..range.end, &part)
    }

    fn log_new(
        &self,
        meta: &mut Meta,
        head: &Head,
        range: std::ops::Range<u64>,
        part: &dyn Fn(u64, u64) -> SharedSlice,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let run = self.allocate(meta, range.end - at)?;
            let data = vec![part(at, at + run.blocks)];
            let gate = self.synced.load(Ordering::Acquire);
            let operation = Operation::MapData { disk: head.id, logical: at, run, data };
            self.carry_out_new(meta, operation, gate)?;
            at += run.blocks;
        }
        Ok(())
    }

    /// Appends what is pending, as far as the data behind it is durable.
    pub(super) fn append_pending(&self, commit: &mut MutexGuard<'_, Committer>) -> Result<()> {
        // Whoever had the journal before may have failed with what was pending: it is neither here nor durable then.
        self.check_running()?;
        let body_max = BODY_MAX.min(self.journal_size() as usize / 4);
        loop {
            let synced = self.synced.load(Ordering::Acquire);
            let mut writer = Writer::default();
            let mut taken: Vec<Pending> = Vec::new();
            let mut joined = false;
            {
                let mut meta = self.meta.lock();
                if meta.captured == Some(0) {
                    meta.captured = None;
                    commit.ordered = Some(commit.journal.head());
                }
                while let Some(next) = meta.pending.front()
                    && next.gate <= synced
                    && (writer.len() < body_max / 2 || joined)
                    && meta.captured != Some(0)
                {
                    writer.push(&next.operation);
                    joined = next.joined;
                    taken.extend(meta.pop());
                    meta.captured = meta.captured.map(|left| left - 1);
                }
                if taken.is_empty() {
                    return Ok(());
                }
                // The end of what a checkpoint captured is noted in the next round.
            }
            self.append(commit, BatchKind::Operations, &writer.finish())?;
            if taken.iter().all(|pending| matches!(pending.operation, Operation::Synced { .. })) {
                // Changes nothing that a checkpoint holds: a clean one may let go of it.
                commit.batches -= 1;
            }
            self.retire_committed(taken)?;
        }
    }

    /// What the journal now holds: new places may be overwritten in place, freed ones wait for their readers.
    pub(super) fn retire_committed(&self, taken: Vec<Pending>) -> Result<()> {
        let mut meta = self.meta.lock();
        meta.appending_bytes = 0;
        let mut freed = Vec::new();
        for pending in taken {
            meta.release_holds(&pending)?;
            freed.extend(pending.freed);
        }
        meta.freeing -= freed.iter().map(|run| run.blocks).sum::<u64>();
        if !freed.is_empty() {
            let epoch = std::mem::replace(&mut meta.epoch, Arc::new(()));
            meta.limbo.push_back((epoch, freed));
            self.request(|work| work.reclaim = true);
        }
        meta.release_limbo();
        self.update_headroom(&meta);
        self.count_changes(&meta);
        Ok(())
    }

    /// Appends operations ahead of what is pending.
    pub(super) fn append_urgent(&self, commit: &mut MutexGuard<'_, Committer>, operations: &[Operation]) -> Result<()> {
        let mut writer = Writer::default();
        for operation in operations {
            writer.push(operation);
        }
        self.append(commit, BatchKind::Urgent, &writer.finish())
    }

    pub(super) fn journal_size(&self) -> u64 {
        self.ring
    }
}
