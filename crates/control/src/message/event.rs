//! Changes of a datastore, as subscribers are told of them.

use super::job::JobInfo;
use serde::{Deserialize, Serialize};

/// One change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Counts the events of one run of the server from 1; a subscriber sees no gap except those that [`Change::Missed`]
    /// reports.
    pub number: u64,
    /// When, in seconds since 1970.
    pub time: u64,
    /// What.
    #[serde(flatten)]
    pub change: Change,
}

/// What has changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Change {
    /// The subscription begins; the number is that of the last change before it.
    Subscribed,
    /// A disk is there.
    DiskCreated {
        /// The disk.
        disk: String,
        /// `DISK@SNAPSHOT` that it is a linked clone of.
        origin: Option<String>,
    },
    /// A disk is gone, with its snapshots.
    DiskDeleted {
        /// The disk.
        disk: String,
    },
    /// A disk has another name.
    DiskRenamed {
        /// The name it had.
        disk: String,
        /// The name it has.
        to: String,
    },
    /// A disk has another capacity.
    DiskResized {
        /// The disk.
        disk: String,
        /// In bytes.
        capacity: u64,
    },
    /// A disk is as it was at a snapshot.
    DiskReverted {
        /// The disk.
        disk: String,
        /// The snapshot.
        snapshot: String,
    },
    /// How a disk is stored has changed: format, chain, tunables, space.
    DiskChanged {
        /// The disk.
        disk: String,
        /// By which verb: `disk migrate`.
        by: String,
    },
    /// A snapshot is there.
    SnapshotCreated {
        /// The disk.
        disk: String,
        /// The snapshot.
        snapshot: String,
    },
    /// A snapshot is gone.
    SnapshotDeleted {
        /// The disk.
        disk: String,
        /// The snapshot.
        snapshot: String,
    },
    /// A disk has arrived from another server, or was brought up to date by it.
    DiskReceived {
        /// The disk.
        disk: String,
    },
    /// What had arrived of disks is gone.
    ReceptionDeleted {
        /// Its identity.
        id: String,
    },
    /// A job has begun.
    JobStarted {
        /// The job.
        job: Box<JobInfo>,
    },
    /// A job has ended.
    JobEnded {
        /// The job.
        job: Box<JobInfo>,
    },
    /// The subscriber was too slow, and that many events were dropped here; the number is that of the last of them.
    /// What there is now has to be asked for.
    Missed {
        /// How many.
        count: u64,
    },
}
