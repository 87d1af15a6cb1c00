//! Tests of the tree, from the outside and on plain memory.
//!
//! | file | what it proves |
//! |---|---|
//! | `memory` | the store the tests run on: it asserts the contract of [`NodeStore`](super::NodeStore) at every call |
//! | `model` | random operations on many trees equal ordinary maps; references are exact, nothing leaks |
//! | `shape` | fill, depth and the cost of operations |
//! | `damage` | impossible pages are refused; contradicting trees end in errors, not in panics or loops |

#![allow(clippy::unwrap_used)]

mod damage;
mod growth;
mod memory;
mod model;
mod shape;

/// A small seeded generator (SplitMix64): the same seed, the same test.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// True `percent` times of 100.
    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}
