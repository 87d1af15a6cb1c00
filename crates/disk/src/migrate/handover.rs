//! The device of a disk while its requests pass from a chain to the native disk that is the chain's only level.
//!
//! The chain completes a write to a part of a block with the rest of the block, and writes the whole block. A write to
//! another part of the block that reached the native disk meanwhile by another way would be lost. So each change
//! through this device locks its range in the chain, until no request uses the chain any more.

use crate::device::{BaseIdentity, Device, DirtyExtent, FlushTicket, ReadPlan, StatusExtent, Verdict};
use backend::SharedSlice;
use chain::Chain;
use error::Result;
use std::sync::Arc;

/// Largest part of a discard during which the range is locked.
const DISCARD_STEP: u64 = 16 << 20;

/// The native disk, used beside the chain above it.
pub(super) struct Handover {
    chain: Arc<Chain>,
    disk: Arc<dyn Device>,
}

impl Handover {
    /// The device for requests that begin from now on. `chain` has only one level, which is `disk`.
    pub fn new(chain: Arc<Chain>, disk: Arc<dyn Device>) -> Self {
        Self { chain, disk }
    }

    /// Changes a range in parts, each with its own lock.
    fn change_long(&self, offset: u64, length: u64, change: impl Fn(u64, u64) -> Result<()>) -> Result<()> {
        let end = offset.saturating_add(length);
        if end > self.disk.capacity() {
            // The disk refuses the range as a whole.
            return change(offset, length);
        }
        let mut at = offset;
        while at < end {
            let stop = ((at / DISCARD_STEP + 1) * DISCARD_STEP).min(end);
            self.chain.change_beside(&(at..stop), || change(at, stop - at))?;
            at = stop;
        }
        Ok(())
    }

    fn finish(&self, fua: bool) -> Result<()> {
        if fua { self.disk.flush() } else { Ok(()) }
    }
}

impl Device for Handover {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn capacity(&self) -> u64 {
        self.disk.capacity()
    }

    fn read_only(&self) -> bool {
        self.disk.read_only()
    }

    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.disk.plan_read(offset, length)
    }

    fn try_plan_read(&self, offset: u64, length: usize) -> Result<Option<ReadPlan>> {
        self.disk.try_plan_read(offset, length)
    }

    fn load_for_read(&self, offset: u64, length: usize) -> Result<()> {
        self.disk.load_for_read(offset, length)
    }

    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        self.disk.finish_read(plan)
    }

    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        let range = offset..offset.saturating_add(data.len() as u64);
        if range.is_empty() {
            return self.disk.write(offset, data, fua);
        }
        self.chain.change_beside(&range, || self.disk.write(offset, data, false))?;
        self.finish(fua)
    }

    fn pressure(&self) -> u32 {
        self.disk.pressure()
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.change_long(offset, length, |at, part| self.disk.discard(at, part, false))?;
        self.finish(fua)
    }

    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()> {
        self.change_long(offset, length, |at, part| self.disk.write_zeroes(at, part, allocate, false))?;
        self.finish(fua)
    }

    fn begin_flush(&self) -> Result<FlushTicket> {
        self.disk.begin_flush()
    }

    fn finish_flush(&self, ticket: FlushTicket) -> Result<()> {
        self.disk.finish_flush(ticket)
    }

    fn losses(&self) -> u64 {
        self.disk.losses()
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.disk.prefetch(offset, length)
    }

    fn resize(&self, capacity: u64) -> Result<()> {
        self.disk.resize(capacity)
    }

    fn mapped_by_resize(&self, capacity: u64) -> Result<u64> {
        self.disk.mapped_by_resize(capacity)
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        self.disk.status(offset, length, limit)
    }

    fn dirty_bases(&self) -> Vec<String> {
        self.disk.dirty_bases()
    }

    fn base_identity(&self, base: &str) -> Option<BaseIdentity> {
        self.disk.base_identity(base)
    }

    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        self.disk.changed_since(base, offset, length, limit)
    }
}
