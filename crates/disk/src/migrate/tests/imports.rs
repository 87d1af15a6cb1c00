//! Background migrations of live imports.

use super::super::background::Background;
use super::super::intent::OVERLAY;
use super::super::{ImportMode, ImportOptions, MigrateOptions, Overlay};
use crate::testbed::options;
use crate::{Datastore, DiskFormat, InitOptions, NewDisk, NoProgress, Provisioning, QueueChoice};
use error::ErrorKind;
use layer::image::Place;
use std::path::PathBuf;
use std::sync::Arc;

/// A datastore in a folder, and an image of 8 KiB beside it.
fn made() -> (tempfile::TempDir, Arc<Datastore>, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (path, image) = (folder.path().join("ds"), folder.path().join("web.img"));
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    std::fs::write(&image, [7u8; 8192]).unwrap();
    (folder, datastore, image)
}

fn live(image: PathBuf) -> ImportOptions {
    ImportOptions {
        path: image,
        format: None,
        way: ImportMode::Live,
        target: MigrateOptions { format: DiskFormat::Native, provisioning: Provisioning::Thin, delta: None },
        permitted: Vec::new(),
        force_parent: false,
        replay_journal: false,
        rate: 0,
        resolved: false,
    }
}

/// Another import that fails, or another migration that ends, removes overlays that no disk names.
#[test]
fn the_overlay_of_a_disk_that_is_not_listed_yet_or_any_more_is_kept() {
    let (_folder, datastore, image) = made();
    let overlays = || datastore.native.hidden(OVERLAY).len();
    let (import, place) = (live(image.clone()), Place::local(&image, &[]).unwrap());
    let opening = datastore.foreign.options().clone();
    let adopted = datastore.foreign.adopt("web", &place, vmdk::Adopt::ReadOnly, &opening).unwrap();
    datastore.put_above(&adopted, &import).unwrap();
    datastore.sweep_overlays().unwrap();
    assert_eq!(overlays(), 1, "the disk is not in the list yet");
    let folder = adopted.entry.folder.clone();
    adopted.entry.disk.close().unwrap();
    drop(adopted);
    datastore.foreign.open_folder(&folder).unwrap();
    let entry = datastore.foreign.find("web").unwrap();
    datastore.release_overlay(&entry);
    datastore.sweep_overlays().unwrap();
    assert_eq!(overlays(), 1, "the list has the disk");
    datastore.keep_overlay(&entry);
    datastore.foreign.forget("web").unwrap();
    datastore.sweep_overlays().unwrap();
    assert_eq!(overlays(), 1, "requests may still use the disk");
    datastore.release_overlay(&entry);
    datastore.sweep_overlays().unwrap();
    assert_eq!(overlays(), 0);
    drop(entry);
    datastore.close().unwrap();
}

#[test]
fn imports_and_their_migrations_leave_no_overlay_kept() {
    let (_folder, datastore, image) = made();
    let uuid = datastore.import("web", &live(image), &NoProgress).unwrap().uuid;
    assert!(datastore.imports.kept.lock().is_empty());
    let overlay = Overlay::of(&datastore.foreign.find("web").unwrap().disk.record()).unwrap().unwrap();
    datastore.move_in_once(&uuid, &overlay, &Background::default()).unwrap().unwrap();
    assert!(datastore.imports.kept.lock().is_empty());
    assert_eq!(datastore.native.hidden(OVERLAY), Vec::<String>::new());
    datastore.close().unwrap();
}

/// While an import waits for its next attempt, users may rename the disk and give its name to another disk.
#[test]
fn a_live_import_follows_its_disk_and_moves_no_other() {
    let (_folder, datastore, image) = made();
    let uuid = datastore.import("web", &live(image), &NoProgress).unwrap().uuid;
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

/// An attempt looks up the name of its disk, and uses the disk exclusively only after that.
#[test]
fn an_attempt_never_moves_another_disk_that_got_the_name() {
    let (_folder, datastore, image) = made();
    let import = live(image);
    let uuid = datastore.import("web", &import, &NoProgress).unwrap().uuid;
    let overlay = Overlay::of(&datastore.foreign.find("web").unwrap().disk.record()).unwrap().unwrap();
    let attempt = || datastore.migrate_import("web", &overlay, &import.target, &NoProgress);
    datastore.rename_disk("web", "renamed").unwrap();
    assert_eq!(attempt().unwrap_err().kind(), ErrorKind::Busy, "no disk has the name");
    let format = "thin".parse().unwrap();
    let new = NewDisk { capacity: 1 << 20, provisioning: Provisioning::Thin, format, delta: None };
    datastore.create_disk("web", &new, &NoProgress).unwrap();
    assert_eq!(attempt().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(datastore.disk("web").unwrap().format, "vmdk");
    // Another live import, and a native disk.
    datastore.delete_disk("web", false).unwrap();
    let other = import.path.with_file_name("other.img");
    std::fs::copy(&import.path, &other).unwrap();
    datastore.import("web", &live(other), &NoProgress).unwrap();
    assert_eq!(attempt().unwrap_err().kind(), ErrorKind::Busy);
    assert!(datastore.foreign.find("web").is_some());
    datastore.delete_disk("web", false).unwrap();
    datastore.create_disk("web", &NewDisk::native(1 << 20, Provisioning::ZeroedThick), &NoProgress).unwrap();
    assert_eq!(attempt().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(datastore.disk("web").unwrap().provisioning, Provisioning::ZeroedThick);
    let after = datastore.move_in_once(&uuid, &overlay, &Background::default()).unwrap().unwrap();
    assert_eq!((after.name.as_str(), after.format.as_str()), ("renamed", "native"));
    datastore.close().unwrap();
}
