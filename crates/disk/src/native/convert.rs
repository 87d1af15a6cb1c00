//! Native disks as sources and targets of a conversion.

use super::Native;
use crate::convert::{CopyPiece, HoldingSource, Pieces, Sink, Source};
use crate::names;
use backend::BLOCK_SIZE;
use error::Result;
use std::sync::Arc;
use store::Engine;
use store::catalog::Provisioning;
use store::engine::{BulkWriter, NewDisk};
use work::Progress;

impl Native {
    /// A disk or snapshot as a source. A disk is read through a temporary snapshot. The snapshot is deleted when the
    /// source is dropped, or after a crash when the datastore is opened.
    pub(crate) fn conversion_source(&self, disk: &str, snapshot: Option<&str>) -> Result<Box<dyn Source>> {
        let _changes = match snapshot {
            Some(_) => self.changes.lock(),
            None => self.lock_changes_of(&[disk]),
        };
        let disk = self.find_disk(disk)?;
        let (object, point) = match snapshot {
            Some(name) => (self.find_snapshot(&disk, name)?, None),
            None => {
                let object = self.snapshot_for(&disk, "converting")?;
                let (engine, name) = (Arc::clone(&self.engine), object.name.clone());
                let point = Point { engine, id: object.id, name };
                (object, Some(point))
            }
        };
        let held = self.hold(&disk, &object)?;
        // Drops the device first, then the counted client of the snapshot, then the temporary snapshot.
        Ok(Box::new(HoldingSource::new(self.device_of(&disk, &object), (held, point))))
    }

    /// A new thin disk as a target. The caller has reserved its name.
    pub(crate) fn conversion_target(&self, name: &str, capacity: u64) -> Result<Box<dyn Sink>> {
        let _changes = self.changes.lock();
        super::check_capacity(name, capacity)?;
        let id = self.engine.create_disk(NewDisk {
            name: name.to_owned(),
            capacity,
            provisioning: Provisioning::Thin,
            uuid: names::new_uuid()?,
            incomplete: true,
        })?;
        Ok(Box::new(NativeSink { engine: Arc::clone(&self.engine), id, name: name.to_owned() }))
    }
}

/// A temporary snapshot that is deleted when this value is dropped.
struct Point {
    engine: Arc<Engine>,
    id: u64,
    name: String,
}

impl Drop for Point {
    fn drop(&mut self) {
        if let Err(error) = self.engine.delete_snapshot(self.id) {
            tracing::warn!(
                "snapshot '{}' of a conversion was not deleted; the next opening of the datastore deletes it: {error}",
                self.name
            );
        }
    }
}

/// A new native disk that is written sequentially and that clients cannot open yet.
struct NativeSink {
    engine: Arc<Engine>,
    id: u64,
    name: String,
}

impl Sink for NativeSink {
    fn unit(&self) -> u64 {
        BLOCK_SIZE as u64
    }

    fn fill(&mut self, pieces: &mut Pieces<'_>) -> Result<()> {
        let writer = BulkWriter::new(&self.engine, self.id);
        let take = |piece: &CopyPiece| {
            piece.runs.iter().try_for_each(|run| {
                let block = (piece.start + run.start as u64) / BLOCK_SIZE as u64;
                writer.write(block, piece.blocks(run))
            })
        };
        while pieces.next(take)? {}
        Ok(())
    }

    fn finish(self: Box<Self>, _: &dyn Progress) -> Result<()> {
        self.engine.complete_disk(self.id).inspect_err(|_| self.remove())
    }

    fn abandon(self: Box<Self>) {
        self.remove();
    }
}

impl NativeSink {
    fn remove(&self) {
        let removed = self.engine.delete_disk(self.id, &[]).and_then(|()| self.engine.reclaim());
        if let Err(error) = removed {
            tracing::warn!(
                "disk '{}' of a failed conversion was not deleted; the next opening of the datastore deletes it: \
                 {error}",
                self.name
            );
        }
    }
}
