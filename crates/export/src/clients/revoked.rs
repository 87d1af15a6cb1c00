//! Clients that lose the permission for the export that they have open.
//!
//! 1. The connection of a session without permission is cut at once: its client receives no further reply, not even to
//!    requests in progress.
//! 2. A client that may no longer open its export at all cannot reconnect, so it does not enter grace.
//! 3. A client that may still read the export can reconnect. Its new session waits until the old session has ended, as
//!    after a resize.

use super::{Clients, Visit};
use crate::access::Lost;
use std::sync::atomic::Ordering;

impl Clients {
    /// The current name of the export that a session has open.
    pub(crate) fn export_of(&self, number: u64) -> Option<String> {
        self.shared.state.lock().sessions.get(&number)?.export.clone()
    }

    /// Cuts the connections of the given sessions; returns the numbers of the sessions.
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
    /// The current name of the export that the session has open or is opening.
    pub(crate) fn export(&self) -> Option<String> {
        self.shared.state.lock().sessions.get(&self.number)?.export.clone()
    }

    /// Called when the client may no longer open its export.
    pub(crate) fn loses_access(&self) {
        if let Some(session) = self.shared.state.lock().sessions.get_mut(&self.number) {
            session.revoked = true;
        }
    }
}
