//! Claims: free blocks that what is under way counts on, so that no other counts on them too.
//!
//! 1. The blocks claimed are never more than the headroom: free blocks less what is set aside for thick disks. A claim
//!    is added first and compared with the headroom afterwards; what lowers the headroom stores the new one first and
//!    looks at the claims afterwards, or holds a claim of that size. So no two count on the same block.
//! 2. A buffered block that may need a new place is claimed from before the acknowledgment until it is in the map. One
//!    without a claim overwrites a block of its disk, or takes what is set aside for the disk. A hold or a write in
//!    flight, which ends by itself, does not make it take what others claimed: write-back waits for the journal first,
//!    and what it still cannot place goes home through the journal ([`Engine::log_batch`]), over its own block.
//! 3. A batch of write-back takes free blocks before the headroom says so, at its end. Until then they stay claimed:
//!    by the entries it brings home, by the batch for those without a claim, and by the batch for entries that are
//!    replaced meanwhile ([`Engine::give_back_replaced`]).

use crate::Result;
use crate::buffer::{Content, DirtyPiece, Layers};
use crate::catalog::Catalog;
use crate::engine::log::Cost;
use crate::engine::writeback::STEPS_MAX;
use crate::engine::{Engine, Head};
use backend::BLOCK_SIZE;

/// Blocks that an operation counts on until this is dropped.
pub(crate) struct Claim<'a> {
    engine: &'a Engine,
    pub(crate) blocks: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.engine.reserves.end_claim(self.blocks);
    }
}

impl Engine {
    /// Makes sure that so many blocks are free beside what others count on.
    pub(crate) fn claim_blocks(&self, blocks: u64) -> Result<Claim<'_>> {
        let claims = self.reserves.add_claim(blocks);
        let claim = Claim { engine: self, blocks };
        if blocks > 0 && claims > self.reserves.headroom() {
            self.extend(claims)?;
        }
        Ok(claim)
    }

    /// The same without taking space from the file system: `None` when there is not enough.
    pub(crate) fn try_claim(&self, blocks: u64) -> Option<Claim<'_>> {
        let claims = self.reserves.add_claim(blocks);
        let claim = Claim { engine: self, blocks };
        (blocks == 0 || claims <= self.reserves.headroom()).then_some(claim)
    }

    /// Takes a batch of the oldest layer into the map with its payload in the journal, as far as one flush would:
    /// blocks of the disk alone keep their places whatever holds them. For what no new place is left for. Returns the
    /// cost of what there was no room for in the journal; that stays buffered. Under gate and commit.
    pub(crate) fn log_batch(&self, head: &Head, pieces: &[DirtyPiece]) -> Result<Option<Cost>> {
        let mut left = (self.payload_max() / BLOCK_SIZE as u64).max(1);
        let mut steps = STEPS_MAX;
        for piece in pieces {
            let mut part = piece.clone();
            if matches!(piece.entry.content, Content::Data(..)) {
                if left == 0 {
                    break;
                }
                part = piece.first(piece.entry.blocks.min(left));
                left -= part.entry.blocks;
            }
            let mut buffer = head.lock();
            if let Some(cost) = self.log_entry(&mut buffer, head, &part, &mut steps)? {
                // No cost: enough steps for one turn.
                return Ok((cost != Cost::default()).then_some(cost));
            }
        }
        Ok(None)
    }
}

/// What a thick disk has to have set aside when all that it maps becomes shared: its whole size, and what is buffered
/// and takes from it before that.
pub(crate) struct Aside {
    /// Blocks to be set aside.
    pub reserved: u64,
    /// Blocks that this takes beside what is set aside or claimed already.
    pub lacks: u64,
}

/// See [`Aside`]; nothing for a disk that is not thick.
pub(crate) fn aside(catalog: &Catalog, disk: u64, blocks: u64, buffered: &Layers) -> Result<Option<Aside>> {
    let object = catalog.get(disk)?;
    if object.provisioning == crate::catalog::Provisioning::Thin {
        return Ok(None);
    }
    let (claimed, others) = buffered.taking();
    let lacks = (blocks + others).saturating_sub(object.reserved);
    Ok(Some(Aside { reserved: blocks + claimed + others, lacks }))
}
