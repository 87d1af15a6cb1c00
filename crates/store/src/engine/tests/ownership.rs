//! A block that recovery would assign to another disk, or would verify by an older checksum, is not overwritten in
//! place.

use super::*;
use crate::engine::metadata::Effects;
use crate::tree;

const CAPACITY: u64 = 64;

fn write_to(engine: &Engine, disk: u64, logical: u64, value: u32) {
    let mut buffer = Buffer::zeroed(1);
    buffer.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
    engine.write_blocks(&engine.head(disk), logical, SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE)).unwrap();
}

fn read_from(engine: &Engine, disk: u64, logical: u64) -> Result<u32> {
    let head = engine.head(disk);
    let block = engine.read_blocks("disk", logical..logical + 1, &|range| engine.plan_head(&head, range))?;
    let word = u32::from_le_bytes(block[..4].try_into().unwrap());
    assert!(block.chunks_exact(4).all(|other| other == word.to_le_bytes()), "a block holds a mixture");
    Ok(word)
}

/// A store with disk 1, in which every block has the value 1, and a clone that shares all its blocks. The snapshot
/// between them is deleted.
fn shared() -> (SimulatedDisk, Arc<Engine>, u64) {
    let disk = formatted();
    let engine = open(&disk).unwrap();
    add_disk(&engine, "a", CAPACITY, Provisioning::Thin);
    (0..CAPACITY).for_each(|block| write_to(&engine, 1, block, 1));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    let clone = cloned(&engine, 1, new_disk("c", CAPACITY));
    engine.checkpoint().unwrap();
    (disk, engine, clone)
}

/// Makes a clone that shares the blocks of `disk`. The snapshot between them is deleted.
fn cloned(engine: &Engine, disk: u64, new: NewDisk) -> u64 {
    let snapshot = take(engine, disk, "s");
    let clone = engine.clone_snapshot(snapshot, &[new]).unwrap()[0];
    engine.detach(clone).unwrap();
    engine.delete_snapshot(snapshot).unwrap();
    while engine.drop_all_trash().unwrap() {}
    clone
}

/// Writes everything in the buffers to the data files, without a flush and without an append of pending changes.
fn write_back_all(engine: &Engine) {
    while engine.write_back_once().unwrap() {}
}

#[test]
fn a_clone_never_reads_later_writes_of_its_former_parent() {
    let (disk, engine, clone) = shared();
    for block in 0..CAPACITY {
        write_to(&engine, clone, block, 2);
    }
    write_back_all(&engine);
    for block in 0..CAPACITY {
        write_to(&engine, 1, block, 3);
    }
    write_back_all(&engine);
    // The store is killed. Writes of the clone may be lost, but writes of the parent must not appear in the clone.
    drop(engine);
    let engine = open(&disk).unwrap();
    for block in 0..CAPACITY {
        let found = read_from(&engine, clone, block).unwrap();
        assert!([1, 2].contains(&found), "block {block} of the clone holds {found}");
        let found = read_from(&engine, 1, block).unwrap();
        assert!([1, 3].contains(&found), "block {block} of the parent holds {found}");
    }
    is_whole(&engine);
}

#[test]
fn a_clone_with_nodes_of_its_own_never_reads_later_writes_of_its_former_parent() {
    let (disk, engine, clone) = shared();
    for (id, block) in [(1, 0), (clone, 1)] {
        write_to(&engine, id, block, 9);
        engine.settle(&engine.head(id)).unwrap();
    }
    engine.flush().unwrap();
    (2..CAPACITY).for_each(|block| write_to(&engine, clone, block, 2));
    write_back_all(&engine);
    (2..CAPACITY).for_each(|block| write_to(&engine, 1, block, 3));
    write_back_all(&engine);
    drop(engine);
    let engine = open(&disk).unwrap();
    for block in 2..CAPACITY {
        let found = read_from(&engine, clone, block).unwrap();
        assert!([1, 2].contains(&found), "block {block} of the clone holds {found}");
    }
}

#[test]
fn nodes_that_move_up_or_merge_stay_shared_for_recovery() {
    // Writes every second block, so that the map has many leaves.
    const BLOCKS: u64 = 2000;
    for kept in [BLOCKS - 40..BLOCKS, 0..40, 900..1300] {
        let disk = formatted();
        let engine = open(&disk).unwrap();
        add_disk(&engine, "a", 2 * BLOCKS, Provisioning::Thin);
        (0..BLOCKS).for_each(|block| write_to(&engine, 1, 2 * block, 1));
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        let clone = cloned(&engine, 1, new_disk("c", 2 * BLOCKS));
        engine.checkpoint().unwrap();
        {
            // The deletion is not in the journal when the store is killed.
            let mut meta = engine.meta.lock();
            engine.carry_out(&mut meta, Operation::Trash { object: clone }, 0).unwrap();
            engine.carry_out(&mut meta, Operation::Drop { object: clone, steps: 4 }, 0).unwrap();
            assert!(meta.catalog.first_trash().is_none(), "one reference on the shared root is all there is to drop");
        }
        let head = engine.head(1);
        engine.discard_blocks(&head, 0..2 * kept.start).unwrap();
        engine.discard_blocks(&head, 2 * kept.end..2 * BLOCKS).unwrap();
        write_back_all(&engine);
        kept.clone().for_each(|block| write_to(&engine, 1, 2 * block, 3));
        write_back_all(&engine);
        drop(engine);
        let engine = open(&disk).unwrap();
        (0..BLOCKS).for_each(|block| assert_eq!(read_from(&engine, clone, 2 * block).unwrap(), 1, "block {block}"));
        is_whole(&engine);
    }
}

#[test]
fn blocks_of_pending_discards_of_a_clone_are_not_overwritten_by_its_former_parent() {
    let (disk, engine, clone) = shared();
    engine.discard_blocks(&engine.head(clone), 0..CAPACITY / 2).unwrap();
    write_back_all(&engine);
    (0..CAPACITY).for_each(|block| write_to(&engine, 1, block, 3));
    write_back_all(&engine);
    drop(engine);
    let engine = open(&disk).unwrap();
    for block in 0..CAPACITY {
        let found = read_from(&engine, clone, block).unwrap();
        assert!(found == 1 || found == 0 && block < CAPACITY / 2, "block {block} of the clone holds {found}");
    }
}

#[test]
fn a_dropped_disk_that_recovery_would_bring_back_keeps_its_blocks() {
    let (disk, engine, clone) = shared();
    {
        // The record of the deletion is not in the journal yet, but its tree is dropped in memory.
        let mut meta = engine.meta.lock();
        engine.carry_out(&mut meta, Operation::Trash { object: clone }, 0).unwrap();
        while meta.catalog.first_trash().is_some() {
            engine.carry_out(&mut meta, Operation::Drop { object: clone, steps: 4 }, 0).unwrap();
        }
    }
    (0..CAPACITY).for_each(|block| write_to(&engine, 1, block, 3));
    write_back_all(&engine);
    drop(engine);
    let engine = open(&disk).unwrap();
    (0..CAPACITY).for_each(|block| assert_eq!(read_from(&engine, clone, block).unwrap(), 1));
    is_whole(&engine);
}

#[test]
fn payload_is_not_written_to_a_block_with_a_planned_overwrite() {
    let (_disk, engine) = made();
    (0..4).for_each(|block| write_to(&engine, 1, block, 1));
    engine.flush().unwrap();
    (0..4).for_each(|block| write_to(&engine, 1, block, 2));
    engine.flush().unwrap();
    assert_eq!(engine.meta.lock().logged.len(), 4);
    // Write-back releases the metadata lock between planning and writing: another thread may write payload then.
    let mut plan = writeback::Plan::default();
    write_to(&engine, 1, 0, 3);
    write_to(&engine, 1, 1, 3);
    let head = engine.head(1);
    let pieces = head.lock().layers.oldest().0.take(0, 100);
    let mut meta = engine.meta.lock();
    let buffered = writeback::Buffered { pieces: &pieces, packs: &[] };
    let fetch = &mut metadata::Fetch::under_the_lock();
    engine.plan_batch(&mut meta, &head, buffered, false, &mut plan, fetch).unwrap();
    drop(meta);
    assert_eq!(engine.write_logged(100).unwrap(), 2, "blocks 2 and 3");
    let mut meta = engine.meta.lock();
    assert_eq!(meta.logged.len(), 2);
    plan.undo(&mut meta);
    drop(meta);
    assert_eq!(engine.write_logged(100).unwrap(), 2);
}

#[test]
fn no_overwrite_is_planned_for_a_block_to_which_payload_is_being_written() {
    let (_disk, engine) = made();
    write_to(&engine, 1, 0, 1);
    engine.flush().unwrap();
    let mut meta = engine.meta.lock();
    let block = *meta.logged.keys().next().unwrap();
    meta.in_flight.claim(Run { start: block, blocks: 1 });
    let root = meta.catalog.get(1).unwrap().root;
    assert_eq!(meta.places(root, 0..1).unwrap(), [(0..1, None)]);
    meta.in_flight.release(Run { start: block, blocks: 1 });
    assert_eq!(meta.places(root, 0..1).unwrap(), [(0..1, Some(block))]);
}

#[test]
fn a_torn_block_that_was_read_and_overwritten_has_the_new_content() {
    let (disk, engine, _) = cut_off();
    assert!(torn(&engine).is_ok(), "the torn content is accepted");
    write_to(&engine, 1, 0, 3);
    write_back_all(&engine);
    engine.flush().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!(read_from(&engine, 1, 0).unwrap(), 3);
    is_whole(&engine);
}

#[test]
fn an_unused_permit_does_not_make_a_torn_block_an_error() {
    let (disk, engine, physical) = cut_off();
    // The permit was given for a stream of large writes that ends before this block. A flush ends the permit.
    engine.announce_ahead(&[Run { start: physical, blocks: 1 }]).unwrap();
    engine.sync_all_data().unwrap();
    engine.append_pending(&mut engine.log.lock()).unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert!(torn(&engine).is_ok(), "the torn content is accepted");
}

#[test]
fn payload_older_than_a_flushed_overwrite_is_never_written_back() {
    let (disk, engine) = made();
    write_to(&engine, 1, 0, 1);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let physical = physical_of(&engine, 0);
    write_to(&engine, 1, 0, 2);
    engine.flush().unwrap();
    assert_eq!(engine.meta.lock().logged.len(), 1, "payload is in the journal only");
    write_to(&engine, 1, 0, 3);
    write_back_all(&engine);
    // Models a flush of the data files that began before the end of the batch: it settles no announcement of the batch.
    engine.log.settle_nothing();
    engine.sync_data().unwrap();
    engine.log.end_announced();
    engine.flush().unwrap();
    // The power is cut during the next overwrite, which has reached the medium in part.
    engine.announce_ahead(&[Run { start: physical, blocks: 1 }]).unwrap();
    drop(engine);
    tear(&disk, physical, 4);
    let engine = open(&disk).unwrap();
    let block = torn(&engine).unwrap();
    assert_eq!((block[0], block[BLOCK_SIZE - 4]), (4, 3), "the torn overwrite, not the older payload 2");
}

#[test]
fn a_freed_block_is_not_reused_before_an_earlier_planned_read_ends() {
    let (_disk, engine) = made();
    write_to(&engine, 1, 0, 1);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    let physical = physical_of(&engine, 0);
    let planned = engine.plan_head(&engine.head(1), 0..1).unwrap();
    engine.discard_blocks(&engine.head(1), 0..1).unwrap();
    write_back_all(&engine);
    engine.flush().unwrap();
    engine.commit_changes().unwrap();
    write_to(&engine, 1, 1, 2);
    write_back_all(&engine);
    assert!(engine.meta.lock().freed.holds(physical));
    drop(planned);
    assert!(engine.meta.lock().release_freed());
}

fn physical_of(engine: &Engine, logical: u64) -> u64 {
    let mut meta = engine.meta.lock();
    let root = meta.catalog.get(1).unwrap().root.unwrap();
    let (mut extents, mut effects) = (Vec::new(), Effects::default());
    tree::lookup(&mut meta.nodes(&mut effects), root, logical..logical + 1, &mut extents).unwrap();
    extents[0].physical
}

/// A store opened after a crash in which only some sectors of block 0 of disk 1 were overwritten. Also returns the
/// physical block.
fn cut_off() -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine) = made();
    write_to(&engine, 1, 0, 1);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    let physical = physical_of(&engine, 0);
    write_to(&engine, 1, 0, 2);
    write_back_all(&engine);
    drop(engine);
    tear(&disk, physical, 1);
    let engine = open(&disk).unwrap();
    (disk, engine, physical)
}

/// Fills the first sector of a data block with the word `value`.
fn tear(disk: &SimulatedDisk, physical: u64, value: u32) {
    let file = disk.directory().open("data.0000", IoMode::Buffered).unwrap();
    let sector: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), 128).flatten().collect();
    file.write_at(&[&sector], physical * BLOCK_SIZE as u64, true).unwrap();
}

fn torn(engine: &Engine) -> Result<Buffer> {
    let head = engine.head(1);
    engine.read_blocks("vm", 0..1, &|range| engine.plan_head(&head, range))
}

#[test]
fn a_read_settles_no_doubt_during_a_write_of_the_block() {
    let (_disk, engine, physical) = cut_off();
    let run = Run { start: physical, blocks: 1 };
    engine.meta.lock().in_flight.claim(run);
    let head = engine.head(1);
    let planned = engine.plan_head(&head, 0..1).unwrap();
    let Some(Part::Stored(stored)) = planned.parts.first() else { panic!("on the medium") };
    let mut buffer = Buffer::zeroed(1);
    stored.file.read_at(&mut buffer, stored.offset).unwrap();
    let replan = |block: u64| engine.plan_head(&head, block..block + 1);
    assert!(!engine.verify("vm", 0, &planned, |_| &buffer, &replan).unwrap());
    assert!(engine.meta.lock().pending.iter().all(|pending| !matches!(pending.operation, Operation::Resolve { .. })));
    // The write has failed, so its block stays in flight: a read must not wait for it.
    engine.stop(Error::new(ErrorKind::Io, "the medium has failed"));
    let finished = engine.verify("vm", 0, &planned, |_| &buffer, &replan);
    assert_eq!(finished.unwrap_err().kind(), ErrorKind::Stopped);
}

#[test]
fn payload_is_written_back_only_when_every_change_of_its_block_is_durable() {
    let (disk, engine) = made();
    write_to(&engine, 1, 0, 1);
    write_back_all(&engine);
    engine.sync_data().unwrap();
    // This change is pending after the first one, and its data is not flushed.
    write_to(&engine, 1, 10, 1);
    write_back_all(&engine);
    write_to(&engine, 1, 0, 2);
    {
        let gate = engine.writeback.lock();
        let mut commit = engine.log.lock();
        engine.log_buffers(&mut metadata::Fetch::under_the_lock()).unwrap();
        drop(gate);
        engine.append_pending(&mut commit).unwrap();
    }
    assert_eq!(engine.meta.lock().pending.len(), 2, "the second mapping and the payload are pending");
    assert_eq!(engine.write_logged(100).unwrap(), 0);
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!(read_from(&engine, 1, 0).unwrap(), 1);
    is_whole(&engine);
}

/// The values that each block may have after a crash: the value flushed last, and all values written since.
struct Expected {
    written: Vec<Vec<Vec<u32>>>,
}

/// Disks that share blocks and have no snapshot are killed at random points of random work. Every block holds a value
/// that its own disk wrote.
#[test]
fn disks_that_share_blocks_never_read_writes_of_each_other() {
    for seed in 0..400 {
        random_sharing(seed);
    }
}

fn random_sharing(seed: u64) {
    const DISKS: usize = 3;
    const USED: u64 = 12;
    let mut random = Random(seed);
    let disk = formatted();
    let mut engine = open(&disk).unwrap();
    let mut ids = vec![add_disk(&engine, "0", CAPACITY, Provisioning::Thin)];
    let mut expected = Expected { written: vec![vec![vec![0]; USED as usize]] };
    let mut stamp = 0;
    for step in 0..random.below(120) {
        let at = random.below(ids.len() as u64) as usize;
        let block = random.below(USED);
        match random.below(100) {
            0..40 => {
                stamp += 1;
                write_to(&engine, ids[at], block, stamp);
                expected.written[at][block as usize].push(stamp);
            }
            40..60 => {
                engine.write_back_once().unwrap();
            }
            60..65 => {
                engine.discard_blocks(&engine.head(ids[at]), block..block + 1).unwrap();
                expected.written[at][block as usize].push(0);
            }
            65..70 => {
                engine.write_logged(1 + random.below(8) as usize).unwrap();
            }
            70..74 => engine.append_pending(&mut engine.log.lock()).unwrap(),
            74..77 => engine.sync_data().unwrap(),
            77..80 => {
                engine.flush().unwrap();
                expected.written.iter_mut().flatten().for_each(|values| *values = vec![*values.last().unwrap()]);
            }
            80..83 => engine.checkpoint().unwrap(),
            83..88 if ids.len() < DISKS => {
                let clone = cloned(&engine, ids[at], new_disk(&format!("{seed} {step}"), CAPACITY));
                ids.push(clone);
                // What was not flushed may be lost, from the clone as from its origin.
                expected.written.push(expected.written[at].clone());
            }
            88..92 if ids.len() > 1 => {
                let gone = ids.swap_remove(at);
                expected.written.swap_remove(at);
                engine.delete_disk(gone, &[]).unwrap();
            }
            92..96 => while engine.drop_all_trash().unwrap() {},
            96..98 => {
                drop(engine);
                engine = open(&disk).unwrap();
                check_sharing(&engine, &ids, &mut expected, seed);
            }
            _ => drop(engine.pump().unwrap()),
        }
    }
    drop(engine);
    let engine = open(&disk).unwrap();
    check_sharing(&engine, &ids, &mut expected, seed);
    is_whole(&engine);
}

fn check_sharing(engine: &Engine, ids: &[u64], expected: &mut Expected, seed: u64) {
    for (id, blocks) in ids.iter().zip(&mut expected.written) {
        for (block, values) in (0u64..).zip(blocks) {
            let found = read_from(engine, *id, block).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert!(values.contains(&found), "seed {seed}: disk {id} block {block} holds {found}, not of {values:?}");
            *values = vec![found];
        }
    }
}
