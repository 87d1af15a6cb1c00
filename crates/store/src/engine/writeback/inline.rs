//! Disks whose new data is compared and compressed before it is stored.
//!
//! At write-back this happens as far as no client waits for it: not while the buffers are more than half full, and not
//! for the little data that a flush appends to the journal. For the disks here it happens in any case. Clients wait for
//! it when they flush, and when the buffers are full. Data that overwrites blocks in place is not concerned.
//!
//! What must hold: a flush ends whatever clients write meanwhile. So it writes back at most as many batches as there
//! was data in the buffers when it began, and appends what came later as other data.

use super::batch_blocks;
use crate::buffer::DirtyPiece;
use crate::engine::Engine;
use crate::engine::metadata::Fetch;
use crate::engine::placement::Placement;
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicBool, Ordering};
use rustc_hash::FxHashSet;

/// The disks whose new data is compared and compressed before it is stored.
#[derive(Default)]
pub struct InlineWrites {
    /// Whether there are any: otherwise writes only test this.
    any: AtomicBool,
    disks: RwLock<FxHashSet<u64>>,
}

impl InlineWrites {
    fn has(&self, disk: u64) -> bool {
        self.any.load(Ordering::Acquire) && self.disks.read().contains(&disk)
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

    /// The most batches that a flush writes back to compare and compress their data: those of the data that is buffered
    /// now.
    pub(in crate::engine) fn batches_to_reduce(&self) -> u64 {
        if !self.writeback.inline.any.load(Ordering::Acquire) {
            return 0;
        }
        self.buffers.blocks().div_ceil(batch_blocks(self.options.mode)) + self.buffers.heads().len() as u64
    }

    /// Whether data is buffered that needs new blocks, and is compared or compressed before it is stored. Data below
    /// pages of the map that are not in memory does not count.
    pub(in crate::engine) fn has_data_to_reduce(&self) -> bool {
        let heads = self.buffers.heads();
        heads.iter().filter(|head| self.writeback.inline.has(head.id)).any(|head| {
            let pieces: Vec<DirtyPiece> = {
                let buffer = head.lock();
                buffer.layers.iter().flat_map(|layer| layer.take(0, u64::MAX)).collect()
            };
            let mut guard = self.meta.lock();
            let meta = &mut *guard;
            let Some(root) = meta.catalog.find(head.id).map(|object| object.root) else { return false };
            let (mut fetch, mut places) = (Fetch::default(), Vec::new());
            // An entry without reserved nodes overwrites blocks in place, unless they are held now.
            for piece in pieces.iter().filter(|piece| piece.is_data() && piece.entry.covered) {
                let range = piece.logical..piece.end();
                if fetch.require(meta, |meta| meta.placements(root, range, &mut places)).is_err() {
                    return false;
                }
            }
            places.iter().any(|(_, placement, _)| *placement == Placement::New)
        })
    }
}
