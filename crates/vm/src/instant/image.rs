//! Images: what instant clones start from.
//!
//! ```text
//! DATASTORE/memory-images/ID/begun.toml   what the image is to be, before any of it is there
//! DATASTORE/memory-images/ID/image.toml   the same, renamed: with it, and not before, the image exists
//! DATASTORE/memory-images/ID/state        device state
//! FOLDER FOR MEMORY/image-ID              the guest's memory, which no process writes any more
//! ```
//!
//! An image that was not finished, and one that no machine refers to, are removed by what their records name. As long
//! as a clone's disk stands on a snapshot, the record stays too, so that the snapshot goes with its last clone.
//!
//! Memory lies in a folder of its own, by default in `/dev/shm`: on a file system with a medium below, the kernel would
//! write a running parent's memory out again and again.

use crate::definition::{Definition, TEXT_MAX};
use crate::disks::Disks;
use crate::durable;
use crate::identity::new_uuid;
use crate::machine::{MemoryRecord, Start, remove_if_there};
use crate::machines::Machines;
use crate::qemu::command::Memory;
use crate::qemu::features::Features;
use backend::clock;
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use uuid::fmt::Hyphenated;

/// The record's file.
const RECORD: &str = "image.toml";
/// The same before the image is there.
const BEGUN: &str = "begun.toml";
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
    /// Whether an agent answered in the guest, if it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<bool>,
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

    /// How a process begins that goes on from it.
    pub fn start<'a>(&self, features: &'a Features, nbd: &'a Path) -> Start<'a> {
        let memory = Memory::CopyOnWrite(self.record.memory.clone());
        Start { features, nbd, memory, record: MemoryRecord::Image(self.id.clone()), incoming: true }
    }
}

impl Images {
    /// The images in `folder`, with memory in `memory`, which is made when something is to lie in it.
    pub fn open(folder: impl Into<PathBuf>, memory: impl Into<PathBuf>) -> Result<Self> {
        // QEMU is told paths, and has a working folder of its own time.
        let absolute =
            |folder: PathBuf| std::path::absolute(&folder).during(|| format!("finding '{}'", folder.display()));
        let (folder, memory) = (absolute(folder.into())?, absolute(memory.into())?);
        fs::create_dir_all(&folder).during(|| format!("making '{}'", folder.display()))?;
        let images = Self { folder, memory };
        images.has_memory_folder()?;
        Ok(images)
    }

    /// Whether the folder for memory is there. Once it is, no other user can put another in its place.
    fn has_memory_folder(&self) -> Result<bool> {
        let memory = self.memory.display();
        let found = match fs::symlink_metadata(&self.memory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            found => found.during(|| format!("looking at '{memory}'"))?,
        };
        if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
            let text = format!("'{memory}' belongs to another user: the memory of guests is not put there");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(true)
    }

    /// Makes the folder for memory. Memory holds whatever guests hold, keys and passwords: it is its owner's alone.
    fn make_memory_folder(&self) -> Result<()> {
        let memory = &self.memory;
        if !self.has_memory_folder()? {
            match fs::DirBuilder::new().mode(0o700).create(memory) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(Error::io(format!("making '{}'", memory.display()), e));
                }
                _ => drop(self.has_memory_folder()?),
            }
        }
        fs::set_permissions(memory, fs::Permissions::from_mode(0o700))
            .during(|| format!("closing '{}' to others", memory.display()))
    }

    /// Removes the folder for memory if it is empty. No command may make or start machines meanwhile.
    pub fn remove_empty_folder(&self) {
        let _ = fs::remove_dir(&self.memory);
    }

    /// A name for the memory of a machine that starts.
    pub fn new_memory(&self) -> Result<PathBuf> {
        self.make_memory_folder()?;
        Ok(self.memory.join(new_uuid()?.to_string()))
    }

    /// An image by its name.
    pub fn get(&self, id: &str) -> Result<Image> {
        let image = self.read(id, RECORD)?;
        match fs::metadata(&image.record.memory) {
            Ok(_) => Ok(image),
            Err(e) => {
                let text = format!(
                    "the memory of image '{id}' of machine '{}' is gone ({e}), as it is after a restart of the host",
                    image.record.machine.name
                );
                Err(Error::new(ErrorKind::NotFound, text))
            }
        }
    }

    fn read(&self, id: &str, name: &str) -> Result<Image> {
        let folder = self.folder.join(id);
        let path = folder.join(name);
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no memory image '{}'", id.escape_debug()));
        id.parse::<Hyphenated>().map_err(|_| missing())?;
        let text = match fs::metadata(&path).and_then(|found| match found.len() > TEXT_MAX as u64 {
            true => Err(io::ErrorKind::FileTooLarge.into()),
            false => fs::read_to_string(&path),
        }) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(missing()),
            Err(e) => return Err(Error::io(format!("reading '{}'", path.display()), e)),
        };
        let record = Record::parse(&text, &path.display().to_string())?;
        Ok(Image { id: id.into(), record, folder })
    }

    /// Begins an image of a machine: says what it will be, before any of it is there.
    pub fn begin(&self, machine: Definition, agent: Option<bool>) -> Result<Image> {
        self.make_memory_folder()?;
        let id = new_uuid()?.to_string();
        let folder = self.folder.join(&id);
        let snapshots = machine.disks.iter();
        let snapshots = snapshots
            .map(|disk| Snapshot { disk: disk.name.clone(), snapshot: format!("{}{id}", super::freeze::PREFIX) })
            .collect();
        let memory = self.memory.join(format!("image-{id}"));
        let record = Record { version: VERSION, created: clock::seconds(), agent, memory, snapshots, machine };
        fs::create_dir(&folder).during(|| format!("making '{}'", folder.display()))?;
        durable::write_toml(&folder.join(BEGUN), &record)?;
        durable::sync(&self.folder)?;
        Ok(Image { id, record, folder })
    }

    /// Creates the image: gives its record the final name, after its memory was made read-only where this QEMU allows
    /// that. Not durable yet: see [`Images::settle`].
    pub fn finish(&self, image: &Image, features: &Features) -> Result<()> {
        if features.memory_from_readonly_file {
            let memory = &image.record.memory;
            fs::set_permissions(memory, fs::Permissions::from_mode(0o400))
                .during(|| format!("closing '{}' to writing", memory.display()))?;
        }
        fs::rename(image.folder.join(BEGUN), image.folder.join(RECORD))
            .during(|| format!("finishing '{}'", image.folder.display()))
    }

    /// Makes an image durable, as far as it does not lie in memory.
    pub fn settle(&self, image: &Image) -> Result<()> {
        durable::sync(&image.state())?;
        durable::sync(&image.folder)
    }

    /// Gives up an image that was begun.
    pub fn abandon(&self, image: &Image, disks: &dyn Disks) {
        if let Err(error) = self.remove(image, disks) {
            tracing::warn!("an unfinished memory image is removed by the next command: {error}");
        }
    }

    /// Removes images that no machine refers to, with their snapshots, and memory that belongs to no image or machine.
    /// No command may make or start machines meanwhile. How many were removed.
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
        for id in durable::names(&self.folder)? {
            let image = match self.read(&id, RECORD) {
                Err(error) if error.kind() == ErrorKind::NotFound => self.read(&id, BEGUN),
                image => image,
            };
            match image {
                Ok(image) if used.contains(&id) => drop(kept.insert(image.record.memory)),
                Ok(image) => gone += usize::from(self.remove(&image, &**machines.disks())?),
                // Begun, and not even its intention written down: there is nothing else of it.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let folder = self.folder.join(&id);
                    fs::remove_dir_all(&folder).during(|| format!("removing '{}'", folder.display()))?;
                }
                Err(error) => return Err(error),
            }
        }
        let files = match self.has_memory_folder()? {
            true => durable::names(&self.memory)?,
            false => Vec::new(),
        };
        for name in files {
            let file = self.memory.join(name);
            if !kept.contains(&file) {
                remove_if_there(&file)?;
            }
        }
        Ok(gone)
    }

    /// Removes an image; false when disks of clones still stand on its snapshots: then the record that names these
    /// stays, and nothing else.
    fn remove(&self, image: &Image, disks: &dyn Disks) -> Result<bool> {
        remove_if_there(&image.record.memory)?;
        remove_if_there(&image.state())?;
        let mut needed = false;
        for Snapshot { disk, snapshot } in &image.record.snapshots {
            match disks.delete_snapshot(disk, snapshot) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) if error.kind() == ErrorKind::Busy => needed = true,
                Err(error) => return Err(error),
            }
        }
        if needed {
            return Ok(false);
        }
        fs::remove_dir_all(&image.folder).during(|| format!("removing '{}'", image.folder.display()))?;
        Ok(true)
    }
}

impl Record {
    /// Reads a record; errors call it `origin`. Total: any text is a record that holds together, or an error.
    pub fn parse(text: &str, origin: &str) -> Result<Self> {
        let record: Self =
            toml::from_str(text).map_err(|e| Error::new(ErrorKind::Corrupt, format!("'{origin}': {e}")))?;
        let disks = record.snapshots.iter().map(|snapshot| &snapshot.disk);
        record.machine.check_record(origin, (record.version, VERSION), disks)?;
        Ok(record)
    }
}
