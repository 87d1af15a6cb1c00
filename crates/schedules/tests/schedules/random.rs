//! Numbers from a seed.

/// A small seeded generator (SplitMix64).
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    /// The generator of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator of its own for a part of what this one decides.
    pub fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// A number below `1 << bits`, small ones as likely as large ones.
    pub fn scaled(&mut self, bits: u32) -> u64 {
        let bits = self.below(u64::from(bits) + 1);
        self.below(1 << bits)
    }

    /// True `percent` times of 100.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of the items.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}
