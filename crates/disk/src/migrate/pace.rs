//! Keeps copying to a rate that may change at any time, and ends it on request.

use crate::progress::Progress;
use std::time::{Duration, Instant};
use store::{Error, ErrorKind, Result};

/// Longest sleep before a request to stop is looked for.
const SLEEP_MAX: Duration = Duration::from_millis(20);
/// Time that was not used does not count for longer than this.
const CREDIT_MAX: Duration = Duration::from_millis(200);

/// The error of what was stopped on request.
pub(super) fn stopped() -> Error {
    Error::new(ErrorKind::Interrupted, "stopped on request; the disk is as before")
}

/// One copier's account.
pub(super) struct Throttle<'a> {
    progress: &'a dyn Progress,
    /// When what was copied so far will have been due.
    due: Instant,
}

impl<'a> Throttle<'a> {
    pub fn new(progress: &'a dyn Progress) -> Self {
        Self { progress, due: Instant::now() }
    }

    /// Waits until `bytes` more may have been copied.
    pub fn wait(&mut self, bytes: u64) -> Result<()> {
        let now = Instant::now();
        let rate = self.progress.rate();
        if rate == 0 {
            self.due = now;
            return Ok(());
        }
        let earliest = now.checked_sub(CREDIT_MAX).unwrap_or(now);
        self.due = self.due.max(earliest) + Duration::from_secs_f64(bytes as f64 / rate as f64);
        while let Some(left) = self.due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            std::thread::sleep(left.min(SLEEP_MAX));
            if self.progress.cancelled() {
                return Err(stopped());
            }
            if self.progress.rate() != rate {
                self.due = Instant::now();
            }
        }
        Ok(())
    }
}
