//! Connections that a client has abandoned.
//!
//! A client with several connections to an export may close one of them when the server does not answer in time, and
//! repeat its requests on another one, as the Linux kernel does. The server may still have the original requests: in
//! the socket, in the memory of the session, or under way in the device. If such a write was carried out after its
//! repetition, it could undo a later write that is acknowledged and flushed.
//!
//! 1. Before a session begins changes, it checks that its client has not closed the connection. If it has, the session
//!    refuses the changes.
//! 2. A session begins no changes while another session of the export, whose client has closed its connection, carries
//!    out changes.
//!
//! A session marks that it carries out changes before it checks its own connection, and a client repeats requests after
//! it has closed the connection. So either this session sees that the connection is closed, or the other session sees
//! the mark. A client that opens a new connection needs neither rule, because the new session waits for those of
//! clients that have left ([`leaving`](super::leaving)).
//!
//! The rules hold if the server learns that a connection is closed before it gets a repetition. Over a unix socket it
//! does. Over TCP the end of a connection arrives after the data before it, and later than another connection's data if
//! packets are lost or the server's receive buffer is full.

use connections::Connection;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The sessions that can change one export.
pub(super) struct Sharers {
    sessions: Mutex<Vec<Arc<Sharer>>>,
    /// Length of `sessions`.
    count: AtomicU64,
}

struct Sharer {
    connection: Option<Arc<Connection>>,
    /// Whether the session may be carrying out changes.
    changes: AtomicBool,
}

/// Whether a session may carry out changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It may.
    Begin,
    /// Not until the session of a connection that was closed has ended its changes.
    Wait,
    /// The client has closed the connection and may have repeated the changes.
    Refuse,
}

/// A session's place among those that can change the same export, until dropped.
pub struct Sharing {
    sharers: Arc<Sharers>,
    own: Arc<Sharer>,
}

impl Sharers {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { sessions: Mutex::default(), count: AtomicU64::new(0) })
    }

    /// Adds a session.
    pub fn join(self: &Arc<Self>, connection: Option<Arc<Connection>>) -> Sharing {
        let own = Arc::new(Sharer { connection, changes: AtomicBool::new(false) });
        let mut sessions = self.sessions.lock();
        sessions.push(Arc::clone(&own));
        self.count.store(sessions.len() as u64, Ordering::SeqCst);
        drop(sessions);
        Sharing { sharers: Arc::clone(self), own }
    }
}

impl Sharing {
    /// Called when the session is about to carry out changes. [`Sharing::end`] has to be called afterwards, and also if
    /// the session has to wait: otherwise two sessions could wait for each other. `farewell` says whether the client
    /// has sent a disconnect request, and so repeats no request.
    pub fn begin(&self, farewell: impl FnOnce() -> bool) -> Turn {
        self.own.changes.store(true, Ordering::SeqCst);
        if self.sharers.count.load(Ordering::SeqCst) < 2 {
            return Turn::Begin;
        }
        let mut looked_at = vec![Arc::clone(&self.own)];
        let sessions = self.sharers.sessions.lock();
        let others = sessions.iter().filter(|other| !Arc::ptr_eq(other, &self.own));
        looked_at.extend(others.filter(|other| other.changes.load(Ordering::SeqCst)).cloned());
        drop(sessions);
        let gone = Connection::are_closed(looked_at.iter().filter_map(|one| one.connection.as_deref()));
        let own_is_known = usize::from(self.own.connection.is_some());
        if gone[..own_is_known] == [true] && !farewell() {
            Turn::Refuse
        } else if gone[own_is_known..].contains(&true) {
            Turn::Wait
        } else {
            Turn::Begin
        }
    }

    /// Called when the session carries out no changes any more.
    pub fn end(&self) {
        self.own.changes.store(false, Ordering::SeqCst);
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
