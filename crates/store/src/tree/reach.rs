//! Computes how many pages a change of the map will change, without changing anything.
//!
//! The engine limits the pages that one operation may change. Before an operation it computes here how far a step may
//! go from the beginning of a range, and how many pages the step changes at most. The result is valid as long as no
//! exclusive node of the tree becomes shared. An allowance for each level covers nodes that other changes split
//! meanwhile.
//!
//! The computation also reads the pages that the step will read, because a change that fails half-way would stop the
//! whole store.

use super::page::{self, EXTENT_BLOCKS_MAX, LOGICAL_LIMIT};
use super::{LEVELS_MAX, NodeId, NodeStore, corrupt, lookup, references};
use crate::{ErrorKind, Result};
use std::ops::Range;

/// The nodes that one step changes on each level of its path: the node, a node split off from it, and a neighbour
/// merged with it.
const NODES_PER_LEVEL: u64 = 3;
/// The table pages that change with these nodes: one for a new node and one for a freed node.
const COUNTS_PER_LEVEL: u64 = 2;
/// Extents that can be inserted into a leaf before it may have to be split again.
const EXTENTS_PER_SPLIT: u64 = 64;
/// Extents that are added, besides those of the range, when a range is mapped: the parts of an extent that is split.
const EXTENTS_PER_RANGE: u64 = 2;

/// An upper limit of the pages that a step changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// The logical block where the step ends: the end of the range, or of a leaf in it.
    pub end: u64,
    /// Pages of nodes.
    pub nodes: u64,
    /// Pages of tables: reference counts of nodes, and entries of the data blocks that are mapped in the range now.
    pub tables: u64,
}

/// Nodes that were counted before in the same step. A leaf that a batch changes in many places counts once.
#[derive(Debug, Default)]
pub struct Seen {
    path: [Option<NodeId>; LEVELS_MAX],
    /// Number of ranges since a split was last counted.
    ranges: u64,
}

/// The result of one descent.
struct Leaf {
    upper: u64,
    nodes: u64,
    tables: u64,
}

/// Computes the part of `range` whose change dirties about `most` pages, at least the part in one leaf. `per_page` is
/// the number of blocks, or nodes, that a table page describes. With `unmap` the range is unmapped, otherwise it is
/// mapped; the caller counts the table pages of the new blocks. `seen` has the nodes that were counted for earlier
/// ranges of the same step. The ranges of a step come in ascending order. A step ends before a leaf that cannot be
/// changed because of damage; if that is the first leaf, or `most` does not limit the step, the damage is an error.
pub fn reach<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    range: Range<u64>,
    unmap: bool,
    per_page: u64,
    most: u64,
    seen: &mut Seen,
) -> Result<Reach> {
    let end = range.end.min(LOGICAL_LIMIT);
    let mut reach = Reach { end: range.start, nodes: 0, tables: 0 };
    seen.ranges += 1;
    if seen.ranges * EXTENTS_PER_RANGE > EXTENTS_PER_SPLIT {
        seen.ranges = 0;
        reach.nodes += NODES_PER_LEVEL;
        reach.tables += COUNTS_PER_LEVEL;
    }
    while reach.end < end {
        let first = reach.end == range.start;
        let found = match step(store, root, reach.end, range.start..end, unmap, per_page, seen) {
            Err(error) if error.kind() == ErrorKind::Corrupt && !first && most < u64::MAX => break,
            other => other?,
        };
        if !first && reach.nodes + reach.tables + found.nodes + found.tables > most {
            break;
        }
        let next = found.upper.min(end);
        let extents = if unmap { 0 } else { (next - reach.end) / EXTENT_BLOCKS_MAX };
        let splits = extents / EXTENTS_PER_SPLIT;
        reach.nodes += found.nodes + splits * NODES_PER_LEVEL;
        reach.tables += found.tables + splits * COUNTS_PER_LEVEL;
        reach.end = next;
    }
    Ok(reach)
}

fn step<S: NodeStore + ?Sized>(
    store: &mut S,
    root: NodeId,
    position: u64,
    range: Range<u64>,
    unmap: bool,
    per_page: u64,
    seen: &mut Seen,
) -> Result<Leaf> {
    let mut leaf = Leaf { upper: LOGICAL_LIMIT, nodes: 0, tables: 0 };
    let mut id = root;
    let (mut lower, mut shared, mut level_above) = (0, false, None);
    for (depth, met) in seen.path.iter_mut().enumerate() {
        shared = references(store, id)? > 1 || shared;
        let node = store.node(id)?;
        let level = page::level(node);
        if level_above.is_some_and(|above: u8| level != above - 1) {
            return Err(corrupt(id, format_args!("level {level} is not one below its parent")));
        }
        let new = met.replace(id) != Some(id);
        if new {
            leaf.nodes += NODES_PER_LEVEL;
            leaf.tables += COUNTS_PER_LEVEL;
            if depth == 0 {
                // The tree may grow by one level.
                leaf.nodes += NODES_PER_LEVEL;
                leaf.tables += COUNTS_PER_LEVEL;
            }
        }
        if level == 0 {
            if shared {
                // A copy of the leaf adds a reference to every block that the leaf maps.
                if new {
                    let runs = page::data_runs(node);
                    leaf.tables += described(runs.iter().map(|run| (run.physical, run.blocks)), per_page);
                    runs.into_iter().try_for_each(|run| store.check_data(run.physical, run.blocks))?;
                }
            } else {
                let stop = range.end.min(leaf.upper);
                let mapped = page::mappings_from(node, position)
                    .take_while(|mapping| mapping.logical < stop)
                    .map(|mapping| mapping.clipped(position, stop))
                    .map(|mapping| (mapping.stored().physical, mapping.stored().blocks));
                let mapped: Vec<(u64, u64)> = mapped.collect();
                leaf.tables += described(mapped.iter().copied(), per_page);
                mapped.into_iter().try_for_each(|(physical, blocks)| store.check_data(physical, blocks))?;
            }
            return Ok(leaf);
        }
        let slot = page::slot_for(node, position).ok_or_else(|| corrupt(id, "no children"))?;
        if new && shared {
            let children: Vec<NodeId> = page::children(node).collect();
            leaf.tables += described(children.iter().map(|child| (child.0, 1)), per_page);
            // A copy of the node adds a reference to each child.
            children.into_iter().try_for_each(|child| references(store, child).map(drop))?;
        }
        lower = slot.lower.unwrap_or(lower);
        leaf.upper = slot.upper.unwrap_or(leaf.upper);
        let covered = unmap && range.start <= lower && leaf.upper <= range.end;
        if covered && (shared || store.references(slot.child)? > 1) {
            // Other trees keep the subtree, which loses only one reference. The change searches it for its first
            // extent.
            lookup::first_mapped(store, slot.child, lower..leaf.upper)?;
            leaf.tables += 1;
            return Ok(leaf);
        }
        level_above = Some(level);
        id = slot.child;
    }
    Err(corrupt(id, "too many levels"))
}

/// The number of table pages that describe these runs. A page counts once even if several adjacent runs lie in it.
fn described(runs: impl Iterator<Item = (u64, u64)>, per_page: u64) -> u64 {
    let mut pages = 0;
    let mut last = None;
    for (start, blocks) in runs {
        let (from, to) = (start / per_page, (start + blocks.max(1) - 1) / per_page);
        pages += to - from + 1 - u64::from(last == Some(from));
        last = Some(to);
    }
    pages
}
