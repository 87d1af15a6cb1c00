//! Locks, atomics, threads and their clock: those of the system, or with the feature `schedules` those of a scheduler
//! that decides every step of every thread from a seed.
//!
//! The whole crate takes them from here only. The feature belongs to the package `lamina-schedules`, which compiles
//! these sources a second time: programs never contain it.

#[cfg(feature = "schedules")]
mod scheduled;
#[cfg(not(feature = "schedules"))]
mod system;

#[cfg(feature = "schedules")]
pub use scheduled::{Condvar, Mutex, MutexGuard, RwLock, atomic, thread, time};
#[cfg(not(feature = "schedules"))]
pub use system::{Condvar, Mutex, MutexGuard, RwLock, atomic, thread, time};
