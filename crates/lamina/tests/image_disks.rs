//! Disks in VMware's formats through the command line: every command, and every long operation while a client writes;
//! the files are then read by other programs.

#![allow(clippy::unwrap_used)]

use parking_lot::Mutex;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use testkit::history::{History, read_export};
use testkit::nbd::Client;
use testkit::process::{Store, tool};
use testkit::{pattern, process};

const SIZE: usize = 24 << 20;

#[test]
fn the_server_of_a_moved_datastore_makes_no_image_disks_at_the_old_path() {
    let store = Store::new();
    store.run("disk create before 64M --format vmdk").ok();
    let mut server = store.serve("");
    let (path, moved) = (store.path(), store.path().with_file_name("moved"));
    std::fs::rename(&path, &moved).unwrap();
    let at = |arguments: &str| process::run(&format!("--datastore {} {arguments}", moved.display()));
    let why = "was moved while it was open; move it back, or stop the server";
    for something_is_there in [false, true] {
        if something_is_there {
            std::fs::create_dir(&path).unwrap();
        }
        at("disk create vm1 64M --format vmdk").fails(1, why);
        at("clone before after --full").fails(1, why);
        at("snapshot create before@one").fails(1, why);
        // A check warns, and reports its findings.
        let checked = at("check");
        let warning = "warning: the folder of the datastore";
        assert!(checked.stdout.contains(warning) && checked.stdout.contains(why), "{checked:?}");
        at(&format!("disk create native{something_is_there} 64M")).ok();
        assert_eq!(path.exists(), something_is_there);
    }
    assert_eq!(process::files(&path), Vec::<String>::new());
    std::fs::remove_dir(&path).unwrap();
    std::fs::rename(&moved, &path).unwrap();
    store.run("disk create vm1 64M --format vmdk").ok();
    store.run("snapshot create vm1@one before@one").ok();
    server.stop("TERM");
    store.is_clean();
}

#[test]
fn a_vmdk_disk_is_created_snapshotted_resized_and_deleted() {
    for served in [false, true] {
        let store = Store::new();
        let mut server = served.then(|| store.serve(""));
        assert!(store.run("disk create vm1 1G --format vmdk").ok().contains("vmdk, thin"));
        store.run("disk create native 64M").ok();
        let made = store.run("disk create se 3T --format sesparse --json").json();
        assert_eq!((&made["format"], &made["capacity"]), (&"sesparse".into(), &(3u64 << 40).into()));
        store.run("disk create vm1 1G").fails(1, "vm1");
        store.run("disk create native 1G --format vmdk").fails(1, "native");
        store.run("disk create odd 513 --format vmdk").fails(2, "odd");
        store.run("disk create x 1G --format qcow2").fails(2, "qcow2");
        store.run("disk create x 1G --delta sesparse").fails(2, "native");
        store.run("disk create x 1G --format thin --provisioning thin").fails(2, "--provisioning");
        store.run("disk rename native vm1").fails(1, "vm1");
        store.run("disk rename vm1 native").fails(1, "native");
        store.run("disk resize vm1 2G").fails(1, "capacity");
        let list = store.run("disk list --json").json();
        let names: Vec<&str> = list["disks"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["native", "se", "vm1"], "both kinds of disks in one order");
        assert!(store.path().join("images/vm1/vm1-flat.vmdk").exists());

        let shown = store.run("disk show vm1 --json").json();
        let counters = &shown["image"]["counters"];
        assert_eq!((&counters["blocks"], &counters["nb"]), (&1024.into(), &0.into()));
        assert_eq!(shown["image"]["levels"], 1);
        assert!(store.run("disk show vm1").ok().contains("vm1-flat.vmdk"));
        store.run("disk inflate vm1").ok();
        let shown = store.run("disk show vm1 --json").json();
        assert_eq!(
            (&shown["image"]["counters"]["nb"], &shown["provisioning"]),
            (&1024.into(), &"eagerzeroedthick".into())
        );
        assert_eq!(store.run("disk punchzero vm1 --json").json()["returned"], 1 << 30);
        assert_eq!(store.run("disk show vm1 --json").json()["provisioning"], "thin");

        let taken = store.run("snapshot create vm1@a native@a se@a --json").json();
        let of: Vec<&str> =
            taken["snapshots"].as_array().unwrap().iter().map(|s| s["disk"].as_str().unwrap()).collect();
        assert_eq!(of, ["vm1", "native", "se"]);
        store.run("snapshot create vm1@a").fails(1, "'a'");
        store.run("snapshot create native@b --description x").fails(1, "native");
        store.run("snapshot create vm1@b --description before").ok();
        assert_eq!(store.run("snapshot show vm1@b --json").json()["description"], "before");
        assert!(store.run("snapshot list vm1").ok().contains("(head)"));
        store.run("snapshot revert vm1@c").fails(3, "'c'");
        store.run("snapshot revert vm1@a").ok();
        assert_eq!(store.run("disk show vm1 --json").json()["parent_snapshot"], "a");
        store.run("snapshot diff vm1@a vm1@b").ok();

        store.run("clone vm1@a linked --count 5").ok();
        store.run("clone vm1@a full --full").ok();
        assert_eq!(store.run("disk show linked-0003 --json").json()["origin"], "vm1@a");
        store.run("disk rename linked-0001 first").ok();
        store.run("snapshot delete vm1@a").fails(4, "first");
        store.run("disk delete vm1").fails(4, "linked-0005");
        store.run("disk delete vm1 --promote").fails(4, "linked-0005");
        store.run("disk detach first").fails(1, "--full");
        store.run("clone vm1@a native").fails(1, "native");
        store.run("disk delete first").ok();
        (2..=5).for_each(|number| drop(store.run(&format!("disk delete linked-000{number}")).ok()));
        store.run("snapshot delete vm1@b --up").ok();
        store.run("snapshot delete vm1@a --down").ok();
        assert_eq!(store.run("disk show vm1 --json").json()["image"]["levels"], 1);
        store.run("snapshot delete native@a --up").fails(1, "native");

        let stats = store.run("disk stats se --json").json();
        assert_eq!(stats["levels"].as_array().unwrap().len(), 2);
        let tuned = store.run("disk tune se --metadata-entries 1000 --read-cache 1M --levels-max 8 --json").json();
        assert_eq!(tuned["tunables"]["metadata_entries"], 1000);
        store.run("disk tune se").fails(2, "metadata-entries");
        for verb in ["stats", "inflate", "punchzero", "wipe", "shrink", "consolidate"] {
            store.run(&format!("disk {verb} native")).fails(1, "native");
            store.run(&format!("disk {verb} vm9")).fails(3, "vm9");
        }
        store.run("disk wipe se").ok();
        store.run("disk shrink se").ok();
        store.run("disk consolidate se").ok();
        assert_eq!(store.run("status --json").json()["disks"], 4);
        let text = store.run("check").ok();
        assert!(text.ends_with("clean\n"), "{text}");
        if let Some(server) = &mut server {
            assert_eq!(server.stop("TERM"), Some(0));
        }
        assert_eq!(store.run("disk stats se --json").json()["tunables"]["levels_max"], 8, "kept");
        for disk in ["vm1", "se", "full", "native"] {
            store.run(&format!("disk delete {disk}")).ok();
        }
        assert_eq!(process::files(&store.path().join("images")), Vec::<String>::new());
        store.is_clean();
    }
}

#[test]
fn snapshots_beyond_the_limit_of_levels_are_refused() {
    let store = Store::new();
    store.run("disk create vm1 64M --format vmdk").ok();
    store.run("disk tune vm1 --levels-max 3").ok();
    store.run("snapshot create vm1@a").ok();
    store.run("snapshot create vm1@b").ok();
    store.run("snapshot create vm1@c").fails(2, "limit is 3");
    store.run("disk tune vm1 --levels-max 4").ok();
    store.run("snapshot create vm1@c").ok();
}

#[test]
fn a_datastore_that_was_moved_still_has_its_clones() {
    let store = Store::new();
    store.run("disk create vm1 64M --format vmdk").ok();
    store.run("snapshot create vm1@a").ok();
    store.run("clone vm1@a c1").ok();
    let moved = store.path().with_file_name("moved");
    std::fs::rename(store.path(), &moved).unwrap();
    let at = |arguments: &str| process::run(&format!("--datastore {} {arguments}", moved.display()));
    assert_eq!(at("disk show c1 --json").json()["image"]["levels"], 2);
    assert!(at("check").ok().ends_with("clean\n"));
}

#[test]
fn files_that_belong_to_no_disk_are_reported_and_kept() {
    let store = Store::new();
    store.run("disk create vm1 64M --format vmdk").ok();
    store.run("disk create vm2 64M --format vmdk").ok();
    let record = store.path().join("images/vm1/lamina.disk");
    let mut bytes = std::fs::read(&record).unwrap();
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    bytes[last - 20] ^= 1;
    std::fs::write(&record, &bytes).unwrap();
    let found = store.run("check --json");
    assert_eq!(found.code, 6, "{found:?}");
    assert!(found.stdout.contains("images/vm1"), "{found:?}");
    assert_eq!(std::fs::read(&record).unwrap(), bytes);
    assert_eq!(store.run("disk show vm2 --json").code, 0, "the other disk can be used");
}

/// Writes to a disk until `stop` is set. The holder of `history`'s lock has exclusive use of the disk between rounds.
fn write_on(store: &Store, history: &Mutex<History>, stop: &AtomicBool) {
    let name = history.lock().name.clone();
    let mut client = Client::connect(&store.socket(), &name).unwrap();
    while !stop.load(Ordering::Acquire) {
        history.lock().step(&mut client).unwrap();
        // The lock is not fair, so this thread lets the other thread run.
        std::thread::yield_now();
    }
    history.lock().flush(&mut client).unwrap();
}

/// Takes a snapshot between two rounds, so that its content is known.
fn take(store: &Store, history: &Mutex<History>, snapshot: &str) {
    let mut history = history.lock();
    store.run(&format!("snapshot create {}@{snapshot}", history.name)).ok();
    history.snapshot_taken(snapshot);
}

/// Stops the writer when this value is dropped, also if the test fails.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn rounds_pass(history: &Mutex<History>, rounds: u64) {
    let begin = history.lock().version;
    process::until("the client has written more", || history.lock().version > begin + rounds * 8);
}

/// Runs all operations on a disk of each delta format while a client writes.
fn everything_under_writes(delta: &str, base: &str) {
    let store = Store::new();
    store.run(&format!("disk create vm1 {SIZE} --format {base} --delta {delta}")).ok();
    let mut server = store.serve("");
    let history = Mutex::new(History::new("vm1", 1, SIZE));
    let stop = AtomicBool::new(false);
    let run = |arguments: &str| drop(store.run(arguments).ok());
    std::thread::scope(|scope| {
        let _stopping = Stopping(&stop);
        scope.spawn(|| write_on(&store, &history, &stop));
        for snapshot in ["a", "b", "c", "d", "e"] {
            rounds_pass(&history, 20);
            take(&store, &history, snapshot);
        }
        for snapshot in ["a", "b", "c", "d", "e"] {
            history.lock().snapshot_is(snapshot, &read_export(&store, &format!("vm1@{snapshot}")), snapshot);
        }
        run("clone vm1@c linked");
        run("clone vm1 full --full");
        run("snapshot delete vm1@b --up");
        run("snapshot delete vm1@d --down");
        rounds_pass(&history, 10);
        for snapshot in ["a", "c", "e"] {
            history.lock().snapshot_is(snapshot, &read_export(&store, &format!("vm1@{snapshot}")), snapshot);
        }
        history.lock().snapshot_is("c", &read_export(&store, "linked"), "linked clone");
        run("disk delete linked");
        if delta == "sesparse" {
            run("disk wipe vm1");
            run("disk shrink vm1");
        }
        if base != "sesparse" {
            run("disk inflate vm1");
            run("disk punchzero vm1");
        }
        rounds_pass(&history, 10);
        run("disk consolidate vm1");
        take(&store, &history, "last");
        rounds_pass(&history, 20);
    });
    let history = history.into_inner();
    history.is(&read_export(&store, "vm1"), "the disk");
    history.snapshot_is("last", &read_export(&store, "vm1@last"), "its snapshot");
    assert_eq!(store.run("disk show vm1 --json").json()["image"]["levels"], 2);
    assert_eq!(server.stop("TERM"), Some(0));
    let text = store.run("check").ok();
    assert!(text.ends_with("clean\n"), "{text}");
    // The content that QEMU reads from the files.
    if delta != "vsansparse" {
        let head = store.run("disk show vm1 --json").json()["image"]["head"].as_str().unwrap().to_owned();
        let raw = store.path().with_file_name("raw");
        tool("qemu-img", &["convert", "-f", "vmdk", "-O", "raw", &head, raw.to_str().unwrap()]);
        history.is(&std::fs::read(&raw).unwrap(), "the content that qemu-img reads");
        check_descriptor(Path::new(&head));
    }
    // The full clone has no parent.
    let _server = store.serve("");
    assert_eq!(store.run("disk show full --json").json()["image"]["levels"], 1);
    read_export(&store, "full").chunks_exact(pattern::SECTOR).enumerate().for_each(|(at, sector)| {
        pattern::version(sector, 1, at as u64).unwrap();
    });
}

/// Checks a descriptor as ESXi writes it: text that names its parent by CID and hint.
fn check_descriptor(path: &Path) {
    let text = std::fs::read_to_string(path).unwrap();
    for word in ["# Disk DescriptorFile", "CID=", "parentCID=", "parentFileNameHint=", "createType="] {
        assert!(text.contains(word), "{}: no {word}: {text}", path.display());
    }
}

#[test]
fn vmfssparse_operations_under_writes() {
    everything_under_writes("vmfssparse", "thin");
}

#[test]
fn sesparse_operations_under_writes() {
    everything_under_writes("sesparse", "thin");
}

#[test]
fn vsansparse_operations_under_writes() {
    everything_under_writes("vsansparse", "zeroedthick");
}

#[test]
fn sesparse_base_operations_under_writes() {
    everything_under_writes("sesparse", "sesparse");
}

#[test]
fn qemu_and_nbd_tools_read_and_write_exports() {
    let store = Store::new();
    store.run("disk create vm1 48M --format vmdk --delta sesparse").ok();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let mut content = pattern::bytes(7, 48 << 20);
    content[8 << 20..30 << 20].fill(0);
    std::fs::write(path("raw"), &content).unwrap();
    let _server = store.serve("");
    tool("nbdcopy", &[&path("raw"), &store.uri("vm1")]);
    store.run("snapshot create vm1@a").ok();
    tool("qemu-io", &["-f", "raw", "-c", "write -P 7 1M 64k", "-c", "flush", &store.uri("vm1")]);
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &path("raw"), &store.uri("vm1@a")]);
    tool("nbdcopy", &[&store.uri("vm1"), &path("back")]);
    content[1 << 20..(1 << 20) + (64 << 10)].fill(7);
    assert!(std::fs::read(path("back")).unwrap() == content);
    let diff = store.run("snapshot diff vm1@a --json").json();
    assert_eq!(diff["changed"], 64 << 10, "{diff}");
    let text = tool("nbdinfo", &["--map=qemu:dirty-bitmap:a", &store.uri("vm1")]);
    assert!(text.contains("65536"), "{text}");
}

/// Ctrl-C, and the disconnect of a client, interrupt a merge and leave the disk valid.
#[test]
fn long_operations_can_be_interrupted() {
    let store = Store::new();
    store.run(&format!("disk create vm1 {SIZE} --format vmdk")).ok();
    let _server = store.serve("");
    let mut history = History::new("vm1", 1, SIZE);
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    (0..200).for_each(|_| history.round(&mut client).unwrap());
    for verb in [
        "snapshot delete vm1@a --up --rate 64k",
        "snapshot delete vm1@a --down --rate 64k",
        "disk consolidate vm1 --rate 64k",
    ] {
        if history.snapshots.is_empty() {
            store.run("snapshot create vm1@a").ok();
            history.snapshot_taken("a");
        }
        (0..50).for_each(|_| history.round(&mut client).unwrap());
        let mut child = store
            .command(verb)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        process::wait_until_interruptible(child.id());
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert!(child.try_wait().unwrap().is_none(), "{verb} takes long at this rate");
        process::send(child.id(), "INT");
        assert_eq!(process::wait(&mut child), Some(130), "{verb}");
        history.is(&read_export(&store, "vm1"), verb);
        history.verify_snapshots(&store);
    }
    store.run("disk consolidate vm1").ok();
    history.is(&read_export(&store, "vm1"), "merged after all");
    assert_eq!(store.run("disk show vm1 --json").json()["image"]["levels"], 1);
}
