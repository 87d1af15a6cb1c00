//! Queues over a pool of threads that make ordinary calls: for kernels and containers without io_uring, for other
//! systems, and for files without a descriptor.
//!
//! 1. A job owns its buffer, slices and file, and produces exactly one completion ([`CompletionQueue`]), whatever the
//!    file's code does.
//! 2. Dropping a queue waits for its jobs; dropping the last handle of the pool ends its threads.
//! 3. No call to a file is made under a lock.

use crate::queue::write_at_once;
use crate::{Buffer, Completion, CompletionQueue, File, InFlight, Queue, SharedSlice};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// The most threads of one pool. They mostly wait for the device, so the limit depends on the parallelism of devices
/// and not on the number of cores.
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

/// The waiting jobs; the depths of the queues bound their number.
struct PoolState {
    jobs: VecDeque<Job>,
    idle: usize,
    closed: bool,
}

struct Job {
    file: Arc<dyn File>,
    work: Work,
    in_flight: InFlight,
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
            // No thread could be started: the caller does the work.
            let job = self.shared.state.lock().jobs.pop_front();
            if let Some(job) = job {
                job.run();
            }
            return;
        }
        self.shared.work.notify_one();
    }

    /// Starts one more thread if allowed; returns whether the pool has any thread.
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
            // Jobs catch their panics, so `join` returns no error.
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
        let Self { file, work, in_flight } = self;
        let (result, buffer) = match work {
            Work::Read { offset, mut buffer } => (guarded(|| file.read_at(&mut buffer, offset)), Some(buffer)),
            Work::Write { offset, slices, durable } => {
                let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
                (guarded(|| file.write_at(&bytes, offset, durable)), None)
            }
            Work::Sync => (guarded(|| file.sync()), None),
        };
        // The handle is dropped before the completion is visible. So a receiver that then drops its own last handle
        // closes the file.
        drop(file);
        in_flight.complete(result, buffer);
    }
}

/// A panic in a file's code becomes an error of its operation, and ends no thread.
fn guarded(call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(io::Error::other("the operation panicked")))
}

/// A queue with operations that run on a pool of threads.
pub struct PortableQueue {
    completions: CompletionQueue,
    workers: Arc<Workers>,
}

impl PortableQueue {
    /// A queue of at most `depth` operations in flight.
    pub fn new(workers: Arc<Workers>, depth: u32) -> io::Result<Self> {
        Ok(Self { completions: CompletionQueue::new(depth)?, workers })
    }

    fn push(&mut self, file: &Arc<dyn File>, token: u64, work: Work) {
        let in_flight = self.completions.begin(token);
        self.workers.push(Job { file: Arc::clone(file), work, in_flight });
    }
}

impl Queue for PortableQueue {
    fn in_flight(&self) -> usize {
        self.completions.in_flight()
    }

    fn read(&mut self, file: &Arc<dyn File>, offset: u64, mut buffer: Buffer, token: u64) {
        // A read from the page cache takes less time than waking a thread. After an error here, a thread repeats the
        // read and reports the error.
        if let Ok(true) = file.read_cached_at(&mut buffer, offset) {
            return self.completions.push(Completion { token, result: Ok(()), buffer: Some(buffer) });
        }
        self.push(file, token, Work::Read { offset, buffer });
    }

    fn write(&mut self, file: &Arc<dyn File>, offset: u64, slices: Vec<SharedSlice>, durable: bool, token: u64) {
        let length = slices.iter().map(|slice| slice.len() as u64).fold(0, u64::saturating_add);
        if write_at_once(file.mode(), length, durable) {
            let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
            let result = file.write_at(&bytes, offset, false);
            return self.completions.push(Completion { token, result, buffer: None });
        }
        self.push(file, token, Work::Write { offset, slices, durable });
    }

    fn sync(&mut self, file: &Arc<dyn File>, token: u64) {
        self.push(file, token, Work::Sync);
    }

    fn poll_readable(&mut self, descriptor: RawFd, token: u64) {
        self.completions.poll_readable(descriptor, token);
    }

    /// Does nothing: each operation is passed to the threads when it is pushed.
    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()> {
        self.completions.wait(completions, timeout)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// A file that panics in every method.
    struct Panicking;

    impl File for Panicking {
        fn sync(&self) -> io::Result<()> {
            unreachable!()
        }
        fn len(&self) -> io::Result<u64> {
            unreachable!()
        }
        fn set_len(&self, _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
            panic!("the panic that this test causes in the file")
        }
        fn write_at(&self, _: &[&[u8]], _: u64, _: bool) -> io::Result<()> {
            unreachable!()
        }
        fn punch(&self, _: u64, _: u64) -> io::Result<()> {
            unreachable!()
        }
    }

    #[test]
    fn a_panic_during_an_operation_becomes_its_error() {
        let file: Arc<dyn File> = Arc::new(Panicking);
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
