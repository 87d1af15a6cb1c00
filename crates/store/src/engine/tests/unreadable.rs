//! Sectors that the medium cannot read: an unreadable page takes no more than a page with a wrong checksum, and a read
//! that fails once loses nothing.

use super::between::{before_next, lose_page};
use super::*;
use crate::catalog::SLOTS_PER_PAGE;
use crate::engine::IMAGES_FILE;
use crate::engine::maintain::Watch;
use crate::space::{ExtensionSearch, REGION_BLOCKS, TABLE_ENTRIES};
use crate::sync::time::Instant;
use backend::IoMode;
use backend::simulated::{Fault, Request};
use std::time::Duration;

/// Blocks written to disk 1: every second block, so that its map has several leaves.
const WRITTEN: u64 = 1200;

/// A closed store with disk 1, which has a map of several leaves, and disk 2.
pub(super) fn grown() -> SimulatedDisk {
    let (disk, engine) = made();
    assert_eq!(add_disk(&engine, "other", BLOCKS, Provisioning::Thin), 2);
    for block in 0..WRITTEN {
        write(&engine, 2 * block, 1);
        if block % 64 == 0 {
            engine.pump().unwrap();
        }
    }
    engine.close().unwrap();
    disk
}

/// The leaves of disk 1: the first logical block of each, and its page.
pub(super) fn leaves(disk: &SimulatedDisk) -> Vec<(u64, u64)> {
    let map = disk.directory().open("map", IoMode::Buffered).unwrap();
    let mut page = Buffer::zeroed(1);
    let mut found = Vec::new();
    for number in 0..map.len().unwrap() / BLOCK_SIZE as u64 {
        map.read_at(&mut page, number * BLOCK_SIZE as u64).unwrap();
        if &page[0..4] == b"LMND" && page[6] == 0 && page[8] > 50 {
            let word = u64::from_le_bytes(page[32..40].try_into().unwrap());
            found.push((word & ((1 << 40) - 1), number));
        }
    }
    found.sort_unstable();
    assert!(found.len() > 4, "{found:?}");
    found
}

/// Damages a node of the map, and its image, more than a repair can correct. The store does not open then.
pub(super) fn damage_node(disk: &SimulatedDisk, page: u64) {
    for (name, at) in [("map", page * BLOCK_SIZE as u64), (IMAGES_FILE, 0)] {
        (0..9).for_each(|bit| disk.flip_bit(name, at + 100 + 7 * bit, (bit % 8) as u8).unwrap());
    }
    assert!(open(disk).is_err());
}

pub(super) fn flush_disk(engine: &Engine, disk: u64) -> Result<()> {
    engine.flush_head(&engine.head(disk), engine.acknowledged())
}

pub(super) fn try_write(engine: &Engine, disk: u64, logical: u64, byte: u8) -> Result<()> {
    engine.write_blocks(&engine.head(disk), logical, slice(byte, 1))
}

/// Opens a store in which each round of maintenance commits.
fn committing(disk: &SimulatedDisk) -> Arc<Engine> {
    Engine::open(disk.directory(), EngineOptions { commit_interval: Duration::ZERO, ..options() }).unwrap()
}

#[test]
fn an_unreadable_node_loses_only_the_writes_below_it() {
    let disk = grown();
    let (block, leaf) = leaves(&disk)[2];
    let mend = lose_page(&disk, "map", leaf);
    let engine = open(&disk).unwrap();
    write(&engine, block, 9);
    write(&engine, 0, 8);
    try_write(&engine, 2, 5, 7).unwrap();
    flush_disk(&engine, 2).unwrap();
    let told = flush_disk(&engine, 1).unwrap_err();
    assert!(told.to_string().contains("are lost"), "{told}");
    flush_disk(&engine, 1).unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 8);
    assert_eq!(try_write(&engine, 1, block, 9).unwrap_err().kind(), ErrorKind::Io);
    mend();
    assert_eq!(value(&engine, block).unwrap(), 1);
    write(&engine, block, 9);
    flush_disk(&engine, 1).unwrap();
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!([0, block].map(|block| value(&engine, block).unwrap()), [8, 9]);
    is_whole(&engine);
}

#[test]
fn an_unreadable_node_inside_a_discard_takes_no_nodes_from_other_writes() {
    let disk = grown();
    let _mend = lose_page(&disk, "map", leaves(&disk)[2].1);
    let engine = open(&disk).unwrap();
    engine.discard_blocks(&engine.head(1), 0..2 * WRITTEN).unwrap();
    flush_disk(&engine, 1).unwrap_err();
    // The lost range has split the discard in two parts.
    assert_eq!(engine.reserves.changes(), 0);
    try_write(&engine, 2, 5, 7).unwrap();
    flush_disk(&engine, 2).unwrap();
}

#[test]
fn an_unreadable_table_page_loses_only_the_writes_to_its_blocks() {
    for name in ["data.table", "map.table"] {
        let disk = grown();
        let mend = lose_page(&disk, name, 0);
        let engine = open(&disk).unwrap();
        write(&engine, 0, 9);
        flush_disk(&engine, 1).unwrap_err();
        flush_disk(&engine, 1).unwrap();
        mend();
        engine.load_unreadable();
        write(&engine, 0, 9);
        flush_disk(&engine, 1).unwrap();
        engine.close().unwrap();
        drop(engine);
        let engine = open(&disk).unwrap();
        assert_eq!(value(&engine, 0).unwrap(), 9);
        is_whole(&engine);
    }
}

#[test]
fn reads_that_fail_for_a_short_time_lose_no_write() {
    let disk = grown();
    for failing in 1..8 {
        let engine = open(&disk).unwrap();
        write(&engine, 2 * failing, 9);
        disk.fail_reads_after(0, failing);
        while flush_disk(&engine, 1).is_err() {}
        assert_eq!(disk.reads_to_fail(), 0);
        assert_eq!(value(&engine, 2 * failing).unwrap(), 9);
        engine.close().unwrap();
    }
}

#[test]
fn a_read_that_fails_once_loses_no_write_while_another_page_is_unreadable() {
    let disk = grown();
    let leaves = leaves(&disk);
    let ((lost, first), (block, second)) = (leaves[2], leaves[4]);
    let engine = open(&disk).unwrap();
    let _mend = lose_page(&disk, "map", first);
    let error = value(&engine, lost).unwrap_err();
    assert!(engine.isolate(&error, 0, &mut metadata::Fetch::default()).is_some());
    // Reads of the first page have failed for longer than a second.
    std::thread::sleep(Duration::from_millis(1100));
    write(&engine, block, 9);
    engine.meta.lock().pages.drop_clean();
    let mend = lose_page(&disk, "map", second);
    assert!(engine.isolate(&error, 0, &mut metadata::Fetch::default()).is_some());
    mend();
    flush_disk(&engine, 1).unwrap();
    assert_eq!(value(&engine, block).unwrap(), 9);
}

#[test]
fn no_write_is_lost_while_the_whole_medium_is_unreadable() {
    let disk = grown();
    let (block, _) = leaves(&disk)[2];
    let engine = open(&disk).unwrap();
    write(&engine, block, 9);
    disk.fail_requests(Fault::Read, 0, u64::MAX);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        assert_eq!(engine.flush().unwrap_err().kind(), ErrorKind::Io);
    }
    disk.mend();
    flush_disk(&engine, 1).unwrap();
    assert_eq!(value(&engine, block).unwrap(), 9);
}

#[test]
fn a_write_to_a_mended_part_does_not_end_the_isolation_of_the_rest() {
    let disk = grown();
    let leaves = leaves(&disk);
    let ((_, first), (block, second)) = (leaves[1], leaves[2]);
    // A page with a wrong checksum counts as lost at once, without a wait for `PATIENCE`.
    let spoil = |leaf: u64| disk.flip_bit("map", leaf * BLOCK_SIZE as u64 + 100, 1).unwrap();
    [first, second].into_iter().for_each(spoil);
    let engine = open(&disk).unwrap();
    engine.write_blocks(&engine.head(1), block - 2, slice(9, 3)).unwrap();
    flush_disk(&engine, 1).unwrap_err();
    spoil(first);
    write(&engine, block - 2, 9);
    assert_eq!(try_write(&engine, 1, block, 9).unwrap_err().kind(), ErrorKind::Corrupt);
    flush_disk(&engine, 1).unwrap();
    spoil(second);
    write(&engine, block, 8);
    flush_disk(&engine, 1).unwrap();
    assert_eq!([block - 2, block].map(|block| value(&engine, block).unwrap()), [9, 8]);
    is_whole(&engine);
}

#[test]
fn a_huge_discard_over_a_damaged_root_is_isolated_at_once() {
    let (disk, engine) = made();
    let huge = engine.create_disk(new_disk("huge", 1 << 38)).unwrap();
    try_write(&engine, huge, 0, 1).unwrap();
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    let root = engine.with_catalog(|catalog| catalog.get(huge).unwrap().root.unwrap());
    engine.discard_blocks(&engine.head(huge), 0..1 << 38).unwrap();
    disk.flip_bit("map", root.0 * BLOCK_SIZE as u64 + 100, 1).unwrap();
    engine.meta.lock().pages.drop_clean();
    flush_disk(&engine, huge).unwrap_err();
    flush_disk(&engine, huge).unwrap();
}

#[test]
fn one_unreadable_copy_of_the_superblock_is_like_a_damaged_one() {
    for (closed, copy) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        let (disk, engine) = made();
        (0..200).for_each(|block| write(&engine, block, 7));
        engine.checkpoint().unwrap();
        (0..100).for_each(|block| write(&engine, block, 8));
        engine.flush().unwrap();
        if closed {
            engine.close().unwrap();
        }
        drop(engine);
        let at = copy * BLOCK_SIZE as u64;
        disk.fail_reads(files::SUPERBLOCK_FILE, at..at + BLOCK_SIZE as u64).unwrap();
        let engine = open(&disk).unwrap();
        assert_eq!([0, 99, 100, 199].map(|block| value(&engine, block).unwrap()), [8, 8, 7, 7]);
        assert_eq!(engine.take_found_first().findings.len(), 1);
        is_whole(&engine);
        engine.close().unwrap();
        drop(engine);
        // The opening has written the copy again.
        assert_eq!(open(&disk).unwrap().take_found_first().findings, []);
    }
    let (disk, engine) = made();
    engine.close().unwrap();
    drop(engine);
    disk.fail_reads(files::SUPERBLOCK_FILE, 0..2 * BLOCK_SIZE as u64).unwrap();
    let refused = open(&disk).err().unwrap();
    assert!(refused.kind() == ErrorKind::Io && refused.to_string().contains("lamina salvage"), "{refused}");
}

#[test]
fn unreadable_summaries_are_counted_again_when_the_store_is_opened() {
    for name in ["data.summary", "map.summary"] {
        let disk = grown();
        let before = open(&disk.crash()).unwrap().counts();
        let disk = disk.crash();
        disk.fail_reads(name, 0..BLOCK_SIZE as u64).unwrap();
        let engine = open(&disk).unwrap();
        assert_eq!((engine.counts().data, engine.counts().map), (before.data, before.map), "{name}");
        assert_eq!(engine.take_found_first().findings.len(), 1);
        write(&engine, 0, 3);
        // The checkpoint writes the page again.
        engine.close().unwrap();
        drop(engine);
        // No check has reported the page yet.
        let engine = open(&disk).unwrap();
        let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
        assert!(report.findings.len() == 1 && report.findings[0].repaired.is_some(), "{report:?}");
        is_whole(&engine);
    }
}

/// A closed store with disks on two pages of the catalog.
fn with_two_catalog_pages() -> SimulatedDisk {
    let (disk, engine) = made();
    for number in 2..=SLOTS_PER_PAGE as u64 + 2 {
        add_disk(&engine, &format!("vm{number}"), BLOCKS, Provisioning::Thin);
    }
    write(&engine, 0, 5);
    engine.close().unwrap();
    disk
}

fn disks(engine: &Engine) -> usize {
    engine.with_catalog(|catalog| catalog.disks().count())
}

#[test]
fn an_unreadable_catalog_page_loses_only_its_own_objects() {
    let disk = with_two_catalog_pages();
    let mend = lose_page(&disk, "catalog", 1);
    let engine = open(&disk).unwrap();
    assert_eq!((disks(&engine), value(&engine, 0).unwrap()), (SLOTS_PER_PAGE, 5));
    // A new disk is stored on another page.
    add_disk(&engine, "new", BLOCKS, Provisioning::Thin);
    engine.close().unwrap();
    drop(engine);
    mend();
    assert_eq!(disks(&open(&disk).unwrap()), SLOTS_PER_PAGE + 3);
}

#[test]
fn one_failed_read_during_an_opening_hides_no_disk() {
    for number in 0..40 {
        let disk = with_two_catalog_pages();
        disk.fail_reads_after(number, 1);
        let opened = open(&disk);
        if let Ok(engine) = opened {
            assert_eq!((disks(&engine), engine.take_found_first().findings), (SLOTS_PER_PAGE + 2, vec![]), "{number}");
        }
    }
}

#[test]
fn catalog_and_summaries_that_became_unreadable_are_written_from_memory() {
    let disk = with_two_catalog_pages();
    let engine = open(&disk).unwrap();
    engine.checkpoint().unwrap();
    engine.meta.lock().pages.drop_clean();
    for (name, page) in [("catalog", 1), ("data.summary", 0)] {
        let at = page * BLOCK_SIZE as u64;
        disk.fail_reads(name, at..at + BLOCK_SIZE as u64).unwrap();
    }
    (0..300).for_each(|block| write(&engine, block, 6));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    add_disk(&engine, "new", BLOCKS, Provisioning::Thin);
    engine.checkpoint().unwrap();
    let before = engine.counts().data;
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!((disks(&engine), value(&engine, 299).unwrap()), (SLOTS_PER_PAGE + 3, 6));
    assert_eq!(engine.counts().data.used, before.used);
    is_whole(&engine);
}

#[test]
fn an_unreadable_table_page_does_not_prevent_allocation() {
    let disk = grown();
    let mend = lose_page(&disk, "data.table", 20);
    let engine = open(&disk).unwrap();
    // Reserves space first, then allocates.
    drop(engine.claim_blocks(3000).unwrap());
    for block in 0..2000 {
        try_write(&engine, 2, block, 4).unwrap();
        if block % 100 == 0 {
            engine.pump().unwrap();
        }
    }
    flush_disk(&engine, 2).unwrap();
    assert_eq!(engine.meta.lock().data.unreadable(), [0]);
    engine.load_unreadable();
    assert_eq!(engine.meta.lock().data.unreadable(), [0]);
    mend();
    engine.load_unreadable();
    assert!(engine.meta.lock().data.unreadable().is_empty());
    is_whole(&engine);
    let before = engine.counts();
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    let after = engine.counts();
    assert_eq!((before.data.free, before.data.used), (after.data.free, after.data.used));
    is_whole(&engine);
}

#[test]
fn a_region_is_used_again_soon_after_a_short_failure() {
    let disk = grown();
    let mend = lose_page(&disk, "data.table", 20);
    let engine = open(&disk).unwrap();
    drop(engine.claim_blocks(3000).unwrap());
    assert_eq!(engine.meta.lock().data.unreadable(), [0]);
    mend();
    let (mut watch, began) = (Watch::new(), Instant::now());
    while !engine.meta.lock().data.unreadable().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(10), "the region stays unused");
        std::thread::sleep(Duration::from_millis(50));
        engine.maintain(&mut watch).unwrap();
    }
}

#[test]
fn the_commit_by_time_does_not_depend_on_reserving_space_ahead() {
    let disk = formatted();
    let engine = committing(&disk);
    add_disk(&engine, "vm", BLOCKS, Provisioning::Thin);
    drop(engine.claim_blocks(256).unwrap());
    (0..250).for_each(|block| write(&engine, block, 1));
    disk.fail_requests(Fault::Reserve, 0, u64::MAX);
    let mut watch = Watch::new();
    assert_eq!(engine.maintain(&mut watch).unwrap_err().kind(), ErrorKind::Io);
    engine.check_running().unwrap();
    assert!(engine.log.clocks.is_durable(engine.acknowledged()));
}

#[test]
fn a_flush_that_fails_does_not_keep_maintenance_from_dropping_deleted_disks() {
    let disk = grown();
    let (block, leaf) = leaves(&disk)[2];
    let engine = committing(&disk);
    for block in 0..500 {
        try_write(&engine, 2, block, 1).unwrap();
    }
    engine.flush().unwrap();
    engine.delete_disk(2, &[]).unwrap();
    let used = engine.counts().data.used;
    // The write cannot enter the map, and is not given up, because the medium seems to fail as a whole.
    let _mend = lose_page(&disk, "map", leaf);
    disk.fail_reads(files::SUPERBLOCK_FILE, 0..2 * BLOCK_SIZE as u64).unwrap();
    engine.meta.lock().pages.drop_clean();
    write(&engine, block, 9);
    assert_eq!(engine.maintain(&mut Watch::new()).unwrap_err().kind(), ErrorKind::Io);
    engine.check_running().unwrap();
    assert!(!engine.log.clocks.is_durable(engine.acknowledged()));
    assert!(engine.counts().data.used < used);
}

/// Removes all pages from memory, as if none were dirty, and makes a page of the data table unreadable.
pub(super) fn lose_entries(disk: &SimulatedDisk, engine: &Engine, page: u64) -> impl Fn() + use<> {
    let mut meta = engine.meta.lock();
    drop(meta.pages.capture_now());
    meta.pages.drop_clean();
    lose_page(disk, "data.table", page)
}

#[test]
fn a_failed_lookup_of_journalled_payload_claims_no_block() {
    let (disk, engine) = made();
    drop(engine.claim_blocks(1024).unwrap());
    for block in 0..500 {
        write(&engine, block, 1);
    }
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    (500..520).for_each(|block| write(&engine, block, 2));
    engine.flush().unwrap();
    let pages = |engine: &Engine| engine.meta.lock().logged.keys().map(|block| block / 508).collect::<Vec<_>>();
    assert!(pages(&engine).contains(&0) && pages(&engine).contains(&1), "{:?}", pages(&engine));
    let _mend = lose_entries(&disk, &engine, 1);
    engine.write_logged(64).unwrap_err();
    assert!(engine.meta.lock().in_flight.is_empty());
}

#[test]
fn changes_that_cannot_be_retired_stop_the_store() {
    let (disk, engine) = made();
    write(&engine, 0, 1);
    engine.settle(&engine.head(1)).unwrap();
    assert!(!engine.meta.lock().pending.is_empty());
    let _mend = lose_entries(&disk, &engine, 0);
    engine.commit_changes().unwrap_err();
    assert!(engine.running.is_stopped());
}

/// A store with flushed content, whose operation `number` of a checkpoint fails.
fn failed_checkpoint(number: u64) -> SimulatedDisk {
    let (disk, engine) = made();
    (0..300).for_each(|block| write(&engine, block, 7));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    disk.fail_operation(disk.operations() + number);
    let _ = engine.checkpoint();
    disk
}

#[test]
fn a_superblock_that_never_reached_the_medium_is_not_used() {
    let sequence = |disk: &SimulatedDisk| {
        let file = disk.directory().open(files::SUPERBLOCK_FILE, IoMode::Buffered).unwrap();
        Superblock::read(&*file).unwrap().0.sequence
    };
    let unwritten: Vec<u64> = (0..40)
        .filter(|number| {
            let disk = failed_checkpoint(*number);
            sequence(&disk) != sequence(&disk.crash())
        })
        .collect();
    assert!(!unwritten.is_empty());
    for (number, sync, cut) in unwritten
        .iter()
        .flat_map(|number| [0, 6].map(|sync| (number, sync)))
        .flat_map(|(number, sync)| (0..24).map(move |cut| (*number, sync, cut)))
    {
        let disk = failed_checkpoint(number);
        disk.mend();
        // The flush of the superblock fails, and loses the copy in the page cache.
        disk.fail_requests(Fault::Sync, sync, 1);
        disk.cut_after(disk.operations() + cut);
        drop(open(&disk));
        let engine = open(&disk.crash()).unwrap_or_else(|error| panic!("{number} {sync} {cut}: {error}"));
        assert!((0..300).all(|block| value(&engine, block).unwrap() == 7), "{number} {sync} {cut}");
        is_whole(&engine);
    }
}

/// Loses a page of a table after the regions of the table were loaded and its pages were evicted.
pub(super) fn lose_loaded(
    disk: &SimulatedDisk,
    engine: &Engine,
    name: &'static str,
    page: u64,
    corrupt: bool,
) -> impl Fn() + use<> {
    engine.checkpoint().unwrap();
    engine.meta.lock().pages.drop_clean();
    let mend = lose_page(disk, name, page);
    let (disk, at) = (disk.clone(), page * BLOCK_SIZE as u64);
    let spoil = move || disk.flip_bit(name, at + 100, 1).unwrap();
    if corrupt {
        mend();
        spoil();
    }
    move || if corrupt { spoil() } else { mend() }
}

#[test]
fn a_table_page_lost_after_its_region_was_loaded_does_not_stop_the_store() {
    for corrupt in [false, true] {
        let (disk, engine) = made();
        assert_eq!(add_disk(&engine, "other", BLOCKS, Provisioning::Thin), 2);
        drop(engine.claim_blocks(3000).unwrap());
        for block in 0..1000 {
            write(&engine, block, 1);
            if block % 100 == 0 {
                engine.pump().unwrap();
            }
        }
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        // The lost page has the entries of the next new blocks, so writes of the other disk use another region.
        let next = own_block(&engine, 1, 999).start / TABLE_ENTRIES;
        let mend = lose_loaded(&disk, &engine, "data.table", next, corrupt);
        let before = engine.counts().data;
        for block in 0..1500 {
            try_write(&engine, 2, block, 4).unwrap();
            if block % 100 == 0 {
                engine.pump().unwrap();
            }
        }
        flush_disk(&engine, 2).unwrap();
        assert_eq!(engine.failure(), None);
        assert_eq!(engine.counts().data.used, before.used + 1500);
        assert_eq!(value(&engine, 0).unwrap(), 1);
        mend();
        engine.load_unreadable();
        assert_eq!(engine.meta.lock().data.damage().is_some(), corrupt);
        is_whole(&engine);
        let counts = engine.counts().data;
        engine.close().unwrap();
        drop(engine);
        let engine = open(&disk).unwrap();
        let now = engine.counts().data;
        assert_eq!((now.used, now.backed), (counts.used, counts.backed));
        is_whole(&engine);
    }
}

#[test]
fn a_table_page_of_the_map_lost_after_its_region_was_loaded_does_not_stop_the_store() {
    for corrupt in [false, true] {
        let disk = grown();
        let engine = open(&disk).unwrap();
        assert_eq!(add_disk(&engine, "third", BLOCKS, Provisioning::Thin), 3);
        // This write allocates a node.
        try_write(&engine, 2, 0, 4).unwrap();
        flush_disk(&engine, 2).unwrap();
        engine.settle(&engine.head(2)).unwrap();
        engine.flush().unwrap();
        // The first write to a disk needs a new node. The page has the entries of all free nodes that have space.
        let mend = lose_loaded(&disk, &engine, "map.table", 0, corrupt);
        let _ = try_write(&engine, 3, 0, 4);
        let _ = engine.settle(&engine.head(3));
        let _ = flush_disk(&engine, 3);
        assert_eq!(engine.failure(), None);
        mend();
        engine.load_unreadable();
        assert_eq!(value(&engine, 0).unwrap(), 1);
        is_whole(&engine);
    }
}

#[test]
fn blocks_freed_while_their_region_is_unreadable_are_not_allocated_before_that_is_durable() {
    let disk = grown();
    let mend = lose_page(&disk, "data.table", 20);
    let engine = open(&disk).unwrap();
    drop(engine.claim_blocks(3000).unwrap());
    assert_eq!(engine.meta.lock().data.unreadable(), [0]);
    let freed = own_block(&engine, 1, 0);
    engine.discard_blocks(&engine.head(1), 0..1).unwrap();
    engine.settle(&engine.head(1)).unwrap();
    assert!(!engine.meta.lock().pending.is_empty());
    mend();
    engine.load_unreadable();
    let mut guard = engine.meta.lock();
    let meta = &mut *guard;
    assert!(meta.data.unreadable().is_empty());
    while let Some(run) = meta.data.allocate(&mut meta.pages, 4096).unwrap() {
        assert!(!(run.start..run.start + run.blocks).contains(&freed.start), "{run:?}");
    }
}

#[test]
fn a_table_page_lost_while_blocks_are_written_does_not_stop_the_store() {
    let (disk, engine) = with_a_block(3000);
    write(&engine, 100, 2);
    // The new block is allocated and not in the map yet.
    let (other, medium) = (Arc::clone(&engine), disk.clone());
    before_next(&disk, Request::Write, move || {
        other.meta.lock().pages.drop_clean();
        let _mend = lose_page(&medium, "data.table", 0);
    });
    let _ = engine.settle(&engine.head(1));
    assert_eq!((engine.failure(), engine.meta.lock().data.unreadable()), (None, vec![0]));
    flush_disk(&engine, 1).unwrap();
    assert_eq!(value(&engine, 100).unwrap(), 2);
}

#[test]
fn a_region_is_not_used_again_while_the_freeing_of_its_blocks_is_being_appended() {
    let disk = grown();
    let mend = lose_page(&disk, "data.table", 20);
    let engine = open(&disk).unwrap();
    drop(engine.claim_blocks(3000).unwrap());
    engine.discard_blocks(&engine.head(1), 0..1).unwrap();
    engine.settle(&engine.head(1)).unwrap();
    mend();
    let other = Arc::clone(&engine);
    before_next(&disk, Request::Write, move || {
        other.load_unreadable();
    });
    engine.commit_changes().unwrap();
    assert_eq!(engine.meta.lock().data.unreadable(), [0]);
    engine.load_unreadable();
    assert!(engine.meta.lock().data.unreadable().is_empty());
}

#[test]
fn a_lookup_passes_over_lost_pages_without_a_read_under_the_lock() {
    for corrupt in [false, true] {
        let disk = grown();
        let mend = lose_page(&disk, "data.table", 20);
        if corrupt {
            mend();
            disk.flip_bit("data.table", 20 * BLOCK_SIZE as u64 + 100, 1).unwrap();
        }
        let engine = open(&disk).unwrap();
        let before = engine.meta.lock().pages.statistics().locked;
        let mut search = ExtensionSearch::default();
        let run = engine.meta.look(|meta| meta.data.plan_extension(&mut meta.pages, 300, &mut search)).unwrap();
        assert!(run.start >= REGION_BLOCKS, "{run:?}");
        assert_eq!(engine.meta.lock().pages.statistics().locked, before, "corrupt: {corrupt}");
        // A lookup that needs the page fails with the error of reading the page.
        let kind = engine.meta.look(|meta| meta.entry(20 * TABLE_ENTRIES)).unwrap_err().kind();
        assert_eq!(kind, if corrupt { ErrorKind::Corrupt } else { ErrorKind::Io });
    }
}
