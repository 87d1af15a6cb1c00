//! Every command on a real datastore: effect, output and errors, with and without a server.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use testkit::process;
use testkit::process::{Store, run};

#[test]
fn init_creates_a_datastore_once() {
    let store = Store::new();
    let path = store.path();
    let again = run(&format!("init {}", path.display()));
    assert_eq!(again.code, 1, "{again:?}");
    assert!(again.stderr.contains(&path.display().to_string()), "{again:?}");
    let second = path.with_file_name("second");
    let made = run(&format!("init {} --journal-size 16M --json", second.display())).json();
    assert_eq!(made["journal_size"], 16 << 20);
    for size in ["1M", "5G", "4097K"] {
        let third = path.with_file_name("third");
        run(&format!("init {} --journal-size {size}", third.display())).fails(2, "");
        assert!(!third.exists(), "{size}: nothing is left behind");
    }
}

#[test]
fn wrong_paths_sizes_and_addresses_are_refused_with_what_to_give_instead() {
    let store = Store::new();
    let path = store.path();
    let file = path.with_file_name("file");
    std::fs::write(&file, "").unwrap();
    let empty: process::Done = process::output(process::lamina().args(["init", ""])).into();
    empty.fails(2, "the path of the new datastore is empty");
    run(&format!("init {}", file.display())).fails(1, "give the path of a new folder");
    run(&format!("init {} --journal-size 1M", path.with_file_name("new").display())).fails(2, "a journal of 1 MiB");
    run(&format!("salvage {}", path.display())).fails(2, "with --list, or extract a disk with --disk NAME --to");
    run(&format!("salvage {} --list", file.display())).fails(2, "begins like no image that can be opened");
    run(&format!("salvage {}/none --list", path.display())).fails(3, "does not exist");
    store.run("disk create vm1 64M").ok();
    run(&format!("salvage {0} --disk vm1 --to {0}", path.display())).fails(2, "is the damaged datastore");
    store.run("disk create huge 100P").fails(2, "a capacity of 100 PiB: the largest is 64 TiB");
    store.run("disk resize vm1 32M").fails(2, "has 64 MiB; with 32 MiB");
    store.run("serve --tcp localhost:10809").fails(2, "such as 127.0.0.1:10809");
    store.run("serve --tcp 0.0.0.0:10809").fails(2, "(--insecure-tcp)");
    store.run("vm create web --memory 1").fails(2, "from 16 MiB to 4 TiB, not 1 byte");
}

#[test]
fn a_disk_is_created_resized_renamed_and_deleted() {
    let store = Store::new();
    assert_eq!(store.run("disk list --json").json()["disks"], Value::Array(Vec::new()));
    assert!(store.run("disk create vm1 10G").ok().contains("10 GiB"));
    let made = store.run("disk create vm2 --size 1.5M --provisioning zeroedthick --json").json();
    assert_eq!((&made["capacity"], &made["provisioning"]), (&(3 << 19).into(), &"zeroedthick".into()));
    let table = store.run("disk list").ok();
    assert!(table.starts_with("NAME") && table.lines().count() == 3, "{table}");
    let list = store.run("disk list --json").json();
    let names: Vec<&str> = list["disks"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["vm1", "vm2"]);

    store.run("disk create vm1 1G").fails(1, "vm1");
    store.run("disk create odd 513").fails(2, "odd");
    store.run("disk create none 0").fails(2, "none");
    store.run("disk create huge 65T").fails(2, "huge");
    store.run("disk show vm9").fails(3, "vm9");
    store.run("disk resize vm9 1G").fails(3, "vm9");
    store.run("disk rename vm9 vm8").fails(3, "vm9");
    store.run("disk delete vm9").fails(3, "vm9");
    store.run("disk detach vm9").fails(3, "vm9");

    assert_eq!(store.run("disk resize vm1 20G --json").json()["capacity"], 20u64 << 30);
    store.run("disk resize vm1 5G").fails(2, "shrink");
    assert_eq!(store.run("disk resize vm1 5G --shrink --json").json()["capacity"], 5u64 << 30);
    store.run("disk rename vm1 vm2").fails(1, "vm2");
    store.run("disk rename vm1 server").ok();
    assert_eq!(store.run("disk show server --json").json()["capacity"], 5u64 << 30);
    store.run("disk show vm1").fails(3, "vm1");
    let facts = store.run("disk show server").ok();
    assert!(facts.contains("5 GiB (5368709120 bytes)") && facts.contains("thin"), "{facts}");

    assert_eq!(store.run("disk delete server --json").json()["deleted"], "server");
    store.run("disk delete vm2").ok();
    assert_eq!(store.run("status --json").json()["disks"], 0);
    assert!(store.run("check --data").ok().ends_with("clean\n"));
}

#[test]
fn a_snapshot_is_created_listed_reverted_and_deleted() {
    let store = Store::new();
    store.run("disk create vm1 1G").ok();
    store.run("disk create vm2 1G").ok();
    assert_eq!(store.run("snapshot list").ok(), "no snapshots\n");
    let taken = store.run("snapshot create vm1@a vm2@a --json").json();
    assert_eq!(taken["snapshots"].as_array().unwrap().len(), 2);
    store.run("snapshot create vm1@b").ok();
    store.run("snapshot create vm1@b").fails(1, "b");
    store.run("snapshot create vm1@c vm1@d").fails(2, "named twice");
    store.run("snapshot create vm2@b vm9@b").fails(3, "vm9");
    store.run("snapshot show vm2@b").fails(3, "vm2");
    let shown = store.run("snapshot show vm1@b --json").json();
    assert_eq!((&shown["parent"], &shown["current"]), (&"a".into(), &true.into()));

    store.run("snapshot revert vm1@a").ok();
    store.run("snapshot create vm1@c").ok();
    let tree = store.run("snapshot list vm1").ok();
    let column: Vec<&str> = tree.lines().map(|l| l.split("  2").next().unwrap().trim_end()).collect();
    assert_eq!(column, ["vm1", "  a", "  ├─ b", "  c", "  (head)"]);
    assert_eq!(store.run("snapshot list --json").json()["snapshots"].as_array().unwrap().len(), 4);
    store.run("snapshot list vm9").fails(3, "vm9");
    store.run("snapshot revert vm1@z").fails(3, "z");
    store.run("snapshot delete vm1@z").fails(3, "z");
    assert_eq!(store.run("snapshot delete vm1@a --json").json()["deleted"], "vm1@a");
    store.run("snapshot show vm1@a").fails(3, "a");
    store.run("snapshot diff vm1@z").fails(3, "z");
    store.run("check").ok();
}

#[test]
fn linked_and_full_clones_are_created_singly_and_in_numbers() {
    let store = Store::new();
    store.run("disk create base 64M").ok();
    store.run("snapshot create base@golden").ok();
    let one = store.run("clone base@golden one --json").json();
    assert_eq!(one["disks"][0]["origin"], "base@golden");
    let many = store.run("clone base@golden vm --count 3 --json").json();
    let names: Vec<&str> = many["disks"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["vm-0001", "vm-0002", "vm-0003"]);
    assert!(store.run("clone base --name-pattern lab%02d --count 12").ok().contains("lab01 to lab12"));
    let full = store.run("clone base@golden copy --full --json").json();
    assert_eq!(full["disks"][0]["origin"], Value::Null);

    // All clones are made or none: here the second name is in use.
    store.run("disk create x-0002 1M").ok();
    store.run("clone base@golden x --count 3").fails(1, "x-0002");
    store.run("disk show x-0001").fails(3, "x-0001");
    store.run("clone base@golden x --count 3 --full").fails(1, "x-0002");
    store.run("disk show x-0001").fails(3, "x-0001");
    store.run("clone base@nothing y").fails(3, "nothing");
    store.run("clone nothing y").fails(3, "nothing");

    store.run("snapshot delete base@golden").fails(4, "one");
    store.run("disk delete base").fails(4, "one");
    let detached = store.run("disk detach one --json").json();
    assert_eq!(detached["origin"], Value::Null);
    store.run("disk delete base --promote").ok();
    assert_eq!(store.run("disk show vm-0003 --json").json()["capacity"], 64 << 20);
    assert!(store.run("check --data").ok().ends_with("clean\n"));
}

#[test]
fn the_exit_code_of_check_reports_damage() {
    let store = Store::new();
    store.run("disk create vm1 1G").ok();
    let report = store.run("check --json").json();
    assert_eq!(report["findings"], Value::Array(Vec::new()));
    // Each file is truncated to nothing, one at a time, in a copy: the check must detect the truncation of files that
    // are needed, and must never panic.
    let original = store.path();
    let mut noticed = 0;
    for name in process::files(&original) {
        let copy = original.with_file_name(format!("without-{name}"));
        let (from, to) = (original.display().to_string(), copy.display().to_string());
        process::tool("cp", &["-r", "--sparse=always", &from, &to]);
        std::fs::write(copy.join(&name), b"").unwrap();
        for option in ["", "--repair"] {
            let done = run(&format!("check {option} -D {to}"));
            assert!([0, 1, 3, 6].contains(&done.code) && !done.stderr.contains("panicked"), "{name}: {done:?}");
            noticed += usize::from(done.code != 0);
        }
        std::fs::remove_dir_all(&copy).unwrap();
    }
    assert!(noticed > 0);
    assert!(store.run("check").ok().ends_with("clean\n"));
}

/// Output, without the parts that differ between datastores.
fn neutral(text: &str, store: &Store) -> String {
    let text = text.replace(&store.path().display().to_string(), "STORE");
    let mut out = String::new();
    for line in text.lines() {
        let volatile = ["uuid", "created", "allocated", "available", "  data", "  metadata", "  reclaimable", "  held"];
        let volatile = volatile.iter().any(|word| line.trim_start_matches([' ', '"']).starts_with(word.trim_start()));
        // The times in lists of snapshots are removed.
        let line = line.split("  20").next().unwrap_or_default();
        out.push_str(if volatile { "(volatile)" } else { line });
        out.push('\n');
    }
    out
}

#[test]
fn commands_print_the_same_with_and_without_a_server() {
    let script = [
        "disk create vm1 1G",
        "disk create vm2 64M --provisioning eagerzeroedthick --json",
        "disk create vm1 1G",
        "disk create vm3 7",
        "disk list",
        "disk list --json",
        "snapshot create vm1@a vm2@a",
        "snapshot create vm1@a",
        "clone vm1@a clone --count 3",
        "clone vm2@a copy --full",
        "clone vm2@b copy2",
        "snapshot list",
        "snapshot show vm1@a",
        "snapshot delete vm1@a",
        "disk delete vm1",
        "disk detach clone-0001",
        "disk resize clone-0002 2G",
        "disk resize clone-0002 1G",
        "disk rename clone-0003 other",
        "disk show other",
        "disk show missing --json",
        "snapshot revert vm1@a",
        "snapshot diff vm1@a",
        "snapshot diff vm1@a --json",
        "disk delete vm1 --promote",
        "disk list",
        "check --json",
    ];
    let unserved = Store::new();
    let served = Store::new();
    let mut server = served.serve("");
    for command in script {
        let (alone, by_server) = (unserved.run(command), served.run(command));
        assert_eq!(alone.code, by_server.code, "{command}: {alone:?} {by_server:?}");
        assert_eq!(neutral(&alone.stdout, &unserved), neutral(&by_server.stdout, &served), "{command}");
        assert_eq!(neutral(&alone.stderr, &unserved), neutral(&by_server.stderr, &served), "{command}");
    }
    assert_eq!(server.stop("TERM"), Some(0));
}
