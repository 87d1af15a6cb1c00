//! Packs: logical blocks compressed one by one and stored back to back in a run of physical blocks.
//!
//! A pack is written once, whole, into newly allocated blocks, and is never overwritten. All numbers are little-endian.
//!
//! | offset | size | field |
//! |---:|---:|---|
//! | 0 | 4 | magic `LMPK` |
//! | 4 | 2 | version, 1 |
//! | 6 | 2 | number of fragments, 1 to 256 |
//! | 8 | 4 | CRC32C of head and index, with this field zero |
//! | 12 | 4 | zero |
//! | 16 | 8 per fragment | index: CRC32C of the content (4), stored bytes (2), codec (1), zero (1) |
//! | | | the fragments in order, then zeros up to a whole block |
//!
//! Codecs: 0 there is no such block in the pack, 1 not compressed, 2 an LZ4 block, 3 a Zstandard frame.
//!
//! What must hold: a decoder accepts any bytes, never reads or allocates more than the pack and one block, and returns
//! only content that has its checksum.

mod index;

pub use index::{Index, SHORT_MAX, WHOLE_MAX, proven};

use crate::{Error, ErrorKind, Result, checksum};
use backend::BLOCK_SIZE;
use std::cell::RefCell;
use std::ops::Range;
use zstd::bulk::{Compressor, Decompressor};

/// The most blocks of a pack.
pub const BLOCKS_MAX: usize = 256;

const MAGIC: [u8; 4] = *b"LMPK";
const VERSION: u16 = 1;
const HEAD: usize = 16;
const ENTRY: usize = 8;
const ABSENT: u8 = 0;
const PLAIN: u8 = 1;
const LZ4: u8 = 2;
const ZSTD: u8 = 3;

/// How blocks are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Codec {
    /// LZ4: compresses and decompresses fastest.
    Lz4,
    /// Zstandard with this level, 1 to 19.
    Zstd(u8),
}

impl Codec {
    /// The highest level of Zstandard. Higher ones need windows that are larger than a block.
    pub const LEVEL_MAX: u8 = 19;
    /// The level of Zstandard if none is given.
    pub const LEVEL_DEFAULT: u8 = 3;
}

/// Compresses blocks. Keeps the memory of the codec between packs.
pub struct Packer {
    codec: Codec,
    zstd: Option<Compressor<'static>>,
    scratch: Vec<u8>,
}

impl Packer {
    /// A packer with a codec.
    pub fn new(codec: Codec) -> Result<Self> {
        let failed = |error| Error::io("starting the compressor", error);
        let zstd = match codec {
            Codec::Lz4 => None,
            Codec::Zstd(level) => Some(Compressor::new(i32::from(level)).map_err(failed)?),
        };
        Ok(Self { codec, zstd, scratch: vec![0; 2 * BLOCK_SIZE] })
    }

    /// How the packer compresses.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Compresses a block into `self.scratch`. Returns the length, or `None` if the block does not shrink.
    fn compress(&mut self, block: &[u8]) -> Option<usize> {
        let length = match self.codec {
            Codec::Lz4 => lz4_flex::block::compress_into(block, &mut self.scratch).ok(),
            Codec::Zstd(_) => {
                self.zstd.as_mut().and_then(|zstd| zstd.compress_to_buffer(block, &mut self.scratch[..]).ok())
            }
        };
        length.filter(|length| *length < BLOCK_SIZE)
    }

    /// Whether a block gets smaller by compression.
    pub fn shrinks(&mut self, block: &[u8]) -> bool {
        self.compress(block).is_some()
    }

    /// A pack of these blocks, as whole blocks. Blocks that are `None` are not in the pack.
    pub fn pack(&mut self, blocks: &[Option<&[u8]>]) -> Vec<u8> {
        assemble(&self.fragments(blocks))
    }

    /// Compresses blocks one by one, for [`assemble`].
    pub fn fragments(&mut self, blocks: &[Option<&[u8]>]) -> Vec<Option<NewFragment>> {
        let mut of = |block: &&[u8]| {
            let (codec, bytes) = match self.compress(block) {
                Some(length) => (if self.codec == Codec::Lz4 { LZ4 } else { ZSTD }, self.scratch[..length].to_vec()),
                None => (PLAIN, block.to_vec()),
            };
            NewFragment { checksum: checksum(block), codec, bytes }
        };
        blocks.iter().map(|block| block.as_ref().map(&mut of)).collect()
    }
}

/// A block that is compressed for a pack.
pub struct NewFragment {
    checksum: u32,
    codec: u8,
    bytes: Vec<u8>,
}

/// A pack of these fragments, as whole blocks. Those that are `None` are not in the pack.
pub fn assemble(fragments: &[Option<NewFragment>]) -> Vec<u8> {
    debug_assert!(!fragments.is_empty() && fragments.len() <= BLOCKS_MAX);
    let mut out = vec![0; HEAD + ENTRY * fragments.len()];
    for (number, fragment) in fragments.iter().enumerate() {
        let Some(fragment) = fragment else { continue };
        out.extend_from_slice(&fragment.bytes);
        let entry = &mut out[HEAD + ENTRY * number..][..ENTRY];
        entry[0..4].copy_from_slice(&fragment.checksum.to_le_bytes());
        entry[4..6].copy_from_slice(&(fragment.bytes.len() as u16).to_le_bytes());
        entry[6] = fragment.codec;
    }
    out[0..4].copy_from_slice(&MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[6..8].copy_from_slice(&(fragments.len() as u16).to_le_bytes());
    let sum = checksum(&out[..HEAD + ENTRY * fragments.len()]);
    out[8..12].copy_from_slice(&sum.to_le_bytes());
    out.resize(out.len().next_multiple_of(BLOCK_SIZE), 0);
    out
}

/// The number of these fragments with which a pack of at least `least` blocks wastes the smallest part of its space.
/// The last block of a pack is half empty on average, so a pack that ends where this block is nearly full needs less
/// space.
pub fn fullest(fragments: &[Option<NewFragment>], least: usize) -> usize {
    let (mut content, mut blocks) = (0, 0);
    let (mut best, mut best_count) = ((0, 1), fragments.len());
    for (number, fragment) in fragments.iter().enumerate() {
        let Some(fragment) = fragment else { continue };
        content += fragment.bytes.len();
        blocks += 1;
        let stored = (HEAD + ENTRY * (number + 1) + content).div_ceil(BLOCK_SIZE);
        if blocks >= least && content * best.1 >= best.0 * stored {
            (best, best_count) = ((content, stored), number + 1);
        }
    }
    best_count
}

thread_local! {
    /// The decompressor of the thread, once it has read a Zstandard frame (about 100 KiB). Each frame is decompressed
    /// from a new state, also after one that is damaged.
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Decompresses a Zstandard frame. Returns the length of its content, or `None` if the frame is damaged.
fn decompress(frame: &[u8], out: &mut [u8]) -> Result<Option<usize>> {
    DECOMPRESSOR.with_borrow_mut(|decompressor| {
        if decompressor.is_none() {
            #[cfg(test)]
            tests::STARTED.set(tests::STARTED.get() + 1);
            *decompressor = Some(Decompressor::new().map_err(|error| Error::io("starting the decompressor", error))?);
        }
        Ok(decompressor.as_mut().and_then(|decompressor| decompressor.decompress_to_buffer(frame, out).ok()))
    })
}

/// A pack of which head and index are valid.
pub struct Pack<'a> {
    bytes: &'a [u8],
    index: Index,
}

#[cold]
fn damaged(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("a pack is damaged: {what}; restore its blocks from a snapshot or backup"))
}

/// The stored bytes of each index of a pack of `blocks` blocks, of which `first` is the first one.
pub fn stored_bytes(first: &[u8], blocks: u64) -> Result<Vec<u64>> {
    Ok(Index::decode(first, blocks as usize * BLOCK_SIZE)?.stored_bytes())
}

/// The checksum of the content of each index of a pack of `blocks` blocks, of which `first` is the first one.
pub fn checksums(first: &[u8], blocks: u64) -> Result<Vec<Option<u32>>> {
    Ok(Index::decode(first, blocks as usize * BLOCK_SIZE)?.checksums())
}

impl<'a> Pack<'a> {
    /// Decodes head and index of a pack.
    pub fn decode(bytes: &'a [u8]) -> Result<Self> {
        Ok(Self { bytes, index: Index::decode(bytes, bytes.len())? })
    }

    /// Number of blocks in the pack.
    pub fn count(&self) -> usize {
        self.index.checksums().iter().flatten().count()
    }

    /// Decodes blocks by their indexes. `out` has room for all of them. Returns their checksums.
    pub fn read(&self, blocks: Range<usize>, out: &mut [u8]) -> Result<Vec<u32>> {
        self.index.read(self.bytes, 0, blocks, out)
    }
}

#[cfg(test)]
mod tests;
