//! Clients that have closed their connections, while the server still finishes their requests. An operation that
//! connected clients prevent waits for these sessions, for a limited time, and does not fail because of them.
#![allow(clippy::unwrap_used)]

use connections::{Access, Connection, Drain, Limits, Listen, Peer, Protocol, ServiceConfig};
use control::{DiskRequest, OPEN_OPTIONS, Reply, Request, Service, SnapshotRequest, Target, dispatch};
use disk::{Datastore, InitOptions, NewDisk, Provisioning, SettingsChange, SnapshotOptions};
use error::{ErrorKind, Result};
use export::clients::Clients;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vm::definition::Definition;
use work::NoProgress;

const LONG: Duration = Duration::from_secs(600);

/// A protocol whose client names an export, and whose sessions have requests under way for some time after the client
/// has closed its connection.
struct Lingering {
    clients: Arc<Clients>,
    datastore: Arc<Datastore>,
    milliseconds: AtomicU64,
    /// Whether sessions stay after that time.
    held: AtomicBool,
    /// Whether clients can only read.
    reads_only: AtomicBool,
    /// Whether clients send a disconnect request.
    farewell: AtomicBool,
}

impl Protocol for Lingering {
    fn serve(&self, connection: &Arc<Connection>) {
        let mut visit = self.clients.connected(Arc::clone(connection));
        let mut name = [0; 64];
        let length = (&**connection).read(&mut name).unwrap();
        let name = std::str::from_utf8(&name[..length]).unwrap();
        visit.chooses(name, LONG).unwrap();
        let device = self.datastore.device(name, false).unwrap();
        if self.reads_only.load(Ordering::SeqCst) {
            visit.reads_only();
        }
        visit.agreed(name);
        if self.farewell.load(Ordering::SeqCst) {
            visit.says_farewell();
        }
        (&**connection).write_all(b".").unwrap();
        while !connection.peer_has_gone() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(self.milliseconds.load(Ordering::SeqCst)));
        while self.held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(device);
    }
}

/// A served datastore with the native disk `vm`, which has the snapshot `s`.
struct Setup {
    target: Target,
    lingering: Arc<Lingering>,
    socket: PathBuf,
    _service: connections::Service,
    _folder: tempfile::TempDir,
}

impl Setup {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
        let datastore = Datastore::open(&path, OPEN_OPTIONS).unwrap();
        let clients = Arc::new(Clients::in_memory(LONG));
        let lingering = Arc::new(Lingering {
            clients: Arc::clone(&clients),
            datastore: Arc::clone(&datastore),
            milliseconds: AtomicU64::new(150),
            held: AtomicBool::new(false),
            reads_only: AtomicBool::new(false),
            farewell: AtomicBool::new(true),
        });
        let socket = folder.path().join("socket");
        let config = ServiceConfig {
            name: "lingering",
            listen: vec![Listen::Unix { path: socket.clone(), mode: 0o600, group: None }],
            access: Access::LOCAL,
            limits: Limits::each(16),
            drain: Drain { undisturbed: Duration::ZERO, finish: LONG, cut: None },
        };
        let service = connections::Service::start(config, Arc::clone(&lingering) as Arc<dyn Protocol>).unwrap();
        let target = Target::Open(Service { datastore, location: path.into(), clients, served: None, jobs: None });
        let setup = Self { target, lingering, socket, _service: service, _folder: folder };
        let new = NewDisk::native(8 << 20, Provisioning::Thin);
        setup
            .ask(Request::Disk(DiskRequest::Create { name: "vm".into(), new, settings: SettingsChange::default() }))
            .unwrap();
        setup.snapshot();
        setup
    }

    fn ask(&self, request: Request) -> Result<Reply> {
        dispatch(&self.target, request, &NoProgress)
    }

    fn snapshot(&self) {
        let options = SnapshotOptions::default();
        let of = vec![("vm".to_owned(), "s".to_owned())];
        self.ask(Request::Snapshot(SnapshotRequest::Create { of, options })).unwrap();
    }

    /// A client that has an export open.
    fn client(&self, export: &str) -> UnixStream {
        let mut client = UnixStream::connect(&self.socket).unwrap();
        client.write_all(export.as_bytes()).unwrap();
        client.read_exact(&mut [0]).unwrap();
        client
    }
}

fn delete_snapshot(force: bool) -> Request {
    let (disk, name) = ("vm".to_owned(), "s".to_owned());
    Request::Snapshot(SnapshotRequest::Delete { disk, name, direction: None, rate: 0, force })
}

fn delete(name: &str) -> Request {
    Request::Disk(DiskRequest::Delete { name: name.to_owned(), promote: false, force: false })
}

#[test]
fn what_clients_prevent_waits_for_the_sessions_of_clients_that_have_left() {
    let setup = Setup::new();
    for force in [false, true] {
        drop(setup.client("vm@s"));
        setup.ask(delete_snapshot(force)).unwrap();
        setup.snapshot();
        drop(setup.client("vm"));
        let (disk, name) = ("vm".to_owned(), "s".to_owned());
        setup.ask(Request::Snapshot(SnapshotRequest::Revert { disk, name, force })).unwrap();
    }
    drop(setup.client("vm"));
    setup.ask(Request::Disk(DiskRequest::Rename { name: "vm".into(), to: "web".into(), force: false })).unwrap();
    drop(setup.client("web@s"));
    drop(setup.client("web"));
    control::refuse_to_replace(&setup.lingering.clients, "web").unwrap();
    drop(setup.client("web@s"));
    drop(setup.client("web"));
    setup.ask(delete("web")).unwrap();
}

#[test]
fn clients_that_stay_prevent_at_once_and_slow_requests_after_a_limited_time() {
    let setup = Setup::new();
    setup.lingering.milliseconds.store(3000, Ordering::SeqCst);
    let stays = setup.client("vm@s");
    // A client of another export does not delay the operation.
    drop(setup.client("vm"));
    let refused_after = || {
        let begin = Instant::now();
        let error = setup.ask(delete_snapshot(false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        begin.elapsed()
    };
    // The fastest of several attempts, because the host may be busy.
    let fastest = (0..5).map(|_| refused_after()).min().unwrap();
    assert!(fastest < Duration::from_millis(500), "{fastest:?}");
    drop(stays);
    let error = setup.ask(delete_snapshot(false)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
}

/// Accepted requests of a killed client may still be under way in the device, and would overwrite acknowledged writes
/// of the next client.
#[test]
fn a_new_session_waits_for_the_requests_of_a_client_that_has_left() {
    let setup = Setup::new();
    setup.lingering.milliseconds.store(0, Ordering::SeqCst);
    setup.lingering.held.store(true, Ordering::SeqCst);
    let clients = &setup.lingering.clients;
    let next = clients.arrive(Peer::Unknown);
    let chooses = |export: &str| next.chooses(export, Duration::from_millis(20)).map_err(|error| error.kind());
    let client = setup.client("vm");
    let stays = chooses("vm");
    drop(client);
    let left = chooses("vm");
    setup.lingering.reads_only.store(true, Ordering::SeqCst);
    drop(setup.client("vm@s"));
    let left_reader = chooses("vm@s");
    // The service waits for its sessions, also after a failed assertion.
    setup.lingering.held.store(false, Ordering::SeqCst);
    assert_eq!((stays, left, left_reader), (Ok(()), Err(ErrorKind::Busy), Ok(())));
    next.chooses("vm", LONG).unwrap();
}

/// The guest of a frozen machine is no client, and continues with the free map in its memory.
#[test]
fn a_disk_of_a_frozen_machine_is_not_reclaimed() {
    let setup = Setup::new();
    let machine = setup._folder.path().join("store/machines/web");
    std::fs::create_dir_all(&machine).unwrap();
    let mut definition = Definition::new("web", 1, 64 << 20).unwrap();
    definition.add_disk("vm").unwrap();
    std::fs::write(machine.join("machine.toml"), definition.to_text().unwrap()).unwrap();
    let reclaim = || setup.ask(Request::Disk(DiskRequest::Reclaim { name: "vm".into(), dry_run: false }));
    reclaim().unwrap();
    std::fs::write(machine.join("frozen"), "0f0e0d0c-0b0a-4908-8706-050403020100").unwrap();
    let error = reclaim().unwrap_err();
    assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("machine 'web'"), "{error}");
}

#[test]
fn a_server_that_may_not_update_a_disk_does_not_learn_who_uses_it() {
    let setup = Setup::new();
    setup.lingering.farewell.store(false, Ordering::SeqCst);
    let client = setup.client("vm");
    let refused = || {
        let error = control::refuse_to_replace(&setup.lingering.clients, "vm").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        let text = error.to_string();
        assert!(!text.contains(&format!("process {}", std::process::id())), "{text}");
        text
    };
    assert_eq!(refused(), "disk 'vm' is in use by 1 client(s); disconnect them first");
    drop(client);
    let text = refused();
    assert!(text.contains("counts as in use for another ") && text.contains(" s: 1 client(s) lost the"), "{text}");
    // The same refusal of a command of the owner names the client.
    let error = setup.ask(delete("vm")).unwrap_err();
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
}
