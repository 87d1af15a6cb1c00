//! Mapping a range: the walk through directory and tables.

use super::SeSparse;
use super::cache::{Kind, PageBytes, PageKey};
use super::entry::{Entry, GRAIN, TABLE_SPAN};
use super::header::{PAGE_BITS, PAGE_ENTRIES};
use super::state::{LayerState, Need, Step, page_index, table_page};
use crate::{Content, Extent, IoContext, Result, SECTOR, Usage};
use backend::{BLOCK_SIZE, Buffer, IoMode};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of the disk that one page of a table maps: 2 MiB.
pub(super) const PAGE_SPAN: u64 = PAGE_ENTRIES * GRAIN;
/// The most pages visited per call: the map of a sparse disk is returned in parts of several gigabytes.
const WALK_MAX: usize = 2048;
/// Pages of the bitmap read per call for counting.
const COUNTED_PAGES: u64 = 64;
/// The most extents of the file system that are examined for counting.
const PIECES_MAX: usize = 1 << 16;

/// The extents that a call of `map` returns, while they are collected.
struct Answer<'a> {
    out: &'a mut Vec<Extent>,
    first: usize,
    most: usize,
}

impl Answer<'_> {
    /// Adds an extent, joined to the last one if they are adjacent; false if there was no room for it.
    #[inline]
    fn push(&mut self, extent: Extent) -> bool {
        if self.out.len() > self.first
            && let Some(last) = self.out.last_mut()
            && adjoins(last, &extent)
        {
            last.length += extent.length;
            return true;
        }
        if self.out.len() - self.first >= self.most {
            return false;
        }
        self.out.push(extent);
        true
    }
}

fn adjoins(one: &Extent, other: &Extent) -> bool {
    match (one.content, other.content) {
        (Content::Data { offset: a, .. }, Content::Data { offset: b, .. }) => a + one.length == b,
        (a, b) => a == b,
    }
}

impl SeSparse {
    pub(super) fn map_range(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        let first = out.len();
        let mut answer = Answer { out, first, most: most.max(1) };
        let mut at = range.start;
        for _ in 0..WALK_MAX {
            if at >= range.end {
                break;
            }
            let before = at;
            match self.settle(|state| self.map_page(state, at..range.end, &mut answer)) {
                Ok(reached) => at = reached,
                // The extents before the damage are returned; the next call begins at the damage and gets the error.
                Err(_) if at > range.start => break,
                Err(error) => return Err(error),
            }
            if at == before || !at.is_multiple_of(PAGE_SPAN) {
                break;
            }
        }
        Ok(())
    }

    /// Adds the extents of one page of a table, or of an absent table; returns where they end.
    fn map_page(&self, state: &mut LayerState, range: Range<u64>, answer: &mut Answer) -> Step<u64> {
        let at = range.start;
        let Some(table) = state.table_of(at / TABLE_SPAN)? else {
            let end = (at / TABLE_SPAN + 1).saturating_mul(TABLE_SPAN).min(range.end);
            let extent = Extent { start: at, length: end - at, content: Content::Absent };
            return Ok(if answer.push(extent) { end } else { at });
        };
        let end = (at / PAGE_SPAN + 1).saturating_mul(PAGE_SPAN).min(range.end);
        let key = table_page(table, at % TABLE_SPAN / GRAIN);
        let readable = state.readable;
        let page = state.cache.get(key).ok_or(Need::Page(key))?;
        match self.map_entries(page, at..end, readable, answer) {
            Ok(reached) => Ok(reached),
            Err(raw) => match state.decode(raw) {
                Err(damage) => Err(damage),
                Ok(_) => Err(state.corrupt(&format!("table entry {raw:#018x} is invalid"))),
            },
        }
    }

    /// The end of the range that is damaged together with the byte at `at`: the end of the table if its slot is
    /// damaged, the end of the page of the table if that page cannot be read, and otherwise the end of the grain.
    pub(super) fn damage_around(&self, at: u64) -> u64 {
        let span = match self.settle(|state| state.table_of(at / TABLE_SPAN)) {
            Err(_) => TABLE_SPAN,
            Ok(None) => GRAIN,
            Ok(Some(table)) => {
                let key = table_page(table, at % TABLE_SPAN / GRAIN);
                if self.settle(|state| state.need(key)).is_ok() { GRAIN } else { PAGE_SPAN }
            }
        };
        (at / span + 1).saturating_mul(span)
    }

    /// As [`SeSparse::map_page`] for a range within one page. Fails if the first entry of the range is invalid.
    fn map_entries(
        &self,
        page: &PageBytes,
        range: Range<u64>,
        readable: u64,
        answer: &mut Answer,
    ) -> std::result::Result<u64, u64> {
        let grains = self.layout.grains.start();
        let mut at = range.start;
        let count = (range.end.div_ceil(GRAIN) - at / GRAIN) as usize;
        let mut words = page.words_from(page_index(at / GRAIN)).take(count);
        let mut next = words.next();
        while at < range.end
            && let Some(raw) = next
        {
            let within = at % GRAIN;
            let Some(entry) = Entry::decode(raw).filter(|entry| match entry {
                Entry::Data(grain) => grain.0 < readable,
                _ => true,
            }) else {
                return if at == range.start { Err(raw) } else { Ok(at) };
            };
            // Number of entries, beginning with this one, whose content is adjacent.
            let mut count = 1;
            next = words.next();
            match entry {
                Entry::Data(grain) => {
                    while next.is_some_and(|raw| continues(raw, grain.0 + count) && grain.0 + count < readable) {
                        count += 1;
                        next = words.next();
                    }
                }
                _ => {
                    while next == Some(raw) {
                        count += 1;
                        next = words.next();
                    }
                }
            }
            let length = (count * GRAIN - within).min(range.end - at);
            let content = match entry {
                Entry::Absent => Content::Absent,
                Entry::Unmapped | Entry::Zero => Content::Zero,
                Entry::Data(grain) => Content::Data { file: 0, offset: grains + grain.0 * GRAIN + within },
            };
            if !answer.push(Extent { start: at, length, content }) {
                return Ok(at);
            }
            at += length;
        }
        Ok(at)
    }

    /// Reads metadata; sectors of a journal replayed in memory replace those of the file.
    pub(super) fn read_metadata(&self, buffer: &mut Buffer, offset: u64) -> Result<()> {
        let length = buffer.len() as u64;
        let read = if self.file.mode() == IoMode::Direct && !offset.is_multiple_of(BLOCK_SIZE as u64) {
            read_unaligned(&*self.file, buffer, offset)
        } else {
            self.file.read_at(buffer, offset)
        };
        read.during(|| format!("reading {length} bytes of tables at {offset} of {}", self.name))?;
        if !self.overlay.is_empty() {
            for (sector, chunk) in (offset / SECTOR..).zip(buffer.chunks_exact_mut(SECTOR as usize)) {
                if let Some(replayed) = self.overlay.get(&sector) {
                    chunk.copy_from_slice(&replayed[..]);
                }
            }
        }
        Ok(())
    }

    /// Counts bits of the bitmap in memory. Dead grains are grains that were allocated once, are free or retired now,
    /// and still occupy space. Grains that were punched, or never written, occupy none.
    pub(super) fn count_usage(&self) -> Result<Usage> {
        let (held, waiting) = {
            let state = self.state.lock();
            let waiting = state.retirement.waiting().map(|run| run.end - run.start).sum::<u64>();
            (state.space.fresh.min(self.layout.grains_max()), waiting)
        };
        let mut set = 0;
        let pages = held.div_ceil(PAGE_BITS);
        for first in (0..pages).step_by(COUNTED_PAGES as usize) {
            let count = COUNTED_PAGES.min(pages - first);
            let mut buffer = Buffer::zeroed(count as usize);
            self.read_metadata(&mut buffer, self.page_offset(PageKey::new(Kind::Bitmap, first)))?;
            let state = self.state.lock();
            for (index, page) in (first..).zip(buffer.chunks_exact(BLOCK_SIZE)) {
                let cached = state.cache.peek(PageKey::new(Kind::Bitmap, index));
                let bytes = cached.map_or(page, PageBytes::bytes);
                let valid = (held - index * PAGE_BITS).min(PAGE_BITS);
                set += count_bits(bytes, valid);
            }
        }
        let waiting = waiting.min(set);
        let mapped = (set - waiting) * GRAIN;
        let failed = || format!("querying how much space {} takes", self.name);
        let allocated = self.file.allocated().during(failed)?;
        let of_grains = allocated.saturating_sub(self.metadata_space().during(failed)?);
        let dead = ((held - set + waiting) * GRAIN).min(of_grains.saturating_sub(mapped));
        Ok(Usage { allocated, mapped, dead })
    }

    /// Bytes before the grain area that occupy space, including reserved ones. Ends after [`PIECES_MAX`] extents: then
    /// the number of dead bytes may be too high by some tables.
    fn metadata_space(&self) -> std::io::Result<u64> {
        let end = self.layout.grains.start();
        let (mut at, mut space) = (0, 0);
        for _ in 0..PIECES_MAX {
            let Some(found) = self.file.next_allocated(at)?.filter(|found| found.start < end) else { break };
            space += found.end.min(end) - found.start;
            at = found.end.max(at + 1);
        }
        Ok(space)
    }
}

fn continues(raw: u64, grain: u64) -> bool {
    Entry::decode(raw) == Some(Entry::Data(super::entry::Grain(grain)))
}

/// Number of bits set among the first `valid`.
fn count_bits(bytes: &[u8], valid: u64) -> u64 {
    let (whole, rest) = ((valid / 8) as usize, valid % 8);
    let ones = bytes[..whole].iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
    let last = bytes.get(whole).map_or(0, |byte| byte & ((1u16 << rest) - 1) as u8);
    ones + u64::from(last.count_ones())
}

/// Reads sectors that do not begin at a block, by direct I/O.
fn read_unaligned(file: &dyn backend::File, out: &mut [u8], offset: u64) -> std::io::Result<()> {
    let within = (offset % BLOCK_SIZE as u64) as usize;
    let mut wide = Buffer::with_bytes(within + out.len());
    file.read_at(&mut wide, offset - within as u64)?;
    out.copy_from_slice(&wide[within..within + out.len()]);
    Ok(())
}

/// Reads `count` sectors, in either I/O mode.
pub(super) fn read_sectors(file: &Arc<dyn backend::File>, sector: u64, count: usize) -> std::io::Result<Vec<u8>> {
    let mut out = vec![0; count * SECTOR as usize];
    match file.mode() {
        IoMode::Buffered => file.read_at(&mut out, sector * SECTOR)?,
        IoMode::Direct => read_unaligned(&**file, &mut out, sector * SECTOR)?,
    }
    Ok(out)
}
