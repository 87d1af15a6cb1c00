//! Retirement: when a location in an image file that no table in memory names any more may be reused or punched.
//!
//! A retired location waits until
//!
//! 1. a commit that began after the retirement is complete, so that no table on the device names the location and a
//!    crash cannot bring the entry back; and
//! 2. the epoch of the retirement is over, so that no operation uses the location ([`crate::epochs`]).
//!
//! Locations wait in batches. A batch is closed, and its epoch ended, when a commit begins
//! ([`Retirement::begin_commit`]), or earlier by long work that has to wait for all operations under way
//! ([`Retirement::close`]). Batches are released in order. Each format counts locations in its own unit: grains or
//! sectors.
//!
//! The caller's lock protects the state. Commits do not overlap ([`crate::group_commit`]).

use crate::epochs::Epochs;
use std::collections::VecDeque;
use std::ops::Range;

/// Locations that were retired together.
struct Batch {
    places: Vec<Range<u64>>,
    epoch: u64,
    /// The number of the commit after which no table on the device names these locations.
    commit: u64,
}

/// Locations that are retired and not free yet.
pub(crate) struct Retirement {
    /// Retired since the last batch was closed.
    open: Vec<Range<u64>>,
    batches: VecDeque<Batch>,
    /// Locations that [`Retirement::next_ready`] has returned and that are not free yet.
    releasing: Vec<Range<u64>>,
    /// Number of runs in `open` and `batches`.
    waiting: usize,
    waiting_max: usize,
    begun: u64,
    completed: u64,
}

impl Retirement {
    /// At most `waiting_max` runs wait. The limit is reached only if an operation never ends.
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

    /// Retires locations that the map in memory has dropped. If too many locations wait already, returns false without
    /// recording the given ones: these stay allocated although no table names them.
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

    /// Locations retired since the last batch was closed.
    pub(crate) fn open(&self) -> &[Range<u64>] {
        &self.open
    }

    /// Closes the batch and ends its epoch. Returns the number of the epoch.
    pub(crate) fn close(&mut self, epochs: &Epochs) -> u64 {
        let epoch = epochs.end();
        let places = std::mem::take(&mut self.open);
        if !places.is_empty() {
            self.batches.push_back(Batch { places, epoch, commit: self.begun + 1 });
        }
        epoch
    }

    /// Called when a commit begins: the tables that it reads **after** this call name no location that was retired
    /// before.
    pub(crate) fn begin_commit(&mut self, epochs: &Epochs) {
        if !self.open.is_empty() {
            self.close(epochs);
        }
        self.begun += 1;
    }

    /// Called when the last commit that began is complete.
    pub(crate) fn complete_commit(&mut self) {
        self.completed = self.begun;
    }

    /// Returns at most `most` adjacent locations that may be reused. The caller frees them, and then calls
    /// [`Retirement::released`].
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

    /// Called when the locations returned by [`Retirement::next_ready`] are free.
    pub(crate) fn released(&mut self) {
        self.releasing.clear();
    }

    /// Called when some of the locations that [`Retirement::next_ready`] has returned could not be freed: `places` are
    /// returned again later, the others are free.
    pub(crate) fn put_back(&mut self, places: Vec<Range<u64>>) {
        self.releasing.clear();
        self.waiting += places.len();
        if !places.is_empty() {
            // The commit and the epoch of these locations are complete already.
            self.batches.push_front(Batch { places, epoch: 0, commit: 0 });
        }
    }

    /// All runs that no table in memory names and that are not free yet.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Range<u64>> {
        let batches = self.batches.iter().flat_map(|batch| &batch.places);
        self.open.iter().chain(batches).chain(&self.releasing).cloned()
    }
}

#[cfg(test)]
mod tests;
