//! The setting of deduplication: servers store equal cold data of disks with it once by themselves, visibly, and share
//! no disk without the setting or of another tenant. New disks get the default of the datastore.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::time::Duration;
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::{Store, until};

const MIB: usize = 1 << 20;

/// Content of which half can be compressed.
fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = pattern::bytes(seed, length);
    bytes.chunks_exact_mut(4096).for_each(|block| block[2048..].fill(seed as u8));
    bytes
}

fn shown(store: &Store, disk: &str) -> Value {
    store.run(&format!("disk show {disk} --json")).json()
}

fn write(store: &Store, disk: &str, mib: usize, data: &[u8]) {
    let mut client = Client::connect(&store.socket(), disk).unwrap();
    client.write((mib * MIB) as u64, data).unwrap();
    client.flush().unwrap();
}

#[track_caller]
fn reads(store: &Store, disk: &str, mib: usize, data: &[u8]) {
    let mut client = Client::connect(&store.socket(), disk).unwrap();
    assert!(client.read((mib * MIB) as u64, data.len() as u32).unwrap() == data, "{disk}");
}

/// Waits until a server has compared all of a disk, and has removed this much from it and those that share with it.
fn until_shared(store: &Store, disk: &str, bytes: usize) {
    until("equal data is stored once", || {
        // Absent until the server has noticed the setting.
        let state = &shown(store, disk)["deduplication"];
        state["pending"] == 0 && state["shared"] == bytes as u64
    });
}

/// The jobs of passes.
fn passes(store: &Store) -> Vec<Value> {
    let jobs = store.run("job list --json").json();
    jobs["jobs"].as_array().unwrap().iter().filter(|job| job["kind"] == "disk optimize").cloned().collect()
}

#[test]
fn a_server_shares_equal_cold_data_of_a_tenant_and_shows_it() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after 1s --dedup-memory 1M");
    let data = content(1, 4 * MIB);
    for (disk, settings) in [
        ("a", "--label tenant=x --dedup label:tenant --dedup-at idle"),
        ("b", "--label tenant=x --dedup label:tenant --dedup-at idle --compression lz4"),
        ("other", "--label tenant=y --dedup label:tenant --dedup-at idle"),
        ("plain", "--label tenant=x"),
        ("unlabelled", "--dedup label:tenant --dedup-at idle"),
    ] {
        store.run(&format!("disk create {disk} 16M {settings}")).ok();
        write(&store, disk, 0, &data);
    }
    until_shared(&store, "a", 4 * MIB);
    until_shared(&store, "other", 0);
    let exclusive = ["a", "b", "other", "plain", "unlabelled"].map(|disk| shown(&store, disk)["exclusive"].clone());
    assert_eq!(exclusive, [0, 0, 4 * MIB, 4 * MIB, 4 * MIB].map(|bytes| json!(bytes)));
    // What is compared is compressed then: both disks have the data at the same place.
    until("shared data is compressed", || shown(&store, "b")["compression"]["compressed"] == 4 * MIB as u64);

    let text = store.run("disk show a").ok();
    assert!(
        text.contains("label:tenant when idle, 0 B to be examined, last pass")
            && text.contains("4 MiB of equal data removed")
    );
    let text = store.run("disk show unlabelled").ok();
    assert!(text.contains("label:tenant when idle, without effect, because the disk has no label 'tenant'"), "{text}");
    let listed = store.run("disk list --json").json();
    let listed: Vec<&Value> = listed["disks"].as_array().unwrap().iter().map(|disk| &disk["deduplication"]).collect();
    assert_eq!((&listed[0]["shared"], listed[3]), (&json!(4 * MIB), &Value::Null));
    let status = store.run("status --json").json()["deduplication"].clone();
    assert_eq!([&status["disks"], &status["domains"], &status["pending"]], [&json!(3), &json!(2), &json!(0)]);
    assert_eq!([&status["shared"], &status["new_disks"]], [&json!(4 * MIB), &json!("off")]);
    assert!(store.run("status").ok().contains("3 disks, off for new ones, 0 B to be examined, 4 MiB of equal data"));
    let pass = passes(&store).into_iter().find(|job| job["object"] == "label:tenant=x").unwrap();
    assert_eq!((&pass["state"], &pass["background"]), (&json!("done"), &json!(true)));

    // What is written later is shared too, also after a kill.
    server.kill();
    let mut server = store.serve("--optimize-after 1s");
    write(&store, "a", 8, &content(2, MIB));
    write(&store, "b", 8, &content(2, MIB));
    until_shared(&store, "a", MIB);
    for disk in ["a", "b", "other", "plain", "unlabelled"] {
        reads(&store, disk, 0, &data);
    }
    reads(&store, "a", 8, &content(2, MIB));
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn a_pass_gives_way_to_commands_and_to_the_end_of_the_server() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after 1s");
    // More rounds than a pass with the least memory can make before the test is over.
    let data = pattern::bytes(4, 16 * MIB);
    for disk in ["a", "b"] {
        store.run(&format!("disk create {disk} 1T")).ok();
        (0..8).for_each(|part| write(&store, disk, part * 16, &data));
    }
    assert_eq!(server.stop("TERM"), Some(0));
    let mut server = store.serve("--optimize-after 1s --dedup-memory 144K");
    let running = || passes(&store).into_iter().find(|job| job["state"] == "running");
    ["a", "b"].iter().for_each(|disk| drop(store.run(&format!("disk edit {disk} --dedup datastore")).ok()));
    until("a pass is running", || running().is_some());
    store.run("snapshot create a@s").ok();
    store.run("disk rename a web").ok();
    store.run("disk migrate web -d sesparse").ok();
    until("the pass has ended", || running().is_none());
    assert!(passes(&store).iter().all(|job| job["state"] == "done"), "{:?}", passes(&store));
    assert!(store.run("disk show web").ok().contains("datastore at write-back, without effect on images"));
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(server.stop("TERM"), Some(0));
    let mut server = store.serve("--optimize-after never");
    for disk in ["web", "b"] {
        (0..8).for_each(|part| reads(&store, disk, part * 16, &data));
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn new_data_that_is_stored_already_takes_no_space() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after never");
    ["a", "b"].iter().for_each(|disk| {
        store.run(&format!("disk create {disk} 32M --dedup datastore")).ok();
    });
    assert!(store.run("disk show a").ok().contains("datastore at write-back, "));
    let data = content(1, 8 * MIB);
    write(&store, "a", 0, &data);
    write(&store, "b", 8, &data);
    // A flush appends what is still buffered to the journal, and that is not compared.
    let exclusive = |disk: &str| shown(&store, disk)["exclusive"].as_u64().unwrap() as usize;
    assert!(exclusive("b") <= 4 * MIB, "{}", exclusive("b"));
    let shared = store.run("status --json").json()["deduplication"]["shared"].as_u64().unwrap();
    assert!(shared >= 4 * MIB as u64, "{shared}");
    store.run("disk edit b --dedup-at idle").ok();
    let before = exclusive("b");
    write(&store, "b", 16, &data);
    assert_eq!(exclusive("b"), before + 8 * MIB);
    server.kill();
    let mut server = store.serve("--optimize-after never");
    [("a", 0), ("b", 8), ("b", 16)].into_iter().for_each(|(disk, mib)| reads(&store, disk, mib, &data));
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
    store.run("disk create plain 8M").ok();
    store.run("disk edit plain --dedup-at write-back").fails(2, "deduplication is off");
    store.run("disk edit plain --dedup-at idle").fails(2, "deduplication is off");
    store.run("disk create x 8M --dedup disk --dedup-at noon").fails(2, "neither inline nor write-back nor idle");
}

/// New data is compared and then compressed, and copies of compressed data are found.
#[test]
fn both_settings_apply_to_new_data() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after never");
    let packed =
        |disk: &str| store.run(&format!("disk show {disk} --space --json")).json()["disks"][0]["packed"].as_u64();
    for disk in ["a", "b", "later"] {
        store.run(&format!("disk create {disk} 32M --dedup datastore --compression lz4")).ok();
    }
    assert!(store.run("disk show a").ok().contains("lz4 at write-back"));
    store.run("disk edit later --dedup-at idle").ok();
    assert!(store.run("disk show later").ok().contains("lz4 after deduplication"));
    let data = content(1, 8 * MIB);
    ["a", "b", "later"].iter().for_each(|disk| write(&store, disk, 8, &data));
    // A flush appends what is still buffered to the journal, and that is neither compared nor compressed.
    assert!(packed("a") >= Some(4 * MIB as u64) && packed("b") >= Some(4 * MIB as u64), "{:?}", packed("b"));
    assert_eq!(packed("later"), Some(0), "it is compressed after it was compared");
    let exclusive = shown(&store, "b")["exclusive"].as_u64().unwrap() as usize;
    let shared = store.run("status --json").json()["deduplication"]["shared"].as_u64().unwrap();
    assert!(exclusive <= 4 * MIB && shared >= 4 * MIB as u64, "{exclusive} {shared}");
    server.kill();
    let mut server = store.serve("--optimize-after never");
    ["a", "b", "later"].iter().for_each(|disk| reads(&store, disk, 8, &data));
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn new_disks_get_the_default_and_clones_the_setting_of_their_source() {
    let (store, beside) = (Store::new(), tempfile::tempdir().unwrap());
    let raw = beside.path().join("raw").display().to_string();
    let settings = store.path().join("settings");
    store.run("disk create plain 8M").ok();
    assert!(store.run("disk defaults --dedup disk").ok().contains("deduplication: disk at write-back"));
    assert!(std::fs::read_to_string(&settings).unwrap().starts_with("lamina settings 4 "));
    assert_eq!(
        store.run("disk defaults --json").json(),
        json!({"compression": "off", "dedup": "disk", "dedup_at": "write-back"})
    );
    let of = |disk: &str| shown(&store, disk)["settings"]["dedup"].clone();
    std::fs::write(&raw, content(5, MIB)).unwrap();
    for (arguments, disk, expected) in [
        ("disk create thin 8M".to_owned(), "thin", json!("disk")),
        ("disk create none 8M --dedup off".to_owned(), "none", Value::Null),
        ("disk create tenant 8M --dedup label:tenant".to_owned(), "tenant", json!("label:tenant")),
        ("disk create thick 8M --provisioning zeroedthick".to_owned(), "thick", Value::Null),
        ("disk create image 8M --format vmdk".to_owned(), "image", Value::Null),
        ("clone plain linked".to_owned(), "linked", Value::Null),
        ("clone tenant whole --full".to_owned(), "whole", json!("label:tenant")),
        (format!("convert -f raw {raw} disk:converted -d native"), "converted", json!("disk")),
        (format!("disk import {raw} copied --from raw"), "copied", json!("disk")),
    ] {
        let done = store.run(&arguments);
        assert_eq!(done.code, 0, "{done:?}");
        assert_eq!(of(disk), expected, "{arguments}");
    }
    // Migrations keep the setting, also where it has no effect.
    store.run("disk migrate whole -d native --provisioning zeroedthick").ok();
    assert!(store.run("disk show whole").ok().contains("label:tenant at write-back, without effect on a thick disk"));
    let there = Store::new();
    store.run(&format!("disk migrate whole -d native --to {}", there.path().display())).ok();
    assert_eq!(shown(&there, "whole")["settings"]["dedup"], "label:tenant");
    store.run("disk edit thick --dedup disk").fails(1, "never need new space");
    store.run("disk edit image --dedup disk").fails(1, "not a native one");
    store.run("disk create x 8M --dedup label:a=b").fails(2, "contains '='");
    store.run("disk optimize thin --dedup disk --dedup-memory 143K").fails(2, "the least is 144 KiB");
    store.run("disk optimize thin --dedup disk --dedup-memory 144K").ok();
    store.run("disk defaults --dedup off").ok();
    ["thin", "tenant", "converted", "copied"].iter().for_each(|disk| {
        store.run(&format!("disk edit {disk} --dedup off --label tenant=x")).ok();
    });
    assert!(std::fs::read_to_string(&settings).unwrap().starts_with("lamina settings 1 "));
    store.is_clean();
}
