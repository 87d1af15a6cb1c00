//! Epochs: which operations may still use file locations that they looked up in the map of an image.
//!
//! Reads, and writes in place, access file locations without a lock. Each enters the current epoch before it looks up
//! the map, and holds the epoch while it uses the result. A thread that removes locations from the map first changes
//! the map, then ends the epoch, and waits until that epoch is over:
//!
//! 1. An operation that can have looked up a location before the map changed holds the ended epoch, or an older one.
//! 2. An epoch is over when no operation holds it or an older one. So epochs are over in their order, and an operation
//!    that never ends keeps all later epochs from being over.
//!
//! Epochs are kept until they are over: one for each batch of retired locations ([`crate::retirement`]), and one for
//! each long operation.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Held by an operation while it uses file locations from the map.
#[derive(Debug)]
pub(crate) struct Epoch;

/// The epochs of one image.
pub(crate) struct Epochs {
    current: Mutex<Arc<Epoch>>,
    ended: Mutex<Ended>,
}

#[derive(Default)]
struct Ended {
    /// Epochs that were not over when last checked, oldest first.
    held: VecDeque<Arc<Epoch>>,
    /// The number of epochs ended so far.
    count: u64,
}

impl Epochs {
    pub(crate) fn new() -> Self {
        Self { current: Mutex::new(Arc::new(Epoch)), ended: Mutex::default() }
    }

    /// Enters the current epoch. To be called **before** the map is looked up.
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

    /// Whether no operation holds the ended epoch `number` or an older one.
    pub(crate) fn is_over(&self, number: u64) -> bool {
        let mut ended = self.ended.lock();
        // `get_mut` orders the last holder's accesses before the caller's; reading the count would not.
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
    fn an_epoch_is_over_when_no_operation_holds_it_or_an_older_one() {
        let epochs = Epochs::new();
        let first = epochs.end();
        assert!(epochs.is_over(first), "no operation was running");
        let old = epochs.enter();
        let second = epochs.end();
        let young = epochs.enter();
        let third = epochs.end();
        drop(young);
        assert!(epochs.is_over(first) && !epochs.is_over(second));
        assert!(!epochs.is_over(third), "an older operation is still running");
        let current = epochs.enter();
        drop(old);
        assert!(epochs.is_over(third), "the current epoch does not count");
        drop(current);
        assert!(epochs.ended.lock().held.is_empty());
    }
}
