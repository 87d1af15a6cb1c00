//! Disks whose new data is compared and compressed before it is stored.
//!
//! At write-back this happens as far as no client waits for it: not while the buffers are more than half full, and not
//! for the little data that a flush appends to the journal. For the disks here it happens in any case. Clients wait for
//! it when they flush, and when the buffers are full. Data that overwrites blocks in place is not concerned: a flush
//! appends it to the journal as always.
//!
//! What must hold: a flush ends whatever clients write meanwhile, and soon, however slow the method is. So it compares
//! and compresses only entries of writes that were acknowledged before it, and for at most [`FLUSH_REDUCES`]. What is
//! left is written as other data.

use super::packs::WritePacker;
use super::prepared::{Turn, Wanted};
use super::{BATCH_STRIDE, Batch};
use crate::Result;
use crate::buffer::DirtyPiece;
use crate::engine::metadata::Fetch;
use crate::engine::packing::WINDOW;
use crate::engine::placement::Placement;
use crate::engine::{Engine, Head};
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::time::Instant;
use rustc_hash::FxHashSet;
use std::ops::Range;
use std::time::Duration;

/// How long a flush begins to compare and compress further batches.
const FLUSH_REDUCES: Duration = Duration::from_secs(1);
/// The most blocks of a batch of a disk whose new data is reduced while clients wait: a flush may have to wait for one.
/// `zstd:19` takes some seconds for them.
pub(super) const BATCH_INLINE: u64 = 256;

/// The disks whose new data is compared and compressed before it is stored.
#[derive(Default)]
pub struct InlineWrites {
    /// Whether there are any: otherwise writes only test this.
    any: AtomicBool,
    disks: RwLock<FxHashSet<u64>>,
    /// Set by a test whose flushes have no time to reduce data.
    #[cfg(test)]
    pub(in crate::engine) is_late: AtomicBool,
}

impl InlineWrites {
    pub(super) fn has(&self, disk: u64) -> bool {
        self.any.load(Ordering::Acquire) && self.disks.read().contains(&disk)
    }

    /// The ids of the disks, ascending.
    fn all(&self) -> Vec<u64> {
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut disks: Vec<u64> = self.disks.read().iter().copied().collect();
        disks.sort_unstable();
        disks
    }

    fn change(&self, change: impl FnOnce(&mut FxHashSet<u64>)) {
        let mut disks = self.disks.write();
        change(&mut disks);
        self.any.store(!disks.is_empty(), Ordering::Release);
    }
}

impl Engine {
    /// Compares and compresses new data of this disk before it is stored, as far as it is compared or compressed at
    /// write-back.
    pub fn reduce_inline(&self, disk: u64) {
        self.writeback.inline.change(|disks| {
            disks.insert(disk);
        });
    }

    /// As [`Engine::reduce_inline`], for these disks, and for no other disk.
    pub fn reduce_inline_of(&self, disks: &[u64]) {
        self.writeback.inline.change(|of| *of = disks.iter().copied().collect());
    }

    /// Whether the next batch of a disk is compared and compressed: not while the buffers are more than half full,
    /// because clients wait for write-back then, unless they shall wait.
    pub(super) fn reduces_batch(&self, disk: u64) -> bool {
        2 * self.buffers.blocks() <= self.buffers.limit() || self.writeback.inline.has(disk)
    }

    /// Until when a flush that begins now compares and compresses data.
    pub(in crate::engine) fn reduces_until(&self) -> Instant {
        #[cfg(test)]
        if self.writeback.inline.is_late.load(Ordering::Relaxed) {
            return Instant::now();
        }
        Instant::now() + FLUSH_REDUCES
    }

    /// Called by a flush of the writes up to `ticket`: compares, compresses and writes back their data that is to be
    /// reduced before it is stored. What is left after an error, or after `until`, is flushed as other data.
    pub(in crate::engine) fn reduce_for_flush(&self, ticket: u64, until: Instant) {
        for head in self.buffers.of_disks(&self.writeback.inline.all()) {
            if let Err(error) = self.reduce_buffered(&head, ticket, until) {
                tracing::debug!(%error, disk = head.id, "data is flushed without being compared and compressed");
            }
        }
    }

    fn reduce_buffered(&self, head: &Head, ticket: u64, until: Instant) -> Result<()> {
        let mut fetch = Fetch::default();
        // A batch may leave entries for the next one, but not without end.
        for _ in 0..self.rounds_max() {
            fetch.begin();
            self.check_running()?;
            self.pace()?;
            if self.log.clocks.is_durable(ticket) || Instant::now() >= until {
                return Ok(());
            }
            let turn = Turn::wait(self, head);
            match self.write_back_batch(turn, Wanted::New(ticket), &mut fetch)? {
                Batch::Empty => return Ok(()),
                Batch::Refused(cost) => self.make_room(cost)?,
                Batch::Done | Batch::Again => {}
            }
        }
        Ok(())
    }

    /// Entries of a disk with new data of the writes up to `ticket`, in a batch of at most `most` blocks: data that
    /// needs new blocks, and that can be compared or compressed. If only a newer layer has such data, those that must
    /// be written before. `None` if there is none.
    pub(in crate::engine) fn pieces_to_reduce(&self, head: &Head, ticket: u64, most: u64) -> Option<Vec<DirtyPiece>> {
        let layers = head.lock().layers.iter().count();
        // Only whole windows can be compressed.
        let compared = self.writeback.equal.has(head.id);
        let reducible = |new: &[DirtyPiece]| if compared { new.to_vec() } else { in_whole_windows(new) };
        for layer in 0..layers {
            let (mut at, mut new, mut found) = (0, Vec::new(), Vec::new());
            while found.is_empty() {
                let taken = head.lock().layers.iter().nth(layer).map_or_else(Vec::new, |layer| layer.take(at, most));
                let end = taken.last().map(DirtyPiece::end);
                // An entry without reserved nodes overwrites blocks in place, unless they are held now.
                let is_data =
                    |piece: &DirtyPiece| piece.is_data() && piece.entry.covered && piece.entry.stamp <= ticket;
                let data: Vec<DirtyPiece> = taken.into_iter().filter(is_data).collect();
                // The snapshot below a newer layer shares all blocks.
                new.extend(if layer > 0 { data } else { self.parts_with_new_blocks(head.id, &data) });
                let enough = new.iter().map(|piece| piece.entry.blocks).sum::<u64>() >= most;
                if enough || end.is_none() {
                    found = reducible(&new);
                }
                let Some(end) = end else { break };
                at = end;
            }
            match (layer, found.is_empty()) {
                (_, true) => {}
                (0, false) => return Some(first_blocks(found, most)),
                _ => return Some(head.lock().oldest_pieces(most)),
            }
        }
        None
    }

    /// The parts of entries that need new blocks. Data below pages of the map that are not in memory is left out.
    fn parts_with_new_blocks(&self, disk: u64, pieces: &[DirtyPiece]) -> Vec<DirtyPiece> {
        let mut new = Vec::new();
        for pieces in pieces.chunks(BATCH_STRIDE) {
            let mut guard = self.meta.lock();
            let meta = &mut *guard;
            let Some(root) = meta.catalog.find(disk).map(|object| object.root) else { return Vec::new() };
            let (mut fetch, mut places) = (Fetch::default(), Vec::new());
            for piece in pieces {
                places.clear();
                let range = piece.logical..piece.end();
                if fetch.require(meta, |meta| meta.placements(root, range, &mut places)).is_ok() {
                    let parts = places.drain(..).filter(|(_, placement, _)| *placement == Placement::New);
                    new.extend(parts.map(|(range, _, _)| piece.part(range)));
                }
            }
        }
        new
    }
}

/// The parts of entries in windows that they fill.
fn in_whole_windows(pieces: &[DirtyPiece]) -> Vec<DirtyPiece> {
    let mut parts = Vec::new();
    for run in pieces.chunk_by(|left, right| left.end() == right.logical) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let mut windows = WritePacker::windows(&(first.logical..last.end()));
        let Some(start) = windows.next().map(|window| window.start) else { continue };
        let whole = start..last.end() / WINDOW * WINDOW;
        parts.extend(run.iter().filter_map(|piece| part_in(piece, &whole)));
    }
    parts
}

fn part_in(piece: &DirtyPiece, range: &Range<u64>) -> Option<DirtyPiece> {
    let part = piece.logical.max(range.start)..piece.end().min(range.end);
    (!part.is_empty()).then(|| piece.part(part))
}

/// The first `most` blocks of entries with data.
fn first_blocks(mut pieces: Vec<DirtyPiece>, most: u64) -> Vec<DirtyPiece> {
    let mut left = most;
    pieces.retain_mut(|piece| {
        let blocks = piece.entry.blocks.min(left);
        left -= blocks;
        if 0 < blocks && blocks < piece.entry.blocks {
            *piece = piece.first(blocks);
        }
        blocks > 0
    });
    pieces
}
