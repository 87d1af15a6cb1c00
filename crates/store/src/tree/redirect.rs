//! Maps logical blocks to other physical blocks with the same content, in leaves that several trees may share.

use super::page::{self, ENTRIES_MAX, PhysicalRun, Redirect};
use super::path::Path;
use super::{LEVELS_MAX, NodeId, NodeStore, balance};
use crate::Result;
use backend::Block;
use std::ops::Range;

/// The most splits for one change: of the leaf, of every node above it, and a new root.
const SPLITS_MAX: usize = LEVELS_MAX + 2;

/// Changes the entries of a leaf in a range.
pub(super) type RedirectInLeaf<'a> = &'a dyn Fn(&mut Block, Range<u64>) -> Redirect;

/// Whether a leaf has room for the entries of a change.
pub(super) fn has_room<S: NodeStore + ?Sized>(
    store: &mut S,
    leaf: NodeId,
    range: Range<u64>,
    change: RedirectInLeaf<'_>,
) -> Result<bool> {
    let mut copy = *store.node(leaf)?;
    Ok(matches!(change(&mut copy, range), Redirect::Done { .. }))
}

/// Makes a change in the leaves of one tree in a range. Returns the new root.
pub(super) fn redirect<S: NodeStore + ?Sized>(
    store: &mut S,
    mut root: NodeId,
    range: Range<u64>,
    change: RedirectInLeaf<'_>,
) -> Result<NodeId> {
    let (mut position, end) = (range.start, range.end);
    let mut splits = 0;
    while position < end {
        let mut path = Path::to_leaf(store, root, position)?;
        let stop = end.min(path.upper);
        let leaf = path.last();
        let mut copy = *store.node(leaf)?;
        let before = page::count(&copy);
        match change(&mut copy, position..stop) {
            // A leaf that is less than half full would not become fuller by a split: its entries stay as they are.
            Redirect::Full if splits < SPLITS_MAX && before > ENTRIES_MAX / 2 => {
                splits += 1;
                path.make_exclusive(store, &mut root)?;
                balance::make_room(store, &mut root, &path, position)?;
                continue;
            }
            Redirect::Full => {}
            Redirect::Done { added, removed } => {
                debug_assert!(page::count(&copy) <= ENTRIES_MAX);
                if !added.is_empty() {
                    *store.node_mut(leaf)? = copy;
                }
                count_references(store, &added, &removed)?;
            }
        }
        position = stop;
    }
    Ok(root)
}

/// Counts the references that a changed leaf has in addition, and those that it has not any more.
pub(super) fn count_references<S: NodeStore + ?Sized>(
    store: &mut S,
    added: &[PhysicalRun],
    removed: &[PhysicalRun],
) -> Result<()> {
    added.iter().try_for_each(|run| store.add_data_references(run.physical, run.blocks))?;
    removed.iter().try_for_each(|run| store.drop_data_references(run.physical, run.blocks))
}
