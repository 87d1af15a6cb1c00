//! The wall clock, for times that users read and for deadlines that outlast a process. No metadata depends on it. A
//! time before 1970 is returned as zero.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub fn seconds() -> u64 {
    since_1970().as_secs()
}

/// Microseconds since 1970.
pub fn microseconds() -> u64 {
    u64::try_from(since_1970().as_micros()).unwrap_or(u64::MAX)
}

/// Nanoseconds since 1970.
pub fn nanoseconds() -> u64 {
    u64::try_from(since_1970().as_nanos()).unwrap_or(u64::MAX)
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
