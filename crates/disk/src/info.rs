//! Information about a datastore: plain records, the same for text, JSON and the API.

use crate::compression::Compression;
use crate::deduplication::Deduplication;
use crate::file_system::FileSystemInfo;
use crate::growth::Growth;
use crate::quota::LimitInfo;
use crate::scrub::{DamageReference, ScrubSummary};
use crate::settings::DiskSettings;
use crate::space::TotalSpace;
use backend::dirty::DirtyUse;
pub use chain::{DataStatistics, MetadataStatistics};
use error::{Error, Result};
pub use layer::image::ImageKind;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::str::FromStr;
pub use vmdk::DeltaFormat;

/// The provisioning type of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provisioning {
    /// Space is allocated on first write.
    Thin,
    /// Space is reserved at creation, and zeroed on first write.
    ZeroedThick,
    /// Space is reserved and zeroed at creation.
    EagerZeroedThick,
}

/// The format of a disk: native, or the format of its oldest image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DiskFormat {
    /// The datastore's native format.
    Native,
    /// VMware's flat disk, with the requested provisioning type.
    Vmdk,
    /// A disk whose oldest image is of this kind.
    Image(ImageKind),
}

impl DiskFormat {
    /// The format's name on the command line.
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
            other => other
                .parse()
                .map(Self::Image)
                .map_err(|error: Error| Error::new(error.kind(), format!("{error}, native, vmdk"))),
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

/// Parameters of a new disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewDisk {
    /// Capacity in bytes.
    pub capacity: u64,
    /// The provisioning type, if the format supports several.
    pub provisioning: Provisioning,
    /// The format of the disk.
    pub format: DiskFormat,
    /// The format of the disk's snapshots, if they are images; `None` for the format that vSphere would choose.
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
    /// Blocks that the disk's files cover.
    pub blocks: u64,
    /// Blocks with allocated space.
    pub nb: u64,
    /// Allocated blocks that are zeroed on their first write.
    pub tbz: u64,
}

/// A file of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// The file's path.
    pub path: String,
    /// `made` by the datastore, `adopted` for writing, or `foreign` for files that are only read.
    pub standing: String,
}

/// Further information about a disk in VMware's formats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDetails {
    /// Kind of the base image.
    pub kind: String,
    /// Format of new deltas.
    pub delta: String,
    /// VMware's counters, if the base is flat.
    pub counters: Option<Counters>,
    /// Number of contiguous runs of the flat base on the medium, if that is known.
    pub fragments: Option<u64>,
    /// Number of levels of the head's chain.
    pub levels: u64,
    /// Limit of the number of levels.
    pub levels_max: u64,
    /// Formats of the levels, newest first.
    pub formats: Vec<String>,
    /// The file by which other programs open the head.
    pub head: String,
    /// Files of all images.
    pub files: Vec<ImageFile>,
    /// Bytes that the head's chain occupies in the file system.
    pub allocated: u64,
    /// Bytes of guest data that the images map, in whole grains.
    pub mapped: u64,
    /// Bytes in the images that nothing references. Wiping and shrinking free them.
    pub dead: u64,
    /// Whether the chain has levels that no snapshot needs.
    pub consolidation_needed: bool,
    /// Whether a live import is running: the disk is read from the imported images until the server has copied them.
    #[serde(default)]
    pub importing: bool,
    /// How far the content of such a disk, or of one that is restored while it is used, has come into the datastore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<LiveProgress>,
}

/// The progress of a disk whose content comes into the datastore while the disk is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveProgress {
    /// Where the content is, if it does not come from images.
    pub source: Option<String>,
    /// Bytes of the disk that this or the last attempt has passed; 0 before the first attempt of this process.
    pub done: u64,
    /// Bytes of the disk; 0 before the first attempt of this process.
    pub total: u64,
    /// Whether this process works on it, or waits for the next attempt.
    pub running: bool,
    /// Why the last attempt of this process has failed.
    pub error: Option<String>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskInfo {
    /// Name of the disk.
    pub name: String,
    /// Stable identity, in the usual text form.
    pub uuid: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Provisioning type.
    pub provisioning: Provisioning,
    /// Format: `native`, `vmdk` for VMware's flat disks, or the kind of image.
    pub format: String,
    /// The snapshot on which the head is based.
    pub parent_snapshot: Option<String>,
    /// For a linked clone, the `disk@snapshot` on which it is based.
    pub origin: Option<String>,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Blocks of 4 KiB that the head of a native disk maps; `None` if counting was not requested.
    pub blocks_allocated: Option<u64>,
    /// How many of the blocks that the head maps will be zeroed on their first write.
    pub blocks_to_be_zeroed: Option<u64>,
    /// Bytes of the head that no snapshot, clone, other disk or other place of the disk shares; `None` if counting was
    /// not requested.
    pub exclusive: Option<u64>,
    /// Number of clients that have the disk open.
    pub clients: u64,
    /// Connected clients, and disconnected clients that may reconnect, as far as the server has identified them.
    #[serde(default)]
    pub users: Vec<DiskUser>,
    /// The virtual machine that uses the disk; `None` if that was not requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Why the disk refuses writes since an I/O error; `None` if it does not.
    #[serde(default)]
    pub stopped: Option<String>,
    /// The settings of the disk.
    #[serde(default)]
    pub settings: DiskSettings,
    /// Writes of clients that wait for space; `None` if no write waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<WaitingWrites>,
    /// What the server has compressed because of the setting; `None` if no server does so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<CompressionState>,
    /// What the server has deduplicated because of the setting; `None` if no server does so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deduplication: Option<DeduplicationState>,
    /// Blocks of the disk that were read from the read cache since the datastore was opened or the disk was reverted.
    #[serde(default)]
    pub cache_hits: u64,
    /// Blocks of the disk that the read cache may hold, and that were read from the medium.
    #[serde(default)]
    pub cache_misses: u64,
    /// Creation time, seconds since 1970.
    pub created: u64,
    /// Further information about a disk in VMware's formats; `None` if it was not requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Box<ImageDetails>>,
}

/// What a server has compressed because of the setting of a disk, since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressionState {
    /// Bytes of the parts of the disk that were written and not processed since. A server that has just started has
    /// processed nothing.
    pub pending: u64,
    /// When the last pass ended, in seconds since 1970; `None` if none has ended.
    pub ended: Option<u64>,
    /// Bytes of data that were compressed.
    pub compressed: u64,
    /// By how many bytes less space they take.
    pub saved: u64,
}

/// Compression by settings, as a part of the status of a datastore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressionStatus {
    /// The setting that new thin native disks get.
    pub new_disks: Compression,
    /// Number of disks with the setting that can be compressed.
    pub disks: u64,
    /// The disk over which a pass is running.
    pub running: Option<String>,
    /// Bytes of the parts of these disks that were written and not processed since; 0 if no server does so.
    pub pending: u64,
    /// Bytes of data that were compressed since the server was started.
    pub compressed: u64,
    /// By how many bytes less space they take.
    pub saved: u64,
}

/// What a server has deduplicated because of the setting of a disk, since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeduplicationState {
    /// Bytes of the parts of the disk that were written and not compared with other data since. A server that has just
    /// started has compared nothing.
    pub pending: u64,
    /// When the last pass over the disks with which this disk shares data ended, in seconds since 1970; `None` if none
    /// has ended.
    pub ended: Option<u64>,
    /// Bytes of equal data of all these disks that are no longer stored again.
    pub shared: u64,
}

/// Deduplication by settings, as a part of the status of a datastore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeduplicationStatus {
    /// The setting that new thin native disks get.
    pub new_disks: Deduplication,
    /// Number of disks with the setting that can be deduplicated.
    pub disks: u64,
    /// Number of groups of these disks that are processed together.
    pub domains: u64,
    /// Over what a pass is running: the name of a disk, `label:KEY=VALUE` or `datastore`.
    pub running: Option<String>,
    /// Bytes of the parts of these disks that were written and not compared since; 0 if no server does so.
    pub pending: u64,
    /// Bytes of equal data that are not stored again, since the server was started: what passes and writes have found.
    pub shared: u64,
}

/// Writes of a disk that wait for space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingWrites {
    /// Name of the disk.
    pub disk: String,
    /// Number of writes that wait for space.
    pub writes: u64,
    /// Total length of these writes in bytes.
    pub bytes: u64,
    /// When the first of them began to wait, in seconds since 1970. Writes that were carried out since do not count.
    pub since: u64,
    /// The error with which the first of them would have failed.
    pub reason: String,
}

/// A client of a disk or of a snapshot of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUser {
    /// The export that the client has open: `disk` or `disk@snapshot`.
    pub export: String,
    /// The client, by its process or its address.
    pub client: String,
    /// Seconds for which the client still counts as a user after its connection ended; `None` while it is connected.
    pub grace: Option<u64>,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// Disk to which the snapshot belongs.
    pub disk: String,
    /// Name, unique within the disk.
    pub name: String,
    /// Capacity of the disk when the snapshot was taken, in bytes.
    pub capacity: u64,
    /// The snapshot on which this snapshot is based.
    pub parent: Option<String>,
    /// Linked clones that are based on the snapshot.
    pub clones: Vec<String>,
    /// Whether the head of the disk is based on the snapshot.
    pub current: bool,
    /// Creation time, seconds since 1970.
    pub created: u64,
    /// The snapshot's description.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
}

/// Options of a new snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotOptions {
    /// The snapshot's description.
    #[serde(default)]
    pub description: String,
    /// The folder of the new image; the disk's own folder if `None`.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// The format of the new image; the disk's usual delta format if `None`.
    #[serde(default)]
    pub delta: Option<DeltaFormat>,
}

impl SnapshotOptions {
    /// Whether an option that native snapshots do not support is set.
    pub(crate) fn is_special(&self) -> bool {
        *self != Self::default()
    }
}

/// The direction in which the image of a deleted snapshot is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// The snapshot's image is merged into the newer image.
    Up,
    /// The newer image is merged into the snapshot's image.
    Down,
}

/// The result of reclaiming space, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaimed {
    /// Bytes that were unreferenced or contained only zeros, and are now free.
    pub freed: u64,
    /// Bytes that were returned to the file system.
    pub returned: u64,
    /// Bytes that were moved in order to free space at the end of a file.
    pub moved: u64,
    /// Bytes of equal data that were stored again, and are now free.
    #[serde(default)]
    pub shared: u64,
    /// Bytes that stay as they are, because lost pages of metadata describe them.
    #[serde(default)]
    pub lost: u64,
}

/// Changes of the tunables of a disk's chain; `None` leaves a tunable unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// Limit of the metadata cache, in extents.
    pub metadata_entries: Option<u64>,
    /// Bytes around a cache miss that are looked up together with it.
    pub prefetch: Option<u64>,
    /// Limit of the extents that one prefetch adds to the metadata cache.
    pub prefetch_extents: Option<u64>,
    /// Bytes of the read cache; 0 for none.
    pub read_cache: Option<u64>,
    /// Limit of the number of levels.
    pub levels_max: Option<u64>,
}

/// One level of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelInfo {
    /// The level's format.
    pub format: String,
    /// The level's capacity in bytes.
    pub capacity: u64,
    /// The level's unit of mapping in bytes.
    pub grain: u64,
    /// Whether the level is open for writing.
    pub writable: bool,
}

/// Statistics of a disk's chain, since the disk was opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatistics {
    /// The disk's name.
    pub name: String,
    /// The levels, newest first.
    pub levels: Vec<LevelInfo>,
    /// The metadata cache.
    pub metadata: MetadataStatistics,
    /// The read cache.
    pub data: DataStatistics,
    /// Writes of partial grains, for which the rest of the grain was read from lower levels.
    pub fills: u64,
    /// The current tunables.
    pub tunables: Tuning,
}

/// A point of a disk: a snapshot, or the head.
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
    /// True if the later point has no data in the range (discarded or zeroed).
    pub zero: bool,
}

/// Called with extents in order of offset. An error ends the enumeration.
pub type EachExtent<'a> = &'a mut dyn FnMut(ChangedExtent) -> Result<()>;

/// Status of a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// UUID of the datastore.
    pub uuid: String,
    /// On-disk format version.
    pub version: u32,
    /// The file system in which the datastore is; without a name if the datastore is not in a local folder.
    #[serde(default)]
    pub file_system: FileSystemInfo,
    /// Size of that file system in bytes.
    pub capacity: u64,
    /// Bytes available in the file system.
    pub available: u64,
    /// Bytes that the datastore occupies, including metadata and reserves.
    pub allocated: u64,
    /// The part of these bytes that is in files of disks in VMware's formats.
    pub images: u64,
    /// Bytes of data blocks in use, without those of thick disks that are not written yet. If a disk has more than
    /// 100,000 extents, unwritten blocks beyond the first 100,000 extents count as data.
    pub data: u64,
    /// Bytes of data blocks reserved for thick disks and not written yet.
    pub reserved: u64,
    /// Bytes of metadata in use.
    pub metadata: u64,
    /// Bytes that were freed and are not yet returned to the file system or reused.
    pub reclaimable: u64,
    /// The part of `reclaimable` that no write can use yet: the change that freed it is not durable, or a read that
    /// began before this change is still under way.
    #[serde(default)]
    pub held: u64,
    /// Sum of the capacities of all disks.
    pub provisioned: u64,
    /// provisioned / (allocated + available).
    pub overcommit_ratio: String,
    /// The space of all disks and snapshots; `None` if it was not requested, because it has to be counted.
    #[serde(default)]
    pub space: Option<TotalSpace>,
    /// Number of disks.
    pub disks: u64,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Quotas and reservations of disks and labels.
    #[serde(default)]
    pub limits: Vec<LimitInfo>,
    /// How fast the used space grows; `None` if there are too few samples.
    #[serde(default)]
    pub growth: Option<Growth>,
    /// Writes that wait for space, by disk.
    #[serde(default)]
    pub waiting: Vec<WaitingWrites>,
    /// Blocks that failed their checksum since the datastore was opened.
    pub checksum_errors: u64,
    /// Scrubs: state, last end, and damage that was found.
    #[serde(default)]
    pub scrub: ScrubSummary,
    /// Compression by the settings of disks.
    #[serde(default)]
    pub compression: CompressionStatus,
    /// Deduplication by the settings of disks.
    #[serde(default)]
    pub deduplication: DeduplicationStatus,
    /// Number of running background operations that are paced by the latency of clients.
    pub background_work: u64,
    /// Current common limit of these operations in bytes per second; 0 for none.
    pub background_rate: u64,
    /// The read cache; `None` if it is off.
    #[serde(default)]
    pub read_cache: Option<ReadCacheInfo>,
    /// What is dirty in the page cache of the file system; `None` if it is not bounded.
    #[serde(default)]
    pub dirty: Option<DirtyInfo>,
    /// How I/O is submitted: `io_uring` or `threads`.
    pub engine: String,
    /// How data files are opened: `buffered` or `direct`.
    pub io_mode: String,
}

/// The cache of data blocks of native disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadCacheInfo {
    /// Bytes that it holds.
    pub resident: u64,
    /// Limit of its memory in bytes, which includes what it needs to find its content.
    pub limit: u64,
    /// Blocks that were read from it since the datastore was opened.
    pub hits: u64,
    /// Blocks that it may hold, and that were read from the medium.
    pub misses: u64,
}

/// Data that the server wrote through the page cache, on the file system of the datastore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyInfo {
    /// Bytes that are not known to be on the medium.
    pub bytes: u64,
    /// The bound of these bytes.
    pub bound: u64,
    /// How long writes were delayed because the medium is slower, in milliseconds, of all threads together.
    pub waited_ms: u64,
}

impl From<DirtyUse> for DirtyInfo {
    fn from(used: DirtyUse) -> Self {
        let waited_ms = u64::try_from(used.waited.as_millis()).unwrap_or(u64::MAX);
        Self { bytes: used.dirty, bound: used.bound, waited_ms }
    }
}

/// A finding of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The problem, and where it is.
    pub problem: String,
    /// How the problem was repaired; `None` if it was not.
    pub repaired: Option<String>,
    /// The parts of native disks and snapshots that damage affects, as far as that is known. Of many parts in one disk,
    /// the last one contains those that are not listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<DamageReference>,
    /// Number of parts beyond those in `places`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unlisted: u64,
}

impl Finding {
    /// A finding for which no parts of disks are known.
    pub fn new(problem: impl Into<String>, repaired: Option<String>) -> Self {
        Self { problem: problem.into(), repaired, places: Vec::new(), unlisted: 0 }
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Metadata pages that were visited.
    pub pages: u64,
    /// Data blocks that are referenced.
    pub blocks: u64,
    /// Data blocks whose checksum was verified.
    pub verified: u64,
    /// Bytes that are allocated but not referenced.
    pub leaked: u64,
    /// Images checked.
    pub images: u64,
    /// Bytes in images that nothing references.
    pub dead: u64,
    /// The findings; empty if the datastore is clean.
    pub findings: Vec<Finding>,
    /// Restrictions of the file system of the datastore.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// Options of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckOptions {
    /// Whether to read every data block and verify its checksum.
    pub data: bool,
    /// Whether to repair what can be repaired.
    pub repair: bool,
}
