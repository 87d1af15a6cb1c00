//! Snapshots: taking them, alone or with others at one point in time; listing, deleting, reverting to and comparing
//! them.

use super::{Foreign, ForeignDisk};
use crate::info::{ChangedExtent, Direction, DiskInfo, EachExtent, Point, SnapshotInfo, SnapshotOptions};
use chain::{Chain, Condition, LevelKey};
use error::{Error, ErrorKind, Result};
use parking_lot::MutexGuard;
use std::sync::Arc;
use vmdk::NewSnapshot;
use work::{NoProgress, Progress};

/// Bytes that one step of a comparison examines.
const DIFF_WINDOW: u64 = 1 << 30;
/// Most spans that one query of the map returns.
const DIFF_SPANS: usize = 4096;
/// Description of temporary snapshots. Opening the datastore deletes them.
pub(super) const TEMPORARY: &str = "lamina: temporary, for a copy";

impl From<Direction> for vmdk::Direction {
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::Up => Self::Up,
            Direction::Down => Self::Down,
        }
    }
}

/// A progress that cancels its operation at once, so that a deleted snapshot is not merged.
struct Unwanted;

impl Progress for Unwanted {
    fn update(&self, _done: u64, _total: u64) {}
    fn cancelled(&self) -> bool {
        true
    }
}

impl ForeignDisk {
    /// Checks that the disk has a snapshot with that name; `NotFound` if it has none.
    pub(super) fn find_snapshot(&self, name: &str) -> Result<()> {
        if self.disk.record().snapshots.iter().any(|snapshot| snapshot.name == name) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "disk '{0}' has no snapshot '{1}'; 'lamina snapshot list {0}' lists its snapshots",
                self.disk.name(),
                name.escape_debug()
            ),
        ))
    }

    /// The right to take a snapshot: `Busy` while another request takes one.
    pub(crate) fn begin_snapshot(&self) -> Result<MutexGuard<'_, ()>> {
        self.snapshots.try_lock().ok_or_else(|| {
            let text = format!("disk '{}': another snapshot of it is being taken; try again", self.disk.name());
            Error::new(ErrorKind::Busy, text)
        })
    }

    /// Deletes temporary snapshots of operations that a crash ended. Their images are merged when a snapshot is deleted
    /// next.
    pub(super) fn drop_temporary_snapshots(&self) {
        let record = self.disk.record();
        for snapshot in record.snapshots.iter().filter(|snapshot| snapshot.description == TEMPORARY) {
            let dropped = self.disk.delete_snapshot(&snapshot.name, Some(vmdk::Direction::Down), &Unwanted);
            match dropped {
                Err(error) if error.kind() != ErrorKind::Interrupted => {
                    let (disk, name) = (&record.name, &snapshot.name);
                    tracing::warn!(%error, disk, snapshot = name, "a temporary snapshot could not be deleted");
                }
                _ => {}
            }
        }
    }

    /// Deletes a snapshot that no write has followed.
    pub(crate) fn take_back_snapshot(&self, name: &str) -> Result<()> {
        self.disk.delete_snapshot(name, Some(vmdk::Direction::Down), &NoProgress)?;
        self.tell_bases();
        Ok(())
    }

    /// The chain of a point, and the numbers of its images, newest first.
    fn chain_of(&self, point: &Point) -> Result<(Arc<Chain>, Vec<u32>)> {
        match point {
            Point::Head => {
                let chain = self.disk.chain()?;
                let record = self.disk.record();
                Ok((chain, record.line(record.head)?))
            }
            Point::Snapshot(name) => {
                self.find_snapshot(name)?;
                let chain = self.disk.snapshot_chain(name)?;
                let record = self.disk.record();
                let node = record.snapshot(name)?.node;
                Ok((chain, record.line(node)?))
            }
        }
    }
}

/// Appends the ranges that are allocated in the levels of a chain above `above`.
fn runs(chain: &Chain, above: LevelKey, from: u64, to: u64, out: &mut Vec<(u64, u64)>) -> Result<()> {
    let mut at = from;
    let to = to.min(chain.capacity());
    while at < to {
        let spans = chain.changed_above(above, at, to - at, DIFF_SPANS)?;
        let Some(last) = spans.last() else { break };
        at = last.start + last.length;
        let changed = spans.iter().filter(|span| span.condition != Condition::Absent);
        out.extend(changed.map(|span| (span.start, span.start + span.length)));
    }
    Ok(())
}

impl Foreign {
    /// Takes snapshots of several disks at one point in time. They have the numbers `uids`, if given. `between` is
    /// called at that point, while no write is in progress.
    pub fn create_snapshots(
        &self,
        of: &[(Arc<ForeignDisk>, String)],
        uids: Option<&[u32]>,
        options: &SnapshotOptions,
        between: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut wanted = Vec::with_capacity(of.len());
        for (number, (entry, name)) in of.iter().enumerate() {
            if entry.disk.record().snapshots.iter().any(|snapshot| snapshot.name == *name) {
                let text = format!("disk '{}' has a snapshot '{name}' already", entry.disk.name());
                return Err(Error::new(ErrorKind::Exists, text));
            }
            wanted.push((
                Arc::clone(&entry.disk),
                NewSnapshot {
                    name: name.clone(),
                    description: options.description.clone(),
                    folder: options.folder.clone(),
                    delta: options.delta,
                    uid: uids.and_then(|uids| uids.get(number).copied()),
                    created: None,
                },
            ));
        }
        let outcome = vmdk::snapshot_group(&wanted, between);
        of.iter().for_each(|(entry, _)| entry.tell_bases());
        outcome
    }

    /// The snapshots of a disk, oldest first.
    pub fn snapshots(&self, entry: &ForeignDisk) -> Vec<SnapshotInfo> {
        let disk = entry.disk.name();
        let names: Vec<(String, String)> =
            self.entries().iter().map(|entry| (entry.disk.uuid(), entry.disk.name())).collect();
        let clones = self.clones_there(entry);
        let shown = entry.disk.snapshots().into_iter().map(|snapshot| SnapshotInfo {
            disk: disk.clone(),
            capacity: snapshot.capacity,
            parent: snapshot.parent,
            clones: clones
                .iter()
                .filter(|clone| clone.snapshot.as_deref() == Some(&snapshot.name))
                .map(|clone| {
                    let now = names.iter().find(|(uuid, _)| *uuid == clone.uuid);
                    now.map_or_else(|| clone.name.clone(), |(_, name)| name.clone())
                })
                .collect(),
            current: snapshot.current,
            created: snapshot.created,
            description: snapshot.description,
            name: snapshot.name,
        });
        shown.collect()
    }

    /// Deletes a snapshot: its image is merged with a neighbour, while the disk is in use.
    pub fn delete_snapshot(
        &self,
        entry: &ForeignDisk,
        name: &str,
        direction: Option<Direction>,
        progress: &dyn Progress,
    ) -> Result<()> {
        self.refuse_delete_snapshot(entry, name)?;
        let outcome = entry.disk.delete_snapshot(name, direction.map(Into::into), progress);
        entry.tell_bases();
        outcome
    }

    /// Fails if a snapshot cannot be deleted.
    pub(super) fn refuse_delete_snapshot(&self, entry: &ForeignDisk, name: &str) -> Result<()> {
        let _clients = entry.clients.lock();
        entry.find_snapshot(name)?;
        let title = format!("snapshot '{}@{name}'", entry.disk.name());
        self.switches.refuse_in_use(&entry.identity(Some(name)), &title)?;
        let clones = self.clones_of(entry, Some(name));
        if clones.is_empty() {
            return Ok(());
        }
        let clones = crate::native::list(clones.iter().map(String::as_str));
        let text = format!("{title} is the parent of linked clones: {clones}; delete them first");
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Reverts the head to a snapshot. `Busy` while clients have the disk open.
    pub fn revert(&self, entry: &ForeignDisk, name: &str) -> Result<DiskInfo> {
        let _clients = entry.clients.lock();
        entry.find_snapshot(name)?;
        self.switches.refuse_in_use(&entry.identity(None), &format!("disk '{}'", entry.disk.name()))?;
        entry.disk.revert(name)?;
        self.info(entry, false)
    }

    /// Calls `each` for every extent that differs between two points, in order of offset. The points may differ in
    /// ranges that are allocated, in either chain, above the newest image that both chains share.
    pub fn diff(&self, entry: &ForeignDisk, from: &Point, to: &Point, each: EachExtent<'_>) -> Result<()> {
        let (old, old_line) = entry.chain_of(from)?;
        let (new, new_line) = entry.chain_of(to)?;
        let common = new_line.iter().find(|node| old_line.contains(node)).copied();
        let above = |chain: &Chain, line: &[u32]| -> Result<LevelKey> {
            let keys = chain.keys();
            let index = line.iter().position(|node| Some(*node) == common);
            index.filter(|_| keys.len() == line.len()).and_then(|index| keys.get(index).copied()).ok_or_else(|| {
                let text = format!("the chain of disk '{}' changed meanwhile; try again", entry.disk.name());
                Error::new(ErrorKind::Busy, text)
            })
        };
        let (old_above, new_above) = (above(&old, &old_line)?, above(&new, &new_line)?);
        let capacity = old.capacity().max(new.capacity());
        let mut at = 0;
        let mut pending: Option<ChangedExtent> = None;
        while at < capacity {
            let end = capacity.min(at + DIFF_WINDOW);
            let mut changed = Vec::new();
            runs(&old, old_above, at, end, &mut changed)?;
            runs(&new, new_above, at, end, &mut changed)?;
            changed.sort_unstable();
            let mut done = at;
            for (start, stop) in changed {
                let start = start.max(done);
                done = done.max(stop);
                if start < stop {
                    by_content(&new, start, stop, &mut |extent| match &mut pending {
                        Some(last) if last.offset + last.length == extent.offset && last.zero == extent.zero => {
                            last.length += extent.length;
                            Ok(())
                        }
                        _ => pending.replace(extent).map_or(Ok(()), &mut *each),
                    })?;
                }
            }
            at = end;
        }
        pending.map_or(Ok(()), each)
    }
}

/// Splits a changed range into parts in which the later point has data and parts in which it has none.
fn by_content(chain: &Chain, start: u64, stop: u64, each: EachExtent<'_>) -> Result<()> {
    let mut at = start;
    let end = stop.min(chain.capacity());
    while at < end {
        let spans = chain.status(at, end - at, DIFF_SPANS)?;
        let Some(last) = spans.last() else { break };
        for span in &spans {
            let zero = span.condition != Condition::Data;
            each(ChangedExtent { offset: span.start, length: span.length, zero })?;
        }
        at = last.start + last.length;
    }
    if at < stop {
        each(ChangedExtent { offset: at, length: stop - at, zero: true })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::datastore::{Datastore, InitOptions, QueueChoice};
    use crate::testbed::options;
    use backend::SharedSlice;
    use layer::image::ImageKind;

    const MIB: u64 = 1 << 20;

    /// The list of a device's bases is updated when the whole deletion has ended, which may merge further images.
    #[test]
    fn a_deleted_snapshot_is_no_base_as_soon_as_its_level_has_later_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ds");
        Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
        let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
        let new = vmdk::NewDisk::new("vm", 8 * MIB, ImageKind::Thin, None);
        datastore.foreign.create_disk(&new, &NoProgress).unwrap();
        let entry = datastore.foreign.find("vm").unwrap();
        let client = datastore.device("vm", false).unwrap();
        for (number, name) in [(0, "first"), (1, "second")] {
            client.write(number * MIB, SharedSlice::copy_of(&[1; 4096]), false).unwrap();
            entry.disk.snapshot(&NewSnapshot::named(name)).unwrap();
            entry.tell_bases();
        }
        client.write(2 * MIB, SharedSlice::copy_of(&[1; 4096]), false).unwrap();
        let changed = |base: &str| -> Result<Vec<u64>> {
            let (mut at, mut starts) = (0, Vec::new());
            for extent in client.changed_since(base, 0, 8 * MIB, 100)? {
                if extent.dirty {
                    starts.push(at / MIB);
                }
                at += extent.length;
            }
            Ok(starts)
        };
        assert_eq!((changed("first").unwrap(), changed("second").unwrap()), (vec![1, 2], vec![2]));
        entry.disk.delete_snapshot("first", Some(vmdk::Direction::Down), &NoProgress).unwrap();
        assert_eq!(changed("first").unwrap_err().kind(), ErrorKind::NotFound, "the change in MiB 1 is left out");
        assert_eq!(changed("second").unwrap(), [2], "its level is the one of the other snapshot now");
        entry.tell_bases();
        assert_eq!((client.dirty_bases(), changed("second").unwrap()), (vec!["second".to_owned()], vec![2]));
        drop(client);
        datastore.close().unwrap();
    }
}
