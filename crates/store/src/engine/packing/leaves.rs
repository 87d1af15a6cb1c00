//! The leaves that a pack or a share would change.

use crate::Result;
use crate::engine::metadata::{LEAVES_PER_TREE_MAX, PACK_SPLITS_MAX};
use crate::journal::PACK_OBJECTS_MAX;
use crate::tree::{Leaf, NodeId};
use rustc_hash::FxHashMap;

/// The leaves that an operation would change, and an object for each of them, which the operation names.
#[derive(Default)]
pub(in crate::engine) struct PlannedLeaves {
    /// Whether each leaf is shared by several trees.
    leaves: FxHashMap<NodeId, bool>,
    objects: Vec<u64>,
}

impl PlannedLeaves {
    /// Whether a leaf was found in another tree.
    pub fn contains(&self, id: NodeId) -> bool {
        self.leaves.contains_key(&id)
    }

    /// Adds a leaf of the tree of an object. The trees are searched one after the other.
    pub fn add(&mut self, object: u64, leaf: &Leaf) {
        self.leaves.insert(leaf.id, leaf.shared);
        if self.objects.last() != Some(&object) {
            self.objects.push(object);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// Whether a leaf is shared by several trees.
    pub fn any_shared(&self) -> bool {
        self.leaves.values().any(|shared| *shared)
    }

    /// Whether one operation can change all leaves.
    pub fn are_few(&self) -> bool {
        // The cost of the operation counts this many leaves of each tree.
        self.objects.len() <= PACK_OBJECTS_MAX && self.leaves.len() <= LEAVES_PER_TREE_MAX * self.objects.len()
    }

    /// Whether the entries fit: an operation may split a few leaves, but no shared one.
    pub fn have_room(&self, mut fits: impl FnMut(NodeId) -> Result<bool>) -> Result<bool> {
        let mut splits = 0;
        for (leaf, shared) in &self.leaves {
            if !fits(*leaf)? {
                splits += 1;
                if *shared || splits > PACK_SPLITS_MAX {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The objects that the operation names.
    pub fn into_objects(self) -> Vec<u64> {
        self.objects
    }
}
