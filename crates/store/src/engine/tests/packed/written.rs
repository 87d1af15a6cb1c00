//! New blocks that are compressed when they are written: at write-back, and by writes that bypass the buffer.

use super::super::replayed::checkpoints;
use super::super::unreadable::{damage_node, grown, leaves};
use super::*;
use crate::engine::log::VERSION_WRITTEN_PACKS;
use crate::engine::read::Part;

/// A store with one disk, whose new blocks are compressed.
fn packing() -> (SimulatedDisk, Arc<Engine>) {
    packing_on(plain_disk())
}

/// Lets writes bypass the buffer: they do if there are free blocks, and after the height of the tree was read.
fn make_room(engine: &Engine) {
    drop(engine.claim_blocks(512).unwrap());
    fill(engine, BLOCKS - 1, 1, 1, false);
}

fn packing_on(disk: SimulatedDisk) -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = made_on(disk);
    make_room(&engine);
    engine.pack_writes_of(&[(1, Codec::Lz4)]).unwrap();
    (disk, engine)
}

/// Writes blocks from `first` on, one by one, or at once past the buffer.
fn fill(engine: &Engine, first: u64, count: u64, value: u8, through: bool) {
    let head = engine.head(1);
    match through {
        true => engine.write_blocks(&head, first, mixed(std::iter::repeat_n(value, count as usize))).unwrap(),
        false => {
            for block in first..first + count {
                engine.write_blocks(&head, block, mixed(std::iter::once(value))).unwrap();
            }
            engine.settle(&head).unwrap();
        }
    }
}

fn all_hold(engine: &Engine, blocks: std::ops::Range<u64>, value: u8) {
    blocks.for_each(|block| assert_eq!(holds(engine, 1, block).unwrap(), value, "block {block}"));
}

#[test]
fn whole_windows_of_new_blocks_are_stored_in_packs() {
    for through in [false, true] {
        let (disk, engine) = packing();
        // Blocks 5 to 31 and 96 to 99 are no whole windows.
        fill(&engine, 5, 95, 7, through);
        let packed: Vec<u64> = (5..100).filter(|block| place(&engine, 1, *block).1).collect();
        assert_eq!(packed, (32..96).collect::<Vec<u64>>(), "through {through}");
        all_hold(&engine, 5..100, 7);
        is_whole(&engine);
        engine.flush().unwrap();
        let used = engine.counts().data.used;
        assert!(used < 32 + 2 * 20, "{used}");
        drop(engine);
        let engine = open(&disk).unwrap();
        assert!(place(&engine, 1, 95).1);
        all_hold(&engine, 5..100, 7);
        is_whole(&engine);
        assert_eq!(engine.counts().data.used, used);
    }
}

#[test]
fn the_index_of_a_new_pack_need_not_be_read() {
    for through in [false, true] {
        let (_disk, engine) = packing();
        fill(&engine, 32, 32, 7, through);
        let planned = engine.plan_head(&engine.head(1), 60..61).unwrap();
        let [Part::Packed(packed)] = &planned.parts[..] else { panic!("through {through}") };
        let first = packed.stored.block - place(&engine, 1, 60).0.start;
        assert!(first > 0 && packed.stored.checksums.len() <= 2, "through {through}");
        all_hold(&engine, 60..61, 7);
    }
}

/// Otherwise a flush appends little data to the journal as it is.
#[test]
fn a_flush_compresses_new_data_first_if_clients_wait_for_it() {
    for inline in [false, true] {
        let (disk, engine) = packing();
        engine.reduce_inline_of(if inline { &[1] } else { &[] });
        let head = engine.head(1);
        (32..64).for_each(|block| engine.write_blocks(&head, block, mixed(std::iter::once(7))).unwrap());
        engine.flush().unwrap();
        assert_eq!(place(&engine, 1, 40).1, inline);
        assert!(engine.pieces_to_reduce(&head, u64::MAX, 100).is_none());
        drop(engine);
        let engine = open(&disk.crash()).unwrap();
        all_hold(&engine, 32..64, 7);
        is_whole(&engine);
    }
}

/// Overwrites in place need no flush of the data files.
#[test]
fn a_flush_appends_overwrites_to_the_journal_also_if_clients_wait_for_compression() {
    let (_disk, engine) = packing();
    // No whole window at once, so the blocks are plain.
    fill(&engine, 0, 16, 1, false);
    fill(&engine, 16, 16, 1, false);
    quiet(&engine);
    engine.reduce_inline(1);
    let head = engine.head(1);
    (0..32).for_each(|block| engine.write_blocks(&head, block, mixed(std::iter::once(9))).unwrap());
    assert!(engine.pieces_to_reduce(&head, u64::MAX, 100).is_none());
    let written = engine.counters.blocks_written.load(Ordering::Relaxed);
    engine.flush().unwrap();
    assert_eq!(engine.counters.blocks_written.load(Ordering::Relaxed), written);
    all_hold(&engine, 0..32, 9);
}

#[test]
fn full_buffers_are_compressed_if_clients_wait_for_it() {
    for inline in [false, true] {
        let (_disk, engine) = packing();
        engine.reduce_inline_of(if inline { &[1] } else { &[] });
        let (head, blocks) = (engine.head(1), engine.buffers.limit() / 2 + 1);
        (0..blocks).for_each(|block| engine.write_blocks(&head, block, mixed(std::iter::once(7))).unwrap());
        engine.write_back_once().unwrap();
        assert_eq!(place(&engine, 1, 0).1, inline);
        quiet(&engine);
        is_whole(&engine);
    }
}

#[test]
fn blocks_that_can_be_overwritten_in_place_stay_plain() {
    for through in [false, true] {
        let (_disk, engine) = made();
        make_room(&engine);
        fill(&engine, 0, 64, 1, false);
        quiet(&engine);
        let before = place(&engine, 1, 40);
        engine.pack_writes_of(&[(1, Codec::Lz4)]).unwrap();
        fill(&engine, 0, 64, 2, through);
        assert_eq!(place(&engine, 1, 40), before);
        all_hold(&engine, 0..64, 2);
        // The snapshot shares the blocks, so new content needs new ones.
        let snapshot = take(&engine, 1, "s");
        fill(&engine, 0, 64, 3, through);
        assert!(place(&engine, 1, 40).1 && !place(&engine, snapshot, 40).1);
        all_hold(&engine, 0..64, 3);
        (0..64).for_each(|block| assert_eq!(holds(&engine, snapshot, block).unwrap(), 2));
        // A block of a pack gets a plain place, which is overwritten from then on.
        fill(&engine, 40, 1, 4, false);
        assert!(!place(&engine, 1, 40).1 && place(&engine, 1, 41).1);
        quiet(&engine);
        is_whole(&engine);
    }
}

#[test]
fn what_cannot_be_compressed_stays_plain() {
    for through in [false, true] {
        let (_disk, engine) = packing();
        let head = engine.head(1);
        let noise = |seed| {
            let bytes = Random(seed).bytes(32 * BLOCK_SIZE);
            SharedSlice::new(Arc::new(Buffer::copy_of(&bytes)), 0..32 * BLOCK_SIZE)
        };
        for (window, seed) in (0..4).zip(10..) {
            let data = noise(seed);
            match through {
                true => engine.write_blocks(&head, window * 32, data).unwrap(),
                false => {
                    for block in 0..32 {
                        let part = data.slice(block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE);
                        engine.write_blocks(&head, window * 32 + block as u64, part).unwrap();
                    }
                }
            }
        }
        engine.settle(&head).unwrap();
        assert!((0..128).all(|block| !place(&engine, 1, block).1));
    }
}

#[test]
fn the_superblock_has_the_version_before_the_first_write() {
    let version = |disk: &SimulatedDisk, copy: u64| {
        let file = disk.directory().open("superblock", backend::IoMode::Buffered).unwrap();
        let mut bytes = Buffer::zeroed(1);
        file.read_at(&mut bytes, copy * BLOCK_SIZE as u64).unwrap();
        u32::from_le_bytes(bytes[8..12].try_into().unwrap())
    };
    let (disk, engine) = made();
    engine.pack_writes_of(&[]).unwrap();
    assert_eq!(version(&disk, 0).max(version(&disk, 1)), FORMAT_VERSION);
    engine.pack_writes_of(&[(1, Codec::Zstd(3))]).unwrap();
    assert_eq!([version(&disk, 0), version(&disk, 1)], [VERSION_WRITTEN_PACKS; 2]);
    // Without the setting, writes are plain again, and packs stay readable.
    make_room(&engine);
    fill(&engine, 0, 32, 1, true);
    engine.pack_writes_of(&[]).unwrap();
    fill(&engine, 32, 32, 2, true);
    assert!(place(&engine, 1, 0).1 && !place(&engine, 1, 32).1);
    all_hold(&engine, 0..32, 1);
}

#[test]
fn a_power_cut_at_any_operation_of_packed_writes_loses_nothing() {
    cut_at_each_operation(|seed, cut| cut_off(seed, cut, false));
    cut_at_each_operation(|seed, cut| cut_off(seed, cut, true));
}

/// Overwrites what a snapshot shares, flushes, and cuts the power after `cut` operations of the medium.
fn cut_off(seed: u64, cut: u64, through: bool) -> bool {
    let (disk, engine) = packing_on(SimulatedDisk::new(seed, SimulatedOptions::default()));
    fill(&engine, 0, 40, 1, through);
    let snapshot = take(&engine, 1, "s");
    quiet(&engine);
    disk.cut_after(disk.operations() + cut);
    let head = engine.head(1);
    let written = match through {
        true => engine.write_blocks(&head, 0, mixed(std::iter::repeat_n(2, 40))),
        false => (0..40)
            .try_for_each(|block| engine.write_blocks(&head, block, mixed(std::iter::once(2))))
            .and_then(|()| engine.settle(&head)),
    };
    // All writes are in the map. A commit appends what needs no flush of the data files before it flushes them.
    let done = written.and_then(|()| engine.commit_changes()).is_ok();
    let ended = !disk.is_off();
    let engine = open(&disk.crash()).unwrap();
    for block in 0..40 {
        let found = holds(&engine, 1, block).unwrap();
        assert!(found == 2 || !done && found == 1, "cut {cut}, block {block}: {found}");
        assert_eq!(holds(&engine, snapshot, block).unwrap(), 1, "cut {cut}");
    }
    is_whole(&engine);
    assert!(!ended || done && place(&engine, 1, 0).1);
    ended
}

/// A write that comes while a pack of its block is written may have no claim on a free block, because it would
/// overwrite the block in place. Then the map must not refer to the pack.
#[test]
fn a_pack_replaces_no_block_that_a_buffered_write_may_overwrite_in_place() {
    let (disk, engine) = made();
    fill(&engine, 0, 32, 1, false);
    // The change that maps the blocks is pending, so they are held, and new content needs new blocks.
    engine.pack_writes_of(&[(1, Codec::Lz4)]).unwrap();
    let head = engine.head(1);
    (0..32).for_each(|block| engine.write_blocks(&head, block, mixed(std::iter::once(2))).unwrap());
    let (writer, medium) = (Arc::downgrade(&engine), disk.clone());
    before_next(&disk, Request::Write, move || {
        let engine = writer.upgrade().unwrap();
        // Ends the hold.
        engine.commit_changes().unwrap();
        fill_up(&medium);
        let _all = engine.claim_blocks(engine.reserves.headroom() - engine.reserves.claims()).unwrap();
        engine.write_blocks(&engine.head(1), 5, mixed(std::iter::once(3))).unwrap();
        let buffer = engine.head(1);
        let buffer = buffer.lock();
        assert!(buffer.layers.iter().flat_map(|layer| layer.pieces(&(5..6))).all(|piece| !piece.entry.claimed));
    });
    engine.settle(&head).unwrap();
    assert!((0..32).all(|block| !place(&engine, 1, block).1));
    (0..32).for_each(|block| assert_eq!(holds(&engine, 1, block).unwrap(), if block == 5 { 3 } else { 2 }));
    quiet(&engine);
    is_whole(&engine);
}

/// The batch was compressed before the journal was locked, and a client writes in between.
#[test]
fn an_entry_that_was_replaced_is_not_taken_from_a_pack() {
    let (_disk, engine) = packing();
    let head = engine.head(1);
    (0..32).for_each(|block| engine.write_blocks(&head, block, mixed(std::iter::once(1))).unwrap());
    let pieces = oldest(&head);
    let packs = engine.packs_of_batch(&head, &pieces, &engine.equal_runs_of_batch(&head, &pieces));
    assert_eq!(packs.len(), 1);
    let parts = |engine: &Engine| {
        let pieces = engine.head(1).lock().oldest_pieces(100);
        pieces.iter().map(|piece| (piece.logical..piece.end(), piece.entry.stamp)).collect::<Vec<_>>()
    };
    assert!(packs[0].is_of(&parts(&engine)));
    engine.write_blocks(&head, 9, mixed(std::iter::once(2))).unwrap();
    assert!(!packs[0].is_of(&parts(&engine)));
    engine.settle(&head).unwrap();
    (0..32).for_each(|block| assert_eq!(holds(&engine, 1, block).unwrap(), if block == 9 { 2 } else { 1 }));
}

/// The bounds of leaves lie anywhere, so a window may be in two of them.
#[test]
fn a_pack_of_two_leaves_stays_until_both_let_go_of_it() {
    let (_disk, engine) = packing();
    // Every second block is mapped, so that leaves are full and are split within windows.
    (0..1200).for_each(|block| engine.write_blocks(&engine.head(1), 2 * block, slice(1, 1)).unwrap());
    quiet(&engine);
    let snapshot = take(&engine, 1, "s");
    (0..75).for_each(|window| fill(&engine, window * 32, 32, 3, window % 2 == 0));
    quiet(&engine);
    let run = (0..2400)
        .map(|block| place(&engine, 1, block))
        .find(|(run, packed)| *packed && references(&engine, run.start) > 1);
    let (run, _) = run.expect("no window lies in two leaves");
    let blocks: Vec<u64> = (0..2400).filter(|block| place(&engine, 1, *block).0 == run).collect();
    assert_eq!(blocks.len(), 32);
    engine.discard_blocks(&engine.head(1), blocks[0]..blocks[0] + 31).unwrap();
    quiet(&engine);
    assert_eq!(holds(&engine, 1, blocks[31]).unwrap(), 3);
    is_whole(&engine);
    engine.delete_snapshot(snapshot).unwrap();
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    is_whole(&engine);
}

#[test]
fn a_repair_replays_the_part_of_a_pack_that_does_not_lie_below_a_lost_leaf() {
    let disk = grown();
    let leaves = leaves(&disk);
    // The upper bound of the lost leaf lies within a window.
    let lost = (1..leaves.len() - 1).find(|leaf| leaves[leaf + 1].0 % 32 > 3).unwrap();
    let (bound, page) = (leaves[lost + 1].0, leaves[lost].1);
    let window = bound - bound % 32..bound - bound % 32 + 32;
    let engine = open(&disk).unwrap();
    engine.pack_writes_of(&[(1, Codec::Lz4)]).unwrap();
    take(&engine, 1, "s");
    let before = checkpoints(&engine);
    let head = engine.head(1);
    window.clone().for_each(|block| engine.write_blocks(&head, block, mixed(std::iter::once(block as u8))).unwrap());
    engine.settle(&head).unwrap();
    engine.flush().unwrap();
    assert!(place(&engine, 1, bound).1 && checkpoints(&engine) == before);
    // The engine is dropped without closing, as by a kill.
    drop((head, engine));
    damage_node(&disk, page);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    (bound..window.end).for_each(|block| assert_eq!(holds(&engine, 1, block).unwrap(), block as u8));
    assert_eq!(holds(&engine, 1, window.start).unwrap_err().kind(), ErrorKind::Corrupt);
}
