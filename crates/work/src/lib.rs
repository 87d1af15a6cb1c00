//! Long work: how it reports progress, how it is cancelled, and how its rate is limited.
//!
//! The code that watches the work implements [`Progress`]. The code that does the work calls [`Throttle::step`] after
//! each step, which reports progress, waits as long as the rate requires, and returns whether to continue. Neither is
//! called under a lock that requests need.

#![forbid(unsafe_code)]

mod throttle;

pub use throttle::Throttle;

/// Watches long work. Every method may be called often and from any thread, and must be cheap.
pub trait Progress: Sync {
    /// `done` of `total` are finished, in bytes or objects. The total is an estimate that may change.
    fn update(&self, _done: u64, _total: u64) {}

    /// True once the work should stop: it then undoes its changes, or leaves them for the next attempt, and fails with
    /// the kind *interrupted*.
    fn cancelled(&self) -> bool {
        false
    }

    /// The most bytes per second that the work may move; 0 means no limit. May change at any time.
    fn rate(&self) -> u64 {
        0
    }

    /// `bytes` more were read, written or verified. Called by the code that limits the rate.
    fn moved(&self, _bytes: u64) {}

    /// Everything up to `done` is durable: after a crash, the same work may continue there.
    fn durable(&self, _done: u64) {}
}

impl<P: Progress + ?Sized> Progress for &P {
    fn update(&self, done: u64, total: u64) {
        (**self).update(done, total);
    }

    fn cancelled(&self) -> bool {
        (**self).cancelled()
    }

    fn rate(&self) -> u64 {
        (**self).rate()
    }

    fn moved(&self, bytes: u64) {
        (**self).moved(bytes);
    }

    fn durable(&self, done: u64) {
        (**self).durable(done);
    }
}

/// Ignores reports, and never cancels or limits the work.
pub struct NoProgress;

impl Progress for NoProgress {}

/// Forwards to another progress, with a limited rate.
pub struct Throttled<'a> {
    /// Receives the reports and can cancel.
    pub progress: &'a dyn Progress,
    /// Bytes per second; 0 means no limit.
    pub rate: u64,
}

impl Progress for Throttled<'_> {
    fn update(&self, done: u64, total: u64) {
        self.progress.update(done, total);
    }

    fn cancelled(&self) -> bool {
        self.progress.cancelled()
    }

    fn rate(&self) -> u64 {
        slower(self.rate, self.progress.rate())
    }

    fn moved(&self, bytes: u64) {
        self.progress.moved(bytes);
    }

    fn durable(&self, done: u64) {
        self.progress.durable(done);
    }
}

/// Forwards to another progress, except the reports of this part of the work.
pub struct Unreported<'a>(pub &'a dyn Progress);

impl Progress for Unreported<'_> {
    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }

    fn rate(&self) -> u64 {
        self.0.rate()
    }

    fn moved(&self, bytes: u64) {
        self.0.moved(bytes);
    }
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
    fn update(&self, done: u64, total: u64) {
        let (before, all) = match self.place {
            WorkPlace::Behind { before, total } => (before, total),
            WorkPlace::OneOf { index, count } => (total.saturating_mul(index), total.saturating_mul(count)),
        };
        self.whole.update(before.saturating_add(done), all);
    }

    fn cancelled(&self) -> bool {
        self.whole.cancelled()
    }

    fn rate(&self) -> u64 {
        self.whole.rate()
    }

    fn moved(&self, bytes: u64) {
        self.whole.moved(bytes);
    }
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
