//! Balancing: keeps nodes neither too full nor too empty.
//!
//! Splitting and merging both work on an exclusive path (invariant 3) and change one level of it at a time:
//!
//! - [`make_room`] does one split, at the highest node that has to be split, and the operation starts again. Full paths
//!   are so rare (one leaf in 127, and one in 127 of the nodes above) that a second descent is cheaper than code that
//!   carries a split upwards. For a sequential stream, the split leaves a full node, and after it a node that the
//!   stream fills.
//! - [`settle`] goes up from a node that lost entries. An empty node is removed. A node that is at most half full is
//!   merged with a neighbour if both fit in [`MERGED_ENTRIES`]: a quarter of the page then stays free, so that the next
//!   insertion does not split it again. Shared neighbours are not merged, because merging would copy them.

use super::page::{self, ENTRIES_MAX, EXTENT_BLOCKS_MAX};
use super::path::{Path, Step};
use super::{LEVELS_MAX, NodeId, NodeStore, corrupt};
use crate::{Error, ErrorKind, Result, is_lost};
use backend::Block;

/// The most entries of a node that results from a merge.
pub(super) const MERGED_ENTRIES: usize = ENTRIES_MAX * 3 / 4;

/// Each half of a split has room for this many entries before it is split again: [`crate::tree::nodes_needed`] relies
/// on that. The exception is a leaf that an ascending stream leaves full.
pub(super) const SPLIT_ROOM: usize = 16;

/// A node with more entries than this is never merged. Most nodes have more, so their neighbours need not be read.
const SMALL_ENTRIES: usize = ENTRIES_MAX / 2;

/// Splits one node of the path, or adds a root, as a step towards room for an extent at `position` in the full leaf at
/// its end. The path is invalid afterwards.
pub(super) fn make_room<S: NodeStore + ?Sized>(
    store: &mut S,
    root: &mut NodeId,
    path: &Path,
    position: u64,
) -> Result<()> {
    for depth in (1..=path.depth).rev() {
        if page::count(store.node(path.steps[depth - 1].id)?) < ENTRIES_MAX {
            return split(store, path, depth, position);
        }
    }
    grow(store, root)
}

/// Adds a level: the old root becomes the only child of a new root.
fn grow<S: NodeStore + ?Sized>(store: &mut S, root: &mut NodeId) -> Result<()> {
    let level = page::level(store.node(*root)?) + 1;
    if usize::from(level) >= LEVELS_MAX {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("the map under node {root} has {LEVELS_MAX} levels and cannot grow: copy the disk in full"),
        ));
    }
    let top = store.allocate()?;
    store.note_height(usize::from(level) + 1);
    let node = store.node_mut(top)?;
    page::initialise(node, top, level);
    page::insert_child(node, 0, 0, *root);
    *root = top;
    Ok(())
}

/// Splits the full node at `depth`. Its parent has room.
fn split<S: NodeStore + ?Sized>(store: &mut S, path: &Path, depth: usize, position: u64) -> Result<()> {
    let Step { id, index } = path.steps[depth];
    let mut left = *store.node(id)?;
    let (level, count) = (page::level(&left), page::count(&left));
    let at = match level {
        0 => leaf_split(&left, position),
        // For an append, the right node gets the child that is about to be split and a few others.
        _ if index + 1 == count => count - SPLIT_ROOM,
        _ => count / 2,
    };
    let right_id = store.allocate()?;
    let right = store.node_mut(right_id)?;
    page::initialise(right, right_id, level);
    let first = page::move_tail(&mut left, at, right);
    // The bounds of the right leaf begin after the last extent of the left leaf, so nothing is appended to the left
    // leaf any more.
    let key = match page::mapping(&left, count - 1) {
        Some(last) if at == count => last.end(),
        _ => first,
    };
    *store.node_mut(id)? = left;
    let parent = path.steps[depth - 1];
    page::insert_child(store.node_mut(parent.id)?, parent.index + 1, key, right_id);
    Ok(())
}

/// Where to split a full leaf that has no room at `position`: in the middle, or, if the write seems to belong to a
/// sequential stream, just before the extent that follows. The stream then fills the left leaf, or, if no extent
/// follows, an empty right leaf.
fn leaf_split(leaf: &Block, position: u64) -> usize {
    let index = page::first_ending_after(leaf, position);
    let Some(next) = page::mapping(leaf, index) else { return page::count(leaf) };
    let before = index.checked_sub(1).and_then(|before| page::mapping(leaf, before));
    let continues = before.is_some_and(|before| before.end() == position);
    // The next extent must lie at a distance. Otherwise each write into a gap of a randomly filled leaf would be taken
    // for a stream.
    let has_space_ahead = next.logical.saturating_sub(position) > EXTENT_BLOCKS_MAX;
    let count = page::count(leaf);
    if continues && has_space_ahead { index.clamp(SPLIT_ROOM, count - SPLIT_ROOM) } else { count / 2 }
}

/// Restores invariant 6 after the node at `depth` lost entries, and merges small nodes. The path is invalid afterwards.
pub(super) fn settle<S: NodeStore + ?Sized>(
    store: &mut S,
    root: &mut NodeId,
    path: &Path,
    mut depth: usize,
) -> Result<()> {
    while depth > 0 {
        let node = path.steps[depth].id;
        let parent = path.steps[depth - 1];
        let count = page::count(store.node(node)?);
        if count == 0 {
            page::remove_children(store.node_mut(parent.id)?, parent.index..parent.index + 1);
            store.drop_reference(node)?;
        } else if count > SMALL_ENTRIES || !merge_with_neighbour(store, parent, count)? {
            return Ok(());
        }
        depth -= 1;
    }
    settle_root(store, root)
}

/// Merges child `parent.index`, which has `count` entries, with the child before or after it. False if neither can be
/// merged.
fn merge_with_neighbour<S: NodeStore + ?Sized>(store: &mut S, parent: Step, count: usize) -> Result<bool> {
    for (left, right) in [(parent.index.wrapping_sub(1), parent.index), (parent.index, parent.index + 1)] {
        let node = store.node(parent.id)?;
        let (Some(left), Some(right)) = (page::slot(node, left), page::slot(node, right)) else { continue };
        let neighbour = if left.index == parent.index { right.child } else { left.child };
        if !is_true_and_readable(can_merge(store, neighbour, count))? {
            continue;
        }
        let key = right.lower.ok_or_else(|| corrupt(parent.id, "a right neighbour without a key"))?;
        let tail = *store.node(right.child)?;
        page::append(store.node_mut(left.child)?, &tail, key);
        page::remove_children(store.node_mut(parent.id)?, right.index..right.index + 1);
        store.drop_reference(right.child)?;
        return Ok(true);
    }
    Ok(false)
}

/// What was found out about a node, or false if the node cannot be read: it then stays as it is.
fn is_true_and_readable(found: Result<bool>) -> Result<bool> {
    match found {
        Err(error) if is_lost(&error) => Ok(false),
        other => other,
    }
}

/// Whether a node can be merged with one of `count` entries beside it.
fn can_merge<S: NodeStore + ?Sized>(store: &mut S, node: NodeId, count: usize) -> Result<bool> {
    // The reference count is read first, because it may exclude a merge without reading the page.
    Ok(store.references(node)? <= 1 && page::count(store.node(node)?) + count <= MERGED_ENTRIES)
}

/// A root without children becomes an empty leaf; a root with one child is replaced by the child, shared or not.
fn settle_root<S: NodeStore + ?Sized>(store: &mut S, root: &mut NodeId) -> Result<()> {
    loop {
        let node = store.node(*root)?;
        if page::level(node) == 0 || page::count(node) > 1 {
            return Ok(());
        }
        let Some(only) = page::slot(node, 0) else {
            page::initialise(store.node_mut(*root)?, *root, 0);
            return Ok(());
        };
        // A shared node can occur only after the first iteration, because the old root was exclusive. A shared node is
        // kept as the root.
        let old = *root;
        if store.references(old)? > 1 || !is_true_and_readable(store.node(only.child).map(|_| true))? {
            return Ok(());
        }
        *root = only.child;
        store.drop_reference(old)?;
    }
}
