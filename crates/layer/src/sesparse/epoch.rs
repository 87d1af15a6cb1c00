//! When the place of a freed grain may have a new owner.
//!
//! A grain given up by a table waits in a batch until
//!
//! 1. a commit that began after it was given up is complete, so that no table on the medium names it, and
//! 2. no thread holds the token of the batch or of an older one: a thread that asks the map, or writes in place, takes
//!    the token that is current then.
//!
//! Batches are freed in order. A batch is closed, and a new token made current, at the start of each commit and
//! whenever a caller has to wait for all operations that began before ([`Retirement::rotate`]).

use super::entry::GrainRun;
use super::header::PAGE_ENTRIES;
use std::collections::VecDeque;
use std::sync::Arc;

/// Runs that wait at the most; beyond it grains stay allocated until the image is opened again. Only a reader that
/// never ends lets it come to that.
pub(super) const WAITING_MAX: usize = if cfg!(test) { 1 << 12 } else { 1 << 20 };

/// Held by each operation while it uses an answer of the map.
#[derive(Debug)]
pub(super) struct Token;

struct Batch {
    token: Arc<Token>,
    runs: Vec<GrainRun>,
    /// The commit whose completion frees it.
    commit: u64,
    number: u64,
}

/// Freed grains that wait.
#[derive(Default)]
pub(super) struct Retirement {
    /// Given up since the last batch was closed.
    open: Vec<GrainRun>,
    batches: VecDeque<Batch>,
    /// On their way to being free, outside the lock.
    releasing: Vec<GrainRun>,
    waiting: usize,
    begun: u64,
    completed: u64,
    number: u64,
}

impl Retirement {
    /// A table has given up a grain. False when too many wait, and this one is forgotten.
    #[must_use]
    pub(super) fn give_up(&mut self, grain: u64) -> bool {
        match self.open.last_mut() {
            Some(last) if last.end() == grain => last.count += 1,
            _ if self.waiting >= WAITING_MAX => return false,
            _ => {
                self.open.push(GrainRun { start: grain, count: 1 });
                self.waiting += 1;
            }
        }
        true
    }

    /// Runs given up since the last batch.
    pub(super) fn open(&self) -> &[GrainRun] {
        &self.open
    }

    /// Closes the batch and makes a new token current. Returns the number to ask [`Retirement::is_quiet`] for.
    pub(super) fn rotate(&mut self, current: &mut Arc<Token>) -> u64 {
        let token = std::mem::replace(current, Arc::new(Token));
        let runs = std::mem::take(&mut self.open);
        self.number += 1;
        self.batches.push_back(Batch { token, runs, commit: self.begun + 1, number: self.number });
        self.number
    }

    /// A commit begins; what was given up so far waits for it alone. The batch has just been closed.
    pub(super) fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// That commit is durable.
    pub(super) fn complete(&mut self, commit: u64) {
        self.completed = self.completed.max(commit);
    }

    /// True when no thread holds a token of that rotation or an older one.
    pub(super) fn is_quiet(&mut self, number: u64) -> bool {
        let mut older = self.batches.iter_mut().take_while(|batch| batch.number <= number);
        older.all(|batch| Arc::get_mut(&mut batch.token).is_some())
    }

    /// Some of the grains that may be freed now: about as many as dirty `pages` pages of the backmap.
    /// [`Retirement::released`] has to follow.
    pub(super) fn take_ready(&mut self, pages: u64) -> Vec<GrainRun> {
        let (mut ready, mut left) = (Vec::new(), pages);
        while left > 0
            && let Some(batch) = self.batches.front_mut()
            && batch.commit <= self.completed
            && Arc::get_mut(&mut batch.token).is_some()
        {
            let Some(run) = batch.runs.pop() else {
                self.batches.pop_front();
                continue;
            };
            let count = run.count.min(left * PAGE_ENTRIES);
            if count < run.count {
                batch.runs.push(GrainRun { start: run.start + count, count: run.count - count });
            } else {
                self.waiting = self.waiting.saturating_sub(1);
            }
            ready.push(GrainRun { start: run.start, count });
            left = left.saturating_sub(1 + count / PAGE_ENTRIES);
        }
        self.releasing.clone_from(&ready);
        ready
    }

    /// What was ready is free.
    pub(super) fn released(&mut self) {
        self.releasing.clear();
    }

    /// Every run that no table names and that is not free yet.
    pub(super) fn waiting(&self) -> impl Iterator<Item = GrainRun> {
        let batches = self.batches.iter().flat_map(|batch| &batch.runs);
        self.open.iter().chain(batches).chain(&self.releasing).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grains_wait_for_a_later_commit_and_for_older_readers() {
        let (mut retirement, mut current) = (Retirement::default(), Arc::new(Token));
        let reader = Arc::clone(&current);
        assert!(retirement.give_up(7));
        retirement.rotate(&mut current);
        let first = retirement.begin();
        assert!(retirement.give_up(8));
        retirement.complete(first);
        assert!(retirement.take_ready(10).is_empty(), "a reader from before holds it");
        drop(reader);
        assert_eq!(retirement.take_ready(10), [GrainRun { start: 7, count: 1 }]);
        retirement.released();
        let later = Arc::clone(&current);
        let number = retirement.rotate(&mut current);
        assert!(!retirement.is_quiet(number));
        drop(later);
        assert!(retirement.is_quiet(number));
        assert!(retirement.take_ready(10).is_empty(), "given up during the first commit");
        let second = retirement.begin();
        retirement.complete(second);
        assert_eq!(retirement.take_ready(10), [GrainRun { start: 8, count: 1 }]);
    }
}
