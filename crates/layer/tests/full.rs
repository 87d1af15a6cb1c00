//! A full file system under each writable format: requests that need space are refused before they are acknowledged,
//! and all others continue, down to the last free page of the simulated disk.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Directory, File, IoMode};
use error::{ErrorKind, Result};
use layer::flat::{Flat, FlatOptions};
use layer::hosted::{self, Hosted};
use layer::sesparse::{self, SeSparse};
use layer::vmfssparse::{self, VmfsSparse};
use layer::vsansparse::{self, VsanSparse};
use layer::{Content, Layer};
use std::collections::BTreeMap;
use std::sync::Arc;
use testkit::Random;

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 96 * MIB;
const ROOM: u64 = 12 * MIB;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Flat,
    VmfsSparse,
    SeSparse,
    VsanSparse,
    /// Hosted sparse; true with entries for zero grains.
    Hosted(bool),
}

const FORMATS: [Format; 6] = [
    Format::Flat,
    Format::VmfsSparse,
    Format::SeSparse,
    Format::VsanSparse,
    Format::Hosted(false),
    Format::Hosted(true),
];

impl Format {
    fn create(self, file: Arc<dyn File>) {
        match self {
            Self::Flat => file.set_len(CAPACITY).unwrap(),
            Self::VmfsSparse => {
                vmfssparse::create(file, "image", &vmfssparse::CreateOptions::new(CAPACITY)).unwrap();
            }
            Self::SeSparse => {
                let layer = SeSparse::create(file, "image", CAPACITY, sesparse::Options::default()).unwrap();
                layer.close().unwrap();
            }
            Self::VsanSparse => {
                let options = vsansparse::CreateOptions { capacity: CAPACITY, id: [7; 16] };
                vsansparse::create(file, "image", &options).unwrap();
            }
            Self::Hosted(zero_grains) => {
                let options = hosted::CreateOptions { capacity: CAPACITY, descriptor: None, zero_grains };
                hosted::create(&*file, "image", &options).unwrap();
            }
        }
    }

    fn open(self, file: Arc<dyn File>, parent: bool) -> Result<Arc<dyn Layer>> {
        Ok(match self {
            Self::Flat => {
                let options = FlatOptions { offset: 0, capacity: Some(CAPACITY), writable: true, thin: true };
                Flat::open(file, "image", options)?
            }
            Self::VmfsSparse => {
                let options = vmfssparse::OpenOptions { parent, ..vmfssparse::OpenOptions::writing("image") };
                Arc::new(VmfsSparse::open(file, &options)?)
            }
            Self::SeSparse => {
                Arc::new(SeSparse::open(file, "image", sesparse::Options { write: true, ..Default::default() })?)
            }
            Self::VsanSparse => {
                let options = vsansparse::OpenOptions { parent, ..vsansparse::OpenOptions::writing("image") };
                Arc::new(VsanSparse::open(file, &options)?)
            }
            Self::Hosted(_) => {
                let options = hosted::OpenOptions { image: "image".to_owned(), writable: true, parent, force: false };
                Arc::new(Hosted::open(file, &options)?)
            }
        })
    }
}

/// A layer with the content that it must have: the byte value of each written unit.
struct World {
    format: Format,
    parent: bool,
    storage: SimulatedDisk,
    directory: Arc<dyn Directory>,
    layer: Arc<dyn Layer>,
    unit: u64,
    written: BTreeMap<u64, u8>,
    random: Random,
}

impl World {
    fn new(format: Format, parent: bool, seed: u64) -> Self {
        let storage = SimulatedDisk::new(seed, SimulatedOptions { capacity: ROOM, ..SimulatedOptions::default() });
        let directory: Arc<dyn Directory> = storage.directory();
        let file = directory.create("image", IoMode::Buffered).unwrap();
        format.create(Arc::clone(&file));
        directory.sync().unwrap();
        let layer = format.open(file, parent).unwrap();
        let unit = layer.grain().max(4096);
        Self { format, parent, storage, directory, layer, unit, written: BTreeMap::new(), random: Random(seed) }
    }

    fn write(&mut self, unit: u64) -> Result<()> {
        let byte = 1 + self.random.below(255) as u8;
        let bytes = vec![byte; self.unit as usize];
        // A refused write may have been done in part, so the content of the unit is unknown.
        self.written.remove(&unit);
        self.layer.write(unit * self.unit, &[&bytes])?;
        self.written.insert(unit, byte);
        Ok(())
    }

    /// Writes new units until one finds no space; returns how many succeeded.
    fn fill(&mut self) -> u64 {
        for count in 0.. {
            let unit = loop {
                let unit = self.random.below(CAPACITY / self.unit);
                if !self.written.contains_key(&unit) {
                    break unit;
                }
            };
            match self.write(unit) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::NoSpace => return count,
                Err(error) => panic!("{error}"),
            }
        }
        unreachable!()
    }

    /// Simulates another program that takes all remaining pages.
    fn take_the_rest(&self, name: &str) {
        let left = self.directory.room().unwrap().available;
        if left > 0 {
            let file = self.directory.create(name, IoMode::Buffered).unwrap();
            file.reserve(0, left).unwrap();
            self.directory.sync().unwrap();
        }
        assert_eq!(self.directory.room().unwrap().available, 0);
    }

    fn overwrite_some(&mut self, count: u64) {
        let known: Vec<u64> = self.written.keys().copied().collect();
        for _ in 0..count {
            let unit = known[self.random.below(known.len() as u64) as usize];
            self.write(unit).unwrap_or_else(|error| panic!("an overwrite that fits: {error}"));
        }
    }

    fn read(&self, unit: u64) -> Vec<u8> {
        let (start, end) = (unit * self.unit, ((unit + 1) * self.unit).min(CAPACITY));
        let mut out = Vec::new();
        let _epoch = self.layer.epoch();
        while start + (out.len() as u64) < end {
            let mut extents = Vec::new();
            self.layer.map(start + out.len() as u64..end, 8, &mut extents).unwrap();
            for extent in extents {
                let mut bytes = vec![0; extent.length as usize];
                if let Content::Data { file, offset } = extent.content {
                    self.layer.file(file).unwrap().read_at(&mut bytes, offset).unwrap();
                }
                out.extend(bytes);
            }
        }
        out
    }

    fn verify(&self) {
        for (unit, byte) in &self.written {
            assert!(self.read(*unit).iter().all(|found| found == byte), "unit {unit}");
        }
    }

    fn reopen(&mut self) {
        let file = self.directory.open("image", IoMode::Buffered).unwrap();
        self.layer = self.format.open(file, self.parent).unwrap();
    }
}

fn go_on_where_there_is_no_room(format: Format, parent: bool, seed: u64) {
    let mut world = World::new(format, parent, seed);
    let count = world.fill();
    // Formats that allocate in large units may leave a part of the free space unused.
    assert!(count * world.unit > ROOM / 4, "{count} units of {} bytes fit", world.unit);
    world.take_the_rest("rest");

    // All acknowledged writes have their space, so the flush succeeds.
    world.layer.flush().unwrap();
    world.overwrite_some(300);
    world.layer.flush().unwrap();
    world.verify();
    for _ in 0..20 {
        let unit = world.random.below(CAPACITY / world.unit);
        match world.write(unit) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}"),
            Ok(()) => world.layer.flush().unwrap(),
        }
    }
    world.layer.flush().unwrap();

    // Discards succeed in written and in unwritten ranges, and free space where possible.
    for length in [1, 3, 40] {
        let unit = world.random.below(CAPACITY / world.unit - length);
        let before: Vec<Vec<u8>> = (unit..unit + length).map(|unit| world.read(unit)).collect();
        world.layer.discard(unit * world.unit..(unit + length) * world.unit).unwrap();
        for (unit, before) in (unit..).zip(before) {
            let after = world.read(unit);
            assert!(after == before || after.iter().all(|byte| *byte == 0), "neither zeros nor the old content");
            world.written.remove(&unit);
        }
        world.layer.flush().unwrap();
    }
    world.take_the_rest("given back");
    world.verify();

    // Closing loses no data, and the image can be opened on a full file system, after a close and after a crash.
    world.layer.close().unwrap();
    world.take_the_rest("cut off");
    world.reopen();
    world.verify();
    world.overwrite_some(100);
    world.layer.flush().unwrap();
    world.storage = world.storage.crash();
    world.directory = world.storage.directory();
    world.reopen();
    world.verify();
    world.overwrite_some(100);
    world.layer.flush().unwrap();

    // When there is space again, writes continue without reopening.
    for name in world.directory.list().unwrap().iter().filter(|name| *name != "image") {
        world.directory.remove(name).unwrap();
    }
    world.directory.sync().unwrap();
    world.storage.set_capacity(2 * ROOM);
    assert!(world.fill() * world.unit > ROOM / 4);
    world.layer.flush().unwrap();
    world.verify();
    world.layer.close().unwrap();
    world.reopen();
    world.verify();
}

#[test]
fn writes_that_need_no_space_succeed_on_a_full_file_system() {
    for format in FORMATS {
        for parent in [false, true] {
            for seed in 0..4 {
                println!("{format:?}, parent {parent}, seed {seed}");
                go_on_where_there_is_no_room(format, parent && format != Format::Flat, seed);
            }
        }
    }
}

#[test]
fn an_image_copied_with_holes_allocates_its_tables_again() {
    for format in FORMATS {
        let mut world = World::new(format, true, 5);
        let unit = world.unit;
        world.write(1).unwrap();
        world.layer.close().unwrap();
        // Punches all pages of zeros, as after a sparse copy.
        let file = world.directory.open("image", IoMode::Buffered).unwrap();
        let mut page = vec![0; 4096];
        for at in (0..file.len().unwrap()).step_by(4096) {
            file.read_at(&mut page, at).unwrap();
            if page.iter().all(|byte| *byte == 0) {
                file.punch(at, 4096).unwrap();
            }
        }
        file.sync().unwrap();
        world.reopen();
        let mut unflushed = 0;
        for at in 2..CAPACITY / unit {
            world.storage.set_capacity(ROOM);
            match world.write(at * 97 % (CAPACITY / unit)) {
                Ok(()) => unflushed += 1,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{format:?}: {error}");
                    break;
                }
            }
            // Other programs take the remaining space right after the write was acknowledged.
            let used = ROOM - world.directory.room().unwrap().available;
            world.storage.set_capacity(used);
            if unflushed % 8 == 0 {
                world.layer.flush().unwrap_or_else(|error| panic!("{format:?}: {error}"));
            }
        }
        world.layer.flush().unwrap();
        world.verify();
    }
}
