//! Writes that were mapped to packs in use, after kills, power cuts and repairs.

use super::super::super::super::cut::{Features, Histories, cut_histories};
use super::super::super::super::packed::histories::history;
use super::super::super::super::replayed::checkpoints;
use super::super::super::super::unreadable::{damage_node, grown, leaves};
use super::*;
use testkit::environment::number;

#[test]
fn writes_mapped_to_packs_are_found_by_replay_after_a_kill() {
    for through in [false, true] {
        let (disk, engine, other) = packed(2);
        let before = checkpoints(&engine);
        fill_mixed(&engine, other, 100, 3..63, through).unwrap();
        // A part that continues another one.
        fill_mixed(&engine, other, 160, 63..65, false).unwrap();
        engine.flush().unwrap();
        put(&engine, other, 110, 111);
        engine.flush().unwrap();
        let found = parts(&engine, other);
        assert_eq!((checkpoints(&engine), engine.shared_writes()), (before, 62));
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        let engine = open(&disk).unwrap();
        hold_mixed(&engine, other, 100, 3..13);
        hold_mixed(&engine, other, 111, 14..65);
        assert_eq!((holds(&engine, other, 110).unwrap(), parts(&engine, other)), (111, found));
        is_whole(&engine);
    }
}

#[test]
fn a_power_cut_at_any_operation_of_writes_mapped_to_packs_loses_nothing() {
    cut_at_each_operation(|seed, cut| cut_off(seed, cut, false));
    cut_at_each_operation(|seed, cut| cut_off(seed, cut, true));
}

/// Writes packs, writes the same content to another disk before the packs are durable, and cuts the power after `cut`
/// operations of the medium.
fn cut_off(seed: u64, cut: u64, through: bool) -> bool {
    let medium = SimulatedDisk::new(seed, SimulatedOptions::default());
    let (disk, engine, other) = packed_on(medium, 0);
    fill_mixed(&engine, 1, 0, 1..65, through).unwrap();
    assert!(stored_at(&engine, 1, 0).1);
    disk.cut_after(disk.operations() + cut);
    let written = fill_mixed(&engine, other, 100, 1..65, through);
    let mapped = engine.shared_writes();
    // A commit appends what needs no flush of the data files before it flushes them.
    let done = written.and_then(|()| engine.commit_changes()).is_ok();
    let ended = !disk.is_off();
    // If the power is not cut in between, it is cut now, and everything is lost that was not flushed.
    let disk = if ended { disk.copy_of_durable(seed, SimulatedOptions::default()) } else { disk.crash() };
    let engine = open(&disk).unwrap();
    for block in 0..64 {
        let found = [(1, block), (other, 100 + block)].map(|(disk, at)| holds(&engine, disk, at).unwrap());
        let value = 1 + block as u8;
        assert!(found.iter().all(|found| *found == value || !done && *found == 0), "cut {cut}, {block}: {found:?}");
    }
    is_whole(&engine);
    assert!(!ended || done && mapped == 64, "{mapped}");
    ended
}

/// The map of the disk that wrote the pack is lost, and with it the operation that mapped the pack.
#[test]
fn a_repair_keeps_a_mapped_pack_whose_first_owner_is_lost() {
    let disk = grown();
    // A window that lies in one leaf.
    let leaves = leaves(&disk);
    let window = leaves[1].0.next_multiple_of(32);
    assert!(window + 32 <= leaves[2].0);
    let engine = open(&disk).unwrap();
    let other = add_disk(&engine, "second", BLOCKS, Provisioning::Thin);
    engine.checkpoint().unwrap();
    let before = checkpoints(&engine);
    of_one_domain(&engine, other);
    both_compress(&engine, other);
    take(&engine, 1, "s");
    fill_mixed(&engine, 1, window, 171..203, false).unwrap();
    assert!(stored_at(&engine, 1, window).1);
    engine.flush().unwrap();
    fill_mixed(&engine, other, 5, 171..203, false).unwrap();
    engine.flush().unwrap();
    assert_eq!((engine.shared_writes(), checkpoints(&engine)), (32, before));
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    damage_node(&disk, leaves[1].1);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    hold_mixed(&engine, other, 5, 171..203);
    assert_eq!(holds(&engine, 1, window).unwrap_err().kind(), ErrorKind::Corrupt);
    engine.close().unwrap();
    drop(engine);
    hold_mixed(&open(&disk).unwrap(), other, 5, 171..203);
}

/// The disk that gets the part of a pack has lost a leaf.
#[test]
fn a_repair_replays_the_part_of_a_mapped_pack_beside_a_lost_leaf() {
    let disk = grown();
    let leaves = leaves(&disk);
    let (bound, page) = (leaves[2].0, leaves[1].1);
    let engine = open(&disk).unwrap();
    let other = add_disk(&engine, "second", BLOCKS, Provisioning::Thin);
    of_one_domain(&engine, other);
    both_compress(&engine, other);
    fill_mixed(&engine, other, 0, 1..33, false).unwrap();
    quiet(&engine);
    take(&engine, 1, "s");
    let before = checkpoints(&engine);
    fill_mixed(&engine, 1, bound - 4, 5..17, false).unwrap();
    engine.flush().unwrap();
    assert_eq!((engine.shared_writes(), checkpoints(&engine)), (12, before));
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    damage_node(&disk, page);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    hold_mixed(&engine, 1, bound, 9..17);
    assert_eq!(holds(&engine, 1, bound - 2).unwrap_err().kind(), ErrorKind::Corrupt);
    hold_mixed(&engine, other, 0, 1..33);
}

/// Only a repair or a salvage may find such an operation, because it leaves out others.
#[test]
fn an_ordinary_opening_adopts_no_pack_for_a_mapped_write() {
    let (disk, engine, other) = packed(1);
    let before = checkpoints(&engine);
    {
        let mut meta = engine.meta.lock();
        let free = (0..).find(|block| meta.entry(*block).unwrap().references == 0).unwrap();
        let (run, checksums) = (Run { start: free, blocks: 1 }, vec![5]);
        // The operation reaches the journal only.
        let operation = Operation::MapSharedPack { disk: other, logical: 0, blocks: 2, first: 0, run, checksums };
        meta.pending.push(operation, 0, 0, Vec::new(), Vec::new());
    }
    engine.commit_changes().unwrap();
    assert_eq!(checkpoints(&engine), before);
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    assert_eq!(open(&disk).err().unwrap().kind(), ErrorKind::Corrupt);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    hold_mixed(&engine, 1, 0, 1..33);
}

/// With all reductions at once, and restarts.
#[test]
fn random_histories_of_packed_and_mapped_writes_keep_every_content() {
    let from = number("LAMINA_SHARED_FROM", 0);
    for seed in from..from + number("LAMINA_SHARED", 4) {
        for shares in [false, true] {
            let features = Features { shares, packs_writes: true, maps_writes: true };
            let (_, version) = history(seed, features);
            assert_eq!(version, VERSION_WRITES_TO_PACKS, "seed {seed}");
        }
    }
}

/// The power is cut at any operation of the medium, also between writes and passes.
#[test]
fn power_cuts_between_packed_and_mapped_writes_lose_nothing_durable() {
    let from = number("LAMINA_CUT_FROM", 0);
    let seeds = from..from + number("LAMINA_CUT", 3);
    for shares in [false, true] {
        let features = Features { shares, packs_writes: true, maps_writes: true };
        let Histories { mapped, found_packed, mapped_packs, .. } = cut_histories(seeds.clone(), features);
        assert!(mapped > 300 && found_packed > 1000 && mapped_packs > 0, "{mapped} {found_packed} {mapped_packs}");
    }
}
