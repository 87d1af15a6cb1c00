//! Write-through: large writes bypass the buffer and are copied to the page cache at once, while their data is still in
//! the processor's caches.
//!
//! A large write in buffered mode costs two copies: from the socket, and into the page cache. The buffer would cost a
//! third pass through memory, and another thread. So the thread that received a write of at least [`THROUGH_MIN`]
//! blocks writes it directly, unless a part of its range is buffered. Blocks that only the head maps are overwritten in
//! place; the rest is written to new blocks.
//!
//! What must hold:
//!
//! 1. Blocks are overwritten in place only under a *permit*: an announcement in the journal that they may have any
//!    content from now on. Permits are given ahead of a sequential stream, many megabytes at once, and end with the
//!    next flush of the data files. That flush makes the writes under them durable, and their checksums are appended to
//!    the journal after it.
//! 2. While a range is being written, reads and writes of the range wait, so no read returns a partly written block.
//! 3. No write-through is under way when a snapshot is taken, when a checkpoint is captured, when permits end, or when
//!    the disk is deleted or reverted.

use super::equal::{EqualRun, EqualRuns, NewData, THROUGH_READS};
use super::packs::NewPack;
use crate::engine::admit::batch_bytes;
use crate::engine::locked_buffers::LockedBuffers;
use crate::engine::log::Cost;
use crate::engine::metadata::{Fetch, Touched};
use crate::engine::sharing::KEPT_REFERENCES_MAX;
use crate::engine::{Engine, Head, Meta};
use crate::journal::{BatchKind, Operation, RUN_MAX, Writer};
use crate::space::{Run, TABLE_ENTRIES};
use crate::sync::atomic::Ordering;
use crate::tree::Aim;
use crate::{IoContext, Result, is_lost};
use backend::{BLOCK_SIZE, IoMode, SharedSlice};
use checksums::Checksums;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::ops::Range;

/// The smallest write that bypasses the buffer, in blocks (128 KiB).
const THROUGH_MIN: u64 = 32;
/// How far ahead of a write permits are given, in blocks (32 MiB).
const PERMIT_AHEAD: u64 = 8192;
/// The most runs that one announcement permits.
const PERMITS_AT_ONCE: usize = 512;

/// The result of an attempt.
enum Outcome {
    /// The write is done.
    Done,
    /// The write has to enter the buffer instead.
    Buffer,
    /// These blocks have to be announced first.
    Announce(Vec<Run>),
}

/// A part of a write, and where it is written.
struct Part<'a> {
    blocks: Range<u64>,
    run: Run,
    place: PartPlace<'a>,
}

/// How a part of a write is stored.
enum PartPlace<'a> {
    InPlace,
    New,
    /// Compressed, in new blocks.
    Pack(&'a NewPack),
}

impl Part<'_> {
    fn is_new(&self) -> bool {
        !matches!(self.place, PartPlace::InPlace)
    }
}

impl Engine {
    /// Writes at least [`THROUGH_MIN`] whole blocks directly. False if the write has to enter the buffer instead.
    pub(crate) fn write_through(
        &self,
        head: &Head,
        logical: u64,
        data: &SharedSlice,
        checksums: &Checksums,
    ) -> Result<bool> {
        let blocks = (data.len() / BLOCK_SIZE) as u64;
        if blocks < THROUGH_MIN || self.options.mode != IoMode::Buffered || !self.options.write_through {
            return Ok(false);
        }
        self.check_running()?;
        self.pace()?;
        // The survey includes the blocks that will get permits.
        let ahead = logical..(logical + blocks).max(logical + PERMIT_AHEAD);
        let survey = |meta: &mut Meta| {
            let new = blocks - meta.survey_disk(head.id, logical..logical + blocks, Aim::Write).min(blocks);
            meta.survey_disk(head.id, ahead.clone(), Aim::Read);
            if new > 0 && meta.pages.absent() == 0 {
                meta.survey_allocation(new);
            }
        };
        // Compressed before the write delays reads of its range, and flushes and snapshots, which wait for it.
        let range = logical..logical + blocks;
        let new = NewData { logical, data, checksums: checksums.as_slice(), stamp: 0 };
        // Blocks of the range may be overwritten in place by this write.
        let equal = self.equal_runs(head.id, &[new], range.clone(), THROUGH_READS);
        let packs = self.packs_of(head, range.clone(), data, &equal);
        let mut fetch = Fetch::default();
        // A permit may end before it is used. After three attempts the write enters the buffer instead.
        let mut attempts = 3;
        while attempts > 0 {
            let _surveyed = self.meta.bring_in_for(&fetch, survey);
            let outcome = self.try_through(head, &range, (data, checksums), (&packs, &equal), &mut fetch);
            if outcome.is_err() && self.meta.load_missing(&mut fetch)? {
                continue;
            }
            attempts -= 1;
            match outcome? {
                Outcome::Done => return Ok(true),
                Outcome::Buffer => return Ok(false),
                Outcome::Announce(runs) => self.announce_ahead(&runs)?,
            }
        }
        Ok(false)
    }

    fn try_through(
        &self,
        head: &Head,
        range: &Range<u64>,
        content: (&SharedSlice, &Checksums),
        prepared: (&[NewPack], &EqualRuns<'_>),
        fetch: &mut Fetch,
    ) -> Result<Outcome> {
        let _through = self.writeback.share_through();
        if !head.lock().enter_through(range)? {
            return Ok(Outcome::Buffer);
        }
        let outcome = self.through_entered(head, range, content, prepared, fetch);
        head.lock().leave_through(range);
        outcome
    }

    fn through_entered(
        &self,
        head: &Head,
        range: &Range<u64>,
        (data, checksums): (&SharedSlice, &Checksums),
        (packs, equal): (&[NewPack], &EqualRuns<'_>),
        fetch: &mut Fetch,
    ) -> Result<Outcome> {
        let disks = Engine::kept_disks(&equal.runs, None);
        let heads = self.buffers.of_disks(&disks);
        let (parts, losses, _grant, _changes) = {
            let mut kept = LockedBuffers::lock(&heads);
            let mut guard = self.meta.lock();
            let meta = &mut *guard;
            let losses = meta.data.losses();
            let root = meta.catalog.get(head.id)?.root;
            let own = fetch.require(meta, |meta| meta.places(root, range.clone()))?;
            let is_current = kept.are_current(&self.buffers, &disks);
            let (mut mapped, mut added): (Vec<&EqualRun>, _) = (Vec::new(), FxHashMap::default());
            for equal in equal.runs.iter().filter(|_| is_current) {
                if !fetch.require(meta, |meta| self.is_still_equal(meta, head.id, equal, &mut kept))? {
                    continue;
                }
                match add_references(meta, equal.run(), &mut added)? {
                    true => mapped.push(equal),
                    false => self.forget_hints(equal),
                }
            }
            let own = without(own, &mapped);
            let new: u64 = own.iter().filter(|(_, place)| place.is_none()).map(|(r, _)| r.end - r.start).sum();
            let all_new = new + mapped.iter().map(|equal| equal.blocks()).sum::<u64>();
            // The claim on the blocks lasts until they are allocated and the headroom is lowered.
            let Some(_claim) = self.try_claim(new) else { return Ok(Outcome::Buffer) };
            // The changes of the map count until the blocks are in the map.
            let Some(changes) = self.try_changes(head, all_new) else { return Ok(Outcome::Buffer) };
            let in_place = own
                .iter()
                .filter_map(|(range, place)| place.map(|start| Run { start, blocks: range.end - range.start }));
            if !self.log.permits(in_place) {
                let ahead = range.start..range.end.max(range.start + PERMIT_AHEAD);
                let ahead = fetch.require(meta, |meta| meta.places(root, ahead))?;
                let runs = ahead
                    .iter()
                    .filter_map(|(range, place)| place.map(|start| Run { start, blocks: range.end - range.start }));
                // At most as many runs as one announcement may permit are taken, however short the runs are.
                return Ok(Outcome::Announce(runs.take(PERMITS_AT_ONCE).collect()));
            }
            fetch.require_allocation(meta, new)?;
            let mut parts: Vec<Part<'_>> = Vec::new();
            for (range, place) in own {
                if let Some(start) = place {
                    let run = Run { start, blocks: range.end - range.start };
                    parts.push(Part { blocks: range, run, place: PartPlace::InPlace });
                    continue;
                }
                if let Err(error) = self.place_new(meta, range, packs, &mut parts) {
                    release_parts(meta, &parts);
                    self.update_headroom(meta);
                    // The write enters the buffer, and its write-back allocates blocks of another region.
                    return if is_lost(&error) { Ok(Outcome::Buffer) } else { Err(error) };
                }
            }
            let cost = fetch.require(meta, |meta| parts_cost(meta, head.id, &parts, &mapped));
            let grant = cost.map(|cost| self.log.admission.try_admit(cost));
            let Ok(Some(grant)) = grant else {
                release_parts(meta, &parts);
                self.update_headroom(meta);
                // The write enters the buffer instead, and waits there for room.
                return grant.map(|_| Outcome::Buffer);
            };
            if let Err(error) = self.map_for_write(meta, head.id, &mapped) {
                release_parts(meta, &parts);
                self.update_headroom(meta);
                // What is mapped already has the content of the write.
                return if self.running.goes_on() { Ok(Outcome::Buffer) } else { Err(error) };
            }
            // From here on only the medium can fail. Older journalled payload of these blocks must not be written over
            // the new content.
            for part in parts.iter().filter(|part| !part.is_new()) {
                meta.in_flight.claim(part.run);
                meta.forget_logged(part.run);
            }
            self.update_headroom(meta);
            (parts, losses, grant, changes)
        };
        for part in &parts {
            let bytes = |block: u64| (block - range.start) as usize * BLOCK_SIZE;
            let content = match &part.place {
                PartPlace::Pack(pack) => &pack.bytes[..],
                _ => &data[bytes(part.blocks.start)..bytes(part.blocks.end)],
            };
            let (file, offset) = self.files.locate(part.run).map_err(|error| self.stop(error))?;
            file.write_at(&[content], offset, false)
                .during(|| format!("writing {} blocks at {}", part.run.blocks, part.run.start))
                .map_err(|error| self.stop(error))?;
        }
        parts.iter().for_each(|part| self.files.touch(part.run));
        // The files are marked first, because a flush that sees the new count must flush them.
        let gate = self.log.clocks.wrote_home();
        let _fetch = self.meta.bring_in(|meta| {
            for part in &parts {
                meta.survey_run(part.run);
                if part.is_new() {
                    meta.survey_disk(head.id, part.blocks.clone(), Aim::Map);
                }
            }
        });
        // What was mapped has a hint already.
        let written: Vec<Range<u64>> = parts.iter().map(|part| part.blocks.clone()).collect();
        let mut short = None;
        let mut meta = self.meta.lock();
        for part in parts {
            let index = |block: u64| (block - range.start) as usize;
            let sums = || checksums.as_slice()[index(part.blocks.start)..index(part.blocks.end)].to_vec();
            self.counters.blocks_written.fetch_add(part.run.blocks, Ordering::Relaxed);
            let (disk, logical, run) = (head.id, part.blocks.start, part.run);
            let operation = match &part.place {
                PartPlace::InPlace => {
                    meta.in_flight.release(run);
                    let operation = Operation::Checksums { run, checksums: sums() };
                    // The write is done, so the checksums replace the announcement of its blocks.
                    self.carry_out(&mut meta, operation, gate)?;
                    continue;
                }
                PartPlace::New => Operation::Map { disk, logical, run, checksums: sums() },
                PartPlace::Pack(pack) => {
                    let blocks = part.blocks.end - logical;
                    Operation::MapPack { disk, logical, blocks, first: 0, run, checksums: pack.checksums() }
                }
            };
            match self.carry_out_new(&mut meta, operation, gate) {
                Ok(()) => {
                    if let PartPlace::Pack(pack) = &part.place {
                        meta.keep_new_index(run, &pack.bytes);
                    }
                }
                // Even after a failure, the checksums of blocks that were overwritten in place must be recorded.
                Err(error) if self.running.is_stopped() => return Err(error),
                Err(error) => short = Some(error),
            }
        }
        self.update_headroom(&meta);
        let full = self.is_commit_due(&meta);
        let lost = meta.data.losses() > losses;
        drop(meta);
        let part = |blocks: &Range<u64>| (blocks.start - range.start) as usize..(blocks.end - range.start) as usize;
        let stored = written.iter().map(|blocks| (blocks.start, &checksums.as_slice()[part(blocks)]));
        self.writeback.equal.note(head.id, stored);
        self.log.clocks.acknowledge();
        if full {
            self.request(|work| work.commit = true);
        }
        match short {
            None => Ok(Outcome::Done),
            // The table page of the new blocks was lost meanwhile. The write enters the buffer, and its write-back
            // allocates blocks of another region.
            Some(error) if lost && is_lost(&error) => Ok(Outcome::Buffer),
            Some(error) => Err(error),
        }
    }

    /// Maps stored blocks for a write whose range is entered.
    fn map_for_write(&self, meta: &mut Meta, disk: u64, mapped: &[&EqualRun]) -> Result<()> {
        for equal in mapped {
            let gate = self.gate_of(equal);
            self.carry_out(meta, equal.operation(disk), gate)?;
            self.note_mapped(equal);
        }
        Ok(())
    }

    /// The packs of those windows of a write that need new blocks now, if the writes of the disk are compressed.
    fn packs_of(&self, head: &Head, range: Range<u64>, data: &[u8], equal: &EqualRuns<'_>) -> Vec<NewPack> {
        let Some(packer) = self.writeback.packed.of(head.id) else { return Vec::new() };
        let windows = self.windows_to_write(head, range.clone(), equal);
        packer.packs(windows.into_iter(), range.start, data)
    }

    /// Allocates new blocks for a range, and uses the packs of windows within it. A pack that gets no adjacent blocks
    /// is left out: its blocks are stored plainly.
    fn place_new<'a>(
        &self,
        meta: &mut Meta,
        range: Range<u64>,
        packs: &'a [NewPack],
        parts: &mut Vec<Part<'a>>,
    ) -> Result<()> {
        for (segment, pack) in segments(range, packs) {
            if let Some(pack) = pack
                && let Some(run) = self.allocate_adjacent(meta, pack.stored())?
            {
                parts.push(Part { blocks: segment, run, place: PartPlace::Pack(pack) });
                continue;
            }
            let mut at = segment.start;
            while at < segment.end {
                let run = self.allocate(meta, segment.end - at)?;
                parts.push(Part { blocks: at..at + run.blocks, run, place: PartPlace::New });
                at += run.blocks;
            }
        }
        Ok(())
    }

    /// Announces durably that blocks may have any content from now on, and gives permits for them.
    pub(crate) fn announce_ahead(&self, runs: &[Run]) -> Result<()> {
        let pages = pages_of_runs(runs);
        let mut writer = Writer::default();
        for run in runs {
            for part in crate::engine::write::chunks(run.start..run.start + run.blocks, RUN_MAX) {
                writer.push(&Operation::Announce { run: part });
            }
        }
        let _grant = self.admit(Cost { bytes: batch_bytes(writer.len()), pages: pages.len() as u64 })?;
        let mut commit = self.log.lock();
        // Recovery would mark the blocks as suspect, and so change their table pages.
        self.log.admission.add_announced(&pages);
        self.log.permit(runs, || self.append(&mut commit, BatchKind::Urgent, &writer.finish()))
    }
}

/// Divides a range of blocks that need new places by packs, which are in ascending order. A pack that is not within the
/// range is left out: other blocks of its window can be overwritten in place by now.
fn segments(range: Range<u64>, packs: &[NewPack]) -> Vec<(Range<u64>, Option<&NewPack>)> {
    let (mut segments, mut at) = (Vec::new(), range.start);
    for pack in packs.iter().filter(|pack| range.start <= pack.blocks.start && pack.blocks.end <= range.end) {
        segments.push((at..pack.blocks.start, None));
        segments.push((pack.blocks.clone(), Some(pack)));
        at = pack.blocks.end;
    }
    segments.push((at..range.end, None));
    segments.retain(|(segment, _)| !segment.is_empty());
    segments
}

/// The parts of a range, without blocks that get stored ones. These are in ascending order, and need new places.
fn without(own: Vec<(Range<u64>, Option<u64>)>, mapped: &[&EqualRun]) -> Vec<(Range<u64>, Option<u64>)> {
    let mut left = Vec::new();
    for (range, place) in own {
        let mut at = range.start;
        for equal in mapped.iter().filter(|_| place.is_none()) {
            let (start, end) = (equal.logical.start.max(at), equal.logical.end.min(range.end));
            if start < end {
                left.push((at..start, None));
                at = end;
            }
        }
        left.push((at..range.end, place));
    }
    left.retain(|(range, _)| !range.is_empty());
    left
}

/// Adds a reference to each block of a run, beside those that the blocks have and that were `added` before. False if a
/// block would get too many.
fn add_references(meta: &mut Meta, run: Run, added: &mut FxHashMap<u64, u32>) -> Result<bool> {
    for block in run.start..run.start + run.blocks {
        let before = added.get(&block).copied().unwrap_or(0);
        if before > 0 && meta.entry(block)?.references + before >= KEPT_REFERENCES_MAX {
            return Ok(false);
        }
    }
    (run.start..run.start + run.blocks).for_each(|block| *added.entry(block).or_default() += 1);
    Ok(true)
}

/// Frees the new blocks of parts that were not written.
fn release_parts(meta: &mut Meta, parts: &[Part<'_>]) {
    parts.iter().filter(|part| part.is_new()).for_each(|part| meta.data.release(part.run));
}

/// The pages of the data table that describe these runs.
fn pages_of_runs(runs: &[Run]) -> BTreeSet<u64> {
    let of = |run: &Run| run.start / TABLE_ENTRIES..=(run.start + run.blocks.max(1) - 1) / TABLE_ENTRIES;
    runs.iter().flat_map(of).collect()
}

/// An upper limit of the cost of mapping these runs.
fn parts_cost(meta: &mut Meta, disk: u64, parts: &[Part<'_>], mapped: &[&EqualRun]) -> Result<Cost> {
    let (mut bytes, mut touched) = (0, Touched::default());
    for equal in mapped {
        bytes += 32 + 4 * equal.run().blocks;
        meta.touch_mapping(disk, equal.logical.clone(), equal.run(), &mut touched)?;
    }
    for part in parts {
        bytes += 32 + 4 * part.run.blocks;
        match part.is_new() {
            true => meta.touch_mapping(disk, part.blocks.clone(), part.run, &mut touched)?,
            false => touched.touch_run(part.run),
        }
    }
    Ok(Cost { bytes, pages: meta.pages_of(&touched) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::Buffer;

    #[test]
    fn a_page_that_describes_several_runs_counts_once() {
        let runs = [3, 1, 2, 0].map(|i| Run { start: i * 10, blocks: 5 });
        assert_eq!(pages_of_runs(&runs), [0].into());
        let across = Run { start: TABLE_ENTRIES - 1, blocks: 2 };
        assert_eq!(pages_of_runs(&[runs[0], across, Run { start: TABLE_ENTRIES + 7, blocks: 1 }]), [0, 1].into());
    }

    /// Between the two looks at the map, blocks of a window may become ones that are overwritten in place.
    #[test]
    fn a_pack_is_used_only_if_all_its_blocks_need_new_places() {
        let packs = [0, 32, 64].map(|start| NewPack { blocks: start..start + 32, bytes: Buffer::zeroed(1) });
        let divided = |range: Range<u64>| -> Vec<(Range<u64>, bool)> {
            segments(range, &packs).into_iter().map(|(segment, pack)| (segment, pack.is_some())).collect()
        };
        assert_eq!(divided(0..16), [(0..16, false)]);
        assert_eq!(divided(16..32), [(16..32, false)]);
        assert_eq!(divided(0..96), [(0..32, true), (32..64, true), (64..96, true)]);
        assert_eq!(divided(10..70), [(10..32, false), (32..64, true), (64..70, false)]);
    }
}
