//! How many nodes a number of changes may need: an upper limit that depends only on the number of trees, their height
//! and the number of existing nodes.
//!
//! A *change* maps or unmaps at least one block in one leaf: a step of [`super::replace()`]. On each level it touches
//! one node of its tree. A bound for any number of changes in any order:
//!
//! 1. **Copies.** A node is copied when it is shared. The copy belongs to its tree alone until a snapshot shares it
//!    again, so between two snapshots each node of a tree is copied once at most, and on each level a change copies
//!    one. At depth `d` a tree has no more than 254^`d` nodes; all trees together touch no more nodes than there are,
//!    once for each tree.
//! 2. **First splits.** A node that is nearly full before the changes is split by the first of them that adds an
//!    entry: once, and only if it is touched.
//! 3. **Other splits.** Both halves of a split have room for [`SPLIT_ROOM`] entries, so each further split follows
//!    that many insertions. A leaf behind an ascending stream is left full. Nothing can be appended to it any more, so
//!    it is split once more at most before it has such room: two splits for as many insertions. A change adds two
//!    entries at most, where it cuts an extent in two. Each split of a leaf is an insertion one level above, and so on
//!    upwards.
//! 4. **Growth.** The first node of a tree, and the roots that it gets.
//!
//! With several layers, which snapshots separate, a node that the changes of one layer have made may be copied for the
//! next one. Nodes that a change frees can be used at once; the limit does not rely on them.

use super::balance::SPLIT_ROOM;
use super::page::ENTRIES_MAX;

/// Nodes that a tree may need beyond those of copies and splits: its first one, and new roots.
pub const NODES_PER_TREE: u64 = 4;
/// Entries that a change adds at most.
const ENTRIES_PER_CHANGE: u64 = 2;
/// Splits that a full leaf may cost, see 3.
const SPLITS_OF_FULL: u64 = 2;
/// Levels that a tree may gain between two snapshots.
const LEVELS_GAINED: u64 = 2;

/// The trees that changes are made to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forest {
    /// Number of trees.
    pub trees: u64,
    /// Levels of the highest one.
    pub levels: u64,
    /// Layers of changes, separated by snapshots, of the tree with the most; at least one.
    pub layers: u64,
    /// Existing nodes, of these trees and all others.
    pub used: u64,
}

/// The most nodes that this many changes of these trees allocate.
pub fn nodes_needed(forest: &Forest, changes: u64) -> u64 {
    if changes == 0 {
        return 0;
    }
    let Forest { trees, levels, layers, used } = *forest;
    let room = SPLIT_ROOM as u64;
    let all = trees.saturating_mul(used);
    let widths = || (0..levels as u32).map(|depth| trees.saturating_mul((ENTRIES_MAX as u64).saturating_pow(depth)));
    let touched = widths().map(|width| changes.min(width)).sum::<u64>().min(all);
    // Of leaves, and of the nodes above them: a series with the ratio 1 / room.
    let leaves = (changes * ENTRIES_PER_CHANGE * SPLITS_OF_FULL).div_ceil(room);
    let above = (leaves + touched).div_ceil(room - 1);
    let splits = touched + leaves + above;
    let copies = if layers <= 1 {
        touched
    } else {
        let made = layers.saturating_mul(leaves + above);
        let copied = |width: u64| changes.min(width.saturating_mul(2 * layers).saturating_add(made));
        let copies = widths().map(copied).sum::<u64>() + LEVELS_GAINED * changes.min(made);
        copies.min(layers.saturating_mul(all.saturating_add(splits)))
    };
    copies + splits + NODES_PER_TREE * trees.min(changes)
}
