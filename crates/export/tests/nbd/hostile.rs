//! Clients that violate the protocol or stall, and other clients that must not be affected.

use crate::in_process::{Script, encode, opening};
use crate::memory_disk::{MemoryDisk, Shelf};
use crate::{Folder, Running};
use connections::transport::{Transport, Wait};
use connections::{Limits, Listen, Peer, TlsConfig};
use error::ErrorKind;
use export::clients::Clients;
use export::nbd::{Server, ServerConfig, Terms, Turns, serve};
use parking_lot::Mutex;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use testkit::protocol::*;

const CAPACITY: u64 = 64 << 20;

fn start(config: ServerConfig) -> (Running, Arc<MemoryDisk>) {
    let disk = MemoryDisk::new("vm", CAPACITY, 5);
    (Running::with(config, Shelf::of(&[&disk])), disk)
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < Duration::from_secs(20), "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How long a test waits for the server: many times the server's timeouts, because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_handshake_past_its_deadline_is_ended_even_if_bytes_arrive() {
    let config = ServerConfig { handshake_timeout: Duration::from_millis(400), ..ServerConfig::default() };
    let (running, _disk) = start(config);
    let silent = UnixStream::connect(&running.socket).unwrap();
    let mut dripping = UnixStream::connect(&running.socket).unwrap();
    let begun = Instant::now();
    dripping.write_all(&3u32.to_be_bytes()).unwrap();
    // An option of unlimited length, sent one byte at a time.
    while dripping.write_all(b"I").is_ok() {
        assert!(begun.elapsed() < PATIENCE, "the client that sends single bytes was never disconnected");
        std::thread::sleep(Duration::from_millis(20));
        if begun.elapsed() < Duration::from_millis(20) {
            dripping.write_all(b"HAVEOPT\0\0\0\x03\0\0\xff\xff").unwrap();
        }
    }
    // A client that sends complete options and never chooses an export.
    let mut busy = Client::unix(&running.socket);
    busy.greet(3);
    let begun = Instant::now();
    let cut = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        while begun.elapsed() < PATIENCE {
            busy.option(OPT_LIST, &[]);
        }
    }));
    assert!(cut.is_err(), "the busy client was never disconnected");
    eventually("all handshakes end", || running.server.connections() == 0);
    drop(silent);
}

#[test]
fn unread_replies_take_bounded_memory_and_delay_no_other_client() {
    let (running, disk) = start(ServerConfig::default());
    let mut owner = Client::open(&running.socket, "vm", Mode::Structured);
    for at in (0..CAPACITY).step_by(32 << 20) {
        owner.write(at, &vec![7; 32 << 20]);
    }
    drop(owner);
    for settled in [false, true] {
        if settled {
            disk.settle();
        }
        let before = resident_bytes();
        let mut rude: Vec<Client> = Vec::new();
        for _ in 0..4 {
            let mut client = Client::open(&running.socket, "vm", Mode::Structured);
            let mut batch = Vec::new();
            for n in 0..1000 {
                batch.extend(client.encode(CMD_READ, 0, (n % 60) << 20, 4 << 20, &[]).1);
            }
            client.stream.write_all(&batch).unwrap();
            rude.push(client);
        }
        // Another client is served meanwhile.
        let mut polite = Client::open(&running.socket, "vm", Mode::Simple);
        for n in 0..200 {
            let begun = Instant::now();
            assert_eq!(polite.read(n * 4096, 4096), [7; 4096]);
            assert!(begun.elapsed() < Duration::from_secs(20), "a polite client waited {:?}", begun.elapsed());
        }
        // Requests of clients that do not read their replies hold neither guards of read plans (which keep file
        // locations valid) nor memory of the device.
        eventually("guards are returned", || Arc::strong_count(&disk.guards) == 1);
        eventually("memory is returned", || disk.lent() == 0);
        // Each such client may occupy 48 MiB and one request. The 4,000 requests of 4 MiB would need 16 GB.
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown < 400 << 20, "four clients that read no replies hold {} MiB", grown >> 20);
        // When one of these clients starts reading, it receives all its replies.
        let mut reformed = rude.pop().unwrap();
        for _ in 0..50 {
            let (_, reply) = reformed.receive();
            assert!(reply.error == 0 && reply.data.iter().all(|byte| *byte == 7));
        }
    }
    eventually("they are gone", || running.server.connections() == 0);
}

#[test]
fn requests_sent_without_reading_replies_are_all_answered() {
    let (running, _disk) = start(ServerConfig::default());
    let mut client = Client::open(&running.socket, "vm", Mode::Simple);
    let mut batch = Vec::new();
    for n in 0..3000 {
        batch.extend(client.encode(CMD_READ, 0, n * 4096, 4096, &[]).1);
    }
    let mut writer = UnixStream::connect(&running.socket).unwrap();
    drop(writer.write_all(&[0]));
    client.stream.write_all(&batch).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    for _ in 0..3000 {
        assert_eq!(client.receive().1.error, 0);
    }
    client.leave();
}

#[test]
fn replies_before_a_disconnect_arrive_although_the_client_sends_more() {
    let listen = vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())];
    let (running, _disk) = start(ServerConfig { listen, ..ServerConfig::default() });
    let clients = [Client::unix(&running.socket), Client::tcp(running.tcp_address())];
    for mut client in clients {
        client.greet(3);
        assert_eq!(client.go("vm"), REP_ACK);
        let mut batch = Vec::new();
        for n in 0..16 {
            batch.extend(client.encode(CMD_READ, 0, n << 14, 16 << 10, &[]).1);
        }
        batch.extend(client.encode(CMD_DISC, 0, 0, 0, &[]).1);
        client.stream.write_all(&batch).unwrap();
        // After a pause, the client sends bytes after its disconnect request, as it does with the close notification of
        // TLS.
        std::thread::sleep(Duration::from_millis(20));
        let _ = client.stream.write_all(&[0; 64]);
        std::thread::sleep(Duration::from_millis(100));
        for _ in 0..16 {
            assert_eq!(client.receive().1.data.len(), 16 << 10);
        }
        let mut rest = Vec::new();
        assert_eq!(client.stream.read_to_end(&mut rest).unwrap(), 0);
    }
}

#[test]
fn a_closed_connection_ends_although_its_client_sends_more() {
    let (running, _disk) = start(ServerConfig::default());
    let mut client = Client::open(&running.socket, "vm", Mode::Simple);
    let (_, bytes) = client.encode(CMD_DISC, 0, 0, 0, &[]);
    client.stream.write_all(&bytes).unwrap();
    let begun = Instant::now();
    while client.stream.write_all(&[0; 4096]).is_ok() {
        assert!(begun.elapsed() < PATIENCE, "never cut off");
    }
    eventually("the connection ends", || running.server.connections() == 0);
}

#[test]
fn the_number_of_requests_under_way_is_limited() {
    let (running, disk) = start(ServerConfig::default());
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    client.write(0, &vec![3; 4 << 20]);
    disk.settle();
    disk.slow(Duration::from_millis(3));
    let batch: Vec<u8> = (0..1000).flat_map(|n| client.encode(CMD_READ, 0, n * 4096, 512, &[]).1).collect();
    client.stream.write_all(&batch).unwrap();
    let mut most = 0;
    for _ in 0..1000 {
        assert_eq!(client.receive().1.data, [3; 512]);
        most = most.max(Arc::strong_count(&disk.guards) - 1);
    }
    assert!((16..=128).contains(&most), "{most} reads under way at once");
}

#[test]
fn violations_in_transmission_close_only_that_connection() {
    let (running, _disk) = start(ServerConfig::default());
    let mut bystander = Client::open(&running.socket, "vm", Mode::Simple);
    for mode in [Mode::Simple, Mode::Extended] {
        let mut client = Client::open(&running.socket, "vm", mode);
        client.stream.write_all(&[0x25; 40]).unwrap();
        assert!(client.at_end(), "bad magic");
        let mut client = Client::open(&running.socket, "vm", mode);
        let (_, head) = client.encode(CMD_WRITE, 0, 0, (32 << 20) + 1, &[]);
        client.stream.write_all(&head).unwrap();
        assert!(client.at_end(), "oversize payload");
    }
    let mut client = Client::open(&running.socket, "vm", Mode::Extended);
    let (_, head) = client.encode(CMD_STATUS, PAYLOAD, 0, u64::MAX, &[]);
    client.stream.write_all(&head).unwrap();
    assert!(client.at_end(), "a payload of 16 EiB");
    assert_eq!(bystander.read(0, 512), vec![0; 512]);
}

#[test]
fn a_write_with_incomplete_payload_has_no_effect() {
    let (running, _disk) = start(ServerConfig::default());
    for length in [4096, 65536, 8 << 20] {
        let mut client = Client::open(&running.socket, "vm", Mode::Simple);
        let payload = vec![9; length];
        let (_, bytes) = client.encode(CMD_WRITE, 0, 0, length as u64, &payload);
        client.stream.write_all(&bytes[..bytes.len() - 1]).unwrap();
        drop(client);
        eventually("the connection ends", || running.server.connections() == 0);
        let mut client = Client::open(&running.socket, "vm", Mode::Simple);
        assert_eq!(client.read(0, 4096), vec![0; 4096]);
        drop(client);
        eventually("the connection ends", || running.server.connections() == 0);
    }
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let (running, _disk) = start(ServerConfig { limits: Limits::each(3), ..ServerConfig::default() });
    let held: Vec<Client> = (0..3).map(|_| Client::open(&running.socket, "vm", Mode::Simple)).collect();
    let mut fourth = UnixStream::connect(&running.socket).unwrap();
    assert_eq!(fourth.read(&mut [0; 18]).unwrap(), 0, "closed without a greeting");
    drop(held);
    eventually("the limit of connections is free again", || running.server.connections() == 0);
    Client::open(&running.socket, "vm", Mode::Simple).leave();
}

#[test]
fn stopping_finishes_requests_and_closes_slow_connections() {
    let (running, disk) = start(ServerConfig { stop_grace: Duration::from_millis(700), ..ServerConfig::default() });
    let mut busy = Client::open(&running.socket, "vm", Mode::Structured);
    busy.write(0, &vec![8; 1 << 20]);
    disk.settle();
    disk.slow(Duration::from_millis(150));
    let idle = Client::open(&running.socket, "vm", Mode::Structured);
    let mut handshaking = UnixStream::connect(&running.socket).unwrap();
    let mut deaf = Client::open(&running.socket, "vm", Mode::Structured);
    let mut batch = Vec::new();
    for _ in 0..100 {
        batch.extend(deaf.encode(CMD_READ, DF, 8 << 20, 1 << 20, &[]).1);
    }
    deaf.stream.write_all(&batch).unwrap();
    for n in 0..4 {
        busy.send(CMD_READ, 0, n * 4096, 4096, &[]);
    }
    std::thread::sleep(Duration::from_millis(60));
    let begun = Instant::now();
    let answers = std::thread::spawn(move || {
        let first = busy.receive().1;
        (first.error, first.data == [8; 4096])
    });
    running.server.stop();
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(600) && took < Duration::from_secs(4), "stopping took {took:?}");
    assert_eq!(running.server.connections(), 0);
    assert_eq!(answers.join().unwrap(), (0, true), "requests in flight are answered");
    assert!(UnixStream::connect(&running.socket).is_err());
    assert!(!running.socket.exists(), "the socket file is removed");
    let mut rest = Vec::new();
    let _ = handshaking.read_to_end(&mut rest);
    drop(idle);
    running.server.stop();
}

#[test]
fn stopping_without_requests_under_way_is_quick() {
    let (running, _disk) = start(ServerConfig::default());
    let clients: Vec<Client> = (0..5).map(|_| Client::open(&running.socket, "vm", Mode::Simple)).collect();
    let begun = Instant::now();
    running.server.stop();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    drop(clients);
}

#[test]
fn sockets_have_the_given_mode_and_are_replaced_after_a_crash() {
    let folder = Folder::new();
    let path = folder.0.join("s");
    let shelf = Shelf::of(&[&MemoryDisk::new("vm", 4096, 1)]);
    let config = |mode| ServerConfig {
        listen: vec![Listen::Unix { path: path.clone(), mode, group: None }],
        ..ServerConfig::default()
    };
    let server = Server::start(config(0o660), shelf.clone()).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
    let Err(error) = Server::start(config(0o600), shelf.clone()) else { panic!("two servers on one socket") };
    assert_eq!(error.kind(), ErrorKind::Busy);
    drop(server);
    // The socket file of a killed server is replaced, but any other file is not.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let server = Server::start(config(0o600), shelf.clone()).unwrap();
    Client::open(&path, "vm", Mode::Simple).leave();
    drop(server);
    std::fs::write(&path, b"precious").unwrap();
    assert!(Server::start(config(0o600), shelf.clone()).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let long = ServerConfig {
        listen: vec![Listen::Unix { path: folder.0.join("x".repeat(200)), mode: 0o600, group: None }],
        ..ServerConfig::default()
    };
    assert_eq!(Server::start(long, shelf).err().unwrap().kind(), ErrorKind::Invalid);
}

#[test]
fn tcp_is_limited_to_loopback_unless_authenticated_or_allowed() {
    let shelf = Shelf::of(&[&MemoryDisk::new("vm", 4096, 1)]);
    let config =
        |address: &str| ServerConfig { listen: vec![Listen::Tcp(address.parse().unwrap())], ..ServerConfig::default() };
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "[::ffff:192.0.2.1]:0"] {
        let error = Server::start(config(address), shelf.clone()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("there is no TLS, so anyone on the network could read"), "{error}");
    }
    for address in ["127.0.0.1:0", "127.3.2.1:0"] {
        assert!(Server::start(config(address), shelf.clone()).is_ok());
    }
    let insecure = ServerConfig { allow_insecure_tcp: true, ..config("0.0.0.0:0") };
    assert!(Server::start(insecure, shelf.clone()).is_ok());
    let missing = TlsConfig {
        certificate: "/nonexistent/cert.pem".into(),
        key: "/nonexistent/key.pem".into(),
        client_authorities: None,
        required: true,
    };
    let error =
        Server::start(ServerConfig { tls: Some(missing), ..config("127.0.0.1:0") }, shelf.clone()).err().unwrap();
    assert!(error.to_string().contains("/nonexistent/cert.pem"), "{error}");
    assert!(Server::start(ServerConfig::default(), shelf).is_err(), "nowhere to listen");
}

/// A transport that records how many threads serve sessions whenever the server waits for its client.
struct Counted {
    script: Script,
    turns: Arc<Turns>,
    counts: Arc<Mutex<Vec<usize>>>,
}

impl Transport for Counted {
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], wait: Wait) -> io::Result<usize> {
        self.counts.lock().push(self.turns.count());
        self.script.receive(into, wait)
    }
    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.script.send(slices)
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_client_that_has_not_chosen_an_export_changes_nothing_for_the_threads_of_sessions() {
    let shelf = Shelf::of(&[&MemoryDisk::new("vm", CAPACITY, 5)]);
    let terms = Terms::default();
    let counts = |batches: Vec<Vec<u8>>| {
        let counts = Arc::<Mutex<Vec<usize>>>::default();
        let transport =
            Counted { script: Script::new(batches, 0), turns: Arc::clone(&terms.turns), counts: Arc::clone(&counts) };
        let _ = serve(Box::new(transport), &*shelf, &terms, &mut Clients::default().arrive(Peer::Unknown));
        assert_eq!(terms.turns.count(), 0, "it has ended");
        std::mem::take(&mut *counts.lock())
    };
    // The client sends half of an option, and closes the connection.
    let counted = counts(vec![opening(Mode::Simple, &[])[..12].to_vec()]);
    assert!(counted.len() >= 2 && counted.iter().all(|count| *count == 0), "{counted:?}");
    let disconnect = encode(Mode::Simple, CMD_DISC, 0, 1, 0, 0, &[]);
    let counted = counts(vec![opening(Mode::Simple, &[]), disconnect]);
    assert_eq!((counted.first(), counted.last()), (Some(&0), Some(&1)), "{counted:?}");
}
