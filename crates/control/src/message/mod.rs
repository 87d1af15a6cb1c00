//! The messages of the control protocol, by noun: [`disk`], [`snapshot`], [`image`], [`send`]; their ends in
//! [`reply`], their encoding in [`line`].

mod disk;
mod image;
mod line;
mod reply;
mod send;
mod snapshot;

pub use disk::{DiskRequest, Reconnect};
pub use image::ImageRequest;
pub use line::{FromClient, FromServer, ProgressReport, REPLY_LINE_MAX, REQUEST_LINE_MAX, decode, encode};
pub use reply::{ExportInfo, Reply, Resized, Serving};
pub use send::{ReceiveRequest, SendPoint, SendRequest, SendTls, SentDisk};
pub use snapshot::SnapshotRequest;

use ::disk::Point;
use ::disk::convert::Conversion;
use ::disk::salvage::SalvageRequest;
use serde::{Deserialize, Serialize};

/// Everything that can be asked of an open datastore.
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
}

impl Request {
    /// True for what may take longer than a moment: it can be cancelled, and tells how far it is.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::Status | Self::ExportList | Self::Settle | Self::Receive(_) => false,
            Self::Check { .. } | Self::Convert(_) | Self::Salvage(_) | Self::Send(_) => true,
            Self::Image(request) => request.takes_long(),
            Self::Disk(request) => request.takes_long(),
            Self::Snapshot(request) => request.takes_long(),
            Self::Clone { full, .. } => *full,
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
