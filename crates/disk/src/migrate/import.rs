//! Importing existing images: by copying them, by using them where they are, or by using them while they are copied.
//!
//! **Live import**: the images are adopted read-only, with a hidden native disk above them as an overlay. Guests write
//! to the overlay, and the disk is migrated to its target format in the background.
//!
//! 1. The images are never changed.
//! 2. The disk exists once all of its parts are durable. After a crash before that, no part of it remains.
//! 3. The disk's record names its overlay; an overlay that no record names is removed. An overlay is not removed while
//!    its disk is not in the list of disks yet, or not any more ([`Datastore::keep_overlay`]).
//! 4. An interrupted migration is started again when the datastore is served again.

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
use error::{Error, ErrorKind, IoContext, Result};
use layer::Layer;
use layer::image::{Image, Place, Signature};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use work::{NoProgress, Progress, Throttled};

/// Name prefix of the hidden overlays above images.
pub(crate) const OVERLAY: &str = ".overlay-";
/// How long a failed background migration waits before the next attempt, and the interval at which it checks during
/// this time whether to stop.
const RETRY: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(100);

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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Overlay {
    /// Name of the hidden native disk that is the overlay.
    pub native: String,
    target: MigrateOptions,
    rate: u64,
}

impl Overlay {
    /// Parses the description in the record of a disk.
    pub fn of(record: &vmdk::Record) -> Result<Option<Self>> {
        let Some(text) = &record.overlay else { return Ok(None) };
        serde_json::from_str(text).map(Some).map_err(|error| {
            let text = format!(
                "the record of the native layer above the images of disk '{}' cannot be read: {error}",
                record.name
            );
            Error::new(ErrorKind::Corrupt, text)
        })
    }

    /// The overlay as a layer of a chain.
    pub fn layer(&self, native: &Arc<Native>) -> Result<Arc<dyn Layer>> {
        Ok(Arc::new(NativeLayer::new(native.hidden_device(&self.native)?)))
    }
}

/// Live imports: migrations that run in the background.
#[derive(Default)]
pub(crate) struct Imports {
    /// Whether the datastore is being closed, so that no further migration begins.
    closed: AtomicBool,
    running: parking_lot::Mutex<Vec<Import>>,
    /// Overlays that are in use although their disks may not be in the list of disks.
    pub(super) kept: parking_lot::Mutex<BTreeSet<String>>,
}

/// The migration of one disk.
struct Import {
    /// UUID of the disk. It identifies the disk: while the migration waits for its next attempt, the disk may be
    /// renamed, and another disk may get the old name.
    uuid: String,
    shared: Background,
    thread: JoinHandle<()>,
}

/// What a background migration shares with the operations that end it. Its progress ignores reports.
#[derive(Clone, Default)]
pub(super) struct Background {
    /// Set when the disk is deleted or the datastore is closed.
    stop: Arc<AtomicBool>,
    /// The name of the disk during an attempt, which uses the disk exclusively.
    moving: Arc<parking_lot::Mutex<Option<String>>>,
}

impl Progress for Background {
    fn update(&self, _done: u64, _total: u64) {}

    fn cancelled(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
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
            Ok(()) => {
                // The disk is closed here, and then opened again together with its overlay.
                disk.close()?;
                drop(disk);
                self.foreign.open_folder(&folder)?;
                if let Some(entry) = self.foreign.find(name) {
                    self.release_overlay(&entry);
                    // The migration gives the settings to the copy.
                    if options.target.is_thin_native() {
                        self.give_defaults_to(&entry.disk.uuid(), name);
                    }
                }
                self.disk(name)
            }
            Err(error) => {
                if let Err(second) = self.foreign.remove_moved(&folder, disk).and_then(|()| self.sweep_overlays()) {
                    tracing::warn!(
                        "the unfinished disk '{name}' stays until the next opening of the datastore: {second}"
                    );
                }
                Err(error.context(format!("disk '{name}' was not made")))
            }
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
        let disk = &adopted.entry.disk;
        let native = format!("{OVERLAY}{}", names::uuid_text(&names::new_uuid()?));
        let overlay = Overlay { native: native.clone(), target: options.target.clone(), rate: options.rate };
        let text = serde_json::to_string(&overlay)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("the record cannot be written: {error}")))?;
        let capacity = disk.chain()?.capacity();
        self.imports.kept.lock().insert(native.clone());
        let made = (|| {
            let replica = self.native.replica(&native, capacity, Provisioning::Thin, &NoProgress)?;
            self.native.engine.complete_disk(replica.id)?;
            replica.head()?.flush()?;
            disk.set_overlay(Some(text))?;
            self.foreign.complete(&adopted.entry.folder)
        })();
        made.inspect_err(|_| _ = self.imports.kept.lock().remove(&native))
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

    /// Starts the background migration of every disk that is still read from its images. It runs until the datastore is
    /// closed. The process that serves the datastore calls this.
    pub fn start_imports(&self) {
        let mut running = self.imports.running.lock();
        running.retain(|import| !import.thread.is_finished());
        for entry in self.foreign.entries() {
            let (name, uuid) = (entry.disk.name(), entry.disk.uuid());
            let overlay = match Overlay::of(&entry.disk.record()) {
                Ok(Some(overlay)) => overlay,
                Ok(None) => continue,
                Err(error) => {
                    tracing::error!("{error}");
                    continue;
                }
            };
            let known = running.iter().any(|import| import.uuid == uuid);
            if known || self.imports.closed.load(Ordering::SeqCst) {
                continue;
            }
            let Some(datastore) = self.this.upgrade() else { return };
            let (moving, shared) = (uuid.clone(), Background::default());
            let background = shared.clone();
            let thread = std::thread::Builder::new().name(format!("import {name}"));
            let begun = thread
                .spawn(move || datastore.move_in(&moving, &overlay, &background))
                .during(|| format!("starting to move disk '{name}'"));
            match begun {
                Ok(thread) => running.push(Import { uuid, shared, thread }),
                Err(error) => tracing::error!("{error}"),
            }
        }
    }

    /// Whether the background migration of a live import is running for a disk.
    pub fn has_import_running(&self, disk: &str) -> bool {
        let uuid = self.uuid_of(disk).ok();
        let running = self.imports.running.lock();
        running.iter().any(|import| import.is_of(disk, uuid.as_deref()) && !import.thread.is_finished())
    }

    /// Ends the background migration of a disk that is about to be deleted; false if no migration is running.
    pub(crate) fn end_import(&self, disk: &str) -> bool {
        let uuid = self.uuid_of(disk).ok();
        let mut running = self.imports.running.lock();
        let Some(at) = running.iter().position(|import| import.is_of(disk, uuid.as_deref())) else { return false };
        let import = running.remove(at);
        drop(running);
        import.end();
        true
    }

    fn move_in(&self, uuid: &str, overlay: &Overlay, background: &Background) {
        while let Some(moved) = self.move_in_once(uuid, overlay, background) {
            match moved {
                Ok(info) => {
                    tracing::info!(disk = info.name, "the disk is in the datastore and no longer needs its images");
                    return;
                }
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::NotFound) => return,
                Err(error) => tracing::warn!("moving a disk into the datastore failed and is tried again: {error}"),
            }
            let begun = Instant::now();
            while begun.elapsed() < RETRY {
                if background.cancelled() {
                    return;
                }
                std::thread::sleep(LOOK);
            }
        }
    }

    /// One attempt to migrate the disk of a live import. `None` if the disk was deleted or no longer needs its images.
    pub(super) fn move_in_once(
        &self,
        uuid: &str,
        overlay: &Overlay,
        background: &Background,
    ) -> Option<Result<DiskInfo>> {
        let entry = self.foreign.entries().into_iter().find(|entry| entry.disk.uuid() == uuid)?;
        self.overlay_of(&entry)?;
        let name = entry.disk.name();
        drop(entry);
        *background.moving.lock() = Some(name.clone());
        // Only an attempt has a share of the background rate, not the wait for the next attempt.
        let paced = self.background(background);
        let moved = self.migrate(&name, &overlay.target, &Throttled { progress: &paced, rate: overlay.rate });
        *background.moving.lock() = None;
        Some(moved)
    }

    /// Stops the background migrations.
    pub(crate) fn stop_imports(&self) {
        self.imports.closed.store(true, Ordering::SeqCst);
        let running = std::mem::take(&mut *self.imports.running.lock());
        // The flag is set for all migrations before the end of the first one is awaited, so that they end concurrently.
        running.iter().for_each(|import| import.shared.stop.store(true, Ordering::SeqCst));
        running.into_iter().for_each(Import::end);
    }
}

impl Import {
    /// Whether this is the migration of the disk with that name and UUID. At the end of an attempt, the disk may have
    /// a new UUID.
    fn is_of(&self, disk: &str, uuid: Option<&str>) -> bool {
        uuid == Some(self.uuid.as_str()) || self.shared.moving.lock().as_deref() == Some(disk)
    }

    fn end(self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        let is_own = self.thread.thread().id() == std::thread::current().id();
        if !is_own && self.thread.join().is_err() {
            tracing::error!(uuid = self.uuid, "the thread that moved the disk into the datastore has panicked");
        }
    }
}
