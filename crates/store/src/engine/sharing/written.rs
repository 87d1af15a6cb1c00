//! Which stored blocks can be mapped for new data instead of new blocks.

use super::plan::Stored;
use super::prints::KEPT_REFERENCES_MAX;
use crate::Result;
use crate::catalog::{ObjectState, Provisioning};
use crate::engine::Meta;
use crate::engine::placement::Placement;
use std::ops::Range;

/// Stored blocks that can be mapped if their content is that of new data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EqualBlocks {
    /// The place of the first one. The others follow it.
    pub first: Stored,
    /// Number of blocks.
    pub blocks: u64,
    /// Whether a plain block among them has a single reference.
    pub alone: bool,
    /// The checksums of the physical blocks.
    pub checksums: Vec<u32>,
}

/// The first blocks of new data, and what is known of the blocks that may have the same content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Equal {
    /// These stored blocks may have the same content. Plain ones have the same checksums.
    Blocks(EqualBlocks),
    /// So many blocks get no stored ones.
    Not(u64),
    /// The first stored block is not the one that was expected, or can get no more references.
    Gone,
}

impl Meta {
    /// Plans to map stored blocks for new data of a disk with these checksums, of which a disk of the same domain may
    /// have the blocks from logical block `kept.1` on. Blocks in packs need no settled content, because packs are never
    /// overwritten, and thick disks do not map them.
    pub(in crate::engine) fn plan_equal(
        &mut self,
        disk: u64,
        logical: Range<u64>,
        kept: (u64, u64),
        checksums: &[u32],
    ) -> Result<Equal> {
        let all = logical.end - logical.start;
        let is_thin = |object: &&crate::catalog::Object| {
            object.state == ObjectState::Disk && object.provisioning == Provisioning::Thin
        };
        let Some(root) = self.catalog.find(disk).filter(is_thin).map(|object| object.root) else {
            return Ok(Equal::Not(all));
        };
        let mut placements = Vec::new();
        self.placements(root, logical, &mut placements)?;
        let Some((place, placement, _)) = placements.into_iter().next() else { return Ok(Equal::Not(all)) };
        let most = place.end - place.start;
        if placement != Placement::New {
            return Ok(Equal::Not(most));
        }
        let stored = self.written_blocks(kept.0, kept.1, most)?;
        let Some(first) = stored[0] else { return Ok(Equal::Gone) };
        let is_plain = first.packed.is_none();
        let (mut blocks, mut alone, mut several, mut of_pack) = (0, false, false, None);
        for (at, sum) in (0..most).zip(checksums) {
            // Plain blocks lie in one data file, because they are read at once.
            let next = first.after(at).filter(|next| at == 0 || !next.is_file_start());
            let Some(next) = next.filter(|next| stored[at as usize] == Some(*next)) else { break };
            let settled = match self.sharable_next(next, false, &mut of_pack)? {
                Ok(found)
                    if found.checksum.is_none_or(|found| found == *sum) && found.references < KEPT_REFERENCES_MAX =>
                {
                    found
                }
                Ok(_) if at == 0 => return Ok(Equal::Gone),
                Err(_) if at == 0 => return Ok(Equal::Not(1)),
                _ => break,
            };
            alone |= is_plain && settled.references == 1;
            several |= settled.references > 1;
            blocks += 1;
        }
        if blocks == 0 || is_plain && self.is_kept_by_thick(kept, first.physical, blocks, several)? {
            return Ok(Equal::Not(blocks.max(1)));
        }
        let checksums = self.checksums_of(first, &checksums[..blocks as usize], blocks)?;
        Ok(Equal::Blocks(EqualBlocks { first, blocks, alone, checksums }))
    }
}
