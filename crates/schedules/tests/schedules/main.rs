//! Runs the real engine and its threads on the simulated medium, under a scheduler that decides every step of every
//! thread, with a power cut at any point. A seed determines all of it.
//!
//! `LAMINA_SCHEDULES` sets the number of schedules (10,000 by default; 0 runs without end), `LAMINA_SCHEDULE_FROM` the
//! first seed, `LAMINA_SCHEDULE` a single seed to repeat.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod client;
mod control;
mod model;
mod reduction;
mod schedule;
mod scheduler;
mod store;
mod verify;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use store::{BASES, Statistics};

/// The default number of schedules.
const SCHEDULES: u64 = 10_000;
/// How often progress is printed.
const TELL: Duration = Duration::from_secs(10);

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|error| panic!("{name}={value}: {error}")))
}

fn tell(run: u64, began: Instant, statistics: &Statistics) -> String {
    let of = |number: &AtomicU64| number.load(Ordering::Relaxed);
    format!(
        "{run} schedules in {:.1} s: {} choices, {} operations, {} flushes, {} catalog changes, {} checkpoints, {} blocks \
         compressed, {} deduplicated, up to {} not written in a schedule, {} power cuts on the way, {} during recovery",
        began.elapsed().as_secs_f64(),
        of(&statistics.steps),
        of(&statistics.operations),
        of(&statistics.flushes),
        of(&statistics.changes),
        of(&statistics.checkpoints),
        of(&statistics.packed),
        of(&statistics.shared),
        of(&statistics.mapped),
        of(&statistics.cuts),
        of(&statistics.cut_openings),
    )
}

#[test]
fn no_schedule_loses_acknowledged_data_or_damages_the_store() {
    let statistics = Arc::new(Statistics::default());
    let one = number("LAMINA_SCHEDULE");
    let first = one.or(number("LAMINA_SCHEDULE_FROM")).unwrap_or(0);
    let most = if one.is_some() { 1 } else { number("LAMINA_SCHEDULES").unwrap_or(SCHEDULES) };
    let end = if most == 0 { u64::MAX } else { first.saturating_add(most) };
    let bases = (0..BASES).map(|number| schedule::base(number, &statistics)).collect::<Result<Vec<_>, _>>();
    let bases = Arc::new(bases.unwrap_or_else(|violation| panic!("{violation}")));
    let (next, stop, failure) = (AtomicU64::new(first), AtomicBool::new(false), Mutex::new(None));
    let (began, told) = (Instant::now(), Mutex::new(Instant::now()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    if let Err(violation) = schedule::run(seed, &bases, &statistics) {
                        stop.store(true, Ordering::Relaxed);
                        failure.lock().unwrap().get_or_insert((seed, violation));
                    }
                    let mut told = told.lock().unwrap();
                    if told.elapsed() > TELL {
                        *told = Instant::now();
                        println!("seed {seed}, {}", tell(seed - first + 1, began, &statistics));
                    }
                }
            });
        }
    });
    if let Some((seed, violation)) = failure.lock().unwrap().take() {
        println!("schedule {seed}: {violation}");
        panic!("again: LAMINA_SCHEDULE={seed} cargo test -p lamina-schedules --test schedules");
    }
    println!("no violation: {}", tell(end - first, began, &statistics));
}

#[test]
fn a_seed_repeats_a_schedule() {
    let steps = |seed| {
        let statistics = Arc::new(Statistics::default());
        let bases = Arc::new(vec![schedule::base(0, &statistics).unwrap()]);
        schedule::run(seed, &bases, &statistics).unwrap();
        tell(1, Instant::now(), &statistics)
    };
    for seed in 0..20 {
        assert_eq!(steps(seed), steps(seed), "seed {seed}");
    }
}
