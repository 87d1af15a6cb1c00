//! The list of clients: which clients have which exports open, and which disconnected clients may reconnect.
//!
//! A client that sends a disconnect request (`NBD_CMD_DISC` in NBD) no longer uses its export. A client whose
//! connection ends in another way (the client is killed, the network fails, the server stops) may reconnect and
//! continue its requests, as QEMU does with `reconnect-delay`. For the grace time, such a client still counts as a user
//! of its export: it is "in grace".
//!
//! Invariants:
//!
//! 1. A session is listed as connected from the moment its export is negotiated until the export's device is closed. If
//!    the session ends without a disconnect request, its client enters grace in the same step. So a client that may
//!    reconnect is listed at every moment.
//! 2. While a session finishes its requests although it has to end, or although its client has closed the connection or
//!    was killed, new sessions of the same export wait. So a request that a client repeats on a new connection never
//!    overtakes the original request, and no accepted write of a killed client is carried out after writes of the next
//!    client. For a client that can only read, new sessions do not wait.
//! 3. The list is stored in a [record](record), so that it survives the end of the process. A separate thread writes
//!    the record after each change: no session waits for it, and a failure to write it is only logged.
//! 4. While the process runs, the grace time is measured with the monotonic clock; between two processes, with the time
//!    of day.
//! 5. A client of a renamed disk is listed under the new name together with the name that it requested. While the
//!    client is listed, the requested name opens no other disk ([renames]).
//! 6. A request that a client repeats on another of its connections never overtakes the original request either
//!    ([abandoned]).

pub mod abandoned;
mod leaving;
pub mod limits;
pub mod record;
mod renames;
mod revoked;
mod waiting;

use abandoned::{Sharers, Sharing};
use backend::{Directory, clock};
use connections::{Connection, Peer};
use error::{Error, ErrorKind, IoContext, Result};
use limits::{CLIENT_GRACE_DEFAULT, CLIENT_GRACE_MAX, RECORD_GATHER, RECORD_RETRY, RETIRED_LOOK};
use parking_lot::{Condvar, Mutex, MutexGuard};
use record::{Gone, Record};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use waiting::{Waiting, grace_left};

/// A client of an export, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// The export.
    pub export: String,
    /// The client.
    pub peer: Peer,
    /// Remaining time for which the client counts as a user after its connection ended; `None` while it is connected.
    pub grace: Option<Duration>,
}

/// The clients whose connections are ended, so that they reconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientSelection {
    /// All clients.
    All,
    /// The connections of one process.
    Process(i32),
}

impl ClientSelection {
    /// Whether connections of the client `peer` have to end.
    pub fn matches(self, peer: &Peer) -> bool {
        match self {
            Self::All => true,
            Self::Process(wanted) => matches!(peer, Peer::Process { pid, .. } if *pid == wanted),
        }
    }
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Departure {
    /// The client sent a disconnect request.
    Farewell,
    /// The connection ended without a disconnect request.
    Lost,
    /// The server stops.
    ServerStops,
}

/// The clients of a server. Dropping this value writes the record a last time and ends the thread that writes it.
pub struct Clients {
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    grace: Duration,
    state: Mutex<ClientsState>,
    /// Signalled when a session has ended.
    left: Condvar,
    /// Signalled when the record may have to be written.
    due: Condvar,
    directory: Option<Arc<dyn Directory>>,
}

#[derive(Default)]
struct ClientsState {
    next: u64,
    sessions: BTreeMap<u64, Session>,
    gone: Vec<Waiting>,
    /// Disks for which a rename is in progress.
    moving: Vec<String>,
    /// Whether the list has changed since the record was last written.
    changed: bool,
    closing: bool,
}

/// A connection.
struct Session {
    peer: Peer,
    /// The export that the client has open or is opening, by its current name.
    export: Option<String>,
    /// The name that the client requested.
    asked: Option<String>,
    /// Whether the handshake is complete.
    agreed: bool,
    /// Whether the client can only read the export.
    reads_only: bool,
    since: u64,
    stop: Arc<AtomicBool>,
    /// The connection; `None` for a session without a connection of the server, such as one in a test.
    connection: Option<Arc<Connection>>,
    /// Whether the session has to end, so that its client reconnects.
    retiring: bool,
    /// Whether the client may no longer open the export, so that it cannot reconnect.
    revoked: bool,
    /// A client in grace with unknown identity, which may be the same client as this one. If this client sends a
    /// disconnect request, the other client returns to grace, because the two may be different clients.
    taken: Option<Waiting>,
    /// The sessions that can change the same export, once the handshake is complete; `None` if the client can only
    /// read.
    sharers: Option<Arc<Sharers>>,
}

/// A session's entry in the list, which is removed when this value is dropped.
pub struct Visit {
    shared: Arc<Shared>,
    number: u64,
    stop: Arc<AtomicBool>,
    connection: Option<Arc<Connection>>,
    departure: Departure,
}

impl Default for Clients {
    fn default() -> Self {
        Self::in_memory(CLIENT_GRACE_DEFAULT)
    }
}

impl fmt::Debug for Clients {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Clients").field("all", &self.all()).finish()
    }
}

impl Clients {
    /// A list of clients without a record.
    pub fn in_memory(grace: Duration) -> Self {
        Self::with(grace, None, ClientsState::default())
    }

    /// The list for a server that is starting: clients of the previous server are in grace, for the whole grace time.
    /// The record is not changed until [`Clients::keep_record`].
    pub fn of_server(directory: Arc<dyn Directory>, grace: Duration) -> Self {
        let (grace, now) = (grace.min(CLIENT_GRACE_MAX), clock::seconds());
        let mut state = ClientsState { changed: true, ..ClientsState::default() };
        for mut gone in record::read(&*directory).map(|record| record.clients).unwrap_or_default() {
            if gone.with_server || gone.ended.is_none() {
                gone.with_server = true;
                gone.ended = Some(now);
            }
            gone.ended = gone.ended.map(|ended| ended.min(now));
            if let Some(left) = grace_left(&gone, grace, now) {
                state.waits(gone, left);
            }
        }
        Self::with(grace, Some(directory), state)
    }

    /// Starts writing the record. A server calls this once it listens, so that a server that fails to start leaves the
    /// record unchanged.
    ///
    /// # Errors
    /// `Io` if the thread that writes the record cannot be started.
    pub fn keep_record(&self) -> Result<()> {
        let mut writer = self.writer.lock();
        if writer.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("nbd-clients".to_owned());
            let thread = thread.spawn(move || shared.keep());
            *writer = Some(thread.during(|| "starting the thread that records clients".into())?);
        }
        Ok(())
    }

    /// The clients of a datastore that is not served, from the record of the last server. If that server was killed,
    /// the grace time begins when the record is first read.
    pub fn of_record(directory: Arc<dyn Directory>) -> Self {
        let Some(Record { grace, clients }) = record::read(&*directory) else {
            return Self::in_memory(CLIENT_GRACE_DEFAULT);
        };
        let (grace, now) = (Duration::from_secs(grace).min(CLIENT_GRACE_MAX), clock::seconds());
        let mut state = ClientsState::default();
        for mut gone in clients {
            if gone.ended.is_none() {
                gone.with_server = true;
            }
            // If the recorded end of the connection is in the future because of a wrong clock, it is corrected:
            // otherwise the grace time would begin again at each call.
            if gone.ended.is_none_or(|ended| ended > now) {
                gone.ended = Some(now);
                state.changed = true;
            }
            match grace_left(&gone, grace, now) {
                // A client whose connection ended with the server stays in the list: its grace time begins again with
                // the next server.
                None if !gone.with_server => state.changed = true,
                left => state.waits(gone, left.unwrap_or_default()),
            }
        }
        let write = state.changed;
        let clients = Self::with(grace, Some(directory), state);
        if write {
            clients.shared.write_now();
        }
        clients
    }

    fn with(grace: Duration, directory: Option<Arc<dyn Directory>>, state: ClientsState) -> Self {
        let grace = grace.min(CLIENT_GRACE_MAX);
        let shared = Shared { grace, state: Mutex::new(state), left: Condvar::new(), due: Condvar::new(), directory };
        Self { shared: Arc::new(shared), writer: Mutex::new(None) }
    }

    /// Adds a session that has no connection of the server.
    pub fn arrive(&self, peer: Peer) -> Visit {
        self.enter(peer, None)
    }

    /// Adds the session of a connection.
    pub fn connected(&self, connection: Arc<Connection>) -> Visit {
        self.enter(connection.peer().clone(), Some(connection))
    }

    fn enter(&self, peer: Peer, connection: Option<Arc<Connection>>) -> Visit {
        let mut state = self.shared.state.lock();
        let number = state.next;
        state.next += 1;
        let stop = connection.as_ref().map(|connection| Arc::clone(connection.stop())).unwrap_or_default();
        let session = Session {
            peer,
            export: None,
            asked: None,
            agreed: false,
            reads_only: false,
            since: clock::seconds(),
            stop: Arc::clone(&stop),
            connection: connection.clone(),
            retiring: false,
            revoked: false,
            taken: None,
            sharers: None,
        };
        state.sessions.insert(number, session);
        Visit { shared: Arc::clone(&self.shared), number, stop, connection, departure: Departure::Lost }
    }

    /// Requests the matching sessions of an export to finish the requests that they have begun, and then to end;
    /// returns the numbers of the sessions.
    pub(super) fn retire(&self, export: &str, selection: ClientSelection) -> Vec<u64> {
        let mut state = self.shared.state.lock();
        let mut numbers = Vec::new();
        for (number, session) in &mut state.sessions {
            if selection.matches(&session.peer) && session.export.as_deref() == Some(export) {
                session.retiring = true;
                session.stop.store(true, Ordering::SeqCst);
                if let Some(connection) = &session.connection {
                    connection.finish();
                }
                numbers.push(*number);
            }
        }
        drop(state);
        self.shared.left.notify_all();
        numbers
    }

    /// Cuts the connections of the given sessions.
    pub(super) fn cut(&self, numbers: &[u64]) {
        let state = self.shared.state.lock();
        for session in numbers.iter().filter_map(|number| state.sessions.get(number)) {
            if let Some(connection) = &session.connection {
                connection.cut();
            }
        }
    }

    /// Waits until the given sessions have ended; returns the sessions that have not ended when `patience` is over.
    pub(super) fn wait_ended(&self, numbers: &[u64], patience: Duration) -> Vec<u64> {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.state.lock();
        loop {
            let left: Vec<u64> = numbers.iter().copied().filter(|number| state.sessions.contains_key(number)).collect();
            if left.is_empty() || self.shared.left.wait_until(&mut state, deadline).timed_out() {
                return left;
            }
        }
    }

    /// All clients that are connected or may reconnect, by export.
    pub fn all(&self) -> Vec<Client> {
        let now = Instant::now();
        let state = self.shared.state.lock();
        let connected = state.sessions.values().filter(|session| session.agreed).filter_map(|session| {
            Some(Client { export: session.export.clone()?, peer: session.peer.clone(), grace: None })
        });
        let gone = state.gone.iter().filter(|waiting| waiting.until > now).map(|waiting| Client {
            export: waiting.gone.export.clone(),
            peer: waiting.gone.peer.clone(),
            grace: Some(waiting.until.saturating_duration_since(now)),
        });
        let mut all: Vec<Client> = connected.chain(gone).collect();
        drop(state);
        all.sort_by(|one, two| (&one.export, one.grace).cmp(&(&two.export, two.grace)));
        all
    }

    /// Removes clients in grace whose export `matches`, because the disk was deleted.
    pub fn forget(&self, matches: impl Fn(&str) -> bool) {
        let mut state = self.shared.state.lock();
        let before = state.gone.len();
        state.gone.retain(|waiting| !matches(&waiting.gone.export));
        let forgotten = state.gone.len() < before;
        self.shared.touch(&mut state, forgotten);
        drop(state);
        self.record_unless_kept(forgotten);
    }

    /// Writes the record after a change, in a process that does not serve the datastore.
    fn record_unless_kept(&self, changed: bool) {
        if changed && self.writer.lock().is_none() {
            self.shared.write_now();
        }
    }

    /// Writes the record a last time and ends the thread that writes it.
    pub fn close(&self) {
        self.shared.state.lock().closing = true;
        self.shared.due.notify_all();
        if let Some(writer) = self.writer.lock().take()
            && writer.join().is_err()
        {
            tracing::error!("the thread that records clients had panicked");
        }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.close();
    }
}

impl ClientsState {
    fn record(&self, grace: Duration) -> Record {
        let connected = self.sessions.values().filter(|session| session.agreed).filter_map(|session| {
            Some(Gone {
                export: session.export.clone()?,
                asked: session.asked_other(),
                peer: session.peer.clone(),
                connected: session.since,
                ended: None,
                with_server: false,
            })
        });
        let gone = self.gone.iter().map(|waiting| waiting.gone.clone());
        Record { grace: grace.as_secs(), clients: gone.chain(connected).collect() }
    }
}

impl Shared {
    /// If the list has changed, wakes the thread that writes the record.
    fn touch(&self, state: &mut ClientsState, changed: bool) {
        if changed {
            state.changed = true;
            self.due.notify_all();
        }
    }

    /// Writes the record whenever the list has changed, until the list is closed.
    fn keep(&self) {
        let mut written = None;
        let mut state = self.state.lock();
        loop {
            while !state.changed && !state.closing {
                match state.gone.iter().map(|waiting| waiting.until).min() {
                    Some(until) => drop(self.due.wait_until(&mut state, until)),
                    None => self.due.wait(&mut state),
                }
                let (now, before) = (Instant::now(), state.gone.len());
                state.gone.retain(|waiting| waiting.until > now);
                state.changed |= state.gone.len() < before;
            }
            if !state.closing {
                // Changes within this time are written together, so that a client that connects only briefly causes no
                // write.
                let until = Instant::now() + RECORD_GATHER;
                while !state.closing && !self.due.wait_until(&mut state, until).timed_out() {}
            }
            let closing = state.closing;
            state.changed = false;
            let record = state.record(self.grace);
            if written.as_ref() != Some(&record) {
                let outcome = MutexGuard::unlocked(&mut state, || self.write(&record));
                if let Err(error) = &outcome {
                    tracing::warn!(
                        %error,
                        "the connected clients are not recorded: if this server is killed, their disks could be \
                         deleted before they reconnect"
                    );
                }
                if outcome.is_ok() {
                    written = Some(record);
                } else if !closing {
                    let until = Instant::now() + RECORD_RETRY;
                    while !state.closing && !self.due.wait_until(&mut state, until).timed_out() {}
                    state.changed = true;
                }
            }
            if closing {
                return;
            }
        }
    }

    /// Writes the record in a process that does not serve the datastore.
    fn write_now(&self) {
        let record = self.state.lock().record(self.grace);
        if let Err(error) = self.write(&record) {
            // The previous record is kept, and the next process reads it again.
            tracing::info!(%error, "the record of clients stays as the last server left it");
        }
    }

    /// Writes the record, or removes it if it would be empty.
    fn write(&self, record: &Record) -> Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        match record.clients.is_empty() || self.grace.is_zero() {
            true => record::remove(&**directory),
            false => record::write(&**directory, record),
        }
    }
}

impl Visit {
    /// The number of the session.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// A flag that is set when the session has to finish the requests it has begun, and then to end.
    pub fn stop(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }

    /// Logs that the session ended by an error before its client had opened an export. For a connection, the rate of
    /// these log lines is bounded.
    pub(crate) fn log_failure(&self, error: &Error) {
        match &self.connection {
            Some(connection) => connection.log_failure(error),
            None => tracing::info!(%error, "session ended in the handshake by an error"),
        }
    }

    /// Called when the client is about to open an export. Waits for those sessions of the export that have to end, or
    /// whose clients have left.
    ///
    /// # Errors
    /// `Busy` if these sessions do not end within `patience`, if this session has to end itself, or if a client of a
    /// disk that had this name before may still reconnect under it.
    pub fn chooses(&self, export: &str, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.state.lock();
        let own = self.number;
        let in_the_way = |state: &ClientsState| {
            let ends = |session: &Session| session.export.as_deref() == Some(export) && session.is_ending();
            state.sessions.iter().any(|(number, session)| *number != own && ends(session))
        };
        while in_the_way(&state) {
            let now = Instant::now();
            if now >= deadline || self.stop.load(Ordering::SeqCst) {
                let text = format!("requests of an earlier connection to '{export}' are still under way: try again");
                return Err(Error::new(ErrorKind::Busy, text));
            }
            // A server that stops only sets the flag and does not signal `left`, and a client may leave meanwhile, so
            // the wait is limited.
            self.shared.left.wait_until(&mut state, deadline.min(now + RETIRED_LOOK));
        }
        state.refuse_former_name(export)?;
        if let Some(session) = state.sessions.get_mut(&own) {
            session.export = Some(export.to_owned());
            session.asked = Some(export.to_owned());
            session.reads_only = false;
        }
        Ok(())
    }

    /// Called when the chosen export is open and the client can only read it.
    pub fn reads_only(&self) {
        if let Some(session) = self.shared.state.lock().sessions.get_mut(&self.number) {
            session.reads_only = true;
        }
    }

    /// Called when the handshake is complete: the client uses the export from now on. Returns the session's place among
    /// those that can change the export; `None` if the client can only read.
    pub fn agreed(&self, export: &str) -> Option<Sharing> {
        let mut state = self.shared.state.lock();
        let session = state.sessions.get_mut(&self.number)?;
        // The disk may have been renamed since it was opened.
        if session.asked.as_deref() != Some(export) {
            session.export = Some(export.to_owned());
            session.asked = Some(export.to_owned());
        }
        session.agreed = true;
        let (peer, named) = (session.peer.clone(), session.export.clone());
        let same_export = |other: &&Session| other.export == named;
        let known = state.sessions.values().filter(same_export).find_map(|other| other.sharers.clone());
        let taken = state.comes_back(export, &peer);
        self.shared.touch(&mut state, true);
        let session = state.sessions.get_mut(&self.number)?;
        session.taken = taken;
        session.sharers = (!session.reads_only).then(|| known.unwrap_or_else(Sharers::new));
        session.sharers.as_ref().map(|sharers| sharers.join(self.connection.clone()))
    }

    /// Called when the client has sent a disconnect request.
    pub fn says_farewell(&mut self) {
        self.departure = Departure::Farewell;
    }

    /// Marks the session as ended by the server, unless its client has sent a disconnect request.
    pub fn ends_with_server(&mut self) {
        if self.departure == Departure::Lost {
            self.departure = Departure::ServerStops;
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if self.connection.as_ref().is_some_and(|connection| connection.service_stops()) {
            self.ends_with_server();
        }
        let mut state = self.shared.state.lock();
        if let Some(session) = state.sessions.remove(&self.number).filter(|session| session.agreed) {
            let asked = session.asked_other();
            let Session { peer, export, since, taken, revoked, .. } = session;
            match (export, self.departure) {
                _ if revoked => state.gone.extend(taken),
                (_, Departure::Farewell) => state.gone.extend(taken),
                (Some(export), departure) if !self.shared.grace.is_zero() => {
                    let with_server = departure == Departure::ServerStops;
                    let ended = Some(clock::seconds());
                    let gone = Gone { export, asked, peer, connected: since, ended, with_server };
                    state.waits(gone, self.shared.grace);
                }
                _ => {}
            }
            self.shared.touch(&mut state, true);
        }
        drop(state);
        self.shared.left.notify_all();
    }
}

#[cfg(test)]
mod tests;
