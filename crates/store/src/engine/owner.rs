//! Ownership: one process at a time writes a datastore.
//!
//! The owner holds three locks: on the file `lock`, which every version takes; on the superblock, which every opener
//! needs; and on the folder, where the file system can lock folders. So removing or replacing one of the files lets no
//! second owner in. Before an append to the journal, and every few seconds, the owner compares the files that the names
//! lead to with the files that it has locked, and stops writing if they differ: a process of version 0.1.0 knows only
//! the file `lock`, and a folder restored under a running server is not the one that was opened. Appends within
//! [`LOOK_INTERVAL`] share one comparison.

use super::Engine;
use super::files::{LOCK_FILE, SUPERBLOCK_FILE};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::time::Instant;
use crate::{Error, ErrorKind, Result};
use backend::{Directory, Lock};
use std::time::Duration;

/// For this long after a comparison the names count as unchanged. Another process that opens the datastore takes longer
/// before it writes, and comparing takes 3 % of the time of a flush of one block.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// The locks of the owner of a datastore, until dropped.
pub struct Owner {
    locks: Vec<(&'static str, Box<dyn Lock>)>,
    taken: Instant,
    /// Until when the last comparison is valid, in nanoseconds since `taken`.
    valid_until: AtomicU64,
    /// A comparison that failed has been reported.
    reported: AtomicBool,
}

impl Owner {
    /// Becomes the owner of the datastore in a folder. `Busy` if another process, or another opener in this process,
    /// owns it.
    pub fn take(directory: &dyn Directory) -> Result<Self> {
        let mut locks = Vec::with_capacity(3);
        let busy = |what: &str, error: std::io::Error| match error.kind() {
            std::io::ErrorKind::WouldBlock => Error::new(
                ErrorKind::Busy,
                format!(
                    "the datastore is open in another process, which has locked {what}; a running 'lamina serve' takes \
                     commands on its socket"
                ),
            ),
            _ => Error::io(format!("locking {what} of the datastore"), error),
        };
        let lock = directory.lock(LOCK_FILE).map_err(|error| busy("its file 'lock'", error))?;
        locks.push((LOCK_FILE, lock));
        let lock = directory.lock_existing(SUPERBLOCK_FILE).map_err(|error| busy("its superblock", error))?;
        locks.push((SUPERBLOCK_FILE, lock));
        if let Some(lock) = directory.lock_folder().map_err(|error| busy("its folder", error))? {
            locks.push(("", lock));
        }
        let (taken, valid_until) = (Instant::now(), AtomicU64::new(0));
        Ok(Self { locks, taken, valid_until, reported: AtomicBool::new(false) })
    }

    /// Fails if a name no longer leads to the file that was locked.
    fn check(&self) -> Result<()> {
        let now = self.taken.elapsed();
        if (now.as_nanos() as u64) < self.valid_until.load(Ordering::Relaxed) {
            return Ok(());
        }
        for (name, lock) in &self.locks {
            match lock.is_named() {
                Ok(true) => {}
                Ok(false) => {
                    return Err(Error::new(
                        ErrorKind::Stopped,
                        format!(
                            "ownership of the datastore is lost: its file '{name}' was removed or replaced while it was \
                             open, and another process may have opened it since"
                        ),
                    ));
                }
                // The lock is held all the same: a failed comparison proves nothing about the name.
                Err(error) => {
                    if !self.reported.swap(true, Ordering::Relaxed) {
                        tracing::warn!(%error, file = name, "whether the datastore is still owned cannot be seen");
                    }
                }
            }
        }
        self.valid_until.store((now + LOOK_INTERVAL).as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl Engine {
    /// Stops the datastore if it has another owner, or may have one. Stores opened without an owner are not checked.
    pub(super) fn check_owner(&self) -> Result<()> {
        let Some(owner) = &self.owner else { return Ok(()) };
        let held = match owner.upgrade() {
            Some(owner) => owner.check(),
            None => Err(Error::new(ErrorKind::Stopped, "the datastore was given up without being closed")),
        };
        held.map_err(|error| self.stop(error))
    }
}
