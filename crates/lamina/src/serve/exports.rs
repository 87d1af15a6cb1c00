//! The disks and snapshots of a datastore as exports of the NBD server.

use backend::Queue;
use control::Change;
use control::jobs::Jobs;
use disk::pace::Foreground;
use disk::{Datastore, Device};
use error::Result;
use export::exports::{ExportName, Exports};
use std::io;
use std::sync::Arc;

/// All disks and snapshots of a datastore by name.
pub struct DatastoreExports {
    /// The datastore.
    pub datastore: Arc<Datastore>,
    /// Whether writes are refused for all clients.
    pub read_only: bool,
    /// Receives the events of changes that clients make.
    pub jobs: Arc<Jobs>,
}

fn describe(name: &str) -> String {
    match name.split_once('@') {
        Some((disk, snapshot)) => format!("snapshot {snapshot} of disk {disk}"),
        None => format!("disk {name}"),
    }
}

impl Exports for DatastoreExports {
    fn names(&self) -> Vec<ExportName> {
        let names = self.datastore.device_names();
        names.into_iter().map(|name| ExportName { description: describe(&name), name }).collect()
    }

    fn open(&self, name: &str, read_only: bool) -> Result<Arc<dyn Device>> {
        self.datastore.device(name, read_only || self.read_only)
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        self.datastore.queue(depth)
    }

    fn foreground(&self) -> Option<Arc<Foreground>> {
        Some(Arc::clone(self.datastore.foreground()))
    }

    fn resized(&self, name: &str, capacity: u64) {
        self.jobs.events().publish(vec![Change::DiskResized { disk: name.to_owned(), capacity }]);
    }

    fn description(&self, name: &str) -> Option<String> {
        Some(describe(name))
    }
}
