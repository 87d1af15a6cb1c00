//! Which blocks of a pair of ranges can be shared, and in which trees.
//!
//! A *duplicate* is a block that leaves map and that another block, the *kept* one, replaces there. Each of the two is
//! plain or in a pack. A block in a pack is not replaced by a plain one.
//!
//! What must hold:
//!
//! 1. A plain block is written and settled: not suspect, without a write under way, without journalled payload that is
//!    not written to it, and not concerned by a pending operation. So the block on the medium has the content that its
//!    checksum describes, and the operations that made it so are durable. A block in a pack needs none of this, because
//!    packs are never overwritten: the operation that mapped the pack precedes the share in the journal, and waits
//!    until the pack is durable.
//! 2. All leaves that map the duplicate at its logical block are found: as many as it has references, or all that exist
//!    at this logical block. In the second case the duplicate is mapped at other logical blocks too, and is not free
//!    afterwards.
//! 3. Neither block belongs to a thick disk or a snapshot of one, as far as that matters: a block of a thick disk that
//!    no other tree maps must not become shared, because a later write of it would need new space. A block that is
//!    shared already does not change for the disk, and neither does one that is in a pack. So the trees of thick disks
//!    are searched at the logical block of the duplicate, and of a plain kept block. A kept block with several
//!    references may also be mapped at a logical block that is not searched, but the disk has reserved the space for a
//!    write of it since it got the block.
//! 4. Two blocks are shared only if together they have at most [`KEPT_REFERENCES_MAX`] references. The limit is needed
//!    because each snapshot may multiply the references. Because it applies to the sum, all places of the duplicate can
//!    get the kept block, and passes never move places to and fro between two blocks.

use super::Pair;
use super::prints::KEPT_REFERENCES_MAX;
use super::runs::WithinEntry;
use crate::FILE_BLOCKS;
use crate::Result;
use crate::engine::Meta;
use crate::engine::metadata::Effects;
use crate::engine::packing::{PlannedLeaves, Tree, Unsettled};
use crate::journal::Operation;
use crate::space::Run;
use crate::tree::{self, Mapping, Packed, PhysicalRun, Share, Source};

/// Where a block is stored: its own physical block, or its place in the pack that begins there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::engine) struct Stored {
    pub physical: u64,
    pub packed: Option<Packed>,
}

impl Stored {
    /// The place of a block that an entry maps.
    fn of(mapping: &Mapping, logical: u64) -> Self {
        let one = mapping.clipped(logical, logical + 1);
        Self { physical: one.physical, packed: one.packed }
    }

    /// The place that is this many blocks further on. `None` if there is none in the pack.
    pub fn after(self, blocks: u64) -> Option<Self> {
        match self.packed {
            None => Some(Self { physical: self.physical + blocks, packed: None }),
            Some(Packed { index, stored }) => {
                let index = u8::try_from(u64::from(index) + blocks).ok()?;
                Some(Self { packed: Some(Packed { index, stored }), ..self })
            }
        }
    }

    /// The physical blocks in which that many blocks from this one on are stored.
    pub fn run(self, blocks: u64) -> Run {
        Run { start: self.physical, blocks: self.packed.map_or(blocks, |packed| u64::from(packed.stored)) }
    }

    pub(super) fn is_file_start(self) -> bool {
        self.packed.is_none() && self.physical.is_multiple_of(FILE_BLOCKS)
    }
}

/// What is shared.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    /// First logical block of the duplicates.
    pub logical: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// The place of the first duplicate, and that of the first kept block.
    pub from: Stored,
    pub kept: Stored,
    /// CRC32C of each physical block of both sides.
    pub checksums: [Vec<u32>; 2],
    /// A disk or snapshot for each leaf that maps the duplicates.
    pub objects: Vec<u64>,
}

impl Plan {
    /// The physical blocks of the duplicates and of the kept blocks.
    pub fn runs(&self) -> [Run; 2] {
        [self.from.run(self.blocks), self.kept.run(self.blocks)]
    }

    /// The plain ones among these.
    pub fn plain(&self) -> impl Iterator<Item = Run> + '_ {
        let sides = [self.from, self.kept].into_iter();
        sides.filter(|side| side.packed.is_none()).map(|side| side.run(self.blocks))
    }

    /// The operation that maps the kept blocks.
    pub fn operation(&self) -> Operation {
        let Self { logical, blocks, from, kept, checksums: [_, checksums], objects } = self.clone();
        let run = kept.run(blocks);
        match kept.packed {
            None => Operation::Share { logical, run, from: from.physical, objects },
            Some(_) => Operation::SharePack { logical, source: source(from, kept, blocks), run, checksums, objects },
        }
    }
}

/// The source of a share with blocks of a pack.
fn source(from: Stored, kept: Stored, blocks: u64) -> Source {
    let run = PhysicalRun { physical: from.physical, blocks };
    Source { index: kept.packed.map_or(0, |packed| packed.index), run, packed: from.packed }
}

/// The result of planning a pair. The numbers are those of the first blocks of the pair to which the result applies.
pub(super) enum Planned {
    Share(Plan),
    /// The blocks are shared already.
    Same(u64),
    /// The duplicates stay.
    Left(u64),
    /// Something keeps one of the duplicates where it is. Fewer of them can perhaps be shared.
    Shorter(u64),
    /// The first kept block cannot replace another one.
    NotKept,
    /// A pending operation concerns the first block: it can be shared once this operation is durable.
    Held,
    /// A leaf has no room for an entry for the first block.
    NoRoom,
}

/// Why no operation can change all leaves that map the duplicates.
enum Unchangeable {
    /// A leaf has no room for the entries.
    NoRoom,
    /// A thick disk has one of the leaves, there are too many of them, or they have changed.
    Other,
}

/// What is known about a block that may be shared.
#[derive(Clone, Copy)]
pub(super) struct Settled {
    pub references: u32,
    /// The checksum of a plain block.
    pub checksum: Option<u32>,
}

impl Meta {
    /// The places of the written blocks of an object in a range; `None` for each other block.
    pub(super) fn written_blocks(&mut self, object: u64, logical: u64, blocks: u64) -> Result<Vec<Option<Stored>>> {
        let mut found = vec![None; blocks as usize];
        let Some(root) = self.catalog.whole(object).ok().and_then(|object| object.root) else { return Ok(found) };
        let mut extents = Vec::new();
        tree::lookup(&mut self.nodes(&mut Effects::default()), root, logical..logical + blocks, &mut extents)?;
        for extent in extents.iter().filter(|extent| !extent.unwritten) {
            let first = Stored { physical: extent.physical, packed: extent.packed };
            for at in 0..extent.blocks {
                found[(extent.logical + at - logical) as usize] = first.after(at);
            }
        }
        Ok(found)
    }

    /// A block that may be shared, or why not. With `claimed` the caller has marked a plain block as in flight.
    fn sharable(&mut self, block: Stored, claimed: bool) -> Result<std::result::Result<Settled, Unsettled>> {
        if block.packed.is_none() {
            let settled = self.settled(block.physical, claimed)?;
            return Ok(settled.map(|entry| Settled { references: entry.references, checksum: Some(entry.checksum) }));
        }
        let mut references = 0;
        let run = block.run(1);
        for block in run.start..run.start + run.blocks {
            let entry = self.entry(block)?;
            if entry.references == 0 || entry.suspect {
                return Ok(Err(Unsettled::Changing));
            }
            references = references.max(entry.references);
        }
        Ok(Ok(Settled { references, checksum: None }))
    }

    /// As [`Meta::sharable`], for a block after others of the same run: all blocks of a pack have one result, which is
    /// `known` after the first one.
    pub(super) fn sharable_next(
        &mut self,
        block: Stored,
        claimed: bool,
        known: &mut Option<Settled>,
    ) -> Result<std::result::Result<Settled, Unsettled>> {
        if let Some(settled) = known.filter(|_| block.packed.is_some()) {
            return Ok(Ok(settled));
        }
        let found = self.sharable(block, claimed)?;
        *known = found.as_ref().ok().copied();
        Ok(found)
    }

    /// Plans to share the first blocks of a pair. With `claimed` the caller has marked the plain blocks as in flight.
    pub(super) fn plan_share(&mut self, pair: &Pair, claimed: bool) -> Result<Planned> {
        let kept = self.written_blocks(pair.kept.0, pair.kept.1, pair.blocks)?;
        let duplicates = self.written_blocks(pair.object, pair.logical, pair.blocks)?;
        let Some(from) = duplicates[0] else { return Ok(Planned::Left(1)) };
        let Some(to) = kept[0] else {
            let is_duplicate = from.packed.is_some() || self.entry(from.physical)?.checksum == pair.sum;
            return Ok(if is_duplicate { Planned::NotKept } else { Planned::Left(1) });
        };
        if from == to {
            let same = kept.iter().zip(&duplicates).take_while(|(kept, other)| kept.is_some() && kept == other);
            return Ok(Planned::Same(same.count() as u64));
        }
        let both_plain = from.packed.is_none() && to.packed.is_none();
        // A plain block does not replace one in a pack, and blocks of one pack cannot replace each other.
        if from.packed.is_some() && (to.packed.is_none() || from.physical == to.physical) {
            return Ok(Planned::Left(1));
        }
        // Neither run contains a block of the other one.
        let most = if both_plain { pair.blocks.min(to.physical.abs_diff(from.physical)) } else { pair.blocks };
        let (mut left, mut sums) = (Vec::new(), Vec::new());
        let mut several = false;
        let (mut from_pack, mut to_pack) = (None, None);
        for at in 0..most {
            let (Some(duplicate), Some(target)) = (from.after(at), to.after(at)) else { break };
            let adjacent = kept[at as usize] == Some(target) && duplicates[at as usize] == Some(duplicate);
            if !adjacent || at > 0 && (duplicate.is_file_start() || target.is_file_start()) {
                break;
            }
            let duplicate = match self.sharable_next(duplicate, claimed, &mut from_pack)? {
                Ok(settled) => settled,
                Err(_) if at > 0 => break,
                Err(Unsettled::Held) => return Ok(Planned::Held),
                Err(Unsettled::Changing) => return Ok(Planned::Left(1)),
            };
            // A duplicate that has got other content since the scan is left without a comparison.
            if at == 0 && duplicate.checksum.is_some_and(|sum| sum != pair.sum) {
                return Ok(Planned::Left(1));
            }
            let target = match self.sharable_next(target, claimed, &mut to_pack)? {
                Ok(target) if target.references + duplicate.references <= KEPT_REFERENCES_MAX => target,
                _ if at > 0 => break,
                Err(Unsettled::Held) => return Ok(Planned::Held),
                _ => return Ok(Planned::NotKept),
            };
            if at == 0 && target.checksum.is_some_and(|sum| sum != pair.sum) {
                return Ok(Planned::NotKept);
            }
            if both_plain && target.checksum != duplicate.checksum {
                break;
            }
            several |= target.references > 1;
            sums.extend(duplicate.checksum);
            left.push(duplicate.references);
        }
        if left.is_empty() {
            return Ok(Planned::Left(1));
        }
        let blocks = left.len() as u64;
        if to.packed.is_none() && self.is_kept_by_thick(pair.kept, to.physical, blocks, several)? {
            return Ok(Planned::NotKept);
        }
        let objects = match self.objects_of_duplicates(pair, from, to, left)? {
            Ok(objects) => objects,
            Err(_) if blocks > 1 => return Ok(Planned::Shorter(blocks / 2)),
            Err(Unchangeable::Other) => return Ok(Planned::Left(1)),
            Err(Unchangeable::NoRoom) => return Ok(Planned::NoRoom),
        };
        let checksums = [self.checksums_of(from, &sums, blocks)?, self.checksums_of(to, &sums, blocks)?];
        Ok(Planned::Share(Plan { logical: pair.logical, blocks, from, kept: to, checksums, objects }))
    }

    /// The checksums of the physical blocks of one side, of which `sums` are those of plain ones.
    pub(super) fn checksums_of(&mut self, side: Stored, sums: &[u32], blocks: u64) -> Result<Vec<u32>> {
        if side.packed.is_none() {
            return Ok(sums.to_vec());
        }
        let mut checksums = Vec::new();
        self.data.checksums(&mut self.pages, side.run(blocks), &mut checksums)?;
        Ok(checksums)
    }

    /// A disk or snapshot for each leaf that maps the duplicates at their logical blocks. `left` has the references of
    /// each duplicate.
    fn objects_of_duplicates(
        &mut self,
        pair: &Pair,
        from: Stored,
        to: Stored,
        mut left: Vec<u32>,
    ) -> Result<std::result::Result<Vec<u64>, Unchangeable>> {
        let blocks = left.len() as u64;
        let range = pair.logical..pair.logical + blocks;
        let trees = self.trees(pair.object);
        let mut leaves = PlannedLeaves::default();
        let mut effects = Effects::default();
        let mut nodes = self.nodes(&mut effects);
        let mut missing = None;
        for (number, Tree { object, root, thick }) in trees.into_iter().enumerate() {
            // Another tree maps the duplicates at these logical blocks only if it shares one of the known leaves, and
            // matters only if it is thick.
            if left.iter().all(|left| *left == 0) && !(thick && leaves.any_shared()) {
                continue;
            }
            let mut position = range.start;
            while position < range.end {
                let Some(leaf) = nodes.leaf_of(root, position..range.end, number, &mut missing)? else { break };
                let new = !leaves.contains(leaf.id);
                let mut maps_here = false;
                for at in duplicates_in(&leaf.mappings, pair.logical, blocks, from) {
                    if thick {
                        return Ok(Err(Unchangeable::Other));
                    }
                    maps_here = true;
                    let left = &mut left[at as usize];
                    *left = left.saturating_sub(u32::from(new));
                }
                if maps_here && new {
                    leaves.add(object, &leaf);
                }
                position = leaf.upper;
            }
        }
        if let Some(error) = missing {
            return Err(error);
        }
        let share = Share { logical: pair.logical, blocks, from: from.physical, to: to.physical };
        let sources = [(pair.logical, source(from, to, blocks))];
        if leaves.is_empty() || !leaves.are_few() {
            return Ok(Err(Unchangeable::Other));
        }
        let have_room = leaves.have_room(|leaf| match to.packed {
            None => tree::share_fits(&mut nodes, leaf, &share),
            Some(_) => Ok(tree::splits_for(&mut nodes, leaf, &sources, 0)?.is_some()),
        })?;
        Ok(if have_room { Ok(leaves.into_objects()) } else { Err(Unchangeable::NoRoom) })
    }

    /// The blocks of the entry that maps the first duplicate.
    pub(super) fn entry_around(&mut self, pair: &Pair) -> Result<WithinEntry> {
        let mut within = WithinEntry { before: 0, after: 0 };
        // The object may have been deleted meanwhile.
        let object = self.catalog.whole(pair.object).ok();
        let Some(root) = object.and_then(|object| object.root) else { return Ok(within) };
        let mut extents = Vec::new();
        let most = tree::EXTENT_BLOCKS_MAX;
        let around = pair.logical.saturating_sub(most)..(pair.logical + most).min(tree::LOGICAL_LIMIT);
        tree::lookup(&mut self.nodes(&mut Effects::default()), root, around, &mut extents)?;
        for extent in extents {
            if let Some(before) = pair.logical.checked_sub(extent.logical).filter(|before| *before < extent.blocks) {
                within = WithinEntry { before, after: extent.blocks - before - 1 };
            }
        }
        Ok(within)
    }

    /// Whether a thick disk maps one of the kept blocks, which are plain, at its logical block. `several` says whether
    /// any of them has several references.
    pub(super) fn is_kept_by_thick(
        &mut self,
        kept: (u64, u64),
        start: u64,
        blocks: u64,
        several: bool,
    ) -> Result<bool> {
        let range = kept.1..kept.1 + blocks;
        let trees = self.trees(kept.0);
        let mut effects = Effects::default();
        let mut nodes = self.nodes(&mut effects);
        let (mut shared, mut missing) = (several, None);
        for (number, Tree { root, thick, .. }) in trees.into_iter().enumerate() {
            // The first tree is that of the kept blocks.
            if number > 0 && !(thick && shared) {
                continue;
            }
            let mut position = range.start;
            while position < range.end {
                let Some(leaf) = nodes.leaf_of(root, position..range.end, number, &mut missing)? else { break };
                shared |= leaf.shared;
                let same = Stored { physical: start, packed: None };
                if thick && duplicates_in(&leaf.mappings, kept.1, blocks, same).next().is_some() {
                    return Ok(true);
                }
                position = leaf.upper;
            }
        }
        missing.map_or(Ok(false), Err)
    }
}

/// The numbers of those of the `blocks` logical blocks from `logical` on that entries map to `from` and the places
/// after it.
fn duplicates_in(mappings: &[Mapping], logical: u64, blocks: u64, from: Stored) -> impl Iterator<Item = u64> + '_ {
    mappings.iter().filter(|mapping| !mapping.unwritten).flat_map(move |mapping| {
        (0..mapping.blocks).filter_map(move |at| {
            let within = (mapping.logical + at).checked_sub(logical).filter(|within| *within < blocks)?;
            (from.after(within) == Some(Stored::of(mapping, mapping.logical + at))).then_some(within)
        })
    })
}
