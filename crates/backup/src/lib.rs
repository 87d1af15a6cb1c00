//! Backups of snapshots: as objects of a repository, or as one stream in a file or pipe.
//!
//! ```text
//!  create     reads a snapshot, or its differences from another, into packs
//!     |-- stored     a repository: each pack is an object     (repository, objects: in a folder, bucket: of a server)
//!     `-- stream     one sequence of bytes
//!  machine    the backup of a machine: its files, and the backups of its disks
//!  level      one backup that is read, pack by pack
//!  chain      a backup with those on which it is based, as one range of bytes
//!     |-- restore    a disk of a datastore, received as a disk from another datastore is
//!     `-- live       a disk that is used while its content arrives from a repository
//!  verify     reads everything without a datastore
//!  retention  which backups are kept, by rules      readers   which backups disks are being restored from
//!
//!  pack       the format of packs         manifest     the records of a backup
//! ```
//!
//! 1. Only snapshots are backed up, never the changing state of a disk.
//! 2. Everything that is stored has a version and a checksum, and any bytes decode to a valid value or an error.
//! 3. A backup exists once its manifest is durable. The manifest is written last.
//!
//! The formats are described in `docs/format/backup.md`, the reasons for them in `docs/adr/0037-backups.md`.

#![forbid(unsafe_code)]

mod bucket;
mod chain;
mod create;
mod hex;
mod level;
mod live;
mod machine;
mod manifest;
mod objects;
mod pack;
mod place;
mod readers;
mod repository;
mod restore;
mod retention;
mod seal;
mod stored;
mod stream;
#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;
mod verify;

pub use bucket::{Bucket, BucketAddress, Credentials, LockRecord, SCHEME};
pub use chain::{Blocks, Chain, SegmentPlan};
pub use create::{CreateOptions, Created, LEVEL_DEFAULT, LEVEL_MAX};
pub use level::Level;
pub use live::{LIVE_BUCKET_SOURCE, LIVE_SOURCE, LiveBackup, LiveRestoreOptions, LiveRestored, restore_live};
pub use machine::{
    FILES_MAX, MachineBackupInfo, MachineContent, MachineCreated, MachineDescription, MachineDisk, MachineFile,
    MachinePoint, StoredMachine,
};
pub use manifest::{Description, Manifest, PackRecord, Parent, RepositoryRecord};
pub use objects::{Folder, Objects};
pub use pack::Content;
#[doc(hidden)]
pub use pack::{BODY_MAX, HEAD, Head, unpack};
pub use place::RepositoryPlace;
pub use readers::ReaderRecord;
pub use repository::{BackupInfo, Found, Repository};
pub use restore::{RestoreOptions, Restored, restore};
pub use retention::{Judged, Keep, Pruned};
pub use seal::Key;
pub use stream::{FileLevel, Next, StreamLevel, StreamReader, create_file, create_stream, manifest_of};
pub use verify::{Verified, verify_file, verify_stream};
