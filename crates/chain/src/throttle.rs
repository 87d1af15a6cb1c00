//! Keeping long work to a rate.

use crate::Watch;
use std::time::{Duration, Instant};

/// Longest sleep before a request to stop is looked for.
const SLEEP_MAX: Duration = Duration::from_millis(20);
/// Time that was not used does not count for longer than this.
const CREDIT_MAX: Duration = Duration::from_millis(50);

/// Keeps one piece of work to its rate, which may change at any time.
pub struct Throttle<W: Watch> {
    watch: W,
    /// Bytes moved that the rate has not allowed for yet; less than 0 for what may still be moved at once.
    owed: f64,
    at: Instant,
}

impl<W: Watch> Throttle<W> {
    /// For work that is watched, and given its rate, by `watch`.
    pub fn new(watch: W) -> Self {
        Self { watch, owed: 0.0, at: Instant::now() }
    }

    /// What watches the work.
    pub fn watch(&self) -> &W {
        &self.watch
    }

    /// Waits until `bytes` more may have been moved; false once the work should stop.
    pub fn wait(&mut self, bytes: u64) -> bool {
        self.wait_unless(bytes, Watch::cancelled)
    }

    /// As [`Throttle::wait`], and ends with false as soon as `stopped`.
    pub fn wait_unless(&mut self, bytes: u64, stopped: impl Fn(&W) -> bool) -> bool {
        self.watch.moved(bytes);
        self.owed += bytes as f64;
        loop {
            let rate = self.watch.rate() as f64;
            let now = Instant::now();
            let passed = now.duration_since(std::mem::replace(&mut self.at, now)).as_secs_f64();
            if rate == 0.0 {
                self.owed = 0.0;
                return true;
            }
            self.owed = (self.owed - passed * rate).max(-CREDIT_MAX.as_secs_f64() * rate);
            if self.owed <= 0.0 {
                return true;
            }
            if stopped(&self.watch) {
                return false;
            }
            std::thread::sleep(Duration::from_secs_f64(self.owed / rate).min(SLEEP_MAX));
        }
    }
}
