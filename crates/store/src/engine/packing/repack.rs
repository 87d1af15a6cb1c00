//! Repacking: a pack of which less than half of the blocks are in use is replaced by a new one without the others.
//!
//! An overwritten or discarded block of a pack keeps its space as long as an entry maps any part of the pack.
//!
//! What must hold:
//!
//! 1. A pack is replaced only if every entry that maps a part of it is known: as many entries map it as it has
//!    references. Otherwise the old pack would keep its space, and its blocks would be stored twice.
//! 2. An index of the old pack becomes one index of the new pack, at whatever logical blocks entries map it: at those
//!    that begin with the first index, or at others, which get operations of their own (`elsewhere`).
//! 3. The old pack needs no mark: none of its blocks is ever overwritten in place, and the guard of the step prevents
//!    that they are reused. The operation is carried out only if the same entries map the pack at its end.
//! 4. The content is verified against the checksums in the table and the index of the old pack.
//! 5. An entry becomes one entry again, because all its blocks are in use. So no leaf needs more room.

use super::elsewhere::{Others, moved};
use super::leaves::PlannedLeaves;
use super::places::Places;
use super::plan::{Plan, Planned, Tree};
use super::{Outcome, WINDOW, most_worth};
use crate::engine::metadata::Effects;
use crate::engine::{Engine, Meta};
use crate::pack::{BLOCKS_MAX, Pack};
use crate::space::Run;
use crate::tree::{self, LOGICAL_LIMIT, Packed, PhysicalRun, Source};
use crate::{Result, checksum};
use backend::{BLOCK_SIZE, Buffer};
use std::ops::Range;

/// A pack that a disk or snapshot maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OldPack {
    /// Logical block with index 0.
    pub logical: u64,
    /// Its blocks.
    pub run: Run,
}

impl Meta {
    /// The packs in a window of an object that may have blocks that are not in use.
    pub(super) fn packs_to_examine(&mut self, object: u64, window: Range<u64>) -> Result<Vec<OldPack>> {
        let Some(root) = self.catalog.whole(object)?.root else { return Ok(Vec::new()) };
        let mut extents = Vec::new();
        // A pack may begin before the window, and end after it.
        let beside = BLOCKS_MAX as u64;
        let around = window.start.saturating_sub(beside)..(window.end + beside).min(LOGICAL_LIMIT);
        tree::lookup(&mut self.nodes(&mut Effects::default()), root, around, &mut extents)?;
        let mut packs = Vec::<(OldPack, u64, bool)>::new();
        for extent in extents {
            let is_within = extent.logical < window.end && window.start < extent.logical + extent.blocks;
            let Some(logical) = extent.packed.and_then(|packed| extent.logical.checked_sub(u64::from(packed.index)))
            else {
                continue;
            };
            let stored = extent.stored();
            let old = OldPack { logical, run: Run { start: stored.physical, blocks: stored.blocks } };
            match packs.iter_mut().find(|(known, ..)| *known == old) {
                Some((_, used, within)) => (*used, *within) = (*used + extent.blocks, *within || is_within),
                None => packs.push((old, extent.blocks, is_within)),
            }
        }
        // A pack of one block cannot become smaller. Most packs have the blocks of a window, so if half of them are in
        // use, only a pack that must have more is examined.
        let is_candidate = |(old, used, within): &(OldPack, u64, bool)| {
            *within && old.run.blocks > 1 && (2 * used < WINDOW || old.run.blocks > most_worth(WINDOW))
        };
        Ok(packs.into_iter().filter(is_candidate).map(|(old, ..)| old).collect())
    }

    /// Plans to pack the blocks of a pack that are in use again. `object` has a tree that maps the pack.
    pub(super) fn plan_repack(&mut self, object: u64, old: OldPack, places: &Places) -> Result<Planned> {
        let Some(mut left) = self.references_of_pack(old.run)? else { return Ok(Planned::Nothing) };
        let mut checksums = Vec::with_capacity(old.run.blocks as usize);
        self.data.checksums(&mut self.pages, old.run, &mut checksums)?;
        let range = old.logical..(old.logical + BLOCKS_MAX as u64).min(LOGICAL_LIMIT);
        let trees = self.trees(object);
        let mut used = [false; BLOCKS_MAX];
        let mut leaves = PlannedLeaves::default();
        let mut effects = Effects::default();
        let mut nodes = self.nodes(&mut effects);
        let mut missing = None;
        for (number, Tree { object, root, .. }) in trees.into_iter().enumerate() {
            if left == 0 {
                break;
            }
            let mut position = range.start;
            while position < range.end {
                let Some(leaf) = nodes.leaf_of(root, position..range.end, number, &mut missing)? else { break };
                position = leaf.upper;
                if leaves.contains(leaf.id) {
                    continue;
                }
                let mut maps_here = false;
                for mapping in leaf.mappings.iter().filter(|mapping| mapping.physical == old.run.start) {
                    let Some(Packed { index, stored }) = mapping.packed else { return Ok(Planned::Nothing) };
                    if u64::from(stored) != old.run.blocks || left == 0 {
                        return Ok(Planned::Nothing);
                    }
                    if old.logical + u64::from(index) != mapping.logical {
                        // The entry is one of those at other logical blocks.
                        continue;
                    }
                    left -= 1;
                    used[usize::from(index)..][..mapping.blocks as usize].fill(true);
                    maps_here = true;
                }
                if maps_here {
                    leaves.add(object, &leaf);
                }
            }
        }
        if let Some(error) = missing {
            return Err(error);
        }
        // The operation at the window gives the new pack its first references, so there must be an entry here.
        if leaves.is_empty() {
            return Ok(Planned::Nothing);
        }
        let others = if left > 0 { self.entries_elsewhere(old, places)? } else { Vec::new() };
        if others.len() != left as usize {
            return Ok(Planned::Nothing);
        }
        for entry in &others {
            used[usize::from(entry.index)..][..entry.blocks as usize].fill(true);
        }
        let (Some(first), Some(last)) = (used.iter().position(|used| *used), used.iter().rposition(|used| *used))
        else {
            return Ok(Planned::Nothing);
        };
        if !leaves.are_few() {
            return Ok(Planned::Nothing);
        }
        let sources = sources(&used, first, old.run);
        let (logical, blocks) = (old.logical + first as u64, (last - first + 1) as u64);
        let plan = Plan {
            logical,
            blocks,
            sources,
            checksums,
            objects: leaves.into_objects(),
            old: Some(old),
            // An entry becomes one entry, so no leaf is split.
            others: Others { parts: moved(&others, first as u8, old.run), leaves: others.len() as u64, splits: 0 },
        };
        Ok(if plan.count() * 2 < BLOCKS_MAX as u64 { Planned::Pack(Box::new(plan)) } else { Planned::Nothing })
    }

    /// The number of entries that map a pack, unless its blocks differ in it or are not settled.
    fn references_of_pack(&mut self, run: Run) -> Result<Option<u32>> {
        let mut references = None;
        for block in run.start..run.start + run.blocks {
            let Ok(entry) = self.settled(block, false)? else { return Ok(None) };
            if references.is_some_and(|known| known != entry.references) {
                return Ok(None);
            }
            references = Some(entry.references);
        }
        Ok(references)
    }
}

/// The blocks of a pack that are in use, as sources of a pack that begins with index `first`.
fn sources(used: &[bool; BLOCKS_MAX], first: usize, run: Run) -> Vec<Source> {
    let mut sources = Vec::<Source>::new();
    for index in (first..BLOCKS_MAX).filter(|index| used[*index]) {
        let new = (index - first) as u8;
        match sources.last_mut() {
            Some(source) if u64::from(source.index) + source.run.blocks == u64::from(new) => source.run.blocks += 1,
            _ => {
                let packed = Some(Packed { index: index as u8, stored: run.blocks as u8 });
                sources.push(Source { index: new, run: PhysicalRun { physical: run.start, blocks: 1 }, packed });
            }
        }
    }
    sources
}

impl Engine {
    /// Reads and verifies the blocks of a plan from the pack that contains them.
    pub(super) fn read_pack(&self, plan: &Plan, old: OldPack) -> Result<std::result::Result<Buffer, Outcome>> {
        let mut bytes = Buffer::recycled(old.run.blocks as usize);
        let (file, offset) = self.files.locate(old.run)?;
        if let Err(error) = file.read_at(&mut bytes, offset) {
            tracing::warn!(%error, block = old.run.start, "a pack is not packed again, because it cannot be read");
            return Ok(Err(Outcome::Left));
        }
        if !bytes.chunks_exact(BLOCK_SIZE).map(checksum).eq(plan.checksums.iter().copied()) {
            return Ok(Err(Outcome::Left));
        }
        let mut content = Buffer::recycled(plan.count() as usize);
        let read = Pack::decode(&bytes).and_then(|pack| {
            if plan.count() * 2 >= pack.count() as u64 {
                return Ok(false);
            }
            let mut at = 0;
            for source in &plan.sources {
                let (first, blocks) = (source.packed.map_or(0, |packed| packed.index), source.run.blocks as usize);
                let end = at + blocks * BLOCK_SIZE;
                pack.read(usize::from(first)..usize::from(first) + blocks, &mut content[at..end])?;
                at = end;
            }
            Ok(true)
        });
        Ok(match read {
            Ok(true) => Ok(content),
            Ok(false) => Err(Outcome::NotWorth),
            Err(error) => {
                tracing::warn!(%error, block = old.run.start, "a pack is not packed again");
                Err(Outcome::Left)
            }
        })
    }
}
