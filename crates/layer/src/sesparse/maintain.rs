//! Wiping, shrinking and checking: run while guests are active, with progress, one at a time.

use super::SeSparse;
use super::commit::interrupted;
use crate::{Error, ErrorKind, Result};
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;
use work::{Progress, Throttle};

/// Wiping, shrinking or checking while it runs, with its progress.
pub(super) struct Work<'a, 'w> {
    layer: &'a SeSparse,
    throttle: Throttle<&'w dyn Progress>,
    what: &'static str,
    done: u64,
    total: u64,
    moved: u64,
    _alone: MutexGuard<'a, ()>,
}

impl SeSparse {
    /// Begins wiping, shrinking or checking; refused while another of them is under way.
    pub(super) fn begin_work<'a, 'w>(&'a self, progress: &'w dyn Progress, what: &'static str) -> Result<Work<'a, 'w>> {
        let Some(alone) = self.maintenance.try_lock() else {
            if self.closing.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::ReadOnly, format!("{} is being closed", self.name)));
            }
            let text = format!("{}: {what} has to wait: wipe, shrink or check is under way", self.name);
            return Err(Error::new(ErrorKind::Busy, text));
        };
        Ok(Work { layer: self, throttle: Throttle::new(progress), what, done: 0, total: 0, moved: 0, _alone: alone })
    }
}

impl Work<'_, '_> {
    /// Sets the total number of steps; none of them is done yet.
    pub(super) fn expect(&mut self, total: u64) {
        (self.done, self.total) = (0, total);
    }

    /// Notes that this many bytes were read and written; reported with the next step.
    pub(super) fn moved(&mut self, bytes: u64) {
        self.moved += bytes;
    }

    /// Reports that steps are done; fails if the work was cancelled.
    pub(super) fn step(&mut self, done: u64) -> Result<()> {
        self.done += done;
        self.ask()
    }

    /// Fails if the work was cancelled.
    pub(super) fn ask(&mut self) -> Result<()> {
        let moved = std::mem::take(&mut self.moved);
        let wanted = !self.layer.closing.load(Ordering::Acquire)
            && self.throttle.step(self.done, self.total.max(1), moved).is_continue();
        if wanted { Ok(()) } else { Err(interrupted(self.layer.name(), self.what)) }
    }
}
