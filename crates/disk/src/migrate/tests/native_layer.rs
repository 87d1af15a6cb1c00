//! A native disk as an overlay above a flat image: compared with a model, during normal use and after power cuts.

use super::super::NativeLayer;
use super::super::testbed::{placed, range};
use crate::{ChainedDevice, Datastore, Device, InitOptions, NewDisk, NoProgress, Provisioning};
use backend::IoMode;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use chain::Chain;
use layer::flat::{Flat, FlatOptions};
use layer::{Content, Layer};
use std::sync::Arc;
use std::time::Duration;
use store::EngineOptions;
use testkit::Random;

/// The capacity is not a multiple of the block size.
const CAPACITY: usize = (1 << 20) + 1536;
const BASE: &str = "base.img";

fn options(seed: u64) -> EngineOptions {
    EngineOptions {
        mode: if seed.is_multiple_of(2) { IoMode::Buffered } else { IoMode::Direct },
        metadata_cache: 1 << 20,
        write_buffer: 256 << 10,
        read_cache: 256 << 10,
        cache_plain: true,
        commit_interval: Duration::from_secs(10),
        threads: false,
        write_through: !seed.is_multiple_of(3),
    }
}

fn base_content(seed: u64) -> Vec<u8> {
    let mut random = Random(seed ^ 0xba5e);
    (0..CAPACITY).map(|at| if at / 8192 % 3 == 0 { 0 } else { random.next() as u8 }).collect()
}

/// The overlay above the image, both in one simulated directory.
struct World {
    datastore: Arc<Datastore>,
    overlay: Arc<NativeLayer>,
    device: ChainedDevice,
}

impl World {
    fn make(medium: &SimulatedDisk, seed: u64) {
        let folder = medium.directory();
        Datastore::init_in(medium.directory(), InitOptions { journal_size: 4 << 20 }).unwrap();
        let file = folder.create(BASE, IoMode::Buffered).unwrap();
        file.write_at(&[&base_content(seed)], 0, false).unwrap();
        file.sync().unwrap();
        folder.sync().unwrap();
        let datastore = Datastore::open_in(medium.directory(), options(seed)).unwrap();
        datastore.create_disk("over", &NewDisk::native(CAPACITY as u64, Provisioning::Thin), &NoProgress).unwrap();
        datastore.close().unwrap();
    }

    fn open(medium: &SimulatedDisk, seed: u64) -> Self {
        let datastore = Datastore::open_in(medium.directory(), options(seed)).unwrap();
        let overlay = Arc::new(NativeLayer::new(datastore.device("over", false).unwrap()));
        let file = medium.directory().open(BASE, IoMode::Buffered).unwrap();
        let flat = FlatOptions { offset: 0, capacity: None, writable: false, thin: false };
        let layers: Vec<Arc<dyn Layer>> = vec![overlay.clone(), Flat::open(file, BASE, flat).unwrap()];
        let chain = Chain::open("over", layers, chain::Options::default()).unwrap();
        Self { datastore, overlay, device: ChainedDevice::new("over", Arc::new(chain)) }
    }
}

#[test]
fn a_native_disk_above_an_image_reads_as_one_disk() {
    for seed in 0..12 {
        let medium = SimulatedDisk::new(seed, SimulatedOptions::default());
        World::make(&medium, seed);
        let world = World::open(&medium, seed);
        let mut model = base_content(seed);
        let mut random = Random(seed);
        for _ in 0..400 {
            let (offset, length) = range(&mut random, CAPACITY as u64, 200 << 10);
            let part = offset as usize..(offset + length) as usize;
            match random.below(10) {
                0 => {
                    world.device.discard(offset, length, false).unwrap();
                    model[part].fill(0);
                }
                1 => {
                    world.device.write_zeroes(offset, length, random.percent(50), random.percent(20)).unwrap();
                    model[part].fill(0);
                }
                2 => world.device.flush().unwrap(),
                3 => while world.datastore.engine().pump().unwrap() {},
                4 | 5 => assert!(world.device.read(offset, length as usize).unwrap() == model[part], "seed {seed}"),
                _ => {
                    let bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
                    // The data has the alignment in memory that needs no copy, or a random alignment.
                    let lead = if random.percent(50) { offset } else { random.below(4096) };
                    world.device.write(offset, placed(lead, &bytes), random.percent(10)).unwrap();
                    model[part].copy_from_slice(&bytes);
                }
            }
        }
        assert!(world.device.read(0, CAPACITY).unwrap() == model, "seed {seed}");
        assert!(world.overlay.usage().unwrap().mapped > 0);
    }
}

#[test]
fn discarded_ranges_never_show_the_image_again() {
    let medium = SimulatedDisk::new(1, SimulatedOptions::default());
    World::make(&medium, 0);
    let world = World::open(&medium, 0);
    let mut extents = Vec::new();
    world.overlay.map(0..CAPACITY as u64, 10, &mut extents).unwrap();
    assert!(matches!(extents.as_slice(), [one] if one.content == Content::Absent));
    world.device.write(8192, placed(0, &[1; 8192]), false).unwrap();
    world.device.discard(12288, 4096, true).unwrap();
    extents.clear();
    world.overlay.map(8192..20480, 10, &mut extents).unwrap();
    let found: Vec<_> = extents.iter().map(|extent| (extent.start, extent.length, extent.content)).collect();
    assert_eq!(found, [(8192, 4096, Content::Encoded), (12288, 4096, Content::Zero), (16384, 4096, Content::Absent)]);
    assert!(world.device.read(12288, 4096).unwrap() == vec![0; 4096]);
}

/// For each sector, the versions that it may have after a power cut: the last durable version, or any version written
/// since.
type Sectors = Vec<Vec<u64>>;

fn sector(version: u64, at: usize) -> [u8; 512] {
    let mut bytes = [0; 512];
    if version > 0 {
        for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(version << 32 | (at as u64) << 8 | i as u64).to_le_bytes());
        }
    }
    bytes
}

#[test]
fn flushed_writes_survive_a_power_cut() {
    const SECTORS: usize = CAPACITY / 512;
    for seed in 0..60 {
        let mut medium =
            SimulatedDisk::new(seed, SimulatedOptions { unflushed_max: 64, ..SimulatedOptions::default() });
        World::make(&medium, seed);
        // A sector that still has the image's non-zero bytes counts as version 1: it is compared as bytes and marked
        // with `u64::MAX`.
        let base = base_content(seed);
        let mut sectors: Sectors = vec![vec![u64::MAX]; SECTORS];
        let mut random = Random(seed);
        let mut version = 0;
        for _ in 0..4 {
            medium.cut_after(medium.operations() + 20 + random.below(120));
            // If the power cut happens while the datastore is opened, nothing is written in this round.
            let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| World::open(&medium, seed)));
            if let Ok(world) = opened {
                while !medium.is_off() {
                    let start = random.below(SECTORS as u64 - 64) as usize;
                    let count = 1 + random.below(64) as usize;
                    let (offset, length) = (start as u64 * 512, count * 512);
                    version += 1;
                    let outcome = match random.below(8) {
                        0 => {
                            sectors[start..start + count].iter_mut().for_each(|versions| versions.push(0));
                            world.device.discard(offset, length as u64, false)
                        }
                        1 => world.device.flush().inspect(|()| {
                            sectors.iter_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
                        }),
                        2 => world.datastore.engine().pump().map(|_| ()),
                        _ => {
                            let mut bytes = Vec::with_capacity(length);
                            for (at, versions) in sectors.iter_mut().enumerate().skip(start).take(count) {
                                versions.push(version);
                                bytes.extend(sector(version, at));
                            }
                            world.device.write(offset, placed(offset, &bytes), false)
                        }
                    };
                    if outcome.is_err() {
                        assert!(medium.is_off(), "seed {seed}: {:?}", outcome.err());
                    }
                }
            }
            medium = medium.crash();
            let world = World::open(&medium, seed);
            let found = world.device.read(0, CAPACITY).unwrap();
            for (at, versions) in sectors.iter_mut().enumerate() {
                let bytes = &found[at * 512..(at + 1) * 512];
                let holds = |version: &u64| match *version {
                    u64::MAX => bytes == &base[at * 512..(at + 1) * 512],
                    version => bytes == sector(version, at),
                };
                let Some(now) = versions.iter().copied().find(holds) else {
                    panic!("seed {seed}: sector {at} is none of {versions:?}");
                };
                *versions = vec![now];
            }
            world.datastore.close().unwrap();
        }
    }
}
