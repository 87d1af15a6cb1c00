//! Clients in grace.
//!
//! 1. A known client has one entry per export and requested name. Each unknown client has its own entry.
//! 2. The list is bounded. The oldest client of the export with the most entries is removed first, so that lost clients
//!    of one disk do not end the grace of clients of other disks.

use super::ClientsState;
use super::limits::{CLIENT_GRACE_MAX, CLIENTS_GONE_MAX};
use super::record::Gone;
use connections::Peer;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A client in grace.
pub(super) struct Waiting {
    pub gone: Gone,
    pub until: Instant,
}

/// Remaining grace time; `None` if it is over. A clock that was set back does not extend the grace time.
pub(super) fn grace_left(gone: &Gone, grace: Duration, now: u64) -> Option<Duration> {
    let passed = Duration::from_secs(gone.ended.map_or(0, |ended| now.saturating_sub(ended)));
    grace.checked_sub(passed).filter(|left| !left.is_zero())
}

impl ClientsState {
    /// Adds a client in grace for its remaining time.
    pub fn waits(&mut self, gone: Gone, left: Duration) {
        let same = |other: &Gone| other.export == gone.export && other.asked == gone.asked;
        self.gone.retain(|other| !same(&other.gone) || !other.gone.peer.may_be(&gone.peer));
        while self.gone.len() >= CLIENTS_GONE_MAX {
            self.forget_one();
        }
        let now = Instant::now();
        let until = now.checked_add(left.min(CLIENT_GRACE_MAX)).unwrap_or(now);
        self.gone.push(Waiting { gone, until });
    }

    /// Removes the oldest client of the export with the most entries.
    fn forget_one(&mut self) {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for waiting in &self.gone {
            *counts.entry(&waiting.gone.export).or_default() += 1;
        }
        let most = counts.values().copied().max();
        let oldest = self.gone.iter().position(|waiting| counts.get(waiting.gone.export.as_str()).copied() == most);
        if let Some(at) = oldest {
            let Gone { export, peer, .. } = self.gone.remove(at).gone;
            tracing::warn!(
                export, client = %peer, limit = CLIENTS_GONE_MAX,
                "too many clients are in grace: the grace of this client has ended"
            );
        }
    }

    /// Ends the grace of a client that has opened an export, and returns its entry. If the client's identity is
    /// unknown, returns any entry whose client is also unknown.
    pub fn comes_back(&mut self, export: &str, peer: &Peer) -> Option<Waiting> {
        let same = |other: &Gone| other.export == export && other.asked.is_none();
        self.gone.retain(|other| !same(&other.gone) || !other.gone.peer.may_be(peer));
        let unknown = |other: &Waiting| same(&other.gone) && other.gone.peer == Peer::Unknown;
        let at = self.gone.iter().position(unknown).filter(|_| *peer == Peer::Unknown)?;
        Some(self.gone.remove(at))
    }
}
