//! Reading a backup at any place: chains, encryption, damage, and protection from deletion.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::CreateOptions;
use crate::objects::{Folder, Objects};
use crate::repository::pack_name;
use crate::retention::Keep;
use crate::testbed::{Fixture, SMALL_PACKS};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use disk::NoProgress;
use std::sync::atomic::{AtomicBool, Ordering};
use testkit::Random;

/// A capacity that ends in the middle of a block.
const CAPACITY: u64 = 5 * SEGMENT + (1 << 20) + 512;

fn repository(disk: &SimulatedDisk) -> Repository {
    Repository::open_or_create(Arc::new(Folder::of(disk.directory(), "the repository"))).unwrap()
}

/// A backup with two increments; returns the content of the last snapshot.
fn chain_of_three(repository: &Repository, seed: u64, key: Option<&Arc<Key>>) -> Vec<u8> {
    let mut fixture = Fixture::new(CAPACITY, seed);
    let mut random = Random::new(seed + 100);
    let mut content = Vec::new();
    for round in 0..3u64 {
        let name = format!("s{round}");
        content = fixture.snapshot(&name);
        let options = CreateOptions { key, ..SMALL_PACKS };
        repository.create(&fixture.outgoing(&name), "vm", false, options, &NoProgress).unwrap();
        for _ in 0..30 {
            let at = random.below(CAPACITY / BLOCK) * BLOCK;
            fixture.write(at, &random.bytes(BLOCK as usize));
        }
        fixture.discard(random.below(CAPACITY / BLOCK - 64) * BLOCK, 64 * BLOCK);
    }
    content
}

/// Compares a backup with its content, in random ranges and by its runs.
fn compare(backup: &LiveBackup, content: &[u8], seed: u64) {
    let mut random = Random::new(seed);
    assert_eq!(backup.capacity(), CAPACITY);
    for _ in 0..200 {
        let most = [700, 9000, 3 << 20][random.index(3)];
        let start = random.below(CAPACITY);
        let length = (1 + random.below(most)).min(CAPACITY - start);
        let mut out = vec![0xee; length as usize];
        backup.read(start, &mut out).unwrap();
        assert!(out == content[start as usize..(start + length) as usize], "{length} bytes at {start}");
    }
    for most in [1, 7, 1000] {
        let (mut at, mut data) = (0, 0);
        while at < CAPACITY {
            let runs = backup.runs(at..CAPACITY, most).unwrap();
            assert!((1..=most).contains(&runs.len()));
            for run in runs {
                let bytes = &content[at as usize..(at + run.length) as usize];
                assert!(run.data || bytes.iter().all(|byte| *byte == 0), "the run at {at}");
                data += if run.data { run.length } else { 0 };
                at += run.length;
            }
        }
        assert_eq!(at, CAPACITY);
        assert!(data > 0 && data < CAPACITY / 4, "{data}");
    }
}

#[test]
fn every_range_of_a_chain_is_read_equal_with_and_without_encryption() {
    let folder = tempfile::tempdir().unwrap();
    let key = Arc::new(Key::create(&folder.path().join("key")).unwrap());
    for (seed, key) in [(1, None), (2, Some(&key))] {
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        let content = chain_of_three(&repository(&disk), seed, key);
        let backup = LiveBackup::open(repository(&disk), "vm", key).unwrap();
        compare(&backup, &content, seed);
        if key.is_some() {
            assert_eq!(LiveBackup::open(repository(&disk), "vm", None).err().unwrap().kind(), ErrorKind::Invalid);
        }
    }
}

#[test]
fn the_format_page_explains_every_member_of_the_record() {
    let page = include_str!("../../../../docs/format/vmdk-disk.md");
    let explained = |value: &serde_json::Value| {
        for member in value.as_object().unwrap().keys() {
            assert!(page.contains(&format!("`{member}`")), "the page does not explain `{member}`");
        }
    };
    let bucket = RecordedPlace::Bucket("s3://bucket/a/b".parse().unwrap());
    for repository in [RecordedPlace::Folder("/r".into()), bucket] {
        let location = BackupLocation { repository, backup: "b".into(), key: None, reader: None };
        let text: serde_json::Value = serde_json::to_value(&location).unwrap();
        explained(&text);
        if let RecordedPlace::Bucket(_) = location.repository {
            explained(&text["repository"]);
        }
        assert_eq!(decode(&text.to_string()).unwrap(), location);
    }
    for kind in [KIND, BUCKET_KIND] {
        assert!(page.contains(&format!("`{kind}`")), "the page does not explain the kind `{kind}`");
    }
}

#[test]
fn threads_read_the_same_content() {
    let disk = SimulatedDisk::new(3, SimulatedOptions::default());
    let content = chain_of_three(&repository(&disk), 3, None);
    let backup = LiveBackup::open(repository(&disk), "vm", None).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..6 {
            let (backup, content) = (&backup, &content);
            scope.spawn(move || compare(backup, content, seed));
        }
    });
}

#[test]
fn damage_gives_errors_and_no_wrong_data() {
    let disk = SimulatedDisk::new(4, SimulatedOptions::default());
    let content = chain_of_three(&repository(&disk), 4, None);
    let id = repository(&disk).find("vm").unwrap().backup.id;
    let objects = Folder::of(disk.directory(), "the repository");
    let mut random = Random::new(5);
    let mut failed = 0;
    let name = pack_name(&id, 0);
    let good = objects.read(&name, 0..objects.length(&name).unwrap().unwrap()).unwrap();
    for _ in 0..20 {
        let mut bad = good.clone();
        let at = random.index(bad.len());
        bad[at] ^= 1 << random.below(8);
        objects.put(&name, &bad).unwrap();
        let backup = LiveBackup::open(repository(&disk), "vm", None).unwrap();
        for start in (0..CAPACITY).step_by(1 << 20) {
            let length = CHUNK.min(CAPACITY - start) as usize;
            let mut out = vec![0; length];
            match backup.read(start, &mut out) {
                Ok(()) => assert!(out == content[start as usize..start as usize + length], "byte {at}: {start}"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                    failed += 1;
                }
            }
        }
    }
    assert!(failed > 0);
    // A missing pack is damage, and a missing repository is not.
    objects.remove(&name).unwrap();
    let backup = LiveBackup::open(repository(&disk), "vm", None).unwrap();
    let mut out = vec![0; CAPACITY as usize];
    assert_eq!(backup.read(0, &mut out).unwrap_err().kind(), ErrorKind::Corrupt);
    objects.remove("repository").unwrap();
    assert_eq!(backup.read(0, &mut out).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn backups_that_are_being_restored_are_not_deleted() {
    let disk = SimulatedDisk::new(6, SimulatedOptions::default());
    let repository = repository(&disk);
    chain_of_three(&repository, 6, None);
    let all = repository.manifests().unwrap();
    let ids: Vec<&str> = all[..2].iter().rev().map(|manifest| manifest.backup.id.as_str()).collect();
    let reader = repository.add_reader(&ids, "copy", "/srv/store").unwrap();
    // The record is durable.
    let after = disk.crash();
    assert!(after.directory().list().unwrap().contains(&format!("reader-{reader}")));
    let repository = Repository::open(Arc::new(Folder::of(after.directory(), "the repository"))).unwrap();
    let refused = repository.delete(&all).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    assert!(refused.to_string().contains("disk 'copy' of the datastore '/srv/store' is being restored from it"));
    assert_eq!(repository.manifests().unwrap().len(), 3);
    let keep = Keep { last: 1, ..Keep::default() };
    // The newest backup is based on the others, so it is deleted to leave only those that are read.
    repository.delete(&all[2..]).unwrap();
    let pruned = repository.prune(&keep, false).unwrap();
    assert_eq!(pruned.deleted, 0);
    assert!(pruned.backups.iter().all(|judged| judged.reasons.contains(&"restoring".to_owned())));
    // A record that cannot be read protects everything.
    repository.objects().put("reader-0f0e0d0c-0b0a-4908-8706-050403020100", b"x").unwrap();
    repository.remove_reader(&reader).unwrap();
    assert_eq!(repository.delete(&all[..2]).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(repository.prune(&keep, true).unwrap_err().kind(), ErrorKind::Corrupt);
    repository.forget_readers(&|_| false).unwrap();
    repository.delete(&all[..2]).unwrap();
    assert!(repository.add_reader(&ids, "copy", "/srv/store").is_err_and(|error| error.kind() == ErrorKind::NotFound));
}

#[test]
fn a_restored_disk_can_be_used_at_once_and_is_complete_later() {
    let _ = disk::migrate::register_live_source(LIVE_SOURCE);
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("backups");
    let repository = Repository::open_or_create(Arc::new(Folder::open_or_create(&place).unwrap())).unwrap();
    let content = chain_of_three(&repository, 7, None);
    let there = Fixture::empty(CAPACITY);
    let options = LiveRestoreOptions {
        repository: &RepositoryPlace::Folder(place.clone()),
        which: "vm",
        key: None,
        name: "copy",
        rate: 0,
        datastore: "/srv/store".into(),
    };
    let restored = restore_live(&there.datastore, &options).unwrap();
    assert_eq!((restored.known, restored.source.as_str(), restored.unprotected), (false, "vm@s2", None));
    assert!(there.content_of("copy") == content);
    assert!(restore_live(&there.datastore, &options).unwrap().known);
    let other = LiveRestoreOptions { which: "vm@s1", ..options.clone() };
    assert_eq!(restore_live(&there.datastore, &other).unwrap_err().kind(), ErrorKind::Exists);
    let readers = || repository.objects().list().unwrap().iter().filter(|name| name.starts_with("reader-")).count();
    assert_eq!(readers(), 1, "the failed restore has left no record");
    let ended = Arc::new(AtomicBool::new(false));
    let of_runner = Arc::clone(&ended);
    there.datastore.run_attempts_by(move |command, name, attempt| {
        assert_eq!((command, name), ("backup restore --live", "copy"));
        attempt(&NoProgress).inspect(|()| of_runner.store(true, Ordering::SeqCst))
    });
    there.datastore.start_imports();
    while !ended.load(Ordering::SeqCst) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(readers(), 0);
    std::fs::remove_dir_all(&place).unwrap();
    assert_eq!(there.datastore.disk("copy").unwrap().format, "native");
    assert!(there.content_of("copy") == content);
}

/// Where the record of the disk `copy` says that its backup is.
fn recorded(there: &Fixture) -> BackupLocation {
    decode(&there.datastore.arrival_source("copy").unwrap().unwrap().place).unwrap()
}

#[test]
fn the_repeated_restore_follows_a_repository_and_a_key_that_were_moved() {
    let _ = disk::migrate::register_live_source(LIVE_SOURCE);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let key = Arc::new(Key::create(&path("key")).unwrap());
    let repository = Repository::open_or_create(Arc::new(Folder::open_or_create(&path("backups")).unwrap())).unwrap();
    let content = chain_of_three(&repository, 8, Some(&key));
    let there = Fixture::empty(CAPACITY);
    let restore = |backups: &str, key: &str| {
        let (backups, key) = (RepositoryPlace::Folder(path(backups)), path(key));
        let options = LiveRestoreOptions {
            repository: &backups,
            which: "vm",
            key: Some(&key),
            name: "copy",
            rate: 0,
            datastore: "/srv/store".into(),
        };
        restore_live(&there.datastore, &options)
    };
    assert!(!restore("backups", "key").unwrap().known);
    let first = recorded(&there);
    std::fs::rename(path("backups"), path("moved")).unwrap();
    std::fs::rename(path("key"), path("moved-key")).unwrap();
    let readers = |backups: &str| {
        let names = Folder::open(&path(backups)).unwrap().list().unwrap();
        names.into_iter().filter(|name| name.starts_with("reader-")).count()
    };
    let device = there.datastore.device("copy", true).unwrap();
    let reads = || (0..CAPACITY >> 20).filter(|at| device.read(at << 20, 1 << 20).is_ok()).count() as u64;
    assert_eq!(reads(), 0);
    Key::create(&path("wrong-key")).unwrap();
    assert_eq!(restore("moved", "wrong-key").unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(recorded(&there), first, "a refused command changes nothing");
    let again = restore("moved", "moved-key").unwrap();
    assert_eq!((again.known, again.unprotected), (true, None));
    let repository = RecordedPlace::Folder(path("moved"));
    let moved = BackupLocation { repository, key: Some(path("moved-key")), ..first.clone() };
    assert_eq!(recorded(&there), moved);
    assert_eq!(readers("moved"), 1);
    // Clients that have the disk open use the new place at once.
    assert_eq!(reads(), CAPACITY >> 20);
    assert!(there.content_of("copy") == content);
    // A copy of the repository that lacks the record of the reader gets one.
    std::fs::create_dir(path("copied")).unwrap();
    for name in Folder::open(&path("moved")).unwrap().list().unwrap() {
        if !name.starts_with("reader-") {
            std::fs::copy(path("moved").join(&name), path("copied").join(&name)).unwrap();
        }
    }
    assert!(restore("copied", "moved-key").unwrap().known);
    assert_eq!(readers("copied"), 1);
    std::fs::remove_dir_all(path("moved")).unwrap();
    assert!(there.content_of("copy") == content);
    // A place that was changed meanwhile is not changed back.
    let known = there.datastore.arrival_source("copy").unwrap().unwrap();
    let stale = LiveSourceRecord { place: encode(&moved).unwrap(), ..known.clone() };
    let late = there.datastore.move_arrival_source("copy", &stale, known).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Busy);
    drop(device);
    there.datastore.delete_disk("copy", false).unwrap();
    assert_eq!(readers("copied"), 0);
}
