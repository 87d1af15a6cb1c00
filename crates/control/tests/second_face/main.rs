//! A second front end: every request with its reply in one process, without socket, server loop or command line.
//!
//! The list of requests is a match without a catch-all: the test does not compile until a new request is listed, and
//! then fails until this front end has sent the request.

#![allow(clippy::unwrap_used)]

mod machine;

use backend::Queue;
use connections::Listen;
use control::jobs::Jobs;
use control::{
    BackupCreate, BackupMachine, BackupPlace, BackupRequest, BackupRestore, Change, CloneOptions, DiskRequest, Event,
    ImageRequest, JobInfo, JobRequest, JobState, LabelRequest, MachineBackup, MachineImport, MachineReply,
    MachineRequest, MachineRestore, MachineSnapshot, MachineVerb, NewMachine, OPEN_OPTIONS, Part, ReceiveRequest,
    Reconnect, Reply, Request, ScrubRequest, SendHow, SendPoint, SendRequest, SendTls, SentDisk, Served, Service,
    Serving, SnapshotRequest, Target, Watch, dispatch,
};
use disk::convert::{
    Address, ArchiveController, ArchiveExport, ArchiveMachine, Conversion, ImageOptions, TargetFormat,
};
use disk::images::NewImage;
use disk::migrate::{ImportMode, ImportOptions, MigrateOptions};
use disk::salvage::SalvageRequest;
use disk::{
    ChangedExtent, Compression, Datastore, Deduplication, DefaultsChange, Deletion, DeltaFormat, Device, DiskFormat,
    ImageKind, InitOptions, LimitsChange, Location, NewDisk, Point, Progress, Provisioning, ScrubState, SettingsChange,
    SnapshotOptions, Tuning,
};
use error::{ErrorKind, Result};
use export::exports::ExportName;
use export::nbd;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vm::clone::{Inside, Source};
use vm::definition::{BootDevice, CloneKind, Platform, Seed, Vnc, WriteErrors};
use vm::edit::Edit;

/// Returns the name of a request, and defines the list of all names.
macro_rules! verbs {
    ($($name:literal: $pattern:pat),+ $(,)?) => {
        const VERBS: &[&str] = &[$($name),+];

        fn verb(request: &Request) -> &'static str {
            match request {
                $($pattern => $name),+
            }
        }
    };
}

verbs! {
    "status": Request::Status,
    "status --space": Request::StatusSpace,
    "check": Request::Check { .. },
    "scrub --every": Request::Scrub(ScrubRequest::Schedule { .. }),
    "scrub start": Request::Scrub(ScrubRequest::Start { .. }),
    "scrub status": Request::Scrub(ScrubRequest::Status),
    "scrub cancel": Request::Scrub(ScrubRequest::Cancel),
    "disk create": Request::Disk(DiskRequest::Create { .. }),
    "disk list": Request::Disk(DiskRequest::List),
    "disk list --label": Request::Disk(DiskRequest::Labelled { .. }),
    "label list": Request::Label(LabelRequest::List),
    "label limit": Request::Label(LabelRequest::Limit { .. }),
    "disk show": Request::Disk(DiskRequest::Show { .. }),
    "disk resize": Request::Disk(DiskRequest::Resize { tell_machine: false, .. }),
    "disk resize, with its machine": Request::Disk(DiskRequest::Resize { tell_machine: true, .. }),
    "disk rename": Request::Disk(DiskRequest::Rename { .. }),
    "disk delete": Request::Disk(DiskRequest::Delete { .. }),
    "disk delete --dry-run": Request::Disk(DiskRequest::WouldFree { .. }),
    "disk list --space": Request::Disk(DiskRequest::Space { .. }),
    "disk detach": Request::Disk(DiskRequest::Detach { .. }),
    "disk stats": Request::Disk(DiskRequest::Stats { .. }),
    "disk tune": Request::Disk(DiskRequest::Tune { .. }),
    "disk edit": Request::Disk(DiskRequest::Edit { .. }),
    "disk defaults": Request::Disk(DiskRequest::Defaults { .. }),
    "disk reopen": Request::Disk(DiskRequest::Reopen { .. }),
    "disk inflate": Request::Disk(DiskRequest::Inflate { .. }),
    "disk punchzero": Request::Disk(DiskRequest::PunchZero { .. }),
    "disk wipe": Request::Disk(DiskRequest::Wipe { .. }),
    "disk reclaim": Request::Disk(DiskRequest::Reclaim { .. }),
    "disk reclaim --all": Request::Disk(DiskRequest::Reclaimable),
    "disk shrink": Request::Disk(DiskRequest::Shrink { .. }),
    "disk optimize": Request::Disk(DiskRequest::Optimize { .. }),
    "disk consolidate": Request::Disk(DiskRequest::Consolidate { .. }),
    "disk migrate": Request::Disk(DiskRequest::Migrate { .. }),
    "disk import": Request::Disk(DiskRequest::Import { .. }),
    "snapshot create": Request::Snapshot(SnapshotRequest::Create { .. }),
    "snapshot list": Request::Snapshot(SnapshotRequest::List { .. }),
    "snapshot show": Request::Snapshot(SnapshotRequest::Show { .. }),
    "snapshot delete": Request::Snapshot(SnapshotRequest::Delete { .. }),
    "snapshot revert": Request::Snapshot(SnapshotRequest::Revert { .. }),
    "snapshot diff": Request::Snapshot(SnapshotRequest::Diff { .. }),
    "clone": Request::Clone { .. },
    "convert": Request::Convert(_),
    "export archive": Request::ExportArchive(_),
    "salvage": Request::Salvage(_),
    "image show": Request::Image(ImageRequest::Show { .. }),
    "image check": Request::Image(ImageRequest::Check { .. }),
    "image create": Request::Image(ImageRequest::Create { .. }),
    "export list": Request::ExportList,
    "send": Request::Send(_),
    "backup create": Request::Backup(BackupRequest::Create(_)),
    "backup create, of a machine": Request::Backup(BackupRequest::CreateMachine(_)),
    "backup create, before that of a machine": Request::Backup(BackupRequest::PrepareMachine { .. }),
    "backup key": Request::Backup(BackupRequest::Key { .. }),
    "backup list": Request::Backup(BackupRequest::List { .. }),
    "backup verify": Request::Backup(BackupRequest::Verify { .. }),
    "backup restore": Request::Backup(BackupRequest::Restore(_)),
    "backup delete": Request::Backup(BackupRequest::Delete { .. }),
    "backup prune": Request::Backup(BackupRequest::Prune { .. }),
    "receive list": Request::Receive(ReceiveRequest::List),
    "receive delete": Request::Receive(ReceiveRequest::Delete { .. }),
    "settle": Request::Settle,
    "vm": Request::Machine(_),
    "job start": Request::Job(JobRequest::Start(_)),
    "job list": Request::Job(JobRequest::List),
    "job show": Request::Job(JobRequest::Show { .. }),
    "job wait": Request::Job(JobRequest::Wait { .. }),
    "job cancel": Request::Job(JobRequest::Cancel { .. }),
    "events": Request::Events,
}

/// The NBD server of this process, to which its machines connect.
struct Exports(Arc<Datastore>);

impl export::exports::Exports for Exports {
    fn names(&self) -> Vec<ExportName> {
        let names = self.0.device_names().into_iter();
        names.map(|name| ExportName { description: name.clone(), name }).collect()
    }

    fn open(&self, name: &str, read_only: bool) -> Result<Arc<dyn Device>> {
        self.0.device(name, read_only)
    }

    fn queue(&self, depth: u32) -> std::io::Result<Box<dyn Queue>> {
        self.0.queue(depth)
    }
}

/// The front end, which dispatches requests in its own process and records which ones it has sent.
struct Face {
    target: Target,
    datastore: Arc<Datastore>,
    folder: tempfile::TempDir,
    memory: tempfile::TempDir,
    asked: Mutex<BTreeSet<&'static str>>,
    extents: Mutex<Vec<ChangedExtent>>,
    events: Mutex<Vec<Event>>,
    enough: AtomicBool,
}

impl Progress for Face {
    fn update(&self, _: u64, _: u64) {}
    fn cancelled(&self) -> bool {
        self.enough.load(Ordering::Relaxed)
    }
}

impl Watch for Face {
    fn part(&self, part: Part) -> Result<()> {
        match part {
            Part::Extents(batch) => self.extents.lock().unwrap().extend(batch),
            Part::Event(event) => self.events.lock().unwrap().push(*event),
        }
        Ok(())
    }
}

impl Face {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("store");
        Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
        let datastore = Datastore::open(&path, OPEN_OPTIONS).unwrap();
        let socket = path.join("nbd.sock");
        let clients =
            Arc::new(export::clients::Clients::of_server(Arc::clone(datastore.directory()), Duration::from_secs(1)));
        let config = nbd::ServerConfig {
            listen: vec![Listen::Unix { path: socket.clone(), mode: 0o600, group: None }],
            clients: Arc::clone(&clients),
            ..nbd::ServerConfig::default()
        };
        let nbd = Arc::new(nbd::Server::start(config, Arc::new(Exports(Arc::clone(&datastore)))).unwrap());
        let serving = Arc::new(Serving {
            pid: std::process::id(),
            version: "face".into(),
            socket: Some(socket),
            tcp: None,
            tls: false,
            read_only: false,
            receive: None,
        });
        let target = Target::Open(Service {
            datastore: Arc::clone(&datastore),
            location: path.into(),
            clients,
            served: Some(Served { nbd, serving }),
            jobs: Some(Arc::new(Jobs::new().unwrap())),
        });
        Self {
            target,
            datastore,
            folder,
            memory,
            asked: Mutex::default(),
            extents: Mutex::default(),
            events: Mutex::default(),
            enough: AtomicBool::new(false),
        }
    }

    /// A path next to the datastore.
    fn beside(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn ask(&self, request: Request) -> Result<Reply> {
        let name = match &request {
            Request::Machine(request) => {
                self.asked.lock().unwrap().insert("vm");
                machine::verb(&request.verb)
            }
            request => verb(request),
        };
        self.asked.lock().unwrap().insert(name);
        dispatch(&self.target, request, self)
    }

    #[track_caller]
    fn done(&self, request: Request) -> Reply {
        let name = format!("{request:?}");
        self.ask(request).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    #[track_caller]
    fn disk(&self, request: DiskRequest) -> Reply {
        self.done(Request::Disk(request))
    }

    #[track_caller]
    fn fails(&self, request: Request, kind: ErrorKind) {
        let name = format!("{request:?}");
        match self.ask(request) {
            Ok(reply) => panic!("{name}: {reply:?}"),
            Err(error) => assert_eq!(error.kind(), kind, "{name}: {error}"),
        }
    }

    fn machine(&self, verb: MachineVerb) -> Request {
        let memory_folder = Some(self.memory.path().to_path_buf());
        Request::Machine(Box::new(MachineRequest { qemu: "qemu-system-x86_64".into(), memory_folder, verb }))
    }

    #[track_caller]
    fn vm(&self, verb: MachineVerb) -> MachineReply {
        match self.done(self.machine(verb)) {
            Reply::Machine(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn job(&self, request: JobRequest) -> JobInfo {
        match self.done(Request::Job(request)) {
            Reply::Job(job) => job,
            other => panic!("{other:?}"),
        }
    }
}

fn text(text: &str) -> String {
    text.into()
}

fn how() -> SendHow {
    let tls = SendTls { authorities: "/nowhere/ca.pem".into(), certificate: None, key: None, server_name: None };
    SendHow { incremental: false, streams: 1, rate: 0, tls }
}

fn target(format: DiskFormat) -> MigrateOptions {
    MigrateOptions { format, provisioning: Provisioning::Thin, delta: None }
}

/// Ends the subscription of a front end when this value is dropped, also if the test fails.
struct Enough<'a>(&'a Face);

impl Drop for Enough<'_> {
    fn drop(&mut self) {
        self.0.enough.store(true, Ordering::Relaxed);
    }
}

/// Requests about disks and their snapshots.
fn disks(face: &Face) {
    face.done(Request::Status);
    let new = NewDisk::native(8 << 20, Provisioning::Thin);
    face.disk(DiskRequest::Create { name: text("a"), new, settings: SettingsChange::default() });
    let resize = |capacity, tell_machine| DiskRequest::Resize {
        name: text("a"),
        capacity,
        shrink: false,
        reconnect: Reconnect::NoClient,
        tell_machine,
    };
    face.disk(resize(9 << 20, false));
    let Reply::Resized(resized) = face.disk(resize(10 << 20, true)) else { panic!("unexpected reply") };
    assert_eq!((resized.disk.capacity, &resized.machine), (10 << 20, &None));
    face.disk(DiskRequest::Rename { name: text("a"), to: text("b"), force: false });
    let settings = SettingsChange { labels: [(text("tenant"), text("a"))].into(), ..SettingsChange::default() };
    face.disk(DiskRequest::Edit { name: text("b"), settings });
    let change = DefaultsChange {
        compression: Some(Compression::Zstd(9)),
        dedup: Some(Deduplication::Disk),
        ..Default::default()
    };
    face.disk(DiskRequest::Defaults { change });
    let change =
        DefaultsChange { compression: Some(Compression::Off), dedup: Some(Deduplication::Off), ..Default::default() };
    face.disk(DiskRequest::Defaults { change });
    for (label, disks) in [("tenant", 1), ("tenant=a", 1), ("tenant=b", 0)] {
        let found = face.disk(DiskRequest::Labelled { label: text(label) });
        assert!(matches!(found, Reply::Disks(found) if found.len() == disks), "{label}");
    }
    let limits = LimitsChange { quota: Some(1 << 30), reservation: None };
    face.done(Request::Label(LabelRequest::Limit { label: text("tenant=a"), limits }));
    let Reply::Labels(labels) = face.done(Request::Label(LabelRequest::List)) else { panic!("unexpected reply") };
    assert_eq!((labels[0].disks, labels[0].limits.quota), (1, Some(1 << 30)));
    let options = SnapshotOptions { description: String::new(), folder: None, delta: None };
    face.done(Request::Snapshot(SnapshotRequest::Create { of: vec![(text("b"), text("s"))], options }));
    face.done(Request::Snapshot(SnapshotRequest::List { disk: None }));
    face.done(Request::Snapshot(SnapshotRequest::Show { disk: text("b"), name: text("s") }));
    face.done(Request::Snapshot(SnapshotRequest::Diff {
        disk: text("b"),
        from: Point::Snapshot(text("s")),
        to: Point::Head,
    }));
    face.done(Request::Snapshot(SnapshotRequest::Revert { disk: text("b"), name: text("s"), force: false }));
    let names = vec![text("c")];
    face.done(Request::Clone { disk: text("b"), at: Point::Snapshot(text("s")), names, full: false });
    face.disk(DiskRequest::Detach { name: text("c") });
    face.done(Request::Snapshot(SnapshotRequest::Delete {
        disk: text("b"),
        name: text("s"),
        direction: None,
        rate: 0,
        force: false,
    }));
    let Reply::Disks(all) = face.disk(DiskRequest::List) else { panic!("unexpected reply") };
    assert_eq!(all.iter().map(|disk| disk.name.as_str()).collect::<Vec<_>>(), ["b", "c"]);
    let deletion = Deletion { disks: vec![text("c")], ..Deletion::default() };
    let Reply::WouldFree(free) = face.disk(DiskRequest::WouldFree { deletion, force: false }) else {
        panic!("unexpected reply")
    };
    assert_eq!((free.deletes.as_slice(), &free.estimate), ([text("c")].as_slice(), &None));
    let Reply::Space(space) = face.disk(DiskRequest::Space { name: None }) else { panic!("unexpected reply") };
    assert_eq!(space.disks.iter().map(|disk| disk.name.as_str()).collect::<Vec<_>>(), ["b", "c"]);
    let Reply::Status { status, .. } = face.done(Request::StatusSpace) else { panic!("unexpected reply") };
    assert_eq!(status.space.map(|total| total.provisioned), space.total.map(|total| total.provisioned));
    assert!(status.space.is_some_and(|total| total.reduction.is_some() && total.may_need.is_some()));
    face.disk(DiskRequest::Delete { name: text("c"), promote: false, force: false });
    face.disk(DiskRequest::Show { name: text("b") });
    assert!(matches!(face.done(Request::ExportList), Reply::Exports(exports) if exports.len() == 1));
    let check = Request::Check { data: true, repair: false };
    assert!(matches!(face.done(check), Reply::Check(report) if report.findings.is_empty()));
    let schedule = ScrubRequest::Schedule { every: Some(604_800), rate: Some(0) };
    let Reply::ScrubState(state) = face.done(Request::Scrub(schedule)) else { panic!("unexpected reply") };
    assert_eq!((state.every, state.state), (Some(604_800), ScrubState::Never));
    face.fails(Request::Scrub(ScrubRequest::Cancel), ErrorKind::NotFound);
    for request in [ScrubRequest::Start { rate: None, restart: false }, ScrubRequest::Status] {
        let Reply::Scrub(report) = face.done(Request::Scrub(request)) else { panic!("unexpected reply") };
        assert_eq!((report.summary.state, report.summary.damaged), (ScrubState::Done, 0));
    }
    assert_eq!(face.done(Request::Settle), Reply::Settled);
}

/// Requests about images, and about disks that are created from them.
fn images(face: &Face) {
    let image = face.beside("image.vmdk");
    let options = ImageOptions::default;
    face.done(Request::Image(ImageRequest::Create {
        new: NewImage {
            path: image.clone(),
            capacity: Some(4 << 20),
            format: text("monolithicsparse"),
            parent: None,
            adapter: None,
        },
        options: options(),
    }));
    face.done(Request::Image(ImageRequest::Show { path: image.clone(), options: options() }));
    face.done(Request::Image(ImageRequest::Check { path: image.clone(), repair: false, options: options() }));
    face.done(Request::Convert(Box::new(Conversion {
        from: Address::Path(image.clone()),
        to: Address::Disk(text("converted")),
        format: TargetFormat::Native,
        options: options(),
        rate: 0,
        skip_damaged: false,
    })));
    let import = ImportOptions {
        format: None,
        path: image,
        way: ImportMode::Copy,
        target: target(DiskFormat::Image(ImageKind::ZeroedThick)),
        permitted: Vec::new(),
        force_parent: false,
        replay_journal: false,
        rate: 0,
        resolved: false,
    };
    face.disk(DiskRequest::Import { name: text("flat"), import });
    face.disk(DiskRequest::Stats { name: text("flat") });
    face.disk(DiskRequest::Tune { name: text("flat"), tuning: Tuning { read_cache: Some(0), ..Tuning::default() } });
    face.disk(DiskRequest::Reopen { name: text("flat") });
    face.disk(DiskRequest::Inflate { name: text("flat") });
    face.disk(DiskRequest::PunchZero { name: text("flat") });
    // Only the delta format has grains that may be unreferenced.
    let options = SnapshotOptions { description: String::new(), folder: None, delta: Some(DeltaFormat::SeSparse) };
    face.done(Request::Snapshot(SnapshotRequest::Create { of: vec![(text("flat"), text("d"))], options }));
    face.disk(DiskRequest::Reclaim { name: text("flat"), dry_run: true });
    face.disk(DiskRequest::Reclaimable);
    face.disk(DiskRequest::Wipe { name: text("flat") });
    face.disk(DiskRequest::Shrink { name: text("flat") });
    face.disk(DiskRequest::Consolidate { name: text("flat"), rate: 0 });
    let native = target(DiskFormat::Native);
    face.disk(DiskRequest::Migrate { name: text("flat"), target: native, to: None, force: false, rate: 0 });
    face.disk(DiskRequest::Optimize {
        name: text("flat"),
        compression: Compression::Lz4,
        dedup: Deduplication::Disk,
        dedup_memory: Some(1 << 20),
        rate: 0,
    });
}

/// Requests about files and servers outside the datastore.
fn others(face: &Face) {
    let salvage =
        SalvageRequest { datastore: face.beside("nothing").into(), options: Default::default(), extract: None };
    face.fails(Request::Salvage(Box::new(salvage)), ErrorKind::NotFound);
    let disks = vec![SentDisk { disk: text("b"), name: text("b") }];
    let remote = text("lamina://127.0.0.1:1/b");
    let send = SendRequest { remote, disks, point: SendPoint::Now, attachment: None, how: how() };
    face.fails(Request::Send(Box::new(send)), ErrorKind::Invalid);
    assert_eq!(face.done(Request::Receive(ReceiveRequest::List)), Reply::Receptions(Vec::new()));
    face.fails(Request::Receive(ReceiveRequest::Delete { id: text("0") }), ErrorKind::NotFound);
}

/// Requests about backups of the disk `b`.
fn backups(face: &Face) {
    let place = || BackupPlace::Folder(face.beside("backups"));
    let backup = |request| face.done(Request::Backup(request));
    assert!(matches!(backup(BackupRequest::Key { path: face.beside("key") }), Reply::BackupKey { .. }));
    let create = BackupCreate {
        disk: text("b"),
        snapshot: None,
        place: place(),
        full: false,
        from: None,
        level: 3,
        rate: 0,
        key: Some(face.beside("key")),
    };
    let Reply::BackedUp(created) = backup(BackupRequest::Create(create)) else { panic!("unexpected reply") };
    let Reply::Backups(all) = backup(BackupRequest::List { place: place() }) else { panic!("unexpected reply") };
    assert_eq!(all.iter().map(|backup| &backup.id).collect::<Vec<_>>(), [&created.id]);
    let verify = BackupRequest::Verify { place: place(), backups: Vec::new(), key: Some(face.beside("key")) };
    assert!(matches!(backup(verify), Reply::Verified(verified) if verified.problems.is_empty()));
    let (name, which) = (text("restored"), Some(created.id.clone()));
    let restore = BackupRestore {
        place: place(),
        backup: which,
        name,
        update: false,
        live: false,
        rate: 0,
        key: Some(face.beside("key")),
    };
    assert!(
        matches!(backup(BackupRequest::Restore(restore)), Reply::Restored(restored) if restored.disk == "restored")
    );
    let (keep, dry_run) = (backup::Keep { last: 1, ..backup::Keep::default() }, true);
    let prune = BackupRequest::Prune { place: place(), keep, dry_run };
    assert!(matches!(backup(prune), Reply::Pruned(pruned) if pruned.deleted == 0));
    backup(BackupRequest::Delete { place: place(), backups: vec![created.id], force: false });
    face.disk(DiskRequest::Delete { name: text("restored"), promote: false, force: false });
    let (disk, name) = (text("b"), created.snapshot);
    face.done(Request::Snapshot(SnapshotRequest::Delete { disk, name, direction: None, rate: 0, force: false }));
}

/// Requests about jobs and events.
fn jobs(face: &Face) {
    let work = Request::Clone { disk: text("b"), at: Point::Head, names: vec![text("copy")], full: true };
    let job = face.job(JobRequest::Start(Box::new(work.clone())));
    assert_eq!((job.kind.as_str(), job.object.as_str(), job.background), ("clone", "b", true));
    let Reply::JobEnded(end) = face.done(Request::Job(JobRequest::Wait { id: job.id.clone() })) else {
        panic!("unexpected reply")
    };
    let (asked, answer) = end.outcome.clone().unwrap();
    assert_eq!(asked, work);
    assert!(matches!(&answer, Reply::Disks(disks) if disks[0].name == "copy"), "{answer:?}");
    assert_eq!(face.job(JobRequest::Show { id: job.id.clone() }).state, JobState::Done);
    face.job(JobRequest::Cancel { id: job.id.clone() });
    let Reply::Jobs(all) = face.done(Request::Job(JobRequest::List)) else { panic!("unexpected reply") };
    assert!(all.iter().any(|one| one.id == job.id) && all.iter().all(|one| one.ended.is_some()), "{all:?}");
    assert!(
        all.iter().any(|one| one.kind == "vm start" && one.object == "web"),
        "copies made by commands about machines are jobs too: {all:?}"
    );
}

#[test]
fn a_front_end_in_the_same_process_runs_every_request() {
    let face = Face::new();
    std::thread::scope(|scope| {
        let following = scope.spawn(|| face.ask(Request::Events));
        let enough = Enough(&face);
        while face.events.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        disks(&face);
        images(&face);
        others(&face);
        backups(&face);
        machine::machines(&face);
        jobs(&face);
        drop(enough);
        assert_eq!(following.join().unwrap().unwrap_err().kind(), ErrorKind::Interrupted);
    });
    let asked = face.asked.lock().unwrap().clone();
    let all: BTreeSet<&str> = VERBS.iter().chain(machine::VERBS).copied().collect();
    assert_eq!(all.difference(&asked).collect::<Vec<_>>(), Vec::<&&str>::new(), "commands that no request used");

    let events = face.events.lock().unwrap();
    assert!(events.windows(2).all(|pair| pair[0].number < pair[1].number));
    let told = |change: &Change| events.iter().any(|event| event.change == *change);
    for change in [
        Change::DiskCreated { disk: text("a"), origin: None },
        Change::DiskResized { disk: text("a"), capacity: 10 << 20 },
        Change::DiskRenamed { disk: text("a"), to: text("b") },
        Change::SnapshotCreated { disk: text("b"), snapshot: text("s") },
        Change::DiskReverted { disk: text("b"), snapshot: text("s") },
        Change::DiskCreated { disk: text("c"), origin: Some(text("b@s")) },
        Change::DiskChanged { disk: text("c"), by: text("disk detach") },
        Change::SnapshotDeleted { disk: text("b"), snapshot: text("s") },
        Change::DiskDeleted { disk: text("c") },
        Change::DiskCreated { disk: text("converted"), origin: None },
        Change::DiskCreated { disk: text("flat"), origin: None },
        Change::DiskChanged { disk: text("flat"), by: text("disk migrate") },
        Change::DiskCreated { disk: text("restored"), origin: None },
        Change::DiskCreated { disk: text("web"), origin: None },
        Change::DiskDeleted { disk: text("web") },
        Change::DiskCreated { disk: text("copy"), origin: None },
    ] {
        assert!(told(&change), "{change:?} was not reported: {events:#?}");
    }
    drop(events);
    let Face { target, datastore, .. } = face;
    if let Target::Open(Service { jobs: Some(jobs), served: Some(served), .. }) = &target {
        served.nbd.stop();
        jobs.stop();
    }
    datastore.close().unwrap();
}

/// Requests that need a server fail without one, and all others succeed.
#[test]
fn a_front_end_works_on_a_datastore_without_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let ask = |request| {
        let follow = Nothing;
        dispatch(&Target::At(Location::from(&path)), request, &follow)
    };
    let new = NewDisk::native(8 << 20, Provisioning::Thin);
    ask(Request::Disk(DiskRequest::Create { name: text("a"), new, settings: SettingsChange::default() })).unwrap();
    let all = ask(Request::Disk(DiskRequest::List)).unwrap();
    assert!(matches!(all, Reply::Disks(disks) if disks.len() == 1));
    assert_eq!(ask(Request::Job(JobRequest::List)).unwrap(), Reply::Jobs(Vec::new()));
    let check = Request::Check { data: false, repair: false };
    for request in [Request::Job(JobRequest::Start(Box::new(check.clone()))), Request::Events] {
        let error = ask(request).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("lamina serve"), "{error}");
    }
    let nowhere = dispatch(&Target::Files, check, &Nothing).unwrap_err();
    assert_eq!(nowhere.kind(), ErrorKind::Invalid);
    assert!(Path::new(&path).exists());
}

/// Ignores progress.
struct Nothing;

impl Progress for Nothing {
    fn update(&self, _: u64, _: u64) {}
    fn cancelled(&self) -> bool {
        false
    }
}

impl Watch for Nothing {
    fn part(&self, part: Part) -> Result<()> {
        panic!("{part:?} was not requested")
    }
}
