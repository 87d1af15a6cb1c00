//! Flushes of one session: flushes that are submitted together share one flush of the device, and a slow flush does not
//! delay other requests.
//!
//! ```text
//!   requested ── start ── completed here, on the session's thread
//!                    └─── handed over ── flusher thread ── eventfd ── reap
//! ```
//!
//! A client with one request at a time waits only for its flush, which is completed on the session's own thread. If
//! other requests are in progress and the last flush was slow, the flush is handed over to a flusher thread, which
//! completes it. The flusher thread is started with the first such flush and ends with the session.
//!
//! 1. The ticket of a flush is always requested on the session's thread, after the requests that the flush has to
//!    cover. Either thread may complete the flush.
//! 2. At most one device flush of a session is under way; flushes requested during it share the next one.

use super::{Completion, Reply};
use disk::device::{Device, FlushTicket};
use error::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Duration of a flush from which on the flusher thread should complete the next flush if other requests wait. Handing
/// over a flush and waking up takes a tenth of this time.
const LONG: Duration = Duration::from_micros(200);

/// The flushes of a session.
pub struct Flushes<T> {
    device: Arc<dyn Device>,
    /// Requested flushes that are not started.
    asked: Vec<Asked<T>>,
    /// Flushes that the flusher thread completes.
    running: Vec<Asked<T>>,
    flusher: Option<Flusher>,
    /// Whether the flusher thread could not be started, so that the session completes every flush.
    no_flusher: bool,
    /// Duration of the last flush.
    last: Duration,
}

/// A flush request.
struct Asked<T> {
    tag: T,
    /// Arrival time, if latency is measured.
    arrived: Option<Instant>,
}

/// The flusher thread.
struct Flusher {
    tickets: Option<Sender<FlushTicket>>,
    outcomes: Receiver<(Result<()>, Duration)>,
    /// Becomes readable when an outcome is available.
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl<T> Flushes<T> {
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, asked: Vec::new(), running: Vec::new(), flusher: None, no_flusher: false, last: Duration::ZERO }
    }

    /// Number of flushes that are not completed.
    pub fn pending(&self) -> usize {
        self.asked.len() + self.running.len()
    }

    /// Whether the flusher thread has a flush to complete.
    pub fn running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Whether a flush has to be started.
    pub fn wanted(&self) -> bool {
        !self.asked.is_empty() && self.running.is_empty()
    }

    /// Adds a flush request.
    pub fn ask(&mut self, tag: T, arrived: Option<Instant>) {
        self.asked.push(Asked { tag, arrived });
    }

    /// Starts one device flush for all requested ones; true if it was completed on this thread and was slow.
    pub fn start(&mut self, beside_others: bool, completions: &mut VecDeque<Completion<T>>) -> bool {
        let began = Instant::now();
        let Some(done) = self.carry_out(beside_others) else { return false };
        self.last = began.elapsed();
        complete(self.asked.drain(..), done, completions);
        self.last >= LONG
    }

    /// The outcome of the device flush; `None` if the flush was passed to the flusher thread.
    fn carry_out(&mut self, beside_others: bool) -> Option<Result<()>> {
        let mut ticket = match self.device.begin_flush() {
            Ok(ticket) => ticket,
            Err(error) => return Some(Err(error)),
        };
        if beside_others && self.last >= LONG {
            ticket = self.hand_over(ticket)?;
        }
        Some(self.device.finish_flush(ticket))
    }

    /// Passes the ticket to the flusher thread, or returns the ticket if there is no such thread.
    fn hand_over(&mut self, ticket: FlushTicket) -> Option<FlushTicket> {
        if self.flusher.is_none() && !self.no_flusher {
            match Flusher::start(Arc::clone(&self.device)) {
                Ok(flusher) => self.flusher = Some(flusher),
                Err(error) => {
                    tracing::warn!(%error, "no thread for the flushes of this connection: requests wait for them");
                    self.no_flusher = true;
                }
            }
        }
        let Some(Flusher { tickets: Some(tickets), .. }) = &self.flusher else { return Some(ticket) };
        match tickets.send(ticket) {
            Ok(()) => {
                std::mem::swap(&mut self.asked, &mut self.running);
                None
            }
            Err(back) => Some(back.0),
        }
    }

    /// Adds to `completions` the outcome of a flush that was handed over, if it is available. `served` is called with
    /// the arrival time of each request.
    pub fn reap(&mut self, completions: &mut VecDeque<Completion<T>>, served: impl Fn(Option<Instant>)) {
        let Some(flusher) = self.flusher.as_ref().filter(|_| !self.running.is_empty()) else { return };
        let (done, took) = match flusher.outcomes.try_recv() {
            Ok(outcome) => outcome,
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => {
                let text = format!("{}: the thread that completes flushes has ended", self.device.name());
                (Err(Error::new(ErrorKind::Io, text)), self.last)
            }
        };
        self.last = took;
        self.running.iter().for_each(|asked| served(asked.arrived));
        complete(self.running.drain(..), done, completions);
    }

    /// Becomes readable when a flush that was handed over has completed; `None` if there is none.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.flusher.as_ref().filter(|_| self.running()).map(|flusher| flusher.wake.as_raw_fd())
    }

    /// Resets the descriptor after it was found readable.
    pub fn clear_wake(&self) {
        if let Some(flusher) = &self.flusher {
            // There may be nothing to read: the thread signals the descriptor only after it has sent the outcome.
            let _ = rustix::io::read(&*flusher.wake, &mut [0; 8]);
        }
    }

    /// Waits until the flush that was handed over, if any, has completed, until `socket` is readable (true), or until
    /// `timeout` is over.
    pub fn wait(&self, socket: Option<BorrowedFd<'_>>, timeout: Option<Duration>) -> io::Result<bool> {
        let flusher = self.flusher.as_ref().filter(|_| self.running());
        if flusher.is_none() && timeout.is_none() {
            return Ok(false);
        }
        let mut watched = Vec::with_capacity(2);
        watched.extend(socket.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)));
        watched.extend(flusher.map(|flusher| PollFd::from_borrowed_fd(flusher.wake.as_fd(), PollFlags::IN)));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        loop {
            match poll(&mut watched, timeout.as_ref()) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let readable = |at: usize| watched.get(at).is_some_and(|one| !one.revents().is_empty());
        let (by_socket, by_flush) = match socket {
            Some(_) => (readable(0), readable(1)),
            None => (false, readable(0)),
        };
        if by_flush {
            self.clear_wake();
        }
        Ok(by_socket)
    }
}

fn complete<T>(asked: impl Iterator<Item = Asked<T>>, done: Result<()>, completions: &mut VecDeque<Completion<T>>) {
    for Asked { tag, .. } in asked {
        let outcome = done.as_ref().map(|()| Reply::Done).map_err(Error::repeated);
        completions.push_back(Completion { tag, outcome });
    }
}

impl Flusher {
    fn start(device: Arc<dyn Device>) -> io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (tickets, handed) = channel::<FlushTicket>();
        let (done, outcomes) = channel();
        let (bell, span) = (Arc::clone(&wake), tracing::Span::current());
        let thread = std::thread::Builder::new().name("flusher".to_owned()).spawn(move || {
            let _entered = span.enter();
            // Signals the descriptor when the thread ends, also by a panic, after the channel of outcomes is closed.
            let _last = Ring(&bell);
            let done = done;
            for ticket in handed {
                let began = Instant::now();
                let outcome = device.finish_flush(ticket);
                if done.send((outcome, began.elapsed())).is_err() {
                    return;
                }
                drop(Ring(&bell));
            }
        })?;
        Ok(Self { tickets: Some(tickets), outcomes, wake, thread: Some(thread) })
    }
}

/// Makes the descriptor readable when it is dropped.
struct Ring<'a>(&'a OwnedFd);

impl Drop for Ring<'_> {
    fn drop(&mut self) {
        let _ = rustix::io::write(self.0, &1u64.to_ne_bytes());
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.tickets = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for the flushes of a connection has panicked");
        }
    }
}
