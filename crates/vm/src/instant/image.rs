//! Images: what instant clones start from.
//!
//! ```text
//! DATASTORE/memory-images/ID/image.toml   the record; with it, and not before, the image exists
//! DATASTORE/memory-images/ID/state        device state
//! FOLDER FOR MEMORY/ID                    the guest's memory, read-only
//! ```
//!
//! Memory lies in a folder of its own, by default in `/dev/shm`: on a file system with a medium below, the kernel would
//! write a running parent's memory out again and again.

use crate::definition::Definition;
use crate::disks::Disks;
use crate::durable;
use crate::identity::Uuid;
use crate::machine::{MemoryRecord, remove_if_there};
use crate::machines::Machines;
use backend::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The record's file.
const RECORD: &str = "image.toml";
/// Version of the record.
const VERSION: u32 = 1;

/// What an image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of this record.
    pub version: u32,
    /// When it was taken, in seconds since 1970.
    pub created: u64,
    /// The guest's memory.
    pub memory: PathBuf,
    /// The snapshots of its disks, in their order.
    pub snapshots: Vec<Snapshot>,
    /// The machine as it was.
    pub machine: Definition,
}

/// One disk at the moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The disk.
    pub disk: String,
    /// The snapshot.
    pub snapshot: String,
}

impl From<&Snapshot> for crate::machines::Snapshot {
    fn from(one: &Snapshot) -> Self {
        Self { disk: one.disk.clone(), name: one.snapshot.clone() }
    }
}

/// An image.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its name.
    pub id: String,
    /// Its record.
    pub record: Record,
    folder: PathBuf,
}

/// The images of a datastore.
pub struct Images {
    folder: PathBuf,
    memory: PathBuf,
}

impl Image {
    /// Its device state.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }
}

impl Images {
    /// The images in `folder`, with memory in `memory`; both are made if they are missing.
    pub fn open(folder: impl Into<PathBuf>, memory: impl Into<PathBuf>) -> Result<Self> {
        let (folder, memory) = (folder.into(), memory.into());
        for folder in [&folder, &memory] {
            fs::create_dir_all(folder).during(|| format!("making '{}'", folder.display()))?;
        }
        // Memory holds whatever guests hold: keys, passwords.
        fs::set_permissions(&memory, fs::Permissions::from_mode(0o700))
            .during(|| format!("closing '{}' to others", memory.display()))?;
        Ok(Self { folder, memory })
    }

    /// A name for the memory of a machine that starts.
    pub fn new_memory(&self) -> Result<PathBuf> {
        Ok(self.memory.join(Uuid::new()?.to_string()))
    }

    /// An image by its name.
    pub fn get(&self, id: &str) -> Result<Image> {
        let folder = self.folder.join(id);
        let path = folder.join(RECORD);
        let plain: std::result::Result<Uuid, _> = id.parse();
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no memory image '{}'", id.escape_debug()));
        plain.map_err(|_| missing())?;
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(missing()),
            Err(e) => return Err(Error::io(format!("reading '{}'", path.display()), e)),
        };
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, format!("'{}': {what}", path.display()));
        let record: Record = toml::from_str(&text).map_err(|e| corrupt(e.to_string()))?;
        if record.version != VERSION {
            let text = format!("'{}' is of version {}, this program knows {VERSION}", path.display(), record.version);
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        record.machine.check().map_err(|error| corrupt(error.to_string()))?;
        if record.snapshots.len() != record.machine.disks.len() {
            return Err(corrupt("it has not one snapshot for each disk".into()));
        }
        Ok(Image { id: id.into(), record, folder })
    }

    /// Begins an image: a folder for its state.
    pub fn begin(&self) -> Result<(String, PathBuf)> {
        let id = Uuid::new()?.to_string();
        let folder = self.folder.join(&id);
        fs::create_dir(&folder).during(|| format!("making '{}'", folder.display()))?;
        Ok((id, folder.join("state")))
    }

    /// The image comes into being: its memory is closed to writing, its record durable.
    pub fn finish(&self, id: &str, record: Record) -> Result<Image> {
        let folder = self.folder.join(id);
        fs::set_permissions(&record.memory, fs::Permissions::from_mode(0o400))
            .during(|| format!("closing '{}' to writing", record.memory.display()))?;
        let text = toml::to_string(&record)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("the record of an image cannot be written: {e}")))?;
        durable::write(&folder.join(RECORD), text.as_bytes())?;
        Ok(Image { id: id.into(), record, folder })
    }

    /// Gives up an image that was begun.
    pub fn abandon(&self, id: &str) {
        let folder = self.folder.join(id);
        if let Err(e) = fs::remove_dir_all(&folder) {
            tracing::warn!("'{}' stays until the next start: {e}", folder.display());
        }
    }

    /// Removes images that no machine refers to, with their snapshots, and memory that belongs to nobody. Nobody may be
    /// making or starting machines meanwhile. How many went.
    pub fn sweep(&self, machines: &Machines) -> Result<usize> {
        let mut used = BTreeSet::new();
        let mut kept: BTreeSet<PathBuf> = BTreeSet::new();
        for machine in machines.list()? {
            used.extend(super::freeze::frozen(&machine)?);
            match machine.memory() {
                Ok(MemoryRecord::Image(id)) if machine.process()?.is_some() => drop(used.insert(id)),
                Ok(MemoryRecord::Own(file)) if machine.process()?.is_some() => drop(kept.insert(file)),
                _ => {}
            }
        }
        let mut gone = 0;
        for id in names(&self.folder)? {
            match self.get(&id) {
                Ok(image) if used.contains(&id) => drop(kept.insert(image.record.memory)),
                Ok(image) => {
                    self.remove(&image, &**machines.disks())?;
                    gone += 1;
                }
                Err(error) if error.kind() == ErrorKind::NotFound => self.abandon(&id),
                Err(error) => return Err(error),
            }
        }
        for name in names(&self.memory)? {
            let file = self.memory.join(name);
            if !kept.contains(&file) {
                remove_if_there(&file)?;
            }
        }
        Ok(gone)
    }

    fn remove(&self, image: &Image, disks: &dyn Disks) -> Result<()> {
        for Snapshot { disk, snapshot } in &image.record.snapshots {
            match disks.delete_snapshot(disk, snapshot) {
                // Its disk is gone, or a clone stands on it that outlived its machine: then it is the clone's.
                Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy) => return Err(error),
                _ => {}
            }
        }
        remove_if_there(&image.folder.join(RECORD))?;
        remove_if_there(&image.record.memory)?;
        fs::remove_dir_all(&image.folder).during(|| format!("removing '{}'", image.folder.display()))
    }
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let listing = || format!("listing '{}'", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).during(listing)? {
        names.extend(entry.during(listing)?.file_name().into_string());
    }
    Ok(names)
}
