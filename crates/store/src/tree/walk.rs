//! Passes every node and extent of a tree to a visitor, for counting, checking and dumping.
//!
//! The walk also verifies what [`validate`](super::validate) cannot see on a single page: that children lie within the
//! bounds of their parents and one level below them.

use super::page::{self, LOGICAL_LIMIT};
use super::{LEVELS_MAX, Mapping, NodeId, NodeStore, corrupt};
use crate::{Error, Result};
use std::ops::Range;

/// An item of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Visit {
    /// A node, before it is read. The visitor returns whether to descend into it: a check of many trees descends into
    /// each shared node once.
    Node {
        /// Page number of the node.
        id: NodeId,
        /// Level of the node, 0 for a leaf.
        level: u8,
    },
    /// An extent of the leaf visited last. The result of the visitor is ignored.
    Extent(Mapping),
}

/// Called with a part of a tree that cannot be walked: its root, its logical blocks, and the error.
pub type Lost<'a> = dyn FnMut(NodeId, Range<u64>, Error) + 'a;

/// Visits the nodes of a tree, parents before their children, and the extents of each leaf, all in logical order.
pub fn walk<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    visit: &mut dyn FnMut(Visit) -> Result<bool>,
) -> Result<()> {
    let level = root_level(store, root)?;
    walk_node(store, root, level, 0..LOGICAL_LIMIT, visit, &mut None)
}

/// Like [`walk`], but continues after a damaged node, which is passed to `lost`. An error of the visitor still ends
/// the walk.
pub fn walk_damaged<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    visit: &mut dyn FnMut(Visit) -> Result<bool>,
    lost: &mut Lost<'_>,
) -> Result<()> {
    match root_level(store, root) {
        Ok(level) => walk_node(store, root, level, 0..LOGICAL_LIMIT, visit, &mut Some(lost)),
        Err(error) => {
            lost(root, 0..LOGICAL_LIMIT, error);
            Ok(())
        }
    }
}

fn root_level<S: NodeStore + ?Sized>(store: &mut S, root: NodeId) -> Result<u8> {
    match page::level(store.node(root)?) {
        level if usize::from(level) < LEVELS_MAX => Ok(level),
        _ => Err(corrupt(root, "a root of impossible level")),
    }
}

/// Recursive, with one call for each level of the tree, so at most [`LEVELS_MAX`] deep.
fn walk_node<S: NodeStore + ?Sized>(
    store: &mut S,
    id: NodeId,
    level: u8,
    bounds: Range<u64>,
    visit: &mut dyn FnMut(Visit) -> Result<bool>,
    lost: &mut Option<&mut Lost<'_>>,
) -> Result<()> {
    if !visit(Visit::Node { id, level })? {
        return Ok(());
    }
    if let Err(error) = validate_below(store, id, level, &bounds) {
        let Some(lost) = lost else { return Err(error) };
        lost(id, bounds, error);
        return Ok(());
    }
    let node = store.node(id)?;
    if level == 0 {
        for mapping in page::mappings_from(node, 0) {
            visit(Visit::Extent(mapping))?;
        }
        return Ok(());
    }
    for index in 0..page::count(node) {
        let Some(slot) = page::slot(store.node(id)?, index) else { break };
        let child = slot.lower.unwrap_or(bounds.start)..slot.upper.unwrap_or(bounds.end);
        walk_node(store, slot.child, level - 1, child, visit, lost)?;
    }
    Ok(())
}

/// Checks a node against its parent.
fn validate_below<S: NodeStore + ?Sized>(store: &mut S, id: NodeId, level: u8, bounds: &Range<u64>) -> Result<()> {
    let node = store.node(id)?;
    if page::level(node) != level {
        return Err(corrupt(id, format_args!("level {} instead of {level}", page::level(node))));
    }
    if level == 0 {
        let outside = |mapping: &Mapping| mapping.logical < bounds.start || mapping.end() > bounds.end;
        return match page::mappings_from(node, 0).any(|mapping| outside(&mapping)) {
            true => Err(corrupt(id, format_args!("an extent outside its bounds {bounds:?}"))),
            false => Ok(()),
        };
    }
    for index in 0..page::count(node) {
        let Some(slot) = page::slot(node, index) else { break };
        let child = slot.lower.unwrap_or(bounds.start)..slot.upper.unwrap_or(bounds.end);
        if child.is_empty() || child.start < bounds.start || child.end > bounds.end {
            return Err(corrupt(id, format_args!("the key of entry {index} lies outside its bounds {bounds:?}")));
        }
    }
    Ok(())
}
