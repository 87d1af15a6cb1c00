//! What a set of trees maps, with every block counted once, however many entries of these trees map it.
//!
//! The walk enters each node once. A block with one reference is counted when its entry is reached. The others are
//! noted in bitmaps, and packs in lists with the indexes that are in use, and are counted at the end of the pass.
//!
//! What must hold:
//!
//! 1. A pass enters each node once, so an entry that has the only reference on its blocks is reached once.
//! 2. Memory is limited to two bits for each node of the map, and [`NOTED_MAX`] bytes of notes. If more blocks have
//!    several references, a pass notes those with low numbers, and further passes note the others.
//! 3. A block is overwritten in place only if each node on the path to its entry, and the block, has one reference.

use super::freed::{Bits, DataReferences, node_of_level, root_level};
use super::{EXTENT_BLOCKS_MAX, Mapping, NodeId, PhysicalRun, page, references};
use crate::Result;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Indexes of a pack.
const INDEXES: usize = EXTENT_BLOCKS_MAX as usize;
/// Blocks of a page of notes.
const NOTED_PER_PAGE: u64 = 1024;
/// The most bytes of notes. Tests use fewer, so that they make several passes.
const NOTED_MAX: usize = if cfg!(test) { 2 << 10 } else { 64 << 20 };

/// What a set of trees maps, in blocks. Every block counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DistinctBlocks {
    /// Data blocks that are not compressed, without those of `unwritten`.
    pub written: u64,
    /// Data blocks that read as zeros.
    pub unwritten: u64,
    /// Compressed blocks: indexes of packs. One that several entries map counts once.
    pub packed: u64,
    /// Data blocks of the packs of these blocks.
    pub packs: u64,
    /// The part of `written` and `unwritten` that one entry of one tree maps. Writes of this tree overwrite such a
    /// block in place.
    pub own: u64,
}

impl DistinctBlocks {
    /// The data blocks that the trees use.
    pub fn stored(&self) -> u64 {
        self.written + self.unwritten + self.packs
    }

    /// The blocks that the trees map, each counted once.
    pub fn mapped(&self) -> u64 {
        self.written + self.unwritten + self.packed
    }

    fn add_pack(&mut self, pack: &PackUse) {
        self.packed += pack.count();
        self.packs += pack.run.blocks;
    }
}

/// A pack, and the indexes of it that are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackUse {
    /// The data blocks of the pack.
    pub run: PhysicalRun,
    used: [u64; INDEXES / 64],
}

impl PackUse {
    /// A pack with these indexes in use.
    pub fn of(run: PhysicalRun, indexes: Range<usize>) -> Self {
        let mut pack = Self { run, used: [0; INDEXES / 64] };
        pack.add(indexes);
        pack
    }

    fn add(&mut self, indexes: Range<usize>) {
        for index in indexes.start..indexes.end.min(INDEXES) {
            self.used[index / 64] |= 1 << (index % 64);
        }
    }

    /// Whether the compressed block with this index is in use.
    pub fn has(&self, index: usize) -> bool {
        self.used.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
    }

    /// The number of compressed blocks that are in use.
    pub fn count(&self) -> u64 {
        self.used.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// Counts what these trees map. Calls `each_pack` with every pack, in no particular order. `go_on` is called for each
/// visited node; its error ends the count.
pub fn distinct<S: DataReferences + ?Sized>(
    store: &mut S,
    roots: &[NodeId],
    go_on: &mut dyn FnMut() -> Result<()>,
    each_pack: &mut dyn FnMut(&PackUse),
) -> Result<DistinctBlocks> {
    let mut tops = Vec::with_capacity(roots.len());
    for root in roots {
        tops.push((*root, root_level(store, *root)?));
    }
    let mut walk = Walk { store, entered: Bits::default(), sum: DistinctBlocks::default(), go_on, each_pack };
    let mut notes = Some(Notes::new(0));
    while let Some(mut now) = notes {
        walk.entered.clear();
        for (root, level) in &tops {
            walk.reach(*root, *level, true, &mut now)?;
        }
        walk.add(&now);
        notes = now.next();
    }
    Ok(walk.sum)
}

/// Blocks with several references, by number.
#[derive(Default)]
struct Page {
    written: [u64; NOTED_PER_PAGE as usize / 64],
    unwritten: [u64; NOTED_PER_PAGE as usize / 64],
    /// Packs that begin here, by their first blocks.
    packs: Vec<PackUse>,
}

impl Page {
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.packs.len() * size_of::<PackUse>()
    }
}

/// What a pass has noted.
struct Notes {
    pages: FxHashMap<u64, Box<Page>>,
    bytes: usize,
    /// The blocks that this pass notes.
    window: Range<u64>,
}

impl Notes {
    fn new(from: u64) -> Self {
        Self { pages: FxHashMap::default(), bytes: 0, window: from..u64::MAX }
    }

    fn is_first(&self) -> bool {
        self.window.start == 0
    }

    fn page(&mut self, block: u64) -> Option<&mut Page> {
        if !self.window.contains(&block) {
            return None;
        }
        let bytes = &mut self.bytes;
        Some(self.pages.entry(block / NOTED_PER_PAGE).or_insert_with(|| {
            *bytes += size_of::<Page>();
            Box::default()
        }))
    }

    fn add(&mut self, block: u64, unwritten: bool) {
        let Some(page) = self.page(block) else { return };
        let bits = if unwritten { &mut page.unwritten } else { &mut page.written };
        let index = (block % NOTED_PER_PAGE) as usize;
        bits[index / 64] |= 1 << (index % 64);
        self.bound();
    }

    fn add_pack(&mut self, run: PhysicalRun, indexes: Range<usize>) {
        let Some(page) = self.page(run.physical) else { return };
        match page.packs.binary_search_by_key(&run.physical, |pack| pack.run.physical) {
            Ok(at) => page.packs[at].add(indexes),
            Err(at) => {
                page.packs.insert(at, PackUse::of(run, indexes));
                self.bytes += size_of::<PackUse>();
            }
        }
        self.bound();
    }

    /// Leaves the upper half of the noted blocks to the next pass, if there are too many notes.
    fn bound(&mut self) {
        if self.bytes <= NOTED_MAX || self.pages.len() < 2 {
            return;
        }
        let mut numbers: Vec<u64> = self.pages.keys().copied().collect();
        let middle = numbers.len() / 2;
        let (_, first_left_out, _) = numbers.select_nth_unstable(middle);
        let first_left_out = *first_left_out;
        self.pages.retain(|page, _| *page < first_left_out);
        self.bytes = self.pages.values().map(|page| page.bytes()).sum();
        self.window.end = first_left_out * NOTED_PER_PAGE;
    }

    /// The notes of the next pass; `None` if this pass was the last.
    fn next(&self) -> Option<Self> {
        (self.window.end < u64::MAX).then(|| Self::new(self.window.end))
    }
}

struct Walk<'a, S: ?Sized> {
    store: &'a mut S,
    /// Nodes with several references that the current pass has entered.
    entered: Bits,
    sum: DistinctBlocks,
    go_on: &'a mut dyn FnMut() -> Result<()>,
    each_pack: &'a mut dyn FnMut(&PackUse),
}

impl<S: DataReferences + ?Sized> Walk<'_, S> {
    /// Called for each root, and for each reference of an entered node. `alone` is true if each node above has one
    /// reference. Recursive, with one call for each level of the tree.
    fn reach(&mut self, id: NodeId, level: u8, alone: bool, notes: &mut Notes) -> Result<()> {
        let shared = references(self.store, id)? > 1;
        if shared && !self.entered.insert(id) {
            return Ok(());
        }
        (self.go_on)()?;
        let node = node_of_level(self.store, id, level)?;
        let alone = alone && !shared;
        if level > 0 {
            let children: Vec<NodeId> = page::children(node).collect();
            return children.into_iter().try_for_each(|child| self.reach(child, level - 1, alone, notes));
        }
        let mappings: Vec<Mapping> = page::mappings_from(node, 0).collect();
        mappings.iter().try_for_each(|mapping| self.count(mapping, alone, notes))
    }

    /// Counts an entry of a leaf.
    fn count(&mut self, mapping: &Mapping, alone: bool, notes: &mut Notes) -> Result<()> {
        let (run, first) = (mapping.stored(), notes.is_first());
        if let Some(packed) = mapping.packed {
            let from = usize::from(packed.index);
            let indexes = from..from + mapping.blocks as usize;
            let mut references = 0;
            self.store.data_references(run.physical, 1, &mut |_, now| references = now)?;
            if references > 1 {
                notes.add_pack(run, indexes);
            } else if first {
                let pack = PackUse::of(run, indexes);
                self.sum.add_pack(&pack);
                (self.each_pack)(&pack);
            }
            return Ok(());
        }
        let (start, end) = match first {
            true => (run.physical, run.physical + run.blocks),
            false => (run.physical.max(notes.window.start), (run.physical + run.blocks).min(notes.window.end)),
        };
        if start >= end {
            return Ok(());
        }
        let mut single = 0;
        self.store.data_references(start, end - start, &mut |block, references| match references {
            1 => single += 1,
            _ => notes.add(block, mapping.unwritten),
        })?;
        if first {
            let sum = if mapping.unwritten { &mut self.sum.unwritten } else { &mut self.sum.written };
            *sum += single;
            self.sum.own += if alone { single } else { 0 };
        }
        Ok(())
    }

    /// Adds what a pass has noted.
    fn add(&mut self, notes: &Notes) {
        let ones = |bits: &[u64]| bits.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        for page in notes.pages.values() {
            self.sum.written += ones(&page.written);
            self.sum.unwritten += ones(&page.unwritten);
            for pack in &page.packs {
                self.sum.add_pack(pack);
                (self.each_pack)(pack);
            }
        }
    }
}
