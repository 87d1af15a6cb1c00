//! Provides the resources that work on the state lacks: pages of metadata, file space for them, a longer file, a
//! commit.
//!
//! 1. This work runs without the lock of the state; its results are checked again under the lock.
//! 2. A page is read by one thread at a time, and only while it is not in memory: so the page read is current. If its
//!    table is allocated meanwhile, what was read is dropped.
//! 3. A known hole was a hole when the last commit ended, and has not been written since.

use super::SeSparse;
use super::cache::{Kind, PageBytes, PageKey};
use super::entry::{GRAIN, Grain, TABLE_SPAN, Table};
use super::header::{Area, PAGE_SECTORS, TABLE_PAGES};
use super::state::{LayerState, Need, Step, table_page};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Buffer};
use parking_lot::MutexGuard;
use std::ops::Range;

/// The number of rounds after which work on the state fails: if one step needs some thousand pages, the cache thrashes.
const ROUNDS_MAX: usize = 100_000;

/// The number of pages for which space is allocated per call: each call costs as much as writing some hundred
/// kilobytes.
const ROOM_PAGES: u64 = 64;
/// Grains by which the file grows at a time: 64 MiB, without allocated space.
const GROWTH: u64 = 4 * TABLE_SPAN / GRAIN;

impl SeSparse {
    /// Runs `work` until it no longer lacks a resource.
    pub(super) fn settle<T>(&self, mut work: impl FnMut(&mut LayerState) -> Step<T>) -> Result<T> {
        let mut state = self.state.lock();
        for _ in 0..ROUNDS_MAX {
            let need = match work(&mut state) {
                Ok(done) => return Ok(done),
                Err(need) => need,
            };
            if let Need::Page(key) = need {
                state = self.load(key, state)?;
                continue;
            }
            drop(state);
            match need {
                Need::Failed(error) => return Err(error),
                Need::Room(key) => self.back(key)?,
                Need::TableRoom(table) => self.back_table(table)?,
                Need::Growth => self.grow()?,
                Need::Full => {
                    return Err(Error::new(ErrorKind::NoSpace, format!("{}: every grain is allocated", self.name)));
                }
                Need::Commit | Need::Page(_) => self.commit_at_once()?,
            }
            state = self.state.lock();
        }
        Err(Error::new(ErrorKind::Busy, format!("{}: the memory for its tables is too small", self.name)))
    }

    /// Byte offset of a page.
    pub(super) fn page_offset(&self, key: PageKey) -> u64 {
        self.area(key.kind()).start() + key.index() * BLOCK_SIZE as u64
    }

    /// Reads a page; if a table is read sequentially, also the rest of the table.
    fn load<'a>(&'a self, key: PageKey, mut state: MutexGuard<'a, LayerState>) -> Result<MutexGuard<'a, LayerState>> {
        if state.loading.contains_key(&key) {
            self.loaded.wait(&mut state);
            return Ok(state);
        }
        let mut count = 1;
        if key.before_in_table().is_some_and(|before| state.cache.contains(before)) {
            let most = TABLE_PAGES - key.index() % TABLE_PAGES;
            let wanted = |key: PageKey| !state.cache.contains(key) && !state.loading.contains_key(&key);
            count += (1..most).take_while(|by| wanted(key.plus(*by))).count() as u64;
        }
        state.loads += 1;
        let number = state.loads;
        state.loading.extend((0..count).map(|by| (key.plus(by), number)));
        let offset = self.page_offset(key);
        let bytes = offset..offset + count * BLOCK_SIZE as u64;
        let hole = &state.holes[key.kind() as usize];
        let known = hole.start <= bytes.start && bytes.end <= hole.end;
        let settled = state.settled;
        let read = MutexGuard::unlocked(&mut state, || -> Result<_> {
            let mut buffer = Buffer::zeroed(count as usize);
            let hole = if known { None } else { self.find_hole(key.kind(), &bytes)? };
            if !known && hole.is_none() {
                let read = self.read_metadata(&mut buffer, offset);
                if read.is_err() && count > 1 {
                    // The pages after the requested one are only read ahead.
                    buffer = Buffer::zeroed(1);
                    self.read_metadata(&mut buffer, offset)?;
                } else {
                    read?;
                }
            }
            Ok((buffer, hole))
        });
        // If a table was allocated meanwhile, the bytes that were just read from the file are older than its pages,
        // even if the pages were written and evicted since: no slot named the table before.
        let mut is_current = [false; TABLE_PAGES as usize];
        for (by, is_current) in (0..count).zip(&mut is_current) {
            *is_current = state.loading.get(&key.plus(by)) == Some(&number);
            if *is_current {
                state.loading.remove(&key.plus(by));
            }
        }
        self.loaded.notify_all();
        let (buffer, hole) = read?;
        if let Some(hole) = hole.filter(|_| state.settled == settled) {
            state.holes[key.kind() as usize] = hole;
        }
        for ((by, page), is_current) in (0..).zip(buffer.chunks_exact(BLOCK_SIZE)).zip(is_current) {
            if is_current {
                state.cache.insert(key.plus(by), PageBytes::new(Buffer::copy_of(page)));
            }
        }
        Ok(state)
    }

    /// The hole of the file around a range, within one area, if there is one. New pages usually are in holes, and
    /// reading holes through the page cache would fill the cache with zeros by read-ahead.
    pub(super) fn find_hole(&self, kind: Kind, bytes: &Range<u64>) -> Result<Option<Range<u64>>> {
        if !self.overlay.is_empty() {
            return Ok(None);
        }
        let found = self.file.next_allocated(bytes.start);
        let found = found.during(|| format!("looking for holes in {}", self.name))?;
        let end = found.map_or(u64::MAX, |found| found.start).min(self.area(kind).bytes().end);
        Ok((bytes.end <= end).then_some(bytes.start..end))
    }

    fn area(&self, kind: Kind) -> Area {
        match kind {
            Kind::Bitmap => self.layout.bitmap,
            Kind::Backmap => self.layout.backmap,
            Kind::Table => self.layout.tables,
            Kind::Directory => self.layout.directory,
        }
    }

    /// Allocates the space of a page and its neighbours.
    fn back(&self, key: PageKey) -> Result<()> {
        let first = PageKey::new(key.kind(), key.index() - key.index() % ROOM_PAGES);
        let count = self.back_pages(first)?;
        let mut state = self.state.lock();
        for by in 0..count {
            state.cache.set_backed(first.plus(by));
        }
        Ok(())
    }

    fn back_table(&self, table: Table) -> Result<()> {
        let first = table_page(table, 0);
        let tables = self.back_pages(first)? / TABLE_PAGES;
        self.state.lock().table_room = table.0..table.0 + tables as u32;
        Ok(())
    }

    /// Allocates the space of pages from `first` on; returns the number of pages.
    fn back_pages(&self, first: PageKey) -> Result<u64> {
        let pages = self.area(first.kind()).size / PAGE_SECTORS;
        let count = ROOM_PAGES.min(pages.saturating_sub(first.index()));
        self.reserve(self.page_offset(first), count * BLOCK_SIZE as u64)?;
        Ok(count)
    }

    fn reserve(&self, offset: u64, length: u64) -> Result<()> {
        match self.file.reserve(offset, length) {
            // This file system cannot reserve space, so a later write may fail for lack of it.
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => Ok(()),
            other => other.during(|| format!("reserving {length} bytes for tables of {}", self.name)),
        }
    }

    /// Extends the file.
    fn grow(&self) -> Result<()> {
        let _one_at_a_time = self.length.lock();
        let (fresh, length, limit) = {
            let state = self.state.lock();
            (state.space.fresh, state.space.length, state.space.limit)
        };
        if fresh < length {
            return Ok(());
        }
        let longer = (length + GROWTH).min(limit);
        let bytes = self.grain_offset(Grain(longer))?;
        // A shrink truncates the file step by step, so the file may still be longer than the recorded length.
        let present = self.file.len().during(|| format!("querying the length of {}", self.name))?;
        if present < bytes {
            self.file.set_len(bytes).during(|| format!("growing {} to {bytes} bytes", self.name))?;
        }
        let mut state = self.state.lock();
        state.space.length = longer;
        state.readable = state.readable.max(longer);
        Ok(())
    }
}
