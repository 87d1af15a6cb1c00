//! Importing existing images: copied, used where they are, or used while they are copied.
//!
//! **Live**: the images are adopted for reading, with a hidden native disk as the layer above them. Guests write to
//! that, and the disk migrates to its target as any disk does, in the background.
//!
//! 1. The images are never changed.
//! 2. The disk exists when everything it consists of is durable; a crash before that leaves nothing.
//! 3. The disk's record names the layer above the images; a layer that no record names is removed.
//! 4. An interrupted migration begins again when the datastore is served again.

use super::native_layer::NativeLayer;
use super::run::{MigrateOptions, Source, Target};
use super::tree::{Replica, TreeCopy};
use crate::convert::{SourceFormat, is_archive};
use crate::datastore::Datastore;
use crate::foreign::ForeignOriginal;
use crate::info::{DiskInfo, Provisioning};
use crate::names;
use crate::native::Native;
use error::{Error, ErrorKind, IoContext, Result};
use layer::Layer;
use layer::image::Place;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use work::{NoProgress, Progress, Throttled};

/// Names of the hidden disks above images.
pub(crate) const OVERLAY: &str = ".overlay-";
/// How long a failed background migration waits before it begins again, and how often it checks whether to stop.
const RETRY: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(100);

/// How images are imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportMode {
    /// They are copied.
    Copy,
    /// They stay in place and are read; writes go to a delta in the datastore.
    InPlace,
    /// They are read until they have been copied in the background.
    Live,
}

/// Options of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportOptions {
    /// The newest image of the chain.
    pub path: PathBuf,
    /// What it is; otherwise its first bytes say it, or its name where it is a raw disk.
    #[serde(default)]
    pub format: Option<SourceFormat>,
    /// What becomes of them.
    pub way: ImportMode,
    /// The format of the copy.
    pub target: MigrateOptions,
    /// Folders that images may refer to, besides their own.
    pub permitted: Vec<PathBuf>,
    /// Accept a parent that was changed since its child was made.
    pub force_parent: bool,
    /// Replay the journal of a SEsparse image that was not closed properly, as far as it can be proven.
    pub replay_journal: bool,
    /// Most bytes per second; 0 for no limit.
    pub rate: u64,
}

/// The part of a disk's record about the layer above its images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Overlay {
    /// Name of the hidden native disk.
    pub native: String,
    target: MigrateOptions,
    rate: u64,
}

impl Overlay {
    /// The form in the record of a disk.
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

    /// The layer.
    pub fn layer(&self, native: &Arc<Native>) -> Result<Arc<dyn Layer>> {
        Ok(Arc::new(NativeLayer::new(native.hidden_device(&self.native)?)))
    }
}

/// Migrations that run in the background.
#[derive(Default)]
pub(crate) struct Imports {
    stop: Arc<AtomicBool>,
    running: parking_lot::Mutex<Vec<(String, JoinHandle<()>)>>,
}

/// Reports are dropped; closing the datastore cancels.
struct Background(Arc<AtomicBool>);

impl Progress for Background {
    fn update(&self, _done: u64, _total: u64) {}

    fn cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
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
        let place = Place::local(&options.path, &options.permitted)?;
        if options.format == Some(SourceFormat::Ova) || options.format.is_none() && is_archive(&place)? {
            let text = format!(
                "'{}' is an archive of a virtual machine: `lamina convert ARCHIVE disk:{name} --format native` makes a \
                 disk of one in it",
                place.label()
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let adopted = self.foreign.adopt(name, &place, how, &opening)?;
        let done = match options.way {
            ImportMode::Copy => {
                let progress = Throttled { progress, rate: options.rate };
                let copied = self.copy_in(name, &adopted, &options.target, &progress);
                let (folder, disk) = (adopted.entry.folder.clone(), Arc::clone(&adopted.entry.disk));
                drop(adopted);
                let removed = self.foreign.remove_moved(&folder, disk);
                return copied.and(removed).and_then(|()| self.disk(name));
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
                // Opened again, with the layer above it.
                disk.close()?;
                drop(disk);
                self.foreign.open_folder(&folder)?;
                self.disk(name)
            }
            Err(error) => {
                if let Err(second) = self.foreign.remove_moved(&folder, disk).and_then(|()| self.sweep_overlays()) {
                    tracing::warn!(
                        "the unfinished disk '{name}' is removed when the datastore is opened next: {second}"
                    );
                }
                Err(error.context(format!("disk '{name}' was not made")))
            }
        }
    }

    /// Copies a chain and its snapshots into a new disk of that name.
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
        let like = Source::Foreign(ForeignOriginal { entry: Arc::clone(&from.entry) }).likeness();
        let done = copied.and_then(|()| match &target {
            Target::Native(_) => self.native.complete_replica(&hidden, name, None, like?).map(|_| ()),
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
                        "the unfinished disk '{name}' is removed when the datastore is opened next: {second}"
                    );
                }
                Err(error.context(format!("disk '{name}' was not made")))
            }
        }
    }

    /// Creates the hidden disk above images, and enters it in their record.
    fn put_above(&self, adopted: &ForeignOriginal, options: &ImportOptions) -> Result<()> {
        let disk = &adopted.entry.disk;
        let native = format!("{OVERLAY}{}", names::uuid_text(&names::new_uuid()?));
        let capacity = disk.chain()?.capacity();
        let replica = self.native.replica(&native, capacity, Provisioning::Thin, &NoProgress)?;
        self.native.engine.complete_disk(replica.id)?;
        replica.head()?.flush()?;
        let overlay = Overlay { native, target: options.target.clone(), rate: options.rate };
        let text = serde_json::to_string(&overlay)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("the record cannot be written: {error}")))?;
        disk.set_overlay(Some(text))?;
        self.foreign.complete(&adopted.entry.folder)
    }

    /// Removes hidden disks that no record names.
    pub(crate) fn sweep_overlays(&self) -> Result<()> {
        if !self.foreign.broken().is_empty() {
            // The record that cannot be read may name one.
            return Ok(());
        }
        let mut named = Vec::new();
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

    /// Has every disk that is still read from its images move in the background, until the datastore is closed. For the
    /// process that serves it.
    pub fn start_imports(&self) {
        let mut running = self.imports.running.lock();
        running.retain(|(_, thread)| !thread.is_finished());
        for entry in self.foreign.entries() {
            let name = entry.disk.name();
            let overlay = match Overlay::of(&entry.disk.record()) {
                Ok(Some(overlay)) => overlay,
                Ok(None) => continue,
                Err(error) => {
                    tracing::error!("{error}");
                    continue;
                }
            };
            let known = running.iter().any(|(other, _)| *other == name);
            if known || self.imports.stop.load(Ordering::SeqCst) {
                continue;
            }
            let Some(datastore) = self.this.upgrade() else { return };
            let moving = name.clone();
            let thread = std::thread::Builder::new().name(format!("import {name}"));
            let begun = thread
                .spawn(move || datastore.move_in(&moving, &overlay))
                .during(|| format!("starting to move disk '{name}'"));
            match begun {
                Ok(thread) => running.push((name, thread)),
                Err(error) => tracing::error!("{error}"),
            }
        }
    }

    fn move_in(&self, name: &str, overlay: &Overlay) {
        let background = Background(Arc::clone(&self.imports.stop));
        loop {
            // Of this try: what waits for the next one takes no share of the pace.
            let moved = {
                let paced = self.background(&background);
                self.migrate(name, &overlay.target, &Throttled { progress: &paced, rate: overlay.rate })
            };
            match moved {
                Ok(_) => {
                    tracing::info!(disk = name, "the disk is in the datastore and no longer needs its images");
                    return;
                }
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::NotFound) => return,
                Err(error) => {
                    tracing::warn!(disk = name, "moving it into the datastore failed and is tried again: {error}")
                }
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

    /// Ends what goes on in the background.
    pub(crate) fn stop_imports(&self) {
        self.imports.stop.store(true, Ordering::SeqCst);
        let running = std::mem::take(&mut *self.imports.running.lock());
        for (name, thread) in running {
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!(disk = name, "the thread that moved it had panicked");
            }
        }
    }
}
