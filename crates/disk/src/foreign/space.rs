//! The space of disks in VMware's formats, and what deleting them would free.

use super::{Foreign, ForeignDisk};
use crate::info::Direction;
use crate::space::{DiskSpace, MERGE_ESTIMATE, SnapshotSpace, SpaceUse, WouldFree};
use error::{Error, Result};
use std::sync::Arc;

impl Foreign {
    /// Adds to `free` what deleting a disk with its snapshots would free. Fails for the reasons for which the deletion
    /// would fail. `disks` are all disks that are deleted together: linked clones among them are no reason to fail.
    pub fn would_free_disk(
        &self,
        entry: &Arc<ForeignDisk>,
        promote: bool,
        disks: &[String],
        free: &mut WouldFree,
    ) -> Result<()> {
        self.refuse_delete(entry, promote, disks)?;
        let record = entry.disk.record();
        free.with_disks.extend(record.snapshots.iter().map(|snapshot| format!("{}@{}", record.name, snapshot.name)));
        free.images += entry.disk.preview_delete()?.removed;
        Ok(())
    }

    /// Adds to `free` what deleting snapshots of a disk would free. Fails for the reasons for which the deletion would
    /// fail.
    pub fn would_free_snapshots(
        &self,
        entry: &Arc<ForeignDisk>,
        names: &[String],
        direction: Option<Direction>,
        free: &mut WouldFree,
    ) -> Result<()> {
        for name in names {
            self.refuse_delete_snapshot(entry, name)?;
        }
        let preview = entry.disk.preview_delete_snapshots(names, direction.map(Into::into))?;
        free.images += preview.removed.saturating_sub(preview.copied);
        free.images_merged += preview.merged as u64;
        free.images_kept += preview.images_kept as u64;
        if preview.merged > 0 {
            free.estimate = Some(MERGE_ESTIMATE.to_owned());
        }
        Ok(())
    }

    /// The space of a disk. Shared and exclusive space of the head and the snapshots is not determined, because their
    /// images are levels of one chain.
    pub fn space(&self, entry: &ForeignDisk) -> Result<DiskSpace> {
        let record = entry.disk.record();
        let info = entry.disk.info();
        if let Err(error) = &info
            && entry.disk.stopped().is_none()
        {
            return Err(Error::new(error.kind(), error.to_string()));
        }
        // The images of a stopped disk cannot be described until the disk is opened again.
        let usage = info.map(|info| info.usage).unwrap_or_default();
        let provisioned = entry.capacity()?;
        let snapshots = record.snapshots.iter().map(|snapshot| SnapshotSpace {
            name: snapshot.name.clone(),
            space: SpaceUse { provisioned: snapshot.capacity, ..SpaceUse::default() },
            reclaimable: None,
        });
        Ok(DiskSpace {
            growth: None,
            shared_with_disks: None,
            reduction: None,
            space: SpaceUse { provisioned, mapped: usage.mapped, stored: usage.allocated, ..SpaceUse::default() },
            used_by_snapshots: None,
            reclaimable: entry.disk.bytes_made()?,
            snapshots: snapshots.collect(),
            name: record.name,
        })
    }
}
