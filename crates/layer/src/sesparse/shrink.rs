//! Shrinking: live grains move from the end of the file into free ones below, then the file is cut.
//!
//! Each batch is complete in itself ([`super::relocate`]), so the work can be stopped, or the power fail, after any
//! instruction: committed moves are done, the other grains are where they were, and a later shrink continues.

use super::SeSparse;
use super::entry::{GRAIN, GrainRun};
use super::header::{PAGE_BITS, PAGE_ENTRIES};
use super::maintain::Work;
use crate::{Error, ErrorKind, Result};
use backend::BLOCK_SIZE;
use work::Progress;

/// Grains examined for one batch; one page of the backmap.
const BATCH: u64 = PAGE_ENTRIES / 2;
/// Batches between two commits: their flushes cost more than the moving.
const BATCHES: u64 = 16;
/// Passes over the end of the file.
const PASSES: usize = 3;

/// The result of a shrink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShrinkReport {
    /// Grains moved.
    pub moved: u64,
    /// Bytes by which the file became shorter.
    pub cut: u64,
    /// Grains at the end that could not be moved, because guests continued to write them or nothing names them.
    pub left: u64,
}

impl SeSparse {
    /// Moves live grains from the end of the file into free ones and cuts the file. Grains that nothing names are in
    /// the way of that: wipe first. Goes on beside guests; fails with [`ErrorKind::Interrupted`] when stopped, and
    /// keeps what it did.
    pub fn shrink(&self, progress: &dyn Progress) -> Result<ShrinkReport> {
        let mut work = self.begin_work(progress, "shrinking")?;
        self.check_changeable()?;
        let mut report = ShrinkReport::default();
        let mut done = self.shrink_down(&mut work, &mut report);
        // Grains that guests wrote during the move are tried again.
        for _ in 1..PASSES {
            if done.is_err() || report.left == 0 {
                break;
            }
            report.left = 0;
            done = self.shrink_down(&mut work, &mut report);
        }
        // The end is cut in any case, as far as grains were moved.
        let ended = self.commit_at_once().and_then(|()| self.commit_at_once()).and_then(|()| self.cut_end());
        report.cut += *ended.as_ref().unwrap_or(&0);
        done?;
        ended?;
        self.sync()?;
        Ok(report)
    }

    fn shrink_down(&self, work: &mut Work, report: &mut ShrinkReport) -> Result<()> {
        if self.state.lock().touched.is_none() {
            let text = format!("{}: another program changed its bitmap; wipe it first", self.name);
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        // Grains that are free already wait for a commit.
        self.commit_at_once()?;
        self.state.lock().space.search_again();
        self.search_all(work)?;
        let mut end = self.state.lock().space.fresh;
        work.expect(self.state.lock().space.free().min(end));
        let (mut batches, mut searched) = (0, true);
        while end > 0 {
            let start = (end - 1) / BATCH * BATCH;
            let run = GrainRun { start, count: end - start };
            let (held, allocated) = self.held(run)?;
            let moved = self.relocate(&held, work)?;
            // A page of the backmap, and grains read and written.
            work.moved(BLOCK_SIZE as u64 + 2 * moved * GRAIN);
            report.moved += moved;
            searched &= moved == 0;
            let (exhausted, more) = {
                let mut state = self.state.lock();
                let exhausted = state.space.lowest().is_none_or(|lowest| lowest.start >= start);
                (exhausted, exhausted && !searched && state.space.search_forgotten())
            };
            if more {
                // More runs are free than fit into memory: repeats this batch with the next runs.
                self.search_all(work)?;
                searched = true;
                work.step(moved)?;
                continue;
            }
            if exhausted {
                return Ok(());
            }
            // There was room for them, and they were not moved.
            report.left += allocated.saturating_sub(moved);
            end = start;
            batches += 1;
            if batches % BATCHES == 0 {
                self.commit_at_once()?;
                report.cut += self.cut_end()?;
            }
            work.step(moved)?;
        }
        Ok(())
    }

    /// Continues the search until all free runs that fit into memory are known.
    pub(super) fn search_all(&self, work: &mut Work) -> Result<()> {
        let pages = self.state.lock().space.fresh.div_ceil(PAGE_BITS);
        for _ in 0..pages {
            let more = self.settle(|state| match state.space.to_search() {
                Some(page) => state.search(page).map(|()| true),
                None => Ok(false),
            })?;
            if !more {
                break;
            }
            work.ask()?;
        }
        Ok(())
    }
}

/// Most bytes of a batch.
const _: () = assert!(BATCH * GRAIN <= 1 << 20 && PAGE_BITS.is_multiple_of(BATCH));
