//! Counters that determine which writes are durable. They only grow, and are read without a lock.
//!
//! *Acknowledged* writes are counted to find the flush that makes each durable. Writes to the *data files* are counted
//! to find the flush of the data files that makes each durable. The gate of a pending change that refers to data is the
//! number of the write of that data.

use crate::sync::atomic::{AtomicU64, Ordering};

/// The counters of a store.
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
    /// after the file is marked as dirty, so that a flush that covers the number covers the write.
    pub fn wrote_home(&self) -> u64 {
        self.home.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The number of the last write to the data files.
    pub fn home(&self) -> u64 {
        self.home.load(Ordering::Acquire)
    }

    /// The number of the last durable write to the data files.
    pub fn synced(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Notes that the writes to the data files up to this one are durable.
    pub fn set_synced(&self, write: u64) {
        self.synced.fetch_max(write, Ordering::AcqRel);
    }

    /// A count of all events that change data, by which maintenance detects activity.
    pub fn activity(&self) -> u64 {
        self.acknowledged() + self.home()
    }
}
