//! The stream of a backup: a connection to the command that reads or writes it.
//!
//! The other end of the stream may be a pipe on which nothing happens. So a thread watches for the cancellation of the
//! request, and then shuts the connection down, which ends a read or write that waits for the command.

use disk::Progress;
use error::{Error, ErrorKind, IoContext, Result};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Name of the stream in messages.
pub const NAME: &str = "the stream of the backup";
/// Interval of checks for cancellation.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Connects to the command that listens at `path`, and passes the connection to `work`. `Interrupted` if the work fails
/// after the request was cancelled.
pub fn with<T>(path: &Path, progress: &dyn Progress, work: impl FnOnce(UnixStream) -> Result<T>) -> Result<T> {
    let during = || "connecting to the command that reads or writes the stream of the backup".to_owned();
    let stream = connections::listen::connect(path).during(during)?;
    let watched = stream.try_clone().during(during)?;
    let done = thread::scope(|scope| {
        // Dropped at the end of the work, also by a panic, which ends the thread.
        let (_working, ended) = mpsc::channel::<()>();
        let watch = move || {
            while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK_INTERVAL) {
                if progress.cancelled() {
                    // An error is ignored: it means that the command has disconnected.
                    let _ = watched.shutdown(Shutdown::Both);
                    return;
                }
            }
        };
        thread::Builder::new().name("backup-cancel".to_owned()).spawn_scoped(scope, watch).during(during)?;
        work(stream)
    });
    done.map_err(|error| match error.kind() {
        ErrorKind::Io if progress.cancelled() => {
            Error::new(ErrorKind::Interrupted, format!("stopped on request ({error})"))
        }
        _ => error,
    })
}
