//! Space: what disks and snapshots use, and what deleting any of them would free. All sizes are in bytes.

use crate::growth::Growth;
use crate::info::Direction;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The reason why a figure about images that are merged is an estimate.
pub(crate) const MERGE_ESTIMATE: &str = "images are merged; new tables in the images that stay, rounding by the file \
                                         system, and writes during the merge are not counted";

/// Disks and snapshots to delete together. Linked clones are deleted before the snapshots of native disks on which the
/// clones are based.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deletion {
    /// Disks, which are deleted with their snapshots.
    pub disks: Vec<String>,
    /// Snapshots: disk and name.
    pub snapshots: Vec<(String, String)>,
    /// Whether the snapshots of these disks on which linked clones are based are handed over to the clones.
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
    /// Bytes of metadata of native disks. This space can be used for other metadata only, and is not returned to the
    /// file system.
    pub metadata: u64,
    /// Bytes of removed image files, minus the bytes that merges add to other images.
    pub images: u64,
    /// Bytes that are reserved for writes of thick disks. They contain no data, and become usable for other disks.
    pub reserved: u64,
    /// Bytes of earlier deletions and discards that no write can use yet: those of `held` in [`crate::Status`], and
    /// data that only deleted trees use, which is freed in the background. No other figure includes these bytes.
    pub held: u64,
    /// Number of images that are merged into others.
    pub images_merged: u64,
    /// Number of images of snapshots in VMware's formats that stay, because other states of their disks need them. Of
    /// these snapshots only the name is removed.
    pub images_kept: u64,
    /// Why the figures are an estimate; `None` if they are exact.
    pub estimate: Option<String>,
}

/// The space of a disk's head or of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceUse {
    /// The capacity of the disk or snapshot.
    pub provisioned: u64,
    /// The size of the mapped blocks or grains.
    pub mapped: u64,
    /// The space of these blocks or grains in the files of the datastore.
    pub stored: u64,
    /// What is compressed of it. Nothing for disks in VMware's formats.
    #[serde(flatten)]
    pub compressed: CompressedSpace,
    /// The part of `stored` that other disks or snapshots use too; `None` if it is not known.
    pub shared: Option<u64>,
    /// The part of `stored` that only this head or snapshot uses; `None` if it is not known.
    pub exclusive: Option<u64>,
    /// Bytes reserved for writes of a thick disk.
    pub reserved: u64,
}

/// The compressed part of the space of a disk's head, a snapshot or a datastore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressedSpace {
    /// The part of `mapped` that is compressed.
    #[serde(default)]
    pub packed: u64,
    /// The part of `stored` that the compressed blocks take. Includes compressed blocks beside them that are not in use
    /// any more.
    #[serde(default)]
    pub packs: u64,
    /// How many times less space the compressed blocks take: `packed` / `packs`. `None` if nothing is compressed.
    #[serde(default)]
    pub compression: Option<Ratio>,
}

impl CompressedSpace {
    /// `packed` bytes that take `packs` bytes.
    pub fn new(packed: u64, packs: u64) -> Self {
        Self { packed, packs, compression: Ratio::of(packed, packs) }
    }

    /// The sum of two parts. Thin disks may have any capacity, so the sum may exceed the range of the type.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self::new(self.packed.saturating_add(other.packed), self.packs.saturating_add(other.packs))
    }
}

/// A ratio, in hundredths. In JSON it is a number such as 2.41.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "f64", into = "f64")]
pub struct Ratio(pub u64);

impl Ratio {
    /// The ratio of two numbers of bytes, rounded down; `None` if one of them is 0.
    pub fn of(bytes: u64, to: u64) -> Option<Self> {
        let hundredths = (u128::from(bytes) * 100).checked_div(u128::from(to)).filter(|_| bytes > 0)?;
        Some(Self(u64::try_from(hundredths).unwrap_or(u64::MAX)))
    }
}

impl From<Ratio> for f64 {
    fn from(ratio: Ratio) -> Self {
        ratio.0 as f64 / 100.0
    }
}

impl From<f64> for Ratio {
    fn from(number: f64) -> Self {
        Self((number * 100.0).round() as u64)
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.0 / 100, self.0 % 100)
    }
}

/// Why the data of native disks and snapshots takes the space that it takes, in bytes:
///
/// `capacity` - `unmapped` = `mapped`, and
/// `mapped` - `within_disks` - `between_disks` - `compression` + `packing_loss` = `stored`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduction {
    /// Number of heads and snapshots.
    pub states: u64,
    /// The sum of their capacities.
    pub capacity: u64,
    /// The part of `capacity` that is not mapped: never written, discarded, or zero. If a disk or snapshot ends within
    /// a block, this part is smaller by the rest of the block.
    pub unmapped: u64,
    /// The sum of what they map.
    pub mapped: u64,
    /// What the head and the snapshots of a disk map more than once.
    pub within_disks: u64,
    /// What several disks map. 0 for one disk: `stored` then includes what it shares with other disks.
    pub between_disks: u64,
    /// What compression saves: the size of compressed blocks minus the bytes to which they are compressed.
    pub compression: u64,
    /// Bytes of packs of compressed blocks that contain no content in use: blocks that nothing maps any more, indexes,
    /// and the rest of the last block. An estimate, like `compression`, if not all packs were examined.
    pub packing_loss: u64,
    /// Number of packs.
    pub packs: u64,
    /// Number of packs that were examined: all, unless there are too many.
    pub packs_examined: u64,
    /// Bytes of the data blocks in which everything is stored. Each block counts once.
    pub stored: u64,
    /// The part of `stored` that reads as zeros: blocks of thick disks that are not written yet.
    pub zeros: u64,
    /// `mapped` / `stored`; `None` if nothing is mapped.
    pub ratio: Option<Ratio>,
}

/// The space of a datastore's disks and snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatastoreSpace {
    /// The disks by name.
    pub disks: Vec<DiskSpace>,
    /// The sums over the datastore; `None` if only one disk was counted.
    pub total: Option<TotalSpace>,
}

/// The sums over a datastore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TotalSpace {
    /// The sum of the capacities of the disks.
    pub provisioned: u64,
    /// The sum of `mapped` of all heads and snapshots.
    pub mapped: u64,
    /// Bytes of the data blocks that disks and snapshots use, and of the files of images. A block that several of them
    /// share counts once. Includes disks that are being made or received.
    pub stored: u64,
    /// The sums of all heads and snapshots: compressed blocks that several of them share count for each.
    #[serde(flatten)]
    pub compressed: CompressedSpace,
    /// The part of `stored` that several native disks or snapshots use.
    pub shared: u64,
    /// The rest of `stored`.
    pub exclusive: u64,
    /// Bytes reserved for writes of thick disks.
    pub reserved: u64,
    /// As [`WouldFree::held`]; `stored` does not include these bytes.
    pub held: u64,
    /// Bytes that deleting all snapshots of native disks would free, without metadata.
    #[serde(default)]
    pub used_by_snapshots: u64,
    /// Bytes that deleting all disks with their snapshots would free, without metadata of native disks.
    #[serde(default)]
    pub reclaimable: u64,
    /// The new space that clients may need, if they write every block of every disk and nothing is compressed or
    /// shared: `provisioned`, minus the blocks that a write overwrites in place, minus `reserved`. For disks in
    /// VMware's formats, `provisioned` minus `mapped`. Snapshots that are taken later are not included.
    /// `None` if it was not requested.
    #[serde(default)]
    pub may_need: Option<u64>,
    /// Why the data of the native disks takes the space that it takes. Includes disks that are being made or received.
    /// `None` if it was not requested.
    #[serde(default)]
    pub reduction: Option<Reduction>,
}

/// The space of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotSpace {
    /// Name of the snapshot.
    pub name: String,
    /// The space of the snapshot.
    #[serde(flatten)]
    pub space: SpaceUse,
    /// Bytes that deleting this snapshot alone would free, without metadata: its exclusive space; `None` for disks in
    /// VMware's formats.
    #[serde(default)]
    pub reclaimable: Option<u64>,
}

/// The space of a disk with its snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpace {
    /// Name of the disk.
    pub name: String,
    /// The space of the head.
    #[serde(flatten)]
    pub space: SpaceUse,
    /// Bytes that deleting all snapshots of the disk would free, without metadata; `None` if the figure is not known.
    pub used_by_snapshots: Option<u64>,
    /// Bytes that deleting the disk with its snapshots would free. The figure for a native disk does not include
    /// metadata.
    pub reclaimable: u64,
    /// The part of `reduction.stored` that other disks use too; `None` without `reduction`.
    #[serde(default)]
    pub shared_with_disks: Option<u64>,
    /// Why the data of the disk takes the space that it takes; `None` for disks in VMware's formats, and if all disks
    /// were counted.
    #[serde(default)]
    pub reduction: Option<Reduction>,
    /// How fast the disk grows, and when it has no unmapped blocks left; `None` if there are too few samples.
    #[serde(default)]
    pub growth: Option<Growth>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<SnapshotSpace>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_has_two_decimals_and_is_read_as_it_was_written() {
        assert_eq!((Ratio::of(0, 5), Ratio::of(5, 0)), (None, None));
        for (bytes, to, shown) in
            [(64, 2, "32.00"), (241, 100, "2.41"), (2, 3, "0.66"), (u64::MAX, 1, "184467440737095516.15")]
        {
            let ratio = Ratio::of(bytes, to).unwrap_or(Ratio(0));
            assert_eq!(ratio.to_string(), shown);
            if bytes < u64::MAX {
                assert_eq!(Ratio::from(f64::from(ratio)), ratio);
            }
        }
    }
}
