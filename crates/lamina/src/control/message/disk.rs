//! What can be asked of a disk.

use disk::Provisioning;
use serde::{Deserialize, Serialize};

/// Verbs of disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskRequest {
    /// Make a disk.
    Create {
        /// Its name.
        name: String,
        /// Its capacity in bytes.
        capacity: u64,
        /// How it takes its space.
        provisioning: Provisioning,
    },
    /// All disks.
    List,
    /// One disk, blocks counted.
    Show {
        /// The disk.
        name: String,
    },
    /// Change the capacity of a disk.
    Resize {
        /// The disk.
        name: String,
        /// New capacity in bytes.
        capacity: u64,
        /// Losing the end is meant.
        shrink: bool,
    },
    /// Rename a disk.
    Rename {
        /// The disk.
        name: String,
        /// Its new name.
        to: String,
    },
    /// Delete a disk.
    Delete {
        /// The disk.
        name: String,
        /// Give the snapshots that clones stand on to the clones.
        promote: bool,
    },
    /// Make a linked clone independent.
    Detach {
        /// The clone.
        name: String,
    },
}

impl DiskRequest {
    /// True for what may take longer than a moment.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::List | Self::Rename { .. } => false,
            Self::Create { .. }
            | Self::Show { .. }
            | Self::Resize { .. }
            | Self::Delete { .. }
            | Self::Detach { .. } => true,
        }
    }
}
