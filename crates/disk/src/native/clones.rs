//! Clones: linked (a new head based on a snapshot) and full (an independent copy).

use super::Native;
use crate::info::{DiskInfo, Point};
use crate::names;
use backend::BLOCK_SIZE;
use error::{Error, ErrorKind, Result};
use store::catalog::{Object, Provisioning};
use store::engine::{BulkWriter, Condition, NewDisk, NewSnapshot};
use work::Progress;
use work::Throttle;

/// Most clones that one call creates, all in one durable change.
pub const CLONES_MAX: usize = 10_000;
/// Blocks copied at a time (1 MiB).
const COPY_BLOCKS: u64 = 256;
/// Most spans that one query of the map returns.
const SPANS: usize = 1024;

impl Native {
    /// Takes a temporary snapshot. Recovery removes the snapshot unless the operation completes it.
    pub(super) fn snapshot_for(&self, disk: &Object, name: &str) -> Result<Object> {
        let name =
            self.engine.with_catalog(|catalog| names::free(name, |name| catalog.snapshot(disk.id, name).is_some()));
        let new = NewSnapshot { disk: disk.id, name, uuid: names::new_uuid()?, incomplete: true };
        let ids = self.engine.snapshot(&[new])?;
        self.engine.with_catalog(|catalog| catalog.get(ids[0]).cloned())
    }

    /// Makes linked clones of a snapshot, or of the head through a new snapshot. Either all clones are made or none.
    pub fn clone_linked(
        &self,
        disk: &str,
        at: &Point,
        clone_names: &[String],
        progress: &dyn Progress,
    ) -> Result<Vec<DiskInfo>> {
        let _changes = self.lock_changes_at(disk, at);
        let disk = self.find_disk(disk)?;
        if clone_names.is_empty() || clone_names.len() > CLONES_MAX {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{} clones at once: 1 to {CLONES_MAX} can be made", clone_names.len()),
            ));
        }
        let mut new = Vec::with_capacity(clone_names.len());
        for name in clone_names {
            names::check("disk", name)?;
            if self.engine.with_catalog(|catalog| catalog.disk(name).is_some()) {
                return Err(Error::new(
                    ErrorKind::Exists,
                    format!("there is a disk '{name}' already; no clone was made"),
                ));
            }
            new.push(NewDisk {
                name: name.clone(),
                capacity: disk.capacity,
                // A clone shares its parent's blocks, so it occupies space only for blocks that are written.
                provisioning: Provisioning::Thin,
                uuid: names::new_uuid()?,
                incomplete: false,
            });
        }
        let (snapshot, made) = match at {
            Point::Snapshot(name) => (self.find_snapshot(&disk, name)?, false),
            Point::Head => (self.snapshot_for(&disk, &format!("for-{}", clone_names[0]))?, true),
        };
        new.iter_mut().for_each(|new| new.capacity = snapshot.capacity);
        let result = if progress.cancelled() {
            Err(Error::new(ErrorKind::Interrupted, "stopped on request"))
        } else {
            self.engine.clone_snapshot(snapshot.id, &new)
        };
        let ids = match result {
            Ok(ids) => ids,
            Err(error) => {
                if made {
                    self.engine.delete_snapshot(snapshot.id)?;
                }
                return Err(error);
            }
        };
        progress.update(ids.len() as u64, ids.len() as u64);
        ids.into_iter().map(|id| self.disk_info(id, false)).collect()
    }

    /// Makes an independent copy of the allocated data. An interrupted copy is removed.
    pub fn clone_full(&self, disk: &str, at: &Point, name: &str, progress: &dyn Progress) -> Result<DiskInfo> {
        let (source, snapshot, temporary, id, client) = {
            let _changes = self.lock_changes_at(disk, at);
            names::check("disk", name)?;
            let source = self.find_disk(disk)?;
            let (snapshot, temporary) = match at {
                Point::Snapshot(snapshot) => (self.find_snapshot(&source, snapshot)?, false),
                Point::Head => (self.snapshot_for(&source, &format!("copying-to-{name}"))?, true),
            };
            let created = self.engine.create_disk(NewDisk {
                name: name.to_owned(),
                capacity: snapshot.capacity,
                provisioning: source.provisioning,
                uuid: names::new_uuid()?,
                incomplete: true,
            });
            match created {
                Ok(id) => {
                    let client = self.hold(&source, &snapshot)?;
                    (source, snapshot, temporary, id, client)
                }
                Err(error) => {
                    if temporary {
                        self.engine.delete_snapshot(snapshot.id)?;
                    }
                    return Err(error);
                }
            }
        };
        // No lock is held: the snapshot does not change, and no client can open the new disk yet.
        let copied = self.copy(&source, &snapshot, id, progress);
        let _changes = self.changes.lock();
        drop(client);
        let ended = copied.and_then(|()| self.engine.complete_disk(id));
        if temporary {
            self.engine.delete_snapshot(snapshot.id)?;
        }
        match ended {
            Ok(()) => self.disk_info(id, false),
            Err(error) => {
                self.engine.delete_disk(id, &[])?;
                Err(error.context(format!("disk '{name}' was not made")))
            }
        }
    }

    fn copy(&self, source: &Object, snapshot: &Object, to: u64, progress: &dyn Progress) -> Result<()> {
        let end = snapshot.capacity.div_ceil(BLOCK_SIZE as u64);
        let counts = self.engine.count_blocks(snapshot.id)?;
        let data = counts.allocated - counts.unwritten;
        let total = data * BLOCK_SIZE as u64;
        let thick = source.provisioning != Provisioning::Thin;
        self.engine.check_space(if thick { end } else { data })?;
        let writer = BulkWriter::new(&self.engine, to);
        let title = format!("{}@{}", source.name, snapshot.name);
        let plan = |range| self.engine.plan_snapshot(snapshot.id, range);
        let throttle = Throttle::new(progress);
        let mut done = 0;
        let mut at = 0;
        while at < end {
            let spans = self.engine.spans_snapshot(snapshot.id, at..end, SPANS)?;
            for span in spans {
                let range = span.logical..span.logical + span.blocks;
                at = range.end;
                match span.condition {
                    Condition::Data => {
                        let mut from = range.start;
                        while from < range.end {
                            if progress.cancelled() {
                                return Err(Error::new(ErrorKind::Interrupted, "stopped on request"));
                            }
                            let to = range.end.min(from + COPY_BLOCKS);
                            let bytes = self.engine.read_blocks(&title, from..to, &plan)?;
                            writer.write(from, &bytes)?;
                            let length = (to - from) * BLOCK_SIZE as u64;
                            done += length;
                            from = to;
                            progress.update(done.min(total), total);
                            throttle.wait(length);
                        }
                    }
                    Condition::Zero | Condition::Hole if thick => writer.reserve(range)?,
                    // A thin target needs no space for zeros, even if the source has reserved space for them.
                    Condition::Zero | Condition::Hole => {}
                }
            }
        }
        Ok(())
    }

    /// Makes a linked clone independent of its parent, while the clone is in use. The parent can be deleted afterwards.
    /// No data is copied, because blocks have reference counts.
    pub fn detach(&self, name: &str, _progress: &dyn Progress) -> Result<DiskInfo> {
        let _changes = self.changes.lock();
        let disk = self.find_disk(name)?;
        if disk.origin == 0 {
            return Err(Error::new(ErrorKind::Invalid, format!("disk '{name}' is not a linked clone")));
        }
        self.engine.detach(disk.id)?;
        self.disk_info(disk.id, false)
    }
}
