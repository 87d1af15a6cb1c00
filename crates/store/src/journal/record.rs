//! Operations: the content of the journal, which replay applies.
//!
//! An operation is one code byte and little-endian fields. The data of blocks follows its operation unencoded. Decoding
//! checks every count against the rest of the body, so a damaged record is an error and never causes a huge allocation.

use crate::space::Run;
use crate::tree::{EXTENT_BLOCKS_MAX, LOGICAL_LIMIT, PHYSICAL_LIMIT, Packed, PhysicalRun, Source};
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, SharedSlice};
use std::ops::Range;

/// The longest run of one operation, in blocks (64 MiB).
pub const RUN_MAX: u64 = 16_384;

/// The bytes of a source in [`Operation::Pack`] and [`Operation::SharePack`].
const SOURCE_BYTES: usize = 13;
/// The most trees that one [`Operation::Pack`], [`Operation::Share`] or [`Operation::SharePack`] changes.
pub const PACK_OBJECTS_MAX: usize = 512;

/// A change of the datastore. Replay applies operations in the order of the journal.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the sentence over each operation names its fields")]
pub enum Operation {
    /// A disk maps logical blocks to a newly allocated run with these checksums. The content is durable.
    Map { disk: u64, logical: u64, run: Run, checksums: Vec<u32> },
    /// Like [`Operation::Map`], but the content is in the operation and not in the data file yet.
    MapData { disk: u64, logical: u64, run: Run, data: Vec<SharedSlice> },
    /// An in-place overwrite is about to begin: from this record on the blocks have old or new content, or a mixture.
    Overwrite { run: Run, checksums: Vec<u32> },
    /// Like [`Operation::Overwrite`], but the new content is in the operation, and replay writes it to the blocks.
    OverwriteData { run: Run, data: Vec<SharedSlice> },
    /// Overwrites announced before this journal position are all durable.
    Synced { position: u64 },
    /// A disk unmaps blocks.
    Unmap { disk: u64, logical: u64, blocks: u64 },
    /// A disk maps blocks to a run that counts as never written, so they read as zeros. With `fresh` the run is newly
    /// allocated, otherwise the disk has mapped the blocks of the run in this range before.
    Unwritten { disk: u64, logical: u64, run: Run, fresh: bool },
    /// A disk has written to unwritten blocks in place, with these checksums.
    Written { disk: u64, logical: u64, run: Run, checksums: Vec<u32> },
    /// The checksum of the content that a read found in a suspect block.
    Resolve { block: u64, checksum: u32 },
    /// The file system has allocated space for blocks, or is about to free it.
    Backed { run: Run, backed: bool },
    /// A new or changed object of the catalog. The record is encoded as in the catalog.
    Put { record: Vec<u8> },
    /// A snapshot is complete: it gets a reference on the root of its disk.
    Seal { snapshot: u64 },
    /// A new disk gets the content of a snapshot.
    Clone { snapshot: u64, record: Vec<u8> },
    /// A disk gets the content of a snapshot. The disk's old tree becomes the tree of a new trash object.
    Revert { disk: u64, snapshot: u64, trash: u64 },
    /// A disk or snapshot is deleted: it loses its name, and its tree is dropped in steps.
    Trash { object: u64 },
    /// The blocks may be overwritten in place from now on, until an [`Operation::Synced`] with a later position.
    Announce { run: Run },
    /// The checksums of blocks after in-place overwrites that are durable.
    Checksums { run: Run, checksums: Vec<u32> },
    /// `steps` nodes of the tree of a deleted object are visited and dropped.
    Drop { object: u64, steps: u32 },
    /// The trees of `objects` map the blocks of `sources`, which are plain or in other packs, to a newly allocated pack
    /// that contains them. The content of the pack is durable. Index 0 of the pack is logical block `logical`; it has
    /// `blocks` indexes.
    Pack { logical: u64, blocks: u64, run: Run, checksums: Vec<u32>, sources: Vec<Source>, objects: Vec<u64> },
    /// A disk maps logical blocks to a part of a newly allocated pack: `blocks` of them, from index `first` on. The
    /// content of the pack is durable.
    MapPack { disk: u64, logical: u64, blocks: u64, first: u8, run: Run, checksums: Vec<u32> },
    /// The trees of `objects` map logical blocks to the run, where they mapped them to the blocks from `from` on. Both
    /// have the same content, and that of the run is durable.
    Share { logical: u64, run: Run, from: u64, objects: Vec<u64> },
    /// The trees of `objects` map the blocks from `logical` on to a part of a pack that is in use: where they mapped
    /// them to `source`, which has the same content and names the part. The blocks of the pack have these checksums.
    SharePack { logical: u64, source: Source, run: Run, checksums: Vec<u32>, objects: Vec<u64> },
    /// A disk maps logical blocks to a run that is in use already, and has the content that was written to them. The
    /// content of the run is durable, and has these checksums.
    MapShared { disk: u64, logical: u64, run: Run, checksums: Vec<u32> },
    /// A disk maps logical blocks to a part of a pack that is in use already, and has the content that was written to
    /// them: `blocks` of them, from index `first` on. The blocks of the pack have these checksums.
    MapSharedPack { disk: u64, logical: u64, blocks: u64, first: u8, run: Run, checksums: Vec<u32> },
}

impl Operation {
    /// An upper limit of the operation's bytes in the journal, without the padding of the batch.
    pub fn size(&self) -> usize {
        match self {
            Self::MapData { run, .. } | Self::OverwriteData { run, .. } => run.blocks as usize * BLOCK_SIZE + 32,
            Self::Map { run, .. }
            | Self::MapPack { run, .. }
            | Self::MapShared { run, .. }
            | Self::MapSharedPack { run, .. }
            | Self::Overwrite { run, .. }
            | Self::Written { run, .. }
            | Self::Checksums { run, .. } => 32 + 4 * run.blocks as usize,
            Self::Put { record } | Self::Clone { record, .. } => 16 + record.len(),
            Self::Pack { run, sources, objects, .. } => {
                32 + 4 * run.blocks as usize + SOURCE_BYTES * sources.len() + 8 * objects.len()
            }
            Self::Share { objects, .. } => 32 + 8 * objects.len(),
            Self::SharePack { run, objects, .. } => 32 + 4 * run.blocks as usize + SOURCE_BYTES + 8 * objects.len(),
            _ => 32,
        }
    }

    /// Data blocks that must not be overwritten in place before the operation is durable. The announcement of an
    /// overwrite is appended at once, so replay would apply it before the operation. Operations that only allocate
    /// blocks are excluded, because such blocks are first written without an overwrite. Checksums of overwrites are
    /// excluded too: their announcement precedes them in the journal, and a new announcement waits until they are
    /// durable.
    pub fn names(&self) -> Option<Run> {
        match self {
            Self::Map { run, .. }
            | Self::MapData { run, .. }
            | Self::OverwriteData { run, .. }
            | Self::Written { run, .. }
            | Self::Unwritten { run, fresh: false, .. } => Some(*run),
            Self::Resolve { block, .. } => Some(Run { start: *block, blocks: 1 }),
            _ => None,
        }
    }

    /// For an operation that maps logical blocks of several objects to other physical blocks with the same content:
    /// these blocks and objects.
    pub fn redirects(&self) -> Option<(Range<u64>, &[u64])> {
        match self {
            Self::Pack { logical, blocks, objects, .. } => Some((*logical..logical.saturating_add(*blocks), objects)),
            Self::Share { logical, run, objects, .. } => Some((*logical..logical.saturating_add(run.blocks), objects)),
            Self::SharePack { logical, source, objects, .. } => {
                Some((*logical..logical.saturating_add(source.run.blocks), objects))
            }
            _ => None,
        }
    }

    /// For an operation that maps logical blocks of one disk to a run: the disk, these blocks, and the run.
    pub fn mapping(&self) -> Option<(u64, Range<u64>, Run)> {
        let (disk, logical, blocks, run) = match self {
            Self::Map { disk, logical, run, .. }
            | Self::MapData { disk, logical, run, .. }
            | Self::Unwritten { disk, logical, run, .. }
            | Self::MapShared { disk, logical, run, .. }
            | Self::Written { disk, logical, run, .. } => (disk, logical, run.blocks, run),
            Self::MapPack { disk, logical, blocks, run, .. }
            | Self::MapSharedPack { disk, logical, blocks, run, .. } => (disk, logical, *blocks, run),
            _ => return None,
        };
        Some((*disk, *logical..logical.saturating_add(blocks), *run))
    }

    /// The newly allocated run that the operation maps.
    pub fn new_run(&self) -> Option<Run> {
        match self {
            Self::Map { run, .. }
            | Self::MapData { run, .. }
            | Self::MapPack { run, .. }
            | Self::Pack { run, .. }
            | Self::Unwritten { run, fresh: true, .. } => Some(*run),
            _ => None,
        }
    }

    /// True if the operation may allocate nodes for a tree.
    pub fn changes_map(&self) -> bool {
        matches!(
            self,
            Self::Map { .. }
                | Self::MapData { .. }
                | Self::MapPack { .. }
                | Self::MapShared { .. }
                | Self::MapSharedPack { .. }
                | Self::Unmap { .. }
                | Self::Unwritten { .. }
                | Self::Written { .. }
                | Self::Pack { .. }
                | Self::Share { .. }
                | Self::SharePack { .. }
        )
    }
}

/// Collects the body of a batch. Payload is not copied: the body refers to it.
#[derive(Default)]
pub struct Writer {
    parts: Vec<Part>,
    current: Vec<u8>,
    length: usize,
}

enum Part {
    Bytes(Vec<u8>),
    Data(SharedSlice),
}

impl Writer {
    /// Number of bytes collected.
    pub fn len(&self) -> usize {
        self.length
    }

    /// True before the first operation.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The body, as a list of byte slices.
    pub fn finish(&mut self) -> Vec<&[u8]> {
        if !self.current.is_empty() {
            self.parts.push(Part::Bytes(std::mem::take(&mut self.current)));
        }
        self.parts
            .iter()
            .map(|part| match part {
                Part::Bytes(bytes) => bytes.as_slice(),
                Part::Data(slice) => slice,
            })
            .collect()
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.current.extend_from_slice(bytes);
        self.length += bytes.len();
    }

    fn u8(&mut self, value: u8) {
        self.bytes(&[value]);
    }

    fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    fn run(&mut self, run: Run) {
        debug_assert!(run.blocks <= RUN_MAX);
        self.u64(run.start);
        self.u32(run.blocks as u32);
    }

    fn checksums(&mut self, checksums: &[u32]) {
        for sum in checksums {
            self.u32(*sum);
        }
    }

    fn record(&mut self, record: &[u8]) {
        self.u32(record.len() as u32);
        self.bytes(record);
    }

    fn data(&mut self, data: &[SharedSlice]) {
        if !self.current.is_empty() {
            self.parts.push(Part::Bytes(std::mem::take(&mut self.current)));
        }
        for slice in data {
            self.length += slice.len();
            self.parts.push(Part::Data(slice.clone()));
        }
    }

    /// Appends a source of a pack. One that may be in another pack has two more fields, which are 0 for a plain one.
    fn source(&mut self, source: &Source, may_be_packed: bool) {
        self.u8(source.index);
        self.u64(source.run.physical);
        self.u16(source.run.blocks as u16);
        if may_be_packed {
            let Packed { index, stored } = source.packed.unwrap_or(Packed { index: 0, stored: 0 });
            self.u8(index);
            self.u8(stored);
        }
    }

    fn objects(&mut self, objects: &[u64]) {
        self.u16(objects.len() as u16);
        objects.iter().for_each(|object| self.u64(*object));
    }

    /// Appends an operation.
    pub fn push(&mut self, operation: &Operation) {
        match operation {
            Operation::Map { disk, logical, run, checksums } => {
                self.u8(1);
                self.u64(*disk);
                self.u64(*logical);
                self.run(*run);
                self.checksums(checksums);
            }
            Operation::MapData { disk, logical, run, data } => {
                self.u8(2);
                self.u64(*disk);
                self.u64(*logical);
                self.run(*run);
                self.data(data);
            }
            Operation::Overwrite { run, checksums } => {
                self.u8(3);
                self.run(*run);
                self.checksums(checksums);
            }
            Operation::OverwriteData { run, data } => {
                self.u8(4);
                self.run(*run);
                self.data(data);
            }
            Operation::Synced { position } => {
                self.u8(5);
                self.u64(*position);
            }
            Operation::Unmap { disk, logical, blocks } => {
                self.u8(6);
                self.u64(*disk);
                self.u64(*logical);
                self.u64(*blocks);
            }
            Operation::Unwritten { disk, logical, run, fresh } => {
                self.u8(7);
                self.u64(*disk);
                self.u64(*logical);
                self.run(*run);
                self.u8(u8::from(*fresh));
            }
            Operation::Written { disk, logical, run, checksums } => {
                self.u8(8);
                self.u64(*disk);
                self.u64(*logical);
                self.run(*run);
                self.checksums(checksums);
            }
            Operation::Resolve { block, checksum } => {
                self.u8(9);
                self.u64(*block);
                self.u32(*checksum);
            }
            Operation::Backed { run, backed } => {
                self.u8(10);
                self.run(*run);
                self.u8(u8::from(*backed));
            }
            Operation::Put { record } => {
                self.u8(11);
                self.record(record);
            }
            Operation::Seal { snapshot } => {
                self.u8(12);
                self.u64(*snapshot);
            }
            Operation::Clone { snapshot, record } => {
                self.u8(13);
                self.u64(*snapshot);
                self.record(record);
            }
            Operation::Revert { disk, snapshot, trash } => {
                self.u8(14);
                self.u64(*disk);
                self.u64(*snapshot);
                self.u64(*trash);
            }
            Operation::Trash { object } => {
                self.u8(15);
                self.u64(*object);
            }
            Operation::Announce { run } => {
                self.u8(17);
                self.run(*run);
            }
            Operation::Checksums { run, checksums } => {
                self.u8(18);
                self.run(*run);
                self.checksums(checksums);
            }
            Operation::Drop { object, steps } => {
                self.u8(16);
                self.u64(*object);
                self.u32(*steps);
            }
            Operation::Pack { logical, blocks, run, checksums, sources, objects } => {
                let repacks = sources.iter().any(|source| source.packed.is_some());
                self.u8(if repacks { 20 } else { 19 });
                self.u64(*logical);
                self.run(*run);
                self.checksums(checksums);
                self.u16(*blocks as u16);
                self.u16(sources.len() as u16);
                sources.iter().for_each(|source| self.source(source, repacks));
                self.objects(objects);
            }
            Operation::MapPack { disk, logical, blocks, first, run, checksums }
            | Operation::MapSharedPack { disk, logical, blocks, first, run, checksums } => {
                self.u8(if matches!(operation, Operation::MapPack { .. }) { 22 } else { 25 });
                self.u64(*disk);
                self.u64(*logical);
                self.run(*run);
                self.checksums(checksums);
                self.u16(*blocks as u16);
                self.u8(*first);
            }
            Operation::MapShared { disk, logical, run, checksums } => {
                self.u8(24);
                self.u64(*disk);
                self.u64(*logical);
                self.run(*run);
                self.checksums(checksums);
            }
            Operation::Share { logical, run, from, objects } => {
                self.u8(21);
                self.u64(*logical);
                self.run(*run);
                self.u64(*from);
                self.objects(objects);
            }
            Operation::SharePack { logical, source, run, checksums, objects } => {
                self.u8(23);
                self.u64(*logical);
                self.run(*run);
                self.checksums(checksums);
                self.source(source, true);
                self.objects(objects);
            }
        }
    }
}

/// Decodes the operations in the body of a batch.
pub struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads the operations in the body of a batch.
    pub fn new(body: &'a [u8]) -> Self {
        Self { left: body }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, left) = self.left.split_at_checked(count).ok_or_else(damaged)?;
        self.left = left;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn u16(&mut self) -> Result<u64> {
        Ok(u64::from(u16::from_le_bytes(self.take(2)?.try_into().map_err(|_| damaged())?)))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().map_err(|_| damaged())?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().map_err(|_| damaged())?))
    }

    fn run(&mut self) -> Result<Run> {
        let run = Run { start: self.u64()?, blocks: u64::from(self.u32()?) };
        if run.blocks == 0 || run.blocks > RUN_MAX || run.start > PHYSICAL_LIMIT - run.blocks {
            return Err(damaged());
        }
        Ok(run)
    }

    /// Checks the first logical block of a range of `blocks` blocks.
    fn logical(&self, logical: u64, blocks: u64) -> Result<u64> {
        if blocks == 0 || blocks > LOGICAL_LIMIT || logical > LOGICAL_LIMIT - blocks {
            return Err(damaged());
        }
        Ok(logical)
    }

    /// The disk, the first logical block and the run of an operation that has all three.
    fn mapped(&mut self) -> Result<(u64, u64, Run)> {
        let (disk, logical, run) = (self.u64()?, self.u64()?, self.run()?);
        Ok((disk, self.logical(logical, run.blocks)?, run))
    }

    fn checksums(&mut self, run: Run) -> Result<Vec<u32>> {
        (0..run.blocks).map(|_| self.u32()).collect()
    }

    fn data(&mut self, run: Run) -> Result<Vec<SharedSlice>> {
        let bytes = self.take(run.blocks as usize * BLOCK_SIZE)?;
        let buffer = backend::Buffer::copy_of(bytes);
        let length = buffer.len();
        Ok(vec![SharedSlice::new(buffer.into(), 0..length)])
    }

    fn record(&mut self) -> Result<Vec<u8>> {
        let length = self.u32()? as usize;
        Ok(self.take(length)?.to_vec())
    }

    /// A source of a pack, which may be in another pack only if the fields for that are there.
    fn source(&mut self, may_be_packed: bool) -> Result<Source> {
        let (index, physical, blocks) = (self.u8()?, self.u64()?, self.u16()?);
        let (old, stored) = if may_be_packed { (self.u8()?, self.u8()?) } else { (0, 0) };
        let packed = (stored > 0).then_some(Packed { index: old, stored });
        let source = Source { index, run: PhysicalRun { physical, blocks }, packed };
        let is_place = match packed {
            None => old == 0,
            Some(_) => u64::from(old) + blocks <= EXTENT_BLOCKS_MAX,
        };
        if blocks == 0 || !is_place || physical > PHYSICAL_LIMIT - source.stored().blocks {
            return Err(damaged());
        }
        Ok(source)
    }

    fn objects(&mut self) -> Result<Vec<u64>> {
        (0..self.u16()?).map(|_| self.u64()).collect()
    }

    /// A pack. If it `repacks`, its sources may be in other packs.
    fn pack(&mut self, repacks: bool) -> Result<Operation> {
        let (logical, run) = (self.u64()?, self.run()?);
        let checksums = self.checksums(run)?;
        let blocks = self.u16()?;
        let logical = self.logical(logical, blocks)?;
        if blocks > EXTENT_BLOCKS_MAX || run.blocks >= EXTENT_BLOCKS_MAX {
            return Err(damaged());
        }
        let mut sources = Vec::new();
        let mut from = 0;
        for _ in 0..self.u16()? {
            let source = self.source(repacks)?;
            let (first, end) = (u64::from(source.index), u64::from(source.index) + source.run.blocks);
            if first < from || end > blocks {
                return Err(damaged());
            }
            sources.push(source);
            from = end;
        }
        if repacks && sources.iter().all(|source| source.packed.is_none()) {
            return Err(damaged());
        }
        let objects = self.objects()?;
        Ok(Operation::Pack { logical, blocks, run, checksums, sources, objects })
    }

    /// A part of a pack that a disk maps. The pack is new, or `in_use` already.
    fn map_pack(&mut self, in_use: bool) -> Result<Operation> {
        let (disk, logical, run) = (self.u64()?, self.u64()?, self.run()?);
        let checksums = self.checksums(run)?;
        let (blocks, first) = (self.u16()?, self.u8()?);
        let logical = self.logical(logical, blocks)?;
        if u64::from(first) + blocks > EXTENT_BLOCKS_MAX || run.blocks >= EXTENT_BLOCKS_MAX {
            return Err(damaged());
        }
        Ok(match in_use {
            false => Operation::MapPack { disk, logical, blocks, first, run, checksums },
            true => Operation::MapSharedPack { disk, logical, blocks, first, run, checksums },
        })
    }

    fn share(&mut self) -> Result<Operation> {
        let (logical, run, from) = (self.u64()?, self.run()?, self.u64()?);
        let logical = self.logical(logical, run.blocks)?;
        let overlap = from < run.start + run.blocks && run.start < from.saturating_add(run.blocks);
        if run.blocks > EXTENT_BLOCKS_MAX || from > PHYSICAL_LIMIT - run.blocks || overlap {
            return Err(damaged());
        }
        let objects = self.objects()?;
        Ok(Operation::Share { logical, run, from, objects })
    }

    fn share_pack(&mut self) -> Result<Operation> {
        let (logical, run) = (self.u64()?, self.run()?);
        let checksums = self.checksums(run)?;
        let source = self.source(true)?;
        let logical = self.logical(logical, source.run.blocks)?;
        let stored = source.stored();
        let overlap = stored.physical < run.start + run.blocks && run.start < stored.physical + stored.blocks;
        let end = u64::from(source.index) + source.run.blocks;
        if end > EXTENT_BLOCKS_MAX || run.blocks >= EXTENT_BLOCKS_MAX || overlap {
            return Err(damaged());
        }
        let objects = self.objects()?;
        Ok(Operation::SharePack { logical, source, run, checksums, objects })
    }

    /// The next operation; `None` at the end.
    pub fn next_operation(&mut self) -> Result<Option<Operation>> {
        if self.left.is_empty() {
            return Ok(None);
        }
        Ok(Some(match self.u8()? {
            1 => {
                let (disk, logical, run) = self.mapped()?;
                Operation::Map { disk, logical, run, checksums: self.checksums(run)? }
            }
            2 => {
                let (disk, logical, run) = self.mapped()?;
                Operation::MapData { disk, logical, run, data: self.data(run)? }
            }
            3 => {
                let run = self.run()?;
                Operation::Overwrite { run, checksums: self.checksums(run)? }
            }
            4 => {
                let run = self.run()?;
                Operation::OverwriteData { run, data: self.data(run)? }
            }
            5 => Operation::Synced { position: self.u64()? },
            6 => {
                let (disk, logical, blocks) = (self.u64()?, self.u64()?, self.u64()?);
                Operation::Unmap { disk, logical: self.logical(logical, blocks)?, blocks }
            }
            7 => {
                let (disk, logical, run) = self.mapped()?;
                Operation::Unwritten { disk, logical, run, fresh: self.u8()? != 0 }
            }
            8 => {
                let (disk, logical, run) = self.mapped()?;
                Operation::Written { disk, logical, run, checksums: self.checksums(run)? }
            }
            9 => Operation::Resolve { block: self.u64()?, checksum: self.u32()? },
            10 => Operation::Backed { run: self.run()?, backed: self.u8()? != 0 },
            11 => Operation::Put { record: self.record()? },
            12 => Operation::Seal { snapshot: self.u64()? },
            13 => Operation::Clone { snapshot: self.u64()?, record: self.record()? },
            14 => Operation::Revert { disk: self.u64()?, snapshot: self.u64()?, trash: self.u64()? },
            15 => Operation::Trash { object: self.u64()? },
            16 => Operation::Drop { object: self.u64()?, steps: self.u32()? },
            17 => Operation::Announce { run: self.run()? },
            18 => {
                let run = self.run()?;
                Operation::Checksums { run, checksums: self.checksums(run)? }
            }
            19 => self.pack(false)?,
            20 => self.pack(true)?,
            21 => self.share()?,
            22 => self.map_pack(false)?,
            23 => self.share_pack()?,
            24 => {
                let (disk, logical, run) = self.mapped()?;
                Operation::MapShared { disk, logical, run, checksums: self.checksums(run)? }
            }
            25 => self.map_pack(true)?,
            _ => return Err(damaged()),
        }))
    }
}

fn damaged() -> Error {
    Error::new(
        ErrorKind::Corrupt,
        "a journal record passes its checksum but is invalid; nothing was replayed from there on",
    )
}
