//! One error type for the datastore and all layers above it. An error has a kind for the program, a message for the
//! user, and the cause.

#![forbid(unsafe_code)]

pub mod text;

use std::fmt;
use std::io;

/// The kind of an error. A kind exists only if some caller handles it differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The disk, snapshot or datastore does not exist (ENOENT).
    NotFound,
    /// The name is taken (EEXIST).
    Exists,
    /// A size, name, offset or option is invalid (EINVAL).
    Invalid,
    /// In use: by clients, by clones, or by another process (EBUSY).
    Busy,
    /// The file system, its quota, or a reservation in it is full (ENOSPC, EDQUOT).
    NoSpace,
    /// A write to an object that is read-only (EROFS).
    ReadOnly,
    /// Bytes on the medium fail their checksum or are inconsistent (EIO).
    Corrupt,
    /// The medium failed (EIO).
    Io,
    /// The data was written by a newer version, or the operation is not available on this machine (ENOTSUP).
    Unsupported,
    /// Cancelled on request; no partial result is left (EINTR).
    Interrupted,
    /// An earlier failure of the medium stopped all writes until the datastore is opened again (EIO).
    Stopped,
    /// A machine does not run, runs, or is paused, and the operation needs another state (EINVAL).
    WrongState,
}

impl ErrorKind {
    /// All kinds of errors.
    pub const ALL: [Self; 12] = [
        Self::NotFound,
        Self::Exists,
        Self::Invalid,
        Self::Busy,
        Self::NoSpace,
        Self::ReadOnly,
        Self::Corrupt,
        Self::Io,
        Self::Unsupported,
        Self::Interrupted,
        Self::Stopped,
        Self::WrongState,
    ];

    /// The name of the kind in every protocol of this project. Names never change.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Exists => "exists",
            Self::Invalid => "invalid",
            Self::Busy => "busy",
            Self::NoSpace => "no_space",
            Self::ReadOnly => "read_only",
            Self::Corrupt => "corrupt",
            Self::Io => "io",
            Self::Unsupported => "unsupported",
            Self::Interrupted => "interrupted",
            Self::Stopped => "stopped",
            Self::WrongState => "wrong_state",
        }
    }

    /// The kind with a name that a peer sent; [`ErrorKind::Io`] if this version has no kind of that name.
    pub fn from_name(name: &str) -> Self {
        Self::ALL.into_iter().find(|kind| kind.name() == name).unwrap_or(Self::Io)
    }
}

/// An error: what happened, to which object, and what to do about it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<io::Error>,
}

/// Whether a system call failed because the file system is full or a quota is exceeded.
pub fn lacks_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The result of an operation that can fail with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with its message.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// The error of a failed system call; the kind is derived from its code.
    pub fn io(message: impl Into<String>, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::AlreadyExists => ErrorKind::Exists,
            _ if lacks_space(&source) => ErrorKind::NoSpace,
            io::ErrorKind::ReadOnlyFilesystem => ErrorKind::ReadOnly,
            io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy => ErrorKind::Busy,
            io::ErrorKind::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Self { kind, message: message.into(), source: Some(source) }
    }

    /// A copy of the error, for another caller that waits for the same result.
    pub fn repeated(&self) -> Self {
        let source = self.source.as_ref().map(|source| match source.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::new(source.kind(), source.to_string()),
        });
        Self { kind: self.kind, message: self.message.clone(), source }
    }

    /// The kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The error with `what` put in front of its message.
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

/// Adds a message to the error of a system call.
pub trait IoContext<T> {
    /// Wraps the error; `what` is called only on failure.
    fn during(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::io(what(), e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind after `kind` in the list. The match has no catch-all arm, so that a new kind must be added here.
    fn next(kind: ErrorKind) -> Option<ErrorKind> {
        match kind {
            ErrorKind::NotFound => Some(ErrorKind::Exists),
            ErrorKind::Exists => Some(ErrorKind::Invalid),
            ErrorKind::Invalid => Some(ErrorKind::Busy),
            ErrorKind::Busy => Some(ErrorKind::NoSpace),
            ErrorKind::NoSpace => Some(ErrorKind::ReadOnly),
            ErrorKind::ReadOnly => Some(ErrorKind::Corrupt),
            ErrorKind::Corrupt => Some(ErrorKind::Io),
            ErrorKind::Io => Some(ErrorKind::Unsupported),
            ErrorKind::Unsupported => Some(ErrorKind::Interrupted),
            ErrorKind::Interrupted => Some(ErrorKind::Stopped),
            ErrorKind::Stopped => Some(ErrorKind::WrongState),
            ErrorKind::WrongState => None,
        }
    }

    #[test]
    fn the_list_of_error_kinds_is_complete() {
        let all: Vec<_> = std::iter::successors(Some(ErrorKind::NotFound), |kind| next(*kind)).collect();
        assert_eq!(ErrorKind::ALL.to_vec(), all);
    }

    #[test]
    fn an_exceeded_quota_is_a_lack_of_space_named_in_the_message() {
        for (code, words) in [(28, "No space left"), (122, "quota exceeded")] {
            let error = Error::io("writing 'vm'", io::Error::from_raw_os_error(code));
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn names_of_error_kinds_are_parsed_and_never_change() {
        for kind in ErrorKind::ALL {
            assert_eq!(ErrorKind::from_name(kind.name()), kind);
        }
        let names = ErrorKind::ALL.map(ErrorKind::name).join(" ");
        let known = "not_found exists invalid busy no_space read_only corrupt io unsupported interrupted stopped \
                     wrong_state";
        assert_eq!(names, known);
        assert_eq!(ErrorKind::from_name("tired"), ErrorKind::Io);
    }
}
