//! Openings after a kill, with a page or a block that the medium has lost: each loses no more than its own content.

use super::between::{lose_page, overwritten};
use super::packed::packer;
use super::shared::unequal::colliding;
use super::unreadable::{grown, leaves};
use super::*;
use crate::engine::files::SUPERBLOCK_FILE;
use crate::sync::atomic::Ordering;

pub(super) fn get(engine: &Engine, disk: u64, logical: u64) -> Result<u8> {
    let head = engine.head(disk);
    let block = engine.read_blocks("disk", logical..logical + 1, &|range| engine.plan_head(&head, range))?;
    Ok(block[0])
}

/// Makes a page of a file unreadable, or gives it a wrong checksum. The returned function undoes that.
pub(super) fn spoil(disk: &SimulatedDisk, name: &'static str, page: u64, corrupt: bool) -> Box<dyn Fn()> {
    if !corrupt {
        return Box::new(lose_page(disk, name, page));
    }
    let disk = disk.clone();
    let flip = move || disk.flip_bit(name, page * BLOCK_SIZE as u64 + 100, 1).unwrap();
    flip();
    Box::new(flip)
}

#[test]
fn a_lost_root_does_not_prevent_the_opening_after_a_kill() {
    for corrupt in [false, true] {
        let disk = grown();
        let engine = open(&disk).unwrap();
        let root = engine.with_catalog(|catalog| catalog.get(1).unwrap().root.unwrap());
        engine.write_blocks(&engine.head(2), 5, slice(7, 1)).unwrap();
        engine.flush().unwrap();
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        let mend = spoil(&disk, "map", root.0, corrupt);
        // The opening looks for blocks past the ends of all disks.
        let engine = open(&disk).unwrap();
        assert_eq!(get(&engine, 2, 5).unwrap(), 7);
        let expected = if corrupt { ErrorKind::Corrupt } else { ErrorKind::Io };
        assert_eq!(get(&engine, 1, 0).unwrap_err().kind(), expected);
        mend();
        assert_eq!(get(&engine, 1, 0).unwrap(), 1);
        is_whole(&engine);
    }
}

#[test]
fn an_unreadable_block_that_was_being_overwritten_gets_its_journalled_content() {
    let (disk, engine) = overwritten();
    let (_, offset) = engine.files.locate(own_block(&engine, 1, 0)).unwrap();
    drop(engine);
    disk.fail_reads("data.0000", offset..offset + BLOCK_SIZE as u64).unwrap();
    let engine = open(&disk).unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 1);
    is_whole(&engine);
}

pub(super) fn checkpoints(engine: &Engine) -> u64 {
    engine.counters.checkpoints.load(Ordering::Relaxed)
}

/// Writes a new disk until the disk has got blocks that were freed. Returns the new disk and the number of its blocks.
pub(super) fn reuse(engine: &Engine, freed: &[u64]) -> (u64, u64) {
    {
        let mut meta = engine.meta.lock();
        meta.release_freed();
        engine.update_headroom(&meta);
    }
    let new = add_disk(engine, "new", 1 << 20, Provisioning::Thin);
    let head = engine.head(new);
    let mut blocks = 0;
    while freed.iter().any(|block| engine.meta.lock().entry(*block).unwrap().references == 0) {
        assert!(blocks < 1 << 16, "the blocks are not allocated again");
        for block in blocks..blocks + 64 {
            engine.write_blocks(&head, block, slice(3, 1)).unwrap();
        }
        engine.settle(&head).unwrap();
        blocks += 64;
    }
    engine.flush().unwrap();
    (new, blocks)
}

/// Deletes disk 1, drops its whole tree, and gives its first block to a new disk. Then drops the engine without
/// closing, as by a kill. Returns the new disk and the number of its blocks.
fn delete_and_reuse(engine: Arc<Engine>) -> (u64, u64) {
    let before = checkpoints(&engine);
    let first = own_block(&engine, 1, 0).start;
    engine.delete_disk(1, &[]).unwrap();
    while engine.drop_all_trash().unwrap() {}
    assert!(engine.with_catalog(|catalog| catalog.find(1).is_none()));
    let reused = reuse(&engine, &[first]);
    assert_eq!(checkpoints(&engine), before, "replay does not begin before the deletion");
    reused
}

pub(super) fn is_salvaged(disk: &SimulatedDisk, new: u64, blocks: u64) {
    let salvage = Salvage::open(disk.directory()).unwrap();
    let content = salvage.contents(new, 0..blocks).unwrap();
    assert!(content.into_iter().all(|block| block.is_some_and(|bytes| bytes[0] == 3)));
}

pub(super) fn is_reused(engine: &Engine, disk: u64, blocks: u64) {
    for block in 0..blocks {
        assert_eq!(get(engine, disk, block).unwrap(), 3);
        let place = own_block(engine, disk, block).start;
        assert_eq!(engine.meta.lock().entry(place).unwrap().references, 1);
    }
}

/// Two leaves that were not merged at run time, because one of them could not be read, are merged by replay, and split
/// at another place later. At run time one of them then becomes empty, but none of those that replay sees.
#[test]
fn a_deletion_is_replayed_although_the_tree_has_more_leaves_than_at_run_time() {
    let disk = grown();
    let leaves = leaves(&disk);
    let engine = open(&disk).unwrap();
    let vm = engine.head(1);
    let discard = |blocks: std::ops::Range<u64>| {
        engine.discard_blocks(&vm, blocks).unwrap();
        engine.settle(&vm).unwrap();
        engine.flush().unwrap();
    };
    // Leaves about ten extents of a leaf.
    let shrink = |leaf: usize| discard(leaves[leaf].0 + 20..leaves[leaf + 1].0 - 1);
    shrink(2);
    engine.checkpoint().unwrap();
    let before = checkpoints(&engine);
    engine.meta.lock().pages.drop_clean();
    let mend = lose_page(&disk, "map", leaves[2].1);
    shrink(1);
    mend();
    assert!(leaves[2].0 - leaves[1].0 > 500, "{leaves:?}");
    // With 240 further extents, the first leaf is nearly full, and the merged one would be more than full.
    for i in 0..240 {
        write(&engine, leaves[1].0 + 20 + 2 * i, 2);
        if i % 60 == 59 {
            engine.settle(&vm).unwrap();
        }
    }
    discard(leaves[2].0..leaves[2].0 + 20);
    assert_eq!(checkpoints(&engine), before);
    drop(vm);
    let (new, blocks) = delete_and_reuse(engine);
    let engine = open(&disk).unwrap();
    is_reused(&engine, new, blocks);
    while engine.drop_all_trash().unwrap() {}
    assert_eq!(engine.counts().data.used, blocks);
    is_whole(&engine);
}

#[test]
fn a_lost_leaf_of_a_deleted_disk_does_not_prevent_the_opening_after_a_kill() {
    for corrupt in [false, true] {
        let disk = grown();
        let leaves = leaves(&disk);
        let (new, blocks) = delete_and_reuse(open(&disk).unwrap());
        let mend = spoil(&disk, "map", leaves[2].1, corrupt);
        is_salvaged(&disk, new, blocks);
        let engine = open(&disk).unwrap();
        is_reused(&engine, new, blocks);
        // The leaf can be read again. It must not free blocks of the new disk.
        mend();
        engine.load_unreadable();
        while engine.drop_all_trash().unwrap() {}
        is_reused(&engine, new, blocks);
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        assert_eq!(engine.counts().data.used, blocks);
        is_whole(&engine);
        engine.close().unwrap();
        drop(engine);
        let engine = open(&disk).unwrap();
        is_reused(&engine, new, blocks);
        is_whole(&engine);
    }
}

#[test]
fn a_closed_store_opens_although_its_journal_cannot_be_read() {
    let (disk, mut engine) = with_a_block(256);
    for byte in 2..5 {
        write(&engine, 0, byte);
        engine.close().unwrap();
        drop(engine);
        disk.fail_reads(JOURNAL_FILE, 0..RING).unwrap();
        engine = open(&disk).unwrap();
        assert_eq!(value(&engine, 0).unwrap(), byte);
        is_whole(&engine);
    }
}

#[test]
fn an_unreadable_block_behind_the_end_of_the_journal_does_not_prevent_an_opening() {
    let (disk, engine) = with_a_block(256);
    write(&engine, 0, 2);
    engine.flush().unwrap();
    let behind = engine.log.head() + 16 * BLOCK_SIZE as u64;
    drop(engine);
    assert!(behind + BLOCK_SIZE as u64 <= RING);
    disk.fail_reads(JOURNAL_FILE, behind..behind + BLOCK_SIZE as u64).unwrap();
    let engine = open(&disk).unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 2);
    is_whole(&engine);
}

#[test]
fn a_journal_ends_before_an_unreadable_batch_only_in_a_repair_or_a_salvage() {
    let (disk, engine) = with_a_block(256);
    write(&engine, 0, 2);
    engine.flush().unwrap();
    let end = engine.log.head();
    drop(engine);
    assert!(end + BLOCK_SIZE as u64 <= RING);
    disk.fail_reads(JOURNAL_FILE, end..end + BLOCK_SIZE as u64).unwrap();
    let refused = open(&disk).err().expect("a batch that was acknowledged may be lost");
    assert!(refused.kind() == ErrorKind::Io && refused.to_string().contains("lamina check --repair"), "{refused}");
    let salvage = Salvage::open(disk.directory()).unwrap();
    assert!(salvage.is_behind());
    assert_eq!(salvage.contents(1, 0..1).unwrap().remove(0).map(|bytes| bytes[0]), Some(2));
    drop(salvage);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    let report = engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    let [finding] = &report.findings[..] else { panic!("{report:?}") };
    assert!(finding.problem.contains("the journal cannot be read") && finding.repaired.is_some(), "{finding:?}");
    assert_eq!(value(&engine, 0).unwrap(), 2);
    engine.close().unwrap();
    drop(engine);
    is_whole(&open(&disk).unwrap());
}

#[test]
fn images_that_no_superblock_names_need_not_be_readable() {
    for closed in [false, true] {
        let (disk, engine) = with_a_block(256);
        write(&engine, 0, 2);
        engine.flush().unwrap();
        if closed {
            engine.close().unwrap();
        }
        drop(engine);
        disk.fail_reads(IMAGES_FILE, 0..BLOCK_SIZE as u64).unwrap();
        let engine = open(&disk).unwrap();
        assert_eq!(value(&engine, 0).unwrap(), 2);
        is_whole(&engine);
        engine.close().unwrap();
        drop(engine);
        assert_eq!(value(&open(&disk).unwrap(), 0).unwrap(), 2);
    }
}

/// A store that has failed while it wrote the images of a checkpoint to their places.
fn with_named_images() -> SimulatedDisk {
    let named = (0..60).find_map(|number| {
        let (disk, engine) = with_a_block(256);
        (1..100).for_each(|block| write(&engine, block, 2));
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        disk.fail_operation(disk.operations() + number);
        let _ = engine.checkpoint();
        drop(engine);
        disk.mend();
        let file = disk.directory().open(files::SUPERBLOCK_FILE, IoMode::Buffered).unwrap();
        Superblock::read(&*file).unwrap().0.images.map(|_| disk)
    });
    named.unwrap()
}

#[test]
fn a_salvage_reads_the_other_images_if_one_is_unreadable() {
    let disk = with_named_images();
    // The head of the file and the keys of the images take a block each.
    let first = 2 * BLOCK_SIZE as u64;
    disk.fail_reads(IMAGES_FILE, first..first + BLOCK_SIZE as u64).unwrap();
    assert_eq!(open(&disk).err().unwrap().kind(), ErrorKind::Io);
    let salvage = Salvage::open(disk.directory()).unwrap();
    let notes = salvage.notes();
    assert!(notes.iter().any(|note| note.starts_with("1 pages of the last checkpoint are lost")), "{notes:?}");
}

#[test]
fn a_repair_replays_what_does_not_lie_below_a_lost_leaf() {
    for corrupt in [false, true] {
        let disk = grown();
        let leaves = leaves(&disk);
        let (middle, leaf) = leaves[2];
        let engine = open(&disk).unwrap();
        let before = checkpoints(&engine);
        let vm = engine.head(1);
        write(&engine, middle + 1, 5);
        engine.settle(&vm).unwrap();
        // Puts payload of the new block into the journal.
        write(&engine, middle + 1, 6);
        engine.flush().unwrap();
        let freed = [middle, middle + 1].map(|block| own_block(&engine, 1, block).start);
        // The range ends in one leaf and begins in the one before.
        engine.discard_blocks(&vm, middle - 20..middle + 20).unwrap();
        engine.settle(&vm).unwrap();
        engine.commit_changes().unwrap();
        let (new, blocks) = reuse(&engine, &freed);
        engine.write_blocks(&vm, middle - 20, slice(9, 40)).unwrap();
        engine.settle(&vm).unwrap();
        engine.flush().unwrap();
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop((vm, engine));
        let at = leaf * BLOCK_SIZE as u64;
        // More than a repair can correct.
        let break_block = |name: &str, at: u64| {
            (0..9).for_each(|bit| disk.flip_bit(name, at + 100 + 7 * bit, (bit % 8) as u8).unwrap());
        };
        break_block(IMAGES_FILE, 0);
        if corrupt {
            break_block("map", at);
        } else {
            disk.fail_reads("map", at..at + BLOCK_SIZE as u64).unwrap();
        }
        let refused = open(&disk).err().unwrap();
        assert!(refused.to_string().contains("lamina check --repair"), "{refused}");
        is_salvaged(&disk, new, blocks);
        let mut engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        for _ in 0..2 {
            is_reused(&engine, new, blocks);
            // The first leaf ends before this block, and the lost one contains the rest of the write.
            assert!((middle - 20..middle - 1).all(|block| value(&engine, block).unwrap() == 9));
            for lost in [middle, middle + 19, middle + 100] {
                assert_eq!(value(&engine, lost).unwrap_err().kind(), ErrorKind::Corrupt);
            }
            assert_eq!([0, leaves[3].0].map(|block| value(&engine, block).unwrap()), [1, 1]);
            engine.close().unwrap();
            drop(engine);
            // The lost leaf is never read again, although the medium may be able to read its old content later.
            let map = disk.directory().open("map", IoMode::Buffered).unwrap();
            let mut page = Buffer::zeroed(1);
            map.read_at(&mut page, at).unwrap();
            assert!(page.iter().all(|byte| *byte == 0xff));
            engine = open(&disk).unwrap();
        }
    }
}

/// Makes a node of the map unreadable, and the images of the last checkpoint, from which it could be restored.
pub(super) fn lose_node(disk: &SimulatedDisk, node: crate::tree::NodeId) {
    (0..9).for_each(|bit| disk.flip_bit(IMAGES_FILE, 100 + 7 * bit, (bit % 8) as u8).unwrap());
    let at = node.0 * BLOCK_SIZE as u64;
    disk.fail_reads("map", at..at + BLOCK_SIZE as u64).unwrap();
}

/// A pack names one tree for each leaf that it changes. Here a snapshot is named, and the path from its root is lost,
/// but the disk shares the leaf.
#[test]
fn a_repair_replays_a_pack_in_a_leaf_that_another_tree_shares() {
    let disk = grown();
    let last = leaves(&disk).pop().unwrap().0;
    let engine = open(&disk).unwrap();
    let plain = own_block(&engine, 1, 0).start;
    let snapshot = take(&engine, 1, "s");
    // The disk gets a root and a last leaf of its own.
    write(&engine, last, 5);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let root_of = |object: u64| engine.with_catalog(|catalog| catalog.get(object).unwrap().root.unwrap());
    let root = root_of(snapshot);
    assert_ne!(root, root_of(1));
    let before = checkpoints(&engine);
    let step = engine.pack_step(snapshot, 0..64, &mut packer()).unwrap();
    assert_eq!((step.packed, step.stored), (32, 1));
    engine.commit_changes().unwrap();
    let (new, blocks) = reuse(&engine, &[plain]);
    assert_eq!(checkpoints(&engine), before);
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    lose_node(&disk, root);
    is_salvaged(&disk, new, blocks);
    let salvage = Salvage::open(disk.directory()).unwrap();
    for (block, content) in salvage.contents(1, 0..64).unwrap().into_iter().enumerate() {
        assert_eq!(content.map(|bytes| bytes[0]), Some(u8::from(block % 2 == 0)), "block {block}");
    }
    drop(salvage);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    is_reused(&engine, new, blocks);
    (0..64).step_by(2).for_each(|block| assert_eq!(value(&engine, block).unwrap(), 1));
    assert_eq!(value(&engine, last).unwrap(), 5);
}

/// A full leaf that only the disk had was split for a pack. In replay, a deleted snapshot shares the leaf, because its
/// drop ends at a lost leaf before. The disk must not map the plain blocks any more, which another disk has got.
#[test]
fn a_pack_is_replayed_in_a_full_leaf_that_a_damaged_deleted_snapshot_shares() {
    for corrupt in [false, true] {
        let (disk, engine) = made();
        let vm = engine.head(1);
        engine.write_blocks(&vm, 0, slice(1, 64)).unwrap();
        // The first leaf becomes full: one entry for the blocks above, and one for each of these.
        for block in 33..600 {
            write(&engine, 2 * block, 1);
            if block % 64 == 0 {
                engine.settle(&vm).unwrap();
            }
        }
        engine.settle(&vm).unwrap();
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
        let (plain, nodes) = (own_block(&engine, 1, 0).start, engine.counts().map.used);
        let step = engine.pack_step(1, 0..32, &mut packer()).unwrap();
        assert_eq!((step.packed, engine.counts().map.used), (32, nodes + 1), "the leaf is split");
        engine.commit_changes().unwrap();
        let (new, blocks) = reuse(&engine, &[plain]);
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop((vm, engine));
        let mend = spoil(&disk, "map", last.0, corrupt);
        is_salvaged(&disk, new, blocks);
        let salvage = Salvage::open(disk.directory()).unwrap();
        let content = salvage.contents(1, 0..64).unwrap();
        assert!(content.into_iter().all(|block| block.is_some_and(|bytes| bytes[0] == 1)));
        drop(salvage);
        let engine = open(&disk).unwrap();
        (0..64).for_each(|block| assert_eq!(value(&engine, block).unwrap(), 1));
        is_reused(&engine, new, blocks);
        mend();
        engine.load_unreadable();
        while engine.drop_all_trash().unwrap() {}
        engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
        (0..64).for_each(|block| assert_eq!(value(&engine, block).unwrap(), 1));
        is_reused(&engine, new, blocks);
        is_whole(&engine);
    }
}

/// The first physical block in which a block is stored.
fn stored(engine: &Engine, object: u64, logical: u64) -> u64 {
    let mut meta = engine.meta.lock();
    let root = meta.catalog.get(object).unwrap().root.unwrap();
    let (mut effects, mut extents) = (Default::default(), Vec::new());
    crate::tree::lookup(&mut meta.nodes(&mut effects), root, logical..logical + 1, &mut extents).unwrap();
    extents[0].physical
}

/// The record of a disk is lost. So replay does not free the disk's blocks, and leaves out the pack that was written to
/// one of them. A snapshot that the pack does not name shares the leaf, and maps blocks that another disk has got.
#[test]
fn a_salvage_returns_no_block_that_another_disk_got_after_a_pack_that_is_left_out() {
    let (disk, engine) = made();
    (0..32).for_each(|block| write(&engine, block, 1));
    engine.settle(&engine.head(1)).unwrap();
    let snapshot = take(&engine, 1, "s");
    // The record of the last of these disks is the first on the second page of the catalog.
    let mut lost = 0;
    for number in 0..7 {
        lost = add_disk(&engine, &format!("{number}"), BLOCKS, Provisioning::Thin);
    }
    let head = engine.head(lost);
    engine.write_blocks(&head, 0, slice(2, 32)).unwrap();
    engine.settle(&head).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let before = checkpoints(&engine);
    let free = |engine: &Engine, all: bool| {
        let mut guard = engine.meta.lock();
        let meta = &mut *guard;
        meta.release_freed();
        while !all && meta.data.allocate(&mut meta.pages, 1 << 14).unwrap().is_some() {}
        engine.update_headroom(meta);
    };
    // From here on, only blocks that are freed later are free.
    free(&engine, false);
    let (plain, reused) = (stored(&engine, 1, 0), stored(&engine, lost, 0));
    engine.discard_blocks(&head, 0..32).unwrap();
    engine.settle(&head).unwrap();
    engine.commit_changes().unwrap();
    free(&engine, true);
    let step = engine.pack_step(1, 0..32, &mut packer()).unwrap();
    assert_eq!((step.packed, step.stored), (32, 1));
    assert!((reused..reused + 32).contains(&stored(&engine, 1, 0)));
    engine.commit_changes().unwrap();
    let (new, blocks) = reuse(&engine, &[plain]);
    let logical = (0..blocks).find(|block| stored(&engine, new, *block) == plain).unwrap();
    engine.write_blocks(&engine.head(new), logical, slice(4, 1)).unwrap();
    engine.flush().unwrap();
    assert_eq!(checkpoints(&engine), before);
    // The engine is dropped without closing, as by a kill.
    drop((head, engine));
    (0..9).for_each(|bit| disk.flip_bit(IMAGES_FILE, 100 + 7 * bit, (bit % 8) as u8).unwrap());
    // The state of the record is impossible.
    (1..6).for_each(|bit| disk.flip_bit("catalog", BLOCK_SIZE as u64 + 32, bit).unwrap());
    let salvage = Salvage::open(disk.directory()).unwrap();
    assert!(salvage.is_incomplete());
    for object in [1, snapshot] {
        let content = salvage.contents(object, 0..32).unwrap();
        assert!(content.into_iter().all(|block| block.is_none_or(|bytes| bytes[0] == 1)), "object {object}");
    }
}

/// A store in which the end of the journal of [`overwritten`] is lost: with it the record of the flush that settled the
/// overwrite. With `only_cached`, only the page cache has the overwrite. Returns the offset of the block too.
fn overwritten_before_a_lost_end(only_cached: bool) -> (SimulatedDisk, u64) {
    let (disk, engine) = overwritten();
    if only_cached {
        disk.lose_writes("data.0000").unwrap();
    }
    let (_, offset) = engine.files.locate(own_block(&engine, 1, 0)).unwrap();
    let end = engine.log.head();
    engine.flush().unwrap();
    assert!(engine.log.head() > end && engine.log.head() < RING);
    drop(engine);
    let disk = disk.kill();
    disk.fail_reads(JOURNAL_FILE, end..end + BLOCK_SIZE as u64).unwrap();
    (disk, offset)
}

#[test]
fn an_overwrite_before_a_lost_end_of_the_journal_is_kept() {
    let (disk, _) = overwritten_before_a_lost_end(false);
    let salvage = Salvage::open(disk.directory()).unwrap();
    assert_eq!(salvage.contents(1, 0..1).unwrap().remove(0).map(|bytes| bytes[0]), Some(2));
    drop(salvage);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 2);
}

#[test]
fn a_torn_overwrite_before_a_lost_end_of_the_journal_gets_its_journalled_content() {
    for unreadable in [false, true] {
        let (disk, offset) = overwritten_before_a_lost_end(false);
        match unreadable {
            true => disk.fail_reads("data.0000", offset..offset + BLOCK_SIZE as u64).unwrap(),
            false => disk.flip_bit("data.0000", offset, 1).unwrap(),
        }
        let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
        assert_eq!(value(&engine, 0).unwrap(), 1);
    }
}

/// If a repair relied on such content, the flushed payload of the block would be dropped with the journal.
#[test]
fn an_overwrite_that_only_the_page_cache_has_becomes_durable_in_a_repair() {
    let (disk, _) = overwritten_before_a_lost_end(true);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    let found = value(&engine, 0).unwrap();
    engine.close().unwrap();
    let engine = open(&disk.crash()).unwrap();
    assert_eq!((found, value(&engine, 0).unwrap()), (2, 2));
    is_whole(&engine);
}

/// Programs that wrote version 1 ended a flush without the record that settled the overwrites.
#[test]
fn an_overwrite_in_a_crashed_datastore_of_version_1_is_kept() {
    for announced_again in [false, true] {
        let (disk, engine) = overwritten();
        if announced_again {
            // The flush of the overwrite has ended, and the next one was not written.
            engine.files.sync().unwrap();
            let checksums = vec![crate::checksum(&slice(3, 1))];
            let announced = Operation::Overwrite { run: own_block(&engine, 1, 0), checksums };
            engine.append_urgent(&mut engine.log.lock(), &[announced]).unwrap();
        }
        drop(engine);
        as_of_version_1(&disk);
        assert_eq!(value(&open(&disk).unwrap(), 0).unwrap(), 2, "announced again: {announced_again}");
    }
}

/// Makes a datastore one that a program of version 1 has written.
fn as_of_version_1(disk: &SimulatedDisk) {
    let file = disk.directory().open(SUPERBLOCK_FILE, IoMode::Buffered).unwrap();
    for copy in 0..2 {
        let (mut block, at) = (Buffer::zeroed(1), copy * BLOCK_SIZE as u64);
        file.read_at(&mut block, at).unwrap();
        block[8..16].copy_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
        block[144..].fill(0);
        let sum = crate::checksum(&block);
        block[12..16].copy_from_slice(&sum.to_le_bytes());
        file.write_at(&[&block], at, true).unwrap();
    }
}

/// All versions of some blocks of a guest's file system have one checksum, because they end with a CRC32C of their own.
#[test]
fn a_block_with_the_checksum_of_its_overwrite_gets_its_journalled_content() {
    let (disk, engine) = made();
    drop(engine.claim_blocks(1024).unwrap());
    let versions: Vec<Vec<u8>> = (1..4).map(colliding).collect();
    let put = |version: usize| {
        let data = SharedSlice::new(Arc::new(Buffer::copy_of(&versions[version])), 0..BLOCK_SIZE);
        engine.write_blocks(&engine.head(1), 0, data).unwrap();
    };
    put(0);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    // The journal gets this version as payload. The data file keeps the version before.
    put(1);
    engine.flush().unwrap();
    // The power is cut after the announcement, before the overwrite.
    put(2);
    disk.cut_after(disk.operations() + 1);
    engine.settle(&engine.head(1)).unwrap_err();
    let engine = open(&disk.crash()).unwrap();
    let head = engine.head(1);
    let found = engine.read_blocks("vm", 0..1, &|range| engine.plan_head(&head, range)).unwrap();
    assert!(found[..] == versions[1][..], "the flushed version is lost");
    is_whole(&engine);
}
