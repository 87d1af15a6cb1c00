//! Seeded randomness: the same seed gives the same run, on every machine.

/// A small generator (splitmix64): fast, and good enough to choose operations and fill blocks.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator whose numbers follow from `seed`.
    pub fn new(seed: u64) -> Self {
        // Neighbouring seeds must not give related streams.
        Self(mix(seed ^ 0x6c61_6d69_6e61))
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound.max(1)
    }

    /// A number from `from` up to and including `to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True in `chance` of 100 cases.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// One of `choices`, which must not be empty.
    pub fn choose<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// `length` bytes that follow from `seed` and differ in every word, so that no byte of one write passes for another's.
/// Seeds that are multiples of 61 give zeros: data that happens to be zero is data all the same.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    if seed.is_multiple_of(61) {
        return vec![0; length];
    }
    let mut out = Vec::with_capacity(length.next_multiple_of(8));
    let mut word = mix(seed);
    while out.len() < length {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(seed | 1);
        out.extend_from_slice(&(word ^ (word >> 29)).to_le_bytes());
    }
    out.truncate(length);
    out
}
