//! Sessions: the control connection of a sender, from its first message until the disks are complete.
//!
//! 1. A session lasts as long as its control connection. When that connection ends, the session's data connections are
//!    cut and the received data is recorded. Only after that can another session use the reception.
//! 2. An error of a data connection is reported in the reply to the next request on the control connection.
//! 3. Before the disks become visible, the session's data connections have ended, and no further one can join.
//! 4. The disks have arrived only when the machine that they are sent with is complete. Until then, an offer of the
//!    same disks waits for this session, also if its control connection is broken.
//! 5. The token that authenticates data connections is random, and is sent on the control connection only.

use super::{Attachments, taking};
use crate::limits::{LEAVE_MAX, SAVE_BYTES, SAVE_INTERVAL, SILENCE_MAX, STREAMS_MAX, TAKEOVER_MAX, WORKING_INTERVAL};
use crate::message::{Known, Message, Offer, VERSIONS};
use crate::stream::{ByteStream, Conversation};
use connections::Connection;
use connections::limits::HANDSHAKE_TIMEOUT_DEFAULT;
use disk::Datastore;
use disk::transfer::{Incoming, NewReception, Opened, Reception};
use error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Interval of checks whether an earlier session has ended, and whether received data has to be recorded.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The sessions of a receiver.
pub struct Sessions {
    datastore: Arc<Datastore>,
    attachments: Arc<dyn Attachments>,
    open: Mutex<BTreeMap<String, Arc<Session>>>,
}

/// One session.
pub(super) struct Session {
    token: String,
    pub(super) reception: Arc<Reception>,
    /// The error that ended the session.
    failed: Mutex<Option<Message>>,
    /// Set when the sender reports the end or the session ends, so that no data connection can join.
    ended: AtomicBool,
    /// Data connections.
    streams: Mutex<Vec<Option<Arc<Connection>>>>,
    left: Condvar,
    /// The control connection.
    control: Option<Arc<Connection>>,
    /// Bytes of data received.
    pub(super) bytes: AtomicU64,
    saved: AtomicU64,
}

impl Session {
    pub(super) fn fail(&self, error: &Error) {
        self.failed.lock().get_or_insert_with(|| Message::failure(error));
    }

    /// Cuts all connections of the session. The threads of these connections detect the cut by themselves.
    fn cut(&self) {
        let streams = self.streams.lock();
        for socket in streams.iter().flatten().chain(&self.control) {
            socket.cut();
        }
    }

    /// Ends the session, and returns when no thread serves a data connection any more.
    fn end(&self) {
        self.ended.store(true, Ordering::Release);
        let mut streams = self.streams.lock();
        for socket in streams.iter().flatten() {
            socket.cut();
        }
        while !streams.is_empty() {
            self.left.wait(&mut streams);
        }
    }

    fn join(&self, socket: Option<Arc<Connection>>) -> Result<()> {
        let mut streams = self.streams.lock();
        if self.ended.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Io, "the session is over"));
        }
        if streams.len() >= STREAMS_MAX {
            let text = format!("a session has {STREAMS_MAX} data connections at the most");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        streams.push(socket);
        Ok(())
    }

    fn leave(&self, socket: Option<&Arc<Connection>>) {
        let mut streams = self.streams.lock();
        let same = |known: &Option<Arc<Connection>>| match (known, socket) {
            (Some(known), Some(socket)) => Arc::ptr_eq(known, socket),
            (None, None) => true,
            _ => false,
        };
        if let Some(place) = streams.iter().position(same) {
            streams.remove(place);
        }
        self.left.notify_all();
    }

    /// Refuses further data connections, and waits until all have ended, as they do after everything was sent. Returns
    /// the number that have not ended.
    fn wait_left(&self) -> usize {
        let deadline = Instant::now() + LEAVE_MAX;
        let mut streams = self.streams.lock();
        self.ended.store(true, Ordering::Release);
        while !streams.is_empty() && !self.left.wait_until(&mut streams, deadline).timed_out() {}
        streams.len()
    }

    /// Records received data at intervals, until `over` is closed.
    fn keep_record(&self, over: &mpsc::Receiver<()>) {
        let mut last = Instant::now();
        while let Err(mpsc::RecvTimeoutError::Timeout) = over.recv_timeout(LOOK_INTERVAL) {
            let bytes = self.bytes.load(Ordering::Relaxed);
            let new = bytes - self.saved.load(Ordering::Relaxed);
            if new >= SAVE_BYTES || new > 0 && last.elapsed() >= SAVE_INTERVAL {
                if let Err(error) = self.reception.save() {
                    self.fail(&error);
                    return;
                }
                self.saved.store(bytes, Ordering::Relaxed);
                last = Instant::now();
            }
        }
    }
}

impl Sessions {
    /// No sessions yet.
    pub fn new(datastore: Arc<Datastore>, attachments: Arc<dyn Attachments>) -> Self {
        Self { datastore, attachments, open: Mutex::default() }
    }

    /// Opens the reception for an offer. An open session with the same disks belongs to a stale connection of the same
    /// sender, so its connections are cut.
    fn open(&self, offer: Offer, sender: String) -> Result<Opened> {
        let names: Vec<String> = offer.disks.iter().map(|disk| disk.name.clone()).collect();
        self.attachments.check_names(&names)?;
        let new =
            NewReception { sender, disks: offer.disks, attachment: offer.attachment, resume_only: offer.resume_only };
        let checked = || new.attachment.as_ref().map_or(Ok(()), |text| self.attachments.check(text, &names));
        let open = || match checked() {
            Ok(()) => self.datastore.receive(&new),
            // If the machine exists, an earlier session may have completed it, and the sender has not received the
            // reply to that session's commit.
            Err(error) if error.kind() == ErrorKind::Exists => match self.datastore.arrived_already(&new)? {
                Some(already) => Ok(Opened::Already(already)),
                // The machine may be one that a failed session has removed meanwhile.
                None => checked().and_then(|()| self.datastore.receive(&new)),
            },
            Err(error) => Err(error),
        };
        let deadline = Instant::now() + TAKEOVER_MAX;
        loop {
            match open() {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                    let open: Vec<Arc<Session>> = self.open.lock().values().cloned().collect();
                    let same = |session: &&Arc<Session>| session.reception.disk_names() == names;
                    open.iter().filter(same).for_each(|session| session.cut());
                    drop(open);
                    std::thread::sleep(LOOK_INTERVAL);
                }
                opened => return opened,
            }
        }
    }
}

/// Serves one connection over any stream, for tests and fuzzing.
pub fn converse<S: ByteStream>(sessions: &Sessions, stream: S, peer: String) -> Result<()> {
    serve(sessions, stream, None, peer, &|_| Ok(()))
}

/// Serves one connection.
pub(super) fn serve<S: ByteStream>(
    sessions: &Sessions,
    stream: S,
    socket: Option<&Arc<Connection>>,
    peer: String,
    admitted: &dyn Fn(&S) -> Result<()>,
) -> Result<()> {
    let mut line = Conversation::new(stream, peer);
    line.set_deadline(Some(Instant::now() + HANDSHAKE_TIMEOUT_DEFAULT))?;
    let first = match line.hear() {
        Ok(first) => first,
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            // TLS is established, so the peer gets the reason, as far as it may use this server.
            let error = admitted(&line.stream).err().unwrap_or(error);
            let _ = line.tell(&Message::failure(&error));
            return Err(error);
        }
        Err(error) => return Err(error),
    };
    let begun = || {
        admitted(&line.stream)?;
        let Message::Hello { versions, program } = first else { return Err(first.clone().into_error()) };
        let version = VERSIONS.into_iter().find(|version| versions.contains(version)).ok_or_else(|| {
            let text = format!(
                "this server supports versions {VERSIONS:?} of the protocol, '{program}' supports {versions:?}"
            );
            Error::new(ErrorKind::Unsupported, text)
        })?;
        line.establish();
        line.tell(&Message::Welcome { version, program: concat!("lamina ", env!("CARGO_PKG_VERSION")).to_owned() })?;
        line.hear().map(|second| (second, program))
    };
    let outcome = match begun() {
        Ok((Message::Offer(offer), program)) => receive(sessions, &mut line, socket, offer, &program),
        Ok((Message::Join { session, token }, _)) => {
            return join(sessions, &mut line, socket, &session, &token);
        }
        Ok((other, _)) => Err(other.into_error()),
        Err(error) => Err(error),
    };
    if let Err(error) = &outcome {
        // Sending fails if the sender has disconnected. The error is returned in any case.
        let _ = line.tell(&Message::failure(error));
    }
    outcome
}

/// Runs long work, and sends keep-alives meanwhile.
fn work<S: ByteStream, T: Send>(line: &mut Conversation<S>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let (done, answer) = mpsc::channel();
        let spawned = std::thread::Builder::new().name("receive-work".to_owned()).spawn_scoped(scope, move || {
            // Sending the result fails if the connection is broken. The work was done nevertheless.
            let _ = done.send(work());
        });
        spawned.map_err(|error| Error::io("starting a thread to receive", error))?;
        loop {
            match answer.recv_timeout(WORKING_INTERVAL) {
                Ok(outcome) => return outcome,
                Err(mpsc::RecvTimeoutError::Timeout) => line.tell(&Message::Working)?,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(ErrorKind::Io, "the server failed inside this request: see its log"));
                }
            }
        }
    })
}

fn token() -> Result<String> {
    let bytes: [u8; 16] = backend::random::bytes()?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Serves the control connection of a sender.
fn receive<S: ByteStream>(
    sessions: &Sessions,
    line: &mut Conversation<S>,
    socket: Option<&Arc<Connection>>,
    offer: Offer,
    program: &str,
) -> Result<()> {
    let sender = format!("{program} at {}", line.peer());
    let reception = match work(line, || sessions.open(offer, sender))? {
        Opened::Open(reception) => reception,
        Opened::Already(disks) => {
            return line.tell(&Message::Already { disks: disks.into_iter().map(|disk| disk.name).collect() });
        }
    };
    let id = reception.id();
    let known = |disk: Incoming| Known { base: disk.base, done: disk.done, bytes: disk.bytes };
    let disks = reception.progress().into_iter().map(known).collect();
    let session = Arc::new(Session {
        token: token()?,
        reception,
        failed: Mutex::new(None),
        ended: AtomicBool::new(false),
        streams: Mutex::default(),
        left: Condvar::new(),
        control: socket.cloned(),
        bytes: AtomicU64::new(0),
        saved: AtomicU64::new(0),
    });
    sessions.open.lock().insert(id.clone(), Arc::clone(&session));
    tracing::info!(disks = ?session.reception.disk_names(), program, "receiving");
    let accept = Message::Accept { session: id.clone(), token: session.token.clone(), disks };
    let ended = std::thread::scope(|scope| {
        let (going, over) = mpsc::channel();
        let session = &session;
        let keeper = std::thread::Builder::new().name("receive-record".to_owned());
        let keeper = keeper.spawn_scoped(scope, move || session.keep_record(&over));
        let ended = match keeper {
            Ok(_) => line.tell(&accept).and_then(|()| control(sessions, session, line)),
            Err(error) => Err(Error::io("starting a thread to receive", error)),
        };
        drop(going);
        ended
    });
    session.end();
    let committed = matches!(ended, Ok(true));
    if !committed && let Err(error) = session.reception.save() {
        tracing::error!("the last received data is not recorded: {error}");
    }
    sessions.open.lock().remove(&id);
    tracing::info!(bytes = session.bytes.load(Ordering::Relaxed), committed, "sender left");
    ended.map(drop)
}

/// Answers requests of a sender until the disks are complete (true) or it disconnects (false).
fn control<S: ByteStream>(sessions: &Sessions, session: &Session, line: &mut Conversation<S>) -> Result<bool> {
    loop {
        line.set_deadline(Some(Instant::now() + SILENCE_MAX))?;
        let question = line.hear()?;
        if let Some(failure) = session.failed.lock().take() {
            return Err(failure.into_error());
        }
        match question {
            Message::Ping => line.tell(&Message::Pong { bytes: session.bytes.load(Ordering::Relaxed) })?,
            Message::Finish { disks } => {
                let names = work(line, || commit(sessions, session, &disks))?;
                line.tell(&Message::Committed { disks: names })?;
                return Ok(true);
            }
            other => return Err(other.into_error()),
        }
    }
}

fn commit(sessions: &Sessions, session: &Session, expected: &[(u64, u64)]) -> Result<Vec<String>> {
    let at_work = session.wait_left();
    if at_work > 0 {
        let text = format!("the sender reports the end, but {at_work} connections still send");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let reception = &session.reception;
    sessions.attachments.check_names(&reception.disk_names())?;
    let making = match reception.attachment() {
        Some(text) => Some(sessions.attachments.begin(&text, &reception.disk_names())?),
        None => None,
    };
    let disks = reception.commit(expected)?;
    if let Some(making) = making {
        making.finish()?;
    }
    reception.complete()?;
    let names: Vec<String> = disks.into_iter().map(|disk| disk.name).collect();
    sessions.attachments.arrived(&names);
    Ok(names)
}

/// Serves a data connection.
fn join<S: ByteStream>(
    sessions: &Sessions,
    line: &mut Conversation<S>,
    socket: Option<&Arc<Connection>>,
    id: &str,
    token: &str,
) -> Result<()> {
    let session = sessions.open.lock().get(id).cloned();
    let same = |session: &Arc<Session>| {
        let (a, b) = (session.token.as_bytes(), token.as_bytes());
        // The comparison takes constant time, so that its duration does not reveal which bytes of the token are
        // correct.
        a.len() == b.len() && a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
    };
    let joined = session
        .filter(same)
        .ok_or_else(|| Error::new(ErrorKind::Io, "there is no such session any more"))
        .and_then(|session| session.join(socket.cloned()).map(|()| session));
    let session = match joined {
        Ok(session) => session,
        Err(error) => {
            let _ = line.tell(&Message::failure(&error));
            return Err(error);
        }
    };
    let _left = Leaving { session: &session, socket };
    let taken = line
        .tell(&Message::Joined)
        .and_then(|()| line.set_deadline(None))
        .and_then(|()| taking::take(&session.reception, line, &session.bytes));
    if let Err(error) = &taken {
        session.fail(error);
        let _ = line.tell(&Message::failure(error));
    }
    taken
}

/// Removes a data connection from its session when its thread ends, also by a panic.
struct Leaving<'a> {
    session: &'a Session,
    socket: Option<&'a Arc<Connection>>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.session.leave(self.socket);
    }
}
