//! Arguments of the commands about snapshots.

use super::disk::only_one;
use crate::cli::address::{SnapshotAddress, StateAddress, parse_disk};
use crate::cli::format::parse_delta;
use crate::cli::size::parse_rate;
use clap::Subcommand;
use control::{DiskRequest, Request, SnapshotRequest};
use disk::{Deletion, DeltaFormat, Direction, Point, SnapshotOptions};
use std::path::PathBuf;

/// Subcommands of `lamina snapshot`.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take snapshots. Snapshots of several disks are taken at one point in time.
    Create {
        /// Disk and name of the new snapshot.
        #[arg(value_name = "DISK@SNAPSHOT", required = true)]
        snapshots: Vec<SnapshotAddress>,
        /// A description, for disks in VMware's formats.
        #[arg(long, value_name = "TEXT")]
        description: Option<String>,
        /// The folder for the new image, instead of the disk's own; for disks in VMware's formats.
        #[arg(long, value_name = "DIR")]
        folder: Option<PathBuf>,
        /// The format of the new image: vmfssparse, sesparse or vsansparse.
        #[arg(long, value_name = "FORMAT", value_parser = parse_delta)]
        delta: Option<DeltaFormat>,
    },
    /// List the snapshots of one disk, or of all disks, as a tree.
    List {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        disk: Option<String>,
        /// Show the space of each disk and snapshot instead: mapped, stored, shared, exclusive.
        #[arg(long)]
        space: bool,
    },
    /// Show one snapshot.
    Show {
        /// The snapshot.
        #[arg(value_name = "DISK@SNAPSHOT")]
        snapshot: SnapshotAddress,
    },
    /// Delete a snapshot; other states of the disk keep their data.
    Delete {
        /// The snapshot. With --dry-run, one or more snapshots.
        #[arg(value_name = "DISK@SNAPSHOT", required = true)]
        snapshots: Vec<SnapshotAddress>,
        /// Show what deleting the snapshots together would free, and delete nothing.
        #[arg(long)]
        dry_run: bool,
        /// Merge the snapshot's image into the newer image. Default: the direction that copies less.
        #[arg(long, conflicts_with = "down")]
        up: bool,
        /// Merge the newer image into the snapshot's image.
        #[arg(long)]
        down: bool,
        /// Delete the snapshot even if a client that lost its connection may reconnect to it.
        #[arg(long)]
        force: bool,
        /// Limit of copied bytes per second, such as 100M. 0 is no limit.
        #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
        rate: u64,
    },
    /// Revert a disk to a snapshot; later writes are lost.
    Revert {
        /// The snapshot.
        #[arg(value_name = "DISK@SNAPSHOT")]
        snapshot: SnapshotAddress,
        /// Revert even if a client that lost its connection may reconnect to the disk, or a machine uses it.
        #[arg(long)]
        force: bool,
    },
    /// List the extents that changed between a snapshot and another state of the same disk.
    Diff {
        /// The earlier state.
        #[arg(value_name = "DISK@SNAPSHOT")]
        from: SnapshotAddress,
        /// The later state: DISK@SNAPSHOT, or DISK for the current state (default).
        #[arg(value_name = "STATE")]
        to: Option<StateAddress>,
    },
}

impl SnapshotCommand {
    /// The request; an error if the arguments contradict each other.
    pub fn request(&self) -> Result<Request, String> {
        let pair = |snapshot: &SnapshotAddress| (snapshot.disk.clone(), snapshot.name.clone());
        Ok(Request::Snapshot(match self {
            Self::Create { snapshots, description, folder, delta } => SnapshotRequest::Create {
                of: snapshots.iter().map(pair).collect(),
                options: SnapshotOptions {
                    description: description.clone().unwrap_or_default(),
                    // An absolute path, because the server has another working directory.
                    folder: folder.as_ref().map(std::path::absolute).transpose().map_err(|e| e.to_string())?,
                    delta: *delta,
                },
            },
            Self::List { disk, space: true } => return Ok(Request::Disk(DiskRequest::Space { name: disk.clone() })),
            Self::List { disk, space: false } => SnapshotRequest::List { disk: disk.clone() },
            Self::Show { snapshot } => {
                SnapshotRequest::Show { disk: snapshot.disk.clone(), name: snapshot.name.clone() }
            }
            Self::Delete { snapshots, dry_run, up, down, rate, force } => {
                let direction = match (up, down) {
                    (true, _) => Some(Direction::Up),
                    (_, true) => Some(Direction::Down),
                    _ => None,
                };
                if *dry_run {
                    let snapshots = snapshots.iter().map(pair).collect();
                    let deletion = Deletion { snapshots, direction, ..Deletion::default() };
                    return Ok(Request::Disk(DiskRequest::WouldFree { deletion, force: *force }));
                }
                let (disk, name) = pair(only_one(snapshots)?);
                SnapshotRequest::Delete { disk, name, direction, rate: *rate, force: *force }
            }
            Self::Revert { snapshot, force } => {
                SnapshotRequest::Revert { disk: snapshot.disk.clone(), name: snapshot.name.clone(), force: *force }
            }
            Self::Diff { from, to } => {
                if let Some(other) = to.as_ref().filter(|to| to.disk != from.disk) {
                    return Err(format!(
                        "'{}' and '{}' are different disks: a diff compares two states of one disk",
                        from.disk, other.disk
                    ));
                }
                SnapshotRequest::Diff {
                    disk: from.disk.clone(),
                    from: Point::Snapshot(from.name.clone()),
                    to: to.as_ref().map_or(Point::Head, |to| to.at.clone()),
                }
            }
        }))
    }
}
