//! How long work reports how far it is, and finds out that it is to stop.

use layer::Step;
use std::ops::ControlFlow;

/// Watches one piece of long work.
pub trait Progress: Sync {
    /// `done` of `total` bytes (or objects) are finished. Called often; must be cheap.
    fn update(&self, done: u64, total: u64);

    /// True once the work should stop: it then undoes what it began and ends with [`error::ErrorKind::Interrupted`].
    fn cancelled(&self) -> bool;

    /// Bytes per second that it may copy; 0 for as fast as it goes. May change at any time.
    fn rate(&self) -> u64 {
        0
    }

    /// So many bytes more were copied or verified. Called by what keeps the work to its rate.
    fn moved(&self, _bytes: u64) {}
}

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
        crate::pace::slower(self.rate, self.progress.rate())
    }

    fn moved(&self, bytes: u64) {
        self.progress.moved(bytes);
    }
}

/// Reports are dropped, and the work is never cancelled.
pub struct NoProgress;

impl Progress for NoProgress {
    fn update(&self, _done: u64, _total: u64) {}
    fn cancelled(&self) -> bool {
        false
    }
}

/// Tells of a step of long work on images, and whether to go on.
pub(crate) fn tell(progress: &dyn Progress, step: Step) -> ControlFlow<()> {
    progress.update(step.done, step.total);
    go_on(progress)
}

/// Whether work goes on.
pub(crate) fn go_on(progress: &dyn Progress) -> ControlFlow<()> {
    if progress.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Progress as the crates below know it.
pub(crate) struct Watched<'a>(pub &'a dyn Progress);

impl chain::Watch for Watched<'_> {
    fn progress(&self, done: u64, total: u64) {
        self.0.update(done, total);
    }

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
