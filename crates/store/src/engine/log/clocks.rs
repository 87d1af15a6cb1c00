//! What is durable: counters that only grow, read without a lock.
//!
//! Two counters. *Acknowledged* writes are numbered for the flush that makes them durable. *Placed* writes, those to
//! the data files, are numbered for the flush of the data files that makes them durable; a pending change that refers
//! to data has the number of the write as its gate.

use crate::sync::atomic::{AtomicU64, Ordering};

/// The clocks of a store.
#[derive(Default)]
pub struct Clocks {
    acknowledged: AtomicU64,
    durable: AtomicU64,
    home: AtomicU64,
    synced: AtomicU64,
}

impl Clocks {
    /// Counts a write that is acknowledged, and returns its number.
    pub fn acknowledge(&self) -> u64 {
        self.acknowledged.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The number of the last acknowledged write.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// Whether every write up to this one is durable.
    pub fn is_durable(&self, write: u64) -> bool {
        self.durable.load(Ordering::Acquire) >= write
    }

    /// Notes that every write up to this one is durable.
    pub fn set_durable(&self, write: u64) {
        self.durable.fetch_max(write, Ordering::AcqRel);
    }

    /// Counts a write to the data files, or a reservation of space, that has ended, and returns its number. Called
    /// after the files have noted it, so that a flush that covers the number covers the write.
    pub fn wrote_home(&self) -> u64 {
        self.home.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The number of the last write to the data files.
    pub fn home(&self) -> u64 {
        self.home.load(Ordering::Acquire)
    }

    /// The last of them that is durable.
    pub fn synced(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Notes that the writes to the data files up to this one are durable.
    pub fn set_synced(&self, write: u64) {
        self.synced.fetch_max(write, Ordering::AcqRel);
    }

    /// Counts everything that changes data: shows whether there was any activity.
    pub fn activity(&self) -> u64 {
        self.acknowledged() + self.home()
    }
}
