//! Completions from other threads: the receiving half of a queue, for every medium that completes operations on another
//! thread than the one that pushed them.
//!
//! 1. Each operation completes exactly once, whatever the medium's code does: an [`InFlight`] that is dropped completes
//!    with an error.
//! 2. Dropping a [`CompletionQueue`] waits for its operations.
//! 3. Nothing is called under its lock.
//!
//! A wait without polled descriptors uses a condition variable. With polled descriptors it uses poll(2) on them and on
//! a pipe, into which the next operation to complete writes one byte. Only the thread that clears `sleeping` writes the
//! byte, so the pipe contains at most one byte and never blocks its writer.

use crate::queue::QUEUE_DEPTH_MAX;
use crate::readiness::Watched;
use crate::{Buffer, Completion};
use parking_lot::{Condvar, Mutex};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An operation under way. It may be completed by any thread.
pub struct InFlight {
    token: u64,
    /// Taken when the operation completes.
    done: Option<Arc<Done>>,
}

impl InFlight {
    /// Completes the operation; `buffer` is the buffer of a read.
    pub fn complete(mut self, result: io::Result<()>, buffer: Option<Buffer>) {
        self.finish(result, buffer);
    }

    fn finish(&mut self, result: io::Result<()>, buffer: Option<Buffer>) {
        if let Some(done) = self.done.take() {
            done.finish(Completion { token: self.token, result, buffer });
        }
    }
}

impl Drop for InFlight {
    /// Completes the operation with an error. Without a completion the queue would wait forever.
    fn drop(&mut self) {
        self.finish(Err(io::Error::other("the operation was dropped before it completed")), None);
    }
}

/// Where the operations of one queue put their completions.
struct Done {
    state: Mutex<DoneState>,
    finished: Condvar,
    wake: PipeWriter,
}

struct DoneState {
    /// Operations not finished yet.
    running: usize,
    completions: Vec<Completion>,
    /// Whether the queue's thread is in poll(2) or about to enter it.
    sleeping: bool,
}

impl Done {
    fn finish(&self, completion: Completion) {
        let mut state = self.state.lock();
        state.completions.push(completion);
        state.running -= 1;
        let wake = std::mem::take(&mut state.sleeping);
        drop(state);
        match wake {
            // The pipe has room for the byte. If the write fails, the queue is gone and no thread waits.
            true => drop((&self.wake).write(&[1])),
            false => drop(self.finished.notify_one()),
        }
    }
}

/// The completions of one queue, and the descriptors that it watches.
pub struct CompletionQueue {
    depth: usize,
    done: Arc<Done>,
    woken: PipeReader,
    watched: Watched,
}

impl CompletionQueue {
    /// A queue for at most `depth` operations in flight.
    pub fn new(depth: u32) -> io::Result<Self> {
        let (woken, wake) = io::pipe()?;
        let state = DoneState { running: 0, completions: Vec::new(), sleeping: false };
        Ok(Self {
            depth: depth.clamp(1, QUEUE_DEPTH_MAX) as usize,
            done: Arc::new(Done { state: Mutex::new(state), finished: Condvar::new(), wake }),
            woken,
            watched: Watched::default(),
        })
    }

    /// As [`crate::Queue::in_flight`].
    pub fn in_flight(&self) -> usize {
        let state = self.done.state.lock();
        state.running + state.completions.len()
    }

    /// Begins an operation; if `depth` operations are in flight, first waits for one of them to complete.
    pub fn begin(&mut self, token: u64) -> InFlight {
        let mut state = self.done.state.lock();
        while state.running >= self.depth {
            self.done.finished.wait(&mut state);
        }
        state.running += 1;
        drop(state);
        InFlight { token, done: Some(Arc::clone(&self.done)) }
    }

    /// Adds the completion of an operation that the pushing thread carried out.
    pub fn push(&self, completion: Completion) {
        self.done.state.lock().completions.push(completion);
    }

    /// As [`crate::Queue::poll_readable`].
    pub fn poll_readable(&mut self, descriptor: RawFd, token: u64) {
        if let Some(refused) = self.watched.add(descriptor, token) {
            self.push(refused);
        }
    }

    /// As [`crate::Queue::wait`], for operations that are all submitted.
    pub fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()> {
        let mut found = Vec::new();
        if self.watched.is_empty() {
            self.wait_operations(&mut found, timeout);
            completions.append(&mut found);
            return Ok(());
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = match (timeout, deadline) {
                (Some(_), Some(deadline)) => Some(deadline.saturating_duration_since(Instant::now())),
                _ => None,
            };
            let polled = self.wait_polling(&mut found, left);
            if !found.is_empty() {
                completions.append(&mut found);
                return Ok(());
            }
            polled?;
            if left == Some(Duration::ZERO) {
                return Ok(());
            }
        }
    }

    /// Waits for a completion or a descriptor, whichever comes first; a signal may end the wait early.
    fn wait_polling(&mut self, found: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()> {
        let mut state = self.done.state.lock();
        found.append(&mut state.completions);
        // Descriptors are polled even while completions wait: a busy medium must not starve them.
        let timeout = if found.is_empty() { timeout } else { Some(Duration::ZERO) };
        let sleeps = timeout != Some(Duration::ZERO);
        state.sleeping = sleeps;
        drop(state);

        let polled = self.watched.wait(sleeps.then_some(self.woken.as_fd()), timeout, found);

        let mut state = self.done.state.lock();
        let woken = sleeps && !std::mem::take(&mut state.sleeping);
        found.append(&mut state.completions);
        drop(state);
        if woken {
            self.woken.read_exact(&mut [0])?;
        }
        polled
    }

    /// Waits for operations only, while no descriptors are watched.
    fn wait_operations(&mut self, found: &mut Vec<Completion>, timeout: Option<Duration>) {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.done.state.lock();
        while state.completions.is_empty() && state.running > 0 && timeout != Some(Duration::ZERO) {
            match deadline {
                Some(deadline) if self.done.finished.wait_until(&mut state, deadline).timed_out() => break,
                Some(_) => {}
                None => self.done.finished.wait(&mut state),
            }
        }
        found.append(&mut state.completions);
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let mut state = self.done.state.lock();
        while state.running > 0 {
            self.done.finished.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn every_wake_up_is_taken_from_the_pipe() {
        let (never, _writer) = io::pipe().unwrap();
        let mut queue = CompletionQueue::new(8).unwrap();
        queue.poll_readable(never.as_raw_fd(), 0);
        for token in 1..20 {
            let operations = [queue.begin(token), queue.begin(token + 100)];
            let medium = std::thread::spawn(move || {
                for operation in operations {
                    std::thread::sleep(Duration::from_millis(3));
                    operation.complete(Ok(()), None);
                }
            });
            let mut completions = Vec::new();
            while completions.len() < 2 {
                queue.wait(&mut completions, None).unwrap();
            }
            medium.join().unwrap();
            let mut pipe = Watched::default();
            assert!(pipe.add(queue.woken.as_raw_fd(), 0).is_none());
            pipe.wait(None, Some(Duration::ZERO), &mut completions).unwrap();
            assert_eq!(completions.len(), 2, "a byte was left in the pipe");
        }
    }

    #[test]
    fn a_dropped_operation_completes_with_an_error() {
        let mut queue = CompletionQueue::new(1).unwrap();
        let operation = queue.begin(7);
        std::thread::spawn(move || drop(operation));
        let mut completions = Vec::new();
        queue.wait(&mut completions, None).unwrap();
        assert!(completions.len() == 1 && completions[0].token == 7 && completions[0].result.is_err());
        assert_eq!(queue.in_flight(), 0);
    }
}
