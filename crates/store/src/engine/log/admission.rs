//! Admission: a change of metadata begins only when the journal has room for what it appends, and the next checkpoint
//! has room for the pages that it dirties.
//!
//! There are two budgets. *Bytes* of the ring: the bytes between tail and head, those of pending changes and those of
//! grants must fit into the ring less a reserve. The reserve is for small changes that cannot wait: the records of
//! settled announcements, of sealed snapshots and of reserved space, and the padding of a checkpoint's own appends.
//! *Pages*: those changed since the last checkpoint, those that a checkpoint under way has captured, and those of
//! grants must fit into the images file and into a share of the metadata cache. Captured pages count until their
//! checkpoint has ended, because recovery from the previous checkpoint would change all of them again.
//!
//! What must hold:
//!
//! 1. A grant is an upper limit. It is dropped after the bytes and pages of its work are counted, so they may count
//!    twice for a short time, but they always count.
//! 2. [`Admission::try_admit`] may be called under any lock. A thread that waits must hold no lock that a checkpoint
//!    takes.
//! 3. No request exceeds an empty budget, with one exception: the pages of a single operation, which is admitted when
//!    no other page counts.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex};
use std::collections::BTreeSet;
use std::time::Duration;

/// Dirty pages that are allowed even if the cache is smaller (16 MiB). No single operation changes as many pages, so
/// each can be admitted.
pub const PAGES_FLOOR: u64 = 4096;
/// The size of the ring, divided by this number, is reserved for small changes that cannot wait.
const RESERVE_SHARE: u64 = 16;
/// The number of pages that may change, divided by this number, is reserved for small changes that cannot wait.
const MARGIN_SHARE: u64 = 16;
/// A checkpoint is requested when this percentage of the ring is used.
const SOFT_RING_PERCENT: u64 = 40;
/// Writers are slowed down when a budget is filled beyond this percentage.
const PACE_PERCENT: u64 = 60;
/// The longest time by which a writer is slowed down after a batch: at a full budget.
const PACE_MAX: Duration = Duration::from_millis(20);

/// The journal bytes and the metadata pages that a change needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of the ring.
    pub bytes: u64,
    /// Pages that the change dirties.
    pub pages: u64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.pages += other.pages;
    }
}

/// The budget of bytes in the journal's ring, and the budget of changed pages.
pub struct Admission {
    granted: Mutex<Cost>,
    room: Condvar,
    ring: u64,
    /// The most dirty pages that the metadata cache allows.
    cache: u64,
    /// The number of dirty pages at which the cache limit requests a checkpoint.
    cache_soft: u64,
    /// Number of pages for which the images file has room.
    capacity: AtomicU64,
    /// Bytes between tail and head.
    used: AtomicU64,
    /// Bytes of pending operations.
    pending: AtomicU64,
    /// Pages that the next checkpoint has to write.
    dirty: AtomicU64,
    /// Numbers of the table pages of announced blocks: recovery would change these pages, but they are not dirty now.
    /// A page counts once, however many announcements concern it, so overwriting the same blocks repeatedly requests no
    /// checkpoint.
    announced_pages: Mutex<BTreeSet<u64>>,
    /// The number of pages in `announced_pages`.
    announced: AtomicU64,
    /// Pages that the checkpoint under way has captured, and those that its appends will dirty.
    captured: AtomicU64,
    /// See [`Admission::close`].
    closed: AtomicBool,
}

/// While this value exists, nothing is admitted.
pub struct Closed<'a>(&'a Admission);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.closed.store(false, Ordering::Release);
        self.0.notify();
    }
}

/// A grant: permission to change metadata, up to a cost.
pub struct Grant<'a> {
    admission: &'a Admission,
    cost: Cost,
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        let mut granted = self.admission.granted.lock();
        granted.bytes -= self.cost.bytes;
        granted.pages -= self.cost.pages;
        drop(granted);
        self.admission.room.notify_all();
    }
}

impl Admission {
    /// Admission for a ring of `ring` bytes and a cache of `cache` pages. The capacity of the images file is set later.
    pub fn new(ring: u64, cache: u64) -> Self {
        Self {
            granted: Mutex::default(),
            room: Condvar::new(),
            ring,
            cache: (cache / 2).max(PAGES_FLOOR),
            cache_soft: (cache / 4).max(64),
            capacity: AtomicU64::new(0),
            used: AtomicU64::new(0),
            pending: AtomicU64::new(0),
            dirty: AtomicU64::new(0),
            announced_pages: Mutex::default(),
            announced: AtomicU64::new(0),
            captured: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// The most bytes of the ring that may be used, pending or granted.
    pub fn ring_limit(&self) -> u64 {
        self.ring - self.ring / RESERVE_SHARE
    }

    /// The most pages that may be dirty, captured or granted.
    pub fn page_limit(&self) -> u64 {
        let hard = self.cache.min(self.capacity.load(Ordering::Acquire));
        hard - hard / MARGIN_SHARE
    }

    /// Whether an empty budget has room for work of this cost.
    pub fn holds(&self, cost: Cost) -> bool {
        cost.bytes <= self.ring_limit() && cost.pages <= self.page_limit()
    }

    /// The most pages for which the images file is grown.
    pub fn capacity_max(&self) -> u64 {
        self.cache
    }

    /// Number of pages for which the images file has room.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// Sets the number of pages for which the images file has room.
    pub fn set_capacity(&self, pages: u64) {
        self.capacity.store(pages, Ordering::Release);
        self.notify();
    }

    /// Sets the bytes between tail and head of the ring.
    pub fn set_used(&self, bytes: u64) {
        self.used.store(bytes, Ordering::Release);
    }

    /// Sets the bytes of pending changes, and the pages that the next checkpoint has to write.
    pub fn set_changes(&self, pending: u64, dirty: u64) {
        self.pending.store(pending, Ordering::Release);
        self.dirty.store(dirty, Ordering::Release);
    }

    /// Counts the table pages of announced blocks, which recovery would change.
    pub fn add_announced(&self, pages: &BTreeSet<u64>) {
        let mut announced = self.announced_pages.lock();
        announced.extend(pages);
        self.announced.store(announced.len() as u64, Ordering::Release);
    }

    /// Counts the dirty pages as captured by a checkpoint. Appending the pending changes dirties up to `more` pages
    /// again.
    pub fn begin_checkpoint(&self, more: u64) {
        let mut announced = self.announced_pages.lock();
        let pages = self.dirty.load(Ordering::Acquire) + announced.len() as u64 + more;
        self.captured.fetch_add(pages, Ordering::AcqRel);
        announced.clear();
        self.announced.store(0, Ordering::Release);
    }

    /// Ends the checkpoint: its pages are written to their places, and no longer count.
    pub fn end_checkpoint(&self) {
        self.captured.store(0, Ordering::Release);
        self.notify();
    }

    /// Wakes all waiting threads, so that they check for room again.
    pub fn notify(&self) {
        // The lock prevents a wake-up between a thread's check and the wait that follows.
        drop(self.granted.lock());
        self.room.notify_all();
    }

    fn bytes_held(&self) -> u64 {
        self.used.load(Ordering::Acquire) + self.pending.load(Ordering::Acquire)
    }

    /// The number of pages that recovery would change if the store ended now, without another checkpoint.
    fn pages_changed(&self) -> u64 {
        self.dirty.load(Ordering::Acquire) + self.announced.load(Ordering::Acquire)
    }

    fn pages_held(&self) -> u64 {
        self.pages_changed() + self.captured.load(Ordering::Acquire)
    }

    fn fits(&self, page_limit: u64, granted: Cost, cost: Cost) -> bool {
        let pages = self.pages_held() + granted.pages;
        !self.closed.load(Ordering::Acquire)
            && self.bytes_held() + granted.bytes + cost.bytes <= self.ring_limit()
            && (cost.pages == 0 || pages == 0 || pages + cost.pages <= page_limit)
    }

    /// Admits nothing until the result is dropped. The caller holds the lock of checkpoints until then, because threads
    /// that wait for room would make checkpoints in vain.
    pub fn close(&self) -> Closed<'_> {
        self.closed.store(true, Ordering::Release);
        Closed(self)
    }

    /// A grant for work of this cost, if there is room for it now.
    pub fn try_admit(&self, cost: Cost) -> Option<Grant<'_>> {
        self.admit_below(self.page_limit(), cost)
    }

    /// Like [`Admission::try_admit`], for a change of few pages, such as a snapshot, that should not wait while clients
    /// use up the budget of pages. It may use half of the reserve of pages.
    pub fn try_admit_small(&self, cost: Cost) -> Option<Grant<'_>> {
        let limit = self.page_limit();
        let reserve = limit / (MARGIN_SHARE - 1);
        if cost.pages > reserve / 4 { None } else { self.admit_below(limit + reserve / 2, cost) }
    }

    fn admit_below(&self, page_limit: u64, cost: Cost) -> Option<Grant<'_>> {
        let mut granted = self.granted.lock();
        if !self.fits(page_limit, *granted, cost) {
            return None;
        }
        *granted += cost;
        Some(Grant { admission: self, cost })
    }

    /// Waits until there is room, or until a timeout.
    pub fn wait(&self, cost: Cost, time: Duration) {
        let mut granted = self.granted.lock();
        if !self.fits(self.page_limit(), *granted, cost) {
            self.room.wait_for(&mut granted, time);
        }
    }

    /// The number of further pages that may be dirtied.
    pub fn pages_left(&self) -> u64 {
        let held = self.pages_held() + self.granted.lock().pages;
        self.page_limit().saturating_sub(held)
    }

    /// Whether the budgets are so full that a checkpoint is due.
    pub fn is_checkpoint_due(&self) -> bool {
        let soft = self.cache_soft.min(self.page_limit() / 2);
        self.pages_changed() > soft || self.bytes_held() * 100 > self.ring * SOFT_RING_PERCENT
    }

    /// Whether checkpoints are requested because of the images file, and not because of the cache.
    pub fn is_capacity_short(&self) -> bool {
        let capacity = self.capacity();
        capacity < self.cache && self.pages_changed() > capacity / 4
    }

    /// Fill level of the fuller budget.
    fn percent(&self) -> u64 {
        let bytes = self.bytes_held() * 100 / self.ring_limit().max(1);
        let pages = self.pages_held() * 100 / self.page_limit().max(1);
        bytes.max(pages).min(100)
    }

    /// How long a writer sleeps after a batch: in proportion to the fill level of the budgets.
    pub fn pace(&self) -> Duration {
        PACE_MAX * self.percent().saturating_sub(PACE_PERCENT) as u32 / (100 - PACE_PERCENT) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission() -> Admission {
        let admission = Admission::new(16 << 20, 32_768);
        admission.set_capacity(1600);
        admission
    }

    fn cost(bytes: u64, pages: u64) -> Cost {
        Cost { bytes, pages }
    }

    #[test]
    fn a_reserve_of_both_budgets_is_never_admitted() {
        let admission = admission();
        assert_eq!((admission.ring_limit(), admission.page_limit()), (15 << 20, 1500));
        assert!(admission.try_admit(cost((15 << 20) + 1, 0)).is_none());
        let all = admission.try_admit(cost(15 << 20, 1500)).unwrap();
        assert!(admission.try_admit(cost(1, 0)).is_none() && admission.try_admit(cost(0, 1)).is_none());
        drop(all);
        assert!(admission.try_admit(cost(1, 1)).is_some());
    }

    #[test]
    fn used_pending_dirty_and_captured_space_counts() {
        let admission = admission();
        admission.set_used(8 << 20);
        admission.set_changes(6 << 20, 1000);
        assert!(admission.try_admit(cost(1 << 20, 500)).is_some());
        assert!(admission.try_admit(cost((1 << 20) + 1, 0)).is_none());
        assert!(admission.try_admit(cost(0, 501)).is_none());
        admission.add_announced(&(0..150).collect());
        admission.add_announced(&(50..200).collect());
        assert!(admission.try_admit(cost(0, 301)).is_none() && admission.try_admit(cost(0, 300)).is_some());
        // Captured pages count until their checkpoint has ended.
        admission.begin_checkpoint(100);
        admission.set_changes(6 << 20, 10);
        assert_eq!(admission.pages_left(), 1500 - 1310);
        admission.end_checkpoint();
        assert_eq!(admission.pages_left(), 1490);
    }

    #[test]
    fn an_operation_larger_than_the_budget_is_admitted_alone() {
        let admission = admission();
        let large = admission.try_admit(cost(100, 5000)).unwrap();
        assert!(admission.try_admit(cost(0, 1)).is_none());
        // The budget of pages does not limit a request for journal bytes only.
        assert!(admission.try_admit(cost(1, 0)).is_some());
        drop(large);
        admission.set_changes(0, 1);
        assert!(admission.try_admit(cost(100, 5000)).is_none());
    }

    #[test]
    fn a_small_change_may_use_half_of_the_reserve_of_pages_and_no_reserve_of_bytes() {
        let admission = admission();
        let all = admission.try_admit(cost(0, 1500)).unwrap();
        assert!(admission.try_admit(cost(10, 6)).is_none() && admission.try_admit_small(cost(10, 26)).is_none());
        let small: Vec<_> = std::iter::from_fn(|| admission.try_admit_small(cost(10, 5))).collect();
        assert_eq!(small.len(), 10);
        drop((all, small));
        admission.set_used(15 << 20);
        assert!(admission.try_admit_small(cost(10, 5)).is_none());
    }

    #[test]
    fn a_wait_ends_with_a_grant_and_with_a_checkpoint() {
        let admission = admission();
        let all = admission.try_admit(cost(0, 1500)).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                while admission.try_admit(cost(0, 1500)).is_none() {
                    admission.wait(cost(0, 1500), Duration::from_secs(60));
                }
            });
            drop(all);
            waiter.join().unwrap();
        });
        admission.set_changes(0, 1500);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                while admission.try_admit(cost(0, 1)).is_none() {
                    admission.wait(cost(0, 1), Duration::from_secs(60));
                }
            });
            admission.begin_checkpoint(0);
            admission.set_changes(0, 0);
            admission.end_checkpoint();
            waiter.join().unwrap();
        });
    }

    #[test]
    fn writers_are_delayed_in_proportion_to_use() {
        let admission = admission();
        let at = |percent: u64| {
            admission.set_used(admission.ring_limit() * percent / 100);
            admission.pace()
        };
        assert_eq!(at(50), Duration::ZERO);
        let steps: Vec<Duration> = (6..=10).map(|tenth| at(10 * tenth)).collect();
        assert!(steps.windows(2).all(|pair| pair[0] < pair[1]), "{steps:?}");
        assert_eq!(at(100), PACE_MAX);
    }

    #[test]
    fn a_checkpoint_is_due_before_a_change_has_to_wait() {
        let admission = admission();
        assert!(!admission.is_checkpoint_due());
        admission.set_changes(0, 751);
        assert!(admission.is_checkpoint_due() && admission.pages_left() > 0 && admission.is_capacity_short());
        admission.set_changes(0, 0);
        admission.set_used(7 << 20);
        assert!(admission.is_checkpoint_due());
    }
}
