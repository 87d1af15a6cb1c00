//! Flush: makes acknowledged writes durable. Flushes that wait at the same time share the work.
//!
//! If little data is buffered, the flush appends this data to the journal as payload, after the pending changes, in one
//! durable append. If much is buffered, write-back writes it to the data files first. A pending change that refers to
//! data in the data files waits until they are flushed.
//!
//! Two kinds of operations are appended ahead of the pending changes, because they commute with the pending changes:
//!
//! * announcements of in-place overwrites. They name only blocks with a durable mapping: other blocks are held and
//!   never overwritten in place, see [`super::placement`]. The only pending change that can concern an announced block
//!   frees it, and then the announcement has no effect;
//! * the record of a new unsealed snapshot. All changes of the snapshot's disk that are pending then were made before
//!   the snapshot and belong to it. The operation that completes the snapshot ([`Operation::Seal`]) keeps its place in
//!   the order.

use super::log::Committer;
use super::log::Cost;
use super::metadata::{Effects, Fetch};
use super::metadata::{Meta, Pending};
use super::placement::Holds;
use super::writeback::{STEPS_MAX, Step, batch_blocks};
use super::{Buffer, Engine, Head};
use crate::buffer::{Content, DirtyPiece};
use crate::journal::{BODY_MAX, BatchKind, Operation, Writer};
use crate::space::Run;
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::sync::time::Instant;
use crate::tree::{self, NodeId};
use crate::{ErrorKind, Result, is_lost};
use backend::{BLOCK_SIZE, SharedSlice};
use std::ops::Range;

/// Blocks of data that one step of a flush moves into the map.
const LOG_STEP: u64 = 64;
/// The most payload that a flush appends to the journal instead of writing it to the data files: 4 MiB.
const PAYLOAD_MAX: u64 = 4 << 20;
/// Pending changes with more bytes in the journal than this are committed without a flush request.
const PENDING_BYTES: u64 = 16 << 20;
/// Pending changes that use more bytes of memory than this are committed too. The change of a single block uses five
/// times the size of its record. The limit is lower in tests, so that they reach it.
const PENDING_MEMORY: usize = if cfg!(test) { 1 << 20 } else { 32 << 20 };
/// The most table entries of the appended changes that are retired at a time, unless a single change concerns more.
const RETIRED_ENTRIES: u64 = if cfg!(any(test, feature = "schedules")) { 3 } else { 1 << 10 };
/// A flush counts as outrun by writers after this many rounds, in addition to those for two full buffers.
const ROUNDS_BESIDE: u64 = 16;

/// The most payload that one flush appends to a journal of `ring` bytes.
pub(super) fn payload_max(ring: u64) -> u64 {
    PAYLOAD_MAX.min(ring / 16)
}

/// A part of a range that keeps its blocks when its payload is appended to the journal.
struct OwnPart {
    logical: u64,
    run: Run,
    unwritten: bool,
}

impl Meta {
    /// The parts of a range that only this tree maps.
    fn own_parts(&mut self, root: Option<NodeId>, range: Range<u64>) -> Result<Vec<OwnPart>> {
        let (mut extents, mut own) = (Vec::new(), Vec::<OwnPart>::new());
        let Some(root) = root else { return Ok(own) };
        // The payload follows the pending changes in the journal, and is written to the data files after the append. So
        // the current trees decide which blocks are shared.
        let (none, mut effects) = (Holds::default(), Effects::default());
        tree::lookup_exclusive(&mut self.current_nodes(&none, &mut effects), root, range, &mut extents)?;
        for extent in extents.iter().filter(|extent| !extent.shared_path) {
            let first = own.len();
            for (logical, block) in (extent.logical..).zip(extent.physical..extent.physical + extent.blocks) {
                if self.entry(block)?.references != 1 {
                    continue;
                }
                match own[first..].last_mut() {
                    Some(last) if last.logical + last.run.blocks == logical => last.run.blocks += 1,
                    _ => {
                        let run = Run { start: block, blocks: 1 };
                        own.push(OwnPart { logical, run, unwritten: extent.unwritten });
                    }
                }
            }
        }
        Ok(own)
    }
}

impl Engine {
    /// Makes everything acknowledged before this call durable.
    pub fn flush(&self) -> Result<()> {
        self.flush_to(self.acknowledged())
    }

    /// The number of the last acknowledged write: a flush requested now must cover it.
    pub fn acknowledged(&self) -> u64 {
        self.log.clocks.acknowledged()
    }

    /// Makes every change of map and catalog that was carried out before this call durable. Buffered data stays
    /// buffered.
    pub(super) fn commit_changes(&self) -> Result<()> {
        self.commit_pending(false)
    }

    /// Like [`Engine::commit_changes`]. With `gently`, cached data is written out in small parts first, so that other
    /// requests are not delayed.
    pub(super) fn commit_pending(&self, gently: bool) -> Result<()> {
        self.check_running()?;
        self.make_journal_room()?;
        let _appends = self.admit_append()?;
        self.append_changes(gently)
    }

    /// Like [`Engine::commit_pending`], for a caller that holds a grant for the append. The grant ensures that the
    /// append does not wait for a checkpoint.
    pub(super) fn append_changes(&self, gently: bool) -> Result<()> {
        let mut commit = self.log.lock();
        self.append_pending(&mut commit)?;
        // The queue is read while the journal is locked: another thread may have taken changes from it for a batch, and
        // they are durable only when that batch is.
        if self.meta.lock().pending.is_empty() {
            return Ok(());
        }
        drop(commit);
        if gently {
            self.files.write_out();
        }
        // The remaining changes wait for a flush of the data files. Changes that were pending at the call need only
        // this one flush.
        self.sync_data()?;
        self.append_pending(&mut self.log.lock())
    }

    /// Makes every write up to number `ticket` durable, unless another flush has done so.
    pub fn flush_to(&self, ticket: u64) -> Result<()> {
        let mut freed = false;
        // Other clients may fill the buffers as fast as this loop empties them. The flush would then never end, so
        // after these rounds the buffers accept little until the flush has ended.
        let mut rounds = self.rounds_max();
        let (mut outrun, mut kept) = (None, None);
        let until = self.reduces_until();
        if !self.log.clocks.is_durable(ticket) {
            self.reduce_for_flush(ticket, until);
        }
        loop {
            let mut fetch: Fetch = kept.take().unwrap_or_default();
            fetch.begin();
            self.check_running()?;
            if self.log.clocks.is_durable(ticket) {
                return Ok(());
            }
            rounds = rounds.saturating_sub(1);
            if rounds == 0 && outrun.is_none() {
                outrun = Some(self.buffers.hold_writers());
            }
            self.make_journal_room()?;
            let buffered = self.buffers.blocks() * BLOCK_SIZE as u64;
            if buffered > self.payload_max() {
                match Instant::now() < until {
                    true => self.write_back_once()?,
                    false => self.write_back_plain()?,
                };
                continue;
            }
            let _surveyed = self.bring_in_buffered(&fetch);
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
            let left = match self.log_buffers(&mut fetch) {
                // Blocks that are freed or held can be used once the pending changes are durable.
                Err(error) if error.kind() == ErrorKind::NoSpace && !freed => {
                    freed = true;
                    drop(gate);
                    drop(commit);
                    self.append_changes(false)?;
                    continue;
                }
                Err(error) => {
                    kept = self.isolate_or_fail(error, fetch, (gate, commit, appends))?;
                    continue;
                }
                Ok(left) => left,
            };
            // No batch of write-back is under way while the gate is locked, so this flush covers the writes of all
            // batches.
            let announced = self.log.announced_end();
            drop(gate);
            if self.log.needs_sync() {
                drop(commit);
                self.sync_data()?;
                commit = self.log.lock();
            }
            if !self.log.is_settled(announced) {
                // The data files were flushed between the end of an in-place overwrite and the end of its batch. The
                // data is durable, but the overwrite does not count as settled: after the next overwrite of the block,
                // recovery would write older payload from the journal over it.
                self.sync_all_data()?;
            }
            self.append_pending(&mut commit)?;
            while !self.log.is_told(announced) {
                // The record of the settled overwrites follows changes that refer to data written during the flush. One
                // more flush covers this data.
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
            // The queued operations are durable, even if another thread appended them while the journal was unlocked.
            self.log.clocks.set_durable(covered);
            return Ok(());
        }
    }

    /// The number of batches of write-back after which writers count as faster than write-back.
    pub(super) fn rounds_max(&self) -> u64 {
        2 * self.buffers.limit() / batch_blocks(self.options.mode) + ROUNDS_BESIDE
    }

    /// The most payload that one flush appends to the journal, limited by the size of the ring.
    pub(super) fn payload_max(&self) -> u64 {
        payload_max(self.log.ring())
    }

    /// Whether so many changes are pending that they are committed without a flush request.
    pub(super) fn is_commit_due(&self, meta: &Meta) -> bool {
        let bytes = (self.log.ring() / 8).min(PENDING_BYTES);
        meta.pending.bytes() as u64 > bytes || meta.pending.memory() > PENDING_MEMORY
    }

    /// Commits the pending changes if maintenance, which was requested to commit them, is slower than the writers that
    /// make them. So writers on a slow medium cannot fill the memory with changes. Must not be called under a lock that
    /// a checkpoint takes.
    pub(super) fn limit_pending(&self) -> Result<()> {
        if self.meta.lock().pending.memory() > 2 * PENDING_MEMORY { self.commit_changes() } else { Ok(()) }
    }

    /// Makes durable all writes to the data files that have ended.
    pub(super) fn sync_data(&self) -> Result<()> {
        let wanted = self.log.clocks.home();
        let one = self.log.lock_syncing();
        // After a failed flush of the file, the kernel may report success for the next one although data was lost.
        self.check_running()?;
        if self.log.clocks.synced() >= wanted {
            return Ok(());
        }
        self.sync_locked(one)
    }

    /// Like [`Engine::sync_data`], but includes payload that recovery or a checkpoint wrote to the data files. Such
    /// writes are not counted, because flushes need not wait for them.
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
        // Settling and queueing are one critical section: a thread that finds the overwrites settled then also finds
        // the `Synced` record pending or appended.
        let mut meta = self.meta.lock();
        if let Some(position) = syncing.end() {
            // The record must follow the checksums of the settled overwrites, which are pending already.
            meta.enqueue(Operation::Synced { position }, 0)?;
        }
        Ok(())
    }

    /// Reads ahead the metadata that will be needed when the buffered entries are moved into the map. Called before any
    /// lock is taken.
    fn bring_in_buffered(&self, fetch: &Fetch) -> Vec<Fetch> {
        if fetch.has_lost() || self.meta.lock().pages.is_warm() {
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

    /// Moves buffered entries into the map and the pending changes, which refer to the payload. The caller holds the
    /// write-back gate and the journal lock. Returns `None` if nothing is left in the buffers. Otherwise returns the
    /// cost for which there was no room, or a zero cost if the step limit was reached. After an error, `fetch` may have
    /// the reason: see [`Fetch::require`].
    pub(super) fn log_buffers(&self, fetch: &mut Fetch) -> Result<Option<Cost>> {
        let mut steps = STEPS_MAX;
        for head in self.buffers.heads() {
            let mut buffer = head.lock();
            if buffer.layers.is_empty() {
                continue;
            }
            loop {
                let (layer, closed) = buffer.layers.oldest();
                for piece in layer.take(0, u64::MAX) {
                    let left = self.log_entry(&mut buffer, &head, &piece, &mut steps, fetch)?;
                    if left.is_some() {
                        return Ok(left);
                    }
                }
                if !closed {
                    break;
                }
                match self.seal_oldest(&mut buffer, fetch) {
                    // All writes of the disk are in the map. Write-back seals the snapshot once the references of its
                    // root can be read. A close must not leave it unsealed.
                    Err(error)
                        if is_lost(&error) && self.running.goes_on() && buffer.layers.first_filled().is_none() =>
                    {
                        break;
                    }
                    sealed => sealed?,
                }
            }
        }
        Ok(None)
    }

    /// Moves one entry of the oldest layer of a buffer into the map, in steps. Each part is removed from the buffer
    /// once it is in the map.
    pub(super) fn log_entry(
        &self,
        buffer: &mut Buffer,
        head: &Head,
        piece: &DirtyPiece,
        steps: &mut usize,
        fetch: &mut Fetch,
    ) -> Result<Option<Cost>> {
        let end = piece.end();
        let (mut at, mut most) = (piece.logical, LOG_STEP);
        while at < end {
            // The buffer was unlocked after the entry was copied, so newer data may have replaced a part of a discard
            // or of zeroes.
            let (layer, _) = buffer.layers.oldest();
            let Some(still) = layer.still(&(at..end), piece.entry.stamp) else { break };
            let mut meta = self.meta.lock();
            let step = match &piece.entry.content {
                Content::Data(..) => self.log_step(&mut meta, head, &piece.part(at..end.min(at + most)), fetch),
                _ if *steps == 0 => return Ok(Some(Cost::default())),
                content => {
                    *steps -= 1;
                    self.apply_other(&mut meta, head.id, still, content, fetch)
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
                // The step would dirty more pages than fit into a checkpoint, because copied leaves may refer to blocks
                // in all parts of the data files.
                most /= 2;
            }
            at = step.end;
        }
        Ok(None)
    }

    /// Moves a few blocks of data into the map, if journal and checkpoint have room for the change.
    fn log_step(&self, meta: &mut Meta, head: &Head, piece: &DirtyPiece, fetch: &mut Fetch) -> Result<Step> {
        let blocks = piece.entry.blocks;
        let end = piece.logical + blocks;
        let root = meta.catalog.get(head.id)?.root;
        let (pages, own) = fetch.require(meta, |meta| {
            let (_, pages) = meta.reach(head.id, piece.logical..end, false, u64::MAX)?;
            let own = meta.own_parts(root, piece.logical..end)?;
            let new = blocks - own.iter().map(|part| part.run.blocks).sum::<u64>();
            if new > 0 {
                meta.survey_allocation(new);
            }
            Ok((pages, own))
        })?;
        // In the worst case each block needs a record and a mapping of its own.
        let cost = Cost { bytes: blocks * (BLOCK_SIZE as u64 + 64), pages: pages + blocks };
        let Some(_grant) = self.log.admission.try_admit(cost) else {
            return Ok(Step { end: piece.logical, refused: Some(cost) });
        };
        self.log_piece(meta, head, piece, own)?;
        Ok(Step { end, refused: None })
    }

    /// Moves a piece into the map. Its blocks `own` keep their places, because the payload in the journal protects
    /// their content.
    fn log_piece(&self, meta: &mut Meta, head: &Head, piece: &DirtyPiece, own: Vec<OwnPart>) -> Result<()> {
        let Content::Data(slice, sums) = &piece.entry.content else { return Ok(()) };
        let range = piece.logical..piece.end();
        let part = |from: u64, to: u64| -> SharedSlice {
            let at = |block: u64| (block - piece.logical) as usize * BLOCK_SIZE;
            slice.slice(at(from)..at(to))
        };
        let mut at = range.start;
        for OwnPart { logical, run, unwritten } in own {
            self.log_new(meta, head, at..logical, &part)?;
            let data = vec![part(logical, logical + run.blocks)];
            let gate = self.log.clocks.synced();
            if unwritten {
                // Reserved space of a thick disk: the map must mark the blocks as written in the same batch that has
                // the content.
                let from = (logical - piece.logical) as usize;
                let checksums = sums.as_slice()[from..from + run.blocks as usize].to_vec();
                let written = Operation::Written { disk: head.id, logical, run, checksums };
                self.carry_out(meta, written, gate)?;
                meta.pending.join_last();
            }
            self.carry_out(meta, Operation::OverwriteData { run, data }, gate)?;
            at = logical + run.blocks;
        }
        self.log_new(meta, head, at..range.end, &part)?;
        self.writeback.equal.note(head.id, std::iter::once((range.start, sums.as_slice())));
        Ok(())
    }

    fn log_new(
        &self,
        meta: &mut Meta,
        head: &Head,
        range: Range<u64>,
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

    /// Appends the pending changes, up to the first change with data that is not durable.
    pub(super) fn append_pending(&self, commit: &mut MutexGuard<'_, Committer>) -> Result<()> {
        // The thread that locked the journal before may have failed to append changes that it had taken from the queue.
        // These changes are lost, so nothing may be appended after them.
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
                // The batch only records settled overwrites, so it does not prevent a clean close.
                commit.discount_last();
            }
            self.retire_committed(taken.changes)?;
            // Snapshots and announcements overtake the remaining changes.
            MutexGuard::bump(commit);
            self.check_running()?;
        }
    }

    /// Releases what the appended changes held. Held blocks may then be overwritten in place; freed blocks wait only
    /// for the end of reads. Requests wait only for a part of the changes at a time.
    pub(super) fn retire_committed(&self, taken: Vec<Pending>) -> Result<()> {
        let mut rest = taken.into_iter();
        loop {
            let (mut part, mut entries) = (Vec::new(), 0);
            while entries < RETIRED_ENTRIES
                && let Some(change) = rest.next()
            {
                entries += change.entries();
                part.push(change);
            }
            let is_last = rest.as_slice().is_empty();
            let mut meta = self.meta.lock();
            // If the blocks cannot be released, some of them would stay held or freed until the datastore is opened
            // again, so the store stops.
            if meta.committed(part).map_err(|error| self.stop(error))? {
                self.request(|work| work.reclaim = true);
            }
            meta.release_freed();
            if is_last {
                meta.pending.appended();
                self.update_headroom(&meta);
                self.count_changes(&meta);
                return Ok(());
            }
            MutexGuard::unlock_fair(meta);
        }
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

    /// Writes a trailer at the end of the journal. False if an append is under way: maintenance then tries again. True
    /// if there is a trailer now or none is needed.
    pub(super) fn trail_journal(&self) -> Result<bool> {
        let Some(mut commit) = self.log.try_lock() else { return Ok(false) };
        self.check_running()?;
        self.check_owner()?;
        if let Err(error) = self.log.trail(&mut commit) {
            // The next batch overwrites the trailer with a durable write. If the medium fails, that write reports it.
            tracing::warn!(%error, "the journal stays without a trailer until something is appended");
        }
        Ok(true)
    }

    /// Appends operations ahead of the pending changes.
    pub(super) fn append_urgent(&self, commit: &mut MutexGuard<'_, Committer>, operations: &[Operation]) -> Result<()> {
        let mut writer = Writer::default();
        for operation in operations {
            writer.push(operation);
        }
        self.append(commit, BatchKind::Urgent, &writer.finish())
    }
}
