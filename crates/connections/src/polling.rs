//! Looking again and again for a moment before sleeping.
//!
//! A client with few requests at a time answers within microseconds, and so does the medium when much is in flight;
//! putting the processor to sleep and waking it costs more than that, in virtual machines above all. As QEMU's event
//! loop does it, the moment adapts: it grows while waits are short and goes to nothing when they are not, so that a
//! quiet client costs no time. Others get the processor between two looks.

use std::time::{Duration, Instant};

/// Waits up to this long are worth polling for.
const WINDOW_MAX: Duration = Duration::from_micros(50);
/// The first window after a wait that was short.
const WINDOW_MIN: Duration = Duration::from_micros(4);

/// How long to look before sleeping.
#[derive(Debug, Default)]
pub struct Polling {
    window: Duration,
}

impl Polling {
    /// Calls `look` until it finds something or the moment has passed.
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

    /// Learns from a wait that the moment was too short for.
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
    fn it_looks_longer_while_waits_are_short_and_not_at_all_after_a_long_one() {
        let mut polling = Polling::default();
        assert_eq!(polling.poll(|| Some(())), None, "nothing is known yet: no looking");
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
