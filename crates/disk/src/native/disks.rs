//! Creating, listing, resizing, renaming and deleting disks.

use super::Native;
use crate::info::{DiskInfo, Provisioning};
use crate::names;
use backend::{BLOCK_SIZE, Buffer};
use error::text::size;
use error::{Error, ErrorKind, Result};
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;
use store::catalog::{Catalog, Object, Provisioning as Stored};
use store::engine::{BulkWriter, Condition, NewDisk};
use work::Progress;
use work::Throttle;

/// The smallest capacity: one sector.
pub const CAPACITY_MIN: u64 = 512;
/// The largest capacity: 64 TiB.
pub const CAPACITY_MAX: u64 = 64 << 40;
/// Capacities are multiples of a sector.
const SECTOR: u64 = 512;
/// Bytes of zeros per write while an eager zeroed disk is filled.
const ZERO_PIECE: u64 = 1 << 20;
/// Most extents of a thick disk that a status examines.
const EXTENTS_COUNTED: usize = 100_000;
/// Blocks reserved between two progress reports (1 GiB).
const RESERVE_PIECE: u64 = 1 << 18;

/// The stored form of a provisioning type.
pub(crate) fn stored(provisioning: Provisioning) -> Stored {
    match provisioning {
        Provisioning::Thin => Stored::Thin,
        Provisioning::ZeroedThick => Stored::ZeroedThick,
        Provisioning::EagerZeroedThick => Stored::EagerZeroedThick,
    }
}

fn shown(provisioning: Stored) -> Provisioning {
    match provisioning {
        Stored::Thin => Provisioning::Thin,
        Stored::ZeroedThick => Provisioning::ZeroedThick,
        Stored::EagerZeroedThick => Provisioning::EagerZeroedThick,
    }
}

pub(crate) fn check_capacity(name: &str, capacity: u64) -> Result<()> {
    let why = if capacity < CAPACITY_MIN {
        "the smallest is 512 bytes"
    } else if capacity > CAPACITY_MAX {
        "the largest is 64 TiB"
    } else if !capacity.is_multiple_of(SECTOR) {
        "it must be a multiple of 512"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Invalid, format!("disk '{name}' cannot have a capacity of {}: {why}", size(capacity))))
}

/// The name `disk@snapshot` of a snapshot.
pub(crate) fn snapshot_title(catalog: &Catalog, id: u64) -> Option<String> {
    let snapshot = catalog.find(id).filter(|object| object.is_snapshot())?;
    Some(format!("{}@{}", catalog.find(snapshot.disk)?.name, snapshot.name))
}

/// A disk that can be deleted.
pub(super) struct DeletableDisk {
    pub disk: Object,
    pub snapshots: Vec<Object>,
    /// The linked clones that stay. The snapshots on which they are based are handed over to them.
    pub clones: Vec<Object>,
}

impl DeletableDisk {
    /// Whether a snapshot of the disk is handed over to a clone.
    pub fn hands_over(&self, snapshot: &Object) -> bool {
        is_origin(snapshot, &self.clones)
    }
}

fn is_origin(snapshot: &Object, clones: &[Object]) -> bool {
    clones.iter().any(|clone| clone.origin == snapshot.id)
}

impl Native {
    /// Creates a disk. Reports progress while a thick disk is filled.
    pub fn create_disk(
        &self,
        name: &str,
        capacity: u64,
        provisioning: Provisioning,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        names::check("disk", name)?;
        check_capacity(name, capacity)?;
        let thick = provisioning != Provisioning::Thin;
        let new = NewDisk {
            name: name.to_owned(),
            capacity,
            provisioning: stored(provisioning),
            uuid: names::new_uuid()?,
            incomplete: thick,
        };
        let id = {
            let _changes = self.changes.lock();
            self.engine.create_disk(new)?
        };
        // No client can open the disk before it is complete. The disk is filled without the lock, because filling takes
        // long and other disks must stay available.
        let filled = match thick {
            true => self.fill(id, 0..capacity.div_ceil(BLOCK_SIZE as u64), provisioning, progress),
            false => Ok(()),
        };
        let _changes = self.changes.lock();
        if thick {
            let filled = filled.and_then(|()| self.engine.complete_disk(id));
            if let Err(error) = filled {
                self.engine.delete_disk(id, &[])?;
                self.engine.reclaim()?;
                return Err(error.context(format!("disk '{name}' was not made")));
            }
        }
        self.disk_info(id, false)
    }

    /// Reserves space for blocks of a thick disk, and zeroes them if the disk is eager zeroed.
    pub(super) fn fill(
        &self,
        id: u64,
        blocks: std::ops::Range<u64>,
        provisioning: Provisioning,
        progress: &dyn Progress,
    ) -> Result<()> {
        self.engine.check_space(blocks.end - blocks.start)?;
        let writer = BulkWriter::new(&self.engine, id);
        let total = (blocks.end - blocks.start) * BLOCK_SIZE as u64;
        let eager = provisioning == Provisioning::EagerZeroedThick;
        let piece = if eager { ZERO_PIECE / BLOCK_SIZE as u64 } else { RESERVE_PIECE };
        let zeros = Buffer::zeroed(if eager { piece as usize } else { 0 });
        let throttle = Throttle::new(progress);
        let mut at = blocks.start;
        while at < blocks.end {
            if progress.cancelled() {
                return Err(Error::new(ErrorKind::Interrupted, "stopped on request"));
            }
            if self.closing.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Stopped, "the datastore is being closed"));
            }
            let end = blocks.end.min(at + piece);
            if eager {
                writer.write(at, &zeros[..(end - at) as usize * BLOCK_SIZE])?;
            } else {
                writer.reserve(at..end)?;
            }
            at = end;
            progress.update((at - blocks.start) * BLOCK_SIZE as u64, total);
            if eager {
                throttle.wait(piece * BLOCK_SIZE as u64);
            }
        }
        Ok(())
    }

    /// Number of blocks that are reserved for zeroed thick disks and are not written yet. Only the first
    /// `EXTENTS_COUNTED` extents of a disk are examined, so that counting takes a bounded time.
    pub fn reserved_in_disks(&self) -> Result<u64> {
        let thick = |disk: &&Object| disk.provisioning == Stored::ZeroedThick;
        let ids: Vec<u64> =
            self.engine.with_catalog(|catalog| catalog.disks().filter(thick).map(|disk| disk.id).collect());
        let mut sum = 0;
        for id in ids {
            match self.engine.count_unwritten(id, EXTENTS_COUNTED) {
                Ok(blocks) => sum += blocks,
                // The disk was deleted meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(sum)
    }

    /// All disks by name, without their block counts.
    pub fn disks(&self) -> Result<Vec<DiskInfo>> {
        let ids: Vec<u64> = self.engine.with_catalog(|catalog| {
            catalog.disks().filter(|disk| super::is_visible(disk)).map(|disk| disk.id).collect()
        });
        ids.into_iter().map(|id| self.disk_info(id, false)).collect()
    }

    /// One disk, with its block counts.
    pub fn disk(&self, name: &str) -> Result<DiskInfo> {
        let id = self.find_disk(name)?.id;
        self.disk_info(id, true)
    }

    pub(crate) fn disk_info(&self, id: u64, count: bool) -> Result<DiskInfo> {
        let counts = if count { Some(self.engine.count_blocks(id)?) } else { None };
        let uuid = self.engine.with_catalog(|catalog| catalog.get(id).map(|disk| names::uuid_text(&disk.uuid)))?;
        let (settings, waiting) = (self.settings.of(&uuid), self.settings.waiting(&uuid));
        let (cache_hits, cache_misses) = self.engine.cache_lookups(id);
        let compression = Some(id).filter(|_| !settings.compression.is_off()).and_then(|id| self.compression_state(id));
        let deduplication = self.deduplication_state(id, &uuid);
        let (clients, stopped) = (self.clients(id), self.engine.failure());
        self.engine.with_catalog(|catalog| {
            let disk = catalog.get(id)?;
            Ok(DiskInfo {
                name: disk.name.clone(),
                uuid,
                capacity: disk.capacity,
                provisioning: shown(disk.provisioning),
                format: "native".into(),
                parent_snapshot: catalog.find(disk.parent).map(|snapshot| snapshot.name.clone()),
                origin: snapshot_title(catalog, disk.origin),
                snapshots: catalog.snapshots_of(id).filter(|snapshot| !snapshot.incomplete).count() as u64,
                blocks_allocated: counts.map(|counts| counts.allocated),
                blocks_to_be_zeroed: counts.map(|counts| counts.unwritten),
                exclusive: counts.map(|counts| counts.exclusive * BLOCK_SIZE as u64),
                clients,
                users: Vec::new(),
                machine: None,
                stopped,
                settings,
                waiting,
                compression,
                deduplication,
                cache_hits,
                cache_misses,
                created: disk.created,
                image: None,
            })
        })
    }

    /// Grows a disk, or shrinks it if `shrink` confirms that data at its end may be lost.
    pub fn resize_disk(&self, name: &str, capacity: u64, shrink: bool) -> Result<DiskInfo> {
        let id = self.find_disk(name)?.id;
        self.resize_by_id(id, capacity, shrink)
    }

    pub(crate) fn resize_by_id(&self, id: u64, capacity: u64, shrink: bool) -> Result<DiskInfo> {
        self.resize_watched(id, capacity, shrink, &crate::NoProgress)
    }

    /// Like [`Native::resize_by_id`]. Reports progress while the new end of a thick disk is filled.
    pub(super) fn resize_watched(
        &self,
        id: u64,
        capacity: u64,
        shrink: bool,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        let mut changes = self.lock_changes_unless(|growing| growing.contains(&id));
        let disk = self.engine.with_catalog(|catalog| catalog.get(id).cloned())?;
        check_capacity(&disk.name, capacity)?;
        if capacity < disk.capacity && !shrink {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "disk '{}' has {}; with {}, the data beyond is lost: use --shrink to allow that",
                    disk.name,
                    size(disk.capacity),
                    size(capacity)
                ),
            ));
        }
        let block = BLOCK_SIZE as u64;
        let (old, new) = (disk.capacity.div_ceil(block), capacity.div_ceil(block));
        if capacity < disk.capacity {
            // The capacity is reduced first, so that no write is made beyond the new end while the blocks there are
            // discarded.
            self.engine.set_capacity(id, capacity)?;
            self.announce_capacity(id, capacity);
            let head = self.engine.head(id);
            if new < old {
                self.engine.discard_blocks(&head, new..old)?;
            }
            self.engine.flush()?;
            if disk.reserved > new {
                // Writes need at most one new block for each block of the disk.
                self.engine.set_aside_at_most(id, new)?;
            }
        } else if capacity > disk.capacity {
            self.clear_behind_end(&disk, old..new)?;
            if disk.provisioning != Stored::Thin && new > old {
                // The space that is reserved for writes to shared blocks must stay available, so the new blocks need
                // additional space.
                if disk.reserved > 0 {
                    self.engine.set_more_aside(id, new - old)?;
                }
                // The new end is filled without the lock, because filling takes long and other disks must stay
                // available. No client can access the new end before the capacity changes.
                changes.insert(id);
                let fill = || self.fill(id, old..new, shown(disk.provisioning), progress);
                let filled = MutexGuard::unlocked(&mut changes, fill);
                changes.remove(&id);
                self.grown.notify_all();
                if let Err(error) = filled {
                    self.engine.discard_blocks(&self.engine.head(id), old..new)?;
                    self.engine.flush()?;
                    if disk.reserved > 0 {
                        self.engine.set_aside_at_most(id, disk.reserved)?;
                    }
                    return Err(error.context(format!("disk '{}' was not resized", disk.name)));
                }
            }
            self.engine.set_capacity(id, capacity)?;
            self.announce_capacity(id, capacity);
        }
        self.disk_info(id, false)
    }

    /// Clears the range by which a disk grows, because this range must read as zeros. An earlier shrink has left data
    /// after the end in the last block, and if a crash interrupted the shrink, also whole blocks.
    fn clear_behind_end(&self, disk: &Object, blocks: std::ops::Range<u64>) -> Result<()> {
        let head = self.engine.head(disk.id);
        let (last, tail) = (disk.capacity / BLOCK_SIZE as u64, (disk.capacity % BLOCK_SIZE as u64) as usize);
        if tail > 0 {
            let spans = self.engine.spans_head(&head, last..last + 1, 1)?;
            if spans.iter().any(|span| span.condition == Condition::Data) {
                self.engine.modify_block(&head, &disk.name, last, &|content| content[tail..].fill(0))?;
            }
        }
        if !blocks.is_empty() {
            self.engine.discard_blocks(&head, blocks)?;
        }
        // The zeros must be durable before the new capacity becomes durable.
        self.engine.flush()
    }

    /// Renames a disk; the caller has reserved the new name.
    pub fn rename_disk(&self, name: &str, to: &str) -> Result<DiskInfo> {
        let _changes = self.changes.lock();
        let id = self.find_disk(name)?.id;
        self.engine.rename_disk(id, to)?;
        self.disk_info(id, false)
    }

    /// Deletes a disk with its snapshots. `Busy` while clients have the disk open, and if linked clones are based on it
    /// (the error lists them). With `promote`, the snapshots that clones are based on are handed over to the first
    /// clone instead. `check_clone` gets the name of this clone; its error refuses the deletion.
    pub fn delete_disk(
        &self,
        name: &str,
        promote: bool,
        check_clone: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let _changes = self.lock_changes_of(&[name]);
        let DeletableDisk { disk, snapshots, mut clones } = self.deletable_disk(name, promote, &[])?;
        // A hidden clone may be deleted before it is complete, and its snapshots with it, so visible clones come first.
        clones.sort_by_key(|clone| !super::is_visible(clone));
        clones.first().map_or(Ok(()), |clone| check_clone(&clone.name))?;
        self.engine.delete_disk(disk.id, &self.handed_over(&snapshots, &clones))
    }

    /// A disk that can be deleted once the disks in `before` are deleted. Called under the lock `changes`.
    pub(super) fn deletable_disk(&self, name: &str, promote: bool, before: &[String]) -> Result<DeletableDisk> {
        let disk = self.find_disk(name)?;
        self.refuse_in_use(disk.id, &format!("disk '{name}'"))?;
        let (snapshots, clones) = self.engine.with_catalog(|catalog| {
            let snapshots: Vec<Object> = catalog.snapshots_of(disk.id).cloned().collect();
            let clones: Vec<Object> = catalog
                .disks()
                .filter(|clone| snapshots.iter().any(|snapshot| snapshot.id == clone.origin))
                .filter(|clone| !before.contains(&clone.name))
                .cloned()
                .collect();
            (snapshots, clones)
        });
        for snapshot in &snapshots {
            self.refuse_in_use(snapshot.id, &format!("snapshot '{name}@{}'", snapshot.name))?;
        }
        if !clones.is_empty() && !promote {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "disk '{name}' is the parent of linked clones: {}; delete or detach them, or use --promote to hand \
                     over the snapshots that they are based on",
                    list(clones.iter().map(|clone| clone.name.as_str()))
                ),
            ));
        }
        Ok(DeletableDisk { disk, snapshots, clones })
    }

    /// Hands over snapshots with clones to the first clone, which becomes the parent of the other clones. Returns the
    /// changed records of the catalog.
    fn handed_over(&self, snapshots: &[Object], clones: &[Object]) -> Vec<Object> {
        let Some(first_clone) = clones.first() else { return Vec::new() };
        let needed: Vec<&Object> = snapshots.iter().filter(|snapshot| is_origin(snapshot, clones)).collect();
        let own: Vec<Object> =
            self.engine.with_catalog(|catalog| catalog.snapshots_of(first_clone.id).cloned().collect());
        // The nearest ancestor that is also handed over, or 0.
        let parent_of = |mut id: u64| loop {
            let Some(snapshot) = snapshots.iter().find(|snapshot| snapshot.id == id) else { return 0 };
            id = snapshot.parent;
            if id == 0 || needed.iter().any(|other| other.id == id) {
                return id;
            }
        };
        let mut changed = Vec::new();
        let mut taken: Vec<String> = own.iter().map(|snapshot| snapshot.name.clone()).collect();
        for snapshot in &needed {
            let name = names::free(&snapshot.name, |name| taken.iter().any(|taken| taken == name));
            taken.push(name.clone());
            changed.push(Object { disk: first_clone.id, name, parent: parent_of(snapshot.id), ..(*snapshot).clone() });
        }
        // The first clone's own snapshots become children of the snapshot on which the clone was based.
        for snapshot in own.iter().filter(|snapshot| snapshot.parent == 0) {
            changed.push(Object { parent: first_clone.origin, ..snapshot.clone() });
        }
        let parent = if first_clone.parent == 0 { first_clone.origin } else { first_clone.parent };
        changed.push(Object { origin: 0, parent, ..first_clone.clone() });
        changed
    }
}

/// A list of names for messages, which is cut after the first few names.
pub(crate) fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 10;
    let names: Vec<&str> = names.collect();
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}
