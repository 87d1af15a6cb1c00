//! How long to wait until a disk, a device or a drive is released, and retries of operations that return `Busy` until
//! then.

use error::{ErrorKind, Result};
use std::thread;
use std::time::{Duration, Instant};

/// How long a disk may remain open after the process that used it was ended. The server needs some time to close the
/// connection of the process.
pub(crate) const DISK_OF_ENDED_PROCESS: Duration = Duration::from_secs(20);
/// How long clients of a disk that a machine needs may take to disconnect. A disk that another client really uses is
/// refused after this time, so the time is short.
pub(crate) const DISK_OF_CLIENTS: Duration = Duration::from_secs(3);
/// How long a guest may take to release a device.
pub(crate) const DEVICE: Duration = Duration::from_secs(30);
/// How long a guest that has locked a drive may take to release it.
pub(crate) const LOCKED_DRIVE: Duration = Duration::from_secs(10);

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
