//! An accepted connection, shared by its protocol and the service that accepted it.

use crate::limits::{CLOSE_PATIENCE, CLOSE_READ_BYTES};
use crate::peer::Peer;
use crate::service::{Class, Shared};
use error::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// An accepted connection: a stream socket in blocking mode. Its descriptor is closed when the last reference is
/// dropped.
pub struct Connection {
    pub(crate) number: u64,
    pub(crate) peer: Peer,
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) tcp: bool,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) service: Arc<Shared>,
}

impl Connection {
    /// The connection's number, which is unique within the service.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The peer.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Whether the connection uses TCP.
    pub fn is_tcp(&self) -> bool {
        self.tcp
    }

    /// The socket. Only the thread of the connection reads from it.
    pub fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// How long reads and writes may block before they fail with `WouldBlock`; `None` for no limit.
    pub fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> io::Result<()> {
        sockopt::set_socket_timeout(&self.socket, Timeout::Recv, read)?;
        sockopt::set_socket_timeout(&self.socket, Timeout::Send, write)?;
        Ok(())
    }

    /// Whether the protocol has to finish the requests it has begun, and then to end the connection.
    pub fn ends(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// The flag behind [`Connection::ends`].
    pub fn stop(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// Requests the protocol to finish the requests that it has begun, and then to end the connection. A thread that
    /// waits for input receives the end of the stream.
    pub fn finish(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.shut_down(Shutdown::Read);
    }

    /// Closes the connection at once, in both directions and for all threads.
    pub fn cut(&self) {
        self.shut_down(Shutdown::Both);
    }

    fn shut_down(&self, how: Shutdown) {
        // An error is ignored: it means that the peer has disconnected.
        let _ = rustix::net::shutdown(&self.socket, how);
    }

    /// Whether the service is stopping.
    pub fn service_stops(&self) -> bool {
        self.service.stops()
    }

    /// A descriptor that becomes readable (hang-up) when the service stops.
    pub fn stopping(&self) -> BorrowedFd<'_> {
        self.service.stopping()
    }

    /// Called when the client has presented a valid certificate. From now on the connection counts as authenticated. If
    /// `holder` is given, which identifies the holder of the certificate, the share of this holder is limited.
    ///
    /// # Errors
    /// `ConnectionRefused` if the limit of authenticated connections is reached, or if the holder has as many
    /// connections as are free.
    pub fn authenticate(&self, holder: Option<&[u8]>) -> io::Result<()> {
        self.service.authenticate(self, holder)
    }

    /// Whether the client has presented a valid certificate.
    pub fn is_authenticated(&self) -> bool {
        self.service.class(self) == Class::Authenticated
    }

    /// Logs that the connection ended by an error in its negotiation. The rate of these log lines is bounded, because
    /// every client that reaches the socket can cause such errors.
    pub fn log_failure(&self, error: &Error) {
        self.service.log_failure(self, error);
    }

    /// Whether the peer has closed its side of the connection.
    pub fn peer_has_gone(&self) -> bool {
        crate::transport::peer_has_gone((*self.socket).as_fd())
    }

    /// For each connection, whether its peer has closed it. A peer that has shut down only its sending side still reads
    /// replies. Over TCP the two cannot be told apart, and such a connection counts as closed.
    pub fn are_closed<'a>(connections: impl Iterator<Item = &'a Self>) -> Vec<bool> {
        crate::transport::hung_up(connections.map(|connection| {
            let shut_down = if connection.tcp { PollFlags::RDHUP } else { PollFlags::empty() };
            ((*connection.socket).as_fd(), shut_down)
        }))
    }

    /// Waits until no other connection of the service has a peer that has disconnected. Returns false if there still is
    /// such a connection after `patience`, or if this connection has to end.
    pub fn others_settled(&self, patience: Duration) -> bool {
        self.service.settled(self.number, patience, || self.ends())
    }

    /// Closes the connection in both directions, after everything was sent. If a socket with unread input is closed,
    /// the kernel sends a reset, and the reset discards data that the peer has not read. So input is read until the
    /// peer closes the connection too, for at most [`CLOSE_PATIENCE`].
    pub fn close(&self) {
        if rustix::net::shutdown(&self.socket, Shutdown::Write).is_err() {
            return;
        }
        let deadline = Instant::now() + CLOSE_PATIENCE;
        let mut unread = vec![0; CLOSE_READ_BYTES];
        loop {
            match rustix::net::recv(&self.socket, &mut *unread, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let Ok(left) = Timespec::try_from(left) else { return };
                    let mut entries = [PollFd::from_borrowed_fd((*self.socket).as_fd(), PollFlags::IN)];
                    if matches!(poll(&mut entries, Some(&left)), Err(error) if error != Errno::INTR) {
                        return;
                    }
                }
                Err(_) => return,
            }
            if Instant::now() >= deadline {
                return;
            }
        }
    }
}

impl Read for &Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(&self.socket, into, RecvFlags::empty())?.0)
    }
}

impl Write for &Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
