//! Reclaiming: discarding the blocks that the guest of a disk does not use.
//!
//! 1. No client has the disk open for writing, and none can open it, until the reclaiming has ended
//!    ([`crate::Datastore::reclaim`]): a free map that a guest changes meanwhile is out of date.
//! 2. A block is discarded only if it lies completely in a free range of one file system, or if its content is zero. A
//!    discarded block reads as zero or keeps its content, so the second kind never changes what the disk reads as.
//! 3. Each discard is complete in itself. Interrupted reclaiming therefore loses nothing, and the next one continues
//!    with what is still mapped.
//! 4. Snapshots are not changed. A block that a snapshot shares is unmapped in the head only, and its space returns
//!    when the snapshot is deleted.

use crate::device::{Allocation, Device};
use crate::stride::Stride;
use crate::zeros::is_zero;
use error::{Error, ErrorKind, Result};
use freemap::{Content, FileSystem, Partition, Scheme, Source, Volume};
use serde::{Deserialize, Serialize};
use std::ops::{ControlFlow, Range};
use work::{Progress, Throttle};

/// Most extents of one query of the map.
const EXTENTS: usize = 4096;
/// Most bytes of one discard, between two checks for cancellation.
const DISCARD_MAX: u64 = 64 << 20;
/// Bytes that are read at a time in the search for zeros.
const PIECE: u64 = 256 << 10;

/// How the blocks that are not used were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReclaimMethod {
    /// In the free map of a file system.
    FreeMap,
    /// By their content, which is zero.
    Zeros,
}

/// A part of a disk: a partition, a disk without partitions, or the space between partitions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimPart {
    /// The number of the partition; 0 for the content of a disk without partitions, `None` for space between
    /// partitions.
    pub partition: Option<u32>,
    /// The first byte on the disk.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// What the part contains: a file system, or something else that was recognised.
    pub content: Option<String>,
    /// Size of the file system, as it states it.
    pub size: Option<u64>,
    /// Bytes that are free according to the file system.
    pub free: Option<u64>,
    /// How unused blocks were found.
    pub method: ReclaimMethod,
    /// Why the free map was not used.
    pub reason: Option<String>,
    /// Bytes that were mapped and are not used. They were given back, or would be given back.
    pub reclaimed: u64,
    /// Number of the units (block groups, allocation groups) of the file system that count as in use because
    /// something in them is inconsistent.
    pub doubted: u64,
    /// What is inconsistent in the first of these units.
    pub doubts: Vec<String>,
}

/// What was reclaimed of a disk, or what would be reclaimed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimReport {
    /// The disk.
    pub disk: String,
    /// Whether nothing was changed.
    pub dry_run: bool,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes that the disk mapped before.
    pub mapped: u64,
    /// How the disk is divided: `whole`, `mbr`, `gpt`, or `unknown`.
    pub scheme: String,
    /// The parts, in order of their place.
    pub parts: Vec<ReclaimPart>,
    /// Bytes that were given back, or would be given back. Of these, a snapshot may keep a part.
    pub reclaimed: u64,
    /// Number of snapshots of the disk, which keep the blocks that they share with it.
    pub snapshots: u64,
    /// For a linked clone, the `disk@snapshot` on which it is based, which keeps the blocks that it shares with the
    /// disk.
    pub origin: Option<String>,
}

/// The disk as the parsers of free maps read it.
struct Disk<'a>(&'a dyn Device);

impl Source for Disk<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let plan = self.0.read_plan(offset, buffer.len())?;
        let mut at = 0;
        for slice in plan.slices() {
            buffer[at..at + slice.len()].copy_from_slice(slice);
            at += slice.len();
        }
        Ok(())
    }
}

/// Reclaiming of one disk.
pub(crate) struct Reclaim<'a> {
    device: &'a dyn Device,
    /// The smallest range that can be given back, in bytes.
    unit: u64,
    dry_run: bool,
    throttle: Throttle<&'a dyn Progress>,
    stride: Stride,
}

/// What is done with a part.
struct Task<'a> {
    part: ReclaimPart,
    file_system: Option<FileSystem<'a>>,
}

impl<'a> Reclaim<'a> {
    pub fn new(device: &'a dyn Device, unit: u64, dry_run: bool, progress: &'a dyn Progress) -> Self {
        Self { device, unit, dry_run, throttle: Throttle::new(progress), stride: Stride::default() }
    }

    /// Looks at the whole disk, and gives back what is not used. Returns the scheme of the partitions and the parts.
    pub fn run(mut self) -> Result<(String, Vec<ReclaimPart>)> {
        let device = self.device;
        let disk = Disk(device);
        let (scheme, tasks) = tasks(&disk, device.capacity())?;
        let mut parts = Vec::with_capacity(tasks.len());
        for Task { mut part, file_system } in tasks {
            match file_system {
                Some(file_system) => self.by_map(&mut part, &file_system)?,
                None => part.reclaimed = self.by_zeros(part.offset..part.offset + part.length)?,
            }
            parts.push(part);
        }
        if !self.dry_run {
            device.flush()?;
        }
        self.step(device.capacity(), 0)?;
        Ok((scheme, parts))
    }

    /// Reports progress up to a place of the disk.
    fn step(&self, at: u64, moved: u64) -> Result<()> {
        match self.throttle.step(at, self.device.capacity(), moved) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                let text = format!(
                    "{}: stopped on request; what was not used and is given back already reads as zeros, the rest of \
                     the disk is unchanged",
                    self.device.name()
                );
                Err(Error::new(ErrorKind::Interrupted, text))
            }
        }
    }

    /// Gives back the free ranges of a file system.
    fn by_map(&mut self, part: &mut ReclaimPart, file_system: &FileSystem<'_>) -> Result<()> {
        let start = part.offset;
        let mut reclaimed = 0;
        let summary = file_system.free_ranges(&mut |range| {
            let whole = inwards(start + range.start..start + range.end, self.unit);
            self.step(start + range.start, 0)?;
            reclaimed += self.give_back(whole)?;
            Ok(())
        })?;
        part.reclaimed = reclaimed;
        part.free = Some(summary.free);
        part.doubted = summary.doubted;
        part.doubts = summary.doubts;
        Ok(())
    }

    /// Unmaps what is mapped of a range that begins and ends with a unit. Returns the bytes that were mapped.
    fn give_back(&mut self, range: Range<u64>) -> Result<u64> {
        let mut sum = 0;
        self.each_mapped(range, |this, mapped, _| {
            sum += mapped.end - mapped.start;
            this.discard(mapped)
        })?;
        Ok(sum)
    }

    /// Calls `each` for the mapped extents of a range.
    fn each_mapped(
        &mut self,
        range: Range<u64>,
        mut each: impl FnMut(&mut Self, Range<u64>, Allocation) -> Result<()>,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let device = self.device;
            let extents = self.stride.ask(range.end - at, |bytes| device.status(at, bytes, EXTENTS))?;
            let before = at;
            for extent in extents {
                let end = at.saturating_add(extent.length).min(range.end);
                if extent.allocation != Allocation::Hole {
                    each(self, at..end, extent.allocation)?;
                }
                at = end;
            }
            if at == before {
                let text = format!("{}: block status has no extent at offset {at}", device.name());
                return Err(Error::new(ErrorKind::Io, text));
            }
            self.step(at, 0)?;
        }
        Ok(())
    }

    fn discard(&self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end && !self.dry_run {
            let length = DISCARD_MAX.min(range.end - at);
            self.device.discard(at, length, false)?;
            at += length;
            self.step(at, 0)?;
        }
        Ok(())
    }

    /// Unmaps the mapped units of a range whose content is zero. Returns their bytes.
    fn by_zeros(&mut self, range: Range<u64>) -> Result<u64> {
        let mut sum = 0;
        self.each_mapped(inwards(range, self.unit), |this, mapped, allocation| {
            match allocation {
                // Such a range reads as zeros already.
                Allocation::Zero => {
                    let whole = inwards(mapped, this.unit);
                    sum += whole.end - whole.start;
                    this.discard(whole)
                }
                _ => {
                    sum += this.zeros_of(mapped)?;
                    Ok(())
                }
            }
        })?;
        Ok(sum)
    }

    /// Unmaps the units of an extent with data whose content is zero.
    fn zeros_of(&mut self, extent: Range<u64>) -> Result<u64> {
        let whole = inwards(extent, self.unit);
        let piece = PIECE.max(self.unit);
        let (mut at, mut sum) = (whole.start, 0);
        let mut zeros = at..at;
        while at < whole.end {
            let length = piece.min(whole.end - at);
            let content = match self.device.read(at, length as usize) {
                Ok(content) => content,
                // A damaged block is left as it is: a scrub or a backup may restore it.
                Err(error) if error.kind() == ErrorKind::Corrupt => vec![0xFF; length as usize],
                Err(error) => return Err(error),
            };
            for unit in content.chunks(self.unit as usize) {
                if is_zero(unit) {
                    zeros.end = at + unit.len() as u64;
                } else {
                    sum += zeros.end - zeros.start;
                    self.discard(zeros)?;
                    zeros = at + unit.len() as u64..at + unit.len() as u64;
                }
                at += unit.len() as u64;
            }
            self.step(at, length)?;
        }
        sum += zeros.end - zeros.start;
        self.discard(zeros)?;
        Ok(sum)
    }
}

/// The largest part of a range that begins and ends with a unit; an empty range if it contains no unit.
fn inwards(range: Range<u64>, unit: u64) -> Range<u64> {
    let start = range.start.checked_next_multiple_of(unit).unwrap_or(range.end);
    let end = range.end / unit * unit;
    if start < end { start..end } else { start..start }
}

/// The parts of a disk with what is in them.
fn tasks<'a>(disk: &'a Disk<'_>, capacity: u64) -> Result<(String, Vec<Task<'a>>)> {
    let (scheme, layout) = match freemap::partitions(disk, capacity)? {
        Ok(layout) => (scheme_name(layout.scheme), layout),
        Err(reason) => {
            let part = ReclaimPart { reason: Some(reason), ..unused(Some(0), 0..capacity) };
            return Ok(("unknown".to_owned(), vec![Task { part, file_system: None }]));
        }
    };
    let mut tasks = Vec::new();
    let mut end = 0;
    for Partition { number, bytes, unsuited } in &layout.partitions {
        tasks.extend(gap(end..bytes.start));
        end = bytes.end;
        let mut part = unused(Some(*number), bytes.clone());
        let volume = Volume::new(disk, bytes.start, bytes.end - bytes.start);
        let content = match (freemap::examine(&volume)?, unsuited) {
            (Content::FileSystem(file_system), Some(reason)) => {
                Content::Other { name: Some(file_system.name().to_owned()), reason: reason.clone() }
            }
            (content, _) => content,
        };
        let file_system = match content {
            Content::FileSystem(file_system) => {
                part.content = Some(file_system.name().to_owned());
                part.size = Some(file_system.size());
                part.method = ReclaimMethod::FreeMap;
                Some(file_system)
            }
            Content::Other { name, reason } => {
                (part.content, part.reason) = (name, Some(reason));
                None
            }
        };
        tasks.push(Task { part, file_system });
    }
    tasks.extend(gap(end..capacity));
    refuse_hibernated(&mut tasks);
    Ok((scheme.to_owned(), tasks))
}

/// A hibernated system continues with file systems as it knows them from its memory, so no map of its disk is used.
fn refuse_hibernated(tasks: &mut [Task<'_>]) {
    let hibernated = |task: &Task<'_>| task.part.content.as_deref().is_some_and(|name| name.contains("hibernated"));
    if !tasks.iter().any(hibernated) {
        return;
    }
    for task in tasks.iter_mut().filter(|task| task.file_system.is_some()) {
        task.file_system = None;
        task.part.method = ReclaimMethod::Zeros;
        task.part.reason = Some("another partition contains a hibernated system".to_owned());
    }
}

fn scheme_name(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::Whole => "whole",
        Scheme::Mbr => "mbr",
        Scheme::Gpt => "gpt",
    }
}

fn unused(partition: Option<u32>, bytes: Range<u64>) -> ReclaimPart {
    ReclaimPart {
        partition,
        offset: bytes.start,
        length: bytes.end - bytes.start,
        content: None,
        size: None,
        free: None,
        method: ReclaimMethod::Zeros,
        reason: None,
        reclaimed: 0,
        doubted: 0,
        doubts: Vec::new(),
    }
}

/// The space between two partitions.
fn gap(bytes: Range<u64>) -> Option<Task<'static>> {
    let reason = Some("it belongs to no partition".to_owned());
    (bytes.start < bytes.end).then(|| Task { part: ReclaimPart { reason, ..unused(None, bytes) }, file_system: None })
}

#[cfg(test)]
mod tests;
