//! Isolates ranges of disks. Buffered writes to these ranges cannot enter the map, because the map is damaged there.
//!
//! A write is acknowledged before the map is read. Damage may then be found in the map where it would have to refer to
//! the write, or in the table of the blocks that are mapped there. The write would block all later flushes and
//! write-back of all disks, so it is removed from the buffer. The next flush of its disk fails with the reason, reads of
//! the range return the damage, and further writes to it are refused.

use super::metadata::Meta;
use super::{Engine, Head};
use crate::buffer::Content;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::{Error, ErrorKind, Result};
use backend::BLOCK_SIZE;
use std::collections::BTreeMap;
use std::ops::Range;

/// The isolated ranges of one disk.
#[derive(Default)]
struct Isolated {
    /// Ranges of blocks, with the reason.
    ranges: Vec<(Range<u64>, String)>,
    /// Set when acknowledged writes were lost: the next flush of the disk reports it.
    untold: Option<String>,
    /// Set when acknowledged writes were lost: the next durable write of the disk reports it. It is kept apart from
    /// `untold`, because a client that repeats a failed durable write assumes that only this write was lost.
    untold_by_writes: Option<String>,
}

/// The isolated ranges of all disks.
#[derive(Default)]
pub struct Isolation {
    any: AtomicBool,
    disks: Mutex<BTreeMap<u64, Isolated>>,
}

impl Isolation {
    fn add(&self, disk: u64, range: Range<u64>, why: String) {
        let mut disks = self.disks.lock();
        let isolated = disks.entry(disk).or_default();
        let bytes = BLOCK_SIZE as u64;
        let lost = format!(
            "acknowledged writes to bytes {} to {} are lost: the map is damaged there ({why})",
            range.start * bytes,
            range.end * bytes
        );
        isolated.untold_by_writes = Some(lost.clone());
        isolated.untold = Some(lost);
        match isolated.ranges.last_mut() {
            Some((last, _)) if last.end == range.start => last.end = range.end,
            _ => isolated.ranges.push((range, why)),
        }
        self.any.store(true, Ordering::Release);
    }
}

impl Meta {
    /// The parts of a range of a disk whose mapping cannot be changed because of damage, and why.
    fn unreadable(&mut self, disk: u64, range: Range<u64>, unmap: bool, out: &mut Vec<(Range<u64>, Error)>) {
        match self.reach(disk, range.clone(), unmap, u64::MAX) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                if range.end - range.start == 1 {
                    return out.push((range, error));
                }
                let middle = range.start + (range.end - range.start) / 2;
                self.unreadable(disk, range.start..middle, unmap, out);
                self.unreadable(disk, middle..range.end, unmap, out);
            }
            _ => {}
        }
    }
}

impl Engine {
    /// Like [`Engine::flush_to`], for a client of a disk. Fails once after acknowledged writes to the disk were lost.
    pub fn flush_head(&self, head: &Head, ticket: u64) -> Result<()> {
        self.flush_to(ticket)?;
        self.tell_lost(head, |isolated| isolated.untold.take())
    }

    /// Flushes for a durable write of a client, and reports lost writes once. The next flush fails nevertheless.
    pub fn flush_write(&self, head: &Head) -> Result<()> {
        self.flush()?;
        self.tell_lost(head, |isolated| isolated.untold_by_writes.take())
    }

    fn tell_lost(&self, head: &Head, take: impl FnOnce(&mut Isolated) -> Option<String>) -> Result<()> {
        if !self.isolation.any.load(Ordering::Acquire) {
            return Ok(());
        }
        match self.isolation.disks.lock().get_mut(&head.id).and_then(take) {
            Some(why) => Err(Error::new(ErrorKind::Corrupt, why)),
            None => Ok(()),
        }
    }

    /// Refuses a write to a range where the map is damaged.
    #[inline]
    pub(super) fn refuse_isolated(&self, head: &Head, range: &Range<u64>) -> Result<()> {
        if self.isolation.any.load(Ordering::Acquire) { self.look_at_isolated(head, range) } else { Ok(()) }
    }

    #[cold]
    fn look_at_isolated(&self, head: &Head, range: &Range<u64>) -> Result<()> {
        let mut disks = self.isolation.disks.lock();
        let Some(isolated) = disks.get_mut(&head.id) else { return Ok(()) };
        let overlaps = |known: &Range<u64>| known.start < range.end && range.start < known.end;
        if !isolated.ranges.iter().any(|(known, _)| overlaps(known)) {
            return Ok(());
        }
        // The map may have been repaired since, or the disk reverted to a snapshot.
        let mut unreadable = Vec::new();
        self.meta.lock().unreadable(head.id, range.clone(), false, &mut unreadable);
        match unreadable.into_iter().next() {
            Some((_, error)) => Err(error),
            None => {
                isolated.ranges.retain(|(known, _)| !overlaps(known));
                Ok(())
            }
        }
    }

    /// Called after moving buffered blocks into the map failed with `error`. Removes those blocks from the buffers for
    /// which the map is damaged. True if there were any: the caller then retries with the others.
    pub(super) fn isolate(&self, error: &Error) -> bool {
        if error.kind() != ErrorKind::Corrupt {
            return false;
        }
        let mut any = false;
        for head in self.buffers.heads() {
            let mut buffer = head.lock();
            if buffer.layers.is_empty() {
                continue;
            }
            let (layer, _) = buffer.layers.oldest();
            for piece in layer.take(0, u64::MAX) {
                let mut unreadable = Vec::new();
                let range = piece.logical..piece.logical + piece.entry.blocks;
                let unmap = matches!(piece.entry.content, Content::Unmapped);
                self.meta.lock().unreadable(head.id, range, unmap, &mut unreadable);
                for (range, why) in unreadable {
                    let (layer, _) = buffer.layers.oldest();
                    let gone = layer.remove(range.start, range.end - range.start, piece.entry.stamp);
                    self.give_back(gone);
                    self.isolation.add(head.id, range, why.to_string());
                    any = true;
                }
            }
        }
        if any {
            tracing::error!(%error, "writes are lost where the map is damaged");
        }
        any
    }
}
