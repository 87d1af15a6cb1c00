//! Backups of machines: the backups of a machine's disks at one snapshot of the machine, and the machine's own files.
//!
//! | object | content |
//! |---|---|
//! | the backups of the disks | as of any disk: increments, and found again by the identities of their snapshots |
//! | `pack-ID-00000000` | the machine's files, one after another, as the blocks of a disk |
//! | `backup-ID` | the manifest, which names the files and, for each disk, its backup |
//!
//! 1. The manifest of the machine is written after everything that it names is durable. So an interruption leaves
//!    backups of disks, complete or not, but no backup of a machine that lacks something. The next attempt continues.
//! 2. One lock is held from the first disk to the manifest, so that nothing is deleted meanwhile.
//! 3. A backup that the manifest of a machine names is not deleted before that manifest.
//! 4. The manifest has version 2. A program that reads version 1 only deletes no other backup as long as it exists.

use crate::chain::Chain;
use crate::create::{CreateOptions, Created, compress, compressor, program};
use crate::level::record_of;
use crate::manifest::{Description, Manifest, PackRecord, is_name, parse_id};
use crate::pack::{BlockRun, Builder, CHUNK, Pack};
use crate::repository::{BackupInfo, Repository, pack_name};
use crate::seal::Key;
use crate::stored::{Earlier, next_number};
use backend::{BLOCK_SIZE, Buffer, clock};
use disk::Provisioning;
use disk::transfer::{Outgoing, SEGMENT, SnapshotIdentity, new_identity};
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use work::{Progress, WorkPart, WorkPlace};

/// Most bytes of a machine's files together: the files of UEFI variables have up to 4 MiB.
pub const FILES_MAX: u64 = 7 << 20;
/// Most files and disks of a machine.
const COUNT_MAX: usize = 1024;

/// The machine in the description of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineDescription {
    /// The machine's UUID.
    pub uuid: String,
    /// Consistency of the snapshot: `stopped`, `quiesced` or `crash-consistent`.
    pub consistency: String,
    /// The machine's files, in the order of their content.
    pub files: Vec<MachineFile>,
}

/// A file of a machine in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineFile {
    /// The file's name.
    pub name: String,
    /// The file's bytes.
    pub length: u64,
}

/// A disk of a machine in a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineDisk {
    /// The disk.
    pub disk: String,
    /// Identity of the disk's backup.
    pub backup: String,
}

impl MachineDescription {
    /// Whether the description is consistent, for files with `total` bytes.
    pub(crate) fn holds(&self, total: u64) -> bool {
        let names: BTreeSet<&String> = self.files.iter().map(|file| &file.name).collect();
        let length = self.files.iter().try_fold(0u64, |sum, file| sum.checked_add(file.length));
        parse_id(&self.uuid).is_some()
            && is_name(&self.consistency)
            && self.files.len() <= COUNT_MAX
            && names.len() == self.files.len()
            && names.into_iter().all(|name| is_name(name))
            && length == Some(total)
            && total <= FILES_MAX
    }
}

impl MachineDisk {
    /// Whether the disks in the manifest of the backup `id` are consistent.
    pub(crate) fn hold(disks: &[Self], id: &str) -> bool {
        let names: BTreeSet<&String> = disks.iter().map(|disk| &disk.disk).collect();
        let right = |disk: &Self| is_name(&disk.disk) && parse_id(&disk.backup).is_some() && disk.backup != id;
        disks.len() <= COUNT_MAX && names.len() == disks.len() && disks.iter().all(right)
    }
}

/// A machine at a snapshot, without the content of its disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachinePoint {
    /// The machine's name.
    pub machine: String,
    /// The machine's UUID.
    pub uuid: String,
    /// The snapshot.
    pub snapshot: String,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
    /// Consistency of the snapshot, as one word.
    pub consistency: String,
    /// The machine's files.
    pub files: Vec<MachineContent>,
}

/// A file of a machine with its content.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineContent {
    /// The file's name.
    pub name: String,
    /// The content, in hexadecimal digits in requests.
    #[serde(with = "crate::hex")]
    pub content: Vec<u8>,
}

impl fmt::Debug for MachineContent {
    /// Without the content, which may have passwords, because servers log requests.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", self.name, self.content.len())
    }
}

impl MachinePoint {
    /// Bytes of all files together.
    ///
    /// # Errors
    /// `Invalid` for files that are too long.
    pub fn check(&self) -> Result<u64> {
        let total: u64 = self.files.iter().map(|file| file.content.len() as u64).sum();
        if total <= FILES_MAX {
            return Ok(total);
        }
        let text = format!(
            "the files of machine '{}' have {total} bytes together, and a backup takes {FILES_MAX}",
            self.machine
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }
}

/// A machine that is read from a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredMachine {
    /// The manifest, which names the disks.
    pub manifest: Manifest,
    /// The machine with its files.
    pub point: MachinePoint,
    /// The names of the snapshots of the disks, in the order of the disks. They differ from the name of the machine's
    /// snapshot if the machine was imported from a program with other rules for names.
    pub snapshots: Vec<String>,
}

/// The result of a backup of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineCreated {
    /// Identity of the machine's backup.
    pub id: String,
    /// The machine.
    pub machine: String,
    /// The snapshot.
    pub snapshot: String,
    /// The backups of the disks, in the order of the disks.
    pub disks: Vec<Created>,
    /// Bytes stored for the machine's files.
    pub stored: u64,
    /// Whether later backups can be based on the snapshots of the disks.
    pub incremental: bool,
    /// Whether the snapshot was backed up before, so that nothing was done.
    pub already: bool,
    /// Duration in seconds.
    pub seconds: f64,
}

/// The backup of a machine, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineBackupInfo {
    /// The machine's UUID.
    pub uuid: String,
    /// Consistency of the snapshot, as one word.
    pub consistency: String,
    /// The disks with their backups; empty for an unfinished backup.
    pub disks: Vec<MachineDisk>,
}

impl MachineBackupInfo {
    pub(crate) fn of(machine: &MachineDescription) -> Self {
        Self { uuid: machine.uuid.clone(), consistency: machine.consistency.clone(), disks: Vec::new() }
    }

    /// Gives the backups of machines the sizes of their disks together, and finds those that lack the backup of a disk.
    /// `of` is the backup in a value.
    pub(crate) fn complete<T>(all: &mut [T], of: impl Fn(&mut T) -> &mut BackupInfo) {
        let mut disks: BTreeMap<String, (u64, u64, u64, bool)> = BTreeMap::new();
        for info in all.iter_mut().map(&of).filter(|info| info.machine.is_none()) {
            disks.insert(info.id.clone(), (info.capacity, info.data, info.stored, info.problem.is_none()));
        }
        for info in all.iter_mut().map(&of) {
            let Some(machine) = &info.machine else { continue };
            for disk in &machine.disks {
                match disks.get(&disk.backup) {
                    Some((capacity, data, stored, usable)) => {
                        info.capacity = info.capacity.saturating_add(*capacity);
                        info.data = info.data.saturating_add(*data);
                        info.stored = info.stored.saturating_add(*stored);
                        if !usable {
                            info.problem =
                                Some(format!("backup {} of its disk '{}' cannot be used", disk.backup, disk.disk));
                        }
                    }
                    None => {
                        let text = format!("backup {} of its disk '{}' is missing or damaged", disk.backup, disk.disk);
                        info.problem = Some(text);
                    }
                }
            }
        }
    }
}

impl Description {
    /// `Invalid` for the backup of a machine, where the backup of a disk is needed.
    pub(crate) fn refuse_machine(&self) -> Result<()> {
        if self.machine.is_none() {
            return Ok(());
        }
        let text = format!(
            "backup {} is that of a machine, '{}': 'lamina vm backup restore' restores it",
            self.id,
            self.source()
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }
}

/// The pack with the files of a machine.
fn pack_of(id: [u8; 16], files: &[MachineContent], options: CreateOptions<'_>) -> Result<(Pack, u64)> {
    let mut plain: Vec<u8> = files.iter().flat_map(|file| &file.content).copied().collect();
    plain.resize(plain.len().next_multiple_of(BLOCK_SIZE), 0);
    let mut compressor = compressor(options.level)?;
    let mut builder = Builder::new(0);
    for (number, piece) in plain.chunks(CHUNK as usize).enumerate() {
        let run = BlockRun { first: 0, last: (piece.len() / BLOCK_SIZE - 1) as u8 };
        let (chunk, stored) = compress(number as u32, vec![run], piece.to_vec(), &mut compressor)?;
        builder.chunk(&chunk, &stored);
    }
    Ok((builder.finish(id, 0, 1, options.key.map(|key| &**key))?, plain.len() as u64))
}

impl Repository {
    /// Backs up a machine: its disks, each with the name of the disk, and its files. Backups of the disks that exist
    /// already are used. A snapshot that was backed up before is not backed up again.
    ///
    /// # Errors
    /// As [`Repository::create`]; `Invalid` for files that are too long.
    pub fn create_machine(
        &self,
        point: &MachinePoint,
        disks: &[(String, Outgoing)],
        full: bool,
        options: CreateOptions<'_>,
        progress: &dyn Progress,
    ) -> Result<MachineCreated> {
        let begun = Instant::now();
        let _lock = self.lock()?;
        let manifests = self.manifests()?;
        self.check_key(&manifests, options)?;
        let incremental = disks.iter().any(|(_, outgoing)| !outgoing.bases().is_empty());
        if let Some((known, disks)) = self.known(&manifests, point, disks, full, options)? {
            // The attempt that wrote the manifest may have been killed before the manifest's name was durable.
            self.objects().settle()?;
            return Ok(MachineCreated {
                id: known.backup.id.clone(),
                machine: known.backup.disk.clone(),
                snapshot: known.backup.point.name.clone(),
                disks: disks.into_iter().map(Created::already).collect(),
                stored: known.stored(),
                incremental,
                already: true,
                seconds: begun.elapsed().as_secs_f64(),
            });
        }
        let number = next_number(&manifests);
        // The backup of the machine comes after those of its disks.
        let description = self.begin_machine(number + disks.len() as u64, point, options)?;
        let total = disks.iter().map(|(_, outgoing)| outgoing.capacity()).sum();
        let (mut before, mut made) = (0, Vec::with_capacity(disks.len()));
        for (number, (disk, outgoing)) in (number..).zip(disks) {
            let part = WorkPart { whole: progress, place: WorkPlace::Behind { before, total } };
            let earlier = Earlier { manifests: &manifests, number };
            let of_disk = self.create_locked(outgoing, disk, full, options, &part, earlier);
            made.push(of_disk.map_err(|error| error.context(format_args!("disk '{disk}'")))?);
            before += outgoing.capacity();
        }
        let (pack, data) = pack_of(description.id_bytes()?, &point.files, options)?;
        let record: PackRecord = record_of(&pack.head, &pack.bytes);
        let named = disks.iter().zip(&made);
        let manifest = Manifest {
            backup: description,
            finished: clock::seconds(),
            data,
            zeros: 0,
            packs: vec![record],
            disks: named.map(|((disk, _), made)| MachineDisk { disk: disk.clone(), backup: made.id.clone() }).collect(),
        };
        // Encoded first, so that a manifest that no program would read is not written.
        Manifest::decode(&manifest.encode()?)?;
        self.objects().put(&pack_name(&manifest.backup.id, 0), &pack.bytes)?;
        self.finish(&manifest)?;
        self.forget_unfinished(&point.uuid);
        Ok(MachineCreated {
            id: manifest.backup.id.clone(),
            machine: point.machine.clone(),
            snapshot: point.snapshot.clone(),
            stored: manifest.stored(),
            incremental,
            disks: made,
            already: false,
            seconds: begun.elapsed().as_secs_f64(),
        })
    }

    /// The backup of a machine's snapshot, and those of its disks, if there is one that can be used.
    fn known<'a>(
        &self,
        manifests: &'a [Manifest],
        point: &MachinePoint,
        disks: &[(String, Outgoing)],
        full: bool,
        options: CreateOptions<'_>,
    ) -> Result<Option<(&'a Manifest, Vec<&'a Manifest>)>> {
        let same = |known: &&Manifest| {
            let backup = &known.backup;
            backup.machine.as_ref().is_some_and(|machine| machine.uuid == point.uuid)
                && backup.disk == point.machine
                && (&backup.point.name, backup.point.created) == (&point.snapshot, point.created)
                && backup.key.as_deref() == options.key.map(|key| key.id())
                && known.disks.len() == disks.len()
        };
        let of_disk = |(known, (disk, outgoing)): (&MachineDisk, &(String, Outgoing))| {
            let found = manifests.iter().find(|manifest| {
                manifest.backup.id == known.backup
                    && known.disk == *disk
                    && manifest.backup.point.uuid == outgoing.point().uuid
                    && (!full || manifest.backup.parent.is_none())
            })?;
            self.is_usable(found, options).map(|usable| usable.then_some(found)).transpose()
        };
        for known in manifests.iter().rev().filter(same) {
            let disks = known.disks.iter().zip(disks).map(of_disk).collect::<Option<Result<Vec<_>>>>().transpose()?;
            if let Some(disks) = disks {
                return Ok(Some((known, disks)));
            }
        }
        Ok(None)
    }

    /// Records that the backup of a machine begins, or continues the attempt that was interrupted.
    fn begin_machine(&self, number: u64, point: &MachinePoint, options: CreateOptions<'_>) -> Result<Description> {
        let total = point.check()?;
        let file = |file: &MachineContent| MachineFile { name: file.name.clone(), length: file.content.len() as u64 };
        let files = point.files.iter().map(file);
        let mut description = Description {
            id: new_identity()?,
            disk: point.machine.clone(),
            capacity: total,
            provisioning: Provisioning::Thin,
            point: SnapshotIdentity { uuid: new_identity()?, name: point.snapshot.clone(), created: point.created },
            parent: None,
            key: options.key.map(|key| key.id().to_owned()),
            begun: clock::seconds(),
            number,
            program: program(),
            machine: Some(MachineDescription {
                uuid: point.uuid.clone(),
                consistency: point.consistency.clone(),
                files: files.collect(),
            }),
        };
        let same = |known: &Description| {
            let machine = known.machine.as_ref().is_some_and(|machine| machine.uuid == point.uuid);
            machine && (&known.point.name, known.point.created) == (&point.snapshot, point.created)
        };
        if let Some(known) = self.unfinished()?.into_iter().find(same) {
            // The time of the first attempt tells which backups of disks were made for this backup.
            (description.id, description.begun) = (known.id, known.begun);
        }
        let bytes = description.encode()?;
        Description::decode(&bytes)?;
        self.begin(&description)?;
        Ok(description)
    }

    /// Removes the descriptions of backups of a machine that were interrupted: a later one is complete. An error leaves
    /// them to the next backup.
    fn forget_unfinished(&self, uuid: &str) {
        let of_machine = |known: &Description| known.machine.as_ref().is_some_and(|machine| machine.uuid == uuid);
        let forgotten = self
            .unfinished()
            .and_then(|all| all.into_iter().filter(of_machine).try_for_each(|known| self.remove(&known.id)));
        if let Err(error) = forgotten {
            tracing::warn!("interrupted backups of a machine are still listed in '{}': {error}", self.place());
        }
    }

    /// The backup of a machine that a user names: as [`Repository::find`], where the prefix of a machine's name may be
    /// left out.
    pub fn find_machine(&self, which: &str) -> Result<Manifest> {
        let named = match which.contains(':') {
            true => self.find(which),
            // An identity, or else a name.
            false => self
                .find(which)
                .ok()
                .filter(|manifest| manifest.backup.id.starts_with(which))
                .map_or_else(|| self.find(&format!("{}{which}", crate::manifest::MACHINE)), Ok),
        };
        let manifest = named?;
        match manifest.backup.machine {
            Some(_) => Ok(manifest),
            None => {
                let text = format!(
                    "backup {} is that of a disk, '{}': 'lamina backup restore' restores it",
                    manifest.backup.id,
                    manifest.backup.source()
                );
                Err(Error::new(ErrorKind::Invalid, text))
            }
        }
    }

    /// Reads the backup of a machine. Its files are verified, and all backups that it needs exist.
    ///
    /// # Errors
    /// `NotFound` if there is no such backup; `Invalid` without the key of an encrypted backup; `Corrupt` if something
    /// is damaged or missing.
    pub fn machine(&self, which: &str, key: Option<&Arc<Key>>) -> Result<StoredMachine> {
        let manifest = self.find_machine(which)?;
        let wrong =
            || Error::new(ErrorKind::Corrupt, format!("backup {} is not that of a machine", manifest.backup.id));
        let machine = manifest.backup.machine.as_ref().ok_or_else(wrong)?;
        let whole = self.whole(manifest.clone())?;
        let snapshot = |disk: &MachineDisk| {
            let of_disk = whole.iter().find(|of_disk| of_disk.backup.id == disk.backup);
            of_disk.map(|of_disk| of_disk.backup.point.name.clone()).ok_or_else(wrong)
        };
        let snapshots = manifest.disks.iter().map(snapshot).collect::<Result<_>>()?;
        let mut chain = Chain::stored(self, &[Arc::new(manifest.clone())], key)?;
        let plan = chain.plan(0)?;
        let mut buffer = Buffer::zeroed(SEGMENT as usize / BLOCK_SIZE);
        chain.read(&plan, &mut buffer)?;
        let (mut at, mut files) = (0, Vec::with_capacity(machine.files.len()));
        for file in &machine.files {
            // The lengths have a sum of at most [`FILES_MAX`], as the record was decoded.
            let end = at + file.length as usize;
            files.push(MachineContent { name: file.name.clone(), content: buffer[at..end].to_vec() });
            at = end;
        }
        let point = MachinePoint {
            machine: manifest.backup.disk.clone(),
            uuid: machine.uuid.clone(),
            snapshot: manifest.backup.point.name.clone(),
            created: manifest.backup.point.created,
            consistency: machine.consistency.clone(),
            files,
        };
        Ok(StoredMachine { manifest, point, snapshots })
    }

    /// A backup with all backups that it needs: those on which it is based; for a machine, those of its disks.
    pub(crate) fn whole(&self, manifest: Manifest) -> Result<Vec<Manifest>> {
        if manifest.backup.machine.is_none() {
            return self.chain(manifest);
        }
        let mut whole = Vec::with_capacity(1 + manifest.disks.len());
        for MachineDisk { disk, backup } in &manifest.disks {
            let broken = |why: &str| {
                let text = format!(
                    "backup {} in '{}' cannot be used: backup {backup} of its disk '{disk}' {why}",
                    manifest.backup.id,
                    self.place()
                );
                Error::new(ErrorKind::Corrupt, text)
            };
            let of_disk = self.manifest(backup).map_err(|error| match error.kind() {
                ErrorKind::NotFound => broken("is missing"),
                _ => error,
            })?;
            if of_disk.backup.machine.is_some() || of_disk.backup.key != manifest.backup.key {
                return Err(broken("is that of a machine, or has another key"));
            }
            whole.extend(self.chain(of_disk)?);
        }
        whole.insert(0, manifest);
        Ok(whole)
    }

    /// For backups that are to be deleted: adds the backups of disks that were made for the backups of machines among
    /// them, except those that the backups of other machines need.
    pub fn with_disks(&self, mut manifests: Vec<Manifest>) -> Result<Vec<Manifest>> {
        let all = self.manifests()?;
        let mut gone: BTreeSet<String> = manifests.iter().map(|manifest| manifest.backup.id.clone()).collect();
        let stays = all.iter().filter(|known| known.backup.machine.is_some() && !gone.contains(&known.backup.id));
        let needed: BTreeSet<&String> =
            stays.flat_map(|machine| machine.disks.iter().map(|disk| &disk.backup)).collect();
        let mut own = Vec::new();
        for machine in &manifests {
            for disk in machine.disks.iter().filter(|disk| !needed.contains(&disk.backup)) {
                // An older backup was made for the disk alone, or for another machine's backup.
                let made_for =
                    |known: &&Manifest| known.backup.id == disk.backup && known.backup.begun >= machine.backup.begun;
                if let Some(found) = all.iter().find(made_for)
                    && gone.insert(found.backup.id.clone())
                {
                    own.push(found.clone());
                }
            }
        }
        manifests.append(&mut own);
        Ok(manifests)
    }
}

#[cfg(test)]
mod tests;
