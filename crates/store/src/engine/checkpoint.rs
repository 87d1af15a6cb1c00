//! Checkpoints: the metadata pages of one moment, made whole on the medium so that the journal before it can go.
//!
//! 1. Payload goes home and the data files are flushed, while everything runs on.
//! 2. Under the gate and the commit lock, briefly: the rest of the payload, one more flush, everything pending is
//!    appended, the dirty pages are captured. Nothing is in flight: the pages are the state at this journal position.
//! 3. The captured pages are appended to the journal, then a record that ends the checkpoint. From here on recovery
//!    would take them from there.
//! 4. The pages are written home and flushed; the superblock lets go of the journal before the position.

use super::{Engine, encode_place};
use crate::journal::{BatchKind, Place};
use crate::pages::{PageFile, PageKey};
use crate::{IoContext, Result};
use backend::{BLOCK_SIZE, Block, File};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Pages per journal batch.
const PAGES_PER_BATCH: usize = 128;
/// Payload blocks taken home at a time.
pub(super) const LOGGED_ROUND: usize = 256;

impl Engine {
    /// Dirty pages that ask for a checkpoint: their images take at most a quarter of the ring, and at most half of the
    /// cache.
    pub(super) fn dirty_limit(&self) -> usize {
        let by_ring = self.ring as usize / 4 / (BLOCK_SIZE + 64);
        by_ring.min(self.options.metadata_cache / BLOCK_SIZE / 2).max(64)
    }

    /// A checkpoint, unless another thread has just made one that leaves room.
    pub(super) fn checkpoint_if_needed(&self) -> Result<()> {
        let before = self.counters.checkpoints.load(Ordering::Acquire);
        let guard = self.checkpoint.lock();
        if self.counters.checkpoints.load(Ordering::Acquire) != before {
            return Ok(());
        }
        self.checkpoint_locked(false)?;
        drop(guard);
        Ok(())
    }

    /// A checkpoint now.
    pub fn checkpoint(&self) -> Result<()> {
        let _guard = self.checkpoint.lock();
        self.checkpoint_locked(false)
    }

    pub(super) fn checkpoint_locked(&self, clean: bool) -> Result<()> {
        self.check_running()?;
        while self.write_logged(LOGGED_ROUND)? == LOGGED_ROUND {}
        self.sync_data()?;

        let gate = self.gate.lock();
        let mut commit = self.commit.lock();
        while self.write_logged(LOGGED_ROUND)? > 0 {}
        let (mut guard, through) = loop {
            let through = self.sync_data_quiet()?;
            self.append_pending(&mut commit)?;
            // Some changes need no more than `meta` (new space, deleted trees): one may have slipped in since. Captured
            // and still to be appended, it would be carried out twice by recovery.
            let guard = self.meta.lock();
            if guard.pending.is_empty() {
                break (guard, through);
            }
        };
        let mut next = commit.superblock;
        let images = {
            let meta = &mut *guard;
            debug_assert!(meta.logged.is_empty());
            meta.catalog.store(&mut meta.pages)?;
            meta.data.store_summaries(&mut meta.pages)?;
            meta.map.store_summaries(&mut meta.pages)?;
            next.data_regions = meta.data.regions();
            next.map_regions = meta.map.regions();
            next.map_length = meta.map.counts().backed;
            next.catalog_slots = meta.catalog.slots();
            next.next_id = meta.catalog.next_id();
            meta.pages.capture()
        };
        drop(guard);
        drop(through);
        let place = commit.journal.head();
        next.tail = place;
        next.incarnation = commit.journal.incarnation();
        drop(gate);
        if next.map_length > commit.superblock.map_length {
            // The record below will vouch for this length, also when no page of the map is among the images.
            let map = Arc::clone(self.meta.lock().pages.file(PageFile::Map));
            map.sync().during(|| "flushing the map".into()).map_err(|error| self.stop(error))?;
        }
        for batch in images.chunks(PAGES_PER_BATCH) {
            let body = encode_pages(batch);
            self.append(&mut commit.journal, BatchKind::Pages, &[&body])?;
            // Flushes may go between.
            parking_lot::MutexGuard::bump(&mut commit);
        }
        let mut record = encode_place(place).to_vec();
        record.extend_from_slice(&next.data_regions.to_le_bytes());
        record.extend_from_slice(&next.map_regions.to_le_bytes());
        record.extend_from_slice(&next.map_length.to_le_bytes());
        record.extend_from_slice(&next.catalog_slots.to_le_bytes());
        record.extend_from_slice(&next.next_id.to_le_bytes());
        self.append(&mut commit.journal, BatchKind::Checkpoint, &[&record])?;
        drop(commit);

        let files = {
            let meta = self.meta.lock();
            PageFile::ALL.map(|file| Arc::clone(meta.pages.file(file)))
        };
        write_home(&files, &images).map_err(|error| self.stop(error))?;
        drop(images);

        let mut commit = self.commit.lock();
        next.sequence = commit.superblock.sequence;
        next.clean = clean && commit.journal.head().position == place.position;
        next.write(&*self.superblock_file).map_err(|error| self.stop(error))?;
        commit.superblock = next;
        commit.journal.release(place);
        self.journal_tail.store(place.position, Ordering::Release);
        self.counters.checkpoints.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
}

fn encode_pages(pages: &[(PageKey, Arc<Block>)]) -> Vec<u8> {
    let mut body = Vec::with_capacity(pages.len() * (BLOCK_SIZE + 8));
    for (key, page) in pages {
        body.extend_from_slice(&key.raw().to_le_bytes());
        body.extend_from_slice(&page.0);
    }
    body
}

/// Writes pages to their files, neighbours together, and flushes the files.
pub(super) fn write_home(files: &[Arc<dyn File>; PageFile::COUNT], pages: &[(PageKey, Arc<Block>)]) -> Result<()> {
    let mut touched = [false; PageFile::COUNT];
    let mut at = 0;
    while at < pages.len() {
        let (key, _) = pages[at];
        let mut end = at + 1;
        while end < pages.len()
            && end - at < 512
            && pages[end].0.file() == key.file()
            && pages[end].0.number() == pages[end - 1].0.number() + 1
        {
            end += 1;
        }
        let slices: Vec<&[u8]> = pages[at..end].iter().map(|(_, page)| page.0.as_slice()).collect();
        files[key.file() as usize].write_at(&slices, key.offset(), false).during(|| format!("writing {key} home"))?;
        touched[key.file() as usize] = true;
        at = end;
    }
    for file in PageFile::ALL {
        if touched[file as usize] {
            files[file as usize].sync().during(|| format!("flushing {}", file.name()))?;
        }
    }
    Ok(())
}

/// What the record at the end of a checkpoint says.
pub(super) struct CheckpointRecord {
    pub place: Place,
    pub data_regions: u64,
    pub map_regions: u64,
    pub map_length: u64,
    pub catalog_slots: u64,
    pub next_id: u64,
}

impl CheckpointRecord {
    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        if body.len() != 56 {
            return None;
        }
        let word = |i: usize| u64::from_le_bytes(body[8 * i..8 * i + 8].try_into().expect("eight bytes"));
        Some(Self {
            place: Place { position: word(0), sequence: word(1) },
            data_regions: word(2),
            map_regions: word(3),
            map_length: word(4),
            catalog_slots: word(5),
            next_id: word(6),
        })
    }
}
