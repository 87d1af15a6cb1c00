//! Upper limits of the cost of changes: journal bytes, and dirty pages.

use super::{Effects, Meta};
use crate::catalog::SLOTS_PER_PAGE;
use crate::engine::log::{Cost, INITIAL_PAGES, PAGES_FLOOR};
use crate::journal::Operation;
use crate::space::{REGION_PAGES, Run, SUMMARY_ENTRIES, TABLE_ENTRIES};
use crate::{Result, tree};
use std::ops::Range;

/// Pages that every operation may dirty in addition to its own: the catalog page of its disk, and summaries.
const PAGES_BESIDE: u64 = 3;
/// Pages that become dirty when one leaf is dropped: the table pages of all its extents and of its node, and the parent
/// node.
const PAGES_PER_DROPPED_LEAF: u64 = 2 * 254 + 4;
/// Nodes above a leaf, and further pages that every operation may dirty.
const PAGES_ON_PATH: u64 = tree::LEVELS_MAX as u64 + PAGES_BESIDE;
/// The most leaves of one tree that one pack or one share changes, of 256 blocks that may have an entry each.
pub const LEAVES_PER_TREE_MAX: usize = 4;
/// The most leaves that one pack or one share may split.
pub const PACK_SPLITS_MAX: u64 = 2;
/// Pages, other than nodes and table pages, that a small datastore changes between two checkpoints.
const FEW_PAGES: u64 = 64;

/// An upper limit of the pages that the changes of one step dirty. If the changes are added in ascending order, a page
/// that several of them dirty counts once.
#[derive(Default)]
pub struct Touched {
    seen: tree::Seen,
    nodes: u64,
    tables: u64,
    /// The page of the data table that was counted last.
    last: Option<u64>,
}

impl Touched {
    /// Adds a change of the table entries of a run.
    pub fn touch_run(&mut self, run: Run) {
        let (first, last) = (run.start / TABLE_ENTRIES, (run.start + run.blocks.max(1) - 1) / TABLE_ENTRIES);
        self.tables += last - first + 1 - u64::from(self.last == Some(first));
        self.last = Some(last);
    }
}

/// Number of pages of the data table that describe a run.
pub(super) fn table_pages(run: Run) -> u64 {
    (run.start + run.blocks.max(1) - 1) / TABLE_ENTRIES - run.start / TABLE_ENTRIES + 1
}

/// The most leaves that an operation on 256 blocks changes in the trees of these objects.
fn leaves_of(objects: &[u64]) -> u64 {
    (LEAVES_PER_TREE_MAX * objects.len()) as u64
}

impl Meta {
    /// Number of pages that the next checkpoint would write.
    pub fn dirty_pages(&self) -> u64 {
        let summaries = |regions: u64| regions / SUMMARY_ENTRIES + 1;
        self.pages.dirty() as u64
            + self.catalog.changed()
            + self.data.changed_regions().min(summaries(self.data.regions()))
            + self.map.changed_regions().min(summaries(self.map.regions()))
    }

    /// Number of pages of all tables and summaries.
    fn tables(&self) -> u64 {
        let regions = self.data.regions() + self.map.regions();
        regions * REGION_PAGES + regions / SUMMARY_ENTRIES + 2
    }

    /// Computes how much of a range can be changed while dirtying about `most` pages, at least the part in one leaf.
    /// Returns the end of that part, and the most pages that the change dirties.
    pub fn reach(&mut self, disk: u64, range: Range<u64>, unmap: bool, most: u64) -> Result<(u64, u64)> {
        let mut touched = Touched::default();
        let end = self.touch(disk, range, unmap, most, &mut touched)?;
        Ok((end, self.pages_of(&touched)))
    }

    /// Adds a change of a disk's mapping to `touched`. Returns the block where the change has to end.
    fn touch(&mut self, disk: u64, range: Range<u64>, unmap: bool, most: u64, touched: &mut Touched) -> Result<u64> {
        let Some(root) = self.catalog.get(disk)?.root else { return Ok(range.end) };
        let (mut effects, seen) = (Effects::default(), &mut touched.seen);
        let reach = tree::reach(&mut self.nodes(&mut effects), root, range, unmap, TABLE_ENTRIES, most, seen)?;
        touched.nodes += reach.nodes;
        touched.tables += reach.tables;
        Ok(reach.end)
    }

    /// Adds a change that maps a range to a run.
    pub fn touch_mapping(&mut self, disk: u64, range: Range<u64>, run: Run, touched: &mut Touched) -> Result<()> {
        self.touch(disk, range, false, u64::MAX, touched)?;
        touched.touch_run(run);
        Ok(())
    }

    /// The most pages that these changes dirty.
    pub fn pages_of(&self, touched: &Touched) -> u64 {
        let summaries = touched.tables.min(self.tables() / REGION_PAGES / SUMMARY_ENTRIES + 2);
        touched.nodes + (touched.tables + summaries).min(self.tables()) + PAGES_BESIDE
    }

    /// The most pages that mapping blocks elsewhere in this many leaves dirties. `touched` has the blocks before and
    /// after.
    fn pages_of_redirect(&self, leaves: u64, mut touched: Touched) -> u64 {
        // For those that are split: on each level the node, a new one and the table page of the new one.
        touched.nodes = leaves + PACK_SPLITS_MAX * self.pages_of_split();
        self.pages_of(&touched)
    }

    /// The most pages that the split of a leaf dirties.
    fn pages_of_split(&self) -> u64 {
        3 * (self.levels() + 2)
    }

    /// An upper limit of the cost of an operation, including its bytes in a batch.
    pub fn cost(&mut self, operation: &Operation) -> Result<Cost> {
        let pages = match operation {
            Operation::Map { .. }
            | Operation::MapData { .. }
            | Operation::MapPack { .. }
            | Operation::MapShared { .. }
            | Operation::MapSharedPack { .. }
            | Operation::Unwritten { .. }
            | Operation::Written { .. } => {
                let mut touched = Touched::default();
                if let Some((disk, range, run)) = operation.mapping() {
                    self.touch_mapping(disk, range, run, &mut touched)?;
                }
                self.pages_of(&touched)
            }
            Operation::Unmap { disk, logical, blocks } => {
                self.reach(*disk, *logical..*logical + *blocks, true, u64::MAX)?.1
            }
            Operation::Overwrite { run, .. }
            | Operation::OverwriteData { run, .. }
            | Operation::Checksums { run, .. }
            | Operation::Announce { run }
            | Operation::Backed { run, .. } => table_pages(*run) + PAGES_BESIDE,
            Operation::Drop { steps, .. } => {
                (u64::from(*steps) * PAGES_PER_DROPPED_LEAF).min(self.tables() + PAGES_ON_PATH)
            }
            Operation::Pack { objects, .. } | Operation::SharePack { objects, .. } => {
                return Ok(self.cost_of_pack(std::iter::once(operation), leaves_of(objects), 0));
            }
            Operation::Share { run, from, objects, .. } => {
                let mut touched = Touched::default();
                touched.touch_run(*run);
                touched.touch_run(Run { start: *from, blocks: run.blocks });
                self.pages_of_redirect(leaves_of(objects), touched)
            }
            Operation::Resolve { .. } | Operation::Synced { .. } => PAGES_BESIDE,
            Operation::Put { .. }
            | Operation::Seal { .. }
            | Operation::Clone { .. }
            | Operation::Revert { .. }
            | Operation::Trash { .. } => 2 * PAGES_BESIDE,
        };
        Ok(Cost { bytes: operation.size() as u64, pages })
    }

    /// An upper limit of the cost of the operations that map one pack. They change this many leaves, and those after
    /// the first split this many of them.
    pub fn cost_of_pack<'a>(&self, operations: impl Iterator<Item = &'a Operation>, leaves: u64, splits: u64) -> Cost {
        let (mut bytes, mut runs) = (0, Vec::new());
        for operation in operations {
            bytes += operation.size() as u64;
            let sources = match operation {
                Operation::Pack { sources, .. } => sources.as_slice(),
                Operation::SharePack { source, .. } => std::slice::from_ref(source),
                _ => &[],
            };
            let stored = sources.iter().map(tree::Source::stored);
            runs.extend(stored.map(|stored| Run { start: stored.physical, blocks: stored.blocks }));
            if let Operation::Pack { run, .. } | Operation::SharePack { run, .. } = operation {
                runs.push(*run);
            }
        }
        runs.sort_unstable_by_key(|run| (run.start, run.blocks));
        runs.dedup();
        let mut touched = Touched::default();
        runs.into_iter().for_each(|run| touched.touch_run(run));
        let pages = self.pages_of_redirect(leaves, touched) + splits * self.pages_of_split();
        Cost { bytes, pages }
    }

    /// The most nodes that an operation allocates.
    pub fn nodes_of(&mut self, operation: &Operation) -> Result<u64> {
        let mut touched = Touched::default();
        match operation {
            Operation::Map { .. }
            | Operation::MapData { .. }
            | Operation::MapPack { .. }
            | Operation::MapShared { .. }
            | Operation::MapSharedPack { .. }
            | Operation::Unwritten { .. }
            | Operation::Written { .. } => {
                if let Some((disk, range, run)) = operation.mapping() {
                    self.touch_mapping(disk, range, run, &mut touched)?;
                }
            }
            Operation::Unmap { disk, logical, blocks } => {
                // Leaves between the first and the last are released completely.
                let last = *logical + blocks.saturating_sub(1);
                self.touch(*disk, *logical..*logical + 1, true, u64::MAX, &mut touched)?;
                self.touch(*disk, last..last + 1, true, u64::MAX, &mut touched)?;
            }
            Operation::Pack { .. } | Operation::Share { .. } | Operation::SharePack { .. } => {
                return Ok(super::NODES_PER_OPERATION);
            }
            _ => return Ok(0),
        }
        Ok(touched.nodes + tree::NODES_PER_TREE)
    }

    /// The number of images for which the images file must have room so that any single change of this datastore can be
    /// admitted, after `records` new records and with a map of `map_regions` regions.
    pub fn images_needed(&self, records: u64, map_regions: u64) -> u64 {
        let regions = self.data.regions() + map_regions;
        let (tables, summaries) = (regions * REGION_PAGES, regions / SUMMARY_ENTRIES + 2);
        let catalog = (self.catalog.slots() + records) / SLOTS_PER_PAGE as u64;
        (tables + summaries + catalog + self.map.counts().used + FEW_PAGES).clamp(INITIAL_PAGES, PAGES_FLOOR)
    }
}
