//! Datastores on a medium without folders. These tests define and register the medium; lamina itself has no code for
//! it.

#![allow(clippy::unwrap_used)]

#[path = "../../backend/tests/conformance/memory.rs"]
#[allow(dead_code, reason = "the conformance tests use all of it")]
mod memory;
#[path = "../src/testbed.rs"]
mod testbed;

use backend::SharedSlice;
use disk::location::{Scheme, register};
use disk::migrate::MigrateOptions;
use disk::salvage::{Extract, SalvageRequest};
use disk::*;
use error::ErrorKind;
use memory::MemoryMedium;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, Once};

const CAPACITY: u64 = 16 << 20;
const BLOCK: usize = 4096;

static MEDIA: Mutex<BTreeMap<String, MemoryMedium>> = Mutex::new(BTreeMap::new());
static REGISTERED: Once = Once::new();

/// Calls `work` with the medium of that name. The first call creates the medium.
fn with_medium<T>(name: &str, work: impl FnOnce(&MemoryMedium) -> T) -> T {
    let mut media = MEDIA.lock().unwrap();
    work(media.entry(name.to_owned()).or_insert_with(|| MemoryMedium::new(1)))
}

fn scheme() -> Scheme {
    Scheme {
        name: "memory",
        form: "memory:NAME",
        accepts: |name| !name.is_empty(),
        connect: Box::new(|name| Ok(with_medium(name, MemoryMedium::connect))),
    }
}

fn at(text: &str) -> Location {
    REGISTERED.call_once(|| register(scheme()).unwrap());
    Location::parse(text).unwrap()
}

const INIT: InitOptions = InitOptions { journal_size: 4 << 20 };

fn options() -> OpenOptions {
    testbed::options(QueueChoice::Auto)
}

fn made(location: &Location) -> Arc<Datastore> {
    Datastore::init(location, INIT).unwrap();
    Datastore::open(location, options()).unwrap()
}

fn create(datastore: &Datastore, disk: &str) {
    datastore.create_disk(disk, &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
}

fn write(datastore: &Datastore, disk: &str, byte: u8) {
    let device = datastore.device(disk, false).unwrap();
    device.write(BLOCK as u64, SharedSlice::copy_of(&[byte; 2 * BLOCK]), false).unwrap();
    device.flush().unwrap();
}

/// The byte that [`write`] wrote to the disk.
fn byte(datastore: &Datastore, device: &str) -> u8 {
    let bytes = datastore.device(device, true).unwrap().read(0, 4 * BLOCK).unwrap();
    let byte = bytes[BLOCK];
    assert!(bytes[BLOCK..3 * BLOCK].iter().all(|other| *other == byte));
    assert!(bytes[..BLOCK].iter().chain(&bytes[3 * BLOCK..]).all(|other| *other == 0));
    byte
}

fn assert_clean(datastore: &Datastore) {
    let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!((report.findings, report.leaked), (vec![], 0));
}

fn to_native() -> MigrateOptions {
    MigrateOptions { format: "native".parse().unwrap(), provisioning: Provisioning::Thin, delta: None }
}

#[test]
fn a_datastore_is_created_opened_and_used_by_its_location() {
    let location = at("memory:first");
    assert_eq!((location.to_string().as_str(), location.local_path()), ("memory:first", None));
    assert_eq!((location.absolute().unwrap(), location.resolved().unwrap()), (location.clone(), location.clone()));

    let missing = Datastore::open(&location, options()).err().unwrap();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.to_string().starts_with("memory:first is not a datastore: it has no superblock"), "{missing}");
    assert_eq!(with_medium("first", MemoryMedium::connect).list().unwrap(), Vec::<String>::new());

    let datastore = made(&location);
    let busy = Datastore::open(&location, options()).err().unwrap();
    assert_eq!(busy.kind(), ErrorKind::Busy);
    assert!(busy.to_string().starts_with("memory:first: "), "{busy}");

    create(&datastore, "a");
    write(&datastore, "a", 1);
    datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    write(&datastore, "a", 2);
    datastore.clone_linked("a", &Point::Snapshot("s".into()), &["b".into()], &NoProgress).unwrap();
    datastore.clone_full("b", &Point::Head, "c", &NoProgress).unwrap();
    let status = datastore.status().unwrap();
    assert_eq!((status.engine.as_str(), status.disks, status.snapshots), ("medium", 3, 1));
    assert_eq!(status.file_system, FileSystemInfo::default());
    datastore.close().unwrap();
    drop(datastore);
    assert_eq!(Datastore::init(&location, INIT).unwrap_err().kind(), ErrorKind::Exists);

    let datastore = Datastore::open(&location, options()).unwrap();
    assert_eq!(["a", "a@s", "b", "c"].map(|device| byte(&datastore, device)), [2, 1, 1, 1]);
    assert_clean(&datastore);
    datastore.close().unwrap();
}

#[test]
fn operations_that_need_a_local_folder_fail_with_that_reason() {
    let datastore = made(&at("memory:native only"));
    let thin = NewDisk { format: "thin".parse().unwrap(), ..NewDisk::native(CAPACITY, Provisioning::Thin) };
    let error = datastore.create_disk("a", &thin, &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let told = "datastore 'memory:native only' is not in a local folder: it cannot have disks in VMware's formats";
    assert!(error.to_string().contains(told), "{error}");
    assert_eq!(datastore.disks().unwrap(), vec![]);
    datastore.close().unwrap();
}

#[test]
fn a_datastore_stops_when_its_medium_revokes_the_ownership() {
    let location = at("memory:lost");
    let datastore = made(&location);
    create(&datastore, "a");
    write(&datastore, "a", 1);
    with_medium("lost", MemoryMedium::revoke);
    let device = datastore.device("a", false).unwrap();
    let error = device.write(0, SharedSlice::copy_of(&[3; BLOCK]), false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stopped);
    // The next owner continues from the flushed state, while the former owner is still running.
    let next = Datastore::open(&location, options()).unwrap();
    assert_eq!(byte(&next, "a"), 1);
    next.close().unwrap();
}

#[test]
fn disks_move_between_media_and_folders() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let local = Location::from(folder.path().join("store"));
    let all = [at("memory:here"), at("memory:there"), local, at("memory:here")];
    Datastore::init(&all[1], INIT).unwrap();
    Datastore::init(&all[2], INIT).unwrap();
    let datastore = made(&all[0]);
    create(&datastore, "a");
    write(&datastore, "a", 7);
    datastore.close().unwrap();
    drop(datastore);
    for (from, to) in all.iter().zip(&all[1..]) {
        let datastore = Datastore::open(from, options()).unwrap();
        datastore.migrate_away("a", &to_native(), to, &NoProgress).unwrap();
        assert_eq!(datastore.disks().unwrap(), vec![]);
        datastore.close().unwrap();
    }
    let datastore = Datastore::open(&all[0], options()).unwrap();
    assert_eq!(byte(&datastore, "a"), 7);
    assert_clean(&datastore);
    for name in datastore.directory().list().unwrap() {
        assert!(!name.starts_with("migration-"), "{name} is left");
    }
    datastore.close().unwrap();
}

#[test]
fn a_disk_is_salvaged_from_one_medium_to_another() {
    let (from, to) = (at("memory:damaged"), at("memory:saved"));
    let datastore = made(&from);
    create(&datastore, "a");
    write(&datastore, "a", 9);
    datastore.close().unwrap();
    Datastore::init(&to, INIT).unwrap();
    let extract = Extract { disk: Some("a".into()), snapshot: None, to: to.clone(), format: None, name: None, rate: 0 };
    let request = SalvageRequest { datastore: from, options: Default::default(), extract: None };
    assert_eq!(request.list(&NoProgress).unwrap().objects.len(), 1);
    let report = request.extract(&extract, &NoProgress).unwrap();
    assert_eq!((report.target.as_str(), report.lost), ("a of memory:saved", vec![]));
    assert_eq!(byte(&Datastore::open(&to, options()).unwrap(), "a"), 9);
}

#[test]
fn schemes_are_registered_once_and_errors_name_them() {
    let location = at("memory:x");
    assert_eq!(register(scheme()).unwrap_err().kind(), ErrorKind::Exists);
    for name in ["", "a/b", "a:"] {
        assert_eq!(register(Scheme { name, ..scheme() }).unwrap_err().kind(), ErrorKind::Invalid);
    }
    let error = Location::parse("mem:x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    for told in ["'mem:x'", "the path of a folder or memory:NAME", "'./mem:x'"] {
        assert!(error.to_string().contains(told), "{error}");
    }
    let error = Location::parse("memory:").unwrap_err();
    assert!(error.to_string().contains("memory:NAME"), "{error}");
    assert_eq!(Location::parse("./memory:x").unwrap().local_path(), Some(Path::new("./memory:x")));
    assert_ne!(Location::parse("./memory:x").unwrap(), location);
}

#[test]
fn a_folder_may_have_a_colon_in_its_name() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let location = Location::parse(folder.path().join("memory:x")).unwrap();
    let datastore = made(&location);
    create(&datastore, "a");
    write(&datastore, "a", 5);
    datastore.close().unwrap();
    drop(datastore);
    assert!(folder.path().join("memory:x/superblock").is_file());
    assert_eq!(byte(&Datastore::open(&location, options()).unwrap(), "a"), 5);
}
