//! The commit log: the journal, the superblock, the durable positions, and the room for later appends.
//!
//! Locks, in this order: `checkpoint` (one checkpoint at a time), the journal, `syncing` (one flush of the data files
//! at a time), `permits`. `growing` (of the images file) may be taken under all of them. The log takes no lock of
//! another part.

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
pub use superblock::{FORMAT_VERSION, NamedImages, Superblock};

use crate::journal::{BatchKind, Journal, Place};
use crate::pages::ImageIndex;
use crate::space::Run;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::{Error, IoContext, Result};
use admission::Admission;
use backend::{Directory, File};
use permits::Permits;
use std::sync::Arc;

/// The journal, and the contents of the superblock on the medium.
pub struct Committer {
    journal: Journal,
    superblock: Superblock,
    /// Journal position at which the pending changes that the checkpoint under way captured end.
    ordered: Option<Place>,
    /// Batches of operations appended since opening.
    batches: u64,
}

/// Counters of what is durable, see `clocks.rs`.
pub struct CommitLog {
    /// Room for appends and for dirty pages.
    pub admission: Admission,
    /// What is durable.
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
    /// Journal position of the announced overwrites under way; `u64::MAX`: none.
    announced: AtomicU64,
    /// The position just behind the last announcement.
    announced_end: AtomicU64,
    /// Overwrites announced before this journal position are durable.
    settled: AtomicU64,
    /// The position up to which the journal durably says that they are settled.
    told: AtomicU64,
    /// A batch was appended since the last trailer, and a new trailer was asked for.
    untrailed: AtomicBool,
}

/// Held by a flush of the data files: one at a time.
pub struct Syncing<'a> {
    log: &'a CommitLog,
    _one: MutexGuard<'a, ()>,
    settled: u64,
    home: u64,
}

impl CommitLog {
    /// The log over a journal that recovery has read, for a metadata cache of `cache` pages.
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

    /// The journal, locked.
    pub fn lock(&self) -> MutexGuard<'_, Committer> {
        self.commit.lock()
    }

    /// Waits for the checkpoint under way, and holds the lock that lets no other begin.
    pub fn lock_checkpoints(&self) -> MutexGuard<'_, ()> {
        self.checkpoint.lock()
    }

    /// The same, if none is under way.
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

    /// Whether the batch just appended is the first since the last trailer, so that a new trailer has to be asked for.
    pub fn lacks_trailer(&self, _commit: &Committer) -> bool {
        !self.untrailed.load(Ordering::Acquire) && !self.untrailed.swap(true, Ordering::AcqRel)
    }

    /// Ends the journal with a trailer, so that damage of its last batch can be told from a torn one. A failure has no
    /// other consequence.
    pub fn trail(&self, commit: &mut Committer) -> Result<()> {
        self.untrailed.store(false, Ordering::Release);
        commit.journal.trail()
    }

    /// The journal, locked, unless an append is under way.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Committer>> {
        self.commit.try_lock()
    }

    /// Position of the head.
    pub fn head(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    /// Releases the journal before `tail`.
    fn release(&self, commit: &mut Committer, tail: Place) {
        commit.journal.release(tail);
        self.tail.store(tail.position, Ordering::Release);
        self.admission.set_used(commit.journal.used());
    }

    /// Writes the superblock, which releases the journal before its tail.
    pub fn write_superblock(&self, commit: &mut Committer, next: &mut Superblock) -> Result<()> {
        next.write(&*self.superblock_file)?;
        commit.superblock = *next;
        self.release(commit, next.tail);
        Ok(())
    }

    /// Finds which copy of the superblock on the medium is damaged; with `repair` it is written again. Not during a
    /// checkpoint.
    pub fn damaged_superblock(&self, repair: bool) -> Result<Option<u64>> {
        let mut commit = self.lock();
        let damaged = commit.superblock.damaged_copy(&*self.superblock_file)?;
        let whole = Superblock::read(&*self.superblock_file).is_ok_and(|(found, _)| found == commit.superblock);
        let damaged = if whole { damaged } else { Some(commit.superblock.sequence % 2) };
        if damaged.is_some() && repair {
            // One after the other, so that both copies are current whichever was damaged.
            commit.superblock.write(&*self.superblock_file)?;
            commit.superblock.write(&*self.superblock_file)?;
        }
        Ok(damaged)
    }

    /// Positions of the pages of the last checkpoint in the images file, if they are still undamaged there. Not during
    /// a checkpoint.
    pub fn image_index(&self) -> Option<ImageIndex> {
        let number = self.lock().superblock.checkpoint;
        self.images.index(number)
    }

    /// Writes in the superblock that the store is not closed, because the files change from here on.
    pub fn note_open(&self) -> Result<()> {
        let mut commit = self.lock();
        if commit.superblock.clean {
            commit.superblock.clean = false;
            commit.superblock.write(&*self.superblock_file)?;
        }
        Ok(())
    }

    /// Writes the images of a checkpoint, and the superblock that names them: the checkpoint is committed.
    pub fn commit_images(&self, next: &mut Superblock, images: &images::Pages) -> Result<()> {
        let record = CheckpointRecord::of(next);
        next.images = Some(self.images.write(next.checkpoint, next.incarnation, record, images)?);
        next.clean = false;
        next.write(&*self.superblock_file)?;
        let mut commit = self.lock();
        commit.superblock = *next;
        self.release(&mut commit, next.tail);
        drop(commit);
        self.admission.notify();
        Ok(())
    }

    /// Reserves room for this many images in the file system of `directory`.
    pub fn reserve_images(&self, pages: u64, directory: &dyn Directory, stop: &dyn Fn(Error) -> Error) -> Result<()> {
        if pages <= self.admission.capacity() {
            return Ok(());
        }
        let _growing = self.growing.lock();
        let known = self.admission.capacity();
        if pages <= known {
            return Ok(());
        }
        // Asked first, because a file system that runs full during a reservation searches for a long time.
        let room = directory.room().during(|| "asking for the room of the file system".into())?;
        images::check_room(room.available, pages, known)?;
        self.images.reserve(pages)?;
        // Made durable, because a power cut would undo the reservation, and recovery needs as many images.
        self.images.sync().map_err(stop)?;
        self.admission.set_capacity(self.images.capacity()?);
        Ok(())
    }

    /// Overwrites in place are about to be announced with the next batch: no flush settles them until
    /// [`CommitLog::end_announced`].
    /// [`CommitLog::end_announced`].
    pub fn begin_announced(&self, commit: &Committer) {
        let position = commit.journal.head().position;
        self.announced.store(position, Ordering::Release);
        self.announced_end.store(position + 1, Ordering::Release);
    }

    /// The position that has to be settled so that all overwrites announced so far are settled.
    pub fn announced_end(&self) -> u64 {
        self.announced_end.load(Ordering::Acquire)
    }

    /// Whether a flush of the data files has settled all overwrites announced before a position.
    pub fn is_settled(&self, position: u64) -> bool {
        self.settled.load(Ordering::Acquire) >= position
    }

    /// Notes that the journal durably says that overwrites announced before a position are settled.
    pub fn note_told(&self, position: u64) {
        self.told.fetch_max(position, Ordering::AcqRel);
    }

    /// Whether the journal durably says that for all overwrites announced before a position.
    pub fn is_told(&self, position: u64) -> bool {
        self.told.load(Ordering::Acquire) >= position
    }

    /// Notes that the announced overwrites are written, and that the data files have noted them.
    pub fn end_announced(&self) {
        self.announced.store(u64::MAX, Ordering::Release);
    }

    /// No flush settles announced overwrites until [`CommitLog::end_announced`]: for recovery, which may have to begin
    /// again.
    pub fn settle_nothing(&self) {
        self.announced.store(0, Ordering::Release);
    }

    /// Whether all these runs are permitted now.
    pub fn permits(&self, mut runs: impl Iterator<Item = Run>) -> bool {
        let permits = self.permits.lock();
        runs.all(|run| permits.covers(run))
    }

    /// Appends the announcement of runs with `append`, and permits them.
    pub fn permit(&self, runs: &[Run], append: impl FnOnce() -> Result<()>) -> Result<()> {
        // Held during the append: the code that ends permits reads the head of the journal after it has ended these
        // too.
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

    /// Waits for the flush of the data files under way, and lets no other begin.
    pub fn lock_syncing(&self) -> MutexGuard<'_, ()> {
        self.syncing.lock()
    }

    /// Begins a flush of the data files: ends all permits, and notes what the flush settles. No write past the buffer
    /// may be under way.
    pub fn begin_sync<'a>(&'a self, one: MutexGuard<'a, ()>) -> Syncing<'a> {
        // One critical section: a permit given between the two statements would be settled and still be valid.
        let mut permits = self.permits.lock();
        permits.clear();
        // The order matters: an announcement made after the head was read lies behind it.
        let head = self.head.load(Ordering::Acquire);
        drop(permits);
        let settled = head.min(self.announced.load(Ordering::Acquire));
        Syncing { log: self, _one: one, settled, home: self.clocks.home() }
    }
}

impl Syncing<'_> {
    /// Notes that the data files are flushed. Returns the journal position before which announcements are settled now,
    /// if it has grown.
    pub fn end(self) -> Option<u64> {
        self.log.clocks.set_synced(self.home);
        let before = self.log.settled.fetch_max(self.settled, Ordering::AcqRel);
        (before < self.settled).then_some(self.settled)
    }
}

impl Committer {
    /// The contents of the superblock on the medium.
    pub fn superblock(&self) -> Superblock {
        self.superblock
    }

    /// The position of the next batch.
    pub fn head(&self) -> Place {
        self.journal.head()
    }

    /// The incarnation of this opening.
    pub fn incarnation(&self) -> u64 {
        self.journal.incarnation()
    }

    /// Reads a batch, in recovery.
    pub fn read(&self, place: Place) -> Result<Option<crate::journal::Batch>> {
        self.journal.read(place, 0)
    }

    /// Notes that a checkpoint captures the pending changes; the position where they end in the journal is unknown yet.
    pub fn begin_capture(&mut self) {
        self.ordered = None;
    }

    /// Notes that all changes that the checkpoint under way captured are in the journal.
    pub fn end_capture(&mut self) {
        self.ordered = Some(self.journal.head());
    }

    /// The position where the captured changes ended.
    pub fn take_captured_end(&mut self) -> Option<Place> {
        self.ordered.take()
    }

    /// Batches of operations appended since opening, without those that change nothing.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Notes that the last batch changes nothing that a checkpoint keeps: a clean one may release it.
    pub fn discount_last(&mut self) {
        self.batches -= 1;
    }
}
