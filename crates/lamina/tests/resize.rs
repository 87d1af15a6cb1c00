//! Disks that grow while QEMU uses them: which options clients that reconnect need, and that lamina's own machines need
//! no further option. Every test runs with each QEMU of [`generations`].

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use testkit::fleet::Fleet;
use testkit::nbd::{Client, Failure};
use testkit::process::{Store, until, wait};
use testkit::{fleet, nbd, newest, pattern, process};

const MIB: u64 = 1 << 20;

/// The QEMUs to test: the installed one, and the newest one in Debian.
fn generations() -> Vec<PathBuf> {
    vec!["qemu-system-x86_64".into(), newest::newest().join("bin/qemu-system-x86_64")]
}

/// A connection to QEMU's monitor.
struct Monitor {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Monitor {
    fn connect(path: &Path) -> Self {
        until("QEMU listens", || UnixStream::connect(path).is_ok());
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(process::PATIENCE)).unwrap();
        let mut monitor = Self { lines: BufReader::new(stream.try_clone().unwrap()), stream };
        monitor.execute("qmp_capabilities", json!({})).unwrap();
        monitor
    }

    /// Executes a command; returns its result or the error.
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let request = json!({ "execute": command, "arguments": arguments });
        self.stream.write_all(format!("{request}\n").as_bytes()).unwrap();
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "QEMU is gone");
            let answer: Value = serde_json::from_str(&line).unwrap();
            if let Some(error) = answer.get("error") {
                return Err(error["desc"].as_str().unwrap().to_owned());
            }
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
        }
    }

    fn size(&mut self, node: &str) -> u64 {
        let nodes = self.execute("query-named-block-nodes", json!({ "flat": true })).unwrap();
        let node = nodes.as_array().unwrap().iter().find(|one| one["node-name"] == node).unwrap().clone();
        node["image"]["virtual-size"].as_u64().unwrap()
    }

    /// Makes QEMU read, so that QEMU detects that its connection has ended.
    fn read(&mut self, node: &str) {
        let line = format!("qemu-io {node} \"read -q 0 512\"");
        self.execute("human-monitor-command", json!({ "command-line": line })).unwrap();
    }
}

/// A QEMU process without a guest (`-machine none`). It uses a disk of the datastore.
struct Qemu {
    child: Child,
    folder: tempfile::TempDir,
}

impl Qemu {
    fn start(program: &Path, store: &Store, export: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let node = json!({
            "driver": "nbd", "node-name": "disk0", "export": export, "reconnect-delay": 300,
            "server": { "type": "unix", "path": store.socket() },
        });
        let mut command = Command::new(program);
        command.args(["-machine", "none", "-nodefaults", "-display", "none", "-S", "-blockdev", &node.to_string()]);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", folder.path().join("qmp").display()));
        Self { child: command.stdout(Stdio::null()).spawn().unwrap(), folder }
    }

    fn monitor(&self) -> Monitor {
        Monitor::connect(&self.folder.path().join("qmp"))
    }

    /// The socket on which QEMU itself exports the disk during [`Qemu::load`].
    fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd")
    }

    /// Writes through QEMU until `stop` is set: to several locations concurrently, and to each location repeatedly,
    /// each time after the previous write was answered. Returns the last value of each location.
    fn load(&self, stop: &AtomicBool) -> Vec<u8> {
        const PLACES: u64 = 16;
        let mut client = Client::connect(&self.socket(), "disk0").unwrap();
        let mut generation = vec![0u8; PLACES as usize];
        while !stop.load(Ordering::Relaxed) {
            for (place, last) in (0..).zip(&mut generation) {
                // The value is never 0, because a location that was not written has 0.
                *last = *last % u8::MAX + 1;
                let data = vec![*last; 64 << 10];
                client.submit(nbd::Command::Write { offset: place * MIB, data: &data, fua: false }).unwrap();
            }
            for _ in 0..PLACES {
                let (_, outcome) = client.complete().unwrap();
                outcome.unwrap();
            }
        }
        generation
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn qemu_gets_the_new_size_by_reconnecting_and_loses_no_write() {
    for program in generations() {
        let store = Store::new();
        store.run("disk create vm1 64M").ok();
        let mut server = store.serve("");
        let mut qemu = Qemu::start(&program, &store, "vm1");
        let mut monitor = qemu.monitor();
        assert_eq!(monitor.size("disk0"), 64 * MIB);

        let own = json!({ "addr": { "type": "unix", "data": { "path": qemu.socket() } } });
        monitor.execute("nbd-server-start", own).unwrap();
        let export = json!({ "type": "nbd", "id": "load", "node-name": "disk0", "writable": true });
        monitor.execute("block-export-add", export).unwrap();
        let stop = AtomicBool::new(false);
        let written = std::thread::scope(|scope| {
            let load = scope.spawn(|| qemu.load(&stop));
            for size in [65, 66, 67, 96] {
                let done = store.run(&format!("disk resize vm1 {size}M --reconnect-clients --json")).json();
                assert_eq!((&done["reconnected"], &done["capacity"]), (&json!(1), &json!(size * MIB)), "{done}");
                until("QEMU has reconnected", || store.run("disk show vm1 --json").json()["clients"] == 1);
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
            stop.store(true, Ordering::Relaxed);
            load.join().unwrap()
        });
        assert!(written.iter().all(|generation| *generation > 0), "{written:?}");
        monitor.execute("nbd-server-stop", json!({})).unwrap();
        until("QEMU no longer exports the disk", || {
            monitor.execute("query-block-exports", json!({})).unwrap().as_array().unwrap().is_empty()
        });
        monitor.execute("block_resize", json!({ "node-name": "disk0", "size": 96 * MIB })).unwrap();
        assert_eq!(monitor.size("disk0"), 96 * MIB, "{}", program.display());

        // Without `--reconnect`, connected clients keep the old size, and the command reports them.
        let done = store.run("disk resize vm1 128M").ok();
        assert!(
            done.contains(&format!("process {}", qemu.child.id())) && done.contains("--reconnect-clients"),
            "{done}"
        );
        monitor.read("disk0");
        let refused = monitor.execute("block_resize", json!({ "node-name": "disk0", "size": 128 * MIB }));
        assert!(refused.is_err(), "block_resize succeeded before the reconnection: {refused:?}");
        store.run("disk resize vm1 128M --reconnect-clients").ok();
        monitor.read("disk0");
        monitor.execute("block_resize", json!({ "node-name": "disk0", "size": 128 * MIB })).unwrap();
        let users = store.run("disk show vm1 --json").json()["users"].clone();
        assert_eq!(
            (users.as_array().unwrap().len(), &users[0]["grace"]),
            (1, &Value::Null),
            "the client has reconnected: {users}"
        );

        monitor.execute("quit", json!({})).unwrap();
        wait(&mut qemu.child);
        until("QEMU has closed the disk", || store.run("disk show vm1 --json").json()["users"] == json!([]));
        let mut client = Client::connect(&store.socket(), "vm1").unwrap();
        for (place, generation) in (0..).zip(written) {
            assert!(client.read(place * MIB, 64 << 10).unwrap() == vec![generation; 64 << 10], "place {place}");
        }
        drop(client);
        assert_eq!(server.stop("TERM"), Some(0));
        store.is_clean();
    }
}

#[test]
fn requests_in_flight_are_answered_before_the_connection_ends() {
    let store = Store::new();
    store.run("disk create vm1 64M").ok();
    let _server = store.serve("");
    let mut client = Client::connect(&store.socket(), "vm1").unwrap();
    let data = pattern::bytes(3, 4 << 20);
    client.write(0, &data).unwrap();
    // This client does not read its replies yet. Another client must not be affected by that.
    let asked: Vec<u64> =
        (0..4).map(|_| client.submit(nbd::Command::Read { offset: 0, length: 4 << 20 }).unwrap()).collect();
    let mut other = Client::connect(&store.socket(), "vm1").unwrap();
    assert_eq!(other.size, 64 * MIB);
    let resizing = std::thread::scope(|scope| {
        let resizing = scope.spawn(|| store.run("disk resize vm1 128M --reconnect-clients --json").json());
        for cookie in asked {
            let (answered, outcome) = match client.complete() {
                Ok(answer) => answer,
                // The server had not begun the request when the connection ended.
                Err(Failure::Gone(_)) => break,
                Err(error) => panic!("{error:?}"),
            };
            assert_eq!(answered, cookie);
            assert!(outcome.unwrap() == data);
        }
        resizing.join().unwrap()
    });
    assert_eq!(resizing["reconnected"], 2);
    assert!(matches!(other.read(0, 512), Err(Failure::Gone(_))), "its connection has ended");
    let again = Client::connect(&store.socket(), "vm1").unwrap();
    assert_eq!(again.size, 128 * MIB);
}

#[test]
fn a_running_machine_sees_its_disk_grow() {
    for program in generations() {
        let fleet = Fleet::new();
        let qemu = format!("--qemu {}", program.display());
        fleet.make("web", "64M");
        fleet.store.run("disk create more --size 32M").ok();
        fleet.run("delete web --keep-disks").ok();
        fleet.run(&format!("create web --disk web,more --memory {} --network none {qemu}", fleet::MEMORY)).ok();
        // A stopped machine needs no notification.
        assert_eq!(fleet.store.run("disk resize more 48M").ok(), "disk more has 48 MiB now\n");
        fleet.run(&format!("start web {qemu}")).ok();
        // A backup client that reads the disk keeps its connection.
        let mut backup = Client::connect(&fleet.store.socket(), "more").unwrap();
        let done = fleet.store.run("disk resize more 96M").ok();
        assert!(done.contains("machine web sees the new size"), "{done}");
        assert!(
            done.contains(&format!("process {} ", std::process::id())),
            "the backup program keeps the old size: {done}"
        );
        backup.read(0, 512).unwrap();
        drop(backup);
        let done = fleet.store.run("disk resize web 128M --json").json();
        assert_eq!((&done["machine"], &done["machine_sees_it"]), (&json!("web"), &json!(true)), "{done}");
        // The machine is paused, and the resize is repeated.
        fleet.run("pause web").ok();
        fleet.store.run("disk resize web 160M").ok();
        fleet.store.run("disk resize web 160M").ok();
        fleet.run("resume web").ok();
        let mut monitor = Monitor::connect(Path::new(fleet.show("web")["monitor"].as_str().unwrap()));
        assert_eq!((monitor.size("disk8"), monitor.size("disk9")), (160 * MIB, 96 * MIB), "{}", program.display());
        drop(monitor);
        let users = fleet.store.run("disk show web --json").json()["users"].clone();
        assert!(users.as_array().unwrap().iter().all(|user| user["grace"].is_null()), "{users}");
        fleet.run("stop web --force").ok();
        fleet.run("delete web").ok();
    }
}
