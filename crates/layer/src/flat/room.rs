//! The space that a copy into a flat extent needs: measured and allocated before the copy begins.

use super::Flat;
use super::blocks::BlockType;
use crate::{IoContext, Result};
use std::ops::Range;

impl Flat {
    /// How many bytes of a range of the file have no space.
    pub(super) fn holes_of(&self, bytes: &Range<u64>) -> Result<u64> {
        let (mut at, mut asked, mut holes) = (bytes.start, bytes.start, 0);
        while asked < bytes.end {
            let placements = self.file.placements(asked);
            let placements = placements.during(|| format!("querying where the bytes of '{}' are", self.name))?;
            let Some(last) = placements.last() else { break };
            asked = last.range.end.max(asked + 1);
            for placement in placements.iter().filter(|placement| placement.range.start < bytes.end) {
                holes += placement.range.start.saturating_sub(at);
                at = at.max(placement.range.end);
            }
        }
        Ok(holes + bytes.end.saturating_sub(at))
    }

    /// Allocates the space of a range of the file, block by block, so that a guest's write waits for at most one block.
    pub(super) fn take_holes_of(&self, bytes: &Range<u64>) -> Result<()> {
        for block in self.blocks.touched(bytes) {
            let whole = self.blocks.bytes_of(block..block + 1);
            let part = whole.start.max(bytes.start)..whole.end.min(bytes.end);
            let _alone = self.locks.alone(block..block + 1);
            let taken = self.file.reserve(part.start, part.end - part.start);
            taken.during(|| format!("reserving {} bytes of space for '{}'", part.end - part.start, self.name))?;
            if self.blocks.state(block) == BlockType::Hole {
                self.blocks.set(block, BlockType::Unwritten);
            }
        }
        Ok(())
    }
}
