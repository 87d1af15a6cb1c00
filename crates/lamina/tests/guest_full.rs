//! A real guest on a disk for which there is no space any more. With the policy `wait`, the guest's writes wait, and
//! complete without intervention when there is space. With the policy `error` and QEMU's `werror=stop`, QEMU pauses the
//! guest, and repeats the writes when the guest is resumed. In both cases the guest sees no error, and loses nothing.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use testkit::guest::Guest;
use testkit::mounted::{make_room, on_tmpfs, take_the_rest};
use testkit::nbd::Client;
use testkit::process::{PATIENCE, Store, tool, until};

/// Rounds of the guest before the file system becomes full, of 32. Each round writes 1 MiB.
const ROUNDS: usize = 4;
/// How long the guest is observed while there is no space.
const OBSERVED: Duration = Duration::from_secs(3);

#[test]
fn a_guest_waits_for_space_and_goes_on_by_itself() {
    // The guest is built before the test runs in a namespace.
    testkit::machines::guest();
    on_tmpfs("a_guest_waits_for_space_and_goes_on_by_itself", 128, |folder| {
        waits(folder, "native");
        waits(folder, "vmdk");
    });
}

#[test]
fn a_guest_is_paused_without_space_and_resumed() {
    testkit::machines::guest();
    on_tmpfs("a_guest_is_paused_without_space_and_resumed", 128, paused);
}

/// A served datastore with one disk, and a guest that writes to it.
fn boot(folder: &Path, disk: &str, device: &str, monitor: Option<&Path>) -> (Store, testkit::process::Serving, Guest) {
    let store = Store::at(folder, "4M");
    store.run(&format!("disk create vm1 128M {disk}")).ok();
    let server = store.serve("");
    let blockdev = format!(
        "driver=nbd,node-name=disk0,export=vm1,server.type=unix,server.path={},discard=unmap",
        store.socket().display()
    );
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(monitor.iter().flat_map(|path| ["-qmp".into(), format!("unix:{},server=on,wait=off", path.display())]));
    let mut guest = Guest::boot(qemu, &blockdev, device, "fills");
    guest.reach(ROUNDS, disk);
    take_the_rest(folder, "filler");
    (store, server, guest)
}

/// Checks on the host that the guest's file system is clean, and the datastore too.
fn check(folder: &Path, store: &Store, mut server: testkit::process::Serving) {
    let image = folder.join("image");
    tool("nbdcopy", &[&store.uri("vm1"), image.to_str().unwrap()]);
    tool("e2fsck", &["-fn", image.to_str().unwrap()]);
    std::fs::remove_file(image).unwrap();
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

fn waits(folder: &Path, format: &str) {
    let disk = format!("--format {format} --on-full wait");
    let (store, server, mut guest) = boot(folder, &disk, "virtio-blk-pci,drive=disk0", None);
    let waiting = || store.run("status --json").json()["waiting"].as_array().unwrap().clone();
    until("the guest's writes wait for space", || !waiting().is_empty());
    std::thread::sleep(OBSERVED);
    // The guest receives no error and does not end, and other clients can read the disk.
    let stuck = guest.round();
    assert!((ROUNDS..32).contains(&stuck), "{stuck}");
    assert_eq!(waiting().len(), 1);
    Client::connect(&store.socket(), "vm1").unwrap().read(0, 1 << 20).unwrap();
    make_room(folder, "filler");
    guest.reach(stuck + 1, format);
    guest.end(format);
    assert_eq!(waiting(), Vec::<Value>::new());
    assert!(server.log().contains("no write waits for space any more"));
    check(folder, &store, server);
}

/// A connection to QEMU's monitor.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut monitor = Self(BufReader::new(stream));
        monitor.ask("qmp_capabilities");
        monitor
    }

    fn ask(&mut self, command: &str) -> Value {
        let line = json!({ "execute": command, "id": 7 }).to_string();
        self.0.get_mut().write_all(line.as_bytes()).unwrap();
        loop {
            let mut answer = String::new();
            self.0.read_line(&mut answer).unwrap();
            let answer: Value = serde_json::from_str(&answer).unwrap();
            if answer["id"] == 7 {
                return answer["return"].clone();
            }
        }
    }
}

fn paused(folder: &Path) {
    let sockets = tempfile::tempdir().unwrap();
    let path = sockets.path().join("monitor");
    let device = "virtio-blk-pci,drive=disk0,werror=stop";
    let (store, server, mut guest) = boot(folder, "--on-full error", device, Some(&path));
    let mut monitor = Monitor::connect(&path);
    until("QEMU has paused the guest", || monitor.ask("query-status")["status"] == "io-error");
    let stuck = guest.round();
    make_room(folder, "filler");
    std::thread::sleep(OBSERVED);
    assert_eq!(guest.round(), stuck, "a paused guest does not go on by itself");
    monitor.ask("cont");
    guest.reach(stuck + 1, "werror=stop");
    guest.end("werror=stop");
    check(folder, &store, server);
}
