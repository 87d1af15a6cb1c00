//! Backups of machines, in the process that has the datastore open. The requesting process takes the snapshot of the
//! machine and reads its files.

use super::{invalid, read_key, repository_place};
use crate::dispatch::{Service, Watch};
use crate::message::{BackupMachine, BackupPlace, Reply};
use backup::{CreateOptions, Repository};
use disk::Progress;
use error::{Error, Result};

/// The repository at a place, which is made if it is missing.
fn open_or_create(place: &BackupPlace) -> Result<Repository> {
    let refused =
        "a machine is backed up to a repository, and not to a file or stream: give the folder or bucket of one";
    repository_place(place).ok_or_else(|| invalid(refused))?.open_or_create()
}

/// Makes the repository if it is missing. Returns its identity, and the snapshots of a machine whose backups were
/// interrupted.
pub fn prepare(place: &BackupPlace, uuid: &str) -> Result<Reply> {
    let repository = open_or_create(place)?;
    let of_machine = |backup: &backup::Description| backup.machine.as_ref().is_some_and(|one| one.uuid == uuid);
    let unfinished = repository.unfinished()?.into_iter().filter(of_machine).map(|backup| backup.point.name);
    Ok(Reply::BackupPrepared { id: repository.id().to_owned(), unfinished: unfinished.collect() })
}

/// Backs up a machine.
pub fn create(service: &Service, request: &BackupMachine, watch: &dyn Watch) -> Result<Reply> {
    let key = read_key(request.key.as_deref())?;
    let disks = request.disks.iter().map(|(disk, snapshot)| {
        let outgoing = service.datastore.outgoing(disk, snapshot)?;
        Ok::<_, Error>((disk.clone(), outgoing))
    });
    // The snapshots are opened first: none of them is deleted while another one is read, and a wrong name makes no
    // repository.
    let disks = disks.collect::<Result<Vec<_>>>()?;
    let options =
        CreateOptions { level: request.level, rate: request.rate, key: key.as_ref(), ..CreateOptions::default() };
    let progress: &dyn Progress = watch;
    let repository = open_or_create(&request.place)?;
    let created = repository.create_machine(&request.point, &disks, request.full, options, progress)?;
    Ok(Reply::MachineBackedUp(Box::new(created)))
}
