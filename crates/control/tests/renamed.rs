//! Disks that are renamed while a long operation reads them: the operation is completed for the same disk.

#![allow(clippy::unwrap_used)]

use backend::SharedSlice;
use control::{
    BackupCreate, BackupPlace, BackupRequest, OPEN_OPTIONS, Part, Reply, Request, Service, Target, Watch, dispatch,
};
use disk::{
    Datastore, DiskSettings, InitOptions, LimitsChange, NewDisk, NoProgress, Point, Progress, Provisioning,
    SettingsChange,
};
use error::{ErrorKind, Result};
use export::clients::Clients;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const CAPACITY: u64 = 8 << 20;

/// Renames the disk `a` to `b` when the operation reports progress for the first time; then another disk gets the name.
struct Renaming {
    datastore: Arc<Datastore>,
    renamed: AtomicBool,
}

impl Progress for Renaming {
    fn update(&self, _: u64, _: u64) {
        if !self.renamed.swap(true, Ordering::SeqCst) {
            self.datastore.rename_disk("a", "b").unwrap();
            let new = NewDisk::native(CAPACITY, Provisioning::Thin);
            self.datastore.create_disk("a", &new, &NoProgress).unwrap();
        }
    }
}

impl Watch for Renaming {
    fn part(&self, part: Part) -> Result<()> {
        panic!("{part:?} was not asked for")
    }
}

/// Renames the clone `c` to `e` when the next clone is being made; then another disk gets the name.
struct RenamingClone {
    datastore: Arc<Datastore>,
    renamed: AtomicBool,
}

impl Progress for RenamingClone {
    fn update(&self, _: u64, _: u64) {
        let there = self.datastore.disks().unwrap().iter().any(|disk| disk.name == "c");
        if there && !self.renamed.swap(true, Ordering::SeqCst) {
            self.datastore.rename_disk("c", "e").unwrap();
            let new = NewDisk::native(CAPACITY, Provisioning::Thin);
            self.datastore.create_disk("c", &new, &NoProgress).unwrap();
        }
    }
}

impl Watch for RenamingClone {
    fn part(&self, part: Part) -> Result<()> {
        panic!("{part:?} was not asked for")
    }
}

/// A datastore with the disk `a`, which has data and a quota.
fn made(folder: &Path) -> Arc<Datastore> {
    let path = folder.join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = Datastore::open(&path, OPEN_OPTIONS).unwrap();
    let limits = LimitsChange { quota: Some(CAPACITY), reservation: None };
    let settings = SettingsChange { limits, ..SettingsChange::default() };
    let new = NewDisk::native(CAPACITY, Provisioning::Thin);
    datastore.create_disk_with("a", &new, &settings, &NoProgress).unwrap();
    let device = datastore.device("a", false).unwrap();
    device.write(0, SharedSlice::copy_of(&[7; 4096]), false).unwrap();
    device.flush().unwrap();
    datastore
}

fn target(folder: &Path, datastore: &Arc<Datastore>) -> Target {
    Target::Open(Service {
        clients: Arc::new(Clients::of_record(Arc::clone(datastore.directory()))),
        datastore: Arc::clone(datastore),
        location: folder.join("store").as_path().into(),
        served: None,
        jobs: None,
    })
}

/// Carries out a request during which the disk is renamed.
fn ask(folder: &Path, datastore: &Arc<Datastore>, request: Request) -> Reply {
    let target = target(folder, datastore);
    let renaming = Renaming { datastore: Arc::clone(datastore), renamed: AtomicBool::new(false) };
    let reply = dispatch(&target, request, &renaming).unwrap();
    assert!(renaming.renamed.into_inner(), "the disk was not renamed during the operation");
    reply
}

#[test]
fn a_clone_has_the_settings_of_a_disk_that_is_renamed_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = made(folder.path());
    let request = Request::Clone { disk: "a".into(), at: Point::Head, names: vec!["c".into()], full: true };
    let Reply::Disks(clones) = ask(folder.path(), &datastore, request) else { panic!("another reply") };
    let settings = datastore.disk("b").unwrap().settings;
    assert_ne!(settings, DiskSettings::default());
    assert_eq!(clones[0].settings, settings);
    datastore.close().unwrap();
}

/// Otherwise the second clone would be a copy of the disk that has got the name.
#[test]
fn all_clones_are_copies_of_a_disk_that_is_renamed_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = made(folder.path());
    let names = vec!["c".into(), "d".into()];
    let request = Request::Clone { disk: "a".into(), at: Point::Head, names, full: true };
    ask(folder.path(), &datastore, request);
    let blocks = |name: &str| datastore.disk(name).unwrap().blocks_allocated;
    assert_eq!(["a", "b", "c", "d"].map(blocks), [Some(0), Some(1), Some(1), Some(1)]);
    datastore.close().unwrap();
}

/// Otherwise the disk that has got the name of the clone would be lost.
#[test]
fn a_failed_request_for_clones_deletes_only_its_clones() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = made(folder.path());
    let renaming = RenamingClone { datastore: Arc::clone(&datastore), renamed: AtomicBool::new(false) };
    // The third clone cannot be made, because its name is taken.
    let names = vec!["c".into(), "d".into(), "a".into()];
    let request = Request::Clone { disk: "a".into(), at: Point::Head, names, full: true };
    let error = dispatch(&target(folder.path(), &datastore), request, &renaming).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    assert!(renaming.renamed.into_inner());
    let names: Vec<String> = datastore.disks().unwrap().into_iter().map(|disk| disk.name).collect();
    assert_eq!(names, ["a", "c", "e"]);
    datastore.close().unwrap();
}

#[test]
fn a_backup_of_a_disk_that_is_renamed_meanwhile_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = made(folder.path());
    let request = Request::Backup(BackupRequest::Create(BackupCreate {
        disk: "a".into(),
        snapshot: None,
        place: BackupPlace::Folder(folder.path().join("backups")),
        full: false,
        from: None,
        level: backup::LEVEL_DEFAULT,
        key: None,
        rate: 0,
    }));
    let Reply::BackedUp(created) = ask(folder.path(), &datastore, request) else { panic!("another reply") };
    assert_eq!(created.disk, "a");
    // The snapshot stays with its disk, so that the next backup of that disk can be based on it.
    let snapshots = datastore.snapshots(Some("b")).unwrap();
    assert_eq!(snapshots.iter().map(|one| &*one.name).collect::<Vec<_>>(), [&*created.snapshot]);
    datastore.close().unwrap();
}
