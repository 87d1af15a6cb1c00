//! Threads: coroutines of the scheduler.

pub use shuttle::thread::{Builder, JoinHandle, yield_now};

use std::time::Duration;

/// Lets other threads run for this much time of the clock.
pub fn sleep(time: Duration) {
    yield_now();
    super::time::pass(time);
}
