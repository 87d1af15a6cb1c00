//! Placement: decides where a block is written, and tracks what the state that recovery would find says about the
//! block.
//!
//! A block is overwritten in place only if all of this holds:
//!
//! 1. it has one owner in the current metadata: one reference, on a path of nodes with one reference each;
//! 2. it has one owner in the *durable* metadata, which recovery finds, too: no pending operation took a reference from
//!    the block or from a node on its path while other references stay;
//! 3. no pending operation names the block: an announcement overtakes pending operations, so replay would see the
//!    announcement first and the older statement last;
//! 4. no write of it is in flight: neither payload of the journal nor another overwrite in place.
//!
//! Conditions 2 and 3 are *holds*. An operation that becomes pending holds the blocks that it names and those that it
//! unshares until the journal has it durably. Operations become durable in the order in which they became pending, so a
//! hold is the number of the last pending operation that concerns the block or node.
//!
//! Everything here is pure: no I/O, no threads, no clock. The state diagram is in `docs/format/native.md`; why holds
//! are counted is in `docs/adr/0012-placement.md`; `tests/model` explores every order of steps.
//!
//! # Blocks that are packed, pinned or shared by content
//!
//! Compression and deduplication add states of blocks and no decisions. Each of their rules has its place here:
//!
//! * A *packed* block is never overwritten in place: [`BlockState::shared_path`] is true for an extent of a packed leaf
//!   entry, because its blocks belong to several entries whatever their count.
//! * A block that is *shared by content* has a reference for each leaf entry that touches it:
//!   [`BlockState::references`].
//! * A *pinned* block, the target of a share that is being compared, is [`BlockState::held`] from the pin on: the pin
//!   is a [`Holds::hold_block`] of the operation about to become pending.
//! * Writes under way are no targets of sharing: [`InFlight::contains`] under the lock under which the share is
//!   decided.
//! * A share is one operation under the metadata lock; suspect blocks are refused there, by their table entry.
//! * A share waits for the data of its target: that is the gate of the pending operation, as for a new place.
//! * A share names its run, so that the run is held until the share is durable, also when its first owner unmaps it
//!   meanwhile. Holds are counted by order number, so that a second operation on the run prolongs them.

mod doubt;

pub(crate) use doubt::Doubts;

use crate::space::Run;
use crate::tree::NodeId;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// The state of a mapped block that decides where it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockState {
    /// References of the block in the current metadata.
    pub references: u32,
    /// A node on the path has more than one reference, or is held.
    pub shared_path: bool,
    /// A pending operation names the block or took a reference from it.
    pub held: bool,
    /// A write of the block is under way.
    pub in_flight: bool,
    /// The block has space and no content yet.
    pub unwritten: bool,
}

/// Where a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Over its own old content, after an announcement.
    InPlace,
    /// Into its own space, which was never written.
    Fill,
    /// Into a newly allocated block.
    New,
}

/// Decides where a mapped block is written.
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
/// The first hold of a data block is a flag in its table entry, which the caller keeps: [`Holds::hold_block`] and
/// [`Holds::release_block`] return its new value. Only blocks held by several operations at once cost memory here.
#[derive(Clone, Default)]
pub struct Holds {
    /// Number of the operation that became pending last.
    last: u64,
    /// Number of the operation that became durable last.
    durable: u64,
    /// Nodes, and the last operation that concerns each.
    nodes: FxHashMap<u64, u64>,
    /// Entries of `nodes` that remained when it was last cleaned.
    nodes_kept: usize,
    /// Blocks concerned by more than one pending operation, and the last of them.
    again: FxHashMap<u64, u64>,
}

/// Entries of nodes beyond those kept at which a cleaning is worth its time.
const CLEAN_AFTER: usize = 1024;

impl Holds {
    /// The number of the operation that becomes pending next.
    pub fn next(&self) -> u64 {
        self.last + 1
    }

    /// Notes that an operation is pending: everything that it concerns has been held under [`Holds::next`].
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

    /// True when no node can be held.
    pub fn no_nodes(&self) -> bool {
        self.nodes.is_empty()
    }

    /// True while the durable metadata may have other paths to what lies below the node than the current metadata.
    pub fn is_node_held(&self, node: NodeId) -> bool {
        !self.nodes.is_empty() && self.nodes.get(&node.0).is_some_and(|until| *until > self.durable)
    }

    /// The next pending operation took a reference from a node that has others.
    pub fn hold_node(&mut self, node: NodeId) {
        self.nodes.insert(node.0, self.next());
    }

    /// An operation changed these nodes, or freed them: entries may have moved between any of them. What lies below is
    /// held as long as the longest hold among them.
    pub fn spread(&mut self, changed: &[NodeId]) {
        let longest = changed.iter().filter_map(|node| self.nodes.get(&node.0)).max().copied();
        let Some(until) = longest.filter(|until| *until > self.durable) else { return };
        for node in changed {
            let known = self.nodes.entry(node.0).or_default();
            *known = until.max(*known);
        }
    }

    /// The next pending operation concerns a block; `flagged` is the flag in its entry, which the caller sets
    /// afterwards.
    pub fn hold_block(&mut self, block: u64, flagged: bool) {
        if flagged {
            self.again.insert(block, self.next());
        }
    }

    /// Releases a block that operation `number`, which is durable now, had held; true if the caller has to clear its
    /// flag.
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

/// Blocks with a write under way: claimed under the metadata lock when the write is planned, and released when its
/// result is in the metadata.
#[derive(Clone, Default)]
pub struct InFlight {
    /// Runs by first block, without overlaps. Adjacent runs are not joined: each is released as it was claimed.
    runs: BTreeMap<u64, u64>,
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

    /// Claims a run, no block of which is claimed.
    pub fn claim(&mut self, run: Run) {
        debug_assert!(!self.contains(run.start) && self.runs.range(run.start..run.start + run.blocks).next().is_none());
        self.runs.insert(run.start, run.blocks);
    }

    /// Releases a claimed run.
    pub fn release(&mut self, run: Run) {
        let blocks = self.runs.remove(&run.start);
        debug_assert_eq!(blocks, Some(run.blocks), "a run is given back as it was claimed");
    }
}

#[cfg(test)]
mod tests;
