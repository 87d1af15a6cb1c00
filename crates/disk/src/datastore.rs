//! A datastore: its disks, their snapshots and clones, and everything that can be done to them.

use crate::device::Device;
use crate::info::{CheckOptions, CheckReport, Finding, Status};
use crate::names;
use crate::native::{NativeDevice, Target};
use crate::progress::Progress;
use backend::local::{LocalDirectory, LocalQueues};
use backend::{BLOCK_SIZE, Directory, IoMode, Lock, QueueKind};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use store::catalog::{Object, Provisioning};
use store::engine::{FORMAT_VERSION, InitParameters};
use store::{Engine, EngineOptions, Error, ErrorKind, IoContext, Result};

/// The file that the owner of a datastore holds locked.
const LOCK_FILE: &str = "lock";

/// How a datastore is made.
#[derive(Clone, Copy, Debug)]
pub struct InitOptions {
    /// Size of the journal ring in bytes, a multiple of 4 KiB from 4 MiB to 4 GiB.
    pub journal_size: u64,
}

/// What carries overlapping I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueChoice {
    /// io_uring where it works, threads where it does not.
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads.
    Threads,
}

/// How a datastore is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Page cache or O_DIRECT.
    pub mode: IoMode,
    /// What carries overlapping I/O.
    pub queue: QueueChoice,
    /// Bound of the metadata cache in bytes.
    pub metadata_cache: usize,
    /// Bound of the write buffer in bytes.
    pub write_buffer: usize,
}

/// Who has a disk or snapshot open, and how large it is now: shared by all its openers.
pub(crate) struct Opened {
    count: AtomicU64,
    capacity: AtomicU64,
}

/// One opener of a disk or snapshot.
pub(crate) struct Client {
    datastore: Weak<Datastore>,
    id: u64,
    opened: Arc<Opened>,
}

impl Client {
    pub fn capacity(&self) -> u64 {
        self.opened.capacity.load(Ordering::Acquire)
    }

    pub fn resize(&self, capacity: u64) -> Result<()> {
        let datastore = self
            .datastore
            .upgrade()
            .ok_or_else(|| Error::new(ErrorKind::Stopped, "the datastore was closed while the disk was open"))?;
        datastore.resize_by_id(self.id, capacity, false).map(|_| ())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.opened.count.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An open datastore. Methods may be called from any thread.
pub struct Datastore {
    pub(crate) engine: Arc<Engine>,
    pub(crate) opened: Mutex<BTreeMap<u64, Arc<Opened>>>,
    /// One change of disks and snapshots at a time, from look-up to end.
    pub(crate) changes: Mutex<()>,
    this: Weak<Datastore>,
    _lock: Box<dyn Lock>,
}

impl Datastore {
    /// Makes a datastore in an empty or missing folder.
    pub fn init(path: &Path, options: InitOptions) -> Result<()> {
        let range = store::engine::JOURNAL_SIZE_MIN..=store::engine::JOURNAL_SIZE_MAX;
        if !range.contains(&options.journal_size) || !options.journal_size.is_multiple_of(BLOCK_SIZE as u64) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "a journal of {} bytes cannot be: it takes a multiple of 4 KiB from 4 MiB to 4 GiB",
                    options.journal_size
                ),
            ));
        }
        let made = !path.exists();
        if made {
            std::fs::create_dir_all(path).during(|| format!("making {}", path.display()))?;
        }
        let result = LocalDirectory::open(path, LocalQueues::Threads)
            .during(|| format!("opening {}", path.display()))
            .and_then(|directory| Self::init_in(Arc::new(directory), options));
        if result.is_err() && made {
            // Only what this call made, and only if it is still empty enough to go.
            let _ = std::fs::remove_file(path.join(LOCK_FILE));
            let _ = std::fs::remove_dir(path);
        }
        result.map_err(|error| error.context(path.display()))
    }

    /// Makes a datastore in a directory of any backend.
    pub fn init_in(directory: Arc<dyn Directory>, options: InitOptions) -> Result<()> {
        let uuid = names::new_uuid()?;
        Engine::init(&directory, InitParameters { uuid, journal_size: options.journal_size })
    }

    /// Opens a datastore and becomes its owner: `Busy` when another process is.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Arc<Self>> {
        if !path.join("superblock").exists() {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("{} is not a datastore; 'lamina init' makes one", path.display()),
            ));
        }
        let queues = match options.queue {
            QueueChoice::Auto => LocalQueues::Auto,
            QueueChoice::Uring => LocalQueues::Uring,
            QueueChoice::Threads => LocalQueues::Threads,
        };
        let directory = LocalDirectory::open(path, queues).during(|| format!("opening {}", path.display()))?;
        let engine_options = EngineOptions {
            mode: options.mode,
            metadata_cache: options.metadata_cache,
            write_buffer: options.write_buffer,
            ..EngineOptions::default()
        };
        Self::open_in(Arc::new(directory), engine_options).map_err(|error| error.context(path.display()))
    }

    /// Opens a datastore in a directory of any backend.
    pub fn open_in(directory: Arc<dyn Directory>, options: EngineOptions) -> Result<Arc<Self>> {
        let lock = directory.lock(LOCK_FILE).map_err(|error| {
            if error.kind() == std::io::ErrorKind::WouldBlock {
                Error::new(
                    ErrorKind::Busy,
                    "the datastore is open in another process; a running 'lamina serve' takes commands on its socket",
                )
            } else {
                Error::io("taking the lock of the datastore", error)
            }
        })?;
        let engine = Engine::open(directory, options)?;
        let datastore = Arc::new_cyclic(|this| Self {
            engine,
            opened: Mutex::default(),
            changes: Mutex::new(()),
            this: Weak::clone(this),
            _lock: lock,
        });
        datastore.remove_incomplete()?;
        Ok(datastore)
    }

    /// Removes what an operation that never ended left behind.
    fn remove_incomplete(&self) -> Result<()> {
        let (snapshots, disks): (Vec<Object>, Vec<Object>) = self.engine.with_catalog(|catalog| {
            let unfinished = catalog.objects().filter(|object| object.incomplete).cloned();
            let (snapshots, rest): (Vec<_>, Vec<_>) = unfinished.partition(|object| object.is_snapshot());
            (snapshots, rest.into_iter().filter(|object| object.state == store::catalog::State::Disk).collect())
        });
        for object in snapshots {
            self.engine.delete_snapshot(object.id)?;
        }
        for object in disks {
            tracing::warn!(disk = object.name, "removing a disk whose making was interrupted");
            self.engine.delete_disk(object.id, &[])?;
        }
        Ok(())
    }

    /// The engine below: for tests that drive it by hand.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Writes everything home and closes. Devices still open fail from then on.
    pub fn close(&self) -> Result<()> {
        let _changes = self.changes.lock();
        self.engine.close()
    }

    /// Capacity, allocation, over-commitment.
    pub fn status(&self) -> Result<Status> {
        let room = self.engine.directory().room().during(|| "asking for the room of the file system".into())?;
        let allocated = self.engine.allocated_bytes()?;
        let counts = self.engine.counts();
        let bytes = |blocks: u64| blocks * BLOCK_SIZE as u64;
        let (provisioned, disks, snapshots) = self.engine.with_catalog(|catalog| {
            let provisioned = catalog.disks().fold(0u64, |sum, disk| sum.saturating_add(disk.capacity));
            let snapshots = catalog.objects().filter(|object| object.is_snapshot() && !object.incomplete).count();
            (provisioned, catalog.disks().count(), snapshots)
        });
        let usable = allocated.saturating_add(room.available).max(1);
        let metadata = allocated.saturating_sub(bytes(counts.data.backed));
        let kind = match self.engine.directory().queue_kind() {
            QueueKind::Uring => "io_uring",
            QueueKind::Threads => "threads",
            QueueKind::Inline => "inline",
        };
        Ok(Status {
            uuid: names::uuid_text(&self.engine.uuid()),
            version: FORMAT_VERSION,
            capacity: room.total,
            available: room.available,
            allocated,
            data: bytes(counts.data.used),
            reserved: bytes(counts.reserved),
            metadata,
            reclaimable: bytes(counts.data.free + counts.held),
            provisioned,
            overcommit_ratio: format!("{:.2}", provisioned as f64 / usable as f64),
            disks: disks as u64,
            snapshots: snapshots as u64,
            checksum_errors: self.engine.counters.checksum_errors.load(Ordering::Relaxed),
            engine: kind.into(),
            io_mode: match self.engine.options().mode {
                IoMode::Buffered => "buffered".into(),
                IoMode::Direct => "direct".into(),
            },
        })
    }

    /// Walks all metadata.
    pub fn check(&self, options: CheckOptions, progress: &dyn Progress) -> Result<CheckReport> {
        let _changes = self.changes.lock();
        let wanted = store::engine::CheckOptions { data: options.data, repair: options.repair };
        let report = self.engine.check(wanted, &|done, total| {
            progress.update(done, total);
            !progress.cancelled()
        })?;
        let mut findings: Vec<Finding> = report
            .findings
            .into_iter()
            .map(|finding| Finding { problem: finding.problem, repaired: finding.repaired })
            .collect();
        if report.unlisted > 0 {
            findings
                .push(Finding { problem: format!("{} more problems of these kinds", report.unlisted), repaired: None });
        }
        Ok(CheckReport {
            pages: report.pages,
            blocks: report.blocks,
            verified: report.verified,
            leaked: report.leaked,
            findings,
        })
    }

    /// Opens `disk` or `disk@snapshot` for I/O; counted as a client until dropped.
    pub fn device(&self, name: &str, read_only: bool) -> Result<Arc<dyn Device>> {
        let _changes = self.changes.lock();
        let (disk_name, snapshot_name) = names::split(name);
        let disk = self.find_disk(disk_name)?;
        let thick = disk.provisioning != Provisioning::Thin;
        let (object, target) = match snapshot_name {
            Some(snapshot) => {
                let object = self.find_snapshot(&disk, snapshot)?;
                let target = Target::Snapshot(object.id);
                (object, target)
            }
            None => {
                let target = Target::Head(self.engine.head(disk.id));
                (disk, target)
            }
        };
        let read_only = read_only || snapshot_name.is_some();
        let client = self.client(&object);
        let engine = Arc::clone(&self.engine);
        Ok(Arc::new(NativeDevice { engine, target, name: name.to_owned(), read_only, thick, client }))
    }

    /// A queue for one thread, of the kind chosen at open, for the data files that [`Device::plan_read`] names.
    pub fn queue(&self, depth: u32) -> std::io::Result<Box<dyn backend::Queue>> {
        self.engine.directory().queue(depth)
    }

    /// Names that [`Datastore::device`] takes.
    pub fn device_names(&self) -> Vec<String> {
        self.engine.with_catalog(|catalog| {
            let mut names = Vec::new();
            for disk in catalog.disks().filter(|disk| !disk.incomplete) {
                names.push(disk.name.clone());
                let snapshots = catalog.snapshots_of(disk.id).filter(|snapshot| !snapshot.incomplete);
                names.extend(snapshots.map(|snapshot| format!("{}@{}", disk.name, snapshot.name)));
            }
            names
        })
    }

    /// Counts a client of an object until dropped: it is not deleted or reverted meanwhile.
    pub(crate) fn client(&self, object: &Object) -> Client {
        let mut opened = self.opened.lock();
        opened.retain(|_, opened| opened.count.load(Ordering::Acquire) > 0);
        let entry = opened.entry(object.id).or_insert_with(|| {
            Arc::new(Opened { count: AtomicU64::new(0), capacity: AtomicU64::new(object.capacity) })
        });
        entry.count.fetch_add(1, Ordering::AcqRel);
        Client { datastore: Weak::clone(&self.this), id: object.id, opened: Arc::clone(entry) }
    }

    /// Clients that have an object open.
    pub(crate) fn clients(&self, id: u64) -> u64 {
        self.opened.lock().get(&id).map_or(0, |opened| opened.count.load(Ordering::Acquire))
    }

    /// Tells the clients of a disk its new capacity.
    pub(crate) fn announce_capacity(&self, id: u64, capacity: u64) {
        if let Some(opened) = self.opened.lock().get(&id) {
            opened.capacity.store(capacity, Ordering::Release);
        }
    }

    pub(crate) fn find_disk(&self, name: &str) -> Result<Object> {
        self.engine.with_catalog(|catalog| catalog.disk(name).cloned()).filter(|disk| !disk.incomplete).ok_or_else(
            || {
                Error::new(
                    ErrorKind::NotFound,
                    format!("there is no disk '{}'; 'lamina disk list' shows what there is", name.escape_debug()),
                )
            },
        )
    }

    pub(crate) fn find_snapshot(&self, disk: &Object, name: &str) -> Result<Object> {
        self.engine.with_catalog(|catalog| catalog.snapshot(disk.id, name).cloned()).ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                format!(
                    "disk '{0}' has no snapshot '{1}'; 'lamina snapshot list {0}' shows what there is",
                    disk.name,
                    name.escape_debug()
                ),
            )
        })
    }

    pub(crate) fn refuse_in_use(&self, id: u64, what: &str) -> Result<()> {
        match self.clients(id) {
            0 => Ok(()),
            count => Err(Error::new(
                ErrorKind::Busy,
                format!("{what} is in use by {count} client(s); disconnect them first"),
            )),
        }
    }
}
