//! Notifications of changes of a datastore.

use super::job::JobInfo;
use serde::{Deserialize, Serialize};

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Number of the event, counted from 1 in each run of the server. The only gaps in a subscriber's numbers are those
    /// that [`Change::Missed`] reports.
    pub number: u64,
    /// Time, in seconds since 1970.
    pub time: u64,
    /// The change.
    #[serde(flatten)]
    pub change: Change,
}

/// A change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Change {
    /// The subscription begins; the event has the number of the last change before.
    Subscribed,
    /// A disk was created.
    DiskCreated {
        /// The disk.
        disk: String,
        /// `DISK@SNAPSHOT` that it was cloned from, for a linked clone.
        origin: Option<String>,
    },
    /// A disk was deleted, with its snapshots.
    DiskDeleted {
        /// The disk.
        disk: String,
    },
    /// A disk was renamed.
    DiskRenamed {
        /// The disk's old name.
        disk: String,
        /// The disk's new name.
        to: String,
    },
    /// A disk was resized.
    DiskResized {
        /// The disk.
        disk: String,
        /// The disk's new capacity in bytes.
        capacity: u64,
    },
    /// A disk was reverted to a snapshot.
    DiskReverted {
        /// The disk.
        disk: String,
        /// The snapshot.
        snapshot: String,
    },
    /// The storage of a disk has changed: format, chain, tunables, settings or space.
    DiskChanged {
        /// The disk.
        disk: String,
        /// The command that changed the disk, such as `disk migrate`.
        by: String,
    },
    /// A snapshot was created.
    SnapshotCreated {
        /// The disk.
        disk: String,
        /// The snapshot.
        snapshot: String,
    },
    /// A snapshot was deleted.
    SnapshotDeleted {
        /// The disk.
        disk: String,
        /// The snapshot.
        snapshot: String,
    },
    /// The limits of a label have changed.
    LabelChanged {
        /// The label.
        label: String,
    },
    /// The settings that new disks get have changed.
    DefaultsChanged,
    /// The first write of a disk waits for space.
    WritesWait {
        /// The disk.
        disk: String,
        /// The error of the write.
        reason: String,
    },
    /// No write of a disk waits for space any more.
    WritesGoOn {
        /// The disk.
        disk: String,
        /// Number of waiting writes that were carried out.
        written: u64,
        /// Number of waiting writes that failed.
        refused: u64,
        /// Number of waiting writes that were not answered, because their connections ended.
        dropped: u64,
        /// Time since the first of the waiting writes began to wait, in seconds.
        seconds: u64,
    },
    /// A disk was received from another server, as a new disk or as an update.
    DiskReceived {
        /// The disk.
        disk: String,
    },
    /// A reception and its data were deleted.
    ReceptionDeleted {
        /// The reception's id.
        id: String,
    },
    /// A scrub has found damage.
    DamageFound {
        /// What is wrong.
        problem: String,
        /// From what the damage was repaired; `None` if no good copy exists.
        repaired: Option<String>,
        /// The disks and snapshots that refer to the damaged place, as far as they are known.
        objects: Vec<String>,
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
    /// Events were dropped because the subscriber was too slow; the event number is that of the last dropped event. The
    /// subscriber has to query the current state.
    Missed {
        /// Number of dropped events.
        count: u64,
    },
}
