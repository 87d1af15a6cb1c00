//! Snapshots of several disks at one point in time, when some of the disks are in VMware's formats. The snapshots of
//! each disk in a VMware format are in a record of that disk, and those of the native disks are in the journal. A power
//! cut between these writes must leave all of the snapshots or none. So a file in the datastore records the group while
//! the snapshots are taken.
//!
//! ```text
//! write    the file names the disks, and the native snapshots by identity
//! prepare  the record of each disk in a VMware format has the snapshot, with an empty delta above it
//! point    all disks are quiesced; the native snapshots are made durable in one batch of the journal
//! push     writes to the disks in VMware's formats go to the deltas
//! remove   the file is removed
//! ```
//!
//! If the file exists when the datastore is opened, recovery decides whether the group is complete. The group is
//! complete if the native snapshots exist and no disk in a VMware format lacks its snapshot. Otherwise all snapshots of
//! the group are deleted. In this case no delta has received a write, unless the file says that the group is abandoned.
//!
//! A failure abandons the group. The file records this if snapshots may remain: image snapshots that could not be
//! deleted, and native snapshots after a failure of the device. A failed append to the journal may be on the device
//! nevertheless. So the file records the abandonment before the first image snapshot is deleted.
//!
//! If the file cannot be read, the snapshots of its group stay as they are, and `check --repair` removes the file.
//!
//! The layout is in `docs/format/snapshot-group.md`.

use crate::foreign::{Foreign, ForeignDisk};
use crate::info::{CheckReport, Finding};
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
    /// Identity of the disk: the name of the folder alone is not enough, because another disk may be created in the
    /// folder later.
    pub disk: String,
    /// Name of the disk's folder in `images`.
    pub folder: String,
    /// Name of the snapshot.
    pub snapshot: String,
    /// The number of the snapshot in the record of the disk.
    pub uid: u32,
}

/// Snapshots of which all or none must exist.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Group {
    /// Identity of the group, part of the file's name.
    id: String,
    /// Whether the group is abandoned. Then the snapshots listed here have to be deleted, if they exist.
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
    /// A group that has no record yet.
    pub fn new(directory: &Arc<dyn Directory>, native: &[[u8; 16]], images: Vec<ImageSnapshot>) -> Result<Self> {
        let id = names::uuid_text(&names::new_uuid()?);
        let native = native.iter().map(names::uuid_text).collect();
        Ok(Self { directory: Arc::clone(directory), group: Group { id, taking_back: false, native, images } })
    }

    /// Writes the group's record durably, before the first snapshot is taken.
    pub fn begin(&self) -> Result<()> {
        put(&*self.directory, &self.group)
    }

    /// Records that the group is abandoned.
    pub fn give_up(&mut self) -> Result<()> {
        self.group.taking_back = true;
        put(&*self.directory, &self.group)
    }

    /// Records the result of an abandoned group. Image snapshots that still exist stay in the record, and the next
    /// opening of the datastore deletes them; if there are none, the record is removed. `native_gone` says that no
    /// later opening will find a native snapshot of the group.
    ///
    /// # Errors
    /// The record could not be written, or a disk could not write that it does not have the snapshot any more.
    pub fn take_back(&mut self, foreign: &Foreign, native_gone: bool) -> Result<()> {
        if native_gone {
            self.group.native.clear();
        }
        self.group.taking_back = true;
        self.save_what_exists(foreign)
    }

    /// Writes the record of the abandoned group with those snapshots that the next opening may find.
    fn save_what_exists(&mut self, foreign: &Foreign) -> Result<()> {
        let mut written = Ok(());
        self.group.images.retain(|image| match found(foreign, image) {
            Found::Taken(_) => true,
            Found::NotTaken(entry) => match entry.disk.write_unrecorded() {
                Ok(()) => false,
                Err(error) => {
                    written = Err(error);
                    true
                }
            },
            Found::Gone | Found::Unknown => false,
        });
        save(&*self.directory, &self.group)?;
        written
    }

    /// Removes the record, because either all snapshots of the group exist or none.
    pub fn end(&self) -> Result<()> {
        KIND.remove(&*self.directory, &file_name(&self.group.id)?)
    }

    /// Repeats the last step of [`UnderWay::end`] or [`UnderWay::take_back`], after this step failed.
    pub fn try_again(&mut self, foreign: &Foreign) -> Result<()> {
        match self.group.taking_back {
            true => self.save_what_exists(foreign),
            false => self.end(),
        }
    }

    /// Whether the group is abandoned. Deleting a snapshot then does not change the decision of a later recovery.
    pub fn is_given_up(&self) -> bool {
        self.group.taking_back
    }
}

fn put(directory: &dyn Directory, group: &Group) -> Result<()> {
    sealed::put(directory, &file_name(&group.id)?, &KIND.encode(group)?)
        .during(|| "recording snapshots that are taken together".into())
}

/// The disk of a snapshot, and whether the snapshot exists.
enum Found {
    Taken(Arc<ForeignDisk>),
    /// The disk does not have the snapshot.
    NotTaken(Arc<ForeignDisk>),
    /// The folder belongs to another disk.
    Gone,
    /// The disk cannot be opened now, so it is not known whether the snapshot exists.
    Unknown,
}

fn found(foreign: &Foreign, image: &ImageSnapshot) -> Found {
    let is_it = |snapshot: &vmdk::SnapshotRecord| snapshot.name == image.snapshot && snapshot.uid == image.uid;
    match foreign.entries().into_iter().find(|entry| entry.folder == image.folder) {
        Some(entry) if entry.disk.uuid() != image.disk => Found::Gone,
        Some(entry) if entry.disk.record().snapshots.iter().any(is_it) => Found::Taken(entry),
        Some(entry) => Found::NotTaken(entry),
        None => Found::Unknown,
    }
}

/// Removes a deleted disk from the records of abandoned groups.
pub(crate) fn forget(directory: &dyn Directory, disk: &str) -> Result<()> {
    for name in directory.list().during(|| "looking for groups of snapshots".into())? {
        if !name.starts_with(PREFIX) || name.ends_with(TEMPORARY) {
            continue;
        }
        // A damaged record is left for a check, which removes it.
        let Ok(Some(mut group)) = read(directory, &name) else { continue };
        let before = group.images.len();
        group.images.retain(|image| image.disk != disk);
        if group.taking_back && group.images.len() < before {
            save(directory, &group)?;
        }
    }
    Ok(())
}

/// Writes the record of an abandoned group; removes it if no snapshot is left to be deleted.
fn save(directory: &dyn Directory, group: &Group) -> Result<()> {
    match group.images.is_empty() && group.native.is_empty() {
        true => KIND.remove(directory, &file_name(&group.id)?),
        false => put(directory, group),
    }
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

/// The record in a file; `None` if the file does not exist. A single damaged byte is mended.
fn read(directory: &dyn Directory, name: &str) -> Result<Option<Group>> {
    let Some(bytes) = KIND.read(directory, name)? else { return Ok(None) };
    KIND.decode_mending(&bytes, |bytes| decode(bytes, name)).map(|(group, _)| Some(group))
}

/// The problem of a record that cannot be read.
fn problem(name: &str) -> String {
    format!("the record '{name}' is damaged: not all snapshots of a group that was interrupted may exist")
}

/// Reports records that cannot be read; with `repair` they are removed.
pub(crate) fn check(directory: &dyn Directory, repair: bool, report: &mut CheckReport) -> Result<()> {
    for name in directory.list().during(|| "looking for groups of snapshots".into())? {
        if !name.starts_with(PREFIX) || name.ends_with(TEMPORARY) {
            continue;
        }
        let Err(error) = read(directory, &name) else { continue };
        if repair {
            KIND.remove(directory, &name)?;
        }
        let problem = format!("{} ({error})", problem(&name));
        let repaired = repair.then(|| "the record was removed, and the existing snapshots are kept".to_owned());
        report.findings.push(Finding::new(problem, repaired));
    }
    Ok(())
}

/// Completes or abandons the groups that were interrupted. Called while the datastore is opened.
pub(crate) fn recover(native: &Native, foreign: &Foreign) -> Result<()> {
    let directory = native.engine.directory();
    let names = directory.list().during(|| "looking for groups of snapshots".into())?;
    for name in names.iter().filter(|name| name.starts_with(PREFIX)) {
        if name.ends_with(TEMPORARY) {
            sealed::remove_if_there(&**directory, name).during(|| format!("removing '{name}'"))?;
            continue;
        }
        let mut group = match read(&**directory, name) {
            Ok(Some(group)) => group,
            Ok(None) => continue,
            Err(error) if error.kind() == ErrorKind::Unsupported => return Err(error),
            Err(error) => {
                tracing::error!(%error, "{}", problem(name));
                continue;
            }
        };
        // The record is removed at once, because later changes of the snapshots would change the decision.
        if is_whole(&group, native, foreign) {
            KIND.remove(&**directory, name)?;
            continue;
        }
        group.native.retain(|uuid| !take_back_native(uuid, native));
        group.images.retain(|image| !take_back(image, foreign));
        group.taking_back = true;
        save(&**directory, &group)?;
    }
    Ok(())
}

/// Whether the group is complete. Native snapshots are taken last and in one batch, so if the group has native
/// snapshots, all of them must exist.
fn is_whole(group: &Group, native: &Native, foreign: &Foreign) -> bool {
    let has = |uuid: &String| find_native(uuid, native).is_some();
    let lacks = |image: &ImageSnapshot| matches!(found(foreign, image), Found::NotTaken(_));
    !group.taking_back && group.native.iter().all(has) && !group.images.iter().any(lacks)
}

fn find_native(uuid: &str, native: &Native) -> Option<u64> {
    native.find_snapshot_by_identity(&names::parse_uuid(uuid)?)
}

/// Deletes a native snapshot; false if this is left to the next opening.
fn take_back_native(uuid: &str, native: &Native) -> bool {
    let Some(id) = find_native(uuid, native) else { return true };
    tracing::info!(uuid, "deleting a native snapshot of an interrupted group");
    let deleted = native.take_back_snapshot(id);
    deleted
        .inspect_err(|error| tracing::error!(uuid, %error, "a snapshot of an interrupted group was not deleted"))
        .is_ok()
}

/// Deletes an image snapshot that no write has followed. False if this is left to the next opening, because the disk
/// cannot be opened or the file system is full. The datastore is opened nevertheless.
fn take_back(image: &ImageSnapshot, foreign: &Foreign) -> bool {
    let entry = match found(foreign, image) {
        Found::Taken(entry) => entry,
        Found::NotTaken(_) | Found::Gone => return true,
        Found::Unknown => {
            let folder = &image.folder;
            tracing::warn!(folder, "a snapshot of an interrupted group is kept until its disk can be opened");
            return false;
        }
    };
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
