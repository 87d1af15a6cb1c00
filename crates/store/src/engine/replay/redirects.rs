//! Replay of packs and shares, which map logical blocks of several trees to other blocks with the same content.
//!
//! Such an operation names one tree for each leaf that it changes. The trees that replay sees may be divided into other
//! leaves than at run time (`drops`). So a leaf that several trees shared at run time may consist of several leaves
//! now: a write to one of the trees has copied a part of it that was a leaf of its own at run time, or the leaf is full
//! and is copied for the tree that is named.
//!
//! What must hold: when an operation allocates blocks, no tree maps them any more. They were free at run time.
//!
//! 1. If one of the old blocks still has a reference after the operation, the change is repeated in all trees that are
//!    not named. An entry that maps other blocks stays, so this changes nothing else. It takes no longer than at run
//!    time, where a share of blocks that stay mapped elsewhere searches all trees too.
//! 2. Deleted trees are left as they are: parts of them are dropped when an operation allocates the blocks (`drops`).
//! 3. A tree that cannot be read in the range may map the old blocks. That does no harm unless a later operation
//!    allocates one of them. Then an ordinary opening refuses the datastore, a repair makes the unreadable nodes
//!    invalid, and a salvage reports the range as lost.

use super::ReplayState;
use crate::catalog::ObjectState;
use crate::engine::left_out::Tolerance;
use crate::engine::metadata::{Effects, NODES_PER_OPERATION};
use crate::engine::{Engine, Meta};
use crate::journal::Operation;
use crate::space::Run;
use crate::tree::{self, NodeStore, Source};
use crate::{Error, ErrorKind, Result};
use std::ops::Range;

/// A tree that may map blocks which were free at run time.
pub(super) struct Unread {
    object: u64,
    range: Range<u64>,
    blocks: Vec<Run>,
}

/// The physical blocks that an operation replaces, and those that it maps instead.
fn replaced(operation: &Operation) -> Option<(Vec<Run>, Run)> {
    match operation {
        Operation::Pack { sources, run, .. } => {
            let stored = sources.iter().map(Source::stored);
            Some((stored.map(|stored| Run { start: stored.physical, blocks: stored.blocks }).collect(), *run))
        }
        Operation::SharePack { source, run, .. } => {
            let stored = source.stored();
            Some((vec![Run { start: stored.physical, blocks: stored.blocks }], *run))
        }
        Operation::Share { from, run, .. } => Some((vec![Run { start: *from, blocks: run.blocks }], *run)),
        _ => None,
    }
}

impl Unread {
    fn may_map(&self, run: &Run) -> bool {
        self.blocks.iter().any(|old| old.start < run.start + run.blocks && run.start < old.start + old.blocks)
    }
}

impl Engine {
    /// Replays a pack or a share.
    pub(super) fn redirect_again(
        &self,
        meta: &mut Meta,
        state: &mut ReplayState<'_>,
        operation: &Operation,
    ) -> Result<()> {
        // In an ordinary opening every operation is replayed that mapped or wrote the kept blocks. If they have no
        // reference there, the metadata is damaged, and the opening fails.
        let adopted = match operation {
            Operation::Share { run, from, .. } if state.left_out.tolerance() != Tolerance::Nothing => {
                // The blocks that are replaced have the same content. They have no checksum either if the operation
                // that wrote them was left out.
                let checksum = |block: u64| Ok(meta.entry(block)?.checksum);
                let checksums: Vec<u32> = (*from..from + run.blocks).map(checksum).collect::<Result<_>>()?;
                meta.adopt_left_out(*run, &checksums)?
            }
            Operation::SharePack { run, checksums, .. } if state.left_out.tolerance() != Tolerance::Nothing => {
                meta.adopt_left_out(*run, checksums)?
            }
            _ => Vec::new(),
        };
        if state.left_out.leaves_out_parts() {
            if !self.redirect_parts(meta, state, operation)? {
                self.redirect_others(meta, state, operation)?;
            }
        } else if let Some(rest) = state.left_out.redirect_where_readable(meta, operation) {
            state.drops.note_left_out();
            self.carry_out_again(meta, state, &rest)?;
        } else {
            self.carry_out_again(meta, state, operation)?;
            self.redirect_others(meta, state, operation)?;
        }
        self.drop_adopted(meta, state, adopted)
    }

    /// Replays a write that was mapped to a run in use, in an opening for a repair or a salvage: it may have left out
    /// the operation that mapped or wrote the run.
    pub(super) fn map_shared_again(
        &self,
        meta: &mut Meta,
        state: &mut ReplayState<'_>,
        operation: &Operation,
        run: Run,
        checksums: &[u32],
    ) -> Result<()> {
        let adopted = meta.adopt_left_out(run, checksums)?;
        if state.left_out.leaves_out_parts() {
            self.carry_out_parts(meta, state, operation)?;
        } else {
            self.carry_out_again(meta, state, operation)?;
        }
        self.drop_adopted(meta, state, adopted)
    }

    /// Drops the references that were needed until leaves referred to the blocks.
    fn drop_adopted(&self, meta: &mut Meta, state: &mut ReplayState<'_>, adopted: Vec<Run>) -> Result<()> {
        let mut effects = Effects::default();
        for run in adopted {
            meta.nodes(&mut effects).drop_data_references(run.start, run.blocks)?;
        }
        meta.release_again(&mut state.doubts, effects.freed);
        Ok(())
    }

    /// Repeats a pack or a share that was carried out in the trees that it does not name, if old blocks still have
    /// references.
    fn redirect_others(&self, meta: &mut Meta, state: &mut ReplayState<'_>, operation: &Operation) -> Result<()> {
        let Some(((whole, named), (blocks, new))) = operation.redirects().zip(replaced(operation)) else {
            return Ok(());
        };
        // A pack that no tree maps has no reference any more, so it cannot be mapped.
        if !meta.is_any_referenced(&blocks)? || !meta.is_referenced(Run { start: new.start, blocks: 1 })? {
            return Ok(());
        }
        let others = meta.catalog.objects().filter(|object| !named.contains(&object.id));
        let others: Vec<(u64, bool)> = others.map(|object| (object.id, object.state == ObjectState::Trash)).collect();
        for (object, deleted) in others {
            if deleted {
                state.drops.begin(object);
                continue;
            }
            if !meta.can_redirect(object, &whole) {
                state.drops.note_unread(Unread { object, range: whole.clone(), blocks: blocks.clone() });
                continue;
            }
            self.ensure_nodes(meta, NODES_PER_OPERATION)?;
            let mut effects = Effects::default();
            meta.redirect(operation, object, whole.clone(), &mut effects)?;
            meta.release_again(&mut state.doubts, effects.freed);
        }
        Ok(())
    }

    /// Called before an operation allocates a run that has references, which no drop of a deleted tree removes. True if
    /// a tree may have had them that cannot be read.
    pub(super) fn lose_unread(&self, meta: &mut Meta, state: &mut ReplayState<'_>, run: Run) -> Result<bool> {
        let mut any = false;
        while let Some(Unread { object, range, .. }) = state.drops.take_unread(|unread| unread.may_map(&run)) {
            any = true;
            let Some(found) = meta.catalog.find(object) else { continue };
            if found.state == ObjectState::Trash {
                state.drops.begin(object);
                continue;
            }
            match state.left_out.tolerance() {
                Tolerance::Nothing => {
                    let text = format!(
                        "the map of object {object} cannot be read, and may refer to blocks that another disk has now; \
                         run 'lamina check --repair'"
                    );
                    return Err(Error::new(ErrorKind::Corrupt, text));
                }
                Tolerance::LostObjects => drop(self.lose_parts(meta, &mut state.drops, object, &range)?),
                Tolerance::Everything => state.left_out.lose(object, range),
            }
            state.drops.note_left_out();
        }
        Ok(any)
    }
}

impl Meta {
    /// Whether a block of these runs has a reference.
    fn is_any_referenced(&mut self, runs: &[Run]) -> Result<bool> {
        for run in runs {
            if self.is_referenced(*run)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the nodes of an object in a range, and their references, can be read.
    fn can_redirect(&mut self, object: u64, range: &Range<u64>) -> bool {
        let Some(root) = self.catalog.find(object).and_then(|object| object.root) else { return true };
        let (mut effects, mut mappings, mut readable) = (Effects::default(), Vec::new(), true);
        let mut nodes = self.nodes(&mut effects);
        tree::find_unreadable(&mut nodes, root, range.clone(), &mut mappings, &mut |_, _, _| readable = false);
        readable
    }
}
