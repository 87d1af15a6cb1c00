//! Locks, atomics, threads and their clock: those of the system, or with the feature `schedules` those of a scheduler
//! that decides every step of every thread from a seed.
//!
//! The whole crate imports them only from this module. Only the package `lamina-schedules`, which compiles these
//! sources a second time, enables the feature; programs never contain it.

#[cfg(feature = "schedules")]
mod scheduled;
#[cfg(not(feature = "schedules"))]
mod system;

#[cfg(feature = "schedules")]
pub use scheduled::{Condvar, Mutex, MutexGuard, RwLock, atomic, thread, time};
#[cfg(not(feature = "schedules"))]
pub use system::{Condvar, Mutex, MutexGuard, RwLock, atomic, thread, time};
