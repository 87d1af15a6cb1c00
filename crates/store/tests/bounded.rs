//! Datastores with a small ring, a small cache and more metadata than either can hold. No operation is refused because
//! of that: at run time, after a crash, or on a datastore of an earlier version.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use checksums::checksum;
use error::ErrorKind;
use std::collections::BTreeMap;
use std::sync::Arc;
use store::catalog::Provisioning;
use store::engine::{BulkWriter, CheckOptions, IMAGES_FILE, InitParameters, JOURNAL_FILE, NewDisk, NewSnapshot};
use store::journal::{BatchKind, Journal, Operation, Place, Writer};
use store::space::Run;
use store::{Engine, EngineOptions};

const RING: u64 = 4 << 20;
const UUID: [u8; 16] = *b"fedcba9876543210";
const TIB: u64 = 1 << 40;
const GIB_BLOCKS: u64 = (1 << 30) / BLOCK_SIZE as u64;

fn options(threads: bool) -> EngineOptions {
    EngineOptions { metadata_cache: 1 << 20, write_buffer: 4 << 20, threads, ..EngineOptions::default() }
}

fn disk(capacity: u64) -> SimulatedDisk {
    let options = SimulatedOptions { capacity, reorder: false, ..SimulatedOptions::default() };
    let disk = SimulatedDisk::new(3, options);
    Engine::init(&disk.directory(), InitParameters { uuid: UUID, journal_size: RING }).unwrap();
    disk
}

fn open(disk: &SimulatedDisk, threads: bool) -> Arc<Engine> {
    Engine::open(disk.directory(), options(threads)).unwrap()
}

fn create(engine: &Engine, name: &str, capacity: u64, provisioning: Provisioning) -> u64 {
    let new = NewDisk { name: name.into(), capacity, provisioning, uuid: UUID, incomplete: false };
    engine.create_disk(new).unwrap()
}

fn write(engine: &Engine, disk: u64, logical: u64, value: u64) {
    let mut buffer = Buffer::zeroed(1);
    buffer[..8].copy_from_slice(&value.to_le_bytes());
    engine.write_blocks(&engine.head(disk), logical, SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE)).unwrap();
}

fn value(engine: &Engine, disk: u64, logical: u64) -> u64 {
    let head = engine.head(disk);
    let block = engine.read_blocks("disk", logical..logical + 1, &|range| engine.plan_head(&head, range)).unwrap();
    u64::from_le_bytes(block[..8].try_into().unwrap())
}

fn is_whole(engine: &Engine) {
    let report = engine.check(CheckOptions { data: false, repair: false }, &|_, _| true).unwrap();
    assert_eq!((report.findings, report.leaked), (vec![], 0));
}

/// Waits until all background work is done.
fn settle(engine: &Engine) {
    if engine.options().threads {
        let began = std::time::Instant::now();
        while engine.with_catalog(|catalog| catalog.first_trash().is_some()) {
            assert!(began.elapsed().as_secs() < 300, "a deleted tree is still not dropped");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    } else {
        while engine.pump().unwrap() {}
    }
    engine.flush().unwrap();
}

/// The logical block of write `i`: scattered over a disk of 16 TiB.
fn scattered(i: u64) -> u64 {
    i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (16 * TIB / BLOCK_SIZE as u64)
}

fn compare(engine: &Engine, disk: u64, model: &BTreeMap<u64, u64>) {
    for (logical, expected) in model.iter().step_by(7) {
        assert_eq!(value(engine, disk, *logical), *expected, "block {logical}");
    }
}

fn writes_all_over_a_large_disk(threads: bool) {
    const WRITES: u64 = 40_000;
    let mut disk = disk(1 << 40);
    let mut engine = open(&disk, threads);
    let vm = create(&engine, "vm", 16 * TIB, Provisioning::Thin);
    let mut model = BTreeMap::new();
    for round in 0..3 {
        for i in 0..WRITES {
            // In later rounds half of the writes overwrite earlier blocks.
            let logical = scattered(i + round * WRITES / 2);
            write(&engine, vm, logical, i + round);
            model.insert(logical, i + round);
            if i % 4999 == 0 {
                engine.flush().unwrap();
            }
        }
        if round == 1 {
            // After the snapshot each write copies its path, which adds references to all blocks below the copies.
            let snapshot = NewSnapshot { disk: vm, name: "all".into(), uuid: UUID, incomplete: false };
            engine.snapshot(&[snapshot]).unwrap();
        }
        engine.flush().unwrap();
        if round == 1 {
            disk = disk.crash();
        } else {
            engine.close().unwrap();
        }
        drop(engine);
        engine = open(&disk, threads);
        compare(&engine, vm, &model);
    }
    assert!(model.len() as u64 > WRITES);
    is_whole(&engine);
    engine.delete_disk(vm, &[]).unwrap();
    settle(&engine);
    assert_eq!(engine.counts().data.used, 0);
    is_whole(&engine);
    engine.close().unwrap();
}

#[test]
fn writes_over_a_large_disk_fit_the_journal() {
    writes_all_over_a_large_disk(false);
}

#[test]
fn writes_over_a_large_disk_fit_the_journal_with_threads() {
    writes_all_over_a_large_disk(true);
}

fn large_disks_go(threads: bool) {
    let blocks = 12 * GIB_BLOCKS;
    let disk = disk(1 << 40);
    let engine = open(&disk, threads);
    let ids = ["deleted", "discarded", "other"].map(|name| {
        let id = create(&engine, name, blocks * BLOCK_SIZE as u64, Provisioning::ZeroedThick);
        if name != "other" {
            BulkWriter::new(&engine, id).reserve(0..blocks).unwrap();
        }
        id
    });
    for i in 0..2000 {
        write(&engine, ids[1], i * 1511 % blocks, i + 1);
    }
    engine.flush().unwrap();
    assert_eq!(engine.counts().data.used, 2 * blocks);
    // A discard is visible as a whole at once, although it enters the map in steps, and is durable after the next
    // flush.
    engine.discard_blocks(&engine.head(ids[1]), 1..blocks).unwrap();
    write(&engine, ids[1], 777, 4);
    write(&engine, ids[2], 5, 6);
    for i in 1..2000 {
        let logical = i * 1511 % blocks;
        assert_eq!(value(&engine, ids[1], logical), if logical == 777 { 4 } else { 0 }, "block {logical}");
    }
    engine.flush().unwrap();
    engine.delete_disk(ids[0], &[]).unwrap();
    engine.flush().unwrap();
    drop(engine);
    let disk = disk.crash();
    let engine = open(&disk, threads);
    settle(&engine);
    assert_eq!((value(&engine, ids[1], 0), value(&engine, ids[1], 777), value(&engine, ids[2], 5)), (1, 4, 6));
    assert_eq!(value(&engine, ids[1], 1511), 0);
    assert_eq!(engine.counts().data.used, 3);
    is_whole(&engine);
    engine.close().unwrap();
}

#[test]
fn large_disks_are_deleted_and_discarded_in_steps() {
    large_disks_go(false);
}

#[test]
fn large_disks_are_deleted_and_discarded_in_steps_with_threads() {
    large_disks_go(true);
}

#[test]
fn a_discard_of_many_single_blocks_is_split_into_steps() {
    let disk = disk(1 << 40);
    let engine = open(&disk, false);
    let vm = create(&engine, "vm", 16 * TIB, Provisioning::Thin);
    for i in 0..30_000 {
        write(&engine, vm, scattered(i), i + 1);
    }
    engine.discard_blocks(&engine.head(vm), 0..16 * TIB / BLOCK_SIZE as u64).unwrap();
    write(&engine, vm, 3, 3);
    engine.flush().unwrap();
    // Zeroes both written and unmapped blocks. All of them are allocated afterwards.
    for i in 0..200 {
        write(&engine, vm, 2 * i, i + 1);
    }
    engine.zero_blocks(&engine.head(vm), 0..40_000).unwrap();
    engine.flush().unwrap();
    drop(engine);
    let engine = open(&disk, false);
    assert_eq!((value(&engine, vm, 3), value(&engine, vm, 4), value(&engine, vm, scattered(1))), (0, 0, 0));
    assert_eq!(engine.counts().data.used, 40_000);
    is_whole(&engine);
}

#[test]
fn a_refused_snapshot_of_a_thick_disk_does_not_affect_other_requests() {
    let blocks = 8 * GIB_BLOCKS;
    let disk = disk(11 << 30);
    let engine = open(&disk, false);
    let thick = create(&engine, "thick", blocks * BLOCK_SIZE as u64, Provisioning::ZeroedThick);
    BulkWriter::new(&engine, thick).reserve(0..blocks).unwrap();
    write(&engine, thick, 9, 1);
    for _ in 0..2 {
        let snapshot = NewSnapshot { disk: thick, name: "s".into(), uuid: UUID, incomplete: false };
        assert_eq!(engine.snapshot(&[snapshot]).unwrap_err().kind(), ErrorKind::NoSpace);
    }
    // On a full file system, blocks of the thick disk can still be written.
    for i in 0..300 {
        write(&engine, thick, i * 331 % blocks, i);
    }
    engine.flush().unwrap();
    drop(engine);
    let engine = open(&disk, false);
    assert_eq!(value(&engine, thick, 331), 1);
    is_whole(&engine);
    engine.delete_disk(thick, &[]).unwrap();
    settle(&engine);
    engine.close().unwrap();
}

#[test]
fn checkpoints_are_made_earlier_if_the_images_file_cannot_grow() {
    let disk = disk(512 << 20);
    let engine = open(&disk, false);
    let vm = create(&engine, "vm", 16 * TIB, Provisioning::Thin);
    let mut model = BTreeMap::new();
    for i in 0..12_000 {
        write(&engine, vm, scattered(i), i);
    }
    engine.flush().unwrap();
    let room = disk.directory().room().unwrap();
    disk.set_capacity(room.total - room.available);
    let before = disk.directory().open(IMAGES_FILE, IoMode::Buffered).unwrap().len().unwrap();
    for round in 0..3 {
        for i in 0..12_000 {
            write(&engine, vm, scattered(i), i * round);
            model.insert(scattered(i), i * round);
        }
        engine.flush().unwrap();
    }
    let file = disk.directory().open(IMAGES_FILE, IoMode::Buffered).unwrap();
    assert_eq!(file.len().unwrap(), before);
    drop(engine);
    let engine = open(&disk, false);
    compare(&engine, vm, &model);
    is_whole(&engine);
}

/// Cuts the power after every few operations of recovery, and in each following recovery, then lets recovery end.
#[test]
fn recovery_succeeds_after_repeated_power_cuts() {
    let disk = disk(1 << 40);
    let engine = open(&disk, false);
    let vm = create(&engine, "vm", 16 * TIB, Provisioning::Thin);
    let mut model = BTreeMap::new();
    for i in 0..6000 {
        write(&engine, vm, scattered(i), i + 1);
        model.insert(scattered(i), i + 1);
    }
    engine.flush().unwrap();
    let snapshot = NewSnapshot { disk: vm, name: "s".into(), uuid: UUID, incomplete: false };
    engine.snapshot(&[snapshot]).unwrap();
    for i in 0..300 {
        write(&engine, vm, scattered(i), i + 9);
        model.insert(scattered(i), i + 9);
    }
    engine.flush().unwrap();
    drop(engine);
    let whole = disk.crash();
    let operations = {
        let disk = whole.crash();
        drop(open(&disk, false));
        disk.operations()
    };
    assert!(operations > 10, "recovery took {operations} operations only");
    for first in 0..operations.min(400) {
        let mut disk = whole.crash();
        for again in 0..3 {
            disk.cut_after(disk.operations() + (first + 5 * again) % operations);
            let opened = Engine::open(disk.directory(), options(false));
            assert!(opened.is_err() || !disk.is_off());
            drop(opened);
            disk = disk.crash();
        }
        let engine = open(&disk, false);
        if first % 8 == 0 {
            compare(&engine, vm, &model);
            is_whole(&engine);
        }
    }
}

/// A datastore of version 1 with a ring full of operations that change more pages than the ring has room for. Version 1
/// could neither continue with this datastore nor open it.
#[test]
fn a_datastore_of_version_1_with_a_full_journal_opens() {
    const OPERATIONS: u64 = 6000;
    let disk = disk(1 << 40);
    let engine = open(&disk, false);
    let vm = create(&engine, "vm", 16 * TIB, Provisioning::Thin);
    engine.close().unwrap();
    drop(engine);
    let directory = disk.directory();
    // Writes the superblock as version 1 did.
    let file = directory.open("superblock", IoMode::Buffered).unwrap();
    let copy = |number: u64| {
        let mut bytes = vec![0; BLOCK_SIZE];
        file.read_at(&mut bytes, number * BLOCK_SIZE as u64).unwrap();
        bytes
    };
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let newest = (0..2).max_by_key(|number| word(&copy(*number), 32)).unwrap();
    for number in 0..2 {
        let mut bytes = copy(number);
        bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
        bytes[112] = 0;
        bytes[144..].fill(0);
        bytes[12..16].fill(0);
        let sum = checksum(&bytes);
        bytes[12..16].copy_from_slice(&sum.to_le_bytes());
        file.write_at(&[&bytes], number * BLOCK_SIZE as u64, true).unwrap();
    }
    directory.remove(IMAGES_FILE).unwrap();
    let newest = copy(newest);
    let tail = Place { position: word(&newest, 48), sequence: word(&newest, 56) };
    // Fills the ring. Each operation maps a block with an entry on a table page of its own.
    let data = directory.create("data.0000", IoMode::Buffered).unwrap();
    data.set_len((OPERATIONS + 1) * 508 * BLOCK_SIZE as u64).unwrap();
    let salt = u64::from_le_bytes(UUID[..8].try_into().unwrap());
    let mut journal = Journal::new(directory.open(JOURNAL_FILE, IoMode::Buffered).unwrap(), RING, salt, tail);
    journal.resume(tail, word(&newest, 120) + 1);
    let zeros = checksum(&[0; BLOCK_SIZE]);
    for part in 0..OPERATIONS / 100 {
        let mut writer = Writer::default();
        for i in part * 100..(part + 1) * 100 {
            let run = Run { start: i * 508, blocks: 1 };
            data.reserve(run.start * BLOCK_SIZE as u64, BLOCK_SIZE as u64).unwrap();
            writer.push(&Operation::Backed { run, backed: true });
            writer.push(&Operation::Map { disk: vm, logical: scattered(i), run, checksums: vec![zeros] });
        }
        journal.append(BatchKind::Operations, &writer.finish()).unwrap();
    }
    while journal.used() < RING {
        let mut writer = Writer::default();
        let room = (RING - journal.used()).min(256 << 10) as usize;
        while writer.len() + 100 < room {
            writer.push(&Operation::Synced { position: 0 });
        }
        journal.append(BatchKind::Operations, &writer.finish()).unwrap();
    }
    assert_eq!(journal.used(), RING);
    for cut in [Some(1), Some(7), Some(30), Some(60), None] {
        let disk = disk.crash();
        if let Some(cut) = cut {
            disk.cut_after(disk.operations() + cut);
            drop(Engine::open(disk.directory(), options(false)));
        }
        let disk = disk.crash();
        for round in 0..2 {
            let engine = open(&disk, false);
            assert_eq!(engine.counts().data.used, OPERATIONS + round);
            write(&engine, vm, 1 + round, 1 + round);
            engine.flush().unwrap();
            assert_eq!(value(&engine, vm, 1), 1);
            is_whole(&engine);
            engine.close().unwrap();
        }
    }
}
