//! Moving grains while guests write, and verifying that a grain contains only zeros.
//!
//! Guests overwrite grains in place without a lock. So moving grains has four steps:
//!
//! 1. announce them: a write that is planned from now on marks them as disturbed;
//! 2. wait until every epoch that was entered before the announcement is over: then no earlier write is under way;
//! 3. copy them, without a lock;
//! 4. point the table entries to the copies, except for grains that were disturbed, or that have another entry now:
//!    their copies are dropped.
//!
//! A writer never waits. The old locations are freed like any other grain that a table drops: after the commit that
//! makes first the copies and then the entries durable.

use super::SeSparse;
use super::cache::{Kind, PageKey};
use super::entry::{Entry, GRAIN, Grain, GrainRun, Owner};
use super::header::{PAGE_BITS, PAGE_ENTRIES};
use super::maintain::Work;
use super::state::{LayerState, Step, backmap_page, page_index, table_page};
use crate::epochs::Epoch;
use crate::{IoContext, Result};
use backend::Buffer;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pause between two checks for the end of earlier writers.
const QUIET_PAUSE: Duration = Duration::from_micros(200);
/// Bytes truncated at a time: the file system locks the file while it discards them, and guest writes wait.
const CUT_STEP: u64 = 16 << 20;
/// The number of steps for truncating an end that is too long for steps of [`CUT_STEP`].
const CUT_STEPS: u64 = 1024;

/// A grain to be moved or examined, and the entry that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub grain: Grain,
    pub owner: Owner,
}

/// Announced grains; dropping this value ends the announcement.
pub(super) struct Announced<'a> {
    layer: &'a SeSparse,
    grains: Vec<Grain>,
    /// While this exists, a grain that an entry drops from now on is not reused.
    _epoch: Arc<Epoch>,
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        let mut state = self.layer.state.lock();
        for grain in &self.grains {
            state.moving.remove(grain);
        }
    }
}

impl SeSparse {
    /// Announces grains and waits until every write that was planned before the announcement has ended.
    pub(super) fn announce<'a>(&'a self, held: &[Held], work: &mut Work) -> Result<Announced<'a>> {
        let (before, announced) = {
            let mut state = self.state.lock();
            state.mark_dropped();
            let before = state.retirement.close(&self.epochs);
            state.moving.extend(held.iter().map(|held| (held.grain, false)));
            let grains = held.iter().map(|held| held.grain).collect();
            (before, Announced { layer: self, grains, _epoch: self.epochs.enter() })
        };
        while !self.epochs.is_over(before) {
            work.ask()?;
            std::thread::sleep(QUIET_PAUSE);
        }
        Ok(announced)
    }

    /// Changes the entry of an announced grain, unless the grain was disturbed; returns whether it did.
    pub(super) fn repoint(&self, held: Held, entry: Entry) -> Result<bool> {
        let _changing = self.gate.read();
        self.check_changeable()?;
        self.settle(|state| {
            let Held { grain, owner } = held;
            let key = table_page(owner.table, u64::from(owner.entry));
            state.need_no_commit()?;
            state.need(key)?;
            state.need_backed(key)?;
            if !names(state, owner, grain)? || state.moving.get(&grain) != Some(&false) {
                return Ok(false);
            }
            if let Entry::Data(place) = entry {
                state.need_backmap(GrainRun { start: place.0, count: 1 })?;
            }
            state.set_entry(owner, entry)?;
            Ok(true)
        })
    }

    /// Moves grains to the lowest free locations: the highest grain first, as long as its new location is lower. `held`
    /// is sorted by location. Returns how many were moved.
    pub(super) fn relocate(&self, held: &[Held], work: &mut Work) -> Result<u64> {
        let mut places: Vec<GrainRun> = Vec::new();
        let moved = self.take_low(held, &mut places).and_then(|taken| match taken {
            0 => Ok(0),
            _ => self.copy_and_repoint(&held[held.len() - taken..], &mut places, work),
        });
        // The locations that remain were not used.
        self.give_back(&places);
        moved
    }

    /// Allocates the lowest free grains, at most one for each grain to be moved, and only below that grain; returns the
    /// number of allocated grains.
    fn take_low(&self, held: &[Held], places: &mut Vec<GrainRun>) -> Result<usize> {
        let mut taken = 0;
        while taken < held.len() {
            let claimed = self.settle(|state| {
                state.need_no_commit()?;
                let Some(run) = state.space.lowest() else { return Ok(None) };
                let above = held.iter().rev().skip(taken).zip(run.start..run.end());
                let count = above.take_while(|(held, place)| held.grain.0 > *place).count() as u64;
                if count == 0 {
                    return Ok(None);
                }
                state.claim_run(GrainRun { start: run.start, count }).map(Some)
            })?;
            let Some(run) = claimed else { break };
            places.push(run);
            taken += run.count as usize;
        }
        Ok(taken)
    }

    fn copy_and_repoint(&self, held: &[Held], places: &mut Vec<GrainRun>, work: &mut Work) -> Result<u64> {
        let _announced = self.announce(held, work)?;
        let content = self.read_grains(held)?;
        let mut at = 0;
        for place in places.iter() {
            let end = at + (place.count * GRAIN) as usize;
            self.write_places(*place, &[&content[at..end]])?;
            at = end;
        }
        self.unsynced.store(true, Ordering::Release);
        let targets: Vec<u64> = places.iter().flat_map(|run| run.start..run.end()).collect();
        places.clear();
        let mut moved = 0;
        for (index, (held, target)) in held.iter().zip(&targets).enumerate() {
            match self.repoint(*held, Entry::Data(Grain(*target))) {
                Ok(true) => moved += 1,
                Ok(false) => places.push(GrainRun { start: *target, count: 1 }),
                Err(error) => {
                    places.extend(targets[index..].iter().map(|start| GrainRun { start: *start, count: 1 }));
                    return Err(error);
                }
            }
        }
        Ok(moved)
    }

    /// The grains of a run that the entries of their owners name, in order, and the number of allocated grains.
    pub(super) fn held(&self, run: GrainRun) -> Result<(Vec<Held>, u64)> {
        let owners = self.settle(|state| state.owners(run))?;
        let mut held = Vec::with_capacity(owners.len());
        for (grain, owner) in &owners {
            if let Some(owner) = owner.filter(|owner| u64::from(owner.table.0) < self.layout.tables_max())
                && self.settle(|state| names(state, owner, *grain))?
            {
                held.push(Held { grain: *grain, owner });
            }
        }
        Ok((held, owners.len() as u64))
    }

    /// Reads grains; adjacent grains are read by one call.
    pub(super) fn read_grains(&self, held: &[Held]) -> Result<Buffer> {
        let mut content = Buffer::recycled(held.len());
        let mut rest: &mut [u8] = &mut content;
        for run in held.chunk_by(|one, other| one.grain.0 + 1 == other.grain.0) {
            let (part, behind) = rest.split_at_mut(run.len() * GRAIN as usize);
            rest = behind;
            let offset = self.grain_offset(run[0].grain)?;
            self.file.read_at(part, offset).during(|| format!("reading grains at {offset} of {}", self.name))?;
        }
        Ok(content)
    }

    /// Truncates free grains at the end of the file. Returns the number of bytes by which the file became shorter.
    pub(super) fn cut_end(&self) -> Result<u64> {
        let mut cut = 0;
        // Each step reads the length of the file again, because the file may grow between two steps.
        while let step @ 1.. = self.cut_step()? {
            cut += step;
        }
        Ok(cut)
    }

    fn cut_step(&self) -> Result<u64> {
        let _no_growth = self.length.lock();
        let Some(free) = self.settle(LayerState::free_end)? else { return Ok(0) };
        let least = self.used_end(free)?;
        let end = self.settle(|state| state.lower_end(least))?;
        let bytes = self.grain_offset(Grain(end))?;
        let length = self.file.len().during(|| format!("querying the length of {}", self.name))?;
        // A damaged length may be many petabytes of holes: steps grow with the length to be truncated.
        let step = CUT_STEP.max(length.saturating_sub(bytes) / CUT_STEPS);
        let shorter = bytes.max(length.saturating_sub(step));
        if length <= shorter {
            return Ok(0);
        }
        self.file.set_len(shorter).during(|| format!("cutting {} to {shorter} bytes", self.name))?;
        Ok(length - shorter)
    }

    /// The end of the last grain of a range that backmap and table show to be in use, although its bit is clear; the
    /// start of the range if there is none.
    fn used_end(&self, range: Range<u64>) -> Result<u64> {
        let mut end = range.end;
        while end > range.start {
            let start = ((end - 1) / PAGE_BITS * PAGE_BITS).max(range.start);
            for (grain, raw) in self.durable_owners(start..end)?.into_iter().rev() {
                if let Some(owner) = Owner::decode(raw)
                    && self.settle(|state| state.is_used(owner, Grain(grain)))?
                {
                    let image = &*self.name;
                    tracing::warn!(image, grain, "the bitmap marks a used grain as free; check the image");
                    return Ok(grain + 1);
                }
            }
            end = start;
        }
        Ok(range.start)
    }

    /// The words of the backmap in the file for grains of one bitmap page. Of a grain with an owner that is only in
    /// memory, the bit was set with the owner. Many pages are read by one call, and none of them is put into the cache.
    fn durable_owners(&self, grains: Range<u64>) -> Result<Vec<(u64, u64)>> {
        let first = backmap_page(grains.start).index();
        let pages = backmap_page(grains.end - 1).index() + 1 - first;
        let offset = self.page_offset(PageKey::new(Kind::Backmap, first));
        let mut words = Buffer::zeroed(pages as usize);
        if self.find_hole(Kind::Backmap, &(offset..offset + words.len() as u64))?.is_some() {
            return Ok(Vec::new());
        }
        self.read_metadata(&mut words, offset)?;
        let words = words.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        Ok((first * PAGE_ENTRIES..).zip(words).filter(|(grain, raw)| grains.contains(grain) && *raw != 0).collect())
    }
}

/// Whether an entry of a table in memory names a grain.
pub(super) fn names(state: &mut LayerState, owner: Owner, grain: Grain) -> Step<bool> {
    let raw = state.word(table_page(owner.table, u64::from(owner.entry)), page_index(u64::from(owner.entry)))?;
    Ok(Entry::decode(raw) == Some(Entry::Data(grain)))
}

impl LayerState {
    /// The grains after the last allocated one, up to the end of the file. `None` while the bitmap cannot be relied on.
    fn free_end(&mut self) -> Step<Option<Range<u64>>> {
        if self.touched.is_none() {
            return Ok(None);
        }
        Ok(Some(self.marked_end()?..self.space.length))
    }

    /// The end of the last grain whose bit is set.
    fn marked_end(&mut self) -> Step<u64> {
        let mut end = self.space.length;
        while end > 0 {
            let page = (end - 1) / PAGE_BITS;
            end = self.last_allocated(page * PAGE_BITS..end)?;
            if end > page * PAGE_BITS {
                break;
            }
        }
        Ok(end)
    }

    /// Lowers the end of the allocated grains to the last allocated one, but not below `least`, and `length` to the
    /// same value: so the file has to grow before grains at the end are allocated again.
    fn lower_end(&mut self, least: u64) -> Step<u64> {
        self.space.end_streams();
        let end = self.marked_end()?.max(least);
        self.space.lower(end);
        self.space.length = end;
        self.readable = end;
        Ok(end)
    }

    /// Whether the entry of an owner, in a table in use, names the grain.
    fn is_used(&mut self, owner: Owner, grain: Grain) -> Step<bool> {
        Ok(self.named_tables.contains(u64::from(owner.table.0)) && names(self, owner, grain)?)
    }

    /// The end of the last allocated grain of a range within one page of the bitmap; its start if there is none.
    pub(super) fn last_allocated(&mut self, range: Range<u64>) -> Step<u64> {
        let page = self.page(super::state::bitmap_page(range.start))?;
        let (first, mut end) = (range.start % PAGE_BITS, (range.end - 1) % PAGE_BITS + 1);
        while end > first {
            let (index, within) = (((end - 1) / 64) as usize, (end - 1) % 64 + 1);
            let word = page.word(index) << (64 - within);
            if word != 0 {
                let found = end - u64::from(word.leading_zeros());
                return Ok(range.start - first + found.max(first));
            }
            end -= within;
        }
        Ok(range.start)
    }

    /// Allocated grains of a run within one page of the bitmap, in order, with their owners by the backmap.
    pub(super) fn owners(&mut self, run: GrainRun) -> Step<Vec<(Grain, Option<Owner>)>> {
        let bits = self.page(super::state::bitmap_page(run.start))?;
        let mut owners = Vec::new();
        for grain in run.start..run.end() {
            let bit = grain % PAGE_BITS;
            if bits.word((bit / 64) as usize) >> (bit % 64) & 1 == 1 {
                owners.push((Grain(grain), self.owner(grain)?));
            }
        }
        Ok(owners)
    }
}
