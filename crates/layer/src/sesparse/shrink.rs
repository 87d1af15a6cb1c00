//! Shrinking: live grains move from the end of the file to free grains below, then the file is truncated.
//!
//! Each batch is complete in itself ([`super::relocate`]), so the work can be stopped at any point, also by a power
//! cut: committed moves are done, the other grains are unchanged, and a later shrink continues.

use super::SeSparse;
use super::entry::{GRAIN, GrainRun};
use super::header::{PAGE_BITS, PAGE_ENTRIES};
use super::maintain::Work;
use crate::{Error, ErrorKind, Result};
use backend::BLOCK_SIZE;
use work::Progress;

/// Grains examined per batch; half a page of the backmap.
const BATCH: u64 = PAGE_ENTRIES / 2;
/// Batches between two commits: the flushes of a commit cost more than a batch of moves.
const BATCHES: u64 = 16;
/// The most passes over the end of the file.
const PASSES: usize = 3;

/// The result of a shrink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShrinkReport {
    /// Grains moved.
    pub moved: u64,
    /// Bytes by which the file was truncated.
    pub cut: u64,
    /// Grains at the end that could not be moved, because guests kept writing them or no table names them.
    pub left: u64,
}

impl SeSparse {
    /// Moves live grains from the end of the file to free grains, and truncates the file. Grains that no table names
    /// cannot be moved, so an image should be wiped first. Guests may be active. When cancelled, fails with
    /// [`ErrorKind::Interrupted`]; moves already committed remain.
    pub fn shrink(&self, progress: &dyn Progress) -> Result<ShrinkReport> {
        let mut work = self.begin_work(progress, "shrinking")?;
        self.check_changeable()?;
        let mut report = ShrinkReport::default();
        let mut done = self.shrink_down(&mut work, &mut report);
        // Grains that guests wrote during their move are tried again.
        for _ in 1..PASSES {
            if done.is_err() || report.left == 0 {
                break;
            }
            report.left = 0;
            done = self.shrink_down(&mut work, &mut report);
        }
        // Even after an error or a cancellation, the file is truncated as far as grains were moved.
        let ended = self.commit_at_once().and_then(|()| self.commit_at_once()).and_then(|()| self.cut_end());
        report.cut += *ended.as_ref().unwrap_or(&0);
        done?;
        ended?;
        // The file system reports a failed write-back once. Without the stop, the next flush of a guest would succeed
        // although its data may be lost, and so would a commit that flushes at the same time.
        let _between_commits = self.commits.turn();
        self.sync().map_err(|error| self.stop(error))?;
        Ok(report)
    }

    fn shrink_down(&self, work: &mut Work, report: &mut ShrinkReport) -> Result<()> {
        if self.state.lock().touched.is_none() {
            let text = format!("{}: another program changed its bitmap; wipe it first", self.name);
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        // A commit frees grains that were retired before, so that they can be used as targets.
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
            // The traffic is a page of the backmap, and each moved grain read and written.
            work.moved(BLOCK_SIZE as u64 + 2 * moved * GRAIN);
            report.moved += moved;
            searched &= moved == 0;
            let (exhausted, more) = {
                let mut state = self.state.lock();
                let exhausted = state.space.lowest().is_none_or(|lowest| lowest.start >= start);
                (exhausted, exhausted && !searched && state.space.search_forgotten())
            };
            if more {
                // There are more free runs than fit into memory: this batch is repeated with the next runs.
                self.search_all(work)?;
                searched = true;
                work.step(moved)?;
                continue;
            }
            if exhausted {
                return Ok(());
            }
            // The grains of this batch that are still allocated could not be moved, although there are free grains
            // below.
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

    /// Continues the search of the bitmap until all free runs that fit into memory are known.
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

/// Limits the bytes of a batch.
const _: () = assert!(BATCH * GRAIN <= 1 << 20 && PAGE_BITS.is_multiple_of(BATCH));
