//! Free map nodes: an acknowledged change always finds enough of them when it enters the map.
//!
//! 1. Everything that may change the map is counted as a number of *changes* (see [`crate::tree::nodes_needed`]) from
//!    before its acknowledgment until it is in the map. A block of data counts as one, through the limit of the write
//!    buffer; a zeroed range as one for each block; a discard of any length as [`DISCARD_CHANGES`]. Writes that bypass
//!    the buffer count while they are under way. Changes that enter the map at once, under the metadata lock, are
//!    compared with the spare nodes instead.
//! 2. When one more change is admitted, the free nodes, less [`KEPT`], suffice for all counted changes. Changes are
//!    added to the count first and compared with [`Reserves::changes_max`] afterwards. Code that uses nodes publishes
//!    the new maximum first and removes its changes from the count afterwards. So at any time either the nodes that a
//!    change uses are subtracted from the maximum, or the change still counts. Packs and shares, which make nodes
//!    fuller, are compared with the spare nodes under the same lock under which they are carried out.
//! 3. Admitted changes never need more nodes later: each uses no more nodes than were counted for it, and a later
//!    snapshot only separates these changes from later ones.
//! 4. A write to blocks that are all written, and that only its disk maps, needs no nodes. It is admitted even if no
//!    nodes are free. Such a write never gets new blocks: write-back waits for the operations that hold its blocks, or
//!    its payload is journalled for the same blocks.
//! 5. [`KEPT`] nodes are kept for discards on a full file system. Writes of thick disks may use half of them, one write
//!    at a time. Dropping deleted trees, sealing snapshots and changing the catalog need no nodes.

use super::{is_full, unless_full};
use crate::buffer::{Content, DISCARD_CHANGES, Held};
use crate::engine::metadata::NODES_PER_OPERATION;
use crate::engine::writeback::BATCH_MAX;
use crate::engine::{Engine, Head, Meta};
use crate::journal::Operation;
use crate::pages::PageFile;
use crate::tree::{Forest, nodes_needed};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::BLOCK_SIZE;
use std::ops::Range;
use std::time::Duration;

/// Free nodes that writes do not use (1 MiB).
pub(crate) const KEPT: u64 = 256;
/// Free nodes that even writes of thick disks do not use on a full file system. The data blocks of such writes are
/// reserved already.
const KEPT_BY_THICK: u64 = KEPT / 2;
/// Map nodes reserved at a time: a sixteenth of the number of used nodes, within these limits.
const NODES: std::ops::RangeInclusive<u64> = 256..=4096;
/// Free map nodes that maintenance keeps while clients write.
const NODES_AHEAD: u64 = 1024;
/// Changes that are admitted in addition to a full buffer, and as many again for blocks of zeroes.
const CHANGES_BESIDE: u64 = 1 << 14;
/// The most batches that a write waiting for nodes writes back before it is refused. The limit matters if other clients
/// continue to write.
pub(crate) const DRAINS_MAX: u32 = 1 << 12;
/// How often a write waits for the end of work under way, for [`LOOK_AGAIN`] each time.
const UNDER_WAY_MAX: u32 = 1000;
/// How long a write sleeps before it checks again whether work under way has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Map changes of an operation that bypasses the buffer. The changes count until this value is dropped.
pub(crate) struct Changes<'a> {
    engine: &'a Engine,
    changes: u64,
}

impl Drop for Changes<'_> {
    fn drop(&mut self) {
        self.engine.reserves.end_changes(self.changes);
    }
}

/// The error of a change for which too few nodes are free. If the file system is not `full`, the cause is damage of the
/// table of nodes, because of which free nodes are not used.
fn no_free_nodes(meta: &Meta, full: bool) -> Error {
    let text = "the file system of the datastore, or its quota, is full: the map cannot grow";
    let damage = if full { None } else { meta.map.damage() };
    damage.unwrap_or_else(|| Error::new(ErrorKind::NoSpace, text))
}

fn nodes_more(used: u64) -> u64 {
    (used / 16).clamp(*NODES.start(), *NODES.end())
}

/// The number of nodes that this many changes may need while a batch of write-back is in flight: the batch may move
/// into the map entries that were replaced in the buffer meanwhile.
fn needed(forest: &Forest, changes: u64) -> u64 {
    nodes_needed(forest, changes + changes.min(BATCH_MAX))
}

/// The most changes, up to `limit`, for which this many free nodes suffice.
fn covered_by(forest: &Forest, free: u64, limit: u64) -> u64 {
    let (mut fits, mut above) = (0, limit + 1);
    while above - fits > 1 {
        let middle = fits + (above - fits) / 2;
        if needed(forest, middle) + KEPT <= free {
            fits = middle;
        } else {
            above = middle;
        }
    }
    fits
}

impl Engine {
    /// The trees that counted changes may affect.
    fn forest(&self, meta: &Meta) -> Forest {
        // One more tree, for a disk that is changed before it has a buffer.
        let trees = self.buffers.count() + 1;
        Forest { trees, levels: meta.levels(), layers: 1 + self.buffers.sealing(), used: meta.map.counts().used }
    }

    /// The number of counted changes.
    fn changes(&self) -> u64 {
        self.buffers.blocks() + self.reserves.changes()
    }

    /// The most changes that are admitted at the same time.
    fn changes_limit(&self) -> u64 {
        2 * self.buffers.limit() + CHANGES_BESIDE
    }

    /// Publishes the number of changes for which the free nodes suffice. Called under the metadata lock, before changes
    /// are removed from the count.
    pub(crate) fn update_changes_max(&self, meta: &Meta) {
        let (forest, free) = (self.forest(meta), meta.map.counts().free);
        self.reserves.publish_changes_max((forest, free), || covered_by(&forest, free, self.changes_limit()));
    }

    /// Whether the free nodes suffice for all counted changes.
    pub(crate) fn is_covered(&self) -> bool {
        self.changes() <= self.reserves.changes_max()
    }

    /// Requests more nodes ahead of need, but not at each call, because writers call this for each write.
    pub(crate) fn ask_for_nodes(&self, blocks: u64) {
        let changes = self.changes();
        if changes + changes / 2 > self.reserves.changes_max() && changes / 64 != changes.saturating_sub(blocks) / 64 {
            self.request(|work| work.extend = true);
        }
    }

    /// Measures the height of a disk's tree, unless it is known.
    pub(crate) fn measure(&self, head: &Head) -> Result<()> {
        if head.is_measured() {
            return Ok(());
        }
        self.meta.look(|meta| meta.note_levels(head.id))?;
        self.update_headroom(&self.meta.lock());
        head.set_measured();
        Ok(())
    }

    /// Whether this many nodes are spare: free beyond `keep` and beyond those for all counted changes. The operation
    /// that takes them is not counted, so the result holds only under the lock of `meta`.
    pub(crate) fn are_spare(&self, meta: &Meta, nodes: u64, keep: u64) -> bool {
        let (forest, free) = (self.forest(meta), meta.map.counts().free);
        // The maximum is published first, so that a change that is counted from now on takes these nodes into account.
        let left = free.saturating_sub(nodes);
        self.reserves.publish_changes_max((forest, left), || covered_by(&forest, left, self.changes_limit()));
        let spare = free >= nodes + keep && self.is_covered();
        if !spare {
            self.update_changes_max(meta);
        }
        spare
    }

    /// The most nodes that one step of a discard needs.
    pub(crate) fn nodes_of_discard(&self, meta: &Meta) -> u64 {
        nodes_needed(&self.forest(meta), DISCARD_CHANGES)
    }

    /// Frees or reserves nodes until this many are spare beyond `keep`: reserves space in the file system, or moves
    /// buffered data into the map. Another thread may use the nodes before the caller does. Must be called without
    /// locks.
    pub(crate) fn make_spare(&self, nodes: u64, keep: u64) -> Result<()> {
        let _turn = self.reserves.lock_scarce();
        let (mut tries, failures) = (0, self.writeback.failing.count());
        loop {
            let extended = self.extend_map(nodes);
            if self.are_spare(&self.meta.lock(), nodes, keep) {
                return Ok(());
            }
            match extended {
                Err(error) if !is_full(&error) => return Err(error),
                Err(_) if self.drain_once(failures)? => {}
                // Nothing is buffered. The other counted changes are under way and end without this thread.
                Err(_) if self.changes() > 0 && tries < UNDER_WAY_MAX => {
                    tries += 1;
                    if self.options.threads {
                        crate::sync::thread::sleep(LOOK_AGAIN);
                    }
                }
                done => return done,
            }
        }
    }

    /// Moves a batch of buffered data into the map. False if nothing is buffered. Unreadable metadata of one disk is an
    /// error only if no other disk makes progress.
    pub(crate) fn drain_once(&self, failures: u64) -> Result<bool> {
        match self.write_back_once() {
            Err(_) if !self.running.is_stopped() => self.writeback.failing.check(failures).map(|()| true),
            other => other,
        }
    }

    /// Counts this many changes if the free nodes suffice for them now. May be called under any lock.
    pub(crate) fn try_changes(&self, head: &Head, changes: u64) -> Option<Changes<'_>> {
        self.reserves.add_changes(changes);
        let claim = Changes { engine: self, changes };
        (changes == 0 || head.is_measured() && self.is_covered()).then_some(claim)
    }

    /// Reserves buffer space and counts changes for a write. The returned boolean is false if no nodes are free and the
    /// write needs none.
    pub(crate) fn take_changes(
        &self,
        head: &Head,
        range: &Range<u64>,
        content: &Content,
        more: u64,
    ) -> Result<(Held, bool)> {
        let blocks = range.end - range.start;
        let is_data = matches!(content, Content::Data(..));
        let held = Held { claimed: 0, data: if is_data { blocks } else { 0 }, changes: content.changes(blocks) + more };
        let take = || {
            if held.data > 0 {
                self.wait_for_room(held.data)?;
            } else {
                self.wait_for_flush()?;
            }
            if held.changes > 0 {
                self.reserves.add_changes(held.changes);
            }
            Ok(())
        };
        if head.is_measured() {
            take()?;
            if self.is_covered() {
                self.ask_for_nodes(blocks);
                return Ok((held, true));
            }
            self.give_back(held);
        } else if let Err(error) = self.measure(head) {
            return Err(if head.lock().gone { crate::engine::read::gone() } else { error });
        }
        let keep = match content {
            Content::Unmapped => 0,
            _ if self.is_thick(head)? => KEPT_BY_THICK,
            _ => KEPT,
        };
        let needs_none = || {
            let own = {
                let buffer = head.lock();
                // If the write splits a discard, its second part may need nodes.
                is_data && buffer.layers.is_single() && !buffer.layers.cuts_discard(range)
            };
            self.fits_in_written(head, own, range.clone())
        };
        let covered = self.cover(held.data + held.changes, keep, &take, &|| self.give_back(held), &needs_none);
        let covered = covered.map_err(|error| if is_full(&error) { self.no_space(head) } else { error })?;
        Ok((held, covered))
    }

    /// Counts `own` changes with `take` once the free nodes suffice for all counted ones. False if they do not suffice
    /// and `needs_none` returns that the write needs none. Reserves space in the file system; if the file system is
    /// full, waits until buffered data is in the map. After an error nothing is counted.
    fn cover(
        &self,
        own: u64,
        keep: u64,
        take: &dyn Fn() -> Result<()>,
        give_back: &dyn Fn(),
        needs_none: &dyn Fn() -> Result<bool>,
    ) -> Result<bool> {
        take()?;
        if self.is_covered() {
            return Ok(true);
        }
        // The write is not counted while it waits, because two waiting writes would block each other.
        give_back();
        let _turn = self.reserves.lock_scarce();
        // A write that is admitted because it needs no nodes stays counted. A write that is not admitted is removed
        // from the count.
        let goes_in_without = || match needs_none() {
            Ok(true) => Ok(true),
            other => {
                give_back();
                other
            }
        };
        let (mut drains, failures) = (0, self.writeback.failing.count());
        loop {
            take()?;
            let extended = self.extend_map(0);
            if self.is_covered() {
                return Ok(true);
            }
            let full = extended.as_ref().is_err_and(is_full);
            unless_full(extended).inspect_err(|_| give_back())?;
            if goes_in_without()? {
                return Ok(false);
            }
            drains += 1;
            if self.drain_once(failures)? && drains < DRAINS_MAX {
                continue;
            }
            // Here nothing is buffered, unless other clients write continuously.
            let (lacks, committed) = {
                let meta = self.meta.lock();
                let lacks = needed(&self.forest(&meta), own) + keep > meta.map.counts().free;
                (lacks, meta.pending.is_empty())
            };
            if keep < KEPT && !lacks && self.changes() == 0 {
                take()?;
                // Another write may have been admitted meanwhile.
                if self.changes() == own {
                    return Ok(true);
                }
                give_back();
                continue;
            }
            if lacks || drains >= DRAINS_MAX {
                // Blocks of the disk that are held can be overwritten in place once the pending changes are durable.
                if !committed && self.commit_changes().is_ok() {
                    take()?;
                    if goes_in_without()? {
                        return Ok(false);
                    }
                }
                return Err(no_free_nodes(&self.meta.lock(), full));
            }
            if self.options.threads {
                crate::sync::thread::sleep(LOOK_AGAIN);
            }
        }
    }

    /// Reserves space in the file system until the free nodes suffice for all counted changes, up to the most that are
    /// admitted, and for `more` nodes.
    pub(crate) fn extend_map(&self, more: u64) -> Result<()> {
        let _extending = self.reserves.lock_extending();
        let (counts, lacks) = {
            let meta = self.meta.lock();
            self.update_headroom(&meta);
            let counts = meta.map.counts();
            let (forest, changes) = (self.forest(&meta), self.changes().min(self.changes_limit()));
            let lacks = |changes| (needed(&forest, changes) + KEPT + more).saturating_sub(counts.free);
            (counts, (lacks(changes), lacks(changes + changes / 2)))
        };
        let (lacks, ahead) = lacks;
        if lacks == 0 {
            return Ok(());
        }
        match self.lengthen_map(counts.backed, ahead.max(nodes_more(counts.used))) {
            Err(error) if is_full(&error) => self.lengthen_map(counts.backed, lacks),
            other => other,
        }
    }

    /// Reserves map nodes ahead of writes.
    pub(crate) fn extend_map_ahead(&self) -> Result<()> {
        let _extending = self.reserves.lock_extending();
        let (counts, wanted) = {
            let meta = self.meta.lock();
            let counts = meta.map.counts();
            let changes = (2 * self.changes()).min(self.changes_limit());
            let ahead = if counts.used > NODES_AHEAD / 2 { NODES_AHEAD } else { 0 };
            (counts, (needed(&self.forest(&meta), changes) + KEPT).max(ahead))
        };
        if counts.free >= wanted {
            return Ok(());
        }
        // If the file system is full, the write that needs more nodes reports it.
        unless_full(self.lengthen_map(counts.backed, (wanted - counts.free).max(nodes_more(counts.used))))
    }

    /// Reserves this many additional nodes, after the space for their table entries. Must be called without locks
    /// except `extending`.
    fn lengthen_map(&self, backed: u64, more: u64) -> Result<()> {
        let needs = super::extend::needs(&self.meta.lock(), 0, backed + more);
        self.reserve_needs(&needs)?;
        self.reserve_nodes(backed, more)?;
        let mut meta = self.meta.lock();
        meta.map.set_backed_length(backed + more);
        self.update_headroom(&meta);
        Ok(())
    }

    fn reserve_nodes(&self, backed: u64, more: u64) -> Result<()> {
        let (from, length) = (backed * BLOCK_SIZE as u64, more * BLOCK_SIZE as u64);
        self.check_room(length, "the map")?;
        let reserved = self.meta.file(PageFile::Map).reserve(from, length);
        reserved.during(|| format!("reserving {length} bytes for the map"))?;
        self.keep_reserved(PageFile::Map)
    }

    /// Finds nodes that were reserved after the last checkpoint. Replay may need these nodes, because a full file
    /// system has no room for further ones.
    pub(crate) fn find_reserved_nodes(&self) -> Result<()> {
        let (file, size) = (self.meta.file(PageFile::Map), BLOCK_SIZE as u64);
        let mut end = self.meta.lock().map.counts().backed * size;
        let doing = || "querying which space the map takes in the file system".into();
        while let Some(found) = file.next_allocated(end).during(doing)?.filter(|found| found.start <= end) {
            end = found.end;
        }
        self.meta.lock().map.set_backed_length(end / size);
        Ok(())
    }

    /// Makes sure that enough nodes are free for an operation. Called under the metadata lock.
    pub(crate) fn ensure_nodes_of(&self, meta: &mut Meta, operation: &Operation) -> Result<()> {
        let full = !self.ensure_nodes(meta, NODES_PER_OPERATION)?;
        if meta.map.counts().free < NODES_PER_OPERATION && meta.nodes_of(operation)? > meta.map.counts().free {
            return Err(no_free_nodes(meta, full));
        }
        Ok(())
    }

    /// Reserves nodes until enough are free for the next operation. False if the file system is full. Called under the
    /// metadata lock, for operations that are not counted: replay, and cases that should not occur.
    pub(crate) fn ensure_nodes(&self, meta: &mut Meta, nodes: u64) -> Result<bool> {
        let counts = meta.map.counts();
        if counts.free >= nodes {
            return Ok(true);
        }
        let more = nodes_more(counts.used).max(nodes - counts.free);
        let needs = super::extend::needs(meta, 0, counts.backed + more);
        let reserved = self.reserve_needs(&needs).and_then(|()| self.reserve_nodes(counts.backed, more));
        match reserved {
            Ok(()) => meta.map.set_backed_length(counts.backed + more),
            Err(error) if is_full(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}
