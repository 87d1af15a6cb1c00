//! Clients that are leaving: a client has closed its side of the connection, and the server has not ended the session
//! yet. The session first finishes the requests that were accepted, and its thread may not have run since.
//!
//! An operation that is refused while clients use a disk waits a short time for these sessions. So a user can
//! disconnect a client and delete its disk at once. The wait has a limit, because requests may take long on a slow
//! device.

use super::limits::LEAVING_LOOK;
use super::{Clients, State};
use std::time::{Duration, Instant};

impl State {
    /// Whether a session of an export that `matches` belongs to a client that has closed its side of the connection.
    fn some_leaves(&self, matches: &impl Fn(&str) -> bool) -> bool {
        self.sessions.values().any(|session| {
            session.export.as_deref().is_some_and(matches)
                && session.connection.as_ref().is_some_and(|connection| connection.peer_has_gone())
        })
    }
}

impl Clients {
    /// Waits until the sessions of all clients that are leaving an export that `matches` have ended. Does not wait for
    /// other clients. Returns false if a session is left when `patience` is over.
    pub fn wait_left(&self, matches: impl Fn(&str) -> bool, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.state.lock();
        while state.some_leaves(&matches) {
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            // Wakes up at intervals, because another client may leave meanwhile.
            self.shared.left.wait_until(&mut state, deadline.min(now + LEAVING_LOOK));
        }
        true
    }
}
