//! Replay of operations below lost nodes of the map, in an opening for a repair.
//!
//! What must hold:
//!
//! 1. Only the part of an operation that lies below a lost node is left out. Reads of this part fail from then on.
//! 2. A node below which a part was left out stays lost: its page is overwritten with an invalid one. The medium may
//!    be able to read the page later, and the node would then map older content, or blocks of other disks.

use super::ReplayState;
use super::drops::Drops;
use crate::engine::left_out::target;
use crate::engine::metadata::{Effects, NODES_PER_OPERATION};
use crate::engine::{Engine, Meta};
use crate::journal::Operation;
use crate::pages::{PageFile, PageKey, patiently};
use crate::space::Run;
use crate::tree::{self, NodeId, NodeStore};
use crate::{IoContext, Result, is_lost};
use backend::{BLOCK_SIZE, SharedSlice};
use std::ops::Range;

impl Engine {
    /// Replays an operation without the parts below lost nodes.
    pub(super) fn carry_out_parts(
        &self,
        meta: &mut Meta,
        state: &mut ReplayState<'_>,
        operation: &Operation,
    ) -> Result<()> {
        let Some((disk, range)) = target(operation).filter(|(_, range)| !range.is_empty()) else {
            return self.carry_out_again(meta, state, operation);
        };
        let lost = self.lose_parts(meta, &mut state.drops, disk, &range)?;
        if lost.is_empty() {
            return self.carry_out_again(meta, state, operation);
        }
        if matches!(operation, Operation::MapPack { .. } | Operation::MapSharedPack { .. }) {
            self.ensure_nodes(meta, NODES_PER_OPERATION)?;
            return self.redirect_ranges(meta, state, operation, beside(&lost, &range).map(|part| (disk, part)));
        }
        for part in beside(&lost, &range) {
            self.carry_out_again(meta, state, &part_of(operation, &part))?;
        }
        Ok(())
    }

    /// Replays a pack or a share, except below lost nodes. True if there are such nodes: then the change was made in
    /// all trees, and not only in those that are named.
    pub(super) fn redirect_parts(
        &self,
        meta: &mut Meta,
        state: &mut ReplayState<'_>,
        operation: &Operation,
    ) -> Result<bool> {
        let Some((whole, objects)) = operation.redirects() else { return Ok(false) };
        self.ensure_nodes(meta, NODES_PER_OPERATION)?;
        let (mut parts, mut left_out) = (Vec::new(), false);
        for object in objects {
            left_out |= self.parts_beside_lost(meta, &mut state.drops, *object, &whole, &mut parts)?;
        }
        if left_out {
            // The old blocks keep references, although they may have become free when the operation was carried out.
            state.drops.note_left_out();
            // The operation names one tree for each leaf. If the path from that tree to the leaf is lost, other trees
            // may share the leaf. They must not map the old blocks any more, which may belong to other disks by now.
            let others: Vec<u64> =
                meta.catalog.objects().map(|object| object.id).filter(|id| !objects.contains(id)).collect();
            for object in others {
                self.parts_beside_lost(meta, &mut state.drops, object, &whole, &mut parts)?;
            }
        }
        self.redirect_ranges(meta, state, operation, parts.into_iter())?;
        Ok(left_out)
    }

    /// Replays an operation on a pack or a share, in these ranges of objects.
    fn redirect_ranges(
        &self,
        meta: &mut Meta,
        state: &mut ReplayState<'_>,
        operation: &Operation,
        parts: impl Iterator<Item = (u64, Range<u64>)>,
    ) -> Result<()> {
        let mut effects = Effects::default();
        if let Operation::Pack { run, .. }
        | Operation::MapPack { run, .. }
        | Operation::MapSharedPack { run, .. }
        | Operation::Share { run, .. }
        | Operation::SharePack { run, .. } = operation
        {
            // The content of a pack is new, and that of a shared block was durable before: earlier payload is not home.
            meta.forget_logged(*run);
        }
        meta.redirect_in(operation, parts, &mut effects)?;
        meta.release_again(&mut state.doubts, effects.freed);
        match operation {
            Operation::Pack { run, .. } | Operation::MapPack { run, .. } => {
                (run.start..run.start + run.blocks).for_each(|block| state.doubts.told(block));
                meta.doubt(&state.doubts, *run)
            }
            Operation::Share { run, .. } | Operation::SharePack { run, .. } | Operation::MapSharedPack { run, .. } => {
                meta.doubt(&state.doubts, *run)
            }
            _ => Ok(()),
        }
    }

    /// Adds the parts of a range of an object that do not lie below lost nodes. True if a part or the object is lost.
    fn parts_beside_lost(
        &self,
        meta: &mut Meta,
        drops: &mut Drops,
        object: u64,
        range: &Range<u64>,
        parts: &mut Vec<(u64, Range<u64>)>,
    ) -> Result<bool> {
        let lost = self.lose_parts(meta, drops, object, range)?;
        parts.extend(beside(&lost, range).map(|part| (object, part)));
        Ok(!lost.is_empty() || meta.catalog.find(object).is_none())
    }

    /// The parts of a range of a disk that lie below lost nodes, in ascending order. Makes these nodes invalid.
    pub(super) fn lose_parts(
        &self,
        meta: &mut Meta,
        drops: &mut Drops,
        disk: u64,
        range: &Range<u64>,
    ) -> Result<Vec<Range<u64>>> {
        let Some(root) = meta.catalog.find(disk).and_then(|object| object.root) else { return Ok(Vec::new()) };
        let (mut effects, mut mappings, mut found) = (Effects::default(), Vec::new(), Vec::new());
        tree::find_unreadable(
            &mut meta.nodes(&mut effects),
            root,
            range.clone(),
            &mut mappings,
            &mut |id, part, error| found.push((id, part, error)),
        );
        let mut parts = Vec::new();
        for (id, part, error) in found {
            match patiently(|| meta.nodes(&mut effects).node(id).map(drop)) {
                // A page counts as lost only if the medium can be read elsewhere.
                Err(lost) if is_lost(&lost) && self.log.is_medium_readable() => {
                    if drops.note_lost_node(id) {
                        tracing::error!(error = %lost, disk, "changes in the journal are lost with a node of the map");
                        self.invalidate(id)?;
                    }
                }
                // The number of references on the node is lost, and not the node.
                Ok(()) => return Err(error),
                Err(other) => return Err(other),
            }
            parts.push(part.start..part.end.min(range.end));
        }
        Ok(parts)
    }

    /// Overwrites the page of a lost node.
    fn invalidate(&self, id: NodeId) -> Result<()> {
        let (key, invalid) = (PageKey::new(PageFile::Map, id.0), [0xffu8; BLOCK_SIZE]);
        let written = self.meta.file(PageFile::Map).write_at(&[&invalid], key.offset(), true);
        written.during(|| format!("overwriting {key}"))
    }
}

/// The parts of a range outside the parts `lost`, which are in ascending order.
fn beside(lost: &[Range<u64>], range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = std::iter::once(range.start).chain(lost.iter().map(|part| part.end));
    let ends = lost.iter().map(|part| part.start).chain([range.end]);
    let between: Vec<_> = starts.zip(ends).filter(|(start, end)| start < end).collect();
    between.into_iter().map(|(start, end)| start..end)
}

/// The part of an operation that changes the logical blocks `part`.
fn part_of(operation: &Operation, part: &Range<u64>) -> Operation {
    let blocks = part.end - part.start;
    let run_of = |logical: u64, run: &Run| Run { start: run.start + (part.start - logical), blocks };
    let sums_of = |logical: u64, sums: &[u32]| sums[(part.start - logical) as usize..][..blocks as usize].to_vec();
    match operation {
        Operation::Map { disk, logical, run, checksums } => Operation::Map {
            disk: *disk,
            logical: part.start,
            run: run_of(*logical, run),
            checksums: sums_of(*logical, checksums),
        },
        Operation::MapShared { disk, logical, run, checksums } => Operation::MapShared {
            disk: *disk,
            logical: part.start,
            run: run_of(*logical, run),
            checksums: sums_of(*logical, checksums),
        },
        Operation::MapData { disk, logical, run, data } => {
            let from = (part.start - logical) as usize * BLOCK_SIZE;
            let data = data_of(data, from..from + blocks as usize * BLOCK_SIZE);
            Operation::MapData { disk: *disk, logical: part.start, run: run_of(*logical, run), data }
        }
        Operation::Unwritten { disk, logical, run, fresh } => {
            let run = run_of(*logical, run);
            Operation::Unwritten { disk: *disk, logical: part.start, run, fresh: *fresh }
        }
        Operation::Written { disk, logical, run, checksums } => Operation::Written {
            disk: *disk,
            logical: part.start,
            run: run_of(*logical, run),
            checksums: sums_of(*logical, checksums),
        },
        Operation::Unmap { disk, .. } => Operation::Unmap { disk: *disk, logical: part.start, blocks },
        other => other.clone(),
    }
}

/// The bytes `range` of consecutive slices.
fn data_of(data: &[SharedSlice], range: Range<usize>) -> Vec<SharedSlice> {
    let (mut out, mut at) = (Vec::new(), 0);
    for slice in data {
        let (from, to) = (range.start.max(at), range.end.min(at + slice.len()));
        if from < to {
            out.push(slice.slice(from - at..to - at));
        }
        at += slice.len();
    }
    out
}
