//! The mark of an open image: the regions of the grain area that may contain allocated grains which no table names.
//!
//! After a crash there may be grains that are allocated in the bitmap but named by no table: allocated for a write that
//! was not flushed, or dropped from a table and not freed yet. To find them without a complete scan, the mark's bit for
//! a region is durable before a bitmap page of the region changes for the first time, and before a table drops a grain
//! of the region. Opening for writing recounts the marked regions; closing removes the marks.
//!
//! The mark is stored where ESXi leaves uninitialised memory that no reader uses: after the known part of the journal
//! header, with the bits in the next sector. It is valid only while the journal's sequence number is the one in the
//! mark: any other program that changes the image writes transactions, and does not have to maintain every bit of the
//! bitmap. So a valid mark also means that lamina maintains every bit of the bitmap, and that free grains may be
//! allocated from it.
//!
//! | byte of the file | field |
//! |---:|---|
//! | 1056 | magic number |
//! | 1064 | journal sequence number for which the mark is valid |
//! | 1072 | grains per region, as a power of two |
//! | 1536 | 4,096 bits, one per region, least significant first |

use super::header::{PAGE_BITS, Words, put};
use crate::SECTOR;

/// "lamina" and a version number.
const MAGIC: u64 = u64::from_le_bytes(*b"lamina\x01\0");
const AT: usize = 1056;
const BITS_AT: usize = 1536;
/// The number of regions of an image.
const REGIONS: u64 = SECTOR * 8;

/// Whether the first block has a mark, valid or not.
pub(super) fn is_marked(block: &[u8]) -> bool {
    Words(block).get(AT) == MAGIC
}

/// The sequence number in a mark.
pub(super) fn sequence(block: &[u8]) -> u64 {
    Words(block).get(AT + 8)
}

/// Marked regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Touched {
    /// Grains per region, as a power of two.
    shift: u32,
    bits: [u64; (REGIONS / 64) as usize],
}

impl Touched {
    /// No marks, for a grain area of at most `grains`.
    pub(super) fn new(grains: u64) -> Self {
        let region = grains.div_ceil(REGIONS).next_power_of_two().max(PAGE_BITS);
        Self { shift: region.ilog2(), bits: [0; (REGIONS / 64) as usize] }
    }

    /// Decodes the mark in the first block; `None` if there is no valid one.
    pub(super) fn decode(block: &[u8], grains: u64, sequence: u64) -> Option<Self> {
        let words = Words(block);
        let mut touched = Self::new(grains);
        if words.get(AT) != MAGIC || words.get(AT + 8) != sequence || words.get(AT + 16) != u64::from(touched.shift) {
            return None;
        }
        for (index, word) in touched.bits.iter_mut().enumerate() {
            *word = words.get(BITS_AT + index * 8);
        }
        Some(touched)
    }

    /// Writes the mark into the first block.
    pub(super) fn encode(&self, block: &mut [u8], sequence: u64) {
        put(block, AT, MAGIC);
        put(block, AT + 8, sequence);
        put(block, AT + 16, u64::from(self.shift));
        for (index, word) in self.bits.iter().enumerate() {
            put(block, BITS_AT + index * 8, *word);
        }
    }

    /// Marks the region of a grain; returns true if it was not marked before.
    pub(super) fn insert(&mut self, grain: u64) -> bool {
        let region = (grain >> self.shift).min(REGIONS - 1);
        let word = &mut self.bits[(region / 64) as usize];
        let before = *word;
        *word |= 1 << (region % 64);
        *word != before
    }

    /// Removes the mark of a region.
    pub(super) fn remove(&mut self, region: u64) {
        if let Some(word) = self.bits.get_mut((region / 64) as usize) {
            *word &= !(1 << (region % 64));
        }
    }

    /// Marked regions in order.
    pub(super) fn regions(&self) -> impl Iterator<Item = u64> {
        (0..REGIONS).filter(|region| self.bits[(region / 64) as usize] >> (region % 64) & 1 == 1)
    }

    /// Pages of the bitmap that a region covers.
    pub(super) fn pages(&self, region: u64) -> std::ops::Range<u64> {
        let pages = (1 << self.shift) / PAGE_BITS;
        region * pages..(region + 1) * pages
    }
}
