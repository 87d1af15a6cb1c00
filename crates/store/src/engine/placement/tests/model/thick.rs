//! Thick disks: blocks that are mapped before they are written, and stay mapped when they are discarded.

use super::metadata::*;
use super::state::*;
use super::step::Rules;
use super::*;

impl Rules {
    /// A discard. A thick disk keeps the block if no other object maps it.
    pub fn discard(&self, state: &mut ModelState, disk: usize, logical: usize, gate: u8) {
        let (block, path) = state.now.lookup(disk, logical);
        let shared = |node: &NodeId| state.now.nodes[node.0 as usize].references > 1 || state.holds.is_node_held(*node);
        let own = block.filter(|block| state.now.entries[*block].references == 1 && !path.iter().any(shared));
        match own.filter(|_| state.thick && disk == 0) {
            Some(_) if state.now.is_unwritten(disk, logical) => {}
            Some(block) => self.enqueue(state, Op::Unwritten { disk, logical, block }, gate),
            None => self.enqueue(state, Op::Unmap { disk, logical }, gate),
        }
    }
}
