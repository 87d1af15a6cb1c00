//! Maps blocks to other blocks that have the same content.
//!
//! Like [`super::pack()`], this change keeps the content of every tree, so shared leaves are changed in place, for all
//! trees that share them. The caller names a tree for each leaf that is to be changed. The old blocks lose a reference
//! for each changed entry, and become free if no other entry maps them.
//!
//! What must hold:
//!
//! 1. Only entries that map exactly the given logical blocks to the given physical blocks change. An entry that differs
//!    stays, so a tree that was divided into other leaves, or was changed already, is no error.
//! 2. Each changed entry has a reference on each block that it maps. The new references are added before the old ones
//!    are dropped.
//! 3. Small leaves are not merged: the next write to such a leaf does that.
//! 4. A plan has no shared leaf without room ([`share_fits`]). If replay finds one, the leaf is copied for this tree,
//!    and the copy is split, for the same reason as in [`super::pack()`].

use super::page::{self, Redirect};
use super::{NodeId, NodeStore, redirect};
use crate::Result;
use backend::Block;
use std::ops::Range;

/// Consecutive logical blocks that are mapped to other physical blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// First logical block.
    pub logical: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// First block to which the logical blocks are mapped before.
    pub from: u64,
    /// First block to which they are mapped afterwards.
    pub to: u64,
}

impl Share {
    /// Rewrites the part of a leaf in a range.
    fn rewrite(&self, page: &mut Block, range: Range<u64>) -> Redirect {
        page::share_in_leaf(page, range, &|logical, physical| {
            let within = logical.checked_sub(self.logical).filter(|within| *within < self.blocks)?;
            (self.from + within == physical).then_some(self.to + within)
        })
    }
}

/// Whether a leaf has room for the entries of a change.
pub fn share_fits<S: NodeStore + ?Sized>(store: &mut S, leaf: NodeId, share: &Share) -> Result<bool> {
    let range = share.logical..share.logical + share.blocks;
    redirect::has_room(store, leaf, range, &|page, range| share.rewrite(page, range))
}

/// Maps the blocks of `share` in a range, which lies within it, to the other blocks, in the leaves of one tree. Returns
/// the new root.
pub fn share<S: NodeStore + ?Sized>(store: &mut S, root: NodeId, range: Range<u64>, share: &Share) -> Result<NodeId> {
    redirect::redirect(store, root, range, &|page, range| share.rewrite(page, range))
}
