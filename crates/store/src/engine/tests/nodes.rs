//! Free map nodes: acknowledged writes find enough of them, even if the file system becomes full afterwards.

use super::super::reserve::KEPT;
use super::*;

/// Blocks of a disk with some hundred leaves in its map.
const WIDE: u64 = 1 << 17;
/// Blocks written to the disk. Each needs an extent of its own.
const WRITTEN: u64 = 40_000;

/// The logical block of write `i` of [`WRITTEN`]: not adjacent to others, and in no order.
fn place(i: u64) -> u64 {
    i * 3 % (WRITTEN * 3)
}

/// A store with a disk of many extents. Everything is written back.
fn wide() -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine) = made();
    let id = add_disk(&engine, "wide", WIDE, Provisioning::Thin);
    let head = engine.head(id);
    for i in 0..WRITTEN {
        engine.write_blocks(&head, place(i), slice(1, 1)).unwrap();
    }
    engine.settle(&head).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    (disk, engine, id)
}

/// Allocates all free nodes except `leave`. Returns the allocated nodes, so that they can be freed again.
fn use_up(engine: &Engine, leave: u64) -> Vec<Run> {
    let mut meta = engine.meta.lock();
    let meta = &mut *meta;
    let mut runs = Vec::new();
    while meta.map.counts().free > leave {
        let want = meta.map.counts().free - leave;
        runs.push(meta.map.allocate(&mut meta.pages, want).unwrap().unwrap());
    }
    engine.update_headroom(meta);
    runs
}

fn give_back(engine: &Engine, runs: Vec<Run>) {
    let mut meta = engine.meta.lock();
    runs.into_iter().for_each(|run| meta.map.release(run));
    engine.update_headroom(&meta);
}

fn free_nodes(engine: &Engine) -> u64 {
    engine.counts().map.free
}

/// Calls `act` until it fails because the file system is full. Returns how often it succeeded.
fn until_full(mut act: impl FnMut(u64) -> Result<()>) -> u64 {
    for i in 0..WRITTEN {
        match act(i) {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                return i;
            }
        }
    }
    WRITTEN
}

/// Reserves data blocks for the writes of a test, so that only nodes become scarce.
fn reserve_data(engine: &Engine) {
    drop(engine.claim_blocks(8192).unwrap());
}

#[test]
fn writes_acknowledged_before_the_file_system_ran_full_are_flushed() {
    for by_journal in [true, false] {
        let (disk, engine, id) = wide();
        take(&engine, id, "s");
        let head = engine.head(id);
        // Each write changes another leaf that the snapshot shares.
        let mut written = 0;
        while engine.buffers.blocks() < engine.buffers.limit() / 2 {
            engine.write_blocks(&head, place(written * 150 % WRITTEN), slice(2, 1)).unwrap();
            written += 1;
        }
        engine.zero_blocks(&head, 5000..5700).unwrap();
        engine.discard_blocks(&head, 50_001..90_002).unwrap();
        fill_up(&disk);
        if by_journal {
            engine.flush().unwrap();
        } else {
            while engine.write_back_once().unwrap() {}
            engine.flush().unwrap();
        }
        assert!(free_nodes(&engine) >= KEPT);
        is_whole(&engine);
        disk.set_capacity(1 << 40);
        until_full(|i| engine.write_blocks(&head, place(i), slice(3, 1)));
        engine.flush().unwrap();
        is_whole(&engine);
    }
}

#[test]
fn scattered_writes_after_a_snapshot_are_refused_before_a_flush_lacks_nodes() {
    let (disk, engine, id) = wide();
    take(&engine, id, "s");
    reserve_data(&engine);
    let taken = use_up(&engine, KEPT + 100);
    fill_up(&disk);
    let head = engine.head(id);
    let done = until_full(|i| engine.write_blocks(&head, place(i * 211 % WRITTEN), slice(2, 1)));
    assert!((20..WRITTEN).contains(&done), "{done} writes");
    assert!(free_nodes(&engine) >= KEPT);
    engine.flush().unwrap();
    assert!(free_nodes(&engine) >= KEPT, "{} nodes are left", free_nodes(&engine));
    // Blocks that only the disk maps can still be overwritten, and discards are accepted.
    for i in 0..done {
        engine.write_blocks(&head, place(i * 211 % WRITTEN), slice(3, 1)).unwrap();
    }
    for i in 0..8 {
        engine.discard_blocks(&head, i * 9000 + 1..i * 9000 + 4001).unwrap();
    }
    engine.flush().unwrap();
    give_back(&engine, taken);
    is_whole(&engine);
    disk.set_capacity(1 << 40);
    until_full(|i| engine.write_blocks(&head, place(i * 7 % WRITTEN), slice(4, 1)));
    engine.flush().unwrap();
    is_whole(&engine);
}

#[test]
fn an_overwrite_admitted_without_nodes_is_written_back_whatever_holds_its_block() {
    let (disk, engine, id) = wide();
    reserve_data(&engine);
    let taken = use_up(&engine, KEPT);
    fill_up(&disk);
    let head = engine.head(id);
    let refused = engine.write_blocks(&head, place(0) + 1, slice(2, 1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    (10..40).for_each(|i| engine.write_blocks(&head, place(i), slice(2, 1)).unwrap());
    let run = own_block(&engine, id, place(20));
    // Journalled payload is being written to the block.
    engine.meta.lock().in_flight.claim(run);
    while engine.write_back_once().unwrap() {}
    engine.meta.lock().in_flight.release(run);
    engine.flush().unwrap();
    assert_eq!(free_nodes(&engine), KEPT);
    engine.checkpoint().unwrap();
    assert_eq!(own_block(&engine, id, place(20)), run, "the write got a new block");
    let read = engine.read_blocks("wide", place(20)..place(20) + 1, &|range| engine.plan_head(&head, range)).unwrap();
    assert_eq!(read[0], 2);
    give_back(&engine, taken);
    is_whole(&engine);
}

#[test]
fn writes_to_a_thick_disk_are_refused_before_a_flush_lacks_nodes() {
    let (disk, engine) = made();
    let id = add_disk(&engine, "thick", WIDE, Provisioning::ZeroedThick);
    reserve_data(&engine);
    engine.flush().unwrap();
    let taken = use_up(&engine, KEPT + 60);
    fill_up(&disk);
    let head = engine.head(id);
    let done = until_full(|i| engine.write_blocks(&head, i * 2 * 997 % WIDE, slice(2, 1)));
    assert!((20..WRITTEN).contains(&done), "{done} writes");
    engine.flush().unwrap();
    assert!(free_nodes(&engine) >= KEPT / 2, "{} nodes are left", free_nodes(&engine));
    give_back(&engine, taken);
    is_whole(&engine);
}

#[test]
fn zeroing_and_discards_in_any_order_leave_enough_nodes_for_a_flush() {
    for seed in 0..4 {
        let mut random = Random(seed);
        let (disk, engine, id) = wide();
        if seed % 2 == 0 {
            take(&engine, id, "s");
        }
        reserve_data(&engine);
        let taken = use_up(&engine, KEPT + 30 + random.below(200));
        fill_up(&disk);
        let head = engine.head(id);
        for i in 0..600 {
            let at = random.below(WIDE - 2000);
            let done = match random.below(8) {
                0 => engine.zero_blocks(&head, at..at + 1 + random.scaled(600)),
                1 | 2 => engine.discard_blocks(&head, at..at + 1 + random.scaled(2000)),
                3 => engine.flush(),
                4 => engine.write_back_once().map(|_| ()),
                _ => engine.write_blocks(&head, at, slice(i as u8, 1 + random.below(4) as usize)),
            };
            if let Err(error) = done {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                engine.flush().unwrap();
            }
        }
        engine.flush().unwrap();
        assert_eq!((engine.buffers.blocks(), engine.reserves.changes()), (0, 0));
        give_back(&engine, taken);
        is_whole(&engine);
    }
}

#[test]
fn a_write_inside_a_discard_reserves_nodes_for_the_second_part() {
    let (_disk, engine, id) = wide();
    let head = engine.head(id);
    engine.discard_blocks(&head, 0..10_000).unwrap();
    let one = engine.reserves.changes();
    for i in 1..10 {
        engine.write_blocks(&head, i * 100, slice(2, 1)).unwrap();
        assert_eq!(engine.reserves.changes(), one * (i + 1));
    }
    engine.write_blocks(&head, 0, slice(2, 1)).unwrap();
    assert_eq!(engine.reserves.changes(), one * 10);
    engine.flush().unwrap();
    assert_eq!(engine.reserves.changes(), 0);
    is_whole(&engine);
}

#[test]
fn a_discard_does_not_unmap_later_writes() {
    let (disk, engine, id) = wide();
    let head = engine.head(id);
    engine.flush().unwrap();
    engine.discard_blocks(&head, 0..300).unwrap();
    // Write-back has begun with the discard when the write is made.
    let pieces = head.lock().oldest_pieces(64);
    fill_up(&disk);
    engine.write_blocks(&head, place(7), slice(2, 1)).unwrap();
    assert!(engine.finish_others(&head, pieces, &mut metadata::Fetch::under_the_lock()).unwrap().is_none());
    let mapped = engine.meta.look(|meta| {
        let root = meta.catalog.get(id)?.root;
        meta.places(root, place(7)..place(7) + 1)
    });
    assert!(mapped.unwrap()[0].1.is_some(), "a block was unmapped although a buffered write relies on it");
    engine.flush().unwrap();
    is_whole(&engine);
}

#[test]
fn a_deleted_disk_has_no_head() {
    let (_disk, engine) = made();
    let head = engine.head(1);
    write(&engine, 0, 1);
    engine.delete_disk(1, &[]).unwrap();
    for head in [head, engine.head(1), engine.head(77)] {
        let error = engine.write_blocks(&head, 0, slice(1, 1)).unwrap_err();
        assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains("deleted"), "{error}");
        assert_eq!(engine.discard_blocks(&head, 0..1).unwrap_err().kind(), ErrorKind::NotFound);
        let read = engine.read_blocks("vm", 0..1, &|range| engine.plan_head(&head, range));
        assert_eq!(read.err().map(|error| error.kind()), Some(ErrorKind::NotFound));
    }
    engine.flush().unwrap();
}

#[test]
fn nodes_reserved_since_the_checkpoint_are_found_after_a_crash_on_a_full_file_system() {
    let (disk, engine, id) = wide();
    engine.close().unwrap();
    drop(engine);
    // With these options no checkpoint is made automatically.
    let options = EngineOptions { metadata_cache: 256 << 20, ..options() };
    let engine = Engine::open(disk.directory(), options).unwrap();
    engine.reserve_images(8000).unwrap();
    engine.checkpoint().unwrap();
    let durable = engine.log.lock().superblock().record.map_length;
    let head = engine.head(id);
    for i in 0.. {
        // The snapshot makes writes copy leaves.
        if i % 100 == 0 {
            take(&engine, id, &format!("s{i}"));
        }
        engine.write_blocks(&head, place(i * 397 % WRITTEN), slice(2, 1)).unwrap();
        engine.settle(&head).unwrap();
        engine.flush().unwrap();
        if engine.counts().map.used > durable {
            break;
        }
    }
    assert_eq!(engine.log.lock().superblock().record.map_length, durable);
    drop(engine);
    let disk = disk.crash();
    fill_up(&disk);
    let engine = open(&disk).unwrap();
    is_whole(&engine);
}

#[test]
fn a_store_without_free_space_opens_and_deletes_disks() {
    let (disk, engine) = made();
    fill_up(&disk);
    assert_eq!(engine.write_blocks(&engine.head(1), 0, slice(1, 1)).unwrap_err().kind(), ErrorKind::NoSpace);
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    engine.delete_disk(1, &[]).unwrap();
    engine.close().unwrap();
    drop(engine);
    is_whole(&open(&disk).unwrap());
}

#[test]
fn a_discard_of_unmapped_blocks_needs_no_nodes() {
    let (disk, engine, id) = wide();
    fill_up(&disk);
    let runs = use_up(&engine, 0);
    engine.unmap_waiting(id, WIDE..1 << 30).unwrap();
    assert_eq!(engine.unmap_waiting(id, 0..1).unwrap_err().kind(), ErrorKind::NoSpace);
    give_back(&engine, runs);
    engine.unmap_waiting(id, 0..1).unwrap();
    is_whole(&engine);
}
