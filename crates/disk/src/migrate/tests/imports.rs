//! Background migrations of live imports.

use super::super::import::Background;
use super::super::{ImportMode, ImportOptions, MigrateOptions, Overlay};
use crate::testbed::options;
use crate::{Datastore, DiskFormat, InitOptions, NewDisk, NoProgress, Provisioning, QueueChoice};

/// While an import waits for its next attempt, users may rename the disk and give its name to another disk.
#[test]
fn a_live_import_follows_its_disk_and_moves_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let (path, image) = (folder.path().join("ds"), folder.path().join("web.img"));
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    std::fs::write(&image, [7u8; 8192]).unwrap();
    let target = MigrateOptions { format: DiskFormat::Native, provisioning: Provisioning::Thin, delta: None };
    let import = ImportOptions {
        path: image,
        format: None,
        way: ImportMode::Live,
        target,
        permitted: Vec::new(),
        force_parent: false,
        replay_journal: false,
        rate: 0,
    };
    let uuid = datastore.import("web", &import, &NoProgress).unwrap().uuid;
    let overlay = Overlay::of(&datastore.foreign.find("web").unwrap().disk.record()).unwrap().unwrap();
    datastore.rename_disk("web", "renamed").unwrap();
    let format = "thin".parse().unwrap();
    let new = NewDisk { capacity: 1 << 20, provisioning: Provisioning::Thin, format, delta: None };
    datastore.create_disk("web", &new, &NoProgress).unwrap();
    let attempt = || datastore.move_in_once(&uuid, &overlay, &Background::default());
    attempt().unwrap().unwrap();
    assert_eq!(datastore.disk("renamed").unwrap().format, "native");
    assert_eq!(datastore.disk("web").unwrap().format, "vmdk");
    assert!(datastore.device("renamed", true).unwrap().read(0, 8192).unwrap() == [7u8; 8192][..]);
    // The disk no longer needs its images, so it stays in the format that a user chooses.
    assert!(attempt().is_none());
    datastore.close().unwrap();
}
