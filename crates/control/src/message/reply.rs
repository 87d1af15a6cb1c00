//! Successful replies.

use super::{JobEnd, JobInfo, MachineReply};
use backup::{BackupInfo, Created, LiveRestored, MachineCreated, Pruned, Restored, Verified};
use disk::convert::Converted;
use disk::images::{ImageCheck, ImageInfo, ImageLevel};
use disk::salvage::{SalvageList, SalvageReport};
use disk::transfer::ReceptionInfo;
use disk::{
    CheckReport, DatastoreSpace, DiskDefaults, DiskInfo, DiskStatistics, LimitInfo, ReclaimReport, Reclaimed,
    ScrubReport, ScrubSummary, SnapshotInfo, Status, WouldFree,
};
use replication::Sent;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// A successful reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Reply to `Status` and `StatusSpace`.
    Status {
        /// The datastore.
        status: Box<Status>,
        /// The server, if the datastore is served.
        serving: Option<Serving>,
    },
    /// Reply to `Check`.
    Check(CheckReport),
    /// Reply to `ScrubRequest::Start` and `ScrubRequest::Status`.
    Scrub(Box<ScrubReport>),
    /// Reply to `ScrubRequest::Cancel` and `ScrubRequest::Schedule`.
    ScrubState(Box<ScrubSummary>),
    /// Reply to `DiskRequest::Resize`.
    Resized(Box<Resized>),
    /// Reply to requests that create or change one disk, and to `DiskRequest::Show`.
    Disk(Box<DiskInfo>),
    /// Reply to `DiskRequest::List` and `Clone`.
    Disks(Vec<DiskInfo>),
    /// Reply to `SnapshotRequest::Show`.
    Snapshot(SnapshotInfo),
    /// Reply to `SnapshotRequest::Create` and `SnapshotRequest::List`.
    Snapshots(Vec<SnapshotInfo>),
    /// Reply to deletions: the deleted name.
    Deleted(String),
    /// Reply to `DiskRequest::WouldFree`.
    WouldFree(Box<WouldFree>),
    /// Reply to requests about labels.
    Labels(Vec<LimitInfo>),
    /// Reply to `DiskRequest::Defaults`.
    Defaults(DiskDefaults),
    /// Reply to `DiskRequest::Space`.
    Space(Box<DatastoreSpace>),
    /// Reply to `DiskRequest::Stats` and `DiskRequest::Tune`.
    Statistics(Box<DiskStatistics>),
    /// Reply to requests that reclaim space of a disk.
    Reclaimed {
        /// The disk's name.
        name: String,
        /// The space that was reclaimed.
        reclaimed: Reclaimed,
    },
    /// Reply to `DiskRequest::Reclaim`.
    Reclaim(Box<ReclaimReport>),
    /// Reply to `DiskRequest::Reclaimable`: all disks by name.
    Reclaimable(Vec<Reclaimable>),
    /// Reply to `SnapshotRequest::Diff`, after all extents.
    Diff {
        /// Number of extents sent.
        extents: u64,
        /// Sum of the lengths of the sent extents.
        bytes: u64,
    },
    /// Reply to `ImageRequest::Show`.
    Image(ImageInfo),
    /// Reply to `ImageRequest::Check`.
    ImageCheck(ImageCheck),
    /// Reply to `ImageRequest::Create`.
    ImageCreated(Box<ImageLevel>),
    /// Reply to `Convert`.
    Converted(Converted),
    /// Reply to `Salvage` if nothing is extracted.
    SalvageList(Box<SalvageList>),
    /// Reply to `Salvage`.
    Salvaged(Box<SalvageReport>),
    /// Reply to `ExportList`.
    Exports(Vec<ExportInfo>),
    /// Reply to `Send`.
    Sent(Box<Sent>),
    /// Reply to `Receive`.
    Receptions(Vec<ReceptionInfo>),
    /// Reply to `BackupRequest::Create`.
    BackedUp(Box<Created>),
    /// Reply to `BackupRequest::PrepareMachine`.
    BackupPrepared {
        /// Identity of the repository.
        id: String,
        /// Names of the snapshots of the machine whose backups were interrupted.
        unfinished: Vec<String>,
    },
    /// Reply to `BackupRequest::CreateMachine`.
    MachineBackedUp(Box<MachineCreated>),
    /// Reply to `BackupRequest::List`.
    Backups(Vec<BackupInfo>),
    /// Reply to `BackupRequest::Verify`.
    Verified(Box<Verified>),
    /// Reply to `BackupRequest::Restore`.
    Restored(Box<Restored>),
    /// Reply to `BackupRequest::Restore` of a disk that can be used at once.
    RestoredLive(Box<LiveRestored>),
    /// Reply to `BackupRequest::Key`.
    BackupKey {
        /// The file of the new key.
        path: PathBuf,
        /// Identity of the key.
        id: String,
    },
    /// Reply to `BackupRequest::Prune`.
    Pruned(Box<Pruned>),
    /// Reply to `Settle`.
    Settled,
    /// Reply to requests about machines.
    Machine(MachineReply),
    /// Reply to `JobRequest::Start`, `Show` and `Cancel`.
    Job(JobInfo),
    /// Reply to `JobRequest::List`.
    Jobs(Vec<JobInfo>),
    /// Reply to `JobRequest::Wait` for a job that succeeded.
    JobEnded(Box<JobEnd>),
}

/// What a disk could give back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaimable {
    /// The disk.
    pub disk: String,
    /// What it could give back; `None` if it could not be examined.
    pub report: Option<ReclaimReport>,
    /// Why it could not be examined.
    pub error: Option<String>,
}

/// A resized disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resized {
    /// The disk.
    pub disk: DiskInfo,
    /// Whether the datastore is served, so that clients can reconnect.
    pub served: bool,
    /// Number of connections that were ended, so that their clients reconnect.
    pub reconnected: u64,
    /// Clients that were connected before the resize and still are, so that they see the old capacity.
    pub unaware: Vec<String>,
    /// The running machine that uses the disk, if the request was to notify it.
    pub machine: Option<MachineNotice>,
}

/// A running machine whose disk was resized.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineNotice {
    /// The machine's name.
    pub name: String,
    /// Whether the guest sees the new capacity. False while the datastore is not served.
    pub seen: bool,
}

/// The server of a datastore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Serving {
    /// Process id.
    pub pid: u32,
    /// Version of the program.
    pub version: String,
    /// Unix socket of the NBD server.
    pub socket: Option<PathBuf>,
    /// TCP address of the NBD server.
    pub tcp: Option<SocketAddr>,
    /// Whether TCP is encrypted.
    pub tls: bool,
    /// Whether writes of NBD clients are refused.
    pub read_only: bool,
    /// Address at which disks are received from other servers.
    #[serde(default)]
    pub receive: Option<SocketAddr>,
}

/// An export.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExportInfo {
    /// `disk` or `disk@snapshot`.
    pub name: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The export's URIs, one for each listening address; empty if no server runs.
    pub uris: Vec<String>,
}
