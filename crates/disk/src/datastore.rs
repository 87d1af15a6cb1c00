//! A datastore: its disks, their snapshots and clones, and the operations on them.

mod accounting;
mod control;
mod idle;
mod reclaim;
mod sampling;
mod space;
mod uses;

use crate::device::Device;
use crate::file_system::{self, FileSystemInfo};
use crate::foreign::{Foreign, ImageFolders};
use crate::full::WaitNotice;
use crate::growth::Samples;
use crate::info::{CheckOptions, CheckReport, Finding, Status};
use crate::location::{Location, holds_datastore};
use crate::migrate::{self, Imports};
use crate::names;
use crate::native::Native;
use crate::pace::{self, Background, Foreground};
use crate::privacy;
use crate::scrub::Scrubs;
use crate::snapshot_group;
use crate::spare::Spare;
use crate::switch::Switches;
use crate::transfer;
use backend::local::{KeptSpace, LocalQueues};
use backend::{BLOCK_SIZE, Directory, IoMode, QueueKind};
use error::text::size;
use error::{Error, ErrorKind, IoContext, Result};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use store::engine::{InitParameters, Owner};
use store::{Engine, EngineOptions};
pub(crate) use uses::InUse;
use uses::Uses;
use work::Progress;

/// Parameters of a new datastore.
#[derive(Clone, Copy, Debug)]
pub struct InitOptions {
    /// Size of the journal ring in bytes, a multiple of 4 KiB from 4 MiB to 4 GiB.
    pub journal_size: u64,
}

/// The way in which overlapping I/O is submitted for a datastore in a folder. Other media have their own queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueChoice {
    /// io_uring where the kernel allows it, otherwise threads.
    Auto,
    /// io_uring, or an error where the kernel does not allow it.
    Uring,
    /// Threads that make blocking calls.
    Threads,
}

/// Options for opening a datastore.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Whether I/O uses the page cache or bypasses it (O_DIRECT).
    pub mode: IoMode,
    /// The engine for overlapping I/O.
    pub queue: QueueChoice,
    /// Limit of the metadata cache in bytes.
    pub metadata_cache: usize,
    /// Limit of the write buffer in bytes.
    pub write_buffer: usize,
    /// Limit of the read cache in bytes; 0 for none. `None` for [`READ_CACHE_USUAL`] without blocks that are not
    /// compressed: reads that find nothing in a small cache are slower than reads without one.
    pub read_cache: Option<usize>,
}

/// Limit of the read cache if no other is set (64 MiB).
const READ_CACHE_USUAL: usize = 64 << 20;

/// A function of the engine that opens a store: with or without repair.
type OpenEngine = fn(Arc<dyn Directory>, EngineOptions, Option<&Arc<Owner>>) -> Result<Arc<Engine>>;

/// A function that returns an error with the reason why no disk of the datastore at a location may get one of the
/// names.
pub type NameRefusal = fn(&Location, &[&str]) -> Result<()>;

/// An open datastore. Methods may be called from any thread.
pub struct Datastore {
    pub(crate) native: Arc<Native>,
    pub(crate) foreign: Foreign,
    pub(crate) switches: Arc<Switches>,
    /// Records which operations are running on which disks.
    pub(crate) uses: Arc<Uses>,
    /// Locked for writing while a name is moved from one disk to another, and for reading while a disk is opened by its
    /// name.
    pub(crate) rename_lock: RwLock<()>,
    /// The datastore's location; `None` if it was opened by its directory.
    pub(crate) location: Option<Location>,
    /// Other datastores to which disks were migrated from this datastore together with their clients.
    pub(crate) peer_datastores: Arc<Mutex<Vec<Arc<Datastore>>>>,
    /// Names that are reserved for disks that are being created or renamed.
    reserved: Arc<Mutex<BTreeSet<String>>>,
    /// Called before a disk gets a name. An error refuses the name.
    pub(crate) name_refusal: OnceLock<NameRefusal>,
    /// Live imports: migrations that run in the background.
    pub(crate) imports: Imports,
    /// Snapshot groups that have ended, but whose record files could not be updated or removed yet.
    pub(crate) unended: Mutex<Vec<snapshot_group::UnderWay>>,
    /// The latency of clients' requests, by which background work is paced.
    foreground: Arc<Foreground>,
    /// Samples of the growth of the datastore and its disks.
    samples: Samples,
    /// Names of disks that a replication session is receiving.
    pub(crate) receptions: Mutex<BTreeSet<String>>,
    /// The state of scrubs.
    pub(crate) scrubs: Scrubs,
    pub(crate) this: Weak<Datastore>,
    kept_space: Option<KeptSpace>,
    _owner: Arc<Owner>,
}

/// A reserved name of a disk of any format.
pub(crate) struct Reservation {
    name: String,
    reserved: Arc<Mutex<BTreeSet<String>>>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.reserved.lock().remove(&self.name);
    }
}

/// Reserves space for requests that need no new space, because some file systems refuse even these when their quota is
/// exhausted. `None` if the file system is not one of these, or if no space can be reserved.
fn keep_space(path: &Path) -> Option<KeptSpace> {
    let kept = KeptSpace::keep(path).unwrap_or_else(|error| {
        let datastore = path.display();
        tracing::info!(%datastore, %error, "no space could be kept back for overwrites at an exceeded quota");
        None
    });
    if kept.as_ref().is_some_and(|kept| !kept.is_whole()) {
        tracing::info!(datastore = %path.display(), "some of the space kept back for overwrites is missing");
    }
    kept
}

impl Datastore {
    /// Creates a datastore at a location that has none. A folder must be empty or missing.
    pub fn init(location: impl Into<Location>, options: InitOptions) -> Result<()> {
        let location = location.into();
        let range = store::engine::JOURNAL_SIZE_MIN..=store::engine::JOURNAL_SIZE_MAX;
        if !range.contains(&options.journal_size) || !options.journal_size.is_multiple_of(BLOCK_SIZE as u64) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "a journal of {} is invalid: use a multiple of 4 KiB from 4 MiB to 4 GiB",
                    size(options.journal_size)
                ),
            ));
        }
        let made = location.make()?;
        let directory = location.connect(LocalQueues::Threads);
        let result = directory.and_then(|directory| {
            Self::init_in(Arc::clone(&directory), options)?;
            location.close_to_others();
            if let Some(folder) = location.local_path() {
                keep_space(folder);
                Spare::of(directory).keep();
            }
            Ok(())
        });
        if result.is_err() && made {
            location.unmake();
        }
        result.map_err(|error| error.context(&location))
    }

    /// Creates a datastore in a directory of any backend.
    pub fn init_in(directory: Arc<dyn Directory>, options: InitOptions) -> Result<()> {
        let uuid = names::new_uuid()?;
        Engine::init(&directory, InitParameters { uuid, journal_size: options.journal_size })
    }

    /// Opens a datastore and acquires its ownership: `Busy` if another process owns it.
    pub fn open(location: impl Into<Location>, options: OpenOptions) -> Result<Arc<Self>> {
        Self::open_located(location.into(), options, Engine::open_owned)
    }

    /// As [`Datastore::open`], for `check --repair`: damage that prevents opening is repaired if the right content can
    /// be proven. The report of the check lists these repairs.
    pub fn open_repairing(location: impl Into<Location>, options: OpenOptions) -> Result<Arc<Self>> {
        Self::open_located(location.into(), options, Engine::open_repairing)
    }

    fn open_located(location: Location, options: OpenOptions, open: OpenEngine) -> Result<Arc<Self>> {
        location.require()?;
        let queues = match options.queue {
            QueueChoice::Auto => LocalQueues::Auto,
            QueueChoice::Uring => LocalQueues::Uring,
            QueueChoice::Threads => LocalQueues::Threads,
        };
        let directory = location.connect(queues)?;
        if !holds_datastore(&*directory) {
            let text = format!(
                "{location} is not a datastore: it has no superblock; 'lamina init' makes one, 'lamina salvage' reads one \
                 that has lost it"
            );
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let engine_options = EngineOptions {
            mode: options.mode,
            metadata_cache: options.metadata_cache,
            write_buffer: options.write_buffer,
            read_cache: options.read_cache.unwrap_or(READ_CACHE_USUAL),
            cache_plain: options.read_cache.is_some(),
            ..EngineOptions::default()
        };
        let opened = Self::open_at(Some(&location), directory, engine_options, open);
        opened.map_err(|error| match location.local_path() {
            Some(folder) => privacy::explain(folder, error).context(&location),
            None => error.context(&location),
        })
    }

    /// Opens a datastore in a directory of any backend. Such a datastore has no location, and so no disks in VMware's
    /// formats.
    pub fn open_in(directory: Arc<dyn Directory>, options: EngineOptions) -> Result<Arc<Self>> {
        Self::open_at(None, directory, options, Engine::open_owned)
    }

    /// As [`Datastore::open_in`], for `check --repair`.
    pub fn open_repairing_in(directory: Arc<dyn Directory>, options: EngineOptions) -> Result<Arc<Self>> {
        Self::open_at(None, directory, options, Engine::open_repairing)
    }

    pub(crate) fn open_at(
        location: Option<&Location>,
        directory: Arc<dyn Directory>,
        options: EngineOptions,
        open: OpenEngine,
    ) -> Result<Arc<Self>> {
        let owner = Arc::new(Owner::take(&*directory)?);
        // The space is reserved before recovery, because recovery overwrites data in place.
        let kept_space = location.and_then(Location::local_path).and_then(keep_space);
        let mode = options.mode;
        let engine = open(directory, options, Some(&owner))?;
        let switches = Arc::<Switches>::default();
        let native = Native::open(engine, Arc::clone(&switches));
        // The records of migrations decide which incomplete disks are kept.
        let folders = ImageFolders::new(location, native.engine.directory());
        let mut doubt = migrate::recover(&native, &folders)?;
        doubt.names.append(&mut transfer::recover(&native)?);
        native.remove_incomplete(&doubt.names)?;
        let foreign = Foreign::open(&native, folders, mode, Arc::clone(&switches), &doubt.folders)?;
        migrate::recover_settings(&native, &foreign, &doubt.renewed)?;
        snapshot_group::recover(&native, &foreign)?;
        let scrubs = Scrubs::open(&**native.engine.directory());
        let uses = Arc::<Uses>::default();
        for record in &doubt.damaged {
            let problem = record.problem();
            let disk = record.disk.as_deref().filter(|name| native.has(name) || foreign.find(name).is_some());
            let Some(disk) = disk else {
                let text = format!(
                    "{problem}, and which disk that is: restore the file from a backup, or read the disks with 'lamina \
                     salvage'"
                );
                return Err(Error::new(ErrorKind::Corrupt, text));
            };
            tracing::error!(disk, "{problem}: the disk is not opened, and both copies are kept");
            uses.shut(disk, problem);
        }
        let samples = Samples::open(Arc::clone(native.engine.directory()));
        let mut foreground = Foreground::new(pace::TARGET_DEFAULT);
        if let Some(medium) = native.engine.directory().dirty() {
            foreground = foreground.limited_by(move || medium.background_rate());
        }
        let datastore = Arc::new_cyclic(|this| Self {
            native,
            foreign,
            switches,
            uses,
            rename_lock: RwLock::new(()),
            location: location.cloned(),
            peer_datastores: Arc::default(),
            reserved: Arc::default(),
            name_refusal: OnceLock::new(),
            imports: Imports::default(),
            foreground: Arc::new(foreground),
            samples,
            receptions: Mutex::default(),
            unended: Mutex::default(),
            scrubs,
            this: Weak::clone(this),
            kept_space,
            _owner: owner,
        });
        let accounting = accounting::DatastoreAccounting(Arc::downgrade(&datastore));
        datastore.native.settings.quotas().set_accounting(Box::new(accounting));
        if doubt.folders.is_empty() {
            datastore.sweep_overlays()?;
        }
        Ok(datastore)
    }

    /// The datastore's directory, in which servers store small records.
    pub fn directory(&self) -> &Arc<dyn Directory> {
        self.native.engine.directory()
    }

    /// The space that the datastore reserves for names that its owner has to create on a full file system.
    pub fn spare(&self) -> Spare {
        Spare::of(Arc::clone(self.directory()))
    }

    /// The space that is reserved for requests that need no new space, because the file system refuses even these when
    /// its quota is exhausted.
    pub fn kept_space(&self) -> Option<&KeptSpace> {
        self.kept_space.as_ref()
    }

    /// Sets a function that is called before a received disk replaces a disk without connected clients. It refuses the
    /// replacement if a client of the disk may reconnect. Only the first call has an effect.
    pub fn refuse_to_replace(&self, refuse: impl Fn(&str) -> Result<()> + Send + Sync + 'static) {
        let _ = self.native.refuse_to_replace.set(Box::new(refuse));
    }

    /// Sets a function that is called before a disk gets a name, in this datastore and in every datastore to which a
    /// disk of this one migrates. Only the first call has an effect.
    pub fn refuse_names(&self, refuse: NameRefusal) {
        let _ = self.name_refusal.set(refuse);
    }

    /// Sets a function that receives a notice when writes begin to wait for space, and when none waits any more. Only
    /// the first call has an effect.
    pub fn notice_waiting(&self, receiver: impl Fn(WaitNotice) + Send + Sync + 'static) {
        self.native.settings.set_receiver(receiver);
    }

    /// Returns `Busy`, with the reason, while an operation has exclusive use of the disk.
    pub fn refuse_alone(&self, disk: &str) -> Result<()> {
        self.uses.share(disk).map(drop)
    }

    /// Latency statistics of clients' requests; servers report to them.
    pub fn foreground(&self) -> &Arc<Foreground> {
        &self.foreground
    }

    /// The rate limit of background work with progress `progress`.
    pub fn background<'a>(&self, progress: &'a dyn Progress) -> Background<'a> {
        Background::new(progress, &self.foreground)
    }

    /// The storage engine, for tests that control the engine's steps.
    pub fn engine(&self) -> &Engine {
        &self.native.engine
    }

    /// Writes back all buffered data and closes the datastore. Devices that are still open return errors afterwards.
    pub fn close(&self) -> Result<()> {
        self.stop_imports();
        let peer_datastores = std::mem::take(&mut *self.peer_datastores.lock());
        let away = peer_datastores.iter().map(|peer| peer.close()).fold(Ok(()), Result::and);
        let foreign = self.foreign.close().and(away);
        self.native.close().and(foreign)
    }

    /// Returns to the file system what was freed since the datastore was opened, unless `goes_on` is false: for a
    /// process that closes the datastore after one command.
    pub fn return_freed(&self, goes_on: &dyn Fn() -> bool) -> Result<()> {
        self.native.engine.return_freed(goes_on)
    }

    /// Capacity, allocated space and over-commitment of the datastore.
    pub fn status(&self) -> Result<Status> {
        let engine = &self.native.engine;
        let room = engine.directory().room().during(|| "querying the free space of the file system".into())?;
        let allocated = engine.allocated_bytes()?;
        let counts = engine.counts();
        let bytes = |blocks: u64| blocks * BLOCK_SIZE as u64;
        let (provisioned, disks, snapshots) = engine.with_catalog(|catalog| {
            let provisioned = catalog.disks().fold(0u64, |sum, disk| sum.saturating_add(disk.capacity));
            let snapshots = catalog.objects().filter(|object| object.is_snapshot() && !object.incomplete).count();
            (provisioned, catalog.disks().count(), snapshots)
        });
        let images = self.foreign.sums()?;
        let provisioned = provisioned.saturating_add(images.provisioned);
        let allocated = allocated.saturating_add(images.allocated);
        let usable = allocated.saturating_add(room.available).max(1);
        let metadata = allocated.saturating_sub(images.allocated).saturating_sub(bytes(counts.data.backed));
        let kind = match engine.directory().queue_kind() {
            QueueKind::Uring => "io_uring",
            QueueKind::Threads => "threads",
            QueueKind::Inline => "inline",
            QueueKind::Medium => "medium",
        };
        // A damaged map of a disk must not make the status fail; a check reports the damage.
        let unwritten = self.native.reserved_in_disks().unwrap_or_default();
        let (background_work, background_rate) = self.foreground.pace();
        Ok(Status {
            uuid: names::uuid_text(&engine.uuid()),
            version: engine.format_version(),
            file_system: self.file_system(),
            capacity: room.total,
            available: room.available,
            allocated,
            images: images.allocated,
            data: bytes(counts.data.used.saturating_sub(unwritten)),
            reserved: bytes(counts.reserved + unwritten),
            metadata,
            reclaimable: bytes(counts.data.free + counts.held),
            held: bytes(counts.held),
            provisioned,
            overcommit_ratio: format!("{:.2}", provisioned as f64 / usable as f64),
            space: None,
            disks: disks as u64 + images.disks,
            snapshots: snapshots as u64 + images.snapshots,
            waiting: self.native.settings.all_waiting(),
            limits: self.native.settings.quotas().info(false)?,
            growth: self.samples.of_datastore(room.available.saturating_add(bytes(counts.data.free))),
            checksum_errors: engine.counters.checksum_errors.load(Ordering::Relaxed),
            scrub: self.scrub_summary(),
            compression: self.native.compression_status(),
            deduplication: self.native.deduplication_status(),
            background_work: background_work as u64,
            background_rate,
            read_cache: self.native.read_cache(),
            dirty: engine.directory().dirty().map(|medium| medium.used().into()),
            engine: kind.into(),
            io_mode: match engine.options().mode {
                IoMode::Buffered => "buffered".into(),
                IoMode::Direct => "direct".into(),
            },
        })
    }

    /// Checks all metadata, and the images of disks in VMware's formats.
    pub fn check(&self, options: CheckOptions, progress: &dyn Progress) -> Result<CheckReport> {
        let mut report = self.native.check(options, progress)?;
        self.foreign.check(options.repair, progress, &mut report)?;
        let problems = migrate::problems(self.directory())?.into_iter();
        report.findings.extend(problems.map(|problem| Finding::new(problem, None)));
        snapshot_group::check(&**self.directory(), options.repair, &mut report)?;
        self.native.settings.check(options.repair, &mut report)?;
        report.warnings = self.file_system().warnings;
        if let Some(location) = self.location.as_ref().filter(|location| location.local_path().is_some()) {
            // The search uses the open handle of the folder, so it also works after the folder was moved.
            if let Err(error) = location.check_not_moved(&**self.directory()) {
                report.warnings.push(error.to_string());
            }
            let searched = self.directory().searched().during(|| format!("opening {location}"))?;
            searched.map_or(Ok(()), |folder| privacy::check(&folder, options.repair, &mut report))?;
        }
        Ok(report)
    }

    /// The file system in which the datastore is, with warnings about the file system's restrictions.
    pub fn file_system(&self) -> FileSystemInfo {
        self.location.as_ref().map(file_system::look_at).unwrap_or_default()
    }

    /// Opens `disk` or `disk@snapshot` for I/O. The device counts as a client until it is dropped.
    pub fn device(&self, name: &str, read_only: bool) -> Result<Arc<dyn Device>> {
        let (disk, snapshot) = names::split(name);
        let _rename = self.rename_lock.read();
        self.uses.check_not_shut(disk)?;
        if snapshot.is_none() {
            self.uses.check_open_to_clients(disk)?;
        }
        match self.foreign.find(disk) {
            Some(entry) => self.foreign.open_device(&entry, snapshot, read_only),
            None => self.native.open_device(disk, snapshot, read_only),
        }
    }

    /// An I/O queue for one thread, for the data files that [`Device::plan_read`] names. Its kind was chosen when the
    /// datastore was opened.
    pub fn queue(&self, depth: u32) -> std::io::Result<Box<dyn backend::Queue>> {
        self.native.engine.directory().queue(depth)
    }

    /// The names that [`Datastore::device`] can open.
    pub fn device_names(&self) -> Vec<String> {
        let mut names = self.native.device_names();
        names.extend(self.foreign.device_names());
        names
    }

    /// Reserves a name for a new or renamed disk: `Exists` if a disk has the name, or another operation has reserved
    /// it. Every operation that gives a disk a name reserves the name first.
    pub(crate) fn reserve(&self, name: &str) -> Result<Reservation> {
        self.check_new_names(&[name])?;
        self.reserve_checked(name)
    }

    /// As [`Datastore::reserve`], for several names: all are reserved or none.
    pub(crate) fn reserve_all(&self, new: &[String]) -> Result<Vec<Reservation>> {
        self.check_new_names(&new.iter().map(String::as_str).collect::<Vec<_>>())?;
        new.iter().map(|name| self.reserve_checked(name)).collect()
    }

    fn check_new_names(&self, new: &[&str]) -> Result<()> {
        new.iter().try_for_each(|name| names::check("disk", name))?;
        match (&self.location, self.name_refusal.get()) {
            (Some(location), Some(refuse)) => refuse(location, new),
            _ => Ok(()),
        }
    }

    fn reserve_checked(&self, name: &str) -> Result<Reservation> {
        let mut reserved = self.reserved.lock();
        if self.native.has(name) || self.foreign.find(name).is_some() || reserved.contains(name) {
            return Err(Error::new(ErrorKind::Exists, format!("there is a disk '{name}' already")));
        }
        reserved.insert(name.to_owned());
        Ok(Reservation { name: name.to_owned(), reserved: Arc::clone(&self.reserved) })
    }
}
