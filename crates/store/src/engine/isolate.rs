//! Isolates ranges of disks. Buffered writes to these ranges cannot enter the map, because the map is lost there: its
//! pages are damaged, or the medium cannot read them.
//!
//! A write is acknowledged before the map is read. Pages may then be lost where the map would have to refer to the
//! write, or in the table of the blocks that are mapped there. The write would block all later flushes and write-back
//! of all disks, so it is removed from the buffer. The next flush of its disk fails with the reason, reads of the range
//! return the damage, and further writes to it are refused. The same applies to writes after a snapshot that cannot be
//! sealed, because the number of references of its root is lost.
//!
//! A failed read proves no damage: the next one may succeed. So a page counts as unreadable only if reads of it fail
//! for [`PATIENCE`] although the medium can be read elsewhere. Nothing is removed while the whole medium fails, because
//! the medium may become readable again. Nothing is removed by a close because of failed reads: a failed close can be
//! repeated.
//!
//! The medium may take many seconds to fail a read, so the map is read without locks. What is removed is decided
//! afterwards, under the write-back gate and the lock of the buffer, from the pages and errors of these reads.

use super::metadata::{Effects, Fetch, Meta};
use super::{Engine, Head};
use crate::buffer::{Content, DISCARD_CHANGES};
use crate::space::TABLE_ENTRIES;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::time::Instant;
use crate::tree;
use crate::{Error, ErrorKind, Result, is_lost};
use backend::BLOCK_SIZE;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

/// How long reads of a page fail before the page counts as unreadable.
const PATIENCE: Duration = Duration::from_secs(1);
/// The pause before a change that needs an unreadable page is tried again.
const PAUSE: Duration = Duration::from_millis(100);
/// If more time than this passes between a failure and the beginning of the next attempt that fails, the failures
/// belong to different events. The duration of an attempt does not count, because the medium may take many seconds to
/// fail a read.
pub(super) const APART: Duration = Duration::from_secs(10);
/// The key of failed reads of any page in [`Isolation::failing`].
pub(super) const ANY_PAGE: &str = "";

/// The isolated ranges of one disk.
#[derive(Default)]
struct Isolated {
    /// The isolated ranges of blocks.
    ranges: Vec<Range<u64>>,
    /// How many ranges were ever added, each after a loss of acknowledged writes.
    added: u64,
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
    /// How often acknowledged writes were removed. Changed under the write-back gate.
    removals: AtomicU64,
    disks: Mutex<BTreeMap<u64, Isolated>>,
    /// When reads of metadata that a change needs began to fail, and when they failed last: of any page, and of each
    /// page by its error, which names the page.
    pub(super) failing: Mutex<BTreeMap<String, (Instant, Instant)>>,
    /// The value of [`Engine::losses`] when a failed change was last tried again because a region was lost.
    losses: AtomicU64,
}

/// The result of an attempt to remove the writes to a part of a disk.
pub(super) enum Removal {
    /// Writes were removed.
    Done,
    /// The pages are not unreadable for long enough.
    Waits,
    /// The map or the buffer has changed since the map was read.
    Changed,
}

impl Isolated {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.ranges.iter().any(|known| known.start < range.end && range.start < known.end)
    }

    /// Ends the isolation of a range, and of nothing beside it.
    fn cut(&mut self, range: &Range<u64>) {
        let beside = |known: Range<u64>| {
            let (before, after) = (known.end.min(range.start), known.start.max(range.end));
            [known.start..before, after..known.end].into_iter().filter(|part| !part.is_empty())
        };
        self.ranges = std::mem::take(&mut self.ranges).into_iter().flat_map(beside).collect();
    }
}

impl Isolation {
    /// Adds a range of a disk. Acknowledged writes to a part of it, `lost`, were removed.
    fn add(&self, disk: u64, range: Range<u64>, lost: Range<u64>, why: &Error) {
        let mut disks = self.disks.lock();
        let isolated = disks.entry(disk).or_default();
        let bytes = BLOCK_SIZE as u64;
        let text = format!(
            "acknowledged writes to bytes {} to {} are lost: the map is damaged or unreadable there ({why})",
            lost.start * bytes,
            lost.end * bytes
        );
        isolated.untold_by_writes = Some(text.clone());
        isolated.untold = Some(text);
        self.any.store(true, Ordering::Release);
        isolated.added += 1;
        if isolated.ranges.iter().any(|known| known.start <= range.start && range.end <= known.end) {
            return;
        }
        match isolated.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => isolated.ranges.push(range),
        }
    }

    /// Notes that a read has failed with this error, in an attempt that began at `began`. True if such reads have
    /// failed for so long that the page counts as unreadable.
    fn is_lasting(&self, error: &str, began: Instant) -> bool {
        self.note_failed_read(error, began, Instant::now())
    }

    fn note_failed_read(&self, error: &str, began: Instant, now: Instant) -> bool {
        let mut failing = self.failing.lock();
        failing.retain(|_, (_, last)| began < *last + APART);
        let (since, last) = failing.entry(error.to_owned()).or_insert((now, now));
        *last = now;
        *since + PATIENCE <= now
    }

    /// Notes that the whole medium fails, so that failed reads do not prove that a page is lost.
    fn forget_failures(&self) {
        self.failing.lock().clear();
    }
}

impl Meta {
    /// The parts of a range that cannot be changed, because the map of the disk, or the table entries of its nodes and
    /// blocks, are lost; and why. A part may extend past the end of the range, up to the end of the lost node: later
    /// writes to the part are then refused at once, instead of being acknowledged and lost.
    fn unreadable(&mut self, disk: u64, range: Range<u64>, unmap: bool) -> Vec<(Range<u64>, Error)> {
        let Some(root) = self.catalog.find(disk).and_then(|object| object.root) else { return Vec::new() };
        let (mut effects, mut mappings, mut out) = (Effects::default(), Vec::new(), Vec::new());
        let mut lost = |_: tree::NodeId, range: Range<u64>, error: Error| {
            if is_lost(&error) {
                out.push((range, error));
            }
        };
        tree::find_unreadable(&mut self.nodes(&mut effects), root, range.clone(), &mut mappings, &mut lost);
        // Each page of the table is read once, because the medium may take seconds to fail a read.
        let mut pages: BTreeMap<u64, Option<Error>> = BTreeMap::new();
        for mapping in mappings {
            let stored = mapping.stored();
            let mut at = 0;
            while at < stored.blocks {
                let block = stored.physical + at;
                let here = (TABLE_ENTRIES - block % TABLE_ENTRIES).min(stored.blocks - at);
                let read =
                    pages.entry(block / TABLE_ENTRIES).or_insert_with(|| self.entry(block).err().filter(is_lost));
                if let Some(error) = read {
                    out.push((mapping.logical_of(block..block + here), error.repeated()));
                }
                at += here;
            }
        }
        if out.is_empty() {
            self.unchangeable(disk, range, unmap, &mut out);
        }
        out
    }

    /// Like [`Meta::unreadable`], for buffered writes. If an older layer of the buffer is `unsealed`, no write enters
    /// the map as long as the references of the root cannot be read.
    fn lost_parts(&mut self, disk: u64, range: Range<u64>, unmap: bool, unsealed: bool) -> Vec<(Range<u64>, Error)> {
        if unsealed && let Some(why) = self.references_of_root(disk).err().filter(is_lost) {
            return vec![(range.start..tree::LOGICAL_LIMIT, why)];
        }
        self.unreadable(disk, range, unmap)
    }

    /// The parts of a range that no operation can change, because other pages that a change reads are lost, such as a
    /// neighbouring leaf.
    fn unchangeable(&mut self, disk: u64, range: Range<u64>, unmap: bool, out: &mut Vec<(Range<u64>, Error)>) {
        match self.reach(disk, range.clone(), unmap, u64::MAX) {
            Err(error) if is_lost(&error) => {
                if range.end - range.start == 1 {
                    return out.push((range, error));
                }
                let middle = range.start + (range.end - range.start) / 2;
                self.unchangeable(disk, range.start..middle, unmap, out);
                self.unchangeable(disk, middle..range.end, unmap, out);
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

    /// How often acknowledged writes to a disk were lost since the store was opened. Each loss is reported by only one
    /// flush and one durable write, so a caller that flushes for several clients compares this number.
    pub fn lost_writes(&self, head: &Head) -> u64 {
        if !self.isolation.any.load(Ordering::Acquire) {
            return 0;
        }
        self.isolation.disks.lock().get(&head.id).map_or(0, |isolated| isolated.added)
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
        let added = match self.isolation.disks.lock().get(&head.id) {
            Some(isolated) if isolated.overlaps(range) => isolated.added,
            _ => return Ok(()),
        };
        // The map may have been repaired since, or the disk reverted to a snapshot. Only this range is tested, so the
        // rest stays isolated. The pages are read without locks, because the medium may take seconds to fail a read.
        let test = |meta: &mut Meta| {
            meta.unreadable(head.id, range.clone(), false).into_iter().next().map_or(Ok(()), |(_, e)| Err(e))
        };
        self.meta.look(test)?;
        if let Some(isolated) = self.isolation.disks.lock().get_mut(&head.id).filter(|now| now.added == added) {
            isolated.cut(range);
        }
        Ok(())
    }

    /// As [`Meta::losses`], under the metadata lock.
    pub(super) fn losses(&self) -> u64 {
        self.meta.lock().losses()
    }

    /// Called after moving buffered blocks into the map failed with `error`, in an attempt that used `fetch`. Releases
    /// `locks`, among them the write-back gate. If the attempt has missed pages, reads them. Otherwise isolates what is
    /// lost, and pauses. The caller then tries again, with the returned value. Fails with `error` if it has another
    /// cause.
    pub(super) fn isolate_or_fail(&self, error: Error, mut fetch: Fetch, locks: impl Sized) -> Result<Option<Fetch>> {
        let removals = self.isolation.removals.load(Ordering::Acquire);
        drop(locks);
        if self.meta.load_missing(&mut fetch)? {
            return Ok(Some(fetch));
        }
        let pause = self.isolate(&error, removals, &mut fetch).ok_or(error)?;
        crate::sync::thread::sleep(pause);
        Ok(fetch.after_failure())
    }

    /// Removes those blocks from the buffers for which the map is lost. Returns the pause after which the caller tries
    /// again; `None` if the failure has another cause. `removals` is their number at the failure: if it has grown,
    /// another thread has removed the cause. Must be called without locks.
    pub(super) fn isolate(&self, error: &Error, removals: u64, fetch: &mut Fetch) -> Option<Duration> {
        if !is_lost(error) || self.running.is_stopped() {
            return None;
        }
        let began = fetch.begin();
        if error.kind() == ErrorKind::Io {
            if !self.log.is_medium_readable() {
                self.isolation.forget_failures();
                return None;
            }
            if !self.running.goes_on() {
                return None;
            }
            self.isolation.is_lasting(&error.to_string(), began);
            if !self.isolation.is_lasting(ANY_PAGE, began) {
                return Some(PAUSE);
            }
        }
        let goes_on = self.running.goes_on() && (error.kind() == ErrorKind::Io || self.log.is_medium_readable());
        // A region was lost since the last such retry, so the change may have failed because it used blocks of this
        // region. The next attempt uses another region.
        let losses = self.losses();
        if self.isolation.losses.swap(losses, Ordering::AcqRel) < losses {
            return Some(Duration::ZERO);
        }
        let patience = goes_on.then_some(began);
        // Lost pages are read again, because they may be readable now. Each is read once, because the medium may take
        // many seconds to fail a read.
        fetch.forget_lost();
        let replaced = self.meta.lock().pages.replaced();
        let (mut changed, mut waits) = (false, false);
        for head in self.buffers.heads() {
            let (unsealed, pieces) = {
                let mut buffer = head.lock();
                let Some(at) = buffer.layers.first_filled() else { continue };
                // An older layer is empty if its snapshot is not sealed. Until then no later write can enter the map.
                (at > 0, buffer.layers.layer(at).take(0, u64::MAX))
            };
            for piece in pieces {
                let range = piece.logical..piece.end();
                let unmap = matches!(piece.entry.content, Content::Unmapped);
                let found = self.read_lost(&head, &range, unmap, unsealed, fetch);
                for (lost, _) in found {
                    // The part is below one lost page, so few pages have to stay in memory until the decision.
                    let part = lost.start..lost.end.min(range.end);
                    self.read_lost(&head, &part, unmap, unsealed, fetch);
                    match self.remove_lost(&head, part, unmap, patience, replaced, fetch) {
                        Removal::Done => {}
                        Removal::Waits => waits |= goes_on,
                        Removal::Changed => changed = true,
                    }
                }
            }
        }
        if self.isolation.removals.load(Ordering::Acquire) > removals {
            tracing::error!(%error, "writes are lost where the map is damaged or unreadable");
            return Some(Duration::ZERO);
        }
        // If nothing is lost, another thread may have ended the cause after the failure, for example by a repair or a
        // revert. So the change is tried once more.
        (changed || waits || fetch.note_failed_in_vain()).then_some(PAUSE)
    }

    /// Reads the map without locks, and returns the lost parts of a range.
    pub(super) fn read_lost(
        &self,
        head: &Head,
        range: &Range<u64>,
        unmap: bool,
        unsealed: bool,
        fetch: &mut Fetch,
    ) -> Vec<(Range<u64>, Error)> {
        let found = self.meta.look_holding(fetch, |meta| Ok(meta.lost_parts(head.id, range.clone(), unmap, unsealed)));
        found.unwrap_or_default()
    }

    /// Removes the buffered writes (or discards, with `unmap`) to a part of a disk, if the map is still lost there.
    /// After failed reads it removes them only if `patience`, the beginning of the attempt, is given and the reads have
    /// failed for long. `replaced` is [`crate::pages::Pages::replaced`] before `fetch` was filled: if the number has
    /// grown, errors in `fetch` may be outdated.
    pub(super) fn remove_lost(
        &self,
        head: &Head,
        part: Range<u64>,
        unmap: bool,
        patience: Option<Instant>,
        replaced: u64,
        fetch: &mut Fetch,
    ) -> Removal {
        let _gate = self.writeback.lock();
        let mut buffer = head.lock();
        let Some(at) = buffer.layers.first_filled() else { return Removal::Changed };
        let looked = {
            let mut meta = self.meta.lock();
            if meta.pages.replaced() != replaced {
                return Removal::Changed;
            }
            fetch.look(&mut meta, |meta| Ok(meta.lost_parts(head.id, part.clone(), unmap, at > 0)))
        };
        let Ok(Ok(found)) = looked else { return Removal::Changed };
        let (mut removal, mut waits) = (Removal::Changed, false);
        for (range, why) in found {
            // Reads of another page may have failed for long, but this one only once.
            let lasting = |began: Instant| self.isolation.is_lasting(&why.to_string(), began);
            if why.kind() == ErrorKind::Io && !patience.is_some_and(lasting) {
                waits = true;
                continue;
            }
            let layer = buffer.layers.layer(at);
            // A write that has replaced the failed one meanwhile is lost too.
            for piece in layer.pieces(&(range.start..range.end.min(part.end))) {
                if matches!(piece.entry.content, Content::Unmapped) != unmap {
                    continue;
                }
                let lost = piece.logical..piece.end();
                if layer.cuts_discard(&lost) {
                    // The second part of the discard needs map changes too, and returns them at its end.
                    self.reserves.add_changes(DISCARD_CHANGES);
                }
                let gone = layer.remove(lost.start, piece.entry.blocks, piece.entry.stamp);
                self.give_back(gone);
                self.isolation.add(head.id, range.clone(), lost, &why);
                self.isolation.removals.fetch_add(1, Ordering::AcqRel);
                removal = Removal::Done;
            }
        }
        if waits && matches!(removal, Removal::Changed) { Removal::Waits } else { removal }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_whose_reads_fail_slowly_counts_as_unreadable() {
        let isolation = Isolation::default();
        let mut began = Instant::now();
        for attempt in 0..4 {
            let failed = began + 3 * APART;
            assert_eq!(isolation.note_failed_read("page", began, failed), attempt > 0);
            began = failed + PAUSE;
        }
    }

    #[test]
    fn two_reads_that_fail_at_different_times_lose_no_page() {
        let isolation = Isolation::default();
        let first = Instant::now();
        assert!(!isolation.note_failed_read("page", first, first));
        let later = first + APART + PAUSE;
        assert!(!isolation.note_failed_read("page", later, later));
    }
}
