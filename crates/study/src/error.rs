//! What can stop a measurement. A missed limit is not an error: it is a finding.

use std::io;

/// Why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or socket failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, and to what.
        what: String,
        /// What the system said.
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
        /// Exit status and the last words of its standard error.
        detail: String,
    },
    /// A program or server answered something that cannot be understood.
    #[error("unexpected answer: {0}")]
    Answer(String),
    /// The options ask for something that cannot be done.
    #[error("{0}")]
    Usage(String),
    /// A person or the system asked to stop.
    #[error("interrupted")]
    Interrupted,
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Says what was being done when an I/O error came.
pub trait Doing<T> {
    /// Adds the sentence.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::Io { what: what(), source: e.into() })
    }
}
