//! Packs: the content of a run of segments, as a head, an index and compressed chunks.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | magic `LAMBPACK` |
//! | 8 | 4 | version: 1 |
//! | 12 | 4 | 1 if the body is encrypted, otherwise 0 |
//! | 16 | 16 | identity of the backup |
//! | 32 | 4 | number of the pack in the backup, from 0 |
//! | 36 | 4 | first segment that the pack covers |
//! | 40 | 4 | segment after the last one |
//! | 44 | 4 | length of the index |
//! | 48 | 4 | length of the body: the index and the chunks |
//! | 52 | 4 | CRC32C of the body |
//! | 56 | 4 | CRC32C of the index |
//! | 60 | 4 | CRC32C of the 60 bytes before |
//!
//! 1. A chunk is the part of a segment in one aligned range of 1 MiB. It contains whole blocks; the bytes of the last
//!    block beyond the end of the disk are zero.
//! 2. Entries of the index are ordered by segment; in a segment the chunks come first, then the ranges of zeros, each
//!    ordered by block. No block is in two entries.
//! 3. The chunks follow the index without gaps, in the order of the index.
//! 4. Any bytes decode to a value in which all of this holds, or to an error.

use crate::seal::{Key, SALT, sealed_length};
use backend::BLOCK_SIZE;
use checksums::checksum;
use error::{Error, ErrorKind, Result};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of the head.
pub const HEAD: usize = 64;
/// Bytes of a chunk's range of the disk.
pub const CHUNK: u64 = 1 << 20;
/// Blocks of a chunk.
pub const CHUNK_BLOCKS: u64 = CHUNK / BLOCK_SIZE as u64;
/// Blocks of a segment.
pub const SEGMENT_BLOCKS: u64 = disk::transfer::SEGMENT / BLOCK_SIZE as u64;
/// A pack that has this many bytes takes no further segment.
pub const PACK_FULL: usize = 16 << 20;
/// Most bytes of a body: a full pack, and a segment that cannot be compressed.
pub const BODY_MAX: usize = 40 << 20;

const MAGIC: [u8; 8] = *b"LAMBPACK";
const VERSION: u32 = 1;
/// Bytes of an entry of the index, without the runs of a chunk.
const ENTRY: usize = 20;
const KIND_CHUNK: u8 = 1;
const KIND_ZEROS: u8 = 2;
const CHUNKS_IN_SEGMENT: u32 = (SEGMENT_BLOCKS / CHUNK_BLOCKS) as u32;
const WORDS: usize = SEGMENT_BLOCKS as usize / 64;

/// How the bytes of a chunk are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// As they are.
    Plain,
    /// As one frame of zstd.
    Zstd,
}

/// Consecutive blocks of a chunk, by their numbers in the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    /// The first block.
    pub first: u8,
    /// The last block.
    pub last: u8,
}

impl BlockRun {
    /// Number of blocks.
    pub fn blocks(self) -> usize {
        usize::from(self.last) - usize::from(self.first) + 1
    }
}

/// A chunk as the index describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The chunk's range of the disk begins at this number times [`CHUNK`].
    pub number: u32,
    /// The blocks that the chunk contains.
    pub runs: Vec<BlockRun>,
    /// How the chunk is stored.
    pub codec: Codec,
    /// Stored bytes.
    pub stored: u32,
    /// CRC32C of the stored bytes.
    pub stored_sum: u32,
    /// CRC32C of the blocks.
    pub plain_sum: u32,
    /// Offset of the stored bytes in the pack.
    pub offset: u64,
}

impl Chunk {
    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.runs.iter().map(|run| run.blocks()).sum()
    }
}

/// Blocks that are zero in the snapshot, but not in the parent of the backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zeros {
    /// The first block.
    pub first: u64,
    /// Number of blocks.
    pub blocks: u32,
}

/// The content of one segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// The chunks with data.
    pub chunks: Vec<Chunk>,
    /// The ranges of zeros.
    pub zeros: Vec<Zeros>,
}

/// The index of a pack: the content of each segment that has any.
pub type Index = BTreeMap<u32, Content>;

/// The head of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Identity of the backup.
    pub backup: [u8; 16],
    /// Number of the pack.
    pub number: u32,
    /// First segment that the pack covers.
    pub first: u32,
    /// The segment after the last segment that the pack covers.
    pub end: u32,
    /// Bytes of the index.
    pub index: u32,
    /// Bytes of the body.
    pub body: u32,
    /// CRC32C of the body.
    pub body_sum: u32,
    /// CRC32C of the index.
    pub index_sum: u32,
    /// Whether the body is encrypted.
    pub sealed: bool,
}

fn corrupt(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the pack {what}"))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl Head {
    /// The encoded head.
    pub fn encode(&self) -> [u8; HEAD] {
        let mut out = [0; HEAD];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12] = u8::from(self.sealed);
        out[16..32].copy_from_slice(&self.backup);
        let words =
            [self.number, self.first, self.end, self.index, self.body, self.body_sum, self.index_sum].into_iter();
        for (at, word) in (32..60).step_by(4).zip(words) {
            out[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let sum = checksum(&out[..60]);
        out[60..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Decodes a head. `Unsupported` for the head of a later version.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.get(..HEAD).ok_or_else(|| corrupt("is shorter than its head"))?;
        if bytes[..8] != MAGIC {
            return Err(corrupt("does not begin as a pack"));
        }
        if word(bytes, 60) != checksum(&bytes[..60]) {
            return Err(corrupt("has a head that fails its checksum"));
        }
        let version = word(bytes, 8);
        if version != VERSION {
            let text = format!("the pack has version {version}, and this program reads {VERSION}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let mut backup = [0; 16];
        backup.copy_from_slice(&bytes[16..32]);
        let head = Self {
            backup,
            number: word(bytes, 32),
            first: word(bytes, 36),
            end: word(bytes, 40),
            index: word(bytes, 44),
            body: word(bytes, 48),
            body_sum: word(bytes, 52),
            index_sum: word(bytes, 56),
            sealed: word(bytes, 12) == 1,
        };
        let fits = head.first < head.end && head.index <= head.body && head.body as usize <= BODY_MAX;
        match fits && word(bytes, 12) <= 1 {
            true => Ok(head),
            false => Err(corrupt("has a head that contradicts itself")),
        }
    }

    /// Bytes of the whole pack.
    pub fn length(&self) -> u64 {
        HEAD as u64 + self.stored_body()
    }

    /// Stored bytes of the body.
    pub fn stored_body(&self) -> u64 {
        match self.sealed {
            true => sealed_length(u64::from(self.body)),
            false => self.body.into(),
        }
    }

    /// The range of the index in the pack.
    pub fn index_range(&self) -> Range<u64> {
        HEAD as u64..HEAD as u64 + u64::from(self.index)
    }

    /// Checks and decodes the index.
    pub fn decode_index(&self, bytes: &[u8]) -> Result<Index> {
        if bytes.len() != self.index as usize || checksum(bytes) != self.index_sum {
            return Err(corrupt("has an index that fails its checksum"));
        }
        decode_index(self, bytes)
    }

    /// Checks the stored bytes of the body.
    pub fn check_body(&self, stored: &[u8]) -> Result<()> {
        match stored.len() as u64 == self.stored_body() && checksum(stored) == self.body_sum {
            true => Ok(()),
            false => Err(corrupt("fails its checksum")),
        }
    }

    /// Checks that the pack is encrypted if and only if its backup is.
    pub(crate) fn check_sealed(&self, with_key: bool) -> Result<()> {
        match (self.sealed, with_key) {
            (true, false) => Err(Error::new(ErrorKind::Invalid, "the pack is encrypted: give its key with --key-file")),
            (false, true) => Err(corrupt("is not encrypted, but its backup is")),
            _ => Ok(()),
        }
    }

    /// Checks the stored bytes of the body, decrypts them with the key of the backup, if the backup is encrypted, and
    /// decodes the index.
    pub fn decode_body<'a>(&self, stored: &'a [u8], key: Option<&Key>) -> Result<(Index, Cow<'a, [u8]>)> {
        self.check_body(stored)?;
        self.check_sealed(key.is_some())?;
        let body = match key {
            None => Cow::Borrowed(stored),
            Some(key) => Cow::Owned(key.open(self, &stored[..SALT], &(0..u64::from(self.body)), &stored[SALT..])?),
        };
        Ok((self.decode_index(&body[..self.index as usize])?, body))
    }
}

/// Marks blocks of a segment; false if one of them is marked already.
fn mark(taken: &mut [u64; WORDS], blocks: Range<u64>) -> bool {
    blocks.into_iter().all(|block| {
        let place = (block % SEGMENT_BLOCKS) as usize;
        let bit = 1 << (place % 64);
        let free = taken[place / 64] & bit == 0;
        taken[place / 64] |= bit;
        free
    })
}

fn decode_index(head: &Head, bytes: &[u8]) -> Result<Index> {
    let wrong = || corrupt("has an index that contradicts itself");
    let mut index = Index::new();
    let mut taken = [0; WORDS];
    let mut last: Option<(u32, u8, u64)> = None;
    let mut offset = head.index_range().end;
    let mut rest = bytes;
    while !rest.is_empty() {
        let entry = rest.get(..ENTRY).ok_or_else(wrong)?;
        rest = &rest[ENTRY..];
        let kind = entry[0];
        let (segment, order) = match kind {
            KIND_CHUNK => (word(entry, 4) / CHUNKS_IN_SEGMENT, u64::from(word(entry, 4))),
            KIND_ZEROS => {
                let first = u64::from(word(entry, 4)) | u64::from(word(entry, 8)) << 32;
                (u32::try_from(first / SEGMENT_BLOCKS).map_err(|_| wrong())?, first)
            }
            _ => return Err(wrong()),
        };
        if !(head.first..head.end).contains(&segment) || last.is_some_and(|last| last >= (segment, kind, order)) {
            return Err(wrong());
        }
        if last.is_none_or(|(other, ..)| other != segment) {
            taken = [0; WORDS];
        }
        last = Some((segment, kind, order));
        let content = index.entry(segment).or_default();
        if kind == KIND_ZEROS {
            let zeros = Zeros { first: order, blocks: word(entry, 12) };
            let end = order.checked_add(u64::from(zeros.blocks)).ok_or_else(wrong)?;
            let inside = end <= (u64::from(segment) + 1) * SEGMENT_BLOCKS && zeros.blocks > 0;
            if !inside || !mark(&mut taken, order..end) || entry[1..4] != [0; 3] || word(entry, 16) != 0 {
                return Err(wrong());
            }
            content.zeros.push(zeros);
            continue;
        }
        let count = usize::from(u16::from_le_bytes([entry[2], entry[3]]));
        let runs = rest.get(..2 * count).filter(|_| count > 0).ok_or_else(wrong)?;
        rest = &rest[2 * count..];
        let runs: Vec<BlockRun> = runs.chunks_exact(2).map(|run| BlockRun { first: run[0], last: run[1] }).collect();
        let ordered = runs.iter().all(|run| run.first <= run.last)
            && runs.windows(2).all(|pair| usize::from(pair[0].last) + 1 < usize::from(pair[1].first));
        if !ordered {
            return Err(wrong());
        }
        let codec = match entry[1] {
            0 => Codec::Plain,
            1 => Codec::Zstd,
            _ => return Err(wrong()),
        };
        let chunk = Chunk {
            number: word(entry, 4),
            runs,
            codec,
            stored: word(entry, 8),
            stored_sum: word(entry, 12),
            plain_sum: word(entry, 16),
            offset,
        };
        let plain = chunk.blocks() * BLOCK_SIZE;
        let fits = match codec {
            Codec::Plain => chunk.stored as usize == plain,
            Codec::Zstd => chunk.stored > 0 && (chunk.stored as usize) < plain,
        };
        let first = order * CHUNK_BLOCKS;
        let blocks = |run: &BlockRun| first + u64::from(run.first)..first + u64::from(run.last) + 1;
        if !fits || !chunk.runs.iter().all(|run| mark(&mut taken, blocks(run))) {
            return Err(wrong());
        }
        offset += u64::from(chunk.stored);
        content.chunks.push(chunk);
    }
    match offset == HEAD as u64 + u64::from(head.body) {
        true => Ok(index),
        false => Err(wrong()),
    }
}

/// A pack that is being made.
pub struct Builder {
    first: u32,
    index: Vec<u8>,
    payload: Vec<u8>,
}

impl Builder {
    /// An empty pack. `first` is the number of its first segment.
    pub fn new(first: u32) -> Self {
        Self { first, index: Vec::new(), payload: Vec::new() }
    }

    /// Bytes of the body so far.
    pub fn length(&self) -> usize {
        self.index.len() + self.payload.len()
    }

    /// Adds a chunk of the current segment, with its stored bytes. The offset of the chunk is ignored.
    pub fn chunk(&mut self, chunk: &Chunk, stored: &[u8]) {
        let codec = match chunk.codec {
            Codec::Plain => 0,
            Codec::Zstd => 1,
        };
        let [low, high] = (chunk.runs.len() as u16).to_le_bytes();
        self.index.extend_from_slice(&[KIND_CHUNK, codec, low, high]);
        for word in [chunk.number, chunk.stored, chunk.stored_sum, chunk.plain_sum] {
            self.index.extend_from_slice(&word.to_le_bytes());
        }
        chunk.runs.iter().for_each(|run| self.index.extend_from_slice(&[run.first, run.last]));
        self.payload.extend_from_slice(stored);
    }

    /// Adds a range of zeros in the current segment, after its chunks.
    pub fn zeros(&mut self, zeros: Zeros) {
        self.index.extend_from_slice(&[KIND_ZEROS, 0, 0, 0]);
        self.index.extend_from_slice(&zeros.first.to_le_bytes());
        self.index.extend_from_slice(&zeros.blocks.to_le_bytes());
        self.index.extend_from_slice(&[0; 4]);
    }

    /// The finished pack, which covers all segments before `end`, encrypted if there is a key.
    pub fn finish(self, backup: [u8; 16], number: u32, end: u32, key: Option<&Key>) -> Result<Pack> {
        let length = self.index.len() as u32;
        let mut body = self.index;
        let index_sum = checksum(&body);
        body.extend_from_slice(&self.payload);
        let mut head = Head {
            backup,
            number,
            first: self.first,
            end,
            index: length,
            body: body.len() as u32,
            body_sum: 0,
            index_sum,
            sealed: key.is_some(),
        };
        let index = head.decode_index(&body[..length as usize])?;
        let stored = match key {
            Some(key) => key.seal(&head, &body)?,
            None => body,
        };
        head.body_sum = checksum(&stored);
        let mut bytes = Vec::with_capacity(HEAD + stored.len());
        bytes.extend_from_slice(&head.encode());
        bytes.extend_from_slice(&stored);
        Ok(Pack { head, index, bytes })
    }
}

/// A finished pack.
pub struct Pack {
    /// The head.
    pub head: Head,
    /// The index.
    pub index: Index,
    /// All bytes as they are stored.
    pub bytes: Vec<u8>,
}

/// The blocks of a chunk, from its stored bytes.
pub fn unpack(chunk: &Chunk, stored: &[u8]) -> Result<Vec<u8>> {
    let damaged = |what: &str| {
        let text = format!("the data at {} of the disk {what}", u64::from(chunk.number) * CHUNK);
        Error::new(ErrorKind::Corrupt, text)
    };
    if stored.len() != chunk.stored as usize || checksum(stored) != chunk.stored_sum {
        return Err(damaged("fails the checksum of its stored form"));
    }
    let length = chunk.blocks() * BLOCK_SIZE;
    let plain = match chunk.codec {
        Codec::Plain => stored.to_vec(),
        Codec::Zstd => zstd::bulk::decompress(stored, length)
            .map_err(|error| damaged(&format!("cannot be decompressed: {error}")))?,
    };
    match plain.len() == length && checksum(&plain) == chunk.plain_sum {
        true => Ok(plain),
        false => Err(damaged("fails its checksum")),
    }
}

#[cfg(test)]
mod tests;
