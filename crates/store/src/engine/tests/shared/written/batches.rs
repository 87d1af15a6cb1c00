//! The batch that is written is the one that was compared and compressed; and what a flush does before it appends the
//! rest to the journal.

use super::super::super::packed::{count_reads, mixed, place as stored_at};
use super::*;
use crate::sync::atomic::Ordering;

/// More than two batches.
const MANY: u64 = 3 * crate::engine::writeback::BATCH_MAX;

/// A store with three disks that may share blocks, and with room for many blocks in the buffers.
fn roomy() -> (SimulatedDisk, Arc<Engine>, [u64; 2]) {
    let disk = format(super::super::super::plain_disk());
    let large = EngineOptions { metadata_cache: 32 << 20, write_buffer: 64 << 20, ..options() };
    let engine = Engine::open(disk.directory(), large).unwrap();
    let disks = ["vm", "second", "third"].map(|name| add_disk(&engine, name, BLOCKS, Provisioning::Thin));
    disks.iter().for_each(|disk| make_room(&engine, *disk));
    drop(engine.claim_blocks(3 * MANY).unwrap());
    (disk, engine, [disks[1], disks[2]])
}

fn share_all(engine: &Engine, disks: [u64; 2]) {
    engine.share_writes_of(&[1, disks[0], disks[1]].map(|disk| (disk, "d".into())), MEMORY);
}

/// Puts blocks into the buffer, each with another content.
fn put_numbered(engine: &Engine, disk: u64, numbers: std::ops::Range<u64>) {
    let head = engine.head(disk);
    for number in numbers {
        let data = number.to_le_bytes().repeat(BLOCK_SIZE / 8);
        engine.write_blocks(&head, number, SharedSlice::copy_of(&data)).unwrap();
    }
}

fn put_mixed(engine: &Engine, disk: u64, blocks: std::ops::Range<u64>) {
    let head = engine.head(disk);
    blocks.for_each(|block| engine.write_blocks(&head, block, mixed(std::iter::once(block as u8))).unwrap());
}

fn written(engine: &Engine) -> u64 {
    engine.counters.blocks_written.load(Ordering::Relaxed)
}

#[test]
fn data_behind_a_mapped_batch_is_compared_too() {
    for inline in [false, true] {
        let (_disk, engine, disks) = roomy();
        share_all(&engine, disks);
        engine.reduce_inline_of(if inline { &disks } else { &[] });
        put_numbered(&engine, 1, 0..MANY);
        quiet(&engine);
        let before = used(&engine);
        put_numbered(&engine, disks[0], 0..MANY);
        engine.settle(&engine.head(disks[0])).unwrap();
        assert_eq!((engine.shared_writes(), used(&engine)), (MANY, before), "inline {inline}");
        is_whole(&engine);
    }
}

#[test]
fn the_data_of_another_disk_is_not_written_uncompared_after_a_mapped_batch() {
    let (_disk, engine, disks) = roomy();
    share_all(&engine, disks);
    engine.reduce_inline_of(&disks);
    put_numbered(&engine, 1, 0..100);
    quiet(&engine);
    let before = written(&engine);
    disks.iter().for_each(|disk| put_numbered(&engine, *disk, 0..100));
    assert!(engine.write_back_once().unwrap());
    assert_eq!((engine.shared_writes(), written(&engine)), (100, before));
    assert!(engine.write_back_once().unwrap());
    assert_eq!((engine.shared_writes(), written(&engine), engine.buffers.blocks()), (200, before, 0));
    assert!(!engine.write_back_once().unwrap());
    is_whole(&engine);
}

/// Both would prepare the same batch otherwise, and one of them would write the next one as it is.
#[test]
fn two_threads_write_two_batches_that_were_compressed() {
    let (_disk, engine, _) = roomy();
    engine.pack_writes_of(&[(1, Codec::Lz4)]).unwrap();
    // The images file is small yet, so a batch has 256 blocks.
    let blocks = 512;
    put_mixed(&engine, 1, 0..blocks);
    let gate = engine.writeback.lock();
    std::thread::scope(|scope| {
        let threads = [(); 2].map(|()| scope.spawn(|| engine.write_back_once().unwrap()));
        let head = engine.head(1);
        while head.try_lock_reducing().is_some() {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(gate);
        threads.into_iter().for_each(|thread| assert!(thread.join().unwrap()));
    });
    assert_eq!(engine.buffers.blocks(), 0);
    assert!((0..blocks).all(|block| stored_at(&engine, 1, block).1));
    is_whole(&engine);
}

/// A batch ends where a window ends.
#[test]
fn windows_are_whole_wherever_the_first_write_begins() {
    let (_disk, engine, _) = roomy();
    engine.pack_writes_of(&[(1, Codec::Lz4)]).unwrap();
    put_mixed(&engine, 1, 7..2 * MANY / 3);
    engine.settle(&engine.head(1)).unwrap();
    assert!((32..2 * MANY / 3).all(|block| stored_at(&engine, 1, block).1));
}

/// Only new data of inline disks is written back by a flush; it appends all other data to the journal.
#[test]
fn a_flush_writes_back_only_new_data_of_inline_disks() {
    let (_disk, engine, [inline, other]) = roomy();
    engine.pack_writes_of(&[(inline, Codec::Lz4), (other, Codec::Lz4)]).unwrap();
    put_mixed(&engine, inline, 64..72);
    quiet(&engine);
    engine.reduce_inline_of(&[inline]);
    let before = written(&engine);
    put_mixed(&engine, other, 0..32);
    put_mixed(&engine, inline, 0..36);
    put_mixed(&engine, inline, 64..72);
    engine.flush().unwrap();
    // The first window of the inline disk is a pack of 17 blocks.
    assert_eq!(written(&engine), before + 17);
    assert!(stored_at(&engine, inline, 5).1 && !stored_at(&engine, inline, 33).1);
    assert!((0..32).all(|block| !stored_at(&engine, other, block).1));
    is_whole(&engine);
}

/// Whatever the rate of the method is, a flush ends: what it has no time for is stored as it is.
#[test]
fn a_flush_without_time_stores_data_as_it_is() {
    for late in [false, true] {
        let (_disk, engine, [inline, _]) = roomy();
        engine.pack_writes_of(&[(inline, Codec::Lz4)]).unwrap();
        engine.reduce_inline_of(&[inline]);
        engine.writeback.inline.is_late.store(late, Ordering::Relaxed);
        // More than a flush appends to the journal.
        let blocks = 2 * engine.payload_max() / BLOCK_SIZE as u64;
        put_mixed(&engine, inline, 0..blocks);
        engine.flush().unwrap();
        assert!((0..blocks).all(|block| stored_at(&engine, inline, block).1 != late), "late {late}");
        is_whole(&engine);
    }
}

#[test]
fn a_flush_reduces_what_was_written_before_and_after_a_snapshot() {
    let (_disk, engine, [inline, _]) = roomy();
    engine.pack_writes_of(&[(inline, Codec::Lz4)]).unwrap();
    engine.reduce_inline_of(&[inline]);
    put_mixed(&engine, inline, 0..32);
    let snapshot = take(&engine, inline, "s");
    put_mixed(&engine, inline, 0..64);
    let ticket = engine.acknowledged();
    put_mixed(&engine, inline, 96..128);
    engine.flush_to(ticket).unwrap();
    assert!(stored_at(&engine, snapshot, 5).1 && stored_at(&engine, inline, 5).1 && stored_at(&engine, inline, 40).1);
    assert!(!stored_at(&engine, inline, 100).1, "later writes do not delay a flush");
    is_whole(&engine);
}

/// Parts of windows cannot be compressed, but may be equal to stored blocks.
#[test]
fn a_flush_waits_only_for_data_that_can_be_reduced() {
    let (_disk, engine, disks) = roomy();
    let [inline, _] = disks;
    engine.pack_writes_of(&[(inline, Codec::Lz4)]).unwrap();
    engine.reduce_inline_of(&[inline]);
    put_mixed(&engine, inline, 1..63);
    let wanted =
        |engine: &Engine| engine.pieces_to_reduce(&engine.head(inline), u64::MAX, 100).map_or(0, |new| new.len());
    assert_eq!(wanted(&engine), 0);
    put_mixed(&engine, inline, 63..65);
    assert_eq!(wanted(&engine), 32);
    share_all(&engine, disks);
    assert_eq!(wanted(&engine), 64);
    engine.flush().unwrap();
    assert_eq!(wanted(&engine), 0);
}

/// Each batch of such data would otherwise read up to 64 packs, and map none of them.
#[test]
fn packs_of_which_only_a_small_part_is_wanted_are_not_read() {
    let (disk, engine, disks) = roomy();
    engine.pack_writes_of(&[(1, Codec::Lz4)]).unwrap();
    share_all(&engine, disks);
    put_mixed(&engine, 1, 0..160);
    quiet(&engine);
    engine.writeback.equal.leaves_small_parts.store(true, Ordering::Relaxed);
    let head = engine.head(disks[0]);
    // One block of each of four packs, and 17 blocks of the fifth.
    let values = [3, 40, 70, 100].into_iter().chain(130..147);
    (500..).zip(values).for_each(|(at, value)| engine.write_blocks(&head, at, mixed(std::iter::once(value))).unwrap());
    let reads = count_reads(&disk);
    engine.settle(&head).unwrap();
    assert_eq!((engine.shared_writes(), reads.load(Ordering::SeqCst)), (17, 1));
    is_whole(&engine);
}
