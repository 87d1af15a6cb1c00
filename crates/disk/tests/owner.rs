//! A datastore has one owner at a time, even if its lock file or superblock is renamed or replaced.
#![allow(clippy::unwrap_used)]

#[path = "../src/testbed.rs"]
mod testbed;

use backend::SharedSlice;
use disk::*;
use error::ErrorKind;
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn open(path: &Path) -> error::Result<Arc<Datastore>> {
    Datastore::open(path, testbed::options(QueueChoice::Threads))
}

fn made() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("ds");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    (folder, path)
}

#[test]
fn removing_the_lock_file_stops_the_owner_and_admits_no_second_one() {
    let (_folder, path) = made();
    let owner = open(&path).unwrap();
    owner.create_disk("a", &NewDisk::native(1 << 20, Provisioning::Thin), &NoProgress).unwrap();
    let device = owner.device("a", false).unwrap();
    device.write(0, SharedSlice::copy_of(&[1; 4096]), true).unwrap();
    for name in ["lock", "superblock"] {
        assert_eq!(open(&path).err().unwrap().kind(), ErrorKind::Busy);
        let moved = path.join("moved");
        fs::rename(path.join(name), &moved).unwrap();
        fs::copy(&moved, path.join(name)).unwrap();
        assert_eq!(open(&path).err().unwrap().kind(), ErrorKind::Busy, "{name} was replaced");
    }
    // The pause is needed because appends within two milliseconds share one check of the lock file's name.
    std::thread::sleep(std::time::Duration::from_millis(2));
    let error = device.write(4096, SharedSlice::copy_of(&[2; 4096]), true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stopped, "{error}");
    assert!(owner.close().is_err());
    drop((device, owner));
    let owner = open(&path).unwrap();
    assert_eq!(owner.device("a", true).unwrap().read(0, 4096).unwrap(), vec![1; 4096]);
    owner.close().unwrap();
}

#[test]
fn an_opening_waits_for_the_requests_of_a_killed_owner() {
    let (_folder, path) = made();
    let directory = backend::local::LocalDirectory::open(&path, backend::local::LocalQueues::Threads).unwrap();
    // As a ring holds it, whose process has ended.
    let rest = backend::Directory::lock(&directory, "superblock").unwrap();
    std::thread::scope(|scope| {
        let next = scope.spawn(|| open(&path));
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!next.is_finished());
        drop(rest);
        next.join().unwrap().unwrap().close().unwrap();
    });
}

#[test]
fn removing_the_lock_file_of_a_vmdk_disk_stops_its_owner() {
    let (_folder, path) = made();
    let owner = open(&path).unwrap();
    let new = NewDisk { format: DiskFormat::Vmdk, ..NewDisk::native(1 << 20, Provisioning::Thin) };
    owner.create_disk("a", &new, &NoProgress).unwrap();
    let _device = owner.device("a", false).unwrap();
    let home = fs::read_dir(path.join("images")).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(home.join("lamina.lock")).unwrap();
    let directory = backend::local::LocalDirectory::open_resolved(home.canonicalize().unwrap()).unwrap();
    let second = vmdk::Disk::open(layer::image::Folder::plain(Arc::new(directory)), &vmdk::Options::default());
    assert_eq!(second.err().unwrap().kind(), ErrorKind::Busy);
    fs::remove_file(home.join("lamina.lock")).unwrap();
    let error = owner.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap_err();
    assert!(error.kind() == ErrorKind::Stopped && error.to_string().contains("lamina.lock"), "{error}");
}
