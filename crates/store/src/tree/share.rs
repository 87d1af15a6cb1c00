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

use super::page::{self, ENTRIES_MAX, Redirect};
use super::path::Path;
use super::{LEVELS_MAX, NodeId, NodeStore, balance, pack};
use crate::Result;
use std::ops::Range;

/// The most splits for one change: of the leaf, of every node above it, and a new root.
const SPLITS_MAX: usize = LEVELS_MAX + 2;

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
    fn rewrite(&self, page: &mut backend::Block, range: Range<u64>) -> Redirect {
        page::share_in_leaf(page, range, &|logical, physical| {
            let within = logical.checked_sub(self.logical).filter(|within| *within < self.blocks)?;
            (self.from + within == physical).then_some(self.to + within)
        })
    }
}

/// Whether a leaf has room for the entries of a change.
pub fn share_fits<S: NodeStore + ?Sized>(store: &mut S, leaf: NodeId, share: &Share) -> Result<bool> {
    let mut copy = *store.node(leaf)?;
    let range = share.logical..share.logical + share.blocks;
    Ok(matches!(share.rewrite(&mut copy, range), Redirect::Done { .. }))
}

/// Maps the blocks of `share` in a range, which lies within it, to the other blocks, in the leaves of one tree. Returns
/// the new root.
pub fn share<S: NodeStore + ?Sized>(
    store: &mut S,
    mut root: NodeId,
    range: Range<u64>,
    share: &Share,
) -> Result<NodeId> {
    let (mut position, end) = (range.start, range.end);
    let mut splits = 0;
    while position < end {
        let mut path = Path::to_leaf(store, root, position)?;
        let stop = end.min(path.upper);
        let leaf = path.last();
        let mut copy = *store.node(leaf)?;
        let before = page::count(&copy);
        match share.rewrite(&mut copy, position..stop) {
            // A leaf that is less than half full would not become fuller by a split: its entries stay as they are.
            Redirect::Full if splits < SPLITS_MAX && before > ENTRIES_MAX / 2 => {
                splits += 1;
                path.make_exclusive(store, &mut root)?;
                balance::make_room(store, &mut root, &path, position)?;
                continue;
            }
            Redirect::Full => {}
            Redirect::Done { added, removed } => {
                if !added.is_empty() {
                    *store.node_mut(leaf)? = copy;
                }
                pack::count_references(store, &added, &removed)?;
            }
        }
        position = stop;
    }
    Ok(root)
}
