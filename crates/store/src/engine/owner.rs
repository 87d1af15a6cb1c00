//! Ownership: one process at a time writes a datastore.
//!
//! The owner holds three locks: on the file `lock`, which every version takes; on the superblock, which every opener
//! needs; and on the folder, where the file system locks folders. Removing or replacing one of the files therefore lets
//! no second owner in.
//!
//! Ownership can be lost all the same, and the store then stops writing. A medium that revokes it says so at once and
//! refuses what the former owner still writes. On a local file system the owner has to look whether the names still
//! lead to what it has locked, before an append to the journal and every few seconds: a process of version 0.1.0 knows
//! only the file `lock`, and a folder restored under a running server is not the one that was opened. Appends that
//! follow each other within [`LOOK_INTERVAL`] share one look.

use super::Engine;
use super::files::{LOCK_FILE, SUPERBLOCK_FILE};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::time::Instant;
use crate::{Error, ErrorKind, Result};
use backend::{Directory, Lock};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// For this long after a look the ownership is taken to be held. Another process that opens the datastore takes longer
/// before it writes, and looking takes 3 % of the time of a flush of one block.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// The locks of the owner of a datastore, until dropped.
pub struct Owner {
    locks: Vec<Box<dyn Lock>>,
    taken: Instant,
    /// Until when the last look counts, in nanoseconds since `taken`.
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
            std::io::ErrorKind::ReadOnlyFilesystem | std::io::ErrorKind::PermissionDenied => {
                let what = format!("locking {what} of the datastore, for which it must be writable");
                Error::io(format!("{what} ('lamina salvage' reads one that is not)"), error)
            }
            _ => Error::io(format!("locking {what} of the datastore"), error),
        };
        let lock = directory.lock(LOCK_FILE).map_err(|error| busy("its file 'lock'", error))?;
        locks.push(lock);
        let lock = directory.lock_existing(SUPERBLOCK_FILE).map_err(|error| busy("its superblock", error))?;
        locks.push(lock);
        if let Some(lock) = directory.lock_folder().map_err(|error| busy("its folder", error))? {
            locks.push(lock);
        }
        let (taken, valid_until) = (Instant::now(), AtomicU64::new(0));
        Ok(Self { locks, taken, valid_until, reported: AtomicBool::new(false) })
    }

    /// Fails once the ownership is lost; a look of the last [`LOOK_INTERVAL`] counts.
    fn check(&self) -> Result<()> {
        if (self.taken.elapsed().as_nanos() as u64) < self.valid_until.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.look()
    }

    /// Fails once the ownership is lost.
    fn look(&self) -> Result<()> {
        let now = self.taken.elapsed();
        for lock in &self.locks {
            match lock.loss() {
                Ok(None) => {}
                Ok(Some(reason)) => {
                    return Err(Error::new(
                        ErrorKind::Stopped,
                        format!(
                            "ownership of the datastore is lost: {reason}, and another process may have opened it since"
                        ),
                    ));
                }
                // The ownership is held all the same: a look that fails says nothing about it.
                Err(error) => {
                    if !self.reported.swap(true, Ordering::Relaxed) {
                        tracing::warn!(%error, "whether the datastore is still owned cannot be seen");
                    }
                }
            }
        }
        self.valid_until.store((now + LOOK_INTERVAL).as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl Engine {
    /// Fails once the datastore has another owner, or may have. Stores opened without an owner have none to lose.
    fn ownership(&self, look: impl FnOnce(&Owner) -> Result<()>) -> Result<()> {
        match self.owner.as_ref().map(Weak::upgrade) {
            None => Ok(()),
            Some(Some(owner)) => look(&owner),
            Some(None) => Err(Error::new(ErrorKind::Stopped, "the datastore was given up without being closed")),
        }
    }

    /// Stops the datastore once its ownership is lost.
    pub(super) fn check_owner(&self) -> Result<()> {
        self.ownership(Owner::check).map_err(|error| self.stop(error))
    }

    /// The loss of the ownership, if that explains `error`: a medium that fences fails what a former owner writes.
    pub(super) fn explained_by_loss(&self, error: Error) -> Error {
        self.ownership(Owner::look).err().unwrap_or(error)
    }

    /// Has the datastore stopped when the medium reports that its ownership is lost.
    pub(super) fn stop_on_loss(self: &Arc<Self>) {
        let Some(owner) = self.owner.as_ref().and_then(Weak::upgrade) else { return };
        for lock in &owner.locks {
            let engine = Arc::downgrade(self);
            lock.on_loss(Box::new(move || {
                if let Some(engine) = engine.upgrade()
                    && let Err(error) = engine.ownership(Owner::look)
                {
                    engine.stop(error);
                }
            }));
        }
    }
}
