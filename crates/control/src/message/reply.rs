//! The good ends of requests.

use super::{JobEnd, JobInfo, MachineReply};
use disk::convert::Converted;
use disk::images::{ImageCheck, ImageInfo, ImageLevel};
use disk::salvage::{SalvageList, SalvageReport};
use disk::transfer::ReceptionInfo;
use disk::{CheckReport, DiskInfo, DiskStatistics, Reclaimed, SnapshotInfo, Status};
use replication::Sent;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// The good end of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Of `Status`.
    Status {
        /// The datastore.
        status: Status,
        /// How it is served, if it is.
        serving: Option<Serving>,
    },
    /// Of `Check`.
    Check(CheckReport),
    /// Of `DiskResize`.
    Resized(Box<Resized>),
    /// Of what makes or changes one disk, and of `DiskShow`.
    Disk(DiskInfo),
    /// Of `DiskList` and `Clone`.
    Disks(Vec<DiskInfo>),
    /// Of `SnapshotShow`.
    Snapshot(SnapshotInfo),
    /// Of `SnapshotCreate` and `SnapshotList`.
    Snapshots(Vec<SnapshotInfo>),
    /// Of what deletes: the name that is gone.
    Deleted(String),
    /// Of `Stats` and `Tune`.
    Statistics(Box<DiskStatistics>),
    /// Of what gives space of a disk back.
    Reclaimed {
        /// The disk.
        name: String,
        /// What was freed.
        reclaimed: Reclaimed,
    },
    /// Of `SnapshotDiff`, after all extents.
    Diff {
        /// How many extents were sent.
        extents: u64,
        /// Sum of their lengths.
        bytes: u64,
    },
    /// Of `ImageShow`.
    Image(ImageInfo),
    /// Of `ImageCheck`.
    ImageCheck(ImageCheck),
    /// Of `ImageCreate`.
    ImageCreated(Box<ImageLevel>),
    /// Of `Convert`.
    Converted(Converted),
    /// Of `Salvage` without anything to read out.
    SalvageList(Box<SalvageList>),
    /// Of `Salvage`.
    Salvaged(Box<SalvageReport>),
    /// Of `ExportList`.
    Exports(Vec<ExportInfo>),
    /// Of `Send`.
    Sent(Box<Sent>),
    /// Of `Receive`.
    Receptions(Vec<ReceptionInfo>),
    /// Of `Settle`.
    Settled,
    /// Of requests about machines.
    Machine(MachineReply),
    /// Of `Start`, `Show` and `Cancel` of a job.
    Job(JobInfo),
    /// Of `List` of jobs.
    Jobs(Vec<JobInfo>),
    /// Of `Wait` for a job that ended well.
    JobEnded(Box<JobEnd>),
}

/// A disk of another capacity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resized {
    /// The disk.
    pub disk: DiskInfo,
    /// The datastore is served, so that clients can reconnect.
    pub served: bool,
    /// Connections that were ended for their clients to reconnect.
    pub reconnected: u64,
    /// Clients that were connected before, and still are: they have the capacity of before.
    pub unaware: Vec<String>,
    /// The running machine that has the disk, where it was to see the capacity.
    pub machine: Option<MachineNotice>,
}

/// A running machine whose disk has another capacity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineNotice {
    /// The machine.
    pub name: String,
    /// It sees the capacity; not while the datastore is not served.
    pub seen: bool,
}

/// What serves a datastore.
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
    /// TCP is encrypted.
    pub tls: bool,
    /// Writes of NBD clients are refused.
    pub read_only: bool,
    /// Where disks are received from other servers.
    #[serde(default)]
    pub receive: Option<SocketAddr>,
}

/// One thing that NBD clients can open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExportInfo {
    /// `disk` or `disk@snapshot`.
    pub name: String,
    /// Writes are refused.
    pub read_only: bool,
    /// Where it is served, one URI for each listener; empty while no server runs.
    pub uris: Vec<String>,
}
