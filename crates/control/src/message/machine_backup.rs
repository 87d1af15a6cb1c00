//! Backups of machines: what a user requests, and the replies.

use super::BackupPlace;
use backup::MachineCreated;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use vm::clone::Source;
use vm::definition::Definition;

/// A machine to back up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineBackup {
    /// The machine, or its snapshot. Without a snapshot, one of the current state is taken and kept for the next
    /// backup.
    pub source: Source,
    /// The repository.
    pub place: BackupPlace,
    /// Whether the backups of the disks have all data although they could be based on other backups.
    pub full: bool,
    /// Whether the guest's file systems are frozen by its agent while a snapshot is taken.
    pub quiesce: bool,
    /// Level of compression.
    pub level: i32,
    /// The file of the key with which data is encrypted.
    pub key: Option<PathBuf>,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
}

/// A machine to restore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineRestore {
    /// The repository.
    pub place: BackupPlace,
    /// The backup: its identity or the beginning of the identity, `MACHINE` or `MACHINE@SNAPSHOT`. `None` for the
    /// newest backup of the machine with the same name as the restored machine.
    pub backup: Option<String>,
    /// Name of the restored machine.
    pub name: String,
    /// Whether the machine's disks can be used at once, while their content arrives.
    pub live: bool,
    /// Whether to start the machine.
    pub start: bool,
    /// The file of the key of an encrypted backup.
    pub key: Option<PathBuf>,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
}

/// A machine that was backed up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackedUpMachine {
    /// The backup.
    pub created: MachineCreated,
    /// Consistency of the file systems, if a snapshot was taken for the backup.
    pub quiet: Option<String>,
}

/// A machine that was restored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestoredMachine {
    /// The backup.
    pub id: String,
    /// The snapshot that was backed up, `MACHINE@SNAPSHOT`.
    pub source: String,
    /// The definition of the restored machine.
    pub definition: Definition,
    /// Bytes of data restored; 0 if the content is arriving.
    pub data: u64,
    /// Whether the machine has a new UUID and new MAC addresses, because another machine has those of the backup.
    pub new_identity: bool,
    /// Images that do not exist any more, and are left out of the CD-ROM drives.
    pub ejected: Vec<PathBuf>,
    /// Whether the content of the disks is arriving.
    pub live: bool,
    /// Whether the machine was started.
    pub started: bool,
    /// Duration in seconds.
    pub seconds: f64,
}
