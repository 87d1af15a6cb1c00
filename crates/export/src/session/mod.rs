//! The session core, under every protocol: requests with a tag go in, completions with that tag come out, over one
//! queue.
//!
//! A session serves one client on one thread. The protocol decodes what the client sends and submits it; it takes the
//! completions, in the order in which requests complete, and encodes the replies. What lies between is here: reads that
//! overlap on an I/O queue, flushes that are shared and do not hold up other requests, memory that is used again, and
//! how to wait for all of it and the client at once. Invariants:
//!
//! 1. Every request completes exactly once. Writes, discards and zeroes complete before [`Session::submit`] returns.
//! 2. A flush completes after a flush of the device that began after every request that had completed when the flush
//!    was submitted. All flushes submitted before one [`Session::end_batch`] share one.
//! 3. Memory is bounded as long as the protocol submits only what [`Session::has_room`] has room for.
//! 4. When a session is dropped, nothing of it is under way in the device any more.

mod ahead;
mod flushes;
pub mod limits;
mod pool;
mod reads;

use crate::exports::Exports;
use backend::{BLOCK_SIZE, Buffer, SharedSlice};
use connections::polling::Polling;
use disk::device::{Device, ReadPlan};
use disk::pace::{Foreground, Waiting};
use error::{IoContext, Result};
use flushes::Flushes;
use limits::{HELD_BYTES_MAX, OUTSTANDING_REQUESTS_MAX};
use pool::Pool;
use reads::{Ask, Finished, Reads};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a client asks of its device. Ranges must lie within the capacity.
pub enum Operation {
    /// Read a range.
    Read {
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        length: usize,
    },
    /// Write bytes, best from [`Session::buffer`].
    Write {
        /// Byte offset.
        offset: u64,
        /// The bytes.
        data: SharedSlice,
        /// Durable on completion.
        fua: bool,
    },
    /// Make a range read as zeros.
    Zero {
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Keep or take its space.
        allocate: bool,
        /// Durable on completion.
        fua: bool,
    },
    /// Give a range back.
    Discard {
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Durable on completion.
        fua: bool,
    },
    /// Make what completed before durable.
    Flush,
}

/// What a request that succeeded brings.
pub enum Reply {
    /// Nothing but its success.
    Done,
    /// The bytes of a read. [`Session::recycle`] takes their memory back.
    Read(ReadPlan),
}

/// The end of a request.
pub struct Completion<T> {
    /// As it was submitted.
    pub tag: T,
    /// The reply, or why there is none.
    pub outcome: Result<Reply>,
}

/// Memory for the payload of a write: exactly its bytes, at the place where the device takes them without a copy.
pub struct Payload {
    buffer: Buffer,
    start: usize,
    end: usize,
}

impl Payload {
    /// The bytes to fill. They hold anything before.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.start..self.end]
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.end - self.start
    }

    /// The bytes, to be written.
    pub fn into_data(self) -> SharedSlice {
        SharedSlice::new(Arc::new(self.buffer), self.start..self.end)
    }
}

/// Whether the client keeps more than one request under way. If it does, the socket is watched while requests are in
/// flight, and flushes are handed over; if it does not, both cost time and gain nothing. Guessing wrong costs one
/// request's latency, and now and then the guess is put to the test.
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
    completions: VecDeque<Completion<T>>,
    /// Bytes of the reads among them.
    completed_bytes: usize,
    finished: Vec<Finished<T>>,
    pool: Pool,
    depth: Depth,
    polling: Polling,
    /// Told how long requests take.
    foreground: Option<Arc<Foreground>>,
    /// When the last requests arrived, where that matters.
    arrived: Option<Instant>,
    /// Requests submitted since then.
    batch: u64,
    /// How many of them completed when they were submitted.
    served: u64,
    /// While requests are not answered, where that matters.
    waiting: Option<Waiting>,
}

impl<'a, T> Session<'a, T> {
    /// A session without requests.
    pub fn new(device: Arc<dyn Device>, exports: &'a dyn Exports) -> Self {
        Self {
            reads: Reads::new(Arc::clone(&device), exports),
            flushes: Flushes::new(Arc::clone(&device)),
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

    /// The device, for what needs no completion: its capacity, block status, resizing.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// True while another request may be submitted, beside `unsent` replies that hold `unsent_bytes`.
    pub fn has_room(&self, unsent: usize, unsent_bytes: usize) -> bool {
        self.under_way() + self.completions.len() + unsent < OUTSTANDING_REQUESTS_MAX
            && self.held() + unsent_bytes < HELD_BYTES_MAX
    }

    /// The same for a read of that length: one is taken up whatever its length when nothing is held.
    pub fn has_room_to_read(&self, length: usize, unsent_bytes: usize) -> bool {
        let held = self.held() + unsent_bytes;
        held == 0 || held + length <= HELD_BYTES_MAX
    }

    /// Bytes of reads that have not completed, or have and were not taken.
    fn held(&self) -> usize {
        self.reads.held() + self.completed_bytes
    }

    /// Requests that have not completed.
    pub fn under_way(&self) -> usize {
        self.reads.pending() + self.flushes.pending()
    }

    /// Memory for the payload of a write.
    pub fn buffer(&mut self, offset: u64, length: usize) -> Payload {
        let start = (offset % BLOCK_SIZE as u64) as usize;
        Payload { buffer: self.pool.take(start + length), start, end: start + length }
    }

    /// Takes the memory of a read back.
    pub fn recycle(&mut self, plan: ReadPlan) {
        self.pool.put_plan(plan);
    }

    /// Requests have arrived that are submitted next.
    pub fn note_arrival(&mut self) {
        if let Some(foreground) = &self.foreground {
            self.arrived = foreground.arrived();
            if self.arrived.is_some() && self.waiting.is_none() {
                self.waiting = Some(foreground.wait());
            }
        }
    }

    /// The replies to the requests that arrived last, as far as they completed at once, are on their way; `idle` if
    /// that are all.
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

    /// Takes up a request. A flush waits for [`Session::end_batch`].
    pub fn submit(&mut self, tag: T, operation: Operation) {
        self.batch += 1;
        let done = match operation {
            Operation::Read { offset, length } => {
                let ask = Ask { tag, offset, length, arrived: self.arrived };
                if let Some(finished) = self.reads.begin(ask, &mut self.pool) {
                    self.served += 1;
                    self.completed_bytes += finished.bytes();
                    self.completions.push_back(finished.into());
                }
                return;
            }
            Operation::Flush => return self.flushes.ask(tag, self.arrived),
            Operation::Write { offset, data, fua } => self.device.write(offset, data, fua),
            Operation::Zero { offset, length, allocate, fua } => {
                self.device.write_zeroes(offset, length, allocate, fua)
            }
            Operation::Discard { offset, length, fua } => self.device.discard(offset, length, fua),
        };
        self.served += 1;
        self.completions.push_back(Completion { tag, outcome: done.map(|()| Reply::Done) });
    }

    /// All requests that have arrived are submitted. Starts one flush of the device for all that were asked for, unless
    /// one is under way: then they wait for the next. It completes here, on this thread, unless other requests would
    /// have to wait for it longer than it takes to hand it over. True when it was completed here, and took so long that
    /// requests may have arrived meanwhile.
    pub fn end_batch(&mut self) -> bool {
        if std::mem::take(&mut self.batch) > 1 || self.reads.pending() > 1 {
            self.depth.saw_overlap();
        }
        if !self.flushes.wanted() {
            return false;
        }
        let beside_others = self.reads.pending() > 0 || self.depth.is_deep();
        let asked = self.flushes.pending();
        let long = self.flushes.start(beside_others, &mut self.completions);
        self.served += (asked - self.flushes.pending()) as u64;
        long
    }

    /// Requests arrived while others were under way: the client keeps several at a time.
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

    /// True while there is something for [`Session::completed`] to give.
    pub fn has_completed(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Looks whether requests have completed, without waiting; true when a socket that [`Session::wait`] was given is
    /// readable.
    pub fn look(&mut self) -> Result<bool> {
        self.reap(Some(Duration::ZERO))
    }

    /// True while [`Session::wait`] watches a socket that it was given before.
    pub fn watches(&self) -> bool {
        self.reads.armed()
    }

    /// How long to look for completions before waiting for them; given back by [`Session::put_polling`].
    pub(crate) fn take_polling(&mut self) -> Polling {
        std::mem::take(&mut self.polling)
    }

    pub(crate) fn put_polling(&mut self, polling: Polling) {
        self.polling = polling;
    }

    /// Waits until a request completes, or until `socket` is readable: true when there may be something to receive.
    /// While only reads are under way the socket is watched where the client keeps several requests under way.
    pub fn wait(&mut self, socket: Option<BorrowedFd<'_>>) -> Result<bool> {
        let began = Instant::now();
        let readable = if self.reads.pending() == 0 && self.flushes.running() {
            let readable =
                self.flushes.wait(socket).during(|| format!("waiting for a flush of {}", self.device.name()))?;
            self.reap(Some(Duration::ZERO))? || readable
        } else {
            if let Some(descriptor) = self.flushes.descriptor() {
                self.reads.watch_flush(descriptor);
            }
            if let Some(socket) = socket
                && !self.reads.armed()
                && (self.flushes.running() || self.depth.watch_now())
            {
                self.reads.watch(socket.as_raw_fd());
            }
            self.reap(None)?
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
        Ok(readable.socket)
    }
}

impl<T> From<Finished<T>> for Completion<T> {
    fn from(read: Finished<T>) -> Self {
        Self { tag: read.ask.tag, outcome: read.outcome.map(Reply::Read) }
    }
}
