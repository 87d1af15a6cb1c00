//! Group commit: every caller that waits for a commit shares the next one.
//!
//! 1. Commits do not overlap: one holds the *turn*, and with it what only commits use.
//! 2. A caller is served by a commit that **began** after its call and is complete. One that was under way already may
//!    have taken the tables before the caller's change.
//! 3. A commit that fails serves no caller: the next in turn makes one of its own.
//! 4. After a failure of the medium the image is stopped, and no commit begins any more: what the medium has of the
//!    failed one is not known.
//!
//! The order of writes within a commit is the business of each format; in all of them payload is durable before the
//! tables that name it, and tables are before the header that relies on them. The tables are taken after
//! [`Turn::begin`].

use crate::{Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The commits of one image. `T` is what a commit uses and nothing else does.
pub(crate) struct GroupCommit<T> {
    begun: AtomicU64,
    /// The last commit that is complete.
    completed: AtomicU64,
    stopped: AtomicBool,
    held: Mutex<T>,
}

/// A call that a later commit serves.
#[derive(Clone, Copy)]
pub(crate) struct Call(u64);

/// The right to commit. While it is held no other commit is under way.
pub(crate) struct Turn<'a, T> {
    commits: &'a GroupCommit<T>,
    held: MutexGuard<'a, T>,
    number: u64,
}

impl<T> GroupCommit<T> {
    pub(crate) fn new(held: T) -> Self {
        let (begun, completed, stopped) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        Self { begun, completed, stopped, held: Mutex::new(held) }
    }

    /// Notes what was changed until now.
    pub(crate) fn call(&self) -> Call {
        Call(self.begun.load(Ordering::SeqCst))
    }

    /// Waits for the turn; `None` when a commit that began since the call is complete.
    pub(crate) fn turn_for(&self, call: Call) -> Option<Turn<'_, T>> {
        let turn = self.turn();
        (self.completed.load(Ordering::SeqCst) <= call.0).then_some(turn)
    }

    /// Waits for the turn, to commit in any case or to keep commits from beginning.
    pub(crate) fn turn(&self) -> Turn<'_, T> {
        Turn { commits: self, held: self.held.lock(), number: 0 }
    }

    /// The turn, if no commit is under way.
    pub(crate) fn try_turn(&self) -> Option<Turn<'_, T>> {
        self.held.try_lock().map(|held| Turn { commits: self, held, number: 0 })
    }

    /// The medium failed: nothing is changed from here on.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Whether the medium failed.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Refuses changes after the medium failed, and of an image that was closed.
    pub(crate) fn check_changeable(&self, image: &str, is_open: bool) -> Result<()> {
        if self.has_stopped() {
            let what = format!("{image}: an earlier failure of the medium stopped all changes: open it again");
            return Err(Error::new(ErrorKind::Stopped, what));
        }
        match is_open {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::ReadOnly, format!("{image}: it was closed, and takes no more changes"))),
        }
    }
}

impl<T> Turn<'_, T> {
    /// A commit begins: calls from here on are not served by it.
    pub(crate) fn begin(&mut self) {
        self.number = self.commits.begun.fetch_add(1, Ordering::SeqCst) + 1;
    }

    /// What the commit took is durable.
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
