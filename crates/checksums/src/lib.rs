//! CRC32C (Castagnoli): the checksum of every structure and every block.
//!
//! The checksum of several blocks can be computed from the checksums of the single blocks, without the data. So blocks
//! with checksums that are known from the medium need not be summed again for the network.

#![forbid(unsafe_code)]

use backend::BLOCK_SIZE;
use crc_fast::{CrcAlgorithm, Digest};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// The checksum of bytes.
pub fn checksum(bytes: &[u8]) -> u32 {
    // The width of CRC-32/ISCSI is 32 bits: the upper half of the result is always zero.
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The checksum of bytes in several slices.
pub fn checksum_of(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

/// The checksum of a structure that stores this checksum in the four bytes at `field`. These bytes count as zero.
pub fn checksum_without(bytes: &[u8], field: usize) -> u32 {
    checksum_of(&[&bytes[..field], &[0; 4], &bytes[field + 4..]])
}

/// Tables for appending a block. The checksum of data followed by a block is the checksum of the block, XORed with four
/// entries of the tables: one for each byte of the checksum of the data. This is possible because CRC32C is linear.
static BEHIND: LazyLock<[[u32; 256]; 4]> = LazyLock::new(|| {
    let bit = |bit: usize| crc_fast::checksum_combine(CrcAlgorithm::Crc32Iscsi, 1 << bit, 0, BLOCK_SIZE as u64) as u32;
    let bits: [u32; 32] = std::array::from_fn(bit);
    std::array::from_fn(|byte| {
        std::array::from_fn(|value| {
            (0..8).filter(|at| value >> at & 1 == 1).fold(0, |sum, at| sum ^ bits[byte * 8 + at])
        })
    })
});

/// The checksum of consecutive blocks, from the checksums of the blocks.
pub fn checksum_of_blocks(sums: impl IntoIterator<Item = u32>) -> u32 {
    let behind = &*BEHIND;
    // The checksum of no bytes is zero.
    sums.into_iter().fold(0, |sum: u32, next| {
        let bytes = sum.to_le_bytes();
        behind.iter().zip(bytes).fold(next, |sum, (table, byte)| sum ^ table[usize::from(byte)])
    })
}

/// The changes of one byte of `length` bytes that change the checksum by `difference` (an XOR): the place of the byte,
/// and the XOR of its old and new value. The time grows with the length: 0.1 s for 64 KiB.
pub fn changes_of_one_byte(difference: u32, length: usize) -> Vec<(usize, u8)> {
    // The checksum is linear, so the difference of two checksums depends on the difference of the bytes only.
    let of_last: [u32; 256] = std::array::from_fn(|value| checksum(&[value as u8]) ^ checksum(&[0]));
    let mut found = Vec::new();
    for value in 1..=255 {
        let mut sum = of_last[usize::from(value)];
        for behind in 0..length {
            if sum == difference {
                found.push((length - 1 - behind, value));
            }
            sum = sum >> 8 ^ of_last[sum as usize & 0xff];
        }
    }
    found
}

/// The longest content in which a damaged byte is searched for. The search takes 0.1 s for this length.
const MENDED_MAX: usize = 64 << 10;

/// Mends one damaged byte of a content that consists of a body and a first line for the checksum of the body, as `line`
/// makes it. Returns what `decode` makes of the mended content. `None` if not exactly one change of one byte gives
/// content that `decode` accepts, and for content of more than 64 KiB.
pub fn mend_one_byte<T>(bytes: &[u8], line: impl Fn(u32) -> Vec<u8>, decode: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    if bytes.len() > MENDED_MAX {
        return None;
    }
    let mut decoded: Vec<T> =
        contents_of_one_changed_byte(bytes, line).iter().filter_map(|bytes| decode(bytes)).collect();
    if decoded.len() == 1 { decoded.pop() } else { None }
}

/// The contents that differ from `bytes` in one byte, and that consist of a body and a first line for the checksum of
/// the body, as `line` makes it. This line ends with the eight hexadecimal digits of the checksum and a line feed.
fn contents_of_one_changed_byte(bytes: &[u8], line: impl Fn(u32) -> Vec<u8>) -> Vec<Vec<u8>> {
    let length = line(0).len();
    if bytes.len() <= length {
        return Vec::new();
    }
    let (first, body) = bytes.split_at(length);
    let own = checksum(body);
    let mut contents = Vec::new();
    let right = line(own);
    if right.iter().zip(first).filter(|(right, found)| right != found).count() == 1 {
        contents.push([&right[..], body].concat());
    }
    let digits = std::str::from_utf8(&first[length - 9..length - 1]).ok();
    if let Some(sum) = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok())
        && line(sum) == first
    {
        for (at, change) in changes_of_one_byte(sum ^ own, body.len()) {
            let mut changed = bytes.to_vec();
            changed[length + at] ^= change;
            contents.push(changed);
        }
    }
    contents
}

/// The checksums of the blocks of some data.
#[derive(Clone, Debug)]
pub enum Checksums {
    /// One block, without an allocation of memory.
    One(u32),
    /// Several blocks: a part of the checksums computed for a whole write.
    Many(Arc<[u32]>, Range<usize>),
}

impl Checksums {
    /// Computes the checksums of whole blocks.
    pub fn of(bytes: &[u8]) -> Self {
        debug_assert!(!bytes.is_empty() && bytes.len().is_multiple_of(BLOCK_SIZE));
        if bytes.len() == BLOCK_SIZE {
            return Self::One(checksum(bytes));
        }
        let sums: Arc<[u32]> = bytes.chunks_exact(BLOCK_SIZE).map(checksum).collect();
        let count = sums.len();
        Self::Many(sums, 0..count)
    }

    /// The checksums, one for each block.
    pub fn as_slice(&self) -> &[u32] {
        match self {
            Self::One(sum) => std::slice::from_ref(sum),
            Self::Many(sums, range) => &sums[range.clone()],
        }
    }

    /// The checksum of all the data.
    pub fn whole(&self) -> u32 {
        checksum_of_blocks(self.as_slice().iter().copied())
    }

    /// The checksums of a part of the data.
    pub fn part(&self, blocks: Range<usize>) -> Self {
        match self {
            Self::One(sum) => Self::One(*sum),
            Self::Many(sums, range) => {
                Self::Many(Arc::clone(sums), range.start + blocks.start..range.start + blocks.end)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combined_block_checksums_equal_the_checksum_of_all_bytes() {
        let bytes = testkit::Random(1).bytes(9 * BLOCK_SIZE);
        for blocks in 0..=9 {
            let bytes = &bytes[..blocks * BLOCK_SIZE];
            let sums: Vec<u32> = bytes.chunks(BLOCK_SIZE).map(checksum).collect();
            assert_eq!(checksum_of_blocks(sums.iter().copied()), checksum(bytes), "{blocks} blocks");
            assert_eq!(checksum_of(&[bytes, &[]]), checksum(bytes));
            if blocks > 1 {
                assert_ne!(checksum_of_blocks(sums.into_iter().rev()), checksum(bytes), "their order counts");
            }
        }
    }
    #[test]
    fn a_change_of_one_byte_is_found_by_the_difference_of_the_checksums() {
        let bytes = testkit::Random(2).bytes(900);
        for (at, change) in [(0, 1), (1, 0x80), (450, 0x55), (898, 0xff), (899, 4)] {
            let mut changed = bytes.clone();
            changed[at] ^= change;
            let found = changes_of_one_byte(checksum(&bytes) ^ checksum(&changed), bytes.len());
            assert_eq!(found, [(at, change)]);
        }
        assert_eq!(changes_of_one_byte(0, bytes.len()), []);
    }

    #[test]
    fn one_changed_byte_of_a_line_or_its_body_is_found() {
        let line = |sum: u32| format!("record {sum:08x}\n").into_bytes();
        let body = testkit::Random(3).bytes(500);
        let content = [&line(checksum(&body))[..], &body].concat();
        for (at, change) in [(0, 1), (6, 0x20), (8, 1), (15, 0x40), (16, 1), (300, 0xff), (515, 8)] {
            let mut changed = content.clone();
            changed[at] ^= change;
            assert_eq!(contents_of_one_changed_byte(&changed, line), std::slice::from_ref(&content), "byte {at}");
            changed[100] ^= 1;
            assert!(!contents_of_one_changed_byte(&changed, line).contains(&content), "two bytes, one of them {at}");
        }
        assert!(contents_of_one_changed_byte(b"record", line).is_empty());
        assert!(contents_of_one_changed_byte(&content, line).is_empty(), "no byte is wrong");
    }
}
