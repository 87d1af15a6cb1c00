//! Reserves: free blocks and free nodes on which operations under way rely, and space reserved in the file system for
//! them.
//!
//! Locks, in this order: `scarce`, `punching`, `extending`. The gate is taken under `scarce`. The commit log and the
//! metadata lock are taken under all three, never the other way round; only [`Reserves::try_extending`] may be called
//! under them. `known` is held for a few instructions.

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

/// True if the file system has no more space.
fn is_full(error: &Error) -> bool {
    error.kind() == ErrorKind::NoSpace
}

/// The same result, with a full file system as success: the operation that needs the space asks again.
pub(crate) fn unless_full(outcome: Result<()>) -> Result<()> {
    outcome.or_else(|error| if is_full(&error) { Ok(()) } else { Err(error) })
}

/// See the head of the file.
#[derive(Default)]
pub struct Reserves {
    /// Held from the change that marks space as not backed until its hole is punched. Contains runs whose punch failed.
    punching: Mutex<Vec<Run>>,
    /// Held by a reservation of space in the file system: one at a time.
    extending: Mutex<()>,
    /// Runs that occupy room, that nothing refers to, and whose punch failed where `punching` could not be locked.
    unreturned: Mutex<Vec<Run>>,
    /// Blocks for which buffered writes may need new places.
    claims: AtomicU64,
    /// Free blocks on which writes may rely.
    headroom: AtomicU64,
    /// Changes of the map that count beside the blocks of data in the buffer.
    changes: AtomicU64,
    /// Changes for which the free nodes suffice.
    changes_max: AtomicU64,
    /// The state from which that number was computed: the trees, and the free nodes.
    known: Mutex<Option<(Forest, u64)>>,
    /// Held by a write for which there are not enough nodes: one at a time.
    scarce: Mutex<()>,
    /// Bytes reserved in each metadata file.
    metadata: [AtomicU64; PageFile::COUNT],
}

impl Reserves {
    /// Keeps holes from being punched. Contains the runs whose punch failed.
    pub fn lock_punching(&self) -> MutexGuard<'_, Vec<Run>> {
        self.punching.lock()
    }

    /// Notes that a run occupies room of the file system without a record, and could not be returned.
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

    /// Claims blocks; returns the number of all claimed blocks. Compared with the headroom afterwards.
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

    /// Free blocks on which writes may rely.
    pub fn headroom(&self) -> u64 {
        self.headroom.load(Ordering::SeqCst)
    }

    /// Sets the number of free blocks beyond those set aside. Called before claims are given back.
    pub fn set_headroom(&self, blocks: u64) {
        self.headroom.store(blocks, Ordering::SeqCst);
    }

    /// Lets one write at a time wait for nodes.
    pub fn lock_scarce(&self) -> MutexGuard<'_, ()> {
        self.scarce.lock()
    }

    /// Counts changes of the map; returns the number of all counted ones. Compared with the maximum afterwards.
    pub fn add_changes(&self, changes: u64) {
        self.changes.fetch_add(changes, Ordering::SeqCst);
    }

    /// Removes changes from the count: they are in the map, or will not be made.
    pub fn end_changes(&self, changes: u64) {
        self.changes.fetch_sub(changes, Ordering::SeqCst);
    }

    /// Counted changes.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Changes for which the free nodes suffice.
    pub fn changes_max(&self) -> u64 {
        self.changes_max.load(Ordering::SeqCst)
    }

    /// `find` computes for how many changes the free nodes suffice, unless `from` is as before.
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

    /// Sets the bytes reserved in a metadata file.
    pub fn note_metadata(&self, file: PageFile, bytes: u64) {
        self.metadata[file as usize].fetch_max(bytes, Ordering::AcqRel);
    }

    #[cfg(test)]
    pub fn forget_metadata(&self, file: PageFile) {
        self.metadata[file as usize].store(0, Ordering::Release);
    }
}
