//! Dead space is found and freed while other threads read and write.

use super::*;
use crate::model::{Random, sector_bytes, stamps};
use crate::proving::failing_at_a_flush;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use testkit::steps;
use work::NoProgress;

const CAPACITY: u64 = 20 * 4096;

fn image(grain: u32) -> (SimulatedDisk, VmfsSparse) {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions { capacity: CAPACITY * SECTOR, grain_sectors: grain }).unwrap();
    (disk, VmfsSparse::open(file, &OpenOptions::writing("image")).unwrap())
}

fn write(layer: &VmfsSparse, lba: u64, count: u64, stamp: u64) {
    let bytes: Vec<u8> = (lba..lba + count).flat_map(|lba| sector_bytes(lba, stamp)).collect();
    layer.write(lba * SECTOR, &[&bytes]).unwrap();
}

/// Allocates space that no table names.
fn waste(layer: &VmfsSparse, sectors: u64) {
    let mut space = layer.writer().unwrap().space.lock();
    space.take(layer.file.file().as_ref(), sectors, 0).unwrap();
    layer.tables.raise_limit(space.free());
}

fn expect(layer: &VmfsSparse, model: &[u64]) {
    assert!(stamps(layer, 0..model.len() as u64).unwrap() == model);
}

/// Blocks all over the disk, with dead space before, between and after them.
fn scattered(layer: &VmfsSparse, grain: u64) -> Vec<u64> {
    let mut random = Random::new(9);
    let mut model = vec![0; CAPACITY as usize];
    for stamp in 2..600 {
        let lba = random.below(CAPACITY / 24) * 24;
        let count = grain.max(8).min(CAPACITY - lba) / grain * grain;
        waste(layer, 8 * random.below(12));
        write(layer, lba, count, stamp);
        model[lba as usize..(lba + count) as usize].fill(stamp);
    }
    model
}

#[test]
fn all_dead_space_is_returned() {
    for grain in [1, 8, 3] {
        let (disk, layer) = image(grain);
        let model = scattered(&layer, u64::from(grain));
        let before = layer.usage().unwrap();
        assert!(before.dead > before.mapped);
        let shrunk = layer.shrink(&NoProgress).unwrap();
        let after = layer.usage().unwrap();
        assert_eq!(after.mapped, before.mapped);
        assert_eq!(shrunk.after, layer.writer().unwrap().space.lock().free() * SECTOR);
        assert!(after.dead * 100 <= before.dead, "{} of {} dead bytes are left", after.dead, before.dead);
        assert!(layer.check().unwrap().problems.is_empty());
        expect(&layer, &model);
        let shrunk = layer.shrink(&NoProgress).unwrap();
        assert_eq!(shrunk.moved, 0, "a second shrink moves nothing");
        layer.close().unwrap();
        let file = disk.directory().open("image", IoMode::Buffered).unwrap();
        assert_eq!(file.len().unwrap(), shrunk.after);
        let layer = VmfsSparse::open(file, &OpenOptions::reading("image")).unwrap();
        expect(&layer, &model);
    }
}

#[test]
fn a_cancelled_shrink_keeps_its_completed_work() {
    let (_disk, layer) = image(1);
    let model = scattered(&layer, 1);
    let stop = steps(|done, _| done < 64 << 10);
    let error = layer.shrink(&stop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    expect(&layer, &model);
    assert!(layer.check().unwrap().problems.is_empty());
    layer.shrink(&NoProgress).unwrap();
    expect(&layer, &model);
}

#[test]
fn locations_are_not_reused_while_a_reader_holds_them() {
    let (_disk, layer) = image(1);
    let model = scattered(&layer, 1);
    let before = layer.file.file().len().unwrap();
    let epoch = layer.epoch();
    let mut extents = Vec::new();
    layer.map(0..CAPACITY * SECTOR, usize::MAX, &mut extents).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let shrinking = scope.spawn(|| {
            let shrunk = layer.shrink(&NoProgress).unwrap();
            done.store(true, Ordering::SeqCst);
            shrunk
        });
        std::thread::sleep(Duration::from_millis(100));
        // Writes continue, and must not overwrite the locations in the old lookup result.
        for stamp in 1000..1100u64 {
            let lba = (stamp * 7919 % (CAPACITY / 24)) * 24 + 8;
            write(&layer, lba, 8, stamp);
        }
        assert!(!done.load(Ordering::SeqCst));
        assert!(layer.file.file().len().unwrap() >= before);
        for extent in &extents {
            let Content::Data { offset, .. } = extent.content else { continue };
            let mut bytes = vec![0; extent.length as usize];
            layer.file.read_at(&mut bytes, offset).unwrap();
            for (lba, sector) in (extent.start / SECTOR..).zip(bytes.chunks(512)) {
                assert!(sector == sector_bytes(lba, model[lba as usize]), "sector {lba}");
            }
        }
        drop(epoch);
        assert!(shrinking.join().unwrap().after < before);
    });
    assert!(layer.check().unwrap().problems.is_empty());
}

#[test]
fn an_image_shrinks_during_writes() {
    let (_disk, layer) = image(1);
    let mut model = scattered(&layer, 1);
    let before = layer.usage().unwrap();
    let over = AtomicBool::new(false);
    let layer_shared = &layer;
    let (model, shrunk) = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut random = Random::new(5);
            let mut stamp = 10_000;
            while !over.load(Ordering::SeqCst) {
                stamp += 1;
                let lba = random.below(CAPACITY / 8) * 8;
                write(layer_shared, lba, 8, stamp);
                model[lba as usize..lba as usize + 8].fill(stamp);
                if stamp % 50 == 0 {
                    layer_shared.flush().unwrap();
                }
                std::thread::yield_now();
            }
            model
        });
        let shrunk = layer.shrink(&NoProgress).unwrap();
        over.store(true, Ordering::SeqCst);
        (writing.join().unwrap(), shrunk)
    });
    expect(&layer, &model);
    assert!(layer.check().unwrap().problems.is_empty());
    let again = layer.shrink(&NoProgress).unwrap();
    expect(&layer, &model);
    assert!(shrunk.moved > 0 && again.after <= shrunk.before.max(again.before));
    assert!(layer.usage().unwrap().dead * 100 <= before.dead);
}

#[test]
fn a_redo_log_stops_if_the_last_flush_of_a_shrink_fails() {
    let attempt = |fails_at: u32| {
        let count = Arc::new(AtomicU32::new(0));
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let inner = disk.directory().create("image", IoMode::Buffered).unwrap();
        let file = failing_at_a_flush(inner, Arc::clone(&count), fails_at);
        let options = CreateOptions { capacity: CAPACITY * SECTOR, grain_sectors: 1 };
        create(Arc::clone(&file), "image", &options).unwrap();
        let layer = VmfsSparse::open(file, &OpenOptions::writing("image")).unwrap();
        scattered(&layer, 1);
        let shrunk = layer.shrink(&NoProgress);
        (layer, shrunk, count.load(Ordering::SeqCst))
    };
    let (_, shrunk, flushes) = attempt(0);
    assert!(shrunk.unwrap().moved > 0);
    let (layer, shrunk, _) = attempt(flushes);
    assert_eq!(shrunk.unwrap_err().kind(), ErrorKind::Io);
    assert!(layer.has_stopped());
    assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Stopped, "writes before the shrink may be lost");
}
