//! Exit codes, by which scripts distinguish results without parsing messages.

use error::ErrorKind;

/// Wrong usage: an invalid option, size or name.
pub const USAGE: u8 = 2;

/// Data is corrupt, a check found problems that are not repaired, or a salvage lost ranges.
pub const CORRUPT: u8 = 6;

/// Interrupted; the code that shells use for SIGINT.
pub const INTERRUPTED: u8 = 130;

/// The exit code for a kind of error.
pub fn code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Invalid => USAGE,
        ErrorKind::NotFound => 3,
        ErrorKind::Busy => 4,
        ErrorKind::NoSpace => 5,
        ErrorKind::Corrupt => CORRUPT,
        ErrorKind::Interrupted => INTERRUPTED,
        ErrorKind::Exists | ErrorKind::ReadOnly | ErrorKind::Io | ErrorKind::Unsupported | ErrorKind::Stopped => 1,
    }
}
