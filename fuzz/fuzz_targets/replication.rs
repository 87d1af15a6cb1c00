//! Arbitrary bytes from a sender to a receiver over a datastore in memory, from the first byte on; messages with the
//! right checksums; data frames for a disk that is being received; and the record of a reception.

#![no_main]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use disk::transfer::{NewArrival, NewReception, Opened, Reception, SEGMENT, SnapshotIdentity, recode};
use disk::{CheckOptions, Datastore, InitOptions, NewDisk, NoProgress, Provisioning, SnapshotOptions};
use lamina_fuzz::{Input, options};
use libfuzzer_sys::fuzz_target;
use replication::NoAttachments;
use replication::frame::{HEAD, Head, Kind};
use replication::message::Message;
use replication::receive::{Sessions, converse, take};
use replication::stream::{ByteStream, Conversation};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

/// A stream in memory.
struct Stream {
    left: Vec<u8>,
    at: usize,
}

impl ByteStream for Stream {
    fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        let part = self.left.get(self.at..self.at + into.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        into.copy_from_slice(part);
        self.at += part.len();
        Ok(())
    }
    fn write(&mut self, _: &[&[u8]]) -> io::Result<()> {
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn set_deadline(&mut self, _: Option<Instant>) -> io::Result<()> {
        Ok(())
    }
}

fn datastore() -> Arc<Datastore> {
    let disk = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
    let directory = disk.directory();
    Datastore::init_in(Arc::clone(&directory), InitOptions { journal_size: 4 << 20 }).expect("a new datastore");
    let datastore = Datastore::open_in(directory, options()).expect("a new datastore");
    datastore.create_disk("a", &NewDisk::native(1 << 20, Provisioning::Thin), &NoProgress).expect("a new disk");
    datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).expect("a new snapshot");
    datastore
}

fn offer(name: &str) -> NewArrival {
    let uuid = "0f0e0d0c-0b0a-4908-8706-050403020101".to_owned();
    NewArrival {
        name: name.into(),
        uuid: uuid.clone(),
        capacity: 2 * SEGMENT + 8192 + 512,
        provisioning: Provisioning::Thin,
        point: SnapshotIdentity { uuid, name: "monday".into(), created: 1 },
        keep: true,
        bases: Vec::new(),
        update: false,
    }
}

fn message(out: &mut Vec<u8>, payload: &[u8]) {
    out.extend_from_slice(&Head::of(Kind::Message, 0, 0, payload).encode());
    out.extend_from_slice(payload);
}

/// Frames, most of which are valid.
fn frames(input: &mut Input<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    while !input.is_empty() && out.len() < 4 << 20 {
        let shape = input.u8();
        let (disk, place) = (u16::from(input.u8() >> 6), input.word(2));
        // Offsets near the beginnings and ends of segments and of the disk.
        let offset = (place & 3) * SEGMENT + (place >> 2 & 7) * 4096 + u64::from(place & 1 << 15 != 0);
        let payload = match shape % 5 {
            0 | 1 => vec![shape; [4096, 512, 8192, 12_288][usize::from(shape >> 6)]],
            2 => (1u64 << (shape >> 3)).to_le_bytes().to_vec(),
            3 => (u64::from(shape >> 4) * 4096).to_le_bytes().to_vec(),
            _ => input.bytes(usize::from(shape)).to_vec(),
        };
        let head = match shape % 5 {
            0 | 1 => Head::of(Kind::Data, disk, offset, &payload),
            2 => Head::of(Kind::Zero, disk, offset, &payload),
            3 => Head::of(Kind::Segment, disk, place & 3, &payload),
            _ if payload.is_empty() => Head::of(Kind::End, 0, 0, &payload),
            _ => Head::of(Kind::Message, 0, 0, &payload),
        };
        out.extend_from_slice(&head.encode());
        out.extend_from_slice(&payload);
    }
    out
}

fn reception(datastore: &Arc<Datastore>) -> Arc<Reception> {
    let new = NewReception { sender: "f".into(), disks: vec![offer("b")], attachment: None, resume_only: false };
    match datastore.receive(&new).expect("an ordinary offer") {
        Opened::Open(reception) => reception,
        Opened::Already(_) => unreachable!("there is no such disk"),
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    match input.u8() % 4 {
        0 => {
            let _ = recode(input.0);
            if let Ok(message) = Message::decode(input.0) {
                let bytes = message.encode().expect("a decoded message can be encoded");
                assert_eq!(Message::decode(&bytes).expect("an encoded message can be decoded"), message);
            }
            if let Some(bytes) = input.0.first_chunk::<HEAD>()
                && let Ok(head) = Head::decode(bytes)
            {
                assert_eq!(&head.encode(), bytes);
            }
        }
        1 => {
            let sessions = Sessions::new(datastore(), Arc::new(NoAttachments));
            let _ = converse(&sessions, Stream { left: input.0.to_vec(), at: 0 }, "f".into());
        }
        2 => {
            // Each line of the input is sent as the text of a message, after a valid first message.
            let datastore = datastore();
            let sessions = Sessions::new(Arc::clone(&datastore), Arc::new(NoAttachments));
            let mut left = Vec::new();
            message(&mut left, b"{\"hello\":{\"versions\":[1],\"program\":\"f\"}}");
            let lines = input.0.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
            lines.for_each(|line| message(&mut left, line));
            let _ = converse(&sessions, Stream { left, at: 0 }, "f".into());
            let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).expect("a check");
            assert!(report.findings.is_empty(), "{:?}", report.findings);
        }
        _ => {
            let datastore = datastore();
            let reception = reception(&datastore);
            let mut line = Conversation::new(Stream { left: frames(&mut input), at: 0 }, "f".into());
            let _ = take(&reception, &mut line, &AtomicU64::new(0));
            let _ = reception.save();
            let progress = reception.progress();
            let segments: u64 = progress[0].done.iter().map(|(from, to)| to - from).sum();
            let whole = reception.commit(&[(segments, progress[0].bytes)]);
            assert!(whole.is_ok(), "{whole:?}");
            drop(reception);
            let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).expect("a check");
            assert!(report.findings.is_empty(), "{:?}", report.findings);
        }
    }
});
