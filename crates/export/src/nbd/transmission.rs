//! The transmission phase of a session: requests in, replies out, until one side disconnects.
//!
//! One thread serves one connection. It receives as much as the socket has, starts all requests that arrived, and sends
//! their replies together. This module handles the byte stream (headers, payloads, replies). The [`Session`] carries
//! out the requests, and returns the request's header with each completion. When no request is under way, the thread
//! waits in the receive call itself, so that a client with one request at a time costs no system calls except receive,
//! read and send. Invariants:
//!
//! 1. Memory is bounded: no request is accepted while the session has no room for it, counting replies that are not
//!    sent. From a client that does not read its replies, only the payload of an accepted write is received.
//! 2. A `FLUSH` is answered when a device flush that began after the `FLUSH` arrived has completed. So the flush covers
//!    every write that was answered before. All flushes that arrived together share one device flush. If the client has
//!    several requests under way, the others are served during the flush.
//! 3. Every request is answered exactly once, unless the connection ends. A request whose payload did not arrive
//!    completely has no effect.
//! 4. When the client disconnects or the server stops, accepted requests are finished and answered before the
//!    connection is closed. Writes that wait for space do not delay the end: when the client disconnects, they are
//!    answered with their error. When the server stops or the client has to reconnect, they are not answered, so that a
//!    client that reconnects repeats them.
//! 5. A change that the client may have repeated on another connection is refused, and a repetition waits for the end
//!    of the original ([`crate::clients::abandoned`]).
//! 6. The server never loses synchronization with the stream of requests: the payload of a refused request is consumed
//!    before the error reply is sent. The session ends if the end of a request is unknown (wrong magic number), or if a
//!    payload is longer than [`PAYLOAD_BYTES_MAX`].

mod socket;

use super::Terms;
use super::inbox::Inbox;
use super::limits::*;
use super::protocol::{EXTENDED_REQUEST_BYTES, REQUEST_BYTES, RequestHead, command, errno};
use super::replies::{Outbox, Style};
use super::requests::{Action, Refusal, Rules, judge, status_payload};
use super::status::{self, Context, Extent};
use crate::clients::abandoned::{Sharing, Turn};
use crate::exports::Exports;
use crate::session::{Completion, Operation, Payload, Reply, Session};
use connections::transport::{Transport, Wait, peer_has_gone};
use disk::device::Device;
use error::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The reply to a change that the client may have repeated on another connection.
const GONE: Refusal =
    Refusal::new(errno::ESHUTDOWN, "the client closed the connection before the server could begin the request");

/// Statistics of a session, for the log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Accepted requests.
    pub requests: u64,
    /// Bytes read by the client.
    pub read: u64,
    /// Bytes written by the client.
    pub written: u64,
    /// Whether the client sent a disconnect request.
    pub farewell: bool,
}

/// The export that the client has open.
pub struct OpenExport {
    /// The device of the export.
    pub device: Arc<dyn Device>,
    /// The session's place among those that can change the export; `None` if the client can only read.
    pub sharing: Option<Sharing>,
}

/// Serves a connection to its end. If `stop` is set, the session finishes its requests and ends; the thread that sets
/// `stop` also shuts down the receiving side of the socket.
pub fn transmit(
    transport: &mut dyn Transport,
    export: OpenExport,
    exports: &dyn Exports,
    style: Style,
    contexts: Vec<Context>,
    terms: &Terms,
    stop: &AtomicBool,
) -> (Tally, Result<()>) {
    let OpenExport { device, sharing } = export;
    let mut transmission = Transmission {
        transport,
        session: Session::new(device, exports),
        sharing,
        turn: None,
        marked: false,
        exports,
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

/// Position in the stream of requests.
enum Incoming {
    /// Before the header of a request.
    Head,
    /// In the payload of a write, which is received directly into the memory for the device; `filled` bytes have been
    /// received.
    Payload { head: RequestHead, fua: bool, payload: Payload, filled: usize },
    /// In the payload of a refused request, which is discarded before the error reply is sent.
    Skip { head: RequestHead, left: usize, refusal: Refusal },
}

/// Identifies a request in its completion.
struct Tag {
    head: RequestHead,
    /// Whether a read may be answered with more than one content chunk.
    fragments: bool,
}

struct Transmission<'a> {
    transport: &'a mut dyn Transport,
    session: Session<'a, Tag>,
    sharing: Option<Sharing>,
    /// Whether the changes among the requests that are being taken up may begin, if the first of them was reached.
    turn: Option<Turn>,
    /// Whether the other sessions of the export count this one as carrying out changes.
    marked: bool,
    exports: &'a dyn Exports,
    style: Style,
    contexts: Vec<Context>,
    terms: &'a Terms,
    stop: &'a AtomicBool,
    inbox: Inbox,
    incoming: Incoming,
    /// Whether the last request was a large write: then the next request probably is a large write too.
    streaming: bool,
    outbox: Outbox,
    /// Whether a received request waits until the session has room for it.
    stalled: bool,
    /// Whether no further requests are accepted.
    ended: bool,
    /// The protocol violation that ended the session, if any.
    fault: Option<Error>,
    tally: Tally,
}

impl Transmission<'_> {
    fn run(&mut self) -> Result<()> {
        loop {
            // Completed requests are answered before further requests are accepted.
            self.answer();
            self.take_up()?;
            // A device flush on this thread has delayed requests that arrived during it.
            let arrived = self.session.end_batch() && self.is_wanting() && self.receive(Wait::No)?;
            if arrived {
                self.session.saw_overlap();
            }
            if self.stop.load(Ordering::Relaxed) {
                self.ended = true;
            }
            self.end_waiting();
            self.end_changes();
            self.answer();
            let drained = self.send()?;
            let busy = self.session.under_way() > 0;
            self.session.note_answered(drained && self.session.under_way() == self.session.waiting_for_space());
            if self.ended && drained && !busy {
                return self.fault.take().map_or(Ok(()), Err);
            }
            if arrived {
                // The client may wait for the replies to these requests before it sends more, so they are started
                // before this thread waits.
                continue;
            }
            let wanting = self.is_wanting();
            match (busy, drained) {
                _ if self.turn == Some(Turn::Wait) => {
                    std::thread::sleep(ABANDONED_LOOK);
                    self.session.look()?;
                }
                // A received request waited only for room, which is available now.
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
                    // The socket accepts no more bytes, so replies to requests that complete now could not be sent:
                    // this thread waits for the socket.
                    self.await_socket(wanting, UNREAD_PATIENCE)?;
                    self.session.look()?;
                    self.receive_if(wanting)?;
                }
            }
        }
    }

    /// Ends the wait of writes for space if the session ends.
    fn end_waiting(&mut self) {
        if self.session.waiting_for_space() == 0 {
            return;
        }
        // While no input is received, the end of the stream is not noticed.
        if !self.ended && !self.is_wanting() && self.transport.descriptor().is_some_and(peer_has_gone) {
            self.ended = true;
        }
        if self.stop.load(Ordering::Relaxed) {
            self.session.drop_waiting();
        } else if self.ended {
            self.session.refuse_waiting();
        }
    }

    /// Whether more input should be received. The payload of an accepted write is always received: its memory is
    /// counted already, and other sessions of the export may wait for the end of the write.
    fn is_wanting(&self) -> bool {
        let in_payload = matches!(self.incoming, Incoming::Payload { .. });
        !self.ended && !self.stalled && (in_payload || self.has_room())
    }

    /// Whether another request can be accepted.
    fn has_room(&self) -> bool {
        self.session.has_room(self.outbox.replies(), self.outbox.held())
    }

    /// How the receive call waits when there is nothing else to do: for the rest of a large payload in one call.
    fn patience(&self) -> Wait {
        match &self.incoming {
            Incoming::Payload { payload, filled, .. } if payload.length() - filled >= DIRECT_PAYLOAD_BYTES_MIN => {
                Wait::All
            }
            _ => Wait::Some,
        }
    }

    /// Starts the requests that have arrived.
    fn take_up(&mut self) -> Result<()> {
        self.stalled = false;
        self.turn = None;
        while !self.ended && self.step() {
            self.answer();
            if self.outbox.replies() >= SEND_BATCH_REPLIES || self.outbox.held() >= SEND_BATCH_BYTES {
                self.send()?;
            }
        }
        self.end_changes();
        Ok(())
    }

    /// Whether changes may be carried out ([`crate::clients::abandoned`]).
    fn turn(&mut self) -> Turn {
        if let Some(turn) = self.turn {
            return turn;
        }
        let turn = self.sharing.as_ref().map_or(Turn::Begin, |sharing| sharing.begin(|| self.has_farewell()));
        (self.turn, self.marked) = (Some(turn), true);
        turn
    }

    /// Whether a disconnect request is among the received requests.
    fn has_farewell(&self) -> bool {
        let extended = self.style == Style::Extended;
        let head_bytes = if extended { EXTENDED_REQUEST_BYTES } else { REQUEST_BYTES };
        let mut left = self.inbox.available();
        while let Some(head) = left.get(..head_bytes).and_then(|bytes| RequestHead::decode(bytes, extended)) {
            if head.command == command::DISC {
                return true;
            }
            let payload = usize::try_from(head.payload(extended)).ok();
            let next = payload.and_then(|payload| left.get(head_bytes.checked_add(payload)?..));
            left = next.unwrap_or_default();
        }
        false
    }

    /// Notes for the other sessions of the export that this one carries out no changes, unless some are under way.
    fn end_changes(&mut self) {
        let receives = !self.ended && matches!(self.incoming, Incoming::Payload { .. });
        if self.marked && !receives && self.session.waiting_for_space() == 0 {
            self.marked = false;
            self.sharing.iter().for_each(Sharing::end);
        }
    }

    /// Processes the next part of the input; false if more bytes or more room are needed.
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
                // The request was checked before its payload arrived. The device checks the range again, because the
                // capacity may have changed since.
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
        let mut action = judge(&head, &rules);
        match &action {
            Ok(Action::Write { length, .. }) if !self.session.has_room_to_write(*length) => {
                self.stalled = true;
                return false;
            }
            Ok(Action::Zero { .. }) if !self.session.has_room_to_write(0) => {
                self.stalled = true;
                return false;
            }
            // Small payloads are processed once they have arrived completely.
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
        if matches!(
            action,
            Ok(Action::Write { .. } | Action::Zero { .. } | Action::Trim { .. } | Action::Resize { .. })
        ) {
            match self.turn() {
                Turn::Begin => {}
                Turn::Wait => {
                    self.stalled = true;
                    return false;
                }
                // A session that has to end shuts its own socket down. Its client repeats what is not answered.
                Turn::Refuse if self.stop.load(Ordering::SeqCst) => {
                    self.ended = true;
                    return false;
                }
                Turn::Refuse => action = Err(GONE),
            }
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
                let refusal = Refusal::new(errno::EINVAL, "the payload names too many contexts");
                self.incoming = Incoming::Skip { head, left: payload, refusal };
            }
            Ok(action) => self.execute(&head, action),
            Err(refusal) if payload > 0 => self.incoming = Incoming::Skip { head, left: payload, refusal },
            Err(refusal) => self.refuse(&head, &refusal),
        }
        true
    }

    /// Ends the session after a protocol violation. Requests that were accepted before are finished.
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
            // Requests with a payload are carried out when the payload has arrived.
            Action::Write { .. } | Action::StatusPayload { .. } => return,
            Action::Cache { length } => {
                let done = device.prefetch(offset, length.min(CACHE_BYTES_MAX));
                return self.conclude(head, done);
            }
            Action::Resize { capacity } => {
                let done = device.resize(capacity).inspect(|()| self.exports.resized(device.name(), capacity));
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

    /// Adds the replies to completed requests to the outbox.
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
}
