//! A native disk or snapshot as a device: maps byte ranges at any alignment to the store's blocks.

use super::{Capacity, Native};
use crate::device::{
    Allocation, BaseIdentity, Device, DirtyExtent, FlushTicket, Media, ReadPlan, Segment, StatusExtent, Verdict,
};
use backend::{BLOCK_SIZE, Buffer, SharedSlice};
use error::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Weak};
use store::Engine;
use store::engine::{Condition, Head, Part, Planned, Span};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes that one step of a prefetch loads into the page cache.
const PREFETCH_PIECE: u64 = 1 << 20;

/// The object that a device reads and writes.
pub(crate) enum Target {
    /// The head of a disk.
    Head(Arc<Head>),
    /// A snapshot.
    Snapshot(u64),
}

/// An open native disk or snapshot.
pub(crate) struct NativeDevice {
    pub engine: Arc<Engine>,
    pub target: Target,
    pub name: String,
    /// Whether the disk is thick, so that a discarded range stays allocated.
    pub thick: bool,
    /// The capacity, shared with other devices of the disk and updated by a resize.
    pub capacity: Arc<Capacity>,
    /// The native disks of the datastore, which carry out a resize of this device.
    pub native: Weak<Native>,
}

/// A byte range split into whole blocks and at most two partial blocks.
struct Cut {
    /// Partially covered blocks: block number, and the range of bytes within the block.
    partial: Vec<(u64, Range<usize>)>,
    /// Completely covered blocks.
    whole: Range<u64>,
}

/// Splits a byte range at block boundaries. If the range reaches to `capacity`, the last block counts as completely
/// covered.
fn cut(offset: u64, length: u64, capacity: u64) -> Cut {
    let mut end = offset + length;
    if end == capacity {
        end = end.next_multiple_of(BLOCK);
    }
    let (first, last) = (offset / BLOCK, end / BLOCK);
    let (from, to) = ((offset % BLOCK) as usize, (end % BLOCK) as usize);
    if first == last {
        return Cut { partial: vec![(first, from..to)], whole: first..first };
    }
    let mut partial = Vec::new();
    if from > 0 {
        partial.push((first, from..BLOCK_SIZE));
    }
    if to > 0 {
        partial.push((last, 0..to));
    }
    Cut { partial, whole: first + u64::from(from > 0)..last }
}

/// The segments of a planned read of a range of bytes.
fn read_plan(planned: Planned, offset: u64, length: usize) -> ReadPlan {
    let mut packs = BTreeSet::new();
    let segment = |part: &Part| match part {
        Part::Zero { length } => Segment::Zero { length: *length },
        Part::Memory(slice) | Part::Cached(slice) => Segment::Memory(slice.clone()),
        Part::Stored(stored) => Segment::Media(Media::new(Arc::clone(&stored.file), stored.offset, stored.length())),
        // A pack of which many blocks were overwritten has many parts. What is fetched is fetched for the first only.
        // [`Device::finish_read`] decodes the others from there.
        Part::Packed(packed) if !packs.insert(packed.fetched()) => Segment::Zero { length: packed.length() },
        Part::Packed(packed) => {
            let stored = &packed.stored;
            let media = Media::new(Arc::clone(&stored.file), stored.offset, stored.length());
            Segment::Media(Media { delivered: 0..packed.length(), may_lack_blocks: packed.may_lack_blocks(), ..media })
        }
    };
    ReadPlan {
        segments: planned.parts.iter().map(segment).collect(),
        skip: (offset % BLOCK) as usize,
        length,
        offset,
        guard: Some(Box::new(planned)),
    }
}

/// The bytes that were fetched for a segment.
fn fetched(plan: &ReadPlan, index: usize) -> &[u8] {
    match plan.segments.get(index) {
        Some(Segment::Media(media)) => media.fetched(),
        _ => &[],
    }
}

impl NativeDevice {
    fn id(&self) -> u64 {
        match &self.target {
            Target::Head(head) => head.id,
            Target::Snapshot(id) => *id,
        }
    }

    /// Finishes the packed parts of a read, and verifies all parts.
    fn finish_packed(&self, plan: &mut ReadPlan, planned: &Planned) -> Result<Verdict> {
        let mut packs = BTreeMap::new();
        for (index, part) in planned.parts.iter().enumerate() {
            if let Part::Packed(packed) = part {
                packs.entry(packed.fetched()).or_insert(index);
            }
        }
        let fetched = |index: usize| match planned.parts.get(index) {
            Some(Part::Packed(packed)) => fetched(plan, packs.get(&packed.fetched()).copied().unwrap_or(index)),
            _ => fetched(plan, index),
        };
        let replan = |block: u64| self.plan_blocks(block..block + 1);
        if !self.engine.verify(&self.name, plan.offset / BLOCK, planned, fetched, &replan)? {
            return Ok(Verdict::Again);
        }
        let mut decoded = Vec::new();
        for (index, part) in planned.parts.iter().enumerate() {
            if let Part::Packed(packed) = part {
                let mut content = Buffer::recycled(packed.length() / BLOCK_SIZE);
                let sums = packed.decode(&self.name, fetched(index), &mut content)?;
                self.engine.keep(planned, part, &content);
                decoded.push((index, content, sums));
            } else {
                self.engine.keep(planned, part, fetched(index));
            }
        }
        for (index, content, sums) in decoded {
            match &mut plan.segments[index] {
                Segment::Media(media) => (media.buffer, media.verified) = (Some(content), Some(sums)),
                other => {
                    let length = content.len();
                    *other = Segment::Memory(SharedSlice::new(Arc::new(content), 0..length));
                }
            }
        }
        Ok(Verdict::Good)
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        let capacity = self.capacity();
        match offset.checked_add(length) {
            Some(end) if end <= capacity => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!("{}: {length} bytes at offset {offset} lie past its capacity of {capacity} bytes", self.name),
            )),
        }
    }

    fn writable(&self, offset: u64, length: u64) -> Result<&Head> {
        match &self.target {
            Target::Head(head) => {
                self.check_range(offset, length)?;
                Ok(head)
            }
            Target::Snapshot(_) => Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{} is a snapshot and never changes; clone it to write", self.name),
            )),
        }
    }

    /// The blocks of a range of bytes.
    fn blocks(&self, offset: u64, length: usize) -> Result<Range<u64>> {
        self.check_range(offset, length as u64)?;
        Ok(offset / BLOCK..(offset + length as u64).div_ceil(BLOCK))
    }

    fn plan_blocks(&self, range: Range<u64>) -> Result<Planned> {
        match &self.target {
            Target::Head(head) => self.engine.plan_head(head, range),
            Target::Snapshot(id) => self.engine.plan_snapshot(*id, range),
        }
    }

    fn zero_partial(&self, head: &Head, partial: &[(u64, Range<usize>)]) -> Result<()> {
        for (block, bytes) in partial {
            self.engine.modify_block(head, &self.name, *block, &|content| content[bytes.clone()].fill(0))?;
        }
        Ok(())
    }

    fn finish(&self, head: &Head, fua: bool) -> Result<()> {
        match fua {
            true => self.engine.flush_write(head).map_err(|error| error.context(&self.name)),
            false => Ok(()),
        }
    }

    fn spans(&self, range: Range<u64>, limit: usize) -> Result<Vec<Span>> {
        match &self.target {
            Target::Head(head) => self.engine.spans_head(head, range, limit),
            Target::Snapshot(id) => self.engine.spans_snapshot(*id, range, limit),
        }
    }
}

impl Device for NativeDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity(&self) -> u64 {
        self.capacity.get()
    }

    fn read_only(&self) -> bool {
        matches!(self.target, Target::Snapshot(_))
    }

    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        let planned = self.plan_blocks(self.blocks(offset, length)?)?;
        Ok(read_plan(planned, offset, length))
    }

    fn try_plan_read(&self, offset: u64, length: usize) -> Result<Option<ReadPlan>> {
        // A read of a snapshot first waits until the snapshot's writes are written back, so reads of snapshots are
        // planned one by one.
        let Target::Head(head) = &self.target else { return self.plan_read(offset, length).map(Some) };
        let planned = self.engine.plan_head_at_once(head, self.blocks(offset, length)?)?;
        Ok(planned.map(|planned| read_plan(planned, offset, length)))
    }

    fn load_for_read(&self, offset: u64, length: usize) -> Result<()> {
        match &self.target {
            Target::Head(head) => self.engine.load_for_head(head, self.blocks(offset, length)?),
            Target::Snapshot(_) => Ok(()),
        }
    }

    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        let planned = plan.guard.take().and_then(|guard| guard.downcast::<Planned>().ok());
        let mut planned = planned.ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("{}: a read was finished that this disk did not plan", self.name))
        })?;
        if planned.has_packed() {
            if self.finish_packed(plan, &planned)? == Verdict::Again {
                return Ok(Verdict::Again);
            }
        } else {
            let fetched = |index: usize| fetched(plan, index);
            let replan = |block: u64| self.plan_blocks(block..block + 1);
            if !self.engine.verify(&self.name, plan.offset / BLOCK, &planned, fetched, &replan)? {
                return Ok(Verdict::Again);
            }
            for (index, part) in planned.parts.iter().enumerate() {
                self.engine.keep(&planned, part, fetched(index));
            }
        }
        for (segment, part) in plan.segments.iter_mut().zip(&mut planned.parts) {
            if let (Segment::Media(media), Part::Stored(stored)) = (segment, part) {
                media.verified = Some(std::mem::take(&mut stored.checksums));
            }
        }
        Ok(Verdict::Good)
    }

    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        let head = self.writable(offset, data.len() as u64)?;
        if data.is_empty() {
            return self.finish(head, fua);
        }
        // With capacity 0, the last block never counts as completely covered, because the data does not cover the bytes
        // after the end of the disk.
        let parts = cut(offset, data.len() as u64, 0);
        let bytes_of = |position: u64| (position - offset) as usize;
        if !parts.whole.is_empty() {
            let whole = data.slice(bytes_of(parts.whole.start * BLOCK)..bytes_of(parts.whole.end * BLOCK));
            // The store buffers whole blocks of memory, and writes them to the file without copying them.
            let whole = if whole.lead() == 0 { whole } else { SharedSlice::copy_of(&whole) };
            self.engine.write_blocks(head, parts.whole.start, whole)?;
        }
        for (block, bytes) in parts.partial {
            let from = bytes_of(block * BLOCK + bytes.start as u64);
            let source = &data[from..from + bytes.len()];
            self.engine
                .modify_block(head, &self.name, block, &|content| content[bytes.clone()].copy_from_slice(source))?;
        }
        self.finish(head, fua)
    }

    fn pressure(&self) -> u32 {
        self.engine.buffer_percent()
    }

    /// Partial blocks, and blocks of a thick disk, are overwritten with zeros. If the file system has no space for
    /// that, they keep their content, because a discard does not fail for lack of space.
    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        let head = self.writable(offset, length)?;
        if length == 0 {
            return self.finish(head, fua);
        }
        let parts = cut(offset, length, self.capacity());
        unless_full(self.zero_partial(head, &parts.partial))?;
        if self.thick {
            unless_full(self.engine.zero_blocks(head, parts.whole))?;
        } else {
            self.engine.discard_blocks(head, parts.whole)?;
        }
        self.finish(head, fua)
    }

    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()> {
        let head = self.writable(offset, length)?;
        if length == 0 {
            return self.finish(head, fua);
        }
        let parts = cut(offset, length, self.capacity());
        self.zero_partial(head, &parts.partial)?;
        if !parts.whole.is_empty() {
            if allocate || self.thick {
                self.engine.zero_blocks(head, parts.whole)?;
            } else {
                self.engine.discard_blocks(head, parts.whole)?;
            }
        }
        self.finish(head, fua)
    }

    fn begin_flush(&self) -> Result<FlushTicket> {
        Ok(FlushTicket { number: self.engine.acknowledged(), ..FlushTicket::default() })
    }

    fn finish_flush(&self, ticket: FlushTicket) -> Result<()> {
        let flushed = match &self.target {
            Target::Head(head) if !ticket.of_reader => self.engine.flush_head(head, ticket.number),
            Target::Head(_) | Target::Snapshot(_) => self.engine.flush_to(ticket.number),
        };
        flushed.map_err(|error| error.context(&self.name))
    }

    fn losses(&self) -> u64 {
        match &self.target {
            Target::Head(head) => self.engine.lost_writes(head),
            Target::Snapshot(_) => 0,
        }
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.check_range(offset, length)?;
        let mut at = offset;
        while at < offset + length {
            let piece = PREFETCH_PIECE.min(offset + length - at);
            self.read(at, piece as usize)?;
            at += piece;
        }
        Ok(())
    }

    fn resize(&self, capacity: u64) -> Result<()> {
        self.writable(0, 0)?;
        let native = self
            .native
            .upgrade()
            .ok_or_else(|| Error::new(ErrorKind::Stopped, "the datastore was closed while the disk was open"))?;
        native.resize_by_id(self.id(), capacity, false).map(|_| ())
    }

    fn mapped_by_resize(&self, capacity: u64) -> Result<u64> {
        let old = self.capacity();
        if self.thick {
            return Ok(capacity.saturating_sub(old));
        }
        // The rest of the last block is mapped if the block is.
        let rest = capacity.min(old.next_multiple_of(BLOCK)).saturating_sub(old);
        let is_mapped = rest > 0 && self.status(old - 1, 1, 1)?.iter().any(|last| last.allocation != Allocation::Hole);
        Ok(if is_mapped { rest } else { 0 })
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        self.check_range(offset, length)?;
        let end = offset + length;
        let spans = self.spans(offset / BLOCK..end.div_ceil(BLOCK), limit)?;
        Ok(spans
            .iter()
            .map(|span| {
                let from = (span.logical * BLOCK).max(offset);
                let to = ((span.logical + span.blocks) * BLOCK).min(end);
                let allocation = match span.condition {
                    Condition::Data => Allocation::Data,
                    Condition::Zero => Allocation::Zero,
                    Condition::Hole => Allocation::Hole,
                };
                StatusExtent { length: to - from, allocation }
            })
            .collect())
    }

    fn dirty_bases(&self) -> Vec<String> {
        match &self.target {
            Target::Head(head) => self.engine.with_catalog(|catalog| {
                catalog.snapshots_of(head.id).filter(|o| !o.incomplete).map(|snapshot| snapshot.name.clone()).collect()
            }),
            Target::Snapshot(_) => Vec::new(),
        }
    }

    fn base_identity(&self, base: &str) -> Option<BaseIdentity> {
        let id = self.engine.with_catalog(|catalog| catalog.snapshot(self.id(), base).map(|object| object.id))?;
        Some(BaseIdentity { number: id, created: 0 })
    }

    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        self.check_range(offset, length)?;
        let id = self.id();
        let from = self.engine.with_catalog(|catalog| catalog.snapshot(id, base).map(|object| object.id)).ok_or_else(
            || Error::new(ErrorKind::NotFound, format!("{}: there is no snapshot '{base}' to compare with", self.name)),
        )?;
        let end = offset + length;
        let mut out: Vec<DirtyExtent> = Vec::new();
        let mut at = offset;
        let mut full = false;
        self.engine.diff(from, id, offset / BLOCK..end.div_ceil(BLOCK), &mut |changed| {
            let start = (changed.logical * BLOCK).max(offset);
            let stop = ((changed.logical + changed.blocks) * BLOCK).min(end);
            if start > at {
                out.push(DirtyExtent { length: start - at, dirty: false });
            }
            match out.last_mut() {
                Some(last) if last.dirty => last.length += stop - start,
                _ => out.push(DirtyExtent { length: stop - start, dirty: true }),
            }
            at = stop;
            full = out.len() > limit;
            Ok(!full)
        })?;
        if !full && at < end {
            out.push(DirtyExtent { length: end - at, dirty: false });
        }
        out.truncate(limit);
        Ok(out)
    }
}

/// Ignores an error for lack of space: the affected blocks keep their content.
fn unless_full(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NoSpace => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_and_whole_blocks_cover_the_range_once() {
        for (offset, length, capacity) in
            [(0, 512, 1 << 20), (512, 4096, 1 << 20), (4096, 8192, 1 << 20), (5000, 1, 5001)]
        {
            let parts = cut(offset, length, capacity);
            let partial: u64 = parts.partial.iter().map(|(_, bytes)| bytes.len() as u64).sum();
            let whole = (parts.whole.end - parts.whole.start) * BLOCK;
            assert!(partial + whole >= length && partial + whole < length + BLOCK);
        }
        let parts = cut(4096, 100, 4196);
        assert!(parts.partial.is_empty());
        assert_eq!(parts.whole, 1..2);
    }
}
