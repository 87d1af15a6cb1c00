//! What can be asked of a disk.

use disk::migrate::{ImportOptions, MigrateOptions};
use disk::{Location, NewDisk, Tuning};
use serde::{Deserialize, Serialize};

/// Which clients of a disk have their connections ended, to reconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reconnect {
    /// No client.
    NoClient,
    /// All.
    All,
    /// One process.
    Process(i32),
}

/// Verbs of disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskRequest {
    /// Make a disk.
    Create {
        /// Its name.
        name: String,
        /// How it is made.
        new: NewDisk,
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
        /// Whose connections are ended for them to learn the new capacity.
        reconnect: Reconnect,
        /// A machine that runs on the disk sees the new capacity. By the process that asks, as all about machines; not
        /// together with `shrink`.
        tell_machine: bool,
    },
    /// Rename a disk.
    Rename {
        /// The disk.
        name: String,
        /// Its new name.
        to: String,
        /// Even if a client may come back to it or a machine has it.
        force: bool,
    },
    /// Delete a disk.
    Delete {
        /// The disk.
        name: String,
        /// Give the snapshots that clones stand on to the clones.
        promote: bool,
        /// Even if a client may come back to it or a machine has it.
        force: bool,
    },
    /// Make a linked clone independent.
    Detach {
        /// The clone.
        name: String,
    },
    /// Figures of a chain.
    Stats {
        /// The disk.
        name: String,
    },
    /// Change tunables of a chain.
    Tune {
        /// The disk.
        name: String,
        /// What to change.
        tuning: Tuning,
    },
    /// Open a disk again that has stopped.
    Reopen {
        /// The disk.
        name: String,
    },
    /// Give a flat disk all its space.
    Inflate {
        /// The disk.
        name: String,
    },
    /// Give back what holds only zeros.
    PunchZero {
        /// The disk.
        name: String,
    },
    /// Free dead grains.
    Wipe {
        /// The disk.
        name: String,
    },
    /// Give free grains back.
    Shrink {
        /// The disk.
        name: String,
    },
    /// Merge a chain into its base.
    Consolidate {
        /// The disk.
        name: String,
        /// Most bytes a second; 0 for as fast as it goes.
        rate: u64,
    },
    /// Move a disk to another format, provisioning type or datastore.
    Migrate {
        /// The disk.
        name: String,
        /// What it is to be.
        target: MigrateOptions,
        /// The other datastore.
        to: Option<Location>,
        /// Most bytes a second; 0 for as fast as it goes.
        rate: u64,
    },
    /// Make a disk of images that are there.
    Import {
        /// The new disk.
        name: String,
        /// How.
        import: ImportOptions,
    },
}

impl DiskRequest {
    /// True for what may take longer than a moment.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::List | Self::Rename { .. } | Self::Stats { .. } | Self::Tune { .. } => false,
            Self::Create { .. }
            | Self::Show { .. }
            | Self::Resize { .. }
            | Self::Delete { .. }
            | Self::Detach { .. }
            | Self::Reopen { .. }
            | Self::Inflate { .. }
            | Self::PunchZero { .. }
            | Self::Wipe { .. }
            | Self::Shrink { .. }
            | Self::Consolidate { .. }
            | Self::Migrate { .. }
            | Self::Import { .. } => true,
        }
    }
}
