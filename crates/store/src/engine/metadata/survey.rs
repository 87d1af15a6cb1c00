//! Surveys: find the metadata pages that a change will need, for [`Metadata::bring_in`](super::Metadata::bring_in).

use super::Meta;
use super::fetch::ABSENT_MAX;
use crate::buffer::{Content, DirtyPiece};
use crate::journal::Operation;
use crate::pages::{PageFile, PageKey, Pages};
use crate::space::{Run, Space};
use crate::tree::{self, Aim, NodeId, Resident, Source};
use backend::Block;
use std::ops::Range;

/// The most nodes that the survey of one range visits under the lock. A change that needs more nodes reads the rest
/// itself.
const NODES_MAX: usize = 1024;

/// Access of a survey to the metadata in memory.
struct InMemory<'a> {
    pages: &'a mut Pages,
    map: &'a Space,
    data: &'a Space,
    /// Number of surveyed blocks that can be overwritten in place.
    own: u64,
    /// Number of nodes visited.
    nodes: usize,
}

impl Resident for InMemory<'_> {
    fn node(&mut self, id: NodeId) -> Option<&Block> {
        self.nodes += 1;
        self.pages.peek(PageKey::new(PageFile::Map, id.0))
    }

    fn references(&mut self, id: NodeId) -> Option<u32> {
        self.map.peek(self.pages, id.0).map(|entry| entry.references)
    }

    fn drop_node(&mut self, id: NodeId) {
        self.map.survey_drop(self.pages, Run { start: id.0, blocks: 1 });
    }

    fn data(&mut self, physical: u64, blocks: u64) {
        self.data.survey_entries(self.pages, Run { start: physical, blocks });
    }

    fn drop_data(&mut self, physical: u64, blocks: u64) {
        self.data.survey_drop(self.pages, Run { start: physical, blocks });
    }

    fn overwrite_data(&mut self, physical: u64, blocks: u64) {
        self.own += self.data.survey_overwrite(self.pages, Run { start: physical, blocks });
    }

    fn allocate(&mut self) {
        self.map.survey_allocation(self.pages, 1);
    }

    fn is_enough(&self) -> bool {
        self.pages.absent() >= ABSENT_MAX || self.nodes >= NODES_MAX
    }
}

impl Meta {
    fn in_memory(&mut self) -> InMemory<'_> {
        InMemory { pages: &mut self.pages, map: &self.map, data: &self.data, own: 0, nodes: 0 }
    }

    /// Surveys a change of a range of a tree. Returns the number of blocks that a write can overwrite in place.
    pub(crate) fn survey(&mut self, root: Option<NodeId>, range: Range<u64>, aim: Aim) -> u64 {
        let mut store = self.in_memory();
        match root {
            Some(root) => tree::survey(&mut store, root, range, aim),
            None if matches!(aim, Aim::Write | Aim::Map) => store.allocate(),
            None => {}
        }
        store.own
    }

    /// Surveys a comparison of two trees.
    pub(crate) fn survey_difference(&mut self, roots: [Option<NodeId>; 2], range: &Range<u64>) {
        tree::survey_difference(&mut self.in_memory(), roots, range);
    }

    /// Surveys a change of a range of a disk. Returns the number of blocks that a write can overwrite in place.
    pub(crate) fn survey_disk(&mut self, disk: u64, range: Range<u64>, aim: Aim) -> u64 {
        match self.catalog.find(disk).map(|object| object.root) {
            Some(root) => self.survey(root, range, aim),
            None => 0,
        }
    }

    /// Surveys the table entries of a run of data.
    pub(crate) fn survey_run(&mut self, run: Run) {
        self.data.survey_entries(&mut self.pages, run);
    }

    /// Surveys the allocation of up to `blocks` blocks.
    pub(crate) fn survey_allocation(&mut self, blocks: u64) {
        self.data.survey_allocation(&mut self.pages, blocks);
    }

    /// Surveys the allocation of one run of `blocks` blocks.
    pub(crate) fn survey_allocation_whole(&mut self, blocks: u64) {
        self.data.survey_allocation_whole(&mut self.pages, blocks);
    }

    /// Determines the pages that are needed to add a reference to the root of each of these objects.
    pub(crate) fn survey_roots(&mut self, objects: &[u64]) {
        for object in objects {
            if let Some(root) = self.catalog.find(*object).and_then(|object| object.root) {
                self.in_memory().references(root);
            }
        }
    }

    /// Surveys the changes that a checkpoint makes to capture the metadata.
    pub(crate) fn survey_capture(&mut self) {
        self.catalog.survey_store(&mut self.pages);
        self.data.survey_summaries(&mut self.pages);
        self.map.survey_summaries(&mut self.pages);
    }

    /// Surveys an operation.
    pub(crate) fn survey_operation(&mut self, operation: &Operation) {
        match operation {
            Operation::Map { .. }
            | Operation::MapData { .. }
            | Operation::MapPack { .. }
            | Operation::MapShared { .. }
            | Operation::MapSharedPack { .. }
            | Operation::Written { .. }
            | Operation::Unwritten { .. } => {
                if let Some((disk, logical, run)) = operation.mapping() {
                    self.data.survey_entries(&mut self.pages, run);
                    self.survey_disk(disk, logical, Aim::Map);
                }
            }
            Operation::Unmap { disk, logical, blocks } => {
                self.survey_disk(*disk, *logical..*logical + *blocks, Aim::Unmap);
            }
            Operation::Overwrite { run, .. }
            | Operation::OverwriteData { run, .. }
            | Operation::Announce { run }
            | Operation::Checksums { run, .. } => self.data.survey_entries(&mut self.pages, *run),
            Operation::Backed { run, backed: true } => self.data.survey_entries(&mut self.pages, *run),
            Operation::Backed { run, backed: false } => self.data.survey_drop(&mut self.pages, *run),
            Operation::Resolve { block, .. } => {
                self.data.survey_entries(&mut self.pages, Run { start: *block, blocks: 1 });
            }
            Operation::Drop { object, steps } => {
                if let Some(root) = self.catalog.find(*object).and_then(|object| object.root) {
                    tree::survey_drop(&mut self.in_memory(), root, *steps as usize);
                }
            }
            Operation::Seal { snapshot } => {
                let disk = self.catalog.find(*snapshot).map(|snapshot| snapshot.disk);
                self.survey_roots(disk.as_slice());
            }
            Operation::Clone { snapshot, .. } | Operation::Revert { snapshot, .. } => self.survey_roots(&[*snapshot]),
            Operation::Pack { logical, blocks, run, sources, objects, .. } => {
                self.data.survey_entries(&mut self.pages, *run);
                for stored in sources.iter().map(Source::stored) {
                    let run = Run { start: stored.physical, blocks: stored.blocks };
                    self.data.survey_drop(&mut self.pages, run);
                }
                for object in objects {
                    self.survey_disk(*object, *logical..*logical + *blocks, Aim::Map);
                }
            }
            Operation::SharePack { logical, source, run, objects, .. } => {
                let stored = source.stored();
                self.data.survey_entries(&mut self.pages, *run);
                self.data.survey_drop(&mut self.pages, Run { start: stored.physical, blocks: stored.blocks });
                for object in objects {
                    self.survey_disk(*object, *logical..*logical + source.run.blocks, Aim::Map);
                }
            }
            Operation::Share { logical, run, from, objects } => {
                self.data.survey_entries(&mut self.pages, *run);
                self.data.survey_drop(&mut self.pages, Run { start: *from, blocks: run.blocks });
                for object in objects {
                    self.survey_disk(*object, *logical..*logical + run.blocks, Aim::Map);
                }
            }
            Operation::Synced { .. } | Operation::Put { .. } | Operation::Trash { .. } => {}
        }
    }

    /// Determines the pages that are needed to move entries of a buffer into the map.
    pub(crate) fn survey_pieces(&mut self, disk: u64, pieces: &[DirtyPiece]) {
        let mut blocks = 0;
        for piece in pieces {
            if self.pages.absent() >= ABSENT_MAX {
                break;
            }
            let range = piece.logical..piece.end();
            let aim = match piece.entry.content {
                Content::Data(..) => {
                    blocks += piece.entry.blocks;
                    Aim::Write
                }
                // Zeroing keeps the blocks that only this disk maps, and writes their map entries again.
                Content::Zero => {
                    blocks += piece.entry.blocks;
                    Aim::Map
                }
                Content::Unmapped => Aim::Unmap,
            };
            blocks -= self.survey_disk(disk, range, aim).min(blocks);
        }
        if blocks > 0 && self.pages.absent() == 0 {
            self.survey_allocation(blocks);
        }
    }
}
