//! Space: acknowledged writes always have space, failures leak none, and thick disks keep their reservations.

use super::unreadable::{lose_entries, lose_loaded};
use super::*;
use backend::simulated::{Fault, Request};
use backend::{File, IoMode};
use std::sync::atomic::{AtomicU64, Ordering};

const SIZE: u64 = 256;

fn write_to(engine: &Engine, disk: u64, logical: u64, value: u8) -> Result<()> {
    engine.write_blocks(&engine.head(disk), logical, slice(value, 1))
}

fn value_of(engine: &Engine, disk: u64, logical: u64) -> u8 {
    let head = engine.head(disk);
    engine.read_blocks("disk", logical..logical + 1, &|range| engine.plan_head(&head, range)).unwrap()[0]
}

/// Writes new blocks of a disk until there is no room for them.
fn write_until_full(engine: &Engine, disk: u64) -> u64 {
    for block in 0.. {
        match write_to(engine, disk, block, 200) {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                return block;
            }
        }
    }
    unreachable!("the file system was full")
}

/// Lets another disk use all remaining space of the file system.
fn fill_with_other(disk: &SimulatedDisk, engine: &Engine) {
    let other = add_disk(engine, "other", 1 << 20, Provisioning::Thin);
    fill_up(disk);
    write_until_full(engine, other);
    engine.flush().unwrap();
}

fn allocated(disk: &SimulatedDisk) -> u64 {
    let directory = disk.directory();
    let data: Arc<dyn File> = directory.open("data.0000", IoMode::Buffered).unwrap();
    data.allocated().unwrap() / BLOCK_SIZE as u64
}

/// A store in which many blocks of disk 1 were discarded, durably.
fn discarded() -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = made();
    (0..1000).for_each(|block| write(&engine, block, 1));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    engine.discard_blocks(&engine.head(1), 0..1000).unwrap();
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.meta.lock().release_freed();
    (disk, engine)
}

#[test]
fn reservations_that_exceed_free_space_are_refused_without_allocation() {
    let (disk, engine) = made();
    let available = || disk.directory().room().unwrap().available;
    disk.set_capacity(disk.directory().room().unwrap().total - available() + (32 << 20));
    let before = available();
    for refused in [engine.claim_blocks(16 << 10).map(drop), engine.check_space(16 << 10)] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoSpace);
    }
    assert_eq!(available(), before);
    // The space of a deleted disk counts as available.
    let gone = add_disk(&engine, "gone", 6000, Provisioning::ZeroedThick);
    engine.flush().unwrap();
    assert_eq!(engine.check_space(4000).unwrap_err().kind(), ErrorKind::NoSpace);
    engine.delete_disk(gone, &[]).unwrap();
    engine.check_space(4000).unwrap();
    write_to(&engine, 1, 0, 1).unwrap();
    engine.flush().unwrap();
}

#[test]
fn records_use_the_space_reserved_for_them_on_a_full_file_system() {
    let (disk, engine) = made();
    fill_up(&disk);
    // Eight records fill a page of the catalog.
    for number in 0..40 {
        engine.create_disk(new_disk(&format!("new{number}"), 16)).unwrap();
        engine.rename_disk(1, &format!("name{number}")).unwrap();
    }
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!(engine.with_catalog(|catalog| catalog.disks().count()), 41);
    is_whole(&engine);
}

#[test]
fn space_whose_punch_failed_stays_usable_and_is_punched_later() {
    let (disk, engine) = discarded();
    let before = disk.operations();
    let given = engine.punch_free(&mut 0, 16, 0, 1 << 16).unwrap();
    let (last, after) = (disk.operations() - 1, allocated(&disk));
    assert!(given >= 1000);
    for number in [before, last] {
        // In a store with the same content, an operation fails: a failed append to the journal stops the store, a
        // failed punch does not.
        let (disk, engine) = discarded();
        disk.fail_operation(number);
        assert_eq!(engine.punch_free(&mut 0, 16, 0, 1 << 16).unwrap_err().kind(), ErrorKind::Io);
        if number == before {
            assert_eq!(engine.check_running().unwrap_err().kind(), ErrorKind::Stopped);
            continue;
        }
        let counts = engine.counts().data;
        assert_eq!((counts.used, counts.free), (0, counts.backed));
        // New writes reserve space in the same places again, and occupy no additional space.
        let taken = allocated(&disk);
        assert!(taken > after);
        (0..500).for_each(|block| write(&engine, block, 7));
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        engine.punch_free(&mut 0, 16, 0, 1 << 16).unwrap();
        assert!((0..500).all(|block| value(&engine, block).unwrap() == 7));
        let counts = engine.counts().data;
        assert_eq!(allocated(&disk), counts.backed, "{counts:?}");
        is_whole(&engine);
    }
}

#[test]
fn the_lost_entries_of_space_that_could_not_be_punched_are_not_read_in_each_round() {
    let (disk, engine) = discarded();
    disk.fail_requests(Fault::Punch, 0, u64::MAX);
    assert_eq!(engine.punch_free(&mut 0, 16, 0, 1 << 16).unwrap_err().kind(), ErrorKind::Io);
    disk.mend();
    engine.checkpoint().unwrap();
    let mend = lose_entries(&disk, &engine, 0);
    let reads = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&reads);
    disk.set_pace(Arc::new(move |request| {
        counted.fetch_add(u64::from(request == Request::Read), Ordering::SeqCst);
    }));
    let round = || {
        reads.store(0, Ordering::SeqCst);
        engine.punch_free(&mut 0, 16, 0, 1 << 16).unwrap();
        reads.load(Ordering::SeqCst)
    };
    assert!(round() > 0);
    assert_eq!((round(), round()), (0, 0));
    mend();
    engine.load_unreadable();
    round();
    assert_eq!(allocated(&disk), engine.counts().data.backed);
    is_whole(&engine);
}

#[test]
fn space_whose_punch_failed_until_closing_is_punched_after_opening() {
    for mended in [true, false] {
        let (disk, engine) = discarded();
        disk.fail_requests(Fault::Punch, 0, u64::MAX);
        assert_eq!(engine.punch_free(&mut 0, 16, 0, 1 << 16).unwrap_err().kind(), ErrorKind::Io);
        // This run models a reservation that failed after the file system had found a part of the space.
        engine.reserves.note_unreturned(Run { start: engine.counts().data.backed + 4096, blocks: 64 });
        let beyond = allocated(&disk) - engine.counts().data.backed;
        assert!(beyond > 0);
        if mended {
            disk.mend();
        }
        engine.close().unwrap();
        drop(engine);
        disk.mend();
        let engine = open(&disk).unwrap();
        assert_eq!(allocated(&disk), engine.counts().data.backed, "{mended}");
        is_whole(&engine);
    }
}

#[test]
fn an_overwrite_acknowledged_on_a_full_file_system_is_written_back_during_other_writes() {
    let (disk, engine) = made();
    (0..64).for_each(|block| write(&engine, block, 1));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    fill_with_other(&disk, &engine);
    write(&engine, 5, 2);
    let run = own_block(&engine, 1, 5);
    // Journalled payload is being written to the block.
    engine.meta.lock().in_flight.claim(run);
    while engine.write_back_once().unwrap() {}
    engine.meta.lock().in_flight.release(run);
    engine.flush().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!(value(&engine, 5).unwrap(), 2);
    is_whole(&engine);
}

#[test]
fn zeroing_acknowledged_on_a_full_file_system_is_written_back_over_held_blocks() {
    let (disk, engine) = made();
    (0..64).for_each(|block| write(&engine, block, 1));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    fill_with_other(&disk, &engine);
    engine.zero_blocks(&engine.head(1), 0..32).unwrap();
    let run = own_block(&engine, 1, 5);
    engine.meta.lock().in_flight.claim(run);
    engine.flush().unwrap();
    engine.meta.lock().in_flight.release(run);
    assert_eq!((value(&engine, 5).unwrap(), value(&engine, 40).unwrap()), (0, 1));
    write(&engine, 5, 3);
    engine.flush().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!((value(&engine, 5).unwrap(), value(&engine, 6).unwrap()), (3, 0));
    is_whole(&engine);
}

#[test]
fn buffered_writes_at_a_snapshot_of_a_thick_disk_do_not_use_its_reservation() {
    let (disk, engine) = made();
    let thick = add_disk(&engine, "thick", SIZE, Provisioning::ZeroedThick);
    take(&engine, thick, "one");
    (0..100).for_each(|block| write_to(&engine, thick, block, 1).unwrap());
    let two = take(&engine, thick, "two");
    engine.settle(&engine.head(thick)).unwrap();
    engine.wait_sealed(two).unwrap();
    // A surplus of the reservation stays, because the record that returns it and the record of the next snapshot could
    // be appended in either order.
    assert!(engine.with_catalog(|catalog| catalog.get(thick).unwrap().reserved) >= SIZE);
    engine.flush().unwrap();
    let other = add_disk(&engine, "other", 1 << 20, Provisioning::Thin);
    fill_up(&disk);
    write_until_full(&engine, other);
    for round in 2..5 {
        // The blocks are buffered and written back repeatedly, but each needs a new block only once.
        (0..SIZE).for_each(|block| write_to(&engine, thick, block, round).unwrap());
        engine.flush().unwrap();
    }
    assert!((0..SIZE).all(|block| value_of(&engine, thick, block) == 4));
    is_whole(&engine);
}

#[test]
fn a_snapshot_on_a_full_file_system_keeps_space_for_acknowledged_writes() {
    let (disk, engine) = made();
    let thick = add_disk(&engine, "thick", SIZE, Provisioning::ZeroedThick);
    take(&engine, thick, "one");
    fill_with_other(&disk, &engine);
    // The writes have no claim: they use the reservation of the disk.
    (0..100).for_each(|block| write_to(&engine, thick, block, 1).unwrap());
    let refused = engine.snapshot(&[NewSnapshot { disk: thick, name: "two".into(), uuid: [2; 16], incomplete: false }]);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoSpace);
    // Leaves just the space that the snapshot needs.
    let room = disk.directory().room().unwrap();
    disk.set_capacity(room.total - room.available + 100 * BLOCK_SIZE as u64 + (64 << 10));
    take(&engine, thick, "two");
    (0..SIZE).for_each(|block| write_to(&engine, thick, block, 2).unwrap());
    engine.flush().unwrap();
    assert!((0..SIZE).all(|block| value_of(&engine, thick, block) == 2));
    is_whole(&engine);
}

#[test]
fn a_buffered_write_can_be_overwritten_on_a_full_file_system() {
    let (disk, engine) = made();
    let other = add_disk(&engine, "other", 1 << 20, Provisioning::Thin);
    drop(engine.claim_blocks(64).unwrap());
    fill_up(&disk);
    (0..8).for_each(|block| write_to(&engine, other, block, 1).unwrap());
    assert_eq!(engine.buffers.blocks(), 8);
    let mut others = Vec::new();
    while let Some(claim) = engine.try_claim(1) {
        others.push(claim);
    }
    let head = engine.head(other);
    // The write would cover buffered blocks and blocks without any space.
    let refused = engine.write_blocks(&head, 4, slice(3, 8)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    engine.write_blocks(&head, 0, slice(2, 8)).unwrap();
    drop(others);
    engine.flush().unwrap();
    assert!((0..8).all(|block| value_of(&engine, other, block) == 2));
    is_whole(&engine);
}

/// A store with a snapshot of disk 1. A buffered write to the disk would overwrite a block in place.
fn before_revert() -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine) = made();
    (0..8).for_each(|block| write(&engine, block, 1));
    let snapshot = take(&engine, 1, "s");
    (0..8).for_each(|block| write(&engine, block, 2));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    write(&engine, 3, 3);
    engine.reserves.forget_metadata(PageFile::Catalog);
    (disk, engine, snapshot)
}

#[test]
fn a_failed_revert_leaves_the_head_and_its_clients_unchanged() {
    let (disk, engine, snapshot) = before_revert();
    engine.revert(1, snapshot).unwrap();
    // The last three operations are the reservation for the catalog, its flush, and the append to the journal.
    let number = disk.operations() - 3;
    assert_eq!(value(&engine, 3).unwrap(), 1);
    let (disk, engine, snapshot) = before_revert();
    let client = engine.head(1);
    disk.fail_operation(number);
    let error = engine.revert(1, snapshot).unwrap_err();
    assert!(error.kind() == ErrorKind::Io && error.to_string().contains("reserving"), "{error}");
    assert_eq!(value(&engine, 3).unwrap(), 3);
    engine.write_blocks(&client, 4, slice(4, 1)).unwrap();
    engine.flush().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!([2, 3, 4].map(|block| value(&engine, block).unwrap()), [2, 3, 4]);
    engine.revert(1, snapshot).unwrap();
    assert_eq!(value(&engine, 3).unwrap(), 1);
    is_whole(&engine);
}

#[test]
fn a_refused_reception_leaves_the_existing_disk_and_its_clients_unchanged() {
    let (_disk, engine) = made();
    write(&engine, 0, 1);
    take(&engine, 1, "same");
    write(&engine, 0, 2);
    let hidden = add_disk(&engine, ".hidden", BLOCKS, Provisioning::Thin);
    write_to(&engine, hidden, 0, 9).unwrap();
    let snapshot = take(&engine, hidden, "same");
    let client = engine.head(1);
    let error = engine.arrive(&[ReceiveCommit::Update { id: hidden, snapshot, disk: 1 }]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
    engine.write_blocks(&client, 1, slice(3, 1)).unwrap();
    engine.flush().unwrap();
    assert_eq!([0, 1].map(|block| value(&engine, block).unwrap()), [2, 3]);
    assert_eq!(value_of(&engine, hidden, 0), 9);
    is_whole(&engine);
}

#[test]
fn a_store_whose_lock_is_replaced_stops_writing() {
    for name in ["lock", "superblock"] {
        let (disk, engine) = made();
        engine.close().unwrap();
        drop(engine);
        let directory = disk.directory();
        let owner = Arc::new(Owner::take(&*directory).unwrap());
        assert_eq!(Owner::take(&*directory).err().unwrap().kind(), ErrorKind::Busy);
        let engine = Engine::open_owned(disk.directory(), options(), Some(&owner)).unwrap();
        write(&engine, 0, 1);
        engine.flush().unwrap();
        write(&engine, 1, 1);
        directory.rename(name, "elsewhere").unwrap();
        std::thread::sleep(super::super::owner::LOOK_INTERVAL);
        let error = engine.flush().unwrap_err();
        assert!(error.kind() == ErrorKind::Stopped && error.to_string().contains(name), "{error}");
        let head = engine.head(1);
        assert_eq!(engine.write_blocks(&head, 2, slice(1, 1)).unwrap_err().kind(), ErrorKind::Stopped);
        directory.rename("elsewhere", name).unwrap();
        drop((engine, owner));
        let engine = open(&disk).unwrap();
        assert_eq!([0, 1].map(|block| value(&engine, block).unwrap()), [1, 0]);
    }
}

#[test]
fn a_store_whose_owner_was_dropped_stops_writing() {
    let (disk, engine) = made();
    drop(engine);
    let owner = Arc::new(Owner::take(&*disk.directory()).unwrap());
    let engine = Engine::open_owned(disk.directory(), options(), Some(&owner)).unwrap();
    drop(owner);
    write(&engine, 0, 1);
    assert_eq!(engine.flush().unwrap_err().kind(), ErrorKind::Stopped);
}

#[test]
fn an_overwrite_needs_no_space_during_write_back_of_its_block() {
    let (disk, engine) = made();
    write(&engine, 0, 1);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    fill_with_other(&disk, &engine);
    let run = own_block(&engine, 1, 0);
    engine.meta.lock().in_flight.claim(run);
    write_to(&engine, 1, 0, 2).unwrap();
    engine.meta.lock().in_flight.release(run);
    engine.flush().unwrap();
    assert_eq!(value_of(&engine, 1, 0), 2);
    is_whole(&engine);
}

/// A store with a data file that occupies 300 blocks that no record describes, as after a crash in a reservation.
fn unclaimed() -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine) = discarded();
    engine.punch_free(&mut 0, 1, 0, 1 << 16).unwrap();
    let before = allocated(&disk);
    let file = disk.directory().open("data.0000", IoMode::Buffered).unwrap();
    let offset = (engine.counts().data.backed + 4096) * BLOCK_SIZE as u64;
    file.reserve(offset, 300 * BLOCK_SIZE as u64).unwrap();
    assert_eq!(allocated(&disk), before + 300);
    engine.reserves.begin_search();
    (disk, engine, before)
}

#[test]
fn a_crash_leaves_no_reservation_beyond_the_size_of_a_thick_disk() {
    let (disk, engine) = made();
    let thick = add_disk(&engine, "thick", 64, Provisioning::ZeroedThick);
    take(&engine, thick, "s");
    let reserved = |engine: &Engine| engine.with_catalog(|catalog| catalog.get(thick).unwrap().reserved);
    assert_eq!(reserved(&engine), 64);
    // A resize reserves blocks for the new size before the disk has this size.
    engine.set_more_aside(thick, 100).unwrap();
    assert_eq!(reserved(&engine), 164);
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!((reserved(&engine), engine.counts().reserved), (64, 64));
}

#[test]
fn a_snapshot_of_thick_disks_without_space_says_how_much_must_be_free() {
    let (disk, engine) = made();
    let thick =
        [("a", 1 << 12), ("b", 1 << 13)].map(|(name, size)| add_disk(&engine, name, size, Provisioning::ZeroedThick));
    fill_up(&disk);
    let wanted = thick.map(|disk| NewSnapshot { disk, name: "s".into(), uuid: [7; 16], incomplete: false });
    let refused = engine.snapshot(&wanted[..1]).unwrap_err();
    let text = refused.to_string();
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    assert!(text.starts_with("disk 'a' is thick, and after a snapshot all its writes need new space: "), "{text}");
    let numbers: Vec<u64> = text.split(' ').filter_map(|word| word.trim_start_matches('(').parse().ok()).collect();
    let [wanted_bytes, left] = numbers[..] else { panic!("{text}") };
    assert!(left < wanted_bytes && wanted_bytes <= (1 << 12) * BLOCK_SIZE as u64, "{text}");
    let text = engine.snapshot(&wanted).unwrap_err().to_string();
    assert!(text.starts_with("disks 'a', 'b' are thick, and after a snapshot all their writes need"), "{text}");
    is_whole(&engine);
}

/// The record of a snapshot precedes pending changes in the journal. So replay counts the blocks that these changes
/// have mapped against what the snapshot reserved.
#[test]
fn a_crash_leaves_a_thick_disk_its_reservation_although_replay_has_counted_all_of_it_twice() {
    let (disk, engine) = made();
    let thick = add_disk(&engine, "thick", 64, Provisioning::ZeroedThick);
    take(&engine, thick, "one");
    let reserved = |engine: &Engine| engine.with_catalog(|catalog| catalog.get(thick).unwrap().reserved);
    (0..64).for_each(|block| write_to(&engine, thick, block, 1).unwrap());
    take(&engine, thick, "two");
    assert_eq!(reserved(&engine), 128, "the buffered blocks and the whole size are reserved");
    engine.settle(&engine.head(thick)).unwrap();
    assert!(!engine.meta.lock().pending.is_empty(), "the blocks are mapped, and their records are pending");
    take(&engine, thick, "three");
    assert_eq!(reserved(&engine), 64);
    engine.flush().unwrap();
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!((reserved(&engine), engine.counts().reserved), (64, 64));
    fill_with_other(&disk, &engine);
    (0..64).for_each(|block| write_to(&engine, thick, block, 2).unwrap());
    engine.flush().unwrap();
    assert!((0..64).all(|block| value_of(&engine, thick, block) == 2));
    is_whole(&engine);
}

#[test]
fn a_bulk_write_to_a_missing_data_file_takes_no_blocks() {
    let (disk, engine) = with_a_block(256);
    engine.close().unwrap();
    drop(engine);
    disk.directory().remove("data.0000").unwrap();
    let engine = open(&disk).unwrap();
    let free = engine.counts().data.free;
    let refused = BulkWriter::new(&engine, 1).write(8, &slice(7, 8)).unwrap_err();
    assert_eq!((refused.kind(), engine.counts().data.free), (ErrorKind::Corrupt, free));
}

#[test]
fn what_a_crash_left_reserved_is_given_back_step_by_step() {
    let (disk, engine, before) = unclaimed();
    assert!(!engine.return_unclaimed_room(true, || false));
    assert_eq!(allocated(&disk), before + 300);
    assert!(engine.return_unclaimed_room(true, || true) && !engine.reserves.is_search_open());
    assert_eq!(allocated(&disk), before);
    // A check completes the search first, so it reports no leak.
    let (disk, engine, before) = unclaimed();
    is_whole(&engine);
    assert_eq!(allocated(&disk), before);
    // A close completes the search too.
    let (disk, engine, before) = unclaimed();
    engine.close().unwrap();
    assert_eq!(allocated(&disk), before);
}

/// Other space is returned, and the check reports the rest.
#[test]
fn a_damaged_page_of_the_table_ends_neither_the_search_for_unclaimed_space_nor_a_check() {
    for corrupt in [false, true] {
        let (disk, engine, _) = unclaimed();
        // The page describes space that is unclaimed too, which nothing tells from that of blocks in use.
        let file = disk.directory().open("data.0000", IoMode::Buffered).unwrap();
        file.reserve(0, 8 * BLOCK_SIZE as u64).unwrap();
        let all = allocated(&disk);
        let _mend = lose_loaded(&disk, &engine, "data.table", 0, corrupt);
        let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
        let problems: Vec<&str> = report.findings.iter().map(|finding| finding.problem.as_str()).collect();
        assert!(problems.len() == 1 && problems[0].contains("page 0 of data.table is damaged"), "{problems:?}");
        assert_eq!((allocated(&disk), report.leaked), (all - 300, 0));
    }
}

#[test]
fn no_space_is_returned_where_a_page_of_the_table_has_lost_its_entries() {
    let (disk, engine) = with_a_block(256);
    let file = disk.directory().open("data.0000", IoMode::Buffered).unwrap();
    file.reserve(4096 * BLOCK_SIZE as u64, 300 * BLOCK_SIZE as u64).unwrap();
    let before = allocated(&disk);
    let mend = lose_entries(&disk, &engine, 0);
    mend();
    let table = disk.directory().open("data.table", IoMode::Buffered).unwrap();
    table.write_at(&[&Buffer::zeroed(1)], 0, true).unwrap();
    engine.reserves.begin_search();
    assert!(engine.return_unclaimed_room(true, || true));
    assert_eq!(allocated(&disk), before);
}

#[test]
fn a_write_takes_what_a_crash_left_reserved() {
    let (disk, engine, _) = unclaimed();
    fill_up(&disk);
    write_to(&engine, 1, 0, 9).unwrap();
    engine.flush().unwrap();
    assert_eq!(value_of(&engine, 1, 0), 9);
    assert!(!engine.reserves.is_search_open());
    is_whole(&engine);
}

#[test]
fn what_a_crash_left_reserved_is_given_back_while_the_store_is_open() {
    let (disk, engine, before) = unclaimed();
    drop(engine);
    let engine = Engine::open(disk.directory(), EngineOptions { threads: true, ..options() }).unwrap();
    let began = std::time::Instant::now();
    while engine.reserves.is_search_open() {
        assert!(began.elapsed().as_secs() < 60, "the search does not end");
        std::thread::yield_now();
    }
    assert!(allocated(&disk) < before + 300);
    is_whole(&engine);
    engine.close().unwrap();
}

#[test]
fn the_space_of_a_block_in_use_is_not_returned() {
    let (_disk, engine) = with_a_block(256);
    let run = own_block(&engine, 1, 0);
    {
        let mut guard = engine.meta.lock();
        let Meta { data, pages, .. } = &mut *guard;
        data.set_backed(pages, run, false).unwrap();
    }
    let mut found = 0;
    let mut each = |_: &dyn File, run: Run| {
        found += run.blocks;
        Ok(())
    };
    engine.unclaimed_room(false, &mut each).unwrap();
    assert_eq!(found, 0);
}
