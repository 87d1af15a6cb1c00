//! Streams of backups on which nothing happens: the request is cancelled nevertheless.

#![allow(clippy::unwrap_used)]

use backend::SharedSlice;
use control::{
    BackupCreate, BackupPlace, BackupRequest, BackupRestore, OPEN_OPTIONS, Part, Reply, Request, Service, Target,
    Watch, dispatch,
};
use disk::{Datastore, InitOptions, NewDisk, NoProgress, Progress, Provisioning, SnapshotOptions};
use error::{ErrorKind, Result};
use export::clients::Clients;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// More than the socket of a stream buffers.
const DATA: usize = 8 << 20;
/// How long a cancelled request may take to end. Otherwise it never ends.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Cancellable(AtomicBool);

impl Progress for Cancellable {
    fn cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Watch for Cancellable {
    fn part(&self, part: Part) -> Result<()> {
        panic!("{part:?} was not asked for")
    }
}

/// A datastore with the snapshot `a@s`, whose data cannot be compressed.
fn made(path: &Path) -> Arc<Datastore> {
    Datastore::init(path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = Datastore::open(path, OPEN_OPTIONS).unwrap();
    let new = NewDisk::native(2 * DATA as u64, Provisioning::Thin);
    datastore.create_disk("a", &new, &NoProgress).unwrap();
    let device = datastore.device("a", false).unwrap();
    let mut state = 1u64;
    let data: Vec<u8> = (0..DATA)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect();
    device.write(0, SharedSlice::copy_of(&data), false).unwrap();
    device.flush().unwrap();
    drop(device);
    datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    datastore
}

#[test]
fn a_stalled_stream_does_not_delay_the_cancellation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let datastore = made(&path);
    let target = Target::Open(Service {
        clients: Arc::new(Clients::of_record(Arc::clone(datastore.directory()))),
        datastore: Arc::clone(&datastore),
        location: path.as_path().into(),
        served: None,
        jobs: None,
    });
    let socket = folder.path().join("stream.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let place = || BackupPlace::Process(socket.clone());
    let create = BackupCreate {
        disk: "a".into(),
        snapshot: Some("s".into()),
        place: place(),
        full: false,
        from: None,
        level: backup::LEVEL_DEFAULT,
        key: None,
        rate: 0,
    };
    let restore = BackupRestore {
        place: place(),
        backup: None,
        name: "b".into(),
        update: false,
        live: false,
        key: None,
        rate: 0,
    };
    for (request, writes) in [(BackupRequest::Create(create), true), (BackupRequest::Restore(restore), false)] {
        let (ended, end) = mpsc::channel::<Result<Reply>>();
        let cancellable = Arc::new(Cancellable::default());
        let (watch, target, request) = (Arc::clone(&cancellable), target.clone(), Request::Backup(request));
        std::thread::spawn(move || drop(ended.send(dispatch(&target, request, &*watch))));
        // The command keeps its connection open, and reads no more than a byte: the request is writing the only pack
        // then. It writes nothing.
        let (mut connection, _) = listener.accept().unwrap();
        if writes {
            connection.read_exact(&mut [0]).unwrap();
        }
        cancellable.0.store(true, Ordering::Relaxed);
        let error = end.recv_timeout(PATIENCE).expect("the cancelled request goes on").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
    }
    assert!(datastore.receptions().unwrap().is_empty());
    drop(target);
    datastore.close().unwrap();
}
