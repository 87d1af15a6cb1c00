//! Flush: making what was acknowledged durable, once for all that wait.
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

use super::log::Committer;
use super::log::Cost;
use super::metadata::{Effects, Fetch};
use super::metadata::{Meta, Pending};
use super::placement::Holds;
use super::writeback::{STEPS_MAX, Step};
use super::{Buffer, Engine, Head};
use crate::buffer::{Content, DirtyPiece};
use crate::journal::{BODY_MAX, BatchKind, Operation, Writer};
use crate::space::Run;
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::tree;
use crate::{ErrorKind, Result};
use backend::{BLOCK_SIZE, SharedSlice};

/// Blocks of data that a flush brings into the map at a time.
const LOG_STEP: u64 = 64;
/// The most payload that a flush puts into the journal instead of writing it home: 4 MiB.
const PAYLOAD_MAX: u64 = 4 << 20;

impl Engine {
    /// Makes everything acknowledged before this call durable.
    pub fn flush(&self) -> Result<()> {
        self.flush_to(self.acknowledged())
    }

    /// The last write acknowledged: what a flush asked for now has to cover.
    pub fn acknowledged(&self) -> u64 {
        self.log.clocks.acknowledged()
    }

    /// Makes every change of the map and the catalog carried out before this call durable; what is only buffered is
    /// left alone.
    pub(super) fn commit_changes(&self) -> Result<()> {
        self.commit_pending(false)
    }

    /// The same; `gently` where nothing waits for it, but others for the medium.
    pub(super) fn commit_pending(&self, gently: bool) -> Result<()> {
        self.check_running()?;
        self.make_journal_room()?;
        let _appends = self.admit_append()?;
        self.append_changes(gently)
    }

    /// The same for what has room in the journal already: under a grant, and without waiting for a checkpoint.
    pub(super) fn append_changes(&self, gently: bool) -> Result<()> {
        let mut commit = self.log.lock();
        self.append_pending(&mut commit)?;
        // Looked at under the lock of the journal: what another thread takes for its batch is not durable before the
        // end of that.
        if self.meta.lock().pending.is_empty() {
            return Ok(());
        }
        drop(commit);
        if gently {
            self.files.write_out();
        }
        // What is left waits for data; whatever was pending when this was called waits for no more than this flush.
        self.sync_data()?;
        self.append_pending(&mut self.log.lock())
    }

    /// Makes every write up to that one durable, unless another flush does.
    pub fn flush_to(&self, ticket: u64) -> Result<()> {
        let mut freed = false;
        loop {
            self.check_running()?;
            if self.log.clocks.is_durable(ticket) {
                return Ok(());
            }
            self.make_journal_room()?;
            let buffered = self.buffers.blocks() * BLOCK_SIZE as u64;
            if buffered > self.payload_max() {
                self.write_back_once()?;
                continue;
            }
            let _fetch = self.bring_in_buffered();
            let appends = self.admit_append()?;
            let gate = self.writeback.lock_for_flush();
            let mut commit = self.log.lock();
            if self.log.clocks.is_durable(ticket) {
                return Ok(());
            }
            if self.buffers.blocks() * BLOCK_SIZE as u64 > 2 * self.payload_max() {
                continue;
            }
            let covered = self.log.clocks.acknowledged();
            let left = match self.log_buffers() {
                // What is freed, or held, becomes free by what is pending.
                Err(error) if error.kind() == ErrorKind::NoSpace && !freed => {
                    freed = true;
                    drop(gate);
                    drop(commit);
                    self.append_changes(false)?;
                    continue;
                }
                Err(error) if self.isolate(&error) => continue,
                other => other?,
            };
            // No batch of write-back is under way now: its writes are among those to be made durable.
            let announced = self.log.announced_end();
            drop(gate);
            if self.log.needs_sync() {
                drop(commit);
                self.sync_data()?;
                commit = self.log.lock();
            }
            if !self.log.is_settled(announced) {
                // A flush of the data files came between the end of a write home and the end of its batch: what was
                // written is durable, and recovery would still put older payload of the journal over it once the next
                // overwrite has begun.
                self.sync_all_data()?;
            }
            self.append_pending(&mut commit)?;
            while !self.log.is_told(announced) {
                // The record waits behind changes whose data came home during the flush: one more flush covers them.
                drop(commit);
                self.sync_data()?;
                commit = self.log.lock();
                self.append_pending(&mut commit)?;
            }
            if let Some(cost) = left {
                drop(commit);
                drop(appends);
                self.make_room(cost)?;
                continue;
            }
            // A thread that took the lock in between may have appended what this flush queued: durable either way.
            self.log.clocks.set_durable(covered);
            return Ok(());
        }
    }

    /// The most payload one flush journals: bounded by the ring too.
    pub(super) fn payload_max(&self) -> u64 {
        PAYLOAD_MAX.min(self.log.ring() / 16)
    }

    /// Pending changes beyond this many bytes ask for a commit of their own.
    pub(super) fn pending_limit(&self) -> usize {
        (self.log.ring() / 8).min(16 << 20) as usize
    }

    /// Makes everything written home so far durable.
    pub(super) fn sync_data(&self) -> Result<()> {
        let wanted = self.log.clocks.home();
        let one = self.log.lock_syncing();
        // After a flush that failed the next one succeeds without what was lost.
        self.check_running()?;
        if self.log.clocks.synced() >= wanted {
            return Ok(());
        }
        self.sync_locked(one)
    }

    /// As [`Engine::sync_data`], and whatever else was written to the data files: payload taken home does not count as
    /// written, because flushes need not wait for it.
    pub(super) fn sync_all_data(&self) -> Result<()> {
        self.sync_locked(self.log.lock_syncing())
    }

    fn sync_locked(&self, one: MutexGuard<'_, ()>) -> Result<()> {
        self.check_running()?;
        let through = self.writeback.stop_through();
        let syncing = self.log.begin_sync(one);
        drop(through);
        self.files.sync().map_err(|error| self.stop(error))?;
        self.counters.data_syncs.fetch_add(1, Ordering::Relaxed);
        // One critical section: who finds it settled finds the record pending, or appended.
        let mut meta = self.meta.lock();
        if let Some(position) = syncing.end() {
            // Behind the checksums of what it settles: they are pending already.
            meta.enqueue(Operation::Synced { position }, 0)?;
        }
        Ok(())
    }

    /// What the buffered pieces will need of the metadata, before any lock is taken for them.
    fn bring_in_buffered(&self) -> Vec<Fetch> {
        if self.meta.lock().pages.is_warm() {
            return Vec::new();
        }
        let mut fetched = Vec::new();
        for head in self.buffers.heads() {
            let pieces = head.lock().oldest_pieces(u64::MAX);
            if !pieces.is_empty() {
                fetched.push(self.meta.bring_in(|meta| meta.survey_pieces(head.id, &pieces)));
            }
        }
        fetched
    }

    /// Moves what is buffered into the map and the pending list, payload by reference. Under gate and commit. `None`
    /// when that was everything; else the cost of what there was no room for, or nothing if it was enough for one turn.
    pub(super) fn log_buffers(&self) -> Result<Option<Cost>> {
        let mut steps = STEPS_MAX;
        for head in self.buffers.heads() {
            let mut buffer = head.lock();
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
        buffer: &mut Buffer,
        head: &Head,
        piece: &DirtyPiece,
        steps: &mut usize,
    ) -> Result<Option<Cost>> {
        let end = piece.logical + piece.entry.blocks;
        let (mut at, mut most) = (piece.logical, LOG_STEP);
        while at < end {
            // What was buffered since over a discard or zeroes is not theirs any more: the buffer was not held all the
            // time since the piece was copied.
            let (layer, _) = buffer.layers.oldest();
            let Some(still) = layer.still(&(at..end), piece.entry.stamp) else { break };
            let mut meta = self.meta.lock();
            let step = match &piece.entry.content {
                Content::Data(..) => self.log_step(&mut meta, head, &piece.part(at..end.min(at + most))),
                _ if *steps == 0 => return Ok(Some(Cost::default())),
                content => {
                    *steps -= 1;
                    self.apply_other(&mut meta, head.id, still, content)
                }
            };
            self.update_headroom(&meta);
            drop(meta);
            let step = step?;
            let (layer, _) = buffer.layers.oldest();
            let gone = layer.remove(at, step.end - at, piece.entry.stamp);
            self.give_back(gone);
            if let Some(cost) = step.refused {
                if most == 1 || self.log.admission.holds(cost) {
                    return Ok(step.refused);
                }
                // A checkpoint must have room for what a step dirties: shared leaves name blocks all over the medium.
                most /= 2;
            }
            at = step.end;
        }
        Ok(None)
    }

    /// Data of a few blocks, if there is room for it.
    fn log_step(&self, meta: &mut Meta, head: &Head, piece: &DirtyPiece) -> Result<Step> {
        let blocks = piece.entry.blocks;
        let end = piece.logical + blocks;
        let (_, pages) = meta.reach(head.id, piece.logical..end, false, u64::MAX)?;
        // At worst each block gets a record and a place of its own.
        let cost = Cost { bytes: blocks * (BLOCK_SIZE as u64 + 64), pages: pages + blocks };
        let Some(_grant) = self.log.admission.try_admit(cost) else {
            return Ok(Step { end: piece.logical, refused: Some(cost) });
        };
        self.log_piece(meta, head, piece)?;
        Ok(Step { end, refused: None })
    }

    fn log_piece(&self, meta: &mut Meta, head: &Head, piece: &DirtyPiece) -> Result<()> {
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
                let gate = self.log.clocks.synced();
                if extent.unwritten {
                    // Reserved space of a thick disk: the record that it is written goes into the map with the content.
                    let from = (logical - piece.logical) as usize;
                    let checksums = sums.as_slice()[from..from + blocks as usize].to_vec();
                    let written = Operation::Written { disk: head.id, logical, run, checksums };
                    self.carry_out(meta, written, gate)?;
                    meta.pending.join_last();
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
            let gate = self.log.clocks.synced();
            let operation = Operation::MapData { disk: head.id, logical: at, run, data };
            self.carry_out_new(meta, operation, gate)?;
            at += run.blocks;
        }
        Ok(())
    }

    /// Appends what is pending, as far as the data behind it is durable.
    pub(super) fn append_pending(&self, commit: &mut MutexGuard<'_, Committer>) -> Result<()> {
        // What held the journal before may have failed with what was pending: it is neither here nor durable then.
        self.check_running()?;
        let body_max = BODY_MAX.min(self.log.ring() as usize / 4);
        loop {
            let synced = self.log.clocks.synced();
            let mut writer = Writer::default();
            let taken = self.meta.lock().pending.take_batch(synced, |operation| {
                writer.push(operation);
                writer.len() < body_max / 2
            });
            if taken.ordered {
                commit.end_capture();
            }
            if taken.changes.is_empty() {
                return Ok(());
            }
            self.append(commit, BatchKind::Operations, &writer.finish())?;
            let mut changes_something = false;
            for pending in &taken.changes {
                match pending.operation {
                    Operation::Synced { position } => self.log.note_told(position),
                    _ => changes_something = true,
                }
            }
            if !changes_something {
                // Nothing that a checkpoint holds: a clean one may let go of it.
                commit.discount_last();
            }
            self.retire_committed(taken.changes)?;
        }
    }

    /// What the journal now holds: new places may be overwritten in place, freed ones wait for their readers.
    pub(super) fn retire_committed(&self, taken: Vec<Pending>) -> Result<()> {
        let mut meta = self.meta.lock();
        if meta.committed(taken)? {
            self.request(|work| work.reclaim = true);
        }
        meta.release_freed();
        self.update_headroom(&meta);
        self.count_changes(&meta);
        Ok(())
    }

    /// Appends a batch; a failure stops the datastore.
    pub(super) fn append(&self, commit: &mut Committer, kind: BatchKind, parts: &[&[u8]]) -> Result<()> {
        self.check_owner()?;
        self.log.append(commit, kind, parts).map_err(|error| self.stop(error))?;
        self.counters.journal_appends.fetch_add(1, Ordering::Relaxed);
        if self.log.lacks_trailer(commit) {
            self.request(|work| work.trailer = true);
        }
        Ok(())
    }

    /// Ends the journal with a trailer, unless something is being appended: then another look comes. True if there is
    /// one now, or none is needed.
    pub(super) fn trail_journal(&self) -> Result<bool> {
        let Some(mut commit) = self.log.try_lock() else { return Ok(false) };
        self.check_running()?;
        self.check_owner()?;
        if let Err(error) = self.log.trail(&mut commit) {
            // The next batch overwrites it, durably, and tells whether the medium still takes writes.
            tracing::warn!(%error, "the journal stays without a trailer until something is appended");
        }
        Ok(true)
    }

    /// Appends operations ahead of what is pending.
    pub(super) fn append_urgent(&self, commit: &mut MutexGuard<'_, Committer>, operations: &[Operation]) -> Result<()> {
        let mut writer = Writer::default();
        for operation in operations {
            writer.push(operation);
        }
        self.append(commit, BatchKind::Urgent, &writer.finish())
    }
}
