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
//! folders     finding and opening the folders of disks, and creating and removing them
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
pub(crate) mod deletions;
mod device;
mod disks;
mod folders;
mod maintain;
mod moving;
mod reopen;
mod snapshots;
mod space;

pub use device::ChainedDevice;
pub(crate) use folders::ImageFolders;
pub(crate) use moving::{ForeignOriginal, ForeignReplica};

use crate::device::Device;
use crate::migrate::{LiveSourceRecord, Overlay, SourceLayer};
use crate::names;
use crate::native::Native;
use crate::switch::{Client, Identity, SwitchedDevice, Switches};
use backend::IoMode;
use error::{Error, ErrorKind, Result};
use layer::image::Folder;
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
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
    /// The disk itself.
    pub disk: Arc<vmdk::Disk>,
    /// The open device of the head. It is updated when the list of snapshots changes.
    head: Mutex<Weak<ChainedDevice>>,
    clients: Mutex<()>,
    /// Locked while a snapshot with a name from a user is taken, so that only one request at a time does this for the
    /// disk.
    snapshots: Mutex<()>,
    /// The capacity when the images were last open; 0 if they were not open yet.
    capacity: AtomicU64,
    /// The source outside the datastore from which the content arrives, if there is one.
    source: Option<Arc<SourceLayer>>,
}

impl ForeignDisk {
    fn new(folder: String, disk: Arc<vmdk::Disk>) -> Arc<Self> {
        Self::with_source(folder, disk, None)
    }

    fn with_source(folder: String, disk: Arc<vmdk::Disk>, source: Option<Arc<SourceLayer>>) -> Arc<Self> {
        let (head, capacity) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(Self { folder, disk, head, clients: Mutex::default(), snapshots: Mutex::default(), capacity, source })
    }

    /// After the record of the disk was changed: tells the open disk where the source of its content is now.
    pub fn move_source(&self, source: LiveSourceRecord) {
        if let Some(layer) = &self.source {
            layer.move_to(source);
        }
    }

    /// The identity under which clients of the head, or of a snapshot, are counted.
    pub fn identity(&self, snapshot: Option<&str>) -> Identity {
        Identity::Foreign { folder: self.folder.clone(), snapshot: snapshot.map(str::to_owned) }
    }

    /// The head as a device for the datastore's own operations, not counted as a client.
    pub fn head_device(&self) -> Result<Arc<ChainedDevice>> {
        let device = Arc::new(ChainedDevice::of_head(&self.disk)?);
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
    folders: ImageFolders,
    options: vmdk::Options,
    switches: Arc<Switches>,
    /// The native disks, which can be overlays above images.
    native: Arc<Native>,
    /// The open disks, by name.
    disks: RwLock<BTreeMap<String, Arc<ForeignDisk>>>,
    /// Folders whose disks could not be opened, and why.
    broken: Mutex<BTreeMap<String, String>>,
    /// Folders of given-up disks whose source must be released first, and their records.
    unreleased: Mutex<Vec<(String, vmdk::Record)>>,
}

impl Foreign {
    /// Opens every disk except those in the folders `kept`, whose migration is undecided. A disk that cannot be opened
    /// does not prevent the opening of the others.
    pub fn open(
        native: &Arc<Native>,
        folders: ImageFolders,
        mode: IoMode,
        switches: Arc<Switches>,
        kept: &BTreeSet<String>,
    ) -> Result<Self> {
        let mut options = vmdk::Options { mode, ..vmdk::Options::default() };
        if folders.local_path().is_some() {
            let folders = folders.clone();
            options.folders = Some(Arc::new(move |reference: &str| folders.find(reference)));
        }
        let (native, disks) = (Arc::clone(native), RwLock::default());
        let foreign =
            Self { folders, options, switches, native, disks, broken: Mutex::default(), unreleased: Mutex::default() };
        for folder in foreign.folders.names()?.into_iter().filter(|folder| !kept.contains(folder)) {
            if let Err(error) = foreign.open_folder(&folder) {
                tracing::warn!(folder, %error, "a disk cannot be opened; 'lamina check' reports it too");
                foreign.broken.lock().insert(folder, error.to_string());
            }
        }
        Ok(foreign)
    }

    /// Opens the disk of a folder, with the native overlay above its images if it has one, or removes the folder if it
    /// is incomplete.
    pub fn open_folder(&self, folder: &str) -> Result<()> {
        let home = self.folders.home(folder)?;
        let incomplete = folders::is_incomplete(&home);
        if self.leave_unreleased(folder, &home, incomplete) {
            return Ok(());
        }
        self.open_home(folder, home, incomplete)
    }

    /// As [`Foreign::open_folder`], after the source of the disk was released.
    pub fn open_released(&self, folder: &str) -> Result<()> {
        let home = self.folders.home(folder)?;
        let incomplete = folders::is_incomplete(&home);
        self.open_home(folder, home, incomplete)
    }

    fn open_home(&self, folder: &str, home: Folder, incomplete: bool) -> Result<()> {
        match vmdk::Disk::open(home.clone(), &self.options) {
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
                let (disk, source) = self.with_overlay(disk, home)?;
                let (name, entry) = (disk.name(), ForeignDisk::with_source(folder.to_owned(), disk, source));
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

    /// Opens the disk again together with the native overlay above its images, if it has one, and the source of its
    /// content, which is returned.
    fn with_overlay(&self, disk: Arc<vmdk::Disk>, home: Folder) -> Result<(Arc<vmdk::Disk>, Option<Arc<SourceLayer>>)> {
        let Some(overlay) = Overlay::of(&disk.record())? else { return Ok((disk, None)) };
        if let Some(source) = overlay.source() {
            self.refuse_foreign_source(&source.title)?;
        }
        let (layers, source) = overlay.layers(&self.native)?;
        let options = vmdk::Options { overlay: layers, ..self.options.clone() };
        disk.close()?;
        // Dropping the disk releases its lock, so that it can be opened again.
        drop(disk);
        Ok((vmdk::Disk::open(home, &options)?, source))
    }

    /// Fails if root may not open what the record of a disk names as the source of its content.
    pub fn refuse_foreign_source(&self, title: &str) -> Result<()> {
        self.folders.refuse_foreign_record(title)
    }

    /// The path of the folder `images`.
    fn images(&self) -> Result<&Path> {
        self.folders.path()
    }

    /// Creates the folder of a disk named `name`. With `incomplete`, recovery after a crash removes the folder until
    /// [`Foreign::complete`] is called.
    pub fn new_folder(&self, name: &str, incomplete: bool) -> Result<(String, Folder)> {
        let folder = self.folders.create(name)?;
        let made = self.folders.home(&folder).and_then(|home| {
            if incomplete {
                folders::mark(&home, true)?;
            }
            self.folders.sync()?;
            Ok(home)
        });
        match made {
            Ok(home) => Ok((folder, home)),
            Err(error) => {
                let _ = self.remove_folder(&folder);
                Err(error)
            }
        }
    }

    /// Removes the [`INCOMPLETE`] mark: the content of the folder is complete and durable.
    pub fn complete(&self, folder: &str) -> Result<()> {
        folders::mark(&self.folders.home(folder)?, false)
    }

    /// Removes the folder of a deleted disk. Files that do not belong to the disk stay, and in this case the folder
    /// stays too.
    pub fn remove_folder(&self, folder: &str) -> Result<()> {
        self.folders.remove(folder, &[LOCK_NAME, CLOSED_NAME, INCOMPLETE])
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
        self.open_as(entry, snapshot, read_only, |client| client)
    }

    /// Opens a disk for an operation of the datastore, which users do not see as a client of the disk.
    pub fn open_for_operation(&self, entry: &ForeignDisk) -> Result<Arc<dyn Device>> {
        self.open_as(entry, None, false, Client::of_operation)
    }

    fn open_as(
        &self,
        entry: &ForeignDisk,
        snapshot: Option<&str>,
        read_only: bool,
        mark: fn(Client) -> Client,
    ) -> Result<Arc<dyn Device>> {
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
        let device = SwitchedDevice::over(name, read_only || snapshot.is_some(), mark(client));
        Ok(Arc::new(match snapshot {
            None => device.with_settings(self.native.settings.open_disk(&disk.uuid(), &disk.name())),
            Some(_) => device,
        }))
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
