//! Integers at fixed places of structures, and the checksums of these structures. A place outside the bytes reads as
//! zero, so no content can cause a panic.

use crc_fast::{CrcAlgorithm, Digest};

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = at.checked_add(N).and_then(|end| bytes.get(at..end));
    found.and_then(|found| found.try_into().ok()).unwrap_or([0; N])
}

pub(crate) fn byte(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or_default()
}

pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// Whether the bytes at a place are `expected`.
pub(crate) fn has(bytes: &[u8], at: usize, expected: &[u8]) -> bool {
    at.checked_add(expected.len()).and_then(|end| bytes.get(at..end)) == Some(expected)
}

/// The register of CRC32C after `parts`, with `seed` before, not inverted at the end, as ext4 stores it.
pub(crate) fn crc32c_register(seed: u32, parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(seed));
    parts.iter().for_each(|part| digest.update(part));
    !(digest.finalize() as u32)
}

/// CRC32C as XFS stores it, of a structure whose own checksum at `field` counts as zero.
pub(crate) fn crc32c_without(bytes: &[u8], field: usize) -> u32 {
    let (before, rest) = bytes.split_at(field.min(bytes.len()));
    !crc32c_register(!0, &[before, &[0; 4], rest.get(4..).unwrap_or_default()])
}

/// The CRC-32 of GPT.
pub(crate) fn crc32(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

/// The CRC-16 of ext4's group descriptors: polynomial 0x8005, reflected.
pub(crate) fn crc16(seed: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(seed, |sum, byte| {
        (0..8).fold(sum ^ u16::from(*byte), |sum, _| if sum & 1 == 1 { sum >> 1 ^ 0xA001 } else { sum >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_have_the_published_check_values() {
        let text = b"123456789";
        assert_eq!(!crc32c_register(!0, &[text]), 0xE306_9283);
        let first = crc32c_register(!0, &[&text[..4]]);
        assert_eq!(crc32c_register(first, &[&text[4..]]), !0xE306_9283, "continued");
        assert_eq!(crc32(&[text]), 0xCBF4_3926);
        assert_eq!(crc16(!0, text), 0x4B37);
        assert_eq!(crc32c_without(b"12345678", 2), !crc32c_register(!0, &[b"12\0\0\0\x0078"]));
    }

    #[test]
    fn a_place_outside_the_bytes_reads_as_zero() {
        assert_eq!((le32(&[1, 2, 3], 0), be64(&[], usize::MAX), byte(&[1], 1)), (0, 0, 0));
        assert!(!has(b"abc", usize::MAX, b"a") && has(b"abc", 1, b"bc"));
    }
}
