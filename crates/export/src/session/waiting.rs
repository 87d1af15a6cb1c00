//! Writes that wait for space, by the policy of their disk ([`disk::full`]).
//!
//! ```text
//!   submit ── refused for lack of space ── put ── tried again ── completed
//!                                                     └── refused again: waits, until its time is over
//! ```
//!
//! 1. A write waits only after the device has refused it for lack of space. It is not acknowledged, and no flush waits
//!    for it.
//! 2. Writes are tried again in the order in which they were refused. The first write that is refused again ends the
//!    round, so that a large write does not wait for ever behind small ones.
//! 3. Trying takes at most a fifth of the session's time.
//! 4. [`SpaceWait`] counts a waiting write until it has left this list, also if the session ends by an error.

use super::limits::{RETRY_MAX, RETRY_MIN, WAITING_BYTES_MAX, WAITING_WRITES_MAX};
use super::{Completion, Reply};
use backend::SharedSlice;
use disk::OnFull;
use disk::device::Device;
use disk::full::{SpaceWait, WaitEnd};
use error::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause after a round is at least this many times as long as the round.
const PAUSE_BY_ROUND: u32 = 4;

/// A request that changes the device.
#[derive(Clone)]
pub enum Change {
    /// As [`super::Operation::Write`].
    Write { offset: u64, data: SharedSlice, fua: bool },
    /// As [`super::Operation::Zero`].
    Zero { offset: u64, length: u64, allocate: bool, fua: bool },
    /// As [`super::Operation::Discard`].
    Discard { offset: u64, length: u64, fua: bool },
}

impl Change {
    pub fn carry_out(self, device: &dyn Device) -> Result<()> {
        match self {
            Self::Write { offset, data, fua } => device.write(offset, data, fua),
            Self::Zero { offset, length, allocate, fua } => device.write_zeroes(offset, length, allocate, fua),
            Self::Discard { offset, length, fua } => device.discard(offset, length, fua),
        }
    }

    /// Length of the range in bytes.
    fn length(&self) -> u64 {
        match self {
            Self::Write { data, .. } => data.len() as u64,
            Self::Zero { length, .. } | Self::Discard { length, .. } => *length,
        }
    }

    /// Bytes of memory that the change occupies while it waits.
    fn memory(&self) -> usize {
        if let Self::Write { data, .. } = self { data.len() } else { 0 }
    }
}

/// A write that waits.
struct Refused<T> {
    tag: T,
    change: Change,
    since: Instant,
    /// The last error.
    error: Error,
}

/// The waiting writes of a session.
pub struct WaitingWrites<T> {
    space: Option<Arc<SpaceWait>>,
    writes: VecDeque<Refused<T>>,
    memory: usize,
    /// When the writes are tried again.
    next: Instant,
    pause: Duration,
}

impl<T> WaitingWrites<T> {
    pub fn new(space: Option<Arc<SpaceWait>>) -> Self {
        Self { space, writes: VecDeque::new(), memory: 0, next: Instant::now(), pause: RETRY_MIN }
    }

    /// Number of waiting writes.
    pub fn count(&self) -> usize {
        self.writes.len()
    }

    /// Whether another write with a payload of this length could wait too.
    pub fn has_room(&self, payload: usize) -> bool {
        self.writes.is_empty() || self.count() < WAITING_WRITES_MAX && self.memory + payload <= WAITING_BYTES_MAX
    }

    /// Whether this change waits if it is refused for lack of space. A discard is never refused for lack of space.
    pub fn accepts(&self, change: &Change) -> bool {
        let policy = self.space.as_ref().map_or(OnFull::Error, |space| space.policy());
        policy != OnFull::Error && !matches!(change, Change::Discard { .. })
    }

    /// Adds a write that was refused.
    pub fn put(&mut self, tag: T, change: Change, error: Error) {
        let now = Instant::now();
        if self.writes.is_empty() {
            self.pause = RETRY_MIN;
            self.next = now + self.pause;
        }
        if let Some(space) = &self.space {
            space.begin(change.length(), &error);
        }
        self.memory += change.memory();
        self.writes.push_back(Refused { tag, change, since: now, error });
    }

    /// The time after which [`WaitingWrites::try_again`] has something to do; `None` if no write waits.
    pub fn due_in(&self) -> Option<Duration> {
        let first = self.writes.front()?;
        let end = self.limit().and_then(|limit| first.since.checked_add(limit));
        Some(end.map_or(self.next, |end| end.min(self.next)).saturating_duration_since(Instant::now()))
    }

    /// How long writes wait; `None` for no limit.
    fn limit(&self) -> Option<Duration> {
        match self.space.as_ref().map_or(OnFull::Error, |space| space.policy()) {
            OnFull::Error => Some(Duration::ZERO),
            OnFull::Wait(limit) => limit,
        }
    }

    /// Tries the writes again if the next attempt is due, and completes the writes whose time is over with their last
    /// error.
    pub fn try_again(&mut self, device: &dyn Device, completions: &mut VecDeque<Completion<T>>) {
        if self.writes.is_empty() {
            return;
        }
        let began = Instant::now();
        if began >= self.next {
            while let Some(first) = self.writes.front_mut() {
                match first.change.clone().carry_out(device) {
                    Err(error) if error.kind() == ErrorKind::NoSpace => {
                        first.error = error;
                        self.pause = (self.pause * 2).min(RETRY_MAX);
                        break;
                    }
                    outcome => {
                        let end = if outcome.is_ok() { WaitEnd::Written } else { WaitEnd::Refused };
                        if let Some(tag) = self.take_first(end).map(|first| first.tag) {
                            completions.push_back(Completion { tag, outcome: outcome.map(|()| Reply::Done) });
                        }
                        self.pause = RETRY_MIN;
                    }
                }
            }
            self.next = Instant::now() + self.pause.max(began.elapsed() * PAUSE_BY_ROUND);
        }
        let Some(limit) = self.limit() else { return };
        while self.writes.front().is_some_and(|first| first.since.elapsed() >= limit) {
            self.refuse_first(completions);
        }
    }

    /// Completes all waiting writes with their last error.
    pub fn refuse_all(&mut self, completions: &mut VecDeque<Completion<T>>) {
        while !self.writes.is_empty() {
            self.refuse_first(completions);
        }
    }

    /// Removes all waiting writes without completing them.
    pub fn drop_all(&mut self) {
        while self.take_first(WaitEnd::Dropped).is_some() {}
    }

    fn refuse_first(&mut self, completions: &mut VecDeque<Completion<T>>) {
        if let Some(Refused { tag, error, .. }) = self.take_first(WaitEnd::Refused) {
            completions.push_back(Completion { tag, outcome: Err(error) });
        }
    }

    fn take_first(&mut self, how: WaitEnd) -> Option<Refused<T>> {
        let first = self.writes.pop_front()?;
        self.memory -= first.change.memory();
        if let Some(space) = &self.space {
            space.end(first.change.length(), how);
        }
        Some(first)
    }
}

impl<T> Drop for WaitingWrites<T> {
    fn drop(&mut self) {
        self.drop_all();
    }
}
