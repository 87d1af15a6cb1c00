//! The path from a root to the node that an operation changes, and the code that makes it exclusive.
//!
//! Finding a path changes nothing: every node on it is loaded, and damage is reported, before the operation changes a
//! page. It is valid until the shape of the tree changes. After a split or a merge the operation starts again from the
//! root.

use super::page::{self, LOGICAL_LIMIT};
use super::{LEVELS_MAX, NodeId, NodeStore, corrupt};
use crate::Result;
use std::ops::Range;

/// A node on a path.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub id: NodeId,
    /// Index of the child on the path; undefined in the last step.
    pub index: usize,
}

/// A path: nodes from the root (depth 0) to the last one.
pub(super) struct Path {
    pub steps: [Step; LEVELS_MAX],
    /// Depth of the last node.
    pub depth: usize,
    /// Upper bound of the blocks below the last node, or below its children `covered`.
    pub upper: u64,
    /// Children of the last node that lie completely within the range; empty if the last node is a leaf.
    pub covered: Range<usize>,
    /// Depth of the first node with more than one reference. This node and all after it must be copied.
    shared_from: Option<usize>,
}

impl Path {
    /// The path to the leaf for `position`.
    pub fn to_leaf<S: NodeStore + ?Sized>(store: &mut S, root: NodeId, position: u64) -> Result<Self> {
        Self::to_covered(store, root, position, position..position)
    }

    /// The path towards `position`. It ends early at a node that has children completely inside `range`.
    pub fn to_covered<S: NodeStore + ?Sized>(
        store: &mut S,
        root: NodeId,
        position: u64,
        range: Range<u64>,
    ) -> Result<Self> {
        let mut path = Self {
            steps: [Step { id: root, index: 0 }; LEVELS_MAX],
            depth: 0,
            upper: LOGICAL_LIMIT,
            covered: 0..0,
            shared_from: None,
        };
        let mut lower = 0;
        let mut level_above = None;
        loop {
            let id = path.steps[path.depth].id;
            if path.shared_from.is_none() && store.references(id)? > 1 {
                path.shared_from = Some(path.depth);
            }
            let node = store.node(id)?;
            let level = page::level(node);
            if level_above.is_some_and(|above: u8| level != above - 1) || path.depth + usize::from(level) >= LEVELS_MAX
            {
                return Err(corrupt(id, format_args!("level {level} at depth {}", path.depth)));
            }
            if level == 0 {
                return Ok(path);
            }
            let slot = page::slot_for(node, position).ok_or_else(|| corrupt(id, "no children"))?;
            path.steps[path.depth].index = slot.index;
            lower = slot.lower.unwrap_or(lower);
            if range.start <= lower && slot.upper.unwrap_or(path.upper) <= range.end {
                let mut end = slot.index;
                let mut covered_to = lower;
                while let Some(slot) = page::slot(node, end) {
                    let upper = slot.upper.unwrap_or(path.upper);
                    if upper > range.end {
                        break;
                    }
                    covered_to = upper;
                    end += 1;
                }
                path.covered = slot.index..end;
                path.upper = covered_to;
                return Ok(path);
            }
            path.upper = slot.upper.unwrap_or(path.upper);
            level_above = Some(level);
            path.depth += 1;
            path.steps[path.depth] = Step { id: slot.child, index: 0 };
        }
    }

    /// Whether a node of the path has more than one reference.
    pub fn is_shared(&self) -> bool {
        self.shared_from.is_some()
    }

    /// The last node of the path.
    pub fn last(&self) -> NodeId {
        self.steps[self.depth].id
    }

    /// Copies the shared nodes of the path, so that only this tree refers to its nodes.
    pub fn make_exclusive<S: NodeStore + ?Sized>(&mut self, store: &mut S, root: &mut NodeId) -> Result<()> {
        let Some(shared_from) = self.shared_from.take() else { return Ok(()) };
        for depth in shared_from..=self.depth {
            let shared = self.steps[depth].id;
            let copy = shadow(store, shared)?;
            match depth.checked_sub(1) {
                Some(above) => {
                    let Step { id, index } = self.steps[above];
                    page::set_child(store.node_mut(id)?, index, copy);
                }
                None => *root = copy,
            }
            store.drop_reference(shared)?;
            self.steps[depth].id = copy;
        }
        Ok(())
    }
}

/// A copy of a node, with its own references on all children or data blocks.
///
/// A child gains a reference here, so the node below a copied one is shared, and is copied next.
fn shadow<S: NodeStore + ?Sized>(store: &mut S, id: NodeId) -> Result<NodeId> {
    let mut node = *store.node(id)?;
    let copy = store.allocate()?;
    if page::level(&node) == 0 {
        for run in page::data_runs(&node) {
            store.add_data_references(run.physical, run.blocks)?;
        }
    } else {
        for child in page::children(&node) {
            store.add_reference(child)?;
        }
    }
    page::set_id(&mut node, copy);
    *store.node_mut(copy)? = node;
    Ok(copy)
}
