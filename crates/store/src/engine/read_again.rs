//! When maintenance reads again what the medium could not read: tables of regions, and trees of deleted objects.
//!
//! 1. The first attempt is made a second after a loss, so that a short failure of the medium keeps regions out of use
//!    for a short time only. The pause doubles after each attempt that leaves something unread, up to a minute.
//! 2. A new loss begins with the first pause again, because it may belong to another failure than an older loss that
//!    lasts.
//! 3. A failing medium may take seconds for each read. Attempts use at most the time divided by [`SHARE`].

use crate::sync::time::Instant;
use std::time::Duration;

/// The pause before the first attempt.
const FIRST: Duration = Duration::from_secs(1);
/// The longest pause between two attempts.
const LAST: Duration = Duration::from_secs(60);
/// The share of the time for attempts.
const SHARE: u32 = 8;

/// The time of the next attempt.
pub(super) struct ReadAgain {
    next: Instant,
    pause: Duration,
    /// No attempt is made before this time.
    rest: Instant,
    /// The number of losses at the last call of [`ReadAgain::is_due`].
    losses: u64,
}

impl ReadAgain {
    /// The first attempt is due after the shortest pause, because something may have been unreadable when the store was
    /// opened.
    pub fn new() -> Self {
        let now = Instant::now();
        Self { next: now + FIRST, pause: FIRST, rest: now, losses: 0 }
    }

    /// Whether an attempt is due; `losses` is how many times something was lost so far.
    pub fn is_due(&mut self, now: Instant, losses: u64) -> bool {
        if losses > self.losses {
            (self.losses, self.pause) = (losses, FIRST);
            self.next = self.next.min((now + FIRST).max(self.rest));
        }
        now >= self.next
    }

    /// Notes the end of an attempt that took `spent`; `unread` is the number of regions and objects that it could not
    /// read.
    pub fn end(&mut self, now: Instant, spent: Duration, unread: usize) {
        self.rest = now + spent * (SHARE - 1);
        self.pause = if unread == 0 { LAST } else { (self.pause * 2).min(LAST) };
        self.next = (now + self.pause).max(self.rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_begin_soon_after_each_loss_and_then_become_rare() {
        let begin = Instant::now();
        let after = |seconds: u64| begin + Duration::from_secs(seconds);
        let mut again = ReadAgain { next: after(60), pause: LAST, rest: begin, losses: 3 };
        assert!(!again.is_due(after(10), 3) && again.is_due(after(60), 3));
        // Attempts that fail, after 1, 2, 4 .. seconds.
        assert!(!again.is_due(after(20), 4) && again.is_due(after(21), 4));
        let mut now = 21;
        for pause in [2, 4, 8, 16, 32, 60, 60] {
            again.end(after(now), Duration::ZERO, 1);
            assert!(!again.is_due(after(now + pause - 1), 4) && again.is_due(after(now + pause), 4), "{pause}");
            now += pause;
        }
        // Another loss while an older one lasts.
        again.end(after(now), Duration::ZERO, 1);
        assert!(!again.is_due(after(now + 5), 5) && again.is_due(after(now + 6), 5));
        // Attempts that take long are rare, also after new losses.
        again.end(after(now + 6), Duration::from_secs(4), 2);
        assert!(!again.is_due(after(now + 33), 6) && again.is_due(after(now + 34), 6));
        again.end(after(now + 34), Duration::ZERO, 0);
        assert!(!again.is_due(after(now + 93), 6) && again.is_due(after(now + 94), 6));
    }
}
