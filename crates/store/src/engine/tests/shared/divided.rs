//! Replay of shares and packs in trees that are divided into other leaves than at run time.

use super::super::between::lose_page;
use super::super::replayed::{checkpoints, get, is_reused, is_salvaged, reuse, spoil};
use super::super::unreadable::leaves;
use super::replayed::share_equal;
use super::*;
use std::ops::Range;

/// A block with other content than all others.
fn put_unique(engine: &Engine, logical: u64) {
    let mut buffer = Buffer::zeroed(1);
    buffer[..8].copy_from_slice(&(logical + 1).to_le_bytes());
    let content = SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE);
    engine.write_blocks(&engine.head(1), logical, content).unwrap();
}

/// A closed store: disk 1 has a map of several leaves and no equal blocks, and the first block of disk 2 has the value
/// 77.
fn unequal() -> SimulatedDisk {
    let (disk, engine) = made();
    assert_eq!(add_disk(&engine, "other", BLOCKS, Provisioning::Thin), 2);
    for block in 0..1200 {
        put_unique(&engine, 2 * block);
        if block % 64 == 0 {
            engine.pump().unwrap();
        }
    }
    put(&engine, 2, 0, 77);
    engine.close().unwrap();
    disk
}

fn discard(engine: &Engine, blocks: Range<u64>) {
    engine.discard_blocks(&engine.head(1), blocks).unwrap();
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
}

/// The leaf of a block of disk 1.
fn leaf(engine: &Engine, logical: u64) -> crate::tree::NodeId {
    let mut meta = engine.meta.lock();
    let root = meta.catalog.get(1).unwrap().root.unwrap();
    let mut effects = Default::default();
    let leaf = crate::tree::leaf_of(&mut meta.nodes(&mut effects), root, logical..logical + 1).unwrap();
    leaf.id
}

/// Shares or packs a block of the disk while a snapshot has the same leaf, after a write to another leaf. Then another
/// disk gets the replaced block. Returns the snapshot, the new disk, and the number of its blocks.
fn replace_and_reuse(engine: &Engine, shared: u64, written: u64, packed: bool) -> (u64, u64, u64) {
    assert_ne!(leaf(engine, shared), leaf(engine, written));
    let snapshot = take(engine, 1, "snapshot");
    write(engine, written, 5);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    let replaced = place(engine, 1, shared);
    assert_eq!(references(engine, replaced), 1, "the disk and the snapshot share the leaf");
    if packed {
        assert!(super::super::packed::pack(engine, 1, shared - 4..shared + 14).0 > 1);
        engine.commit_changes().unwrap();
    } else {
        assert_eq!(share_equal(engine, [(2, 1), (1, BLOCKS)]), 1);
    }
    let (new, blocks) = reuse(engine, &[replaced]);
    (snapshot, new, blocks)
}

/// Compares the shared block of the disk and the snapshot with its content, in a salvage.
fn is_kept_by_salvage(disk: &SimulatedDisk, objects: [u64; 2], shared: u64) {
    let salvage = Salvage::open(disk.directory()).unwrap();
    for object in objects {
        let content = salvage.contents(object, shared..shared + 1).unwrap().remove(0);
        assert_eq!(content.map(|bytes| bytes[0]), Some(77), "object {object}");
    }
}

/// The leaves were not merged at run time, because one of them could not be read. Replay merges them. So a write after
/// a snapshot copies both, and the operation names only the disk.
#[test]
fn a_share_is_replayed_for_a_snapshot_that_shared_only_one_of_two_leaves() {
    for packed in [false, true] {
        let disk = unequal();
        let leaves = leaves(&disk);
        let engine = open(&disk).unwrap();
        let (written, shared) = (leaves[1].0, leaves[2].0 + 4);
        write(&engine, shared, 77);
        // Leaves about ten extents of a leaf.
        let shrink = |leaf: usize| discard(&engine, leaves[leaf].0 + 20..leaves[leaf + 1].0 - 1);
        shrink(2);
        engine.checkpoint().unwrap();
        let before = checkpoints(&engine);
        engine.meta.lock().pages.drop_clean();
        let mend = lose_page(&disk, "map", leaves[2].1);
        shrink(1);
        mend();
        let (snapshot, new, blocks) = replace_and_reuse(&engine, shared, written, packed);
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        is_salvaged(&disk, new, blocks);
        is_kept_by_salvage(&disk, [1, snapshot], shared);
        let engine = open(&disk).unwrap();
        assert_eq!(leaf(&engine, shared), leaf(&engine, written), "replay has merged the leaves");
        is_reused(&engine, new, blocks);
        assert_eq!([(1, shared), (2, 0), (snapshot, shared)].map(|(id, at)| holds(&engine, id, at).unwrap()), [77; 3]);
        is_whole(&engine);
    }
}

/// The leaves were merged at run time, filled, and split at another place. In replay they are not merged, because a
/// deleted snapshot still shares one of them: its drop ends at a lost leaf before. The snapshot that was not deleted
/// must not map the replaced block any more, which another disk has got.
#[test]
fn a_share_is_replayed_for_a_snapshot_although_a_deleted_one_is_damaged() {
    for corrupt in [false, true] {
        let disk = unequal();
        let leaves = leaves(&disk);
        let engine = open(&disk).unwrap();
        let last = leaves.last().unwrap().0;
        // Leaves this number of extents of a leaf.
        let shrink = |leaf: usize, left: u64| discard(&engine, leaves[leaf].0 + 2 * left..leaves[leaf + 1].0 - 1);
        shrink(1, 100);
        shrink(2, 150);
        let deleted = take(&engine, 1, "deleted");
        // The disk gets a root and a last leaf of its own.
        write(&engine, last, 6);
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        engine.checkpoint().unwrap();
        let before = checkpoints(&engine);
        engine.delete_snapshot(deleted).unwrap();
        while engine.drop_all_trash().unwrap() {}
        shrink(2, 80);
        assert_eq!(leaf(&engine, leaves[1].0), leaf(&engine, leaves[2].0), "the leaves are merged");
        let free = leaves[2].0 + 160;
        let (written, shared) = (leaves[2].0, free + 180);
        (0..100).for_each(|i| put_unique(&engine, free + 2 * i));
        write(&engine, shared, 77);
        engine.settle(&engine.head(1)).unwrap();
        let (snapshot, new, blocks) = replace_and_reuse(&engine, shared, written, false);
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        let mend = spoil(&disk, "map", leaves.last().unwrap().1, corrupt);
        is_salvaged(&disk, new, blocks);
        is_kept_by_salvage(&disk, [1, snapshot], shared);
        let is_kept = |engine: &Engine| {
            let places = [(1, shared), (2, 0), (snapshot, shared)];
            assert_eq!(places.map(|(id, at)| holds(engine, id, at).unwrap()), [77; 3]);
            is_reused(engine, new, blocks);
        };
        let engine = open(&disk).unwrap();
        assert_eq!(leaf(&engine, shared), leaf(&engine, written), "replay has not split the leaf");
        is_kept(&engine);
        mend();
        engine.load_unreadable();
        while engine.drop_all_trash().unwrap() {}
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        is_kept(&engine);
        is_whole(&engine);
    }
}

/// The replaced block stays mapped at another place, so replay looks for it in all trees. One of them is lost.
#[test]
fn a_lost_tree_does_not_prevent_the_replay_of_a_share() {
    for corrupt in [false, true] {
        let (disk, engine) = filled([1, 4, 4]);
        let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
        let lost = add_disk(&engine, "lost", BLOCKS, Provisioning::Thin);
        (0..3).for_each(|block| put(&engine, other, block, 4));
        put(&engine, lost, 1, 9);
        quiet(&engine);
        assert_eq!((share(&engine, &[1]), share(&engine, &[other])), (1, 2));
        quiet(&engine);
        engine.checkpoint().unwrap();
        let before = checkpoints(&engine);
        let root = engine.with_catalog(|catalog| catalog.get(lost).unwrap().root.unwrap());
        assert_eq!(share_equal(&engine, [(other, 3), (1, 2)]), 1);
        assert_ne!(place(&engine, 1, 1), place(&engine, 1, 2));
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        let mend = spoil(&disk, "map", root.0, corrupt);
        let engine = open(&disk).unwrap();
        assert_eq!(place(&engine, 1, 1), place(&engine, other, 0));
        assert!(get(&engine, lost, 1).is_err());
        mend();
        assert_eq!(get(&engine, lost, 1).unwrap(), 9);
        assert_eq!([0, 1, 2].map(|block| value(&engine, block).unwrap()), [1, 4, 4]);
        is_whole(&engine);
    }
}
