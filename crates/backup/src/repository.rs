//! Repositories: the backups of any number of disks as objects in one place.
//!
//! | object | content |
//! |---|---|
//! | `repository` | the record of the repository: its identity |
//! | `unfinished-ID` | the description of a backup that is not complete |
//! | `pack-ID-NUMBER` | a pack; the number has eight digits |
//! | `backup-ID` | the manifest of a complete backup |
//! | `reader-ID` | a disk that is being restored, and its backups ([`crate::readers`]) |
//!
//! 1. The order of a backup: `unfinished-ID`, the packs in ascending order, `backup-ID`; then `unfinished-ID` is
//!    removed. So an interruption leaves packs 0 to N, each complete, and the next attempt continues after them.
//! 2. The order of a deletion: `backup-ID`, then the packs.
//! 3. A backup is deleted only if no other backup is based on it, no backup of a machine needs it, and no disk is being
//!    restored from it.
//! 4. One writer at a time changes a repository. Readers need no lock, because objects never change.

use crate::machine::MachineBackupInfo;
use crate::manifest::{Description, MACHINE, Manifest, RepositoryRecord, parse_id};
use crate::objects::Objects;
use crate::readers::READER;
use backend::Lock;
use backend::clock;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const RECORD_NAME: &str = "repository";
const BACKUP: &str = "backup-";
const UNFINISHED: &str = "unfinished-";
const PACK: &str = "pack-";
/// The least number of characters of an identity by which a backup can be named.
const PREFIX_MIN: usize = 8;

/// A repository.
pub struct Repository {
    objects: Arc<dyn Objects>,
    record: RepositoryRecord,
}

/// A backup of a repository, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupInfo {
    /// The backup's identity.
    pub id: String,
    /// The disk; empty if the manifest cannot be read.
    pub disk: String,
    /// The snapshot.
    pub snapshot: String,
    /// Identity of the backup on which this one is based.
    pub parent: Option<String>,
    /// Capacity of the disk in bytes.
    pub capacity: u64,
    /// When the snapshot was taken, in seconds since 1970.
    pub taken: u64,
    /// When the backup was complete, in seconds since 1970; `None` for an unfinished backup.
    pub finished: Option<u64>,
    /// Bytes of data before compression.
    pub data: u64,
    /// Bytes stored.
    pub stored: u64,
    /// Why the backup cannot be used.
    pub problem: Option<String>,
    /// For the backup of a machine: the machine, and its disks, to which the sizes above belong. `disk` is the name of
    /// the machine then.
    #[serde(default)]
    pub machine: Option<MachineBackupInfo>,
}

impl BackupInfo {
    /// The backup of a manifest.
    pub fn of(manifest: &Manifest) -> Self {
        let mut info = Self::unfinished(&manifest.backup);
        info.finished = Some(manifest.finished);
        info.data = manifest.data;
        info.stored = manifest.stored();
        if let Some(machine) = &mut info.machine {
            machine.disks.clone_from(&manifest.disks);
        }
        info
    }

    fn unfinished(backup: &Description) -> Self {
        Self {
            id: backup.id.clone(),
            disk: backup.disk.clone(),
            snapshot: backup.point.name.clone(),
            parent: backup.parent.as_ref().and_then(|parent| parent.backup.clone()),
            // The capacity of a machine is that of its disks.
            capacity: if backup.machine.is_some() { 0 } else { backup.capacity },
            taken: backup.point.created,
            finished: None,
            data: 0,
            stored: 0,
            problem: None,
            machine: backup.machine.as_ref().map(MachineBackupInfo::of),
        }
    }

    fn damaged(id: &str, error: &Error) -> Self {
        Self {
            id: id.to_owned(),
            disk: String::new(),
            snapshot: String::new(),
            parent: None,
            capacity: 0,
            taken: 0,
            finished: None,
            data: 0,
            stored: 0,
            problem: Some(error.to_string()),
            machine: None,
        }
    }
}

/// A manifest, or why it cannot be read.
pub struct Found {
    /// The backup's identity, from the name of the object.
    pub id: String,
    /// The manifest.
    pub manifest: Result<Manifest>,
}

/// The name of a pack.
pub(crate) fn pack_name(id: &str, number: u32) -> String {
    format!("{PACK}{id}-{number:08}")
}

/// The identity of the backup to which a pack belongs, by the name of the pack.
fn owner_of(name: &str) -> Option<&str> {
    let (id, number) = name.strip_prefix(PACK)?.rsplit_once('-')?;
    (number.len() >= 8 && number.bytes().all(|digit| digit.is_ascii_digit()) && parse_id(id).is_some()).then_some(id)
}

impl Repository {
    /// Opens a repository: `NotFound` if there is none.
    pub fn open(objects: Arc<dyn Objects>) -> Result<Self> {
        let Some(bytes) = objects.whole(RECORD_NAME, RepositoryRecord::LENGTH_MAX)? else {
            let place = objects.place();
            let text = format!("there is no repository of backups at '{place}': 'lamina backup create' makes one");
            return Err(Error::new(ErrorKind::NotFound, text));
        };
        let record = RepositoryRecord::decode(&bytes).map_err(|error| error.context(objects.place()))?;
        Ok(Self { objects, record })
    }

    /// As [`Repository::open`]; makes a new repository in an empty place: `Busy` while another command does so.
    pub fn open_or_create(objects: Arc<dyn Objects>) -> Result<Self> {
        if objects.length(RECORD_NAME)?.is_none() {
            if let Some(name) = objects.list()?.first() {
                let text = format!(
                    "'{}' is no repository of backups and is not empty, because it has '{}': give a new folder",
                    objects.place(),
                    name.escape_debug()
                );
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            // A second record would replace the identity by which another command has named the snapshot of its
            // backup.
            let _lock = objects.lock()?;
            if objects.length(RECORD_NAME)?.is_none() {
                let record = RepositoryRecord { id: disk::transfer::new_identity()?, created: clock::seconds() };
                objects.put(RECORD_NAME, &record.encode()?)?;
            }
        }
        Self::open(objects)
    }

    /// The place of the repository, for messages.
    pub fn place(&self) -> &str {
        self.objects.place()
    }

    /// The repository's identity.
    pub fn id(&self) -> &str {
        &self.record.id
    }

    /// The objects.
    pub(crate) fn objects(&self) -> &Arc<dyn Objects> {
        &self.objects
    }

    /// Excludes other writers until the result is dropped.
    pub fn lock(&self) -> Result<Option<Box<dyn Lock>>> {
        self.objects.lock()
    }

    /// Whether the repository is still at its place.
    pub(crate) fn is_there(&self) -> bool {
        self.objects.length(RECORD_NAME).is_ok_and(|length| length.is_some())
    }

    pub(crate) fn record(&self, name: &str, length_max: u64) -> Result<Vec<u8>> {
        let missing = || Error::new(ErrorKind::NotFound, format!("'{name}' in '{}' is gone", self.place()));
        self.objects.whole(name, length_max)?.ok_or_else(missing)
    }

    pub(crate) fn manifest(&self, id: &str) -> Result<Manifest> {
        let name = format!("{BACKUP}{id}");
        let manifest = self.record(&name, Manifest::LENGTH_MAX).and_then(|bytes| Manifest::decode(&bytes));
        let manifest = manifest.map_err(|error| error.context(format!("backup {id} in '{}'", self.place())))?;
        match manifest.backup.id == id {
            true => Ok(manifest),
            false => Err(Error::new(ErrorKind::Corrupt, format!("'{name}' is the manifest of another backup"))),
        }
    }

    fn ids(&self, prefix: &str) -> Result<Vec<String>> {
        let names = self.objects.list()?;
        let ids = names.iter().filter_map(|name| name.strip_prefix(prefix)).filter(|id| parse_id(id).is_some());
        Ok(ids.map(str::to_owned).collect())
    }

    /// All complete backups, also those whose manifest cannot be read.
    pub fn found(&self) -> Result<Vec<Found>> {
        Ok(self.ids(BACKUP)?.into_iter().map(|id| Found { manifest: self.manifest(&id), id }).collect())
    }

    /// The manifests of all complete backups, the oldest first. Those that are damaged, of a later version or deleted
    /// meanwhile are left out. One that only cannot be read now is an error: without it, an older backup would seem to
    /// be the newest one, and a repository of encrypted backups one of others.
    pub fn manifests(&self) -> Result<Vec<Manifest>> {
        let mut manifests = Vec::new();
        for id in self.ids(BACKUP)? {
            match self.manifest(&id) {
                Ok(manifest) => manifests.push(manifest),
                Err(error) if is_unusable(&error) => {}
                Err(error) => return Err(error),
            }
        }
        manifests.sort_by(|a, b| age(a).cmp(&age(b)));
        Ok(manifests)
    }

    /// All backups for display, the oldest first, and the unfinished ones last.
    pub fn list(&self) -> Result<Vec<BackupInfo>> {
        let (mut readable, mut damaged) = (Vec::new(), Vec::new());
        for Found { id, manifest } in self.found()? {
            match manifest {
                Ok(manifest) => readable.push(manifest),
                Err(error) => damaged.push(BackupInfo::damaged(&id, &error)),
            }
        }
        readable.sort_by(|a, b| age(a).cmp(&age(b)));
        let mut complete = readable.iter().map(BackupInfo::of).collect::<Vec<_>>();
        let known: BTreeSet<String> = complete.iter().map(|info| info.id.clone()).collect();
        for info in &mut complete {
            if let Some(parent) = info.parent.as_ref().filter(|parent| !known.contains(*parent)) {
                info.problem = Some(format!("backup {parent}, on which it is based, is missing or damaged"));
            }
        }
        MachineBackupInfo::complete(&mut complete, |info| info);
        complete.extend(damaged);
        let begun = self.unfinished()?;
        complete.extend(begun.iter().map(BackupInfo::unfinished));
        Ok(complete)
    }

    /// The descriptions of unfinished backups; those that cannot be read are left out.
    pub fn unfinished(&self) -> Result<Vec<Description>> {
        let mut found = Vec::new();
        for id in &self.unfinished_ids()? {
            let bytes = match self.record(&format!("{UNFINISHED}{id}"), Description::LENGTH_MAX) {
                Ok(bytes) => bytes,
                // The backup was completed or deleted after the objects were listed.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            match Description::decode(&bytes) {
                Ok(description) if description.id == *id => found.push(description),
                Ok(_) => {}
                Err(error) => tracing::warn!("the description of the unfinished backup {id} is skipped: {error}"),
            }
        }
        Ok(found)
    }

    /// Records that a backup begins.
    pub(crate) fn begin(&self, description: &Description) -> Result<()> {
        self.objects.put(&format!("{UNFINISHED}{}", description.id), &description.encode()?)
    }

    /// Records that a backup is complete.
    pub(crate) fn finish(&self, manifest: &Manifest) -> Result<()> {
        let id = &manifest.backup.id;
        self.objects.put(&format!("{BACKUP}{id}"), &manifest.encode()?)?;
        self.objects.remove(&format!("{UNFINISHED}{id}"))
    }

    /// The backup that a user names: an identity or its beginning, `DISK` for the newest backup of a disk, or
    /// `DISK@SNAPSHOT`; `machine:MACHINE` or `machine:MACHINE@SNAPSHOT` for the backup of a machine.
    pub fn find(&self, which: &str) -> Result<Manifest> {
        let ids = self.ids(BACKUP)?;
        let hits: Vec<&String> = match which.len() >= PREFIX_MIN {
            true => ids.iter().filter(|id| id.starts_with(which)).collect(),
            false => Vec::new(),
        };
        match hits[..] {
            [id] => return self.manifest(id),
            [] => {}
            _ => {
                let text = format!("several backups in '{}' begin with '{which}'", self.place());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
        let name = which.strip_prefix(MACHINE);
        let is_machine = name.is_some();
        let name = name.unwrap_or(which);
        let (disk, snapshot) = match name.split_once('@') {
            Some((disk, snapshot)) => (disk, Some(snapshot)),
            None => (name, None),
        };
        let fits = |manifest: &Manifest| {
            manifest.backup.machine.is_some() == is_machine
                && manifest.backup.disk == disk
                && snapshot.is_none_or(|snapshot| manifest.backup.point.name == snapshot)
        };
        self.manifests()?.into_iter().rfind(fits).ok_or_else(|| {
            let text = format!(
                "there is no backup '{}' in '{}'; 'lamina backup list' lists them",
                which.escape_debug(),
                self.place()
            );
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// A backup and all backups on which it is based, the newest first.
    pub fn chain(&self, manifest: Manifest) -> Result<Vec<Manifest>> {
        let mut seen = BTreeSet::from([manifest.backup.id.clone()]);
        let mut chain = vec![manifest];
        while let Some(parent) = chain.last().and_then(|last| last.backup.parent.as_ref()) {
            let broken = |why: &str| {
                let text = format!("backup {} in '{}' cannot be used: {why}", chain[0].backup.id, self.place());
                Error::new(ErrorKind::Corrupt, text)
            };
            let id = parent.backup.as_ref().ok_or_else(|| broken("its parent is not in the repository"))?;
            if !seen.insert(id.clone()) {
                return Err(broken("it is based on itself"));
            }
            let next = self.manifest(id).map_err(|error| match error.kind() {
                ErrorKind::NotFound => broken(&format!("backup {id}, on which it is based, is missing")),
                _ => error,
            })?;
            if next.backup.point.uuid != parent.point.uuid {
                return Err(broken(&format!("backup {id}, on which it is based, has another snapshot")));
            }
            chain.push(next);
        }
        Ok(chain)
    }

    /// Deletes backups, newer ones before those on which they are based, and those of machines before those of their
    /// disks. `Busy` if another backup needs one of them, or a disk is being restored from one of them. The caller
    /// holds the lock.
    pub fn delete(&self, manifests: &[Manifest]) -> Result<()> {
        let all = self.found()?;
        let gone: BTreeSet<&String> = manifests.iter().map(|manifest| &manifest.backup.id).collect();
        for found in all.iter().filter(|found| !gone.contains(&found.id)) {
            let other = found.manifest.as_ref().map_err(|error| {
                let remedy = match error.kind() {
                    ErrorKind::Corrupt => "delete it first",
                    _ => "make it readable, or use the version of lamina that made it",
                };
                let text = format!(
                    "the manifest of backup {} cannot be read, so it is unknown on which backups it is based: {remedy} \
                     ({error})",
                    found.id
                );
                Error::new(ErrorKind::Corrupt, text)
            })?;
            if let Some(needed) = other.needs().find(|needed| gone.contains(needed)) {
                let why = if other.backup.machine.is_some() { "needs it" } else { "is based on it" };
                let text = format!(
                    "backup {needed} cannot be deleted: backup {} of '{}' {why}",
                    found.id,
                    other.backup.source()
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
        self.refuse_read(gone.iter().copied())?;
        let mut left: BTreeMap<&String, &Manifest> =
            manifests.iter().map(|manifest| (&manifest.backup.id, manifest)).collect();
        while !left.is_empty() {
            let needed: BTreeSet<&String> = left.values().flat_map(|manifest| manifest.needs()).collect();
            // Backups that are based on each other in a circle are damaged, and deleted in any order.
            let next: Vec<&String> = left.keys().copied().filter(|id| !needed.contains(id)).collect();
            let next = if next.is_empty() { left.keys().copied().collect() } else { next };
            for id in next {
                self.remove(id)?;
                left.remove(id);
            }
        }
        self.objects.settle()
    }

    /// Deletes the backup with an identity, complete or not, without checking whether others are based on it.
    pub(crate) fn remove(&self, id: &str) -> Result<()> {
        self.objects.remove(&format!("{BACKUP}{id}"))?;
        self.objects.settle()?;
        let names = self.objects.list()?;
        for name in names.iter().filter(|name| owner_of(name) == Some(id)) {
            self.objects.remove(name)?;
        }
        self.objects.remove(&format!("{UNFINISHED}{id}"))
    }

    /// Deletes the backup whose manifest is damaged, or the unfinished backup, whose identity is `which` or begins with
    /// it. False if there is none, or more than one. A manifest of a later version, or that cannot be read now, is not
    /// damaged: other backups may be based on it. The caller holds the lock.
    pub fn delete_damaged(&self, which: &str) -> Result<bool> {
        let is_damaged = |found: &Found| found.manifest.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt);
        let damaged = self.found()?.into_iter().filter(is_damaged).map(|found| found.id);
        let all: BTreeSet<String> = damaged.chain(self.unfinished_ids()?).collect();
        let named = |id: &&String| which.len() >= PREFIX_MIN && id.starts_with(which);
        let [id] = all.iter().filter(named).collect::<Vec<_>>()[..] else { return Ok(false) };
        self.refuse_read([id])?;
        self.remove(id)?;
        self.objects.settle()?;
        Ok(true)
    }

    fn unfinished_ids(&self) -> Result<Vec<String>> {
        let complete: BTreeSet<String> = self.ids(BACKUP)?.into_iter().collect();
        Ok(self.ids(UNFINISHED)?.into_iter().filter(|id| !complete.contains(id)).collect())
    }

    /// Removes packs that belong to no backup, as an interrupted deletion leaves them, and parts of objects, as
    /// interrupted backups leave them. Returns the number of packs. The caller holds the lock.
    pub fn sweep(&self) -> Result<u64> {
        self.objects.sweep(&|name| {
            let prefixes = [BACKUP, UNFINISHED, READER];
            let id = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).or_else(|| owner_of(name));
            id.is_some_and(|id| parse_id(id).is_some())
        })?;
        let names = self.objects.list()?;
        let known =
            |name: &String| name.strip_prefix(BACKUP).or_else(|| name.strip_prefix(UNFINISHED)).map(str::to_owned);
        let known: BTreeSet<String> = names.iter().filter_map(known).collect();
        let mut swept = 0;
        for name in names.iter().filter(|name| owner_of(name).is_some_and(|id| !known.contains(id))) {
            self.objects.remove(name)?;
            swept += 1;
        }
        self.objects.settle()?;
        Ok(swept)
    }
}

/// Whether a record will not be readable later either.
pub(crate) fn is_unusable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Unsupported)
}

fn age(manifest: &Manifest) -> (u64, u64, &String) {
    (manifest.backup.number, manifest.backup.begun, &manifest.backup.id)
}
