//! What deleting a disk, or snapshots of it, would free in the file system. Nothing is changed.
//!
//! 1. A deletion is carried out on a copy of the record, by the functions that also make the records which
//!    [`Disk::delete_snapshot`] commits (`merged`), and in the directions that this function would choose. This yields
//!    the images that stay, and for each of them the images that are merged into it.
//! 2. Removing a file frees exactly the bytes that the file system has allocated to it. The bytes that a merge adds are
//!    an estimate: the space that the copied ranges need in the image that stays, without tables and without rounding
//!    by the file system.
//! 3. A count does not acquire the right to change the disk, so no operation fails because of a count. A count does not
//!    finish an interrupted operation.
//! 4. The disk may change during a count, which is valid only if the record is the same at its beginning and its end.

use crate::disk::Disk;
use crate::merge::{Direction, Removal, ranges_held};
use crate::record::{FileRecord, ImageOwnership, Node, Record};
use crate::stored::RECORD_NAME;
use crate::{Error, ErrorKind, Result};
use backend::{Access, IoMode};
use layer::image::Place;
use std::collections::{BTreeMap, BTreeSet};

/// How often a count is repeated because the disk changed meanwhile.
const ATTEMPTS: usize = 4;

/// What a deletion would free in the file system, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preview {
    /// Bytes of the files that are removed.
    pub removed: u64,
    /// An estimate of the bytes that merges add to images that stay.
    pub copied: u64,
    /// Number of images that are merged into others.
    pub merged: usize,
    /// Number of images of the deleted snapshots that stay, because the head or other snapshots need them.
    pub images_kept: usize,
}

impl Disk {
    /// What deleting the disk would free. Fails while another operation is under way, because the deletion would fail.
    pub fn preview_delete(&self) -> Result<Preview> {
        self.could_begin_over("counting its space")?;
        Ok(Preview { removed: self.bytes_made()?, ..Preview::default() })
    }

    /// Bytes of the files that the disk has made: those of its images, its record and its list of snapshots.
    pub fn bytes_made(&self) -> Result<u64> {
        let record = self.record();
        let made = record.nodes.iter().filter(|node| node.standing == ImageOwnership::Made);
        let mut removed = made.map(|node| self.allocated(&record, node)).sum::<Result<u64>>()?;
        for name in [self.vmsd_name(&record), RECORD_NAME.to_owned()] {
            removed += self.allocated_to(&record, &FileRecord { folder: None, name })?;
        }
        Ok(removed)
    }

    /// What deleting these snapshots would free. Fails for the reasons for which the deletion would fail, and while an
    /// interrupted operation has to be finished.
    pub fn preview_delete_snapshots(&self, names: &[String], direction: Option<Direction>) -> Result<Preview> {
        for _ in 0..ATTEMPTS {
            self.could_begin("counting the space of a snapshot")?;
            let record = self.record();
            let counted = Removals::new(self, record.clone()).preview(names, direction);
            if self.record() == record {
                return counted;
            }
        }
        let text = format!("disk '{}' changed while the space of its snapshots was counted; try again", self.name());
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Bytes that the files of an image occupy in the file system.
    fn allocated(&self, record: &Record, node: &Node) -> Result<u64> {
        self.files(record, node).iter().map(|file| self.allocated_to(record, file)).sum()
    }

    fn allocated_to(&self, record: &Record, file: &FileRecord) -> Result<u64> {
        let place = Place { folder: self.folder(record, file.folder.as_deref())?, name: file.name.clone() };
        match place.open(IoMode::Buffered, Access::Read) {
            Ok(open) => open.allocated().map_err(|error| Error::io(format!("measuring '{}'", place.label()), error)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }
}

/// Snapshots that are removed one after another from a copy of a record.
struct Removals<'a> {
    disk: &'a Disk,
    /// The record before the removals.
    before: Record,
    /// The record after the removals so far.
    record: Record,
    /// Images that are merged into each image that stays.
    merged: BTreeMap<u32, Vec<u32>>,
    /// Images of which the files are removed.
    gone: Vec<Node>,
    /// Images of snapshots of which only the name was removed. A later removal may merge or remove them.
    nameless: BTreeSet<u32>,
}

impl<'a> Removals<'a> {
    fn new(disk: &'a Disk, record: Record) -> Self {
        Self {
            disk,
            before: record.clone(),
            record,
            merged: BTreeMap::new(),
            gone: Vec::new(),
            nameless: BTreeSet::new(),
        }
    }

    fn preview(mut self, names: &[String], direction: Option<Direction>) -> Result<Preview> {
        for name in names {
            let node = self.record.snapshot(name)?.node;
            self.disk.refuse_clones(name, node)?;
            match self.disk.removal(&self.record, name, direction)? {
                Some(removal) => self.merge(removal),
                None => {
                    let gone = self.record.drop_snapshot(name);
                    self.remove(gone);
                    self.nameless.insert(node);
                }
            }
            self.merge_redundant()?;
        }
        self.sum()
    }

    /// Merges images without a snapshot, as [`Disk::delete_snapshot`] does after every deletion.
    fn merge_redundant(&mut self) -> Result<()> {
        let mut passed = Vec::new();
        loop {
            let redundant = self.disk.redundant(&self.record);
            let Some(lower) = redundant.into_iter().find(|id| !passed.contains(id)) else { return Ok(()) };
            passed.push(lower);
            let Some(upper) = self.record.children(lower).first().copied() else { continue };
            if let Some(direction) = self.disk.direction(&self.record, lower, upper, None)? {
                self.merge(Removal { lower, upper, direction });
            }
        }
    }

    fn merge(&mut self, Removal { lower, upper, direction }: Removal) {
        let (source, target, gone) = match direction {
            Direction::Down => (upper, lower, self.record.merge_down(&[upper], lower)),
            Direction::Up => (lower, upper, self.record.merge_up(upper, lower)),
        };
        // The lower image is not kept any more. If the upper image was kept for its children, the merged image still
        // is.
        let is_kept = self.nameless.remove(&upper);
        self.nameless.remove(&lower);
        self.nameless.extend(is_kept.then_some(target));
        let more = self.merged.remove(&source).unwrap_or_default();
        let into = self.merged.entry(target).or_default();
        into.push(source);
        into.extend(more);
        self.remove(gone);
    }

    /// Notes images of which the files are removed: nothing that was merged into them stays.
    fn remove(&mut self, gone: Vec<Node>) {
        for node in gone {
            self.merged.remove(&node.id);
            self.gone.push(node);
        }
    }

    fn sum(self) -> Result<Preview> {
        let (disk, before) = (self.disk, &self.before);
        let gone = self.gone.iter().filter(|node| node.is_own());
        let removed = gone.map(|node| disk.allocated(before, node)).sum::<Result<u64>>()?;
        let mut copied = 0u64;
        for (target, sources) in &self.merged {
            let into = disk.image_of(before, *target)?;
            let sources = sources.iter().map(|id| disk.image_of(before, *id)).collect::<Result<Vec<_>>>()?;
            for range in ranges_held(sources.iter().map(|source| &**source.layer()), &**into.layer())? {
                copied = copied.saturating_add(into.layer().room_needed(range)?);
            }
        }
        let merged = self.merged.values().map(Vec::len).sum();
        let images_kept = self.nameless.iter().filter(|id| self.record.node(**id).is_ok()).count();
        Ok(Preview { removed, copied, merged, images_kept })
    }
}
