//! Many threads at once: a reader that holds an epoch never reads another grain's bytes.

use super::*;
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
