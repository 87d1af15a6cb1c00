//! Acknowledged writes that a damaged page of the map has lost: each client is told, also during a migration.

use super::super::handover::Handover;
use super::super::testbed::MemoryDevice;
use super::super::{Base, MirrorDevice, NativeLayer};
use crate::switch::Identity;
use crate::{Datastore, Device, InitOptions, NewDisk, NoProgress, Provisioning};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use chain::Chain;
use error::{ErrorKind, Result};
use layer::Layer;
use std::sync::Arc;
use store::EngineOptions;

const BLOCK: u64 = BLOCK_SIZE as u64;
const CAPACITY: u64 = 16 << 20;
/// Every second block is written, so that each needs an extent of its own and the map has several leaves.
const WRITTEN: u64 = 1200;
/// Pages of the map that are searched for a leaf.
const PAGES: u64 = 200;

fn open(medium: &SimulatedDisk) -> Arc<Datastore> {
    let options = EngineOptions { write_buffer: 8 << 20, threads: false, ..EngineOptions::default() };
    Datastore::open_in(medium.directory(), options).unwrap()
}

fn block(byte: u8) -> SharedSlice {
    SharedSlice::copy_of(&[byte; BLOCK_SIZE])
}

/// Inverts bits of a page of a file.
fn spoil(medium: &SimulatedDisk, name: &str, page: u64) {
    let file = medium.directory().open(name, IoMode::Buffered).unwrap();
    let mut content = Buffer::zeroed(1);
    file.read_at(&mut content, page * BLOCK).unwrap();
    content[40..64].iter_mut().for_each(|byte| *byte ^= 0x5a);
    file.write_at(&[&content], page * BLOCK, true).unwrap();
}

/// A datastore of which a leaf of the map is damaged, and the offsets of blocks of its disk `vm`: one that the leaf
/// maps, and one that another leaf maps.
fn damaged() -> (Arc<Datastore>, u64, u64) {
    let medium = SimulatedDisk::new(1, SimulatedOptions::default());
    Datastore::init_in(medium.directory(), InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&medium);
    datastore.create_disk("vm", &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress).unwrap();
    let device = datastore.device("vm", false).unwrap();
    for number in 0..WRITTEN {
        device.write(2 * number * BLOCK, block(number as u8), false).unwrap();
    }
    drop(device);
    datastore.close().unwrap();
    drop(datastore);
    // The images of this last checkpoint have nothing from which the leaf could be restored.
    open(&medium).close().unwrap();
    spoil(&medium, "checkpoint", 0);
    let map = medium.directory().open("map", IoMode::Buffered).unwrap();
    let mut page = Buffer::zeroed(1);
    for number in 0..PAGES {
        if map.read_at(&mut page, number * BLOCK).is_err() || page[0..4] != *b"LMND" || page[6] != 0 {
            continue;
        }
        let copy = medium.crash();
        spoil(&copy, "map", number);
        let datastore = open(&copy);
        let device = datastore.device("vm", false).unwrap();
        let offsets = (0..WRITTEN).map(|number| 2 * number * BLOCK);
        let (intact, lost): (Vec<u64>, Vec<u64>) = offsets.partition(|at| device.read(*at, BLOCK_SIZE).is_ok());
        if let (Some(lost), Some(intact)) = (lost.first(), intact.first()) {
            return (datastore, *lost, *intact);
        }
    }
    panic!("no page of the map is a leaf that is in use");
}

fn outcomes<const N: usize>(clients: [&dyn Device; N], request: impl Fn(&dyn Device) -> Result<()>) -> [bool; N] {
    clients.map(|client| request(client).is_ok())
}

#[test]
fn every_client_is_told_of_lost_writes() {
    let (datastore, lost, intact) = damaged();
    let [a, b] = [(); 2].map(|()| datastore.device("vm", false).unwrap());
    let reader = datastore.device("vm", true).unwrap();
    a.write(lost, block(1), false).unwrap();
    let flush = |client: &dyn Device| client.flush();
    let durable = |client: &dyn Device| client.write(intact, block(2), true);
    assert_eq!(outcomes([&*b, &*a, &*b, &*a], flush), [false, false, true, true]);
    // A client that connects later has lost nothing.
    let late = datastore.device("vm", false).unwrap();
    assert_eq!(outcomes([&*b, &*a, &*b, &*a, &*late], durable), [false, false, true, true, true]);
    assert_eq!(outcomes([&*late, &*reader], flush), [true; 2]);
}

/// Each of the flushes may be for another part of a guest.
#[test]
fn all_flushes_that_cover_lost_writes_fail() {
    let (datastore, lost, _) = damaged();
    let client = datastore.device("vm", false).unwrap();
    client.write(lost, block(1), false).unwrap();
    let tickets = [(); 2].map(|()| client.begin_flush().unwrap());
    assert_eq!(tickets.map(|ticket| client.finish_flush(ticket).is_ok()), [false; 2]);
    client.flush().unwrap();
}

#[test]
fn a_failed_durable_write_during_a_migration_does_not_replace_the_report_by_a_flush() {
    for mirrored in [false, true] {
        let (datastore, lost, intact) = damaged();
        let client = datastore.device("vm", false).unwrap();
        let id = datastore.native.find_disk("vm").unwrap().id;
        let switch = datastore.switches.get(&Identity::Native(id)).unwrap();
        let disk = switch.device();
        let between: Arc<dyn Device> = if mirrored {
            Arc::new(MirrorDevice::new(disk, MemoryDevice::new(vec![0; CAPACITY as usize]), Base::Zeros).unwrap())
        } else {
            let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(NativeLayer::new(Arc::clone(&disk)))];
            let chain = Chain::open("vm", layers, chain::Options::default()).unwrap();
            Arc::new(Handover::new(Arc::new(chain), disk))
        };
        switch.exchange(between);
        let refused = client.write(lost, block(1), true).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        // The client repeats only the write that has failed, at another place.
        client.write(intact, block(2), true).unwrap();
        assert_eq!(outcomes([&*client; 2], |client| client.flush()), [false, true], "{mirrored}");
    }
}

/// The first device of a disk cannot report what the next one loses.
#[test]
fn losses_are_told_across_exchanges_of_the_device() {
    let (datastore, lost, _) = damaged();
    let client = datastore.device("vm", false).unwrap();
    let id = datastore.native.find_disk("vm").unwrap().id;
    let switch = datastore.switches.get(&Identity::Native(id)).unwrap();
    let disk = switch.device();
    switch.exchange(MemoryDevice::new(vec![0; CAPACITY as usize]));
    disk.write(lost, block(1), false).unwrap();
    disk.flush().unwrap_err();
    switch.exchange(Arc::clone(&disk));
    assert_eq!(outcomes([&*client; 2], |client| client.flush()), [false, true]);
    switch.exchange(disk);
    client.flush().unwrap();
}
