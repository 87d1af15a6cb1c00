//! Whether the store runs: the failure that stopped it, its threads, and what they are asked for.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::JoinHandle;
use crate::sync::{Condvar, Mutex};
use crate::{Error, ErrorKind, Result};
use std::time::Duration;

/// What the background threads are asked for.
#[derive(Clone, Copy, Default)]
pub struct Work {
    pub write_back: bool,
    pub commit: bool,
    pub checkpoint: bool,
    pub reclaim: bool,
    pub extend: bool,
}

/// The state of the store as a whole. Its locks are held for a few instructions, beside any other.
#[derive(Default)]
pub struct Running {
    stopped: AtomicBool,
    reason: Mutex<Option<String>>,
    closing: AtomicBool,
    work: Mutex<Work>,
    work_ready: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Running {
    /// An error once the store has stopped.
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
            format!("the datastore takes no writes since a failure ({reason}); mend the cause and open it again"),
        )
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// False once the store is being closed or has stopped: background work ends.
    pub fn goes_on(&self) -> bool {
        !self.closing.load(Ordering::Acquire) && !self.is_stopped()
    }

    /// Nothing is written from here on. The first reason is kept.
    #[cold]
    pub fn stop(&self, reason: &str) {
        let first = !self.stopped.swap(true, Ordering::AcqRel);
        if first {
            *self.reason.lock() = Some(reason.to_owned());
        }
        self.work_ready.notify_all();
    }

    /// Begins closing; false when that was done before.
    pub fn begin_closing(&self) -> bool {
        !self.closing.swap(true, Ordering::AcqRel)
    }

    /// Adds a background thread.
    pub fn add_thread(&self, thread: JoinHandle<()>) {
        self.threads.lock().push(thread);
    }

    /// Waits for the end of all background threads.
    pub fn end_threads(&self) {
        self.work_ready.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }

    /// Asks the threads for something.
    pub fn request(&self, ask: impl FnOnce(&mut Work)) {
        ask(&mut self.work.lock());
        self.work_ready.notify_all();
    }

    /// Waits until `wanted` is asked for, or for `time`; then `take` takes what it serves.
    pub fn next_work<T>(
        &self,
        wanted: impl FnOnce(&Work) -> bool,
        time: Duration,
        take: impl FnOnce(&mut Work) -> T,
    ) -> T {
        let mut work = self.work.lock();
        if !wanted(&work) {
            self.work_ready.wait_for(&mut work, time);
        }
        take(&mut work)
    }

    /// Takes what was asked for without waiting.
    pub fn take_work<T>(&self, take: impl FnOnce(&mut Work) -> T) -> T {
        take(&mut self.work.lock())
    }
}
