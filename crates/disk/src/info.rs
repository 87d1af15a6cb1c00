//! What a datastore tells about itself: plain records, the same for text, JSON and the API.

use crate::file_system::FileSystemInfo;
pub use chain::{DataStatistics, MetadataStatistics};
use error::{Error, Result};
pub use layer::image::ImageKind;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::str::FromStr;
pub use vmdk::DeltaFormat;

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

/// What a disk is made of: the native format, or the image that it begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DiskFormat {
    /// The datastore's own.
    Native,
    /// VMware's flat disk, with the provisioning type asked for.
    Vmdk,
    /// An image of that kind.
    Image(ImageKind),
}

impl DiskFormat {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Vmdk => "vmdk",
            Self::Image(kind) => kind.name(),
        }
    }
}

impl FromStr for DiskFormat {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "native" => Ok(Self::Native),
            "vmdk" => Ok(Self::Vmdk),
            other => other.parse().map(Self::Image),
        }
    }
}

impl TryFrom<String> for DiskFormat {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl From<DiskFormat> for String {
    fn from(format: DiskFormat) -> Self {
        format.name().to_owned()
    }
}

/// How a disk is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewDisk {
    /// Capacity in bytes.
    pub capacity: u64,
    /// How it takes its space, where the format leaves a choice.
    pub provisioning: Provisioning,
    /// What it is made of.
    pub format: DiskFormat,
    /// What its snapshots are made of, where they are images; what vSphere would take if nothing is said.
    pub delta: Option<DeltaFormat>,
}

impl NewDisk {
    /// A native disk.
    pub fn native(capacity: u64, provisioning: Provisioning) -> Self {
        Self { capacity, provisioning, format: DiskFormat::Native, delta: None }
    }
}

/// VMware's counters of a flat disk, in file blocks of 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Blocks that its files cover.
    pub blocks: u64,
    /// Blocks that have space.
    pub nb: u64,
    /// Of these, blocks to be zeroed when they are first written.
    pub tbz: u64,
}

/// A file of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Where it is.
    pub path: String,
    /// `made` by the datastore, `adopted` for writing, or `foreign`: only read.
    pub standing: String,
}

/// What a disk in VMware's formats has beyond others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDetails {
    /// Kind of the base.
    pub kind: String,
    /// Format of new deltas.
    pub delta: String,
    /// VMware's counters, where the base is flat.
    pub counters: Option<Counters>,
    /// In how many runs the flat base lies on the medium, where that can be told.
    pub fragments: Option<u64>,
    /// Levels of the head's chain.
    pub levels: u64,
    /// Most of them.
    pub levels_max: u64,
    /// Formats of the levels, newest first.
    pub formats: Vec<String>,
    /// The file by which others open the head.
    pub head: String,
    /// Files of all images.
    pub files: Vec<ImageFile>,
    /// Bytes that the head's chain takes in the file system.
    pub allocated: u64,
    /// Bytes of guest data in it, in whole grains.
    pub mapped: u64,
    /// Bytes in it that nothing names: what wiping and shrinking return.
    pub dead: u64,
    /// Levels are left that no snapshot needs.
    pub consolidation_needed: bool,
    /// A live import: it is read from its images until the server has copied them into the datastore.
    #[serde(default)]
    pub importing: bool,
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
    /// Format: `native`, `vmdk` for VMware's flat disks, or the kind of image.
    pub format: String,
    /// The snapshot the head stands on.
    pub parent_snapshot: Option<String>,
    /// Linked clone of `disk@snapshot`.
    pub origin: Option<String>,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Blocks of 4 KiB that the head of a native disk maps; `None` where counting was not asked for.
    pub blocks_allocated: Option<u64>,
    /// Of these, blocks that still have to be zeroed on first write.
    pub blocks_to_be_zeroed: Option<u64>,
    /// Bytes of the head that no snapshot, clone or other disk shares; `None` where counting was not asked for.
    pub exclusive: Option<u64>,
    /// Clients that have it open now.
    pub clients: u64,
    /// The clients behind that number, and those that may come back: as far as they are known where it is served.
    #[serde(default)]
    pub users: Vec<DiskUser>,
    /// The virtual machine that has the disk; `None` where that was not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Why it takes no writes any more; `None` while it does.
    #[serde(default)]
    pub stopped: Option<String>,
    /// Creation time, seconds since 1970.
    pub created: u64,
    /// What one in VMware's formats has beyond that; `None` where it was not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Box<ImageDetails>>,
}

/// A client of a disk or of a snapshot of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUser {
    /// What it has open: `disk` or `disk@snapshot`.
    pub export: String,
    /// Which client: its process, or its address.
    pub client: String,
    /// For how many seconds it still counts after its connection ended; `None` while it is connected.
    pub grace: Option<u64>,
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
    /// What a person had to say about it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
}

/// How snapshots are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotOptions {
    /// What a person has to say about them.
    #[serde(default)]
    pub description: String,
    /// The folder that new images go to; the disk's own if nothing is said.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// The format of new images; the disk's usual one if nothing is said.
    #[serde(default)]
    pub delta: Option<DeltaFormat>,
}

impl SnapshotOptions {
    /// True when something is asked for that only images have.
    pub(crate) fn is_special(&self) -> bool {
        *self != Self::default()
    }
}

/// Which way the image of a deleted snapshot is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// The snapshot's image goes into the newer one.
    Up,
    /// The newer image goes into the snapshot's.
    Down,
}

/// What giving space back has freed, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaimed {
    /// Found dead or full of zeros, and free for new data.
    pub freed: u64,
    /// Given back to the file system.
    pub returned: u64,
    /// Moved for that.
    pub moved: u64,
}

/// Tunables of a disk's chain; `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// Most extents in the metadata cache.
    pub metadata_entries: Option<u64>,
    /// Bytes around a miss that are resolved with it.
    pub prefetch: Option<u64>,
    /// Most extents that one prefetch brings.
    pub prefetch_extents: Option<u64>,
    /// Bytes of the read cache; 0 for none.
    pub read_cache: Option<u64>,
    /// Most levels of the chain.
    pub levels_max: Option<u64>,
}

/// One level of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelInfo {
    /// Its format.
    pub format: String,
    /// Its capacity in bytes.
    pub capacity: u64,
    /// Unit of mapping in bytes.
    pub grain: u64,
    /// Open for writing.
    pub writable: bool,
}

/// Figures of a disk's chain, since it was opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatistics {
    /// The disk.
    pub name: String,
    /// The levels, newest first.
    pub levels: Vec<LevelInfo>,
    /// The metadata cache.
    pub metadata: MetadataStatistics,
    /// The read cache.
    pub data: DataStatistics,
    /// Writes of partial grains, which had to be filled up from below.
    pub fills: u64,
    /// Tunables as they are now.
    pub tunables: Tuning,
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

/// Takes extents in order of offset. An error ends what gives them.
pub type EachExtent<'a> = &'a mut dyn FnMut(ChangedExtent) -> Result<()>;

/// A datastore as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Identity.
    pub uuid: String,
    /// On-disk format version.
    pub version: u32,
    /// The file system that holds it; without a name where it is none of this machine.
    #[serde(default)]
    pub file_system: FileSystemInfo,
    /// Size of the file system that holds it, in bytes.
    pub capacity: u64,
    /// What the file system still has to give, in bytes.
    pub available: u64,
    /// Bytes the datastore takes, metadata and reserves included.
    pub allocated: u64,
    /// Of these, in files of disks in VMware's formats.
    pub images: u64,
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
    /// Pieces of background work under way that give way to clients.
    pub background_work: u64,
    /// Bytes per second that they may move together now; 0 for no limit.
    pub background_rate: u64,
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
    /// Images looked at.
    pub images: u64,
    /// Bytes in images that nothing names.
    pub dead: u64,
    /// What was wrong; empty when clean.
    pub findings: Vec<Finding>,
    /// What does not hold on the file system of the datastore.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// What `check` shall do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckOptions {
    /// Read every data block and verify its checksum.
    pub data: bool,
    /// Repair what can be repaired.
    pub repair: bool,
}
