//! Replay of the drops of deleted trees.
//!
//! A drop names a number of leaves. The tree that replay sees may be divided into other leaves than the tree had at run
//! time, because two small leaves are not merged while one of them cannot be read, and later changes then split and
//! merge other leaves. Also, a leaf that could be read at run time may be lost since. So after the last drop in the
//! journal, a part of the tree may be left, with references on blocks that later operations allocate.
//!
//! What must hold:
//!
//! 1. No drop fails because of the tree that it drops. What is left of the tree is dropped after recovery.
//! 2. When an operation allocates blocks, no deleted tree has references on them. Until then, parts of deleted trees
//!    are dropped earlier than the journal says. This changes no content, because nothing is read from these trees.
//!    The same is done for deleted trees that a pack or a share has not changed (`redirects`).
//! 3. References that no drop can remove, because a leaf is lost, are removed only after the object was removed from
//!    the catalog: otherwise, a later drop of the leaf would take references from the new owner of the blocks. The
//!    other blocks of the tree stay allocated until a repair counts all references. The same is done with references
//!    that a node has of which a repair has made the page invalid (`parts`).

use super::ReplayState;
use super::redirects::Unread;
use crate::engine::{Engine, Meta};
use crate::journal::Operation;
use crate::pages::patiently;
use crate::space::{BlockEntry, Run};
use crate::tree::NodeId;
use crate::{Result, is_lost};
use std::collections::BTreeSet;

/// The deleted trees that replay drops.
#[derive(Default)]
pub(super) struct Drops {
    /// Objects with drops in the journal.
    begun: BTreeSet<u64>,
    /// The objects among them whose next part cannot be dropped.
    lost: BTreeSet<u64>,
    /// Nodes of which the pages were made invalid.
    nodes: BTreeSet<NodeId>,
    /// Whether nodes that are never read again, or are read by a salvage only, may have references on blocks that other
    /// trees get.
    abandoned: bool,
    /// Trees that may map blocks which other trees get.
    unread: Vec<Unread>,
}

impl Drops {
    /// Called before the page of a lost node is made invalid. True if this was not done before.
    pub(super) fn note_lost_node(&mut self, id: NodeId) -> bool {
        self.abandoned = true;
        self.nodes.insert(id)
    }

    /// Called for a deleted tree that may have references on blocks which other trees get.
    pub(super) fn begin(&mut self, object: u64) {
        self.begun.insert(object);
    }

    /// Called for a tree that cannot be read, and may map blocks which other trees get.
    pub(super) fn note_unread(&mut self, unread: Unread) {
        self.unread.push(unread);
    }

    /// Removes one of the noted trees for which the function is true.
    pub(super) fn take_unread(&mut self, which: impl FnMut(&Unread) -> bool) -> Option<Unread> {
        self.unread.iter().position(which).map(|at| self.unread.swap_remove(at))
    }

    /// Whether trees may have references on blocks that an operation allocates.
    fn may_have_references(&self) -> bool {
        self.abandoned || !self.begun.is_empty() || !self.unread.is_empty()
    }

    /// Called after an operation was left out. References that it drops remain.
    pub(super) fn note_left_out(&mut self) {
        self.abandoned = true;
    }
}

impl Engine {
    /// Replays a drop of parts of a deleted tree, as far as the tree can be read.
    pub(super) fn drop_again(
        &self,
        meta: &mut Meta,
        state: &mut ReplayState<'_>,
        object: u64,
        steps: u32,
    ) -> Result<()> {
        state.drops.begin(object);
        for _ in 0..steps.max(1) {
            if !self.drop_part(meta, state, object)? {
                break;
            }
        }
        Ok(())
    }

    /// Drops a leaf or a shared subtree of a deleted tree. False if none is left, or if it is lost.
    fn drop_part(&self, meta: &mut Meta, state: &mut ReplayState<'_>, object: u64) -> Result<bool> {
        // The object does not exist if replay sees fewer leaves than the journal has drops. A lost page is not read
        // again for each drop, because the medium may take seconds to fail.
        if state.drops.lost.contains(&object) || meta.catalog.find(object).is_none() {
            return Ok(false);
        }
        let operation = Operation::Drop { object, steps: 1 };
        match patiently(|| meta.check_readable(&operation)) {
            Err(error) if is_lost(&error) => {
                tracing::error!(%error, object, "a deleted disk or snapshot is damaged: the rest of it is not freed");
                state.drops.lost.insert(object);
                return Ok(false);
            }
            other => other?,
        }
        self.carry_out_again(meta, state, &operation)?;
        Ok(true)
    }

    /// Called before an operation is replayed. If the operation allocates blocks, drops parts of deleted trees until
    /// these trees have no reference on the blocks.
    pub(super) fn drop_before(
        &self,
        meta: &mut Meta,
        state: &mut ReplayState<'_>,
        operation: &Operation,
    ) -> Result<()> {
        let Some(run) = operation.new_run() else { return Ok(()) };
        while state.drops.may_have_references() && meta.is_referenced(run)? {
            let mut dropped = false;
            // The trees take turns, because a single leaf of one of them may have the references.
            for object in state.drops.begun.clone() {
                dropped |= self.drop_part(meta, state, object)?;
            }
            if !dropped {
                if self.lose_unread(meta, state, run)? {
                    continue;
                }
                return meta.take_from_lost(state, run);
            }
        }
        Ok(())
    }
}

impl Meta {
    /// The blocks of a run for which the table has entries. Replay allocates blocks in regions that did not exist at
    /// the last checkpoint.
    fn described(&self, run: Run) -> std::ops::Range<u64> {
        run.start..(run.start + run.blocks).min(self.data.blocks())
    }

    pub(super) fn is_referenced(&mut self, run: Run) -> Result<bool> {
        for block in self.described(run) {
            if self.entry(block)?.references > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the objects with lost trees from the catalog, and all references on a run: none of them belongs to
    /// another tree, because the run was free when the operation was carried out at run time.
    fn take_from_lost(&mut self, state: &mut ReplayState<'_>, run: Run) -> Result<()> {
        // The trees of objects with lost records may have the references, and such a record may be readable later.
        if !self.catalog.lost().is_empty() {
            return Ok(());
        }
        for object in std::mem::take(&mut state.drops.lost) {
            tracing::error!(object, "a deleted disk or snapshot is damaged: 'lamina check --repair' frees its space");
            self.catalog.remove(object);
            state.drops.abandoned = true;
        }
        if !state.drops.abandoned {
            return Ok(());
        }
        for block in self.described(run) {
            let one = Run { start: block, blocks: 1 };
            let (mut freed, mut left) = (Vec::new(), Vec::new());
            if self.entry(block)?.references == BlockEntry::REFERENCES_MAX {
                // This count does not decrease. Only damage can have given it to a block that was free.
                self.data.repair_references(&mut self.pages, block, 1)?;
            }
            while self.entry(block)?.references > 0 {
                self.data.drop_references(&mut self.pages, one, &mut freed, &mut left)?;
            }
            self.release_again(&mut state.doubts, freed);
        }
        Ok(())
    }
}
