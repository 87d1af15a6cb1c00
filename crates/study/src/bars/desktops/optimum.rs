//! The least space for the blocks of several images, and the space that VDO's rule needs for them.
//!
//! Blocks of zeros take no space. Blocks are equal if their hashes of 64 bits are: of a million distinct blocks, two
//! have the same hash with a probability of 3 in a hundred million, and the least space would be smaller by one block.

use super::super::BLOCK;
use crate::error::{Doing, Result};
use crate::process;
use rustix::fs::SeekFrom;
use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::FileExt;
use std::path::Path;
use zstd::bulk::Compressor;

/// Bytes that are read at once.
const STEP: usize = 1 << 20;
/// The level of Zstandard in all measurements.
pub(super) const LEVEL: i32 = 3;

/// How blocks are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    Lz4,
    Zstd,
}

/// The blocks of images.
pub(super) struct Blocks {
    /// Blocks that are not zero, in all images together.
    pub(super) count: u64,
    hashes: HashSet<u64>,
    /// Compressed lengths of each distinct block, in the order of their first occurrences.
    lz4: Vec<u16>,
    zstd: Vec<u16>,
    compressor: Compressor<'static>,
    scratch: Vec<u8>,
}

impl Blocks {
    pub(super) fn new() -> Result<Blocks> {
        let compressor = Compressor::new(LEVEL).doing(|| "starting the compressor".into())?;
        let scratch = vec![0; 2 * BLOCK as usize];
        Ok(Blocks { count: 0, hashes: HashSet::new(), lz4: Vec::new(), zstd: Vec::new(), compressor, scratch })
    }

    /// Adds the blocks of an image. Holes are skipped.
    pub(super) fn add(&mut self, image: &Path) -> Result<()> {
        let doing = || format!("reading {}", image.display());
        let file = File::open(image).doing(doing)?;
        let mut buffer = vec![0; STEP];
        let mut at = 0;
        while let Ok(from) = rustix::fs::seek(&file, SeekFrom::Data(at)) {
            at = rustix::fs::seek(&file, SeekFrom::Hole(from)).doing(doing)?;
            let mut from = from - from % BLOCK;
            while from < at {
                process::go_on()?;
                let part = &mut buffer[..(STEP as u64).min((at - from).next_multiple_of(BLOCK)) as usize];
                file.read_exact_at(part, from).doing(doing)?;
                from += part.len() as u64;
                part.chunks_exact(BLOCK as usize).for_each(|block| self.add_block(block));
            }
        }
        Ok(())
    }

    fn add_block(&mut self, block: &[u8]) {
        if block.iter().all(|byte| *byte == 0) {
            return;
        }
        self.count += 1;
        let mut hasher = DefaultHasher::new();
        hasher.write(block);
        if self.hashes.insert(hasher.finish()) {
            let lz4 = lz4_flex::block::compress_into(block, &mut self.scratch);
            self.lz4.push(shorter(lz4.ok()));
            self.zstd.push(shorter(self.compressor.compress_to_buffer(block, &mut self.scratch[..]).ok()));
        }
    }

    /// Bytes of all distinct blocks.
    pub(super) fn distinct(&self) -> u64 {
        self.hashes.len() as u64 * BLOCK
    }

    fn lengths(&self, codec: Codec) -> &[u16] {
        match codec {
            Codec::Lz4 => &self.lz4,
            Codec::Zstd => &self.zstd,
        }
    }

    /// Bytes of all distinct blocks if each is compressed, or stored as it is if that is shorter.
    pub(super) fn least(&self, codec: Codec) -> u64 {
        self.lengths(codec).iter().map(|length| u64::from(*length)).sum()
    }

    /// Bytes of the blocks in which VDO stores the distinct blocks.
    pub(super) fn vdo(&self) -> u64 {
        let mut packer = Packer::default();
        self.lz4.iter().for_each(|length| packer.add(*length));
        packer.end() * BLOCK
    }
}

/// The length that a block takes.
fn shorter(length: Option<usize>) -> u16 {
    length.unwrap_or(usize::MAX).min(BLOCK as usize) as u16
}

/// Most fragments in a block of VDO.
const FRAGMENTS_MAX: usize = 14;
/// Bytes of a block of VDO without its head: a version of 8 bytes, and 2 bytes for each fragment.
const ROOM: u16 = BLOCK as u16 - 8 - 2 * FRAGMENTS_MAX as u16;
/// Blocks that VDO fills at the same time.
const BINS: usize = 16;

/// A block that is being filled.
#[derive(Clone, Copy, Debug)]
struct Bin {
    free: u16,
    fragments: usize,
}

const EMPTY: Bin = Bin { free: ROOM, fragments: 0 };

/// VDO's packer. A fragment goes to the fullest bin that has room for it. If none has, the fullest bin is written,
/// unless its content is not longer than the fragment: then the fragment's block is stored without compression.
#[derive(Debug)]
struct Packer {
    /// The bins, the fullest first.
    bins: Vec<Bin>,
    written: u64,
}

impl Default for Packer {
    fn default() -> Packer {
        Packer { bins: vec![EMPTY; BINS], written: 0 }
    }
}

impl Packer {
    fn add(&mut self, length: u16) {
        let fits = self.bins.iter().position(|bin| bin.free >= length);
        let index = fits.unwrap_or(0);
        let bin = &mut self.bins[index];
        if length >= ROOM || fits.is_none() && length >= ROOM - bin.free {
            self.written += 1;
            return;
        }
        if fits.is_none() {
            self.written += 1;
            *bin = EMPTY;
        }
        bin.free -= length;
        bin.fragments += 1;
        if bin.free == 0 || bin.fragments == FRAGMENTS_MAX {
            self.written += 1;
            *bin = EMPTY;
        }
        self.bins.sort_by_key(|bin| bin.free);
    }

    /// Writes all bins; returns how many blocks were written.
    fn end(self) -> u64 {
        self.written + self.bins.iter().filter(|bin| bin.fragments > 0).count() as u64
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn packed(lengths: impl IntoIterator<Item = u16>) -> u64 {
        let mut packer = Packer::default();
        lengths.into_iter().for_each(|length| packer.add(length));
        packer.end()
    }

    #[test]
    fn blocks_of_vdo_by_hand() {
        assert_eq!(ROOM, 4060);
        assert_eq!(packed([4096, 4060]), 2, "too long for a fragment");
        assert_eq!(packed([2030; 2]), 1);
        assert_eq!(packed([100; 14]), 1);
        assert_eq!(packed([100; 15]), 2, "a block has 14 fragments");
        // 17 fragments of which no two fit into a block: the 17th is as long as the fullest bin's content.
        assert_eq!(packed([2031; 17]), 17);
        // A longer fragment does not displace shorter ones, a shorter one displaces the longest.
        assert_eq!(packed([2050; 16].into_iter().chain([2040, 2010])), 17);
    }

    #[test]
    fn the_least_space_counts_each_distinct_block_once() {
        let path = std::env::temp_dir().join(format!("study-optimum-{}", std::process::id()));
        let mut random = vec![0; BLOCK as usize];
        crate::random::Random::new(1).fill(&mut random);
        let image = [vec![0; BLOCK as usize], vec![7; BLOCK as usize], random.clone(), vec![7; BLOCK as usize], random];
        std::fs::write(&path, image.concat()).unwrap();
        let mut blocks = Blocks::new().unwrap();
        blocks.add(&path).unwrap();
        blocks.add(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!((blocks.count, blocks.distinct()), (8, 2 * BLOCK));
        for codec in [Codec::Lz4, Codec::Zstd] {
            assert!((BLOCK..BLOCK + 64).contains(&blocks.least(codec)), "{codec:?}");
        }
    }
}
