//! Which plain blocks of a window are packed together, and in which trees.
//!
//! What must hold:
//!
//! 1. A block is packed only if every leaf that maps it is known, because only then the block becomes free: as many
//!    leaves map it as it has references. Leaves that map it at other logical blocks get operations of their own
//!    (`elsewhere`).
//! 2. A block with content that is not settled is not packed: a suspect block, a block with a write under way, with
//!    journalled payload that is not written to it, or that a pending operation concerns.
//! 3. A block that a thick disk or a snapshot of one maps is not packed, because a later write of the disk, perhaps
//!    after it was reverted, would need new space.

use super::elsewhere::Others;
use super::leaves::PlannedLeaves;
use super::most_worth;
use super::places::Places;
use super::repack::OldPack;
use crate::FILE_BLOCKS;
use crate::Result;
use crate::catalog::{ObjectState, Provisioning};
use crate::engine::Meta;
use crate::engine::log::{VERSION_PACKS, VERSION_SHARED_PACKS};
use crate::engine::metadata::{Effects, LEAVES_PER_TREE_MAX};
use crate::space::{BlockEntry, Run};
use crate::tree::{self, NodeId, PhysicalRun, Source};
use rustc_hash::{FxBuildHasher, FxHashSet};
use std::hash::BuildHasher;
use std::ops::Range;

/// What is packed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    /// Logical block with index 0.
    pub logical: u64,
    /// Number of indexes.
    pub blocks: u64,
    /// The blocks, ascending by index.
    pub sources: Vec<Source>,
    /// CRC32C of each block that is read: the plain blocks, or those of the old pack.
    pub checksums: Vec<u32>,
    /// A disk or snapshot for each leaf that maps the blocks.
    pub objects: Vec<u64>,
    /// The pack that contains the blocks, if they are packed again.
    pub old: Option<OldPack>,
    /// Where the blocks are mapped at other logical blocks.
    pub others: Others,
}

impl Plan {
    /// Number of blocks that are packed.
    pub fn count(&self) -> u64 {
        self.sources.iter().map(|source| source.run.blocks).sum()
    }

    /// The plain blocks. A pack needs no mark, because no block of a pack is ever overwritten in place.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let plain = self.sources.iter().filter(|source| source.packed.is_none());
        plain.map(|source| Run { start: source.run.physical, blocks: source.run.blocks })
    }

    /// The logical blocks of the new pack.
    pub fn window(&self) -> Range<u64> {
        self.logical..self.logical + self.blocks
    }

    /// The disks and snapshots of which leaves are changed, with their logical blocks.
    pub fn changed(&self) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        let here = self.objects.iter().map(|object| (*object, self.window()));
        here.chain(self.others.parts.iter().flat_map(|part| {
            let window = part.window();
            part.objects.iter().map(move |object| (*object, window.clone()))
        }))
    }

    /// The most leaves that the operations of the plan change.
    pub fn leaves(&self) -> u64 {
        (LEAVES_PER_TREE_MAX * self.objects.len()) as u64 + self.others.leaves
    }

    /// The version that a datastore needs for the operations of the plan.
    pub fn version(&self) -> u32 {
        if self.others.parts.is_empty() { VERSION_PACKS } else { VERSION_SHARED_PACKS }
    }

    /// Describes where the content lies, for [`super::Examined::key`].
    pub fn place(&self) -> u64 {
        let parts: Vec<(u8, u64)> = self.sources.iter().map(|source| (source.index, source.run.blocks)).collect();
        FxBuildHasher.hash_one((self.logical, parts))
    }

    /// The logical blocks from the first block that is packed on, up to the last one of that many.
    pub fn first(&self, blocks: u64) -> Range<u64> {
        let all = || self.plain_blocks().map(|(index, _)| self.logical + index);
        let (first, last) = (all().next(), all().take(blocks as usize).last());
        first.unwrap_or(self.logical)..last.map_or(self.logical, |last| last + 1)
    }

    /// The index and the physical block of each plain block.
    fn plain_blocks(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.sources.iter().flat_map(|source| {
            (0..source.run.blocks).map(|at| (u64::from(source.index) + at, source.run.physical + at))
        })
    }

    /// Whether another plan has the same blocks at its beginning.
    pub fn begins(&self, other: &Self) -> bool {
        self.logical == other.logical
            && other.checksums.starts_with(&self.checksums)
            && self.plain_blocks().eq(other.plain_blocks().take(self.checksums.len()))
    }

    /// Number of data blocks that become free.
    pub fn frees(&self) -> u64 {
        self.old.map_or(self.count(), |old| old.run.blocks)
    }

    /// The most blocks of a pack that is worth it.
    pub fn most(&self) -> u64 {
        match self.old {
            // The index needs up to one more block than the content.
            Some(old) => (old.run.blocks - 1).min(self.count() + 1),
            None => most_worth(self.count()),
        }
    }
}

/// The result of planning.
pub(super) enum Planned {
    /// Fewer than two blocks can be packed, or a pack stays as it is.
    Nothing,
    /// The entries of the pack do not fit into a leaf.
    NoRoom,
    Pack(Box<Plan>),
}

/// A plain block that may be packed.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub physical: u64,
    checksum: u32,
    /// Its references from leaves that were not found yet.
    pub left: u32,
}

/// Why the content of a block is not settled.
pub(in crate::engine) enum Unsettled {
    /// The block is free or suspect, a write of it is under way, or journalled payload is not written to it.
    Changing,
    /// Only a pending operation concerns the block: the content is settled once the operation is durable.
    Held,
}

/// The table entry of a block with settled content.
pub(in crate::engine) type Settled = std::result::Result<BlockEntry, Unsettled>;

/// A tree that may map the blocks.
pub(in crate::engine) struct Tree {
    pub object: u64,
    pub root: NodeId,
    pub thick: bool,
}

impl Meta {
    /// The trees of all disks and snapshots, beginning with that of `object`.
    pub(in crate::engine) fn trees(&self, object: u64) -> Vec<Tree> {
        let readable = |state| matches!(state, ObjectState::Disk | ObjectState::Snapshot);
        let trees = self.catalog.objects().filter(|object| readable(object.state)).filter_map(|object| {
            let thick = object.provisioning != Provisioning::Thin;
            Some(Tree { object: object.id, root: object.root?, thick })
        });
        let mut trees: Vec<Tree> = trees.collect();
        if let Some(first) = trees.iter().position(|tree| tree.object == object) {
            trees.swap(0, first);
        }
        trees
    }

    /// Plans again what was planned before.
    pub(super) fn plan_again(&mut self, object: u64, plan: &Plan, places: &Places, claimed: bool) -> Result<Planned> {
        match plan.old {
            Some(old) => self.plan_repack(object, old, places),
            None => self.plan_pack(object, plan.window(), places, claimed),
        }
    }

    /// Plans a pack of the plain blocks of an object in a window. With `claimed` the caller has marked the blocks as in
    /// flight.
    pub(super) fn plan_pack(
        &mut self,
        object: u64,
        window: Range<u64>,
        places: &Places,
        claimed: bool,
    ) -> Result<Planned> {
        let mut candidates = self.candidates(object, &window, claimed)?;
        if candidates.iter().flatten().count() < 2 {
            return Ok(Planned::Nothing);
        }
        let trees = self.trees(object);
        let mut leaves = PlannedLeaves::default();
        let mut effects = Effects::default();
        let mut nodes = self.nodes(&mut effects);
        let mut left: u64 = candidates.iter().flatten().map(|candidate| u64::from(candidate.left)).sum();
        let mut missing = None;
        for (number, Tree { object, root, thick }) in trees.into_iter().enumerate() {
            // All leaves that map the blocks are known. Another tree maps the blocks only if it shares one of these
            // leaves, and matters only if it is thick.
            if left == 0 && !(thick && leaves.any_shared()) {
                continue;
            }
            let mut position = window.start;
            while position < window.end {
                let Some(leaf) = nodes.leaf_of(root, position..window.end, number, &mut missing)? else { break };
                let new = !leaves.contains(leaf.id);
                let mut maps_here = false;
                for mapping in leaf.mappings.iter().filter(|mapping| mapping.packed.is_none() && !mapping.unwritten) {
                    for at in 0..mapping.blocks {
                        let slot = &mut candidates[(mapping.logical + at - window.start) as usize];
                        let Some(candidate) = slot.as_mut().filter(|slot| slot.physical == mapping.physical + at)
                        else {
                            continue;
                        };
                        if thick {
                            left -= u64::from(candidate.left);
                            *slot = None;
                        } else if new {
                            left -= u64::from(candidate.left.min(1));
                            candidate.left = candidate.left.saturating_sub(1);
                            maps_here = true;
                        }
                    }
                }
                if maps_here {
                    leaves.add(object, &leaf);
                }
                position = leaf.upper;
            }
        }
        if let Some(error) = missing {
            return Err(error);
        }
        let others = self.find_elsewhere(&window, &mut candidates, &leaves, places)?;
        let (sources, checksums) = sources(&candidates);
        if checksums.len() < 2 || !leaves.are_few() {
            return Ok(Planned::Nothing);
        }
        let mut nodes = self.nodes(&mut effects);
        if !leaves.have_room(|leaf| tree::fits(&mut nodes, leaf, window.clone(), &sources))? {
            return Ok(Planned::NoRoom);
        }
        let blocks = window.end - window.start;
        Ok(Planned::Pack(Box::new(Plan {
            logical: window.start,
            blocks,
            sources,
            checksums,
            objects: leaves.into_objects(),
            old: None,
            others,
        })))
    }

    /// The entry of a block with settled content. With `claimed` the caller has marked the block as in flight.
    pub(in crate::engine) fn settled(&mut self, block: u64, claimed: bool) -> Result<Settled> {
        let entry = self.entry(block)?;
        let under_way = self.in_flight.contains(block) && !claimed;
        if entry.references == 0 || entry.suspect || under_way || self.logged.contains_key(&block) {
            return Ok(Err(Unsettled::Changing));
        }
        Ok(if entry.held { Err(Unsettled::Held) } else { Ok(entry) })
    }

    /// The plain blocks of an object in a window with settled content.
    fn candidates(&mut self, object: u64, window: &Range<u64>, claimed: bool) -> Result<Vec<Option<Candidate>>> {
        let mut candidates = vec![None; (window.end - window.start) as usize];
        let Some(root) = self.catalog.whole(object)?.root else { return Ok(candidates) };
        let mut extents = Vec::new();
        tree::lookup(&mut self.nodes(&mut Effects::default()), root, window.clone(), &mut extents)?;
        // A block that the window maps again is in the pack once, and the other logical block is another place.
        let mut known = FxHashSet::default();
        for extent in extents.iter().filter(|extent| extent.packed.is_none() && !extent.unwritten) {
            for at in 0..extent.blocks {
                let physical = extent.physical + at;
                if let Ok(entry) = self.settled(physical, claimed)?
                    && known.insert(physical)
                {
                    let candidate = Candidate { physical, checksum: entry.checksum, left: entry.references };
                    candidates[(extent.logical + at - window.start) as usize] = Some(candidate);
                }
            }
        }
        Ok(candidates)
    }
}

/// The candidates of which all leaves were found, as runs, and their checksums.
pub(super) fn sources(candidates: &[Option<Candidate>]) -> (Vec<Source>, Vec<u32>) {
    let (mut sources, mut checksums) = (Vec::<Source>::new(), Vec::new());
    for (index, candidate) in candidates.iter().enumerate() {
        let Some(candidate) = candidate.filter(|candidate| candidate.left == 0) else { continue };
        checksums.push(candidate.checksum);
        match sources.last_mut() {
            Some(Source { index: first, run, .. })
                if usize::from(*first) + run.blocks as usize == index
                    && run.physical + run.blocks == candidate.physical
                    && !candidate.physical.is_multiple_of(FILE_BLOCKS) =>
            {
                run.blocks += 1;
            }
            _ => {
                let run = PhysicalRun { physical: candidate.physical, blocks: 1 };
                sources.push(Source { index: index as u8, run, packed: None });
            }
        }
    }
    (sources, checksums)
}
