//! Datastores of the format versions 3 to 8, each of which adds a way to store data in less space. They are kept under
//! `tests/golden/`, and every later version must open them, find no damage, and read the right content.
//!
//! A datastore of a version has what this version adds, and what the versions before have added. An image is compressed
//! by gzip: for each file a line `file NAME LENGTH`, then a line `OFFSET` with a block of 4 KiB after it for each block
//! that is not zeros. Images are never made anew once a version is released.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, Directory, IoMode, SharedSlice};
use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use store::catalog::Provisioning;
use store::engine::{CheckOptions, InitParameters, NewDisk, NewSnapshot, PRINTS_MAX, PackPass, SharePass};
use store::pack::{Codec, Packer};
use store::{Engine, EngineOptions};

const UUID: [u8; 16] = *b"0123456789abcdef";
/// Blocks of each disk.
const BLOCKS: u64 = 1024;
const MEMORY: usize = 1 << 20;
const VERSIONS: Range<u32> = 3..9;

fn options() -> EngineOptions {
    EngineOptions { metadata_cache: 2 << 20, write_buffer: 1 << 20, threads: false, ..EngineOptions::default() }
}

fn disk() -> SimulatedDisk {
    SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() })
}

// ---- images --------------------------------------------------------------------------------------------------------

fn image(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn store_image(name: &str, directory: &dyn Directory) {
    let mut out = GzEncoder::new(std::fs::File::create(image(name)).unwrap(), Compression::best());
    for name in directory.list().unwrap() {
        let file = directory.open(&name, IoMode::Buffered).unwrap();
        let length = file.len().unwrap();
        writeln!(out, "file {name} {length}").unwrap();
        for at in (0..length).step_by(BLOCK_SIZE) {
            let mut bytes = vec![0; (length - at).min(BLOCK_SIZE as u64) as usize];
            file.read_at(&mut bytes, at).unwrap();
            if bytes.iter().any(|byte| *byte != 0) {
                bytes.resize(BLOCK_SIZE, 0);
                writeln!(out, "{at}").unwrap();
                out.write_all(&bytes).unwrap();
            }
        }
    }
    out.finish().unwrap();
}

fn restored(name: &str) -> SimulatedDisk {
    let disk = disk();
    let directory = disk.directory();
    let path = image(name);
    let stored = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut lines = BufReader::new(GzDecoder::new(&stored[..]));
    let (mut line, mut file) = (String::new(), None);
    while lines.read_line(&mut line).unwrap() > 0 {
        match line.split_whitespace().collect::<Vec<&str>>()[..] {
            ["file", name, length] => {
                let made = directory.create(name, IoMode::Buffered).unwrap();
                let length: u64 = length.parse().unwrap();
                made.reserve(0, length).unwrap();
                file = Some((made, length));
            }
            [at] => {
                let (mut bytes, at) = (vec![0; BLOCK_SIZE], at.parse::<u64>().unwrap());
                lines.read_exact(&mut bytes).unwrap();
                let (file, length) = file.as_ref().unwrap();
                bytes.truncate((*length - at).min(BLOCK_SIZE as u64) as usize);
                file.write_at(&[&bytes], at, false).unwrap();
            }
            _ => panic!("{}: {line}", path.display()),
        }
        line.clear();
    }
    disk
}

// ---- content -------------------------------------------------------------------------------------------------------

/// Some bytes that depend on the number, and zeros: compressible, and different for each number but 0.
fn block(number: u64) -> Vec<u8> {
    let mut bytes = if number == 0 { Vec::new() } else { format!("block {number} ").repeat(8).into_bytes() };
    bytes.resize(BLOCK_SIZE, 0);
    bytes
}

fn id(engine: &Engine, disk: &str) -> u64 {
    engine.with_catalog(|catalog| catalog.disk(disk).unwrap().id)
}

/// Writes blocks with the numbers from `number` on: one by one.
fn write(engine: &Engine, disk: &str, logical: u64, numbers: Range<u64>) {
    let head = engine.head(id(engine, disk));
    for (logical, number) in (logical..).zip(numbers) {
        let data = SharedSlice::new(Arc::new(Buffer::copy_of(&block(number))), 0..BLOCK_SIZE);
        engine.write_blocks(&head, logical, data).unwrap();
    }
    engine.settle(&head).unwrap();
}

fn quiet(engine: &Engine) {
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
}

fn compress(engine: &Engine, disk: &str, range: Range<u64>) -> u64 {
    let mut pass = PackPass::new(Packer::new(Codec::Lz4).unwrap(), MEMORY, Vec::new());
    let (mut at, mut packed) = (range.start, 0);
    while at < range.end {
        let step = engine.pack_step(id(engine, disk), at..range.end, &mut pass).unwrap();
        (at, packed) = (step.next, packed + step.packed);
    }
    quiet(engine);
    packed
}

fn share(engine: &Engine) -> u64 {
    let disks = ["vm", "other"].map(|disk| (id(engine, disk), BLOCKS));
    let mut pass = SharePass::new(disks.to_vec(), PRINTS_MAX);
    let mut shared = 0;
    loop {
        let step = engine.share_step(&mut pass).unwrap();
        shared += step.shared;
        if step.ended {
            quiet(engine);
            return shared;
        }
    }
}

fn new_disk(name: &str) -> NewDisk {
    let capacity = BLOCKS * BLOCK_SIZE as u64;
    NewDisk { name: name.into(), capacity, provisioning: Provisioning::Thin, uuid: UUID, incomplete: false }
}

/// The blocks of the disks and the snapshot of a datastore of this version: first logical block, and numbers.
fn content(version: u32) -> Vec<(&'static str, u64, Range<u64>)> {
    let added = [
        (3, "vm", 0, 1..5),
        (3, "vm", 4, 1000..1002),
        (3, "vm", 6, 7..33),
        (3, "vm", 32, 0..1),
        (3, "vm@monday", 0, 1..33),
        (4, "vm", 100, 101..117),
        (4, "other", 200, 101..109),
        (4, "other", 208, 2000..2001),
        (4, "other", 209, 110..117),
        (5, "vm", 256, 300..364),
        (6, "vm", 400, 400..432),
        (6, "other", 512, 400..432),
        (6, "other", 600, 1..5),
        (7, "other", 700, 500..564),
        (7, "vm", 800, 500..510),
        (7, "vm", 810, 3000..3001),
        (7, "vm", 811, 511..564),
        (8, "vm", 960, 600..632),
        (8, "other", 850, 600..610),
        (8, "other", 860, 4000..4001),
        (8, "other", 861, 611..632),
    ];
    added.into_iter().filter(|(of, ..)| *of <= version).map(|(_, name, at, numbers)| (name, at, numbers)).collect()
}

/// A datastore of this version, which is not closed.
fn make_version(directory: &Arc<dyn Directory>, version: u32) -> Arc<Engine> {
    Engine::init(directory, InitParameters { uuid: UUID, journal_size: 4 << 20 }).unwrap();
    let engine = Engine::open(Arc::clone(directory), options()).unwrap();
    let vm = engine.create_disk(new_disk("vm")).unwrap();
    let other = engine.create_disk(new_disk("other")).unwrap();
    // 3: blocks of a disk and a snapshot in a pack, of which the disk overwrites two.
    write(&engine, "vm", 0, 1..33);
    quiet(&engine);
    let monday = NewSnapshot { disk: vm, name: "monday".into(), uuid: UUID, incomplete: false };
    engine.snapshot(&[monday]).unwrap();
    assert!(compress(&engine, "vm", 0..32) > 24);
    write(&engine, "vm", 4, 1000..1002);
    quiet(&engine);
    if version >= 4 {
        // Plain blocks that two disks share, of which one disk overwrites one.
        write(&engine, "vm", 100, 101..117);
        write(&engine, "other", 200, 101..117);
        quiet(&engine);
        assert_eq!(share(&engine), 16);
        write(&engine, "other", 208, 2000..2001);
        quiet(&engine);
    }
    if version >= 5 {
        // Two windows that were compressed when they were written.
        engine.pack_writes_of(&[(vm, Codec::Lz4)]).unwrap();
        write(&engine, "vm", 256, 300..364);
        quiet(&engine);
        engine.pack_writes_of(&[]).unwrap();
    }
    if version >= 6 {
        // A pack of blocks that two disks share, and blocks that are shared with an older pack.
        write(&engine, "vm", 400, 400..432);
        write(&engine, "other", 512, 400..432);
        quiet(&engine);
        assert_eq!(share(&engine), 32);
        assert!(compress(&engine, "vm", 400..432) > 24);
        write(&engine, "other", 600, 1..5);
        quiet(&engine);
        assert_eq!(share(&engine), 4);
    }
    if version >= 7 {
        // Blocks that were found when they were written again, of which the other disk overwrites one.
        engine.share_writes_of(&[(vm, "d".into()), (other, "d".into())], MEMORY);
        write(&engine, "other", 700, 500..564);
        quiet(&engine);
        write(&engine, "vm", 800, 500..564);
        quiet(&engine);
        assert_eq!(engine.shared_writes(), 64);
        write(&engine, "vm", 810, 3000..3001);
        quiet(&engine);
    }
    if version >= 8 {
        // A pack that was found when its blocks were written again, of which the other disk overwrites one.
        engine.pack_writes_of(&[(vm, Codec::Lz4), (other, Codec::Lz4)]).unwrap();
        write(&engine, "vm", 960, 600..632);
        quiet(&engine);
        write(&engine, "other", 850, 600..632);
        quiet(&engine);
        assert_eq!(engine.shared_writes(), 64 + 32);
        write(&engine, "other", 860, 4000..4001);
        quiet(&engine);
        engine.pack_writes_of(&[]).unwrap();
    }
    assert_eq!(engine.format_version(), version);
    engine
}

fn has_content(engine: &Engine, version: u32) {
    for (name, logical, numbers) in content(version) {
        let (disk, snapshot) = name.split_once('@').map_or((name, None), |(disk, name)| (disk, Some(name)));
        let disk = id(engine, disk);
        let snapshot = snapshot.map(|name| engine.with_catalog(|catalog| catalog.snapshot(disk, name).unwrap().id));
        for (logical, number) in (logical..).zip(numbers) {
            let plan = |range| match snapshot {
                Some(snapshot) => engine.plan_snapshot(snapshot, range),
                None => engine.plan_head(&engine.head(disk), range),
            };
            let found = engine.read_blocks(name, logical..logical + 1, &plan).unwrap();
            assert!(found[..] == block(number)[..], "version {version}: block {logical} of {name}");
        }
    }
    let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
    assert_eq!((report.findings, report.leaked), (vec![], 0), "version {version}");
}

/// The name of the image of a closed datastore, or of one whose journal has changes that no checkpoint contains.
fn name(version: u32, closed: bool) -> String {
    format!("v{version}-{}.gz", if closed { "closed" } else { "crashed" })
}

/// Makes writes and discards that are only in the journal.
fn write_more(engine: &Engine, version: u32) {
    write(engine, "vm", 0, 1..5);
    let head = engine.head(id(engine, "vm"));
    engine.discard_blocks(&head, 32..33).unwrap();
    if version >= 4 {
        write(engine, "other", 208, 2000..2001);
    }
    if version >= 8 {
        // A part of the pack is mapped again.
        write(engine, "other", 850, 600..604);
    }
    engine.flush().unwrap();
}

#[test]
#[ignore = "makes the datastores anew: never for released versions"]
fn make() {
    for version in VERSIONS {
        for closed in [true, false] {
            let directory = disk().directory();
            let engine = make_version(&directory, version);
            if closed {
                engine.close().unwrap();
            } else {
                write_more(&engine, version);
            }
            drop(engine);
            store_image(&name(version, closed), &*directory);
        }
    }
}

#[test]
fn datastores_of_versions_3_to_8_open_with_their_content_and_keep_their_versions() {
    for version in VERSIONS {
        for closed in [true, false] {
            let disk = restored(&name(version, closed));
            for round in 0..2 {
                let engine = Engine::open(disk.directory(), options()).unwrap();
                assert_eq!((engine.uuid(), engine.format_version()), (UUID, version), "{}", name(version, closed));
                has_content(&engine, version);
                // A write uses nothing new. The second round finds the same content after it.
                write(&engine, "vm", 900, 5000..5010);
                assert_eq!(engine.format_version(), version, "round {round}");
                engine.close().unwrap();
            }
        }
    }
}

/// The program that makes the datastores makes the same ones that are kept, as far as the content goes.
#[test]
fn this_version_still_writes_what_each_version_adds() {
    for version in VERSIONS {
        let disk = disk();
        let engine = make_version(&disk.directory(), version);
        has_content(&engine, version);
        engine.close().unwrap();
        drop(engine);
        has_content(&Engine::open(disk.directory(), options()).unwrap(), version);
    }
}
