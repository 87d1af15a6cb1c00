//! Writes enter the buffer, after free blocks were claimed for the blocks that may need a new place.

use super::metadata::Effects;
use super::placement::Holds;
use super::read::gone;
use super::reserve::DRAINS_MAX;
use super::{Engine, Head, Meta};
use crate::buffer::{Content, DISCARD_CHANGES, DirtyEntry, Held};
use crate::catalog::Provisioning;
use crate::space::Run;
use crate::tree;
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, SharedSlice};
use checksums::Checksums;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// If at least this many free blocks are not claimed, a writer does not request more (4 MiB).
const CLAIMS_AHEAD: u64 = 1024;
/// A writer requests write-back once per this many blocks (256 KiB).
const WRITE_BACK_STRIDE: u64 = 64;
/// How long a thread that waits for buffer space sleeps before it checks again.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// The most blocks that one entry zeroes (16 MiB), because each may need a map change.
const ZERO_MAX: u64 = 1 << 12;

impl Engine {
    /// Writes whole blocks. The data begins with block `logical`.
    pub fn write_blocks(&self, head: &Head, logical: u64, data: SharedSlice) -> Result<()> {
        let blocks = (data.len() / BLOCK_SIZE) as u64;
        let checksums = Checksums::of(&data);
        let written = match self.write_through(head, logical, &data, &checksums) {
            Ok(false) => self.put_data(head, logical, blocks, Content::Data(data, checksums)),
            outcome => outcome.map(|_| ()),
        };
        head.note_written(logical..logical + blocks);
        written
    }

    /// Discards blocks: they read as zeros afterwards.
    pub fn discard_blocks(&self, head: &Head, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let discarded = self.put(head, range.start, range.end - range.start, &mut Content::Unmapped, None);
        head.note_written(range);
        discarded.map(|_| ())
    }

    /// Zeroes blocks. Mapped blocks stay allocated, the others are allocated.
    pub fn zero_blocks(&self, head: &Head, range: Range<u64>) -> Result<()> {
        let zero = |part: Run| self.put_in_parts(head, part.start, part.blocks, Content::Zero);
        let zeroed = chunks(range.clone(), ZERO_MAX).try_for_each(zero);
        head.note_written(range);
        zeroed
    }

    /// Puts data into the buffer. A long write is divided: as a whole, it would wait until almost nothing is buffered,
    /// and while others write, that may never be the case. A refused write may be carried out in part. Each part is
    /// copied: otherwise its entry would keep the memory of the whole write, of which the other parts may have left.
    fn put_data(&self, head: &Head, logical: u64, blocks: u64, content: Content) -> Result<()> {
        let most = self.buffers.part_max();
        if blocks <= most {
            return self.put_in_parts(head, logical, blocks, content);
        }
        chunks(0..blocks, most).try_for_each(|part| {
            let of_part = content.part(part.start..part.start + part.blocks).copied();
            self.put_in_parts(head, logical + part.start, part.blocks, of_part)
        })
    }

    /// Puts an entry into the buffer. If the map has no room for an entry of a thick disk, the entry is split: its data
    /// blocks are reserved, and each part needs less of the map at a time.
    fn put_in_parts(&self, head: &Head, logical: u64, blocks: u64, mut content: Content) -> Result<()> {
        match self.put(head, logical, blocks, &mut content, None) {
            Err(error) if error.kind() == ErrorKind::NoSpace && blocks > 1 && self.is_thick(head)? => {
                let first = blocks / 2;
                self.put_in_parts(head, logical, first, content.part(0..first))?;
                self.put_in_parts(head, logical + first, blocks - first, content.part(first..blocks))
            }
            other => other.map(|_| ()),
        }
    }

    /// Whether the blocks of a disk were reserved when it was created.
    pub(super) fn is_thick(&self, head: &Head) -> Result<bool> {
        self.with_catalog(|catalog| Ok(catalog.get(head.id)?.provisioning != Provisioning::Thin))
    }

    /// Changes part of a block: reads the block, lets `change` edit it, and writes it. If another write changes the
    /// block meanwhile, starts again.
    pub fn modify_block(&self, head: &Head, name: &str, block: u64, change: &dyn Fn(&mut [u8])) -> Result<()> {
        loop {
            {
                let mut buffer = head.lock();
                if buffer.gone {
                    return Err(gone());
                }
                if !buffer.layers.begin_partial(block) {
                    drop(buffer);
                    crate::sync::thread::yield_now();
                    continue;
                }
            }
            let read = self.read_blocks(name, block..block + 1, &|range| self.plan_head(head, range));
            let mut bytes = match read {
                Ok(bytes) => bytes,
                Err(error) => {
                    head.lock().layers.end_partial(block);
                    return Err(error);
                }
            };
            change(&mut bytes);
            let checksums = Checksums::of(&bytes);
            let data = SharedSlice::new(Arc::new(bytes), 0..BLOCK_SIZE);
            if self.put(head, block, 1, &mut Content::Data(data, checksums), Some(block))? {
                head.note_written(block..block + 1);
                return Ok(());
            }
        }
    }

    /// Puts an entry into the buffer, and moves `content` there. With `partial`, the number of a block, nothing is put
    /// and `Ok(false)` is returned if the block was written since
    /// [`Layers::begin_partial`](crate::buffer::Layers::begin_partial).
    fn put(&self, head: &Head, logical: u64, blocks: u64, content: &mut Content, partial: Option<u64>) -> Result<bool> {
        let fail = |error: Error| {
            if let Some(block) = partial {
                head.lock().layers.end_partial(block);
            }
            error
        };
        let range = logical..logical + blocks;
        self.refuse_isolated(head, &range).map_err(fail)?;
        let mut more = 0;
        let (mut buffer, held, covered) = loop {
            let snapshots = self.buffers.snapshots();
            let (held, covered) = self.prepare(head, &range, content, more).map_err(fail)?;
            let buffer = head.lock_settled(&range);
            if buffer.gone {
                break (buffer, held, covered);
            }
            // The entry was found to need no new blocks, but a snapshot may have been taken and sealed since.
            let single = buffer.layers.is_single();
            let unchanged = single && self.buffers.snapshots() == snapshots;
            let cuts = buffer.layers.cuts_discard(&range);
            let mut fits = Ok((!cuts || more > 0 && covered) && (!covered || unchanged || self.is_covered()));
            if let Ok(true) = fits
                && !covered
            {
                fits = self.fits_in_written(head, single, range.clone());
            }
            if let Ok(true) = fits
                && held.claimed == 0
                && !matches!(content, Content::Unmapped)
            {
                fits = self.fits_in_own(head, single, range.clone());
            }
            if let Ok(true) = fits {
                break (buffer, held, covered);
            }
            drop(buffer);
            self.give_back(held);
            fits.map_err(fail)?;
            // If the entry splits a discard, its second part needs map changes.
            more = if cuts { DISCARD_CHANGES } else { 0 };
        };
        let refused = if buffer.gone {
            Some(Err(gone()))
        } else if partial.is_some_and(|block| !buffer.layers.end_partial(block)) {
            Some(Ok(false))
        } else {
            None
        };
        if let Some(refused) = refused {
            drop(buffer);
            self.give_back(held);
            return refused;
        }
        let stamp = self.log.clocks.acknowledge();
        let content = std::mem::replace(content, Content::Unmapped);
        let entry = DirtyEntry { blocks, content, stamp, claimed: held.claimed > 0, covered };
        let cuts = more > 0 && buffer.layers.cuts_discard(&range);
        let mut replaced = buffer.layers.insert(logical, entry);
        drop(buffer);
        replaced.changes += if cuts { 0 } else { more };
        self.give_back_replaced(replaced);
        Ok(true)
    }

    /// Waits for room in the buffer and in the map, and claims free blocks. The returned boolean states whether map
    /// nodes are reserved for the write.
    fn prepare(&self, head: &Head, range: &Range<u64>, content: &Content, more: u64) -> Result<(Held, bool)> {
        self.check_running()?;
        let (mut held, covered) = self.take_changes(head, range, content, more)?;
        if !matches!(content, Content::Unmapped) {
            match self.claim(head, range.start, range.end - range.start) {
                Ok(claimed) => held.claimed = claimed,
                Err(error) => {
                    self.give_back(held);
                    return Err(error);
                }
            }
        }
        Ok((held, covered))
    }

    /// Releases what was reserved for an entry.
    pub(super) fn give_back(&self, held: Held) {
        if held.claimed > 0 {
            self.reserves.end_claim(held.claimed);
        }
        if held.changes > 0 {
            self.reserves.end_changes(held.changes);
        }
        if held.data > 0 {
            self.buffers.give_back(held.data);
        }
    }

    /// The fill level of the write buffer.
    pub fn buffer_percent(&self) -> u32 {
        (self.buffers.blocks() * 100 / self.buffers.limit().max(1)).min(100) as u32
    }

    pub(super) fn wait_for_room(&self, blocks: u64) -> Result<()> {
        let limit = self.buffers.limit();
        let first = self.buffers.try_take(blocks);
        let before = first.unwrap_or(limit);
        if before + blocks > limit / 8 && before / WRITE_BACK_STRIDE != (before + blocks) / WRITE_BACK_STRIDE {
            self.request(|work| work.write_back = true);
        }
        if first.is_some() {
            return Ok(());
        }
        let failures = self.writeback.failing.count();
        let waiter = self.buffers.enqueue(blocks);
        loop {
            if self.options.threads && self.running.goes_on() {
                self.request(|work| work.write_back = true);
                waiter.wait(LOOK_AGAIN);
                self.writeback.failing.check(failures)?;
            } else {
                self.write_back_once()?;
            }
            self.check_running()?;
            if waiter.try_take() {
                return Ok(());
            }
        }
    }

    /// Waits while a flush is outrun by writers: the flush takes discards and zeroes out of the buffers step by step,
    /// and each further discard or zeroing would add a step.
    pub(super) fn wait_for_flush(&self) -> Result<()> {
        while self.options.threads && self.buffers.is_outrun() {
            self.check_running()?;
            self.buffers.wait_outrun(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Claims free blocks for a write. Returns 0 if the whole write fits into blocks that its disk has already.
    fn claim(&self, head: &Head, logical: u64, blocks: u64) -> Result<u64> {
        let claims = self.reserves.add_claim(blocks);
        let headroom = self.reserves.headroom();
        if claims <= headroom {
            if claims + CLAIMS_AHEAD > headroom && claims / 64 != (claims - blocks) / 64 {
                self.request(|work| work.extend = true);
            }
            return Ok(blocks);
        }
        match self.extend(claims) {
            Ok(()) => return Ok(blocks),
            Err(error) if error.kind() == ErrorKind::NoSpace => {}
            Err(error) => {
                self.reserves.end_claim(blocks);
                return Err(error);
            }
        }
        // The file system is full, but overwrites of blocks that only the disk maps are still possible.
        self.reserves.end_claim(blocks);
        if self.fits_without_claim(head, logical..logical + blocks)? {
            return Ok(0);
        }
        // Freed blocks, and blocks of the disk that pending changes hold, can be used once the pending changes are
        // durable.
        if self.meta.lock().helped_by_commit() && self.commit_changes().is_ok() {
            let claims = self.reserves.add_claim(blocks);
            if self.extend(claims).is_ok() {
                return Ok(blocks);
            }
            self.reserves.end_claim(blocks);
            if self.fits_without_claim(head, logical..logical + blocks)? {
                return Ok(0);
            }
        }
        if self.fits_after_write_back(head, logical..logical + blocks)? {
            return Ok(0);
        }
        Err(self.no_space(head))
    }

    /// Whether a range can be written without new blocks once the entries that it overwrites are written back, which
    /// uses the claims of these entries. Waits for the write-back.
    fn fits_after_write_back(&self, head: &Head, range: Range<u64>) -> Result<bool> {
        let failures = self.writeback.failing.count();
        for _ in 0..DRAINS_MAX {
            let (mut pieces, mut gaps) = (Vec::new(), Vec::new());
            head.lock().layers.overlay(range.clone(), &mut pieces, &mut gaps);
            if pieces.iter().any(|piece| matches!(piece.entry.content, Content::Unmapped)) {
                return Ok(false);
            }
            for gap in gaps {
                if !self.fits_without_claim(head, gap)? {
                    return Ok(false);
                }
            }
            if self.fits_without_claim(head, range.clone())? {
                return Ok(true);
            }
            if !self.drain_once(failures)? {
                return self.fits_without_claim(head, range);
            }
        }
        Ok(false)
    }

    /// Makes the error for a full file system or quota, and requests that freed blocks are reclaimed.
    #[cold]
    pub(super) fn no_space(&self, head: &Head) -> Error {
        self.request(|work| work.reclaim = true);
        match self.with_catalog(|catalog| catalog.get(head.id).map(|disk| disk.name.clone())) {
            Ok(name) => Error::new(
                ErrorKind::NoSpace,
                format!(
                    "{name}: no space left in the file system of the datastore, or in its quota; free some, or delete \
                     disks, snapshots or data in guests and discard it"
                ),
            ),
            Err(error) => error,
        }
    }

    /// True if a range can be written without a map change: all of it is mapped to written blocks that only this disk
    /// maps.
    pub(super) fn fits_in_written(&self, head: &Head, sealed: bool, range: Range<u64>) -> Result<bool> {
        let blocks = range.end - range.start;
        self.meta.look(|meta| Ok(sealed && meta.own_blocks(head.id, range.clone(), true)? == blocks))
    }

    fn fits_without_claim(&self, head: &Head, range: Range<u64>) -> Result<bool> {
        let sealed = head.lock().layers.is_single();
        self.fits_in_own(head, sealed, range)
    }

    /// True if a range can be written without claims: to blocks that only this disk maps, or to blocks reserved for it.
    /// Blocks that the disk maps count only if `sealed` is true. Otherwise a closed layer belongs to a snapshot: once
    /// the layer is in the map, the snapshot shares these blocks.
    fn fits_in_own(&self, head: &Head, sealed: bool, range: Range<u64>) -> Result<bool> {
        let blocks = range.end - range.start;
        self.meta.look(|meta| {
            let own = if sealed { meta.own_blocks(head.id, range.clone(), false)? } else { 0 };
            Ok(own == blocks || meta.catalog.get(head.id)?.reserved >= blocks - own)
        })
    }
}

impl Meta {
    /// True if freed or held blocks can be used once the pending changes are durable.
    fn helped_by_commit(&self) -> bool {
        self.freed.freeing() > 0
            || self.holds_nodes()
            || self.pending.iter().any(|pending| pending.held().next().is_some())
    }

    /// The number of blocks in a range that only this disk maps; with `written`, only those that were written. Blocks
    /// that are held or in flight count too: write-back waits for them, or writes the new content to the journal.
    fn own_blocks(&mut self, disk: u64, range: Range<u64>, written: bool) -> Result<u64> {
        let Some(root) = self.catalog.get(disk)?.root else { return Ok(0) };
        let mut extents = Vec::new();
        let (none, mut effects) = (Holds::default(), Effects::default());
        tree::lookup_exclusive(&mut self.current_nodes(&none, &mut effects), root, range, &mut extents)?;
        let mut own = 0;
        for extent in extents.iter().filter(|extent| !(extent.shared_path || written && extent.unwritten)) {
            for block in extent.physical..extent.physical + extent.blocks {
                own += u64::from(self.entry(block)?.references == 1);
            }
        }
        Ok(own)
    }
}

/// Splits a run into parts of at most `most` blocks.
pub(super) fn chunks(range: Range<u64>, most: u64) -> impl Iterator<Item = Run> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        (at < range.end).then(|| {
            let blocks = most.min(range.end - at);
            at += blocks;
            Run { start: at - blocks, blocks }
        })
    })
}
