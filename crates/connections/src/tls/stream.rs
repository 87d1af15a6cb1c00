//! TLS over a blocking socket, for bulk data.
//!
//! The stream uses the unbuffered interface of rustls: ciphertext is received into a large buffer and decrypted from
//! there, and plaintext is encrypted from the caller's memory directly into the send buffer.

use super::{CertificateName, ClientIdentity, TlsIdentity};
use crate::limits::{ENCRYPT_BYTES, RECEIVE_BYTES, SEND_BYTES};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendFlags};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

enum Session {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// A socket with TLS. The TLS handshake happens within the first reads and writes.
pub struct TlsStream {
    session: Session,
    out: Out,
    /// Received ciphertext; bytes from `start` to `end` are not decrypted yet.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// Decrypted plaintext; bytes from `plain_at` on are not read yet.
    plain: Vec<u8>,
    plain_at: usize,
    deadline: Option<Instant>,
    ended: bool,
    /// Whether TLS has failed. After that rustls must not process any further input.
    failed: bool,
}

/// Ciphertext that has to be sent.
struct Out {
    socket: Arc<OwnedFd>,
    bytes: Vec<u8>,
    used: usize,
    sent: u64,
}

/// Result of one step of the rustls state machine.
enum Step {
    /// Another step has to follow.
    Again,
    /// More input from the peer is needed.
    Blocked,
    /// All given plaintext is encrypted.
    Encrypted,
    /// The peer has closed its direction of the stream.
    Ended,
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Out {
    /// Makes room for `more` bytes after the bytes in use.
    fn reserve(&mut self, more: usize) {
        if self.bytes.len() < self.used + more {
            self.bytes.resize(self.used + more, 0);
        }
    }

    fn send(&mut self) -> io::Result<()> {
        if self.used > 0 {
            let mut left = &self.bytes[..self.used];
            while !left.is_empty() {
                match rustix::net::send(&self.socket, left, SendFlags::NOSIGNAL) {
                    Ok(bytes) => left = &left[bytes..],
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            self.sent += self.used as u64;
            self.used = 0;
        }
        Ok(())
    }
}

/// Performs one step of the rustls state machine. Plaintext is passed to `take`; `plain` is encrypted if the state
/// allows it.
fn step<D>(
    status: UnbufferedStatus<'_, '_, D>,
    out: &mut Out,
    take: &mut dyn FnMut(&[u8]),
    plain: Option<&[u8]>,
    discard: &mut usize,
) -> io::Result<Step> {
    *discard += status.discard;
    let step = match status.state.map_err(invalid)? {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record.map_err(invalid)?;
                *discard += record.discard;
                take(record.payload);
            }
            Step::Again
        }
        ConnectionState::EncodeTlsData(mut data) => {
            loop {
                match data.encode(&mut out.bytes[out.used..]) {
                    Ok(bytes) => {
                        out.used += bytes;
                        break;
                    }
                    Err(EncodeError::InsufficientSize(size)) => out.reserve(size.required_size),
                    Err(error) => return Err(invalid(error)),
                }
            }
            Step::Again
        }
        ConnectionState::TransmitTlsData(data) => {
            out.send()?;
            data.done();
            Step::Again
        }
        ConnectionState::WriteTraffic(mut traffic) => match plain {
            None => Step::Blocked,
            Some(plain) => loop {
                match traffic.encrypt(plain, &mut out.bytes[out.used..]) {
                    Ok(bytes) => {
                        out.used += bytes;
                        break Step::Encrypted;
                    }
                    Err(EncryptError::InsufficientSize(size)) => out.reserve(size.required_size),
                    Err(error) => return Err(invalid(error)),
                }
            },
        },
        ConnectionState::BlockedHandshake => Step::Blocked,
        ConnectionState::PeerClosed | ConnectionState::Closed => Step::Ended,
        // Early data is not possible, because neither side enables it.
        _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "TLS reached an unexpected state")),
    };
    Ok(step)
}

impl TlsStream {
    fn over(socket: Arc<OwnedFd>, session: Session) -> Self {
        let out = Out { socket, bytes: Vec::new(), used: 0, sent: 0 };
        Self {
            session,
            out,
            incoming: Vec::new(),
            start: 0,
            end: 0,
            plain: Vec::new(),
            plain_at: 0,
            deadline: None,
            ended: false,
            failed: false,
        }
    }

    /// Begins TLS as the client over a connected socket, to a server with that name.
    ///
    /// # Errors
    /// `InvalidData` if TLS cannot be set up with the given values.
    pub fn connect(socket: Arc<OwnedFd>, identity: &ClientIdentity, name: &CertificateName) -> io::Result<Self> {
        let session = UnbufferedClientConnection::new(Arc::clone(&identity.config), name.0.clone()).map_err(invalid)?;
        Ok(Self::over(socket, Session::Client(Box::new(session))))
    }

    /// Begins TLS as the server over an accepted socket.
    ///
    /// # Errors
    /// `InvalidData` if TLS cannot be set up with the given values.
    pub fn accept(socket: Arc<OwnedFd>, identity: &TlsIdentity) -> io::Result<Self> {
        let session = UnbufferedServerConnection::new(Arc::clone(&identity.config)).map_err(invalid)?;
        Ok(Self::over(socket, Session::Server(Box::new(session))))
    }

    /// Number of bytes sent over the socket.
    pub fn sent(&self) -> u64 {
        self.out.sent
    }

    /// Whether the client has presented a valid certificate.
    pub fn has_certificate(&self) -> bool {
        self.certificate().is_some()
    }

    /// Whether the client's certificate has one of the names.
    pub fn client_is(&self, names: &[CertificateName]) -> bool {
        self.certificate().is_some_and(|certificate| names.iter().any(|name| name.is_of(certificate)))
    }

    fn certificate(&self) -> Option<&CertificateDer<'static>> {
        match &self.session {
            Session::Client(_) => None,
            Session::Server(session) => session.peer_certificates().and_then(<[_]>::first),
        }
    }

    fn advance(&mut self, take: &mut dyn FnMut(&[u8]), plain: Option<&[u8]>) -> io::Result<Step> {
        if self.failed {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "TLS has failed on this connection"));
        }
        let done = self.advance_once(take, plain);
        if done.is_err() {
            self.failed = true;
            self.say_why();
        }
        done
    }

    fn advance_once(&mut self, take: &mut dyn FnMut(&[u8]), plain: Option<&[u8]>) -> io::Result<Step> {
        let (input, out) = (&mut self.incoming[self.start..self.end], &mut self.out);
        let mut discard = 0;
        let step = match &mut self.session {
            Session::Client(session) => step(session.process_tls_records(input), out, take, plain, &mut discard),
            Session::Server(session) => step(session.process_tls_records(input), out, take, plain, &mut discard),
        };
        self.start += discard;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        step
    }

    /// Encrypts plaintext and appends it to the send buffer.
    fn encrypt(&mut self, plain: &[u8]) -> io::Result<()> {
        loop {
            let mut kept = std::mem::take(&mut self.plain);
            let step = self.advance(&mut |record| kept.extend_from_slice(record), Some(plain));
            self.plain = kept;
            match step? {
                Step::Encrypted => return Ok(()),
                Step::Again => {}
                Step::Blocked => {
                    self.out.send()?;
                    self.receive()?;
                }
                Step::Ended => return Err(io::ErrorKind::BrokenPipe.into()),
            }
        }
    }

    /// Sends the pending alert, if there is one, which reports the reason of a failure to the peer. One step encodes
    /// the alert. A further step would process the failed input again, which rustls does not allow.
    fn say_why(&mut self) {
        let _ = self.advance_once(&mut |_| (), None);
        // An error of sending the alert is ignored, because the connection ends in any case.
        let _ = self.out.send();
    }

    /// Receives more ciphertext.
    fn receive(&mut self) -> io::Result<()> {
        if self.incoming.is_empty() {
            self.incoming.resize(RECEIVE_BYTES, 0);
        }
        if self.end == self.incoming.len() {
            // Only a partial record remains. It is moved to the front, which is cheap, because a record is much smaller
            // than the buffer.
            self.incoming.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.incoming.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a TLS message without an end"));
        }
        loop {
            if let Some(deadline) = self.deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                sockopt::set_socket_timeout(&self.out.socket, Timeout::Recv, Some(left))?;
            }
            match rustix::net::recv(&self.out.socket, &mut self.incoming[self.end..], RecvFlags::empty()) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((bytes, _)) => {
                    self.end += bytes;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Fills `into`; `UnexpectedEof` if the peer ends the stream before that.
    pub fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            if self.plain_at < self.plain.len() {
                let count = (self.plain.len() - self.plain_at).min(into.len() - filled);
                into[filled..filled + count].copy_from_slice(&self.plain[self.plain_at..self.plain_at + count]);
                self.plain_at += count;
                filled += count;
                continue;
            }
            self.plain.clear();
            self.plain_at = 0;
            if self.ended {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let mut rest = std::mem::take(&mut self.plain);
            // Records are decrypted directly into `into`; bytes beyond its end are kept in `plain`.
            let mut take = |record: &[u8]| {
                let count = record.len().min(into.len() - filled);
                into[filled..filled + count].copy_from_slice(&record[..count]);
                filled += count;
                rest.extend_from_slice(&record[count..]);
            };
            let step = self.advance(&mut take, None);
            self.plain = rest;
            match step? {
                Step::Again | Step::Encrypted => {}
                Step::Ended => self.ended = true,
                Step::Blocked => {
                    // The peer may wait for data that is not sent yet.
                    self.out.send()?;
                    self.receive()?;
                }
            }
        }
        Ok(())
    }

    /// Encrypts the bytes. The encrypted bytes are sent by this call or by a later call.
    pub fn write(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        // The bytes are encrypted in small parts, which are still in the processor's cache when they are sent.
        for piece in parts.iter().flat_map(|part| part.chunks(ENCRYPT_BYTES)) {
            self.encrypt(piece)?;
            if self.out.used >= SEND_BYTES {
                self.out.send()?;
            }
        }
        Ok(())
    }

    /// Sends all encrypted data.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.send()
    }

    /// Time after which waiting for the peer fails with `TimedOut` or `WouldBlock`; `None` for no limit.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.deadline = deadline;
        if deadline.is_none() {
            sockopt::set_socket_timeout(&self.out.socket, Timeout::Recv, None)?;
        }
        Ok(())
    }
}
