//! Finds which disks and snapshots refer to damaged places, and where: one walk over all trees of a view.
//!
//! A node that several trees share is walked again only if damage was found below it. So the walk takes as long as
//! reading each node once, plus the time for the damaged parts of each tree.
//!
//! Of a pack, only the blocks count that are stored in a damaged block. The index of the pack says which these are.

use super::DamagedPlace;
use crate::catalog::ObjectState;
use crate::engine::metadata::{Effects, Sight};
use crate::engine::{Engine, NODES_PER_QUESTION};
use crate::pack::Index;
use crate::pages::PageFile;
use crate::space::{Run, TABLE_ENTRIES};
use crate::tree::{self, Mapping, NodeId, Visit};
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, Buffer};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The part of a disk or snapshot that refers to a damaged place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The id of the disk or snapshot.
    pub object: u64,
    /// The byte offset in the disk or snapshot.
    pub offset: u64,
    /// The length in bytes. If a damaged page describes several ranges, or the disk has a block at several places, they
    /// all lie within this one.
    pub length: u64,
}

/// The references to damaged places.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Located {
    /// For each place, in the order of the request, the references of all disks and snapshots, by object id.
    pub references: Vec<Vec<Reference>>,
    /// For each disk and snapshot that refers to damage, the number of places.
    pub objects: BTreeMap<u64, u64>,
    /// Whether all maps could be read. Otherwise references may be missing.
    pub is_whole: bool,
}

/// A node that the walk has entered and not left.
struct Entered {
    id: NodeId,
    level: u8,
    /// The number of finds when the node was entered.
    found: u64,
    /// The damaged page that holds the node, and the one that holds its reference count.
    damaged: [Option<usize>; 2],
}

/// Reads the index of a pack. `None` if it is damaged.
pub(in crate::engine) type ReadIndex<'a> = &'a dyn Fn(Run) -> Option<Index>;

/// Damage of a stored block of a pack counts for all blocks of the pack.
pub(in crate::engine) const WHOLE_PACKS: ReadIndex<'static> = &|_| None;

/// What a walk searches for.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Wanted<'a> {
    pub places: &'a [DamagedPlace],
    /// The most ranges of a tree for each place, of which the last one contains all further ones.
    pub spans_max: usize,
    pub read_index: ReadIndex<'a>,
}

/// The state of a walk.
struct Search<'a> {
    /// Damaged data blocks, ascending, with their places in the request.
    blocks: Vec<(u64, usize)>,
    /// Damaged pages of `data.table`.
    tables: BTreeMap<u64, usize>,
    /// Damaged nodes.
    nodes: BTreeMap<u64, usize>,
    /// Damaged pages of `map.table`.
    node_tables: BTreeMap<u64, usize>,
    /// Nodes below which there is no damage.
    clean: Vec<bool>,
    entered: Vec<Entered>,
    /// Finds since the walk began.
    found: u64,
    /// The logical blocks of the current tree that refer to each place.
    spans: BTreeMap<usize, Vec<Range<u64>>>,
    wanted: Wanted<'a>,
    visited: u64,
    /// Whether a part of a tree could not be read, so that references to places may be missing.
    is_partial: bool,
    /// Indexes of packs with damaged blocks, by the first stored block.
    indexes: BTreeMap<u64, Option<Index>>,
}

impl<'a> Search<'a> {
    fn new(wanted: Wanted<'a>, nodes: u64) -> Self {
        let mut search = Self {
            blocks: Vec::new(),
            tables: BTreeMap::new(),
            nodes: BTreeMap::new(),
            node_tables: BTreeMap::new(),
            clean: vec![false; nodes as usize],
            entered: Vec::new(),
            found: 0,
            spans: BTreeMap::new(),
            wanted,
            visited: 0,
            is_partial: false,
            indexes: BTreeMap::new(),
        };
        for (index, place) in wanted.places.iter().enumerate() {
            let replaced = match *place {
                DamagedPlace::Block(block) => {
                    search.blocks.push((block, index));
                    None
                }
                DamagedPlace::Page { file: PageFile::DataTable, number } => search.tables.insert(number, index),
                DamagedPlace::Page { file: PageFile::MapTable, number } => search.node_tables.insert(number, index),
                DamagedPlace::Page { file: PageFile::Map, number } => search.nodes.insert(number, index),
                DamagedPlace::Page { .. } | DamagedPlace::Superblock => None,
            };
            debug_assert_eq!(replaced, None, "each place is searched for once");
        }
        search.blocks.sort_unstable();
        search
    }

    fn visit(&mut self, visit: Visit, go_on: &dyn Fn() -> bool) -> Result<bool> {
        match visit {
            Visit::Node { id, level } => {
                self.visited += 1;
                if self.visited.is_multiple_of(NODES_PER_QUESTION) && !go_on() {
                    let text = "the search for the disks that refer to damaged places was stopped on request";
                    return Err(Error::new(ErrorKind::Interrupted, text));
                }
                Ok(self.enter(id, level))
            }
            Visit::Extent(mapping) => {
                self.extent(mapping);
                Ok(true)
            }
        }
    }

    /// Adds logical blocks of the current tree to those that refer to a place.
    fn find(&mut self, index: usize, logical: Range<u64>) {
        self.found += 1;
        let spans = self.spans.entry(index).or_default();
        let is_full = spans.len() >= self.wanted.spans_max;
        match spans.last_mut() {
            Some(last) if is_full || logical.start <= last.end && last.start <= logical.end => {
                *last = last.start.min(logical.start)..last.end.max(logical.end);
            }
            _ => spans.push(logical),
        }
    }

    /// Leaves the nodes that do not contain the next node, which is on `level`.
    fn leave(&mut self, level: Option<u8>) {
        while let Some(last) = self.entered.pop_if(|last| level.is_none_or(|level| last.level <= level)) {
            if last.found == self.found
                && let Some(clean) = self.clean.get_mut(last.id.0 as usize)
            {
                *clean = true;
            }
        }
    }

    fn damaged_pages(&self, id: NodeId) -> [Option<usize>; 2] {
        [self.nodes.get(&id.0).copied(), self.node_tables.get(&(id.0 / TABLE_ENTRIES)).copied()]
    }

    /// Enters a node. Returns whether the walk has to descend.
    fn enter(&mut self, id: NodeId, level: u8) -> bool {
        self.leave(Some(level));
        // Below a damaged node every extent counts, so that its range is known.
        let counts = self.entered.iter().any(|entered| entered.damaged != [None; 2]);
        if !counts && self.clean.get(id.0 as usize).copied().unwrap_or(false) {
            return false;
        }
        let damaged = self.damaged_pages(id);
        self.entered.push(Entered { id, level, found: self.found, damaged });
        // A damaged node is never clean, even if it maps nothing.
        self.found += u64::from(damaged != [None; 2]);
        true
    }

    fn extent(&mut self, mapping: Mapping) {
        let logical = mapping.logical..mapping.logical + mapping.blocks;
        let stored = mapping.stored();
        let physical = stored.physical..stored.physical + stored.blocks;
        let inside: BTreeSet<usize> = self.entered.iter().flat_map(|entered| entered.damaged).flatten().collect();
        for index in inside {
            self.find(index, logical.clone());
        }
        for page in physical.start / TABLE_ENTRIES..=(physical.end - 1) / TABLE_ENTRIES {
            if let Some(index) = self.tables.get(&page).copied() {
                self.find(index, logical.clone());
            }
        }
        if mapping.unwritten {
            return;
        }
        let mut at = self.blocks.partition_point(|(block, _)| *block < physical.start);
        while let Some((block, index)) = self.blocks.get(at).copied().filter(|(block, _)| *block < physical.end) {
            let logical = self.stored_in(mapping, block);
            if !logical.is_empty() {
                self.find(index, logical);
            }
            at += 1;
        }
    }

    /// The logical blocks of an entry of which a part is in this stored block.
    fn stored_in(&mut self, mapping: Mapping, block: u64) -> Range<u64> {
        let whole = mapping.logical_of(block..block + 1);
        // Without the first stored block, which has the index, no block of the pack can be read.
        let Some(packed) = mapping.packed.filter(|_| block > mapping.physical) else { return whole };
        let pack = Run { start: mapping.physical, blocks: u64::from(packed.stored) };
        let index = self.indexes.entry(pack.start).or_insert_with(|| (self.wanted.read_index)(pack));
        let Some(index) = index else { return whole };
        let at = (block - pack.start) as usize * BLOCK_SIZE;
        let inside = index.blocks_in(&(at..at + BLOCK_SIZE));
        let logical = |number: usize| (mapping.logical + number as u64).saturating_sub(u64::from(packed.index));
        logical(inside.start).max(whole.start)..logical(inside.end).min(whole.end)
    }

    /// Called for a part of the tree that cannot be read.
    fn lost(&mut self, id: NodeId, logical: Range<u64>) {
        // The nodes above are not clean, even if this damage was not found by the scrub.
        self.found += 1;
        self.is_partial = true;
        for index in self.damaged_pages(id).into_iter().flatten() {
            self.find(index, logical.clone());
        }
    }
}

/// For each place to which a tree refers, the logical blocks.
pub(in crate::engine) type Spans = BTreeMap<usize, Vec<Range<u64>>>;

impl Sight<'_> {
    /// Calls `found` for each of the trees, with the places to which it refers. Returns whether all parts of the trees
    /// and of the catalog could be read. If blocks of packs are reused meanwhile, the index of another pack may be
    /// read.
    pub(in crate::engine) fn search_trees<T>(
        &mut self,
        wanted: Wanted<'_>,
        trees: &[T],
        root: impl Fn(&T) -> NodeId,
        go_on: &dyn Fn() -> bool,
        found: &mut dyn FnMut(&T, Spans),
    ) -> Result<bool> {
        let search = RefCell::new(Search::new(wanted, self.map.blocks()));
        for tree in trees {
            let mut effects = Effects::default();
            let mut visit = |visit: Visit| search.borrow_mut().visit(visit, go_on);
            let mut lost = |id: NodeId, logical: Range<u64>, _: Error| search.borrow_mut().lost(id, logical);
            tree::walk_damaged(&mut self.nodes(&mut effects), root(tree), &mut visit, &mut lost)?;
            let mut search = search.borrow_mut();
            search.leave(None);
            found(tree, std::mem::take(&mut search.spans));
        }
        Ok(!search.into_inner().is_partial && self.catalog.lost().is_empty())
    }
}

impl Engine {
    /// Reads the index of a pack from the medium. `None` if it is damaged.
    pub(in crate::engine) fn read_index(&self, pack: Run) -> Option<Index> {
        let mut first = Buffer::recycled(1);
        self.read_run(Run { blocks: 1, ..pack }, &mut first).ok()?;
        Index::decode(&first, pack.blocks as usize * BLOCK_SIZE).ok()
    }

    /// Finds which disks and snapshots refer to damaged places. Deleted ones do not count. `go_on` is called after each
    /// [`NODES_PER_QUESTION`] nodes, and returns false to stop the search.
    ///
    /// # Errors
    /// `Interrupted` if `go_on` has returned false.
    pub fn locate_damage(&self, places: &[DamagedPlace], go_on: &dyn Fn() -> bool) -> Result<Located> {
        let _counting = self.counting.lock();
        self.flush()?;
        let mut view = self.view_sealed()?;
        let objects: Vec<(u64, NodeId, u64)> = view
            .catalog()
            .objects()
            .filter(|object| object.state != ObjectState::Trash)
            .filter_map(|object| Some((object.id, object.root?, object.capacity)))
            .collect();
        let mut located = Located { references: vec![Vec::new(); places.len()], ..Located::default() };
        let mut found = |(object, _, capacity): &(u64, NodeId, u64), spans: Spans| {
            if !spans.is_empty() {
                located.objects.insert(*object, spans.len() as u64);
            }
            for (index, span) in
                spans.into_iter().flat_map(|(index, spans)| spans.into_iter().map(move |span| (index, span)))
            {
                let byte = |block: u64| block.saturating_mul(BLOCK_SIZE as u64).min(*capacity);
                let (offset, end) = (byte(span.start), byte(span.end));
                located.references[index].push(Reference { object: *object, offset, length: end - offset });
            }
        };
        let wanted = Wanted { places, spans_max: 1, read_index: &|pack| self.read_index(pack) };
        let searched = view.sight().search_trees(wanted, &objects, |(_, root, _)| *root, go_on, &mut found);
        located.references.iter_mut().for_each(|references| references.sort_by_key(|reference| reference.object));
        // If pages of the view were lost, what was found in it is meaningless.
        view.check()?;
        Ok(Located { is_whole: searched?, ..located })
    }
}
