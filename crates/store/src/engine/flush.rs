//! Flush: makes acknowledged writes durable, once for all flushes that wait.
//!
//! A flush that finds little buffered puts it into the journal with its payload, behind the pending changes, in one
//! durable append. A flush that finds much writes it to its place first. Pending changes that refer to data written in
//! place or to new places wait for a flush of the data files.
//!
//! Two kinds of operations are appended ahead of what is pending, because they commute with it:
//!
//! * announcements of overwrites: they name only blocks whose mapping is durable (others are held and never overwritten
//!   in place, see [`super::placement`]). The only pending change that can concern such a block frees it, and then the
//!   announcement has no effect;
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

/// Blocks of data that one step of a flush brings into the map.
const LOG_STEP: u64 = 64;
/// The most payload that a flush puts into the journal instead of writing it to its place: 4 MiB.
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

    /// Makes every change of the map and the catalog carried out before this call durable. Buffered data stays
    /// buffered.
    pub(super) fn commit_changes(&self) -> Result<()> {
        self.commit_pending(false)
    }

    /// The same. `gently` writes data out in small parts: for callers that no request waits for, beside requests that
    /// need the medium.
    pub(super) fn commit_pending(&self, gently: bool) -> Result<()> {
        self.check_running()?;
        self.make_journal_room()?;
        let _appends = self.admit_append()?;
        self.append_changes(gently)
    }

    /// The same for a caller that holds a grant for room in the journal: it does not wait for a checkpoint.
    pub(super) fn append_changes(&self, gently: bool) -> Result<()> {
        let mut commit = self.log.lock();
        self.append_pending(&mut commit)?;
        // Examined under the lock of the journal: changes that another thread took for its batch are durable only when
        // that batch is.
        if self.meta.lock().pending.is_empty() {
            return Ok(());
        }
        drop(commit);
        if gently {
            self.files.write_out();
        }
        // The remaining changes wait for data. Changes that were pending at the call wait for this flush only.
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
                // Blocks that were freed or held can be used once the pending changes are durable.
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
            // No batch of write-back is under way now, so this flush makes all its writes durable.
            let announced = self.log.announced_end();
            drop(gate);
            if self.log.needs_sync() {
                drop(commit);
                self.sync_data()?;
                commit = self.log.lock();
            }
            if !self.log.is_settled(announced) {
                // A flush of the data files ran after a write to its place ended and before its batch ended: the data
                // is durable, and recovery would still write older payload of the journal over it once the next
                // overwrite has begun.
                self.sync_all_data()?;
            }
            self.append_pending(&mut commit)?;
            while !self.log.is_told(announced) {
                // The record waits behind changes whose data was written during the flush: one more flush covers them.
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
            // A thread that took the lock in between may have appended the queued operations: they are durable in both
            // cases.
            self.log.clocks.set_durable(covered);
            return Ok(());
        }
    }

    /// The most payload that one flush puts into the journal: the size of the ring limits it too.
    pub(super) fn payload_max(&self) -> u64 {
        PAYLOAD_MAX.min(self.log.ring() / 16)
    }

    /// More bytes of pending changes than this ask for a commit of their own.
    pub(super) fn pending_limit(&self) -> usize {
        (self.log.ring() / 8).min(16 << 20) as usize
    }

    /// Makes durable everything that was written to its place so far.
    pub(super) fn sync_data(&self) -> Result<()> {
        let wanted = self.log.clocks.home();
        let one = self.log.lock_syncing();
        // After a flush that failed, the kernel lets the next one succeed although data was lost.
        self.check_running()?;
        if self.log.clocks.synced() >= wanted {
            return Ok(());
        }
        self.sync_locked(one)
    }

    /// As [`Engine::sync_data`], including other writes to the data files: payload that recovery or a checkpoint writes
    /// to its place does not count as written, because flushes need not wait for it.
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
        // One critical section, so that a thread that finds the overwrite settled finds its record pending or appended.
        let mut meta = self.meta.lock();
        if let Some(position) = syncing.end() {
            // The record follows the checksums of the overwrites that it settles: they are pending already.
            meta.enqueue(Operation::Synced { position }, 0)?;
        }
        Ok(())
    }

    /// What the buffered extents will need of the metadata, determined before any lock is taken for them.
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

    /// Moves buffered extents into the map and the pending list, payload by reference. Under gate and commit. `None` if
    /// that was everything; otherwise the cost for which there was no room, or no cost if the limit of one turn was
    /// reached.
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

    /// Moves one entry of the oldest layer in steps. Parts for which there was room leave the buffer.
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
            // Data buffered since over a discard or zeroes is a newer write: the buffer was not locked all the time
            // since the entry was copied.
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
                // A checkpoint must have room for what a step dirties: shared leaves may refer to blocks all over the
                // medium.
                most /= 2;
            }
            at = step.end;
        }
        Ok(None)
    }

    /// Moves data of a few blocks, if there is room for it.
    fn log_step(&self, meta: &mut Meta, head: &Head, piece: &DirtyPiece) -> Result<Step> {
        let blocks = piece.entry.blocks;
        let end = piece.logical + blocks;
        let (_, pages) = meta.reach(head.id, piece.logical..end, false, u64::MAX)?;
        // In the worst case each block gets a record and a place of its own.
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
            // The payload follows the pending changes in the journal, and is written to its place after the append:
            // what counts is which trees share the blocks now.
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
                // Runs of blocks that only this head maps are overwritten; the journal protects the content.
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
                    // Reserved space of a thick disk: the record that it is written enters the map with the content.
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

    /// Appends the pending changes up to the first whose data is not durable.
    pub(super) fn append_pending(&self, commit: &mut MutexGuard<'_, Committer>) -> Result<()> {
        // The thread that held the journal before may have failed with the pending changes: they are lost then, and not
        // durable.
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
                // The bytes are no payload that a checkpoint keeps: a clean checkpoint can drop them.
                commit.discount_last();
            }
            self.retire_committed(taken.changes)?;
        }
    }

    /// The journal has the changes now: new places may be overwritten in place, and freed blocks wait only for readers.
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

    /// Ends the journal with a trailer, unless an append is under way: maintenance then tries again. True if there is a
    /// trailer now, or none is needed.
    pub(super) fn trail_journal(&self) -> Result<bool> {
        let Some(mut commit) = self.log.try_lock() else { return Ok(false) };
        self.check_running()?;
        self.check_owner()?;
        if let Err(error) = self.log.trail(&mut commit) {
            // The next batch overwrites the trailer with a durable write, and reports if the medium fails.
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
