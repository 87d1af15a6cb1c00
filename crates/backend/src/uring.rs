//! Queues over io_uring: one ring per queue.
//!
//! 1. Memory that the kernel may read or write (buffers, the slices of a write, its iovecs) belongs to an `Operation`
//!    in the table from push to completion. It lies on the heap and is neither moved nor accessed meanwhile.
//!    `user_data` is the index in the table, and an operation has at most one entry in the ring at a time.
//! 2. Dropping a queue waits until the kernel has released every buffer. If waiting fails, the buffers are leaked:
//!    memory that the kernel may still use is never freed.
//! 3. Every operation completes exactly once, with all its bytes or an error: short transfers are continued, and
//!    interrupted ones are started again.
//! 4. A wait that finds nothing costs one system call, which submits and waits together.
//!
//! A queue may move to another thread between two calls, even with operations in flight and even if the first thread
//! ends. Therefore rings are made without `SINGLE_ISSUER` and `DEFER_TASKRUN`, which bind a ring to one thread.

use crate::file::flush_failed;
use crate::local::{VECTORS_MAX, is_kept_space_missing};
use crate::queue::{QUEUE_DEPTH_MAX, QUEUE_POLLS_MAX, resume_short_read, too_many_polls, write_at_once};
use crate::validate::{check_alignment, check_range};
use crate::{Buffer, Completion, File, IoMode, Queue, SharedSlice};
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most bytes that one entry of the ring transfers, in whole blocks.
const TRANSFER_MAX: usize = 1 << 30;

/// How often an operation without progress is started again before its error is returned.
const RESTARTS_MAX: u32 = 256;

/// Entries in the ring beyond the depth, for polls that wait for submission.
const POLL_ENTRIES: u32 = 16;

/// Poll for input; hang-ups and errors are always reported.
const POLL_IN: u32 = rustix::event::PollFlags::IN.bits() as u32;

/// `struct iovec`.
#[repr(C)]
struct IoVector {
    base: *const u8,
    length: usize,
}

// SAFETY: the pointer refers to the slices of the operation that contains it; these are Send and outlive the pointer.
unsafe impl Send for IoVector {}

enum Work {
    Read { buffer: Buffer, done: usize },
    Write { slices: Vec<SharedSlice>, vectors: Vec<IoVector>, next: usize, durable: bool },
    Sync,
    Poll(RawFd),
}

struct Operation {
    token: u64,
    /// Keeps the descriptor open; `None` for polls.
    file: Option<Arc<dyn File>>,
    descriptor: RawFd,
    /// Offset of the next transfer of a write; for a read, its first offset.
    offset: u64,
    restarts: u32,
    work: Work,
}

/// A queue over a ring of its own.
pub struct UringQueue {
    ring: IoUring,
    depth: usize,
    /// The operations that the kernel has, by `user_data`.
    operations: Vec<Option<Operation>>,
    free: Vec<usize>,
    /// Operations in the table, without polls.
    running: usize,
    polls: usize,
    /// Polls pushed since the submission ring was last seen empty.
    polls_unsubmitted: usize,
    /// Completions that are not returned yet.
    finished: Vec<Completion>,
}

/// Whether io_uring works here, with every operation that a queue uses. Kernels before 5.11, kernels with io_uring
/// disabled and containers that forbid its system calls all return an error.
pub fn probe() -> io::Result<()> {
    let mut ring: IoUring = IoUring::new(2)?;
    let mut known = Probe::new();
    ring.submitter().register_probe(&mut known)?;
    let needed =
        [opcode::Read::CODE, opcode::Write::CODE, opcode::Writev::CODE, opcode::Fsync::CODE, opcode::PollAdd::CODE];
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's io_uring is too old"));
    }
    if !needed.into_iter().all(|code| known.is_supported(code)) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's io_uring lacks an operation"));
    }
    // A seccomp filter may allow io_uring_setup and forbid io_uring_enter.
    // SAFETY: a no-op refers to no memory.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.map_err(io::Error::other)?;
    ring.submit_and_wait(1)?;
    match ring.completion().next() {
        Some(_) => Ok(()),
        None => Err(io::Error::other("io_uring completed nothing")),
    }
}

impl UringQueue {
    /// A queue of at most `depth` operations in flight. The files in `locked` are not closed before the kernel has
    /// completed the last request of the ring, even if the process ends before.
    pub fn new(depth: u32, locked: &[Arc<std::fs::File>]) -> io::Result<Self> {
        let depth = depth.clamp(1, QUEUE_DEPTH_MAX);
        let entries = depth + POLL_ENTRIES;
        // Without COOP_TASKRUN (kernels before 5.19) each completion interrupts the thread: slower, otherwise the same.
        let ring = IoUring::builder()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_clamp()
            .build(entries)
            .or_else(|_| IoUring::builder().setup_clamp().build(entries))?;
        if !locked.is_empty() {
            let descriptors: Vec<RawFd> = locked.iter().map(|file| file.as_raw_fd()).collect();
            ring.submitter().register_files(&descriptors)?;
        }
        Ok(Self {
            ring,
            depth: depth as usize,
            operations: Vec::new(),
            free: Vec::new(),
            running: 0,
            polls: 0,
            polls_unsubmitted: 0,
            finished: Vec::new(),
        })
    }

    /// Puts an operation into the table and the ring, after waiting for a free place if necessary.
    fn push(&mut self, operation: Operation) {
        while self.running >= self.depth && !matches!(operation.work, Work::Poll(_)) {
            if let Err(error) = self.enter(1, None) {
                return self.finish(operation, Err(error));
            }
            self.reap();
        }
        match operation.work {
            Work::Poll(_) => self.polls += 1,
            _ => self.running += 1,
        }
        let index = match self.free.pop() {
            Some(index) => {
                self.operations[index] = Some(operation);
                index
            }
            None => {
                self.operations.push(Some(operation));
                self.operations.len() - 1
            }
        };
        self.start(index);
    }

    /// Submits the next transfer of operation `index` to the ring.
    fn start(&mut self, index: usize) {
        let Some(operation) = self.operations[index].as_mut() else { return };
        let entry = operation.entry().user_data(index as u64);
        // SAFETY: the memory to which the entry refers belongs to the operation, which stays in the table and is not
        // accessed until the completion with this index (invariant 1).
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            // Impossible: the ring has an entry for each operation of the depth and for the polls not submitted.
            debug_assert!(false, "the ring is full");
            self.end(index, Err(Errno::NOBUFS.into()));
        }
    }

    /// Takes operation `index` from the table and completes it. Only for operations that are not in the kernel.
    fn end(&mut self, index: usize, result: io::Result<()>) {
        let Some(operation) = self.operations[index].take() else { return };
        self.free.push(index);
        match operation.work {
            Work::Poll(_) => self.polls -= 1,
            _ => self.running -= 1,
        }
        self.finish(operation, result);
    }

    fn finish(&mut self, operation: Operation, result: io::Result<()>) {
        let buffer = match operation.work {
            Work::Read { buffer, .. } => Some(buffer),
            _ => None,
        };
        self.finished.push(Completion { token: operation.token, result, buffer });
    }

    /// Collects what the kernel has completed; restarts operations that are not done yet.
    fn reap(&mut self) {
        loop {
            // Events are taken one at a time, because restarting an operation needs the ring.
            let Some(event) = self.ring.completion().next() else { return };
            let index = event.user_data() as usize;
            let Some(operation) = self.operations.get_mut(index).and_then(Option::as_mut) else {
                debug_assert!(false, "a completion without an operation");
                continue;
            };
            match operation.advance(event.result()) {
                Some(result) => self.end(index, result),
                None => self.start(index),
            }
        }
    }

    /// Submits and waits for `want` completions in one system call. A timeout or a signal is no error.
    fn enter(&mut self, want: usize, timeout: Option<Duration>) -> io::Result<()> {
        let submitter = self.ring.submitter();
        let entered = match timeout {
            Some(timeout) if want > 0 => {
                let limit = Timespec::from(timeout);
                submitter.submit_with_args(want, &SubmitArgs::new().timespec(&limit))
            }
            _ => submitter.submit_and_wait(want),
        };
        if self.ring.submission().is_empty() {
            self.polls_unsubmitted = 0;
        }
        match entered {
            Err(error) if !passes_by(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether a system call now would make progress.
    fn has_work_for_kernel(&mut self) -> bool {
        let submission = self.ring.submission();
        !submission.is_empty() || submission.taskrun() || submission.cq_overflow()
    }

    fn wait_until(&mut self, deadline: Option<Instant>, waits: bool) -> io::Result<()> {
        loop {
            self.reap();
            let nothing_comes = self.running + self.polls == 0;
            if !self.finished.is_empty() || nothing_comes || !waits {
                if self.has_work_for_kernel() {
                    self.enter(0, None)?;
                    self.reap();
                }
                return Ok(());
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            self.enter(1, left)?;
            if left == Some(Duration::ZERO) {
                self.reap();
                return Ok(());
            }
        }
    }
}

/// Errors of a submission that are temporary, or that end when completions are collected.
fn passes_by(error: &io::Error) -> bool {
    let Some(code) = error.raw_os_error() else { return false };
    matches!(Errno::from_raw_os_error(code), Errno::INTR | Errno::TIME | Errno::BUSY | Errno::AGAIN)
}

impl Operation {
    /// The ring entry for the rest of the work.
    fn entry(&mut self) -> squeue::Entry {
        let descriptor = Fd(self.descriptor);
        match &mut self.work {
            Work::Read { buffer, done } => {
                let rest = &mut buffer[*done..];
                let length = rest.len().min(TRANSFER_MAX) as u32;
                opcode::Read::new(descriptor, rest.as_mut_ptr(), length).offset(self.offset + *done as u64).build()
            }
            Work::Write { vectors, next, durable, .. } => {
                let flags = if *durable { rustix::io::ReadWriteFlags::DSYNC.bits() } else { 0 };
                match &vectors[*next..] {
                    [only] => opcode::Write::new(descriptor, only.base, only.length.min(TRANSFER_MAX) as u32)
                        .offset(self.offset)
                        .rw_flags(flags.cast_signed())
                        .build(),
                    rest => opcode::Writev::new(descriptor, rest.as_ptr().cast(), rest.len().min(VECTORS_MAX) as u32)
                        .offset(self.offset)
                        .rw_flags(flags.cast_signed())
                        .build(),
                }
            }
            Work::Sync => opcode::Fsync::new(descriptor).flags(FsyncFlags::DATASYNC).build(),
            Work::Poll(descriptor) => opcode::PollAdd::new(Fd(*descriptor), POLL_IN).build(),
        }
    }

    /// Makes the whole write by system calls. Unlike an entry in the ring, these can release kept space
    /// (`local/kept.rs`) when the file system refuses the write.
    fn write_by_call(&self) -> Option<io::Result<()>> {
        let (Work::Write { slices, vectors, next, durable }, Some(file)) = (&self.work, &self.file) else {
            return None;
        };
        let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
        let total: usize = bytes.iter().map(|slice| slice.len()).sum();
        let left: usize = vectors[*next..].iter().map(|vector| vector.length).sum();
        Some(file.write_at(&bytes, self.offset - (total - left) as u64, *durable))
    }

    /// Processes the kernel's result: returns the end of the operation, or `None` when there is more to do.
    fn advance(&mut self, result: i32) -> Option<io::Result<()>> {
        let Ok(moved) = usize::try_from(result) else {
            let error = Errno::from_raw_os_error(-result);
            self.restarts += 1;
            if matches!(error, Errno::NOSPC | Errno::DQUOT)
                && let Some(written) = self.write_by_call()
            {
                return Some(written);
            }
            // The kernel cancels an operation when the thread that submitted it ends first; no code here cancels
            // operations.
            let passing = matches!(error, Errno::INTR | Errno::AGAIN | Errno::CANCELED);
            let again = passing && self.restarts <= RESTARTS_MAX;
            let error = io::Error::from(error);
            let error = if matches!(self.work, Work::Sync) { flush_failed(error) } else { error };
            return if again { None } else { Some(Err(error)) };
        };
        match &mut self.work {
            Work::Read { buffer, done } => {
                let reached = *done + moved;
                if reached == buffer.len() {
                    return Some(Ok(()));
                }
                let resume = match (&self.file, moved) {
                    (Some(file), 1..) => match resume_short_read(file.as_ref(), self.offset, reached) {
                        Ok(resume) => resume,
                        Err(error) => return Some(Err(error)),
                    },
                    _ => None,
                };
                match resume {
                    Some(resume) => *done = resume,
                    None => {
                        buffer[reached..].fill(0);
                        return Some(Ok(()));
                    }
                }
            }
            Work::Write { slices, vectors, next, durable } => {
                if moved == 0 {
                    return Some(Err(io::ErrorKind::WriteZero.into()));
                }
                self.offset += moved as u64;
                let mut left = moved;
                while left > 0 && *next < vectors.len() {
                    let vector = &mut vectors[*next];
                    let part = left.min(vector.length);
                    vector.base = vector.base.wrapping_add(part);
                    vector.length -= part;
                    left -= part;
                    if vector.length == 0 {
                        *next += 1;
                    }
                }
                if *next == vectors.len() {
                    let local = self.file.as_ref().and_then(|file| file.local());
                    if let Some(local) = local.filter(|_| !*durable) {
                        let length = slices.iter().map(|slice| slice.len() as u64).sum();
                        local.file.wrote(self.offset.saturating_sub(length), length);
                    }
                    return Some(Ok(()));
                }
            }
            Work::Sync => {
                let local = self.file.as_ref().and_then(|file| file.local());
                return Some(local.map_or(Ok(()), |local| local.file.end_flush()));
            }
            Work::Poll(_) => return Some(Ok(())),
        }
        None
    }
}

/// The descriptor and mode of a file; `None` for a file without a descriptor.
fn in_kernel(file: &Arc<dyn File>) -> Option<(RawFd, IoMode)> {
    let local = file.local()?;
    Some((local.descriptor?, local.mode))
}

impl Queue for UringQueue {
    fn in_flight(&self) -> usize {
        self.running + self.finished.len()
    }

    fn read(&mut self, file: &Arc<dyn File>, offset: u64, mut buffer: Buffer, token: u64) {
        let checked = in_kernel(file).map(|(descriptor, mode)| {
            check_range(offset, buffer.len() as u64)?;
            check_alignment(mode, offset, &buffer)?;
            Ok(descriptor)
        });
        match checked {
            Some(Ok(descriptor)) if !buffer.is_empty() => self.push(Operation {
                token,
                file: Some(Arc::clone(file)),
                descriptor,
                offset,
                restarts: 0,
                work: Work::Read { buffer, done: 0 },
            }),
            // A file without a descriptor is read here, on the calling thread.
            other => {
                let result = other.transpose().and_then(|_| file.read_at(&mut buffer, offset));
                self.finished.push(Completion { token, result, buffer: Some(buffer) });
            }
        }
    }

    fn write(&mut self, file: &Arc<dyn File>, offset: u64, slices: Vec<SharedSlice>, durable: bool, token: u64) {
        let mut total = 0u64;
        let mut vectors = Vec::with_capacity(slices.len());
        let checked = in_kernel(file).map(|(descriptor, mode)| {
            for slice in slices.iter().filter(|slice| !slice.is_empty()) {
                check_alignment(mode, offset.wrapping_add(total), slice)?;
                total = total.saturating_add(slice.len() as u64);
                vectors.push(IoVector { base: slice.as_ptr(), length: slice.len() });
            }
            check_range(offset, total)?;
            // Kept space is released only by the code around system calls, not by entries in the ring.
            Ok((descriptor, write_at_once(mode, total, durable) || is_kept_space_missing()))
        });
        match checked {
            Some(Ok((descriptor, false))) if total > 0 => self.push(Operation {
                token,
                file: Some(Arc::clone(file)),
                descriptor,
                offset,
                restarts: 0,
                work: Work::Write { slices, vectors, next: 0, durable },
            }),
            other => {
                let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
                let result = other.transpose().and_then(|_| file.write_at(&bytes, offset, durable));
                self.finished.push(Completion { token, result, buffer: None });
            }
        }
    }

    fn sync(&mut self, file: &Arc<dyn File>, token: u64) {
        match in_kernel(file) {
            Some((descriptor, _)) => self.push(Operation {
                token,
                file: Some(Arc::clone(file)),
                descriptor,
                offset: 0,
                restarts: 0,
                work: Work::Sync,
            }),
            None => self.finished.push(Completion { token, result: file.sync(), buffer: None }),
        }
    }

    fn poll_readable(&mut self, descriptor: RawFd, token: u64) {
        let mut refused = (self.polls >= QUEUE_POLLS_MAX).then(too_many_polls);
        if refused.is_none() && self.polls_unsubmitted == POLL_ENTRIES as usize {
            refused = self.enter(0, None).err();
            if refused.is_none() && self.polls_unsubmitted > 0 {
                refused = Some(Errno::AGAIN.into());
            }
        }
        if let Some(error) = refused {
            return self.finished.push(Completion { token, result: Err(error), buffer: None });
        }
        self.polls_unsubmitted += 1;
        self.push(Operation { token, file: None, descriptor, offset: 0, restarts: 0, work: Work::Poll(descriptor) });
    }

    fn submit(&mut self) -> io::Result<()> {
        match self.has_work_for_kernel() {
            true => self.enter(0, None),
            false => Ok(()),
        }
    }

    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()> {
        let deadline = match timeout {
            Some(timeout) if !timeout.is_zero() => Instant::now().checked_add(timeout),
            _ => None,
        };
        let outcome = self.wait_until(deadline, timeout != Some(Duration::ZERO));
        // If there are completions to return, an error of the ring is not reported now. The next call gets the error
        // again and reports it.
        let outcome = if self.finished.is_empty() { outcome } else { Ok(()) };
        completions.append(&mut self.finished);
        outcome
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        while self.running > 0 {
            if self.enter(1, None).is_err() {
                std::mem::forget(std::mem::take(&mut self.operations));
                return;
            }
            self.reap();
        }
        // The kernel frees a ring some time after it is closed. Until then a registered file would keep its file system
        // mounted.
        let _ = self.ring.submitter().unregister_files();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::{IoMode, simulated};

    /// A file of `length` bytes. The operation checks where it ends.
    fn file(length: u64) -> Arc<dyn File> {
        let disk = simulated::SimulatedDisk::new(0, simulated::SimulatedOptions::default());
        let file = disk.directory().create("file", IoMode::Direct).unwrap();
        file.set_len(length).unwrap();
        file
    }

    fn operation(file: Arc<dyn File>, work: Work) -> Operation {
        Operation { token: 0, file: Some(file), descriptor: 3, offset: 4096, restarts: 0, work }
    }

    #[test]
    fn a_short_write_continues_in_the_middle_of_a_slice() {
        let data = Arc::new(Buffer::zeroed(3));
        let slices = vec![SharedSlice::new(data.clone(), 0..4096), SharedSlice::new(data.clone(), 4096..12288)];
        let vectors: Vec<IoVector> =
            slices.iter().map(|slice| IoVector { base: slice.as_ptr(), length: slice.len() }).collect();
        let work = Work::Write { slices, vectors, next: 0, durable: true };
        let mut operation = operation(file(0), work);
        assert!(operation.advance(1000).is_none());
        assert!(operation.advance(3096 + 512).is_none());
        assert_eq!(operation.offset, 4096 + 4096 + 512);
        let Work::Write { vectors, next, .. } = &operation.work else { unreachable!() };
        assert_eq!((*next, vectors[1].length), (1, 7680));
        assert_eq!(vectors[1].base.addr(), data.as_ptr().addr() + 4608);
        assert!(operation.advance(7680).unwrap().is_ok());
    }

    #[test]
    fn a_buffered_write_through_the_ring_counts_as_dirty() {
        let open = Arc::new(crate::local::OpenFile::new(tempfile::tempfile().unwrap(), IoMode::Buffered));
        for durable in [true, false] {
            let data = Arc::new(Buffer::zeroed(2));
            let vectors = vec![IoVector { base: data.as_ptr(), length: 8192 }];
            let slices = vec![SharedSlice::new(data, 0..8192)];
            let mut operation = operation(open.clone(), Work::Write { slices, vectors, next: 0, durable });
            assert!(operation.advance(4096).is_none());
            assert!(operation.advance(4096).unwrap().is_ok());
            assert_eq!(open.take_counted(), if durable { 0 } else { 8192 });
        }
    }

    #[test]
    fn a_write_of_zero_bytes_by_the_kernel_is_an_error() {
        let data = Arc::new(Buffer::zeroed(1));
        let vectors = vec![IoVector { base: data.as_ptr(), length: 4096 }];
        let slices = vec![SharedSlice::new(data, 0..4096)];
        let mut operation = operation(file(0), Work::Write { slices, vectors, next: 0, durable: false });
        assert_eq!(operation.advance(0).unwrap().unwrap_err().kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn a_short_direct_read_resumes_at_a_block_or_ends_with_the_file() {
        let read = || {
            let mut buffer = Buffer::zeroed(4);
            buffer.fill(9);
            Work::Read { buffer, done: 0 }
        };
        // The file continues after the block: the incomplete block is read again.
        let mut inside = operation(file(1 << 20), read());
        assert!(inside.advance(4096 + 512).is_none());
        assert!(matches!(inside.work, Work::Read { done: 4096, .. }));
        assert!(inside.advance(12288).unwrap().is_ok());
        // The file ends there: the rest is zeros.
        let mut last = operation(file(4096 + 5000), read());
        assert!(last.advance(5000).unwrap().is_ok());
        let Work::Read { buffer, .. } = &last.work else { unreachable!() };
        assert!(buffer[..5000].iter().all(|byte| *byte == 9) && buffer[5000..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn interrupted_operations_restart_a_limited_number_of_times() {
        let mut operation = operation(file(0), Work::Sync);
        for _ in 0..RESTARTS_MAX {
            assert!(operation.advance(-Errno::INTR.raw_os_error()).is_none());
        }
        assert!(operation.advance(-Errno::AGAIN.raw_os_error()).unwrap().is_err());
        // A failed flush has lost writes before it.
        let error = operation.advance(-Errno::NOSPC.raw_os_error()).unwrap().unwrap_err();
        assert!(!error::lacks_space(&error), "{error}");
    }
}
