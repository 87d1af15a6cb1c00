//! The read cache: reads return what they would return without it, whatever is overwritten, freed, packed, shared or
//! reverted in between, and places that several disks share are read from the medium once.

use super::packed::{holds, mixed, pack, place, quiet};
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
        // In buffered mode the second read comes from the page cache, and is kept.
        let read = if packed { 2 } else { 1 };
        assert_eq!(lookups(&engine), ((100 - read) * 200, read * 200), "packed: {packed}");
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

/// A store with one pack of 32 blocks, of which half can be compressed.
fn one_pack(read_cache: usize) -> (SimulatedDisk, Arc<Engine>, Run) {
    let (disk, engine) = made();
    engine.close().unwrap();
    let engine = Engine::open(disk.directory(), with(IoMode::Direct, read_cache)).unwrap();
    engine.write_blocks(&engine.head(1), 0, mixed(0..32)).unwrap();
    quiet(&engine);
    assert_eq!(pack(&engine, 1, 0..32), (32, 17));
    quiet(&engine);
    let run = place(&engine, 1, 0).0;
    (disk, engine, run)
}

/// The stored blocks that each plan of a read fetches, by their numbers in the pack.
fn fetches(engine: &Engine, pack: Run, range: std::ops::Range<u64>) -> Vec<Vec<u64>> {
    let (plans, head) = (std::cell::RefCell::new(Vec::new()), engine.head(1));
    let read = engine.read_blocks("vm", range.clone(), &|range| {
        let planned = engine.plan_head(&head, range)?;
        let mut fetched = Vec::new();
        for part in &planned.parts {
            if let Part::Packed(packed) = part {
                let first = packed.stored.block - pack.start;
                fetched.extend(first..first + packed.stored.checksums.len() as u64);
            }
        }
        plans.borrow_mut().push(fetched);
        Ok(planned)
    });
    assert!(read.unwrap()[..] == mixed(range.map(|block| block as u8))[..]);
    plans.into_inner()
}

#[test]
fn a_short_read_fetches_the_stored_blocks_of_a_pack_that_hold_its_blocks() {
    let (_disk, engine, run) = one_pack(4 << 20);
    // The index begins with 16 bytes for the pack and has 8 for each block, and a block takes about 2,150 bytes.
    assert_eq!(fetches(&engine, run, 20..21), [vec![0], vec![10, 11]]);
    assert_eq!(fetches(&engine, run, 31..32), [vec![16]]);
    assert_eq!(fetches(&engine, run, 8..16), [(4..9).collect::<Vec<u64>>()]);
    // What is decoded is cached, and the rest is read in two parts.
    assert_eq!(fetches(&engine, run, 18..22), [vec![9, 10, 11]]);
    assert_eq!(fetches(&engine, run, 0..32), [(0..17).cycle().take(3 * 17).collect::<Vec<u64>>()]);
    assert_eq!(fetches(&engine, run, 0..32), [Vec::<u64>::new()]);
    // Each block counts once, also if its read was planned twice.
    let (hits, misses) = lookups(&engine);
    assert_eq!((hits, misses, engine.cache_lookups(1)), (32 + 1 + 13, 32, (hits, misses)));
}

#[test]
fn a_long_read_of_which_a_part_is_buffered_fetches_whole_packs() {
    let (_disk, engine, run) = one_pack(4 << 20);
    for block in (0..32).step_by(2) {
        engine.write_blocks(&engine.head(1), block, mixed(std::iter::once(block as u8))).unwrap();
    }
    assert_eq!(fetches(&engine, run, 0..32), [(0..17).cycle().take(16 * 17).collect::<Vec<u64>>()]);
}

#[test]
fn a_block_that_is_stored_beside_the_index_is_read_with_it() {
    let (_disk, engine, run) = one_pack(4 << 20);
    assert_eq!(fetches(&engine, run, 0..1), [vec![0]]);
    assert_eq!((lookups(&engine), engine.cache_lookups(1)), ((0, 1), (0, 1)));
    assert_eq!(fetches(&engine, run, 1..2), [vec![0, 1]]);
}

#[test]
fn a_cache_that_is_too_small_for_indexes_reads_whole_packs() {
    for read_cache in [0, 64 << 10] {
        let (_disk, engine, run) = one_pack(read_cache);
        assert_eq!(fetches(&engine, run, 20..21), [(0..17).collect::<Vec<u64>>()]);
    }
}

/// The index is kept under the place of the pack, which another pack may get.
#[test]
fn the_index_of_a_pack_that_is_gone_is_not_used_for_its_successor() {
    let (_disk, engine, run) = one_pack(4 << 20);
    let head = engine.head(1);
    let mut found = false;
    fetches(&engine, run, 20..21);
    for round in 1..40u8 {
        let value = |block: u64| round.wrapping_mul(32).wrapping_add(block as u8 / 2);
        engine.discard_blocks(&head, 0..32).unwrap();
        quiet(&engine);
        engine.write_blocks(&head, 0, mixed((0..32).map(value))).unwrap();
        quiet(&engine);
        pack(&engine, 1, 0..32);
        quiet(&engine);
        found |= place(&engine, 1, 0) == (run, true);
        (0..32).rev().for_each(|block| assert_eq!(holds(&engine, 1, block).unwrap(), value(block), "block {block}"));
    }
    assert!(found, "the place of the pack was not used again");
}

/// With the index in the cache, and without it: a damaged stored block affects what it holds, and reads end.
#[test]
fn a_damaged_stored_block_of_a_pack_affects_what_it_holds() {
    for (damaged, knows_index) in [(0, false), (0, true), (5, false), (5, true)] {
        let (disk, engine, run) = one_pack(4 << 20);
        if knows_index {
            fetches(&engine, run, 31..32);
        }
        let (_, offset) = engine.files.locate(Run { start: run.start + damaged, blocks: 1 }).unwrap();
        disk.flip_bit("data.0000", offset + 2000, 3).unwrap();
        let (head, plans) = (engine.head(1), AtomicU32::new(0));
        let read = |range: std::ops::Range<u64>| {
            engine.read_blocks("vm", range, &|range| {
                assert!(plans.fetch_add(1, Ordering::Relaxed) < 500, "a read does not end");
                engine.plan_head(&head, range)
            })
        };
        let long_read_fails = || {
            let error = read(0..32).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains(&format!("physical block {}", run.start + damaged)), "{error}");
        };
        long_read_fails();
        let failed: Vec<u64> = (0..32).filter(|block| read(*block..*block + 1).is_err()).collect();
        let expected: Vec<u64> = match (damaged, knows_index) {
            (0, false) => (0..32).collect(),
            (0, true) => vec![0],
            _ => failed.clone(),
        };
        assert!(failed == expected && (damaged == 0 || (1..=2).contains(&failed.len())), "{damaged}: {failed:?}");
        // Some blocks are cached now.
        long_read_fails();
        for block in (0..32).filter(|block| !failed.contains(block)) {
            assert_eq!(holds(&engine, 1, block).unwrap(), block as u8);
        }
    }
}

#[test]
fn random_histories_read_the_same_with_a_cache() {
    for seed in 0..16 {
        let mode = if seed % 3 == 0 { IoMode::Buffered } else { IoMode::Direct };
        // The small cache holds a part of the blocks.
        history(seed, with(mode, if seed % 2 == 0 { 100 << 10 } else { 4 << 20 }));
    }
}

fn history(seed: u64, options: EngineOptions) {
    let disk = formatted();
    // Packs of mixed blocks are long, so that parts of them are read.
    let is_mixed = seed % 4 > 1;
    let content = |value: u8, blocks: usize| match is_mixed {
        true => mixed(std::iter::repeat_n(value, blocks)),
        false => slice(value, blocks),
    };
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
                if random.percent(50) {
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
                engine.write_blocks(&engine.head(on), range.start, content(value, blocks)).unwrap();
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
                    let is_good = match expected {
                        0 => bytes == [0; BLOCK_SIZE],
                        value => bytes == &content(value, 1)[..],
                    };
                    assert!(is_good, "seed {seed}, step {step}, object {object}, block {block}");
                }
            }
        }
    }
    let (hits, misses) = lookups(&engine);
    assert!(hits > 200 && misses > 200, "{hits} hits, {misses} misses");
    is_whole(&engine);
}
