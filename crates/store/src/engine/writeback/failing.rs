//! Failures of write-back that do not stop the store. They are reported to writers that wait for space in a full
//! buffer: while metadata cannot be read, write-back frees no space.
//!
//! Write-back tries one disk after the other. It makes no progress when more consecutive attempts have failed than
//! disks have buffered data. A successful attempt ends that state.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::{Error, ErrorKind};

/// The last failed attempt.
struct Failure {
    kind: ErrorKind,
    message: String,
    /// Number of disks that had buffered data.
    disks: u64,
}

/// Counters of failed attempts.
#[derive(Default)]
pub struct Failing {
    /// Consecutive failed attempts since the last success.
    in_a_row: AtomicU64,
    /// Number of all failed attempts.
    all: AtomicU64,
    last: Mutex<Option<Failure>>,
}

impl Failing {
    /// Called when an attempt has moved data into the map, or found none.
    pub fn note_progress(&self) {
        if self.in_a_row.load(Ordering::Acquire) > 0 {
            self.in_a_row.store(0, Ordering::Release);
        }
    }

    /// Called when an attempt has failed while this many disks had buffered data.
    pub fn note_failure(&self, error: &Error, disks: u64) {
        *self.last.lock() = Some(Failure { kind: error.kind(), message: error.to_string(), disks });
        self.in_a_row.fetch_add(1, Ordering::AcqRel);
        self.all.fetch_add(1, Ordering::AcqRel);
    }

    /// Number of failed attempts so far.
    pub fn count(&self) -> u64 {
        self.all.load(Ordering::Acquire)
    }

    /// Fails if write-back makes no progress and an attempt has failed since [`Failing::count`] returned `count`.
    pub fn check(&self, count: u64) -> Result<(), Error> {
        let in_a_row = self.in_a_row.load(Ordering::Acquire);
        if in_a_row == 0 || self.count() <= count {
            return Ok(());
        }
        match &*self.last.lock() {
            Some(failure) if in_a_row > failure.disks => Err(Error::new(
                failure.kind,
                format!(
                    "no data of the write buffer can be written back ({}); repair the medium, or run 'lamina check', \
                     and try again",
                    failure.message
                ),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn waiting_writers_get_an_error_only_if_write_back_makes_no_progress() {
        let failing = Failing::default();
        let error = Error::new(ErrorKind::Io, "reading map");
        failing.note_failure(&error, 2);
        failing.note_failure(&error, 2);
        failing.check(0).unwrap();
        failing.note_failure(&error, 2);
        let told = failing.check(0).unwrap_err();
        assert!(told.kind() == ErrorKind::Io && told.to_string().contains("reading map"), "{told}");
        // A writer that begins to wait now has seen no failed attempt yet.
        failing.check(failing.count()).unwrap();
        failing.note_progress();
        failing.check(0).unwrap();
    }
}
