//! The control server with a simulated datastore, with correct clients and with malicious ones.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::message::{DiskRequest, SnapshotRequest};
use crate::socket::client::Client;
use disk::ChangedExtent;
use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

/// Carries out a request on the simulated datastore.
fn play(request: Request, watch: &dyn Watch) -> Result<Reply> {
    match request {
        Request::Disk(DiskRequest::List) => Ok(Reply::Disks(Vec::new())),
        Request::Disk(DiskRequest::Show { name }) => Err(Error::new(ErrorKind::NotFound, format!("no disk '{name}'"))),
        // Runs until cancelled.
        Request::Disk(DiskRequest::Detach { .. }) => loop {
            watch.update(7, 10);
            if watch.cancelled() {
                return Err(Error::new(ErrorKind::Interrupted, "stopped"));
            }
            thread::sleep(Duration::from_millis(1));
        },
        Request::Snapshot(SnapshotRequest::Diff { .. }) => {
            let extent = |offset| ChangedExtent { offset, length: 1, zero: false };
            for batch in 0..100u64 {
                watch.part(Part::Extents((0..100).map(|i| extent(batch * 100 + i)).collect()))?;
            }
            Ok(Reply::Diff { extents: 10_000, bytes: 10_000 })
        }
        _ => panic!("a bug in the engine"),
    }
}

/// A server, with its socket in a temporary folder.
struct World {
    folder: tempfile::TempDir,
    server: Option<Server>,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(&folder.path().into(), None, Box::new(play)).unwrap();
        Self { folder, server: Some(server) }
    }

    fn stream(&self) -> UnixStream {
        crate::socket::connect(&self.folder.path().into()).unwrap().unwrap()
    }

    fn client(&self) -> Client {
        Client::new(self.stream()).unwrap()
    }

    fn stop(&mut self) {
        self.server.take().unwrap().stop();
    }
}

/// Progress of a request in a test.
#[derive(Default)]
struct Notes {
    cancelled: AtomicBool,
    cancel_on_progress: bool,
    progress: AtomicUsize,
    offsets: Mutex<Vec<u64>>,
}

impl Progress for Notes {
    fn update(&self, done: u64, total: u64) {
        assert_eq!((done, total), (7, 10));
        self.progress.fetch_add(1, Ordering::Relaxed);
        self.cancelled.fetch_or(self.cancel_on_progress, Ordering::Relaxed);
    }
    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

impl Watch for Notes {
    fn part(&self, part: Part) -> Result<()> {
        let Part::Extents(batch) = part else { panic!("{part:?} is not a part of a diff") };
        self.offsets.lock().extend(batch.iter().map(|e| e.offset));
        Ok(())
    }
}

fn detach() -> Request {
    Request::Disk(DiskRequest::Detach { name: "a".into() })
}

#[test]
fn each_request_on_one_connection_gets_its_own_reply() {
    let mut world = World::new();
    let mut client = world.client();
    let notes = Notes::default();
    for _ in 0..100 {
        assert_eq!(client.ask(Request::Disk(DiskRequest::List), &notes).unwrap(), Reply::Disks(Vec::new()));
        let error = client.ask(Request::Disk(DiskRequest::Show { name: "vm9".into() }), &notes).unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::NotFound, "no disk 'vm9'"));
    }
    world.stop();
}

#[test]
fn a_diff_arrives_completely_and_in_order() {
    let mut world = World::new();
    let notes = Notes::default();
    let request =
        Request::Snapshot(SnapshotRequest::Diff { disk: "a".into(), from: disk::Point::Head, to: disk::Point::Head });
    assert!(matches!(world.client().ask(request, &notes).unwrap(), Reply::Diff { extents: 10_000, .. }));
    assert!(notes.offsets.lock().iter().copied().eq(0..10_000));
    world.stop();
}

#[test]
fn progress_is_reported_and_cancel_ends_the_request() {
    let mut world = World::new();
    let notes = Notes { cancel_on_progress: true, ..Notes::default() };
    let mut client = world.client();
    assert_eq!(client.ask(detach(), &notes).unwrap_err().kind(), ErrorKind::Interrupted);
    assert!(notes.progress.load(Ordering::Relaxed) > 0);
    assert!(client.ask(Request::Disk(DiskRequest::List), &Notes::default()).is_ok(), "the connection is still good");
    world.stop();
}

#[test]
fn a_cancellation_that_arrives_together_with_its_request_is_not_lost() {
    let mut world = World::new();
    let mut stream = world.stream();
    let lines =
        [FromClient::Request(detach()), FromClient::Cancel].map(|line| encode(&line, REQUEST_LINE_MAX).unwrap());
    // Half a line after the two does not make the server wait for its rest.
    stream.write_all(&[&lines.concat()[..], b"{"].concat()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    for line in BufReader::new(&stream).lines() {
        match decode(line.unwrap().as_bytes()).unwrap() {
            FromServer::Progress(_) => {}
            FromServer::Error(failure) => {
                assert_eq!(Error::from(failure).kind(), ErrorKind::Interrupted);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    drop(stream);
    world.stop();
}

#[test]
fn a_disconnect_cancels_the_requests_of_the_client() {
    let mut world = World::new();
    let mut stream = world.stream();
    stream.write_all(&encode(&FromClient::Request(detach()), REQUEST_LINE_MAX).unwrap()).unwrap();
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    drop(stream);
    // If the request were still running, `stop` would wait for GRACE and log a cancellation.
    let begin = Instant::now();
    world.stop();
    assert!(begin.elapsed() < GRACE);
}

#[test]
fn stopping_cancels_slow_requests_and_reports_that() {
    let mut world = World::new();
    let mut client = world.client();
    let notes = Arc::new(Notes::default());
    let seen = Arc::clone(&notes);
    let worker = thread::spawn(move || client.ask(detach(), &*seen));
    // A request that has not begun would get no reply.
    while notes.progress.load(Ordering::Relaxed) == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    world.stop();
    assert_eq!(worker.join().unwrap().unwrap_err().kind(), ErrorKind::Interrupted);
}

#[test]
fn a_panic_in_a_request_ends_only_that_request() {
    let mut world = World::new();
    let mut client = world.client();
    assert_eq!(client.ask(Request::Status, &Notes::default()).unwrap_err().kind(), ErrorKind::Stopped);
    assert!(client.ask(Request::Disk(DiskRequest::List), &Notes::default()).is_ok());
    world.stop();
}

#[test]
fn invalid_lines_get_one_error_and_close_the_connection() {
    let mut world = World::new();
    for (line, word) in [
        (b"hello\n".to_vec(), "malformed"),
        (b"{\"version\":99,\"message\":\"cancel\"}\n".to_vec(), "protocol 99"),
        (b"\xff\n".to_vec(), "malformed"),
        ([vec![b'x'; REQUEST_LINE_MAX + 1], vec![b'\n']].concat(), "at most"),
    ] {
        let mut stream = world.stream();
        // The server may close the connection before it has received all of an overlong line.
        let _ = stream.write_all(&line);
        let mut answers = BufReader::new(stream);
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        assert!(answer.contains("\"error\"") && answer.contains(word), "{answer}");
        let mut rest = Vec::new();
        // If the server closes a socket with unread bytes, the client sees a reset instead of the end of the stream.
        let _ = answers.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
    assert!(
        world.client().ask(Request::Disk(DiskRequest::List), &Notes::default()).is_ok(),
        "other sessions are not affected"
    );
    world.stop();
}

#[test]
fn long_incomplete_lines_do_not_add_up() {
    let mut world = World::new();
    let half = vec![b'x'; REQUEST_LINE_MAX - (1 << 20)];
    let stall = || {
        let mut stream = world.stream();
        stream.write_all(&half).map(|()| stream)
    };
    let held = [stall().unwrap(), stall().unwrap()];
    let mut third = world.stream();
    // The server may close the connection before it has received everything.
    let _ = third.write_all(&half);
    let mut answer = String::new();
    BufReader::new(third).read_line(&mut answer).unwrap();
    assert!(answer.contains("\"error\"") && answer.contains("try again"), "{answer}");
    assert!(world.client().ask(Request::Disk(DiskRequest::List), &Notes::default()).is_ok(), "a short request");
    drop(held);
    world.stop();
}

#[test]
fn a_connection_beyond_the_limit_gets_an_error() {
    let mut world = World::new();
    let mut held: Vec<Client> = (0..CONNECTIONS_MAX).map(|_| world.client()).collect();
    for client in &mut held {
        assert!(client.ask(Request::Disk(DiskRequest::List), &Notes::default()).is_ok());
    }
    assert_eq!(
        world.client().ask(Request::Disk(DiskRequest::List), &Notes::default()).unwrap_err().kind(),
        ErrorKind::Busy
    );
    drop(held);
    world.stop();
}

#[test]
fn random_bytes_of_one_client_do_not_affect_others() {
    let mut world = World::new();
    let mut state = 1u64;
    for _ in 0..200 {
        let bytes: Vec<u8> = (0..64)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        let mut stream = world.stream();
        let _ = stream.write_all(&bytes);
        let _ = stream.write_all(b"\n");
    }
    // Until their threads have ended, the connections count.
    while world.server.as_ref().unwrap().0.connections() > 0 {
        thread::sleep(Duration::from_millis(1));
    }
    assert!(world.client().ask(Request::Disk(DiskRequest::List), &Notes::default()).is_ok());
    world.stop();
}
