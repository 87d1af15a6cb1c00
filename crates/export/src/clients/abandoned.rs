//! Connections that a client has abandoned.
//!
//! A client with several connections to an export may close one of them when the server does not answer in time, and
//! repeat its requests on another one, as the Linux kernel does. The server may still have the original requests: in
//! the socket, in the memory of the session, or under way in the device. If such a write was carried out after its
//! repetition, it could undo a later write that is acknowledged and flushed.
//!
//! 1. Before a session begins changes that may have arrived more than [`SUSPECT_AFTER`] ago, it checks that its client
//!    has not closed the connection. If it has, the session refuses the changes.
//! 2. A session begins no changes while another session of the export, whose client has closed its connection, carries
//!    out changes that may have arrived more than [`SUSPECT_AFTER`] ago.
//!
//! A session marks its changes before it checks its own connection, and a client repeats requests after it has closed
//! the connection. So either this session sees that the connection is closed, or the other session sees the mark. A
//! client that opens a new connection needs neither rule, because the new session waits for those of clients that have
//! left ([`leaving`](super::leaving)).

use super::limits::{ABANDONED_LOOK, SUSPECT_AFTER, SUSPECTS_LOOK};
use connections::Connection;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A session carries out no changes.
const IDLE: u64 = 0;
/// A session carries out changes that may have arrived at any time.
const SUSPECT: u64 = 1;
/// The least mark of a session whose changes have arrived after a known time.
const FIRST: u64 = 2;

/// The sessions that can change one export.
pub(super) struct Sharers {
    sessions: Mutex<Vec<Arc<Sharer>>>,
    /// Length of `sessions`.
    count: AtomicU64,
    /// Number of sessions with the mark [`SUSPECT`].
    suspects: AtomicU64,
    /// The marks of sessions count milliseconds since this time.
    base: Instant,
}

struct Sharer {
    connection: Option<Arc<Connection>>,
    /// [`IDLE`], [`SUSPECT`], or since when the session carries out changes.
    mark: AtomicU64,
}

impl Sharer {
    fn client_has_left(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.peer_has_gone())
    }
}

/// Whether a session may carry out changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It may. [`Sharing::end`] has to be called afterwards.
    Begin,
    /// The client has closed the connection and may have repeated the changes: they are refused.
    Refuse,
    /// The session has to end before the changes are begun. The client repeats them.
    Leave,
}

/// A session's place among those that can change the same export, until dropped.
pub struct Sharing {
    sharers: Arc<Sharers>,
    own: Arc<Sharer>,
    /// When the other sessions were last looked at.
    looked: Option<Instant>,
    /// Whether one of them carried out changes for longer than [`SUSPECT_AFTER`] then.
    suspicious: bool,
}

impl Sharers {
    pub fn new() -> Arc<Self> {
        let (count, suspects) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { sessions: Mutex::default(), count, suspects, base: Instant::now() })
    }

    /// Adds a session.
    pub fn join(self: &Arc<Self>, connection: Option<Arc<Connection>>) -> Sharing {
        let own = Arc::new(Sharer { connection, mark: AtomicU64::new(IDLE) });
        let mut sessions = self.sessions.lock();
        sessions.push(Arc::clone(&own));
        self.count.store(sessions.len() as u64, Ordering::SeqCst);
        drop(sessions);
        Sharing { sharers: Arc::clone(self), own, looked: None, suspicious: false }
    }

    fn mark_of(&self, time: Instant) -> u64 {
        FIRST + time.saturating_duration_since(self.base).as_millis() as u64
    }
}

impl Sharing {
    /// The place of a session without others.
    #[cfg(test)]
    pub fn alone() -> Self {
        Sharers::new().join(None)
    }

    /// Called when the session is about to carry out changes, which have arrived after `arrived`. Waits while an
    /// abandoned session carries out changes. `stop` says that the session has to end.
    pub fn begin(&mut self, arrived: Option<Instant>, stop: &AtomicBool) -> Turn {
        let now = Instant::now();
        let suspect = arrived.is_none_or(|arrived| now.saturating_duration_since(arrived) > SUSPECT_AFTER);
        if suspect {
            if self.own.mark.swap(SUSPECT, Ordering::SeqCst) != SUSPECT {
                self.sharers.suspects.fetch_add(1, Ordering::SeqCst);
            }
        } else {
            // Changes that wait for space have an older mark.
            let mark = self.sharers.mark_of(now);
            let _ = self.own.mark.compare_exchange(IDLE, mark, Ordering::SeqCst, Ordering::SeqCst);
        }
        if self.sharers.count.load(Ordering::SeqCst) < 2 {
            return Turn::Begin;
        }
        if suspect && self.own.client_has_left() {
            return Turn::Refuse;
        }
        let own = u64::from(self.own.mark.load(Ordering::Relaxed) == SUSPECT);
        let looked = |looked: Instant| now.saturating_duration_since(looked) <= SUSPECTS_LOOK;
        if !self.suspicious && self.looked.is_some_and(looked) && self.sharers.suspects.load(Ordering::SeqCst) == own {
            return Turn::Begin;
        }
        while self.is_abandoned_at_work() {
            if stop.load(Ordering::SeqCst) {
                return Turn::Leave;
            }
            // Two sessions whose clients have left do not wait for each other.
            if self.own.client_has_left() {
                return Turn::Refuse;
            }
            std::thread::sleep(ABANDONED_LOOK);
        }
        Turn::Begin
    }

    /// Whether another session, whose client has closed its connection, carries out changes that may be old.
    fn is_abandoned_at_work(&mut self) -> bool {
        let now = Instant::now();
        let old = self.sharers.mark_of(now).saturating_sub(SUSPECT_AFTER.as_millis() as u64);
        let mut suspicious = false;
        let abandoned = self.sharers.sessions.lock().iter().any(|other| {
            let mark = other.mark.load(Ordering::SeqCst);
            let suspect = !Arc::ptr_eq(other, &self.own) && mark != IDLE && (mark == SUSPECT || mark <= old);
            suspicious |= suspect;
            suspect && other.client_has_left()
        });
        (self.looked, self.suspicious) = (Some(now), suspicious);
        abandoned
    }

    /// Called when the session carries out no changes any more.
    pub fn end(&self) {
        if self.own.mark.swap(IDLE, Ordering::SeqCst) == SUSPECT {
            self.sharers.suspects.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Sharing {
    fn drop(&mut self) {
        self.end();
        let mut sessions = self.sharers.sessions.lock();
        sessions.retain(|other| !Arc::ptr_eq(other, &self.own));
        self.sharers.count.store(sessions.len() as u64, Ordering::SeqCst);
    }
}
