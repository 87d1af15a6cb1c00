//! Packing where the free blocks are scattered: a pack needs adjacent blocks.

use super::*;

/// Allocates all free blocks, and releases every second one. Returns the others.
fn scatter(engine: &Engine) -> Vec<Run> {
    let mut meta = engine.meta.lock();
    let Meta { data, pages, .. } = &mut *meta;
    let runs: Vec<Run> = std::iter::from_fn(|| data.allocate(pages, 1).unwrap()).collect();
    let (even, odd): (Vec<Run>, Vec<Run>) = runs.into_iter().partition(|run| run.start % 2 == 0);
    odd.into_iter().for_each(|run| data.release(run));
    assert_eq!(data.allocate_whole(pages, 2).unwrap(), None);
    engine.update_headroom(&meta);
    even
}

#[test]
fn packs_are_written_although_no_free_blocks_are_adjacent() {
    let (_disk, engine) = made();
    engine.write_blocks(&engine.head(1), 0, mixed((0..64).map(|block| block as u8))).unwrap();
    quiet(&engine);
    let kept = scatter(&engine);
    assert_eq!(pack(&engine, 1, 0..64).0, 64);
    (0..64).for_each(|block| assert_eq!(holds(&engine, 1, block).unwrap(), block as u8));
    kept.into_iter().for_each(|run| engine.meta.lock().data.release(run));
    quiet(&engine);
    is_whole(&engine);
}
