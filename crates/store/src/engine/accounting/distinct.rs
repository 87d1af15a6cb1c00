//! What a set of disks and snapshots maps, with every block counted once, and how much of their packs is in use.
//!
//! The map tells which indexes of a pack are in use, but not to how many bytes they are compressed. The index in the
//! first block of a pack does. It is read for a limited number of packs: for all, or for every n-th in the order of
//! the walk.
//!
//! What must hold: a pack may be freed, and its blocks overwritten, after the moment of the view. So the block that was
//! read must have the checksum in the table of the view; otherwise the pack is left out.

use super::{Accounts, ObjectSpace, questions};
use crate::engine::metadata::Effects;
use crate::pack;
use crate::space::Run;
use crate::tree::{self, DistinctBlocks, NodeId, PackUse, Repeats};
use crate::{Result, checksum};
use backend::{BLOCK_SIZE, Buffer};

/// What a set of disks and snapshots maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetSpace {
    /// The mapped blocks.
    pub blocks: DistinctBlocks,
    /// How the packs of these blocks are filled.
    pub fill: PackFill,
}

impl SetSpace {
    /// Bytes of packs that contain no content in use: blocks that nothing maps any more, indexes, and the rest of the
    /// last block. An estimate, if not all packs were examined.
    pub fn packing_loss(&self) -> u64 {
        let all = self.blocks.packs * BLOCK_SIZE as u64;
        let examined = self.fill.blocks * BLOCK_SIZE as u64;
        let lost = examined.saturating_sub(self.fill.bytes);
        let share = (u128::from(all) * u128::from(lost)).checked_div(u128::from(examined)).unwrap_or(0);
        u64::try_from(share).unwrap_or(all)
    }
}

/// How packs are filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackFill {
    /// The number of packs.
    pub packs: u64,
    /// The number of packs that were examined.
    pub examined: u64,
    /// The data blocks of the examined packs.
    pub blocks: u64,
    /// The bytes of compressed content that is in use in the examined packs.
    pub bytes: u64,
}

/// Packs to examine: every n-th of those that were found, so that their number is limited.
struct Sample {
    packs: Vec<PackUse>,
    most: usize,
    every: u64,
    found: u64,
}

impl Sample {
    fn add(&mut self, pack: &PackUse) {
        self.found += 1;
        if self.most == 0 || !(self.found - 1).is_multiple_of(self.every) {
            return;
        }
        self.packs.push(*pack);
        if self.packs.len() > self.most {
            let mut number = 0u64;
            self.packs.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.every *= 2;
        }
    }
}

impl Accounts<'_> {
    /// What these disks and snapshots map together. Examines at most `packs` packs.
    pub fn distinct(&mut self, set: &[u64], packs: usize) -> Result<SetSpace> {
        let mut roots: Vec<NodeId> = Vec::with_capacity(set.len());
        for id in set {
            roots.extend(self.catalog().whole(*id)?.root);
        }
        let mut sample = Sample { packs: Vec::new(), most: packs, every: 1, found: 0 };
        let mut effects = Effects::default();
        let counted = {
            let mut sight = self.view.sight();
            let mut nodes = sight.nodes(&mut effects);
            tree::distinct(&mut nodes, &roots, &mut questions(self.go_on), &mut |pack| sample.add(pack))
        };
        let blocks = self.whole(counted)?;
        let mut fill = PackFill { packs: sample.found, ..PackFill::default() };
        let mut ask = questions(self.go_on);
        for pack in &sample.packs {
            ask()?;
            let Some(stored) = self.stored_bytes(pack)? else { continue };
            let used = stored.iter().enumerate().filter(|(index, _)| pack.has(*index));
            fill.bytes += used.map(|(_, bytes)| *bytes).sum::<u64>();
            fill.blocks += pack.run.blocks;
            fill.examined += 1;
        }
        Ok(SetSpace { blocks, fill })
    }

    /// What these disks and snapshots map together, without `own` for a set of one. One disk or snapshot is counted
    /// without a walk over the parts that it shares with those that were counted before, if one tree maps each block
    /// once.
    pub fn distinct_blocks(&mut self, set: &[u64]) -> Result<DistinctBlocks> {
        let [one] = set else { return Ok(self.distinct(set, 0)?.blocks) };
        if self.repeats == Repeats::Possible {
            return Ok(DistinctBlocks { own: 0, ..self.distinct(set, 0)?.blocks });
        }
        let space = self.space_of(*one)?;
        let written = space.mapped - space.unwritten - space.packed;
        let ObjectSpace { unwritten, packed, packs, .. } = space;
        Ok(DistinctBlocks { written, unwritten, packed, packs, own: 0 })
    }

    /// The stored bytes of each index of a pack. `None` if the pack was freed since, or if its index cannot be read.
    fn stored_bytes(&mut self, of: &PackUse) -> Result<Option<Vec<u64>>> {
        let first = Run { start: of.run.physical, blocks: 1 };
        let entry = self.view.sight().entry(first.start);
        let expected = self.whole(entry)?.checksum;
        let mut block = Buffer::zeroed(1);
        let read = self.engine.files.locate(first).is_ok_and(|(file, offset)| {
            // Damage is reported by reads and checks.
            file.read_at(&mut block, offset).is_ok()
        });
        if !read || checksum(&block) != expected {
            return Ok(None);
        }
        Ok(pack::stored_bytes(&block, of.run.blocks).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::PhysicalRun;

    #[test]
    fn packs_to_examine_are_spread_over_all_and_limited() {
        let mut one = PackUse::of(PhysicalRun { physical: 0, blocks: 1 }, 0..1);
        let mut sample = Sample { packs: Vec::new(), most: 10, every: 1, found: 0 };
        for number in 0..1000 {
            one.run.physical = number;
            sample.add(&one);
        }
        let found: Vec<u64> = sample.packs.iter().map(|pack| pack.run.physical).collect();
        assert_eq!((sample.found, sample.every), (1000, 128));
        assert_eq!(found, (0..1000).step_by(128).collect::<Vec<u64>>());
    }
}
