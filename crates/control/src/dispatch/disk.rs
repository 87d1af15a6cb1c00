//! Requests about disks.

use super::claims::{self, Deed};
use super::{Service, Watch};
use crate::message::{DiskRequest, Reclaimable, Reconnect, Reply, Resized};
use disk::{DefaultsChange, Progress, ReclaimReport, Throttled, has_label};
use error::{Error, ErrorKind, Result};
use export::clients::ClientSelection;
use work::{WorkPart, WorkPlace};

/// Carries out a request about disks.
pub fn dispatch(service: &Service, request: DiskRequest, watch: &dyn Watch) -> Result<Reply> {
    let datastore = &*service.datastore;
    let progress: &dyn Progress = watch;
    Ok(match request {
        DiskRequest::Create { name, new, settings } => {
            Reply::Disk(Box::new(datastore.create_disk_with(&name, &new, &settings, progress)?))
        }
        DiskRequest::List => {
            let mut disks = datastore.disks()?;
            claims::show(&mut disks, &service.clients);
            Reply::Disks(disks)
        }
        DiskRequest::Labelled { label } => {
            let mut disks = datastore.disks()?;
            disks.retain(|disk| has_label(&disk.settings.labels, &label));
            claims::show(&mut disks, &service.clients);
            Reply::Disks(disks)
        }
        DiskRequest::Show { name } => {
            let mut disk = datastore.disk(&name)?;
            claims::show(std::slice::from_mut(&mut disk), &service.clients);
            disk.machine = claims::machine_of(&service.location, &name)?;
            Reply::Disk(Box::new(disk))
        }
        DiskRequest::Resize { name, capacity, shrink, reconnect, tell_machine: _ } => {
            resize(service, &name, capacity, shrink, reconnect)?
        }
        DiskRequest::Rename { name, to, force } => {
            claims::refuse(service, &name, Deed::Rename, force)?;
            Reply::Disk(Box::new(service.clients.rename(&name, &to, || datastore.rename_disk(&name, &to))?))
        }
        DiskRequest::Delete { name, promote, force } => {
            claims::refuse(service, &name, Deed::Delete, force)?;
            datastore.delete_disk(&name, promote)?;
            claims::forget(&service.clients, &name, Deed::Delete);
            Reply::Deleted(name)
        }
        DiskRequest::WouldFree { deletion, force } => {
            for name in &deletion.disks {
                claims::refuse(service, name, Deed::Delete, force)?;
            }
            for (disk, name) in &deletion.snapshots {
                claims::refuse(service, disk, Deed::DeleteSnapshot(name), force)?;
            }
            Reply::WouldFree(Box::new(datastore.would_free(&deletion, progress)?))
        }
        DiskRequest::Space { name } => Reply::Space(Box::new(datastore.space(name.as_deref(), progress)?)),
        DiskRequest::Detach { name } => Reply::Disk(Box::new(datastore.detach(&name, progress)?)),
        DiskRequest::Stats { name } => Reply::Statistics(Box::new(datastore.disk_statistics(&name)?)),
        DiskRequest::Tune { name, tuning } => Reply::Statistics(Box::new(datastore.tune_disk(&name, &tuning)?)),
        DiskRequest::Edit { name, settings } => Reply::Disk(Box::new(datastore.edit_disk(&name, &settings)?)),
        DiskRequest::Defaults { change } => {
            if change != DefaultsChange::default() {
                datastore.change_defaults(&change)?;
            }
            Reply::Defaults(datastore.defaults())
        }
        DiskRequest::Reopen { name } => Reply::Disk(Box::new(datastore.reopen_disk(&name, progress)?)),
        DiskRequest::Inflate { name } => Reply::Disk(Box::new(datastore.inflate_disk(&name, progress)?)),
        DiskRequest::PunchZero { name } => {
            Reply::Reclaimed { reclaimed: datastore.punch_zeros(&name, progress)?, name }
        }
        DiskRequest::Wipe { name } => Reply::Reclaimed { reclaimed: datastore.wipe_disk(&name, progress)?, name },
        DiskRequest::Shrink { name } => Reply::Reclaimed { reclaimed: datastore.shrink_disk(&name, progress)?, name },
        DiskRequest::Reclaim { name, dry_run } => Reply::Reclaim(Box::new(reclaim(service, &name, dry_run, progress)?)),
        DiskRequest::Reclaimable => Reply::Reclaimable(reclaimable(service, progress)?),
        DiskRequest::Optimize { name, compression, dedup, dedup_memory, rate } => {
            let progress = &Throttled { progress, rate };
            let memory = dedup_memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
            Reply::Reclaimed { reclaimed: datastore.optimize_disk(&name, compression, dedup, memory, progress)?, name }
        }
        DiskRequest::Migrate { name, target, to, force, rate } => {
            if let Some(to) = &to {
                claims::refuse_to_leave(service, &name, to, force)?;
            }
            let progress = &Throttled { progress, rate };
            Reply::Disk(Box::new(match to {
                Some(location) => datastore.migrate_away(&name, &target, location, progress)?,
                None => datastore.migrate(&name, &target, progress)?,
            }))
        }
        DiskRequest::Import { name, import } => {
            let info = datastore.import(&name, &import, progress)?;
            if service.served.is_some() {
                datastore.start_imports();
            }
            Reply::Disk(Box::new(info))
        }
        DiskRequest::Consolidate { name, rate } => {
            Reply::Disk(Box::new(datastore.consolidate_disk(&name, &Throttled { progress, rate })?))
        }
    })
}

/// Gives back what the guest of a disk does not use, or counts it.
fn reclaim(service: &Service, name: &str, dry_run: bool, progress: &dyn Progress) -> Result<ReclaimReport> {
    let refuse = || claims::refuse_to_reclaim(service, name);
    // Waits for clients that are just leaving, which the datastore would refuse.
    refuse()?;
    service.datastore.reclaim(name, dry_run, &refuse, progress)
}

/// What each disk could give back, or why that is not known.
fn reclaimable(service: &Service, progress: &dyn Progress) -> Result<Vec<Reclaimable>> {
    let datastore = &*service.datastore;
    let mut all = Vec::new();
    let disks = datastore.disks()?;
    for (index, disk) in disks.iter().map(|disk| disk.name.clone()).enumerate() {
        if progress.cancelled() {
            return Err(Error::new(ErrorKind::Interrupted, "the examination was stopped"));
        }
        let place = WorkPlace::OneOf { index: index as u64, count: disks.len() as u64 };
        match reclaim(service, &disk, true, &WorkPart { whole: progress, place }) {
            Ok(report) => all.push(Reclaimable { disk, report: Some(report), error: None }),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
            // The disk was deleted or renamed meanwhile.
            Err(_) if datastore.uuid_of(&disk).is_err_and(|error| error.kind() == ErrorKind::NotFound) => {}
            Err(error) => all.push(Reclaimable { disk, report: None, error: Some(error.to_string()) }),
        }
    }
    Ok(all)
}

/// Changes the capacity of a disk, and ends the connections of those clients that should reconnect to see the new
/// capacity.
fn resize(service: &Service, name: &str, capacity: u64, shrink: bool, reconnect: Reconnect) -> Result<Reply> {
    let connected =
        || service.clients.all().into_iter().filter(|client| client.grace.is_none() && client.export == name);
    let before: Vec<_> = connected().map(|client| client.peer).collect();
    let mut disk = service.datastore.resize_disk(name, capacity, shrink)?;
    let selection = match reconnect {
        Reconnect::NoClient => None,
        Reconnect::All => Some(ClientSelection::All),
        Reconnect::Process(pid) => Some(ClientSelection::Process(pid)),
    };
    let reconnected = match (&service.served, selection) {
        (Some(served), Some(selection)) => served.nbd.reconnect(name, selection) as u64,
        _ => 0,
    };
    let meant = |peer: &connections::Peer| selection.is_some_and(|selection| selection.matches(peer));
    let unaware = before.iter().filter(|peer| !meant(peer)).map(ToString::to_string).collect();
    claims::show(std::slice::from_mut(&mut disk), &service.clients);
    let served = service.served.is_some();
    Ok(Reply::Resized(Box::new(Resized { disk, served, reconnected, unaware, machine: None })))
}
