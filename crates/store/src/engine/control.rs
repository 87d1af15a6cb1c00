//! Changes of the catalog: disks, snapshots, clones. One at a time, durable when they return.

use super::admission::Cost;
use super::admit::APPEND_BYTES;
use super::apply::Effects;
use super::{Engine, Head};
use crate::catalog::{NAME_MAX, Object, Provisioning, State};
use crate::journal::Operation;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The most bytes of the journal that one change of the catalog takes (8 MiB): it goes into one batch.
const CHANGE_BYTES_MAX: u64 = 8 << 20;
/// Pages that a changed record dirties: its own, and the count of its root.
const PAGES_PER_RECORD: u64 = 2;
/// The longest record.
const RECORD_MAX: u64 = crate::catalog::SLOT_SIZE as u64;

/// What a new disk is to be.
#[derive(Clone, Debug)]
pub struct NewDisk {
    /// Name.
    pub name: String,
    /// Bytes.
    pub capacity: u64,
    /// Provisioning type.
    pub provisioning: Provisioning,
    /// Identity.
    pub uuid: [u8; 16],
    /// True while its content is being made: it is removed at the next opening if that never ends.
    pub incomplete: bool,
}

/// What a new snapshot is to be.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// The disk.
    pub disk: u64,
    /// Name, unique within the disk.
    pub name: String,
    /// Identity.
    pub uuid: [u8; 16],
    /// True for one that only serves an operation under way: it is removed at the next opening.
    pub incomplete: bool,
}

/// What a copy has in common with its original.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Likeness {
    /// Identity.
    pub uuid: [u8; 16],
    /// Seconds since 1970.
    pub created: u64,
}

/// What becomes of a disk that was made out of sight.
#[derive(Clone, Debug)]
pub enum Arrival {
    /// It is a disk of that name, independent of what it began as.
    Disk {
        /// The disk.
        id: u64,
        /// Its name.
        name: String,
        /// Its identity and age.
        like: Likeness,
    },
    /// Another disk gets its snapshot, and is what the snapshot holds; it goes itself.
    Update {
        /// The disk that goes.
        id: u64,
        /// Its snapshot.
        snapshot: u64,
        /// The disk that gets it.
        disk: u64,
    },
}

impl Engine {
    /// Looks at the catalog.
    pub fn with_catalog<T>(&self, look: impl FnOnce(&crate::catalog::Catalog) -> T) -> T {
        look(&self.meta.lock().catalog)
    }

    /// What a change of the catalog may cost: as much as every datastore has room for at once.
    fn change_cost(&self) -> Cost {
        Cost { bytes: (self.journal_size() / 4).min(CHANGE_BYTES_MAX), pages: self.admission.page_limit() / 2 }
    }

    /// What takes effect at once goes into one batch of the journal: it must fit.
    fn refuse_too_many(&self, operations: &[Operation], limit: Cost) -> Result<()> {
        let size: u64 = operations.iter().map(|operation| operation.size() as u64).sum();
        if size + APPEND_BYTES <= limit.bytes && operations.len() as u64 * PAGES_PER_RECORD <= limit.pages {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{} changes at once are more than the journal of {} bytes takes as one: make fewer at a time",
                operations.len(),
                self.journal_size()
            ),
        ))
    }

    /// Carries out catalog operations that `plan` names after a look at the catalog, all of them or none, and makes
    /// them durable.
    fn change<T>(&self, plan: impl FnOnce(&mut crate::catalog::Catalog) -> Result<(Vec<Operation>, T)>) -> Result<T> {
        self.check_running()?;
        self.make_journal_room()?;
        let limit = self.change_cost();
        let grant = self.admit(limit)?;
        let outcome = {
            let mut meta = self.meta.lock();
            let (operations, outcome) = plan(&mut meta.catalog)?;
            // Room first: what is carried out in memory cannot be taken back.
            let records = operations.iter().filter(|operation| !matches!(operation, Operation::Trash { .. })).count();
            self.reserve_metadata(&meta, records as u64)?;
            self.refuse_too_many(&operations, limit)?;
            let last = operations.len().saturating_sub(1);
            for (i, operation) in operations.into_iter().enumerate() {
                self.carry_out(&mut meta, operation, 0)?;
                if i < last {
                    meta.join_last();
                }
            }
            self.update_headroom(&meta);
            outcome
        };
        drop(grant);
        self.commit_changes()?;
        Ok(outcome)
    }

    /// Makes an empty disk. Space for thick types is taken by the caller through [`super::BulkWriter`].
    pub fn create_disk(&self, new: NewDisk) -> Result<u64> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = new_disk(catalog, &new)?;
            Ok((vec![Operation::Put { record: object.encode() }], object.id))
        })
    }

    /// The content of a disk being made is complete.
    pub fn complete_disk(&self, id: u64) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { incomplete: false, ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// A disk that was made to take another's place takes it, at once and whole: it is complete, and has that one's
    /// name, identity and age. The other, where it is in this store, gets the name `aside` and is incomplete from now
    /// on, so that it is gone after the next opening at the latest.
    pub fn replace_disk(&self, old: Option<(u64, &str)>, new: u64, name: &str, like: Likeness) -> Result<()> {
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
            let (uuid, created) = (like.uuid, like.created);
            let made = catalog.get(new)?.clone();
            let object = Object { name: name.to_owned(), incomplete: false, uuid, created, ..made };
            operations.push(Operation::Put { record: object.encode() });
            Ok((operations, ()))
        })
    }

    /// Takes the name from a disk that another has replaced elsewhere: it is incomplete from now on, so that it is gone
    /// after the next opening at the latest.
    pub fn retire_disk(&self, id: u64, aside: &str) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            check_name(aside)?;
            let object = Object { name: aside.to_owned(), incomplete: true, ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Gives a snapshot the identity and age of the one it is a copy of.
    pub fn liken_snapshot(&self, id: u64, like: Likeness) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { uuid: like.uuid, created: like.created, ..catalog.get(id)?.clone() };
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

    /// Changes the capacity of a disk. What lies behind a smaller capacity must have been discarded before.
    pub fn set_capacity(&self, id: u64, capacity: u64) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { capacity, ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Changes how many blocks are set aside for a thick disk.
    pub fn set_aside(&self, id: u64, reserved: u64) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { reserved, ..catalog.get(id)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }

    /// Takes snapshots of several disks at one point: every write acknowledged before this call is in them, none that
    /// comes after it is. Durable when this returns, in one small append; the data itself is as durable as it was.
    pub fn snapshot(&self, wanted: &[NewSnapshot]) -> Result<Vec<u64>> {
        let _control = self.control.lock();
        self.check_running()?;
        self.make_journal_room()?;
        self.extend_for_snapshots(wanted)?;
        // Two records each, and what completes the snapshot.
        let _grant = self.admit(Cost {
            bytes: APPEND_BYTES + wanted.len() as u64 * (2 * (RECORD_MAX + 16) + 32),
            pages: wanted.len() as u64 * 3 * PAGES_PER_RECORD,
        })?;
        let mut ids = Vec::new();
        let mut objects = Vec::new();
        {
            let mut guard = self.meta.lock();
            let meta = &mut *guard;
            for (i, new) in wanted.iter().enumerate() {
                check_name(&new.name)?;
                let disk = meta.catalog.get(new.disk)?.clone();
                let again = wanted[..i].iter().any(|other| other.disk == new.disk);
                if again || meta.catalog.snapshot(new.disk, &new.name).is_some() {
                    return Err(Error::new(
                        ErrorKind::Exists,
                        format!("disk '{}' has a snapshot '{}' already, or is named twice", disk.name, new.name),
                    ));
                }
                let mut reserved = disk.reserved;
                if disk.provisioning != Provisioning::Thin {
                    // From now on every write of the thick disk needs a new place: that is set aside.
                    reserved = disk.capacity.div_ceil(backend::BLOCK_SIZE as u64);
                }
                let id = meta.catalog.allocate_id();
                ids.push(id);
                objects.push(Object {
                    id,
                    state: State::Unsealed,
                    incomplete: new.incomplete,
                    root: None,
                    disk: disk.id,
                    origin: 0,
                    created: backend::clock::seconds(),
                    reserved: 0,
                    uuid: new.uuid,
                    name: new.name.clone(),
                    ..disk.clone()
                });
                objects.push(Object { parent: id, reserved, ..disk });
            }
            self.reserve_metadata(meta, objects.len() as u64)?;
        }
        let operations: Vec<Operation> =
            objects.iter().map(|object| Operation::Put { record: object.encode() }).collect();
        let mut heads: Vec<(Arc<Head>, u64)> =
            wanted.iter().zip(&ids).map(|(new, id)| (self.head(new.disk), *id)).collect();
        heads.sort_unstable_by_key(|(head, _)| head.id);

        let disks: Vec<u64> = heads.iter().map(|(head, _)| head.id).collect();
        let _fetch = self.bring_in(|meta| meta.survey_roots(&disks));
        let mut commit = self.commit.lock();
        let through = self.through.write();
        {
            // All buffers at once: this is the point in time.
            let mut buffers: Vec<_> = heads.iter().map(|(head, _)| head.buffer.lock()).collect();
            let mut meta = self.meta.lock();
            for operation in &operations {
                meta.apply(operation, &mut Effects::default()).map_err(|error| self.stop(error))?;
            }
            for ((_, snapshot), buffer) in heads.iter().zip(&mut buffers) {
                if buffer.layers.close(*snapshot) {
                    self.unsealed.fetch_add(1, Ordering::AcqRel);
                } else {
                    self.carry_out(&mut meta, Operation::Seal { snapshot: *snapshot }, 0)?;
                }
            }
            self.update_headroom(&meta);
        }
        drop(through);
        self.append_urgent(&mut commit, &operations)?;
        self.request(|work| work.write_back = true);
        Ok(ids)
    }

    /// Reserves what snapshots of thick disks need, or refuses.
    fn extend_for_snapshots(&self, wanted: &[NewSnapshot]) -> Result<()> {
        let mut more = 0;
        let mut names = Vec::new();
        self.with_catalog(|catalog| {
            for disk in wanted.iter().filter_map(|new| catalog.find(new.disk)) {
                if disk.provisioning != Provisioning::Thin {
                    more += disk.capacity.div_ceil(backend::BLOCK_SIZE as u64).saturating_sub(disk.reserved);
                    names.push(disk.name.clone());
                }
            }
        });
        if more == 0 {
            return Ok(());
        }
        self.extend(self.claims.load(Ordering::Acquire) + more).map_err(|error| {
            error.context(format!(
                "disk {} is thick and a snapshot of it needs its whole size again: {} bytes",
                names.join(", "),
                more * backend::BLOCK_SIZE as u64
            ))
        })
    }

    /// Waits until the last writes of a snapshot are in the map.
    pub(super) fn wait_sealed(&self, snapshot: u64) -> Result<()> {
        loop {
            let (state, disk) = self.with_catalog(|catalog| catalog.get(snapshot).map(|o| (o.state, o.disk)))?;
            if state != State::Unsealed {
                return Ok(());
            }
            self.check_running()?;
            if self.options.threads {
                self.request(|work| work.write_back = true);
                let mut sealed = self.sealed.lock();
                self.sealed_ready.wait_for(&mut sealed, Duration::from_millis(5));
            } else {
                self.settle(&self.head(disk))?;
            }
        }
    }

    /// Makes linked clones of a snapshot: all of them, or none.
    pub fn clone_snapshot(&self, snapshot: u64, new: &[NewDisk]) -> Result<Vec<u64>> {
        let _control = self.control.lock();
        self.wait_sealed(snapshot)?;
        let _fetch = self.bring_in(|meta| meta.survey_roots(&[snapshot]));
        self.change(|catalog| {
            let source = catalog.get(snapshot)?.clone();
            let mut operations = Vec::with_capacity(new.len() + 1);
            if source.incomplete {
                // Taken for these clones: it stays if they do.
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

    /// Forgets what is buffered for a disk and tells whoever has it open that it is gone. Under control.
    fn abandon(&self, disk: u64) -> Result<()> {
        let head = self.head(disk);
        self.settle(&head)?;
        let _gate = self.gate.lock();
        let _through = self.through.write();
        let mut buffer = head.buffer.lock();
        let gone = buffer.layers.clear();
        buffer.gone = true;
        drop(buffer);
        self.give_back(gone);
        self.heads.write().remove(&disk);
        Ok(())
    }

    /// Deletes a snapshot: its name at once, its blocks in the background.
    pub fn delete_snapshot(&self, snapshot: u64) -> Result<()> {
        let _control = self.control.lock();
        self.wait_sealed(snapshot)?;
        self.change(|_| Ok((vec![Operation::Trash { object: snapshot }], ())))
    }

    /// Deletes a disk and its snapshots, but for those that `heirs` has new records of: they are handed over to another
    /// disk, whose record is among them too.
    pub fn delete_disk(&self, disk: u64, heirs: &[Object]) -> Result<()> {
        let _control = self.control.lock();
        for object in heirs.iter().filter(|object| object.is_snapshot()) {
            self.wait_sealed(object.id)?;
        }
        self.abandon(disk)?;
        self.change(|catalog| {
            let mut operations = Vec::with_capacity(heirs.len() + 1);
            for object in heirs {
                check_name(&object.name)?;
                let state = catalog.get(object.id)?.state;
                operations.push(Operation::Put { record: Object { state, ..object.clone() }.encode() });
            }
            let left = catalog.snapshots_of(disk).filter(|snapshot| heirs.iter().all(|heir| heir.id != snapshot.id));
            operations.extend(left.map(|snapshot| Operation::Trash { object: snapshot.id }));
            operations.push(Operation::Trash { object: disk });
            Ok((operations, ()))
        })
    }

    /// Makes the head of a disk equal to one of its snapshots again.
    pub fn revert(&self, disk: u64, snapshot: u64) -> Result<()> {
        let _control = self.control.lock();
        self.wait_sealed(snapshot)?;
        let (thick, set_aside, size) = self.with_catalog(|catalog| {
            let (object, snapshot) = (catalog.get(disk)?, catalog.get(snapshot)?);
            let size = snapshot.capacity.div_ceil(backend::BLOCK_SIZE as u64);
            Ok((object.provisioning != Provisioning::Thin, object.reserved, size))
        })?;
        if thick {
            // All that the head gets is shared with the snapshot: every write will need a new place again.
            self.extend_for(size.saturating_sub(set_aside)).map_err(|error| {
                error.context("the disk is thick, and going back to a snapshot needs its whole size again")
            })?;
        }
        self.abandon(disk)?;
        let _fetch = self.bring_in(|meta| meta.survey_roots(&[snapshot]));
        self.change(|catalog| {
            let mut operations = Vec::new();
            if thick {
                let object = Object { reserved: size, ..catalog.get(disk)?.clone() };
                operations.push(Operation::Put { record: object.encode() });
            }
            let trash = catalog.allocate_id();
            operations.push(Operation::Revert { disk, snapshot, trash });
            Ok((operations, ()))
        })
    }

    /// Disks that were made out of sight take their places: all of them, or none.
    pub fn arrive(&self, arrivals: &[Arrival]) -> Result<()> {
        let _control = self.control.lock();
        for arrival in arrivals {
            if let Arrival::Update { id, snapshot, disk } = arrival {
                self.wait_sealed(*snapshot)?;
                let missing = self.with_catalog(|catalog| {
                    let (object, snapshot) = (catalog.get(*disk)?, catalog.get(*snapshot)?);
                    let size = snapshot.capacity.div_ceil(backend::BLOCK_SIZE as u64);
                    let thick = object.provisioning != Provisioning::Thin;
                    Ok(if thick { size.saturating_sub(object.reserved) } else { 0 })
                })?;
                if missing > 0 {
                    self.extend_for(missing).map_err(|error| {
                        error.context("the disk is thick, and what shares its blocks needs its whole size again")
                    })?;
                }
                self.abandon(*id)?;
                self.abandon(*disk)?;
            }
        }
        self.change(|catalog| {
            let mut operations = Vec::new();
            for arrival in arrivals {
                match arrival {
                    Arrival::Disk { id, name, like } => {
                        check_name(name)?;
                        if catalog.disk(name).is_some() {
                            return Err(Error::new(ErrorKind::Exists, format!("there is a disk '{name}' already")));
                        }
                        let (uuid, created) = (like.uuid, like.created);
                        let made = catalog.get(*id)?.clone();
                        let name = name.clone();
                        let object = Object { name, uuid, created, incomplete: false, origin: 0, ..made };
                        operations.push(Operation::Put { record: object.encode() });
                    }
                    Arrival::Update { id, snapshot, disk } => {
                        let (target, object) = (catalog.get(*disk)?.clone(), catalog.get(*snapshot)?.clone());
                        if catalog.snapshot(*disk, &object.name).is_some() {
                            let text = format!("disk '{}' has a snapshot '{}' already", target.name, object.name);
                            return Err(Error::new(ErrorKind::Exists, text));
                        }
                        let size = object.capacity.div_ceil(backend::BLOCK_SIZE as u64);
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

    /// Cuts the tie between a linked clone and the snapshot it started from. The blocks they share stay shared, by
    /// reference count, and belong to both alike.
    pub fn detach(&self, disk: u64) -> Result<()> {
        let _control = self.control.lock();
        self.change(|catalog| {
            let object = Object { origin: 0, ..catalog.get(disk)?.clone() };
            Ok((vec![Operation::Put { record: object.encode() }], ()))
        })
    }
}

fn check_name(name: &str) -> Result<()> {
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
        state: State::Disk,
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
