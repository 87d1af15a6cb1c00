//! Reserves: free blocks and free nodes that what is under way counts on, and space taken from the file system for
//! them.
//!
//! Locks, in this order: `scarce`, `punching`, `extending`. The gate is taken under `scarce`. The commit log and the
//! metadata lock are taken under all three, never the other way round; only [`Reserves::try_extending`] may be called
//! under them. `known` is for a few instructions.

mod claim;
mod extend;
mod nodes;
mod room;

pub(crate) use claim::{Claim, aside};
pub(crate) use extend::table_bytes;
pub(crate) use nodes::{DRAINS_MAX, KEPT};
pub(crate) use room::punch;

use crate::pages::PageFile;
use crate::space::Run;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::tree::Forest;
use crate::{Error, ErrorKind, Result};

/// Whether a file system has given no more.
fn is_full(error: &Error) -> bool {
    error.kind() == ErrorKind::NoSpace
}

/// The same outcome, but that a full file system is none: what it was for asks again.
pub(crate) fn unless_full(outcome: Result<()>) -> Result<()> {
    outcome.or_else(|error| if is_full(&error) { Ok(()) } else { Err(error) })
}

/// See the head of the file.
#[derive(Default)]
pub struct Reserves {
    /// Held from the moment that space is no longer called backed until its hole is punched; runs whose punch failed.
    punching: Mutex<Vec<Run>>,
    /// One reservation of space from the file system at a time.
    extending: Mutex<()>,
    /// Runs that take room and that nothing names, whose punch failed where `punching` may not be locked.
    unreturned: Mutex<Vec<Run>>,
    /// Blocks for which buffered writes may need new places.
    claims: AtomicU64,
    /// Free blocks that writes may count on.
    headroom: AtomicU64,
    /// Changes of the map that count beside blocks of data in the buffer.
    changes: AtomicU64,
    /// Changes that the free nodes cover.
    changes_max: AtomicU64,
    /// What that was found from: the trees, and free nodes.
    known: Mutex<Option<(Forest, u64)>>,
    /// One write at a time for which there are not enough nodes.
    scarce: Mutex<()>,
    /// Bytes reserved in each metadata file.
    metadata: [AtomicU64; PageFile::COUNT],
}

impl Reserves {
    /// Keeps holes from being punched; the runs whose punch failed.
    pub fn lock_punching(&self) -> MutexGuard<'_, Vec<Run>> {
        self.punching.lock()
    }

    /// A run takes room of the file system without a record, and could not be given back.
    pub fn note_unreturned(&self, run: Run) {
        self.unreturned.lock().push(run);
    }

    /// The runs noted by [`Reserves::note_unreturned`] since the last call.
    pub fn take_unreturned(&self) -> Vec<Run> {
        std::mem::take(&mut self.unreturned.lock())
    }

    /// Keeps space from being reserved.
    pub fn lock_extending(&self) -> MutexGuard<'_, ()> {
        self.extending.lock()
    }

    /// The same, unless space is being reserved.
    pub fn try_extending(&self) -> Option<MutexGuard<'_, ()>> {
        self.extending.try_lock()
    }

    /// Claims blocks; all that is claimed then. Compared with the headroom afterwards.
    pub fn add_claim(&self, blocks: u64) -> u64 {
        self.claims.fetch_add(blocks, Ordering::SeqCst) + blocks
    }

    /// Ends a claim.
    pub fn end_claim(&self, blocks: u64) {
        self.claims.fetch_sub(blocks, Ordering::SeqCst);
    }

    /// Blocks claimed.
    pub fn claims(&self) -> u64 {
        self.claims.load(Ordering::SeqCst)
    }

    /// Free blocks that writes may count on.
    pub fn headroom(&self) -> u64 {
        self.headroom.load(Ordering::SeqCst)
    }

    /// So many blocks are free beside those set aside. Before claims are given back.
    pub fn set_headroom(&self, blocks: u64) {
        self.headroom.store(blocks, Ordering::SeqCst);
    }

    /// Lets one write after the other wait for nodes.
    pub fn lock_scarce(&self) -> MutexGuard<'_, ()> {
        self.scarce.lock()
    }

    /// Counts changes of the map. Compared with the maximum afterwards.
    pub fn add_changes(&self, changes: u64) {
        self.changes.fetch_add(changes, Ordering::SeqCst);
    }

    /// Changes are in the map, or will not be made.
    pub fn end_changes(&self, changes: u64) {
        self.changes.fetch_sub(changes, Ordering::SeqCst);
    }

    /// Changes counted.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Changes that the free nodes cover.
    pub fn changes_max(&self) -> u64 {
        self.changes_max.load(Ordering::SeqCst)
    }

    /// `find` says how many changes the free nodes cover, unless `from` is as it was.
    pub fn publish_changes_max(&self, from: (Forest, u64), find: impl FnOnce() -> u64) {
        let mut known = self.known.lock();
        if *known != Some(from) {
            self.changes_max.store(find(), Ordering::SeqCst);
            *known = Some(from);
        }
    }

    /// Bytes reserved in a metadata file.
    pub fn metadata(&self, file: PageFile) -> u64 {
        self.metadata[file as usize].load(Ordering::Acquire)
    }

    /// So many bytes are reserved in a metadata file.
    pub fn note_metadata(&self, file: PageFile, bytes: u64) {
        self.metadata[file as usize].fetch_max(bytes, Ordering::AcqRel);
    }

    #[cfg(test)]
    pub fn forget_metadata(&self, file: PageFile) {
        self.metadata[file as usize].store(0, Ordering::Release);
    }
}
