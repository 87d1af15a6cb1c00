//! The setting of compression: servers compress cold data of disks with it by themselves, visibly, without a refusal of
//! other commands, and new disks get the default of the datastore.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use testkit::mounted::{leave, make_room, on_tmpfs};
use testkit::nbd::{Client, ENOSPC, Failure};
use testkit::pattern;
use testkit::process::{Store, until};

const MIB: usize = 1 << 20;

/// Content of which half can be compressed.
fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = pattern::bytes(seed, length);
    bytes.chunks_exact_mut(4096).for_each(|block| block[2048..].fill(seed as u8));
    bytes
}

fn number(of: &Value, member: &str) -> u64 {
    of[member].as_u64().unwrap_or_else(|| panic!("{member} of {of}"))
}

fn shown(store: &Store, disk: &str) -> Value {
    store.run(&format!("disk show {disk} --json")).json()
}

fn packed(store: &Store, disk: &str) -> u64 {
    number(&store.run(&format!("disk show {disk} --space --json")).json()["disks"][0], "packed")
}

/// Waits until a server has processed all of a disk, and has compressed this much of it in all.
fn until_compressed(store: &Store, disk: &str, bytes: usize) {
    until("cold data is compressed", || {
        // Absent until the server has noticed the setting.
        let state = &shown(store, disk)["compression"];
        state["pending"] == 0 && state["compressed"] == bytes as u64
    });
}

/// The jobs of passes.
fn passes(store: &Store) -> Vec<Value> {
    let jobs = store.run("job list --json").json();
    jobs["jobs"].as_array().unwrap().iter().filter(|job| job["kind"] == "disk optimize").cloned().collect()
}

#[test]
fn a_server_compresses_cold_data_and_shows_it() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after 1s");
    store.run("disk create vm 16M --compression zstd:5 --compress-at idle").ok();
    store.run("disk create other 16M").ok();
    let mut following = store.command("events --json").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("subscribed"));
    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    let (first, second) = (content(1, 4 * MIB), content(2, 2 * MIB));
    client.write(0, &first).unwrap();
    client.flush().unwrap();
    store.run("snapshot create vm@s").ok();
    Client::connect(&store.socket(), "other").unwrap().write(0, &first).unwrap();
    until_compressed(&store, "vm", 4 * MIB);
    assert_eq!((packed(&store, "vm"), packed(&store, "other")), (4 * MIB as u64, 0));
    let pass = passes(&store).into_iter().find(|job| job["state"] == "done" && number(job, "total") > 0).unwrap();
    assert_eq!((&pass["object"], &pass["background"]), (&json!("vm"), &json!(true)));
    let status = store.run("status --json").json()["compression"].clone();
    assert_eq!((number(&status, "disks"), number(&status, "compressed")), (1, 4 * MIB as u64));
    assert_eq!((&status["new_disks"], &status["running"]), (&json!("off"), &Value::Null));
    assert!(store.run("status").ok().contains("1 disk, off for new ones"));
    let text = store.run("disk show vm").ok();
    assert!(
        text.contains("zstd:5 when idle, 0 B to be examined, last pass") && text.contains("4 MiB compressed to"),
        "{text}"
    );
    let mut events = Vec::new();
    while !events.contains(&"disk_changed".to_owned()) {
        let event: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        if event["by"] == "disk optimize" || event["job"]["kind"] == "disk optimize" {
            events.push(event["event"].as_str().unwrap().to_owned());
        }
    }
    assert!(events.ends_with(&["job_started".into(), "job_ended".into(), "disk_changed".into()]), "{events:?}");

    // What is written later is compressed too, also after the setting has changed, and old data stays as it is.
    store.run("disk edit vm --compression lz4").ok();
    client.write(MIB as u64, &second).unwrap();
    client.flush().unwrap();
    until_compressed(&store, "vm", 6 * MIB);
    assert_eq!(packed(&store, "vm"), 4 * MIB as u64);
    let mut expected = first.clone();
    expected[MIB..3 * MIB].copy_from_slice(&second);
    assert!(client.read(0, 4 * MIB as u32).unwrap() == expected);
    // Without the setting, nothing is compressed any more.
    store.run("disk edit vm --compression off").ok();
    assert_eq!(shown(&store, "vm")["compression"], Value::Null);
    drop(client);
    server.kill();
    let mut server = store.serve("--optimize-after never");
    for (export, expected) in [("vm", &expected), ("vm@s", &first)] {
        assert!(Client::connect(&store.socket(), export).unwrap().read(0, 4 * MIB as u32).unwrap() == *expected);
    }
    assert_eq!(server.stop("TERM"), Some(0));
    let _ = following.wait();
    store.is_clean();
}

#[test]
fn new_data_is_compressed_when_it_is_written() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after never");
    store.run("disk create vm 16M --compression lz4").ok();
    assert!(store.run("disk show vm").ok().contains("lz4 at write-back"));
    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    let (first, second) = (content(1, 8 * MIB), content(2, MIB));
    client.write(0, &first).unwrap();
    client.flush().unwrap();
    // A flush appends what is still buffered to the journal, and that is stored plainly.
    let before = packed(&store, "vm");
    assert!(before >= 6 * MIB as u64, "{before}");
    // A snapshot shares the data, so an overwrite needs new blocks too, which are compressed.
    store.run("snapshot create vm@s").ok();
    client.write(0, &second).unwrap();
    client.flush().unwrap();
    let after = packed(&store, "vm");
    assert!(after >= before, "{after} of {before}");
    store.run("disk edit vm --compress-at idle").ok();
    client.write(12 * MIB as u64, &second).unwrap();
    client.flush().unwrap();
    assert_eq!(packed(&store, "vm"), after);
    drop(client);
    server.kill();
    let mut server = store.serve("--optimize-after never");
    let mut expected = first.clone();
    expected[..MIB].copy_from_slice(&second);
    for (export, expected) in [("vm", &expected), ("vm@s", &first)] {
        assert!(Client::connect(&store.socket(), export).unwrap().read(0, 8 * MIB as u32).unwrap() == *expected);
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
    store.run("disk create plain 8M").ok();
    store.run("disk edit plain --compress-at write-back").fails(2, "compression is off");
    store.run("disk edit plain --compress-at idle").fails(2, "compression is off");
    store
        .run("disk create x 8M --compression lz4 --compress-at noon")
        .fails(2, "neither inline nor write-back nor idle");
}

/// Small writes that are flushed at once, without and with the setting.
#[test]
fn a_flush_waits_for_inline_compression() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after never");
    let data = content(1, MIB);
    for (time, least) in [("write-back", 0), ("inline", MIB as u64)] {
        let name = format!("of-{time}");
        store.run(&format!("disk create {name} 16M --compression lz4 --compress-at {time}")).ok();
        assert!(store.run(&format!("disk show {name}")).ok().contains("inline") == (time == "inline"));
        let mut client = Client::connect(&store.socket(), &name).unwrap();
        for (at, part) in (0..).step_by(64 << 10).zip(data.chunks(64 << 10)) {
            client.write(at, part).unwrap();
        }
        client.flush().unwrap();
        assert!(packed(&store, &name) >= least, "{time}");
    }
    server.kill();
    let mut server = store.serve("--optimize-after never");
    assert!(Client::connect(&store.socket(), "of-inline").unwrap().read(0, MIB as u32).unwrap() == data);
    // The setting holds after a start too.
    let mut client = Client::connect(&store.socket(), "of-inline").unwrap();
    client.write(4 * MIB as u64, &data[..64 << 10]).unwrap();
    client.write((4 * MIB + (64 << 10)) as u64, &data[64 << 10..128 << 10]).unwrap();
    client.flush().unwrap();
    assert_eq!(packed(&store, "of-inline"), (MIB + (128 << 10)) as u64);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn servers_that_are_killed_continue_and_lose_nothing() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after 1s");
    store.run("disk create vm 64M --compression zstd:6 --compress-at idle").ok();
    let data = content(3, 16 * MIB);
    Client::connect(&store.socket(), "vm").unwrap().write(0, &data).unwrap();
    store.run("snapshot create vm@s").ok();
    for round in 0..4 {
        // The first pass begins after a second.
        std::thread::sleep(Duration::from_millis(1050 + 150 * round));
        server.kill();
        server = store.serve("--optimize-after 1s");
    }
    until("all data is compressed", || packed(&store, "vm") == data.len() as u64);
    for export in ["vm", "vm@s"] {
        assert!(Client::connect(&store.socket(), export).unwrap().read(0, data.len() as u32).unwrap() == data);
    }
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn a_pass_on_a_full_file_system_loses_nothing_and_continues_with_room() {
    on_tmpfs("a_pass_on_a_full_file_system_loses_nothing_and_continues_with_room", 64, on_full);
}

fn on_full(folder: &Path) {
    const BLOCK: usize = 4096;
    let store = Store::at(folder, "4M");
    let mut server = store.serve("--optimize-after never");
    store.run("disk create vm 32M --compression zstd:1 --compress-at idle").ok();
    store.run("disk create other 64M").ok();
    let data = content(6, 16 * MIB);
    let mut client = Client::connect(&store.socket(), "vm").unwrap();
    client.write(0, &data).unwrap();
    client.flush().unwrap();
    leave(folder, "rest", 64 << 10);
    // The other disk takes what the datastore has allocated and not used.
    let mut other = Client::connect(&store.socket(), "other").unwrap();
    let block = |at: usize| pattern::bytes(1000 + at as u64, BLOCK);
    let full = (0..64 * MIB / BLOCK).find(|at| match other.write((at * BLOCK) as u64, &block(*at)) {
        Ok(()) => false,
        Err(Failure::Errno(ENOSPC)) => true,
        Err(failure) => panic!("{failure:?}"),
    });
    let full = full.unwrap();
    other.flush().unwrap();
    drop((client, other));
    let is_whole = |store: &Store| {
        assert!(Client::connect(&store.socket(), "vm").unwrap().read(0, data.len() as u32).unwrap() == data);
        let mut other = Client::connect(&store.socket(), "other").unwrap();
        (0..full).for_each(|at| assert!(other.read((at * BLOCK) as u64, BLOCK as u32).unwrap() == block(at)));
    };
    // A kill while the pass finds no space, or compresses into the space that it frees step by step.
    for _ in 0..2 {
        server.kill();
        server = store.serve("--optimize-after 1s");
        let ended = |job: &Value| job["state"] != "running" && job["state"] != "waiting";
        until("a pass has ended", || passes(&store).iter().any(ended));
        for job in passes(&store) {
            let is_full = job["state"] == "failed" && job["error"].to_string().contains("full");
            assert!(is_full || job["state"] != "failed", "{job}");
        }
        is_whole(&store);
    }
    make_room(folder, "rest");
    server.kill();
    server = store.serve("--optimize-after 1s");
    until("all data is compressed", || packed(&store, "vm") == data.len() as u64);
    is_whole(&store);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn a_pass_gives_way_to_commands_and_to_the_end_of_the_server() {
    let store = Store::new();
    let mut server = store.serve("--optimize-after 1s");
    store.run("disk create vm 256M").ok();
    // More than Zstandard compresses at this level before the test is over.
    let data = content(4, 128 * MIB);
    {
        let mut client = Client::connect(&store.socket(), "vm").unwrap();
        data.chunks(16 * MIB).enumerate().for_each(|(at, part)| client.write((at * 16 * MIB) as u64, part).unwrap());
        client.flush().unwrap();
    }
    let running = || passes(&store).into_iter().find(|job| job["state"] == "running");
    store.run("disk edit vm --compression zstd:19").ok();
    until("a pass is running", || running().is_some_and(|job| number(&job, "done") > 0));
    assert_eq!(store.run("status --json").json()["compression"]["running"], "vm");
    store.run("snapshot create vm@s").ok();
    store.run("disk rename vm web").ok();
    store.run("disk migrate web -d sesparse").ok();
    assert!(running().is_none());
    store.run("disk migrate web -d native").ok();
    until("a pass is running again", || running().is_some_and(|job| number(&job, "done") > 0));
    let id = running().unwrap()["id"].as_str().unwrap().to_owned();
    store.run(&format!("job cancel {id}")).ok();
    store.run(&format!("job wait {id}")).fails(130, "continues later");
    assert_eq!(store.run(&format!("job show {id} --json")).json()["state"], "cancelled");
    until("the server has continued", || running().is_some_and(|job| job["id"] != id.as_str()));
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
    let _server = store.serve("--optimize-after never");
    let mut client = Client::connect(&store.socket(), "web").unwrap();
    for (at, part) in data.chunks(16 * MIB).enumerate() {
        assert!(client.read((at * 16 * MIB) as u64, part.len() as u32).unwrap() == part);
    }
}

#[test]
fn new_disks_get_the_default_and_clones_the_setting_of_their_source() {
    let (store, beside) = (Store::new(), tempfile::tempdir().unwrap());
    let file = |name: &str| beside.path().join(name).display().to_string();
    let settings = store.path().join("settings");
    assert_eq!(store.run("disk defaults --json").json(), json!({"compression": "off"}));
    store.run("disk create plain 8M").ok();
    assert!(!settings.exists(), "nothing has a setting");
    assert!(store.run("disk defaults --compression zstd").ok().contains("zstd:3"));
    assert!(std::fs::read_to_string(&settings).unwrap().starts_with("lamina settings 3 "));
    let of = |disk: &str| shown(&store, disk)["settings"]["compression"].clone();
    std::fs::write(file("raw"), content(5, MIB)).unwrap();
    for (arguments, disk, expected) in [
        ("disk create thin 8M".to_owned(), "thin", json!("zstd:3")),
        ("disk create none 8M --compression off".to_owned(), "none", Value::Null),
        ("disk create fast 8M --compression lz4".to_owned(), "fast", json!("lz4")),
        ("disk create thick 8M --provisioning zeroedthick".to_owned(), "thick", Value::Null),
        ("disk create image 8M --format vmdk".to_owned(), "image", Value::Null),
        ("clone plain linked".to_owned(), "linked", Value::Null),
        ("clone fast other".to_owned(), "other", json!("lz4")),
        ("clone fast whole --full".to_owned(), "whole", json!("lz4")),
        (format!("convert -f raw {} disk:converted -d native", file("raw")), "converted", json!("zstd:3")),
        (format!("disk import {} copied --from raw", file("raw")), "copied", json!("zstd:3")),
        (format!("disk import {} live --from raw --live", file("raw")), "live", json!("zstd:3")),
    ] {
        let done = store.run(&arguments);
        assert_eq!(done.code, 0, "{done:?}");
        assert_eq!(of(disk), expected, "{arguments}");
    }
    store.run("snapshot create plain@s").ok();
    store.run(&format!("backup create plain@s {}", file("backups"))).ok();
    store.run(&format!("backup restore {} restored --backup plain@s", file("backups"))).ok();
    assert_eq!((of("restored"), of("plain")), (json!("zstd:3"), Value::Null));
    // Migrations keep the setting, also where it has no effect.
    store.run("disk migrate whole -d sesparse").ok();
    assert!(store.run("disk show whole").ok().contains("lz4 at write-back, without effect on images"));
    store.run("disk migrate whole -d native --provisioning zeroedthick").ok();
    assert!(store.run("disk show whole").ok().contains("lz4 at write-back, without effect on a thick disk"));
    let there = Store::new();
    store.run(&format!("disk migrate whole -d native --to {}", there.path().display())).ok();
    assert_eq!(shown(&there, "whole")["settings"]["compression"], "lz4");
    store.run("disk edit thick --compression lz4").fails(1, "never need new space");
    store.run("disk edit image --compression lz4").fails(1, "not a native one");
    store.run("disk create x 8M --format vmdk --compression lz4").fails(1, "not a native one");
    store.run("disk create x 8M --compression zip").fails(2, "neither off, lz4 nor zstd");
    store.run("disk optimize thin --compression off").fails(2, "nothing to do");
    store.run("disk defaults --compression off").ok();
    store.run("disk create last 8M").ok();
    assert_eq!((of("last"), of("thin")), (Value::Null, json!("zstd:3")));
    store.is_clean();
}
