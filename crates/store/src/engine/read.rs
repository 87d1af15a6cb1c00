//! Reading: asking the buffer and the map where blocks are, and verifying what the caller fetched.

use super::log::Cost;
use super::metadata::{Effects, Fetch};
use super::{Engine, Head, Meta};
use crate::buffer::{Content, DirtyPiece};
use crate::journal::Operation;
use crate::pages::PageKey;
use crate::space::Run;
use crate::sync::atomic::Ordering;
use crate::tree::{self, Aim, Extent, NodeId};
use crate::{Error, ErrorKind, IoContext, Result, checksum};
use backend::{BLOCK_SIZE, Buffer, File, SharedSlice};
use std::ops::Range;
use std::sync::Arc;

/// What noting the content of a suspect block costs.
const RESOLVE_COST: Cost = Cost { bytes: 32, pages: 3 };

/// A part of a planned read; always whole blocks.
pub enum Segment {
    /// Reads as zeros.
    Zero {
        /// Length in bytes.
        length: usize,
    },
    /// Held in memory: written a moment ago and not at home yet. Already verified.
    Memory(SharedSlice),
    /// On the medium.
    Media(Media),
}

/// A contiguous part of a data file that holds a segment.
pub struct Media {
    /// The data file.
    pub file: Arc<dyn File>,
    /// Byte offset in it: a multiple of 4 KiB here and in every file past the page cache, of 512 bytes elsewhere.
    pub offset: u64,
    /// Length in bytes: a multiple of 4 KiB here, of anything elsewhere.
    pub length: usize,
    /// Where the caller puts what it read: `length` bytes, rounded up to whole blocks.
    pub buffer: Option<Buffer>,
    /// CRC32C of each block as the table has it.
    pub checksums: Vec<u32>,
    /// Physical block number of the first block, for messages.
    pub block: u64,
}

/// What a verification found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every block is what the map says.
    Good,
    /// The range changed under the read: plan it again.
    Again,
}

/// Where a range of blocks is.
pub struct Planned {
    /// The parts in order.
    pub segments: Vec<Segment>,
    /// While it lives, no place named here is given to another owner.
    pub guard: Arc<()>,
}

impl Media {
    /// The bytes of the segment, once they were read.
    pub fn contents(&self) -> &[u8] {
        self.buffer.as_deref().map_or(&[], |bytes| &bytes[..self.length.min(bytes.len())])
    }
}

impl Segment {
    fn length(&self) -> usize {
        match self {
            Self::Zero { length } => *length,
            Self::Memory(slice) => slice.len(),
            Self::Media(media) => media.length,
        }
    }
}

impl Meta {
    /// Appends where `range` of the tree `root` is.
    fn plan(
        &mut self,
        files: &super::DataFiles,
        root: Option<NodeId>,
        range: Range<u64>,
        out: &mut Vec<(u64, Segment)>,
    ) -> Result<()> {
        let planned = self.plan_extents(files, root, range.clone(), out);
        if planned.is_err() && self.pages.absent() > 0 {
            // Not only what it stumbled over: all that can be known to be missed by now.
            self.survey(root, range, Aim::Read);
        }
        planned
    }

    fn plan_extents(
        &mut self,
        files: &super::DataFiles,
        root: Option<NodeId>,
        range: Range<u64>,
        out: &mut Vec<(u64, Segment)>,
    ) -> Result<()> {
        let mut extents: Vec<Extent> = Vec::new();
        if let Some(root) = root {
            let mut effects = Effects::default();
            tree::lookup(&mut self.nodes(&mut effects), root, range.clone(), &mut extents)?;
        }
        let mut at = range.start;
        for extent in extents {
            if at < extent.logical {
                out.push((at, Segment::Zero { length: (extent.logical - at) as usize * BLOCK_SIZE }));
            }
            at = extent.logical + extent.blocks;
            if extent.unwritten {
                out.push((extent.logical, Segment::Zero { length: extent.blocks as usize * BLOCK_SIZE }));
            } else {
                self.plan_run(files, extent.logical, Run { start: extent.physical, blocks: extent.blocks }, out)?;
            }
        }
        if at < range.end {
            out.push((at, Segment::Zero { length: (range.end - at) as usize * BLOCK_SIZE }));
        }
        Ok(())
    }

    /// A run of data: from memory where its payload is not home yet, from the medium elsewhere.
    fn plan_run(
        &mut self,
        files: &super::DataFiles,
        logical: u64,
        run: Run,
        out: &mut Vec<(u64, Segment)>,
    ) -> Result<()> {
        let mut block = run.start;
        let end = run.start + run.blocks;
        while block < end {
            let next = if self.logged.is_empty() {
                None
            } else {
                self.logged.range(block..end).next().map(|(at, slice)| (*at, slice.clone()))
            };
            let until = next.as_ref().map_or(end, |(at, _)| *at);
            if block < until {
                let part = Run { start: block, blocks: until - block };
                let (file, offset) = files.locate(part)?;
                let mut checksums = Vec::with_capacity(part.blocks as usize);
                self.data.checksums(&mut self.pages, part, &mut checksums)?;
                let length = part.blocks as usize * BLOCK_SIZE;
                let at = logical + (block - run.start);
                // Two extents that lie next to each other on the medium are one read.
                if let Some((before, Segment::Media(last))) = out.last_mut()
                    && *before + (last.length / BLOCK_SIZE) as u64 == at
                    && last.block + (last.length / BLOCK_SIZE) as u64 == block
                    && last.offset + last.length as u64 == offset
                {
                    last.length += length;
                    last.checksums.append(&mut checksums);
                } else {
                    let media = Media { file, offset, length, buffer: None, checksums, block };
                    out.push((at, Segment::Media(media)));
                }
            }
            if let Some((at, slice)) = next {
                out.push((logical + (at - run.start), Segment::Memory(slice)));
            }
            block = until + 1;
        }
        Ok(())
    }
}

impl Engine {
    /// Finds where a range of blocks of a disk is.
    pub fn plan_head(&self, head: &Head, range: Range<u64>) -> Result<Planned> {
        let mut fetch = Fetch::default();
        loop {
            match self.try_plan_head(head, range.clone(), &mut fetch)? {
                Ok(planned) => return Ok(planned),
                Err(absent) => self.meta.load_pages(absent, &mut fetch)?,
            }
        }
    }

    /// The same with what is in memory; else what is not.
    fn try_plan_head(
        &self,
        head: &Head,
        range: Range<u64>,
        fetch: &mut Fetch,
    ) -> Result<std::result::Result<Planned, Vec<PageKey>>> {
        let buffer = head.lock_settled(&range);
        if buffer.gone {
            return Err(gone());
        }
        let mut parts: Vec<(u64, Segment)> = Vec::new();
        let mut gaps = Vec::new();
        if buffer.layers.is_empty() {
            gaps.push(range);
        } else {
            let mut pieces: Vec<DirtyPiece> = Vec::new();
            buffer.layers.overlay(range, &mut pieces, &mut gaps);
            parts.extend(pieces.into_iter().map(|piece| {
                let segment = match piece.entry.content {
                    Content::Data(slice, _) => Segment::Memory(slice),
                    Content::Unmapped | Content::Zero => {
                        Segment::Zero { length: piece.entry.blocks as usize * BLOCK_SIZE }
                    }
                };
                (piece.logical, segment)
            }));
        }
        let from_memory = !parts.is_empty();
        let mut meta = self.meta.lock();
        let guard = meta.freed.guard();
        if !gaps.is_empty() {
            let root = meta.catalog.get(head.id)?.root;
            let looked = fetch.look(&mut meta, |meta| {
                gaps.into_iter().try_for_each(|gap| meta.plan(&self.files, root, gap, &mut parts))
            });
            match looked {
                Ok(planned) => planned?,
                Err(absent) => return Ok(Err(absent)),
            }
        }
        drop(meta);
        drop(buffer);
        if from_memory {
            parts.sort_unstable_by_key(|(logical, _)| *logical);
        }
        Ok(Ok(Planned { segments: parts.into_iter().map(|(_, segment)| segment).collect(), guard }))
    }

    /// Finds where a range of blocks of a snapshot is. Waits while its last writes are on their way into the map.
    pub fn plan_snapshot(&self, snapshot: u64, range: Range<u64>) -> Result<Planned> {
        self.wait_sealed(snapshot)?;
        self.meta.look(|meta| {
            let guard = meta.freed.guard();
            let root = meta.catalog.get(snapshot)?.root;
            let mut parts = Vec::new();
            meta.plan(&self.files, root, range.clone(), &mut parts)?;
            Ok(Planned { segments: parts.into_iter().map(|(_, segment)| segment).collect(), guard })
        })
    }

    /// Verifies fetched segments of a range that starts at block `logical`; `replan` plans a block again.
    pub fn verify(
        &self,
        name: &str,
        logical: u64,
        segments: &mut [Segment],
        replan: &dyn Fn(u64) -> Result<Planned>,
    ) -> Result<Verdict> {
        let mut at = logical;
        for segment in segments.iter_mut() {
            let first = at;
            at += (segment.length() / BLOCK_SIZE) as u64;
            let Segment::Media(media) = segment else { continue };
            let Some(bytes) = media.buffer.as_deref() else {
                return Err(Error::new(ErrorKind::Io, format!("{name}: a read was finished before it was fetched")));
            };
            for (i, block) in bytes[..media.length].chunks_exact(BLOCK_SIZE).enumerate() {
                if checksum(block) != media.checksums[i] {
                    let here = Run { start: media.block + i as u64, blocks: 1 };
                    if self.mismatch(name, first + i as u64, here, media.checksums[i], replan)? == Verdict::Again {
                        return Ok(Verdict::Again);
                    }
                }
            }
        }
        Ok(Verdict::Good)
    }

    /// A block does not hash to what was planned: because it changed meanwhile, because a crash left it half written,
    /// or because the medium returned something else than was written.
    #[cold]
    fn mismatch(
        &self,
        name: &str,
        logical: u64,
        run: Run,
        planned: u32,
        replan: &dyn Fn(u64) -> Result<Planned>,
    ) -> Result<Verdict> {
        let now = replan(logical)?;
        match now.segments.first() {
            Some(Segment::Media(media)) if media.block == run.start && media.checksums.first() == Some(&planned) => {}
            _ => return Ok(Verdict::Again),
        }
        let (file, offset) = self.files.locate(run)?;
        let mut bytes = Buffer::zeroed(1);
        file.read_at(&mut bytes, offset).during(|| format!("{name}: reading block {}", run.start))?;
        let found = checksum(&bytes);
        if found == planned {
            return Ok(Verdict::Again);
        }
        // For what a suspect block is found to hold.
        let _grant = self.admit(RESOLVE_COST)?;
        let mut meta = self.meta.lock();
        let entry = meta.entry(run.start)?;
        if entry.checksum != planned {
            return Ok(Verdict::Again);
        }
        if entry.references == 0 {
            drop(meta);
            let still = replan(logical)?;
            // Freed a moment ago, or lost from the table while the map names it: that no plan will change.
            return match still.segments.first() {
                Some(Segment::Media(media)) if media.block == run.start => Err(Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "{name}: the table knows nothing of physical block {} at offset {}: it was damaged; run 'lamina \
                         check --repair', and restore what it cannot from a snapshot or backup",
                        run.start,
                        logical * BLOCK_SIZE as u64
                    ),
                )),
                _ => Ok(Verdict::Again),
            };
        }
        if meta.in_flight.contains(run.start) {
            drop(meta);
            // A write of it has begun, whose announcement may be in the journal already. One that failed never ends.
            self.check_running().map_err(|error| {
                let offset = logical * BLOCK_SIZE as u64;
                error
                    .context(format!("{name}: the 4 KiB at offset {offset} were being overwritten when writes stopped"))
            })?;
            return Ok(Verdict::Again);
        }
        if entry.suspect {
            // A write that was never acknowledged as durable was cut off here: what is left of it is the content now.
            let operation = Operation::Resolve { block: run.start, checksum: found };
            meta.enqueue(operation, 0)?;
            self.count_changes(&meta);
            self.counters.torn_blocks.fetch_add(1, Ordering::Relaxed);
            return Ok(Verdict::Again);
        }
        drop(meta);
        self.counters.checksum_errors.fetch_add(1, Ordering::Relaxed);
        tracing::error!(
            disk = name,
            offset = logical * BLOCK_SIZE as u64,
            block = run.start,
            expected = format!("{planned:08x}"),
            found = format!("{found:08x}"),
            "a block fails its checksum"
        );
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{name}: the 4 KiB at offset {} fail their checksum (expected {planned:08x}, found {found:08x} in \
                 physical block {}); restore them from a snapshot or backup",
                logical * BLOCK_SIZE as u64,
                run.start
            ),
        ))
    }

    /// Reads a range of blocks into memory at once.
    pub fn read_blocks(
        &self,
        name: &str,
        range: Range<u64>,
        plan: &dyn Fn(Range<u64>) -> Result<Planned>,
    ) -> Result<Buffer> {
        loop {
            let mut planned = plan(range.clone())?;
            for segment in &mut planned.segments {
                if let Segment::Media(media) = segment {
                    let mut buffer = Buffer::recycled(media.length / BLOCK_SIZE);
                    media
                        .file
                        .read_at(&mut buffer, media.offset)
                        .during(|| format!("{name}: reading {} bytes", media.length))?;
                    media.buffer = Some(buffer);
                }
            }
            let replan = |block: u64| plan(block..block + 1);
            if self.verify(name, range.start, &mut planned.segments, &replan)? == Verdict::Again {
                continue;
            }
            // The usual case, one run on the medium, needs no second copy.
            if let [Segment::Media(media)] = planned.segments.as_mut_slice()
                && let Some(buffer) = media.buffer.take()
            {
                return Ok(buffer);
            }
            let mut out = Buffer::zeroed((range.end - range.start) as usize);
            let mut at = 0;
            for segment in &planned.segments {
                let length = segment.length();
                match segment {
                    Segment::Zero { .. } => {}
                    Segment::Memory(slice) => out[at..at + length].copy_from_slice(slice),
                    Segment::Media(media) => {
                        if let Some(buffer) = &media.buffer {
                            out[at..at + length].copy_from_slice(&buffer[..length]);
                        }
                    }
                }
                at += length;
            }
            return Ok(out);
        }
    }
}

/// The error for a disk that was deleted or reverted while open.
pub(super) fn gone() -> Error {
    Error::new(ErrorKind::NotFound, "the disk was deleted or reverted meanwhile; open it again, if it still exists")
}
