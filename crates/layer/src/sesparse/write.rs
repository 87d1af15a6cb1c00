//! Writing and zeroing grains.
//!
//! A step covers the range of one page of a table. It looks up the locations of its grains, allocates adjacent new
//! grains for those without one, writes them without a lock (adjacent grains in one call), and then enters the new
//! grains into the table. Grains with a location are overwritten in place.
//!
//! If two writers write the same grain at once, and the grain has no location yet, each allocates a location. The
//! location entered last is kept: the two writes were not ordered. If one writer zeroes a grain while another
//! overwrites it in place, the grain becomes zeros. Its location is not reused before the overwriting writer drops its
//! epoch: each step enters the current epoch before it looks up locations.

use super::SeSparse;
use super::entry::{Entry, GRAIN, Grain, GrainRun, Owner, TABLE_ENTRIES, TABLE_SPAN, Table};
use super::read::PAGE_SPAN;
use super::state::{LayerState, Need, Step, page_index, table_page};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Buffer, IoMode};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The pause between two attempts to allocate grains while readers still use the retired ones, and the most pauses.
const FULL_PAUSE: Duration = Duration::from_millis(1);
const FULL_PAUSES_MAX: usize = 5_000;
/// Bytes of zeros per write, where space has to be kept.
const ZEROS: usize = 256 << 10;

/// Consecutive grains of a step at consecutive locations.
#[derive(Clone, Copy, Debug)]
struct WritePiece {
    /// First entry, counted from the first entry of the step.
    first: u64,
    place: GrainRun,
    new: bool,
}

struct Plan {
    table: Table,
    pieces: Vec<WritePiece>,
}

impl SeSparse {
    pub(super) fn write_range(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        let end = start + slices.iter().map(|slice| slice.len() as u64).sum::<u64>();
        if start < end && start / PAGE_SPAN == (end - 1) / PAGE_SPAN {
            return self.write_step(start, end - start, slices);
        }
        let mut source = Source::new(slices);
        let mut at = start;
        while at < end {
            let part = ((at / PAGE_SPAN + 1) * PAGE_SPAN).min(end) - at;
            self.write_step(at, part, &source.take(part as usize))?;
            at += part;
        }
        Ok(())
    }

    fn write_step(&self, at: u64, length: u64, slices: &[&[u8]]) -> Result<()> {
        // The last grain of a disk may be partial, and direct I/O requires aligned blocks: then a copy is written.
        let fits = |slice: &&[u8]| aligned(slice.len()) && aligned(slice.as_ptr().addr());
        if !length.is_multiple_of(GRAIN) || (self.file.mode() == IoMode::Direct && !slices.iter().all(fits)) {
            let mut whole = Buffer::zeroed(length.div_ceil(GRAIN) as usize);
            let mut rest: &mut [u8] = &mut whole;
            for slice in slices {
                let (part, behind) = rest.split_at_mut(slice.len());
                part.copy_from_slice(slice);
                rest = behind;
            }
            return self.write_grains(at, &[&whole]);
        }
        self.write_grains(at, slices)
    }

    /// Writes whole grains within one page of a table.
    fn write_grains(&self, at: u64, slices: &[&[u8]]) -> Result<()> {
        let length = slices.iter().map(|slice| slice.len() as u64).sum::<u64>();
        let entries = at % TABLE_SPAN / GRAIN..(at % TABLE_SPAN + length) / GRAIN;
        let mut pauses = 0;
        let (plan, _epoch) = loop {
            // The epoch is entered before any grain is allocated: so a wipe can wait for every writer that has
            // allocated grains and not entered them yet.
            let epoch = self.epochs.enter();
            let mut claimed = Vec::new();
            let planned = self.settle(|state| match Self::plan(state, at / TABLE_SPAN, &entries, &mut claimed) {
                Err(Need::Full) => Ok(None),
                plan => plan.map(Some),
            });
            match planned {
                Ok(Some(plan)) => break (plan, epoch),
                // Retired grains may wait for this epoch, so it is dropped before waiting for free grains.
                Ok(None) => {
                    self.give_back(&claimed);
                    drop(epoch);
                    self.wait_for_grains(&mut pauses)?;
                }
                Err(error) => {
                    self.give_back(&claimed);
                    return Err(error);
                }
            }
        };
        if let Err(error) = self.write_pieces(&plan.pieces, slices) {
            let new: Vec<GrainRun> = plan.pieces.iter().filter(|piece| piece.new).map(|piece| piece.place).collect();
            self.give_back(&new);
            return Err(error);
        }
        self.unsynced.store(true, Ordering::Release);
        if plan.pieces.iter().any(|piece| piece.new) {
            self.settle(|state| enter(state, &plan, entries.start))?;
        }
        Ok(())
    }

    fn write_pieces(&self, pieces: &[WritePiece], slices: &[&[u8]]) -> Result<()> {
        if let [piece] = pieces {
            return self.write_places(piece.place, slices);
        }
        let mut source = Source::new(slices);
        pieces.iter().try_for_each(|piece| {
            let part = source.take((piece.place.count * GRAIN) as usize);
            self.write_places(piece.place, &part)
        })
    }

    /// Waits for free grains if all are allocated or retired: first makes a commit, then waits for readers.
    fn wait_for_grains(&self, pauses: &mut usize) -> Result<()> {
        let hopeless = *pauses > 1 && self.state.lock().retirement.waiting().next().is_none();
        if hopeless || *pauses == FULL_PAUSES_MAX {
            let text = format!("{}: every grain is allocated, and none becomes free; wipe it", self.name);
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        if *pauses > 0 {
            std::thread::sleep(FULL_PAUSE);
        }
        *pauses += 1;
        self.commit_at_once()
    }

    /// Looks up the locations of grains, and allocates grains for those without one. `claimed` keeps allocated grains
    /// over attempts that have to be repeated.
    fn plan(state: &mut LayerState, slot: u64, entries: &Range<u64>, claimed: &mut Vec<GrainRun>) -> Step<Plan> {
        state.need_no_commit()?;
        let table = state.table_for_change(slot)?;
        if claimed.is_empty()
            && let Some(pieces) = state.places(table, entries)?
        {
            announce(state, &pieces);
            return Ok(Plan { table, pieces });
        }
        state.need_backed(table_page(table, entries.start))?;
        let page = state.page(table_page(table, entries.start))?;
        let words = page.words_from(page_index(entries.start)).take((entries.end - entries.start) as usize);
        let (mut missing, mut first) = (0, None);
        for (entry, raw) in (entries.start..).zip(words.clone()) {
            if !matches!(state.decode(raw)?, Entry::Data(_)) {
                missing += 1;
                first = first.or(Some(slot * TABLE_ENTRIES + entry));
            }
        }
        let first = first.unwrap_or(0);
        let mut taken: u64 = claimed.iter().map(|run| run.count).sum();
        while taken < missing {
            let run = state.claim(first + taken, missing - taken)?;
            taken += run.count;
            claimed.push(run);
        }
        // Another writer may have entered locations for some of these entries since the grains were allocated.
        let mut surplus = taken - missing;
        while surplus > 0
            && let Some(last) = claimed.last().copied()
        {
            let count = last.count.min(surplus);
            state.give_back(GrainRun { start: last.end() - count, count })?;
            surplus -= count;
            claimed.pop();
            if last.count > count {
                claimed.push(GrainRun { count: last.count - count, ..last });
            }
        }
        let mut fresh = claimed.iter().flat_map(|run| run.start..run.end());
        let mut pieces: Vec<WritePiece> = Vec::new();
        for (first, raw) in (0..).zip(words) {
            let (place, new) = match Entry::decode(raw) {
                Some(Entry::Data(grain)) => (Some(grain.0), false),
                _ => (fresh.next(), true),
            };
            let Some(place) = place else { return Err(state.corrupt("fewer grains were claimed than counted")) };
            match pieces.last_mut() {
                Some(last) if last.new == new && last.place.end() == place => last.place.count += 1,
                _ => pieces.push(WritePiece { first, place: GrainRun { start: place, count: 1 }, new }),
            }
        }
        announce(state, &pieces);
        claimed.clear();
        Ok(Plan { table, pieces })
    }

    /// Writes grains at consecutive locations in one call.
    pub(super) fn write_places(&self, place: GrainRun, slices: &[&[u8]]) -> Result<()> {
        let offset = self.grain_offset(Grain(place.start))?;
        let written = self.file.write_at(slices, offset, false);
        written.during(|| format!("writing {} grains at {offset} of {}", place.count, self.name))
    }

    /// Frees grains that were allocated and not entered. If freeing fails they stay allocated, and a wipe finds them.
    pub(super) fn give_back(&self, runs: &[GrainRun]) {
        for run in runs.iter().rev() {
            for part in super::state::by_bitmap_page(*run) {
                if let Err(error) = self.settle(|state| state.give_back(part)) {
                    tracing::warn!(image = %self.name, %error, "grains of a failed write could not be freed");
                    return;
                }
            }
        }
    }

    pub(super) fn zero_range(&self, range: Range<u64>, keep: bool) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let _epoch = self.epochs.enter();
            let end = ((at / PAGE_SPAN + 1) * PAGE_SPAN).min(range.end);
            let first = at % TABLE_SPAN / GRAIN;
            let entries = first..first + (end - at).div_ceil(GRAIN);
            let kept = self.settle(|state| Self::zero_entries(state, at / TABLE_SPAN, &entries, keep))?;
            for piece in &kept {
                self.write_zeros(piece.place)?;
                self.unsynced.store(true, Ordering::Release);
            }
            at = end;
        }
        Ok(())
    }

    /// Makes entries of one page zero entries; with `keep`, leaves those with locations and returns them.
    fn zero_entries(state: &mut LayerState, slot: u64, entries: &Range<u64>, keep: bool) -> Step<Vec<WritePiece>> {
        state.need_no_commit()?;
        let table = state.table_for_change(slot)?;
        state.need_backed(table_page(table, entries.start))?;
        let page = state.page(table_page(table, entries.start))?;
        let mut pieces: Vec<WritePiece> = Vec::new();
        for (entry, raw) in entries.clone().zip(page.words_from(page_index(entries.start))) {
            match Entry::decode(raw) {
                Some(Entry::Zero) => {}
                Some(Entry::Data(grain)) if keep && grain.0 < state.readable => match pieces.last_mut() {
                    Some(last) if last.place.end() == grain.0 => last.place.count += 1,
                    _ => pieces.push(WritePiece { first: 0, place: GrainRun { start: grain.0, count: 1 }, new: false }),
                },
                _ => state.set_entry(Owner { table, entry: entry as u16 }, Entry::Zero)?,
            }
        }
        announce(state, &pieces);
        Ok(pieces)
    }

    fn write_zeros(&self, place: GrainRun) -> Result<()> {
        let zeros = Buffer::with_bytes(ZEROS);
        let step = (ZEROS / BLOCK_SIZE) as u64;
        for start in (place.start..place.end()).step_by(step as usize) {
            let count = step.min(place.end() - start);
            self.write_places(GrainRun { start, count }, &[&zeros[..(count * GRAIN) as usize]])?;
        }
        Ok(())
    }
}

impl LayerState {
    /// The locations of the grains of these entries, if all of them have one. In this usual case, nothing is allocated
    /// or entered.
    fn places(&mut self, table: Table, entries: &Range<u64>) -> Step<Option<Vec<WritePiece>>> {
        let key = table_page(table, entries.start);
        let readable = self.readable;
        let page = self.cache.get(key).ok_or(Need::Page(key))?;
        let words = page.words_from(page_index(entries.start)).take((entries.end - entries.start) as usize);
        let mut pieces: Vec<WritePiece> = Vec::with_capacity(1);
        for (first, raw) in (0..).zip(words) {
            let Some(Entry::Data(Grain(place))) = Entry::decode(raw) else { return Ok(None) };
            if place >= readable {
                return Ok(None);
            }
            match pieces.last_mut() {
                Some(last) if last.place.end() == place => last.place.count += 1,
                _ => pieces.push(WritePiece { first, place: GrainRun { start: place, count: 1 }, new: false }),
            }
        }
        Ok(Some(pieces))
    }
}

/// Marks grains that are being moved as disturbed, so that the move skips them. This includes new grains: a grain that
/// was freed before its move was announced may be allocated again for the entry that had named it.
fn announce(state: &mut LayerState, pieces: &[WritePiece]) {
    if state.moving.is_empty() {
        return;
    }
    for piece in pieces {
        for grain in piece.place.start..piece.place.end() {
            if let Some(disturbed) = state.moving.get_mut(&Grain(grain)) {
                *disturbed = true;
            }
        }
    }
}

/// Enters the new grains of a write into the table.
fn enter(state: &mut LayerState, plan: &Plan, first: u64) -> Step<()> {
    // All pages are required before the first entry is set, so that the closure does not run twice: grains entered by a
    // first attempt might have been retired before the second.
    state.need(table_page(plan.table, first))?;
    for piece in plan.pieces.iter().filter(|piece| piece.new) {
        state.need_backmap(piece.place)?;
    }
    for piece in plan.pieces.iter().filter(|piece| piece.new) {
        let owner = Owner { table: plan.table, entry: (first + piece.first) as u16 };
        state.set_entries(owner, piece.place)?;
    }
    Ok(())
}

fn aligned(number: usize) -> bool {
    number.is_multiple_of(BLOCK_SIZE)
}

/// The bytes of slices that are not written yet.
struct Source<'a, 's> {
    slices: &'s [&'a [u8]],
    index: usize,
    within: usize,
}

impl<'a, 's> Source<'a, 's> {
    fn new(slices: &'s [&'a [u8]]) -> Self {
        Self { slices, index: 0, within: 0 }
    }

    /// The next `length` bytes, or the remaining ones.
    fn take(&mut self, mut length: usize) -> Vec<&'a [u8]> {
        let mut parts = Vec::new();
        while length > 0
            && let Some(slice) = self.slices.get(self.index)
        {
            let part = length.min(slice.len() - self.within);
            if part > 0 {
                parts.push(&slice[self.within..self.within + part]);
            }
            self.within += part;
            length -= part;
            if self.within == slice.len() {
                self.index += 1;
                self.within = 0;
            }
        }
        parts
    }
}
