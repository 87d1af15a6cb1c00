//! Changes of the catalog: disks, snapshots, clones. One change runs at a time, and each is durable when its call
//! returns.

use super::admit::APPEND_BYTES;
use super::log::Cost;
use super::{Engine, Head, Meta};
use crate::catalog::{Catalog, NAME_MAX, Object, ObjectState, Provisioning};
use crate::journal::Operation;
use crate::pages::patiently;
use crate::{Error, ErrorKind, Result};
use std::time::Duration;

/// The most journal bytes of one change of the catalog (8 MiB). The limit exists because a change is appended as one
/// batch.
const CHANGE_BYTES_MAX: u64 = 8 << 20;
/// Pages that a changed record dirties: the page of the record, and the page with the count of its root.
pub(super) const PAGES_PER_RECORD: u64 = 2;
/// The longest record of the catalog, in bytes.
pub(super) const RECORD_MAX: u64 = crate::catalog::SLOT_SIZE as u64;

/// Parameters of a new disk.
#[derive(Clone, Debug)]
pub struct NewDisk {
    /// Name of the disk.
    pub name: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Provisioning type.
    pub provisioning: Provisioning,
    /// UUID of the disk.
    pub uuid: [u8; 16],
    /// True while the content is being written: the next opening deletes a disk that is still incomplete.
    pub incomplete: bool,
}

/// Parameters of a new snapshot.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// The disk of which the snapshot is taken.
    pub disk: u64,
    /// Name, unique within the disk.
    pub name: String,
    /// UUID of the snapshot.
    pub uuid: [u8; 16],
    /// True for a snapshot that only an operation under way needs: the next opening deletes it.
    pub incomplete: bool,
}

/// The identity and creation time that a copy takes over from its original.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskIdentity {
    /// UUID of the copy.
    pub uuid: [u8; 16],
    /// Creation time, in seconds since 1970.
    pub created: u64,
}

/// How a disk that was made under a temporary name becomes visible.
#[derive(Clone, Debug)]
pub enum ReceiveCommit {
    /// The disk gets this name, and becomes independent of its origin.
    Disk {
        /// The received disk, by its id.
        id: u64,
        /// The disk's new name.
        name: String,
        /// The disk's identity and creation time.
        identity: DiskIdentity,
    },
    /// Another disk takes over the disk's snapshot, and the content of that snapshot. The disk itself is deleted.
    Update {
        /// The disk that is deleted.
        id: u64,
        /// The disk's snapshot.
        snapshot: u64,
        /// The disk that takes the snapshot over.
        disk: u64,
    },
}

#[cfg(debug_assertions)]
thread_local! {
    /// Whether this thread looks at a catalog now. Only debug builds know.
    static LOOKING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Fails in debug builds if this thread looks at a catalog ([`Engine::with_catalog`]). For locks that are held while
/// the metadata is locked: a thread that takes them in the other order may deadlock with another one.
pub fn assert_not_looking() {
    #[cfg(debug_assertions)]
    assert!(!LOOKING.get(), "a lock is taken while the metadata is locked");
}

impl Engine {
    /// Runs `look` on the catalog, with the metadata locked. `look` takes no other lock.
    pub fn with_catalog<T>(&self, look: impl FnOnce(&crate::catalog::Catalog) -> T) -> T {
        let meta = self.meta.lock();
        #[cfg(debug_assertions)]
        LOOKING.set(true);
        let seen = look(&meta.catalog);
        #[cfg(debug_assertions)]
        LOOKING.set(false);
        seen
    }

    /// The highest cost of a change of the catalog. An empty journal and an empty images file always have room for it.
    pub(super) fn change_cost(&self) -> Cost {
        Cost { bytes: (self.log.ring() / 4).min(CHANGE_BYTES_MAX), pages: self.log.admission.page_limit() / 2 }
    }

    /// Refuses changes that do not fit into one batch of the journal: all operations of a change go into one batch.
    fn refuse_too_many(&self, meta: &Meta, operations: &[Operation], limit: Cost) -> Result<()> {
        let size: u64 = operations.iter().map(|operation| operation.size() as u64).sum();
        if size + APPEND_BYTES <= limit.bytes {
            let records = operations.len() as u64;
            // Records share pages of the catalog, and their roots share table pages. So a large number of records makes
            // at most all these pages dirty.
            let catalog = (meta.catalog.slots() + records) / crate::catalog::SLOTS_PER_PAGE as u64 + 1;
            let roots = meta.map.regions() * crate::space::REGION_PAGES;
            let pages = (records * PAGES_PER_RECORD).min(catalog.min(records) + roots.min(records) + PAGES_PER_RECORD);
            if pages > limit.pages {
                // The grant does not cover these pages, so the images file grows by their number.
                self.reserve_images(self.log.admission.capacity() + pages)?;
            }
            return Ok(());
        }
        Err(self.too_many(operations.len()))
    }

    /// The error for a request of more changes than fit into one batch of the journal.
    pub(super) fn too_many(&self, changes: usize) -> Error {
        Error::new(
            ErrorKind::Invalid,
            format!(
                "{changes} changes in one request do not fit into one batch of a journal of {} bytes: make fewer at a \
                 time",
                self.log.ring()
            ),
        )
    }

    /// Carries out the catalog operations that `plan` returns, all of them or none, and makes them durable.
    fn change<T>(&self, plan: impl FnOnce(&mut crate::catalog::Catalog) -> Result<(Vec<Operation>, T)>) -> Result<T> {
        self.check_running()?;
        self.make_journal_room()?;
        self.reserve_records_ahead(0)?;
        let limit = self.change_cost();
        let grant = self.admit(limit)?;
        let outcome = self.enqueue_change(limit, plan)?;
        // The append uses a grant that is taken before the first one is released. If a checkpoint for room failed here,
        // an error would be returned for a change that is carried out and becomes durable with the next batch. By now
        // the change itself counts as pending bytes and dirty pages. So the first grant is released before the I/O, and
        // writers can use the part of the grant that the change did not need.
        let room = match self.log.admission.try_admit(Cost { bytes: APPEND_BYTES, pages: 0 }) {
            Some(room) => {
                drop(grant);
                room
            }
            None => grant,
        };
        self.append_changes(false)?;
        drop(room);
        Ok(outcome)
    }

    /// Like [`Engine::change`], but does not make the change durable. The caller holds a grant of `limit`. After an
    /// error nothing has changed, unless the datastore has stopped.
    pub(super) fn enqueue_change<T>(
        &self,
        limit: Cost,
        plan: impl FnOnce(&mut crate::catalog::Catalog) -> Result<(Vec<Operation>, T)>,
    ) -> Result<T> {
        let mut meta = self.meta.lock();
        let (operations, outcome) = plan(&mut meta.catalog)?;
        // Room is reserved before the change: a change that was carried out in memory cannot be undone.
        let records = operations.iter().filter(|operation| !matches!(operation, Operation::Trash { .. })).count();
        if records > 0 {
            // Only new and changed records need room.
            self.reserve_metadata(&meta, records as u64)?;
        }
        self.refuse_too_many(&meta, &operations, limit)?;
        let last = operations.len().saturating_sub(1);
        operations.iter().try_for_each(|operation| meta.check_readable(operation))?;
        for (i, operation) in operations.into_iter().enumerate() {
            self.carry_out(&mut meta, operation, 0)?;
            if i < last {
                meta.pending.join_last();
            }
        }
        self.update_headroom(&meta);
        Ok(outcome)
    }

    /// Makes an empty disk. The caller then allocates the blocks of thick disks with [`super::BulkWriter`].
    pub fn create_disk(&self, new: NewDisk) -> Result<u64> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = new_disk(catalog, &new)?;
            Ok((vec![Operation::Put { record: object.encode() }], object.id))
        })
    }

    /// Marks the content of a disk as complete.
    pub fn complete_disk(&self, id: u64) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { incomplete: false, ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Replaces a disk by a new one, in one change. The new disk becomes complete, and gets the name, the identity and
    /// the creation time of the old disk. The old disk, if it is in this store, gets the name `aside` and becomes
    /// incomplete, so that the next opening deletes it unless the caller deletes it first.
    pub fn replace_disk(&self, old: Option<(u64, &str)>, new: u64, name: &str, identity: DiskIdentity) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            check_name(name)?;
            let mut operations = Vec::with_capacity(2);
            if let Some((old, aside)) = old {
                check_name(aside)?;
                let object = Object { name: aside.to_owned(), incomplete: true, ..catalog.get(old)?.clone() };
                operations.push(Operation::Put { record: object.encode() });
            }
            let other = catalog.disk(name).map(|disk| disk.id);
            if other.is_some_and(|other| other != new && old.is_none_or(|(old, _)| old != other)) {
                return Err(Error::new(ErrorKind::Exists, format!("there is a disk '{name}' already")));
            }
            let (uuid, created) = (identity.uuid, identity.created);
            let made = catalog.whole(new)?.clone();
            let object = Object { name: name.to_owned(), incomplete: false, uuid, created, ..made };
            operations.push(Operation::Put { record: object.encode() });
            Ok((operations, ()))
        })
    }

    /// Marks a disk that was replaced by a disk in another store as incomplete, so that the next opening deletes it,
    /// unless the caller deletes it first.
    pub fn retire_disk(&self, id: u64, aside: &str) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            check_name(aside)?;
            let object = Object { name: aside.to_owned(), incomplete: true, ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Gives a snapshot the identity and creation time of its original.
    pub fn set_snapshot_identity(&self, id: u64, identity: DiskIdentity) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { uuid: identity.uuid, created: identity.created, ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Gives a disk another name.
    pub fn rename_disk(&self, id: u64, name: &str) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            check_name(name)?;
            if let Some(other) = catalog.disk(name)
                && other.id != id
            {
                return Err(Error::new(ErrorKind::Exists, format!("there is a disk '{name}' already")));
            }
            let object = Object { name: name.to_owned(), ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Gives a snapshot another name.
    pub fn rename_snapshot(&self, id: u64, name: &str) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            check_name(name)?;
            let object = Object { name: name.to_owned(), ..catalog.get(id)?.clone() };
            if catalog.snapshot(object.disk, name).is_some() {
                return Err(Error::new(ErrorKind::Exists, format!("the disk has a snapshot '{name}' already")));
            }
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Changes the capacity of a disk. Before it shrinks, the caller must have discarded the blocks past the new end.
    pub fn set_capacity(&self, id: u64, capacity: u64) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { capacity, ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Reserves more blocks for a thick disk, if enough are free.
    pub fn set_more_aside(&self, id: u64, more: u64) -> Result<()> {
        let _control = self.control.lock();
        let _room = self.claim_blocks(more)?;
        self.change(|catalog| {
            let object = catalog.get(id)?.clone();
            let object = Object { reserved: object.reserved + more, ..object };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Lowers the blocks reserved for a thick disk to this number, if more are reserved. Concurrent writes may have
    /// used some of the reserved blocks.
    pub fn set_aside_at_most(&self, id: u64, most: u64) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = catalog.get(id)?.clone();
            let object = Object { reserved: object.reserved.min(most), ..object };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Waits until all writes of a snapshot are in the map. `NotFound` if they never will be.
    pub(super) fn wait_sealed(&self, snapshot: u64) -> Result<()> {
        let failures = self.writeback.failing.count();
        loop {
            let (state, disk) = self.with_catalog(|catalog| catalog.get(snapshot).map(|o| (o.state, o.disk)))?;
            if state != ObjectState::Unsealed {
                return Ok(());
            }
            self.check_running()?;
            let Some(head) = self.buffers.find(disk) else {
                // A disk has a buffer as long as one of its snapshots is not sealed, except a disk whose record was
                // lost before the opening.
                if self.with_catalog(|catalog| catalog.get(snapshot).map(|o| o.state))? != ObjectState::Unsealed {
                    return Ok(());
                }
                let text = "the last writes of the snapshot are lost with the record of its disk; run 'lamina check'";
                return Err(Error::new(ErrorKind::NotFound, text));
            };
            self.check_sealable(&head)?;
            // The threads have ended if a close was tried and has failed.
            if self.options.threads && self.running.goes_on() {
                self.request(|work| work.write_back = true);
                self.buffers.wait_sealed(Duration::from_millis(5));
                self.writeback.failing.check(failures)?;
            } else {
                self.settle(&head)?;
            }
        }
    }

    /// Fails if the oldest snapshot of a disk that is not sealed cannot be sealed, because the references of its root
    /// are lost. Write-back tries to seal it again and again, and its failures do not count while other disks make
    /// progress.
    fn check_sealable(&self, head: &Head) -> Result<()> {
        if head.lock().layers.complete().is_none() {
            return Ok(());
        }
        patiently(|| self.meta.look(|meta| meta.references_of_root(head.id)))
    }

    /// Makes linked clones of a snapshot: all of them, or none.
    pub fn clone_snapshot(&self, snapshot: u64, new: &[NewDisk]) -> Result<Vec<u64>> {
        let _control = self.control.lock();
        self.wait_sealed(snapshot)?;
        let _fetch = self.meta.bring_in(|meta| meta.survey_roots(&[snapshot]));
        self.change(|catalog| {
            let source = catalog.whole(snapshot)?.clone();
            let mut operations = Vec::with_capacity(new.len() + 1);
            if source.incomplete {
                // The snapshot was taken for these clones, and is kept if they are made.
                operations.push(Operation::Put { record: Object { incomplete: false, ..source.clone() }.encode() });
            }
            let mut ids = Vec::with_capacity(new.len());
            let mut names = std::collections::BTreeSet::new();
            for new in new {
                if !names.insert(&new.name) {
                    return Err(Error::new(ErrorKind::Invalid, format!("the name '{}' is given twice", new.name)));
                }
                let object = Object { origin: snapshot, parent: 0, ..new_disk(catalog, new)? };
                debug_assert_eq!(object.capacity, source.capacity);
                ids.push(object.id);
                operations.push(Operation::Clone { snapshot, record: object.encode() });
            }
            Ok((operations, ids))
        })
    }

    /// Deletes a snapshot: its name at once, its tree in the background. Does nothing if it is deleted already.
    pub fn delete_snapshot(&self, snapshot: u64) -> Result<()> {
        let _control = self.control.lock();
        self.wait_sealed(snapshot)?;
        self.change(|catalog| {
            let left = is_left(catalog, snapshot)?;
            Ok((left.then_some(Operation::Trash { object: snapshot }).into_iter().collect(), ()))
        })
    }

    /// Deletes a disk and its snapshots, except the snapshots with a record in `handed_over`: they become snapshots of
    /// another disk. The new record of that disk is in `handed_over` too. Does nothing if the disk is deleted already.
    pub fn delete_disk(&self, disk: u64, handed_over: &[Object]) -> Result<()> {
        let _control = self.control.lock();
        for object in handed_over.iter().filter(|object| object.is_snapshot()) {
            self.wait_sealed(object.id)?;
        }
        self.change_heads(&[disk], &|_| Ok(0), |catalog| {
            if !is_left(catalog, disk)? {
                return Ok((Vec::new(), ()));
            }
            let mut operations = Vec::with_capacity(handed_over.len() + 1);
            for object in handed_over {
                check_name(&object.name)?;
                let state = catalog.get(object.id)?.state;
                operations.push(Operation::Put { record: Object { state, ..object.clone() }.encode() });
            }
            let left =
                catalog.snapshots_of(disk).filter(|snapshot| handed_over.iter().all(|object| object.id != snapshot.id));
            operations.extend(left.map(|snapshot| Operation::Trash { object: snapshot.id }));
            operations.push(Operation::Trash { object: disk });
            Ok((operations, ()))
        })
    }

    /// Reverts a disk to one of its snapshots.
    pub fn revert(&self, disk: u64, snapshot: u64) -> Result<()> {
        let _control = self.control.lock();
        self.wait_sealed(snapshot)?;
        let lacks = |catalog: &Catalog| lacks(catalog, disk, snapshot);
        let _fetch = self.meta.bring_in(|meta| meta.survey_roots(&[snapshot]));
        self.change_heads(&[disk], &lacks, |catalog| {
            let mut operations = Vec::new();
            catalog.whole(snapshot)?;
            let object = catalog.whole(disk)?.clone();
            if object.provisioning != Provisioning::Thin {
                // The head shares all its blocks with the snapshot after the change, so every write will need a new
                // block.
                let object = Object { reserved: catalog.get(snapshot)?.size_in_blocks(), ..object };
                operations.push(Operation::Put { record: object.encode() });
            }
            let trash = catalog.allocate_id();
            operations.push(Operation::Revert { disk, snapshot, trash });
            Ok((operations, ()))
        })
    }

    /// Makes disks with temporary names visible: all of them, or none.
    pub fn arrive(&self, arrivals: &[ReceiveCommit]) -> Result<()> {
        let _control = self.control.lock();
        let mut heads = Vec::new();
        for arrival in arrivals {
            if let ReceiveCommit::Update { id, snapshot, disk } = arrival {
                self.wait_sealed(*snapshot)?;
                heads.extend([*id, *disk]);
            }
        }
        let lacks = |catalog: &Catalog| {
            arrivals.iter().try_fold(0, |sum, arrival| match arrival {
                ReceiveCommit::Update { snapshot, disk, .. } => Ok(sum + lacks(catalog, *disk, *snapshot)?),
                ReceiveCommit::Disk { .. } => Ok(sum),
            })
        };
        self.change_heads(&heads, &lacks, |catalog| {
            let mut operations = Vec::new();
            for arrival in arrivals {
                match arrival {
                    ReceiveCommit::Disk { id, name, identity } => {
                        check_name(name)?;
                        if catalog.disk(name).is_some() {
                            return Err(Error::new(ErrorKind::Exists, format!("there is a disk '{name}' already")));
                        }
                        let (uuid, created) = (identity.uuid, identity.created);
                        let made = catalog.get(*id)?.clone();
                        let name = name.clone();
                        let object = Object { name, uuid, created, incomplete: false, origin: 0, ..made };
                        operations.push(Operation::Put { record: object.encode() });
                    }
                    ReceiveCommit::Update { id, snapshot, disk } => {
                        let (target, object) = (catalog.whole(*disk)?.clone(), catalog.whole(*snapshot)?.clone());
                        if catalog.snapshot(*disk, &object.name).is_some() {
                            let text = format!("disk '{}' has a snapshot '{}' already", target.name, object.name);
                            return Err(Error::new(ErrorKind::Exists, text));
                        }
                        let size = object.size_in_blocks();
                        let moved = Object { disk: *disk, parent: target.parent, ..object };
                        operations.push(Operation::Put { record: moved.encode() });
                        if target.provisioning != Provisioning::Thin {
                            let object = Object { reserved: size, ..target };
                            operations.push(Operation::Put { record: object.encode() });
                        }
                        let trash = catalog.allocate_id();
                        operations.push(Operation::Revert { disk: *disk, snapshot: *snapshot, trash });
                        operations.push(Operation::Trash { object: *id });
                    }
                }
            }
            Ok((operations, ()))
        })
    }

    /// Makes a linked clone independent of its origin. The blocks that both use stay, because they are
    /// reference-counted.
    pub fn detach(&self, disk: u64) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { origin: 0, ..catalog.get(disk)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }
}

/// Whether an object is still to be deleted. False if it was deleted and its tree is being dropped; after that it does
/// not exist.
fn is_left(catalog: &Catalog, id: u64) -> Result<bool> {
    Ok(catalog.get(id)?.state != ObjectState::Trash)
}

/// The number of further blocks that must be reserved when a thick disk is reverted to a snapshot.
fn lacks(catalog: &Catalog, disk: u64, snapshot: u64) -> Result<u64> {
    let (object, snapshot) = (catalog.get(disk)?, catalog.get(snapshot)?);
    let thick = object.provisioning != Provisioning::Thin;
    Ok(if thick { snapshot.size_in_blocks().saturating_sub(object.reserved) } else { 0 })
}

pub(super) fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Error::new(ErrorKind::Invalid, format!("a name must have 1 to {NAME_MAX} bytes")));
    }
    Ok(())
}

fn new_disk(catalog: &mut crate::catalog::Catalog, new: &NewDisk) -> Result<Object> {
    check_name(&new.name)?;
    if catalog.disk(&new.name).is_some() {
        return Err(Error::new(ErrorKind::Exists, format!("there is a disk '{}' already", new.name)));
    }
    Ok(Object {
        id: catalog.allocate_id(),
        state: ObjectState::Disk,
        provisioning: new.provisioning,
        incomplete: new.incomplete,
        root: None,
        capacity: new.capacity,
        disk: 0,
        parent: 0,
        origin: 0,
        created: backend::clock::seconds(),
        reserved: 0,
        uuid: new.uuid,
        name: new.name.clone(),
    })
}
