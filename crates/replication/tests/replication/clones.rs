//! Received disks equal the sent disks, and no data is sent unnecessarily.

use crate::site::{Keys, Random, Site, furnished, options, remote, same, scribble, write};
use disk::transfer::SEGMENT;
use disk::{NoProgress, Point, Provisioning};
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use replication::{Attachments, Making, Receiver, ReceiverConfig, send};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Bytes of data that a disk or snapshot maps.
fn mapped(site: &Site, name: &str) -> u64 {
    let device = site.datastore.device(name, true).unwrap();
    let extents = device.status(0, device.capacity(), usize::MAX >> 1).unwrap();
    extents.iter().filter(|e| e.allocation == disk::Allocation::Data).map(|e| e.length).sum()
}

#[test]
fn a_full_send_transfers_only_allocated_data() {
    let (keys, here, there) = (Keys::new(), Site::new(), Site::new());
    drop(furnished(&here, "web", 1));
    here.snapshot("web", "monday");
    let receiver = there.receiver(&keys);
    for streams in [1, 4, 16] {
        let name = format!("copy-{streams}");
        let shipment = here.shipment(&[("web", "monday", &name)]);
        let sent = send(&shipment, &remote(&receiver), &options(&keys, streams), &NoProgress).unwrap();
        assert_eq!(sent.data, mapped(&here, "web@monday"));
        assert!(sent.wire > sent.data && sent.wire < sent.data + sent.data / 20 + (64 << 10), "{sent:?}");
        assert_eq!((sent.incremental, sent.reconnects, sent.resumed), (0, 0, 0));
        assert_eq!(sent.disks, std::slice::from_ref(&name));
        same(&there.content(&name), &here.content("web@monday"));
        same(&there.content(&format!("{name}@monday")), &here.content("web@monday"));
        let info = there.datastore.disk(&name).unwrap();
        assert_eq!(info.uuid, shipment.disks[0].uuid);
        assert_eq!(info.parent_snapshot.as_deref(), Some("monday"));
        assert_eq!(info.origin, None);
    }
    assert!(there.datastore.receptions().unwrap().is_empty());
    there.check();
    drop(receiver);
    there.reopen().check();
}

#[test]
fn a_second_send_transfers_only_changes() {
    let (keys, here, there) = (Keys::new(), Site::new(), Site::new());
    let device = furnished(&here, "web", 2);
    here.snapshot("web", "monday");
    let receiver = there.receiver(&keys);
    send(&here.shipment(&[("web", "monday", "first")]), &remote(&receiver), &options(&keys, 2), &NoProgress).unwrap();

    let mut random = Random(3);
    scribble(&*device, &mut random, 5, 30_000);
    device.discard(3 * SEGMENT, 1 << 20, false).unwrap();
    here.snapshot("web", "tuesday");
    let mut changed = 0;
    let (from, to) = (Point::Snapshot("monday".into()), Point::Snapshot("tuesday".into()));
    here.datastore
        .diff("web", &from, &to, &mut |extent| {
            changed += if extent.zero { 0 } else { extent.length };
            Ok(())
        })
        .unwrap();
    let mut shipment = here.shipment(&[("web", "tuesday", "second")]);
    shipment.incremental = true;
    let sent = send(&shipment, &remote(&receiver), &options(&keys, 4), &NoProgress).unwrap();
    assert_eq!((sent.data, sent.incremental), (changed, 1));
    same(&there.content("second"), &here.content("web@tuesday"));
    same(&there.content("first"), &here.content("web@monday"));
    // The clone is independent, so the disk on which it was based can be deleted.
    assert_eq!(there.datastore.disk("second").unwrap().origin, None);
    there.datastore.delete_disk("first", false).unwrap();
    same(&there.content("second"), &here.content("web@tuesday"));

    // Sending the same snapshot again transfers no data.
    let mut shipment = here.shipment(&[("web", "tuesday", "third")]);
    shipment.incremental = true;
    let sent = send(&shipment, &remote(&receiver), &options(&keys, 4), &NoProgress).unwrap();
    assert_eq!(sent.data, 0);
    same(&there.content("third"), &here.content("web@tuesday"));
    there.check();
}

#[test]
fn an_existing_disk_is_updated() {
    let (keys, here, there) = (Keys::new(), Site::new(), Site::new());
    let device = furnished(&here, "web", 4);
    here.snapshot("web", "monday");
    let receiver = there.receiver(&keys);
    send(&here.shipment(&[("web", "monday", "web")]), &remote(&receiver), &options(&keys, 2), &NoProgress).unwrap();
    let uuid = there.datastore.disk("web").unwrap().uuid;

    let mut random = Random(5);
    // Sizes for growing, for shrinking, and for growing by part of a block. The added ranges must read as zeros.
    let sizes = [7 * SEGMENT + 512, 5 * SEGMENT + 4096 + 1024, 5 * SEGMENT + 4096 + 2048];
    for (day, size) in ["tuesday", "wednesday", "thursday"].into_iter().zip(sizes) {
        here.datastore.resize_disk("web", size, true).unwrap();
        scribble(&*device, &mut random, 7, 50_000);
        device.discard(random.below(size / 2), 200_000, false).unwrap();
        here.snapshot("web", day);
        let mut shipment = here.shipment(&[("web", day, "web")]);
        (shipment.incremental, shipment.update) = (true, true);
        let sent = send(&shipment, &remote(&receiver), &options(&keys, 4), &NoProgress).unwrap();
        assert!(sent.data < 2 << 20, "{sent:?}");
        same(&there.content("web"), &here.content(&format!("web@{day}")));
        same(&there.content(&format!("web@{day}")), &here.content(&format!("web@{day}")));
        same(&there.content("web@monday"), &here.content("web@monday"));
        let info = there.datastore.disk("web").unwrap();
        assert_eq!((info.parent_snapshot.as_deref(), info.capacity), (Some(day), size));
        assert_eq!(info.uuid, uuid);
    }
    let names: Vec<String> = there.datastore.snapshots(Some("web")).unwrap().into_iter().map(|s| s.name).collect();
    assert_eq!(names, ["monday", "tuesday", "wednesday", "thursday"]);
    there.check();

    // A disk that was changed on the receiver, or that is in use there, is not updated, and the error states the
    // reason.
    let target = there.datastore.device("web", false).unwrap();
    here.snapshot("web", "friday");
    let attempt = |update| {
        let mut shipment = here.shipment(&[("web", "friday", "web")]);
        (shipment.incremental, shipment.update) = (true, update);
        send(&shipment, &remote(&receiver), &options(&keys, 4), &NoProgress).unwrap_err()
    };
    write(&*target, 0, b"mine");
    target.flush().unwrap();
    drop(target);
    let error = attempt(true);
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    assert!(error.to_string().contains("changed since its snapshot 'thursday'"), "{error}");
    there.datastore.revert("web", "thursday").unwrap();
    let error = attempt(false);
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    assert!(there.datastore.receptions().unwrap().is_empty());
}

#[test]
fn provisioning_is_kept_and_several_disks_are_committed_together() {
    let (keys, here, there) = (Keys::new(), Site::new(), Site::new());
    let capacity = 2 * SEGMENT + 512;
    for (name, provisioning) in
        [("thin", Provisioning::Thin), ("lazy", Provisioning::ZeroedThick), ("eager", Provisioning::EagerZeroedThick)]
    {
        let device = here.disk_of(name, capacity, provisioning);
        scribble(&*device, &mut Random(6), 5, 100_000);
        drop(device);
        here.snapshot(name, "s");
    }
    let receiver = there.receiver(&keys);
    let shipment = here.shipment(&[("thin", "s", "a"), ("lazy", "s", "b"), ("eager", "s", "c")]);
    let sent = send(&shipment, &remote(&receiver), &options(&keys, 3), &NoProgress).unwrap();
    assert_eq!(sent.disks, ["a", "b", "c"]);
    for (from, to) in [("thin", "a"), ("lazy", "b"), ("eager", "c")] {
        same(&here.content(from), &there.content(to));
        let (a, b) = (here.datastore.disk(from).unwrap(), there.datastore.disk(to).unwrap());
        assert_eq!(a.provisioning, b.provisioning);
        assert_eq!(a.blocks_allocated, b.blocks_allocated, "{from}");
    }
    there.check();
    // One of the disks exists already, so none of them is received.
    let shipment = here.shipment(&[("thin", "s", "d"), ("lazy", "s", "b"), ("eager", "s", "e")]);
    let mut shipment = shipment;
    shipment.disks[1].uuid = "0f0e0d0c-0b0a-4908-8706-0000000000ff".into();
    let error = send(&shipment, &remote(&receiver), &options(&keys, 3), &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    assert_eq!(there.datastore.disks().unwrap().len(), 3);
    assert!(there.datastore.receptions().unwrap().is_empty());
}

#[test]
fn an_empty_disk_is_sent_and_the_rate_is_kept() {
    let (keys, here, there) = (Keys::new(), Site::new(), Site::new());
    drop(here.disk("empty", 3 * SEGMENT));
    here.snapshot("empty", "s");
    let receiver = there.receiver(&keys);
    let sent =
        send(&here.shipment(&[("empty", "s", "e")]), &remote(&receiver), &options(&keys, 4), &NoProgress).unwrap();
    assert_eq!(sent.data, 0);
    assert!(there.content("e").iter().all(|byte| *byte == 0));
    drop(furnished(&here, "web", 9));
    here.snapshot("web", "s");
    let mut slow = options(&keys, 4);
    slow.rate = 16 << 20;
    let sent = send(&here.shipment(&[("web", "s", "w")]), &remote(&receiver), &slow, &NoProgress).unwrap();
    // The rate is never exceeded, except for the initial credit. The test does not check a lower bound.
    assert!(sent.seconds + 0.2 >= sent.data as f64 / slow.rate as f64, "{sent:?}");
}

/// The names of machines that are complete.
#[derive(Default)]
struct Machines(Arc<Mutex<BTreeSet<String>>>);

/// A machine that is not complete yet.
struct Prepared(Arc<Mutex<BTreeSet<String>>>, String);

impl Attachments for Machines {
    fn check(&self, text: &str, _: &[String]) -> Result<()> {
        match self.0.lock().contains(text) {
            true => Err(Error::new(ErrorKind::Exists, format!("there is a machine '{text}' already"))),
            false => Ok(()),
        }
    }

    fn begin(&self, text: &str, disks: &[String]) -> Result<Box<dyn Making>> {
        self.check(text, disks)?;
        Ok(Box::new(Prepared(Arc::clone(&self.0), text.to_owned())))
    }
}

impl Making for Prepared {
    fn finish(self: Box<Self>) -> Result<()> {
        self.0.lock().insert(self.1.clone());
        Ok(())
    }
}

#[test]
fn a_machine_has_arrived_also_if_the_reply_to_its_commit_is_lost() {
    let (keys, here, there) = (Keys::new(), Site::new(), Site::new());
    drop(here.disk("web", SEGMENT));
    here.snapshot("web", "s");
    let config = ReceiverConfig { listen: "127.0.0.1:0".parse().unwrap(), tls: keys.server(), clients: Vec::new() };
    let receiver = Receiver::start(&config, Arc::clone(&there.datastore), Arc::new(Machines::default())).unwrap();
    let mut shipment = here.shipment(&[("web", "s", "copy")]);
    (shipment.attachment, shipment.keep) = (Some("copy".to_owned()), false);
    // At the second time, the sender offers what has arrived, as if it had not received the reply.
    for _ in 0..2 {
        let sent = send(&shipment, &remote(&receiver), &options(&keys, 1), &NoProgress).unwrap();
        assert_eq!(sent.disks, ["copy"]);
    }
    // Another transfer to the same name is refused.
    shipment.disks[0].uuid = "0f0e0d0c-0b0a-4908-8706-0000000000ff".into();
    let error = send(&shipment, &remote(&receiver), &options(&keys, 1), &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
}
