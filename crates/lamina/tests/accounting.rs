//! A deletion frees exactly the blocks that its dry run reports. Also tests the reported space of disks and snapshots.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use testkit::Random;
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::{Store, run};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

/// Data blocks and map nodes in use, in bytes. The check drops the trees of deleted disks and snapshots first.
fn used(store: &Store) -> (u64, u64) {
    let report = store.run("check --json").json();
    assert_eq!(report["findings"], Value::Array(Vec::new()));
    (report["blocks"].as_u64().unwrap() * BLOCK, report["pages"].as_u64().unwrap() * BLOCK)
}

fn number(of: &Value, member: &str) -> u64 {
    of[member].as_u64().unwrap_or_else(|| panic!("{member} of {of}"))
}

/// Writes single blocks at random places below `end`.
fn scatter(client: &mut Client, random: &mut Random, writes: u64, end: u64) {
    for _ in 0..writes {
        let at = random.below(end / BLOCK) * BLOCK;
        client.write(at, &pattern::bytes(random.next(), BLOCK as usize)).unwrap();
    }
}

/// A disk `base` with the snapshots `old`, `mid`, `golden`, and a clone `busy` of `golden`.
fn family(store: &Store) {
    store.run("disk create base 64M").ok();
    let mut server = store.serve("");
    let mut random = Random(1);
    let mut client = Client::connect(&store.socket(), "base").unwrap();
    for name in ["old", "mid", "golden"] {
        scatter(&mut client, &mut random, 400, 16 * MIB);
        store.run(&format!("snapshot create base@{name}")).ok();
    }
    scatter(&mut client, &mut random, 400, 16 * MIB);
    drop(client);
    store.run("clone base@golden busy").ok();
    assert_eq!(server.stop("TERM"), Some(0));
}

/// Makes a dry run, then deletes, and compares the reports with the space in use.
fn delete(store: &Store, dry: &str, really: &[&str]) -> Value {
    let said = store.run(&format!("{dry} --dry-run --json")).json();
    let before = used(store);
    assert_eq!(said, store.run(&format!("{dry} --dry-run --json")).json(), "a dry run changes nothing");
    assert_eq!(before, used(store), "a dry run changes nothing");
    really.iter().for_each(|command| drop(store.run(command).ok()));
    let after = used(store);
    assert_eq!((number(&said, "data"), number(&said, "metadata")), (before.0 - after.0, before.1 - after.1), "{dry}");
    assert_eq!(number(&said, "data_blocks") * BLOCK, number(&said, "data"));
    assert_eq!(number(&said, "freed"), number(&said, "data") + number(&said, "metadata"));
    assert_eq!(said["estimate"], Value::Null);
    said
}

#[test]
fn a_deletion_frees_what_its_dry_run_says() {
    let store = Store::new();
    family(&store);
    let one = |name: &str| number(&store.run(&format!("snapshot delete base@{name} --dry-run --json")).json(), "data");
    let singly = one("old") + one("mid");
    let delete_both = ["snapshot delete base@old", "snapshot delete base@mid"];
    let both = delete(&store, "snapshot delete base@old base@mid", &delete_both);
    assert_eq!(both["deletes"], serde_json::json!(["base@old", "base@mid"]));
    assert!(number(&both, "data") > singly, "blocks that only both share are free without both: {both}, {singly}");
    // The reserved space of thick disks is reported separately.
    store.run("disk create thick 8M --provisioning zeroedthick").ok();
    store.run("snapshot create thick@a").ok();
    let thick = delete(&store, "disk delete thick", &["disk delete thick"]);
    assert_eq!((number(&thick, "reserved"), number(&thick, "data")), (8 * MIB, 8 * MIB));
    assert_eq!(thick["with_disks"], serde_json::json!(["thick@a"]));
    // With --promote, the snapshot of the clone stays.
    let promoted = delete(&store, "disk delete base --promote", &["disk delete base --promote"]);
    assert_eq!(promoted["hands_over"], serde_json::json!(["base@golden"]));
    assert!(number(&promoted, "data") > 0);
    delete(&store, "disk delete busy", &["disk delete busy"]);
    assert_eq!(used(&store).0, 0);
}

#[test]
fn a_disk_and_its_clones_are_counted_together() {
    let store = Store::new();
    family(&store);
    let delete_all = ["disk delete busy", "disk delete base"];
    let all = delete(&store, "disk delete base busy", &delete_all);
    assert_eq!(all["with_disks"].as_array().unwrap().len(), 3);
    assert_eq!(used(&store).0, 0);
}

#[test]
fn a_dry_run_is_refused_for_the_reasons_for_which_the_deletion_is_refused() {
    let store = Store::new();
    family(&store);
    store.run("disk create vm 4M --format vmdk").ok();
    store.run("snapshot create vm@s").ok();
    for command in [
        "disk delete base",
        "snapshot delete base@golden",
        "disk delete nothing",
        "snapshot delete base@no",
        "snapshot delete nothing@s",
        "snapshot delete base@old --up",
        "snapshot delete vm@no",
        "disk delete vm@s",
    ] {
        let (really, dry) = (store.run(command), store.run(&format!("{command} --dry-run")));
        assert_ne!(really.code, 0, "{command}");
        assert_eq!((really.code, &really.stderr), (dry.code, &dry.stderr), "{command}");
    }
    let mut server = store.serve("");
    let clients = ["base", "base@old", "vm", "vm@s"].map(|name| Client::connect(&store.socket(), name).unwrap());
    for command in ["disk delete base --promote", "snapshot delete base@old", "disk delete vm", "snapshot delete vm@s"]
    {
        store.run(command).fails(4, "in use");
        store.run(&format!("{command} --dry-run")).fails(4, "in use");
    }
    drop(clients);
    assert_eq!(server.stop("TERM"), Some(0));
    store.run("disk delete base busy").fails(2, "--dry-run");
    store.run("disk delete busy busy --dry-run").fails(2, "twice");
    assert!(store.run("disk delete busy --dry-run").ok().ends_with("nothing was deleted\n"));
    run("disk delete --dry-run").fails(2, "NAME");
}

#[test]
fn a_dry_run_in_a_server_is_exact_while_clients_write() {
    let store = Store::new();
    family(&store);
    let dry = "snapshot delete base@old base@mid --dry-run --json";
    let quiet = store.run(dry).json();
    let mut server = store.serve("");
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (stop, socket) = (Arc::clone(&stop), store.socket());
        move || {
            let (mut random, mut written) = (Random(9), 0u64);
            let mut client = Client::connect(&socket, "busy").unwrap();
            while !stop.load(Ordering::Relaxed) {
                scatter(&mut client, &mut random, 20, 64 * MIB);
                written += 20;
                if written.is_multiple_of(400) {
                    client.flush().unwrap();
                }
            }
            written
        }
    });
    // The clone shares blocks with the snapshots, and its writes change the references of these blocks all the time.
    for _ in 0..10 {
        let busy = store.run(dry).json();
        assert_eq!((&busy["data"], &busy["data_blocks"]), (&quiet["data"], &quiet["data_blocks"]));
    }
    let space = store.run("disk list --space --json").json();
    stop.store(true, Ordering::Relaxed);
    assert!(writer.join().unwrap() > 0);
    assert_eq!(space["disks"].as_array().unwrap().len(), 2);
    let delete_both = ["snapshot delete base@old", "snapshot delete base@mid"];
    delete(&store, "snapshot delete base@old base@mid", &delete_both);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

/// The figures of a reduction lead from the capacity to the stored bytes.
fn adds_up(reduction: &Value) {
    let of = |member: &str| number(reduction, member);
    assert_eq!(of("capacity") - of("unmapped"), of("mapped"), "{reduction}");
    let less = of("within_disks") + of("between_disks") + of("compression");
    assert_eq!(of("mapped") + of("packing_loss") - less, of("stored"), "{reduction}");
    let ratio = (of("mapped") * 100 / of("stored")) as f64 / 100.0;
    assert_eq!(reduction["ratio"].as_f64().unwrap(), ratio, "{reduction}");
}

#[test]
fn the_space_of_a_disk_and_of_its_snapshots_is_shown() {
    let store = Store::new();
    assert_eq!(store.run("disk list --space").ok(), "no disks\n");
    family(&store);
    let space = store.run("disk show base --space --json").json();
    let disk = &space["disks"][0];
    let shown = store.run("disk show base --json").json();
    assert_eq!(number(disk, "mapped"), number(&shown, "blocks_allocated") * BLOCK);
    assert_eq!(number(disk, "exclusive"), number(&shown, "exclusive"));
    for of in std::iter::once(disk).chain(disk["snapshots"].as_array().unwrap()) {
        assert_eq!(number(of, "provisioned"), 64 * MIB);
        assert_eq!(number(of, "stored"), number(of, "mapped"));
        assert_eq!(number(of, "shared") + number(of, "exclusive"), number(of, "stored"));
    }
    let dry = |command: &str| number(&store.run(&format!("{command} --dry-run --json")).json(), "data");
    for snapshot in &disk["snapshots"].as_array().unwrap()[..2] {
        let name = snapshot["name"].as_str().unwrap();
        assert_eq!(number(snapshot, "exclusive"), dry(&format!("snapshot delete base@{name}")), "{name}");
        assert_eq!(number(snapshot, "reclaimable"), number(snapshot, "exclusive"));
    }
    store.run("disk detach busy").ok();
    assert_eq!(number(disk, "used_by_snapshots"), dry("snapshot delete base@old base@mid base@golden"));
    assert_eq!(number(disk, "reclaimable"), dry("disk delete base"));
    let table = store.run("snapshot list --space").ok();
    let names: Vec<&str> = table.lines().skip(1).map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["base", "base@old", "base@mid", "base@golden", "busy", "(datastore)"]);
    let all = store.run("disk list --space --json").json();
    let (total, (stored, _)) = (&all["total"], used(&store));
    let all: Vec<&Value> = all["disks"].as_array().unwrap().iter().collect();
    let parts = || all.iter().flat_map(|disk| std::iter::once(*disk).chain(disk["snapshots"].as_array().unwrap()));
    let sum = |member: &str| parts().map(|of| number(of, member)).sum::<u64>();
    assert_eq!((number(total, "stored"), number(total, "provisioned")), (stored, 128 * MIB));
    assert_eq!((number(total, "mapped"), number(total, "exclusive")), (sum("mapped"), sum("exclusive")));
    assert_eq!(number(total, "shared"), stored - sum("exclusive"));
    assert!(number(total, "mapped") > 2 * stored, "most blocks are shared");
    assert_eq!(number(total, "reclaimable"), stored);
    assert_eq!(number(total, "used_by_snapshots"), dry("snapshot delete base@old base@mid base@golden"));
    let status = store.run("status --space --json").json();
    assert!(store.run("status --json").json()["space"].is_null());
    let explained = &status["space"];
    for member in ["mapped", "stored", "shared", "exclusive", "reclaimable", "used_by_snapshots"] {
        assert_eq!(explained[member], total[member], "{member}");
    }
    // Every block of the heads that is not theirs alone needs new space when it is written.
    let own = all.iter().map(|disk| number(disk, "exclusive")).sum::<u64>();
    assert_eq!(number(explained, "may_need"), 128 * MIB - own);
    // The figures that explain the ratio add up.
    let shown = ["base", "busy"].map(|name| store.run(&format!("disk show {name} --space --json")).json());
    let reduction = &explained["reduction"];
    for of in shown.iter().map(|disk| &disk["disks"][0]["reduction"]).chain([reduction]) {
        adds_up(of);
    }
    let sum = |member: &str| shown.iter().map(|of| number(&of["disks"][0]["reduction"], member)).sum::<u64>();
    for member in ["states", "capacity", "unmapped", "mapped", "within_disks"] {
        assert_eq!(number(reduction, member), sum(member), "{member}");
    }
    assert_eq!((number(reduction, "states"), number(reduction, "stored")), (5, stored));
    assert_eq!(number(reduction, "between_disks"), sum("stored") - stored);
    for disk in &shown {
        let disk = &disk["disks"][0];
        let used = number(&disk["reduction"], "stored") - number(disk, "reclaimable");
        assert_eq!(number(disk, "shared_with_disks"), used, "{disk}");
    }
    for (command, expected) in [
        (
            "status --space",
            vec!["within a disk:", "between disks:", "may need:", "by snapshots:", "for which there is enough"],
        ),
        ("disk show busy --space", vec!["within a disk:", "other disks:", "of the head and 0 snapshots"]),
    ] {
        let text = store.run(command).ok();
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    }
    store.run("disk show nothing --space").fails(3, "nothing");
}

/// Bytes of the files of a disk in VMware's formats.
fn images(store: &Store, disk: &str) -> u64 {
    let folder = std::fs::read_dir(store.path().join("images").join(disk));
    let files = folder.into_iter().flatten().map(|file| file.unwrap().metadata().unwrap());
    files.map(|file| file.blocks() * 512).sum()
}

#[test]
fn deleting_images_frees_what_a_dry_run_says() {
    for format in ["vmdk", "sesparse"] {
        let store = Store::new();
        store.run(&format!("disk create vm 64M --format {format} --delta sesparse")).ok();
        let mut server = store.serve("");
        let mut random = Random(5);
        for name in ["a", "b", "c"] {
            let mut client = Client::connect(&store.socket(), "vm").unwrap();
            scatter(&mut client, &mut random, 100, 32 * MIB);
            client.write(32 * MIB, &pattern::bytes(7, 4 * MIB as usize)).unwrap();
            client.flush().unwrap();
            drop(client);
            store.run(&format!("snapshot create vm@{name}")).ok();
        }
        assert_eq!(server.stop("TERM"), Some(0));
        let said = store.run("snapshot delete vm@b --dry-run --json").json();
        assert_eq!(number(&said, "images_merged"), 1);
        assert!(said["estimate"].as_str().unwrap().contains("merged"), "{said}");
        let before = images(&store, "vm");
        assert_eq!(said, store.run("snapshot delete vm@b --dry-run --json").json(), "a dry run changes nothing");
        store.run("snapshot delete vm@b").ok();
        let freed = before - images(&store, "vm");
        assert!(number(&said, "images").abs_diff(freed) < MIB, "{format}: {freed} bytes were freed, and not {said}");
        let said = store.run("disk delete vm --dry-run --json").json();
        assert_eq!(
            (said["estimate"].clone(), &said["with_disks"]),
            (Value::Null, &serde_json::json!(["vm@a", "vm@c"]))
        );
        assert_eq!(number(&said, "images"), images(&store, "vm"), "{format}");
        assert_eq!(
            number(&store.run("disk show vm --space --json").json()["disks"][0], "reclaimable"),
            number(&said, "images")
        );
        store.run("disk delete vm").ok();
        assert_eq!(images(&store, "vm"), 0);
    }
}

#[test]
fn a_snapshot_that_is_only_a_name_frees_nothing_and_one_without_children_all_its_files() {
    let store = Store::new();
    store.run("disk create vm 64M --format vmdk --delta sesparse").ok();
    let mut server = store.serve("");
    for name in ["a", "b"] {
        let mut client = Client::connect(&store.socket(), "vm").unwrap();
        client.write(0, &pattern::bytes(3, 2 * MIB as usize)).unwrap();
        client.flush().unwrap();
        drop(client);
        store.run(&format!("snapshot create vm@{name}")).ok();
    }
    store.run("snapshot revert vm@a").ok();
    assert_eq!(server.stop("TERM"), Some(0));
    let dry = |names: &str| store.run(&format!("snapshot delete {names} --dry-run --json")).json();
    // The images of the head and of b are based on the image of a.
    let name_only = dry("vm@a");
    assert_eq!((number(&name_only, "images"), number(&name_only, "images_kept")), (0, 1));
    let leaf = dry("vm@b");
    assert_eq!((&leaf["estimate"], number(&leaf, "images_merged")), (&Value::Null, 0));
    // Without snapshot b, the image of snapshot a has one child, with which it is merged. If a is deleted first, a's
    // image is merged after b is deleted, so a's image does not stay either.
    for names in ["vm@b vm@a", "vm@a vm@b"] {
        let both = dry(names);
        assert_eq!((number(&both, "images_merged"), number(&both, "images_kept")), (1, 0), "{names}");
    }
    let before = images(&store, "vm");
    store.run("snapshot delete vm@b").ok();
    // The record and the list of snapshots have become shorter too.
    assert!(number(&leaf, "images").abs_diff(before - images(&store, "vm")) <= 2 * BLOCK, "{leaf}");
    assert!(number(&leaf, "images") >= 2 * MIB);
}
