//! Recovery of interrupted migrations when a datastore is opened, before incomplete disks are removed.
//!
//! Because incomplete disks are removed afterwards, recovery only has to mark the right copy of each migration as
//! incomplete: it sets the marks that the record requires, and then removes the record. The record of a disk that gets
//! a new UUID is removed later, when the disk is open and its settings have the new UUID ([`recover_settings`]).

use super::intent::{Copy, DamagedIntent, Intent, Intents, Stage, peek};
use super::run::recorded_identity;
use crate::foreign::{Foreign, ImageFolders};
use crate::names;
use crate::native::Native;
use backend::Directory;
use error::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The disks of migrations for which it is not known which copy is the current disk. They are kept, but not listed.
#[derive(Default)]
pub(crate) struct InDoubt {
    /// Names of native disks.
    pub names: BTreeSet<String>,
    /// Folders of disks in VMware's formats.
    pub folders: BTreeSet<String>,
    /// Records that cannot be read. The disks that they name must not be used.
    pub damaged: Vec<DamagedIntent>,
    /// Disks that became disks in VMware's formats, and so have a new UUID.
    pub renewed: Vec<RenewedDisk>,
}

/// A disk to which an interrupted migration has given a new UUID.
pub(crate) struct RenewedDisk {
    /// Identity of the migration, whose record is removed once the disk has its settings.
    id: String,
    /// The UUID before the migration.
    uuid: String,
    /// The folder of the disk.
    folder: String,
}

/// Applies the migration records of a datastore that is being opened.
pub(crate) fn recover(native: &Native, folders: &ImageFolders) -> Result<InDoubt> {
    let intents = Intents::new(Arc::clone(native.engine.directory()));
    let mut doubt = InDoubt::default();
    let (whole, damaged) = intents.all()?;
    for record in &damaged {
        doubt.names.insert(record.hidden());
    }
    if !damaged.is_empty() {
        // Any incomplete folder may be the target, and so may be the current disk.
        doubt.folders.extend(folders.incomplete()?);
    }
    doubt.damaged = damaged;
    for intent in whole {
        let done = match intent.stage {
            Stage::Copying => true,
            Stage::Committed => match &intent.peer {
                None => {
                    complete(&intent, native, folders)?;
                    retire(&intent, native, folders)?;
                    true
                }
                Some(peer) => {
                    retire(&intent, native, folders)?;
                    forget_settings(native, &intent.uuid);
                    // The other datastore needs this record until it has recorded the disk as its own and has removed
                    // its own record.
                    matches!(peek(peer, &intent.id), Ok(None))
                }
            },
            Stage::Arriving => {
                let peer = intent.peer.as_ref().ok_or_else(|| {
                    Error::new(ErrorKind::Corrupt, format!("the record of migration {} names no datastore", intent.id))
                })?;
                match peek(peer, &intent.id) {
                    Ok(Some(Intent { stage: Stage::Committed, .. })) => {
                        complete(&intent, native, folders)?;
                        true
                    }
                    Ok(_) => {
                        forget_settings(native, &intent.uuid);
                        true
                    }
                    Err(error) => {
                        tracing::warn!(
                            disk = intent.disk,
                            "a migration stays undecided, because the datastore '{peer}' cannot be read: {error}"
                        );
                        match &intent.target {
                            Copy::Native { .. } | Copy::Overlay {} => doubt.names.insert(intent.hidden()),
                            Copy::Images { folder } => doubt.folders.insert(folder.clone()),
                        };
                        false
                    }
                }
            }
        };
        if done {
            tracing::info!(disk = intent.disk, stage = ?intent.stage, "completed or undid an interrupted migration");
            match renewed(&intent) {
                Some(disk) => doubt.renewed.push(disk),
                None => intents.remove(&intent.id)?,
            }
        }
    }
    Ok(doubt)
}

/// The disk of a migration if the migration gives the disk a new UUID in this datastore. The target may also be
/// incomplete.
fn renewed(intent: &Intent) -> Option<RenewedDisk> {
    let is_here = match intent.stage {
        Stage::Copying => false,
        Stage::Committed => intent.peer.is_none(),
        Stage::Arriving => true,
    };
    match &intent.target {
        Copy::Images { folder } if is_here => {
            Some(RenewedDisk { id: intent.id.clone(), uuid: intent.uuid.clone(), folder: folder.clone() })
        }
        _ => None,
    }
}

/// Gives disks that have a new UUID the settings that they had before, and removes the records of their migrations.
/// Called after the disks were opened.
pub(crate) fn recover_settings(native: &Native, foreign: &Foreign, disks: &[RenewedDisk]) -> Result<()> {
    let intents = Intents::new(Arc::clone(native.engine.directory()));
    for disk in disks {
        if let Some(entry) = foreign.entries().into_iter().find(|entry| entry.folder == disk.folder) {
            native.settings.take_over(&entry.disk.uuid(), &native.settings, &disk.uuid);
        }
        intents.remove(&disk.id)?;
    }
    Ok(())
}

/// Removes the settings of a disk that is in another datastore.
fn forget_settings(native: &Native, uuid: &str) {
    let is_here = native
        .engine
        .with_catalog(|catalog| catalog.disks().any(|disk| !disk.incomplete && names::uuid_text(&disk.uuid) == uuid));
    if !is_here {
        native.settings.forget(uuid);
    }
}

/// The problems of damaged records, for a check.
pub(crate) fn problems(directory: &Arc<dyn Directory>) -> Result<Vec<String>> {
    let (_, damaged) = Intents::new(Arc::clone(directory)).all()?;
    Ok(damaged.iter().map(DamagedIntent::problem).collect())
}

/// Makes the target of a migration the current disk.
fn complete(intent: &Intent, native: &Native, folders: &ImageFolders) -> Result<()> {
    match &intent.target {
        Copy::Native { .. } | Copy::Overlay {} => {
            let original = match &intent.source {
                Some(Copy::Native { object }) => *object,
                _ => None,
            };
            native.complete_replica(&intent.hidden(), &intent.disk, original, recorded_identity(intent)?).map(|_| ())
        }
        Copy::Images { folder } => set_incomplete(folders, folder, false),
    }
}

/// Marks the source of a migration as incomplete.
fn retire(intent: &Intent, native: &Native, folders: &ImageFolders) -> Result<()> {
    match &intent.source {
        Some(Copy::Native { object: Some(id) }) => native.retire(*id, &format!("{}-away", intent.hidden())),
        Some(Copy::Images { folder }) => set_incomplete(folders, folder, true),
        _ => Err(Error::new(ErrorKind::Corrupt, format!("the record of migration {} names no source", intent.id))),
    }
}

fn set_incomplete(folders: &ImageFolders, folder: &str, incomplete: bool) -> Result<()> {
    if folders.local_path().is_none() {
        let text = "the record of a migration names a folder of images, and this datastore cannot have one";
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    folders.set_incomplete(folder, incomplete)
}
