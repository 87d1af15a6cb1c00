//! The reference model: the expected results of a datastore, kept in memory in the simplest way.
//!
//! A model is cheap to copy. If a crash interrupts an operation, the state found is compared with the model before and
//! the model after the operation, and must equal one of them.

use crate::image::Image;
use disk::Provisioning;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A snapshot.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Capacity of the disk when the snapshot was taken.
    pub capacity: u64,
    /// The snapshot on which this one is based.
    pub parent: Option<String>,
    /// Content of the snapshot.
    pub image: Arc<Image>,
}

/// A disk.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Capacity in bytes.
    pub capacity: u64,
    /// Provisioning type.
    pub provisioning: Provisioning,
    /// The `disk@snapshot` from which the disk was cloned, if the disk is a linked clone.
    pub origin: Option<(String, String)>,
    /// The snapshot on which the head is based.
    pub parent: Option<String>,
    /// Content of the head.
    pub image: Arc<Image>,
    /// Snapshots by name.
    pub snapshots: BTreeMap<String, Snapshot>,
    /// Whether the disk was a linked clone, and may still share blocks with other disks.
    pub detached: bool,
    /// Whether the disk, or the disk from which it was cloned, was thick: then blocks may be allocated without having
    /// been written.
    pub reserved: bool,
}

impl Disk {
    /// A disk without snapshots and origin.
    pub fn of(capacity: u64, provisioning: Provisioning, image: Image) -> Self {
        Self {
            capacity,
            provisioning,
            origin: None,
            parent: None,
            image: Arc::new(image),
            snapshots: BTreeMap::new(),
            detached: false,
            reserved: provisioning != Provisioning::Thin,
        }
    }
}

/// A datastore.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Disks by name.
    pub disks: BTreeMap<String, Disk>,
}

impl Model {
    /// Marks all acknowledged writes as durable.
    pub fn flush(&mut self) {
        for disk in self.disks.values_mut() {
            flush(&mut disk.image);
            disk.snapshots.values_mut().for_each(|snapshot| flush(&mut snapshot.image));
        }
    }

    /// The image of `disk` or `disk@snapshot`.
    pub fn image(&self, title: &str) -> Option<(&Image, u64)> {
        match title.split_once('@') {
            None => self.disks.get(title).map(|disk| (&*disk.image, disk.capacity)),
            Some((disk, snapshot)) => {
                self.disks.get(disk)?.snapshots.get(snapshot).map(|snapshot| (&*snapshot.image, snapshot.capacity))
            }
        }
    }

    /// Like [`Model::image`], to be changed.
    pub fn image_mut(&mut self, title: &str) -> Option<&mut Image> {
        match title.split_once('@') {
            None => self.disks.get_mut(title).map(|disk| Arc::make_mut(&mut disk.image)),
            Some((disk, snapshot)) => {
                self.disks.get_mut(disk)?.snapshots.get_mut(snapshot).map(|snapshot| Arc::make_mut(&mut snapshot.image))
            }
        }
    }

    /// Names of all disks, and of all snapshots as `disk@snapshot`.
    pub fn titles(&self) -> Vec<String> {
        let mut titles = Vec::new();
        for (name, disk) in &self.disks {
            titles.push(name.clone());
            titles.extend(disk.snapshots.keys().map(|snapshot| format!("{name}@{snapshot}")));
        }
        titles
    }

    /// Names of all snapshots as (disk, snapshot).
    pub fn snapshots(&self) -> Vec<(String, String)> {
        let of = |(name, disk): (&String, &Disk)| -> Vec<_> {
            disk.snapshots.keys().map(|snapshot| (name.clone(), snapshot.clone())).collect()
        };
        self.disks.iter().flat_map(of).collect()
    }

    /// The names of the linked clones of a disk's snapshots.
    pub fn clones_of(&self, disk: &str) -> Vec<String> {
        let stands = |clone: &Disk| clone.origin.as_ref().is_some_and(|(origin, _)| origin == disk);
        self.disks.iter().filter(|(_, clone)| stands(clone)).map(|(name, _)| name.clone()).collect()
    }

    /// The names of the linked clones of one snapshot.
    pub fn clones_on(&self, disk: &str, snapshot: &str) -> Vec<String> {
        let at = Some((disk.to_owned(), snapshot.to_owned()));
        self.disks.iter().filter(|(_, clone)| clone.origin == at).map(|(name, _)| name.clone()).collect()
    }

    /// Takes a snapshot.
    pub fn snapshot(&mut self, disk: &str, name: &str) {
        if let Some(disk) = self.disks.get_mut(disk) {
            let parent = disk.parent.replace(name.to_owned());
            let snapshot = Snapshot { capacity: disk.capacity, parent, image: disk.image.clone() };
            disk.snapshots.insert(name.to_owned(), snapshot);
        }
    }

    /// Deletes a snapshot. Its children become children of its parent.
    pub fn delete_snapshot(&mut self, disk: &str, name: &str) {
        let Some(disk) = self.disks.get_mut(disk) else { return };
        let Some(gone) = disk.snapshots.remove(name) else { return };
        let parents = disk.snapshots.values_mut().map(|snapshot| &mut snapshot.parent).chain([&mut disk.parent]);
        for parent in parents {
            if parent.as_deref() == Some(name) {
                parent.clone_from(&gone.parent);
            }
        }
    }

    /// Reverts a disk to a snapshot.
    pub fn revert(&mut self, disk: &str, name: &str) {
        let Some(disk) = self.disks.get_mut(disk) else { return };
        let Some(snapshot) = disk.snapshots.get(name) else { return };
        disk.image = snapshot.image.clone();
        disk.capacity = snapshot.capacity;
        disk.parent = Some(name.to_owned());
    }

    /// Makes a linked clone.
    pub fn clone_linked(&mut self, disk: &str, snapshot: &str, name: &str) {
        let Some(source) = self.disks.get(disk).and_then(|disk| disk.snapshots.get(snapshot)) else { return };
        let reserved = self.disks.get(disk).is_some_and(|disk| disk.reserved);
        let clone = Disk {
            capacity: source.capacity,
            provisioning: Provisioning::Thin,
            origin: Some((disk.to_owned(), snapshot.to_owned())),
            parent: None,
            image: source.image.clone(),
            snapshots: BTreeMap::new(),
            detached: false,
            reserved,
        };
        self.disks.insert(name.to_owned(), clone);
    }

    /// Renames a disk, also in the origins of clones.
    pub fn rename(&mut self, from: &str, to: &str) {
        let Some(disk) = self.disks.remove(from) else { return };
        self.disks.insert(to.to_owned(), disk);
        for (origin, _) in self.disks.values_mut().filter_map(|disk| disk.origin.as_mut()) {
            if origin == from {
                to.clone_into(origin);
            }
        }
    }

    /// Deletes a disk. The first clone by name takes over the snapshots that have clones.
    pub fn delete_disk(&mut self, name: &str) {
        let clones = self.clones_of(name);
        let Some(gone) = self.disks.remove(name) else { return };
        let Some(promoted_name) = clones.first() else { return };
        let origins: Vec<String> =
            clones.iter().filter_map(|clone| self.disks.get(clone)?.origin.as_ref().map(|o| o.1.clone())).collect();
        let mut handed = BTreeMap::new();
        for (snapshot_name, snapshot) in gone.snapshots.iter().filter(|(name, _)| origins.contains(name)) {
            let mut parent = snapshot.parent.clone();
            while let Some(up) = parent.clone().filter(|up| !origins.contains(up)) {
                parent = gone.snapshots.get(&up).and_then(|snapshot| snapshot.parent.clone());
            }
            handed.insert(snapshot_name.clone(), Snapshot { parent, ..snapshot.clone() });
        }
        for clone in &clones {
            if let Some((disk, _)) = self.disks.get_mut(clone).and_then(|clone| clone.origin.as_mut()) {
                promoted_name.clone_into(disk);
            }
        }
        let Some(promoted) = self.disks.get_mut(promoted_name) else { return };
        promoted.detached = true;
        let origin = promoted.origin.take().map(|(_, snapshot)| snapshot);
        for parent in promoted.snapshots.values_mut().map(|snapshot| &mut snapshot.parent).chain([&mut promoted.parent])
        {
            if parent.is_none() {
                parent.clone_from(&origin);
            }
        }
        promoted.snapshots.append(&mut handed);
    }

    /// Everything except the content: one line for each disk and snapshot.
    pub fn structure(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, disk) in &self.disks {
            let origin = disk.origin.as_ref().map(|(disk, snapshot)| format!("{disk}@{snapshot}"));
            lines.push(describe_disk(name, disk.capacity, disk.provisioning, &origin, &disk.parent));
            for (snapshot_name, snapshot) in &disk.snapshots {
                lines.push(describe_snapshot(name, snapshot_name, snapshot.capacity, &snapshot.parent));
            }
        }
        lines
    }
}

fn flush(image: &mut Arc<Image>) {
    // An image with only durable writes stays shared.
    if !image.is_settled() {
        Arc::make_mut(image).flush();
    }
}

/// The line of a disk in [`Model::structure`].
pub fn describe_disk(
    name: &str,
    capacity: u64,
    provisioning: Provisioning,
    origin: &Option<String>,
    parent: &Option<String>,
) -> String {
    format!("{name}: {capacity} bytes, {provisioning:?}, clone of {origin:?}, based on {parent:?}")
}

/// The line of a snapshot in [`Model::structure`].
pub fn describe_snapshot(disk: &str, name: &str, capacity: u64, parent: &Option<String>) -> String {
    format!("{disk}@{name}: {capacity} bytes, after {parent:?}")
}
