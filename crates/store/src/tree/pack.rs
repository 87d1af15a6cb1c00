//! Maps blocks to a new pack that has the same content. The blocks are plain, or in another pack.
//!
//! A pack is a run of physical blocks with compressed logical blocks. Unlike [`super::replace()`], this change keeps
//! the content of every tree, so shared leaves are changed in place, for all trees that share them. The old blocks
//! become free only if every leaf that maps them is changed: the caller names a tree for each of these leaves.
//!
//! What must hold:
//!
//! 1. Only entries that map exactly the given logical blocks to the given physical blocks change. An entry that differs
//!    stays, so a tree that was divided into other leaves, or was changed already, is no error.
//! 2. Each entry that maps a part of a pack has one reference on every block of the pack. An entry of another pack of
//!    which a part stays keeps its reference, and each further part of it gets one.
//! 3. Small leaves are not merged: the next write to such a leaf does that.
//! 4. A plan has no shared leaf without room ([`fits`]), because all its parents would change if it were split. Replay
//!    may find one: a part of a deleted tree that was dropped at run time may still be there, and share the leaf. Then
//!    the leaf is copied for this tree, and the copy is split. If this tree kept the old blocks instead, it would map
//!    blocks that belong to other trees afterwards.

use super::page::{self, ENTRIES_MAX, PhysicalRun, Redirect};
use super::path::Path;
use super::{Mapping, NodeId, NodeStore, Packed, redirect};
use crate::Result;
use backend::{BLOCK_SIZE, Block};
use std::ops::Range;

/// Consecutive blocks that a new pack contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Source {
    /// Index within the new pack of the first block.
    pub index: u8,
    /// The plain blocks. With `packed`, the first block of another pack, and the number of logical blocks.
    pub run: PhysicalRun,
    /// Set if the blocks are in another pack: the place of the first one.
    pub packed: Option<Packed>,
}

impl Source {
    /// The physical blocks in which the source is stored.
    pub fn stored(&self) -> PhysicalRun {
        let blocks = self.packed.map_or(self.run.blocks, |packed| u64::from(packed.stored));
        PhysicalRun { physical: self.run.physical, blocks }
    }

    /// Whether a mapping of one block is that of block `within` of the source.
    fn is_mapped_by(&self, within: u64, one: &Mapping) -> bool {
        match (self.packed, one.packed) {
            (None, None) => self.run.physical + within == one.physical,
            (Some(old), Some(now)) => {
                self.run.physical == one.physical
                    && old.stored == now.stored
                    && u64::from(old.index) + within == u64::from(now.index)
            }
            _ => false,
        }
    }
}

/// A leaf of a tree, for the plan of a pack.
pub struct Leaf {
    /// The node.
    pub id: NodeId,
    /// Upper bound of the blocks below the leaf.
    pub upper: u64,
    /// Whether other trees share the leaf.
    pub shared: bool,
    /// The extents from the position on that begin below the end of the range, cut to the range.
    pub mappings: Vec<Mapping>,
}

/// The leaf with the first block of `range`.
pub fn leaf_of<S: NodeStore + ?Sized>(store: &mut S, root: NodeId, range: Range<u64>) -> Result<Leaf> {
    let path = Path::to_leaf(store, root, range.start)?;
    let end = range.end.min(path.upper);
    let mappings = page::mappings_from(store.node(path.last())?, range.start)
        .take_while(|mapping| mapping.logical < end)
        .map(|mapping| mapping.clipped(range.start, end))
        .collect();
    Ok(Leaf { id: path.last(), upper: path.upper, shared: path.is_shared(), mappings })
}

/// Whether a leaf has room for the entries of a pack of a range, whose index 0 is the first block of the range.
pub fn fits<S: NodeStore + ?Sized>(store: &mut S, leaf: NodeId, range: Range<u64>, sources: &[Source]) -> Result<bool> {
    let (logical, pack) = (range.start, PhysicalRun { physical: 0, blocks: 1 });
    redirect::has_room(store, leaf, range, &|page, range| pack_in_leaf(page, range, logical, pack, sources))
}

/// Maps the blocks of `sources` in a range to a new pack, in the leaves of one tree. Index 0 of the pack is logical
/// block `logical`. Returns the new root.
pub fn pack<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    logical: u64,
    pack: PhysicalRun,
    sources: &[Source],
) -> Result<NodeId> {
    redirect::redirect(store, root, range, &|page, range| pack_in_leaf(page, range, logical, pack, sources))
}

/// How often a leaf has to be split for the entries of all these sources of a pack, each mapped from a logical block
/// on. `None` if that is more than `most` times, or if splits do not help.
pub fn splits_for<S: NodeStore + ?Sized>(
    store: &mut S,
    leaf: NodeId,
    sources: &[(u64, Source)],
    most: u64,
) -> Result<Option<u64>> {
    let pack = PhysicalRun { physical: 0, blocks: 1 };
    let mut leaves = vec![*store.node(leaf)?];
    for (logical, source) in sources {
        let mut at = 0;
        while at < leaves.len() {
            let (count_of_leaves, page) = (leaves.len() as u64, &mut leaves[at]);
            let range = *logical..logical + source.run.blocks;
            if matches!(share_in_leaf(page, range, *logical, pack, source), Redirect::Done { .. }) {
                at += 1;
                continue;
            }
            let count = page::count(page);
            if count <= ENTRIES_MAX / 2 || count_of_leaves > most {
                return Ok(None);
            }
            let mut right = Block([0; BLOCK_SIZE]);
            page::initialise(&mut right, leaf, 0);
            page::move_tail(page, count / 2, &mut right);
            leaves.insert(at + 1, right);
        }
    }
    Ok(Some(leaves.len() as u64 - 1))
}

/// Maps the blocks of `source` in a range to a part of a pack that is in use, in the leaves of one tree. The first
/// block of the source is mapped at logical block `logical`. Returns the new root.
pub fn share_pack<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    logical: u64,
    pack: PhysicalRun,
    source: &Source,
) -> Result<NodeId> {
    redirect::redirect(store, root, range, &|page, range| share_in_leaf(page, range, logical, pack, source))
}

fn share_in_leaf(page: &mut Block, range: Range<u64>, logical: u64, pack: PhysicalRun, source: &Source) -> Redirect {
    page::pack_in_leaf(page, range, pack, &|one| {
        let within = one.logical.checked_sub(logical)?;
        (within < source.run.blocks && source.is_mapped_by(within, one)).then(|| source.index + within as u8)
    })
}

fn pack_in_leaf(page: &mut Block, range: Range<u64>, logical: u64, pack: PhysicalRun, sources: &[Source]) -> Redirect {
    page::pack_in_leaf(page, range, pack, &|one| {
        let index = one.logical.checked_sub(logical)?;
        let at = sources.partition_point(|source| u64::from(source.index) <= index).checked_sub(1)?;
        let source = &sources[at];
        let within = index - u64::from(source.index);
        (within < source.run.blocks && source.is_mapped_by(within, one)).then_some(index as u8)
    })
}
