//! The total progress of several copies.

use parking_lot::Mutex;
use work::Progress;

/// The sum of the progress of copies. For each copy that has begun: bytes copied, and bytes in total.
pub struct Sum<'a> {
    progress: &'a dyn Progress,
    /// Number of copies, including those that have not begun.
    parts: usize,
    begun: Mutex<Vec<(u64, u64)>>,
}

/// Progress of one copy.
pub struct Part<'a> {
    sum: &'a Sum<'a>,
    index: usize,
}

impl<'a> Sum<'a> {
    pub fn new(parts: usize, progress: &'a dyn Progress) -> Self {
        Self { progress, parts, begun: Mutex::default() }
    }

    /// Begins a copy.
    pub fn part(&'a self) -> Part<'a> {
        let mut begun = self.begun.lock();
        begun.push((0, 0));
        Part { sum: self, index: begun.len() - 1 }
    }
}

impl Progress for Part<'_> {
    fn update(&self, done: u64, total: u64) {
        let (done, total, count) = {
            let mut begun = self.sum.begun.lock();
            begun[self.index] = (done, total);
            let sum = begun.iter().fold((0u64, 0u64), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            (sum.0, sum.1, begun.len())
        };
        // Copies that have not begun are assumed to have the average size of those that have.
        let total = u128::from(total) * self.sum.parts.max(count) as u128 / count.max(1) as u128;
        self.sum.progress.update(done, u64::try_from(total).unwrap_or(u64::MAX));
    }

    fn cancelled(&self) -> bool {
        self.sum.progress.cancelled()
    }
}
