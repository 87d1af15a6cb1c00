//! Following many machines from a terminal: a bar on stderr, and Ctrl-C.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vm::fleet::Watch;

/// How long work has to last before a bar shows.
const BAR_AFTER: Duration = Duration::from_millis(300);
const MACHINES: &str = "{msg} [{bar:30}] {human_pos} of {human_len}, {eta} left";
const BYTES: &str = "{msg} [{bar:30}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";

/// Follows work on machines.
pub struct Follow {
    bar: ProgressBar,
    begun: Instant,
    visible: AtomicBool,
    in_bytes: AtomicBool,
    machines: (AtomicU64, AtomicU64),
    interrupted: Arc<AtomicBool>,
}

impl Follow {
    /// What is done is called `what`.
    pub fn new(what: &'static str, interrupted: Arc<AtomicBool>) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_message(what);
        let follow = Self {
            bar,
            begun: Instant::now(),
            visible: AtomicBool::new(false),
            in_bytes: AtomicBool::new(false),
            machines: (AtomicU64::new(0), AtomicU64::new(0)),
            interrupted,
        };
        follow.style(MACHINES);
        follow
    }

    fn style(&self, template: &str) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style.progress_chars("=> "));
        }
    }

    fn show(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        if !self.visible.load(Ordering::Relaxed) && self.begun.elapsed() >= BAR_AFTER {
            self.visible.store(true, Ordering::Relaxed);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Watch for Follow {
    fn update(&self, done: usize, total: usize) {
        self.machines.0.store(done as u64, Ordering::Relaxed);
        self.machines.1.store(total as u64, Ordering::Relaxed);
        if !self.in_bytes.load(Ordering::Relaxed) {
            self.show(done as u64, total as u64);
        }
    }

    fn bytes(&self, done: u64, total: u64) {
        if !self.in_bytes.swap(true, Ordering::Relaxed) {
            self.style(BYTES);
        }
        self.show(done, total);
    }

    fn cancelled(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}
