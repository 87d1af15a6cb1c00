//! Snapshot groups, in the states that a power cut at each step leaves.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::migrate::MigrateOptions;
use crate::testbed::options;
use crate::{Datastore, DiskFormat, InitOptions, NewDisk, NoProgress, Provisioning, QueueChoice, SnapshotOptions};
use backend::local::{LocalDirectory, LocalQueues};
use backend::{Directory, File, IoMode, LocalFolder};
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use store::Engine;
use store::engine::EngineOptions;

fn group() -> Group {
    Group {
        id: "0f0e0d0c-0b0a-4908-8706-050403020100".into(),
        taking_back: false,
        native: vec!["0f0e0d0c-0b0a-4908-8706-050403020101".into()],
        images: vec![ImageSnapshot {
            disk: "0f0e0d0c-0b0a-4908-8706-050403020102".into(),
            folder: "größe".into(),
            snapshot: "monday".into(),
            uid: 4,
        }],
    }
}

#[test]
fn the_format_page_shows_the_encoded_record() {
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

#[test]
fn a_damaged_record_keeps_nothing_shut() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    take(&datastore, &["n"], "s");
    // If the record were not damaged, recovery would delete the native snapshot, because the other snapshot was not
    // taken.
    broken_off(&datastore, &[native_snapshot(&datastore, "s")], &[("a", 1)]);
    drop(datastore);
    let mut files = std::fs::read_dir(&path).unwrap().flatten().map(|entry| entry.path());
    let record = files.find(|path| path.to_string_lossy().contains(PREFIX)).unwrap();
    let good = std::fs::read(&record).unwrap();
    let mut bad = good.clone();
    bad[80] ^= 1;
    bad[90] ^= 1;
    std::fs::write(&record, &bad).unwrap();
    let datastore = open(&path);
    assert_eq!(snapshots(&datastore), ["n@s"]);
    let check = |repair| {
        let options = crate::CheckOptions { data: false, repair };
        datastore.check(options, &NoProgress).unwrap().findings
    };
    let found = check(false);
    assert!(found.len() == 1 && found[0].problem.contains("is damaged") && found[0].repaired.is_none(), "{found:?}");
    assert!(check(true)[0].repaired.is_some());
    assert_eq!(check(false), []);
    assert_eq!((records(&path), snapshots(&datastore)), (0, vec!["n@s".to_owned()]));
}

#[test]
fn one_damaged_byte_of_a_record_is_mended() {
    let (folder, datastore) = made();
    let name = file_name(&group().id).unwrap();
    let good = KIND.encode(&group()).unwrap();
    for at in [0, 30, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        std::fs::write(folder.path().join("store").join(&name), &bad).unwrap();
        assert_eq!(read(&**datastore.directory(), &name).unwrap().unwrap(), group(), "byte {at}");
    }
}

const SIZE: u64 = 1 << 20;

fn open(path: &Path) -> Arc<Datastore> {
    Datastore::open(path, options(QueueChoice::Threads)).unwrap()
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

/// Writes the record of a group with these snapshots in the state that a power cut leaves.
fn broken_off(datastore: &Datastore, native: &[[u8; 16]], images: &[(&str, u32)]) {
    UnderWay::new(datastore.directory(), native, of_group(datastore, images)).unwrap().begin().unwrap();
}

fn of_group(datastore: &Datastore, images: &[(&str, u32)]) -> Vec<ImageSnapshot> {
    let image = |(disk, uid): &(&str, u32)| ImageSnapshot {
        disk: datastore.disk(disk).unwrap().uuid,
        folder: (*disk).to_owned(),
        snapshot: "group".into(),
        uid: *uid,
    };
    images.iter().map(image).collect()
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
fn a_completed_group_leaves_no_record() {
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
fn a_group_cut_off_before_its_commit_is_undone() {
    // At a power cut before the commit, none, one or both VMDK disks have recorded the snapshot, and no native snapshot
    // exists.
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
fn a_group_cut_off_after_its_commit_is_completed() {
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
fn a_group_without_native_disks_is_complete_or_undone() {
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
fn an_older_snapshot_of_the_same_name_does_not_belong_to_the_group() {
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
fn the_outcome_of_a_group_is_decided_once() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    take(&datastore, &["n", "a", "b"], "group");
    broken_off(&datastore, &[native_snapshot(&datastore, "group")], &[("a", 1), ("b", 1)]);
    datastore.close().unwrap();
    drop(datastore);
    // One of the disks cannot be opened. The group counts as complete nevertheless.
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
fn a_failed_undo_of_a_group_is_repeated_at_the_next_opening() {
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

/// A folder that appends to the journal but reports a failure for the append.
struct FailingJournal {
    inner: LocalDirectory,
    fails: Arc<AtomicBool>,
    /// The record of the disk `a` when the first file was replaced after that failure.
    record_then: Arc<Mutex<Option<String>>>,
}

struct FailingFile {
    inner: Arc<dyn File>,
    fails: Arc<AtomicBool>,
}

impl FailingJournal {
    fn has_group(&self, name: &str) -> bool {
        self.inner.list().unwrap().iter().any(|there| there == name)
    }

    fn wrap(&self, name: &str, file: Arc<dyn File>) -> Arc<dyn File> {
        match name {
            "journal" => Arc::new(FailingFile { inner: file, fails: Arc::clone(&self.fails) }),
            _ => file,
        }
    }
}

impl Directory for FailingJournal {
    backend::forward_directory!(inner: remove, list, sync, lock, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        Ok(self.wrap(name, self.inner.open(name, mode)?))
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        Ok(self.wrap(name, self.inner.create(name, mode)?))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        if self.fails.load(Ordering::SeqCst) && to.starts_with(PREFIX) && self.has_group(to) {
            let record = std::fs::read_to_string(self.inner.path().join("images/a/lamina.disk")).unwrap();
            self.record_then.lock().get_or_insert(record);
        }
        self.inner.rename(from, to)
    }
    fn local(&self) -> Option<&dyn LocalFolder> {
        self.inner.local()
    }
}

impl File for FailingFile {
    backend::forward_file!(inner: len, set_len, read_at, sync, punch);

    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()> {
        self.inner.write_at(slices, offset, durable)?;
        match durable && self.fails.load(Ordering::SeqCst) {
            true => Err(io::Error::other("the medium failed")),
            false => Ok(()),
        }
    }
}

#[test]
fn native_snapshots_of_a_failed_append_are_undone_with_the_group() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    datastore.close().unwrap();
    drop(datastore);
    let fails = Arc::new(AtomicBool::new(false));
    let inner = LocalDirectory::open(&path, LocalQueues::Threads).unwrap();
    let record_then = Arc::new(Mutex::new(None));
    let directory = FailingJournal { inner, fails: Arc::clone(&fails), record_then: Arc::clone(&record_then) };
    let directory = Arc::new(directory);
    let datastore =
        Datastore::open_at(Some(&path.as_path().into()), directory, EngineOptions::default(), Engine::open_owned)
            .unwrap();
    fails.store(true, Ordering::SeqCst);
    let of = ["n", "a"].map(|disk| (disk.to_owned(), "group".to_owned()));
    datastore.create_snapshots(&of, &SnapshotOptions::default()).unwrap_err();
    drop(datastore);
    // The power could have been cut at any moment, so the file records that the group is abandoned before the first
    // snapshot is deleted.
    let record_then = record_then.lock().take().unwrap();
    assert!(record_then.contains("\"group\""), "{record_then}");
    // The append is on the device, so recovery finds the native snapshot.
    let datastore = open(&path);
    assert_eq!((snapshots(&datastore), records(&path)), (vec![], 0));
    datastore.close().unwrap();
}

#[test]
fn a_group_that_lacks_one_image_snapshot_loses_its_native_snapshots() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    take(&datastore, &["n", "a"], "group");
    broken_off(&datastore, &[native_snapshot(&datastore, "group")], &[("a", 1), ("b", 1)]);
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    assert_eq!((snapshots(&datastore), records(&path)), (vec![], 0));
    datastore.close().unwrap();
}

#[test]
fn a_snapshot_of_another_request_does_not_belong_to_the_group() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    let request = |disks: &[&str], name: &str| {
        let of: Vec<_> = disks.iter().map(|disk| ((*disk).to_owned(), name.to_owned())).collect();
        datastore.create_snapshots(&of, &SnapshotOptions::default()).is_ok()
    };
    // The test needs the disk that is last in the group.
    let [a, b] = ["a", "b"].map(|disk| datastore.disk(disk).unwrap().uuid);
    let late = if a > b { "a" } else { "b" };
    let mut taken = Vec::new();
    for round in 0..12 {
        let name = format!("s{round}");
        let (alone, group) = std::thread::scope(|scope| {
            let group = scope.spawn(|| request(&["a", "b"], &name));
            // The number of the group's snapshot on this disk is not determined yet, so the group has no snapshot on
            // this disk.
            while records(&path) == 0 && !group.is_finished() {
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
            (request(&[late], &name), group.join().unwrap())
        });
        assert!(alone != group || !alone, "both took {name}");
        taken.extend((alone || group).then(|| format!("{late}@{name}")));
        assert_eq!(records(&path), 0, "round {round}: a group that took nothing is to be taken back");
    }
    assert!(!taken.is_empty());
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    let there = snapshots(&datastore);
    assert!(taken.iter().all(|name| there.contains(name)), "{taken:?} {there:?}");
    datastore.close().unwrap();
}

#[test]
fn a_failed_write_of_the_group_record_is_repeated() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    let images = of_group(&datastore, &[("a", 1), ("b", 1)]);
    let mut group = UnderWay::new(datastore.directory(), &[], images).unwrap();
    group.begin().unwrap();
    // The state after a group failed, one of its snapshots could not be deleted, and the record could not be written.
    take(&datastore, &["a"], "group");
    let blocked = path.join(format!("{}{TEMPORARY}", file_name(&group.group.id).unwrap()));
    std::fs::create_dir(&blocked).unwrap();
    group.take_back(&datastore.foreign, true).unwrap_err();
    datastore.unended.lock().push(group);
    let other = [("b".to_owned(), "other".to_owned())];
    datastore.create_snapshots(&other, &SnapshotOptions::default()).unwrap_err();
    datastore.delete_disk("n", false).unwrap();
    std::fs::remove_dir(&blocked).unwrap();
    take(&datastore, &["b"], "group");
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    assert_eq!((snapshots(&datastore), records(&path)), (vec!["b@group".to_owned()], 0));
    datastore.close().unwrap();
}

#[test]
fn a_complete_group_whose_record_was_not_removed_stays_when_disks_are_consolidated_or_migrated() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    for disk in ["a", "b", "n"] {
        take(&datastore, &[disk], "group");
    }
    // The state after the record of a complete group could not be removed.
    let leave_record = |native: &[[u8; 16]], images: &[(&str, u32)]| {
        let group = UnderWay::new(datastore.directory(), native, of_group(&datastore, images)).unwrap();
        group.begin().unwrap();
        datastore.unended.lock().push(group);
    };
    leave_record(&[], &[("a", 1), ("b", 1)]);
    datastore.consolidate_disk("a", &NoProgress).unwrap();
    assert_eq!(records(&path), 0, "the next opening would find a snapshot less");
    leave_record(&[native_snapshot(&datastore, "group")], &[("b", 1)]);
    let to = MigrateOptions { format: DiskFormat::Vmdk, provisioning: Provisioning::Thin, delta: None };
    datastore.migrate("n", &to, &NoProgress).unwrap();
    assert_eq!(records(&path), 0, "the next opening would find no native snapshot");
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    assert_eq!(snapshots(&datastore), ["b@group", "n@group"]);
    datastore.close().unwrap();
}

#[test]
fn a_new_disk_in_the_folder_of_a_group_member_does_not_belong_to_the_group() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    // Neither snapshot of the group could be deleted. Afterwards one of the disks was deleted and created again, and
    // the other was deleted.
    let mut group = UnderWay::new(datastore.directory(), &[], of_group(&datastore, &[("a", 1), ("b", 1)])).unwrap();
    take(&datastore, &["a"], "group");
    take(&datastore, &["b"], "group");
    group.take_back(&datastore.foreign, true).unwrap();
    datastore.delete_disk("a", false).unwrap();
    assert_eq!(records(&path), 1);
    datastore.delete_disk("b", false).unwrap();
    assert_eq!(records(&path), 0, "nothing waits for disks that were deleted");
    // Writes the record that a server leaves if it is killed between a deletion and the update of the record.
    group.group.images.truncate(1);
    group.give_up().unwrap();
    let new = NewDisk { format: DiskFormat::Vmdk, ..NewDisk::native(SIZE, Provisioning::Thin) };
    datastore.create_disk("a", &new, &NoProgress).unwrap();
    take(&datastore, &["a"], "group");
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    assert_eq!((snapshots(&datastore), records(&path)), (vec!["a@group".to_owned()], 0));
    datastore.close().unwrap();
}

/// Of a group that fails, one disk cannot write that it does not have the snapshot any more.
#[test]
fn the_record_of_a_failed_group_stays_until_no_disk_has_a_snapshot_of_it() {
    let (folder, datastore) = made();
    let path = folder.path().join("store");
    let images = of_group(&datastore, &[("a", 1), ("b", 1)]);
    let mut group = UnderWay::new(datastore.directory(), &[], images).unwrap();
    group.begin().unwrap();
    let of = ["a", "b"].map(|name| (datastore.foreign.find(name).unwrap(), "group".to_owned()));
    let blocked = path.join("images/a/lamina.disk.lamina-new");
    let failed = datastore.foreign.create_snapshots(&of, Some(&[1, 1]), &SnapshotOptions::default(), &mut || {
        std::fs::create_dir(&blocked).unwrap();
        Err(Error::new(ErrorKind::Io, "the medium fails"))
    });
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Io);
    group.take_back(&datastore.foreign, true).unwrap_err();
    assert_eq!((snapshots(&datastore), records(&path)), (vec![], 1));
    // The state of the medium after a power cut at this moment.
    let copy = folder.path().join("copy");
    let copied = std::process::Command::new("cp").arg("-a").args([&path, &copy]).status().unwrap();
    assert!(copied.success());
    std::fs::remove_dir(copy.join("images/a/lamina.disk.lamina-new")).unwrap();
    let after = open(&copy);
    assert_eq!((snapshots(&after), records(&copy)), (vec![], 0), "all snapshots of the group exist or none");
    after.close().unwrap();
    datastore.unended.lock().push(group);
    std::fs::remove_dir(&blocked).unwrap();
    take(&datastore, &["a", "b"], "group");
    assert_eq!((snapshots(&datastore), records(&path)), (vec!["a@group".to_owned(), "b@group".to_owned()], 0));
    datastore.close().unwrap();
}
