//! Requests by noun, [`disk`], [`snapshot`], [`image`], [`send`], [`machine`], [`job`]; their good ends in [`reply`],
//! what subscribers are told in [`event`], their encoding in [`line`].

mod disk;
mod event;
mod image;
mod job;
mod line;
mod machine;
mod reply;
mod send;
mod snapshot;

pub use disk::{DiskRequest, Reconnect};
pub use event::{Change, Event};
pub use image::ImageRequest;
pub use job::{JobEnd, JobInfo, JobRequest, JobState};
pub use line::{
    Failure, FromClient, FromServer, Part, ProgressReport, REPLY_LINE_MAX, REQUEST_LINE_MAX, decode, encode,
};
pub use machine::{
    CloneOptions, Cloned, ClonedMachine, MachineActivity, MachineInfo, MachineMemory, MachineReply, MachineRequest,
    MachineSnapshot, MachineSummary, MachineVerb, NewMachine,
};
pub use reply::{ExportInfo, MachineNotice, Reply, Resized, Serving};
pub use send::{ReceiveRequest, SendHow, SendPoint, SendRequest, SendTls, SentDisk};
pub use snapshot::SnapshotRequest;

use ::disk::Point;
use ::disk::convert::Conversion;
use ::disk::salvage::SalvageRequest;
use serde::{Deserialize, Serialize};

/// Everything that can be asked: of an open datastore, of its machines, of files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Capacity, allocation, over-commitment.
    Status,
    /// Walk all metadata.
    Check {
        /// Verify data too.
        data: bool,
        /// Repair what can be repaired.
        repair: bool,
    },
    /// About disks.
    Disk(DiskRequest),
    /// About snapshots.
    Snapshot(SnapshotRequest),
    /// Make clones: all or none.
    Clone {
        /// The disk to clone.
        disk: String,
        /// The state of it to start from.
        at: Point,
        /// Names of the clones.
        names: Vec<String>,
        /// Independent copies instead of linked ones.
        full: bool,
    },
    /// Make a disk or image from the content of another.
    Convert(Box<Conversion>),
    /// Read disks out of a datastore that cannot be opened.
    Salvage(Box<SalvageRequest>),
    /// About images.
    Image(ImageRequest),
    /// What NBD clients can open.
    ExportList,
    /// Send disks to another server.
    Send(Box<SendRequest>),
    /// What other servers send here.
    Receive(ReceiveRequest),
    /// Wait until the requests of clients that have gone are done or given up.
    Settle,
    /// About machines.
    Machine(Box<MachineRequest>),
    /// About jobs.
    Job(JobRequest),
    /// Tell of every change of the datastore, until cancelled.
    Events,
}

impl Request {
    /// True for what may take longer than a moment: it can be cancelled, and tells how far it is.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::Status | Self::ExportList | Self::Settle | Self::Receive(_) => false,
            Self::Check { .. } | Self::Convert(_) | Self::Salvage(_) | Self::Send(_) | Self::Events => true,
            Self::Machine(request) => request.verb.takes_long(),
            Self::Job(request) => matches!(request, JobRequest::Wait { .. }),
            Self::Image(request) => request.takes_long(),
            Self::Disk(request) => request.takes_long(),
            Self::Snapshot(request) => request.takes_long(),
            Self::Clone { full, .. } => *full,
        }
    }

    /// True for requests that the asking process carries out, never the one that serves the datastore: those that start
    /// or change a machine's QEMU, which must depend on no server.
    pub fn is_of_asking_process(&self) -> bool {
        match self {
            Self::Machine(_) | Self::Disk(DiskRequest::Resize { tell_machine: true, .. }) => true,
            Self::Job(JobRequest::Start(request)) => request.is_of_asking_process(),
            _ => false,
        }
    }

    /// True when it is about an open datastore; false for files alone.
    pub fn needs_datastore(&self) -> bool {
        match self {
            Self::Image(_) | Self::Salvage(_) => false,
            Self::Convert(conversion) => conversion.needs_datastore(),
            _ => true,
        }
    }
}
