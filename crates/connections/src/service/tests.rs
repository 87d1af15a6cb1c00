//! A service with a minimal protocol: limits, refusals, and all ways to stop the service.
#![allow(clippy::unwrap_used)]

use super::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;

/// Longer than any step takes on a busy machine, and shorter than the time limit of a test.
const PATIENCE: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(50);

/// Responds to each byte: to `e` by returning it, to `a` by authenticating the client, to a digit by authenticating the
/// client as the holder with this name, to `p` with a panic, to `w` by writing until the client has read everything, to
/// `h` by working until the connection has to end, to `s` by waiting until the client has closed its side and all
/// others have settled. Other bytes end the connection.
#[derive(Default)]
struct Small {
    working: AtomicUsize,
    finished: AtomicUsize,
    accepting_tcp: AtomicUsize,
}

fn send(mut connection: &Connection, bytes: &[u8]) -> bool {
    connection.write_all(bytes).is_ok()
}

impl Protocol for Small {
    fn serve(&self, connection: &Arc<Connection>) {
        let mut byte = [0];
        while matches!((&**connection).read(&mut byte), Ok(1)) {
            let go_on = match byte[0] {
                b'e' => send(connection, &byte),
                b'a' => connection.authenticate(None).is_ok() && send(connection, &byte),
                b'0'..=b'9' => connection.authenticate(Some(&byte[..])).is_ok() && send(connection, &byte),
                b'p' => panic!("a fault in the protocol"),
                b'w' => {
                    self.working.fetch_add(1, Ordering::SeqCst);
                    send(connection, &vec![0; 64 << 20])
                }
                b'h' => {
                    self.working.fetch_add(1, Ordering::SeqCst);
                    while !connection.ends() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    self.finished.fetch_add(1, Ordering::SeqCst);
                    send(connection, b"h")
                }
                b's' => {
                    while !connection.peer_has_gone() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    connection.others_settled(MOMENT) && send(connection, &byte)
                }
                _ => false,
            };
            if !go_on {
                break;
            }
        }
        connection.close();
    }

    fn begins_accepting_tcp(&self) {
        self.accepting_tcp.fetch_add(1, Ordering::SeqCst);
    }

    fn refuse(&self, socket: &OwnedFd, why: Refusal) {
        let text: &[u8] = match why {
            Refusal::Full(..) => b"full",
            Refusal::Share(..) => b"share",
            Refusal::Stopping => b"stopping",
        };
        let _ = rustix::io::write(socket, text);
    }
}

struct World {
    _folder: tempfile::TempDir,
    path: PathBuf,
    protocol: Arc<Small>,
    service: Service,
}

const QUICK: Drain = Drain { undisturbed: Duration::ZERO, finish: PATIENCE, cut: Some(PATIENCE) };

fn start(limits: Limits, drain: Drain) -> World {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let protocol = Arc::new(Small::default());
    let config = ServiceConfig {
        name: "small",
        listen: vec![
            Listen::Unix { path: path.clone(), mode: 0o600, group: None },
            Listen::Tcp("127.0.0.1:0".parse().unwrap()),
        ],
        access: Access::LOCAL,
        limits,
        drain,
    };
    let service = Service::start(config, Arc::clone(&protocol) as Arc<dyn Protocol>).unwrap();
    World { _folder: folder, path, protocol, service }
}

/// A connected client.
trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

impl World {
    fn unix(&self) -> Box<dyn Stream> {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Box::new(stream)
    }

    fn tcp(&self) -> Box<dyn Stream> {
        let Address::Tcp(address) = self.service.addresses()[1] else { panic!("TCP is the second address") };
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Box::new(stream)
    }

    fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !condition(self) {
            assert!(begin.elapsed() < PATIENCE, "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn working(&self, number: usize) {
        self.until("requests begin", |world| world.protocol.working.load(Ordering::SeqCst) == number);
    }
}

/// Sends a byte; returns whether the client is served.
fn ask(stream: &mut dyn Stream, byte: u8) -> bool {
    let mut answer = [0];
    stream.write_all(&[byte]).is_ok() && stream.read_exact(&mut answer).is_ok() && answer[0] == byte
}

fn rest(stream: &mut dyn Stream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn each_class_of_connections_has_its_own_limit() {
    let world = start(Limits { unix: 3, authenticated: 1, unauthenticated: 2 }, QUICK);
    let mut tcp: Vec<_> = (0..2).map(|_| world.tcp()).collect();
    assert!(tcp.iter_mut().all(|stream| ask(stream, b'e')));
    assert_eq!(rest(&mut world.tcp()), "full");
    let mut unix: Vec<_> = (0..3).map(|_| world.unix()).collect();
    assert!(
        unix.iter_mut().all(|stream| ask(stream, b'e')),
        "TCP clients do not prevent clients of the unix socket from connecting"
    );
    assert_eq!(rest(&mut world.unix()), "full");
    // An authenticated client no longer counts as unauthenticated, so another client can connect. A client beyond the
    // limit of authenticated clients is refused.
    assert!(ask(&mut tcp[0], b'a') && ask(&mut tcp[0], b'a'));
    tcp.push(world.tcp());
    assert!(ask(&mut tcp[2], b'e'));
    assert_eq!(rest(&mut world.tcp()), "full");
    assert!(!ask(&mut tcp[1], b'a'), "the limit of authenticated clients is one");
    // A connection that has ended no longer counts, in either class.
    drop((unix.remove(0), tcp.remove(0)));
    world.until("connections end", |world| world.service.connections() == 3);
    assert!(ask(&mut world.unix(), b'e'));
    assert!(ask(&mut tcp[1], b'a'), "the closed connection does not count any more");
    world.until("two unix clients and one TCP client remain", |world| world.service.connections() == 3);
}

#[test]
fn one_name_does_not_use_up_the_connections_of_others() {
    let world = start(Limits { authenticated: 8, ..Limits::each(32) }, QUICK);
    let enter = |name: u8| {
        let mut stream = world.tcp();
        ask(&mut stream, name).then_some(stream)
    };
    let enters = |name: u8| (0..8).filter_map(|_| enter(name)).collect::<Vec<_>>();
    let mut first = enters(b'1');
    let others = [enters(b'2'), enters(b'3'), enters(b'4')];
    assert_eq!((first.len(), others.each_ref().map(Vec::len)), (4, [2, 1, 1]));
    assert!(enter(b'5').is_none(), "all connections are in use");
    // A connection that becomes free goes to a name that has none, not to the name that has the most.
    world.until("refused connections end", |world| world.service.connections() == 8);
    drop(first.pop());
    world.until("a connection ends", |world| world.service.connections() == 7);
    assert!(enter(b'1').is_none());
    assert!(enter(b'5').is_some());
    assert!(first.iter_mut().all(|stream| ask(stream, b'e')));
}

#[test]
fn one_user_does_not_use_up_the_connections_of_others() {
    let world = start(Limits { unix: 8, ..Limits::each(32) }, QUICK);
    let shared = &world.service.shared;
    let own = geteuid().as_raw();
    let enter = |user: u32| {
        let (socket, client) = UnixStream::pair().unwrap();
        let entry = shared.enter(socket.into(), Peer::Process { pid: 1, user }, Class::Unix);
        entry.map(|entry| (entry, client)).map_err(|(_, why)| why)
    };
    let enters = |user: u32| (0..8).map_while(|_| enter(user).ok()).collect::<Vec<_>>();
    let mut first = enters(own + 1);
    // The next one is refused before its handshake begins.
    assert_eq!(enter(own + 1).err(), Some(Refusal::Share(4)));
    let others = [enters(own + 2), enters(own + 3)];
    assert_eq!((first.len(), others.each_ref().map(Vec::len)), (4, [2, 1]));
    // The connection that is left goes to a user who has none. Root and the user of the server get any.
    let last = enter(own).unwrap();
    assert_eq!(enter(own + 4).err(), Some(Refusal::Full(Class::Unix, 8)));
    drop((last, first.pop()));
    assert_eq!(enter(own + 1).err(), Some(Refusal::Share(3)));
    let privileged = [enter(own).unwrap(), enter(0).unwrap()];
    drop(privileged);
    assert!(enter(own + 4).is_ok());
}

#[test]
fn idle_connections_of_one_class_do_not_block_another_class() {
    let world = start(Limits::each(256), QUICK);
    let idle: Vec<_> = (0..260).map(|_| world.tcp()).collect();
    world.until("all connections are in use", |world| world.service.connections() == 256);
    assert!(ask(&mut world.unix(), b'e'));
    drop(idle);
    world.until("connections are available", |world| world.service.connections() == 0);
    assert!(ask(&mut world.tcp(), b'e'));
}

#[test]
fn tcp_clients_are_refused_at_a_bounded_rate() {
    let world = start(Limits { unauthenticated: 1, ..Limits::each(8) }, QUICK);
    let mut held = world.tcp();
    assert!(ask(&mut *held, b'e'));
    let began = Instant::now();
    for _ in 0..30 {
        assert_eq!(rest(&mut *world.tcp()), "full");
    }
    assert!(began.elapsed() >= REFUSAL_PAUSE * (30 / REFUSALS_AT_ONCE - 1), "{:?}", began.elapsed());
    assert!(began.elapsed() < REFUSAL_PAUSE * 29, "a pause after each refusal: {:?}", began.elapsed());
    assert_eq!(world.protocol.accepting_tcp.load(Ordering::SeqCst), 1, "one thread accepts TCP connections");
    assert!(ask(&mut *held, b'e') && ask(&mut *world.unix(), b'e'));
}

#[test]
fn a_connection_that_panics_no_longer_counts() {
    let world = start(Limits::each(1), QUICK);
    for _ in 0..3 {
        let mut stream = world.unix();
        assert!(ask(&mut stream, b'e'));
        assert!(!ask(&mut stream, b'p'));
        world.until("the connection is available", |world| world.service.connections() == 0);
    }
}

#[test]
fn requests_under_way_are_finished_and_answered() {
    let world = start(Limits::each(8), QUICK);
    let mut clients = [world.unix(), world.tcp()];
    for client in &mut clients {
        client.write_all(b"h").unwrap();
    }
    let idle = [world.unix(), world.tcp()];
    world.working(2);
    world.service.stop();
    assert_eq!(world.service.connections(), 0);
    assert_eq!(world.protocol.finished.load(Ordering::SeqCst), 2);
    for client in &mut clients {
        assert_eq!(rest(client), "h");
    }
    drop(idle);
    assert!(!world.path.exists(), "the socket file is removed");
    world.service.stop();
}

#[test]
fn sessions_are_asked_to_end_after_the_grace_period() {
    let world = start(Limits::each(8), Drain { undisturbed: MOMENT, ..QUICK });
    let mut client = world.unix();
    client.write_all(b"h").unwrap();
    world.working(1);
    let begin = Instant::now();
    world.service.stop();
    assert!(begin.elapsed() >= MOMENT);
    assert_eq!(rest(&mut client), "h");
}

#[test]
fn a_client_that_has_closed_its_side_does_not_wait_for_itself() {
    let world = start(Limits::each(8), QUICK);
    let ask = || {
        let mut stream = UnixStream::connect(&world.path).unwrap();
        stream.write_all(b"s").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        rest(&mut stream)
    };
    assert_eq!(ask(), "s");
    // Another connection whose client has disconnected is still in use.
    let mut other = world.unix();
    other.write_all(b"h").unwrap();
    world.working(1);
    drop(other);
    assert_eq!(ask(), "");
}

#[test]
fn a_client_that_reads_no_replies_is_disconnected() {
    for listen in [World::unix, World::tcp] {
        let world = start(Limits::each(8), Drain { undisturbed: Duration::ZERO, finish: MOMENT, cut: Some(PATIENCE) });
        let mut client = listen(&world);
        client.write_all(b"w").unwrap();
        world.working(1);
        let begin = Instant::now();
        world.service.stop();
        assert!(begin.elapsed() >= MOMENT && begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
        assert_eq!(world.service.connections(), 0);
    }
}

#[test]
fn stopping_does_not_wait_for_a_thread_that_hangs() {
    struct Hanging(AtomicBool);
    impl Protocol for Hanging {
        fn serve(&self, _connection: &Arc<Connection>) {
            while !self.0.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let protocol = Arc::new(Hanging(AtomicBool::new(false)));
    let config = ServiceConfig {
        name: "hanging",
        listen: vec![Listen::Owned { path: path.clone(), group: None }],
        access: Access::LOCAL,
        limits: Limits::each(1),
        drain: Drain { undisturbed: Duration::ZERO, finish: Duration::ZERO, cut: Some(MOMENT) },
    };
    let service = Service::start(config, Arc::clone(&protocol) as Arc<dyn Protocol>).unwrap();
    let _client = crate::listen::connect(&path).unwrap();
    while service.connections() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    service.stop();
    assert_eq!(service.connections(), 1);
    protocol.0.store(true, Ordering::SeqCst);
    assert!(service.shared.emptied(Some(PATIENCE)));
}

#[test]
fn stopping_while_clients_connect_serves_no_client_afterwards() {
    for _ in 0..8 {
        let world = start(Limits::each(64), QUICK);
        let stopped = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stopped.load(Ordering::SeqCst) {
                        let Ok(mut stream) = UnixStream::connect(&world.path) else { break };
                        stream.set_read_timeout(Some(PATIENCE)).unwrap();
                        let _ = stream.write_all(b"e");
                        let mut answer = [0; 16];
                        // The client is served, refused or cut, but never waits without end.
                        match stream.read(&mut answer) {
                            Ok(bytes) => assert!(matches!(&answer[..bytes], b"" | b"e" | b"full" | b"stopping")),
                            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5));
            world.service.stop();
            stopped.store(true, Ordering::SeqCst);
            assert_eq!(world.service.connections(), 0);
        });
        assert!(UnixStream::connect(&world.path).is_err());
    }
}

#[test]
fn clients_in_the_backlog_are_notified_that_the_service_stops() {
    let world = start(Limits::each(0), QUICK);
    // The register is locked, so that the accepting thread cannot reach the second connection before the service stops.
    let register = world.service.shared.register.lock();
    let first = UnixStream::connect(&world.path).unwrap();
    let mut second = UnixStream::connect(&world.path).unwrap();
    world.service.shared.stop.store(true, Ordering::SeqCst);
    drop(register);
    world.service.stop();
    assert_eq!(rest(&mut second), "stopping");
    drop(first);
}

#[test]
fn replies_arrive_although_the_client_still_sends_at_the_end() {
    let world = start(Limits::each(8), QUICK);
    for connect in [World::unix, World::tcp] {
        let mut client = connect(&world);
        client.write_all(b"eee.").unwrap();
        // After a pause, the client sends bytes after the end of the protocol, as it does with the close notification
        // of TLS.
        std::thread::sleep(MOMENT);
        // The server may have closed the connection already.
        let _ = client.write_all(&[b'e'; 64]);
        std::thread::sleep(MOMENT);
        assert_eq!(rest(&mut client), "eee");
        drop(client);
    }
    // The service does not wait long for a client that never closes its connection.
    let mut endless = world.unix();
    endless.write_all(b".").unwrap();
    let begin = Instant::now();
    while endless.write_all(b"e").is_ok() {
        assert!(begin.elapsed() < PATIENCE, "never reset");
    }
}

#[test]
fn a_failed_start_leaves_no_socket() {
    let folder = tempfile::tempdir().unwrap();
    let (good, bad) = (folder.path().join("good"), folder.path().join("bad"));
    std::fs::write(&bad, "mine").unwrap();
    let start = |listen| {
        let config =
            ServiceConfig { name: "small", listen, access: Access::LOCAL, limits: Limits::each(1), drain: QUICK };
        Service::start(config, Arc::new(Small::default())).err().unwrap()
    };
    let error = start([&good, &bad].map(|path| Listen::Unix { path: path.clone(), mode: 0o600, group: None }).into());
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    assert!(!good.exists() && bad.exists());
    assert_eq!(start(Vec::new()).kind(), ErrorKind::Invalid);
    let error = start(vec![Listen::Tcp("0.0.0.0:0".parse().unwrap())]);
    assert!(error.to_string().contains("there is no TLS"), "{error}");
}
