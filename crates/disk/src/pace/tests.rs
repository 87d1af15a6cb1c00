//! The rate controller with simulated time.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::NoProgress;

/// Lets `windows` measuring windows pass; returns the rate afterwards. `served` maps the rate of the work to the
/// numbers of timely and late requests in a window.
fn after(windows: u32, control: &mut Control, served: impl Fn(f64) -> (u64, u64)) -> f64 {
    let (mut requests, mut slow, mut moved) = (control.requests, control.slow, control.moved);
    let mut now = control.began;
    for _ in 0..windows {
        now += WINDOW;
        let (count, late) = served(control.rate);
        (requests, slow) = (requests + count, slow + late);
        moved += (control.rate.min(1e9) * WINDOW.as_secs_f64()) as u64;
        control.end_window(now, requests, slow, moved, false);
    }
    control.rate
}

#[test]
fn the_rate_settles_where_request_latency_reaches_the_target() {
    let limit = 300e6;
    let medium = |rate: f64| (100, if rate > limit { 5 } else { 0 });
    let mut control = Control::new(Instant::now());
    after(200, &mut control, medium);
    for _ in 0..100 {
        let rate = after(1, &mut control, medium);
        assert!((limit * DECREASE * 0.9..limit * (1.0 + 2.0 * INCREASE)).contains(&rate), "{rate}");
    }
}

#[test]
fn one_late_request_in_a_hundred_is_within_the_target() {
    let mut control = Control::new(Instant::now());
    let first = control.rate;
    assert!(after(1, &mut control, |_| (100, 1)) > first);
    let before = control.rate;
    assert!(after(1, &mut control, |_| (99, 1)) < before);
}

#[test]
fn with_a_slow_medium_background_work_keeps_its_minimum_rate() {
    let mut control = Control::new(Instant::now());
    assert!((after(1000, &mut control, |_| (10, 10)) - RATE_MIN).abs() < 1.0);
}

#[test]
fn the_rate_is_unlimited_while_there_are_no_requests() {
    let mut control = Control::new(Instant::now());
    assert!(after(1, &mut control, |_| (0, 0)) < RATE_MAX);
    assert!(after(1, &mut control, |_| (0, 0)) >= RATE_MAX, "new background work soon detects that there is no client");
    let rate = after(1, &mut control, |_| (10, 0));
    assert!((RATE_FIRST..=1e9).contains(&rate), "{rate}");
    assert!(after(8, &mut control, |_| (0, 0)) < RATE_MAX);
    assert!(after(2, &mut control, |_| (0, 0)) >= RATE_MAX);
}

#[test]
fn unanswered_requests_do_not_count_as_idle_time() {
    let mut control = Control::new(Instant::now());
    for _ in 0..40 {
        let (began, moved) = (control.began, control.moved + 10_000_000);
        control.end_window(began + WINDOW, 0, 0, moved, true);
    }
    assert!((control.rate - RATE_MIN).abs() < 1.0, "{}", control.rate);
    let foreground = Arc::new(Foreground::new(TARGET_DEFAULT));
    let waiting = [foreground.wait(), foreground.wait()];
    assert_eq!(foreground.waiting.load(Ordering::Relaxed), 2);
    drop(waiting);
    assert_eq!(foreground.waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn the_rate_is_not_raised_while_work_stays_below_it() {
    let mut control = Control::new(Instant::now());
    let first = control.rate;
    for _ in 0..10 {
        let (requests, moved) = (control.requests + 100, control.moved + 1000);
        control.end_window(control.began + WINDOW, requests, 0, moved, false);
    }
    assert!((control.rate - first).abs() < 1.0);
}

#[test]
fn background_operations_share_the_rate_and_requests_are_timed_only_meanwhile() {
    let foreground = Arc::new(Foreground::new(Duration::from_secs(3600)));
    assert!(foreground.arrived().is_none());
    let work = [Background::new(&NoProgress, &foreground), Background::new(&NoProgress, &foreground)];
    assert!(foreground.arrived().is_none(), "no background work has queried its rate");
    let alone = work[0].rate();
    let shared = work[1].rate();
    assert!(shared * 2 <= alone + 2 && foreground.pace().0 == 2);
    foreground.served(foreground.arrived().unwrap(), 3);
    assert_eq!((foreground.requests.load(Ordering::Relaxed), foreground.slow.load(Ordering::Relaxed)), (3, 0));
    drop(work);
    assert_eq!((foreground.pace().0, foreground.arrived()), (0, None));
    foreground.set_target(Duration::ZERO);
    assert_eq!(Background::new(&NoProgress, &foreground).rate(), 0);
}

#[test]
fn background_operations_share_the_rate_of_a_medium_that_is_behind() {
    let permitted = Arc::new(AtomicU64::new(0));
    let of_medium = Arc::clone(&permitted);
    let foreground = Foreground::new(Duration::ZERO).limited_by(move || of_medium.load(Ordering::Relaxed));
    let foreground = Arc::new(foreground);
    let work = [Background::new(&NoProgress, &foreground), Background::new(&NoProgress, &foreground)];
    assert_eq!((work[0].rate(), work[1].rate()), (0, 0));
    // Also without a target latency.
    permitted.store(3 << 20, Ordering::Relaxed);
    assert_eq!((work[0].rate(), work[1].rate()), (3 << 19, 3 << 19));
    foreground.set_target(TARGET_DEFAULT);
    assert_eq!((work[0].rate(), foreground.pace()), (3 << 19, (2, 3 << 20)));
}
