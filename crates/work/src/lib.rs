//! Long work: how it reports progress, how it is cancelled, and how its rate is limited.
//!
//! The code that watches the work implements [`Progress`]. The code that does the work calls [`Throttle::step`] after
//! each step, which reports progress, waits as long as the rate requires, and returns whether to continue. Neither is
//! called under a lock that requests need.

#![forbid(unsafe_code)]

mod throttle;

pub use throttle::Throttle;

/// The lowest limit of a rate, in bytes per second. At lower ones even the work on metadata would seem to hang.
pub const RATE_MIN: u64 = 64 << 10;

/// Watches long work. Every method may be called often and from any thread, and must be cheap.
///
/// A progress that changes some reports and passes the others on names the next one in [`Progress::next`], and
/// implements the methods that it changes.
pub trait Progress: Sync {
    /// Receives what this progress does not implement itself; `None` if it is the last one.
    fn next(&self) -> Option<&dyn Progress> {
        None
    }

    /// `done` of `total` are finished, in bytes or objects. The total is an estimate that may change.
    fn update(&self, done: u64, total: u64) {
        if let Some(next) = self.next() {
            next.update(done, total);
        }
    }

    /// True once the work should stop: it then undoes its changes, or leaves them for the next attempt, and fails with
    /// the kind *interrupted*.
    fn cancelled(&self) -> bool {
        self.next().is_some_and(|next| next.cancelled())
    }

    /// The most bytes per second that the work may move; 0 means no limit. May change at any time.
    fn rate(&self) -> u64 {
        self.next().map_or(0, |next| next.rate())
    }

    /// `bytes` more were read, written or verified. Called by the code that limits the rate.
    fn moved(&self, bytes: u64) {
        if let Some(next) = self.next() {
            next.moved(bytes);
        }
    }

    /// Everything up to `done` is durable: after a crash, the same work may continue there.
    fn durable(&self, done: u64) {
        if let Some(next) = self.next() {
            next.durable(done);
        }
    }
}

impl<P: Progress> Progress for &P {
    fn next(&self) -> Option<&dyn Progress> {
        Some(*self)
    }
}

impl Progress for &dyn Progress {
    fn next(&self) -> Option<&dyn Progress> {
        Some(*self)
    }
}

/// Ignores reports, and never cancels or limits the work.
pub struct NoProgress;

impl Progress for NoProgress {}

/// Forwards to another progress, with a limited rate.
pub struct Throttled<'a> {
    /// Receives the reports and can cancel.
    pub progress: &'a dyn Progress,
    /// Bytes per second; 0 means no limit. A limit below [`RATE_MIN`] counts as this rate.
    pub rate: u64,
}

impl Progress for Throttled<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(self.progress)
    }

    fn rate(&self) -> u64 {
        let rate = if self.rate == 0 { 0 } else { self.rate.max(RATE_MIN) };
        slower(rate, self.progress.rate())
    }
}

/// Forwards to another progress, except the reports of this part of the work.
pub struct Unreported<'a>(pub &'a dyn Progress);

impl Progress for Unreported<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(self.0)
    }

    fn update(&self, _: u64, _: u64) {}

    fn durable(&self, _: u64) {}
}

/// Progress of one part of work that is reported as a whole.
pub struct WorkPart<'a> {
    /// Watches the whole work.
    pub whole: &'a dyn Progress,
    /// The position of this part in the whole.
    pub place: WorkPlace,
}

/// The position of a part in the whole work.
#[derive(Clone, Copy, Debug)]
pub enum WorkPlace {
    /// The parts before this part have the size `before`, all parts together have the size `total`.
    Behind {
        /// Size of the parts before this part.
        before: u64,
        /// Size of all parts.
        total: u64,
    },
    /// Part `index` of `count` parts of equal size.
    OneOf {
        /// The index, from 0 on.
        index: u64,
        /// Number of parts.
        count: u64,
    },
}

impl Progress for WorkPart<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(self.whole)
    }

    fn update(&self, done: u64, total: u64) {
        let (before, all) = match self.place {
            WorkPlace::Behind { before, total } => (before, total),
            WorkPlace::OneOf { index, count } => (total.saturating_mul(index), total.saturating_mul(count)),
        };
        self.whole.update(before.saturating_add(done), all);
    }

    /// The position in one part is not a position in the whole work.
    fn durable(&self, _: u64) {}
}

/// The lower of two rates. A rate of 0 means no limit.
pub fn slower(one: u64, other: u64) -> u64 {
    match (one, other) {
        (0, rate) | (rate, 0) => rate,
        (one, other) => one.min(other),
    }
}

#[cfg(test)]
mod tests;
