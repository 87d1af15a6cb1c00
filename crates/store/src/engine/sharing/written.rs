//! Which stored blocks can be mapped for new data instead of new blocks.

use super::prints::KEPT_REFERENCES_MAX;
use crate::Result;
use crate::catalog::{ObjectState, Provisioning};
use crate::engine::Meta;
use crate::engine::placement::Placement;
use crate::space::Run;
use std::ops::Range;

/// The first blocks of new data, and what is known of the blocks that may have the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Equal {
    /// The stored blocks of this run have the same checksums, and can be mapped if the content is the same too. `alone`
    /// says whether one of them has a single reference.
    Blocks { run: Run, alone: bool },
    /// So many blocks get no stored ones.
    Not(u64),
    /// The first stored block is not the one that was expected, or can get no more references.
    Gone,
}

impl Meta {
    /// Plans to map stored blocks for new data of a disk with these checksums, of which a disk of the same domain may
    /// have the blocks from logical block `kept.1` on.
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
        let Some((first, placement, _)) = placements.into_iter().next() else { return Ok(Equal::Not(all)) };
        let most = first.end - first.start;
        if placement != Placement::New {
            return Ok(Equal::Not(most));
        }
        let stored = self.plain_blocks(kept.0, kept.1, most)?;
        let Some(start) = stored[0] else { return Ok(Equal::Gone) };
        let (mut blocks, mut alone, mut several) = (0, false, false);
        for (at, sum) in (0..most).zip(checksums) {
            let block = start + at;
            // A run lies in one data file, because it is read at once.
            if stored[at as usize] != Some(block) || at > 0 && block.is_multiple_of(crate::FILE_BLOCKS) {
                break;
            }
            let entry = match self.settled(block, false)? {
                Ok(entry) if entry.checksum == *sum && entry.references < KEPT_REFERENCES_MAX => entry,
                Ok(_) if at == 0 => return Ok(Equal::Gone),
                Err(_) if at == 0 => return Ok(Equal::Not(1)),
                _ => break,
            };
            alone |= entry.references == 1;
            several |= entry.references > 1;
            blocks += 1;
        }
        if blocks == 0 || self.is_kept_by_thick(kept, start, blocks, several)? {
            return Ok(Equal::Not(blocks.max(1)));
        }
        Ok(Equal::Blocks { run: Run { start, blocks }, alone })
    }
}
