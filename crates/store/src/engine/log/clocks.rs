//! What is durable: numbers that only grow, read without a lock.
//!
//! Two clocks. *Acknowledged* writes count up to the flush that makes them durable. *Home* writes count up to the flush
//! of the data files that makes them durable; a pending change that points at data has the number of the write as its
//! gate.

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
    /// A write is acknowledged: its number.
    pub fn acknowledge(&self) -> u64 {
        self.acknowledged.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The last write acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// Whether every write up to this one is durable.
    pub fn is_durable(&self, write: u64) -> bool {
        self.durable.load(Ordering::Acquire) >= write
    }

    /// Every write up to this one is durable.
    pub fn set_durable(&self, write: u64) {
        self.durable.fetch_max(write, Ordering::AcqRel);
    }

    /// A home write, or a reservation of space, has finished: its number. After the files were told of it, so that a
    /// flush that covers the number covers the write.
    pub fn wrote_home(&self) -> u64 {
        self.home.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The last home write.
    pub fn home(&self) -> u64 {
        self.home.load(Ordering::Acquire)
    }

    /// The last home write that is durable.
    pub fn synced(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Home writes up to this one are durable.
    pub fn set_synced(&self, write: u64) {
        self.synced.fetch_max(write, Ordering::AcqRel);
    }

    /// Everything that changes data counts here, to see whether anything went on.
    pub fn activity(&self) -> u64 {
        self.acknowledged() + self.home()
    }
}
