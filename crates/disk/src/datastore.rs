//! A datastore: its disks, their snapshots and clones, and everything that can be done to them.

use crate::device::Device;
use crate::info::*;
use crate::progress::Progress;
use std::path::Path;
use std::sync::Arc;
use store::{Error, ErrorKind, Result};

/// How a datastore is made.
#[derive(Clone, Copy, Debug)]
pub struct InitOptions {
    /// Size of the journal ring in bytes, a multiple of 4 KiB from 4 MiB to 4 GiB.
    pub journal_size: u64,
}

/// What carries overlapping I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueChoice {
    /// io_uring where it works, threads where it does not.
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads.
    Threads,
}

/// How a datastore is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Page cache or O_DIRECT.
    pub mode: backend::IoMode,
    /// What carries overlapping I/O.
    pub queue: QueueChoice,
    /// Bound of the metadata cache in bytes.
    pub metadata_cache: usize,
    /// Bound of the write buffer in bytes.
    pub write_buffer: usize,
}

/// An open datastore. Methods may be called from any thread; names are those of [`crate::info`].
pub struct Datastore {}

fn later<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "not built yet"))
}

impl Datastore {
    /// Makes a datastore in an empty or missing folder.
    pub fn init(_path: &Path, _options: InitOptions) -> Result<()> {
        later()
    }
    /// Opens a datastore and becomes its owner: `Busy` when another process is.
    pub fn open(_path: &Path, _options: OpenOptions) -> Result<Arc<Datastore>> {
        later()
    }
    /// Writes everything home and closes. Devices still open fail from then on.
    pub fn close(&self) -> Result<()> {
        later()
    }
    /// Capacity, allocation, over-commitment.
    pub fn status(&self) -> Result<Status> {
        later()
    }
    /// Walks all metadata.
    pub fn check(&self, _options: CheckOptions, _progress: &dyn Progress) -> Result<CheckReport> {
        later()
    }
    /// Makes a disk. Progress matters for eager zeroed thick ones.
    pub fn create_disk(
        &self,
        _name: &str,
        _capacity: u64,
        _provisioning: Provisioning,
        _progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        later()
    }
    /// All disks by name, block counts left out.
    pub fn disks(&self) -> Result<Vec<DiskInfo>> {
        later()
    }
    /// One disk, blocks counted.
    pub fn disk(&self, _name: &str) -> Result<DiskInfo> {
        later()
    }
    /// Grows a disk, or shrinks it when `shrink` says that losing its end is meant.
    pub fn resize_disk(&self, _name: &str, _capacity: u64, _shrink: bool) -> Result<DiskInfo> {
        later()
    }
    /// Renames a disk.
    pub fn rename_disk(&self, _name: &str, _to: &str) -> Result<DiskInfo> {
        later()
    }
    /// Deletes a disk with its snapshots. `Busy` with the list when clones stand on it, unless `promote`: then the
    /// snapshots they stand on become theirs.
    pub fn delete_disk(&self, _name: &str, _promote: bool) -> Result<()> {
        later()
    }
    /// Takes snapshots of several disks at one point: (disk, snapshot name).
    pub fn create_snapshots(&self, _of: &[(String, String)]) -> Result<Vec<SnapshotInfo>> {
        later()
    }
    /// Snapshots of one disk, or of all, parents before children.
    pub fn snapshots(&self, _disk: Option<&str>) -> Result<Vec<SnapshotInfo>> {
        later()
    }
    /// Deletes a snapshot; `Busy` with the list when clones stand on it.
    pub fn delete_snapshot(&self, _disk: &str, _name: &str) -> Result<()> {
        later()
    }
    /// Makes the head equal to a snapshot again. `Busy` while clients have the disk open.
    pub fn revert(&self, _disk: &str, _name: &str) -> Result<DiskInfo> {
        later()
    }
    /// Calls `each` for every extent that differs between two points of a disk, in order of offset.
    pub fn diff(
        &self,
        _disk: &str,
        _from: &Point,
        _to: &Point,
        _each: &mut dyn FnMut(ChangedExtent) -> Result<()>,
    ) -> Result<()> {
        later()
    }
    /// Makes linked clones of a snapshot, or of the head (through a snapshot taken for it). All or none.
    pub fn clone_linked(
        &self,
        _disk: &str,
        _at: &Point,
        _names: &[String],
        _progress: &dyn Progress,
    ) -> Result<Vec<DiskInfo>> {
        later()
    }
    /// Makes an independent copy of the allocated data.
    pub fn clone_full(&self, _disk: &str, _at: &Point, _name: &str, _progress: &dyn Progress) -> Result<DiskInfo> {
        later()
    }
    /// Makes a linked clone independent of its parent, while in use.
    pub fn detach(&self, _name: &str, _progress: &dyn Progress) -> Result<DiskInfo> {
        later()
    }
    /// Opens `disk` or `disk@snapshot` for I/O; counted as a client until dropped.
    pub fn device(&self, _name: &str, _read_only: bool) -> Result<Arc<dyn Device>> {
        later()
    }
    /// Names that [`Datastore::device`] takes.
    pub fn device_names(&self) -> Vec<String> {
        Vec::new()
    }
}
