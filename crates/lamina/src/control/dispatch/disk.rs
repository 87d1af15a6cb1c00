//! Requests about disks.

use super::{Service, Watch};
use crate::control::message::{DiskRequest, Reply};
use disk::{Progress, Result, Throttled};

/// Carries out one.
pub fn dispatch(service: Service<'_>, request: DiskRequest, watch: &dyn Watch) -> Result<Reply> {
    let datastore = service.datastore;
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
        DiskRequest::Migrate { name, target, to, rate } => {
            let progress = &Throttled { progress, rate };
            Reply::Disk(match to {
                Some(path) => datastore.migrate_away(&name, &target, &path, progress)?,
                None => datastore.migrate(&name, &target, progress)?,
            })
        }
        DiskRequest::Import { name, import } => {
            let info = datastore.import(&name, &import, progress)?;
            if service.serving.is_some() {
                datastore.start_imports();
            }
            Reply::Disk(info)
        }
        DiskRequest::Consolidate { name, rate } => {
            Reply::Disk(datastore.consolidate_disk(&name, &Throttled { progress, rate })?)
        }
    })
}
