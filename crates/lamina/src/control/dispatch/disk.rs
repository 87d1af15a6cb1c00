//! Requests about disks.

use super::Watch;
use crate::control::message::{DiskRequest, Reply};
use disk::{Datastore, Progress, Result, Throttled};

/// Carries out one.
pub fn dispatch(datastore: &Datastore, request: DiskRequest, watch: &dyn Watch) -> Result<Reply> {
    let progress: &dyn Progress = watch;
    Ok(match request {
        DiskRequest::Create { name, new } => Reply::Disk(datastore.create_disk(&name, &new, progress)?),
        DiskRequest::List => Reply::Disks(datastore.disks()?),
        DiskRequest::Show { name } => Reply::Disk(datastore.disk(&name)?),
        DiskRequest::Resize { name, capacity, shrink } => Reply::Disk(datastore.resize_disk(&name, capacity, shrink)?),
        DiskRequest::Rename { name, to } => Reply::Disk(datastore.rename_disk(&name, &to)?),
        DiskRequest::Delete { name, promote } => {
            datastore.delete_disk(&name, promote)?;
            Reply::Deleted(name)
        }
        DiskRequest::Detach { name } => Reply::Disk(datastore.detach(&name, progress)?),
        DiskRequest::Stats { name } => Reply::Statistics(Box::new(datastore.disk_statistics(&name)?)),
        DiskRequest::Tune { name, tuning } => Reply::Statistics(Box::new(datastore.tune_disk(&name, &tuning)?)),
        DiskRequest::Inflate { name } => Reply::Disk(datastore.inflate_disk(&name, progress)?),
        DiskRequest::PunchZero { name } => {
            Reply::Reclaimed { reclaimed: datastore.punch_zeros(&name, progress)?, name }
        }
        DiskRequest::Wipe { name } => Reply::Reclaimed { reclaimed: datastore.wipe_disk(&name, progress)?, name },
        DiskRequest::Shrink { name } => Reply::Reclaimed { reclaimed: datastore.shrink_disk(&name, progress)?, name },
        DiskRequest::Consolidate { name, rate } => {
            Reply::Disk(datastore.consolidate_disk(&name, &Throttled { progress, rate })?)
        }
    })
}
