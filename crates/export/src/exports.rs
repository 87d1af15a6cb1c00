//! The interface to exports: which ones clients can open over any protocol, and with which permissions.

use crate::access::absent;
use crate::clients::Visit;
use crate::clients::limits::RETIRED_PATIENCE;
use disk::device::Device;
use disk::pace::Foreground;
use std::io;
use std::sync::Arc;

/// An entry of a list of exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportName {
    /// The name that clients request: `disk` or `disk@snapshot`.
    pub name: String,
    /// Description for users; may be empty.
    pub description: String,
}

/// The source of exports.
pub trait Exports: Send + Sync {
    /// The names of all exports.
    fn names(&self) -> Vec<ExportName>;

    /// Opens an export by name. The export is open until the device is dropped.
    fn open(&self, name: &str, read_only: bool) -> error::Result<Arc<dyn Device>>;

    /// Whether the client may open an export with that name, which need not exist.
    fn may_open(&self, _name: &str) -> bool {
        true
    }

    /// Whether an export that the client has opened under that name in the handshake still has the name, and the client
    /// may still open it.
    fn still(&self, _name: &str) -> bool {
        true
    }

    /// A queue for the thread of one connection.
    fn queue(&self, depth: u32) -> io::Result<Box<dyn backend::Queue>>;

    /// The receiver of request latencies, if background work is paced by them.
    fn foreground(&self) -> Option<Arc<Foreground>> {
        None
    }

    /// Whether the client may learn of the snapshots of a disk that it may open: of their names, and of what changed
    /// since each of them.
    fn shows_snapshots(&self) -> bool {
        true
    }

    /// Called when a client has resized an export, which had that name when the client opened it.
    fn resized(&self, _name: &str, _capacity: u64) {}

    /// The description of one export. Implementations that list all names slowly should override it.
    fn description(&self, name: &str) -> Option<String> {
        self.names().into_iter().find(|export| export.name == name).map(|export| export.description)
    }
}

/// Whether clients may change the capacity of a writable disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResizePolicy {
    /// Clients may not resize, and the server does not offer the feature.
    Never,
    /// Clients may grow the export.
    #[default]
    Grow,
    /// Clients may grow the export, or shrink it and lose the data at its end.
    Any,
}

/// The exports for one session. If sessions of an export are ending, opening the export waits for their end.
pub struct Admission<'a> {
    exports: &'a dyn Exports,
    visit: &'a Visit,
}

impl<'a> Admission<'a> {
    /// The exports for the session of `visit`.
    pub fn new(exports: &'a dyn Exports, visit: &'a Visit) -> Self {
        Self { exports, visit }
    }
}

impl Exports for Admission<'_> {
    fn names(&self) -> Vec<ExportName> {
        self.exports.names()
    }

    fn open(&self, name: &str, read_only: bool) -> error::Result<Arc<dyn Device>> {
        // Checked first: the list of clients has reasons to refuse a name that name other exports and clients.
        if !self.may_open(name) {
            tracing::debug!(export = name, "the client may not open the export");
            return Err(absent(name));
        }
        self.visit.chooses(name, RETIRED_PATIENCE)?;
        let device = self.exports.open(name, read_only)?;
        self.visit.opened(name)?;
        if device.read_only() {
            self.visit.reads_only();
        }
        Ok(device)
    }

    fn may_open(&self, name: &str) -> bool {
        self.exports.may_open(name)
    }

    fn still(&self, name: &str) -> bool {
        self.may_open(name) && self.visit.opened(name).is_ok()
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn backend::Queue>> {
        self.exports.queue(depth)
    }

    fn foreground(&self) -> Option<Arc<Foreground>> {
        self.exports.foreground()
    }

    fn shows_snapshots(&self) -> bool {
        self.exports.shows_snapshots()
    }

    fn resized(&self, name: &str, capacity: u64) {
        // The disk may have been renamed since.
        self.exports.resized(self.visit.export().as_deref().unwrap_or(name), capacity);
    }

    fn description(&self, name: &str) -> Option<String> {
        self.exports.description(name)
    }
}
