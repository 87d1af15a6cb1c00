//! Backups of a datastore in a repository and as streams: chains, cuts, damage, deletion.

#![allow(clippy::unwrap_used)]

use crate::testbed::{BLOCK, Fixture, SMALL_PACKS, content_of, kill_before_the_last_flush};
use crate::*;
use backend::IoMode;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use disk::NoProgress;
use disk::transfer::SEGMENT;
use error::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use testkit::Random;
use work::Progress;

/// A capacity that ends in the middle of a block.
const CAPACITY: u64 = 5 * SEGMENT + (1 << 20) + 512;

fn repository(disk: &SimulatedDisk) -> Repository {
    Repository::open_or_create(Arc::new(Folder::of(disk.directory(), "the repository"))).unwrap()
}

fn create(repository: &Repository, fixture: &Fixture, snapshot: &str) -> Created {
    repository.create(&fixture.outgoing(snapshot), "vm", false, SMALL_PACKS, &NoProgress).unwrap()
}

fn options(name: &str) -> RestoreOptions {
    RestoreOptions { name: name.into(), update: false, rate: 0 }
}

fn restore_from(repository: &Repository, which: &str, to: &Fixture, name: &str) -> Restored {
    let (manifest, mut chain) = Chain::of(repository, which, None).unwrap();
    restore(&to.datastore, &mut chain, (&manifest.backup, false), &options(name), &NoProgress).unwrap()
}

#[test]
fn increments_have_only_changes_and_every_backup_of_a_chain_is_restored_equal() {
    let mut here = Fixture::new(CAPACITY, 1);
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let repository = repository(&disk);
    let mut random = Random::new(2);
    let mut contents = vec![here.snapshot("s0")];
    let full = create(&repository, &here, "s0");
    assert_eq!((full.based_on, full.already), (None, false));
    for round in 1..5u64 {
        let mut changed = 0;
        for place in 0..40 {
            let at = (place * 37 + round) * 8 * BLOCK;
            here.write(at, &random.bytes(BLOCK as usize));
            changed += BLOCK;
        }
        let zeroed = (round * 3 % 5) * SEGMENT + 9 * BLOCK;
        here.write(zeroed, &random.bytes(BLOCK as usize));
        here.discard(zeroed, BLOCK);
        let name = format!("s{round}");
        contents.push(here.snapshot(&name));
        let made = create(&repository, &here, &name);
        assert_eq!(made.based_on, Some(format!("s{}", round - 1)));
        assert_eq!(made.data, changed, "{made:?}");
        assert!(made.stored < changed * 102 / 100, "{made:?}");
        assert!(create(&repository, &here, &name).already);
    }
    assert!(repository.verify(&[], None, &NoProgress).unwrap().problems.is_empty());
    let there = Fixture::empty(CAPACITY);
    for (round, content) in contents.iter().enumerate() {
        let (which, name) = (format!("vm@s{round}"), format!("r{round}"));
        assert!(content_of(&mut Chain::of(&repository, &which, None).unwrap().1) == *content, "{which}");
        let restored = restore_from(&repository, &which, &there, &name);
        assert_eq!(restored.snapshot, format!("s{round}"));
        assert!(there.content_of(&name) == *content && there.content_of(&format!("{name}@s{round}")) == *content);
    }
    // The newest backup, by the name of its disk.
    assert_eq!(repository.find("vm").unwrap().backup.point.name, "s4");
    // A snapshot of the restored disk is an increment to the backup from which the disk was restored.
    let next = [("r4".to_owned(), "s5".to_owned())];
    there.datastore.create_snapshots(&next, &disk::SnapshotOptions::default()).unwrap();
    let outgoing = there.datastore.outgoing("r4", "s5").unwrap();
    let made = repository.create(&outgoing, "r4", false, SMALL_PACKS, &NoProgress).unwrap();
    assert_eq!((made.based_on.as_deref(), made.data, made.zeros), (Some("s4"), 0, 0));
    let report = there.datastore.check(disk::CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert!(report.findings.is_empty());
}

#[test]
fn a_disk_that_shrank_and_grew_between_backups_is_restored_without_its_old_end() {
    let mut here = Fixture::new(CAPACITY, 15);
    let disk = SimulatedDisk::new(15, SimulatedOptions::default());
    let repository = repository(&disk);
    let there = Fixture::empty(CAPACITY);
    let capacities = [CAPACITY, 2 * SEGMENT + 3 * BLOCK + 512, CAPACITY];
    for (round, capacity) in capacities.into_iter().enumerate() {
        here.datastore.resize_disk("vm", capacity, true).unwrap();
        here.content.resize(capacity as usize, 0);
        let (snapshot, name) = (format!("s{round}"), format!("r{round}"));
        let content = here.snapshot(&snapshot);
        assert_eq!(create(&repository, &here, &snapshot).based_on.is_some(), round > 0);
        assert!(content_of(&mut Chain::of(&repository, "vm", None).unwrap().1) == content, "{snapshot}");
        restore_from(&repository, "vm", &there, &name);
        assert!(there.content_of(&name) == content, "{name}");
    }
    assert!(repository.verify(&[], None, &NoProgress).unwrap().problems.is_empty());
}

#[test]
fn a_new_key_is_durable_or_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    let key = Key::create(&path).unwrap();
    let made = std::fs::read(&path).unwrap();
    for seed in 0..40 {
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        key.write(&*disk.directory(), "key").unwrap();
        let after = disk.crash().directory();
        assert_eq!(after.list().unwrap(), ["key"], "seed {seed}");
        let file = after.open("key", IoMode::Buffered).unwrap();
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        assert!(bytes == made, "seed {seed}");
    }
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    disk.set_capacity(0);
    key.write(&*disk.directory(), "key").unwrap_err();
    assert!(disk.directory().list().unwrap().is_empty());
}

#[test]
fn a_backup_cut_anywhere_continues_and_is_complete() {
    let here = Fixture::new(CAPACITY, 3);
    let content = here.snapshot("s");
    let (mut resumed, mut cuts) = (0, 0);
    for seed in 0..100 {
        let mut disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        drop(repository(&disk));
        // The first attempt is cut at any operation, and the second attempt shortly after.
        let mut random = Random::new(seed);
        for range in [60, 20] {
            disk.cut_after(disk.operations() + random.below(range));
            let objects = Arc::new(Folder::of(disk.directory(), "the repository"));
            let made = Repository::open(objects)
                .and_then(|repository| repository.create(&here.outgoing("s"), "vm", false, SMALL_PACKS, &NoProgress));
            cuts += u64::from(made.is_err());
            disk = disk.crash();
        }
        let repository = repository(&disk);
        let made = create(&repository, &here, "s");
        resumed += u64::from(made.resumed > 0);
        assert!(repository.verify(&[], None, &NoProgress).unwrap().problems.is_empty(), "seed {seed}");
        assert!(content_of(&mut Chain::of(&repository, &made.id, None).unwrap().1) == content, "seed {seed}");
        assert_eq!(repository.list().unwrap().len(), 1, "seed {seed}");
        assert_eq!(repository.sweep().unwrap(), 0, "seed {seed}");
    }
    assert!(cuts > 50 && resumed > 20, "{cuts} cuts, {resumed} continued");
}

#[test]
fn a_file_cut_at_any_byte_continues_and_is_complete() {
    let here = Fixture::new(CAPACITY, 4);
    let content = here.snapshot("s");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let source = (&here.outgoing("s"), "vm");
    let make = || create_file(&path, source, None, SMALL_PACKS, &NoProgress);
    make().unwrap();
    assert!(make().unwrap().already);
    let good = std::fs::read(&path).unwrap();
    let mut random = Random::new(5);
    let mut resumed = 0;
    for round in 0..100 {
        let length = random.index(good.len());
        std::fs::write(&path, &good[..length]).unwrap();
        if length > 8 {
            assert_eq!(verify_file(&path, None, &NoProgress).unwrap().problems.len(), 1, "{length}");
            assert!(manifest_of(&path).is_err());
        }
        let made = make().unwrap_or_else(|error| panic!("cut at {length}: {error}"));
        resumed += u64::from(made.resumed > 0);
        assert!(verify_file(&path, None, &NoProgress).unwrap().problems.is_empty(), "cut at {length}");
        let level = FileLevel::open(&path, None).unwrap();
        assert_eq!(level.manifest().stored(), made.stored);
        if round % 10 == 0 {
            let mut chain = Chain::new(vec![Box::new(level)], CAPACITY);
            assert!(content_of(&mut chain) == content, "cut at {length}");
        }
    }
    assert!(resumed > 30, "{resumed}");
    // A file with another content is not overwritten.
    for other in [&b"something else"[..], b"LAMB"] {
        std::fs::write(&path, other).unwrap();
        let outcome = make().map_err(|error| error.kind());
        assert_eq!(outcome.is_err(), other.len() > 8, "{outcome:?}");
    }
    here.snapshot("t");
    let other = create_file(&path, (&here.outgoing("t"), "vm"), None, SMALL_PACKS, &NoProgress);
    assert_eq!(other.unwrap_err().kind(), ErrorKind::Exists);
}

#[test]
fn every_flipped_byte_of_a_stream_or_repository_is_found() {
    let here = Fixture::new(2 * SEGMENT, 6);
    here.snapshot("s");
    let mut good = Vec::new();
    create_stream(&mut good, "the stream", (&here.outgoing("s"), "vm"), None, SMALL_PACKS, &NoProgress).unwrap();
    let verify = |bytes: &[u8]| verify_stream(bytes, ("the stream", 0), None, &NoProgress).unwrap();
    assert_eq!(verify(&good).problems, Vec::<String>::new());
    let mut random = Random::new(7);
    let mut places: Vec<usize> = (0..1200).chain(good.len() - 1200..good.len()).collect();
    places.extend((0..200).map(|_| random.index(good.len())));
    for at in places {
        let mut bad = good.clone();
        bad[at] ^= 1 << random.below(8);
        assert_eq!(verify(&bad).problems.len(), 1, "byte {at} of {}", good.len());
    }
    good.push(0);
    assert_eq!(verify(&good).problems.len(), 1);
    let folder = tempfile::tempdir().unwrap();
    let repository = Repository::open_or_create(Arc::new(Folder::open(folder.path()).unwrap())).unwrap();
    create(&repository, &here, "s");
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        let good = std::fs::read(&path).unwrap();
        if good.is_empty() || path.ends_with("repository") {
            continue;
        }
        for _ in 0..40 {
            let at = random.index(good.len());
            let mut bad = good.clone();
            bad[at] ^= 1 << random.below(8);
            std::fs::write(&path, &bad).unwrap();
            assert!(
                !repository.verify(&[], None, &NoProgress).unwrap().problems.is_empty(),
                "{}: {at}",
                path.display()
            );
        }
        std::fs::remove_file(&path).unwrap();
        let verified = repository.verify(&[], None, &NoProgress).unwrap();
        let manifest = path.to_string_lossy().contains("backup-");
        assert_eq!(verified.problems.is_empty(), manifest, "{}: {verified:?}", path.display());
        std::fs::write(&path, &good).unwrap();
    }
    assert!(repository.verify(&["vm".into()], None, &NoProgress).unwrap().problems.is_empty());
}

#[test]
fn an_increment_in_a_stream_is_restored_on_its_parent() {
    let mut here = Fixture::new(CAPACITY, 8);
    let first = here.snapshot("s0");
    let mut random = Random::new(9);
    here.write(SEGMENT + 4096, &random.bytes(12_288));
    here.discard(3 * SEGMENT, SEGMENT);
    let second = here.snapshot("s1");
    let stream = |snapshot: &str, from: Option<&str>| {
        let from = from.map(|from| here.outgoing(from).point().clone());
        let mut bytes = Vec::new();
        let source = (&here.outgoing(snapshot), "vm");
        create_stream(&mut bytes, "s", source, from.as_ref(), SMALL_PACKS, &NoProgress).map(|made| (made, bytes))
    };
    let (_, full) = stream("s0", None).unwrap();
    let (made, increment) = stream("s1", Some("s0")).unwrap();
    assert_eq!(made.data, 12_288);
    assert!(made.zeros > 0 && made.stored < 16 << 10, "{made:?}");
    assert_eq!(stream("s0", Some("s0")).unwrap_err().kind(), ErrorKind::Invalid);
    let there = Fixture::empty(CAPACITY);
    let receive = |bytes: &[u8], name: &str, update: bool| {
        let stream = StreamReader::new(std::io::Cursor::new(bytes.to_vec()), "the stream", None).unwrap();
        let description = stream.description().clone();
        let mut chain = Chain::new(vec![Box::new(StreamLevel::new(stream))], description.capacity);
        let options = RestoreOptions { update, ..options(name) };
        restore(&there.datastore, &mut chain, (&description, true), &options, &NoProgress)
    };
    assert_eq!(receive(&increment, "vm", false).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(there.datastore.receptions().unwrap(), []);
    receive(&full, "vm", false).unwrap();
    assert!(there.content_of("vm") == first);
    receive(&increment, "other", false).unwrap();
    receive(&increment, "vm", true).unwrap();
    for name in ["vm", "vm@s1", "other"] {
        assert!(there.content_of(name) == second, "{name}");
    }
    assert!(there.content_of("vm@s0") == first);
    // A restore from a cut stream keeps what was restored; a restore from the whole stream completes the disk.
    let cut = receive(&full[..full.len() * 2 / 3], "again", false).unwrap_err();
    assert_eq!(cut.kind(), ErrorKind::Io, "{cut}");
    assert_eq!(there.datastore.receptions().unwrap().len(), 1);
    let restored = receive(&full, "again", false).unwrap();
    assert!(restored.resumed > 0, "{restored:?}");
    assert!(there.content_of("again") == first);
    // A damaged stream creates no disk.
    let mut bad = full.clone();
    let end = bad.len() - 40;
    bad[end] ^= 4;
    receive(&bad, "bad", false)
        .err()
        .map_or_else(|| panic!("restored"), |error| assert!(!error.to_string().is_empty()));
    assert!(there.datastore.disk("bad").is_err());
}

#[test]
fn parts_of_objects_that_interrupted_backups_leave_are_removed() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let repository = repository(&disk);
    let id = "0f0e0d0c-0b0a-4908-8706-050403020101";
    let left = [format!("pack-{id}-00000003.new"), format!("unfinished-{id}.new"), format!("backup-{id}.new")];
    // The record of the repository is no object of a backup, and the last file is no part of an object.
    for name in left.iter().map(String::as_str).chain(["repository.new", "pack-of-photos.new"]) {
        backend::replace::prepare(&*disk.directory(), name, &[7; 4096]).unwrap();
    }
    assert_eq!(repository.sweep().unwrap(), 0);
    let mut files = disk.directory().list().unwrap();
    files.sort();
    assert_eq!(files, ["lock", "pack-of-photos.new", "repository", "repository.new"]);
}

#[test]
fn backups_with_increments_are_not_deleted_and_a_cut_deletion_is_completed() {
    let mut here = Fixture::new(CAPACITY, 10);
    for cut in 0..20 {
        let disk = SimulatedDisk::new(cut, SimulatedOptions::default());
        let repository = repository(&disk);
        for name in ["a", "b", "c"] {
            let name = format!("{name}{cut}");
            here.write(cut * 8192, &[cut as u8 + 1; 4096]);
            here.snapshot(&name);
            create(&repository, &here, &name);
        }
        let all = repository.manifests().unwrap();
        let names = all.iter().map(|manifest| manifest.backup.point.name.clone()).collect::<Vec<_>>();
        assert_eq!(names, ["a", "b", "c"].map(|name| format!("{name}{cut}")));
        assert_eq!(repository.delete(&all[..1]).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(repository.delete(&[all[0].clone(), all[2].clone()]).unwrap_err().kind(), ErrorKind::Busy);
        disk.cut_after(disk.operations() + cut);
        let done = repository.delete(&all[1..]).is_ok();
        let disk = disk.crash();
        let repository = self::repository(&disk);
        let left = repository.manifests().unwrap();
        assert!(left.len() <= 3 && (!done || left.len() == 1));
        for manifest in &left {
            repository.chain(manifest.clone()).unwrap();
        }
        repository.sweep().unwrap();
        assert!(repository.verify(&[], None, &NoProgress).unwrap().problems.is_empty());
        repository.delete(&left).unwrap();
        assert_eq!(repository.list().unwrap(), []);
        assert_eq!(repository.sweep().unwrap(), 0);
        let files = disk.directory().list().unwrap();
        assert_eq!(files.into_iter().filter(|name| name != "lock").collect::<Vec<_>>(), ["repository"]);
    }
}

#[test]
fn encrypted_backups_continue_and_need_their_key() {
    let mut here = Fixture::new(CAPACITY, 12);
    let first = here.snapshot("a");
    let folder = tempfile::tempdir().unwrap();
    let key = Arc::new(Key::create(&folder.path().join("key")).unwrap());
    let other = Arc::new(Key::create(&folder.path().join("other")).unwrap());
    let sealed = CreateOptions { key: Some(&key), ..SMALL_PACKS };
    let disk = SimulatedDisk::new(12, SimulatedOptions::default());
    drop(repository(&disk));
    disk.cut_after(disk.operations() + 30);
    let objects = Arc::new(Folder::of(disk.directory(), "the repository"));
    Repository::open(objects).unwrap().create(&here.outgoing("a"), "vm", false, sealed, &NoProgress).unwrap_err();
    let repository = repository(&disk.crash());
    let create =
        |snapshot: &str, options| repository.create(&here.outgoing(snapshot), "vm", false, options, &NoProgress);
    assert!(create("a", sealed).unwrap().resumed > 0);
    here.write(4096, &[7; 12_288]);
    let second = here.snapshot("b");
    let create =
        |snapshot: &str, options| repository.create(&here.outgoing(snapshot), "vm", false, options, &NoProgress);
    assert_eq!(create("b", SMALL_PACKS).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(create("b", sealed).unwrap().based_on.as_deref(), Some("a"));
    // A backup with another key has all data.
    let full = create("b", CreateOptions { key: Some(&other), ..SMALL_PACKS }).unwrap();
    assert_eq!((full.based_on, full.already), (None, false));
    for (which, content) in [("vm@a", &first), (repository.manifests().unwrap()[1].backup.id.as_str(), &second)] {
        let mut chain = Chain::of(&repository, which, Some(&key)).unwrap().1;
        assert!(content_of(&mut chain) == *content, "{which}");
        for wrong in [None, Some(&other)] {
            assert_eq!(Chain::of(&repository, which, wrong).err().unwrap().kind(), ErrorKind::Invalid);
        }
        assert!(repository.verify(&[which.into()], Some(&key), &NoProgress).unwrap().problems.is_empty());
    }
    // Neither the data nor the index is readable without the key.
    let block = &first[..4096].to_vec();
    let path = folder.path().join("file");
    let source = (&here.outgoing("a"), "vm");
    let options = CreateOptions { level: 1, ..sealed };
    create_file(&path, source, None, options, &NoProgress).unwrap();
    let stored = std::fs::read(&path).unwrap();
    assert!(block.iter().all(|byte| *byte == 0) || !stored.windows(64).any(|part| part == &block[..64]));
    let mut random = Random::new(13);
    for _ in 0..10 {
        std::fs::write(&path, &stored[..random.index(stored.len())]).unwrap();
        create_file(&path, source, None, options, &NoProgress).unwrap();
        assert!(verify_file(&path, Some(&key), &NoProgress).unwrap().problems.is_empty());
        assert_eq!(verify_file(&path, None, &NoProgress).unwrap_err().kind(), ErrorKind::Invalid);
    }
    let mut chain = Chain::new(vec![Box::new(FileLevel::open(&path, Some(&key)).unwrap())], CAPACITY);
    assert!(content_of(&mut chain) == first);
}

#[test]
fn a_backup_that_a_killed_attempt_has_completed_is_durable_when_it_is_reported() {
    let here = Fixture::new(SEGMENT, 16);
    let content = here.snapshot("s");
    for seed in 0..10 {
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        let repository = repository(&disk);
        let made = create(&repository, &here, "s");
        kill_before_the_last_flush(&disk, &repository, &made.id);
        assert!(create(&repository, &here, "s").already);
        let repository = self::repository(&disk.crash());
        let mut chain = Chain::of(&repository, &made.id, None).unwrap().1;
        assert!(content_of(&mut chain) == content, "seed {seed}");
    }
}

#[test]
fn a_file_has_one_writer_and_is_no_pipe() {
    let here = Fixture::new(SEGMENT, 17);
    here.snapshot("s");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let source = (&here.outgoing("s"), "vm");
    let make = |path: &std::path::Path| create_file(path, source, None, SMALL_PACKS, &NoProgress);
    // Another writer has created the file, and has written nothing yet.
    let other = std::fs::File::create_new(&path).unwrap();
    other.try_lock().unwrap();
    assert_eq!(make(&path).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(other.metadata().unwrap().len(), 0);
    drop(other);
    make(&path).unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert_eq!(make(&pipe).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(manifest_of(&pipe).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(FileLevel::open(&pipe, None).err().unwrap().kind(), ErrorKind::Invalid);
}

#[test]
fn packs_without_encryption_are_no_part_of_an_encrypted_backup() {
    let mut here = Fixture::new(SEGMENT, 18);
    let content = here.snapshot("s");
    let folder = tempfile::tempdir().unwrap();
    let key = Arc::new(Key::create(&folder.path().join("key")).unwrap());
    let sealed = CreateOptions { key: Some(&key), ..SMALL_PACKS };
    let repositories = [18, 19].map(|seed| repository(&SimulatedDisk::new(seed, SimulatedOptions::default())));
    let [ours, theirs] = &repositories;
    ours.create(&here.outgoing("s"), "vm", false, sealed, &NoProgress).unwrap();
    here.write(0, &[7; BLOCK as usize]);
    here.snapshot("t");
    ours.create(&here.outgoing("t"), "vm", false, sealed, &NoProgress).unwrap();
    let plain = create(theirs, &here, "t");
    let read = |key| Chain::of(ours, "vm@s", Some(key)).map(|(_, mut chain)| content_of(&mut chain));
    assert!(read(&key).unwrap() == content);
    // The pack is replaced by one with other content, and its record in the manifest is adapted.
    let mut manifest = ours.find("vm@s").unwrap();
    let name = |id: &str| format!("pack-{id}-00000000");
    let length = theirs.objects().length(&name(&plain.id)).unwrap().unwrap();
    let mut pack = theirs.objects().read(&name(&plain.id), 0..length).unwrap();
    let head = Head { backup: manifest.backup.id_bytes().unwrap(), ..Head::decode(&pack).unwrap() };
    pack[..HEAD].copy_from_slice(&head.encode());
    manifest.packs[0] = crate::level::record_of(&head, &pack);
    ours.objects().put(&name(&manifest.backup.id), &pack).unwrap();
    let record = format!("backup-{}", manifest.backup.id);
    ours.objects().put(&record, &manifest.encode().unwrap()).unwrap();
    let (_, mut chain) = Chain::of(ours, "vm@s", Some(&key)).unwrap();
    assert_eq!(chain.plan(0).err().map(|error| error.kind()), Some(ErrorKind::Corrupt));
    assert_eq!(ours.verify(&["vm@s".into()], Some(&key), &NoProgress).unwrap().problems.len(), 1);
    // The backup claims to have no key.
    manifest.backup.key = None;
    ours.objects().put(&record, &manifest.encode().unwrap()).unwrap();
    assert_eq!(Chain::of(ours, "vm@t", Some(&key)).err().map(|error| error.kind()), Some(ErrorKind::Corrupt));
}

#[test]
fn only_damaged_manifests_are_deleted_without_a_check_of_increments() {
    let mut here = Fixture::new(SEGMENT, 20);
    here.snapshot("a");
    let disk = SimulatedDisk::new(20, SimulatedOptions::default());
    let repository = repository(&disk);
    let base = create(&repository, &here, "a");
    here.write(0, &[7; BLOCK as usize]);
    here.snapshot("b");
    create(&repository, &here, "b");
    let name = format!("backup-{}", base.id);
    let good = repository.find("vm@a").unwrap().encode().unwrap();
    let newer = String::from_utf8(good.clone()).unwrap().replacen("lamina backup 1 ", "lamina backup 3 ", 1);
    repository.objects().put(&name, newer.as_bytes()).unwrap();
    assert!(!repository.delete_damaged(&base.id).unwrap());
    assert_eq!(repository.find(&base.id).unwrap_err().kind(), ErrorKind::Unsupported);
    let increment = repository.find("vm@b").unwrap();
    let refused = repository.delete(std::slice::from_ref(&increment)).unwrap_err();
    assert!(refused.to_string().contains("version of lamina"), "{refused}");
    repository.objects().put(&name, &good).unwrap();
    assert!(!repository.delete_damaged(&base.id).unwrap());
    repository.chain(increment).unwrap();
    repository.objects().put(&name, &good[..good.len() / 2]).unwrap();
    assert!(repository.delete_damaged(&base.id).unwrap());
}

#[test]
fn two_commands_make_one_repository() {
    let disk = SimulatedDisk::new(22, SimulatedOptions::default());
    let objects = Arc::new(Folder::of(disk.directory(), "the repository"));
    let lock = objects.lock().unwrap();
    assert_eq!(Repository::open_or_create(objects.clone()).err().map(|error| error.kind()), Some(ErrorKind::Busy));
    assert_eq!(objects.length("repository").unwrap(), None);
    drop(lock);
    let made = Repository::open_or_create(objects.clone()).unwrap();
    assert_eq!(Repository::open_or_create(objects).unwrap().id(), made.id());
}

/// Lists an object that does not exist any more.
struct Late {
    inner: Folder,
    gone: &'static str,
}

impl Objects for Late {
    fn place(&self) -> &str {
        self.inner.place()
    }

    fn put(&self, name: &str, bytes: &[u8]) -> error::Result<()> {
        self.inner.put(name, bytes)
    }

    fn read(&self, name: &str, range: std::ops::Range<u64>) -> error::Result<Vec<u8>> {
        self.inner.read(name, range)
    }

    fn length(&self, name: &str) -> error::Result<Option<u64>> {
        self.inner.length(name)
    }

    fn list(&self) -> error::Result<Vec<String>> {
        let mut names = self.inner.list()?;
        names.push(self.gone.to_owned());
        Ok(names)
    }

    fn remove(&self, name: &str) -> error::Result<()> {
        self.inner.remove(name)
    }

    fn settle(&self) -> error::Result<()> {
        self.inner.settle()
    }

    fn sweep(&self, is_one: &dyn Fn(&str) -> bool) -> error::Result<()> {
        self.inner.sweep(is_one)
    }

    fn lock(&self) -> error::Result<Option<Box<dyn backend::Lock>>> {
        self.inner.lock()
    }
}

#[test]
fn an_unfinished_backup_that_ends_meanwhile_is_not_listed() {
    let here = Fixture::new(SEGMENT, 21);
    here.snapshot("s");
    let disk = SimulatedDisk::new(21, SimulatedOptions::default());
    drop(repository(&disk));
    let inner = Folder::of(disk.directory(), "the repository");
    let late = Late { inner, gone: "unfinished-0f0e0d0c-0b0a-4908-8706-050403020101" };
    let repository = Repository::open(Arc::new(late)).unwrap();
    assert!(repository.unfinished().unwrap().is_empty());
    create(&repository, &here, "s");
    assert_eq!(repository.list().unwrap().len(), 1);
}

/// Cancels work after a number of reports.
struct Impatient(AtomicU64);

impl Progress for Impatient {
    fn cancelled(&self) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err()
    }
}

#[test]
fn cancelled_work_continues_where_it_was() {
    let here = Fixture::new(CAPACITY, 11);
    let content = here.snapshot("s");
    let folder = tempfile::tempdir().unwrap();
    let repository = Repository::open_or_create(Arc::new(Folder::open(folder.path()).unwrap())).unwrap();
    let make = |reports: u64| {
        let progress = Impatient(AtomicU64::new(reports));
        repository.create(&here.outgoing("s"), "vm", false, SMALL_PACKS, &progress)
    };
    let mut attempts = 0;
    let made = loop {
        match make(9) {
            Ok(made) => break made,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}"),
        }
        attempts += 1;
        assert!(attempts < 50);
    };
    assert!(made.resumed > 0, "{made:?}");
    let there = Fixture::empty(CAPACITY);
    let mut attempts = 0;
    loop {
        let (manifest, mut chain) = Chain::of(&repository, "vm", None).unwrap();
        let progress = Impatient(AtomicU64::new(attempts));
        match restore(&there.datastore, &mut chain, (&manifest.backup, false), &options("vm"), &progress) {
            Ok(_) => break,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}"),
        }
        attempts += 1;
        assert!(attempts < 50);
    }
    assert!(there.content_of("vm") == content);
    assert!(attempts > 2);
    // A writer excludes other writers.
    let lock = repository.lock().unwrap();
    assert_eq!(make(1000).unwrap_err().kind(), ErrorKind::Busy);
    drop(lock);
    assert!(make(1000).unwrap().already);
}
