//! One error type for the datastore and everything above it: a kind to act on, a sentence to read, the cause behind it.

use std::fmt;
use std::io;

/// What a caller may want to do differently. A kind exists only if some caller reacts to it in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// No disk, snapshot or datastore of that name (ENOENT).
    NotFound,
    /// The name is taken (EEXIST).
    Exists,
    /// A size, name, offset or option that cannot be (EINVAL).
    Invalid,
    /// In use: by clients, by clones, or by another process (EBUSY).
    Busy,
    /// The file system, or what was reserved of it, is full (ENOSPC).
    NoSpace,
    /// A write to something that is only read (EROFS).
    ReadOnly,
    /// Bytes on the medium that fail their checksum or contradict each other (EIO).
    Corrupt,
    /// The medium failed (EIO).
    Io,
    /// Made by a newer version, or not available on this machine (ENOTSUP).
    Unsupported,
    /// Stopped on request; nothing half-made is left (EINTR).
    Interrupted,
    /// An earlier failure of the medium stopped all writes until the datastore is opened again (EIO).
    Stopped,
}

/// An error: what happened, to what, and what to do about it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<io::Error>,
}

/// The result of anything that can fail here.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with its sentence.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// A failed system call; the kind follows from its code.
    pub fn io(message: impl Into<String>, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::AlreadyExists => ErrorKind::Exists,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            io::ErrorKind::ReadOnlyFilesystem => ErrorKind::ReadOnly,
            io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy => ErrorKind::Busy,
            io::ErrorKind::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Self { kind, message: message.into(), source: Some(source) }
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The same error with a wider context in front of its sentence.
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

/// Adds a sentence to the error of a system call.
pub trait IoContext<T> {
    /// Wraps the error; `what` is only built on failure.
    fn during(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::io(what(), e))
    }
}
