//! The answering end of the control socket: a thread accepts, each connection has a thread, each long request under way
//! one more, so that its connection can be watched for a cancel while it works. Short ones are answered by the thread
//! of the connection: on a busy machine each hand-over between threads takes longer than taking a snapshot.
//!
//! What holds:
//! 1. At most [`CONNECTIONS_MAX`] connections; a further one is told so and closed. A connection that asks nothing for
//!    [`IDLE_MAX`], leaves half a line for [`HALF_LINE_MAX`] or does not read for [`STALL_MAX`] is closed.
//! 2. A request sees `cancelled()` soon after its client said so or went away, and when [`Server::stop`] has waited
//!    [`GRACE`] for it; one that cannot get rid of its answer is cut off after as long again.
//! 3. After [`Server::stop`] no request is running and none will start. The socket file is left to the owner.
//!
//! Locks: `connections` is held for insertions, removals and shutdown only; `writing` of a connection while a
//! line is written. Neither is taken under the other.

use super::lines::{Line, LineReader};
use crate::dispatch::Watch;
use crate::message::{
    FromClient, FromServer, Part, ProgressReport, REPLY_LINE_MAX, REQUEST_LINE_MAX, Reply, Request, decode, encode,
};
use disk::Progress;
use error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Connections at once.
const CONNECTIONS_MAX: usize = 64;

/// How long a connection may ask nothing.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// How long the rest of a line may take.
const HALF_LINE_MAX: Duration = Duration::from_secs(10);

/// How long a client may leave what it was sent unread. Long: a person may be paging through a diff.
const STALL_MAX: Duration = Duration::from_secs(600);

/// How long requests under way may go on after [`Server::stop`] before they are cancelled.
const GRACE: Duration = Duration::from_secs(5);

/// How long requests of clients that have gone may take until they are done or given up.
const SETTLE_MAX: Duration = Duration::from_secs(60);

/// How often progress is told, and cancellation by the server looked for.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// What carries out requests.
pub type Handler = dyn Fn(Request, &dyn Watch) -> Result<Reply> + Send + Sync;

/// What the accepting thread, the connections and `stop` share.
struct Shared {
    handler: Box<Handler>,
    connections: Mutex<HashMap<u64, UnixStream>>,
    one_ended: Condvar,
    /// Cancels whatever still runs.
    cancel_all: AtomicBool,
    /// Hangs up when the server stops: every wait includes it.
    stopping: UnixStream,
}

/// A control server at work. Dropping it without [`Server::stop`] leaves its threads to the end of the process.
pub struct Server {
    shared: Arc<Shared>,
    acceptor: JoinHandle<()>,
    stop: UnixStream,
}

impl Server {
    /// Starts to answer on `listener`.
    pub fn start(listener: UnixListener, handler: Box<Handler>) -> Result<Self> {
        let failed = |e| Error::io("starting the control server", e);
        let (stop, stopping) = UnixStream::pair().map_err(failed)?;
        // A client may hang up between poll and accept.
        listener.set_nonblocking(true).map_err(failed)?;
        let shared = Arc::new(Shared {
            handler,
            connections: Mutex::new(HashMap::new()),
            one_ended: Condvar::new(),
            cancel_all: AtomicBool::new(false),
            stopping,
        });
        let for_acceptor = Arc::clone(&shared);
        let acceptor = thread::Builder::new()
            .name("control".into())
            .spawn(move || accept_all(&for_acceptor, &listener))
            .map_err(failed)?;
        Ok(Self { shared, acceptor, stop })
    }

    /// Accepts no more, lets requests under way finish, cancels those that take longer than [`GRACE`].
    pub fn stop(self) {
        drop(self.stop);
        if self.acceptor.join().is_err() {
            tracing::error!("the thread that accepted control connections had panicked");
        }
        let shared = &self.shared;
        let mut connections = shared.connections.lock();
        if !shared.all_ended_within(&mut connections, GRACE) {
            tracing::info!(requests = connections.len(), "cancelling requests that are still under way");
            shared.cancel_all.store(true, Ordering::Relaxed);
            for stream in connections.values() {
                // Only reading ends: the client is still to be told that its request was interrupted.
                let _ = stream.shutdown(Shutdown::Read);
            }
            if !shared.all_ended_within(&mut connections, GRACE) {
                for stream in connections.values() {
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
        }
        while !connections.is_empty() {
            shared.one_ended.wait(&mut connections);
        }
    }
}

impl Shared {
    /// Waits until no connection is left whose client has gone: each ends with its last request.
    fn settled_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        let mut connections = self.connections.lock();
        while connections.values().any(has_gone) {
            if Instant::now() >= deadline || self.cancel_all.load(Ordering::Relaxed) {
                return false;
            }
            // Another client may go meanwhile without ending one.
            self.one_ended.wait_for(&mut connections, PROGRESS_INTERVAL);
        }
        true
    }

    fn all_ended_within(&self, connections: &mut MutexGuard<'_, HashMap<u64, UnixStream>>, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        while !connections.is_empty() {
            if self.one_ended.wait_until(connections, deadline).timed_out() {
                return connections.is_empty();
            }
        }
        true
    }
}

/// Whether the peer has closed the connection.
fn has_gone(stream: &UnixStream) -> bool {
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut entries = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::RDHUP)];
    matches!(poll(&mut entries, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
        && entries[0].revents().intersects(gone)
}

/// Waits until one of the sockets is readable or hung up; which ones are.
fn wait<const N: usize>(sockets: [&UnixStream; N], timeout: Duration) -> io::Result<[bool; N]> {
    let mut entries = sockets.map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(&mut entries, Some(&timeout)) {
        Ok(_) => Ok(entries.map(|entry| !entry.revents().is_empty())),
        Err(rustix::io::Errno::INTR) => Ok([false; N]),
        Err(e) => Err(e.into()),
    }
}

fn accept_all(shared: &Arc<Shared>, listener: &UnixListener) {
    let mut number = 0u64;
    loop {
        let mut entries = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(shared.stopping.as_fd(), PollFlags::IN),
        ];
        match poll(&mut entries, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                tracing::error!("waiting for control connections: {}; no more are accepted", io::Error::from(e));
                return;
            }
        }
        if !entries[1].revents().is_empty() {
            // A client that connected in time gets the answer that its request was not begun.
            while let Ok((stream, _)) = listener.accept() {
                let _ = refuse(&stream, "the server of this datastore is stopping: try again");
            }
            return;
        }
        match listener.accept() {
            Ok((stream, _)) => {
                number += 1;
                if let Err(e) = begin(shared, stream, number) {
                    tracing::warn!("a control connection could not be served: {e}");
                }
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {}
            Err(e) => {
                // Out of descriptors or memory: the connection stays in the backlog, others may end meanwhile.
                tracing::warn!("accepting a control connection: {e}");
                thread::sleep(PROGRESS_INTERVAL);
            }
        }
    }
}

/// Tells a client that it is not served.
fn refuse(mut stream: &UnixStream, sentence: &str) -> io::Result<()> {
    let line = encode(&failure(&Error::new(ErrorKind::Busy, sentence)), REPLY_LINE_MAX).map_err(io::Error::other)?;
    stream.write_all(&line)
}

/// Gives an accepted connection its thread.
fn begin(shared: &Arc<Shared>, stream: UnixStream, number: u64) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HALF_LINE_MAX))?;
    stream.set_write_timeout(Some(STALL_MAX))?;
    let place = {
        let mut connections = shared.connections.lock();
        if connections.len() >= CONNECTIONS_MAX {
            drop(connections);
            return refuse(&stream, &format!("{CONNECTIONS_MAX} commands are under way already: try again later"));
        }
        connections.insert(number, stream.try_clone()?);
        Place { shared: Arc::clone(shared), number }
    };
    let thread = thread::Builder::new().name(format!("control-{number}"));
    thread
        .spawn(move || {
            backend::local::wake_promptly();
            Connection { shared: &place.shared, stream: &stream, writing: Mutex::new(()) }.serve();
        })
        .map(drop)
}

/// A place among the connections, given back however its thread ends.
struct Place {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.connections.lock().remove(&self.number);
        self.shared.one_ended.notify_all();
    }
}

fn failure(error: &Error) -> FromServer {
    FromServer::Error(error.into())
}

/// One client.
struct Connection<'a> {
    shared: &'a Shared,
    stream: &'a UnixStream,
    /// Held while a line is written, so that lines do not mix.
    writing: Mutex<()>,
}

impl Connection<'_> {
    fn send(&self, message: &FromServer) -> Result<()> {
        let line = encode(message, REPLY_LINE_MAX)?;
        let _writing = self.writing.lock();
        let mut stream = self.stream;
        stream.write_all(&line).map_err(|e| Error::io("answering a control client", e))
    }

    /// Answers requests until the client goes, misbehaves or the server stops.
    fn serve(&self) {
        let mut lines = LineReader::new(self.stream, REQUEST_LINE_MAX);
        loop {
            if !lines.has_pending() {
                match wait([self.stream, &self.shared.stopping], IDLE_MAX) {
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
                Ok(Line::End) | Err(_) => return,
            };
            let outcome = match message {
                Ok(FromClient::Request(request)) => self.run(request, &mut lines),
                // It crossed the end of its request.
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

    /// Carries out one request while watching the connection; `Ok(false)` when the connection is of no more use.
    fn run(&self, request: Request, lines: &mut LineReader<&UnixStream>) -> Result<bool> {
        tracing::debug!(?request, "control request");
        let follower =
            Follower { connection: self, cancelled: AtomicBool::new(false), done: 0.into(), total: 0.into() };
        if request == Request::Settle && !self.shared.settled_within(SETTLE_MAX) {
            let sentence = "requests of disconnected clients are still running: try again later";
            self.send(&failure(&Error::new(ErrorKind::Busy, sentence)))?;
            return Ok(true);
        }
        if request.is_of_asking_process() {
            let sentence = "what starts, changes or tells a machine is done by the process that asks, not by the server: it cannot be a \
                            job of the server";
            self.send(&failure(&Error::new(ErrorKind::Unsupported, sentence)))?;
            return Ok(true);
        }
        let (result, usable) = match request.takes_long() {
            true => self.follow(request, &follower, lines)?,
            false => {
                let work = std::panic::AssertUnwindSafe(|| (self.shared.handler)(request, &follower));
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

    /// Carries out a long request on a thread of its own while watching the connection: its end, and whether the
    /// connection is of further use.
    fn follow(
        &self,
        request: Request,
        follower: &Follower<'_>,
        lines: &mut LineReader<&UnixStream>,
    ) -> Result<(Result<Reply>, bool)> {
        let (finished, finish) = UnixStream::pair().map_err(|e| Error::io("carrying out a control request", e))?;
        let mut usable = true;
        let result = thread::scope(|scope| {
            let worker = thread::Builder::new().name("control-work".into()).spawn_scoped(scope, || {
                // Hangs up when the work ends, also by a panic.
                let _finish = finish;
                (self.shared.handler)(request, follower)
            });
            let worker = worker.map_err(|e| Error::io("carrying out a control request", e))?;
            let mut told = (0, 0);
            loop {
                // A client that is gone would be readable for ever.
                let ready = if usable {
                    wait([&finished, self.stream], PROGRESS_INTERVAL)
                } else {
                    wait([&finished], PROGRESS_INTERVAL).map(|[ended]| [ended, false])
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

/// The error of a request that panicked.
fn failed_inside() -> Error {
    let sentence =
        "the server failed inside this request: see its log; `lamina check` shows whether the datastore is intact";
    Error::new(ErrorKind::Stopped, sentence)
}

/// What a request under way sees of its client.
struct Follower<'a> {
    connection: &'a Connection<'a>,
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
        self.cancelled.load(Ordering::Relaxed) || self.connection.shared.cancel_all.load(Ordering::Relaxed)
    }
}

impl Watch for Follower<'_> {
    fn part(&self, part: Part) -> Result<()> {
        self.connection
            .send(&FromServer::Part(part))
            .map_err(|error| Error::new(ErrorKind::Interrupted, format!("the client closed its connection: {error}")))
    }
}

#[cfg(test)]
mod tests;
