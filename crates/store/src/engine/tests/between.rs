//! Tests of events between two steps: another thread writes while a flush or a batch waits for the medium, and a read
//! of metadata fails in the middle of a change. No flushed data is lost, no space is reserved twice, and no reservation
//! is recorded in part.

use super::unreadable::{grown, leaves};
use super::*;
use crate::engine::writeback::{Buffered, Plan};
use crate::space::{REGION_BLOCKS, REGION_PAGES};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use backend::IoMode;
use backend::simulated::{Fault, Request};

/// Runs `act` once before the next request of kind `wanted`, on the thread that makes the request.
pub(super) fn before_next(disk: &SimulatedDisk, wanted: Request, act: impl Fn() + Send + Sync + 'static) {
    let done = AtomicBool::new(false);
    disk.set_pace(Arc::new(move |request| {
        if request == wanted && !done.swap(true, Ordering::SeqCst) {
            act();
        }
    }));
}

fn add_other(engine: &Engine) -> Arc<Head> {
    engine.head(add_disk(engine, "other", 1 << 20, Provisioning::Thin))
}

/// Fills the file system, and lets a disk take all free blocks. Returns their number.
fn fill_with(disk: &SimulatedDisk, engine: &Engine, other: &Head) -> u64 {
    fill_up(disk);
    let full = (0..).find(|block| engine.write_blocks(other, *block, slice(9, 1)).is_err()).unwrap();
    engine.settle(other).unwrap();
    engine.flush().unwrap();
    full
}

/// Discards blocks of a disk, and makes them reusable.
fn free(engine: &Engine, disk: &Head, blocks: std::ops::Range<u64>) {
    let wanted = blocks.end - blocks.start;
    engine.discard_blocks(disk, blocks).unwrap();
    engine.settle(disk).unwrap();
    engine.commit_changes().unwrap();
    let mut meta = engine.meta.lock();
    meta.release_freed();
    engine.update_headroom(&meta);
    assert_eq!((engine.reserves.headroom(), engine.reserves.claims()), (wanted, 0));
}

/// Makes a page of a file unreadable. The returned function makes it readable again.
pub(super) fn lose_page(disk: &SimulatedDisk, name: &'static str, page: u64) -> impl Fn() + use<> {
    let file = disk.directory().open(name, IoMode::Buffered).unwrap();
    let mut bytes = Buffer::zeroed(1);
    let at = page * BLOCK_SIZE as u64;
    file.read_at(&mut bytes, at).unwrap();
    disk.fail_reads(name, at..at + BLOCK_SIZE as u64).unwrap();
    move || file.write_at(&[&bytes], at, true).unwrap()
}

/// A store in which block 0 of disk 1 was flushed with content 1, and then overwritten in place with content 2: the
/// journal has payload of the block, and the announcement of the overwrite.
pub(super) fn overwritten() -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = made();
    // Reserves enough space first, so that the steps below reserve none.
    drop(engine.claim_blocks(1024).unwrap());
    // Puts payload of the block into the journal.
    write(&engine, 0, 1);
    engine.flush().unwrap();
    // Overwrites the block in place, after an announcement.
    write(&engine, 0, 2);
    engine.settle(&engine.head(1)).unwrap();
    (disk, engine)
}

#[test]
fn older_payload_does_not_replace_a_flushed_write_after_a_concurrent_write_back() {
    let (disk, engine) = overwritten();
    // While the flush waits for the medium, another write is made to a new block and enters the map.
    let other = Arc::clone(&engine);
    before_next(&disk, Request::Sync, move || {
        write(&other, 100, 5);
        other.settle(&other.head(1)).unwrap();
    });
    engine.flush().unwrap();
    // The next in-place overwrite is announced, and the power is cut while it is written.
    write(&engine, 0, 3);
    disk.cut_after(disk.operations() + 1);
    engine.settle(&engine.head(1)).unwrap_err();
    for _ in 0..8 {
        let engine = open(&disk.crash()).unwrap();
        let head = engine.head(1);
        let block = engine.read_blocks("vm", 0..1, &|range| engine.plan_head(&head, range)).unwrap();
        assert!(block.iter().all(|byte| [2, 3].contains(byte)), "flushed content is gone: {}", block[0]);
    }
}

#[test]
fn a_block_allocated_for_a_write_without_claim_is_not_claimed_by_another() {
    let (disk, engine) = made();
    (0..64).for_each(|block| write(&engine, block, 1));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let other = add_other(&engine);
    let full = fill_with(&disk, &engine, &other);
    // The write is admitted without a claim, because it may overwrite its own block. Then one block becomes free.
    write(&engine, 5, 2);
    free(&engine, &other, 0..1);
    // Journalled payload is being written to the block, so write-back must use another block: the free one.
    let run = own_block(&engine, 1, 5);
    engine.meta.lock().in_flight.claim(run);
    let writer = Arc::clone(&engine);
    before_next(&disk, Request::Write, move || {
        // The write may be admitted or refused.
        let _ = writer.write_blocks(&other, full + 1, slice(8, 1));
    });
    engine.settle(&engine.head(1)).unwrap();
    engine.meta.lock().in_flight.release(run);
    assert!(engine.reserves.claims() <= engine.reserves.headroom());
    engine.flush().unwrap();
    assert_eq!(value(&engine, 5).unwrap(), 2);
    is_whole(&engine);
}

#[test]
fn blocks_of_a_write_discarded_during_write_back_are_not_claimed_by_another() {
    let (disk, engine) = made();
    let other = add_other(&engine);
    drop(engine.claim_blocks(256).unwrap());
    engine.checkpoint().unwrap();
    fill_with(&disk, &engine, &other);
    free(&engine, &other, 0..10);
    engine.write_blocks(&engine.head(1), 200, slice(2, 10)).unwrap();
    let writer = Arc::clone(&engine);
    before_next(&disk, Request::Write, move || {
        writer.discard_blocks(&writer.head(1), 200..210).unwrap();
        let _ = writer.write_blocks(&other, 1000, slice(8, 10));
    });
    engine.settle(&engine.head(1)).unwrap();
    assert!(engine.reserves.claims() <= engine.reserves.headroom());
    engine.flush().unwrap();
    assert_eq!((value(&engine, 200).unwrap(), engine.reserves.claims(), engine.reserves.changes()), (0, 0, 0));
    is_whole(&engine);
}

/// While a batch is planned, a write that bypasses the buffer removes a level of the tree, and so frees the root.
#[test]
fn a_batch_is_planned_with_the_root_that_a_concurrent_write_has_made() {
    let (_disk, engine) = made();
    drop(engine.claim_blocks(2048).unwrap());
    let head = engine.head(1);
    let write_back = || {
        engine.settle(&head).unwrap();
        engine.flush().unwrap();
    };
    // Every second block is written, so that each needs an extent of its own and the tree has two leaves.
    (0..300).for_each(|block| write(&engine, 2 * block, 1));
    write_back();
    take(&engine, 1, "s");
    // The disk gets leaves of its own, which map the blocks of the snapshot.
    [0, 598].into_iter().for_each(|block| write(&engine, block, 2));
    write_back();
    engine.checkpoint().unwrap();
    // The pages of the checkpoint map this block to a physical block that only the snapshot maps from here on.
    write(&engine, 590, 3);
    write_back();
    (0..70).for_each(|i| write(&engine, 401 + 2 * i, 4));
    write(&engine, 590, 5);
    let pieces = head.lock().layers.oldest().0.take(0, u64::MAX);
    // Each plan below moves the allocation cursor, so after some of them fewer blocks would be adjacent.
    let run = engine.allocate(&mut engine.meta.lock(), 400).unwrap();
    assert_eq!(run.blocks, 400);
    std::thread::scope(|scope| {
        let mut meta = engine.meta.lock();
        let before = meta.catalog.get(1).unwrap().root;
        let change = scope.spawn(|| {
            let mut meta = engine.meta.lock();
            let checksums = vec![0; run.blocks as usize];
            engine.carry_out(&mut meta, Operation::Map { disk: 1, logical: 0, run, checksums }, 0).unwrap();
            engine.update_headroom(&meta);
        });
        loop {
            let mut plan = Plan::default();
            let fetch = &mut metadata::Fetch::under_the_lock();
            let buffered = Buffered { pieces: &pieces, packs: &[] };
            engine.plan_batch(&mut meta, &head, buffered, false, &mut plan, fetch).unwrap();
            let in_place: Vec<Run> = plan.in_place().collect();
            plan.undo(&mut meta);
            let root = meta.catalog.get(1).unwrap().root;
            let start = meta.places(root, 590..591).unwrap()[0].1.unwrap();
            assert_eq!(in_place, [Run { start, blocks: 1 }]);
            if root != before {
                break;
            }
            // The other thread did not wait for the lock yet.
            assert!(!change.is_finished(), "the tree has lost no level");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    });
}

#[test]
fn a_snapshot_waits_until_the_references_of_its_root_can_be_read() {
    let (disk, engine) = with_a_block(256);
    // The last change of the snapshot needs no page of the table.
    engine.discard_blocks(&engine.head(1), 100..101).unwrap();
    let snapshot = take(&engine, 1, "s");
    let mend = lose_page(&disk, "map.table", 0);
    engine.meta.lock().pages.drop_clean();
    engine.flush().unwrap();
    assert_eq!(engine.wait_sealed(snapshot).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(engine.failure(), None);
    // A later write cannot enter the map. It is lost, and does not prevent further flushes.
    write(&engine, 0, 2);
    let flush = || engine.flush_head(&engine.head(1), engine.acknowledged());
    let told = flush().unwrap_err();
    assert!(told.to_string().contains("are lost"), "{told}");
    flush().unwrap();
    mend();
    engine.wait_sealed(snapshot).unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 1);
    write(&engine, 0, 3);
    flush().unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 3);
    is_whole(&engine);
}

#[test]
fn an_opening_that_cannot_seal_a_snapshot_says_what_to_do() {
    let (disk, engine) = with_a_block(256);
    engine.discard_blocks(&engine.head(1), 100..101).unwrap();
    take(&engine, 1, "s");
    // The engine is dropped without closing, as by a kill. Replay itself needs no page of the table.
    drop(engine);
    let mend = lose_page(&disk, "map.table", 0);
    let refused = open(&disk).err().unwrap();
    assert!(refused.kind() == ErrorKind::Io && refused.to_string().contains("lamina check --repair"), "{refused}");
    mend();
    is_whole(&open(&disk).unwrap());
}

#[test]
fn returned_space_is_replayed_beside_a_damaged_page_of_the_table() {
    let (disk, engine) = with_a_block(3000);
    assert!(engine.reclaim().unwrap() > 2000);
    engine.checkpoint().unwrap();
    drop(engine.claim_blocks(100).unwrap());
    engine.checkpoint().unwrap();
    assert!((1..2000).contains(&engine.reclaim().unwrap()));
    // The engine is dropped without closing, as by a kill. The page describes other blocks of the same region.
    drop(engine);
    disk.flip_bit("data.table", 5 * BLOCK_SIZE as u64 + 100, 1).unwrap();
    let engine = open(&disk).unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 1);
    assert!(engine.meta.lock().data.damage().is_some());
    (1..100).for_each(|block| write(&engine, block, 2));
    engine.flush().unwrap();
    assert_eq!(value(&engine, 99).unwrap(), 2);
}

/// Leaves that were not merged, because one of them could not be read, are merged by replay. The tree is then dropped
/// in fewer steps than the journal has.
#[test]
fn a_deletion_is_replayed_although_a_node_could_not_be_read_once() {
    let disk = grown();
    let leaves = leaves(&disk);
    let engine = open(&disk).unwrap();
    let vm = engine.head(1);
    // Leaves about ten extents of a leaf.
    let shrink = |leaf: usize| {
        engine.discard_blocks(&vm, leaves[leaf].0 + 20..leaves[leaf + 1].0 - 1).unwrap();
        engine.settle(&vm).unwrap();
        engine.flush().unwrap();
    };
    shrink(2);
    engine.checkpoint().unwrap();
    let checkpoints = engine.counters.checkpoints.load(Ordering::Relaxed);
    engine.meta.lock().pages.drop_clean();
    let mend = lose_page(&disk, "map", leaves[2].1);
    shrink(1);
    mend();
    engine.delete_disk(1, &[]).unwrap();
    while engine.drop_all_trash().unwrap() {}
    assert!(engine.with_catalog(|catalog| catalog.find(1).is_none()));
    assert_eq!(engine.counters.checkpoints.load(Ordering::Relaxed), checkpoints);
    // The engine is dropped without closing, as by a kill.
    drop((vm, engine));
    let engine = open(&disk).unwrap();
    assert_eq!(engine.counts().data.used, 0);
    is_whole(&engine);
}

/// A store in which two pages of the table describe the next reservation, and the second page cannot be read.
fn partly_readable() -> (SimulatedDisk, Arc<Engine>, impl Fn()) {
    let (disk, engine) = with_a_block(256);
    engine.meta.lock().pages.drop_clean();
    let mend = lose_page(&disk, "data.table", 1);
    engine.meta.look(|meta| meta.entry(0)).unwrap();
    (disk, engine, mend)
}

#[test]
fn space_that_an_unreadable_page_would_describe_is_reserved_elsewhere() {
    for more in (1..1200).step_by(100) {
        let (disk, engine, mend) = partly_readable();
        let failed = engine.extend(256 + more);
        mend();
        assert!(failed.is_ok() && engine.failure().is_none(), "{more}: {failed:?}");
        engine.extend(1400).unwrap();
        engine.discard_blocks(&engine.head(1), 0..1).unwrap();
        engine.flush().unwrap();
        engine.reclaim().unwrap();
        let before = engine.counts().data;
        engine.close().unwrap();
        drop(engine);
        let engine = open(&disk).unwrap();
        assert_eq!(before.backed, engine.counts().data.backed);
        is_whole(&engine);
    }
}

#[test]
fn no_space_is_reserved_that_an_unreadable_page_would_describe() {
    let (disk, engine, _mend) = partly_readable();
    let (allocated, backed) = (engine.files.allocated().unwrap(), engine.counts().data.backed);
    // On some file systems, punching a hole needs free space, so space that is reserved in vain may not be returned.
    disk.fail_requests(Fault::Punch, 0, u64::MAX);
    engine.extend(257).unwrap();
    let recorded = (engine.counts().data.backed - backed) * BLOCK_SIZE as u64;
    assert!(recorded > 0);
    assert_eq!(engine.files.allocated().unwrap() - allocated, recorded);
}

/// Whether another thread gets the metadata lock at once.
fn is_metadata_unlocked(engine: &Arc<Engine>) -> bool {
    let (sender, receiver) = std::sync::mpsc::channel();
    let engine = Arc::clone(engine);
    std::thread::spawn(move || {
        drop(engine.meta.lock());
        sender.send(())
    });
    receiver.recv_timeout(std::time::Duration::from_secs(10)).is_ok()
}

#[test]
fn space_whose_table_page_is_lost_during_its_reservation_is_returned_and_reserved_elsewhere() {
    let (disk, engine) = with_a_block(256);
    let backed = engine.counts().data.backed;
    let allocated = engine.files.allocated().unwrap();
    let (other, medium, lost) = (Arc::clone(&engine), disk.clone(), AtomicBool::new(false));
    let locked = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&locked);
    disk.set_pace(Arc::new(move |request| {
        if request != Request::Space {
            return;
        }
        if !lost.swap(true, Ordering::SeqCst) {
            other.meta.lock().pages.drop_clean();
            let _mend = lose_page(&medium, "data.table", 0);
        }
        if !is_metadata_unlocked(&other) {
            seen.store(true, Ordering::SeqCst);
        }
    }));
    engine.extend(400).unwrap();
    assert!(!locked.load(Ordering::SeqCst), "space was reserved or returned under the metadata lock");
    assert_eq!((engine.failure(), engine.meta.lock().data.unreadable()), (None, vec![0]));
    assert!(engine.reserves.headroom() >= 400);
    let taken = (engine.counts().data.backed - backed) * BLOCK_SIZE as u64;
    assert_eq!(engine.files.allocated().unwrap() - allocated, taken, "space without a record was returned");
}

#[test]
fn space_for_records_is_reserved_without_the_metadata_lock() {
    let (disk, engine) = made();
    let (other, locked, requests) =
        (Arc::clone(&engine), Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (seen, counted) = (Arc::clone(&locked), Arc::clone(&requests));
    disk.set_pace(Arc::new(move |request| {
        if request == Request::Space {
            counted.fetch_add(1, Ordering::SeqCst);
            if !is_metadata_unlocked(&other) {
                seen.store(true, Ordering::SeqCst);
            }
        }
    }));
    // More records than fit into the space that a new datastore has for them.
    for number in 0..600 {
        take(&engine, 1, &format!("s{number}"));
    }
    assert!(!locked.load(Ordering::SeqCst), "space was reserved under the metadata lock");
    assert!(requests.load(Ordering::SeqCst) > 0);
    is_whole(&engine);
}

/// A store with free blocks. During the next write to its files, the table page of the blocks that are allocated next
/// becomes corrupt.
fn with_a_page_that_becomes_corrupt() -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = with_a_block(3000);
    let (other, medium) = (Arc::clone(&engine), disk.clone());
    before_next(&disk, Request::Write, move || {
        other.meta.lock().pages.drop_clean();
        medium.flip_bit("data.table", 100, 1).unwrap();
    });
    (disk, engine)
}

#[test]
fn a_table_page_that_becomes_corrupt_fails_no_write_back() {
    let (_disk, engine) = with_a_page_that_becomes_corrupt();
    write(&engine, 100, 2);
    engine.settle(&engine.head(1)).unwrap();
    assert!(engine.failure().is_none() && engine.meta.lock().data.damage().is_some());
    engine.flush_head(&engine.head(1), engine.acknowledged()).unwrap();
    assert_eq!(value(&engine, 100).unwrap(), 2);
    // The damaged page has the checksum of this block.
    assert_eq!(value(&engine, 0).unwrap_err().kind(), ErrorKind::Corrupt);
}

/// While a block is written, the table page of its new place becomes corrupt. The same happens to the next new place,
/// which is in another region.
#[test]
fn table_pages_of_two_regions_that_become_corrupt_fail_no_write_back() {
    let (disk, engine) = with_a_block(REGION_BLOCKS + 1000);
    let (other, medium, writes) = (Arc::clone(&engine), disk.clone(), AtomicU64::new(0));
    disk.set_pace(Arc::new(move |request| {
        if request != Request::Write {
            return;
        }
        let region = writes.fetch_add(1, Ordering::SeqCst);
        if region < 2 {
            other.meta.lock().pages.drop_clean();
            medium.flip_bit("data.table", region * REGION_PAGES * BLOCK_SIZE as u64 + 100, 1).unwrap();
        }
    }));
    write(&engine, 100, 2);
    engine.settle(&engine.head(1)).unwrap();
    assert_eq!((engine.failure(), engine.losses()), (None, 2));
    engine.flush_head(&engine.head(1), engine.acknowledged()).unwrap();
    assert_eq!(value(&engine, 100).unwrap(), 2);
}

#[test]
fn a_table_page_that_becomes_corrupt_fails_no_large_write() {
    let (_disk, engine) = with_a_page_that_becomes_corrupt();
    engine.write_blocks(&engine.head(1), 200, slice(2, 64)).unwrap();
    assert!(engine.failure().is_none() && engine.meta.lock().data.damage().is_some());
    engine.settle(&engine.head(1)).unwrap();
    engine.flush_head(&engine.head(1), engine.acknowledged()).unwrap();
    assert!((200..264).all(|block| value(&engine, block).unwrap() == 2));
}

#[test]
fn a_failed_close_can_be_repeated() {
    let (disk, engine) = with_a_block(256);
    write(&engine, 0, 2);
    engine.meta.lock().pages.drop_clean();
    let mend = lose_page(&disk, "map", 0);
    engine.close().unwrap_err();
    mend();
    engine.close().unwrap();
    engine.close().unwrap();
    drop(engine);
    assert_eq!(value(&open(&disk).unwrap(), 0).unwrap(), 2);
}

/// A read finds a block torn by a power cut, while another thread writes the content of the torn overwrite once more.
#[test]
fn an_overwrite_that_ends_during_a_read_of_its_torn_block_is_no_damage() {
    let (disk, engine) = with_a_block(256);
    let run = own_block(&engine, 1, 0);
    {
        let mut guard = engine.meta.lock();
        let meta = &mut *guard;
        meta.data.annotate(&mut meta.pages, run, |_, entry| entry.suspect = true).unwrap();
    }
    let (file, offset) = engine.files.locate(run).unwrap();
    file.write_at(&[&slice(5, 1)], offset, false).unwrap();
    let (reads, other) = (AtomicU64::new(0), Arc::clone(&engine));
    disk.set_pace(Arc::new(move |request| {
        // The block is read for the second time because it differs from its checksum.
        if request != Request::Read || reads.fetch_add(1, Ordering::SeqCst) != 1 {
            return;
        }
        let (engine, file) = (Arc::clone(&other), Arc::clone(&file));
        let (sender, locked) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut guard = engine.meta.lock();
            sender.send(()).unwrap();
            // Meanwhile the block is read.
            std::thread::sleep(std::time::Duration::from_millis(100));
            let meta = &mut *guard;
            meta.data.annotate(&mut meta.pages, run, |_, entry| entry.suspect = false).unwrap();
            file.write_at(&[&slice(1, 1)], offset, false).unwrap();
        });
        locked.recv().unwrap();
    }));
    assert_eq!(value(&engine, 0).unwrap(), 1);
}

#[test]
fn a_snapshot_is_sealed_although_the_threads_have_ended_in_a_failed_close() {
    let (disk, engine) = with_a_block(256);
    engine.close().unwrap();
    drop(engine);
    let engine = Engine::open(disk.directory(), EngineOptions { threads: true, ..options() }).unwrap();
    // The threads end at once, and the close fails before it writes anything back.
    drop(engine.running.begin_closing());
    engine.running.end_threads();
    write(&engine, 0, 2);
    let snapshot = take(&engine, 1, "s");
    let (sender, receiver) = std::sync::mpsc::channel();
    let reader = Arc::clone(&engine);
    std::thread::spawn(move || sender.send(reader.wait_sealed(snapshot)));
    receiver.recv_timeout(std::time::Duration::from_secs(10)).unwrap().unwrap();
    engine.close().unwrap();
}

/// Otherwise it would hold the lock on changes of the catalog, for which requests of all disks wait.
#[test]
fn a_request_for_a_snapshot_that_cannot_be_sealed_fails_while_other_disks_make_progress() {
    let (disk, engine) = with_a_block(256);
    engine.close().unwrap();
    drop(engine);
    let engine = Engine::open(disk.directory(), EngineOptions { threads: true, ..options() }).unwrap();
    let gate = engine.writeback.lock();
    // The last change of the snapshot needs no page of the table.
    engine.discard_blocks(&engine.head(1), 100..101).unwrap();
    let snapshot = take(&engine, 1, "s");
    let mend = lose_page(&disk, "map.table", 0);
    engine.meta.lock().pages.drop_clean();
    drop(gate);
    let done = Arc::new(AtomicBool::new(false));
    let (other, ends) = (Arc::clone(&engine), Arc::clone(&done));
    let progress = std::thread::spawn(move || {
        while !ends.load(Ordering::SeqCst) {
            other.writeback.failing.note_progress();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    });
    let (sender, receiver) = std::sync::mpsc::channel();
    let reader = Arc::clone(&engine);
    std::thread::spawn(move || sender.send(reader.wait_sealed(snapshot)));
    let waited = receiver.recv_timeout(std::time::Duration::from_secs(10));
    done.store(true, Ordering::SeqCst);
    progress.join().unwrap();
    assert_eq!(waited.unwrap().unwrap_err().kind(), ErrorKind::Io);
    mend();
    engine.wait_sealed(snapshot).unwrap();
    engine.close().unwrap();
}

#[test]
fn a_data_file_whose_name_is_not_durable_is_created_again_or_stops_the_store() {
    for number in 0..40 {
        let (disk, engine) = made();
        disk.fail_operation(disk.operations() + number);
        let first = engine.extend(1);
        if !engine.running.is_stopped() {
            engine.extend(1).unwrap_or_else(|error| panic!("operation {number}: {first:?}, and then {error}"));
        }
    }
}

/// Two threads announce overwrites at the same time, and the journal has room for one of the announcements before the
/// next checkpoint.
#[test]
fn announcements_at_the_same_time_do_not_count_on_the_same_room_of_the_journal() {
    const RUNS: usize = 40_000;
    let (disk, engine) = with_a_block(64);
    let run = own_block(&engine, 1, 0);
    let announced = |runs: usize| {
        let before = engine.log.used();
        engine.announce_ahead(&vec![run; runs]).unwrap();
        engine.log.used() - before
    };
    let large = announced(RUNS);
    engine.checkpoint().unwrap();
    let limit = engine.log.admission.ring_limit();
    let small = announced(RUNS / 10);
    while engine.log.used() + small + large <= limit {
        announced(RUNS / 10);
    }
    let used = engine.log.used();
    assert!(used + large <= limit && used + 2 * large > RING, "{used} + {large} of {RING}");
    // The second thread requests room while the first one waits for the medium, and its announcement does not count as
    // used yet.
    let begun = Arc::new(AtomicBool::new(false));
    let appending = Arc::clone(&begun);
    before_next(&disk, Request::Write, move || {
        appending.store(true, Ordering::SeqCst);
        std::thread::sleep(std::time::Duration::from_millis(100));
    });
    std::thread::scope(|scope| {
        let first = scope.spawn(|| engine.announce_ahead(&vec![run; RUNS]));
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        engine.announce_ahead(&vec![run; RUNS]).unwrap();
        first.join().unwrap().unwrap();
    });
    assert!(engine.log.used() <= limit);
    write(&engine, 0, 2);
    engine.flush().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 2);
    is_whole(&engine);
}
