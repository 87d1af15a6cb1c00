//! The requests about machines.

use super::*;

macro_rules! verbs {
    ($($name:literal: $pattern:pat),+ $(,)?) => {
        pub const VERBS: &[&str] = &[$($name),+];

        pub fn verb(verb: &MachineVerb) -> &'static str {
            match verb {
                $($pattern => $name),+
            }
        }
    };
}

verbs! {
    "vm create": MachineVerb::Create(_),
    "vm import": MachineVerb::Import(_),
    "vm edit": MachineVerb::Edit { .. },
    "vm rename": MachineVerb::Rename { .. },
    "vm export": MachineVerb::Export { .. },
    "vm backup create": MachineVerb::BackUp(_),
    "vm backup restore": MachineVerb::Restore(_),
    "vm start": MachineVerb::Start { .. },
    "vm stop": MachineVerb::Stop { .. },
    "vm pause": MachineVerb::Pause { .. },
    "vm resume": MachineVerb::Resume { .. },
    "vm show": MachineVerb::Show { .. },
    "vm list": MachineVerb::List,
    "vm delete": MachineVerb::Delete { .. },
    "vm snapshot create": MachineVerb::SnapshotCreate { .. },
    "vm snapshot list": MachineVerb::SnapshotList { .. },
    "vm snapshot delete": MachineVerb::SnapshotDelete { .. },
    "vm revert": MachineVerb::Revert { .. },
    "vm clone": MachineVerb::Clone { .. },
    "vm clone --to": MachineVerb::Send { .. },
    "vm freeze": MachineVerb::Freeze { .. },
    "vm console": MachineVerb::Console { .. },
    "vm screenshot": MachineVerb::Screenshot { .. },
    "vm send-key": MachineVerb::SendKey { .. },
    "vm type": MachineVerb::Type { .. },
    "vm exec": MachineVerb::Execute { .. },
}

/// Requests about machines, with a QEMU that runs only the firmware.
pub fn machines(face: &Face) {
    let names = || vec![text("web")];
    let snapshot = || MachineSnapshot { machine: text("web"), name: text("s") };
    let iso = face.beside("web.iso");
    std::fs::write(&iso, vec![0; 1 << 20]).unwrap();
    let new = NewMachine {
        name: text("web"),
        cpus: 1,
        cpu_model: None,
        memory: 32 << 20,
        disks: Vec::new(),
        disk_size: Some(4 << 20),
        networks: Vec::new(),
        cdroms: vec![iso.clone()],
        boot_order: vec![BootDevice::Cdrom, BootDevice::Disk],
        platform: Platform::default(),
        write_errors: WriteErrors::Stop,
        kernel: None,
        initrd: None,
        append: String::new(),
        vnc: Some(Vnc::Unix),
        vnc_tls: None,
        run_as: None,
        seed: Some(Seed { hostname: Some(text("web.example.org")), ..Seed::default() }),
        start: false,
    };
    face.vm(MachineVerb::Create(new));
    face.vm(MachineVerb::SnapshotCreate { snapshot: snapshot(), memory: false, quiesce: false });
    face.vm(MachineVerb::Start { names: names(), autostart: false, paused: true });
    face.vm(MachineVerb::Resume { names: names() });
    face.vm(MachineVerb::SendKey { name: text("web"), keys: vec![text("shift-a")] });
    face.vm(MachineVerb::Type { name: text("web"), text: text("a") });
    face.vm(MachineVerb::Screenshot { name: text("web"), path: face.beside("web.png") });
    assert!(face.beside("web.png").exists());
    face.vm(MachineVerb::Pause { names: names() });
    let console = face.vm(MachineVerb::Console { name: text("web"), log: false });
    assert!(matches!(console, MachineReply::Console { socket, .. } if socket.exists()));
    let edit = Edit { eject: vec![iso.clone()], ..Edit::default() };
    let MachineReply::Edited(web) = face.vm(MachineVerb::Edit { name: text("web"), edit }) else {
        panic!("unexpected reply")
    };
    assert_eq!((web.cdroms.len(), &web.cdroms[0].file), (1, &None));
    face.vm(MachineVerb::Edit { name: text("web"), edit: Edit { insert: vec![iso], ..Edit::default() } });
    let command = vec![text("/bin/true")];
    let execute = MachineVerb::Execute { name: text("web"), command, input: Vec::new(), timeout: 1 };
    face.fails(face.machine(execute), ErrorKind::Unsupported);
    backups(face);
    face.vm(MachineVerb::Freeze { name: text("web") });
    face.vm(MachineVerb::Stop { names: names(), all: false, timeout: None });
    face.vm(MachineVerb::Revert { snapshot: snapshot(), paused: false });
    let source = || Source { machine: text("web"), snapshot: Some(text("s")) };
    let options = CloneOptions {
        kind: CloneKind::Linked,
        parallel: 1,
        quiesce: false,
        start: false,
        identity: Inside::Kept,
        seed: Some(Seed { user_data: Some(text("#cloud-config\n")), ..Seed::default() }),
    };
    face.vm(MachineVerb::Clone { source: source(), names: vec![text("child")], options });
    let send =
        MachineVerb::Send { source: source(), remote: text("lamina://127.0.0.1:1/web"), how: how(), quiesce: false };
    face.fails(face.machine(send), ErrorKind::Invalid);
    let MachineReply::Machines(all) = face.vm(MachineVerb::List) else { panic!("unexpected reply") };
    assert_eq!(all.len(), 2);
    face.vm(MachineVerb::Delete { names: vec![text("child")], keep_disks: false, promote: false, force: false });
    let MachineReply::Snapshots { records, .. } = face.vm(MachineVerb::SnapshotList { name: text("web") }) else {
        panic!("unexpected reply")
    };
    assert_eq!(records.len(), 1);
    face.vm(MachineVerb::SnapshotDelete { snapshot: snapshot() });
    face.vm(MachineVerb::Edit { name: text("web"), edit: Edit { cpus: Some(2), ..Edit::default() } });
    face.vm(MachineVerb::Rename { name: text("web"), to: text("shop") });
    let MachineReply::Renamed { name, definition } =
        face.vm(MachineVerb::Rename { name: text("shop"), to: text("web") })
    else {
        panic!("unexpected reply")
    };
    assert_eq!((name.as_str(), definition.name.as_str(), definition.cpus), ("shop", "web", 2));
    face.vm(MachineVerb::Show { name: text("web"), children: false });
    face.vm(MachineVerb::Delete { names: names(), keep_disks: false, promote: false, force: false });
    let source = face.beside("web.img");
    std::fs::write(&source, vec![0; 1 << 20]).unwrap();
    let options = vm::import::Options::default();
    let import = MachineImport { source, options, dry_run: false, live: false, start: false, rate: 0 };
    let MachineReply::Imported { machines, .. } = face.vm(MachineVerb::Import(import)) else {
        panic!("unexpected reply")
    };
    assert_eq!(machines[0].plan.definition.disk_names(), ["web"]);
    let source = || Source { machine: text("web"), snapshot: None };
    face.vm(MachineVerb::Export { source: source(), path: face.beside("web.ova"), rate: 0 });
    assert!(face.beside("web.ova").exists());
    let machine = ArchiveMachine {
        name: text("web"),
        cpus: 1,
        memory: 32 << 20,
        controller: ArchiveController::Sata,
        cards: Vec::new(),
        uefi: false,
        secure_boot: false,
    };
    let export = ArchiveExport { path: face.beside("web.tar"), machine, disks: vec![text("web")], rate: 0 };
    face.fails(Request::ExportArchive(Box::new(export)), ErrorKind::Invalid);
}

/// Backs up the machine `web`, and restores it beside itself.
fn backups(face: &Face) {
    let place = || BackupPlace::Folder(face.beside("machines"));
    let backup = |snapshot: Option<&str>| MachineBackup {
        source: Source { machine: text("web"), snapshot: snapshot.map(text) },
        place: place(),
        full: false,
        quiesce: false,
        level: 3,
        key: None,
        rate: 0,
    };
    for snapshot in [Some("s"), None] {
        let MachineReply::BackedUp(made) = face.vm(MachineVerb::BackUp(backup(snapshot))) else {
            panic!("unexpected reply")
        };
        assert!(!made.created.already && made.quiet.is_some() == snapshot.is_none());
    }
    let restore = MachineRestore {
        place: place(),
        backup: Some(text("web@s")),
        name: text("restored"),
        live: false,
        start: false,
        key: None,
        rate: 0,
    };
    let MachineReply::Restored(restored) = face.vm(MachineVerb::Restore(restore)) else { panic!("unexpected reply") };
    assert!(restored.new_identity && restored.definition.disk_names() == ["restored"]);
    face.vm(MachineVerb::Delete { names: vec![text("restored")], keep_disks: false, promote: false, force: false });
    // The snapshot of the current state is deleted, so that only the first one is left.
    let MachineReply::Snapshots { records, .. } = face.vm(MachineVerb::SnapshotList { name: text("web") }) else {
        panic!("unexpected reply")
    };
    for record in records.into_iter().filter(|record| record.name != "s") {
        let snapshot = MachineSnapshot { machine: text("web"), name: record.name };
        face.vm(MachineVerb::SnapshotDelete { snapshot });
    }
    // What a machine's backup sends to the process that has the datastore open.
    let point = backup::MachinePoint {
        machine: text("lone"),
        uuid: text("1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11"),
        snapshot: text("s"),
        created: 0,
        consistency: text("stopped"),
        files: vec![backup::MachineContent { name: text("machine.toml"), content: b"x".to_vec() }],
    };
    let request = BackupMachine { point, disks: Vec::new(), place: place(), full: false, level: 3, key: None, rate: 0 };
    let uuid = request.point.uuid.clone();
    let prepared = face.done(Request::Backup(BackupRequest::PrepareMachine { place: place(), uuid }));
    assert!(matches!(prepared, Reply::BackupPrepared { unfinished, .. } if unfinished.is_empty()));
    let made = face.done(Request::Backup(BackupRequest::CreateMachine(Box::new(request))));
    assert!(matches!(made, Reply::MachineBackedUp(made) if made.disks.is_empty() && !made.incremental));
}
