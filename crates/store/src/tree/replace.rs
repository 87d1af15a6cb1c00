//! Changes the map: unmaps a range and, usually, maps it to new blocks.
//!
//! The range is processed from the left in steps. A step finds a path, makes it exclusive, and edits one leaf, or
//! removes whole subtrees from one internal node. Then it balances the nodes on the path. The common case is to map one
//! block of an exclusive tree to another physical block: one descent and one overwritten entry.
//!
//! References on data blocks are dropped after the entry is removed. A failure between these two steps leaks a block,
//! but never frees a block that is still mapped.

use super::page::{self, EXTENT_BLOCKS_MAX, Edit, LOGICAL_LIMIT, PHYSICAL_LIMIT, PhysicalRun};
use super::path::Path;
use super::{Mapping, NodeId, NodeStore, Packed, balance, lookup, redirect, remove};
use crate::{Error, ErrorKind, Result};
use std::ops::Range;

/// Unmaps `range`, and then maps it to consecutive physical blocks from `with.0` on, unwritten if `with.1`. Returns the
/// new root, which replaces the given one: the caller's reference has moved to it.
///
/// Each data block loses the reference of a removed entry. The reference of the new entry must already be counted. So
/// to keep blocks and change only their flag, the caller adds a reference to them first and passes them as new blocks.
///
/// Unmapping an unmapped range changes nothing. Unmapping a long range drops whole subtrees. A shared subtree loses one
/// reference, but an exclusive one is dropped node by node, so the caller limits the range to limit the time.
pub fn replace<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    with: Option<(u64, bool)>,
) -> Result<NodeId> {
    if range.is_empty() {
        return Ok(root);
    }
    if range.end > LOGICAL_LIMIT {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("blocks {} to {} lie past the largest disk of {LOGICAL_LIMIT} blocks", range.start, range.end - 1),
        ));
    }
    let Some((physical, unwritten)) = with else { return unmap(store, root, range) };
    if physical >= PHYSICAL_LIMIT || PHYSICAL_LIMIT - physical < range.end - range.start {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("a run from physical block {physical} passes the end of the address space"),
        ));
    }
    let mapping = Mapping { logical: range.start, physical, blocks: range.end - range.start, unwritten, packed: None };
    map(store, root, mapping)
}

/// Unmaps `range`, and then maps it to the blocks of a pack, of which the first one has the index `first`. Each new
/// entry gets a reference on every block of the pack, unless it continues an entry beside the range. The pack has a
/// reference already, and is not freed if the blocks that are replaced are other parts of it. Returns the new root, as
/// [`replace`] does.
pub fn map_pack<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    pack: PhysicalRun,
    first: u8,
) -> Result<NodeId> {
    let blocks = range.end - range.start;
    let fits = range.end <= LOGICAL_LIMIT && u64::from(first) + blocks <= EXTENT_BLOCKS_MAX;
    let Some(stored) = u8::try_from(pack.blocks).ok().filter(|stored| *stored > 0 && fits) else {
        let text = format!("blocks {} to {} cannot be in one pack", range.start, range.end.saturating_sub(1));
        return Err(Error::new(ErrorKind::Invalid, text));
    };
    let packed = Some(Packed { index: first, stored });
    map(store, root, Mapping { logical: range.start, physical: pack.physical, blocks, unwritten: false, packed })
}

/// Maps the range of a mapping of any length as the mapping says.
fn map<S: NodeStore + ?Sized>(store: &mut S, mut root: NodeId, mapping: Mapping) -> Result<NodeId> {
    let mut position = mapping.logical;
    while position < mapping.end() {
        let mut path = Path::to_leaf(store, root, position)?;
        path.make_exclusive(store, &mut root)?;
        let stop = mapping.end().min(path.upper).min(position + EXTENT_BLOCKS_MAX);
        let piece = mapping.clipped(position, stop);
        if edit_leaf(store, &mut root, &path, position..stop, Some(piece))? {
            position = stop;
        }
    }
    Ok(root)
}

fn unmap<S: NodeStore + ?Sized>(store: &mut S, mut root: NodeId, range: Range<u64>) -> Result<NodeId> {
    let mut position = range.start;
    // The lookup prevents that a discard of unmapped blocks copies shared nodes.
    while let Some(mapped) = lookup::first_mapped(store, root, position..range.end)? {
        let mut path = Path::to_covered(store, root, mapped, range.clone())?;
        path.make_exclusive(store, &mut root)?;
        if path.covered.is_empty() {
            let stop = range.end.min(path.upper);
            if !edit_leaf(store, &mut root, &path, mapped..stop, None)? {
                continue;
            }
            position = stop;
        } else {
            cut_children(store, &mut root, &path)?;
            position = path.upper;
        }
    }
    Ok(root)
}

/// Replaces `range` in the leaf at the end of an exclusive path. False if the leaf had no room: the tree was split, and
/// the step has to start again.
fn edit_leaf<S: NodeStore + ?Sized>(
    store: &mut S,
    root: &mut NodeId,
    path: &Path,
    range: Range<u64>,
    with: Option<Mapping>,
) -> Result<bool> {
    let position = range.start;
    let (mut added, mut removed) = (Vec::new(), Vec::new());
    match page::replace_in_leaf(store.node_mut(path.last())?, range, with, &mut added, &mut removed) {
        Edit::Full => {
            balance::make_room(store, root, path, position)?;
            return Ok(false);
        }
        Edit::Done { shrank } => {
            if shrank {
                balance::settle(store, root, path, path.depth)?;
            }
        }
    }
    // New references first: the entries may map parts of one pack.
    redirect::count_references(store, &added, &removed)?;
    Ok(true)
}

/// Drops the subtrees that `path.covered` names.
fn cut_children<S: NodeStore + ?Sized>(store: &mut S, root: &mut NodeId, path: &Path) -> Result<()> {
    let node = store.node_mut(path.last())?;
    let children: Vec<NodeId> = page::children(node).skip(path.covered.start).take(path.covered.len()).collect();
    let level = page::level(node);
    page::remove_children(node, path.covered.clone());
    balance::settle(store, root, path, path.depth)?;
    for child in children {
        remove::drop_subtree(store, child, level - 1)?;
    }
    Ok(())
}
