//! What the disks and snapshots of a schedule may hold, by sector.
//!
//! 1. Each sector has one writer at a time, so its versions have an order. A write adds its version before it begins,
//!    and acknowledges it at its end.
//! 2. A read finds a version between the one acknowledged when it began and the last one begun when it ended.
//! 3. A flush that succeeds raises the floor of every sector to what was acknowledged when it began. After a power cut
//!    a sector holds its floor or something later.
//! 4. A snapshot holds a version between the one acknowledged when it was asked for and the last one begun when it was
//!    taken; which one is known once it was read.
//! 5. An operation on the catalog that the power cut interrupts took place or did not.

use backend::BLOCK_SIZE;
use std::collections::BTreeMap;
use std::ops::Range;

/// What a medium writes whole or not at all, in bytes.
pub const SECTOR: usize = 512;
/// Sectors of a block.
pub const SECTORS: usize = BLOCK_SIZE / SECTOR;
/// Bits of a word of content that say where it was written; the others, by which write.
const PLACE_BITS: u32 = 16;

/// A sector's versions, named by the writes that made them; 0 is zeros.
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

/// What a disk or snapshot may hold.
#[derive(Clone, Debug)]
pub struct Image {
    /// Never that of another image: a flush that began before a revert must not raise what the revert brought.
    pub generation: u64,
    /// By number.
    pub sectors: Vec<Sector>,
}

/// What an operation under way makes of an object.
#[derive(Clone, Debug)]
pub enum Fate {
    /// None is.
    Stays,
    /// It may not be there yet.
    Coming,
    /// It may not be there any more.
    Going,
    /// It may hold this instead.
    Becoming(Image),
}

/// A disk or snapshot.
#[derive(Clone, Debug)]
pub struct Object {
    /// Its id, once it is known.
    pub id: u64,
    /// Of a snapshot: the name of its disk.
    pub of: Option<String>,
    /// What it may hold.
    pub image: Image,
    /// What is being done to it.
    pub fate: Fate,
}

/// Everything.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// By name; no name is used twice.
    pub objects: BTreeMap<String, Object>,
    last: u64,
}

/// What a flush covers: by image, the acknowledged version of each sector.
pub type Covered = BTreeMap<u64, Vec<usize>>;

/// A word of what `write` leaves in `sector`.
fn word(write: u64, sector: usize) -> u64 {
    if write == 0 { 0 } else { write << PLACE_BITS | sector as u64 }
}

/// What `write` leaves in `sector`.
pub fn fill(write: u64, sector: usize, bytes: &mut [u8]) {
    let word = word(write, sector).to_le_bytes();
    bytes.chunks_exact_mut(word.len()).for_each(|part| part.copy_from_slice(&word));
}

impl Image {
    /// What reads that begin now find at least.
    pub fn acknowledged(&self, sectors: Range<usize>) -> Vec<usize> {
        self.sectors[sectors].iter().map(|sector| sector.acknowledged).collect()
    }

    /// Begins a write of sectors.
    pub fn begin(&mut self, sectors: Range<usize>, write: u64) {
        self.sectors[sectors].iter_mut().for_each(|sector| sector.versions.push(write));
    }

    /// It is acknowledged.
    pub fn end(&mut self, sectors: Range<usize>) {
        self.sectors[sectors].iter_mut().for_each(|sector| sector.acknowledged = sector.versions.len() - 1);
    }

    /// Judges what was read of the sectors from `first` on, each at or after its version in `least`. With `settle` no
    /// other version is right from now on.
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

    /// Adds the versions that the image it was copied from has got since.
    pub fn catch_up(&mut self, source: &Image) {
        for (sector, source) in self.sectors.iter_mut().zip(&source.sectors) {
            sector.versions.clone_from(&source.versions);
        }
    }

    /// What may be found after a power cut.
    pub fn floors(&self) -> Vec<usize> {
        self.sectors.iter().map(|sector| sector.floor).collect()
    }

    /// What was read last is durable and all there is.
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
    /// A number for a write or image.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// An image like another, with an identity of its own.
    pub fn copy(&mut self, image: &Image) -> Image {
        Image { generation: self.number(), sectors: image.sectors.clone() }
    }

    /// What a flush that begins now makes durable.
    pub fn covered(&self) -> Covered {
        let images = self.objects.values().map(|object| &object.image);
        images.map(|image| (image.generation, image.acknowledged(0..image.sectors.len()))).collect()
    }

    /// It succeeded.
    pub fn flushed(&mut self, covered: &Covered) {
        for object in self.objects.values_mut() {
            let Some(floors) = covered.get(&object.image.generation) else { continue };
            for (sector, floor) in object.image.sectors.iter_mut().zip(floors) {
                sector.floor = sector.floor.max(*floor);
            }
        }
    }
}
