//! A chain: a backup and all backups on which it is based, as one range of bytes.
//!
//! 1. A block has the content of the newest level that has it. A block that no level has is zero, and so is a block of
//!    which only levels have content that are older than a level in which the disk ends before the block.
//! 2. Which blocks a segment takes from which level is decided by the indexes alone, before any data is read.
//! 3. Data is returned only after both of its checksums were verified.

use crate::level::{Level, StoredLevel};
use crate::manifest::{Manifest, segments};
use crate::pack::{CHUNK_BLOCKS, Chunk, SEGMENT_BLOCKS, unpack};
use crate::repository::Repository;
use crate::seal::Key;
use backend::BLOCK_SIZE;
use disk::transfer::SEGMENT;
use error::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;

const WORDS: usize = SEGMENT_BLOCKS as usize / 64;

/// A set of blocks of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks([u64; WORDS]);

impl Default for Blocks {
    fn default() -> Self {
        Self([0; WORDS])
    }
}

impl Blocks {
    pub(crate) fn has(&self, block: u64) -> bool {
        self.0[block as usize / 64] & (1 << (block % 64)) != 0
    }

    pub(crate) fn add(&mut self, block: u64) {
        self.0[block as usize / 64] |= 1 << (block % 64);
    }

    /// Number of blocks.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    fn is_full(&self) -> bool {
        self.0.iter().all(|word| *word == u64::MAX)
    }

    /// The blocks as ranges, ascending.
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for block in (0..SEGMENT_BLOCKS).filter(|block| self.has(*block)) {
            match ranges.last_mut() {
                Some(last) if last.end == block => last.end = block + 1,
                _ => ranges.push(block..block + 1),
            }
        }
        ranges
    }
}

/// Blocks that a segment takes from a chunk.
pub(crate) struct Take {
    /// Position of the level in the chain.
    pub level: usize,
    /// The chunk.
    pub chunk: Chunk,
}

/// Where the content of a segment is.
pub struct SegmentPlan {
    /// The segment.
    pub number: u32,
    /// Blocks with data.
    pub data: Blocks,
    /// Blocks that a level declares zero.
    pub zeros: Blocks,
    /// The chunks to read, of the newest level first.
    takes: Vec<Take>,
}

impl SegmentPlan {
    /// Whether no level has a block of the segment.
    pub fn is_empty(&self) -> bool {
        self.takes.is_empty() && self.zeros == Blocks::default()
    }

    /// The chunks to read, of the newest level first. A block that is in several chunks has the content of the first.
    pub(crate) fn takes(&self) -> &[Take] {
        &self.takes
    }
}

/// A chain of backups.
pub struct Chain {
    levels: Vec<Box<dyn Level + Send>>,
    capacity: u64,
}

impl Chain {
    /// The chain of a backup in a repository, named as in [`Repository::find`].
    pub fn of(repository: &Repository, which: &str, key: Option<&Arc<Key>>) -> Result<(crate::Manifest, Self)> {
        let manifests = Self::manifests(repository, which)?;
        let newest = Manifest::clone(&manifests[0]);
        Ok((newest, Self::stored(repository, &manifests, key)?))
    }

    /// The manifests of the chain of a backup, the newest first: at least one.
    pub(crate) fn manifests(repository: &Repository, which: &str) -> Result<Vec<Arc<Manifest>>> {
        let manifest = repository.find(which)?;
        manifest.backup.refuse_machine()?;
        let chain = repository.chain(manifest)?;
        let newest = &chain[0];
        if let Some(other) = chain.iter().find(|manifest| manifest.backup.key != newest.backup.key) {
            let (id, base) = (&newest.backup.id, &other.backup.id);
            let text = format!(
                "backup {id} in '{}' cannot be used: backup {base}, on which it is based, has another key or none",
                repository.place()
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        Ok(chain.into_iter().map(Arc::new).collect())
    }

    /// The chain with these manifests.
    pub(crate) fn stored(repository: &Repository, manifests: &[Arc<Manifest>], key: Option<&Arc<Key>>) -> Result<Self> {
        let mut levels: Vec<Box<dyn Level + Send>> = Vec::with_capacity(manifests.len());
        for manifest in manifests {
            levels.push(Box::new(StoredLevel::new(repository.objects().clone(), Arc::clone(manifest), key)?));
        }
        let capacity = manifests.first().map_or(0, |newest| newest.backup.capacity);
        Ok(Self { levels, capacity })
    }

    /// A chain of levels, the newest first.
    pub fn new(levels: Vec<Box<dyn Level + Send>>, capacity: u64) -> Self {
        Self { levels, capacity }
    }

    /// Capacity of the disk in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Number of segments of the disk.
    pub fn segments(&self) -> u32 {
        segments(self.capacity)
    }

    /// Looks up where the content of a segment is.
    pub fn plan(&mut self, number: u32) -> Result<SegmentPlan> {
        let mut plan = SegmentPlan { number, data: Blocks::default(), zeros: Blocks::default(), takes: Vec::new() };
        let mut decided = Blocks::default();
        let start = u64::from(number) * SEGMENT_BLOCKS;
        let end_at = |decided: &mut Blocks, capacity: u64| {
            let end = capacity.div_ceil(BLOCK_SIZE as u64).saturating_sub(start);
            (end..SEGMENT_BLOCKS).for_each(|block| decided.add(block));
        };
        end_at(&mut decided, self.capacity);
        for (level, reader) in self.levels.iter_mut().enumerate() {
            if decided.is_full() {
                break;
            }
            // An older level may have blocks beyond the end of the disk in this level. They were discarded when the
            // disk shrank, and are zero if the disk has grown since.
            end_at(&mut decided, reader.capacity());
            let Some(content) = reader.content(number)? else { continue };
            for chunk in content.chunks {
                let mut wanted = false;
                for block in blocks_of(&chunk) {
                    if !decided.has(block) {
                        decided.add(block);
                        plan.data.add(block);
                        wanted = true;
                    }
                }
                if wanted {
                    plan.takes.push(Take { level, chunk });
                }
            }
            for zeros in content.zeros {
                let first = zeros.first % SEGMENT_BLOCKS;
                for block in first..first + u64::from(zeros.blocks) {
                    if !decided.has(block) {
                        decided.add(block);
                        plan.zeros.add(block);
                    }
                }
            }
        }
        Ok(plan)
    }

    /// Reads the data of a segment that was planned last, into memory of one segment; other bytes of this memory become
    /// zero.
    pub fn read(&mut self, plan: &SegmentPlan, into: &mut [u8]) -> Result<()> {
        if into.len() as u64 != SEGMENT {
            return Err(Error::new(ErrorKind::Invalid, format!("a segment needs {SEGMENT} bytes of memory")));
        }
        into.fill(0);
        let mut filled = Blocks::default();
        for takes in plan.takes.chunk_by(|a, b| a.level == b.level) {
            let [first, .., last] = takes else {
                let [one] = takes else { continue };
                self.fill(plan, &[one], &mut filled, into)?;
                continue;
            };
            // One read fetches all chunks, unless most of the range between them is not needed.
            let span = last.chunk.offset + u64::from(last.chunk.stored) - first.chunk.offset;
            let needed: u64 = takes.iter().map(|take| u64::from(take.chunk.stored)).sum();
            if span <= 2 * needed {
                self.fill(plan, &takes.iter().collect::<Vec<_>>(), &mut filled, into)?;
            } else {
                for take in takes {
                    self.fill(plan, &[take], &mut filled, into)?;
                }
            }
        }
        Ok(())
    }

    /// The blocks of a chunk of the segment that was planned last.
    pub(crate) fn unpack(&mut self, take: &Take) -> Result<Vec<u8>> {
        let start = take.chunk.offset;
        let stored = self.levels[take.level].read(start..start + u64::from(take.chunk.stored))?;
        unpack(&take.chunk, &stored)
    }

    /// Verifies what follows after the last segment.
    pub fn finish(&mut self) -> Result<()> {
        self.levels.iter_mut().try_for_each(|level| level.finish())
    }

    /// Reads consecutive chunks of one level with one read.
    fn fill(&mut self, plan: &SegmentPlan, takes: &[&Take], filled: &mut Blocks, into: &mut [u8]) -> Result<()> {
        let (Some(first), Some(last)) = (takes.first(), takes.last()) else { return Ok(()) };
        let start = first.chunk.offset;
        let bytes = self.levels[first.level].read(start..last.chunk.offset + u64::from(last.chunk.stored))?;
        for take in takes {
            let at = (take.chunk.offset - start) as usize;
            let plain = unpack(&take.chunk, &bytes[at..at + take.chunk.stored as usize])?;
            for (block, content) in blocks_of(&take.chunk).zip(plain.chunks_exact(BLOCK_SIZE)) {
                if plan.data.has(block) && !filled.has(block) {
                    filled.add(block);
                    let at = block as usize * BLOCK_SIZE;
                    into[at..at + BLOCK_SIZE].copy_from_slice(content);
                }
            }
        }
        Ok(())
    }
}

/// The blocks of a chunk, by their numbers in the segment.
pub(crate) fn blocks_of(chunk: &Chunk) -> impl Iterator<Item = u64> + '_ {
    let first = u64::from(chunk.number) * CHUNK_BLOCKS % SEGMENT_BLOCKS;
    chunk.runs.iter().flat_map(move |run| first + u64::from(run.first)..=first + u64::from(run.last))
}
