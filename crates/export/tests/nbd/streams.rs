//! Random streams of valid and invalid requests, compared with the simple server of [`crate::reference`].

use crate::in_process::{Script, Seed, encode, every_seed, listen, opening, run};
use crate::memory_disk::{MemoryDisk, Random, Shelf};
use crate::reference::{Answer, PAYLOAD_MAX, Reference, Served};
use export::exports::ResizePolicy;
use export::nbd::Terms;
use std::collections::HashMap;
use testkit::protocol::*;

pub const STREAMS: u64 = 10_000;
pub const CAPACITY: u64 = (256 << 10) + 512;
pub const CONTEXTS: [&str; 3] = ["base:allocation", "lamina:dirty:monday", "qemu:dirty-bitmap:monday"];
/// Size above which [`MemoryDisk`] has no space.
const SPACE: u64 = 1 << 30;

/// The negotiated properties on which requests depend.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub mode: Mode,
    pub capacity: u64,
    pub resize: bool,
}

/// A random length, at one of the alignments that clients use.
fn some_length(random: &mut Random) -> u64 {
    match random.below(40) {
        0 => 0,
        1 => 65_536 + random.below(3) * 4096,
        2 => 60_000 + random.below(12_000),
        3..12 => 4096 * (1 + random.below(4)),
        12..20 => 512 * (1 + random.below(20)),
        _ => 1 + random.below(6000),
    }
}

fn some_offset(random: &mut Random, capacity: u64, length: u64) -> u64 {
    let unit = [1, 512, 4096][random.below(3) as usize];
    match random.below(24) {
        // A range just beyond the end, at the end, far beyond the end, or near the largest number.
        0 => (capacity + 1).saturating_sub(length),
        1 => capacity.saturating_sub(length),
        2 => capacity + random.below(10_000),
        3 => u64::MAX - random.below(10_000),
        _ => random.below(capacity.saturating_sub(length) + 1) / unit * unit,
    }
}

/// A random request, which is valid more often than not.
pub fn some_request(random: &mut Random, setting: Setting) -> Vec<u8> {
    let Setting { mode, capacity, resize } = setting;
    let extended = mode == Mode::Extended;
    let cookie = random.next();
    let command = match random.below(64) {
        0 => 9 + random.below(200) as u16,
        1 => random.next() as u16 | 16,
        2..5 => CMD_RESIZE,
        5..10 => CMD_FLUSH,
        10..13 => CMD_CACHE,
        13..19 => CMD_STATUS,
        19..25 => CMD_TRIM,
        25..32 => CMD_ZEROES,
        32..48 => CMD_READ,
        _ => CMD_WRITE,
    };
    let mut length = some_length(random);
    let mut offset = some_offset(random, capacity, length);
    let mut flags = match random.below(12) {
        0 => 1 << random.below(8),
        1 => 1 << random.below(16) | 1 << random.below(6),
        2..5 => FUA,
        5..8 => match command {
            CMD_READ if mode != Mode::Simple => DF,
            CMD_ZEROES => [NO_HOLE, FAST_ZERO, NO_HOLE | FAST_ZERO][random.below(3) as usize],
            CMD_STATUS => REQ_ONE,
            _ => 0,
        },
        _ => 0,
    };
    match command {
        CMD_FLUSH if random.below(4) > 0 => (offset, length) = (0, 0),
        CMD_RESIZE => {
            length = if random.below(2) == 0 { 0 } else { length };
            offset = match random.below(4) {
                0 => random.below(capacity),
                1 => SPACE + 1 + (random.next() >> random.below(60)).min(u64::MAX - SPACE - 1),
                _ if resize => capacity + random.below(9000),
                _ => random.next() >> random.below(64),
            };
        }
        CMD_WRITE if extended && random.below(2) == 0 => flags |= PAYLOAD,
        CMD_WRITE => {}
        CMD_READ if random.below(30) == 0 => length = PAYLOAD_MAX + random.below(2),
        _ if random.below(20) == 0 => length = random.next() >> random.below(64),
        _ => {}
    }
    if extended && command == CMD_STATUS && random.below(2) == 0 {
        let mut form = length.to_be_bytes().to_vec();
        for _ in 0..random.below(4) {
            form.extend((random.below(5) as u32).to_be_bytes());
        }
        form.truncate(if random.below(8) == 0 { random.below(20) as usize } else { form.len() });
        return encode(mode, command, flags | PAYLOAD, cookie, offset, form.len() as u64, &form);
    }
    let surprise = extended && command != CMD_WRITE && (flags & PAYLOAD != 0 || random.below(25) == 0);
    if surprise {
        flags |= PAYLOAD;
        length = some_length(random);
    }
    let payload = if command == CMD_WRITE || surprise { random.bytes(length as usize) } else { Vec::new() };
    encode(mode, command, flags, cookie, offset, length, &payload)
}

/// A stream of separate requests. Sometimes the last one is cut short, too long, not a request, or a disconnect request
/// with more bytes after it.
fn some_stream(random: &mut Random, setting: Setting) -> Vec<Vec<u8>> {
    let mut stream: Vec<Vec<u8>> = (0..4 + random.below(37)).map(|_| some_request(random, setting)).collect();
    let (mode, cookie) = (setting.mode, random.next());
    match random.below(8) {
        0 => {
            let last = stream.last_mut().unwrap();
            last.truncate(random.below(last.len() as u64) as usize);
        }
        1 => {
            let flags = if mode == Mode::Extended && random.below(2) == 0 { PAYLOAD } else { 0 };
            let head = encode(mode, CMD_WRITE, flags, cookie, 0, PAYLOAD_MAX + 1 + random.below(1000), &[]);
            let at = random.below(stream.len() as u64) as usize;
            stream.insert(at, head);
        }
        2 => stream.push(random.bytes(40)),
        3 => {
            let flags = if random.below(2) == 0 { random.next() as u16 & !PAYLOAD } else { 0 };
            let at = random.below(stream.len() as u64) as usize;
            stream.insert(at, encode(mode, CMD_DISC, flags, cookie, 0, 0, &[]));
        }
        _ => {}
    }
    stream
}

/// Splits requests into batches after the handshake: whole requests up to a random depth, or cut at random offsets.
pub fn batches(random: &mut Random, opening: Vec<u8>, requests: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut batches = vec![opening];
    if random.below(4) == 0 {
        let all = requests.concat();
        let mut left = &all[..];
        while !left.is_empty() {
            let most = if random.below(2) == 0 { 100 } else { 20_000 };
            let (batch, rest) = left.split_at(left.len().min(1 + random.below(most) as usize));
            batches.push(batch.to_vec());
            left = rest;
        }
        return batches;
    }
    let depth = [1, 4, 16, 64][random.below(4) as usize];
    let mut left = requests;
    while !left.is_empty() {
        let (batch, rest) = left.split_at(left.len().min(1 + random.below(depth) as usize));
        batches.push(batch.concat());
        left = rest;
    }
    batches
}

/// Number of occurrences of each outcome.
#[derive(Debug, Default)]
struct Met {
    success: u64,
    errors: HashMap<u32, u64>,
}

/// Whether each byte of a read that was answered late has the value at the arrival of the read, or the value of a later
/// change. The first element of `served` is the read.
fn explained(served: &[Served], data: &[u8]) -> bool {
    let Some(Served { head: read, answer: Answer::Data(then) }) = served.first() else { return false };
    let mut allowed: Vec<Vec<u8>> = then.iter().map(|byte| vec![*byte]).collect();
    for Served { head, answer } in &served[1..] {
        let Answer::Changed(bytes) = answer else { continue };
        let from = head.offset.max(read.offset);
        let to = (head.offset + bytes.len() as u64).min(read.offset + then.len() as u64);
        for at in from..to {
            allowed[(at - read.offset) as usize].push(bytes[(at - head.offset) as usize]);
        }
    }
    data.len() == then.len() && data.iter().zip(allowed).all(|(byte, allowed)| allowed.contains(byte))
}

fn compare(mode: Mode, seed: u64) -> Met {
    let _seed = Seed { what: "stream", mode, seed };
    let mut random = Random(seed);
    let read_only = random.below(8) == 0;
    let resize = random.below(4) > 0;
    let with_contexts = mode != Mode::Simple && random.below(4) > 0;
    let contexts = if with_contexts { &CONTEXTS[..1 + random.below(3) as usize] } else { &[] };
    let stream = some_stream(&mut random, Setting { mode, capacity: CAPACITY, resize });

    let disk = MemoryDisk::new("vm", CAPACITY, seed);
    // If reads of the storage are slow, they may be answered late, and then with data of later writes.
    let late = random.below(8) == 0;
    disk.misses_of_8(if late { 3 } else { 0 });
    let policy = if resize { ResizePolicy::Grow } else { ResizePolicy::Never };
    let terms = Terms { read_only, resize: policy, ..Terms::default() };
    let cut = if random.below(16) == 0 { 1 + random.below(2000) as usize } else { 0 };
    let script = Script::new(batches(&mut random, opening(mode, contexts), &stream), cut);
    let outcome = run(&*Shelf::of(&[&disk]), &terms, script);

    let (mut client, ids) = listen(outcome.heard, mode, contexts);
    let grows_to = resize.then_some(SPACE);
    let before = vec![0; CAPACITY as usize];
    let mut reference = Reference { mode, disk: before, read_only, grows_to, contexts: ids };
    let served = reference.serve(&stream.concat());
    for Served { head, .. } in &served {
        client.expect(head.command, head.cookie, head.offset, head.length);
    }
    let mut replies: HashMap<u64, Reply> = served.iter().map(|_| client.receive()).collect();
    assert!(client.at_end(), "more replies than requests");
    let mut met = Met::default();
    for (at, Served { head, answer }) in served.iter().enumerate() {
        let reply = replies.remove(&head.cookie).expect("a reply to every request");
        if let Answer::Errors(errors) = answer {
            assert!(errors.contains(&reply.error), "{head:?}: error {}, not {errors:?}", reply.error);
            *met.errors.entry(reply.error).or_default() += 1;
            continue;
        }
        assert_eq!(reply.error, 0, "{head:?}: {}", reply.message);
        met.success += 1;
        match answer {
            Answer::Data(data) => {
                let same = reply.data == *data || (late && explained(&served[at..], &reply.data));
                assert!(same, "{head:?}: the data differ");
                assert!(head.flags & DF == 0 || reply.chunks == (1, 0), "{head:?}: {:?} chunks", reply.chunks);
            }
            Answer::Status { length, ids } => {
                assert_eq!(reply.status.len(), ids.len(), "{head:?}");
                for id in ids {
                    let extents = &reply.status[id];
                    assert!(extents.iter().map(|extent| extent.length).sum::<u64>() <= *length, "{head:?}");
                    assert!(head.flags & REQ_ONE == 0 || extents.len() == 1, "{head:?}");
                }
            }
            Answer::Success | Answer::Changed(_) | Answer::Errors(_) => {
                assert!(reply.data.is_empty() && reply.status.is_empty())
            }
        }
    }
    assert!(disk.contents() == reference.disk, "the disk differs at the end");
    met
}

fn compare_streams(mode: Mode) {
    let all = parking_lot::Mutex::new(Met::default());
    every_seed("streams", 0..STREAMS, |seed| {
        let met = compare(mode, seed);
        let mut all = all.lock();
        all.success += met.success;
        for (error, count) in met.errors {
            *all.errors.entry(error).or_default() += count;
        }
    });
    let all = all.into_inner();
    assert!(all.success > 10 * STREAMS, "{all:?}");
    for error in [EPERM, EINVAL, ENOSPC, ENOTSUP] {
        assert!(all.errors.get(&error).is_some_and(|count| *count > 100), "error {error} is rare: {all:?}");
    }
}

#[test]
fn replies_to_simple_streams_equal_those_of_the_reference() {
    compare_streams(Mode::Simple);
}

#[test]
fn replies_to_structured_streams_equal_those_of_the_reference() {
    compare_streams(Mode::Structured);
}

#[test]
fn replies_to_extended_streams_equal_those_of_the_reference() {
    compare_streams(Mode::Extended);
}
