//! Equal blocks in leaves that a snapshot shares, and that have no room for an entry for each block.

use super::*;

/// Runs of equal blocks, and the logical blocks from the beginning of one to that of the next.
const RUNS: u64 = 200;
const BLOCKS_OF_RUN: u64 = 16;
const STRIDE: u64 = BLOCKS_OF_RUN + 1;

/// The logical blocks of the runs.
fn crowded() -> impl Iterator<Item = u64> {
    (0..RUNS).flat_map(|run| run * STRIDE..run * STRIDE + BLOCKS_OF_RUN)
}

/// A disk with runs of equal blocks, and a snapshot of it.
fn filled_runs(of_run: impl Fn(u64) -> u8) -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine) = made();
    for run in 0..RUNS {
        let content = super::super::packed::mixed((0..BLOCKS_OF_RUN).map(|_| of_run(run)));
        engine.write_blocks(&engine.head(1), run * STRIDE, content).unwrap();
    }
    quiet(&engine);
    let snapshot = take(&engine, 1, "s");
    (disk, engine, snapshot)
}

fn is_kept(engine: &Engine, snapshot: u64, of_run: impl Fn(u64) -> u8) {
    for object in [1, snapshot] {
        crowded().for_each(|block| assert_eq!(holds(engine, object, block).unwrap(), of_run(block / STRIDE)));
    }
    is_whole(engine);
}

/// As many blocks as a run has, and those that got entries of their own, because there was room for them.
#[test]
fn equal_blocks_in_shared_leaves_without_room_replace_each_other_in_runs() {
    for of_run in [|_| 7u8, |run: u64| 1 + (run % 3) as u8] {
        let contents = if of_run(0) == of_run(1) { 1 } else { 3 };
        let (disk, engine, snapshot) = filled_runs(of_run);
        assert_eq!(used(&engine), RUNS * BLOCKS_OF_RUN);
        let (shared, freed) = share_and_free(&engine, &[1, snapshot], PRINTS_MAX);
        quiet(&engine);
        let now = used(&engine);
        assert!(now < contents * 4 * BLOCKS_OF_RUN, "{now} blocks of {contents} contents");
        assert_eq!(freed, RUNS * BLOCKS_OF_RUN - now);
        assert!(shared >= freed);
        is_kept(&engine, snapshot, of_run);
        share(&engine, &[1, snapshot]);
        quiet(&engine);
        assert!(used(&engine) <= now);
        engine.close().unwrap();
        is_kept(&open(&disk).unwrap(), snapshot, of_run);
    }
}

/// Whole packs replace each other, so they become free.
#[test]
fn packs_of_equal_blocks_in_shared_leaves_become_free() {
    let (disk, engine, snapshot) = filled_runs(|_| 7);
    pack(&engine, 1, 0..BLOCKS);
    quiet(&engine);
    let packed = used(&engine);
    assert!(packed > RUNS * BLOCKS_OF_RUN / 2, "{packed}");
    let mut all_freed = 0;
    for _ in 0..8 {
        let (shared, freed) = share_and_free(&engine, &[1, snapshot], PRINTS_MAX);
        quiet(&engine);
        all_freed += freed;
        assert_eq!(used(&engine) + all_freed, packed, "what was freed, of {shared} blocks that moved");
    }
    assert!(used(&engine) < packed / 20, "{} of {packed}", used(&engine));
    is_kept(&engine, snapshot, |_| 7);
    engine.close().unwrap();
    is_kept(&open(&disk).unwrap(), snapshot, |_| 7);
}
