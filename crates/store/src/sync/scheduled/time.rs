//! A clock that advances only in timeouts and sleeps. All schedules of an operating-system thread share it, so only
//! differences have a meaning.

use std::cell::Cell;
use std::ops::Add;
use std::time::Duration;

thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Advances the clock.
pub fn pass(time: Duration) {
    NOW.set(NOW.get() + time);
}

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    /// The current time of the clock.
    pub fn now() -> Self {
        Self(NOW.get())
    }

    /// The time since this point.
    pub fn elapsed(&self) -> Duration {
        NOW.get() - self.0
    }

    /// The point earlier by `time`; `None` if it lies before the beginning of the clock.
    #[cfg(test)]
    pub fn checked_sub(&self, time: Duration) -> Option<Self> {
        self.0.checked_sub(time).map(Self)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}
