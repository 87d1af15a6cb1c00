//! What carries the bytes of a session: a socket, TLS over one, or memory.
//!
//! The session decides when to wait and for what; a transport moves bytes and says honestly when it cannot. Invariants:
//!
//! 1. `receive` and `send` without permission to wait return [`io::ErrorKind::WouldBlock`] instead of waiting.
//! 2. What `send` accepted is sent in order, sooner or later: at once by a socket, after [`Transport::flush`] by TLS.
//! 3. When [`Transport::has_input`] is false and `receive` filled less than it was given, waiting for the descriptor
//!    to become readable misses nothing.

use crate::connection::Connection;
use crate::polling::Polling;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long `receive` may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until something came.
    Some,
    /// Until everything asked for came, or the stream ended; a transport may return earlier with a part.
    All,
}

/// A stream of bytes in both directions.
pub trait Transport: Send {
    /// Fills the slices one after another; 0 when the peer will send nothing more.
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], wait: Wait) -> io::Result<usize>;

    /// Sends from the slices one after another, without waiting; how much was accepted.
    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Pushes out what was accepted and is still here, without waiting; true when nothing is left.
    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// True when `receive` has something to give without asking the socket.
    fn has_input(&self) -> bool {
        false
    }

    /// What to wait on; `None` when nothing here ever waits.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// TLS over this transport has found a certificate of the peer good. An error when the peer is not served all the
    /// same.
    fn authenticated(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Ends the stream in the way of the transport's protocol, after everything that was sent; errors are ignored.
    /// A socket reads on until the peer closes too ([`Connection::close`]).
    fn close(&mut self) {}
}

/// Waits until the descriptor is readable (`input`) or writable (`output`), hung up, or `timeout` has passed (false).
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

/// The socket of a connection, unix or TCP, in blocking mode: each call says for itself whether it may wait, so that
/// an idle session costs one system call for each request instead of two.
pub struct Socket {
    connection: Arc<Connection>,
    polling: Polling,
}

impl Socket {
    /// The bytes of a connection.
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

    fn authenticated(&mut self) -> io::Result<()> {
        self.connection.authenticate()
    }

    fn close(&mut self) {
        self.connection.close();
    }
}

/// A stream that has all its input from the start and keeps what is sent: for tests and fuzzing. A session over it
/// runs to its end without ever waiting.
#[derive(Debug, Default)]
pub struct Memory {
    /// What the peer sends before it closes.
    pub input: Vec<u8>,
    /// How far the input has been received.
    pub received: usize,
    /// What we sent; shared, so that it can be looked at when the session has ended.
    pub output: Arc<parking_lot::Mutex<Vec<u8>>>,
    /// Largest number of bytes that one call moves, to exercise every way a message can be cut; 0 for no limit.
    pub step: usize,
}

impl Memory {
    /// A peer that sends `input` and closes.
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
