//! Power cuts at any operation of writes, discards, flushes, wipe, shrink and close: flushed data is there, other
//! sectors are old or new, bitmap and backmap are right, and no space is lost after opening for writing.

use super::super::state::RETIRED_RUNS_MAX;
use super::*;
use crate::proving::killed_at_a_flush;
use std::sync::atomic::{AtomicU32, Ordering};

fn cuts(seed: u64, capacity: u64, slots: &[u64]) {
    let mut random = Random(seed);
    let mut disk = simulated(seed);
    let mode = if seed.is_multiple_of(2) { IoMode::Buffered } else { IoMode::Direct };
    let punch = [None, Some(GRAIN)][random.below(2) as usize];
    let options = Options { punch, cache: 0, ..writing() };
    let mut layer = create(&disk, mode, capacity, options);
    let mut model = Model::default();
    for round in 0..4 {
        disk.cut_after(disk.operations() + random.below(60 + round * 40));
        for _ in 0..1000 {
            if disk.is_off() || !step(&mut random, &layer, &mut model, slots) {
                break;
            }
        }
        drop(layer);
        let crashed = disk.crash();
        repair(&disk.crash(), mode, options, model.clone());
        disk = crashed;
        let reader = open(&*disk.directory(), mode, Options::default()).unwrap();
        assert!(reader.replayed().is_none());
        let mut seen = model.clone();
        seen.settle(&reader);
        let report = reader.check(false, &NoProgress).unwrap();
        let wrong = report.unallocated + report.misowned + report.uncounted_tables;
        assert!(!report.is_damaged() && wrong == 0, "seed {seed}: {report:?}");
        drop(reader);
        layer = open(&*disk.directory(), mode, options).unwrap();
        model.settle(&layer);
        assert_clean(&layer);
    }
}

/// Repairs the image after a cut: the repair must not count an effect of the cut as proof that a table is wrong.
fn repair(disk: &SimulatedDisk, mode: IoMode, options: Options, mut model: Model) {
    model.settle(&open(&*disk.directory(), mode, Options::default()).unwrap());
    let layer = open(&*disk.directory(), mode, Options { repair: true, ..options }).unwrap();
    let report = layer.check(true, &NoProgress).unwrap();
    assert!(!report.is_damaged() && report.proven.is_empty(), "{report:?}");
    model.settle(&layer);
    assert_clean(&layer);
}

/// One step; returns false when it has closed the layer.
fn step(random: &mut Random, layer: &SeSparse, model: &mut Model, slots: &[u64]) -> bool {
    match random.below(40) {
        0..28 => {
            let operation = Operation::draw(random, slots, 200);
            // The model permits the result of the operation even if it fails, because a part of it may have been done.
            model.set(operation.first, operation.count, operation.stamp);
            let _ = operation.apply(layer);
        }
        28..35 if layer.flush().is_ok() => model.flushed(),
        35 => {
            let _ = layer.wipe(true, &NoProgress);
        }
        36 => {
            let _ = layer.wipe(false, &NoProgress);
        }
        37..39 => {
            let _ = layer.shrink(&NoProgress);
        }
        _ if random.once_in(8) => {
            if layer.close().is_ok() {
                model.flushed();
            }
            return false;
        }
        _ => {}
    }
    true
}

#[test]
fn flushed_data_survives_power_cuts() {
    for seed in 0..700 {
        cuts(seed, 100 * MIB, &[0, 2, 6]);
    }
}

#[test]
fn flushed_data_of_many_tables_survives_power_cuts() {
    let slots: Vec<u64> = (0..128).collect();
    for seed in 1000..1060 {
        cuts(seed, 2048 * MIB, &slots);
    }
}

/// Shrink and wipe of a disk in which half the grains are dead, with a power cut at every operation.
#[test]
fn shrink_and_wipe_survive_a_power_cut_at_any_operation() {
    let build = |seed: u64| {
        let disk = simulated(seed);
        let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
        let mut model = Model::default();
        let mut random = Random(seed);
        for part in 0..40 {
            layer.write(part * 20 * GRAIN, &[&stamped(20, part + 1)]).unwrap();
            model.set(part * 20, 20, part + 1);
        }
        for _ in 0..200 {
            let grain = random.below(800);
            layer.zero(grain * GRAIN..(grain + 1) * GRAIN, false).unwrap();
            model.set(grain, 1, 0);
        }
        layer.flush().unwrap();
        model.flushed();
        (disk, layer, model)
    };
    for cut in 0.. {
        let (disk, layer, mut model) = build(cut % 3);
        disk.cut_after(disk.operations() + cut);
        let done = layer.wipe(true, &NoProgress).is_ok() && layer.shrink(&NoProgress).is_ok();
        drop(layer);
        let disk = disk.crash();
        let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
        model.settle(&layer);
        assert_clean(&layer);
        layer.wipe(false, &NoProgress).unwrap();
        layer.shrink(&NoProgress).unwrap();
        model.settle(&layer);
        assert_clean(&layer);
        assert_eq!(layer.usage().unwrap().dead, 0);
        if done {
            return;
        }
    }
}

/// A wipe closes the batch of retired grains before the next commit. Nevertheless the region of these grains is marked
/// before the tables drop the grains, so that the next opening finds them.
#[test]
fn grains_dropped_before_a_wipe_are_found_after_a_power_cut() {
    for cut in 0.. {
        let disk = simulated(cut);
        let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
        layer.write(0, &[&stamped(64, 1)]).unwrap();
        layer.close().unwrap();
        drop(layer);
        let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
        layer.zero(0..32 * GRAIN, false).unwrap();
        disk.cut_after(disk.operations() + cut);
        let done = layer.wipe(false, &NoProgress).is_ok();
        drop(layer);
        let disk = disk.crash();
        assert_clean(&open(&*disk.directory(), IoMode::Buffered, writing()).unwrap());
        if done {
            return;
        }
    }
}

/// While a reader is active, more grains are dropped than can wait to be freed. A wipe frees the others only after the
/// tables without them are durable: before that, a power cut restores the entries that name them.
#[test]
fn a_wipe_frees_dropped_grains_after_their_tables_are_durable() {
    const DROPPED: u64 = RETIRED_RUNS_MAX as u64 + 4;
    for cut in 0.. {
        let disk = simulated(1);
        let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
        layer.write(0, &[&stamped(2 * DROPPED, 1)]).unwrap();
        layer.flush().unwrap();
        let reader = layer.epoch();
        for block in 0..DROPPED {
            layer.zero(2 * block * GRAIN..(2 * block + 1) * GRAIN, false).unwrap();
        }
        drop(reader);
        let (mut steps_done, mut crashed) = (0, None);
        let watch = steps(|_, _| {
            // Scattered writes use the lowest free grains.
            layer.write((20_000 + 7 * steps_done) * GRAIN, &[&stamped(1, 9)]).unwrap();
            disk.directory().open(NAME, IoMode::Buffered).unwrap().sync().unwrap();
            if steps_done == cut {
                crashed = Some(disk.crash());
            }
            steps_done += 1;
            crashed.is_none()
        });
        let wiped = layer.wipe(false, &watch);
        let Some(crashed) = crashed else {
            wiped.unwrap();
            assert!(cut > 1);
            assert_clean(&layer);
            return;
        };
        let after = open(&*crashed.directory(), IoMode::Buffered, Options::default()).unwrap();
        for block in RETIRED_RUNS_MAX as u64..DROPPED {
            let found = stamps(&after, 2 * block * GRAIN, GRAIN).unwrap();
            assert!(found == [0; 8] || found == [1; 8], "block {}: {found:?}", 2 * block);
        }
    }
}

/// A process is killed after a commit has written the tables, and before their flush. The device may still have the
/// older tables when the next process uses the freed grains for other data and the power is cut.
#[test]
fn grains_freed_in_unflushed_tables_are_not_reused_before_a_flush() {
    for (seed, flushes) in (0..40).flat_map(|seed| [(seed, 0), (seed, 1)]) {
        let disk = simulated(seed);
        let layer = create(&disk, IoMode::Buffered, 64 * MIB, writing());
        layer.write(0, &[&stamped(64, 1)]).unwrap();
        layer.flush().unwrap();
        drop(layer);
        let left = Arc::new(AtomicU32::new(100));
        let file = disk.directory().open(NAME, IoMode::Buffered).unwrap();
        let layer = SeSparse::open(killed_at_a_flush(file, Arc::clone(&left)), NAME, writing()).unwrap();
        layer.zero(0..32 * GRAIN, false).unwrap();
        left.store(flushes, Ordering::SeqCst);
        let _ = layer.flush();
        drop(layer);
        let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
        layer.write(32 * MIB, &[&stamped(32, 2)]).unwrap();
        drop(layer);
        for _ in 0..4 {
            let layer = open(&*disk.crash().directory(), IoMode::Buffered, Options::default()).unwrap();
            let found = stamps(&layer, 0, 64 * GRAIN).unwrap();
            let (zeroed, kept) = found.split_at(32 * SECTORS as usize);
            assert!(zeroed.iter().all(|stamp| [0, 1].contains(stamp)), "seed {seed}: {zeroed:?}");
            assert!(kept.iter().all(|stamp| *stamp == 1), "seed {seed}: {kept:?}");
        }
    }
}
