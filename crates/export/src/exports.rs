//! Exports: what a client can choose to open, whatever the protocol, when it may, and what it may do with it.

use crate::clients::Visit;
use crate::clients::limits::RETIRED_PATIENCE;
use disk::device::Device;
use disk::pace::Foreground;
use std::io;
use std::sync::Arc;

/// An export as a listing shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportName {
    /// What clients ask for: `disk`, or `disk@snapshot`.
    pub name: String,
    /// A line for people; may be empty.
    pub description: String,
}

/// Where exports come from.
pub trait Exports: Send + Sync {
    /// All of them.
    fn names(&self) -> Vec<ExportName>;

    /// Opens one by name, for as long as the device is held.
    fn open(&self, name: &str, read_only: bool) -> error::Result<Arc<dyn Device>>;

    /// A queue for the thread of one connection.
    fn queue(&self, depth: u32) -> io::Result<Box<dyn backend::Queue>>;

    /// Receives how long requests take, if background work goes by it.
    fn foreground(&self) -> Option<Arc<Foreground>> {
        None
    }

    /// The line for people about one export. Override where searching all names is slow.
    fn description(&self, name: &str) -> Option<String> {
        self.names().into_iter().find(|export| export.name == name).map(|export| export.description)
    }
}

/// What clients may do to the capacity of a disk they can write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResizePolicy {
    /// Nothing; the feature is not offered.
    Never,
    /// Make it larger.
    #[default]
    Grow,
    /// Make it larger, or smaller with loss of what lies beyond.
    Any,
}

/// Exports as one session sees them: one that is told to end its connections is opened after they have ended.
pub struct Admission<'a> {
    exports: &'a dyn Exports,
    visit: &'a Visit,
}

impl<'a> Admission<'a> {
    /// The exports for the session of that visit.
    pub fn new(exports: &'a dyn Exports, visit: &'a Visit) -> Self {
        Self { exports, visit }
    }
}

impl Exports for Admission<'_> {
    fn names(&self) -> Vec<ExportName> {
        self.exports.names()
    }

    fn open(&self, name: &str, read_only: bool) -> error::Result<Arc<dyn Device>> {
        self.visit.chooses(name, RETIRED_PATIENCE)?;
        let device = self.exports.open(name, read_only)?;
        self.visit.opened(name)?;
        Ok(device)
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn backend::Queue>> {
        self.exports.queue(depth)
    }

    fn foreground(&self) -> Option<Arc<Foreground>> {
        self.exports.foreground()
    }

    fn description(&self, name: &str) -> Option<String> {
        self.exports.description(name)
    }
}
