//! Applies operations to the metadata. All changes of metadata are made by this file.

use super::Meta;
use crate::catalog::{Object, ObjectState};
use crate::engine::placement::Holds;
use crate::journal::Operation;
use crate::pages::{PageFile, PageKey, Pages};
use crate::space::{Run, Space};
use crate::tree::{self, DataReferences, Leaf, NodeId, NodeStore};
use crate::{Error, ErrorKind, Result};
use backend::Block;
use std::ops::Range;

/// Nodes that must be free before an operation starts. No operation allocates more.
pub const NODES_PER_OPERATION: u64 = 4 * tree::NODES_PER_STEP as u64;

/// Access of the trees to the metadata.
pub struct Nodes<'a> {
    pub pages: &'a mut Pages,
    pub map: &'a mut Space,
    pub data: &'a mut Space,
    pub holds: &'a Holds,
    pub effects: &'a mut Effects,
}

impl Nodes<'_> {
    /// As [`tree::leaf_of`], for the tree with this number among several. `None` if a page of a tree after the first is
    /// missing, with the error in `missing`: the other trees are searched for further missing pages, so that all of
    /// them are read at once.
    pub fn leaf_of(
        &mut self,
        root: NodeId,
        range: Range<u64>,
        number: usize,
        missing: &mut Option<Error>,
    ) -> Result<Option<Leaf>> {
        match tree::leaf_of(self, root, range) {
            Err(error) if number > 0 && self.pages.absent() > 0 => {
                *missing = Some(error);
                Ok(None)
            }
            leaf => leaf.map(Some),
        }
    }
}

/// Side effects of an operation.
#[derive(Default)]
pub struct Effects {
    /// Data blocks that lost their last reference.
    pub freed: Vec<Run>,
    /// Data blocks that lost a reference and still have others.
    pub unshared: Vec<Run>,
    /// Nodes that lost a reference and still have others.
    pub unshared_nodes: Vec<NodeId>,
    /// Nodes that were changed, made or freed while some node was held.
    pub changed_nodes: Vec<NodeId>,
    /// Height of the tree, if it has grown.
    pub levels: u64,
}

impl Nodes<'_> {
    fn note_change(&mut self, id: NodeId) {
        if !self.holds.no_nodes() {
            self.effects.changed_nodes.push(id);
        }
    }
}

impl NodeStore for Nodes<'_> {
    #[inline]
    fn node(&mut self, id: NodeId) -> Result<&Block> {
        self.pages.get(PageKey::new(PageFile::Map, id.0))
    }

    #[inline]
    fn node_mut(&mut self, id: NodeId) -> Result<&mut Block> {
        self.note_change(id);
        self.pages.get_mut(PageKey::new(PageFile::Map, id.0))
    }

    fn allocate(&mut self) -> Result<NodeId> {
        let none = || {
            Error::new(ErrorKind::NoSpace, "no room for metadata: free space in the file system, or raise its quota")
        };
        let run = self.map.allocate(self.pages, 1)?.ok_or_else(|| self.map.damage().unwrap_or_else(none))?;
        self.map.adopt(self.pages, run)?;
        self.pages.create(PageKey::new(PageFile::Map, run.start))?;
        Ok(NodeId(run.start))
    }

    fn note_height(&mut self, levels: usize) {
        self.effects.levels = self.effects.levels.max(levels as u64);
    }

    #[inline]
    fn references(&mut self, id: NodeId) -> Result<u32> {
        self.map.references_in_use(self.pages, id.0)
    }

    fn is_shared(&mut self, id: NodeId) -> Result<bool> {
        Ok(self.holds.is_node_held(id) || self.references(id)? > 1)
    }

    fn add_reference(&mut self, id: NodeId) -> Result<()> {
        self.map.add_references(self.pages, Run { start: id.0, blocks: 1 })
    }

    fn drop_reference(&mut self, id: NodeId) -> Result<u32> {
        let run = Run { start: id.0, blocks: 1 };
        let mut freed = Vec::new();
        self.map.drop_references(self.pages, run, &mut freed, &mut Vec::new())?;
        if freed.is_empty() {
            self.effects.unshared_nodes.push(id);
            return Ok(self.map.entry(self.pages, id.0)?.references);
        }
        self.note_change(id);
        // The node can be reused at once: its page on the medium changes only with a checkpoint, which captures the
        // whole state.
        self.map.release(run);
        self.pages.forget(PageKey::new(PageFile::Map, id.0));
        Ok(0)
    }

    fn add_data_references(&mut self, physical: u64, blocks: u64) -> Result<()> {
        self.data.add_references(self.pages, Run { start: physical, blocks })
    }

    fn drop_data_references(&mut self, physical: u64, blocks: u64) -> Result<()> {
        let Effects { freed, unshared, .. } = &mut *self.effects;
        self.data.drop_references(self.pages, Run { start: physical, blocks }, freed, unshared)
    }

    fn check_data(&mut self, physical: u64, blocks: u64) -> Result<()> {
        self.data.references(self.pages, Run { start: physical, blocks }, &mut |_, _| {})
    }
}

impl DataReferences for Nodes<'_> {
    fn data_references(&mut self, physical: u64, blocks: u64, each: &mut dyn FnMut(u64, u32)) -> Result<()> {
        self.data.references(self.pages, Run { start: physical, blocks }, each)
    }
}

impl Meta {
    /// Access to the trees; side effects are added to `effects`.
    pub(crate) fn nodes<'a>(&'a mut self, effects: &'a mut Effects) -> Nodes<'a> {
        Nodes { pages: &mut self.pages, map: &mut self.map, data: &mut self.data, holds: &self.holds, effects }
    }

    /// Access to the trees that ignores holds. It shows the metadata in memory and not what recovery would find, so it
    /// must not decide about in-place overwrites.
    pub(crate) fn current_nodes<'a>(&'a mut self, none: &'a Holds, effects: &'a mut Effects) -> Nodes<'a> {
        Nodes { holds: none, ..self.nodes(effects) }
    }

    /// Changes the mapping of a range of a disk.
    fn replace(
        &mut self,
        disk: u64,
        logical: u64,
        blocks: u64,
        with: Option<(u64, bool)>,
        effects: &mut Effects,
    ) -> Result<()> {
        if self.catalog.get(disk)?.root.is_none() && with.is_none() {
            return Ok(());
        }
        self.change_tree(disk, effects, |nodes, root| tree::replace(nodes, root, logical..logical + blocks, with))
    }

    /// Changes the tree of a disk by a function that returns the new root.
    fn change_tree(
        &mut self,
        disk: u64,
        effects: &mut Effects,
        change: impl FnOnce(&mut Nodes<'_>, NodeId) -> Result<NodeId>,
    ) -> Result<()> {
        let root = self.catalog.get(disk)?.root;
        let mut nodes = self.nodes(effects);
        let old = match root {
            Some(root) => root,
            None => tree::create(&mut nodes)?,
        };
        let root = change(&mut nodes, old)?;
        if root != old {
            // The new root may be an unchanged child of the old root.
            nodes.note_change(root);
        }
        self.catalog.set_root(disk, Some(root));
        self.levels = self.levels.max(effects.levels);
        Ok(())
    }

    /// Maps blocks as an operation on a pack or a share says, in these ranges of objects. The first reference of a new
    /// pack keeps it allocated until the leaves refer to it, and is dropped then.
    pub(crate) fn redirect_in(
        &mut self,
        operation: &Operation,
        parts: impl Iterator<Item = (u64, Range<u64>)>,
        effects: &mut Effects,
    ) -> Result<()> {
        let new = operation.new_run();
        if let (Some(run), Operation::Pack { checksums, .. } | Operation::MapPack { checksums, .. }) = (&new, operation)
        {
            self.data.adopt(&mut self.pages, *run)?;
            self.note_written(*run, checksums)?;
            // The blocks may have been an earlier pack, of which blocks are still cached.
            self.read_cache.forget(*run);
        }
        for (object, range) in parts {
            self.redirect(operation, object, range, effects)?;
        }
        match new {
            Some(run) => self.nodes(effects).drop_data_references(run.start, run.blocks),
            None => Ok(()),
        }
    }

    /// Maps blocks as an operation on a pack or a share says, in a range of one object.
    pub(crate) fn redirect(
        &mut self,
        operation: &Operation,
        object: u64,
        range: Range<u64>,
        effects: &mut Effects,
    ) -> Result<()> {
        if let Operation::MapPack { disk, logical, first, run, .. }
        | Operation::MapSharedPack { disk, logical, first, run, .. } = operation
        {
            let pack = tree::PhysicalRun { physical: run.start, blocks: run.blocks };
            let first = first.saturating_add((range.start - logical) as u8);
            return self.change_tree(*disk, effects, |nodes, root| tree::map_pack(nodes, root, range, pack, first));
        }
        // An object whose record is lost keeps the old blocks.
        let Some(old) = self.catalog.find(object).and_then(|object| object.root) else { return Ok(()) };
        let mut nodes = self.nodes(effects);
        let root = match operation {
            Operation::Pack { logical, run, sources, .. } => {
                let pack = tree::PhysicalRun { physical: run.start, blocks: run.blocks };
                tree::pack(&mut nodes, old, range, *logical, pack, sources)?
            }
            Operation::SharePack { logical, source, run, .. } => {
                let pack = tree::PhysicalRun { physical: run.start, blocks: run.blocks };
                tree::share_pack(&mut nodes, old, range, *logical, pack, source)?
            }
            Operation::Share { logical, run, from, .. } => {
                let share = tree::Share { logical: *logical, blocks: run.blocks, from: *from, to: run.start };
                tree::share(&mut nodes, old, range, &share)?
            }
            _ => return Ok(()),
        };
        if root != old {
            nodes.note_change(root);
            self.catalog.set_root(object, Some(root));
        }
        self.levels = self.levels.max(effects.levels);
        Ok(())
    }

    /// Called before a repair or a salvage replays an operation that maps a run which is in use, because it may have
    /// left out the operation that mapped or wrote the run. Blocks without a reference get a first one, and are
    /// returned: the caller drops this reference when leaves refer to them. Those without a checksum get the given one,
    /// or none if it is 0: a block that was unwritten, or whose owner is lost, has a reference already. A checksum that
    /// is there is right.
    pub(crate) fn adopt_left_out(&mut self, run: Run, checksums: &[u32]) -> Result<Vec<Run>> {
        let mut adopted = Vec::new();
        for (block, &checksum) in (run.start..run.start + run.blocks).zip(checksums) {
            let one = Run { start: block, blocks: 1 };
            let kept = self.entry(block)?;
            if kept.references == 0 {
                self.data.adopt(&mut self.pages, one)?;
                adopted.push(one);
            }
            if kept.references == 0 || kept.checksum == 0 && checksum != 0 {
                self.note_written(one, &[checksum])?;
            }
        }
        Ok(adopted)
    }

    /// Subtracts the new blocks of a thick disk from its reservation. Blocks that the change freed were not shared, so
    /// the same number of new blocks does not reduce the reservation.
    fn consume_reserve(&mut self, disk: u64, blocks: u64, freed: &[Run]) -> Result<()> {
        let blocks = blocks.saturating_sub(freed.iter().map(|run| run.blocks).sum());
        if self.catalog.get(disk)?.reserved > 0 {
            self.catalog.update(disk, |object| object.reserved = object.reserved.saturating_sub(blocks))?;
        }
        Ok(())
    }

    /// Records the checksums of new content.
    pub(crate) fn note_written(&mut self, run: Run, checksums: &[u32]) -> Result<()> {
        self.read_cache.forget_plain(run);
        if checksums.len() as u64 != run.blocks {
            return Err(Error::new(ErrorKind::Corrupt, "a journal record has checksums for another number of blocks"));
        }
        self.data.annotate(&mut self.pages, run, |block, entry| {
            entry.checksum = checksums[(block - run.start) as usize];
            entry.suspect = false;
        })
    }

    fn root_reference(&mut self, root: Option<NodeId>) -> Result<()> {
        match root {
            Some(root) => self.nodes(&mut Effects::default()).add_reference(root),
            None => Ok(()),
        }
    }

    /// Fails if the metadata that an operation will change cannot be read. Called before operations whose cost is
    /// computed without reading it: a change that fails half-way would stop the whole store.
    pub(crate) fn check_readable(&mut self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Drop { object, .. } => {
                let Some(root) = self.catalog.get(*object)?.root else { return Ok(()) };
                tree::check_drop(&mut self.nodes(&mut Effects::default()), root)
            }
            Operation::Clone { snapshot, .. } | Operation::Revert { snapshot, .. } => {
                self.references_of_root(*snapshot)
            }
            _ => Ok(()),
        }
    }

    /// Fails if the number of references on the root of an object cannot be read.
    pub(crate) fn references_of_root(&mut self, object: u64) -> Result<()> {
        let Some(root) = self.catalog.get(object)?.root else { return Ok(()) };
        self.nodes(&mut Effects::default()).references(root).map(drop)
    }

    /// Carries out an operation.
    pub(crate) fn apply(&mut self, operation: &Operation, effects: &mut Effects) -> Result<()> {
        let first = effects.freed.len();
        match operation {
            Operation::Map { disk, logical, run, checksums } => {
                self.data.adopt(&mut self.pages, *run)?;
                self.note_written(*run, checksums)?;
                self.replace(*disk, *logical, run.blocks, Some((run.start, false)), effects)?;
                self.consume_reserve(*disk, run.blocks, &effects.freed[first..])?;
            }
            Operation::MapData { disk, logical, run, data } => {
                self.data.adopt(&mut self.pages, *run)?;
                let sums = self.log(*run, data);
                self.note_written(*run, &sums)?;
                self.replace(*disk, *logical, run.blocks, Some((run.start, false)), effects)?;
                self.consume_reserve(*disk, run.blocks, &effects.freed[first..])?;
            }
            Operation::Overwrite { run, checksums } => {
                self.note_written(*run, checksums)?;
                self.data.annotate(&mut self.pages, *run, |_, entry| entry.suspect = true)?;
            }
            Operation::OverwriteData { run, data } => {
                self.in_flight.end_watches(*run);
                let sums = self.log(*run, data);
                self.note_written(*run, &sums)?;
            }
            Operation::Announce { run } => {
                self.data.annotate(&mut self.pages, *run, |_, entry| entry.suspect = true)?;
            }
            Operation::Checksums { run, checksums } => {
                self.forget_logged(*run);
                self.note_written(*run, checksums)?;
            }
            Operation::Synced { .. } => {}
            Operation::Unmap { disk, logical, blocks } => self.replace(*disk, *logical, *blocks, None, effects)?,
            Operation::Unwritten { disk, logical, run, fresh: new } => {
                if *new {
                    self.data.adopt(&mut self.pages, *run)?;
                } else {
                    // Blocks that only this disk maps in the range: the extra reference keeps them allocated while they
                    // are unmapped.
                    self.data.add_references(&mut self.pages, *run)?;
                }
                self.forget_logged(*run);
                self.in_flight.end_watches(*run);
                self.replace(*disk, *logical, run.blocks, Some((run.start, true)), effects)?;
                // Clears the checksums of earlier content, because a check takes a block without a checksum for
                // unwritten.
                self.data.annotate(&mut self.pages, *run, |_, entry| entry.checksum = 0)?;
                if *new {
                    self.consume_reserve(*disk, run.blocks, &effects.freed[first..])?;
                }
            }
            Operation::Written { disk, logical, run, checksums } => {
                self.data.add_references(&mut self.pages, *run)?;
                self.forget_logged(*run);
                self.replace(*disk, *logical, run.blocks, Some((run.start, false)), effects)?;
                self.note_written(*run, checksums)?;
            }
            Operation::Resolve { block, checksum } => {
                self.note_written(Run { start: *block, blocks: 1 }, &[*checksum])?;
            }
            Operation::Backed { run, backed } => self.data.set_backed(&mut self.pages, *run, *backed)?,
            Operation::Put { record } => {
                let mut object = decode(record)?;
                if let Some(known) = self.catalog.find(object.id) {
                    // The root in the record is not used, because it names a page of an earlier state of the map.
                    object.root = known.root;
                } else {
                    object.root = None;
                }
                self.catalog.put(object);
            }
            Operation::Seal { snapshot } => {
                let disk = self.catalog.get(*snapshot)?.disk;
                let root = self.catalog.get(disk)?.root;
                self.root_reference(root)?;
                self.catalog.update(*snapshot, |object| {
                    object.state = ObjectState::Snapshot;
                    object.root = root;
                })?;
            }
            Operation::Clone { snapshot, record } => {
                let root = self.catalog.get(*snapshot)?.root;
                self.root_reference(root)?;
                self.catalog.put(Object { root, ..decode(record)? });
            }
            Operation::Revert { disk, snapshot, trash } => {
                let source = self.catalog.get(*snapshot)?;
                let (root, capacity) = (source.root, source.capacity);
                self.root_reference(root)?;
                let old = self.catalog.get(*disk)?.clone();
                self.catalog.put(Object {
                    id: *trash,
                    state: ObjectState::Trash,
                    reserved: 0,
                    name: String::new(),
                    ..old
                });
                self.catalog.update(*disk, |object| {
                    object.root = root;
                    object.capacity = capacity;
                    object.parent = *snapshot;
                })?;
            }
            Operation::Trash { object } => {
                let old = self.catalog.get(*object)?.clone();
                if old.is_snapshot() {
                    let children: Vec<u64> = self
                        .catalog
                        .objects()
                        .filter(|other| other.parent == *object && other.id != *object)
                        .map(|other| other.id)
                        .collect();
                    for child in children {
                        self.catalog.update(child, |child| child.parent = old.parent)?;
                    }
                }
                self.catalog.put(Object { state: ObjectState::Trash, reserved: 0, name: String::new(), ..old });
            }
            Operation::Drop { object, steps } => {
                let mut root = self.catalog.get(*object)?.root;
                let mut nodes = self.nodes(effects);
                tree::drop_step(&mut nodes, &mut root, *steps as usize)?;
                match root {
                    Some(_) => self.catalog.set_root(*object, root),
                    None => self.catalog.remove(*object),
                }
            }
            Operation::MapShared { disk, logical, run, .. } => {
                self.data.add_references(&mut self.pages, *run)?;
                self.replace(*disk, *logical, run.blocks, Some((run.start, false)), effects)?;
            }
            Operation::MapPack { disk, logical, blocks, .. }
            | Operation::MapSharedPack { disk, logical, blocks, .. } => {
                self.redirect_in(operation, std::iter::once((*disk, *logical..*logical + blocks)), effects)?;
            }
            Operation::Pack { .. } | Operation::Share { .. } | Operation::SharePack { .. } => {
                let (range, objects) = operation.redirects().unwrap_or_default();
                let all = objects.iter().map(|object| (*object, range.clone()));
                self.redirect_in(operation, all, effects)?;
            }
        }
        self.note_growth(operation, &effects.freed[first..]);
        for run in &effects.freed[first..] {
            self.forget_logged(*run);
            self.in_flight.end_watches(*run);
        }
        Ok(())
    }

    /// Counts by how many data blocks an operation has made its disk grow: the new blocks, minus those that it freed. A
    /// block that snapshots or clones share is not freed by an overwrite, so the disk then grows.
    fn note_growth(&mut self, operation: &Operation, freed: &[Run]) {
        let (disk, new) = match operation {
            Operation::Map { disk, run, .. }
            | Operation::MapData { disk, run, .. }
            | Operation::MapPack { disk, run, .. }
            | Operation::Unwritten { disk, run, fresh: true, .. } => (*disk, run.blocks),
            Operation::Unmap { disk, .. }
            | Operation::MapShared { disk, .. }
            | Operation::MapSharedPack { disk, .. } => (*disk, 0),
            Operation::Trash { object } => {
                self.growth.remove(object);
                return;
            }
            _ => return,
        };
        let freed: u64 = freed.iter().map(|run| run.blocks).sum();
        if new != freed {
            *self.growth.entry(disk).or_default() += new as i64 - freed as i64;
        }
    }

    /// Keeps journalled payload in memory until it is written to the data files. Returns its checksums.
    fn log(&mut self, run: Run, data: &[backend::SharedSlice]) -> Vec<u32> {
        let mut sums = Vec::with_capacity(run.blocks as usize);
        let mut block = run.start;
        for slice in data {
            for at in (0..slice.len()).step_by(backend::BLOCK_SIZE) {
                let part = slice.slice(at..at + backend::BLOCK_SIZE);
                sums.push(crate::checksum(&part));
                self.logged.insert(block, part);
                block += 1;
            }
        }
        debug_assert_eq!(block, run.start + run.blocks);
        sums
    }

    pub(crate) fn forget_logged(&mut self, run: Run) {
        if self.logged.is_empty() {
            return;
        }
        let gone: Vec<u64> = self.logged.range(run.start..run.start + run.blocks).map(|(block, _)| *block).collect();
        for block in gone {
            self.logged.remove(&block);
        }
    }
}

fn decode(record: &[u8]) -> Result<Object> {
    Object::decode(record)?.ok_or_else(|| Error::new(ErrorKind::Corrupt, "a journal record holds an empty object"))
}
