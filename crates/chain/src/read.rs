//! Reading: a plan lists where the bytes of a range are, so that the caller can read them itself.
//!
//! 1. The steps of a plan, in this order: take the token of the data cache, take the levels, enter their epochs, look
//!    up extents. So a file location in a plan is not reused while the plan exists, and data read through an old stack
//!    enters no cache.
//! 2. A plan covers the request, widened to sectors, or to blocks if a file is open for direct I/O or the data cache is
//!    on, but not past the end of the disk.
//! 3. A failed prefetch fails no read: ranges around the request that cannot be looked up are left out.
//! 4. After a failed flush, a file may return old content also to a read that was planned before. So whether a flush
//!    has failed is checked again after the bytes were fetched ([`Chain::check_fetched`]).

use crate::chain::Chain;
use crate::changes::Token;
use crate::levels::{Guard, Levels};
use crate::limits::REQUEST_MAX;
use crate::mapping::{Mapping, To, push};
use crate::metadata::SPAN;
use crate::metadata::holders::Holder;
use crate::walk::{Walk, survey};
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, Buffer, File, IoMode, SharedSlice};
use error::IoContext;
use layer::{Layer, SECTOR};
use std::ops::Range;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The fewest levels at which [`crate::metadata::holders`] is queried before a walk: a walk through fewer levels is
/// cheap.
const HOLDERS_LEVELS_MIN: usize = 4;

/// The most extents that a level may return for a small range that it stores alone.
const EXTENTS_OF_HOLDER: usize = 64;

/// Where a part of a planned read is.
pub enum Place {
    /// Stored nowhere: the part reads as zeros.
    Zero,
    /// The part is in memory.
    Memory(SharedSlice),
    /// The part is in a file. `offset` is a multiple of a sector, not always of a block.
    Media {
        /// The file that contains the part.
        file: Arc<dyn File>,
        /// Byte offset in the file.
        offset: u64,
    },
    /// The part is in a layer that has to decode it; read by [`Part::read`].
    Encoded {
        /// The layer that decodes the part.
        layer: Arc<dyn Layer>,
        /// Byte offset in the layer.
        start: u64,
    },
}

/// A part of a planned read.
pub struct Part {
    /// Length in bytes.
    pub length: usize,
    /// Where the bytes are.
    pub place: Place,
}

/// A read with its file locations. The locations are not reused while this value exists.
pub struct Plan {
    /// Byte offset of the first part.
    pub start: u64,
    /// The parts in order.
    pub parts: Vec<Part>,
    token: Option<Token>,
    guard: Guard,
}

impl Part {
    /// Reads the bytes from `skip` on into `out`, on the calling thread.
    pub fn read(&self, skip: usize, out: &mut [u8]) -> Result<()> {
        match &self.place {
            Place::Zero => out.fill(0),
            Place::Memory(slice) => out.copy_from_slice(&slice[skip..skip + out.len()]),
            Place::Media { file, offset } => read_file(&**file, offset + skip as u64, out)?,
            Place::Encoded { layer, start } => read_encoded(&**layer, start + skip as u64, out)?,
        }
        Ok(())
    }
}

/// Reads at any offset into any memory, also from a file that is open for direct I/O.
fn read_file(file: &dyn File, offset: u64, out: &mut [u8]) -> Result<()> {
    let what = || format!("reading {} bytes at {offset} of a layer's file", out.len());
    if file.mode() == IoMode::Buffered {
        return file.read_at(out, offset).during(|| format!("reading at {offset} of a layer's file"));
    }
    let start = offset / BLOCK * BLOCK;
    let skip = (offset - start) as usize;
    let mut buffer = Buffer::recycled((skip + out.len()).div_ceil(BLOCK_SIZE));
    file.read_at(&mut buffer, start).during(what)?;
    out.copy_from_slice(&buffer[skip..skip + out.len()]);
    Ok(())
}

/// Reads any bytes of an encoded range; the layer reads whole sectors.
fn read_encoded(layer: &dyn Layer, start: u64, out: &mut [u8]) -> Result<()> {
    let end = start + out.len() as u64;
    let from = start / SECTOR * SECTOR;
    let to = end.next_multiple_of(SECTOR).min(layer.capacity()).max(end);
    if from == start && to == end {
        return layer.read_encoded(start, out);
    }
    let mut whole = vec![0; (to - from) as usize];
    layer.read_encoded(from, &mut whole)?;
    let skip = (start - from) as usize;
    out.copy_from_slice(&whole[skip..skip + out.len()]);
    Ok(())
}

impl Chain {
    /// Finds where a range is.
    pub fn plan(&self, offset: u64, length: usize) -> Result<Plan> {
        self.check_request(length as u64)?;
        loop {
            let cached = self.data.is_on();
            let aligned = |unit: u64, capacity: u64| {
                let end = (offset + length as u64).div_ceil(unit).saturating_mul(unit).min(capacity);
                offset / unit * unit..end
            };
            // The token may cover more than the capacity: then a change there only prevents a cache fill.
            let token = match cached {
                true => {
                    self.check_range(u64::MAX, offset, length as u64)?;
                    Some(self.changes.token(&aligned(BLOCK, u64::MAX)))
                }
                false => None,
            };
            let guard = self.levels().guard();
            let levels = &*guard.levels;
            self.check_range(levels.capacity(), offset, length as u64)?;
            let range = aligned(if cached { BLOCK } else { levels.alignment }, levels.capacity());
            self.check_flushed(&range)?;
            let mut parts = Vec::with_capacity(1);
            let planned = match cached {
                true => self.plan_cached(levels, range.clone(), &mut parts)?,
                false => self.plan_run(levels, range.clone(), &mut parts)?,
            };
            if planned {
                return Ok(Plan { start: range.start, parts, token, guard });
            }
        }
    }

    /// Plans parts from the data cache where possible, from the layers elsewhere.
    fn plan_cached(&self, levels: &Levels, range: Range<u64>, parts: &mut Vec<Part>) -> Result<bool> {
        let mut missing = range.start;
        let mut at = range.start;
        while at < range.end {
            let end = (at + BLOCK).min(range.end);
            if let Some(slice) = self.data.get(at / BLOCK) {
                if missing < at && !self.plan_run(levels, missing..at, parts)? {
                    return Ok(false);
                }
                let length = (end - at) as usize;
                parts.push(Part { length, place: Place::Memory(slice.slice(0..length)) });
                missing = end;
            }
            at = end;
        }
        if missing < range.end { self.plan_run(levels, missing..range.end, parts) } else { Ok(true) }
    }

    /// Returns false when the levels are not current any more.
    fn plan_run(&self, levels: &Levels, range: Range<u64>, parts: &mut Vec<Part>) -> Result<bool> {
        if range.is_empty() {
            return Ok(true);
        }
        let mut found = Vec::with_capacity(1);
        if !self.resolve(levels, &range, &mut found)? {
            return Ok(false);
        }
        parts.reserve(found.len());
        for mapping in &found {
            parts.push(self.part(levels, mapping)?);
        }
        Ok(true)
    }

    fn part(&self, levels: &Levels, mapping: &Mapping) -> Result<Part> {
        let level = |number: u8| {
            levels.level(number).ok_or_else(|| {
                Error::new(ErrorKind::Corrupt, format!("{}: the cache names a level that was removed", self.name))
            })
        };
        let place = match mapping.to {
            To::Absent | To::Zero => Place::Zero,
            To::Data { level: number, file, offset } => {
                Place::Media { file: Arc::clone(level(number)?.layer.file(file)?), offset }
            }
            To::Encoded { level: number } => {
                Place::Encoded { layer: Arc::clone(&level(number)?.layer), start: mapping.start }
            }
        };
        Ok(Part { length: mapping.length as usize, place })
    }

    /// Appends the extents of `range`, from the cache or by a walk. Returns false when the levels are not current any
    /// more.
    pub(crate) fn resolve(&self, levels: &Levels, range: &Range<u64>, out: &mut Vec<Mapping>) -> Result<bool> {
        if self.metadata.lookup(range, out) {
            // If an extent refers to a level that a merge has removed, the range is looked up again.
            if out.iter().all(|found| found.to.level().is_none_or(|number| levels.level(number).is_some())) {
                return Ok(true);
            }
            out.clear();
        }
        let (window, most) = self.metadata.window(range, levels.capacity());
        let token = self.changes.token(&window);
        if !self.is_current(levels) {
            return Ok(false);
        }
        if most == 0
            && levels.stack.len() >= HOLDERS_LEVELS_MIN
            && let Some(found) = self.resolve_by_holder(levels, range)?
        {
            self.metadata.fill(&self.changes, &token, range, &levels.lasting(&found), 1);
            out.extend_from_slice(&found);
            return Ok(true);
        }
        let alone = range.clone();
        let mut walk = Walk { levels, among: 0..levels.stack.len(), demand: range.clone(), window, most };
        let found = match walk.run() {
            Err(_) if walk.most > 0 => {
                (walk.window, walk.most) = (alone, 0);
                walk.run()
            }
            other => other,
        }
        .map_err(|error| error.context(&self.name))?;
        self.metadata.fill(&self.changes, &token, range, &levels.lasting(&found.mappings), found.levels);
        let asked = found.mappings.iter().filter(|found| found.start < range.end && range.start < found.end());
        asked.for_each(|mapping| push(out, *mapping));
        Ok(true)
    }

    /// Looks `range` up in the level that stores it according to the table of holders. If the table lacks the span,
    /// surveys the span first. `None` if a walk is needed. The caller has taken its token, and has checked that the
    /// levels are current.
    fn resolve_by_holder(&self, levels: &Levels, range: &Range<u64>) -> Result<Option<Vec<Mapping>>> {
        let mut holder = self.metadata.holder(range);
        if holder == Holder::Missing {
            let start = range.start / SPAN * SPAN;
            let token = self.changes.token(&(start..start + SPAN));
            if !self.is_current(levels) {
                return Ok(None);
            }
            // If the survey fails in another part of the span, the read of this range must not fail.
            let Ok(found) = survey(levels, start..(start + SPAN).min(levels.capacity())) else { return Ok(None) };
            self.metadata.fill_holders(&self.changes, &token, start, &found);
            holder = self.metadata.holder(range);
        }
        let number = match holder {
            Holder::Level(number) => number,
            Holder::NoLevel => {
                let absent = Mapping { start: range.start, length: range.end - range.start, to: To::Absent };
                return Ok(Some(vec![absent]));
            }
            Holder::Unknown | Holder::Missing => return Ok(None),
        };
        let Some(index) = levels.index(number).filter(|index| levels.visible(0, *index) >= range.end) else {
            return Ok(None);
        };
        let mut extents = Vec::with_capacity(2);
        levels.stack[index].layer.map(range.clone(), EXTENTS_OF_HOLDER, &mut extents)?;
        let mut found = Vec::with_capacity(extents.len());
        let mut at = range.start;
        for extent in &extents {
            match To::of(extent.content, number) {
                Some(to) if extent.start == at && extent.length > 0 => {
                    push(&mut found, Mapping { start: at, length: extent.length, to });
                }
                // The level does not store the block any more: a merge or a discard is under way.
                _ => return Ok(None),
            }
            at += extent.length;
        }
        Ok((at == range.end).then_some(found))
    }

    /// Reads into memory. The caller has locked the range, so that no write changes it. With `from` above 0, the levels
    /// above `from` are ignored.
    pub(crate) fn read_held(&self, levels: &Arc<Levels>, from: usize, start: u64, out: &mut [u8]) -> Result<()> {
        let capacity = levels.stack[from].layer.capacity();
        let end = (start + out.len() as u64).min(capacity).max(start);
        let (out, past) = out.split_at_mut((end - start) as usize);
        past.fill(0);
        if out.is_empty() {
            return Ok(());
        }
        let range = start / SECTOR * SECTOR..end.next_multiple_of(SECTOR).min(capacity);
        let _guard = Arc::clone(levels).guard();
        let mut found = Vec::new();
        if from > 0 || !self.resolve(levels, &range, &mut found)? {
            found =
                Walk { levels, among: from..levels.stack.len(), demand: range.clone(), window: range.clone(), most: 0 }
                    .run()?
                    .mappings;
        }
        let mut parts = found.iter().map(|mapping| Ok((mapping.start, self.part(levels, mapping)?)));
        parts.try_for_each(|part: Result<_>| {
            let (at, part) = part?;
            read_overlap(at, &part, start, out)
        })
    }

    /// Reads into memory, on the calling thread.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let plan = self.plan(offset, out.len())?;
        if plan.token.is_some() {
            // The data cache keeps whole blocks, so whole blocks are read.
            let mut read = Vec::with_capacity(plan.parts.len());
            for part in &plan.parts {
                let mut bytes = vec![0; part.length];
                part.read(0, &mut bytes).map_err(|error| error.context(&self.name))?;
                read.push(bytes);
            }
            self.check_fetched(&plan)?;
            self.keep(&plan, |index| &read[index]);
            let all = read.concat();
            let skip = (offset - plan.start) as usize;
            out.copy_from_slice(&all[skip..skip + out.len()]);
            return Ok(());
        }
        let mut at = plan.start;
        for part in &plan.parts {
            read_overlap(at, part, offset, out).map_err(|error| error.context(&self.name))?;
            at += part.length as u64;
        }
        self.check_fetched(&plan)
    }

    /// Called after the bytes of a plan were fetched: fails if they may be older than acknowledged writes, because a
    /// flush has failed since the plan was made.
    pub fn check_fetched(&self, plan: &Plan) -> Result<()> {
        let length: u64 = plan.parts.iter().map(|part| part.length as u64).sum();
        self.check_planned(&(plan.start..plan.start + length), plan.guard.levels.generation)
    }

    /// Offers the content of a planned read to the data cache. `contents` returns the bytes of the part with an index;
    /// it is not called for parts that are zeros or in memory.
    pub fn keep<'a>(&self, plan: &Plan, contents: impl Fn(usize) -> &'a [u8]) {
        let Some(token) = &plan.token else { return };
        let mut at = plan.start;
        let mut whole: Option<(Buffer, bool)> = None;
        for (index, part) in plan.parts.iter().enumerate() {
            let bytes: &[u8] = match part.place {
                Place::Media { .. } | Place::Encoded { .. } => contents(index),
                Place::Zero | Place::Memory(_) => &[],
            };
            let end = at + part.length as u64;
            let start = at;
            while at < end {
                let inside = (at % BLOCK) as usize;
                let step = (BLOCK_SIZE - inside).min((end - at) as usize);
                // A part without bytes is zeros or came from this cache: a block within it is not inserted.
                let worthless = bytes.is_empty() && step == BLOCK_SIZE;
                if inside == 0 && !worthless {
                    whole = Some((Buffer::recycled(1), false));
                }
                if let Some((buffer, filled)) = &mut whole {
                    let from = (at - start) as usize;
                    match bytes.get(from..from + step) {
                        Some(bytes) => {
                            buffer[inside..inside + step].copy_from_slice(bytes);
                            *filled = true;
                        }
                        None => buffer[inside..inside + step].fill(0),
                    }
                }
                at += step as u64;
                if at.is_multiple_of(BLOCK)
                    && let Some((buffer, true)) = whole.take()
                {
                    self.data.fill(&self.changes, token, at / BLOCK - 1, buffer);
                }
            }
        }
    }

    pub(crate) fn check_request(&self, length: u64) -> Result<()> {
        if length > REQUEST_MAX {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{}: {length} bytes exceed the limit of one request ({REQUEST_MAX})", self.name),
            ));
        }
        Ok(())
    }
}

/// Reads the part of `out` that overlaps `part`. `out` begins at `start`, and `part` at `at`.
fn read_overlap(at: u64, part: &Part, start: u64, out: &mut [u8]) -> Result<()> {
    let end = start + out.len() as u64;
    let (from, to) = (at.max(start), (at + part.length as u64).min(end));
    if from >= to {
        return Ok(());
    }
    part.read((from - at) as usize, &mut out[(from - start) as usize..(to - start) as usize])
}
