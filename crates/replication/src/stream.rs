//! Frames and messages over a stream of bytes.

use crate::frame::{HEAD, Head, Kind};
use crate::limits::MESSAGE_STEP;
use crate::message::Message;
use backend::BLOCK_SIZE;
use checksums::Checksums;
use connections::TlsStream;
use error::{Error, ErrorKind, Result};
use std::io;
use std::time::Instant;

/// A stream of bytes in both directions.
pub trait ByteStream {
    /// Fills `into`; `UnexpectedEof` if the peer ends the stream before that.
    fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()>;

    /// Sends the bytes, possibly only at the next flush.
    fn write(&mut self, parts: &[&[u8]]) -> io::Result<()>;

    /// Sends all buffered bytes.
    fn flush(&mut self) -> io::Result<()>;

    /// Time after which waiting for the peer fails with `TimedOut`; `None` for no limit.
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()>;
}

impl ByteStream for TlsStream {
    fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        TlsStream::read_exact(self, into)
    }

    fn write(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        TlsStream::write(self, parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        TlsStream::flush(self)
    }

    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        TlsStream::set_deadline(self, deadline)
    }
}

/// A stream of frames.
pub struct Conversation<S> {
    /// The stream of bytes.
    pub stream: S,
    /// Name of the peer, for error messages.
    peer: String,
    /// Whether both sides have accepted certificates and versions. Later errors are errors of the connection.
    established: bool,
}

impl<S: ByteStream> Conversation<S> {
    /// Creates a stream of frames over a stream of bytes.
    pub fn new(stream: S, peer: String) -> Self {
        Self { stream, peer, established: false }
    }

    /// Records that certificates and versions are accepted.
    pub fn establish(&mut self) {
        self.established = true;
    }

    /// Name of the peer, for messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    fn broken(&self, what: &str, error: io::Error) -> Error {
        let peer = &self.peer;
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Error::new(ErrorKind::Io, format!("{peer} has closed the connection"))
            }
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                Error::new(ErrorKind::Io, format!("{peer} has sent nothing for too long"))
            }
            // Before certificates and versions are accepted, this error is due to keys and certificates, or to bytes
            // that were modified in transit.
            io::ErrorKind::InvalidData if !self.established => {
                Error::new(ErrorKind::Invalid, format!("TLS with {peer}: {error}"))
            }
            _ => Error::io(format!("{what} {peer}"), error),
        }
    }

    /// Time after which waiting for the peer fails.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) -> Result<()> {
        self.stream.set_deadline(deadline).map_err(|error| self.broken("waiting for", error))
    }

    /// Sends a frame, possibly only at the next flush.
    pub fn send(&mut self, head: &Head, payload: &[&[u8]]) -> Result<()> {
        let head = head.encode();
        let sent = self.stream.write(&[&head]).and_then(|()| self.stream.write(payload));
        sent.map_err(|error| self.broken("sending to", error))
    }

    /// Sends all buffered bytes.
    pub fn flush(&mut self) -> Result<()> {
        self.stream.flush().map_err(|error| self.broken("sending to", error))
    }

    /// Sends a message at once.
    pub fn tell(&mut self, message: &Message) -> Result<()> {
        let payload = message.encode()?;
        if payload.len() > crate::limits::MESSAGE_MAX {
            let text = format!("a message of {} bytes to {} is too long", payload.len(), self.peer);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        self.send(&Head::of(Kind::Message, 0, 0, &payload), &[&payload])?;
        self.flush()
    }

    /// The header of the next frame.
    pub fn head(&mut self) -> Result<Head> {
        let mut bytes = [0; HEAD];
        self.stream.read_exact(&mut bytes).map_err(|error| self.broken("listening to", error))?;
        Head::decode(&bytes).map_err(|error| error.context(&self.peer))
    }

    /// Reads the payload of a frame into memory of the same length.
    pub fn payload(&mut self, head: &Head, into: &mut [u8]) -> Result<()> {
        self.stream.read_exact(into).map_err(|error| self.broken("listening to", error))?;
        head.verify(into).map_err(|error| error.context(&self.peer))
    }

    /// Reads a data payload. Returns the checksums of its blocks if it consists of whole blocks; the payload's checksum
    /// is derived from them.
    pub fn data(&mut self, head: &Head, into: &mut [u8]) -> Result<Option<Checksums>> {
        if into.is_empty() || !into.len().is_multiple_of(BLOCK_SIZE) {
            return self.payload(head, into).map(|()| None);
        }
        self.stream.read_exact(into).map_err(|error| self.broken("listening to", error))?;
        let sums = Checksums::of(into);
        head.verify_sum(into.len(), sums.whole()).map_err(|error| error.context(&self.peer))?;
        Ok(Some(sums))
    }

    /// Reads a payload of eight bytes as a number.
    pub fn number(&mut self, head: &Head) -> Result<u64> {
        let mut bytes = [0; 8];
        self.payload(head, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// The next frame, which must be a message.
    pub fn hear(&mut self) -> Result<Message> {
        let head = self.head()?;
        if head.kind != Kind::Message {
            let text = format!("{} sent {:?} where a message was expected", self.peer, head.kind);
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let length = head.length as usize;
        let mut payload = Vec::new();
        // Memory grows with the bytes received, because the announced length is not trusted.
        while payload.len() < length {
            let have = payload.len();
            payload.resize(length.min(have + MESSAGE_STEP), 0);
            self.stream.read_exact(&mut payload[have..]).map_err(|error| self.broken("listening to", error))?;
        }
        head.verify(&payload).map_err(|error| error.context(&self.peer))?;
        Message::decode(&payload).map_err(|error| error.context(&self.peer))
    }
}
