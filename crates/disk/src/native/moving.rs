//! Native disks as source and target of a migration.
//!
//! 1. The target is incomplete and has a hidden name until it replaces the source. Opening the datastore removes the
//!    target, unless the migration's record says that the target is the current disk.
//! 2. One change of the catalog replaces the source by the target; a source in the same store is incomplete from then
//!    on.

use super::{Native, stored};
use crate::device::Device;
use crate::info::Provisioning;
use crate::migrate::{Node, Original, Replica};
use crate::names;
use crate::switch::Identity;
use backend::BLOCK_SIZE;
use error::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use store::catalog::{Object, ObjectState};
use store::engine::{DiskIdentity, NewDisk, NewSnapshot};
use work::Progress;

/// A native disk that is the source of a migration.
pub(crate) struct NativeOriginal {
    native: Arc<Native>,
    pub id: u64,
}

/// A native disk that is being created as the target of a migration.
pub(crate) struct NativeReplica {
    native: Arc<Native>,
    pub id: u64,
}

impl Native {
    /// The disk `name` as the source of a migration. `Busy` if it has linked clones.
    pub fn original(self: &Arc<Self>, name: &str) -> Result<NativeOriginal> {
        let disk = self.find_disk(name)?;
        self.engine.with_catalog(|catalog| {
            let stands_on = |clone: &&Object| {
                clone.origin != 0 && catalog.find(clone.origin).is_some_and(|snapshot| snapshot.disk == disk.id)
            };
            let clones: Vec<&str> = catalog.disks().filter(stands_on).map(|clone| clone.name.as_str()).collect();
            if clones.is_empty() {
                return Ok(());
            }
            Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "disk '{name}' is the parent of linked clones: {}; delete or detach them first",
                    super::list(clones.into_iter())
                ),
            ))
        })?;
        Ok(NativeOriginal { native: Arc::clone(self), id: disk.id })
    }

    /// Creates an empty target with a hidden name.
    pub fn replica(
        self: &Arc<Self>,
        hidden: &str,
        capacity: u64,
        provisioning: Provisioning,
        progress: &dyn Progress,
    ) -> Result<NativeReplica> {
        super::check_capacity(hidden, capacity)?;
        let new = NewDisk {
            name: hidden.to_owned(),
            capacity,
            provisioning: stored(provisioning),
            uuid: names::new_uuid()?,
            incomplete: true,
        };
        let replica = NativeReplica { native: Arc::clone(self), id: self.engine.create_disk(new)? };
        if provisioning != Provisioning::Thin {
            let blocks = 0..capacity.div_ceil(BLOCK_SIZE as u64);
            if let Err(error) = self.fill(replica.id, blocks, provisioning, progress) {
                replica.remove()?;
                return Err(error);
            }
        }
        Ok(replica)
    }

    /// Gives the target with the hidden name `hidden` the name `name`, and marks the source `original`, if it is in
    /// this store, as incomplete. False if there is no such target.
    pub fn complete_replica(
        &self,
        hidden: &str,
        name: &str,
        original: Option<u64>,
        identity: DiskIdentity,
    ) -> Result<bool> {
        let new = self.engine.with_catalog(|catalog| catalog.disk(hidden).map(|disk| disk.id));
        let Some(new) = new else { return Ok(false) };
        let aside = format!("{hidden}-away");
        let old = original.filter(|id| self.is_disk(*id));
        self.engine.replace_disk(old.map(|id| (id, aside.as_str())), new, name, identity)?;
        Ok(true)
    }

    /// A hidden disk as a device, not counted as a client.
    pub fn hidden_device(&self, name: &str) -> Result<Arc<dyn Device>> {
        let disk = self.engine.with_catalog(|catalog| catalog.disk(name).cloned());
        let disk = disk.ok_or_else(|| {
            Error::new(
                ErrorKind::Corrupt,
                format!("the hidden disk '{name}' does not exist: the writes to it are lost"),
            )
        })?;
        Ok(self.device_of(&disk, &disk))
    }

    /// A hidden disk that has all content already, as the target of a migration.
    pub fn hidden_replica(self: &Arc<Self>, name: &str) -> Result<NativeReplica> {
        let id = self.engine.with_catalog(|catalog| catalog.disk(name).map(|disk| disk.id));
        let missing = || Error::new(ErrorKind::Corrupt, format!("the hidden disk '{name}' does not exist"));
        Ok(NativeReplica { native: Arc::clone(self), id: id.ok_or_else(missing)? })
    }

    /// Names of the hidden disks that begin with `prefix`.
    pub fn hidden(&self, prefix: &str) -> Vec<String> {
        self.engine.with_catalog(|catalog| {
            catalog.disks().map(|disk| disk.name.clone()).filter(|name| name.starts_with(prefix)).collect()
        })
    }

    /// Removes a hidden disk, if it exists.
    pub fn remove_hidden(&self, name: &str) -> Result<()> {
        match self.engine.with_catalog(|catalog| catalog.disk(name).map(|disk| disk.id)) {
            Some(id) => self.engine.delete_disk(id, &[]),
            None => Ok(()),
        }
    }

    /// Removes the source of a completed migration, if it still exists.
    pub fn remove_moved(&self, id: u64) -> Result<()> {
        if self.is_disk(id) { self.engine.delete_disk(id, &[]) } else { Ok(()) }
    }

    /// Renames the source of a completed migration to `aside` and marks it as incomplete, so that the next opening of
    /// the datastore removes it.
    pub fn retire(&self, id: u64, aside: &str) -> Result<()> {
        if self.is_disk(id) { self.engine.retire_disk(id, aside) } else { Ok(()) }
    }

    /// Whether a disk with that number exists and is not deleted.
    fn is_disk(&self, id: u64) -> bool {
        self.engine.with_catalog(|catalog| catalog.find(id).is_some_and(|object| object.state == ObjectState::Disk))
    }

    fn snapshot_id(&self, disk: u64, name: &str) -> Result<Object> {
        self.engine.with_catalog(|catalog| catalog.snapshot(disk, name).cloned()).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("there is no snapshot '{}' any more", name.escape_debug()))
        })
    }

    fn device_of_snapshot(&self, disk: u64, name: &str) -> Result<Arc<dyn Device>> {
        let snapshot = self.snapshot_id(disk, name)?;
        let disk = self.engine.with_catalog(|catalog| catalog.get(disk).cloned())?;
        Ok(self.device_of(&disk, &snapshot))
    }

    fn identity_of(&self, disk: u64, snapshot: Option<&str>) -> Result<Identity> {
        Ok(Identity::Native(match snapshot {
            Some(name) => self.snapshot_id(disk, name)?.id,
            None => disk,
        }))
    }

    fn head_device(&self, disk: u64) -> Result<Arc<dyn Device>> {
        let disk = self.engine.with_catalog(|catalog| catalog.get(disk).cloned())?;
        Ok(self.device_of(&disk, &disk))
    }
}

impl NativeOriginal {
    /// The head as a device.
    pub fn head(&self) -> Result<Arc<dyn Device>> {
        self.native.head_device(self.id)
    }

    /// Identity and creation time of the disk.
    pub fn disk_identity(&self) -> Result<DiskIdentity> {
        self.native.engine.with_catalog(|catalog| {
            catalog.get(self.id).map(|disk| DiskIdentity { uuid: disk.uuid, created: disk.created })
        })
    }
}

/// The snapshots of a disk, parents before children, and the children of one parent from the oldest on. The order is
/// depth first: a branch is copied completely before the next one begins. A parent that is not among them counts as
/// none.
fn depth_first(mut own: Vec<Object>) -> Vec<Node> {
    own.sort_by_key(|object| object.id);
    let by_id: BTreeMap<u64, &Object> = own.iter().map(|object| (object.id, object)).collect();
    let mut children: BTreeMap<Option<u64>, Vec<&Object>> = BTreeMap::new();
    for object in &own {
        let parent = Some(object.parent).filter(|parent| by_id.contains_key(parent));
        children.entry(parent).or_default().push(object);
    }
    let mut nodes: Vec<Node> = Vec::with_capacity(own.len());
    // Each object is below one parent, so it gets onto the stack once.
    let mut stack: Vec<&Object> = Vec::new();
    let mut above = None;
    loop {
        stack.extend(children.remove(&above).unwrap_or_default().into_iter().rev());
        let Some(object) = stack.pop() else { return nodes };
        nodes.push(Node {
            name: object.name.clone(),
            parent: by_id.get(&object.parent).map(|parent| parent.name.clone()),
            capacity: object.capacity,
            created: object.created,
            uuid: Some(object.uuid),
            description: String::new(),
        });
        above = Some(object.id);
    }
}

impl Original for NativeOriginal {
    fn nodes(&self) -> Result<Vec<Node>> {
        // The order is found without the lock under which requests look up their blocks.
        let own = self.native.engine.with_catalog(|catalog| {
            catalog.snapshots_of(self.id).filter(|object| !object.incomplete).cloned().collect()
        });
        Ok(depth_first(own))
    }

    fn head_parent(&self) -> Result<Option<String>> {
        self.native.engine.with_catalog(|catalog| {
            let disk = catalog.get(self.id)?;
            let parent = catalog.find(disk.parent).filter(|snapshot| snapshot.disk == self.id && !snapshot.incomplete);
            Ok(parent.map(|snapshot| snapshot.name.clone()))
        })
    }

    fn snapshot(&self, name: &str) -> Result<Arc<dyn Device>> {
        self.native.device_of_snapshot(self.id, name)
    }

    fn identity(&self, snapshot: Option<&str>) -> Result<Identity> {
        self.native.identity_of(self.id, snapshot)
    }

    fn changes(&self, from: &str, to: Option<&str>, each: &mut dyn FnMut(Range<u64>)) -> Result<()> {
        let from = self.native.snapshot_id(self.id, from)?;
        let to = match to {
            Some(name) => self.native.snapshot_id(self.id, name)?,
            None => self.native.engine.with_catalog(|catalog| catalog.get(self.id).cloned())?,
        };
        let block = BLOCK_SIZE as u64;
        self.native.engine.diff(from.id, to.id, 0..to.capacity.div_ceil(block), &mut |changed| {
            each(changed.logical * block..(changed.logical + changed.blocks) * block);
            Ok(true)
        })
    }
}

impl NativeReplica {
    /// Removes the disk with its snapshots.
    pub fn remove(&self) -> Result<()> {
        self.native.engine.delete_disk(self.id, &[])
    }
}

impl Replica for NativeReplica {
    fn head(&self) -> Result<Arc<dyn Device>> {
        self.native.head_device(self.id)
    }

    fn snapshot(&self, name: &str) -> Result<Arc<dyn Device>> {
        self.native.device_of_snapshot(self.id, name)
    }

    fn identity(&self, snapshot: Option<&str>) -> Result<Identity> {
        self.native.identity_of(self.id, snapshot)
    }

    fn take(&self, node: &Node) -> Result<()> {
        let uuid = node.uuid.map_or_else(names::new_uuid, Ok)?;
        let new = NewSnapshot { disk: self.id, name: node.name.clone(), uuid, incomplete: false };
        let ids = self.native.engine.snapshot(&[new])?;
        for id in ids {
            self.native.engine.set_snapshot_identity(id, DiskIdentity { uuid, created: node.created })?;
        }
        Ok(())
    }

    fn go_back(&self, snapshot: &str) -> Result<()> {
        let snapshot = self.native.snapshot_id(self.id, snapshot)?;
        self.native.engine.revert(self.id, snapshot.id)?;
        self.native.announce_capacity(self.id, snapshot.capacity);
        Ok(())
    }

    fn forget(&self, snapshot: &str) -> Result<()> {
        self.native.engine.delete_snapshot(self.native.snapshot_id(self.id, snapshot)?.id)
    }

    fn resize(&self, capacity: u64) -> Result<()> {
        self.native.resize_by_id(self.id, capacity, true).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn snapshot(id: u64, parent: u64) -> Object {
        Object {
            id,
            state: ObjectState::Snapshot,
            provisioning: store::catalog::Provisioning::Thin,
            incomplete: false,
            root: None,
            capacity: BLOCK_SIZE as u64,
            disk: 1,
            parent,
            origin: 0,
            created: id,
            reserved: 0,
            uuid: [id as u8; 16],
            name: id.to_string(),
        }
    }

    fn order(own: &[(u64, u64)]) -> Vec<(String, Option<String>)> {
        let nodes = depth_first(own.iter().map(|(id, parent)| snapshot(*id, *parent)).collect());
        nodes.into_iter().map(|node| (node.name, node.parent)).collect()
    }

    #[test]
    fn a_branch_is_complete_before_the_next_one_begins() {
        // Snapshot 5 has a parent that is not among the snapshots of the disk.
        let found = order(&[(9, 3), (2, 0), (3, 2), (4, 2), (5, 1000), (6, 3), (7, 4), (8, 5)]);
        let expected = [(2, 0), (3, 2), (6, 3), (9, 3), (4, 2), (7, 4), (5, 0), (8, 5)];
        let expected =
            expected.map(|(id, parent): (u64, u64)| (id.to_string(), (parent > 0).then(|| parent.to_string())));
        assert_eq!(found, expected);
        assert_eq!(order(&[]), []);
        // Damaged records that are their own ancestors are below no first snapshot.
        assert_eq!(order(&[(2, 2), (3, 4), (4, 3), (5, 0)]), [("5".into(), None)]);
    }

    /// The time grows with n log n: tens of milliseconds, also without optimizations. With n^2 steps for each snapshot,
    /// it would be hours, so a pause of this process by a loaded host changes no result.
    #[test]
    fn the_order_of_many_snapshots_is_found_quickly() {
        const COUNT: u64 = 20_000;
        let chain: Vec<(u64, u64)> = (2..COUNT + 2).map(|id| (id, if id == 2 { 0 } else { id - 1 })).collect();
        let began = Instant::now();
        let found = order(&chain);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
        assert!(found.iter().zip(2..).all(|((name, _), id): (_, u64)| *name == id.to_string()));
        assert_eq!(found.len() as u64, COUNT);
    }
}
