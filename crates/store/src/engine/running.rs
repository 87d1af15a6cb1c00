//! Whether the store runs: the failure that stopped it, its threads, and the requests to these threads.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::JoinHandle;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::{Error, ErrorKind, Result};
use std::time::Duration;

/// Requests to the background threads.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    pub write_back: bool,
    pub commit: bool,
    pub checkpoint: bool,
    pub reclaim: bool,
    pub extend: bool,
    pub trailer: bool,
}

/// The state of the store as a whole. Its locks are held for a few instructions, so they need no order.
#[derive(Default)]
pub struct Running {
    stopped: AtomicBool,
    reason: Mutex<Option<String>>,
    closing: AtomicBool,
    /// True after a successful close. Locked while closing is attempted.
    closed: Mutex<bool>,
    work: Mutex<Work>,
    /// Write-back was requested.
    write_back_ready: Condvar,
    /// Any other work was requested.
    upkeep_ready: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Running {
    /// Returns an error if the store has stopped.
    pub fn check(&self) -> Result<()> {
        if self.is_stopped() {
            return Err(self.error());
        }
        Ok(())
    }

    #[cold]
    fn error(&self) -> Error {
        let reason = self.reason.lock().clone().unwrap_or_default();
        Error::new(
            ErrorKind::Stopped,
            format!("the datastore takes no writes since a failure ({reason}); remove the cause and open it again"),
        )
    }

    /// The reason why the store has stopped, if it has.
    pub fn failure(&self) -> Option<String> {
        self.is_stopped().then(|| self.reason.lock().clone().unwrap_or_default())
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// False once the store is being closed or has stopped: background threads then end.
    pub fn goes_on(&self) -> bool {
        !self.closing.load(Ordering::Acquire) && !self.is_stopped()
    }

    /// Stops all writes. The first reason is kept. Returns whether this reason is the first.
    #[cold]
    pub fn stop(&self, reason: &str) -> bool {
        let first = {
            let mut known = self.reason.lock();
            let first = known.is_none();
            known.get_or_insert_with(|| reason.to_owned());
            // The flag is set after the reason, so that a request that finds the store stopped can report the reason.
            self.stopped.store(true, Ordering::Release);
            first
        };
        self.wake();
        first
    }

    /// Begins closing, one caller at a time. The guarded value is true if the store was closed before; the caller sets
    /// the value to true after a successful close.
    pub fn begin_closing(&self) -> MutexGuard<'_, bool> {
        let closed = self.closed.lock();
        self.closing.store(true, Ordering::Release);
        closed
    }

    /// Adds a background thread.
    pub fn add_thread(&self, thread: JoinHandle<()>) {
        self.threads.lock().push(thread);
    }

    /// Waits for the end of all background threads.
    pub fn end_threads(&self) {
        self.wake();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }

    fn wake(&self) {
        self.write_back_ready.notify_all();
        self.upkeep_ready.notify_all();
    }

    /// Requests work from the threads. A request that is already noted wakes no thread again, because writers make
    /// requests many times a second.
    pub fn request(&self, ask: impl FnOnce(&mut Work)) {
        let mut work = self.work.lock();
        let before = *work;
        ask(&mut work);
        let after = *work;
        drop(work);
        if after.write_back && !before.write_back {
            self.write_back_ready.notify_all();
        }
        if after != (Work { write_back: after.write_back, ..before }) {
            self.upkeep_ready.notify_all();
        }
    }

    /// Waits until write-back is requested, or for `time`.
    pub fn next_write_back(&self, time: Duration) {
        let mut work = self.work.lock();
        if !work.write_back {
            self.write_back_ready.wait_for(&mut work, time);
        }
        work.write_back = false;
    }

    /// Waits until work other than write-back is requested, or for `time`. Then `take` removes the requests that the
    /// thread serves.
    pub fn next_upkeep<T>(&self, time: Duration, take: impl FnOnce(&mut Work) -> T) -> T {
        let mut work = self.work.lock();
        if !(work.commit || work.checkpoint || work.extend || work.reclaim || work.trailer) {
            self.upkeep_ready.wait_for(&mut work, time);
        }
        take(&mut work)
    }

    /// Removes requests without waiting.
    pub fn take_work<T>(&self, take: impl FnOnce(&mut Work) -> T) -> T {
        take(&mut self.work.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The engine reports only the first failure, even if several requests fail at once.
    #[test]
    fn of_many_failures_only_the_first_is_reported() {
        let running = Running::default();
        let stop = &|number: u32| running.stop(&format!("failure {number}"));
        let firsts = std::thread::scope(|scope| {
            let threads = [1, 2, 3, 4].map(|number| scope.spawn(move || stop(number)));
            threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
        });
        let firsts: Vec<u32> =
            (1..).zip(firsts).filter(|(_, first)| matches!(first, Ok(true))).map(|(n, _)| n).collect();
        assert_eq!(firsts.len(), 1);
        assert_eq!(running.failure(), Some(format!("failure {}", firsts[0])));
    }
}
