//! Packs that are packed again: what only a few disks and snapshots use is found in all of them, and nothing else
//! changes.

use super::between::before_next;
use super::packed::{cut_at_each_operation, holds, mixed, pack, packer, place, quiet, references};
use super::*;
use backend::simulated::{Request, SimulatedOptions};
use std::ops::Range;

fn write_mixed(engine: &Engine, object: u64, blocks: Range<u64>) {
    let data = mixed(blocks.clone().map(|block| block as u8));
    engine.write_blocks(&engine.head(object), blocks.start, data).unwrap();
}

/// Overwrites blocks with the value 200.
fn overwrite(engine: &Engine, object: u64, blocks: Range<u64>) {
    let data = slice(200, (blocks.end - blocks.start) as usize);
    engine.write_blocks(&engine.head(object), blocks.start, data).unwrap();
    quiet(engine);
}

/// A disk with blocks that are packed.
fn fill(engine: &Engine, blocks: u64) {
    write_mixed(engine, 1, 0..blocks);
    quiet(engine);
    let (packed, stored) = pack(engine, 1, 0..blocks);
    assert!(packed == blocks && stored > blocks / 2);
    quiet(engine);
}

/// Compares an object, of which some blocks have the value 200, with the content of [`fill`].
fn has(engine: &Engine, object: u64, blocks: u64, overwritten: impl Fn(u64) -> bool) {
    for block in 0..blocks {
        let expected = if overwritten(block) { 200 } else { block as u8 };
        assert_eq!(holds(engine, object, block).unwrap(), expected, "object {object}, block {block}");
    }
}

#[test]
fn a_pack_is_packed_again_once_less_than_half_of_it_is_in_use() {
    let (disk, engine) = made();
    fill(&engine, 32);
    let old = place(&engine, 1, 31).0;
    overwrite(&engine, 1, 0..16);
    pack(&engine, 1, 0..32);
    assert_eq!(place(&engine, 1, 31).0, old);
    overwrite(&engine, 1, 16..17);
    pack(&engine, 1, 0..32);
    let (new, packed) = place(&engine, 1, 31);
    assert!(packed && new != old && new.blocks < old.blocks);
    assert_eq!(place(&engine, 1, 17).0, new);
    quiet(&engine);
    assert!((old.start..old.start + old.blocks).all(|block| references(&engine, block) == 0));
    assert!((new.start..new.start + new.blocks).all(|block| references(&engine, block) == 1));
    has(&engine, 1, 32, |block| block < 17);
    is_whole(&engine);
    // Another pass finds nothing to do.
    assert_eq!(pack(&engine, 1, 0..32), (0, 0));
    // The operation is replayed after a kill.
    overwrite(&engine, 1, 17..26);
    pack(&engine, 1, 0..32);
    let newest = place(&engine, 1, 31).0;
    assert_ne!(newest, new);
    engine.commit_changes().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!(place(&engine, 1, 31).0, newest);
    has(&engine, 1, 32, |block| block < 26);
    is_whole(&engine);
}

#[test]
fn a_pack_is_packed_again_for_all_that_share_it() {
    let (disk, engine) = made();
    fill(&engine, 64);
    let snapshot = take(&engine, 1, "s");
    let clone = engine.clone_snapshot(snapshot, &[new_disk("clone", BLOCKS)]).unwrap()[0];
    engine.detach(clone).unwrap();
    overwrite(&engine, 1, 0..30);
    overwrite(&engine, clone, 2..32);
    let old = place(&engine, 1, 31).0;
    // The snapshot uses all blocks.
    assert_eq!(place(&engine, snapshot, 5).0, old);
    pack(&engine, 1, 0..64);
    assert_eq!(place(&engine, 1, 31).0, old);
    // The deleted snapshot still has references on the pack.
    engine.delete_snapshot(snapshot).unwrap();
    quiet(&engine);
    pack(&engine, 1, 0..64);
    pack(&engine, clone, 0..64);
    assert_eq!(place(&engine, 1, 31).0, old);
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    pack(&engine, clone, 0..64);
    let new = place(&engine, 1, 31).0;
    assert!(new != old && place(&engine, clone, 0).0 == new && new.blocks <= 4);
    quiet(&engine);
    assert_eq!((references(&engine, old.start), references(&engine, new.start)), (0, 2));
    let compare = |engine: &Engine| {
        has(engine, 1, 64, |block| block < 30);
        has(engine, clone, 64, |block| (2..32).contains(&block));
        is_whole(engine);
    };
    compare(&engine);
    drop(engine);
    compare(&open(&disk).unwrap());
}

#[test]
fn a_power_cut_at_any_operation_of_packing_again_loses_nothing() {
    cut_at_each_operation(cut_off);
}

/// Packs a pack again, and cuts the power after `cut` operations of the medium. True if everything was done before.
fn cut_off(seed: u64, cut: u64) -> bool {
    let (disk, engine) = made_on(SimulatedDisk::new(seed, SimulatedOptions::default()));
    fill(&engine, 32);
    overwrite(&engine, 1, 0..20);
    let old = place(&engine, 1, 31).0;
    disk.cut_after(disk.operations() + cut);
    let (mut at, mut pass) = (0, packer());
    let done = loop {
        match engine.pack_step(1, at..32, &mut pass) {
            Ok(step) if step.next < 32 => at = step.next,
            Ok(_) => break engine.commit_changes().is_ok(),
            Err(_) => break false,
        }
    };
    let ended = !disk.is_off();
    let engine = open(&disk.crash()).unwrap();
    has(&engine, 1, 32, |block| block < 20);
    is_whole(&engine);
    assert!(!ended || done && place(&engine, 1, 31).0 != old);
    ended
}

#[test]
fn a_write_during_packing_again_is_kept() {
    for request in [Request::Read, Request::Write] {
        let (disk, engine) = made();
        fill(&engine, 32);
        overwrite(&engine, 1, 0..20);
        let other = Arc::clone(&engine);
        before_next(&disk, request, move || {
            write(&other, 25, 200);
            other.settle(&other.head(1)).unwrap();
        });
        engine.pack_step(1, 0..32, &mut packer()).unwrap();
        let compare = |engine: &Engine| has(engine, 1, 32, |block| block < 20 || block == 25);
        compare(&engine);
        quiet(&engine);
        pack(&engine, 1, 0..32);
        quiet(&engine);
        compare(&engine);
        is_whole(&engine);
        drop(engine);
        compare(&open(&disk).unwrap());
    }
}

#[test]
fn a_damaged_pack_stays_where_it_is() {
    let (disk, engine) = made();
    fill(&engine, 32);
    overwrite(&engine, 1, 0..20);
    let old = place(&engine, 1, 31).0;
    let (_, offset) = engine.files.locate(Run { start: old.start + 1, blocks: 1 }).unwrap();
    disk.flip_bit("data.0000", offset + 1000, 3).unwrap();
    pack(&engine, 1, 0..32);
    assert_eq!(place(&engine, 1, 31).0, old);
    // The damage is in blocks that are not in use any more, so it is no finding.
    has(&engine, 1, 32, |block| block < 20);
    let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
    assert_eq!(report.findings, []);
}
