//! Snapshot groups in the states that a power cut at each step leaves.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::{
    Datastore, DiskFormat, InitOptions, NewDisk, NoProgress, OpenOptions, Provisioning, QueueChoice, SnapshotOptions,
};
use std::path::Path;

fn group() -> Group {
    Group {
        id: "0f0e0d0c-0b0a-4908-8706-050403020100".into(),
        taking_back: false,
        native: vec!["0f0e0d0c-0b0a-4908-8706-050403020101".into()],
        images: vec![ImageSnapshot { folder: "größe".into(), snapshot: "monday".into(), uid: 4 }],
    }
}

#[test]
fn the_page_about_the_format_shows_this_file() {
    let page = include_str!("../../../../docs/format/snapshot-group.md");
    let example = String::from_utf8(KIND.encode(&group()).unwrap()).unwrap();
    assert!(page.contains(&example), "docs/format/snapshot-group.md should show:\n{example}");
}

#[test]
fn damage_is_found() {
    let name = file_name(&group().id).unwrap();
    let good = KIND.encode(&group()).unwrap();
    assert_eq!(decode(&good, &name).unwrap(), group());
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x04;
        assert!(decode(&bad, &name).is_err(), "byte {at}");
    }
    assert!(decode(&good, "snapshot-group-0f0e0d0c-0b0a-4908-8706-050403020199").is_err());
    assert!(file_name("../../etc/passwd").is_err());
}

const SIZE: u64 = 1 << 20;

fn open(path: &Path) -> Arc<Datastore> {
    let options = OpenOptions {
        mode: backend::IoMode::Buffered,
        queue: QueueChoice::Threads,
        metadata_cache: 4 << 20,
        write_buffer: 1 << 20,
    };
    Datastore::open(path, options).unwrap()
}

/// A datastore with the native disk `n` and the VMDK disks `a` and `b`, all filled with ones.
fn made() -> (tempfile::TempDir, Arc<Datastore>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&path);
    datastore.create_disk("n", &NewDisk::native(SIZE, Provisioning::Thin), &NoProgress).unwrap();
    for name in ["a", "b"] {
        let new = NewDisk { format: DiskFormat::Vmdk, ..NewDisk::native(SIZE, Provisioning::Thin) };
        datastore.create_disk(name, &new, &NoProgress).unwrap();
    }
    ["n", "a", "b"].iter().for_each(|name| write(&datastore, name, 1));
    (folder, datastore)
}

fn write(datastore: &Datastore, disk: &str, value: u8) {
    let device = datastore.device(disk, false).unwrap();
    device.write(0, backend::SharedSlice::copy_of(&[value; 4096]), true).unwrap();
}

fn value(datastore: &Datastore, name: &str) -> u8 {
    datastore.device(name, true).unwrap().read(0, 4096).unwrap()[0]
}

fn take(datastore: &Datastore, disks: &[&str], name: &str) {
    let of: Vec<_> = disks.iter().map(|disk| ((*disk).to_owned(), name.to_owned())).collect();
    datastore.create_snapshots(&of, &SnapshotOptions::default()).unwrap();
}

fn snapshots(datastore: &Datastore) -> Vec<String> {
    let mut names: Vec<_> =
        datastore.snapshots(None).unwrap().into_iter().map(|found| format!("{}@{}", found.disk, found.name)).collect();
    names.sort();
    names
}

/// Writes the record of a group with these snapshots, as a power cut leaves it.
fn broken_off(datastore: &Datastore, native: &[[u8; 16]], images: &[(&str, u32)]) {
    let images = images.iter().map(|(folder, uid)| ImageSnapshot {
        folder: (*folder).to_owned(),
        snapshot: "group".into(),
        uid: *uid,
    });
    UnderWay::new(datastore.directory(), native, images.collect()).unwrap().begin().unwrap();
}

fn records(path: &Path) -> usize {
    std::fs::read_dir(path)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(PREFIX))
        .count()
}

fn native_snapshot(datastore: &Datastore, name: &str) -> [u8; 16] {
    datastore.native.engine.with_catalog(|catalog| {
        catalog.objects().find(|object| object.is_snapshot() && object.name == name).unwrap().uuid
    })
}

#[test]
fn a_group_leaves_no_record_behind() {
    let (folder, datastore) = made();
    take(&datastore, &["n", "a", "b"], "group");
    assert_eq!(snapshots(&datastore), ["a@group", "b@group", "n@group"]);
    // Disk `a` has a snapshot with that name already, so the whole group is refused.
    take(&datastore, &["a"], "second");
    let of = ["n", "a", "b"].map(|disk| (disk.to_owned(), "second".to_owned()));
    let refused = datastore.create_snapshots(&of, &SnapshotOptions::default()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists);
    assert_eq!(snapshots(&datastore), ["a@group", "a@second", "b@group", "n@group"]);
    assert_eq!(records(&folder.path().join("store")), 0);
    datastore.close().unwrap();
}

#[test]
fn what_a_power_cut_leaves_of_a_group_before_its_point_is_taken_back() {
    // Before the point, the records of none, one or both VMDK disks have the snapshot, and no native snapshot exists.
    for having in [&[][..], &["a"], &["a", "b"]] {
        let (folder, datastore) = made();
        let path = folder.path().join("store");
        take(&datastore, &["a", "b"], "before");
        broken_off(&datastore, &[[9; 16]], &[("a", 2), ("b", 2)]);
        having.iter().for_each(|disk| take(&datastore, &[disk], "group"));
        datastore.close().unwrap();
        drop(datastore);
        let datastore = open(&path);
        assert_eq!(snapshots(&datastore), ["a@before", "b@before"], "{having:?}");
        assert_eq!((["n", "a", "b"].map(|name| value(&datastore, name)), records(&path)), ([1; 3], 0));
        write(&datastore, "a", 2);
        assert_eq!((value(&datastore, "a"), value(&datastore, "a@before")), (2, 1));
        datastore.close().unwrap();
    }
}

#[test]
fn what_a_power_cut_leaves_of_a_group_after_its_point_stays() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    take(&datastore, &["n", "a", "b"], "group");
    broken_off(&datastore, &[native_snapshot(&datastore, "group")], &[("a", 1), ("b", 1)]);
    ["n", "a", "b"].iter().for_each(|name| write(&datastore, name, 3));
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    assert_eq!(snapshots(&datastore), ["a@group", "b@group", "n@group"]);
    assert_eq!(["n", "a", "b", "n@group", "a@group"].map(|name| value(&datastore, name)), [3, 3, 3, 1, 1]);
    assert_eq!(records(&path), 0);
    datastore.close().unwrap();
}

#[test]
fn a_group_of_images_alone_is_whole_or_taken_back_too() {
    for (having, left) in [(&["a"][..], &[][..]), (&["a", "b"], &["a@group", "b@group"])] {
        let (folder, datastore) = made();
        broken_off(&datastore, &[], &[("a", 1), ("b", 1)]);
        having.iter().for_each(|disk| take(&datastore, &[disk], "group"));
        datastore.close().unwrap();
        drop(datastore);
        let datastore = open(&folder.path().join("store"));
        assert_eq!(snapshots(&datastore), left);
        datastore.close().unwrap();
    }
}

#[test]
fn a_snapshot_of_that_name_from_before_the_group_is_none_of_it() {
    let (folder, datastore) = made();
    take(&datastore, &["a"], "group");
    broken_off(&datastore, &[[9; 16]], &[("a", 2), ("b", 1)]);
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&folder.path().join("store"));
    assert_eq!(snapshots(&datastore), ["a@group"]);
    datastore.close().unwrap();
}

#[test]
fn a_group_is_decided_once() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    take(&datastore, &["n", "a", "b"], "group");
    broken_off(&datastore, &[native_snapshot(&datastore, "group")], &[("a", 1), ("b", 1)]);
    datastore.close().unwrap();
    drop(datastore);
    // One of the disks cannot be opened; the group counts as complete nevertheless.
    let (images, away) = (path.join("images/a"), folder.path().join("away"));
    std::fs::rename(&images, &away).unwrap();
    let datastore = open(&path);
    assert_eq!((snapshots(&datastore), records(&path)), (vec!["b@group".to_owned(), "n@group".into()], 0));
    datastore.delete_snapshot("n", "group", None, &NoProgress).unwrap();
    datastore.close().unwrap();
    drop(datastore);
    std::fs::rename(&away, &images).unwrap();
    let datastore = open(&path);
    assert_eq!(snapshots(&datastore), ["a@group", "b@group"]);
    datastore.close().unwrap();
}

#[test]
fn what_cannot_be_taken_back_now_is_at_a_later_opening() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    broken_off(&datastore, &[[9; 16]], &[("a", 1), ("b", 1)]);
    take(&datastore, &["a"], "group");
    take(&datastore, &["b"], "group");
    datastore.close().unwrap();
    drop(datastore);
    let (images, away) = (path.join("images/a"), folder.path().join("away"));
    std::fs::rename(&images, &away).unwrap();
    let datastore = open(&path);
    assert_eq!((snapshots(&datastore), records(&path)), (vec![], 1));
    // A snapshot with the same name that is taken later does not belong to the group.
    take(&datastore, &["b"], "group");
    datastore.close().unwrap();
    drop(datastore);
    std::fs::rename(&away, &images).unwrap();
    let datastore = open(&path);
    assert_eq!((snapshots(&datastore), records(&path)), (vec!["b@group".to_owned()], 0));
    datastore.close().unwrap();
}
