//! Importing existing images: by copying them, by using them where they are, or by using them while they are copied.
//!
//! **Live import**: the images are adopted read-only, with a hidden native disk above them as an overlay. Guests write
//! to the overlay, and the disk is migrated to its target format in the background.
//!
//! 1. The images are never changed.
//! 2. The disk exists once all of its parts are durable. After a crash before that, no part of it remains.
//! 3. The disk's record names its overlay; an overlay that no record names is removed. An overlay is not removed while
//!    its disk is not in the list of disks yet, or not any more ([`Datastore::keep_overlay`]).
//! 4. An interrupted migration is started again when the datastore is served again ([`super::background`]).

use super::intent::OVERLAY;
use super::live_source::{LiveSourceRecord, SourceLayer};
use super::native_layer::NativeLayer;
use super::run::{MigrateOptions, Source, Target};
use super::tree::{Replica, TreeCopy};
use crate::convert::{SourceFormat, is_archive};
use crate::datastore::Datastore;
use crate::foreign::{ForeignDisk, ForeignOriginal};
use crate::images::unread_snapshots;
use crate::info::{DiskInfo, Provisioning};
use crate::names;
use crate::native::Native;
use error::{Error, ErrorKind, Result};
use layer::Layer;
use layer::image::{Image, Place, Signature};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use work::{NoProgress, Progress, Throttled};

/// The layers above the images of a disk, and the one of them that reads the source, if there is a source.
type OverlayLayers = (Vec<Arc<dyn Layer>>, Option<Arc<SourceLayer>>);

/// How an import uses the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportMode {
    /// The content of the images is copied.
    Copy,
    /// The images stay where they are and are only read; writes go to a delta in the datastore.
    InPlace,
    /// The images are read until a background migration has copied them.
    Live,
}

/// Options of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportOptions {
    /// The newest image of the chain.
    pub path: PathBuf,
    /// The format of the image; if `None`, it is detected from the first bytes, or from the name for a raw disk.
    #[serde(default)]
    pub format: Option<SourceFormat>,
    /// How the images are used.
    pub way: ImportMode,
    /// Format of the new disk, if the images are copied.
    pub target: MigrateOptions,
    /// Folders that contain files to which the images may refer, besides the folders of the images.
    pub permitted: Vec<PathBuf>,
    /// Whether to accept a parent that was changed since its child was made.
    pub force_parent: bool,
    /// Whether to replay the journal of a SEsparse image that was not closed cleanly, as far as its records are
    /// provably complete.
    pub replay_journal: bool,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
    /// Whether the path is canonical and was permitted before, so that a link in it is refused.
    #[serde(default)]
    pub resolved: bool,
}

/// The part of a disk's record that describes the overlay above its images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Overlay {
    /// Name of the hidden native disk that is the overlay.
    pub native: String,
    /// Limit of the background work in bytes per second; 0 for none.
    pub rate: u64,
    /// What the background work does.
    pub purpose: Purpose,
}

/// What the background work makes of a disk with an overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The content of the images is in them: the disk is migrated.
    Import(MigrateOptions),
    /// The content is in a source outside the datastore: it is copied into the overlay, which becomes the disk.
    Arrival(LiveSourceRecord),
}

impl Purpose {
    /// Whether the disk becomes a thin native one.
    fn makes_thin_native(&self) -> bool {
        match self {
            Self::Import(target) => target.is_thin_native(),
            Self::Arrival(_) => true,
        }
    }
}

/// An overlay as its text in a record. The two forms have no member in common: a program that does not know the second
/// form must not open the disk, because the disk's image below the source reads as zeros.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum StoredOverlay {
    Import { native: String, target: MigrateOptions, rate: u64 },
    Arrival { arrival: StoredArrival },
}

#[derive(Serialize, Deserialize)]
struct StoredArrival {
    overlay: String,
    source: LiveSourceRecord,
    rate: u64,
}

impl Overlay {
    /// Parses the description in the record of a disk.
    pub fn of(record: &vmdk::Record) -> Result<Option<Self>> {
        let Some(text) = &record.overlay else { return Ok(None) };
        let stored = serde_json::from_str(text).map_err(|error| {
            let text = format!(
                "the record of the native layer above the images of disk '{}' cannot be read: {error}",
                record.name
            );
            Error::new(ErrorKind::Corrupt, text)
        })?;
        Ok(Some(match stored {
            StoredOverlay::Import { native, target, rate } => Self { native, rate, purpose: Purpose::Import(target) },
            StoredOverlay::Arrival { arrival: StoredArrival { overlay: native, source, rate } } => {
                Self { native, rate, purpose: Purpose::Arrival(source) }
            }
        }))
    }

    /// The text for the record of a disk.
    pub fn encode(&self) -> Result<String> {
        let (native, rate) = (self.native.clone(), self.rate);
        let stored = match &self.purpose {
            Purpose::Import(target) => StoredOverlay::Import { native, target: target.clone(), rate },
            Purpose::Arrival(source) => {
                StoredOverlay::Arrival { arrival: StoredArrival { overlay: native, source: source.clone(), rate } }
            }
        };
        serde_json::to_string(&stored)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("the record cannot be written: {error}")))
    }

    /// The layers above the images, newest first: the overlay, and the source of its content if there is one, which is
    /// also returned by itself.
    pub fn layers(&self, native: &Arc<Native>) -> Result<OverlayLayers> {
        let mut layers: Vec<Arc<dyn Layer>> = vec![Arc::new(NativeLayer::new(native.hidden_device(&self.native)?))];
        let source = self.source().map(|source| Arc::new(SourceLayer::new(source.clone())));
        layers.extend(source.iter().map(|source| Arc::clone(source) as Arc<dyn Layer>));
        Ok((layers, source))
    }

    /// Reports to the source, if there is one, that the disk does not need it any more.
    ///
    /// # Errors
    /// `Unsupported` if this process does not know the kind of source.
    pub fn release(&self, disk: &str) -> Result<()> {
        self.source().map_or(Ok(()), |source| source.release(disk))
    }

    /// The source of the content outside the datastore, if there is one.
    pub fn source(&self) -> Option<&LiveSourceRecord> {
        match &self.purpose {
            Purpose::Import(_) => None,
            Purpose::Arrival(source) => Some(source),
        }
    }
}

impl Datastore {
    /// Creates a disk from existing images.
    pub fn import(&self, name: &str, options: &ImportOptions, progress: &dyn Progress) -> Result<DiskInfo> {
        let _name = self.reserve(name)?;
        let how = match options.way {
            ImportMode::Copy | ImportMode::Live => vmdk::Adopt::ReadOnly,
            ImportMode::InPlace => vmdk::Adopt::Head { writable: false },
        };
        let opening = vmdk::Options {
            permitted: options.permitted.clone(),
            force_parent: options.force_parent,
            replay_journal: options.replay_journal,
            adopted: options.format.and_then(SourceFormat::of_image),
            ..self.foreign.options().clone()
        };
        let place = match options.resolved {
            true => Place::resolved(&options.path, &options.permitted)?,
            false => Place::local(&options.path, &options.permitted)?,
        };
        if is_archive(&place, options.format)? {
            let text = format!(
                "'{}' is an archive of a virtual machine: `lamina convert ARCHIVE disk:{name} --format native` makes a \
                 disk from a disk in it",
                place.label()
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let adopted = self.foreign.adopt(name, &place, how, &opening)?;
        // The images are open now, so a format that was not given is the one that the first bytes show.
        if options.format.is_none_or(|format| format == SourceFormat::Qcow2)
            && let Ok(Signature::Qcow2) = Image::probe(&place)
            && let Ok(Some(text)) = unread_snapshots(&place)
        {
            tracing::warn!(disk = name, "{text}");
        }
        let done = match options.way {
            ImportMode::Copy => {
                let progress = Throttled { progress, rate: options.rate };
                let copied = self.copy_in(name, &adopted, &options.target, &progress);
                let (folder, disk) = (adopted.entry.folder.clone(), Arc::clone(&adopted.entry.disk));
                drop(adopted);
                let removed = self.foreign.remove_moved(&folder, disk);
                return copied.and(removed).and_then(|()| {
                    self.give_defaults(name);
                    self.disk(name)
                });
            }
            ImportMode::InPlace => self.foreign.complete(&adopted.entry.folder).map(|()| {
                self.foreign.insert(adopted.entry.folder.clone(), Arc::clone(&adopted.entry.disk));
            }),
            ImportMode::Live => self.put_above(&adopted, options),
        };
        let (folder, disk) = (adopted.entry.folder.clone(), Arc::clone(&adopted.entry.disk));
        drop(adopted);
        match done {
            Ok(()) if options.way == ImportMode::InPlace => self.disk(name),
            Ok(()) => self.open_with_overlay(name, &folder, disk),
            Err(error) => Err(self.undo_overlay(name, &folder, disk, error)),
        }
    }

    /// Copies a chain and its snapshots into a new disk named `name`.
    fn copy_in(
        &self,
        name: &str,
        from: &ForeignOriginal,
        options: &MigrateOptions,
        progress: &dyn Progress,
    ) -> Result<()> {
        let hidden = format!(".migrating-{}", names::uuid_text(&names::new_uuid()?));
        let head = from.entry.head_device()?;
        let target = self.make_target(name, &hidden, crate::Device::capacity(&*head), options, progress)?;
        let copied = (|| {
            let mut tree = TreeCopy::new(from, target.replica())?;
            tree.snapshots(progress)?;
            let mirror = tree.head(head)?;
            tree.mark_head(&mirror, progress)?;
            mirror.copy(progress)?;
            mirror.settle()
        })();
        let identity = Source::Foreign(ForeignOriginal { entry: Arc::clone(&from.entry) }).disk_identity();
        let done = copied.and_then(|()| match &target {
            Target::Native(_) => self.native.complete_replica(&hidden, name, None, identity?).map(|_| ()),
            Target::Foreign(disk) => self.foreign.complete(&disk.folder),
        });
        match done {
            Ok(()) => {
                if let Target::Foreign(disk) = &target {
                    self.foreign.insert_replica(disk);
                }
                Ok(())
            }
            Err(error) => {
                if let Err(second) = self.remove_target(&target) {
                    tracing::warn!(
                        "the unfinished disk '{name}' stays until the next opening of the datastore: {second}"
                    );
                }
                Err(error.context(format!("disk '{name}' was not made")))
            }
        }
    }

    /// Creates the hidden overlay above adopted images, and records it in the record of their disk.
    pub(super) fn put_above(&self, adopted: &ForeignOriginal, options: &ImportOptions) -> Result<()> {
        let purpose = Purpose::Import(options.target.clone());
        self.put_overlay(&adopted.entry.folder, &adopted.entry.disk, options.rate, purpose)
    }

    /// Creates the hidden overlay of a disk that is not in the list of disks yet, records it in the disk's record, and
    /// completes the disk's folder.
    pub(super) fn put_overlay(&self, folder: &str, disk: &Arc<vmdk::Disk>, rate: u64, purpose: Purpose) -> Result<()> {
        let native = format!("{OVERLAY}{}", names::uuid_text(&names::new_uuid()?));
        let text = Overlay { native: native.clone(), rate, purpose }.encode()?;
        let capacity = disk.chain()?.capacity();
        self.imports.kept.lock().insert(native.clone());
        let made = (|| {
            let replica = self.native.replica(&native, capacity, Provisioning::Thin, &NoProgress)?;
            self.native.engine.complete_disk(replica.id)?;
            replica.head()?.flush()?;
            disk.set_overlay(Some(text))?;
            self.foreign.complete(folder)
        })();
        made.inspect_err(|_| _ = self.imports.kept.lock().remove(&native))
    }

    /// Removes a disk that was to get an overlay. Returns the error for the caller of the operation.
    pub(super) fn undo_overlay(&self, name: &str, folder: &str, disk: Arc<vmdk::Disk>, error: Error) -> Error {
        if let Err(second) = self.foreign.remove_moved(folder, disk).and_then(|()| self.sweep_overlays()) {
            tracing::warn!("the unfinished disk '{name}' stays until the next opening of the datastore: {second}");
        }
        error.context(format!("disk '{name}' was not made"))
    }

    /// Opens a new disk again together with its overlay, and adds it to the list of disks.
    pub(super) fn open_with_overlay(&self, name: &str, folder: &str, disk: Arc<vmdk::Disk>) -> Result<DiskInfo> {
        disk.close()?;
        drop(disk);
        self.foreign.open_folder(folder)?;
        if let Some(entry) = self.foreign.find(name) {
            self.release_overlay(&entry);
            // What the background work makes of the disk keeps the settings.
            if Overlay::of(&entry.disk.record())?.is_some_and(|overlay| overlay.purpose.makes_thin_native()) {
                self.give_defaults_to(&entry.disk.uuid(), name);
            }
        }
        self.disk(name)
    }

    /// Keeps the overlay of a disk, if it has one, until [`Datastore::release_overlay`]. Called before the disk is
    /// removed from the list of disks while requests may use it.
    pub(super) fn keep_overlay(&self, entry: &ForeignDisk) {
        self.imports.kept.lock().extend(self.overlay_of(entry));
    }

    /// Called when the disk is in the list of disks, or when no request uses it any more.
    pub(super) fn release_overlay(&self, entry: &ForeignDisk) {
        if let Some(overlay) = self.overlay_of(entry) {
            self.imports.kept.lock().remove(&overlay);
        }
    }

    /// The disk with that name, which the caller uses exclusively, if it has this overlay.
    ///
    /// # Errors
    /// `Busy` if it has not. Until the disk was used exclusively, it could be renamed, and another disk could get its
    /// name. That disk must neither be moved nor get the content of this overlay. The next attempt finds the new name.
    pub(super) fn disk_with_overlay(&self, name: &str, overlay: &Overlay) -> Result<Arc<ForeignDisk>> {
        let entry = self.foreign.find(name).filter(|entry| self.overlay_of(entry).as_ref() == Some(&overlay.native));
        let renamed = || Error::new(ErrorKind::Busy, format!("disk '{name}' was renamed or deleted: try again"));
        entry.ok_or_else(renamed)
    }

    /// The hidden native disk above the images of a disk, if it has one.
    pub(crate) fn overlay_of(&self, entry: &ForeignDisk) -> Option<String> {
        Overlay::of(&entry.disk.record()).ok().flatten().map(|overlay| overlay.native)
    }

    /// Removes hidden disks that no record names.
    pub(crate) fn sweep_overlays(&self) -> Result<()> {
        if !self.foreign.broken().is_empty() {
            // A record that cannot be read may name an overlay, so no overlay is removed.
            return Ok(());
        }
        // Locked to the end, so that no overlay changes between this set and the list of disks meanwhile.
        let kept = self.imports.kept.lock();
        let mut named: BTreeSet<String> = kept.clone();
        for entry in self.foreign.entries() {
            named.extend(Overlay::of(&entry.disk.record())?.map(|overlay| overlay.native));
        }
        for hidden in self.native.hidden(OVERLAY) {
            if !named.contains(&hidden) {
                self.native.remove_hidden(&hidden)?;
            }
        }
        Ok(())
    }
}
