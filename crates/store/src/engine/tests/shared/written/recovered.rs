//! Writes that were mapped to stored blocks, after kills, power cuts and repairs.

use super::super::super::cut::{Features, Histories, cut_histories};
use super::super::super::replayed::checkpoints;
use super::super::super::unreadable::{damage_node, grown, leaves};
use super::*;

#[test]
fn mapped_writes_are_found_by_replay_after_a_kill() {
    for through in [false, true] {
        let (disk, engine, other) = stored(40);
        let before = checkpoints(&engine);
        fill(&engine, other, 100, 40, through).unwrap();
        engine.flush().unwrap();
        put(&engine, 1, 3, 111);
        engine.flush().unwrap();
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        let engine = open(&disk).unwrap();
        has_values(&engine, other, 100, 40);
        assert_eq!(holds(&engine, 1, 3).unwrap(), 111);
        assert_eq!(place(&engine, other, 104), place(&engine, 1, 4));
        is_whole(&engine);
    }
}

#[test]
fn a_power_cut_at_any_operation_of_mapped_writes_loses_nothing() {
    cut_at_each_operation(|seed, cut| cut_off(seed, cut, false));
    cut_at_each_operation(|seed, cut| cut_off(seed, cut, true));
}

/// Overwrites blocks in place, writes the same content to another disk, and cuts the power after `cut` operations of
/// the medium.
fn cut_off(seed: u64, cut: u64, through: bool) -> bool {
    let medium = SimulatedDisk::new(seed, SimulatedOptions::default());
    let (disk, engine, other) = stored_on(medium, 40);
    // The blocks have these contents without a pending operation or a flush.
    (0..40).for_each(|block| put(&engine, 1, block, 101 + block as u8));
    engine.settle(&engine.head(1)).unwrap();
    disk.cut_after(disk.operations() + cut);
    let head = engine.head(other);
    let mut data = Buffer::zeroed(40);
    data.chunks_exact_mut(BLOCK_SIZE).zip(101..).for_each(|(block, value)| block.fill(value));
    let data = SharedSlice::new(Arc::new(data), 0..40 * BLOCK_SIZE);
    let part = |block: usize| data.slice(block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE);
    let written = match through {
        true => engine.write_blocks(&head, 100, data),
        false => (0..40)
            .try_for_each(|block| engine.write_blocks(&head, 100 + block, part(block as usize)))
            .and_then(|()| engine.settle(&head)),
    };
    let mapped = engine.shared_writes();
    // A commit appends what needs no flush of the data files before it flushes them.
    let done = written.and_then(|()| engine.commit_changes()).is_ok();
    let ended = !disk.is_off();
    // If the power is not cut in between, it is cut now, and everything is lost that was not flushed.
    let disk = if ended { disk.copy_of_durable(seed, SimulatedOptions::default()) } else { disk.crash() };
    let engine = open(&disk).unwrap();
    for block in 0..40 {
        let found = holds(&engine, other, 100 + block).unwrap();
        assert!(found == 101 + block as u8 || !done && found == 0, "cut {cut}, block {block}: {found}");
    }
    is_whole(&engine);
    assert!(!ended || done && mapped == 40, "{mapped}");
    ended
}

/// The map of the disk that wrote the blocks is lost, and with it the operation that mapped them.
#[test]
fn a_repair_keeps_mapped_blocks_whose_first_owner_is_lost() {
    let disk = grown();
    let leaves = leaves(&disk);
    let (first, page) = leaves[1];
    let engine = open(&disk).unwrap();
    let other = add_disk(&engine, "second", BLOCKS, Provisioning::Thin);
    engine.checkpoint().unwrap();
    let before = checkpoints(&engine);
    of_one_domain(&engine, other);
    take(&engine, 1, "s");
    (0..8).for_each(|block| put(&engine, 1, first + block, 171 + block as u8));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    (0..8).for_each(|block| put(&engine, other, block, 171 + block as u8));
    engine.settle(&engine.head(other)).unwrap();
    engine.flush().unwrap();
    assert_eq!((engine.shared_writes(), checkpoints(&engine)), (8, before));
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    damage_node(&disk, page);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    (0..8).for_each(|block| assert_eq!(holds(&engine, other, block).unwrap(), 171 + block as u8));
    assert_eq!(holds(&engine, 1, first).unwrap_err().kind(), ErrorKind::Corrupt);
}

/// A block is flushed by its owner, overwritten in place, mapped for a write of another disk, and left to that disk,
/// which overwrites it in place too. The payload of the flush must not return.
#[test]
fn payload_from_before_a_mapped_write_does_not_return() {
    for seed in 0..64 {
        let (disk, engine, other) = stored(0);
        let third = add_disk(&engine, "third", 64, Provisioning::Thin);
        put(&engine, other, 1, 9);
        engine.settle(&engine.head(other)).unwrap();
        engine.flush().unwrap();
        engine.checkpoint().unwrap();
        put(&engine, 1, 0, 1);
        engine.flush().unwrap();
        engine.write_logged(usize::MAX).unwrap();
        put(&engine, 1, 0, 2);
        engine.settle(&engine.head(1)).unwrap();
        put(&engine, other, 0, 2);
        engine.settle(&engine.head(other)).unwrap();
        let kept = place(&engine, 1, 0);
        assert_eq!((engine.shared_writes(), place(&engine, other, 0)), (1, kept));
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
        let found = get(&open(&disk).unwrap(), other, 0);
        assert!([2, 3].contains(&found), "{found}");
    }
}

fn get(engine: &Engine, disk: u64, block: u64) -> u8 {
    holds(engine, disk, block).unwrap()
}

/// Only a repair or a salvage may find such an operation, because it leaves out others.
#[test]
fn an_ordinary_opening_adopts_no_block_for_a_mapped_write() {
    let (disk, engine, other) = stored(3);
    let before = checkpoints(&engine);
    {
        let mut meta = engine.meta.lock();
        let free = (0..).find(|block| meta.entry(*block).unwrap().references == 0).unwrap();
        let (run, checksums) = (Run { start: free, blocks: 1 }, vec![5]);
        // The operation reaches the journal only.
        let operation = Operation::MapShared { disk: other, logical: 0, run, checksums };
        meta.pending.push(operation, 0, 0, Vec::new(), Vec::new());
    }
    engine.commit_changes().unwrap();
    assert_eq!(checkpoints(&engine), before);
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    assert_eq!(open(&disk).err().unwrap().kind(), ErrorKind::Corrupt);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    has_values(&engine, 1, 0, 3);
}

/// The disk that gets the blocks has lost a leaf.
#[test]
fn a_repair_replays_the_part_of_a_mapped_write_beside_a_lost_leaf() {
    let disk = grown();
    let leaves = leaves(&disk);
    let (bound, page) = (leaves[2].0, leaves[1].1);
    let engine = open(&disk).unwrap();
    let other = add_disk(&engine, "second", BLOCKS, Provisioning::Thin);
    of_one_domain(&engine, other);
    fill(&engine, other, 0, 8, false).unwrap();
    quiet(&engine);
    take(&engine, 1, "s");
    let before = checkpoints(&engine);
    let data: Vec<u8> = (0..8).flat_map(|block| vec![1 + block; BLOCK_SIZE]).collect();
    let head = engine.head(1);
    engine.write_blocks(&head, bound - 4, SharedSlice::copy_of(&data)).unwrap();
    engine.settle(&head).unwrap();
    engine.flush().unwrap();
    assert_eq!((engine.shared_writes(), checkpoints(&engine)), (8, before));
    // The engine is dropped without closing, as by a kill.
    drop((head, engine));
    damage_node(&disk, page);
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    (0..4).for_each(|block| assert_eq!(holds(&engine, 1, bound + block).unwrap(), 5 + block as u8));
    assert_eq!(holds(&engine, 1, bound - 2).unwrap_err().kind(), ErrorKind::Corrupt);
    has_values(&engine, other, 0, 8);
}

/// The power is cut at any operation of the medium, with writes of few contents.
#[test]
fn power_cuts_between_mapped_writes_lose_nothing_durable() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |value| value.parse().unwrap());
    let from = number("LAMINA_CUT_FROM", 0);
    let seeds = from..from + number("LAMINA_CUT", 3);
    for shares in [false, true] {
        let features = Features { maps_writes: true, shares, ..Features::default() };
        let Histories { mapped, .. } = cut_histories(seeds.clone(), features);
        assert!(mapped > 300, "{mapped}");
    }
}
