//! Sharing in the model: a block is mapped in every leaf that mapped another block with the same content at one logical
//! block. The other block becomes free if it is mapped nowhere else.

use super::metadata::*;
use super::step::{Action, Fault, Rules};
use super::*;

/// Two blocks that are being compared.
#[derive(Clone, Copy)]
pub struct Sharing {
    pub logical: usize,
    /// The duplicate.
    pub from: usize,
    /// The block that is kept.
    pub to: usize,
    pub content: Content,
    /// Whether the duplicate and the kept block are packs.
    pub packed: [bool; 2],
}

impl Sharing {
    /// The blocks that are no packs.
    fn plain(&self) -> impl Iterator<Item = Run> + '_ {
        let both = [self.from, self.to].into_iter().zip(self.packed);
        both.filter(|(_, packed)| !packed).map(|(block, _)| Run { start: block as u64, blocks: 1 })
    }
}

/// Makes the second block of each object equal to the first one.
fn with_equal_blocks(mut state: ModelState) -> ModelState {
    state.now.entries[1].sum = Content::of(1);
    state.cells[1].durable = Content::of(1);
    state.expected.iter_mut().for_each(|blocks| blocks[1].iter_mut().for_each(|value| *value = 1));
    state.base = state.now.clone();
    state
}

/// A disk with two blocks of the same content.
pub fn equal() -> ModelState {
    with_equal_blocks(ModelState::plain())
}

/// As [`equal`], with a clone that shares only the blocks.
pub fn equal_divided() -> ModelState {
    with_equal_blocks(ModelState::divided())
}

/// As [`equal`], with the second block in a pack.
pub fn equal_packed() -> ModelState {
    let mut state = equal();
    state.now.entries[1].packed = true;
    state.base = state.now.clone();
    state
}

/// A disk of which both blocks are one block of the medium, and a clone that shares only this block.
pub fn one_block() -> ModelState {
    let mut state = equal_divided();
    for node in state.now.nodes.iter_mut().filter(|node| node.references > 0 && node.level == 0) {
        node.slots.iter_mut().filter(|slot| **slot == Some(1)).for_each(|slot| *slot = Some(0));
    }
    let references = std::mem::take(&mut state.now.entries[1].references);
    state.now.entries[0].references += references;
    state.taken[1] = false;
    state.base = state.now.clone();
    state
}

/// The actions of a scenario with packs of shared blocks, and shares of packed blocks.
pub fn shared_packs(action: Action) -> bool {
    use Action::*;
    matches!(
        action,
        Write(..)
            | Discard(0, 0)
            | Plan(_)
            | Go
            | Finish
            | SyncBegin
            | SyncEnd
            | Append
            | Crash(_)
            | PackBegin(..)
            | PackEnd
            | ShareBegin(..)
            | ShareEnd
    )
}

/// The actions of a scenario with sharing.
pub fn sharing(action: Action) -> bool {
    use Action::*;
    matches!(
        action,
        Write(..)
            | Discard(0, 0)
            | Plan(_)
            | Go
            | Finish
            | FlushLog
            | FlushEnd
            | SyncBegin
            | SyncEnd
            | Append
            | PayloadBegin(_)
            | PayloadEnd(_)
            | Delete(1)
            | Drop
            | Crash(_)
            | ShareBegin(..)
            | ShareEnd
    )
}

/// The actions of a scenario with sharing, and with writes that bypass the buffer.
pub fn permitted(action: Action) -> bool {
    use Action::*;
    sharing(action) && !matches!(action, FlushLog | FlushEnd | Discard(..))
        || matches!(action, Permit(..) | Through(..) | ThroughEnd | Capture | CheckpointEnd)
}

impl Rules {
    pub fn shares(&self, state: &ModelState, out: &mut Vec<Action>) {
        if state.sharing.is_some() {
            out.push(Action::ShareEnd);
            return;
        }
        for disk in (0..DISKS).filter(|disk| state.is_writable(*disk)) {
            for logical in 0..LOGICAL {
                let used = (0..BLOCKS).filter(|block| state.now.entries[*block].references > 0);
                out.extend(used.map(|kept| Action::ShareBegin(disk, logical, kept)));
            }
        }
    }

    /// Whether a block, which is `packed`, can be shared. A pack needs neither a mark nor settled content, because it
    /// is never overwritten.
    pub fn is_sharable(&self, state: &ModelState, block: usize, packed: bool, claimed: bool) -> bool {
        let entry = &state.now.entries[block];
        match packed {
            true => entry.packed && (entry.references > 0 || claimed && self.has(Fault::SharedWithFreedPack)),
            false => self.is_settled(state, block, claimed),
        }
    }

    pub fn is_settled(&self, state: &ModelState, block: usize, claimed: bool) -> bool {
        let entry = &state.now.entries[block];
        let in_flight = state.in_flight.contains(block as u64) && !claimed;
        entry.references > 0
            && !entry.packed
            && !entry.suspect
            && !state.held[block]
            && !in_flight
            && state.now.logged[block].is_none()
    }

    pub fn share(&self, mut next: ModelState, action: Action) -> Option<ModelState> {
        let state = &mut next;
        if let Action::ShareBegin(disk, logical, to) = action {
            let from = state.now.lookup(disk, logical).0?;
            let content = state.cells[from].visible();
            let packed = [from, to].map(|block| state.now.entries[block].packed);
            let equal = content == state.cells[to].visible()
                && [from, to].into_iter().all(|block| state.now.entries[block].sum == content);
            let sharable = |side: usize| self.is_sharable(state, [from, to][side], packed[side], false);
            if from == to || packed == [true, false] || !equal || !(0..2).all(sharable) {
                return None;
            }
            let sharing = Sharing { logical, from, to, content, packed };
            if !self.has(Fault::SharedUnclaimed) {
                sharing.plain().for_each(|run| state.in_flight.claim(run));
            }
            state.sharing = Some(sharing);
            return Some(next);
        }
        let sharing = state.sharing.take()?;
        let Sharing { logical, from, to, content, packed } = sharing;
        let still = (0..2).all(|side| {
            let block = [from, to][side];
            self.is_sharable(state, block, packed[side], true) && state.now.entries[block].sum == content
        });
        if still {
            // The operation that mapped a pack precedes this one in the journal, and waits until the pack is durable.
            let gate = if packed[1] || self.has(Fault::SharedBeforeDurable) { 0 } else { state.written };
            self.enqueue(state, Op::Share { logical, from, to }, gate);
        }
        if !self.has(Fault::SharedUnclaimed) {
            sharing.plain().for_each(|run| state.in_flight.release(run));
        }
        Some(next)
    }
}

/// A disk of which the first block was just overwritten in place with the content of the second one. The write is not
/// durable, and no operation is pending.
pub fn equal_written() -> ModelState {
    let mut state = ModelState::plain();
    state.journal.push(Record { urgent: true, op: Op::Overwrite { block: 0, value: 2 } });
    state.cells[0].unflushed.push(Content::of(2));
    state.now.entries[0].sum = Content::of(2);
    state.expected[0][0].push(2);
    state.written = 1;
    state
}

/// Two disks, each with a block of its own. The first one was flushed, which left its payload in the journal, and then
/// overwritten in place with the content of the second one. That write is not durable.
pub fn equal_after_payload() -> ModelState {
    let mut state = ModelState::divided();
    state.now.nodes[4].slots[0] = Some(2);
    (state.now.entries[0].references, state.taken[2], state.values) = (1, true, 3);
    state.now.entries[2] = ModelEntry { references: 1, sum: Content::of(3), ..ModelEntry::default() };
    state.cells[2].durable = Content::of(3);
    state.base = state.now.clone();
    state.journal.push(Record { urgent: false, op: Op::OverwriteData { block: 0, value: 1 } });
    state.journal.push(Record { urgent: true, op: Op::Overwrite { block: 0, value: 3 } });
    state.cells[0].unflushed.push(Content::of(3));
    state.now.entries[0].sum = Content::of(3);
    (state.expected[0][0], state.expected[1][0]) = (vec![1, 3], vec![3]);
    state.written = 1;
    state
}

/// The actions on the first block of two disks that may return payload to a block that is shared.
fn kept_payload(action: Action) -> bool {
    use Action::*;
    writing_back(action)
        || matches!(action, Write(1, 0) | Discard(0, 0) | SyncBegin | SyncEnd | Append)
        || matches!(action, ShareBegin(1, 0, 0) | ShareEnd)
}

/// The actions that write to a disk and share its blocks.
fn writing(action: Action) -> bool {
    writing_back(action) || matches!(action, Action::Write(0, _) | Action::ShareBegin(0, ..) | Action::ShareEnd)
}

#[test]
fn finds_shares_of_blocks_that_are_overwritten_meanwhile() {
    finds(Fault::SharedUnclaimed, equal, writing);
}

#[test]
fn finds_shares_that_are_journalled_before_the_data_of_the_kept_block() {
    finds(Fault::SharedBeforeDurable, equal_written, |action| writing(action) || action == Action::Append);
}

/// The kept block loses its first owner while the share is pending. Recovery may find this owner.
#[test]
fn finds_overwrites_of_a_block_that_became_exclusive_while_its_share_is_pending() {
    finds(Fault::BlockHoldsIgnored, equal, writing);
}

/// The payload of the first owner, which only a settlement after the share would end.
#[test]
fn finds_payload_from_before_a_share_that_returns() {
    finds(Fault::SharedKeepsPayload, equal_after_payload, kept_payload);
}

#[test]
fn finds_shares_with_a_pack_that_was_freed_meanwhile() {
    finds(Fault::SharedWithFreedPack, equal_packed, shared_packs);
}

/// The duplicate of a packed block, which is plain.
#[test]
fn finds_shares_with_packs_of_blocks_that_are_overwritten_meanwhile() {
    finds(Fault::SharedUnclaimed, equal_packed, |action| writing(action) && !matches!(action, Action::Write(0, 1)));
}
