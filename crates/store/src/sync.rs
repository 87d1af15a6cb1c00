//! Locks, atomics and threads, from one place: a controlled scheduler can stand in for them.

pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

/// Atomic numbers.
pub mod atomic {
    pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
}

/// Threads.
pub mod thread {
    pub use std::thread::{Builder, JoinHandle, sleep, yield_now};
}
