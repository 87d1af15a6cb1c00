//! Layout of a disk with snapshots: the data is spread over all levels, each piece in a random level.

use super::{BLOCK, write_blocks};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::random::Random;

/// The blocks of level `level`, in a disk of this depth whose blocks are written in the order `order`. Each level has
/// an equal share, the oldest first.
pub(super) fn level(order: &[u32], depth: u32, level: u32) -> impl Iterator<Item = u64> {
    let (blocks, levels) = (order.len() as u64, u64::from(depth) + 1);
    let bound = |n: u64| (blocks * n / levels) as usize;
    let level = u64::from(level);
    order[bound(level)..bound(level + 1)].iter().map(|b| u64::from(*b))
}

/// A layout in pieces of a fixed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spread {
    /// Bytes of a piece.
    pub(super) piece: u64,
    /// Capacity of the disk in bytes.
    pub(super) size: u64,
    /// Number of levels above the base.
    pub(super) depth: u32,
    /// Seed of the order of pieces.
    pub(super) seed: u64,
}

impl Spread {
    /// Writes the blocks of one level.
    pub(super) fn write(&self, endpoint: &Endpoint, number: u32) -> Result<()> {
        let pieces = u32::try_from(self.size / self.piece).unwrap_or(u32::MAX);
        let order = Random::new(self.seed).order(pieces);
        write_blocks(endpoint, level(&order, self.depth, number), self.piece)
    }

    /// The layout's name in reports.
    pub(super) fn word(&self) -> &'static str {
        if self.piece == BLOCK { "scattered" } else { "runs" }
    }
}

/// Name of the snapshot that precedes a level.
pub(super) fn snapshot_name(level: u32) -> String {
    format!("level-{level:05}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_in_one_level() {
        for depth in [0, 1, 7, 1000] {
            let order = Random::new(3).order(1500);
            let mut seen: Vec<u64> = (0..=depth).flat_map(|number| level(&order, depth, number)).collect();
            assert!((0..=depth).all(|number| level(&order, depth, number).count() > 0));
            seen.sort_unstable();
            assert_eq!(seen, (0..1500).collect::<Vec<_>>());
        }
    }
}
