//! The index of a pack: where each block is stored in the pack, how, and the checksum of its content. With the index, a
//! block is read from the one or two stored blocks that hold it.

use super::{ABSENT, BLOCKS_MAX, ENTRY, HEAD, LZ4, MAGIC, PLAIN, VERSION, ZSTD, damaged, decompress};
use crate::{Error, ErrorKind, Result, checksum};
use backend::BLOCK_SIZE;
use std::ops::Range;

/// The most blocks of a read that fetches parts of packs.
pub const SHORT_MAX: u64 = 8;

/// The most stored blocks of a pack that is always fetched whole.
pub const WHOLE_MAX: u64 = 2;

/// A block of a pack. They are stored one after the other.
struct Fragment {
    checksum: u32,
    stored: u16,
    codec: u8,
}

/// A valid index.
pub struct Index(Box<[Fragment]>);

impl Index {
    /// Decodes head and index of a pack of `length` bytes. `bytes` are its beginning, at least the first block.
    pub fn decode(bytes: &[u8], length: usize) -> Result<Self> {
        let word = |at: usize| bytes.get(at..at + 4).map(|word| [word[0], word[1], word[2], word[3]]);
        let half = |at: usize| bytes.get(at..at + 2).map(|half| u16::from_le_bytes([half[0], half[1]]));
        let (Some(count), Some(version), Some(sum)) = (half(6), half(4), word(8)) else {
            return Err(damaged("it is too short"));
        };
        if word(0) != Some(MAGIC) {
            return Err(damaged("it does not begin as a pack"));
        }
        if version != VERSION {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("a pack has version {version}, this program supports version {VERSION}: use a newer one"),
            ));
        }
        let count = usize::from(count);
        let index = bytes.get(..HEAD + ENTRY * count).filter(|_| (1..=BLOCKS_MAX).contains(&count));
        let mut index = index.ok_or_else(|| damaged("its number of blocks is impossible"))?.to_vec();
        index[8..12].fill(0);
        if checksum(&index) != u32::from_le_bytes(sum) {
            return Err(damaged("its index fails its checksum"));
        }
        let mut end = index.len();
        let mut fragments = Vec::with_capacity(count);
        for entry in index[HEAD..].chunks_exact(ENTRY) {
            let checksum = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            let (stored, codec) = (u16::from_le_bytes([entry[4], entry[5]]), entry[6]);
            let possible = match codec {
                ABSENT => stored == 0,
                PLAIN => usize::from(stored) == BLOCK_SIZE,
                LZ4 | ZSTD => stored > 0 && usize::from(stored) < BLOCK_SIZE,
                _ => false,
            };
            end += usize::from(stored);
            if !possible || end > length || entry[7] != 0 {
                return Err(damaged("its index has an impossible entry"));
            }
            fragments.push(Fragment { checksum, stored, codec });
        }
        Ok(Self(fragments.into_boxed_slice()))
    }

    /// The stored bytes of each block.
    pub fn stored_bytes(&self) -> Vec<u64> {
        self.0.iter().map(|fragment| u64::from(fragment.stored)).collect()
    }

    /// The checksum of the content of each block; `None` for those that are not in the pack.
    pub fn checksums(&self) -> Vec<Option<u32>> {
        self.0.iter().map(|fragment| (fragment.codec != ABSENT).then_some(fragment.checksum)).collect()
    }

    /// Memory of the index in bytes.
    pub fn memory(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// Where blocks are stored in the pack, in bytes. `None` if the pack has fewer blocks.
    pub fn place(&self, blocks: &Range<usize>) -> Option<Range<usize>> {
        let bytes =
            |fragments: &[Fragment]| fragments.iter().map(|fragment| usize::from(fragment.stored)).sum::<usize>();
        let length = bytes(self.0.get(blocks.clone())?);
        let start = HEAD + ENTRY * self.0.len() + bytes(&self.0[..blocks.start]);
        Some(start..start + length)
    }

    /// The blocks of which a part is stored in these bytes of the pack.
    pub fn blocks_in(&self, bytes: &Range<usize>) -> Range<usize> {
        let (mut start, mut found) = (HEAD + ENTRY * self.0.len(), 0..0);
        for (number, fragment) in self.0.iter().enumerate() {
            let end = start + usize::from(fragment.stored);
            if start < bytes.end && bytes.start < end {
                if found.is_empty() {
                    found.start = number;
                }
                found.end = number + 1;
            }
            start = end;
        }
        found
    }

    /// Decodes blocks. `stored` are bytes of the pack that begin at offset `from` and contain the blocks. `out` has
    /// room for all blocks. Returns their checksums.
    pub fn read(&self, stored: &[u8], from: usize, blocks: Range<usize>, out: &mut [u8]) -> Result<Vec<u32>> {
        let fewer = || damaged("it has fewer blocks than the map says");
        let mut at = self.place(&blocks).and_then(|place| place.start.checked_sub(from)).ok_or_else(fewer)?;
        let fragments = &self.0[blocks];
        let mut sums = Vec::with_capacity(fragments.len());
        for (fragment, out) in fragments.iter().zip(out.chunks_exact_mut(BLOCK_SIZE)) {
            let end = at + usize::from(fragment.stored);
            let stored = stored.get(at..end).ok_or_else(fewer)?;
            at = end;
            let length = match fragment.codec {
                PLAIN => {
                    out.copy_from_slice(stored);
                    Some(BLOCK_SIZE)
                }
                LZ4 => lz4_flex::block::decompress_into(stored, out).ok(),
                ZSTD => decompress(stored, out)?,
                _ => None,
            };
            if length != Some(BLOCK_SIZE) || checksum(out) != fragment.checksum {
                return Err(damaged("a block in it cannot be decompressed, or fails its checksum"));
            }
            sums.push(fragment.checksum);
        }
        Ok(sums)
    }
}

/// Which of the stored blocks of a pack are proven by its index: those in which everything is as it was written.
/// `bytes` is the whole pack.
pub fn proven(bytes: &[u8]) -> Vec<bool> {
    let blocks = bytes.len() / BLOCK_SIZE;
    let Ok(index) = Index::decode(bytes, bytes.len()) else { return vec![false; blocks] };
    let mut good = vec![true; blocks];
    let mut out = [0; BLOCK_SIZE];
    let mut end = 0;
    for number in 0..index.0.len() {
        let Some(place) = index.place(&(number..number + 1)) else { return vec![false; blocks] };
        end = place.end;
        let is_there = index.0[number].codec != ABSENT;
        if is_there && index.read(bytes, 0, number..number + 1, &mut out).is_err() {
            good[place.start / BLOCK_SIZE..place.end.div_ceil(BLOCK_SIZE)].fill(false);
        }
    }
    // Behind the contents are zeros.
    for (block, good) in good.iter_mut().enumerate().skip(end / BLOCK_SIZE) {
        let rest = end.max(block * BLOCK_SIZE)..(block + 1) * BLOCK_SIZE;
        *good &= bytes[rest].iter().all(|byte| *byte == 0);
    }
    good
}
