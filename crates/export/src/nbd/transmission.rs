//! The second phase of a session: requests in, replies out, until one side leaves.
//!
//! One thread serves one connection and is its own reactor. It receives as much as the socket has, works through all
//! requests that arrived, and sends their replies together. Writes go to the device at once; reads that miss the page
//! cache overlap on the queue and are answered as they finish. When nothing is under way it waits in the receive call
//! itself, so that a client with one request at a time costs no system call beyond receiving, reading and sending.
//! Invariants:
//!
//! 1. Memory is bounded: no request is taken up while [`OUTSTANDING_REQUESTS_MAX`] are unanswered, and no read while
//!    [`HELD_BYTES_MAX`] are held. A client that does not read its replies is not read from either.
//! 2. A `FLUSH` is answered after a device flush that began after every write that was answered before it arrived. All
//!    flushes that arrived together share one.
//! 3. Every request is answered exactly once, except by the end of the connection. A request whose payload did not
//!    arrive whole has no effect.
//! 4. When the client leaves or the server stops, what was taken up is finished and answered before we close.
//! 5. The place in the stream is never lost: the payload of a refused request is consumed before the refusal is sent.
//!    The session ends where the end of a request is not known (no magic number), or a payload is longer than
//!    [`PAYLOAD_BYTES_MAX`].

use super::inbox::Inbox;
use super::limits::*;
use super::pool::Pool;
use super::protocol::{EXTENDED_REQUEST_BYTES, REQUEST_BYTES, RequestHead};
use super::reads::{Ask, Finished, Reads};
use super::replies::{Outbox, Style};
use super::requests::{Action, Refusal, Rules, judge, status_payload};
use super::status::{self, Context, Extent};
use super::{Exports, Terms};
use backend::{BLOCK_SIZE, Buffer};
use connections::polling::Polling;
use connections::transport::{Transport, Wait, wait_for};
use disk::device::Device;
use disk::pace::{Foreground, Waiting};
use error::{Error, ErrorKind, IoContext, Result};
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What a session did, for the log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Requests taken up.
    pub requests: u64,
    /// Bytes read by the client.
    pub read: u64,
    /// Bytes written by the client.
    pub written: u64,
    /// The client said that it leaves.
    pub farewell: bool,
}

/// Serves a connection to its end. `stop` asks it to finish what it has and leave; the thread that sets it also shuts
/// down the receiving side of the socket.
pub fn transmit(
    transport: &mut dyn Transport,
    device: Arc<dyn Device>,
    exports: &dyn Exports,
    style: Style,
    contexts: Vec<Context>,
    terms: &Terms,
    stop: &AtomicBool,
) -> (Tally, Result<()>) {
    let mut session = Session {
        transport,
        reads: Reads::new(Arc::clone(&device), exports),
        device,
        style,
        contexts,
        terms,
        stop,
        inbox: Inbox::new(),
        incoming: Incoming::Head,
        streaming: false,
        outbox: Outbox::new(style),
        pool: Pool::default(),
        flushes: Vec::new(),
        finished: Vec::new(),
        stalled: false,
        ended: false,
        fault: None,
        depth: Depth::default(),
        polling: Polling::default(),
        foreground: exports.foreground(),
        arrived: None,
        waiting: None,
        tally: Tally::default(),
    };
    let result = session.run();
    (session.tally, result)
}

/// Where in the stream of requests we are.
enum Incoming {
    /// At the head of a request.
    Head,
    /// In the payload of a write that goes straight into its memory: `filled` of the bytes before `end` are there.
    Payload { head: RequestHead, fua: bool, buffer: Buffer, filled: usize, end: usize },
    /// In the payload of a refused request, which is dropped; the refusal is sent after it.
    Skip { head: RequestHead, left: usize, refusal: Refusal },
}

/// Whether the client keeps more than one request under way. If it does, the socket is watched while reads are in
/// flight; if it does not, watching costs system calls and gains nothing. Guessing wrong costs one read's latency, and
/// now and then the guess is put to the test.
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
    fn watch_now(&mut self) -> bool {
        if self.deep_for > 0 {
            self.deep_for -= 1;
            return true;
        }
        self.shallow_waits = (self.shallow_waits + 1) % Self::TEST_EVERY;
        self.shallow_waits == 0
    }
}

struct Session<'a> {
    transport: &'a mut dyn Transport,
    reads: Reads<'a>,
    device: Arc<dyn Device>,
    style: Style,
    contexts: Vec<Context>,
    terms: &'a Terms,
    stop: &'a AtomicBool,
    inbox: Inbox,
    incoming: Incoming,
    /// The last request was a large write; the next one probably is too.
    streaming: bool,
    outbox: Outbox,
    pool: Pool,
    flushes: Vec<RequestHead>,
    finished: Vec<Finished>,
    /// A request has arrived that there is no room for.
    stalled: bool,
    /// No further request is taken up.
    ended: bool,
    /// What the client did wrong, if that is why.
    fault: Option<Error>,
    depth: Depth,
    polling: Polling,
    /// Told how long requests take.
    foreground: Option<Arc<Foreground>>,
    /// When the last bytes arrived, where that matters.
    arrived: Option<Instant>,
    /// While requests are not answered, where that matters.
    waiting: Option<Waiting>,
    tally: Tally,
}

impl Session<'_> {
    fn run(&mut self) -> Result<()> {
        loop {
            let (requests, pending) = (self.tally.requests, self.reads.pending());
            self.take_up()?;
            self.flush_device();
            if self.stop.load(Ordering::Relaxed) {
                self.ended = true;
            }
            let drained = self.send()?;
            let left = self.reads.pending().saturating_sub(pending) as u64;
            self.note_served((self.tally.requests - requests).saturating_sub(left));
            let reading = self.reads.pending() > 0;
            if drained && !reading {
                self.waiting = None;
            }
            if self.ended && drained && !reading {
                return self.fault.take().map_or(Ok(()), Err);
            }
            let wanting = !self.ended && !self.stalled && self.has_room();
            match (reading, drained) {
                // Room was all that was missing, and now there is.
                (false, true) if self.stalled => {}
                (false, true) if self.reads.armed() && !self.transport.has_input() => {
                    if self.reap(None)? {
                        self.receive(Wait::No)?;
                    }
                }
                (false, true) => {
                    self.receive(self.patience())?;
                }
                (false, false) => {
                    if !self.await_socket(wanting, UNREAD_PATIENCE)? {
                        self.outbox.unshare(&mut self.pool);
                    }
                    self.receive_if(wanting)?;
                }
                (true, true) => {
                    if !self.poll(wanting)? && self.await_reads(wanting)? {
                        self.depth.saw_overlap();
                        self.receive_if(wanting)?;
                    }
                }
                (true, false) => {
                    // Nothing more can be sent, so reads that finish meanwhile only have to wait for the socket.
                    self.await_socket(wanting, UNREAD_PATIENCE)?;
                    self.reap(Some(Duration::ZERO))?;
                    self.receive_if(wanting)?;
                }
            }
        }
    }

    /// So many requests that had arrived are answered.
    fn note_served(&mut self, count: u64) {
        if let (Some(foreground), Some(arrived)) = (&self.foreground, self.arrived.take())
            && count > 0
        {
            foreground.served(arrived, count);
        }
    }

    /// True while another request may be taken up.
    fn has_room(&self) -> bool {
        let outstanding = self.reads.pending() + self.flushes.len() + self.outbox.replies();
        outstanding < OUTSTANDING_REQUESTS_MAX && self.held() < HELD_BYTES_MAX
    }

    fn held(&self) -> usize {
        self.reads.held() + self.outbox.held()
    }

    /// How to wait when there is nothing to do but receive: the rest of a large payload in one call.
    fn patience(&self) -> Wait {
        match &self.incoming {
            Incoming::Payload { filled, end, .. } if end - filled >= DIRECT_PAYLOAD_BYTES_MIN => Wait::All,
            _ => Wait::Some,
        }
    }

    /// Works through the requests that have arrived.
    fn take_up(&mut self) -> Result<()> {
        self.stalled = false;
        while !self.ended && self.step() {
            if self.outbox.replies() >= SEND_BATCH_REPLIES || self.outbox.held() >= SEND_BATCH_BYTES {
                self.send()?;
            }
            if self.reads.pending() > 1 {
                self.depth.saw_overlap();
            }
        }
        Ok(())
    }

    /// Takes one step in the stream of requests; false when it needs more bytes or more room.
    fn step(&mut self) -> bool {
        match std::mem::replace(&mut self.incoming, Incoming::Head) {
            Incoming::Head => self.next_request(),
            Incoming::Payload { head, fua, mut buffer, filled, end } => {
                let arrived = self.inbox.available();
                let part = arrived.len().min(end - filled);
                buffer[filled..filled + part].copy_from_slice(&arrived[..part]);
                self.inbox.consume(part);
                let filled = filled + part;
                if filled < end {
                    self.incoming = Incoming::Payload { head, fua, buffer, filled, end };
                    return false;
                }
                self.write(&head, buffer, fua);
                true
            }
            Incoming::Skip { head, left, refusal } => {
                let part = self.inbox.available().len().min(left);
                self.inbox.consume(part);
                if part < left {
                    self.incoming = Incoming::Skip { head, left: left - part, refusal };
                    return false;
                }
                self.refuse(&head, &refusal);
                true
            }
        }
    }

    fn next_request(&mut self) -> bool {
        let extended = self.style == Style::Extended;
        let head_bytes = if extended { EXTENDED_REQUEST_BYTES } else { REQUEST_BYTES };
        let Some(bytes) = self.inbox.available().get(..head_bytes) else { return false };
        if !self.has_room() {
            self.stalled = true;
            return false;
        }
        let Some(head) = RequestHead::decode(bytes, extended) else {
            return self.end_by_fault("a request does not begin with its magic number".to_owned());
        };
        let payload = usize::try_from(head.payload(extended)).ok().filter(|payload| *payload <= PAYLOAD_BYTES_MAX);
        let Some(payload) = payload else {
            return self.end_by_fault(format!(
                "a request (command {}) announces a payload of {} bytes; the maximum is {PAYLOAD_BYTES_MAX}",
                head.command, head.length
            ));
        };
        let rules = Rules {
            style: self.style,
            read_only: self.device.read_only(),
            capacity: self.device.capacity(),
            resize: self.terms.resize,
            contexts: !self.contexts.is_empty(),
        };
        let action = judge(&head, &rules);
        match &action {
            // Small payloads are worked on once they are here whole.
            Ok(Action::Write { length, .. } | Action::StatusPayload { payload: length, .. })
                if *length < DIRECT_PAYLOAD_BYTES_MIN && self.inbox.available().len() < head_bytes + length =>
            {
                return false;
            }
            Ok(Action::Read { length, .. }) if self.held() > 0 && self.held() + length > HELD_BYTES_MAX => {
                self.stalled = true;
                return false;
            }
            _ => {}
        }
        self.inbox.consume(head_bytes);
        self.tally.requests += 1;
        self.streaming = matches!(action, Ok(Action::Write { length, .. }) if length >= DIRECT_PAYLOAD_BYTES_MIN);
        match action {
            Ok(Action::Write { length, fua }) => {
                let start = (head.offset % BLOCK_SIZE as u64) as usize;
                let mut buffer = self.pool.take(start + length);
                // Bytes outside the request are zeroed, so that no fault can store old memory on the disk.
                buffer[..start].fill(0);
                buffer[start + length..].fill(0);
                self.incoming = Incoming::Payload { head, fua, buffer, filled: start, end: start + length };
            }
            Ok(Action::StatusPayload { payload, only_one }) if payload < DIRECT_PAYLOAD_BYTES_MIN => {
                let asked = status_payload(&head, &self.inbox.available()[..payload], &self.contexts, &rules);
                self.inbox.consume(payload);
                match asked {
                    Ok((length, chosen)) => self.status(&head, length, only_one, &chosen),
                    Err(refusal) => self.refuse(&head, &refusal),
                }
            }
            Ok(Action::StatusPayload { .. }) => {
                let refusal = Refusal::new(super::protocol::errno::EINVAL, "the payload names too many contexts");
                self.incoming = Incoming::Skip { head, left: payload, refusal };
            }
            Ok(action) => self.execute(&head, action),
            Err(refusal) if payload > 0 => self.incoming = Incoming::Skip { head, left: payload, refusal },
            Err(refusal) => self.refuse(&head, &refusal),
        }
        true
    }

    /// Ends the session where the stream cannot be followed any further. What was taken up before is finished.
    fn end_by_fault(&mut self, what: String) -> bool {
        let name = self.device.name();
        self.fault = Some(Error::new(ErrorKind::Invalid, format!("client of {name}: {what}; the connection ends")));
        self.ended = true;
        false
    }

    fn execute(&mut self, head: &RequestHead, action: Action) {
        let done = match action {
            Action::Read { length, fragments } => {
                self.tally.read += length as u64;
                let finished =
                    self.reads.begin(Ask { head: *head, length, fragments, arrived: self.arrived }, &mut self.pool);
                if let Some(finished) = finished {
                    self.answer_read(finished);
                }
                return;
            }
            Action::Disconnect => {
                self.ended = true;
                self.tally.farewell = true;
                return;
            }
            Action::Flush => {
                self.flushes.push(*head);
                return;
            }
            Action::Status { length, only_one } => {
                let all: Vec<usize> = (0..self.contexts.len()).collect();
                return self.status(head, length, only_one, &all);
            }
            // Their payload is dealt with where it arrives.
            Action::Write { .. } | Action::StatusPayload { .. } => return,
            Action::Trim { length, fua } => self.device.discard(head.offset, length, fua),
            Action::Cache { length } => self.device.prefetch(head.offset, length),
            Action::Zero { length, allocate, fua } => self.device.write_zeroes(head.offset, length, allocate, fua),
            Action::Resize { capacity } => self.device.resize(capacity),
        };
        self.conclude(head, done);
    }

    fn write(&mut self, head: &RequestHead, buffer: Buffer, fua: bool) {
        // The request was judged before its payload arrived; the device judges the range again.
        self.tally.written += head.length;
        let done = self.device.write(head.offset, buffer, head.length as usize, fua);
        self.conclude(head, done);
    }

    fn conclude(&mut self, head: &RequestHead, done: error::Result<()>) {
        match done {
            Ok(()) => self.outbox.success(head),
            Err(error) => self.refuse(head, &error.into()),
        }
    }

    fn refuse(&mut self, head: &RequestHead, refusal: &Refusal) {
        tracing::debug!(
            command = head.command,
            offset = head.offset,
            length = head.length,
            errno = refusal.errno,
            message = %refusal.message,
            "request failed"
        );
        self.outbox.failure(head, refusal);
    }

    fn answer_read(&mut self, Finished { ask, outcome }: Finished) {
        match outcome {
            Ok(plan) => self.outbox.read(&ask.head, plan, ask.fragments),
            Err(refusal) => self.refuse(&ask.head, &refusal),
        }
    }

    fn status(&mut self, head: &RequestHead, length: u64, only_one: bool, chosen: &[usize]) {
        let extended = self.style == Style::Extended;
        let mut chunks = Vec::with_capacity(chosen.len());
        for context in chosen.iter().filter_map(|index| self.contexts.get(*index)) {
            let found: error::Result<Vec<Extent>> =
                status::extents(&*self.device, &context.topic, head.offset, length, only_one);
            match found {
                Ok(extents) => chunks.push(status::payload(context.id, &extents, extended)),
                Err(error) => return self.refuse(head, &error.into()),
            }
        }
        self.outbox.status(head, chunks);
    }

    /// One device flush for all that asked.
    fn flush_device(&mut self) {
        if self.flushes.is_empty() {
            return;
        }
        let done = if self.device.read_only() { Ok(()) } else { self.device.flush() };
        let refusal = done.err().map(Refusal::from);
        for head in std::mem::take(&mut self.flushes) {
            match &refusal {
                None => self.outbox.success(&head),
                Some(refusal) => self.refuse(&head, refusal),
            }
        }
    }

    /// Sends what the socket takes without waiting; true when nothing is left.
    fn send(&mut self) -> Result<bool> {
        while !self.outbox.is_empty() {
            match self.transport.send(&self.outbox.gather()) {
                Ok(bytes) => self.outbox.advance(bytes, &mut self.pool),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(Error::io("sending to the client", error)),
            }
        }
        self.transport.flush().during(|| "sending to the client".to_owned())
    }

    fn receive_if(&mut self, wanting: bool) -> Result<()> {
        if wanting { self.receive(Wait::No).map(|_| ()) } else { Ok(()) }
    }

    /// Receives once: into the payload under way, and what follows it into the inbox. False when nothing was there.
    fn receive(&mut self, wait: Wait) -> Result<bool> {
        let received = match &mut self.incoming {
            Incoming::Payload { buffer, filled, end, .. } => {
                let payload = &mut buffer[*filled..*end];
                let room = payload.len();
                let received = if wait == Wait::All {
                    self.transport.receive(&mut [IoSliceMut::new(payload)], wait)
                } else {
                    let inbox = self.inbox.space(self.streaming);
                    self.transport.receive(&mut [IoSliceMut::new(payload), IoSliceMut::new(inbox)], wait)
                };
                if let Ok(bytes) = received {
                    let part = bytes.min(room);
                    *filled += part;
                    self.inbox.received(bytes - part);
                }
                received
            }
            _ => {
                let inbox = self.inbox.space(self.streaming);
                let received = self.transport.receive(&mut [IoSliceMut::new(inbox)], wait);
                if let Ok(bytes) = received {
                    self.inbox.received(bytes);
                }
                received
            }
        };
        match received {
            Ok(0) => self.peer_closed().map(|()| true),
            Ok(_) => {
                if let Some(foreground) = &self.foreground {
                    self.arrived = foreground.arrived();
                    if self.arrived.is_some() && self.waiting.is_none() {
                        self.waiting = Some(foreground.wait());
                    }
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(Error::io("receiving from the client", error)),
        }
    }

    fn peer_closed(&mut self) -> Result<()> {
        self.ended = true;
        let between_requests = matches!(self.incoming, Incoming::Head) && self.inbox.available().is_empty();
        if !between_requests && !self.stop.load(Ordering::Relaxed) {
            tracing::info!("the client left in the middle of a request; the request has no effect");
        }
        Ok(())
    }

    fn await_socket(&mut self, wanting: bool, timeout: Duration) -> Result<bool> {
        if wanting && self.transport.has_input() {
            return Ok(true);
        }
        wait_for(self.transport, wanting, true, Some(timeout)).during(|| "waiting for the client".to_owned())
    }

    /// Looks for finished reads and new requests for as long as that has paid lately; true when there were any.
    fn poll(&mut self, wanting: bool) -> Result<bool> {
        let polling = std::mem::take(&mut self.polling);
        let found = polling.poll(|| {
            let readable = self.reap(Some(Duration::ZERO));
            let received = match &readable {
                Ok(_) if wanting => self.receive(Wait::No),
                _ => Ok(false),
            };
            match (readable, received) {
                (Err(error), _) | (_, Err(error)) => Some(Err(error)),
                (Ok(_), Ok(received)) => (received || !self.outbox.is_empty()).then_some(Ok(true)),
            }
        });
        self.polling = polling;
        found.unwrap_or(Ok(false))
    }

    /// Waits for reads and, if it is worth it, for the socket; true when there may be something to receive.
    fn await_reads(&mut self, wanting: bool) -> Result<bool> {
        if wanting && self.transport.has_input() {
            self.reap(Some(Duration::ZERO))?;
            return Ok(true);
        }
        if wanting
            && !self.reads.armed()
            && self.depth.watch_now()
            && let Some(socket) = self.transport.descriptor()
        {
            self.reads.watch(socket.as_raw_fd());
        }
        let began = Instant::now();
        let readable = self.reap(None);
        self.polling.slept(began.elapsed());
        readable
    }

    fn reap(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let mut finished = std::mem::take(&mut self.finished);
        let readable = self
            .reads
            .wait(timeout, &mut self.pool, &mut finished)
            .during(|| format!("waiting for reads of {}", self.device.name()))?;
        for read in finished.drain(..) {
            if let (Some(foreground), Some(arrived)) = (&self.foreground, read.ask.arrived) {
                foreground.served(arrived, 1);
            }
            self.answer_read(read);
        }
        self.finished = finished;
        Ok(readable)
    }
}
