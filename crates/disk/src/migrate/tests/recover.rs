//! Power cuts at any write while a native disk is migrated to another provisioning type: afterwards one of the two
//! copies is complete and is the current disk, and no part of the other copy remains.

use super::super::MigrateOptions;
use super::super::intent::{Copy, Intent, Intents, Stage};
use super::super::testbed::{placed, range};
use crate::testbed::options;
use crate::{
    CheckOptions, Datastore, DiskFormat, ImageKind, InitOptions, LimitsChange, NewDisk, NoProgress, Progress,
    Provisioning, QueueChoice, SettingsChange, SnapshotOptions,
};
use backend::IoMode;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use error::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use store::EngineOptions;
use testkit::Random;

/// The capacity is not a multiple of the block size.
const CAPACITY: usize = (384 << 10) + 1024;
/// Power cuts of each run, at points that depend on its seed.
const CUTS: u64 = 12;

fn open(medium: &SimulatedDisk) -> error::Result<Arc<Datastore>> {
    Datastore::open_in(
        medium.directory(),
        EngineOptions {
            mode: IoMode::Buffered,
            metadata_cache: 1 << 20,
            write_buffer: 256 << 10,
            read_cache: 256 << 10,
            cache_plain: true,
            commit_interval: Duration::from_secs(10),
            threads: false,
            write_through: true,
        },
    )
}

struct World {
    medium: SimulatedDisk,
    states: Vec<(String, Vec<u8>)>,
}

impl World {
    /// A disk with the tree `s1 - (s2), (head)`, all of it flushed.
    fn make(seed: u64) -> Self {
        let medium = SimulatedDisk::new(seed, SimulatedOptions { unflushed_max: 64, ..SimulatedOptions::default() });
        Datastore::init_in(medium.directory(), InitOptions { journal_size: 4 << 20 }).unwrap();
        let datastore = open(&medium).unwrap();
        datastore.create_disk("a", &NewDisk::native(CAPACITY as u64, Provisioning::Thin), &NoProgress).unwrap();
        let mut random = Random(seed);
        let mut bytes = vec![0; CAPACITY];
        let mut states: Vec<(String, Vec<u8>)> = Vec::new();
        for step in ["a@s1", "a@s2", "a"] {
            if step == "a" {
                datastore.revert("a", "s1").unwrap();
                bytes = states[0].1.clone();
            }
            let device = datastore.device("a", false).unwrap();
            for _ in 0..6 {
                let (offset, length) = range(&mut random, CAPACITY as u64, 64 << 10);
                let new: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
                device.write(offset, placed(0, &new), false).unwrap();
                bytes[offset as usize..(offset + length) as usize].copy_from_slice(&new);
            }
            device.flush().unwrap();
            if let Some((disk, name)) = step.split_once('@') {
                datastore.create_snapshots(&[(disk.into(), name.into())], &SnapshotOptions::default()).unwrap();
            }
            states.push((step.into(), bytes.clone()));
        }
        datastore.close().unwrap();
        Self { medium, states }
    }

    fn check(&self, medium: &SimulatedDisk, what: &str) -> Provisioning {
        let datastore = open(medium).unwrap_or_else(|error| panic!("{what}: {error}"));
        let disks = datastore.disks().unwrap();
        assert_eq!(disks.iter().map(|disk| disk.name.as_str()).collect::<Vec<_>>(), ["a"], "{what}");
        for (name, bytes) in &self.states {
            assert!(datastore.device(name, true).unwrap().read(0, CAPACITY).unwrap() == *bytes, "{what}: {name}");
        }
        let left = medium.directory().list().unwrap();
        assert!(!left.iter().any(|name| name.starts_with("migration-")), "{what}: {left:?}");
        let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
        assert_eq!(report.findings, vec![], "{what}");
        datastore.close().unwrap();
        disks[0].provisioning
    }
}

fn to_thick() -> MigrateOptions {
    MigrateOptions { format: DiskFormat::Native, provisioning: Provisioning::ZeroedThick, delta: None }
}

#[test]
fn a_power_cut_anywhere_leaves_one_complete_copy() {
    let (mut before, mut after) = (0, 0);
    for seed in 0..12 {
        let whole = World::make(seed);
        let begin = whole.medium.operations();
        let datastore = open(&whole.medium).unwrap();
        datastore.migrate("a", &to_thick(), &NoProgress).unwrap();
        drop(datastore);
        let operations = whole.medium.operations() - begin;
        assert_eq!(whole.check(&whole.medium.crash(), "whole"), Provisioning::ZeroedThick);
        let mut random = Random(seed ^ 0xc07);
        for cut in 0..CUTS {
            let world = World::make(seed);
            // Half of the cuts are in the last part, where the record is committed.
            let from = if cut % 2 == 0 { 0 } else { operations.saturating_sub(40) };
            let at = from + random.below(operations - from);
            world.medium.cut_after(world.medium.operations() + at);
            if let Ok(datastore) = open(&world.medium) {
                // The migration may or may not report the power cut.
                let _ = datastore.migrate("a", &to_thick(), &NoProgress);
            }
            let what = format!("seed {seed}, cut at {at} of {operations}");
            let medium = world.medium.crash();
            // Sometimes a second power cut happens during recovery.
            let medium = if random.percent(30) {
                medium.cut_after(medium.operations() + random.below(30));
                let _ = open(&medium);
                medium.crash()
            } else {
                medium
            };
            match world.check(&medium, &what) {
                Provisioning::Thin => before += 1,
                _ => after += 1,
            }
        }
    }
    assert!(before > 10 && after > 3, "{before} before, {after} after");
}

/// Fills the medium once everything is copied, also in place of what the datastore reserves.
struct FullAtTheEnd(SimulatedDisk);

impl Progress for FullAtTheEnd {
    fn update(&self, done: u64, total: u64) {
        if total > 0 && done == total {
            let _ = self.0.directory().remove("spare");
            self.0.set_capacity(0);
        }
    }
    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
fn a_migration_without_space_for_its_record_leaves_the_disk_as_it_was() {
    let medium = SimulatedDisk::new(2, SimulatedOptions::default());
    Datastore::init_in(medium.directory(), InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&medium).unwrap();
    datastore.create_disk("a", &NewDisk::native(CAPACITY as u64, Provisioning::Thin), &NoProgress).unwrap();
    let device = datastore.device("a", false).unwrap();
    device.write(0, placed(0, &[7; 8192]), true).unwrap();
    let refused = datastore.migrate("a", &to_thick(), &FullAtTheEnd(medium.clone())).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    device.write(0, placed(0, &[8; 4096]), true).unwrap();
    medium.set_capacity(1 << 40);
    device.write(64 << 10, placed(0, &[9; 4096]), true).unwrap();
    drop(device);
    let disks = datastore.disks().unwrap();
    assert_eq!(disks.iter().map(|disk| disk.provisioning).collect::<Vec<_>>(), [Provisioning::Thin]);
    assert!(Intents::new(medium.directory()).all().unwrap().0.is_empty());
    datastore.migrate("a", &to_thick(), &NoProgress).unwrap();
    let moved = datastore.device("a", false).unwrap().read(0, 8192).unwrap();
    assert!(moved[..4096] == [8; 4096] && moved[4096..] == [7; 4096]);
    datastore.close().unwrap();
}

#[test]
fn a_record_that_names_an_unknown_medium_stays_and_its_datastore_opens() {
    let World { medium, .. } = World::make(1);
    let arriving = Intent {
        id: "0f0e0d0c-0b0a-4908-8706-050403020100".into(),
        stage: Stage::Arriving,
        disk: "b".into(),
        source: None,
        target: Copy::Native { object: None },
        uuid: String::new(),
        created: 0,
        peer: Some(serde_json::from_str("\"nowhere:a/b\"").unwrap()),
    };
    let records = Intents::new(medium.directory());
    records.put(&arriving).unwrap();
    for _ in 0..2 {
        open(&medium).unwrap().close().unwrap();
        assert_eq!(records.all().unwrap().0, std::slice::from_ref(&arriving));
    }
}

/// Commits a migration of disk `a`, so that only the record shows that the hidden copy is the current disk.
fn committed(medium: &SimulatedDisk) -> Intent {
    let datastore = open(medium).unwrap();
    datastore.create_disk("b", &NewDisk::native(CAPACITY as u64, Provisioning::Thin), &NoProgress).unwrap();
    let source = datastore.native.find_disk("a").unwrap().id;
    let intent = Intent {
        id: "0f0e0d0c-0b0a-4908-8706-050403020100".into(),
        stage: Stage::Committed,
        disk: "a".into(),
        source: Some(Copy::Native { object: Some(source) }),
        target: Copy::Native { object: None },
        uuid: "0f0e0d0c-0b0a-4908-8706-050403020101".into(),
        created: 0,
        peer: None,
    };
    datastore.native.replica(&intent.hidden(), CAPACITY as u64, Provisioning::ZeroedThick, &NoProgress).unwrap();
    datastore.close().unwrap();
    Intents::new(medium.directory()).put(&intent).unwrap();
    intent
}

/// Changes bytes of the record of a migration.
fn damage(medium: &SimulatedDisk, intent: &Intent, places: &[usize]) {
    let directory = medium.directory();
    let file = directory.open(&format!("migration-{}", intent.id), IoMode::Buffered).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    places.iter().for_each(|at| bytes[*at] ^= 1);
    file.write_at(&[&bytes], 0, true).unwrap();
}

#[test]
fn a_damaged_record_shuts_only_its_disk() {
    let World { medium, .. } = World::make(2);
    let intent = committed(&medium);
    damage(&medium, &intent, &[40, 45]);
    for _ in 0..2 {
        let datastore = open(&medium).unwrap();
        let refused = datastore.device("a", true).err().unwrap();
        assert!(refused.kind() == error::ErrorKind::Corrupt && refused.to_string().contains("migration-"), "{refused}");
        assert!(datastore.delete_disk("a", false).is_err() && datastore.rename_disk("a", "c").is_err());
        datastore.device("b", false).unwrap().flush().unwrap();
        assert_eq!(datastore.native.hidden(&intent.hidden()), [intent.hidden()], "the other copy is kept");
        let found = datastore.check(CheckOptions { data: false, repair: true }, &NoProgress).unwrap().findings;
        assert!(found.len() == 1 && found[0].repaired.is_none(), "{found:?}");
        datastore.close().unwrap();
    }
    // If the record does not name the disk, no disk may be used.
    let named = |bytes: &[u8]| bytes.windows(6).position(|part| part == b"\"disk\"").unwrap();
    let file = medium.directory().open(&format!("migration-{}", intent.id), IoMode::Buffered).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    damage(&medium, &intent, &[named(&bytes) + 1]);
    let refused = open(&medium).err().unwrap();
    assert!(refused.kind() == error::ErrorKind::Corrupt && refused.to_string().contains("salvage"), "{refused}");
}

#[test]
fn a_record_with_one_damaged_byte_still_decides() {
    let World { medium, .. } = World::make(3);
    let intent = committed(&medium);
    damage(&medium, &intent, &[60]);
    let datastore = open(&medium).unwrap();
    assert_eq!(datastore.disk("a").unwrap().provisioning, Provisioning::ZeroedThick);
    assert!(Intents::new(medium.directory()).all().unwrap().0.is_empty());
}

#[test]
fn a_disk_that_becomes_images_keeps_its_settings_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    let limits = LimitsChange { quota: Some(1 << 20), reservation: None };
    let settings = SettingsChange { limits, ..SettingsChange::default() };
    let new = NewDisk::native(8 << 20, Provisioning::Thin);
    let before = datastore.create_disk_with("a", &new, &settings, &NoProgress).unwrap();
    let target =
        datastore.foreign.replica(&vmdk::NewDisk::new("a", 8 << 20, ImageKind::Thin, None), &NoProgress).unwrap();
    let intent = Intent {
        id: "0f0e0d0c-0b0a-4908-8706-050403020100".into(),
        stage: Stage::Committed,
        disk: "a".into(),
        source: Some(Copy::Native { object: Some(datastore.native.find_disk("a").unwrap().id) }),
        target: Copy::Images { folder: target.folder.clone() },
        uuid: before.uuid.clone(),
        created: 0,
        peer: None,
    };
    Intents::new(Arc::clone(datastore.directory())).put(&intent).unwrap();
    target.disk.close().unwrap();
    drop(target);
    datastore.close().unwrap();
    drop(datastore);
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    let after = datastore.disk("a").unwrap();
    assert!(after.uuid != before.uuid && after.format == "vmdk");
    assert_eq!(after.settings, before.settings);
    assert_eq!(datastore.native.settings.of(&before.uuid), crate::DiskSettings::default());
    assert!(Intents::new(Arc::clone(datastore.directory())).all().unwrap().0.is_empty());
    datastore.close().unwrap();
}

/// Puts a folder in the place of the mark of an incomplete folder once everything is copied, so that the mark cannot be
/// removed.
struct MarkedByAFolder<'a>(&'a Path);

impl Progress for MarkedByAFolder<'_> {
    fn update(&self, done: u64, total: u64) {
        if total > 0 && done == total && self.0.is_file() {
            std::fs::remove_file(self.0).unwrap();
            std::fs::create_dir(self.0).unwrap();
        }
    }
    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
fn a_migration_whose_new_copy_does_not_get_its_name_loses_no_copy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let mark = path.join("images/a/lamina.incomplete");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    datastore.create_disk("a", &NewDisk::native(8 << 20, Provisioning::Thin), &NoProgress).unwrap();
    let client = datastore.device("a", false).unwrap();
    client.write(0, placed(0, &[7; 8192]), false).unwrap();
    let to = MigrateOptions { format: "thin".parse().unwrap(), provisioning: Provisioning::Thin, delta: None };
    let moved = datastore.migrate("a", &to, &MarkedByAFolder(&mark)).unwrap_err();
    assert!(moved.kind() == ErrorKind::Stopped && moved.to_string().contains("completes the migration"), "{moved}");
    // Clients that have the disk open use the new copy. Others would get the old one.
    client.write(4096, placed(0, &[8; 4096]), false).unwrap();
    client.flush().unwrap();
    assert!(datastore.device("a", false).is_err() && datastore.delete_disk("a", false).is_err());
    drop(client);
    let _ = datastore.close();
    drop(datastore);
    std::fs::remove_dir(&mark).unwrap();
    std::fs::write(&mark, "").unwrap();
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    let read = datastore.device("a", true).unwrap().read(0, 8192).unwrap();
    assert!(read[..4096] == [7; 4096] && read[4096..] == [8; 4096]);
    assert_eq!(datastore.disk("a").unwrap().format, "vmdk");
    assert!(Intents::new(Arc::clone(datastore.directory())).all().unwrap().0.is_empty());
    datastore.close().unwrap();
}

#[test]
fn a_new_disk_is_not_taken_for_the_old_copy_of_a_migration_that_was_not_completed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let home = path.join("images/a");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    let format = "thin".parse().unwrap();
    let image = NewDisk { capacity: 8 << 20, provisioning: Provisioning::Thin, format, delta: None };
    datastore.create_disk("a", &image, &NoProgress).unwrap();
    // A file of a user, because of which the folder of the source cannot be removed.
    std::fs::write(home.join("notes"), "").unwrap();
    let native = MigrateOptions { format: DiskFormat::Native, provisioning: Provisioning::Thin, delta: None };
    assert_eq!(datastore.migrate("a", &native, &NoProgress).unwrap().format, "native");
    let records = || Intents::new(Arc::clone(datastore.directory())).all().unwrap().0;
    assert_eq!(records().len(), 1, "the next opening completes the migration");
    std::fs::remove_dir_all(&home).unwrap();
    datastore.rename_disk("a", "old").unwrap();
    datastore.create_disk("a", &image, &NoProgress).unwrap();
    assert_eq!(datastore.foreign.find("a").unwrap().folder, "a-2");
    assert!(!home.exists());
    datastore.device("a", false).unwrap().write(0, placed(0, &[7; 8192]), true).unwrap();
    datastore.close().unwrap();
    drop(datastore);
    let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
    let mut names: Vec<String> = datastore.disks().unwrap().into_iter().map(|disk| disk.name).collect();
    names.sort();
    assert_eq!(names, ["a", "old"]);
    assert!(datastore.device("a", true).unwrap().read(0, 8192).unwrap() == [7; 8192]);
    assert!(Intents::new(Arc::clone(datastore.directory())).all().unwrap().0.is_empty());
    datastore.close().unwrap();
}
