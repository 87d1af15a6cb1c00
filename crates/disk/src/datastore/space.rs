//! The space that disks and snapshots use, and what deleting any of them would free.

use super::Datastore;
use crate::space::{DatastoreSpace, Deletion, TotalSpace, WouldFree};
use error::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use work::Progress;

impl Datastore {
    /// What deleting these disks and snapshots together would free. Changes nothing. Fails for the reasons for which
    /// deleting them one after another would fail.
    pub fn would_free(&self, deletion: &Deletion, progress: &dyn Progress) -> Result<WouldFree> {
        let mut free = WouldFree::default();
        let (mut native, mut hidden) = (Vec::new(), Vec::new());
        check_once(deletion)?;
        for name in &deletion.disks {
            free.deletes.push(name.clone());
            // Fails if a deletion would fail. The right is released at once, so that no other operation on the disk is
            // refused because of this count.
            drop(self.uses.share(name)?);
            match self.foreign.find(name) {
                Some(entry) => {
                    self.foreign.would_free_disk(&entry, deletion.promote, &deletion.disks, &mut free)?;
                    hidden.extend(self.overlay_of(&entry));
                }
                None => native.push(name.clone()),
            }
        }
        let mut native_snapshots = Vec::new();
        let mut by_disk: BTreeMap<&String, Vec<String>> = BTreeMap::new();
        for (disk, name) in &deletion.snapshots {
            free.deletes.push(format!("{disk}@{name}"));
            drop(self.uses.share(disk)?);
            match self.foreign.find(disk) {
                Some(_) => by_disk.entry(disk).or_default().push(name.clone()),
                None if deletion.direction.is_some() => {
                    self.image_disk(disk, "deleting its snapshots merges nothing: omit --up and --down")?;
                }
                None => native_snapshots.push((disk.clone(), name.clone())),
            }
        }
        for (disk, names) in by_disk {
            let entry = self.image_disk(disk, "it has no images")?;
            self.foreign.would_free_snapshots(&entry, &names, deletion.direction, &mut free)?;
        }
        if !(native.is_empty() && native_snapshots.is_empty() && hidden.is_empty()) {
            self.native.would_free(&native, &native_snapshots, &hidden, deletion.promote, &mut free, progress)?;
        }
        free.freed = free.data + free.metadata + free.images;
        Ok(free)
    }

    /// The space of one disk, or of all disks by name, with their snapshots.
    pub fn space(&self, disk: Option<&str>, progress: &dyn Progress) -> Result<DatastoreSpace> {
        let mut all = self.space_now(disk, false, progress)?;
        for disk in &mut all.disks {
            let left = disk.space.provisioned.saturating_sub(disk.space.mapped);
            // The disk may have been deleted or renamed since it was counted.
            disk.growth = self.uuid_of(&disk.name).ok().and_then(|uuid| self.samples.of_disk(&uuid, left));
        }
        Ok(all)
    }

    /// The sums over all disks, and why the data of the native ones takes the space that it takes.
    pub fn total_space(&self, progress: &dyn Progress) -> Result<TotalSpace> {
        Ok(self.space_now(None, true, progress)?.total.unwrap_or_default())
    }

    fn space_now(&self, disk: Option<&str>, explain: bool, progress: &dyn Progress) -> Result<DatastoreSpace> {
        if let Some(name) = disk {
            return match self.foreign.find(name) {
                Some(entry) => Ok(DatastoreSpace { disks: vec![self.foreign.space(&entry)?], total: None }),
                None => self.native.space(disk, explain, progress),
            };
        }
        let mut all = self.native.space(None, explain, progress)?;
        for entry in self.foreign.entries() {
            match self.foreign.space(&entry) {
                Ok(space) => {
                    if let Some(total) = &mut all.total {
                        total.provisioned = total.provisioned.saturating_add(space.space.provisioned);
                        total.mapped = total.mapped.saturating_add(space.space.mapped);
                        total.stored += space.reclaimable;
                        total.exclusive += space.reclaimable;
                        total.reclaimable += space.reclaimable;
                        let unmapped = space.space.provisioned.saturating_sub(space.space.mapped);
                        total.may_need = total.may_need.map(|need| need.saturating_add(unmapped));
                    }
                    all.disks.push(space);
                }
                Err(error) => tracing::warn!(disk = entry.disk.name(), %error, "the space of a disk is not known"),
            }
        }
        all.disks.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }
}

/// Fails if a disk or snapshot is named twice, or if a snapshot and its disk are both named.
fn check_once(deletion: &Deletion) -> Result<()> {
    let disks = deletion.disks.iter().cloned();
    let mut names: Vec<String> =
        disks.chain(deletion.snapshots.iter().map(|(disk, name)| format!("{disk}@{name}"))).collect();
    names.sort();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::new(ErrorKind::Invalid, format!("'{}' is named twice", twice[0])));
    }
    if let Some((disk, name)) = deletion.snapshots.iter().find(|(disk, _)| deletion.disks.contains(disk)) {
        let text = format!("snapshot '{disk}@{name}' and its disk are both named: a disk includes its snapshots");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}
