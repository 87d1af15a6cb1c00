//! How fast data may go, all streams together.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Longest sleep before it is checked again whether the work was cancelled.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// Largest credit that builds up while no thread sends: a longer pause is not made up for.
const CREDIT: Duration = Duration::from_millis(100);

/// A rate that several threads share.
pub struct Pace {
    /// When the next byte may go.
    due: Mutex<Instant>,
}

impl Pace {
    /// Begins now.
    pub fn new() -> Self {
        Self { due: Mutex::new(Instant::now()) }
    }

    /// Waits until `bytes` may go at `rate` bytes a second, 0 for as fast as it goes; false when `stopped` said so
    /// before.
    pub fn wait(&self, bytes: u64, rate: u64, stopped: &dyn Fn() -> bool) -> bool {
        if rate == 0 {
            return true;
        }
        let time = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let mine = {
            let mut due = self.due.lock();
            let earliest = Instant::now().checked_sub(CREDIT).unwrap_or(*due);
            *due = (*due).max(earliest) + time;
            *due
        };
        loop {
            let left = mine.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            if stopped() {
                return false;
            }
            std::thread::sleep(left.min(SLEEP_MAX));
        }
    }
}
