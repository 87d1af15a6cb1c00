//! Requests in groups ([`disk`], [`label`], [`snapshot`], [`image`], [`send`], [`backup`], [`machine`], [`job`]),
//! successful replies in [`reply`], events in [`event`], and their encoding in [`line`].

mod backup;
mod disk;
mod event;
mod image;
mod job;
mod label;
mod line;
mod machine;
mod machine_backup;
mod reply;
mod scrub;
mod send;
mod snapshot;

pub use backup::{BackupCreate, BackupMachine, BackupPlace, BackupRequest, BackupRestore};
pub use disk::{DiskRequest, Reconnect};
pub use event::{Change, Event};
pub use image::ImageRequest;
pub use job::{JobEnd, JobInfo, JobRequest, JobState};
pub use label::LabelRequest;
pub use line::{
    Failure, FromClient, FromServer, Part, ProgressReport, REPLY_LINE_MAX, REQUEST_LINE_MAX, decode, encode,
};
pub use machine::{
    CloneOptions, Cloned, ClonedMachine, ImportedMachine, MachineActivity, MachineImport, MachineInfo, MachineMemory,
    MachineReply, MachineRequest, MachineSnapshot, MachineSummary, MachineVerb, NewMachine,
};
pub use machine_backup::{BackedUpMachine, MachineBackup, MachineRestore, RestoredMachine};
pub use reply::{ExportInfo, MachineNotice, Reclaimable, Reply, Resized, Serving};
pub use scrub::ScrubRequest;
pub use send::{ReceiveRequest, SendHow, SendPoint, SendRequest, SendTls, SentDisk};
pub use snapshot::SnapshotRequest;

use ::disk::Point;
use ::disk::convert::{ArchiveExport, Conversion};
use ::disk::salvage::SalvageRequest;
use serde::{Deserialize, Serialize};

/// All requests: about a datastore, its machines, or files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Query capacity, allocation and over-commitment.
    Status,
    /// As `Status`, and count the space of all disks and snapshots.
    StatusSpace,
    /// Check all metadata.
    Check {
        /// Verify the checksums of data as well as metadata.
        data: bool,
        /// Repair what can be repaired.
        repair: bool,
    },
    /// About scrubs.
    Scrub(ScrubRequest),
    /// About disks.
    Disk(DiskRequest),
    /// About snapshots.
    Snapshot(SnapshotRequest),
    /// About labels of disks.
    Label(LabelRequest),
    /// Make clones: all or none.
    Clone {
        /// The disk to clone.
        disk: String,
        /// The state to clone.
        at: Point,
        /// Names of the clones.
        names: Vec<String>,
        /// Make independent copies instead of linked clones.
        full: bool,
    },
    /// Convert a disk or image to a new one.
    Convert(Box<Conversion>),
    /// Write the disks of a machine and its description into an archive.
    ExportArchive(Box<ArchiveExport>),
    /// Extract disks from a datastore that cannot be opened.
    Salvage(Box<SalvageRequest>),
    /// About images.
    Image(ImageRequest),
    /// List the exports.
    ExportList,
    /// Send disks to another server.
    Send(Box<SendRequest>),
    /// Receptions from other servers.
    Receive(ReceiveRequest),
    /// About backups.
    Backup(BackupRequest),
    /// Wait until the requests of disconnected clients have ended.
    Settle,
    /// About machines.
    Machine(Box<MachineRequest>),
    /// About jobs.
    Job(JobRequest),
    /// Subscribe to all changes of the datastore, until cancelled.
    Events,
}

impl Request {
    /// Whether the request may take long: it can then be cancelled and reports progress.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::Status | Self::ExportList | Self::Settle | Self::Receive(_) => false,
            Self::StatusSpace
            | Self::Check { .. }
            | Self::Label(_) // The space of disks whose labels have limits may have to be counted.
            | Self::Convert(_)
            | Self::ExportArchive(_)
            | Self::Salvage(_)
            | Self::Send(_)
            | Self::Events => true,
            Self::Machine(request) => request.verb.takes_long(),
            Self::Job(request) => matches!(request, JobRequest::Wait { .. }),
            Self::Backup(
                BackupRequest::List { .. } | BackupRequest::Key { .. } | BackupRequest::PrepareMachine { .. },
            ) => false,
            Self::Backup(_) => true,
            Self::Image(request) => request.takes_long(),
            Self::Scrub(request) => request.takes_long(),
            Self::Disk(request) => request.takes_long(),
            Self::Snapshot(request) => request.takes_long(),
            Self::Clone { full, .. } => *full,
        }
    }

    /// Whether the requesting process, never the server of the datastore, carries the request out: true for requests
    /// about machines and for a resize that notifies a running machine. These requests may start or change a QEMU
    /// process, which must not depend on a server.
    pub fn is_for_requesting_process(&self) -> bool {
        match self {
            Self::Machine(_) | Self::Disk(DiskRequest::Resize { tell_machine: true, .. }) => true,
            Self::Job(JobRequest::Start(request)) => request.is_for_requesting_process(),
            _ => false,
        }
    }

    /// Whether the request needs an open datastore.
    pub fn needs_datastore(&self) -> bool {
        match self {
            Self::Image(_) | Self::Salvage(_) => false,
            Self::Convert(conversion) => conversion.needs_datastore(),
            Self::Backup(request) => request.needs_datastore(),
            _ => true,
        }
    }
}
