//! Content that identifies its location: every sector contains its disk, number and version, so that a misplaced,
//! outdated or torn sector is detected. A sector of zeros has version 0. Sectors of even versions can be compressed.

use crate::random::{Random, mix};

/// Bytes of a sector, the unit that a crash does not tear.
pub const SECTOR: usize = 512;

/// Fills one sector.
pub fn fill(sector: &mut [u8], disk: u64, number: u64, version: u64) {
    if version == 0 {
        return sector.fill(0);
    }
    let mut word = mix(disk ^ mix(number) ^ mix(version).rotate_left(17));
    sector[..8].copy_from_slice(&version.to_le_bytes());
    // The first half of a sector of an even version repeats one word.
    let repeated = if version.is_multiple_of(2) { SECTOR / 2 / 8 } else { 0 };
    for (at, bytes) in sector[8..].chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word.to_le_bytes());
        if at < repeated {
            continue;
        }
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(disk | 1);
    }
}

/// The version of a complete sector, or an error that describes its content.
pub fn version(sector: &[u8], disk: u64, number: u64) -> Result<u64, String> {
    let version = u64::from_le_bytes(sector[..8].try_into().unwrap());
    let mut expected = [0; SECTOR];
    fill(&mut expected, disk, number, version);
    if sector == expected {
        return Ok(version);
    }
    Err(format!("sector {number} of disk {disk} holds nothing that was written there (version word {version:#x})"))
}

/// Random bytes from a seed, for tests that compare whole buffers.
pub fn bytes(seed: u64, length: usize) -> Vec<u8> {
    Random(seed).bytes(length)
}
