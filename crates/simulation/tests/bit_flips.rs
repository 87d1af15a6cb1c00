//! Single bits inverted on the medium. In data, one block cannot be read and `check` reports it. In metadata, the flip
//! is detected or has no effect. No read returns wrong data, and nothing panics.
#![allow(clippy::unwrap_used)]

use backend::BLOCK_SIZE;
use disk::{Allocation, CheckOptions, Datastore, Device, NoProgress, Segment};
use error::ErrorKind;
use simulation::operation::Profile;
use simulation::random::Random;
use simulation::regime::World;
use simulation::run::SimulationRun;
use simulation::scenario;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// An open datastore with a random history. Everything is written back and durable.
fn prepared(seed: u64) -> SimulationRun {
    // The read cache would hide damage to blocks that the history has read.
    let world = World { read_cache: 0, ..World::of(Profile::Model, seed) };
    let mut run = SimulationRun::within(seed, world).unwrap();
    let operations = scenario::operations(seed, Profile::Model, 600);
    for operation in &operations {
        run.step(operation).unwrap();
    }
    run
}

/// Blocks of a disk that hold data.
fn data_blocks(device: &dyn Device) -> Vec<u64> {
    let mut blocks = Vec::new();
    let mut at = 0;
    for extent in device.status(0, device.capacity(), usize::MAX).unwrap() {
        if extent.allocation == Allocation::Data {
            blocks.extend(at / BLOCK..(at + extent.length) / BLOCK);
        }
        at += extent.length;
    }
    blocks
}

/// Where the medium has a block, or the blocks with which it is compressed. `None` if it need not be read.
fn place(device: &dyn Device, block: u64) -> Option<u64> {
    let plan = device.plan_read(block * BLOCK, BLOCK_SIZE).unwrap();
    let Segment::Media(media) = &plan.segments[0] else { return None };
    Some(media.offset)
}

#[test]
fn a_flipped_bit_in_data_is_an_error_of_that_block_only_and_check_names_it() {
    let mut flips = 0;
    for seed in 0..20 {
        let run = prepared(seed);
        let datastore = run.datastore().unwrap();
        let mut random = Random::new(seed);
        let Some(name) = run.model.disks.keys().nth(random.below(run.model.disks.len() as u64) as usize) else {
            continue;
        };
        let device = datastore.device(name, true).unwrap();
        let blocks = data_blocks(&*device);
        let stored: Vec<(u64, u64)> =
            blocks.iter().filter_map(|block| Some((*block, place(&*device, *block)?))).collect();
        if stored.is_empty() {
            continue;
        }
        let (bad, at) = *random.pick(&stored);
        let (offset, bit) = (at + random.below(BLOCK), random.below(8) as u8);
        run.disk.flip_bit("data.0000", offset, bit).unwrap();
        flips += 1;

        let error = device.read(bad * BLOCK, BLOCK_SIZE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let image = &run.model.disks[name].image;
        // Deduplication or compression may have stored several blocks there.
        for block in blocks.iter().filter(|block| place(&*device, **block) != Some(at)) {
            assert_eq!(device.read(block * BLOCK, BLOCK_SIZE).unwrap(), image.block(*block), "{name}: block {block}");
        }
        let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
        assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
        let problem = &report.findings[0].problem;
        // Any owner may be reported, because a block may have many.
        assert!(problem.contains("checksum") && problem.contains("at offset"), "{problem}");
    }
    assert!(flips > 10);
}

/// Checks that every read returns the right data or a corruption error.
fn nothing_wrong_is_read(run: &SimulationRun, datastore: &Datastore, context: &str) {
    for title in run.model.titles() {
        let Ok(device) = datastore.device(&title, true) else { continue };
        let Some((image, capacity)) = run.model.image(&title) else { continue };
        if device.capacity() != capacity {
            panic!("{context}: {title} has another size");
        }
        for block in image.known(0..capacity.div_ceil(BLOCK)) {
            let length = BLOCK.min(capacity - block * BLOCK) as usize;
            match device.read(block * BLOCK, length) {
                Ok(found) => assert!(
                    found == image.block(block)[..length],
                    "{context}: {title}: block {block} reads as something it never was"
                ),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{context}: {title}: {error}"),
            }
        }
    }
}

#[test]
fn a_flipped_bit_in_metadata_is_detected_or_has_no_effect() {
    let mut noticed = 0;
    for seed in 100..104 {
        let run = prepared(seed);
        run.datastore().unwrap().close().unwrap();
        let mut random = Random::new(seed);
        let directory = run.disk.directory();
        let length = |name: &str| directory.open(name, backend::IoMode::Buffered).unwrap().len().unwrap();
        let names = directory.list().unwrap().into_iter().filter(|name| !name.starts_with("data.") && name != "lock");
        let files: Vec<(String, u64)> = names.map(|name| (name.clone(), length(&name))).collect();
        for (name, length) in &files {
            for _ in 0..12 {
                // Each flip is tried on its own copy of the medium.
                let medium = run.disk.clone().crash();
                let offset = match random.percent(50) {
                    true => random.below((*length).min(3 * BLOCK)),
                    false => random.below(*length),
                };
                if *length == 0 {
                    continue;
                }
                let bit = random.below(8) as u8;
                medium.flip_bit(name, offset, bit).unwrap();
                let context = format!("seed {seed}, {name}, offset {offset}, bit {bit}");
                match Datastore::open_in(medium.directory(), store_options()) {
                    Err(error) => {
                        let kinds = [ErrorKind::Corrupt, ErrorKind::Unsupported];
                        assert!(kinds.contains(&error.kind()), "{context}: {error}");
                        noticed += 1;
                    }
                    Ok(datastore) => {
                        nothing_wrong_is_read(&run, &datastore, &context);
                        match datastore.check(CheckOptions { data: true, repair: false }, &NoProgress) {
                            Ok(report) => noticed += u32::from(!report.findings.is_empty()),
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::Corrupt, "{context}: {error}");
                                noticed += 1;
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(noticed > 20, "only {noticed} flips were noticed");
}

fn store_options() -> store::EngineOptions {
    store::EngineOptions { threads: false, metadata_cache: 1 << 20, write_buffer: 1 << 20, ..Default::default() }
}
