//! Changes of the catalog that affect the buffers of disks: snapshots, and changes that replace or delete a head.
//!
//! 1. All steps that can fail precede the first change: admission to the journal, space for metadata, and claims for
//!    the blocks that thick disks will reserve. The number of these blocks is counted again under the locks under which
//!    the change is made; the claims last until then.
//! 2. The buffer of a head is dropped only after the change is carried out. After an error the disk still has all
//!    acknowledged writes, and its clients continue.

use super::admit::APPEND_BYTES;
use super::control::{PAGES_PER_RECORD, RECORD_MAX, check_name};
use super::log::Cost;
use super::metadata::Effects;
use super::reserve::aside;
use super::{Engine, Head, NewSnapshot};
use crate::catalog::{Catalog, Object, ObjectState};
use crate::journal::Operation;
use crate::{Error, ErrorKind, Result};
use backend::BLOCK_SIZE;
use std::sync::Arc;

/// Blocks (16 MiB) claimed beyond the measured number when thick disks are snapshotted under load, so that the second
/// count under the locks does not exceed the claim.
const ASIDE_SLACK: u64 = 4096;

/// The result of an attempt to take snapshots.
enum Cut {
    Taken(Vec<u64>),
    /// This many blocks have to be claimed first.
    Lacks(u64),
}

impl Engine {
    /// Takes snapshots of several disks at one point in time. They contain every write acknowledged before this call,
    /// and no write received after it returns. When the call returns, the snapshots are durable. Data in the snapshots
    /// that was not flushed before the call may not be durable yet.
    pub fn snapshot(&self, wanted: &[NewSnapshot]) -> Result<Vec<u64>> {
        let _control = self.control.lock();
        self.check_running()?;
        // The cost of two records for each snapshot, and of the operation that seals it.
        let cost = Cost {
            bytes: APPEND_BYTES + wanted.len() as u64 * (2 * (RECORD_MAX + 16) + 32),
            pages: wanted.len() as u64 * 3 * PAGES_PER_RECORD,
        };
        // The records are appended as one batch after the snapshots are taken in memory, which cannot be undone.
        if cost.bytes > self.change_cost().bytes {
            return Err(self.too_many(wanted.len()));
        }
        let mut room = self.claim_blocks(0)?;
        loop {
            self.make_journal_room()?;
            self.reserve_records_ahead(2 * wanted.len() as u64)?;
            let grant = match self.log.admission.try_admit_small(cost) {
                Some(grant) => grant,
                None => self.admit(cost)?,
            };
            let cut = self.cut(wanted, room.blocks)?;
            drop(grant);
            let lacks = match cut {
                Cut::Taken(ids) => return Ok(ids),
                Cut::Lacks(blocks) => blocks,
            };
            drop(room);
            room = match self.claim_blocks(lacks + ASIDE_SLACK) {
                Err(error) if error.kind() == ErrorKind::NoSpace => self.claim_blocks(lacks).map_err(|error| {
                    tracing::debug!(%error, "there is no space for a snapshot of thick disks");
                    self.no_space_aside(wanted, lacks)
                })?,
                other => other?,
            };
            // The records of the snapshots overtake pending changes, so the journal must already describe the newly
            // reserved space durably.
            self.commit_changes()?;
        }
    }

    /// The error if this many blocks are lacking for snapshots of thick disks.
    fn no_space_aside(&self, wanted: &[NewSnapshot], lacks: u64) -> Error {
        let names: Vec<String> = self.with_catalog(|catalog| {
            let thick = wanted.iter().filter_map(|new| catalog.find(new.disk));
            let thick = thick.filter(|disk| disk.provisioning != crate::catalog::Provisioning::Thin);
            thick.map(|disk| format!("'{}'", disk.name)).collect()
        });
        let (are, its) = if names.len() > 1 { ("disks {} are", "their") } else { ("disk {} is", "its") };
        let left =
            self.directory.room().map_or_else(|_| String::new(), |room| format!(" ({} are left)", room.available));
        Error::new(
            ErrorKind::NoSpace,
            format!(
                "{} thick, and after a snapshot all {its} writes need new space: {} bytes must be free in the file \
                 system of the datastore, and in its quota{left}; free space, or delete disks or snapshots",
                are.replace("{}", &names.join(", ")),
                lacks * BLOCK_SIZE as u64
            ),
        )
    }

    /// Takes the snapshots if `room` claimed blocks suffice. Called under `control` and a grant.
    fn cut(&self, wanted: &[NewSnapshot], room: u64) -> Result<Cut> {
        let mut heads: Vec<Arc<Head>> = Vec::with_capacity(wanted.len());
        self.with_catalog(|catalog| check_wanted(catalog, wanted))?;
        heads.extend(wanted.iter().map(|new| self.head(new.disk)));
        // Buffers are locked in the order of their ids.
        let mut order: Vec<usize> = (0..wanted.len()).collect();
        order.sort_unstable_by_key(|i| heads[*i].id);

        let disks: Vec<u64> = heads.iter().map(|head| head.id).collect();
        let _fetch = self.meta.bring_in(|meta| meta.survey_roots(&disks));
        let mut commit = self.log.lock();
        let through = self.writeback.stop_through();
        let mut ids = vec![0; wanted.len()];
        let mut operations = Vec::with_capacity(2 * wanted.len());
        {
            // All buffers are locked at once: this is the point in time of the snapshots.
            let mut buffers: Vec<_> = order.iter().map(|i| (*i, heads[*i].lock())).collect();
            let mut meta = self.meta.lock();
            let mut reserved = vec![None; wanted.len()];
            let mut lacks = 0;
            for (i, buffer) in &buffers {
                let disk = wanted[*i].disk;
                // After the snapshot every write of a thick disk needs a new block, so blocks are reserved for the
                // disk.
                let size = meta.catalog.get(disk)?.size_in_blocks();
                if let Some(aside) = aside(&meta.catalog, disk, size, &buffer.layers)? {
                    reserved[*i] = Some(aside.reserved);
                    lacks += aside.lacks;
                }
            }
            if lacks > room {
                return Ok(Cut::Lacks(lacks));
            }
            for new in wanted {
                // Sealing adds a reference to the root. If its count cannot be read, the snapshot is refused.
                meta.references_of_root(new.disk)?;
            }
            self.reserve_metadata(&meta, 2 * wanted.len() as u64)?;
            for (i, new) in wanted.iter().enumerate() {
                let disk = meta.catalog.get(new.disk)?.clone();
                let id = meta.catalog.allocate_id();
                ids[i] = id;
                let snapshot = Object {
                    id,
                    state: ObjectState::Unsealed,
                    incomplete: new.incomplete,
                    root: None,
                    disk: disk.id,
                    origin: 0,
                    created: backend::clock::seconds(),
                    reserved: 0,
                    uuid: new.uuid,
                    name: new.name.clone(),
                    ..disk.clone()
                };
                let disk = Object { parent: id, reserved: reserved[i].unwrap_or(disk.reserved), ..disk };
                operations.extend([snapshot, disk].map(|object| Operation::Put { record: object.encode() }));
            }
            for operation in &operations {
                meta.apply(operation, &mut Effects::default()).map_err(|error| self.stop(error))?;
            }
            self.buffers.note_snapshots();
            for (i, buffer) in &mut buffers {
                let snapshot = ids[*i];
                if buffer.layers.close(snapshot) {
                    self.buffers.note_unsealed();
                } else {
                    self.carry_out(&mut meta, Operation::Seal { snapshot }, 0)?;
                }
            }
            self.update_headroom(&meta);
            self.count_changes(&meta);
        }
        drop(through);
        self.append_urgent(&mut commit, &operations)?;
        self.request(|work| work.write_back = true);
        Ok(Cut::Taken(ids))
    }

    /// Carries out a change that replaces or deletes the heads of these disks, and makes it durable. Their buffers are
    /// dropped, and requests of devices that have them open fail from then on. `lacks` returns how many additional
    /// blocks the change reserves. Called under `control`.
    pub(super) fn change_heads<T>(
        &self,
        disks: &[u64],
        lacks: &dyn Fn(&Catalog) -> Result<u64>,
        plan: impl FnOnce(&mut Catalog) -> Result<(Vec<Operation>, T)>,
    ) -> Result<T> {
        let mut heads: Vec<Arc<Head>> = disks.iter().map(|disk| self.head(*disk)).collect();
        heads.sort_unstable_by_key(|head| head.id);
        heads.dedup_by_key(|head| head.id);
        let (outcome, _grant) = loop {
            self.check_running()?;
            // Closed layers belong to snapshots, which the change may keep.
            heads.iter().try_for_each(|head| self.settle(head))?;
            self.make_journal_room()?;
            self.reserve_records_ahead(0)?;
            let lacking = self.with_catalog(lacks)?;
            let room = self.claim_blocks(lacking).map_err(|error| {
                error.context("the disk is thick, and needs its whole size again because its blocks become shared")
            })?;
            // The grant is held until the change is in the journal, so that no later step waits for a checkpoint.
            let limit = self.change_cost();
            let grant = self.admit(limit)?;
            let _gate = self.writeback.lock();
            let _through = self.writeback.stop_through();
            let mut buffers: Vec<_> = heads.iter().map(|head| head.lock()).collect();
            if buffers.iter().any(|buffer| !buffer.layers.is_single()) || self.with_catalog(lacks)? > room.blocks {
                continue;
            }
            let outcome = self.enqueue_change(limit, plan)?;
            for buffer in &mut buffers {
                let gone = buffer.layers.clear();
                buffer.gone = true;
                self.give_back(gone);
            }
            drop(buffers);
            self.buffers.forget(&heads);
            break (outcome, grant);
        };
        self.append_changes(false)?;
        Ok(outcome)
    }
}

fn check_wanted(catalog: &Catalog, wanted: &[NewSnapshot]) -> Result<()> {
    for (i, new) in wanted.iter().enumerate() {
        check_name(&new.name)?;
        let disk = catalog.get(new.disk)?;
        if wanted[..i].iter().any(|other| other.disk == new.disk) {
            let text = format!("disk '{}' is named twice: a request takes one snapshot of a disk", disk.name);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if catalog.snapshot(new.disk, &new.name).is_some() {
            let text = format!("disk '{}' has a snapshot '{}' already", disk.name, new.name);
            return Err(Error::new(ErrorKind::Exists, text));
        }
    }
    Ok(())
}
