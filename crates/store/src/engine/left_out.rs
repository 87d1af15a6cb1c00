//! Operations of the journal that replay leaves out, because the metadata that they change is damaged.
//!
//! What must hold: no operation that a repair could still carry out is left out. An ordinary opening therefore refuses
//! the datastore, because its checkpoint would release the journal. Drops of deleted trees are an exception, because
//! they change no content (`replay/drops.rs`). A repair first restores all pages that it can, and then leaves out
//! operations on objects with records on lost pages of the catalog, and the parts of operations below lost nodes of the
//! map (`replay/parts.rs`). A salvage leaves out every operation that fails, and reports the ranges.

use super::Meta;
use super::metadata::Effects;
use crate::catalog::Object;
use crate::journal::Operation;
use crate::tree::{self, LOGICAL_LIMIT};
use crate::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Which operations may be left out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tolerance {
    /// No operation.
    Nothing,
    /// Operations on objects with lost records, and the parts of operations below lost nodes of the map.
    LostObjects,
    /// Every operation that fails.
    Everything,
}

/// The operations that were left out.
pub struct LeftOut {
    tolerance: Tolerance,
    /// The next object id at the checkpoint: objects with lower ids existed then.
    next_id: u64,
    /// Objects that do not exist, because their creation was left out.
    objects: BTreeSet<u64>,
    /// For each known object, the blocks that have wrong content because an operation was left out.
    pub ranges: BTreeMap<u64, Vec<Range<u64>>>,
}

/// The object of which an operation changes the tree or the record, and the logical blocks that it changes.
pub fn target(operation: &Operation) -> Option<(u64, Range<u64>)> {
    let all = 0..LOGICAL_LIMIT;
    Some(match operation {
        Operation::Map { .. }
        | Operation::MapData { .. }
        | Operation::MapPack { .. }
        | Operation::MapShared { .. }
        | Operation::MapSharedPack { .. }
        | Operation::Unwritten { .. }
        | Operation::Written { .. } => operation.mapping().map(|(disk, range, _)| (disk, range))?,
        Operation::Unmap { disk, logical, blocks } => (*disk, *logical..logical.saturating_add(*blocks)),
        Operation::Put { record } => (Object::decode(record).ok()??.id, 0..0),
        Operation::Seal { snapshot } => (*snapshot, 0..0),
        Operation::Clone { snapshot, .. } => (*snapshot, 0..0),
        Operation::Revert { disk, .. } => (*disk, 0..0),
        Operation::Trash { object } => (*object, 0..0),
        Operation::Drop { object, .. } => (*object, all),
        Operation::Overwrite { .. }
        | Operation::OverwriteData { .. }
        | Operation::Announce { .. }
        | Operation::Checksums { .. }
        | Operation::Synced { .. }
        | Operation::Resolve { .. }
        | Operation::Pack { .. }
        | Operation::Share { .. }
        | Operation::SharePack { .. }
        | Operation::Backed { .. } => return None,
    })
}

impl LeftOut {
    /// No operation is left out yet.
    pub fn new(tolerance: Tolerance, next_id: u64) -> Self {
        Self { tolerance, next_id, objects: BTreeSet::new(), ranges: BTreeMap::new() }
    }

    /// Which operations may be left out.
    pub fn tolerance(&self) -> Tolerance {
        self.tolerance
    }

    /// Whether the parts of operations below lost nodes are left out.
    pub fn leaves_out_parts(&self) -> bool {
        self.tolerance == Tolerance::LostObjects
    }

    fn is_missing(&self, meta: &Meta, id: u64) -> bool {
        self.objects.contains(&id) || meta.catalog.may_have_lost(id, self.next_id)
    }

    /// Whether an operation is left out.
    pub fn leaves_out(&mut self, meta: &mut Meta, operation: &Operation) -> Result<bool> {
        if self.tolerance != Tolerance::Everything && meta.catalog.lost().is_empty() {
            return Ok(false);
        }
        let Some((id, range)) = target(operation) else { return Ok(false) };
        if self.is_missing(meta, id) {
            return self.leave_out_lost(meta, operation, id).map(|()| true);
        }
        let disk = match operation {
            Operation::Put { record } => Object::decode(record)?.filter(Object::is_snapshot).map(|object| object.disk),
            Operation::Seal { snapshot } => meta.catalog.find(*snapshot).map(|object| object.disk),
            _ => None,
        };
        if let Some(disk) = disk.filter(|disk| self.is_missing(meta, *disk)) {
            // The record of the snapshot's disk is lost.
            self.leave_out_lost(meta, operation, disk)?;
            self.objects.insert(id);
            meta.catalog.remove(id);
            return Ok(true);
        }
        if self.tolerance != Tolerance::Everything {
            return Ok(false);
        }
        let drops = matches!(operation, Operation::Drop { .. });
        if !drops && !range.is_empty() && !is_readable(meta, id, range.clone()) {
            self.lose(id, range);
            return Ok(true);
        }
        match operation {
            Operation::Seal { snapshot } => {
                let disk = meta.catalog.find(*snapshot).map_or(0, |object| object.disk);
                self.inherit(disk, *snapshot);
            }
            Operation::Clone { snapshot, record } => {
                let clone = Object::decode(record)?.map_or(0, |object| object.id);
                self.inherit(*snapshot, clone);
            }
            Operation::Revert { disk, snapshot, .. } if self.is_missing(meta, *snapshot) => {
                self.lose(*disk, 0..LOGICAL_LIMIT);
                return Ok(true);
            }
            Operation::Revert { disk, snapshot, .. } => self.inherit(*snapshot, *disk),
            _ => {}
        }
        Ok(false)
    }

    /// For a salvage, if a tree that a pack or a share names cannot be read: the same change in all trees that can be
    /// read there, because a tree that is not named may share a leaf. In the other trees the range is lost, because the
    /// blocks that they map may belong to other disks afterwards.
    pub fn redirect_where_readable(&mut self, meta: &mut Meta, operation: &Operation) -> Option<Operation> {
        let (range, named) = operation.redirects()?;
        let is_whole =
            |meta: &mut Meta, id: u64| meta.catalog.find(id).is_some() && is_readable(meta, id, range.clone());
        if self.tolerance != Tolerance::Everything || named.iter().all(|id| is_whole(&mut *meta, *id)) {
            return None;
        }
        let all: Vec<u64> = meta.catalog.objects().map(|object| object.id).collect();
        let (readable, lost): (Vec<u64>, Vec<u64>) = all.into_iter().partition(|id| is_whole(&mut *meta, *id));
        lost.into_iter().for_each(|id| self.lose(id, range.clone()));
        let mut rest = operation.clone();
        if let Operation::Pack { objects, .. }
        | Operation::Share { objects, .. }
        | Operation::SharePack { objects, .. } = &mut rest
        {
            *objects = readable;
        }
        Some(rest)
    }

    /// Called after an operation failed half way: returns whether replay continues.
    pub fn tolerates(&mut self, meta: &Meta, operation: &Operation, error: &Error) -> bool {
        if self.tolerance != Tolerance::Everything {
            return false;
        }
        tracing::warn!(%error, "an operation of the journal is left out");
        if let Some((id, _)) = target(operation) {
            self.lose(id, 0..LOGICAL_LIMIT);
        }
        if let Some((range, objects)) = operation.redirects() {
            // The old blocks, which a leaf may still map, were free for other disks afterwards. Trees that are not
            // named may share the leaf.
            meta.catalog.objects().for_each(|object| self.lose(object.id, range.clone()));
            objects.iter().for_each(|object| self.lose(*object, 0..LOGICAL_LIMIT));
        }
        true
    }

    /// Notes that blocks of an object have wrong content.
    pub fn lose(&mut self, id: u64, range: Range<u64>) {
        self.ranges.entry(id).or_default().push(range);
    }

    fn inherit(&mut self, from: u64, to: u64) {
        match self.ranges.get(&from).cloned() {
            Some(ranges) => drop(self.ranges.insert(to, ranges)),
            None => drop(self.ranges.remove(&to)),
        }
    }

    fn leave_out_lost(&mut self, meta: &mut Meta, operation: &Operation, id: u64) -> Result<()> {
        if self.tolerance == Tolerance::Nothing {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("the journal changes object {id}, which is on a damaged page of the catalog"),
            ));
        }
        match operation {
            Operation::Map { run, .. }
            | Operation::MapData { run, .. }
            | Operation::MapPack { run, .. }
            | Operation::Unwritten { run, fresh: true, .. } => {
                // The blocks stay allocated, so that salvage can read their data.
                match meta.data.adopt(&mut meta.pages, *run) {
                    Err(error) if self.tolerance != Tolerance::Everything => return Err(error),
                    _ => {}
                }
            }
            Operation::Clone { record, .. } => {
                self.objects.extend(Object::decode(record)?.map(|object| object.id));
            }
            _ => {}
        }
        Ok(())
    }
}

fn is_readable(meta: &mut Meta, id: u64, range: Range<u64>) -> bool {
    let Some(root) = meta.catalog.find(id).and_then(|object| object.root) else { return true };
    let mut effects = Effects::default();
    tree::lookup(&mut meta.nodes(&mut effects), root, range, &mut Vec::new()).is_ok()
}
