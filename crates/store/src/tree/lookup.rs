//! Looks up ranges in the map.
//!
//! This is the hottest path of the store. A lookup descends once for each leaf that the range touches, with two binary
//! searches on page bytes, and decodes only the entries in the range. It keeps no stack: after a leaf it starts again
//! from the root, which costs little compared with the many entries of a leaf.

use super::page::{self, LOGICAL_LIMIT};
use super::{Mapping, NodeId, NodeStore, Packed, PhysicalRun, corrupt};
use crate::{FILE_BLOCKS, Result};
use std::ops::Range;

/// A run of consecutive logical blocks mapped to consecutive physical blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// First logical block.
    pub logical: u64,
    /// Physical block of the first logical one; with `packed`, the first block of the pack.
    pub physical: u64,
    /// Length in blocks.
    pub blocks: u64,
    /// Whether the blocks are allocated, but read as zeros.
    pub unwritten: bool,
    /// Set if the blocks are compressed.
    pub packed: Option<Packed>,
    /// Whether a node on the path to this extent is shared ([`NodeStore::is_shared`]). Then another tree maps the
    /// extent too, whatever the reference count of its blocks is. Blocks of a pack count as shared too, because they
    /// contain other logical blocks and are never overwritten in place. Only [`lookup_exclusive`] determines this;
    /// [`lookup`] sets false.
    pub shared_path: bool,
}

impl Extent {
    /// The physical blocks in which the extent is stored.
    pub fn stored(&self) -> PhysicalRun {
        let blocks = self.packed.map_or(self.blocks, |packed| u64::from(packed.stored));
        PhysicalRun { physical: self.physical, blocks }
    }
}

/// Appends to `out` the mappings within `range`, in order, cut to the range and at the ends of data files.
pub fn lookup<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    out: &mut Vec<Extent>,
) -> Result<()> {
    scan::<S, false>(store, root, range, |mapping, shared_path| {
        push(out, extent(mapping, shared_path));
        true
    })
}

/// Like [`lookup`], but also determines whether the path is shared, which decides about in-place overwrites.
pub fn lookup_exclusive<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    out: &mut Vec<Extent>,
) -> Result<()> {
    scan::<S, true>(store, root, range, |mapping, shared_path| {
        push(out, extent(mapping, shared_path || mapping.packed.is_some()));
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
    let Mapping { logical, physical, blocks, unwritten, packed } = mapping;
    Extent { logical, physical, blocks, unwritten, packed, shared_path }
}

/// Adds an extent, in two parts if it reaches into the next data file: version 0.1.0 has written such entries.
#[inline]
fn push(out: &mut Vec<Extent>, mut extent: Extent) {
    let until = FILE_BLOCKS - extent.physical % FILE_BLOCKS;
    if extent.blocks > until && extent.packed.is_none() {
        out.push(Extent { blocks: until, ..extent });
        extent.logical += until;
        extent.physical += until;
        extent.blocks -= until;
    }
    out.push(extent);
}

/// Calls `each` in order with every mapping in `range`, cut to the range, until it returns false.
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
        // Keys to the right of the path are greater than the position, so the loop advances even on damaged pages.
        position = upper;
    }
    Ok(())
}
