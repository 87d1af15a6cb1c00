//! Exit codes: what a script can tell apart without reading sentences.

use error::ErrorKind;

/// Wrong usage: an option, a size or a name that cannot be.
pub const USAGE: u8 = 2;

/// Corrupt, check found problems that are not repaired, or salvage lost ranges.
pub const CORRUPT: u8 = 6;

/// Interrupted, as shells count a death by SIGINT.
pub const INTERRUPTED: u8 = 130;

/// The code of a kind of error.
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
