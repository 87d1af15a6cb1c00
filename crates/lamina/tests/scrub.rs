//! Scrubs through the command line: damage is found and named, the list follows later changes, and a scrub continues
//! after a stop, a kill or a cancellation.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::{Store, until};

const BLOCK: u64 = 4096;

/// Inverts a bit of the block with this content in the data files.
fn damage(store: &Path, content: &[u8]) {
    let path = store.join("data.0000");
    let bytes = std::fs::read(&path).unwrap();
    let at = bytes.chunks_exact(BLOCK as usize).position(|block| block == content).unwrap() * BLOCK as usize;
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[bytes[at + 100] ^ 4], at as u64 + 100).unwrap();
    file.sync_all().unwrap();
}

fn block(seed: u64) -> Vec<u8> {
    pattern::bytes(seed, BLOCK as usize)
}

/// A disk `vm1` with a snapshot and a clone, which share blocks 0 to 19. Block 0 of the disk was written again.
fn family(store: &Store) {
    store.run("disk create vm1 16M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    (0..20).for_each(|number| client.write(number * BLOCK, &block(number)).unwrap());
    store.run("snapshot create vm1@s").ok();
    client.write(0, &block(100)).unwrap();
    drop(client);
    store.run("clone vm1@s lab").ok();
    assert_eq!(server.stop("TERM"), Some(0));
}

fn names(damage: &Value) -> Vec<String> {
    let all = damage["references"].as_array().unwrap();
    all.iter().map(|one| format!("{} {}", one["name"].as_str().unwrap(), one["offset"])).collect()
}

fn status(store: &Store) -> Value {
    store.run("status --json").json()["scrub"].clone()
}

/// Runs a command that finds damage. Returns its JSON output.
fn finds(store: &Store, arguments: &str) -> Value {
    let done = store.run(&format!("{arguments} --json"));
    // Without a server, the log of the engine, which names each damaged block too, is on stderr.
    assert_eq!(done.code, 6, "{done:?}");
    serde_json::from_str(&done.stdout).unwrap()
}

#[test]
fn damage_is_named_and_leaves_the_list_when_it_is_gone() {
    let store = Store::new();
    family(&store);
    assert_eq!(status(&store)["state"], "never");
    assert!(store.run("scrub start").ok().ends_with("no damage\n"));
    let state = status(&store);
    assert_eq!((&state["state"], &state["damaged"], &state["every"]), (&json!("done"), &json!(0), &Value::Null));
    assert!(store.run("status").ok().contains("scrub:"));
    damage(&store.path(), &block(0));
    damage(&store.path(), &block(5));
    for served in [false, true] {
        let mut server = served.then(|| store.serve(""));
        let report = finds(&store, "scrub start");
        assert_eq!((&report["found"], &report["repaired"], &report["damaged"]), (&json!(2), &json!(0), &json!(2)));
        let damage = report["damage"].as_array().unwrap();
        let mut named: Vec<Vec<String>> = damage.iter().map(names).collect();
        named.sort();
        assert_eq!(named, [vec!["lab 0", "vm1@s 0"], vec!["lab 20480", "vm1 20480", "vm1@s 20480"]]);
        assert_eq!(
            report["touched"],
            json!([{"name": "lab", "places": 2}, {"name": "vm1", "places": 1}, {"name": "vm1@s", "places": 2}])
        );
        let text = store.run("scrub status");
        assert_eq!(text.code, 6);
        assert!(text.stdout.contains("  vm1@s bytes 20480 to 24576\n"), "{text:?}");
        assert_eq!(status(&store)["damaged"], 2);
        if let Some(server) = &mut server {
            assert_eq!(server.stop("TERM"), Some(0));
        }
    }
    // A new clone and a new name are in the list at once.
    store.run("clone vm1@s other").ok();
    store.run("disk rename lab room").ok();
    let report = finds(&store, "scrub status");
    let touched: Vec<&str> =
        report["touched"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(touched, ["other", "room", "vm1", "vm1@s"]);
    // Block 5 is written with its old content, and block 0 of both clones with other content.
    let mut server = store.serve("");
    for (disk, at, content) in [("vm1", 5, 5), ("room", 5, 5), ("room", 0, 7), ("other", 0, 8), ("other", 5, 9)] {
        let mut client = Client::connect(&store.socket(), disk).unwrap();
        client.write(at * BLOCK, &block(content)).unwrap();
        client.flush().unwrap();
    }
    assert_eq!(server.stop("TERM"), Some(0));
    let report = finds(&store, "scrub status");
    assert_eq!(report["touched"], json!([{"name": "vm1@s", "places": 2}]));
    store.run("disk delete room").ok();
    store.run("disk delete other").ok();
    store.run("snapshot delete vm1@s").ok();
    let text = store.run("scrub status").ok();
    assert!(text.ends_with("no damage\n"), "{text}");
    assert_eq!(status(&store)["damaged"], 0);
    // The blocks of the deleted snapshot may not be free yet. The scrub reports them, but they belong to no disk.
    let again = store.run("scrub start --restart");
    assert!(again.code == 0 && again.stdout.ends_with("no damage\n"), "{again:?}");
    store.is_clean();
}

#[test]
fn damage_raises_an_event() {
    let store = Store::new();
    family(&store);
    damage(&store.path(), &block(5));
    let mut server = store.serve("");
    let mut following = store.command("events --json").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(next()["event"], "subscribed");
    let job = store.run("scrub start --background --json").json();
    assert_eq!(job["kind"], "scrub");
    assert_eq!(next()["event"], "job_started");
    let event = next();
    assert_eq!((&event["event"], &event["repaired"]), (&json!("damage_found"), &Value::Null));
    assert_eq!(event["objects"], json!(["lab", "vm1", "vm1@s"]));
    assert!(event["problem"].as_str().unwrap().contains("fails its checksum"), "{event}");
    assert_eq!(next()["event"], "job_ended");
    let id = job["id"].as_str().unwrap();
    let waited = store.run(&format!("job wait {id}"));
    assert!(waited.code == 6 && waited.stdout.contains("vm1@s bytes 20480 to 24576"), "{waited:?}");
    assert_eq!(server.stop("TERM"), Some(0));
    let _ = following.wait();
}

#[test]
fn a_scrub_continues_after_a_stop_a_kill_and_a_cancellation() {
    let store = Store::new();
    store.run("disk create vm1 64M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    (0..48).for_each(|number| client.write(number << 20, &pattern::bytes(number, 1 << 20)).unwrap());
    drop(client);
    store.run("scrub start --rate 2M --background").ok();
    let done = || status(&store)["done"].as_u64().unwrap();
    until("a part is read", || done() > 2 << 20);
    store.run("scrub start").fails(4, "running already");
    assert_eq!(server.stop("TERM"), Some(0));
    let state = status(&store);
    assert_eq!(state["state"], "interrupted");
    let before = state["done"].as_u64().unwrap();
    assert!(before > 2 << 20, "{state}");
    // The next server continues the scrub by itself, also after a kill.
    for signal in ["KILL", "TERM"] {
        let mut server = store.serve("");
        until("it runs", || status(&store)["state"] == "running");
        assert!(done() >= before);
        server.stop(signal);
    }
    let mut server = store.serve("");
    until("it runs", || status(&store)["state"] == "running");
    assert_eq!(store.run("scrub cancel").ok(), "the scrub is stopped; 'lamina scrub start' continues it\n");
    assert_eq!(store.run("scrub cancel --json").code, 3);
    assert_eq!(server.stop("TERM"), Some(0));
    let mut server = store.serve("");
    let state = status(&store);
    assert_eq!(state["state"], "cancelled");
    assert!(state["done"].as_u64().unwrap() >= before);
    let report = store.run("scrub start --rate 0 --json").json();
    assert_eq!(report["state"], "done");
    let last = &report["last"];
    // The blocks are read once, except those of the steps that the kill interrupted.
    let blocks = last["blocks"].as_u64().unwrap();
    assert!((48 << 8..60 << 8).contains(&blocks), "{last}");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn a_server_scrubs_at_the_interval_of_the_schedule() {
    let store = Store::new();
    store.run("disk create vm1 16M").ok();
    store.run("disk create image 16M --format monolithicsparse").ok();
    let text = store.run("scrub --every 7d --rate 50M").ok();
    assert!(text.starts_with("scrubs every 1w at 50 MiB/s, next "), "{text}");
    let state = status(&store);
    assert_eq!(
        (&state["every"], &state["rate"], &state["state"]),
        (&json!(604_800), &json!(50 << 20), &json!("never"))
    );
    assert!(state["due"].as_u64().unwrap() > 604_800);
    let mut server = store.serve("");
    store.run("scrub --every 1s").ok();
    until("a scrub has ended", || status(&store)["ended"] != Value::Null);
    let first = status(&store)["ended"].clone();
    until("another scrub has ended", || status(&store)["ended"] != first);
    assert_eq!(store.run("scrub --every never").ok(), "no scrub is scheduled\n");
    assert_eq!(status(&store)["due"], Value::Null);
    assert_eq!(store.run("scrub status --json").json()["last"]["images"], 1);
    assert_eq!(server.stop("TERM"), Some(0));
    store.run("scrub --every 0d").fails(2, "no interval");
    store.run("scrub --every never --rate 50M").fails(2, "no effect");
    store.run("scrub --every 7d start").fails(2, "no further command");
    store.run("scrub --rate 1M").fails(2, "--every");
    store.run("scrub").fails(2, "scrub start");
}
