//! `lamina vm` is killed with SIGKILL at random times during every kind of clone, snapshots, freezing, starting,
//! deletion of machines and snapshots, and reverts.
//!
//! One parent runs, another is frozen, and a third is stopped. In each round one command is killed at a random time,
//! and then `lamina vm list` runs. Then every listed machine must be complete, every disk and snapshot must belong to a
//! machine, every process must belong to a machine, no incomplete folder may be left, and machines that ran must still
//! run.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::fleet::{Fleet, contains, holds, write};
use testkit::process;

const KILLS: u64 = 60;
/// Latest time of a kill after the command began, in milliseconds.
const KILL_AFTER_MS_MAX: u64 = 160;

/// The commands that are killed. `NEW` stands for unused names.
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

const PARENTS: [&str; 4] = ["running", "frozen", "off", "icy"];

fn parents(fleet: &Fleet) {
    for name in PARENTS {
        fleet.make(name, "32M");
    }
    fleet.run("start running frozen icy").ok();
    fleet.run("freeze frozen").ok();
}

/// Checks the state after a killed command and the command that follows it.
fn look(fleet: &Fleet, what: &str) {
    // Any command first removes the incomplete objects of the killed command, and reports them.
    let next = process::output(&mut fleet.command("list"));
    let what = &format!("{what}; then the command printed: {}", String::from_utf8_lossy(&next.stderr));
    assert!(next.status.success(), "{what}");
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
    for name in PARENTS {
        assert!(list.contains_key(name), "{what}: {name}");
    }
    assert_eq!(list["running"]["state"], "running", "{what}");
    assert_eq!(list["frozen"]["state"], "frozen", "{what}");
    assert_eq!(list["off"]["state"], "stopped", "{what}");
    // Every process belongs to a machine, and every running machine has one. A process that was being started for the
    // killed command finds its folder removed, and ends.
    let runs = |machine: &serde_json::Value| machine["state"] == "running" || machine["state"] == "paused";
    let running: Vec<String> = list.iter().filter(|(_, one)| runs(one)).map(|(name, _)| name.clone()).collect();
    process::until(&format!("the running machines are {running:?}: {what}"), || {
        let mut ran: Vec<String> = fleet.processes().into_values().collect();
        ran.sort();
        ran == running
    });
    // A machine's snapshot covers all of its disks. A snapshot that was taken for clones has clones, and a snapshot
    // that was taken for a memory image belongs to an existing image.
    let images: BTreeSet<String> = process::files(&fleet.store.path().join("memory-images")).into_iter().collect();
    for (snapshot, clones) in fleet.snapshots() {
        let (disk, name) = snapshot.split_once('@').unwrap();
        if name.starts_with("clone-") {
            assert!(clones > 0, "{what}: {snapshot} is left without a clone");
        } else if let Some(id) = name.strip_prefix("instant-") {
            assert!(images.contains(id), "{what}: {snapshot} has no image");
        } else {
            let folder = fleet.folder().join(disk).join("snapshots").join(name);
            assert!(folder.join("snapshot.toml").exists(), "{what}: {snapshot} belongs to no machine");
        }
    }
    let there = fleet.snapshots();
    for name in list.keys() {
        let snapshots = fleet.run(&format!("snapshot list {name} --json")).json();
        for snapshot in snapshots["snapshots"].as_array().unwrap() {
            for disk in snapshot["disks"].as_array().unwrap() {
                assert!(there.contains_key(disk.as_str().unwrap()), "{what}: {snapshot}");
            }
        }
    }
}

/// Removes the machines of a round, so that the next round is fast.
fn clean(fleet: &Fleet, what: &str) {
    // Clones are deleted before their parents, whose names sort first.
    for (name, machine) in fleet.list().into_iter().rev() {
        if PARENTS.contains(&name.as_str()) {
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
    assert_eq!(fleet.list().len(), PARENTS.len(), "{what}");
}

#[test]
fn a_killed_command_leaves_complete_machines_or_none() {
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
            // A machine that continued from an image has no memory file of its own, so it cannot be frozen until it is
            // started again.
            fleet.run("stop icy --force").ok();
            fleet.run("start icy").ok();
        }
        let after = Duration::from_millis(random.below(KILL_AFTER_MS_MAX));
        let mut child = fleet.command(&command).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(after);
        match child.try_wait().unwrap() {
            Some(_) => done += 1,
            None => {
                fleet.kill(&mut child);
                killed += 1;
            }
        }
        let what = format!("round {number}, '{command}' killed after {after:?}");
        look(&fleet, &what);
        clean(&fleet, &what);
    }
    eprintln!("{killed} commands were killed, {done} were done before");
    assert!(killed > KILLS / 3, "{killed} of {KILLS} were killed: the others ended before");
    fleet.run("stop --force running").ok();
    fleet.store.is_clean();
}

/// Commands that remove an object, each with the commands that are run before it. At the beginning there is a machine
/// `gone`, whose disk begins with the byte 1.
const REMOVALS: [(&str, &[&str]); 8] = [
    ("delete gone", &["clone off gone --linked"]),
    ("delete gone", &["clone running gone --instant --identity keep", "stop gone --force"]),
    ("delete gone", &["clone off gone --full", "start gone", "freeze gone"]),
    ("delete gone", &["clone off gone --full --start", "snapshot create gone@live --memory", "stop gone --force"]),
    ("delete gone --promote", &["clone off gone --full", "clone gone heir --linked", "clone gone heiress --linked"]),
    ("snapshot delete gone@live", &["clone off gone --full --start", "snapshot create gone@live --memory"]),
    ("revert gone@live", &["clone off gone --full --start", "snapshot create gone@live --memory"]),
    ("revert gone@cold", &["clone off gone --full", "snapshot create gone@cold", "start gone"]),
];
/// Number of kills of each command.
const REMOVAL_KILLS: u32 = 5;

/// Checks that a removed object was removed completely, or that it still exists unchanged.
fn look_at_what_was_to_go(fleet: &Fleet, command: &str, rewritten: bool, what: &str) {
    look(fleet, what);
    let list = fleet.list();
    for heir in ["heir", "heiress"] {
        assert_eq!(list.contains_key(heir), command.contains("--promote"), "{what}");
        if list.contains_key(heir) {
            holds(fleet, heir, 0, 1);
        }
    }
    let Some(gone) = list.get("gone") else {
        assert!(command.starts_with("delete"), "{what}: a machine is left, although no command was to leave it");
        return;
    };
    let snapshots = fleet.run("snapshot list gone --json").json();
    let snapshots = snapshots["snapshots"].as_array().unwrap();
    if !command.starts_with("revert") {
        holds(fleet, "gone", 0, if rewritten { 2 } else { 1 });
        if command.starts_with("snapshot") {
            assert_eq!(gone["state"], "running", "{what}");
        }
        return;
    }
    assert_eq!(snapshots.len(), 1, "{what}");
    let reverted = contains(fleet, "gone", 0, 1);
    assert!(reverted || contains(fleet, "gone", 0, 2), "{what}: the disk has neither the old nor the new state");
    // The machine runs or is stopped, but is not paused.
    assert!(["running", "stopped"].contains(&gone["state"].as_str().unwrap()), "{what}: {gone}");
}

#[test]
fn a_killed_deletion_leaves_a_complete_machine_or_none() {
    let fleet = Fleet::new();
    parents(&fleet);
    for parent in ["off", "running"] {
        write(&fleet, parent, 0, 1);
    }
    let memory = fleet.memory_files();
    let mut killed = 0;
    for (command, before) in REMOVALS {
        let mut whole = Duration::ZERO;
        for round in 0..=REMOVAL_KILLS {
            for step in before {
                fleet.run(step).ok();
            }
            let rewritten = before.iter().any(|step| step.starts_with("snapshot"));
            if rewritten {
                write(&fleet, "gone", 0, 2);
            }
            let begun = Instant::now();
            let mut child = fleet.command(command).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let mut what = format!("'{command}' after {before:?}");
            if round == 0 {
                // The first run is not killed, and measures the duration. Each other run is killed at a random part of
                // this duration.
                assert!(child.wait().unwrap().success(), "{what}");
                whole = begun.elapsed();
            } else {
                let after = whole.mul_f64((f64::from(round) - 0.5) / f64::from(REMOVAL_KILLS));
                std::thread::sleep(after);
                killed += u32::from(child.try_wait().unwrap().is_none());
                fleet.kill(&mut child);
                what = format!("{what}, killed after {after:?} of {whole:?}");
            }
            look_at_what_was_to_go(&fleet, command, rewritten, &what);
            clean(&fleet, &what);
        }
    }
    assert!(killed > REMOVALS.len() as u32 * REMOVAL_KILLS / 3, "{killed} were killed: the others ended before");
    // No unused memory file remains, and no used one was removed.
    assert_eq!(fleet.memory_files(), memory);
    fleet.run("stop --force running frozen icy").ok();
    fleet.run(&format!("delete {}", PARENTS.join(" "))).ok();
    assert!(fleet.disks().is_empty() && fleet.snapshots().is_empty() && fleet.memory_files() == 0);
    assert!(process::files(&fleet.store.path().join("memory-images")).is_empty());
    fleet.store.is_clean();
}
