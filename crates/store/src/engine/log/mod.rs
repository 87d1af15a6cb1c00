//! The commit log: the journal, the superblock, the counters of durable writes, and admission.
//!
//! Lock order: `checkpoint` (one checkpoint at a time), the journal, `syncing` (one flush of the data files at a time),
//! `permits`. `growing` (of the images file) may be taken under all of them. The log takes no lock of another part.

mod admission;
mod clocks;
mod images;
mod permits;
mod record;
mod superblock;

pub use admission::{Cost, Grant, PAGES_FLOOR};
pub use clocks::Clocks;
pub use images::{IMAGES_FILE, INITIAL_PAGES, Images};
pub use record::CheckpointRecord;
pub use superblock::{
    FORMAT_VERSION, NamedImages, Superblock, Unreported, VERSION_PACKS, VERSION_SHARED_PACKS, VERSION_SHARED_WRITES,
    VERSION_SHARES, VERSION_WRITES_TO_PACKS, VERSION_WRITTEN_PACKS,
};

use crate::journal::{BatchKind, Journal, Place};
use crate::pages::ImageIndex;
use crate::space::Run;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::{Error, IoContext, Result};
use admission::Admission;
use backend::{BLOCK_SIZE, Buffer, Directory, File};
use permits::Permits;
use std::sync::Arc;

/// The journal, and the superblock as it is on the medium.
pub struct Committer {
    journal: Journal,
    superblock: Superblock,
    /// The place in the journal after the pending changes that the checkpoint under way has captured.
    ordered: Option<Place>,
    /// Batches of operations appended since opening.
    batches: u64,
}

/// The state of the journal. Fields that are read without a lock are atomic.
pub struct CommitLog {
    /// Room for appends and for dirty pages.
    pub admission: Admission,
    /// Counters of durable writes.
    pub clocks: Clocks,
    checkpoint: Mutex<()>,
    commit: Mutex<Committer>,
    syncing: Mutex<()>,
    permits: Mutex<Permits>,
    superblock_file: Arc<dyn File>,
    /// Size of the journal ring in bytes.
    ring: u64,
    images: Images,
    /// Held while the images file grows: one growth at a time.
    growing: Mutex<()>,
    head: AtomicU64,
    tail: AtomicU64,
    /// Journal position of the announcement of the overwrites under way; `u64::MAX`: none.
    announced: AtomicU64,
    /// A position just after the last announcement.
    announced_end: AtomicU64,
    /// Announced overwrites before this journal position are durable in the data files.
    settled: AtomicU64,
    /// The journal durably records that announced overwrites before this position are settled.
    told: AtomicU64,
    /// Whether a batch was appended since the last trailer, and a new trailer was requested from maintenance.
    untrailed: AtomicBool,
}

/// Held during a flush of the data files: one runs at a time.
pub struct Syncing<'a> {
    log: &'a CommitLog,
    _one: MutexGuard<'a, ()>,
    settled: u64,
    home: u64,
}

impl CommitLog {
    /// Makes the log of a journal that recovery has read, for a metadata cache of `cache` pages.
    pub fn new(
        journal: Journal,
        superblock: Superblock,
        superblock_file: Arc<dyn File>,
        images: Images,
        cache: u64,
    ) -> Result<Self> {
        let admission = Admission::new(superblock.journal_size, cache);
        admission.set_capacity(images.capacity()?);
        admission.set_used(journal.used());
        Ok(Self {
            admission,
            clocks: Clocks::default(),
            checkpoint: Mutex::new(()),
            head: AtomicU64::new(journal.head().position),
            tail: AtomicU64::new(journal.tail().position),
            commit: Mutex::new(Committer { journal, superblock, ordered: None, batches: 0 }),
            syncing: Mutex::new(()),
            permits: Mutex::default(),
            superblock_file,
            ring: superblock.journal_size,
            images,
            growing: Mutex::new(()),
            announced: AtomicU64::new(u64::MAX),
            announced_end: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            told: AtomicU64::new(0),
            untrailed: AtomicBool::new(false),
        })
    }

    /// Size of the journal ring in bytes.
    pub fn ring(&self) -> u64 {
        self.ring
    }

    /// Bytes between tail and head.
    pub fn used(&self) -> u64 {
        self.head.load(Ordering::Acquire) - self.tail.load(Ordering::Acquire)
    }

    /// Locks the journal.
    pub fn lock(&self) -> MutexGuard<'_, Committer> {
        self.commit.lock()
    }

    /// Waits for the checkpoint under way, and prevents others until the guard is dropped.
    pub fn lock_checkpoints(&self) -> MutexGuard<'_, ()> {
        self.checkpoint.lock()
    }

    /// Like [`CommitLog::lock_checkpoints`], but returns `None` if a checkpoint is under way.
    pub fn try_lock_checkpoints(&self) -> Option<MutexGuard<'_, ()>> {
        self.checkpoint.try_lock()
    }

    /// Appends a batch, durably.
    pub fn append(&self, commit: &mut Committer, kind: BatchKind, parts: &[&[u8]]) -> Result<()> {
        commit.journal.append(kind, parts)?;
        commit.batches += u64::from(matches!(kind, BatchKind::Operations | BatchKind::Urgent));
        self.head.store(commit.journal.head().position, Ordering::Release);
        self.admission.set_used(commit.journal.used());
        Ok(())
    }

    /// Whether the batch just appended is the first since the last trailer: the caller then requests a trailer.
    pub fn lacks_trailer(&self, _commit: &Committer) -> bool {
        !self.untrailed.load(Ordering::Acquire) && !self.untrailed.swap(true, Ordering::AcqRel)
    }

    /// Writes a trailer at the end of the journal, so that recovery can tell damage of the last batch from a torn
    /// append. After an error the journal only lacks a trailer.
    pub fn trail(&self, commit: &mut Committer) -> Result<()> {
        self.untrailed.store(false, Ordering::Release);
        commit.journal.trail()
    }

    /// Locks the journal, unless another thread has locked it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Committer>> {
        self.commit.try_lock()
    }

    /// The journal position where the next batch begins.
    pub fn head(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    /// Makes the ring space before `tail` free for new batches.
    fn release(&self, commit: &mut Committer, tail: Place) {
        commit.journal.release(tail);
        self.tail.store(tail.position, Ordering::Release);
        self.admission.set_used(commit.journal.used());
    }

    /// Writes the superblock. The ring space before its tail is then free.
    pub fn write_superblock(&self, commit: &mut Committer, next: &mut Superblock) -> Result<()> {
        next.write(&*self.superblock_file)?;
        commit.superblock = *next;
        self.release(commit, next.record.tail);
        Ok(())
    }

    /// Whether the medium can be read at all: reads the superblock, bypassing the page cache.
    pub fn is_medium_readable(&self) -> bool {
        let mut bytes = Buffer::zeroed(1);
        let mut reads = |copy: u64| self.superblock_file.read_at(&mut bytes, copy * BLOCK_SIZE as u64).is_ok();
        self.superblock_file.forget_cached().is_ok() && (reads(0) || reads(1))
    }

    /// The damaged copy of the superblock on the medium, if there is one. With `repair` both copies are then rewritten.
    /// Must not be called during a checkpoint.
    pub fn damaged_superblock(&self, repair: bool) -> Result<Option<u64>> {
        let mut commit = self.lock();
        let damaged = commit.superblock.damaged_copy(&*self.superblock_file)?;
        let whole = Superblock::read(&*self.superblock_file).is_ok_and(|(found, _)| found == commit.superblock);
        let damaged = if whole { damaged } else { Some(commit.superblock.sequence % 2) };
        if damaged.is_some() && repair {
            // Each write replaces one of the two copies, so two writes make both copies current.
            commit.superblock.write(&*self.superblock_file)?;
            commit.superblock.write(&*self.superblock_file)?;
        }
        Ok(damaged)
    }

    /// Removes the record of what openings repaired, after a check has reported it. Must not be called during a
    /// checkpoint.
    pub fn forget_unreported(&self) -> Result<()> {
        let mut commit = self.lock();
        if commit.superblock.unreported != Unreported::default() {
            commit.superblock.unreported = Unreported::default();
            commit.superblock.write(&*self.superblock_file)?;
        }
        Ok(())
    }

    /// The version that the superblock says.
    pub fn version(&self) -> u32 {
        self.lock().superblock.version
    }

    /// Whether the superblock says that several logical blocks may map one block.
    pub fn has_shares(&self) -> bool {
        self.lock().superblock.has_shares()
    }

    /// Whether the superblock says that writes may have gone into packs at once.
    pub fn has_written_packs(&self) -> bool {
        self.lock().superblock.has_written_packs()
    }

    /// Gives both copies of the superblock durably at least this version. Must not be called during a checkpoint.
    pub fn raise_version(&self, version: u32) -> Result<()> {
        let mut commit = self.lock();
        if commit.superblock.version < version {
            commit.superblock.version = version;
            // Each write replaces one of the two copies. If one is lost, a program that does not know the version must
            // not open the datastore with the other.
            for _copy in 0..2 {
                commit.superblock.write(&*self.superblock_file)?;
            }
        }
        Ok(())
    }

    /// The places of the pages of the last checkpoint in the images file, if the file still holds them undamaged. Must
    /// not be called during a checkpoint.
    pub fn image_index(&self) -> Option<ImageIndex> {
        let number = self.lock().superblock.checkpoint;
        self.images.index(number)
    }

    /// Marks the datastore as open in the superblock, because its files change from here on.
    pub fn note_open(&self) -> Result<()> {
        let mut commit = self.lock();
        if commit.superblock.clean {
            commit.superblock.clean = false;
            commit.superblock.write(&*self.superblock_file)?;
        }
        Ok(())
    }

    /// Writes the images of a checkpoint, and then the superblock that names them, which commits the checkpoint.
    pub fn commit_images(&self, next: &mut Superblock, images: &images::Pages) -> Result<()> {
        next.images = Some(self.images.write(next.checkpoint, next.incarnation, next.record, images)?);
        next.clean = false;
        next.write(&*self.superblock_file)?;
        let mut commit = self.lock();
        commit.superblock = *next;
        self.release(&mut commit, next.record.tail);
        drop(commit);
        self.admission.notify();
        Ok(())
    }

    /// Reserves space for this many images in the file system of `directory`.
    pub fn reserve_images(&self, pages: u64, directory: &dyn Directory, stop: &dyn Fn(Error) -> Error) -> Result<()> {
        if pages <= self.admission.capacity() {
            return Ok(());
        }
        let _growing = self.growing.lock();
        let known = self.admission.capacity();
        if pages <= known {
            return Ok(());
        }
        // The free space is queried first, because a file system that runs full during a reservation searches for space
        // for a long time.
        let room = directory.room().during(|| "querying the free space of the file system".into())?;
        images::check_room(room.available, pages, known)?;
        self.images.reserve(pages)?;
        // A power cut would undo a reservation that is not durable, and recovery needs room for as many images.
        self.images.sync().map_err(stop)?;
        self.admission.set_capacity(self.images.capacity()?);
        Ok(())
    }

    /// Called before the next batch announces in-place overwrites: no flush counts them as settled until
    /// [`CommitLog::end_announced`].
    pub fn begin_announced(&self, commit: &Committer) {
        let position = commit.journal.head().position;
        self.announced.store(position, Ordering::Release);
        self.announced_end.store(position + 1, Ordering::Release);
    }

    /// The position before which overwrites must be settled so that all overwrites announced so far are settled.
    pub fn announced_end(&self) -> u64 {
        self.announced_end.load(Ordering::Acquire)
    }

    /// Whether a flush of the data files has settled all overwrites announced before `position`.
    pub fn is_settled(&self, position: u64) -> bool {
        self.settled.load(Ordering::Acquire) >= position
    }

    /// Notes that a durable record settles the overwrites announced before `position`.
    pub fn note_told(&self, position: u64) {
        self.told.fetch_max(position, Ordering::AcqRel);
    }

    /// Whether a durable record settles all overwrites announced before `position`.
    pub fn is_told(&self, position: u64) -> bool {
        self.told.load(Ordering::Acquire) >= position
    }

    /// Called when the announced overwrites are written and the data files are marked as dirty.
    pub fn end_announced(&self) {
        self.announced.store(u64::MAX, Ordering::Release);
    }

    /// Makes flushes settle no announced overwrites until [`CommitLog::end_announced`]. For recovery, which may be
    /// interrupted and begin again.
    pub fn settle_nothing(&self) {
        self.announced.store(0, Ordering::Release);
    }

    /// Whether all these runs have permits.
    pub fn permits(&self, mut runs: impl Iterator<Item = Run>) -> bool {
        let permits = self.permits.lock();
        runs.all(|run| permits.covers(run))
    }

    /// Announces runs with `append`, and gives them permits.
    pub fn permit(&self, runs: &[Run], append: impl FnOnce() -> Result<()>) -> Result<()> {
        // The lock is held during the append, so that a flush that ends these permits reads a journal head after the
        // announcement.
        let mut permits = self.permits.lock();
        append()?;
        runs.iter().for_each(|run| permits.add(*run));
        Ok(())
    }

    /// Ends all permits.
    pub fn end_permits(&self) {
        self.permits.lock().clear();
    }

    /// Whether a write to the data files is not durable.
    pub fn needs_sync(&self) -> bool {
        self.clocks.home() > self.clocks.synced()
    }

    /// Waits for a flush of the data files under way, and prevents others until the guard is dropped.
    pub fn lock_syncing(&self) -> MutexGuard<'_, ()> {
        self.syncing.lock()
    }

    /// Begins a flush of the data files: ends all permits, and computes which announced overwrites the flush settles.
    /// No write that bypasses the buffer may be under way.
    pub fn begin_sync<'a>(&'a self, one: MutexGuard<'a, ()>) -> Syncing<'a> {
        // The permits end and the journal head is read in one critical section: a permit given in between would stay
        // valid although its announcement counts as settled.
        let mut permits = self.permits.lock();
        permits.clear();
        // The head is read before `announced`, so an announcement that the load of `announced` misses is after the
        // head.
        let head = self.head.load(Ordering::Acquire);
        drop(permits);
        let settled = head.min(self.announced.load(Ordering::Acquire));
        Syncing { log: self, _one: one, settled, home: self.clocks.home() }
    }
}

impl Syncing<'_> {
    /// Called when the data files are flushed. Returns the journal position before which announced overwrites are now
    /// settled, if it has grown.
    pub fn end(self) -> Option<u64> {
        self.log.clocks.set_synced(self.home);
        let before = self.log.settled.fetch_max(self.settled, Ordering::AcqRel);
        (before < self.settled).then_some(self.settled)
    }
}

impl Committer {
    /// The superblock as it is on the medium.
    pub fn superblock(&self) -> Superblock {
        self.superblock
    }

    /// The place of the next batch.
    pub fn head(&self) -> Place {
        self.journal.head()
    }

    /// The incarnation under which this process appends.
    pub fn incarnation(&self) -> u64 {
        self.journal.incarnation()
    }

    /// Reads a batch, for recovery.
    pub fn read(&self, place: Place) -> Result<Option<crate::journal::Batch>> {
        self.journal.read(place, 0)
    }

    /// Called when a checkpoint captures the pending changes. Their end in the journal is unknown until they are
    /// appended.
    pub fn begin_capture(&mut self) {
        self.ordered = None;
    }

    /// Called when all changes that the checkpoint captured are in the journal.
    pub fn end_capture(&mut self) {
        self.ordered = Some(self.journal.head());
    }

    /// The place after the last captured change in the journal.
    pub fn take_captured_end(&mut self) -> Option<Place> {
        self.ordered.take()
    }

    /// Batches appended since opening that prevent a clean close.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Removes the last batch from the number of batches that prevent a clean close, because the batch only records
    /// settled overwrites.
    pub fn discount_last(&mut self) {
        self.batches -= 1;
    }
}
