//! When a place of an image file that was given up may have a new owner, or be punched.
//!
//! A place that the map in memory names no more waits until
//!
//! 1. a commit that began after it was given up is complete, so that no table on the medium names it: a crash does not
//!    bring the name back; and
//! 2. the epoch in which it was given up is over, so that no operation uses it ([`crate::epochs`]).
//!
//! Places wait in batches. A batch is closed, and its epoch ended, when a commit begins ([`Retirement::begin_commit`]),
//! or earlier by long work that has to know when all operations of before have ended ([`Retirement::close`]). Batches
//! are handed out in order. Formats count places in their own unit: grains or sectors.
//!
//! The caller's lock protects the state. Commits do not overlap ([`crate::group_commit`]).

use crate::epochs::Epochs;
use std::collections::VecDeque;
use std::ops::Range;

/// Places that were given up together.
struct Batch {
    places: Vec<Range<u64>>,
    epoch: u64,
    /// The commit whose completion takes their names off the medium.
    commit: u64,
}

/// Places that were given up and are not free yet.
pub(crate) struct Retirement {
    /// Given up since the last batch was closed.
    open: Vec<Range<u64>>,
    batches: VecDeque<Batch>,
    /// Handed out, and not free yet.
    releasing: Vec<Range<u64>>,
    /// Runs in `open` and `batches`.
    waiting: usize,
    waiting_max: usize,
    begun: u64,
    completed: u64,
}

impl Retirement {
    /// At most `waiting_max` runs wait. Only an operation that never ends lets it come to that.
    pub(crate) fn new(waiting_max: usize) -> Self {
        Self {
            open: Vec::new(),
            batches: VecDeque::new(),
            releasing: Vec::new(),
            waiting: 0,
            waiting_max,
            begun: 0,
            completed: 0,
        }
    }

    /// The map in memory has given up places. False when too many wait and these are forgotten: no table names them,
    /// and they stay allocated.
    #[must_use]
    pub(crate) fn give_up(&mut self, places: Range<u64>) -> bool {
        match self.open.last_mut() {
            Some(last) if last.end == places.start => last.end = places.end,
            _ if self.waiting >= self.waiting_max => return false,
            _ => {
                self.open.push(places);
                self.waiting += 1;
            }
        }
        true
    }

    /// Places given up since the last batch was closed.
    pub(crate) fn open(&self) -> &[Range<u64>] {
        &self.open
    }

    /// Closes the batch and ends its epoch, whose number it returns.
    pub(crate) fn close(&mut self, epochs: &Epochs) -> u64 {
        let epoch = epochs.end();
        let places = std::mem::take(&mut self.open);
        if !places.is_empty() {
            self.batches.push_back(Batch { places, epoch, commit: self.begun + 1 });
        }
        epoch
    }

    /// A commit begins: its tables, taken **after** this, name nothing that was given up so far.
    pub(crate) fn begin_commit(&mut self, epochs: &Epochs) {
        if !self.open.is_empty() {
            self.close(epochs);
        }
        self.begun += 1;
    }

    /// The commit that began last is durable.
    pub(crate) fn complete_commit(&mut self) {
        self.completed = self.begun;
    }

    /// Hands out at most `most` adjoining places that may be free now. [`Retirement::released`] has to follow once they
    /// are.
    pub(crate) fn next_ready(&mut self, epochs: &Epochs, most: u64) -> Option<Range<u64>> {
        let batch = self.batches.front_mut()?;
        if batch.commit > self.completed || !epochs.is_over(batch.epoch) {
            return None;
        }
        let places = batch.places.pop()?;
        let end = places.end.min(places.start.saturating_add(most));
        match end < places.end {
            true => batch.places.push(end..places.end),
            false => self.waiting -= 1,
        }
        if batch.places.is_empty() {
            self.batches.pop_front();
        }
        self.releasing.push(places.start..end);
        Some(places.start..end)
    }

    /// What was handed out is free.
    pub(crate) fn released(&mut self) {
        self.releasing.clear();
    }

    /// Every run that no table in memory names and that is not free yet.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Range<u64>> {
        let batches = self.batches.iter().flat_map(|batch| &batch.places);
        self.open.iter().chain(batches).chain(&self.releasing).cloned()
    }
}

#[cfg(test)]
mod tests;
