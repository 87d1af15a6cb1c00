//! Random histories against a copy in memory, with the image reopened now and then.

use super::*;
use crate::proving::pattern;

fn history(seed: u64) {
    let mut random = Random::new(seed);
    let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
    let capacity = 30 * GRAIN + random.below(120) * GRAIN + random.below(8) * SECTOR;
    let zero_grains = random.percent(50);
    let parent = random.percent(60).then(|| pattern(seed ^ 1, capacity as usize));
    let file = small(disk.directory().as_ref(), capacity, zero_grains);
    if random.percent(50) {
        drop_tables(file.as_ref(), |_| random.percent(60));
    }
    let mut model = parent.clone().unwrap_or_else(|| vec![0; capacity as usize]);
    let mut layer = open(&file, true, parent.is_some()).unwrap();
    for step in 0..120 {
        let most = if random.percent(10) { 60 } else { 6 };
        let range = grains(&mut random, capacity, most);
        let span = range.start as usize..range.end as usize;
        let context = format!("seed {seed} step {step} {range:?}");
        match random.below(20) {
            0..9 => {
                let bytes = pattern(seed * 1000 + step, span.len());
                layer.write(range.start, &slices(&mut random, &bytes)).unwrap();
                model[span].copy_from_slice(&bytes);
            }
            9..13 => {
                layer.zero(range, random.percent(30)).unwrap();
                model[span].fill(0);
            }
            13..16 => layer.flush().unwrap(),
            16 => {
                layer.close().unwrap();
                let check = layer.check().unwrap();
                assert!(check.is_sound(), "{context}: {check:?}");
                assert!(!super::super::read_header(file.as_ref()).unwrap().unclean);
                let writable = open(&file, false, parent.is_some()).unwrap();
                assert_eq!(read_all(&writable, parent.as_deref()), model, "{context}");
                layer = open(&file, true, parent.is_some()).unwrap();
                assert_eq!(layer.check().unwrap().dead, 0, "{context}: opening for writing finds dead grains");
            }
            17 => {
                // The layer is dropped without closing: all flushed data must be in the file.
                layer.flush().unwrap();
                drop(layer);
                layer = open(&file, true, parent.is_some()).unwrap();
            }
            _ => {
                let found = read(&layer, range, parent.as_deref()).unwrap();
                assert_eq!(found, model[span], "{context}");
            }
        }
    }
    assert_eq!(read_all(&layer, parent.as_deref()), model, "seed {seed}");
    layer.flush().unwrap();
    layer.flush().unwrap();
    let usage = layer.usage().unwrap();
    assert_eq!(usage.dead, 0, "seed {seed}");
    assert!(usage.mapped <= capacity.next_multiple_of(GRAIN));
    layer.close().unwrap();
    assert!(file.len().unwrap() <= capacity.next_multiple_of(GRAIN) * 3 + (1 << 20), "dead grains are reused");
}

#[test]
fn reads_return_the_data_of_random_writes() {
    for seed in 0..400 {
        history(seed);
    }
}

#[test]
fn writes_fail_on_a_full_file_system_and_succeed_after_it_has_space() {
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        let capacity = 100 * GRAIN;
        let file = small(disk.directory().as_ref(), capacity, false);
        drop_tables(file.as_ref(), |_| random.percent(50));
        let layer = open(&file, true, false).unwrap();
        let mut model = vec![0; capacity as usize];
        for round in 0..20 {
            let room = disk.directory().room().unwrap();
            disk.set_capacity(room.total - room.available + random.below(12) * 4096);
            for step in 0..6 {
                let range = grains(&mut random, capacity, 9);
                let bytes = pattern(seed * 1000 + round * 10 + step, (range.end - range.start) as usize);
                let before = model[range.start as usize..range.end as usize].to_vec();
                match layer.write(range.start, &[&bytes]) {
                    Ok(()) => model[range.start as usize..range.end as usize].copy_from_slice(&bytes),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                        // Writes in place may have been made although the request failed: each sector is old or new.
                        let found = read(&layer, range.clone(), None).unwrap();
                        for (at, sector) in found.chunks(SECTOR as usize).enumerate() {
                            let span = at * SECTOR as usize..(at + 1) * SECTOR as usize;
                            assert!(sector == &before[span.clone()] || sector == &bytes[span]);
                        }
                        model[range.start as usize..range.end as usize].copy_from_slice(&found);
                    }
                }
            }
            disk.set_capacity(1 << 40);
            layer.flush().unwrap();
        }
        assert_eq!(read_all(&layer, None), model, "seed {seed}");
        layer.close().unwrap();
        let layer = open(&file, true, false).unwrap();
        assert_eq!(read_all(&layer, None), model, "seed {seed}");
        assert!(layer.check().unwrap().is_sound());
    }
}
