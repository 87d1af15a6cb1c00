//! What has to be removed if a command does not complete: the file `intent.toml` of a folder in which machines are
//! created or deleted.

use crate::durable;
use backend::clock;
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// The file.
const INTENT: &str = "intent.toml";
/// Its version.
const VERSION: u32 = 1;

/// Disks and snapshots that are deleted with machines that were not created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Intent {
    /// Version of this file.
    pub version: u32,
    /// When the operation began, in seconds since 1970.
    pub begun: u64,
    /// The machines.
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
    /// Its name.
    pub name: String,
    /// The disks that are deleted with it.
    #[serde(default, rename = "disk")]
    pub disks: Vec<OwnDisk>,
}

/// A disk that is deleted with a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnDisk {
    /// Its name.
    pub name: String,
    /// The snapshot of which it is a linked clone: a disk of that name with another origin is a different disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Snapshot>,
}

/// A snapshot of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The disk.
    pub disk: String,
    /// Its snapshot.
    pub name: String,
}

impl Intent {
    /// An intent with the current time.
    pub fn new(machines: Vec<Intended>, snapshots: Vec<Snapshot>) -> Self {
        Self { version: VERSION, begun: clock::seconds(), machines, snapshots }
    }

    /// Writes the intent durably.
    pub fn write(&self, folder: &Path) -> Result<()> {
        durable::write_toml(&folder.join(INTENT), self)
    }

    /// Reads the intent of a folder; `None` if it was not written yet, so that nothing else was done either.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(INTENT);
        let Some(text) = durable::read(&path)? else { return Ok(None) };
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, format!("'{}': {what}", path.display()));
        let intent: Self = toml::from_str(&text).map_err(|e| corrupt(e.to_string()))?;
        if intent.version != VERSION {
            return Err(corrupt(format!("it has version {}, this program supports {VERSION}", intent.version)));
        }
        Ok(Some(intent))
    }

    /// Removes the intent, and the folder if it is empty.
    pub fn remove(folder: &Path) -> Result<()> {
        crate::machine::remove_if_there(&folder.join(INTENT))?;
        fs::remove_dir_all(folder).during(|| format!("removing '{}'", folder.display()))
    }
}
