//! What changes cost, and waiting for room to make them.

use super::admission::{Cost, Grant};
use super::apply::Effects;
use super::checkpoint::Purpose;
use super::{Engine, Meta};
use crate::journal::{Journal, Operation};
use crate::space::{REGION_PAGES, Run, SUMMARY_ENTRIES, TABLE_ENTRIES};
use crate::sync::atomic::Ordering;
use crate::tree;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::time::Duration;

/// Pages that one step of a long change dirties, about: a step holds the metadata lock, and others wait that long.
pub(super) const STEP_PAGES: u64 = 128;
/// What every operation may dirty beside what it is about: the catalog's page of its disk and summaries.
const PAGES_BESIDE: u64 = 3;
/// Pages that dropping one leaf dirties: entries of all its extents, counts of its node, the parent.
const PAGES_PER_DROPPED_LEAF: u64 = 2 * 254 + 4;
/// Nodes above a leaf, and what every operation may dirty beside.
const PAGES_ON_PATH: u64 = tree::LEVELS_MAX as u64 + PAGES_BESIDE;
/// What an append takes beside its operations: the head of the batch, padding, and a second batch where the first is
/// cut.
pub(super) const APPEND_BYTES: u64 = 4 * backend::BLOCK_SIZE as u64;
/// How long those who wait for room sleep until they look again by themselves.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Checkpoints that one thread makes for one piece of work: two bring any journal down to nothing.
const CHECKPOINTS_MAX: u32 = 64;

/// The free blocks that an operation takes into the map.
fn new_run(operation: &Operation) -> Option<Run> {
    match operation {
        Operation::Map { run, .. } | Operation::MapData { run, .. } => Some(*run),
        Operation::Unwritten { run, fresh: true, .. } => Some(*run),
        _ => None,
    }
}

/// What the changes of one step touch at most: pages that several of them change count once as far as the changes come
/// in ascending order.
#[derive(Default)]
pub(super) struct Touched {
    seen: tree::Seen,
    nodes: u64,
    tables: u64,
    /// The page of the data table that counted last.
    last: Option<u64>,
}

impl Touched {
    /// Adds a change of what the data table says of a run.
    pub fn touch_run(&mut self, run: Run) {
        let (first, last) = (run.start / TABLE_ENTRIES, (run.start + run.blocks.max(1) - 1) / TABLE_ENTRIES);
        self.tables += last - first + 1 - u64::from(self.last == Some(first));
        self.last = Some(last);
    }
}

/// Pages of the data table that describe a run.
pub(super) fn table_pages(run: Run) -> u64 {
    (run.start + run.blocks.max(1) - 1) / TABLE_ENTRIES - run.start / TABLE_ENTRIES + 1
}

/// The cost of a batch of so many bytes that is appended at once.
pub(super) fn batch_bytes(body: usize) -> u64 {
    Journal::footprint(body)
}

impl Meta {
    /// Pages that the next checkpoint would write.
    fn dirty_pages(&self) -> u64 {
        let summaries = |regions: u64| regions / SUMMARY_ENTRIES + 1;
        self.pages.dirty() as u64
            + self.catalog.changed()
            + self.data.changed_regions().min(summaries(self.data.regions()))
            + self.map.changed_regions().min(summaries(self.map.regions()))
    }

    /// Pages of all tables and summaries.
    fn tables(&self) -> u64 {
        let regions = self.data.regions() + self.map.regions();
        regions * REGION_PAGES + regions / SUMMARY_ENTRIES + 2
    }

    /// How far a change of what a disk maps may go to dirty about `most` pages, at least one leaf of its map; and how
    /// many pages that dirties at most.
    pub(super) fn reach(&mut self, disk: u64, range: Range<u64>, unmap: bool, most: u64) -> Result<(u64, u64)> {
        let mut touched = Touched::default();
        let end = self.touch(disk, range, unmap, most, &mut touched)?;
        Ok((end, self.pages_of(&touched)))
    }

    /// Adds a change of what a disk maps to those of the same step; where it has to end, as [`Meta::reach`] says.
    fn touch(&mut self, disk: u64, range: Range<u64>, unmap: bool, most: u64, touched: &mut Touched) -> Result<u64> {
        let Some(root) = self.catalog.get(disk)?.root else { return Ok(range.end) };
        let (mut effects, seen) = (Effects::default(), &mut touched.seen);
        let reach = tree::reach(&mut self.nodes(&mut effects), root, range, unmap, TABLE_ENTRIES, most, seen)?;
        touched.nodes += reach.nodes;
        touched.tables += reach.tables;
        Ok(reach.end)
    }

    /// Adds mapping a range to a run.
    pub(super) fn touch_mapping(&mut self, disk: u64, logical: u64, run: Run, touched: &mut Touched) -> Result<()> {
        self.touch(disk, logical..logical + run.blocks, false, u64::MAX, touched)?;
        touched.touch_run(run);
        Ok(())
    }

    /// How many pages these changes dirty at most.
    pub(super) fn pages_of(&self, touched: &Touched) -> u64 {
        let summaries = touched.tables.min(self.tables() / REGION_PAGES / SUMMARY_ENTRIES + 2);
        touched.nodes + (touched.tables + summaries).min(self.tables()) + PAGES_BESIDE
    }

    /// What an operation costs at most, its place in a batch included.
    pub(super) fn cost(&mut self, operation: &Operation) -> Result<Cost> {
        let pages = match operation {
            Operation::Map { disk, logical, run, .. }
            | Operation::MapData { disk, logical, run, .. }
            | Operation::Unwritten { disk, logical, run, .. }
            | Operation::Written { disk, logical, run, .. } => {
                let mut touched = Touched::default();
                self.touch_mapping(*disk, *logical, *run, &mut touched)?;
                self.pages_of(&touched)
            }
            Operation::Unmap { disk, logical, blocks } => {
                self.reach(*disk, *logical..*logical + *blocks, true, u64::MAX)?.1
            }
            Operation::Overwrite { run, .. }
            | Operation::OverwriteData { run, .. }
            | Operation::Checksums { run, .. }
            | Operation::Announce { run }
            | Operation::Backed { run, .. } => table_pages(*run) + PAGES_BESIDE,
            Operation::Drop { steps, .. } => {
                (u64::from(*steps) * PAGES_PER_DROPPED_LEAF).min(self.tables() + PAGES_ON_PATH)
            }
            Operation::Resolve { .. } | Operation::Synced { .. } => PAGES_BESIDE,
            Operation::Put { .. }
            | Operation::Seal { .. }
            | Operation::Clone { .. }
            | Operation::Revert { .. }
            | Operation::Trash { .. } => 2 * PAGES_BESIDE,
        };
        Ok(Cost { bytes: operation.size() as u64, pages })
    }
}

impl Engine {
    /// Tells admission what has changed. Under the metadata lock, after each change.
    pub(super) fn count_changes(&self, meta: &Meta) {
        self.admission.set_changes((meta.pending_bytes + meta.appending_bytes) as u64, meta.dirty_pages());
    }

    /// Leave to do work of this cost; waits until there is room. Under no lock that a checkpoint takes.
    pub(super) fn admit(&self, cost: Cost) -> Result<Grant<'_>> {
        loop {
            if let Some(grant) = self.admission.try_admit(cost) {
                return Ok(grant);
            }
            self.make_room(cost)?;
        }
    }

    /// Leave to append something small. Under no lock that a checkpoint takes.
    pub(super) fn admit_append(&self) -> Result<Grant<'_>> {
        self.admit(Cost { bytes: APPEND_BYTES, pages: 0 })
    }

    /// Waits until there is room for work of this cost: makes a checkpoint, unless another thread does. Under no lock
    /// that a checkpoint takes.
    pub(super) fn make_room(&self, cost: Cost) -> Result<()> {
        let mut made = 0;
        loop {
            self.check_running()?;
            self.grow_images(cost.pages);
            if self.admission.try_admit(cost).is_some() {
                return Ok(());
            }
            match self.checkpoint.try_lock() {
                // What an empty budget holds has its turn: others are slowed down meanwhile.
                Some(_guard) if made < CHECKPOINTS_MAX || self.admission.holds(cost) => {
                    self.checkpoint_locked(Purpose::GoOn)?;
                    made += 1;
                }
                Some(_guard) => {
                    return Err(Error::new(
                        ErrorKind::NoSpace,
                        format!(
                            "a change needs {} bytes of the journal and {} pages at once, more than the datastore can \
                             hold; make it in smaller parts",
                            cost.bytes, cost.pages
                        ),
                    ));
                }
                None => self.admission.wait(cost, LOOK_AGAIN),
            }
        }
    }

    /// Has a checkpoint made when it is worth while. Under no lock that a checkpoint takes.
    pub(super) fn make_journal_room(&self) -> Result<()> {
        if self.admission.is_checkpoint_due() {
            self.request(|work| work.checkpoint = true);
            if !self.options.threads {
                self.grow_images(0);
                self.checkpoint_if_needed()?;
            }
        }
        Ok(())
    }

    /// The same, for those who bring changes one after the other: the fuller journal and cache are, the longer they
    /// rest, so that a checkpoint gets ahead of them before they have to wait for its end.
    pub(super) fn pace(&self) -> Result<()> {
        self.make_journal_room()?;
        let rest = self.admission.pace();
        if self.options.threads && !rest.is_zero() {
            crate::sync::thread::sleep(rest);
        }
        Ok(())
    }

    /// Carries out an operation if there is room for it: its cost, and nothing done, if there is not.
    pub(super) fn try_carry_out(&self, meta: &mut Meta, operation: Operation, gate: u64) -> Result<Option<Cost>> {
        let cost = meta.cost(&operation)?;
        let Some(_grant) = self.admission.try_admit(cost) else { return Ok(Some(cost)) };
        self.carry_out(meta, operation, gate)?;
        Ok(None)
    }

    /// As [`Engine::try_carry_out`]; the new run that the operation would have taken is free again unless it was
    /// carried out.
    pub(super) fn try_carry_out_new(&self, meta: &mut Meta, operation: Operation, gate: u64) -> Result<Option<Cost>> {
        let new = new_run(&operation);
        let done = self.try_carry_out(meta, operation, gate);
        if !matches!(done, Ok(None)) {
            self.release_new(meta, new);
        }
        done
    }

    /// As [`Engine::carry_out`]; if there is no room for it in the map, the run that it would have taken is free again.
    pub(super) fn carry_out_new(&self, meta: &mut Meta, operation: Operation, gate: u64) -> Result<()> {
        let new = new_run(&operation);
        let done = self.carry_out(meta, operation, gate);
        if done.is_err() {
            self.release_new(meta, new);
        }
        done
    }

    /// After a failure in the middle of a change memory is not looked at any more.
    pub(super) fn release_new(&self, meta: &mut Meta, new: Option<Run>) {
        if let Some(run) = new
            && !self.stopped.load(Ordering::Acquire)
        {
            meta.data.release(run);
            self.update_headroom(meta);
        }
    }

    /// Applies an operation and queues it for the journal. A failure in the middle stops the datastore: memory and
    /// journal would no longer agree. Under a grant, or for what the reserves of admission are for.
    pub(super) fn carry_out(&self, meta: &mut Meta, operation: Operation, gate: u64) -> Result<()> {
        if operation.changes_map() {
            self.ensure_nodes(meta, super::apply::NODES_PER_OPERATION)?;
        }
        meta.enqueue(operation, gate).map_err(|error| self.stop(error))?;
        self.count_changes(meta);
        Ok(())
    }

    /// Carries out an operation once there is room for it. Under no lock that a checkpoint takes.
    pub(super) fn carry_out_waiting(&self, operation: Operation, gate: u64) -> Result<()> {
        loop {
            let mut meta = self.meta.lock();
            let done = self.try_carry_out(&mut meta, operation.clone(), gate)?;
            self.update_headroom(&meta);
            drop(meta);
            match done {
                None => return Ok(()),
                Some(cost) => self.make_room(cost)?,
            }
        }
    }
}
