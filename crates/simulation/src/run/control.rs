//! Operations on disks, snapshots and clones: create, change, compare and delete.

use super::{Checked, Outcome, SimulationRun};
use crate::image::Image;
use crate::model::{Disk, Model};
use crate::operation::{DISKS_MAX, SNAPSHOTS_MAX};
use backend::BLOCK_SIZE;
use disk::{Datastore, NewDisk, NoProgress, Point, Progress, Provisioning, SnapshotOptions};
use error::{Error, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Cancels the operation that it watches at the second query.
#[derive(Default)]
struct Impatient(AtomicU64);

impl Progress for Impatient {
    fn update(&self, _done: u64, _total: u64) {}
    fn cancelled(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) > 0
    }
}

impl SimulationRun {
    /// Carries out a change of the catalog. `after` is the model after the change. If the change is refused for lack of
    /// space, nothing may have changed. True if it was carried out.
    fn change<T>(
        &mut self,
        what: &str,
        after: Model,
        act: impl FnOnce(&Datastore) -> error::Result<T>,
    ) -> Checked<bool> {
        self.note(format!("  {what}"));
        let datastore = self.datastore()?;
        let result = act(&datastore);
        drop(datastore);
        match self.judge(result, Some(after.clone()))? {
            Outcome::Restarted => return Ok(false),
            Outcome::Refused(error) if error.kind() == ErrorKind::Interrupted => {}
            Outcome::Refused(error) => {
                if !self.foretold(&error) {
                    return Err(format!("{what}: {error}"));
                }
                self.note(format!("  refused: {error}"));
            }
            Outcome::Done(_) => {
                self.model = after;
                self.compare_structure().map_err(|violation| format!("after {what}: {violation}"))?;
                return Ok(true);
            }
        }
        self.compare_structure().map_err(|violation| format!("after {what} was refused: {violation}"))?;
        Ok(false)
    }

    /// Carries out an operation that must be refused because of clients or clones.
    fn must_be_busy<T>(&mut self, what: &str, act: impl FnOnce(&Datastore) -> error::Result<T>) -> Checked {
        match act(&*self.datastore()?) {
            Err(error) if error.kind() == ErrorKind::Busy => Ok(()),
            Err(error) => Err(format!("{what} must be refused as busy and failed with: {error}")),
            Ok(_) => Err(format!("{what} must be refused as busy and succeeded")),
        }
    }

    pub(super) fn create(&mut self, capacity: u64, kind: u64) -> Checked {
        if self.model.disks.len() >= DISKS_MAX {
            return self.delete(capacity, true);
        }
        let provisioning = match kind % 8 {
            0 => Provisioning::ZeroedThick,
            1 => Provisioning::EagerZeroedThick,
            _ => Provisioning::Thin,
        };
        let capacity = if provisioning == Provisioning::Thin { capacity } else { capacity.min(self.thick_max) };
        let name = self.new_name("d");
        let mut after = self.model.clone();
        after.disks.insert(name.clone(), Disk::of(capacity, provisioning, Image::default()));
        let what = format!("create {name}, {capacity} bytes, {provisioning:?}");
        self.change(&what, after, |ds| ds.create_disk(&name, &NewDisk::native(capacity, provisioning), &NoProgress))
            .map(|_| ())
    }

    pub(super) fn resize(&mut self, disk: u64, capacity: u64, by_device: bool) -> Checked {
        self.end_reads()?;
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        let known = &self.model.disks[&name];
        let thick = known.provisioning != Provisioning::Thin;
        let capacity = if thick { capacity.min(self.thick_max) } else { capacity };
        let old = known.capacity;
        let shrink = capacity < old;
        let mut after = self.model.clone();
        if let Some(disk) = after.disks.get_mut(&name) {
            disk.capacity = capacity;
            match shrink {
                true => Arc::make_mut(&mut disk.image).truncate(capacity),
                false => Arc::make_mut(&mut disk.image).extend(old),
            }
        }
        let device = self.device(&name)?;
        if by_device && shrink {
            return match device.resize(capacity) {
                Err(error) if error.kind() == ErrorKind::Invalid => Ok(()),
                other => Err(format!("{name} must refuse a client's request to shrink: {other:?}")),
            };
        }
        let what = format!("resize {name} from {old} to {capacity}");
        let done = self.change(&what, after, |ds| match by_device {
            true => device.resize(capacity),
            false => ds.resize_disk(&name, capacity, true).map(|_| ()),
        })?;
        let told = device.capacity();
        if done && told != capacity {
            return Err(format!("{name} has {capacity} bytes, and its client sees {told}"));
        }
        Ok(())
    }

    pub(super) fn rename(&mut self, disk: u64) -> Checked {
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        let to = self.new_name("r");
        self.close_devices(&name)?;
        let mut after = self.model.clone();
        after.rename(&name, &to);
        self.change(&format!("rename {name} to {to}"), after, |ds| ds.rename_disk(&name, &to)).map(|_| ())
    }

    pub(super) fn delete(&mut self, disk: u64, promote: bool) -> Checked {
        self.end_reads()?;
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        if self.devices.contains_key(&name) {
            self.must_be_busy("deleting a disk in use", |ds| ds.delete_disk(&name, true))?;
        }
        self.close_devices(&name)?;
        if !self.model.clones_of(&name).is_empty() && !promote {
            return self.must_be_busy("deleting a disk with clones", |ds| ds.delete_disk(&name, false));
        }
        let mut after = self.model.clone();
        after.delete_disk(&name);
        self.change(&format!("delete {name}"), after, |ds| ds.delete_disk(&name, promote)).map(|_| ())
    }

    pub(super) fn snapshot(&mut self, disk: u64, disks: u64) -> Checked {
        if self.model.snapshots().len() >= SNAPSHOTS_MAX {
            return self.delete_snapshot(disk);
        }
        let mut names: Vec<String> = self.model.disks.keys().cloned().collect();
        let mut of = Vec::new();
        let mut after = self.model.clone();
        for number in 0..disks.min(names.len() as u64) {
            let disk = names.swap_remove(((disk >> number) % names.len() as u64) as usize);
            let snapshot = self.new_name("s");
            after.snapshot(&disk, &snapshot);
            of.push((disk, snapshot));
        }
        if of.is_empty() {
            return Ok(());
        }
        self.change(&format!("snapshot {of:?}"), after, |ds| ds.create_snapshots(&of, &SnapshotOptions::default()))
            .map(|_| ())
    }

    pub(super) fn delete_snapshot(&mut self, snapshot: u64) -> Checked {
        self.end_reads()?;
        let Some((disk, name)) = self.pick_snapshot(snapshot) else { return Ok(()) };
        if !self.model.clones_on(&disk, &name).is_empty() {
            return self.must_be_busy("deleting a snapshot with clones", |ds| {
                ds.delete_snapshot(&disk, &name, None, &NoProgress)
            });
        }
        let title = format!("{disk}@{name}");
        if self.devices.contains_key(&title) {
            self.must_be_busy("deleting a snapshot in use", |ds| ds.delete_snapshot(&disk, &name, None, &NoProgress))?;
            self.devices.remove(&title);
        }
        let mut after = self.model.clone();
        after.delete_snapshot(&disk, &name);
        self.change(&format!("delete {title}"), after, |ds| ds.delete_snapshot(&disk, &name, None, &NoProgress))
            .map(|_| ())
    }

    pub(super) fn revert(&mut self, snapshot: u64) -> Checked {
        self.end_reads()?;
        let Some((disk, name)) = self.pick_snapshot(snapshot) else { return Ok(()) };
        if self.devices.contains_key(&disk) {
            self.must_be_busy("reverting a disk in use", |ds| ds.revert(&disk, &name))?;
            self.devices.remove(&disk);
        }
        let mut after = self.model.clone();
        after.revert(&disk, &name);
        self.change(&format!("revert {disk} to {name}"), after, |ds| ds.revert(&disk, &name)).map(|_| ())
    }

    pub(super) fn clone_linked(&mut self, source: u64, head: bool, count: u64) -> Checked {
        let count = count.min(DISKS_MAX.saturating_sub(self.model.disks.len()) as u64);
        if count == 0 {
            return self.delete(source, true);
        }
        let clones: Vec<String> = (0..count).map(|_| self.new_name("c")).collect();
        let mut after = self.model.clone();
        let (disk, point, snapshot) = if head {
            let Some(disk) = self.pick_disk(source) else { return Ok(()) };
            let snapshot = format!("for-{}", clones[0]);
            after.snapshot(&disk, &snapshot);
            (disk, Point::Head, snapshot)
        } else {
            let Some((disk, snapshot)) = self.pick_snapshot(source) else { return Ok(()) };
            (disk, Point::Snapshot(snapshot.clone()), snapshot)
        };
        clones.iter().for_each(|clone| after.clone_linked(&disk, &snapshot, clone));
        let what = format!("linked clones {clones:?} of {disk} at {point:?}");
        self.change(&what, after, |ds| ds.clone_linked(&disk, &point, &clones, &NoProgress)).map(|_| ())
    }

    pub(super) fn clone_full(&mut self, source: u64, head: bool, cancel: bool) -> Checked {
        if self.model.disks.len() >= DISKS_MAX {
            return self.delete(source, true);
        }
        let name = self.new_name("f");
        let (disk, point) = if head {
            let Some(disk) = self.pick_disk(source) else { return Ok(()) };
            (disk, Point::Head)
        } else {
            let Some((disk, snapshot)) = self.pick_snapshot(source) else { return Ok(()) };
            (disk, Point::Snapshot(snapshot))
        };
        let known = &self.model.disks[&disk];
        let (image, capacity) = match &point {
            Point::Head => (Arc::clone(&known.image), known.capacity),
            Point::Snapshot(snapshot) => {
                let snapshot = &known.snapshots[snapshot];
                (Arc::clone(&snapshot.image), snapshot.capacity)
            }
        };
        // A full clone is durable as soon as it exists.
        let mut image = (*image).clone();
        image.flush();
        let (provisioning, reserved) = (known.provisioning, known.reserved);
        if provisioning != Provisioning::Thin && capacity > self.thick_max {
            return Ok(());
        }
        let mut after = self.model.clone();
        let mut clone = Disk::of(capacity, provisioning, image);
        // The zeros of an eager zeroed thick disk are copied too.
        clone.reserved |= reserved;
        after.disks.insert(name.clone(), clone);
        let what = format!("full clone {name} of {disk} at {point:?}, cancel {cancel}");
        self.change(&what, after, |ds| match cancel {
            true => ds.clone_full(&disk, &point, &name, &Impatient::default()),
            false => ds.clone_full(&disk, &point, &name, &NoProgress),
        })
        .map(|_| ())
    }

    pub(super) fn detach(&mut self, disk: u64) -> Checked {
        let clones: Vec<&String> =
            self.model.disks.iter().filter(|(_, disk)| disk.origin.is_some()).map(|(name, _)| name).collect();
        let Some(name) = clones.get((disk % clones.len().max(1) as u64) as usize).map(|name| (*name).clone()) else {
            return Ok(());
        };
        let mut after = self.model.clone();
        if let Some(disk) = after.disks.get_mut(&name) {
            disk.origin = None;
            disk.detached = true;
        }
        self.change(&format!("detach {name}"), after, |ds| ds.detach(&name, &NoProgress)).map(|_| ())
    }

    pub(super) fn diff(&mut self, disk: u64, from: u64, to: u64) -> Checked {
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        let known = &self.model.disks[&name];
        let point =
            |number: u64| match known.snapshots.keys().nth((number % (known.snapshots.len() as u64 + 1)) as usize) {
                Some(snapshot) => (Point::Snapshot(snapshot.clone()), format!("{name}@{snapshot}")),
                None => (Point::Head, name.clone()),
            };
        let ((from, from_title), (to, to_title)) = (point(from), point(to));
        let mut extents = Vec::new();
        let result = self.datastore()?.diff(&name, &from, &to, &mut |extent| {
            extents.push(extent);
            Ok(())
        });
        match self.judge(result, None)? {
            Outcome::Restarted => return Ok(()),
            Outcome::Refused(error) if self.foretold(&error) => return Ok(()),
            Outcome::Refused(error) => return Err(format!("diff of {name}: {error}")),
            Outcome::Done(()) => {}
        }
        let (Some((a, a_end)), Some((b, b_end))) = (self.model.image(&from_title), self.model.image(&to_title)) else {
            return Ok(());
        };
        let reported = |block: u64| {
            let (start, end) = (block * BLOCK, block * BLOCK + 1);
            extents.iter().find(|extent| extent.offset <= start && extent.offset + extent.length >= end)
        };
        let context = format!("diff of {name} from {from:?} to {to:?}");
        let apart: Vec<u64> = a.written_apart(b).collect();
        for block in &apart {
            let differs = a.block(*block) != b.block(*block);
            match reported(*block) {
                None if differs => return Err(format!("{context}: block {block} differs and is not reported")),
                Some(extent) if extent.zero && b.block(*block).iter().any(|byte| *byte != 0) => {
                    return Err(format!("{context}: block {block} is reported as zeros and holds data"));
                }
                _ => {}
            }
        }
        // The block in which the smaller disk ends counts as different even if it was not written: a part of the block
        // lies past the end of the smaller disk.
        let end = a_end.min(b_end);
        let tail = (a_end != b_end && end % BLOCK != 0).then_some(end / BLOCK);
        for extent in &extents {
            for block in extent.offset / BLOCK..(extent.offset + extent.length).div_ceil(BLOCK) {
                let written = apart.binary_search(&block).is_ok() || tail == Some(block);
                if !written && !self.model.disks[&name].reserved {
                    return Err(format!("{context}: block {block} is reported and was not written"));
                }
            }
        }
        Ok(())
    }

    /// Compares names, sizes and relations of all disks and snapshots.
    pub(super) fn compare_structure(&self) -> Checked {
        let found = observed(&*self.datastore()?).map_err(|error| format!("listing disks: {error}"))?;
        differences(&found, &self.model.structure())
    }
}

/// The disks and snapshots of the datastore, in the form of [`Model::structure`].
pub(super) fn observed(datastore: &Datastore) -> Result<Vec<String>, Error> {
    let mut lines = Vec::new();
    let mut snapshots = datastore.snapshots(None)?;
    snapshots.sort_by(|a, b| a.name.cmp(&b.name));
    for disk in datastore.disks()? {
        lines.push(crate::model::describe_disk(
            &disk.name,
            disk.capacity,
            disk.provisioning,
            &disk.origin,
            &disk.parent_snapshot,
        ));
        lines.extend(snapshots.iter().filter(|snapshot| snapshot.disk == disk.name).map(|snapshot| {
            crate::model::describe_snapshot(&disk.name, &snapshot.name, snapshot.capacity, &snapshot.parent)
        }));
    }
    Ok(lines)
}

/// Reports the lines that differ.
pub(super) fn differences(found: &[String], expected: &[String]) -> Checked {
    let more: Vec<&String> = found.iter().filter(|line| !expected.contains(line)).collect();
    let less: Vec<&String> = expected.iter().filter(|line| !found.contains(line)).collect();
    if more.is_empty() && less.is_empty() && found.len() == expected.len() {
        return Ok(());
    }
    Err(format!("found but not expected: {more:#?}; expected but not found: {less:#?}"))
}
