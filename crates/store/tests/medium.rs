//! An engine on a medium that is not a local file system: operations complete later and out of order, `File::local`
//! returns `None`, and the medium may revoke the ownership.

#![allow(clippy::unwrap_used)]

#[path = "../../backend/tests/conformance/memory.rs"]
mod memory;

use backend::{BLOCK_SIZE, Buffer, Directory, IoMode};
use error::{Error, ErrorKind, Result};
use memory::MemoryMedium;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use store::catalog::Provisioning;
use store::engine::{CheckOptions, InitParameters, NewDisk, NewSnapshot, Owner};
use store::{Engine, EngineOptions};
use testkit::Random;

const BLOCKS: u64 = 4096;
const WRITERS: u64 = 4;

/// Direct I/O, so that write-back uses queues.
fn options() -> EngineOptions {
    EngineOptions { mode: IoMode::Direct, write_buffer: 2 << 20, ..EngineOptions::default() }
}

fn open(directory: &Arc<dyn Directory>) -> (Arc<Owner>, Arc<Engine>) {
    let owner = Arc::new(Owner::take(&**directory).unwrap());
    let engine = Engine::open_owned(Arc::clone(directory), options(), Some(&owner)).unwrap();
    (owner, engine)
}

fn initialised(medium: &MemoryMedium) -> u64 {
    let directory = medium.connect();
    assert!(directory.local().is_none());
    Engine::init(&directory, InitParameters { uuid: [7; 16], journal_size: 4 << 20 }).unwrap();
    let (_owner, engine) = open(&directory);
    let capacity = BLOCKS * BLOCK_SIZE as u64;
    let provisioning = Provisioning::Thin;
    let new = NewDisk { name: "disk".into(), capacity, provisioning, uuid: [1; 16], incomplete: false };
    let disk = engine.create_disk(new).unwrap();
    engine.close().unwrap();
    for name in directory.list().unwrap() {
        assert!(directory.open(&name, IoMode::Direct).unwrap().local().is_none());
    }
    disk
}

/// Writes a block that begins with its version.
fn write(engine: &Engine, disk: u64, block: u64, version: u64) -> Result<()> {
    let mut buffer = Buffer::zeroed(1);
    buffer[..8].copy_from_slice(&version.to_le_bytes());
    buffer[8..].fill(version as u8);
    engine.write_blocks(&engine.head(disk), block, buffer.into())
}

fn version(bytes: &[u8]) -> u64 {
    let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes[8..BLOCK_SIZE].iter().all(|byte| *byte == version as u8));
    version
}

fn versions(engine: &Engine, disk: u64) -> Vec<u64> {
    let head = engine.head(disk);
    let bytes = engine.read_blocks("disk", 0..BLOCKS, &|range| engine.plan_head(&head, range)).unwrap();
    bytes.chunks(BLOCK_SIZE).map(version).collect()
}

fn assert_clean(engine: &Engine) {
    let report = engine.check(CheckOptions::default(), &|_, _| true).unwrap();
    assert_eq!((report.findings, report.leaked), (vec![], 0));
}

#[test]
fn an_engine_works_on_a_medium_without_local_files() {
    let medium = MemoryMedium::new(3);
    let disk = initialised(&medium);
    let directory = medium.connect();
    let (owner, engine) = open(&directory);
    assert_eq!(Owner::take(&*medium.connect()).err().unwrap().kind(), ErrorKind::Busy);
    let mut random = Random::new(5);
    let mut model = vec![0; BLOCKS as usize];
    for step in 1..=12_000 {
        let block = random.below(BLOCKS);
        write(&engine, disk, block, step).unwrap();
        model[block as usize] = step;
        if step % 1000 == 0 {
            engine.flush().unwrap();
        }
    }
    let snapshot = NewSnapshot { disk, name: "snapshot".into(), uuid: [2; 16], incomplete: false };
    let snapshot = engine.snapshot(&[snapshot]).unwrap()[0];
    let at_snapshot = model.clone();
    for block in (0..BLOCKS).step_by(3) {
        write(&engine, disk, block, 20_000 + block).unwrap();
        model[block as usize] = 20_000 + block;
    }
    engine.flush().unwrap();
    assert_eq!(versions(&engine, disk), model);
    assert_clean(&engine);
    engine.close().unwrap();
    drop((engine, owner));

    let (_owner, engine) = open(&medium.connect());
    assert_eq!(versions(&engine, disk), model);
    assert_clean(&engine);
    engine.revert(disk, snapshot).unwrap();
    assert_eq!(versions(&engine, disk), at_snapshot);
    assert_clean(&engine);
    engine.close().unwrap();
    assert!(medium.overtaken() > 0, "operations were done in the order of pushing");
}

#[test]
fn an_engine_stops_at_loss_of_ownership_and_the_next_owner_has_the_flushed_data() {
    for seed in 0..4 {
        loses_its_ownership_under_load(seed);
    }
}

fn loses_its_ownership_under_load(seed: u64) {
    let medium = MemoryMedium::new(seed);
    let disk = initialised(&medium);
    let directory = medium.connect();
    let (_owner, engine) = open(&directory);
    let flushed: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    let flushes = AtomicU64::new(0);
    let lost = AtomicBool::new(false);
    let changes = std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (engine, flushed, flushes, lost) = (&engine, &flushed, &flushes, &lost);
            scope.spawn(move || {
                let mut random = Random::new(seed * WRITERS + writer);
                let mut written = Vec::new();
                let mut version = 0;
                // Each writer has its own blocks, and writes them with increasing versions.
                let error = loop {
                    version += 1;
                    let block = random.below(BLOCKS / WRITERS) * WRITERS + writer;
                    let began_lost = lost.load(Ordering::SeqCst);
                    let result = write(engine, disk, block, version);
                    assert!(result.is_err() || !began_lost, "a write succeeded after the ownership was lost");
                    if let Err(error) = result {
                        break error;
                    }
                    written.push((block, version));
                    if random.once_in(40) {
                        let began_lost = lost.load(Ordering::SeqCst);
                        let result = engine.flush();
                        assert!(result.is_err() || !began_lost, "a flush succeeded after the ownership was lost");
                        if let Err(error) = result {
                            break error;
                        }
                        for (block, version) in written.drain(..) {
                            flushed[block as usize].store(version, Ordering::SeqCst);
                        }
                        flushes.fetch_add(1, Ordering::SeqCst);
                    }
                };
                // A write that is under way at the revocation may fail with the error of the medium.
                let refused = error.kind() == ErrorKind::Io && error.to_string().contains("revoked the lease");
                assert!(refused || is_told(&error), "{error}");
            });
        }
        let begun = Instant::now();
        while flushes.load(Ordering::SeqCst) < 40 + 20 * seed {
            assert!(begun.elapsed() < Duration::from_secs(120), "flushes make no progress");
            std::thread::yield_now();
        }
        medium.revoke();
        lost.store(true, Ordering::SeqCst);
        medium.changes()
    });
    assert_told(&write(&engine, disk, 0, 1).unwrap_err());
    assert_told(&engine.flush().unwrap_err());
    assert_told(&engine.close().unwrap_err());
    assert!(engine.failure().unwrap().contains("its lease was revoked"));
    drop(engine);
    assert_eq!(medium.changes(), changes, "a former owner has changed the medium");

    let (_owner, engine) = open(&medium.connect());
    for (block, found) in versions(&engine, disk).into_iter().enumerate() {
        let flushed = flushed[block].load(Ordering::SeqCst);
        assert!(found >= flushed, "seed {seed}: block {block} is of version {found}, {flushed} was flushed");
    }
    assert_clean(&engine);
    write(&engine, disk, 0, 1).unwrap();
    engine.close().unwrap();
}

#[test]
fn an_idle_engine_stops_when_its_ownership_is_lost() {
    let medium = MemoryMedium::new(5);
    initialised(&medium);
    let (_owner, engine) = open(&medium.connect());
    medium.revoke();
    assert!(engine.failure().is_some_and(|why| why.contains("its lease was revoked")));
}

#[test]
fn errors_after_a_refused_change_report_the_loss_of_ownership() {
    for flush_first in [true, false] {
        let medium = MemoryMedium::new(9);
        let disk = initialised(&medium);
        let (_owner, engine) = open(&medium.connect());
        write(&engine, disk, 0, 1).unwrap();
        if flush_first {
            // This flush checks the ownership before its append to the journal. The check also counts for the append of
            // the next flush, if that begins within `LOOK_INTERVAL`.
            engine.flush().unwrap();
            write(&engine, disk, 1, 2).unwrap();
        }
        let told = medium.lapse();
        assert_told(&engine.flush().unwrap_err());
        assert_told(&write(&engine, disk, 2, 3).unwrap_err());
        told.into_iter().for_each(|lost| lost());
        assert_told(&engine.close().unwrap_err());
        drop(engine);
        let (_owner, engine) = open(&medium.connect());
        assert_eq!(versions(&engine, disk)[..3], [u64::from(flush_first), 0, 0]);
        assert_clean(&engine);
        engine.close().unwrap();
    }
}

fn assert_told(error: &Error) {
    assert!(is_told(error), "{error}");
}

fn is_told(error: &Error) -> bool {
    let lost = "ownership of the datastore is lost: its lease was revoked";
    error.kind() == ErrorKind::Stopped && error.to_string().contains(lost)
}
