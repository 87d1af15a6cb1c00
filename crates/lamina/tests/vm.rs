//! Machines with the command line: creating, starting, cloning, reverting and deleting them. The machines have nothing
//! to boot; the tests of `crates/vm` check the effects on guests.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use std::collections::BTreeSet;
use std::process::Stdio;
use testkit::fleet::{Fleet, MEMORY, MIB, holds, write};
use testkit::nbd::Client;
use testkit::process;
use testkit::process::{lamina, wait};

#[test]
fn a_machine_is_created_run_and_deleted() {
    let mut fleet = Fleet::new();
    fleet.make("web", "64M");
    fleet.run("create web").fails(1, "there is a machine 'web' already");
    fleet.run("create db --disk web").fails(4, "disk 'web' belongs to machine 'web'");
    fleet.run("create db --disk nothing").fails(3, "there is no disk 'nothing'");
    fleet.run("create we_b").fails(2, "cannot name a machine");
    fleet.run("create db --kernel /nowhere/vmlinuz").fails(3, "/nowhere/vmlinuz");
    fleet.run("create db --memory 1M").fails(2, "MiB of memory from 16 MiB");
    let shown = fleet.show("web");
    assert_eq!((&shown["state"], &shown["memory"], &shown["cpus"]), (&json!("stopped"), &json!(32 << 20), &json!(1)));
    assert_eq!(shown["disks"], json!([{ "name": "web", "slot": 8, "bus": "virtio", "unit": 0 }]));
    assert_eq!(shown["accelerator"] == "kvm", shown["why_not_kvm"].is_null(), "{shown}");
    // Without a server, the error message says what to do, and no process remains.
    fleet.server.take().unwrap().stop("TERM");
    fleet.run("start web").fails(1, "run 'lamina serve");
    assert_eq!((fleet.names(), fleet.memory_files()), (vec!["web".to_string()], 0));
    fleet.server = Some(fleet.store.serve(""));

    fleet.run("start web --paused").ok();
    assert_eq!(fleet.state("web"), "paused");
    fleet.run("resume web").ok();
    assert_eq!(fleet.state("web"), "running");
    fleet.run("start web").fails(7, "runs already");
    fleet.run("delete web").fails(4, "stop it first");
    fleet.run("pause web").ok();
    fleet.run("stop web").fails(7, "paused and cannot react");
    fleet.run("resume web").ok();
    fleet.run("stop web --timeout 0").fails(4, "it still runs");
    fleet.run("exec web -- true").fails(125, "no agent answers");
    fleet.run("exec nothing -- true").fails(125, "there is no machine");
    fleet.run("exec web --timeout x -- true").fails(125, "--timeout");
    assert_eq!(fleet.processes().len(), 1);
    fleet.run("stop web --force").ok();
    assert_eq!((fleet.state("web").as_str(), fleet.processes().len()), ("stopped", 0));
    fleet.run("stop web").fails(7, "machine 'web' does not run: there is nothing to stop");
    fleet.run("pause web").fails(7, "'lamina vm start web' starts it");
    // QEMU is missing, or is a program that cannot start.
    fleet.run("start web --qemu /nowhere/qemu").fails(3, "qemu-system-x86");
    assert_eq!(fleet.memory_files(), 0);
    fleet.run("delete web --keep-disks").ok();
    assert_eq!((fleet.names().len(), fleet.disks()), (0, BTreeSet::from(["web".to_string()])));
    fleet.run(&format!("create web --disk web --memory {MEMORY} --network user --network unplugged")).ok();
    assert_eq!(fleet.show("web")["networks"].as_array().unwrap().len(), 2);
    fleet.run("delete web").ok();
    assert!(fleet.disks().is_empty() && fleet.unfinished().is_empty());
    fleet.run("show web").fails(3, "there is no machine 'web'");
}

#[test]
fn a_machine_does_not_start_on_a_disk_in_use() {
    let fleet = Fleet::new();
    fleet.make("web", "64M");
    let client = Client::connect(&fleet.store.socket(), "web").unwrap();
    fleet.run("start web").fails(4, "in use by 1 other client");
    drop(client);
    fleet.run("start web").ok();
}

#[test]
fn a_broken_definition_affects_no_other_machine_and_protects_its_disks() {
    let mut fleet = Fleet::new();
    for name in ["db", "web", "zoo"] {
        fleet.make(name, "1M");
    }
    fleet.run("start zoo").ok();
    let file = |name: &str| fleet.folder().join(name).join("machine.toml");
    let web = std::fs::read_to_string(file("web")).unwrap();
    std::fs::write(file("web"), web.replace("cpus = 1", "cpus = one")).unwrap();
    std::fs::remove_file(file("zoo")).unwrap();

    let listed = fleet.run("list").ok();
    let state = |name: &str| listed.lines().find(|line| line.starts_with(name)).unwrap().split_whitespace().nth(1);
    assert_eq!((state("db "), state("web "), state("zoo ")), (Some("stopped"), Some("broken"), Some("broken,")));
    assert!(listed.contains("\nweb is broken: ") && listed.contains("machine.toml"), "{listed}");
    let list = fleet.list();
    assert_eq!((&list["db"]["problem"], list["db"]["cpus"].as_u64()), (&json!(null), Some(1)));
    assert!(list["web"]["problem"].as_str().unwrap().contains("cpus = one"), "{list:?}");
    assert_eq!((&list["zoo"]["state"], list["zoo"]["problem"].is_string()), (&json!("running"), true));
    fleet.run("start db").ok();
    fleet.run("stop db --force").ok();
    for verb in ["show web", "start web", "edit web --cpus 2"] {
        let refused = fleet.run(verb);
        let says = ["machine 'web' is broken", "correct the file", "'lamina vm delete web --force'"];
        assert!(refused.code == 2 && says.iter().all(|words| refused.stderr.contains(words)), "{verb}: {refused:?}");
    }

    // The text of web's definition still names the disk `web`. The definition of zoo was removed, so no definition
    // names the disk `zoo`.
    fleet.store.run("disk delete web").fails(4, "belongs to machine 'web'");
    fleet.store.run("disk rename web other").fails(4, "belongs to machine 'web'");
    fleet.run("create new --disk web").fails(4, "belongs to machine 'web'");
    let refused = fleet.run("delete web db");
    assert_eq!((refused.code, refused.stdout.as_str()), (2, "deleted db\n"), "{refused:?}");
    assert!(refused.stderr.contains("machine 'web' is broken") && refused.stderr.contains("--force"), "{refused:?}");
    fleet.run("delete zoo --force").fails(4, "stop it first");
    fleet.run("stop zoo --force").ok();
    fleet.run("delete web zoo --force").ok();
    assert_eq!((fleet.names().len(), fleet.disks()), (0, ["web", "zoo"].map(String::from).into()));
    assert!(fleet.unfinished().is_empty() && fleet.processes().is_empty());
    assert_eq!(fleet.server.take().unwrap().stop("TERM"), Some(0));
    fleet.store.is_clean();
}

#[test]
fn several_linked_clones_at_once() {
    let fleet = Fleet::new();
    fleet.make("base", "64M");
    fleet.store.run("disk create more --size 32M").ok();
    fleet.run("delete base --keep-disks").ok();
    fleet.run(&format!("create base --disk base,more --memory {MEMORY} --start")).ok();
    write(&fleet, "base", 0, 1);
    write(&fleet, "more", 0, 2);
    fleet.make("web-003", "1M");
    let made = fleet.run("clone base --linked --count 12 --name-pattern web-%03d --json");
    assert_eq!(made.code, 1, "{made:?}");
    let error: serde_json::Value = serde_json::from_str(&made.stderr).unwrap();
    let [name, kind, message] = ["name", "kind", "message"].map(|member| error["error"][member].as_str().unwrap());
    assert_eq!((name, kind), ("web-003", "exists"));
    assert_eq!(message, "there is a machine 'web-003' already");
    let made: serde_json::Value = serde_json::from_str(&made.stdout).unwrap();
    assert_eq!((made["made"].as_array().unwrap().len(), made["failed"].as_array().unwrap().len()), (11, 1));
    assert_eq!(made["consistency"], "crash-consistent");
    write(&fleet, "base", 0, 9);
    let list = fleet.list();
    assert_eq!((list.len(), fleet.disks().len()), (13, 2 + 1 + 22));
    let identities: BTreeSet<String> = list.values().map(|one| one["uuid"].to_string()).collect();
    let addresses: BTreeSet<String> = list.values().map(|one| one["networks"][0]["mac"].to_string()).collect();
    assert_eq!((identities.len(), addresses.len()), (13, 13), "web-003 has no card: null is one of them");
    holds(&fleet, "web-012", 0, 1);
    holds(&fleet, "web-012-2", 0, 2);
    assert_eq!(list["web-012"]["origin"], json!({ "machine": "base", "way": "linked" }));
    // A clone of a clone, started at once, and a clone of a running machine.
    fleet.run("clone web-012 deep --start").ok();
    assert_eq!(fleet.state("deep"), "running");
    holds(&fleet, "deep", 0, 1);
    // `show` lists only the first ten clones.
    let shown = fleet.run("show base").ok();
    assert_eq!(shown.matches(" (on clone-").count(), 10, "{shown}");
    assert!(shown.contains("and 1 more; --children prints all"), "{shown}");
    assert_eq!(fleet.run("show base --children").ok().matches(" (on clone-").count(), 11);
    let shown = fleet.show("base");
    assert_eq!((shown["children"].as_array().unwrap().len(), &shown["children_count"]), (11, &json!(11)));
    fleet.run("clone base web-001").fails(1, "there is a machine 'web-001' already");
    fleet.run("clone base a_b").fails(2, "cannot name a machine");
    fleet.run("clone nothing x").fails(3, "there is no machine 'nothing'");
    // A parent is not deleted while clones are based on it; the snapshot is deleted with the last clone.
    fleet.run("stop base deep --force").ok();
    fleet.run("delete base").fails(4, "clones are based on disk 'base'");
    assert_eq!(fleet.snapshots().len(), 4);
    fleet.run("delete deep").ok();
    assert_eq!(fleet.snapshots().len(), 2);
    for number in (1..=12).filter(|number| *number != 3) {
        fleet.run(&format!("delete web-{number:03}")).ok();
    }
    assert!(fleet.snapshots().is_empty(), "{:?}", fleet.snapshots());
    assert_eq!(fleet.disks(), ["base", "more", "web-003"].map(String::from).into());
    // With --promote, the snapshots of a deleted parent are handed over to its clones.
    fleet.run("clone base heir").ok();
    fleet.run("delete base --promote").ok();
    holds(&fleet, "heir", 0, 9);
    fleet.store.is_clean();
}

#[test]
fn full_clones_are_independent_and_of_one_point_in_time() {
    let fleet = Fleet::new();
    fleet.store.run("disk create vmdk --size 32M --format vmdk").ok();
    fleet.run(&format!("create base --disk-size 64M --disk vmdk --memory {MEMORY} --start")).ok();
    write(&fleet, "base", 0, 1);
    write(&fleet, "vmdk", 3 * MIB, 2);
    let made = fleet.run("clone base copy --full --count 3 --parallel 2 --json").json();
    assert_eq!(made["made"].as_array().unwrap().len(), 3, "{made}");
    assert!(fleet.snapshots().is_empty(), "{:?}", fleet.snapshots());
    write(&fleet, "base", 0, 8);
    for number in 1..=3 {
        holds(&fleet, &format!("copy-{number:04}"), 0, 1);
        holds(&fleet, &format!("copy-{number:04}-2"), 3 * MIB, 2);
        assert_eq!(fleet.list()[&format!("copy-{number:04}")]["origin"]["way"], "full");
    }
    fleet.run("stop base --force").ok();
    fleet.run("delete base").ok();
    fleet.run("start copy-0001 copy-0002").ok();
    assert_eq!(fleet.processes().len(), 2);
}

#[test]
fn an_interrupted_clone_command_leaves_only_complete_machines() {
    let fleet = Fleet::new();
    fleet.make("base", "256M");
    for at in 0..192 {
        write(&fleet, "base", at * MIB, at);
    }
    let mut clone =
        fleet.command("clone base copy --full --count 40 --parallel 2").stderr(Stdio::piped()).spawn().unwrap();
    // Waits for a moment when some clones are complete and others are being made.
    process::until("some clones exist", || {
        ["copy-0001", "copy-0002"].iter().all(|it| fleet.folder().join(it).exists())
    });
    process::send(clone.id(), "INT");
    assert_eq!(wait(&mut clone), Some(130));
    let names = fleet.names();
    assert!((3..40).contains(&names.len()), "{names:?}");
    let disks: Vec<String> = fleet.disks().into_iter().collect();
    assert_eq!(disks, names, "each clone has its disk, and there is no other disk");
    assert!(fleet.snapshots().is_empty() && fleet.unfinished().is_empty());
    holds(&fleet, names.last().unwrap(), 191 * MIB, 191);
}

#[test]
fn snapshots_with_and_without_memory() {
    let fleet = Fleet::new();
    fleet.make("web", "64M");
    fleet.store.run("disk create data --size 32M").ok();
    write(&fleet, "web", 0, 1);
    fleet.run("snapshot create web@first").ok();
    fleet.run("snapshot create web@first").fails(1, "has a snapshot 'first' already");
    fleet.run("snapshot create web@live --memory").fails(7, "it has no memory");
    fleet.store.run("snapshot create web@mine").ok();
    fleet.run("snapshot create web@mine").fails(1, "disk 'web' of machine 'web' has a snapshot 'mine'");
    write(&fleet, "web", 0, 2);
    fleet.run("start web").ok();
    let taken = fleet.run("snapshot create web@quiet --quiesce --json").json();
    assert_eq!(taken["consistency"], "crash-consistent");
    assert!(taken["remark"].as_str().unwrap().contains("agent does not answer"), "{taken}");
    let taken = fleet.run("snapshot create web@live --memory --json").json();
    assert_eq!((&taken["memory"], &taken["disks"]), (&json!(true), &json!(["web@live"])));
    assert_eq!(fleet.state("web"), "running");
    // Takes another snapshot, now that the machine's memory is a mapping of an image, while the machine is paused. The
    // machine stays paused.
    fleet.run("snapshot create web@later --memory").ok();
    fleet.run("pause web").ok();
    fleet.run("snapshot create web@still --memory").ok();
    assert_eq!(fleet.state("web"), "paused");
    let list = fleet.run("snapshot list web --json").json();
    let names: BTreeSet<&str> =
        list["snapshots"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["first", "quiet", "live", "later", "still"].into());
    write(&fleet, "web", 0, 3);

    fleet.run("revert web@live").ok();
    assert_eq!(fleet.state("web"), "running");
    holds(&fleet, "web", 0, 2);
    fleet.run("revert web@still --paused").ok();
    assert_eq!(fleet.state("web"), "paused");
    assert_eq!(fleet.processes().len(), 1);
    let reverted = fleet.run("revert web@first --json").json();
    assert_eq!(reverted["state"], "stopped");
    holds(&fleet, "web", 0, 1);
    assert_eq!(fleet.processes().len(), 0);
    fleet.run("revert web@none").fails(3, "has no snapshot 'none'");

    fleet.run("clone web@quiet sibling").ok();
    holds(&fleet, "sibling", 0, 2);
    fleet.run("clone web@quiet whole --full").ok();
    fleet.run("clone web@quiet now --instant").fails(2, "the present state of its parent");
    fleet.run("snapshot delete web@quiet").fails(4, "sibling");
    fleet.run("delete sibling").ok();
    for name in ["quiet", "live", "later", "still"] {
        fleet.run(&format!("snapshot delete web@{name}")).ok();
    }
    let left: Vec<String> = fleet.snapshots().into_keys().collect();
    assert_eq!(left, ["web@first", "web@mine"]);
    assert_eq!(fleet.memory_files(), 0);
}

#[test]
fn instant_clones_of_a_frozen_and_of_a_running_parent() {
    let fleet = Fleet::new();
    fleet.make("base", "64M");
    write(&fleet, "base", 0, 1);
    fleet.run("clone base x --instant").fails(7, "does not run");
    fleet.run("start base").ok();
    fleet.run("clone base x --instant --identity required").fails(2, "no agent that answers");
    let made = fleet.run("clone base run --instant --count 3 --json");
    assert!(made.stderr.contains("3 of 3 still have their parent's identity"), "{made:?}");
    let made: serde_json::Value = serde_json::from_str(&made.stdout).unwrap();
    assert!(made["stun_ms"].as_f64().is_some() && made["made"][2]["running_ms"].as_f64().is_some(), "{made}");
    assert_eq!(fleet.state("base"), "running");
    // Clones again, from the same parent and from one of its clones.
    fleet.run("clone base again --instant --identity keep").ok();
    fleet.run("clone run-0002 grandchild --instant --identity keep").ok();
    assert_eq!(fleet.processes().len(), 6);
    write(&fleet, "base", 0, 2);
    holds(&fleet, "run-0001", 0, 1);
    fleet.run("stop base --force").ok();
    fleet.run("start base").ok();
    let frozen = fleet.run("freeze base --json").json();
    assert_eq!(fleet.state("base"), "frozen");
    assert_eq!(fleet.show("base")["image"], frozen["image"]);
    fleet.run("clone base ice --instant --count 4 --parallel 4 --identity keep").ok();
    fleet.run("start base").ok();
    assert_eq!(fleet.state("base"), "running");
    holds(&fleet, "ice-0004", 0, 2);
    let list = fleet.list();
    assert!(list.values().all(|one| one["state"] == "running"), "{list:?}");
    // When the last machine that needs an image is deleted, the image is removed completely.
    let names: Vec<String> = list.into_keys().collect();
    fleet.run(&format!("stop --force {}", names.join(" "))).ok();
    for name in names.iter().rev().filter(|name| *name != "base" && *name != "run-0002") {
        fleet.run(&format!("delete {name}")).ok();
    }
    fleet.run("delete run-0002").ok();
    fleet.run("delete base").ok();
    assert!(fleet.disks().is_empty() && fleet.snapshots().is_empty() && fleet.list().is_empty());
    assert_eq!(fleet.memory_files(), 0);
    assert!(process::files(&fleet.store.path().join("memory-images")).is_empty());
}

#[test]
fn the_console_of_a_machine() {
    let fleet = Fleet::new();
    fleet.make("web", "64M");
    fleet.run("console web").fails(7, "does not run");
    assert_eq!(fleet.run("console web --said").ok(), "");
    fleet.run("start web").ok();
    // Without a terminal and without input, the console command ends when no more output arrives.
    fleet.run("console web --quiet 0").ok();
    let mut first = fleet.command("console web --quiet 60").stdin(Stdio::piped()).spawn().unwrap();
    // The command handles an interruption only once it is attached. Its lock file exists already, because of the
    // previous console command.
    process::wait_until_interruptible(first.id());
    fleet.run("console web --quiet 0").fails(4, "is attached to the console");
    process::send(first.id(), "INT");
    assert_eq!(wait(&mut first), Some(130));
    let mut alone = lamina();
    let done: process::Done = process::output(alone.args(["vm", "list"])).into();
    done.fails(2, "which datastore?");
}
