//! Requests about disks.

use disk::migrate::{ImportOptions, MigrateOptions};
use disk::{Compression, Deduplication, DefaultsChange, Deletion, Location, NewDisk, SettingsChange, Tuning};
use serde::{Deserialize, Serialize};

/// The clients of a resized disk whose connections are ended, so that they reconnect and see the new capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reconnect {
    /// No clients.
    NoClient,
    /// All clients.
    All,
    /// Clients of one process.
    Process(i32),
}

/// Operations on disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskRequest {
    /// Create a disk.
    Create {
        /// The disk's name.
        name: String,
        /// The parameters of the disk.
        new: NewDisk,
        /// Settings other than the defaults.
        settings: SettingsChange,
    },
    /// All disks.
    List,
    /// The disks with a label: `key=value`, or a key with any value.
    Labelled {
        /// The label.
        label: String,
    },
    /// One disk, with its block counts.
    Show {
        /// The disk's name.
        name: String,
    },
    /// Change the capacity of a disk.
    Resize {
        /// The disk's name.
        name: String,
        /// New capacity in bytes.
        capacity: u64,
        /// Confirms that data at the end may be lost.
        shrink: bool,
        /// The clients whose connections are ended, so that they see the new capacity.
        reconnect: Reconnect,
        /// Whether a running machine that uses the disk is notified of the new capacity. The requesting process does
        /// this, as for all requests about machines. Not together with `shrink`.
        tell_machine: bool,
    },
    /// Rename a disk.
    Rename {
        /// The disk's name.
        name: String,
        /// The disk's new name.
        to: String,
        /// Ignore clients that may reconnect and a machine that uses the disk.
        force: bool,
    },
    /// Delete a disk.
    Delete {
        /// The disk's name.
        name: String,
        /// Hand over the snapshots that clones are based on to the clones.
        promote: bool,
        /// Ignore clients that may reconnect and a machine that uses the disk.
        force: bool,
    },
    /// What a deletion would free. Nothing is deleted.
    WouldFree {
        /// The disks and snapshots.
        deletion: Deletion,
        /// Ignore clients that may reconnect and machines that use the disks.
        force: bool,
    },
    /// The space of one disk or of all disks, with their snapshots.
    Space {
        /// The disk's name.
        name: Option<String>,
    },
    /// Make a linked clone independent.
    Detach {
        /// The clone's name.
        name: String,
    },
    /// Statistics of a chain.
    Stats {
        /// The disk's name.
        name: String,
    },
    /// Change tunables of a chain.
    Tune {
        /// The disk's name.
        name: String,
        /// What to change.
        tuning: Tuning,
    },
    /// Change the settings of a disk.
    Edit {
        /// The disk's name.
        name: String,
        /// What to change.
        settings: SettingsChange,
    },
    /// Show or change the settings that new disks get.
    Defaults {
        /// What to change.
        change: DefaultsChange,
    },
    /// Open a stopped disk again.
    Reopen {
        /// The disk's name.
        name: String,
    },
    /// Allocate all space of a flat disk.
    Inflate {
        /// The disk's name.
        name: String,
    },
    /// Return blocks that contain only zeros to the file system.
    PunchZero {
        /// The disk's name.
        name: String,
    },
    /// Free grains that nothing references.
    Wipe {
        /// The disk's name.
        name: String,
    },
    /// Return free grains to the file system.
    Shrink {
        /// The disk's name.
        name: String,
    },
    /// Give back what the guest of a disk does not use.
    Reclaim {
        /// The disk's name.
        name: String,
        /// Count only, and change nothing.
        dry_run: bool,
    },
    /// Show what each guest does not use, and change nothing.
    Reclaimable,
    /// Compress a native disk and its snapshots, and store equal blocks once.
    Optimize {
        /// The disk's name.
        name: String,
        /// The method: `lz4`, `zstd:` and a level, or `off`.
        compression: Compression,
        /// The data among which equal blocks are found.
        #[serde(default)]
        dedup: Deduplication,
        /// Memory for the prints of the blocks that are compared, in bytes; `None` for that of the process with the
        /// datastore. Less than 144 KiB counts as that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dedup_memory: Option<u64>,
        /// Limit of bytes read and written per second; 0 is no limit.
        rate: u64,
    },
    /// Merge a chain into its base.
    Consolidate {
        /// The disk's name.
        name: String,
        /// Limit in bytes per second; 0 for none.
        rate: u64,
    },
    /// Migrate a disk to another format, provisioning type or datastore.
    Migrate {
        /// The disk's name.
        name: String,
        /// The new format and provisioning type.
        target: MigrateOptions,
        /// The datastore to which the disk is migrated; `None` if the disk stays in its datastore.
        to: Option<Location>,
        /// Migrate the disk to another datastore although a machine uses it.
        force: bool,
        /// Limit in bytes per second; 0 for none.
        rate: u64,
    },
    /// Create a disk from existing images.
    Import {
        /// The new disk's name.
        name: String,
        /// Options of the import.
        import: ImportOptions,
    },
}

impl DiskRequest {
    /// Whether the request may take long.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::List
            | Self::Labelled { .. }
            | Self::Rename { .. }
            | Self::Stats { .. }
            | Self::Tune { .. }
            | Self::Edit { .. }
            | Self::Defaults { .. } => false,
            Self::Create { .. }
            | Self::Show { .. }
            | Self::Resize { .. }
            | Self::Delete { .. }
            | Self::WouldFree { .. }
            | Self::Space { .. }
            | Self::Detach { .. }
            | Self::Reopen { .. }
            | Self::Inflate { .. }
            | Self::PunchZero { .. }
            | Self::Wipe { .. }
            | Self::Shrink { .. }
            | Self::Reclaim { .. }
            | Self::Reclaimable
            | Self::Optimize { .. }
            | Self::Consolidate { .. }
            | Self::Migrate { .. }
            | Self::Import { .. } => true,
        }
    }
}
