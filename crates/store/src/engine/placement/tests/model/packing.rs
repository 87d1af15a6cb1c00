//! Packing in the model: the content of a block is copied to a new block, which is then mapped instead in every leaf:
//! by one operation for each logical block. A pack of the model has one block. It is never overwritten in place. Writes
//! that need new blocks may get packs at once.

use super::metadata::*;
use super::step::{Action, Fault, Rules, Violation};
use super::*;

/// A pack that is being written.
#[derive(Clone, Copy)]
pub struct Packing {
    pub logical: usize,
    pub from: usize,
    pub to: usize,
    pub content: Content,
    /// Number of leaves that mapped the block.
    pub references: u8,
}

/// The actions of a scenario with packing.
pub fn packing(action: Action) -> bool {
    use Action::*;
    matches!(
        action,
        Write(_, 0)
            | Discard(0, 0)
            | Plan(_)
            | PlanPacked(_)
            | ThroughPacked(_, 0)
            | ThroughEnd
            | Go
            | Finish
            | FlushLog
            | FlushEnd
            | SyncBegin
            | SyncEnd
            | Append
            | PayloadBegin(_)
            | PayloadEnd(_)
            | Crash(_)
            | PackBegin(..)
            | PackEnd
    )
}

impl Rules {
    pub fn packs(&self, state: &ModelState, out: &mut Vec<Action>) {
        if state.packing.is_some() {
            out.push(Action::PackEnd);
            return;
        }
        let disks = (0..DISKS).filter(|disk| state.is_writable(*disk));
        out.extend(disks.flat_map(|disk| (0..LOGICAL).map(move |logical| Action::PackBegin(disk, logical))));
    }

    fn is_packable(&self, state: &ModelState, block: usize, claimed: bool) -> bool {
        let entry = &state.now.entries[block];
        let logged = state.now.logged[block].is_some() && !self.has(Fault::PackedBeforePayload);
        let in_flight = state.in_flight.contains(block as u64) && !claimed;
        entry.references > 0 && !entry.packed && !entry.suspect && !state.held[block] && !in_flight && !logged
    }

    pub fn pack(&self, mut next: ModelState, action: Action) -> Result<Option<ModelState>, Violation> {
        let state = &mut next;
        if let Action::PackBegin(disk, logical) = action {
            let Some(from) = state.now.lookup(disk, logical).0 else { return Ok(None) };
            if state.now.is_unwritten(disk, logical) || !self.is_packable(state, from, false) {
                return Ok(None);
            }
            let content = state.cells[from].visible();
            if content != state.now.entries[from].sum {
                return Ok(None);
            }
            let Some(to) = Self::allocate(state)? else { return Ok(None) };
            if !self.has(Fault::PackedUnclaimed) {
                state.in_flight.claim(Run { start: from as u64, blocks: 1 });
            }
            state.cells[to].unflushed.push(content);
            let references = state.now.entries[from].references;
            state.packing = Some(Packing { logical, from, to, content, references });
            return Ok(Some(next));
        }
        let Some(Packing { logical, from, to, content, references }) = state.packing.take() else { return Ok(None) };
        state.written += 1;
        let gate = if self.has(Fault::PackedBeforeDurable) { 0 } else { state.written };
        if self.is_packable(state, from, true) && state.now.entries[from].references == references {
            self.enqueue(state, Op::Pack { logical, from, to, content }, gate);
            if state.now.entries[from].references > 0 {
                self.enqueue(state, Op::Share { logical: 1 - logical, from, to }, 0);
            }
        } else {
            state.taken[to] = false;
        }
        if !self.has(Fault::PackedUnclaimed) {
            state.in_flight.release(Run { start: from as u64, blocks: 1 });
        }
        Ok(Some(next))
    }
}

#[test]
fn finds_packs_of_blocks_with_payload() {
    finds(Fault::PackedBeforePayload, ModelState::plain, packing);
}

#[test]
fn finds_packs_of_blocks_that_are_overwritten_meanwhile() {
    finds(Fault::PackedUnclaimed, ModelState::plain, packing);
}

#[test]
fn finds_packs_that_are_journalled_before_their_data() {
    finds(Fault::PackedBeforeDurable, ModelState::plain, packing);
}

#[test]
fn finds_written_packs_that_are_journalled_before_their_data() {
    finds(Fault::WrittenPackBeforeDurable, ModelState::plain, packing);
}

#[test]
fn finds_written_packs_that_are_overwritten_in_place() {
    finds(Fault::WrittenPackAsPlain, ModelState::plain, packing);
}
