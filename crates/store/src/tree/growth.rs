//! Computes how many nodes a number of changes may allocate: an upper limit that depends only on the number of trees,
//! their height and the number of existing nodes.
//!
//! A *change* maps or unmaps at least one block in one leaf: it is a step of [`super::replace()`]. On each level it
//! touches one node of its tree. The limit holds for any number of changes in any order:
//!
//! 1. **Copies.** A node is copied when it is shared. The copy belongs to one tree until a snapshot shares it again. So
//!    between two snapshots each node of a tree is copied at most once, and a change copies at most one on each level.
//!    At depth `d` a tree has at most 254^`d` nodes. Nodes that trees share are copied at most once for each tree.
//! 2. **First splits.** A node that is nearly full before the changes is split by the first change that adds an entry
//!    to it. This happens once, and only if the node is touched.
//! 3. **Other splits.** Both halves of a split have room for [`SPLIT_ROOM`] entries, so each further split needs that
//!    many insertions. The exception is a leaf that an ascending stream has filled. Nothing can be appended to it, so
//!    it is split at most once more before its halves have such room. Therefore two splits are counted for this number
//!    of insertions. A change adds at most two entries: this happens when it cuts an extent in two. Each split of a
//!    leaf is an insertion one level above, and so on upwards.
//! 4. **Growth.** The first node of a tree, and the roots that it gains.
//!
//! If snapshots separate the changes into several layers, a node that the changes of one layer have made may be copied
//! for the next layer. Nodes that a change frees can be reused at once, but the limit does not rely on this reuse.
//!
//! Packs and shares are not counted, although the entries that they add use up the room of a half in 3. That is correct
//! because the limit holds from any state of the trees, however full their nodes are. A pack or a share is carried out
//! only if, under the same lock, the free nodes suffice for itself and for all counted changes that are left
//! ([`super::pack()`], [`super::share()`]). Afterwards the limit holds for these changes from the new state.

use super::balance::SPLIT_ROOM;
use super::page::ENTRIES_MAX;

/// Nodes that a tree may need in addition to copies and splits: its first one, and new roots.
pub const NODES_PER_TREE: u64 = 4;
/// The most entries that a change adds.
const ENTRIES_PER_CHANGE: u64 = 2;
/// Splits that a full leaf may cost, see 3.
const SPLITS_OF_FULL: u64 = 2;
/// Levels that a tree may gain between two snapshots.
const LEVELS_GAINED: u64 = 2;

/// The trees that are changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forest {
    /// Number of trees.
    pub trees: u64,
    /// Levels of the highest tree.
    pub levels: u64,
    /// The most layers into which snapshots divide the changes of one tree; at least one.
    pub layers: u64,
    /// Existing nodes of all trees, including those that are not changed.
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
    // Splits of leaves, and of the nodes above: a geometric series with the ratio 1 / room.
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
