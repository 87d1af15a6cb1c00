//! Migrating a disk to another datastore, which this process opens for the migration.
//!
//! Clients that have the disk open continue to use it, so the other datastore stays open in this process until they
//! have disconnected. Meanwhile this process holds the lock of the other datastore, so no other process can serve it.
//! When this datastore is closed, the other one is closed too.

use super::run::{MigrateOptions, Peer};
use crate::datastore::{Datastore, OpenOptions, QueueChoice};
use crate::info::DiskInfo;
use crate::location::Location;
use error::{Error, ErrorKind, IoContext, Result};
use std::sync::Arc;
use std::time::Duration;
use work::Progress;

/// Memory for the other datastore's caches and buffers.
const METADATA_CACHE: usize = 64 << 20;
const WRITE_BUFFER: usize = 32 << 20;
const READ_CACHE: usize = 32 << 20;
/// Interval at which the process checks whether clients still use the other datastore.
const IDLE_POLL: Duration = Duration::from_millis(200);

impl Datastore {
    /// Migrates a disk with its snapshots and its clients to another datastore. `Busy` if another process has that
    /// datastore open.
    pub fn migrate_away(
        &self,
        name: &str,
        options: &MigrateOptions,
        to: impl Into<Location>,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        let home = self.location.as_ref().ok_or_else(|| {
            let text = "a disk can move to another datastore only from one that was opened by its location";
            Error::new(ErrorKind::Unsupported, text)
        })?;
        let (home, location) = (home.resolved()?, to.into().resolved()?);
        if home == location {
            return self.migrate(name, options, progress);
        }
        let datastore = match self.peer_datastore(&location) {
            Some(open) => open,
            None => Self::open(
                &location,
                OpenOptions {
                    mode: self.engine().options().mode,
                    queue: QueueChoice::Auto,
                    metadata_cache: METADATA_CACHE,
                    write_buffer: WRITE_BUFFER,
                    read_cache: Some(READ_CACHE),
                },
            )?,
        };
        if let Some(refuse) = self.name_refusal.get() {
            datastore.refuse_names(*refuse);
        }
        let peer = Peer { datastore, location, home };
        let outcome = self.migrate_to(name, options, Some(&peer), progress);
        let closed = self.leave(peer);
        outcome.and_then(|info| closed.map(|()| info))
    }

    /// The datastore at `location`; `None` if no client of this process uses it.
    fn peer_datastore(&self, location: &Location) -> Option<Arc<Self>> {
        let peer_datastores = self.peer_datastores.lock();
        peer_datastores.iter().find(|peer| peer.location.as_ref() == Some(location)).cloned()
    }

    /// Closes the other datastore: at once, or when the last client has disconnected.
    fn leave(&self, peer: Peer) -> Result<()> {
        let datastore = peer.datastore;
        if !datastore.switches.in_use() {
            self.peer_datastores.lock().retain(|peer| !Arc::ptr_eq(peer, &datastore));
            return datastore.close();
        }
        let mut peer_datastores = self.peer_datastores.lock();
        if peer_datastores.iter().any(|peer| Arc::ptr_eq(peer, &datastore)) {
            return Ok(());
        }
        peer_datastores.push(Arc::clone(&datastore));
        let all = Arc::clone(&self.peer_datastores);
        let watch = move || {
            loop {
                std::thread::sleep(IDLE_POLL);
                let mut peer_datastores = all.lock();
                // The check is made under the lock, so that no migration finds the datastore while it is being closed.
                let known = peer_datastores.iter().any(|peer| Arc::ptr_eq(peer, &datastore));
                if known && (datastore.switches.in_use() || Arc::strong_count(&datastore) > 2) {
                    continue;
                }
                peer_datastores.retain(|peer| !Arc::ptr_eq(peer, &datastore));
                if known && let Err(error) = datastore.close() {
                    tracing::error!("closing a datastore that clients had moved to: {error}");
                }
                return;
            }
        };
        let spawned = std::thread::Builder::new().name("away".into()).spawn(watch);
        spawned
            .map(|_| ())
            .during(|| "starting the thread that closes the other datastore when its clients have left".into())
    }
}
