//! Damaged pages of every kind: what stays usable, what a check reports, and what a repair restores.

use super::between::before_next;
use super::*;
use crate::catalog::{Object, SLOTS_PER_PAGE};
use crate::engine::log::IMAGES_FILE;
use crate::sync::atomic::{AtomicBool, Ordering};
use backend::simulated::Request;
use std::collections::BTreeMap;
use std::time::Instant;

/// Number of disks: more than one page of the catalog.
const DISKS: u64 = SLOTS_PER_PAGE as u64 + 3;
/// Blocks written to the first disk, so that its map has several leaves.
const WRITTEN: u64 = 1200;

type Model = BTreeMap<(u64, u64), u8>;

fn put(engine: &Engine, model: &mut Model, disk: u64, logical: u64, value: u8) {
    let mut buffer = Buffer::zeroed(1);
    buffer.fill(value);
    engine.write_blocks(&engine.head(disk), logical, SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE)).unwrap();
    model.insert((disk, logical), value);
}

fn get(engine: &Engine, disk: u64, logical: u64) -> Result<u8> {
    let head = engine.head(disk);
    let block = engine.read_blocks("disk", logical..logical + 1, &|range| engine.plan_head(&head, range))?;
    Ok(block[0])
}

/// A store with one large disk, small ones and a snapshot. It is closed, or dropped as by a kill.
fn prepared(closed: bool) -> (SimulatedDisk, Model) {
    let (disk, engine) = made();
    let mut model = Model::new();
    for number in 2..=DISKS {
        let new = NewDisk {
            name: format!("vm{number}"),
            capacity: BLOCKS * BLOCK_SIZE as u64,
            provisioning: Provisioning::Thin,
            uuid: [number as u8; 16],
            incomplete: false,
        };
        assert_eq!(engine.create_disk(new).unwrap(), number);
        put(&engine, &mut model, number, number, number as u8);
    }
    // Every second block is written, so that each needs an extent of its own.
    for block in 0..WRITTEN {
        put(&engine, &mut model, 1, 2 * block, (block % 200) as u8 + 1);
        if block % 64 == 0 {
            engine.pump().unwrap();
        }
    }
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    engine.snapshot(&[NewSnapshot { disk: 1, name: "s".into(), uuid: [9; 16], incomplete: false }]).unwrap();
    for block in 0..40 {
        put(&engine, &mut model, 1, 2 * block, 250);
    }
    engine.flush().unwrap();
    if closed {
        engine.close().unwrap();
    }
    (disk, model)
}

/// Damages the images of the last checkpoint, so that nothing can be restored from them.
fn without_images(disk: &SimulatedDisk) {
    spoil(disk, IMAGES_FILE, 0, 0..64);
}

/// Overwrites a part of block `number` of a file with other bytes.
fn spoil(disk: &SimulatedDisk, name: &str, number: u64, part: std::ops::Range<usize>) {
    let file = disk.directory().open(name, IoMode::Buffered).unwrap();
    let mut block = Buffer::zeroed(1);
    file.read_at(&mut block, number * BLOCK_SIZE as u64).unwrap();
    block[part].iter_mut().for_each(|byte| *byte ^= 0x5a);
    file.write_at(&[&block], number * BLOCK_SIZE as u64, true).unwrap();
}

fn is_model(engine: &Engine, model: &Model) {
    for ((disk, block), value) in model {
        assert_eq!(get(engine, *disk, *block).unwrap(), *value, "disk {disk} block {block}");
    }
}

/// Closes the store and opens it again. Checks that the content equals the model and that a check finds nothing.
fn stays_whole(engine: Arc<Engine>, disk: &SimulatedDisk, model: &Model) {
    engine.close().unwrap();
    drop(engine);
    let engine = open(disk).unwrap();
    is_model(&engine, model);
    is_whole(&engine);
}

fn checked(engine: &Engine, repair: bool) -> Report {
    engine.check(CheckOptions { data: true, repair }, &|_, _| true).unwrap()
}

fn repairing(disk: &SimulatedDisk) -> Result<Arc<Engine>> {
    Engine::open_repairing(disk.directory(), options(), None)
}

fn problems(report: &Report) -> String {
    report.findings.iter().map(|finding| format!("{finding:?}\n")).collect()
}

#[test]
fn a_damaged_copy_of_the_superblock_is_reported_and_rewritten() {
    for (closed, copy) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        let (disk, model) = prepared(closed);
        spoil(&disk, files::SUPERBLOCK_FILE, copy, 40..60);
        let Ok(engine) = open(&disk) else {
            assert!(!closed, "copy {copy}");
            continue;
        };
        is_model(&engine, &model);
        let report = checked(&engine, false);
        assert_eq!(report.findings.len(), 1, "{}", problems(&report));
        let finding = &report.findings[0];
        assert!(finding.problem.contains(&format!("copy {} of 2 of the superblock", copy + 1)), "{finding:?}");
        assert!(finding.repaired.is_some());
        is_whole(&engine);
        // The copy is damaged while the store is open.
        spoil(&disk, files::SUPERBLOCK_FILE, copy, 40..60);
        let report = checked(&engine, false);
        assert!(report.findings.len() == 1 && report.findings[0].repaired.is_none(), "{}", problems(&report));
        assert!(checked(&engine, true).findings.iter().all(|finding| finding.repaired.is_some()));
        is_whole(&engine);
        engine.close().unwrap();
        assert_eq!(open(&disk).unwrap().take_found_first().findings, []);
    }
}

#[test]
fn what_openings_repaired_is_reported_until_a_check_has_ended() {
    let (disk, model) = prepared(true);
    spoil(&disk, files::SUPERBLOCK_FILE, 1, 40..60);
    spoil(&disk, "data.summary", 0, 0..50);
    for _ in 0..3 {
        let engine = open(&disk).unwrap();
        is_model(&engine, &model);
        let interrupted = engine.check(CheckOptions::default(), &|_, _| false);
        assert_eq!(interrupted.err().unwrap().kind(), ErrorKind::Interrupted);
        engine.close().unwrap();
    }
    let engine = open(&disk).unwrap();
    let report = checked(&engine, false);
    let [copy, page] = &report.findings[..] else { panic!("{}", problems(&report)) };
    assert!(copy.problem.contains("copy 2 of 2 of the superblock") && copy.repaired.is_some(), "{copy:?}");
    assert!(page.problem.contains("1 page of summaries") && page.repaired.is_some(), "{page:?}");
    is_whole(&engine);
    // A kill after the check does not bring the report back.
    drop(engine);
    is_whole(&open(&disk).unwrap());
}

#[test]
fn a_damaged_summary_is_recounted_when_the_store_is_opened() {
    for name in ["data.summary", "map.summary"] {
        for closed in [true, false] {
            let (disk, mut model) = prepared(closed);
            let before = open(&disk.crash()).unwrap().counts();
            let disk = disk.crash();
            spoil(&disk, name, 0, 0..50);
            let engine = open(&disk).unwrap();
            let counts = engine.counts();
            assert_eq!((counts.data, counts.map), (before.data, before.map), "{name}");
            is_model(&engine, &model);
            put(&engine, &mut model, 1, 77, 77);
            let report = checked(&engine, false);
            assert_eq!(report.findings.len(), 1, "{}", problems(&report));
            assert!(report.findings[0].problem.contains(&format!("page 0 of {name}")), "{}", problems(&report));
            stays_whole(engine, &disk, &model);
        }
    }
}

#[test]
fn a_damaged_table_is_reported_and_recounted_by_a_repair() {
    for name in ["data.table", "map.table"] {
        for closed in [true, false] {
            let (disk, mut model) = prepared(closed);
            without_images(&disk);
            // The entries stay undamaged, so that the repair uses their checksums.
            spoil(&disk, name, 0, 0..30);
            match open(&disk) {
                Ok(engine) => {
                    let report = checked(&engine, false);
                    let named =
                        report.findings.iter().filter(|finding| finding.problem.contains(&format!("page 0 of {name}")));
                    assert_eq!(named.count(), 1, "{}", problems(&report));
                    assert!(problems(&report).contains("'vm'"), "{}", problems(&report));
                }
                Err(error) => {
                    assert!(!closed, "{error}");
                    assert!(error.to_string().contains("run 'lamina check --repair'"), "{error}");
                }
            }
            let engine = repairing(&disk).unwrap();
            let report = checked(&engine, true);
            assert!(problems(&report).contains("recounted from the trees"), "{name} {closed}: {}", problems(&report));
            assert!(report.findings.iter().all(|finding| finding.repaired.is_some()), "{}", problems(&report));
            is_whole(&engine);
            is_model(&engine, &model);
            (0..300).for_each(|block| put(&engine, &mut model, 1, 3 * block, 99));
            stays_whole(engine, &disk, &model);
        }
    }
}

#[test]
fn a_repair_waits_for_blocks_that_a_bulk_writer_has_not_mapped() {
    let (disk, engine) = with_a_block(3000);
    let copy = add_disk(&engine, "copy", BLOCKS, Provisioning::Thin);
    engine.checkpoint().unwrap();
    // The page that describes the blocks is intact in memory.
    spoil(&disk, "data.table", 0, 0..20);
    let [begun, ended] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let wait = |flag: &AtomicBool, most: Duration| {
        let since = Instant::now();
        while !flag.load(Ordering::SeqCst) && since.elapsed() < most {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let (writes, checks) = (Arc::clone(&begun), Arc::clone(&ended));
    before_next(&disk, Request::Write, move || {
        writes.store(true, Ordering::SeqCst);
        wait(&checks, Duration::from_secs(1));
    });
    let other = Arc::clone(&engine);
    let repair = std::thread::spawn(move || {
        wait(&begun, Duration::from_secs(60));
        let report = checked(&other, true);
        ended.store(true, Ordering::SeqCst);
        report
    });
    BulkWriter::new(&engine, copy).write(0, &slice(7, 64)).unwrap();
    repair.join().unwrap();
    is_whole(&engine);
    is_backed(&engine);
    assert!((0..64).all(|block| get(&engine, copy, block).unwrap() == 7));
}

/// Checks that every block in use counts as backed. Otherwise a repair has returned its space, which other programs may
/// take before the block is written.
fn is_backed(engine: &Engine) {
    let mut meta = engine.meta.lock();
    for block in 0..meta.data.blocks() {
        let entry = meta.entry(block).unwrap();
        assert!(entry.backed || entry.references == 0, "block {block} is in use and not backed");
    }
}

#[test]
fn no_write_relies_on_blocks_while_a_repair_returns_their_space() {
    let (disk, engine) = with_a_block(256);
    // The page that describes the blocks is intact in memory.
    spoil(&disk, "data.table", 0, 0..20);
    assert!(engine.try_claim(200).is_some());
    let [returns, claimed] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (began, relied, other) = (Arc::clone(&returns), Arc::clone(&claimed), Arc::clone(&engine));
    // The first request that changes the space of a file punches the free blocks.
    before_next(&disk, Request::Space, move || {
        began.store(true, Ordering::SeqCst);
        relied.store(other.try_claim(200).is_some(), Ordering::SeqCst);
    });
    let report = checked(&engine, true);
    assert!(problems(&report).contains("page 0 of data.table"), "{}", problems(&report));
    assert_eq!((returns.load(Ordering::SeqCst), claimed.load(Ordering::SeqCst)), (true, false));
}

#[test]
fn a_repair_that_returns_the_space_of_free_blocks_reserves_space_for_acknowledged_writes() {
    let (disk, engine) = with_a_block(256);
    // The page that describes the blocks is intact in memory.
    spoil(&disk, "data.table", 0, 0..20);
    (1..21).for_each(|block| write(&engine, block, 3));
    let report = checked(&engine, true);
    assert!(problems(&report).contains("page 0 of data.table"), "{}", problems(&report));
    fill_up(&disk);
    engine.flush().unwrap();
    assert!((1..21).all(|block| value(&engine, block).unwrap() == 3));
    is_whole(&engine);
}

#[test]
fn a_block_whose_checksum_page_is_damaged_is_a_reported_error() {
    let (disk, model) = prepared(true);
    without_images(&disk);
    // Damages the checksums of blocks 10 and 11, and the head of the page.
    spoil(&disk, "data.table", 0, 112..116);
    spoil(&disk, "data.table", 0, 120..124);
    spoil(&disk, "data.table", 0, 0..30);
    let engine = repairing(&disk).unwrap();
    let report = checked(&engine, true);
    let lost: Vec<_> = report.findings.iter().filter(|finding| finding.repaired.is_none()).collect();
    assert!(lost.len() == 1 && lost[0].problem.contains("the checksums of 2 data blocks"), "{}", problems(&report));
    let mut bad = 0;
    for ((disk, block), value) in &model {
        match get(&engine, *disk, *block) {
            Ok(found) => assert_eq!(found, *value),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                bad += 1;
            }
        }
    }
    assert!(bad <= 2);
}

#[test]
fn a_damaged_catalog_page_loses_only_its_own_objects() {
    for closed in [true, false] {
        let (disk, model) = prepared(closed);
        without_images(&disk);
        spoil(&disk, "catalog", 1, 100..300);
        let engine = open(&disk).unwrap();
        for ((disk, block), value) in model.iter().filter(|((disk, _), _)| *disk <= SLOTS_PER_PAGE as u64) {
            assert_eq!(get(&engine, *disk, *block).unwrap(), *value, "disk {disk} block {block}");
        }
        let lost = SLOTS_PER_PAGE as u64 + 1;
        assert_eq!(get(&engine, lost, lost).unwrap_err().kind(), ErrorKind::NotFound);
        let report = checked(&engine, true);
        assert!(problems(&report).contains("page 1 of catalog is damaged"), "{}", problems(&report));
        assert_eq!(report.findings.iter().filter(|finding| finding.repaired.is_some()).count(), 0, "{report:?}");
        // A new disk is stored on another page, and no slot of the lost page is reused.
        let new = NewDisk {
            name: "new".into(),
            capacity: BLOCKS * BLOCK_SIZE as u64,
            provisioning: Provisioning::Thin,
            uuid: [77; 16],
            incomplete: false,
        };
        let new = engine.create_disk(new).unwrap();
        let mut written = Model::new();
        (0..500).for_each(|block| put(&engine, &mut written, new, block, 55));
        engine.close().unwrap();
        drop(engine);
        // The page is repaired, and all its disks exist again.
        spoil(&disk, "catalog", 1, 100..300);
        let engine = open(&disk).unwrap();
        is_model(&engine, &written);
        if closed {
            is_model(&engine, &model);
        }
    }
}

#[test]
fn a_damaged_node_loses_only_its_own_range() {
    for closed in [true, false] {
        let (disk, model) = prepared(closed);
        without_images(&disk);
        let engine = open(&disk).unwrap();
        engine.close().unwrap();
        drop(engine);
        let leaf = leaf_of_large_disk(&disk);
        spoil(&disk, "map", leaf, 40..90);
        without_images(&disk);
        let engine = open(&disk).unwrap();
        let mut bad = Vec::new();
        for ((disk, block), value) in &model {
            match get(&engine, *disk, *block) {
                Ok(found) => assert_eq!(found, *value),
                Err(error) => bad.push((*disk, *block, error.kind())),
            }
        }
        assert!((1..300).contains(&bad.len()), "{}", bad.len());
        assert!(bad.iter().all(|(disk, _, kind)| *disk == 1 && *kind == ErrorKind::Corrupt), "{bad:?}");
        let report = checked(&engine, true);
        assert!(problems(&report).contains(&format!("page {leaf} of map is damaged")), "{}", problems(&report));
        assert!(
            problems(&report).contains("'vm' bytes") || problems(&report).contains("'vm@s' bytes"),
            "{}",
            problems(&report)
        );
        // Writes to other disks, and to other ranges of this one, still succeed.
        let lost = &bad[0].1;
        let mut written = Model::new();
        let mut buffer = Buffer::zeroed(1);
        buffer.fill(3);
        let part = SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE);
        let head = engine.head(1);
        engine.write_blocks(&head, *lost, part).unwrap();
        // A durable write of another client reports the loss. The flush reports it too.
        let writes = || engine.flush_write(&head).map_err(|error| error.kind());
        let flushes = || engine.flush_head(&head, engine.acknowledged()).map_err(|error| error.kind());
        assert_eq!([writes(), flushes()], [Err(ErrorKind::Corrupt); 2]);
        assert_eq!([writes(), flushes()], [Ok(()); 2]);
        assert_eq!(get(&engine, 1, *lost).unwrap_err().kind(), ErrorKind::Corrupt);
        let again = SharedSlice::new(Arc::new(Buffer::zeroed(1)), 0..BLOCK_SIZE);
        assert_eq!(engine.write_blocks(&engine.head(1), *lost, again).unwrap_err().kind(), ErrorKind::Corrupt);
        put(&engine, &mut written, 2, 100, 1);
        let whole = |(disk, block): &&(u64, u64)| *disk == 1 && !bad.iter().any(|bad| bad.1 == *block);
        let far = model.keys().rfind(whole);
        put(&engine, &mut written, 1, far.unwrap().1, 2);
        engine.flush().unwrap();
        engine.close().unwrap();
        drop(engine);
        is_model(&open(&disk).unwrap(), &written);
    }
}

/// A leaf of the first disk's map.
fn leaf_of_large_disk(disk: &SimulatedDisk) -> u64 {
    let map = disk.directory().open("map", IoMode::Buffered).unwrap();
    let mut page = Buffer::zeroed(1);
    let leaf = (0..200).rev().find(|number| {
        map.read_at(&mut page, number * BLOCK_SIZE as u64).unwrap();
        &page[0..4] == b"LMND" && page[6] == 0 && page[8] > 100
    });
    leaf.unwrap()
}

/// A store with a damaged page that only the first disk needs: a leaf of its map, or a page of the table of its blocks.
fn with_damage(name: &str) -> (SimulatedDisk, Model) {
    let (disk, model) = prepared(true);
    open(&disk).unwrap().close().unwrap();
    let number = if name == "map" { leaf_of_large_disk(&disk) } else { 1 };
    spoil(&disk, name, number, 1000..1100);
    without_images(&disk);
    (disk, model)
}

/// Runs all background work to its end, and checks that the other disks can be written and read.
fn others_go_on(engine: &Engine, model: &mut Model, block: u64) {
    for _ in 0..1000 {
        if !engine.pump().unwrap() {
            break;
        }
    }
    (2..=DISKS).for_each(|disk| put(engine, model, disk, block, 77));
    engine.flush_head(&engine.head(2), engine.acknowledged()).unwrap();
    assert_eq!(engine.failure(), None);
    let others = model.iter().filter(|((disk, _), _)| *disk > 1);
    others.for_each(|((disk, block), value)| assert_eq!(get(engine, *disk, *block).unwrap(), *value));
}

#[test]
fn a_deleted_disk_with_a_damaged_page_does_not_stop_the_others() {
    for name in ["map", "data.table"] {
        let (disk, mut model) = with_damage(name);
        let mut engine = open(&disk).unwrap();
        engine.delete_disk(1, &[]).unwrap();
        for block in 100..103 {
            others_go_on(&engine, &mut model, block);
            engine.close().unwrap();
            drop(engine);
            engine = open(&disk).unwrap();
        }
    }
}

#[test]
fn discards_and_writes_over_a_damaged_page_do_not_stop_the_other_disks() {
    for name in ["map", "data.table"] {
        for discards in [true, false] {
            let (disk, mut model) = with_damage(name);
            let engine = open(&disk).unwrap();
            let vm = engine.head(1);
            if discards {
                engine.discard_blocks(&vm, 0..2 * WRITTEN).unwrap();
            } else {
                for block in 0..WRITTEN {
                    // A write may be refused at once.
                    let written = engine.write_blocks(&vm, 2 * block, slice(66, 1));
                    assert!(written.is_ok() || written.is_err_and(|error| error.kind() == ErrorKind::Corrupt));
                }
            }
            others_go_on(&engine, &mut model, 100);
            let flush = || engine.flush_head(&vm, engine.acknowledged()).map_err(|error| error.kind());
            // A discard of whole leaves that a snapshot shares changes no entry of their blocks.
            let lost = name == "map" || !discards;
            let first = if lost { Err(ErrorKind::Corrupt) } else { Ok(()) };
            assert_eq!([flush(), flush()], [first, Ok(())], "{name} {discards}");
            let expected = if discards { 0 } else { 66 };
            let changed = (0..WRITTEN).filter(|block| get(&engine, 1, 2 * block).is_ok_and(|found| found == expected));
            let changed = changed.count() as u64;
            // The leaf that is left covers the range of the removed ones: if it is damaged, the whole disk is.
            let range = match (lost, discards) {
                (true, true) => 0..WRITTEN,
                (true, false) => WRITTEN / 4..WRITTEN,
                (false, _) => WRITTEN..WRITTEN + 1,
            };
            assert!(range.contains(&changed), "{name} {discards}: {changed} blocks were changed");
            engine.close().unwrap();
            drop(engine);
            others_go_on(&open(&disk).unwrap(), &mut model, 101);
        }
    }
}

#[test]
fn one_inverted_bit_of_any_page_is_corrected_by_a_repair() {
    for (name, pages) in
        [("map", 12), ("map.table", 1), ("map.summary", 1), ("data.table", 3), ("data.summary", 1), ("catalog", 2)]
    {
        for page in 0..pages {
            for images in [true, false] {
                let (disk, model) = prepared(page % 2 == 0);
                if !images {
                    without_images(&disk);
                }
                disk.flip_bit(name, page * BLOCK_SIZE as u64 + 33 + 40 * page, 3).unwrap();
                let engine = repairing(&disk).unwrap();
                let report = checked(&engine, true);
                assert!(
                    report.findings.iter().all(|finding| finding.repaired.is_some()),
                    "{name} {page}: {}",
                    problems(&report)
                );
                is_model(&engine, &model);
                is_whole(&engine);
                engine.close().unwrap();
                drop(engine);
                is_model(&open(&disk).unwrap(), &model);
            }
        }
    }
}

#[test]
fn damage_while_the_store_is_open_is_repaired_from_memory() {
    let (disk, mut model) = prepared(true);
    let engine = open(&disk).unwrap();
    is_model(&engine, &model);
    for name in ["data.summary", "map.summary", "catalog"] {
        spoil(&disk, name, 0, 100..300);
    }
    let report = checked(&engine, true);
    for name in ["data.summary", "map.summary", "catalog"] {
        assert!(problems(&report).contains(&format!("page 0 of {name}")), "{}", problems(&report));
    }
    assert!(report.findings.iter().all(|finding| finding.repaired.is_some()), "{}", problems(&report));
    is_whole(&engine);
    put(&engine, &mut model, 1, 5, 5);
    engine.close().unwrap();
    drop(engine);
    is_model(&open(&disk).unwrap(), &model);
}

/// Gives a block a reference that no tree has, and makes a checkpoint.
fn leak(engine: &Engine) -> Run {
    let run = {
        let mut guard = engine.meta.lock();
        let meta = &mut *guard;
        let run = meta.data.allocate(&mut meta.pages, 1).unwrap().unwrap();
        meta.data.adopt(&mut meta.pages, run).unwrap();
        engine.update_headroom(meta);
        run
    };
    engine.checkpoint().unwrap();
    run
}

/// Uses a block that a repair has freed for a write that is only in the journal. After a kill, the store must have the
/// write. `backed` is the number of backed blocks.
fn is_reused(disk: &SimulatedDisk, engine: Arc<Engine>, leaked: Run, backed: u64) -> Arc<Engine> {
    assert_eq!(engine.meta.lock().entry(leaked.start).unwrap().references, 0);
    (1..backed).for_each(|block| write(&engine, block, 2));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    assert_eq!(engine.meta.lock().entry(leaked.start).unwrap().references, 1);
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    let engine = open(disk).unwrap();
    assert!((1..backed).all(|block| value(&engine, block).unwrap() == 2));
    engine
}

#[test]
fn the_repairs_of_an_interrupted_check_are_durable() {
    let (disk, engine) = with_a_block(256);
    let leaked = leak(&engine);
    // The check is stopped when it begins to verify data, after it has compared the counts.
    let interrupted = engine.check(CheckOptions { data: true, repair: true }, &|done, _| done <= 1);
    assert_eq!(interrupted.err().unwrap().kind(), ErrorKind::Interrupted);
    is_whole(&is_reused(&disk, engine, leaked, 256));
}

#[test]
fn repairs_beyond_the_listed_findings_are_durable() {
    let (disk, engine) = with_a_block(256);
    {
        let mut meta = engine.meta.lock();
        let vm = meta.catalog.get(1).unwrap().clone();
        for _ in 0..1000 {
            // Each of these disks is a finding that cannot be repaired.
            let id = meta.catalog.allocate_id();
            meta.catalog.put(Object { id, name: format!("vm{id}"), parent: 1 << 40, root: None, ..vm.clone() });
        }
    }
    let leaked = leak(&engine);
    let report = checked(&engine, true);
    assert!(report.unlisted == 1 && report.findings.iter().all(|finding| finding.repaired.is_none()));
    assert_eq!(engine.reserves.headroom(), engine.counts().data.free);
    drop(is_reused(&disk, engine, leaked, 256));
}

/// Checks that a salvage reads the whole model.
fn is_salvaged(disk: &SimulatedDisk, model: &Model) {
    let salvage = Salvage::open(disk.directory()).unwrap();
    for ((id, block), value) in model {
        let content = salvage.contents(*id, *block..*block + 1).unwrap().remove(0);
        assert_eq!(content.map(|bytes| bytes[0]), Some(*value), "disk {id} block {block}");
    }
}

#[test]
fn damage_of_pages_that_the_last_checkpoint_does_not_use_is_harmless() {
    for name in ["data.table", "map.table", "catalog"] {
        let (disk, engine) = made();
        let mut model = Model::new();
        for block in 0..WRITTEN {
            put(&engine, &mut model, 1, 2 * block, (block % 200) as u8 + 1);
        }
        engine.flush().unwrap();
        // All changes are in the journal only.
        drop(engine);
        for page in 1..4 {
            spoil(&disk, name, page, 100..900);
        }
        is_salvaged(&disk, &model);
        let engine = repairing(&disk).unwrap();
        let report = checked(&engine, true);
        assert!(report.findings.iter().all(|finding| finding.repaired.is_some()), "{name}: {}", problems(&report));
        is_model(&engine, &model);
        is_whole(&engine);
    }
}
