//! Memory images: memory, device state and disk snapshots of one moment, from which instant clones continue.
//!
//! ```text
//! DATASTORE/memory-images/ID/begun.toml   the record of an image that is being created
//! DATASTORE/memory-images/ID/image.toml   the same file, renamed when the image is complete
//! DATASTORE/memory-images/ID/state        device state
//! FOLDER FOR MEMORY/image-ID              the guest's memory, which is no longer modified
//! ```
//!
//! Images that are incomplete, and images to which no machine refers, are removed with everything that their records
//! name. The record itself is kept as long as a clone's disk is based on a disk snapshot of the image, so that the
//! snapshot can be deleted with the last clone.
//!
//! Memory files are in a separate folder, by default in `/dev/shm`. On a file system on a disk, the kernel would write
//! back the memory of a running parent repeatedly.

use crate::definition::{Definition, TEXT_MAX};
use crate::disks::Disks;
use crate::durable;
use crate::identity::new_uuid;
use crate::machine::{MemoryRecord, Start, remove_if_there};
use crate::machines::Machines;
use crate::qemu::command::Memory;
use crate::qemu::features::Features;
use backend::{clock, private};
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use uuid::fmt::Hyphenated;

/// The record of a complete image.
const RECORD: &str = "image.toml";
/// The record of an image that is being created.
const BEGUN: &str = "begun.toml";
/// Version of the record.
const VERSION: u32 = 1;

/// The record of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of this record.
    pub version: u32,
    /// When the memory image was taken, in seconds since 1970.
    pub created: u64,
    /// Whether an agent answered in the guest; `None` if the agent was not queried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<bool>,
    /// Whether the image can be continued with the user networks of passt. Otherwise the image contains the state of
    /// QEMU's own user network.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub passt: bool,
    /// Path of the guest's memory file.
    pub memory: PathBuf,
    /// The disk snapshots that belong to the image, in the order of the disks.
    pub snapshots: Vec<Snapshot>,
    /// The machine's definition when the image was taken.
    pub machine: Definition,
}

/// A disk's snapshot that belongs to an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The name of the disk.
    pub disk: String,
    /// The name of the snapshot.
    pub snapshot: String,
}

impl From<&Snapshot> for crate::machines::Snapshot {
    fn from(one: &Snapshot) -> Self {
        Self { disk: one.disk.clone(), name: one.snapshot.clone() }
    }
}

/// A memory image.
#[derive(Clone, Debug)]
pub struct Image {
    /// The image's name.
    pub id: String,
    /// The image's record.
    pub record: Record,
    folder: PathBuf,
}

/// The memory images of a datastore.
pub struct Images {
    folder: PathBuf,
    memory: PathBuf,
}

impl Image {
    /// Path of the image's device state.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// Parameters of a process that continues from the image.
    pub fn start<'a>(&self, features: &'a Features, nbd: &'a Path) -> Start<'a> {
        let memory = Memory::CopyOnWrite(self.record.memory.clone());
        let record = MemoryRecord::Image(self.id.clone());
        Start { features, nbd, memory, record, incoming: true, passt: self.record.passt }
    }
}

impl Images {
    /// The images in `folder`, with memory files in `memory`, which is created when it is needed.
    pub fn open(folder: impl Into<PathBuf>, memory: impl Into<PathBuf>) -> Result<Self> {
        // Paths are passed to QEMU, which may have another working directory.
        let absolute =
            |folder: PathBuf| std::path::absolute(&folder).during(|| format!("finding '{}'", folder.display()));
        let (folder, memory) = (absolute(folder.into())?, absolute(memory.into())?);
        private::create_folders(&folder).during(|| format!("making '{}'", folder.display()))?;
        let images = Self { folder, memory };
        images.has_memory_folder()?;
        Ok(images)
    }

    /// Whether the folder for memory files exists; an error if it belongs to another user. Once the folder exists, no
    /// other user can replace it.
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

    /// Creates the folder for memory files, accessible only to its owner, because guest memory may contain keys and
    /// passwords.
    fn make_memory_folder(&self) -> Result<()> {
        let memory = &self.memory;
        if !self.has_memory_folder()? {
            // The folder does not get the owner of its parent folder, who must not read the guest memory.
            match private::create_folder_of_caller(memory) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(Error::io(format!("making '{}'", memory.display()), e));
                }
                _ => drop(self.has_memory_folder()?),
            }
        }
        fs::set_permissions(memory, fs::Permissions::from_mode(0o700))
            .during(|| format!("closing '{}' to others", memory.display()))
    }

    /// Removes the folder for memory files if it is empty. The caller ensures that no command creates or starts
    /// machines meanwhile.
    pub fn remove_empty_folder(&self) {
        let _ = fs::remove_dir(&self.memory);
    }

    /// A path for the memory file of a machine that is being started.
    pub fn new_memory(&self) -> Result<PathBuf> {
        self.make_memory_folder()?;
        Ok(self.memory.join(new_uuid()?.to_string()))
    }

    /// The path of the memory file of an image.
    fn memory_of(&self, id: &str) -> PathBuf {
        self.memory.join(format!("image-{id}"))
    }

    /// The image with that name.
    pub fn get(&self, id: &str) -> Result<Image> {
        let image = self.read(id, RECORD)?;
        match fs::metadata(&image.record.memory) {
            Ok(_) => Ok(image),
            Err(e) => {
                let text = format!(
                    "the memory of image '{id}' of machine '{}' is gone ({e}); a restart of the host removes all \
                     memory images",
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

    /// Begins an image of a machine: writes the record before anything else of the image is created. `passt` states
    /// whether passt, and not QEMU itself, serves the user networks of the machine's process.
    pub fn begin(&self, machine: Definition, agent: Option<bool>, passt: bool) -> Result<Image> {
        self.make_memory_folder()?;
        let id = new_uuid()?.to_string();
        let folder = self.folder.join(&id);
        let snapshots = machine.disks.iter();
        let snapshots = snapshots
            .map(|disk| Snapshot { disk: disk.name.clone(), snapshot: format!("{}{id}", super::freeze::PREFIX) })
            .collect();
        let memory = self.memory_of(&id);
        let record = Record { version: VERSION, created: clock::seconds(), agent, passt, memory, snapshots, machine };
        private::create_folder(&folder).during(|| format!("making '{}'", folder.display()))?;
        durable::write_toml(&folder.join(BEGUN), &record)?;
        durable::sync(&self.folder)?;
        Ok(Image { id, record, folder })
    }

    /// Completes the image: makes its memory file read-only if this QEMU supports that, then gives its record the final
    /// name. [`Images::settle`] makes the image durable.
    pub fn finish(&self, image: &Image, features: &Features) -> Result<()> {
        if features.memory_from_readonly_file {
            let memory = &image.record.memory;
            fs::set_permissions(memory, fs::Permissions::from_mode(0o400))
                .during(|| format!("closing '{}' to writing", memory.display()))?;
        }
        fs::rename(image.folder.join(BEGUN), image.folder.join(RECORD))
            .during(|| format!("finishing '{}'", image.folder.display()))
    }

    /// Makes an image durable, except its memory file.
    pub fn settle(&self, image: &Image) -> Result<()> {
        durable::sync(&image.state())?;
        durable::sync(&image.folder)
    }

    /// Removes an image that was begun and not finished.
    pub fn abandon(&self, image: &Image, disks: &dyn Disks) {
        if let Err(error) = self.remove(image, disks) {
            tracing::warn!("removing an unfinished memory image failed and is repeated by the next command: {error}");
        }
    }

    /// Removes images to which no machine refers, with their disk snapshots, and memory files that belong to no image
    /// or machine. The caller ensures that no command creates or starts machines meanwhile. Returns the number of
    /// removed images.
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
        let (mut gone, mut settled) = (0, false);
        for id in durable::names(&self.folder)? {
            let (image, unfinished) = match self.read(&id, RECORD) {
                Err(error) if error.kind() == ErrorKind::NotFound => (self.read(&id, BEGUN), true),
                image => (image, false),
            };
            // The request of a killed command that takes the image's snapshots may still be running. Once the record is
            // removed, nothing would delete snapshots that are taken then.
            if unfinished && image.is_ok() && !settled {
                machines.disks().settle()?;
                settled = true;
            }
            match image {
                Ok(image) if used.contains(&id) => drop(kept.insert(image.record.memory)),
                Ok(image) => gone += usize::from(self.remove(&image, &**machines.disks())?),
                // The record was not written yet, so nothing else of the image exists.
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

    /// Removes an image. If disks of clones are still based on its disk snapshots, returns false and keeps the record
    /// that names these snapshots.
    fn remove(&self, image: &Image, disks: &dyn Disks) -> Result<bool> {
        // The record could name any file. A memory file in another folder, such as one that a former command chose,
        // stays.
        if image.record.memory == self.memory_of(&image.id) {
            remove_if_there(&image.record.memory)?;
        }
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
    /// Parses a record. Any text gives a consistent record, or an error that calls the record `origin`.
    pub fn parse(text: &str, origin: &str) -> Result<Self> {
        let record: Self =
            toml::from_str(text).map_err(|e| Error::new(ErrorKind::Corrupt, format!("'{origin}': {e}")))?;
        let disks = record.snapshots.iter().map(|snapshot| &snapshot.disk);
        record.machine.check_record(origin, (record.version, VERSION), disks)?;
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_memory_folder_belongs_to_root_in_a_folder_of_another_user() {
        let top = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(top.path(), Some(1234), Some(1235)).unwrap();
        let memory = top.path().join("memory");
        let images = Images::open(top.path().join("images"), &memory).unwrap();
        for _ in 0..2 {
            assert_eq!(images.new_memory().unwrap().parent(), Some(memory.as_path()));
            let metadata = fs::metadata(&memory).unwrap();
            assert_eq!((metadata.uid(), metadata.mode() & 0o777), (0, 0o700));
        }
    }
}
