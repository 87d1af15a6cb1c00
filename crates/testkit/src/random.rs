//! Seeded random numbers: the same seed gives the same test on every machine.

/// A small generator (SplitMix64), fast and good enough to choose operations and content.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A generator for a seed. The sequences of consecutive seeds are unrelated.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x6c61_6d69_6e61))
    }

    /// The next number.
    #[allow(clippy::should_implement_trait, reason = "the sequence never ends, so it is not an iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `limit`; 0 when `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// A random index below `limit`.
    pub fn index(&mut self, limit: usize) -> usize {
        self.below(limit as u64) as usize
    }

    /// A number from `from` up to and including `to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// A number below `limit`, for which each order of magnitude is equally likely.
    pub fn scaled(&mut self, limit: u64) -> u64 {
        let bits = 64 - limit.leading_zeros() as u64;
        (self.next() >> (64 - bits).min(63) >> self.below(bits)) % limit
    }

    /// True with a probability of `percent` %.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// True with a probability of one in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of the items, which must not be empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// Fills `out` with random bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }

    /// `count` random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.fill(&mut bytes);
        bytes
    }

    /// A new generator that is seeded by this one, for an independent part of a test.
    pub fn fork(&mut self) -> Self {
        Self(self.next())
    }
}

/// The finalizer of SplitMix64.
pub(crate) fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
