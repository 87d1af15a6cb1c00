//! Native disks that are being received from another datastore, and points of native disks that are sent to one.
//!
//! 1. What is being received has a name that no person can give and is incomplete, until it takes its place in one
//!    change of the catalog, together with all that comes with it.
//! 2. It begins empty, or as a clone of a snapshot that both sides have: then that snapshot cannot go meanwhile.
//! 3. Only the reception writes it, and never through the buffer: so its pieces may come in any order, and twice.

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

/// Spans asked for at a time.
const SPANS: usize = 1024;

/// A received disk that is whole, and what it is to be.
pub(crate) struct Arrived {
    /// The hidden disk.
    pub hidden: String,
    /// The name it gets, or that of the disk which it brings up to date.
    pub name: String,
    /// Identity of a new disk.
    pub uuid: [u8; 16],
    /// The snapshot that it gets: name, identity, age.
    pub snapshot: Option<(String, DiskIdentity)>,
    /// It brings a disk up to date, from its snapshot of that identity.
    pub update_from: Option<[u8; 16]>,
    /// How a new disk takes its space.
    pub provisioning: Provisioning,
}

impl Native {
    /// Identities and numbers of the snapshots that `snapshot` may have much in common with: itself, those before it,
    /// then the other ones of its disk.
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

    /// Identity and age of a snapshot.
    pub fn snapshot_likeness(&self, disk: &str, snapshot: &str) -> Result<DiskIdentity> {
        let snapshot = self.find_snapshot(&self.find_disk(disk)?, snapshot)?;
        Ok(DiskIdentity { uuid: snapshot.uuid, created: snapshot.created })
    }

    /// The number of the snapshot of that identity, of whatever disk that is to be seen.
    pub fn snapshot_of_uuid(&self, uuid: &[u8; 16]) -> Option<Object> {
        self.engine.with_catalog(|catalog| {
            let fits = |object: &&Object| object.is_snapshot() && !object.incomplete && object.uuid == *uuid;
            let of_visible = |object: &&Object| catalog.find(object.disk).is_some_and(is_visible);
            catalog.objects().filter(fits).filter(of_visible).min_by_key(|object| object.id).cloned()
        })
    }

    /// The disk of that name, if people see one.
    pub fn visible(&self, name: &str) -> Option<Object> {
        self.engine.with_catalog(|catalog| catalog.disk(name).cloned()).filter(is_visible)
    }

    /// The snapshot that a disk stands on, if no client uses the disk and it has not been changed since.
    pub fn unchanged_base(&self, disk: &Object) -> Result<Object> {
        self.refuse_in_use(disk.id, &format!("disk '{}'", disk.name))?;
        self.refuse_to_replace.get().map_or(Ok(()), |refuse| refuse(&disk.name))?;
        let refuse = |why: &str| {
            let text = format!("disk '{}' cannot be brought up to date: {why}", disk.name);
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
                    "it was changed since its snapshot '{0}'; 'lamina snapshot revert {1}@{0}' gives those changes up",
                    base.name, disk.name
                );
                Err(refuse(&why))
            }
        }
    }

    /// An empty disk under a hidden name, or one that begins as a snapshot.
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
        // It shares the snapshot's blocks.
        new.provisioning = Stored::Thin;
        new.capacity = base.capacity;
        let ids = {
            let _changes = self.changes.lock();
            self.engine.clone_snapshot(base.id, &[new])?
        };
        let Some(id) = ids.first().copied() else { return Ok(()) };
        if capacity != base.capacity {
            let resized = self.resize_by_id(id, capacity, true);
            // What it has buffered for that must not come after what is written past the buffer.
            let settled = resized.and_then(|_| self.engine.settle(&self.engine.head(id)));
            if let Err(error) = settled {
                self.engine.delete_disk(id, &[])?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// The number of a hidden disk, if it is there.
    pub fn hidden_id(&self, name: &str) -> Option<u64> {
        self.engine.with_catalog(|catalog| catalog.disk(name).filter(|disk| disk.incomplete).map(|disk| disk.id))
    }

    /// Writes whole blocks of a hidden disk, of these checksums.
    pub fn write_hidden(&self, id: u64, block: u64, bytes: &[u8], sums: &Checksums) -> Result<()> {
        BulkWriter::new(&self.engine, id).write_summed(block, bytes, sums)
    }

    /// Lets go of blocks of a hidden disk.
    pub fn discard_hidden(&self, id: u64, blocks: Range<u64>) -> Result<()> {
        BulkWriter::new(&self.engine, id).discard(blocks)
    }

    /// Makes what was written of a hidden disk durable.
    pub fn commit_hidden(&self, id: u64) -> Result<()> {
        BulkWriter::new(&self.engine, id).commit()
    }

    /// Takes the space that a thick disk has not taken yet.
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

    /// Received disks take their places, all of them at once.
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
        let _changes = self.changes.lock();
        for disk in arrived {
            let id = self.hidden_or_lost(&disk.hidden)?;
            let snapshot = match &disk.snapshot {
                Some((name, like)) => Some(self.hidden_snapshot(id, name, *like)?),
                None => None,
            };
            match (disk.update_from, snapshot) {
                (None, _) => {
                    let like = DiskIdentity { uuid: disk.uuid, created };
                    arrivals.push(ReceiveCommit::Disk { id, name: disk.name.clone(), like });
                }
                (Some(from), Some(snapshot)) => {
                    let target = self.find_disk(&disk.name)?;
                    if self.unchanged_base(&target)?.uuid != from {
                        let text = format!("disk '{}' was given other snapshots meanwhile", disk.name);
                        return Err(Error::new(ErrorKind::Exists, text));
                    }
                    updated.push((target.id, snapshot.capacity));
                    arrivals.push(ReceiveCommit::Update { id, snapshot: snapshot.id, disk: target.id });
                }
                (Some(_), None) => {
                    let text = format!("disk '{}' can only be brought up to date by a snapshot", disk.name);
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
            Error::new(ErrorKind::NotFound, format!("what was received as '{hidden}' is not there any more"))
        })
    }

    /// The snapshot of a hidden disk; taken now, unless an attempt that was cut short has taken it.
    fn hidden_snapshot(&self, disk: u64, name: &str, like: DiskIdentity) -> Result<Object> {
        let known = self.engine.with_catalog(|catalog| catalog.snapshot(disk, name).map(|object| object.id));
        let id = match known {
            Some(id) => id,
            None => {
                let new = NewSnapshot { disk, name: name.to_owned(), uuid: like.uuid, incomplete: false };
                let ids = self.engine.snapshot(&[new])?;
                ids.first().copied().ok_or_else(|| Error::new(ErrorKind::Io, "no snapshot was taken"))?
            }
        };
        self.engine.liken_snapshot(id, like)?;
        self.engine.with_catalog(|catalog| catalog.get(id).cloned())
    }
}
