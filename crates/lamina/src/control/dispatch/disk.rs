//! Requests about disks.

use super::Watch;
use crate::control::message::{DiskRequest, Reply};
use disk::{Datastore, Progress, Result};

/// Carries out one.
pub fn dispatch(datastore: &Datastore, request: DiskRequest, watch: &dyn Watch) -> Result<Reply> {
    let progress: &dyn Progress = watch;
    Ok(match request {
        DiskRequest::Create { name, capacity, provisioning } => {
            Reply::Disk(datastore.create_disk(&name, capacity, provisioning, progress)?)
        }
        DiskRequest::List => Reply::Disks(datastore.disks()?),
        DiskRequest::Show { name } => Reply::Disk(datastore.disk(&name)?),
        DiskRequest::Resize { name, capacity, shrink } => Reply::Disk(datastore.resize_disk(&name, capacity, shrink)?),
        DiskRequest::Rename { name, to } => Reply::Disk(datastore.rename_disk(&name, &to)?),
        DiskRequest::Delete { name, promote } => {
            datastore.delete_disk(&name, promote)?;
            Reply::Deleted(name)
        }
        DiskRequest::Detach { name } => Reply::Disk(datastore.detach(&name, progress)?),
    })
}
