//! Snapshots: taking, listing, deleting, reverting to and comparing them.

use super::Native;
use super::disks::list;
use crate::info::{ChangedExtent, DiskInfo, EachExtent, Point, SnapshotInfo};
use crate::names;
use backend::BLOCK_SIZE;
use error::{Error, ErrorKind, Result};
use store::Engine;
use store::catalog::{Catalog, Object};
use store::engine::NewSnapshot;

/// Takes the native snapshots of a group. The caller quiesces the other disks of the group meanwhile.
pub(crate) struct Taking<'a> {
    engine: &'a Engine,
    wanted: Vec<NewSnapshot>,
    ids: Vec<u64>,
}

impl Taking<'_> {
    /// The snapshots to take.
    pub fn wanted(&self) -> &[NewSnapshot] {
        &self.wanted
    }

    /// Takes the snapshots durably. Called once.
    pub fn take(&mut self) -> Result<()> {
        self.ids = self.engine.snapshot(&self.wanted)?;
        Ok(())
    }

    /// False after a failure of the device: the next opening may find snapshots although taking them has failed.
    pub fn is_certain(&self) -> bool {
        self.engine.failure().is_none()
    }

    /// Deletes the snapshots that were taken. Returns whether it is certain that no later opening finds any of them.
    pub fn take_back(&mut self) -> bool {
        for id in std::mem::take(&mut self.ids) {
            if let Err(error) = self.engine.delete_snapshot(id) {
                tracing::error!(%error, "a native snapshot of a failed group was not deleted");
                return false;
            }
        }
        self.is_certain()
    }
}

fn info(catalog: &Catalog, snapshot: &Object) -> SnapshotInfo {
    let disk = catalog.find(snapshot.disk);
    SnapshotInfo {
        disk: disk.map(|disk| disk.name.clone()).unwrap_or_default(),
        name: snapshot.name.clone(),
        capacity: snapshot.capacity,
        parent: catalog.find(snapshot.parent).map(|parent| parent.name.clone()),
        clones: catalog.disks().filter(|clone| clone.origin == snapshot.id).map(|clone| clone.name.clone()).collect(),
        current: disk.is_some_and(|disk| disk.parent == snapshot.id),
        created: snapshot.created,
        description: String::new(),
    }
}

impl Native {
    /// Takes snapshots of several disks at one point in time: (disk, snapshot name). The function `around` is called
    /// with a [`Taking`], by which it takes the snapshots while the other disks of the group are quiesced. Everything
    /// that may take long is done before the call of `around`. If the group fails later, `around` deletes the
    /// snapshots.
    pub fn create_snapshots(
        &self,
        of: &[(String, String)],
        around: &mut dyn FnMut(&mut Taking<'_>) -> Result<()>,
    ) -> Result<Vec<SnapshotInfo>> {
        let disks: Vec<&str> = of.iter().map(|(disk, _)| disk.as_str()).collect();
        let _changes = self.lock_changes_of(&disks);
        let mut wanted = Vec::with_capacity(of.len());
        for (disk, name) in of {
            names::check("snapshot", name)?;
            let disk = self.find_disk(disk)?.id;
            wanted.push(NewSnapshot { disk, name: name.clone(), uuid: names::new_uuid()?, incomplete: false });
        }
        let mut taking = Taking { engine: &self.engine, wanted, ids: Vec::new() };
        around(&mut taking)?;
        let ids = taking.ids;
        self.engine.with_catalog(|catalog| ids.iter().map(|id| Ok(info(catalog, catalog.get(*id)?))).collect())
    }

    /// The number of the snapshot with that identity.
    pub fn find_snapshot_by_identity(&self, uuid: &[u8; 16]) -> Option<u64> {
        self.engine.with_catalog(|catalog| {
            let same = |object: &&Object| object.is_snapshot() && object.uuid == *uuid;
            catalog.objects().find(same).map(|object| object.id)
        })
    }

    /// Deletes a snapshot of an interrupted operation; `Busy` if clones are based on the snapshot.
    pub fn take_back_snapshot(&self, id: u64) -> Result<()> {
        if self.engine.with_catalog(|catalog| catalog.disks().any(|clone| clone.origin == id)) {
            return Err(Error::new(ErrorKind::Busy, "linked clones are based on the snapshot"));
        }
        self.engine.delete_snapshot(id)
    }

    /// Snapshots of one disk, or of all disks, parents before children.
    pub fn snapshots(&self, disk: Option<&str>) -> Result<Vec<SnapshotInfo>> {
        let only = disk.map(|name| self.find_disk(name)).transpose()?;
        Ok(self.engine.with_catalog(|catalog| {
            let disks: Vec<&Object> = match &only {
                Some(disk) => vec![disk],
                None => catalog.disks().filter(|disk| super::is_visible(disk)).collect(),
            };
            let mut clones: std::collections::BTreeMap<u64, Vec<String>> = Default::default();
            for clone in catalog.disks().filter(|clone| clone.origin != 0) {
                clones.entry(clone.origin).or_default().push(clone.name.clone());
            }
            let mut out = Vec::new();
            for disk in disks {
                // Sorted by number. Numbers only increase, so a parent precedes its children, unless the parent was
                // handed over by a deleted disk.
                let mut own: Vec<&Object> =
                    catalog.snapshots_of(disk.id).filter(|snapshot| !snapshot.incomplete).collect();
                own.sort_by_key(|snapshot| snapshot.id);
                out.extend(own.into_iter().map(|snapshot| SnapshotInfo {
                    disk: disk.name.clone(),
                    name: snapshot.name.clone(),
                    capacity: snapshot.capacity,
                    parent: catalog.find(snapshot.parent).map(|parent| parent.name.clone()),
                    clones: clones.remove(&snapshot.id).unwrap_or_default(),
                    current: disk.parent == snapshot.id,
                    created: snapshot.created,
                    description: String::new(),
                }));
            }
            out
        }))
    }

    /// Deletes a snapshot. `Busy` while clients have it open, and if linked clones are based on it (the error lists
    /// them).
    pub fn delete_snapshot(&self, disk: &str, name: &str) -> Result<()> {
        let _changes = self.changes.lock();
        let snapshot = self.deletable_snapshot(disk, name, &[])?;
        self.engine.delete_snapshot(snapshot.id)
    }

    /// A snapshot that can be deleted once the disks in `before` are deleted. Called under the lock `changes`.
    pub(super) fn deletable_snapshot(&self, disk: &str, name: &str, before: &[String]) -> Result<Object> {
        let disk = self.find_disk(disk)?;
        let snapshot = self.find_snapshot(&disk, name)?;
        self.refuse_in_use(snapshot.id, &format!("snapshot '{}@{name}'", disk.name))?;
        let clones = self.engine.with_catalog(|catalog| {
            catalog
                .disks()
                .filter(|clone| clone.origin == snapshot.id && !before.contains(&clone.name))
                .map(|clone| clone.name.clone())
                .collect::<Vec<_>>()
        });
        if !clones.is_empty() {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "snapshot '{}@{name}' is the parent of linked clones: {}; delete or detach them first",
                    disk.name,
                    list(clones.iter().map(String::as_str))
                ),
            ));
        }
        Ok(snapshot)
    }

    /// Reverts the head to a snapshot. `Busy` while clients have the disk open.
    pub fn revert(&self, disk: &str, name: &str) -> Result<DiskInfo> {
        let _changes = self.lock_changes_of(&[disk]);
        let disk = self.find_disk(disk)?;
        let snapshot = self.find_snapshot(&disk, name)?;
        self.refuse_in_use(disk.id, &format!("disk '{}'", disk.name))?;
        self.engine.revert(disk.id, snapshot.id)?;
        // No client has the disk open, but a count of its space may.
        self.announce_capacity(disk.id, snapshot.capacity);
        self.disk_info(disk.id, false)
    }

    /// Calls `each` for every extent that differs between two points of a disk, in order of offset.
    pub fn diff(&self, disk: &str, from: &Point, to: &Point, each: EachExtent<'_>) -> Result<()> {
        let disk = self.find_disk(disk)?;
        let find = |point: &Point| match point {
            Point::Head => Ok(disk.clone()),
            Point::Snapshot(name) => self.find_snapshot(&disk, name),
        };
        let (from, to) = (find(from)?, find(to)?);
        let block = BLOCK_SIZE as u64;
        let capacity = from.capacity.max(to.capacity);
        self.engine.diff(from.id, to.id, 0..capacity.div_ceil(block), &mut |changed| {
            let offset = changed.logical * block;
            let end = ((changed.logical + changed.blocks) * block).min(capacity);
            each(ChangedExtent { offset, length: end - offset, zero: changed.zero })?;
            Ok(true)
        })
    }
}
