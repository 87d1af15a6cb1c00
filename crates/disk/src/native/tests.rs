//! Snapshots on which linked clones are based: handed over when their disk is deleted, or temporary. The capacity of
//! devices that are opened while a disk is resized or reverted. The reservation of a thick disk that shrinks.

#![allow(clippy::unwrap_used)]

use crate::testbed::options;
use crate::{
    CheckOptions, Datastore, InitOptions, NewDisk, NoProgress, Point, Provisioning, QueueChoice, SnapshotOptions,
};
use error::ErrorKind;
use std::sync::Arc;

const CAPACITY: u64 = 1 << 20;

/// The disk `a` with the snapshot `s`, and the linked clone `c` of it.
fn cloned() -> (tempfile::TempDir, Arc<Datastore>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    datastore.create_disk("a", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    datastore.clone_linked("a", &Point::Snapshot("s".into()), &["c".into()], &NoProgress).unwrap();
    (folder, datastore)
}

/// Checks that `c` got the snapshot `s` of the deleted disk `a`, and that no record refers to a missing object.
fn assert_handed_over(datastore: &Datastore) {
    assert_eq!(datastore.disk("a").unwrap_err().kind(), ErrorKind::NotFound);
    let clone = datastore.disk("c").unwrap();
    assert_eq!((clone.snapshots, clone.parent_snapshot.as_deref(), clone.origin), (1, Some("s"), None));
    let report = datastore.check(CheckOptions { data: false, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn a_clone_that_is_being_received_gets_no_snapshots() {
    let (_folder, datastore) = cloned();
    let native = &datastore.native;
    let base = native.find_snapshot(&native.find_disk("a").unwrap(), "s").unwrap();
    let hidden = ".receiving-0f0e0d0c-0b0a-4908-8706-050403020100-0";
    native.make_hidden(hidden, CAPACITY, Provisioning::Thin, Some(&base)).unwrap();
    datastore.delete_disk("a", true).unwrap();
    // The reception is given up.
    native.remove_hidden(hidden).unwrap();
    assert_handed_over(&datastore);
}

#[test]
fn a_clone_that_is_being_migrated_gets_no_snapshots() {
    let (_folder, datastore) = cloned();
    let migration = datastore.uses.alone("c", "migrated").unwrap();
    let refused = datastore.delete_disk("a", true).unwrap_err();
    assert!(refused.kind() == ErrorKind::Busy && refused.to_string().contains("'c'"), "{refused}");
    assert_eq!(datastore.disk("a").unwrap().snapshots, 1);
    drop(migration);
    datastore.delete_disk("a", true).unwrap();
    assert_handed_over(&datastore);
}

#[test]
fn no_clone_is_based_on_a_temporary_snapshot() {
    let (_folder, datastore) = cloned();
    // Two conversions at a time read the disk through snapshots with different names.
    let sources = [(); 2].map(|()| datastore.native.conversion_source("a", None).unwrap());
    for name in ["converting", "converting-2"] {
        let point = Point::Snapshot(name.into());
        let refused = datastore.clone_linked("a", &point, &["d".into()], &NoProgress).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound, "{refused}");
    }
    drop(sources);
    assert_eq!(datastore.disk("a").unwrap().snapshots, 1);
    let report = datastore.check(CheckOptions { data: false, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn a_device_has_the_capacity_of_its_disk_after_a_resize_and_after_a_revert() {
    let (_folder, datastore) = cloned();
    let disk = datastore.native.find_disk("a").unwrap();
    datastore.resize_disk("a", 2 * CAPACITY, false).unwrap();
    // A count of space has read the record before the resize, and opens the disk after it.
    let counted = datastore.native.device_of(&disk, &disk);
    assert_eq!(counted.capacity(), 2 * CAPACITY);
    datastore.revert("a", "s").unwrap();
    assert_eq!(datastore.device("a", false).unwrap().capacity(), CAPACITY);
    drop(counted);
}

#[test]
fn a_thick_disk_that_shrinks_returns_a_part_of_its_reservation() {
    let (_folder, datastore) = cloned();
    datastore.create_disk("t", &NewDisk::native(CAPACITY, Provisioning::ZeroedThick), &NoProgress).unwrap();
    datastore.create_snapshots(&[("t".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    let reserved = || datastore.native.find_disk("t").unwrap().reserved * backend::BLOCK_SIZE as u64;
    assert_eq!(reserved(), CAPACITY);
    datastore.resize_disk("t", CAPACITY / 4, true).unwrap();
    assert_eq!(reserved(), CAPACITY / 4);
}
