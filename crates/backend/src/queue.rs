//! Overlapping I/O: one queue per thread, completions by token.

use crate::{BLOCK_SIZE, Buffer, File, IoMode, SharedSlice};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// What executes the operations of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// io_uring.
    Uring,
    /// A pool of threads making ordinary system calls.
    Threads,
    /// The calling thread, at once (simulated device).
    Inline,
    /// A mechanism of the medium's own.
    Medium,
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The token given when the operation was pushed.
    pub token: u64,
    /// Success, or the error. The queue has continued short transfers; bytes past the end of a file are zeros.
    pub result: io::Result<()>,
    /// The buffer of a read.
    pub buffer: Option<Buffer>,
}

/// A queue of operations for one thread. Buffers belong to the queue while their operation is in flight; dropping a
/// queue waits for the operations in flight. Operations on the same range that are in flight at the same time may be
/// performed in any order.
pub trait Queue: Send {
    /// Number of pushed operations with a completion that [`Queue::wait`] has not returned yet. Polls count only once
    /// they are complete.
    fn in_flight(&self) -> usize;

    /// Reads `buffer.len()` bytes at `offset`. Blocks for a completion only if the queue is full.
    fn read(&mut self, file: &Arc<dyn File>, offset: u64, buffer: Buffer, token: u64);

    /// Writes the slices one after another at `offset`; durable as in [`File::write_at`].
    fn write(&mut self, file: &Arc<dyn File>, offset: u64, slices: Vec<SharedSlice>, durable: bool, token: u64);

    /// As [`File::sync`].
    fn sync(&mut self, file: &Arc<dyn File>, token: u64);

    /// Watches `descriptor`: completes once when it is readable or hung up, and then no longer watches it. The caller
    /// keeps the descriptor open until then, or until the queue is dropped.
    fn poll_readable(&mut self, descriptor: RawFd, token: u64);

    /// Hands all pushed operations to the kernel without waiting.
    fn submit(&mut self) -> io::Result<()>;

    /// Submits, then appends completions to `completions`: waits for at least one if there are none yet and
    /// `timeout` is not zero (`None`: as long as it takes). With nothing in flight and nothing polled it returns at
    /// once.
    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()>;
}

/// The most operations that one queue has in flight at a time. A greater requested depth is lowered to this number.
pub const QUEUE_DEPTH_MAX: u32 = 4096;

/// The most descriptors that one queue watches at a time; a further poll completes with an error.
pub const QUEUE_POLLS_MAX: usize = 1024;

/// The largest buffered write that a queue makes on the thread that pushes it, as a copy into the page cache. ext4 and
/// other file systems refuse to do this without blocking, so io_uring passes it to a worker thread, which costs 15
/// times the copy (4 KiB on ext4: 4 us on the pushing thread, 57 us through io_uring, 24 us through a pool).
const WRITE_AT_ONCE_MAX: u64 = 256 << 10;

/// Whether the pushing thread makes a write itself.
pub(crate) fn write_at_once(mode: IoMode, length: u64, durable: bool) -> bool {
    mode == IoMode::Buffered && !durable && length <= WRITE_AT_ONCE_MAX
}

/// A read at `offset` has returned only `done` bytes: returns how many of them it keeps when it continues, or `None`
/// when the rest lies past the end of the file. A direct read stops in the middle of a block only at the end of the
/// file. If the file has grown since, the block is read again, because the next offset would not be aligned.
pub(crate) fn resume_short_read(file: &dyn File, offset: u64, done: usize) -> io::Result<Option<usize>> {
    if file.len()? <= offset.saturating_add(done as u64) {
        return Ok(None);
    }
    Ok(Some(match file.mode() {
        IoMode::Buffered => done,
        IoMode::Direct => done - done % BLOCK_SIZE,
    }))
}

/// The error of a poll beyond the limit.
pub(crate) fn too_many_polls() -> io::Error {
    io::Error::new(io::ErrorKind::QuotaExceeded, format!("more than {QUEUE_POLLS_MAX} descriptors in one queue"))
}
