//! Many threads at once: a reader that holds an epoch never reads another grain's bytes.

use super::super::check::Check;
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

/// An extent with one grain in the first of three tables. When `armed`, the next read of the second table first calls
/// `change`.
struct ChangedInCheck {
    layer: Arc<OnceLock<Hosted>>,
    armed: Arc<AtomicBool>,
}

/// The byte at which the last table of a [`ChangedInCheck`] begins.
const LAST: u64 = 2 * TABLE_ENTRIES as u64 * GRAIN;

impl ChangedInCheck {
    fn new(change: fn(&Hosted)) -> Self {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let inner = small(disk.directory().as_ref(), LAST + GRAIN, true);
        let layer = open(&inner, true, false).unwrap();
        layer.write(0, &[&[1; GRAIN as usize]]).unwrap();
        layer.close().unwrap();
        let start = u64::from(layer.tables.directories().named(1)[0]) * SECTOR;
        let (layer, armed): (Arc<OnceLock<Hosted>>, Arc<AtomicBool>) = Default::default();
        let seen = Arc::clone(&layer);
        let change = move || change(seen.get().unwrap());
        let file: Arc<dyn File> =
            Arc::new(ChangedInRead { inner, armed: Arc::clone(&armed), start, before: 0, change });
        let _ = layer.set(open(&file, true, false).unwrap());
        Self { layer, armed }
    }

    fn layer(&self) -> &Hosted {
        self.layer.get().unwrap()
    }

    /// The result of a check during which the change is made.
    fn check(&self) -> Check {
        self.armed.store(true, Ordering::SeqCst);
        let check = self.layer().check().unwrap();
        assert!(!self.armed.load(Ordering::SeqCst), "the check did not read the second table");
        check
    }
}

/// Between the check's reads of two tables, a grain of the first table is freed, and one of the last table is written.
#[test]
fn a_check_finds_no_place_twice_because_it_is_used_again_meanwhile() {
    let changed = ChangedInCheck::new(|layer| {
        layer.zero(0..GRAIN, false).unwrap();
        layer.flush().unwrap();
        layer.write(LAST, &[&[2; GRAIN as usize]]).unwrap();
    });
    let check = changed.check();
    assert!(check.is_sound(), "{check:?}");
    changed.layer().flush().unwrap();
    let free = changed.layer().writer.as_ref().unwrap().space.free();
    assert_eq!(free, GRAIN / SECTOR, "the check still holds its epoch");
}

/// Between the reads of two tables, a grain of the first table is appended to the file.
#[test]
fn data_written_during_a_check_is_not_counted_as_dead() {
    let changed = ChangedInCheck::new(|layer| layer.write(GRAIN, &[&[2; GRAIN as usize]]).unwrap());
    let dead = changed.layer().check().unwrap().dead;
    assert_eq!(changed.check().dead, dead);
    assert_eq!(changed.layer().usage().unwrap().mapped, 2 * GRAIN);
}
