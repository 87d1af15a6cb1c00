//! The engine: connects buffer, map, space, journal and pages.
//!
//! # The path of a write
//!
//! A write is put into the [`crate::buffer`] of its disk and acknowledged. From there its data takes one of two paths:
//!
//! * **Write-back** (`writeback`): blocks that only the head maps are overwritten in place, after the journal has
//!   durably announced them (so that recovery does not rely on their checksums). All other data goes to newly
//!   allocated, adjacent blocks. Then the map changes in memory, and the change joins the pending changes.
//! * **Flush** (`flush`): if little is still buffered, it is appended to the journal with its payload, after all
//!   pending changes, in one durable append that all waiting flushes share. The payload is written to the data files
//!   later.
//!
//! A pending change is appended to the journal only after the data that it refers to is durable, so that replay never
//! maps a block with data that was not written.
//!
//! # What must hold
//!
//! 1. All changes of metadata are made by `metadata/apply.rs`, at run time and in replay, in the order of the journal.
//!    The effect of an operation depends only on the operation and the metadata. (Announcements of overwrites and new
//!    unsealed snapshots may be appended ahead of pending changes, because they commute with these: see `flush`.)
//! 2. A checkpoint captures the pages at one moment at which no block is being overwritten in place. It ends only when
//!    everything that the pages describe is durable: buffered data that they map, journalled payload in the data files,
//!    and the pending changes in the journal.
//! 3. A freed block is allocated again only when the operation that freed it is durable and all reads that were planned
//!    before have ended.
//! 4. Every change of metadata is admitted first (`log`): the journal has room for what the change appends, and the
//!    next checkpoint for the pages that it dirties. No thread waits for that room under a lock that a checkpoint
//!    takes.
//! 5. After a failed write or flush of the medium, or the loss of the ownership (`owner`), nothing is written until the
//!    datastore is opened again.
//!
//! # Parts and flows
//!
//! The engine consists of parts. Each owns its state and acquires no lock of another part. Other code cannot access the
//! fields of a part, except those of `Meta`, which the metadata lock protects, and counters:
//!
//! | part | owns |
//! |---|---|
//! | `metadata` | pages, tables, trees, the catalog; pending changes, with the blocks they hold or freed |
//! | `log` | the journal, the superblock, the images file, the counters of durable writes, and admission |
//! | `placement` | whether a block may be overwritten in place: a pure state machine, without I/O, threads or locks |
//! | `buffers` | the write buffers of all disks, and when their parts were written (`written`) |
//! | `writeback` | the writing of data files: the gate, journalled payload, writes that bypass the buffer |
//! | `read_cache` | verified content of data blocks, by place |
//! | `reserve` | free blocks reserved for operations under way, and the space taken from the file system for them |
//! | `running` | whether the store runs; its threads |
//!
//! An action that needs several parts is a flow: a method of [`Engine`] in a file named after the flow, or in the
//! folder of the part that the flow serves.
//!
//! # Locks
//!
//! The locks are acquired in this order: `checking` (one check at a time), `packing` (one step of packing or of sharing
//! at a time), `bulk` (no bulk writer has blocks that are not in the map), `counting` (one count of space at a time),
//! `control` (one change of the catalog at a time), reducing (one batch of a disk that is compared or compressed at a
//! time), punching, checkpoints, the gate (no write-back under way), the journal, the flush of the data files,
//! `through` (no write that bypasses the buffer under way), extending (reservations in the file system), the buffers of
//! disks (ascending by id), the metadata, permits, hints (`writeback/equal.rs`) and shards of the read cache. Data is
//! read and written under no lock except `bulk`, reducing, the gate and `through`. The journal is written under its own
//! lock.
//!
//! Metadata pages are read before the journal, the buffers and the metadata are locked. A lookup that misses pages
//! releases its locks, reads the pages and starts again. The pages of a change are read in advance
//! (`Metadata::bring_in`). If the lookups with which write-back, a flush or a discard begins miss pages afterwards, it
//! releases its locks, reads the pages and decides everything again. Two kinds of pages are read under the metadata
//! lock: those that other changes miss, and those that recovery and a repair need.

mod accounting;
mod admit;
mod affected;
mod buffers;
mod bulk;
mod check;
mod checkpoint;
mod control;
mod create;
mod files;
mod flush;
mod heads;
mod inspect;
mod isolate;
mod left_out;
mod locked_buffers;
mod log;
mod maintain;
mod metadata;
mod owner;
mod packing;
mod placement;
mod punch;
mod read;
mod read_again;
mod read_cache;
mod rebuild;
mod recover;
mod renewed;
mod replay;
mod reserve;
mod running;
mod salvage;
mod scrub;
mod sharing;
mod verify;
mod write;
mod writeback;
mod written;

pub use accounting::{Accounts, NODES_PER_QUESTION, ObjectSpace, PackFill, SetSpace, WouldFree};
pub use affected::Affected;
pub use buffers::Head;
pub use bulk::BulkWriter;
pub use check::{CheckOptions, Finding, Report};
pub use control::{DiskIdentity, NewDisk, NewSnapshot, ReceiveCommit, assert_not_looking};
pub use create::{InitParameters, JOURNAL_SIZE_DEFAULT, JOURNAL_SIZE_MAX, JOURNAL_SIZE_MIN};
pub use files::JOURNAL_FILE;
pub use inspect::{BlockCounts, Changed, Condition, Span, StoreCounts};
pub use log::{FORMAT_VERSION, IMAGES_FILE};
pub use owner::{Owner, wait_until_idle};
pub use packing::PackPass;
pub use packing::PackStep;
pub use read::{Packed, Part, Planned, Stored};
pub use read_cache::ReadCacheStatistics;
pub use salvage::{Salvage, Salvaged, SalvagedPiece, Verdict as SalvageVerdict, merge_ranges};
pub use scrub::{
    Copies, Damage, DamagedPlace, Located, Reference, ScrubPart, ScrubPosition, ScrubStep, Scrubber, WantedBlock,
};
pub use sharing::{HINT_BYTES, PRINT_BYTES, PRINTS_MAX, PRINTS_MIN, SharePass, ShareStep};
pub use written::{ColdParts, Purpose, Written};

use crate::catalog::ObjectState;
use crate::pages::PageStatistics;
use crate::sync::Mutex;
use crate::sync::atomic::AtomicU64;
use crate::{Error, Result};
use backend::{Directory, IoMode};
use buffers::{Buffer, Buffers};
use files::DataFiles;
use log::CommitLog;
use metadata::{Meta, Metadata};
use reserve::Reserves;
use running::{Running, Work};
use std::sync::{Arc, Weak};
use std::time::Duration;
use writeback::WriteBack;

/// Options of an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Whether data files are accessed through the page cache or with O_DIRECT.
    pub mode: IoMode,
    /// Limit of the metadata cache in bytes.
    pub metadata_cache: usize,
    /// Limit of the write buffer in bytes.
    pub write_buffer: usize,
    /// Limit of the read cache in bytes; 0 for none.
    pub read_cache: usize,
    /// Whether the read cache holds blocks that are not compressed too (with [`IoMode::Direct`] only).
    pub cache_plain: bool,
    /// The time after which acknowledged writes are made durable if no flush is requested. With [`IoMode::Buffered`] it
    /// is three times as long.
    pub commit_interval: Duration,
    /// Whether large writes bypass the buffer (with [`IoMode::Buffered`] only).
    pub write_through: bool,
    /// Whether write-back and maintenance run on threads. If not, the caller drives them with [`Engine::pump`], as
    /// simulations do: everything then happens on one thread, in an order that the caller's seed decides.
    pub threads: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            mode: IoMode::Buffered,
            metadata_cache: 128 << 20,
            write_buffer: 64 << 20,
            read_cache: 64 << 20,
            cache_plain: true,
            commit_interval: Duration::from_secs(10),
            write_through: true,
            threads: true,
        }
    }
}

/// Counters for `status` and tests.
#[derive(Default)]
pub struct Counters {
    /// Blocks that failed their checksum.
    pub checksum_errors: AtomicU64,
    /// Blocks that a crash left partly overwritten, and that were accepted in this state.
    pub torn_blocks: AtomicU64,
    /// Durable appends to the journal.
    pub journal_appends: AtomicU64,
    /// Flushes of the data files.
    pub data_syncs: AtomicU64,
    /// Checkpoints that were made.
    pub checkpoints: AtomicU64,
    /// Blocks written to the data files by write-back and by writes that bypass the buffer.
    pub blocks_written: AtomicU64,
}

/// An open native store. All methods may be called from any thread.
///
/// Each part has its own locks, and acquires no lock of another part. An action that needs several parts is a method of
/// this struct, in the file named after the action.
pub struct Engine {
    directory: Arc<dyn Directory>,
    options: EngineOptions,
    /// The owner of the datastore. If it was dropped, the store writes nothing more.
    owner: Option<Weak<Owner>>,
    uuid: [u8; 16],
    /// Counters for `status` and tests.
    pub counters: Counters,
    running: Running,
    /// Ranges with buffered writes that could not enter the map.
    isolation: isolate::Isolation,
    /// Damage that the opening found, for the report of the first check.
    found_first: Mutex<Report>,
    /// Held by a check: one runs at a time.
    checking: Mutex<()>,
    /// Held by a count of space: one runs at a time.
    counting: Mutex<()>,
    /// Held by a step of packing or of sharing: one runs at a time. What passes of packing have examined and left as it
    /// is.
    packing: Mutex<packing::Examined>,
    /// Held by a change of the catalog: one runs at a time.
    control: Mutex<()>,
    buffers: Buffers,
    writeback: WriteBack,
    reserves: Reserves,
    log: CommitLog,
    meta: Metadata,
    files: DataFiles,
}

impl Engine {
    /// Identity of the datastore.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// The directory of the datastore.
    pub fn directory(&self) -> &Arc<dyn Directory> {
        &self.directory
    }

    /// The options with which the store was opened.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Why the datastore accepts no more writes; `None` while it accepts them.
    pub fn failure(&self) -> Option<String> {
        self.running.failure()
    }

    fn check_running(&self) -> Result<()> {
        self.running.check()
    }

    /// Stops all writes after a failure: the content of the medium is unknown from here on.
    #[cold]
    fn stop(&self, error: Error) -> Error {
        let error = self.explained_by_loss(error);
        if self.running.stop(&error.to_string()) {
            tracing::error!(%error, "the datastore stops taking writes");
        }
        self.buffers.wake();
        error
    }

    /// The writable state of a disk. For a disk that does not exist, a state that refuses every request.
    pub fn head(&self, disk: u64) -> Arc<Head> {
        let exists =
            || self.with_catalog(|catalog| catalog.find(disk).is_some_and(|object| object.state == ObjectState::Disk));
        if let Some(head) = self.buffers.find(disk) {
            return head;
        }
        if exists() {
            let head = self.buffers.head(disk);
            // The disk may have been deleted, and its buffer removed, between the check and this point.
            if exists() {
                return head;
            }
            self.buffers.forget(&[head]);
        }
        Buffers::gone(disk)
    }

    /// Counters of the cache of metadata pages.
    pub fn page_statistics(&self) -> PageStatistics {
        self.meta.statistics()
    }

    /// Counters of the cache of data blocks.
    pub fn read_cache_statistics(&self) -> ReadCacheStatistics {
        self.meta.read_cache().statistics()
    }

    /// How many blocks of a disk were read from the read cache, and how many that it may hold from the medium.
    pub fn cache_lookups(&self, disk: u64) -> (u64, u64) {
        self.buffers.find(disk).map_or((0, 0), |head| head.lookups.counts())
    }

    /// Records from now on when the parts of a disk are written. Returns the record, which exists already if this was
    /// called before for the purpose, and the disk was not reverted and has not grown since.
    pub fn record_writes(&self, disk: u64, purpose: Purpose) -> Result<Arc<Written>> {
        let blocks = self.with_catalog(|catalog| catalog.get(disk).map(|disk| disk.size_in_blocks()))?;
        Ok(self.buffers.record(disk, blocks, purpose))
    }

    /// The record of the writes of a disk for a purpose, if there is one.
    pub fn recorded_writes(&self, disk: u64, purpose: Purpose) -> Option<Arc<Written>> {
        self.buffers.recorded(disk, purpose)
    }

    /// Ends the records of writes of the disks that are not `wanted` for their purpose.
    pub fn keep_records_of_writes(&self, wanted: impl Fn(u64, Purpose) -> bool) {
        self.buffers.keep_records(wanted);
    }

    /// Publishes the headroom: the number of free blocks on which writes may rely. Called when free space has changed,
    /// and before claims and counted changes are released.
    fn update_headroom(&self, meta: &Meta) {
        let free = meta.data.counts().free;
        self.reserves.set_headroom(free.saturating_sub(meta.catalog.reserved()));
        self.update_changes_max(meta);
    }

    /// Wakes the background threads, if there are any.
    fn request(&self, ask: impl FnOnce(&mut Work)) {
        if self.options.threads {
            self.running.request(ask);
        }
    }
}

#[cfg(test)]
mod tests;
