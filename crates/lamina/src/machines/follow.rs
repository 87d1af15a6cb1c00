//! Following many machines from a terminal: a bar on stderr, and Ctrl-C.

use crate::follow::{BYTES, Bar, THINGS};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vm::fleet::Watch;

/// Follows work on machines: counts them, or the bytes of their disks once some are copied.
pub struct Follow {
    bar: Bar,
    in_bytes: AtomicBool,
    interrupted: Arc<AtomicBool>,
}

impl Follow {
    /// What is done is called `what`.
    pub fn new(what: &'static str, interrupted: Arc<AtomicBool>) -> Self {
        Self { bar: Bar::new(what, THINGS), in_bytes: AtomicBool::new(false), interrupted }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish();
    }
}

impl Watch for Follow {
    fn update(&self, done: usize, total: usize) {
        if !self.in_bytes.load(Ordering::Relaxed) {
            self.bar.update(done as u64, total as u64);
        }
    }

    fn bytes(&self, done: u64, total: u64) {
        if !self.in_bytes.swap(true, Ordering::Relaxed) {
            self.bar.count(BYTES);
        }
        self.bar.update(done, total);
    }

    fn cancelled(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}
