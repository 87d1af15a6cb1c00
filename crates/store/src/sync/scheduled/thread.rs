//! Threads: coroutines of the scheduler.

pub use shuttle::thread::{Builder, JoinHandle, yield_now};

use std::time::Duration;

/// Lets others go on; so much time has passed then.
pub fn sleep(time: Duration) {
    yield_now();
    super::time::pass(time);
}
