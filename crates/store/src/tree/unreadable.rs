//! Finds the parts of a range of a tree that cannot be changed, because nodes on their path cannot be read.

use super::page::{self, LOGICAL_LIMIT};
use super::{Mapping, NodeId, NodeStore, corrupt};
use crate::{Error, Result};
use std::ops::Range;

/// Passes the parts of `range` to `lost` for which a node, or its reference count, cannot be read, with the error. A
/// part ends where the node does, which may be behind the range.
/// Appends the mappings of the other parts, cut to the range. Each lost node is read once for the whole part below it,
/// because the medium may take seconds to fail a read.
pub fn find_unreadable<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    mappings: &mut Vec<Mapping>,
    lost: &mut dyn FnMut(Range<u64>, Error),
) {
    let end = range.end.min(LOGICAL_LIMIT);
    let mut at = range.start;
    while at < end {
        let mut upper = LOGICAL_LIMIT;
        let leaf = leaf_at(store, root, at, &mut upper);
        let stop = end.min(upper);
        let read = leaf.and_then(|leaf| {
            let within = page::mappings_from(store.node(leaf)?, at).take_while(|mapping| mapping.logical < stop);
            mappings.extend(within.map(|mapping| mapping.clipped(at, stop)));
            Ok(())
        });
        if let Err(error) = read {
            lost(at..upper, error);
        }
        // Keys to the right of the path are greater than the position.
        at = upper;
    }
}

/// Descends to the leaf of a block. `upper` becomes the end of the range below the last node on the path, also after an
/// error.
fn leaf_at<S: NodeStore + ?Sized>(store: &mut S, root: NodeId, position: u64, upper: &mut u64) -> Result<NodeId> {
    let (mut id, mut level_above) = (root, None);
    loop {
        store.references(id)?;
        let node = store.node(id)?;
        let level = page::level(node);
        if level_above.is_some_and(|above: u8| level != above - 1) {
            return Err(corrupt(id, format_args!("level {level} is not one below its parent")));
        }
        if level == 0 {
            return Ok(id);
        }
        let slot = page::slot_for(node, position).ok_or_else(|| corrupt(id, "no children"))?;
        *upper = slot.upper.unwrap_or(*upper);
        level_above = Some(level);
        id = slot.child;
    }
}
