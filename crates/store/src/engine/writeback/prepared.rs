//! Batches that are compared and compressed before they take their locks.
//!
//! What must hold:
//!
//! 1. A batch of a disk whose new data is reduced consists of the entries that were compared and compressed, as far as
//!    they are still buffered. It takes no others instead of those that were mapped or replaced meanwhile.
//! 2. One thread at a time prepares and writes such a batch of a disk ([`Head::lock_reducing`]): the position of
//!    write-back moves only at the end of a batch, so two threads would prepare the same one. No thread that holds the
//!    gate or a lock of a checkpoint waits for this lock. Disks whose data is written as it is do not take it.

use super::equal::EqualRuns;
use super::inline::BATCH_INLINE;
use super::packs::BufferedPack;
use super::{Batch, Lane, batch_blocks};
use crate::Result;
use crate::buffer::DirtyPiece;
use crate::engine::metadata::Fetch;
use crate::engine::packing::WINDOW;
use crate::engine::{Engine, Head};
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;

/// Which entries of a disk a batch takes.
#[derive(Clone, Copy)]
pub(super) enum Wanted {
    /// The oldest ones, from the position of write-back on.
    Oldest,
    /// Those of writes up to this number that a flush compares and compresses first.
    New(u64),
}

/// A disk that gets a batch, with its lock if its data is compared or compressed.
pub(super) struct Turn<'a> {
    pub head: &'a Head,
    reducing: Option<MutexGuard<'a, ()>>,
}

impl<'a> Turn<'a> {
    /// A batch that is written as it is.
    pub fn plain(head: &'a Head) -> Self {
        Self { head, reducing: None }
    }

    /// Waits for the lock of the disk, if it needs one.
    pub fn wait(engine: &Engine, head: &'a Head) -> Self {
        Self { head, reducing: engine.is_reduced(head.id).then(|| head.lock_reducing()) }
    }

    /// `None` if another thread has the lock of the disk.
    pub fn try_now(engine: &Engine, head: &'a Head) -> Option<Self> {
        let reducing = match engine.is_reduced(head.id) {
            true => Some(head.try_lock_reducing()?),
            false => None,
        };
        Some(Self { head, reducing })
    }
}

/// The entries that a batch may write, and packs of them.
pub(super) struct Prepared {
    pub pieces: Vec<DirtyPiece>,
    pub packs: Vec<BufferedPack>,
}

impl Engine {
    /// Whether the next batch of a disk is compared or compressed.
    fn is_reduced(&self, disk: u64) -> bool {
        let has_reduction = self.writeback.packed.of(disk).is_some() || self.writeback.equal.has(disk);
        has_reduction && self.reduces_batch(disk)
    }

    /// The number of blocks of the next batch.
    pub(super) fn blocks_of_batch(&self) -> u64 {
        self.writeback.batch(batch_blocks(self.options.mode), self.log.admission.pages_left())
    }

    /// Prepares a batch; also returns the data in it that is equal to stored blocks. `None` if nothing is buffered that
    /// is wanted.
    fn prepare_batch(&self, head: &Head, wanted: Wanted) -> Option<(Prepared, EqualRuns<'_>)> {
        let mut most = self.blocks_of_batch();
        if self.writeback.inline.has(head.id) {
            most = most.min(BATCH_INLINE);
        }
        let mut pieces = match wanted {
            Wanted::Oldest => head.lock().oldest_pieces(most),
            Wanted::New(ticket) => self.pieces_to_reduce(head, ticket, most)?,
        };
        if self.writeback.packed.of(head.id).is_some() {
            end_at_window(&mut pieces, most);
        }
        let equal = self.equal_runs_of_batch(head, &pieces);
        let packs = self.packs_of_batch(head, &pieces, &equal);
        Some((Prepared { pieces, packs }, equal))
    }

    /// Prepares a batch of a disk, and writes it. [`Batch::Empty`] if nothing is buffered that is wanted. After
    /// [`Batch::Again`] the caller tries again, with `fetch`.
    pub(super) fn write_back_batch(&self, turn: Turn<'_>, wanted: Wanted, fetch: &mut Fetch) -> Result<Batch> {
        let Turn { head, reducing } = turn;
        let most = match wanted {
            Wanted::Oldest => batch_blocks(self.options.mode),
            Wanted::New(_) => u64::MAX,
        };
        let _surveyed = self.bring_in_batch(head, most, fetch);
        let prepared = match &reducing {
            None => None,
            Some(_) => match self.prepare_batch(head, wanted) {
                None => return Ok(Batch::Empty),
                prepared => prepared,
            },
        };
        let appends = self.admit_append()?;
        let mut lane = self.writeback.lock();
        let written = match prepared {
            None => self.write_back(&mut lane, head, None, fetch),
            Some((prepared, equal)) => self.write_prepared(&mut lane, head, &prepared, equal, fetch),
        };
        match written {
            Err(error) => {
                let isolated = self.isolate_or_fail(error, std::mem::take(fetch), (lane, appends, reducing))?;
                let again = isolated.is_some();
                *fetch = isolated.unwrap_or_default();
                Ok(if again { Batch::Again } else { Batch::Done })
            }
            Ok(batch) => {
                MutexGuard::unlock_fair(lane);
                drop(appends);
                reducing.into_iter().for_each(MutexGuard::unlock_fair);
                *fetch = Fetch::default();
                Ok(batch)
            }
        }
    }

    fn write_prepared(
        &self,
        lane: &mut Lane,
        head: &Head,
        prepared: &Prepared,
        equal: EqualRuns<'_>,
        fetch: &mut Fetch,
    ) -> Result<Batch> {
        self.map_equal_runs(head, &equal)?;
        drop(equal);
        match self.write_back(lane, head, Some(prepared), fetch) {
            // All entries were mapped, or have left the buffer while the batch waited for the gate.
            Ok(Batch::Empty) if !head.lock().layers.is_empty() => Ok(Batch::Done),
            written => written,
        }
    }

    /// Writes back a batch of the disk that has waited longest. If its data may be reduced, disks for which another
    /// thread prepares a batch wait, unless there are no others. False when no buffer has entries.
    pub(super) fn serve_next(&self, reduces: bool) -> Result<bool> {
        self.check_running()?;
        self.pace()?;
        let heads = self.heads_in_turn();
        let mut waiting = heads.iter().filter(|head| !head.lock().layers.is_empty()).peekable();
        let Some(first) = waiting.peek().copied() else { return Ok(false) };
        let turn = match reduces {
            true => waiting.find_map(|head| Turn::try_now(self, head)).unwrap_or_else(|| Turn::wait(self, first)),
            false => Turn::plain(first),
        };
        // Set before the batch, so that other threads serve other disks meanwhile, and so that the next attempt after a
        // failure does.
        self.writeback.served.store(turn.head.id, Ordering::Relaxed);
        self.write_back_turn(turn, reduces).map(|()| true)
    }
}

/// Ends a batch of `most` blocks where a window ends, so that the next one has the following window as a whole.
fn end_at_window(pieces: &mut Vec<DirtyPiece>, most: u64) {
    let blocks = pieces.iter().filter(|piece| piece.is_data()).map(|piece| piece.entry.blocks).sum::<u64>();
    let Some(end) = pieces.last().filter(|last| last.is_data() && blocks >= most).map(DirtyPiece::end) else { return };
    let end = end - end % WINDOW;
    let kept = pieces.partition_point(|piece| piece.logical < end);
    if kept > 0 {
        pieces.truncate(kept);
        let last = &mut pieces[kept - 1];
        if last.is_data() && last.end() > end {
            *last = last.first(end - last.logical);
        }
    }
}
