//! What machines need of whoever keeps their disks.

use backend::Result;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A disk, as far as machines are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its capacity in bytes.
    pub capacity: u64,
    /// The disk and snapshot that it is a linked clone of.
    pub origin: Option<(String, String)>,
    /// Who has it open now.
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

    /// Deletes a snapshot; `Busy` while clones stand on it or somebody reads it.
    fn delete_snapshot(&self, disk: &str, snapshot: &str) -> Result<()>;

    /// Makes a disk that nobody uses as it was at a snapshot.
    fn revert(&self, disk: &str, snapshot: &str) -> Result<()>;

    /// Makes linked clones of a snapshot: all of them or none.
    fn clone_linked(&self, disk: &str, snapshot: &str, names: &[String]) -> Result<()>;

    /// Makes an independent copy of a snapshot, whole or not at all. `progress` is told bytes done and in all, and
    /// answers whether to go on.
    fn clone_full(
        &self,
        disk: &str,
        snapshot: &str,
        name: &str,
        progress: &(dyn Fn(u64, u64) -> bool + Sync),
    ) -> Result<()>;

    /// Deletes a disk with its snapshots; `Busy` when somebody uses it, or clones stand on it and are not to be given
    /// what they stand on.
    fn delete(&self, disk: &str, promote: bool) -> Result<()>;

    /// Waits until what was asked by those who have gone meanwhile is done or given up: what is there afterwards, is
    /// all there is.
    fn settle(&self) -> Result<()>;
}
