//! Checkpoints: write the metadata pages of one moment to the medium, so that the journal before that moment can be
//! released.
//!
//! 1. Under all locks, for a short time: captures the dirty pages, and the end of the journal as the future tail. No
//!    in-place overwrite is under way then. The pages may contain changes that are still pending.
//! 2. While requests continue: collects the captured pages ([`Capturing`]), writes journalled payload to its blocks,
//!    flushes the data files, and appends the pending changes that the pages contain. Replay will begin with the first
//!    change after these. (Urgent batches, which overtake pending changes, are replayed from the tail on.)
//! 3. Writes and flushes those captured pages that the previous checkpoint does not refer to (nodes at places that were
//!    free then). Recovery does not read them unless this checkpoint is committed.
//! 4. Writes the other captured pages to the images file and flushes it.
//! 5. Commits the checkpoint with one write of the superblock, which names the images, releases the journal before the
//!    tail, and contains the new sizes. From here on recovery reads the pages from the images.
//! 6. Writes the pages to their places and flushes them. A second write of the superblock says that no images are
//!    needed.
//!
//! Only step 2 appends to the journal, and only changes that were pending anyway. A checkpoint therefore needs only
//! ring space that was admitted before, and a reserve for padding.

use super::log::{CheckpointRecord, Superblock};
use super::metadata::Pending;
use super::{Engine, Meta};
use crate::pages::{Captured, Capturing, PageFile, PageKey, write_home};
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{Block, SharedSlice};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Journalled payload blocks written to the data files at a time.
pub(super) const LOGGED_ROUND: usize = 256;
/// The pause before journalled payload is tried again whose blocks are in use.
const TURN: Duration = Duration::from_millis(1);

/// The purpose of a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The datastore stays in use.
    GoOn,
    /// The datastore is being closed.
    Close,
    /// Recovery ends: the checkpoint is the new starting point. The changes that recovery made are in the pages, and
    /// are not appended.
    Recover,
}

impl Engine {
    /// Whether enough has changed for a checkpoint. Grows the images file where that allows larger checkpoints.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        self.grow_images(0);
        self.log.admission.is_checkpoint_due()
    }

    /// Makes a checkpoint, unless another thread has made one meanwhile.
    pub(super) fn checkpoint_if_needed(&self) -> Result<()> {
        let before = self.counters.checkpoints.load(Ordering::Acquire);
        let guard = self.log.lock_checkpoints();
        if self.counters.checkpoints.load(Ordering::Acquire) != before {
            return Ok(());
        }
        self.checkpoint_locked(Purpose::GoOn)?;
        drop(guard);
        Ok(())
    }

    /// Makes a checkpoint now.
    pub fn checkpoint(&self) -> Result<()> {
        let _guard = self.log.lock_checkpoints();
        self.checkpoint_locked(Purpose::GoOn)
    }

    pub(super) fn checkpoint_locked(&self, purpose: Purpose) -> Result<()> {
        self.check_running()?;
        self.check_owner()?;
        let captured = self.capture(purpose)?;
        // The captured pages belong to this checkpoint, so a second attempt would leave them out: a failure stops the
        // store.
        self.commit_captured(captured, purpose).map_err(|error| self.stop(error))
    }

    fn commit_captured(&self, captured: Capture, purpose: Purpose) -> Result<()> {
        let Capture { mut next, pages, mut payload, batches, carried_out } = captured;
        let Captured { known: images, unknown } = pages.collect(|collect_part| {
            let mut meta = self.meta.lock();
            collect_part(&mut meta.pages);
            MutexGuard::unlock_fair(meta);
        });

        let mut waits = false;
        while !payload.is_empty() {
            if self.write_logged(LOGGED_ROUND)? > 0 {
                waits = false;
            } else {
                if waits {
                    // A step of data reduction reads the blocks of the payload, or a slow medium writes them.
                    crate::sync::thread::sleep(TURN);
                }
                // The remaining payload is not durable in the journal yet, and must not be written to its blocks before
                // it is.
                self.sync_all_data()?;
                self.append_pending(&mut self.log.lock())?;
                waits = true;
            }
            let meta = self.meta.lock();
            payload.retain(|block, slice| meta.logged.get(block).is_some_and(|now| same(now, slice)));
        }
        // Newer content of a payload block may be in write-back: locking the gate waits for that write.
        drop(self.writeback.lock());
        self.files.write_out();
        self.sync_all_data()?;
        self.meta.keep_home(&unknown);
        write_home(self.meta.files(), &unknown)?;
        drop(unknown);

        let mut commit = self.log.lock();
        self.append_pending(&mut commit)?;
        next.record.ordered = commit.take_captured_end().ok_or_else(|| {
            // A failure here or below stops the store while this thread holds the journal lock, so that no other thread
            // appends.
            self.stop(Error::new(ErrorKind::Io, "changes captured by a checkpoint did not become durable"))
        })?;
        // No other thread writes the superblock while the checkpoint lock is held.
        next.sequence = commit.superblock().sequence;
        next.checkpoint = commit.superblock().checkpoint + 1;
        let grown = next.record.map_length > commit.superblock().record.map_length;
        drop(commit);
        if grown {
            // The new superblock names the new length of the map file, so the file must be durable first. Without
            // images of map pages, no later step flushes it.
            self.meta.file(PageFile::Map).sync().during(|| "flushing the map".into())?;
        }
        if !images.is_empty() {
            self.commit_images(&mut next, &images)?;
        }
        let mut commit = self.log.lock();
        next.clean = purpose == Purpose::Close && commit.batches() == batches;
        if next.clean {
            // Nothing but the appends of the checkpoint itself follows the tail, so they are released too.
            next.record.tail = commit.head();
            next.record.ordered = next.record.tail;
        }
        next.images = None;
        self.log.write_superblock(&mut commit, &mut next).map_err(|error| self.stop(error))?;
        drop(commit);
        self.log.admission.end_checkpoint();
        self.counters.checkpoints.fetch_add(1, Ordering::AcqRel);
        if carried_out.is_empty() { Ok(()) } else { self.retire_committed(carried_out) }
    }

    /// Commits a checkpoint with images, and writes them to their places.
    fn commit_images(&self, next: &mut Superblock, images: &[(PageKey, Arc<Block>)]) -> Result<()> {
        // The file almost always has room already, because its size limits the dirty pages.
        self.reserve_images(images.len() as u64)?;
        self.log.commit_images(next, images)?;
        self.meta.keep_home(images);
        write_home(self.meta.files(), images)
    }

    /// Step 1 of a checkpoint.
    fn capture(&self, purpose: Purpose) -> Result<Capture> {
        let _fetch = self.meta.bring_in(Meta::survey_capture);
        let _gate = self.writeback.lock();
        let mut commit = self.log.lock();
        let _through = self.writeback.stop_through();
        // An in-place overwrite that begins later must be announced after the future tail.
        self.log.end_permits();
        let mut guard = self.meta.lock();
        let meta = &mut *guard;
        meta.catalog.store(&mut meta.pages)?;
        meta.data.store_summaries(&mut meta.pages)?;
        meta.map.store_summaries(&mut meta.pages)?;
        let carried_out = match purpose {
            Purpose::Recover => meta.pending.take_all(),
            Purpose::GoOn | Purpose::Close => Vec::new(),
        };
        meta.pending.capture();
        meta.note_view();
        commit.begin_capture();
        let last = commit.superblock();
        let record = CheckpointRecord {
            tail: commit.head(),
            ordered: last.record.ordered,
            data_regions: meta.data.regions(),
            map_regions: meta.map.regions(),
            map_length: meta.map.counts().backed,
            catalog_slots: meta.catalog.slots(),
            next_id: meta.catalog.next_id(),
        };
        let next = Superblock { record, incarnation: commit.incarnation(), ..last };
        self.count_changes(meta);
        self.log.admission.begin_checkpoint(held_pages(meta));
        let pages = meta.pages.capture();
        self.count_changes(meta);
        Ok(Capture { next, pages, payload: meta.logged.clone(), batches: commit.batches(), carried_out })
    }
}

/// The most pages of the data table that become dirty again when the pending changes are appended, because the flags of
/// held blocks are then cleared. All of them are dirty now: the changes that were pending at the last checkpoint are
/// appended, and later changes have set the flags.
pub(super) fn held_pages(meta: &Meta) -> u64 {
    meta.pending.table_pages().min(meta.pages.dirty_in(PageFile::DataTable))
}

/// The state that step 1 of a checkpoint captures.
struct Capture {
    next: Superblock,
    pages: Capturing,
    /// Journalled payload from before the tail that is not written to its blocks.
    payload: BTreeMap<u64, SharedSlice>,
    batches: u64,
    /// Operations that recovery carried out. The pages contain them; the journal does not.
    carried_out: Vec<Pending>,
}

fn same(a: &SharedSlice, b: &SharedSlice) -> bool {
    std::ptr::eq(a.as_ptr(), b.as_ptr())
}
