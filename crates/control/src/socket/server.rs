//! The server of the control socket. One thread accepts connections, and each connection has a thread. A long request
//! runs on a third thread, so that the connection's thread can watch for cancellation. Short requests are carried out
//! by the connection's thread, because on a loaded machine a handover between threads takes longer than a snapshot.
//!
//! Invariants:
//! 1. There are at most [`CONNECTIONS_MAX`] connections; further ones get an error and are closed. A connection is
//!    closed if it sends no request for [`IDLE_MAX`], leaves a line incomplete for [`HALF_LINE_MAX`], or does not read
//!    for [`STALL_MAX`].
//! 2. The `cancelled()` of a request's progress returns true soon after the client cancels or disconnects, and
//!    [`GRACE`] after [`Server::stop`]. If the reply still cannot be sent [`GRACE`] later, the connection is cut.
//! 3. Lines that are being received use at most [`LINES_MEMORY`] for all connections, besides a small part for each
//!    connection. A client whose line needs more gets an error, and its connection is closed.
//! 4. After [`Server::stop`] no request is running and none can begin, and the socket file is removed.
//!
//! Accepting, counting and ending connections is done by crate [`connections`].

use super::lines::{Line, LineMemory, LineReader};
use crate::dispatch::Watch;
use crate::message::{
    FromClient, FromServer, Part, ProgressReport, REPLY_LINE_MAX, REQUEST_LINE_MAX, Reply, Request, decode, encode,
};
use connections::{Access, Connection, Drain, Limits, Listen, Protocol, Refusal, Service, ServiceConfig};
use disk::{Location, Progress};
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Most connections at a time.
const CONNECTIONS_MAX: usize = 64;

/// Memory for the incomplete lines of all connections: enough for two of the longest lines.
const LINES_MEMORY: usize = 64 << 20;

/// How long a connection may be without a request.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// How long the rest of an incomplete line may take.
const HALF_LINE_MAX: Duration = Duration::from_secs(10);

/// How long a client may leave replies unread. The time is long, because a user may be paging through a diff.
const STALL_MAX: Duration = Duration::from_secs(600);

/// How long running requests may continue after [`Server::stop`] before they are cancelled.
const GRACE: Duration = Duration::from_secs(5);

/// How long to wait until the requests of disconnected clients have ended.
const SETTLE_MAX: Duration = Duration::from_secs(60);

/// Interval of progress reports and of checks for cancellation by the server.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The function that carries out requests.
pub type Handler = dyn Fn(Request, &dyn Watch) -> Result<Reply> + Send + Sync;

/// A running control server. Dropping it stops it.
pub struct Server(Service);

/// State shared by the threads of connections.
struct Control {
    handler: Box<Handler>,
    memory: Arc<LineMemory>,
}

impl Server {
    /// Listens in the folder of a datastore and answers requests. Only the owner of the datastore may call this.
    /// Members of `group`, if there is one, may do everything that the owner may.
    ///
    /// # Errors
    /// `Unsupported` if the datastore has no local folder, `Exists` if the path of the socket is another file, and
    /// errors of the system.
    pub fn start(datastore: &Location, group: Option<u32>, handler: Box<Handler>) -> Result<Self> {
        let config = ServiceConfig {
            name: "control",
            listen: vec![Listen::Owned { path: super::path(datastore)?, group }],
            access: Access::LOCAL,
            limits: Limits { unix: CONNECTIONS_MAX, authenticated: 0, unauthenticated: 0 },
            drain: Drain { undisturbed: GRACE, finish: GRACE, cut: None },
        };
        let memory = Arc::new(LineMemory::new(LINES_MEMORY));
        Service::start(config, Arc::new(Control { handler, memory })).map(Self)
    }

    /// Refuses further requests, lets running requests finish, and cancels those that take longer than [`GRACE`]. May
    /// be called again.
    pub fn stop(&self) {
        self.0.stop();
    }
}

impl Protocol for Control {
    fn serve(&self, connection: &Arc<Connection>) {
        backend::local::Thread::current().set_slice(backend::local::Slice::Short);
        if let Err(error) = connection.set_timeouts(Some(HALF_LINE_MAX), Some(STALL_MAX)) {
            tracing::warn!(%error, "a control connection could not be served");
            return;
        }
        let session = Session { handler: &*self.handler, connection, writing: Mutex::new(()) };
        session.serve(LineReader::sharing(&**connection, REQUEST_LINE_MAX, &self.memory));
    }

    fn refuse(&self, socket: &OwnedFd, why: Refusal) {
        let sentence = match why {
            Refusal::Full(_, limit) => format!("{limit} commands are under way already: try again later"),
            Refusal::Share(held) => format!("this user has {held} commands under way already: try again later"),
            // A client that connected just before the stop gets the reply that its request was not begun.
            Refusal::Stopping => "the server of this datastore is stopping: try again".to_owned(),
        };
        if let Ok(line) = encode(&failure(&Error::new(ErrorKind::Busy, sentence)), REPLY_LINE_MAX) {
            // A new socket has room for the message; sending fails only if the client has disconnected.
            let _ = rustix::net::send(socket, &line, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }
}

/// Waits until a socket is readable or hung up; for each socket, returns whether it is readable or hung up.
fn wait<const N: usize>(sockets: [BorrowedFd<'_>; N], timeout: Duration) -> io::Result<[bool; N]> {
    let mut entries = sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN));
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(&mut entries, Some(&timeout)) {
        Ok(_) => Ok(entries.map(|entry| !entry.revents().is_empty())),
        Err(rustix::io::Errno::INTR) => Ok([false; N]),
        Err(e) => Err(e.into()),
    }
}

fn failure(error: &Error) -> FromServer {
    FromServer::Error(error.into())
}

/// The session of one client.
struct Session<'a> {
    handler: &'a Handler,
    connection: &'a Connection,
    /// Locked while a line is written, so that lines are not interleaved.
    writing: Mutex<()>,
}

impl Session<'_> {
    fn send(&self, message: &FromServer) -> Result<()> {
        let line = encode(message, REPLY_LINE_MAX)?;
        let _writing = self.writing.lock();
        let mut connection = self.connection;
        connection.write_all(&line).map_err(|e| Error::io("answering a control client", e))
    }

    /// Answers requests until the client disconnects or violates the protocol, or the server stops.
    fn serve(&self, mut lines: LineReader<&Connection>) {
        loop {
            if !lines.has_pending() {
                match wait([self.connection.socket().as_fd(), self.connection.stopping()], IDLE_MAX) {
                    Ok([true, false]) => {}
                    _ => return,
                }
            }
            let message = match lines.next() {
                Ok(Line::Complete(line)) => decode(&line),
                Ok(Line::TooLong) => {
                    let sentence = format!("a control message may have at most {REQUEST_LINE_MAX} bytes");
                    Err(Error::new(ErrorKind::Invalid, sentence))
                }
                Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                    let sentence =
                        "the messages that other commands are sending need the memory for this one: try again";
                    Err(Error::new(ErrorKind::Busy, sentence))
                }
                Ok(Line::End) | Err(_) => return,
            };
            let outcome = match message {
                Ok(FromClient::Request(request)) => self.run(request, &mut lines),
                // The cancellation arrived after its request had ended.
                Ok(FromClient::Cancel) => Ok(true),
                Err(error) => self.send(&failure(&error)).map(|()| false),
            };
            match outcome {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::debug!("{error}");
                    return;
                }
            }
        }
    }

    /// Carries out one request while watching the connection; `Ok(false)` if the connection cannot be used any further.
    fn run(&self, request: Request, lines: &mut LineReader<&Connection>) -> Result<bool> {
        tracing::debug!(?request, "control request");
        let follower = Follower { session: self, cancelled: AtomicBool::new(false), done: 0.into(), total: 0.into() };
        if request == Request::Settle && !self.connection.others_settled(SETTLE_MAX) {
            let sentence = "requests of disconnected clients are still running: try again later";
            self.send(&failure(&Error::new(ErrorKind::Busy, sentence)))?;
            return Ok(true);
        }
        if request.is_for_requesting_process() {
            let sentence = "requests that start, change or notify a machine are carried out by the requesting process, \
                            not by the server: they cannot be jobs of the server";
            self.send(&failure(&Error::new(ErrorKind::Unsupported, sentence)))?;
            return Ok(true);
        }
        let (result, usable) = match request.takes_long() {
            true => self.follow(request, &follower, lines)?,
            false => {
                let work = std::panic::AssertUnwindSafe(|| (self.handler)(request, &follower));
                (std::panic::catch_unwind(work).unwrap_or_else(|_| Err(failed_inside())), true)
            }
        };
        match result {
            Ok(reply) => match self.send(&FromServer::Reply(Box::new(reply))) {
                Err(error) if error.kind() == ErrorKind::Invalid => self.send(&failure(&error))?,
                sent => sent?,
            },
            Err(error) => {
                tracing::debug!(kind = ?error.kind(), "control request failed: {error}");
                self.send(&failure(&error))?;
            }
        }
        Ok(usable)
    }

    /// Carries out a long request on a thread of its own while watching the connection. Returns its outcome, and
    /// whether the connection can be used any further.
    fn follow(
        &self,
        request: Request,
        follower: &Follower<'_>,
        lines: &mut LineReader<&Connection>,
    ) -> Result<(Result<Reply>, bool)> {
        let (finished, finish) = UnixStream::pair().map_err(|e| Error::io("carrying out a control request", e))?;
        let mut usable = true;
        let result = thread::scope(|scope| {
            let worker = thread::Builder::new().name("control-work".into()).spawn_scoped(scope, || {
                // Dropping `finish` at the end of the work, also by a panic, closes the socket pair and so wakes the
                // watching thread.
                let _finish = finish;
                (self.handler)(request, follower)
            });
            let worker = worker.map_err(|e| Error::io("carrying out a control request", e))?;
            let mut told = (0, 0);
            loop {
                // The socket of a disconnected client is always readable, so it is no longer watched. A line that was
                // received together with the request does not make the socket readable.
                let ready = if usable && lines.has_line() {
                    Ok([false, true])
                } else if usable {
                    wait([finished.as_fd(), self.connection.socket().as_fd()], PROGRESS_INTERVAL)
                } else {
                    wait([finished.as_fd()], PROGRESS_INTERVAL).map(|[ended]| [ended, false])
                };
                match ready {
                    Ok([true, _]) => break,
                    Ok([false, true]) => {
                        usable = match lines.next().map(|line| match line {
                            Line::Complete(line) => decode(&line),
                            Line::End | Line::TooLong => Err(Error::new(ErrorKind::Invalid, "gone")),
                        }) {
                            Ok(Ok(FromClient::Cancel)) => true,
                            Ok(Ok(FromClient::Request(_)) | Err(_)) | Err(_) => false,
                        };
                        follower.cancelled.store(true, Ordering::Relaxed);
                    }
                    Ok([false, false]) => {
                        let now = (follower.done.load(Ordering::Relaxed), follower.total.load(Ordering::Relaxed));
                        if now != told {
                            told = now;
                            let report = ProgressReport { done: now.0, total: now.1 };
                            if self.send(&FromServer::Progress(report)).is_err() {
                                follower.cancelled.store(true, Ordering::Relaxed);
                            }
                        }
                    }
                    Err(_) => break,
                }
            }
            worker.join().unwrap_or_else(|_| Err(failed_inside()))
        });
        Ok((result, usable))
    }
}

/// The error for a request that panicked.
fn failed_inside() -> Error {
    let sentence =
        "the server failed inside this request: see its log; `lamina check` shows whether the datastore is intact";
    Error::new(ErrorKind::Stopped, sentence)
}

/// The progress to which a running request reports.
struct Follower<'a> {
    session: &'a Session<'a>,
    cancelled: AtomicBool,
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress for Follower<'_> {
    fn update(&self, done: u64, total: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.session.connection.ends()
    }
}

impl Watch for Follower<'_> {
    fn part(&self, part: Part) -> Result<()> {
        self.session
            .send(&FromServer::Part(part))
            .map_err(|error| Error::new(ErrorKind::Interrupted, format!("the client closed its connection: {error}")))
    }
}

#[cfg(test)]
mod tests;
