//! Work at a changing rate, by one thread and by several.

#![allow(clippy::unwrap_used)]

use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A progress with a rate, until it is cancelled.
struct AtRate {
    rate: AtomicU64,
    cancelled: AtomicBool,
}

impl Progress for AtRate {
    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }
}

#[test]
fn a_throttle_keeps_to_its_rate_and_ends_on_request() {
    let at = AtRate { rate: AtomicU64::new(1 << 20), cancelled: AtomicBool::new(false) };
    let throttle = Throttle::new(&at);
    let begun = Instant::now();
    for _ in 0..10 {
        assert!(throttle.wait(20 << 10));
    }
    let taken = begun.elapsed().as_secs_f64();
    assert!(taken > 0.19, "200 KiB at 1 MiB/s took {taken} s");
    // At a rate of one byte per second the wait would not end.
    at.rate.store(1, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| throttle.wait(1 << 20));
        std::thread::sleep(Duration::from_millis(30));
        at.cancelled.store(true, Ordering::Relaxed);
        assert!(!waiting.join().unwrap());
    });
    at.rate.store(0, Ordering::Relaxed);
    assert!(Throttle::new(&at).wait(1 << 40));
}

#[test]
fn threads_share_a_rate() {
    let at = AtRate { rate: AtomicU64::new(1 << 20), cancelled: AtomicBool::new(false) };
    let throttle = Throttle::new(&at);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..10).for_each(|_| assert!(throttle.wait(5 << 10))));
        }
    });
    let taken = begun.elapsed().as_secs_f64();
    assert!(taken > 0.19, "200 KiB at 1 MiB/s took {taken} s");
}

/// Records the calls that it receives.
#[derive(Default)]
struct Notes {
    last: parking_lot::Mutex<(u64, u64)>,
    moved: AtomicU64,
    cancelled: AtomicBool,
}

impl Progress for Notes {
    fn update(&self, done: u64, total: u64) {
        *self.last.lock() = (done, total);
        self.cancelled.fetch_or(done >= 30, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[test]
fn progress_of_parts_is_reported_as_progress_of_the_whole() {
    let notes = Notes::default();
    assert!(Throttle::new(&notes).step(5, 10, 100).is_continue());
    assert_eq!((*notes.last.lock(), notes.moved.load(Ordering::Relaxed)), ((5, 10), 100));
    let second = WorkPart { whole: &notes, place: WorkPlace::Behind { before: 20, total: 40 } };
    assert!(Throttle::new(&second).step(1, 10, 1).is_continue());
    assert_eq!(*notes.last.lock(), (21, 40));
    let third = WorkPart { whole: &notes, place: WorkPlace::OneOf { index: 2, count: 4 } };
    third.update(1, 10);
    assert_eq!(*notes.last.lock(), (21, 40));
    // Cancelled work stops in the current step.
    assert!(Throttle::new(&second).step(10, 10, 1).is_break());
    assert!(Throttle::new(Unreported(&notes)).step(7, 7, 1).is_break());
    assert_eq!((*notes.last.lock(), notes.moved.load(Ordering::Relaxed)), ((30, 40), 103));
}

#[test]
fn the_lower_of_two_rates_applies() {
    assert_eq!([slower(0, 0), slower(5, 0), slower(0, 6), slower(5, 6)], [0, 5, 6, 5]);
    let limited = |rate| Throttled { progress: &NoProgress, rate }.rate();
    assert_eq!([0, 1, RATE_MIN, RATE_MIN + 7].map(limited), [0, RATE_MIN, RATE_MIN, RATE_MIN + 7]);
}
