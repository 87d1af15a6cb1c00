//! The session core, which all protocols use: requests are submitted with a tag, and completions, in one queue, return
//! the tag.
//!
//! A session serves one client on one thread. The protocol decodes requests and submits them. It then receives
//! completions, in the order in which requests complete, and encodes replies. The session implements reads that overlap
//! on an I/O queue, shared flushes that do not delay other requests, reuse of memory, and waiting for completions and
//! for the client at once. Invariants:
//!
//! 1. Every request completes exactly once, unless [`Session::drop_waiting`] gives it up. Discards complete before
//!    [`Session::submit`] returns, and so do writes and zeroes, unless they [wait for space](waiting).
//! 2. A flush completes after a device flush that covers every request which had completed when the flush was
//!    submitted. All flushes submitted before one [`Session::end_batch`] share one device flush. Waiting writes have
//!    not completed, so neither flushes nor other requests wait for them.
//! 3. Memory is bounded if the protocol submits only requests that [`Session::has_room`] allows.
//! 4. When a session was dropped, the device processes none of its requests any more.

mod ahead;
mod flushes;
pub mod limits;
mod pool;
mod reads;
mod waiting;

use crate::exports::Exports;
use backend::{BLOCK_SIZE, Buffer, SharedSlice};
use connections::polling::Polling;
use disk::device::{Device, ReadPlan};
use disk::pace::{Foreground, Waiting};
use error::{ErrorKind, IoContext, Result};
use flushes::Flushes;
use limits::{HELD_BYTES_MAX, OUTSTANDING_REQUESTS_MAX};
use pool::Pool;
use reads::{Ask, Finished, Reads};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use waiting::{Change, WaitingWrites};

/// A request to the device. Ranges must lie within the capacity.
pub enum Operation {
    /// Read a range.
    Read {
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        length: usize,
    },
    /// Write bytes, preferably in a buffer from [`Session::buffer`].
    Write {
        /// Byte offset.
        offset: u64,
        /// The bytes.
        data: SharedSlice,
        /// Whether the write must be durable on completion.
        fua: bool,
    },
    /// Make a range read as zeros.
    Zero {
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Whether the space of the range must stay or become allocated.
        allocate: bool,
        /// Whether the zeros must be durable on completion.
        fua: bool,
    },
    /// Discard a range.
    Discard {
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Whether the discard must be durable on completion.
        fua: bool,
    },
    /// Make all requests that completed before durable.
    Flush,
}

/// Result of a successful request.
pub enum Reply {
    /// Success without data.
    Done,
    /// The data of a read. [`Session::recycle`] accepts the memory for reuse.
    Read(ReadPlan),
}

/// The completion of a request.
pub struct Completion<T> {
    /// The tag with which the request was submitted.
    pub tag: T,
    /// The result, or the error.
    pub outcome: Result<Reply>,
}

/// Memory for the payload of a write, aligned so that the device need not copy the payload.
pub struct Payload {
    buffer: Buffer,
    start: usize,
    end: usize,
}

impl Payload {
    /// The bytes to fill. Their initial content is undefined.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.start..self.end]
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.end - self.start
    }

    /// The filled bytes, for [`Operation::Write`].
    pub fn into_data(self) -> SharedSlice {
        SharedSlice::new(Arc::new(self.buffer), self.start..self.end)
    }
}

/// An estimate whether the client has several requests in flight at a time. If so, the session watches the socket while
/// requests are in flight, and passes slow flushes to the flusher thread; for other clients both would only cost
/// time. A wrong estimate costs the latency of one request, and the estimate is tested at intervals.
#[derive(Default)]
struct Depth {
    deep_for: u32,
    shallow_waits: u32,
}

impl Depth {
    const MEMORY: u32 = 256;
    const TEST_EVERY: u32 = 16;

    fn saw_overlap(&mut self) {
        self.deep_for = Self::MEMORY;
    }

    fn is_deep(&mut self) -> bool {
        self.deep_for = self.deep_for.saturating_sub(1);
        self.deep_for > 0
    }

    fn watch_now(&mut self) -> bool {
        if self.is_deep() {
            return true;
        }
        self.shallow_waits = (self.shallow_waits + 1) % Self::TEST_EVERY;
        self.shallow_waits == 0
    }
}

/// One client's requests on one device.
pub struct Session<'a, T> {
    device: Arc<dyn Device>,
    reads: Reads<'a, T>,
    flushes: Flushes<T>,
    waiting_writes: WaitingWrites<T>,
    completions: VecDeque<Completion<T>>,
    /// Bytes of the completed reads.
    completed_bytes: usize,
    finished: Vec<Finished<T>>,
    pool: Pool,
    depth: Depth,
    polling: Polling,
    /// Receiver of request latencies.
    foreground: Option<Arc<Foreground>>,
    /// Arrival time of the last requests, if latency is measured.
    arrived: Option<Instant>,
    /// Requests submitted since `arrived`.
    batch: u64,
    /// Number of requests in `batch` that completed before `submit` returned.
    served: u64,
    /// Exists while requests are not answered, if latency is measured.
    waiting: Option<Waiting>,
}

impl<'a, T> Session<'a, T> {
    /// A session without requests.
    pub fn new(device: Arc<dyn Device>, exports: &'a dyn Exports) -> Self {
        Self {
            reads: Reads::new(Arc::clone(&device), exports),
            flushes: Flushes::new(Arc::clone(&device)),
            waiting_writes: WaitingWrites::new(device.space_wait().cloned()),
            device,
            completions: VecDeque::new(),
            completed_bytes: 0,
            finished: Vec::new(),
            pool: Pool::default(),
            depth: Depth::default(),
            polling: Polling::default(),
            foreground: exports.foreground(),
            arrived: None,
            batch: 0,
            served: 0,
            waiting: None,
        }
    }

    /// The device, for operations without a completion: capacity, block status, resizing.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Whether another request may be submitted, in addition to `unsent` replies with `unsent_bytes` bytes.
    pub fn has_room(&self, unsent: usize, unsent_bytes: usize) -> bool {
        self.served_now() + self.completions.len() + unsent < OUTSTANDING_REQUESTS_MAX
            && self.held() + unsent_bytes < HELD_BYTES_MAX
    }

    /// Whether a read of that length may be submitted as well. If there are no bytes in reads or replies, a read of any
    /// length is allowed.
    pub fn has_room_to_read(&self, length: usize, unsent_bytes: usize) -> bool {
        let held = self.held() + unsent_bytes;
        held == 0 || held + length <= HELD_BYTES_MAX
    }

    /// Whether a write with a payload of this length may be submitted as well; 0 for zeroes. Always true if no write
    /// waits for space.
    pub fn has_room_to_write(&self, payload: usize) -> bool {
        self.waiting_writes.has_room(payload)
    }

    /// Bytes of reads that are in progress, or completed and not yet returned to the protocol.
    fn held(&self) -> usize {
        self.reads.held() + self.completed_bytes
    }

    /// Number of requests that have not completed.
    pub fn under_way(&self) -> usize {
        self.served_now() + self.waiting_writes.count()
    }

    /// Number of requests that have not completed and do not wait for space.
    fn served_now(&self) -> usize {
        self.reads.pending() + self.flushes.pending()
    }

    /// Number of writes that wait for space.
    pub fn waiting_for_space(&self) -> usize {
        self.waiting_writes.count()
    }

    /// Ends the wait for space: the waiting writes complete with their errors.
    pub fn refuse_waiting(&mut self) {
        self.waiting_writes.refuse_all(&mut self.completions);
    }

    /// Gives up the writes that wait for space, without completing them: for a connection that ends so that its client
    /// reconnects and repeats its requests.
    pub fn drop_waiting(&mut self) {
        self.waiting_writes.drop_all();
    }

    /// Memory for the payload of a write.
    pub fn buffer(&mut self, offset: u64, length: usize) -> Payload {
        let start = (offset % BLOCK_SIZE as u64) as usize;
        Payload { buffer: self.pool.take(start + length), start, end: start + length }
    }

    /// Accepts the memory of a read for reuse.
    pub fn recycle(&mut self, plan: ReadPlan) {
        self.pool.put_plan(plan);
    }

    /// Records that requests have arrived, which are submitted next.
    pub fn note_arrival(&mut self) {
        if let Some(foreground) = &self.foreground {
            self.arrived = foreground.arrived();
            if self.arrived.is_some() && self.waiting.is_none() {
                self.waiting = Some(foreground.wait());
            }
        }
    }

    /// Records that the requests which completed at once are answered; `idle` says that no other requests are in
    /// progress, except those that wait for space. Requests that wait for space do not count, because background work
    /// may free space.
    pub fn note_answered(&mut self, idle: bool) {
        let served = std::mem::take(&mut self.served);
        if let (Some(foreground), Some(arrived)) = (&self.foreground, self.arrived.take())
            && served > 0
        {
            foreground.served(arrived, served);
        }
        if idle {
            self.waiting = None;
        }
    }

    /// Submits a request. A flush, and a read that misses metadata, wait for [`Session::end_batch`].
    pub fn submit(&mut self, tag: T, operation: Operation) {
        self.batch += 1;
        let change = match operation {
            Operation::Read { offset, length } => {
                let ask = Ask { tag, offset, length, arrived: self.arrived };
                if let Some(finished) = self.reads.begin(ask, &mut self.pool) {
                    self.served += 1;
                    self.complete(finished);
                }
                return;
            }
            Operation::Flush => return self.flushes.ask(tag, self.arrived),
            Operation::Write { offset, data, fua } => Change::Write { offset, data, fua },
            Operation::Zero { offset, length, allocate, fua } => Change::Zero { offset, length, allocate, fua },
            Operation::Discard { offset, length, fua } => Change::Discard { offset, length, fua },
        };
        let again = self.waiting_writes.accepts(&change).then(|| change.clone());
        match (change.carry_out(&*self.device), again) {
            (Err(error), Some(again)) if error.kind() == ErrorKind::NoSpace => {
                self.waiting_writes.put(tag, again, error);
            }
            (done, _) => {
                self.served += 1;
                self.completions.push_back(Completion { tag, outcome: done.map(|()| Reply::Done) });
            }
        }
    }

    /// Ends a batch: all requests that have arrived are submitted. Starts one device flush for all requested flushes,
    /// unless one is in progress; in that case the requested flushes wait for the next device flush. The flush is
    /// completed on this thread, unless it would delay other requests for longer than handing it over takes. Returns
    /// true if the flush was completed on this thread and was so slow that requests may have arrived during it.
    pub fn end_batch(&mut self) -> bool {
        if std::mem::take(&mut self.batch) > 1 || self.reads.pending() > 1 {
            self.depth.saw_overlap();
        }
        self.begin_put_off();
        if !self.flushes.wanted() {
            return false;
        }
        let beside_others = self.reads.pending() > 0 || self.depth.is_deep();
        let asked = self.flushes.pending();
        let long = self.flushes.start(beside_others, &mut self.completions);
        self.served += (asked - self.flushes.pending()) as u64;
        long
    }

    /// Begins the reads of the batch that miss metadata.
    fn begin_put_off(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        self.reads.begin_put_off(&mut self.pool, &mut finished);
        for read in finished.drain(..) {
            self.served += 1;
            self.complete(read);
        }
        self.finished = finished;
    }

    /// Adds a finished read to the completions.
    fn complete(&mut self, read: Finished<T>) {
        self.completed_bytes += read.bytes();
        self.completions.push_back(read.into());
    }

    /// Records that requests arrived while others were in progress, so the client has several requests in flight at a
    /// time.
    pub fn saw_overlap(&mut self) {
        self.depth.saw_overlap();
    }

    /// The next request that has completed.
    pub fn completed(&mut self) -> Option<Completion<T>> {
        let completion = self.completions.pop_front()?;
        if let Ok(Reply::Read(plan)) = &completion.outcome {
            self.completed_bytes -= plan.length;
        }
        Some(completion)
    }

    /// Whether [`Session::completed`] has a completion to return.
    pub fn has_completed(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Checks for completions without waiting; true if a socket passed to [`Session::wait`] is readable.
    pub fn look(&mut self) -> Result<bool> {
        self.reap(Some(Duration::ZERO))
    }

    /// Whether the socket that was passed to the last [`Session::wait`] is still being watched.
    pub fn watches(&self) -> bool {
        self.reads.armed()
    }

    /// How long to poll for completions before waiting; returned by [`Session::put_polling`].
    pub(crate) fn take_polling(&mut self) -> Polling {
        std::mem::take(&mut self.polling)
    }

    pub(crate) fn put_polling(&mut self, polling: Polling) {
        self.polling = polling;
    }

    /// Waits until a request completes, or until `socket` is readable: true if there may be input to receive. While
    /// only reads are in progress, the socket is watched only if the client has several requests in flight at a time.
    /// Also returns when it is time to try writes again that wait for space.
    pub fn wait(&mut self, socket: Option<BorrowedFd<'_>>) -> Result<bool> {
        let began = Instant::now();
        let due_in = self.waiting_writes.due_in();
        let readable = if self.reads.pending() == 0 && (self.flushes.running() || due_in.is_some()) {
            let readable = self
                .flushes
                .wait(socket, due_in)
                .during(|| format!("waiting for a flush of {}", self.device.name()))?;
            self.reap(Some(Duration::ZERO))? || readable
        } else {
            if let Some(descriptor) = self.flushes.descriptor() {
                self.reads.watch_flush(descriptor);
            }
            if let Some(socket) = socket
                && !self.reads.armed()
                && (self.flushes.running() || due_in.is_some() || self.depth.watch_now())
            {
                self.reads.watch(socket.as_raw_fd());
            }
            self.reap(due_in)?
        };
        self.polling.slept(began.elapsed());
        Ok(readable)
    }

    fn reap(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let mut finished = std::mem::take(&mut self.finished);
        let readable = self.reads.wait(timeout, &mut self.pool, &mut finished);
        let foreground = &self.foreground;
        let served = |arrived| {
            if let (Some(foreground), Some(arrived)) = (foreground, arrived) {
                foreground.served(arrived, 1);
            }
        };
        for read in finished.drain(..) {
            served(read.ask.arrived);
            self.completed_bytes += read.bytes();
            self.completions.push_back(read.into());
        }
        self.finished = finished;
        let readable = readable.during(|| format!("waiting for reads of {}", self.device.name()))?;
        if readable.flush {
            self.flushes.clear_wake();
        }
        self.flushes.reap(&mut self.completions, served);
        self.waiting_writes.try_again(&*self.device, &mut self.completions);
        Ok(readable.socket)
    }
}

impl<T> From<Finished<T>> for Completion<T> {
    fn from(read: Finished<T>) -> Self {
        Self { tag: read.ask.tag, outcome: read.outcome.map(Reply::Read) }
    }
}
