//! Requests about snapshots.

use disk::{Direction, Point, SnapshotOptions};
use serde::{Deserialize, Serialize};

/// Operations on snapshots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SnapshotRequest {
    /// Take snapshots of several disks at one point in time.
    Create {
        /// Disk and snapshot name of each snapshot.
        of: Vec<(String, String)>,
        /// Options of the snapshots.
        options: SnapshotOptions,
    },
    /// Snapshots of one disk or all.
    List {
        /// The disk.
        disk: Option<String>,
    },
    /// One snapshot.
    Show {
        /// The disk.
        disk: String,
        /// The snapshot's name.
        name: String,
    },
    /// Delete a snapshot.
    Delete {
        /// The disk.
        disk: String,
        /// The snapshot's name.
        name: String,
        /// The direction in which an image of the chain is merged; the cheaper direction if `None`.
        direction: Option<Direction>,
        /// Limit in bytes per second for copied data; 0 for none.
        rate: u64,
        /// Ignore clients that may reconnect.
        force: bool,
    },
    /// Revert the head to a snapshot.
    Revert {
        /// The disk.
        disk: String,
        /// The snapshot's name.
        name: String,
        /// Ignore clients that may reconnect and a machine that uses the disk.
        force: bool,
    },
    /// List the differences between two states.
    Diff {
        /// The disk.
        disk: String,
        /// Earlier state.
        from: Point,
        /// Later state.
        to: Point,
    },
}

impl SnapshotRequest {
    /// Whether the request may take long.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::Create { .. } | Self::List { .. } | Self::Show { .. } => false,
            Self::Delete { .. } | Self::Revert { .. } | Self::Diff { .. } => true,
        }
    }
}
