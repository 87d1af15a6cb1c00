//! Clients that are leaving: they have closed their side of the connection, and the server has not ended their sessions
//! yet. A session first finishes the requests that it has accepted, and its thread may not have run since the client
//! closed the connection.
//!
//! An operation that is refused while clients use a disk waits a short time for the end of these sessions. So a user
//! can disconnect a client and delete its disk directly afterwards. The wait has a limit, because requests may take
//! long on a slow device. A session that opens the export waits too, for the requests of clients that can write.

use super::limits::LEAVING_LOOK;
use super::{Clients, ClientsState, Session};
use std::time::{Duration, Instant};

impl Session {
    /// Whether the client has closed its side of the connection.
    fn has_left(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.peer_has_gone())
    }

    /// Whether a new session of the export has to wait for the end of this one.
    pub(super) fn is_ending(&self) -> bool {
        // A session that has to end and has not completed its handshake begins no request. A client that has left may
        // have sent requests directly before the server notes the end of the handshake. New sessions do not wait for a
        // client that can only read: it may close its side of the connection and never fetch its replies.
        self.agreed && self.retiring || !self.reads_only && self.has_left()
    }
}

impl ClientsState {
    /// Whether a session of an export that `matches` belongs to a client that has closed its side of the connection.
    fn some_leaves(&self, matches: &impl Fn(&str) -> bool) -> bool {
        self.sessions.values().any(|session| session.export.as_deref().is_some_and(matches) && session.has_left())
    }
}

impl Clients {
    /// Waits until the sessions of all clients that are leaving an export that `matches` have ended. Does not wait for
    /// clients that have not closed their connections. Returns false if one of the sessions has not ended when
    /// `patience` is over.
    pub fn wait_left(&self, matches: impl Fn(&str) -> bool, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.state.lock();
        while state.some_leaves(&matches) {
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            // The wait is limited to an interval, because another client may close its connection meanwhile.
            self.shared.left.wait_until(&mut state, deadline.min(now + LEAVING_LOOK));
        }
        true
    }
}
