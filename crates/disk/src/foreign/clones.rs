//! Clones: linked (a delta on a snapshot's image) and full (an independent copy in the same format).

use super::snapshots::TEMPORARY;
use super::{ChainedDevice, Foreign, ForeignDisk};
use crate::convert::{DeviceSink, DeviceSource, copy_all};
use crate::device::Device;
use crate::info::{DiskInfo, Point, SnapshotOptions};
use crate::names;
use error::{Error, ErrorKind, Result};
use std::sync::Arc;
use vmdk::CloneReference;
use work::Progress;

impl Foreign {
    /// Linked clones of a disk that exist now. Clones in other datastores count as existing, because this datastore
    /// cannot check them.
    pub(super) fn clones_there(&self, entry: &ForeignDisk) -> Vec<CloneReference> {
        let there: Vec<String> = self.entries().iter().map(|entry| entry.disk.uuid()).collect();
        let own = self.folders.local_path();
        let record = entry.disk.record();
        let elsewhere = |uuid: &str| {
            let clone = record.clones.iter().find(|clone| clone.uuid == uuid);
            clone.is_some_and(|clone| own.is_none_or(|own| !std::path::Path::new(&clone.folder).starts_with(own)))
        };
        entry.disk.clones().into_iter().filter(|clone| there.contains(&clone.uuid) || elsewhere(&clone.uuid)).collect()
    }

    /// Names of the linked clones of a disk, or of one of its snapshots.
    pub(super) fn clones_of(&self, entry: &ForeignDisk, snapshot: Option<&str>) -> Vec<String> {
        let all = self.entries();
        let clones = self.clones_there(entry);
        let wanted = clones.into_iter().filter(|clone| snapshot.is_none() || clone.snapshot.as_deref() == snapshot);
        let names = wanted.map(|clone| {
            let now = all.iter().find(|entry| entry.disk.uuid() == clone.uuid);
            now.map_or(clone.name, |entry| entry.disk.name())
        });
        names.collect()
    }

    /// Takes a snapshot named `name`, or `name` with a number if a snapshot has that name already.
    pub(super) fn snapshot_for(&self, entry: &Arc<ForeignDisk>, name: &str, description: &str) -> Result<String> {
        let _alone = entry.begin_snapshot()?;
        let free = names::free(name, |name| entry.find_snapshot(name).is_ok());
        let options = SnapshotOptions { description: description.to_owned(), ..SnapshotOptions::default() };
        self.create_snapshots(&[(Arc::clone(entry), free.clone())], None, &options, &mut || Ok(()))?;
        Ok(free)
    }

    /// Makes linked clones of a snapshot, or of the head through a new snapshot. Either all clones are made or none.
    pub fn clone_linked(
        &self,
        entry: &Arc<ForeignDisk>,
        at: &Point,
        names: &[String],
        progress: &dyn Progress,
    ) -> Result<Vec<DiskInfo>> {
        let (snapshot, made) = match (at, names) {
            (_, []) => return Err(Error::new(ErrorKind::Invalid, "no clone is named")),
            (Point::Snapshot(name), _) => {
                entry.find_snapshot(name)?;
                (name.clone(), false)
            }
            (Point::Head, [first, ..]) => (self.snapshot_for(entry, &format!("for-{first}"), "")?, true),
        };
        let mut clones: Vec<Arc<ForeignDisk>> = Vec::with_capacity(names.len());
        let outcome = names.iter().try_for_each(|name| {
            if progress.cancelled() {
                return Err(Error::new(ErrorKind::Interrupted, "stopped on request"));
            }
            clones.push(self.clone_one(entry, &snapshot, name)?);
            progress.update(clones.len() as u64, names.len() as u64);
            Ok(())
        });
        if let Err(error) = outcome {
            for clone in clones {
                if let Err(second) = self.delete_disk(&clone, false) {
                    tracing::warn!(clone = clone.disk.name(), %second, "a clone of the failed request was not removed");
                }
            }
            if made {
                self.delete_snapshot(entry, &snapshot, None, &crate::NoProgress)?;
            }
            return Err(error);
        }
        clones.iter().map(|clone| self.info(clone, false)).collect()
    }

    fn clone_one(&self, entry: &Arc<ForeignDisk>, snapshot: &str, name: &str) -> Result<Arc<ForeignDisk>> {
        let (folder, home) = self.new_folder(name, false)?;
        match entry.disk.linked_clone(snapshot, home, name, &self.options) {
            Ok(disk) => Ok(self.insert(folder, disk)),
            Err(error) => {
                if let Err(second) = self.remove_folder(&folder) {
                    tracing::warn!(%second, folder, "the folder of a failed clone was not removed");
                }
                Err(error.context(format!("clone '{name}' was not made")))
            }
        }
    }

    /// Makes an independent copy of the allocated data in the same format. An interrupted copy is removed.
    pub fn clone_full(
        &self,
        entry: &Arc<ForeignDisk>,
        at: &Point,
        name: &str,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        let (snapshot, temporary) = match at {
            Point::Snapshot(name) => {
                entry.find_snapshot(name)?;
                (name.clone(), false)
            }
            Point::Head => (self.snapshot_for(entry, &format!("copying-to-{name}"), TEMPORARY)?, true),
        };
        let copied = self.copy(entry, &snapshot, name, progress);
        if temporary {
            // The merge of the temporary snapshot does not report progress, and is not cancelled with the copy.
            self.delete_snapshot(entry, &snapshot, None, &crate::NoProgress)?;
        }
        let copied = copied?;
        self.info(&copied, false)
    }

    fn copy(
        &self,
        entry: &Arc<ForeignDisk>,
        snapshot: &str,
        name: &str,
        progress: &dyn Progress,
    ) -> Result<Arc<ForeignDisk>> {
        let source =
            ChainedDevice::new(format!("{}@{snapshot}", entry.disk.name()), entry.disk.snapshot_chain(snapshot)?);
        let record = entry.disk.record();
        let kind = entry.kind().unwrap_or(crate::info::ImageKind::Thin);
        let new = vmdk::NewDisk {
            name: name.to_owned(),
            capacity: source.capacity(),
            kind,
            delta: Some(record.delta),
            adapter: layer::descriptor::Adapter::named(&record.adapter).unwrap_or_default(),
        };
        let (folder, home) = self.new_folder(name, true)?;
        let made = vmdk::Disk::create(home, &new, &self.options, &crate::NoProgress);
        let outcome = made.and_then(|disk| {
            let target = ChainedDevice::new(name, disk.chain()?);
            // On failure, this function deletes the disk that it has created, so the sink does not.
            let sink = DeviceSink::new(Arc::new(target), Box::new(|_| Ok(())));
            match copy_all(Box::new(DeviceSource::new(Arc::new(source))), Box::new(sink), progress) {
                Ok(_) => Ok(disk),
                Err(error) => {
                    disk.delete()?;
                    Err(error)
                }
            }
        });
        match outcome {
            Ok(disk) => {
                self.complete(&folder)?;
                Ok(self.insert(folder, disk))
            }
            Err(error) => {
                if let Err(second) = self.remove_folder(&folder) {
                    tracing::warn!(%second, folder, "the folder of a failed copy was not removed");
                }
                Err(error.context(format!("disk '{name}' was not made")))
            }
        }
    }
}
