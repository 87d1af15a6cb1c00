//! `lamina vm` killed with SIGKILL at any moment of any clone, of snapshots, freezing, starting and deleting.
//!
//! A parent runs, another is frozen, a third is off. In each round one command is killed at a random instant; then a
//! harmless one follows, and after it: every machine that is listed is whole, every disk and snapshot of the datastore
//! belongs to one, no process runs that no machine has, nothing half made is left, and what ran still runs.

#![allow(clippy::unwrap_used)]

mod fleet;
mod pattern;
mod process;

use fleet::Fleet;
use pattern::Random;
use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

const KILLS: u64 = 60;
/// The latest moment of a kill after the command began.
const KILL_AFTER_MS_MAX: u64 = 160;

/// What is killed. `NEW` stands for names that nobody has.
const COMMANDS: [&str; 12] = [
    "clone running NEW --linked --count 12",
    "clone off NEW --linked --count 12",
    "clone running NEW --full --count 3 --parallel 2",
    "clone off NEW --full --count 3 --parallel 3",
    "clone running NEW --instant --count 3 --parallel 3 --identity keep",
    "clone frozen NEW --instant --count 3 --parallel 2 --identity keep",
    "clone running NEW --linked --count 2 --start",
    "snapshot create running@NEW",
    "snapshot create running@NEW --memory",
    "freeze icy",
    "create NEW --memory 32M --disk-size 8M --start",
    "start icy",
];

fn parents(fleet: &Fleet) {
    for name in ["running", "frozen", "off", "icy"] {
        fleet.make(name, "32M");
    }
    fleet.run("start running frozen icy").ok();
    fleet.run("freeze frozen").ok();
}

/// What must hold after the command that follows a killed one.
fn look(fleet: &Fleet, what: &str) {
    // The command that follows: whatever it is, it takes away what was left first, and says so.
    let next = fleet.command("list").output().unwrap();
    assert!(next.status.success(), "{what}: {}", String::from_utf8_lossy(&next.stderr));
    let list = fleet.list();
    assert!(fleet.unfinished().is_empty(), "{what}: {:?}", fleet.unfinished());
    let mut disks = BTreeSet::new();
    for (name, machine) in &list {
        for disk in machine["disks"].as_array().unwrap() {
            assert!(disks.insert(disk["name"].as_str().unwrap().to_owned()), "{what}: {name} shares a disk");
        }
        let log = || std::fs::read_to_string(fleet.folder().join(name).join("run/qemu.log")).unwrap_or_default();
        assert_ne!(machine["state"], "busy", "{what}: {name}: {}", log());
    }
    assert_eq!(fleet.disks(), disks, "{what}");
    for name in ["running", "frozen", "off", "icy"] {
        assert!(list.contains_key(name), "{what}: {name}");
    }
    assert_eq!(list["running"]["state"], "running", "{what}");
    assert_eq!(list["frozen"]["state"], "frozen", "{what}");
    assert_eq!(list["off"]["state"], "stopped", "{what}");
    // Each process is one machine's, and each machine that runs has one.
    let mut ran: Vec<String> = fleet.processes().into_values().collect();
    ran.sort();
    let runs = |machine: &serde_json::Value| machine["state"] == "running" || machine["state"] == "paused";
    let running: Vec<String> = list.iter().filter(|(_, one)| runs(one)).map(|(name, _)| name.clone()).collect();
    assert_eq!(ran, running, "{what}");
    // Snapshots of machines are whole or absent; those of clones are there for clones, those of images for images.
    let images: BTreeSet<String> = process::files(&fleet.store.path().join("memory-images")).into_iter().collect();
    for (snapshot, clones) in fleet.snapshots() {
        let (disk, name) = snapshot.split_once('@').unwrap();
        if name.starts_with("clone-") {
            assert!(clones > 0, "{what}: {snapshot} is there for nobody");
        } else if let Some(id) = name.strip_prefix("instant-") {
            assert!(images.contains(id), "{what}: {snapshot} has no image");
        } else {
            let folder = fleet.folder().join(disk).join("snapshots").join(name);
            assert!(folder.join("snapshot.toml").exists(), "{what}: {snapshot} belongs to no machine");
        }
    }
    let snapshots = fleet.run("snapshot list running --json").json();
    let there = fleet.snapshots();
    for snapshot in snapshots["snapshots"].as_array().unwrap() {
        for disk in snapshot["disks"].as_array().unwrap() {
            assert!(there.contains_key(disk.as_str().unwrap()), "{what}: {snapshot}");
        }
    }
}

/// Takes away what was made, so that the next round has little to look through.
fn clean(fleet: &Fleet, what: &str) {
    let parents = ["running", "frozen", "off", "icy"];
    for (name, machine) in fleet.list() {
        if parents.contains(&name.as_str()) {
            continue;
        }
        if machine["state"] != "stopped" {
            fleet.run(&format!("stop --force {name}")).ok();
        }
        fleet.run(&format!("delete {name}")).ok();
    }
    for snapshot in fleet.run("snapshot list running --json").json()["snapshots"].as_array().unwrap() {
        fleet.run(&format!("snapshot delete running@{}", snapshot["name"].as_str().unwrap())).ok();
    }
    match fleet.state("icy").as_str() {
        "frozen" | "stopped" => drop(fleet.run("start icy").ok()),
        "paused" => drop(fleet.run("resume icy").ok()),
        _ => {}
    }
    assert_eq!(fleet.list().len(), parents.len(), "{what}");
}

#[test]
fn whole_or_absent_whenever_a_command_is_killed() {
    let fleet = Fleet::new();
    parents(&fleet);
    let mut random = Random(0x5eed);
    let (mut killed, mut done) = (0, 0);
    for number in 0..KILLS {
        let command = COMMANDS[(number % COMMANDS.len() as u64) as usize].replace("NEW", &format!("new{number}"));
        if command == "start icy" {
            fleet.run("stop icy --force").ok();
        }
        if command == "freeze icy" {
            // What went on from an image once has no memory of its own to leave: a new start has.
            fleet.run("stop icy --force").ok();
            fleet.run("start icy").ok();
        }
        let after = Duration::from_millis(random.below(KILL_AFTER_MS_MAX));
        let mut child = fleet.command(&command).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(after);
        match child.try_wait().unwrap() {
            Some(_) => done += 1,
            None => {
                child.kill().unwrap();
                child.wait().unwrap();
                killed += 1;
            }
        }
        let what = format!("round {number}, '{command}' killed after {after:?}");
        look(&fleet, &what);
        clean(&fleet, &what);
    }
    eprintln!("{killed} commands were killed, {done} were done before");
    assert!(killed > KILLS / 3, "{killed} of {KILLS} were killed: the others were done before");
    fleet.run("stop --force running").ok();
    fleet.store.is_clean();
}
