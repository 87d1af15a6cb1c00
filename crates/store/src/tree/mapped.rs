//! How many blocks trees map, and in how many they are stored.
//!
//! What must hold:
//!
//! 1. A pack counts once for each tree, however many entries of the tree map parts of it, if all these entries lie
//!    within [`EXTENT_BLOCKS_MAX`] logical blocks. A pack of shared blocks may also be mapped elsewhere in the tree,
//!    and counts for each such place, as a plain shared block does. The entries may be in several leaves. So a leaf
//!    counts each of its packs once, and names those that an earlier leaf may map too. The lowest node that contains
//!    all blocks of the pack before this leaf looks them up, and subtracts the pack if it is mapped there.
//! 2. The count below a node does not depend on the tree in which the node is, so trees that share it count it once.

use super::freed::{node_of_level, root_level};
use super::page::{self, EXTENT_BLOCKS_MAX};
use super::{NodeId, NodeStore, lookup, references};
use crate::Result;
use rustc_hash::FxHashMap;

/// The most nodes in the cache of [`MappedCounter`] (about 32 MiB).
const REMEMBERED_MAX: usize = if cfg!(test) { 64 } else { 1 << 19 };

/// Blocks that a tree maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MappedBlocks {
    /// All mapped blocks.
    pub all: u64,
    /// The part of `all` that reads as zeros.
    pub unwritten: u64,
    /// The part of `all` that is compressed.
    pub packed: u64,
    /// The physical blocks of the packs that the tree maps.
    pub packs: u64,
}

/// A pack that is counted below a node, although an earlier node may map parts of it, too.
#[derive(Clone, Copy)]
struct Begun {
    /// The logical block with index 0 of the pack.
    logical: u64,
    /// The first block that the leaf with the pack maps.
    leaf: u64,
    /// First physical block.
    physical: u64,
    /// Number of physical blocks.
    stored: u64,
}

/// The count below a node.
#[derive(Clone, Default)]
struct Below {
    blocks: MappedBlocks,
    /// The first mapped block.
    first: Option<u64>,
    begun: Vec<Begun>,
}

/// Counts the blocks that trees map. Caches the counts of up to `REMEMBERED_MAX` nodes with several references, so
/// that the parts that trees share are read once.
#[derive(Default)]
pub struct MappedCounter {
    known: FxHashMap<NodeId, Below>,
}

impl MappedCounter {
    /// Counts the blocks that a tree maps. `go_on` is called for each visited node; its error ends the count.
    pub fn count<S: NodeStore + ?Sized>(
        &mut self,
        store: &mut S,
        root: NodeId,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<MappedBlocks> {
        let level = root_level(store, root)?;
        self.below(store, root, level, go_on).map(|below| below.blocks)
    }

    fn below<S: NodeStore + ?Sized>(
        &mut self,
        store: &mut S,
        id: NodeId,
        level: u8,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Below> {
        if let Some(known) = self.known.get(&id) {
            return Ok(known.clone());
        }
        go_on()?;
        let node = node_of_level(store, id, level)?;
        let mut sum = Below::default();
        if level == 0 {
            sum = of_leaf(node);
        } else {
            let children: Vec<NodeId> = page::children(node).collect();
            for child in children {
                let more = self.below(store, child, level - 1, go_on)?;
                sum.blocks.all += more.blocks.all;
                sum.blocks.unwritten += more.blocks.unwritten;
                sum.blocks.packed += more.blocks.packed;
                sum.blocks.packs += more.blocks.packs;
                for begun in more.begun {
                    let first = sum.first.unwrap_or(begun.leaf);
                    if is_mapped_before(store, id, first, &begun)? {
                        sum.blocks.packs -= begun.stored;
                    } else if begun.logical < first {
                        sum.begun.push(begun);
                    }
                }
                sum.first = sum.first.or(more.first);
            }
        }
        if self.known.len() < REMEMBERED_MAX && references(store, id)? > 1 {
            self.known.insert(id, sum.clone());
        }
        Ok(sum)
    }
}

fn of_leaf(leaf: &backend::Block) -> Below {
    let mut sum = Below::default();
    let mut packs = Vec::new();
    for mapping in page::mappings_from(leaf, 0) {
        let first = *sum.first.get_or_insert(mapping.logical);
        sum.blocks.all += mapping.blocks;
        sum.blocks.unwritten += if mapping.unwritten { mapping.blocks } else { 0 };
        let Some(packed) = mapping.packed else { continue };
        sum.blocks.packed += mapping.blocks;
        let stored = mapping.stored();
        if packs.contains(&stored.physical) {
            continue;
        }
        packs.push(stored.physical);
        sum.blocks.packs += stored.blocks;
        let logical = mapping.logical.saturating_sub(u64::from(packed.index));
        if logical < first {
            sum.begun.push(Begun { logical, leaf: first, physical: stored.physical, stored: stored.blocks });
        }
    }
    sum
}

/// Whether a leaf below a node maps a part of a pack before the leaf that has counted it. `first` is the first block
/// that is mapped below the node.
fn is_mapped_before<S: NodeStore + ?Sized>(store: &mut S, id: NodeId, first: u64, begun: &Begun) -> Result<bool> {
    let from = first.max(begun.logical).max(begun.leaf.saturating_sub(EXTENT_BLOCKS_MAX));
    if from >= begun.leaf {
        return Ok(false);
    }
    let mut extents = Vec::new();
    lookup::lookup(store, id, from..begun.leaf, &mut extents)?;
    Ok(extents.iter().any(|extent| extent.packed.is_some() && extent.physical == begun.physical))
}
