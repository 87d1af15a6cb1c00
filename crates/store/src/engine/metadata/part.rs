//! Walks over the map of a disk or snapshot in parts of leaves, so that the lock is held for a short time.

use super::{Effects, Meta};
use crate::Result;
use crate::tree::{self, Leaf, NodeId};
use std::ops::Range;

/// Logical blocks of one step of a walk.
pub const PART_BLOCKS: u64 = if cfg!(test) { 16 } else { 1024 };

/// A part of a leaf, and its number within the object, which is the same in each tree that shares the leaf.
pub type PartOfLeaf = (NodeId, u64);

/// The block after the part of `range` that its first block belongs to.
pub fn end_of_part(range: &Range<u64>) -> u64 {
    (range.start - range.start % PART_BLOCKS + PART_BLOCKS).min(range.end)
}

/// A step of a walk.
pub struct LeafPart {
    pub leaf: Leaf,
    /// The logical block with which the next step begins.
    pub next: u64,
    number: u64,
}

impl LeafPart {
    /// The part, if several trees share the leaf.
    pub fn shared(&self) -> Option<PartOfLeaf> {
        self.leaf.shared.then_some((self.leaf.id, self.number))
    }
}

impl Meta {
    /// The part of a leaf with the first mapped block of a range of an object. `None` if nothing is mapped there, or if
    /// the object was deleted.
    pub(in crate::engine) fn next_part(&mut self, object: u64, range: Range<u64>) -> Result<Option<LeafPart>> {
        let Some(root) = self.catalog.whole(object).ok().and_then(|object| object.root) else { return Ok(None) };
        let mut effects = Effects::default();
        let mut nodes = self.nodes(&mut effects);
        let Some(first) = tree::first_mapped(&mut nodes, root, range.clone())? else { return Ok(None) };
        let stop = end_of_part(&(first..range.end));
        let leaf = tree::leaf_of(&mut nodes, root, first..stop)?;
        let next = leaf.upper.min(stop);
        Ok(Some(LeafPart { leaf, next, number: first / PART_BLOCKS }))
    }
}
