//! Tests of the format: a disk of stamped sectors, against a layer on the simulated disk or on files.

mod checking;
mod format;
mod hostile;
mod journal;
mod large;
mod maintenance;
mod many_tables;
mod model;
mod power_cuts;
mod qemu;
mod reclaim;
mod threads;

use super::{Options, SeSparse};
use crate::{Content, Extent, Layer, Result};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Buffer, Directory, File, IoMode};
use std::collections::BTreeMap;
use std::sync::Arc;
use testkit::Random;
use testkit::steps;
use work::NoProgress;

const GRAIN: u64 = 4096;
const SECTORS: u64 = GRAIN / 512;
/// The stamp of a sector that the layer does not store.
const ABSENT: u64 = u64::MAX;
const NAME: &str = "vm-000001-sesparse.vmdk";
const MIB: u64 = 1 << 20;

fn writing() -> Options {
    Options { write: true, ..Options::default() }
}

fn simulated(seed: u64) -> SimulatedDisk {
    SimulatedDisk::new(seed, SimulatedOptions::default())
}

/// A new image on a disk, with a durable name.
fn create(disk: &SimulatedDisk, mode: IoMode, capacity: u64, options: Options) -> SeSparse {
    let directory = disk.directory();
    let file = directory.create(NAME, mode).unwrap();
    directory.sync().unwrap();
    SeSparse::create(file, NAME, capacity, options).unwrap()
}

fn open(directory: &dyn Directory, mode: IoMode, options: Options) -> Result<SeSparse> {
    SeSparse::open(directory.open(NAME, mode).unwrap(), NAME, options)
}

/// Grains in which every word is a stamp.
fn stamped(count: u64, stamp: u64) -> Buffer {
    let mut buffer = Buffer::zeroed(count as usize);
    for word in buffer.as_chunks_mut::<8>().0 {
        *word = stamp.to_le_bytes();
    }
    buffer
}

/// All extents of a range.
fn map_all(layer: &dyn Layer, start: u64, length: u64) -> Result<Vec<Extent>> {
    let mut out = Vec::new();
    let mut at = start;
    while at < start + length {
        let before = out.len();
        layer.map(at..start + length, 7, &mut out)?;
        assert!(out.len() > before, "no extent at {at}");
        assert_eq!(out[before].start, at);
        for pair in out[before..].windows(2) {
            assert_eq!(pair[0].start + pair[0].length, pair[1].start);
        }
        at = out.last().map(|last| last.start + last.length).unwrap();
    }
    assert_eq!(at, start + length);
    Ok(out)
}

/// The stamp of each sector in a range.
fn stamps(layer: &dyn Layer, start: u64, length: u64) -> Result<Vec<u64>> {
    let _epoch = layer.epoch();
    let mut out = Vec::new();
    for extent in map_all(layer, start, length)? {
        let sectors = extent.length.div_ceil(512);
        match extent.content {
            Content::Absent => out.extend((0..sectors).map(|_| ABSENT)),
            Content::Zero => out.extend((0..sectors).map(|_| 0)),
            Content::Data { file, offset } => {
                let mut buffer = Buffer::with_bytes(extent.length as usize);
                let file = layer.file(file)?;
                file.read_at(&mut buffer, offset).unwrap();
                for sector in buffer[..extent.length as usize].chunks(512) {
                    let words = sector.as_chunks::<8>().0;
                    assert!(words.iter().all(|word| word == &words[0]), "a torn sector at {offset}");
                    out.push(u64::from_le_bytes(words[0]));
                }
            }
            Content::Encoded => panic!("no data is encoded here"),
        }
    }
    Ok(out)
}

/// The permitted stamps of each written grain, by sector. Grains without an entry here are absent.
#[derive(Clone, Default)]
struct Model {
    /// For each sector, the present stamp and all stamps since the last flush.
    grains: BTreeMap<u64, Vec<Vec<u64>>>,
}

impl Model {
    fn set(&mut self, first: u64, count: u64, stamp: u64) {
        for grain in first..first + count {
            let sectors = self.grains.entry(grain).or_insert_with(|| vec![vec![ABSENT]; SECTORS as usize]);
            for sector in sectors {
                sector.retain(|other| *other != stamp);
                sector.push(stamp);
            }
        }
    }

    fn flushed(&mut self) {
        for sector in self.grains.values_mut().flatten() {
            sector.drain(..sector.len() - 1);
        }
    }

    /// Checks that every grain has the stamp last written.
    fn compare(&self, layer: &dyn Layer) {
        for (grain, sectors) in &self.grains {
            let found = stamps(layer, grain * GRAIN, GRAIN).unwrap();
            let expected: Vec<u64> = sectors.iter().map(|sector| *sector.last().unwrap()).collect();
            assert_eq!(found, expected, "grain {grain}");
        }
    }

    /// Called after a power cut: checks that every sector has one of its permitted stamps; from then on, only the stamp
    /// found is permitted.
    fn settle(&mut self, layer: &dyn Layer) {
        for (grain, sectors) in &mut self.grains {
            let found = stamps(layer, grain * GRAIN, GRAIN).unwrap();
            for (index, (sector, found)) in sectors.iter_mut().zip(found).enumerate() {
                assert!(sector.contains(&found), "grain {grain} sector {index}: {found:x} is none of {sector:x?}");
                *sector = vec![found];
            }
        }
    }
}

/// Checks that the image has no finding in a check, for lamina and for other readers.
fn assert_clean(layer: &SeSparse) {
    let report = layer.check(false, &NoProgress).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// A random change, for a layer and a model.
struct Operation {
    first: u64,
    count: u64,
    /// The stamp of the new content; 0 for zeroing.
    stamp: u64,
    keep: bool,
}

impl Operation {
    /// Draws a change among `grains` grains in one of some 16 MiB parts of the disk, so that several tables are used.
    fn draw(random: &mut Random, slots: &[u64], grains: u64) -> Self {
        let slot = slots[random.below(slots.len() as u64) as usize];
        let count = if random.once_in(3) { 1 + random.below(grains / 2) } else { 1 + random.below(3) };
        let first = random.below(grains - count + 1);
        let stamp = if random.once_in(4) { 0 } else { random.next() | 1 };
        // The range is around the border of two pages of the table.
        Self { first: slot * 4096 + 512 - grains / 2 + first, count, stamp, keep: random.once_in(3) }
    }

    fn apply(&self, layer: &dyn Layer) -> Result<()> {
        let start = self.first * GRAIN;
        match self.stamp {
            0 => layer.zero(start..start + self.count * GRAIN, self.keep),
            stamp => {
                let data = stamped(self.count, stamp);
                let (one, other) = data.split_at((self.count / 2 * GRAIN) as usize);
                layer.write(start, &[one, other])
            }
        }
    }
}

/// A file in memory over the bytes of another file. It counts what an opening reads and writes.
struct MemoryFile {
    base: Arc<Vec<u8>>,
    changed: parking_lot::Mutex<(BTreeMap<u64, Vec<u8>>, u64)>,
}

impl MemoryFile {
    fn over(base: Arc<Vec<u8>>) -> Self {
        let length = base.len() as u64;
        Self { base, changed: parking_lot::Mutex::new((BTreeMap::new(), length)) }
    }

    fn page(&self, pages: &BTreeMap<u64, Vec<u8>>, page: u64) -> Vec<u8> {
        pages.get(&page).cloned().unwrap_or_else(|| {
            let mut bytes = vec![0; GRAIN as usize];
            let rest = self.base.get((page * GRAIN) as usize..).unwrap_or_default();
            let length = rest.len().min(bytes.len());
            bytes[..length].copy_from_slice(&rest[..length]);
            bytes
        })
    }
}

impl File for MemoryFile {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.changed.lock().1)
    }

    fn set_len(&self, length: u64) -> std::io::Result<()> {
        let mut changed = self.changed.lock();
        changed.0.split_off(&length.div_ceil(GRAIN));
        changed.1 = length;
        Ok(())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let changed = self.changed.lock();
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let within = (at % GRAIN) as usize;
            let part = (GRAIN as usize - within).min(buffer.len() - done);
            if at < changed.1 {
                let page = self.page(&changed.0, at / GRAIN);
                buffer[done..done + part].copy_from_slice(&page[within..within + part]);
            } else {
                buffer[done..done + part].fill(0);
            }
            done += part;
        }
        Ok(())
    }

    fn write_at(&self, slices: &[&[u8]], offset: u64, _durable: bool) -> std::io::Result<()> {
        let mut changed = self.changed.lock();
        let bytes = slices.concat();
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let within = (at % GRAIN) as usize;
            let part = (GRAIN as usize - within).min(bytes.len() - done);
            let mut page = self.page(&changed.0, at / GRAIN);
            page[within..within + part].copy_from_slice(&bytes[done..done + part]);
            changed.0.insert(at / GRAIN, page);
            done += part;
        }
        changed.1 = changed.1.max(offset + bytes.len() as u64);
        Ok(())
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> std::io::Result<()> {
        let zeros = vec![0; length as usize];
        self.write_at(&[&zeros], offset, false)
    }
}
