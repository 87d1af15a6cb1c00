//! Placement: decides whether a block may be overwritten in place. The decision depends on the current metadata of the
//! block, and on the metadata that recovery would find.
//!
//! A block is overwritten in place only if all of this holds:
//!
//! 1. The block has one owner in the current metadata: one reference, on a path of nodes with one reference each.
//! 2. The block has one owner in the *durable* metadata, which recovery would find: no pending operation took a
//!    reference from the block, or from a node on its path, that still has others.
//! 3. No pending operation names the block. An announcement overtakes pending operations, so replay would apply the
//!    announcement first and the older operation last.
//! 4. No write of the block is in flight: neither of journalled payload nor of another in-place overwrite.
//!
//! Conditions 2 and 3 are *holds*. A pending operation holds the blocks that it names and those that it unshares until
//! it is durable in the journal. Operations become durable in the order in which they became pending, so a hold is
//! stored as the number of the last pending operation that concerns the block or node.
//!
//! The code in this file is pure: no I/O, no threads, no clock. The state diagram is in `docs/format/native.md`. The
//! decision is explained in `docs/adr/0012-placement.md`. `tests/model` explores every order of steps.
//!
//! # Compression
//!
//! Compressed blocks add no decision: a block of a pack contains parts of other logical blocks, so
//! [`BlockState::shared_path`] is true for it, and it is never overwritten in place. While plain blocks are packed,
//! they are in flight ([`InFlight`]), so that no other write of them begins.
//!
//! # Deduplication
//!
//! Blocks that are shared because they have the same content add no decision either:
//!
//! * The kept block has a reference for each leaf entry that maps it: [`BlockState::references`].
//! * While two blocks are compared, both are in flight, so that no other write of them begins. Suspect blocks, and
//!   blocks that a pending operation holds, are not compared.
//! * The share is one operation under the metadata lock. It waits until the data of the kept block is durable, as an
//!   operation on a new block does: the last overwrite in place may have left no pending operation.
//! * The share does not hold the kept block. If other owners unmap the block while the share is pending, so that one
//!   owner is left, their operations hold it. They follow the share in the journal, so the block is held until the
//!   share is durable too.
//!
//! New data that is equal to a stored block is mapped to it at write-back. Only the stored block is kept, so only it is
//! concerned. While it is compared with the new data, it is *watched* ([`InFlight::watch`]) and not in flight: writes
//! of it go where they would go anyway, and end the watch as they begin. The operation is carried out only if the block
//! is still watched and settled. It waits for the data of the kept block and does not hold it, as a share. A block in a
//! pack, which is never overwritten, only has to be watched: the watch ends when the pack is freed.

mod doubt;

pub(crate) use doubt::Doubts;

use crate::space::Run;
use crate::tree::NodeId;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// The state of a mapped block. It decides where the block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockState {
    /// References of the block in the current metadata.
    pub references: u32,
    /// Whether a node on the path to the block has more than one reference, or is held.
    pub shared_path: bool,
    /// Whether a pending operation names the block or took a reference from it.
    pub held: bool,
    /// Whether a write of the block is under way.
    pub in_flight: bool,
    /// Whether the block is allocated and was never written.
    pub unwritten: bool,
}

/// Where a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Over the old content of the same block, after an announcement.
    InPlace,
    /// Into the same block, which was never written.
    Fill,
    /// Into a newly allocated block.
    New,
}

/// Decides to which block the new content of a mapped block is written.
pub fn place(state: BlockState) -> Placement {
    if state.references != 1 || state.shared_path || state.held || state.in_flight {
        Placement::New
    } else if state.unwritten {
        Placement::Fill
    } else {
        Placement::InPlace
    }
}

/// The blocks and nodes that pending operations concern.
///
/// The first hold of a data block is a flag in its table entry, which the caller stores: [`Holds::hold_block`] and
/// [`Holds::release_block`] return its new value. Only blocks that several operations hold at once take memory in this
/// struct.
#[derive(Clone, Default)]
pub struct Holds {
    /// Number of the operation that became pending last.
    last: u64,
    /// Number of the operation that became durable last.
    durable: u64,
    /// Nodes, with the last operation that concerns each.
    nodes: FxHashMap<u64, u64>,
    /// Number of entries in `nodes` after the last cleanup.
    nodes_kept: usize,
    /// Blocks that more than one pending operation concerns, with the last of these operations.
    again: FxHashMap<u64, u64>,
}

/// Additional entries in `nodes` after which a cleanup is worth its time.
const CLEAN_AFTER: usize = 1024;

impl Holds {
    /// The number of the operation that becomes pending next.
    pub fn next(&self) -> u64 {
        self.last + 1
    }

    /// Called when an operation has become pending. The blocks and nodes that it concerns were held with number
    /// [`Holds::next`] before.
    pub fn pushed(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Notes that all operations up to `number` are durable.
    pub fn committed(&mut self, number: u64) {
        self.durable = number;
        if self.durable == self.last {
            self.nodes.clear();
            self.nodes_kept = 0;
        } else if self.nodes.len() > 2 * self.nodes_kept + CLEAN_AFTER {
            self.nodes.retain(|_, until| *until > number);
            self.nodes_kept = self.nodes.len();
        }
    }

    /// True when no node is held.
    pub fn no_nodes(&self) -> bool {
        self.nodes.is_empty()
    }

    /// True while the durable metadata may have additional paths to the blocks below the node.
    pub fn is_node_held(&self, node: NodeId) -> bool {
        !self.nodes.is_empty() && self.nodes.get(&node.0).is_some_and(|until| *until > self.durable)
    }

    /// Holds a node for the next pending operation, which took a reference from the node while others remain.
    pub fn hold_node(&mut self, node: NodeId) {
        self.nodes.insert(node.0, self.next());
    }

    /// Called when an operation has changed or freed these nodes, and may have moved entries between any of them. Each
    /// node gets the longest hold of all of them, because a hold also applies to the entries below the node.
    pub fn spread(&mut self, changed: &[NodeId]) {
        let longest = changed.iter().filter_map(|node| self.nodes.get(&node.0)).max().copied();
        let Some(until) = longest.filter(|until| *until > self.durable) else { return };
        for node in changed {
            let known = self.nodes.entry(node.0).or_default();
            *known = until.max(*known);
        }
    }

    /// Holds a block for the next pending operation. `flagged` is the flag in the table entry of the block, which the
    /// caller sets afterwards.
    pub fn hold_block(&mut self, block: u64, flagged: bool) {
        if flagged {
            self.again.insert(block, self.next());
        }
    }

    /// Releases the hold that operation `number`, which is durable now, has on a block. True if the caller has to clear
    /// the flag of the block.
    pub fn release_block(&mut self, block: u64, number: u64) -> bool {
        if self.again.is_empty() {
            return true;
        }
        match self.again.get(&block) {
            Some(until) if *until > number => false,
            Some(_) => {
                self.again.remove(&block);
                true
            }
            None => true,
        }
    }
}

/// Blocks with a write under way. They are claimed under the metadata lock when the write is planned, and released when
/// the write's result is in the metadata.
#[derive(Clone, Default)]
pub struct InFlight {
    /// Runs by first block, without overlaps. Adjacent runs are not merged, because each is released as it was claimed.
    runs: BTreeMap<u64, u64>,
    /// Blocks that are watched: the number of the watch, and how many threads have it.
    watched: FxHashMap<u64, (u64, u32)>,
    /// The number of the last watch that began.
    watches: u64,
}

/// A watch of a block: shows whether the block kept its content since the watch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch {
    block: u64,
    number: u64,
}

impl InFlight {
    /// True when a write of the block is under way.
    pub fn contains(&self, block: u64) -> bool {
        !self.runs.is_empty()
            && self.runs.range(..=block).next_back().is_some_and(|(start, blocks)| block < start + blocks)
    }

    /// True when no write is under way.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Claims a run. No block of the run may be claimed already.
    pub fn claim(&mut self, run: Run) {
        debug_assert!(!self.contains(run.start) && self.runs.range(run.start..run.start + run.blocks).next().is_none());
        self.runs.insert(run.start, run.blocks);
        self.end_watches(run);
    }

    /// Begins to watch a block that is in use and has no write under way. The caller ends the watch with
    /// [`InFlight::unwatch`].
    pub fn watch(&mut self, block: u64) -> Watch {
        let (number, threads) = *self.watched.entry(block).or_insert((self.watches + 1, 0));
        self.watches = self.watches.max(number);
        self.watched.insert(block, (number, threads + 1));
        Watch { block, number }
    }

    /// Whether the block was in use since the watch began, and no write of it has begun.
    pub fn is_watched(&self, watch: Watch) -> bool {
        self.watched.get(&watch.block).is_some_and(|(number, _)| *number == watch.number)
    }

    /// Ends a watch, unless a write of the block has ended it.
    pub fn unwatch(&mut self, watch: Watch) {
        let Some((number, threads)) = self.watched.get_mut(&watch.block) else { return };
        if *number == watch.number {
            *threads -= 1;
            if *threads == 0 {
                self.watched.remove(&watch.block);
            }
        }
    }

    /// True when no block is watched.
    #[cfg(test)]
    pub fn watches_nothing(&self) -> bool {
        self.watched.is_empty()
    }

    /// Ends the watches of blocks that are freed, or of which a write begins.
    pub fn end_watches(&mut self, run: Run) {
        let blocks = run.start..run.start + run.blocks;
        // Called under the metadata lock, for each run that is freed.
        if run.blocks < self.watched.len() as u64 {
            for block in blocks {
                self.watched.remove(&block);
            }
        } else if !self.watched.is_empty() {
            self.watched.retain(|block, _| !blocks.contains(block));
        }
    }

    /// Releases a claimed run.
    pub fn release(&mut self, run: Run) {
        let blocks = self.runs.remove(&run.start);
        debug_assert_eq!(blocks, Some(run.blocks), "a run is given back as it was claimed");
    }
}

#[cfg(test)]
mod tests;
