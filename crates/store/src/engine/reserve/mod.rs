//! Reserves: free blocks that what is under way counts on, and space taken from the file system for them.
//!
//! Locks, in this order: `punching`, `extending`. The commit log and the metadata lock are taken under both, never the
//! other way round; only [`Reserves::try_extending`] may be called under them.

mod claim;
mod extend;
mod room;

pub(crate) use claim::aside;
pub(crate) use room::punch;

use crate::pages::PageFile;
use crate::space::Run;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// See the head of the file.
#[derive(Default)]
pub struct Reserves {
    /// Held from the moment that space is no longer called backed until its hole is punched; runs whose punch failed.
    punching: Mutex<Vec<Run>>,
    /// One reservation of space from the file system at a time.
    extending: Mutex<()>,
    /// Blocks for which buffered writes may need new places.
    claims: AtomicU64,
    /// Free blocks that writes may count on.
    headroom: AtomicU64,
    /// Bytes reserved in each metadata file.
    metadata: [AtomicU64; PageFile::COUNT],
}

impl Reserves {
    /// Keeps holes from being punched; the runs whose punch failed.
    pub fn lock_punching(&self) -> MutexGuard<'_, Vec<Run>> {
        self.punching.lock()
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

    /// Free blocks that nothing under way counts on.
    pub fn unclaimed(&self) -> u64 {
        self.headroom().saturating_sub(self.claims())
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
