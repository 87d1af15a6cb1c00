//! Computes how much a change of the map touches, without changing anything.
//!
//! The owner limits what one operation may change, and asks here first how far from the beginning of a range a step may
//! go, and how many pages it changes at most. The answer holds as long as no exclusive node of the tree becomes shared;
//! an allowance for each level covers nodes that other changes split meanwhile.

use super::page::{self, EXTENT_BLOCKS_MAX, LOGICAL_LIMIT};
use super::{LEVELS_MAX, NodeId, NodeStore, corrupt};
use crate::Result;
use std::ops::Range;

/// Nodes that one step changes on a level of its path: the node, a node split off from it, and a neighbour merged with
/// it.
const NODES_PER_LEVEL: u64 = 3;
/// Pages of reference counts that change with them: of a new node and of a freed one.
const COUNTS_PER_LEVEL: u64 = 2;
/// Extents of a mapping that fit into a leaf before it has to be split again.
const EXTENTS_PER_SPLIT: u64 = 64;
/// Extents that mapping a range adds beside its own: the parts of an extent that it splits.
const EXTENTS_PER_RANGE: u64 = 2;

/// What a change of the beginning of a range touches, at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Where it ends: the end of the range, or of a leaf in it.
    pub end: u64,
    /// Pages of nodes.
    pub nodes: u64,
    /// Pages of tables: of reference counts of nodes, and of entries of the data blocks that are mapped there now.
    pub tables: u64,
}

/// What earlier answers for the same step have counted: a batch that changes one leaf in many places counts it once.
#[derive(Debug, Default)]
pub struct Seen {
    path: [Option<NodeId>; LEVELS_MAX],
    /// Ranges since the last split was counted for them.
    ranges: u64,
}

/// The result of one descent.
struct Leaf {
    upper: u64,
    nodes: u64,
    tables: u64,
}

/// How far a change of `range` may go so that it touches about `most` pages: at least one leaf. `per_page` is the
/// number of blocks, or nodes, that a page of a table describes. With `unmap` the range is unmapped, otherwise mapped;
/// the caller counts the pages that describe the new blocks. `seen` is what was counted for earlier ranges of the same
/// step, in ascending order.
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
        let found = step(store, root, reach.end, range.start..end, unmap, per_page, seen)?;
        let first = reach.end == range.start;
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
        shared = shared || store.references(id)? > 1;
        let node = store.node(id)?;
        let level = page::level(node);
        if level_above.is_some_and(|above: u8| level != above - 1) {
            return Err(corrupt(id, format_args!("level {level} under a node of another")));
        }
        let new = met.replace(id) != Some(id);
        if new {
            leaf.nodes += NODES_PER_LEVEL;
            leaf.tables += COUNTS_PER_LEVEL;
            if depth == 0 {
                // The tree may grow by a level.
                leaf.nodes += NODES_PER_LEVEL;
                leaf.tables += COUNTS_PER_LEVEL;
            }
        }
        if level == 0 {
            if shared {
                // The copy refers to everything that the leaf refers to.
                if new {
                    let pages = page::data_runs(node).into_iter().map(|run| (run.physical, run.blocks));
                    leaf.tables += described(pages, per_page);
                }
            } else {
                let stop = range.end.min(leaf.upper);
                let mapped = page::mappings_from(node, position)
                    .take_while(|mapping| mapping.logical < stop)
                    .map(|mapping| mapping.clipped(position, stop))
                    .map(|mapping| (mapping.physical, mapping.blocks));
                leaf.tables += described(mapped, per_page);
            }
            return Ok(leaf);
        }
        if new && shared {
            leaf.tables += described(page::children(node).map(|child| (child.0, 1)), per_page);
        }
        let slot = page::slot_for(node, position).ok_or_else(|| corrupt(id, "no children"))?;
        lower = slot.lower.unwrap_or(lower);
        leaf.upper = slot.upper.unwrap_or(leaf.upper);
        let covered = unmap && range.start <= lower && leaf.upper <= range.end;
        if covered && (shared || store.references(slot.child)? > 1) {
            // Other trees keep the subtree: it loses one reference.
            leaf.tables += 1;
            return Ok(leaf);
        }
        level_above = Some(level);
        id = slot.child;
    }
    Err(corrupt(id, "too many levels"))
}

/// Pages of a table that describe these runs; shared ones count once.
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
