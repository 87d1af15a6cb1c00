//! The environment of commands about machines: the machines, the memory images of instant clones, the installed QEMU,
//! and locks between commands.
//!
//! ```text
//! DATASTORE/machines/           see machines
//! DATASTORE/machines/.working   locked shared by commands that create, start or change machines
//! DATASTORE/machines/.qemu      cached features of the QEMU found, because querying them takes a tenth of a second
//! DATASTORE/memory-images/      see instant::image
//! /dev/shm/lamina-UID-DEV-INO/  memory files of this datastore's machines
//! ```
//!
//! 1. Every command begins with [`Host::recover`], which completes or undoes the work of killed commands.
//! 2. Images and memory files are removed only while no other command runs: a running command may be about to refer to
//!    one of them.
//! 3. Root removes no files in a datastore of another user: the next command of that user does.
//! 4. Memory files contain the memory of guests. Only the user who created their folder can read it, and a folder that
//!    another user created is refused. The folder is removed when its last file is removed, so that no folder remains
//!    after the datastore was deleted.

use crate::disks::Disks;
use crate::instant::image::Images;
use crate::machine::{Change, Machine};
use crate::machines::{self, Machines, Snapshot, lock_file};
use crate::qemu::features::Features;
use crate::{durable, snapshots};
use error::{ErrorKind, IoContext, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long to wait for another command that changes a machine.
const CHANGE_PATIENCE: Duration = Duration::from_secs(30);
/// The file that every running command locks with a shared lock.
const WORKING: &str = ".working";
/// The default parent of the folder for memory files.
const MEMORY: &str = "/dev/shm";

/// Paths that a [`Host`] uses.
#[derive(Clone, Debug)]
pub struct Places {
    /// The datastore's folder.
    pub datastore: PathBuf,
    /// Parent of the folder for memory files, on a file system in memory; `None` for the default.
    pub memory: Option<PathBuf>,
    /// Path of QEMU.
    pub qemu: PathBuf,
}

/// The environment of commands.
pub struct Host {
    machines: Machines,
    images: Images,
    qemu: PathBuf,
    features: OnceLock<Features>,
    /// Held while QEMU is queried, so that machines that start at the same time do not share a probe's socket.
    detecting: Mutex<()>,
    /// Set when an operation that may leave unused memory files has begun.
    worked: AtomicBool,
}

/// While a value of this type exists, no other command removes images or memory files.
pub struct Working {
    _lock: File,
}

impl Drop for Host {
    /// Removes memory files that only this command needed, so that they do not remain until the next command.
    fn drop(&mut self) {
        if self.worked.load(Ordering::Relaxed)
            && let Err(error) = self.sweep()
        {
            tracing::debug!("unused memory images are left to the next command: {error}");
        }
    }
}

impl Host {
    /// The environment of a datastore.
    pub fn open(places: &Places, disks: Arc<dyn Disks>) -> Result<Self> {
        let machines = Machines::open(places.datastore.join(machines::FOLDER), disks)?;
        let memory = memory_folder(&places.datastore, places.memory.as_deref().unwrap_or(Path::new(MEMORY)))?;
        let images = Images::open(places.datastore.join("memory-images"), memory)?;
        Ok(Self {
            machines,
            images,
            qemu: places.qemu.clone(),
            features: OnceLock::new(),
            detecting: Mutex::new(()),
            worked: AtomicBool::new(false),
        })
    }

    /// The machines.
    pub fn machines(&self) -> &Machines {
        &self.machines
    }

    /// The images of instant clones.
    pub fn images(&self) -> &Images {
        &self.images
    }

    /// The interface to the datastore.
    pub fn disks(&self) -> &dyn Disks {
        &**self.machines.disks()
    }

    /// Begins an operation that creates, starts or changes machines.
    pub fn work(&self) -> Result<Working> {
        self.worked.store(true, Ordering::Relaxed);
        let path = self.machines.folder().join(WORKING);
        let lock = lock_file(&path)?;
        lock.lock_shared().during(|| format!("locking '{}'", path.display()))?;
        Ok(Working { _lock: lock })
    }

    /// Locks a machine for changes; waits while another command has it locked. `WrongState` while a revert of the
    /// machine is incomplete: the command that completes the revert ends the machine, and replaces its definition and
    /// the content of its disks.
    pub fn change(&self, name: &str) -> Result<Change> {
        let change = self.change_reverted(name)?;
        snapshots::refuse_half_reverted(change.machine())?;
        Ok(change)
    }

    /// As [`Host::change`], also while a revert of the machine is incomplete.
    pub fn change_reverted(&self, name: &str) -> Result<Change> {
        self.worked.store(true, Ordering::Relaxed);
        self.machines.get(name)?.change_within(CHANGE_PATIENCE)
    }

    /// The installed QEMU.
    pub fn features(&self) -> Result<&Features> {
        if let Some(features) = self.features.get() {
            return Ok(features);
        }
        let _detecting = self.detecting.lock();
        if let Some(features) = self.features.get() {
            return Ok(features);
        }
        let features = self.detect()?;
        Ok(self.features.get_or_init(|| features))
    }

    fn detect(&self) -> Result<Features> {
        let path = self.machines.folder().join(".qemu");
        let found = Found::of(&self.qemu);
        let known: Option<Known> = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        if let (Some(found), Some(known)) = (&found, known)
            && known.found == *found
        {
            return Ok(known.features);
        }
        // The probe's folder has a name that no machine can have, so that it is not taken for the folder of a machine.
        let features = Features::detect(&self.qemu, &self.machines.folder().join(".probe"))?;
        if let Some(found) = found {
            let known = Known { found, features: features.clone() };
            // The cache is only an optimization: if it cannot be written, the next command queries QEMU again.
            let kept = serde_json::to_vec(&known).map_err(io::Error::from).map(|text| durable::write(&path, &text));
            if let Err(error) = kept {
                tracing::debug!("the list of QEMU's features could not be cached: {error}");
            }
        }
        Ok(features)
    }

    /// Completes or undoes the work of killed commands, and removes files that no machine needs.
    pub fn recover(&self) -> Result<()> {
        // Guests are resumed first: the next steps wait until the server has ended the requests of killed commands.
        let stuck = self.resume_held()?;
        self.machines.recover()?;
        for machine in self.machines.list()? {
            if !snapshots::is_unfinished(&machine) || stuck.contains(&machine.name()) {
                continue;
            }
            // This fails if another command is changing the machine, or if root may not change the machine because it
            // belongs to another user.
            let Ok(change) = machine.change() else { continue };
            if let Err(error) = snapshots::recover(&change, self) {
                tracing::error!("machine '{}': {error}", machine.name());
            }
        }
        if let Err(error) = self.sweep() {
            tracing::error!("removing unused memory images failed and is repeated by the next command: {error}");
        }
        Ok(())
    }

    /// Resumes the guests that killed commands have paused. Returns the machines that could not be resumed; their
    /// snapshots are left to the next command.
    fn resume_held(&self) -> Result<BTreeSet<String>> {
        let mut stuck = BTreeSet::new();
        for machine in self.machines.list()? {
            if !machine.is_held() {
                continue;
            }
            let Ok(change) = machine.change() else { continue };
            let name = machine.name();
            match change.let_go_on() {
                Ok(true) => tracing::warn!(
                    machine = name,
                    "an interrupted command had left the machine paused; the machine runs again"
                ),
                Ok(false) => {}
                Err(error) => {
                    tracing::error!("machine '{name}': {error}");
                    // File systems that may still be frozen do not prevent the rest of the recovery.
                    if error.kind() != ErrorKind::Busy {
                        stuck.insert(name);
                    }
                }
            }
        }
        Ok(stuck)
    }

    /// Removes files that no machine needs, unless another command is running. In a datastore of another user, root
    /// leaves the removal to the next command of that user, who could make root remove other files.
    fn sweep(&self) -> Result<()> {
        if self.machines.are_of_another_user()? {
            return Ok(());
        }
        let lock = lock_file(&self.machines.folder().join(WORKING))?;
        if lock.try_lock().is_ok() {
            self.images.sweep(&self.machines)?;
            self.images.remove_empty_folder();
        }
        Ok(())
    }

    /// Deletes a machine with its disks, unless `keep_disks`. Snapshots taken for its clones are deleted with the last
    /// clone. With `force`, a machine whose definition cannot be read is deleted too. Its disks stay, because they are
    /// not known without the definition.
    ///
    /// # Errors
    /// See [`Machines::delete`].
    pub fn delete(&self, name: &str, keep_disks: bool, promote: bool, force: bool) -> Result<()> {
        let machine = self.machines.get(name)?;
        // Locked before the definition is read: a disk that another command removes from the machine must stay.
        let change = machine.change()?;
        let there = self.disks().all()?;
        let disks = match machine.definition() {
            _ if keep_disks => Vec::new(),
            Err(_) if force => Vec::new(),
            definition => definition?.disk_names(),
        };
        let origins = disks.iter().filter_map(|disk| there.get(disk)?.origin.clone());
        let snapshots = origins
            .filter(|(_, snapshot)| self.is_only_for_clones(snapshot))
            .map(|(disk, name)| Snapshot { disk, name })
            .collect();
        self.machines.delete(&change, &disks, snapshots, promote)
    }

    /// Whether a snapshot of a disk was taken only for clones, so that it is deleted together with the last of these
    /// clones.
    pub fn is_only_for_clones(&self, snapshot: &str) -> bool {
        let image = snapshot.strip_prefix(crate::instant::freeze::PREFIX);
        snapshot.starts_with(crate::clone::PREFIX) || image.is_some_and(|id| self.images.get(id).is_err())
    }

    /// The machines whose disks are linked clones of this machine's disks: (snapshot, machine or disk).
    pub fn children(&self, machine: &Machine) -> Result<Vec<(String, String)>> {
        let users = self.machines.users_of_disks()?;
        let mut children = Vec::new();
        for disk in machine.definition()?.disks {
            let snapshots = match self.disks().snapshots(&disk.name) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                snapshots => snapshots?,
            };
            for snapshot in snapshots {
                for clone in snapshot.clones {
                    let child = users.get(&clone).cloned().unwrap_or_else(|| format!("disk {clone}"));
                    children.push((snapshot.name.clone(), child));
                }
            }
        }
        children.sort();
        children.dedup();
        Ok(children)
    }
}

/// Properties of the QEMU whose features are cached: if one of them differs, QEMU is queried again.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Found {
    program: PathBuf,
    inode: u64,
    size: u64,
    changed: i64,
    user: u32,
    boot: String,
    kvm: Option<(u64, u32, u32)>,
}

#[derive(Serialize, Deserialize)]
struct Known {
    found: Found,
    features: Features,
}

impl Found {
    fn of(program: &Path) -> Option<Self> {
        let path = match program.components().count() {
            1 => std::env::split_paths(&std::env::var_os("PATH")?)
                .map(|folder| folder.join(program))
                .find(|p| p.exists())?,
            _ => program.to_owned(),
        };
        let metadata = fs::metadata(&path).ok()?;
        let kvm = fs::metadata("/dev/kvm").ok().map(|kvm| (kvm.ino(), kvm.mode(), kvm.gid()));
        Some(Self {
            program: path,
            inode: metadata.ino(),
            size: metadata.size(),
            changed: metadata.ctime(),
            user: rustix::process::geteuid().as_raw(),
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?,
            kvm,
        })
    }
}

/// The folder for memory files of a datastore's machines, named after device and inode of the datastore's folder, so
/// that the folder stays the same when the datastore is renamed.
fn memory_folder(datastore: &Path, within: &Path) -> Result<PathBuf> {
    let store = fs::metadata(datastore).during(|| format!("looking at '{}'", datastore.display()))?;
    let user = rustix::process::geteuid().as_raw();
    Ok(within.join(format!("lamina-{user}-{:x}-{:x}", store.dev(), store.ino())))
}
