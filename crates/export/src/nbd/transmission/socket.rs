//! The session and its socket: receiving, sending, and waiting for both directions.

use super::{Incoming, Transmission};
use connections::transport::{Wait, wait_for};
use error::{Error, IoContext, Result};
use std::io::{self, IoSliceMut};
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Transmission<'_> {
    /// Sends what the socket accepts without blocking; true if everything is sent.
    pub(super) fn send(&mut self) -> Result<bool> {
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

    pub(super) fn receive_if(&mut self, wanting: bool) -> Result<()> {
        if wanting { self.receive(Wait::No).map(|_| ()) } else { Ok(()) }
    }

    /// Receives once: the rest of the current payload, and the bytes after it into the inbox. False if no bytes were
    /// available.
    pub(super) fn receive(&mut self, wait: Wait) -> Result<bool> {
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
            tracing::info!("the client closed the connection in the middle of a request; the request has no effect");
        }
        Ok(())
    }

    pub(super) fn await_socket(&mut self, wanting: bool, timeout: Duration) -> Result<bool> {
        if wanting && self.transport.has_input() {
            return Ok(true);
        }
        wait_for(self.transport, wanting, true, Some(timeout)).during(|| "waiting for the client".to_owned())
    }

    /// Polls for completions and new requests, for as long as polling has recently succeeded; true if there were any.
    pub(super) fn poll(&mut self, wanting: bool) -> Result<bool> {
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

    /// Waits for completions and for the socket; true if the socket may have input to receive.
    pub(super) fn await_completions(&mut self, wanting: bool) -> Result<bool> {
        if wanting && self.transport.has_input() {
            self.session.look()?;
            return Ok(true);
        }
        self.wait(wanting)
    }

    pub(super) fn wait(&mut self, wanting: bool) -> Result<bool> {
        let socket = if wanting { self.transport.descriptor() } else { None };
        self.session.wait(socket)
    }
}
