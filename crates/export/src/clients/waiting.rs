//! Clients in grace.
//!
//! 1. A client that is known counts once for an export and the name it asked for. Unknown clients count each.
//! 2. The list is bounded. What goes first is the oldest client of the export that has the most of them, so that lost
//!    clients of one disk take no other disk its grace.

use super::State;
use super::limits::{CLIENT_GRACE_MAX, CLIENTS_GONE_MAX};
use super::record::Gone;
use connections::Peer;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A client that may come back.
pub(super) struct Waiting {
    pub gone: Gone,
    pub until: Instant,
}

/// What is left of a grace; `None` when it is over. A clock that was set back makes no grace longer.
pub(super) fn grace_left(gone: &Gone, grace: Duration, now: u64) -> Option<Duration> {
    let passed = Duration::from_secs(gone.ended.map_or(0, |ended| now.saturating_sub(ended)));
    grace.checked_sub(passed).filter(|left| !left.is_zero())
}

impl State {
    /// Takes a client among those that may come back, for as long as is left of its grace.
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

    /// Forgets the oldest client of the export that has the most.
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
                "too many clients lost their connections: this one is not waited for any more"
            );
        }
    }

    /// A client has an export open: it is in grace no more. Of unknown clients it may be any one, which is returned.
    pub fn comes_back(&mut self, export: &str, peer: &Peer) -> Option<Waiting> {
        let same = |other: &Gone| other.export == export && other.asked.is_none();
        self.gone.retain(|other| !same(&other.gone) || !other.gone.peer.may_be(peer));
        let unknown = |other: &Waiting| same(&other.gone) && other.gone.peer == Peer::Unknown;
        let at = self.gone.iter().position(unknown).filter(|_| *peer == Peer::Unknown)?;
        Some(self.gone.remove(at))
    }
}
