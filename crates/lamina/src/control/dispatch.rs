//! The one place where requests become calls of the datastore.

use super::message::{ExportInfo, Reply, Request, Serving};
use crate::serve::uri;
use disk::{ChangedExtent, CheckOptions, Datastore, Error, ErrorKind, Point, Progress, Result, SnapshotInfo};

/// Extents handed on at once: one line of the control protocol holds them easily.
const EXTENTS_PER_BATCH: usize = 4096;

/// What requests are asked of.
#[derive(Clone, Copy)]
pub struct Service<'a> {
    /// The datastore, open in this process.
    pub datastore: &'a Datastore,
    /// How this process serves it, if it does.
    pub serving: Option<&'a Serving>,
}

/// Follows a request: how far it is, whether it is still wanted, and the parts of an answer too long to hold.
pub trait Watch: Progress {
    /// Takes the next extents of a diff. An error ends the diff.
    fn extents(&self, batch: Vec<ChangedExtent>) -> Result<()>;
}

/// Carries out one request.
pub fn dispatch(service: Service<'_>, request: Request, watch: &dyn Watch) -> Result<Reply> {
    let datastore = service.datastore;
    // The trait object of the watch as one of its supertrait.
    let progress: &dyn Progress = watch;
    Ok(match request {
        Request::Status => Reply::Status { status: datastore.status()?, serving: service.serving.cloned() },
        Request::Check { data, repair } => Reply::Check(datastore.check(CheckOptions { data, repair }, progress)?),
        Request::DiskCreate { name, capacity, provisioning } => {
            Reply::Disk(datastore.create_disk(&name, capacity, provisioning, progress)?)
        }
        Request::DiskList => Reply::Disks(datastore.disks()?),
        Request::DiskShow { name } => Reply::Disk(datastore.disk(&name)?),
        Request::DiskResize { name, capacity, shrink } => Reply::Disk(datastore.resize_disk(&name, capacity, shrink)?),
        Request::DiskRename { name, to } => Reply::Disk(datastore.rename_disk(&name, &to)?),
        Request::DiskDelete { name, promote } => {
            datastore.delete_disk(&name, promote)?;
            Reply::Deleted(name)
        }
        Request::DiskDetach { name } => Reply::Disk(datastore.detach(&name, progress)?),
        Request::SnapshotCreate { of } => Reply::Snapshots(datastore.create_snapshots(&of)?),
        Request::SnapshotList { disk } => Reply::Snapshots(datastore.snapshots(disk.as_deref())?),
        Request::SnapshotShow { disk, name } => Reply::Snapshot(snapshot(datastore, &disk, &name)?),
        Request::SnapshotDelete { disk, name } => {
            datastore.delete_snapshot(&disk, &name)?;
            Reply::Deleted(format!("{disk}@{name}"))
        }
        Request::SnapshotRevert { disk, name } => Reply::Disk(datastore.revert(&disk, &name)?),
        Request::SnapshotDiff { disk, from, to } => diff(datastore, &disk, &from, &to, watch)?,
        Request::Clone { disk, at, names, full: false } => {
            Reply::Disks(datastore.clone_linked(&disk, &at, &names, progress)?)
        }
        Request::Clone { disk, at, names, full: true } => clone_full(datastore, &disk, &at, &names, progress)?,
        Request::ExportList => Reply::Exports(
            datastore
                .device_names()
                .into_iter()
                .map(|name| ExportInfo {
                    read_only: name.contains('@') || service.serving.is_some_and(|s| s.read_only),
                    uris: service.serving.map(|s| uri::of_export(s, &name)).unwrap_or_default(),
                    name,
                })
                .collect(),
        ),
    })
}

fn snapshot(datastore: &Datastore, disk: &str, name: &str) -> Result<SnapshotInfo> {
    let missing = || Error::new(ErrorKind::NotFound, format!("disk '{disk}' has no snapshot '{name}'"));
    datastore.snapshots(Some(disk))?.into_iter().find(|s| s.name == name).ok_or_else(missing)
}

fn interrupted(what: &str) -> Error {
    Error::new(ErrorKind::Interrupted, format!("{what} was interrupted"))
}

/// Hands the extents on in batches, so that a diff of any length takes little memory on both sides.
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
        watch.extents(std::mem::take(&mut batch))
    })?;
    if !batch.is_empty() {
        watch.extents(batch)?;
    }
    Ok(Reply::Diff { extents, bytes })
}

/// The progress of one of several equal pieces of work.
struct Share<'a> {
    whole: &'a dyn Progress,
    index: u64,
    count: u64,
}

impl Progress for Share<'_> {
    fn update(&self, done: u64, total: u64) {
        let before = total.saturating_mul(self.index);
        self.whole.update(before.saturating_add(done), total.saturating_mul(self.count));
    }

    fn cancelled(&self) -> bool {
        self.whole.cancelled()
    }
}

/// Full copies one after another; a failure takes back those made before it.
fn clone_full(
    datastore: &Datastore,
    disk: &str,
    at: &Point,
    names: &[String],
    progress: &dyn Progress,
) -> Result<Reply> {
    let mut made = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let share = Share { whole: progress, index: index as u64, count: names.len() as u64 };
        match datastore.clone_full(disk, at, name, &share) {
            Ok(info) => made.push(info),
            Err(error) => {
                for clone in &made {
                    if let Err(undo) = datastore.delete_disk(&clone.name, false) {
                        tracing::error!(disk = clone.name, "a clone of the failed set stays: {undo}");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(Reply::Disks(made))
}
