//! CRC32C (Castagnoli), the checksum of every structure and every block.
//!
//! The checksum of several blocks follows from theirs, without a look at the data: so what was summed block by block
//! for the medium need not be summed again for the wire.

use backend::BLOCK_SIZE;
use crc_fast::{CrcAlgorithm, Digest};
use std::sync::LazyLock;

/// The checksum of bytes.
pub fn checksum(bytes: &[u8]) -> u32 {
    // The width of CRC-32/ISCSI is 32 bits: the upper half of the answer is always zero.
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The checksum of bytes that lie in several places.
pub fn checksum_of(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

/// What becomes of a checksum when a block comes behind what was summed, but for the checksum of that block: byte by
/// byte of it, as it is linear.
static BEHIND: LazyLock<[[u32; 256]; 4]> = LazyLock::new(|| {
    let bit = |bit: usize| crc_fast::checksum_combine(CrcAlgorithm::Crc32Iscsi, 1 << bit, 0, BLOCK_SIZE as u64) as u32;
    let bits: [u32; 32] = std::array::from_fn(bit);
    std::array::from_fn(|byte| {
        std::array::from_fn(|value| {
            (0..8).filter(|at| value >> at & 1 == 1).fold(0, |sum, at| sum ^ bits[byte * 8 + at])
        })
    })
});

/// The checksum of blocks in a row, of their checksums.
pub fn checksum_of_blocks(sums: impl IntoIterator<Item = u32>) -> u32 {
    let behind = &*BEHIND;
    // Of no bytes it is zero.
    sums.into_iter().fold(0, |sum: u32, next| {
        let bytes = sum.to_le_bytes();
        behind.iter().zip(bytes).fold(next, |sum, (table, byte)| sum ^ table[usize::from(byte)])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_blocks_is_that_of_their_bytes() {
        let mut state = 1u32;
        let bytes: Vec<u8> = (0..9 * BLOCK_SIZE)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
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
}
