//! Requests about backups.

use backup::{BucketAddress, Credentials, Keep, MachinePoint};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Where backups are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum BackupPlace {
    /// A repository in a folder.
    Folder(PathBuf),
    /// A repository in a bucket.
    Bucket {
        /// The bucket, the prefix, and the server.
        address: Box<BucketAddress>,
        /// The credentials; `None` for those in the environment of the process that carries the request out. A restore
        /// of a disk that can be used at once always uses those, because the next server has no others.
        credentials: Option<Box<Credentials>>,
    },
    /// One backup in a file.
    File(PathBuf),
    /// The requesting process, which listens at this Unix socket for one connection that carries the stream.
    Process(PathBuf),
}

/// A backup to make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupCreate {
    /// The disk.
    pub disk: String,
    /// The snapshot; `None` to take one of the current state, which is kept for the next backup.
    pub snapshot: Option<String>,
    /// Where the backup is stored.
    pub place: BackupPlace,
    /// In a repository: whether the backup has all data although it could be based on another backup.
    pub full: bool,
    /// In a file or stream: the earlier snapshot of the disk since which changes are stored; `None` for all data.
    pub from: Option<String>,
    /// Level of compression.
    pub level: i32,
    /// The file of the key with which data is encrypted.
    pub key: Option<PathBuf>,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
}

/// A backup of a machine to make, by the process that has the machine's disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupMachine {
    /// The machine at a snapshot, with its files.
    pub point: MachinePoint,
    /// The machine's disks, each with the name of its snapshot.
    pub disks: Vec<(String, String)>,
    /// The repository.
    pub place: BackupPlace,
    /// Whether the backups of the disks have all data although they could be based on other backups.
    pub full: bool,
    /// Level of compression.
    pub level: i32,
    /// The file of the key with which data is encrypted.
    pub key: Option<PathBuf>,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
}

/// A backup to restore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupRestore {
    /// Where the backup is.
    pub place: BackupPlace,
    /// In a repository: the identity of the backup or its beginning, `DISK` or `DISK@SNAPSHOT`. `None` for the newest
    /// backup of the disk with the same name as the restored disk.
    pub backup: Option<String>,
    /// Name of the restored disk.
    pub name: String,
    /// Whether an existing disk is updated by an increment in a file or stream.
    pub update: bool,
    /// From a repository: whether the disk can be used at once, while its content arrives.
    #[serde(default)]
    pub live: bool,
    /// The file of the key of an encrypted backup.
    pub key: Option<PathBuf>,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
}

/// Operations on backups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum BackupRequest {
    /// Back up a snapshot.
    Create(BackupCreate),
    /// Make a repository for the backups of a machine, if it is missing, and return its identity and which backups of
    /// the machine were interrupted.
    PrepareMachine {
        /// The repository.
        place: BackupPlace,
        /// The machine's UUID.
        uuid: String,
    },
    /// Back up a machine.
    CreateMachine(Box<BackupMachine>),
    /// Make a key for encrypting backups.
    Key {
        /// The new file.
        path: PathBuf,
    },
    /// List backups.
    List {
        /// Where the backups are.
        place: BackupPlace,
    },
    /// Read and verify backups.
    Verify {
        /// Where the backups are.
        place: BackupPlace,
        /// In a repository: the backups; empty for all.
        backups: Vec<String>,
        /// The file of the key of encrypted backups.
        key: Option<PathBuf>,
    },
    /// Restore a backup as a disk.
    Restore(BackupRestore),
    /// Delete backups of a repository.
    Delete {
        /// The repository.
        place: BackupPlace,
        /// The backups.
        backups: Vec<String>,
        /// Whether to delete also backups from which a disk is being restored.
        #[serde(default)]
        force: bool,
    },
    /// Delete the backups of a repository that rules do not keep.
    Prune {
        /// The repository.
        place: BackupPlace,
        /// The rules.
        keep: Keep,
        /// Only report what would be deleted.
        dry_run: bool,
    },
}

impl BackupRequest {
    /// Whether the request needs an open datastore.
    pub fn needs_datastore(&self) -> bool {
        matches!(self, Self::Create(_) | Self::Restore(_) | Self::PrepareMachine { .. } | Self::CreateMachine(_))
    }

    /// Where the backups are; `None` for a request without backups.
    pub fn place(&self) -> Option<&BackupPlace> {
        Some(match self {
            Self::Key { .. } => return None,
            Self::Create(create) => &create.place,
            Self::CreateMachine(create) => &create.place,
            Self::Restore(restore) => &restore.place,
            Self::List { place }
            | Self::PrepareMachine { place, .. }
            | Self::Verify { place, .. }
            | Self::Delete { place, .. }
            | Self::Prune { place, .. } => place,
        })
    }

    /// As [`BackupRequest::place`], to change it.
    pub fn place_mut(&mut self) -> Option<&mut BackupPlace> {
        Some(match self {
            Self::Key { .. } => return None,
            Self::Create(create) => &mut create.place,
            Self::CreateMachine(create) => &mut create.place,
            Self::Restore(restore) => &mut restore.place,
            Self::List { place }
            | Self::PrepareMachine { place, .. }
            | Self::Verify { place, .. }
            | Self::Delete { place, .. }
            | Self::Prune { place, .. } => place,
        })
    }
}
