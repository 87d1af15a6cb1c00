//! What is to be taken away if its maker does not come to the end: the file `intent.toml` of a folder that machines are
//! made in, or deleted in.

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

/// Disks and snapshots that go with machines which do not come into being.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Intent {
    /// Version of this file.
    pub version: u32,
    /// When it was begun, in seconds since 1970.
    pub begun: u64,
    /// Every machine.
    #[serde(default, rename = "machine")]
    pub machines: Vec<Intended>,
    /// Snapshots that go unless clones stand on them.
    #[serde(default, rename = "snapshot")]
    pub snapshots: Vec<Snapshot>,
}

/// A machine that is being made or deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Intended {
    /// Its name.
    pub name: String,
    /// The disks that go with it.
    #[serde(default, rename = "disk")]
    pub disks: Vec<OwnDisk>,
}

/// A disk that goes with a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnDisk {
    /// Its name.
    pub name: String,
    /// The snapshot that it is a linked clone of: a disk of that name that stands on another snapshot is not this one.
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
    /// One that begins now.
    pub fn new(machines: Vec<Intended>, snapshots: Vec<Snapshot>) -> Self {
        Self { version: VERSION, begun: clock::seconds(), machines, snapshots }
    }

    /// Writes it, durable on return.
    pub fn write(&self, folder: &Path) -> Result<()> {
        durable::write_toml(&folder.join(INTENT), self)
    }

    /// The intent of a folder; `None` when it was not written yet: then nothing else was done either.
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

    /// Removes it, and the folder that has nothing else any more.
    pub fn remove(folder: &Path) -> Result<()> {
        crate::machine::remove_if_there(&folder.join(INTENT))?;
        fs::remove_dir_all(folder).during(|| format!("removing '{}'", folder.display()))
    }
}
