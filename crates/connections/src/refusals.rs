//! Log messages about refused clients and failed negotiations at a bounded rate, so that a client that connects
//! repeatedly does not fill the log.

use crate::limits::REFUSAL_LOG_INTERVAL;
use std::time::{Duration, Instant};

/// Refusals with the same cause. The first refusal is logged at once. Refusals within [`REFUSAL_LOG_INTERVAL`] after it
/// are counted, and logged as one message at the end of the interval.
#[derive(Debug, Default)]
pub struct Refusals {
    logged: Option<Instant>,
    pending: u64,
}

impl Refusals {
    /// Counts one refusal.
    pub fn count(&mut self) {
        self.pending += 1;
    }

    /// Number of refusals to log now: all since the last message, if the interval has passed.
    pub fn due(&mut self, now: Instant) -> Option<u64> {
        if self.pending == 0 || !self.wait(now).is_some_and(|wait| wait.is_zero()) {
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.pending))
    }

    /// Time until refusals have to be logged; `None` if there are none.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let due = |logged: Instant| (logged + REFUSAL_LOG_INTERVAL).saturating_duration_since(now);
        (self.pending > 0).then(|| self.logged.map_or(Duration::ZERO, due))
    }
}

/// Failed negotiations: counted and logged like [`Refusals`], with the last error.
#[derive(Debug, Default)]
pub struct Failures {
    counted: Refusals,
    last: String,
}

impl Failures {
    /// Counts a failure.
    pub fn count(&mut self, error: String) {
        self.counted.count();
        self.last = error;
    }

    /// Number of failures to log now, and the last error.
    pub fn due(&mut self, now: Instant) -> Option<(u64, String)> {
        self.counted.due(now).map(|failed| (failed, std::mem::take(&mut self.last)))
    }

    /// Time until failures have to be logged; `None` if there are none.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        self.counted.wait(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_refusal_is_logged_at_once_and_the_others_together_after_the_interval() {
        let (mut refusals, begin) = (Refusals::default(), Instant::now());
        assert_eq!((refusals.wait(begin), refusals.due(begin)), (None, None));
        refusals.count();
        assert_eq!(refusals.due(begin), Some(1));
        for _ in 0..500 {
            refusals.count();
            assert_eq!(refusals.due(begin + REFUSAL_LOG_INTERVAL / 2), None);
        }
        assert_eq!(refusals.wait(begin + REFUSAL_LOG_INTERVAL / 2), Some(REFUSAL_LOG_INTERVAL / 2));
        assert_eq!(refusals.due(begin + REFUSAL_LOG_INTERVAL), Some(500));
        assert_eq!(
            (refusals.wait(begin + REFUSAL_LOG_INTERVAL), refusals.due(begin + REFUSAL_LOG_INTERVAL * 9)),
            (None, None)
        );
    }
}
