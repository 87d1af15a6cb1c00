//! The map of a disk: a copy-on-write B+tree from logical blocks to physical blocks.
//!
//! A tree is named by its root node only. A snapshot is one more reference on the root; a write copies ("shadows") the
//! shared nodes on its path and shares the others between both trees. The tree owns no memory and does no I/O: it
//! accesses pages, their allocation and all reference counts through [`NodeStore`], which the engine implements over
//! its page cache and the tests over plain memory.
//!
//! Invariants, which every function here keeps:
//!
//! 1. **References of nodes.** The count of a node = parent entries that name it + owners outside (heads, snapshots)
//!    that name it as a root.
//! 2. **References of data.** The count of a data block = leaf entries that map it + holders outside the trees. A leaf
//!    counts once however many trees share it, so an overwrite in place needs an unshared *path* as well as an unshared
//!    block ([`lookup_exclusive`]).
//! 3. **Only exclusive nodes change.** A node is modified only when its own count and that of every node above it, up
//!    to the root of the tree being changed, is 1.
//! 4. **Order.** Extents of a leaf ascend and do not overlap, keys of an internal node ascend, and everything below a
//!    child lies in `[key of the child, key of the next)`: no extent crosses the bound of its leaf. The first child has
//!    no key of its own (it is stored as 0); its lower bound is that of the node itself.
//! 5. **Level.** All leaves have level 0 and a child is exactly one level below its parent. Each descent checks that,
//!    so it ends whatever bytes it meets.
//! 6. **No empty nodes**, except a root that is a leaf. An unshared root with a single child is replaced by that
//!    child.
//! 7. **Determinism.** The same calls on the same tree make the same allocations in the same order and the same pages:
//!    the journal is replayed by executing them again. No hashing order, clock or randomness enters.
//!
//! Changes are not atomic in memory: when the store fails inside [`replace()`] or [`drop_step`] the pages may be half
//! changed, and the owner has to go back to its last checkpoint and journal. A lookup of the same range beforehand
//! finds nodes that cannot be read while nothing is changed yet; [`NODES_PER_STEP`] is the number of nodes to keep in
//! reserve.
//!
//! | file | what it holds |
//! |---|---|
//! | `page` | layout of a node: encode, decode, validate, search, edit in place |
//! | `path` | the path from a root to a leaf, and making it exclusive |
//! | `balance` | splitting full nodes, removing empty and merging small ones |
//! | `lookup`, `replace`, `remove`, `compare`, `walk` | the operations |
//! | `reach` | how many pages a `replace` would touch |
//! | `growth` | how many nodes a number of changes may need |
//! | `survey` | which pages an operation will need |

mod balance;
mod compare;
mod growth;
mod lookup;
pub mod page;
mod path;
mod reach;
mod remove;
mod replace;
mod survey;
mod walk;

#[cfg(test)]
mod tests;

pub use compare::{DiffExtent, diff};
pub use growth::{Forest, NODES_PER_TREE, nodes_needed};
pub use lookup::{Extent, first_mapped, lookup, lookup_exclusive};
pub use page::{EXTENT_BLOCKS_MAX, LOGICAL_LIMIT, PHYSICAL_LIMIT, validate};
pub use reach::{Reach, Seen, reach};
pub use remove::drop_step;
pub use replace::replace;
pub use survey::{Aim, Resident, survey, survey_difference, survey_drop};
pub use walk::{Lost, Visit, walk, walk_damaged};

use crate::{Error, ErrorKind, Result};
use backend::Block;
use std::fmt;

/// Levels of a tree, at most. Six levels of half-full nodes map every logical block by itself; the rest is for trees
/// whose entries were removed while their nodes were shared.
pub const LEVELS_MAX: usize = 16;

/// Nodes that [`replace()`] allocates at most for each leaf it touches, and for each [`EXTENT_BLOCKS_MAX`] blocks it
/// maps there: a shadow and a split on every level, and a new root.
pub const NODES_PER_STEP: usize = 2 * LEVELS_MAX + 1;

/// The number of a node's page in the space of map pages. 0 is an ordinary number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A part of a leaf: consecutive logical blocks on consecutive physical blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// First logical block.
    pub logical: u64,
    /// Physical block of the first logical one.
    pub physical: u64,
    /// Length, 1 to [`EXTENT_BLOCKS_MAX`] in a leaf.
    pub blocks: u64,
    /// Space is allocated, but reads as zeros.
    pub unwritten: bool,
}

impl Mapping {
    /// The logical block after the last one.
    fn end(&self) -> u64 {
        self.logical + self.blocks
    }

    /// The same mapping without what lies outside `[start, end)`, which must overlap it.
    fn clipped(self, start: u64, end: u64) -> Self {
        let first = self.logical.max(start);
        let last = self.end().min(end);
        Self { logical: first, physical: self.physical + (first - self.logical), blocks: last - first, ..self }
    }
}

/// Pages and reference counts, as the tree needs them.
///
/// Nodes returned by [`NodeStore::node`] have passed [`validate`] when they were loaded. Borrowed pages are never held
/// across another call, so an implementation may evict pages at any call.
pub trait NodeStore {
    /// The page of a node, verified (checksum, identity, [`validate`]) when it was loaded.
    fn node(&mut self, id: NodeId) -> Result<&Block>;

    /// The page of a node, to be changed: it is dirty from now on.
    fn node_mut(&mut self, id: NodeId) -> Result<&mut Block>;

    /// A new page of zeros with one reference.
    fn allocate(&mut self) -> Result<NodeId>;

    /// Notes that a tree has this many levels now.
    fn note_height(&mut self, _levels: usize) {}

    /// Number of references on a node.
    fn references(&mut self, id: NodeId) -> Result<u32>;

    /// True if what lies below a node may be mapped by more than one tree, now or in the metadata that recovery would
    /// find: used before data is overwritten in place.
    fn is_shared(&mut self, id: NodeId) -> Result<bool> {
        Ok(self.references(id)? > 1)
    }

    /// One more reference on a node.
    fn add_reference(&mut self, id: NodeId) -> Result<()>;

    /// Removes a reference from a node; returns the number that remains. At 0 the page is free.
    fn drop_reference(&mut self, id: NodeId) -> Result<u32>;

    /// One more reference on each of `blocks` data blocks from `physical`.
    fn add_data_references(&mut self, physical: u64, blocks: u64) -> Result<()>;

    /// Removes a reference from each of `blocks` data blocks from `physical`. The store collects those that become
    /// free.
    fn drop_data_references(&mut self, physical: u64, blocks: u64) -> Result<()>;
}

/// Makes an empty tree and returns its root, with one reference: the caller's.
pub fn create<S: NodeStore + ?Sized>(store: &mut S) -> Result<NodeId> {
    let id = store.allocate()?;
    page::initialise(store.node_mut(id)?, id, 0);
    Ok(id)
}

/// Levels of a tree.
pub fn levels<S: NodeStore + ?Sized>(store: &mut S, root: NodeId) -> Result<u64> {
    Ok(u64::from(page::level(store.node(root)?)) + 1)
}

/// The error for a node that contradicts its checksum-verified surroundings or itself.
#[cold]
fn corrupt(id: NodeId, what: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("map node {id} is damaged ({what}); run a check of the datastore"))
}
