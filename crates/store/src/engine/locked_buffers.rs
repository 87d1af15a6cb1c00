//! The buffers of several disks, locked together: for a change of blocks that more than one of them may map.
//!
//! A disk that is opened or reverted gets another buffer. So the caller looks up the buffers, locks them, locks the
//! metadata, and then asks whether they are still the buffers of the disks.

use super::{Buffer, Buffers, Head};
use crate::sync::MutexGuard;
use std::ops::Range;
use std::sync::Arc;

/// The buffers of disks, locked in the order of the disks, which is ascending.
pub(super) struct LockedBuffers<'h> {
    heads: &'h [Arc<Head>],
    buffers: Vec<MutexGuard<'h, Buffer>>,
}

impl<'h> LockedBuffers<'h> {
    /// Locks what [`Buffers::of_disks`] returned.
    pub fn lock(heads: &'h [Arc<Head>]) -> Self {
        Self { heads, buffers: heads.iter().map(|head| head.lock()).collect() }
    }

    fn position(&self, disk: u64) -> Option<usize> {
        self.heads.iter().position(|head| head.id == disk)
    }

    /// The buffer of a disk, if it has one.
    pub fn of(&mut self, disk: u64) -> Option<&mut Buffer> {
        let at = self.position(disk)?;
        Some(&mut self.buffers[at])
    }

    /// Whether nothing is buffered for a range of a disk.
    pub fn is_free(&self, disk: u64, range: &Range<u64>) -> bool {
        self.position(disk).is_none_or(|at| self.buffers[at].layers.is_free(range))
    }

    /// Whether these are still the buffers of the disks: a disk that was opened or reverted since has another one,
    /// which is not locked and may have a write already. Called with the metadata locked.
    pub fn are_current(&self, buffers: &Buffers, disks: &[u64]) -> bool {
        buffers.of_disks(disks).iter().map(Arc::as_ptr).eq(self.heads.iter().map(Arc::as_ptr))
    }
}
