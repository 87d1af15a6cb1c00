//! What machines need of the datastore that keeps their disks.

use error::Result;
use std::collections::BTreeMap;
use std::path::PathBuf;
use work::Progress;

/// A disk, as far as machines are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its capacity in bytes.
    pub capacity: u64,
    /// The disk and snapshot that it is a linked clone of.
    pub origin: Option<(String, String)>,
    /// How many clients have it open now.
    pub clients: u64,
    /// When it was made, in seconds since 1970.
    pub created: u64,
}

/// A snapshot of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotFacts {
    /// Its name.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub created: u64,
    /// The linked clones that stand on it.
    pub clones: Vec<String>,
}

/// A datastore, as machines see it. Methods may be called from any thread.
pub trait Disks: Send + Sync {
    /// The Unix socket of its NBD server.
    ///
    /// # Errors
    /// With what to do, when it is not served.
    fn server(&self) -> Result<PathBuf>;

    /// All disks by their names.
    fn all(&self) -> Result<BTreeMap<String, Facts>>;

    /// Makes an empty disk.
    fn create(&self, disk: &str, capacity: u64) -> Result<()>;

    /// Takes snapshots of several disks at one point: (disk, snapshot). All or none.
    fn snapshot(&self, of: &[(String, String)]) -> Result<()>;

    /// The snapshots of a disk.
    fn snapshots(&self, disk: &str) -> Result<Vec<SnapshotFacts>>;

    /// Deletes a snapshot; `Busy` while clones stand on it or a client has it open.
    fn delete_snapshot(&self, disk: &str, snapshot: &str) -> Result<()>;

    /// Makes a disk as it was at a snapshot; `Busy` while a client has it open.
    fn revert(&self, disk: &str, snapshot: &str) -> Result<()>;

    /// Makes linked clones of a snapshot: all of them or none.
    fn clone_linked(&self, disk: &str, snapshot: &str, names: &[String]) -> Result<()>;

    /// Makes an independent copy of a snapshot, whole or not at all. `progress` is told bytes done and in all.
    fn clone_full(&self, disk: &str, snapshot: &str, name: &str, progress: &dyn Progress) -> Result<()>;

    /// Deletes a disk with its snapshots; `Busy` while a client has it open, or if clones stand on it and `promote`,
    /// which copies to them what they stand on, is not set.
    fn delete(&self, disk: &str, promote: bool) -> Result<()>;

    /// Waits until the requests of closed connections are done or given up: no disk appears or goes afterwards on
    /// their account.
    fn settle(&self) -> Result<()>;
}
