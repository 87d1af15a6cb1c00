//! The cost of changes, and waiting until journal and checkpoint have room for them.

use super::checkpoint::Purpose;
use super::log::{Cost, Grant};
use super::metadata::NODES_PER_OPERATION;
use super::reserve::KEPT;
use super::{Engine, Meta};
use crate::journal::{Journal, Operation};
use crate::space::Run;
use crate::{Error, ErrorKind, Result};
use std::time::Duration;

/// Pages that one step of a long change dirties, approximately. The step holds the metadata lock, so the number limits
/// how long other threads wait.
pub(super) const STEP_PAGES: u64 = 128;
/// The bytes that an append needs in addition to its operations: head and padding of a batch, and of a second batch if
/// the operations are split.
pub(super) const APPEND_BYTES: u64 = 4 * backend::BLOCK_SIZE as u64;
/// How long a thread that waits for room sleeps before it checks the budgets again.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// The most checkpoints that one request makes while it waits for room. Two checkpoints empty any journal.
const CHECKPOINTS_MAX: u32 = 64;

/// The journal bytes of a batch whose operations take `body` bytes.
pub(super) fn batch_bytes(body: usize) -> u64 {
    Journal::footprint(body)
}

impl Engine {
    /// Updates the pending bytes and dirty pages that admission counts. Called under the metadata lock after each
    /// change.
    pub(super) fn count_changes(&self, meta: &Meta) {
        self.log.admission.set_changes(meta.pending.bytes_unappended() as u64, meta.dirty_pages());
    }

    /// Waits for a grant for work of this cost. Must not be called under a lock that a checkpoint takes.
    pub(super) fn admit(&self, cost: Cost) -> Result<Grant<'_>> {
        loop {
            if let Some(grant) = self.log.admission.try_admit(cost) {
                return Ok(grant);
            }
            self.make_room(cost)?;
        }
    }

    /// Waits for a grant for a small append. Must not be called under a lock that a checkpoint takes.
    pub(super) fn admit_append(&self) -> Result<Grant<'_>> {
        self.admit(Cost { bytes: APPEND_BYTES, pages: 0 })
    }

    /// Waits until there is room for work of this cost. The calling thread makes a checkpoint unless another thread is
    /// making one. Must not be called under a lock that a checkpoint takes.
    pub(super) fn make_room(&self, cost: Cost) -> Result<()> {
        let mut made = 0;
        loop {
            self.check_running()?;
            self.grow_images(cost.pages);
            if self.log.admission.try_admit(cost).is_some() {
                return Ok(());
            }
            match self.log.try_lock_checkpoints() {
                // The limit does not apply to a request that fits into an empty budget: it is admitted at last, because
                // other threads are slowed down.
                Some(_guard) if made < CHECKPOINTS_MAX || self.log.admission.holds(cost) => {
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
                None => self.log.admission.wait(cost, LOOK_AGAIN),
            }
        }
    }

    /// Requests a checkpoint when the budgets are full enough. Must not be called under a lock that a checkpoint takes.
    pub(super) fn make_journal_room(&self) -> Result<()> {
        if self.log.admission.is_checkpoint_due() {
            self.request(|work| work.checkpoint = true);
            if !self.options.threads {
                self.grow_images(0);
                self.checkpoint_if_needed()?;
            }
        }
        Ok(())
    }

    /// Like [`Engine::make_journal_room`], for a caller that makes many changes in a row. The caller sleeps for longer
    /// as journal and cache fill up. A checkpoint then usually ends before they are full, so the caller does not have
    /// to block.
    pub(super) fn pace(&self) -> Result<()> {
        self.make_journal_room()?;
        self.limit_pending()?;
        let rest = self.log.admission.pace();
        if self.options.threads && !rest.is_zero() {
            crate::sync::thread::sleep(rest);
        }
        Ok(())
    }

    /// Carries out an operation if there is room for it; otherwise changes nothing and returns its cost.
    pub(super) fn try_carry_out(&self, meta: &mut Meta, operation: Operation, gate: u64) -> Result<Option<Cost>> {
        let cost = meta.cost(&operation)?;
        let Some(_grant) = self.log.admission.try_admit(cost) else { return Ok(Some(cost)) };
        self.carry_out(meta, operation, gate)?;
        Ok(None)
    }

    /// Like [`Engine::try_carry_out`], but frees the newly allocated run again if the operation is not carried out.
    pub(super) fn try_carry_out_new(&self, meta: &mut Meta, operation: Operation, gate: u64) -> Result<Option<Cost>> {
        let new = operation.new_run();
        let done = self.try_carry_out(meta, operation, gate);
        if !matches!(done, Ok(None)) {
            self.release_new(meta, new);
        }
        done
    }

    /// Like [`Engine::carry_out`], but frees the newly allocated run again if the map has no room for the operation.
    pub(super) fn carry_out_new(&self, meta: &mut Meta, operation: Operation, gate: u64) -> Result<()> {
        let new = operation.new_run();
        let done = self.carry_out(meta, operation, gate);
        if done.is_err() {
            self.release_new(meta, new);
        }
        done
    }

    /// Frees a newly allocated run, unless a failure has stopped the datastore: the metadata in memory may then be
    /// inconsistent.
    pub(super) fn release_new(&self, meta: &mut Meta, new: Option<Run>) {
        if let Some(run) = new
            && !self.running.is_stopped()
        {
            meta.data.release(run);
            self.update_headroom(meta);
        }
    }

    /// Applies an operation and queues it for the journal. A failure in the middle stops the datastore, because memory
    /// and journal would no longer agree. The caller holds a grant, or the operation may use the reserve of admission.
    pub(super) fn carry_out(&self, meta: &mut Meta, operation: Operation, gate: u64) -> Result<()> {
        if operation.changes_map() {
            let Meta { map, pages, .. } = &mut *meta;
            map.check_next(pages, NODES_PER_OPERATION)?;
            self.ensure_nodes_of(meta, &operation)?;
        }
        if let Some(run) = operation.new_run() {
            // After the run was allocated, the table page with its entries may have been evicted from memory and lost.
            let Meta { data, pages, .. } = &mut *meta;
            data.check_entries(pages, run)?;
        }
        meta.enqueue(operation, gate).map_err(|error| self.stop(error))?;
        self.count_changes(meta);
        Ok(())
    }

    /// Carries out an operation once there is room for it. Must not be called under a lock that a checkpoint takes.
    pub(super) fn carry_out_waiting(&self, operation: Operation, gate: u64) -> Result<()> {
        loop {
            let mut meta = self.meta.lock();
            let nodes = meta.nodes_of(&operation)?;
            if !self.are_spare(&meta, nodes, KEPT) {
                drop(meta);
                self.make_spare(nodes, KEPT)?;
                continue;
            }
            let done = self.try_carry_out(&mut meta, operation.clone(), gate)?;
            self.update_headroom(&meta);
            drop(meta);
            match done {
                None => return Ok(()),
                Some(cost) => self.make_room(cost)?,
            }
        }
    }

    /// Reserves space in the images file for this many pages of a checkpoint.
    pub(super) fn reserve_images(&self, pages: u64) -> Result<()> {
        self.log.reserve_images(pages, &*self.directory, &|error| self.stop(error))
    }

    /// Doubles the size of the images file while it limits the dirty pages, or is too small for one change of this many
    /// pages. If the file system is full the file keeps its size, and checkpoints are made earlier.
    pub(super) fn grow_images(&self, pages: u64) {
        if self.log.admission.is_capacity_short() || pages > self.log.admission.page_limit() {
            let wanted = (self.log.admission.capacity() * 2).min(self.log.admission.capacity_max());
            if let Err(error) = self.reserve_images(wanted)
                && error.kind() != ErrorKind::NoSpace
            {
                tracing::warn!(%error, "the file of page images cannot grow and keeps its size");
            }
        }
    }
}
