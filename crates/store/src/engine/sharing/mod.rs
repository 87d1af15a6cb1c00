//! Sharing: deduplicates cold blocks of disks and snapshots in the background.
//!
//! A pass collects the checksums of blocks ([`scan`], [`prints`]), and pairs blocks with equal checksums. For a run of
//! pairs both sides are read and compared. Blocks that differ are paired again by a second hash ([`unequal`]). Then one
//! operation ([`Operation::Share`](crate::journal::Operation::Share), or `SharePack` if the kept blocks are in a pack)
//! maps the kept blocks in every leaf that mapped the duplicates, which are then free. A pack is free when no entry
//! maps any of its blocks. The content of no disk or snapshot changes, so an interrupted or repeated pass loses
//! nothing. A pass needs no index that remains: what it remembers is only a hint, and may be out of date.
//!
//! What must hold:
//!
//! 1. A block replaces another one only if both have been read, match their checksums, and are equal byte for byte.
//! 2. From the plan to the end of the operation, the plain blocks of both sides are marked as in flight. So no other
//!    write of these blocks begins, and journalled payload waits. The operation is carried out only if the leaves still
//!    map the blocks, and no payload was journalled for them meanwhile.
//! 3. The operation waits until all writes to the data files that have ended are durable: the kept blocks may have been
//!    overwritten in place, and no pending operation tells of such a write. Writes of journalled payload count too: a
//!    repair may leave the payload out, because the map of the disk that wrote it is lost.
//! 4. From the operation on, the kept block has several references, so it is not overwritten in place. If it loses all
//!    but one of them again, an operation that is pending takes them, and holds the block until it is durable. The
//!    share precedes it in the journal. So the last owner overwrites the block only when recovery would find one owner
//!    too.
//! 5. While blocks are marked, the thread waits for nothing that may wait for a checkpoint, as in [`super::packing`].
//! 6. No block of either side is one that a buffered write may overwrite: such a write may have been acknowledged
//!    without a claim on a free block, because it would overwrite the block in place. So the buffers are locked during
//!    the operation. The kept block of several owners needs no such check, because writes of shared blocks have claims.
//! 7. The superblock says that the datastore may have shared blocks before the first operation.

mod hints;
mod plan;
mod prints;
mod runs;
mod scan;
mod stored;
mod unequal;
mod written;

use super::Engine;
use super::locked_buffers::LockedBuffers;
use super::log::{Cost, VERSION_SHARED_PACKS, VERSION_SHARES};
use super::metadata::{PART_BLOCKS, PartOfLeaf};
use super::reserve::KEPT;
use crate::tree;
use crate::{Result, is_lost};
use backend::BLOCK_SIZE;
pub use hints::HINT_BYTES;
pub(super) use hints::{Hint, Hints};
pub(super) use plan::Stored;
use plan::{Plan, Planned};
pub(super) use prints::KEPT_REFERENCES_MAX;
use prints::{Print, Prints, SUMS};
use runs::{Replacement, Runs, WithinEntry};
use rustc_hash::{FxHashMap, FxHashSet};
#[cfg(test)]
pub use unequal::HASHED_MAX;
use unequal::Unequal;
pub(super) use written::{Equal, EqualBlocks};

/// The most blocks that are shared in one step (1 MiB).
const PAIR_BLOCKS: u64 = tree::EXTENT_BLOCKS_MAX;
/// How often blocks that have equal hashes, and that the kept ones cannot replace, are grouped again before a pass
/// leaves them. The kept one may have too many references, or may have changed. The limit bounds the time of a pass.
const REGROUPED_MAX: u32 = 16;
/// Memory for a print in bytes: the print itself, which print is kept instead, and its places in two lists.
pub const PRINT_BYTES: usize = 36;
/// The prints that a pass keeps in memory unless another limit is given: 144 MiB, for 16 GiB of data in a round.
pub const PRINTS_MAX: usize = 4 << 20;
/// The lowest limit of prints. A quarter of them are those that are kept when too many blocks have the same checksum,
/// and a step of a scan must have room beside these.
pub const PRINTS_MIN: usize = 4 * PART_BLOCKS as usize;

/// What a step of a pass has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareStep {
    /// Blocks that were read.
    pub read: u64,
    /// Blocks that are no longer mapped where they were, because others with the same content are mapped there.
    pub shared: u64,
    /// Data blocks that became free. A block that is mapped at several places, and a pack, is free once none is left.
    pub freed: u64,
    /// Logical blocks that were left, because a page of the map or of the table that describes them is lost.
    pub lost: u64,
    /// Whether the pass has ended.
    pub ended: bool,
}

/// Consecutive blocks with the same checksums as other ones.
#[derive(Clone, Copy)]
pub(super) struct Pair {
    /// The object that maps the duplicates.
    pub object: u64,
    /// First logical block of the duplicates.
    pub logical: u64,
    /// The object that maps the kept blocks, and the first logical block of them.
    pub kept: (u64, u64),
    /// The checksum of the first block.
    pub sum: u32,
    pub blocks: u64,
}

/// What a pass does next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Collects prints.
    Scan,
    /// Shares the blocks of the pairs. If the scan was interrupted, because there was no room, it goes on afterwards.
    Share {
        interrupted: bool,
    },
    Ended,
}

/// A pass over disks and snapshots that finds blocks with the same content.
pub struct SharePass {
    /// The ids of the objects, and the ends of their logical blocks.
    objects: Vec<(u64, u64)>,
    prints: Prints,
    phase: Phase,
    /// The object and the logical block at which the scan continues.
    at: (usize, u64),
    /// Parts of leaves that several trees share, and that were scanned: the leaf, and the number of the step within it.
    seen: FxHashSet<PartOfLeaf>,
    /// For each print the one that is kept instead.
    kept: Vec<Option<u32>>,
    /// The prints of duplicates that are to be replaced.
    queue: Vec<u32>,
    /// The place in the queue.
    next: usize,
    /// Duplicates that the kept block cannot replace.
    not_kept: Vec<u32>,
    /// The prints that are kept beside others with the same checksum.
    several: Vec<u32>,
    /// Duplicates that have other content than the kept block, how often such ones were collected, and how often those
    /// of the current chunk were grouped again.
    unequal: Unequal,
    collected: u32,
    regrouped: u32,
    /// Duplicates in leaves that have no room for an entry for each of them.
    runs: Runs,
    /// Duplicates that wait for pending operations, and whether a block was shared since the last of these waits.
    held: Vec<u32>,
    progress: bool,
    /// The highest position so far: a queue that is filled again begins at its beginning.
    reached: u64,
}

impl SharePass {
    /// A pass over these objects, with the ends of their logical blocks. It keeps at most `prints` prints in memory,
    /// see [`PRINTS_MAX`]. A limit outside [`PRINTS_MIN`] and 2^32 becomes the nearest one within.
    pub fn new(objects: Vec<(u64, u64)>, prints: usize) -> Self {
        let prints = Prints::new(prints.clamp(PRINTS_MIN, u32::MAX as usize));
        let (seen, kept, queue, not_kept, several, unequal, runs, held) = Default::default();
        let phase = Phase::Scan;
        Self {
            objects,
            prints,
            phase,
            at: (0, 0),
            seen,
            kept,
            queue,
            next: 0,
            not_kept,
            several,
            unequal,
            collected: 0,
            regrouped: 0,
            runs,
            held,
            progress: false,
            reached: 0,
        }
    }

    /// How much of the pass is done, in parts of [`SharePass::PARTS`]. Never decreases.
    pub fn position(&self) -> u64 {
        self.reached
    }

    /// Whether blocks are read to group them.
    #[cfg(test)]
    pub(super) fn is_grouping(&self) -> bool {
        self.unequal.is_reading()
    }

    fn note_position(&mut self) {
        let range = self.prints.range();
        let part = |done: usize, of: usize| done as u64 * 1000 / of.max(1) as u64;
        let within = match self.phase {
            Phase::Scan => part(self.at.0, self.objects.len()) / 2,
            Phase::Share { .. } => 500 + part(self.next, self.queue.len()) / 2,
            Phase::Ended => 1000,
        };
        let now = (range.start + (range.end - range.start) / 1000 * within) >> 12;
        self.reached = self.reached.max(if self.phase == Phase::Ended { Self::PARTS } else { now });
    }

    /// See [`SharePass::position`].
    pub const PARTS: u64 = SUMS >> 12;

    fn begin_sharing(&mut self, interrupted: bool) {
        (self.kept, self.several) = self.prints.kept();
        self.enqueue_pairs(&(0..self.kept.len() as u32).collect::<Vec<u32>>());
        self.progress = false;
        self.collected = 0;
        self.phase = Phase::Share { interrupted };
    }

    /// Begins with those of the prints, in this order, instead of which others are kept.
    fn enqueue_pairs(&mut self, indexes: &[u32]) {
        self.queue.clear();
        self.queue.extend(indexes.iter().filter(|index| self.kept[**index as usize].is_some()));
        self.next = 0;
    }

    /// Begins with those of these prints instead of which another one with the same hash is kept.
    fn group_by_hash(&mut self, mut indexes: Vec<u32>) {
        // A sort looks up each hash many times.
        let hashes: FxHashMap<u32, u64> =
            indexes.iter().filter_map(|index| Some((*index, self.unequal.hash_of(*index)?))).collect();
        self.prints.assign(&mut indexes, &mut self.kept, |index| hashes.get(&index).copied().unwrap_or_default());
        indexes.sort_unstable();
        self.enqueue_pairs(&indexes);
    }

    /// The next pair: as many adjacent blocks as possible. `None` at the end of the queue.
    fn pair(&self) -> Option<Pair> {
        let kept_of = |index: u32| Some(self.prints.get(self.kept[index as usize]?));
        let queue = self.queue.get(self.next..)?;
        let (print, kept) = (self.prints.get(*queue.first()?), kept_of(*queue.first()?)?);
        let joins = |two: &&[u32]| {
            let (Some(kept), Some(next)) = (kept_of(two[0]), kept_of(two[1])) else { return false };
            kept.precedes(&next) && self.prints.get(two[0]).precedes(&self.prints.get(two[1]))
        };
        let blocks = 1 + queue.windows(2).take(PAIR_BLOCKS as usize - 1).take_while(joins).count() as u64;
        let id = |print: Print| self.objects[print.object as usize].0;
        Some(Pair {
            object: id(print),
            logical: print.logical(),
            kept: (id(kept), kept.logical()),
            sum: print.sum,
            blocks,
        })
    }

    /// The pair of runs that is to be shared next, after the queue has ended.
    fn pair_of_runs(&mut self) -> Option<Pair> {
        let Replacement { kept, run } = self.runs.next(|index| self.prints.get(index).sum)?;
        let place = |index: u32| {
            let print = self.prints.get(index);
            (self.objects[print.object as usize].0, print.logical())
        };
        let ((object, logical), kept_at) = (place(run.first), place(kept.first));
        let blocks = u64::from(run.blocks.min(kept.blocks));
        Some(Pair { object, logical, kept: kept_at, sum: self.prints.get(run.first).sum, blocks })
    }

    /// Notes the repetition in an entry around the first block of the queue. Returns how many blocks of the queue are
    /// in it.
    fn note_run(&mut self, entry: WithinEntry) -> u64 {
        let index = self.queue[self.next];
        let run = self.prints.repeated(index, entry);
        self.runs.add(run);
        let within = |index: &&u32| (run.first..run.first + run.blocks).contains(*index);
        self.queue[self.next..].iter().take_while(within).count().max(1) as u64
    }

    /// Notes that the first blocks of the queue were shared.
    fn note_shared(&mut self, blocks: u64) {
        self.progress = true;
        for index in self.queue[self.next..].iter().take(blocks as usize) {
            if let Some(kept) = self.kept[*index as usize] {
                self.prints.note_shared(kept, *index);
            }
        }
    }

    /// Called at the end of the queue. Returns whether pending operations have to be made durable first.
    fn refill(&mut self) -> bool {
        let (known, unequal): (Vec<u32>, Vec<u32>) =
            std::mem::take(&mut self.not_kept).into_iter().partition(|index| self.unequal.hash_of(*index).is_some());
        let sum_of = |index: u32| self.prints.get(index).sum;
        if !unequal.is_empty() && self.collected < REGROUPED_MAX {
            self.collected += 1;
            self.unequal.add(unequal, std::mem::take(&mut self.several), sum_of);
        }
        if !known.is_empty() && self.regrouped < REGROUPED_MAX {
            self.regrouped += 1;
            self.group_by_hash(known);
            return false;
        }
        if self.unequal.begin_chunk(sum_of) {
            self.regrouped = 0;
            self.enqueue_pairs(&[]);
            return false;
        }
        if !self.held.is_empty() && std::mem::take(&mut self.progress) {
            let indexes = std::mem::take(&mut self.held);
            self.enqueue_pairs(&indexes);
            return true;
        }
        self.held.clear();
        let interrupted = self.phase == Phase::Share { interrupted: true };
        self.phase = Phase::Scan;
        if interrupted {
            self.prints.retain_kept(&self.kept);
        } else {
            self.seen.clear();
            self.at = (0, 0);
            if !self.prints.next_round() {
                self.phase = Phase::Ended;
            }
        }
        false
    }
}

/// The outcome of an attempt to share the first blocks of a pair. The numbers are those of the blocks.
enum Outcome {
    Shared {
        blocks: u64,
        freed: u64,
    },
    /// The duplicates stay.
    Left(u64),
    /// The first kept block cannot replace the duplicate.
    NotKept,
    /// A pending operation concerns the first block.
    Held,
    /// A leaf has no room for an entry for the first block.
    NoRoom,
    /// Only so many blocks can be shared at once.
    Shorter(u64),
    /// There was no room for an operation of this cost.
    Refused(Cost),
    /// There were not this many free nodes.
    Nodes(u64),
}

impl Engine {
    /// Makes the next step of a pass. The caller repeats the call until the pass has ended.
    ///
    /// # Errors
    /// Every error ends the pass; what was shared stays shared.
    pub fn share_step(&self, pass: &mut SharePass) -> Result<ShareStep> {
        let _one = self.packing.lock();
        self.check_running()?;
        self.pace()?;
        let step = match pass.phase {
            Phase::Scan => self.scan_next(pass),
            Phase::Share { .. } => self.share_next(pass),
            Phase::Ended => Ok(ShareStep { ended: true, ..ShareStep::default() }),
        };
        pass.note_position();
        step
    }

    /// Shares the blocks of the next pair.
    fn share_next(&self, pass: &mut SharePass) -> Result<ShareStep> {
        let Some(mut pair) = pass.pair() else {
            if let Some(pair) = pass.pair_of_runs() {
                return self.share_run(pass, pair);
            }
            if pass.unequal.is_reading() {
                return self.hash_next(pass);
            }
            if pass.refill() {
                self.commit_changes()?;
            }
            return Ok(ShareStep { ended: pass.phase == Phase::Ended, ..ShareStep::default() });
        };
        let mut step = ShareStep::default();
        let done = loop {
            let outcome = match self.share_pair(&pair, &mut step.read) {
                // Other pairs can be shared.
                Err(error) if is_lost(&error) && self.running.goes_on() => {
                    tracing::debug!(%error, block = pair.logical, "equal blocks are not shared");
                    step.lost = pair.blocks;
                    Outcome::Left(pair.blocks)
                }
                outcome => outcome?,
            };
            match outcome {
                Outcome::Shorter(blocks) => pair.blocks = blocks,
                Outcome::Shared { blocks, freed } => {
                    pass.note_shared(blocks);
                    (step.shared, step.freed) = (blocks, freed);
                    self.bound_pending()?;
                    break blocks;
                }
                Outcome::Left(blocks) => break blocks,
                Outcome::NoRoom => break self.note_run(pass, &pair)?,
                Outcome::NotKept => {
                    pass.not_kept.push(pass.queue[pass.next]);
                    break 1;
                }
                Outcome::Held => {
                    pass.held.push(pass.queue[pass.next]);
                    break 1;
                }
                Outcome::Refused(cost) => {
                    self.make_room(cost)?;
                    break 0;
                }
                Outcome::Nodes(nodes) => {
                    self.make_spare(nodes, KEPT)?;
                    break 0;
                }
            }
        };
        pass.next += done as usize;
        Ok(step)
    }

    /// Notes that the first block of a pair has no room for an entry of its own. Returns how many blocks of the queue
    /// belong to the same entry and have the same checksum.
    fn note_run(&self, pass: &mut SharePass, pair: &Pair) -> Result<u64> {
        if pass.prints.repeated(pass.queue[pass.next], WithinEntry::LONGEST).blocks == 1 {
            return Ok(1);
        }
        match self.meta.look(|meta| meta.entry_around(pair)) {
            Err(error) if is_lost(&error) && self.running.goes_on() => Ok(1),
            entry => Ok(pass.note_run(entry?)),
        }
    }

    /// Shares a run of duplicates with another run that has the same content.
    fn share_run(&self, pass: &mut SharePass, mut pair: Pair) -> Result<ShareStep> {
        let mut step = ShareStep::default();
        loop {
            match self.share_pair(&pair, &mut step.read) {
                Err(error) if is_lost(&error) && self.running.goes_on() => {
                    tracing::debug!(%error, block = pair.logical, "equal blocks are not shared");
                    step.lost = pair.blocks;
                    pass.runs.pass();
                }
                outcome => match outcome? {
                    Outcome::Shorter(blocks) => {
                        pair.blocks = blocks;
                        continue;
                    }
                    Outcome::Shared { blocks, freed } => {
                        pass.progress = true;
                        (step.shared, step.freed) = (blocks, freed);
                        pass.runs.pass();
                        self.bound_pending()?;
                    }
                    Outcome::NotKept => pass.runs.keep(),
                    Outcome::Left(_) | Outcome::Held | Outcome::NoRoom => pass.runs.pass(),
                    // The same pair is next.
                    Outcome::Refused(cost) => self.make_room(cost)?,
                    Outcome::Nodes(nodes) => self.make_spare(nodes, KEPT)?,
                },
            }
            return Ok(step);
        }
    }

    /// Marks the plain blocks of both sides as in flight, and shares them.
    fn share_pair(&self, pair: &Pair, read: &mut u64) -> Result<Outcome> {
        let plan = match self.meta.look(|meta| meta.plan_share(pair, false))? {
            Planned::Share(plan) => plan,
            Planned::Same(blocks) | Planned::Left(blocks) => return Ok(Outcome::Left(blocks)),
            Planned::Shorter(blocks) => return Ok(Outcome::Shorter(blocks)),
            Planned::NotKept => return Ok(Outcome::NotKept),
            Planned::Held => return Ok(Outcome::Held),
            Planned::NoRoom => return Ok(Outcome::NoRoom),
        };
        let pair = &Pair { blocks: plan.blocks, ..*pair };
        let version = if plan.kept.packed.is_some() { VERSION_SHARED_PACKS } else { VERSION_SHARES };
        if self.log.version() < version {
            self.require_version(version)?;
        }
        let _guard = {
            let mut meta = self.meta.lock();
            match meta.plan_share(pair, false)? {
                Planned::Share(now) if now == plan => {}
                _ => return Ok(Outcome::Left(plan.blocks)),
            }
            plan.plain().for_each(|run| meta.in_flight.claim(run));
            meta.freed.guard()
        };
        let outcome = self.share_claimed(pair, &plan, read);
        let mut meta = self.meta.lock();
        plan.plain().for_each(|run| meta.in_flight.release(run));
        drop(meta);
        outcome
    }

    /// Compares the blocks, and carries out the operation.
    fn share_claimed(&self, pair: &Pair, plan: &Plan, read: &mut u64) -> Result<Outcome> {
        let blocks = plan.blocks;
        let runs = plan.runs();
        *read += runs.iter().map(|run| run.blocks).sum::<u64>();
        let sides = [plan.from, plan.kept].into_iter().zip(&plan.checksums);
        let mut contents = Vec::new();
        for (side, checksums) in sides {
            contents.extend(self.read_stored(side, blocks, checksums)?);
        }
        let [duplicates, kept] = contents.as_slice() else {
            // The blocks are compared one by one, because others than the damaged one can be shared.
            return Ok(if blocks > 1 { Outcome::Shorter(blocks / 2) } else { Outcome::NotKept });
        };
        let each = kept.chunks_exact(BLOCK_SIZE).zip(duplicates.chunks_exact(BLOCK_SIZE));
        match each.take_while(|(kept, duplicate)| kept == duplicate).count() as u64 {
            equal if equal == blocks => self.map_shared(pair, plan),
            0 => Ok(Outcome::NotKept),
            equal => Ok(Outcome::Shorter(equal)),
        }
    }

    /// Maps the kept blocks instead of the duplicates, unless the plan is no longer valid.
    fn map_shared(&self, pair: &Pair, plan: &Plan) -> Result<Outcome> {
        let operation = plan.operation();
        let _fetch = self.meta.bring_in(|meta| meta.survey_operation(&operation));
        let mut disks = plan.objects.clone();
        disks.push(pair.kept.0);
        disks.sort_unstable();
        disks.dedup();
        let heads = self.buffers.of_disks(&disks);
        let buffers = LockedBuffers::lock(&heads);
        let of_kept = pair.kept.1..pair.kept.1 + plan.blocks;
        let of_duplicates = plan.logical..plan.logical + plan.blocks;
        let are_free = plan.objects.iter().all(|object| buffers.is_free(*object, &of_duplicates));
        if !buffers.is_free(pair.kept.0, &of_kept) || !are_free {
            return Ok(Outcome::Left(plan.blocks));
        }
        let mut meta = self.meta.lock();
        if !buffers.are_current(&self.buffers, &disks) {
            return Ok(Outcome::Left(plan.blocks));
        }
        let still = matches!(meta.plan_share(pair, true)?, Planned::Share(now) if now == *plan);
        let nodes = meta.nodes_of(&operation)?;
        if !still {
            return Ok(Outcome::Left(plan.blocks));
        }
        if !self.are_spare(&meta, nodes, KEPT) {
            return Ok(Outcome::Nodes(nodes));
        }
        // Journalled payload of plain kept blocks may have been written to them, and such a write is not counted. The
        // operation that mapped a pack precedes this one in the journal.
        let gate = if plan.kept.packed.is_some() { 0 } else { self.log.clocks.wrote_home() };
        let used = meta.data.counts().used;
        let refused = self.try_carry_out(&mut meta, operation, gate)?;
        self.update_headroom(&meta);
        Ok(match refused {
            None => Outcome::Shared { blocks: plan.blocks, freed: used.saturating_sub(meta.data.counts().used) },
            Some(cost) => Outcome::Refused(cost),
        })
    }
}
