//! Reads of blocks in packs. A long read fetches whole packs. A short one fetches, of a pack of more than two stored
//! blocks, those that hold its blocks, if the index of the pack is in the read cache. Otherwise it fetches the first
//! stored block of the pack, which holds the index, keeps the index in the cache, and is planned again, unless the
//! first stored block holds its blocks too.

use super::Stored;
use crate::engine::DataFiles;
use crate::engine::metadata::Meta;
use crate::pack::{Index, SHORT_MAX, WHOLE_MAX};
use crate::space::Run;
use crate::{Result, checksum};
use backend::{BLOCK_SIZE, Buffer};
use std::ops::Range;
use std::sync::Arc;

/// Whether a read of this range fetches parts of packs.
pub(super) fn is_short(range: &Range<u64>) -> bool {
    range.end - range.start <= SHORT_MAX
}

/// Consecutive blocks of a pack.
pub struct Packed {
    /// The stored blocks that are fetched.
    pub stored: Stored,
    /// The whole pack.
    pub(super) pack: Run,
    /// Index within the pack of the first block.
    pub(super) index: usize,
    /// Number of blocks that are read.
    pub(super) blocks: usize,
    /// The index of the pack, if it was in the read cache.
    cached: Option<Arc<Index>>,
}

impl Packed {
    /// Length of the decoded blocks in bytes.
    pub fn length(&self) -> usize {
        self.blocks * BLOCK_SIZE
    }

    /// Identifies what is fetched, which may be the same for several parts of a plan.
    pub fn fetched(&self) -> (u64, usize) {
        (self.stored.block, self.stored.length())
    }

    /// Whether the read fetches the index only, and may have to be planned again.
    pub(super) fn begins_with_index(&self) -> bool {
        self.cached.is_none() && (self.stored.checksums.len() as u64) < self.pack.blocks
    }

    /// Whether blocks may be fetched that do not hold the content. Then a block that cannot be read may be one of them.
    pub fn may_lack_blocks(&self) -> bool {
        self.cached.is_none() && !self.begins_with_index() && self.stored.checksums.len() > 1
    }

    /// Whether a fetched stored block holds a part of the content, according to the index that was fetched with it.
    pub(super) fn is_needed(&self, name: &str, bytes: &[u8], stored: usize) -> bool {
        let index = match &self.cached {
            None if stored == 0 || checksum(&bytes[..BLOCK_SIZE]) != self.stored.checksums[0] => return true,
            None => self.index_in(name, bytes).ok(),
            Some(_) => None,
        };
        let place = index.and_then(|index| index.place(&self.indexes()));
        place.is_none_or(|place| (place.start / BLOCK_SIZE..place.end.div_ceil(BLOCK_SIZE)).contains(&stored))
    }

    /// Whether a stored block belongs to the pack.
    pub(super) fn is_in_pack(&self, block: u64) -> bool {
        (self.pack.start..self.pack.start + self.pack.blocks).contains(&block)
    }

    fn indexes(&self) -> Range<usize> {
        self.index..self.index + self.blocks
    }

    /// The index of the pack, from the fetched bytes.
    pub(super) fn index_in(&self, name: &str, bytes: &[u8]) -> Result<Index> {
        let index = Index::decode(bytes, self.pack.blocks as usize * BLOCK_SIZE);
        index.map_err(|error| error.context(format!("{name}: reading the pack at block {}", self.pack.start)))
    }

    /// Whether the first stored block of the pack holds the blocks too.
    pub(super) fn is_in_first_block(&self, index: &Index) -> bool {
        // Blocks that the pack does not have give an error when they are decoded.
        index.place(&self.indexes()).is_none_or(|place| place.end <= BLOCK_SIZE)
    }

    /// Whether the index proves the content of the blocks, although a stored block that was fetched is damaged.
    pub(super) fn is_proved_in(&self, name: &str, bytes: &[u8]) -> bool {
        let index_is_good = self.cached.is_some() || checksum(&bytes[..BLOCK_SIZE]) == self.stored.checksums[0];
        index_is_good && self.decode(name, bytes, &mut Buffer::recycled(self.blocks)).is_ok()
    }

    /// Decodes the blocks from the verified bytes that were fetched into `out`, which has [`Packed::length`] bytes.
    /// Returns the CRC32C of each.
    ///
    /// # Errors
    /// `Corrupt` if the pack does not contain the blocks, although the stored bytes have their checksums.
    pub fn decode(&self, name: &str, bytes: &[u8], out: &mut [u8]) -> Result<Vec<u32>> {
        let from = (self.stored.block - self.pack.start) as usize * BLOCK_SIZE;
        let decoded = match &self.cached {
            Some(index) => index.read(bytes, from, self.indexes(), out),
            None => self.index_in(name, bytes)?.read(bytes, 0, self.indexes(), out),
        };
        decoded.map_err(|error| error.context(format!("{name}: reading the pack at block {}", self.pack.start)))
    }
}

impl Meta {
    /// Plans a read of the blocks `indexes` of a pack.
    pub(super) fn plan_packed(
        &mut self,
        files: &DataFiles,
        pack: Run,
        indexes: Range<u64>,
        is_short: bool,
    ) -> Result<Packed> {
        let indexes = indexes.start as usize..indexes.end as usize;
        let (mut run, mut cached) = (pack, None);
        if is_short && pack.blocks > WHOLE_MAX && self.read_cache.holds_indexes() {
            let index = self.read_cache.index(pack.start);
            match index.as_ref().map(|index| index.place(&indexes)) {
                None => run.blocks = 1,
                Some(Some(place)) if !place.is_empty() => {
                    let (first, end) = (place.start / BLOCK_SIZE, place.end.div_ceil(BLOCK_SIZE));
                    run = Run { start: pack.start + first as u64, blocks: (end - first) as u64 };
                    cached = index;
                }
                // The pack does not have the blocks: decoding the whole pack says so.
                Some(_) => {}
            }
        }
        Ok(Packed { stored: self.stored(files, run)?, pack, index: indexes.start, blocks: indexes.len(), cached })
    }
}
