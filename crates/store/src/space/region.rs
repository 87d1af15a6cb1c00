//! A region: the blocks that 32 table pages describe. Its counts are always in memory and are stored in a summary page.
//! Its bitmaps are in memory while it is used for allocation.
//!
//! Summary entry: u16 used, u16 backed; 1016 entries per page after the common head.

use super::Run;
use super::table::TABLE_ENTRIES;
use crate::pages::{HEADER_SIZE, PageFile};
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, Block};

/// Table pages per region.
pub const REGION_PAGES: u64 = 32;
/// Blocks per region: 63.5 MiB.
pub const REGION_BLOCKS: u64 = REGION_PAGES * TABLE_ENTRIES;
const WORDS: usize = (REGION_BLOCKS / 64) as usize;
const _: () = assert!(REGION_BLOCKS.is_multiple_of(64) && REGION_BLOCKS <= u16::MAX as u64);

const SUMMARY_SIZE: usize = 4;
/// Regions per summary page.
pub const SUMMARY_ENTRIES: u64 = ((BLOCK_SIZE - HEADER_SIZE) / SUMMARY_SIZE) as u64;

/// The state of a region in memory.
pub struct Region {
    /// Blocks with references.
    pub used: u16,
    /// Blocks with space in the file system.
    pub backed: u16,
    /// The bitmaps, if they are in memory.
    pub bitmaps: Option<Box<Bitmaps>>,
    /// Whether the table has lost blocks that the summary still counts. Then the region is not used for allocation
    /// until `check` has repaired it.
    pub damaged: bool,
    /// Whether the medium could not read the table. Then the region is not used for allocation until a later read
    /// succeeds.
    pub unreadable: bool,
}

impl Region {
    pub fn empty() -> Self {
        Self { used: 0, backed: 0, bitmaps: None, damaged: false, unreadable: false }
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

    /// Whether a part of the table is lost: the region is not used for allocation.
    pub fn is_lost(&self) -> bool {
        self.damaged || self.unreadable
    }

    /// Notes that the table of the region is lost, with the error of reading it.
    pub fn lose(&mut self, error: &Error) {
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
        find_run(from, least, most, |word| self.backed[word] & !self.used[word])
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
        find_run(0, least, most, |word| !(self.backed[word] | self.used[word]))
    }
}

fn find_run(from: u64, least: u64, most: u64, word: impl Fn(usize) -> u64) -> Option<(u64, u64)> {
    let mut at = from;
    while at < REGION_BLOCKS {
        let ones = word((at / 64) as usize) >> (at % 64);
        if ones == 0 {
            at = (at / 64 + 1) * 64;
            continue;
        }
        at += u64::from(ones.trailing_zeros());
        // Measures the run that starts here, up to `most` blocks.
        let start = at;
        while at < REGION_BLOCKS && at - start < most {
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
        let length = (at.min(REGION_BLOCKS) - start).min(most);
        if length >= least {
            return Some((start, length));
        }
    }
    None
}
