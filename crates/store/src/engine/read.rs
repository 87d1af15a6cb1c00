//! Reading: finds blocks in the buffer and the map, and verifies what the caller has read from the data files.

mod packed;
mod plan;

pub use packed::Packed;

use super::log::Cost;
use super::metadata::Fetch;
use super::read_cache::{Lookups, Place};
use super::{Engine, Head};
use crate::buffer::{Content, DirtyPiece};
use crate::journal::Operation;
use crate::pages::PageKey;
use crate::space::Run;
use crate::sync::atomic::Ordering;
use crate::{Error, ErrorKind, IoContext, Result, checksum};
use backend::{BLOCK_SIZE, Buffer, File, SharedSlice};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The cost of recording the content of a suspect block.
const RESOLVE_COST: Cost = Cost { bytes: 32, pages: 3 };
/// The most bytes of a read whose blocks are kept in the read cache. The requests of a guest are seldom longer, and
/// copying the blocks of a long sequential read would only slow it down.
const KEPT_MAX: usize = 256 << 10;

/// A part of a planned read; always whole blocks.
pub enum Part {
    /// The part reads as zeros.
    Zero {
        /// Length in bytes.
        length: usize,
    },
    /// The part is in memory: buffered, or journalled payload that is not written to its block yet. Needs no
    /// verification.
    Memory(SharedSlice),
    /// One block, which is in the read cache. Needs no verification.
    Cached(SharedSlice),
    /// The part is in a data file.
    Stored(Stored),
    /// The part is compressed, in a pack in a data file. Boxed, because parts are moved often and few are packed.
    Packed(Box<Packed>),
}

/// Adjacent blocks of a data file, and their checksums.
pub struct Stored {
    /// The data file.
    pub file: Arc<dyn File>,
    /// Byte offset in the data file: a multiple of 4 KiB.
    pub offset: u64,
    /// Physical block number of the first block.
    pub block: u64,
    /// CRC32C of each block according to the table.
    pub checksums: Vec<u32>,
}

/// The locations of a range of blocks.
pub struct Planned {
    /// The parts in order.
    pub parts: Vec<Part>,
    /// While the guard exists, no block named here is reused.
    pub guard: Arc<()>,
    /// Number of changes of the read cache until the plan was made.
    changes: u64,
    /// Whether the read cache keeps the blocks.
    kept: bool,
    /// Whether hits and misses are counted already. They are counted when the read is finished if it may have to be
    /// planned again.
    is_counted: bool,
    /// The counters of the disk, if they are not.
    disk: Option<Arc<Lookups>>,
}

impl Stored {
    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.checksums.len() * BLOCK_SIZE
    }

    /// The planned checksum of a physical block.
    fn checksum_of(&self, block: u64) -> Option<u32> {
        self.checksums.get(usize::try_from(block.checked_sub(self.block)?).ok()?).copied()
    }
}

impl Part {
    fn length(&self) -> usize {
        match self {
            Self::Zero { length } => *length,
            Self::Memory(slice) | Self::Cached(slice) => slice.len(),
            Self::Stored(stored) => stored.length(),
            Self::Packed(packed) => packed.length(),
        }
    }

    /// The blocks of a data file that have to be read.
    fn stored(&self) -> Option<&Stored> {
        match self {
            Self::Zero { .. } | Self::Memory(_) | Self::Cached(_) => None,
            Self::Stored(stored) => Some(stored),
            Self::Packed(packed) => Some(&packed.stored),
        }
    }
}

/// Parts of a plan, each with its first logical block.
type Parts = Vec<(u64, Part)>;

impl Planned {
    /// Whether a part is compressed.
    pub fn has_packed(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::Packed(_)))
    }

    /// A plan of a read of `range`, which is not counted yet.
    fn new(parts: Parts, guard: Arc<()>, changes: u64, range: &Range<u64>) -> Self {
        // Collecting the parts without their logical blocks directly would reuse the memory of `parts` and shrink it,
        // which costs more than all other allocations of a read.
        let mut out = Vec::with_capacity(parts.len());
        out.extend(parts.into_iter().map(|(_, part)| part));
        let kept = range.end - range.start <= (KEPT_MAX / BLOCK_SIZE) as u64;
        Self { parts: out, guard, changes, kept, is_counted: false, disk: None }
    }
}

impl Engine {
    /// Plans a read of a range of blocks of a disk.
    pub fn plan_head(&self, head: &Head, range: Range<u64>) -> Result<Planned> {
        let mut fetch = Fetch::default();
        loop {
            match self.try_plan_head(head, range.clone(), &mut fetch)? {
                Ok(mut planned) => {
                    self.count_lookups(&mut planned, Some(head));
                    return Ok(planned);
                }
                Err(absent) => self.meta.load_pages(absent, &mut fetch)?,
            }
        }
    }

    /// Like [`Engine::plan_head`], if the metadata is in memory. Otherwise starts to read missing pages into the page
    /// cache, and returns `None`.
    pub fn plan_head_at_once(&self, head: &Head, range: Range<u64>) -> Result<Option<Planned>> {
        match self.try_plan_head(head, range, &mut Fetch::default())? {
            Ok(mut planned) => {
                self.count_lookups(&mut planned, Some(head));
                Ok(Some(planned))
            }
            Err(absent) => {
                self.meta.read_ahead(&absent);
                Ok(None)
            }
        }
    }

    /// Reads the first pages that a plan of the range misses. These may refer to further missing pages.
    pub fn load_for_head(&self, head: &Head, range: Range<u64>) -> Result<()> {
        let mut fetch = Fetch::default();
        match self.try_plan_head(head, range, &mut fetch)? {
            Ok(_) => Ok(()),
            Err(absent) => self.meta.load_pages(absent, &mut fetch),
        }
    }

    /// Like [`Engine::plan_head`], if the metadata is in memory. Otherwise returns the missing pages.
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
        let mut parts = Parts::with_capacity(1);
        let mut among_pieces = Vec::new();
        let gaps = if buffer.layers.is_empty() {
            std::slice::from_ref(&range)
        } else {
            let mut pieces: Vec<DirtyPiece> = Vec::new();
            buffer.layers.overlay(range.clone(), &mut pieces, &mut among_pieces);
            parts.extend(pieces.into_iter().map(|piece| {
                let part = match piece.entry.content {
                    Content::Data(slice, _) => Part::Memory(slice),
                    Content::Unmapped | Content::Zero => {
                        Part::Zero { length: piece.entry.blocks as usize * BLOCK_SIZE }
                    }
                };
                (piece.logical, part)
            }));
            &among_pieces[..]
        };
        let from_memory = !parts.is_empty();
        // Also a long read of which a part is buffered has short gaps.
        let is_short = packed::is_short(&range);
        let mut meta = self.meta.lock();
        let (guard, changes) = (meta.freed.guard(), meta.read_cache.changes());
        if !gaps.is_empty() {
            let root = meta.catalog.get(head.id)?.root;
            let looked = fetch.look(&mut meta, |meta| {
                gaps.iter().try_for_each(|gap| meta.plan(&self.files, root, gap.clone(), is_short, &mut parts))
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
        Ok(Ok(Planned::new(parts, guard, changes, &range)))
    }

    /// Plans a read of a range of blocks of a snapshot. Waits until all writes of the snapshot are in the map.
    pub fn plan_snapshot(&self, snapshot: u64, range: Range<u64>) -> Result<Planned> {
        self.wait_sealed(snapshot)?;
        let mut planned = self.meta.look(|meta| {
            let (guard, changes) = (meta.freed.guard(), meta.read_cache.changes());
            let root = meta.catalog.whole(snapshot)?.root;
            let mut parts = Vec::new();
            meta.plan(&self.files, root, range.clone(), packed::is_short(&range), &mut parts)?;
            Ok(Planned::new(parts, guard, changes, &range))
        })?;
        self.count_lookups(&mut planned, None);
        Ok(planned)
    }

    /// Counts which blocks of a plan were found in the read cache.
    fn count_lookups(&self, planned: &mut Planned, head: Option<&Head>) {
        let may_be_cached = |part: &Part| match part {
            Part::Zero { .. } | Part::Memory(_) => false,
            Part::Stored(_) => self.meta.read_cache().holds_plain(),
            Part::Cached(_) | Part::Packed(_) => true,
        };
        if !planned.parts.iter().any(may_be_cached) {
            planned.is_counted = true;
            return;
        }
        let begins_with_index = |part: &Part| matches!(part, Part::Packed(packed) if packed.begins_with_index());
        planned.is_counted = !planned.parts.iter().any(begins_with_index);
        if planned.is_counted {
            let (hits, misses) = planned.parts.iter().fold((0, 0), |(hits, misses), part| {
                let of_part = self.lookups_of(part);
                (hits + of_part.0, misses + of_part.1)
            });
            self.meta.read_cache().lookups.count(hits, misses);
            if let Some(head) = head {
                head.lookups.count(hits, misses);
            }
        } else {
            planned.disk = head.map(|head| Arc::clone(&head.lookups));
        }
    }

    /// Blocks of a part that are in the read cache, and blocks that it may hold and that are read from the medium.
    fn lookups_of(&self, part: &Part) -> (u64, u64) {
        match part {
            Part::Cached(_) => (1, 0),
            Part::Packed(packed) => (0, packed.blocks as u64),
            Part::Stored(stored) if self.meta.read_cache().holds_plain() => (0, stored.checksums.len() as u64),
            _ => (0, 0),
        }
    }

    /// Called for each part of a plan that was read. Keeps its verified or decoded content in the read cache.
    pub fn keep(&self, planned: &Planned, part: &Part, content: &[u8]) {
        let cache = self.meta.read_cache();
        if !planned.is_counted {
            let (hits, misses) = self.lookups_of(part);
            std::iter::once(&cache.lookups).chain(planned.disk.as_deref()).for_each(|to| to.count(hits, misses));
        }
        if !planned.kept {
            return;
        }
        let blocks = content.chunks_exact(BLOCK_SIZE);
        match part {
            Part::Stored(stored) if cache.holds_plain() => {
                cache.keep((stored.block..).map(Place::plain).zip(blocks), planned.changes);
            }
            Part::Packed(packed) => {
                let places = (packed.index..).map(|index| Place::packed(packed.pack.start, index));
                cache.keep(places.zip(blocks), planned.changes);
            }
            _ => {}
        }
    }

    /// Verifies the data that was read for a range starting at block `logical`. `fetched` returns the bytes of each
    /// stored part by its index, the same bytes for all parts with the same [`Packed::fetched`]. `replan` plans a read
    /// of one block again. False if the range changed during the read, or if only the index of a pack was fetched: the
    /// caller must plan again.
    pub fn verify<'a>(
        &self,
        name: &str,
        logical: u64,
        planned: &Planned,
        fetched: impl Fn(usize) -> &'a [u8],
        replan: &dyn Fn(u64) -> Result<Planned>,
    ) -> Result<bool> {
        let mut at = logical;
        // What was fetched from a pack last, if all of it was found good. Several parts may need it.
        let (mut good_pack, mut is_whole) = (None, true);
        for (index, part) in planned.parts.iter().enumerate() {
            let first = at;
            at += (part.length() / BLOCK_SIZE) as u64;
            let Some(stored) = part.stored() else { continue };
            // A damaged block of a pack affects all blocks that are read from the pack.
            let packed = if let Part::Packed(packed) = part { Some(&**packed) } else { None };
            let begins_with_index = packed.is_some_and(Packed::begins_with_index);
            if !begins_with_index && good_pack.is_some() && good_pack == packed.map(Packed::fetched) {
                continue;
            }
            let mut is_good = true;
            let bytes = fetched(index);
            if bytes.len() != stored.length() {
                return Err(Error::new(ErrorKind::Io, format!("{name}: a read was finished before its data was read")));
            }
            for (i, (block, wanted)) in bytes.chunks_exact(BLOCK_SIZE).zip(&stored.checksums).enumerate() {
                if checksum(block) != *wanted {
                    is_good = false;
                    // If the damage is in other blocks of the pack, the content of those that are read is proved.
                    if packed
                        .is_some_and(|packed| !packed.is_needed(name, bytes, i) || packed.is_proved_in(name, bytes))
                    {
                        continue;
                    }
                    let here = Run { start: stored.block + i as u64, blocks: 1 };
                    let logical = if packed.is_some() { first } else { first + i as u64 };
                    self.mismatch(name, logical, here, *wanted, replan)?;
                    // A crash may have left many blocks of the range suspect. All are settled now: a client gets an
                    // error if a range has to be planned too often.
                    is_whole = false;
                    if packed.is_some() {
                        break;
                    }
                }
            }
            if let Some(packed) = packed.filter(|_| is_good) {
                if begins_with_index {
                    let index = packed.index_in(name, bytes)?;
                    is_whole &= packed.is_in_first_block(&index);
                    // The guard of the plan holds the place of the pack until the index is kept.
                    self.meta.read_cache().keep_index(packed.pack.start, Arc::new(index));
                } else {
                    good_pack = Some(packed.fetched());
                }
            }
        }
        Ok(is_whole)
    }

    /// Handles a block that does not have the planned checksum. There are three causes: the block changed during the
    /// read, a crash left it half written, or the medium returned wrong data. Only the third is an error; otherwise the
    /// read is planned again.
    #[cold]
    fn mismatch(
        &self,
        name: &str,
        logical: u64,
        run: Run,
        planned: u32,
        replan: &dyn Fn(u64) -> Result<Planned>,
    ) -> Result<()> {
        let now = replan(logical)?;
        let planned_for = |planned: &Planned| match planned.parts.first() {
            // The plan of one block of a pack fetches a part of the pack only.
            Some(Part::Packed(packed)) if packed.is_in_pack(run.start) => {
                self.meta.look(|meta| Ok(Some(meta.entry(run.start)?.checksum)))
            }
            Some(part) => Ok(part.stored().and_then(|stored| stored.checksum_of(run.start))),
            None => Ok(None),
        };
        // The read cache may have a block that a longer read takes from the medium. That says nothing about the place.
        let cached = matches!(now.parts.first(), Some(Part::Cached(_)));
        if !cached && planned_for(&now)? != Some(planned) {
            return Ok(());
        }
        // A block that is suspect or in flight now may get the planned content after the read below.
        let unsettled =
            self.meta.look(|meta| Ok(meta.entry(run.start)?.suspect || meta.in_flight.contains(run.start)))?;
        let (file, offset) = self.files.locate(run)?;
        let mut bytes = Buffer::zeroed(1);
        file.read_at(&mut bytes, offset).during(|| format!("{name}: reading block {}", run.start)).inspect_err(
            |error| tracing::error!(disk = name, offset = logical * BLOCK_SIZE as u64, %error, "read failed"),
        )?;
        let found = checksum(&bytes);
        if found == planned {
            return Ok(());
        }
        // The grant is for recording the content of a suspect block.
        let _grant = self.admit(RESOLVE_COST)?;
        let mut meta = self.meta.lock();
        let entry = meta.entry(run.start)?;
        if entry.checksum != planned {
            return Ok(());
        }
        if entry.references == 0 {
            drop(meta);
            let still = replan(logical)?;
            // The block was freed during the read, or its table entry was lost while the map still refers to it. Only
            // the second is an error: it is detected when planning again returns the same block.
            return match planned_for(&still)? {
                Some(_) => Err(Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "{name}: the table has no entry for physical block {} at offset {}: it was damaged; run \
                         'lamina check --repair', and restore what that cannot repair from a snapshot or backup",
                        run.start,
                        logical * BLOCK_SIZE as u64
                    ),
                )),
                _ => Ok(()),
            };
        }
        if meta.in_flight.contains(run.start) {
            drop(meta);
            // A write of the block has begun, and its announcement may be in the journal already. If that write has
            // failed, the block stays in flight.
            self.check_running().map_err(|error| {
                let offset = logical * BLOCK_SIZE as u64;
                error
                    .context(format!("{name}: the 4 KiB at offset {offset} were being overwritten when writes stopped"))
            })?;
            return Ok(());
        }
        if entry.suspect {
            // A crash cut off an overwrite that was never acknowledged as durable. Any content is valid then, so the
            // content found becomes the block's content.
            let operation = Operation::Resolve { block: run.start, checksum: found };
            meta.enqueue(operation, 0)?;
            self.count_changes(&meta);
            self.counters.torn_blocks.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        drop(meta);
        if unsettled {
            return Ok(());
        }
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

    /// Makes the content with these checksums, which was just read, that of the suspect blocks among these.
    pub(super) fn settle_suspects(&self, found: &[(u64, u32)]) -> Result<()> {
        let blocks = found.len() as u64;
        let _grant = self.admit(Cost { bytes: RESOLVE_COST.bytes * blocks, pages: RESOLVE_COST.pages * blocks })?;
        let mut meta = self.meta.lock();
        for (block, checksum) in found.iter().copied() {
            let entry = meta.entry(block)?;
            // A write that has begun since determines the content.
            if entry.suspect && !meta.in_flight.contains(block) && !meta.logged.contains_key(&block) {
                meta.enqueue(Operation::Resolve { block, checksum }, 0)?;
                self.counters.torn_blocks.fetch_add(u64::from(entry.checksum != checksum), Ordering::Relaxed);
            }
        }
        self.count_changes(&meta);
        Ok(())
    }

    /// Reads a range of blocks into memory.
    pub fn read_blocks(
        &self,
        name: &str,
        range: Range<u64>,
        plan: &dyn Fn(Range<u64>) -> Result<Planned>,
    ) -> Result<Buffer> {
        let mut out = Buffer::recycled((range.end - range.start) as usize);
        loop {
            let planned = plan(range.clone())?;
            // Where each part lies in `out`.
            let mut places = Vec::with_capacity(planned.parts.len());
            // What is fetched from packs, which is decoded once it is verified. It is read once, although many parts of
            // the range may be in one pack.
            let mut packs: BTreeMap<(u64, usize), Buffer> = BTreeMap::new();
            let mut at = 0;
            for part in &planned.parts {
                let place = at..at + part.length();
                at = place.end;
                let into = &mut out[place.clone()];
                match part {
                    Part::Zero { .. } => into.fill(0),
                    Part::Memory(slice) | Part::Cached(slice) => into.copy_from_slice(slice),
                    Part::Stored(stored) => stored
                        .file
                        .read_at(into, stored.offset)
                        .during(|| format!("{name}: reading {} bytes", stored.length()))?,
                    Part::Packed(packed) if packs.contains_key(&packed.fetched()) => {}
                    Part::Packed(packed) => {
                        let stored = &packed.stored;
                        let mut pack = Buffer::recycled(stored.checksums.len());
                        let during = || format!("{name}: reading {} bytes", stored.length());
                        if let Err(error) = stored.file.read_at(&mut pack, stored.offset) {
                            if !packed.may_lack_blocks() {
                                return Err(error).during(during);
                            }
                            // The blocks that the range needs may be readable. The verification reads one that is
                            // needed again, and returns the error.
                            tracing::warn!(disk = name, block = stored.block, %error, "a part of a pack cannot be read");
                            let read = stored.file.read_readable_at(&mut pack, stored.offset);
                            read.during(during)?;
                        }
                        packs.insert(packed.fetched(), pack);
                    }
                }
                places.push(place);
            }
            let replan = |block: u64| plan(block..block + 1);
            let fetched = |index: usize| match &planned.parts[index] {
                Part::Packed(packed) => packs.get(&packed.fetched()).map_or(&[] as &[u8], |pack| &pack[..]),
                _ => &out[places[index].clone()],
            };
            if self.verify(name, range.start, &planned, fetched, &replan)? {
                for (part, place) in planned.parts.iter().zip(places) {
                    if let Part::Packed(packed) = part
                        && let Some(pack) = packs.get(&packed.fetched())
                    {
                        packed.decode(name, pack, &mut out[place.clone()])?;
                    }
                    self.keep(&planned, part, &out[place]);
                }
                return Ok(out);
            }
        }
    }
}

/// The error for a disk that was deleted or reverted while open.
pub(super) fn gone() -> Error {
    Error::new(ErrorKind::NotFound, "the disk was deleted or reverted meanwhile; open it again, if it still exists")
}
