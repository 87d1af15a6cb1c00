//! Long work: how it says how far it is, how it learns that it is to stop, and how it keeps to a rate.
//!
//! What watches a piece of work implements [`Progress`]. What does the work tells a [`Throttle`] of each step
//! ([`Throttle::step`]), which reports, waits as long as the rate asks for, and answers whether to go on. Neither is
//! called under a lock that requests need.

#![forbid(unsafe_code)]

mod throttle;

pub use throttle::Throttle;

/// Watches one piece of long work. Every method may be called often, from any thread, and must be cheap.
pub trait Progress: Sync {
    /// `done` of `total` are finished, in a unit of the work: bytes, or objects. The total is an estimate that may
    /// change.
    fn update(&self, _done: u64, _total: u64) {}

    /// True once the work should stop: it then undoes what it began, or leaves it for the next try, and ends with an
    /// error of the kind *interrupted*.
    fn cancelled(&self) -> bool {
        false
    }

    /// Bytes per second that the work may move; 0 for as fast as it goes. May change at any time.
    fn rate(&self) -> u64 {
        0
    }

    /// So many bytes more were read, written or verified. Called by what keeps the work to its rate.
    fn moved(&self, _bytes: u64) {}

    /// What was done up to `done` is durable: after a crash, the same work may begin there.
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

/// Reports are dropped, and the work is never cancelled or slowed down.
pub struct NoProgress;

impl Progress for NoProgress {}

/// Another's progress, at a rate.
pub struct Throttled<'a> {
    /// Receives the reports and can cancel.
    pub progress: &'a dyn Progress,
    /// Bytes per second; 0 for as fast as it goes.
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

/// Another's progress that is not told how far this part of the work is.
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

/// One of several pieces of work that are one to their watcher.
pub struct WorkPart<'a> {
    /// Watches all of it.
    pub whole: &'a dyn Progress,
    /// Which of them it is.
    pub place: WorkPlace,
}

/// Which piece of several one is.
#[derive(Clone, Copy, Debug)]
pub enum WorkPlace {
    /// Behind others that came to `before`, of `total` in all.
    Behind {
        /// What they came to.
        before: u64,
        /// What all of them come to.
        total: u64,
    },
    /// Number `index` of `count` that are equal.
    OneOf {
        /// From 0 on.
        index: u64,
        /// All of them.
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

/// The lower of two rates, of which 0 is no limit.
pub fn slower(one: u64, other: u64) -> u64 {
    match (one, other) {
        (0, rate) | (rate, 0) => rate,
        (one, other) => one.min(other),
    }
}

#[cfg(test)]
mod tests;
