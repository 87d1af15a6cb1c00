//! Receptions that continue after an interruption: while a hidden disk was being made, and with data in many places.
//! Disks of which a snapshot is sent.

#![allow(clippy::unwrap_used)]

use super::record::{RANGES_MAX, hidden_name, hidden_prefix};
use super::{NewArrival, NewReception, Opened, Reception, SEGMENT, SnapshotIdentity, new_identity};
use crate::migrate::MigrateOptions;
use crate::testbed::options;
use crate::{
    Datastore, DiskFormat, InitOptions, NewDisk, NoProgress, Provisioning, QueueChoice, SnapshotOptions, names,
};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, SharedSlice};
use error::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use store::EngineOptions;
use store::engine::NewSnapshot;

const CAPACITY: u64 = 1 << 20;

fn open(path: &Path) -> Arc<Datastore> {
    Datastore::open(path, options(QueueChoice::Threads)).unwrap()
}

/// An offer of the disk `web`.
fn offer(capacity: u64, bases: Vec<String>) -> NewReception {
    let disk = NewArrival {
        name: "web".into(),
        uuid: new_identity().unwrap(),
        capacity,
        provisioning: Provisioning::Thin,
        point: SnapshotIdentity { uuid: new_identity().unwrap(), name: "monday".into(), created: 1 },
        keep: true,
        bases,
        update: false,
    };
    NewReception { sender: "another".into(), disks: vec![disk], attachment: None, resume_only: false }
}

fn receive(datastore: &Datastore, new: &NewReception) -> Arc<Reception> {
    match datastore.receive(new).unwrap() {
        Opened::Open(reception) => reception,
        Opened::Already(disks) => panic!("there already: {disks:?}"),
    }
}

#[test]
fn a_reception_ends_if_its_clone_was_not_resized_yet() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let mut datastore = open(&path);
    datastore.create_disk("a", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    let base = datastore.native.snapshot_identity("a", "s").unwrap();
    let new = offer(2 * CAPACITY, vec![names::uuid_text(&base.uuid)]);
    for interrupted in [false, true] {
        let reception = receive(&datastore, &new);
        assert!(reception.progress()[0].base.is_some());
        let id = reception.id();
        drop(reception);
        if interrupted {
            // The state between the creation of the clone and its resizing.
            let hidden = datastore.native.hidden_id(&hidden_name(&id, 0)).unwrap();
            datastore.native.resize_by_id(hidden, CAPACITY, true).unwrap();
        }
        datastore.close().unwrap();
        drop(datastore);
        datastore = open(&path);
        assert_eq!(datastore.receptions().unwrap().is_empty(), interrupted);
        assert_eq!(datastore.native.hidden(&hidden_prefix(&id)).is_empty(), interrupted);
    }
    receive(&datastore, &new).commit(&[(0, 0)]).unwrap();
    assert_eq!(datastore.disk("web").unwrap().capacity, 2 * CAPACITY);
}

#[test]
fn an_interrupted_update_is_not_resumed_without_the_request_to_update() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&path);
    datastore.create_disk("web", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    datastore.create_snapshots(&[("web".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    let base = datastore.native.snapshot_identity("web", "s").unwrap();
    let mut new = offer(CAPACITY, vec![names::uuid_text(&base.uuid)]);
    new.disks[0].update = true;
    drop(receive(&datastore, &new));
    new.disks[0].update = false;
    let refused = datastore.receive(&new).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    new.disks[0].update = true;
    receive(&datastore, &new).commit(&[(0, 0)]).unwrap();
    assert_eq!(datastore.disk("web").unwrap().parent_snapshot.as_deref(), Some("monday"));
}

#[test]
fn the_names_of_a_reception_are_free_before_its_end_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&path);
    let new = offer(CAPACITY, Vec::new());
    let next = || loop {
        match datastore.receive(&new) {
            Ok(Opened::Open(reception)) => return reception,
            Err(error) if error.kind() == ErrorKind::Busy => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
            Ok(Opened::Already(disks)) => panic!("there already: {disks:?}"),
        }
    };
    let mut reception = next();
    for _ in 0..100 {
        // The next session begins while the thread of the last one still ends it.
        reception = std::thread::scope(|scope| {
            scope.spawn(move || drop(reception));
            next()
        });
    }
    // A machine that could not be completed: its disks are deleted again before the reception ends.
    reception.commit(&[(0, 0)]).unwrap();
    datastore.delete_disk("web", false).unwrap();
    drop(reception);
    datastore.create_disk("web", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
}

#[test]
fn a_disk_is_not_migrated_while_a_snapshot_of_it_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&path);
    datastore.create_disk("a", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    let options = MigrateOptions { format: DiskFormat::Native, provisioning: Provisioning::Thin, delta: None };
    let outgoing = datastore.outgoing("a", "s").unwrap();
    let refused = datastore.migrate("a", &options, &NoProgress).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    drop(outgoing);
    let migration = datastore.uses.alone("a", "migrated").unwrap();
    assert_eq!(datastore.outgoing("a", "s").err().map(|error| error.kind()), Some(ErrorKind::Busy));
    drop(migration);
    drop(datastore.outgoing("a", "s").unwrap());
}

#[test]
fn a_disk_with_data_in_more_places_than_a_record_lists_is_received() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&path);
    // Every other segment has data.
    let count = RANGES_MAX as u64 + 20;
    let new = offer(2 * count * SEGMENT, Vec::new());
    let content = |number: u64| vec![(number % 251) as u8 + 1; BLOCK_SIZE];
    let send = |reception: &Reception, number: u64| {
        reception.write(0, 2 * number * SEGMENT, &content(number), None).unwrap();
        reception.finish_segment(0, 2 * number, BLOCK_SIZE as u64)
    };
    let reception = receive(&datastore, &new);
    (0..count).for_each(|number| send(&reception, number).unwrap());
    for listed in [0, count - 1] {
        assert_eq!(send(&reception, listed).unwrap_err().kind(), ErrorKind::Invalid, "segment {listed} twice");
    }
    reception.save().unwrap();
    drop(reception);
    // Segments that the record does not list are sent again.
    let reception = receive(&datastore, &new);
    let known = reception.progress();
    assert_eq!((known[0].done.len(), known[0].bytes), (RANGES_MAX, (RANGES_MAX * BLOCK_SIZE) as u64));
    (RANGES_MAX as u64..count).for_each(|number| send(&reception, number).unwrap());
    reception.commit(&[(count, count * BLOCK_SIZE as u64)]).unwrap();
    drop(reception);
    let device = datastore.device("web", true).unwrap();
    for number in 0..count {
        assert!(device.read(2 * number * SEGMENT, BLOCK_SIZE).unwrap() == content(number), "segment {}", 2 * number);
    }
}

/// A disk `a` of which the block 0 was flushed with 1s. Then 2s were written to it and not flushed, and the snapshot
/// `s` was taken.
fn with_an_unflushed_write(medium: &SimulatedDisk) -> Arc<Datastore> {
    Datastore::init_in(medium.directory(), InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open_in(medium);
    datastore.create_disk("a", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    let device = datastore.device("a", false).unwrap();
    device.write(0, SharedSlice::copy_of(&[1; BLOCK_SIZE]), true).unwrap();
    device.write(0, SharedSlice::copy_of(&[2; BLOCK_SIZE]), false).unwrap();
    datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    datastore
}

fn open_in(medium: &SimulatedDisk) -> Arc<Datastore> {
    Datastore::open_in(medium.directory(), EngineOptions { threads: false, ..EngineOptions::default() }).unwrap()
}

#[test]
fn what_was_sent_is_in_the_snapshot_after_a_power_cut() {
    let medium = SimulatedDisk::new(1, SimulatedOptions::default());
    let datastore = with_an_unflushed_write(&medium);
    let outgoing = datastore.outgoing("a", "s").unwrap();
    let medium = medium.crash();
    drop((outgoing, datastore));
    let datastore = open_in(&medium);
    let device = datastore.device("a@s", true).unwrap();
    assert!(device.read(0, BLOCK_SIZE).unwrap() == [2_u8; BLOCK_SIZE]);
}

#[test]
fn a_received_snapshot_is_not_mistaken_for_one_that_its_base_has_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    for restarts in [false, true] {
        let mut datastore = open(&path);
        datastore.create_disk("a", &NewDisk::native(SEGMENT, Provisioning::Thin), &NoProgress).unwrap();
        datastore.create_snapshots(&[("a".into(), "monday".into())], &SnapshotOptions::default()).unwrap();
        let base = datastore.native.snapshot_identity("a", "monday").unwrap().uuid;
        let new = offer(SEGMENT, vec![names::uuid_text(&base)]);
        let mut reception = receive(&datastore, &new);
        assert!(reception.progress()[0].base.is_some());
        reception.write(0, 0, &[7; BLOCK_SIZE], None).unwrap();
        reception.finish_segment(0, 0, BLOCK_SIZE as u64).unwrap();
        reception.save().unwrap();
        // Only the hidden disk needs the snapshot.
        datastore.delete_disk("a", true).unwrap();
        if restarts {
            drop(reception);
            datastore.close().unwrap();
            drop(datastore);
            datastore = open(&path);
            reception = receive(&datastore, &new);
        }
        reception.commit(&[(1, BLOCK_SIZE as u64)]).unwrap();
        let point = names::parse_uuid(&new.disks[0].point.uuid).unwrap();
        for (snapshot, uuid, byte) in [("monday", point, 7), ("monday-2", base, 0)] {
            assert_eq!(datastore.native.snapshot_identity("web", snapshot).unwrap().uuid, uuid, "{snapshot}");
            let device = datastore.device(&format!("web@{snapshot}"), true).unwrap();
            assert!(device.read(0, BLOCK_SIZE).unwrap() == [byte; BLOCK_SIZE], "{snapshot}");
        }
        drop(reception);
        datastore.delete_disk("web", false).unwrap();
    }
}

#[test]
fn a_disk_equals_the_snapshot_that_an_interrupted_attempt_has_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&path);
    let native = &datastore.native;
    let new = offer(SEGMENT, Vec::new());
    let send = |reception: &Reception| {
        reception.write(0, 0, &[7; BLOCK_SIZE], None).unwrap();
        reception.finish_segment(0, 0, BLOCK_SIZE as u64).unwrap();
    };
    let reception = receive(&datastore, &new);
    send(&reception);
    // The first attempt ends before the disk becomes visible, and before its record lists the segment.
    let disk = native.hidden_id(&hidden_name(&reception.id(), 0)).unwrap();
    native.commit_hidden(disk).unwrap();
    let point = &new.disks[0].point;
    let uuid = names::parse_uuid(&point.uuid).unwrap();
    native.engine.snapshot(&[NewSnapshot { disk, name: point.name.clone(), uuid, incomplete: false }]).unwrap();
    drop(reception);
    let reception = receive(&datastore, &new);
    assert!(reception.progress()[0].done.is_empty());
    send(&reception);
    reception.commit(&[(1, BLOCK_SIZE as u64)]).unwrap();
    // Otherwise the next transfer could not update the disk.
    let base = native.unchanged_base(&native.visible("web").unwrap()).unwrap();
    assert_eq!(base.uuid, uuid);
    let device = datastore.device("web", true).unwrap();
    assert!(device.read(0, BLOCK_SIZE).unwrap() == [7_u8; BLOCK_SIZE]);
}

#[test]
fn a_record_that_a_crash_has_left_behind_its_disks_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let mut datastore = open(&path);
    let first = offer(CAPACITY, Vec::new());
    let mut second = offer(CAPACITY, vec![first.disks[0].point.uuid.clone()]);
    second.disks[0].point.name = "tuesday".into();
    second.disks[0].update = true;
    for new in [first, second] {
        let reception = receive(&datastore, &new);
        let record = path.join(format!("reception-{}", reception.id()));
        reception.commit(&[(0, 0)]).unwrap();
        // A crash leaves the record that is there now.
        let left = std::fs::read(&record).unwrap();
        assert_eq!(datastore.receive(&new).err().map(|error| error.kind()), Some(ErrorKind::Busy));
        assert_eq!(datastore.arrived_already(&new).err().map(|error| error.kind()), Some(ErrorKind::Busy));
        reception.complete().unwrap();
        assert!(!record.exists() && datastore.arrived_already(&new).unwrap().is_some());
        drop(reception);
        datastore.close().unwrap();
        drop(datastore);
        std::fs::write(&record, left).unwrap();
        datastore = open(&path);
        assert!(!record.exists() && datastore.receptions().unwrap().is_empty());
        assert_eq!(datastore.disk("web").unwrap().parent_snapshot, Some(new.disks[0].point.name.clone()));
        assert!(matches!(datastore.receive(&new).unwrap(), Opened::Already(_)));
    }
}
