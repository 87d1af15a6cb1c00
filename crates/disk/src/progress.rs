//! How long work tells how far it is, and learns that nobody wants it any more.

/// Watches one piece of long work.
pub trait Progress: Sync {
    /// `done` of `total` bytes (or objects) are finished. Called often; must be cheap.
    fn update(&self, done: u64, total: u64);

    /// True once the work should stop: it then undoes what it began and ends with [`store::ErrorKind::Interrupted`].
    fn cancelled(&self) -> bool;
}

/// Nobody watches.
pub struct NoProgress;

impl Progress for NoProgress {
    fn update(&self, _done: u64, _total: u64) {}
    fn cancelled(&self) -> bool {
        false
    }
}
