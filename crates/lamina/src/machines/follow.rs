//! Following many machines from a terminal: a bar on stderr, and Ctrl-C.

use crate::follow::Bar;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use work::Progress;

/// Follows work on machines.
pub struct Follow {
    bar: Bar,
    interrupted: Arc<AtomicBool>,
}

impl Follow {
    /// What is done is called `what`, and counted as `template` says.
    pub fn new(what: &'static str, template: &str, interrupted: Arc<AtomicBool>) -> Self {
        Self { bar: Bar::new(what, template), interrupted }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish();
    }
}

impl Progress for Follow {
    fn update(&self, done: u64, total: u64) {
        self.bar.update(done, total);
    }

    fn cancelled(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}
