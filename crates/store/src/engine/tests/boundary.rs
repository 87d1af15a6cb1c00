//! Data that goes on from one data file into the next: it is read, overwritten, zeroed, packed and returned in the file
//! that has it.

use super::packed::{pack, place, quiet};
use super::*;
use crate::FILE_BLOCKS;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of blocks before and after the boundary.
const SIDE: u64 = 8;

/// A store with a disk whose blocks lie at the end of the first data file and at the beginning of the second.
fn across() -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = made();
    drop(engine.claim_blocks(FILE_BLOCKS + 256).unwrap());
    engine.meta.lock().data.search_from(FILE_BLOCKS - SIDE);
    for first in [0, SIDE] {
        engine.write_blocks(&engine.head(1), first, slice(1, SIDE as usize)).unwrap();
        engine.settle(&engine.head(1)).unwrap();
    }
    quiet(&engine);
    assert_eq!(place(&engine, 1, 0).0.start, FILE_BLOCKS - SIDE);
    assert_eq!(place(&engine, 1, SIDE).0.start, FILE_BLOCKS);
    (disk, engine)
}

/// Reads all blocks with one request, and each block with its own.
fn values(engine: &Engine) -> Vec<u8> {
    let (head, plans) = (engine.head(1), AtomicU32::new(0));
    let all = engine.read_blocks("vm", 0..2 * SIDE, &|range| {
        assert!(plans.fetch_add(1, Ordering::Relaxed) < 20, "the read does not end");
        engine.plan_head(&head, range)
    });
    let all: Vec<u8> = all.unwrap().chunks(BLOCK_SIZE).map(|block| block[0]).collect();
    let each: Vec<u8> = (0..2 * SIDE).map(|block| value(engine, block).unwrap()).collect();
    assert_eq!(all, each);
    each
}

#[test]
fn blocks_of_two_data_files_are_read_and_overwritten_in_place() {
    let (disk, engine) = across();
    assert_eq!(values(&engine), [1; 2 * SIDE as usize]);
    engine.write_blocks(&engine.head(1), SIDE - 2, slice(2, 4)).unwrap();
    engine.settle(&engine.head(1)).unwrap();
    assert_eq!(place(&engine, 1, SIDE).0.start, FILE_BLOCKS, "the block was overwritten in place");
    let expected: Vec<u8> =
        (0..2 * SIDE).map(|block| if (SIDE - 2..SIDE + 2).contains(&block) { 2 } else { 1 }).collect();
    assert_eq!(values(&engine), expected);
    // Overwrites that go through the journal are written to both files by the checkpoint.
    engine.write_blocks(&engine.head(1), SIDE - 1, slice(3, 2)).unwrap();
    engine.flush().unwrap();
    quiet(&engine);
    drop(engine);
    let engine = open(&disk).unwrap();
    let expected: Vec<u8> =
        expected.iter().zip(0..).map(|(old, at)| if at == SIDE - 1 || at == SIDE { 3 } else { *old }).collect();
    assert_eq!(values(&engine), expected);
    is_whole(&engine);
}

#[test]
fn blocks_of_two_data_files_are_zeroed_packed_and_returned() {
    let (disk, engine) = across();
    let snapshot = take(&engine, 1, "s");
    assert_eq!(pack(&engine, 1, 0..2 * SIDE).0, 2 * SIDE);
    quiet(&engine);
    assert_eq!(values(&engine), [1; 2 * SIDE as usize]);
    engine.delete_snapshot(snapshot).unwrap();
    let (disk2, engine2) = across();
    engine2.zero_blocks(&engine2.head(1), SIDE - 2..SIDE + 2).unwrap();
    quiet(&engine2);
    let zeroed: Vec<u8> = (0..2 * SIDE).map(|block| u8::from(!(SIDE - 2..SIDE + 2).contains(&block))).collect();
    assert_eq!(values(&engine2), zeroed);
    engine2.discard_blocks(&engine2.head(1), 0..2 * SIDE).unwrap();
    quiet(&engine2);
    assert_eq!(values(&engine2), [0; 2 * SIDE as usize]);
    for (disk, engine) in [(disk, engine), (disk2, engine2)] {
        is_whole(&engine);
        drop(engine);
        is_whole(&open(&disk).unwrap());
    }
}
