//! Finds the parts of a range of a tree that cannot be changed, because nodes on their path cannot be read.

use super::page::{self, LOGICAL_LIMIT};
use super::{Mapping, NodeId, NodeStore, corrupt};
use crate::{Error, Result};
use std::ops::Range;

/// Passes the parts of `range` to `lost` for which a node, or its reference count, cannot be read, with this node and
/// the error. A part ends where the node does, which may be behind the range.
/// Appends the mappings of the other parts, cut to the range. Each lost node is read once for the whole part below it,
/// because the medium may take seconds to fail a read.
pub fn find_unreadable<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    mappings: &mut Vec<Mapping>,
    lost: &mut dyn FnMut(NodeId, Range<u64>, Error),
) {
    let end = range.end.min(LOGICAL_LIMIT);
    let mut at = range.start;
    while at < end {
        let (mut id, mut upper) = (root, LOGICAL_LIMIT);
        let found = descend(store, &mut id, at, &mut upper);
        let stop = end.min(upper);
        let read = found.and_then(|()| {
            let within = page::mappings_from(store.node(id)?, at).take_while(|mapping| mapping.logical < stop);
            mappings.extend(within.map(|mapping| mapping.clipped(at, stop)));
            Ok(())
        });
        if let Err(error) = read {
            lost(id, at..upper, error);
        }
        // Keys to the right of the path are greater than the position.
        at = upper;
    }
}

/// Descends from the node `id` to the leaf of a block. `id` becomes the last node on the path, and `upper` the end of
/// the range below it, also after an error.
fn descend<S: NodeStore + ?Sized>(store: &mut S, id: &mut NodeId, position: u64, upper: &mut u64) -> Result<()> {
    let mut level_above = None;
    loop {
        store.references(*id)?;
        let node = store.node(*id)?;
        let level = page::level(node);
        if level_above.is_some_and(|above: u8| level != above - 1) {
            return Err(corrupt(*id, format_args!("level {level} is not one below its parent")));
        }
        if level == 0 {
            return Ok(());
        }
        let slot = page::slot_for(node, position).ok_or_else(|| corrupt(*id, "no children"))?;
        *upper = slot.upper.unwrap_or(*upper);
        level_above = Some(level);
        *id = slot.child;
    }
}
