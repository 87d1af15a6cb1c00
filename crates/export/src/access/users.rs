//! Which exports the processes of other users may open over a unix socket.
//!
//! A client cannot distinguish an export that it may not open from one that does not exist, as with the rules for TCP.
//! Unlike in those rules, a permission for a disk includes no permission for its snapshots.

use super::absent;
use crate::exports::{ExportName, Exports};
use backend::Queue;
use connections::Peer;
use disk::device::Device;
use disk::pace::Foreground;
use error::Result;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;

/// Decides which exports a user may open.
pub trait UserAccess: fmt::Debug + Send + Sync {
    /// The exports that processes of a user may open; `None` if they may open all.
    fn only(&self, user: u32) -> Option<BTreeSet<String>>;
}

/// The exports for one session of a user who may not open all of them.
pub(crate) struct Restricted {
    exports: Arc<dyn Exports>,
    access: Arc<dyn UserAccess>,
    user: u32,
}

impl Restricted {
    /// The exports for a client over a unix socket.
    pub(crate) fn of(exports: &Arc<dyn Exports>, access: &Arc<dyn UserAccess>, peer: &Peer) -> Arc<dyn Exports> {
        let user = match peer {
            Peer::Process { user, .. } => *user,
            // No machine runs as a user with this number, which the kernel uses for "no user".
            _ => u32::MAX,
        };
        match access.only(user) {
            None => Arc::clone(exports),
            Some(_) => Arc::new(Self { exports: Arc::clone(exports), access: Arc::clone(access), user }),
        }
    }
}

impl Exports for Restricted {
    fn names(&self) -> Vec<ExportName> {
        let only = self.access.only(self.user);
        let mut names = self.exports.names();
        names.retain(|export| only.as_ref().is_none_or(|only| only.contains(&export.name)));
        names
    }

    fn open(&self, name: &str, read_only: bool) -> Result<Arc<dyn Device>> {
        match self.may_open(name) {
            true => self.exports.open(name, read_only),
            false => {
                tracing::debug!(export = name, user = self.user, "no machine with this disk runs as the user");
                Err(absent(name))
            }
        }
    }

    fn may_open(&self, name: &str) -> bool {
        self.access.only(self.user).is_none_or(|only| only.contains(name))
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        self.exports.queue(depth)
    }

    fn foreground(&self) -> Option<Arc<Foreground>> {
        self.exports.foreground()
    }

    /// The owner of the datastore makes the snapshots. A user who may open only some disks cannot open snapshots, and
    /// so must not learn of them through metadata contexts either.
    fn shows_snapshots(&self) -> bool {
        self.access.only(self.user).is_none()
    }

    fn resized(&self, name: &str, capacity: u64) {
        self.exports.resized(name, capacity);
    }

    fn description(&self, name: &str) -> Option<String> {
        self.exports.description(name).filter(|_| self.may_open(name))
    }
}
