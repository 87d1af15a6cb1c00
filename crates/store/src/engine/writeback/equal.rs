//! New data that is stored already: it is mapped to the stored blocks instead of new ones.
//!
//! The disks for which this is done belong to domains, and hints ([`Hints`]) say where in a domain a block with a
//! checksum may be stored. Only data that needs new blocks is looked for, so blocks that are overwritten in place cost
//! nothing. The candidates are read and compared before write-back takes its locks; under the locks the map changes,
//! and the data leaves the buffer. Whatever does not fit is written as without this. [`crate::engine::sharing`] finds
//! the rest later. The stored blocks are plain, or a part of a pack.
//!
//! What must hold:
//!
//! 1. A block is mapped only if it was read, matches its checksum, is equal to the data byte for byte, and was watched
//!    since before it was read ([`InFlight::watch`](crate::engine::placement::InFlight::watch)): no write of it has
//!    begun, and it was in use all the time. It is settled: no pending operation concerns it, and no payload for it
//!    waits. Packs are never overwritten, so a block in a pack needs only be watched and in use.
//! 2. The operation waits until all writes to the data files that have ended are durable, as a share: the block may
//!    have been overwritten in place, and no pending operation tells of such a write. The operation that mapped a pack
//!    precedes this one in the journal, and waits until the pack is durable.
//! 3. A batch of write-back takes the entries only after that, under the gate. So no batch under way writes them.
//! 4. The block is not one that a buffered write may overwrite in place: such a write may have been acknowledged
//!    without a claim on a free block. So the buffer of its disk is locked, and has nothing for it, unless the block
//!    has several references already, or is in a pack. For the same reason, nothing else is buffered for the logical
//!    blocks that are mapped. A write that bypasses the buffer maps no blocks of its own range, which it may overwrite
//!    in place itself.
//! 5. Both disks belong to the same domain at that moment.
//! 6. The superblock says that writes may be mapped to blocks in use before the first one is
//!    ([`VERSION_SHARED_WRITES`]), and that these may be in packs ([`VERSION_WRITES_TO_PACKS`]).
//! 7. Thick disks get no such blocks, and theirs are not mapped: their writes must never need new space.

mod mapped;

use super::known::KnownBlocks;
use crate::buffer::{Content, DirtyPiece};
use crate::engine::log::{VERSION_SHARED_WRITES, VERSION_WRITES_TO_PACKS};
use crate::engine::placement::Watch;
use crate::engine::sharing::{Equal, EqualBlocks, Hint, Hints, Stored};
use crate::engine::{Engine, Head};
use crate::journal::Operation;
use crate::space::Run;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::{Result, checksum, is_lost, tree};
use backend::BLOCK_SIZE;
use rustc_hash::{FxHashMap, FxHashSet};
use std::cell::LazyCell;
use std::ops::Range;

/// The most runs of stored blocks that are read for one batch of write-back, without those that follow the one before
/// on the medium. A random read of a hard disk takes about 10 ms.
const BATCH_READS: usize = 64;
/// The most runs of stored blocks that are read for one write that bypasses the buffer, because a client waits for it.
pub(super) const THROUGH_READS: usize = 8;
/// Whether parts of packs of any size are mapped. Each keeps the whole pack in use, so otherwise a write maps at least
/// as many blocks of a pack as the pack has stored blocks. Tests map small parts, so that they have many.
const ANY_PART: bool = cfg!(any(test, feature = "schedules"));

/// The disks whose new data is looked for, and the hints.
#[derive(Default)]
pub struct EqualWrites {
    /// Whether there are any: otherwise writes only test this.
    any: AtomicBool,
    /// The version that the superblock is known to have at least, among those that writes to blocks in use need.
    allowed: AtomicU64,
    hints: Mutex<Hints>,
    /// Blocks of data that were not written, because they were stored already.
    mapped: AtomicU64,
    /// Set by a test that maps no small parts of packs.
    #[cfg(test)]
    pub(in crate::engine) leaves_small_parts: AtomicBool,
}

/// The most blocks that are noted under the lock of the hints at once.
const NOTED_TOGETHER: usize = 256;

impl EqualWrites {
    fn has_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    fn maps_any_part(&self) -> bool {
        #[cfg(test)]
        if self.leaves_small_parts.load(Ordering::Relaxed) {
            return false;
        }
        ANY_PART
    }

    /// Whether new data of a disk is looked for.
    pub(super) fn has(&self, disk: u64) -> bool {
        self.has_any() && self.hints.lock().number_of(disk).is_some()
    }

    /// Notes which blocks a disk has got. Called after writes; all that is noted may be out of date at once.
    pub fn note<'a>(&self, disk: u64, blocks: impl Iterator<Item = (u64, &'a [u32])>) {
        if !self.has_any() {
            return;
        }
        for (first, sums) in blocks {
            // Lookups wait for the lock, and new memory of the table is zeroed under it.
            for (sums, logical) in sums.chunks(NOTED_TOGETHER).zip((first..).step_by(NOTED_TOGETHER)) {
                let mut hints = self.hints.lock();
                let Some(number) = hints.number_of(disk) else { return };
                hints.note_all(number, sums, logical, false);
            }
        }
    }

    /// Notes blocks that a pass over a disk has found, by their logical blocks and checksums, if there is room
    /// for them.
    pub fn note_found(&self, disk: u64, blocks: impl Iterator<Item = (u64, u32)>) {
        if self.has_any() {
            let mut hints = self.hints.lock();
            if let Some(number) = hints.number_of(disk) {
                blocks.for_each(|(logical, checksum)| hints.note(number, checksum, logical, true));
            }
        }
    }
}

/// New data: its first logical block, its content and checksums, and the stamp of its write.
pub(super) struct NewData<'a> {
    pub logical: u64,
    pub data: &'a [u8],
    pub checksums: &'a [u32],
    pub stamp: u64,
}

/// New data that was compared with stored blocks, and is equal to them.
pub(in crate::engine) struct EqualRun {
    pub logical: Range<u64>,
    pub checksums: Vec<u32>,
    /// The parts of the data, each with the stamp of its write.
    parts: Vec<(Range<u64>, u64)>,
    /// The number of the disk that gets the blocks.
    number: u32,
    hint: Hint,
    /// The place of the first stored block.
    stored: Stored,
    /// The checksums of the physical blocks.
    stored_sums: Vec<u32>,
    watches: Vec<Watch>,
}

impl EqualRun {
    pub fn blocks(&self) -> u64 {
        self.logical.end - self.logical.start
    }

    /// The physical blocks.
    pub fn run(&self) -> Run {
        self.stored.run(self.blocks())
    }

    /// Keeps the first blocks, which are in a pack.
    fn shorten(&mut self, blocks: u64) {
        self.logical.end = self.logical.start + blocks;
        self.checksums.truncate(blocks as usize);
        self.parts.retain(|(part, _)| part.start < self.logical.end);
        if let Some((part, _)) = self.parts.last_mut() {
            part.end = part.end.min(self.logical.end);
        }
    }

    /// Whether a plan is that of these blocks.
    fn is_of(&self, found: &EqualBlocks) -> bool {
        (found.first, found.blocks) == (self.stored, self.blocks()) && found.checksums == self.stored_sums
    }

    /// The logical blocks of the other disk.
    fn kept(&self) -> Range<u64> {
        self.hint.logical..self.hint.logical + self.blocks()
    }

    pub fn operation(&self, disk: u64) -> Operation {
        let (logical, run, checksums) = (self.logical.start, self.run(), self.stored_sums.clone());
        match self.stored.packed {
            None => Operation::MapShared { disk, logical, run, checksums },
            Some(packed) => {
                let blocks = self.blocks();
                Operation::MapSharedPack { disk, logical, blocks, first: packed.index, run, checksums }
            }
        }
    }
}

/// Runs of new data that are equal to stored blocks. Its drop ends their watches, which takes the metadata lock.
#[must_use]
pub(in crate::engine) struct EqualRuns<'a> {
    engine: &'a Engine,
    pub runs: Vec<EqualRun>,
}

impl EqualRuns<'_> {
    /// Whether data in a range is equal to stored blocks.
    pub fn concern(&self, range: &Range<u64>) -> bool {
        self.runs.iter().any(|equal| equal.logical.start < range.end && range.start < equal.logical.end)
    }

    /// Leaves out parts of packs that would keep more blocks in use than they need as plain blocks: fewer of their
    /// blocks may be equal than was expected.
    fn leave_small_parts(&mut self) {
        if self.engine.writeback.equal.maps_any_part() {
            return;
        }
        let small = small_parts(self.runs.iter().map(|run| (run.stored, run.blocks())));
        if !small.is_empty() {
            let (left, kept) = self.runs.drain(..).partition(|run| small.contains(&run.stored.physical));
            self.runs = kept;
            // Ends their watches.
            drop(EqualRuns { engine: self.engine, runs: left });
        }
    }
}

/// The packs of which fewer blocks are mapped than they have stored blocks. Each run has its first place and its
/// length.
fn small_parts(runs: impl Iterator<Item = (Stored, u64)>) -> FxHashSet<u64> {
    let mut mapped: FxHashMap<u64, (u64, u64)> = FxHashMap::default();
    for (stored, blocks) in runs.filter(|(stored, _)| stored.packed.is_some()) {
        mapped.entry(stored.physical).or_insert((stored.run(blocks).blocks, 0)).1 += blocks;
    }
    mapped.into_iter().filter(|(_, (of_pack, blocks))| blocks < of_pack).map(|(pack, _)| pack).collect()
}

impl Drop for EqualRuns<'_> {
    fn drop(&mut self) {
        let watches: Vec<Watch> = self.runs.drain(..).flat_map(|run| run.watches).collect();
        self.engine.end_watches(&watches);
    }
}

impl Engine {
    /// No runs.
    pub(super) fn no_equal_runs(&self) -> EqualRuns<'_> {
        EqualRuns { engine: self, runs: Vec::new() }
    }

    fn end_watches(&self, watches: &[Watch]) {
        if !watches.is_empty() {
            let mut meta = self.meta.lock();
            watches.iter().for_each(|watch| meta.in_flight.unwatch(*watch));
        }
    }

    /// Compares the data of a batch of write-back with stored blocks, if [`Engine::reduces_batch`].
    pub(in crate::engine) fn equal_runs_of_batch(&self, head: &Head, pieces: &[DirtyPiece]) -> EqualRuns<'_> {
        if !self.writeback.equal.has_any() || !self.reduces_batch(head.id) {
            return self.no_equal_runs();
        }
        let new: Vec<NewData<'_>> = pieces
            .iter()
            // An entry without reserved nodes overwrites blocks in place, unless they are held now.
            .filter(|piece| piece.entry.covered)
            .filter_map(|piece| match &piece.entry.content {
                Content::Data(data, sums) => {
                    Some(NewData { logical: piece.logical, data, checksums: sums.as_slice(), stamp: piece.entry.stamp })
                }
                Content::Unmapped | Content::Zero => None,
            })
            .collect();
        self.equal_runs(head.id, &new, 0..0, BATCH_READS)
    }

    /// Compares new data of a disk with stored blocks that hints name, but not with those of the disk itself in the
    /// range `beside`. At most `reads` runs are read. Errors are only logged: the data is then written.
    pub(super) fn equal_runs(&self, disk: u64, new: &[NewData<'_>], beside: Range<u64>, reads: usize) -> EqualRuns<'_> {
        let mut found = self.no_equal_runs();
        let mut known = KnownBlocks::new(reads);
        let candidates = self.candidates(disk, new, &beside);
        let small = LazyCell::new(|| self.planned_small_parts(disk, &candidates));
        'candidates: for candidate in &candidates {
            let mut at = 0;
            while at < candidate.blocks.len() {
                if !known.may_compare(&candidate.hint_at(at)) {
                    at += 1;
                    continue;
                }
                match self.compare(disk, candidate, at, &mut known, &|pack| small.contains(&pack)) {
                    Ok((blocks, run)) => {
                        at += blocks as usize;
                        found.runs.extend(run);
                    }
                    Err(error) => {
                        if !is_lost(&error) {
                            tracing::debug!(%error, disk, "new data is not compared with stored blocks");
                            break 'candidates;
                        }
                        at += 1;
                    }
                }
            }
        }
        found.leave_small_parts();
        found
    }

    /// Runs of blocks with hints for adjacent blocks.
    fn candidates<'d>(&self, disk: u64, new: &[NewData<'d>], beside: &Range<u64>) -> Vec<Candidate<'d>> {
        let mut candidates: Vec<Candidate<'d>> = Vec::new();
        if !self.writeback.equal.has_any() {
            return candidates;
        }
        let hints = self.writeback.equal.hints.lock();
        let Some(number) = hints.number_of(disk) else { return candidates };
        for new in new {
            for (index, hint) in hints.find_all(number, new.checksums) {
                let logical = new.logical + index as u64;
                // The hint may be of the block that is being written.
                if hint.disk == disk && (hint.logical == logical || beside.contains(&hint.logical)) {
                    continue;
                }
                let data = &new.data[index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE];
                let block = NewBlock { data, sum: new.checksums[index], stamp: new.stamp };
                match candidates.last_mut() {
                    Some(last) if last.precedes(logical, hint) => last.blocks.push(block),
                    _ => candidates.push(Candidate { logical, blocks: vec![block], number, hint }),
                }
            }
        }
        candidates
    }

    /// The packs of which all candidates together would map a part that is too small. Nothing is read for them:
    /// otherwise data with one stored block in each window would be read in vain for each of its batches.
    fn planned_small_parts(&self, disk: u64, candidates: &[Candidate<'_>]) -> FxHashSet<u64> {
        if self.writeback.equal.maps_any_part() {
            return FxHashSet::default();
        }
        let mut parts = Vec::new();
        for candidate in candidates {
            let mut at = 0;
            while at < candidate.blocks.len() {
                let blocks = match self.plan(disk, candidate, at, candidate.blocks.len()) {
                    Ok(Equal::Blocks(found)) => {
                        parts.push((found.first, found.blocks));
                        found.blocks
                    }
                    Ok(Equal::Not(blocks)) => blocks,
                    Ok(Equal::Gone) | Err(_) => 1,
                };
                at += blocks as usize;
            }
        }
        small_parts(parts.into_iter())
    }

    /// Looks up where the blocks `at..end` of a candidate are stored.
    fn plan(&self, disk: u64, candidate: &Candidate<'_>, at: usize, end: usize) -> Result<Equal> {
        let hint = candidate.hint_at(at);
        let sums: Vec<u32> = candidate.blocks[at..end].iter().map(|block| block.sum).collect();
        let logical = candidate.logical + at as u64..candidate.logical + end as u64;
        self.meta.look(|meta| meta.plan_equal(disk, logical.clone(), (hint.disk, hint.logical), &sums))
    }

    /// Compares the first blocks of a candidate from `at` on. Returns for how many blocks the result is, and the run if
    /// they are equal to stored ones. Blocks that are known are not read again, and packs of which the part is too
    /// small are not read.
    fn compare<'d>(
        &self,
        disk: u64,
        candidate: &Candidate<'d>,
        at: usize,
        known: &mut KnownBlocks<'d>,
        is_small: &dyn Fn(u64) -> bool,
    ) -> Result<(u64, Option<EqualRun>)> {
        let blocks = &candidate.blocks[at..];
        let hint = candidate.hint_at(at);
        let start = candidate.logical + at as u64;
        let found = match self.plan(disk, candidate, at, candidate.blocks.len())? {
            Equal::Blocks(found) if found.first.packed.is_some() && is_small(found.first.physical) => {
                return Ok((found.blocks, None));
            }
            Equal::Blocks(found) => found,
            Equal::Not(blocks) => return Ok((blocks, None)),
            Equal::Gone => {
                self.writeback.equal.hints.lock().forget(hint, blocks[0].sum);
                return Ok((1, None));
            }
        };
        let first = found.first;
        let (count, again) = known.first_of(first, found.blocks);
        let (run, blocks) = (first.run(count), &blocks[..count as usize]);
        if !again && !known.may_read(run) {
            return Ok((count, None));
        }
        let watches: Vec<Watch> = {
            let mut meta = self.meta.lock();
            // The blocks of a pack are in use and free together.
            let watched = if first.packed.is_some() { 1 } else { run.blocks };
            (run.start..run.start + watched).map(|block| meta.in_flight.watch(block)).collect()
        };
        // Ends the watches if the function returns early.
        let mut watched = EqualRuns {
            engine: self,
            runs: vec![EqualRun {
                logical: start..start + count,
                checksums: blocks.iter().map(|block| block.sum).collect(),
                parts: parts_of(start, blocks),
                number: candidate.number,
                hint,
                stored: first,
                stored_sums: found.checksums[..run.blocks as usize].to_vec(),
                watches,
            }],
        };
        // From here on every change ends the watches.
        let equal = &mut watched.runs[0];
        let again_planned = self.plan(disk, candidate, at, at + count as usize)?;
        if !matches!(again_planned, Equal::Blocks(found) if equal.is_of(&found)) {
            return Ok((count, None));
        }
        if again {
            let is_equal = known.are_equal(first, &equal.watches, blocks.iter().map(|block| block.data));
            // What stays in `watched` is not watched any more.
            return Ok((count, if is_equal { watched.runs.pop() } else { None }));
        }
        known.note_read(run, &hint, count);
        let Some(stored) = self.read_stored(first, count, &equal.stored_sums)? else {
            self.forget_hints(equal);
            return Ok((count, None));
        };
        let each = || stored.chunks_exact(BLOCK_SIZE).zip(blocks);
        let same = each().take_while(|(stored, block)| *stored == block.data).count() as u64;
        if first.packed.is_some() {
            // The checksums of blocks in a pack are known only now.
            let wrong = each().enumerate().filter(|(_, (stored, block))| checksum(stored) != block.sum);
            self.forget(wrong.map(|(within, (_, block))| (candidate.hint_at(at + within), block.sum)));
            equal.shorten(same);
        } else if same < count {
            // Another content with the same checksum is rare: the other blocks of the run are not tried one by one.
            return Ok((count, None));
        }
        if same == 0 {
            return Ok((count, None));
        }
        self.allow_shared_writes(first)?;
        known.add(&hint, first, &equal.watches, blocks[..same as usize].iter().map(|block| block.data));
        Ok((count, watched.runs.pop()))
    }

    /// Forgets the hints of a run, so that later writes do not read or plan its blocks in vain again.
    pub(super) fn forget_hints(&self, equal: &EqualRun) {
        let hint = |logical| Hint { logical, ..equal.hint };
        self.forget((equal.hint.logical..).map(hint).zip(equal.checksums.iter().copied()));
    }

    fn forget(&self, wrong: impl Iterator<Item = (Hint, u32)>) {
        let mut hints = self.writeback.equal.hints.lock();
        wrong.for_each(|(hint, sum)| hints.forget(hint, sum));
    }

    /// Makes the datastore one whose writes may be mapped to such blocks in use.
    fn allow_shared_writes(&self, stored: Stored) -> Result<()> {
        let version = if stored.packed.is_some() { VERSION_WRITES_TO_PACKS } else { VERSION_SHARED_WRITES };
        let allowed = &self.writeback.equal.allowed;
        if allowed.load(Ordering::Acquire) < u64::from(version) {
            if self.log.version() < version {
                self.require_version(version)?;
            }
            allowed.fetch_max(u64::from(version), Ordering::AcqRel);
        }
        Ok(())
    }

    /// Looks for new data of these disks, each in a domain with a name, when it is written. None of them may be thick.
    /// The hints take at most `memory` bytes.
    pub fn share_writes(&self, disks: &[(u64, String)], memory: usize) {
        if disks.is_empty() {
            return;
        }
        let mut hints = self.writeback.equal.hints.lock();
        hints.resize(memory);
        disks.iter().for_each(|(disk, domain)| hints.join(*disk, domain));
        self.writeback.equal.any.store(true, Ordering::Release);
    }

    /// As [`Engine::share_writes`], for these disks and for no other disk. From the return on, no block of other disks
    /// is mapped, and they get none.
    pub fn share_writes_of(&self, disks: &[(u64, String)], memory: usize) {
        self.share_writes(disks, memory);
        let mut hints = self.writeback.equal.hints.lock();
        let wanted: FxHashSet<u64> = disks.iter().map(|(disk, _)| *disk).collect();
        hints.retain(|disk| wanted.contains(&disk));
        if hints.is_unused() {
            hints.clear();
            self.writeback.equal.any.store(false, Ordering::Release);
        }
        drop(hints);
        // A thread that has looked at the hints under this lock maps its blocks before it unlocks.
        drop(self.meta.lock());
    }

    /// Whether new data of any disk is looked for.
    pub fn looks_for_writes(&self) -> bool {
        self.writeback.equal.has_any()
    }

    /// The number of blocks of data that were not written since the datastore was opened, because they were stored
    /// already.
    pub fn shared_writes(&self) -> u64 {
        self.writeback.equal.mapped.load(Ordering::Relaxed)
    }
}

/// A block of new data.
#[derive(Clone, Copy)]
struct NewBlock<'a> {
    data: &'a [u8],
    sum: u32,
    stamp: u64,
}

/// Adjacent blocks of new data with hints for adjacent blocks of one disk.
struct Candidate<'a> {
    logical: u64,
    blocks: Vec<NewBlock<'a>>,
    number: u32,
    hint: Hint,
}

impl Candidate<'_> {
    fn hint_at(&self, at: usize) -> Hint {
        Hint { logical: self.hint.logical + at as u64, ..self.hint }
    }

    /// Whether a block is the next one, and its hint is for the next stored block.
    fn precedes(&self, logical: u64, hint: Hint) -> bool {
        let blocks = self.blocks.len() as u64;
        blocks < tree::EXTENT_BLOCKS_MAX
            && self.logical + blocks == logical
            && (self.hint.number, self.hint.logical + blocks) == (hint.number, hint.logical)
    }
}

/// The parts of adjacent blocks that belong to one write each, with its stamp.
fn parts_of(logical: u64, blocks: &[NewBlock<'_>]) -> Vec<(Range<u64>, u64)> {
    let mut at = logical;
    let of_one = blocks.chunk_by(|one, next| one.stamp == next.stamp);
    let part = |blocks: &[NewBlock<'_>]| {
        let range = at..at + blocks.len() as u64;
        at = range.end;
        (range, blocks[0].stamp)
    };
    of_one.map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Packed;

    #[test]
    fn parts_that_need_less_space_than_their_pack_are_left() {
        let part = |physical, index| Stored { physical, packed: Some(Packed { index, stored: 17 }) };
        let plain = Stored { physical: 300, packed: None };
        // Two parts of one pack count together, wherever they are.
        let runs = [(part(100, 0), 10), (part(200, 3), 16), (plain, 1), (part(100, 5), 7)];
        assert_eq!(small_parts(runs.into_iter()), [200].into_iter().collect());
    }
}
