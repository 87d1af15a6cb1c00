//! How long work goes on beside guests: at a pace, watched, and one piece of it at a time.

use super::SeSparse;
use super::commit::interrupted;
use crate::{Error, ErrorKind, Result};
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest rest after one step: enough for the share to hold after a commit whose flushes took a tenth of a second.
const REST_MAX: Duration = Duration::from_secs(2);
/// Rests are cut so, to notice that the work is not wanted any more.
const REST_PART: Duration = Duration::from_millis(20);

/// How much of the time long work takes while guests are busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Percent of the time, 1 to 100.
    pub share: u32,
}

impl Pace {
    /// As fast as it goes.
    pub const FULL: Self = Self { share: 100 };
    /// What guests hardly notice.
    pub const GENTLE: Self = Self { share: 6 };
}

/// How far a piece of work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Steps done.
    pub done: u64,
    /// Of so many; an estimate that may change.
    pub total: u64,
}

/// How a piece of long work is to be done.
pub struct Maintenance<'a> {
    /// Its pace while guests are busy.
    pub pace: Pace,
    /// Asked after each step, whether to go on. What was done until then is kept.
    pub watch: Box<dyn FnMut(Progress) -> bool + 'a>,
}

impl Maintenance<'_> {
    /// To the end, at this pace.
    pub fn at(pace: Pace) -> Self {
        Self { pace, watch: Box::new(|_| true) }
    }
}

/// A piece of work under way.
pub(super) struct Work<'a, 'w> {
    layer: &'a SeSparse,
    plan: Maintenance<'w>,
    what: &'static str,
    begun: Instant,
    requests: u64,
    pub progress: Progress,
    _alone: MutexGuard<'a, ()>,
}

impl SeSparse {
    /// Begins a piece of long work, if none is under way.
    pub(super) fn begin_work<'a, 'w>(&'a self, plan: Maintenance<'w>, what: &'static str) -> Result<Work<'a, 'w>> {
        let Some(alone) = self.maintenance.try_lock() else {
            if self.closing.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::ReadOnly, format!("{} is being closed", self.name)));
            }
            let text = format!("{}: {what} has to wait: wipe, shrink or check is under way", self.name);
            return Err(Error::new(ErrorKind::Busy, text));
        };
        let requests = self.requests.load(Ordering::Relaxed);
        let progress = Progress { done: 0, total: 0 };
        Ok(Work { layer: self, plan, what, begun: Instant::now(), requests, progress, _alone: alone })
    }
}

impl Work<'_, '_> {
    /// Ends a step: rests as the pace demands, and fails when the work is not wanted any more.
    pub(super) fn step(&mut self, done: u64) -> Result<()> {
        self.progress.done += done;
        self.ask()?;
        let worked = self.begun.elapsed();
        let requests = self.layer.requests.load(Ordering::Relaxed);
        let share = self.plan.pace.share.clamp(1, 100);
        if requests != self.requests && share < 100 {
            let mut rest = (worked * (100 - share) / share).min(REST_MAX);
            while !rest.is_zero() {
                let part = rest.min(REST_PART);
                std::thread::sleep(part);
                rest -= part;
                self.ask()?;
            }
        }
        self.requests = self.layer.requests.load(Ordering::Relaxed);
        self.begun = Instant::now();
        Ok(())
    }

    /// Fails when the work is not wanted any more.
    pub(super) fn ask(&mut self) -> Result<()> {
        let wanted = !self.layer.closing.load(Ordering::Acquire) && (self.plan.watch)(self.progress);
        if wanted { Ok(()) } else { Err(interrupted(self.layer.name(), self.what)) }
    }
}
