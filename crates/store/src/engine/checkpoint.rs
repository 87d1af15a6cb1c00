//! Checkpoints: the metadata pages of one moment, made whole on the medium so that the journal before it can go.
//!
//! 1. Under all locks, for as long as it takes to copy a list: the dirty pages are captured, and where the journal ends
//!    then (the tail to be). Nothing is being overwritten at that moment. Changes may be pending that the pages
//!    contain already.
//! 2. While everything runs on: the payload that was in the journal then goes home, the data files are flushed, and the
//!    pending changes that were captured are appended; where they end is where replay of such changes will begin.
//!    (Urgent batches, which overtake pending ones, are replayed from the tail on.)
//! 3. Captured pages that the checkpoint before does not know, nodes in places that were free then, are written home
//!    and flushed: nobody would look at them if this checkpoint did not end.
//! 4. The other captured pages are appended to the journal, then a record that ends the checkpoint. From here on
//!    recovery would take them from there.
//! 5. They are written home and flushed; the superblock lets go of the journal before the tail.

use super::superblock::Superblock;
use super::{Engine, Meta};
use crate::journal::{BatchKind, Place};
use crate::pages::{Captured, PageFile, PageKey, Pages, sealed};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Block, File, SharedSlice};
use parking_lot::MutexGuard;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Pages per journal batch.
const PAGES_PER_BATCH: usize = 64;
/// Payload blocks taken home at a time.
pub(super) const LOGGED_ROUND: usize = 256;

impl Engine {
    /// Whether dirty pages ask for a checkpoint: they take at most a quarter of the cache, because what a checkpoint
    /// has captured and what is changed meanwhile are both in memory, and their images at most a quarter of the ring.
    pub(super) fn is_checkpoint_due(&self, pages: &Pages) -> bool {
        let by_ring = (self.ring as usize / 4 / (BLOCK_SIZE + 64)).max(64);
        let by_cache = (self.options.metadata_cache / BLOCK_SIZE / 4).max(64);
        pages.dirty_known() > by_ring || pages.dirty() > by_cache
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
        let Capture { mut next, pages, mut payload, batches } = self.capture()?;
        let Captured { known: images, unknown } = pages;

        while !payload.is_empty() {
            if self.write_logged(LOGGED_ROUND)? == 0 {
                // What is left is not durable in the journal yet, and may not go home before it is.
                self.sync_all_data()?;
                self.append_pending(&mut self.commit.lock())?;
            }
            let meta = self.meta.lock();
            payload.retain(|block, slice| meta.logged.get(block).is_some_and(|now| same(now, slice)));
        }
        // Newer content of such a block may be on its way home instead: let that arrive.
        drop(self.gate.lock());
        self.files.write_out();
        self.sync_all_data()?;
        self.keep_home(&unknown);
        write_home(&self.page_files, &unknown).map_err(|error| self.stop(error))?;
        drop(unknown);

        let mut commit = self.commit.lock();
        self.append_pending(&mut commit)?;
        next.ordered = commit.ordered.take().ok_or_else(|| {
            self.stop(Error::new(ErrorKind::Io, "changes captured by a checkpoint did not become durable"))
        })?;
        if next.map_length > commit.superblock.map_length {
            // The record below will vouch for this length, also when no page of the map is among the images.
            self.page_files[PageFile::Map as usize]
                .sync()
                .during(|| "flushing the map".into())
                .map_err(|error| self.stop(error))?;
        }
        for batch in images.chunks(PAGES_PER_BATCH) {
            let body = encode_pages(batch);
            self.append(&mut commit, BatchKind::Pages, &[&body])?;
            // Flushes and snapshots go between.
            MutexGuard::bump(&mut commit);
        }
        let record = CheckpointRecord::of(&next).encode();
        self.append(&mut commit, BatchKind::Checkpoint, &[&record])?;
        drop(commit);

        self.keep_home(&images);
        write_home(&self.page_files, &images).map_err(|error| self.stop(error))?;
        drop(images);

        let mut commit = self.commit.lock();
        next.sequence = commit.superblock.sequence;
        next.clean = clean && commit.batches == batches;
        if next.clean {
            // Nothing but the checkpoint itself lies behind the tail: let go of that too.
            next.tail = commit.journal.head();
            next.ordered = next.tail;
        }
        next.write(&*self.superblock_file).map_err(|error| self.stop(error))?;
        commit.superblock = next;
        commit.journal.release(next.tail);
        self.journal_tail.store(next.tail.position, Ordering::Release);
        self.counters.checkpoints.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// The moment of the checkpoint.
    fn capture(&self) -> Result<Capture> {
        let _fetch = self.bring_in(Meta::survey_capture);
        let _gate = self.gate.lock();
        let mut commit = self.commit.lock();
        let _through = self.through.write();
        // Whoever overwrites in place from now on announces it behind the tail.
        self.permits.lock().clear();
        let mut guard = self.meta.lock();
        let meta = &mut *guard;
        meta.catalog.store(&mut meta.pages)?;
        meta.data.store_summaries(&mut meta.pages)?;
        meta.map.store_summaries(&mut meta.pages)?;
        meta.captured = Some(meta.pending.len());
        meta.note_view();
        commit.ordered = None;
        let next = Superblock {
            tail: commit.journal.head(),
            incarnation: commit.journal.incarnation(),
            data_regions: meta.data.regions(),
            map_regions: meta.map.regions(),
            map_length: meta.map.counts().backed,
            catalog_slots: meta.catalog.slots(),
            next_id: meta.catalog.next_id(),
            ..commit.superblock
        };
        Ok(Capture { next, pages: meta.pages.capture(), payload: meta.logged.clone(), batches: commit.batches })
    }
}

/// What a checkpoint holds on to.
struct Capture {
    next: Superblock,
    pages: Captured,
    /// Payload in the journal before the tail that is not home.
    payload: BTreeMap<u64, SharedSlice>,
    batches: u64,
}

fn same(a: &SharedSlice, b: &SharedSlice) -> bool {
    std::ptr::eq(a.as_ptr(), b.as_ptr())
}

fn encode_pages(pages: &[(PageKey, Arc<Block>)]) -> Vec<u8> {
    let mut body = Vec::with_capacity(pages.len() * (BLOCK_SIZE + 8));
    for (key, page) in pages {
        body.extend_from_slice(&key.raw().to_le_bytes());
        body.extend_from_slice(&sealed(page).0);
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
        let run: Vec<Block> = pages[at..end].iter().map(|(_, page)| sealed(page)).collect();
        let slices = [bytemuck::cast_slice(&run)];
        let file = &files[key.file() as usize];
        file.write_at(&slices, key.offset(), false).during(|| format!("writing {key} home"))?;
        file.write_out(key.offset(), (run.len() * BLOCK_SIZE) as u64, true);
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

/// What the record at the end of a checkpoint says: nine numbers of eight bytes.
pub(super) struct CheckpointRecord {
    /// From where urgent batches are replayed, and images looked for.
    pub tail: Place,
    /// From where all batches are replayed.
    pub ordered: Place,
    pub data_regions: u64,
    pub map_regions: u64,
    pub map_length: u64,
    pub catalog_slots: u64,
    pub next_id: u64,
}

impl CheckpointRecord {
    const WORDS: usize = 9;

    fn of(superblock: &Superblock) -> Self {
        Self {
            tail: superblock.tail,
            ordered: superblock.ordered,
            data_regions: superblock.data_regions,
            map_regions: superblock.map_regions,
            map_length: superblock.map_length,
            catalog_slots: superblock.catalog_slots,
            next_id: superblock.next_id,
        }
    }

    fn encode(&self) -> Vec<u8> {
        let words: [u64; Self::WORDS] = [
            self.tail.position,
            self.tail.sequence,
            self.ordered.position,
            self.ordered.sequence,
            self.data_regions,
            self.map_regions,
            self.map_length,
            self.catalog_slots,
            self.next_id,
        ];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        if body.len() != 8 * Self::WORDS {
            return None;
        }
        let word = |i: usize| u64::from_le_bytes(body[8 * i..8 * i + 8].try_into().expect("eight bytes"));
        Some(Self {
            tail: Place { position: word(0), sequence: word(1) },
            ordered: Place { position: word(2), sequence: word(3) },
            data_regions: word(4),
            map_regions: word(5),
            map_length: word(6),
            catalog_slots: word(7),
            next_id: word(8),
        })
    }
}
