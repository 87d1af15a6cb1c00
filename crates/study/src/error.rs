//! Errors that stop a measurement. A missed limit is not an error but a finding.

use std::io;

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or socket failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed, and its file or socket.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A server answered a request with an error.
    #[error("NBD request refused by the server: {0}")]
    Refused(io::Error),
    /// A program failed, or did not end in time.
    #[error("{command}: {detail}")]
    Command {
        /// The command line.
        command: String,
        /// The exit status, and the end of the standard error.
        detail: String,
    },
    /// The output of a program or the reply of a server cannot be parsed.
    #[error("unexpected answer: {0}")]
    Answer(String),
    /// The options request an impossible measurement.
    #[error("{0}")]
    Usage(String),
    /// The user or the system has requested a stop.
    #[error("interrupted")]
    Interrupted,
}

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds to an I/O error the operation that failed.
pub trait Doing<T> {
    /// Adds the description of the operation.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::Io { what: what(), source: e.into() })
    }
}
