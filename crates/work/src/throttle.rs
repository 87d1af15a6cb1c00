//! Limits the rate of long work.

use crate::Progress;
use parking_lot::Mutex;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// The longest sleep between two checks for cancellation.
const SLEEP_MAX: Duration = Duration::from_millis(20);
/// At most this much unused time counts, so that no long burst follows a pause.
const CREDIT_MAX: Duration = Duration::from_millis(50);

/// Limits the rate of some work, which may change at any time. All threads that do the work share one throttle.
pub struct Throttle<P> {
    progress: P,
    debt: Mutex<Debt>,
}

/// Bytes that were moved ahead of the rate; negative if more may be moved at once.
struct Debt {
    bytes: f64,
    at: Instant,
}

impl<P: Progress> Throttle<P> {
    /// A throttle for work that `progress` watches and limits.
    pub fn new(progress: P) -> Self {
        Self { progress, debt: Mutex::new(Debt { bytes: 0.0, at: Instant::now() }) }
    }

    /// The progress of the work.
    pub fn progress(&self) -> &P {
        &self.progress
    }

    /// Reports that `done` of `total` are finished, and that `moved` bytes were moved since the last step. Waits as
    /// long as the rate requires, and returns whether to continue.
    pub fn step(&self, done: u64, total: u64, moved: u64) -> ControlFlow<()> {
        // Before the wait, which may be long.
        self.progress.update(done, total);
        let wanted = self.wait(moved);
        if wanted && !self.progress.cancelled() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    /// Waits until `bytes` more may be moved. False once the work should stop.
    pub fn wait(&self, bytes: u64) -> bool {
        self.wait_unless(bytes, || self.progress.cancelled())
    }

    /// Like [`Throttle::wait`], but also returns false as soon as `stopped` does.
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
    /// Adds bytes to the debt, subtracts those that the rate has allowed since the last call, and returns how long the
    /// remaining debt takes.
    fn pay(&mut self, more: f64, rate: f64) -> Duration {
        let now = Instant::now();
        let passed = now.duration_since(std::mem::replace(&mut self.at, now)).as_secs_f64();
        if rate == 0.0 {
            self.bytes = 0.0;
            return Duration::ZERO;
        }
        self.bytes = (self.bytes + more - passed * rate).max(-CREDIT_MAX.as_secs_f64() * rate);
        // At a very low rate the time may exceed the range of a duration.
        Duration::try_from_secs_f64(self.bytes.max(0.0) / rate).unwrap_or(Duration::MAX)
    }
}
