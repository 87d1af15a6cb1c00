//! The cost of changes: an upper limit that counts pages once even if several changes touch them.

use super::super::log::PAGES_FLOOR;
use super::super::metadata::Touched;
use super::*;
use crate::space::{REGION_BLOCKS, SUMMARY_ENTRIES};
use crate::sync::atomic::Ordering;
use crate::tree::{PhysicalRun, Source};

/// A write to a disk while only single blocks are free. The map of the disk is shared with a snapshot, and refers to
/// blocks all over the medium. Each block of the write is mapped on its own, and one leaf is copied for all of them.
#[test]
fn a_write_mapped_to_scattered_blocks_copies_its_leaf_once() {
    const PIECES: u64 = 200;
    let (_disk, engine) = made();
    let filler = add_disk(&engine, "filler", 1 << 28, Provisioning::Thin);
    let apart = crate::space::TABLE_ENTRIES;
    for piece in 0..PIECES {
        write(&engine, piece, 1);
        engine.settle(&engine.head(1)).unwrap();
        BulkWriter::new(&engine, filler).reserve(piece * apart..(piece + 1) * apart).unwrap();
    }
    take(&engine, 1, "s");
    let mut meta = engine.meta.lock();
    let (mut together, mut alone) = (Touched::default(), 0);
    for block in 0..64 {
        let run = Run { start: 10 * apart + 2 * block, blocks: 1 };
        meta.touch_mapping(1, block..block + run.blocks, run, &mut together).unwrap();
        let mut touched = Touched::default();
        meta.touch_mapping(1, block..block + run.blocks, run, &mut touched).unwrap();
        alone += meta.pages_of(&touched);
    }
    let together = meta.pages_of(&together);
    assert!(together >= PIECES, "{together} pages, and the copy of the leaf changes {PIECES} of the table alone");
    assert!(together < PAGES_FLOOR / 8, "{together} pages, {alone} if each counted what the others do");
}

#[test]
fn pending_changes_of_scattered_writes_take_limited_memory() {
    let disk = plain_disk();
    Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: 16 * RING }).unwrap();
    // Journal and cache request few checkpoints.
    let options = EngineOptions { metadata_cache: 256 << 20, ..options() };
    let engine = Engine::open(disk.directory(), options).unwrap();
    add_disk(&engine, "vm", BLOCKS, Provisioning::Thin);
    let mut most = 0;
    for block in 0..40_000 {
        write(&engine, 3 * block, 1);
        most = engine.meta.lock().pending.memory().max(most);
    }
    assert!((1 << 20..3 << 20).contains(&most), "{most} bytes of pending changes");
    engine.flush().unwrap();
    assert!((0..40_000).step_by(777).all(|block| value(&engine, 3 * block).unwrap() == 1));
    is_whole(&engine);
}

#[test]
fn announcing_the_same_blocks_repeatedly_requests_no_checkpoint() {
    let disk = plain_disk();
    Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: 16 * RING }).unwrap();
    let engine = open(&disk).unwrap();
    add_disk(&engine, "vm", BLOCKS, Provisioning::Thin);
    let head = engine.head(1);
    for start in (0..BLOCKS).step_by(64) {
        engine.write_blocks(&head, start, slice(1, 64)).unwrap();
    }
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let before = engine.counters.checkpoints.load(Ordering::Acquire);
    for round in 0..500 {
        // Each flush ends all permits, so the next write announces the rest of the disk again.
        engine.write_blocks(&head, round % 32 * 64, slice(round as u8, 64)).unwrap();
        engine.flush().unwrap();
    }
    assert_eq!(engine.counters.checkpoints.load(Ordering::Acquire), before);
    is_whole(&engine);
}

/// Each block that a pack or a share frees changes a page of the table, and a page of summaries if the blocks lie far
/// apart.
#[test]
fn a_pack_or_share_of_blocks_far_apart_counts_the_summaries_of_their_regions() {
    let (_disk, engine) = made();
    let mut guard = engine.meta.lock();
    let meta = &mut *guard;
    for region in (0..3 * SUMMARY_ENTRIES).step_by(8) {
        let run = Run { start: region * REGION_BLOCKS, blocks: 1 };
        meta.data.set_backed(&mut meta.pages, run, true).unwrap();
    }
    let mut pages_of = |blocks: u8| {
        let far = |index: u8| PhysicalRun { physical: u64::from(index) * SUMMARY_ENTRIES * REGION_BLOCKS, blocks: 1 };
        let sources = (0..blocks).map(|index| Source { index, run: far(index), packed: None }).collect();
        let (run, checksums, objects) = (Run { start: 5, blocks: 1 }, vec![0], vec![1]);
        let operation = Operation::Pack { logical: 0, blocks: u64::from(blocks), run, checksums, sources, objects };
        meta.cost(&operation).unwrap().pages
    };
    assert!(pages_of(3) >= pages_of(1) + 4);
    let mut pages_of_share = |from: u64| {
        let operation = Operation::Share { logical: 0, run: Run { start: 5, blocks: 1 }, from, objects: vec![1] };
        meta.cost(&operation).unwrap().pages
    };
    assert!(pages_of_share(2 * SUMMARY_ENTRIES * REGION_BLOCKS) >= pages_of_share(0) + 2);
}
