//! The write buffer: what was written to a disk and is not in its map yet.
//!
//! Writes, discards and zeroes enter the buffer and are then acknowledged. Write-back writes the buffered entries to
//! the data files in order of address; a flush appends them to the journal. A snapshot closes the newest layer: this
//! layer and the layers below belong to the snapshot. Later writes enter a new layer above, so taking a snapshot moves
//! no data.
//!
//! What must hold:
//!
//! 1. Within a layer entries do not overlap: a layer holds only the newest write to a block.
//! 2. A layer is emptied into the map before any entry of the layer above it.
//! 3. An entry that write-back is writing stays readable until the map refers to its new blocks. Then write-back
//!    removes only the parts that still have the stamp (the write number) of the entry: a later write may have replaced
//!    the others.

use crate::space::Run;
use backend::{BLOCK_SIZE, SharedSlice};
use checksums::Checksums;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// A kind of change to a range of blocks.
#[derive(Clone, Debug)]
pub enum Content {
    /// The blocks get new data.
    Data(SharedSlice, Checksums),
    /// The blocks are discarded.
    Unmapped,
    /// The range reads as zeros. Mapped blocks stay allocated, and unmapped blocks are allocated.
    Zero,
}

impl Content {
    /// The number of map changes that `blocks` blocks of this content may need, in addition to one for each block of
    /// data.
    pub fn changes(&self, blocks: u64) -> u64 {
        match self {
            Self::Data(..) => 0,
            Self::Unmapped => DISCARD_CHANGES,
            Self::Zero => blocks,
        }
    }

    /// The same content in memory of its own.
    pub fn copied(self) -> Self {
        match self {
            Self::Data(slice, sums) => Self::Data(SharedSlice::copy_of(&slice), sums),
            other => other,
        }
    }

    /// The content of a part of the blocks.
    pub fn part(&self, blocks: Range<u64>) -> Self {
        match self {
            Self::Data(slice, sums) => {
                let (from, to) = (blocks.start as usize, blocks.end as usize);
                Self::Data(slice.slice(from * BLOCK_SIZE..to * BLOCK_SIZE), sums.part(from..to))
            }
            Self::Unmapped => Self::Unmapped,
            Self::Zero => Self::Zero,
        }
    }
}

/// The resources reserved for buffered entries, besides memory. They are released when the entries are removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Free blocks claimed: free blocks that no other operation may use.
    pub claimed: u64,
    /// Blocks of data: each may need one map change.
    pub data: u64,
    /// Further map changes, see [`Content::changes`].
    pub changes: u64,
}

impl std::ops::AddAssign for Held {
    fn add_assign(&mut self, other: Self) {
        self.claimed += other.claimed;
        self.data += other.data;
        self.changes += other.changes;
    }
}

/// The map changes that a discard of any length may need: one at its beginning, one at its end, and one where the
/// current step of the discard ends. Mappings in between need no change of their own: they are removed from the nodes
/// that the three changes rewrite, or with whole subtrees.
pub const DISCARD_CHANGES: u64 = 3;

/// A run of blocks with one kind of change.
#[derive(Clone, Debug)]
pub struct DirtyEntry {
    /// Length in blocks.
    pub blocks: u64,
    /// The kind of change.
    pub content: Content,
    /// Number of the write that made the entry. Parts of an entry keep the number.
    pub stamp: u64,
    /// Whether free blocks were claimed for the entry.
    pub claimed: bool,
    /// Whether free map nodes were reserved for the entry. If not, the entry needs none, because it overwrites written
    /// blocks of its disk.
    pub covered: bool,
}

/// An entry with its logical position.
#[derive(Clone, Debug)]
pub struct DirtyPiece {
    /// First logical block.
    pub logical: u64,
    /// The entry, cut to this part.
    pub entry: DirtyEntry,
}

impl DirtyPiece {
    /// The logical block after the last one.
    pub fn end(&self) -> u64 {
        self.logical + self.entry.blocks
    }

    /// Whether the blocks get new data.
    pub fn is_data(&self) -> bool {
        matches!(self.entry.content, Content::Data(..))
    }

    /// The part of the entry in a range of logical blocks.
    pub fn part(&self, range: Range<u64>) -> Self {
        let content = self.entry.content.part(range.start - self.logical..range.end - self.logical);
        let entry = DirtyEntry { blocks: range.end - range.start, content, ..self.entry.clone() };
        Self { logical: range.start, entry }
    }

    /// The first blocks of the entry.
    pub fn first(&self, blocks: u64) -> Self {
        self.part(self.logical..self.logical + blocks)
    }
}

/// The writes to a disk between two snapshots.
#[derive(Default)]
pub struct Layer {
    entries: BTreeMap<u64, DirtyEntry>,
    /// Blocks of data in the layer.
    pub data_blocks: u64,
    /// Number of discards in the layer.
    discards: usize,
    /// Set when the layer is closed: the snapshot that is complete once the writes of the layer are in the map.
    pub snapshot: Option<u64>,
}

impl Layer {
    /// True when every entry has been moved into the map.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of entries of the layer.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (&u64, &DirtyEntry)> {
        let first = self
            .entries
            .range(..=range.start)
            .next_back()
            .map_or(range.start, |(at, entry)| if at + entry.blocks > range.start { *at } else { range.start });
        self.entries.range(first..range.end)
    }

    /// The entries of a range, cut to the range.
    pub fn pieces(&self, range: &Range<u64>) -> Vec<DirtyPiece> {
        let cut = |(at, entry): (&u64, &DirtyEntry)| {
            let part = (*at).max(range.start)..(at + entry.blocks).min(range.end);
            DirtyPiece { logical: *at, entry: entry.clone() }.part(part)
        };
        self.overlapping(range).map(cut).collect()
    }

    /// Whether removing `range` splits a discard in two parts, which then each need map changes.
    pub fn cuts_discard(&self, range: &Range<u64>) -> bool {
        self.discards > 0
            && self.overlapping(range).next().is_some_and(|(at, entry)| {
                matches!(entry.content, Content::Unmapped) && *at < range.start && at + entry.blocks > range.end
            })
    }

    /// Removes `range` and returns what was reserved for it. If the removal splits a discard, the caller must have
    /// reserved map changes for the second part.
    fn cut(&mut self, range: &Range<u64>) -> Held {
        let mut held = Held::default();
        let hit: Vec<u64> = self.overlapping(range).map(|(at, _)| *at).collect();
        for at in hit {
            let Some(entry) = self.entries.remove(&at) else { continue };
            let end = at + entry.blocks;
            let (from, to) = (at.max(range.start), end.min(range.end));
            if entry.claimed {
                held.claimed += to - from;
            }
            match entry.content {
                Content::Data(..) => held.data += to - from,
                Content::Zero => held.changes += entry.content.changes(to - from),
                Content::Unmapped if (at, end) == (from, to) => held.changes += entry.content.changes(to - from),
                Content::Unmapped => {}
            }
            self.discards -= usize::from(matches!(entry.content, Content::Unmapped));
            for (start, stop) in [(at, from), (to, end)] {
                if start < stop {
                    self.discards += usize::from(matches!(entry.content, Content::Unmapped));
                    let content = entry.content.part(start - at..stop - at);
                    self.entries.insert(start, DirtyEntry { blocks: stop - start, content, ..entry.clone() });
                }
            }
        }
        self.data_blocks -= held.data;
        held
    }

    /// Replaces the entries of a range and returns what was reserved for the replaced entries.
    pub fn insert(&mut self, logical: u64, entry: DirtyEntry) -> Held {
        let gone = self.cut(&(logical..logical + entry.blocks));
        self.discards += usize::from(matches!(entry.content, Content::Unmapped));
        if matches!(entry.content, Content::Data(..)) {
            self.data_blocks += entry.blocks;
        }
        self.entries.insert(logical, entry);
        gone
    }

    /// The first part of a range that still has the content of the write `stamp`.
    pub fn still(&self, range: &Range<u64>, stamp: u64) -> Option<Range<u64>> {
        self.overlapping(range)
            .find(|(_, entry)| entry.stamp == stamp)
            .map(|(at, entry)| (*at).max(range.start)..(at + entry.blocks).min(range.end))
    }

    /// The parts of these entries that the layer still has.
    pub fn left_of(&self, pieces: &[DirtyPiece]) -> Vec<DirtyPiece> {
        let left = |piece: &DirtyPiece| {
            let stamp = piece.entry.stamp;
            self.pieces(&(piece.logical..piece.end())).into_iter().filter(move |left| left.entry.stamp == stamp)
        };
        pieces.iter().flat_map(left).collect()
    }

    /// Removes the remaining parts of the write `stamp` in a range, and returns what was reserved for them. Of a
    /// discard, only a part at its beginning or end may be removed, unless the caller has reserved map changes for the
    /// second part ([`Layer::cuts_discard`]).
    pub fn remove(&mut self, logical: u64, blocks: u64, stamp: u64) -> Held {
        let mine: Vec<Range<u64>> = self
            .overlapping(&(logical..logical + blocks))
            .filter(|(_, entry)| entry.stamp == stamp)
            .map(|(at, entry)| (*at).max(logical)..(at + entry.blocks).min(logical + blocks))
            .collect();
        let mut gone = Held::default();
        for range in mine {
            gone += self.cut(&range);
        }
        gone
    }

    /// Blocks that may be newly allocated when the entries are moved into the map: the number with a claim, and the
    /// number without a claim.
    fn taking(&self) -> (u64, u64) {
        let (mut claimed, mut others) = (0, 0);
        for entry in self.entries.values().filter(|entry| !matches!(entry.content, Content::Unmapped)) {
            *if entry.claimed { &mut claimed } else { &mut others } += entry.blocks;
        }
        (claimed, others)
    }

    /// Copies entries from logical block `from` on for write-back, up to `most` blocks of data. The last entry may be
    /// cut.
    pub fn take(&self, from: u64, most: u64) -> Vec<DirtyPiece> {
        let mut pieces = Vec::new();
        let mut blocks = 0;
        for (at, entry) in self.entries.range(from..) {
            if blocks >= most || pieces.len() as u64 >= most {
                break;
            }
            let piece = DirtyPiece { logical: *at, entry: entry.clone() };
            if !matches!(entry.content, Content::Data(..)) {
                pieces.push(piece);
                continue;
            }
            let taken = entry.blocks.min(most - blocks);
            blocks += taken;
            pieces.push(if taken < entry.blocks { piece.first(taken) } else { piece });
        }
        pieces
    }
}

/// The layers of one disk, oldest first. New writes enter the last one.
pub struct Layers {
    layers: VecDeque<Layer>,
    /// Blocks that are being read for a partial overwrite. The value becomes false when another write changes the
    /// block.
    partial: FxHashMap<u64, bool>,
}

impl Default for Layers {
    fn default() -> Self {
        Self { layers: VecDeque::from([Layer::default()]), partial: FxHashMap::default() }
    }
}

impl Layers {
    /// True when nothing is buffered.
    pub fn is_empty(&self) -> bool {
        self.layers.len() == 1 && self.layers[0].is_empty()
    }

    /// True when no snapshot waits for buffered writes.
    pub fn is_single(&self) -> bool {
        self.layers.len() == 1
    }

    /// Blocks that may be newly allocated when the entries are moved into the map: the number with a claim, and the
    /// number without a claim.
    pub fn taking(&self) -> (u64, u64) {
        let sums = self.layers.iter().map(Layer::taking);
        sums.fold((0, 0), |sum, layer| (sum.0 + layer.0, sum.1 + layer.1))
    }

    /// All layers, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Layer> {
        self.layers.iter()
    }

    /// The oldest layer, and whether it is closed.
    pub fn oldest(&mut self) -> (&mut Layer, bool) {
        let closed = self.layers.len() > 1;
        (&mut self.layers[0], closed)
    }

    /// The position of the oldest layer with entries, for [`Layers::layer`].
    pub fn first_filled(&self) -> Option<usize> {
        self.layers.iter().position(|layer| !layer.is_empty())
    }

    /// The layer at a position; the oldest has position 0.
    pub fn layer(&mut self, at: usize) -> &mut Layer {
        &mut self.layers[at]
    }

    /// The snapshot that is complete, because the oldest layer is closed and empty.
    pub fn complete(&self) -> Option<u64> {
        if self.layers.len() > 1 && self.layers[0].is_empty() { self.layers[0].snapshot } else { None }
    }

    /// Removes the oldest layer if it is closed and empty, and returns the snapshot that is then complete.
    pub fn retire(&mut self) -> Option<u64> {
        let snapshot = self.complete()?;
        self.layers.pop_front();
        Some(snapshot)
    }

    /// True when nothing is buffered in a range, and no closed layer is left.
    pub fn is_free(&self, range: &Range<u64>) -> bool {
        self.layers.len() == 1 && self.layers[0].overlapping(range).next().is_none()
    }

    /// Makes partial overwrites under way in a range read their block again.
    pub fn invalidate_partial(&mut self, range: &Range<u64>) {
        for (block, valid) in &mut self.partial {
            if range.contains(block) {
                *valid = false;
            }
        }
    }

    /// Whether a write to a range splits a discard of the newest layer in two.
    pub fn cuts_discard(&self, range: &Range<u64>) -> bool {
        self.layers.back().is_some_and(|layer| layer.cuts_discard(range))
    }

    /// Adds a write to the newest layer and returns what was reserved for the entries that it replaces. If the write
    /// splits a discard, the caller must have reserved map changes for the second part.
    pub fn insert(&mut self, logical: u64, entry: DirtyEntry) -> Held {
        if !self.partial.is_empty() {
            self.invalidate_partial(&(logical..logical + entry.blocks));
        }
        self.layers.back_mut().expect("there is always a layer").insert(logical, entry)
    }

    /// Records that a block is being read for a partial overwrite. False if another partial overwrite is reading the
    /// block.
    pub fn begin_partial(&mut self, block: u64) -> bool {
        if self.partial.contains_key(&block) {
            return false;
        }
        self.partial.insert(block, true);
        true
    }

    /// True when no write has changed the block since [`Layers::begin_partial`].
    pub fn end_partial(&mut self, block: u64) -> bool {
        self.partial.remove(&block).unwrap_or(false)
    }

    /// Closes the newest layer for a snapshot. False if nothing is buffered: all writes of the snapshot are in the map
    /// already.
    pub fn close(&mut self, snapshot: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let last = self.layers.back_mut().expect("there is always a layer");
        last.snapshot = Some(snapshot);
        self.layers.push_back(Layer::default());
        true
    }

    /// Removes all entries and returns what was reserved for them.
    pub fn clear(&mut self) -> Held {
        let mut gone = Held::default();
        for layer in &mut self.layers {
            gone += layer.cut(&(0..u64::MAX));
        }
        *self = Self::default();
        gone
    }

    /// The newest buffered content of a range, in extents, and the gaps, for which the map has the content.
    pub fn overlay(&self, range: Range<u64>, pieces: &mut Vec<DirtyPiece>, gaps: &mut Vec<Range<u64>>) {
        gaps.clear();
        gaps.push(range);
        for layer in self.layers.iter().rev() {
            if layer.is_empty() {
                continue;
            }
            let mut left = Vec::new();
            for gap in gaps.drain(..) {
                let mut at = gap.start;
                for (start, entry) in layer.overlapping(&gap) {
                    let (from, to) = ((*start).max(gap.start), (start + entry.blocks).min(gap.end));
                    if from >= to {
                        continue;
                    }
                    if at < from {
                        left.push(at..from);
                    }
                    let content = entry.content.part(from - start..to - start);
                    pieces.push(DirtyPiece {
                        logical: from,
                        entry: DirtyEntry { blocks: to - from, content, ..entry.clone() },
                    });
                    at = to;
                }
                if at < gap.end {
                    left.push(at..gap.end);
                }
            }
            *gaps = left;
            if gaps.is_empty() {
                break;
            }
        }
    }
}

/// A run of physical blocks as bytes in its data file: (file number, byte offset, length).
pub fn place(run: Run) -> (u64, u64, u64) {
    let size = BLOCK_SIZE as u64;
    (run.start / crate::FILE_BLOCKS, run.start % crate::FILE_BLOCKS * size, run.blocks * size)
}

#[cfg(test)]
mod tests;
