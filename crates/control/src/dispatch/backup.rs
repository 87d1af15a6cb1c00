//! Requests about backups. If the state to back up is not a snapshot, a snapshot is taken first. This snapshot is kept,
//! so that an interrupted backup can continue and the next backup can be an increment. The snapshot is deleted when the
//! next backup of the disk's current state is complete.

mod machine;

use super::{Service, Watch, claims, stream};
use crate::message::{BackupCreate, BackupPlace, BackupRequest, BackupRestore, Change, Reply};
use backup::{
    BackupInfo, Chain, CreateOptions, Created, FileLevel, Key, LiveRestoreOptions, Repository, RepositoryPlace,
    RestoreOptions, StreamLevel, StreamReader, create_file, create_stream, manifest_of, restore, restore_live,
    verify_file,
};
use disk::transfer::{SnapshotIdentity, new_identity};
use disk::{Datastore, NoProgress, Progress, SnapshotOptions};
use error::{Error, ErrorKind, Result};
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

/// Number of characters of the identities in the name of a snapshot.
pub(super) const SUFFIX: usize = 8;

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

/// The place of a repository; `None` for a file or stream.
fn repository_place(place: &BackupPlace) -> Option<RepositoryPlace> {
    match place {
        BackupPlace::Folder(path) => Some(RepositoryPlace::Folder(path.clone())),
        BackupPlace::Bucket { address, credentials } => {
            Some(RepositoryPlace::Bucket((**address).clone(), credentials.as_deref().cloned()))
        }
        BackupPlace::File(_) | BackupPlace::Process(_) => None,
    }
}

/// The repository at a place.
pub(super) fn repository(place: &BackupPlace) -> Result<Repository> {
    match (repository_place(place), place) {
        (Some(place), _) => place.open(),
        (None, BackupPlace::File(path)) => {
            Err(invalid(format!("'{}' is one backup in a file, and not a repository of backups", path.display())))
        }
        _ => Err(invalid("a stream is not a repository of backups")),
    }
}

/// The key in a file.
pub(super) fn read_key(path: Option<&Path>) -> Result<Option<Arc<Key>>> {
    path.map(|path| Key::read(path).map(Arc::new)).transpose()
}

/// Carries out a request that needs no datastore.
pub fn alone(request: BackupRequest, watch: &dyn Watch) -> Result<Reply> {
    let progress: &dyn Progress = watch;
    match request {
        BackupRequest::List { place: BackupPlace::File(path) } => {
            Ok(Reply::Backups(vec![BackupInfo::of(&manifest_of(&path)?)]))
        }
        BackupRequest::List { place } => Ok(Reply::Backups(repository(&place)?.list()?)),
        BackupRequest::Verify { place: BackupPlace::File(path), backups, key } => match backups.first() {
            None => Ok(Reply::Verified(Box::new(verify_file(&path, read_key(key.as_deref())?.as_ref(), progress)?))),
            Some(name) => Err(invalid(format!("a file has one backup: leave out '{}'", name.escape_debug()))),
        },
        BackupRequest::Verify { place, backups, key } => {
            let key = read_key(key.as_deref())?;
            Ok(Reply::Verified(Box::new(repository(&place)?.verify(&backups, key.as_ref(), progress)?)))
        }
        BackupRequest::Delete { place, backups, force } => delete(&repository(&place)?, &backups, force),
        BackupRequest::Key { path } => Ok(Reply::BackupKey { id: Key::create(&path)?.id().to_owned(), path }),
        BackupRequest::Prune { place, keep, dry_run } => {
            Ok(Reply::Pruned(Box::new(repository(&place)?.prune(&keep, dry_run)?)))
        }
        BackupRequest::Create(_)
        | BackupRequest::Restore(_)
        | BackupRequest::PrepareMachine { .. }
        | BackupRequest::CreateMachine(_) => Err(super::needs_datastore()),
    }
}

fn delete(repository: &Repository, names: &[String], force: bool) -> Result<Reply> {
    let _lock = repository.lock()?;
    let mut manifests: Vec<backup::Manifest> = Vec::new();
    for name in names {
        if force {
            let id = repository.find(name).map_or_else(|_| name.clone(), |manifest| manifest.backup.id);
            repository.forget_readers(&|read| id.len() >= SUFFIX && read.starts_with(&id))?;
        }
        // Damaged and unfinished backups have no name but their identity.
        if repository.delete_damaged(name)? {
            continue;
        }
        let manifest = repository.find(name)?;
        if !manifests.iter().any(|known| known.backup.id == manifest.backup.id) {
            manifests.push(manifest);
        }
    }
    let manifests = repository.with_disks(manifests)?;
    if force {
        repository.forget_readers(&|read| manifests.iter().any(|manifest| manifest.backup.id == read))?;
    }
    repository.delete(&manifests)?;
    repository.sweep()?;
    Ok(Reply::Deleted(names.join(", ")))
}

/// Carries out a request about backups in a process that has a datastore open.
pub fn dispatch(service: &Service, request: BackupRequest, watch: &dyn Watch) -> Result<Reply> {
    match request {
        BackupRequest::Create(create) => {
            let key = read_key(create.key.as_deref())?;
            let creating = Creating { service, datastore: &service.datastore, create: &create, key, progress: watch };
            creating.run().map(|created| Reply::BackedUp(Box::new(created)))
        }
        BackupRequest::PrepareMachine { place, uuid } => machine::prepare(&place, &uuid),
        BackupRequest::CreateMachine(create) => machine::create(service, &create, watch),
        BackupRequest::Restore(restore) => {
            if restore.update {
                // The disk may have the name already, and no name is reserved then.
                claims::refuse_left(&service.location, &[restore.name.as_str()])?;
            }
            match restore.live {
                true => restored_live(service, &restore),
                false => restored(&service.datastore, &restore, watch),
            }
        }
        request => alone(request, watch),
    }
}

struct Creating<'a> {
    service: &'a Service,
    datastore: &'a Datastore,
    create: &'a BackupCreate,
    key: Option<Arc<Key>>,
    progress: &'a dyn Progress,
}

impl Creating<'_> {
    fn options(&self) -> CreateOptions<'_> {
        CreateOptions {
            level: self.create.level,
            rate: self.create.rate,
            key: self.key.as_ref(),
            ..CreateOptions::default()
        }
    }

    fn run(&self) -> Result<Created> {
        match &self.create.place {
            place @ (BackupPlace::Folder(_) | BackupPlace::Bucket { .. }) => {
                if self.create.from.is_some() {
                    let text = "a repository finds by itself on which snapshot a backup can be based: leave out --from";
                    return Err(invalid(text));
                }
                // The name is checked before the folder is made, so that a wrong name leaves no folder.
                match &self.create.snapshot {
                    Some(snapshot) => drop(self.datastore.outgoing(&self.create.disk, snapshot)?),
                    None => drop(self.datastore.disk(&self.create.disk)?),
                }
                let repository = repository_place(place).ok_or_else(|| invalid("no repository"))?.open_or_create()?;
                match &self.create.snapshot {
                    Some(snapshot) => self.store(&repository, snapshot),
                    None => self.store_now(&repository),
                }
            }
            BackupPlace::File(path) => {
                let (snapshot, from) = self.snapshots()?;
                let outgoing = self.datastore.outgoing(&self.create.disk, snapshot)?;
                let source = (&outgoing, self.create.disk.as_str());
                create_file(path, source, from.as_ref(), self.options(), self.progress)
            }
            BackupPlace::Process(path) => {
                let (snapshot, from) = self.snapshots()?;
                let outgoing = self.datastore.outgoing(&self.create.disk, snapshot)?;
                let source = (&outgoing, self.create.disk.as_str());
                stream::with(path, self.progress, |mut stream| {
                    create_stream(&mut stream, stream::NAME, source, from.as_ref(), self.options(), self.progress)
                })
            }
        }
    }

    /// The snapshot to back up into a file or stream, and the earlier snapshot since which changes are stored.
    fn snapshots(&self) -> Result<(&str, Option<SnapshotIdentity>)> {
        let disk = &self.create.disk;
        let Some(snapshot) = &self.create.snapshot else {
            let text = format!(
                "a backup in a file or stream is made of a snapshot: take one with 'lamina snapshot create \
                 {disk}@NAME' and give {disk}@NAME"
            );
            return Err(invalid(text));
        };
        let from = self.create.from.as_ref();
        let from = from.map(|from| Ok::<_, Error>(self.datastore.outgoing(disk, from)?.point().clone()));
        Ok((snapshot.as_str(), from.transpose()?))
    }

    fn store(&self, repository: &Repository, snapshot: &str) -> Result<Created> {
        let disk = &self.create.disk;
        let outgoing = self.datastore.outgoing(disk, snapshot)?;
        repository.create(&outgoing, disk, self.create.full, self.options(), self.progress)
    }

    /// The snapshots that were taken for backups in a repository, the newest last.
    fn taken(&self, prefix: &str) -> Result<Vec<String>> {
        let all = self.datastore.snapshots(Some(&self.create.disk))?;
        Ok(all.into_iter().map(|snapshot| snapshot.name).filter(|name| name.starts_with(prefix)).collect())
    }

    /// Backs up the current state: continues an interrupted backup of that state, or takes a snapshot.
    fn store_now(&self, repository: &Repository) -> Result<Created> {
        let disk = &self.create.disk;
        let prefix = format!("backup-{}-", &repository.id()[..SUFFIX]);
        let begun = repository.unfinished()?;
        let continued = self
            .taken(&prefix)?
            .into_iter()
            .rfind(|name| begun.iter().any(|backup| backup.disk == *disk && backup.point.name == *name));
        let name = match continued {
            Some(name) => name,
            None => {
                let name = format!("{prefix}{}", &new_identity()?[..SUFFIX]);
                self.datastore.create_snapshots(&[(disk.clone(), name.clone())], &SnapshotOptions::default())?;
                let change = Change::SnapshotCreated { disk: disk.clone(), snapshot: name.clone() };
                self.service.publish(|| vec![change]);
                name
            }
        };
        let stored = self.datastore.outgoing(disk, &name).and_then(|outgoing| {
            let incremental = !outgoing.bases().is_empty();
            repository
                .create(&outgoing, disk, self.create.full, self.options(), self.progress)
                .map(|created| (created, incremental))
        });
        let (created, incremental) = match stored {
            Ok(stored) => stored,
            Err(error) => {
                // The snapshot is kept if the backup has begun, so that the same command continues the backup, and if
                // that is unknown.
                let is_of_backup = |backup: &backup::Description| backup.disk == *disk && backup.point.name == name;
                if repository.unfinished().is_ok_and(|begun| !begun.iter().any(is_of_backup)) {
                    self.forget(&name);
                }
                return Err(error);
            }
        };
        // The backup is complete, so an error does not make it fail. The disk may have been renamed meanwhile, and
        // another disk may have got its name. Then the next backup of the disk deletes the snapshots.
        match self.taken(&prefix) {
            Ok(taken) if !taken.contains(&name) => {}
            Ok(taken) => {
                // The snapshot of a disk without increments has no further use.
                taken.iter().filter(|taken| **taken != name || !incremental).for_each(|taken| self.forget(taken));
            }
            Err(error) => tracing::warn!("the snapshots of earlier backups of disk '{disk}' are kept: {error}"),
        }
        Ok(created)
    }

    fn forget(&self, snapshot: &str) {
        let disk = &self.create.disk;
        match self.datastore.delete_snapshot(disk, snapshot, None, &NoProgress) {
            Ok(_) => {
                let change = Change::SnapshotDeleted { disk: disk.clone(), snapshot: snapshot.to_owned() };
                self.service.publish(|| vec![change]);
            }
            Err(error) => tracing::warn!("the snapshot '{disk}@{snapshot}' of an earlier backup is kept: {error}"),
        }
    }
}

fn restored_live(service: &Service, request: &BackupRestore) -> Result<Reply> {
    let Some(place) = repository_place(&request.place) else {
        return Err(invalid("only a repository can be read while its disk is used: leave out --live"));
    };
    if request.update {
        return Err(invalid("an existing disk cannot be updated while it is used: leave out --live"));
    }
    let options = LiveRestoreOptions {
        repository: &place,
        which: request.backup.as_ref().unwrap_or(&request.name),
        key: request.key.as_deref(),
        name: &request.name,
        rate: request.rate,
        datastore: service.location.to_string(),
    };
    let mut done = restore_live(&service.datastore, &options)?;
    if service.served.is_some() {
        match done.known {
            true => service.datastore.hurry_import(&request.name),
            false => service.datastore.start_imports(),
        }
        done.served = true;
    }
    Ok(Reply::RestoredLive(Box::new(done)))
}

fn restored(datastore: &Datastore, request: &BackupRestore, watch: &dyn Watch) -> Result<Reply> {
    let progress: &dyn Progress = watch;
    let options = RestoreOptions { name: request.name.clone(), update: request.update, rate: request.rate };
    if let Some(backup) = request.backup.as_ref().filter(|_| repository_place(&request.place).is_none()) {
        return Err(invalid(format!("a file or stream has one backup: leave out '{}'", backup.escape_debug())));
    }
    let key = read_key(request.key.as_deref())?;
    let key = key.as_ref();
    let done = match &request.place {
        BackupPlace::Folder(_) | BackupPlace::Bucket { .. } => {
            if request.update {
                let text = "a repository has all data of a backup: restore it as a new disk, without --update";
                return Err(invalid(text));
            }
            let which = request.backup.as_ref().unwrap_or(&request.name);
            let (manifest, mut chain) = Chain::of(&repository(&request.place)?, which, key)?;
            restore(datastore, &mut chain, (&manifest.backup, false), &options, progress)?
        }
        BackupPlace::File(path) => {
            let level = FileLevel::open(path, key)?;
            let description = level.manifest().backup.clone();
            let mut chain = Chain::new(vec![Box::new(level)], description.capacity);
            restore(datastore, &mut chain, (&description, true), &options, progress)?
        }
        BackupPlace::Process(path) => stream::with(path, progress, |stream| {
            let reader = BufReader::with_capacity(1 << 18, stream);
            let stream = StreamReader::new(reader, stream::NAME, key)?;
            let description = stream.description().clone();
            let mut chain = Chain::new(vec![Box::new(StreamLevel::new(stream))], description.capacity);
            restore(datastore, &mut chain, (&description, true), &options, progress)
        })?,
    };
    Ok(Reply::Restored(Box::new(done)))
}
