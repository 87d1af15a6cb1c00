//! The read cache: reads return what they would return without it, whatever is overwritten, freed, packed, shared or
//! reverted in between, and places that several disks share are read from the medium once.

use super::packed::{pack, place, quiet};
use super::shared::share;
use super::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

const DISK_BLOCKS: u64 = 256;

fn with(mode: IoMode, read_cache: usize) -> EngineOptions {
    EngineOptions { mode, read_cache, ..options() }
}

/// A store that is accessed directly, with one disk of which blocks are written.
fn direct(blocks: u64) -> (SimulatedDisk, Arc<Engine>) {
    let disk = formatted();
    let engine = Engine::open(disk.directory(), with(IoMode::Direct, 4 << 20)).unwrap();
    assert_eq!(add_disk(&engine, "vm", BLOCKS, Provisioning::Thin), 1);
    (0..blocks).for_each(|block| write(&engine, block, block as u8));
    quiet(&engine);
    (disk, engine)
}

fn lookups(engine: &Engine) -> (u64, u64) {
    let ReadCacheStatistics { hits, misses, .. } = engine.read_cache_statistics();
    (hits, misses)
}

#[test]
fn a_storm_of_clones_reads_the_golden_image_once() {
    for packed in [false, true] {
        let (disk, engine) = made();
        engine.close().unwrap();
        let mode = if packed { IoMode::Buffered } else { IoMode::Direct };
        let engine = Engine::open(disk.directory(), with(mode, 16 << 20)).unwrap();
        (0..200).for_each(|block| write(&engine, block, block as u8));
        quiet(&engine);
        if packed {
            assert_eq!(pack(&engine, 1, 0..200).0, 200);
        }
        let golden = take(&engine, 1, "golden");
        let names: Vec<NewDisk> = (0..100).map(|number| new_disk(&format!("c{number}"), BLOCKS)).collect();
        for clone in engine.clone_snapshot(golden, &names).unwrap() {
            let head = engine.head(clone);
            for block in (0..200).step_by(4) {
                let read = engine.read_blocks("c", block..block + 4, &|range| engine.plan_head(&head, range)).unwrap();
                assert!(read.chunks(BLOCK_SIZE).zip(block..).all(|(bytes, block)| bytes == [block as u8; BLOCK_SIZE]));
            }
            assert_eq!(engine.cache_lookups(clone).0 + engine.cache_lookups(clone).1, 200);
        }
        assert_eq!(lookups(&engine), (99 * 200, 200), "packed: {packed}");
        assert_eq!(engine.read_cache_statistics().resident, 200 * BLOCK_SIZE as u64);
    }
}

#[test]
fn plain_blocks_are_cached_in_direct_mode_only() {
    let (_disk, engine) = made();
    write(&engine, 0, 1);
    quiet(&engine);
    (0..3).for_each(|_| assert_eq!(value(&engine, 0).unwrap(), 1));
    assert_eq!((lookups(&engine), engine.read_cache_statistics().resident), ((0, 0), 0));
    let (_disk, engine) = direct(1);
    (0..3).for_each(|_| assert_eq!(value(&engine, 0).unwrap(), 0));
    assert_eq!(lookups(&engine), (2, 1));
}

#[test]
fn a_long_read_is_not_kept_although_it_has_short_parts() {
    let (_disk, engine) = direct(0);
    for block in (0..128).rev() {
        write(&engine, block, 1);
        quiet(&engine);
    }
    let head = engine.head(1);
    let resident = |blocks| {
        engine.read_blocks("vm", 0..blocks, &|range| engine.plan_head(&head, range)).unwrap();
        engine.read_cache_statistics().resident
    };
    assert_eq!(resident(128), 0);
    assert_eq!(resident(64), 64 * BLOCK_SIZE as u64);
}

#[test]
fn content_from_before_an_overwrite_in_place_is_not_read() {
    let (_disk, engine) = direct(8);
    let place = own_block(&engine, 1, 3);
    for (round, journalled) in [(100, false), (101, true), (102, false), (103, true)] {
        value(&engine, 3).unwrap();
        write(&engine, 3, round);
        assert_eq!(value(&engine, 3).unwrap(), round);
        if journalled {
            engine.flush().unwrap();
            assert_eq!(value(&engine, 3).unwrap(), round);
        }
        quiet(&engine);
        assert_eq!((value(&engine, 3).unwrap(), own_block(&engine, 1, 3)), (round, place));
    }
}

/// A long read takes a few cached blocks in its middle from the medium too.
#[test]
fn a_read_of_a_damaged_block_that_is_cached_fails_and_ends() {
    let (disk, engine) = direct(64);
    assert_eq!(value(&engine, 31).unwrap(), 31);
    disk.flip_bit("data.0000", own_block(&engine, 1, 31).start * BLOCK_SIZE as u64, 0).unwrap();
    let (head, plans) = (engine.head(1), AtomicU32::new(0));
    let read = engine.read_blocks("vm", 0..64, &|range| {
        assert!(plans.fetch_add(1, Ordering::Relaxed) < 20, "the read does not end");
        engine.plan_head(&head, range)
    });
    assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(value(&engine, 31).unwrap(), 31);
}

/// A read that was planned before an overwrite may end after it.
#[test]
fn content_that_was_read_before_an_overwrite_is_not_kept() {
    for journalled in [false, true] {
        let (_disk, engine) = direct(8);
        let planned = engine.plan_head(&engine.head(1), 3..4).unwrap();
        let Part::Stored(stored) = &planned.parts[0] else { panic!("the block is not on the medium") };
        let mut bytes = Buffer::zeroed(1);
        stored.file.read_at(&mut bytes, stored.offset).unwrap();
        write(&engine, 3, 200);
        if journalled {
            engine.flush().unwrap();
        }
        quiet(&engine);
        engine.keep(&planned, &planned.parts[0], &bytes);
        assert_eq!(value(&engine, 3).unwrap(), 200);
    }
}

/// A read of a snapshot may end after the snapshot was deleted, and its blocks were overwritten in place.
#[test]
fn content_that_was_read_from_a_deleted_snapshot_is_not_kept() {
    let (_disk, engine) = direct(8);
    let place = own_block(&engine, 1, 3);
    let snapshot = take(&engine, 1, "s");
    quiet(&engine);
    let planned = engine.plan_snapshot(snapshot, 3..4).unwrap();
    engine.delete_snapshot(snapshot).unwrap();
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    write(&engine, 3, 200);
    quiet(&engine);
    assert_eq!(own_block(&engine, 1, 3), place);
    engine.keep(&planned, &planned.parts[0], &[3; BLOCK_SIZE]);
    assert_eq!(value(&engine, 3).unwrap(), 200);
}

#[test]
fn content_of_a_freed_pack_is_not_read_from_a_new_pack_in_its_place() {
    for mode in [IoMode::Buffered, IoMode::Direct] {
        let disk = formatted();
        let engine = Engine::open(disk.directory(), with(mode, 4 << 20)).unwrap();
        add_disk(&engine, "vm", BLOCKS, Provisioning::Thin);
        let fill = |first: u8| {
            (0..32).for_each(|block| write(&engine, block, first + block as u8));
            quiet(&engine);
        };
        let reads_as = |first: u8| {
            (0..2).for_each(|_| {
                (0..32).for_each(|block| assert_eq!(value(&engine, block).unwrap(), first + block as u8))
            });
        };
        fill(0);
        assert_eq!(pack(&engine, 1, 0..32), (32, 1));
        let first = place(&engine, 1, 0).0;
        quiet(&engine);
        reads_as(0);
        fill(100);
        {
            // The place of the first pack is the only free block.
            let mut guard = engine.meta.lock();
            let meta = &mut *guard;
            meta.release_freed();
            while meta.data.allocate(&mut meta.pages, 256).unwrap().is_some() {}
            meta.data.release(first);
        }
        assert_eq!(pack(&engine, 1, 0..32), (32, 1));
        assert_eq!(place(&engine, 1, 0).0, first);
        reads_as(100);
    }
}

/// A share changes the content of no place.
#[test]
fn shared_blocks_are_read_from_the_cache_until_a_place_gets_other_content() {
    let (_disk, engine) = direct(0);
    (0..8).for_each(|block| write(&engine, block, 1 + block as u8 % 4));
    quiet(&engine);
    let mut expected: Vec<u8> = (0..8).map(|block| 1 + block % 4).collect();
    let reads_as = |expected: &[u8]| {
        (0..2).for_each(|_| {
            (0..).zip(expected).for_each(|(block, byte)| assert_eq!(value(&engine, block).unwrap(), *byte, "{block}"));
        });
    };
    reads_as(&expected);
    let mut freed: Vec<Run> = (4..8).map(|block| place(&engine, 1, block).0).collect();
    assert_eq!(share(&engine, &[1]), 4);
    quiet(&engine);
    let before = lookups(&engine);
    reads_as(&expected);
    assert_eq!(lookups(&engine), (before.0 + 16, before.1));
    // Other owners keep what they had, and the last one overwrites in place.
    for (block, byte) in [(4, 200), (0, 201), (5, 202), (1, 203)] {
        write(&engine, block, byte);
        expected[block as usize] = byte;
        reads_as(&expected);
        quiet(&engine);
        reads_as(&expected);
    }
    is_whole(&engine);
    {
        // The places that became free are the only free ones.
        let mut guard = engine.meta.lock();
        let meta = &mut *guard;
        meta.release_freed();
        while meta.data.allocate(&mut meta.pages, 256).unwrap().is_some() {}
        freed.retain(|run| meta.entry(run.start).unwrap().references == 0);
        freed.iter().for_each(|run| meta.data.release(*run));
    }
    assert!(!freed.is_empty());
    for block in (8..).take(freed.len()) {
        write(&engine, block, 210 + block as u8);
        expected.push(210 + block as u8);
        quiet(&engine);
        assert!(freed.contains(&place(&engine, 1, block).0));
    }
    reads_as(&expected);
}

#[test]
fn cached_blocks_do_not_divide_a_sequential_read() {
    let (_disk, engine) = direct(64);
    let requests = || {
        let planned = engine.plan_head(&engine.head(1), 0..64).unwrap();
        planned.parts.iter().filter(|part| matches!(part, Part::Stored(_))).count()
    };
    let before = requests();
    (1..63).step_by(2).for_each(|block| assert_eq!(value(&engine, block).unwrap(), block as u8));
    assert_eq!((before, requests()), (1, 1));
    let read = engine.read_blocks("vm", 0..64, &|range| engine.plan_head(&engine.head(1), range)).unwrap();
    assert!(read.chunks(BLOCK_SIZE).zip(0..).all(|(bytes, block)| bytes == [block; BLOCK_SIZE]));
    assert_eq!(requests(), 0);
}

#[test]
fn random_histories_read_the_same_with_a_cache() {
    for seed in 0..12 {
        let mode = if seed % 3 == 0 { IoMode::Buffered } else { IoMode::Direct };
        // The small cache holds a part of the blocks.
        history(seed, with(mode, if seed % 2 == 0 { 100 << 10 } else { 4 << 20 }));
    }
}

fn history(seed: u64, options: EngineOptions) {
    let disk = formatted();
    // In buffered mode only packs are cached, and shared blocks are not packed.
    let shares = options.mode == IoMode::Direct;
    let engine = Engine::open(disk.directory(), options).unwrap();
    let mut random = Random(seed);
    let mut names = 0;
    let mut name = || {
        names += 1;
        format!("o{names}")
    };
    let mut contents: BTreeMap<u64, BTreeMap<u64, u8>> = BTreeMap::new();
    let mut disks = Vec::new();
    for _ in 0..2 {
        disks.push(add_disk(&engine, &name(), DISK_BLOCKS, Provisioning::Thin));
        contents.insert(disks[disks.len() - 1], BTreeMap::new());
    }
    let mut snapshots: Vec<(u64, u64)> = Vec::new();
    for step in 0..1500 {
        let on = disks[random.index(disks.len())];
        let start = random.below(DISK_BLOCKS);
        let range = start..(start + 1 + random.below(24)).min(DISK_BLOCKS);
        match random.below(100) {
            0..2 if snapshots.len() < 4 => {
                let taken = take(&engine, on, &name());
                contents.insert(taken, contents[&on].clone());
                snapshots.push((taken, on));
            }
            2..4 if !snapshots.is_empty() => {
                let (gone, _) = snapshots.swap_remove(random.index(snapshots.len()));
                engine.delete_snapshot(gone).unwrap();
                contents.remove(&gone);
            }
            4..6 if !snapshots.is_empty() => {
                let (snapshot, of) = snapshots[random.index(snapshots.len())];
                engine.revert(of, snapshot).unwrap();
                contents.insert(of, contents[&snapshot].clone());
            }
            6..10 => {
                engine.discard_blocks(&engine.head(on), range.clone()).unwrap();
                contents.get_mut(&on).unwrap().retain(|block, _| !range.contains(block));
            }
            10..14 => {
                quiet(&engine);
                if shares && random.percent(50) {
                    share(&engine, &disks);
                } else {
                    pack(&engine, on, 0..DISK_BLOCKS);
                }
            }
            14..17 => drop(engine.drop_all_trash().unwrap()),
            17..25 => engine.flush().unwrap(),
            25..30 => quiet(&engine),
            30..36 => drop(engine.pump().unwrap()),
            36..60 => {
                let value = 1 + random.below(255) as u8;
                let blocks = (range.end - range.start) as usize;
                engine.write_blocks(&engine.head(on), range.start, slice(value, blocks)).unwrap();
                contents.get_mut(&on).unwrap().extend(range.map(|block| (block, value)));
            }
            _ => {
                let object = *contents.keys().nth(random.index(contents.len())).unwrap();
                let read = match disks.contains(&object) {
                    true => {
                        engine.read_blocks("o", range.clone(), &|range| engine.plan_head(&engine.head(object), range))
                    }
                    false => engine.read_blocks("o", range.clone(), &|range| engine.plan_snapshot(object, range)),
                };
                for (bytes, block) in read.unwrap().chunks(BLOCK_SIZE).zip(range) {
                    let expected = contents[&object].get(&block).copied().unwrap_or(0);
                    assert!(
                        bytes == [expected; BLOCK_SIZE],
                        "seed {seed}, step {step}, object {object}, block {block}"
                    );
                }
            }
        }
    }
    let (hits, misses) = lookups(&engine);
    assert!(hits > 200 && misses > 200, "{hits} hits, {misses} misses");
    is_whole(&engine);
}
