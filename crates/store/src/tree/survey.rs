//! Surveys: determine which pages an operation on a tree will need, as far as the pages in memory show.
//!
//! A survey walks the tree as the operation would, and skips nodes that are not in memory. One pass finds the missing
//! pages to which pages in memory refer. After these are read, the next pass finds the missing pages below them. A
//! survey changes nothing. Damage ends it early without an error, because the operation will report it. A survey may
//! record a few pages too many or too few; missing pages are then read when they are needed.

use super::page::{self, ENTRIES_MAX};
use super::{LOGICAL_LIMIT, NodeId};
use backend::Block;
use std::collections::BTreeSet;
use std::ops::Range;

/// Leaves with at most this many entries may be merged with a neighbour when they lose some.
const MERGED_BELOW: usize = ENTRIES_MAX / 2 + 2;
/// Leaves with more entries than this may be split when they gain some.
const SPLIT_ABOVE: usize = ENTRIES_MAX - 3;

/// Access to the pages in memory. Missing pages are recorded.
pub trait Resident {
    /// The page of a node.
    fn node(&mut self, id: NodeId) -> Option<&Block>;

    /// Number of references on a node.
    fn references(&mut self, id: NodeId) -> Option<u32>;

    /// Determines the pages that are needed to drop a reference on a node.
    fn drop_node(&mut self, id: NodeId);

    /// Determines the pages that are needed to read the entries of data blocks, or to add a reference.
    fn data(&mut self, physical: u64, blocks: u64);

    /// Determines the pages that are needed to drop references on data blocks.
    fn drop_data(&mut self, physical: u64, blocks: u64);

    /// Surveys a write of data blocks: in place if that is allowed, otherwise their references are dropped.
    fn overwrite_data(&mut self, physical: u64, blocks: u64);

    /// Determines the pages that are needed to allocate nodes.
    fn allocate(&mut self);

    /// True when one pass has recorded enough pages.
    fn is_enough(&self) -> bool;
}

/// The operation on a range that is surveyed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aim {
    /// Look up the mappings of the range.
    Look,
    /// Look up the mappings of the range, and read the data.
    Read,
    /// Write the range: in place where that is allowed, otherwise to new blocks.
    Write,
    /// Map the range to other blocks.
    Map,
    /// Unmap the range.
    Unmap,
}

impl Aim {
    fn changes(self) -> bool {
        !matches!(self, Self::Look | Self::Read)
    }
}

/// Surveys an operation on a range of a tree.
pub fn survey<S: Resident + ?Sized>(store: &mut S, root: NodeId, range: Range<u64>, aim: Aim) {
    let range = range.start..range.end.min(LOGICAL_LIMIT);
    if !range.is_empty() {
        visit(store, root, None, 0..LOGICAL_LIMIT, &range, aim, false);
    }
}

fn visit<S: Resident + ?Sized>(
    store: &mut S,
    id: NodeId,
    above: Option<u8>,
    bounds: Range<u64>,
    range: &Range<u64>,
    aim: Aim,
    mut shared: bool,
) {
    if store.is_enough() {
        return;
    }
    if aim.changes() {
        shared |= store.references(id).is_some_and(|references| references > 1);
        if shared {
            store.drop_node(id);
            store.allocate();
        }
    }
    let Some(node) = store.node(id) else { return };
    let (level, count) = (page::level(node), page::count(node));
    if above.is_some_and(|above| level.checked_add(1) != Some(above)) {
        return;
    }
    if level == 0 {
        let cut = |mapping: super::Mapping| mapping.clipped(range.start, range.end);
        let extents: Vec<_> =
            page::mappings_from(node, range.start).take_while(|m| m.logical < range.end).map(cut).collect();
        let all = if shared { page::data_runs(node) } else { Vec::new() };
        for extent in extents {
            match aim {
                Aim::Look => {}
                Aim::Read => store.data(extent.stored().physical, extent.stored().blocks),
                Aim::Write if !shared && extent.packed.is_none() => {
                    store.overwrite_data(extent.physical, extent.blocks);
                }
                _ => store.drop_data(extent.stored().physical, extent.stored().blocks),
            }
        }
        all.iter().for_each(|run| store.data(run.physical, run.blocks));
        if aim.changes() && count > SPLIT_ABOVE {
            store.allocate();
        }
        return;
    }
    let Some(first) = page::slot_for(node, range.start) else { return };
    let slots: Vec<page::Slot> = (first.index..count).map_while(|index| page::slot(node, index)).collect();
    let neighbours = |index: usize| [index.checked_sub(1), Some(index + 1)].into_iter().flatten();
    let siblings: Vec<NodeId> = if shared { page::children(node).collect() } else { Vec::new() };
    for child in siblings {
        store.references(child);
    }
    for slot in slots {
        let lower = slot.lower.unwrap_or(bounds.start);
        let upper = slot.upper.unwrap_or(bounds.end);
        if lower >= range.end {
            break;
        }
        if aim == Aim::Unmap && range.start <= lower && upper <= range.end {
            give_up(store, slot.child, level - 1);
            continue;
        }
        visit(store, slot.child, Some(level), lower..upper, range, aim, shared);
        if matches!(aim, Aim::Map | Aim::Unmap) {
            let small = store.node(slot.child).is_some_and(|child| page::count(child) <= MERGED_BELOW);
            for index in neighbours(slot.index).filter(|_| small && aim == Aim::Unmap) {
                let neighbour = store.node(id).and_then(|node| page::slot(node, index));
                if let Some(neighbour) = neighbour
                    && store.references(neighbour.child) == Some(1)
                {
                    store.node(neighbour.child);
                    store.drop_node(neighbour.child);
                }
            }
        }
    }
}

/// Surveys a comparison of two trees within a range. Nodes that both trees share are not opened.
pub fn survey_difference<S: Resident + ?Sized>(store: &mut S, roots: [Option<NodeId>; 2], range: &Range<u64>) {
    let mut open: [Vec<(u8, NodeId)>; 2] = roots.map(|root| {
        let known = root.and_then(|root| store.node(root).map(|node| (page::level(node), root)));
        known.into_iter().collect()
    });
    while let Some(level) = open.iter().flatten().map(|(level, _)| *level).max() {
        let [a, b] = open.each_mut().map(|nodes| {
            let (here, below): (Vec<_>, Vec<_>) = nodes.drain(..).partition(|(found, _)| *found == level);
            *nodes = below;
            here.into_iter().map(|(_, id)| id).collect::<BTreeSet<NodeId>>()
        });
        for (nodes, other, side) in [(&a, &b, 0), (&b, &a, 1)] {
            for id in nodes.difference(other) {
                if store.is_enough() {
                    return;
                }
                let Some(node) = store.node(*id) else { continue };
                if level == 0 || page::level(node) != level {
                    continue;
                }
                let Some(first) = page::slot_for(node, range.start) else { continue };
                let inside = |slot: &page::Slot| slot.lower.is_none_or(|lower| lower < range.end);
                let below = (first.index..page::count(node)).map_while(|index| page::slot(node, index));
                open[side].extend(below.take_while(inside).map(|slot| (level - 1, slot.child)));
            }
        }
    }
}

/// Determines the pages that are needed to drop one reference on a subtree.
fn give_up<S: Resident + ?Sized>(store: &mut S, id: NodeId, level: u8) {
    let mut all = usize::MAX;
    drop_part(store, id, Some(level), &mut all);
}

/// Surveys a portion of dropping a tree: `steps` leaves and shared subtrees.
pub fn survey_drop<S: Resident + ?Sized>(store: &mut S, root: NodeId, mut steps: usize) {
    drop_part(store, root, None, &mut steps);
}

fn drop_part<S: Resident + ?Sized>(store: &mut S, id: NodeId, level: Option<u8>, steps: &mut usize) {
    if *steps == 0 || store.is_enough() {
        return;
    }
    store.drop_node(id);
    if store.references(id) != Some(1) {
        *steps -= 1;
        return;
    }
    let Some(node) = store.node(id) else {
        *steps -= 1;
        return;
    };
    let found = page::level(node);
    if level.is_some_and(|level| level != found) {
        return;
    }
    if found == 0 {
        for run in page::data_runs(node) {
            store.drop_data(run.physical, run.blocks);
        }
        *steps -= 1;
        return;
    }
    let children: Vec<NodeId> = page::children(node).collect();
    for child in children.into_iter().rev() {
        drop_part(store, child, Some(found - 1), steps);
    }
}
