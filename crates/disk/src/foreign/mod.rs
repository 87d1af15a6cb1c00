//! The disks in VMware's formats of a datastore, each in its own folder in `DATASTORE/images`.
//!
//! ```text
//! disks       created, listed, shown, renamed, deleted; statistics and tunables
//! snapshots   taken (with others at one point in time), listed, deleted, reverted to, compared
//! clones      linked and full
//! moving      source and target of a migration
//! convert     source and target of a conversion
//! reopen      resuming after an I/O error, with clients connected
//! maintain    inflate, punch, wipe, shrink, consolidate, check
//! device      a chain of layers as a device
//! ```
//!
//! Crate `vmdk` implements a disk. This module manages the disk's folder, its name in the datastore, and its clients.
//!
//! 1. A folder is a disk of the datastore if it has a record and no [`INCOMPLETE`] mark. Opening the datastore removes
//!    folders with the mark. A disk that cannot be opened is left unchanged and reported by `check`.
//! 2. Every record is read when the datastore is opened; images are opened at the first use of the disk, and closed
//!    with the datastore.
//! 3. `ForeignDisk::clients` is held while a client opens a disk, and while a disk is deleted or reverted, so that
//!    these never overlap. Long operations do not hold this lock; they check themselves which images are in use.

mod clones;
mod convert;
mod device;
mod disks;
mod maintain;
mod moving;
mod reopen;
mod snapshots;
mod space;

pub use device::ChainedDevice;
pub(crate) use moving::{ForeignOriginal, ForeignReplica};

use crate::device::Device;
use crate::location::Location;
use crate::migrate::Overlay;
use crate::names;
use crate::native::Native;
use crate::switch::{Identity, SwitchedDevice, Switches};
use backend::{IoMode, private};
use error::{Error, ErrorKind, IoContext, Result};
use layer::image::Folder;
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind as IoKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

/// The folder that contains the folders of all disks.
pub(crate) const IMAGES: &str = "images";
/// A file that marks the folder of a disk that is being created. Recovery after a crash removes such a folder.
const INCOMPLETE: &str = "lamina.incomplete";
/// The file that `vmdk` locks. After a failed creation it may be the only file in the disk's folder.
const LOCK_NAME: &str = "lamina.lock";
/// The file with which `vmdk` records that a disk was closed cleanly.
const CLOSED_NAME: &str = "lamina.closed";

/// A disk of the datastore.
pub(crate) struct ForeignDisk {
    /// Name of the disk's folder in `images`.
    pub folder: String,
    /// The disk.
    pub disk: Arc<vmdk::Disk>,
    /// The open device of the head. It is updated when the list of snapshots changes.
    head: Mutex<Weak<ChainedDevice>>,
    clients: Mutex<()>,
    /// Locked while a snapshot with a name from a user is taken, so that only one request at a time does this for the
    /// disk.
    snapshots: Mutex<()>,
    /// The capacity when the images were last open; 0 if they were not open yet.
    capacity: AtomicU64,
}

impl ForeignDisk {
    fn new(folder: String, disk: Arc<vmdk::Disk>) -> Arc<Self> {
        let (head, capacity) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(Self { folder, disk, head, clients: Mutex::default(), snapshots: Mutex::default(), capacity })
    }

    /// The identity under which clients of the head, or of a snapshot, are counted.
    pub fn identity(&self, snapshot: Option<&str>) -> Identity {
        Identity::Foreign { folder: self.folder.clone(), snapshot: snapshot.map(str::to_owned) }
    }

    /// The head as a device for the datastore's own operations, not counted as a client.
    pub fn head_device(&self) -> Result<Arc<ChainedDevice>> {
        let device = Arc::new(ChainedDevice::new(self.disk.name(), self.disk.chain()?));
        device.set_bases(self.disk.bases()?);
        *self.head.lock() = Arc::downgrade(&device);
        Ok(device)
    }

    /// After snapshots were created or deleted: updates the snapshots with which the head can be compared.
    fn tell_bases(&self) {
        let Some(device) = self.head.lock().upgrade() else { return };
        match self.disk.bases() {
            Ok(bases) => device.set_bases(bases),
            Err(error) => tracing::warn!(%error, disk = self.disk.name(), "clients get an outdated list of snapshots"),
        }
    }
}

/// All disks in VMware's formats.
pub(crate) struct Foreign {
    /// The datastore's location; `None` if it was opened by its directory.
    location: Option<Location>,
    /// The path of `DATASTORE/images`; `None` if the datastore has no local folder, and so no disks in VMware's
    /// formats.
    path: Option<PathBuf>,
    options: vmdk::Options,
    switches: Arc<Switches>,
    /// The native disks, which can be overlays above images.
    native: Arc<Native>,
    /// The open disks, by name.
    disks: RwLock<BTreeMap<String, Arc<ForeignDisk>>>,
    /// Folders whose disks could not be opened, and why.
    broken: Mutex<BTreeMap<String, String>>,
}

impl Foreign {
    /// Opens every disk except those in the folders `kept`, whose migration is undecided. A disk that cannot be opened
    /// does not prevent the opening of the others.
    pub fn open(
        native: &Arc<Native>,
        location: Option<&Location>,
        mode: IoMode,
        switches: Arc<Switches>,
        kept: &BTreeSet<String>,
    ) -> Result<Self> {
        let path = location.and_then(Location::local_path).map(|path| path.join(IMAGES));
        let mut options = vmdk::Options { mode, ..vmdk::Options::default() };
        if let (Some(own), Some(location)) = (path.clone(), location.cloned()) {
            let directory = Arc::clone(native.engine.directory());
            options.folders = Some(Arc::new(move |reference: &str| {
                location.check_not_moved(&*directory)?;
                find_folder(&own, reference)
            }));
        }
        let native = Arc::clone(native);
        let (location, disks) = (location.cloned(), RwLock::default());
        let foreign = Self { location, path, options, switches, native, disks, broken: Mutex::default() };
        for folder in foreign.folders()?.into_iter().filter(|folder| !kept.contains(folder)) {
            if let Err(error) = foreign.open_folder(&folder) {
                tracing::warn!(folder, %error, "a disk cannot be opened; 'lamina check' reports it too");
                foreign.broken.lock().insert(folder, error.to_string());
            }
        }
        Ok(foreign)
    }

    /// Names of the folders in `images`.
    fn folders(&self) -> Result<Vec<String>> {
        self.path.as_deref().map_or_else(|| Ok(Vec::new()), folders_of)
    }

    /// Opens the disk of a folder, with the native overlay above its images if it has one, or removes the folder if it
    /// is incomplete.
    pub fn open_folder(&self, folder: &str) -> Result<()> {
        let path = self.images()?.join(folder);
        let incomplete = path.join(INCOMPLETE).exists();
        match vmdk::Disk::open(Folder::of_disk(&path)?, &self.options) {
            Ok(disk) if incomplete => {
                tracing::warn!(folder, "removing a disk whose creation was interrupted");
                disk.delete()?;
                self.remove_folder(folder)
            }
            Ok(disk) => {
                // Removes files that a crash left and no record names. This is safe, because only this datastore
                // creates files in the folder.
                if let Err(error) = layer::descriptor::storage::sweep(&**disk.home().directory()) {
                    tracing::warn!(folder, %error, "files left by a crash could not be removed");
                }
                let disk = self.with_overlay(disk, &path)?;
                let (name, entry) = (disk.name(), ForeignDisk::new(folder.to_owned(), disk));
                names::check_existing("disk", &name)?;
                let mut disks = self.disks.write();
                if disks.contains_key(&name) {
                    return Err(Error::new(ErrorKind::Exists, format!("another folder has a disk '{name}' too")));
                }
                entry.drop_temporary_snapshots();
                disks.insert(name, entry);
                Ok(())
            }
            // The folder has no record, because the creation or deletion of its disk was interrupted. Only files that
            // lamina created are removed.
            Err(error) if error.kind() == ErrorKind::NotFound => self.remove_folder(folder),
            Err(error) => Err(error),
        }
    }

    /// Opens the disk again together with the native overlay above its images, if it has one.
    fn with_overlay(&self, disk: Arc<vmdk::Disk>, path: &Path) -> Result<Arc<vmdk::Disk>> {
        let Some(overlay) = Overlay::of(&disk.record())? else { return Ok(disk) };
        let options = vmdk::Options { overlay: Some(overlay.layer(&self.native)?), ..self.options.clone() };
        disk.close()?;
        // Dropping the disk releases its lock, so that it can be opened again.
        drop(disk);
        vmdk::Disk::open(Folder::of_disk(path)?, &options)
    }

    /// The path of the folder `images`. Fails if the folder of the datastore was moved: images are found by path, while
    /// the other files are opened through the handle of the datastore's folder.
    fn images(&self) -> Result<&Path> {
        match (&self.path, &self.location) {
            (Some(path), location) => {
                location.iter().try_for_each(|location| location.check_not_moved(&**self.native.engine.directory()))?;
                Ok(path)
            }
            (None, Some(location)) => location.need_folder("disks in VMware's formats"),
            (None, None) => {
                let text = "disks in VMware's formats need a datastore in a local folder";
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Creates the folder of a disk named `name`. With `incomplete`, recovery after a crash removes the folder until
    /// [`Foreign::complete`] is called.
    pub fn new_folder(&self, name: &str, incomplete: bool) -> Result<(String, Folder)> {
        let images = self.images()?;
        match private::create_folder(images) {
            Ok(()) => sync_folder(images.parent().unwrap_or(images))?,
            Err(error) if error.kind() == IoKind::AlreadyExists => {}
            Err(error) => return Err(Error::io(format!("making {}", images.display()), error)),
        }
        let mut folder = name.to_owned();
        let mut number = 2;
        let path = loop {
            let path = images.join(&folder);
            match private::create_folder(&path) {
                Ok(()) => break path,
                // The folder belongs to a disk that was renamed after its creation, so another folder name is tried.
                Err(error) if error.kind() == IoKind::AlreadyExists => folder = format!("{name}-{number}"),
                Err(error) => return Err(Error::io(format!("making {}", path.display()), error)),
            }
            number += 1;
        };
        let made = (|| {
            if incomplete {
                private::write(&path.join(INCOMPLETE), b"").during(|| format!("marking {}", path.display()))?;
                sync_folder(&path)?;
            }
            sync_folder(images)?;
            Folder::of_disk(&path)
        })();
        match made {
            Ok(home) => Ok((folder, home)),
            Err(error) => {
                let _ = self.remove_folder(&folder);
                Err(error)
            }
        }
    }

    /// The folders with an [`INCOMPLETE`] mark, in a datastore that is not open.
    pub fn incomplete(datastore: &Path) -> Result<Vec<String>> {
        let folders = folders_of(&datastore.join(IMAGES))?;
        Ok(folders.into_iter().filter(|name| datastore.join(IMAGES).join(name).join(INCOMPLETE).exists()).collect())
    }

    /// Sets or removes the [`INCOMPLETE`] mark of a folder in a datastore that is not open. Has no effect if the folder
    /// does not exist.
    pub fn set_incomplete(datastore: &Path, folder: &str, incomplete: bool) -> Result<()> {
        let path = datastore.join(IMAGES).join(folder);
        if !path.is_dir() {
            return Ok(());
        }
        let mark = path.join(INCOMPLETE);
        let done = match incomplete {
            true => private::write(&mark, b""),
            false => match fs::remove_file(&mark) {
                Err(error) if error.kind() == IoKind::NotFound => Ok(()),
                other => other,
            },
        };
        done.during(|| format!("marking {}", path.display()))?;
        sync_folder(&path)
    }

    /// Removes the [`INCOMPLETE`] mark: the content of the folder is complete and durable.
    pub fn complete(&self, folder: &str) -> Result<()> {
        let path = self.images()?.join(folder);
        fs::remove_file(path.join(INCOMPLETE)).during(|| format!("completing {}", path.display()))?;
        sync_folder(&path)
    }

    /// Removes the folder of a deleted disk. Files that do not belong to the disk stay, and in this case the folder
    /// stays too.
    pub fn remove_folder(&self, folder: &str) -> Result<()> {
        let images = self.images()?;
        let path = images.join(folder);
        for name in [LOCK_NAME, CLOSED_NAME, INCOMPLETE] {
            match fs::remove_file(path.join(name)) {
                Err(error) if error.kind() != IoKind::NotFound => {
                    return Err(Error::io(format!("removing '{name}' of {}", path.display()), error));
                }
                _ => {}
            }
        }
        match fs::remove_dir(&path) {
            Ok(()) => sync_folder(images),
            Err(error) if error.kind() == IoKind::NotFound => Ok(()),
            Err(error) if error.kind() == IoKind::DirectoryNotEmpty => Err(Error::new(
                ErrorKind::Invalid,
                format!("{} has files that belong to no disk; look at them, and remove the folder", path.display()),
            )),
            Err(error) => Err(Error::io(format!("removing {}", path.display()), error)),
        }
    }

    /// The options with which disks are opened.
    pub fn options(&self) -> &vmdk::Options {
        &self.options
    }

    /// Adds a disk that was created or adopted in `folder` to the list of the datastore's disks.
    pub fn insert(&self, folder: String, disk: Arc<vmdk::Disk>) -> Arc<ForeignDisk> {
        let (name, entry) = (disk.name(), ForeignDisk::new(folder, disk));
        self.disks.write().insert(name, Arc::clone(&entry));
        entry
    }

    /// Removes a disk from the list of the datastore's disks. The disk's files stay.
    pub fn forget(&self, name: &str) -> Option<Arc<ForeignDisk>> {
        self.disks.write().remove(name)
    }

    /// The disk with that name.
    pub fn find(&self, name: &str) -> Option<Arc<ForeignDisk>> {
        self.disks.read().get(name).cloned()
    }

    /// All disks, in the order of their names.
    pub fn entries(&self) -> Vec<Arc<ForeignDisk>> {
        self.disks.read().values().cloned().collect()
    }

    /// Folders whose disks could not be opened, and why.
    pub fn broken(&self) -> Vec<(String, String)> {
        self.broken.lock().iter().map(|(folder, why)| (folder.clone(), why.clone())).collect()
    }

    /// Opens a disk, or a snapshot of it, for a client.
    pub fn open_device(&self, entry: &ForeignDisk, snapshot: Option<&str>, read_only: bool) -> Result<Arc<dyn Device>> {
        let _clients = entry.clients.lock();
        let disk = &entry.disk;
        let (name, client) = match snapshot {
            None => (
                disk.name(),
                self.switches.attach(entry.identity(None), || Ok(entry.head_device()? as Arc<dyn Device>))?,
            ),
            Some(snapshot) => {
                let title = format!("{}@{snapshot}", disk.name());
                let open = || {
                    let chain = disk.snapshot_chain(snapshot)?;
                    Ok(Arc::new(ChainedDevice::new(title.clone(), chain)) as Arc<dyn Device>)
                };
                entry.find_snapshot(snapshot)?;
                (title.clone(), self.switches.attach(entry.identity(Some(snapshot)), open)?)
            }
        };
        Ok(Arc::new(SwitchedDevice::over(name, read_only || snapshot.is_some(), client)))
    }

    /// The names that [`Foreign::open_device`] can open.
    pub fn device_names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for entry in self.entries() {
            let name = entry.disk.name();
            names.push(name.clone());
            names.extend(entry.disk.record().snapshots.iter().map(|snapshot| format!("{name}@{}", snapshot.name)));
        }
        names
    }

    /// Closes every disk. Returns the first error.
    pub fn close(&self) -> Result<()> {
        let mut outcome = Ok(());
        for entry in self.entries() {
            let closed = entry.disk.close().map_err(|error| error.context(format!("closing '{}'", entry.disk.name())));
            outcome = outcome.and(closed);
        }
        outcome
    }
}

/// Names of the folders in a folder, sorted.
fn folders_of(path: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == IoKind::NotFound => return Ok(Vec::new()),
        other => other.during(|| format!("listing {}", path.display()))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.during(|| format!("listing {}", path.display()))?;
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if let Some(name) = entry.file_name().to_str().filter(|_| is_folder) {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// The folder to which a record refers. If the path does not exist because the datastore was moved, the folder with the
/// same name in this datastore.
fn find_folder(images: &Path, reference: &str) -> Result<Folder> {
    let path = Path::new(reference);
    if !path.is_dir()
        && let Some(name) = path.file_name()
        && path.parent().is_some_and(|parent| parent.ends_with(IMAGES))
        && images.join(name).is_dir()
    {
        return Folder::of_disk(&images.join(name));
    }
    Folder::of_disk(path)
}

fn sync_folder(path: &Path) -> Result<()> {
    fs::File::open(path).and_then(|folder| folder.sync_all()).during(|| format!("syncing {}", path.display()))
}
