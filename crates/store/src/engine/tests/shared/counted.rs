//! Blocks with more references than the table can count.

use super::*;
use crate::space::BlockEntry;

/// Gives a block this number of references, as if that many other leaf entries mapped it.
fn set_references(engine: &Engine, block: u64, references: u32) {
    let mut meta = engine.meta.lock();
    let Meta { data, pages, .. } = &mut *meta;
    data.repair_references(pages, block, references).unwrap();
}

/// Each write after a snapshot copies the leaf, which maps the block twice. The last copies pass the limit.
#[test]
fn copies_of_a_leaf_beyond_the_limit_of_references_stop_nothing() {
    const MAX: u32 = BlockEntry::REFERENCES_MAX;
    let (disk, engine) = filled([5, 5, 6]);
    assert_eq!(share(&engine, &[1]), 1);
    quiet(&engine);
    let shared = place(&engine, 1, 0);
    set_references(&engine, shared, MAX - 3);
    let mut snapshots = Vec::new();
    for (number, expected) in [MAX - 1, MAX, MAX].into_iter().enumerate() {
        snapshots.push(take(&engine, 1, &format!("s{number}")));
        write(&engine, 2, 10 + number as u8);
        engine.settle(&engine.head(1)).unwrap();
        assert_eq!(references(&engine, shared), expected, "copy {number}");
    }
    write(&engine, 0, 9);
    quiet(&engine);
    assert_ne!(place(&engine, 1, 0), shared, "a block whose owners are not known was overwritten");
    for (number, snapshot) in snapshots.into_iter().enumerate() {
        let value = if number == 0 { 6 } else { 9 + number as u8 };
        let found: Vec<u8> = (0..3).map(|block| holds(&engine, snapshot, block).unwrap()).collect();
        assert_eq!(found, [5, 5, value]);
        engine.delete_snapshot(snapshot).unwrap();
    }
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    let is_kept = |engine: &Engine, last: u8| {
        let found: Vec<u8> = (0..3).map(|block| value(engine, block).unwrap()).collect();
        assert_eq!(found, [9, last, 12]);
        assert_eq!(references(engine, shared), MAX);
    };
    is_kept(&engine, 5);
    // One leaf entry maps the block, so its count is no damage.
    is_whole(&engine);
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    let engine = open(&disk).unwrap();
    is_kept(&engine, 5);
    write(&engine, 1, 8);
    quiet(&engine);
    is_kept(&engine, 8);
    let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
    assert_eq!((report.findings.len(), report.leaked), (1, BLOCK_SIZE as u64), "{report:?}");
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    assert_eq!(used(&engine), 3);
    is_whole(&engine);
}

/// The other leaf entries are gone, so the block can be overwritten in place again.
#[test]
fn a_repair_counts_the_references_of_a_block_that_is_still_mapped() {
    let (_disk, engine) = filled([5, 6]);
    let block = place(&engine, 1, 0);
    set_references(&engine, block, BlockEntry::REFERENCES_MAX);
    is_whole(&engine);
    let report = engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    assert_eq!((report.findings.len(), report.leaked), (1, 0), "{report:?}");
    assert_eq!(references(&engine, block), 1);
    is_whole(&engine);
}
