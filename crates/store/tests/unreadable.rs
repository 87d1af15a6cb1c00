//! Reads of metadata fail: callers that wait for write-back get the error, and writes continue once reads succeed.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use error::ErrorKind;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use store::catalog::Provisioning;
use store::engine::{InitParameters, NewDisk};
use store::{Engine, EngineOptions};

const BLOCKS: u64 = 40_000;
const BUFFER: usize = 1 << 20;
/// Far longer than any step of the test takes.
const DEADLINE: Duration = Duration::from_secs(300);

fn write(engine: &Engine, disk: u64, block: u64, value: u8) -> error::Result<()> {
    let mut buffer = Buffer::zeroed(1);
    buffer.fill(value);
    engine.write_blocks(&engine.head(disk), block, SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE))
}

fn value(engine: &Engine, disk: u64, block: u64) -> u8 {
    let head = engine.head(disk);
    engine.read_blocks("disk", block..block + 1, &|range| engine.plan_head(&head, range)).unwrap()[0]
}

#[test]
fn a_writer_that_waits_for_write_back_gets_its_error() {
    let medium = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
    let directory = medium.directory();
    Engine::init(&directory, InitParameters { uuid: [7; 16], journal_size: 4 << 20 }).unwrap();
    let options = EngineOptions { write_buffer: BUFFER, ..EngineOptions::default() };
    let engine = Engine::open(Arc::clone(&directory), options).unwrap();
    let new = NewDisk {
        name: "disk".into(),
        capacity: 2 * BLOCKS * BLOCK_SIZE as u64,
        provisioning: Provisioning::Thin,
        uuid: [1; 16],
        incomplete: false,
    };
    let disk = engine.create_disk(new).unwrap();
    (0..BLOCKS).for_each(|i| write(&engine, disk, 2 * i, 1).unwrap());
    engine.close().unwrap();
    drop(engine);

    let engine = Engine::open(Arc::clone(&directory), options).unwrap();
    // Loads the root of the map and one leaf.
    write(&engine, disk, 0, 2).unwrap();
    engine.flush().unwrap();
    let map = directory.open("map", IoMode::Buffered).unwrap();
    let mut content = Buffer::zeroed(map.len().unwrap() as usize / BLOCK_SIZE);
    map.read_at(&mut content, 0).unwrap();
    medium.fail_reads("map", 0..content.len() as u64).unwrap();

    let (sender, failed) = channel();
    std::thread::scope(|scope| {
        let engine = &engine;
        scope.spawn(move || {
            // Writes more than the buffer holds, to leaves that cannot be read.
            let error = (1000..).find_map(|i| write(engine, disk, 2 * (i % BLOCKS), 3).err());
            sender.send(error.unwrap()).unwrap();
        });
        let error = failed.recv_timeout(DEADLINE).expect("the writer waits for ever");
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(error.to_string().contains("map"), "{error}");
    });

    // Reads of metadata succeed again.
    map.write_at(&[&content], 0, false).unwrap();
    let began = Instant::now();
    while let Err(error) = write(&engine, disk, 2, 4) {
        assert!(began.elapsed() < DEADLINE, "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
    (2000..6000).for_each(|i| write(&engine, disk, 2 * i, 5).unwrap());
    engine.flush().unwrap();
    assert_eq!([0, 2, 4000, 10_000].map(|block| value(&engine, disk, block)), [2, 4, 5, 5]);
    engine.close().unwrap();
}
