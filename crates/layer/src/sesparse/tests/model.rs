//! Random histories on a layer, compared with a plain model.

use super::*;
use crate::ErrorKind;

fn history(seed: u64, capacity: u64, slots: &[u64], steps: u64) {
    let mut random = Random(seed);
    let disk = simulated(seed);
    let mode = if seed.is_multiple_of(2) { IoMode::Buffered } else { IoMode::Direct };
    let punch = [None, Some(GRAIN), Some(16 * GRAIN)][random.below(3) as usize];
    let options = Options { punch, cache: 0, ..writing() };
    let mut layer = create(&disk, mode, capacity, options);
    let mut model = Model::default();
    let mut epochs = Vec::new();
    for _ in 0..steps {
        match random.below(100) {
            0..70 => {
                let operation = Operation::draw(&mut random, slots, 200);
                operation.apply(&layer).unwrap();
                model.set(operation.first, operation.count, operation.stamp);
            }
            70..80 => layer.flush().unwrap(),
            80..84 => epochs.push(layer.epoch()),
            84..90 => epochs.clear(),
            90..92 => {
                epochs.clear();
                layer.wipe(random.once_in(2), &NoProgress).unwrap();
            }
            92..94 => {
                epochs.clear();
                layer.shrink(&NoProgress).unwrap();
            }
            94..96 => model.compare(&layer),
            96..98 => {
                layer.close().unwrap();
                let reader = open(&*disk.directory(), mode, Options::default()).unwrap();
                model.compare(&reader);
                let report = reader.check(false, &NoProgress).unwrap();
                // Grains that readers held at the close could not be freed; the next opening frees them.
                assert!(report.is_clean() || !epochs.is_empty() && !report.is_damaged(), "{report:?}");
                epochs.clear();
                layer = open(&*disk.directory(), mode, options).unwrap();
                assert_clean(&layer);
            }
            _ => assert_clean(&layer),
        }
    }
    model.compare(&layer);
    drop(epochs);
    layer.wipe(true, &NoProgress).unwrap();
    layer.shrink(&NoProgress).unwrap();
    model.compare(&layer);
    assert_clean(&layer);
    let live = model.grains.values().filter(|sectors| !matches!(sectors[0].last(), Some(0 | &ABSENT))).count() as u64;
    let usage = layer.usage().unwrap();
    assert_eq!((usage.mapped, usage.dead), (live * GRAIN, 0));
    let file = disk.directory().open(NAME, mode).unwrap();
    let tables = super::super::header::Layout::for_capacity(capacity / 512).grains.offset * 512;
    assert_eq!(file.len().unwrap(), tables + live * GRAIN, "shrunk to the live grains");
}

#[test]
fn random_histories_equal_a_model() {
    for seed in 0..60 {
        history(seed, 100 * MIB, &[0, 2, 6], 300);
    }
}

#[test]
fn more_tables_than_the_cache_holds() {
    let slots: Vec<u64> = (0..128).collect();
    for seed in 100..106 {
        history(seed, 2048 * MIB, &slots, 500);
    }
}

#[test]
fn random_writes_between_two_commits_are_adjacent() {
    let disk = simulated(5);
    let layer = create(&disk, IoMode::Buffered, 1024 * MIB, writing());
    let mut random = Random(9);
    let mut places = Vec::new();
    for _ in 0..500 {
        let grain = random.below(262_144);
        layer.write(grain * GRAIN, &[&stamped(1, 1)]).unwrap();
        let extents = map_all(&layer, grain * GRAIN, GRAIN).unwrap();
        if let Content::Data { offset, .. } = extents[0].content {
            places.push(offset);
        }
    }
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.last().unwrap() - places[0], (places.len() as u64 - 1) * GRAIN);
}

#[test]
fn a_sequential_stream_is_one_extent() {
    let disk = simulated(5);
    let layer = create(&disk, IoMode::Buffered, 1024 * MIB, writing());
    for part in 0..96 {
        layer.write(part * MIB / 2, &[&stamped(128, part + 1)]).unwrap();
    }
    let mut out = Vec::new();
    layer.map(0..48 * MIB, 100, &mut out).unwrap();
    assert_eq!(out.len(), 1, "{out:?}");
    let mut out = Vec::new();
    layer.map(512..1024 * MIB, 2, &mut out).unwrap();
    assert_eq!((out.len(), out[0].length, out[1].length), (2, 48 * MIB - 512, 976 * MIB));
}

#[test]
fn freed_locations_are_not_reused_before_readers_end() {
    let disk = simulated(6);
    let layer = create(&disk, IoMode::Buffered, 16 * MIB, writing());
    layer.write(0, &[&stamped(4096, 1)]).unwrap();
    let epoch = layer.epoch();
    let mut seen = Vec::new();
    layer.map(0..GRAIN, 1, &mut seen).unwrap();
    layer.zero(0..64 * GRAIN, false).unwrap();
    layer.flush().unwrap();
    layer.flush().unwrap();
    assert_eq!(layer.usage().unwrap().mapped, (4096 - 64) * GRAIN);
    // The disk is full: every other grain is live, and the retired grains wait for the end of the reader.
    let (layer, layer_ref) = (&layer, &layer);
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || layer_ref.write(0, &[&stamped(64, 2)]));
        std::thread::sleep(std::time::Duration::from_millis(50));
        let Content::Data { offset, .. } = seen[0].content else { panic!("{seen:?}") };
        let mut buffer = Buffer::zeroed(1);
        layer.file(0).unwrap().read_at(&mut buffer, offset).unwrap();
        assert_eq!(buffer[..8], 1u64.to_le_bytes());
        assert!(!writer.is_finished());
        drop(epoch);
        writer.join().unwrap().unwrap();
    });
    assert_eq!(stamps(layer, 0, 64 * GRAIN).unwrap(), [2; 512]);
}

/// A writer that waits for free grains must not hold an epoch that prevents their release.
#[test]
fn a_full_image_reuses_discarded_grains() {
    let disk = simulated(6);
    let layer = create(&disk, IoMode::Buffered, 16 * MIB, writing());
    layer.write(0, &[&stamped(4096, 1)]).unwrap();
    for round in 2..40 {
        let at = round * 7 * GRAIN;
        layer.zero(at..at + 3 * GRAIN, false).unwrap();
        layer.write(at, &[&stamped(3, round)]).unwrap();
        assert_eq!(stamps(&layer, at, 3 * GRAIN).unwrap(), [round; 24]);
    }
    assert_clean(&layer);
}

#[test]
fn a_full_file_system_fails_only_writes() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let disk = simulated(seed);
        let layer = create(&disk, IoMode::Buffered, 1024 * MIB, writing());
        let mut model = Model::default();
        disk.set_capacity(MIB + random.below(MIB));
        let mut refused = 0;
        for _ in 0..400 {
            let slots: Vec<u64> = (0..16).collect();
            let operation = Operation::draw(&mut random, &slots, 100);
            match operation.apply(&layer) {
                Ok(()) => model.set(operation.first, operation.count, operation.stamp),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                    refused += 1;
                    // After an error, any part of the operation may have been done.
                    for grain in operation.first..operation.first + operation.count {
                        model.grains.remove(&grain);
                    }
                }
            }
            if random.once_in(20) {
                layer.flush().unwrap();
            }
        }
        assert!(refused > 0);
        model.compare(&layer);
        disk.set_capacity(1 << 40);
        layer.write(0, &[&stamped(1000, 7)]).unwrap();
        layer.flush().unwrap();
        assert_clean(&layer);
    }
}

#[test]
fn a_failed_flush_stops_all_writes() {
    let disk = simulated(7);
    let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
    layer.write(0, &[&stamped(4, 1)]).unwrap();
    disk.fail_syncs(1);
    assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(layer.write(0, &[&stamped(4, 2)]).unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(stamps(&layer, 0, GRAIN).unwrap(), [1; 8]);
}

/// A page of tables, bitmap or backmap is first loaded from a hole of the file, then written by a commit, evicted, and
/// loaded again. The second load must read the file, although the layer has recorded the hole.
#[test]
fn evicted_pages_of_former_holes_are_read_back() {
    /// One grain in each of many table pages, more than fit into memory.
    const STEP: u64 = 512 * GRAIN;
    const COUNT: u64 = 6000;
    for shuffled in [false, true] {
        let disk = simulated(5);
        let layer = create(&disk, IoMode::Buffered, COUNT * STEP, Options { cache: 0, ..writing() });
        let mut order: Vec<u64> = (0..COUNT).collect();
        let mut random = Random(9);
        for index in (1..order.len()).rev().filter(|_| shuffled) {
            order.swap(index, random.below(index as u64 + 1) as usize);
        }
        for (number, place) in order.iter().enumerate() {
            layer.write(place * STEP, &[&stamped(1, place + 1)]).unwrap();
            if number % 50 == 49 {
                layer.flush().unwrap();
                let other = order[random.below(number as u64) as usize];
                assert_eq!(stamps(&layer, other * STEP, GRAIN).unwrap(), [other + 1; 8], "grain {other} of {number}");
            }
        }
        for place in 0..COUNT {
            assert_eq!(stamps(&layer, place * STEP, GRAIN).unwrap(), [place + 1; 8], "grain {place}");
        }
        layer.close().unwrap();
        let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
        assert_clean(&layer);
        assert_eq!(layer.usage().unwrap().mapped, COUNT * GRAIN);
    }
}
