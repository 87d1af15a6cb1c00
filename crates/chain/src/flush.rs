//! Flushes: everybody who waits for one shares the next.
//!
//! 1. A flush that was asked for is answered by one that **began** after that.
//! 2. One runs at a time. It flushes every level that was written since its last flush, so that what lies in a level
//!    which a snapshot has just put below is covered too. That a level was written is noted when the write has ended:
//!    noted before, it could be taken for flushed by a flush that began and ended in between.
//! 3. The target of a merge down is left out until the commit: its sources hide it, nobody else writes it, and after a
//!    crash it is copied into again. So a guest's flush does not wait for a merge's data, and the merge flushes it
//!    beside those of others. Any other level may hold what a guest wrote, and is flushed here only.
//! 4. After one failed nothing is known of what was written before; the chain stops.

use crate::chain::Chain;
use crate::consolidate::Job;
use crate::levels::Level;
use crate::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::Ordering;

#[derive(Default)]
struct State {
    asked: u64,
    /// Requests up to this one are answered.
    answered: u64,
    running: bool,
}

/// Who waits for a flush.
#[derive(Default)]
pub(crate) struct Flushes {
    state: Mutex<State>,
    changed: Condvar,
}

impl Chain {
    /// Makes everything written before this call durable.
    pub fn flush(&self) -> Result<()> {
        let flushes = &self.flushes;
        let mut state = flushes.state.lock();
        state.asked += 1;
        let mine = state.asked;
        loop {
            if state.answered >= mine {
                return Ok(());
            }
            self.check_running()?;
            if state.running {
                flushes.changed.wait(&mut state);
                continue;
            }
            state.running = true;
            let upto = state.asked;
            drop(state);
            let result = self.flush_levels();
            state = flushes.state.lock();
            state.running = false;
            if result.is_ok() {
                state.answered = state.answered.max(upto);
            } else {
                self.stopped.store(true, Ordering::SeqCst);
            }
            flushes.changed.notify_all();
            result?;
        }
    }

    fn flush_levels(&self) -> Result<()> {
        let levels = self.levels();
        let left_out = levels.job.as_ref().filter(|job| job.leaves_target_out()).map(|job| job.target.key());
        levels.stack.iter().filter(|level| left_out != Some(level.key())).try_for_each(|level| self.flush_level(level))
    }

    fn flush_level(&self, level: &Level) -> Result<()> {
        if !level.unflushed.swap(false, Ordering::SeqCst) {
            return Ok(());
        }
        level.layer.flush().map_err(|error| error.context(format_args!("flushing {}", self.name)))
    }

    /// Makes durable what a merge has copied so far.
    pub(crate) fn flush_target(&self, job: &Job) -> Result<()> {
        if !job.leaves_target_out() {
            return self.flush();
        }
        self.flush_level(&job.target).inspect_err(|_| self.stopped.store(true, Ordering::SeqCst))
    }

    /// An error once a flush has failed.
    pub(crate) fn check_running(&self) -> Result<()> {
        if self.stopped.load(Ordering::SeqCst) {
            return Err(Error::new(
                ErrorKind::Stopped,
                format!("{}: an earlier flush failed or the disk was closed; open it again to write", self.name),
            ));
        }
        Ok(())
    }
}
