//! Backups of machines with the command line: a machine with two disks and UEFI variables is backed up and restored as
//! one, also after kills in the middle of both. The machines are off; no guest is needed.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use testkit::process::{Store, files, run, until, wait};

const PIECE: u64 = 1 << 20;
const DISKS: [&str; 2] = ["web", "store"];

/// A datastore with the machine `web`, which has the disks `web` and `store`, and a folder for repositories beside it.
struct Setup {
    store: Store,
    beside: tempfile::TempDir,
}

impl Setup {
    fn new() -> Self {
        let setup = Self { store: Store::new(), beside: tempfile::tempdir().unwrap() };
        setup.run("disk create store 200M").ok();
        setup.run("vm create web --memory 64M --disk-size 64M --disk store --network user").ok();
        // The disk that is made for the machine comes first.
        let disks = setup.show("web")["disks"].clone();
        assert_eq!(disks.as_array().unwrap().iter().map(|disk| &disk["name"]).collect::<Vec<_>>(), DISKS);
        std::fs::write(setup.machine("web").join("nvram"), [9; 5000]).unwrap();
        setup
    }

    fn run(&self, arguments: &str) -> testkit::process::Done {
        self.store.run(arguments)
    }

    fn repository(&self) -> String {
        self.beside.path().join("backups").to_str().unwrap().to_owned()
    }

    fn machine(&self, name: &str) -> PathBuf {
        self.store.path().join("machines").join(name)
    }

    fn show(&self, name: &str) -> Value {
        self.run(&format!("--json vm show {name}")).json()
    }

    fn machines(&self) -> Vec<String> {
        let list = self.run("--json vm list").json();
        list["machines"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }

    fn disks(&self) -> Vec<String> {
        let list = self.run("--json disk list").json();
        list["disks"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }

    fn snapshots(&self, machine: &str) -> Vec<String> {
        let list = self.run(&format!("--json vm snapshot list {machine}")).json();
        list["snapshots"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }

    fn receptions(&self) -> usize {
        self.run("--json receive list").json()["receptions"].as_array().unwrap().len()
    }

    fn contents(&self, disks: [&str; 2]) -> [Vec<u8>; 2] {
        disks.map(|disk| self.store.content(disk))
    }

    /// A command whose rate makes it take seconds.
    fn slow(&self, arguments: &str) -> Child {
        self.store.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }
}

/// The backups in a repository: machines, or disks.
fn list(repository: &str, machines: bool) -> Vec<Value> {
    let all = run(&format!("--json backup list {repository}")).json()["backups"].as_array().unwrap().clone();
    all.into_iter().filter(|backup| backup["machine"].is_null() != machines).collect()
}

/// What identifies a machine: its UUID, and the addresses of its cards.
fn identity(machine: &Value) -> (String, Vec<String>) {
    let cards = machine["networks"].as_array().unwrap().iter();
    (machine["uuid"].as_str().unwrap().to_owned(), cards.map(|card| card["mac"].as_str().unwrap().to_owned()).collect())
}

#[test]
fn a_machine_is_backed_up_and_restored_as_one() {
    let here = Setup::new();
    let repository = here.repository();
    let _server = here.store.serve("");
    here.store.fill("web", 1, [0, 5]);
    here.store.fill("store", 50, [3, 199]);
    here.run("vm snapshot create web@monday").ok();
    let monday = here.contents(DISKS);
    let made = here.run(&format!("vm backup create web@monday {repository}")).ok();
    assert!(made.starts_with("backed up machine web@monday: 2 disks, 4 MiB of data, "), "{made}");
    let again = here.run(&format!("vm backup create web@monday {repository}")).ok();
    assert!(again.starts_with("machine web@monday was backed up before, as "), "{again}");
    // An increment for each disk.
    here.store.fill("store", 70, [4]);
    here.run("vm snapshot create web@tuesday").ok();
    let tuesday = here.contents(DISKS);
    let made = here.run(&format!("--json vm backup create web@tuesday {repository}")).json();
    let data: Vec<u64> = made["disks"].as_array().unwrap().iter().map(|disk| disk["data"].as_u64().unwrap()).collect();
    assert_eq!((data, &made["disks"][0]["based_on"]), (vec![0, PIECE], &Value::from("monday")), "{made}");
    let machines = list(&repository, true);
    let disks = machines[1]["machine"]["disks"].as_array().unwrap().iter();
    let disks: Vec<&str> = disks.map(|disk| disk["disk"].as_str().unwrap()).collect();
    assert_eq!((disks, machines.len()), (DISKS.to_vec(), 2));
    assert_eq!((&machines[1]["capacity"], &machines[1]["snapshot"]), (&(264 * PIECE).into(), &"tuesday".into()));
    assert_eq!(list(&repository, false).len(), 4);
    let text = run(&format!("backup list {repository}")).ok();
    assert!(text.contains("machine:web@monday") && text.contains("web, store"), "{text}");
    assert!(run(&format!("backup verify {repository} machine:web@monday")).ok().starts_with("3 backups verified"));

    // Beside the machine: a new identity, and all names are checked first.
    let refused = here.run(&format!("vm backup restore {repository} web"));
    refused.fails(1, "there is a machine 'web' already");
    here.run(&format!("vm backup restore {repository} store --backup web@monday")).fails(1, "disk 'store'");
    here.run(&format!("vm backup restore {repository} copy")).fails(3, "machine:copy");
    here.run(&format!("backup restore {repository} copy --backup machine:web")).fails(2, "lamina vm backup restore");
    assert_eq!((here.machines(), here.disks().len()), (vec!["web".to_owned()], 2));
    let restored = here.run(&format!("--json vm backup restore {repository} copy --backup web@monday")).json();
    assert_eq!((&restored["new_identity"], &restored["data"]), (&true.into(), &(4 * PIECE).into()), "{restored}");
    let (web, copy) = (here.show("web"), here.show("copy"));
    assert!(identity(&web).0 != identity(&copy).0 && identity(&web).1 != identity(&copy).1);
    assert!(here.contents(["copy", "copy-2"]) == monday);
    assert_eq!(std::fs::read(here.machine("copy").join("nvram")).unwrap(), [9; 5000]);
    assert_eq!(here.snapshots("copy"), ["monday"]);
    // The copy continues the chain.
    here.run("vm snapshot create copy@later").ok();
    let made = here.run(&format!("--json vm backup create copy@later {repository}")).json();
    assert_eq!(made["disks"][1]["based_on"], "monday", "{made}");
    here.run("vm delete copy").ok();

    // In place of the machine: its own identity, and the names of its disks.
    let id = here.show("web");
    here.run("vm delete web").ok();
    let restored = here.run(&format!("vm backup restore {repository} web")).ok();
    assert!(restored.starts_with("restored machine web from web@tuesday: 2 disks, 5 MiB of data in "), "{restored}");
    assert_eq!(identity(&here.show("web")), identity(&id));
    assert!(here.contents(DISKS) == tuesday);
    assert_eq!(here.receptions(), 0);

    // The rules keep what the newest backup of each machine needs.
    run(&format!("backup delete {repository} store@monday")).fails(4, "cannot be deleted");
    let pruned = run(&format!("--json backup prune {repository} --keep last=1")).json();
    assert_eq!(pruned["deleted"], 1, "{pruned}");
    assert_eq!(list(&repository, true).iter().map(|one| &one["snapshot"]).collect::<Vec<_>>(), ["tuesday", "later"]);
    run(&format!("backup verify {repository}")).ok();
    run(&format!("backup delete {repository} machine:copy machine:web")).ok();
    assert_eq!((list(&repository, true).len(), list(&repository, false).len()), (0, 2));
    here.store.is_clean();
}

#[test]
fn the_current_state_of_a_machine_is_backed_up_by_a_snapshot_that_the_next_backup_replaces() {
    let here = Setup::new();
    let repository = here.repository();
    here.run(&format!("vm backup create none {repository}")).fails(3, "none");
    here.run(&format!("vm backup create web@none {repository}")).fails(3, "none");
    here.run(&format!("vm backup create web file:{repository}")).fails(2, "folder");
    here.run(&format!("vm backup create web@a {repository} --quiesce")).fails(2, "--quiesce");
    assert!(!Path::new(&repository).exists());
    let server = here.store.serve("");
    for round in 0..3u64 {
        here.store.fill("web", round * 10, [round]);
        let made = here.run(&format!("--json vm backup create web {repository}")).json();
        assert_eq!((&made["disks"][0]["data"], &made["remark"]), (&PIECE.into(), &"the machine did not run".into()));
        assert_eq!(made["disks"][0]["based_on"].is_null(), round == 0, "{made}");
        assert_eq!(here.snapshots("web").len(), 1);
    }
    // A backup of the disk alone has a snapshot of its own.
    here.run(&format!("backup create web {repository}")).ok();
    assert_eq!(here.snapshots("web").len(), 1);
    here.run(&format!("vm backup create web {repository}")).ok();
    assert_eq!(here.run("--json snapshot list web").json()["snapshots"].as_array().unwrap().len(), 2);
    drop(server);
    // Without a server, also with a key.
    let key = here.beside.path().join("key");
    run(&format!("backup key {}", key.display())).ok();
    let sealed = here.beside.path().join("sealed");
    let with_key = format!("{} --key-file {}", sealed.display(), key.display());
    here.run(&format!("vm backup create web {with_key}")).ok();
    here.run("vm delete web").ok();
    here.run(&format!("vm backup restore {} web", sealed.display())).fails(2, "--key-file");
    assert_eq!((here.machines().len(), here.disks().len(), here.receptions()), (0, 0, 0));
    let (place, key) = (sealed.display(), key.display());
    here.run(&format!("vm backup restore {place} web --key-file {key}")).ok();
    assert_eq!(here.disks().len(), 2);
}

#[test]
fn a_machine_can_be_used_while_it_is_restored() {
    let here = Setup::new();
    let repository = here.repository();
    let mut server = here.store.serve("");
    here.store.fill("store", 5, 0..60);
    here.run("vm snapshot create web@s").ok();
    let expected = here.contents(DISKS);
    here.run(&format!("vm backup create web@s {repository}")).ok();
    here.run("vm delete web").ok();
    let restored = here.run(&format!("vm backup restore {repository} web --live --rate 4M")).ok();
    assert!(restored.contains("which the server copies now"), "{restored}");
    run(&format!("backup delete {repository} machine:web")).fails(4, "is being restored");
    assert!(here.contents(DISKS) == expected);
    // A machine that is given up needs the backups no more.
    here.run("vm delete web").ok();
    let free = || files(Path::new(&repository)).iter().all(|name| !name.starts_with("reader-"));
    until("the backups are free", free);
    here.run(&format!("vm backup restore {repository} web --live")).ok();
    let native = |disk| here.run(&format!("--json disk show {disk}")).json()["format"] == "native";
    until("all has arrived", || DISKS.iter().all(&native));
    assert!(here.contents(DISKS) == expected);
    assert!(here.snapshots("web").is_empty());
    until("the backups are free", free);
    run(&format!("backup delete {repository} machine:web")).ok();
    // Nothing would copy the disks without a server.
    server.stop("TERM");
    here.run(&format!("vm backup restore {repository} other --live")).fails(1, "lamina serve");
}

#[test]
fn a_killed_backup_of_a_machine_leaves_no_half_machine_and_continues() {
    let here = Setup::new();
    let repository = here.repository();
    let mut server = here.store.serve("");
    here.store.fill("web", 1, 0..20);
    here.store.fill("store", 40, 0..100);
    let packs = || {
        let found = std::fs::read_dir(&repository).map(|entries| {
            // An object has another name while it is written.
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.filter(|name| name.starts_with("pack-") && !name.ends_with(".new")).count()
        });
        found.unwrap_or(0)
    };
    let running = || {
        let jobs = here.run("--json job list").json();
        jobs["jobs"].as_array().unwrap().iter().any(|job| job["state"] == "running")
    };
    // The command is killed while the second disk is backed up, then the server.
    let mut command = here.slow(&format!("vm backup create web {repository} --rate 10M"));
    // The first disk has two packs.
    until("a pack of the second disk was stored", || packs() > 2);
    // Another command finds the repository in use, and leaves the snapshot.
    here.run(&format!("vm backup create web {repository}")).fails(4, "");
    assert_eq!(here.snapshots("web").len(), 1);
    command.kill().unwrap();
    wait(&mut command);
    until("the server has ended the request", || !running());
    let taken = here.snapshots("web");
    assert_eq!(taken.len(), 1);
    let unfinished = |backups: Vec<Value>| backups.iter().all(|one| one["finished"].is_null());
    assert!(unfinished(list(&repository, true)));
    let before = packs();
    let mut command = here.slow(&format!("vm backup create web {repository} --rate 10M"));
    until("another pack was stored", || packs() > before);
    server.kill();
    wait(&mut command);
    assert!(unfinished(list(&repository, true)) && list(&repository, true).len() == 1);
    here.run(&format!("vm backup restore {repository} copy --backup web")).fails(3, "machine:web");
    // The state of the first attempt is backed up, without a server.
    let made = here.run(&format!("--json vm backup create web {repository}")).json();
    assert_eq!(made["snapshot"], taken[0], "{made}");
    assert!(made["disks"][0]["already"] == true && made["disks"][1]["resumed"].as_u64() > Some(0), "{made}");
    assert_eq!((list(&repository, true).len(), list(&repository, false).len()), (1, 2));
    run(&format!("backup verify {repository}")).ok();
    let _server = here.store.serve("");
    let expected = here.contents(DISKS);
    here.run(&format!("vm backup restore {repository} copy --backup web")).ok();
    assert!(here.contents(["copy", "copy-2"]) == expected);
    // A snapshot that lost that of a disk since the interruption is not continued, and is deleted.
    here.store.fill("store", 60, 0..100);
    let before = packs();
    let mut command = here.slow(&format!("vm backup create web {repository} --rate 10M"));
    until("a pack was stored", || packs() > before);
    command.kill().unwrap();
    wait(&mut command);
    until("the server has ended the request", || !running());
    let snapshots = here.snapshots("web");
    let interrupted = snapshots.iter().find(|name| **name != taken[0]).unwrap();
    here.run(&format!("snapshot delete store@{interrupted}")).ok();
    let made = here.run(&format!("--json vm backup create web {repository}")).json();
    assert!(!snapshots.contains(&made["snapshot"].as_str().unwrap().to_owned()), "{made}");
    assert_eq!(here.snapshots("web"), [made["snapshot"].as_str().unwrap()]);
}

#[test]
fn a_killed_restore_of_a_machine_leaves_nothing() {
    let here = Setup::new();
    let repository = here.repository();
    let mut server = here.store.serve("");
    here.store.fill("web", 1, 0..10);
    here.store.fill("store", 40, 0..100);
    let expected = here.contents(DISKS);
    here.run("vm snapshot create web@s").ok();
    here.run(&format!("vm backup create web@s {repository}")).ok();
    let restore = format!("vm backup restore {repository} copy --backup web@s");
    // What an interrupted restore of a disk alone has received is kept all the time.
    let mut command = here.slow(&format!("backup restore {repository} kept --backup store@s --rate 10M"));
    until("a disk is being restored", || here.receptions() > 0);
    command.kill().unwrap();
    wait(&mut command);
    let half = || here.disks().contains(&"copy".to_owned()) && here.receptions() > 1;
    for kill_server in [false, true] {
        let mut command = here.slow(&format!("{restore} --rate 10M"));
        until("the second disk is being restored", half);
        if kill_server {
            server.kill();
        } else {
            command.kill().unwrap();
        }
        wait(&mut command);
        // The next command about machines cleans up, and says so.
        assert_eq!(here.run("vm list").code, 0);
        assert_eq!(here.machines(), ["web"], "server killed: {kill_server}");
        assert_eq!((here.disks(), here.receptions()), (vec!["store".to_owned(), "web".to_owned()], 1));
    }
    let _server = here.store.serve("");
    // An interrupted command cleans up itself.
    let mut command = here.slow(&format!("{restore} --rate 10M"));
    until("the second disk is being restored", half);
    testkit::process::send(command.id(), "INT");
    assert_eq!(wait(&mut command), Some(130));
    assert_eq!((here.disks().len(), here.receptions()), (2, 1));
    // A damaged backup makes no machine.
    let pack = files(Path::new(&repository)).into_iter().rfind(|name| name.starts_with("pack-")).unwrap();
    let path = Path::new(&repository).join(&pack);
    let good = std::fs::read(&path).unwrap();
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    std::fs::write(&path, &bad).unwrap();
    assert_eq!(here.run(&restore).code, 6);
    assert_eq!((here.machines().len(), here.disks().len(), here.receptions()), (1, 2, 1));
    std::fs::write(&path, &good).unwrap();
    here.run(&format!("backup restore {repository} kept --backup store@s")).ok();
    assert!(here.receptions() == 0 && here.store.content("kept") == expected[1]);
    here.run(&restore).ok();
    assert!(here.contents(["copy", "copy-2"]) == expected);
    here.store.is_clean();
}
