//! Snapshots at one point in time, of one disk and of several.

use crate::mock::{Manner, Mock, PATIENCE};
use chain::{Chain, Condition, Options};
use layer::Layer;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CAPACITY: u64 = 1 << 20;

fn disk(name: &str) -> Chain {
    let layer = Mock::new(Manner::new(CAPACITY, 4096));
    Chain::open(name, vec![layer as Arc<dyn Layer>], Options::default()).unwrap()
}

fn number(chain: &Chain, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    chain.read(offset, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Waits until a snapshot that another thread takes is in the chain, and returns the time.
fn wait_for_levels(chain: &Chain, levels: usize) -> Instant {
    let begun = Instant::now();
    while chain.keys().len() < levels {
        assert!(begun.elapsed() < PATIENCE, "no snapshot is taken while writes are under way");
        std::thread::sleep(Duration::from_millis(1));
    }
    Instant::now()
}

/// A chain of the levels below the newest `above` levels.
fn below(chain: &Chain, above: usize) -> Chain {
    let layers = chain.keys()[above..].iter().map(|key| chain.layer(*key).unwrap()).collect();
    Chain::open("below", layers, Options { read_only: true, ..Options::default() }).unwrap()
}

#[test]
fn a_snapshot_has_all_earlier_acknowledged_writes_and_no_later_ones() {
    let chain = disk("one");
    let (acknowledged, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut next = 1u64;
            while !stop.load(Ordering::Relaxed) {
                chain.write(512, &next.to_le_bytes()).unwrap();
                acknowledged.store(next, Ordering::SeqCst);
                next += 1;
            }
        });
        let mut longest = Duration::ZERO;
        for _ in 0..40 {
            let before = acknowledged.load(Ordering::SeqCst);
            let (_, pause) = chain.push(Mock::new(Manner::new(CAPACITY, 4096))).unwrap();
            let after = acknowledged.load(Ordering::SeqCst);
            longest = longest.max(pause);
            let snapshot = number(&below(&chain, 1), 512);
            // One write may be under way when the snapshot is taken.
            assert!((before..=after + 1).contains(&snapshot), "{before} {snapshot} {after}");
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(number(&below(&chain, 1), 512), snapshot, "a snapshot does not change");
        }
        stop.store(true, Ordering::Relaxed);
        println!("writers were delayed by at most {longest:?}");
    });
}

#[test]
fn a_slow_write_does_not_delay_other_writes() {
    let chain = disk("slow");
    let slow = Mock::new(Manner::new(CAPACITY, 4096));
    chain.push(slow.clone()).unwrap();
    slow.faults.writes.begin();
    std::thread::scope(|scope| {
        scope.spawn(|| chain.write(0, &[1; 4096]).unwrap());
        slow.faults.writes.wait_for(1);
        let pushing = scope.spawn(|| chain.push(Mock::new(Manner::new(CAPACITY, 4096))).unwrap());
        let shown = wait_for_levels(&chain, 3);
        let (ended, wait) = std::sync::mpsc::channel();
        let other = &chain;
        scope.spawn(move || {
            other.write(8192, &[2; 4096]).unwrap();
            ended.send(()).unwrap();
        });
        let other = wait.recv_timeout(PATIENCE);
        // Other writes wait for a small part of this time at most.
        std::thread::sleep(Duration::from_millis(300));
        let shown = shown.elapsed();
        slow.faults.writes.end();
        other.expect("the other write waits for the slow one");
        let (_, pause) = pushing.join().unwrap();
        assert!(pause < shown, "{pause:?}");
    });
    let mut out = [0; 8];
    below(&chain, 1).read(0, &mut out).unwrap();
    assert_eq!(out, [1; 8], "a write in progress goes below the snapshot");
    below(&chain, 1).read(8192, &mut out).unwrap();
    assert_eq!(out, [0; 8], "a later write goes above the snapshot");
}

#[test]
fn readers_hold_the_level_whose_writes_a_snapshot_found_in_flight() {
    let old = Mock::new(Manner { moves: true, ..Manner::new(CAPACITY, 4096) });
    let chain = Chain::open("moving", vec![old.clone() as Arc<dyn Layer>], Options::default()).unwrap();
    chain.write(0, &[1; 4096]).unwrap();
    chain.write(4096, &[2; 4096]).unwrap();
    let writes = &old.faults.writes;
    writes.begin();
    std::thread::scope(|scope| {
        // Two writes are under way when the snapshot is taken. The first frees a grain, the second allocates one.
        let first = scope.spawn(|| chain.write(0, &[3; 4096]).unwrap());
        writes.wait_for(1);
        let second = scope.spawn(|| chain.write(4096, &[4; 4096]).unwrap());
        writes.wait_for(2);
        scope.spawn(|| chain.push(Mock::new(Manner::new(CAPACITY, 4096))).unwrap());
        wait_for_levels(&chain, 2);
        // A plan made from the new levels, before either write ends.
        let plan = chain.plan(0, 4096).unwrap();
        writes.pass(1);
        first.join().unwrap();
        writes.end();
        second.join().unwrap();
        let mut bytes = [0xee; 4096];
        plan.parts[0].read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 4096]);
    });
}

#[test]
fn a_snapshot_of_several_disks_is_of_one_point_in_time() {
    let disks = [disk("a"), disk("b"), disk("c")];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Each number is written to one disk after the other, as a database writes its log before its data.
            let mut next = 1u64;
            while !stop.load(Ordering::Relaxed) {
                for disk in &disks {
                    disk.write(0, &next.to_le_bytes()).unwrap();
                }
                next += 1;
            }
        });
        for _ in 0..30 {
            let frozen: Vec<_> = disks.iter().map(|disk| disk.freeze().unwrap()).collect();
            for frozen in frozen {
                frozen.push(Mock::new(Manner::new(CAPACITY, 4096))).unwrap();
            }
            disks.iter().for_each(|disk| disk.flush().unwrap());
            let [a, b, c] = [0, 1, 2].map(|index| number(&below(&disks[index], 1), 0));
            assert!(a >= b && b >= c && a <= c + 1, "{a} {b} {c}");
            std::thread::sleep(Duration::from_millis(1));
        }
        // A freeze that ends without a push lets writes continue.
        drop(disks[0].freeze().unwrap());
        stop.store(true, Ordering::Relaxed);
    });
    assert!(disks.iter().all(|disk| disk.keys().len() == 31));
}

/// Levels are counted and looked up in one stack. If they were looked up in the next, the lowest would be left out.
#[test]
fn changes_and_the_status_are_complete_while_snapshots_are_taken() {
    for _ in 0..300 {
        let chain = disk("changes");
        let base = chain.keys()[0];
        chain.write(8192, &[1; 4096]).unwrap();
        chain.push(Mock::new(Manner::new(CAPACITY, 4096))).unwrap();
        chain.write(0, &[1; 4096]).unwrap();
        let (asked, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !asked.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                for _ in 0..8 {
                    chain.push_unflushed(Mock::new(Manner::new(CAPACITY, 4096))).unwrap();
                }
                stop.store(true, Ordering::SeqCst);
            });
            while !stop.load(Ordering::SeqCst) {
                let spans = chain.changed_above(base, 0, 4096, 1).unwrap();
                assert_eq!(spans[0].condition, Condition::Data);
                assert_eq!(chain.status(8192, 4096, 1).unwrap()[0].condition, Condition::Data);
                asked.store(true, Ordering::SeqCst);
            }
        });
    }
}
