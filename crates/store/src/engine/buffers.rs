//! The write buffers of all disks, and the limit on their total content.
//!
//! Lock order: `reducing` of one disk, before the locks of write-back; the buffers of disks, ascending by id; `queue`
//! and `sealed`, to wait. `heads`, to look up a disk, and then `recorded` and the `written` of a disk, may be taken
//! under all other locks, because they are held for a few instructions. This part takes no lock of another part. The
//! engine takes the metadata lock while it holds the buffer of a disk.

use super::read::gone;
use super::read_cache::Lookups;
use super::written::{Purpose, Written};
use crate::Result;
use crate::buffer::{DirtyPiece, Layers};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, RwLock};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Freed blocks (512 KiB) for which the threads that wait for room are woken.
const WAKE_BLOCKS: u64 = 128;
/// Writes of at most this many blocks (256 KiB) are not divided.
const PART_MIN: u64 = 64;

/// The records of the writes of a disk, for each purpose.
type Records = [Option<Arc<Written>>; Purpose::COUNT];

/// The writable state of an open disk.
pub struct Head {
    /// Object id of the disk.
    pub id: u64,
    buffer: Mutex<Buffer>,
    /// Held while a batch of the disk is compared or compressed, and written.
    reducing: Mutex<()>,
    /// Whether the height of the disk's tree is known.
    measured: AtomicBool,
    /// Reads of the disk that the read cache could answer.
    pub(super) lookups: Arc<Lookups>,
    /// Whether writes are recorded in `written`: most disks have no such record, and writes to them only test this.
    is_recorded: AtomicBool,
    written: RwLock<Records>,
}

/// The buffer of a disk.
#[derive(Default)]
pub struct Buffer {
    pub layers: Layers,
    /// Whether the disk was deleted or reverted while it was open.
    pub gone: bool,
    /// Where write-back continues: an elevator over logical addresses.
    pub cursor: u64,
    /// Ranges of the writes under way that bypass the buffer.
    through: Vec<Range<u64>>,
}

impl Buffer {
    /// True while a write that bypasses the buffer overlaps the range: reads and writes of that range wait.
    fn is_passing(&self, range: &Range<u64>) -> bool {
        self.through.iter().any(|other| other.start < range.end && range.start < other.end)
    }

    /// Begins a write of a range that bypasses the buffer. False if the range, or any closed layer, has buffered
    /// entries.
    pub fn enter_through(&mut self, range: &Range<u64>) -> Result<bool> {
        if self.gone {
            return Err(gone());
        }
        if self.is_passing(range) || !self.layers.is_free(range) {
            return Ok(false);
        }
        self.layers.invalidate_partial(range);
        self.through.push(range.clone());
        Ok(true)
    }

    /// Ends a write that bypasses the buffer.
    pub fn leave_through(&mut self, range: &Range<u64>) {
        if let Some(at) = self.through.iter().position(|other| other == range) {
            self.through.swap_remove(at);
        }
    }

    /// Entries of the oldest layer from the position of write-back on, up to `most` blocks.
    pub fn oldest_pieces(&mut self, most: u64) -> Vec<DirtyPiece> {
        let cursor = self.cursor;
        let (layer, _) = self.layers.oldest();
        let pieces = layer.take(cursor, most);
        if pieces.is_empty() { layer.take(0, most) } else { pieces }
    }
}

impl Head {
    fn new(id: u64, buffer: Buffer) -> Arc<Self> {
        let measured = AtomicBool::new(false);
        let (lookups, is_recorded) = (Arc::default(), AtomicBool::new(false));
        let (buffer, reducing, written) = (Mutex::new(buffer), Mutex::default(), RwLock::default());
        Arc::new(Self { id, buffer, reducing, measured, lookups, is_recorded, written })
    }

    /// Begins or ends to record writes.
    fn record(&self, records: Records) {
        let is_recorded = records.iter().any(Option::is_some);
        *self.written.write() = records;
        self.is_recorded.store(is_recorded, Ordering::Release);
    }

    /// Called when a write of these blocks has ended, with or without an error.
    pub(super) fn note_written(&self, blocks: Range<u64>) {
        if self.is_recorded.load(Ordering::Acquire) {
            self.written.read().iter().flatten().for_each(|written| written.note(&blocks));
        }
    }

    /// Locks the buffer.
    pub(super) fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock()
    }

    /// Locks the preparation of batches. Taken before all locks of a batch, and never by a checkpoint.
    pub(super) fn lock_reducing(&self) -> MutexGuard<'_, ()> {
        self.reducing.lock()
    }

    /// As [`Head::lock_reducing`], if no other thread holds the lock.
    pub(super) fn try_lock_reducing(&self) -> Option<MutexGuard<'_, ()>> {
        self.reducing.try_lock()
    }

    /// Whether the height of the disk's tree is known.
    pub(super) fn is_measured(&self) -> bool {
        self.measured.load(Ordering::Acquire)
    }

    /// Records that the height of the disk's tree is known.
    pub(super) fn set_measured(&self) {
        self.measured.store(true, Ordering::Release);
    }

    /// Locks the buffer once no write that bypasses the buffer overlaps `range`.
    pub(super) fn lock_settled(&self, range: &Range<u64>) -> MutexGuard<'_, Buffer> {
        let mut tries = 0u32;
        loop {
            let buffer = self.buffer.lock();
            if !buffer.is_passing(range) {
                return buffer;
            }
            drop(buffer);
            // The wait is short: such a write copies a few hundred kilobytes into the page cache.
            tries += 1;
            if tries < 16 {
                crate::sync::thread::yield_now();
            } else {
                crate::sync::thread::sleep(Duration::from_micros(20));
            }
        }
    }
}

/// The buffers of a store.
pub struct Buffers {
    heads: RwLock<FxHashMap<u64, Arc<Head>>>,
    /// Records of writes, of disks with and without a buffer.
    recorded: Mutex<FxHashMap<u64, Records>>,
    /// The highest number of disks that had a buffer at the same time: the number of trees that may change.
    count: AtomicU64,
    /// Limit of the data in all buffers, in blocks.
    limit: u64,
    /// The lower limit while writers outrun a flush, that is, fill the buffers as fast as write-back empties them. The
    /// limit is so low that a flush can append all buffered data at once.
    few: u64,
    /// Number of flushes that writers have outrun.
    outrun: AtomicU64,
    /// Number of blocks of data in all buffers.
    blocks: AtomicU64,
    /// Room, in blocks, that is kept free for the first waiting writer. 0 if none waits. Changed under `queue`.
    kept: AtomicU64,
    queue: Mutex<Queue>,
    room_ready: Condvar,
    /// How often snapshots were taken.
    snapshots: AtomicU64,
    /// Number of snapshots whose last writes are still buffered.
    unsealed: AtomicU64,
    sealed: Mutex<()>,
    sealed_ready: Condvar,
}

/// While this value exists, the buffers accept little data, so that the flush that holds it ends.
pub struct Outrun<'a>(&'a Buffers);

impl Drop for Outrun<'_> {
    fn drop(&mut self) {
        self.0.outrun.fetch_sub(1, Ordering::SeqCst);
        let _guard = self.0.queue.lock();
        self.0.room_ready.notify_all();
    }
}

/// The writers that wait for room, in the order of their arrival.
#[derive(Default)]
struct Queue {
    /// Number of the next writer.
    next: u64,
    /// Numbers of the writers, and the blocks for which they wait.
    waiting: VecDeque<(u64, u64)>,
}

/// A writer that waits for room. What the first one in the queue waits for is kept free from all others: otherwise
/// writers of few blocks could take all room as it becomes free, and a writer of more blocks would wait without end.
pub struct Waiter<'a> {
    buffers: &'a Buffers,
    number: u64,
    blocks: u64,
}

impl Waiter<'_> {
    fn is_first(&self, queue: &Queue) -> bool {
        queue.waiting.front().is_some_and(|(number, _)| *number == self.number)
    }

    /// Reserves the buffer space, if there is enough.
    pub fn try_take(&self) -> bool {
        let is_first = self.is_first(&self.buffers.queue.lock());
        self.buffers.take(self.blocks, is_first).is_some()
    }

    /// Waits until buffer space may be available, or until a timeout.
    pub fn wait(&self, time: Duration) {
        let mut queue = self.buffers.queue.lock();
        if !self.buffers.has_room(self.buffers.blocks(), self.blocks, self.is_first(&queue)) {
            self.buffers.room_ready.wait_for(&mut queue, time);
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut queue = self.buffers.queue.lock();
        queue.waiting.retain(|(number, _)| *number != self.number);
        let next = queue.waiting.front().map_or(0, |(_, blocks)| *blocks);
        self.buffers.kept.store(next, Ordering::SeqCst);
        // The writers behind a single block had the same room as that writer.
        let has_next = || next > 0 && self.buffers.has_room(self.buffers.blocks(), next, true);
        if self.blocks > 1 || has_next() {
            self.buffers.room_ready.notify_all();
        }
    }
}

impl Buffers {
    /// Empty buffers with a limit in blocks, and with the limit for the time in which a flush is outrun.
    pub fn new(limit: u64, few: u64) -> Self {
        Self {
            heads: RwLock::default(),
            recorded: Mutex::default(),
            count: AtomicU64::new(0),
            limit,
            few,
            outrun: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            queue: Mutex::default(),
            room_ready: Condvar::default(),
            snapshots: AtomicU64::new(0),
            unsealed: AtomicU64::new(0),
            sealed: Mutex::default(),
            sealed_ready: Condvar::default(),
        }
    }

    /// The writable state of a disk, if it has one.
    pub fn find(&self, disk: u64) -> Option<Arc<Head>> {
        self.heads.read().get(&disk).cloned()
    }

    /// The writable states of these disks, as far as they have any.
    pub fn of_disks(&self, disks: &[u64]) -> Vec<Arc<Head>> {
        disks.iter().filter_map(|disk| self.find(*disk)).collect()
    }

    /// The state of a deleted disk: it refuses reads and writes.
    pub fn gone(disk: u64) -> Arc<Head> {
        Head::new(disk, Buffer { gone: true, ..Buffer::default() })
    }

    /// The writable state of a disk.
    pub fn head(&self, disk: u64) -> Arc<Head> {
        if let Some(head) = self.find(disk) {
            return head;
        }
        let mut heads = self.heads.write();
        let head = Arc::clone(heads.entry(disk).or_insert_with(|| {
            let head = Head::new(disk, Buffer::default());
            head.record(self.recorded.lock().get(&disk).cloned().unwrap_or_default());
            head
        }));
        self.count.fetch_max(heads.len() as u64, Ordering::SeqCst);
        head
    }

    /// The highest number of disks that had a buffer at the same time.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// The disks that have a buffer, ascending by id.
    pub fn heads(&self) -> Vec<Arc<Head>> {
        let mut heads: Vec<_> = self.heads.read().values().cloned().collect();
        heads.sort_unstable_by_key(|head| head.id);
        heads
    }

    /// Removes deleted disks: requests of devices that have them open fail from then on.
    pub fn forget(&self, gone: &[Arc<Head>]) {
        let mut heads = self.heads.write();
        let mut recorded = self.recorded.lock();
        for head in gone {
            heads.remove(&head.id);
            // The record of a reverted disk says nothing about its new content.
            recorded.remove(&head.id);
        }
    }

    /// The record of the writes of a disk of that many blocks. A new one is made if there is none, or if the disk was
    /// smaller.
    pub fn record(&self, disk: u64, blocks: u64, purpose: Purpose) -> Arc<Written> {
        let heads = self.heads.write();
        let mut recorded = self.recorded.lock();
        let records = recorded.entry(disk).or_default();
        let known = records[purpose as usize].as_ref().filter(|written| written.is_for(blocks));
        if let Some(written) = known {
            return Arc::clone(written);
        }
        let written = Written::new(blocks);
        records[purpose as usize] = Some(Arc::clone(&written));
        if let Some(head) = heads.get(&disk) {
            head.record(records.clone());
        }
        written
    }

    /// Ends the records of the disks that are not `wanted` for their purpose.
    pub fn keep_records(&self, wanted: impl Fn(u64, Purpose) -> bool) {
        if self.recorded.lock().is_empty() {
            return;
        }
        let heads = self.heads.write();
        self.recorded.lock().retain(|disk, records| {
            let before = records.iter().flatten().count();
            for purpose in [Purpose::Sharing, Purpose::Packing] {
                if !wanted(*disk, purpose) {
                    records[purpose as usize] = None;
                }
            }
            let after = records.iter().flatten().count();
            if after < before
                && let Some(head) = heads.get(disk)
            {
                head.record(records.clone());
            }
            after > 0
        });
    }

    /// The record of the writes of a disk, if there is one.
    pub fn recorded(&self, disk: u64, purpose: Purpose) -> Option<Arc<Written>> {
        self.recorded.lock().get(&disk)?[purpose as usize].clone()
    }

    /// Number of blocks of data in all buffers.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::SeqCst)
    }

    /// Number of blocks of data that all buffers may hold.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Called by a flush that has written back more than was buffered when it began, because writers fill the buffers
    /// as fast as write-back empties them. Until the result is dropped, writers get little room.
    pub fn hold_writers(&self) -> Outrun<'_> {
        self.outrun.fetch_add(1, Ordering::SeqCst);
        Outrun(self)
    }

    /// Whether a flush is outrun by writers.
    pub fn is_outrun(&self) -> bool {
        self.outrun.load(Ordering::SeqCst) > 0
    }

    /// Waits until no flush is outrun, or until a timeout.
    pub fn wait_outrun(&self, time: Duration) {
        let mut queue = self.queue.lock();
        if self.is_outrun() {
            self.room_ready.wait_for(&mut queue, time);
        }
    }

    /// Number of blocks of data that all buffers may hold now.
    fn limit_now(&self) -> u64 {
        if self.is_outrun() { self.limit.min(self.few) } else { self.limit }
    }

    /// The most blocks of data that a write puts into a buffer at once. Several such parts have room at the same time,
    /// also while a flush is outrun, so that a part does not wait until nothing is buffered.
    pub fn part_max(&self) -> u64 {
        (self.limit.min(self.few) / 4).max(PART_MIN)
    }

    /// Enqueues a writer that waits for room.
    pub fn enqueue(&self, blocks: u64) -> Waiter<'_> {
        let mut queue = self.queue.lock();
        let number = queue.next;
        queue.next += 1;
        queue.waiting.push_back((number, blocks));
        if queue.waiting.len() == 1 {
            self.kept.store(blocks, Ordering::SeqCst);
        }
        Waiter { buffers: self, number, blocks }
    }

    /// Whether there is room for more blocks beside `before` ones. An entry larger than the limit is accepted when the
    /// buffers are empty.
    fn has_room(&self, before: u64, blocks: u64, is_first: bool) -> bool {
        let kept = if is_first { 0 } else { self.kept.load(Ordering::SeqCst) };
        before + blocks + kept <= self.limit_now() || before + kept == 0
    }

    /// Reserves buffer space for blocks of data. Returns how many blocks were reserved before, or `None` if there is
    /// not enough space.
    pub fn try_take(&self, blocks: u64) -> Option<u64> {
        self.take(blocks, false)
    }

    fn take(&self, blocks: u64, is_first: bool) -> Option<u64> {
        let before = self.blocks.fetch_add(blocks, Ordering::SeqCst);
        if self.has_room(before, blocks, is_first) {
            return Some(before);
        }
        self.blocks.fetch_sub(blocks, Ordering::AcqRel);
        None
    }

    /// Releases buffer space.
    pub fn give_back(&self, blocks: u64) {
        let before = self.blocks.fetch_sub(blocks, Ordering::SeqCst);
        let limit = self.limit_now().saturating_sub(self.kept.load(Ordering::SeqCst));
        if before >= limit || before.saturating_sub(blocks) < limit && before + WAKE_BLOCKS >= limit {
            let _guard = self.queue.lock();
            self.room_ready.notify_all();
        }
    }

    /// Notes that snapshots are being taken. Called under the locks of the buffers of their disks.
    pub fn note_snapshots(&self) {
        self.snapshots.fetch_add(1, Ordering::AcqRel);
    }

    /// How often snapshots were taken.
    pub fn snapshots(&self) -> u64 {
        self.snapshots.load(Ordering::Acquire)
    }

    /// Counts a snapshot whose last writes are still buffered.
    pub fn note_unsealed(&self) {
        self.unsealed.fetch_add(1, Ordering::AcqRel);
    }

    /// Called when the last writes of a snapshot are in the map.
    pub fn note_sealed(&self) {
        self.unsealed.fetch_sub(1, Ordering::AcqRel);
        let _guard = self.sealed.lock();
        self.sealed_ready.notify_all();
    }

    /// Number of snapshots whose last writes are still buffered.
    pub fn sealing(&self) -> u64 {
        self.unsealed.load(Ordering::Acquire)
    }

    /// Whether a snapshot has writes that are still buffered.
    pub fn is_sealing(&self) -> bool {
        self.sealing() > 0
    }

    /// Waits until a snapshot is sealed, or until a timeout.
    pub fn wait_sealed(&self, time: Duration) {
        let mut sealed = self.sealed.lock();
        self.sealed_ready.wait_for(&mut sealed, time);
    }

    /// Wakes all waiting threads, so that they check their conditions again.
    pub fn wake(&self) {
        self.room_ready.notify_all();
        self.sealed_ready.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_that_becomes_free_is_kept_for_the_writer_that_waits_longest() {
        let buffers = Buffers::new(256, 64);
        assert!((0..256).all(|_| buffers.try_take(1).is_some()));
        let (first, second, third) = (buffers.enqueue(64), buffers.enqueue(1), buffers.enqueue(64));
        for _ in 0..64 {
            assert!(!first.try_take() && !second.try_take() && !third.try_take());
            buffers.give_back(1);
            assert!(buffers.try_take(1).is_none());
        }
        assert!(!second.try_take() && !third.try_take() && first.try_take());
        drop(first);
        buffers.give_back(1);
        assert!(buffers.try_take(1).is_none() && !third.try_take() && second.try_take());
        drop(second);
        buffers.give_back(64);
        assert!(buffers.try_take(1).is_none() && third.try_take());
        drop(third);
        buffers.give_back(1);
        assert!(buffers.try_take(1).is_some());
    }

    #[test]
    fn a_writer_that_gives_up_keeps_no_room() {
        let buffers = Buffers::new(256, 64);
        assert!(buffers.try_take(200).is_some());
        let (first, second) = (buffers.enqueue(64), buffers.enqueue(2));
        assert!(buffers.try_take(1).is_none());
        drop(first);
        assert!(buffers.try_take(1).is_some() && second.try_take());
        drop(second);
        assert!(buffers.try_take(53).is_some());
    }

    #[test]
    fn an_entry_larger_than_the_limit_goes_into_empty_buffers() {
        let buffers = Buffers::new(32, 16);
        assert!(buffers.try_take(1).is_some());
        let first = buffers.enqueue(buffers.part_max());
        assert!(!first.try_take());
        buffers.give_back(1);
        assert!(buffers.try_take(1).is_none() && first.try_take());
    }
}
