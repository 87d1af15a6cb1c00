//! Lookup in the layers: one walk down the levels, each queried only for ranges that the levels above do not store.
//!
//! The requested range (`demand`) is looked up completely. Around it, within `window`, only cheap extents are added:
//! each level is queried once for each gap, and the part of the gap that this call does not return is left out. If
//! there are more than `most` of these extents, those farthest from the demand are dropped.
//!
//! A *survey* only finds which level stores each block of a span ([`holders`]), and queries each level once.

use crate::levels::Levels;
use crate::mapping::{Mapping, To, push};
use crate::metadata::holders::{self, NO_LEVEL, SPAN_BLOCKS, UNKNOWN};
use crate::{Error, ErrorKind, Result};
use layer::{Content, Extent};
use std::ops::Range;

/// The most extents per call to a level, within the demand.
const EXTENTS_AT_ONCE: usize = 256;

/// A part of the walked range: found in a level, or still to be looked up.
#[derive(Clone, Copy)]
struct WalkPiece {
    start: u64,
    end: u64,
    to: Option<To>,
}

/// The result of a walk.
pub(crate) struct Found {
    /// The mappings, in order of address. They cover the demand; outside the demand there may be gaps.
    pub mappings: Vec<Mapping>,
    /// The number of levels that were queried.
    pub levels: usize,
}

/// The state of one walk through the levels.
pub(crate) struct Walk<'a> {
    pub levels: &'a Levels,
    /// The levels to query, as positions in the stack.
    pub among: Range<usize>,
    pub demand: Range<u64>,
    pub window: Range<u64>,
    /// The most extents outside the demand.
    pub most: usize,
}

impl Walk<'_> {
    pub fn run(&self) -> Result<Found> {
        if self.most == 0
            && let Some(found) = self.run_whole()?
        {
            return Ok(found);
        }
        self.run_parts()
    }

    /// The fast path for a common small read, of which only one level stores any part. `None` if the read is of another
    /// kind.
    fn run_whole(&self) -> Result<Option<Found>> {
        let demand = &self.demand;
        let length = demand.end - demand.start;
        let mut answer: Vec<Extent> = Vec::with_capacity(2);
        for (asked, index) in (1..).zip(self.among.clone()) {
            if demand.end > self.levels.visible(self.among.start, index) {
                return Ok(None);
            }
            let level = &self.levels.stack[index];
            answer.clear();
            level.layer.map(demand.clone(), 2, &mut answer)?;
            let [Extent { start, length: found, content }] = answer.as_slice() else { return Ok(None) };
            if *start != demand.start || *found != length {
                return Ok(None);
            }
            if let Some(to) = To::of(*content, level.number()) {
                let mapping = Mapping { start: *start, length, to };
                return Ok(Some(Found { mappings: vec![mapping], levels: asked }));
            }
        }
        let mapping = Mapping { start: demand.start, length, to: To::Absent };
        Ok(Some(Found { mappings: vec![mapping], levels: self.among.len() }))
    }

    fn run_parts(&self) -> Result<Found> {
        let mut pieces: Vec<WalkPiece> = Vec::with_capacity(4);
        let (window, demand) = (&self.window, &self.demand);
        for range in [window.start..demand.start, demand.clone(), demand.end..window.end] {
            if range.start < range.end && (self.most > 0 || range == *demand) {
                pieces.push(WalkPiece { start: range.start, end: range.end, to: None });
            }
        }
        let mut next: Vec<WalkPiece> = Vec::with_capacity(pieces.len());
        let mut answer: Vec<Extent> = Vec::new();
        let mut asked = 0;
        for index in self.among.clone() {
            if pieces.iter().all(|piece| piece.to.is_some()) {
                break;
            }
            asked += 1;
            let visible = self.levels.visible(self.among.start, index);
            next.clear();
            for piece in &pieces {
                if piece.to.is_some() {
                    next.push(*piece);
                    continue;
                }
                let seen = piece.end.min(visible);
                if piece.start < seen {
                    self.ask(index, piece.start..seen, &mut answer, &mut next)?;
                }
                if piece.end > visible {
                    // Past the end of this level, the levels below are not visible.
                    next.push(WalkPiece { start: piece.start.max(visible), end: piece.end, to: Some(To::Absent) });
                }
            }
            std::mem::swap(&mut pieces, &mut next);
            self.trim(&mut pieces);
        }
        let mut mappings = Vec::with_capacity(pieces.len());
        for WalkPiece { start, end, to } in pieces {
            let mapping = Mapping { start, length: end - start, to: to.unwrap_or(To::Absent) };
            if start == demand.start || start == demand.end {
                // The demand and the prefetched extents become separate entries of the cache.
                mappings.push(mapping);
            } else {
                push(&mut mappings, mapping);
            }
        }
        Ok(Found { mappings, levels: asked })
    }

    /// Queries one level for one gap.
    fn ask(&self, index: usize, gap: Range<u64>, answer: &mut Vec<Extent>, out: &mut Vec<WalkPiece>) -> Result<()> {
        let level = &self.levels.stack[index];
        let demanded = gap.start >= self.demand.start && gap.end <= self.demand.end;
        let mut at = gap.start;
        while at < gap.end {
            answer.clear();
            let most = if demanded { EXTENTS_AT_ONCE } else { self.most };
            level.layer.map(at..gap.end, most, answer)?;
            for extent in answer.iter() {
                let end = extent.start.saturating_add(extent.length);
                if extent.start != at || extent.length == 0 || end > gap.end {
                    return Err(inconsistent(level.layer.format(), &gap));
                }
                at = end;
                let to = To::of(extent.content, level.number());
                let absent = extent.content == Content::Absent;
                match out.last_mut() {
                    Some(last) if absent && last.to.is_none() && last.end == extent.start => {
                        // The gap is not joined with the gap before the requested range, so that the borders of the
                        // demand remain.
                        if extent.start == gap.start {
                            out.push(WalkPiece { start: extent.start, end, to });
                        } else {
                            last.end = end;
                        }
                    }
                    _ => out.push(WalkPiece { start: extent.start, end, to }),
                }
            }
            if answer.is_empty() {
                return Err(inconsistent(level.layer.format(), &gap));
            }
            if !demanded {
                break;
            }
        }
        Ok(())
    }

    /// Drops the pieces farthest from the demand until `most` are left outside it.
    fn trim(&self, pieces: &mut Vec<WalkPiece>) {
        let demand = &self.demand;
        let mut first = 0;
        let mut last = pieces.len();
        let front = pieces.partition_point(|piece| piece.end <= demand.start);
        let back = pieces.partition_point(|piece| piece.start < demand.end);
        while (front - first) + (last - back) > self.most {
            let before = pieces[..front].get(first).map(|piece| demand.start - piece.end);
            let behind = pieces[back..last].last().map(|piece| piece.start - demand.end);
            if before > behind || behind.is_none() {
                first += 1;
            } else {
                last -= 1;
            }
        }
        pieces.truncate(last);
        pieces.drain(..first);
    }
}

/// The most extents of a span that one query of a level returns.
const EXTENTS_OF_SPAN: usize = 2 * SPAN_BLOCKS;

/// Which level stores each block of `span`. The span begins at a multiple of [`SPAN`], and ends after `SPAN` bytes or
/// with the disk.
pub(crate) fn survey(levels: &Levels, span: Range<u64>) -> Result<[u8; SPAN_BLOCKS]> {
    let block = holders::BLOCK;
    let mut found = [NO_LEVEL; SPAN_BLOCKS];
    let mut answer: Vec<Extent> = Vec::with_capacity(16);
    let mut left = (span.end - span.start).div_ceil(block) as usize;
    found[left..].fill(UNKNOWN);
    for (index, level) in levels.stack.iter().enumerate() {
        if left == 0 {
            break;
        }
        // Assigns `holder` to the blocks from the one at `at` up to `end`, except those that a level above holds.
        let mut settle = |at: u64, end: u64, holder: u8| {
            let blocks = ((at - span.start) / block) as usize..(end - span.start).div_ceil(block) as usize;
            for known in found[blocks].iter_mut().filter(|known| **known == NO_LEVEL) {
                (*known, left) = (holder, left - 1);
            }
        };
        let end = span.end.min(levels.visible(0, index));
        if end < span.end {
            // Blocks past the end of a level become UNKNOWN, so that a walk looks them up.
            settle(end.max(span.start), span.end, UNKNOWN);
        }
        if end <= span.start {
            break;
        }
        answer.clear();
        level.layer.map(span.start..end, EXTENTS_OF_SPAN, &mut answer)?;
        let holder = if level.number() < NO_LEVEL { level.number() } else { UNKNOWN };
        // The level stores blocks inside a run completely; a block at the border of a run may be stored only in part.
        let mut run = span.start..span.start;
        let mut close = |run: &Range<u64>| {
            let whole_start = run.start.next_multiple_of(block);
            let whole_end = if run.end == span.end { run.end } else { run.end / block * block };
            if run.is_empty() {
                return;
            }
            if whole_start < whole_end {
                settle(whole_start, whole_end, holder);
            }
            for border in [run.start, run.end - 1] {
                settle(border, border + 1, UNKNOWN);
            }
        };
        let mut at = span.start;
        for extent in &answer {
            let next = extent.start.saturating_add(extent.length);
            if extent.start != at || extent.length == 0 || next > end {
                return Err(inconsistent(level.layer.format(), &span));
            }
            at = next;
            if extent.content == Content::Absent {
                close(&run);
                run = next..next;
            } else {
                run.end = next;
            }
        }
        close(&run);
        if at < end {
            settle(at, end, UNKNOWN);
        }
    }
    Ok(found)
}

fn inconsistent(format: &str, range: &Range<u64>) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!(
            "a {format} image mapped bytes {} to {}, which were not requested: its tables contradict each other",
            range.start, range.end
        ),
    )
}
