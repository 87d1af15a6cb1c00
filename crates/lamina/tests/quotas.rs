//! Labels, quotas and reservations, through NBD clients that write at the same time.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use testkit::nbd::{Client, ENOSPC, Failure};
use testkit::process::Store;
use testkit::protocol::{self, CMD_RESIZE, Mode};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

fn is_refused(outcome: Result<(), Failure>) -> bool {
    match outcome {
        Ok(()) => false,
        Err(Failure::Errno(ENOSPC)) => true,
        Err(failure) => panic!("{failure:?}"),
    }
}

fn connect(store: &Store, disk: &str) -> Client {
    Client::connect(&store.socket(), disk).unwrap()
}

/// Writes a range in pieces of 64 KiB.
fn write(client: &mut Client, from: u64, length: u64) {
    for at in (from..from + length).step_by(64 << 10) {
        client.write(at, &[7; 64 << 10]).unwrap();
    }
}

/// The limits of a disk or label, as `status` shows them.
fn limit(store: &Store, name: &str) -> Value {
    let status = store.run("status --json").json();
    let limits = status["limits"].as_array().unwrap();
    limits.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name}: {limits:?}")).clone()
}

#[test]
fn a_quota_limits_what_clients_map() {
    let store = Store::new();
    for (name, format) in [("native", "native"), ("se", "sesparse")] {
        store.run(&format!("disk create {name} 64M --format {format} --quota 4M")).ok();
        let mut server = store.serve("");
        let mut client = connect(&store, name);
        write(&mut client, 0, 4 * MIB);
        client.flush().unwrap();
        let next = 8 * MIB;
        assert!(is_refused(client.write(next, &[1; 512])), "{name}");
        assert_eq!(limit(&store, name)["exceeded"], true);
        assert_eq!(limit(&store, name)["used"], 4 * MIB);
        assert!(store.run("status").ok().contains("4 MiB used, quota 4 MiB, writes are refused"));
        assert!(server.log().contains(&format!("the quota of disk '{name}' is used up")), "{}", server.log());
        // Overwrites, reads and discards are not limited, and what a discard frees can be used again.
        write(&mut client, 0, MIB);
        client.read(0, 4096).unwrap();
        client.trim(MIB, MIB as u32).unwrap();
        client.flush().unwrap();
        write(&mut client, next, MIB);
        assert!(is_refused(client.write(next + MIB, &[1; 512])));
        // A higher quota applies to clients that are connected, and a snapshot does not count.
        store.run(&format!("disk edit {name} --quota 5M")).ok();
        store.run(&format!("snapshot create {name}@s")).ok();
        write(&mut client, 0, MIB);
        write(&mut client, next + MIB, MIB);
        assert!(is_refused(client.write(next + 2 * MIB, &[1; 512])));
        drop(client);
        assert_eq!(server.stop("TERM"), Some(0));

        // After a restart the space of the disk is counted when the disk first needs more space, and then the quota is
        // as exact as before.
        let mut server = store.serve("");
        assert_eq!(limit(&store, name)["used"], Value::Null);
        let mut client = connect(&store, name);
        write(&mut client, 0, MIB);
        assert!(is_refused(client.write(next + 2 * MIB, &[1; 512])));
        store.run(&format!("disk edit {name} --quota 0")).ok();
        write(&mut client, next + 2 * MIB, MIB);
        drop(client);
        assert_eq!(server.stop("TERM"), Some(0));
    }
    store.is_clean();
}

#[test]
fn a_quota_is_exact_beside_concurrent_writers() {
    let store = Store::new();
    store.run("disk create a 256M --label tenant=x").ok();
    store.run("disk create b 256M --label tenant=x --format sesparse").ok();
    store.run("label limit tenant=x --quota 16M").ok();
    let mut server = store.serve("");
    std::thread::scope(|scope| {
        for (disk, region) in [("a", 0), ("a", 1), ("b", 0), ("b", 1)] {
            let store = &store;
            scope.spawn(move || {
                let mut client = connect(store, disk);
                let base = region * 128 * MIB;
                let mut block = 0;
                while !is_refused(client.write(base + block * BLOCK, &[1; BLOCK as usize])) {
                    block += 1;
                    assert!(block * BLOCK <= 16 * MIB, "{disk}: the quota never ends the writes");
                }
                client.flush().unwrap();
            });
        }
    });
    let labels = store.run("label list --json").json();
    let label = &labels["labels"][0];
    assert_eq!((&label["name"], &label["disks"]), (&"tenant=x".into(), &2.into()));
    let used = label["used"].as_u64().unwrap();
    // All writes were whole blocks, so the quota is used up almost exactly. The last block of each writer may be
    // missing.
    assert!((16 * MIB - 4 * BLOCK..=16 * MIB).contains(&used), "{used}");
    let table = store.run("label list").ok();
    assert!(table.contains("tenant=x") && table.contains("16 MiB"), "{table}");
    assert!(server.log().contains("the quota of label 'tenant=x' is used up"));
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn reserved_space_is_kept_for_its_disks() {
    let store = Store::new();
    store.run("disk create keeper 64M --reservation 16P").ok();
    store.run("disk create other 64M").ok();
    let mut server = store.serve("");
    let (mut keeper, mut other) = (connect(&store, "keeper"), connect(&store, "other"));
    assert!(is_refused(other.write(0, &[1; 4096])), "all free space is reserved");
    write(&mut keeper, 0, MIB);
    store.run("disk edit keeper --reservation 0").ok();
    write(&mut other, 0, MIB);
    store.run("disk edit keeper --reservation 16P").ok();
    write(&mut other, 0, MIB);
    assert!(is_refused(other.write(8 * MIB, &[1; 4096])));
    drop((keeper, other));
    assert_eq!(server.stop("TERM"), Some(0));
    store.run("disk edit keeper --quota 1G --reservation 2G").fails(2, "above the quota");
    store.is_clean();
}

/// What the disks of a label map, counted again if necessary.
fn counted(store: &Store, label: &str) -> Value {
    let list = store.run("label list --json").json();
    let labels = list["labels"].as_array().unwrap();
    labels.iter().find(|one| one["name"] == label).unwrap()["used"].clone()
}

#[test]
fn the_new_end_of_a_thick_disk_counts() {
    let store = Store::new();
    for provisioning in ["zeroedthick", "eagerzeroedthick"] {
        let (name, label) = (provisioning, format!("tenant={provisioning}"));
        store.run(&format!("disk create {name} 8M --provisioning {name} --quota 8M --label {label}")).ok();
        store.run(&format!("label limit {label} --quota 1G")).ok();
        let mut server = store.serve("");
        let mut client = protocol::Client::open(&store.socket(), name, Mode::Structured);
        let mut resize = |capacity: u64| client.ask(CMD_RESIZE, 0, capacity, 0).error;
        let capacity = || store.run(&format!("disk show {name} --json")).json()["capacity"].as_u64().unwrap();
        assert_eq!(resize(16 * MIB), ENOSPC);
        assert_eq!(capacity(), 8 * MIB);
        store.run(&format!("disk edit {name} --quota 12M")).ok();
        assert_eq!(resize(12 * MIB + BLOCK), ENOSPC);
        assert_eq!(resize(12 * MIB), 0);
        assert_eq!((capacity(), limit(&store, &label)["used"].as_u64()), (12 * MIB, Some(12 * MIB)));
        // A user is not limited, but the new size counts for the clients.
        store.run(&format!("disk edit {name} --quota 16M")).ok();
        store.run(&format!("disk resize {name} 16M")).ok();
        assert_eq!(resize(16 * MIB + BLOCK), ENOSPC);
        assert_eq!(limit(&store, &label)["used"], 16 * MIB);
        store.run(&format!("disk resize {name} 4M --shrink")).ok();
        assert_eq!(counted(&store, &label), 4 * MIB);
        assert_eq!(resize(8 * MIB), 0);
        // Space that is reserved for other disks is not used.
        store.run("disk create keeper 8M --reservation 16P").ok();
        assert_eq!(resize(12 * MIB), ENOSPC);
        assert_eq!(capacity(), 8 * MIB);
        store.run("disk delete keeper").ok();
        drop(client);
        assert_eq!(server.stop("TERM"), Some(0));
    }
    store.is_clean();
}

#[test]
fn a_disk_is_counted_again_after_a_revert() {
    let store = Store::new();
    store.run("disk create vm 16M --quota 4M --label tenant=x").ok();
    store.run("label limit tenant=x --quota 1G").ok();
    let mut server = store.serve("");
    let mut client = connect(&store, "vm");
    write(&mut client, 0, 4 * MIB);
    store.run("snapshot create vm@full").ok();
    client.trim(0, 4 * MIB as u32).unwrap();
    client.flush().unwrap();
    assert_eq!(counted(&store, "tenant=x"), 0);
    drop(client);
    store.run("snapshot revert vm@full").ok();
    let mut client = connect(&store, "vm");
    assert!(is_refused(client.write(8 * MIB, &[1; 4096])));
    assert_eq!(limit(&store, "vm")["used"], 4 * MIB);
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

/// The rest of a block at the end of a disk is mapped by a growth, without a write.
#[test]
fn the_rest_of_the_last_block_counts() {
    let store = Store::new();
    store.run("disk create vm 1049088 --quota 1M").ok();
    let mut server = store.serve("");
    let mut client = protocol::Client::open(&store.socket(), "vm", Mode::Structured);
    let mut resize = |capacity: u64| client.ask(CMD_RESIZE, 0, capacity, 0).error;
    assert_eq!(resize(MIB + 1024), 0, "the last block is a hole");
    drop(client);
    let mut client = connect(&store, "vm");
    client.write(MIB, &[1; 1024]).unwrap();
    write(&mut client, 0, MIB - (64 << 10));
    drop(client);
    let mut client = protocol::Client::open(&store.socket(), "vm", Mode::Structured);
    let mut resize = |capacity: u64| client.ask(CMD_RESIZE, 0, capacity, 0).error;
    assert_eq!(resize(MIB + 4096), 0);
    assert_eq!(limit(&store, "vm")["used"], MIB - (64 << 10) + 4096);
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn disks_are_listed_by_label() {
    let store = Store::new();
    store.run("disk create a 8M --label tenant=x --label tier=gold").ok();
    store.run("disk create b 8M --format thin --label tenant=y").ok();
    store.run("disk create c 8M").ok();
    store.run("clone a d").ok();
    let listed = |label: &str| -> Vec<String> {
        let list = store.run(&format!("disk list --label {label} --json")).json();
        let disks = list["disks"].as_array().unwrap();
        disks.iter().map(|disk| disk["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(listed("tenant"), ["a", "b", "d"]);
    assert_eq!(listed("tenant=x"), ["a", "d"]);
    assert_eq!(listed("tier=silver"), Vec::<String>::new());
    store.run("disk edit d --label tenant=y --remove-label tier").ok();
    assert_eq!(listed("tenant=y"), ["b", "d"]);
    assert_eq!(listed("tier"), ["a"]);
    assert!(store.run("disk show a").ok().contains("tier=gold"));
    store.run("disk edit a --label tenant").fails(2, "KEY=VALUE");
    store.run("label limit tenant --quota 1G").fails(2, "KEY=VALUE");
    store.run("label limit tenant=x").fails(2, "--quota");
}
