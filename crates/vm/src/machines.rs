//! All machines of a datastore: `DATASTORE/machines/NAME/`.
//!
//! ```text
//! NAME/            a machine
//! .new-ID/         machines that are being created: intent.toml, NAME/ for each incomplete machine, and .begun, if the
//!                  disks are created one after the other: the disks whose creation has begun
//! .old-ID/         a machine that is being deleted, with the same files
//! .lock            held while a command creates or lists .new-* and .old-* folders
//! .disks           held while a command looks whether disks are free and adds them to a machine
//! ```
//!
//! 1. A machine exists if its folder is directly in the folder of machines. To create a machine, its folder is prepared
//!    in a folder `.new-*` and then renamed into the folder of machines. To delete a machine, its folder is renamed
//!    into a folder `.old-*`.
//! 2. `intent.toml` is durable before the first disk is created. If the command is killed, [`Machines::recover`]
//!    deletes the disks of every machine whose folder is still in the folder `.new-*` or `.old-*`.
//! 3. A command locks its folder `.new-*` or `.old-*` while it runs; recovery skips locked folders. Recovery also locks
//!    the file `intent.toml` of the folder, so that no disk gets a name that recovery may delete ([`disks_left`]).
//! 4. Recovery deletes no disk of another machine: of a complete one, or of one that a running command creates.
//! 5. In a datastore of another user, a command of root removes only its own folder, if the folder is empty. The next
//!    command of that user removes the rest.

mod intent;
mod making;

pub use intent::{Intended, OwnDisk, Snapshot};
pub use making::Making;
pub(crate) use making::is_uncertain;

use crate::busy::{DISK_OF_ENDED_PROCESS, while_busy};
use crate::clone;
use crate::definition::check_name;
use crate::disks::Disks;
use crate::durable;
use crate::identity::new_uuid;
use crate::instant::freeze;
use crate::machine::{Change, Machine, MachineState, of_another_user};
use crate::snapshots;
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use intent::{INTENT, Intent};
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Name of the folder of machines in a datastore.
pub const FOLDER: &str = "machines";
/// Prefix of folders in which machines are created.
const NEW: &str = ".new-";
/// Prefix of folders in which machines are deleted.
const OLD: &str = ".old-";
/// The lock file for creating and listing folders with the prefixes [`NEW`] and [`OLD`].
const LOCK: &str = ".lock";
/// The lock file for adding existing disks to machines.
const CLAIM: &str = ".disks";
/// How long a server waits for the lock, which commands keep for a moment.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// The machines of a datastore.
pub struct Machines {
    folder: PathBuf,
    disks: Arc<dyn Disks>,
}

impl Machines {
    /// The machines in `folder`, which is created if it does not exist.
    pub fn open(folder: impl Into<PathBuf>, disks: Arc<dyn Disks>) -> Result<Self> {
        let folder = folder.into();
        private::create_folders(&folder).during(|| format!("making '{}'", folder.display()))?;
        Ok(Self { folder, disks })
    }

    /// The folder of all machines.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The interface to the datastore.
    pub fn disks(&self) -> &Arc<dyn Disks> {
        &self.disks
    }

    /// Whether there is a machine of that name.
    pub fn has(&self, name: &str) -> bool {
        check_name(name).is_ok() && self.folder.join(name).exists()
    }

    /// The machine with that name.
    pub fn get(&self, name: &str) -> Result<Machine> {
        check_name(name)?;
        let folder = self.folder.join(name);
        match fs::metadata(&folder) {
            Ok(found) if found.is_dir() => Ok(Machine::at(folder)),
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io(format!("looking for machine '{name}'"), e)),
            _ => {
                let text = format!("there is no machine '{name}'; 'lamina vm list' lists the machines");
                Err(Error::new(ErrorKind::NotFound, text))
            }
        }
    }

    /// All machines, by name, including those whose definition is missing or cannot be read.
    pub fn list(&self) -> Result<Vec<Machine>> {
        list(&self.folder)
    }

    /// The lock under which a command looks whether a disk belongs to a machine and adds it to a definition. Without
    /// it, two commands at the same time could add one disk to two machines.
    pub fn claim_disks(&self) -> Result<File> {
        let path = self.folder.join(CLAIM);
        let lock = lock_file(&path)?;
        lock.lock().during(|| format!("locking '{}'", path.display()))?;
        Ok(lock)
    }

    /// Maps each disk to the machine that uses it, or that is being created with it. If a definition cannot be read,
    /// every disk that its text names counts as used.
    pub fn users_of_disks(&self) -> Result<BTreeMap<String, String>> {
        users_of_disks(&self.folder)
    }

    /// Whether this process is root and the machines, or their datastore, belong to another user.
    pub(crate) fn are_of_another_user(&self) -> Result<bool> {
        Ok(of_another_user(self.folder.ancestors().take(2))?.is_some())
    }

    fn folders(&self) -> Result<Vec<String>> {
        durable::names(&self.folder)
    }

    /// The lock for creating and listing folders of commands: without it, another command could list a folder that is
    /// created but not locked yet.
    fn lock(&self) -> Result<File> {
        lock_file(&self.folder.join(LOCK)).and_then(|lock| {
            lock.lock().during(|| format!("locking '{}'", self.folder.display()))?;
            Ok(lock)
        })
    }

    /// Creates a folder for a command, with the intent: what has to be removed if the command is interrupted.
    fn begin(&self, prefix: &str, intent: &Intent) -> Result<(PathBuf, File)> {
        // The folder's name is short, because sockets are in the folder and the length of their paths is limited.
        let id: String = new_uuid()?.to_string().chars().take(8).collect();
        let folder = self.folder.join(format!("{prefix}{id}"));
        let made = || format!("making '{}'", folder.display());
        let lock = {
            let _others = self.lock()?;
            private::create_folder(&folder).during(made)?;
            let lock = File::open(&folder).during(made)?;
            lock.try_lock().map_err(io::Error::from).during(made)?;
            lock
        };
        for machine in intent.machines.iter().filter(|_| prefix == NEW) {
            private::create_folder(&folder.join(&machine.name)).during(made)?;
        }
        intent.write(&folder)?;
        durable::sync(&self.folder)?;
        Ok((folder, lock))
    }

    /// Deletes a machine that does not run, with the given disks of it, and then `snapshots`, unless clones are based
    /// on them. The caller has read the machine's definition since it locked the machine. With `promote`, snapshots
    /// that clones of its disks are based on are handed over to the clones. A clone that receives a snapshot which was
    /// taken only for clones keeps the snapshot as long as other clones are based on it.
    ///
    /// # Errors
    /// `Busy`, without effect, while the machine runs, its disks or a snapshot of the first disk are in use, or clones
    /// are based on the disks.
    pub fn delete(&self, change: &Change, disks: &[String], snapshots: Vec<Snapshot>, promote: bool) -> Result<()> {
        self.delete_within(change, disks, snapshots, promote, DISK_OF_ENDED_PROCESS)
    }

    /// As [`Machines::delete`]; clients of the disks have the time `patience` to disconnect.
    fn delete_within(
        &self,
        change: &Change,
        disks: &[String],
        mut snapshots: Vec<Snapshot>,
        promote: bool,
        patience: Duration,
    ) -> Result<()> {
        let (machine, name) = (change.machine(), change.machine().name());
        let busy = |text: String| Err(Error::new(ErrorKind::Busy, text));
        if machine.state()? != MachineState::Stopped {
            return busy(format!("machine '{name}' runs; stop it first"));
        }
        for disk in disks {
            let of_disk = match self.disks.snapshots(disk) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                of_disk => of_disk?,
            };
            let for_clones = |name: &str| [clone::PREFIX, freeze::PREFIX].iter().any(|prefix| name.starts_with(prefix));
            for snapshot in of_disk.iter().filter(|snapshot| for_clones(&snapshot.name)) {
                let clones = snapshot.clones.iter().cloned();
                snapshots.extend(clones.map(|disk| Snapshot { disk, name: snapshot.name.clone() }));
            }
            let clones: Vec<String> = of_disk.into_iter().flat_map(|snapshot| snapshot.clones).collect();
            if !clones.is_empty() && !promote {
                let names: Vec<&str> = clones.iter().map(String::as_str).take(5).collect();
                return busy(format!(
                    "clones are based on disk '{disk}' of machine '{name}': {}{}; delete them first, or hand over \
                     the snapshots to them with --promote",
                    names.join(", "),
                    if clones.len() > names.len() { ", .." } else { "" }
                ));
            }
        }
        // Once a disk is deleted, the deletion is completed later, even if it fails now.
        while_busy(patience, || {
            let all = self.disks.all()?;
            match disks.iter().find(|disk| all.get(*disk).is_some_and(|facts| facts.clients > 0)) {
                Some(disk) => {
                    busy(format!("disk '{disk}' of machine '{name}' is in use; disconnect its clients first"))
                }
                None => Ok(()),
            }
        })?;
        change.sweep()?;
        let own = disks.iter().map(|disk| OwnDisk { name: disk.clone(), origin: None }).collect();
        let intent = Intent::new(vec![Intended { name: name.clone(), disks: own }], snapshots);
        let (folder, lock) = self.begin(OLD, &intent)?;
        fs::rename(machine.folder(), folder.join(&name)).during(|| format!("deleting machine '{name}'"))?;
        durable::sync(&folder)?;
        durable::sync(&self.folder)?;
        let selection = making::DiskSelection::Named { promote, patience };
        let deleted = making::take_away((&folder, &lock), &intent, &*self.disks, selection);
        if let Err(error) = &deleted
            && error.kind() == ErrorKind::Busy
        {
            let there = self.disks.all()?;
            if disks.iter().all(|disk| there.contains_key(disk)) {
                // A client has a snapshot of the first disk open, for example for a backup.
                fs::rename(folder.join(&name), machine.folder()).during(|| format!("keeping machine '{name}'"))?;
                durable::sync(&self.folder)?;
                Intent::remove(&folder)?;
            }
        }
        deleted
    }

    /// Completes deletions and undoes creations of machines by killed commands; returns the number of such commands. A
    /// folder that cannot be removed is logged and left for the next command. Root leaves all folders in a datastore of
    /// another user to the next command of that user.
    pub fn recover(&self) -> Result<usize> {
        if self.are_of_another_user()? {
            return Ok(0);
        }
        let unfinished = |name: &String| name.starts_with(NEW) || name.starts_with(OLD);
        if !self.folders()?.iter().any(unfinished) {
            return Ok(0);
        }
        let mut left = Vec::new();
        {
            let _others = self.lock()?;
            for name in self.folders()?.into_iter().filter(unfinished) {
                let folder = self.folder.join(&name);
                let Ok(lock) = File::open(&folder) else { continue };
                // If the folder is locked, another command is using it.
                if lock.try_lock().is_err() {
                    continue;
                }
                // Until its lock is released, no disk gets a name that the intent contains.
                let intent = open_for_lock(&folder.join(INTENT));
                if intent.as_ref().is_ok_and(|file| file.try_lock().is_err()) {
                    continue;
                }
                left.push((folder, name.starts_with(OLD), lock, intent));
            }
        }
        if left.is_empty() {
            return Ok(0);
        }
        // Requests of the killed command may still be running.
        self.disks.settle()?;
        for (folder, deleting, lock, _) in &left {
            tracing::warn!(folder = %folder.display(), "removing what an interrupted command left");
            let intent = Intent::read(folder).and_then(|intent| intent.map(|one| self.spare_others(one)).transpose());
            let outcome = match intent {
                Ok(Some(intent)) => {
                    let selection = match deleting {
                        true => making::DiskSelection::Named { promote: true, patience: DISK_OF_ENDED_PROCESS },
                        false => making::DiskSelection::MadeSinceBegun,
                    };
                    making::take_away((folder, lock), &intent, &*self.disks, selection)
                }
                Ok(None) => fs::remove_dir_all(folder).during(|| format!("removing '{}'", folder.display())),
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                tracing::error!("removing '{}' failed and is repeated by the next command: {error}", folder.display());
            }
        }
        Ok(left.len())
    }

    /// Removes from the intent of a killed command the disks that belong to complete machines: after the command began,
    /// another command created them or added them to its machine.
    ///
    /// # Errors
    /// `Busy` if a running command creates a machine with one of the disks: which of the commands created the disk is
    /// unknown until the running one has ended.
    fn spare_others(&self, mut intent: Intent) -> Result<Intent> {
        let _others = self.lock()?;
        let mut new = Vec::new();
        for name in self.folders()?.into_iter().filter(|name| name.starts_with(NEW)) {
            let folder = self.folder.join(name);
            if is_creating(&folder) {
                new.extend(list_if_there(&folder)?);
            }
        }
        let (complete, new) = (users(list(&self.folder)?), users(new));
        for machine in &mut intent.machines {
            machine.disks.retain(|disk| !complete.contains_key(&disk.name));
        }
        let mut disks = intent.machines.iter().flat_map(|machine| &machine.disks);
        if let Some((disk, machine)) = disks.find_map(|disk| Some((&disk.name, new.get(&disk.name)?))) {
            let text = format!("another command creates machine '{machine}' with disk '{disk}' now");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Ok(intent)
    }
}

/// The machines in a folder, by name.
fn list(folder: &Path) -> Result<Vec<Machine>> {
    let is_one = |name: &String| check_name(name).is_ok() && folder.join(name).is_dir();
    let mut names: Vec<String> = durable::names(folder)?.into_iter().filter(is_one).collect();
    names.sort();
    Ok(names.into_iter().map(|name| Machine::at(folder.join(name))).collect())
}

/// The machines in a folder, and those that are being created there, which may run already.
pub(crate) fn list_with_new(folder: &Path) -> Result<Vec<Machine>> {
    let mut all = list(folder)?;
    for name in durable::names(folder)?.into_iter().filter(|name| name.starts_with(NEW)) {
        all.extend(list_if_there(&folder.join(name))?);
    }
    Ok(all)
}

/// The machines in the folder of a command, which the command may have removed meanwhile.
fn list_if_there(folder: &Path) -> Result<Vec<Machine>> {
    match list(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        machines => machines,
    }
}

/// Maps each disk to the machine that uses it, that is being created with it, or that gets it back by an incomplete
/// revert, in a folder that need not exist. If a definition cannot be read, every disk that its text names counts as
/// used: a mistake in the file must not allow the deletion of a disk.
pub fn users_of_disks(folder: &Path) -> Result<BTreeMap<String, String>> {
    match folder.exists() {
        true => Ok(users(list_with_new(folder)?)),
        false => Ok(BTreeMap::new()),
    }
}

/// Maps the disks of machines to the names of the machines.
fn users(machines: Vec<Machine>) -> BTreeMap<String, String> {
    let mut users = BTreeMap::new();
    for machine in machines {
        let mut disks = match machine.definition() {
            Ok(definition) => definition.disk_names(),
            Err(_) => machine.named_disks(),
        };
        disks.extend(snapshots::disks_of_revert(&machine));
        for disk in disks {
            users.entry(disk).or_insert_with(|| machine.name());
        }
    }
    users
}

/// Names of disks that a command about machines may delete: the next command, because a command that created or deleted
/// their machines was interrupted, or a running one, which completes such work or deletes machines. After a running
/// deletion has deleted a disk, it may fail, and the next command deletes a disk with that name again. The folder of
/// machines need not exist.
///
/// # Errors
/// `Busy` if another process keeps the folder locked.
pub fn disks_left(folder: &Path) -> Result<BTreeSet<String>> {
    disks_left_within(folder, LOCK_PATIENCE)
}

/// As [`disks_left`]; another process has the time `patience` to unlock the folder.
fn disks_left_within(folder: &Path, patience: Duration) -> Result<BTreeSet<String>> {
    let mut left = BTreeSet::new();
    let lock = match open_for_lock(&folder.join(LOCK)) {
        // No command has created or deleted machines.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(left),
        lock => lock.during(|| format!("locking '{}'", folder.display()))?,
    };
    // Commands keep the lock for a moment. The owner of the datastore could keep it without end.
    while_busy(patience, || match lock.try_lock() {
        Err(fs::TryLockError::WouldBlock) => {
            let text = format!("'{}' is locked by another process; try again", folder.join(LOCK).display());
            Err(Error::new(ErrorKind::Busy, text))
        }
        locked => locked.map_err(io::Error::from).during(|| format!("locking '{}'", folder.display())),
    })?;
    let unfinished = |name: &String| name.starts_with(NEW) || name.starts_with(OLD);
    for name in durable::names(folder)?.into_iter().filter(unfinished) {
        let folder = folder.join(&name);
        // The command gives the names to its own disks.
        if name.starts_with(NEW) && is_creating(&folder) {
            continue;
        }
        if let Ok(Some(intent)) = Intent::read(&folder) {
            left.extend(intent.machines.into_iter().flat_map(|machine| machine.disks).map(|disk| disk.name));
        }
    }
    Ok(left)
}

/// Whether the command that creates the machines in a folder runs, and no recovery removes them. The caller has the
/// folder of machines locked, because a command must not find its own folder locked for this check.
fn is_creating(folder: &Path) -> bool {
    let is_locked = |path: &Path| {
        open_for_lock(path).is_ok_and(|file| matches!(file.try_lock_shared(), Err(fs::TryLockError::WouldBlock)))
    };
    is_locked(folder) && !is_locked(&folder.join(INTENT))
}

/// Opens a file or folder that exists. A server of root must not wait for a pipe that the owner of the datastore has
/// put there.
fn open_for_lock(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    File::options().read(true).custom_flags(flags).open(path)
}

/// Opens an existing file for locking.
pub(crate) fn lock_file(path: &Path) -> Result<File> {
    private::open_or_create(path).during(|| format!("opening '{}'", path.display()))
}

#[cfg(test)]
mod tests;
