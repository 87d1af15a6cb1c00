//! Disks of the native store, their snapshots and clones.
//!
//! ```text
//! disks       created, listed, resized, renamed, deleted
//! snapshots   taken, listed, deleted, reverted to, compared
//! clones      linked and full
//! convert     source and target of a conversion
//! moving      source and target of a migration
//! idle        compression and deduplication by the settings of disks
//! arriving    disks received from another datastore, and snapshots sent to one
//! device      byte ranges at any alignment on the store's blocks
//! ```
//!
//! 1. Changes of disks and snapshots are serialized by `changes`, from look-up to completion. Two phases run without
//!    the lock, because they take long. A full clone is copied from a snapshot, which does not change. The new end of a
//!    thick disk that grows is filled. Meanwhile changes of this disk that concern its content wait, because a snapshot
//!    or a revert would change which blocks the disk owns alone.
//! 2. An object (a disk or a snapshot) that clients have open is not deleted or reverted. The object's switch counts
//!    the clients.
//! 3. The datastore checks names and reserves them, so that they are unique across native disks and disks in VMware's
//!    formats. The catalog ensures that they are unique among native disks.

mod arriving;
mod clones;
mod convert;
mod device;
mod disks;
mod idle;
mod moving;
mod optimize;
mod snapshots;
mod space;
#[cfg(test)]
mod tests;

pub(crate) use arriving::Arrived;
pub(crate) use disks::{check_capacity, list, stored};
pub use idle::{IdleDisk, IdleDomain, IdlePass};
pub(crate) use moving::{NativeOriginal, NativeReplica};
pub(crate) use snapshots::Taking;

use crate::device::Device;
use crate::info::{CheckOptions, CheckReport, Finding, Point};
use crate::names;
use crate::quota;
use crate::scrub::DamageReference;
use crate::settings::Settings;
use crate::switch::{Client, Identity, SwitchedDevice, Switches};
use backend::BLOCK_SIZE;
use device::{NativeDevice, Target};
use error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use store::Engine;
use store::catalog::{Object, ObjectState, Provisioning};
use work::{Progress, Throttle};

/// The capacity of an open disk, shared by all its devices and updated by a resize.
pub(crate) struct Capacity(AtomicU64);

impl Capacity {
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

fn bytes(blocks: u64) -> u64 {
    blocks.saturating_mul(BLOCK_SIZE as u64)
}

/// Whether users see a disk: it is complete, and is not a hidden part of another disk.
pub(crate) fn is_visible(disk: &Object) -> bool {
    !disk.incomplete && !disk.name.starts_with('.')
}

/// The native disks of a datastore.
pub(crate) struct Native {
    pub engine: Arc<Engine>,
    switches: Arc<Switches>,
    /// The settings of the disks of all formats.
    pub settings: Arc<Settings>,
    capacities: Mutex<BTreeMap<u64, Weak<Capacity>>>,
    /// Serializes changes of disks and snapshots. The set has the disks whose new end is being filled.
    changes: Mutex<BTreeSet<u64>>,
    /// Notified when the new end of a disk is filled.
    grown: Condvar,
    /// Set when a close begins: fills end then.
    closing: AtomicBool,
    /// Called before a received disk replaces an existing one. An error refuses the replacement.
    pub refuse_to_replace: OnceLock<Box<Refusal>>,
    /// Passes over cold data.
    idle: idle::IdlePasses,
    /// Held while the disks whose writes are compressed or deduplicated are determined and given to the engine.
    reducing_writes: Mutex<()>,
    /// Held by a deduplication that a user has started: each needs memory for prints, and several at the same time are
    /// no faster, because their steps exclude each other.
    deduplicating: Mutex<()>,
    /// Limit of the memory for the prints of a deduplication, in bytes.
    pub dedup_memory: AtomicUsize,
    this: Weak<Native>,
}

/// Returns an error with the reason why a disk must not be replaced.
type Refusal = dyn Fn(&str) -> Result<()> + Send + Sync;

impl Native {
    /// The native disks of a store.
    pub fn open(engine: Arc<Engine>, switches: Arc<Switches>) -> Arc<Self> {
        let settings = Settings::open(Arc::clone(engine.directory()));
        Arc::new_cyclic(|this| Self {
            engine,
            switches,
            settings,
            capacities: Mutex::default(),
            changes: Mutex::default(),
            grown: Condvar::new(),
            closing: AtomicBool::new(false),
            refuse_to_replace: OnceLock::new(),
            idle: idle::IdlePasses::default(),
            reducing_writes: Mutex::default(),
            deduplicating: Mutex::default(),
            dedup_memory: AtomicUsize::new(crate::DEDUP_MEMORY_DEFAULT),
            this: Weak::clone(this),
        })
    }

    /// Removes the disks and snapshots of interrupted operations, except the disks named in `kept`.
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

    /// Locks `changes` as soon as `blocks` is false for the disks whose new end is being filled.
    fn lock_changes_unless(&self, blocks: impl Fn(&BTreeSet<u64>) -> bool) -> MutexGuard<'_, BTreeSet<u64>> {
        let mut changes = self.changes.lock();
        self.grown.wait_while(&mut changes, |growing| blocks(growing));
        changes
    }

    /// Locks `changes` once the new end of none of these disks is being filled.
    fn lock_changes_of(&self, names: &[&str]) -> MutexGuard<'_, BTreeSet<u64>> {
        self.lock_changes_unless(|growing| {
            self.engine.with_catalog(|catalog| {
                names.iter().filter_map(|name| catalog.disk(name)).any(|disk| growing.contains(&disk.id))
            })
        })
    }

    /// Like [`Native::lock_changes_of`], for a change that may need a snapshot of the disk.
    fn lock_changes_at(&self, disk: &str, at: &Point) -> MutexGuard<'_, BTreeSet<u64>> {
        match at {
            Point::Head => self.lock_changes_of(&[disk]),
            Point::Snapshot(_) => self.changes.lock(),
        }
    }

    /// Writes back all buffered data and closes the store.
    pub fn close(&self) -> Result<()> {
        self.closing.store(true, Ordering::Release);
        // A disk whose growth is interrupted returns its new space first.
        let _changes = self.lock_changes_unless(|growing| !growing.is_empty());
        self.engine.close()
    }

    /// Checks all metadata.
    pub fn check(&self, options: CheckOptions, progress: &dyn Progress) -> Result<CheckReport> {
        // Without repair, the check reads its own view of the metadata. So it can be paced, and disks may change
        // meanwhile.
        let _changes = options.repair.then(|| self.changes.lock());
        let wanted = store::engine::CheckOptions { data: options.data, repair: options.repair };
        let (throttle, before) = (Throttle::new(progress), AtomicU64::new(0));
        let report = self.engine.check(wanted, &|done, total| {
            progress.update(done, total);
            // A repair blocks all other requests, so it is not paced.
            if !options.repair {
                let more = done.saturating_sub(before.fetch_max(done, Ordering::Relaxed));
                throttle.wait(more * BLOCK_SIZE as u64);
            }
            !progress.cancelled()
        })?;
        let mut findings: Vec<Finding> = report
            .findings
            .into_iter()
            .map(|finding| Finding {
                problem: finding.problem,
                repaired: finding.repaired,
                places: finding.places.into_iter().map(DamageReference::from).collect(),
                unlisted: finding.unlisted,
            })
            .collect();
        if report.unlisted > 0 {
            findings.push(Finding::new(format!("{} more problems of these kinds", report.unlisted), None));
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

    /// Whether a disk with that name exists or is being created.
    pub fn has(&self, name: &str) -> bool {
        self.engine.with_catalog(|catalog| catalog.disk(name).is_some())
    }

    /// Opens a disk, or a snapshot of it, for a client.
    pub fn open_device(&self, disk: &str, snapshot: Option<&str>, read_only: bool) -> Result<Arc<dyn Device>> {
        self.open_as(disk, snapshot, read_only, |client| client)
    }

    /// Opens a disk for an operation of the datastore, which users do not see as a client of the disk.
    pub fn open_for_operation(&self, disk: &str) -> Result<Arc<dyn Device>> {
        self.open_as(disk, None, false, Client::of_operation)
    }

    fn open_as(
        &self,
        disk: &str,
        snapshot: Option<&str>,
        read_only: bool,
        mark: fn(Client) -> Client,
    ) -> Result<Arc<dyn Device>> {
        let _changes = self.changes.lock();
        let disk = self.find_disk(disk)?;
        let (object, name) = match snapshot {
            Some(snapshot) => (self.find_snapshot(&disk, snapshot)?, format!("{}@{snapshot}", disk.name)),
            None => (disk.clone(), disk.name.clone()),
        };
        if snapshot.is_none() && !read_only {
            self.reduce_writes_to(&disk)?;
        }
        let client = self.switches.attach(Identity::Native(object.id), || Ok(self.device_of(&disk, &object)))?;
        let device = SwitchedDevice::over(name, read_only || object.is_snapshot(), mark(client));
        Ok(Arc::new(match snapshot {
            None => device.with_settings(self.settings.open_disk(&names::uuid_text(&disk.uuid), &disk.name)),
            Some(_) => device,
        }))
    }

    /// A device for the datastore's own operations, which is not counted as a client.
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
        // The disk may have been resized since `object` was read. A later resize announces its capacity.
        let now = self.engine.with_catalog(|catalog| catalog.find(object.id).map(|now| now.capacity));
        let capacity = Arc::new(Capacity(AtomicU64::new(now.unwrap_or(object.capacity))));
        all.insert(object.id, Arc::downgrade(&capacity));
        capacity
    }

    /// Bytes that the head of a disk maps, by the UUID of the disk.
    pub fn mapped(&self, uuid: &str) -> Result<u64> {
        let found = self.engine.with_catalog(|catalog| {
            let mut disks = catalog.disks().filter(|disk| is_visible(disk));
            disks.find(|disk| names::uuid_text(&disk.uuid) == uuid).cloned()
        });
        let disk = found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no disk {uuid} any more")))?;
        quota::mapped(&*self.device_of(&disk, &disk))
    }

    /// The names that [`Native::open_device`] can open.
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

    /// Prevents the deletion of a snapshot until the result is dropped.
    fn hold(&self, disk: &Object, snapshot: &Object) -> Result<Client> {
        self.switches.attach(Identity::Native(snapshot.id), || Ok(self.device_of(disk, snapshot)))
    }

    /// Number of clients that have an object open.
    fn clients(&self, id: u64) -> u64 {
        self.switches.clients(&Identity::Native(id))
    }

    fn refuse_in_use(&self, id: u64, what: &str) -> Result<()> {
        self.switches.refuse_in_use(&Identity::Native(id), what)
    }

    /// Updates the capacity that the open devices of a disk report.
    fn announce_capacity(&self, id: u64, capacity: u64) {
        if let Some(open) = self.capacities.lock().get(&id).and_then(Weak::upgrade) {
            open.0.store(capacity, Ordering::Release);
        }
    }

    pub(crate) fn find_disk(&self, name: &str) -> Result<Object> {
        self.engine.with_catalog(|catalog| catalog.disk(name).cloned()).filter(is_visible).ok_or_else(|| {
            self.not_found(format!("there is no disk '{}'; 'lamina disk list' lists the disks", name.escape_debug()))
        })
    }

    /// A snapshot that users see. A temporary snapshot of an operation counts as not found, because the operation
    /// deletes it even if a clone is based on it.
    pub(crate) fn find_snapshot(&self, disk: &Object, name: &str) -> Result<Object> {
        let found = self.engine.with_catalog(|catalog| catalog.snapshot(disk.id, name).cloned());
        found.filter(|snapshot| !snapshot.incomplete).ok_or_else(|| {
            self.not_found(format!(
                "disk '{0}' has no snapshot '{1}'; 'lamina snapshot list {0}' lists its snapshots",
                disk.name,
                name.escape_debug()
            ))
        })
    }

    /// The error for a name that was not found. The name may belong to a disk whose record cannot be read; then the
    /// error says so.
    fn not_found(&self, mut text: String) -> Error {
        if self.engine.with_catalog(|catalog| !catalog.lost().is_empty()) {
            text.push_str("; a page of the catalog is damaged, so disks and snapshots are missing: run 'lamina check'");
        }
        Error::new(ErrorKind::NotFound, text)
    }
}
