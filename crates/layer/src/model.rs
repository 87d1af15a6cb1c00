//! A model for tests of layers: sectors in plain memory, random operations on layer and model, and power cuts in
//! between.

use crate::aligned::AlignedFile;
use crate::{Content, ErrorKind, IoContext, Layer, Result, SECTOR};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{File, IoMode};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;
pub(crate) use testkit::Random;

/// A sector's content is represented by a stamp, a number written with it. This is the stamp of an absent sector.
pub(crate) const ABSENT: u64 = 0;
/// The stamp of zeros.
pub(crate) const ZEROS: u64 = 1;

/// The bytes of a sector with this stamp.
pub(crate) fn sector_bytes(lba: u64, stamp: u64) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    if stamp > ZEROS {
        for (at, word) in (0..).zip(bytes.chunks_exact_mut(16)) {
            let own = stamp.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ (lba << 8) ^ at;
            word[..8].copy_from_slice(&stamp.to_le_bytes());
            word[8..].copy_from_slice(&own.to_le_bytes());
        }
    }
    bytes
}

fn stamp_of(lba: u64, bytes: &[u8]) -> u64 {
    let mut stamp = [0; 8];
    stamp.copy_from_slice(&bytes[..8]);
    let stamp = u64::from_le_bytes(stamp).max(ZEROS);
    assert!(bytes == sector_bytes(lba, stamp), "sector {lba} is no complete sector of any write");
    stamp
}

/// Reads sectors as a chain would, and returns their stamps.
pub(crate) fn stamps(layer: &dyn Layer, sectors: Range<u64>) -> Result<Vec<u64>> {
    let mut out = Vec::new();
    let _epoch = layer.epoch();
    let mut at = sectors.start * SECTOR;
    let end = sectors.end * SECTOR;
    while at < end {
        let mut extents = Vec::new();
        layer.map(at..end, 1 + out.len() % 7, &mut extents)?;
        assert!(!extents.is_empty(), "at least one extent");
        for extent in extents {
            assert_eq!(extent.start, at, "extents adjoin");
            assert!(extent.length > 0 && extent.start + extent.length <= end);
            at += extent.length;
            let count = (extent.length / SECTOR) as usize;
            match extent.content {
                Content::Absent => out.resize(out.len() + count, ABSENT),
                Content::Zero => out.resize(out.len() + count, ZEROS),
                Content::Data { file, offset } => {
                    let file = AlignedFile::new(Arc::clone(layer.file(file)?));
                    let mut bytes = vec![0xa5; extent.length as usize];
                    // Another thread's operation may trigger the power cut between the lookup and this read.
                    file.read_at(&mut bytes, offset).during(|| format!("reading at {offset}"))?;
                    for (lba, sector) in (extent.start / SECTOR..).zip(bytes.chunks_exact(SECTOR as usize)) {
                        out.push(stamp_of(lba, sector));
                    }
                }
                Content::Encoded => panic!("no data is encoded here"),
            }
        }
    }
    Ok(out)
}

/// How the tests handle a format.
pub(crate) trait Subject {
    /// The type of the format's layers.
    type Layer: Layer;
    /// Creates an image.
    fn create(&self, file: Arc<dyn File>) -> Result<()>;
    /// Opens an image.
    fn open(&self, file: Arc<dyn File>, writable: bool) -> Result<Self::Layer>;
    /// Capacity in sectors.
    fn capacity(&self) -> u64;
    /// Maintenance that must not change the content: shrinking, checkpoints.
    fn maintain(&self, layer: &Self::Layer, number: u64) -> Result<()>;
    /// Fails the test when the format's check finds an error.
    fn check(&self, layer: &Self::Layer);
}

/// The model: the content of each sector, and the contents that a power cut may restore.
#[derive(Clone)]
struct Memory {
    now: Vec<u64>,
    /// Sectors written since the last flush, each with its content at that flush and every content since.
    unflushed: FxHashMap<u64, Vec<u64>>,
}

impl Memory {
    fn new(now: Vec<u64>) -> Self {
        Self { now, unflushed: FxHashMap::default() }
    }

    fn set(&mut self, lba: u64, stamp: u64) {
        let before = std::mem::replace(&mut self.now[lba as usize], stamp);
        self.unflushed.entry(lba).or_insert_with(|| vec![before]).push(stamp);
    }

    fn flushed(&mut self) {
        self.unflushed.clear();
    }

    /// Fails the test unless `found` is a permitted content of sector `lba` after a power cut.
    fn check_after_cut(&self, lba: u64, found: u64) {
        match self.unflushed.get(&lba) {
            Some(possible) => assert!(possible.contains(&found), "sector {lba} holds {found}, not one of {possible:?}"),
            None => assert_eq!(found, self.now[lba as usize], "sector {lba}, which was flushed"),
        }
    }
}

/// One test run: one image on one simulated disk.
pub(crate) struct Trial<'a, S: Subject> {
    subject: &'a S,
    mode: IoMode,
    disk: SimulatedDisk,
    memory: Memory,
    random: Random,
    stamp: u64,
}

const NAME: &str = "image";

impl<'a, S: Subject> Trial<'a, S> {
    pub(crate) fn new(subject: &'a S, seed: u64, mode: IoMode) -> Self {
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        let directory = disk.directory();
        subject.create(directory.create(NAME, mode).unwrap()).unwrap();
        directory.sync().unwrap();
        let size = subject.capacity() as usize;
        let memory = Memory::new(vec![ABSENT; size]);
        Self { subject, mode, disk, memory, random: Random::new(seed), stamp: ZEROS }
    }

    fn open(&self, writable: bool) -> Result<S::Layer> {
        self.subject.open(self.disk.directory().open(NAME, self.mode).unwrap(), writable)
    }

    /// A range of whole grains.
    fn range(&mut self, grain: u64) -> Range<u64> {
        let capacity = self.subject.capacity();
        let grains = capacity.div_ceil(grain);
        // Most operations are in a few ranges, as with guests.
        let first = match self.random.below(3) {
            0 => self.random.below(grains),
            1 => self.random.below(grains.min(64)),
            _ => (self.random.below(4) * grains / 4 + self.random.below(24)).min(grains - 1),
        };
        let count = match self.random.below(12) {
            0 => 1 + self.random.below(grains / 3),
            1..5 => 8,
            _ => 1 + self.random.below(20),
        };
        first * grain..((first + count) * grain).min(capacity)
    }

    /// Performs one random operation. An error is returned if the power was cut; otherwise it fails the test.
    fn step(&mut self, layer: &S::Layer) -> Result<()> {
        let grain = layer.grain() / SECTOR;
        match self.random.below(100) {
            0..60 => {
                let range = self.range(grain);
                self.stamp += 1;
                let bytes: Vec<u8> = range.clone().flat_map(|lba| sector_bytes(lba, self.stamp)).collect();
                range.clone().for_each(|lba| self.memory.set(lba, self.stamp));
                let cut = (self.random.below(bytes.len() as u64 / SECTOR + 1) * SECTOR) as usize;
                layer.write(range.start * SECTOR, &[&bytes[..cut], &[], &bytes[cut..]])
            }
            60..70 => {
                let range = self.range(grain);
                let keep = self.random.below(3) == 0;
                range.clone().for_each(|lba| self.memory.set(lba, ZEROS));
                layer.zero(range.start * SECTOR..range.end * SECTOR, keep)
            }
            70..78 => {
                layer.flush()?;
                self.memory.flushed();
                Ok(())
            }
            78..96 => {
                let range = self.range(grain);
                let found = stamps(layer, range.clone())?;
                for (lba, stamp) in range.zip(found) {
                    assert_eq!(stamp, self.memory.now[lba as usize], "sector {lba}");
                }
                Ok(())
            }
            _ => self.subject.maintain(layer, self.random.next()),
        }
    }

    fn compare(&self, layer: &S::Layer) {
        let found = stamps(layer, 0..self.subject.capacity()).unwrap();
        for (lba, (found, expected)) in found.iter().zip(&self.memory.now).enumerate() {
            assert_eq!(found, expected, "sector {lba}");
        }
    }

    /// Random operations, with closing and opening in between; all reads must equal the model.
    pub(crate) fn run(mut self, steps: u64) {
        let mut layer = self.open(true).unwrap();
        for _ in 0..steps {
            self.step(&layer).unwrap();
            if self.random.below(40) == 0 {
                let closes = self.random.below(3) > 0;
                match closes {
                    true => layer.close().unwrap(),
                    false => layer.flush().unwrap(),
                }
                if closes {
                    let refused = layer.write(0, &[&vec![0; layer.grain() as usize]]);
                    assert_eq!(refused.unwrap_err().kind(), ErrorKind::ReadOnly);
                }
                drop(layer);
                let reader = self.open(false).unwrap();
                self.compare(&reader);
                self.subject.check(&reader);
                drop(reader);
                layer = self.open(true).unwrap();
            }
        }
        self.compare(&layer);
        self.subject.check(&layer);
    }

    /// Random operations, with a power cut in one of them, several times. After each cut, flushed data must be there,
    /// every other sector must have its old or new content, and the format's check must find no error.
    pub(crate) fn run_with_cuts(mut self, steps: u64, cuts: u32) {
        for _ in 0..cuts {
            let operations = self.disk.operations();
            self.disk.cut_after(operations + self.random.below(steps * 2));
            let Ok(layer) = self.open(true) else {
                assert!(self.disk.is_off());
                self.disk = self.disk.crash();
                self.settle();
                continue;
            };
            for _ in 0..steps {
                if let Err(error) = self.step(&layer) {
                    assert!(self.disk.is_off(), "{error}");
                    break;
                }
            }
            // Sometimes the power is cut during the close.
            if !self.disk.is_off() && self.random.below(3) == 0 {
                let _ = layer.close().inspect(|()| self.memory.flushed());
            }
            drop(layer);
            self.disk = self.disk.crash();
            self.settle();
        }
    }

    /// Sets the model to the content that was found after the cut.
    fn settle(&mut self) {
        let reader = self.open(false).unwrap();
        let found = stamps(&reader, 0..self.subject.capacity()).unwrap();
        for (lba, found) in (0..).zip(&found) {
            self.memory.check_after_cut(lba, *found);
        }
        self.subject.check(&reader);
        drop(reader);
        let writer = self.open(true).unwrap();
        assert!(
            stamps(&writer, 0..self.subject.capacity()).unwrap() == found,
            "an opening for writing reads the same as one for reading"
        );
        writer.close().unwrap();
        self.memory = Memory::new(found);
    }
}

/// Threads write, flush and read their own sectors, which are neighbours of other threads' sectors, while another
/// thread maintains the image; then the power is cut. Data that each thread flushed must be there.
pub(crate) fn run_threads<S: Subject + Sync>(subject: &S, seed: u64, mode: IoMode, steps: u64) {
    const THREADS: u64 = 4;
    let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
    let directory = disk.directory();
    subject.create(directory.create(NAME, mode).unwrap()).unwrap();
    directory.sync().unwrap();
    let layer = subject.open(directory.open(NAME, mode).unwrap(), true).unwrap();
    let grain = layer.grain() / SECTOR;
    let grains = subject.capacity() / grain;
    if seed.is_multiple_of(2) {
        disk.cut_after(disk.operations() + 50 + seed % 7 * steps);
    }
    let size = subject.capacity() as usize;
    let empty = Memory::new(vec![ABSENT; size]);
    let memories: Vec<Memory> = std::thread::scope(|scope| {
        let (layer, disk, empty) = (&layer, &disk, &empty);
        let work = move |thread: u64| {
            let mut random = Random::new(seed * THREADS + thread);
            let mut memory = empty.clone();
            for step in 0..steps {
                // Every fourth grain belongs to this thread.
                let number = random.below(grains / THREADS) * THREADS + thread;
                let range = number * grain..(number + 1) * grain;
                let result = match random.below(20) {
                    0 => layer.flush().inspect(|()| memory.flushed()),
                    1..4 => stamps(layer, range.clone()).map(|found| {
                        for (lba, found) in range.clone().zip(found) {
                            assert_eq!(found, memory.now[lba as usize], "sector {lba}");
                        }
                    }),
                    4 if thread == 0 => subject.maintain(layer, random.next()),
                    _ => {
                        let stamp = 2 + step * THREADS + thread;
                        let bytes: Vec<u8> = range.clone().flat_map(|lba| sector_bytes(lba, stamp)).collect();
                        range.clone().for_each(|lba| memory.set(lba, stamp));
                        layer.write(range.start * SECTOR, &[&bytes])
                    }
                };
                if let Err(error) = result {
                    assert!(disk.is_off(), "{error}");
                    break;
                }
            }
            memory
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    drop(layer);
    let disk = disk.crash();
    let reader = subject.open(disk.directory().open(NAME, mode).unwrap(), false).unwrap();
    subject.check(&reader);
    let found = stamps(&reader, 0..subject.capacity()).unwrap();
    for (lba, found) in (0..).zip(found) {
        memories[(lba / grain % THREADS) as usize].check_after_cut(lba, found);
    }
}
