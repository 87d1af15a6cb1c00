//! Metadata: the trees, the tables and the catalog, their pending changes, and the blocks that pending changes hold.
//!
//! One lock protects the metadata. It is taken after all other locks of the engine, except locks of [`super::log`] that
//! are held for a few instructions. Pages are read without the lock ([`fetch`]). This part takes no lock of another
//! part.

mod apply;
mod cost;
mod fetch;
mod freed;
mod part;
mod pending;
mod survey;
mod view;

pub(crate) use apply::{Effects, NODES_PER_OPERATION, Nodes};
pub(crate) use cost::{LEAVES_PER_TREE_MAX, PACK_SPLITS_MAX, Touched};
pub(crate) use fetch::Fetch;
pub(crate) use freed::Freed;
pub(crate) use part::{LeafPart, PART_BLOCKS, PartOfLeaf, end_of_part};
pub(crate) use pending::{Pending, Queue};
pub(crate) use view::{Sight, View};

use super::inspect::StoreCounts;
use super::placement::{Holds, InFlight};
use super::read_cache::ReadCache;
use crate::Result;
use crate::catalog::Catalog;
use crate::journal::Operation;
use crate::pages::{Kept, PageFile, PageStatistics, Pages};
use crate::space::{BlockEntry, Run, Space};
use crate::sync::{Mutex, MutexGuard};
use crate::tree;
use backend::{Directory, File, SharedSlice};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The metadata of a store with its lock, and the files of its pages.
pub struct Metadata {
    meta: Mutex<Meta>,
    files: [Arc<dyn File>; PageFile::COUNT],
    /// Copies of pages that views still need and that checkpoints have overwritten.
    kept: Arc<Kept>,
    read_cache: Arc<ReadCache>,
}

/// Everything that the metadata lock protects.
pub struct Meta {
    pub pages: Pages,
    pub map: Space,
    pub data: Space,
    pub catalog: Catalog,
    /// Journalled payload that is not written to the data files yet, by physical block.
    pub logged: BTreeMap<u64, SharedSlice>,
    /// Blocks that are being written: by write-back, by a write that bypasses the buffer, or with journalled payload.
    pub in_flight: InFlight,
    /// Changes that are not in the journal yet.
    pub pending: Queue,
    /// Freed blocks that cannot be reused yet.
    pub freed: Freed,
    /// Content of data blocks. Whatever gives a block other content makes the cache forget the block.
    pub read_cache: Arc<ReadCache>,
    /// Blocks and nodes that pending operations concern, see [`super::placement`].
    holds: Holds,
    /// By how many data blocks each disk has grown since the store was opened, including replay.
    pub growth: FxHashMap<u64, i64>,
    /// Height of the highest known tree.
    levels: u64,
    /// `Some` if a view was requested: the catalog and the counts, which the next checkpoint captures.
    viewed: Option<(Catalog, StoreCounts)>,
}

impl Metadata {
    /// The metadata of a store that is being opened; `pages` has the pages that the opening has read.
    pub fn new(
        directory: Arc<dyn Directory>,
        files: [Arc<dyn File>; PageFile::COUNT],
        pages: Pages,
        map: Space,
        data: Space,
        catalog: Catalog,
        read_cache: ReadCache,
    ) -> Self {
        let read_cache = Arc::new(read_cache);
        let meta = Meta {
            pages,
            map,
            data,
            catalog,
            logged: BTreeMap::new(),
            in_flight: InFlight::default(),
            pending: Queue::default(),
            freed: Freed::default(),
            read_cache: Arc::clone(&read_cache),
            holds: Holds::default(),
            growth: FxHashMap::default(),
            levels: 1,
            viewed: None,
        };
        Self { meta: Mutex::new(meta), files, kept: Kept::new(directory), read_cache }
    }

    /// The read cache.
    pub fn read_cache(&self) -> &ReadCache {
        &self.read_cache
    }

    /// The metadata, locked.
    pub fn lock(&self) -> MutexGuard<'_, Meta> {
        self.meta.lock()
    }

    /// The file of a kind of pages.
    pub fn file(&self, file: PageFile) -> &dyn File {
        &*self.files[file as usize]
    }

    /// The files of all kinds of pages.
    pub fn files(&self) -> &[Arc<dyn File>; PageFile::COUNT] {
        &self.files
    }

    /// Counters of the cache of pages.
    pub fn statistics(&self) -> PageStatistics {
        self.lock().pages.statistics()
    }
}

impl Meta {
    /// The table entry of a data block.
    pub fn entry(&mut self, block: u64) -> Result<BlockEntry> {
        self.data.entry(&mut self.pages, block)
    }

    /// Applies an operation and queues it for the journal.
    pub fn enqueue(&mut self, operation: Operation, gate: u64) -> Result<()> {
        let mut effects = Effects::default();
        self.apply(&operation, &mut effects)?;
        let Effects { freed, unshared, unshared_nodes, changed_nodes, levels: _ } = effects;
        for run in unshared.iter().copied().chain(operation.names()) {
            self.data.annotate(&mut self.pages, run, |block, entry| {
                self.holds.hold_block(block, entry.held);
                entry.held = true;
            })?;
        }
        self.holds.spread(&changed_nodes);
        unshared_nodes.into_iter().for_each(|node| self.holds.hold_node(node));
        self.freed.freed(&freed);
        let number = self.holds.pushed();
        self.pending.push(operation, gate, number, freed, unshared);
        Ok(())
    }

    /// Called for pending changes that are in the journal, in their order. Blocks that the changes held may be
    /// overwritten in place; blocks that they freed wait for the end of reads. True if the changes freed any.
    pub fn committed(&mut self, changes: Vec<Pending>) -> Result<bool> {
        let mut freed = Vec::new();
        for change in changes {
            for run in change.held() {
                self.data.annotate(&mut self.pages, run, |block, entry| {
                    if self.holds.release_block(block, change.number) {
                        entry.held = false;
                    }
                })?;
            }
            self.holds.committed(change.number);
            freed.extend(change.freed);
        }
        Ok(self.freed.durable(freed))
    }

    /// Sizes of the store.
    pub fn counts(&self) -> StoreCounts {
        StoreCounts {
            data: self.data.counts(),
            map: self.map.counts(),
            reserved: self.catalog.reserved(),
            held: self.freed.blocks(),
            pages_cached: self.pages.cached() as u64,
            pages_dirty: self.pages.dirty() as u64,
        }
    }

    /// Height of the highest known tree, of those that have grown or were measured.
    pub fn levels(&self) -> u64 {
        self.levels
    }

    /// Measures the height of a disk's tree.
    pub fn note_levels(&mut self, disk: u64) -> Result<()> {
        if let Some(root) = self.catalog.get(disk)?.root {
            let mut effects = Effects::default();
            let levels = tree::levels(&mut self.nodes(&mut effects), root)?;
            self.levels = self.levels.max(levels);
        }
        Ok(())
    }

    /// Whether pending changes hold nodes of the map, see [`super::placement`].
    pub fn holds_nodes(&self) -> bool {
        !self.holds.no_nodes()
    }

    /// Called after the bitmaps of a region were rebuilt from the table: marks the [`unreleased`] blocks as used.
    pub(crate) fn retain_freed(&mut self) {
        unreleased(&self.pending, &self.freed).for_each(|run| self.data.retain(run));
    }

    /// How many times a region was excluded from allocation because its table was lost.
    pub fn losses(&self) -> u64 {
        self.data.losses() + self.map.losses()
    }

    /// Makes blocks allocatable if they were freed durably and no read refers to them any more.
    pub fn release_freed(&mut self) -> bool {
        let mut any = false;
        while let Some(runs) = self.freed.take() {
            for run in runs {
                self.data.release(run);
                any = true;
            }
        }
        any
    }
}

/// The blocks that are free in the table but cannot be reused yet, because their freeing is not durable or reads may
/// refer to them. Blocks that were freed by changes which are just being appended or retired are not found.
pub(crate) fn unreleased<'a>(pending: &'a Queue, freed: &'a Freed) -> impl Iterator<Item = Run> + 'a {
    pending.iter().flat_map(|pending| pending.freed.iter()).chain(freed.waiting()).copied()
}
