//! Writes that wait for space: they complete by themselves when there is space, delay no other request, and wait no
//! longer than the policy of the disk permits, and no longer than their connection and the server exist.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};
use testkit::mounted::{make_room, on_ext4, on_tmpfs, take_the_rest};
use testkit::nbd::{Client, Command, ENOSPC, Failure};
use testkit::pattern;
use testkit::process::{Store, until};

const BLOCK: u64 = 4096;
/// Bytes of the writes that wait: more than the space that becomes free by chance on a full file system.
const LARGE: usize = 1 << 20;
/// Blocks of the disk that exist before the file system is full.
const OWN: u64 = 64;
/// Offset of the writes that wait.
const BEHIND: u64 = 192 << 20;

#[test]
fn writes_of_native_disks_wait_on_a_full_tmpfs() {
    on_tmpfs("writes_of_native_disks_wait_on_a_full_tmpfs", 96, |folder| writes_wait(folder, "native"));
}

#[test]
fn writes_of_native_disks_wait_on_a_full_ext4() {
    on_ext4("writes_of_native_disks_wait_on_a_full_ext4", |folder| writes_wait(folder, "native"));
}

#[test]
fn writes_of_vmdk_disks_wait_on_a_full_tmpfs() {
    on_tmpfs("writes_of_vmdk_disks_wait_on_a_full_tmpfs", 96, |folder| writes_wait(folder, "vmdk"));
}

#[test]
fn writes_of_sesparse_disks_wait_on_a_full_ext4() {
    on_ext4("writes_of_sesparse_disks_wait_on_a_full_ext4", |folder| writes_wait(folder, "sesparse"));
}

fn is_full(outcome: Result<(), Failure>) -> bool {
    match outcome {
        Ok(()) => false,
        Err(Failure::Errno(ENOSPC)) => true,
        Err(failure) => panic!("{failure:?}"),
    }
}

/// Fills the file system, and the space that the datastore has reserved for new writes. The disk's writes must not
/// wait.
fn fill(store: &Store, folder: &Path, client: &mut Client, from: &mut u64) {
    store.run("disk edit web --on-full error").ok();
    take_the_rest(folder, "filler");
    let content = pattern::bytes(*from, BLOCK as usize);
    while !is_full(client.write(*from * BLOCK, &content)) {
        *from += 1;
        assert!(*from * BLOCK < BEHIND, "the file system never gets full");
    }
    client.flush().unwrap();
}

/// Sends a request and receives its reply, although earlier requests are not answered yet.
fn answered(client: &mut Client, command: Command<'_>) -> Vec<u8> {
    let sent = client.submit(command).unwrap();
    let (cookie, outcome) = client.complete().unwrap();
    assert_eq!(cookie, sent, "the only request that does not wait");
    outcome.unwrap()
}

/// The waiting writes, as `status` shows them.
fn waiting(store: &Store) -> Vec<Value> {
    store.run("status --json").json()["waiting"].as_array().unwrap().clone()
}

fn until_waiting(store: &Store, writes: u64) -> Value {
    until("the writes wait for space", || waiting(store).iter().any(|of| of["writes"] == writes));
    waiting(store).remove(0)
}

fn until_none_waits(store: &Store) {
    until("no write waits any more", || waiting(store).is_empty());
}

/// A subscription to the events of the datastore.
struct Events {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Events {
    fn follow(store: &Store) -> Self {
        let mut child = store.command("events --json").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        assert!(first.contains("subscribed"), "{first}");
        Self { child, lines }
    }

    /// The rest of the events, after the server has ended.
    fn end(mut self) -> Vec<Value> {
        let mut text = String::new();
        self.lines.read_to_string(&mut text).unwrap();
        self.child.wait().unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn writes_wait(folder: &Path, format: &str) {
    let store = Store::at(folder, "4M");
    store.run(&format!("disk create web 256M --format {format} --on-full wait")).ok();
    let mut server = store.serve("");
    let events = Events::follow(&store);
    let mut client = Client::connect(&store.socket(), "web").unwrap();
    let own = pattern::bytes(1, (OWN * BLOCK) as usize);
    client.write(0, &own).unwrap();
    client.flush().unwrap();
    let mut end = OWN;
    fill(&store, folder, &mut client, &mut end);
    let large = pattern::bytes(2, LARGE);

    // Without a time limit: the write waits, all other requests are served, and the write completes when there is
    // space.
    let edited = store.run("disk edit web --on-full wait --json").json();
    assert_eq!(edited["settings"]["on_full"], "wait");
    let held = client.submit(Command::Write { offset: BEHIND, data: &large, fua: true }).unwrap();
    let shown = until_waiting(&store, 1);
    assert_eq!((&shown["disk"], &shown["bytes"]), (&"web".into(), &LARGE.into()));
    assert!(shown["reason"].as_str().unwrap().contains("pace"), "{shown}");
    assert!(store.run("status").ok().contains("disk web: 1 write (1 MiB) for space, since"));
    assert!(store.run("disk show web").ok().contains("1 write (1 MiB) for space"));
    assert!(store.run("disk list").ok().contains("waits for space"));
    assert_eq!(answered(&mut client, Command::Read { offset: 0, length: (OWN * BLOCK) as u32 }), own);
    assert_eq!(answered(&mut client, Command::Read { offset: BEHIND, length: 4096 }), [0; 4096]);
    let changed = pattern::bytes(3, BLOCK as usize);
    for fua in [false, true] {
        answered(&mut client, Command::Write { offset: BLOCK, data: &changed, fua });
    }
    answered(&mut client, Command::Flush);
    answered(&mut client, Command::Trim { offset: 2 * BLOCK, length: BLOCK as u32, fua: false });
    let mut other = Client::connect(&store.socket(), "web").unwrap();
    assert_eq!(other.read(BLOCK, BLOCK as u32).unwrap(), changed);
    other.flush().unwrap();
    // The snapshot may be refused for lack of space. If the snapshot is taken, it lacks the waiting write, which is not
    // acknowledged.
    let snapshot = store.run("snapshot create web@full").code;
    assert!(snapshot == 0 || snapshot == 5, "{snapshot}");
    assert_eq!(waiting(&store).len(), 1);
    make_room(folder, "filler");
    let (cookie, outcome) = client.complete().unwrap();
    assert_eq!((cookie, outcome), (held, Ok(Vec::new())));
    assert_eq!(client.read(BEHIND, LARGE as u32).unwrap(), large);
    until_none_waits(&store);
    if snapshot == 0 && format == "native" {
        let mut full = Client::connect(&store.socket(), "web@full").unwrap();
        assert_eq!(full.read(BEHIND, 4096).unwrap(), [0; 4096]);
    }

    // With a time limit, which the rename of a disk does not change.
    fill(&store, folder, &mut client, &mut end);
    store.run("disk edit web --on-full wait=1s").ok();
    let began = Instant::now();
    let at = BEHIND + 2 * LARGE as u64;
    assert!(is_full(client.write(at, &large)));
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());

    // A change of the policy applies to writes that wait already.
    store.run("disk edit web --on-full wait=1h").ok();
    client.submit(Command::Write { offset: at, data: &large, fua: false }).unwrap();
    until_waiting(&store, 1);
    store.run("disk edit web --on-full error").ok();
    assert_eq!(client.complete().unwrap().1, Err(ENOSPC));

    // The wait ends with the connection, also if so many writes wait that the server receives nothing more.
    store.run("disk edit web --on-full wait").ok();
    other.submit(Command::Write { offset: at, data: &large, fua: false }).unwrap();
    until_waiting(&store, 1);
    other.vanish();
    until_none_waits(&store);
    let mut other = Client::connect(&store.socket(), "web").unwrap();
    // Small writes find space where a large one does not.
    fill(&store, folder, &mut other, &mut end);
    store.run("disk edit web --on-full wait").ok();
    // The rest fits into the buffers of the socket, so that sending does not block.
    for block in 0..140 {
        other.submit(Command::Write { offset: at + block * BLOCK, data: &changed, fua: false }).unwrap();
    }
    until_waiting(&store, 128);
    assert_eq!(client.read(BLOCK, BLOCK as u32).unwrap(), changed, "another connection is served");
    drop(other);
    until_none_waits(&store);

    // The server stops at once, without an answer to the write, so that a client that reconnects repeats it.
    client.submit(Command::Write { offset: at, data: &large, fua: false }).unwrap();
    until_waiting(&store, 1);
    let began = Instant::now();
    assert_eq!(server.stop("TERM"), Some(0));
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert!(matches!(client.complete(), Err(Failure::Gone(_))));
    let events = events.end();
    let named = |name: &str| events.iter().filter(|event| event["event"] == name).cloned().collect::<Vec<_>>();
    let (begun, ended) = (named("writes_wait"), named("writes_go_on"));
    assert!(begun.len() >= 6 && begun.len() == ended.len(), "{events:?}");
    let counts = |of: &Value| ["written", "refused", "dropped"].map(|name| of[name].as_u64().unwrap());
    assert_eq!(counts(&ended[0]), [1, 0, 0]);
    assert_eq!([counts(&ended[1]), counts(&ended[2]), counts(&ended[3])], [[0, 1, 0]; 3]);
    assert_eq!(counts(ended.last().unwrap()), [0, 0, 1]);

    // The policy is stored.
    make_room(folder, "filler");
    store.is_clean();
    assert_eq!(store.run("disk show web --json").json()["settings"]["on_full"], "wait");
}

/// A migration to another datastore is a way to get space, so refused writes do not end it.
#[test]
fn a_waiting_write_is_carried_out_where_its_disk_is_migrated_to() {
    on_ext4("a_waiting_write_is_carried_out_where_its_disk_is_migrated_to", |folder| {
        let (store, other) = (Store::at(folder, "4M"), Store::new());
        store.run("disk create web 256M").ok();
        let mut server = store.serve("");
        let mut client = Client::connect(&store.socket(), "web").unwrap();
        let own = pattern::bytes(1, (OWN * BLOCK) as usize);
        client.write(0, &own).unwrap();
        let mut end = OWN;
        fill(&store, folder, &mut client, &mut end);
        store.run("disk edit web --on-full wait").ok();
        let large = pattern::bytes(2, LARGE);
        let held = client.submit(Command::Write { offset: BEHIND, data: &large, fua: true }).unwrap();
        until_waiting(&store, 1);
        store.run(&format!("disk migrate web --format native --to {}", other.path().display())).ok();
        let (cookie, outcome) = client.complete().unwrap();
        assert_eq!((cookie, outcome), (held, Ok(Vec::new())));
        assert_eq!(client.read(BEHIND, LARGE as u32).unwrap(), large);
        drop(client);
        assert_eq!(server.stop("TERM"), Some(0));
        let mut server = other.serve("");
        let mut client = Client::connect(&other.socket(), "web").unwrap();
        assert_eq!(client.read(0, own.len() as u32).unwrap(), own);
        assert_eq!(client.read(BEHIND, LARGE as u32).unwrap(), large);
        drop(client);
        assert_eq!(server.stop("TERM"), Some(0));
        make_room(folder, "filler");
        store.is_clean();
    });
}

#[test]
fn clones_have_the_policy_of_their_source_and_a_deleted_disk_has_none() {
    let store = Store::new();
    for (name, format) in [("a", "native"), ("b", "thin")] {
        store.run(&format!("disk create {name} 8M --format {format} --on-full wait=2h")).ok();
        store.run(&format!("clone {name} linked-{name}")).ok();
        store.run(&format!("clone {name} full-{name} --full")).ok();
        store.run(&format!("disk rename {name} {name}{name}")).ok();
        store.run(&format!("disk edit {name}{name} --on-full error")).ok();
        for (clone, policy) in [(format!("linked-{name}"), "wait=2h"), (format!("full-{name}"), "wait=2h")] {
            let shown = store.run(&format!("disk show {clone} --json")).json();
            assert_eq!(shown["settings"]["on_full"], policy, "{clone}");
        }
        // A disk keeps its settings in another format.
        store.run(&format!("disk migrate full-{name} --format sesparse")).ok();
        assert!(store.run(&format!("disk show full-{name}")).ok().contains("wait=2h"));
    }
    let record = std::fs::read_to_string(store.path().join("settings")).unwrap();
    assert_eq!(record.matches("on_full").count(), 4, "{record}");
    for name in ["linked-a", "linked-b", "full-a", "full-b"] {
        store.run(&format!("disk delete {name}")).ok();
    }
    let record = std::fs::read_to_string(store.path().join("settings")).unwrap();
    assert!(!record.contains("on_full"), "{record}");
    store.run("disk edit aa").fails(2, "nothing to change");
    store.run("disk edit aa --on-full later").fails(2, "wait=10m");
    store.run("disk edit none --on-full wait").fails(3, "none");
    store.is_clean();
}
