//! Space usage as the file system reports it, and extremes of disks: tiny, odd and huge sizes, and unusual names.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};
use testkit::nbd::{Client, Failure};
use testkit::process::{PATIENCE, Store, tool};
use testkit::{pattern, process};

const MIB: u64 = 1 << 20;

/// Bytes that the datastore occupies in the file system.
fn du(store: &Store) -> u64 {
    let text = tool("du", &["-s", "-B1", store.path().to_str().unwrap()]);
    text.split_whitespace().next().unwrap().parse().unwrap()
}

/// Bytes that a file of the datastore occupies.
fn occupied(store: &Store, file: &str) -> u64 {
    std::fs::metadata(store.path().join(file)).unwrap().blocks() * 512
}

/// Most bytes by which a write buffer of 16 MiB makes the map grow. The map reserves nodes for a full write buffer, so
/// that a flush has the space that it needs. Nodes that write-back has replaced are free only after a commit, so the
/// growth depends on the times of both: up to 6.2 MiB were seen on a busy machine.
const MAP_GROWTH_MAX: u64 = 8 * MIB;

/// Waits until `du` is at most `most`; returns its value.
fn shrinks_to(store: &Store, most: u64, patience: Duration) -> u64 {
    let begin = Instant::now();
    loop {
        let now = du(store);
        if now <= most || begin.elapsed() > patience {
            return now;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn status_shows_the_reserved_space_of_thick_disks() {
    let store = Store::new();
    for (kind, data) in [("zeroedthick", 0), ("eagerzeroedthick", 64 * MIB)] {
        store.run(&format!("disk create {kind} 64M --provisioning {kind}")).ok();
        let status = store.run("status --json").json();
        assert_eq!((&status["reserved"], &status["data"]), (&(64 * MIB).into(), &data.into()));
    }
}

#[test]
fn a_thin_disk_uses_space_for_written_blocks_and_a_thick_one_for_all() {
    let store = Store::new();
    let empty = du(&store);
    store.run("disk create thin 256M").ok();
    assert!(du(&store) < empty + MIB, "a thin disk takes no space");
    for kind in ["zeroedthick", "eagerzeroedthick"] {
        let before = du(&store);
        let made = store.run(&format!("disk create {kind} 64M --provisioning {kind} --json")).json();
        assert!(du(&store) >= before + 64 * MIB, "{kind}: its space is reserved");
        let shown = store.run(&format!("disk show {kind} --json")).json();
        let to_be_zeroed = if kind == "zeroedthick" { 64 * MIB / 4096 } else { 0 };
        assert_eq!(shown["blocks_allocated"], 64 * MIB / 4096, "{made}");
        assert_eq!(shown["blocks_to_be_zeroed"], to_be_zeroed, "{kind}");
    }
    let map_before = occupied(&store, "map");
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "thin").unwrap();
    for at in 0..16 {
        client.write(at * 16 * MIB, &pattern::bytes(at, MIB as usize)).unwrap();
    }
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    let map_grown = occupied(&store, "map") - map_before;
    assert!(map_grown <= MAP_GROWTH_MAX, "the map has taken {map_grown} bytes");
    // The data file has some space ahead, which the server returns at any time. Thus, the test looks at the whole file
    // and not at its growth.
    let data = occupied(&store, "data.0000");
    let full = (2 * 64 + 16) * MIB;
    assert!((full..full + 4 * MIB).contains(&data), "two thick disks and 16 MiB written take {data} bytes");
    store.run("disk delete zeroedthick").ok();
    store.run("disk delete eagerzeroedthick").ok();
    store.run("disk delete thin").ok();
    let mut server = store.serve("");
    let most = empty + map_grown + 2 * MIB;
    let left = shrinks_to(&store, most, PATIENCE);
    assert!(left <= most, "deleted disks return their space: {left}, initially {empty}");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn discarded_blocks_are_returned_to_the_file_system() {
    for options in ["", "--io direct"] {
        let store = Store::new();
        store.run("disk create vm1 256M").ok();
        let mut server = store.serve(options);
        let mut client = Client::connect(&store.socket(), "vm1").unwrap();
        for at in 0..128 {
            client.write(at * MIB, &pattern::bytes(at, MIB as usize)).unwrap();
        }
        client.flush().unwrap();
        // Discards every second range of 64 KiB, and then everything.
        let full = du(&store);
        assert!(full > 128 * MIB);
        for run in (0..1024).step_by(2) {
            client.trim(run << 16, 64 << 10).unwrap();
        }
        client.flush().unwrap();
        let wanted = full - 32 * MIB * 99 / 100;
        let left = shrinks_to(&store, wanted, PATIENCE);
        assert!(left <= wanted, "{options}: 32 MiB in runs of 64 KiB: {full} became {left}");
        client.trim(64 * MIB, (64 * MIB) as u32).unwrap();
        client.flush().unwrap();
        let wanted = full - 96 * MIB * 99 / 100;
        let left = shrinks_to(&store, wanted, PATIENCE);
        assert!(left <= wanted, "{options}: 96 MiB in all: {full} became {left}");
        for run in 0..2048 {
            let content = client.read(run << 16, 64 << 10).unwrap();
            let expected = match run {
                _ if run % 2 == 0 || run >= 1024 => vec![0; 64 << 10],
                _ => pattern::bytes(run / 16, MIB as usize)[((run % 16) << 16) as usize..][..64 << 10].to_vec(),
            };
            assert!(content == expected, "run {run}");
        }
        drop(client);
        assert_eq!(server.stop("TERM"), Some(0));
        store.is_clean();
    }
}

#[test]
fn capacities_from_a_sector_to_64_tib() {
    let store = Store::new();
    let capacities = [512, 1024, 4096, 4608, MIB + 512, 64 << 40];
    for capacity in capacities {
        store.run(&format!("disk create d{capacity} {capacity}")).ok();
    }
    let begin = Instant::now();
    let mut server = store.serve("");
    for capacity in capacities {
        let name = format!("d{capacity}");
        assert_eq!(tool("nbdinfo", &["--size", &store.uri(&name)]).trim(), capacity.to_string());
        let mut client = Client::connect(&store.socket(), &name).unwrap();
        assert_eq!(client.size, capacity);
        let last = pattern::bytes(capacity, 512);
        client.write(capacity - 512, &last).unwrap();
        assert!(client.read(capacity - 512, 512).unwrap() == last);
        // The middle of a disk of 64 TiB is accessible as fast as its beginning.
        let middle = capacity / 2 / 512 * 512;
        if middle + 512 < capacity {
            client.write(middle, &last).unwrap();
            assert!(client.read(middle, 512).unwrap() == last);
        }
        for (offset, length) in [(capacity, 512), (capacity - 512, 1024)] {
            let beyond = client.write(offset, &vec![1; length]);
            assert!(matches!(beyond, Err(Failure::Errno(_))), "{capacity}: {length} bytes at {offset}");
            assert!(matches!(client.read(offset, length as u32), Err(Failure::Errno(_))));
        }
        assert!(client.read(capacity - 512, 512).unwrap() == last, "refused writes write nothing");
        client.flush().unwrap();
    }
    store.run(&format!("snapshot create d{0}@a", 64u64 << 40)).ok();
    store.run(&format!("clone d{0}@a twin", 64u64 << 40)).ok();
    assert_eq!(server.stop("TERM"), Some(0));
    assert!(begin.elapsed() < PATIENCE, "no operation here depends on the capacity");
    assert!(du(&store) < 64 * MIB);
    store.is_clean();
}

#[test]
fn disk_names_in_any_script() {
    let store = Store::new();
    let names = ["größe", "диск-1", "仮想ディスク", "🦀", "a+b=c,d~e!f(g)[h]", "x.y_z-0"];
    for name in names {
        store.command("disk create").args([name, "4M"]).status().unwrap();
        let done: process::Done = process::output(store.command("snapshot create").arg(format!("{name}@état"))).into();
        done.ok();
    }
    let mut server = store.serve("");
    let exports = store.run("export list --json").json();
    let exports = exports["exports"].as_array().unwrap();
    assert_eq!(exports.len(), 2 * names.len());
    for export in exports {
        let name = export["name"].as_str().unwrap();
        assert!(names.iter().any(|n| name == *n || name == format!("{n}@état")), "{name}");
        // The URI is percent-encoded, so that users can paste it.
        let uri = export["uris"][0].as_str().unwrap();
        assert_eq!(tool("nbdinfo", &["--size", uri]).trim(), (4 << 20).to_string(), "{uri}");
        tool("qemu-img", &["info", "-f", "raw", uri]);
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
