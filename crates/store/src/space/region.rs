//! A region: the blocks that 32 table pages describe. Its counts are always in memory and are stored in a summary page.
//! Its bitmaps are in memory while it is used for allocation.
//!
//! A search that finds no run notes the length that it searched for. Later searches pass over the region without
//! loading it, until a change of its blocks has made such a run ([`Region::review`]). Everything that clears a used
//! bit, or sets or clears a backed bit, in the bitmaps or only in the table, must review the region or forget its
//! bounds: otherwise free blocks are not found.
//!
//! Summary entry: u16 used, u16 backed; 1016 entries per page after the common head.

use super::Run;
use super::table::TABLE_ENTRIES;
use crate::pages::{HEADER_SIZE, PageFile};
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, Block};
use std::ops::Range;

/// Table pages per region.
pub const REGION_PAGES: u64 = 32;
/// Blocks per region: 63.5 MiB.
pub const REGION_BLOCKS: u64 = REGION_PAGES * TABLE_ENTRIES;
const WORDS: usize = (REGION_BLOCKS / 64) as usize;
const _: () = assert!(REGION_BLOCKS.is_multiple_of(64) && REGION_BLOCKS <= u16::MAX as u64);

const SUMMARY_SIZE: usize = 4;
/// Regions per summary page.
pub const SUMMARY_ENTRIES: u64 = ((BLOCK_SIZE - HEADER_SIZE) / SUMMARY_SIZE) as u64;

/// The bound of a region in which the length of runs is not known.
const UNKNOWN: u16 = u16::MAX;

/// The state of a region in memory.
pub struct Region {
    /// Blocks with references.
    pub used: u16,
    /// Blocks with space in the file system.
    pub backed: u16,
    /// The bitmaps, if they are in memory.
    pub bitmaps: Option<Box<Bitmaps>>,
    /// All runs of free backed blocks are shorter than this.
    free_below: u16,
    /// All runs of blocks that are neither used nor backed are shorter than this.
    unbacked_below: u16,
    /// Whether the table has lost blocks that the summary still counts. Then the region is not used for allocation
    /// until `check` has repaired it.
    pub damaged: bool,
    /// Whether the medium could not read the table. Then the region is not used for allocation until a later read
    /// succeeds.
    pub unreadable: bool,
}

impl Region {
    pub fn empty() -> Self {
        let (free_below, unbacked_below) = (UNKNOWN, UNKNOWN);
        Self { used: 0, backed: 0, bitmaps: None, free_below, unbacked_below, damaged: false, unreadable: false }
    }

    pub fn read(page: &Block, index: u64) -> Self {
        let at = HEADER_SIZE + index as usize * SUMMARY_SIZE;
        let word = |at: usize| u16::from_le_bytes([page.0[at], page.0[at + 1]]);
        Self { used: word(at), backed: word(at + 2), ..Self::empty() }
    }

    pub fn write(&self, page: &mut Block, index: u64) {
        let at = HEADER_SIZE + index as usize * SUMMARY_SIZE;
        page.0[at..at + 2].copy_from_slice(&self.used.to_le_bytes());
        page.0[at + 2..at + 4].copy_from_slice(&self.backed.to_le_bytes());
    }

    /// Checks that the region does not count more blocks than it has.
    pub fn possible(self, summary: PageFile, number: u64) -> Result<Self> {
        if u64::from(self.used) <= REGION_BLOCKS && u64::from(self.backed) <= REGION_BLOCKS {
            return Ok(self);
        }
        let name = summary.name();
        let text = format!("region {number} in {name} counts more blocks than it has; run 'lamina check --repair'");
        Err(Error::new(ErrorKind::Corrupt, text))
    }

    /// The number of free backed blocks: exact with bitmaps, otherwise estimated from the counts.
    pub fn estimate(&self) -> u64 {
        match &self.bitmaps {
            _ if self.is_lost() => 0,
            Some(bitmaps) => bitmaps.free(),
            None => u64::from(self.backed.saturating_sub(self.used)),
        }
    }

    /// Whether the region may have a run of `least` free backed blocks. False if it is not used for allocation.
    pub fn may_have_free(&self, least: u64) -> bool {
        self.estimate() >= least && least < u64::from(self.free_below)
    }

    /// Whether the region may have a run of `least` blocks that are neither used nor backed.
    pub fn may_have_unbacked(&self, least: u64) -> bool {
        u64::from(self.backed) + least <= REGION_BLOCKS && least < u64::from(self.unbacked_below)
    }

    /// As [`Bitmaps::find_free`]. Notes if the region has no such run. `None` without bitmaps.
    pub fn find_free(&mut self, from: u64, least: u64, most: u64) -> Option<(u64, u64)> {
        let found = self.bitmaps.as_ref()?.find_free(from, least, most);
        if found.is_none() && from == 0 {
            self.free_below = self.free_below.min(length(least));
        }
        found
    }

    /// As [`Bitmaps::find_unbacked`]. Notes if the region has no such run. `None` without bitmaps.
    pub fn find_unbacked(&mut self, least: u64, most: u64) -> Option<(u64, u64)> {
        let found = self.bitmaps.as_ref()?.find_unbacked(least, most);
        if found.is_none() {
            self.unbacked_below = self.unbacked_below.min(length(least));
        }
        found
    }

    /// Called after each change of blocks that may have made runs longer. A bound is forgotten if it is no longer true:
    /// then a run of this length has at least one of the changed blocks.
    pub fn review(&mut self, first: u64, count: u64) {
        let Some(bitmaps) = &self.bitmaps else { return self.forget_bounds() };
        if self.free_below != UNKNOWN && bitmaps.has_free(first..first + count, self.free_below.into()) {
            self.free_below = UNKNOWN;
        }
        if self.unbacked_below != UNKNOWN && bitmaps.has_unbacked(first..first + count, self.unbacked_below.into()) {
            self.unbacked_below = UNKNOWN;
        }
    }

    /// Called when the table or the bitmaps were replaced, or when the table was changed without bitmaps in memory.
    pub fn forget_bounds(&mut self) {
        (self.free_below, self.unbacked_below) = (UNKNOWN, UNKNOWN);
    }

    /// Whether a part of the table is lost: the region is not used for allocation.
    pub fn is_lost(&self) -> bool {
        self.damaged || self.unreadable
    }

    /// Notes that the table of the region is lost, with the error of reading it.
    pub fn lose(&mut self, error: &Error) {
        self.forget_bounds();
        match error.kind() {
            ErrorKind::Io => self.unreadable = true,
            _ => self.damaged = true,
        }
    }
}

/// Splits a run at region boundaries: (region, first block within it, count).
pub fn parts(run: Run) -> impl Iterator<Item = (u64, u64, u64)> {
    let end = run.start + run.blocks;
    let mut block = run.start;
    std::iter::from_fn(move || {
        if block >= end {
            return None;
        }
        let (number, first) = (block / REGION_BLOCKS, block % REGION_BLOCKS);
        let count = (REGION_BLOCKS - first).min(end - block);
        block += count;
        Some((number, first, count))
    })
}

/// Bitmaps with two bits for each block of a region.
pub struct Bitmaps {
    used: [u64; WORDS],
    backed: [u64; WORDS],
    free: u64,
    used_count: u64,
}

impl Bitmaps {
    pub fn new() -> Self {
        Self { used: [0; WORDS], backed: [0; WORDS], free: 0, used_count: 0 }
    }

    /// Number of backed blocks that are not used.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Number of used blocks.
    pub fn used(&self) -> u64 {
        self.used_count
    }

    /// Sets or clears used bits.
    pub fn set_used(&mut self, first: u64, count: u64, used: bool) {
        self.edit(first, count, |bitmaps, word, mask| {
            if used {
                bitmaps.used[word] |= mask;
            } else {
                bitmaps.used[word] &= !mask;
            }
        });
    }

    pub fn set_backed(&mut self, first: u64, count: u64, backed: bool) {
        self.edit(first, count, |bitmaps, word, mask| {
            if backed {
                bitmaps.backed[word] |= mask;
            } else {
                bitmaps.backed[word] &= !mask;
            }
        });
    }

    fn edit(&mut self, first: u64, count: u64, change: impl Fn(&mut Self, usize, u64)) {
        let end = first + count;
        let mut at = first;
        while at < end {
            let (word, bit) = ((at / 64) as usize, at % 64);
            let bits = (64 - bit).min(end - at);
            let mask = if bits == 64 { u64::MAX } else { ((1 << bits) - 1) << bit };
            let free = (self.backed[word] & !self.used[word]).count_ones();
            let used = self.used[word].count_ones();
            change(self, word, mask);
            self.free = self.free + u64::from((self.backed[word] & !self.used[word]).count_ones()) - u64::from(free);
            self.used_count = self.used_count + u64::from(self.used[word].count_ones()) - u64::from(used);
            at += bits;
        }
    }

    /// The first run of at least `least` free backed blocks at or after `from`, shortened to `most` blocks.
    pub fn find_free(&self, from: u64, least: u64, most: u64) -> Option<(u64, u64)> {
        find_run(from..REGION_BLOCKS, least, most, |word| self.backed[word] & !self.used[word])
    }

    /// Whether a run of `least` free backed blocks is within `least` blocks of the given ones.
    fn has_free(&self, blocks: Range<u64>, least: u64) -> bool {
        find_run(around(blocks, least), least, least, |word| self.backed[word] & !self.used[word]).is_some()
    }

    /// As [`Self::has_free`], for blocks that are neither used nor backed.
    fn has_unbacked(&self, blocks: Range<u64>, least: u64) -> bool {
        find_run(around(blocks, least), least, least, |word| !(self.backed[word] | self.used[word])).is_some()
    }

    /// The start of a run of at least `least` free backed blocks that contains `block`. At most `least` blocks before
    /// `block` are examined.
    pub fn free_around(&self, block: u64, least: u64) -> Option<u64> {
        let is_free =
            |at: u64| (self.backed[(at / 64) as usize] & !self.used[(at / 64) as usize]) >> (at % 64) & 1 == 1;
        let before = (block.saturating_sub(least)..block).rev();
        let first = before.take_while(|at| is_free(*at)).last().unwrap_or(block);
        self.find_free(first, 1, least).filter(|found| *found == (first, least)).map(|(first, _)| first)
    }

    /// The first run of at least `least` blocks that are neither used nor backed, shortened to `most` blocks.
    pub fn find_unbacked(&self, least: u64, most: u64) -> Option<(u64, u64)> {
        find_run(0..REGION_BLOCKS, least, most, |word| !(self.backed[word] | self.used[word]))
    }
}

/// The length of a run as a bound.
fn length(blocks: u64) -> u16 {
    u16::try_from(blocks).unwrap_or(UNKNOWN)
}

/// The given blocks and up to `blocks` others on each side of them.
fn around(range: Range<u64>, blocks: u64) -> Range<u64> {
    range.start.saturating_sub(blocks)..(range.end + blocks).min(REGION_BLOCKS)
}

/// The first run of at least `least` blocks in `range`, shortened to `most` blocks.
fn find_run(range: Range<u64>, least: u64, most: u64, word: impl Fn(usize) -> u64) -> Option<(u64, u64)> {
    let (mut at, end) = (range.start, range.end);
    while at < end {
        let ones = word((at / 64) as usize) >> (at % 64);
        if ones == 0 {
            at = (at / 64 + 1) * 64;
            continue;
        }
        at += u64::from(ones.trailing_zeros());
        // Measures the run that starts here, up to `most` blocks.
        let start = at;
        while at < end && at - start < most {
            let zeros = !word((at / 64) as usize) >> (at % 64);
            let left = 64 - at % 64;
            if zeros == 0 {
                at += left;
            } else {
                let run = u64::from(zeros.trailing_zeros()).min(left);
                at += run;
                if run < left {
                    break;
                }
            }
        }
        let length = at.min(end).saturating_sub(start).min(most);
        if length >= least {
            return Some((start, length));
        }
    }
    None
}
