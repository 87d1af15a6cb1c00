//! Disks and machines are sent from one served datastore to another with the command line, with processes killed at
//! random times. An object arrives completely or not at all, and repeating the command resumes the transfer.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::nbd::Client;
use testkit::process;
use testkit::process::{Done, Serving, Store, tool, until};

const SIZE: u64 = 64 << 20;
const PIECE: u64 = 1 << 20;

/// The files of one self-signed certificate, which both sides use and which names this host.
struct Keys {
    folder: tempfile::TempDir,
}

impl Keys {
    fn new() -> Self {
        let keys = Self { folder: tempfile::tempdir().unwrap() };
        let (key, certificate) = (keys.path("key"), keys.path("certificate"));
        let names = "subjectAltName=DNS:localhost,IP:127.0.0.1";
        let kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-x509"];
        let extensions = ["-addext", names, "-addext", "basicConstraints=critical,CA:FALSE"];
        let files = ["-subj", "/CN=lamina", "-keyout", &key, "-out", &certificate];
        tool("openssl", &[&["req"], &kind[..], &extensions[..], &files[..]].concat());
        keys
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn receive(&self, port: u16) -> String {
        let (key, certificate) = (self.path("key"), self.path("certificate"));
        format!(
            "--json --receive 127.0.0.1:{port} --receive-from localhost --tls-cert {certificate} --tls-key {key} \
             --tls-client-ca {certificate}"
        )
    }

    fn send(&self) -> String {
        let (key, certificate) = (self.path("key"), self.path("certificate"));
        format!("--tls-ca {certificate} --tls-cert {certificate} --tls-key {key}")
    }
}

/// The address at which a server receives disks.
fn address(server: &Serving) -> String {
    let ready: Value = serde_json::from_str(&server.ready).unwrap();
    ready["receive"].as_str().unwrap().to_owned()
}

fn port(address: &str) -> u16 {
    address.trim_end_matches('/').rsplit(':').next().unwrap().parse().unwrap()
}

fn fill(store: &Store, disk: &str, seed: u64, pieces: impl IntoIterator<Item = u64>) {
    let mut client = Client::connect(&store.socket(), disk).unwrap();
    let mut random = Random(seed);
    for piece in pieces {
        let mut bytes = Vec::with_capacity(PIECE as usize);
        while bytes.len() < PIECE as usize {
            bytes.extend_from_slice(&random.next().to_le_bytes());
        }
        client.write(piece * PIECE, &bytes).unwrap();
    }
    client.flush().unwrap();
}

fn disks(store: &Store) -> Vec<String> {
    let list = store.run("--json disk list").json();
    list["disks"].as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn disks_are_sent_and_sent_again() {
    let (keys, here, there) = (Keys::new(), Store::new(), Store::new());
    let grace = Duration::from_secs(10);
    let (_here, _there) = (here.serve(""), there.serve(&format!("{} --client-grace 10", keys.receive(0))));
    let to = address(&_there);
    let status = there.run("--json status").json();
    assert_eq!(format!("lamina://{}/", status["serving"]["receive"].as_str().unwrap()), to);
    here.run(&format!("disk create web {SIZE}")).ok();
    fill(&here, "web", 1, 0..40);
    let send = |source: &str, target: &str, more: &str| -> Done {
        here.run(&format!("--json disk send {source} {to}{target} {} {more}", keys.send()))
    };
    // Without `--incremental`: no snapshot is left on either side.
    let sent = send("web", "copy", "--streams 2").json();
    assert_eq!((sent["data"].as_u64(), sent["capacity"].as_u64()), (Some(40 * PIECE), Some(SIZE)));
    assert!(there.content("copy") == here.content("web"));
    for (store, disk) in [(&here, "web"), (&there, "copy")] {
        assert_eq!(store.run(&format!("--json snapshot list {disk}")).json()["snapshots"], serde_json::json!([]));
    }
    // Repeated incremental transfers, based on snapshots that both sides have.
    for (round, changed) in [(0u64, 40), (1, 3), (2, 1)] {
        fill(&here, "web", 10 + round, 50 + round..50 + round + if round == 0 { 0 } else { changed });
        let sent = send("web", "mirror", "--incremental").json();
        assert_eq!(sent["data"].as_u64(), Some(changed * PIECE), "{sent}");
        assert_eq!(sent["incremental"].as_u64(), Some(u64::from(round > 0)));
        assert!(there.content("mirror") == here.content("web"));
    }
    let kept = here.run("--json snapshot list web").json()["snapshots"].as_array().unwrap().len();
    assert_eq!(kept, 1, "only the newest snapshot is needed for the next transfer");
    // The name of a second copy begins with that of the first one: each transfer keeps the snapshot of the other copy.
    for (round, target) in [(0u64, "mirror-2"), (1, "mirror"), (2, "mirror-2")] {
        fill(&here, "web", 20 + round, 60..61);
        send("web", target, "--incremental").json();
        assert!(there.content(target) == here.content("web"));
    }
    // Sends a snapshot that exists already.
    here.run("snapshot create web@monday").ok();
    let sent = send("web@monday", "weekly", "--incremental").json();
    assert_eq!((sent["data"].as_u64(), sent["incremental"].as_u64()), (Some(0), Some(1)));
    assert!(there.content("weekly@monday") == here.content("web@monday"));
    let said = here.run(&format!("disk send web@monday {to}other {}", keys.send())).ok();
    assert!(said.starts_with("sent other: "), "{said}");
    // Each of these transfers is refused.
    send("web@monday", "weekly", "").fails(1, "there is a disk 'weekly' already");
    send("nothing", "x", "").fails(3, "nothing");
    // A client that may still reconnect expects an unchanged disk, so the sender waits until the time for reconnecting
    // is over.
    let client = Client::connect(&there.socket(), "mirror").unwrap();
    let begin = Instant::now();
    client.vanish();
    until("the connection has ended", || there.run("disk list").ok().contains("lost"));
    assert_eq!(send("web", "mirror", "--incremental").json()["incremental"], 1);
    assert!(begin.elapsed() >= grace, "it was sent before the grace was over");
    send("web", "a@b", "").fails(2, "lamina://HOST:PORT/NAME");
    here.run(&format!("disk send web {to}x")).fails(2, "--tls-ca");
    there.run(&format!("serve {}", keys.receive(0).replace("--tls-client-ca", "--socket"))).fails(2, "tls-client-ca");
    assert_eq!(there.run("--json receive list").json()["receptions"], serde_json::json!([]));
    there.run("receive delete x").fails(3, "receive list");
    there.run("check --data").ok();
}

/// Starts a command that sends.
fn start(mut command: Command) -> std::process::Child {
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_kill_of_sender_or_receiver_leaves_a_complete_disk_or_none() {
    let (keys, here, there) = (Keys::new(), Store::new(), Store::new());
    let mut random = Random(0x5e4d);
    // The grace time for reconnecting is zero, because otherwise a client that disconnected just before the kill would
    // delay this test.
    let receive = |port: u16| format!("{} --client-grace 0", keys.receive(port));
    let (mut mine, mut theirs) = (here.serve(""), there.serve(&receive(0)));
    let to = address(&theirs);
    let receive = receive(port(&to));
    here.run(&format!("disk create web {SIZE}")).ok();
    fill(&here, "web", 1, 0..56);
    here.run("snapshot create web@s0").ok();
    let (mut goal, mut resumed) = (0, 0);
    let command = |goal: u64| {
        // The rate is low enough for an interruption, and high enough for the transfer to complete.
        let rate = if goal == 0 { "40M" } else { "12M" };
        here.command(&format!("--json disk send web@s{goal} {to}web --incremental --rate {rate} {}", keys.send()))
    };
    let whole = |goal: u64| {
        let expected = here.content(&format!("web@s{goal}"));
        there.content("web") == expected && there.content(&format!("web@s{goal}")) == expected
    };
    for round in 0..12u64 {
        let mut child = start(command(goal));
        std::thread::sleep(Duration::from_millis(100 + random.next() % 900));
        match round % 3 {
            0 => theirs.kill(),
            1 => mine.kill(),
            _ => child.kill().unwrap(),
        }
        match round % 3 {
            0 => {
                theirs = there.serve(&receive);
                // In most rounds the sender reconnects by itself; in some rounds it is killed.
                if random.next().is_multiple_of(2) {
                    child.kill().unwrap();
                }
            }
            1 => mine = here.serve(""),
            _ => {}
        }
        child.wait().unwrap();
        // The disk has its old or its new state, completely.
        let there_now = disks(&there);
        match goal {
            0 if there_now.is_empty() => {}
            _ => {
                assert_eq!(there_now, ["web"]);
                assert!(whole(goal) || goal > 0 && whole(goal - 1), "round {round}, goal {goal}");
            }
        }
        let done = there_now == ["web"] && whole(goal);
        if !done && round % 4 == 3 {
            // The session of the earlier command may not have ended yet.
            let mut sent = None;
            until("it is sent", || {
                let outcome: Done = process::output(&mut command(goal)).into();
                sent = serde_json::from_str::<Value>(&outcome.stdout).ok();
                sent.is_some()
            });
            resumed += sent.unwrap()["resumed"].as_u64().unwrap();
            assert!(whole(goal), "round {round}");
        }
        if done || round % 4 == 3 {
            goal += 1;
            fill(&here, "web", 100 + round, 10 * (goal % 3)..10 * (goal % 3) + 16);
            here.run(&format!("snapshot create web@s{goal}")).ok();
        }
    }
    assert!(goal >= 3 && resumed > 0, "{goal} sent, {resumed} bytes of them found there");
    drop((mine, theirs));
    here.is_clean();
    there.is_clean();
}

#[test]
fn a_machine_is_received_with_all_its_disks_or_not_at_all() {
    let (keys, here, there) = (Keys::new(), Store::new(), Store::new());
    let mut random = Random(77);
    let (_mine, mut theirs) = (here.serve(""), there.serve(&keys.receive(0)));
    let to = address(&theirs);
    let receive = keys.receive(port(&to));
    here.run(&format!("disk create web {SIZE}")).ok();
    here.run(&format!("disk create data {SIZE}")).ok();
    fill(&here, "web", 1, 0..12);
    fill(&here, "data", 2, 5..20);
    here.run("vm create web --disk web,data").ok();
    let command = |name: &str| {
        here.command(&format!("--json vm clone web --to {to}{name} --incremental --rate 24M {}", keys.send()))
    };
    let machines = || -> Vec<String> {
        // `vm list` logs a warning when it removes an incomplete machine.
        let list = there.run("--json --log error vm list").json();
        list["machines"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    let mut kills = 0;
    for number in 0..8 {
        let name = format!("copy{number}");
        let mut child = start(command(&name));
        std::thread::sleep(Duration::from_millis(50 + random.next() % 1500));
        theirs.kill();
        kills += 1;
        theirs = there.serve(&receive);
        if number % 2 == 0 {
            child.kill().unwrap();
        }
        child.wait().unwrap();
        // `vm list` completes or removes the machine that a killed command was creating.
        let (is_machine, disks) = (machines().contains(&name), disks(&there));
        let has = |disk: &str| disks.iter().any(|known| known == disk);
        assert_eq!((has(&name), has(&format!("{name}-2"))), (is_machine, is_machine), "{name}: {disks:?}");
        if !is_machine {
            let outcome: Done = process::output(&mut command(&name)).into();
            outcome.json();
        }
        assert!(there.content(&name) == here.content("web"));
        assert!(there.content(&format!("{name}-2")) == here.content("data"));
        assert!(machines().contains(&name));
    }
    assert_eq!(kills, 8);
    // The copy has its own identity, and the second transfer sent only differences.
    let shown = |store: &Store, name: &str| store.run(&format!("--json vm show {name}")).json();
    let (parent, copy) = (shown(&here, "web"), shown(&there, "copy7"));
    assert_ne!(parent["uuid"], copy["uuid"]);
    fill(&here, "web", 9, 40..42);
    let outcome: Done = process::output(&mut command("last")).into();
    let sent = outcome.json();
    assert_eq!(sent["incremental"], 2, "{sent}");
    // Also the first transfer to a new name sends only differences, because both sides have snapshots of transfers to
    // other names.
    assert!(sent["data"].as_u64().unwrap() <= 2 * PIECE, "{sent}");
    let outcome: Done = process::output(&mut command("last")).into();
    outcome.fails(1, "there is a machine 'last' already");
    // As if the sender had been killed after the receiver had completed the machine.
    for disk in ["web", "data"] {
        here.run(&format!("snapshot create {disk}@sending-last-0123abcd")).ok();
    }
    let repeated = here.run(&format!("--json vm clone web --to {to}last {}", keys.send()));
    repeated.fails(1, "'lamina snapshot delete' deletes them: web@sending-last-0123abcd, data@sending-last-0123abcd");
    drop(theirs);
    there.is_clean();
}

/// A command about machines of the receiver was killed after it had recorded its intent, and before it created a disk.
#[test]
fn a_received_disk_is_not_deleted_with_the_rest_of_an_interrupted_command() {
    let (keys, here, there) = (Keys::new(), Store::new(), Store::new());
    let (_mine, theirs) = (here.serve(""), there.serve(&keys.receive(0)));
    let to = address(&theirs);
    there.run("vm list").ok();
    let machines = there.path().join("machines");
    let left = machines.join(".new-00000001");
    std::fs::create_dir_all(left.join("web")).unwrap();
    std::fs::write(machines.join(".lock"), "").unwrap();
    let intent = "version = 1\nbegun = 1\n[[machine]]\nname = \"web\"\n[[machine.disk]]\nname = \"web\"\n";
    std::fs::write(left.join("intent.toml"), intent).unwrap();
    here.run(&format!("disk create web {SIZE}")).ok();
    fill(&here, "web", 1, 0..2);
    here.run(&format!("--json disk send web {to}web {}", keys.send())).json();
    assert!(!left.exists(), "the next command about machines would delete the disk");
    there.run("vm list").ok();
    assert!(there.content("web") == here.content("web"));
}
