//! Migrations between all formats, with snapshots, while clients write and verify.

#![allow(clippy::unwrap_used)]

#[path = "../src/testbed.rs"]
mod testbed;

use backend::SharedSlice;
use disk::migrate::MigrateOptions;
use disk::*;
use error::{Error, ErrorKind};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use testkit::Random;

const CAPACITY: usize = 6 << 20;
/// The formats, with the provisioning types of native disks.
const FORMATS: [(&str, Provisioning); 9] = [
    ("native", Provisioning::Thin),
    ("thin", Provisioning::Thin),
    ("sesparse", Provisioning::Thin),
    ("vsansparse", Provisioning::Thin),
    ("vmfssparse", Provisioning::Thin),
    ("zeroedthick", Provisioning::Thin),
    ("native", Provisioning::ZeroedThick),
    ("monolithicsparse", Provisioning::Thin),
    ("2gbflat", Provisioning::Thin),
];

fn open(path: &Path) -> Arc<Datastore> {
    Datastore::open(path, testbed::options(QueueChoice::Threads)).unwrap()
}

fn made(path: &Path) -> Arc<Datastore> {
    Datastore::init(path, InitOptions { journal_size: 8 << 20 }).unwrap();
    open(path)
}

fn options(format: (&str, Provisioning)) -> MigrateOptions {
    MigrateOptions { format: format.0.parse().unwrap(), provisioning: format.1, delta: None }
}

fn write(device: &dyn Device, model: &mut [u8], offset: u64, bytes: &[u8]) {
    device.write(offset, SharedSlice::copy_of(bytes), false).unwrap();
    model[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
}

fn scribble(device: &dyn Device, model: &mut [u8], random: &mut Random, times: u64) {
    for _ in 0..times {
        let align = [1, 512, 4096][random.below(3) as usize];
        let length = (1 + random.below(96 << 10)).next_multiple_of(align);
        let offset = random.below(model.len() as u64 - length) / align * align;
        let part = offset as usize..(offset + length) as usize;
        match random.below(6) {
            0 => {
                device.discard(offset, length, false).unwrap();
                model[part].fill(0);
            }
            1 => {
                device.write_zeroes(offset, length, true, false).unwrap();
                model[part].fill(0);
            }
            _ => {
                let bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
                write(device, model, offset, &bytes);
            }
        }
    }
}

/// Expected content of a disk and its snapshots.
struct Model {
    head: Vec<u8>,
    snapshots: BTreeMap<String, Vec<u8>>,
}

/// A disk with the tree `s1 - (s2 - s3), (s4 - head)`.
fn disk_with_tree(datastore: &Datastore, name: &str, format: (&str, Provisioning), seed: u64) -> Model {
    let new =
        NewDisk { capacity: CAPACITY as u64, provisioning: format.1, format: format.0.parse().unwrap(), delta: None };
    datastore.create_disk(name, &new, &NoProgress).unwrap();
    let mut model = Model { head: vec![0; CAPACITY], snapshots: BTreeMap::new() };
    let mut random = Random(seed);
    for step in ["s1", "s2", "s3", "", "s4"] {
        if step.is_empty() {
            datastore.revert(name, "s1").unwrap();
            model.head = model.snapshots["s1"].clone();
            continue;
        }
        let device = datastore.device(name, false).unwrap();
        scribble(&*device, &mut model.head, &mut random, 25);
        device.flush().unwrap();
        datastore.create_snapshots(&[(name.into(), step.into())], &SnapshotOptions::default()).unwrap();
        model.snapshots.insert(step.into(), model.head.clone());
    }
    let device = datastore.device(name, false).unwrap();
    scribble(&*device, &mut model.head, &mut random, 10);
    model
}

fn check(datastore: &Datastore, name: &str, model: &Model, what: &str) {
    let head = datastore.device(name, true).unwrap();
    assert!(head.read(0, CAPACITY).unwrap() == model.head, "{what}: head");
    for (snapshot, bytes) in &model.snapshots {
        let device = datastore.device(&format!("{name}@{snapshot}"), true).unwrap();
        assert!(device.read(0, CAPACITY).unwrap() == *bytes, "{what}: {snapshot}");
    }
    let tree = datastore.snapshots(Some(name)).unwrap();
    let found: BTreeMap<_, _> = tree.iter().map(|s| (s.name.as_str(), s.parent.as_deref())).collect();
    let wanted = [("s1", None), ("s2", Some("s1")), ("s3", Some("s2")), ("s4", Some("s1"))];
    assert_eq!(found, BTreeMap::from(wanted), "{what}");
    assert_eq!(tree.iter().filter(|s| s.current).map(|s| s.name.as_str()).collect::<Vec<_>>(), ["s4"], "{what}");
}

#[test]
fn limits_concern_the_clients_of_a_disk_that_has_a_new_uuid() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let datastore = made(&folder.path().join("ds"));
    let quota = |bytes| SettingsChange {
        limits: LimitsChange { quota: Some(bytes), reservation: None },
        ..SettingsChange::default()
    };
    let new = NewDisk::native(CAPACITY as u64, Provisioning::Thin);
    datastore.create_disk_with("a", &new, &quota(64 << 10), &NoProgress).unwrap();
    let client = datastore.device("a", false).unwrap();
    let write = |offset: u64| {
        let written = client.write(offset, SharedSlice::copy_of(&[7; 64 << 10]), false);
        written.map_err(|error| error.kind())
    };
    assert_eq!(write(0), Ok(()));
    let mut uuid = datastore.disk("a").unwrap().uuid;
    for format in [FORMATS[1], FORMATS[2]] {
        let before = std::mem::replace(&mut uuid, datastore.migrate("a", &options(format), &NoProgress).unwrap().uuid);
        assert_ne!(before, uuid);
        assert_eq!(write(1 << 20), Err(ErrorKind::NoSpace), "{format:?}");
    }
    datastore.edit_disk("a", &quota(256 << 10)).unwrap();
    assert_eq!(write(1 << 20), Ok(()));
    drop(client);
    datastore.close().unwrap();
}

#[test]
fn every_format_moves_to_every_other_with_its_snapshots_under_a_client() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("ds");
    let datastore = made(&path);
    let mut model = disk_with_tree(&datastore, "a", FORMATS[0], 7);
    check(&datastore, "a", &model, "as made");
    let uuid = datastore.disk("a").unwrap().uuid;
    let times = || datastore.snapshots(Some("a")).unwrap().into_iter().map(|s| (s.name, s.created)).collect::<Vec<_>>();
    let taken = times();
    let mut moves = Vec::new();
    for (index, from) in FORMATS.iter().enumerate() {
        for to in &FORMATS[index + 1..] {
            moves.extend([*to, *from]);
        }
        moves.extend(FORMATS.get(index + 1));
    }
    let client = datastore.device("a", false).unwrap();
    let mut random = Random(11);
    let mut now = FORMATS[0];
    for (number, to) in moves.into_iter().enumerate() {
        let what = format!("{number}: {now:?} to {to:?}");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                // The client connected before the first migration, and stays connected.
                while !stop.load(Ordering::Relaxed) {
                    scribble(&*client, &mut model.head, &mut random, 1);
                    let at = random.below(CAPACITY as u64 - 9000);
                    let part = at as usize..at as usize + 9000;
                    assert!(client.read(at, 9000).unwrap() == model.head[part], "{what}");
                    if random.below(5) == 0 {
                        client.flush().unwrap();
                    }
                }
            });
            let moved = datastore.migrate("a", &options(to), &NoProgress);
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            moved.unwrap_or_else(|error| panic!("{what}: {error}"));
        });
        let info = datastore.disk("a").unwrap();
        assert_eq!((info.clients, info.snapshots), (1, 4), "{what}");
        check(&datastore, "a", &model, &what);
        assert_eq!(times(), taken, "{what}");
        now = to;
    }
    drop(client);
    let _ = uuid;
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    check(&datastore, "a", &model, "opened again");
    assert_eq!(datastore.disks().unwrap().len(), 1);
    let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, vec![]);
    let left: Vec<_> = std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("migration-")), "{left:?}");
}

/// A progress that is cancelled at a given call.
struct StopAt(AtomicU64);

impl Progress for StopAt {
    fn update(&self, _done: u64, _total: u64) {}
    fn cancelled(&self) -> bool {
        self.0.fetch_sub(1, Ordering::SeqCst) <= 1
    }
}

#[test]
fn a_stopped_migration_leaves_the_disk_unchanged() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("ds");
    let datastore = made(&path);
    let mut random = Random(3);
    for (number, from) in [FORMATS[0], FORMATS[1]].into_iter().enumerate() {
        let name = format!("d{number}");
        let mut model = disk_with_tree(&datastore, &name, from, 9);
        for to in [FORMATS[2], FORMATS[6], FORMATS[0]] {
            for question in [1, 2, 4, 9, 30] {
                let client = datastore.device(&name, false).unwrap();
                let error = match datastore.migrate(&name, &options(to), &StopAt(AtomicU64::new(question))) {
                    Err(error) => error,
                    Ok(_) => panic!("{name} to {to:?} did not stop at question {question}"),
                };
                assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
                scribble(&*client, &mut model.head, &mut random, 3);
                check(&datastore, &name, &model, &format!("{name} {to:?} stopped at {question}"));
            }
        }
    }
    assert_eq!(datastore.disks().unwrap().len(), 2);
    datastore.close().unwrap();
    let images: Vec<_> = std::fs::read_dir(path.join("images")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(images, ["d1"]);
}

#[test]
fn a_disk_under_migration_refuses_other_operations() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let datastore = made(&folder.path().join("ds"));
    let _model = disk_with_tree(&datastore, "a", FORMATS[0], 5);
    let slow = options(FORMATS[2]);
    let stop = AtomicBool::new(false);
    let begun = AtomicBool::new(false);
    struct Stop<'a>(&'a AtomicBool, &'a AtomicBool);
    impl Progress for Stop<'_> {
        fn update(&self, _done: u64, _total: u64) {}
        fn cancelled(&self) -> bool {
            self.1.store(true, Ordering::SeqCst);
            self.0.load(Ordering::SeqCst)
        }
        fn rate(&self) -> u64 {
            200 << 10
        }
    }
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| datastore.migrate("a", &slow, &Stop(&stop, &begun)));
        while !begun.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let refused = datastore.resize_disk("a", 16 << 20, false).unwrap_err();
        assert!(refused.to_string().contains("migrated"), "{refused}");
        let busy = |error: Error| {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            assert!(error.to_string().contains("migrated"), "{error}");
        };
        let options = SnapshotOptions::default();
        busy(datastore.create_snapshots(&[("a".into(), "s9".into())], &options).unwrap_err());
        busy(datastore.delete_snapshot("a", "s2", None, &NoProgress).unwrap_err());
        busy(datastore.delete_disk("a", false).unwrap_err());
        busy(datastore.rename_disk("a", "b").unwrap_err());
        busy(datastore.revert("a", "s1").unwrap_err());
        busy(datastore.clone_linked("a", &Point::Head, &["c".into()], &NoProgress).unwrap_err());
        busy(datastore.migrate("a", &slow, &NoProgress).unwrap_err());
        stop.store(true, Ordering::SeqCst);
        assert_eq!(moving.join().unwrap().unwrap_err().kind(), ErrorKind::Interrupted);
    });
    datastore.create_snapshots(&[("a".into(), "s9".into())], &SnapshotOptions::default()).unwrap();
}

#[test]
fn a_disk_moves_to_another_datastore_and_back() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (here, there) = (folder.path().join("here"), folder.path().join("there"));
    let datastore = made(&here);
    Datastore::init(&there, InitOptions { journal_size: 8 << 20 }).unwrap();
    let mut model = disk_with_tree(&datastore, "a", FORMATS[0], 5);
    let client = datastore.device("a", false).unwrap();
    let mut random = Random(17);
    let info = datastore.migrate_away("a", &options(FORMATS[3]), &there, &NoProgress).unwrap();
    assert_eq!(info.name, "a");
    assert_eq!(datastore.disk("a").unwrap_err().kind(), ErrorKind::NotFound);
    scribble(&*client, &mut model.head, &mut random, 5);
    client.flush().unwrap();
    assert!(client.read(0, CAPACITY).unwrap() == model.head);
    drop(client);
    datastore.close().unwrap();
    drop(datastore);
    // The thread that watches the migrated clients keeps the datastore open until it notices that they have left.
    let begun = std::time::Instant::now();
    let other = loop {
        match Datastore::open(&there, testbed::options(QueueChoice::Threads)) {
            Err(error) if error.kind() == ErrorKind::Busy && begun.elapsed() < Duration::from_secs(60) => {
                std::thread::sleep(Duration::from_millis(50));
            }
            opened => break opened.unwrap(),
        }
    };
    check(&other, "a", &model, "there");
    other.migrate_away("a", &options(FORMATS[0]), &here, &NoProgress).unwrap();
    other.close().unwrap();
    drop(other);
    let datastore = open(&here);
    check(&datastore, "a", &model, "back");
    let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, vec![]);
}

/// A folder with a VMware disk and its snapshots, as on a VMware host. Returns the newest image and the expected
/// content.
fn host_folder(path: &Path, seed: u64) -> (std::path::PathBuf, Model) {
    // lamina creates the files, which are then used like those of another program.
    let datastore = made(&path.join("maker"));
    let model = disk_with_tree(&datastore, "web", FORMATS[1], seed);
    datastore.close().unwrap();
    drop(datastore);
    let host = path.join("host");
    std::fs::rename(path.join("maker/images/web"), &host).unwrap();
    let record = std::fs::read_to_string(host.join("lamina.disk")).unwrap();
    let record: serde_json::Value = serde_json::from_str(record.split_once('\n').unwrap().1).unwrap();
    let nodes = record["nodes"].as_array().unwrap();
    let head = nodes.iter().find(|node| node["id"] == record["head"]).unwrap()["descriptor"].as_str().unwrap();
    std::fs::remove_file(host.join("lamina.disk")).unwrap();
    (host.join(head), model)
}

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| (path.display().to_string(), std::fs::read(&path).unwrap())).collect()
}

fn import(path: &Path, way: disk::migrate::ImportMode, rate: u64) -> disk::migrate::ImportOptions {
    disk::migrate::ImportOptions {
        path: path.into(),
        format: None,
        way,
        target: options(FORMATS[0]),
        permitted: Vec::new(),
        force_parent: false,
        replay_journal: false,
        rate,
        resolved: false,
    }
}

#[test]
fn a_vmware_folder_is_imported_with_its_snapshots_by_copy_and_in_place() {
    use disk::migrate::ImportMode;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (head, mut model) = host_folder(folder.path(), 31);
    let before = contents(head.parent().unwrap());
    let path = folder.path().join("ds");
    let datastore = made(&path);
    let info = datastore.import("copy", &import(&head, ImportMode::Copy, 0), &NoProgress).unwrap();
    assert_eq!(info.format, "native");
    check(&datastore, "copy", &model, "copied");
    let stopped = datastore.import("no", &import(&head, ImportMode::Copy, 0), &StopAt(AtomicU64::new(3)));
    assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Interrupted);
    assert_eq!(datastore.disk("no").unwrap_err().kind(), ErrorKind::NotFound);
    datastore.import("place", &import(&head, ImportMode::InPlace, 0), &NoProgress).unwrap();
    check(&datastore, "place", &model, "in place");
    let device = datastore.device("place", false).unwrap();
    scribble(&*device, &mut model.head, &mut Random(4), 20);
    drop(device);
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    check(&datastore, "place", &model, "imported in place, after reopening");
    datastore.migrate("place", &options(FORMATS[2]), &NoProgress).unwrap();
    check(&datastore, "place", &model, "independent");
    assert!(contents(head.parent().unwrap()) == before, "the host's files are unchanged");
}

#[test]
fn a_disk_with_several_root_snapshots_moves_between_formats() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let datastore = made(&folder.path().join("ds"));
    datastore.create_disk("web", &NewDisk::native(CAPACITY as u64, Provisioning::Thin), &NoProgress).unwrap();
    let (mut head, mut random) = (vec![0; CAPACITY], Random(8));
    let take = |name: &str| {
        datastore.create_snapshots(&[("web".into(), name.into())], &SnapshotOptions::default()).unwrap();
    };
    scribble(&*datastore.device("web", false).unwrap(), &mut head, &mut random, 20);
    take("first");
    scribble(&*datastore.device("web", false).unwrap(), &mut head, &mut random, 20);
    take("zeros-of-a-migration");
    let kept = head.clone();
    // Deletes the common parent of another snapshot and the head.
    datastore.revert("web", "first").unwrap();
    datastore.delete_snapshot("web", "first", None, &NoProgress).unwrap();
    let head = datastore.device("web", true).unwrap().read(0, CAPACITY).unwrap().to_vec();
    assert!(head != kept);
    for format in [FORMATS[1], FORMATS[2], FORMATS[3], FORMATS[0]] {
        datastore.migrate("web", &options(format), &NoProgress).unwrap();
        assert!(datastore.device("web", true).unwrap().read(0, CAPACITY).unwrap() == head[..], "{format:?}");
        let snapshot = datastore.device("web@zeros-of-a-migration", true).unwrap();
        assert!(snapshot.read(0, CAPACITY).unwrap() == kept[..], "{format:?}");
        assert_eq!(datastore.snapshots(Some("web")).unwrap().len(), 1, "{format:?}");
    }
}

#[test]
fn a_file_that_is_not_an_image_is_not_imported_as_a_raw_disk() {
    use disk::convert::SourceFormat;
    use disk::migrate::{ImportMode, ImportOptions};
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let datastore = made(&folder.path().join("ds"));
    let put = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).unwrap();
        folder.path().join(name)
    };
    let mut archive = vec![0; 10_240];
    archive[257..262].copy_from_slice(b"ustar");
    let (damaged, text) = ([&b"KEMV"[..], &[1; 4092]].concat(), [b'x'; 1024]);
    let cases: [(&str, &[u8], &str); 5] = [
        ("web.ova", &archive, "lamina convert"),
        ("passwd", &text, "--from raw"),
        ("web.vmx", &text, "--from raw"),
        ("web.vmdk", &damaged, "damaged"),
        ("odd.img", &text[..1023], "1023 bytes"),
    ];
    for (name, bytes, says) in cases {
        let path = put(name, bytes);
        for way in [ImportMode::Copy, ImportMode::InPlace, ImportMode::Live] {
            let error = datastore.import("web", &import(&path, way, 0), &NoProgress).unwrap_err();
            assert!(error.to_string().contains(says), "{name} {way:?}: {error}");
            assert_eq!(datastore.disk("web").unwrap_err().kind(), ErrorKind::NotFound, "{name} {way:?}");
        }
    }
    // The file name suffix `.img`, or the format that the user states, is sufficient to import a raw disk.
    let content = [7; 8192];
    for (name, format) in [("web.img", None), ("web.bin", Some(SourceFormat::Raw))] {
        let path = put(name, &content);
        for way in [ImportMode::Copy, ImportMode::InPlace, ImportMode::Live] {
            let info =
                datastore.import("web", &ImportOptions { format, ..import(&path, way, 0) }, &NoProgress).unwrap();
            assert_eq!(
                info.image.map(|image| image.importing),
                match way {
                    ImportMode::Copy => None,
                    _ => Some(way == ImportMode::Live),
                }
            );
            assert!(datastore.device("web", true).unwrap().read(0, 8192).unwrap() == content[..], "{name} {way:?}");
            datastore.delete_disk("web", false).unwrap();
        }
    }
}

#[test]
fn a_live_import_is_usable_at_once_and_continues_after_an_interruption() {
    use disk::migrate::ImportMode;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (head, mut model) = host_folder(folder.path(), 37);
    let before = contents(head.parent().unwrap());
    let path = folder.path().join("ds");
    let mut datastore = made(&path);
    datastore.import("web", &import(&head, ImportMode::Live, 1 << 20), &NoProgress).unwrap();
    let mut random = Random(8);
    for round in 0..3 {
        datastore.start_imports();
        let device = datastore.device("web", false).unwrap();
        for _ in 0..10 {
            scribble(&*device, &mut model.head, &mut random, 2);
            assert!(device.read(0, CAPACITY).unwrap() == model.head, "round {round}");
        }
        let busy = datastore.create_snapshots(&[("web".into(), "new".into())], &SnapshotOptions::default());
        assert_eq!(busy.unwrap_err().kind(), ErrorKind::Busy);
        device.flush().unwrap();
        drop(device);
        datastore.close().unwrap();
        drop(datastore);
        datastore = open(&path);
        check(&datastore, "web", &model, &format!("round {round}, opened again"));
    }
    datastore.start_imports();
    let device = datastore.device("web", false).unwrap();
    let begun = std::time::Instant::now();
    while datastore.disk("web").unwrap().format != "native" {
        scribble(&*device, &mut model.head, &mut random, 1);
        assert!(begun.elapsed() < Duration::from_secs(120));
    }
    scribble(&*device, &mut model.head, &mut random, 5);
    device.flush().unwrap();
    drop(device);
    check(&datastore, "web", &model, "native");
    assert!(contents(head.parent().unwrap()) == before, "the host's files are unchanged");
    datastore.close().unwrap();
    drop(datastore);
    let datastore = open(&path);
    check(&datastore, "web", &model, "native, opened again");
    assert_eq!(datastore.status().unwrap().disks, 1, "the overlay above the images is removed");
}

/// Otherwise a machine could not be started on the disk before all blocks are copied.
#[test]
fn a_live_import_is_no_client_of_its_disk() {
    use disk::migrate::ImportMode;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (head, _) = host_folder(folder.path(), 37);
    let datastore = made(&folder.path().join("ds"));
    // At this rate the background copy would take an hour.
    datastore.import("web", &import(&head, ImportMode::Live, 4 << 10), &NoProgress).unwrap();
    datastore.start_imports();
    let begun = std::time::Instant::now();
    while !datastore.has_import_running("web") {
        assert!(begun.elapsed() < Duration::from_secs(60), "the import does not begin");
    }
    for round in 0..20 {
        assert_eq!(datastore.disks().unwrap()[0].clients, 0, "round {round}");
        std::thread::sleep(Duration::from_millis(10));
    }
    let device = datastore.device("web", true).unwrap();
    assert_eq!(datastore.disks().unwrap()[0].clients, 1);
    drop(device);
    datastore.close().unwrap();
}

#[test]
fn a_disk_is_deleted_while_its_live_import_runs_and_the_import_continues_if_it_cannot_be() {
    use disk::migrate::ImportMode;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (head, model) = host_folder(folder.path(), 37);
    let before = contents(head.parent().unwrap());
    let path = folder.path().join("ds");
    let datastore = made(&path);
    // At this rate the background copy would take an hour.
    datastore.import("web", &import(&head, ImportMode::Live, 4 << 10), &NoProgress).unwrap();
    datastore.start_imports();
    let device = datastore.device("web", false).unwrap();
    assert_eq!(datastore.delete_disk("web", false).unwrap_err().kind(), ErrorKind::Busy);
    assert!(datastore.has_import_running("web"), "the import begins again");
    assert!(device.read(0, CAPACITY).unwrap() == model.head);
    drop(device);
    let begun = std::time::Instant::now();
    datastore.delete_disk("web", false).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(!datastore.has_import_running("web"));
    assert_eq!(datastore.status().unwrap().disks, 0);
    assert!(contents(head.parent().unwrap()) == before, "the host's files are unchanged");
    datastore.close().unwrap();
    drop(datastore);
    assert_eq!(open(&path).status().unwrap().disks, 0);
}

#[test]
fn checks_overridden_at_an_import_are_skipped_at_later_openings() {
    use disk::migrate::ImportMode;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (head, model) = host_folder(folder.path(), 41);
    // Changes the base's content ID, as a write to the base would.
    let base = head.with_file_name("web.vmdk");
    let text = std::fs::read_to_string(&base).unwrap();
    let (before, rest) = text.split_once("\nCID=").unwrap();
    std::fs::write(&base, format!("{before}\nCID=0badcafe{}", &rest[8..])).unwrap();
    let path = folder.path().join("ds");
    let mut datastore = made(&path);
    for (name, way) in [("place", ImportMode::InPlace), ("live", ImportMode::Live)] {
        let options = import(&head, way, 0);
        assert_eq!(datastore.import(name, &options, &NoProgress).unwrap_err().kind(), ErrorKind::Corrupt);
        let forced = disk::migrate::ImportOptions { force_parent: true, ..options };
        datastore.import(name, &forced, &NoProgress).unwrap();
        datastore.close().unwrap();
        drop(datastore);
        datastore = open(&path);
        check(&datastore, name, &model, name);
    }
}

#[test]
fn an_image_of_64_tib_that_is_almost_empty_is_imported_without_reading_its_holes() {
    use disk::migrate::ImportMode;
    const SIZE: u64 = 64 << 40;
    const PART: u64 = 1 << 20;
    const HOLES: u64 = 1 << 40;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut random = Random(9);
    let mut parts = ["a.bin", "b.bin"].map(|name| (name, vec![0; PART as usize]));
    for (name, bytes) in &mut parts {
        bytes.iter_mut().for_each(|byte| *byte = random.next() as u8);
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    std::fs::File::create(folder.path().join("holes.bin")).unwrap().set_len(HOLES).unwrap();
    let zeros = SIZE - HOLES - 2 * PART;
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"custom\"\n\
         RW {} FLAT \"a.bin\" 0\nRW {} ZERO\nRW {} FLAT \"holes.bin\" 0\nRW {} FLAT \"b.bin\" 0\n",
        PART / 512,
        zeros / 512,
        HOLES / 512,
        PART / 512
    );
    let path = folder.path().join("web.vmdk");
    std::fs::write(&path, text).unwrap();
    let datastore = made(&folder.path().join("ds"));
    for (name, way) in [("copy", ImportMode::Copy), ("live", ImportMode::Live)] {
        datastore.import(name, &import(&path, way, 0), &NoProgress).unwrap();
        datastore.start_imports();
        let begun = std::time::Instant::now();
        while datastore.disk(name).unwrap().format != "native" {
            assert!(begun.elapsed() < Duration::from_secs(120), "{name}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let device = datastore.device(name, true).unwrap();
        assert_eq!(device.capacity(), SIZE);
        let [(_, first), (_, last)] = &parts;
        assert!(device.read(0, PART as usize).unwrap() == *first, "{name}");
        assert!(device.read(SIZE - PART, PART as usize).unwrap() == *last, "{name}");
        let extents: Vec<(u64, Allocation)> =
            device.status(0, SIZE, 10).unwrap().iter().map(|extent| (extent.length, extent.allocation)).collect();
        let expected = [(PART, Allocation::Data), (zeros + HOLES, Allocation::Hole), (PART, Allocation::Data)];
        assert_eq!(extents, expected, "{name}");
    }
    let cut = datastore.import("no", &import(&path, ImportMode::Copy, 0), &StopAt(AtomicU64::new(1)));
    assert_eq!(cut.unwrap_err().kind(), ErrorKind::Interrupted);
    assert_eq!(datastore.disk("no").unwrap_err().kind(), ErrorKind::NotFound);
}
