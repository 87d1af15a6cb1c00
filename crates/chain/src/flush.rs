//! Flushes: all callers that wait for a flush share the next one.
//!
//! 1. A flush request is answered by a flush that **began** after the request.
//! 2. One flush runs at a time. It flushes every level written since that level's last flush, including a level that
//!    was the top until a snapshot. A level is marked as written when the write has ended: an earlier mark could be
//!    cleared by a flush that began and ended during the write.
//! 3. The target of a merge down is left out until the commit: the sources hide its new content, which a repeated merge
//!    copies again after a crash. So a guest's flush does not wait for the data of a merge; the merge flushes the
//!    target itself. Every other level may contain guest writes and is flushed only here. After a failed flush of the
//!    target, reads of copied ranges are refused if they were planned before the caches dropped the copies. Reads of
//!    grains that the sources store only in part are refused in any case, because the target has the other parts.
//! 4. After a failed flush the state of earlier writes is unknown: the chain stops, and ranges changed since the last
//!    successful flush are not read any more ([`crate::unflushed`]). A lack of space is no such failure: the layer
//!    keeps the data in memory, and writes it with the next flush. A layer that cannot keep the data returns
//!    [`ErrorKind::Stopped`].

use crate::chain::Chain;
use crate::consolidate::Job;
use crate::levels::Level;
use crate::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use std::ops::Range;
use std::sync::atomic::Ordering;

#[derive(Default)]
struct FlushesState {
    asked: u64,
    /// Requests up to this number are answered.
    answered: u64,
    running: bool,
}

/// The requests that wait for a flush, and whether a flush runs.
#[derive(Default)]
pub(crate) struct Flushes {
    state: Mutex<FlushesState>,
    changed: Condvar,
    /// Held by a flush that may cover the target of a merge: that of the merge itself, and one of all levels, which may
    /// have begun before the merge.
    of_target: Mutex<()>,
}

impl Flushes {
    /// Waits until no flush is under way.
    pub fn wait_idle(&self) {
        let mut state = self.state.lock();
        while state.running {
            self.changed.wait(&mut state);
        }
    }
}

/// Stops the chain if a flush panics, so that no caller waits for the flush for ever.
struct StopOnPanic<'a>(&'a Chain);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(&Error::new(ErrorKind::Stopped, "a flush failed inside the program: see the log"));
            self.0.flushes.state.lock().running = false;
            self.0.flushes.changed.notify_all();
        }
    }
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
            let result = {
                let _stop = StopOnPanic(self);
                self.flush_levels()
            };
            state = flushes.state.lock();
            state.running = false;
            match &result {
                Ok(()) => state.answered = state.answered.max(upto),
                Err(error) if error.kind() == ErrorKind::NoSpace => {}
                Err(error) => self.stop(error),
            }
            flushes.changed.notify_all();
            result?;
        }
    }

    /// Whether a level that is being written should be flushed soon ([`layer::Layer::is_commit_due`]).
    pub fn is_commit_due(&self) -> bool {
        let levels = self.levels();
        let is_due = |level: &Level| level.layer.is_commit_due();
        is_due(levels.top()) || levels.job.as_ref().is_some_and(|job| !job.leaves_target_out() && is_due(&job.target))
    }

    fn flush_levels(&self) -> Result<()> {
        self.unflushed.begin_flush();
        self.rearranged.begin_flush();
        let levels = self.levels();
        let left_out = levels.job.as_ref().filter(|job| job.leaves_target_out()).map(|job| job.target.key());
        let _of_target = left_out.is_none().then(|| self.flushes.of_target.lock());
        let of_merges = [&self.copied, &self.completed];
        if left_out.is_none() {
            of_merges.iter().for_each(|notes| notes.begin_flush());
        }
        levels
            .stack
            .iter()
            .filter(|level| left_out != Some(level.key()))
            .try_for_each(|level| self.flush_level(level))?;
        self.unflushed.end_flush();
        self.rearranged.end_flush();
        if left_out.is_none() {
            of_merges.iter().for_each(|notes| notes.end_flush());
        }
        Ok(())
    }

    fn flush_level(&self, level: &Level) -> Result<()> {
        if !level.unflushed.swap(false, Ordering::SeqCst) {
            return Ok(());
        }
        let flushed = level.layer.flush().inspect_err(|_| level.unflushed.store(true, Ordering::SeqCst));
        flushed.map_err(|error| error.context(format_args!("flushing {}", self.name)))
    }

    /// Makes the data that a merge has copied so far durable.
    pub(crate) fn flush_target(&self, job: &Job) -> Result<()> {
        if !job.leaves_target_out() {
            return self.flush();
        }
        // A flush of all levels that began before the merge would drop the notes of copies that it does not cover, and
        // would take the mark of the target before it has flushed the target.
        let _of_target = self.flushes.of_target.lock();
        let of_merges = [&self.copied, &self.completed];
        of_merges.iter().for_each(|notes| notes.begin_flush());
        let flushed = self.flush_level(&job.target).inspect_err(|error| {
            if error.kind() != ErrorKind::NoSpace {
                self.stop(error);
            }
        });
        flushed.map(|()| of_merges.iter().for_each(|notes| notes.end_flush()))
    }

    /// Stops the chain after other work on a level, such as shrinking, has failed: the device may lack the content to
    /// which the level refers now. Nothing is read or written until the chain is opened again.
    pub fn distrust(&self, error: &Error) {
        self.rearranged.note(&(0..self.capacity()));
        self.stop(error);
    }

    /// Stops the chain after a level has failed: no level is written from here on, and ranges that changed since the
    /// last flush are not read. Logged once.
    #[cold]
    pub fn stop(&self, error: &Error) {
        self.stopped.store(true, Ordering::SeqCst);
        let mut failure = self.failure.lock();
        if failure.is_none() {
            *failure = Some(error.to_string());
            tracing::error!(disk = self.name, %error, "the disk takes no writes until it is opened again");
        }
    }

    /// Fails for a range that was changed before a failed flush: the device may have its old content.
    pub(crate) fn check_flushed(&self, range: &Range<u64>) -> Result<()> {
        let changed = [&self.unflushed, &self.rearranged, &self.completed];
        if self.stopped.load(Ordering::SeqCst) && changed.iter().any(|notes| notes.covers(range)) {
            return Err(self.not_flushed(range));
        }
        Ok(())
    }

    /// As [`Self::check_flushed`], also for a range that was planned with this generation of levels, and that a merge
    /// may have copied: the plan may refer to the copy.
    pub(crate) fn check_planned(&self, range: &Range<u64>, generation: u64) -> Result<()> {
        self.check_flushed(range)?;
        let may_be_copy = || generation <= self.copies_until.load(Ordering::SeqCst) && self.copied.covers(range);
        if self.stopped.load(Ordering::SeqCst) && may_be_copy() {
            return Err(self.not_flushed(range));
        }
        Ok(())
    }

    fn not_flushed(&self, range: &Range<u64>) -> Error {
        Error::new(
            ErrorKind::Io,
            format!(
                "{}: an earlier flush failed, and bytes {} to {} were changed before it; open the disk again to read \
                 what the storage device has",
                self.name, range.start, range.end
            ),
        )
    }

    /// Fails after the chain was stopped or closed.
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
