//! The second phase of a session: requests in, replies out, until one side leaves.
//!
//! One thread serves one connection and is its own reactor. It receives as much as the socket has, works through all
//! requests that arrived, and sends their replies together. Here is the stream of the protocol: heads, payloads,
//! replies; the [`Session`] under it carries out the requests, and its completions come back tagged with the head of
//! the request. When nothing is under way the thread waits in the receive call itself, so that a client with one
//! request at a time costs no system call beyond receiving, reading and sending. Invariants:
//!
//! 1. Memory is bounded: no request is taken up while the session has no room for it, replies that are not sent
//!    included. A client that does not read its replies is not read from either.
//! 2. A `FLUSH` is answered after a device flush that began after every write that was answered before it arrived. All
//!    flushes that arrived together share one. Other requests are served meanwhile, if the client keeps several under
//!    way.
//! 3. Every request is answered exactly once, except by the end of the connection. A request whose payload did not
//!    arrive whole has no effect.
//! 4. When the client leaves or the server stops, what was taken up is finished and answered before we close.
//! 5. The place in the stream is never lost: the payload of a refused request is consumed before the refusal is sent.
//!    The session ends where the end of a request is not known (no magic number), or a payload is longer than
//!    [`PAYLOAD_BYTES_MAX`].

use super::Terms;
use super::inbox::Inbox;
use super::limits::*;
use super::protocol::{EXTENDED_REQUEST_BYTES, REQUEST_BYTES, RequestHead};
use super::replies::{Outbox, Style};
use super::requests::{Action, Refusal, Rules, judge, status_payload};
use super::status::{self, Context, Extent};
use crate::exports::Exports;
use crate::session::{Completion, Operation, Payload, Reply, Session};
use connections::transport::{Transport, Wait, wait_for};
use disk::device::Device;
use error::{Error, ErrorKind, IoContext, Result};
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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
    let mut transmission = Transmission {
        transport,
        session: Session::new(device, exports),
        style,
        contexts,
        terms,
        stop,
        inbox: Inbox::new(),
        incoming: Incoming::Head,
        streaming: false,
        outbox: Outbox::new(style),
        stalled: false,
        ended: false,
        fault: None,
        tally: Tally::default(),
    };
    let result = transmission.run();
    (transmission.tally, result)
}

/// Where in the stream of requests we are.
enum Incoming {
    /// At the head of a request.
    Head,
    /// In the payload of a write that goes straight into its memory: `filled` of its bytes are there.
    Payload { head: RequestHead, fua: bool, payload: Payload, filled: usize },
    /// In the payload of a refused request, which is dropped; the refusal is sent after it.
    Skip { head: RequestHead, left: usize, refusal: Refusal },
}

/// What a request is known by while it is under way.
struct Tag {
    head: RequestHead,
    /// A read may be answered in more than one content chunk.
    fragments: bool,
}

struct Transmission<'a> {
    transport: &'a mut dyn Transport,
    session: Session<'a, Tag>,
    style: Style,
    contexts: Vec<Context>,
    terms: &'a Terms,
    stop: &'a AtomicBool,
    inbox: Inbox,
    incoming: Incoming,
    /// The last request was a large write; the next one probably is too.
    streaming: bool,
    outbox: Outbox,
    /// A request has arrived that there is no room for.
    stalled: bool,
    /// No further request is taken up.
    ended: bool,
    /// What the client did wrong, if that is why.
    fault: Option<Error>,
    tally: Tally,
}

impl Transmission<'_> {
    fn run(&mut self) -> Result<()> {
        loop {
            // Before more is taken up: what has completed since goes out first.
            self.answer();
            self.take_up()?;
            // A flush completed here kept other requests waiting, if there were any.
            let arrived = self.session.end_batch() && self.is_wanting() && self.receive(Wait::No)?;
            if arrived {
                self.session.saw_overlap();
            }
            self.answer();
            if self.stop.load(Ordering::Relaxed) {
                self.ended = true;
            }
            let drained = self.send()?;
            let busy = self.session.under_way() > 0;
            self.session.note_answered(drained && !busy);
            if self.ended && drained && !busy {
                return self.fault.take().map_or(Ok(()), Err);
            }
            if arrived {
                // The client may wait for these before it sends anything else: nothing is waited for before them.
                continue;
            }
            let wanting = self.is_wanting();
            match (busy, drained) {
                // Room was all that was missing, and now there is.
                (false, true) if self.stalled => {}
                (false, true) if self.session.watches() && !self.transport.has_input() => {
                    if self.wait(true)? {
                        self.receive(Wait::No)?;
                    }
                }
                (false, true) => {
                    self.receive(self.patience())?;
                }
                (false, false) => {
                    if !self.await_socket(wanting, UNREAD_PATIENCE)? {
                        let Self { outbox, session, .. } = self;
                        outbox.unshare(&mut |plan| session.recycle(plan));
                    }
                    self.receive_if(wanting)?;
                }
                (true, true) => {
                    if !self.poll(wanting)? && self.await_completions(wanting)? {
                        self.session.saw_overlap();
                        self.receive_if(wanting)?;
                    }
                }
                (true, false) => {
                    // Nothing more can be sent, so requests that complete meanwhile only have to wait for the socket.
                    self.await_socket(wanting, UNREAD_PATIENCE)?;
                    self.session.look()?;
                    self.receive_if(wanting)?;
                }
            }
        }
    }

    /// True while there is something to receive for.
    fn is_wanting(&self) -> bool {
        !self.ended && !self.stalled && self.has_room()
    }

    /// True while another request may be taken up.
    fn has_room(&self) -> bool {
        self.session.has_room(self.outbox.replies(), self.outbox.held())
    }

    /// How to wait when there is nothing to do but receive: the rest of a large payload in one call.
    fn patience(&self) -> Wait {
        match &self.incoming {
            Incoming::Payload { payload, filled, .. } if payload.length() - filled >= DIRECT_PAYLOAD_BYTES_MIN => {
                Wait::All
            }
            _ => Wait::Some,
        }
    }

    /// Works through the requests that have arrived.
    fn take_up(&mut self) -> Result<()> {
        self.stalled = false;
        while !self.ended && self.step() {
            self.answer();
            if self.outbox.replies() >= SEND_BATCH_REPLIES || self.outbox.held() >= SEND_BATCH_BYTES {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Takes one step in the stream of requests; false when it needs more bytes or more room.
    fn step(&mut self) -> bool {
        match std::mem::replace(&mut self.incoming, Incoming::Head) {
            Incoming::Head => self.next_request(),
            Incoming::Payload { head, fua, mut payload, filled } => {
                let arrived = self.inbox.available();
                let part = arrived.len().min(payload.length() - filled);
                payload.bytes_mut()[filled..filled + part].copy_from_slice(&arrived[..part]);
                self.inbox.consume(part);
                let filled = filled + part;
                if filled < payload.length() {
                    self.incoming = Incoming::Payload { head, fua, payload, filled };
                    return false;
                }
                // The request was judged before its payload arrived; the device judges the range again.
                self.tally.written += head.length;
                self.submit(&head, Operation::Write { offset: head.offset, data: payload.into_data(), fua });
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
            read_only: self.session.device().read_only(),
            capacity: self.session.device().capacity(),
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
            Ok(Action::Read { length, .. }) if !self.session.has_room_to_read(*length, self.outbox.held()) => {
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
                let payload = self.session.buffer(head.offset, length);
                self.incoming = Incoming::Payload { head, fua, payload, filled: 0 };
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
        let name = self.session.device().name();
        self.fault = Some(Error::new(ErrorKind::Invalid, format!("client of {name}: {what}; the connection ends")));
        self.ended = true;
        false
    }

    fn execute(&mut self, head: &RequestHead, action: Action) {
        let (offset, device) = (head.offset, self.session.device());
        let operation = match action {
            Action::Read { length, fragments } => {
                self.tally.read += length as u64;
                return self.session.submit(Tag { head: *head, fragments }, Operation::Read { offset, length });
            }
            Action::Disconnect => {
                self.ended = true;
                self.tally.farewell = true;
                return;
            }
            Action::Status { length, only_one } => {
                let all: Vec<usize> = (0..self.contexts.len()).collect();
                return self.status(head, length, only_one, &all);
            }
            // Their payload is dealt with where it arrives.
            Action::Write { .. } | Action::StatusPayload { .. } => return,
            Action::Cache { length } => {
                let done = device.prefetch(offset, length);
                return self.conclude(head, done);
            }
            Action::Resize { capacity } => {
                let done = device.resize(capacity);
                return self.conclude(head, done);
            }
            Action::Flush => Operation::Flush,
            Action::Trim { length, fua } => Operation::Discard { offset, length, fua },
            Action::Zero { length, allocate, fua } => Operation::Zero { offset, length, allocate, fua },
        };
        self.submit(head, operation);
    }

    fn submit(&mut self, head: &RequestHead, operation: Operation) {
        self.session.submit(Tag { head: *head, fragments: false }, operation);
    }

    /// Puts the replies to what has completed into the outbox.
    fn answer(&mut self) {
        while let Some(Completion { tag, outcome }) = self.session.completed() {
            match outcome {
                Ok(Reply::Read(plan)) => self.outbox.read(&tag.head, plan, tag.fragments),
                Ok(Reply::Done) => self.outbox.success(&tag.head),
                Err(error) => self.refuse(&tag.head, &error.into()),
            }
        }
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

    fn status(&mut self, head: &RequestHead, length: u64, only_one: bool, chosen: &[usize]) {
        let extended = self.style == Style::Extended;
        let mut chunks = Vec::with_capacity(chosen.len());
        for context in chosen.iter().filter_map(|index| self.contexts.get(*index)) {
            let found: error::Result<Vec<Extent>> =
                status::extents(self.session.device(), &context.topic, head.offset, length, only_one);
            match found {
                Ok(extents) => chunks.push(status::payload(context.id, &extents, extended)),
                Err(error) => return self.refuse(head, &error.into()),
            }
        }
        self.outbox.status(head, chunks);
    }

    /// Sends what the socket takes without waiting; true when nothing is left.
    fn send(&mut self) -> Result<bool> {
        let Self { outbox, session, transport, .. } = self;
        while !outbox.is_empty() {
            match transport.send(&outbox.gather()) {
                Ok(bytes) => outbox.advance(bytes, &mut |plan| session.recycle(plan)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(Error::io("sending to the client", error)),
            }
        }
        transport.flush().during(|| "sending to the client".to_owned())
    }

    fn receive_if(&mut self, wanting: bool) -> Result<()> {
        if wanting { self.receive(Wait::No).map(|_| ()) } else { Ok(()) }
    }

    /// Receives once: into the payload under way, and what follows it into the inbox. False when nothing was there.
    fn receive(&mut self, wait: Wait) -> Result<bool> {
        let received = match &mut self.incoming {
            Incoming::Payload { payload, filled, .. } => {
                let rest = &mut payload.bytes_mut()[*filled..];
                let room = rest.len();
                let received = if wait == Wait::All {
                    self.transport.receive(&mut [IoSliceMut::new(rest)], wait)
                } else {
                    let inbox = self.inbox.space(self.streaming);
                    self.transport.receive(&mut [IoSliceMut::new(rest), IoSliceMut::new(inbox)], wait)
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
                self.session.note_arrival();
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

    /// Looks for completions and new requests for as long as that has paid lately; true when there were any.
    fn poll(&mut self, wanting: bool) -> Result<bool> {
        let polling = self.session.take_polling();
        let found = polling.poll(|| {
            let looked = self.session.look();
            let received = match &looked {
                Ok(_) if wanting => self.receive(Wait::No),
                _ => Ok(false),
            };
            match (looked, received) {
                (Err(error), _) | (_, Err(error)) => Some(Err(error)),
                (Ok(_), Ok(received)) => (received || self.session.has_completed()).then_some(Ok(true)),
            }
        });
        self.session.put_polling(polling);
        found.unwrap_or(Ok(false))
    }

    /// Waits for completions and for the socket; true when there may be something to receive.
    fn await_completions(&mut self, wanting: bool) -> Result<bool> {
        if wanting && self.transport.has_input() {
            self.session.look()?;
            return Ok(true);
        }
        self.wait(wanting)
    }

    fn wait(&mut self, wanting: bool) -> Result<bool> {
        let socket = if wanting { self.transport.descriptor() } else { None };
        self.session.wait(socket)
    }
}
