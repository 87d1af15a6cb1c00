//! Disks of a datastore as ends of a conversion: the one place here that knows how a datastore makes them.

use super::copy::{Pieces, Sink, Source};
use super::target::Target;
use super::{DeviceSource, TargetFormat};
use crate::datastore::Datastore;
use crate::names;
use crate::progress::Progress;
use backend::BLOCK_SIZE;
use std::sync::Arc;
use store::catalog::Provisioning;
use store::engine::{BulkWriter, NewDisk, NewSnapshot};
use store::{Engine, Error, ErrorKind, Result};

impl Datastore {
    /// A disk or snapshot to read. Of a disk, what it is now: through a snapshot that goes with the source.
    pub(super) fn conversion_source(&self, name: &str) -> Result<Box<dyn Source>> {
        let (disk, snapshot) = names::split(name);
        if snapshot.is_some() {
            return Ok(Box::new(DeviceSource::new(self.device(name, true)?)));
        }
        let point = self.point_of(disk)?;
        // From here on the snapshot goes when the source does.
        let device = self.device(&format!("{disk}@{}", point.name), true)?;
        Ok(Box::new(PointSource { inner: DeviceSource::new(device), point }))
    }

    /// A snapshot that nobody keeps: a crash removes it.
    fn point_of(&self, disk: &str) -> Result<Point> {
        let _changes = self.changes.lock();
        let disk = self.find_disk(disk)?;
        let mut number = 1;
        let name = loop {
            let name = format!("converting-{number}");
            if self.find_snapshot(&disk, &name).is_err() {
                break name;
            }
            number += 1;
        };
        let new = NewSnapshot { disk: disk.id, name: name.clone(), uuid: names::new_uuid()?, incomplete: true };
        let ids = self.engine.snapshot(&[new])?;
        Ok(Point { engine: Arc::clone(&self.engine), id: ids.first().copied().unwrap_or_default(), name })
    }

    /// A new disk to fill.
    pub(super) fn conversion_target(&self, name: &str, format: TargetFormat, capacity: u64) -> Result<Target> {
        if format != TargetFormat::Native {
            let text = format!("disk '{name}' cannot be made as {format}: native is what this datastore has");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let _changes = self.changes.lock();
        names::check("disk", name)?;
        let id = self.engine.create_disk(NewDisk {
            name: name.to_owned(),
            capacity,
            provisioning: Provisioning::Thin,
            uuid: names::new_uuid()?,
            incomplete: true,
        })?;
        let sink = NativeSink { engine: Arc::clone(&self.engine), id, name: name.to_owned() };
        Ok(Target { sink: Box::new(sink), files: Vec::new() })
    }
}

/// A snapshot for the time of a conversion.
struct Point {
    engine: Arc<Engine>,
    id: u64,
    name: String,
}

impl Drop for Point {
    fn drop(&mut self) {
        if let Err(error) = self.engine.delete_snapshot(self.id) {
            tracing::warn!("snapshot '{}' of a conversion goes at the next opening: {error}", self.name);
        }
    }
}

/// Reads a disk as it was when the conversion began. Closed first, then the snapshot goes: fields are dropped in order.
struct PointSource {
    inner: DeviceSource,
    point: Point,
}

impl Source for PointSource {
    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }

    fn next(&mut self, start: u64) -> Result<super::Run> {
        self.inner.next(start)
    }

    fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()> {
        self.inner.read(start, out).map_err(|error| error.context(&self.point.name))
    }
}

/// A native disk that nobody can name yet, written from front to back.
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
        let mut take = |piece: &super::Piece| {
            piece.runs.iter().try_for_each(|run| {
                let block = (piece.start + run.start as u64) / BLOCK_SIZE as u64;
                writer.write(block, piece.blocks(run))
            })
        };
        while pieces.next(&mut take)? {}
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
            tracing::warn!("disk '{}' of a failed conversion goes at the next opening: {error}", self.name);
        }
    }
}
