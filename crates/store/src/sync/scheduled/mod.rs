//! Locks with the interface of parking_lot on top of those of shuttle. Shuttle runs all threads of a store as
//! coroutines of one thread, and its scheduler chooses the next one at every lock, release and atomic operation.
//!
//! 1. A wait without a timeout blocks: when no thread can run, shuttle reports a deadlock.
//! 2. A wait with a timeout ends by a notification or after a random number of steps, so it is never part of a
//!    deadlock. The waiting thread does not block, but yields at each step.
//! 3. Time passes only in timeouts and sleeps, each as long as requested ([`time`]). No real clock has an influence, so
//!    a seed repeats a schedule.
//! 4. Threads interleave with sequentially consistent memory. Results that only weaker orderings allow are not
//!    explored.

pub mod atomic;
pub mod thread;
pub mod time;

use shuttle::rand::{Rng, thread_rng};
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A timed wait ends after at most `1 << TIMEOUT_BITS` steps of its thread.
const TIMEOUT_BITS: u32 = 8;

/// A lock.
#[derive(Default)]
pub struct Mutex<T> {
    inner: shuttle::sync::Mutex<T>,
}

impl<T> Mutex<T> {
    /// An unlocked lock.
    pub const fn new(value: T) -> Self {
        Self { inner: shuttle::sync::Mutex::new(value) }
    }

    /// Takes the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: self, inner: Some(self.inner.lock().unwrap_or_else(PoisonError::into_inner)) }
    }

    /// Takes the lock if no thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = self.inner.try_lock().ok()?;
        Some(MutexGuard { mutex: self, inner: Some(inner) })
    }
}

/// A lock that is held.
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// Absent only while a method of this module has released the lock.
    inner: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> MutexGuard<'_, T> {
    /// Releases the lock.
    pub fn unlock_fair(guard: Self) {
        drop(guard);
    }

    /// Releases the lock, and takes it again.
    pub fn bump(guard: &mut Self) {
        guard.inner = None;
        *guard = guard.mutex.lock();
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.inner.as_ref().expect("the lock is held")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("the lock is held")
    }
}

/// A lock held by many readers, or by one writer.
#[derive(Default)]
pub struct RwLock<T> {
    inner: shuttle::sync::RwLock<T>,
}

impl<T> RwLock<T> {
    /// An unlocked lock.
    pub const fn new(value: T) -> Self {
        Self { inner: shuttle::sync::RwLock::new(value) }
    }

    /// Takes the lock for reading.
    pub fn read(&self) -> shuttle::sync::RwLockReadGuard<'_, T> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock for writing.
    pub fn write(&self) -> shuttle::sync::RwLockWriteGuard<'_, T> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A condition variable.
#[derive(Default)]
pub struct Condvar {
    inner: shuttle::sync::Condvar,
    /// Number of notifications so far, for timed waits.
    notified: AtomicU64,
}

impl Condvar {
    /// A condition variable without waiting threads.
    pub const fn new() -> Self {
        Self { inner: shuttle::sync::Condvar::new(), notified: AtomicU64::new(0) }
    }

    /// Releases the lock until a notification.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.inner.take().expect("the lock is held");
        guard.inner = Some(self.inner.wait(inner).unwrap_or_else(PoisonError::into_inner));
    }

    /// Releases the lock until a notification, or until a random number of steps.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) {
        let seen = self.notified.load(Ordering::Relaxed);
        // The number of bits is random, so that short and long waits are equally likely.
        let bits = thread_rng().gen_range(0..=TIMEOUT_BITS);
        let mut steps = thread_rng().gen_range(0..1u32 << bits);
        guard.inner = None;
        while self.notified.load(Ordering::Relaxed) == seen {
            if steps == 0 {
                time::pass(time);
                break;
            }
            steps -= 1;
            shuttle::thread::yield_now();
        }
        *guard = guard.mutex.lock();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.notified.fetch_add(1, Ordering::Relaxed);
        self.inner.notify_all();
    }
}
