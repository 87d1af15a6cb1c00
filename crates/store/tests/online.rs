//! Concurrent work: checks during writes, and lookups that miss metadata beside lookups that do not.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use error::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use store::catalog::Provisioning;
use store::engine::{CheckOptions, InitParameters, NewDisk, NewSnapshot, Part, Report};
use store::pages::{HEADER_SIZE, PageFile, PageKey, sealed, verify};
use store::space::TABLE_ENTRIES;
use store::{Engine, EngineOptions};
use testkit::Random;

const RING: u64 = 4 << 20;
const BLOCKS: u64 = 6000;
const DATA_FILE: &str = "data.0000";

/// The smallest cache: 64 pages.
const SMALL: EngineOptions = EngineOptions {
    mode: IoMode::Buffered,
    metadata_cache: 0,
    write_buffer: 1 << 20,
    read_cache: 1 << 20,
    cache_plain: true,
    commit_interval: Duration::from_millis(50),
    write_through: true,
    threads: true,
};

fn disk() -> SimulatedDisk {
    let disk = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
    Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: RING }).unwrap();
    disk
}

fn new_disk(name: &str) -> NewDisk {
    NewDisk {
        name: name.into(),
        capacity: BLOCKS * BLOCK_SIZE as u64,
        provisioning: Provisioning::Thin,
        uuid: [1; 16],
        incomplete: false,
    }
}

fn write(engine: &Engine, disk: u64, logical: u64, blocks: usize, value: u64) {
    let mut buffer = Buffer::zeroed(blocks);
    for block in buffer.chunks_exact_mut(BLOCK_SIZE) {
        block[..8].copy_from_slice(&value.to_le_bytes());
    }
    let data = SharedSlice::new(Arc::new(buffer), 0..blocks * BLOCK_SIZE);
    engine.write_blocks(&engine.head(disk), logical, data).unwrap();
}

fn value(engine: &Engine, disk: u64, block: u64) -> u64 {
    let head = engine.head(disk);
    let bytes = engine.read_blocks("disk", block..block + 1, &|range| engine.plan_head(&head, range)).unwrap();
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

/// A disk in which every second block is an extent of its own.
fn scattered(engine: &Engine, name: &str) -> u64 {
    let disk = engine.create_disk(new_disk(name)).unwrap();
    for block in (0..BLOCKS).step_by(2) {
        write(engine, disk, block, 1, block + 1);
    }
    engine.settle(&engine.head(disk)).unwrap();
    disk
}

/// Does all kinds of changes on disks of its own until it is stopped. Returns the longest time that a write took.
fn load(engine: &Engine, seed: u64, stop: &AtomicBool) -> Duration {
    let mut random = Random(seed);
    let disk = engine.create_disk(new_disk(&format!("load{seed}"))).unwrap();
    let (mut clones, mut snapshots, mut made) = (Vec::<(u64, u64)>::new(), Vec::<u64>::new(), 0);
    let mut longest = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        let at = random.below(BLOCKS - 64);
        match random.below(100) {
            0..70 => {
                let blocks = if random.below(8) == 0 { 40 } else { 1 + random.below(3) as usize };
                let began = Instant::now();
                write(engine, disk, at, blocks, random.below(1 << 30));
                longest = longest.max(began.elapsed());
            }
            70..80 => engine.discard_blocks(&engine.head(disk), at..at + 1 + random.below(64)).unwrap(),
            80..83 => engine.zero_blocks(&engine.head(disk), at..at + 1 + random.below(16)).unwrap(),
            83..88 => {
                value(engine, disk, at);
            }
            88..92 => engine.flush().unwrap(),
            92..95 if snapshots.len() < 4 => {
                made += 1;
                let new = NewSnapshot { disk, name: format!("s{made}"), uuid: [2; 16], incomplete: false };
                snapshots.extend(engine.snapshot(&[new]).unwrap());
            }
            95..97 if !snapshots.is_empty() && clones.len() < 3 => {
                made += 1;
                let snapshot = snapshots[random.below(snapshots.len() as u64) as usize];
                let ids = engine.clone_snapshot(snapshot, &[new_disk(&format!("c{seed}.{made}"))]).unwrap();
                clones.extend(ids.into_iter().map(|id| (id, snapshot)));
            }
            97..98 if !clones.is_empty() => {
                let (clone, _) = clones.swap_remove(random.below(clones.len() as u64) as usize);
                write(engine, clone, at, 1, 1);
                engine.delete_disk(clone, &[]).unwrap();
            }
            98..100 if !snapshots.is_empty() => {
                let snapshot = snapshots[random.below(snapshots.len() as u64) as usize];
                if clones.iter().all(|(_, origin)| *origin != snapshot) {
                    snapshots.retain(|other| *other != snapshot);
                    engine.delete_snapshot(snapshot).unwrap();
                }
            }
            _ => {}
        }
    }
    longest
}

/// Runs `work` while three threads write. Returns the longest time that a write took.
fn beside_load(engine: &Engine, work: impl FnOnce()) -> Duration {
    let stop = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (1..4).map(|seed| scope.spawn(move || load(engine, seed, stop))).collect();
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let ended = Stop(stop);
        work();
        drop(ended);
        writers.into_iter().map(|writer| writer.join().unwrap()).max().unwrap()
    })
}

fn check(engine: &Engine, data: bool) -> Report {
    engine.check(CheckOptions { data, repair: false }, &|_, _| true).unwrap()
}

fn problems(report: &Report) -> Vec<&str> {
    report.findings.iter().map(|finding| finding.problem.as_str()).collect()
}

#[test]
fn checks_during_writes_report_no_problem_and_block_no_request() {
    for metadata_cache in [0, 32 << 20] {
        let medium = disk();
        let engine = Engine::open(medium.directory(), EngineOptions { metadata_cache, ..SMALL }).unwrap();
        let cold = scattered(&engine, "cold");
        let longest = beside_load(&engine, || {
            for round in 0..30 {
                let report = check(&engine, round % 2 == 1);
                assert_eq!((problems(&report), report.leaked), (vec![], 0), "round {round}");
                assert!(report.blocks >= BLOCKS / 2 && report.pages > BLOCKS / 2 / 254);
            }
        });
        // The limit allows for a busy machine. A check that held the locks throughout would take longer.
        assert!(longest < Duration::from_secs(10), "a write took {longest:?}");
        (0..BLOCKS).step_by(2).for_each(|block| assert_eq!(value(&engine, cold, block), block + 1));
        let repairing = engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        assert_eq!(problems(&repairing), Vec::<&str>::new());
        engine.close().unwrap();
    }
}

/// The place of a block of a disk in the data file.
fn place(engine: &Engine, disk: u64, block: u64) -> (u64, u64) {
    let planned = engine.plan_head(&engine.head(disk), block..block + 1).unwrap();
    match planned.parts.first() {
        Some(Part::Stored(stored)) => (stored.block, stored.offset),
        _ => panic!("the block is not in the data file"),
    }
}

#[test]
fn checks_during_writes_find_damage() {
    let medium = disk();
    let engine = Engine::open(medium.directory(), EngineOptions { metadata_cache: 32 << 20, ..SMALL }).unwrap();
    let cold = scattered(&engine, "cold");
    engine.close().unwrap();
    drop(engine);

    // Adds one reference too many to a block that a disk maps and that is never overwritten.
    let engine = Engine::open(medium.directory(), SMALL).unwrap();
    let (leaked, _) = place(&engine, cold, 100);
    engine.close().unwrap();
    drop(engine);
    let table = medium.directory().open("data.table", IoMode::Buffered).unwrap();
    let key = PageKey::new(PageFile::DataTable, leaked / TABLE_ENTRIES);
    let mut page = backend::Block([0; BLOCK_SIZE]);
    table.read_at(&mut page.0, key.offset()).unwrap();
    verify(&mut page, key).unwrap();
    // Entries have eight bytes; the reference count begins at the fifth.
    page.0[HEADER_SIZE + (leaked % TABLE_ENTRIES) as usize * 8 + 4] += 1;
    table.write_at(&[&sealed(&page).0], key.offset(), true).unwrap();

    let engine = Engine::open(medium.directory(), EngineOptions { metadata_cache: 32 << 20, ..SMALL }).unwrap();
    let (flipped, offset) = place(&engine, cold, 2000);
    let longest = beside_load(&engine, || {
        let report = check(&engine, true);
        let expected = format!("data block {leaked} has 2 references in the table and 1 in the trees");
        assert_eq!(problems(&report), [expected.as_str()]);

        medium.flip_bit(DATA_FILE, offset + 77, 3).unwrap();
        let report = check(&engine, true);
        let found = problems(&report);
        assert_eq!((found.len(), found[0]), (2, expected.as_str()));
        assert!(found[1].starts_with(&format!("data block {flipped} fails its checksum")), "{found:?}");
        assert!(found[1].ends_with(&format!("disk 'cold' at offset {}", 2000 * BLOCK_SIZE)), "{found:?}");
        assert_eq!(problems(&check(&engine, false)), [expected.as_str()]);

        // Flips a bit in a table page. The load changes free blocks on the same page, so a checkpoint may overwrite the
        // page before the check reads it: the flip is repeated.
        let (inside, _) = place(&engine, cold, 3 * TABLE_ENTRIES);
        let key = PageKey::new(PageFile::DataTable, inside / TABLE_ENTRIES);
        let found = (0..50).any(|_| {
            medium.flip_bit("data.table", key.offset() + 300, 1).unwrap();
            problems(&check(&engine, false)).iter().any(|found| found.contains("fails its checksum"))
        });
        assert!(found, "a flipped page of the table is not found");
    });
    assert!(longest < Duration::from_secs(10), "a write took {longest:?}");
    engine.close().unwrap();
}

#[test]
fn a_check_can_be_cancelled_without_effect_on_the_store() {
    let medium = disk();
    let engine = Engine::open(medium.directory(), SMALL).unwrap();
    let cold = scattered(&engine, "cold");
    for _ in 0..3 {
        let stopped = engine.check(CheckOptions { data: true, repair: false }, &|done, _| done < 100);
        assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Interrupted);
        write(&engine, cold, 1, 1, 5);
        engine.flush().unwrap();
        engine.checkpoint().unwrap();
    }
    assert_eq!(problems(&check(&engine, true)), Vec::<&str>::new());
    engine.close().unwrap();
}

#[test]
fn with_a_small_cache_few_pages_are_read_under_the_lock_and_none_is_stale() {
    let medium = disk();
    let engine = Engine::open(medium.directory(), SMALL).unwrap();
    let disks = [scattered(&engine, "a"), scattered(&engine, "b"), scattered(&engine, "c")];
    // The maps of these disks are several times the size of the cache, and are clean, so that they can be evicted.
    let unchanged = ["d", "e", "f", "g", "h", "i"].map(|name| scattered(&engine, name));
    let before = engine.page_statistics();
    std::thread::scope(|scope| {
        for (seed, disk) in (1..).zip(disks) {
            let engine = &engine;
            scope.spawn(move || {
                let mut random = Random(seed);
                let content = |block: u64| if block.is_multiple_of(2) { block + 1 } else { 0 };
                let mut model: Vec<u64> = (0..BLOCKS).map(content).collect();
                for turn in 0..6000 {
                    let block = random.below(BLOCKS);
                    match random.below(20) {
                        0..4 => {
                            let disk = unchanged[random.below(unchanged.len() as u64) as usize];
                            assert_eq!(value(engine, disk, block), content(block));
                        }
                        4..12 => assert_eq!(value(engine, disk, block), model[block as usize]),
                        12..19 => {
                            write(engine, disk, block, 1, turn);
                            model[block as usize] = turn;
                        }
                        _ => {
                            let end = BLOCKS.min(block + 1 + random.below(20));
                            engine.discard_blocks(&engine.head(disk), block..end).unwrap();
                            model[block as usize..end as usize].fill(0);
                        }
                    }
                    if turn % 1000 == 999 {
                        engine.settle(&engine.head(disk)).unwrap();
                        engine.checkpoint().unwrap();
                    }
                }
                (0..BLOCKS).for_each(|block| assert_eq!(value(engine, disk, block), model[block as usize]));
            });
        }
    });
    let after = engine.page_statistics();
    let (misses, locked) = (after.misses - before.misses, after.locked - before.locked);
    eprintln!("{misses} pages read, {locked} of them under the lock");
    assert!(misses > 1000 && locked * 20 < misses, "{locked} of {misses} pages were read under the lock");
    assert_eq!(problems(&check(&engine, true)), Vec::<&str>::new());
    engine.close().unwrap();
}
