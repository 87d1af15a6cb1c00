//! The server process: readiness, signals, sockets, cancellation, and real NBD clients on a real datastore.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::io::Read;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::Stdio;
use testkit::process;
use testkit::process::{Serving, Store, lamina, send, tool, until, wait, wait_until_interruptible};

#[test]
fn serve_accepts_clients_when_ready_and_removes_its_sockets_at_the_end() {
    let store = Store::new();
    let mut server = store.serve("");
    let socket = store.path().canonicalize().unwrap().join("nbd.sock");
    assert_eq!(server.ready, format!("ready: nbd+unix:///?socket={}", socket.display()));
    for name in ["control.sock", "nbd.sock"] {
        let mode = std::fs::metadata(store.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let status = store.run("status --json").json();
    assert_eq!(status["serving"]["pid"], server.pid());
    assert_eq!(server.stop("TERM"), Some(0));
    for name in ["control.sock", "nbd.sock"] {
        assert!(!store.path().join(name).exists(), "{name}");
    }
    assert_eq!(store.run("status --json").json()["serving"], Value::Null);
}

#[test]
fn readiness_is_reported_in_json_and_to_the_service_manager() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(process::PATIENCE)).unwrap();
    let mut command = lamina();
    command.arg("serve").arg(store.path()).args(["--json", "--tcp", "127.0.0.1:0", "--queue", "threads"]);
    command.env("NOTIFY_SOCKET", &path);
    let mut server = Serving::start(command);
    let ready: Value = serde_json::from_str(&server.ready).unwrap();
    assert_eq!((&ready["ready"], &ready["engine"]), (&true.into(), &"threads".into()));
    let tcp = ready["nbd"][1].as_str().unwrap();
    assert!(tcp.starts_with("nbd://127.0.0.1:") && !tcp.contains(":0/"), "the port that was chosen: {tcp}");
    let mut word = [0; 32];
    let length = manager.recv(&mut word).unwrap();
    assert_eq!(&word[..length], b"READY=1");
    assert_eq!(server.stop("INT"), Some(0));
    let length = manager.recv(&mut word).unwrap();
    assert_eq!(&word[..length], b"STOPPING=1");
}

#[test]
fn a_server_waits_for_an_owner_that_is_ending() {
    let store = Store::new();
    store.run("disk create vm1 1M").ok();
    for name in ["lock", "superblock"] {
        // A lock on the datastore without a server, as if the kernel had not yet closed the files of a killed server.
        let mut owner = std::process::Command::new("flock");
        let mut owner =
            owner.args(["-x", "--no-fork"]).arg(store.path().join(name)).args(["sleep", "2"]).spawn().unwrap();
        until("the lock is held", || {
            let probe =
                std::process::Command::new("flock").args(["-xn"]).arg(store.path().join(name)).arg("true").status();
            !probe.unwrap().success()
        });
        let begun = std::time::Instant::now();
        let mut server = store.serve("");
        assert!(begun.elapsed().as_millis() > 300, "{name}: the server waited");
        assert!(owner.wait().unwrap().success());
        // A second server does not wait for an owner that answers.
        let refused = || {
            let begun = std::time::Instant::now();
            store.run("serve").fails(4, "open in another process");
            begun.elapsed()
        };
        assert!((0..5).any(|_| refused().as_millis() < 2500), "{name}");
        // After the server is killed, the next one starts at once.
        server.kill();
        let mut server = store.serve("");
        assert_eq!(server.stop("TERM"), Some(0));
    }
    store.is_clean();
}

#[test]
fn a_second_server_on_a_datastore_is_refused() {
    let store = Store::new();
    let _server = store.serve("");
    store.run("serve").fails(4, "");
}

#[test]
fn a_new_server_replaces_the_sockets_of_a_killed_one() {
    let store = Store::new();
    for _ in 0..3 {
        let mut server = store.serve("");
        store.run("disk list").ok();
        assert_eq!(server.stop("KILL"), None);
        assert!(store.path().join("control.sock").exists(), "a killed server leaves its socket");
        store.run("disk list").ok();
    }
    assert!(!store.path().join("control.sock").exists(), "the next owner removed the socket");
    store.run("check").ok();
}

#[test]
fn a_socket_of_another_program_is_not_taken_for_a_server() {
    let store = Store::new();
    // The fake server closes each connection as soon as it has accepted it.
    let listener = UnixListener::bind(store.path().join("control.sock")).unwrap();
    let hangs_up = std::thread::spawn(move || drop(listener.accept()));
    store.run("disk list").fails(1, "broke");
    hangs_up.join().unwrap();
    // Nothing listens on the socket, so it is stale.
    store.run("disk list").ok();
}

#[test]
fn the_nbd_socket_cannot_have_the_path_of_the_control_socket() {
    let store = Store::new();
    let link = store.path().with_file_name("link");
    std::os::unix::fs::symlink(store.path(), &link).unwrap();
    for folder in [store.path(), link] {
        let socket = folder.join("control.sock");
        store.run(&format!("serve --socket {}", socket.display())).fails(2, "where commands reach the server");
    }
}

#[test]
fn tcp_beyond_loopback_needs_an_explicit_option() {
    let store = Store::new();
    let done = store.run("serve --tcp 0.0.0.0:0");
    assert_ne!(done.code, 0);
    assert!(done.stderr.lines().last().unwrap().starts_with("lamina: "), "{done:?}");
    let mut server = store.serve("--tcp 0.0.0.0:0 --insecure-tcp");
    assert_eq!(server.stop("TERM"), Some(0));
}

/// The greeting on a connection; empty if it was refused.
fn greeting(mut stream: impl Read) -> String {
    let mut greeting = [0; 8];
    match stream.read_exact(&mut greeting) {
        Ok(()) => String::from_utf8_lossy(&greeting).into_owned(),
        Err(_) => String::new(),
    }
}

#[test]
fn idle_tcp_connections_do_not_block_unix_clients() {
    let store = Store::new();
    let mut server = store.serve("--tcp 127.0.0.1:0 --json");
    let ready: Value = serde_json::from_str(&server.ready).unwrap();
    let address = ready["nbd"][1].as_str().unwrap().trim_start_matches("nbd://").trim_end_matches('/');
    let idle: Vec<TcpStream> = (0..260).map(|_| TcpStream::connect(address).unwrap()).collect();
    // The last connections exceed the limit for unauthenticated clients.
    assert_eq!(greeting(&idle[0]), "NBDMAGIC");
    assert_eq!(greeting(&idle[259]), "");
    for _ in 0..10 {
        let stream = UnixStream::connect(store.path().join("nbd.sock")).unwrap();
        assert_eq!(greeting(stream), "NBDMAGIC");
    }
    assert_eq!(server.stop("TERM"), Some(0));
}

#[test]
fn the_limit_of_256_clients_can_be_raised() {
    let store = Store::new();
    let mut server = store.serve("--max-unix-connections 300");
    let connect = || UnixStream::connect(store.path().join("nbd.sock")).unwrap();
    let clients: Vec<UnixStream> = (0..300).map(|_| connect()).collect();
    assert!(clients.iter().all(|client| greeting(client) == "NBDMAGIC"));
    assert_eq!(greeting(connect()), "");
    assert_eq!(server.stop("TERM"), Some(0));
}

#[test]
fn an_interrupted_command_is_undone_with_and_without_a_server() {
    let store = Store::new();
    for served in [false, true] {
        let mut server = served.then(|| store.serve(""));
        let mut command = store.command("disk create big 2G --provisioning eagerzeroedthick");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until_interruptible(child.id());
        send(child.id(), "INT");
        assert_eq!(wait(&mut child), Some(130), "served: {served}");
        let stderr = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert!(stderr.starts_with("lamina: "), "{stderr}");
        store.run("disk show big").fails(3, "big");
        if let Some(server) = &mut server {
            assert_eq!(server.stop("TERM"), Some(0));
        }
        store.run("check").ok();
    }
}

#[test]
fn a_killed_command_cancels_its_operation() {
    let store = Store::new();
    let mut server = store.serve("");
    let mut child = store
        .command("disk create big 2G --provisioning eagerzeroedthick")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until_interruptible(child.id());
    send(child.id(), "KILL");
    assert_eq!(wait(&mut child), None);
    until("the disk is removed", || store.run("disk show big").code == 3);
    assert_eq!(server.stop("TERM"), Some(0));
}

#[test]
fn data_is_correct_after_snapshots_diffs_and_reverts() {
    let store = Store::new();
    store.run("disk create vm1 64M").ok();
    let mut server = store.serve("");
    let uri = |name: &str| {
        let exports = store.run("export list --json").json();
        let exports = exports["exports"].as_array().unwrap().clone();
        let export = exports.iter().find(|e| e["name"] == name).unwrap_or_else(|| panic!("{name} in {exports:?}"));
        export["uris"][0].as_str().unwrap().to_string()
    };
    let io = |name: &str, command: &str| tool("qemu-io", &["-f", "raw", "-c", command, "-c", "flush", &uri(name)]);
    let reads = |name: &str, pattern: &str| {
        let text = tool("qemu-io", &["-r", "-f", "raw", "-c", &format!("read -P {pattern} 1M 64k"), &uri(name)]);
        assert!(!text.contains("Pattern verification failed"), "{name}: {text}");
    };
    io("vm1", "write -P 0x11 1M 64k");
    store.run("snapshot create vm1@a").ok();
    assert_eq!(store.run("snapshot diff vm1@a --json").json()["count"], 0);
    io("vm1", "write -P 0x22 1M 64k");
    let diff = store.run("snapshot diff vm1@a --json").json();
    assert_eq!((&diff["changed"], &diff["extents"][0]["offset"]), (&65536.into(), &(1 << 20).into()));
    store.run("clone vm1@a twin").ok();
    store.run("clone vm1 copy --full").ok();
    for (name, pattern) in [("vm1", "0x22"), ("vm1@a", "0x11"), ("twin", "0x11"), ("copy", "0x22")] {
        reads(name, pattern);
    }
    let listed = tool("nbdinfo", &["--list", "--json", &uri("vm1").replacen("/vm1", "/", 1)]);
    assert!(listed.contains("\"vm1@a\"") && listed.contains("\"twin\""), "{listed}");
    store.run("snapshot revert vm1@a").ok();
    reads("vm1", "0x11");
    store.run("disk resize vm1 128M").ok();
    assert_eq!(tool("nbdinfo", &["--size", &uri("vm1")]).trim(), (128u64 << 20).to_string());
    assert_eq!(server.stop("TERM"), Some(0));
    assert!(store.run("check --data").ok().ends_with("clean\n"));
}

#[test]
fn a_read_only_server_refuses_client_writes_and_executes_commands() {
    let store = Store::new();
    store.run("disk create vm1 1M").ok();
    let mut server = store.serve("--read-only");
    let exports = store.run("export list --json").json();
    assert_eq!(exports["exports"][0]["read_only"], true);
    let info = tool("nbdinfo", &["--json", exports["exports"][0]["uris"][0].as_str().unwrap()]);
    assert!(info.contains("\"is_read_only\": true"), "{info}");
    store.run("snapshot create vm1@a").ok();
    assert_eq!(server.stop("TERM"), Some(0));
}
