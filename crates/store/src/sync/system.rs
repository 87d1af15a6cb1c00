//! The locks of parking_lot; atomics, threads and clock of the standard library.

pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

/// Atomic numbers.
pub mod atomic {
    pub use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
}

/// Threads.
pub mod thread {
    pub use std::thread::{Builder, JoinHandle, sleep, yield_now};
}

/// The clock for waits and pauses.
pub mod time {
    pub use std::time::Instant;
}
