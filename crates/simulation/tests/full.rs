//! A full file system, step by step: which requests must still succeed, and how space is freed again.
#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Directory, SharedSlice};
use disk::{CheckOptions, Datastore, Device, InitOptions, NewDisk, NoProgress, Provisioning};
use error::ErrorKind;
use simulation::random::{Random, pattern};
use std::sync::Arc;
use store::EngineOptions;

const BLOCK: usize = backend::BLOCK_SIZE;
const DISK: u64 = 32 << 20;

fn write(device: &dyn Device, block: u64, seed: u64) -> error::Result<()> {
    device.write(block * BLOCK as u64, SharedSlice::copy_of(&pattern(seed, BLOCK)), false)
}

fn read(device: &dyn Device, block: u64) -> Vec<u8> {
    device.read(block * BLOCK as u64, BLOCK).unwrap()
}

fn full_datastore() -> (SimulatedDisk, Arc<Datastore>) {
    let disk = SimulatedDisk::new(5, SimulatedOptions { capacity: 64 << 20, ..SimulatedOptions::default() });
    let directory: Arc<dyn Directory> = disk.directory();
    Datastore::init_in(Arc::clone(&directory), InitOptions { journal_size: 4 << 20 }).unwrap();
    let options =
        EngineOptions { threads: false, metadata_cache: 1 << 20, write_buffer: 256 << 10, ..EngineOptions::default() };
    (disk.clone(), Datastore::open_in(directory, options).unwrap())
}

#[test]
fn a_full_datastore_continues_and_accepts_writes_when_space_is_freed() {
    let (_disk, datastore) = full_datastore();
    for name in ["a", "b"] {
        datastore.create_disk(name, &NewDisk::native(DISK, Provisioning::Thin), &NoProgress).unwrap();
    }
    datastore.create_disk("thick", &NewDisk::native(4 << 20, Provisioning::ZeroedThick), &NoProgress).unwrap();
    let (a, b) = (datastore.device("a", false).unwrap(), datastore.device("b", false).unwrap());
    let thick = datastore.device("thick", false).unwrap();
    let mut random = Random::new(1);
    // Fills both disks until no further block fits.
    let mut written = [Vec::new(), Vec::new()];
    'full: for block in 0..DISK / BLOCK as u64 {
        for (device, written) in [&a, &b].into_iter().zip(&mut written) {
            match write(&**device, block, block + 1) {
                Ok(()) => written.push(block),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                    break 'full;
                }
            }
        }
    }
    assert!(written[0].len() > 4000, "only {} blocks fitted", written[0].len());
    a.flush().unwrap();
    // The blocks of a thick disk are reserved.
    for block in 0..1024 {
        write(&*thick, block, 7_000 + block).unwrap();
    }
    thick.flush().unwrap();
    // Overwrites of existing blocks still succeed.
    for _ in 0..500 {
        let block = *random.pick(&written[1]);
        write(&*b, block, block + 1).unwrap();
    }
    b.flush().unwrap();
    for block in &written[0] {
        assert_eq!(read(&*a, *block), pattern(block + 1, BLOCK));
    }
    // Discards free blocks for other disks.
    a.discard(0, 4 << 20, false).unwrap();
    a.flush().unwrap();
    while datastore.engine().pump().unwrap() {}
    for block in 0..200 {
        write(&*b, DISK / BLOCK as u64 - 1 - block, block).unwrap();
    }
    // Deleting a disk frees blocks too.
    drop(a);
    datastore.delete_disk("a", false).unwrap();
    while datastore.engine().pump().unwrap() {}
    b.flush().unwrap();
    let next = written[1].len() as u64 + 1;
    for block in next..next + 1000 {
        write(&*b, block, block + 1).unwrap();
    }
    b.flush().unwrap();
    for block in written[1].iter().copied().chain(next..next + 1000) {
        assert_eq!(read(&*b, block), pattern(block + 1, BLOCK), "block {block}");
    }
    for block in 0..1024 {
        assert_eq!(read(&*thick, block), pattern(7_000 + block, BLOCK));
    }
    let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, vec![]);
}

#[test]
fn a_file_system_that_grows_is_used_at_once() {
    let (disk, datastore) = full_datastore();
    datastore.create_disk("a", &NewDisk::native(1 << 30, Provisioning::Thin), &NoProgress).unwrap();
    let a = datastore.device("a", false).unwrap();
    let mut block = 0;
    let error = loop {
        match write(&*a, block, block + 1) {
            Ok(()) => block += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    disk.set_capacity(128 << 20);
    for more in block..block + 2000 {
        write(&*a, more, more + 1).unwrap();
    }
    a.flush().unwrap();
    for at in 0..block + 2000 {
        assert_eq!(read(&*a, at), pattern(at + 1, BLOCK), "block {at}");
    }
}
