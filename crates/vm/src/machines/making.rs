//! Machines that are being created.

use super::intent::{Intended, Intent, OwnDisk, Snapshot};
use super::{Machines, NEW};
use crate::busy::{DISK_OF_ENDED_PROCESS, while_busy};
use crate::definition::Definition;
use crate::disks::{Disks, Facts};
use crate::durable;
use crate::machine::{DEFINITION, Machine, of_another_user};
use backend::clock;
use error::{Error, ErrorKind, IoContext, Result};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Machines that are being created. Dropping this value removes the unfinished machines, with the disks that were
/// created for them.
pub struct Making {
    folder: PathBuf,
    machines: PathBuf,
    disks: Arc<dyn Disks>,
    intent: Intent,
    /// Disks that exist and were created by this process.
    made: Mutex<BTreeSet<String>>,
    /// Disks whose creation was announced, with the time.
    begun: Mutex<Vec<(u64, String)>>,
    open: bool,
    lock: File,
}

/// Which disks of an intent may be deleted.
pub(super) enum DiskSelection<'a> {
    /// Disks that this process has created.
    Made(&'a BTreeSet<String>),
    /// Disks that match the intent and were created after the command has begun to create them.
    MadeSinceBegun,
    /// All disks that the intent names.
    Named {
        /// Whether snapshots are handed over to the linked clones that are based on them.
        promote: bool,
        /// How long a disk may remain open.
        patience: Duration,
    },
}

impl Machines {
    /// Begins to create machines. `made_for` returns the disks that are created for each machine. `snapshots` are taken
    /// for these machines, and are deleted at the end unless clones are based on them.
    pub fn make(
        &self,
        definitions: &[Definition],
        made_for: impl Fn(&Definition) -> Vec<OwnDisk>,
        snapshots: Vec<Snapshot>,
    ) -> Result<Making> {
        let mut names = BTreeSet::new();
        for definition in definitions {
            definition.check()?;
            if self.has(&definition.name) || !names.insert(&definition.name) {
                let text = format!("there is a machine '{}' already", definition.name);
                return Err(Error::new(ErrorKind::Exists, text));
            }
        }
        let intended = |one: &Definition| Intended { name: one.name.clone(), disks: made_for(one) };
        let intent = Intent::new(definitions.iter().map(intended).collect(), snapshots);
        let (folder, lock) = self.begin(NEW, &intent)?;
        let making = Making {
            folder,
            machines: self.folder.clone(),
            disks: Arc::clone(&self.disks),
            intent,
            made: Mutex::default(),
            begun: Mutex::default(),
            open: true,
            lock,
        };
        let mut files = Vec::with_capacity(definitions.len());
        for definition in definitions {
            files.push((making.folder.join(&definition.name).join(DEFINITION), definition.to_text()?));
        }
        durable::write_many(&files)?;
        Ok(making)
    }
}

impl Making {
    /// Records durably that the given disks are about to be created. If this process is killed, recovery deletes no
    /// disk that was not announced, provided that this was called before the first disk was created. A command that
    /// takes long calls this, because users may create disks with the names meanwhile.
    pub fn begin_disks(&self, disks: &[&str]) -> Result<()> {
        let mut begun = self.begun.lock();
        let now = clock::seconds();
        begun.extend(disks.iter().map(|disk| (now, (*disk).to_owned())));
        Intent::write_begun(&self.folder, &begun)
    }

    /// Records that the given disks were created by this process.
    pub fn made(&self, disks: impl IntoIterator<Item = String>) {
        self.made.lock().extend(disks);
    }

    /// A machine of this operation that is not finished.
    pub fn machine(&self, name: &str) -> Machine {
        Machine::at(self.folder.join(name))
    }

    /// Completes a machine: from now on it remains even if this process is killed. [`Making::settle`] makes it durable.
    pub fn finish(&self, name: &str) -> Result<Machine> {
        let folder = self.machines.join(name);
        if folder.exists() {
            return Err(Error::new(ErrorKind::Exists, format!("there is a machine '{name}' already")));
        }
        // If another command has created a machine with this name meanwhile, the rename fails: it replaces only an
        // empty folder, and the folder of a machine is never empty.
        fs::rename(self.folder.join(name), &folder).during(|| format!("making machine '{name}'"))?;
        Ok(Machine::at(folder))
    }

    /// Ends after an error: removes the unfinished machines with their disks, or leaves them to the next command, if it
    /// is unknown which disks exist. Returns the error.
    pub fn failed(self, error: Error) -> Error {
        if is_uncertain(&error) {
            self.leave();
        }
        error
    }

    /// Ends without removing anything, if it is unknown which disks exist. The next command cleans up.
    pub fn leave(mut self) {
        self.open = false;
        if let Err(error) = durable::sync(&self.machines) {
            tracing::error!("{error}");
        }
    }

    /// Ends the creation: finished machines are made durable, unfinished ones are removed.
    pub fn settle(mut self) -> Result<()> {
        durable::sync(&self.machines)?;
        self.open = false;
        self.take_away()
    }

    fn take_away(&self) -> Result<()> {
        take_away((&self.folder, &self.lock), &self.intent, &*self.disks, DiskSelection::Made(&self.made.lock()))
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if self.open
            && let Err(error) = self.take_away()
        {
            tracing::error!("removing '{}' failed and is repeated by the next command: {error}", self.folder.display());
        }
    }
}

/// Removes what is still in a folder of a command: processes, disks, machines, and snapshots without clones. The folder
/// is given twice: by its path, and as an open folder. In a datastore of another user, who could have replaced a folder
/// by a link, root removes only an empty folder: the next command of that user removes the rest.
pub(super) fn take_away(
    (folder, opened): (&Path, &File),
    intent: &Intent,
    disks: &dyn Disks,
    selection: DiskSelection<'_>,
) -> Result<()> {
    if of_another_user(folder.ancestors().take(3))?.is_some() {
        return if intent.snapshots.is_empty() { Intent::remove_if_last(folder, opened) } else { Ok(()) };
    }
    let left: Vec<&Intended> = intent.machines.iter().filter(|machine| folder.join(&machine.name).exists()).collect();
    let mut claims = Vec::new();
    for machine in &left {
        let machine = Machine::at(folder.join(&machine.name));
        claims.extend(machine.end_processes()?);
        machine.remove_own_memory()?;
    }
    // One query lists the disks for all machines.
    let (there, begun) = match (&selection, left.iter().any(|machine| !machine.disks.is_empty())) {
        (DiskSelection::MadeSinceBegun, true) => (disks.all()?, Intent::read_begun(folder)?),
        (DiskSelection::Made(_), true) => (BTreeMap::new(), Intent::read_begun(folder)?),
        _ => (BTreeMap::new(), None),
    };
    if let Some(lines) = begun.as_deref() {
        // A disk is restored hidden, and exists once it is complete.
        let names = left.iter().flat_map(|machine| &machine.disks).map(|disk| &disk.name);
        let restores = names.filter_map(|name| Some((name.clone(), intent.disk_begun(name, Some(lines))?)));
        let restores: Vec<(String, u64)> = restores.collect();
        if !restores.is_empty() {
            disks.forget_restores(&restores)?;
        }
    }
    let is_left = |disk: &OwnDisk| {
        let since = intent.disk_begun(&disk.name, begun.as_deref());
        there.get(&disk.name).zip(since).is_some_and(|(facts, since)| is_ours(disk, facts, since))
    };
    for machine in left {
        for disk in &machine.disks {
            match &selection {
                DiskSelection::Made(made) if made.contains(&disk.name) => {
                    delete(disks, &disk.name, false, DISK_OF_ENDED_PROCESS)?;
                }
                DiskSelection::MadeSinceBegun if is_left(disk) => {
                    // A user may have cloned the disk. Without the handover, no command could complete the removal.
                    delete(disks, &disk.name, true, DISK_OF_ENDED_PROCESS)?;
                }
                DiskSelection::Named { promote, patience } => delete(disks, &disk.name, *promote, *patience)?,
                _ => {}
            }
        }
        let own = folder.join(&machine.name);
        fs::remove_dir_all(&own).during(|| format!("removing '{}'", own.display()))?;
    }
    for Snapshot { disk, name } in &intent.snapshots {
        match disks.delete_snapshot(disk, name) {
            // The snapshot was not taken, was deleted with its disk, or is the base of clones, so that it stays.
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy) => return Err(error),
            _ => {}
        }
    }
    Intent::remove(folder)
}

/// Whether an error leaves it unknown which disks were created, because the server has not replied.
pub(crate) fn is_uncertain(error: &Error) -> bool {
    error.kind() == ErrorKind::Io
}

/// Whether an existing disk is the one that the intent names: it has the same origin, and is not older than the time at
/// which its creation has begun. One second of difference is allowed, because times are rounded to seconds.
fn is_ours(disk: &OwnDisk, facts: &Facts, begun: u64) -> bool {
    let origin = disk.origin.as_ref().map(|origin| (&*origin.disk, &*origin.name));
    let has = facts.origin.as_ref().map(|(disk, snapshot)| (&**disk, &**snapshot));
    origin == has && facts.created + 1 >= begun
}

/// Deletes a disk that an ending process may still have open.
fn delete(disks: &dyn Disks, disk: &str, promote: bool, patience: Duration) -> Result<()> {
    match while_busy(patience, || disks.delete(disk, promote)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}
