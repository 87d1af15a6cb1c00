//! Content that a pass has examined and left as it is, so that the next pass neither reads nor compresses it again.
//!
//! A key is computed from the checksums of the blocks, so changed content is examined again, and nothing has to be
//! forgotten when blocks are written or freed. Two contents with the same key would only leave one of them as it is.
//! The keys are in memory only: after a restart everything is examined once more.

use crate::pack::Codec;
use rustc_hash::FxBuildHasher;
use std::hash::BuildHasher;

/// The most keys (8 MiB): those of 128 GiB in windows of 128 KiB.
const KEYS_MAX: usize = if cfg!(test) { 1 << 8 } else { 1 << 20 };

/// The keys of examined content. Each key has one possible place, and replaces an older key there.
#[derive(Default)]
pub(crate) struct Examined(Vec<u64>);

impl Examined {
    /// The key of content that is described by these numbers: checksums, and positions of blocks.
    pub fn key(codec: Codec, content: &[u32], place: u64) -> u64 {
        // Zero means that a place is empty.
        FxBuildHasher.hash_one((codec, content, place)).max(1)
    }

    pub fn contains(&self, key: u64) -> bool {
        self.0.get(place(key)) == Some(&key)
    }

    pub fn insert(&mut self, key: u64) {
        if self.0.is_empty() {
            self.0 = vec![0; KEYS_MAX];
        }
        self.0[place(key)] = key;
    }
}

fn place(key: u64) -> usize {
    (key % KEYS_MAX as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_until_another_one_takes_its_place() {
        let mut examined = Examined::default();
        let key = Examined::key(Codec::Lz4, &[1, 2], 0);
        assert!(!examined.contains(key));
        examined.insert(key);
        assert!(examined.contains(key) && !examined.contains(key + 1));
        for other in [
            Examined::key(Codec::Zstd(3), &[1, 2], 0),
            Examined::key(Codec::Lz4, &[2, 1], 0),
            Examined::key(Codec::Lz4, &[1, 2], 1),
        ] {
            assert!(!examined.contains(other));
        }
        examined.insert(key.wrapping_add(KEYS_MAX as u64));
        assert!(!examined.contains(key));
    }
}
