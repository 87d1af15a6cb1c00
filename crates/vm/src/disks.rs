//! The interface of this crate to the datastore in which the machines' disks are.

use crate::import::Content;
use crate::import::run::How;
use error::Result;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use work::Progress;

/// The properties of a disk that machines need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The disk's capacity in bytes.
    pub capacity: u64,
    /// The disk and snapshot of which the disk is a linked clone.
    pub origin: Option<(String, String)>,
    /// Number of clients that have the disk open.
    pub clients: u64,
    /// When the disk was created, in seconds since 1970.
    pub created: u64,
}

/// A snapshot of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotFacts {
    /// The snapshot's name.
    pub name: String,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
    /// The linked clones that are based on the snapshot.
    pub clones: Vec<String>,
}

/// A disk in an image of another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFacts {
    /// The disk's capacity in bytes.
    pub capacity: u64,
    /// Number of snapshots inside the image, which are not imported.
    pub internal_snapshots: u32,
}

/// A datastore. Methods may be called from any thread.
pub trait Disks: Send + Sync {
    /// The Unix socket of the datastore's NBD server.
    ///
    /// # Errors
    /// If the datastore is not served; the error names the command that serves it.
    fn server(&self) -> Result<PathBuf>;

    /// All disks by their names.
    fn all(&self) -> Result<BTreeMap<String, Facts>>;

    /// Creates an empty disk.
    fn create(&self, disk: &str, capacity: u64) -> Result<()>;

    /// The disk in another program's image, which is opened with its parents. `format` is the image format that the
    /// machine's description names. The image and its parents must be in the image's folder or in one of `permitted`.
    fn image(&self, path: &Path, format: Option<&str>, permitted: &[PathBuf]) -> Result<ImageFacts>;

    /// The capacity in bytes of a disk in an archive. The disk is refused if the archive's description states another
    /// capacity.
    fn member(&self, archive: &Path, member: &str) -> Result<u64>;

    /// The OVF descriptor in an archive.
    fn descriptor(&self, archive: &Path) -> Result<Vec<u8>>;

    /// Creates a disk with the content of another program's disk and with its snapshots, completely or not at all. In a
    /// live import, the server copies the content after this call. Reports copied and total bytes.
    fn import(&self, disk: &str, content: &Content, how: &How, progress: &dyn Progress) -> Result<()>;

    /// Takes snapshots of several disks at one point in time: (disk, snapshot). Either all are taken or none.
    fn snapshot(&self, of: &[(String, String)]) -> Result<()>;

    /// The snapshots of a disk.
    fn snapshots(&self, disk: &str) -> Result<Vec<SnapshotFacts>>;

    /// Deletes a snapshot; `Busy` while clones are based on the snapshot or a client has it open.
    fn delete_snapshot(&self, disk: &str, snapshot: &str) -> Result<()>;

    /// Reverts a disk to a snapshot; `Busy` while a client has the disk open.
    fn revert(&self, disk: &str, snapshot: &str) -> Result<()>;

    /// Makes linked clones of a snapshot: either all of them or none.
    fn clone_linked(&self, disk: &str, snapshot: &str, names: &[String]) -> Result<()>;

    /// Makes an independent copy of a snapshot, completely or not at all. Reports copied and total bytes.
    fn clone_full(&self, disk: &str, snapshot: &str, name: &str, progress: &dyn Progress) -> Result<()>;

    /// Deletes a disk with its snapshots. `Busy` while a client has the disk open, and if clones are based on its
    /// snapshots, unless `promote` hands these snapshots over to the clones.
    fn delete(&self, disk: &str, promote: bool) -> Result<()>;

    /// Deletes what interrupted restores of disks have left: (disk, time from which on the restore began, in seconds
    /// since 1970). Disks that exist are not affected.
    fn forget_restores(&self, disks: &[(String, u64)]) -> Result<()>;

    /// Waits until the server has finished all requests of closed connections, so that none of them creates or deletes
    /// a disk afterwards.
    fn settle(&self) -> Result<()>;
}
