//! Seeded random numbers: the same seed gives the same run on every machine.

pub use testkit::Random;

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// `length` bytes derived from `seed`. They differ in every word, so that bytes of one write are not mistaken for those
/// of another. Seeds that are multiples of 61 give zeros, because written zeros must be tested too. Seeds that are
/// multiples of 3 repeat each word, so that the bytes can be compressed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    if seed.is_multiple_of(61) {
        return vec![0; length];
    }
    let repeated = if seed.is_multiple_of(3) { 8 } else { 1 };
    let mut out = Vec::with_capacity(length.next_multiple_of(8 * repeated));
    let mut word = mix(seed);
    while out.len() < length {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(seed | 1);
        out.extend_from_slice(&(word ^ (word >> 29)).to_le_bytes().repeat(repeated));
    }
    out.truncate(length);
    out
}
