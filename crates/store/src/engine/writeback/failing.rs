//! Failures of write-back that do not stop the store, for writers that wait for it: while the medium cannot read the
//! metadata that write-back needs, no room comes free in a full buffer.
//!
//! Write-back tries one disk after the other. It makes no progress when more attempts in a row have failed than disks
//! have buffered data. A successful attempt ends that state.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::{Error, ErrorKind};

/// The last failure.
struct Failure {
    kind: ErrorKind,
    message: String,
    /// Disks that had buffered data.
    disks: u64,
}

/// Failures in a row.
#[derive(Default)]
pub struct Failing {
    /// Attempts that have failed since the last success.
    in_a_row: AtomicU64,
    /// Attempts that have failed.
    all: AtomicU64,
    last: Mutex<Option<Failure>>,
}

impl Failing {
    /// Notes that an attempt has brought data into the map, or found none.
    pub fn note_progress(&self) {
        if self.in_a_row.load(Ordering::Acquire) > 0 {
            self.in_a_row.store(0, Ordering::Release);
        }
    }

    /// Notes that an attempt has failed while this many disks had buffered data.
    pub fn note_failure(&self, error: &Error, disks: u64) {
        *self.last.lock() = Some(Failure { kind: error.kind(), message: error.to_string(), disks });
        self.in_a_row.fetch_add(1, Ordering::AcqRel);
        self.all.fetch_add(1, Ordering::AcqRel);
    }

    /// Attempts that have failed so far.
    pub fn count(&self) -> u64 {
        self.all.load(Ordering::Acquire)
    }

    /// Fails if nothing makes progress, and an attempt has failed since there were `count` failures.
    pub fn check(&self, count: u64) -> Result<(), Error> {
        let in_a_row = self.in_a_row.load(Ordering::Acquire);
        if in_a_row == 0 || self.count() <= count {
            return Ok(());
        }
        match &*self.last.lock() {
            Some(failure) if in_a_row > failure.disks => Err(Error::new(
                failure.kind,
                format!(
                    "nothing of the write buffer can be written back ({}); mend the medium, or run 'lamina check', and try \
                     again",
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
    fn who_waits_learns_of_failures_only_while_nothing_makes_progress() {
        let failing = Failing::default();
        let error = Error::new(ErrorKind::Io, "reading map");
        failing.note_failure(&error, 2);
        failing.note_failure(&error, 2);
        failing.check(0).unwrap();
        failing.note_failure(&error, 2);
        let told = failing.check(0).unwrap_err();
        assert!(told.kind() == ErrorKind::Io && told.to_string().contains("reading map"), "{told}");
        // A writer that begins to wait now has seen no failure yet.
        failing.check(failing.count()).unwrap();
        failing.note_progress();
        failing.check(0).unwrap();
    }
}
