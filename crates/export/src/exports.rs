//! Exports: what a client can choose to open, whatever the protocol, and what it may do with it.

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
