//! Packing: compresses cold blocks of a disk or snapshot in the background.
//!
//! A step takes the plain blocks of a few adjacent logical blocks, writes a pack with their content to newly allocated
//! blocks, and then maps the pack in every leaf that mapped the plain blocks, with one operation ([`Operation::Pack`]).
//! Where leaves map shared blocks at other logical blocks, further operations do the same ([`Operation::SharePack`]).
//! The plain blocks are then free. The content of no disk or snapshot changes, so an interrupted or repeated pass loses
//! nothing. A pack with few blocks in use is replaced in the same way (`repack`).
//!
//! What must hold:
//!
//! 1. A pack is written once, whole, into newly allocated blocks, and is never overwritten: extents of packs count as
//!    shared ([`tree::lookup_exclusive`](crate::tree::lookup_exclusive)).
//! 2. From the plan to the end of the operation, the plain blocks are marked as in flight. So no other write of these
//!    blocks begins: new content goes to other blocks, and journalled payload waits. The operation is carried out only
//!    if all leaves still map the plain blocks, and no payload was journalled for them meanwhile.
//! 3. The content is verified against the checksums in the table before it is packed.
//! 4. The operation waits until the pack is durable, like an operation on any new block.
//! 5. While blocks are marked, the thread waits for nothing that may wait for a checkpoint, because a checkpoint waits
//!    for payload of marked blocks. So space is claimed before, and the marks are removed before the thread waits for
//!    room in the journal or for nodes.
//! 6. No block is packed that a buffered write may overwrite: such a write may have been acknowledged without a claim
//!    on a free block, because it would overwrite the block in place. So the buffers are locked during the operation.
//! 7. The superblock says that the datastore may have packs before the first pack is written, and only if there is
//!    content that is worth it: other programs refuse the datastore from then on. Because of 5 the superblock is not
//!    written while blocks are marked: the plan is carried out again afterwards.

mod elsewhere;
mod examined;
mod leaves;
mod places;
mod plan;
mod repack;

pub(crate) use examined::Examined;
pub use places::PackPass;

use super::Engine;
use super::locked_buffers::LockedBuffers;
use super::log::Cost;
use super::reserve::KEPT;
use crate::catalog::{ObjectState, Provisioning};
use crate::journal::Operation;
use crate::pack::{BLOCKS_MAX, NewFragment, assemble, fullest};
use crate::space::Run;
use crate::sync::atomic::Ordering;
use crate::{Error, ErrorKind, IoContext, Result, checksum, is_lost};
use backend::{BLOCK_SIZE, Buffer};
pub(super) use leaves::PlannedLeaves;
use places::Places;
use plan::{Plan, Planned};
pub(super) use plan::{Tree, Unsettled};
use std::ops::Range;

/// Blocks that are packed together. A read of one block reads the whole pack.
pub(super) const WINDOW: u64 = 32;
/// Blocks that are packed together if a leaf that several trees share has no room for more entries: an extent of any
/// length then becomes one entry. Also the logical blocks within which the blocks of one pack lie.
const WINDOW_WIDE: u64 = BLOCKS_MAX as u64;
/// The least blocks of a pack that ends before its window does, because it is fuller so.
const LEAST: u64 = WINDOW * 3 / 4;
/// A pack is written only if it takes at most this many of eight parts of the plain blocks.
const WORTH_EIGHTHS: u64 = 7;

/// The most blocks of a pack that is worth it for this many plain blocks.
pub(super) const fn most_worth(plain: u64) -> u64 {
    plain * WORTH_EIGHTHS / 8
}

/// What a step of packing has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackStep {
    /// Logical block with which the next step begins.
    pub next: u64,
    /// Blocks that were read.
    pub read: u64,
    /// Data blocks that became free: plain blocks that were packed, and the blocks of packs that were packed again.
    pub packed: u64,
    /// Data blocks in which their content is stored now.
    pub stored: u64,
    /// Logical blocks that were left, because a page of the map or of the table that describes them is lost.
    pub lost: u64,
}

/// What came of a plan.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tried {
    /// The pack ends before this block.
    Packed { end: u64 },
    /// Nothing was changed.
    Left,
    /// The reason that prevented it is gone: the blocks have to be planned again.
    Again,
}

/// The outcome of an attempt to write a pack.
enum Outcome {
    /// The pack is in the map: the blocks in which it is stored, those that became free, and the block after the last
    /// one of the pack.
    Packed { stored: u64, freed: u64, end: u64 },
    /// The content cannot be read, or changed meanwhile.
    Left,
    /// The content is not worth packing.
    NotWorth,
    /// The content is worth packing, but the superblock does not say yet that the datastore may have packs.
    NotAllowed,
    /// There was no room for an operation of this cost.
    Refused(Cost),
    /// There were not this many free nodes.
    Nodes(u64),
}

/// A pack that is written, and not in the map yet.
struct NewPack {
    run: Run,
    checksums: Vec<u32>,
    /// The operation waits until this many writes to the data files are durable.
    gate: u64,
}

impl Engine {
    /// Packs the next blocks of a disk or snapshot between `range.start` and `range.end`, or packs again those of a
    /// pack there. The caller repeats the call until `next` has reached the end of the range. Steps that look for the
    /// places of shared blocks leave `next` at the start of the range.
    ///
    /// # Errors
    /// `Unsupported` for a thick disk, because its writes must never need new space.
    pub fn pack_step(&self, object: u64, range: Range<u64>, pass: &mut PackPass) -> Result<PackStep> {
        let mut examined = self.packing.lock();
        self.check_running()?;
        self.pace()?;
        let thick = self.with_catalog(|catalog| {
            let object = catalog.whole(object)?;
            Ok::<_, Error>(object.state == ObjectState::Disk && object.provisioning != Provisioning::Thin)
        })?;
        if thick {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a thick disk is not compressed: its space is reserved so that its writes never need new space",
            ));
        }
        if let Some(step) = self.find_places(object, &range, &mut pass.places)? {
            return Ok(step);
        }
        match self.pack_next(object, range.clone(), pass, &mut examined) {
            // A lost page describes these blocks, or belongs to another tree that may share their leaf. Others can be
            // packed.
            Err(error) if is_lost(&error) && self.running.goes_on() => {
                let next = (range.start - range.start % WINDOW_WIDE + WINDOW_WIDE).min(range.end);
                tracing::debug!(%error, block = range.start, "blocks are not compressed");
                Ok(PackStep { next, lost: next - range.start, ..PackStep::default() })
            }
            step => step,
        }
    }

    /// Makes the step of [`Engine::pack_step`].
    fn pack_next(
        &self,
        object: u64,
        range: Range<u64>,
        pass: &mut PackPass,
        examined: &mut Examined,
    ) -> Result<PackStep> {
        let end = pass.places.end(object, range.start).map_or(range.end, |end| end.min(range.end));
        let range = range.start..end;
        let Some(first) = self.meta.look(|meta| meta.first_mapped(object, range.clone()))? else {
            return Ok(PackStep { next: range.end, ..PackStep::default() });
        };
        let (plan, next) = self.plan_next(object, first..range.end.max(first + 1), &pass.places)?;
        let mut step = PackStep { next, ..PackStep::default() };
        for old in self.meta.look(|meta| meta.packs_to_examine(object, first..next))? {
            let Planned::Pack(plan) = self.meta.look(|meta| meta.plan_repack(object, old, &pass.places))? else {
                continue;
            };
            match self.try_plan(object, &plan, pass, examined, &mut step)? {
                Tried::Left => {}
                Tried::Packed { .. } | Tried::Again => return Ok(PackStep { next: first, ..step }),
            }
        }
        let Some(plan) = plan else { return Ok(step) };
        step.next = match self.try_plan(object, &plan, pass, examined, &mut step)? {
            Tried::Left => next,
            // A pack around the first block may end before it.
            Tried::Packed { end } => end.max(first),
            Tried::Again => first,
        };
        Ok(step)
    }

    /// Plans a pack of the first blocks of a range. Returns it, and the block up to which the range was considered.
    fn plan_next(&self, object: u64, range: Range<u64>, places: &Places) -> Result<(Option<Box<Plan>>, u64)> {
        let plan = |window: Range<u64>| self.meta.look(|meta| meta.plan_pack(object, window.clone(), places, false));
        let upto = |blocks: u64| range.start..(range.start + blocks).min(range.end);
        let (near, far) = (upto(WINDOW), upto(WINDOW_WIDE));
        let planned = match plan(near.clone())? {
            Planned::Pack(plan) if plan.count() >= WINDOW => return Ok((Some(plan), near.end)),
            Planned::NoRoom => Planned::NoRoom,
            _ => plan(far.clone())?,
        };
        Ok(match planned {
            Planned::Nothing => (None, far.end),
            Planned::NoRoom => {
                let first = range.start - range.start % WINDOW_WIDE;
                let window = first..(first + WINDOW_WIDE).min(range.end);
                let end = window.end;
                match plan(window)? {
                    Planned::Pack(plan) => (Some(plan), end),
                    _ => (None, near.end),
                }
            }
            Planned::Pack(wide) => {
                // Without the places before the first block and after the last one that the pack gets.
                let window = wide.first(WINDOW);
                let end = window.end;
                match plan(window)? {
                    Planned::Pack(plan) => (Some(plan), end),
                    _ => (None, near.end),
                }
            }
        })
    }

    /// Carries out a plan, unless a pass has examined the same content before, and adds what was done to `step`.
    fn try_plan(
        &self,
        object: u64,
        plan: &Plan,
        pass: &mut PackPass,
        examined: &mut Examined,
        step: &mut PackStep,
    ) -> Result<Tried> {
        let key = Examined::key(pass.packer.codec(), &plan.checksums, plan.place());
        if examined.contains(key) {
            return Ok(Tried::Left);
        }
        step.read += plan.checksums.len() as u64;
        let mut outcome = self.pack_planned(object, plan, pass)?;
        if matches!(outcome, Outcome::NotAllowed) {
            self.require_version(plan.version())?;
            outcome = self.pack_planned(object, plan, pass)?;
        }
        match outcome {
            Outcome::NotAllowed => {}
            Outcome::Packed { stored, freed, end } => {
                self.bound_pending()?;
                step.packed += freed;
                step.stored += stored;
                return Ok(Tried::Packed { end });
            }
            Outcome::Left => return Ok(Tried::Left),
            Outcome::NotWorth => {
                examined.insert(key);
                return Ok(Tried::Left);
            }
            Outcome::Refused(cost) => self.make_room(cost)?,
            Outcome::Nodes(nodes) => self.make_spare(nodes, KEPT)?,
        }
        Ok(Tried::Again)
    }

    /// Marks the plain blocks of a plan as in flight, and writes the pack.
    fn pack_planned(&self, object: u64, plan: &Plan, pass: &mut PackPass) -> Result<Outcome> {
        let most = plan.most();
        let _claim = match self.claim_blocks(most) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                // The blocks that earlier steps have freed can be used once these steps are durable.
                self.commit_changes()?;
                self.claim_blocks(most)?
            }
            claim => claim?,
        };
        let allowed = self.log.version() >= plan.version();
        let _bulk = self.writeback.share_bulk();
        let _guard = {
            let mut meta = self.meta.lock();
            match meta.plan_again(object, plan, &pass.places, false)? {
                Planned::Pack(now) if *now == *plan => {}
                _ => return Ok(Outcome::Left),
            }
            plan.runs().for_each(|run| meta.in_flight.claim(run));
            meta.freed.guard()
        };
        let outcome = self.pack_claimed(object, plan, pass, allowed);
        let mut meta = self.meta.lock();
        plan.runs().for_each(|run| meta.in_flight.release(run));
        drop(meta);
        outcome
    }

    /// Writes the pack, if it is worth it and `allowed`, and maps it.
    fn pack_claimed(&self, object: u64, plan: &Plan, pass: &mut PackPass, allowed: bool) -> Result<Outcome> {
        let content = match plan.old {
            Some(old) => self.read_pack(plan, old)?,
            None => self.read_sources(plan)?.ok_or(Outcome::Left),
        };
        let content = match content {
            Ok(content) => content,
            Err(outcome) => return Ok(outcome),
        };
        let mut blocks: Vec<Option<&[u8]>> = vec![None; plan.blocks as usize];
        let mut parts = content.chunks_exact(BLOCK_SIZE);
        for source in &plan.sources {
            let first = usize::from(source.index);
            blocks[first..first + source.run.blocks as usize].fill_with(|| parts.next());
        }
        let mut fragments = pass.packer.fragments(&blocks);
        let shorter = self.end_where_full(object, plan, &fragments, &pass.places)?;
        let plan = shorter.as_deref().unwrap_or(plan);
        fragments.truncate(plan.blocks as usize);
        let pack = Buffer::copy_of(&assemble(&fragments));
        let stored = (pack.len() / BLOCK_SIZE) as u64;
        if stored > plan.most() || stored >= BLOCKS_MAX as u64 {
            return Ok(Outcome::NotWorth);
        }
        if !allowed {
            return Ok(Outcome::NotAllowed);
        }
        let run = {
            let _fetch = self.meta.bring_in(|meta| meta.survey_allocation_whole(stored));
            let mut meta = self.meta.lock();
            let Some(run) = self.allocate_whole(&mut meta, stored)? else { return Ok(Outcome::Left) };
            self.update_headroom(&meta);
            run
        };
        let located = self.files.locate(run);
        let (file, offset) = located.inspect_err(|_| self.release_new(&mut self.meta.lock(), Some(run)))?;
        file.write_at(&[&pack], offset, false)
            .during(|| format!("writing a pack of {} blocks", run.blocks))
            .map_err(|error| self.stop(error))?;
        self.files.touch(run);
        self.counters.blocks_written.fetch_add(run.blocks, Ordering::Relaxed);
        let gate = self.log.clocks.wrote_home();
        let checksums = pack.chunks_exact(BLOCK_SIZE).map(checksum).collect();
        self.map_pack(object, plan, &pass.places, NewPack { run, checksums, gate })
    }

    /// The plan for the first of these fragments, if the pack is fuller without the others.
    fn end_where_full(
        &self,
        object: u64,
        plan: &Plan,
        fragments: &[Option<NewFragment>],
        places: &Places,
    ) -> Result<Option<Box<Plan>>> {
        let blocks = fullest(fragments, LEAST as usize) as u64;
        if plan.old.is_some() || plan.count() > WINDOW || blocks >= plan.blocks {
            return Ok(None);
        }
        let window = plan.logical..plan.logical + blocks;
        let planned = self.meta.look(|meta| meta.plan_pack(object, window.clone(), places, true))?;
        Ok(match planned {
            Planned::Pack(shorter) if shorter.begins(plan) => Some(shorter),
            _ => None,
        })
    }

    /// Maps the written pack, unless the plan is no longer valid.
    fn map_pack(&self, object: u64, plan: &Plan, places: &Places, new: NewPack) -> Result<Outcome> {
        let NewPack { run, checksums, gate } = new;
        let others = plan.others.parts.iter().map(|part| part.operation(run, &checksums)).collect::<Vec<_>>();
        let operation = Operation::Pack {
            logical: plan.logical,
            blocks: plan.blocks,
            run,
            checksums,
            sources: plan.sources.clone(),
            objects: plan.objects.clone(),
        };
        let all = || std::iter::once(&operation).chain(&others);
        let _fetch = self.meta.bring_in(|meta| all().for_each(|operation| meta.survey_operation(operation)));
        let mut disks: Vec<u64> = plan.changed().map(|(disk, _)| disk).collect();
        disks.sort_unstable();
        disks.dedup();
        let heads = self.buffers.of_disks(&disks);
        let buffers = LockedBuffers::lock(&heads);
        let mut meta = self.meta.lock();
        let is_current = buffers.are_current(&self.buffers, &disks);
        if !is_current || !plan.changed().all(|(disk, window)| buffers.is_free(disk, &window)) {
            self.release_new(&mut meta, Some(run));
            return Ok(Outcome::Left);
        }
        let checked = meta.plan_again(object, plan, places, true).and_then(|now| {
            let still = matches!(now, Planned::Pack(now) if *now == *plan);
            let nodes = meta.nodes_of(&operation)? * (1 + plan.others.splits);
            Ok((still, nodes, meta.cost_of_pack(all(), plan.leaves(), plan.others.splits)))
        });
        let (still, nodes, cost) = checked.inspect_err(|_| self.release_new(&mut meta, Some(run)))?;
        if !still || !self.are_spare(&meta, nodes, KEPT) {
            self.release_new(&mut meta, Some(run));
            return Ok(if still { Outcome::Nodes(nodes) } else { Outcome::Left });
        }
        let Some(_grant) = self.log.admission.try_admit(cost) else {
            self.release_new(&mut meta, Some(run));
            return Ok(Outcome::Refused(cost));
        };
        self.carry_out_new(&mut meta, operation, gate)?;
        // The operation that maps the pack at its own blocks precedes these in the journal, and waits for its gate.
        let carried_out = others.into_iter().try_for_each(|other| self.carry_out(&mut meta, other, 0));
        self.update_headroom(&meta);
        carried_out.map(|()| Outcome::Packed { stored: run.blocks, freed: plan.frees(), end: plan.window().end })
    }

    /// Reads and verifies the plain blocks of a plan. `None` if a block is damaged: it stays where it is, so that reads
    /// and checks report it.
    fn read_sources(&self, plan: &Plan) -> Result<Option<Buffer>> {
        let mut content = Buffer::recycled(plan.count() as usize);
        let mut at = 0;
        for run in plan.runs() {
            let (file, offset) = self.files.locate(run)?;
            let end = at + run.blocks as usize * BLOCK_SIZE;
            if let Err(error) = file.read_at(&mut content[at..end], offset) {
                tracing::warn!(%error, block = run.start, "blocks are not compressed, because they cannot be read");
                return Ok(None);
            }
            at = end;
        }
        let matches = content.chunks_exact(BLOCK_SIZE).map(checksum).eq(plan.checksums.iter().copied());
        Ok(matches.then_some(content))
    }

    /// Gives the datastore at least this version, because it is about to use what earlier versions do not know. Must
    /// not be called during a checkpoint.
    pub(super) fn require_version(&self, version: u32) -> Result<()> {
        let _checkpoints = self.log.lock_checkpoints();
        self.check_owner()?;
        self.log.raise_version(version).map_err(|error| self.stop(error))
    }
}

#[cfg(test)]
impl Engine {
    /// The number of packs in a window that would be packed again, if `between` happens after the look at the packs.
    pub fn count_repacks(&self, object: u64, window: Range<u64>, pass: &PackPass, between: impl FnOnce()) -> usize {
        let packs = self.meta.lock().packs_to_examine(object, window).unwrap();
        between();
        let mut meta = self.meta.lock();
        let mut plan = |old| meta.plan_repack(object, old, &pass.places).unwrap();
        packs.into_iter().filter(|old| matches!(plan(*old), Planned::Pack(_))).count()
    }
}
