//! Which operations may still use places that the map of an image gave them.
//!
//! Reads, and writes in place, go to places without a lock. Each enters the current epoch before it asks the map, and
//! holds it while it uses the answer. A thread that takes places away first changes the map, then ends the epoch, and
//! waits until that epoch is over:
//!
//! 1. An operation that can have been told of a place before the map changed holds the epoch that was ended, or an
//!    older one.
//! 2. An epoch is over when neither it nor an older one is held. So epochs end in order, and one operation that never
//!    ends keeps every later epoch from being over.
//!
//! Epochs are kept until they are over: one for each batch of places that waits ([`crate::retirement`]), and one for
//! each piece of long work.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Held by an operation while it uses places that the map gave it.
#[derive(Debug)]
pub(crate) struct Epoch;

/// The epochs of one image.
pub(crate) struct Epochs {
    current: Mutex<Arc<Epoch>>,
    ended: Mutex<Ended>,
}

#[derive(Default)]
struct Ended {
    /// Those that are not over, as far as that was looked at; the oldest first.
    held: VecDeque<Arc<Epoch>>,
    /// Epochs that were ended so far.
    count: u64,
}

impl Epochs {
    pub(crate) fn new() -> Self {
        Self { current: Mutex::new(Arc::new(Epoch)), ended: Mutex::default() }
    }

    /// Enters the current epoch. **Before** the map is asked.
    pub(crate) fn enter(&self) -> Arc<Epoch> {
        Arc::clone(&self.current.lock())
    }

    /// Ends the current epoch, begins the next, and returns the number of the one that ended.
    pub(crate) fn end(&self) -> u64 {
        let mut ended = self.ended.lock();
        let epoch = std::mem::replace(&mut *self.current.lock(), Arc::new(Epoch));
        ended.held.push_back(epoch);
        ended.count += 1;
        ended.count
    }

    /// Whether no operation holds epoch `number`, which was ended, or an older one.
    pub(crate) fn is_over(&self, number: u64) -> bool {
        let mut ended = self.ended.lock();
        // `get_mut` orders what the last holder did before what the caller does, unlike a look at the count.
        while ended.held.front_mut().is_some_and(|epoch| Arc::get_mut(epoch).is_some()) {
            ended.held.pop_front();
        }
        ended.count - ended.held.len() as u64 >= number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_over_when_it_and_all_before_it_are_left() {
        let epochs = Epochs::new();
        let first = epochs.end();
        assert!(epochs.is_over(first), "no operation was there");
        let old = epochs.enter();
        let second = epochs.end();
        let young = epochs.enter();
        let third = epochs.end();
        drop(young);
        assert!(epochs.is_over(first) && !epochs.is_over(second));
        assert!(!epochs.is_over(third), "an older operation is still there");
        let current = epochs.enter();
        drop(old);
        assert!(epochs.is_over(third), "the current epoch does not count");
        drop(current);
        assert!(epochs.ended.lock().held.is_empty());
    }
}
