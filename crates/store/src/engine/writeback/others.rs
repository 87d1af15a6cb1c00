//! Moves discards and zeroes into the map, and seals snapshots: the parts of write-back and flush that write no data.
//!
//! A discard may free any number of blocks, so it enters the map in steps that each dirty a limited number of pages and
//! are admitted one by one. After each step the part that has entered the map is removed from the buffer. The rest
//! stays in the buffer, visible to readers. Locks are released between steps.

use crate::Result;
use crate::buffer::{Content, DirtyPiece};
use crate::engine::admit::STEP_PAGES;
use crate::engine::log::Cost;
use crate::engine::metadata::{Effects, Fetch};
use crate::engine::placement::Holds;
use crate::engine::{Buffer, Engine, Head, Meta};
use crate::journal::Operation;
use crate::tree;
use std::ops::Range;

/// The longest range of one unmap operation, in blocks (4 GiB).
const UNMAP_MAX: u64 = 1 << 20;
/// Blocks that are zeroed in one step (16 MiB).
const ZERO_STEP: u64 = 4096;
/// The most steps of one batch of write-back, or of one pass of a flush over the buffers, so that other threads can run
/// in between.
pub(crate) const STEPS_MAX: usize = 16;

/// The effect of zeroing a range on the map.
enum Zeroed {
    /// The range is mapped to unwritten blocks: nothing changes.
    Already,
    /// The range keeps its blocks, the first of which has this number.
    Kept(u64),
    /// The range needs new blocks.
    New,
}

/// The result of a step.
pub(crate) struct Step {
    /// Everything before this logical block is in the map.
    pub end: u64,
    /// The cost of the rest, if there was no room for it.
    pub refused: Option<Cost>,
}

impl Engine {
    /// Moves the discards and zeroes of a batch into the map. The part for which there is no room, or that exceeds the
    /// step limit, stays buffered. Returns the refused cost.
    pub(crate) fn finish_others(
        &self,
        head: &Head,
        pieces: Vec<DirtyPiece>,
        fetch: &mut Fetch,
    ) -> Result<Option<Cost>> {
        let mut steps = 0;
        for piece in pieces {
            let end = piece.end();
            let mut at = piece.logical;
            while at < end {
                if steps == STEPS_MAX {
                    return Ok(None);
                }
                steps += 1;
                let part = piece.part(at..end);
                let survey = |meta: &mut Meta| meta.survey_pieces(head.id, std::slice::from_ref(&part));
                let _surveyed = self.meta.bring_in_for(fetch, survey);
                let mut buffer = head.lock();
                let (layer, _) = buffer.layers.oldest();
                // Parts that were written since the plan are skipped, because such a write may rely on the blocks that
                // are mapped there.
                let Some(still) = layer.still(&(at..end), piece.entry.stamp) else { break };
                at = still.start;
                let mut meta = self.meta.lock();
                let step = self.apply_other(&mut meta, head.id, still, &piece.entry.content, fetch);
                self.update_headroom(&meta);
                drop(meta);
                let step = step?;
                let (layer, _) = buffer.layers.oldest();
                let gone = layer.remove(at, step.end - at, piece.entry.stamp);
                drop(buffer);
                self.give_back(gone);
                if step.refused.is_some() {
                    return Ok(step.refused);
                }
                at = step.end;
            }
        }
        Ok(None)
    }

    /// Moves the first part of a discarded or zeroed range into the map.
    pub(crate) fn apply_other(
        &self,
        meta: &mut Meta,
        disk: u64,
        range: Range<u64>,
        content: &Content,
        fetch: &mut Fetch,
    ) -> Result<Step> {
        if matches!(content, Content::Unmapped) {
            return self.unmap_step(meta, disk, range, fetch);
        }
        let end = range.end.min(range.start + ZERO_STEP);
        let (end, zeroed) = fetch.require(meta, |meta| {
            let (end, _) = meta.reach(disk, range.start..end, false, STEP_PAGES)?;
            Ok((end, meta.zeroed(disk, range.start..end)?))
        })?;
        for (range, zeroed) in zeroed {
            match zeroed {
                Zeroed::Already => {}
                Zeroed::Kept(physical) => {
                    let run = crate::space::Run { start: physical, blocks: range.end - range.start };
                    let operation = Operation::Unwritten { disk, logical: range.start, run, fresh: false };
                    // The operation holds the blocks: until it is durable, recovery expects the old content, so nothing
                    // may be written to them.
                    if let Some(cost) = self.try_carry_out(meta, operation, 0)? {
                        return Ok(Step { end: range.start, refused: Some(cost) });
                    }
                }
                Zeroed::New => {
                    let mut at = range.start;
                    while at < range.end {
                        let run = self.allocate(meta, range.end - at)?;
                        let operation = Operation::Unwritten { disk, logical: at, run, fresh: true };
                        if let Some(cost) = self.try_carry_out_new(meta, operation, 0)? {
                            return Ok(Step { end: at, refused: Some(cost) });
                        }
                        at += run.blocks;
                    }
                }
            }
        }
        Ok(Step { end, refused: None })
    }

    /// Unmaps the first part of a range: as much as one step may free.
    pub(crate) fn unmap_step(&self, meta: &mut Meta, disk: u64, range: Range<u64>, fetch: &mut Fetch) -> Result<Step> {
        let mapped = fetch.require(meta, |meta| {
            let Some(first) = meta.first_mapped(disk, range.clone())? else { return Ok(None) };
            let most = range.end.min(first + UNMAP_MAX);
            Ok(Some((first, meta.reach(disk, first..most, true, STEP_PAGES)?.0)))
        })?;
        let Some((first, end)) = mapped else { return Ok(Step { end: range.end, refused: None }) };
        let operation = Operation::Unmap { disk, logical: first, blocks: end - first };
        match self.try_carry_out(meta, operation, 0)? {
            None => Ok(Step { end, refused: None }),
            refused => Ok(Step { end: first, refused }),
        }
    }

    /// Unmaps a range step by step. Must not be called under a lock that a checkpoint takes.
    pub(crate) fn unmap_waiting(&self, disk: u64, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        let mut fetch = Fetch::default();
        // Ranges without mappings are skipped, because they need no nodes.
        while let Some(first) = self.meta.look(|meta| meta.first_mapped(disk, at..range.end))? {
            self.check_running()?;
            self.measure(&self.buffers.head(disk))?;
            at = first;
            let step = {
                let mut meta = self.meta.lock();
                let nodes = self.nodes_of_discard(&meta);
                if !self.are_spare(&meta, nodes, 0) {
                    drop(meta);
                    self.make_spare(nodes, 0)?;
                    continue;
                }
                let step = self.unmap_step(&mut meta, disk, at..range.end, &mut fetch);
                self.update_headroom(&meta);
                step
            };
            if step.is_err() && self.meta.load_missing(&mut fetch)? {
                continue;
            }
            let step = step?;
            fetch = Fetch::default();
            at = step.end;
            if let Some(cost) = step.refused {
                self.make_room(cost)?;
            }
            self.bound_pending()?;
        }
        Ok(())
    }

    /// Called when the oldest layer of a disk is in the map: seals the snapshot that closed this layer. After an error,
    /// `fetch` may have the reason: see [`Fetch::require`].
    pub(crate) fn seal_oldest(&self, buffer: &mut Buffer, fetch: &mut Fetch) -> Result<()> {
        let Some(snapshot) = buffer.layers.complete() else { return Ok(()) };
        let mut meta = self.meta.lock();
        if let Some(disk) = meta.catalog.find(snapshot).map(|object| object.disk) {
            // Sealing adds a reference to the root. While its count cannot be read, the layer stays, because a change
            // that fails would stop the whole store.
            fetch.require(&mut meta, |meta| meta.references_of_root(disk))?;
        }
        buffer.layers.retire();
        buffer.cursor = 0;
        self.carry_out(&mut meta, Operation::Seal { snapshot }, 0)?;
        drop(meta);
        self.buffers.note_sealed();
        Ok(())
    }
}

impl Meta {
    /// The first block in `range` that the disk or snapshot maps.
    pub(crate) fn first_mapped(&mut self, disk: u64, range: Range<u64>) -> Result<Option<u64>> {
        let Some(root) = self.catalog.get(disk)?.root else { return Ok(None) };
        tree::first_mapped(&mut self.nodes(&mut Effects::default()), root, range)
    }

    /// Splits a range by the effect of zeroing on its blocks. Zeroing writes no data, and the journal keeps the order
    /// of operations, so only the current trees decide which blocks are shared, and holds do not matter.
    fn zeroed(&mut self, disk: u64, range: Range<u64>) -> Result<Vec<(Range<u64>, Zeroed)>> {
        let mut extents = Vec::new();
        if let Some(root) = self.catalog.get(disk)?.root {
            let (none, mut effects) = (Holds::default(), Effects::default());
            tree::lookup_exclusive(&mut self.current_nodes(&none, &mut effects), root, range.clone(), &mut extents)?;
        }
        let mut out: Vec<(Range<u64>, Zeroed)> = Vec::new();
        let mut push = |range: Range<u64>, zeroed: Zeroed| {
            if let Some((last, known)) = out.last_mut()
                && last.end == range.start
            {
                let joins = match (&*known, &zeroed) {
                    (Zeroed::Already, Zeroed::Already) | (Zeroed::New, Zeroed::New) => true,
                    (Zeroed::Kept(start), Zeroed::Kept(next)) => {
                        start + (last.end - last.start) == *next && !next.is_multiple_of(crate::FILE_BLOCKS)
                    }
                    _ => false,
                };
                if joins {
                    last.end = range.end;
                    return;
                }
            }
            if !range.is_empty() {
                out.push((range, zeroed));
            }
        };
        let mut at = range.start;
        for extent in extents {
            push(at..extent.logical.max(at), Zeroed::New);
            at = extent.logical + extent.blocks;
            for i in 0..extent.blocks {
                let zeroed = if extent.shared_path || self.entry(extent.physical + i)?.references != 1 {
                    Zeroed::New
                } else if extent.unwritten {
                    Zeroed::Already
                } else {
                    Zeroed::Kept(extent.physical + i)
                };
                push(extent.logical + i..extent.logical + i + 1, zeroed);
            }
        }
        push(at..range.end.max(at), Zeroed::New);
        Ok(out)
    }
}
