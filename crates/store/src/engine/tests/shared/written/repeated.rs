//! Content that is repeated within a batch of write-back or a long write.

use super::*;

/// Writes blocks with these contents, of which each is whole.
fn write_all(engine: &Engine, disk: u64, first: u64, blocks: &[Vec<u8>], through: bool) {
    let head = engine.head(disk);
    if through {
        return engine.write_blocks(&head, first, SharedSlice::copy_of(&blocks.concat())).unwrap();
    }
    for (at, block) in (first..).zip(blocks) {
        engine.write_blocks(&head, at, SharedSlice::copy_of(block)).unwrap();
    }
    engine.settle(&head).unwrap();
}

fn block_of(value: u8) -> Vec<u8> {
    vec![value; BLOCK_SIZE]
}

/// More repetitions than runs are read for a batch or for a write.
#[test]
fn all_repetitions_of_stored_blocks_are_found() {
    for through in [false, true] {
        let (_disk, engine, other) = stored(40);
        let before = used(&engine);
        // Single blocks, and a run that is repeated after its first blocks were.
        let mut values: Vec<u8> = (0..90).map(|at| [3, 7][at % 2]).collect();
        values.extend((0..3).flat_map(|_| 2..10));
        let blocks: Vec<Vec<u8>> = values.iter().map(|value| block_of(*value)).collect();
        write_all(&engine, other, 100, &blocks, through);
        assert_eq!((used(&engine), engine.shared_writes()), (before, 114), "through {through}");
        (100..).zip(&values).for_each(|(at, value)| assert_eq!(holds(&engine, other, at).unwrap(), *value));
        assert!(engine.meta.lock().in_flight.watches_nothing());
        quiet(&engine);
        is_whole(&engine);
    }
}

/// The second content has the checksum of the stored block, and repeats too.
#[test]
fn repetitions_of_other_content_with_the_same_checksum_are_written() {
    for through in [false, true] {
        let (_disk, engine, other) = stored(0);
        put(&engine, 1, 0, 9);
        engine.write_blocks(&engine.head(1), 1, SharedSlice::copy_of(&colliding(1))).unwrap();
        quiet(&engine);
        let words: Vec<u32> = (0..60).map(|at| 1 + at % 3).collect();
        let blocks: Vec<Vec<u8>> = words.iter().map(|word| colliding(*word).to_vec()).collect();
        write_all(&engine, other, 100, &blocks, through);
        assert_eq!(engine.shared_writes(), 20, "through {through}");
        assert!(engine.meta.lock().in_flight.watches_nothing());
        let head = engine.head(other);
        for (at, block) in (100..).zip(&blocks) {
            let found = engine.read_blocks("d", at..at + 1, &|range| engine.plan_head(&head, range)).unwrap();
            assert!(found[..] == block[..], "{at}");
        }
        drop(head);
        quiet(&engine);
        is_whole(&engine);
    }
}

/// One batch has more repetitions than the block may get references.
#[test]
fn the_newest_copy_is_mapped_when_an_older_one_has_all_references() {
    for through in [false, true] {
        let (_disk, engine, other) = stored(1);
        let before = used(&engine);
        for round in 0..8 {
            write_all(&engine, other, 100 * round, &vec![block_of(1); 100], through);
            quiet(&engine);
        }
        let references = |block: u64| super::super::super::packed::references(&engine, place(&engine, other, block));
        assert_eq!((0..800).map(references).max(), Some(256), "through {through}");
        // The rest of a batch is written, and one of its blocks is mapped from then on.
        assert!(used(&engine) - before < 150, "{} blocks, through {through}", used(&engine) - before);
        (0..800).for_each(|block| assert_eq!(holds(&engine, other, block).unwrap(), 1));
        is_whole(&engine);
    }
}
