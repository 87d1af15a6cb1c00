//! Arguments of the commands about backups.

use crate::cli::address::{StateAddress, absolute, parse_disk};
use crate::cli::size::parse_rate;
use backup::{BucketAddress, Credentials, Keep, LEVEL_DEFAULT, LEVEL_MAX};
use clap::{Args, Subcommand};
use control::{BackupCreate, BackupPlace, BackupRequest, BackupRestore, Request};
use disk::Point;
use std::path::PathBuf;
use std::str::FromStr;

/// Scheme of a backup in one file.
const FILE: &str = "file:";

/// Where backups are: `-`, `file:PATH`, the folder of a repository, or `s3://BUCKET/PREFIX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlaceAddress {
    /// Standard input or output.
    Stream,
    /// A file.
    File(PathBuf),
    /// A folder.
    Folder(PathBuf),
    /// A place in a bucket.
    Bucket(BucketAddress),
}

impl FromStr for PlaceAddress {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "-" {
            return Ok(Self::Stream);
        }
        if let Some(path) = text.strip_prefix(FILE) {
            return match path {
                "" => Err("a path cannot be empty".into()),
                path => Ok(Self::File(path.into())),
            };
        }
        if text.starts_with(backup::SCHEME) {
            return text.parse().map(Self::Bucket);
        }
        let scheme = text.split('/').next().and_then(|first| first.split_once(':'));
        match scheme {
            Some((scheme, _)) => Err(format!(
                "'{scheme}:' is not known: give the folder of a repository, s3://BUCKET/PREFIX for a repository in a \
                 bucket, file:PATH for one file, or - for standard input or output; a folder with a colon in its name \
                 is written './{text}'"
            )),
            None if text.is_empty() => Err("a path cannot be empty".into()),
            None => Ok(Self::Folder(text.into())),
        }
    }
}

impl PlaceAddress {
    /// The place with an absolute path, because the server has another working directory, and with what the environment
    /// of this process says about buckets. The path of a stream is empty until the program has a socket for it.
    pub fn place(&self, server: &S3Server) -> Result<BackupPlace, String> {
        if !matches!(self, Self::Bucket(_)) && server.s3_endpoint.is_some() {
            return Err("--s3-endpoint is the server of a bucket: give s3://BUCKET/PREFIX".into());
        }
        Ok(match self {
            Self::Stream => BackupPlace::Process(PathBuf::new()),
            Self::File(path) => BackupPlace::File(absolute(path)?),
            Self::Folder(path) => BackupPlace::Folder(absolute(path)?),
            Self::Bucket(address) => {
                let address = address.clone().completed(server.s3_endpoint.as_deref());
                BackupPlace::Bucket {
                    address: Box::new(address.map_err(|error| error.to_string())?),
                    credentials: Credentials::from_environment().map(Box::new),
                }
            }
        })
    }

    pub fn is_repository(&self) -> bool {
        matches!(self, Self::Folder(_) | Self::Bucket(_))
    }
}

/// The server of a bucket.
#[derive(Debug, Default, Args)]
pub struct S3Server {
    /// URL of the S3-compatible server of a bucket. Default: AWS_ENDPOINT_URL, or Amazon's server of the region
    /// AWS_REGION. AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN are the credentials.
    #[arg(long, value_name = "URL")]
    s3_endpoint: Option<String>,
}

/// How a backup is stored.
#[derive(Debug, Args)]
pub struct Storing {
    /// Level of the compression by zstd.
    #[arg(long, value_name = "N", default_value_t = LEVEL_DEFAULT,
        value_parser = clap::value_parser!(i32).range(1..=i64::from(LEVEL_MAX)))]
    pub level: i32,
    #[command(flatten)]
    pub transfer: Transfer,
}

/// How the data of a backup is stored or read.
#[derive(Debug, Args)]
pub struct Transfer {
    /// Limit of bytes per second that are read from or written to a disk, such as 100M. 0 is no limit.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
    pub rate: u64,
    /// The file of the key with which the data is encrypted, which 'lamina backup key' makes.
    #[arg(long, value_name = "FILE", env = "LAMINA_BACKUP_KEY")]
    pub key_file: Option<PathBuf>,
    #[command(flatten)]
    pub server: S3Server,
}

/// Back up snapshots of disks to a folder, a bucket, a file or a pipe, and restore them. 'lamina vm backup' does so for
/// machines.
#[derive(Debug, Subcommand)]
pub enum BackupCommand {
    /// Back up a snapshot of a disk. An interrupted backup continues when the command is repeated.
    Create {
        /// DISK@SNAPSHOT; or DISK to take a snapshot of the current state, which is kept for the next backup.
        #[arg(value_name = "SOURCE")]
        source: StateAddress,
        /// The folder of a repository, created if it is missing; s3://BUCKET/PREFIX; file:PATH for one file; - for
        /// standard output.
        #[arg(value_name = "TARGET")]
        target: PlaceAddress,
        /// Store all data, also if the repository has a backup on which this one can be based.
        #[arg(long)]
        full: bool,
        /// In a file or stream: store only what has changed since this earlier snapshot of the disk.
        #[arg(long, value_name = "SNAPSHOT", value_parser = parse_disk, conflicts_with = "full")]
        from: Option<String>,
        #[command(flatten)]
        storing: Storing,
    },
    /// Make a key for encrypting backups. Without the key, the encrypted backups cannot be restored.
    Key {
        /// The new file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// List the backups in a repository, or the backup in a file.
    List {
        /// The folder of a repository, s3://BUCKET/PREFIX, or file:PATH.
        #[arg(value_name = "TARGET")]
        target: PlaceAddress,
        #[command(flatten)]
        server: S3Server,
    },
    /// Read backups and verify every byte. The datastore is not needed.
    Verify {
        /// The folder of a repository, s3://BUCKET/PREFIX, or file:PATH.
        #[arg(value_name = "TARGET")]
        target: PlaceAddress,
        /// The backups: an id or its beginning, DISK for its newest backup, or DISK@SNAPSHOT; machine:VM or
        /// machine:VM@SNAPSHOT for a machine with its disks. Default: all.
        #[arg(value_name = "BACKUP")]
        backups: Vec<String>,
        /// The key of encrypted backups.
        #[arg(long, value_name = "FILE", env = "LAMINA_BACKUP_KEY")]
        key_file: Option<PathBuf>,
        #[command(flatten)]
        server: S3Server,
    },
    /// Restore a backup as a disk. An interrupted restore continues when the command is repeated.
    Restore {
        /// The folder of a repository; s3://BUCKET/PREFIX; file:PATH; - for standard input.
        #[arg(value_name = "SOURCE")]
        source: PlaceAddress,
        /// Name of the restored disk.
        #[arg(value_name = "DISK", value_parser = parse_disk)]
        name: String,
        /// The backup: an id or its beginning, DISK for its newest backup, or DISK@SNAPSHOT. Default: the newest backup
        /// of the disk with the same name as the restored disk.
        #[arg(long, value_name = "BACKUP")]
        backup: Option<String>,
        /// Update an existing disk, which must not have changed since the snapshot on which the backup is based.
        #[arg(long, conflicts_with = "backup")]
        update: bool,
        /// From a repository: make the disk usable at once. What has not arrived yet is read from the backup, and the
        /// server of the datastore copies it meanwhile.
        #[arg(long, conflicts_with = "update")]
        live: bool,
        #[command(flatten)]
        transfer: Transfer,
    },
    /// Delete backups of a repository. Refused if other backups are based on them, or a machine's backup needs them.
    Delete {
        /// The folder of the repository, or s3://BUCKET/PREFIX.
        #[arg(value_name = "REPOSITORY")]
        repository: PlaceAddress,
        /// The backups: an id or its beginning, DISK for its newest backup, or DISK@SNAPSHOT; machine:VM or
        /// machine:VM@SNAPSHOT for a machine, with the backups of its disks that were made for it.
        #[arg(value_name = "BACKUP", required = true)]
        backups: Vec<String>,
        /// Delete also backups from which a disk is being restored with --live: blocks of that disk that have not
        /// arrived are lost.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        server: S3Server,
    },
    /// Delete the backups of a repository that rules do not keep. A backup that a kept backup needs is kept too.
    Prune {
        /// The folder of the repository, or s3://BUCKET/PREFIX.
        #[arg(value_name = "REPOSITORY")]
        repository: PlaceAddress,
        /// The rules, for each disk and machine: how many of the newest backups (last), and of how many hours, days,
        /// weeks, months and years the newest backup (hourly, daily, weekly, monthly, yearly); such as
        /// daily=7,weekly=4.
        #[arg(long, value_name = "RULES", required = true)]
        keep: Keep,
        /// Show what would be deleted, and delete nothing.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        server: S3Server,
    },
}

impl BackupCommand {
    /// The request; an error if the arguments contradict each other.
    pub fn request(&self) -> Result<Request, String> {
        let key = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
        let stored = |target: &PlaceAddress, server: &S3Server| match target {
            PlaceAddress::Stream => Err("give the folder of a repository, s3://BUCKET/PREFIX, or file:PATH".to_owned()),
            target => target.place(server),
        };
        let repository = |place: &PlaceAddress, server: &S3Server| match place.is_repository() {
            true => place.place(server),
            false => Err("only backups of a repository, which is a folder or in a bucket, can be deleted".into()),
        };
        Ok(Request::Backup(match self {
            Self::Create { source, target, full, from, storing } => BackupRequest::Create(BackupCreate {
                disk: source.disk.clone(),
                snapshot: match &source.at {
                    Point::Snapshot(name) => Some(name.clone()),
                    Point::Head => None,
                },
                place: target.place(&storing.transfer.server)?,
                full: *full,
                from: from.clone(),
                level: storing.level,
                rate: storing.transfer.rate,
                key: key(&storing.transfer.key_file)?,
            }),
            Self::Key { file } => BackupRequest::Key { path: absolute(file)? },
            Self::List { target, server } => BackupRequest::List { place: stored(target, server)? },
            Self::Verify { target, backups, key_file, server } => {
                BackupRequest::Verify { place: stored(target, server)?, backups: backups.clone(), key: key(key_file)? }
            }
            Self::Restore { source, name, backup, update, live, transfer } => {
                if *live && !source.is_repository() {
                    let text = "only a repository can be read at any place: --live needs the folder of one, or \
                                s3://BUCKET/PREFIX";
                    return Err(text.into());
                }
                BackupRequest::Restore(BackupRestore {
                    place: source.place(&transfer.server)?,
                    backup: backup.clone(),
                    name: name.clone(),
                    update: *update,
                    live: *live,
                    rate: transfer.rate,
                    key: key(&transfer.key_file)?,
                })
            }
            Self::Delete { repository: place, backups, force, server } => {
                BackupRequest::Delete { place: repository(place, server)?, backups: backups.clone(), force: *force }
            }
            Self::Prune { repository: place, keep, dry_run, server } => {
                BackupRequest::Prune { place: repository(place, server)?, keep: keep.clone(), dry_run: *dry_run }
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn places_are_folders_files_or_streams() {
        let place = |text: &str| text.parse::<PlaceAddress>();
        assert_eq!(place("-").unwrap(), PlaceAddress::Stream);
        assert_eq!(place("file:a/b:c").unwrap(), PlaceAddress::File("a/b:c".into()));
        assert_eq!(place("/srv/a:b").unwrap(), PlaceAddress::Folder("/srv/a:b".into()));
        assert_eq!(place("./a:b").unwrap(), PlaceAddress::Folder("./a:b".into()));
        assert!(matches!(place("s3://bucket/a/b").unwrap(), PlaceAddress::Bucket(at) if at.prefix == "a/b"));
        for text in ["", "file:", "s3:bucket", "s3://", "a:b"] {
            assert!(place(text).is_err(), "{text}");
        }
    }
}
