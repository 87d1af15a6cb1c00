//! Removing snapshots and levels: an image is merged into the one below or above it, while the disk is in use.
//!
//! ```text
//!            down, from C into F                           up, from F into C
//! announce   the record says that F is written, hidden    the record says that C is filled where it
//!            by C; F's snapshot loses its name            reads from F
//! merge      C's data is copied into F; the first write   F's data is copied into C; the first write
//!            changes F's CID                              changes C's CID
//! commit     F replaces C in the tree                     F's parent becomes C's parent
//! settle     F gets C's CID, which C's children record;   C gets its old CID back, which its children
//!            their hints are written                      record; its parentCID and hint are written
//! remove     C's files                                    F's files
//! ```
//!
//! 1. An interruption before the commit leaves a chain that reads as before (see `chain::consolidate`). F is the lower
//!    image, and C is its child. A merge down destroys the state of F's snapshot with the first write to F, so the
//!    snapshot's name is removed before this write. A level that remains is merged by the next deletion or
//!    consolidation, and [`Disk::redundant`] reports it. A merge up keeps the snapshot until the commit.
//! 2. The image that is written is never open twice, and no other chain reads it.
//! 3. An image with several children is merged into none of them: if its snapshot is deleted, only the name is removed,
//!    and the image is kept until it has only one child.

use crate::disk::{Claim, Disk};
use crate::line::Line;
use crate::record::{FileRecord, MergeSide, Merging, Node, ParentNow, Pending, Record, Settlement};
use crate::{Error, ErrorKind, Result};
use layer::image::{Image, parent_hint};
use layer::{Content, Extent, Layer};
use std::ops::Range;
use std::sync::Arc;
use work::Progress;

/// For each of this many bytes of payload, one byte is counted for metadata other than tables: free-space maps,
/// backmaps, and metadata of the file system.
const METADATA_SHARE: u64 = 64;
/// Bytes that a merge needs in the file system beside the data: for the records, descriptors and list of snapshots that
/// it replaces.
const SMALL_FILES: u64 = 64 << 10;
/// Extents of a source that are requested per call.
const EXTENTS: usize = 256;
/// The most ranges for which space is checked before a merge: 4 MiB of memory. With more ranges, a lack of space is
/// detected only while the merge runs.
const RANGES_MAX: usize = 1 << 18;

/// The direction in which a snapshot's image is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The image above is copied into the snapshot's image, which then replaces it.
    Down,
    /// The data of the snapshot's image that is still visible is copied into the image above.
    Up,
}

/// The merge of an image with the image above it, which deletes a snapshot.
pub(crate) struct Removal {
    pub lower: u32,
    pub upper: u32,
    pub direction: Direction,
}

impl Disk {
    /// Deletes a snapshot. If the snapshot's image has one child, the two images are merged, in the requested direction
    /// or in the one that copies less. If the image has several children, it is kept until it has only one.
    ///
    /// # Errors
    /// `Busy` while linked clones depend on the snapshot, or while its chain is open. `Interrupted` when `progress`
    /// cancelled the merge: a merge up then has changed nothing; after a merge down the snapshot is gone, and its level
    /// is merged later.
    pub fn delete_snapshot(&self, name: &str, direction: Option<Direction>, progress: &dyn Progress) -> Result<()> {
        self.noting(|| {
            let _operation = self.begin("deleting a snapshot")?;
            let record = self.record();
            let snapshot = record.snapshot(name)?.clone();
            self.refuse_clones(&snapshot.name, snapshot.node)?;
            match self.removal(&self.record(), name, direction)? {
                Some(Removal { lower, upper, direction: Direction::Down }) => {
                    self.merge_down(&[upper], lower, progress)?
                }
                Some(Removal { lower, upper, direction: Direction::Up }) => self.merge_up(upper, lower, progress)?,
                None => self.drop_name(name)?,
            }
            self.merge_redundant(progress)
        })
    }

    /// The merge that deletes a snapshot; `None` if only its name is removed.
    pub(crate) fn removal(&self, record: &Record, name: &str, direction: Option<Direction>) -> Result<Option<Removal>> {
        let lower = record.snapshot(name)?.node;
        let others = record.snapshots.iter().filter(|other| other.node == lower).count() > 1;
        let [upper] = record.children(lower)[..] else { return Ok(None) };
        if others || record.pinned().contains(&lower) || record.read_only {
            return Ok(None);
        }
        let direction = self.direction(record, lower, upper, direction)?;
        Ok(direction.map(|direction| Removal { lower, upper, direction }))
    }

    /// Merges the head's chain into its base, or into the lowest level that is writable and on which no other branch or
    /// clone depends. The snapshots in between are removed.
    ///
    /// # Errors
    /// `Busy` when there are levels to merge, but other branches or linked clones depend on all of them.
    pub fn consolidate(&self, progress: &dyn Progress) -> Result<()> {
        self.noting(|| self.merge_into_base(progress))
    }

    fn merge_into_base(&self, progress: &dyn Progress) -> Result<()> {
        let _operation = self.begin("consolidating")?;
        self.drop_stale_clones()?;
        let record = self.record();
        self.check_writable(&record, "consolidation")?;
        let line = record.line(record.head)?;
        let pinned = record.pinned();
        let mut target = 0;
        for (index, id) in line.iter().enumerate().skip(1) {
            let node = record.node(*id)?;
            if record.children(*id).len() != 1 || pinned.contains(id) || !node.is_own() {
                break;
            }
            if self.is_writable_kind(&record, node) {
                target = index;
            }
        }
        if target == 0 {
            let foreign = line.get(1).is_none_or(|below| record.node(*below).is_ok_and(|node| !node.is_own()));
            if foreign {
                return Ok(());
            }
            let text = format!(
                "disk '{}' cannot be consolidated: other branches of its snapshots, or linked clones, depend on the \
                 images below its head",
                record.name
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.merge_down(&line[..target], line[target], progress)?;
        self.merge_redundant(progress)
    }

    /// Images without a snapshot that have one child: they could be merged.
    pub(crate) fn redundant(&self, record: &Record) -> Vec<u32> {
        let pinned = record.pinned();
        let without = |id: u32| record.snapshot_of(id).is_none() && record.children(id).len() == 1;
        let own = record.nodes.iter().filter(|node| node.is_own() && !record.read_only);
        own.filter(|node| node.id != record.head && !pinned.contains(&node.id) && without(node.id))
            .map(|node| node.id)
            .collect()
    }

    /// Merges images without a snapshot that earlier deletions have left, as far as this is possible now.
    fn merge_redundant(&self, progress: &dyn Progress) -> Result<()> {
        let mut passed = Vec::new();
        loop {
            let record = self.record();
            let Some(id) = self.redundant(&record).into_iter().find(|id| !passed.contains(id)) else { return Ok(()) };
            passed.push(id);
            let Some(child) = record.children(id).first().copied() else { continue };
            let merged = match self.direction(&record, id, child, None)? {
                Some(Direction::Down) => self.merge_down(&[child], id, progress),
                Some(Direction::Up) => self.merge_up(child, id, progress),
                None => continue,
            };
            match merged {
                // A reader has the image open. The next deletion or consolidation merges it.
                Err(error) if error.kind() == ErrorKind::Busy => {}
                other => other?,
            }
        }
    }

    /// The direction in which to merge an image and its only child; `None` if neither is possible.
    pub(crate) fn direction(
        &self,
        record: &Record,
        lower: u32,
        upper: u32,
        wanted: Option<Direction>,
    ) -> Result<Option<Direction>> {
        let (below, above) = (record.node(lower)?, record.node(upper)?);
        let can_down = below.is_own() && self.is_writable_kind(record, below);
        let can_up = above.is_own();
        match wanted {
            Some(Direction::Down) if !can_down => {
                let text =
                    format!("'{}' does not belong to this disk: merge up, or convert the disk", below.descriptor);
                return Err(Error::new(ErrorKind::ReadOnly, text));
            }
            Some(Direction::Up) if !can_up => {
                let text = format!("'{}' does not belong to this disk: merge down", above.descriptor);
                return Err(Error::new(ErrorKind::ReadOnly, text));
            }
            Some(direction) => return Ok(Some(direction)),
            None => {}
        }
        if !can_down {
            // A base of another owner is copied completely only if the user requests that.
            return Ok(None);
        }
        if can_up {
            let (small, large) = (self.layer_figures(record, lower)?, self.layer_figures(record, upper)?);
            // A base is not copied into a delta of the same size; of two deltas, the one with less data is copied.
            if small.0 < large.0 || (below.parent.is_some() && small.1 < large.1 / 2) {
                return Ok(Some(Direction::Up));
            }
        }
        Ok(Some(Direction::Down))
    }

    /// The capacity of an image, and the bytes of data in it.
    fn layer_figures(&self, record: &Record, id: u32) -> Result<(u64, u64)> {
        let image = self.image_of(record, id)?;
        Ok((image.layer().capacity(), image.layer().usage()?.mapped))
    }

    /// An image: that of the head's chain, or a newly opened one.
    pub(crate) fn image_of(&self, record: &Record, id: u32) -> Result<Arc<Image>> {
        match self.open_head().and_then(|line| line.level(id)) {
            Some(level) => Ok(level.image),
            None => Ok(Arc::new(self.open_image(record, id, false)?)),
        }
    }

    /// Removes the name of a snapshot, and then the images that are not needed any more.
    fn drop_name(&self, name: &str) -> Result<()> {
        let record = self.record();
        let mut after = record.clone();
        let gone = after.drop_snapshot(name);
        self.refuse_open(&gone.iter().map(|node| node.id).collect::<Vec<_>>())?;
        let gone = self.own_files(&record, &gone);
        after.pending = Some(Pending { gone, ..Pending::new("delete snapshot") });
        self.commit(after)?;
        self.finish_pending()
    }

    /// The files of those images that are the disk's own.
    fn own_files(&self, record: &Record, nodes: &[Node]) -> Vec<FileRecord> {
        nodes.iter().filter(|node| node.is_own()).flat_map(|node| self.files(record, node)).collect()
    }

    fn refuse_open(&self, nodes: &[u32]) -> Result<()> {
        self.claim(nodes).map(drop)
    }

    /// The line that contains an image: that of the head, or a newly opened one. The flag is true for that of the head.
    fn line_with(&self, record: &Record, top: u32) -> Result<(Arc<Line>, bool)> {
        let head = self.head_line()?;
        match head.level(top) {
            Some(_) => Ok((head, true)),
            None => Ok((Arc::new(self.open_line(record, top, false, &[])?), false)),
        }
    }

    /// Merges images, newest first, into the image below them.
    fn merge_down(&self, sources: &[u32], target: u32, progress: &dyn Progress) -> Result<()> {
        let (Some(newest), Some(lowest)) = (sources.first().copied(), sources.last().copied()) else { return Ok(()) };
        let record = self.record();
        let claim = self.claim(&[sources, &[target]].concat())?;
        let (line, _) = self.line_with(&record, newest)?;
        let top = line.expect(newest)?;
        if newest == record.head {
            // If the head has no new CID in this opening yet, it gets one now, and keeps it: the target gets this CID
            // after the merge.
            self.with_room(&record, || top.image.renew_content())?;
        }
        let below = line.expect(target)?;
        if top.image.layer().capacity() != below.image.layer().capacity() {
            let text = format!(
                "disk '{}': '{}' has another capacity than what would be merged into it; merge up",
                record.name,
                below.image.place().label()
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        // The image is opened before the snapshot loses its name: if another process has the image open for writing,
        // this fails, and nothing has changed.
        let writable = match below.is_writing() {
            true => None,
            false => Some(Arc::new(self.open_image(&record, target, true)?)),
        };
        // A lack of space is detected here, before the announcement: after it, the snapshot's state cannot be restored.
        let room = self.take_room(&line, sources, writable.as_deref().unwrap_or(&below.image));
        let mut announced = record.clone();
        announced.drop_overwritten(sources, target);
        let merging = Merging { side: MergeSide::Down, node: target, above: Some(lowest), content: None };
        announced.pending = Some(Pending { merging: Some(merging), ..Pending::new("merge down") });
        // The space for the record after the merge is reserved before the announcement, too.
        let spare = room.and_then(|()| self.set_aside(&announced, &self.merged_down(&announced, sources, target)?));
        let announced = spare.and_then(|spare| self.commit(announced).map(|()| spare));
        let spare = match announced {
            Ok(spare) => spare,
            Err(error) => {
                if let Some(image) = writable {
                    // Opening the image for writing has marked it as in use; closing removes the mark.
                    image.layer().close()?;
                }
                return Err(error);
            }
        };
        // The announcement may have used the reserved space. The space of the old record is free now, so the
        // reservation is made again.
        spare.renew();
        let exchanged = writable.map_or(Ok(()), |image| line.exchange(target, image));
        let outcome = exchanged.and_then(|()| {
            let mut commit = || self.commit_down(&line, sources, target);
            line.chain.merge_down(top.key, below.key, 0, progress, &mut commit)
        });
        drop((top, below));
        let ended = self.end_merge(&line, target, sources, claim, outcome.map(drop));
        drop(spare);
        ended
    }

    /// Refuses a merge for which there is no space, and reserves the space if the format of the target allows that.
    fn take_room(&self, line: &Line, sources: &[u32], into: &Image) -> Result<()> {
        let layer = into.layer();
        let sources = sources.iter().map(|source| Ok(line.expect(*source)?.image)).collect::<Result<Vec<_>>>()?;
        let ranges = ranges_held(sources.iter().map(|source| &**source.layer()), &**layer)?;
        let (mapped, table) = layer.table_size();
        let (mut needed, mut tables, mut next) = (0, 0, 0);
        for range in &ranges {
            let taken = layer.room_needed(range.clone())?;
            needed += taken;
            if taken == 0 || table == 0 {
                continue;
            }
            // The ranges are in the order of the disk, so each table is counted once. If the target has data in the
            // range of a table, it already has the table.
            for index in (range.start / mapped).max(next)..range.end.div_ceil(mapped) {
                let part = index * mapped..((index + 1) * mapped).min(layer.capacity());
                tables += u64::from(layer.room_needed(part.clone())? >= part.end - part.start);
                next = index + 1;
            }
        }
        let directory = into.place().folder.directory();
        let room =
            directory.room().map_err(|error| Error::io("determining the free space of the file system", error))?;
        let metadata = needed / METADATA_SHARE + tables * table + SMALL_FILES;
        if needed > 0 && needed + metadata > room.available {
            return Err(self.lacks_room(into, needed + metadata, &format!("has {}", room.available)));
        }
        if needed > 0 && table > 0 {
            self.prove_room(into, needed + metadata)?;
        }
        ranges.into_iter().try_for_each(|range| layer.take_room(range))
    }

    fn lacks_room(&self, into: &Image, bytes: u64, found: &str) -> Error {
        let text = format!(
            "disk '{}': merging into '{}' takes {bytes} bytes, and the file system {found}: nothing was changed; free \
             some space, or delete the disk",
            self.name(),
            into.place().label(),
        );
        Error::new(ErrorKind::NoSpace, text)
    }

    /// Reserves `bytes` past the end of an image, and frees them again. The free space that `statfs` reports may not
    /// exist: on a nearly full btrfs it is too high, and it ignores quotas.
    fn prove_room(&self, into: &Image, bytes: u64) -> Result<()> {
        // The first extent may be one without a file.
        let Ok(file) = into.layer().file(0) else { return Ok(()) };
        let Ok(end) = file.len() else { return Ok(()) };
        let taken = file.reserve(end, bytes);
        // After an error, a part may be reserved: it is freed, too. If truncating fails, the only effect is that the
        // file is longer than necessary.
        let given_back = file.set_len(end);
        match taken {
            Err(error) if error::lacks_space(&error) => {
                Err(self.lacks_room(into, bytes, &format!("refuses them ({error})")))
            }
            Ok(()) => given_back.map_err(|error| Error::io("giving back room in the file system", error)),
            // Other failures are ignored here: the merge itself gets them.
            Err(_) => Ok(()),
        }
    }

    fn commit_down(&self, line: &Line, sources: &[u32], target: u32) -> Result<()> {
        let after = self.merged_down(&self.record(), sources, target)?;
        // The files that the new record names are durable: the chain has flushed the target, and the target's
        // descriptor is corrected only after the commit.
        debug_assert!(line.level(target).is_some());
        self.commit(after)
    }

    /// The record after a merge down.
    pub(crate) fn merged_down(&self, record: &Record, sources: &[u32], target: u32) -> Result<Record> {
        let newest = sources[0];
        let (from, into) = (record.node(newest)?, record.node(target)?);
        let content = match into.format.is_some() {
            true => self.parent_content_of(record, into)?,
            false => self.content_of(record, from)?,
        };
        let place = self.place(record, record.node(target)?)?;
        let mut settle = Vec::new();
        if record.head != newest {
            // If the merged image is the head, it has no children, and the target keeps its changed CID. Otherwise its
            // children record its CID, so the target gets this CID.
            settle.push(Settlement { node: target, content, parent: None, text: None });
        }
        for child in record.children(newest) {
            let folder = self.folder(record, record.node(child)?.folder.as_deref())?;
            let parent = ParentNow::Of { content, hint: parent_hint(&folder, &place) };
            settle.push(Settlement { node: child, content: None, parent: Some(parent), text: None });
        }
        let mut after = record.clone();
        let gone = self.own_files(record, &after.merge_down(sources, target));
        let settle = self.with_texts(record, settle)?;
        after.pending = Some(Pending { gone, settle, ..Pending::new("merge down") });
        Ok(after)
    }

    /// Merges an image into the one above it.
    fn merge_up(&self, target: u32, source: u32, progress: &dyn Progress) -> Result<()> {
        let record = self.record();
        let claim = self.claim(&[target, source])?;
        let (line, is_head) = self.line_with(&record, target)?;
        let content = self.content_of(&record, record.node(target)?)?;
        let mut announced = record.clone();
        let merging = Merging { side: MergeSide::Up, node: target, above: None, content };
        announced.pending = Some(Pending { merging: Some(merging), ..Pending::new("merge up") });
        let spare = self.set_aside(&announced, &self.merged_up(&announced, target, source, content)?)?;
        self.commit(announced)?;
        // The announcement may have used the reserved space. The space of the old record is free now, so the
        // reservation is made again.
        spare.renew();
        let line = match is_head {
            true => line,
            // The image is the top of a line of its own, which is opened for writing at once.
            false => {
                drop(line);
                let opened = self.open_line(&record, target, true, &[]);
                match opened {
                    Ok(line) => Arc::new(line),
                    Err(error) => return self.finish_pending().and(Err(error)),
                }
            }
        };
        let (into, oldest) = (line.expect(target)?.key, line.expect(source)?.key);
        let outcome = self.set_writing(&line, target).and_then(|()| {
            let mut commit = || self.commit(self.merged_up(&self.record(), target, source, content)?);
            line.chain.merge_up(into, oldest, 0, progress, &mut commit)
        });
        let ended = self.end_merge(&line, target, &[source], claim, outcome.map(drop));
        drop(spare);
        ended
    }

    /// The record after a merge up; `content` is the CID that the target had.
    fn merged_up(&self, record: &Record, target: u32, source: u32, content: Option<u32>) -> Result<Record> {
        let (upper, lower) = (record.node(target)?, record.node(source)?);
        let parent = match lower.parent {
            Some(parent) => {
                let below = record.node(parent)?;
                let place = self.place(record, below)?;
                let folder = self.folder(record, upper.folder.as_deref())?;
                ParentNow::Of { content: self.parent_content_of(record, below)?, hint: parent_hint(&folder, &place) }
            }
            None => {
                let base = self.descriptor_of(record, lower)?;
                let uuid = base.and_then(|base| base.database.uuid()).map(|uuid| uuid.to_string());
                ParentNow::None { adapter: record.adapter.clone(), uuid }
            }
        };
        // The children of the target record its old CID, so the target gets it back. A head has no children, so it
        // keeps the new CID.
        let content = if record.head == target { None } else { content };
        let settle = vec![Settlement { node: target, content, parent: Some(parent), text: None }];
        let mut after = record.clone();
        let gone = self.own_files(record, &after.merge_up(target, source));
        let settle = self.with_texts(record, settle)?;
        after.pending = Some(Pending { gone, settle, ..Pending::new("merge up") });
        Ok(after)
    }

    /// Called after a merge, even after a failed one: opens the target for reading, corrects descriptors, and removes
    /// files.
    fn end_merge(
        &self,
        line: &Line,
        target: u32,
        sources: &[u32],
        claim: Claim<'_>,
        outcome: Result<()>,
    ) -> Result<()> {
        // The failure is recorded before another caller can open the images that the merge has written.
        let _ = outcome.as_ref().inspect_err(|error| self.doubt(error));
        if self.state.lock().record.nodes.iter().all(|node| !sources.contains(&node.id)) {
            line.removed(sources);
        }
        let is_head = self.record().head == target && self.open_head().is_some_and(|head| head.level(target).is_some());
        let closed = match line.level(target) {
            Some(level) if !is_head && level.image.layer().writable() => {
                // A descriptor is corrected only while no chain has the image open for writing.
                let last = line.levels().first().is_some_and(|top| top.node == target);
                drop(level);
                if last { line.chain.close() } else { self.set_reading(line, target) }
            }
            _ => Ok(()),
        };
        // Descriptors are read from the device, not from the page cache, before they are corrected.
        let finished = closed.and_then(|()| self.show_all_stale()).and_then(|()| self.finish_pending());
        if finished.is_err() {
            self.state.lock().unsettled = true;
        }
        drop(claim);
        outcome.and(finished)
    }

    /// Replaces the read-only opening of a level below the top by a writable one.
    pub(crate) fn set_writing(&self, line: &Line, node: u32) -> Result<()> {
        if line.expect(node)?.is_writing() {
            return Ok(());
        }
        let image = Arc::new(self.open_image(&self.record(), node, true)?);
        line.exchange(node, image)
    }
}

/// The ranges that at least one of these images has data or zeros for, in whole grains of the image `into`.
pub(crate) fn ranges_held<'a>(
    sources: impl Iterator<Item = &'a dyn Layer>,
    into: &dyn Layer,
) -> Result<Vec<Range<u64>>> {
    let mut held = Vec::new();
    for source in sources {
        held_by(source, into, &mut held)?;
    }
    held.sort_unstable_by_key(|range| range.start);
    let mut ranges = Vec::with_capacity(held.len());
    held.into_iter().for_each(|range| push_range(&mut ranges, range));
    Ok(ranges)
}

/// Adds the extents of a source, widened to whole grains of the target, in the order of the disk.
fn held_by(source: &dyn Layer, into: &dyn Layer, held: &mut Vec<Range<u64>>) -> Result<()> {
    let (capacity, grain) = (source.capacity().min(into.capacity()), into.grain());
    let mut at = 0;
    let mut extents: Vec<Extent> = Vec::new();
    while at < capacity {
        extents.clear();
        source.map(at..capacity, EXTENTS, &mut extents)?;
        for extent in &extents {
            at = extent.start.saturating_add(extent.length);
            if matches!(extent.content, Content::Data { .. } | Content::Encoded) && held.len() < RANGES_MAX {
                let end = at.next_multiple_of(grain).min(into.capacity());
                push_range(held, extent.start / grain * grain..end);
            }
        }
        if extents.is_empty() {
            break;
        }
    }
    Ok(())
}

/// Adds a range, joined with the last one if the two touch.
fn push_range(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.start <= range.start && range.start <= last.end => last.end = last.end.max(range.end),
        _ => ranges.push(range),
    }
}
