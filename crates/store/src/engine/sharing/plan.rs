//! Which blocks of a pair of ranges can be shared, and in which trees.
//!
//! A *duplicate* is a block that leaves map and that another block, the *kept* one, replaces there.
//!
//! What must hold:
//!
//! 1. Both blocks are plain, written and settled: not suspect, without a write under way, without journalled payload
//!    that is not written to them, and not concerned by a pending operation. So the block on the medium has the content
//!    that its checksum describes, and the operations that made it so are durable.
//! 2. All leaves that map the duplicate at its logical block are found: as many as it has references, or all that exist
//!    at this logical block. In the second case the duplicate is mapped at other logical blocks too, and is not free
//!    afterwards.
//! 3. Neither block belongs to a thick disk or a snapshot of one, as far as that matters: a block of a thick disk that
//!    no other tree maps must not become shared, because a later write of it would need new space. A block that is
//!    shared already does not change for the disk. So the trees of thick disks are searched at the logical block of
//!    each of the two blocks. A kept block with several references may also be mapped at a logical block that is not
//!    searched, but the disk has reserved the space for a write of it since it got the block.
//! 4. Two blocks are shared only if together they have at most [`KEPT_REFERENCES_MAX`] references. The limit is needed
//!    because each snapshot may multiply the references. Because it applies to the sum, all places of the duplicate can
//!    get the kept block, and passes never move places to and fro between two blocks.

use super::Pair;
use super::prints::KEPT_REFERENCES_MAX;
use crate::FILE_BLOCKS;
use crate::Result;
use crate::engine::Meta;
use crate::engine::metadata::Effects;
use crate::engine::packing::{PlannedLeaves, Tree, Unsettled};
use crate::space::Run;
use crate::tree::{self, Mapping, Share};

/// What is shared.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    /// First logical block of the duplicates.
    pub logical: u64,
    /// First duplicate.
    pub from: u64,
    /// The kept blocks.
    pub run: Run,
    /// CRC32C of each block.
    pub checksums: Vec<u32>,
    /// A disk or snapshot for each leaf that maps the duplicates.
    pub objects: Vec<u64>,
}

impl Plan {
    /// The duplicates.
    pub fn duplicates(&self) -> Run {
        Run { start: self.from, blocks: self.run.blocks }
    }
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
}

impl Meta {
    /// The plain, written blocks of an object in a range; `None` for each block that is not of this kind.
    pub(super) fn plain_blocks(&mut self, object: u64, logical: u64, blocks: u64) -> Result<Vec<Option<u64>>> {
        let mut plain = vec![None; blocks as usize];
        let Some(root) = self.catalog.whole(object).ok().and_then(|object| object.root) else { return Ok(plain) };
        let mut extents = Vec::new();
        tree::lookup(&mut self.nodes(&mut Effects::default()), root, logical..logical + blocks, &mut extents)?;
        for extent in extents.iter().filter(|extent| extent.packed.is_none() && !extent.unwritten) {
            for at in 0..extent.blocks {
                plain[(extent.logical + at - logical) as usize] = Some(extent.physical + at);
            }
        }
        Ok(plain)
    }

    /// Plans to share the first blocks of a pair. With `claimed` the caller has marked the blocks as in flight.
    pub(super) fn plan_share(&mut self, pair: &Pair, claimed: bool) -> Result<Planned> {
        let kept = self.plain_blocks(pair.kept.0, pair.kept.1, pair.blocks)?;
        let duplicates = self.plain_blocks(pair.object, pair.logical, pair.blocks)?;
        let Some(from) = duplicates[0] else { return Ok(Planned::Left(1)) };
        let Some(start) = kept[0] else {
            let is_duplicate = self.entry(from)?.checksum == pair.sum;
            return Ok(if is_duplicate { Planned::NotKept } else { Planned::Left(1) });
        };
        if start == from {
            let same = kept.iter().zip(&duplicates).take_while(|(kept, other)| kept.is_some() && kept == other);
            return Ok(Planned::Same(same.count() as u64));
        }
        let (mut checksums, mut left) = (Vec::new(), Vec::new());
        let mut several = false;
        // Neither run contains a block of the other one.
        for at in 0..pair.blocks.min(start.abs_diff(from)) {
            let adjacent = kept[at as usize] == Some(start + at) && duplicates[at as usize] == Some(from + at);
            let apart = at > 0 && ((start + at).is_multiple_of(FILE_BLOCKS) || (from + at).is_multiple_of(FILE_BLOCKS));
            if !adjacent || apart {
                break;
            }
            let duplicate = match self.settled(from + at, claimed)? {
                Ok(entry) => entry,
                Err(_) if at > 0 => break,
                Err(Unsettled::Held) => return Ok(Planned::Held),
                Err(Unsettled::Changing) => return Ok(Planned::Left(1)),
            };
            // Otherwise a duplicate that has got other content since the scan would be grouped again and again.
            if at == 0 && duplicate.checksum != pair.sum {
                return Ok(Planned::Left(1));
            }
            let target = match self.settled(start + at, claimed)? {
                Ok(entry) if entry.references + duplicate.references <= KEPT_REFERENCES_MAX => entry,
                _ if at > 0 => break,
                Err(Unsettled::Held) => return Ok(Planned::Held),
                _ => return Ok(Planned::NotKept),
            };
            if at == 0 && target.checksum != pair.sum {
                return Ok(Planned::NotKept);
            }
            if target.checksum != duplicate.checksum {
                break;
            }
            several |= target.references > 1;
            checksums.push(target.checksum);
            left.push(duplicate.references);
        }
        if checksums.is_empty() {
            return Ok(Planned::Left(1));
        }
        let blocks = checksums.len() as u64;
        let share = Share { logical: pair.logical, blocks, from, to: start };
        if self.is_kept_by_thick(pair.kept, start, blocks, several)? {
            return Ok(Planned::NotKept);
        }
        let Some(objects) = self.objects_of_duplicates(pair.object, &share, left)? else {
            return Ok(if blocks > 1 { Planned::Shorter(blocks / 2) } else { Planned::Left(1) });
        };
        let run = Run { start, blocks };
        Ok(Planned::Share(Plan { logical: pair.logical, from, run, checksums, objects }))
    }

    /// A disk or snapshot for each leaf that maps the duplicates at their logical blocks. `left` has the references of
    /// each duplicate. `None` if they cannot be shared.
    fn objects_of_duplicates(&mut self, object: u64, share: &Share, mut left: Vec<u32>) -> Result<Option<Vec<u64>>> {
        let range = share.logical..share.logical + share.blocks;
        let trees = self.trees(object);
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
                for at in duplicates_in(&leaf.mappings, share) {
                    if thick {
                        return Ok(None);
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
        let have_room = leaves.are_few() && leaves.have_room(|leaf| tree::share_fits(&mut nodes, leaf, share))?;
        Ok(have_room.then(|| leaves.into_objects()).filter(|objects| !objects.is_empty()))
    }

    /// Whether a thick disk maps one of the kept blocks at its logical block. `several` says whether any of them has
    /// several references.
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
                let same = Share { logical: kept.1, blocks, from: start, to: start };
                if thick && duplicates_in(&leaf.mappings, &same).next().is_some() {
                    return Ok(true);
                }
                position = leaf.upper;
            }
        }
        missing.map_or(Ok(false), Err)
    }
}

/// The numbers of the blocks of `share` that plain entries map to `share.from` and the blocks after it.
fn duplicates_in<'a>(mappings: &'a [Mapping], share: &'a Share) -> impl Iterator<Item = u64> + 'a {
    let plain = mappings.iter().filter(|mapping| mapping.packed.is_none() && !mapping.unwritten);
    plain.flat_map(move |mapping| {
        (0..mapping.blocks).filter_map(move |at| {
            let within = (mapping.logical + at).checked_sub(share.logical)?;
            (within < share.blocks && mapping.physical + at == share.from + within).then_some(within)
        })
    })
}
