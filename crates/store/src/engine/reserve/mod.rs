//! Reserves: free data blocks and free map nodes on which operations under way rely, and the space reserved for them in
//! the file system.
//!
//! Lock order: `scarce`, `search`, `punching`, `extending`. The write-back gate is locked under `scarce`. The locks of
//! the commit log and the metadata lock are acquired under all four, never before them; only
//! [`Reserves::try_extending`] may be called under the commit log or the metadata lock. `known` is held for a few
//! instructions.

mod claim;
mod extend;
mod nodes;
mod room;

pub(crate) use claim::{Claim, aside};
pub(crate) use extend::{CATALOG_AHEAD, table_bytes};
pub(crate) use nodes::{DRAINS_MAX, KEPT};
use room::Search;
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

/// Treats a full file system as success, for callers that reserve ahead: the operation that needs the space tries
/// again.
pub(crate) fn unless_full(outcome: Result<()>) -> Result<()> {
    outcome.or_else(|error| if is_full(&error) { Ok(()) } else { Err(error) })
}

/// Runs that maintenance tries to punch again.
#[derive(Default)]
pub struct Unpunched {
    /// Runs that could not be punched.
    pub failed: Vec<Run>,
    /// Runs whose table entries could not be read. They are kept apart, so that maintenance does not read a lost page
    /// again in each round.
    pub unreadable: Vec<Run>,
}

impl Unpunched {
    /// Lets the next round read the entries of the unreadable runs again.
    pub fn try_again(&mut self) {
        self.failed.append(&mut self.unreadable);
    }
}

/// The counters and locks of reserves, described at the head of the file.
#[derive(Default)]
pub struct Reserves {
    /// Locked from the change that marks space as not backed until its hole is punched.
    punching: Mutex<Unpunched>,
    /// The search for unclaimed space that the opening after a crash began, until it is complete.
    search: Mutex<Option<Search>>,
    /// Held by a reservation of space in the file system: one reservation at a time.
    extending: Mutex<()>,
    /// The number of reservations since the last one whose region was not lost.
    lost: AtomicU64,
    /// Runs that occupy space of the file system without a record, and that could not be punched while `punching` was
    /// not locked.
    unreturned: Mutex<Vec<Run>>,
    /// Claimed blocks: buffered writes and operations under way may need them.
    claims: AtomicU64,
    /// Number of free blocks on which writes may rely.
    headroom: AtomicU64,
    /// Counted map changes, in addition to one for each block of data in the buffers. See `nodes.rs`.
    changes: AtomicU64,
    /// The number of counted changes for which the free map nodes suffice.
    changes_max: AtomicU64,
    /// The trees and free nodes from which `changes_max` was computed.
    known: Mutex<Option<(Forest, u64)>>,
    /// Held by a write that waits for free nodes: one write at a time.
    scarce: Mutex<()>,
    /// Bytes reserved in each metadata file.
    metadata: [AtomicU64; PageFile::COUNT],
}

impl Reserves {
    /// Prevents punching until the guard is dropped.
    pub fn lock_punching(&self) -> MutexGuard<'_, Unpunched> {
        self.punching.lock()
    }

    /// Requests the search for unclaimed space.
    pub fn begin_search(&self) {
        *self.lock_search() = Some(Search::default());
    }

    /// True if unclaimed space may be left.
    pub fn is_search_open(&self) -> bool {
        self.lock_search().is_some()
    }

    fn lock_search(&self) -> MutexGuard<'_, Option<Search>> {
        self.search.lock()
    }

    /// Notes a run that occupies space of the file system without a record and could not be punched.
    pub fn note_unreturned(&self, run: Run) {
        self.unreturned.lock().push(run);
    }

    /// The runs noted by [`Reserves::note_unreturned`] since the last call.
    pub fn take_unreturned(&self) -> Vec<Run> {
        std::mem::take(&mut self.unreturned.lock())
    }

    /// Prevents reservations until the guard is dropped.
    pub fn lock_extending(&self) -> MutexGuard<'_, ()> {
        self.extending.lock()
    }

    /// Like [`Reserves::lock_extending`], but returns `None` during a reservation.
    pub fn try_extending(&self) -> Option<MutexGuard<'_, ()>> {
        self.extending.try_lock()
    }

    /// Notes whether the table of the region of a reservation was lost.
    pub fn note_lost(&self, lost: bool) {
        match lost {
            true => self.lost.fetch_add(1, Ordering::Relaxed),
            false => self.lost.swap(0, Ordering::Relaxed),
        };
    }

    /// The number of reservations since the last one whose region was not lost.
    pub fn lost_in_a_row(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Adds a claim and returns the number of all claimed blocks. The caller compares it with the headroom afterwards.
    pub fn add_claim(&self, blocks: u64) -> u64 {
        self.claims.fetch_add(blocks, Ordering::SeqCst) + blocks
    }

    /// Ends a claim.
    pub fn end_claim(&self, blocks: u64) {
        self.claims.fetch_sub(blocks, Ordering::SeqCst);
    }

    /// Number of claimed blocks.
    pub fn claims(&self) -> u64 {
        self.claims.load(Ordering::SeqCst)
    }

    /// Number of free blocks on which writes may rely.
    pub fn headroom(&self) -> u64 {
        self.headroom.load(Ordering::SeqCst)
    }

    /// Sets the headroom: the number of free blocks less those reserved for thick disks. Called before claims are
    /// ended.
    pub fn set_headroom(&self, blocks: u64) {
        self.headroom.store(blocks, Ordering::SeqCst);
    }

    /// Admits one write at a time to wait for nodes.
    pub fn lock_scarce(&self) -> MutexGuard<'_, ()> {
        self.scarce.lock()
    }

    /// Adds to the counted map changes. The caller compares the count with the maximum afterwards.
    pub fn add_changes(&self, changes: u64) {
        self.changes.fetch_add(changes, Ordering::SeqCst);
    }

    /// Removes changes from the count, because they are in the map or will not be made.
    pub fn end_changes(&self, changes: u64) {
        self.changes.fetch_sub(changes, Ordering::SeqCst);
    }

    /// Number of counted map changes.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// The number of counted changes for which the free nodes suffice.
    pub fn changes_max(&self) -> u64 {
        self.changes_max.load(Ordering::SeqCst)
    }

    /// Sets the maximum of counted changes to the result of `find`, unless it was computed for the same state `from`
    /// before.
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
