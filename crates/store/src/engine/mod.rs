//! The engine: what ties buffer, map, space, journal and pages together.
//!
//! # The way of a write
//!
//! A write is put into the [`crate::buffer`] of its disk and acknowledged. From there it goes one of two ways:
//!
//! * **Write-back** (`writeback`): blocks that belong to the head alone are overwritten in place, after the journal
//!   has durably announced which (so that recovery knows whose checksum it must not trust); all others get new places
//!   next to each other. Then the map changes in memory and the change waits in the pending list.
//! * **Flush** (`flush`): if little is still buffered, it goes into the journal with its payload, behind all pending
//!   changes, in one durable append that all waiting flushes share. The payload is written to its place later.
//!
//! A pending change is appended to the journal only after the data it points at is durable, so that replay never maps
//! a block to something that was not written there.
//!
//! # What must hold
//!
//! 1. All changes of metadata go through `metadata/apply.rs`, at run time and in replay, in the order of the journal.
//!    Its effect depends on nothing but the operation and the metadata. (Announcements of overwrites and new unsealed
//!    snapshots may be appended ahead of pending changes: they commute with them, see `flush`.)
//! 2. A checkpoint captures the pages at one moment, with nothing being overwritten, and ends only when all that they
//!    describe is durable at its place: data written back, payload of the journal, and the pending changes in their
//!    order.
//! 3. A freed block is given out again only when the operation that freed it is durable and no read that was planned
//!    before is under way.
//! 4. Every change of metadata is admitted first (`log`): the journal has room for what the change appends, and the
//!    next checkpoint for the pages that it dirties. No thread waits for that room under a lock that a checkpoint
//!    takes.
//! 5. After a failed write or flush of the medium, or the loss of the ownership (`owner`), nothing is written any more
//!    until the datastore is opened again.
//!
//! # Parts and flows
//!
//! The engine consists of parts. Each owns its state, keeps its fields to itself, and takes no lock of another part:
//!
//! | part | owns |
//! |---|---|
//! | `metadata` | pages, tables, trees, the catalog; pending changes, what they hold and what they freed |
//! | `log` | the journal, the superblock, the images of a checkpoint, what is durable, and the room for what follows |
//! | `placement` | where a write of a block may go: a pure state machine, without I/O, threads or locks |
//! | `buffers` | what was written and is not in the map, of all disks together |
//! | `writeback` | the ways of data to the medium: the gate, payload of the journal, writes past the buffer |
//! | `reserve` | free blocks reserved for operations under way, and the space taken from the file system for them |
//! | `running` | whether the store runs; its threads |
//!
//! What needs several parts is a flow: a method of [`Engine`] in a file that is named after it, or in the folder of the
//! part that it serves.
//!
//! # Locks
//!
//! In this order: `checking` (one check at a time), `control` (one change of the catalog at a time), punching, the lock
//! on checkpoints, the gate (no write-back under way), the journal, the flush of the data files, `through` (no write
//! past the buffer under way), extending (space from the file system), the buffers of disks (ascending by id), the
//! metadata, permits. Data I/O happens under the gate or `through` at most, journal I/O under the journal.
//!
//! Metadata pages are read without the metadata lock, and before the journal and the buffers are locked: look-ups let
//! go of their locks and look again, changes are prepared (`Metadata::bring_in`). Only what a change misses although
//! it was prepared, and all that recovery and a repair read, is read under the metadata lock.

mod admit;
mod buffers;
mod bulk;
mod check;
mod checkpoint;
mod control;
mod files;
mod flush;
mod heads;
mod inspect;
mod isolate;
mod left_out;
mod log;
mod maintain;
mod metadata;
mod owner;
mod placement;
mod read;
mod rebuild;
mod recover;
mod replay;
mod reserve;
mod running;
mod salvage;
mod verify;
mod write;
mod writeback;

pub use buffers::Head;
pub use bulk::BulkWriter;
pub use check::{CheckOptions, Finding, Report};
pub use control::{DiskIdentity, NewDisk, NewSnapshot, ReceiveCommit};
pub use files::JOURNAL_FILE;
pub use inspect::{BlockCounts, Changed, Condition, Span, StoreCounts};
pub use log::{FORMAT_VERSION, IMAGES_FILE};
pub use owner::Owner;
pub use read::{Part, Planned, Stored};
pub use recover::{InitParameters, JOURNAL_SIZE_DEFAULT, JOURNAL_SIZE_MAX, JOURNAL_SIZE_MIN};
pub use salvage::{Salvage, Salvaged, SalvagedPiece, Verdict as SalvageVerdict, merge_ranges};

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

/// How an engine behaves.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Whether data goes through the page cache or past it (O_DIRECT).
    pub mode: IoMode,
    /// Limit of the metadata cache in bytes.
    pub metadata_cache: usize,
    /// Limit of the write buffer in bytes.
    pub write_buffer: usize,
    /// Longest time that an acknowledged write may stay in memory without a flush.
    pub commit_interval: Duration,
    /// Whether large writes go past the buffer (buffered mode only).
    pub write_through: bool,
    /// Whether write-back and maintenance run on threads of their own. If not, the caller drives them with
    /// [`Engine::pump`], as simulations do: everything then happens on one thread, in an order that the seed decides.
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

/// Counters for `status` and tests.
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
///
/// Each part has its own locks and takes none of another. What needs several parts is a flow: a method of this struct
/// in the file that is named after it.
pub struct Engine {
    directory: Arc<dyn Directory>,
    options: EngineOptions,
    /// Set when the datastore was dropped.
    owner: Option<Weak<Owner>>,
    uuid: [u8; 16],
    /// Counters.
    pub counters: Counters,
    running: Running,
    /// Ranges that write-back could not bring into the map.
    isolation: isolate::Isolation,
    /// Damage that the opening found, for the report of the first check.
    found_first: Mutex<Report>,
    /// Held by a check: one runs at a time.
    checking: Mutex<()>,
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

    /// The directory it lives in.
    pub fn directory(&self) -> &Arc<dyn Directory> {
        &self.directory
    }

    /// Its options.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Why the datastore takes no more writes; `None` while it takes them.
    pub fn failure(&self) -> Option<String> {
        self.running.failure()
    }

    fn check_running(&self) -> Result<()> {
        self.running.check()
    }

    /// Stops all writes after a failure: what the medium holds is unknown from here on.
    #[cold]
    fn stop(&self, error: Error) -> Error {
        let error = self.explained_by_loss(error);
        if self.running.stop(&error.to_string()) {
            tracing::error!(%error, "the datastore stops taking writes");
        }
        self.buffers.wake();
        error
    }

    /// The writable state of a disk. If there is no such disk, a state that refuses every request.
    pub fn head(&self, disk: u64) -> Arc<Head> {
        let exists =
            || self.with_catalog(|catalog| catalog.find(disk).is_some_and(|object| object.state == ObjectState::Disk));
        if let Some(head) = self.buffers.find(disk) {
            return head;
        }
        if exists() {
            let head = self.buffers.head(disk);
            // The disk may have been deleted, and its buffer removed, before this state was made.
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

    /// Updates the number of free blocks that writers may count on. Called whenever free space changed, and before
    /// claims and changes are given back.
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
