//! Shared blocks: the content of disks, snapshots and clones stays the same whatever is shared, overwritten, deleted,
//! packed or cut off in between, and a shared block is free when nothing maps it any more.

mod counted;
mod crowded;
mod damaged;
mod divided;
mod histories;
mod obstacles;
mod opened;
mod packed;
mod repaired;
mod replayed;
pub(super) mod unequal;
mod written;

use super::between::before_next;
use super::packed::{cut_at_each_operation, holds, pack, packer, quiet, references};
use super::*;
use crate::engine::log::VERSION_SHARES;
use crate::pack::{Codec, Packer};
use backend::simulated::{Request, SimulatedOptions};

/// A whole pass over objects. Returns how many blocks were replaced, and how many became free.
fn share_and_free(engine: &Engine, objects: &[u64], prints: usize) -> (u64, u64) {
    let mut pass = SharePass::new(objects.iter().map(|object| (*object, BLOCKS)).collect(), prints);
    let (mut shared, mut freed, mut position) = (0, 0, 0);
    loop {
        let step = engine.share_step(&mut pass).unwrap();
        (shared, freed) = (shared + step.shared, freed + step.freed);
        assert!(pass.position() >= position && pass.position() <= SharePass::PARTS);
        position = pass.position();
        if step.ended {
            return (shared, freed);
        }
    }
}

/// As [`share_and_free`]. Returns how many blocks were replaced.
pub(super) fn share_with(engine: &Engine, objects: &[u64], prints: usize) -> u64 {
    share_and_free(engine, objects, prints).0
}

pub(super) fn share(engine: &Engine, objects: &[u64]) -> u64 {
    share_with(engine, objects, PRINTS_MAX)
}

fn put(engine: &Engine, disk: u64, logical: u64, value: u8) {
    engine.write_blocks(&engine.head(disk), logical, slice(value, 1)).unwrap();
}

/// A store with one disk, of which the first blocks have these values.
fn filled(values: impl IntoIterator<Item = u8>) -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = made();
    (0..).zip(values).for_each(|(block, value)| write(&engine, block, value));
    quiet(&engine);
    (disk, engine)
}

/// The physical block of a plain block.
fn place(engine: &Engine, object: u64, logical: u64) -> u64 {
    let (run, packed) = super::packed::place(engine, object, logical);
    assert!(!packed);
    run.start
}

fn used(engine: &Engine) -> u64 {
    engine.counts().data.used
}

#[test]
fn equal_blocks_are_stored_once_and_read_as_before() {
    let values = |block: u64| (block % 30) as u8;
    let (disk, engine) = filled((0..120).map(values));
    assert_eq!(used(&engine), 120);
    assert_eq!(share(&engine, &[1]), 90);
    quiet(&engine);
    assert_eq!(used(&engine), 30);
    let is_kept = |engine: &Engine| {
        (0..120).for_each(|block| assert_eq!(value(engine, block).unwrap(), values(block)));
        is_whole(engine);
    };
    is_kept(&engine);
    // A second pass finds nothing to do.
    assert_eq!(share(&engine, &[1]), 0);
    engine.close().unwrap();
    is_kept(&open(&disk).unwrap());
}

#[test]
fn a_run_of_equal_blocks_stays_one_extent() {
    let (_disk, engine) = filled((0..200).map(|block| 1 + (block % 100) as u8));
    assert_eq!(share(&engine, &[1]), 100);
    assert_eq!(engine.count_blocks(1).unwrap().extents, 2);
    is_whole(&engine);
}

#[test]
fn an_interrupted_pass_keeps_what_it_has_shared_and_another_one_goes_on() {
    let (_disk, engine) = filled((0..120).map(|block| (block % 30) as u8));
    let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
    let first = (0..1000).find_map(|_| Some(engine.share_step(&mut pass).unwrap().shared).filter(|shared| *shared > 0));
    drop(pass);
    assert_eq!(first.unwrap() + share(&engine, &[1]), 90);
    quiet(&engine);
    assert_eq!(used(&engine), 30);
    (0..120).for_each(|block| assert_eq!(value(&engine, block).unwrap(), (block % 30) as u8));
    is_whole(&engine);
}

/// Also when leaves are split.
#[test]
fn a_share_changes_no_more_pages_than_it_was_admitted_for() {
    let (_disk, engine) = filled((0..600).map(|_| 7));
    let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
    let (mut shared, mut most) = (0, 0);
    loop {
        engine.checkpoint().unwrap();
        let before = engine.meta.lock().dirty_pages();
        let step = engine.share_step(&mut pass).unwrap();
        let mut meta = engine.meta.lock();
        let operation = Operation::Share { logical: 0, run: Run { start: 0, blocks: 1 }, from: 1, objects: vec![1] };
        let (dirty, cost) = (meta.dirty_pages() - before, meta.cost(&operation).unwrap().pages);
        assert!(dirty <= cost, "{dirty} pages instead of {cost}");
        (shared, most) = (shared + step.shared, most.max(dirty));
        if step.ended {
            break;
        }
    }
    assert!(shared > 500 && most > 3, "{shared} {most}");
}

#[test]
fn a_pass_with_little_memory_finds_every_duplicate() {
    for prints in [0, 100, 1000] {
        let (_disk, engine) = filled((0..400).map(|block| (block % 200) as u8));
        assert_eq!(share_with(&engine, &[1], prints), 200, "{prints} prints");
        quiet(&engine);
        assert_eq!(used(&engine), 200);
        is_whole(&engine);
    }
}

/// More blocks have the same content than fit into the memory of a pass, and than one block may have references.
#[test]
fn many_blocks_with_one_content_become_few() {
    for prints in [0, PRINTS_MAX] {
        let (_disk, engine) = filled((0..1000).map(|_| 7));
        share_with(&engine, &[1], prints);
        quiet(&engine);
        // A block is kept for further ones until it has 256 references.
        assert!((4..=12).contains(&used(&engine)), "{}", used(&engine));
        (0..1000).for_each(|block| assert_eq!(value(&engine, block).unwrap(), 7));
        is_whole(&engine);
    }
}

/// Otherwise each pass would move places from one block to the other.
#[test]
fn blocks_that_have_too_many_references_together_stay_apart() {
    let (_disk, engine) = filled((0..200).map(|_| 7));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (100..300).for_each(|block| put(&engine, other, block, 7));
    quiet(&engine);
    assert_eq!((share(&engine, &[1]), share(&engine, &[other])), (199, 199));
    quiet(&engine);
    assert_eq!((share(&engine, &[1, other]), used(&engine)), (0, 2));
    // One of them gets a further place.
    put(&engine, other, 400, 7);
    quiet(&engine);
    assert_eq!((share(&engine, &[1, other]), share(&engine, &[1, other])), (1, 0));
    quiet(&engine);
    assert_eq!(used(&engine), 2);
    is_whole(&engine);
}

/// Otherwise each of them would be compared with the others of its group in turn.
#[test]
fn blocks_that_get_other_content_during_a_pass_are_left_at_once() {
    let (_disk, engine) = filled((0..200).map(|_| 7));
    let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
    while pass.position() == 0 {
        engine.share_step(&mut pass).unwrap();
    }
    (0..200).for_each(|block| write(&engine, block, 8 + block as u8));
    quiet(&engine);
    let steps = (1..10_000).find(|_| engine.share_step(&mut pass).unwrap().ended).unwrap();
    assert!(steps < 250, "{steps}");
    (0..200).for_each(|block| assert_eq!(value(&engine, block).unwrap(), 8 + block as u8));
    is_whole(&engine);
}

#[test]
fn a_share_is_found_by_replay_after_a_kill() {
    let (disk, engine) = filled([1, 2, 1, 2, 3]);
    assert_eq!(share(&engine, &[1]), 2);
    write(&engine, 0, 9);
    engine.flush().unwrap();
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    let engine = open(&disk).unwrap();
    let found: Vec<u8> = (0..5).map(|block| value(&engine, block).unwrap()).collect();
    assert_eq!(found, [9, 2, 1, 2, 3]);
    assert_eq!(place(&engine, 1, 1), place(&engine, 1, 3));
    is_whole(&engine);
}

#[test]
fn a_power_cut_at_any_operation_of_sharing_loses_nothing() {
    cut_at_each_operation(cut_off);
}

/// Overwrites a block in place with the content of another one, shares both, overwrites them, and cuts the power after
/// `cut` operations of the medium. True if everything was done before.
fn cut_off(seed: u64, cut: u64) -> bool {
    let (disk, engine) = made_on(SimulatedDisk::new(seed, SimulatedOptions::default()));
    (0..10).for_each(|block| write(&engine, block, 1 + block as u8));
    quiet(&engine);
    // Written in place, and not durable yet.
    write(&engine, 3, 9);
    engine.settle(&engine.head(1)).unwrap();
    disk.cut_after(disk.operations() + cut);
    let act = || -> Result<()> {
        let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
        while !engine.share_step(&mut pass)?.ended {}
        engine.commit_changes()?;
        let head = engine.head(1);
        for value in [100, 101] {
            engine.write_blocks(&head, 3, slice(value, 1))?;
            engine.settle(&head)?;
        }
        engine.write_blocks(&head, 8, slice(102, 1))?;
        engine.settle(&head)?;
        engine.commit_changes()
    };
    let done = act().is_ok();
    let ended = !disk.is_off();
    let engine = open(&disk.crash()).unwrap();
    for block in 0..10 {
        let allowed: &[u8] = match block {
            3 => &[4, 9, 100, 101],
            8 => &[9, 102],
            other => &[1 + other as u8],
        };
        // The block that was being overwritten in place may be torn.
        match value_or_torn(&engine, block) {
            Some(found) => assert!(allowed.contains(&found), "seed {seed}, cut {cut}, block {block}: {found}"),
            None => assert_eq!(block, 3, "seed {seed}, cut {cut}"),
        }
    }
    is_whole(&engine);
    assert!(!ended || done);
    ended
}

/// The value of a block; `None` if the block consists of several values.
fn value_or_torn(engine: &Engine, logical: u64) -> Option<u8> {
    let head = engine.head(1);
    let block = engine.read_blocks("vm", logical..logical + 1, &|range| engine.plan_head(&head, range)).unwrap();
    block.iter().all(|byte| *byte == block[0]).then_some(block[0])
}

#[test]
fn each_owner_of_a_shared_block_overwrites_it_elsewhere_and_the_last_one_in_place() {
    let (disk, engine) = filled([5, 5, 5]);
    assert_eq!(share(&engine, &[1]), 2);
    let kept = place(&engine, 1, 0);
    assert_eq!((references(&engine, kept), place(&engine, 1, 2)), (3, kept));
    for (block, left) in [(1, 2), (0, 1)] {
        // The share is pending still: the second owner must not overwrite the block, because recovery may find others.
        write(&engine, block, 50 + block as u8);
        engine.settle(&engine.head(1)).unwrap();
        assert_ne!(place(&engine, 1, block), kept);
        assert_eq!(references(&engine, kept), left);
    }
    write(&engine, 2, 60);
    engine.settle(&engine.head(1)).unwrap();
    let found = |engine: &Engine| -> Vec<u8> { (0..3).map(|block| value(engine, block).unwrap()).collect() };
    assert_eq!(found(&engine), [50, 51, 60]);
    quiet(&engine);
    let own = place(&engine, 1, 2);
    write(&engine, 2, 61);
    engine.settle(&engine.head(1)).unwrap();
    assert_eq!(place(&engine, 1, 2), own, "the last owner overwrites in place once everything is durable");
    quiet(&engine);
    assert_eq!((found(&engine), used(&engine)), (vec![50, 51, 61], 3));
    is_whole(&engine);
    drop(engine);
    assert_eq!(found(&open(&disk).unwrap()), [50, 51, 61]);
}

#[test]
fn the_last_owner_overwrites_in_place_only_after_the_share_is_durable() {
    let (disk, engine) = filled([5, 5]);
    assert_eq!(share(&engine, &[1]), 1);
    let kept = place(&engine, 1, 1);
    // The first owner leaves the block while the share is pending. Then the other owner overwrites the block, and the
    // announcement of an overwrite in place would overtake the share.
    for block in [0, 1] {
        write(&engine, block, 70 + block as u8);
        engine.settle(&engine.head(1)).unwrap();
        assert_ne!(place(&engine, 1, block), kept);
    }
    drop(engine);
    let engine = open(&disk.crash()).unwrap();
    assert!([5, 70].contains(&value(&engine, 0).unwrap()) && [5, 71].contains(&value(&engine, 1).unwrap()));
    is_whole(&engine);
}

#[test]
fn a_deletion_frees_only_what_no_other_disk_maps() {
    let (disk, engine) = filled([1, 2, 3, 4]);
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    [4, 9, 1].into_iter().zip(10..).for_each(|(value, block)| put(&engine, other, block, value));
    quiet(&engine);
    assert_eq!(share(&engine, &[1, other]), 2);
    quiet(&engine);
    assert_eq!(used(&engine), 5);
    engine.delete_disk(1, &[]).unwrap();
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    assert_eq!(used(&engine), 3);
    let is_kept = |engine: &Engine| {
        let found: Vec<u8> = (10..13).map(|block| holds(engine, other, block).unwrap()).collect();
        assert_eq!(found, [4, 9, 1]);
        is_whole(engine);
    };
    is_kept(&engine);
    drop(engine);
    let engine = open(&disk).unwrap();
    is_kept(&engine);
    engine.delete_disk(other, &[]).unwrap();
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    assert_eq!(used(&engine), 0);
    is_whole(&engine);
}

#[test]
fn blocks_are_shared_for_all_snapshots_and_clones_that_have_them() {
    let (_disk, engine) = filled((0..40).map(|block| 1 + (block % 20) as u8));
    let snapshot = take(&engine, 1, "s");
    let clone = engine.clone_snapshot(snapshot, &[new_disk("clone", BLOCKS)]).unwrap()[0];
    // The disk gets a leaf of its own, which refers to the same blocks.
    write(&engine, 3, 200);
    quiet(&engine);
    share(&engine, &[1, snapshot]);
    quiet(&engine);
    // The twenty contents, and the block that the disk has overwritten.
    assert_eq!(used(&engine), 21);
    for object in [1, snapshot, clone] {
        for block in 0..40 {
            let expected = if object == 1 && block == 3 { 200 } else { 1 + (block % 20) as u8 };
            assert_eq!(holds(&engine, object, block).unwrap(), expected);
        }
    }
    is_whole(&engine);
}

/// Two blocks with the same content that were both kept by earlier passes: each is mapped at several places.
#[test]
fn blocks_that_several_places_share_are_shared_further() {
    let (_disk, engine) = filled([6, 6, 1]);
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    [6, 6, 6].into_iter().zip(100..).for_each(|(value, block)| put(&engine, other, block, value));
    quiet(&engine);
    assert_eq!((share(&engine, &[1]), share(&engine, &[other])), (1, 2));
    quiet(&engine);
    assert_eq!(used(&engine), 3);
    share(&engine, &[1, other]);
    quiet(&engine);
    assert_eq!((used(&engine), place(&engine, 1, 1)), (2, place(&engine, other, 102)));
    is_whole(&engine);
}

#[test]
fn blocks_that_a_thick_disk_maps_stay_its_own() {
    let (_disk, engine) = filled([7, 8]);
    let thick = add_disk(&engine, "thick", 64, Provisioning::ZeroedThick);
    (0..4).for_each(|block| put(&engine, thick, block, 7));
    quiet(&engine);
    let snapshot = take(&engine, thick, "s");
    quiet(&engine);
    let clone = engine.clone_snapshot(snapshot, &[new_disk("clone", 64)]).unwrap()[0];
    let before = used(&engine);
    // Neither as duplicates nor as kept blocks, even if the pass is asked to look at them.
    assert_eq!(share(&engine, &[thick, 1]), 0);
    assert_eq!(share(&engine, &[1, thick, snapshot, clone]), 0);
    assert_eq!(used(&engine), before);
    is_whole(&engine);
}

#[test]
fn unwritten_blocks_are_not_shared() {
    let (_disk, engine) = filled(0..64);
    engine.zero_blocks(&engine.head(1), 100..120).unwrap();
    quiet(&engine);
    assert_eq!(share(&engine, &[1]), 0);
    is_whole(&engine);
}

/// Without memory for its places, a block with references from several places is not packed, because it would be stored
/// twice.
#[test]
fn shared_blocks_are_not_packed_away_from_their_other_owners() {
    let (_disk, engine) = filled((0..64).map(|block| (block % 32) as u8));
    assert_eq!(share(&engine, &[1]), 32);
    quiet(&engine);
    let mut pass = PackPass::new(Packer::new(Codec::Lz4).unwrap(), 0, Vec::new());
    assert_eq!(engine.pack_step(1, 0..32, &mut pass).unwrap().packed, 0);
    quiet(&engine);
    (0..64).for_each(|block| assert_eq!(value(&engine, block).unwrap(), (block % 32) as u8));
    is_whole(&engine);
}

#[test]
fn content_that_is_not_settled_is_not_shared() {
    let (_disk, engine) = filled([1, 2, 2]);
    // Journalled payload that is not written to its block.
    write(&engine, 1, 1);
    engine.flush().unwrap();
    assert!(!engine.meta.lock().logged.is_empty());
    assert_eq!(share(&engine, &[1]), 0);
    quiet(&engine);
    assert_eq!(share(&engine, &[1]), 1);
    is_whole(&engine);
}

/// Such a write may have been acknowledged without a claim on a free block.
#[test]
fn blocks_with_a_buffered_write_are_not_shared() {
    for written in [0, 1] {
        let (_disk, engine) = filled([4, 4]);
        write(&engine, written, 200);
        assert_eq!(share(&engine, &[1]), 0, "block {written}");
        quiet(&engine);
        assert_eq!([0, 1].map(|block| value(&engine, block).unwrap()), if written == 0 { [200, 4] } else { [4, 200] });
        is_whole(&engine);
    }
}

#[test]
fn a_pass_makes_room_on_a_full_file_system() {
    let (disk, engine) = filled([4]);
    let other = engine.head(add_disk(&engine, "other", 1 << 20, Provisioning::Thin));
    fill_up(&disk);
    let content = |block: u64| 1 + (block % 50) as u8;
    let full = (0..).find(|block| engine.write_blocks(&other, *block, slice(content(*block), 1)).is_err()).unwrap();
    assert!(full > 100, "{full}");
    engine.settle(&other).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    assert_eq!(share(&engine, &[other.id]), full - 50);
    engine.checkpoint().unwrap();
    (0..full / 2).for_each(|block| engine.write_blocks(&other, full + block, slice(9, 1)).unwrap());
    engine.settle(&other).unwrap();
    (0..full).for_each(|block| assert_eq!(holds(&engine, other.id, block).unwrap(), content(block)));
    is_whole(&engine);
}

#[test]
fn damaged_blocks_and_equal_checksums_of_other_content_are_not_shared() {
    let (disk, engine) = filled([3, 3, 3]);
    let (_, offset) = engine.files.locate(own_block(&engine, 1, 0)).unwrap();
    disk.flip_bit("data.0000", offset + 100, 1).unwrap();
    // The other two blocks are shared.
    assert_eq!(share(&engine, &[1]), 1);
    assert_eq!(value(&engine, 0).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!([1, 2].map(|block| value(&engine, block).unwrap()), [3, 3]);
    assert_eq!(place(&engine, 1, 1), place(&engine, 1, 2));
}

#[test]
fn a_write_during_a_share_is_kept() {
    for block in [0, 1] {
        for flushed in [false, true] {
            // The first pass also writes the superblock.
            let (disk, engine) = filled([1, 2, 3, 3]);
            assert_eq!(share(&engine, &[1]), 1);
            put(&engine, 1, 1, 1);
            quiet(&engine);
            let other = Arc::clone(&engine);
            before_next(&disk, Request::Read, move || {
                write(&other, block, 200);
                if flushed {
                    other.flush().unwrap();
                } else {
                    other.settle(&other.head(1)).unwrap();
                }
            });
            share(&engine, &[1]);
            let is_kept = |engine: &Engine| {
                let expected = if block == 0 { [200, 1, 3, 3] } else { [1, 200, 3, 3] };
                assert_eq!([0, 1, 2, 3].map(|block| value(engine, block).unwrap()), expected);
            };
            is_kept(&engine);
            quiet(&engine);
            is_kept(&engine);
            is_whole(&engine);
            drop(engine);
            is_kept(&open(&disk).unwrap());
        }
    }
}

#[test]
fn the_superblock_has_the_version_of_shares_from_the_first_share_on() {
    let (disk, engine) = filled([1, 2]);
    let version = || {
        let file = disk.directory().open("superblock", backend::IoMode::Buffered).unwrap();
        Superblock::read(&*file).unwrap().0.version
    };
    // Nothing to share.
    assert_eq!((share(&engine, &[1]), version()), (0, FORMAT_VERSION));
    write(&engine, 2, 1);
    quiet(&engine);
    assert_eq!(version(), FORMAT_VERSION);
    assert_eq!((share(&engine, &[1]), version()), (1, VERSION_SHARES));
    // Packs do not lower it.
    (0..32).for_each(|block| write(&engine, 100 + block, 1));
    quiet(&engine);
    assert!(pack(&engine, 1, 96..192).0 > 0);
    engine.close().unwrap();
    assert_eq!(version(), VERSION_SHARES);
    drop(open(&disk).unwrap());
    assert_eq!(version(), VERSION_SHARES);
}

#[test]
fn the_accounts_are_exact_with_shared_blocks() {
    let (_disk, engine) = filled((0..60).map(|block| (block % 20) as u8));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (0..10).for_each(|block| put(&engine, other, block, block as u8));
    quiet(&engine);
    share(&engine, &[1, other]);
    let space = |of: u64| engine.accounts(&[of], &|| true).unwrap().space_of(of).unwrap();
    assert_eq!((space(1).mapped, space(1).exclusive), (60, 10));
    assert_eq!((space(other).mapped, space(other).exclusive), (10, 0));
    assert_eq!(engine.would_free(&[1, other], &|| true).unwrap().data, 20);
}
