//! Requests about snapshots.

use super::claims::{self, Deed};
use super::{Service, Watch};
use crate::message::{Part, Reply, SnapshotRequest};
use disk::{Datastore, Point, SnapshotInfo, Throttled};
use error::{Error, ErrorKind, Result};

/// Most extents in one partial reply, so that a partial reply fits into a line of the control protocol.
const EXTENTS_PER_BATCH: usize = 4096;

/// Carries out a request about snapshots.
pub fn dispatch(service: &Service, request: SnapshotRequest, watch: &dyn Watch) -> Result<Reply> {
    let datastore = &*service.datastore;
    Ok(match request {
        SnapshotRequest::Create { of, options } => Reply::Snapshots(datastore.create_snapshots(&of, &options)?),
        SnapshotRequest::List { disk } => Reply::Snapshots(datastore.snapshots(disk.as_deref())?),
        SnapshotRequest::Show { disk, name } => Reply::Snapshot(snapshot(datastore, &disk, &name)?),
        SnapshotRequest::Delete { disk, name, direction, rate, force } => {
            let deed = Deed::DeleteSnapshot(&name);
            claims::refuse(service, &disk, deed, force)?;
            datastore.delete_snapshot(&disk, &name, direction, &Throttled { progress: watch, rate })?;
            claims::forget(&service.clients, &disk, deed);
            Reply::Deleted(format!("{disk}@{name}"))
        }
        SnapshotRequest::Revert { disk, name, force } => {
            claims::refuse(service, &disk, Deed::Revert, force)?;
            Reply::Disk(Box::new(datastore.revert(&disk, &name)?))
        }
        SnapshotRequest::Diff { disk, from, to } => diff(datastore, &disk, &from, &to, watch)?,
    })
}

fn snapshot(datastore: &Datastore, disk: &str, name: &str) -> Result<SnapshotInfo> {
    let missing = || Error::new(ErrorKind::NotFound, format!("disk '{disk}' has no snapshot '{name}'"));
    datastore.snapshots(Some(disk))?.into_iter().find(|s| s.name == name).ok_or_else(missing)
}

fn interrupted(what: &str) -> Error {
    Error::new(ErrorKind::Interrupted, format!("{what} was interrupted"))
}

/// Sends the extents in batches, so that a diff of any length needs little memory in the server and in the client.
fn diff(datastore: &Datastore, disk: &str, from: &Point, to: &Point, watch: &dyn Watch) -> Result<Reply> {
    let (mut extents, mut bytes) = (0u64, 0u64);
    let mut batch = Vec::new();
    datastore.diff(disk, from, to, &mut |extent| {
        extents += 1;
        bytes = bytes.saturating_add(extent.length);
        batch.push(extent);
        if batch.len() < EXTENTS_PER_BATCH {
            return Ok(());
        }
        if watch.cancelled() {
            return Err(interrupted(&format!("the diff of disk '{disk}'")));
        }
        watch.part(Part::Extents(std::mem::take(&mut batch)))
    })?;
    if !batch.is_empty() {
        watch.part(Part::Extents(batch))?;
    }
    Ok(Reply::Diff { extents, bytes })
}
