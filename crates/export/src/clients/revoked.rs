//! Clients that lose the right to what they have open.
//!
//! 1. A session without its right is cut at once: its client gets no further reply, also not to requests under way.
//! 2. A client that may open nothing of its export any more cannot come back, so it enters no grace.
//! 3. A client that may still read reconnects. Its new session waits until the old one has ended, as after a resize.

use super::{Clients, Visit};
use crate::access::Lost;
use std::sync::atomic::Ordering;

impl Clients {
    /// The present name of the export that a session has open.
    pub(crate) fn export_of(&self, number: u64) -> Option<String> {
        self.shared.state.lock().sessions.get(&number)?.export.clone()
    }

    /// Cuts the connections of these sessions; returns their numbers.
    pub(crate) fn revoke(&self, lost: &[Lost]) -> Vec<u64> {
        let mut state = self.shared.state.lock();
        for one in lost {
            let Some(session) = state.sessions.get_mut(&one.number) else { continue };
            session.retiring = one.left.is_some();
            session.revoked = one.left.is_none();
            session.stop.store(true, Ordering::SeqCst);
            if let Some(connection) = &session.connection {
                connection.cut();
            }
        }
        drop(state);
        self.shared.left.notify_all();
        lost.iter().map(|one| one.number).collect()
    }
}

impl Visit {
    /// The client may not open its export any more.
    pub(crate) fn loses_access(&self) {
        if let Some(session) = self.shared.state.lock().sessions.get_mut(&self.number) {
            session.revoked = true;
        }
    }
}
