//! Groups blocks with equal checksums and different contents, by a second hash of their contents.
//!
//! CRC32C is the only value by which a scan knows blocks. Some software ends its blocks with a CRC32C of them, so that
//! all these blocks have one checksum: ext4 does this. A guest can also choose contents with one checksum. Of blocks
//! with one checksum, all are compared with a single one first. Those that differ from it are read once, and a hash of
//! 64 bits groups them, so that most comparisons after that are of equal blocks.
//!
//! What must hold:
//!
//! 1. The hash is only a hint: blocks with equal hashes are compared byte by byte. Its key is random, so a guest cannot
//!    choose contents with equal hashes.
//! 2. The memory is limited, however many blocks have one checksum: [`HASHED_MAX`] blocks are grouped at a time.
//! 3. A block that changes meanwhile is left.

use super::{SharePass, ShareStep};
use crate::engine::Engine;
use crate::{Result, is_lost};
use std::hash::{BuildHasher, RandomState};

/// The most blocks that are grouped at a time, with up to 50 bytes of memory for each. If more blocks with one checksum
/// differ from the one that was kept first, equal blocks among them are found only within groups of this many.
pub const HASHED_MAX: usize = if cfg!(test) { 2048 } else { 1 << 18 };
/// How many blocks are read in a step.
const STEP_BLOCKS: usize = 64;

/// Prints of blocks that differ from those with the same checksums that were kept first.
#[derive(Default)]
pub(super) struct Unequal {
    /// The prints that are not grouped yet, in ascending order of their checksums.
    waiting: Vec<u32>,
    /// The prints that are being grouped, and how many of them were read.
    chunk: Vec<u32>,
    read: usize,
    /// The prints of the chunk with the hashes of their contents, in ascending order of the prints.
    hashes: Vec<(u32, u64)>,
    hasher: RandomState,
}

impl Unequal {
    /// Adds prints to those that wait, with those of the `kept` ones that have the same checksums: each of the prints
    /// was compared with only one of them.
    pub fn add(&mut self, mut indexes: Vec<u32>, mut kept: Vec<u32>, sum_of: impl Fn(u32) -> u32) {
        indexes.sort_unstable_by_key(|index| sum_of(*index));
        kept.retain(|kept| indexes.binary_search_by_key(&sum_of(*kept), |index| sum_of(*index)).is_ok());
        if self.waiting.is_empty() {
            self.waiting = indexes;
        } else {
            self.waiting.append(&mut indexes);
        }
        self.waiting.append(&mut kept);
        self.waiting.sort_unstable_by_key(|index| (sum_of(*index), *index));
    }

    /// Begins with the next prints that wait: all those with the highest checksums, and at most [`HASHED_MAX`]. False
    /// if there are none.
    pub fn begin_chunk(&mut self, sum_of: impl Fn(u32) -> u32) -> bool {
        (self.read, self.hashes) = (0, Vec::new());
        self.chunk.clear();
        while let Some(last) = self.waiting.last() {
            let sum = sum_of(*last);
            let alike = self.waiting.iter().rev().take_while(|index| sum_of(**index) == sum).count();
            let room = HASHED_MAX - self.chunk.len();
            if alike > room && !self.chunk.is_empty() {
                break;
            }
            let taken = self.waiting.split_off(self.waiting.len() - alike.min(room));
            // There is no other block with this checksum.
            if taken.len() > 1 {
                self.chunk.extend(taken);
            }
        }
        self.chunk.sort_unstable();
        !self.chunk.is_empty()
    }

    /// The prints that are to be read next.
    fn next(&self) -> &[u32] {
        let end = self.chunk.len().min(self.read + STEP_BLOCKS);
        &self.chunk[self.read..end]
    }

    /// Whether prints of the chunk are still to be read.
    pub fn is_reading(&self) -> bool {
        self.read < self.chunk.len()
    }

    /// The hash of the content of a print. `None` if the print is not of this chunk, or was left.
    pub fn hash_of(&self, index: u32) -> Option<u64> {
        let at = self.hashes.binary_search_by_key(&index, |(index, _)| *index).ok()?;
        Some(self.hashes[at].1)
    }
}

impl Engine {
    /// Reads the next blocks that differ from the ones that were kept, and groups them once all of a chunk are read.
    pub(super) fn hash_next(&self, pass: &mut SharePass) -> Result<ShareStep> {
        let mut step = ShareStep::default();
        for index in pass.unequal.next().to_vec() {
            match self.hash_content(pass, index, &mut step.read) {
                Err(error) if is_lost(&error) && self.running.goes_on() => {
                    tracing::debug!(%error, "equal blocks are not looked for");
                }
                hash => pass.unequal.hashes.extend(hash?.map(|hash| (index, hash))),
            }
            pass.unequal.read += 1;
        }
        if !pass.unequal.is_reading() {
            let indexes = pass.unequal.hashes.iter().map(|(index, _)| *index).collect();
            pass.group_by_hash(indexes);
        }
        Ok(step)
    }

    /// Reads a block and hashes its content. `None` if it has another checksum than at the scan, or cannot be read.
    /// Blocks that pending operations concern are read too: the checksum says whether the content is the one of the
    /// scan.
    fn hash_content(&self, pass: &SharePass, index: u32, read: &mut u64) -> Result<Option<u64>> {
        let print = pass.prints.get(index);
        let (object, _) = pass.objects[print.object as usize];
        let found = self.meta.look(|meta| {
            let Some(stored) = meta.written_blocks(object, print.logical(), 1)?[0] else { return Ok(None) };
            let entry = meta.entry(stored.physical)?;
            if entry.suspect || stored.packed.is_none() && entry.checksum != print.sum {
                return Ok(None);
            }
            Ok(Some((stored, meta.checksums_of(stored, &[print.sum], 1)?, meta.freed.guard())))
        })?;
        let Some((stored, checksums, _guard)) = found else { return Ok(None) };
        *read += stored.run(1).blocks;
        let block = self.read_stored(stored, 1, &checksums)?;
        Ok(block.map(|block| pass.unequal.hasher.hash_one(&block[..])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chunks of prints with these checksums.
    fn chunks(sums: &[u32], kept: &[u32]) -> Vec<Vec<u32>> {
        let mut unequal = Unequal::default();
        let indexes = (0..sums.len() as u32).filter(|index| !kept.contains(index)).collect();
        let sum_of = |index: u32| sums[index as usize];
        unequal.add(indexes, kept.to_vec(), sum_of);
        std::iter::from_fn(|| unequal.begin_chunk(sum_of).then(|| unequal.chunk.clone())).collect()
    }

    #[test]
    fn prints_with_equal_checksums_are_in_one_chunk() {
        assert_eq!(chunks(&[5, 7, 5, 8, 7, 9], &[]), [[0, 1, 2, 4]], "there is nothing to compare the others with");
        assert_eq!(chunks(&[5, 7, 5, 7, 9], &[3, 4]), [[0, 1, 2, 3]], "kept prints with other checksums are left");
        assert!(chunks(&[], &[]).is_empty());
        let most = HASHED_MAX as u32;
        let three: Vec<u32> = (0..3 * (most / 2)).map(|index| index / (most / 2)).collect();
        let lengths = |sums: &[u32]| chunks(sums, &[]).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lengths(&three), [HASHED_MAX, HASHED_MAX / 2]);
    }

    #[test]
    fn the_number_of_prints_in_a_chunk_is_limited() {
        let lengths: Vec<usize> = chunks(&vec![7; 2 * HASHED_MAX + 5], &[]).iter().map(Vec::len).collect();
        assert_eq!(lengths, [HASHED_MAX, HASHED_MAX, 5]);
    }
}
