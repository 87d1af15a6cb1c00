//! Claims: free blocks on which operations under way rely, so that no other operation uses them too.
//!
//! 1. The claimed blocks never exceed the headroom: free blocks less the blocks set aside for thick disks. A claim is
//!    added first and compared with the headroom afterwards. Code that lowers the headroom stores the new value first
//!    and reads the claims afterwards, or holds a claim of that size. So no two operations rely on the same block.
//! 2. A buffered block that may need a new place has a claim from before its acknowledgment until it is in the map. A
//!    block without a claim overwrites a block of its disk, or takes one that is set aside for the disk. A hold or a
//!    write in flight ends by itself, so it does not make the block take what others claimed: write-back waits for the
//!    journal first, and what it still cannot place is written through the journal ([`Engine::log_batch`]) over its own
//!    block.
//! 3. A batch of write-back takes free blocks before the headroom is lowered, at its end. Until then they stay claimed:
//!    by the entries of the batch, by the batch for entries without a claim, and by the batch for entries that are
//!    replaced meanwhile ([`Engine::give_back_replaced`]).

use crate::buffer::{Content, DirtyPiece, Layers};
use crate::catalog::Catalog;
use crate::engine::log::Cost;
use crate::engine::reserve::extend::EXTENSION_MAX;
use crate::engine::writeback::STEPS_MAX;
use crate::engine::{Engine, Head};
use crate::{ErrorKind, Result};
use backend::BLOCK_SIZE;

/// Blocks on which an operation relies until this is dropped.
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
    /// Makes sure that this many blocks are free beside those claimed by others.
    pub(crate) fn claim_blocks(&self, blocks: u64) -> Result<Claim<'_>> {
        if blocks > EXTENSION_MAX {
            // Refused before it counts: a claim that cannot be met would have others refused beside it.
            self.check_space(blocks)?;
        }
        let claims = self.reserves.add_claim(blocks);
        let claim = Claim { engine: self, blocks };
        if blocks > 0 && claims > self.reserves.headroom() {
            self.extend(claims)?;
        }
        Ok(claim)
    }

    /// Fails if there are not this many blocks beside those claimed, neither free ones nor in the file system. For what
    /// takes many blocks, step by step: so it fails before it takes the last room from others.
    pub fn check_space(&self, blocks: u64) -> Result<()> {
        let check = || {
            let lacks = (self.reserves.claims() + blocks).saturating_sub(self.headroom_now());
            self.check_room(lacks.saturating_mul(BLOCK_SIZE as u64), "data")
        };
        match check() {
            // What was deleted may be on its way back.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                while self.drop_whole_trash()? {}
                check()
            }
            checked => checked,
        }
    }

    /// The same as [`Engine::claim_blocks`] without reserving space in the file system: `None` if there are not enough
    /// free blocks.
    pub(crate) fn try_claim(&self, blocks: u64) -> Option<Claim<'_>> {
        let claims = self.reserves.add_claim(blocks);
        let claim = Claim { engine: self, blocks };
        (blocks == 0 || claims <= self.reserves.headroom()).then_some(claim)
    }

    /// Moves a batch of the oldest layer into the map with its payload in the journal, as far as one flush would:
    /// blocks that only the disk maps keep their places, held or not. For blocks for which no new place is left.
    /// Returns the cost for which the journal had no room; those blocks stay buffered. Under gate and commit.
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
                // No cost is returned: the limit of steps in one turn was reached.
                return Ok((cost != Cost::default()).then_some(cost));
            }
        }
        Ok(None)
    }
}

/// What a thick disk must have set aside when all its blocks become shared: its whole size, and the buffered blocks
/// that use a part of that before.
pub(crate) struct Aside {
    /// Blocks to be set aside.
    pub reserved: u64,
    /// Blocks that this needs beyond those set aside or claimed already.
    pub lacks: u64,
}

/// See [`Aside`]; zero for a disk that is not thick.
pub(crate) fn aside(catalog: &Catalog, disk: u64, blocks: u64, buffered: &Layers) -> Result<Option<Aside>> {
    let object = catalog.get(disk)?;
    if object.provisioning == crate::catalog::Provisioning::Thin {
        return Ok(None);
    }
    let (claimed, others) = buffered.taking();
    let lacks = (blocks + others).saturating_sub(object.reserved);
    Ok(Some(Aside { reserved: blocks + claimed + others, lacks }))
}
