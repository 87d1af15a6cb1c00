//! Broken connections and stopped servers: received data is kept, and incomplete disks are not visible.

use crate::site::{Keys, Line, Random, Site, furnished, options, remote, remote_at, same, scribble};
use backend::BLOCK_SIZE;
use disk::transfer::{NewArrival, NewReception, Opened, SEGMENT, SnapshotIdentity};
use disk::{Compression, Deduplication, NoProgress, Progress, Provisioning};
use error::ErrorKind;
use replication::send;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[test]
fn a_connection_that_breaks_at_any_byte_loses_no_data() {
    let keys = Keys::new();
    for seed in 0..6 {
        let (here, there) = (Site::new(), Site::new());
        let mut random = Random(100 + seed);
        let device = furnished(&here, "web", seed);
        here.snapshot("web", "monday");
        let receiver = there.receiver(&keys);
        // The connection breaks after a number of bytes: at points from the TLS handshake to the last data.
        let budgets = (0..4).map(|round| match round {
            0 => random.below(6000),
            _ => 20_000 + random.below(12 << 20),
        });
        let line = Line::to(receiver.address().port(), budgets.collect());
        let shipment = here.shipment(&[("web", "monday", "web")]);
        let sent = send(&shipment, &remote_at(line.port), &options(&keys, 3), &NoProgress).unwrap();
        assert!(line.cuts.load(Ordering::SeqCst) > 0 && sent.reconnects > 0, "seed {seed}: {sent:?}");
        same(&there.content("web"), &here.content("web@monday"));

        scribble(&*device, &mut random, 30, 400_000);
        device.discard(random.below(4 * SEGMENT), SEGMENT, false).unwrap();
        here.snapshot("web", "tuesday");
        let budgets = (0..3).map(|_| 15_000 + random.below(3 << 20)).collect();
        let line = Line::to(receiver.address().port(), budgets);
        let mut shipment = here.shipment(&[("web", "tuesday", "web")]);
        (shipment.incremental, shipment.update) = (true, true);
        let sent = send(&shipment, &remote_at(line.port), &options(&keys, 3), &NoProgress).unwrap();
        assert_eq!(sent.incremental, 1);
        same(&there.content("web"), &here.content("web@tuesday"));
        same(&there.content("web@monday"), &here.content("web@monday"));
        assert!(there.datastore.receptions().unwrap().is_empty());
        there.check();
    }
}

/// Cancels the sender when this amount of data was received.
struct Until {
    bytes: u64,
    reached: AtomicU64,
    stop: AtomicBool,
}

impl Progress for Until {
    fn update(&self, done: u64, _: u64) {
        self.reached.fetch_max(done, Ordering::SeqCst);
        self.stop.fetch_or(done >= self.bytes, Ordering::SeqCst);
    }
    fn cancelled(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

#[test]
fn received_data_survives_restarts_of_both_sides() {
    let keys = Keys::new();
    let (here, mut there) = (Site::new(), Site::new());
    let device = here.disk("web", 12 * SEGMENT);
    for segment in 0..12 {
        crate::site::write(&*device, segment * SEGMENT + 4096, &Random(segment).bytes(2 << 20));
    }
    drop(device);
    here.snapshot("web", "monday");
    let total = 24 << 20;
    let receiver = there.receiver(&keys);
    let mut slow = options(&keys, 2);
    slow.rate = 4 << 20;
    let until = Until { bytes: total / 12, reached: AtomicU64::new(0), stop: AtomicBool::new(false) };
    let error = send(&here.shipment(&[("web", "monday", "web")]), &remote(&receiver), &slow, &until).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
    drop(receiver);
    assert_eq!(there.datastore.disk("web").unwrap_err().kind(), ErrorKind::NotFound);
    assert!(there.datastore.disks().unwrap().is_empty() && there.datastore.snapshots(None).unwrap().is_empty());
    let kept = there.datastore.receptions().unwrap();
    assert_eq!((kept.len(), kept[0].active, kept[0].disks.as_slice()), (1, false, &["web".to_owned()][..]));
    assert!(kept[0].bytes > 0 && kept[0].bytes < total);

    there = there.reopen();
    assert_eq!(there.datastore.receptions().unwrap(), kept);
    there.check();
    let receiver = there.receiver(&keys);
    // An offer of another state of the disk does not replace the reception.
    let device = here.datastore.device("web", false).unwrap();
    crate::site::write(&*device, 0, b"new");
    drop(device);
    here.snapshot("web", "tuesday");
    let other = here.shipment(&[("web", "tuesday", "web")]);
    let error = send(&other, &remote(&receiver), &options(&keys, 2), &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    assert!(error.to_string().contains(&kept[0].id), "{error}");
    // An offer of the same state resumes the reception, although the new command has generated another identity.
    let mut shipment = here.shipment(&[("web", "monday", "web")]);
    shipment.disks[0].uuid = "0f0e0d0c-0b0a-4908-8706-0000000000ff".into();
    let sent = send(&shipment, &remote(&receiver), &options(&keys, 2), &NoProgress).unwrap();
    assert_eq!((sent.resumed, sent.data), (kept[0].bytes, total - kept[0].bytes));
    same(&there.content("web"), &here.content("web@monday"));
    there.check();
}

/// Sends the first part of `web@monday`, which the receiver keeps.
fn begin(keys: &Keys, here: &Site, there: &Site) {
    let receiver = there.receiver(keys);
    let mut slow = options(keys, 2);
    slow.rate = 2 << 20;
    let until = Until { bytes: 1, reached: AtomicU64::new(0), stop: AtomicBool::new(false) };
    send(&here.shipment(&[("web", "monday", "web")]), &remote(&receiver), &slow, &until).unwrap_err();
}

#[test]
fn an_interrupted_reception_can_be_deleted() {
    let keys = Keys::new();
    let (here, there) = (Site::new(), Site::new());
    drop(furnished(&here, "web", 7));
    here.snapshot("web", "monday");
    begin(&keys, &here, &there);
    let kept = there.datastore.receptions().unwrap();
    assert_eq!(kept.len(), 1);
    assert_eq!(there.datastore.delete_reception("x").unwrap_err().kind(), ErrorKind::NotFound);
    there.datastore.delete_reception(&kept[0].id).unwrap();
    assert!(there.datastore.receptions().unwrap().is_empty());
    assert_eq!(there.datastore.delete_reception(&kept[0].id).unwrap_err().kind(), ErrorKind::NotFound);
    there.check();
    let there = there.reopen();
    assert!(there.datastore.receptions().unwrap().is_empty());
    let left =
        std::fs::read_dir(there.path()).unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    assert!(!left.into_iter().any(|name| name.starts_with("reception-")));
    there.check();
}

#[test]
fn a_damaged_record_loses_only_its_reception() {
    let keys = Keys::new();
    let (here, mut there) = (Site::new(), Site::new());
    drop(furnished(&here, "web", 8));
    drop(there.disk("mine", 1 << 20));
    here.snapshot("web", "monday");
    begin(&keys, &here, &there);
    let id = there.datastore.receptions().unwrap()[0].id.clone();
    let path = there.path().join(format!("reception-{id}"));
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    there = there.reopen();
    assert!(there.datastore.receptions().unwrap().is_empty() && !path.exists());
    assert_eq!(there.datastore.disks().unwrap().len(), 1);
    there.check();
}

#[test]
fn sending_to_an_unreachable_server_ends_with_an_error() {
    let keys = Keys::new();
    let here = Site::new();
    drop(here.disk("web", SEGMENT));
    here.snapshot("web", "monday");
    let until = Until { bytes: u64::MAX, reached: AtomicU64::new(0), stop: AtomicBool::new(false) };
    // No process listens on this port, so the attempts continue until the sender is cancelled.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(400));
            until.stop.store(true, Ordering::SeqCst);
        });
        let shipment = here.shipment(&[("web", "monday", "web")]);
        send(&shipment, &remote_at(port), &options(&keys, 2), &until).unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
}

#[test]
fn a_late_record_does_not_restore_a_deleted_reception() {
    let there = Site::new();
    let new = NewReception {
        sender: "another".into(),
        disks: vec![NewArrival {
            name: "web".into(),
            uuid: disk::transfer::new_identity().unwrap(),
            capacity: SEGMENT,
            provisioning: Provisioning::Thin,
            point: SnapshotIdentity {
                uuid: disk::transfer::new_identity().unwrap(),
                name: "monday".into(),
                created: 1_795_000_000,
            },
            keep: true,
            bases: Vec::new(),
            update: false,
        }],
        attachment: None,
        resume_only: false,
    };
    let receive = || match there.datastore.receive(&new).unwrap() {
        Opened::Open(reception) => reception,
        Opened::Already(disks) => panic!("there already: {disks:?}"),
    };
    for round in 0..2 {
        let reception = receive();
        reception.write(0, 0, &Random(round).bytes(BLOCK_SIZE), None).unwrap();
        reception.finish_segment(0, 0, BLOCK_SIZE as u64).unwrap();
        reception.commit(&[(1, BLOCK_SIZE as u64)]).unwrap();
        // The thread that saves the record at intervals may save it directly after a commit.
        reception.save().unwrap();
        drop(reception);
        assert!(there.datastore.receptions().unwrap().is_empty());
        there.datastore.delete_disk("web", false).unwrap();
    }
}

/// Segments of the disk `web` that [`rewritten`] makes.
const REWRITTEN: u64 = 8;
/// Bytes that are written again in each of these segments.
const AGAIN: u64 = 1 << 20;

/// Makes the disk `web` with the snapshots `monday`, which is sent, and `tuesday`. In between, all data is written
/// again with equal content, and every other segment gets further data.
fn rewritten(keys: &Keys, here: &Site, there: &Site) {
    let device = here.disk("web", REWRITTEN * SEGMENT);
    let write_all = || {
        for segment in 0..REWRITTEN {
            crate::site::write(&*device, segment * SEGMENT, &Random(segment).bytes(AGAIN as usize));
        }
    };
    write_all();
    here.snapshot("web", "monday");
    let receiver = there.receiver(keys);
    send(&here.shipment(&[("web", "monday", "web")]), &remote(&receiver), &options(keys, 2), &NoProgress).unwrap();
    write_all();
    for segment in (1..REWRITTEN).step_by(2) {
        crate::site::write(&*device, segment * SEGMENT + 2 * AGAIN, &Random(100 + segment).bytes(64 << 10));
    }
    here.snapshot("web", "tuesday");
}

/// Segments and bytes that differ between the snapshots of [`rewritten`].
fn difference(here: &Site) -> (u64, u64) {
    let base = here.datastore.outgoing("web", "monday").unwrap().point().uuid.clone();
    let (mut segments, mut bytes) = (std::collections::BTreeSet::new(), 0);
    let outgoing = here.datastore.outgoing("web", "tuesday").unwrap();
    let counted = outgoing.extents(Some(&base), 0..outgoing.capacity(), &mut |extent| {
        segments.insert(extent.offset / SEGMENT);
        bytes += extent.length;
        Ok(())
    });
    counted.unwrap();
    (segments.len() as u64, bytes)
}

/// Stores the equal blocks of `web` once, after which only the further data differs between the snapshots.
fn deduplicate(here: &Site) {
    assert_eq!(difference(here), (REWRITTEN, REWRITTEN * AGAIN + REWRITTEN / 2 * (64 << 10)));
    here.datastore.optimize_disk("web", Compression::Off, Deduplication::Disk, None, &NoProgress).unwrap();
    assert_eq!(difference(here), (REWRITTEN / 2, REWRITTEN / 2 * (64 << 10)));
}

#[test]
fn a_deduplication_between_two_attempts_does_not_break_a_transfer() {
    let (keys, here, there) = (Keys::new(), Site::new(), Site::new());
    rewritten(&keys, &here, &there);
    let increment = || {
        let mut shipment = here.shipment(&[("web", "tuesday", "web")]);
        (shipment.incremental, shipment.update) = (true, true);
        shipment
    };
    let receiver = there.receiver(&keys);
    let mut slow = options(&keys, 1);
    slow.rate = 2 * AGAIN;
    // Data of the second segment means that the first one is complete. It has only data that was written again.
    let until = Until { bytes: AGAIN + 1, reached: AtomicU64::new(0), stop: AtomicBool::new(false) };
    let error = send(&increment(), &remote(&receiver), &slow, &until).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
    drop(receiver);
    let kept = there.datastore.receptions().unwrap();
    assert!(kept[0].bytes >= AGAIN && kept[0].bytes < REWRITTEN * AGAIN, "{kept:?}");
    deduplicate(&here);
    let receiver = there.receiver(&keys);
    let sent = send(&increment(), &remote(&receiver), &options(&keys, 2), &NoProgress).unwrap();
    assert_eq!((sent.resumed, sent.incremental, sent.reconnects), (kept[0].bytes, 1, 0));
    same(&there.content("web"), &here.content("web@tuesday"));
    same(&there.content("web@monday"), &here.content("web@monday"));
    assert!(there.datastore.receptions().unwrap().is_empty());
    there.check();
}

/// Stores the equal blocks once when the first piece is about to be sent.
struct Deduplicating<'a> {
    here: &'a Site,
    begun: AtomicBool,
}

impl Progress for Deduplicating<'_> {
    fn moved(&self, _: u64) {
        if !self.begun.swap(true, Ordering::SeqCst) {
            deduplicate(self.here);
        }
    }
}

#[test]
fn a_deduplication_during_a_transfer_does_not_break_it() {
    let (keys, here, there) = (Keys::new(), Site::new(), Site::new());
    rewritten(&keys, &here, &there);
    let receiver = there.receiver(&keys);
    let mut shipment = here.shipment(&[("web", "tuesday", "web")]);
    (shipment.incremental, shipment.update) = (true, true);
    let pass = Deduplicating { here: &here, begun: AtomicBool::new(false) };
    let sent = send(&shipment, &remote(&receiver), &options(&keys, 1), &pass).unwrap();
    // The first segment is sent as it was planned; of the others, what still differs.
    assert_eq!((sent.data, sent.reconnects), (AGAIN + REWRITTEN / 2 * (64 << 10), 0));
    same(&there.content("web"), &here.content("web@tuesday"));
    there.check();
}
