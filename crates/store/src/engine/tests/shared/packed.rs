//! Packs of shared blocks: one pack replaces them wherever they are mapped.

use super::super::packed::mixed;
use super::*;
use crate::engine::log::VERSION_SHARED_PACKS;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The blocks of a disk of which the second half is a copy of the first one.
const HALF: u64 = 64;

fn value_of(block: u64) -> u8 {
    (block % HALF) as u8 + 1
}

/// A store with a disk of two equal halves, which are shared.
fn halved() -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = filled((0..2 * HALF).map(value_of));
    assert_eq!(share(&engine, &[1]), HALF);
    quiet(&engine);
    (disk, engine)
}

fn is_kept(engine: &Engine) {
    (0..2 * HALF).for_each(|block| assert_eq!(value(engine, block).unwrap(), value_of(block), "block {block}"));
    is_whole(engine);
}

fn version(engine: &Engine) -> u32 {
    engine.log.version()
}

#[test]
fn shared_blocks_are_packed_wherever_they_are_mapped() {
    let (disk, engine) = halved();
    assert_eq!((used(&engine), version(&engine)), (HALF, VERSION_SHARES));
    assert_eq!(pack(&engine, 1, 0..BLOCKS), (HALF, 2));
    quiet(&engine);
    assert_eq!((used(&engine), version(&engine)), (2, VERSION_SHARED_PACKS));
    is_kept(&engine);
    for block in [0, HALF] {
        let (run, packed) = super::super::packed::place(&engine, 1, block);
        assert!(packed && references(&engine, run.start) == 2, "{run:?}");
    }
    // An overwritten block leaves the pack at one place only.
    write(&engine, HALF + 3, 200);
    quiet(&engine);
    assert_eq!((value(&engine, HALF + 3).unwrap(), value(&engine, 3).unwrap()), (200, value_of(3)));
    write(&engine, HALF + 3, value_of(3));
    quiet(&engine);
    assert_eq!(pack(&engine, 1, 0..BLOCKS), (0, 0));
    engine.close().unwrap();
    let engine = open(&disk).unwrap();
    is_kept(&engine);
    // What no place maps any more is free.
    engine.discard_blocks(&engine.head(1), 0..2 * HALF).unwrap();
    quiet(&engine);
    assert_eq!(used(&engine), 0);
    is_whole(&engine);
}

#[test]
fn blocks_that_disks_snapshots_and_clones_share_are_packed_once() {
    let (_disk, engine) = filled((0..HALF).map(value_of));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (0..HALF).for_each(|block| put(&engine, other, 100 + 2 * block, value_of(block)));
    quiet(&engine);
    let snapshot = take(&engine, other, "s");
    let clone = engine.clone_snapshot(snapshot, &[new_disk("clone", BLOCKS)]).unwrap()[0];
    // The snapshot has a leaf of its own afterwards, and the disk and the clone have one too.
    put(&engine, other, 0, 77);
    put(&engine, clone, 0, 78);
    quiet(&engine);
    assert_eq!(share(&engine, &[1, other, snapshot, clone]), HALF);
    quiet(&engine);
    assert_eq!(used(&engine), HALF + 2);
    // With the block of its own, and without the last one, which is alone.
    assert_eq!(pack(&engine, other, 0..BLOCKS).0, HALF);
    quiet(&engine);
    // Two packs, the last block, and the block of the clone.
    assert_eq!(used(&engine), 4);
    let are_kept = |disks: &[u64]| {
        (0..HALF).for_each(|block| assert_eq!(holds(&engine, 1, block).unwrap(), value_of(block)));
        for disk in disks {
            (0..HALF).for_each(|block| assert_eq!(holds(&engine, *disk, 100 + 2 * block).unwrap(), value_of(block)));
        }
        is_whole(&engine);
    };
    are_kept(&[other, snapshot, clone]);
    // A count of what a deletion frees is exact.
    let mut accounts = engine.accounts(&[1, other, snapshot, clone], &|| true).unwrap();
    assert_eq!(accounts.space_of(clone).unwrap().exclusive, 1);
    drop(accounts);
    let (free, before) = (engine.would_free(&[other, snapshot, clone], &|| true).unwrap().data, used(&engine));
    assert_eq!(free, 1, "the first disk keeps the packs");
    engine.detach(clone).unwrap();
    engine.delete_disk(clone, &[]).unwrap();
    engine.delete_snapshot(snapshot).unwrap();
    engine.delete_disk(other, &[]).unwrap();
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    assert_eq!(before - used(&engine), free);
    are_kept(&[]);
}

#[test]
fn a_small_memory_only_prolongs_a_pass() {
    let (_disk, engine) = halved();
    let mut pass = PackPass::new(Packer::new(Codec::Lz4).unwrap(), 600, vec![(1, 0..BLOCKS)]);
    let (mut at, mut packed, mut steps) = (0, 0, 0);
    while at < BLOCKS {
        let step = engine.pack_step(1, at..BLOCKS, &mut pass).unwrap();
        (at, packed, steps) = (step.next, packed + step.packed, steps + 1);
        assert!(steps < 1000);
    }
    assert!(packed >= HALF / 4, "{packed}");
    is_kept(&engine);
    assert!(pack(&engine, 1, 0..BLOCKS).0 < HALF);
    quiet(&engine);
    is_kept(&engine);
}

#[test]
fn blocks_of_too_many_places_stay_plain() {
    let (_disk, engine) = filled((0..100).map(|_| 5));
    assert_eq!(share(&engine, &[1]), 99);
    quiet(&engine);
    assert_eq!(pack(&engine, 1, 0..BLOCKS), (0, 0));
}

/// The thick disk maps the blocks at their second place only.
#[test]
fn shared_blocks_of_a_thick_disk_stay_plain() {
    let (_disk, engine) = halved();
    let snapshot = take(&engine, 1, "s");
    let disk = NewDisk { provisioning: Provisioning::ZeroedThick, ..new_disk("thick", BLOCKS) };
    let thick = engine.clone_snapshot(snapshot, &[disk]).unwrap()[0];
    (0..HALF).for_each(|block| put(&engine, thick, block, 200));
    put(&engine, 1, 300, 1);
    quiet(&engine);
    let of_thick = |block: u64| super::super::packed::place(&engine, thick, block);
    assert_eq!(place(&engine, 1, 3), of_thick(HALF + 3).0.start);
    assert_eq!(pack(&engine, 1, 0..HALF), (0, 0));
    quiet(&engine);
    (HALF..2 * HALF).for_each(|block| assert!(!of_thick(block).1));
    is_kept(&engine);
}

/// A place is a hint: this one is out of date, and another one, which is not known, took its reference.
#[test]
fn a_block_is_packed_only_at_places_that_still_map_it() {
    let (_disk, engine) = halved();
    let mut pass = packer();
    // The pass notes the shared blocks and finds their places, until it would pack.
    let mut steps = 0;
    while pass.finds_places() {
        assert_eq!(engine.pack_step(1, 0..BLOCKS, &mut pass).unwrap().next, 0);
        steps += 1;
    }
    assert!(steps > 2);
    for block in 0..32 {
        write(&engine, 300 + block, value_of(block));
        write(&engine, HALF + block, 222);
    }
    quiet(&engine);
    share(&engine, &[1]);
    quiet(&engine);
    assert_eq!(references(&engine, place(&engine, 1, 0)), 2);
    assert_eq!(engine.pack_step(1, 0..32, &mut pass).unwrap().packed, 0);
}

#[test]
fn a_power_cut_at_any_operation_of_packing_shared_blocks_loses_nothing() {
    cut_at_each_operation(cut_off);
}

/// Packs shared blocks, flushes, and cuts the power after `cut` operations of the medium. True if everything was done
/// before.
fn cut_off(seed: u64, cut: u64) -> bool {
    let (disk, engine) = made_on(SimulatedDisk::new(seed, SimulatedOptions::default()));
    (0..64).for_each(|block| write(&engine, block, block as u8 % 32 + 1));
    quiet(&engine);
    assert_eq!(share(&engine, &[1]), 32);
    quiet(&engine);
    disk.cut_after(disk.operations() + cut);
    let mut pass = packer();
    let mut at = 0;
    let packed = loop {
        match engine.pack_step(1, at..64, &mut pass) {
            Ok(step) if step.next < 64 => at = step.next,
            Ok(_) => break engine.commit_changes().is_ok(),
            Err(_) => break false,
        }
    };
    let ended = !disk.is_off();
    let engine = open(&disk.crash()).unwrap();
    (0..64).for_each(|block| assert_eq!(value(&engine, block).unwrap(), block as u8 % 32 + 1, "cut {cut}"));
    is_whole(&engine);
    assert!(!ended || packed && super::super::packed::place(&engine, 1, 32).1);
    ended
}

/// Few blocks of each window can be packed: the others repeat them.
#[test]
fn windows_with_few_blocks_of_their_own_are_packed_together() {
    let (_disk, engine) = filled((0..200).map(|block| (block / 16) as u8));
    share(&engine, &[1]);
    quiet(&engine);
    assert_eq!(used(&engine), 13);
    assert_eq!(pack(&engine, 1, 0..BLOCKS), (13, 1));
    quiet(&engine);
    (0..200).for_each(|block| assert_eq!(value(&engine, block).unwrap(), (block / 16) as u8));
    is_whole(&engine);
}

/// A store with a disk of two equal halves, of which the first one is packed.
fn half_packed_on(disk: SimulatedDisk) -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = made_on(disk);
    (0..2 * HALF).for_each(|block| write(&engine, block, value_of(block)));
    quiet(&engine);
    assert_eq!(pack(&engine, 1, 0..HALF), (HALF, 2));
    quiet(&engine);
    assert_eq!(used(&engine), HALF + 2);
    (disk, engine)
}

fn half_packed() -> (SimulatedDisk, Arc<Engine>) {
    half_packed_on(SimulatedDisk::new(1, SimulatedOptions::default()))
}

#[test]
fn plain_blocks_are_shared_with_equal_ones_in_packs() {
    let (disk, engine) = half_packed();
    assert_eq!(share(&engine, &[1]), HALF);
    quiet(&engine);
    assert_eq!((used(&engine), version(&engine)), (2, VERSION_SHARED_PACKS));
    is_kept(&engine);
    // A second pass finds nothing to do, and neither does packing.
    assert_eq!((share(&engine, &[1]), pack(&engine, 1, 0..BLOCKS)), (0, (0, 0)));
    write(&engine, 3, 200);
    quiet(&engine);
    assert_eq!((value(&engine, 3).unwrap(), value(&engine, HALF + 3).unwrap()), (200, value_of(3)));
    engine.close().unwrap();
    let engine = open(&disk).unwrap();
    assert_eq!((value(&engine, 3).unwrap(), value(&engine, HALF + 3).unwrap()), (200, value_of(3)));
    is_whole(&engine);
}

/// The copies are at other positions in their packs, of disks, snapshots and clones.
#[test]
fn blocks_in_packs_are_shared_with_equal_ones_in_other_packs() {
    let (_disk, engine) = filled((0..HALF).map(value_of));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (0..HALF).for_each(|block| put(&engine, other, 5 + block, value_of(block)));
    put(&engine, other, 0, 99);
    quiet(&engine);
    let snapshot = take(&engine, other, "s");
    put(&engine, other, 1, 98);
    quiet(&engine);
    for object in [1, other, snapshot] {
        pack(&engine, object, 0..BLOCKS);
    }
    quiet(&engine);
    let before = used(&engine);
    assert!(share(&engine, &[1, other, snapshot]) >= HALF);
    quiet(&engine);
    assert!(used(&engine) < before, "{} of {before}", used(&engine));
    for object in [other, snapshot] {
        (0..HALF).for_each(|block| assert_eq!(holds(&engine, object, 5 + block).unwrap(), value_of(block)));
        assert_eq!(holds(&engine, object, 0).unwrap(), 99);
    }
    (0..HALF).for_each(|block| assert_eq!(holds(&engine, 1, block).unwrap(), value_of(block)));
    is_whole(&engine);
    assert_eq!(share(&engine, &[1, other, snapshot]), 0);
}

#[test]
fn a_duplicate_that_is_overwritten_while_it_is_compared_with_a_packed_block_keeps_its_new_content() {
    let (disk, engine) = half_packed();
    let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
    let (other, reads) = (Arc::clone(&engine), AtomicU64::new(0));
    // The first reads are those of the indexes of packs, one for each step of the scan.
    disk.set_pace(Arc::new(move |request| {
        if request == Request::Read && reads.fetch_add(1, Ordering::Relaxed) == HALF / 16 {
            write(&other, HALF + 2, 222);
            other.settle(&other.head(1)).unwrap();
        }
    }));
    while !engine.share_step(&mut pass).unwrap().ended {}
    disk.set_pace(Arc::new(|_| {}));
    assert_eq!(value(&engine, HALF + 2).unwrap(), 222);
    quiet(&engine);
    assert_eq!((value(&engine, HALF + 2).unwrap(), value(&engine, 2).unwrap()), (222, value_of(2)));
    is_whole(&engine);
}

#[test]
fn a_damaged_pack_replaces_nothing() {
    let (disk, engine) = half_packed();
    let (run, _) = super::super::packed::place(&engine, 1, 0);
    disk.flip_bit("data.0000", run.start * BLOCK_SIZE as u64 + 3000, 1).unwrap();
    let shared = share(&engine, &[1]);
    assert!(shared <= 32, "{shared}");
    quiet(&engine);
    (HALF..HALF + 32).for_each(|block| assert_eq!(value(&engine, block).unwrap(), value_of(block)));
}

#[test]
fn a_power_cut_at_any_operation_of_sharing_packed_blocks_loses_nothing() {
    cut_at_each_operation(|seed, cut| {
        let (disk, engine) = half_packed_on(SimulatedDisk::new(seed, SimulatedOptions::default()));
        disk.cut_after(disk.operations() + cut);
        let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
        let shared = loop {
            match engine.share_step(&mut pass) {
                Ok(step) if !step.ended => {}
                Ok(_) => break engine.commit_changes().is_ok(),
                Err(_) => break false,
            }
        };
        let ended = !disk.is_off();
        let engine = open(&disk.crash()).unwrap();
        is_kept(&engine);
        assert!(!ended || shared && super::super::packed::place(&engine, 1, HALF).1);
        ended
    });
}

/// The entries that map a pack are at other positions in other disks, snapshots and clones.
#[test]
fn a_pack_of_shared_blocks_is_packed_again_without_those_that_nothing_maps() {
    let (disk, engine) = filled((0..HALF).map(value_of));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (0..HALF).for_each(|block| put(&engine, other, 7 + block, value_of(block)));
    quiet(&engine);
    assert_eq!(share(&engine, &[1, other]), HALF);
    quiet(&engine);
    let big = |block: u64| mixed(std::iter::once(value_of(block)));
    (0..HALF).for_each(|block| engine.write_blocks(&engine.head(1), 200 + block, big(block)).unwrap());
    (0..HALF).for_each(|block| engine.write_blocks(&engine.head(other), 301 + block, big(block)).unwrap());
    quiet(&engine);
    assert_eq!(share(&engine, &[1, other]), HALF);
    assert_eq!(pack(&engine, 1, 0..BLOCKS).0, 2 * HALF);
    quiet(&engine);
    let snapshot = take(&engine, other, "s");
    put(&engine, other, 0, 1);
    // In each pack, other blocks are in use here and there, and some in both.
    for block in 0..HALF {
        if block % 8 != 0 {
            put(&engine, 1, 200 + block, 1);
        }
        if block % 8 > 1 {
            put(&engine, other, 301 + block, 2);
        }
    }
    quiet(&engine);
    let expected = |block: u64| {
        [(block.is_multiple_of(8), 1, 200), (block % 8 <= 1, other, 301)].map(|(kept, id, at)| (kept, id, at + block))
    };
    let is_kept = |engine: &Engine, with_snapshot: bool| {
        for block in 0..HALF {
            for (kept, object, at) in expected(block) {
                let overwritten = if object == 1 { 1 } else { 2 };
                assert_eq!(holds(engine, object, at).unwrap(), if kept { value_of(block) } else { overwritten });
            }
            if with_snapshot {
                assert_eq!(holds(engine, snapshot, 301 + block).unwrap(), value_of(block));
            }
        }
        is_whole(engine);
    };
    // The snapshot maps all of each pack.
    let before = used(&engine);
    pack(&engine, 1, 200..300);
    quiet(&engine);
    is_kept(&engine, true);
    engine.delete_snapshot(snapshot).unwrap();
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    pack(&engine, 1, 200..300);
    quiet(&engine);
    assert!(used(&engine) + 20 < before, "{} of {before}", used(&engine));
    is_kept(&engine, false);
    engine.close().unwrap();
    is_kept(&open(&disk).unwrap(), false);
}

/// As fio writes: most blocks repeat the one before, and the others compress by half.
#[test]
fn much_repeated_data_is_packed_in_wide_windows() {
    let (_disk, engine) = made();
    let disk = add_disk(&engine, "wide", 1 << 15, Provisioning::Thin);
    let (mut random, mut value, mut distinct) = (Random(3), 0, 1);
    for block in 0..16384 {
        if random.percent(10) {
            (value, distinct) = (value + 1, distinct + 1);
        }
        let mut bytes = Random(value).bytes(BLOCK_SIZE / 2 - 100);
        bytes.resize(BLOCK_SIZE, 0);
        let data = SharedSlice::new(Arc::new(Buffer::copy_of(&bytes)), 0..BLOCK_SIZE);
        engine.write_blocks(&engine.head(disk), block, data).unwrap();
    }
    quiet(&engine);
    let mut pass = SharePass::new(vec![(disk, 1 << 15)], PRINTS_MAX);
    while !engine.share_step(&mut pass).unwrap().ended {}
    quiet(&engine);
    assert_eq!(used(&engine), distinct);
    let (packed, stored) = pack(&engine, disk, 0..1 << 15);
    // A block with too many places stays plain.
    assert!(packed + 4 > distinct && stored < distinct * 6 / 10, "{distinct} {packed} {stored}");
}

/// In several rounds, most blocks are shared one by one.
#[test]
fn blocks_that_are_shared_one_by_one_with_a_pack_become_one_entry() {
    let (_disk, engine) = half_packed();
    assert_eq!(share_with(&engine, &[1], PRINTS_MIN), HALF);
    quiet(&engine);
    for block in [0, 32] {
        let (run, packed) = super::super::packed::place(&engine, 1, HALF + block);
        assert!(packed && references(&engine, run.start) <= 3, "{}", references(&engine, run.start));
    }
    is_kept(&engine);
}

/// A content that does not compress by half.
fn random(block: u64) -> Vec<u8> {
    Random(block).bytes(BLOCK_SIZE * 3 / 4).repeat(2)[..BLOCK_SIZE].to_vec()
}

/// A store with a disk of which two blocks from logical block 64 on are in a pack, and another disk that maps eight
/// blocks of the same pack from block 300 on. Nothing maps the others. A step of a walk begins at block 304.
fn packed_in_two_places() -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine) = filled((0..32).map(value_of));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (0..8).for_each(|block| put(&engine, other, 200 + block, value_of(block)));
    quiet(&engine);
    assert_eq!(share(&engine, &[1, other]), 8);
    let random = |block: u64| SharedSlice::copy_of(&random(block));
    (0..32).for_each(|block| engine.write_blocks(&engine.head(1), 64 + block, random(block)).unwrap());
    (0..8).for_each(|block| engine.write_blocks(&engine.head(other), 300 + block, random(block)).unwrap());
    quiet(&engine);
    assert_eq!(share(&engine, &[1, other]), 8);
    quiet(&engine);
    assert!(pack(&engine, 1, 64..96).0 > 16);
    engine.discard_blocks(&engine.head(1), 66..96).unwrap();
    quiet(&engine);
    (disk, engine, other)
}

#[test]
fn a_pack_that_is_packed_again_is_replaced_at_all_its_places() {
    let (disk, engine, other) = packed_in_two_places();
    let place = |engine: &Engine, object, logical| {
        let (run, packed) = super::super::packed::place(engine, object, logical);
        assert!(packed);
        run
    };
    let old = place(&engine, 1, 64);
    assert_eq!(place(&engine, other, 300), old);
    let parts = crate::engine::metadata::PART_BLOCKS;
    assert!(300 / parts != 307 / parts, "the entry lies in two steps of a walk");
    pack(&engine, 1, 64..66);
    quiet(&engine);
    let new = place(&engine, 1, 64);
    assert!(new.blocks < old.blocks && new.start != old.start, "{old:?} {new:?}");
    let is_kept = |engine: &Engine| {
        for block in 0..8 {
            assert_eq!(place(engine, other, 300 + block), new);
            let logical = 300 + block..301 + block;
            let read = engine.read_blocks("other", logical, &|range| engine.plan_head(&engine.head(other), range));
            assert!(read.unwrap()[..] == random(block)[..], "block {block}");
        }
        is_whole(engine);
    };
    is_kept(&engine);
    assert_eq!(references(&engine, old.start), 0, "the old pack is free");
    assert_eq!(references(&engine, new.start), 2);
    engine.close().unwrap();
    is_kept(&open(&disk).unwrap());
}

/// After the look at its packs, a disk loses all its entries of one of them. Another disk has others.
#[test]
fn a_pack_without_entries_at_its_window_is_not_packed_again() {
    let (_disk, engine, _) = packed_in_two_places();
    let mut pass = packer();
    while pass.finds_places() {
        engine.pack_step(1, 64..96, &mut pass).unwrap();
    }
    assert_eq!(engine.count_repacks(1, 64..66, &pass, || {}), 1);
    let discard = || {
        engine.discard_blocks(&engine.head(1), 64..66).unwrap();
        quiet(&engine);
    };
    assert_eq!(engine.count_repacks(1, 64..66, &pass, discard), 0);
}
