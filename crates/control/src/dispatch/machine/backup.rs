//! Backups of machines. This process has the machine: it takes a snapshot, reads the machine's files, and creates the
//! restored machine. The process that has the datastore open reads and writes the content of disks.
//!
//! Without a snapshot, one of the current state is taken. It is kept, so that an interrupted backup can continue and
//! the next backup can be an increment, and deleted when the next backup of the machine's current state is complete.

use super::disks::{Copy, unexpected};
use super::{Work, start};
use crate::dispatch::backup::{SUFFIX, read_key, repository};
use crate::dispatch::dispatch;
use crate::message::{
    BackedUpMachine, BackupMachine, BackupRequest, BackupRestore, MachineBackup, MachineReply, MachineRestore, Reply,
    Request, RestoredMachine,
};
use backup::{MachineContent, MachineCreated, MachinePoint, StoredMachine};
use disk::transfer::new_identity;
use disk::{NoProgress, Progress};
use error::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use vm::backup::{PREFIX, Restore, SavedFile, plan, restore, saved};
use vm::machine::Machine;
use vm::machines::Snapshot;
use vm::snapshots;

impl Work<'_> {
    /// Backs up a machine: its disks at one snapshot, and its files.
    pub fn back_up(&self, request: &MachineBackup) -> Result<MachineReply> {
        let _working = self.host.work()?;
        let machine = self.host.machines().get(&request.source.machine)?;
        let backed_up = match &request.source.snapshot {
            Some(snapshot) => BackedUpMachine { created: self.store(&machine, snapshot, request)?, quiet: None },
            None => self.store_now(&machine, request)?,
        };
        Ok(MachineReply::BackedUp(Box::new(backed_up)))
    }

    fn store(&self, machine: &Machine, snapshot: &str, request: &MachineBackup) -> Result<MachineCreated> {
        let saved = saved(machine, snapshot)?;
        let content = |(name, content): SavedFile| MachineContent { name, content };
        let backup = BackupMachine {
            point: MachinePoint {
                machine: machine.name(),
                uuid: saved.definition.uuid.to_string(),
                snapshot: saved.snapshot,
                created: saved.created,
                consistency: saved.consistency,
                files: saved.files.into_iter().map(content).collect(),
            },
            disks: saved.disks.into_iter().map(|snapshot| (snapshot.disk, snapshot.name)).collect(),
            place: request.place.clone(),
            full: request.full,
            level: request.level,
            key: request.key.clone(),
            rate: request.rate,
        };
        // The server would refuse the request without a reason, because a request has a limited length.
        backup.point.check()?;
        let request = Request::Backup(BackupRequest::CreateMachine(Box::new(backup)));
        match dispatch(self.target, request, self.watch)? {
            Reply::MachineBackedUp(created) => Ok(*created),
            other => Err(unexpected(&other)),
        }
    }

    /// Identity of the repository, and the snapshots of the machine whose backups were interrupted.
    fn prepare(&self, uuid: &str, request: &MachineBackup) -> Result<(String, Vec<String>)> {
        let (place, uuid) = (request.place.clone(), uuid.to_owned());
        let request = Request::Backup(BackupRequest::PrepareMachine { place, uuid });
        match dispatch(self.target, request, &NoProgress)? {
            Reply::BackupPrepared { id, unfinished } => Ok((id, unfinished)),
            other => Err(unexpected(&other)),
        }
    }

    /// Backs up the current state: continues an interrupted backup of that state, or takes a snapshot.
    fn store_now(&self, machine: &Machine, request: &MachineBackup) -> Result<BackedUpMachine> {
        let uuid = machine.definition()?.uuid.to_string();
        let (repository, begun) = self.prepare(&uuid, request)?;
        let prefix = format!("{PREFIX}{}-", repository.get(..SUFFIX).unwrap_or(&repository));
        let before = self.taken(machine, &prefix)?;
        let mut continued = None;
        for name in before.iter().rev().filter(|name| begun.contains(name)) {
            // A snapshot that lacks a disk, which was deleted since the interruption, is not backed up any more.
            if continued.is_none() && snapshots::is_whole(&self.host, machine, name)? {
                continued = Some(name.clone());
            }
        }
        let is_taken = continued.is_none();
        let (name, quiet) = match continued {
            Some(name) => (name, None),
            None => {
                let name = format!("{prefix}{}", &new_identity()?[..SUFFIX]);
                let options = snapshots::Options { memory: false, quiesce: request.quiesce };
                let taken = snapshots::take(&self.host, &self.host.change(&machine.name())?, &name, options)?;
                (name, taken.quiet.map(|quiet| quiet.sentence()))
            }
        };
        let created = match self.store(machine, &name, request) {
            Ok(created) => created,
            Err(error) => {
                // The snapshot is kept if the backup has begun, so that the same command continues the backup, if that
                // is unknown, and if another command may have completed the backup.
                let is_known = is_taken && error.kind() != ErrorKind::Io;
                if is_known && self.prepare(&uuid, request).is_ok_and(|(_, begun)| !begun.contains(&name)) {
                    self.forget(machine, &name);
                }
                return Err(error);
            }
        };
        // Snapshots that were taken since this backup began are those of other commands. The snapshot of disks without
        // increments has no further use.
        let gone = before.iter().filter(|taken| **taken != name).chain((!created.incremental).then_some(&name));
        gone.for_each(|taken| self.forget(machine, taken));
        Ok(BackedUpMachine { created, quiet })
    }

    /// The snapshots that were taken for backups in a repository, the newest last.
    fn taken(&self, machine: &Machine, prefix: &str) -> Result<Vec<String>> {
        let all = snapshots::list(machine)?;
        Ok(all.into_iter().map(|record| record.name).filter(|name| name.starts_with(prefix)).collect())
    }

    fn forget(&self, machine: &Machine, snapshot: &str) {
        let name = machine.name();
        let change = self.host.change(&name);
        if let Err(error) = change.and_then(|change| snapshots::delete(&self.host, &change, snapshot)) {
            tracing::warn!("the snapshot '{name}@{snapshot}' of an earlier backup is kept: {error}");
        }
    }

    /// Restores a machine: its disks, its files, and the snapshot that was backed up.
    pub fn restore(&self, request: &MachineRestore) -> Result<MachineReply> {
        let begun = Instant::now();
        if request.start || request.live {
            // Checked first: without a server the machine cannot be started, and nothing copies its disks.
            self.host.disks().server()?;
        }
        let key = read_key(request.key.as_deref())?;
        let which = request.backup.as_ref().unwrap_or(&request.name);
        let StoredMachine { manifest, point, snapshots } = repository(&request.place)?.machine(which, key.as_ref())?;
        let files: Vec<SavedFile> = point.files.into_iter().map(|file| (file.name, file.content)).collect();
        let disks = manifest.disks.iter().zip(snapshots);
        let disks: Vec<_> = disks.map(|(disk, name)| Snapshot { disk: disk.disk.clone(), name }).collect();
        let planned = plan(
            &self.host,
            &Restore {
                name: &request.name,
                snapshot: &point.snapshot,
                created: point.created,
                consistency: &point.consistency,
                files: &files,
                disks: &disks,
                // A disk that can be used at once does not get the snapshot.
                has_snapshot: !request.live,
            },
        )?;
        let data = AtomicU64::new(0);
        let make_disk = |index: usize, name: &str, progress: &dyn Progress| {
            let restored = self.restore_disk(request, &manifest.disks[index].backup, name, progress)?;
            data.fetch_add(restored, Ordering::Relaxed);
            Ok(())
        };
        let progress: &dyn Progress = self.watch;
        restore(&self.host, &planned, &make_disk, progress)?;
        if request.start {
            let started = start(&self.host, &request.name, false);
            started.map_err(|error| error.context("the machine was restored, but not started"))?;
        }
        Ok(MachineReply::Restored(Box::new(RestoredMachine {
            id: manifest.backup.id,
            source: format!("{}@{}", point.machine, point.snapshot),
            definition: planned.definition,
            data: data.into_inner(),
            new_identity: planned.new_identity,
            ejected: planned.ejected,
            live: request.live,
            started: request.start,
            seconds: begun.elapsed().as_secs_f64(),
        })))
    }

    /// Restores a disk; returns the bytes of data that were restored.
    fn restore_disk(&self, request: &MachineRestore, backup: &str, name: &str, progress: &dyn Progress) -> Result<u64> {
        let restore = BackupRestore {
            place: request.place.clone(),
            backup: Some(backup.to_owned()),
            name: name.to_owned(),
            update: false,
            live: request.live,
            key: request.key.clone(),
            rate: request.rate,
        };
        match dispatch(self.target, Request::Backup(BackupRequest::Restore(restore)), &Copy(progress))? {
            Reply::Restored(restored) => Ok(restored.data),
            // Another command has begun to restore a disk with this name. It is not this machine's disk.
            Reply::RestoredLive(restored) if restored.known => {
                Err(Error::new(ErrorKind::Exists, format!("there is a disk '{name}' already")))
            }
            Reply::RestoredLive(_) => Ok(0),
            other => Err(unexpected(&other)),
        }
    }
}
