//! Transports of a session: a socket, TLS over a socket, or memory.
//!
//! The session decides when to wait. A transport transfers bytes, and reports when it would block. Invariants:
//!
//! 1. `receive` and `send` without permission to wait return [`io::ErrorKind::WouldBlock`] instead of waiting.
//! 2. Bytes that `send` has accepted are sent in order: by a socket at once, by TLS at the latest in
//!    [`Transport::flush`].
//! 3. If [`Transport::has_input`] is false and `receive` has not filled all of its slices, the session can wait until
//!    the descriptor is readable without missing input.

use crate::connection::Connection;
use crate::polling::Polling;
use crate::tls::PeerCertificate;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long `receive` may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Do not wait.
    No,
    /// Wait until some bytes are received.
    Some,
    /// Wait until all requested bytes are received or the stream ends. A transport may return earlier with some of the
    /// bytes.
    All,
}

/// A stream of bytes in both directions.
pub trait Transport: Send {
    /// Fills the slices in order; returns the number of bytes, 0 at the end of the stream.
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], wait: Wait) -> io::Result<usize>;

    /// Sends the slices in order without blocking; returns the number of accepted bytes.
    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Sends accepted bytes that are still buffered, without blocking; true if none are left.
    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// Whether `receive` can return data without reading the socket.
    fn has_input(&self) -> bool {
        false
    }

    /// The descriptor to wait on; `None` if the transport never blocks.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// The valid certificate that the peer has presented, if any.
    fn peer_certificate(&self) -> Option<PeerCertificate> {
        None
    }

    /// Called when TLS over this transport has verified the peer's certificate. `holder` identifies the holder of the
    /// certificate. An error refuses the peer.
    fn authenticated(&mut self, _holder: &[u8]) -> io::Result<()> {
        Ok(())
    }

    /// Ends the stream as the transport's protocol requires, after everything was sent. Errors are ignored. A socket is
    /// read until the peer closes the connection too ([`Connection::close`]).
    fn close(&mut self) {}
}

/// Waits until the descriptor is readable (`input`), writable (`output`) or hung up; false after `timeout`.
pub fn wait_for(transport: &dyn Transport, input: bool, output: bool, timeout: Option<Duration>) -> io::Result<bool> {
    let Some(descriptor) = transport.descriptor() else { return Ok(true) };
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, input);
    flags.set(PollFlags::OUT, output);
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| rustix::event::Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(&descriptor, flags)], left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether the peer has closed its side of a stream socket.
pub fn peer_has_gone(socket: BorrowedFd<'_>) -> bool {
    hung_up([(socket, PollFlags::RDHUP)]) == [true]
}

/// For stream sockets, whether one of the flags, `HUP` or `ERR` is set.
pub(crate) fn hung_up<'a>(sockets: impl IntoIterator<Item = (BorrowedFd<'a>, PollFlags)>) -> Vec<bool> {
    let entry = |(socket, flags)| PollFd::from_borrowed_fd(socket, flags);
    let mut entries: Vec<PollFd<'a>> = sockets.into_iter().map(entry).collect();
    // The kernel reports HUP and ERR without a request.
    let found = poll(&mut entries, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok();
    entries.iter().map(|entry| found && !entry.revents().is_empty()).collect()
}

/// The socket of a connection, unix or TCP, in blocking mode. Each call states whether it may block, so that an idle
/// session needs one system call per request instead of two.
pub struct Socket {
    connection: Arc<Connection>,
    polling: Polling,
}

impl Socket {
    /// A transport over the socket of a connection.
    pub fn new(connection: Arc<Connection>) -> Self {
        Self { connection, polling: Polling::default() }
    }
}

fn receive(socket: &OwnedFd, into: &mut [IoSliceMut<'_>], flags: RecvFlags) -> io::Result<usize> {
    loop {
        let received = if let [one] = into {
            rustix::net::recv(socket, &mut **one, flags).map(|(bytes, _)| bytes)
        } else {
            let mut ancillary = RecvAncillaryBuffer::default();
            rustix::net::recvmsg(socket, into, &mut ancillary, flags).map(|message| message.bytes)
        };
        match received {
            Err(Errno::INTR) => continue,
            other => return Ok(other?),
        }
    }
}

impl Transport for Socket {
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], wait: Wait) -> io::Result<usize> {
        let flags = match wait {
            Wait::No => RecvFlags::DONTWAIT,
            Wait::Some => RecvFlags::empty(),
            Wait::All => RecvFlags::WAITALL,
        };
        if wait != Wait::Some {
            return receive(self.connection.socket(), into, flags);
        }
        let look = || match receive(self.connection.socket(), into, RecvFlags::DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            received => Some(received),
        };
        if let Some(received) = self.polling.poll(look) {
            return received;
        }
        let began = Instant::now();
        let received = receive(self.connection.socket(), into, flags);
        self.polling.slept(began.elapsed());
        received
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            let sent = if let [one] = slices {
                rustix::net::send(self.connection.socket(), one, flags)
            } else {
                rustix::net::sendmsg(self.connection.socket(), slices, &mut SendAncillaryBuffer::default(), flags)
            };
            match sent {
                Err(Errno::INTR) => continue,
                other => return Ok(other?),
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.connection.socket().as_fd())
    }

    fn authenticated(&mut self, holder: &[u8]) -> io::Result<()> {
        self.connection.authenticate(Some(holder))
    }

    fn close(&mut self) {
        self.connection.close();
    }
}

/// A stream whose input is given at the start and whose output is kept, for tests and fuzzing. A session over it never
/// waits.
#[derive(Debug, Default)]
pub struct Memory {
    /// Bytes that the peer sends before it closes the stream.
    pub input: Vec<u8>,
    /// Number of input bytes received so far.
    pub received: usize,
    /// Bytes that the session has sent; shared, so that they can be read after the session has ended.
    pub output: Arc<parking_lot::Mutex<Vec<u8>>>,
    /// Largest number of bytes per call, so that messages can be split at every position; 0 for no limit.
    pub step: usize,
}

impl Memory {
    /// A stream whose peer sends `input` and then closes the stream.
    pub fn new(input: Vec<u8>) -> Self {
        Self { input, ..Self::default() }
    }
}

impl Transport for Memory {
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], _wait: Wait) -> io::Result<usize> {
        let mut left = &self.input[self.received..];
        if self.step > 0 {
            left = &left[..left.len().min(self.step)];
        }
        let before = left.len();
        for slice in into {
            let part = slice.len().min(left.len());
            slice[..part].copy_from_slice(&left[..part]);
            left = &left[part..];
        }
        self.received += before - left.len();
        Ok(before - left.len())
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut output = self.output.lock();
        let mut allowed = if self.step > 0 { self.step } else { usize::MAX };
        let before = output.len();
        for slice in slices {
            let part = slice.len().min(allowed);
            output.extend_from_slice(&slice[..part]);
            allowed -= part;
        }
        Ok(output.len() - before)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
