//! Locks of file blocks: a thread that changes the allocation state of a block holds the block's lock exclusively.
//!
//! Guest writes hold a block's lock shared. Discards, filling and hole punching hold it exclusively while they examine
//! and change the block (about a millisecond). Reads take no lock.
//!
//! 1. Blocks share a fixed number of locks. A thread that needs several locks takes them in ascending order, so that no
//!    two threads wait for each other.
//! 2. A write to a block that is being filled with zeros waits, so zeros never overwrite acknowledged data.

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::ops::Range;

/// The number of locks of an extent. Adjacent blocks have different locks, so that a busy block delays few others.
const STRIPES: usize = 64;

/// The most blocks changed at a time; each has a lock of its own.
pub(super) const ALONE_MAX: u64 = 16;

pub(super) struct Locks {
    stripes: Box<[RwLock<()>]>,
}

/// Shared locks of blocks. Most writes touch one or two blocks.
#[expect(dead_code, reason = "guards are only held")]
pub(super) enum Shared<'a> {
    One(RwLockReadGuard<'a, ()>),
    Two(RwLockReadGuard<'a, ()>, RwLockReadGuard<'a, ()>),
    Many(Vec<RwLockReadGuard<'a, ()>>),
}

impl Locks {
    pub(super) fn new() -> Self {
        Self { stripes: (0..STRIPES).map(|_| RwLock::new(())).collect() }
    }

    /// Takes shared locks of blocks.
    pub(super) fn share(&self, blocks: Range<u64>) -> Shared<'_> {
        let first = stripe(blocks.start);
        match blocks.end.saturating_sub(blocks.start) {
            0 | 1 => Shared::One(self.stripes[first].read()),
            2 => {
                let second = stripe(blocks.start + 1);
                // Where the lock numbers wrap round, the order of the locks differs from that of the blocks.
                let (low, high) = (first.min(second), first.max(second));
                Shared::Two(self.stripes[low].read(), self.stripes[high].read())
            }
            _ => Shared::Many(stripes_of(&blocks).map(|index| self.stripes[index].read()).collect()),
        }
    }

    /// Takes exclusive locks of blocks.
    pub(super) fn alone(&self, blocks: Range<u64>) -> Vec<RwLockWriteGuard<'_, ()>> {
        stripes_of(&blocks).map(|index| self.stripes[index].write()).collect()
    }
}

fn stripe(block: u64) -> usize {
    (block % STRIPES as u64) as usize
}

/// The locks of a range of blocks, in ascending order.
fn stripes_of(blocks: &Range<u64>) -> impl Iterator<Item = usize> {
    let count = blocks.end.saturating_sub(blocks.start).min(STRIPES as u64) as usize;
    let first = stripe(blocks.start);
    (0..STRIPES).filter(move |index| (index + STRIPES - first) % STRIPES < count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_of_blocks_are_taken_in_order() {
        for start in 0..200 {
            for count in 1..70 {
                let taken: Vec<usize> = stripes_of(&(start..start + count)).collect();
                assert!(taken.is_sorted());
                let mut wanted: Vec<usize> = (start..start + count).map(stripe).collect();
                wanted.sort_unstable();
                wanted.dedup();
                assert_eq!(taken, wanted);
            }
        }
    }

    #[test]
    fn writers_share_a_block_and_changes_of_allocation_exclude_them() {
        let locks = Locks::new();
        let first = locks.share(0..1);
        let second = locks.share(0..3);
        assert!(locks.stripes[0].try_write().is_none());
        assert!(locks.stripes[3].try_write().is_some());
        drop((first, second));
        let alone = locks.alone(62..66);
        assert_eq!(alone.len(), 4);
        for index in [62, 63, 0, 1] {
            assert!(locks.stripes[index].try_read().is_none());
        }
    }
}
