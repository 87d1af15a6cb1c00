//! Openings after a kill that replay shares, with a page that the medium has lost.

use super::super::replayed::{checkpoints, get, is_reused, is_salvaged, lose_node, reuse, spoil};
use super::super::unreadable::{grown, leaves};
use super::*;

/// Shares the blocks of the second object that are equal to those of the first one. Returns their number.
pub(super) fn share_equal(engine: &Engine, objects: [(u64, u64); 2]) -> u64 {
    let mut pass = SharePass::new(objects.to_vec(), PRINTS_MAX);
    let mut shared = 0;
    loop {
        let step = engine.share_step(&mut pass).unwrap();
        shared += step.shared;
        if step.ended {
            engine.commit_changes().unwrap();
            return shared;
        }
    }
}

/// As for a pack: a snapshot is named, of which the root is lost, but the disk shares the leaf. The replaced block
/// belongs to another disk by then.
#[test]
fn a_repair_replays_a_share_in_a_leaf_that_another_tree_shares() {
    let disk = grown();
    let last = leaves(&disk).pop().unwrap().0;
    let engine = open(&disk).unwrap();
    let plain = own_block(&engine, 1, 0).start;
    let other = 2;
    engine.write_blocks(&engine.head(other), 0, slice(1, 1)).unwrap();
    engine.settle(&engine.head(other)).unwrap();
    let snapshot = take(&engine, 1, "s");
    // The disk gets a root and a last leaf of its own.
    write(&engine, last, 5);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let root = engine.with_catalog(|catalog| catalog.get(snapshot).unwrap().root.unwrap());
    let before = checkpoints(&engine);
    assert_eq!(share_equal(&engine, [(other, 1), (snapshot, 1)]), 1);
    let (new, blocks) = reuse(&engine, &[plain]);
    assert_eq!(checkpoints(&engine), before);
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    lose_node(&disk, root);
    is_salvaged(&disk, new, blocks);
    let salvage = Salvage::open(disk.directory()).unwrap();
    assert_eq!(salvage.contents(1, 0..1).unwrap().remove(0).map(|bytes| bytes[0]), Some(1));
    drop(salvage);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    is_reused(&engine, new, blocks);
    (0..64).step_by(2).for_each(|block| assert_eq!(value(&engine, block).unwrap(), 1));
    assert_eq!((get(&engine, other, 0).unwrap(), value(&engine, last).unwrap()), (1, 5));
}

/// The leaf of the kept block is lost, and with it the operation that mapped the block, or filled it. The other owner
/// has the block.
#[test]
fn a_repair_keeps_a_shared_block_for_its_other_owner() {
    for (unwritten, salvaged) in [(false, false), (true, false), (true, true)] {
        let (disk, engine) = with_a_block(256);
        let other = add_disk(&engine, "other", 64, Provisioning::Thin);
        engine.write_blocks(&engine.head(other), 0, slice(77, 1)).unwrap();
        engine.settle(&engine.head(other)).unwrap();
        if unwritten {
            engine.zero_blocks(&engine.head(1), 1..2).unwrap();
            engine.settle(&engine.head(1)).unwrap();
        }
        engine.flush().unwrap();
        engine.checkpoint().unwrap();
        let before = checkpoints(&engine);
        let replaced = own_block(&engine, other, 0).start;
        let root = engine.with_catalog(|catalog| catalog.get(1).unwrap().root.unwrap());
        write(&engine, 1, 77);
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        assert_eq!(share_equal(&engine, [(1, 2), (other, 1)]), 1);
        assert_eq!(place(&engine, 1, 1), place(&engine, other, 0));
        let (new, blocks) = reuse(&engine, &[replaced]);
        assert_eq!(checkpoints(&engine), before);
        assert_eq!(root, engine.with_catalog(|catalog| catalog.get(1).unwrap().root.unwrap()));
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        lose_node(&disk, root);
        if salvaged {
            is_salvaged(&disk, new, blocks);
            let salvage = Salvage::open(disk.directory()).unwrap();
            assert_eq!(salvage.contents(other, 0..1).unwrap().remove(0).map(|bytes| bytes[0]), Some(77));
        }
        let mut engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        for _ in 0..2 {
            is_reused(&engine, new, blocks);
            assert_eq!(get(&engine, other, 0).unwrap(), 77, "unwritten: {unwritten}");
            assert_eq!(value(&engine, 1).unwrap_err().kind(), ErrorKind::Corrupt);
            engine.close().unwrap();
            drop(engine);
            engine = open(&disk).unwrap();
        }
    }
}

/// The leaf of the replaced block is lost, and with it the operation that wrote the block. The kept block belongs to an
/// undamaged disk.
#[test]
fn a_repair_keeps_the_content_of_a_block_that_a_lost_disk_shares() {
    for salvaged in [false, true] {
        let (disk, engine) = with_a_block(256);
        let other = add_disk(&engine, "other", 64, Provisioning::Thin);
        engine.write_blocks(&engine.head(other), 0, slice(77, 1)).unwrap();
        engine.settle(&engine.head(other)).unwrap();
        engine.flush().unwrap();
        engine.checkpoint().unwrap();
        let before = checkpoints(&engine);
        let root = engine.with_catalog(|catalog| catalog.get(1).unwrap().root.unwrap());
        write(&engine, 1, 77);
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        let kept = place(&engine, other, 0);
        assert_eq!(share_equal(&engine, [(other, 1), (1, 2)]), 1);
        assert_eq!((place(&engine, 1, 1), place(&engine, other, 0)), (kept, kept));
        engine.flush().unwrap();
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        lose_node(&disk, root);
        if salvaged {
            let salvage = Salvage::open(disk.directory()).unwrap();
            assert_eq!(salvage.contents(other, 0..1).unwrap().remove(0).map(|bytes| bytes[0]), Some(77));
        }
        let mut engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        for _ in 0..2 {
            assert_eq!(get(&engine, other, 0).unwrap(), 77);
            assert_eq!(value(&engine, 1).unwrap_err().kind(), ErrorKind::Corrupt);
            engine.close().unwrap();
            drop(engine);
            engine = open(&disk).unwrap();
        }
    }
}

/// A full leaf that only the disk had was split for a share. In replay, a deleted snapshot shares the leaf, because its
/// drop ends at a lost leaf before. The disk must not map the replaced block any more, which another disk has got.
#[test]
fn a_share_is_replayed_in_a_full_leaf_that_a_damaged_deleted_snapshot_shares() {
    for corrupt in [false, true] {
        let (disk, engine) = made();
        let vm = engine.head(1);
        let bytes: Vec<u8> = (100..164).flat_map(|value| [value; BLOCK_SIZE]).collect();
        let content = SharedSlice::new(Arc::new(Buffer::copy_of(&bytes)), 0..bytes.len());
        engine.write_blocks(&vm, 0, content).unwrap();
        // The first leaf becomes full: one entry for the blocks above, and one for each of these.
        for block in 33..600 {
            write(&engine, 2 * block, 1);
            if block % 64 == 0 {
                engine.settle(&vm).unwrap();
            }
        }
        engine.settle(&vm).unwrap();
        let other = add_disk(&engine, "other", 64, Provisioning::Thin);
        put(&engine, other, 0, 108);
        engine.settle(&engine.head(other)).unwrap();
        let snapshot = take(&engine, 1, "s");
        // The disk gets a root and a last leaf of its own.
        write(&engine, 2 * 599, 5);
        engine.settle(&vm).unwrap();
        engine.flush().unwrap();
        engine.checkpoint().unwrap();
        let before = checkpoints(&engine);
        let last = {
            let mut meta = engine.meta.lock();
            let root = meta.catalog.get(snapshot).unwrap().root.unwrap();
            let mut effects = Default::default();
            crate::tree::leaf_of(&mut meta.nodes(&mut effects), root, 2 * 599..2 * 600).unwrap().id
        };
        engine.delete_snapshot(snapshot).unwrap();
        while engine.drop_all_trash().unwrap() {}
        assert!(engine.with_catalog(|catalog| catalog.find(snapshot).is_none()));
        let (replaced, nodes) = (place(&engine, 1, 8), engine.counts().map.used);
        assert_eq!(share_equal(&engine, [(other, 1), (1, 64)]), 1);
        assert_eq!((place(&engine, 1, 8), engine.counts().map.used), (place(&engine, other, 0), nodes + 1));
        let (new, blocks) = reuse(&engine, &[replaced]);
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop((vm, engine));
        let mend = spoil(&disk, "map", last.0, corrupt);
        is_salvaged(&disk, new, blocks);
        let salvage = Salvage::open(disk.directory()).unwrap();
        let content = salvage.contents(1, 0..64).unwrap();
        assert!((100..).zip(content).all(|(expected, block)| block.is_some_and(|bytes| bytes[0] == expected)));
        drop(salvage);
        let is_kept = |engine: &Engine| {
            (0..64).for_each(|block| assert_eq!(value(engine, block).unwrap(), 100 + block as u8));
            assert_eq!(get(engine, other, 0).unwrap(), 108);
            is_reused(engine, new, blocks);
        };
        let engine = open(&disk).unwrap();
        is_kept(&engine);
        mend();
        engine.load_unreadable();
        while engine.drop_all_trash().unwrap() {}
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        is_kept(&engine);
        is_whole(&engine);
    }
}

/// The leaf of the kept block is lost. The content of the block was written to the journal, and from there to its
/// place. This write was not flushed when the power failed, and the repair leaves out the payload.
#[test]
fn a_repair_keeps_a_shared_block_with_journalled_payload_for_its_other_owner() {
    for seed in 0..4 {
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: RING }).unwrap();
        let engine = open(&disk).unwrap();
        assert_eq!(add_disk(&engine, "vm", BLOCKS, Provisioning::Thin), 1);
        let other = add_disk(&engine, "other", 64, Provisioning::Thin);
        write(&engine, 0, 1);
        engine.write_blocks(&engine.head(other), 0, slice(77, 1)).unwrap();
        [1, other].into_iter().for_each(|disk| engine.settle(&engine.head(disk)).unwrap());
        engine.flush().unwrap();
        engine.checkpoint().unwrap();
        let before = checkpoints(&engine);
        let root = engine.with_catalog(|catalog| catalog.get(1).unwrap().root.unwrap());
        write(&engine, 1, 77);
        engine.flush().unwrap();
        assert_eq!(engine.write_logged(usize::MAX).unwrap(), 1, "the write is in the journal");
        assert_eq!(share_equal(&engine, [(1, 2), (other, 1)]), 1);
        assert_eq!(checkpoints(&engine), before);
        drop(engine);
        let disk = disk.crash();
        lose_node(&disk, root);
        let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        assert_eq!(get(&engine, other, 0).unwrap(), 77, "seed {seed}");
    }
}

/// Only a repair or a salvage may find such an operation, because it leaves out others. In an ordinary opening it means
/// that the table is damaged.
#[test]
fn an_ordinary_opening_adopts_no_block_for_a_share() {
    let (disk, engine) = filled([4, 4, 5]);
    assert_eq!(share(&engine, &[1]), 1);
    quiet(&engine);
    engine.checkpoint().unwrap();
    let before = checkpoints(&engine);
    let from = place(&engine, 1, 2);
    {
        let mut meta = engine.meta.lock();
        let free = (0..).find(|block| meta.entry(*block).unwrap().references == 0).unwrap();
        let run = Run { start: free, blocks: 1 };
        let operation = Operation::Share { logical: 2, run, from, objects: vec![1] };
        // The operation reaches the journal only.
        meta.pending.push(operation, 0, 0, Vec::new(), Vec::new());
    }
    engine.commit_changes().unwrap();
    assert_eq!(checkpoints(&engine), before);
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    assert_eq!(open(&disk).err().unwrap().kind(), ErrorKind::Corrupt);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    assert_eq!([0, 1].map(|block| value(&engine, block).unwrap()), [4, 4]);
}

/// A block is flushed by its owner, overwritten in place, shared, and left to its second owner, which overwrites it in
/// place too. The payload of the flush must not return: the share promises the content that the block had then. No
/// flush of a client settles the first overwrite, and the commit that makes the share durable stops before it says so.
#[test]
fn payload_from_before_a_share_does_not_return_to_the_kept_block() {
    for seed in 0..8 {
        let (disk, engine) = made();
        drop(engine.claim_blocks(1024).unwrap());
        let other = add_disk(&engine, "other", 64, Provisioning::Thin);
        let third = add_disk(&engine, "third", 64, Provisioning::Thin);
        put(&engine, other, 0, 2);
        engine.settle(&engine.head(other)).unwrap();
        engine.flush().unwrap();
        engine.checkpoint().unwrap();
        write(&engine, 0, 1);
        engine.flush().unwrap();
        write(&engine, 0, 2);
        engine.settle(&engine.head(1)).unwrap();
        let mut pass = SharePass::new(vec![(1, 1), (other, 1)], PRINTS_MAX);
        while engine.share_step(&mut pass).unwrap().shared == 0 {}
        let kept = place(&engine, 1, 0);
        assert_eq!(kept, place(&engine, other, 0));
        engine.discard_blocks(&engine.head(1), 0..1).unwrap();
        engine.settle(&engine.head(1)).unwrap();
        // While the commit flushes the data files, another disk writes to a new block.
        let writer = Arc::clone(&engine);
        before_next(&disk, Request::Sync, move || {
            put(&writer, third, 5, 9);
            writer.settle(&writer.head(third)).unwrap();
        });
        engine.commit_changes().unwrap();
        put(&engine, other, 0, 3);
        engine.settle(&engine.head(other)).unwrap();
        assert_eq!(place(&engine, other, 0), kept);
        let disk = disk.copy_of_durable(seed, SimulatedOptions::default());
        let found = get(&open(&disk).unwrap(), other, 0).unwrap();
        assert!([2, 3].contains(&found), "{found}");
    }
}

/// The leaf is lost at whose logical blocks shared blocks were packed. The other owner has the pack.
#[test]
fn a_repair_keeps_a_pack_of_shared_blocks_for_its_other_owner() {
    for salvaged in [false, true] {
        let (disk, engine) = filled((0..32).map(|block| block + 1));
        let other = add_disk(&engine, "other", 64, Provisioning::Thin);
        (0..32).for_each(|block| put(&engine, other, 7 + block, block as u8 + 1));
        quiet(&engine);
        assert_eq!(share(&engine, &[1, other]), 32);
        quiet(&engine);
        let before = checkpoints(&engine);
        let root = engine.with_catalog(|catalog| catalog.get(1).unwrap().root.unwrap());
        assert_eq!(pack(&engine, 1, 0..64), (32, 1));
        engine.commit_changes().unwrap();
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        lose_node(&disk, root);
        if salvaged {
            let salvage = Salvage::open(disk.directory()).unwrap();
            let found = salvage.contents(other, 7..39).unwrap();
            let found = found.into_iter().map(|bytes| bytes.unwrap()[0]);
            assert!(found.eq(1..=32));
        }
        let mut engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        for _ in 0..2 {
            (0..32).for_each(|block| assert_eq!(get(&engine, other, 7 + block).unwrap(), block as u8 + 1));
            assert_eq!(value(&engine, 1).unwrap_err().kind(), ErrorKind::Corrupt);
            engine.close().unwrap();
            drop(engine);
            engine = open(&disk).unwrap();
        }
    }
}
