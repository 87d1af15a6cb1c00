//! Write-back: writes buffered entries to the data files, in the order of their addresses.
//!
//! A batch runs under the gate. It plans which blocks may be overwritten in place and which need new places, announces
//! the overwrites durably, and writes the blocks. As writes end, it moves the written extents, a few at a time, into
//! the map and out of the buffer. Both changes are made under the lock of the buffer, so readers see the buffered copy
//! until the map refers to the written blocks.

mod equal;
mod failing;
mod homes;
mod inline;
mod known;
mod others;
mod packs;
mod payload;
mod plan;
mod prepared;
mod through;

pub(crate) use homes::{LANE_DEPTH, SLICES_MAX};
pub(crate) use others::{STEPS_MAX, Step};
pub(crate) use payload::LoggedLane;

use super::log::Cost;
use super::metadata::Fetch;
use super::{Engine, Head};
use crate::buffer::{DirtyPiece, Held};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, RwLock};
use crate::{ErrorKind, Result};
use backend::{IoMode, Queue};
use equal::EqualWrites;
use failing::Failing;
use inline::InlineWrites;
use packs::PackedWrites;
pub(crate) use plan::{Buffered, Plan};
use prepared::{Prepared, Turn, Wanted};
use std::sync::Arc;

/// The most blocks of data per batch.
pub(crate) const BATCH_MAX: u64 = 1024;

/// Number of blocks of data per batch. Smaller batches need more announcements; with larger ones a flush would wait for
/// the gate for longer than a few milliseconds.
pub(crate) fn batch_blocks(mode: IoMode) -> u64 {
    match mode {
        IoMode::Buffered => BATCH_MAX,
        IoMode::Direct => 256,
    }
}

/// Extents that are planned, or moved into the map, while the locks are held. The number limits how long readers and
/// writers of the disk wait.
const BATCH_STRIDE: usize = 64;
/// The smallest batch, in blocks, that is not split further.
const BATCH_MIN: u64 = 64;

/// State that write-back keeps between batches.
pub struct Lane {
    queue: Box<dyn Queue>,
}

/// State of write-back and of the other writers of data files.
///
/// Lock order: `logged` (one round of journalled payload at a time), the gate (no write-back under way), the journal,
/// `through` (shared by writes that bypass the buffer; exclusive for code that must run while no such write is under
/// way). `bulk` is taken before all of them. `copying` is held during one write, without any other lock except `bulk`.
pub struct WriteBack {
    gate: Mutex<Lane>,
    logged: Mutex<LoggedLane>,
    through: RwLock<()>,
    copying: Mutex<()>,
    /// Shared by bulk writers while they have allocated blocks that are not in the map; exclusive for a repair.
    bulk: RwLock<()>,
    /// The disk to which the last batch belonged.
    served: AtomicU64,
    /// Number of flushes that wait for the gate. Write-back lets them lock the gate first.
    flushes_waiting: AtomicU64,
    /// Pages per block that the last batch needed; changed under the gate.
    pages_per_block: AtomicU64,
    /// While a batch is under way: what was reserved for entries that were replaced in a buffer meanwhile. The batch
    /// may still move these entries into the map, and then uses the reservation.
    replaced: Mutex<Option<Held>>,
    /// Counters of failed attempts.
    pub failing: Failing,
    /// The disks whose new blocks are compressed.
    packed: PackedWrites,
    /// The disks whose new data is looked for among stored blocks.
    pub equal: EqualWrites,
    /// The disks whose new data is compared and compressed before it is stored.
    pub(super) inline: InlineWrites,
}

impl WriteBack {
    /// The initial state, with one I/O queue for write-back and one for journalled payload.
    pub fn new(queue: Box<dyn Queue>, logged: Box<dyn Queue>) -> Self {
        Self {
            gate: Mutex::new(Lane { queue }),
            logged: Mutex::new(LoggedLane::new(logged)),
            through: RwLock::default(),
            copying: Mutex::default(),
            bulk: RwLock::default(),
            served: AtomicU64::new(0),
            flushes_waiting: AtomicU64::new(0),
            pages_per_block: AtomicU64::new(1),
            replaced: Mutex::default(),
            failing: Failing::default(),
            packed: PackedWrites::default(),
            equal: EqualWrites::default(),
            inline: InlineWrites::default(),
        }
    }

    /// The number of blocks of the next batch, if `pages_left` pages may still be dirtied. The number is estimated from
    /// the pages that the previous batch needed, so that admission usually accepts the batch at its first plan. Too
    /// high an estimate costs one more plan.
    fn batch(&self, most: u64, pages_left: u64) -> u64 {
        most.min((pages_left / self.pages_per_block.load(Ordering::Relaxed)).max(BATCH_MIN))
    }

    /// Records how many pages a batch of this many blocks needed.
    fn note_pages(&self, pages: u64, blocks: u64) {
        self.pages_per_block.store(pages.div_ceil(blocks.max(1)).max(1), Ordering::Relaxed);
    }

    /// Locks the gate: no write-back is under way while the guard exists.
    pub fn lock(&self) -> MutexGuard<'_, Lane> {
        self.gate.lock()
    }

    /// Waits until no write that bypasses the buffer is under way, and prevents others until the guard is dropped.
    pub fn stop_through(&self) -> impl Drop + '_ {
        self.through.write()
    }

    /// Held during a write that bypasses the buffer.
    fn share_through(&self) -> impl Drop + '_ {
        self.through.read()
    }

    fn lock_logged(&self) -> MutexGuard<'_, LoggedLane> {
        self.logged.lock()
    }

    /// Held by the one bulk writer that copies into the page cache.
    pub fn lock_copying(&self) -> MutexGuard<'_, ()> {
        self.copying.lock()
    }

    /// Held by a bulk writer from the allocation of blocks until they are in the map.
    pub fn share_bulk(&self) -> impl Drop + '_ {
        self.bulk.read()
    }

    /// Waits until no bulk writer has blocks that are not in the map, and prevents others until the guard is dropped.
    pub fn stop_bulk(&self) -> impl Drop + '_ {
        self.bulk.write()
    }

    /// Locks the gate for a flush: write-back lets flushes take it first.
    pub fn lock_for_flush(&self) -> MutexGuard<'_, Lane> {
        self.flushes_waiting.fetch_add(1, Ordering::AcqRel);
        let gate = self.lock();
        self.flushes_waiting.fetch_sub(1, Ordering::AcqRel);
        gate
    }

    /// Whether a flush waits for the gate.
    pub fn is_flush_waiting(&self) -> bool {
        self.flushes_waiting.load(Ordering::Acquire) > 0
    }
}

/// Exists while a batch is under way. Its drop releases what was reserved for entries that were replaced meanwhile.
struct UnderWay<'a>(&'a Engine);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let replaced = self.0.writeback.replaced.lock().take();
        self.0.give_back(replaced.unwrap_or_default());
    }
}

/// The result of a batch.
enum Batch {
    /// Nothing is buffered, or nothing that was wanted.
    Empty,
    /// The whole batch is written, as far as its data was still buffered.
    Done,
    /// Metadata that was missing is in memory now, or lost for good: the batch is to be tried again.
    Again,
    /// A part of the batch is still buffered, because there was no room for this cost.
    Refused(Cost),
}

impl Engine {
    /// Writes back one batch of the disk that has waited longest. False when no buffer has entries.
    pub(super) fn write_back_once(&self) -> Result<bool> {
        self.write_back_next(true)
    }

    /// As [`Engine::write_back_once`], without comparing or compressing the data.
    pub(super) fn write_back_plain(&self) -> Result<bool> {
        self.write_back_next(false)
    }

    fn write_back_next(&self, reduces: bool) -> Result<bool> {
        let done = self.serve_next(reduces);
        match &done {
            Ok(_) => self.writeback.failing.note_progress(),
            Err(error) => {
                let heads = self.buffers.heads();
                let disks = heads.iter().filter(|head| !head.lock().layers.is_empty()).count();
                self.writeback.failing.note_failure(error, disks as u64);
            }
        }
        done
    }

    fn write_back_turn(&self, turn: Turn<'_>, reduces: bool) -> Result<()> {
        let (mut fetch, head) = (Fetch::default(), turn.head);
        let mut next = Some(turn);
        loop {
            fetch.begin();
            let again = || if reduces { Turn::wait(self, head) } else { Turn::plain(head) };
            let turn = next.take().unwrap_or_else(again);
            match self.write_back_batch(turn, Wanted::Oldest, &mut fetch)? {
                Batch::Empty | Batch::Done => return Ok(()),
                Batch::Refused(cost) => return self.make_room(cost),
                Batch::Again => {}
            }
            self.check_running()?;
            self.pace()?;
        }
    }

    /// All disks with a buffer, beginning with the one that has waited longest.
    fn heads_in_turn(&self) -> Vec<Arc<Head>> {
        let mut heads = self.buffers.heads();
        let served = self.writeback.served.load(Ordering::Relaxed);
        let after = heads.partition_point(|head| head.id <= served);
        heads.rotate_left(after);
        heads
    }

    /// Writes back everything that is buffered for a disk at the call.
    pub fn settle(&self, head: &Head) -> Result<()> {
        let mut fetch = Fetch::default();
        let mut rounds = self.rounds_max();
        loop {
            fetch.begin();
            self.check_running()?;
            self.pace()?;
            match self.write_back_batch(Turn::wait(self, head), Wanted::Oldest, &mut fetch)? {
                Batch::Empty => return Ok(()),
                // Clients of the disk fill its buffer as fast as this loop empties it, so it may never be empty. A
                // flush ends nevertheless, and leaves nothing in the buffers that was acknowledged before it.
                Batch::Done if rounds == 0 => return self.flush(),
                Batch::Done => rounds -= 1,
                Batch::Again => {}
                Batch::Refused(cost) => self.make_room(cost)?,
            }
        }
    }

    /// Reads ahead the metadata that a batch of the oldest `most` blocks will need. Called before the batch takes its
    /// locks.
    fn bring_in_batch(&self, head: &Head, most: u64, fetch: &Fetch) -> Fetch {
        if fetch.has_lost() || self.meta.lock().pages.is_warm() {
            return Fetch::default();
        }
        let pieces = head.lock().oldest_pieces(most);
        self.meta.bring_in(|meta| meta.survey_pieces(head.id, &pieces))
    }

    /// Releases what was reserved for a replaced entry of a buffer. If a batch is under way, the release waits for its
    /// end, because the batch may have a copy of the entry.
    pub(super) fn give_back_replaced(&self, held: Held) {
        if held == Held::default() {
            return;
        }
        let mut replaced = self.writeback.replaced.lock();
        let Some(later) = &mut *replaced else {
            drop(replaced);
            return self.give_back(held);
        };
        // Buffer space is released at once. As map changes, the blocks stay counted until the batch ends.
        self.reserves.add_changes(held.data);
        *later += Held { data: 0, changes: held.changes + held.data, ..held };
        drop(replaced);
        self.give_back(Held { data: held.data, ..Held::default() });
    }

    /// Called before a batch reads a buffer. The batch lowers the headroom, the number of free blocks that writes may
    /// claim, before it drops the guard.
    fn begin_batch(&self) -> UnderWay<'_> {
        *self.writeback.replaced.lock() = Some(Held::default());
        UnderWay(self)
    }

    /// One batch of one disk: of the `prepared` entries, or of the oldest ones. After an error, `fetch` may have the
    /// reason: see [`Fetch::require`].
    fn write_back(
        &self,
        lane: &mut Lane,
        head: &Head,
        prepared: Option<&Prepared>,
        fetch: &mut Fetch,
    ) -> Result<Batch> {
        let _under_way = self.begin_batch();
        let mut commit = self.log.lock();
        let Some(mut pieces) = self.next_pieces(head, prepared, fetch)? else { return Ok(Batch::Empty) };
        let packs = prepared.map_or(&[][..], |prepared| &prepared.packs);
        let mut waited = false;
        let (mut meta, mut plan, grant) = loop {
            let mut meta = self.meta.lock();
            let mut plan = Plan::default();
            let planned = self
                .plan_batch(&mut meta, head, Buffered { pieces: &pieces, packs }, waited, &mut plan, fetch)
                .and_then(|()| fetch.require(&mut meta, |meta| meta.cost_of_homes(head.id, plan.homes())));
            if let Ok(cost) = &planned {
                self.writeback.note_pages(cost.pages, pieces.iter().map(|piece| piece.entry.blocks).sum());
            }
            // An announcement would overtake pending checksums of older content of these blocks.
            let overtakes = planned.is_ok() && meta.awaits_checksums(plan.homes());
            if let Ok(cost) = &planned
                && !overtakes
                && let Some(grant) = self.log.admission.try_admit(*cost)
            {
                break (meta, plan, grant);
            }
            plan.undo(&mut meta);
            self.update_headroom(&meta);
            drop(meta);
            let lacks = matches!(&planned, Err(error) if error.kind() == ErrorKind::NoSpace);
            if lacks && waited {
                // An operation that holds the block became pending after the wait. As journalled payload, the data
                // follows that operation in the journal, and needs no new block.
                let refused = self.log_batch(head, &pieces, fetch)?;
                self.sync_all_data()?;
                self.append_pending(&mut commit)?;
                return Ok(refused.map_or(Batch::Done, Batch::Refused));
            }
            // Without a new place, a held block must wait until the operations that hold it are in the journal. Then it
            // may be overwritten in place.
            waited |= lacks;
            let cost = if lacks { Cost::default() } else { planned? };
            if overtakes || lacks {
                self.sync_all_data()?;
                self.append_pending(&mut commit)?;
            } else if !shorten(&mut pieces, if self.log.admission.holds(cost) { BATCH_MIN } else { 1 }) {
                return Ok(Batch::Refused(cost));
            }
        };
        // Older payload of these blocks must not be written during or after this batch. The journal still has it.
        for run in plan.in_place() {
            meta.forget_logged(run);
        }
        drop(meta);
        self.announce(commit, plan.homes())?;
        let short = self.write_homes(lane, head, &mut plan)?;
        self.log.end_announced();
        let others = plan.end(&mut self.meta.lock());
        // By now the cost of the grant is counted as pending bytes and dirty pages.
        drop(grant);
        if let Some(error) = short {
            return Err(error);
        }
        let refused = self.finish_others(head, others, fetch)?;
        let mut buffer = head.lock();
        buffer.cursor = pieces.last().map_or(0, DirtyPiece::end);
        let (layer, closed) = buffer.layers.oldest();
        if closed && layer.is_empty() {
            self.seal_oldest(&mut buffer, fetch)?;
        }
        Ok(refused.map_or(Batch::Done, Batch::Refused))
    }

    /// The entries of a batch of the oldest layer that has entries; of `prepared` ones, those that are still there.
    /// Snapshots of older, empty layers are sealed.
    fn next_pieces(
        &self,
        head: &Head,
        prepared: Option<&Prepared>,
        fetch: &mut Fetch,
    ) -> Result<Option<Vec<DirtyPiece>>> {
        let mut buffer = head.lock();
        loop {
            let (layer, closed) = buffer.layers.oldest();
            if !layer.is_empty() {
                let pieces = match prepared {
                    Some(prepared) => layer.left_of(&prepared.pieces),
                    None => buffer.oldest_pieces(self.blocks_of_batch()),
                };
                return Ok(Some(pieces).filter(|pieces| !pieces.is_empty()));
            }
            if !closed {
                return Ok(None);
            }
            self.seal_oldest(&mut buffer, fetch)?;
        }
    }
}

/// Halves a batch. False when it is a single extent of `least` blocks.
fn shorten(pieces: &mut Vec<DirtyPiece>, least: u64) -> bool {
    if pieces.len() > 1 {
        pieces.truncate(pieces.len() / 2);
        return true;
    }
    let Some(piece) = pieces.first_mut().filter(|piece| piece.entry.blocks > least) else { return false };
    *piece = piece.first(piece.entry.blocks / 2);
    true
}
