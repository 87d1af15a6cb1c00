//! Backups of machines: the files of a machine at a snapshot, and machines that are restored from such files and from
//! backups of their disks.
//!
//! 1. A backup has the machine at a snapshot: its definition, its UEFI variables, and the snapshots of its disks.
//! 2. All names are checked before anything of a restored machine is created.
//! 3. A restored machine exists once all of its disks exist ([`crate::machines`]).
//! 4. No two machines of a datastore have the same identity: a restored machine gets a new one as a clone does, if
//!    there is a machine with the UUID or a MAC address of the backup.

use crate::clone::Sum;
use crate::definition::{CloneKind, Definition, Disk, Origin, disk_name};
use crate::host::Host;
use crate::machine::Machine;
use crate::machines::{OwnDisk, Snapshot, list_with_new};
use crate::nvram;
use crate::snapshots::{self, Record};
use error::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use work::Progress;

/// Prefix of the snapshots of machines that are taken for backups of the current state.
pub const PREFIX: &str = "machine-backup-";
/// Names of a machine's files in a backup.
const DEFINITION: &str = "machine.toml";
/// See [`DEFINITION`].
const NVRAM: &str = "nvram";
/// Consistency of the disks of a snapshot that was taken with memory, and is restored without it.
const WITHOUT_MEMORY: &str = "crash-consistent";

/// A file of a machine: its name and its content.
pub type SavedFile = (String, Vec<u8>);

/// A machine at a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The machine's definition at the snapshot.
    pub definition: Definition,
    /// The snapshot.
    pub snapshot: String,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
    /// Consistency of the snapshot without its memory, as one word.
    pub consistency: String,
    /// The snapshots of the machine's disks, in the order of the disks.
    pub disks: Vec<Snapshot>,
    /// The machine's files.
    pub files: Vec<SavedFile>,
}

/// The machine at a snapshot, for a backup.
pub fn saved(machine: &Machine, snapshot: &str) -> Result<Saved> {
    let record = snapshots::get(machine, snapshot)?;
    let mut files = vec![(DEFINITION.to_owned(), record.machine.to_text()?.into_bytes())];
    let variables = nvram::read(&snapshots::folder_of(machine, snapshot))?;
    files.extend(variables.map(|variables| (NVRAM.to_owned(), variables)));
    Ok(Saved {
        consistency: if record.has_memory() { WITHOUT_MEMORY.to_owned() } else { record.consistency },
        definition: record.machine,
        snapshot: record.name,
        created: record.created,
        disks: record.disks,
        files,
    })
}

/// A machine in a backup.
#[derive(Clone, Debug)]
pub struct Restore<'a> {
    /// The name of the restored machine.
    pub name: &'a str,
    /// The snapshot that was backed up.
    pub snapshot: &'a str,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
    /// Consistency of the snapshot.
    pub consistency: &'a str,
    /// The machine's files.
    pub files: &'a [SavedFile],
    /// The disks in the backup, and the names of their snapshots.
    pub disks: &'a [Snapshot],
    /// Whether the restored disks have the snapshot, so that the machine has it too.
    pub has_snapshot: bool,
}

/// A machine that will be restored.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The definition of the machine.
    pub definition: Definition,
    /// Whether the machine gets a new identity.
    pub new_identity: bool,
    /// Images that do not exist any more, and are left out of the machine's CD-ROM drives.
    pub ejected: Vec<PathBuf>,
    nvram: Option<Vec<u8>>,
    snapshot: Option<Record>,
}

/// Plans the restore of a machine, and creates nothing.
///
/// # Errors
/// `Exists` if there is a machine or a disk with a name that the restored machine needs; `Corrupt` if the files are not
/// those of a machine.
pub fn plan(host: &Host, restore: &Restore<'_>) -> Result<Planned> {
    crate::definition::check_name(restore.name)?;
    let corrupt = |what: &str| Error::new(ErrorKind::Corrupt, format!("the backup is not that of a machine: {what}"));
    let content = |name: &str| restore.files.iter().find(|(known, _)| known == name).map(|(_, content)| content);
    let text = content(DEFINITION).ok_or_else(|| corrupt("it has no definition"))?;
    let text = std::str::from_utf8(text).map_err(|_| corrupt("its definition is not UTF-8"))?;
    let former = Definition::parse(text, "machine.toml of the backup")?;
    if !former.disk_names().iter().eq(restore.disks.iter().map(|of| &of.disk)) {
        return Err(corrupt("it has other disks than its definition"));
    }
    let exists = |what: &str| {
        Error::new(ErrorKind::Exists, format!("there is a {what} already: restore the machine under another name"))
    };
    if host.machines().has(restore.name) {
        return Err(exists(&format!("machine '{}'", restore.name)));
    }
    let new_identity = is_in_use(host, &former, None)?;
    let disks = renamed(&former, restore.name);
    let mut definition = match new_identity {
        true => {
            let snapshot = Some(restore.snapshot.to_owned());
            let origin = Origin { machine: former.name.clone(), snapshot, way: CloneKind::Full };
            Definition { disks, ..former.for_clone(restore.name, origin)? }
        }
        false => Definition { name: restore.name.to_owned(), disks, ..former },
    };
    let mut ejected = Vec::new();
    for drive in &mut definition.cdroms {
        if drive.file.as_ref().is_some_and(|file| !file.exists()) {
            ejected.extend(drive.file.take());
        }
    }
    definition.check()?;
    let (there, users) = (host.disks().all()?, host.machines().users_of_disks()?);
    for disk in definition.disk_names() {
        match users.get(&disk) {
            Some(user) => return Err(exists(&format!("disk '{disk}' of machine '{user}'"))),
            None if there.contains_key(&disk) => return Err(exists(&format!("disk '{disk}'"))),
            None => {}
        }
    }
    let of = |(disk, of): (&Disk, &Snapshot)| Snapshot { disk: disk.name.clone(), name: of.name.clone() };
    let snapshot = restore.has_snapshot.then(|| Record {
        version: snapshots::VERSION,
        name: restore.snapshot.to_owned(),
        created: restore.created,
        consistency: restore.consistency.to_owned(),
        passt: false,
        disks: definition.disks.iter().zip(restore.disks).map(of).collect(),
        machine: definition.clone(),
    });
    if let Some(snapshot) = &snapshot {
        snapshots::check_name(&snapshot.name)?;
    }
    Ok(Planned { new_identity, ejected, nvram: content(NVRAM).cloned(), snapshot, definition })
}

/// The disks of a machine under a name: they keep their names if the machine does.
fn renamed(former: &Definition, name: &str) -> Vec<Disk> {
    let disks = former.disks.iter().enumerate();
    disks
        .map(|(index, disk)| match former.name == name {
            true => disk.clone(),
            false => Disk { name: disk_name(name, index), ..disk.clone() },
        })
        .collect()
}

/// Whether a machine of the datastore, or one that is being created, has the identity of a definition. The machine in
/// the folder `own` and a machine whose definition cannot be read do not count.
fn is_in_use(host: &Host, former: &Definition, own: Option<&Path>) -> Result<bool> {
    for machine in list_with_new(host.machines().folder())? {
        let Ok(other) = machine.definition() else { continue };
        if own == Some(machine.folder()) {
            continue;
        }
        let same_card = other.networks.iter().any(|card| former.networks.iter().any(|known| known.mac == card.mac));
        if other.uuid == former.uuid || same_card {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Creates a planned machine. `make_disk` creates the disk with an index and a name, completely or not at all.
pub fn restore(
    host: &Host,
    planned: &Planned,
    make_disk: &dyn Fn(usize, &str, &dyn Progress) -> Result<()>,
    progress: &dyn Progress,
) -> Result<()> {
    let _working = host.work()?;
    let definition = &planned.definition;
    let own = |definition: &Definition| -> Vec<OwnDisk> {
        definition.disk_names().into_iter().map(|name| OwnDisk { name, origin: None }).collect()
    };
    let making = host.machines().make(std::slice::from_ref(definition), own, Vec::new())?;
    // Another restore of the same backup may have begun since the identity was chosen.
    if !planned.new_identity && is_in_use(host, definition, Some(making.machine(&definition.name).folder()))? {
        let text = format!(
            "machine '{}' was not restored: another machine with its identity is being created: try again",
            definition.name
        );
        return Err(Error::new(ErrorKind::Busy, text));
    }
    making.begin_disks(&[])?;
    let sum = Sum::new(definition.disks.len().max(1), progress);
    for (index, disk) in definition.disks.iter().enumerate() {
        if progress.cancelled() {
            return Err(Error::new(ErrorKind::Interrupted, "stopped on request; the machine was not restored"));
        }
        making.begin_disks(&[disk.name.as_str()])?;
        if let Err(error) = make_disk(index, &disk.name, &sum.part()) {
            let error = making.failed(error).context(format_args!("disk '{}'", disk.name));
            return Err(error.context(format_args!("machine '{}' was not restored", definition.name)));
        }
        making.made([disk.name.clone()]);
    }
    let machine = making.machine(&definition.name);
    if let Some(variables) = &planned.nvram {
        nvram::write(machine.folder(), variables)?;
    }
    if let Some(record) = &planned.snapshot {
        snapshots::take_over(&machine, record)?;
        nvram::carry(machine.folder(), &snapshots::folder_of(&machine, &record.name))?;
    }
    making.finish(&definition.name)?;
    making.settle()
}
