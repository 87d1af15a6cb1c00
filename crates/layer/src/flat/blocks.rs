//! The file-block model: the allocation state of a flat file in VMFS's terms, in blocks of 1 MiB.
//!
//! VMFS allocates files in blocks of 1 MiB and keeps two counters: `nb`, the blocks that have space, and `tbz`, those
//! among them that have to be zeroed on their first write. For a file on the host, a block *has space* when any byte of
//! it is allocated, and is *to be zeroed* when all of that space is reserved and none of it written.
//!
//! 1. `written` and `unwritten` are disjoint, except while [`Blocks::write`] moves a block.
//! 2. The counters are the numbers of bits in the sets. A counter is updated by the number of bits that an atomic
//!    change of a word has really changed, so it is right when several threads change the same word.
//! 3. A block is in `written` before a write to it is acknowledged. It is removed only under the block's lock
//!    ([`super::locks`]) and after its bytes read as zeros. A block that is not in `written` reads as zeros.
//!
//! Two bits per block: 256 KiB of memory for a terabyte.

use crate::{IoContext, Result};
use backend::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Size of a VMFS file block.
pub const FILE_BLOCK: u64 = 1 << 20;

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockType {
    /// No space is allocated.
    Hole,
    /// Space is reserved, none of it written.
    Unwritten,
    /// Space is allocated, some of it written.
    Written,
}

/// The blocks that an extent touches, counted from its first block.
pub(super) struct Blocks {
    /// The extent's bytes in its file.
    bytes: Range<u64>,
    written: Set,
    unwritten: Set,
    /// Whether reserved unwritten space was ever found or made: then a written block may contain some.
    reserved_seen: AtomicBool,
}

impl Blocks {
    /// The blocks of the bytes `bytes` of a file, all of them holes.
    pub(super) fn new(bytes: Range<u64>) -> Self {
        let count = bytes.end.div_ceil(FILE_BLOCK).saturating_sub(bytes.start / FILE_BLOCK);
        Self { bytes, written: Set::new(count), unwritten: Set::new(count), reserved_seen: AtomicBool::new(false) }
    }

    /// Number of blocks.
    pub(super) fn count(&self) -> u64 {
        self.bytes.end.div_ceil(FILE_BLOCK).saturating_sub(self.bytes.start / FILE_BLOCK)
    }

    /// The numbers of blocks with space, and of those among them to be zeroed.
    pub(super) fn counters(&self) -> (u64, u64) {
        let unwritten = self.unwritten.count.load(Ordering::Relaxed);
        (self.written.count.load(Ordering::Relaxed) + unwritten, unwritten)
    }

    /// The blocks that a range of the file touches.
    pub(super) fn touched(&self, bytes: &Range<u64>) -> Range<u64> {
        let first = self.bytes.start / FILE_BLOCK;
        let clipped = bytes.start.max(self.bytes.start)..bytes.end.min(self.bytes.end);
        if clipped.is_empty() {
            return 0..0;
        }
        clipped.start / FILE_BLOCK - first..clipped.end.div_ceil(FILE_BLOCK) - first
    }

    /// The bytes of the file that blocks cover, clipped to the extent.
    pub(super) fn bytes_of(&self, blocks: Range<u64>) -> Range<u64> {
        let first = self.bytes.start / FILE_BLOCK;
        ((first + blocks.start) * FILE_BLOCK).max(self.bytes.start)
            ..((first + blocks.end) * FILE_BLOCK).min(self.bytes.end)
    }

    pub(super) fn state(&self, block: u64) -> BlockType {
        match (self.written.has(block), self.unwritten.has(block)) {
            (true, _) => BlockType::Written,
            (false, true) => BlockType::Unwritten,
            (false, false) => BlockType::Hole,
        }
    }

    /// Whether `block` is written, and the end of the run of blocks that are all written, or all not written, at most
    /// `end`.
    pub(super) fn written_run(&self, block: u64, end: u64) -> (bool, u64) {
        self.written.run(block, end)
    }

    /// The first block at or after `from` and before `end` that has space.
    pub(super) fn next_with_space(&self, from: u64, end: u64) -> Option<u64> {
        let first = |set: &Set| match set.run(from, end) {
            (true, _) => Some(from),
            (false, next) => (next < end).then_some(next),
        };
        if from >= end {
            return None;
        }
        match (first(&self.written), first(&self.unwritten)) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Whether a written block may contain reserved unwritten space.
    pub(super) fn may_be_mixed(&self) -> bool {
        self.reserved_seen.load(Ordering::Acquire)
    }

    /// Marks blocks as written.
    pub(super) fn write(&self, blocks: Range<u64>) {
        for block in blocks {
            self.written.insert(block);
            self.unwritten.remove(block);
        }
    }

    /// Sets the state of one block. The caller holds the block's lock.
    pub(super) fn set(&self, block: u64, state: BlockType) {
        match state {
            BlockType::Hole => {
                self.written.remove(block);
                self.unwritten.remove(block);
            }
            BlockType::Unwritten => {
                self.reserved_seen.store(true, Ordering::Release);
                self.unwritten.insert(block);
                self.written.remove(block);
            }
            BlockType::Written => self.write(block..block + 1),
        }
    }

    /// Loads the state of every block from the file system. No other thread may change the extent meanwhile.
    pub(super) fn load(&self, file: &dyn File, name: &str) -> Result<()> {
        let mut at = self.bytes.start;
        while at < self.bytes.end {
            let placements = file.placements(at).during(|| format!("querying where the bytes of '{name}' are"))?;
            let Some(last) = placements.last() else { break };
            for placement in &placements {
                let set = if placement.written { &self.written } else { &self.unwritten };
                set.insert_all(self.touched(&placement.range));
                if !placement.written {
                    self.reserved_seen.store(true, Ordering::Release);
                }
            }
            // The position always advances, so that a file system that repeats its answer cannot keep this loop
            // running.
            at = last.range.end.max(at + 1);
        }
        // A block with a written part counts as written.
        for (unwritten, written) in self.unwritten.words.iter().zip(&self.written.words) {
            unwritten.fetch_and(!written.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.written.recount();
        self.unwritten.recount();
        Ok(())
    }
}

/// A set of blocks that also counts its members.
struct Set {
    words: Box<[AtomicU64]>,
    count: AtomicU64,
}

impl Set {
    fn new(members_max: u64) -> Self {
        let words = (0..members_max.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { words, count: AtomicU64::new(0) }
    }

    fn word(&self, block: u64) -> Option<&AtomicU64> {
        self.words.get(usize::try_from(block / 64).ok()?)
    }

    fn has(&self, block: u64) -> bool {
        self.word(block).is_some_and(|word| word.load(Ordering::Acquire) & bit(block) != 0)
    }

    fn insert(&self, block: u64) {
        let Some(word) = self.word(block) else { return };
        // Most blocks that are written were written before; for these one load is enough.
        if word.load(Ordering::Acquire) & bit(block) == 0
            && word.fetch_or(bit(block), Ordering::AcqRel) & bit(block) == 0
        {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Inserts a range of blocks, a word at a time, without counting.
    fn insert_all(&self, blocks: Range<u64>) {
        let mut at = blocks.start;
        while at < blocks.end {
            let Some(word) = self.word(at) else { return };
            let next = (at / 64 * 64 + 64).min(blocks.end);
            let width = next - at;
            word.fetch_or((u64::MAX >> (64 - width)) << (at % 64), Ordering::Relaxed);
            at = next;
        }
    }

    fn recount(&self) {
        let members = self.words.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum();
        self.count.store(members, Ordering::Relaxed);
    }

    fn remove(&self, block: u64) {
        let Some(word) = self.word(block) else { return };
        if word.load(Ordering::Acquire) & bit(block) != 0
            && word.fetch_and(!bit(block), Ordering::AcqRel) & bit(block) != 0
        {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether `block` is a member, and the end of the run of blocks that are all members, or all no members, at most
    /// `end`.
    fn run(&self, block: u64, end: u64) -> (bool, u64) {
        let member = self.has(block);
        let mut at = block;
        while at < end {
            let Some(word) = self.word(at) else { break };
            let value = word.load(Ordering::Acquire);
            let others = (if member { !value } else { value }) & (u64::MAX << (at % 64));
            if others != 0 {
                return (member, (at / 64 * 64 + u64::from(others.trailing_zeros())).min(end).max(block + 1));
            }
            at = at / 64 * 64 + 64;
        }
        (member, end.max(block + 1))
    }
}

fn bit(block: u64) -> u64 {
    1 << (block % 64)
}
