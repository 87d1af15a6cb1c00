//! Disks of disconnected clients that may reconnect, and of machines, are protected against accidental removal.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::process::{Child, Command, Stdio};
use testkit::nbd::Client;
use testkit::process::{Store, tool, until};

const FORMATS: [&str; 2] = ["native", "vmdk"];

/// A client that has an export open until it is killed.
struct QemuIo(Child);

impl QemuIo {
    fn open(store: &Store, export: &str) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", &store.uri(export)]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let client = Self(child);
        until("qemu-io has the disk open", || users(store, export).iter().any(|user| user["grace"].is_null()));
        client
    }

    /// The client's name in error messages.
    fn name(&self) -> String {
        format!("process {} of user ", self.0.id())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        self.kill();
    }
}

fn users(store: &Store, disk: &str) -> Vec<Value> {
    let shown = store.run(&format!("disk show {disk} --json")).json();
    shown["users"].as_array().unwrap().clone()
}

fn until_unused(store: &Store, disk: &str) {
    until("nothing has the disk open", || users(store, disk).is_empty());
}

/// Waits until the server has recorded the client of an export.
fn until_recorded(store: &Store, export: &str) {
    let record = store.path().join("clients");
    until("the client is recorded", || {
        std::fs::read_to_string(&record).is_ok_and(|text| text.contains(&format!("\"{export}\"")))
    });
}

#[test]
fn a_disk_stays_in_use_for_the_grace_time_after_a_client_is_killed() {
    for format in FORMATS {
        let store = Store::new();
        store.run(&format!("disk create vm1 16M --format {format}")).ok();
        let mut server = store.serve("");
        store.run("snapshot create vm1@a").ok();
        let mut client = QemuIo::open(&store, "vm1");
        store.run("disk delete vm1").fails(4, &client.name());
        store.run("disk delete vm1 --force").fails(4, "in use by 1 client");
        store.run("disk rename vm1 vm2").fails(4, "use --force to rename");
        client.kill();
        until("the connection has ended", || users(&store, "vm1").iter().all(|user| !user["grace"].is_null()));
        for verb in ["disk delete vm1", "disk rename vm1 vm2", "snapshot revert vm1@a"] {
            let refused = store.run(verb);
            assert!(refused.stderr.contains(&client.name()), "{verb}: {refused:?}");
            assert!(refused.stderr.contains("counts as in use for another "), "{verb}: {refused:?}");
            refused.fails(4, "--force");
        }
        let users = users(&store, "vm1");
        assert_eq!((users.len(), &users[0]["export"]), (1, &json!("vm1")));
        assert!((100..=120).contains(&users[0]["grace"].as_u64().unwrap()), "{users:?}");
        let shown = store.run("disk show vm1").ok();
        assert!(shown.contains(&client.name()) && shown.contains("lost the connection"), "{shown}");
        assert!(store.run("disk list").ok().contains("0 (+1 lost)"));
        // A snapshot that the client did not have open is not protected.
        store.run("snapshot create vm1@b").ok();
        store.run("snapshot delete vm1@b").ok();
        store.run("snapshot revert vm1@a --force").ok();
        store.run("disk rename vm1 vm2 --force").ok();
        assert_eq!(self::users(&store, "vm2").len(), 1, "the client is listed under the new name");
        store.run("disk delete vm2").fails(4, "may reconnect");
        store.run("disk delete vm2 --force").ok();
        assert_eq!(server.stop("TERM"), Some(0));
        assert!(!store.path().join("clients").exists(), "{format}: all clients are done");
        store.is_clean();
    }
}

#[test]
fn a_reader_of_a_snapshot_counts_for_that_snapshot() {
    let store = Store::new();
    store.run("disk create vm1 16M").ok();
    store.run("snapshot create vm1@a").ok();
    let _server = store.serve("");
    Client::connect(&store.socket(), "vm1@a").unwrap().vanish();
    until("the connection has ended", || users(&store, "vm1").iter().any(|user| !user["grace"].is_null()));
    assert!(store.run("disk list").ok().lines().all(|line| !line.contains("lost")));
    store.run("snapshot revert vm1@a").ok();
    store.run("snapshot delete vm1@a").fails(4, "use --force to delete the snapshot");
    store.run("disk delete vm1").fails(4, "may reconnect");
    store.run("snapshot delete vm1@a --force").ok();
    store.run("disk delete vm1").ok();
}

#[test]
fn the_grace_ends_and_a_disconnect_request_causes_none() {
    for format in FORMATS {
        let store = Store::new();
        store.run(&format!("disk create vm1 16M --format {format}")).ok();
        let _server = store.serve("--client-grace 10");
        tool("qemu-io", &["-f", "raw", "-c", "write 0 4k", &store.uri("vm1")]);
        until_unused(&store, "vm1");
        store.run("disk rename vm1 vm2").ok();
        Client::connect(&store.socket(), "vm2").unwrap().vanish();
        until("the connection has ended", || users(&store, "vm2").iter().any(|user| !user["grace"].is_null()));
        // The same client reconnects, and this time sends a disconnect request.
        drop(Client::connect(&store.socket(), "vm2").unwrap());
        until_unused(&store, "vm2");
        store.run("disk rename vm2 vm3").ok();
        Client::connect(&store.socket(), "vm3").unwrap().vanish();
        until("the grace is over", || store.run("disk delete vm3").code == 0);
    }
    let store = Store::new();
    store.run("disk create vm1 16M").ok();
    let _server = store.serve("--client-grace 0");
    Client::connect(&store.socket(), "vm1").unwrap().vanish();
    until_unused(&store, "vm1");
    store.run("disk delete vm1").ok();
}

#[test]
fn a_server_that_is_killed_or_stopped_leaves_its_clients_in_grace() {
    for (format, signal) in [("native", "KILL"), ("vmdk", "KILL"), ("native", "TERM")] {
        let store = Store::new();
        store.run(&format!("disk create vm1 16M --format {format}")).ok();
        let mut server = store.serve("");
        let client = Client::connect(&store.socket(), "vm1").unwrap();
        let name = format!("process {} of user ", std::process::id());
        until_recorded(&store, "vm1");
        server.stop(signal);
        // The deletion is refused by the command without a server, and by the next server.
        store.run("disk delete vm1").fails(4, &name);
        store.run("disk rename vm1 vm2").fails(4, "--force");
        let mut server = store.serve("");
        store.run("disk delete vm1").fails(4, &name);
        // The client reconnects, and then sends a disconnect request.
        drop(Client::connect(&store.socket(), "vm1").unwrap());
        until_unused(&store, "vm1");
        store.run("disk rename vm1 vm2").ok();
        drop(client);
        Client::connect(&store.socket(), "vm2").unwrap().vanish();
        until_recorded(&store, "vm2");
        assert_eq!(server.stop("KILL"), None);
        let _server = store.serve("--client-grace 3");
        until("the grace is over", || store.run("disk delete vm2").code == 0);
    }
}

#[test]
fn a_broken_record_of_clients_does_not_prevent_serving() {
    let store = Store::new();
    store.run("disk create vm1 16M").ok();
    // A folder with the name of the record's temporary file prevents the server from writing the record.
    let obstacle = store.path().join("clients.new");
    std::fs::create_dir(&obstacle).unwrap();
    let mut server = store.serve("");
    Client::connect(&store.socket(), "vm1").unwrap().vanish();
    until("the failure is logged", || server.log().contains("the connected clients are not recorded"));
    store.run("disk delete vm1").fails(4, "may reconnect");
    assert_eq!(server.stop("TERM"), Some(0));
    std::fs::remove_dir(&obstacle).unwrap();
    std::fs::write(store.path().join("clients"), "lamina clients 1 crc32c=00000000\n{}").unwrap();
    let done = store.run("disk show vm1");
    assert!(done.code == 0 && done.stderr.contains("clients of the last server are not known"), "{done:?}");
    let _server = store.serve("");
    store.run("disk delete vm1").ok();
}

#[test]
fn a_disk_of_a_machine_is_in_use_by_the_machine() {
    for format in FORMATS {
        let (store, other) = (Store::new(), Store::new());
        store.run(&format!("disk create data 16M --format {format}")).ok();
        store.run("snapshot create data@a").ok();
        let mut server = store.serve("");
        store.run("vm create web --memory 32M --network none --disk data").ok();
        for served in [true, false] {
            let migrate = format!("disk migrate data -d native --to {}", other.path().display());
            for verb in ["disk delete data", "disk rename data other", "snapshot revert data@a", migrate.as_str()] {
                let refused = store.run(verb);
                assert!(refused.stderr.contains("belongs to machine 'web'"), "{verb}, {served}: {refused:?}");
                assert!(refused.stderr.contains(": 'lamina vm "), "{verb}, {served}: {refused:?}");
                refused.fails(4, "--force");
            }
            assert_eq!(store.run("disk show data --json").json()["machine"], "web");
            store.run("snapshot revert data@a --force").ok();
            if served {
                assert_eq!(server.stop("TERM"), Some(0));
            }
        }
        let _server = store.serve("");
        store.run("vm delete web").ok();
        store.run("disk show data").fails(3, "data");
        store.run(&format!("disk create data 16M --format {format}")).ok();
        store.run("vm create web --memory 32M --network none --disk data").ok();
        store
            .run(&format!("disk migrate data -d native --provisioning zeroedthick --to {}", store.path().display()))
            .ok();
        store.run(&format!("disk migrate data -d native --force --to {}", other.path().display())).ok();
        other.run("disk show data").ok();
        store.run("disk show data").fails(3, "data");
        store.run("disk create data 16M").ok();
        store.run("disk delete data --force").ok();
    }
}

#[test]
fn after_a_rename_a_client_gets_no_other_disk_by_the_old_name() {
    let store = Store::new();
    store.run("disk create g 16M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "g").unwrap();
    store.run("disk rename g g2 --force").ok();
    store.run("disk create g 16M").ok();
    let done = store.run("disk resize g 32M --reconnect-clients --json").json();
    assert_eq!(done["reconnected"], 0, "{done}");
    client.write(0, &[7; 512]).unwrap();
    store.run("disk delete g2").fails(4, &format!("process {} of user ", std::process::id()));
    assert!(Client::connect(&store.socket(), "g").is_err());
    let done = store.run("disk resize g2 32M --reconnect-clients --json").json();
    assert_eq!(done["reconnected"], 1, "{done}");
    assert!(Client::connect(&store.socket(), "g").is_err(), "the client would write into another disk");
    assert!(users(&store, "g").is_empty());
    assert!(users(&store, "g2").iter().all(|user| !user["grace"].is_null()));
    store.run("disk delete g2").fails(4, "may reconnect");
    // Also after a restart, the server refuses clients that use the old name.
    assert_eq!(server.stop("TERM"), Some(0));
    let _server = store.serve("");
    assert!(Client::connect(&store.socket(), "g").is_err());
    store.run("disk delete g").ok();
    store.run("disk rename g2 g --force").ok();
    let mut client = Client::connect(&store.socket(), "g").unwrap();
    assert_eq!(client.read(0, 512).unwrap(), [7; 512]);
}

#[test]
fn a_server_that_cannot_start_leaves_the_record_of_clients() {
    let store = Store::new();
    store.run("disk create vm1 16M").ok();
    let mut server = store.serve("");
    let _client = Client::connect(&store.socket(), "vm1").unwrap();
    until_recorded(&store, "vm1");
    assert_eq!(server.stop("KILL"), None);
    let record = std::fs::read(store.path().join("clients")).unwrap();
    let failed = store.run("serve --socket /nowhere/nbd.sock");
    assert!(failed.code == 3 && failed.stderr.contains("/nowhere/nbd.sock"), "{failed:?}");
    assert!(std::fs::read(store.path().join("clients")).unwrap() == record);
}
