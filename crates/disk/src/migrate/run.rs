//! One migration, from start to the removal of the source.
//!
//! ```text
//!   create the hidden target ── record: copying ── copy the snapshots ── exchange the clients' device for the mirror
//!     ── copy the head ── settle ── record: committed ── clients on the target ── rename the target
//!     ── wait for requests in the mirror ── remove the source ── remove the record
//! ```
//!
//! 1. Until `committed` is durable, a failure or a cancellation switches the clients back to the source and removes the
//!    target. Afterwards no step is undone; a step that fails is completed when the datastore is opened next. If the
//!    target does not get the name, the record stays, because without it the next opening would remove the target.
//! 2. The migration has exclusive use of the disk: operations that change its snapshots or its size are refused.
//!    Clients may connect and disconnect.
//! 3. While the name is moved to the other copy, no client can open a disk by its name (`rename_lock`). Requests of
//!    clients that have the disk open continue.

use super::import::Overlay;
use super::intent::{Copy, Intent, Intents, Stage};
use super::mirror::MirrorDevice;
use super::mirror::stopped;
use super::tree::{Original, Replica, TreeCopy};
use crate::datastore::Datastore;
use crate::device::Device;
use crate::foreign::{ForeignDisk, ForeignOriginal, ForeignReplica};
use crate::info::{DeltaFormat, DiskFormat, DiskInfo, Provisioning};
use crate::location::Location;
use crate::names;
use crate::native::{NativeOriginal, NativeReplica};
use crate::switch::{Before, Client, Switch};
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use store::engine::DiskIdentity;
use work::Progress;

/// The form to which a disk is migrated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrateOptions {
    /// The disk's new format.
    pub format: DiskFormat,
    /// The disk's new provisioning type.
    pub provisioning: Provisioning,
    /// The format of the disk's snapshots, if they are VMware images; `None` for the default format.
    pub delta: Option<DeltaFormat>,
}

impl MigrateOptions {
    /// Whether the disk becomes a thin native one.
    pub(crate) fn is_thin_native(&self) -> bool {
        self.format == DiskFormat::Native && self.provisioning == Provisioning::Thin
    }
}

/// The other datastore of a migration, open in this process.
#[derive(Clone)]
pub(crate) struct Peer {
    pub datastore: Arc<Datastore>,
    pub location: Location,
    /// Location of the source's datastore, which is written to the record in the other datastore.
    pub home: Location,
}

/// The disk that is migrated.
pub(super) enum Source {
    Native(NativeOriginal),
    Foreign(ForeignOriginal),
}

/// The copy that becomes the current disk.
pub(super) enum Target {
    Native(NativeReplica),
    Foreign(ForeignReplica),
}

impl Source {
    pub fn original(&self) -> &dyn Original {
        match self {
            Self::Native(disk) => disk,
            Self::Foreign(disk) => disk,
        }
    }

    pub fn copy(&self) -> Copy {
        match self {
            Self::Native(disk) => Copy::Native { object: Some(disk.id) },
            Self::Foreign(disk) => Copy::Images { folder: disk.entry.folder.clone() },
        }
    }

    fn head(&self) -> Result<Arc<dyn Device>> {
        match self {
            Self::Native(disk) => disk.head(),
            Self::Foreign(disk) => Ok(disk.entry.head_device()?),
        }
    }

    pub fn disk_identity(&self) -> Result<DiskIdentity> {
        match self {
            Self::Native(disk) => disk.disk_identity(),
            Self::Foreign(disk) => {
                let record = disk.entry.disk.record();
                let uuid = names::parse_uuid(&record.uuid).map_or_else(names::new_uuid, Ok)?;
                Ok(DiskIdentity { uuid, created: record.created })
            }
        }
    }
}

impl Target {
    pub fn replica(&self) -> &dyn Replica {
        match self {
            Self::Native(disk) => disk,
            Self::Foreign(disk) => disk,
        }
    }

    fn copy(&self) -> Copy {
        match self {
            Self::Native(_) => Copy::Native { object: None },
            Self::Foreign(disk) => Copy::Images { folder: disk.folder.clone() },
        }
    }
}

/// Outcome of committing the migration's record.
pub(super) enum Turned {
    Committed,
    /// The record is committed, but the target did not get the name of the disk. Clients that have the disk open use
    /// the target.
    Unnamed(Error),
    /// It is unknown whether the record is committed. Both copies are kept equal until the datastore is opened again
    /// and the record is read.
    Unknown(Error),
}

/// The switch of the migrated disk's clients, and the mirror behind it.
struct Moving {
    switch: Arc<Switch>,
    mirror: Arc<MirrorDevice>,
}

/// A migration.
pub(super) struct Migration<'a> {
    pub home: &'a Datastore,
    pub away: Option<&'a Peer>,
    pub name: &'a str,
    pub source: Source,
    pub target: Target,
    pub intent: Intent,
    pub progress: &'a dyn Progress,
}

impl Datastore {
    /// Migrates a disk with its snapshots and its clients to another format or provisioning type.
    pub fn migrate(&self, name: &str, options: &MigrateOptions, progress: &dyn Progress) -> Result<DiskInfo> {
        self.migrate_to(name, options, None, progress)
    }

    /// As [`Datastore::migrate`], for a live import, whose disk has this overlay.
    ///
    /// # Errors
    /// `Busy` if the disk with the name is another one.
    pub(super) fn migrate_import(
        &self,
        name: &str,
        overlay: &Overlay,
        options: &MigrateOptions,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        let find = || self.disk_with_overlay(name, overlay).and_then(|entry| self.original(Some(entry), name));
        self.migrate_source(name, find, options, None, progress)
    }

    /// As [`Datastore::migrate`], to another datastore if `away` is set.
    pub(crate) fn migrate_to(
        &self,
        name: &str,
        options: &MigrateOptions,
        away: Option<&Peer>,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        self.migrate_source(name, || self.original(self.foreign.find(name), name), options, away, progress)
    }

    /// The disk in one of VMware's formats, or else the native disk with that name, as the source of a migration.
    fn original(&self, entry: Option<Arc<ForeignDisk>>, name: &str) -> Result<Source> {
        Ok(match entry {
            Some(entry) => Source::Foreign(self.foreign.original(entry)?),
            None => Source::Native(self.native.original(name)?),
        })
    }

    /// Migrates the disk that `find` returns once the name is used exclusively.
    fn migrate_source(
        &self,
        name: &str,
        find: impl FnOnce() -> Result<Source>,
        options: &MigrateOptions,
        away: Option<&Peer>,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        self.end_whole_groups()?;
        let alone = self.uses.alone(name, "migrated")?;
        let _name = away.map(|peer| peer.datastore.reserve(name)).transpose()?;
        let source = find()?;
        let client = self.switches.attach(source.original().identity(None)?, || source.head())?.of_operation();
        let id = names::uuid_text(&names::new_uuid()?);
        let there = away.map_or(self, |peer| &*peer.datastore);
        let identity = source.disk_identity();
        let (uuid, created) = identity.map(|disk| (names::uuid_text(&disk.uuid), disk.created)).unwrap_or_default();
        let target = there
            .make_target(name, &format!(".migrating-{id}"), client.switch().device().capacity(), options, progress)
            .map_err(|error| error.context(format!("disk '{name}' was not moved")))?;
        let intent = Intent {
            id,
            stage: Stage::Copying,
            disk: name.to_owned(),
            source: Some(source.copy()),
            target: target.copy(),
            uuid: uuid.clone(),
            created,
            peer: away.map(|peer| peer.location.clone()),
        };
        let mut migration = Migration { home: self, away, name, source, target, intent, progress };
        match migration.run(&client) {
            Ok(Turned::Committed) => {
                drop(client);
                migration.clean();
                if away.is_some() {
                    self.native.settings.forget(&uuid);
                }
                there.disk(name)
            }
            // The name may still belong to the source, which must not be opened any more.
            Ok(Turned::Unnamed(error)) => Err(self.shut_unnamed(name, &error)),
            // It is unknown which copy is the current disk. The disk must not be changed until the record has been read
            // again, so its exclusive use is kept.
            Ok(Turned::Unknown(error)) => {
                alone.keep();
                std::mem::forget(client);
                Err(error)
            }
            Err(error) => {
                drop(client);
                migration.undo();
                Err(error.context(format!("disk '{name}' was not moved")))
            }
        }
    }

    /// Shuts a disk whose migration is committed, and whose target did not get the name.
    pub(super) fn shut_unnamed(&self, name: &str, error: &Error) -> Error {
        let why = format!(
            "it was moved, but its new copy did not get its name ({error}); the next opening of the datastore completes \
             the migration"
        );
        self.uses.shut(name, why.clone());
        Error::new(ErrorKind::Stopped, format!("disk '{name}' is not opened: {why}"))
    }

    /// Creates an empty hidden disk.
    pub(super) fn make_target(
        &self,
        name: &str,
        hidden: &str,
        capacity: u64,
        options: &MigrateOptions,
        progress: &dyn Progress,
    ) -> Result<Target> {
        Ok(match options.format.kind(options.provisioning) {
            None => Target::Native(self.native.replica(hidden, capacity, options.provisioning, progress)?),
            Some(kind) => {
                let new = vmdk::NewDisk::new(name, capacity, kind, options.delta);
                Target::Foreign(self.foreign.replica(&new, progress)?)
            }
        })
    }

    /// Removes an unfinished target.
    pub(super) fn remove_target(&self, target: &Target) -> Result<()> {
        match target {
            Target::Native(disk) => disk.remove(),
            Target::Foreign(disk) => self.foreign.remove_moved(&disk.folder, Arc::clone(&disk.disk)),
        }
    }
}

impl Migration<'_> {
    fn there(&self) -> &Datastore {
        self.away.map_or(self.home, |peer| &*peer.datastore)
    }

    /// Copies the disk until clients use the target.
    fn run(&mut self, client: &Client) -> Result<Turned> {
        self.announce()?;
        let mut tree = TreeCopy::new(self.source.original(), self.target.replica())?;
        let sizes_differ = tree.nodes().iter().any(|node| node.capacity != client.switch().device().capacity());
        if sizes_differ && matches!(self.target, Target::Foreign(_)) {
            self.target.replica().resize(client.switch().device().capacity())?;
        }
        tree.snapshots(self.progress)?;
        let switch = Arc::clone(client.switch());
        let before = switch.device();
        let moving = Moving { mirror: Arc::new(tree.head(Arc::clone(&before))?), switch };
        match self.move_head(&moving, &tree) {
            Ok(Turned::Committed) => {
                let names: Vec<String> = tree.nodes().iter().map(|node| node.name.clone()).collect();
                drop(tree);
                let Moving { switch, mirror } = moving;
                let target = Arc::clone(mirror.target());
                drop(mirror);
                Ok(match self.take_place(&switch, target, &names) {
                    Ok(()) => Turned::Committed,
                    Err(error) => Turned::Unnamed(error),
                })
            }
            Ok(turned) => Ok(turned),
            Err(error) => {
                let mirror = moving.switch.exchange(before);
                moving.mirror.give_up();
                mirror.wait_unused(&|| false);
                Err(error)
            }
        }
    }

    /// Writes the records that name the target, before its content is copied.
    fn announce(&self) -> Result<()> {
        if let Some(peer) = self.away {
            // The settings are stored first, so that the disk never has other settings there.
            peer.datastore.native.settings.adopt(&self.intent.uuid, &self.home.native.settings)?;
            let arriving =
                Intent { stage: Stage::Arriving, source: None, peer: Some(peer.home.clone()), ..self.intent.clone() };
            Intents::new(Arc::clone(peer.datastore.engine().directory())).put(&arriving)?;
        }
        self.intents().put(&self.intent)
    }

    pub fn intents(&self) -> Intents {
        Intents::new(Arc::clone(self.home.engine().directory()))
    }

    /// Copies the head while clients use it, and commits the migration's record.
    fn move_head(&self, moving: &Moving, tree: &TreeCopy<'_>) -> Result<Turned> {
        let mirror = &moving.mirror;
        let before = moving.switch.exchange(Arc::clone(mirror) as Arc<dyn Device>);
        // A write that began directly on the source is not mirrored, so the copy begins when no such write is in
        // progress.
        if !before.wait_unused(&|| self.progress.cancelled()) {
            return Err(stopped());
        }
        tree.mark_head(mirror, self.progress)?;
        mirror.copy(self.progress)?;
        mirror.settle()?;
        mirror.commit(|| {
            let intents = self.intents();
            let Err(error) = intents.put(&Intent { stage: Stage::Committed, ..self.intent.clone() }) else {
                return Ok(Turned::Committed);
            };
            if error.kind() == ErrorKind::NoSpace {
                // Only the steps before the replacement of the earlier record need space.
                return Err(error);
            }
            match intents.put(&self.intent) {
                Ok(()) => Err(error),
                Err(second) => Ok(Turned::Unknown(Error::new(
                    ErrorKind::Stopped,
                    format!(
                        "{error}, and then {second}: both copies of disk '{}' get the same writes until the datastore \
                         is opened again; the opening keeps one of them",
                        self.name
                    ),
                ))),
            }
        })
    }

    /// Makes the target the current disk: switches clients to `device`, which is the target for clients, and readers of
    /// snapshots to the target's snapshots, and gives the target the name.
    ///
    /// # Errors
    /// If the target did not get the name.
    pub fn take_place(&self, switch: &Switch, device: Arc<dyn Device>, snapshots: &[String]) -> Result<()> {
        let mut left: Vec<Before> = Vec::new();
        let named = {
            let _rename = self.home.rename_lock.write();
            let _peer_rename = self.away.map(|peer| peer.datastore.rename_lock.write());
            left.push(switch.exchange(device));
            if let Err(error) = self.hand_over(snapshots, &mut left) {
                tracing::error!(
                    disk = self.name,
                    "clients that read snapshots of the disk continue to read the old copy: {error}"
                );
            }
            let named = self.turn_name();
            if named.is_ok() {
                self.turn_settings();
            }
            named
        };
        for before in left {
            before.wait_unused(&|| false);
        }
        named
    }

    /// Assigns the switches of the disk and its snapshots to the target.
    fn hand_over(&self, snapshots: &[String], left: &mut Vec<Before>) -> Result<()> {
        let (from, to) = (&self.home.switches, &self.there().switches);
        let (original, replica) = (self.source.original(), self.target.replica());
        from.hand_over(&original.identity(None)?, to, replica.identity(None)?);
        for name in snapshots {
            let old = original.identity(Some(name))?;
            if let Some(open) = from.get(&old) {
                left.push(open.exchange(replica.snapshot(name)?));
                from.hand_over(&old, to, replica.identity(Some(name))?);
            }
        }
        Ok(())
    }

    /// Gives the settings of the disk and the clients that have it open to the UUID of the target.
    fn turn_settings(&self) {
        let there = self.there();
        match there.uuid_of(self.name) {
            Ok(uuid) => there.native.settings.take_over(&uuid, &self.home.native.settings, &self.intent.uuid),
            Err(error) => {
                tracing::error!(disk = self.name, %error, "changes of the disk's settings do not reach its clients");
            }
        }
    }

    /// Gives the name to the target. After an error the source may still have the name.
    fn turn_name(&self) -> Result<()> {
        let here = self.away.is_none();
        let aside = format!("{}-away", self.intent.hidden());
        let native = match &self.source {
            Source::Native(disk) => Some(disk.id),
            Source::Foreign(_) => None,
        };
        match &self.target {
            Target::Native(_) => {
                let identity = recorded_identity(&self.intent)?;
                let here = native.filter(|_| here);
                self.there().native.complete_replica(&self.intent.hidden(), self.name, here, identity)?;
            }
            Target::Foreign(disk) => self.there().foreign.complete(&disk.folder)?,
        }
        if let Source::Foreign(disk) = &self.source {
            self.home.keep_overlay(&disk.entry);
            self.home.foreign.forget(self.name);
        }
        if let Target::Foreign(disk) = &self.target {
            self.there().foreign.insert_replica(disk);
        }
        if let Some(id) = native
            && let Err(error) = self.home.native.retire(id, &aside)
        {
            // The source is removed next, which needs less space than a change of its name.
            tracing::error!(disk = self.name, "the old copy of the disk keeps its name until it is removed: {error}");
        }
        Ok(())
    }

    /// Removes the source and the records.
    pub fn clean(self) {
        let away = self.away;
        let outcome = (|| {
            if let Some(peer) = away {
                Intents::new(Arc::clone(peer.datastore.engine().directory())).remove(&self.intent.id)?;
            }
            match &self.source {
                Source::Native(disk) => self.home.native.remove_moved(disk.id)?,
                Source::Foreign(disk) => {
                    let (folder, inner) = (disk.entry.folder.clone(), Arc::clone(&disk.entry.disk));
                    self.home.foreign.remove_moved(&folder, inner)?;
                    self.home.release_overlay(&disk.entry);
                    self.home.sweep_overlays()?;
                }
            }
            self.intents().remove(&self.intent.id)
        })();
        if let Err(error) = outcome {
            tracing::warn!(
                disk = self.name,
                "the old copy of the disk could not be removed; the next opening of the datastore removes it: {error}"
            );
        }
    }

    /// Removes the target and the records.
    fn undo(self) {
        let outcome = (|| {
            self.there().remove_target(&self.target)?;
            if let Some(peer) = self.away {
                Intents::new(Arc::clone(peer.datastore.engine().directory())).remove(&self.intent.id)?;
                peer.datastore.native.settings.forget(&self.intent.uuid);
            }
            self.intents().remove(&self.intent.id)
        })();
        if let Err(error) = outcome {
            tracing::warn!(
                disk = self.name,
                "the unfinished copy of the disk was not removed; the next opening of the datastore removes it: {error}"
            );
        }
    }
}

/// The disk's identity according to the record.
pub(super) fn recorded_identity(intent: &Intent) -> Result<DiskIdentity> {
    let uuid = names::parse_uuid(&intent.uuid).map_or_else(names::new_uuid, Ok)?;
    Ok(DiskIdentity { uuid, created: intent.created })
}
