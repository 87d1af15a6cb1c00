//! Random requests, many at a time, compared with a vector of bytes. The tests use every style of headers, page cache
//! misses, and changes during reads. Each connection uses its own part of the disk, so the model is exact.

use crate::Running;
use crate::memory_disk::{MemoryDisk, Random, Shelf};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use testkit::protocol::*;

pub const PART: u64 = 2 << 20;

struct Expected {
    range: std::ops::Range<usize>,
    data: Option<Vec<u8>>,
}

pub fn play(socket: &std::path::Path, part: u64, mode: Mode, seed: u64, rounds: usize) {
    let mut random = Random(seed);
    let mut client = Client::open(socket, "vm", mode);
    let base = part * PART;
    let mut model = vec![0; PART as usize];
    // Requests in progress never overlap, because their order would not be defined.
    let mut under_way: HashMap<u64, Expected> = HashMap::new();
    for round in 0..rounds {
        let length = match random.below(10) {
            0 => 1 + random.below(300_000),
            1..4 => 4096 * (1 + random.below(4)),
            _ => 1 + random.below(9000),
        };
        let from = random.below(PART - length) as usize;
        let range = from..from + length as usize;
        let clash = |other: &Expected| other.range.start < range.end && range.start < other.range.end;
        while under_way.len() > 40 || under_way.values().any(clash) {
            settle(&mut client, &mut under_way, seed, round);
        }
        let offset = base + from as u64;
        let (cookie, data) = match random.below(10) {
            0..4 => {
                let df = if mode != Mode::Simple && random.below(4) == 0 { DF } else { 0 };
                (client.send(CMD_READ, df, offset, length, &[]), Some(model[range.clone()].to_vec()))
            }
            4..8 => {
                let payload = random.bytes(length as usize);
                model[range.clone()].copy_from_slice(&payload);
                (client.send(CMD_WRITE, random.below(2) as u16, offset, length, &payload), None)
            }
            8 => {
                model[range.clone()].fill(0);
                let flags = if random.below(2) == 0 { NO_HOLE } else { 0 };
                (client.send(CMD_ZEROES, flags, offset, length, &[]), None)
            }
            _ => {
                model[range.clone()].fill(0);
                (client.send(CMD_TRIM, 0, offset, length, &[]), None)
            }
        };
        under_way.insert(cookie, Expected { range, data });
        if random.below(30) == 0 {
            let cookie = client.send(CMD_FLUSH, 0, 0, 0, &[]);
            under_way.insert(cookie, Expected { range: 0..0, data: None });
        }
    }
    while !under_way.is_empty() {
        settle(&mut client, &mut under_way, seed, rounds);
    }
    assert!(client.read(base, PART) == model, "seed {seed}: the disk differs from the model at the end");
    client.leave();
}

fn settle(client: &mut Client, under_way: &mut HashMap<u64, Expected>, seed: u64, round: usize) {
    let (cookie, reply) = client.receive();
    assert_eq!(reply.error, 0, "seed {seed} round {round}: {}", reply.message);
    let expected = under_way.remove(&cookie).unwrap();
    if let Some(data) = expected.data {
        assert!(reply.data == data, "seed {seed} round {round}: read of {:?} differs", expected.range);
    }
}

#[test]
fn random_requests_on_parallel_connections() {
    for seed in 0..8 {
        let disk = MemoryDisk::new("vm", 3 * PART, seed);
        disk.again_every.store(if seed % 2 == 0 { 7 } else { 0 }, Ordering::Relaxed);
        if seed % 4 == 3 {
            disk.slow(std::time::Duration::from_micros(200));
        }
        let running = Running::start(Shelf::of(&[&disk]));
        std::thread::scope(|scope| {
            for (part, mode) in [Mode::Simple, Mode::Structured, Mode::Extended].into_iter().enumerate() {
                let socket = &running.socket;
                scope.spawn(move || play(socket, part as u64, mode, seed * 3 + part as u64, 600));
            }
        });
    }
}
