//! A clock that advances only in the timeouts and sleeps of its threads. Its zero has no meaning: schedules of one
//! thread of the system share it, and only differences are used.

use std::cell::Cell;
use std::ops::Add;
use std::time::Duration;

thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Lets time pass.
pub fn pass(time: Duration) {
    NOW.set(NOW.get() + time);
}

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    /// This point.
    pub fn now() -> Self {
        Self(NOW.get())
    }

    /// Time since.
    pub fn elapsed(&self) -> Duration {
        NOW.get() - self.0
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}
