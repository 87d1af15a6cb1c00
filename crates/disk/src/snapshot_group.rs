//! Snapshots of several disks at one point, when some of the disks are in VMware's formats. Each of these disks has its
//! own record, and the native disks have the journal; a power cut between these writes must leave all of the snapshots
//! or none. A file in the datastore records the group while the snapshots are taken.
//!
//! ```text
//! write    the file names the disks, and the native snapshots by identity
//! prepare  the record of each disk in a VMware format has the snapshot, with an empty delta above it
//! point    all disks are quiesced; the native snapshots are made durable in one batch of the journal
//! push     writes to the disks in VMware's formats go to the deltas
//! remove   the file is removed
//! ```
//!
//! If the file exists when the datastore is opened, the last step decides. The group is complete if the native
//! snapshots exist, or, in a group without native disks, if every disk has its snapshot. Otherwise no delta has
//! received a write, and the image snapshots are deleted, which moves no data.
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

/// Prefix of the files' names.
const PREFIX: &str = "snapshot-group-";
const KIND: Kind = Kind { word: "snapshot-group", version: 1, length_max: 4 << 20 };

/// A snapshot of a disk in a VMware format.
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

/// Snapshots of which all or none must exist.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Group {
    /// Identity of the group, part of the file's name.
    id: String,
    /// True once the group is abandoned; the snapshots in `images` are still to be deleted.
    taking_back: bool,
    /// Identities of the native snapshots.
    native: Vec<String>,
    images: Vec<ImageSnapshot>,
}

/// A group whose snapshots are being taken.
pub(crate) struct UnderWay {
    directory: Arc<dyn Directory>,
    group: Group,
}

impl UnderWay {
    /// A group without a record yet.
    pub fn new(directory: &Arc<dyn Directory>, native: &[[u8; 16]], images: Vec<ImageSnapshot>) -> Result<Self> {
        let id = names::uuid_text(&names::new_uuid()?);
        let native = native.iter().map(names::uuid_text).collect();
        Ok(Self { directory: Arc::clone(directory), group: Group { id, taking_back: false, native, images } })
    }

    /// Writes the group's record durably, before the first snapshot is taken.
    pub fn begin(&self) -> Result<()> {
        put(&*self.directory, &self.group)
    }

    /// Abandons the group after a failure. Snapshots that could not be deleted stay in the record, and the next opening
    /// deletes them; without any, the record is removed.
    pub fn take_back(&mut self, foreign: &Foreign) -> Result<()> {
        self.group.images.retain(|image| found(foreign, image).is_some_and(|(_, taken)| taken));
        if self.group.images.is_empty() {
            return self.end();
        }
        self.group.taking_back = true;
        put(&*self.directory, &self.group)
    }

    /// Removes the record: either all snapshots exist or none.
    pub fn end(&self) -> Result<()> {
        KIND.remove(&*self.directory, &file_name(&self.group.id)?)
    }
}

fn put(directory: &dyn Directory, group: &Group) -> Result<()> {
    sealed::put(directory, &file_name(&group.id)?, &KIND.encode(group)?)
        .during(|| "recording snapshots that are taken together".into())
}

/// The disk of a snapshot if it is open, and whether it has the snapshot.
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

/// Completes or abandons groups that were interrupted, while the datastore is opened.
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
        // The record is removed at once, because later changes of the snapshots would change the decision.
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

/// Whether the group is complete. Native snapshots, which are taken last and all at once, decide if there are any.
fn is_whole(group: &Group, native: &Native, foreign: &Foreign) -> bool {
    let has = |uuid: &String| {
        native.engine.with_catalog(|catalog| {
            let same = |uuid: &[u8; 16]| catalog.objects().any(|object| object.is_snapshot() && object.uuid == *uuid);
            names::parse_uuid(uuid).is_some_and(|uuid| same(&uuid))
        })
    };
    // A disk that cannot be opened does not decide.
    let lacks = |image: &ImageSnapshot| found(foreign, image).is_some_and(|(_, taken)| !taken);
    match (group.taking_back, group.native.is_empty()) {
        (true, _) => false,
        (false, false) => group.native.iter().all(has),
        (false, true) => !group.images.iter().any(lacks),
    }
}

/// Deletes a snapshot after which nothing was written. False if this has to wait for the next opening, because the disk
/// cannot be opened or the file system is full; the datastore is opened nevertheless.
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
