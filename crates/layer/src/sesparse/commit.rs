//! Making changes durable, by the order of writes and without a journal.
//!
//! ```text
//! 0. the mark of regions touched for the first time             durable before any write of step 1
//! 1. bitmap, backmap, new tables, the count of tables   + payload, which was written to the file before
//!    flush
//! 2. tables, slots of the directory
//!    flush
//! ```
//!
//! Why this order suffices without a journal, for a power cut at any point:
//!
//! * Each entry is 8 bytes within a sector and valid by itself: no change needs two entries to appear together. So
//!   pages are written as a whole, and a torn write leaves valid entries.
//! * A table entry for a grain becomes durable in step 2; the grain's data, its bitmap bit and its owner in step 1.
//! * The bit and the owner of a grain are cleared only by a commit that begins after the table without the grain is
//!   durable ([`crate::retirement`]).
//! * A slot for a new table becomes durable in step 2; the table and the count in step 1. Until a slot names the table,
//!   its entries have no effect.
//! * The journal stays empty and `replayJournal` zero, so that no reader has to replay transactions that it cannot
//!   verify.
//!
//! A power cut between the steps leaves allocated grains and tables that nothing names; the mark limits the search for
//! these grains.

use super::cache::{Captured, Kind};
use super::entry::GrainRun;
use super::header::{PAGE_BITS, PAGE_ENTRIES, Volatile};
use super::state::by_bitmap_page;
use super::touched::Touched;
use super::{Options, SeSparse};
use crate::group_commit::Turn;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::{BLOCK_SIZE, Buffer};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// The most pages in one write.
const PAGES_MAX: usize = 512;
/// Pages of the backmap that freeing grains may dirty before the number of dirty pages is checked again.
const RELEASED_PAGES: u64 = 32;
/// The most commits at closing, while readers release further retired grains.
const CLOSING_COMMITS: usize = 64;

/// What one commit writes.
struct Work {
    pages: Vec<Captured>,
    header: Option<Volatile>,
    mark: Option<(Touched, u64)>,
}

impl SeSparse {
    /// Makes a commit that begins after this call, or waits for one that another thread makes.
    pub(super) fn commit_for_flush(&self) -> Result<()> {
        match self.commits.turn_for(self.commits.call()) {
            // The flush waited while the image was closed, and closing has made everything durable.
            Some(_) if self.closed.load(Ordering::Acquire) => Ok(()),
            Some(mut turn) => self.commit(&mut turn),
            None => Ok(()),
        }
    }

    /// Makes a commit even if no flush is waiting.
    pub(super) fn commit_at_once(&self) -> Result<()> {
        self.commit(&mut self.commits.turn())
    }

    /// Makes a commit, and then frees the retired grains that no operation uses any more.
    pub(super) fn commit(&self, turn: &mut Turn<'_, Buffer>) -> Result<()> {
        self.check_changeable()?;
        turn.begin();
        let work = self.capture();
        if let Err(error) = self.write_work(turn, &work) {
            return Err(self.stop(error));
        }
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            state.settled += 1;
            for page in &work.pages {
                let end = self.page_offset(page.key) + BLOCK_SIZE as u64;
                let hole = &mut state.holes[page.key.kind() as usize];
                if hole.contains(&(end - 1)) {
                    hole.start = end;
                }
            }
            state.cache.settled(&work.pages);
            state.retirement.complete_commit();
        }
        turn.complete();
        self.free_ready();
        Ok(())
    }

    /// Captures all dirty pages, the header and the mark at one instant.
    fn capture(&self) -> Work {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.mark_dropped();
        let mut marked = std::mem::take(&mut state.mark_dirty);
        if let Some(touched) = &mut state.touched {
            for key in state.cache.dirty() {
                marked |= match key.kind() {
                    Kind::Bitmap => touched.insert(key.index() * PAGE_BITS),
                    Kind::Backmap => touched.insert(key.index() * PAGE_ENTRIES),
                    _ => false,
                };
            }
        }
        let mark = state.touched.clone().filter(|_| marked).map(|touched| (touched, state.header.next_sequence));
        let header = std::mem::take(&mut state.header_dirty).then_some(state.header);
        state.retirement.begin_commit(&self.epochs);
        Work { pages: state.cache.capture(), header, mark }
    }

    fn write_work(&self, block: &mut Buffer, work: &Work) -> Result<()> {
        if work.mark.is_some() || work.header.is_some() {
            self.write_block(block, work.header, work.mark.as_ref())?;
        }
        let early = |page: &Captured| page.fresh || matches!(page.key.kind(), Kind::Bitmap | Kind::Backmap);
        let (first, second): (Vec<&Captured>, Vec<&Captured>) = work.pages.iter().partition(|page| early(page));
        self.write_pages(&first)?;
        let unsynced = self.unsynced.swap(false, Ordering::AcqRel);
        if unsynced || !first.is_empty() || work.header.is_some() {
            self.sync()?;
        }
        if !second.is_empty() {
            self.write_pages(&second)?;
            self.sync()?;
        }
        Ok(())
    }

    /// Writes the first block of the file, durably if the mark has changed: later writes must not become durable before
    /// the mark.
    fn write_block(&self, block: &mut Buffer, header: Option<Volatile>, mark: Option<&(Touched, u64)>) -> Result<()> {
        if let Some(header) = header {
            header.encode(&mut block[SECTOR as usize..]);
        }
        if let Some((touched, sequence)) = mark {
            touched.encode(block, *sequence);
        }
        let written = self.file.write_at(&[block], 0, mark.is_some());
        written.during(|| format!("writing the headers of {}", self.name))
    }

    /// Writes pages; adjacent pages are written by one call.
    fn write_pages(&self, pages: &[&Captured]) -> Result<()> {
        let adjoin = |one: &&Captured, other: &&Captured| one.key.plus(1) == other.key;
        for run in pages.chunk_by(adjoin).flat_map(|run| run.chunks(PAGES_MAX)) {
            let slices: Vec<&[u8]> = run.iter().map(|page| page.bytes.bytes()).collect();
            let offset = self.page_offset(run[0].key);
            let written = self.file.write_at(&slices, offset, false);
            written.during(|| format!("writing {} pages of tables at {offset} of {}", run.len(), self.name))?;
        }
        Ok(())
    }

    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync().during(|| format!("flushing {}", self.name))
    }

    /// Stops all changes after a failed commit or flush: it is unknown which writes are durable.
    pub(super) fn stop(&self, error: Error) -> Error {
        let error = self.commits.stop_after(error);
        tracing::error!(image = %self.name, %error, "writes stopped: the state of the storage device is unknown");
        error
    }

    /// Frees the retired grains that are ready: clears their bits, which the next commit writes. The caller holds the
    /// turn to commit. Ends when many pages are dirty, to leave room in the cache for the next operations. A failure is
    /// only logged: the commit is durable, and the next one tries again to free the grains.
    fn free_ready(&self) {
        loop {
            let mut ready: Vec<GrainRun> = Vec::new();
            {
                let mut state = self.state.lock();
                if state.cache.is_half_pressed() {
                    return;
                }
                let mut left = RELEASED_PAGES;
                while left > 0
                    && let Some(grains) = state.retirement.next_ready(&self.epochs, left * PAGE_ENTRIES)
                {
                    left = left.saturating_sub(1 + (grains.end - grains.start) / PAGE_ENTRIES);
                    ready.push(grains.into());
                }
            }
            if ready.is_empty() {
                return;
            }
            if let Err(error) = self.punch_runs(&ready) {
                // The grains become free even without a punch: a new grain is written as a whole.
                tracing::warn!(image = %self.name, %error, "space is not returned to the file system");
            }
            let mut left: VecDeque<GrainRun> = ready.into_iter().flat_map(by_bitmap_page).collect();
            while let Some(part) = left.front().copied() {
                if let Err(error) = self.settle(|state| state.release(part)) {
                    tracing::warn!(image = %self.name, %error, "unused grains are not freed");
                    let left = left.into_iter().map(|run| run.start..run.end()).collect();
                    return self.state.lock().retirement.put_back(left);
                }
                left.pop_front();
            }
            self.state.lock().retirement.released();
        }
    }

    /// Punches long runs of freed grains, if the options request that. No other thread can allocate these runs before
    /// they are released.
    fn punch_runs(&self, runs: &[GrainRun]) -> Result<()> {
        let Options { punch: Some(least), .. } = self.options else { return Ok(()) };
        let grain = super::entry::GRAIN;
        for run in runs.iter().filter(|run| run.count * grain >= least) {
            let offset = self.grain_offset(super::entry::Grain(run.start))?;
            let length = run.count * grain;
            match self.file.punch(offset, length) {
                Err(error) if error.kind() == std::io::ErrorKind::Unsupported => return Ok(()),
                other => other.during(|| format!("punching {length} bytes at {offset} of {}", self.name))?,
            }
        }
        Ok(())
    }

    /// Flushes, removes the mark, and truncates free space at the end. Later changes fail.
    pub(super) fn close_clean(&self) -> Result<()> {
        // Wiping, shrinking and checking read this flag, and end.
        self.closing.store(true, Ordering::Release);
        let _no_work = self.maintenance.lock();
        let _alone = self.gate.write();
        let mut turn = self.commits.turn();
        if self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let closed = self.write_closed(&mut turn);
        match closed {
            Ok(()) => self.closed.store(true, Ordering::Release),
            Err(_) => self.closing.store(false, Ordering::Release),
        }
        closed
    }

    fn write_closed(&self, turn: &mut Turn<'_, Buffer>) -> Result<()> {
        // The first commit frees retired grains, and the next one writes the changed bitmap. Meanwhile readers may end,
        // so that more grains become free.
        for _ in 0..CLOSING_COMMITS {
            self.commit(turn)?;
            if self.state.lock().cache.dirty().is_empty() {
                break;
            }
        }
        self.cut_end()?;
        let (header, mark) = {
            let mut state = self.state.lock();
            let waiting = state.retirement.waiting().next().is_some() || !state.cache.dirty().is_empty();
            let sequence = state.header.next_sequence;
            let left = state.suspect.clone().unwrap_or_else(|| Touched::new(self.layout.grains_max()));
            // If readers still use retired grains, these stay allocated, and their regions stay marked.
            if let Some(touched) = state.touched.as_mut().filter(|_| !waiting) {
                *touched = left;
            }
            (state.header, state.touched.clone().map(|touched| (touched, sequence)))
        };
        let written = self.write_block(turn, Some(header), mark.as_ref()).and_then(|()| self.sync());
        written.map_err(|error| self.stop(error))
    }
}

/// The error of work that its caller cancelled.
pub(super) fn interrupted(name: &str, what: &str) -> Error {
    Error::new(ErrorKind::Interrupted, format!("{name}: {what} was stopped; its changes so far are kept"))
}
