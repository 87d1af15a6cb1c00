//! The engine: what ties buffer, map, space, journal and pages together.
//!
//! # The way of a write
//!
//! A write is put into the [`crate::buffer`] of its disk and acknowledged. From there it goes one of two ways:
//!
//! * **Write-back** ([`writeback`]): blocks that belong to the head alone are overwritten in place, after the journal
//!   has durably announced which (so that recovery knows whose checksum it must not trust); all others get new places
//!   next to each other. Then the map changes in memory and the change waits in the pending list.
//! * **Flush** ([`commit`]): what little is still buffered goes into the journal with its payload, behind all pending
//!   changes, in one durable append that every waiting flush shares. The payload goes home later.
//!
//! A pending change is appended to the journal only after the data it points at is durable, so that replay never maps
//! a block to something that was not written there.
//!
//! # What must hold
//!
//! 1. All changes of metadata go through [`apply`], at run time and in replay, in the order of the journal. Its effect
//!    depends on nothing but the operation and the metadata. (Announcements of overwrites and new unsealed snapshots
//!    may be appended ahead of pending changes: they commute with them, see [`commit`].)
//! 2. A checkpoint captures the pages at one moment, with nothing being overwritten, and ends only when all that they
//!    describe is durable at home: data written back, payload of the journal, and the pending changes in their order.
//! 3. A freed block is given out again only when the operation that freed it is durable and no read that was planned
//!    before is under way.
//! 4. Whatever changes metadata was admitted before ([`admission`]): the journal has room for what it appends and the
//!    next checkpoint for what it dirties. Nothing waits for that under a lock that a checkpoint takes.
//! 5. After a failed write or flush of the medium nothing is written any more until the datastore is opened again.
//!
//! # Locks
//!
//! In this order: `checking` (one check at a time), `control` (one change of the catalog at a time), `punching`,
//! `checkpoint`, `gate` (no write-back under way), `commit` (the journal), `through` (no write past the buffer under
//! way), `extending` (space from the file system), `Head::buffer` (ascending by id), `meta`, `permits`. Data I/O
//! happens under `gate` or `through` at most, journal I/O under `commit`. `copying` is held over one write, beside
//! none.
//!
//! Metadata pages are read without `meta`, and before `commit` and `Head::buffer` are taken: look-ups let go of their
//! locks and look again, changes are prepared ([`fetch`]). Only what a change misses although it was prepared, and all
//! that recovery and a repair read, is read under `meta`.

mod admission;
mod admit;
mod apply;
mod bulk;
mod check;
mod checkpoint;
mod claim;
mod commit;
mod control;
mod doubt;
mod extend;
mod fetch;
mod files;
mod heads;
mod images;
mod inspect;
mod maintain;
mod others;
mod owner;
mod payload;
mod placement;
mod read;
mod recover;
mod replay;
mod room;
mod superblock;
mod survey;
mod through;
mod verify;
mod view;
mod write;
mod writeback;

pub use bulk::BulkWriter;
pub use check::{CheckOptions, Finding, Report};
pub use control::{Arrival, Likeness, NewDisk, NewSnapshot};
pub use files::JOURNAL_FILE;
pub use images::IMAGES_FILE;
pub use inspect::{BlockCounts, Changed, Condition, Span, StoreCounts};
pub use owner::Owner;
pub use read::{Media, Planned, Segment, Verdict};
pub use recover::{InitParameters, JOURNAL_SIZE_DEFAULT, JOURNAL_SIZE_MAX, JOURNAL_SIZE_MIN};
pub use superblock::FORMAT_VERSION;

use crate::buffer::Layers;
use crate::catalog::Catalog;
use crate::journal::{Journal, Operation, Place};
use crate::pages::{Kept, PageFile, Pages};
use crate::space::{Run, Space};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, RwLock};
use crate::{Error, ErrorKind, Result};
use apply::Effects;
use backend::{Directory, File, IoMode, SharedSlice};
use files::DataFiles;
use placement::{Holds, InFlight};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;
use superblock::Superblock;

/// How an engine behaves.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Page cache or O_DIRECT for data.
    pub mode: IoMode,
    /// Bound of the metadata cache in bytes.
    pub metadata_cache: usize,
    /// Bound of the write buffer in bytes.
    pub write_buffer: usize,
    /// Longest time that an acknowledged write stays undurable while nobody flushes.
    pub commit_interval: Duration,
    /// Let large writes go past the buffer (buffered mode only).
    pub write_through: bool,
    /// Run write-back and maintenance on threads of their own. Without, the caller drives them with [`Engine::pump`]
    /// (simulations: everything happens on one thread, in an order that the seed decides).
    pub threads: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            mode: IoMode::Buffered,
            metadata_cache: 128 << 20,
            write_buffer: 64 << 20,
            commit_interval: Duration::from_secs(10),
            write_through: true,
            threads: true,
        }
    }
}

/// A change that is in memory and not in the journal yet.
struct Pending {
    operation: Operation,
    /// The data it points at is durable once [`Engine::synced`] has reached this.
    gate: u64,
    /// Its number among the operations that became pending.
    number: u64,
    /// Blocks that it freed.
    freed: Vec<Run>,
    /// Blocks that must not be overwritten in place before it is durable.
    held: Vec<Run>,
    /// It takes effect together with the next one or not at all: both go into one batch.
    joined: bool,
}

/// Everything behind the metadata lock.
struct Meta {
    pages: Pages,
    map: Space,
    data: Space,
    catalog: Catalog,
    /// Payload in the journal that is not home yet, by physical block.
    logged: BTreeMap<u64, SharedSlice>,
    /// Blocks being overwritten in place, by write-back, by a write past the buffer or by payload on its way home.
    in_flight: InFlight,
    /// Blocks and nodes that pending operations concern.
    holds: Holds,
    pending: VecDeque<Pending>,
    pending_bytes: usize,
    /// Bytes of what was pending and is being appended.
    appending_bytes: usize,
    /// How many of the pending changes are [`Operation::Checksums`].
    pending_checksums: usize,
    /// Pending changes that the checkpoint under way has captured already.
    captured: Option<usize>,
    /// The catalog as the next checkpoint captures it, for a check that asked for it.
    viewed: Option<Catalog>,
    /// Held by reads that may name blocks mapped now; replaced at each commit.
    epoch: Arc<()>,
    /// Blocks whose freeing is durable, waiting for the reads of their epoch.
    limbo: VecDeque<(Arc<()>, Vec<Run>)>,
    /// Blocks of data in `limbo` and `pending`.
    held: u64,
    /// Of these, blocks whose freeing is not durable yet.
    freeing: u64,
}

/// The writable state of an open disk.
pub struct Head {
    /// Object id of the disk.
    pub id: u64,
    buffer: Mutex<Buffer>,
}

#[derive(Default)]
struct Buffer {
    layers: Layers,
    /// Set when the disk was deleted or reverted under it.
    gone: bool,
    /// Where write-back goes on: an elevator over logical addresses.
    cursor: u64,
    /// Ranges being written past the buffer.
    through: Vec<Range<u64>>,
}

impl Buffer {
    /// True while a range is being written past the buffer: whoever wants it waits.
    fn is_passing(&self, range: &Range<u64>) -> bool {
        self.through.iter().any(|other| other.start < range.end && range.start < other.end)
    }

    /// Begins writing a range past the buffer; false when something of it, or of a closed layer, is buffered.
    fn enter_through(&mut self, range: &Range<u64>) -> Result<bool> {
        if self.gone {
            return Err(read::gone());
        }
        if self.is_passing(range) || !self.layers.is_free(range) {
            return Ok(false);
        }
        self.layers.invalidate_partial(range);
        self.through.push(range.clone());
        Ok(true)
    }

    fn leave_through(&mut self, range: &Range<u64>) {
        if let Some(at) = self.through.iter().position(|other| other == range) {
            self.through.swap_remove(at);
        }
    }
}

impl Head {
    /// Locks the buffer once nothing in `range` is being written past it.
    fn lock_settled(&self, range: &Range<u64>) -> crate::sync::MutexGuard<'_, Buffer> {
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
                crate::sync::thread::yield_now()
            } else {
                crate::sync::thread::sleep(Duration::from_micros(20))
            }
        }
    }
}

struct Committer {
    journal: Journal,
    superblock: Superblock,
    /// Where the pending changes ended that the checkpoint under way has captured.
    ordered: Option<Place>,
    /// Batches of operations appended since opening.
    batches: u64,
}

/// Counters for people and tests.
#[derive(Default)]
pub struct Counters {
    /// Blocks that failed their checksum.
    pub checksum_errors: AtomicU64,
    /// Torn blocks accepted after a crash.
    pub torn_blocks: AtomicU64,
    /// Durable appends to the journal.
    pub journal_appends: AtomicU64,
    /// Flushes of the data files.
    pub data_syncs: AtomicU64,
    /// Checkpoints.
    pub checkpoints: AtomicU64,
    /// Blocks written home.
    pub blocks_written: AtomicU64,
}

/// An open native store. All methods may be called from any thread.
pub struct Engine {
    directory: Arc<dyn Directory>,
    options: EngineOptions,
    /// Gone when the datastore was dropped.
    owner: Option<Weak<Owner>>,
    uuid: [u8; 16],
    files: DataFiles,
    superblock_file: Arc<dyn File>,
    page_files: [Arc<dyn File>; PageFile::COUNT],
    /// Size of the journal ring in bytes.
    ring: u64,
    admission: admission::Admission,
    images: images::Images,
    /// One growth of the images file at a time.
    images_growing: Mutex<()>,
    /// Bytes reserved in each metadata file.
    metadata_reserved: [AtomicU64; PageFile::COUNT],
    /// One check at a time.
    checking: Mutex<()>,
    /// What a check still needs of pages that checkpoints write over.
    kept: Arc<Kept>,
    control: Mutex<()>,
    gate: Mutex<writeback::Lane>,
    logged_lane: Mutex<payload::LoggedLane>,
    commit: Mutex<Committer>,
    sync: Mutex<()>,
    /// One reservation of space from the file system at a time.
    extending: Mutex<()>,
    /// Shared by writes past the buffer; exclusive where none may be under way.
    through: RwLock<()>,
    permits: Mutex<through::Permits>,
    /// One [`BulkWriter`] at a time copies into the page cache.
    copying: Mutex<()>,
    checkpoint: Mutex<()>,
    /// Held from the moment that space is no longer called backed until its hole is punched; runs whose punch failed.
    punching: Mutex<Vec<Run>>,
    meta: Mutex<Meta>,
    heads: RwLock<FxHashMap<u64, Arc<Head>>>,
    /// Writes acknowledged; flush tickets are points of this clock.
    clock: AtomicU64,
    /// Writes up to here are durable.
    durable: AtomicU64,
    /// Home writes finished that a flush has to make durable.
    written: AtomicU64,
    /// Home writes up to here are durable.
    synced: AtomicU64,
    /// Journal position of announced overwrites still under way.
    announced: AtomicU64,
    /// Journal head, for readers without the commit lock.
    journal_head: AtomicU64,
    journal_tail: AtomicU64,
    /// Overwrites announced before this journal position are durable.
    settled: AtomicU64,
    /// Blocks of data in all buffers.
    buffered: AtomicU64,
    /// Blocks for which buffered writes may need new places.
    claims: AtomicU64,
    /// Free blocks that writes may count on.
    headroom: AtomicU64,
    /// The disk that write-back served last, for who has no lane.
    written_back: AtomicU64,
    /// Flushes waiting for the gate: write-back steps aside.
    flushes_waiting: AtomicU64,
    stopped: AtomicBool,
    stop_reason: Mutex<Option<String>>,
    closing: AtomicBool,
    work: Mutex<Work>,
    work_ready: Condvar,
    room: Mutex<()>,
    room_ready: Condvar,
    /// Snapshots that wait for buffered writes.
    unsealed: AtomicU64,
    sealed: Mutex<()>,
    sealed_ready: Condvar,
    threads: Mutex<Vec<crate::sync::thread::JoinHandle<()>>>,
    /// Counters.
    pub counters: Counters,
}

/// What the background threads are asked for.
#[derive(Default)]
struct Work {
    write_back: bool,
    commit: bool,
    checkpoint: bool,
    reclaim: bool,
    extend: bool,
}

impl Engine {
    /// Identity of the datastore.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// The directory it lives in.
    pub fn directory(&self) -> &Arc<dyn Directory> {
        &self.directory
    }

    /// Its options.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    fn check_running(&self) -> Result<()> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(self.stop_error());
        }
        Ok(())
    }

    #[cold]
    fn stop_error(&self) -> Error {
        let reason = self.stop_reason.lock().clone().unwrap_or_default();
        Error::new(
            ErrorKind::Stopped,
            format!("the datastore takes no writes since a failure ({reason}); mend the cause and open it again"),
        )
    }

    /// Stops all writes: from here on nobody knows what the medium holds.
    #[cold]
    fn stop(&self, error: Error) -> Error {
        if !self.stopped.swap(true, Ordering::AcqRel) {
            tracing::error!(%error, "the datastore stops taking writes");
            *self.stop_reason.lock() = Some(error.to_string());
        }
        self.room_ready.notify_all();
        self.sealed_ready.notify_all();
        self.work_ready.notify_all();
        error
    }

    /// The writable state of a disk.
    pub fn head(&self, disk: u64) -> Arc<Head> {
        if let Some(head) = self.heads.read().get(&disk) {
            return Arc::clone(head);
        }
        let mut heads = self.heads.write();
        Arc::clone(heads.entry(disk).or_insert_with(|| Arc::new(Head { id: disk, buffer: Mutex::default() })))
    }

    fn existing_heads(&self) -> Vec<Arc<Head>> {
        let mut heads: Vec<_> = self.heads.read().values().cloned().collect();
        heads.sort_unstable_by_key(|head| head.id);
        heads
    }

    /// Tells writers how much they may count on. Called whenever free space changed, before claims are given back.
    fn update_headroom(&self, meta: &Meta) {
        let free = meta.data.counts().free;
        self.headroom.store(free.saturating_sub(meta.catalog.reserved()), Ordering::SeqCst);
    }

    fn request(&self, ask: impl FnOnce(&mut Work)) {
        if self.options.threads {
            ask(&mut self.work.lock());
            self.work_ready.notify_all();
        }
    }
}

impl Meta {
    /// Applies an operation and queues it for the journal.
    fn enqueue(&mut self, operation: Operation, gate: u64) -> Result<()> {
        let mut effects = Effects::default();
        self.apply(&operation, &mut effects)?;
        let Effects { freed, unshared: mut held, unshared_nodes, changed_nodes } = effects;
        held.extend(operation.names());
        for run in &held {
            self.data.annotate(&mut self.pages, *run, |block, entry| {
                self.holds.hold_block(block, entry.held);
                entry.held = true;
            })?;
        }
        self.holds.spread(&changed_nodes);
        unshared_nodes.into_iter().for_each(|node| self.holds.hold_node(node));
        self.push(operation, gate, freed, held);
        Ok(())
    }

    /// Ends the holds of an operation that is durable.
    fn release_holds(&mut self, pending: &Pending) -> Result<()> {
        for run in &pending.held {
            self.data.annotate(&mut self.pages, *run, |block, entry| {
                if self.holds.release_block(block, pending.number) {
                    entry.held = false;
                }
            })?;
        }
        self.holds.committed(pending.number);
        Ok(())
    }

    fn push(&mut self, operation: Operation, gate: u64, freed: Vec<Run>, held: Vec<Run>) {
        let size = operation.size();
        self.pending_bytes += size;
        self.pending_checksums += usize::from(matches!(operation, Operation::Checksums { .. }));
        self.freeing += freed.iter().map(|run| run.blocks).sum::<u64>();
        self.held += freed.iter().map(|run| run.blocks).sum::<u64>();
        let number = self.holds.pushed();
        self.pending.push_back(Pending { operation, gate, number, freed, held, joined: false });
    }

    /// Takes the operation queued first, to be appended.
    fn pop(&mut self) -> Option<Pending> {
        let next = self.pending.pop_front()?;
        let size = next.operation.size();
        self.pending_bytes -= size;
        self.appending_bytes += size;
        self.pending_checksums -= usize::from(matches!(next.operation, Operation::Checksums { .. }));
        Some(next)
    }

    /// Takes everything that is queued, never to be appended.
    fn take_pending(&mut self) -> Vec<Pending> {
        let taken = std::iter::from_fn(|| self.pop()).collect();
        self.appending_bytes = 0;
        taken
    }

    /// The operation queued last takes effect with the next one or not at all.
    fn join_last(&mut self) {
        if let Some(last) = self.pending.back_mut() {
            last.joined = true;
        }
    }

    /// Makes blocks allocatable whose freeing is durable and which no read names any more.
    fn release_limbo(&mut self) -> bool {
        let mut any = false;
        while self.limbo.front().is_some_and(|(epoch, _)| Arc::strong_count(epoch) == 1) {
            let Some((_, runs)) = self.limbo.pop_front() else { break };
            for run in runs {
                self.held -= run.blocks;
                self.data.release(run);
                any = true;
            }
        }
        any
    }
}

#[cfg(test)]
mod tests;
