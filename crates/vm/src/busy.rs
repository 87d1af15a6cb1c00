//! Retries of operations that return `Busy` for a short time.

use error::{ErrorKind, Result};
use std::thread;
use std::time::{Duration, Instant};

/// Pause between attempts.
const INTERVAL: Duration = Duration::from_millis(5);

/// Repeats an operation while it fails with `Busy`; returns the last result.
pub fn while_busy<T>(patience: Duration, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => thread::sleep(INTERVAL),
            outcome => return outcome,
        }
    }
}
