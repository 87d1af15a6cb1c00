//! A short run through all operations of a datastore.
#![allow(clippy::unwrap_used)]

#[path = "../src/testbed.rs"]
mod testbed;

use backend::{Buffer, SharedSlice};
use disk::*;
use error::ErrorKind;

fn options() -> OpenOptions {
    testbed::options(QueueChoice::Auto)
}

/// A datastore with one disk, `a`, and its snapshot `s1`.
fn made() -> (tempfile::TempDir, std::sync::Arc<Datastore>) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("ds");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let ds = Datastore::open(&path, options()).unwrap();
    ds.create_disk("a", &NewDisk::native(64 << 20, Provisioning::Thin), &NoProgress).unwrap();
    ds.create_snapshots(&[("a".into(), "s1".into())], &SnapshotOptions::default()).unwrap();
    (dir, ds)
}

#[test]
fn a_disk_with_an_open_snapshot_is_not_deleted() {
    let (_dir, ds) = made();
    let reader = ds.device("a@s1", true).unwrap();
    assert_eq!(ds.delete_disk("a", true).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(ds.delete_snapshot("a", "s1", None, &NoProgress).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(reader.read(0, 4096).unwrap(), vec![0; 4096]);
    drop(reader);
    ds.delete_disk("a", true).unwrap();
    assert_eq!(ds.device("a", true).err().unwrap().kind(), ErrorKind::NotFound);
}

#[test]
fn ambiguous_disk_names_are_refused() {
    let (_dir, ds) = made();
    for name in ["", "a@b", "a/b", "..", "a b", "-a", "\u{7f}", &"n".repeat(300)] {
        assert_eq!(ds.rename_disk("a", name).unwrap_err().kind(), ErrorKind::Invalid, "'{name}'");
    }
    ds.rename_disk("a", "b").unwrap();
    assert_eq!(ds.device("a", true).err().unwrap().kind(), ErrorKind::NotFound);
    ds.device("b@s1", true).unwrap();
}

#[test]
fn invisible_characters_are_refused_in_new_names_and_disks_that_have_them_stay_usable() {
    let (dir, ds) = made();
    let old = "b\u{202e}c";
    for name in [old, "b\u{200b}", "\u{feff}b"] {
        let new = NewDisk::native(1 << 20, Provisioning::Thin);
        assert_eq!(ds.create_disk(name, &new, &NoProgress).unwrap_err().kind(), ErrorKind::Invalid);
        let taken = ds.create_snapshots(&[("a".into(), name.into())], &SnapshotOptions::default());
        assert_eq!(taken.unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(ds.rename_disk("a", name).unwrap_err().kind(), ErrorKind::Invalid);
    }
    // A disk with a name that an older version permitted.
    let provisioning = store::catalog::Provisioning::Thin;
    let disk =
        store::engine::NewDisk { name: old.into(), capacity: 1 << 20, provisioning, uuid: [7; 16], incomplete: false };
    ds.engine().create_disk(disk).unwrap();
    ds.close().unwrap();
    drop(ds);
    let ds = Datastore::open(dir.path().join("ds"), options()).unwrap();
    ds.device(old, false).unwrap().write(0, Buffer::with_bytes(4096).into(), true).unwrap();
    ds.create_snapshots(&[(old.into(), "s".into())], &SnapshotOptions::default()).unwrap();
    assert!(ds.check(CheckOptions::default(), &NoProgress).unwrap().findings.is_empty());
    ds.rename_disk(old, "bc").unwrap();
    ds.device("bc@s", true).unwrap();
}

#[test]
fn a_full_clone_of_a_thin_disk_takes_no_space_for_blocks_never_written() {
    let (_dir, ds) = made();
    ds.create_disk("thick", &NewDisk::native(8 << 20, Provisioning::ZeroedThick), &NoProgress).unwrap();
    let dev = ds.device("thick", false).unwrap();
    dev.write(1 << 20, Buffer::with_bytes(1 << 20).into(), true).unwrap();
    drop(dev);
    ds.create_snapshots(&[("thick".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    ds.clone_linked("thick", &Point::Snapshot("s".into()), &["linked".to_owned()], &NoProgress).unwrap();
    ds.clone_full("linked", &Point::Head, "thin", &NoProgress).unwrap();
    let thin = ds.disk("thin").unwrap();
    assert_eq!((thin.provisioning, thin.blocks_allocated), (Provisioning::Thin, Some(256)));
    ds.clone_full("thick", &Point::Head, "copy", &NoProgress).unwrap();
    let thick = ds.disk("copy").unwrap();
    assert_eq!((thick.provisioning, thick.blocks_allocated), (Provisioning::ZeroedThick, Some(2048)));
}

#[test]
fn written_data_survives_snapshots_clones_and_reopening() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("ds");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let open = || Datastore::open(&path, options()).unwrap();
    let ds = open();
    ds.create_disk("a", &NewDisk::native((64 << 20) + 512, Provisioning::Thin), &NoProgress).unwrap();
    let dev = ds.device("a", false).unwrap();
    let fill = |byte: u8, len: usize| SharedSlice::copy_of(&vec![byte; len]);
    dev.write(0, fill(1, 1 << 20), false).unwrap();
    dev.write((64 << 20) - 100, fill(2, 600), false).unwrap();
    dev.write(4096 + 512, fill(3, 512), false).unwrap();
    dev.flush().unwrap();
    ds.create_snapshots(&[("a".into(), "s1".into())], &SnapshotOptions::default()).unwrap();
    dev.write(8192, fill(4, 4096), true).unwrap();
    let check = |ds: &Datastore| {
        let dev = ds.device("a", true).unwrap();
        assert_eq!(dev.read(0, 4096).unwrap(), vec![1; 4096]);
        assert_eq!(dev.read(4096 + 512, 512).unwrap(), vec![3; 512]);
        assert_eq!(dev.read(8192, 4096).unwrap(), vec![4; 4096]);
        assert_eq!(dev.read((64 << 20) - 100, 600).unwrap(), [vec![2; 600]].concat());
        let snap = ds.device("a@s1", true).unwrap();
        assert_eq!(snap.read(8192, 4096).unwrap(), vec![1; 4096]);
        let report = ds.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
        assert_eq!(report.findings, vec![]);
    };
    check(&ds);
    drop(dev);
    ds.close().unwrap();
    drop(ds);
    let ds = open();
    check(&ds);
    let names: Vec<String> = (0..100).map(|i| format!("c{i}")).collect();
    ds.clone_linked("a", &Point::Snapshot("s1".into()), &names, &NoProgress).unwrap();
    ds.clone_full("a", &Point::Head, "full", &NoProgress).unwrap();
    let c = ds.device("c7", false).unwrap();
    c.write(8192, fill(9, 4096), true).unwrap();
    assert_eq!(ds.device("c8", false).unwrap().read(8192, 4096).unwrap(), vec![1; 4096]);
    drop(c);
    check(&ds);
    assert_eq!(ds.delete_disk("a", false).unwrap_err().kind(), ErrorKind::Busy);
    ds.delete_disk("a", true).unwrap();
    let c = ds.device("c7", false).unwrap();
    assert_eq!(c.read(8192, 4096).unwrap(), vec![9; 4096]);
    assert_eq!(ds.device("full", false).unwrap().read(8192, 4096).unwrap(), vec![4; 4096]);
    let report = ds.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, vec![]);
    println!("{:?}", ds.status().unwrap());
}

#[test]
fn a_thick_disk_without_space_is_refused_before_it_allocates_any() {
    let (_dir, ds) = made();
    for provisioning in [Provisioning::ZeroedThick, Provisioning::EagerZeroedThick] {
        let refused = ds.create_disk("thick", &NewDisk::native(64 << 40, provisioning), &NoProgress).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        // The space for all blocks was requested in one call.
        let whole = format!("{} bytes for data are needed", 64_u64 << 40);
        assert!(refused.to_string().contains(&whole), "{refused}");
        assert_eq!(ds.disk("thick").unwrap_err().kind(), ErrorKind::NotFound);
    }
}

/// Opening a disk and listing the disks lock the same things.
#[test]
fn lists_and_clients_that_open_disks_do_not_wait_for_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = Datastore::open(&path, testbed::options(QueueChoice::Threads)).unwrap();
    datastore.create_disk("a", &NewDisk::native(1 << 20, Provisioning::Thin), &NoProgress).unwrap();
    let (done, ended) = std::sync::mpsc::channel();
    for opens in [false, true] {
        let (datastore, done) = (std::sync::Arc::clone(&datastore), done.clone());
        std::thread::spawn(move || {
            for _ in 0..20_000 {
                match opens {
                    true => drop(datastore.device("a", false).unwrap()),
                    false => assert_eq!(datastore.disks().unwrap().len(), 1),
                }
            }
            done.send(()).unwrap();
        });
    }
    for _ in 0..2 {
        ended.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    }
    datastore.close().unwrap();
}
