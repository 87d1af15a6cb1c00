//! Keeping long work to a rate.

use crate::Progress;
use parking_lot::Mutex;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Longest sleep before a request to stop is looked for.
const SLEEP_MAX: Duration = Duration::from_millis(20);
/// Time that was not used does not count for longer than this.
const CREDIT_MAX: Duration = Duration::from_millis(50);

/// Keeps one piece of work to its rate, which may change at any time. Threads that do the work together share it.
pub struct Throttle<P> {
    progress: P,
    debt: Mutex<Debt>,
}

/// Bytes moved that the rate has not allowed for yet; less than 0 for what may still be moved at once.
struct Debt {
    bytes: f64,
    at: Instant,
}

impl<P: Progress> Throttle<P> {
    /// For work that is watched, and given its rate, by `progress`.
    pub fn new(progress: P) -> Self {
        Self { progress, debt: Mutex::new(Debt { bytes: 0.0, at: Instant::now() }) }
    }

    /// What watches the work.
    pub fn progress(&self) -> &P {
        &self.progress
    }

    /// `done` of `total` are finished, for which `moved` bytes were read and written since the last step. Waits as
    /// long as the rate asks for, and says whether to go on.
    pub fn step(&self, done: u64, total: u64, moved: u64) -> ControlFlow<()> {
        let wanted = self.wait(moved);
        self.progress.update(done, total);
        if wanted && !self.progress.cancelled() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    /// Waits until `bytes` more may have been moved; false once the work should stop.
    pub fn wait(&self, bytes: u64) -> bool {
        self.wait_unless(bytes, || self.progress.cancelled())
    }

    /// As [`Throttle::wait`], and ends with false as soon as `stopped`.
    pub fn wait_unless(&self, bytes: u64, stopped: impl Fn() -> bool) -> bool {
        self.progress.moved(bytes);
        let mut more = bytes as f64;
        loop {
            let rate = self.progress.rate() as f64;
            let left = self.debt.lock().pay(std::mem::take(&mut more), rate);
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

impl Debt {
    /// Adds bytes, takes off what the rate has allowed for since the last time, and says how long the rest takes.
    fn pay(&mut self, more: f64, rate: f64) -> Duration {
        let now = Instant::now();
        let passed = now.duration_since(std::mem::replace(&mut self.at, now)).as_secs_f64();
        if rate == 0.0 {
            self.bytes = 0.0;
            return Duration::ZERO;
        }
        self.bytes = (self.bytes + more - passed * rate).max(-CREDIT_MAX.as_secs_f64() * rate);
        // A rate can be so low that the time is not worth a number.
        Duration::try_from_secs_f64(self.bytes.max(0.0) / rate).unwrap_or(Duration::MAX)
    }
}
