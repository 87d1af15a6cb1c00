//! `check --repair` and `salvage` on datastores with damaged files, with the command line.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::{Store, run};

const CAPACITY: usize = 4 << 20;
const PAGE: usize = 4096;

/// A stopped datastore with two disks and a snapshot, and the content of each.
fn build() -> (Store, BTreeMap<&'static str, Vec<u8>>) {
    let store = Store::at(&std::env::temp_dir(), "4M");
    for disk in ["vm1", "vm2"] {
        store.run(&format!("disk create {disk} {CAPACITY}")).ok();
    }
    let mut contents = BTreeMap::new();
    let mut images = [vec![0; CAPACITY], vec![0; CAPACITY]];
    let mut server = store.serve("");
    let mut clients = ["vm1", "vm2"].map(|disk| Client::connect(&store.socket(), disk).unwrap());
    for round in 0..200u64 {
        for (number, (client, image)) in clients.iter_mut().zip(&mut images).enumerate() {
            let data = pattern::bytes(round * 2 + number as u64 + 1, PAGE);
            let at = (round as usize * 5 % 1000) * PAGE;
            client.write(at as u64, &data).unwrap();
            image[at..at + PAGE].copy_from_slice(&data);
        }
        if round == 100 {
            clients.iter_mut().for_each(|client| client.flush().unwrap());
            store.run("snapshot create vm1@middle").ok();
            contents.insert("vm1@middle", images[0].clone());
        }
    }
    clients.iter_mut().for_each(|client| client.flush().unwrap());
    drop(clients);
    server.stop("TERM");
    contents.insert("vm1", images[0].clone());
    contents.insert("vm2", images[1].clone());
    (store, contents)
}

fn spoil(store: &Store, name: &str, offset: u64, bytes: usize) {
    let file = OpenOptions::new().read(true).write(true).open(store.path().join(name)).unwrap();
    let mut part = vec![0; bytes];
    file.read_exact_at(&mut part, offset).unwrap();
    part.iter_mut().for_each(|byte| *byte ^= 0x5a);
    file.write_all_at(&part, offset).unwrap();
}

fn bytes_of(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

/// The content of every file of the datastore.
fn files_of(store: &Store) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(store.path()).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_file()).map(|path| (path.clone(), bytes_of(&path))).collect()
}

/// Extracts all disks and snapshots and compares them with their content; returns the number of lost bytes.
fn salvaged(store: &Store, contents: &BTreeMap<&'static str, Vec<u8>>, out: &Path) -> u64 {
    let before = files_of(store);
    let path = store.path();
    let list = run(&format!("salvage {} --list --json", path.display()));
    let list: serde_json::Value = serde_json::from_str(&list.stdout).unwrap();
    assert_eq!(list["objects"].as_array().unwrap().len(), contents.len(), "{list}");
    let mut sum = 0;
    for (name, content) in contents {
        let file = out.join(format!("{}.raw", name.replace('@', "-")));
        let _ = std::fs::remove_file(&file);
        let (disk, snapshot) = name.split_once('@').unwrap_or((name, ""));
        let snapshot = if snapshot.is_empty() { String::new() } else { format!("--snapshot {snapshot}") };
        let done = run(&format!("salvage {} --disk {disk} {snapshot} --to {} --json", path.display(), file.display()));
        let report: serde_json::Value = serde_json::from_str(&done.stdout).unwrap_or_else(|_| panic!("{done:?}"));
        let lost = report["lost"].as_array().unwrap();
        assert_eq!(done.code, if lost.is_empty() { 0 } else { 6 }, "{done:?}");
        let mut expected = content.clone();
        for range in lost {
            let (start, length) = (range["start"].as_u64().unwrap(), range["length"].as_u64().unwrap());
            expected[start as usize..(start + length) as usize].fill(0);
            sum += length;
        }
        assert!(bytes_of(&file) == expected, "{name}: {report}");
    }
    assert!(files_of(store) == before, "a salvage wrote to the datastore");
    sum
}

#[test]
fn check_repairs_provable_damage_and_lists_other_damage() {
    let (store, contents) = build();
    let out = tempfile::tempdir().unwrap();
    for (name, offset, words) in [
        // The page images of the last checkpoint include this page, until the next checkpoint replaces them.
        ("catalog", 100, "page 0 of catalog"),
        ("superblock", 40, "superblock"),
        ("superblock", PAGE as u64 + 40, "superblock"),
        ("data.summary", 0, "page 0 of data.summary"),
        ("map.summary", 0, "page 0 of map.summary"),
        ("data.table", 0, "page 0 of data.table"),
        ("map.table", 0, "page 0 of map.table"),
    ] {
        spoil(&store, name, offset, 20);
        let repaired = store.run("check --repair --data");
        assert_eq!(repaired.code, 0, "{name}: {repaired:?}");
        assert!(repaired.stdout.contains(words), "{name}: {repaired:?}");
        store.run("check --data").ok();
        assert_eq!(salvaged(&store, &contents, out.path()), 0, "{name}");
    }
    // Data has no second copy.
    let block = contents["vm2"].chunks(PAGE).position(|block| block.iter().any(|byte| *byte != 0)).unwrap();
    let content = &contents["vm2"][block * PAGE..(block + 1) * PAGE];
    let data = bytes_of(&store.path().join("data.0000"));
    let place = data.chunks(PAGE).position(|found| found == content).unwrap();
    spoil(&store, "data.0000", (place * PAGE) as u64, 1);
    let checked = store.run("check --repair --data");
    assert_eq!(checked.code, 6, "{checked:?}");
    assert!(checked.stdout.contains("vm2") && checked.stdout.contains("checksum"), "{checked:?}");
    assert_eq!(salvaged(&store, &contents, out.path()), PAGE as u64);
}

#[test]
fn a_superblock_copy_that_an_opening_rewrote_is_reported_after_restarts() {
    let (store, _) = build();
    spoil(&store, "superblock", 40, 20);
    for _ in 0..2 {
        let mut server = store.serve("");
        server.stop("TERM");
    }
    let checked = store.run("check").ok();
    assert!(
        checked.contains("copy 1 of 2 of the superblock") && checked.contains("rewritten by an earlier"),
        "{checked}"
    );
    assert!(!store.run("check").ok().contains("superblock"));
}

#[test]
fn a_missing_file_is_reported_as_damage_with_a_remedy() {
    let (store, contents) = build();
    let out = tempfile::tempdir().unwrap();
    for name in ["superblock", "journal", "checkpoint", "catalog", "map", "map.summary", "data.table"] {
        let (path, aside) = (store.path().join(name), out.path().join(name));
        std::fs::copy(&path, &aside).unwrap();
        std::fs::remove_file(&path).unwrap();
        for command in ["disk list", "check --repair"] {
            let done = store.run(command);
            assert_eq!(done.code, if name == "superblock" { 3 } else { 6 }, "{name}: {done:?}");
            assert!(done.stderr.contains(name) && done.stderr.contains("lamina salvage"), "{name}: {done:?}");
        }
        let list = run(&format!("salvage {} --list --json", store.path().display()));
        assert_eq!(list.code, if ["catalog", "map"].contains(&name) { 6 } else { 0 }, "{name}: {list:?}");
        let list: serde_json::Value = serde_json::from_str(&list.stdout).unwrap();
        assert_eq!(list["incomplete"], name == "catalog", "{name}: {list}");
        std::fs::rename(&aside, &path).unwrap();
    }
    assert_eq!(salvaged(&store, &contents, out.path()), 0);
    // A disk whose record cannot be read must not be reported as missing.
    store.run("disk show vm1").ok();
    spoil(&store, "catalog", 0, PAGE);
    let done = store.run("disk show vm1");
    assert!(done.code == 3 && done.stderr.contains("a page of the catalog is damaged, so"), "{done:?}");
}

#[test]
fn salvage_reads_a_datastore_that_cannot_be_opened() {
    let (store, contents) = build();
    let out = tempfile::tempdir().unwrap();
    spoil(&store, "superblock", 0, 2 * PAGE);
    store.run("disk list").fails(6, "superblock");
    assert_eq!(salvaged(&store, &contents, out.path()), 0);
    // Extraction into another datastore.
    let other = Store::at(&std::env::temp_dir(), "4M");
    run(&format!("salvage {} --disk vm1 --to {} --name saved", store.path().display(), other.path().display()));
    let copy = out.path().join("copy.raw");
    other.run(&format!("convert disk:saved {} --format raw", copy.display())).ok();
    assert!(bytes_of(&copy) == contents["vm1"]);
    other.run("check --data").ok();
    run(&format!("salvage {} --disk vm9 --to {}/x.raw", store.path().display(), out.path().display())).fails(3, "vm9");
    run(&format!("salvage {} --disk vm1 --to {}/x", store.path().display(), out.path().display())).fails(2, "--format");
    let text = run(&format!("salvage {} --list", store.path().display())).stdout;
    assert!(text.starts_with("NAME") && text.contains("vm1@middle"), "{text}");
    // A datastore with a running server cannot be salvaged.
    let mut server = other.serve("");
    run(&format!("salvage {} --list", other.path().display())).fails(4, "open in another process");
    server.stop("TERM");
}
