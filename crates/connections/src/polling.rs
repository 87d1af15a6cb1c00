//! Polling for a short time before sleeping.
//!
//! A client with few requests at a time responds within microseconds, and storage with many requests in flight
//! completes the next request as fast. Sleeping and waking up takes longer, especially in virtual machines. As in
//! QEMU's event loop, the polling time adapts: it grows while waits are short, and drops to zero when they become long,
//! so that an idle client costs no CPU time. The thread yields the processor between two polls.

use std::time::{Duration, Instant};

/// Longest wait for which polling is worthwhile.
const WINDOW_MAX: Duration = Duration::from_micros(50);
/// Polling time after the first short wait.
const WINDOW_MIN: Duration = Duration::from_micros(4);

/// How long to poll before sleeping.
#[derive(Debug, Default)]
pub struct Polling {
    window: Duration,
}

impl Polling {
    /// Calls `look` until it returns a result or the polling time is over.
    pub fn poll<T>(&self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if self.window.is_zero() {
            return None;
        }
        let began = Instant::now();
        loop {
            if let Some(found) = look() {
                return Some(found);
            }
            if began.elapsed() >= self.window {
                return None;
            }
            rustix::thread::sched_yield();
        }
    }

    /// Adapts the polling time after a wait that took longer than the polling.
    pub fn slept(&mut self, time: Duration) {
        self.window = match time <= WINDOW_MAX {
            true => (self.window * 2).clamp(WINDOW_MIN, WINDOW_MAX),
            false => Duration::ZERO,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_lasts_longer_while_waits_are_short_and_ends_after_a_long_one() {
        let mut polling = Polling::default();
        assert_eq!(polling.poll(|| Some(())), None, "no polling before the first short wait");
        for _ in 0..10 {
            polling.slept(WINDOW_MAX / 2);
        }
        assert_eq!(polling.window, WINDOW_MAX);
        assert_eq!(polling.poll(|| Some(3)), Some(3));
        assert_eq!(polling.poll(|| None::<()>), None);
        polling.slept(Duration::from_millis(1));
        assert!(polling.window.is_zero());
    }
}
