//! Disks of the native store, their snapshots and clones.
//!
//! ```text
//! disks       made, listed, resized, renamed, deleted
//! snapshots   taken, listed, deleted, gone back to, compared
//! clones      linked and full
//! convert     ends of a conversion
//! moving      ends of a migration
//! arriving    what comes from another datastore, and what another one may know of us
//! device      bytes at any alignment over the store's blocks
//! ```
//!
//! 1. Changes of disks and snapshots come one after another (`changes`), from look-up to end; but a full clone copies
//!    without the lock, from a snapshot that holds still.
//! 2. What has clients is not deleted or reverted: they are counted at its switch.
//! 3. Names are checked and, against disks of other formats, reserved by the datastore; among native disks they are
//!    unique in the catalog.

mod arriving;
mod clones;
mod convert;
mod device;
mod disks;
mod moving;
mod snapshots;

pub(crate) use arriving::Arrived;
pub(crate) use disks::{check_capacity, list, stored};
pub(crate) use moving::{NativeOriginal, NativeReplica};

use crate::device::Device;
use crate::info::{CheckOptions, CheckReport, Finding};
use crate::switch::{Client, Identity, SwitchedDevice, Switches};
use backend::BLOCK_SIZE;
use device::{NativeDevice, Target};
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use store::Engine;
use store::catalog::{Object, ObjectState, Provisioning};
use work::{Progress, Throttle};

/// The capacity of a disk that is open: its devices and a resize share one.
pub(crate) struct Capacity(AtomicU64);

impl Capacity {
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Whether people see a disk: it is whole, and no part of another.
fn is_visible(disk: &Object) -> bool {
    !disk.incomplete && !disk.name.starts_with('.')
}

/// The native disks of a datastore.
pub(crate) struct Native {
    pub engine: Arc<Engine>,
    switches: Arc<Switches>,
    capacities: Mutex<BTreeMap<u64, Weak<Capacity>>>,
    /// One change of disks and snapshots at a time.
    changes: Mutex<()>,
    /// Asked before a disk is replaced by what another server sends.
    pub refuse_to_replace: OnceLock<Box<Refusal>>,
    this: Weak<Native>,
}

/// Says with an error why a disk is not to be touched.
type Refusal = dyn Fn(&str) -> Result<()> + Send + Sync;

impl Native {
    /// The disks of an engine.
    pub fn open(engine: Arc<Engine>, switches: Arc<Switches>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            engine,
            switches,
            capacities: Mutex::default(),
            changes: Mutex::new(()),
            refuse_to_replace: OnceLock::new(),
            this: Weak::clone(this),
        })
    }

    /// Removes what an operation that never ended left behind, but for disks that are to be kept.
    pub fn remove_incomplete(&self, kept: &BTreeSet<String>) -> Result<()> {
        let (snapshots, disks): (Vec<Object>, Vec<Object>) = self.engine.with_catalog(|catalog| {
            let unfinished = catalog.objects().filter(|object| object.incomplete).cloned();
            let (snapshots, rest): (Vec<_>, Vec<_>) = unfinished.partition(|object| object.is_snapshot());
            let disks =
                rest.into_iter().filter(|object| object.state == ObjectState::Disk && !kept.contains(&object.name));
            (snapshots, disks.collect())
        });
        for object in snapshots {
            self.engine.delete_snapshot(object.id)?;
        }
        for object in disks {
            tracing::warn!(disk = object.name, "removing a disk whose creation was interrupted");
            self.engine.delete_disk(object.id, &[])?;
        }
        Ok(())
    }

    /// Writes everything to its place and closes.
    pub fn close(&self) -> Result<()> {
        let _changes = self.changes.lock();
        self.engine.close()
    }

    /// Walks all metadata.
    pub fn check(&self, options: CheckOptions, progress: &dyn Progress) -> Result<CheckReport> {
        // Without repair a check reads a view of its own: it goes at a pace, and disks change beside it.
        let _changes = options.repair.then(|| self.changes.lock());
        let wanted = store::engine::CheckOptions { data: options.data, repair: options.repair };
        let (throttle, before) = (Throttle::new(progress), AtomicU64::new(0));
        let report = self.engine.check(wanted, &|done, total| {
            progress.update(done, total);
            // A repair has everything stand still: it ends as soon as it can.
            if !options.repair {
                let more = done.saturating_sub(before.fetch_max(done, Ordering::Relaxed));
                throttle.wait(more * BLOCK_SIZE as u64);
            }
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
            images: 0,
            dead: 0,
            findings,
            warnings: Vec::new(),
        })
    }

    /// True when there is a disk of that name, or one is being made.
    pub fn has(&self, name: &str) -> bool {
        self.engine.with_catalog(|catalog| catalog.disk(name).is_some())
    }

    /// Opens a disk, or a snapshot of it, for a client.
    pub fn open_device(&self, disk: &str, snapshot: Option<&str>, read_only: bool) -> Result<Arc<dyn Device>> {
        let _changes = self.changes.lock();
        let disk = self.find_disk(disk)?;
        let (object, name) = match snapshot {
            Some(snapshot) => (self.find_snapshot(&disk, snapshot)?, format!("{}@{snapshot}", disk.name)),
            None => (disk.clone(), disk.name.clone()),
        };
        let client = self.switches.attach(Identity::Native(object.id), || Ok(self.device_of(&disk, &object)))?;
        Ok(Arc::new(SwitchedDevice::over(name, read_only || object.is_snapshot(), client)))
    }

    /// A device that does not count as a client's: for the datastore's own work.
    fn device_of(&self, disk: &Object, object: &Object) -> Arc<dyn Device> {
        let (target, name) = if object.is_snapshot() {
            (Target::Snapshot(object.id), format!("{}@{}", disk.name, object.name))
        } else {
            (Target::Head(self.engine.head(disk.id)), disk.name.clone())
        };
        Arc::new(NativeDevice {
            engine: Arc::clone(&self.engine),
            target,
            name,
            thick: disk.provisioning != Provisioning::Thin,
            capacity: self.capacity_of(object),
            native: Weak::clone(&self.this),
        })
    }

    fn capacity_of(&self, object: &Object) -> Arc<Capacity> {
        let mut all = self.capacities.lock();
        if let Some(capacity) = all.get(&object.id).and_then(Weak::upgrade) {
            return capacity;
        }
        all.retain(|_, capacity| capacity.strong_count() > 0);
        let capacity = Arc::new(Capacity(AtomicU64::new(object.capacity)));
        all.insert(object.id, Arc::downgrade(&capacity));
        capacity
    }

    /// Names that can be opened.
    pub fn device_names(&self) -> Vec<String> {
        self.engine.with_catalog(|catalog| {
            let mut names = Vec::new();
            for disk in catalog.disks().filter(|disk| is_visible(disk)) {
                names.push(disk.name.clone());
                let snapshots = catalog.snapshots_of(disk.id).filter(|snapshot| !snapshot.incomplete);
                names.extend(snapshots.map(|snapshot| format!("{}@{}", disk.name, snapshot.name)));
            }
            names
        })
    }

    /// Keeps a snapshot from being deleted until dropped.
    fn hold(&self, disk: &Object, snapshot: &Object) -> Result<Client> {
        self.switches.attach(Identity::Native(snapshot.id), || Ok(self.device_of(disk, snapshot)))
    }

    /// Clients that have an object open.
    fn clients(&self, id: u64) -> u64 {
        self.switches.clients(&Identity::Native(id))
    }

    fn refuse_in_use(&self, id: u64, what: &str) -> Result<()> {
        self.switches.refuse_in_use(&Identity::Native(id), what)
    }

    /// Tells the devices of a disk its new capacity.
    fn announce_capacity(&self, id: u64, capacity: u64) {
        if let Some(open) = self.capacities.lock().get(&id).and_then(Weak::upgrade) {
            open.0.store(capacity, Ordering::Release);
        }
    }

    pub(crate) fn find_disk(&self, name: &str) -> Result<Object> {
        self.engine.with_catalog(|catalog| catalog.disk(name).cloned()).filter(is_visible).ok_or_else(|| {
            self.not_found(format!(
                "there is no disk '{}'; 'lamina disk list' shows what there is",
                name.escape_debug()
            ))
        })
    }

    pub(crate) fn find_snapshot(&self, disk: &Object, name: &str) -> Result<Object> {
        self.engine.with_catalog(|catalog| catalog.snapshot(disk.id, name).cloned()).ok_or_else(|| {
            self.not_found(format!(
                "disk '{0}' has no snapshot '{1}'; 'lamina snapshot list {0}' shows what there is",
                disk.name,
                name.escape_debug()
            ))
        })
    }

    /// The error for a name that nothing has. It may be that of a disk whose record cannot be read.
    fn not_found(&self, mut text: String) -> Error {
        if self.engine.with_catalog(|catalog| !catalog.lost().is_empty()) {
            text.push_str("; a page of the catalog is damaged, so disks and snapshots are missing: run 'lamina check'");
        }
        Error::new(ErrorKind::NotFound, text)
    }
}
