//! What a datastore tells about itself: plain records, the same for text, JSON and the API.

use serde::{Deserialize, Serialize};

/// How a disk takes its space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provisioning {
    /// On first write.
    Thin,
    /// Reserved at creation, zeroed on first write.
    ZeroedThick,
    /// Reserved and zeroed at creation.
    EagerZeroedThick,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskInfo {
    /// Name.
    pub name: String,
    /// Stable identity, in the usual text form.
    pub uuid: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Provisioning type.
    pub provisioning: Provisioning,
    /// Format: `native`.
    pub format: String,
    /// The snapshot the head stands on.
    pub parent_snapshot: Option<String>,
    /// Linked clone of `disk@snapshot`.
    pub origin: Option<String>,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Blocks of 4 KiB that the head maps (VMware's nb); `None` where counting was not asked for.
    pub blocks_allocated: Option<u64>,
    /// Of these, blocks that still have to be zeroed on first write (VMware's tbz).
    pub blocks_to_be_zeroed: Option<u64>,
    /// Bytes of the head that no snapshot, clone or other disk shares; `None` where counting was not asked for.
    pub exclusive: Option<u64>,
    /// Clients that have it open now.
    pub clients: u64,
    /// Creation time, seconds since 1970.
    pub created: u64,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// Disk it belongs to.
    pub disk: String,
    /// Name, unique within the disk.
    pub name: String,
    /// Capacity of the disk then, in bytes.
    pub capacity: u64,
    /// The snapshot before it.
    pub parent: Option<String>,
    /// Linked clones that stand on it.
    pub clones: Vec<String>,
    /// True when the head of the disk stands on it.
    pub current: bool,
    /// Creation time, seconds since 1970.
    pub created: u64,
}

/// Two points of one disk: a snapshot, or now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Point {
    /// The head.
    Head,
    /// A snapshot.
    Snapshot(String),
}

/// A run of bytes that differs between two points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedExtent {
    /// Byte offset.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// True when the later point holds no data there (discarded or zeroed).
    pub zero: bool,
}

/// A datastore as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Identity.
    pub uuid: String,
    /// On-disk format version.
    pub version: u32,
    /// Size of the file system that holds it, in bytes.
    pub capacity: u64,
    /// What the file system still has to give, in bytes.
    pub available: u64,
    /// Bytes the datastore takes, metadata and reserves included.
    pub allocated: u64,
    /// Bytes of data blocks in use.
    pub data: u64,
    /// Bytes of data blocks reserved for thick disks and not used yet.
    pub reserved: u64,
    /// Bytes of metadata in use.
    pub metadata: u64,
    /// Bytes freed and waiting to go back to the file system or to be reused.
    pub reclaimable: u64,
    /// Sum of the capacities of all disks.
    pub provisioned: u64,
    /// provisioned / (allocated + available).
    pub overcommit_ratio: String,
    /// Disks.
    pub disks: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Blocks that failed their checksum since the datastore was opened.
    pub checksum_errors: u64,
    /// How I/O is done: `io_uring`, `threads`.
    pub engine: String,
    /// `buffered` or `direct`.
    pub io_mode: String,
}

/// One thing `check` found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What is wrong, with the place.
    pub problem: String,
    /// What was done about it, if anything.
    pub repaired: Option<String>,
}

/// What `check` did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Metadata pages walked.
    pub pages: u64,
    /// Data blocks referenced.
    pub blocks: u64,
    /// Data blocks whose checksum was verified.
    pub verified: u64,
    /// Bytes that nothing refers to.
    pub leaked: u64,
    /// What was wrong; empty when clean.
    pub findings: Vec<Finding>,
}

/// What `check` shall do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckOptions {
    /// Read every data block and verify its checksum.
    pub data: bool,
    /// Repair what can be repaired.
    pub repair: bool,
}
