//! The age of received changes, and whether they may be carried out ([`crate::clients::abandoned`]).
//!
//! The server does not know when a request arrived in the socket. It knows that a request has arrived after the last
//! time at which the socket was empty and no part of a request was left.

use crate::clients::abandoned::{Sharing, Turn};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The changes of a session.
pub struct Changes {
    sharing: Option<Sharing>,
    /// Requests that are not taken up have arrived after this time; `None` if they may have arrived at any time.
    after: Option<Instant>,
    /// When the last receive call found the socket empty; `None` if it did not.
    emptied: Option<Instant>,
    /// As `emptied`, of the receive call before.
    emptied_before: Option<Instant>,
    /// Whether the session may be carrying out changes.
    begun: bool,
    refused: bool,
}

impl Changes {
    /// The changes of a session with this place among those that can change the export.
    pub fn new(sharing: Option<Sharing>) -> Self {
        Self { sharing, after: None, emptied: None, emptied_before: None, begun: false, refused: false }
    }

    /// Whether changes are refused, because the client has closed the connection and may have repeated them.
    pub fn refused(&self) -> bool {
        self.refused
    }

    /// Called before received requests are taken up. False if the session has to end without them.
    pub fn begin(&mut self, stop: &AtomicBool) -> bool {
        let Some(sharing) = &mut self.sharing else { return true };
        self.begun = true;
        match sharing.begin(self.after, stop) {
            Turn::Begin => true,
            Turn::Refuse => {
                if !std::mem::replace(&mut self.refused, true) {
                    tracing::info!("the client has closed the connection; changes that were not begun are refused");
                }
                true
            }
            Turn::Leave => false,
        }
    }

    /// Called when no change is under way.
    pub fn end(&mut self) {
        if let Some(sharing) = self.sharing.as_ref().filter(|_| std::mem::take(&mut self.begun)) {
            sharing.end();
        }
    }

    /// Called when bytes were received. `all` says that the socket had no more.
    pub fn note_received(&mut self, all: bool) {
        if self.sharing.is_some() {
            self.emptied_before = self.emptied;
            self.emptied = all.then(Instant::now);
        }
    }

    /// Called when the requests that arrived completely are taken up. `whole` says that there was at least one, and that
    /// none waits for room; `rest` that a part of another one is left.
    pub fn note_taken_up(&mut self, whole: bool, rest: bool) {
        match (rest, whole) {
            (false, _) => self.after = self.emptied,
            // The part that is left came with the last receive call.
            (true, true) => self.after = self.emptied_before,
            (true, false) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The time after which the requests that are not taken up have arrived, for a session that is alone.
    #[test]
    fn the_age_of_a_request_counts_from_its_first_byte() {
        let mut changes = Changes::new(Some(crate::clients::abandoned::Sharing::alone()));
        assert_eq!(changes.after, None);
        changes.note_received(true);
        let first = changes.emptied.unwrap();
        changes.note_taken_up(true, false);
        assert_eq!(changes.after, Some(first));
        // A request, and a part of the next one.
        changes.note_received(true);
        changes.note_taken_up(true, true);
        assert_eq!(changes.after, Some(first));
        // The next part of the same request, and again.
        let second = changes.emptied.unwrap();
        (0..2).for_each(|_| changes.note_received(true));
        changes.note_taken_up(false, true);
        assert_eq!(changes.after, Some(first));
        // Its end, and a part of the next one, behind which the socket has more.
        let third = changes.emptied;
        assert!(third > Some(second));
        changes.note_received(false);
        changes.note_taken_up(true, true);
        assert_eq!(changes.after, third);
        // Everything is taken up, but older bytes may be in the socket.
        changes.note_taken_up(true, false);
        assert_eq!(changes.after, None);
    }
}
