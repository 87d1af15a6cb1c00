//! Every verb, handed to the disks of the kind that the name belongs to.

use super::Datastore;
use crate::info::{ChangedExtent, DiskInfo, Point, Provisioning, SnapshotInfo};
use crate::progress::Progress;
use store::Result;

impl Datastore {
    /// Makes a disk. Progress matters for thick ones.
    pub fn create_disk(
        &self,
        name: &str,
        capacity: u64,
        provisioning: Provisioning,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        let _name = self.reserve(name)?;
        self.native.create_disk(name, capacity, provisioning, progress)
    }

    /// All disks by name, block counts left out.
    pub fn disks(&self) -> Result<Vec<DiskInfo>> {
        self.native.disks()
    }

    /// One disk, blocks counted.
    pub fn disk(&self, name: &str) -> Result<DiskInfo> {
        self.native.disk(name)
    }

    /// Grows a disk, or shrinks it when `shrink` says that losing its end is meant.
    pub fn resize_disk(&self, name: &str, capacity: u64, shrink: bool) -> Result<DiskInfo> {
        self.native.resize_disk(name, capacity, shrink)
    }

    /// Renames a disk.
    pub fn rename_disk(&self, name: &str, to: &str) -> Result<DiskInfo> {
        let _name = self.reserve(to)?;
        self.native.rename_disk(name, to)
    }

    /// Deletes a disk with its snapshots. `Busy` while clients have it open, and with the list when clones stand on
    /// it, unless `promote`: then the snapshots they stand on become theirs.
    pub fn delete_disk(&self, name: &str, promote: bool) -> Result<()> {
        self.native.delete_disk(name, promote)
    }

    /// Takes snapshots of several disks at one point: (disk, snapshot name).
    pub fn create_snapshots(&self, of: &[(String, String)]) -> Result<Vec<SnapshotInfo>> {
        self.native.create_snapshots(of)
    }

    /// Snapshots of one disk, or of all, parents before children.
    pub fn snapshots(&self, disk: Option<&str>) -> Result<Vec<SnapshotInfo>> {
        self.native.snapshots(disk)
    }

    /// Deletes a snapshot; `Busy` with the list when clones stand on it, and while clients read it.
    pub fn delete_snapshot(&self, disk: &str, name: &str) -> Result<()> {
        self.native.delete_snapshot(disk, name)
    }

    /// Makes the head equal to a snapshot again. `Busy` while clients have the disk open.
    pub fn revert(&self, disk: &str, name: &str) -> Result<DiskInfo> {
        self.native.revert(disk, name)
    }

    /// Calls `each` for every extent that differs between two points of a disk, in order of offset.
    pub fn diff(
        &self,
        disk: &str,
        from: &Point,
        to: &Point,
        each: &mut dyn FnMut(ChangedExtent) -> Result<()>,
    ) -> Result<()> {
        self.native.diff(disk, from, to, each)
    }

    /// Makes linked clones of a snapshot, or of the head (through a snapshot taken for it). All or none.
    pub fn clone_linked(
        &self,
        disk: &str,
        at: &Point,
        clone_names: &[String],
        progress: &dyn Progress,
    ) -> Result<Vec<DiskInfo>> {
        let _names = clone_names.iter().map(|name| self.reserve(name)).collect::<Result<Vec<_>>>()?;
        self.native.clone_linked(disk, at, clone_names, progress)
    }

    /// Makes an independent copy of the allocated data. Interrupted, it leaves nothing behind.
    pub fn clone_full(&self, disk: &str, at: &Point, name: &str, progress: &dyn Progress) -> Result<DiskInfo> {
        let _name = self.reserve(name)?;
        self.native.clone_full(disk, at, name, progress)
    }

    /// Makes a linked clone independent of its parent, while it is in use: the parent can be deleted afterwards.
    pub fn detach(&self, name: &str, progress: &dyn Progress) -> Result<DiskInfo> {
        self.native.detach(name, progress)
    }
}
