//! Looking up ranges in the map.
//!
//! The hottest path of the store. A lookup is one descent for each leaf that the range touches, with two binary
//! searches on page bytes at the ends and no decoding in between. It keeps no stack: it starts again from the root at
//! the upper bound of the finished leaf, whose many entries outweigh the cost.

use super::page::{self, LOGICAL_LIMIT};
use super::{Mapping, NodeId, NodeStore, corrupt};
use crate::Result;
use std::ops::Range;

/// Consecutive logical blocks on consecutive physical blocks, as a lookup found them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// First logical block.
    pub logical: u64,
    /// Physical block of the first logical one.
    pub physical: u64,
    /// Length in blocks.
    pub blocks: u64,
    /// Space is allocated, but reads as zeros.
    pub unwritten: bool,
    /// Some node on the path to this extent is shared ([`NodeStore::is_shared`]), so another tree maps it too, whatever
    /// the count of the data block is. Only [`lookup_exclusive`] determines this; [`lookup`] sets false.
    pub shared_path: bool,
}

/// Appends to `out` what the tree maps in `range`, clipped to it, in order.
pub fn lookup<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    out: &mut Vec<Extent>,
) -> Result<()> {
    scan::<S, false>(store, root, range, |mapping, shared_path| {
        out.push(extent(mapping, shared_path));
        true
    })
}

/// As [`lookup`], and determines whether the path is shared: used before overwriting in place.
pub fn lookup_exclusive<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    out: &mut Vec<Extent>,
) -> Result<()> {
    scan::<S, true>(store, root, range, |mapping, shared_path| {
        out.push(extent(mapping, shared_path));
        true
    })
}

/// The first mapped block of `range`.
pub fn first_mapped<S: NodeStore + ?Sized>(store: &mut S, root: NodeId, range: Range<u64>) -> Result<Option<u64>> {
    let mut first = None;
    scan::<S, false>(store, root, range, |mapping, _| {
        first = Some(mapping.logical);
        false
    })?;
    Ok(first)
}

fn extent(mapping: Mapping, shared_path: bool) -> Extent {
    let Mapping { logical, physical, blocks, unwritten } = mapping;
    Extent { logical, physical, blocks, unwritten, shared_path }
}

/// Calls `each` with every mapping of `range`, clipped, in order, until it returns false.
#[inline]
fn scan<S: NodeStore + ?Sized, const EXCLUSIVE: bool>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    mut each: impl FnMut(Mapping, bool) -> bool,
) -> Result<()> {
    let end = range.end.min(LOGICAL_LIMIT);
    let mut position = range.start;
    while position < end {
        let mut id = root;
        let mut upper = LOGICAL_LIMIT;
        let mut shared_path = false;
        let mut level_above = None;
        loop {
            if EXCLUSIVE && !shared_path {
                shared_path = store.is_shared(id)?;
            }
            let node = store.node(id)?;
            let level = page::level(node);
            if level_above.is_some_and(|above: u8| level != above - 1) {
                return Err(corrupt(
                    id,
                    format_args!("level {level} under a node of level {}", level_above.unwrap_or(0)),
                ));
            }
            if level == 0 {
                let stop = end.min(upper);
                for mapping in page::mappings_from(node, position) {
                    if mapping.logical >= stop {
                        break;
                    }
                    if !each(mapping.clipped(position, stop), shared_path) {
                        return Ok(());
                    }
                }
                break;
            }
            let slot = page::slot_for(node, position).ok_or_else(|| corrupt(id, "no children"))?;
            upper = slot.upper.unwrap_or(upper);
            level_above = Some(level);
            id = slot.child;
        }
        // Keys right of the path are greater than the position, so this advances on any bytes.
        position = upper;
    }
    Ok(())
}
