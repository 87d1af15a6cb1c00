//! Pending changes: applied in memory and not in the journal yet, in the order in which they are appended.

use super::cost::table_pages;
use crate::journal::Operation;
use crate::space::Run;
use std::collections::VecDeque;

/// The most table entries that the changes of one batch concern, unless a single change concerns more. The journal is
/// locked until the changes are retired, and snapshots wait for it. The number limits the memory of a batch, too, which
/// is held twice, as changes and as bytes.
const BATCH_ENTRIES: u64 = 1 << 12;
/// Changes for which the queue keeps memory although it has fewer.
const SPARE_CHANGES: usize = 1 << 12;

/// A change that is applied in memory and not in the journal yet.
pub struct Pending {
    pub operation: Operation,
    /// The change is appended when this many writes to the data files are durable, because it refers to their data.
    pub gate: u64,
    /// Number of the operation, see [`crate::engine::placement::Holds`].
    pub number: u64,
    /// Blocks that the change freed.
    pub freed: Box<[Run]>,
    /// Blocks from which the change took a reference while others remain.
    unshared: Box<[Run]>,
    /// Whether the change and the next one take effect together, so that both go into one batch.
    joined: bool,
}

impl Pending {
    /// Blocks that must not be overwritten in place before the change is durable.
    pub fn held(&self) -> impl Iterator<Item = Run> + '_ {
        self.unshared.iter().copied().chain(self.operation.names())
    }

    /// The number of table entries that retiring the change concerns, at least 1.
    pub fn entries(&self) -> u64 {
        self.freed.len() as u64 + self.held().map(|run| run.blocks).sum::<u64>().max(1)
    }

    /// The most pages of the table that have these entries.
    fn table_pages(&self) -> u64 {
        self.held().map(table_pages).sum()
    }

    /// The memory that the change takes, in bytes.
    fn memory(&self) -> usize {
        let runs = self.freed.len() + self.unshared.len();
        size_of::<Self>() + self.operation.size() + runs * size_of::<Run>()
    }
}

/// The pending changes.
#[derive(Default)]
pub struct Queue {
    changes: VecDeque<Pending>,
    bytes: usize,
    /// The memory that the changes take, in bytes.
    memory: usize,
    /// Bytes of the changes that were taken from the queue and are being appended or retired.
    appending: usize,
    /// Number of [`Operation::Checksums`] among the changes.
    checksums: usize,
    /// The most pages of the data table that have held entries of the changes. A page with entries of several changes
    /// counts for each.
    table_pages: u64,
    /// Number of changes at the front that the checkpoint under way has captured.
    captured: Option<usize>,
}

/// The changes of one batch of the journal.
#[derive(Default)]
pub struct Taken {
    pub changes: Vec<Pending>,
    /// Whether all captured changes were already taken from the queue: then the current end of the journal is the end
    /// of the captured changes.
    pub ordered: bool,
}

impl Queue {
    pub fn push(&mut self, operation: Operation, gate: u64, number: u64, freed: Vec<Run>, unshared: Vec<Run>) {
        self.bytes += operation.size();
        self.checksums += usize::from(matches!(operation, Operation::Checksums { .. }));
        let (freed, unshared) = (freed.into_boxed_slice(), unshared.into_boxed_slice());
        let change = Pending { operation, gate, number, freed, unshared, joined: false };
        self.memory += change.memory();
        self.table_pages += change.table_pages();
        self.changes.push_back(change);
    }

    /// Joins the last change to the next one: both take effect together.
    pub fn join_last(&mut self) {
        if let Some(last) = self.changes.back_mut() {
            last.joined = true;
        }
    }

    fn pop(&mut self) -> Option<Pending> {
        let next = self.changes.pop_front()?;
        let size = next.operation.size();
        self.bytes -= size;
        self.memory -= next.memory();
        self.table_pages -= next.table_pages();
        self.appending += size;
        self.checksums -= usize::from(matches!(next.operation, Operation::Checksums { .. }));
        self.captured = self.captured.map(|left| left.saturating_sub(1));
        Some(next)
    }

    /// Takes changes for the next batch: those with data that is durable up to write `synced`, while `more` returns
    /// that the batch has room. A batch ends at the last change that a checkpoint captured.
    pub fn take_batch(&mut self, synced: u64, mut more: impl FnMut(&Operation) -> bool) -> Taken {
        let mut taken = Taken::default();
        if self.captured == Some(0) {
            self.captured = None;
            taken.ordered = true;
        }
        let (mut joined, mut room, mut entries) = (false, true, 0);
        while let Some(next) = self.changes.front()
            && next.gate <= synced
            && (room || joined)
            && self.captured != Some(0)
        {
            entries += next.entries();
            room = more(&next.operation) && entries < BATCH_ENTRIES;
            joined = next.joined;
            taken.changes.extend(self.pop());
        }
        if self.changes.capacity() > 4 * self.changes.len().max(SPARE_CHANGES) {
            self.changes.shrink_to(2 * self.changes.len().max(SPARE_CHANGES));
        }
        taken
    }

    /// Takes all changes without appending them.
    pub fn take_all(&mut self) -> Vec<Pending> {
        let taken = std::iter::from_fn(|| self.pop()).collect();
        self.appending = 0;
        taken
    }

    /// Called when the changes that were taken are in the journal, and retired.
    pub fn appended(&mut self) {
        self.appending = 0;
    }

    /// Notes that a checkpoint captures all pending changes.
    pub fn capture(&mut self) {
        self.captured = Some(self.changes.len());
    }

    /// Bytes of the changes in the queue.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The most pages of the data table that become dirty when the changes are retired.
    pub fn table_pages(&self) -> u64 {
        self.table_pages
    }

    /// The memory that the changes in the queue take, in bytes.
    pub fn memory(&self) -> usize {
        self.memory
    }

    /// Whether changes that were taken from the queue are being appended or retired.
    pub fn is_appending(&self) -> bool {
        self.appending > 0
    }

    /// Bytes of the changes in the queue, and of those that are being appended or retired.
    pub fn bytes_unappended(&self) -> usize {
        self.bytes + self.appending
    }

    pub fn len(&self) -> usize {
        self.changes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    pub fn has_checksums(&self) -> bool {
        self.checksums > 0
    }

    pub fn iter(&self) -> impl Iterator<Item = &Pending> {
        self.changes.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::TABLE_ENTRIES;

    #[test]
    fn a_batch_ends_at_the_last_change_that_a_checkpoint_captured() {
        let mut queue = Queue::default();
        let push = |queue: &mut Queue, logical| {
            queue.push(Operation::Unmap { disk: 1, logical, blocks: 1 }, 0, logical, Vec::new(), Vec::new());
        };
        (0..2).for_each(|logical| push(&mut queue, logical));
        queue.capture();
        push(&mut queue, 2);
        let captured = queue.take_batch(u64::MAX, |_| true);
        assert_eq!((captured.changes.len(), captured.ordered), (2, false));
        let rest = queue.take_batch(u64::MAX, |_| true);
        assert_eq!((rest.changes.len(), rest.ordered), (1, true));
    }

    #[test]
    fn a_batch_concerns_a_limited_number_of_entries() {
        let mut queue = Queue::default();
        let held =
            |count: u64| (0..count).map(|at| Run { start: 2 * at * TABLE_ENTRIES, blocks: 1 }).collect::<Vec<_>>();
        for count in [BATCH_ENTRIES / 2, BATCH_ENTRIES / 2, 1, 3 * BATCH_ENTRIES, 1] {
            queue.push(Operation::Unmap { disk: 1, logical: 0, blocks: 1 }, 0, 0, Vec::new(), held(count));
        }
        assert_eq!(queue.table_pages(), 4 * BATCH_ENTRIES + 2);
        let batches =
            std::iter::from_fn(|| Some(queue.take_batch(0, |_| true).changes.len()).filter(|count| *count > 0));
        assert_eq!(batches.collect::<Vec<_>>(), [2, 2, 1]);
        assert_eq!(queue.table_pages(), 0);
    }

    #[test]
    fn a_batch_has_a_limited_number_of_changes_and_the_queue_returns_their_memory() {
        let mut queue = Queue::default();
        for logical in 0..3 * BATCH_ENTRIES {
            queue.push(Operation::Unmap { disk: 1, logical, blocks: 1 }, 0, logical, Vec::new(), Vec::new());
        }
        assert!(queue.memory() >= 3 * BATCH_ENTRIES as usize * size_of::<Pending>());
        for _ in 0..3 {
            assert_eq!(queue.take_batch(0, |_| true).changes.len() as u64, BATCH_ENTRIES);
        }
        assert!(queue.memory() == 0 && queue.changes.capacity() <= 4 * SPARE_CHANGES);
    }
}
