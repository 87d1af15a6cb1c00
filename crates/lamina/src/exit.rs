//! Exit codes, by which scripts distinguish results without parsing messages.

use error::ErrorKind;

/// Wrong usage: an invalid option, size or name.
pub const USAGE: u8 = 2;

/// Data is corrupt, a check found problems that are not repaired, or a salvage or conversion lost ranges.
pub const CORRUPT: u8 = 6;

/// For `vm exec`: the program in the guest has not ended within the time limit. `timeout` uses the same code.
pub const STILL_RUNS: u8 = 124;

/// For `vm exec`: lamina failed, not the program in the guest. `docker exec` and `timeout` use the same code.
pub const EXEC_FAILED: u8 = 125;

/// For `vm exec`: the program cannot be started in the guest. Shells use the same code.
pub const NOT_RUNNABLE: u8 = 126;

/// For `vm exec`: the guest has no such program. Shells use the same code.
pub const PROGRAM_NOT_FOUND: u8 = 127;

/// For `vm exec`: added to the number of the signal that ended the program, as shells do.
pub const SIGNAL: u8 = 128;

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
        ErrorKind::WrongState => 7,
        ErrorKind::Interrupted => INTERRUPTED,
        ErrorKind::Exists | ErrorKind::ReadOnly | ErrorKind::Io | ErrorKind::Unsupported | ErrorKind::Stopped => 1,
    }
}
