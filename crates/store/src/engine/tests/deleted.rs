//! Requests with the id of a disk or snapshot that was deleted meanwhile, and whose tree is being dropped.

use super::*;

/// A store with a snapshot of disk 1 that is deleted and not dropped.
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
