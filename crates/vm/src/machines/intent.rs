//! The intent of a command that creates or deletes machines: what has to be removed if the command does not complete.
//! It is the file `intent.toml` of a folder in which machines are created or deleted.

use crate::definition::check_name;
use crate::durable;
use backend::{clock, regular};
use error::{Error, ErrorKind, IoContext, Result};
use rustix::fs::{AtFlags, Dir, unlinkat};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::path::Path;

/// Name of the file with an intent.
pub const INTENT: &str = "intent.toml";
/// Name of the file with the disks whose creation has begun: a line `SECONDS NAME` for each.
const BEGUN: &str = ".begun";
/// Version of the intent file.
const VERSION: u32 = 1;
/// Most bytes of an intent that is read: enough for a hundred thousand machines.
const TEXT_MAX: u64 = 64 << 20;

/// The machines of an intent, and the snapshots that are deleted with those machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Intent {
    /// Version of this file.
    pub version: u32,
    /// When the operation began, in seconds since 1970.
    pub begun: u64,
    /// The machines that are created or deleted.
    #[serde(default, rename = "machine")]
    pub machines: Vec<Intended>,
    /// Snapshots that are deleted unless clones are based on them.
    #[serde(default, rename = "snapshot")]
    pub snapshots: Vec<Snapshot>,
}

/// A machine that is being created or deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Intended {
    /// The machine's name.
    pub name: String,
    /// The disks that are deleted with the machine.
    #[serde(default, rename = "disk")]
    pub disks: Vec<OwnDisk>,
}

/// A disk that is deleted with a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnDisk {
    /// The disk's name.
    pub name: String,
    /// The snapshot of which the disk is a linked clone. A disk with the same name and another origin is a different
    /// disk, and is not deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Snapshot>,
}

/// A snapshot of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The name of the disk.
    pub disk: String,
    /// The name of the snapshot.
    pub name: String,
}

impl Intent {
    /// An intent that begins now.
    pub fn new(machines: Vec<Intended>, snapshots: Vec<Snapshot>) -> Self {
        Self { version: VERSION, begun: clock::seconds(), machines, snapshots }
    }

    /// Writes the intent durably.
    pub fn write(&self, folder: &Path) -> Result<()> {
        durable::write_toml(&folder.join(INTENT), self)
    }

    /// Reads the intent of a folder; `None` if the command was killed before it wrote the intent, and so before it
    /// created anything else. `Corrupt` if a name in the intent is not valid.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(INTENT);
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, format!("'{}': {what}", path.display()));
        // A server of root reads the file in a datastore of another user, who could have put a pipe or a link there.
        let bytes = match regular::read_own(&path, TEXT_MAX, "record of a command about machines") {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let text = String::from_utf8(bytes).map_err(|_| corrupt("it is not UTF-8".into()))?;
        let intent: Self = toml::from_str(&text).map_err(|e| corrupt(e.to_string()))?;
        if intent.version != VERSION {
            return Err(corrupt(format!("it has version {}, this program supports {VERSION}", intent.version)));
        }
        for machine in &intent.machines {
            // Another name could lead to a folder elsewhere, which would be removed.
            check_name(&machine.name).map_err(|error| corrupt(error.to_string()))?;
            if let Some(disk) = machine.disks.iter().find(|disk| !is_disk_name(&disk.name)) {
                return Err(corrupt(format!("'{}' cannot name a disk", disk.name.escape_debug())));
            }
        }
        Ok(Some(intent))
    }

    /// Writes durably which disks of the intent were begun, and when. Once the file exists, the command has created no
    /// other disk.
    pub fn write_begun(folder: &Path, begun: &[(u64, String)]) -> Result<()> {
        let lines: Vec<String> = begun.iter().map(|(since, disk)| format!("{since} {disk}")).collect();
        durable::write(&folder.join(BEGUN), format!("{}\n", lines.join("\n")).as_bytes())
    }

    /// When the command that wrote the intent has begun to create the disk; `None` if it has not. `lines` is the result
    /// of [`Intent::read_begun`].
    pub fn disk_begun(&self, disk: &str, lines: Option<&str>) -> Option<u64> {
        let Some(lines) = lines else { return Some(self.begun) };
        let mut begun = lines.lines().filter_map(|line| line.split_once(' '));
        begun.find(|(_, name)| *name == disk).and_then(|(since, _)| since.parse().ok())
    }

    /// Reads which disks were begun; `None` if the command wrote no such file.
    pub fn read_begun(folder: &Path) -> Result<Option<String>> {
        match regular::read_own(&folder.join(BEGUN), TEXT_MAX, "record of a command about machines") {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            bytes => Ok(Some(String::from_utf8_lossy(&bytes?).into_owned())),
        }
    }

    /// Removes the intent, and the folder if it is empty.
    pub fn remove(folder: &Path) -> Result<()> {
        crate::machine::remove_if_there(&folder.join(INTENT))?;
        fs::remove_dir_all(folder).during(|| format!("removing '{}'", folder.display()))
    }

    /// Removes the intent and the folder, if the folder contains nothing else. Root calls this in a datastore of
    /// another user. This user could have replaced the folder by a link, so the intent is removed from the open folder
    /// `opened`.
    pub fn remove_if_last(folder: &Path, opened: &File) -> Result<()> {
        let removing = || format!("removing '{}'", folder.display());
        for entry in Dir::read_from(opened).map_err(std::io::Error::from).during(removing)? {
            let entry = entry.map_err(std::io::Error::from).during(removing)?;
            if ![".", "..", INTENT, BEGUN].iter().any(|name| entry.file_name().to_bytes() == name.as_bytes()) {
                return Ok(());
            }
        }
        // Most commands do not write this file.
        let _ = unlinkat(opened, BEGUN, AtFlags::empty());
        unlinkat(opened, INTENT, AtFlags::empty()).map_err(std::io::Error::from).during(removing)?;
        // The removal succeeds only for an empty folder, even if the user has replaced the folder. The next command of
        // the user removes a folder that stays.
        let _ = fs::remove_dir(folder);
        Ok(())
    }
}

/// Whether a name can be the name of a disk; datastores may allow fewer names.
fn is_disk_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\0'])
}
