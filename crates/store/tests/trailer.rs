//! Damage of the last batch in the journal is detected if the journal was idle before the crash, is harmless after a
//! clean close, and is never reported when only the power was cut.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use error::{ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::catalog::Provisioning;
use store::engine::{InitParameters, JOURNAL_FILE, NewDisk};
use store::{Engine, EngineOptions};

const RING: u64 = 4 << 20;

fn medium(seed: u64, reorder: bool) -> SimulatedDisk {
    let disk = SimulatedDisk::new(seed, SimulatedOptions { reorder, ..SimulatedOptions::default() });
    Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: RING }).unwrap();
    disk
}

fn open(disk: &SimulatedDisk, threads: bool) -> Result<Arc<Engine>> {
    Engine::open(disk.directory(), EngineOptions { threads, ..EngineOptions::default() })
}

fn create(engine: &Engine) -> u64 {
    let new = NewDisk {
        name: "disk".into(),
        capacity: 1 << 30,
        provisioning: Provisioning::Thin,
        uuid: [1; 16],
        incomplete: false,
    };
    engine.create_disk(new).unwrap()
}

fn write(engine: &Engine, disk: u64, block: u64, value: u8) -> Result<()> {
    let mut buffer = Buffer::zeroed(1);
    buffer.fill(value);
    engine.write_blocks(&engine.head(disk), block, SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE))
}

fn value(engine: &Engine, disk: u64, block: u64) -> u8 {
    let head = engine.head(disk);
    engine.read_blocks("disk", block..block + 1, &|range| engine.plan_head(&head, range)).unwrap()[0]
}

/// A batch or trailer in the ring, as described on the format page.
#[derive(Clone, Copy)]
struct Found {
    kind: u16,
    sequence: u64,
    offset: u64,
    length: u64,
}

/// The batches and the trailer in the ring, ordered by sequence number.
fn ring(disk: &SimulatedDisk) -> Vec<Found> {
    let file = disk.directory().open(JOURNAL_FILE, IoMode::Buffered).unwrap();
    let mut bytes = vec![0; RING as usize];
    file.read_at(&mut bytes, 0).unwrap();
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let mut found: Vec<Found> = (0..RING as usize)
        .step_by(BLOCK_SIZE)
        .filter(|at| bytes[*at..*at + 4] == *b"LMJB")
        .map(|at| Found {
            kind: u16::from_le_bytes([bytes[at + 6], bytes[at + 7]]),
            sequence: word(at + 24),
            offset: at as u64,
            length: word(at + 40) & 0xffff_ffff,
        })
        .collect();
    found.sort_by_key(|found| found.sequence);
    found
}

/// The last batch, if a trailer follows it.
fn trailed(disk: &SimulatedDisk) -> Option<Found> {
    let found = ring(disk);
    let [.., last, trailer] = found[..] else { return None };
    (trailer.kind == 5 && trailer.sequence == last.sequence + 1).then_some(last)
}

/// Models a crash of the machine after the kernel has written its cached data.
fn kill(disk: &SimulatedDisk) -> SimulatedDisk {
    disk.directory().open(JOURNAL_FILE, IoMode::Buffered).unwrap().sync().unwrap();
    disk.crash()
}

#[test]
fn a_flipped_bit_in_the_last_record_is_detected_after_the_trailer_is_written() {
    let disk = medium(1, false);
    let engine = open(&disk, true).unwrap();
    let vm = create(&engine);
    for round in 1..4 {
        write(&engine, vm, round, round as u8).unwrap();
        engine.flush().unwrap();
        let began = Instant::now();
        while trailed(&disk).is_none() {
            assert!(began.elapsed() < Duration::from_secs(60), "the journal gets no trailer");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let disk = kill(&disk);
    let last = trailed(&disk).unwrap();
    // Tries every byte of the head, and some bytes of the payload.
    for at in (0..64).chain((64..64 + last.length).step_by(61)) {
        disk.flip_bit(JOURNAL_FILE, last.offset + at, (at % 8) as u8).unwrap();
        let Err(error) = open(&disk, false) else { panic!("byte {at} is lost unnoticed") };
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("the journal is damaged"), "{error}");
        disk.flip_bit(JOURNAL_FILE, last.offset + at, (at % 8) as u8).unwrap();
    }
    // Without the trailer, the store opens.
    let trailer = *ring(&disk).last().unwrap();
    disk.flip_bit(JOURNAL_FILE, trailer.offset + 24, 3).unwrap();
    let engine = open(&disk, false).unwrap();
    assert_eq!([1, 2, 3].map(|block| value(&engine, vm, block)), [1, 2, 3]);
    engine.close().unwrap();
}

#[test]
fn after_a_clean_stop_flipped_bits_in_the_journal_are_harmless() {
    let disk = medium(2, false);
    let engine = open(&disk, false).unwrap();
    let vm = create(&engine);
    for block in 0..40 {
        write(&engine, vm, block, block as u8).unwrap();
        engine.flush().unwrap();
    }
    engine.close().unwrap();
    drop(engine);
    for found in ring(&disk) {
        disk.flip_bit(JOURNAL_FILE, found.offset + 30, 5).unwrap();
    }
    let engine = open(&disk, false).unwrap();
    for block in 0..40 {
        assert_eq!(value(&engine, vm, block), block as u8);
    }
}

/// Writes, flushes and pauses until the power is cut. Records for each block the value flushed last, and the values
/// that may be found instead.
fn life(engine: &Engine, vm: u64, seed: u64, known: &mut [(u8, Vec<u8>)]) {
    for i in 0..60u64 {
        let block = (i * 7 + seed) % known.len() as u64;
        let new = (i + seed) as u8 | 1;
        known[block as usize].1.push(new);
        if write(engine, vm, block, new).is_err() || engine.flush().is_err() {
            return;
        }
        known[block as usize] = (new, Vec::new());
        // In a pause, a trailer and, at times, all other background work is due.
        if !(i + seed).is_multiple_of(3) && engine.pump().is_err() {
            return;
        }
    }
}

#[test]
fn a_torn_end_of_the_journal_is_never_reported_as_damage() {
    let mut trailers = 0;
    for seed in 0..150 {
        let mut disk = medium(seed, true);
        let engine = open(&disk, false).unwrap();
        let vm = create(&engine);
        engine.flush().unwrap();
        drop(engine);
        disk = disk.crash();
        let mut known = vec![(0, Vec::new()); 23];
        for cut in 0..4 {
            let engine = open(&disk, false).unwrap();
            disk.cut_after(disk.operations() + 20 + (seed * 31 + cut * 17) % 160);
            life(&engine, vm, seed + cut, &mut known);
            drop(engine);
            disk = disk.crash();
            trailers += u32::from(trailed(&disk).is_some());
            let engine = open(&disk, false).unwrap_or_else(|error| panic!("seed {seed}, cut {cut}: {error}"));
            for (block, (sure, maybe)) in known.iter_mut().enumerate() {
                let found = value(&engine, vm, block as u64);
                assert!(found == *sure || maybe.contains(&found), "seed {seed}, cut {cut}: block {block} is {found}");
                (*sure, *maybe) = (found, Vec::new());
            }
            drop(engine);
            disk = disk.crash();
        }
    }
    assert!(trailers > 50, "only {trailers} cuts left a trailer");
}
