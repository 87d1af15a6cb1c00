//! What can be asked of snapshots.

use disk::{Direction, Point, SnapshotOptions};
use serde::{Deserialize, Serialize};

/// Verbs of snapshots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SnapshotRequest {
    /// Take snapshots of several disks at one point.
    Create {
        /// Disk and snapshot name.
        of: Vec<(String, String)>,
        /// How.
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
        /// The snapshot.
        name: String,
    },
    /// Delete a snapshot.
    Delete {
        /// The disk.
        disk: String,
        /// The snapshot.
        name: String,
        /// Which way an image is merged; the cheaper one if nothing is said.
        direction: Option<Direction>,
        /// Most bytes a second that are copied; 0 for as fast as it goes.
        rate: u64,
        /// Even if a client may come back to it.
        force: bool,
    },
    /// Make the head equal to a snapshot.
    Revert {
        /// The disk.
        disk: String,
        /// The snapshot.
        name: String,
        /// Even if a client may come back to the disk or a machine has it.
        force: bool,
    },
    /// What changed between two states.
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
    /// True for what may take longer than a moment.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::Create { .. } | Self::List { .. } | Self::Show { .. } => false,
            Self::Delete { .. } | Self::Revert { .. } | Self::Diff { .. } => true,
        }
    }
}
