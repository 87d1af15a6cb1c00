//! Claims: free blocks on which an operation under way relies, so that no other operation uses them.
//!
//! 1. Claimed blocks never exceed the headroom: the free blocks less those reserved for thick disks. A claim is added
//!    first and compared with the headroom afterwards. Code that lowers the headroom stores the new value first and
//!    reads the claims afterwards, or has claimed the blocks by which the headroom shrinks. So no two operations rely
//!    on the same block.
//! 2. A buffered block that may need a new place is claimed from before its acknowledgment until it is in the map. A
//!    buffered block without a claim overwrites a block of its disk, or uses a block reserved for the disk. A hold or a
//!    write in flight may prevent the overwrite for some time, but must not make the block use claimed space.
//!    Write-back then waits for an append to the journal, which ends holds. A block that still has no new place keeps
//!    its old place, and its payload is appended to the journal ([`Engine::log_batch`]).
//! 3. A batch of write-back allocates blocks at its beginning and lowers the headroom at its end. In between the blocks
//!    stay claimed: by the entries of the batch, by the batch for entries without a claim, and by the batch for entries
//!    that are replaced meanwhile ([`Engine::give_back_replaced`]).

use crate::buffer::{Content, DirtyPiece, Layers};
use crate::catalog::Catalog;
use crate::engine::log::Cost;
use crate::engine::metadata::Fetch;
use crate::engine::reserve::extend::EXTENSION_MAX;
use crate::engine::writeback::STEPS_MAX;
use crate::engine::{Engine, Head};
use crate::{ErrorKind, Result};
use backend::BLOCK_SIZE;

/// Free blocks on which an operation relies until this value is dropped.
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
    /// Claims free blocks, and reserves more in the file system if too few are free.
    pub(crate) fn claim_blocks(&self, blocks: u64) -> Result<Claim<'_>> {
        if blocks > EXTENSION_MAX {
            // The space is checked before the claim is counted, because a claim that exceeds it would make other claims
            // fail.
            self.check_space(blocks)?;
        }
        let claims = self.reserves.add_claim(blocks);
        let claim = Claim { engine: self, blocks };
        if blocks > 0 && claims > self.reserves.headroom() {
            self.extend(claims)?;
        }
        Ok(claim)
    }

    /// Fails unless this many blocks, besides the claimed ones, are free or can be reserved in the file system. An
    /// operation that allocates many blocks step by step calls this first, so that it fails before it has used the
    /// space that other operations need.
    pub fn check_space(&self, blocks: u64) -> Result<()> {
        let check = || {
            let lacks = (self.reserves.claims() + blocks).saturating_sub(self.headroom_now());
            self.check_room(lacks.saturating_mul(BLOCK_SIZE as u64), "data")
        };
        match check() {
            // The space of deleted disks may not be free yet.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                while self.drop_all_trash()? {}
                check()
            }
            checked => checked,
        }
    }

    /// Like [`Engine::claim_blocks`], but reserves no space in the file system: `None` if too few blocks are free.
    pub(crate) fn try_claim(&self, blocks: u64) -> Option<Claim<'_>> {
        let claims = self.reserves.add_claim(blocks);
        let claim = Claim { engine: self, blocks };
        (blocks == 0 || claims <= self.reserves.headroom()).then_some(claim)
    }

    /// Moves a batch of the oldest layer into the map and its payload into the journal, up to the payload limit of a
    /// flush. Used when no free blocks are left: blocks that only the disk maps keep their places, held or not. Returns
    /// the cost for which the journal had no room; the remaining blocks stay buffered. The caller holds the write-back
    /// gate and the journal lock.
    pub(crate) fn log_batch(&self, head: &Head, pieces: &[DirtyPiece], fetch: &mut Fetch) -> Result<Option<Cost>> {
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
            if let Some(cost) = self.log_entry(&mut buffer, head, &part, &mut steps, fetch)? {
                // A zero cost means that the step limit was reached.
                return Ok((cost != Cost::default()).then_some(cost));
            }
        }
        Ok(None)
    }
}

/// The reservation that a thick disk needs when all its blocks become shared: its whole size, and in addition its
/// buffered blocks, because these use a part of the reservation before they become shared.
pub(crate) struct Aside {
    /// The reservation that the disk needs.
    pub reserved: u64,
    /// The free blocks that the reservation needs, beyond those reserved or claimed for the disk.
    pub lacks: u64,
}

/// Computes [`Aside`]; `None` for a disk that is not thick.
pub(crate) fn aside(catalog: &Catalog, disk: u64, blocks: u64, buffered: &Layers) -> Result<Option<Aside>> {
    let object = catalog.get(disk)?;
    if object.provisioning == crate::catalog::Provisioning::Thin {
        return Ok(None);
    }
    let (claimed, others) = buffered.taking();
    let lacks = (blocks + others).saturating_sub(object.reserved);
    Ok(Some(Aside { reserved: blocks + claimed + others, lacks }))
}
