//! Freed blocks that cannot be reused yet: their freeing must become durable, and then all reads that were planned
//! before that moment must end.

use crate::space::Run;
use std::collections::VecDeque;
use std::sync::Arc;

/// Blocks that were freed and cannot be reused yet.
#[derive(Default)]
pub struct Freed {
    /// The current epoch: reads that may refer to blocks mapped now hold a reference to it. A new epoch begins when the
    /// freeing of blocks becomes durable.
    epoch: Arc<()>,
    /// Blocks that were freed durably. They wait for the reads of their epoch.
    waiting: VecDeque<(Arc<()>, Vec<Run>)>,
    /// Number of freed blocks of which the freeing is not durable.
    freeing: u64,
    /// Number of all blocks that cannot be reused yet.
    blocks: u64,
    /// Whether any block was freed since the store was opened.
    any: bool,
}

fn sum(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.blocks).sum()
}

impl Freed {
    /// While the guard exists, no block that is mapped now is reused.
    pub fn guard(&self) -> Arc<()> {
        Arc::clone(&self.epoch)
    }

    /// Adds blocks that a pending change has freed.
    pub fn freed(&mut self, runs: &[Run]) {
        self.freeing += sum(runs);
        self.blocks += sum(runs);
        self.any |= !runs.is_empty();
    }

    /// Whether any block was freed since the store was opened.
    pub fn any(&self) -> bool {
        self.any
    }

    /// Called when the freeing of these blocks is durable. True if there are any.
    pub fn durable(&mut self, runs: Vec<Run>) -> bool {
        self.freeing -= sum(&runs);
        let any = !runs.is_empty();
        if any {
            let epoch = std::mem::replace(&mut self.epoch, Arc::new(()));
            self.waiting.push_back((epoch, runs));
        }
        any
    }

    /// Blocks that no read refers to any more: they can be reused.
    pub fn take(&mut self) -> Option<Vec<Run>> {
        // Epochs are released in order: a read of an older epoch may refer to blocks that were freed in a later one.
        if Arc::strong_count(&self.waiting.front()?.0) > 1 {
            return None;
        }
        let (_, runs) = self.waiting.pop_front()?;
        self.blocks -= sum(&runs);
        Some(runs)
    }

    /// Blocks whose freeing is durable and that wait for reads.
    pub fn waiting(&self) -> impl Iterator<Item = &Run> {
        self.waiting.iter().flat_map(|(_, runs)| runs)
    }

    /// Number of blocks whose freeing is not durable.
    pub fn freeing(&self) -> u64 {
        self.freeing
    }

    /// Number of all blocks that were freed and cannot be reused yet.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    #[cfg(test)]
    pub fn holds(&self, block: u64) -> bool {
        self.waiting().any(|run| (run.start..run.start + run.blocks).contains(&block))
    }
}
