//! Wipe and shrink: the space that they free, their cancellation, and their effect on guests.

use super::super::entry::{Entry, Grain, GrainRun};
use super::*;
use crate::ErrorKind;
use crate::proving::{Gated, Request, failing_at_a_flush};
use backend::local::{LocalDirectory, LocalQueues};
use backend::simulated::Fault;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// A disk of 64 MiB in which every second run was discarded, or overwritten with zeros.
fn half_dead(directory: &LocalDirectory, zeros: bool) -> SeSparse {
    let file = directory.create(NAME, IoMode::Buffered).unwrap();
    let layer = SeSparse::create(file, NAME, 256 * MIB, writing()).unwrap();
    for part in 0..64 {
        layer.write(part * MIB, &[&stamped(256, part + 1)]).unwrap();
    }
    let mut random = Random(5);
    for _ in 0..3000 {
        let at = random.below(64 * 256 - 4) * GRAIN;
        match zeros {
            true => layer.write(at, &[&stamped(4, 0)]).unwrap(),
            false => layer.zero(at..at + 4 * GRAIN, false).unwrap(),
        }
    }
    layer.flush().unwrap();
    layer
}

fn content(layer: &SeSparse) -> Vec<u64> {
    stamps(layer, 0, 64 * MIB).unwrap()
}

#[test]
fn dead_grains_return_to_the_file_system() {
    for zeros in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
        let layer = half_dead(&directory, zeros);
        let before = content(&layer);
        let live = before.iter().filter(|stamp| **stamp != 0).count() as u64 * 512;
        let dead = 64 * MIB - live;
        assert!(dead > 16 * MIB);
        let wiped = layer.wipe(true, &NoProgress).unwrap();
        assert_eq!((wiped.zeros > 0, wiped.unnamed), (zeros, 0));
        let usage = layer.usage().unwrap();
        assert_eq!((usage.mapped, usage.dead), (live, dead), "known before it is returned");
        let shrunk = layer.shrink(&NoProgress).unwrap();
        assert_eq!(shrunk.left, 0);
        assert!(shrunk.moved * GRAIN <= dead, "{shrunk:?}");
        let usage = layer.usage().unwrap();
        assert!(usage.dead * 100 <= dead, "{usage:?}");
        assert!(usage.allocated <= live + 2 * MIB, "{usage:?}, live {live}");
        assert!(content(&layer) == before);
        assert_clean(&layer);
    }
}

#[test]
fn wipe_and_shrink_can_be_stopped_and_continued() {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let layer = half_dead(&directory, true);
    let before = content(&layer);
    let mut stops = 0;
    for patience in 1.. {
        let patient = |mut left: u32| {
            steps(move |_, _| {
                left -= u32::from(left > 0);
                left > 0
            })
        };
        let mut stopped = false;
        let ends = [layer.wipe(true, &patient(patience * 3)).err(), layer.shrink(&patient(patience)).err()];
        for error in ends.into_iter().flatten() {
            assert_eq!(error.kind(), ErrorKind::Interrupted);
            stopped = true;
            stops += 1;
        }
        if !stopped {
            break;
        }
        if patience % 8 == 0 {
            assert!(content(&layer) == before);
            assert_clean(&layer);
        }
    }
    assert!(stops > 3);
    assert!(content(&layer) == before);
    assert_eq!(layer.usage().unwrap().dead, 0);
    assert_clean(&layer);
}

#[test]
fn a_second_wipe_or_shrink_is_refused() {
    let disk = simulated(1);
    let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
    layer.write(0, &[&stamped(9, 1)]).unwrap();
    let mut inner = None;
    let watch = steps(|_, _| {
        inner = layer.shrink(&NoProgress).err().map(|error| error.kind());
        true
    });
    layer.wipe(false, &watch).unwrap();
    assert_eq!(inner, Some(ErrorKind::Busy));
    let reader = open(&*disk.directory(), IoMode::Buffered, Options::default());
    assert_eq!(reader.unwrap().wipe(false, &NoProgress).unwrap_err().kind(), ErrorKind::ReadOnly);
}

#[test]
fn freed_runs_are_punched_if_requested() {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let file = directory.create(NAME, IoMode::Buffered).unwrap();
    let options = Options { punch: Some(64 << 10), ..writing() };
    let layer = SeSparse::create(file, NAME, 256 * MIB, options).unwrap();
    layer.write(0, &[&stamped(8192, 5)]).unwrap();
    layer.flush().unwrap();
    let full = layer.usage().unwrap().allocated;
    layer.zero(MIB..17 * MIB, false).unwrap();
    layer.flush().unwrap();
    let usage = layer.usage().unwrap();
    assert!(usage.allocated + 16 * MIB <= full + 64 * 1024, "{usage:?}, full {full}");
    assert!(usage.dead < MIB);
}

/// A punch only returns space to the file system: if it fails, the flush before it is durable all the same, and the
/// grains become free.
#[test]
fn a_failed_punch_fails_no_flush_and_loses_no_grains() {
    let disk = simulated(12);
    let layer = create(&disk, IoMode::Buffered, 64 * MIB, Options { punch: Some(GRAIN), ..writing() });
    layer.write(0, &[&stamped(64, 1)]).unwrap();
    layer.flush().unwrap();
    for first in [0, 32] {
        layer.zero(first * GRAIN..(first + 8) * GRAIN, false).unwrap();
        disk.fail_requests(Fault::Punch, 0, 1 - first / 32);
        layer.flush().unwrap();
    }
    layer.close().unwrap();
    let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
    assert_clean(&layer);
    assert_eq!(layer.usage().unwrap().mapped, 48 * GRAIN);
}

/// After a crash with many writes under way, opening for writing frees all lost grains, and the mark limits the search.
#[test]
fn only_marked_regions_are_recounted() {
    let disk = simulated(11);
    let layer = create(&disk, IoMode::Buffered, 1 << 40, writing());
    layer.write(0, &[&stamped(5000, 1)]).unwrap();
    layer.flush().unwrap();
    layer.write(1 << 35, &[&stamped(5000, 2)]).unwrap();
    layer.zero(0..MIB, false).unwrap();
    drop(layer);
    for _ in 0..20 {
        let disk = disk.crash();
        let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
        assert_clean(&layer);
        let found = stamps(&layer, MIB, 4 * MIB).unwrap();
        assert!(found.iter().all(|stamp| *stamp == 1));
    }
}

/// A guest writes in place between the copy of a grain and the change of its entry: only the old location has the
/// guest's data.
#[test]
fn a_grain_written_during_its_move_keeps_its_location() {
    let disk = simulated(12);
    let layer = create(&disk, IoMode::Buffered, 256 * MIB, writing());
    layer.write(0, &[&stamped(64, 1)]).unwrap();
    layer.zero(0..8 * GRAIN, false).unwrap();
    layer.flush().unwrap();
    let mut work = layer.begin_work(&NoProgress, "moving grains").unwrap();
    let (held, allocated) = layer.held(GrainRun { start: 0, count: 64 }).unwrap();
    assert_eq!((held.len(), allocated), (56, 56));
    let announced = layer.announce(&held, &mut work).unwrap();
    let copied = layer.read_grains(&held[..2]).unwrap();
    let written = u64::from(held[0].owner.entry) * GRAIN;
    layer.write(written, &[&stamped(1, 2)]).unwrap();
    let places = layer
        .settle(|state| {
            let free = state.space.lowest().unwrap();
            state.claim_run(GrainRun { start: free.start, count: 2 })
        })
        .unwrap();
    layer.write_places(places, &[&copied]).unwrap();
    assert!(!layer.repoint(held[0], Entry::Data(Grain(places.start))).unwrap());
    assert!(layer.repoint(held[1], Entry::Data(Grain(places.start + 1))).unwrap());
    layer.give_back(&[GrainRun { start: places.start, count: 1 }]);
    drop((announced, work));
    let found = stamps(&layer, 8 * GRAIN, 56 * GRAIN).unwrap();
    for (grain, sectors) in found.chunks(SECTORS as usize).enumerate() {
        let stamp = if (grain as u64 + 8) * GRAIN == written { 2 } else { 1 };
        assert!(sectors.iter().all(|sector| *sector == stamp), "grain {grain}");
    }
    layer.flush().unwrap();
    assert_clean(&layer);
}

/// Before a move of a grain is announced, the grain is freed. After it was copied, a guest writes the same part of the
/// disk, and gets the grain again: the entry names the grain as before, but the copy lacks the guest's data.
#[test]
fn a_grain_allocated_again_during_its_move_keeps_its_location() {
    let disk = simulated(13);
    let layer = create(&disk, IoMode::Buffered, 256 * MIB, writing());
    layer.write(0, &[&stamped(64, 1)]).unwrap();
    layer.zero(0..GRAIN, false).unwrap();
    layer.flush().unwrap();
    let mut work = layer.begin_work(&NoProgress, "moving grains").unwrap();
    let (held, _) = layer.held(GrainRun { start: 63, count: 1 }).unwrap();
    let last = 63 * GRAIN;
    assert_eq!((held.len(), u64::from(held[0].owner.entry) * GRAIN), (1, last));
    let place = layer.settle(|state| state.claim_run(GrainRun { start: 0, count: 1 })).unwrap();
    layer.zero(last..last + GRAIN, false).unwrap();
    layer.flush().unwrap();
    let announced = layer.announce(&held, &mut work).unwrap();
    let copied = layer.read_grains(&held).unwrap();
    layer.write(last, &[&stamped(1, 2)]).unwrap();
    assert_eq!(layer.held(GrainRun { start: 63, count: 1 }).unwrap().0, held, "another grain was allocated");
    layer.write_places(place, &[&copied]).unwrap();
    assert!(!layer.repoint(held[0], Entry::Data(Grain(place.start))).unwrap());
    layer.give_back(&[place]);
    drop((announced, work));
    assert_eq!(stamps(&layer, last, GRAIN).unwrap(), [2; SECTORS as usize]);
    layer.flush().unwrap();
    assert_clean(&layer);
}

#[test]
fn an_image_stops_if_the_last_flush_of_a_shrink_fails() {
    let attempt = |fails_at: u32| {
        let count = Arc::new(AtomicU32::new(0));
        let inner = simulated(14).directory().create(NAME, IoMode::Buffered).unwrap();
        let file = failing_at_a_flush(inner, Arc::clone(&count), fails_at);
        let layer = SeSparse::create(file, NAME, 64 * MIB, writing()).unwrap();
        layer.write(0, &[&stamped(64, 1)]).unwrap();
        layer.zero(0..8 * GRAIN, false).unwrap();
        layer.flush().unwrap();
        let shrunk = layer.shrink(&NoProgress);
        (layer, shrunk, count.load(Ordering::SeqCst))
    };
    let (_, shrunk, flushes) = attempt(0);
    assert!(shrunk.unwrap().cut > 0);
    let (layer, shrunk, _) = attempt(flushes);
    assert_eq!(shrunk.unwrap_err().kind(), ErrorKind::Io);
    assert!(layer.has_stopped());
    assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Stopped, "writes before the shrink may be lost");
}

/// Of two flushes at the same time, only one gets the report of lost writes.
#[test]
fn no_commit_flushes_beside_a_shrink() {
    let (made, beside): (Arc<OnceLock<SeSparse>>, Arc<AtomicU32>) = Default::default();
    let (seen, count) = (Arc::clone(&made), Arc::clone(&beside));
    let gate = move |request| {
        let is_free = || seen.get().is_some_and(|layer| layer.commits.try_turn().is_some());
        if matches!(request, Request::Sync) && is_free() {
            count.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    };
    let inner = simulated(15).directory().create(NAME, IoMode::Buffered).unwrap();
    let file = Arc::new(Gated { inner, gate });
    let layer = made.get_or_init(|| SeSparse::create(file, NAME, 64 * MIB, writing()).unwrap());
    layer.write(0, &[&stamped(64, 1)]).unwrap();
    layer.zero(0..8 * GRAIN, false).unwrap();
    layer.flush().unwrap();
    assert!(layer.shrink(&NoProgress).unwrap().cut > 0);
    assert_eq!(beside.load(Ordering::SeqCst), 0, "a commit may run at the same time");
}
