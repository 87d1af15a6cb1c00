//! Queues over a pool of threads that make ordinary calls: for kernels and containers without io_uring, for other
//! systems, and for files that have no descriptor.
//!
//! 1. A job owns what it needs, buffer, slices and file, and leaves exactly one completion behind, whatever the file's
//!    code does.
//! 2. Dropping a queue waits for its jobs; dropping the last handle of the pool ends its threads.
//! 3. No call to a file is made under a lock.
//!
//! Waiting: with nothing polled, on a condition variable; with descriptors polled, in poll(2) on these and a pipe that
//! the next job to finish writes one byte into. Only the thread that takes `sleeping` writes the byte, so the pipe
//! holds one at most and never blocks its writer.

use crate::queue::{QUEUE_DEPTH_MAX, write_at_once};
use crate::readiness::Watched;
use crate::{Buffer, Completion, File, Queue, SharedSlice};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Threads of one pool. They wait for the medium most of their time, so their number follows what a medium carries at
/// once rather than the number of cores.
const WORKERS_MAX: usize = 16;

/// The threads that all queues of a directory share; started when first needed.
pub struct Workers {
    shared: Arc<PoolShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct PoolShared {
    state: Mutex<PoolState>,
    work: Condvar,
}

/// Bounded by the depths of the queues.
struct PoolState {
    jobs: VecDeque<Job>,
    idle: usize,
    closed: bool,
}

struct Job {
    file: Arc<dyn File>,
    token: u64,
    work: Work,
    done: Arc<Done>,
}

enum Work {
    Read { offset: u64, buffer: Buffer },
    Write { offset: u64, slices: Vec<SharedSlice>, durable: bool },
    Sync,
}

impl Workers {
    /// A pool without threads yet.
    pub fn new() -> Arc<Self> {
        let state = PoolState { jobs: VecDeque::new(), idle: 0, closed: false };
        let shared = Arc::new(PoolShared { state: Mutex::new(state), work: Condvar::new() });
        Arc::new(Self { shared, threads: Mutex::new(Vec::new()) })
    }

    fn push(&self, job: Job) {
        let mut state = self.shared.state.lock();
        state.jobs.push_back(job);
        let short_of_threads = state.idle < state.jobs.len();
        drop(state);
        if short_of_threads && !self.grow() {
            // No thread could be had at all: the caller does the work.
            let job = self.shared.state.lock().jobs.pop_front();
            if let Some(job) = job {
                job.run();
            }
            return;
        }
        self.shared.work.notify_one();
    }

    /// Starts one more thread if allowed; whether there is any thread at all.
    fn grow(&self) -> bool {
        let mut threads = self.threads.lock();
        if threads.len() < WORKERS_MAX {
            let shared = Arc::clone(&self.shared);
            let name = format!("lamina-io-{}", threads.len());
            if let Ok(thread) = std::thread::Builder::new().name(name).spawn(move || shared.run()) {
                threads.push(thread);
            }
        }
        !threads.is_empty()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.get_mut().drain(..) {
            // Jobs catch their panics; there is nothing to learn from a thread's end.
            let _ = thread.join();
        }
    }
}

impl PoolShared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job.run();
                state = self.state.lock();
            } else if state.closed {
                return;
            } else {
                state.idle += 1;
                self.work.wait(&mut state);
                state.idle -= 1;
            }
        }
    }
}

impl Job {
    fn run(self) {
        let Self { file, token, work, done } = self;
        let completion = match work {
            Work::Read { offset, mut buffer } => {
                let result = guarded(|| file.read_at(&mut buffer, offset));
                Completion { token, result, buffer: Some(buffer) }
            }
            Work::Write { offset, slices, durable } => {
                let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
                let result = guarded(|| file.write_at(&bytes, offset, durable));
                Completion { token, result, buffer: None }
            }
            Work::Sync => Completion { token, result: guarded(|| file.sync()), buffer: None },
        };
        // Before the completion is seen: its receiver may count on the file being closed with its own handle.
        drop(file);
        done.finish(completion);
    }
}

/// A panic in a file's code becomes an error: a completion that never comes would hang its queue.
fn guarded(call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(io::Error::other("the operation panicked")))
}

/// Where the jobs of one queue report.
struct Done {
    state: Mutex<DoneState>,
    finished: Condvar,
    wake: PipeWriter,
}

struct DoneState {
    /// Jobs not finished yet.
    running: usize,
    completions: Vec<Completion>,
    /// The queue's thread is about to enter poll(2), or in it.
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
            // The pipe cannot be full, and without a reader there is no thread to wake.
            true => drop((&self.wake).write(&[1])),
            false => drop(self.finished.notify_one()),
        }
    }
}

/// A queue whose operations run on a pool of threads.
pub struct PortableQueue {
    workers: Arc<Workers>,
    depth: usize,
    done: Arc<Done>,
    woken: PipeReader,
    watched: Watched,
}

impl PortableQueue {
    /// A queue of at most `depth` operations in flight.
    pub fn new(workers: Arc<Workers>, depth: u32) -> io::Result<Self> {
        let (woken, wake) = io::pipe()?;
        let state = DoneState { running: 0, completions: Vec::new(), sleeping: false };
        Ok(Self {
            workers,
            depth: depth.clamp(1, QUEUE_DEPTH_MAX) as usize,
            done: Arc::new(Done { state: Mutex::new(state), finished: Condvar::new(), wake }),
            woken,
            watched: Watched::default(),
        })
    }

    fn push(&mut self, file: &Arc<dyn File>, token: u64, work: Work) {
        let mut state = self.done.state.lock();
        while state.running >= self.depth {
            self.done.finished.wait(&mut state);
        }
        state.running += 1;
        drop(state);
        self.workers.push(Job { file: Arc::clone(file), token, work, done: Arc::clone(&self.done) });
    }

    /// Adds the completion of an operation that no thread was needed for.
    fn finish(&self, completion: Completion) {
        self.done.state.lock().completions.push(completion);
    }

    /// Waits for a completion or a descriptor, whichever comes first; a signal may end the wait early.
    fn wait_polling(&mut self, found: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()> {
        let mut state = self.done.state.lock();
        found.append(&mut state.completions);
        // With completions at hand descriptors still get their turn: a busy medium must not starve them.
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

    /// Waits on the condition variable alone.
    fn wait_jobs(&mut self, found: &mut Vec<Completion>, timeout: Option<Duration>) {
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

impl Queue for PortableQueue {
    fn in_flight(&self) -> usize {
        let state = self.done.state.lock();
        state.running + state.completions.len()
    }

    fn read(&mut self, file: &Arc<dyn File>, offset: u64, mut buffer: Buffer, token: u64) {
        // What lies in the page cache is read sooner than a thread is woken. Any error comes again from the thread.
        if let Ok(true) = file.read_cached_at(&mut buffer, offset) {
            return self.finish(Completion { token, result: Ok(()), buffer: Some(buffer) });
        }
        self.push(file, token, Work::Read { offset, buffer });
    }

    fn write(&mut self, file: &Arc<dyn File>, offset: u64, slices: Vec<SharedSlice>, durable: bool, token: u64) {
        let length = slices.iter().map(|slice| slice.len() as u64).fold(0, u64::saturating_add);
        if write_at_once(file.mode(), length, durable) {
            let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
            let result = file.write_at(&bytes, offset, false);
            return self.finish(Completion { token, result, buffer: None });
        }
        self.push(file, token, Work::Write { offset, slices, durable });
    }

    fn sync(&mut self, file: &Arc<dyn File>, token: u64) {
        self.push(file, token, Work::Sync);
    }

    fn poll_readable(&mut self, descriptor: RawFd, token: u64) {
        if let Some(refused) = self.watched.add(descriptor, token) {
            self.finish(refused);
        }
    }

    /// Operations go to the threads as they are pushed.
    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()> {
        let mut found = Vec::new();
        if self.watched.is_empty() {
            self.wait_jobs(&mut found, timeout);
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
}

impl Drop for PortableQueue {
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

    /// Flushes slowly, and panics on everything else.
    struct Slow;

    impl File for Slow {
        fn sync(&self) -> io::Result<()> {
            std::thread::sleep(Duration::from_millis(3));
            Ok(())
        }
        fn len(&self) -> io::Result<u64> {
            unreachable!()
        }
        fn set_len(&self, _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
            panic!("a panic of the file, as this test wants it")
        }
        fn write_at(&self, _: &[&[u8]], _: u64, _: bool) -> io::Result<()> {
            unreachable!()
        }
        fn punch(&self, _: u64, _: u64) -> io::Result<()> {
            unreachable!()
        }
    }

    #[test]
    fn every_wake_up_is_taken_from_the_pipe() {
        let file: Arc<dyn File> = Arc::new(Slow);
        let (never, _writer) = io::pipe().unwrap();
        let mut queue = PortableQueue::new(Workers::new(), 8).unwrap();
        queue.poll_readable(never.as_raw_fd(), 0);
        for token in 1..20 {
            queue.sync(&file, token);
            queue.sync(&file, token + 100);
            let mut completions = Vec::new();
            while completions.len() < 2 {
                queue.wait(&mut completions, None).unwrap();
            }
            let mut pipe = Watched::default();
            assert!(pipe.add(queue.woken.as_raw_fd(), 0).is_none());
            pipe.wait(None, Some(Duration::ZERO), &mut completions).unwrap();
            assert_eq!(completions.len(), 2, "a byte was left in the pipe");
        }
    }

    #[test]
    fn a_panic_in_a_file_is_an_error_of_its_operation() {
        let file: Arc<dyn File> = Arc::new(Slow);
        let mut queue = PortableQueue::new(Workers::new(), 8).unwrap();
        for round in 0..3 {
            queue.read(&file, 0, Buffer::zeroed(1), round);
            let mut completions = Vec::new();
            queue.wait(&mut completions, None).unwrap();
            assert!(completions[0].result.is_err());
        }
        assert!(queue.workers.threads.lock().len() <= 3);
    }
}
