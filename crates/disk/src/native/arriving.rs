//! Native disks that are received from another datastore, and snapshots of native disks that are sent to one.
//!
//! 1. A disk that is being received is incomplete and has a hidden name. One change of the catalog makes it visible,
//!    together with all disks that were received with it.
//! 2. At first the disk is empty, or a clone of a snapshot that both sides have. That snapshot cannot be deleted
//!    meanwhile.
//! 3. Only the reception writes the disk, and always bypasses the write buffer. So the parts of the disk may be
//!    received in any order, and more than once.

use super::{Native, is_visible, stored};
use crate::info::Provisioning;
use crate::names;
use backend::BLOCK_SIZE;
use checksums::Checksums;
use error::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::ops::Range;
use store::catalog::{Object, Provisioning as Stored};
use store::engine::{BulkWriter, Condition, DiskIdentity, NewDisk, NewSnapshot, ReceiveCommit};

/// Most spans that one query of the map returns.
const SPANS: usize = 1024;

/// A completely received disk, and the parameters for making it visible.
pub(crate) struct Arrived {
    /// The hidden name.
    pub hidden: String,
    /// The new name, or the name of the disk that is updated.
    pub name: String,
    /// Identity of the disk, if it is new.
    pub uuid: [u8; 16],
    /// The snapshot that is taken of the disk: name, identity and creation time.
    pub snapshot: Option<(String, DiskIdentity)>,
    /// For an update: the identity of the snapshot of the updated disk that both sides have.
    pub update_from: Option<[u8; 16]>,
    /// Provisioning type of a new disk.
    pub provisioning: Provisioning,
}

impl Native {
    /// Identities and numbers of snapshots that probably share content with `snapshot`: first `snapshot`, then its
    /// ancestors, then the other snapshots of its disk.
    pub fn lineage(&self, disk: &str, snapshot: &str, most: usize) -> Result<Vec<([u8; 16], u64)>> {
        let disk = self.find_disk(disk)?;
        let snapshot = self.find_snapshot(&disk, snapshot)?;
        Ok(self.engine.with_catalog(|catalog| {
            let mut seen = BTreeSet::new();
            let mut found = Vec::new();
            let mut take = |object: &Object| {
                if !object.incomplete && seen.insert(object.id) && found.len() < most {
                    found.push((object.uuid, object.id));
                    return true;
                }
                false
            };
            let mut at = Some(&snapshot);
            while let Some(object) = at {
                if !take(object) {
                    break;
                }
                let before = match object.parent {
                    0 => catalog.find(object.disk).map_or(0, |disk| disk.origin),
                    parent => parent,
                };
                at = catalog.find(before).filter(|object| object.is_snapshot());
            }
            let mut others: Vec<&Object> = catalog.snapshots_of(disk.id).collect();
            others.sort_by_key(|object| std::cmp::Reverse(object.id));
            others.into_iter().for_each(|object| {
                take(object);
            });
            found
        }))
    }

    /// Identity and creation time of a snapshot.
    pub fn snapshot_identity(&self, disk: &str, snapshot: &str) -> Result<DiskIdentity> {
        let snapshot = self.find_snapshot(&self.find_disk(disk)?, snapshot)?;
        Ok(DiskIdentity { uuid: snapshot.uuid, created: snapshot.created })
    }

    /// The snapshot with that identity, of any visible disk.
    pub fn snapshot_of_uuid(&self, uuid: &[u8; 16]) -> Option<Object> {
        self.engine.with_catalog(|catalog| {
            let fits = |object: &&Object| object.is_snapshot() && !object.incomplete && object.uuid == *uuid;
            let of_visible = |object: &&Object| catalog.find(object.disk).is_some_and(is_visible);
            catalog.objects().filter(fits).filter(of_visible).min_by_key(|object| object.id).cloned()
        })
    }

    /// The disk with that name, if it is visible to users.
    pub fn visible(&self, name: &str) -> Option<Object> {
        self.engine.with_catalog(|catalog| catalog.disk(name).cloned()).filter(is_visible)
    }

    /// The name of the disk with that UUID, if it is visible to users.
    pub fn name_of(&self, uuid: &[u8; 16]) -> Option<String> {
        let fits = |disk: &&Object| disk.uuid == *uuid && is_visible(disk);
        self.engine.with_catalog(|catalog| catalog.disks().find(fits).map(|disk| disk.name.clone()))
    }

    /// The snapshot on which a disk is based. An error if a client uses the disk, or if the disk was changed since the
    /// snapshot.
    pub fn unchanged_base(&self, disk: &Object) -> Result<Object> {
        // Checked first, because this waits for the end of sessions whose clients have closed their connections.
        self.refuse_to_replace.get().map_or(Ok(()), |refuse| refuse(&disk.name))?;
        self.refuse_in_use(disk.id, &format!("disk '{}'", disk.name))?;
        let refuse = |why: &str| {
            let text = format!("disk '{}' cannot be updated: {why}", disk.name);
            Error::new(ErrorKind::Exists, text)
        };
        let base = self.engine.with_catalog(|catalog| catalog.find(disk.parent).cloned());
        let base = base.filter(|base| base.disk == disk.id && !base.incomplete);
        let base = base.ok_or_else(|| refuse("its content is not based on one of its own snapshots"))?;
        let mut same = base.capacity == disk.capacity;
        let blocks = 0..disk.capacity.div_ceil(BLOCK_SIZE as u64);
        self.engine.diff(base.id, disk.id, blocks, &mut |_| {
            same = false;
            Ok(false)
        })?;
        match same {
            true => Ok(base),
            false => {
                let why = format!(
                    "it was changed since its snapshot '{0}'; 'lamina snapshot revert {1}@{0}' discards those changes",
                    base.name, disk.name
                );
                Err(refuse(&why))
            }
        }
    }

    /// Creates a hidden disk, empty or as a clone of the snapshot `base`.
    pub fn make_hidden(
        &self,
        hidden: &str,
        capacity: u64,
        provisioning: Provisioning,
        base: Option<&Object>,
    ) -> Result<()> {
        super::check_capacity(hidden, capacity)?;
        let mut new = NewDisk {
            name: hidden.to_owned(),
            capacity,
            provisioning: stored(provisioning),
            uuid: names::new_uuid()?,
            incomplete: true,
        };
        let Some(base) = base else {
            return self.engine.create_disk(new).map(|_| ());
        };
        // A clone shares the snapshot's blocks, so it is thin.
        new.provisioning = Stored::Thin;
        new.capacity = base.capacity;
        let ids = {
            let _changes = self.changes.lock();
            self.engine.clone_snapshot(base.id, &[new])?
        };
        let Some(id) = ids.first().copied() else { return Ok(()) };
        if capacity != base.capacity {
            let resized = self.resize_by_id(id, capacity, true);
            // Writes back the data that the resize has buffered: later writes bypass the buffer, and a later writeback
            // would overwrite them.
            let settled = resized.and_then(|_| self.engine.settle(&self.engine.head(id)));
            if let Err(error) = settled {
                self.engine.delete_disk(id, &[])?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// The number of a hidden disk, if it exists.
    pub fn hidden_id(&self, name: &str) -> Option<u64> {
        self.of_hidden(name, |disk| disk.id)
    }

    /// The capacity of a hidden disk in bytes, if it exists.
    pub fn hidden_capacity(&self, name: &str) -> Option<u64> {
        self.of_hidden(name, |disk| disk.capacity)
    }

    fn of_hidden(&self, name: &str, property: impl Fn(&Object) -> u64) -> Option<u64> {
        self.engine.with_catalog(|catalog| catalog.disk(name).filter(|disk| disk.incomplete).map(property))
    }

    /// Writes whole blocks of a hidden disk; `sums` are their checksums.
    pub fn write_hidden(&self, id: u64, block: u64, bytes: &[u8], sums: &Checksums) -> Result<()> {
        BulkWriter::new(&self.engine, id).write_summed(block, bytes, sums)
    }

    /// Discards blocks of a hidden disk.
    pub fn discard_hidden(&self, id: u64, blocks: Range<u64>) -> Result<()> {
        BulkWriter::new(&self.engine, id).discard(blocks)
    }

    /// Makes all writes to a hidden disk durable.
    pub fn commit_hidden(&self, id: u64) -> Result<()> {
        BulkWriter::new(&self.engine, id).commit()
    }

    /// Reserves the space of a thick disk that is not reserved yet.
    fn reserve_holes(&self, id: u64) -> Result<()> {
        let capacity = self.engine.with_catalog(|catalog| catalog.get(id).map(|disk| disk.capacity))?;
        let (head, writer) = (self.engine.head(id), BulkWriter::new(&self.engine, id));
        let (mut at, end) = (0, capacity.div_ceil(BLOCK_SIZE as u64));
        while at < end {
            for span in self.engine.spans_head(&head, at..end, SPANS)? {
                let range = span.logical..span.logical + span.blocks;
                at = range.end;
                if span.condition == Condition::Hole {
                    writer.reserve(range)?;
                }
            }
        }
        Ok(())
    }

    /// Makes received disks visible, all at once.
    pub fn arrive(&self, arrived: &[Arrived], created: u64) -> Result<()> {
        for disk in arrived.iter().filter(|disk| disk.provisioning != Provisioning::Thin) {
            let id = self.hidden_or_lost(&disk.hidden)?;
            let clone = self.engine.with_catalog(|catalog| catalog.get(id).map(|disk| disk.origin != 0))?;
            if !clone {
                self.reserve_holes(id)?;
            }
        }
        let mut arrivals = Vec::with_capacity(arrived.len());
        let mut updated = Vec::new();
        let updates: Vec<&str> =
            arrived.iter().filter(|disk| disk.update_from.is_some()).map(|disk| disk.name.as_str()).collect();
        let _changes = self.lock_changes_of(&updates);
        for disk in arrived {
            let id = self.hidden_or_lost(&disk.hidden)?;
            let snapshot = match &disk.snapshot {
                Some((name, identity)) => Some(self.hidden_snapshot(id, name, *identity)?),
                None => None,
            };
            match (disk.update_from, snapshot) {
                (None, _) => {
                    let identity = DiskIdentity { uuid: disk.uuid, created };
                    arrivals.push(ReceiveCommit::Disk { id, name: disk.name.clone(), identity });
                }
                (Some(from), Some(snapshot)) => {
                    let target = self.find_disk(&disk.name)?;
                    if self.unchanged_base(&target)?.uuid != from {
                        let text = format!("disk '{}' got other snapshots meanwhile", disk.name);
                        return Err(Error::new(ErrorKind::Exists, text));
                    }
                    updated.push((target.id, snapshot.capacity));
                    arrivals.push(ReceiveCommit::Update { id, snapshot: snapshot.id, disk: target.id });
                }
                (Some(_), None) => {
                    let text = format!("disk '{}' can only be updated with a snapshot", disk.name);
                    return Err(Error::new(ErrorKind::Invalid, text));
                }
            }
        }
        self.engine.arrive(&arrivals)?;
        for (id, capacity) in updated {
            self.announce_capacity(id, capacity);
        }
        Ok(())
    }

    fn hidden_or_lost(&self, hidden: &str) -> Result<u64> {
        self.hidden_id(hidden).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("the received disk '{hidden}' does not exist any more"))
        })
    }

    /// The snapshot of a hidden disk. It is taken now, unless an interrupted attempt has taken it before.
    fn hidden_snapshot(&self, disk: u64, name: &str, identity: DiskIdentity) -> Result<Object> {
        let known = self.engine.with_catalog(|catalog| catalog.snapshot(disk, name).cloned());
        let taken = known.as_ref().filter(|known| known.uuid == identity.uuid).map(|known| known.id);
        if let (Some(other), None) = (known, taken) {
            // The disk of the base was deleted, and has handed over a snapshot with this name.
            let free =
                self.engine.with_catalog(|catalog| names::free(name, |name| catalog.snapshot(disk, name).is_some()));
            self.engine.rename_snapshot(other.id, &free)?;
        }
        let id = match taken {
            Some(id) => {
                // The snapshot has all content. Segments that the record does not list were received again since, into
                // other blocks, so that the disk would count as changed.
                self.engine.revert(disk, id)?;
                id
            }
            None => {
                let new = NewSnapshot { disk, name: name.to_owned(), uuid: identity.uuid, incomplete: false };
                let ids = self.engine.snapshot(&[new])?;
                ids.first().copied().ok_or_else(|| Error::new(ErrorKind::Io, "no snapshot was taken"))?
            }
        };
        self.engine.set_snapshot_identity(id, identity)?;
        self.engine.with_catalog(|catalog| catalog.get(id).cloned())
    }
}
