//! Threads: coroutines of the scheduler.

pub use shuttle::thread::{Builder, JoinHandle, yield_now};

use std::time::Duration;

/// Lets other threads run, and advances the clock by this time.
pub fn sleep(time: Duration) {
    yield_now();
    super::time::pass(time);
}
