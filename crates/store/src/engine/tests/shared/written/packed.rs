//! Disks whose new data is both compared with stored data and compressed: what is stored in packs is found there.

mod recovered;

use super::super::super::packed::{count_reads, mixed, place as stored_at};
use super::*;
use crate::engine::log::{VERSION_SHARED_WRITES, VERSION_WRITES_TO_PACKS, VERSION_WRITTEN_PACKS};
use crate::sync::atomic::Ordering;
use std::ops::Range;

/// The stored blocks of a window of compressible blocks.
const STORED: u64 = 17;

/// A store with two disks of a domain, whose new data is compressed. The first one has the values 1, 2, 3 ... in packs.
fn packed(windows: u64) -> (SimulatedDisk, Arc<Engine>, u64) {
    packed_on(super::super::super::plain_disk(), windows)
}

fn packed_on(disk: SimulatedDisk, windows: u64) -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine, other) = stored_on(disk, 0);
    both_compress(&engine, other);
    fill_mixed(&engine, 1, 0, 1..1 + 32 * windows as u8, false).unwrap();
    quiet(&engine);
    (0..32 * windows).for_each(|block| assert!(stored_at(&engine, 1, block).1, "block {block}"));
    (disk, engine, other)
}

fn both_compress(engine: &Engine, other: u64) {
    engine.pack_writes_of(&[(1, Codec::Lz4), (other, Codec::Lz4)]).unwrap();
}

/// Writes compressible blocks with these values: one by one, or at once past the buffer.
fn fill_mixed(engine: &Engine, disk: u64, first: u64, values: Range<u8>, through: bool) -> Result<()> {
    let head = engine.head(disk);
    if through {
        return engine.write_blocks(&head, first, mixed(values));
    }
    let mut blocks = (first..).zip(values);
    blocks.try_for_each(|(block, value)| engine.write_blocks(&head, block, mixed(std::iter::once(value))))?;
    engine.settle(&head)
}

fn hold_mixed(engine: &Engine, disk: u64, first: u64, values: Range<u8>) {
    (first..).zip(values).for_each(|(block, value)| assert_eq!(holds(engine, disk, block).unwrap(), value, "{block}"));
}

fn watches_nothing(engine: &Engine) -> bool {
    engine.meta.lock().in_flight.watches_nothing()
}

/// The entries of a disk that map a pack.
fn parts(engine: &Engine, disk: u64) -> Vec<(u64, u64)> {
    let mut meta = engine.meta.lock();
    let root = meta.catalog.get(disk).unwrap().root.unwrap();
    let mut extents = Vec::new();
    crate::tree::lookup(&mut meta.nodes(&mut Default::default()), root, 0..BLOCKS - 1, &mut extents).unwrap();
    extents.iter().filter(|extent| extent.packed.is_some()).map(|extent| (extent.logical, extent.blocks)).collect()
}

#[test]
fn new_data_that_is_stored_in_packs_already_takes_no_blocks() {
    for through in [false, true] {
        let (disk, engine, other) = packed(2);
        let before = used(&engine);
        assert_eq!([version(&disk, 0), version(&disk, 1)], [VERSION_WRITTEN_PACKS; 2], "nothing was mapped yet");
        // At other places in their windows.
        fill_mixed(&engine, other, 105, 1..65, through).unwrap();
        assert_eq!((used(&engine), engine.shared_writes()), (before, 64), "through {through}");
        assert_eq!([version(&disk, 0), version(&disk, 1)], [VERSION_WRITES_TO_PACKS; 2]);
        assert_eq!(parts(&engine, other), [(105, 32), (137, 32)]);
        assert_eq!(stored_at(&engine, other, 106), stored_at(&engine, 1, 1));
        assert!(watches_nothing(&engine));
        quiet(&engine);
        is_whole(&engine);
        // The packs stay as long as one of the disks maps a part of them.
        engine.discard_blocks(&engine.head(1), 0..64).unwrap();
        put(&engine, other, 106, 200);
        quiet(&engine);
        let is_kept = |engine: &Engine| {
            assert_eq!(used(engine), before + 1);
            hold_mixed(engine, other, 105, 1..2);
            hold_mixed(engine, other, 107, 3..65);
            assert_eq!([holds(engine, 1, 5).unwrap(), holds(engine, other, 106).unwrap()], [0, 200]);
            is_whole(engine);
        };
        is_kept(&engine);
        engine.close().unwrap();
        let engine = open(&disk).unwrap();
        is_kept(&engine);
        engine.discard_blocks(&engine.head(other), 0..BLOCKS - 1).unwrap();
        quiet(&engine);
        assert_eq!(used(&engine), before - 2 * STORED);
        is_whole(&engine);
    }
}

/// What is not found is compressed, unless a block of its window is found.
#[test]
fn what_is_not_stored_yet_is_compressed_in_whole_windows() {
    for through in [false, true] {
        let (disk, engine, other) = packed(1);
        let before = used(&engine);
        fill_mixed(&engine, other, 96, 101..165, through).unwrap();
        quiet(&engine);
        assert_eq!((used(&engine), parts(&engine, other)), (before + 2 * STORED, vec![(96, 32), (128, 32)]));
        assert_eq!((engine.shared_writes(), version(&disk, 0)), (0, VERSION_WRITTEN_PACKS));
        // The value 20 is stored: its window is no whole one.
        let values = (166..230).map(|value| if value == 180 { 20 } else { value });
        let head = engine.head(other);
        match through {
            true => engine.write_blocks(&head, 256, mixed(values.clone())).unwrap(),
            false => {
                let blocks = (256..).zip(values.clone());
                blocks.for_each(|(at, value)| engine.write_blocks(&head, at, mixed(std::iter::once(value))).unwrap());
                engine.settle(&head).unwrap();
            }
        }
        quiet(&engine);
        assert_eq!(stored_at(&engine, other, 270), stored_at(&engine, 1, 19));
        assert_eq!((used(&engine), engine.shared_writes()), (before + 3 * STORED + 31, 1));
        assert_eq!(parts(&engine, other)[2..], [(270, 1), (288, 32)]);
        (256..).zip(values).for_each(|(at, value)| assert_eq!(holds(&engine, other, at).unwrap(), value));
        is_whole(&engine);
    }
}

/// Writes of single blocks, and data that does not shrink.
#[test]
fn data_that_is_not_worth_a_pack_is_stored_as_without_compression() {
    for through in [false, true] {
        let (disk, engine, other) = packed(0);
        let mut random = Random(7);
        for block in (0..BLOCKS - 1).step_by(61) {
            engine.write_blocks(&engine.head(other), block, mixed(std::iter::once(1 + (block % 251) as u8))).unwrap();
        }
        engine.settle(&engine.head(other)).unwrap();
        let noise = SharedSlice::copy_of(&random.bytes(64 * BLOCK_SIZE));
        match through {
            true => engine.write_blocks(&engine.head(1), 64, noise.clone()).unwrap(),
            false => {
                for block in 0..64 {
                    let part = noise.slice(block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE);
                    engine.write_blocks(&engine.head(1), 64 + block as u64, part).unwrap();
                }
                engine.settle(&engine.head(1)).unwrap();
            }
        }
        quiet(&engine);
        assert_eq!((parts(&engine, 1), parts(&engine, other)), (vec![], vec![]));
        assert_eq!((engine.shared_writes(), version(&disk, 0)), (0, VERSION_WRITTEN_PACKS));
        // A copy of it is found as a plain one.
        let before = used(&engine);
        engine.write_blocks(&engine.head(other), 1000 * 61 % 2000, noise.clone()).unwrap();
        quiet(&engine);
        assert!(used(&engine) <= before && engine.shared_writes() >= 60, "{}", engine.shared_writes());
        assert_eq!(version(&disk, 0), VERSION_SHARED_WRITES);
        is_whole(&engine);
    }
}

/// In both directions, and between parts that were mapped before.
#[test]
fn adjacent_parts_become_one_entry_with_one_reference() {
    let (_disk, engine, other) = packed(1);
    let (pack, _) = stored_at(&engine, 1, 0);
    for (number, at) in [3, 4, 2, 8, 6, 7, 5, 20].into_iter().enumerate() {
        fill_mixed(&engine, other, 200 + u64::from(at), at..at + 1, false).unwrap();
        assert_eq!(engine.shared_writes(), 1 + number as u64);
        assert_eq!(u64::from(references(&engine, pack.start)), 1 + parts(&engine, other).len() as u64);
    }
    assert_eq!(parts(&engine, other), [(202, 7), (220, 1)]);
    // The order of the map and that of the pack differ.
    fill_mixed(&engine, other, 221, 20..21, false).unwrap();
    assert_eq!(parts(&engine, other), [(202, 7), (220, 1), (221, 1)]);
    quiet(&engine);
    is_whole(&engine);
    // A part between two others, and the same content again in the middle of an entry.
    engine.discard_blocks(&engine.head(other), 205..206).unwrap();
    engine.settle(&engine.head(other)).unwrap();
    assert_eq!(parts(&engine, other), [(202, 3), (206, 3), (220, 1), (221, 1)]);
    for (at, values) in [(205, 5..6), (220, 20..21), (204, 4..7)] {
        engine.write_blocks(&engine.head(other), at, mixed(values)).unwrap();
        engine.settle(&engine.head(other)).unwrap();
        assert_eq!(parts(&engine, other), [(202, 7), (220, 1), (221, 1)]);
        assert_eq!(references(&engine, pack.start), 4);
    }
    quiet(&engine);
    hold_mixed(&engine, other, 202, 2..9);
    is_whole(&engine);
}

/// The blocks that are replaced are other parts of the pack, and its only ones.
#[test]
fn a_pack_stays_in_use_while_its_parts_are_mapped_elsewhere() {
    for through in [false, true] {
        let (_disk, engine, _other) = packed(2);
        let (pack, _) = stored_at(&engine, 1, 0);
        engine.discard_blocks(&engine.head(1), 0..20).unwrap();
        quiet(&engine);
        let before = used(&engine);
        // The values 22 to 32 move by one block, and further ones are written.
        fill_mixed(&engine, 1, 20, 22..64, through).unwrap();
        quiet(&engine);
        hold_mixed(&engine, 1, 20, 22..64);
        assert!(used(&engine) >= before, "{through}");
        let is_there = (20..32).any(|block| stored_at(&engine, 1, block).0 == pack);
        assert!(is_there || references(&engine, pack.start) == 0);
        is_whole(&engine);
    }
}

/// The stored pack is freed, or replaced by another one, after its blocks were compared.
#[test]
fn a_pack_that_is_freed_meanwhile_is_not_mapped() {
    type Change = fn(&Engine);
    let changes: [(&str, Change); 5] = [
        ("freed", |engine| engine.discard_blocks(&engine.head(1), 0..32).unwrap()),
        ("zeroed", |engine| engine.zero_blocks(&engine.head(1), 0..32).unwrap()),
        ("written", |engine| fill_mixed(engine, 1, 0, 101..133, false).unwrap()),
        ("written at once", |engine| fill_mixed(engine, 1, 0, 101..133, true).unwrap()),
        ("packed again", |engine| {
            engine.discard_blocks(&engine.head(1), 4..32).unwrap();
            quiet(engine);
            assert!(pack(engine, 1, 0..BLOCKS).0 > 0);
        }),
    ];
    for (what, change) in changes {
        let (_disk, engine, other) = packed(1);
        let (stored, _) = stored_at(&engine, 1, 3);
        let head = engine.head(other);
        engine.write_blocks(&head, 100, mixed(4..5)).unwrap();
        let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
        assert_eq!((equal.runs.len(), watches_nothing(&engine)), (1, false));
        change(&engine);
        engine.settle(&engine.head(1)).unwrap();
        engine.commit_changes().unwrap();
        assert!(watches_nothing(&engine), "{what}");
        assert!(!engine.map_equal_runs(&head, &equal).unwrap(), "{what}");
        drop(equal);
        // The blocks get other content.
        engine.checkpoint().unwrap();
        fill_mixed(&engine, 1, 512, 201..233, false).unwrap();
        engine.settle(&head).unwrap();
        assert_ne!(stored_at(&engine, other, 100).0, stored, "{what}");
        hold_mixed(&engine, other, 100, 4..5);
        quiet(&engine);
        is_whole(&engine);
    }
}

/// The same content is stored at the same place again.
#[test]
fn a_pack_that_is_freed_and_written_again_meanwhile_is_not_mapped() {
    let (_disk, engine, other) = packed(1);
    let stored = stored_at(&engine, 1, 3);
    let head = engine.head(other);
    engine.write_blocks(&head, 100, mixed(4..5)).unwrap();
    let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
    assert_eq!(equal.runs.len(), 1);
    for round in 0.. {
        engine.discard_blocks(&engine.head(1), 0..32).unwrap();
        engine.settle(&engine.head(1)).unwrap();
        engine.commit_changes().unwrap();
        engine.write_blocks(&engine.head(1), 0, mixed(1..33)).unwrap();
        engine.settle(&engine.head(1)).unwrap();
        if stored_at(&engine, 1, 3) == stored {
            break;
        }
        assert!(round < 200, "the place is not used again");
    }
    assert!(!engine.map_equal_runs(&head, &equal).unwrap());
    drop(equal);
    quiet(&engine);
    hold_mixed(&engine, other, 100, 4..5);
    is_whole(&engine);
}

/// Other places of the pack may be overwritten while it is compared: they get other blocks.
#[test]
fn a_buffered_write_over_a_part_of_the_pack_does_not_matter() {
    for through in [false, true] {
        let (_disk, engine, other) = packed(2);
        put(&engine, 1, 9, 222);
        fill_mixed(&engine, other, 100, 1..65, through).unwrap();
        assert_eq!((engine.shared_writes(), parts(&engine, other)), (64, vec![(100, 32), (132, 32)]));
        quiet(&engine);
        assert_eq!(holds(&engine, 1, 9).unwrap(), 222);
        hold_mixed(&engine, other, 100, 1..65);
        is_whole(&engine);
    }
}

/// The pack at the place of the hint has other content now, in whole or in part.
#[test]
fn hints_for_content_that_a_pack_has_no_more_are_forgotten() {
    let (disk, engine, other) = packed(1);
    // The values 1 to 16 are gone, and 17 to 32 are in another pack.
    let taken = take(&engine, 1, "s");
    let values = (101..117).chain(17..33);
    let head = engine.head(1);
    engine.share_writes_of(&[], MEMORY);
    engine.write_blocks(&head, 0, mixed(values)).unwrap();
    quiet(&engine);
    engine.delete_snapshot(taken).unwrap();
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    of_one_domain(&engine, other);
    // The pass makes hints. Both disks have another block in common.
    assert_eq!(share(&engine, &[1, other]), 1);
    // A write of the values 17 to 32 is found at the new place.
    fill_mixed(&engine, other, 116, 17..33, false).unwrap();
    assert_eq!((engine.shared_writes(), parts(&engine, other)), (16, vec![(116, 16)]));
    // The disk writes others there, so the hints for the values are wrong.
    fill_mixed(&engine, 1, 0, 133..165, false).unwrap();
    fill_mixed(&engine, other, 116, 201..217, false).unwrap();
    quiet(&engine);
    let reads = count_reads(&disk);
    let count = || reads.swap(0, Ordering::Relaxed);
    count();
    fill_mixed(&engine, other, 300, 17..33, false).unwrap();
    assert!(count() > 0);
    assert_eq!(engine.shared_writes(), 16, "nothing has these values");
    // The hints are those of the new blocks now.
    quiet(&engine);
    fill_mixed(&engine, other, 400, 17..33, false).unwrap();
    assert_eq!(engine.shared_writes(), 32);
    hold_mixed(&engine, other, 400, 17..33);
    quiet(&engine);
    is_whole(&engine);
}

/// The index says which stored blocks a few blocks need.
#[test]
fn a_few_blocks_of_a_pack_are_read_without_the_others() {
    let (disk, engine, other) = packed(1);
    let (pack, _) = stored_at(&engine, 1, 0);
    assert_eq!(pack.blocks, STORED);
    // The last stored blocks are damaged, and only a read of all of them finds it.
    let damaged = (pack.start + STORED - 1) * BLOCK_SIZE as u64;
    disk.flip_bit("data.0000", damaged + 7, 3).unwrap();
    fill_mixed(&engine, other, 100, 2..6, false).unwrap();
    assert_eq!(engine.shared_writes(), 4);
    hold_mixed(&engine, other, 100, 2..6);
    fill_mixed(&engine, other, 200, 30..33, false).unwrap();
    fill_mixed(&engine, other, 300, 1..21, false).unwrap();
    assert_eq!(engine.shared_writes(), 4, "damaged blocks are not mapped");
    hold_mixed(&engine, other, 200, 30..33);
    hold_mixed(&engine, other, 300, 1..21);
}

#[test]
fn repetitions_within_a_batch_are_compared_with_one_read() {
    for through in [false, true] {
        let (_disk, engine, other) = packed(1);
        let before = used(&engine);
        // More than runs are read for a batch or a write, and not in their order in the pack.
        let values: Vec<u8> = (0..100).map(|at| [3, 9, 4, 30][at % 4]).collect();
        let head = engine.head(other);
        match through {
            true => engine.write_blocks(&head, 100, mixed(values.iter().copied())).unwrap(),
            false => {
                let blocks = (100..).zip(&values);
                blocks.for_each(|(at, value)| engine.write_blocks(&head, at, mixed(std::iter::once(*value))).unwrap());
                engine.settle(&head).unwrap();
            }
        }
        assert_eq!((used(&engine), engine.shared_writes()), (before, 100), "through {through}");
        (100..).zip(&values).for_each(|(at, value)| assert_eq!(holds(&engine, other, at).unwrap(), *value));
        assert!(watches_nothing(&engine));
        quiet(&engine);
        is_whole(&engine);
    }
}

#[test]
fn a_pack_gets_a_limited_number_of_references() {
    for through in [false, true] {
        let (_disk, engine, other) = packed(1);
        for round in 0..8 {
            let head = engine.head(other);
            engine.write_blocks(&head, 64 * round, mixed((0..64).map(|at| [3, 9][at % 2]))).unwrap();
            if through {
                quiet(&engine);
            } else {
                engine.settle(&head).unwrap();
            }
        }
        quiet(&engine);
        let (pack, _) = stored_at(&engine, 1, 0);
        assert!((200..=256).contains(&references(&engine, pack.start)), "{}", references(&engine, pack.start));
        (0..512).for_each(|at| assert_eq!(holds(&engine, other, at).unwrap(), [3, 9][at as usize % 2]));
        is_whole(&engine);
    }
}

#[test]
fn mapping_a_part_of_a_pack_changes_no_more_pages_than_it_was_admitted_for() {
    let (_disk, engine, other) = packed(3);
    changes_no_more_pages_than_admitted(&engine, other, |round, at| {
        let value = 1 + (round % 90) as u8;
        let values = value..value + 1 + (round % 5) as u8;
        engine.write_blocks(&engine.head(other), at, mixed(values)).unwrap();
    });
}

/// After a start, a pass makes hints for blocks in packs too.
#[test]
fn a_pass_makes_hints_for_packs() {
    let (disk, engine, other) = packed(1);
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    of_one_domain(&engine, other);
    // Both disks have another block in common.
    assert_eq!((share(&engine, &[1, other]), engine.shared_writes()), (1, 0));
    quiet(&engine);
    fill_mixed(&engine, other, 200, 1..33, false).unwrap();
    assert_eq!(engine.shared_writes(), 32);
    quiet(&engine);
    is_whole(&engine);
}

/// What the accounts say, and what a deletion then frees.
#[test]
fn the_accounts_are_exact_with_writes_mapped_to_packs() {
    let (_disk, engine, other) = packed(2);
    fill_mixed(&engine, other, 100, 1..33, false).unwrap();
    fill_mixed(&engine, other, 300, 5..15, true).unwrap();
    fill_mixed(&engine, 1, 512, 33..65, false).unwrap();
    quiet(&engine);
    assert_eq!(engine.shared_writes(), 74);
    for disk in [1, other] {
        let before = used(&engine);
        let freed = engine.would_free(&[disk], &|| true).unwrap().data;
        engine.delete_disk(disk, &[]).unwrap();
        while engine.drop_all_trash().unwrap() {}
        quiet(&engine);
        assert_eq!(before - used(&engine), freed, "disk {disk}");
        is_whole(&engine);
    }
    assert_eq!(used(&engine), 0);
}
