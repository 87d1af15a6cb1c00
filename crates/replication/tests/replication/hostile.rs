//! Peers that send wrong values, on either side: the session ends with a clear error, and neither side loses data.

use crate::site::{Keys, Random, Site, furnished, options, remote_at, same};
use connections::tls::CertificateName;
use connections::{TlsIdentity, TlsStream};
use disk::transfer::{NewArrival, SEGMENT, SnapshotIdentity};
use disk::{Datastore, NoProgress, Progress, Provisioning};
use error::{Error, ErrorKind};
use parking_lot::Mutex;
use replication::frame::{Head, Kind};
use replication::message::{Known, Message, Offer};
use replication::stream::Conversation;
use replication::{Attachments, Making, NoAttachments, Receiver, ReceiverConfig, send};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

type Line = Conversation<TlsStream>;

fn dial(keys: &Keys, receiver: &Receiver) -> Line {
    let mut line = silent(keys, receiver);
    line.tell(&Message::Hello { versions: vec![1], program: "a hostile peer".into() }).unwrap();
    assert!(matches!(line.hear().unwrap(), Message::Welcome { version: 1, .. }));
    line
}

/// A connection on which no message was sent.
fn silent(keys: &Keys, receiver: &Receiver) -> Line {
    let socket = TcpStream::connect(receiver.address()).unwrap();
    let identity = keys.client("client").load().unwrap();
    let stream =
        TlsStream::connect(Arc::new(socket.into()), &identity, &CertificateName::parse("127.0.0.1").unwrap()).unwrap();
    Conversation::new(stream, "the server".into())
}

fn arrival(name: &str, capacity: u64) -> NewArrival {
    NewArrival {
        name: name.into(),
        uuid: "0f0e0d0c-0b0a-4908-8706-050403020101".into(),
        capacity,
        provisioning: Provisioning::Thin,
        point: SnapshotIdentity {
            uuid: "0f0e0d0c-0b0a-4908-8706-050403020102".into(),
            name: "monday".into(),
            created: 1,
        },
        keep: true,
        bases: Vec::new(),
        update: false,
    }
}

fn offer(line: &mut Line, disk: NewArrival) -> Message {
    line.tell(&Message::Offer(Offer { disks: vec![disk], attachment: None, resume_only: false })).unwrap();
    line.hear().unwrap()
}

/// Opens a control connection, and a data connection of its session.
fn session(keys: &Keys, receiver: &Receiver) -> (Line, Line) {
    let mut control = dial(keys, receiver);
    let Message::Accept { session, token, .. } = offer(&mut control, arrival("case", 2 * SEGMENT + 4096)) else {
        panic!("an ordinary offer is accepted");
    };
    let mut data = dial(keys, receiver);
    data.tell(&Message::Join { session, token }).unwrap();
    assert_eq!(data.hear().unwrap(), Message::Joined);
    (control, data)
}

/// The reply on the control connection, after the receiver has processed everything that was sent on the data
/// connection.
fn outcome(control: &mut Line, data: &mut Line) -> Message {
    let _ = data.flush();
    // Waits for an error message or the end of the connection.
    let _ = data.hear();
    control.tell(&Message::Ping).unwrap();
    control.hear().unwrap()
}

#[test]
fn invalid_data_is_refused() {
    let (keys, there) = (Keys::new(), Site::new());
    let receiver = there.receiver(&keys);
    let block = Random(1).bytes(4096);
    let eight = |number: u64| number.to_le_bytes().to_vec();
    let frame = |kind, disk, offset, payload: &[u8]| (Head::of(kind, disk, offset, payload), payload.to_vec());
    type Frames = Vec<(Head, Vec<u8>)>;
    let cases: Vec<(&str, Frames)> = vec![
        ("a wrong checksum", vec![(Head { checksum: 7, ..frame(Kind::Data, 0, 0, &block).0 }, block.clone())]),
        ("behind the end", vec![frame(Kind::Data, 0, 2 * SEGMENT + 4096, &block)]),
        ("over the end", vec![frame(Kind::Data, 0, 2 * SEGMENT, &[7; 8192])]),
        ("at the end of the number range", vec![frame(Kind::Data, 0, u64::MAX - 4095, &block)]),
        ("another disk", vec![frame(Kind::Data, 1, 0, &block)]),
        ("the highest possible number of a disk", vec![frame(Kind::Data, u16::MAX, 0, &block)]),
        ("part of a block", vec![frame(Kind::Data, 0, 0, &block[..512])]),
        ("between blocks", vec![frame(Kind::Data, 0, 512, &block)]),
        ("over the segment", vec![frame(Kind::Data, 0, SEGMENT - 4096, &[7; 8192])]),
        ("two segments", vec![frame(Kind::Data, 0, 0, &block), frame(Kind::Data, 0, SEGMENT, &block)]),
        ("zeros without end", vec![frame(Kind::Zero, 0, 0, &eight(u64::MAX))]),
        ("no zeros", vec![frame(Kind::Zero, 0, 0, &eight(0))]),
        ("a segment from nowhere", vec![frame(Kind::Segment, 0, 0, &eight(0))]),
        ("too much", vec![frame(Kind::Data, 0, 0, &block), frame(Kind::Segment, 0, 0, &eight(4097))]),
        (
            "a segment twice",
            [0, 0].map(|_| [frame(Kind::Data, 0, 0, &block), frame(Kind::Segment, 0, 0, &eight(4096))]).concat(),
        ),
        ("the end of half a segment", vec![frame(Kind::Data, 0, 0, &block), frame(Kind::End, 0, 0, &[])]),
        ("a message", vec![frame(Kind::Message, 0, 0, b"\"ping\"")]),
    ];
    for (case, frames) in cases {
        let (mut control, mut data) = session(&keys, &receiver);
        for (head, payload) in &frames {
            // Sending may fail, because the server may have ended the connection already.
            let _ = data.send(head, &[payload]);
        }
        match outcome(&mut control, &mut data) {
            Message::Failure { kind, message } => {
                assert!(kind == "invalid" || kind == "corrupt", "{case}: {kind} {message}");
            }
            other => panic!("{case}: {other:?}"),
        }
    }
    // Sends bytes that are not a frame.
    let (mut control, mut data) = session(&keys, &receiver);
    data.stream.write(&[&[0x55; 64]]).unwrap();
    assert!(matches!(outcome(&mut control, &mut data), Message::Failure { kind, .. } if kind == "corrupt"));
    assert!(there.datastore.disks().unwrap().is_empty());
    drop((control, data));
    drop(receiver);
    there.check();
}

#[test]
fn a_malformed_first_frame_is_answered_with_a_failure() {
    let (keys, there) = (Keys::new(), Site::new());
    let receiver = there.receiver(&keys);
    let wrong_sum = Head { checksum: 7, ..Head::of(Kind::Message, 0, 0, b"\"ping\"") }.encode();
    let message = [&wrong_sum[..], &b"\"ping\""[..]].concat();
    let end = Head::of(Kind::End, 0, 0, &[]).encode();
    for bytes in [&[0x55; 64][..], &message[..], &end[..]] {
        let mut line = silent(&keys, &receiver);
        line.stream.write(&[bytes]).unwrap();
        line.flush().unwrap();
        let answer = line.hear().unwrap();
        assert!(matches!(&answer, Message::Failure { kind, .. } if kind == "corrupt"), "{answer:?}");
    }
}

#[test]
fn an_incomplete_disk_is_not_visible() {
    let (keys, there) = (Keys::new(), Site::new());
    let receiver = there.receiver(&keys);
    for claim in [vec![(1, 4096)], vec![(0, 4096)], vec![(2, 0)], vec![(0, 0), (0, 0)], vec![(u64::MAX, u64::MAX)]] {
        let mut control = dial(&keys, &receiver);
        assert!(matches!(offer(&mut control, arrival("case", SEGMENT)), Message::Accept { .. }));
        control.tell(&Message::Finish { disks: claim.clone() }).unwrap();
        assert!(matches!(control.hear().unwrap(), Message::Failure { .. }), "{claim:?}");
    }
    assert!(there.datastore.disks().unwrap().is_empty());
    // While a data connection is open, the receiver does not complete the disks.
    let (mut control, data) = session_of(&keys, &receiver, SEGMENT);
    control.tell(&Message::Finish { disks: vec![(0, 0)] }).unwrap();
    // The receiver waits some time for the end of the data connection, and then reports an error.
    let answer = std::iter::repeat_with(|| control.hear().unwrap()).find(|message| *message != Message::Working);
    assert!(matches!(answer, Some(Message::Failure { kind, .. }) if kind == "invalid"));
    drop(data);
}

/// Holds the receiver while it completes disks.
struct Held {
    checks: AtomicUsize,
    reached: mpsc::Sender<()>,
    released: Mutex<mpsc::Receiver<()>>,
}

impl Attachments for Held {
    fn check_names(&self, _: &[String]) -> error::Result<()> {
        // The first check is made for the offer, the second one before the disks get their names.
        if self.checks.fetch_add(1, Ordering::SeqCst) == 1 {
            self.reached.send(()).unwrap();
            self.released.lock().recv().unwrap();
        }
        Ok(())
    }

    fn check(&self, text: &str, disks: &[String]) -> error::Result<()> {
        NoAttachments.check(text, disks)
    }

    fn begin(&self, text: &str, disks: &[String]) -> error::Result<Box<dyn Making>> {
        NoAttachments.begin(text, disks)
    }
}

#[test]
fn no_data_connection_joins_while_disks_become_visible() {
    let (keys, there) = (Keys::new(), Site::new());
    let ((reached, is_reached), (release, released)) = (mpsc::channel(), mpsc::channel());
    let held = Held { checks: AtomicUsize::new(0), reached, released: Mutex::new(released) };
    let config = ReceiverConfig { listen: "127.0.0.1:0".parse().unwrap(), tls: keys.server(), clients: Vec::new() };
    let receiver = Receiver::start(&config, Arc::clone(&there.datastore), Arc::new(held)).unwrap();
    let mut control = dial(&keys, &receiver);
    let Message::Accept { session, token, .. } = offer(&mut control, arrival("case", SEGMENT)) else {
        panic!("an ordinary offer is accepted");
    };
    control.tell(&Message::Finish { disks: vec![(0, 0)] }).unwrap();
    is_reached.recv().unwrap();
    let mut data = dial(&keys, &receiver);
    data.tell(&Message::Join { session, token }).unwrap();
    let joined = data.hear().unwrap();
    release.send(()).unwrap();
    assert!(matches!(joined, Message::Failure { .. }), "{joined:?}");
    let answer = std::iter::repeat_with(|| control.hear().unwrap()).find(|message| *message != Message::Working);
    assert_eq!(answer, Some(Message::Committed { disks: vec!["case".into()] }));
}

/// Makes machines that are held before they are complete.
struct Machines {
    datastore: Arc<Datastore>,
    /// Whether a machine is found as soon as it is held.
    found_early: bool,
    found: Arc<AtomicBool>,
    reached: mpsc::Sender<()>,
    /// Receives whether to complete the machine; if not, it is deleted with its disk.
    released: Arc<Mutex<mpsc::Receiver<bool>>>,
}

impl Machines {
    /// The machines, with the channels that report and release a held one.
    fn held(datastore: &Arc<Datastore>, found_early: bool) -> (Self, mpsc::Receiver<()>, mpsc::Sender<bool>) {
        let ((reached, is_reached), (release, released)) = (mpsc::channel(), mpsc::channel());
        let (datastore, released) = (Arc::clone(datastore), Arc::new(Mutex::new(released)));
        (Self { datastore, found_early, found: Arc::default(), reached, released }, is_reached, release)
    }

    fn serve(self, keys: &Keys) -> Receiver {
        let config = ReceiverConfig { listen: "127.0.0.1:0".parse().unwrap(), tls: keys.server(), clients: Vec::new() };
        let datastore = Arc::clone(&self.datastore);
        Receiver::start(&config, datastore, Arc::new(self)).unwrap()
    }
}

impl Attachments for Machines {
    fn check(&self, _: &str, _: &[String]) -> error::Result<()> {
        match self.found.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::Exists, "there is a machine already")),
            false => Ok(()),
        }
    }

    fn begin(&self, _: &str, disks: &[String]) -> error::Result<Box<dyn Making>> {
        let making = HeldMaking {
            datastore: Arc::clone(&self.datastore),
            disk: disks[0].clone(),
            found_early: self.found_early,
            found: Arc::clone(&self.found),
            reached: self.reached.clone(),
            released: Arc::clone(&self.released),
        };
        Ok(Box::new(making))
    }
}

struct HeldMaking {
    datastore: Arc<Datastore>,
    disk: String,
    found_early: bool,
    found: Arc<AtomicBool>,
    reached: mpsc::Sender<()>,
    released: Arc<Mutex<mpsc::Receiver<bool>>>,
}

impl Making for HeldMaking {
    fn finish(self: Box<Self>) -> error::Result<()> {
        self.found.store(self.found_early, Ordering::SeqCst);
        self.reached.send(()).unwrap();
        let completed = self.released.lock().recv().unwrap();
        if !completed {
            self.datastore.delete_disk(&self.disk, false).unwrap();
        }
        self.found.store(completed, Ordering::SeqCst);
        if completed { Ok(()) } else { Err(Error::new(ErrorKind::Io, "the machine is not completed")) }
    }
}

#[test]
fn a_machine_has_not_arrived_before_it_is_complete() {
    let keys = Keys::new();
    for (found_early, completed) in [(false, true), (true, true), (false, false), (true, false)] {
        let there = Site::new();
        let (machines, is_reached, release) = Machines::held(&there.datastore, found_early);
        let receiver = machines.serve(&keys);
        let disk = NewArrival { keep: false, ..arrival("case", SEGMENT) };
        let machine = Message::Offer(Offer { disks: vec![disk], attachment: Some("case".into()), resume_only: false });
        let mut control = dial(&keys, &receiver);
        control.tell(&machine).unwrap();
        assert!(matches!(control.hear().unwrap(), Message::Accept { .. }));
        control.tell(&Message::Finish { disks: vec![(0, 0)] }).unwrap();
        is_reached.recv().unwrap();
        // The connection breaks, and the sender offers the same again.
        drop(control);
        let mut control = dial(&keys, &receiver);
        control.tell(&machine).unwrap();
        assert_eq!(control.hear().unwrap(), Message::Working, "{found_early} {completed}");
        release.send(completed).unwrap();
        let answer = std::iter::repeat_with(|| control.hear().unwrap()).find(|message| *message != Message::Working);
        let kept = there.datastore.receptions().unwrap().len();
        match answer {
            Some(Message::Already { disks }) => assert!(completed && disks == ["case"] && kept == 0),
            // The record of the first session does not prevent the next one.
            Some(Message::Accept { .. }) => assert!(!completed && kept == 1),
            other => panic!("{found_early} {completed}: {other:?}"),
        }
        drop((control, receiver));
        there.check();
    }
}

fn session_of(keys: &Keys, receiver: &Receiver, capacity: u64) -> (Line, Line) {
    let mut control = dial(keys, receiver);
    let Message::Accept { session, token, .. } = offer(&mut control, arrival("case", capacity)) else {
        panic!("an ordinary offer is accepted");
    };
    let mut data = dial(keys, receiver);
    data.tell(&Message::Join { session, token }).unwrap();
    assert_eq!(data.hear().unwrap(), Message::Joined);
    (control, data)
}

#[test]
fn invalid_offers_are_refused() {
    let (keys, there) = (Keys::new(), Site::new());
    let receiver = there.receiver(&keys);
    let good = arrival("web", SEGMENT);
    let other = |name: &str| SnapshotIdentity { name: name.into(), ..good.point.clone() };
    for bad in [
        NewArrival { name: "../../etc/passwd".into(), ..good.clone() },
        NewArrival { name: ".receiving-0-0".into(), ..good.clone() },
        NewArrival { name: "a@b".into(), ..good.clone() },
        NewArrival { uuid: "no".into(), ..good.clone() },
        NewArrival { capacity: 0, ..good.clone() },
        NewArrival { capacity: 513, ..good.clone() },
        NewArrival { capacity: u64::MAX, ..good.clone() },
        NewArrival { point: other("-x"), ..good.clone() },
        NewArrival { bases: vec!["../x".into()], ..good.clone() },
    ] {
        let answer = offer(&mut dial(&keys, &receiver), bad.clone());
        assert!(matches!(answer, Message::Failure { ref kind, .. } if kind == "invalid"), "{bad:?}: {answer:?}");
    }
    let mut control = dial(&keys, &receiver);
    let machine = Message::Offer(Offer {
        disks: vec![good.clone()],
        attachment: Some("name = \"web\"".into()),
        resume_only: false,
    });
    control.tell(&machine).unwrap();
    assert!(matches!(control.hear().unwrap(), Message::Failure { kind, .. } if kind == "unsupported"));
    // A machine does not get an existing disk, which may belong to another machine.
    drop(there.disk("mine", SEGMENT));
    there.snapshot("mine", "s");
    let (machines, ..) = Machines::held(&there.datastore, false);
    let machines = machines.serve(&keys);
    let base = there.datastore.outgoing("mine", "s").unwrap().point().uuid.clone();
    let update = NewArrival { bases: vec![base], update: true, ..arrival("mine", SEGMENT) };
    for resume_only in [false, true] {
        let mut control = dial(&keys, &machines);
        let disks = vec![good.clone(), update.clone()];
        control.tell(&Message::Offer(Offer { disks, attachment: Some("web".into()), resume_only })).unwrap();
        let answer = control.hear().unwrap();
        assert!(matches!(answer, Message::Failure { ref kind, .. } if kind == "invalid"), "{answer:?}");
    }
    // A wrong token and a missing `hello` are refused.
    let mut data = dial(&keys, &receiver);
    data.tell(&Message::Join { session: "x".into(), token: "y".into() }).unwrap();
    assert!(matches!(data.hear().unwrap(), Message::Failure { .. }));
    let mut old = dial(&keys, &receiver);
    old.tell(&Message::Hello { versions: vec![1], program: "again".into() }).unwrap();
    assert!(matches!(old.hear().unwrap(), Message::Failure { .. }));
    assert!(there.datastore.receptions().unwrap().is_empty());
}

/// A server that sends given messages.
fn hostile_server(keys: &Keys, says: impl Fn(&mut Line, Offer) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let identity = TlsIdentity::load(&keys.server()).unwrap();
    std::thread::spawn(move || {
        for socket in listener.incoming().map_while(Result::ok) {
            let stream = TlsStream::accept(Arc::new(socket.into()), &identity).unwrap();
            let mut line = Conversation::new(stream, "the client".into());
            let Ok(Message::Hello { .. }) = line.hear() else { continue };
            let _ = line.tell(&Message::Welcome { version: 1, program: "a hostile peer".into() });
            if let Ok(Message::Offer(offer)) = line.hear() {
                says(&mut line, offer);
            }
        }
    });
    port
}

#[test]
fn invalid_replies_of_a_receiver_are_refused() {
    let (keys, here) = (Keys::new(), Site::new());
    drop(furnished(&here, "web", 3));
    here.snapshot("web", "monday");
    let accept = |known: Vec<Known>| Message::Accept { session: "s".into(), token: "t".into(), disks: known };
    let known = |base: Option<&str>, done: &[(u64, u64)], bytes| Known {
        base: base.map(str::to_owned),
        done: done.to_vec(),
        bytes,
    };
    let cases = vec![
        ("segments that do not exist", accept(vec![known(None, &[(0, 1 << 40)], 0)])),
        ("bytes beyond the end of the disk", accept(vec![known(None, &[(0, 1)], u64::MAX)])),
        ("bytes without segments", accept(vec![known(None, &[], 1)])),
        ("more bytes than fit into the segments", accept(vec![known(None, &[(0, 1), (3, 4)], 2 * SEGMENT + 1)])),
        ("a range that ends before it begins", accept(vec![known(None, &[(2, 1)], 0)])),
        ("segments twice", accept(vec![known(None, &[(0, 2), (1, 3)], 0)])),
        ("a snapshot that does not exist", accept(vec![known(Some("0f0e0d0c-0b0a-4908-8706-0504030201ff"), &[], 0)])),
        ("too few disks", accept(vec![known(None, &[], 0); 2])),
        ("something else", Message::Committed { disks: vec!["web".into()] }),
        ("a question", Message::Ping),
    ];
    for (case, message) in cases {
        let port = hostile_server(&keys, move |line, _| {
            let _ = line.tell(&message);
            let _ = line.hear();
        });
        let shipment = here.shipment(&[("web", "monday", "web")]);
        let error = send(&shipment, &remote_at(port), &options(&keys, 2), &NoProgress).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Invalid), "{case}: {error}");
    }
    same(&here.content("web"), &here.content("web@monday"));
    here.check();
}

/// Cancels the sender when the receiver has got a ping. Until then, the sender does not continue to read the map.
struct UntilPing {
    pings: Mutex<mpsc::Receiver<()>>,
    seen: AtomicBool,
}

impl Progress for UntilPing {
    fn cancelled(&self) -> bool {
        if !self.seen.load(Ordering::SeqCst) && self.pings.lock().recv_timeout(Duration::from_secs(30)).is_ok() {
            self.seen.store(true, Ordering::SeqCst);
        }
        true
    }
}

#[test]
fn the_session_is_kept_alive_while_the_sender_reads_the_map() {
    let (keys, here) = (Keys::new(), Site::new());
    drop(furnished(&here, "web", 4));
    here.snapshot("web", "monday");
    let (ping, pings) = mpsc::channel();
    let port = hostile_server(&keys, move |line, _| {
        let disks = vec![Known { base: None, done: Vec::new(), bytes: 0 }];
        let _ = line.tell(&Message::Accept { session: "s".into(), token: "t".into(), disks });
        while let Ok(Message::Ping) = line.hear() {
            let _ = ping.send(());
            let _ = line.tell(&Message::Pong { bytes: 0 });
        }
    });
    let until = UntilPing { pings: Mutex::new(pings), seen: AtomicBool::new(false) };
    let shipment = here.shipment(&[("web", "monday", "web")]);
    let error = send(&shipment, &remote_at(port), &options(&keys, 1), &until).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
    assert!(until.seen.load(Ordering::SeqCst), "no ping while the map is read");
}
