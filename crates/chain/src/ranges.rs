//! Locks on byte ranges: one change of a range at a time.
//!
//! Requests are kept in order of arrival. A request proceeds once no earlier request overlaps it. So no request
//! starves, and a large request does not delay requests that do not overlap it. Each request locks one range, so there
//! is no deadlock. There are as many entries as writing threads, so a list is faster than a tree.

use parking_lot::{Condvar, Mutex};
use std::ops::Range;

struct Request {
    number: u64,
    range: Range<u64>,
}

#[derive(Default)]
struct RangesState {
    /// Held and waiting requests, in order of arrival.
    requests: Vec<Request>,
    next: u64,
    waiting: usize,
}

/// The locked ranges of a chain.
#[derive(Default)]
pub struct Ranges {
    state: Mutex<RangesState>,
    freed: Condvar,
}

/// The lock of one range, released when this value is dropped.
pub struct Held<'a> {
    ranges: &'a Ranges,
    number: u64,
}

impl Ranges {
    /// Locks `range`; waits for earlier requests that overlap it.
    pub fn lock(&self, range: Range<u64>) -> Held<'_> {
        let mut state = self.state.lock();
        let number = state.add(range);
        while state.is_blocked(number) {
            state.waiting += 1;
            self.freed.wait(&mut state);
            state.waiting -= 1;
        }
        Held { ranges: self, number }
    }

    /// Locks `range` if no held or waiting request overlaps it. Never waits: a long range that waited would make all
    /// later requests within it wait too.
    pub fn try_lock(&self, range: Range<u64>) -> Option<Held<'_>> {
        let mut state = self.state.lock();
        let taken = |other: &Request| other.range.start < range.end && range.start < other.range.end;
        if state.requests.iter().any(taken) {
            return None;
        }
        let number = state.add(range);
        Some(Held { ranges: self, number })
    }
}

impl RangesState {
    /// Appends a request; returns its number.
    fn add(&mut self, range: Range<u64>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.requests.push(Request { number, range });
        number
    }

    fn is_blocked(&self, number: u64) -> bool {
        let Some(at) = self.requests.iter().position(|request| request.number == number) else { return false };
        let (earlier, mine) = (&self.requests[..at], &self.requests[at].range);
        earlier.iter().any(|other| other.range.start < mine.end && mine.start < other.range.end)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut state = self.ranges.state.lock();
        state.requests.retain(|request| request.number != self.number);
        if state.waiting > 0 {
            self.ranges.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn overlapping_ranges_exclude_each_other() {
        let ranges = Ranges::default();
        let inside: Vec<AtomicU32> = (0..64).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (ranges, inside) = (&ranges, &inside);
                scope.spawn(move || {
                    let mut seed = thread + 1;
                    for _ in 0..20_000 {
                        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let start = (seed >> 33) % 60;
                        let end = start + 1 + (seed >> 50) % 4;
                        let held = ranges.lock(start..end);
                        for cell in &inside[start as usize..end as usize] {
                            assert_eq!(cell.fetch_add(1, Ordering::SeqCst), 0);
                        }
                        for cell in &inside[start as usize..end as usize] {
                            cell.fetch_sub(1, Ordering::SeqCst);
                        }
                        drop(held);
                    }
                });
            }
        });
        assert!(ranges.state.lock().requests.is_empty());
    }

    #[test]
    fn a_lock_without_waiting_is_refused_while_any_request_overlaps_it() {
        let ranges = Ranges::default();
        let held = ranges.lock(10..20);
        assert!(ranges.try_lock(0..11).is_none() && ranges.try_lock(19..u64::MAX).is_none());
        assert!(ranges.try_lock(12..13).is_none());
        let below = ranges.try_lock(0..10);
        assert!(below.is_some() && ranges.try_lock(20..u64::MAX).is_some());
        drop(held);
        assert!(ranges.try_lock(9..20).is_none());
        drop(below);
        assert!(ranges.try_lock(0..u64::MAX).is_some());
        assert!(ranges.state.lock().requests.is_empty());
    }
}
