//! Freed blocks until they can be reused: first the freeing has to be durable, then the reads that were planned before
//! have to end.

use crate::space::Run;
use std::collections::VecDeque;
use std::sync::Arc;

/// Blocks that were freed and cannot be reused yet.
#[derive(Default)]
pub struct Freed {
    /// Held by reads that may name blocks which are mapped now; replaced when blocks are durably freed.
    epoch: Arc<()>,
    /// Blocks whose freeing is durable, waiting for the reads of their epoch.
    waiting: VecDeque<(Arc<()>, Vec<Run>)>,
    /// Blocks whose freeing is not durable.
    freeing: u64,
    /// All of them.
    blocks: u64,
}

fn sum(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.blocks).sum()
}

impl Freed {
    /// While the guard lives, no block mapped now is given to another owner.
    pub fn guard(&self) -> Arc<()> {
        Arc::clone(&self.epoch)
    }

    /// Notes blocks that a pending change has freed.
    pub fn freed(&mut self, runs: &[Run]) {
        self.freeing += sum(runs);
        self.blocks += sum(runs);
    }

    /// Notes that the freeing of these blocks is durable; true if there are any.
    pub fn durable(&mut self, runs: Vec<Run>) -> bool {
        self.freeing -= sum(&runs);
        let any = !runs.is_empty();
        if any {
            let epoch = std::mem::replace(&mut self.epoch, Arc::new(()));
            self.waiting.push_back((epoch, runs));
        }
        any
    }

    /// Blocks that no read names any more: they can be reused.
    pub fn take(&mut self) -> Option<Vec<Run>> {
        // Epochs end in order: the end of a later one proves nothing for blocks freed before it.
        if Arc::strong_count(&self.waiting.front()?.0) > 1 {
            return None;
        }
        let (_, runs) = self.waiting.pop_front()?;
        self.blocks -= sum(&runs);
        Some(runs)
    }

    /// Blocks whose freeing is not durable.
    pub fn freeing(&self) -> u64 {
        self.freeing
    }

    /// All blocks that were freed and cannot be reused yet.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    #[cfg(test)]
    pub fn holds(&self, block: u64) -> bool {
        let mut runs = self.waiting.iter().flat_map(|(_, runs)| runs);
        runs.any(|run| (run.start..run.start + run.blocks).contains(&block))
    }
}
