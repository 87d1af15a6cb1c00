//! Snapshots on which linked clones are based: handed over when their disk is deleted, or temporary. The capacity of
//! devices that are opened while a disk is resized or reverted. The reservation of a thick disk that shrinks. What goes
//! on while a thick disk grows. What a read of compressed blocks fetches. Which equal blocks are stored once. Which
//! client learns of a loss.

#![allow(clippy::unwrap_used)]

use crate::SettingsChange;
use crate::device::Segment;
use crate::testbed::options;
use crate::{
    CheckOptions, Compression, Datastore, Deduplication, InitOptions, NewDisk, NoProgress, Point, Provisioning,
    QueueChoice, SnapshotOptions,
};
use backend::{BLOCK_SIZE, SharedSlice};
use error::ErrorKind;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

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

/// Runs an action once, when the first piece of a fill is done.
struct DuringFill<'a>(Mutex<Option<Box<dyn FnOnce() + Send + 'a>>>);

impl crate::Progress for DuringFill<'_> {
    fn update(&self, _done: u64, _total: u64) {
        let action = self.0.lock().unwrap().take();
        action.into_iter().for_each(|action| action());
    }
}

#[test]
fn other_disks_are_available_while_a_thick_disk_grows_and_its_own_snapshot_waits() {
    let (_folder, datastore) = cloned();
    for provisioning in [Provisioning::ZeroedThick, Provisioning::EagerZeroedThick] {
        datastore.create_disk("t", &NewDisk::native(CAPACITY, provisioning), &NoProgress).unwrap();
        let id = datastore.native.find_disk("t").unwrap().id;
        let (taken, wait) = channel();
        let wait = Mutex::new(wait);
        let (waiting, other) = (&wait, Arc::clone(&datastore));
        let during = DuringFill(Mutex::new(Some(Box::new(move || {
            let snapshot = Arc::clone(&other);
            std::thread::spawn(move || {
                let capacity = snapshot
                    .create_snapshots(&[("t".into(), "during".into())], &SnapshotOptions::default())
                    .map(|snapshots| snapshots[0].capacity);
                taken.send(capacity).unwrap();
            });
            let (done, served) = channel();
            std::thread::spawn(move || {
                drop(other.device("a", false).unwrap());
                other.create_snapshots(&[("a".into(), "during".into())], &SnapshotOptions::default()).unwrap();
                other.delete_snapshot("a", "during", None, &NoProgress).unwrap();
                done.send(()).unwrap();
            });
            served.recv_timeout(Duration::from_secs(30)).expect("other disks wait for the disk that grows");
            // A snapshot of the disk itself waits until the disk has grown.
            let early = waiting.lock().unwrap().recv_timeout(Duration::from_millis(200));
            assert_eq!(early.unwrap_err(), RecvTimeoutError::Timeout);
        }))));
        datastore.native.resize_watched(id, 4 * CAPACITY, false, &during).unwrap();
        assert_eq!(datastore.disk("t").unwrap().capacity, 4 * CAPACITY);
        assert!(during.0.lock().unwrap().is_none(), "nothing was filled");
        assert_eq!(wait.lock().unwrap().recv().unwrap().unwrap(), 4 * CAPACITY);
        datastore.delete_disk("t", false).unwrap();
    }
    let report = datastore.check(CheckOptions { data: false, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn a_disk_that_grows_during_a_close_returns_its_new_space() {
    let (folder, datastore) = cloned();
    datastore.create_disk("t", &NewDisk::native(CAPACITY, Provisioning::EagerZeroedThick), &NoProgress).unwrap();
    datastore.create_snapshots(&[("t".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    let id = datastore.native.find_disk("t").unwrap().id;
    let (begun, closed) = channel();
    let other = Arc::clone(&datastore);
    let during = DuringFill(Mutex::new(Some(Box::new(move || {
        let closing = Arc::clone(&other);
        let close = std::thread::spawn(move || closing.close());
        while !other.native.closing.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The close waits for this thread. If it did not, it would end soon.
        for _ in 0..200 {
            if close.is_finished() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        begun.send(close).unwrap();
    }))));
    let refused = datastore.native.resize_watched(id, 4 * CAPACITY, false, &during).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Stopped, "{refused}");
    closed.recv().unwrap().join().unwrap().unwrap();
    drop(datastore);
    let datastore = Datastore::open(folder.path().join("store"), options(QueueChoice::Threads)).unwrap();
    let disk = datastore.native.find_disk("t").unwrap();
    let allocated = datastore.disk("t").unwrap().blocks_allocated.unwrap();
    assert_eq!([disk.reserved, allocated].map(|blocks| blocks * backend::BLOCK_SIZE as u64), [CAPACITY; 2]);
    let report = datastore.check(CheckOptions { data: false, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, []);
}

/// A read of a pack of which every second block was overwritten has many parts in the pack.
#[test]
fn a_read_takes_the_memory_of_a_pack_once() {
    let (_folder, datastore) = cloned();
    let disk = datastore.native.find_disk("c").unwrap();
    let device = datastore.native.device_of(&disk, &disk);
    // Content that becomes half as long: 32 blocks fill their pack.
    let content = |number: usize| {
        let mut state = number as u64 + 1;
        let mut block = vec![0; BLOCK_SIZE];
        for byte in &mut block[..2124] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        block
    };
    let mut expected: Vec<u8> = (0..32).flat_map(content).collect();
    device.write(0, SharedSlice::copy_of(&expected), false).unwrap();
    assert!(datastore.optimize_disk("c", Compression::Lz4, Deduplication::Off, None, &NoProgress).unwrap().moved > 0);
    for number in (0..32).step_by(2) {
        let block = vec![number as u8; BLOCK_SIZE];
        expected[number * BLOCK_SIZE..][..BLOCK_SIZE].copy_from_slice(&block);
        device.write((number * BLOCK_SIZE) as u64, SharedSlice::copy_of(&block), false).unwrap();
    }
    let plan = device.plan_read(0, expected.len()).unwrap();
    let fetched = |segment: &Segment| if let Segment::Media(media) = segment { media.length } else { 0 };
    let fetched: usize = plan.segments.iter().map(fetched).sum();
    // The pack, and the overwritten blocks, if they are written back already.
    assert!((16..48).contains(&(fetched / BLOCK_SIZE)), "{fetched}");
    drop(plan);
    (0..2).for_each(|_| assert!(device.read(0, expected.len()).unwrap() == expected));
    // The decoded blocks are in the read cache now: in buffered mode from the second read on.
    let before = datastore.native.read_cache().unwrap();
    assert_eq!(before.resident, 16 * BLOCK_SIZE as u64);
    assert!(device.read(0, expected.len()).unwrap() == expected);
    let after = datastore.native.read_cache().unwrap();
    assert_eq!((after.hits - before.hits, after.misses), (16, before.misses));
}

#[test]
fn equal_blocks_of_a_disk_or_of_all_disks_are_stored_once() {
    let (_folder, datastore) = cloned();
    datastore.create_disk("b", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    datastore.create_disk("t", &NewDisk::native(CAPACITY, Provisioning::EagerZeroedThick), &NoProgress).unwrap();
    let device = |name: &str| {
        let disk = datastore.native.find_disk(name).unwrap();
        datastore.native.device_of(&disk, &disk)
    };
    let content = |number: u8| vec![number + 1; BLOCK_SIZE];
    // Eight contents twice in `c`, and four of them in `b` and `t`.
    let whole: Vec<u8> = (0..16).flat_map(|number| content(number % 8)).collect();
    let part: Vec<u8> = (2..6).flat_map(content).collect();
    device("c").write(0, SharedSlice::copy_of(&whole), false).unwrap();
    ["b", "t"].iter().for_each(|name| device(name).write(0, SharedSlice::copy_of(&part), false).unwrap());
    let optimize = |name: &str, compression, deduplication| {
        datastore.optimize_disk(name, compression, deduplication, None, &NoProgress)
    };
    let shared = |deduplication| {
        let reclaimed = optimize("c", Compression::Off, deduplication).unwrap();
        assert_eq!((reclaimed.freed, reclaimed.moved), (0, 0));
        reclaimed.shared / BLOCK_SIZE as u64
    };
    assert_eq!((shared(Deduplication::Disk), shared(Deduplication::Disk)), (8, 0));
    // Equal blocks of disks with other values of the label, or without it, stay.
    let tenant = || Deduplication::Label("tenant".into());
    assert_eq!(optimize("c", Compression::Off, tenant()).unwrap_err().kind(), ErrorKind::Invalid);
    let label = |name: &str, value: &str| {
        let labels = BTreeMap::from([("tenant".to_owned(), value.to_owned())]);
        datastore.edit_disk(name, &SettingsChange { labels, ..SettingsChange::default() }).unwrap();
    };
    label("c", "x");
    assert_eq!(shared(tenant()), 0);
    label("b", "y");
    assert_eq!(shared(tenant()), 0);
    datastore.create_disk("d", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    label("d", "x");
    device("d").write(0, SharedSlice::copy_of(&part[..2 * BLOCK_SIZE]), false).unwrap();
    assert_eq!((shared(tenant()), shared(tenant())), (2, 0));
    assert_eq!((shared(Deduplication::Datastore), shared(Deduplication::Datastore)), (4, 0));
    assert_eq!(optimize("c", Compression::Off, Deduplication::Off).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(optimize("t", Compression::Off, Deduplication::Disk).unwrap_err().kind(), ErrorKind::Unsupported);
    let is_kept = || {
        assert!(device("c").read(0, whole.len()).unwrap() == whole);
        ["b", "t"].iter().for_each(|name| assert!(device(name).read(0, part.len()).unwrap() == part));
    };
    is_kept();
    device("c").write(0, SharedSlice::copy_of(&content(99)), false).unwrap();
    assert!(device("c").read((8 * BLOCK_SIZE) as u64, BLOCK_SIZE).unwrap() == content(0));
    device("c").write(0, SharedSlice::copy_of(&content(0)), false).unwrap();
    datastore.delete_disk("b", false).unwrap();
    let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, []);
    assert!(device("c").read(0, whole.len()).unwrap() == whole);
}

/// Only one flush of a disk reports a loss of acknowledged writes. A client that only reads would ignore the report.
#[test]
fn a_flush_of_a_reader_takes_no_report_of_a_loss_from_the_writers() {
    const BLOCK: u64 = BLOCK_SIZE as u64;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let open = || Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    let datastore = open();
    datastore.create_disk("a", &NewDisk::native(16 << 20, Provisioning::Thin), &NoProgress).unwrap();
    let writer = datastore.device("a", false).unwrap();
    let block = SharedSlice::copy_of(&[1; BLOCK_SIZE]);
    // Every second block is written, so that the map has several leaves.
    for number in 0..1200 {
        writer.write(2 * number * BLOCK, block.clone(), false).unwrap();
    }
    drop(writer);
    datastore.close().unwrap();
    drop(datastore);

    // Damages the last leaf of the map, all its versions, and the pages of the last checkpoint.
    let change = |name: &str, change: &mut dyn FnMut(&mut [u8])| {
        let mut bytes = std::fs::read(path.join(name)).unwrap();
        change(&mut bytes);
        std::fs::write(path.join(name), &bytes).unwrap();
    };
    let first = |page: &[u8]| {
        let leaf = &page[..4] == b"LMND" && page[6] == 0 && page[8] > 50;
        leaf.then(|| u64::from_le_bytes(page[32..40].try_into().unwrap()) & ((1 << 40) - 1))
    };
    let mut lost = 0;
    change("map", &mut |map| {
        lost = map.chunks_exact(BLOCK_SIZE).filter_map(first).max().unwrap();
        let versions = map.chunks_exact_mut(BLOCK_SIZE).filter(|page| first(page) == Some(lost));
        versions.for_each(|page| page[1000..1100].iter_mut().for_each(|byte| *byte ^= 0x5a));
    });
    change("checkpoint", &mut |images| images[..64].iter_mut().for_each(|byte| *byte ^= 0x5a));

    let datastore = open();
    let (writer, reader) = (datastore.device("a", false).unwrap(), datastore.device("a", true).unwrap());
    writer.write(lost * BLOCK, block, false).unwrap();
    reader.flush().unwrap();
    let told = writer.flush().unwrap_err();
    assert!(told.kind() == ErrorKind::Corrupt && told.to_string().contains("are lost"), "{told}");
    writer.flush().unwrap();
}
