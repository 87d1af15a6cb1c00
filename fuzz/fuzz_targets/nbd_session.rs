//! A client that sends arbitrary bytes, from the first byte on, to the NBD server over a datastore in memory.

#![no_main]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use connections::Peer;
use connections::transport::{Transport, Wait};
use disk::device::Device;
use disk::{Datastore, InitOptions, NewDisk, NoProgress, Provisioning, SnapshotOptions};
use export::clients::Clients;
use export::exports::{ExportName, Exports};
use export::nbd::{Terms, serve};
use lamina_fuzz::{Input, options};
use libfuzzer_sys::fuzz_target;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

/// Number of bytes of replies after which the session counts as endless.
const REPLIES_MAX: usize = 256 << 20;

struct Disks(Arc<Datastore>);

impl Exports for Disks {
    fn names(&self) -> Vec<ExportName> {
        self.0.device_names().into_iter().map(|name| ExportName { name, description: "a disk".into() }).collect()
    }
    fn open(&self, name: &str, read_only: bool) -> error::Result<Arc<dyn Device>> {
        self.0.device(name, read_only)
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn backend::Queue>> {
        self.0.queue(depth)
    }
}

fn disks() -> &'static Disks {
    static DISKS: OnceLock<Disks> = OnceLock::new();
    DISKS.get_or_init(|| {
        let disk = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
        let directory = disk.directory();
        Datastore::init_in(Arc::clone(&directory), InitOptions { journal_size: 4 << 20 })
            .expect("the datastore can be created");
        let datastore = Datastore::open_in(directory, options()).expect("a new datastore can be opened");
        datastore
            .create_disk("a", &NewDisk::native((1 << 20) + 512, Provisioning::Thin), &NoProgress)
            .expect("the disk can be created");
        let device = datastore.device("a", false).expect("a new disk can be opened");
        device.write(8192, backend::SharedSlice::copy_of(&[7; 8192]), true).expect("a new disk accepts writes");
        datastore
            .create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default())
            .expect("the snapshot can be taken");
        device.write(0, backend::SharedSlice::copy_of(&[8; 4096]), true).expect("a new disk accepts writes");
        Disks(datastore)
    })
}

/// A stream in memory that reads and writes in pieces. The input determines their size.
struct Stream {
    left: Vec<u8>,
    at: usize,
    piece: usize,
    sent: usize,
}

impl Transport for Stream {
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], wait: Wait) -> io::Result<usize> {
        let mut got = 0;
        for slice in into {
            let most = if wait == Wait::All { usize::MAX } else { self.piece - got.min(self.piece) };
            let count = slice.len().min(self.left.len() - self.at).min(most);
            slice[..count].copy_from_slice(&self.left[self.at..self.at + count]);
            self.at += count;
            got += count;
        }
        Ok(got)
    }
    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let count: usize = slices.iter().map(|slice| slice.len()).sum();
        self.sent += count;
        if self.sent > REPLIES_MAX {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(count)
    }
    fn has_input(&self) -> bool {
        self.at < self.left.len()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The handshake up to the transmission phase: fixed newstyle, structured replies or extended headers, all contexts,
/// GO.
fn greeting(flags: u8) -> Vec<u8> {
    fn option(out: &mut Vec<u8>, code: u32, data: &[u8]) {
        out.extend_from_slice(b"IHAVEOPT");
        out.extend_from_slice(&code.to_be_bytes());
        out.extend_from_slice(&(data.len() as u32).to_be_bytes());
        out.extend_from_slice(data);
    }
    let mut out = vec![0, 0, 0, 3];
    match flags & 3 {
        0 => {}
        1 => option(&mut out, 8, &[]),
        _ => option(&mut out, 11, &[]),
    }
    if flags & 3 != 0 && flags & 4 != 0 {
        let mut data = vec![0, 0, 0, 1, b'a', 0, 0, 0, 2];
        for name in ["base:allocation", "lamina:dirty:s"] {
            data.extend_from_slice(&(name.len() as u32).to_be_bytes());
            data.extend_from_slice(name.as_bytes());
        }
        option(&mut out, 10, &data);
    }
    option(&mut out, 7, &[0, 0, 0, 1, b'a', 0, 0]);
    out
}

/// Requests whose magic number, offset and length are mostly valid.
fn requests(input: &mut Input<'_>, extended: bool, out: &mut Vec<u8>) {
    while !input.is_empty() {
        let command = u16::from(input.u8() % 16);
        let flags = u16::from(input.u8());
        let (offset, length) = (input.word(3), input.word(3));
        let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
        out.extend_from_slice(&magic.to_be_bytes());
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&command.to_be_bytes());
        out.extend_from_slice(&(out.len() as u64).to_be_bytes());
        out.extend_from_slice(&offset.to_be_bytes());
        if extended {
            out.extend_from_slice(&length.to_be_bytes());
        } else {
            out.extend_from_slice(&(length as u32).to_be_bytes());
        }
        // Writes have a payload with every header style; other commands only if a flag of an extended header says so.
        if command == 1 || extended && flags & 32 != 0 {
            out.resize(out.len() + length as usize % (1 << 18), 0xa5);
        }
        if input.u8() == 0xff {
            let length = usize::from(input.u8());
            out.extend_from_slice(input.bytes(length));
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let (shape, flags) = (input.u8(), input.u8());
    let piece = 1 + usize::from(input.u8()) * 37;
    let left = match shape % 3 {
        0 => input.0.to_vec(),
        1 => {
            let mut out = greeting(flags);
            out.extend_from_slice(input.0);
            out
        }
        _ => {
            let mut out = greeting(flags);
            requests(&mut input, flags & 2 != 0, &mut out);
            out
        }
    };
    let stream = Stream { left, at: 0, piece, sent: 0 };
    let _ = serve(Box::new(stream), disks(), &Terms::default(), &mut Clients::default().arrive(Peer::Unknown));
});
