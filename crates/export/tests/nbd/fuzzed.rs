//! Damaged streams of requests: the server stays synchronized with the stream.
//!
//! The test splits a stream into requests by the rules of the protocol. Each reply to the whole stream must equal the
//! reply to the same request on a connection of its own, on a disk with the same history. Each stream ends with probe
//! requests: a write, two requests that are refused, and two reads of the written data. After a point where the
//! boundaries of requests are unknown, no request is answered and nothing is changed.
//!
//! `LAMINA_STREAMS` sets the number of streams (20,000 by default), `LAMINA_STREAMS_FROM` the first seed.

use crate::in_process::{Outcome, Script, Seed, encode, every_seed, opening, run};
use crate::memory_disk::{MemoryDisk, Random, Shelf};
use crate::reference::{Next, next};
use crate::streams::{CONTEXTS, Setting, batches, some_request};
use export::exports::ResizePolicy;
use export::nbd::Terms;
use export::nbd::limits::INBOX_BYTES;
use std::collections::HashMap;
use std::sync::Arc;
use testkit::environment::number;
use testkit::protocol::*;

const CAPACITY: u64 = (80 << 10) + 512;
/// Most bytes by which the test completes the last request of a stream.
const FILL_MAX: u64 = 1 << 20;
/// Most memory that a session may offer for receiving: its buffer, and the payload of a write within the disk.
const OFFERED_MAX: usize = INBOX_BYTES + CAPACITY as usize + 2 * 4096;
const PROBES: u64 = 5;

/// Damages a stream whose requests begin at offsets `heads`.
fn damage(random: &mut Random, stream: &mut Vec<u8>, heads: &[usize]) {
    if stream.is_empty() {
        return;
    }
    let anywhere = random.below(stream.len() as u64) as usize;
    let in_head = heads[random.below(heads.len() as u64) as usize] + random.below(32) as usize;
    let in_head = in_head.min(stream.len() - 1);
    // The magic number of a header is rarely damaged, because the server must end the session at a wrong magic number.
    let in_fields = (in_head + if random.below(8) == 0 { 0 } else { 4 }).min(stream.len() - 1);
    match random.below(16) {
        0 => stream.truncate(anywhere),
        1 => stream[anywhere] ^= 1 << random.below(8),
        2 => {
            let bytes = random.clone().bytes(1 + random.below(40) as usize);
            stream.splice(anywhere..anywhere, bytes);
        }
        3 => {
            let end = (anywhere + 1 + random.below(40) as usize).min(stream.len());
            stream.drain(anywhere..end);
        }
        4 => {
            let length = random.below(60) as usize;
            stream.truncate(in_head);
            stream.extend(random.bytes(length));
        }
        5..8 => stream[in_fields] = random.next() as u8,
        _ => stream[in_fields] ^= 1 << random.below(8),
    }
}

/// The requests of a stream, and the rest after the last complete request.
fn cut(mut stream: &[u8], mode: Mode) -> (Vec<&[u8]>, &[u8], Option<Next>) {
    let mut requests = Vec::new();
    while !stream.is_empty() {
        match next(stream, mode) {
            Next::Whole(head) => {
                let (request, rest) = stream.split_at(head.bytes + head.payload as usize);
                requests.push(request);
                stream = rest;
                if head.command == CMD_DISC {
                    return (requests, stream, Some(Next::Lost));
                }
            }
            other => return (requests, stream, Some(other)),
        }
    }
    (requests, stream, None)
}

/// The server's replies after the handshake: by cookie, each joined from its chunks.
fn replies(heard: &[u8], from: usize, reads: &HashMap<u64, u64>) -> HashMap<u64, Vec<u8>> {
    let mut replies: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut left = &heard[from..];
    while !left.is_empty() {
        let number = |from: usize, to: usize| left[from..to].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let (cookie, length) = match number(0, 4) {
            0x6744_6698 => {
                let data = if number(4, 8) == 0 { reads.get(&number(8, 16)).copied().unwrap_or(0) } else { 0 };
                (number(8, 16), 16 + data)
            }
            0x668e_33ef => (number(8, 16), 20 + number(16, 20)),
            0x6e8a_278c => (number(8, 16), 32 + number(24, 32)),
            other => panic!("a reply begins with {other:#x}"),
        };
        let (reply, rest) = left.split_at(length as usize);
        replies.entry(cookie).or_default().extend(reply);
        left = rest;
    }
    replies
}

struct Side {
    disk: Arc<MemoryDisk>,
    shelf: Arc<Shelf>,
}

impl Side {
    fn new(seed: u64) -> Self {
        let disk = MemoryDisk::new("vm", CAPACITY, seed);
        disk.misses_of_8(0);
        Self { shelf: Shelf::of(&[&disk]), disk }
    }

    fn session(&self, terms: &Terms, batches: Vec<Vec<u8>>, cut: usize) -> Outcome {
        run(&*self.shelf, terms, Script::new(batches, cut))
    }
}

/// Probe requests: a write, a write beyond the end, an invalid change, and two reads of the written data.
fn probe(mode: Mode, random: &mut Random, cookie: u64) -> Vec<Vec<u8>> {
    let pattern = random.bytes(3000);
    let flag = if mode == Mode::Extended && random.below(2) == 0 { PAYLOAD } else { 0 };
    vec![
        encode(mode, CMD_WRITE, flag, cookie, 5000, 3000, &pattern),
        encode(mode, CMD_WRITE, 0, cookie + 1, CAPACITY - 100, 600, &random.bytes(600)),
        encode(mode, 77, 0, cookie + 2, 0, 0, &[]),
        encode(mode, CMD_READ, 0, cookie + 3, 5000, 3000, &[]),
        encode(mode, CMD_READ, 0, cookie + 4, 0, 9000, &[]),
    ]
}

/// Statistics of the streams.
#[derive(Clone, Copy, Debug, Default)]
struct Met {
    /// Streams with a probe at the end.
    probed: u64,
    /// Streams that end within a request.
    parts: u64,
    /// Streams in which the boundaries of requests become unknown.
    lost: u64,
    /// Refused requests with a payload that had another request after them.
    refused: u64,
}

fn check(seed: u64) -> Met {
    let mut random = Random(seed ^ 0x6675_7a7a);
    let mode = [Mode::Simple, Mode::Structured, Mode::Extended][(seed % 3) as usize];
    let _seed = Seed { what: "fuzzed stream", mode, seed };
    let setting = Setting { mode, capacity: CAPACITY, resize: false };
    let mut stream = Vec::new();
    let mut heads = Vec::new();
    for _ in 0..1 + random.below(8) {
        heads.push(stream.len());
        stream.extend(some_request(&mut random, setting));
    }
    if random.below(20) == 0 {
        let length = random.below(200) as usize;
        stream = random.bytes(length);
    }
    for _ in 0..random.below(4) {
        damage(&mut random, &mut stream, &heads);
    }
    // If the stream ends within a request, the test usually sends the rest of the request, so that the probe begins at
    // a request boundary. Otherwise the incomplete request must have no effect.
    let fill = random.below(4) > 0;
    let lost = loop {
        match cut(&stream, mode).2 {
            None => break false,
            Some(Next::Part(missing)) if fill && missing <= FILL_MAX => {
                // A header is completed with zeros, because a request with zeros more often has a known end.
                let filler = if missing > 32 { random.bytes(missing as usize) } else { vec![0; missing as usize] };
                stream.extend(filler);
            }
            Some(_) => break true,
        }
    };
    let cookie = random.next() >> 1;
    let probe = probe(mode, &mut random, cookie);
    let (mut requests, rest, end) = cut(&stream, mode);
    let partial = matches!(end, Some(Next::Part(_)));
    if !lost {
        requests.extend(probe.iter().map(Vec::as_slice));
    }
    let number = |request: &[u8], from: usize, to: usize| {
        request[from..to].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
    };
    let head_bytes = if mode == Mode::Extended { 32 } else { 28 };
    let mut reads = HashMap::new();
    for request in requests.iter().filter(|request| number(request, 6, 8) == u64::from(CMD_READ)) {
        reads.insert(number(request, 8, 16), number(request, 24, head_bytes));
    }

    let contexts = if random.below(4) > 0 { &CONTEXTS[..] } else { &[] };
    let opening = opening(mode, contexts);
    let read_only = random.below(10) == 0;
    let terms = Terms { read_only, resize: ResizePolicy::Never, ..Terms::default() };
    let (together, apart) = (Side::new(seed), Side::new(seed));
    let silence = apart.session(&terms, vec![opening.clone()], 0).heard.len();
    let mut expected = HashMap::new();
    for request in &requests {
        let outcome = apart.session(&terms, vec![opening.clone(), request.to_vec()], 0);
        assert!(outcome.fault.is_none(), "a complete request ends the connection: {:?}", outcome.fault);
        expected.extend(replies(&outcome.heard, silence, &reads));
    }

    let mut all: Vec<Vec<u8>> = requests.iter().map(|request| request.to_vec()).collect();
    if lost {
        all.push(rest.to_vec());
        // After an incomplete request no probe is sent, because the server would take it for the rest of the request.
        all.extend(probe.iter().filter(|_| !partial).cloned());
    }
    let small = if random.below(32) == 0 { 1 + random.below(300) as usize } else { 0 };
    let outcome = together.session(&terms, batches(&mut random, opening, &all), small);
    assert!(outcome.offered <= OFFERED_MAX, "{} bytes of memory to receive into", outcome.offered);
    let farewell = requests.last().is_some_and(|request| number(request, 6, 8) == u64::from(CMD_DISC));
    assert_eq!(outcome.fault.is_some(), lost && !partial && !farewell, "{:?}", outcome.fault);
    let heard = replies(&outcome.heard, silence, &reads);
    for request in &requests {
        let cookie = number(request, 8, 16);
        let head = &request[..head_bytes];
        assert!(heard.get(&cookie) == expected.get(&cookie), "not the reply of a fresh connection: {head:x?}");
        assert_eq!(heard.contains_key(&cookie), number(request, 6, 8) != u64::from(CMD_DISC), "{head:x?}");
    }
    assert_eq!(heard.len(), expected.len(), "replies although no request was sent");
    assert!(together.disk.contents() == apart.disk.contents(), "the disks differ");
    if !lost && !read_only {
        let pattern = &probe[0][head_bytes..];
        assert!(heard[&(cookie + PROBES - 2)].ends_with(pattern), "the probe does not read its own write");
    }
    let refused = |request: &&&[u8]| {
        let error = match heard.get(&number(request, 8, 16)) {
            Some(reply) if mode == Mode::Simple => reply[4..8] != [0; 4],
            Some(reply) => reply[6..8] == [0x80, 1],
            None => false,
        };
        error && request.len() > head_bytes
    };
    let followed = &requests[..requests.len().saturating_sub(1)];
    Met {
        probed: u64::from(!lost),
        parts: u64::from(partial),
        lost: u64::from(lost && !partial),
        refused: followed.iter().filter(refused).count() as u64,
    }
}

#[test]
fn damaged_streams_get_the_reference_replies_or_close_the_connection() {
    let (first, streams) = (number("LAMINA_STREAMS_FROM", 0), number("LAMINA_STREAMS", 20_000));
    let all = parking_lot::Mutex::new(Met::default());
    every_seed("fuzzed streams", first..first + streams, |seed| {
        let met = check(seed);
        let mut all = all.lock();
        all.probed += met.probed;
        all.parts += met.parts;
        all.lost += met.lost;
        all.refused += met.refused;
    });
    let all = all.into_inner();
    let enough = |count| count > streams / 20;
    assert!([all.probed, all.parts, all.lost, all.refused].into_iter().all(enough), "{all:?}");
}
