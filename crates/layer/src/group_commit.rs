//! Group commit: all callers that wait for a commit share the next one.
//!
//! 1. Commits do not overlap: a commit holds the *turn*, a lock that also guards what only commits use.
//! 2. A caller is served by a commit that **began** after its call and is complete. A commit already under way may have
//!    taken the tables before the caller's change.
//! 3. A failed commit serves no caller: the next caller makes a commit of its own.
//! 4. After an I/O failure the image is stopped, and no further commit begins: it is unknown which writes of the failed
//!    commit are durable. The error is never `NoSpace`: this says that the image keeps the changes for the next commit.
//!
//! Each format defines the order of writes within a commit. In all of them payload is durable before the tables that
//! name it, and tables are durable before the header that relies on them. A commit takes the tables after
//! [`Turn::begin`].

use crate::{Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The commits of one image. The lock that serialises commits also protects `T`, the data that only commits use.
pub(crate) struct GroupCommit<T> {
    begun: AtomicU64,
    /// The number of the last complete commit.
    completed: AtomicU64,
    stopped: AtomicBool,
    /// Whether many changes wait for a commit.
    due: AtomicBool,
    held: Mutex<T>,
}

/// The time of a call for a commit: only a commit that begins later serves the call.
#[derive(Clone, Copy)]
pub(crate) struct Call(u64);

/// Permission to commit. While it is held, no other commit is under way.
pub(crate) struct Turn<'a, T> {
    commits: &'a GroupCommit<T>,
    held: MutexGuard<'a, T>,
    number: u64,
}

impl<T> GroupCommit<T> {
    pub(crate) fn new(held: T) -> Self {
        let (begun, completed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { begun, completed, stopped: AtomicBool::new(false), due: AtomicBool::new(false), held: Mutex::new(held) }
    }

    /// Returns a call for all changes made so far.
    pub(crate) fn call(&self) -> Call {
        Call(self.begun.load(Ordering::SeqCst))
    }

    /// Waits for the turn; `None` when a commit that began after the call is complete.
    pub(crate) fn turn_for(&self, call: Call) -> Option<Turn<'_, T>> {
        let turn = self.turn();
        (self.completed.load(Ordering::SeqCst) <= call.0).then_some(turn)
    }

    /// Waits for the turn even if no commit is necessary: for a caller that commits in any case, or that prevents
    /// commits while it works.
    pub(crate) fn turn(&self) -> Turn<'_, T> {
        Turn { commits: self, held: self.held.lock(), number: 0 }
    }

    /// Returns the turn if no commit is under way.
    #[cfg(test)]
    pub(crate) fn try_turn(&self) -> Option<Turn<'_, T>> {
        self.held.try_lock().map(|held| Turn { commits: self, held, number: 0 })
    }

    /// Called when so many changes wait that a commit should begin soon ([`crate::Layer::is_commit_due`]).
    pub(crate) fn note_due(&self) {
        if !self.is_due() {
            self.due.store(true, Ordering::Relaxed);
        }
    }

    /// Whether many changes wait, and no commit has begun since this was noted.
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed)
    }

    /// Stops the image after an I/O failure: no further change or commit begins.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Stops the image after a commit has failed, and returns the error for the caller.
    pub(crate) fn stop_after(&self, error: Error) -> Error {
        self.stop();
        match error.kind() {
            ErrorKind::NoSpace => {
                let what = "the file system has refused a write to space that was reserved: free space in it, and open \
                            the image again";
                Error::new(ErrorKind::Stopped, format!("{error}; {what}"))
            }
            _ => error,
        }
    }

    /// Whether the image was stopped after a failure of the device.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Refuses changes of an image that was stopped or closed.
    pub(crate) fn check_changeable(&self, image: &str, is_open: bool) -> Result<()> {
        if self.has_stopped() {
            let what = format!("{image}: an earlier I/O error stopped all changes: open it again");
            return Err(Error::new(ErrorKind::Stopped, what));
        }
        match is_open {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::ReadOnly, format!("{image}: it was closed, and takes no more changes"))),
        }
    }
}

impl<T> Turn<'_, T> {
    /// Begins a commit, which serves all earlier calls and no later one.
    pub(crate) fn begin(&mut self) {
        self.commits.due.store(false, Ordering::Relaxed);
        self.number = self.commits.begun.fetch_add(1, Ordering::SeqCst) + 1;
    }

    /// Ends a commit: the changes that it wrote are durable.
    pub(crate) fn complete(&mut self) {
        self.commits.completed.store(self.number, Ordering::SeqCst);
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.held
    }
}

#[cfg(test)]
mod tests;
