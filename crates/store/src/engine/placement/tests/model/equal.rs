//! Writes of content that is stored already: at write-back, the stored block, or the pack that has it, is mapped
//! instead of a new one.

use super::metadata::*;
use super::step::{Action, Fault, Rules};
use super::*;

/// A buffered write that is being compared with a block.
#[derive(Clone, Copy)]
pub struct Comparing {
    pub disk: usize,
    pub logical: usize,
    pub block: usize,
    pub value: Value,
    /// Whether the block is a pack.
    pub packed: bool,
    pub watch: Watch,
}

/// The actions of a scenario with writes of equal content.
pub fn writing(action: Action) -> bool {
    use Action::*;
    matches!(action, Repeat(..) | Compare(..) | MapShared)
        || sharing::sharing(action) && !matches!(action, ShareBegin(..) | ShareEnd)
}

/// As [`writing`], with writes that bypass the buffer, and without flushes.
pub fn permitted(action: Action) -> bool {
    use Action::*;
    writing(action) && !matches!(action, FlushLog | FlushEnd | Discard(..))
        || matches!(action, Permit(..) | Through(..) | ThroughEnd | Capture | CheckpointEnd)
}

/// As [`writing`], with new blocks that become packs, and without flushes and deletions.
pub fn packed(action: Action) -> bool {
    use Action::*;
    writing(action) && !matches!(action, FlushLog | FlushEnd | PayloadBegin(_) | PayloadEnd(_) | Delete(_) | Drop)
        || matches!(action, PlanPacked(_) | ThroughPacked(..) | ThroughEnd)
}

impl Rules {
    pub fn compares(&self, state: &ModelState, out: &mut Vec<Action>) {
        let used = || (0..BLOCKS).filter(|block| state.now.entries[*block].references > 0);
        for disk in (0..DISKS).filter(|disk| state.is_writable(*disk)) {
            for logical in 0..LOGICAL {
                let passing = state.through.is_some_and(|other| (other.disk, other.logical) == (disk, logical));
                if !passing {
                    out.extend(used().map(|block| Action::Repeat(disk, logical, block)));
                }
                if state.comparing.is_none() && state.oldest(disk)[logical].is_some_and(|value| value != 0) {
                    out.extend(used().map(|block| Action::Compare(disk, logical, block)));
                }
            }
        }
        // No batch is under way.
        if state.comparing.is_some() && (state.batch.is_none() || self.has(Fault::MappedDuringBatch)) {
            out.push(Action::MapShared);
        }
    }

    /// Whether a write to the disk may be mapped to a block instead of a new one. The checksum of the block does not
    /// matter: other content may have the same one.
    fn may_map(&self, state: &ModelState, (disk, logical): (usize, usize), kept: (usize, bool), value: Value) -> bool {
        let (block, packed) = kept;
        let payload = self.has(Fault::MappedBeforePayload) && state.now.logged[block].is_some();
        let freed = packed && self.has(Fault::MappedToFreedPack);
        (payload || freed || self.is_sharable(state, block, packed, false))
            && state.oldest(disk)[logical] == Some(value)
            && self.placement(state, disk, logical).0 == Placement::New
    }

    /// Called when an operation has changed the metadata.
    pub fn end_watches(&self, state: &mut ModelState, op: Op, freed: &[usize]) {
        let new = if let Op::OverwriteData { block, .. } = op { Some(block) } else { None };
        for block in freed.iter().copied().chain(new) {
            state.in_flight.end_watches(Run { start: block as u64, blocks: 1 });
        }
    }

    pub fn map_equal(&self, mut next: ModelState, action: Action) -> Option<ModelState> {
        let state = &mut next;
        match action {
            Action::Repeat(disk, logical, block) => {
                let Content(value, other) = state.cells[block].visible();
                if value != other || value == 0 || value == HOLE || state.expected[disk][logical].last() == Some(&value)
                {
                    return None;
                }
                state.open[disk][logical] = Some(value);
                state.write(disk, logical, value);
            }
            Action::Compare(disk, logical, block) => {
                let value = state.oldest(disk)[logical]?;
                let packed = state.now.entries[block].packed;
                let equal = state.cells[block].visible() == Content::of(value)
                    || state.now.logged[block] == Some(value) && self.has(Fault::MappedBeforePayload);
                if !equal || !self.may_map(state, (disk, logical), (block, packed), value) {
                    return None;
                }
                let watch = state.in_flight.watch(block as u64);
                state.comparing = Some(Comparing { disk, logical, block, value, packed, watch });
            }
            _ => {
                let Comparing { disk, logical, block, value, packed, watch } = state.comparing.take()?;
                let ignored = self.has(Fault::MappedUnwatched) || packed && self.has(Fault::MappedToFreedPack);
                let watched = state.in_flight.is_watched(watch) || ignored;
                if watched && state.is_writable(disk) && self.may_map(state, (disk, logical), (block, packed), value) {
                    // The operation that mapped a pack precedes this one in the journal, and waits until the pack is
                    // durable.
                    let gate = if packed || self.has(Fault::MappedBeforeDurable) { 0 } else { state.written };
                    let op = match packed {
                        true => Op::MapSharedPack { disk, logical, block },
                        false => Op::MapShared { disk, logical, block },
                    };
                    self.enqueue(state, op, gate);
                    state.oldest_mut(disk)[logical] = None;
                    if disk == 0 {
                        self.seal_empty(state);
                    }
                }
                state.in_flight.unwatch(watch);
            }
        }
        Some(next)
    }
}

/// The first disk has one block, and the second one has none.
pub fn one_block() -> ModelState {
    let mut state = ModelState::plain();
    state.now.nodes = Default::default();
    state.now.nodes[0] = Node { references: 1, slots: [Some(0), None], ..Node::default() };
    state.now.objects[1] = Object { kind: Kind::Live, ..Object::default() };
    (state.now.entries[1], state.taken[1], state.cells[1].durable) = Default::default();
    state.expected[0][1] = vec![0];
    state.expected[1] = [vec![0], vec![0]];
    state.base = state.now.clone();
    state
}

/// As [`one_block`]: the block was flushed, which left its payload in the journal, and was then overwritten in place.
/// That write is not durable, and no operation is pending.
pub fn overwritten() -> ModelState {
    let mut state = one_block();
    state.journal.push(Record { urgent: false, op: Op::OverwriteData { block: 0, value: 1 } });
    state.journal.push(Record { urgent: true, op: Op::Overwrite { block: 0, value: 2 } });
    state.cells[0].unflushed.push(Content::of(2));
    state.now.entries[0].sum = Content::of(2);
    state.expected[0][0] = vec![1, 2];
    state.written = 1;
    state
}

/// As [`one_block`], with the block in a pack.
pub fn one_pack() -> ModelState {
    let mut state = one_block();
    state.now.entries[0].packed = true;
    state.base = state.now.clone();
    state
}

/// Both disks have a block, and the contents differ.
fn two_blocks() -> ModelState {
    let mut state = one_block();
    state.now.nodes[1] = Node { references: 1, slots: [Some(1), None], ..Node::default() };
    state.now.objects[1].root = Some(1);
    state.now.entries[1] = ModelEntry { references: 1, sum: Content::of(2), ..ModelEntry::default() };
    (state.taken[1], state.cells[1].durable) = (true, Content::of(2));
    state.expected[1][0] = vec![2];
    state.base = state.now.clone();
    state
}

/// As [`overwritten`], and the operation that maps the block for a write to the second disk is pending.
fn mapped() -> ModelState {
    let actions = [Action::Repeat(1, 0, 0), Action::Compare(1, 0, 0), Action::MapShared];
    actions.into_iter().fold(overwritten(), |state, action| again(&Rules { fault: Fault::None }, &state, action))
}

/// The actions that map the block of the first disk for a write to the second one.
fn mapping(action: Action) -> bool {
    use Action::*;
    writing_back(action) || matches!(action, Append | Repeat(1, 0, 0) | Compare(1, 0, 0) | MapShared)
}

#[test]
fn finds_writes_mapped_to_a_block_that_is_overwritten_meanwhile() {
    finds(Fault::MappedUnwatched, one_block, |action| mapping(action) || action == Action::Write(0, 0));
}

#[test]
fn finds_writes_mapped_to_a_block_before_its_data_is_durable() {
    finds(Fault::MappedBeforeDurable, overwritten, mapping);
}

#[test]
fn finds_writes_mapped_to_a_block_whose_payload_is_not_written() {
    use Action::{FlushEnd, FlushLog, Write};
    finds(Fault::MappedBeforePayload, one_block, |action| {
        mapping(action) || matches!(action, Write(0, 0) | FlushLog | FlushEnd)
    });
}

/// The batch would overwrite a block that the operation frees.
#[test]
fn finds_writes_mapped_to_a_block_while_a_batch_writes_them() {
    use Action::{Append, Compare, MapShared, Repeat, Through, ThroughEnd};
    finds(Fault::MappedDuringBatch, two_blocks, |action| {
        writing_back(action)
            || matches!(action, Repeat(0, 0, 1) | Compare(0, 0, 1) | MapShared | Append)
            || matches!(action, Through(1, 1) | ThroughEnd)
    });
}

/// The mapped block loses its first owner while the operation is pending. Recovery may find this owner.
#[test]
fn finds_overwrites_of_a_block_that_became_exclusive_while_it_is_mapped_for_a_write() {
    use Action::{Discard, Write};
    finds(Fault::BlockHoldsIgnored, one_block, |action| {
        mapping(action) || matches!(action, Discard(0, 0) | Write(1, 0))
    });
}

/// The payload of the first owner, which only a settlement after the operation would end.
#[test]
fn finds_payload_from_before_a_mapped_write_that_returns() {
    use Action::{Append, Discard, SyncBegin, SyncEnd, Write};
    finds(Fault::MappedKeepsPayload, mapped, |action| {
        writing_back(action) || matches!(action, Append | Discard(0, 0) | Write(1, 0) | SyncBegin | SyncEnd)
    });
}

#[test]
fn finds_writes_mapped_to_a_pack_that_was_freed_meanwhile() {
    finds(Fault::MappedToFreedPack, one_pack, |action| mapping(action) || action == Action::Discard(0, 0));
}

/// The block of the pack was freed, and is another pack.
#[test]
fn finds_writes_mapped_to_a_pack_whose_block_was_used_again_meanwhile() {
    use Action::{Discard, PlanPacked, Write};
    finds(Fault::MappedUnwatched, one_pack, |action| {
        mapping(action) || matches!(action, Discard(0, 0) | Write(0, 1) | PlanPacked(0))
    });
}
