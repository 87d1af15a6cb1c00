//! Pending changes: applied in memory and not in the journal yet, in the order in which the journal takes them.

use crate::journal::Operation;
use crate::space::Run;
use std::collections::VecDeque;

/// A change that is applied in memory and not in the journal yet.
pub struct Pending {
    pub operation: Operation,
    /// The data that it refers to is durable once this many writes to the data files are.
    pub gate: u64,
    /// Its number among the operations that became pending.
    pub number: u64,
    /// Blocks that it freed.
    pub freed: Vec<Run>,
    /// Blocks that must not be overwritten in place before it is durable.
    pub held: Vec<Run>,
    /// It takes effect together with the next one or not at all, so both go into one batch.
    joined: bool,
}

/// The pending changes.
#[derive(Default)]
pub struct Queue {
    changes: VecDeque<Pending>,
    bytes: usize,
    /// Bytes of the changes that were taken from the queue and are being appended.
    appending: usize,
    /// How many of the changes are [`Operation::Checksums`].
    checksums: usize,
    /// Changes at the front that the checkpoint under way has captured.
    captured: Option<usize>,
}

/// The changes of one batch of the journal.
#[derive(Default)]
pub struct Taken {
    pub changes: Vec<Pending>,
    /// All captured changes were taken before: the journal position of their end is the current end.
    pub ordered: bool,
}

impl Queue {
    pub fn push(&mut self, operation: Operation, gate: u64, number: u64, freed: Vec<Run>, held: Vec<Run>) {
        self.bytes += operation.size();
        self.checksums += usize::from(matches!(operation, Operation::Checksums { .. }));
        self.changes.push_back(Pending { operation, gate, number, freed, held, joined: false });
    }

    /// Marks the change queued last: it takes effect with the next one or not at all.
    pub fn join_last(&mut self) {
        if let Some(last) = self.changes.back_mut() {
            last.joined = true;
        }
    }

    fn pop(&mut self) -> Option<Pending> {
        let next = self.changes.pop_front()?;
        let size = next.operation.size();
        self.bytes -= size;
        self.appending += size;
        self.checksums -= usize::from(matches!(next.operation, Operation::Checksums { .. }));
        self.captured = self.captured.map(|left| left.saturating_sub(1));
        Some(next)
    }

    /// Takes the changes for the next batch: those whose data is durable up to `synced`, while `more` returns that the
    /// batch has room. A batch ends where the changes that a checkpoint captured end.
    pub fn take_batch(&mut self, synced: u64, mut more: impl FnMut(&Operation) -> bool) -> Taken {
        let mut taken = Taken::default();
        if self.captured == Some(0) {
            self.captured = None;
            taken.ordered = true;
        }
        let (mut joined, mut room) = (false, true);
        while let Some(next) = self.changes.front()
            && next.gate <= synced
            && (room || joined)
            && self.captured != Some(0)
        {
            room = more(&next.operation);
            joined = next.joined;
            taken.changes.extend(self.pop());
        }
        taken
    }

    /// Takes all changes, which are then never appended.
    pub fn take_all(&mut self) -> Vec<Pending> {
        let taken = std::iter::from_fn(|| self.pop()).collect();
        self.appending = 0;
        taken
    }

    /// Notes that the taken changes are in the journal.
    pub fn appended(&mut self) {
        self.appending = 0;
    }

    /// Notes that a checkpoint captures all pending changes.
    pub fn capture(&mut self) {
        self.captured = Some(self.changes.len());
    }

    /// Bytes of the waiting changes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of the waiting changes and of those being appended.
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

    #[test]
    fn a_batch_ends_where_what_a_checkpoint_captured_ends() {
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
}
