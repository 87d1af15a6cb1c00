//! Flushes, comparisons and long writes end while other clients write as fast as write-back can empty the buffers.

#![allow(clippy::unwrap_used)]

use backend::simulated::{Request, SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, SharedSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;
use store::catalog::Provisioning;
use store::engine::{InitParameters, NewDisk, NewSnapshot};
use store::{Engine, EngineOptions};

/// The longest time that a request may take. Without a limit for the writers it does not end.
const LONGEST: Duration = Duration::from_secs(30);
/// How long the medium takes for a write.
const WRITE_TIME: Duration = Duration::from_micros(50);
/// Blocks of the disk of the writers. Every third one is written, so that each needs an extent of its own.
const BLOCKS: u64 = 3 << 15;

fn make(engine: &Engine, name: &str) -> u64 {
    let capacity = BLOCKS * BLOCK_SIZE as u64;
    let new =
        NewDisk { name: name.into(), capacity, provisioning: Provisioning::Thin, uuid: [1; 16], incomplete: false };
    engine.create_disk(new).unwrap()
}

fn write(engine: &Engine, disk: u64, block: u64, value: u8) {
    engine.write_blocks(&engine.head(disk), block, SharedSlice::copy_of(&[value; BLOCK_SIZE])).unwrap();
}

/// Makes a request three times while two threads repeat `load` on a busy disk. The request gets the busy disk, a quiet
/// disk, and its number.
fn ends_beside(load: &(dyn Fn(&Engine, u64, u64) + Sync), request: &(dyn Fn(&Engine, u64, u64, u64) + Sync)) {
    ends_with(EngineOptions { write_buffer: 16 << 20, ..EngineOptions::default() }, load, request);
}

fn ends_with(
    engine_options: EngineOptions,
    load: &(dyn Fn(&Engine, u64, u64) + Sync),
    request: &(dyn Fn(&Engine, u64, u64, u64) + Sync),
) {
    let options = SimulatedOptions { reorder: false, capacity: 16 << 30, ..SimulatedOptions::default() };
    let medium = SimulatedDisk::new(1, options);
    let directory = medium.directory();
    Engine::init(&directory, InitParameters { uuid: [7; 16], journal_size: 64 << 20 }).unwrap();
    let engine: Arc<Engine> = Engine::open(directory, engine_options).unwrap();
    let (busy, quiet) = (make(&engine, "busy"), make(&engine, "quiet"));
    // The medium is slower than the clients, also if other programs use the processors.
    medium.set_pace(Arc::new(|request| {
        if request == Request::Write {
            std::thread::sleep(WRITE_TIME);
        }
    }));
    let stop = AtomicBool::new(false);
    let (ended, wait) = channel();
    std::thread::scope(|scope| {
        for number in 0..2u64 {
            let (engine, stop) = (&engine, &stop);
            scope.spawn(move || {
                let mut i = number;
                while !stop.load(Ordering::Relaxed) {
                    load(engine, busy, i.wrapping_mul(0x9e37_79b9) % (BLOCKS / 3) * 3);
                    i += 2;
                }
            });
        }
        // The buffers fill before the first request.
        std::thread::sleep(Duration::from_millis(300));
        scope.spawn(|| {
            for number in 0..3 {
                request(&engine, busy, quiet, number);
                ended.send(()).unwrap();
            }
        });
        let requests = (0..3).take_while(|_| wait.recv_timeout(LONGEST).is_ok()).count();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(requests, 3, "a request takes longer than {LONGEST:?}");
    });
    engine.close().unwrap();
}

fn flush_quiet_disk(engine: &Engine, _busy: u64, quiet: u64, number: u64) {
    write(engine, quiet, number, 2);
    engine.flush().unwrap();
}

#[test]
fn a_flush_ends_while_others_fill_the_buffers() {
    ends_beside(&|engine, disk, block| write(engine, disk, block, 1), &flush_quiet_disk);
}

#[test]
fn a_flush_ends_while_others_discard() {
    let discard = |engine: &Engine, disk, block| {
        engine.discard_blocks(&engine.head(disk), block..block + 1).unwrap();
    };
    ends_beside(&discard, &flush_quiet_disk);
}

#[test]
fn a_comparison_with_a_disk_ends_while_others_write_the_disk() {
    let compare = |engine: &Engine, busy, _quiet, number: u64| {
        let name = number.to_string();
        let snapshot = NewSnapshot { disk: busy, name, uuid: [1; 16], incomplete: false };
        let from = engine.snapshot(&[snapshot]).unwrap()[0];
        engine.diff(from, busy, 0..BLOCKS, &mut |_| Ok(true)).unwrap();
    };
    ends_beside(&|engine, disk, block| write(engine, disk, block, 1), &compare);
}

#[test]
fn a_write_longer_than_the_write_buffer_ends_while_others_fill_it() {
    const LONG: u64 = 8192;
    let options = EngineOptions { write_buffer: 1 << 20, write_through: false, ..EngineOptions::default() };
    let write_long = |engine: &Engine, _busy, quiet, number: u64| {
        let (head, data) = (engine.head(quiet), SharedSlice::copy_of(&vec![3; LONG as usize * BLOCK_SIZE]));
        engine.write_blocks(&head, number * LONG, data).unwrap();
        let last = (number + 1) * LONG - 1;
        let read = engine.read_blocks("quiet", last..last + 1, &|range| engine.plan_head(&head, range)).unwrap();
        assert!(read.iter().all(|byte| *byte == 3));
    };
    ends_with(options, &|engine, disk, block| write(engine, disk, block, 1), &write_long);
}
