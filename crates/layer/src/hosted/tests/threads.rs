//! Many threads at once: a reader that holds an epoch never reads another grain's bytes.

use super::*;
use crate::proving::ChangedInRead;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

fn stamp(grain: u64, version: u64) -> Vec<u8> {
    [grain.to_le_bytes(), version.to_le_bytes()].concat().repeat(GRAIN as usize / 16)
}

#[test]
fn concurrent_readers_never_see_data_of_other_grains() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let count = 96;
    let file = small(disk.directory().as_ref(), count * GRAIN, true);
    drop_tables(file.as_ref(), |index| index % 2 == 0);
    let layer = open(&file, true, false).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3)
            .map(|number| {
                let layer = &layer;
                scope.spawn(move || {
                    let mut random = Random::new(number);
                    for version in 1..4000 {
                        let first = random.below(count);
                        let end = (first + 1 + random.below(5)).min(count);
                        match random.below(10) {
                            0..5 => {
                                let bytes: Vec<u8> = (first..end).flat_map(|grain| stamp(grain, version)).collect();
                                layer.write(first * GRAIN, &[&bytes]).unwrap();
                            }
                            5..8 => layer.zero(first * GRAIN..end * GRAIN, random.percent(20)).unwrap(),
                            _ => layer.flush().unwrap(),
                        }
                    }
                })
            })
            .collect();
        for number in 0..2 {
            let (layer, done) = (&layer, &done);
            scope.spawn(move || {
                let mut random = Random::new(100 + number);
                while !done.load(Ordering::Relaxed) {
                    let grain = random.below(count);
                    let bytes = read(layer, grain * GRAIN..(grain + 1) * GRAIN, None).unwrap();
                    for word in bytes.chunks(16) {
                        let of = u64::from_le_bytes(word[..8].try_into().unwrap());
                        assert!(of == grain || word == [0; 16], "grain {grain} holds bytes of grain {of}");
                    }
                }
            });
        }
        // A failed writer is joined too, so that the readers end and the panic is reported.
        let failed = writers.into_iter().map(|writer| writer.join().is_err()).fold(false, |a, b| a | b);
        done.store(true, Ordering::Relaxed);
        assert!(!failed);
    });
    layer.close().unwrap();
    let check = open(&file, true, false).unwrap().check().unwrap();
    assert!(check.is_sound() && check.dead == 0, "{check:?}");
}

/// Between the check's reads of two tables, a grain of the first table is freed, and one of the last table is written.
#[test]
fn a_check_finds_no_place_twice_because_it_is_used_again_meanwhile() {
    let last = 2 * u64::from(TABLE_ENTRIES) * GRAIN;
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = small(disk.directory().as_ref(), last + GRAIN, true);
    let layer = open(&file, true, false).unwrap();
    layer.write(0, &[&[1; GRAIN as usize]]).unwrap();
    layer.close().unwrap();
    let second = u64::from(layer.tables.directories().named(1)[0]) * SECTOR;

    let changed: Arc<OnceLock<Hosted>> = Arc::default();
    let armed = Arc::new(AtomicBool::new(false));
    let gate = {
        let (changed, armed) = (Arc::clone(&changed), Arc::clone(&armed));
        move |request| {
            if matches!(request, Request::Read(bytes) if bytes.start == second) && armed.swap(false, Ordering::SeqCst) {
                let layer = changed.get().unwrap();
                layer.zero(0..GRAIN, false).unwrap();
                layer.flush().unwrap();
                layer.write(last, &[&[2; GRAIN as usize]]).unwrap();
            }
            Ok(())
        }
    };
    let gated: Arc<dyn File> = Arc::new(Gated { inner: file, gate });
    let layer = changed.get_or_init(|| open(&gated, true, false).unwrap());
    armed.store(true, Ordering::SeqCst);
    let check = layer.check().unwrap();
    assert!(!armed.load(Ordering::SeqCst), "the check did not read the second table");
    assert!(check.is_sound(), "{check:?}");
    layer.flush().unwrap();
    assert_eq!(layer.writer.as_ref().unwrap().space.free(), GRAIN / SECTOR, "the check still holds its epoch");
}

/// Between the reads of two tables, a grain of the first table is appended to the file.
#[test]
fn data_written_during_a_check_is_not_counted_as_dead() {
    let last = 2 * u64::from(TABLE_ENTRIES) * GRAIN;
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = small(disk.directory().as_ref(), last + GRAIN, true);
    let layer = open(&file, true, false).unwrap();
    layer.write(0, &[&[1; GRAIN as usize]]).unwrap();
    layer.close().unwrap();
    let start = u64::from(layer.tables.directories().named(1)[0]) * SECTOR;
    let changed: Arc<OnceLock<Hosted>> = Arc::default();
    let armed = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&changed);
    let change = move || seen.get().unwrap().write(GRAIN, &[&[2; GRAIN as usize]]).unwrap();
    let file: Arc<dyn File> =
        Arc::new(ChangedInRead { inner: file, armed: Arc::clone(&armed), start, before: 0, change });
    let layer = changed.get_or_init(|| open(&file, true, false).unwrap());
    let dead = layer.check().unwrap().dead;
    armed.store(true, Ordering::SeqCst);
    assert_eq!(layer.check().unwrap().dead, dead);
    assert!(!armed.load(Ordering::SeqCst), "the check did not read the second table");
    assert_eq!(layer.usage().unwrap().mapped, 2 * GRAIN);
}
