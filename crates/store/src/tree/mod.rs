//! The map of a disk: a copy-on-write B+tree from logical blocks to physical blocks.
//!
//! A tree is identified by its root node. A snapshot is one more reference on the root. A write copies ("shadows") the
//! shared nodes on its path, and both trees share the others. The tree code keeps no pages and does no I/O: it accesses
//! pages, allocation and reference counts through [`NodeStore`], which the engine implements on its page cache and the
//! tests in memory.
//!
//! Invariants, which every function here keeps:
//!
//! 1. **References of nodes.** The count of a node is the number of parent entries that refer to it, plus the number of
//!    heads and snapshots that have it as their root.
//! 2. **References of data.** The count of a data block is the number of leaf entries that map it, plus the references
//!    held outside the trees. An entry that maps a part of a pack refers to every block of the pack. An entry of a
//!    shared leaf counts once, so an in-place overwrite needs an unshared *path* as well as an unshared block
//!    ([`lookup_exclusive`]).
//! 3. **Only exclusive nodes change.** A node is modified only when its own count is 1, and the count of every node
//!    above it, up to the root of the changed tree, is 1. The exceptions are [`pack()`] and [`share()`], which change
//!    no content: they change leaves in place, for all trees that share them.
//! 4. **Order.** Extents of a leaf ascend and do not overlap. Keys of an internal node ascend. All blocks below a child
//!    lie in `[key of the child, key of the next)`, so no extent crosses the bound of its leaf. The first child has no
//!    key (0 is stored); its lower bound is that of its node.
//! 5. **Level.** All leaves have level 0, and a child is exactly one level below its parent. Each descent checks that,
//!    so it ends even on damaged pages.
//! 6. **No empty nodes**, except a root that is a leaf. An unshared root with a single child is replaced by that child,
//!    if the child can be read.
//! 7. **Determinism.** The same calls on the same tree make the same allocations in the same order and the same pages,
//!    because replay executes them again. Nothing depends on hashing order, a clock or random numbers. There is one
//!    exception: two nodes are not merged, and a root is not replaced by its only child, while a page cannot be read.
//!    So a tree may be divided into other leaves after replay, and [`drop_step`] may need fewer or more steps.
//!
//! Changes are not atomic in memory. When the store returns an error inside [`replace()`] or [`drop_step`], pages may
//! be partly changed, and the owner must return to its last checkpoint and replay the journal. [`reach()`] and
//! [`check_drop`], called before the change, find in time the pages that the change cannot read. The owner must keep
//! [`NODES_PER_STEP`] nodes free.
//!
//! | file | what it holds |
//! |---|---|
//! | `page` | layout of a node: encode, decode, validate, search, edit in place |
//! | `path` | the path from a root to a leaf, and making it exclusive |
//! | `balance` | splitting full nodes, removing empty and merging small ones |
//! | `lookup`, `replace`, `remove`, `compare`, `walk` | the operations |
//! | `pack` | mapping blocks to a pack with the same content, in every leaf that maps them |
//! | `share` | mapping blocks to other blocks with the same content |
//! | `reach` | how many pages a `replace` would change |
//! | `freed` | counting what dropping trees would free |
//! | `mapped` | counting the blocks that trees map |
//! | `growth` | how many nodes a number of changes may need |
//! | `survey` | which pages an operation will need |
//! | `unreadable` | which parts of a range cannot be changed |

mod balance;
mod compare;
mod distinct;
mod freed;
mod growth;
mod lookup;
mod mapped;
mod pack;
pub mod page;
mod path;
mod reach;
mod redirect;
mod remove;
mod replace;
mod share;
mod survey;
mod unreadable;
mod walk;

#[cfg(test)]
mod tests;

pub use compare::{DiffExtent, diff};
pub use distinct::{DistinctBlocks, PackUse, distinct};
pub use freed::{DataReferences, Freed, Left, Repeats, freed, freed_after, freed_and_left};
pub use growth::{Forest, NODES_PER_TREE, nodes_needed};
pub use lookup::{Extent, first_mapped, lookup, lookup_exclusive};
pub use mapped::{MappedBlocks, MappedCounter};
pub use pack::{Leaf, Source, fits, leaf_of, pack, share_pack, splits_for};
pub use page::{EXTENT_BLOCKS_MAX, LOGICAL_LIMIT, PHYSICAL_LIMIT, PhysicalRun, validate};
pub use reach::{Reach, Seen, reach};
pub use remove::{check_drop, drop_step};
pub use replace::{map_pack, replace};
pub use share::{Share, share, share_fits};
pub use survey::{Aim, Resident, survey, survey_difference, survey_drop};
pub use unreadable::find_unreadable;
pub use walk::{Lost, Visit, walk, walk_damaged};

use crate::{Error, ErrorKind, Result};
use backend::Block;
use std::fmt;
use std::ops::Range;

/// The most levels of a tree. Six levels of half-full nodes can map every logical block on its own. The other levels
/// are for trees with nearly empty nodes: shared nodes are not merged when entries are removed.
pub const LEVELS_MAX: usize = 16;

/// The most nodes that [`replace()`] allocates for each leaf that it touches, and for each [`EXTENT_BLOCKS_MAX`] blocks
/// that it maps there: a copy and a split on every level, and a new root.
pub const NODES_PER_STEP: usize = 2 * LEVELS_MAX + 1;

/// The page number of a node in the file of the map. 0 is a valid number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Where the blocks of an extent lie within a pack.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Packed {
    /// Index within the pack of the first logical block.
    pub index: u8,
    /// Length of the pack in physical blocks, 1 to 255.
    pub stored: u8,
}

/// An entry of a leaf: consecutive logical blocks mapped to consecutive physical blocks, or to consecutive blocks of a
/// pack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// First logical block.
    pub logical: u64,
    /// Physical block of the first logical one; with `packed`, the first block of the pack.
    pub physical: u64,
    /// Length, 1 to [`EXTENT_BLOCKS_MAX`] in a leaf.
    pub blocks: u64,
    /// Whether the blocks are allocated, but read as zeros.
    pub unwritten: bool,
    /// Set if the blocks are compressed. The entry then has a reference on every block of the pack, whichever part of
    /// the pack it maps.
    pub packed: Option<Packed>,
}

impl Mapping {
    /// The logical block after the last one.
    fn end(&self) -> u64 {
        self.logical + self.blocks
    }

    /// The part of the mapping in `[start, end)`. The mapping must overlap this range.
    pub(crate) fn clipped(self, start: u64, end: u64) -> Self {
        let first = self.logical.max(start);
        let last = self.end().min(end);
        let (mut physical, mut packed) = (self.physical, self.packed);
        match &mut packed {
            // The indexes of an entry end below 256.
            Some(packed) => packed.index = packed.index.saturating_add((first - self.logical) as u8),
            None => physical += first - self.logical,
        }
        Self { logical: first, physical, blocks: last - first, packed, ..self }
    }

    /// The physical blocks on which the entry has references.
    pub fn stored(&self) -> PhysicalRun {
        let blocks = self.packed.map_or(self.blocks, |packed| u64::from(packed.stored));
        PhysicalRun { physical: self.physical, blocks }
    }

    /// The logical blocks of the entry that are stored in these physical blocks: for a pack, all of them.
    pub fn logical_of(&self, physical: Range<u64>) -> Range<u64> {
        let stored = self.stored();
        let from = stored.physical.max(physical.start);
        let to = (stored.physical + stored.blocks).min(physical.end);
        if from >= to {
            return self.logical..self.logical;
        }
        match self.packed {
            Some(_) => self.logical..self.end(),
            None => self.logical + (from - self.physical)..self.logical + (to - self.physical),
        }
    }
}

/// The pages and reference counts that the tree code needs.
///
/// [`NodeStore::node`] returns only nodes that passed [`validate`] when they were loaded. The tree code never keeps a
/// borrowed page across another call, so an implementation may evict pages at any call.
pub trait NodeStore {
    /// The page of a node, verified (checksum, identity, [`validate`]) when it was loaded.
    fn node(&mut self, id: NodeId) -> Result<&Block>;

    /// The page of a node, to be changed. It becomes dirty.
    fn node_mut(&mut self, id: NodeId) -> Result<&mut Block>;

    /// A new page of zeros with one reference.
    fn allocate(&mut self) -> Result<NodeId>;

    /// Called when a tree has this many levels.
    fn note_height(&mut self, _levels: usize) {}

    /// Number of references on a node.
    fn references(&mut self, id: NodeId) -> Result<u32>;

    /// True if more than one tree may map the blocks below a node, in the current metadata or in the metadata that
    /// recovery would find. Used before data is overwritten in place.
    fn is_shared(&mut self, id: NodeId) -> Result<bool> {
        Ok(self.references(id)? > 1)
    }

    /// Adds a reference to a node.
    fn add_reference(&mut self, id: NodeId) -> Result<()>;

    /// Removes a reference from a node. Returns the number that remains; at 0 the page is free.
    fn drop_reference(&mut self, id: NodeId) -> Result<u32>;

    /// Adds a reference to each of `blocks` data blocks from `physical` on.
    fn add_data_references(&mut self, physical: u64, blocks: u64) -> Result<()>;

    /// Removes a reference from each of `blocks` data blocks from `physical` on. The store collects blocks that become
    /// free.
    fn drop_data_references(&mut self, physical: u64, blocks: u64) -> Result<()>;

    /// Fails if the references of data blocks cannot be read, or if a block has none although a leaf maps it. Changes
    /// nothing.
    fn check_data(&mut self, _physical: u64, _blocks: u64) -> Result<()> {
        Ok(())
    }
}

/// Makes an empty tree and returns its root. The caller owns the one reference on it.
pub fn create<S: NodeStore + ?Sized>(store: &mut S) -> Result<NodeId> {
    let id = store.allocate()?;
    page::initialise(store.node_mut(id)?, id, 0);
    Ok(id)
}

/// Levels of a tree.
pub fn levels<S: NodeStore + ?Sized>(store: &mut S, root: NodeId) -> Result<u64> {
    Ok(u64::from(page::level(store.node(root)?)) + 1)
}

/// The number of references on a node to which the tree refers, so that there must be one.
fn references<S: NodeStore + ?Sized>(store: &mut S, id: NodeId) -> Result<u32> {
    match store.references(id)? {
        0 => Err(corrupt(id, "the table counts no reference on it")),
        references => Ok(references),
    }
}

/// The error for a node that passes its checksum but is inconsistent in itself or with other nodes.
#[cold]
fn corrupt(id: NodeId, what: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("map node {id} is damaged ({what}); run a check of the datastore"))
}
