//! Deleted disks and snapshots: requests with the id of one whose tree is being dropped, and a tree that cannot be read
//! for a short time.

use super::between::lose_page;
use super::unreadable::grown;
use super::*;

/// A store in which a snapshot of disk 1 is deleted and not dropped.
fn with_a_deleted_snapshot() -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine) = with_a_block(256);
    let snapshot = take(&engine, 1, "s");
    write(&engine, 0, 2);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.delete_snapshot(snapshot).unwrap();
    assert_eq!(engine.with_catalog(|catalog| catalog.first_trash()), Some(snapshot));
    (disk, engine, snapshot)
}

#[test]
fn a_deleted_snapshot_is_neither_cloned_nor_the_target_of_a_revert() {
    let (_disk, engine, snapshot) = with_a_deleted_snapshot();
    let cloned = engine.clone_snapshot(snapshot, &[new_disk("clone", BLOCKS)]).map(drop);
    for outcome in [cloned, engine.revert(1, snapshot)] {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_eq!(value(&engine, 0).unwrap(), 2);
    is_whole(&engine);
}

#[test]
fn deleting_what_is_deleted_already_does_not_stop_the_store() {
    let (_disk, engine, snapshot) = with_a_deleted_snapshot();
    engine.delete_snapshot(snapshot).unwrap();
    engine.delete_disk(1, &[]).unwrap();
    engine.delete_disk(1, &[]).unwrap();
    while engine.drop_all_trash().unwrap() {}
    for outcome in [engine.delete_snapshot(snapshot), engine.delete_disk(1, &[])] {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_eq!((engine.failure(), engine.counts().data.used), (None, 0));
    is_whole(&engine);
}

#[test]
fn a_deleted_disk_that_could_not_be_read_for_a_short_time_is_freed_later() {
    let disk = grown();
    let engine = open(&disk).unwrap();
    let root = engine.with_catalog(|catalog| catalog.get(1).unwrap().root.unwrap());
    let used = engine.counts().data.used;
    let mend = lose_page(&disk, "map", root.0);
    engine.delete_disk(1, &[]).unwrap();
    for _ in 0..100 {
        engine.pump().unwrap();
    }
    assert_eq!(engine.counts().data.used, used);
    // Maintenance reads unreadable trees again from time to time, without the metadata lock, because a failing medium
    // may take seconds for each read.
    let locked = engine.meta.lock().pages.statistics().locked;
    engine.load_unreadable();
    engine.pump().unwrap();
    assert_eq!((engine.counts().data.used, engine.meta.lock().pages.statistics().locked), (used, locked));
    mend();
    engine.load_unreadable();
    for _ in 0..100 {
        engine.pump().unwrap();
    }
    assert_eq!(engine.counts().data.used, 0);
    engine.close().unwrap();
    drop(engine);
    is_whole(&open(&disk).unwrap());
}
