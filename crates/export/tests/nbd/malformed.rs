//! Input that violates the protocol: random bytes, and valid bytes with random damage. The session must end in bounded
//! time, without a panic, and the server must not send more than the protocol permits.

use crate::in_process::option;
use crate::memory_disk::{MemoryDisk, Random, Shelf};
use connections::Peer;
use connections::transport::Memory;
use export::clients::Clients;
use export::nbd::{Terms, serve};
use std::sync::Arc;
use testkit::protocol::{Client, Mode};

const CAPACITY: u64 = 300_000;

/// Runs a session with the client's bytes; returns the server's bytes.
fn session(shelf: &Shelf, input: Vec<u8>, step: usize) -> Vec<u8> {
    let transport = Memory { step, ..Memory::new(input) };
    let output = Arc::clone(&transport.output);
    let _ = serve(Box::new(transport), shelf, &Terms::default(), &mut Clients::default().arrive(Peer::Unknown));
    let said = output.lock().clone();
    assert!(said.starts_with(b"NBDMAGICIHAVEOPT\0\x03"));
    said
}

/// A typical client: some options, then some requests, most of them valid.
fn script(random: &mut Random) -> Vec<u8> {
    let mut out = 3u32.to_be_bytes().to_vec();
    let mode = [Mode::Simple, Mode::Structured, Mode::Extended][random.below(3) as usize];
    match mode {
        Mode::Simple => {}
        Mode::Structured => out.extend(option(8, &[])),
        Mode::Extended => out.extend(option(11, &[])),
    }
    for _ in 0..random.below(4) {
        let name = ["vm", "", "nothing"][random.below(3) as usize];
        let queries = ["base:allocation", "lamina:dirty:monday", "qemu:", "base:"];
        let queries = &queries[random.below(4) as usize..];
        match random.below(6) {
            0 => out.extend(option(3, &[])),
            1 => out.extend(option(6, &Client::info_data(name, &[0, 1, 2, 3]))),
            2 => out.extend(option(9, &Client::meta_data(name, queries))),
            3 => out.extend(option(10, &Client::meta_data(name, queries))),
            4 => out.extend(option(5, &[])),
            _ => out.extend(option(random.below(20) as u32, &vec![1; random.below(40) as usize])),
        }
    }
    if mode == Mode::Extended || random.below(2) == 0 {
        out.extend(option(7, &Client::info_data("vm", &[3])));
    } else {
        out.extend(option(1, b"vm"));
    }
    let mut encoder = Client::new(Box::new(std::io::Cursor::new(Vec::new())));
    encoder.mode = mode;
    for _ in 0..random.below(24) {
        let command = random.below(10) as u16;
        let flags = if random.below(3) == 0 { 1 << random.below(7) } else { 0 };
        let offset = if random.below(8) == 0 { random.next() } else { random.below(CAPACITY) };
        let length = match random.below(8) {
            0 => random.next() >> random.below(64),
            1 => random.below(100_000),
            _ => random.below(9000),
        };
        let payload = if command == 1 || flags == 32 { random.bytes(length.min(120_000) as usize) } else { Vec::new() };
        out.extend(encoder.encode(command, flags, offset, length, &payload).1);
    }
    out
}

#[test]
fn random_bytes_after_the_greeting_cause_no_panic() {
    let shelf = Shelf::of(&[&MemoryDisk::new("vm", CAPACITY, 1)]);
    for seed in 0..5000 {
        let mut random = Random(seed);
        let mut input = 3u32.to_be_bytes().to_vec();
        if random.below(2) == 0 {
            input.extend(b"IHAVEOPT");
        }
        let length = random.below(300) as usize;
        input.extend(random.bytes(length));
        session(&shelf, input, 0);
    }
}

#[test]
fn damaged_sessions_cause_no_panic() {
    let disk = MemoryDisk::new("vm", CAPACITY, 1);
    disk.again_every.store(9, std::sync::atomic::Ordering::Relaxed);
    let shelf = Shelf::of(&[&disk]);
    for seed in 0..10_000 {
        let mut random = Random(seed);
        let mut input = script(&mut random);
        for _ in 0..random.below(4) {
            let at = random.below(input.len() as u64) as usize;
            match random.below(4) {
                0 => input.truncate(at.max(4)),
                1 => input[at] ^= 1 << random.below(8),
                2 => drop(input.splice(at..at, random.clone().bytes(7))),
                _ => input[at] = random.next() as u8,
            }
        }
        let step = if seed % 16 == 0 { 1 + random.below(40) as usize } else { 0 };
        session(&shelf, input, step);
    }
}

#[test]
fn replies_do_not_depend_on_how_messages_are_split() {
    for seed in 0..200 {
        let said = [0, 1, 13, 4096].map(|step| {
            // All disks have the same seed, so that all make the same random decisions.
            let disk = MemoryDisk::new("vm", CAPACITY, seed);
            session(&Shelf::of(&[&disk]), script(&mut Random(seed)), step).len()
        });
        // Replies to reads may be sent in another order and be split differently, and flushes may be shared
        // differently. The total length depends neither on the order nor on the division, so equal input gives equal
        // length.
        assert!(said.iter().all(|length| *length == said[0]), "seed {seed}: {said:?}");
    }
}
