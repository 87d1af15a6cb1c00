//! The write buffers of all disks, and the limit on their total content.
//!
//! Lock order: the buffers of disks, ascending by id; `room` and `sealed`, to wait. `heads`, to look up a disk, and
//! then `recorded` and the `written` of a disk, may be taken under all other locks, because they are held for a few
//! instructions. This part takes no lock of another part. The engine takes the metadata lock while it holds the buffer
//! of a disk.

use super::read::gone;
use super::read_cache::Lookups;
use super::written::Written;
use crate::Result;
use crate::buffer::{DirtyPiece, Layers};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, RwLock};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Freed blocks (512 KiB) for which the threads that wait for room are woken.
const WAKE_BLOCKS: u64 = 128;

/// The writable state of an open disk.
pub struct Head {
    /// Object id of the disk.
    pub id: u64,
    buffer: Mutex<Buffer>,
    /// Whether the height of the disk's tree is known.
    measured: AtomicBool,
    /// Reads of the disk that the read cache could answer.
    pub(super) lookups: Lookups,
    /// Whether writes are recorded in `written`: most disks have no such record, and writes to them only test this.
    is_recorded: AtomicBool,
    written: RwLock<Option<Arc<Written>>>,
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
        let (lookups, is_recorded) = (Lookups::default(), AtomicBool::new(false));
        Arc::new(Self { id, buffer: Mutex::new(buffer), measured, lookups, is_recorded, written: RwLock::new(None) })
    }

    /// Begins or ends to record writes.
    fn record(&self, written: Option<Arc<Written>>) {
        let is_recorded = written.is_some();
        *self.written.write() = written;
        self.is_recorded.store(is_recorded, Ordering::Release);
    }

    /// Called when a write of these blocks has ended, with or without an error.
    pub(super) fn note_written(&self, blocks: Range<u64>) {
        if self.is_recorded.load(Ordering::Acquire)
            && let Some(written) = &*self.written.read()
        {
            written.note(&blocks);
        }
    }

    /// Locks the buffer.
    pub(super) fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock()
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
    recorded: Mutex<FxHashMap<u64, Arc<Written>>>,
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
    room: Mutex<()>,
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
        let _guard = self.0.room.lock();
        self.0.room_ready.notify_all();
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
            room: Mutex::default(),
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
            head.record(self.recorded.lock().get(&disk).cloned());
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
    pub fn record(&self, disk: u64, blocks: u64) -> Arc<Written> {
        let heads = self.heads.write();
        let mut recorded = self.recorded.lock();
        let known = recorded.get(&disk).filter(|written| written.is_for(blocks)).cloned();
        if let Some(written) = known {
            return written;
        }
        let written = Written::new(blocks);
        recorded.insert(disk, Arc::clone(&written));
        if let Some(head) = heads.get(&disk) {
            head.record(Some(Arc::clone(&written)));
        }
        written
    }

    /// Ends the records of the disks that are not `wanted`.
    pub fn keep_records(&self, wanted: impl Fn(u64) -> bool) {
        if self.recorded.lock().is_empty() {
            return;
        }
        let heads = self.heads.write();
        self.recorded.lock().retain(|disk, _| {
            let kept = wanted(*disk);
            if !kept && let Some(head) = heads.get(disk) {
                head.record(None);
            }
            kept
        });
    }

    /// The record of the writes of a disk, if there is one.
    pub fn recorded(&self, disk: u64) -> Option<Arc<Written>> {
        self.recorded.lock().get(&disk).cloned()
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
        let mut room = self.room.lock();
        if self.is_outrun() {
            self.room_ready.wait_for(&mut room, time);
        }
    }

    /// Number of blocks of data that all buffers may hold now.
    fn limit_now(&self) -> u64 {
        if self.is_outrun() { self.limit.min(self.few) } else { self.limit }
    }

    /// Reserves buffer space for blocks of data. Returns how many blocks were reserved before, or `None` if there is
    /// not enough space. A single write larger than the limit is accepted when the buffers are empty.
    pub fn try_take(&self, blocks: u64) -> Option<u64> {
        let before = self.blocks.fetch_add(blocks, Ordering::SeqCst);
        if before + blocks <= self.limit_now() || before == 0 {
            return Some(before);
        }
        self.blocks.fetch_sub(blocks, Ordering::AcqRel);
        None
    }

    /// Releases buffer space.
    pub fn give_back(&self, blocks: u64) {
        let before = self.blocks.fetch_sub(blocks, Ordering::SeqCst);
        let limit = self.limit_now();
        if before >= limit || before.saturating_sub(blocks) < limit && before + WAKE_BLOCKS >= limit {
            let _guard = self.room.lock();
            self.room_ready.notify_all();
        }
    }

    /// Waits until buffer space may be available, or until a timeout.
    pub fn wait_for_room(&self, blocks: u64, time: Duration) {
        let mut room = self.room.lock();
        if self.blocks() + blocks > self.limit_now() {
            self.room_ready.wait_for(&mut room, time);
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
