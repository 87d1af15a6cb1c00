//! Space: what disks and snapshots use, and what deleting any of them would free. All sizes are in bytes.

use crate::info::Direction;
use serde::{Deserialize, Serialize};

/// The reason why a figure about images that are merged is an estimate.
pub(crate) const MERGE_ESTIMATE: &str = "images are merged: the tables that they need, the units of the file system, \
                                         and what is written meanwhile are not counted";

/// Disks and snapshots to delete together. Disks are deleted before the snapshots of native disks on which they are
/// based.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deletion {
    /// Disks, which are deleted with their snapshots.
    pub disks: Vec<String>,
    /// Snapshots: disk and name.
    pub snapshots: Vec<(String, String)>,
    /// Whether snapshots that other disks are clones of are handed over to the clones.
    pub promote: bool,
    /// The direction in which images of deleted snapshots are merged; the cheaper direction if `None`.
    pub direction: Option<Direction>,
}

/// What a deletion would free.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WouldFree {
    /// The disks (`disk`) and snapshots (`disk@snapshot`) that were named.
    pub deletes: Vec<String>,
    /// The snapshots that are deleted with their disks.
    pub with_disks: Vec<String>,
    /// The snapshots that are handed over to linked clones.
    pub hands_over: Vec<String>,
    /// Bytes that become free in the files of the datastore: the sum of `data`, `metadata` and `images`.
    pub freed: u64,
    /// Bytes of data blocks of native disks.
    pub data: u64,
    /// Number of these blocks of 4 KiB.
    pub data_blocks: u64,
    /// Bytes of metadata of native disks. They are used again for other metadata, and are not returned to the file
    /// system.
    pub metadata: u64,
    /// Bytes of image files, less what merges copy into other images.
    pub images: u64,
    /// Bytes that thick disks had reserved for writes. They are free already, and become usable for other disks.
    pub reserved: u64,
    /// Bytes that earlier deletions and discards have freed and that are not usable yet. The deletion does not free
    /// them, so no other figure includes them.
    pub held: u64,
    /// Number of images that are merged into others.
    pub images_merged: u64,
    /// Number of snapshots in VMware's formats of which only the name is removed, because other states of their disks
    /// need their images.
    pub images_kept: u64,
    /// Why the figures are an estimate; `None` if they are exact.
    pub estimate: Option<String>,
}

/// The space of a disk's head or of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceUse {
    /// The capacity.
    pub provisioned: u64,
    /// What is mapped.
    pub mapped: u64,
    /// What that takes in the files of the datastore.
    pub stored: u64,
    /// The part of `stored` that other disks or snapshots use too; `None` if it is not known.
    pub shared: Option<u64>,
    /// The part of `stored` that nothing else uses: deleting this alone frees it. `None` if it is not known.
    pub exclusive: Option<u64>,
    /// Bytes reserved for writes of a thick disk.
    pub reserved: u64,
}

/// The space of a datastore's disks and snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatastoreSpace {
    /// The disks by name.
    pub disks: Vec<DiskSpace>,
    /// The sums over the datastore; `None` if only one disk was counted.
    pub total: Option<TotalSpace>,
}

/// The space of a datastore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TotalSpace {
    /// The sum of the capacities of the disks.
    pub provisioned: u64,
    /// What all heads and snapshots map.
    pub mapped: u64,
    /// What that takes in the files of the datastore: data blocks, and files of images. It includes disks that are
    /// being made or received.
    pub stored: u64,
    /// The part of `stored` that several native disks or snapshots use.
    pub shared: u64,
    /// The rest of `stored`.
    pub exclusive: u64,
    /// Bytes reserved for writes of thick disks.
    pub reserved: u64,
    /// Bytes that deletions and discards have freed and that are not usable yet. `stored` does not include them.
    pub held: u64,
}

/// The space of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotSpace {
    /// Name of the snapshot.
    pub name: String,
    /// The space.
    #[serde(flatten)]
    pub space: SpaceUse,
}

/// The space of a disk with its snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpace {
    /// Name of the disk.
    pub name: String,
    /// The space of the head.
    #[serde(flatten)]
    pub space: SpaceUse,
    /// What deleting all snapshots of the disk would free; `None` if it is not known.
    pub used_by_snapshots: Option<u64>,
    /// What deleting the disk with its snapshots would free.
    pub reclaimable: u64,
    /// The snapshots, oldest first.
    pub snapshots: Vec<SnapshotSpace>,
}
