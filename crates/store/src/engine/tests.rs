//! Tests of the whole engine on small cases: damage to metadata files, and states that only a restart causes. Random
//! histories and power cuts are tested by the crate `simulation`.

#![allow(clippy::unwrap_used)]

use super::log::Superblock;
use super::*;
use crate::ErrorKind;
use crate::catalog::Provisioning;
use crate::journal::Operation;
use crate::pages::PageFile;
use crate::space::Run;
use crate::testbed::{Random, plain_disk};
use backend::simulated::SimulatedDisk;
use backend::{BLOCK_SIZE, Buffer, SharedSlice};

const RING: u64 = 4 << 20;
const BLOCKS: u64 = 4096;

fn options() -> EngineOptions {
    EngineOptions { metadata_cache: 2 << 20, write_buffer: 1 << 20, threads: false, ..EngineOptions::default() }
}

fn open(disk: &SimulatedDisk) -> Result<Arc<Engine>> {
    Engine::open(disk.directory(), options())
}

/// Creates a store without disks.
fn formatted() -> SimulatedDisk {
    format(plain_disk())
}

fn format(disk: SimulatedDisk) -> SimulatedDisk {
    Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: RING }).unwrap();
    disk
}

/// Creates a store with one thin disk, which has id 1.
fn made() -> (SimulatedDisk, Arc<Engine>) {
    made_on(plain_disk())
}

/// As [`made`], on this medium.
fn made_on(disk: SimulatedDisk) -> (SimulatedDisk, Arc<Engine>) {
    let disk = format(disk);
    let engine = open(&disk).unwrap();
    assert_eq!(add_disk(&engine, "vm", BLOCKS, Provisioning::Thin), 1);
    (disk, engine)
}

/// As [`made`], with space for `backed` blocks in the file system, and a checkpoint of the disk with its first block.
fn with_a_block(backed: u64) -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = made();
    drop(engine.claim_blocks(backed).unwrap());
    write(&engine, 0, 1);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    (disk, engine)
}

/// Parameters of a thin disk.
fn new_disk(name: &str, blocks: u64) -> NewDisk {
    let capacity = blocks * BLOCK_SIZE as u64;
    NewDisk { name: name.into(), capacity, provisioning: Provisioning::Thin, uuid: [1; 16], incomplete: false }
}

/// Creates a disk. The blocks of a thick disk are reserved.
fn add_disk(engine: &Engine, name: &str, blocks: u64, provisioning: Provisioning) -> u64 {
    let id = engine.create_disk(NewDisk { provisioning, ..new_disk(name, blocks) }).unwrap();
    if provisioning != Provisioning::Thin {
        BulkWriter::new(engine, id).reserve(0..blocks).unwrap();
    }
    id
}

/// Takes a snapshot.
fn take(engine: &Engine, disk: u64, name: &str) -> u64 {
    engine.snapshot(&[NewSnapshot { disk, name: name.into(), uuid: [2; 16], incomplete: false }]).unwrap()[0]
}

/// Makes the file system full, as if another program had taken the rest of it.
fn fill_up(disk: &SimulatedDisk) {
    let room = disk.directory().room().unwrap();
    disk.set_capacity(room.total - room.available);
}

/// Blocks filled with the byte `value`.
fn slice(value: u8, blocks: usize) -> SharedSlice {
    let mut buffer = Buffer::zeroed(blocks);
    buffer.fill(value);
    SharedSlice::new(Arc::new(buffer), 0..blocks * BLOCK_SIZE)
}

fn write(engine: &Engine, logical: u64, value: u8) {
    engine.write_blocks(&engine.head(1), logical, slice(value, 1)).unwrap();
}

fn value(engine: &Engine, logical: u64) -> Result<u8> {
    let head = engine.head(1);
    let block = engine.read_blocks("vm", logical..logical + 1, &|range| engine.plan_head(&head, range))?;
    assert!(block.iter().all(|byte| *byte == block[0]));
    Ok(block[0])
}

/// The entries of the next batch of a disk.
fn oldest(head: &Head) -> Vec<crate::buffer::DirtyPiece> {
    head.lock().oldest_pieces(writeback::BATCH_MAX)
}

/// The physical block of a logical block that may be overwritten in place.
fn own_block(engine: &Engine, disk: u64, logical: u64) -> Run {
    let mut meta = engine.meta.lock();
    let root = meta.catalog.get(disk).unwrap().root;
    let start = meta.places(root, logical..logical + 1).unwrap()[0].1.unwrap();
    Run { start, blocks: 1 }
}

fn is_whole(engine: &Engine) {
    let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
    assert_eq!((report.findings, report.leaked), (vec![], 0));
}

#[test]
fn a_checkpoint_holds_the_counts_of_all_regions() {
    let (disk, engine) = made();
    (0..500).for_each(|block| write(&engine, block, 1));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let before = engine.counts().data;
    assert!(before.used >= 500);
    // The engine is dropped without closing, as by a kill. The journal after the checkpoint is empty.
    drop(engine);
    let engine = open(&disk).unwrap();
    let after = engine.counts().data;
    assert_eq!((after.used, after.free, after.backed), (before.used, before.free, before.backed));
    is_whole(&engine);
}

#[test]
fn the_fill_level_of_the_buffer_is_reported() {
    let (_disk, engine) = made();
    assert_eq!(engine.buffer_percent(), 0);
    (0..64).for_each(|block| write(&engine, block * 2, 1));
    assert_eq!(engine.buffer_percent(), 25);
    engine.flush().unwrap();
    assert_eq!(engine.buffer_percent(), 0);
}

#[test]
fn a_write_longer_than_the_buffer_enters_it_in_parts() {
    let (disk, engine) = made();
    engine.close().unwrap();
    drop(engine);
    let engine = Engine::open(disk.directory(), EngineOptions { write_through: false, ..options() }).unwrap();
    engine.write_blocks(&engine.head(1), 3, slice(7, 1000)).unwrap();
    let (blocks, limit) = (engine.buffers.blocks(), engine.buffers.limit());
    assert!(0 < blocks && blocks <= limit && limit < 1000, "{blocks} {limit}");
    let values = [2, 3, 66, 67, 1002, 1003].map(|block| value(&engine, block).unwrap());
    assert_eq!(values, [0, 7, 7, 7, 7, 0]);
}

#[test]
fn the_free_nodes_of_the_map_are_counted_after_a_restart() {
    let (disk, mut engine) = made();
    for round in 0..4 {
        // Every second block is written, so that each needs an extent of its own and the tree has many nodes. The
        // writes after the snapshot double the number of nodes.
        for block in (0..BLOCKS).step_by(2) {
            write(&engine, (block * 37 + round) % BLOCKS, round as u8 + 1);
        }
        take(&engine, 1, &format!("{round}"));
        engine.flush().unwrap();
        let before = engine.counts().map;
        assert!(before.used > 8 && before.free <= before.backed - before.used, "{before:?}");
        engine.close().unwrap();
        engine = open(&disk).unwrap();
        let after = engine.counts().map;
        assert_eq!((after.used, after.backed), (before.used, before.backed));
        assert_eq!(after.free, after.backed - after.used, "{after:?}");
        is_whole(&engine);
    }
}

#[test]
fn recovery_can_be_repeated() {
    let (disk, engine) = made();
    let mut random = Random(5);
    let mut model = vec![0; BLOCKS as usize];
    let mut engine = Some(engine);
    for round in 0..20 {
        let now = engine.take().unwrap_or_else(|| open(&disk).unwrap());
        for _ in 0..100 {
            let (block, byte) = (random.below(BLOCKS), random.next() as u8);
            write(&now, block, byte);
            model[block as usize] = byte;
            if random.percent(10) {
                now.pump().unwrap();
            }
        }
        now.flush().unwrap();
        // The engine is dropped without closing, as by a kill. All writes were flushed before.
        drop(now);
        for _ in 0..round % 3 {
            drop(open(&disk).unwrap());
        }
        let now = open(&disk).unwrap();
        for block in 0..BLOCKS {
            assert_eq!(value(&now, block).unwrap(), model[block as usize]);
        }
        is_whole(&now);
    }
}

#[test]
fn damage_inside_the_journal_is_not_taken_for_its_end() {
    let (disk, engine) = made();
    let places: Vec<u64> = (0..4)
        .map(|i| {
            let at = engine.log.head();
            write(&engine, i, 9);
            engine.flush().unwrap();
            at
        })
        .collect();
    drop(engine);
    for at in &places[..3] {
        disk.flip_bit(JOURNAL_FILE, (at + 70) % RING, 3).unwrap();
        let refused = open(&disk).err().expect("acknowledged writes are lost");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.to_string().contains("journal is damaged"), "{refused}");
        disk.flip_bit(JOURNAL_FILE, (at + 70) % RING, 3).unwrap();
    }
    let engine = open(&disk).unwrap();
    assert!((0..4).all(|i| value(&engine, i).unwrap() == 9));
}

#[test]
fn with_one_copy_of_the_superblock_the_state_is_correct_or_refused() {
    for seed in 0..30 {
        let (disk, engine) = made();
        let mut random = Random(seed);
        for round in 0..random.below(6) {
            for _ in 0..random.below(400) {
                write(&engine, random.below(256), 1 + round as u8);
            }
            if random.percent(70) {
                engine.checkpoint().unwrap();
            }
        }
        (0..256).for_each(|block| write(&engine, block, 200));
        engine.flush().unwrap();
        match random.below(3) {
            0 => engine.close().unwrap(),
            1 => engine.checkpoint().unwrap(),
            _ => {}
        }
        drop(engine);
        let copy = random.below(2) * BLOCK_SIZE as u64;
        disk.flip_bit(files::SUPERBLOCK_FILE, copy + 48 + random.below(72), 1).unwrap();
        match open(&disk) {
            Ok(engine) => {
                assert!((0..256).all(|block| value(&engine, block).unwrap() == 200), "seed {seed}");
                assert_eq!(engine.take_found_first().findings.len(), 1, "seed {seed}");
                is_whole(&engine);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "seed {seed}"),
        }
    }
}

#[test]
fn a_closed_store_has_nothing_to_replay() {
    let (disk, mut engine) = made();
    for round in 0..5 {
        (0..50).for_each(|block| write(&engine, block * 3 + round, round as u8));
        take(&engine, 1, &format!("{round}"));
        write(&engine, round, 77);
        engine.close().unwrap();
        let file = disk.directory().open(files::SUPERBLOCK_FILE, IoMode::Buffered).unwrap();
        let superblock = Superblock::read(&*file).unwrap().0;
        assert!(
            superblock.clean && superblock.record.tail == superblock.record.ordered,
            "round {round}: {superblock:?}"
        );
        engine = open(&disk).unwrap();
    }
}

#[test]
fn truncated_metadata_is_refused_and_the_file_named() {
    for name in ["map", "catalog", "journal", "superblock"] {
        let (disk, engine) = made();
        write(&engine, 0, 1);
        engine.close().unwrap();
        disk.directory().open(name, IoMode::Buffered).unwrap().set_len(0).unwrap();
        let refused = open(&disk).err().unwrap_or_else(|| panic!("{name} is gone and the open succeeded"));
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.to_string().contains(name), "{refused}");
    }
}

#[test]
fn every_flipped_bit_of_a_superblock_is_detected() {
    let (disk, engine) = made();
    engine.close().unwrap();
    drop(engine);
    let file = disk.directory().open(files::SUPERBLOCK_FILE, IoMode::Buffered).unwrap();
    let good = Superblock::read(&*file).unwrap().0;
    let newest = good.sequence % 2 * BLOCK_SIZE as u64;
    for at in (0..128).chain([200, 4095]) {
        disk.flip_bit(files::SUPERBLOCK_FILE, newest + at, (at % 8) as u8).unwrap();
        let found = Superblock::read(&*file).unwrap().0;
        assert_eq!(found.sequence, good.sequence - 1, "byte {at} may change unnoticed");
        disk.flip_bit(files::SUPERBLOCK_FILE, newest + at, (at % 8) as u8).unwrap();
    }
    assert_eq!(Superblock::read(&*file).unwrap().0, good);
}

mod accounting;
mod between;
mod boundary;
mod bulk;
mod cached;
mod checkpoints;
mod cost;
mod cut;
mod damage;
mod deleted;
mod emptied;
mod many;
mod media;
mod nodes;
mod ownership;
mod packed;
mod reads;
mod repacked;
mod replayed;
mod room;
mod served;
mod shared;
mod unreadable;

#[test]
fn a_flush_fails_if_the_earlier_flush_that_covered_its_writes_failed() {
    let (disk, engine) = made();
    write(&engine, 0, 1);
    // Space for the write was reserved, so that only the append fails.
    engine.sync_all_data().unwrap();
    let mut commit = engine.log.lock();
    assert!(engine.log_buffers(&mut metadata::Fetch::under_the_lock()).unwrap().is_none());
    disk.fail_operation(disk.operations());
    engine.append_pending(&mut commit).unwrap_err();
    // The state that the next thread finds when it locks the journal: no write is buffered, no change is pending, and
    // no write is durable.
    assert!(engine.log_buffers(&mut metadata::Fetch::under_the_lock()).unwrap().is_none());
    assert_eq!(engine.append_pending(&mut commit).unwrap_err().kind(), ErrorKind::Stopped);
}

#[test]
fn no_data_flush_is_repeated_after_a_failed_one() {
    let (disk, engine) = made();
    write(&engine, 0, 1);
    engine.settle(&engine.head(1)).unwrap();
    disk.fail_syncs(1);
    engine.sync_data().unwrap_err();
    // A second flush would succeed, although the medium has lost data.
    assert_eq!(engine.sync_data().unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(engine.sync_all_data().unwrap_err().kind(), ErrorKind::Stopped);
}

/// A flush that other clients outrun takes discards and zeroes out of the buffers step by step.
#[test]
fn discards_and_zeroes_wait_while_a_flush_is_outrun() {
    let (disk, engine) = made();
    engine.close().unwrap();
    drop(engine);
    let engine = Engine::open(disk.directory(), EngineOptions { threads: true, ..options() }).unwrap();
    for zeroes in [false, true] {
        let (ended, wait) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let outrun = engine.buffers.hold_writers();
            scope.spawn(|| {
                let head = engine.head(1);
                let change = if zeroes { engine.zero_blocks(&head, 0..1) } else { engine.discard_blocks(&head, 0..1) };
                ended.send(change).unwrap();
            });
            assert!(wait.recv_timeout(Duration::from_millis(500)).is_err(), "zeroes: {zeroes}");
            drop(outrun);
            wait.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
        });
    }
    engine.close().unwrap();
}
