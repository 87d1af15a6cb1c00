//! Queries of maps: the state of a range, the differences between two disks or snapshots, the blocks of a disk.

use super::metadata::{Effects, Fetch};
use super::placement::Holds;
use super::{Engine, Head, Meta};
use crate::Result;
use crate::buffer::{Content, DirtyPiece};
use crate::space::SpaceCounts;
use crate::tree::{self, Aim, Extent, NodeId};
use std::ops::Range;

/// Blocks examined each time the metadata lock is held (1 GiB of disk).
const STRIDE: u64 = 1 << 18;

/// The state of a range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Holds data.
    Data,
    /// Occupies space and reads as zeros.
    Zero,
    /// Occupies no space and reads as zeros.
    Hole,
}

/// A run of blocks of one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First block.
    pub logical: u64,
    /// Length in blocks.
    pub blocks: u64,
    /// The state of the blocks.
    pub condition: Condition,
}

/// A run of blocks that differs between two disks or snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// First block.
    pub logical: u64,
    /// Length in blocks.
    pub blocks: u64,
    /// True if the second disk or snapshot has no data in the run.
    pub zero: bool,
}

/// Counts of blocks that a tree maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Allocated blocks.
    pub allocated: u64,
    /// The part of `allocated` that was never written and reads as zeros.
    pub unwritten: u64,
    /// Of the allocated blocks, those that are mapped at no other place. A block that the same tree maps at several
    /// places does not count.
    pub exclusive: u64,
    /// Extents: runs that are contiguous logically and physically.
    pub extents: u64,
}

/// Sizes of a store, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounts {
    /// Data blocks.
    pub data: SpaceCounts,
    /// Nodes of the map.
    pub map: SpaceCounts,
    /// Data blocks reserved for thick disks.
    pub reserved: u64,
    /// Data blocks that were freed and cannot be reused yet.
    pub held: u64,
    /// Metadata pages in memory.
    pub pages_cached: u64,
    /// The part of `pages_cached` that changed since the last checkpoint.
    pub pages_dirty: u64,
}

fn push(out: &mut Vec<Span>, logical: u64, blocks: u64, condition: Condition) {
    if blocks == 0 {
        return;
    }
    match out.last_mut() {
        Some(last) if last.condition == condition && last.logical + last.blocks == logical => last.blocks += blocks,
        _ => out.push(Span { logical, blocks, condition }),
    }
}

impl Meta {
    fn spans(&mut self, root: Option<NodeId>, range: Range<u64>, out: &mut Vec<Span>) -> Result<()> {
        let mut extents = Vec::new();
        if let Some(root) = root {
            let mut effects = Effects::default();
            self.surveyed(root, range.clone(), Aim::Look, |meta| {
                tree::lookup(&mut meta.nodes(&mut effects), root, range.clone(), &mut extents)
            })?;
        }
        let mut at = range.start;
        for extent in extents {
            push(out, at, extent.logical - at, Condition::Hole);
            let condition = if extent.unwritten { Condition::Zero } else { Condition::Data };
            push(out, extent.logical, extent.blocks, condition);
            at = extent.logical + extent.blocks;
        }
        push(out, at, range.end - at, Condition::Hole);
        Ok(())
    }
}

impl Engine {
    /// The version of the format that the datastore has, by what was used in it.
    pub fn format_version(&self) -> u32 {
        self.log.version()
    }

    /// The state of a range of a head, in at most `limit` spans.
    pub fn spans_head(&self, head: &Head, range: Range<u64>, limit: usize) -> Result<Vec<Span>> {
        let mut out = Vec::new();
        let mut fetch = Fetch::default();
        let mut at = range.start;
        while at < range.end && out.len() <= limit {
            let part = at..range.end.min(at + STRIDE);
            let buffer = head.lock_settled(&part);
            if buffer.gone {
                return Err(super::read::gone());
            }
            at = part.end;
            let first = part.start;
            let (mut pieces, mut gaps): (Vec<DirtyPiece>, Vec<Range<u64>>) = Default::default();
            buffer.layers.overlay(part, &mut pieces, &mut gaps);
            let mut spans: Vec<Span> = Vec::new();
            for piece in pieces {
                let condition = match piece.entry.content {
                    Content::Data(..) => Condition::Data,
                    Content::Zero => Condition::Zero,
                    Content::Unmapped => Condition::Hole,
                };
                spans.push(Span { logical: piece.logical, blocks: piece.entry.blocks, condition });
            }
            let mut meta = self.meta.lock();
            let root = meta.catalog.get(head.id)?.root;
            let looked = fetch.look(&mut meta, |meta| {
                for gap in gaps {
                    // Each gap has its own list, because spans of buffered blocks lie between the gaps.
                    let mut own = Vec::new();
                    meta.spans(root, gap, &mut own)?;
                    spans.append(&mut own);
                }
                Ok(())
            });
            drop(meta);
            drop(buffer);
            match looked {
                Ok(found) => found?,
                Err(absent) => {
                    self.meta.load_pages(absent, &mut fetch)?;
                    at = first;
                    continue;
                }
            }
            fetch = Fetch::default();
            spans.sort_unstable_by_key(|span| span.logical);
            for span in spans {
                push(&mut out, span.logical, span.blocks, span.condition);
            }
        }
        out.truncate(limit);
        Ok(out)
    }

    /// The state of a range of a snapshot, in at most `limit` spans.
    pub fn spans_snapshot(&self, snapshot: u64, range: Range<u64>, limit: usize) -> Result<Vec<Span>> {
        self.wait_sealed(snapshot)?;
        let mut out = Vec::new();
        let mut at = range.start;
        while at < range.end && out.len() <= limit {
            let part = at..range.end.min(at + STRIDE);
            at = part.end;
            let spans = self.meta.look(|meta| {
                let root = meta.catalog.whole(snapshot)?.root;
                let mut spans = Vec::new();
                meta.spans(root, part.clone(), &mut spans)?;
                Ok(spans)
            })?;
            for span in spans {
                push(&mut out, span.logical, span.blocks, span.condition);
            }
        }
        out.truncate(limit);
        Ok(out)
    }

    /// Moves all buffered writes of a disk, or the last writes of a snapshot, into the map.
    fn complete(&self, object: u64) -> Result<()> {
        let disk = self.with_catalog(|catalog| catalog.get(object).map(|o| !o.is_snapshot()))?;
        if disk { self.settle(&self.head(object)) } else { self.wait_sealed(object) }
    }

    /// Calls `each` for every difference between two disks or snapshots within `range`, in order, until it returns
    /// false.
    pub fn diff(
        &self,
        from: u64,
        to: u64,
        range: Range<u64>,
        each: &mut dyn FnMut(Changed) -> Result<bool>,
    ) -> Result<()> {
        self.complete(from)?;
        self.complete(to)?;
        // If the smaller of the two disks ends within a block, that block always counts as changed: both may map the
        // same block, although a part of the block lies past the end of the smaller disk.
        let ends = self.with_catalog(|catalog| Ok((catalog.get(from)?.capacity, catalog.get(to)?.capacity)))?;
        let block = backend::BLOCK_SIZE as u64;
        let end = ends.0.min(ends.1);
        let mut tail = (ends.0 != ends.1 && !end.is_multiple_of(block)).then_some(end / block);
        let mut at = range.start;
        let mut last: Option<Changed> = None;
        while at < range.end {
            let part = at..range.end.min(at + STRIDE);
            at = part.end;
            let looked = self.meta.look(|meta| {
                let mut found = Vec::new();
                let (a, b) = (meta.catalog.whole(from)?.root, meta.catalog.whole(to)?.root);
                if a == b && ends.0 == ends.1 && at < range.end {
                    // Both disks or snapshots have the same tree and the same end, so no range can differ.
                    return Ok(None);
                }
                // A shrink that a crash cut off leaves blocks past the end of the disk. They are no content of it.
                let end_of_both = end.div_ceil(block).clamp(part.start, part.end);
                let (longer_a, longer_b) = (a.filter(|_| ends.0 > ends.1), b.filter(|_| ends.1 > ends.0));
                let mut each = |extent: tree::DiffExtent| -> Result<()> {
                    found.push(Changed { logical: extent.logical, blocks: extent.blocks, zero: !extent.in_b });
                    Ok(())
                };
                let mut effects = Effects::default();
                let mut nodes = meta.nodes(&mut effects);
                let compared = tree::diff(&mut nodes, a, b, part.start..end_of_both, &mut each)
                    .and_then(|()| tree::diff(&mut nodes, longer_a, longer_b, end_of_both..part.end, &mut each));
                if compared.is_err() && meta.pages.absent() > 0 {
                    meta.survey_difference([a, b], &part);
                }
                compared?;
                if let Some(tail) = tail.filter(|tail| part.contains(tail)) {
                    let mut spans = Vec::new();
                    meta.spans(if ends.0 < ends.1 { b } else { a }, tail..tail + 1, &mut spans)?;
                    let data = spans.iter().any(|span| span.condition == Condition::Data);
                    let after = found.partition_point(|changed| changed.logical <= tail);
                    let known = after > 0 && found[after - 1].logical + found[after - 1].blocks > tail;
                    if data && !known {
                        found.insert(after, Changed { logical: tail, blocks: 1, zero: false });
                    }
                }
                Ok(Some(found))
            })?;
            let Some(found) = looked else { break };
            tail = tail.filter(|tail| !part.contains(tail));
            for changed in found {
                match &mut last {
                    Some(before)
                        if before.zero == changed.zero && before.logical + before.blocks == changed.logical =>
                    {
                        before.blocks += changed.blocks;
                    }
                    _ => {
                        if let Some(before) = last.replace(changed)
                            && !each(before)?
                        {
                            return Ok(());
                        }
                    }
                }
            }
        }
        if let Some(before) = last {
            each(before)?;
        }
        Ok(())
    }

    /// Counts the unwritten blocks of a disk in its first `extents` extents, so that the count takes a bounded time.
    pub fn count_unwritten(&self, object: u64, extents: usize) -> Result<u64> {
        let (mut unwritten, mut left) = (0, extents);
        self.walk_extents(object, &|_, _| Ok(()), &mut |found, ()| {
            left = left.saturating_sub(found.len().max(1));
            unwritten += found.iter().filter(|extent| extent.unwritten).map(|extent| extent.blocks).sum::<u64>();
            left > 0
        })?;
        Ok(unwritten)
    }

    /// Counts the blocks that a disk or snapshot maps.
    pub fn count_blocks(&self, object: u64) -> Result<BlockCounts> {
        let mut counts = BlockCounts::default();
        let mut last = (u64::MAX, u64::MAX);
        let count_exclusive = |meta: &mut Meta, extents: &[Extent]| {
            let mut exclusive = 0;
            // Blocks of packs do not count: their references do not tell whether another tree has the pack.
            for extent in extents.iter().filter(|extent| !extent.shared_path) {
                for block in extent.physical..extent.physical + extent.blocks {
                    exclusive += u64::from(meta.entry(block)?.references == 1);
                }
            }
            Ok(exclusive)
        };
        self.walk_extents(object, &count_exclusive, &mut |extents, exclusive| {
            counts.exclusive += exclusive;
            for extent in extents {
                counts.allocated += extent.blocks;
                counts.unwritten += if extent.unwritten { extent.blocks } else { 0 };
                counts.extents += u64::from(last != (extent.logical, extent.physical));
                last = (extent.logical + extent.blocks, extent.physical + extent.blocks);
            }
            true
        })?;
        Ok(counts)
    }

    /// Calls `each` with the extents of a disk or snapshot, stride by stride, and with the result of `examine` for
    /// these extents, until `each` returns false. `examine` runs under the metadata lock, and again if it needs a page
    /// that is not in memory.
    fn walk_extents<T>(
        &self,
        object: u64,
        examine: &dyn Fn(&mut Meta, &[Extent]) -> Result<T>,
        each: &mut dyn FnMut(&[Extent], T) -> bool,
    ) -> Result<()> {
        self.complete(object)?;
        let capacity = self.with_catalog(|catalog| catalog.get(object).map(|object| object.capacity))?;
        let end = capacity.div_ceil(backend::BLOCK_SIZE as u64);
        let mut at = 0;
        while at < end {
            let stride = end.min(at + STRIDE);
            let looked = self.meta.look(|meta| {
                let Some(root) = meta.catalog.whole(object)?.root else { return Ok(None) };
                let mut effects = Effects::default();
                meta.surveyed(root, at..stride, Aim::Read, |meta| {
                    let mut found = Vec::new();
                    let none = Holds::default();
                    tree::lookup_exclusive(&mut meta.current_nodes(&none, &mut effects), root, at..stride, &mut found)?;
                    // After the last mapping, the rest of the disk is skipped in one step.
                    let next =
                        if found.is_empty() { meta.next_mapped(root, stride, end)?.unwrap_or(end) } else { stride };
                    let examined = examine(meta, &found)?;
                    Ok(Some((next, found, examined)))
                })
            })?;
            let Some((next, found, examined)) = looked else { break };
            at = next;
            if !each(&found, examined) {
                break;
            }
        }
        Ok(())
    }

    /// Sizes of the store.
    pub fn counts(&self) -> StoreCounts {
        self.meta.lock().counts()
    }

    /// By how many data blocks writes, zeroes and discards have made each disk grow since the store was opened. Blocks
    /// that the deletion of disks and snapshots frees are not subtracted.
    pub fn growth(&self) -> Vec<(u64, i64)> {
        self.meta.lock().growth.iter().map(|(disk, blocks)| (*disk, *blocks)).collect()
    }

    /// Bytes that all files of the store occupy in the file system.
    pub fn allocated_bytes(&self) -> Result<u64> {
        use crate::IoContext;
        let mut sum = self.files.allocated()? + self.log.ring() + 2 * backend::BLOCK_SIZE as u64;
        for file in self.meta.files() {
            sum += file.allocated().during(|| "measuring a metadata file".into())?;
        }
        Ok(sum)
    }
}

impl Meta {
    /// Looks up a range of a tree. If a page is missing, a survey also records all other missing pages that it can
    /// find.
    fn surveyed<T>(
        &mut self,
        root: NodeId,
        range: Range<u64>,
        aim: Aim,
        look: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let found = look(self);
        if found.is_err() && self.pages.absent() > 0 {
            self.survey(Some(root), range, aim);
        }
        found
    }

    /// The first mapped block at or after `from`, found by walking nodes instead of single blocks.
    pub(super) fn next_mapped(&mut self, root: NodeId, from: u64, end: u64) -> Result<Option<u64>> {
        let mut width = STRIDE;
        let mut at = from;
        while at < end {
            let mut extents = Vec::new();
            let mut effects = Effects::default();
            let until = end.min(at.saturating_add(width));
            tree::lookup(&mut self.nodes(&mut effects), root, at..until, &mut extents)?;
            if let Some(extent) = extents.first() {
                return Ok(Some(extent.logical));
            }
            at = until;
            width = width.saturating_mul(2);
        }
        Ok(None)
    }
}
