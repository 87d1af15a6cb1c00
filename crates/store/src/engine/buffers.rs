//! The write buffers of all disks, and the bound on what they hold together.
//!
//! Locks, in this order: `heads`, for a look at the list; the buffer of a disk (several: ascending by id); `room` and
//! `sealed`, for a wait. The part takes no lock of another part; the metadata lock is taken under the buffer of a disk.

use super::read::gone;
use crate::Result;
use crate::buffer::{DirtyPiece, Layers};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, RwLock};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Freed blocks that are worth waking the threads that wait for room (512 KiB).
const WAKE_BLOCKS: u64 = 128;

/// The writable state of an open disk.
pub struct Head {
    /// Object id of the disk.
    pub id: u64,
    buffer: Mutex<Buffer>,
    /// The height of its tree is among those that are known.
    measured: AtomicBool,
}

/// The buffer of a disk.
#[derive(Default)]
pub struct Buffer {
    pub layers: Layers,
    /// Set when the disk was deleted or reverted under it.
    pub gone: bool,
    /// Where write-back goes on: an elevator over logical addresses.
    pub cursor: u64,
    /// Ranges being written past the buffer.
    through: Vec<Range<u64>>,
}

impl Buffer {
    /// True while a range is being written past the buffer: reads and writes of it wait.
    fn is_passing(&self, range: &Range<u64>) -> bool {
        self.through.iter().any(|other| other.start < range.end && range.start < other.end)
    }

    /// Begins writing a range past the buffer; false when something of it, or of a closed layer, is buffered.
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

    /// Ends writing a range past the buffer.
    pub fn leave_through(&mut self, range: &Range<u64>) {
        if let Some(at) = self.through.iter().position(|other| other == range) {
            self.through.swap_remove(at);
        }
    }

    /// What the oldest layer holds, from where write-back goes on, up to `most` blocks.
    pub fn oldest_pieces(&mut self, most: u64) -> Vec<DirtyPiece> {
        let cursor = self.cursor;
        let (layer, _) = self.layers.oldest();
        let pieces = layer.take(cursor, most);
        if pieces.is_empty() { layer.take(0, most) } else { pieces }
    }
}

impl Head {
    fn new(id: u64, buffer: Buffer) -> Arc<Self> {
        Arc::new(Self { id, buffer: Mutex::new(buffer), measured: AtomicBool::new(false) })
    }

    /// Locks the buffer.
    pub(super) fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock()
    }

    /// Whether the height of its tree is known.
    pub(super) fn is_measured(&self) -> bool {
        self.measured.load(Ordering::Acquire)
    }

    /// The height of its tree is known.
    pub(super) fn set_measured(&self) {
        self.measured.store(true, Ordering::Release);
    }

    /// Locks the buffer once nothing in `range` is being written past it.
    pub(super) fn lock_settled(&self, range: &Range<u64>) -> MutexGuard<'_, Buffer> {
        let mut tries = 0u32;
        loop {
            let buffer = self.buffer.lock();
            if !buffer.is_passing(range) {
                return buffer;
            }
            drop(buffer);
            // It takes as long as a copy of a few hundred kilobytes.
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
    /// Most disks that were among them.
    count: AtomicU64,
    /// Bound of the data in all buffers, in blocks.
    limit: u64,
    /// Blocks of data in all buffers.
    blocks: AtomicU64,
    room: Mutex<()>,
    room_ready: Condvar,
    /// How often snapshots were taken.
    snapshots: AtomicU64,
    /// Snapshots that wait for buffered writes.
    unsealed: AtomicU64,
    sealed: Mutex<()>,
    sealed_ready: Condvar,
}

impl Buffers {
    /// Empty buffers with a bound in blocks.
    pub fn new(limit: u64) -> Self {
        Self {
            heads: RwLock::default(),
            count: AtomicU64::new(0),
            limit,
            blocks: AtomicU64::new(0),
            room: Mutex::default(),
            room_ready: Condvar::default(),
            snapshots: AtomicU64::new(0),
            unsealed: AtomicU64::new(0),
            sealed: Mutex::default(),
            sealed_ready: Condvar::default(),
        }
    }

    /// The writable state of a disk that has one.
    pub fn find(&self, disk: u64) -> Option<Arc<Head>> {
        self.heads.read().get(&disk).cloned()
    }

    /// The state of a disk that there is not: reads and writes of it are refused.
    pub fn gone(disk: u64) -> Arc<Head> {
        Head::new(disk, Buffer { gone: true, ..Buffer::default() })
    }

    /// The writable state of a disk.
    pub fn head(&self, disk: u64) -> Arc<Head> {
        if let Some(head) = self.find(disk) {
            return head;
        }
        let mut heads = self.heads.write();
        let head = Arc::clone(heads.entry(disk).or_insert_with(|| Head::new(disk, Buffer::default())));
        self.count.fetch_max(heads.len() as u64, Ordering::SeqCst);
        head
    }

    /// Disks that have one, or had one at the same time.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// The disks that have one, in the order of their numbers.
    pub fn heads(&self) -> Vec<Arc<Head>> {
        let mut heads: Vec<_> = self.heads.read().values().cloned().collect();
        heads.sort_unstable_by_key(|head| head.id);
        heads
    }

    /// Forgets disks that are gone: devices that have them open fail from then on.
    pub fn forget(&self, gone: &[Arc<Head>]) {
        let mut heads = self.heads.write();
        gone.iter().for_each(|head| drop(heads.remove(&head.id)));
    }

    /// Blocks of data in all buffers.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::SeqCst)
    }

    /// Blocks of data that all buffers may hold.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes room for data; how much was held before, or `None` when there is not enough. A single write larger than
    /// the bound has an empty buffer for itself.
    pub fn try_take(&self, blocks: u64) -> Option<u64> {
        let before = self.blocks.fetch_add(blocks, Ordering::SeqCst);
        if before + blocks <= self.limit || before == 0 {
            return Some(before);
        }
        self.blocks.fetch_sub(blocks, Ordering::AcqRel);
        None
    }

    /// Gives room for data back.
    pub fn give_back(&self, blocks: u64) {
        let before = self.blocks.fetch_sub(blocks, Ordering::SeqCst);
        let limit = self.limit;
        if before >= limit || before.saturating_sub(blocks) < limit && before + WAKE_BLOCKS >= limit {
            let _guard = self.room.lock();
            self.room_ready.notify_all();
        }
    }

    /// Waits until there may be room for data, or for some time.
    pub fn wait_for_room(&self, blocks: u64, time: Duration) {
        let mut room = self.room.lock();
        if self.blocks() + blocks > self.limit {
            self.room_ready.wait_for(&mut room, time);
        }
    }

    /// Snapshots are being taken. Under the locks of the buffers of their disks.
    pub fn note_snapshots(&self) {
        self.snapshots.fetch_add(1, Ordering::AcqRel);
    }

    /// How often snapshots were taken.
    pub fn snapshots(&self) -> u64 {
        self.snapshots.load(Ordering::Acquire)
    }

    /// A snapshot waits for buffered writes.
    pub fn note_unsealed(&self) {
        self.unsealed.fetch_add(1, Ordering::AcqRel);
    }

    /// The buffered writes of a snapshot have reached the map.
    pub fn note_sealed(&self) {
        self.unsealed.fetch_sub(1, Ordering::AcqRel);
        let _guard = self.sealed.lock();
        self.sealed_ready.notify_all();
    }

    /// Snapshots that wait for buffered writes.
    pub fn sealing(&self) -> u64 {
        self.unsealed.load(Ordering::Acquire)
    }

    /// Whether a snapshot waits for buffered writes.
    pub fn is_sealing(&self) -> bool {
        self.sealing() > 0
    }

    /// Waits until a snapshot is sealed, or for some time.
    pub fn wait_sealed(&self, time: Duration) {
        let mut sealed = self.sealed.lock();
        self.sealed_ready.wait_for(&mut sealed, time);
    }

    /// Wakes all waiting threads, to look again.
    pub fn wake(&self) {
        self.room_ready.notify_all();
        self.sealed_ready.notify_all();
    }
}
