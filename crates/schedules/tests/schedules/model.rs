//! The contents that the disks and snapshots of a schedule may have, by sector.
//!
//! 1. Each sector has one writer at a time, so its versions are ordered. A write adds its version before it begins, and
//!    acknowledges the version at its end.
//! 2. A read returns a version between the last one acknowledged when the read began and the last one begun when it
//!    ended.
//! 3. A successful flush raises the floor of every sector to the version acknowledged when the flush began. After a
//!    power cut a sector has its floor or a later version.
//! 4. A snapshot has a version between the one acknowledged when the snapshot was requested and the last one begun when
//!    it was taken. The first read determines which.
//! 5. A change of the catalog that a power cut interrupts was made completely or not at all.

use backend::BLOCK_SIZE;
use std::collections::BTreeMap;
use std::ops::Range;

/// The unit that a medium writes atomically, in bytes.
pub const SECTOR: usize = 512;
/// Sectors of a block.
pub const SECTORS: usize = BLOCK_SIZE / SECTOR;
/// The bits of a content word that have the number of its sector. The other bits have the number of its write.
const PLACE_BITS: u32 = 16;

/// The versions of a sector: the numbers of their contents; 0 stands for zeros. Each write has a content of its own,
/// except in schedules with equal blocks.
#[derive(Clone, Debug)]
pub struct Sector {
    versions: Vec<u64>,
    acknowledged: usize,
    floor: usize,
}

impl Default for Sector {
    fn default() -> Self {
        Self { versions: vec![0], acknowledged: 0, floor: 0 }
    }
}

/// The contents that a disk or snapshot may have.
#[derive(Clone, Debug)]
pub struct Image {
    /// Unique among images. So a flush that began before a revert does not raise the floors of the image after it.
    pub generation: u64,
    /// The sectors, by their numbers.
    pub sectors: Vec<Sector>,
}

/// How an operation under way may change an object.
#[derive(Clone, Debug)]
pub enum Fate {
    /// No operation is under way.
    Stays,
    /// The object is being created, and may not exist yet.
    Coming,
    /// The object is being deleted, and may not exist any more.
    Going,
    /// The object may have this content instead.
    Becoming(Image),
}

/// A disk or snapshot.
#[derive(Clone, Debug)]
pub struct Object {
    /// The id, once it is known.
    pub id: u64,
    /// Of a snapshot: the name of its disk.
    pub of: Option<String>,
    /// The contents that the object may have.
    pub image: Image,
    /// The effect of an operation under way.
    pub fate: Fate,
}

/// The disks and snapshots of a store.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// The objects by name. No name is used twice.
    pub objects: BTreeMap<String, Object>,
    last: u64,
}

/// What a flush covers: by generation of the image, the acknowledged version of each sector.
pub type Covered = BTreeMap<u64, Vec<usize>>;

/// A word of the content of `sector` after `write`.
fn word(write: u64, sector: usize) -> u64 {
    if write == 0 { 0 } else { write << PLACE_BITS | sector as u64 }
}

/// Fills in the content of `sector` after `write`.
pub fn fill(write: u64, sector: usize, bytes: &mut [u8]) {
    let word = word(write, sector).to_le_bytes();
    bytes.chunks_exact_mut(word.len()).for_each(|part| part.copy_from_slice(&word));
}

impl Image {
    /// The oldest versions that reads may return if they begin now.
    pub fn acknowledged(&self, sectors: Range<usize>) -> Vec<usize> {
        self.sectors[sectors].iter().map(|sector| sector.acknowledged).collect()
    }

    /// Begins a write of sectors.
    pub fn begin(&mut self, sectors: Range<usize>, write: u64) {
        self.sectors[sectors].iter_mut().for_each(|sector| sector.versions.push(write));
    }

    /// Ends a write: its version is acknowledged.
    pub fn end(&mut self, sectors: Range<usize>) {
        self.sectors[sectors].iter_mut().for_each(|sector| sector.acknowledged = sector.versions.len() - 1);
    }

    /// Checks the content read from sector `first` on. Each sector must have its version in `least` or a later one.
    /// With `settle` the version found is from now on the only one.
    pub fn judge(&mut self, first: usize, bytes: &[u8], least: &[usize], settle: bool) -> Result<(), String> {
        for (i, found) in bytes.chunks_exact(SECTOR).enumerate() {
            let number = first + i;
            let sector = &mut self.sectors[number];
            let is = |version: u64| {
                let word = word(version, number).to_le_bytes();
                found.chunks_exact(word.len()).all(|part| part == word)
            };
            let allowed = least[i]..sector.versions.len();
            match sector.versions[allowed.clone()].iter().rposition(|version| is(*version)) {
                Some(at) if settle => {
                    sector.acknowledged = allowed.start + at;
                    sector.versions.truncate(sector.acknowledged + 1);
                }
                Some(_) => {}
                None => {
                    let text = describe(found);
                    let (block, part) = (number / SECTORS, number % SECTORS);
                    return Err(format!(
                        "sector {part} of block {block} holds {text}; allowed are versions {allowed:?} of {:?}",
                        sector.versions
                    ));
                }
            }
        }
        Ok(())
    }

    /// Adds the versions that the source of a copied image has got since.
    pub fn catch_up(&mut self, source: &Image) {
        for (sector, source) in self.sectors.iter_mut().zip(&source.sectors) {
            sector.versions.clone_from(&source.versions);
        }
    }

    /// The oldest versions that may be found after a power cut.
    pub fn floors(&self) -> Vec<usize> {
        self.sectors.iter().map(|sector| sector.floor).collect()
    }

    /// Makes the acknowledged version of each sector durable, and the only one that is allowed.
    pub fn pin(&mut self) {
        for sector in &mut self.sectors {
            let now = sector.versions[sector.acknowledged];
            *sector = Sector { versions: vec![now], acknowledged: 0, floor: 0 };
        }
    }
}

fn describe(found: &[u8]) -> String {
    let mut words: Vec<u64> = found
        .chunks_exact(8)
        .map(|part| part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)))
        .collect();
    words.dedup();
    let parts: Vec<String> = words
        .iter()
        .take(4)
        .map(|word| {
            let place = (word & ((1 << PLACE_BITS) - 1)) as usize;
            let (block, part) = (place / SECTORS, place % SECTORS);
            match word >> PLACE_BITS {
                0 => "zeros".into(),
                write => format!("write {write} of sector {part} of block {block}"),
            }
        })
        .collect();
    parts.join(", then ")
}

impl Model {
    /// A new number for a write or image.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// A copy of an image with its own generation.
    pub fn copy(&mut self, image: &Image) -> Image {
        Image { generation: self.number(), sectors: image.sectors.clone() }
    }

    /// The versions that become durable by a flush if it begins now.
    pub fn covered(&self) -> Covered {
        let images = self.objects.values().map(|object| &object.image);
        images.map(|image| (image.generation, image.acknowledged(0..image.sectors.len()))).collect()
    }

    /// Called when the flush has succeeded.
    pub fn flushed(&mut self, covered: &Covered) {
        for object in self.objects.values_mut() {
            let Some(floors) = covered.get(&object.image.generation) else { continue };
            for (sector, floor) in object.image.sectors.iter_mut().zip(floors) {
                sector.floor = sector.floor.max(*floor);
            }
        }
    }
}
