//! Wrong bytes in the metadata of closed and of crashed images. Redundantly stored values are found and repaired.
//! Damage without proof is reported by grain, and reads return an error or the right data, but never other data.
//!
//! `LAMINA_FLIPS` sets the number of flips, `LAMINA_SEED` the first seed.

#![allow(clippy::unwrap_used)]

mod flips {
    mod hosted;
    mod sesparse;
}

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Directory, File, IoMode};
use error::{ErrorKind, Result};
use layer::{Content, Layer};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use testkit::Random;

const NAME: &str = "image.vmdk";
const SECTOR: u64 = 512;

/// An image on its own disk, with the content of each grain. A content is the number of the write that made it, or 0
/// for zeros.
struct World {
    disk: SimulatedDisk,
    capacity: u64,
    grain: u64,
    model: BTreeMap<u64, u32>,
    /// Whether absent grains are read from a parent.
    parent: bool,
    /// Whether the image was not closed.
    killed: bool,
}

/// The content of all grains of the parent.
const PARENT: u32 = u32::MAX;

impl World {
    fn expected(&self, grain: u64) -> u32 {
        self.model.get(&grain).copied().unwrap_or(if self.parent { PARENT } else { 0 })
    }

    /// Writes grains with content `number`, or zeros them, and flushes now and then.
    fn change(&mut self, layer: &dyn Layer, random: &mut Random, number: u32, grains: Range<u64>) {
        let range = grains.start * self.grain..(grains.end * self.grain).min(self.capacity);
        let number = if random.below(5) == 0 {
            layer.zero(range, false).unwrap();
            0
        } else {
            layer.write(range.start, &[&content(number, range.end - range.start)]).unwrap();
            number
        };
        grains.for_each(|grain| _ = self.model.insert(grain, number));
        if random.below(4) == 0 {
            layer.flush().unwrap();
        }
    }

    fn copy(&self) -> SimulatedDisk {
        self.disk.copy_of_durable(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() })
    }

    /// A copy in which one byte is combined with `mask` by XOR.
    fn damaged(&self, offset: u64, mask: u8) -> SimulatedDisk {
        let disk = self.copy();
        (0..8).filter(|bit| mask >> bit & 1 == 1).for_each(|bit| disk.flip_bit(NAME, offset, bit).unwrap());
        disk
    }

    /// Grains that cannot be read, and wrong grains with their content.
    fn compare(&self, layer: &dyn Layer) -> (Vec<u64>, Vec<(u64, Option<u32>)>) {
        let (mut lost, mut wrong) = (Vec::new(), Vec::new());
        let absent = if self.parent { PARENT } else { 0 };
        for grain in 0..self.capacity.div_ceil(self.grain) {
            // Most of a disk is not written: one grain per table is checked there.
            if !self.is_interesting(grain) {
                continue;
            }
            match read_grain(layer, self.grain, grain, absent) {
                Ok(found) if found == Some(self.expected(grain)) => {}
                Ok(found) => wrong.push((grain, found)),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                    lost.push(grain);
                }
            }
        }
        (lost, wrong)
    }

    fn is_interesting(&self, grain: u64) -> bool {
        let near = |grain: u64| self.model.contains_key(&grain);
        (grain.saturating_sub(2)..=grain + 2).any(near) || grain.is_multiple_of(61)
    }
}

fn content(number: u32, bytes: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(bytes as usize / 4)
}

/// The number of the write that made the content of a grain; `None` for other content.
fn read_grain(layer: &dyn Layer, size: u64, grain: u64, absent: u32) -> Result<Option<u32>> {
    let end = ((grain + 1) * size).min(layer.capacity());
    let Range { start, end } = grain * size..end;
    let (mut at, mut found) = (start, Vec::new());
    while at < end {
        let mut extents = Vec::new();
        layer.map(at..end, 8, &mut extents)?;
        for extent in extents {
            let length = extent.length as usize;
            match extent.content {
                Content::Absent => found.extend(content(absent, extent.length)),
                Content::Zero => found.resize(found.len() + length, 0),
                Content::Data { file, offset } => {
                    let mut bytes = vec![0; length];
                    layer.file(file)?.read_at(&mut bytes, offset).unwrap();
                    found.extend(bytes);
                }
                Content::Encoded => panic!("no data is encoded here"),
            }
            at = extent.start + extent.length;
        }
    }
    let number = u32::from_le_bytes(found[..4].try_into().unwrap());
    Ok((found == content(number, end - start)).then_some(number))
}

fn open_file(disk: &SimulatedDisk) -> Arc<dyn File> {
    disk.directory().open(NAME, IoMode::Buffered).unwrap()
}

fn new_disk(seed: u64) -> SimulatedDisk {
    SimulatedDisk::new(seed, SimulatedOptions { reorder: false, ..SimulatedOptions::default() })
}

fn new_file(disk: &SimulatedDisk) -> Arc<dyn File> {
    let directory: Arc<dyn Directory> = disk.directory();
    let file = directory.create(NAME, IoMode::Buffered).unwrap();
    directory.sync().unwrap();
    file
}

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

/// Counts of the results of all flips for one format.
#[derive(Default, Debug)]
struct Figures {
    tried: u64,
    /// Images that could be opened in no way.
    refused: u64,
    found: u64,
    harmless: u64,
    /// Flips that a check found and a repair corrected completely: every grain was right afterwards.
    mended: u64,
    /// Grains that are unproven after a repair; each is reported.
    unproven: u64,
}

/// Damages images by single flips. Every grain that then reads wrong must be reported by a check.
fn flips(seed: u64, count: u64, world: impl Fn(u64) -> World, one: impl Fn(&World, &mut Random, &mut Figures)) {
    let mut random = Random(seed);
    let mut figures = Figures::default();
    let mut round = seed;
    while figures.tried < count {
        let world = world(round);
        for _ in 0..20 {
            one(&world, &mut random, &mut figures);
        }
        round += 1;
    }
    println!("{figures:?}");
}
