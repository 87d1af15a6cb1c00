//! Ownership: only one process at a time writes a datastore.
//!
//! The owner holds three locks: on the file `lock`, which every version locks; on the folder, where the file system can
//! lock folders; and on the superblock, which every opening needs. If one of the files is removed or replaced, a
//! second process still cannot become the owner.
//!
//! If the owner is killed, the medium may still carry out requests of the owner. Such a request could overwrite what
//! the next owner has read or written. So the superblock stays locked until all of them are done, and the next owner,
//! which then finds only the superblock locked, waits for that.
//!
//! Ownership can be lost nevertheless, and the store then stops writing. A medium that revokes ownership reports that
//! at once, and refuses further writes of the former owner. On a local file system the owner compares names with locked
//! files before an append to the journal and every few seconds. The comparison finds two cases that the locks do not
//! exclude: a process of version 0.1.0 locks only the file `lock`, and a folder may be restored from a backup under a
//! running server. Appends within [`LOOK_INTERVAL`] of a check do not repeat it.

use super::Engine;
use super::files::{LOCK_FILE, SUPERBLOCK_FILE};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::time::Instant;
use crate::{Error, ErrorKind, Result};
use backend::{Directory, Lock};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// After a check the ownership counts as held for this long. Another process that opens the datastore needs longer
/// until its first write. The check takes 3 % of the time of a flush of one block.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// How long an opening waits for requests of a former owner. File systems report a request that takes longer.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// After this time the log says why an opening waits.
const REPORT_AFTER: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(2);

/// The locks of the owner of a datastore, until dropped.
pub struct Owner {
    locks: Vec<Box<dyn Lock>>,
    taken: Instant,
    /// Until when the last check counts as current, in nanoseconds since `taken`.
    valid_until: AtomicU64,
    /// Whether a failed check was reported.
    reported: AtomicBool,
}

impl Owner {
    /// Becomes the owner of the datastore in a folder, once the medium has carried out all requests of a former owner
    /// that has ended.
    ///
    /// # Errors
    /// `Busy` if another process, or another engine in this process, owns the datastore, or if the medium does not
    /// carry out the requests within a minute.
    pub fn take(directory: &dyn Directory) -> Result<Self> {
        // Between the attempts no lock is held, so that others that wait too do not take this process for the owner.
        let taken = when_idle(|| Self::try_take(directory))?;
        taken.ok_or_else(|| {
            let text = "the process that had the datastore open has ended, and the medium has not carried out its last \
                        requests yet: it may have failed; try again later";
            Error::new(ErrorKind::Busy, text)
        })
    }

    /// `None` if a former owner has ended, and the medium still carries out its requests.
    fn try_take(directory: &dyn Directory) -> Result<Option<Self>> {
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
                Error::io(format!("{what} ('lamina salvage' reads datastores that are not writable)"), error)
            }
            _ => Error::io(format!("locking {what} of the datastore"), error),
        };
        let lock = directory.lock(LOCK_FILE).map_err(|error| busy("its file 'lock'", error))?;
        locks.push(lock);
        if let Some(lock) = directory.lock_folder().map_err(|error| busy("its folder", error))? {
            locks.push(lock);
        }
        match directory.lock_until_idle(SUPERBLOCK_FILE) {
            // A process has this lock only if it has the others too, or has ended.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
            locked => locks.push(locked.map_err(|error| busy("its superblock", error))?),
        }
        let (taken, valid_until) = (Instant::now(), AtomicU64::new(0));
        Ok(Some(Self { locks, taken, valid_until, reported: AtomicBool::new(false) }))
    }

    /// Fails once the ownership is lost. Skips the check if the last one was within [`LOOK_INTERVAL`].
    fn check(&self) -> Result<()> {
        if (self.taken.elapsed().as_nanos() as u64) < self.valid_until.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.look()
    }

    /// Checks the ownership, and fails if it is lost.
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
                // A check that fails with an error does not prove a loss, so the ownership counts as held.
                Err(error) => {
                    if !self.reported.swap(true, Ordering::Relaxed) {
                        tracing::warn!(%error, "checking the ownership of the datastore failed; it counts as held");
                    }
                }
            }
        }
        self.valid_until.store((now + LOOK_INTERVAL).as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// Repeats an attempt that returns `None` while the medium still carries out requests of an owner that has ended.
/// `None` after a minute.
fn when_idle<T>(mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let (began, mut reported) = (Instant::now(), false);
    loop {
        let done = attempt()?;
        if done.is_some() || began.elapsed() >= IDLE_MAX {
            return Ok(done);
        }
        if began.elapsed() >= REPORT_AFTER && !std::mem::replace(&mut reported, true) {
            tracing::warn!("waiting until the medium has carried out the requests of a process that has ended");
        }
        crate::sync::thread::sleep(PAUSE);
    }
}

/// Waits until the medium has carried out the requests of an owner that has ended, for at most a minute. For a process
/// that only reads: a datastore that cannot be locked is read at once.
pub fn wait_until_idle(directory: &dyn Directory) {
    let locked = || directory.lock_until_idle(SUPERBLOCK_FILE);
    let is_busy = || locked().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
    let _ = when_idle(|| Ok((!is_busy()).then_some(())));
}

impl Engine {
    /// Fails if the ownership is lost, according to `look`. A store opened without an owner cannot lose it.
    fn ownership(&self, look: impl FnOnce(&Owner) -> Result<()>) -> Result<()> {
        match self.owner.as_ref().map(Weak::upgrade) {
            None => Ok(()),
            Some(Some(owner)) => look(&owner),
            Some(None) => Err(Error::new(ErrorKind::Stopped, "the datastore was released without being closed")),
        }
    }

    /// Checks the ownership, and stops the datastore if it is lost.
    pub(super) fn check_owner(&self) -> Result<()> {
        self.ownership(Owner::check).map_err(|error| self.stop(error))
    }

    /// Returns the loss of ownership instead of `error` if the ownership is lost: a medium that revokes ownership then
    /// refuses writes, which causes `error`.
    pub(super) fn explained_by_loss(&self, error: Error) -> Error {
        self.ownership(Owner::look).err().unwrap_or(error)
    }

    /// Registers a callback by which the medium reports the loss of ownership, so that the datastore stops.
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
