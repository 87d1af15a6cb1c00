//! What a datastore remembers of snapshots of several disks that are being taken at one point, when some of the disks
//! are images: each of those has a record of its own, and the native ones have the journal. A power cut between them
//! leaves all of the snapshots, or none.
//!
//! ```text
//! put      the file names the disks, and the native snapshots by identity
//! prepare  the record of each disk of images has the snapshot, with an empty delta above it
//! point    every disk stands still; the native snapshots are durable, all in one batch of the journal
//! push     writes of the disks of images go to the deltas
//! remove   the file goes
//! ```
//!
//! An opening that finds the file decides by what came last: the native snapshots, or where there are none, that no
//! disk of images lacks its own. Where the group is not whole, no write has gone to a delta, and the snapshots of
//! images are deleted, which moves nothing.
//!
//! The layout is in `docs/format/snapshot-group.md`.

use crate::foreign::{Foreign, ForeignDisk};
use crate::names;
use crate::native::Native;
use crate::sealed::{self, Kind, TEMPORARY};
use backend::Directory;
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How the files begin.
const PREFIX: &str = "snapshot-group-";
const KIND: Kind = Kind { word: "snapshot-group", version: 1, length_max: 4 << 20 };

/// A snapshot of a disk of images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageSnapshot {
    /// Name of the disk's folder in `images`.
    pub folder: String,
    /// Name of the snapshot.
    pub snapshot: String,
    /// The number that it gets in the record of the disk.
    pub uid: u32,
}

/// Snapshots that are there together or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Group {
    /// Identity of the group, and of the file.
    id: String,
    /// It is decided that none of the snapshots stays; those of `images` are still to be deleted.
    taking_back: bool,
    /// Identities of the native snapshots.
    native: Vec<String>,
    images: Vec<ImageSnapshot>,
}

/// A group under way.
pub(crate) struct UnderWay {
    directory: Arc<dyn Directory>,
    group: Group,
}

impl UnderWay {
    /// A group that nothing is remembered of yet.
    pub fn new(directory: &Arc<dyn Directory>, native: &[[u8; 16]], images: Vec<ImageSnapshot>) -> Result<Self> {
        let id = names::uuid_text(&names::new_uuid()?);
        let native = native.iter().map(names::uuid_text).collect();
        Ok(Self { directory: Arc::clone(directory), group: Group { id, taking_back: false, native, images } })
    }

    /// Remembers, durably, that these snapshots belong together: before the first of them is taken.
    pub fn begin(&self) -> Result<()> {
        put(&*self.directory, &self.group)
    }

    /// After a failure: the snapshots that could not be taken back go at the next opening. Nothing is remembered of a
    /// group that has none.
    pub fn take_back(&mut self, foreign: &Foreign) -> Result<()> {
        self.group.images.retain(|image| found(foreign, image).is_some_and(|(_, taken)| taken));
        if self.group.images.is_empty() {
            return self.end();
        }
        self.group.taking_back = true;
        put(&*self.directory, &self.group)
    }

    /// The snapshots are there, or none of them is.
    pub fn end(&self) -> Result<()> {
        KIND.remove(&*self.directory, &file_name(&self.group.id)?)
    }
}

fn put(directory: &dyn Directory, group: &Group) -> Result<()> {
    sealed::put(directory, &file_name(&group.id)?, &KIND.encode(group)?)
        .during(|| "recording snapshots that are taken together".into())
}

/// The disk of a snapshot, if it is open, and whether it has the snapshot.
fn found(foreign: &Foreign, image: &ImageSnapshot) -> Option<(Arc<ForeignDisk>, bool)> {
    let entry = foreign.entries().into_iter().find(|entry| entry.folder == image.folder)?;
    let is_it = |snapshot: &vmdk::SnapshotRecord| snapshot.name == image.snapshot && snapshot.uid == image.uid;
    let taken = entry.disk.record().snapshots.iter().any(is_it);
    Some((entry, taken))
}

fn file_name(id: &str) -> Result<String> {
    match names::parse_uuid(id) {
        Some(uuid) if names::uuid_text(&uuid) == id => Ok(format!("{PREFIX}{id}")),
        _ => {
            let text = format!("'{}' is not the id of a group of snapshots", id.escape_debug());
            Err(Error::new(ErrorKind::Corrupt, text))
        }
    }
}

fn decode(bytes: &[u8], name: &str) -> Result<Group> {
    let group: Group = KIND.decode(bytes).map_err(|error| error.context(name))?;
    if file_name(&group.id)? != name {
        return Err(Error::new(ErrorKind::Corrupt, format!("'{name}' is the record of another group of snapshots")));
    }
    Ok(group)
}

/// Keeps groups whose taking was interrupted, or takes them back. While the datastore is opened.
pub(crate) fn recover(native: &Native, foreign: &Foreign) -> Result<()> {
    let directory = native.engine.directory();
    let names = directory.list().during(|| "looking for groups of snapshots".into())?;
    for name in names.iter().filter(|name| name.starts_with(PREFIX)) {
        if name.ends_with(TEMPORARY) {
            sealed::remove_if_there(&**directory, name).during(|| format!("removing '{name}'"))?;
            continue;
        }
        let Some(bytes) = KIND.read(&**directory, name)? else { continue };
        let mut group = decode(&bytes, name)?;
        // Decided once: what becomes of the snapshots later is no sign any more.
        if is_whole(&group, native, foreign) {
            KIND.remove(&**directory, name)?;
            continue;
        }
        group.images.retain(|image| !take_back(image, foreign));
        if group.images.is_empty() {
            KIND.remove(&**directory, name)?;
        } else {
            group.taking_back = true;
            put(&**directory, &group)?;
        }
    }
    Ok(())
}

/// Whether the point was reached. Where there are native snapshots they came last, and all at once.
fn is_whole(group: &Group, native: &Native, foreign: &Foreign) -> bool {
    let has = |uuid: &String| {
        native.engine.with_catalog(|catalog| {
            let same = |uuid: &[u8; 16]| catalog.objects().any(|object| object.is_snapshot() && object.uuid == *uuid);
            names::parse_uuid(uuid).is_some_and(|uuid| same(&uuid))
        })
    };
    // A disk that cannot be opened now says nothing.
    let lacks = |image: &ImageSnapshot| found(foreign, image).is_some_and(|(_, taken)| !taken);
    match (group.taking_back, group.native.is_empty()) {
        (true, _) => false,
        (false, false) => group.native.iter().all(has),
        (false, true) => !group.images.iter().any(lacks),
    }
}

/// Deletes a snapshot above which nothing was written; false where that has to wait for another opening, which does
/// not keep the datastore shut: the disk cannot be opened, or the file system is full.
fn take_back(image: &ImageSnapshot, foreign: &Foreign) -> bool {
    let Some((entry, taken)) = found(foreign, image) else {
        tracing::warn!(
            folder = image.folder,
            "a snapshot of an interrupted group is kept until its disk can be opened"
        );
        return false;
    };
    if !taken {
        return true;
    }
    tracing::info!(folder = image.folder, snapshot = image.snapshot, "deleting a snapshot of an interrupted group");
    entry
        .take_back_snapshot(&image.snapshot)
        .inspect_err(|error| {
            tracing::error!(folder = image.folder, %error, "a snapshot of an interrupted group was not deleted");
        })
        .is_ok()
}

#[cfg(test)]
mod tests;
