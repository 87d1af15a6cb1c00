//! Backups of machines with two disks: increments, cuts, deletion, rules, encryption.

#![allow(clippy::unwrap_used)]

use crate::testbed::{BLOCK, Fixture, SMALL_PACKS, content_of, kill_before_the_last_flush};
use crate::*;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use disk::transfer::{Outgoing, SEGMENT};
use disk::{NewDisk, NoProgress, Provisioning, SnapshotOptions};
use error::{ErrorKind, Result};
use std::sync::Arc;
use testkit::Random;

const CAPACITY: u64 = SEGMENT + 8192;
const DISKS: [&str; 2] = ["vm", "data"];
const UUID: &str = "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11";

fn repository(disk: &SimulatedDisk) -> Repository {
    Repository::open_or_create(Arc::new(Folder::of(disk.directory(), "the repository"))).unwrap()
}

/// A datastore with the disks of a machine.
fn machine(seed: u64) -> Fixture {
    let fixture = Fixture::new(CAPACITY, seed);
    fixture.datastore.create_disk("data", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    change(&fixture, "data", seed);
    fixture
}

/// Writes a block that depends on the seed.
fn change(fixture: &Fixture, disk: &str, seed: u64) {
    let bytes = Random::new(seed).bytes(BLOCK as usize);
    let device = fixture.datastore.device(disk, false).unwrap();
    device.write(seed % 64 * BLOCK, backend::SharedSlice::copy_of(&bytes), false).unwrap();
}

/// Takes a snapshot of both disks.
fn snapshot(fixture: &Fixture, name: &str) {
    let of = DISKS.map(|disk| (disk.to_owned(), name.to_owned()));
    fixture.datastore.create_snapshots(&of, &SnapshotOptions::default()).unwrap();
}

fn point(snapshot: &str) -> MachinePoint {
    let file = |name: &str, content: Vec<u8>| MachineContent { name: name.into(), content };
    // UEFI variables of more than one chunk.
    let variables: Vec<u8> = (0..1_300_001u32).map(|at| if at < 4000 { (at * 7 % 251) as u8 } else { 0xff }).collect();
    MachinePoint {
        machine: "vm".into(),
        uuid: UUID.into(),
        snapshot: snapshot.into(),
        created: 1_794_900_000,
        consistency: "stopped".into(),
        files: vec![
            file("machine.toml", format!("name = \"vm\"\n# the password of {snapshot}").into_bytes()),
            file("nvram", variables),
        ],
    }
}

fn outgoing(fixture: &Fixture, snapshot: &str) -> Vec<(String, Outgoing)> {
    DISKS.map(|disk| (disk.to_owned(), fixture.datastore.outgoing(disk, snapshot).unwrap())).into()
}

fn attempt(repository: &Repository, fixture: &Fixture, snapshot: &str) -> Result<MachineCreated> {
    let disks = outgoing(fixture, snapshot);
    repository.create_machine(&point(snapshot), &disks, false, SMALL_PACKS, &NoProgress)
}

fn create(repository: &Repository, fixture: &Fixture, snapshot: &str) -> MachineCreated {
    attempt(repository, fixture, snapshot).unwrap()
}

fn is_clean(repository: &Repository) -> bool {
    repository.verify(&[], None, &NoProgress).unwrap().problems.is_empty()
}

/// A backup of a machine has its files and the content of its disks at the snapshot.
fn is_equal(repository: &Repository, which: &str, fixture: &Fixture, snapshot: &str) {
    let StoredMachine { manifest, point: read, snapshots } = repository.machine(which, None).unwrap();
    assert_eq!((read, snapshots), (point(snapshot), vec![snapshot.to_owned(); 2]));
    assert_eq!(manifest.disks.iter().map(|disk| disk.disk.as_str()).collect::<Vec<_>>(), DISKS);
    for disk in &manifest.disks {
        let content = content_of(&mut Chain::of(repository, &disk.backup, None).unwrap().1);
        assert!(content == fixture.content_of(&format!("{}@{snapshot}", disk.disk)), "{}@{snapshot}", disk.disk);
    }
}

#[test]
fn a_machine_is_backed_up_with_increments_of_its_disks_and_found_by_its_name() {
    let here = machine(1);
    let store = SimulatedDisk::new(1, SimulatedOptions::default());
    let repository = repository(&store);
    snapshot(&here, "s0");
    let first = create(&repository, &here, "s0");
    assert!(!first.already && first.disks.iter().all(|disk| disk.based_on.is_none()));
    change(&here, "data", 7);
    snapshot(&here, "s1");
    let second = create(&repository, &here, "s1");
    assert!(second.disks.iter().all(|disk| disk.based_on.as_deref() == Some("s0")), "{second:?}");
    assert_eq!(second.disks.iter().map(|disk| disk.data).collect::<Vec<_>>(), [0, BLOCK]);
    let again = create(&repository, &here, "s1");
    assert_eq!((again.already, &again.id), (true, &second.id));
    for (which, snapshot) in [("vm@s0", "s0"), ("vm", "s1"), ("machine:vm@s0", "s0"), (second.id.as_str(), "s1")] {
        is_equal(&repository, which, &here, snapshot);
    }
    // The disk with the machine's name is told apart.
    let manifest = repository.find("vm").unwrap();
    assert!(manifest.backup.machine.is_none() && manifest.backup.id == second.disks[0].id);
    assert_eq!(repository.find("machine:vm").unwrap().backup.id, second.id);
    assert_eq!(repository.find("machine:data").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(repository.machine(&second.disks[0].id, None).unwrap_err().kind(), ErrorKind::Invalid);
    let error = Chain::of(&repository, &second.id, None).err().unwrap();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("lamina vm backup restore"), "{error}");
    // A disk can still be backed up alone.
    let alone = repository.create(&outgoing(&here, "s1")[0].1, "vm", false, SMALL_PACKS, &NoProgress).unwrap();
    assert!(alone.already);
    let listed = repository.list().unwrap();
    let machines: Vec<&BackupInfo> = listed.iter().filter(|info| info.machine.is_some()).collect();
    assert_eq!((listed.len(), machines.len()), (6, 2));
    assert_eq!(listed.last(), machines.last().copied());
    assert!(listed.iter().all(|info| info.problem.is_none() && info.finished.is_some()));
    assert_eq!(machines[1].capacity, 2 * CAPACITY);
    assert!(machines[1].data > BLOCK && machines[1].stored > second.stored);
    let disks = |info: &BackupInfo| info.machine.clone().unwrap().disks.into_iter().map(|disk| disk.disk);
    assert_eq!(disks(machines[0]).collect::<Vec<_>>(), DISKS);
    assert!(is_clean(&repository));
    let verified = repository.verify(&["machine:vm@s1".into()], None, &NoProgress).unwrap();
    assert_eq!((verified.backups, verified.problems.len()), (5, 0));
    // The snapshots of an imported machine's disks may have other names than the machine's.
    repository.create_machine(&point("other"), &outgoing(&here, "s1"), false, SMALL_PACKS, &NoProgress).unwrap();
    let read = repository.machine("vm@other", None).unwrap();
    assert_eq!((read.point.snapshot.as_str(), read.snapshots), ("other", vec!["s1".to_owned(); 2]));
    // With all data, backups that are increments are not used.
    let full = repository.create_machine(&point("s1"), &outgoing(&here, "s1"), true, SMALL_PACKS, &NoProgress).unwrap();
    assert!(!full.already && full.disks.iter().all(|disk| disk.based_on.is_none()));
}

#[test]
fn a_backup_of_a_machine_that_is_cut_anywhere_is_whole_or_absent_and_continues() {
    let here = machine(3);
    snapshot(&here, "s");
    let (mut absent, mut whole) = (0, 0);
    for seed in 0..30 {
        let mut store = SimulatedDisk::new(seed, SimulatedOptions::default());
        drop(repository(&store));
        let mut random = Random::new(seed);
        for range in [90, 30] {
            store.cut_after(store.operations() + random.below(range));
            let objects = Arc::new(Folder::of(store.directory(), "the repository"));
            let made = Repository::open(objects).and_then(|repository| attempt(&repository, &here, "s"));
            store = store.crash();
            let repository = repository(&store);
            match repository.machine("vm", None) {
                Ok(_) => {
                    whole += 1;
                    is_equal(&repository, "vm", &here, "s");
                }
                Err(error) => {
                    absent += 1;
                    assert!(error.kind() == ErrorKind::NotFound && made.is_err(), "seed {seed}: {error}");
                }
            }
            assert!(is_clean(&repository), "seed {seed}");
        }
        let repository = repository(&store);
        create(&repository, &here, "s");
        is_equal(&repository, "vm", &here, "s");
        assert_eq!(repository.list().unwrap().len(), 3, "seed {seed}");
        assert_eq!(repository.sweep().unwrap(), 0, "seed {seed}");
    }
    assert!(absent > 15 && whole > 7, "{absent} absent, {whole} whole");
}

#[test]
fn a_machine_whose_backup_a_killed_attempt_has_completed_is_durable_when_it_is_reported() {
    let here = machine(4);
    snapshot(&here, "s");
    for seed in 0..10 {
        let store = SimulatedDisk::new(seed, SimulatedOptions::default());
        let repository = repository(&store);
        let made = create(&repository, &here, "s");
        kill_before_the_last_flush(&store, &repository, &made.id);
        assert!(create(&repository, &here, "s").already);
        is_equal(&self::repository(&store.crash()), &made.id, &here, "s");
    }
}

#[test]
fn what_a_machine_needs_is_not_deleted_before_its_backup() {
    let here = machine(5);
    let store = SimulatedDisk::new(5, SimulatedOptions::default());
    let repository = repository(&store);
    snapshot(&here, "s0");
    let first = create(&repository, &here, "s0");
    let find = |which: &str| repository.find(which).unwrap();
    let error = repository.delete(&[find("data@s0")]).unwrap_err();
    assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("'machine:vm@s0' needs it"), "{error}");
    // The backups of its disks are deleted with a machine's backup, except one that is older.
    let both = repository.with_disks(vec![find("machine:vm@s0")]).unwrap();
    assert_eq!(both.len(), 3);
    let mut machine = find("machine:vm@s0");
    machine.backup.begun = u64::MAX;
    assert_eq!(repository.with_disks(vec![machine]).unwrap().len(), 1);
    change(&here, "data", 9);
    snapshot(&here, "s1");
    create(&repository, &here, "s1");
    // The disks of the second backup are based on those of the first.
    let whole = repository.with_disks(vec![find("machine:vm@s0")]).unwrap();
    assert_eq!(repository.delete(&whole).unwrap_err().kind(), ErrorKind::Busy);
    is_equal(&repository, "vm@s0", &here, "s0");
    // The rules apply to the machine, and keep what its kept backup needs.
    let keep: Keep = "last=1".parse().unwrap();
    let reasons = |pruned: &Pruned| -> Vec<(String, String)> {
        let all = pruned.backups.iter();
        all.map(|judged| (judged.backup.id.clone(), judged.reasons.join(" "))).collect()
    };
    let pruned = repository.prune(&keep, false).unwrap();
    assert_eq!(pruned.deleted, 1, "{:?}", reasons(&pruned));
    assert_eq!(repository.find("machine:vm@s0").unwrap_err().kind(), ErrorKind::NotFound);
    is_equal(&repository, "vm", &here, "s1");
    assert_eq!(repository.find(&first.disks[1].id).unwrap().backup.point.name, "s0");
    // A newer backup of one disk alone does not displace the one that the machine needs.
    change(&here, "data", 11);
    here.datastore.create_snapshots(&[("data".into(), "s2".into())], &SnapshotOptions::default()).unwrap();
    let alone = here.datastore.outgoing("data", "s2").unwrap();
    repository.create(&alone, "data", true, SMALL_PACKS, &NoProgress).unwrap();
    let pruned = repository.prune(&keep, false).unwrap();
    let of = |id: &str| reasons(&pruned).into_iter().find(|(known, _)| known == id).unwrap().1;
    assert_eq!((pruned.deleted, of(&find("data@s1").backup.id).as_str()), (0, "machine"));
    is_equal(&repository, "vm", &here, "s1");
    assert!(is_clean(&repository));
    // A cut deletion leaves a machine that is whole, or none.
    let whole = repository.with_disks(vec![find("machine:vm@s1")]).unwrap();
    store.cut_after(store.operations() + 3);
    repository.delete(&whole).unwrap_err();
    let store = store.crash();
    let repository = self::repository(&store);
    if repository.machine("vm", None).is_ok() {
        is_equal(&repository, "vm", &here, "s1");
    }
    repository.sweep().unwrap();
    assert!(is_clean(&repository));
}

#[test]
fn a_machine_without_the_backup_of_a_disk_is_reported_and_not_read() {
    let here = machine(6);
    let store = SimulatedDisk::new(6, SimulatedOptions::default());
    let repository = repository(&store);
    snapshot(&here, "s");
    let made = create(&repository, &here, "s");
    repository.objects().remove(&format!("backup-{}", made.disks[1].id)).unwrap();
    let error = repository.machine("vm", None).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("'data' is missing"), "{error}");
    assert!(!is_clean(&repository));
    let listed = repository.list().unwrap();
    let machine = listed.iter().find(|info| info.machine.is_some()).unwrap();
    assert!(machine.problem.as_ref().unwrap().contains("'data'"), "{machine:?}");
    // The next attempt backs the disk up again.
    let again = create(&repository, &here, "s");
    assert!(!again.already && again.disks[0].already && !again.disks[1].already);
    is_equal(&repository, &again.id, &here, "s");
}

#[test]
fn the_files_of_an_encrypted_machine_need_the_key() {
    let here = machine(8);
    snapshot(&here, "s");
    let folder = tempfile::tempdir().unwrap();
    let key = Arc::new(Key::create(&folder.path().join("key")).unwrap());
    let place = folder.path().join("repository");
    let repository = Repository::open_or_create(Arc::new(Folder::open_or_create(&place).unwrap())).unwrap();
    let sealed = CreateOptions { key: Some(&key), ..SMALL_PACKS };
    let disks = outgoing(&here, "s");
    let made = repository.create_machine(&point("s"), &disks, false, sealed, &NoProgress).unwrap();
    assert_eq!(repository.machine("vm", Some(&key)).unwrap().point, point("s"));
    assert_eq!(repository.machine("vm", None).unwrap_err().kind(), ErrorKind::Invalid);
    let stored = std::fs::read(place.join(format!("pack-{}-00000000", made.id))).unwrap();
    assert!(!stored.windows(8).any(|part| part == b"password"));
    let plain = repository.create_machine(&point("s"), &disks, false, SMALL_PACKS, &NoProgress);
    assert_eq!(plain.unwrap_err().kind(), ErrorKind::Invalid);
    assert!(repository.verify(&[], Some(&key), &NoProgress).unwrap().problems.is_empty());
}

#[test]
fn one_command_at_a_time_backs_up_a_machine_and_files_that_are_too_long_are_refused() {
    let here = machine(10);
    let store = SimulatedDisk::new(10, SimulatedOptions::default());
    let repository = repository(&store);
    snapshot(&here, "s");
    let lock = repository.lock().unwrap();
    assert_eq!(attempt(&repository, &here, "s").unwrap_err().kind(), ErrorKind::Busy);
    drop(lock);
    let mut point = point("s");
    point.files[1].content.resize(FILES_MAX as usize, 0);
    let refused = repository.create_machine(&point, &outgoing(&here, "s"), false, SMALL_PACKS, &NoProgress);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(repository.list().unwrap(), []);
    // The bytes of files are digits in requests.
    let text = serde_json::to_string(&point.files[0]).unwrap();
    assert_eq!(serde_json::from_str::<MachineContent>(&text).unwrap(), point.files[0]);
    assert_eq!(format!("{:?}", point.files[0]), format!("machine.toml of {} bytes", point.files[0].content.len()));
    for wrong in ["1", "1g", "\u{e9}"] {
        let text = format!("{{\"name\":\"a\",\"content\":\"{wrong}\"}}");
        assert!(serde_json::from_str::<MachineContent>(&text).is_err(), "{wrong}");
    }
}
