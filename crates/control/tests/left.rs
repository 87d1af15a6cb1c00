//! Names of disks that an interrupted command about machines has left. No disk gets such a name until the next command
//! about machines, which deletes the disk that has the name.

#![allow(clippy::unwrap_used)]

use control::{
    BackupCreate, BackupPlace, BackupRequest, BackupRestore, DiskRequest, OPEN_OPTIONS, Reply, Request, Service,
    Target, dispatch,
};
use disk::convert::{Address, Conversion, ImageOptions, TargetFormat};
use disk::migrate::{ImportMode, ImportOptions, MigrateOptions};
use disk::{Datastore, DiskFormat, InitOptions, NewDisk, NoProgress, Point, Provisioning, SettingsChange};
use error::{ErrorKind, Result};
use export::clients::Clients;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CAPACITY: u64 = 4 << 20;
const NATIVE: MigrateOptions =
    MigrateOptions { format: DiskFormat::Native, provisioning: Provisioning::Thin, delta: None };

/// A datastore that this process has open.
struct Opened {
    path: PathBuf,
    datastore: Arc<Datastore>,
    target: Target,
}

impl Opened {
    fn new(path: PathBuf) -> Self {
        Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
        let datastore = Datastore::open(&path, OPEN_OPTIONS).unwrap();
        let target = Target::Open(Service {
            clients: Arc::new(Clients::of_record(Arc::clone(datastore.directory()))),
            datastore: Arc::clone(&datastore),
            location: path.as_path().into(),
            served: None,
            jobs: None,
        });
        Self { path, datastore, target }
    }

    fn ask(&self, request: Request) -> Result<Reply> {
        dispatch(&self.target, request, &NoProgress)
    }

    fn create(&self, name: &str) -> Result<Reply> {
        let new = NewDisk::native(CAPACITY, Provisioning::Thin);
        self.ask(Request::Disk(DiskRequest::Create { name: name.into(), new, settings: SettingsChange::default() }))
    }

    fn disks(&self) -> Vec<String> {
        self.datastore.disks().unwrap().into_iter().map(|disk| disk.name).collect()
    }
}

/// Writes the folder of a command that was killed while it created the machine `vm` with a disk. Returns the folder.
fn leave(datastore: &Path, disk: &str) -> PathBuf {
    let machines = datastore.join("machines");
    let left = machines.join(".new-00000001");
    fs::create_dir_all(left.join("vm")).unwrap();
    fs::write(machines.join(".lock"), "").unwrap();
    let intent = format!("version = 1\nbegun = 1\n[[machine]]\nname = \"vm\"\n[[machine.disk]]\nname = \"{disk}\"\n");
    fs::write(left.join("intent.toml"), intent).unwrap();
    left
}

/// Requests that give a disk the name `web`. Creation and migration have their own checks.
fn requests(folder: &Path) -> Vec<Request> {
    let web = || "web".to_owned();
    let a = || "a".to_owned();
    let image = folder.join("image.raw");
    fs::write(&image, vec![7; 1 << 20]).unwrap();
    let conversion = Conversion {
        from: Address::Disk(a()),
        to: Address::Disk(web()),
        format: TargetFormat::Native,
        options: ImageOptions::default(),
        rate: 0,
        skip_damaged: false,
    };
    let import = ImportOptions {
        path: image,
        format: None,
        way: ImportMode::Copy,
        target: NATIVE,
        permitted: Vec::new(),
        force_parent: false,
        replay_journal: false,
        rate: 0,
        resolved: false,
    };
    let place = BackupPlace::Folder(folder.join("backups"));
    let restore =
        BackupRestore { place, backup: Some(a()), name: web(), update: false, live: false, key: None, rate: 0 };
    vec![
        Request::Disk(DiskRequest::Rename { name: a(), to: web(), force: false }),
        Request::Clone { disk: a(), at: Point::Head, names: vec!["b".into(), web()], full: false },
        Request::Clone { disk: a(), at: Point::Head, names: vec!["b".into(), web()], full: true },
        Request::Convert(Box::new(conversion)),
        Request::Disk(DiskRequest::Import { name: web(), import }),
        Request::Backup(BackupRequest::Restore(restore)),
    ]
}

#[test]
fn no_request_gives_a_disk_the_name_of_one_that_was_left() {
    let folder = tempfile::tempdir().unwrap();
    let opened = Opened::new(folder.path().join("store"));
    opened.create("a").unwrap();
    let create = BackupCreate {
        disk: "a".into(),
        snapshot: None,
        place: BackupPlace::Folder(folder.path().join("backups")),
        full: false,
        from: None,
        level: backup::LEVEL_DEFAULT,
        key: None,
        rate: 0,
    };
    opened.ask(Request::Backup(BackupRequest::Create(create))).unwrap();
    let left = leave(&opened.path, "web");

    let check = |what: &str, outcome: Result<Reply>| {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{what}: {error}");
        assert!(error.to_string().contains("the name 'web' now") && error.to_string().contains("vm list"), "{error}");
        assert_eq!(opened.disks(), ["a"], "{what}");
    };
    check("create", opened.create("web"));
    for request in requests(folder.path()) {
        check(&format!("{request:?}"), opened.ask(request));
    }
    fs::remove_dir_all(left).unwrap();
    opened.create("web").unwrap();
    opened.datastore.close().unwrap();
}

/// The next command about machines of the other datastore would delete the disk, and it is the only copy.
#[test]
fn no_disk_migrates_to_a_datastore_where_its_name_was_left() {
    let folder = tempfile::tempdir().unwrap();
    let opened = Opened::new(folder.path().join("here"));
    opened.create("web").unwrap();
    let there = folder.path().join("there");
    Datastore::init(&there, InitOptions { journal_size: 4 << 20 }).unwrap();
    let left = leave(&there, "web");

    let migrate = || {
        let to = Some(there.as_path().into());
        opened.ask(Request::Disk(DiskRequest::Migrate {
            name: "web".into(),
            target: NATIVE,
            to,
            force: false,
            rate: 0,
        }))
    };
    let error = migrate().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    let command = format!("'lamina -D {} vm list'", fs::canonicalize(&there).unwrap().display());
    assert!(error.to_string().contains(&command), "{error}");
    assert_eq!(opened.disks(), ["web"]);

    fs::remove_dir_all(left).unwrap();
    migrate().unwrap();
    assert!(opened.disks().is_empty());
    opened.datastore.close().unwrap();
}
