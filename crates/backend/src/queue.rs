//! Overlapping I/O: one queue per thread, completions by token.

use crate::{Buffer, File, SharedSlice};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// What carries the work of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// io_uring.
    Uring,
    /// A pool of threads making ordinary system calls.
    Threads,
    /// Done at once, in the caller (simulated device).
    Inline,
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The token given when it was pushed.
    pub token: u64,
    /// Success, or why not. Short transfers have been carried on by the queue; bytes past the end of a file are zeros.
    pub result: io::Result<()>,
    /// The buffer of a read.
    pub buffer: Option<Buffer>,
}

/// A queue of operations for one thread. Buffers belong to the queue while their operation is in flight; dropping a
/// queue waits for what is in flight.
pub trait Queue: Send {
    /// Operations in flight (polls not counted).
    fn in_flight(&self) -> usize;

    /// Reads `buffer.len()` bytes at `offset`. Blocks for a completion only if the queue is full.
    fn read(&mut self, file: &Arc<dyn File>, offset: u64, buffer: Buffer, token: u64);

    /// Writes the slices one after another at `offset`; durable as in [`File::write_at`].
    fn write(&mut self, file: &Arc<dyn File>, offset: u64, slices: Vec<SharedSlice>, durable: bool, token: u64);

    /// As [`File::sync`].
    fn sync(&mut self, file: &Arc<dyn File>, token: u64);

    /// Completes once (and is then forgotten) when `descriptor` is readable or hung up.
    fn poll_readable(&mut self, descriptor: RawFd, token: u64);

    /// Hands all pushed operations to the kernel without waiting.
    fn submit(&mut self) -> io::Result<()>;

    /// Submits, then appends completions to `completions`: waits for at least one if there are none yet and
    /// `timeout` is not zero (`None`: as long as it takes).
    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()>;
}
