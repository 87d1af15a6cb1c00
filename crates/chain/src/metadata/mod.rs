//! The metadata cache: the level and the location of the extents that were used most recently.
//!
//! There are sixteen shards; each has every sixteenth 64 MiB of addresses. A shard has its own lock, held only for a
//! search in two sorted arrays. Eviction is CLOCK over all shards: entries that were used since the hand last passed
//! stay. So eviction depends on the recency in the whole disk, not in one shard.
//!
//! 1. When no thread holds a shard's lock, its entries are current. In a range under change ([`crate::changes`]) an
//!    entry may still be the old one: no write of the range has been acknowledged then. If the level reuses grains, a
//!    range under change has no entries.
//! 2. There are never more entries than the maximum, except those that threads are inserting at this moment.
//! 3. A prefetched entry is evicted first, unless a request has used it. The amount of prefetching depends on the use
//!    of earlier prefetches. It grows, up to the limit in the tunables, while more of the evicted prefetched extents
//!    were used than not, and halves while fewer than one in five was used. It can become zero; then an occasional
//!    trial checks whether prefetching is useful again.
//! 4. Without prefetching, a miss queries only one level if [`holders`] has the level of the block. A miss surveys its
//!    span while surveys of evicted spans have been useful often enough.

mod entry;
pub(crate) mod holders;
mod shard;
#[cfg(test)]
mod tests;

use crate::changes::{Changes, Token};
use crate::limits::{
    ENTRIES_DEFAULT, ENTRIES_MAX, PREFETCH_BYTES_DEFAULT, PREFETCH_BYTES_MAX, PREFETCH_EXTENTS_DEFAULT,
    PREFETCH_EXTENTS_MAX, UPDATE_BYTES_MAX,
};
use crate::mapping::{Mapping, Numbers};
use crate::statistics::MetadataStatistics;
use crate::{Error, ErrorKind, Result};
use entry::CachedExtent;
use holders::{Holder, SPAN_BLOCKS};
use layer::SECTOR;
use parking_lot::Mutex;
use shard::Shard;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

const SHARDS: usize = 16;
/// Unit of distribution over shards: no entry crosses a region boundary.
const REGION: u64 = 64 << 20;
/// Addresses that one survey covers ([`holders`]).
pub(crate) const SPAN: u64 = 256 << 10;
/// The number of prefetched extents that must be used or evicted before the amount of prefetching is adjusted.
const OUTCOMES: u64 = 128;
/// Walks between two adjustments.
const JUDGE_EVERY: u64 = 32;
/// Misses between two trials while prefetching is not useful. A trial queries the levels for much larger ranges
/// than a miss does.
const TRY_EVERY: u64 = 256;
/// Extents per trial.
const TRY_EXTENTS: usize = 8;
/// Misses between two surveys while the results of surveys are rarely used.
const SURVEY_EVERY: u64 = 32;

/// Settings that can be changed while the cache is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunables {
    /// The most extents; 0 switches the cache off.
    pub entries: usize,
    /// Bytes around a cache miss that are looked up with it; 0 for none.
    pub prefetch_bytes: u64,
    /// The most extents that one prefetch inserts into the cache.
    pub prefetch_extents: usize,
}

impl Default for Tunables {
    fn default() -> Self {
        Self {
            entries: ENTRIES_DEFAULT,
            prefetch_bytes: PREFETCH_BYTES_DEFAULT,
            prefetch_extents: PREFETCH_EXTENTS_DEFAULT,
        }
    }
}

impl Tunables {
    fn check(&self) -> Result<()> {
        let refuse = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        if self.entries > ENTRIES_MAX {
            return refuse(format!("a metadata cache has at most {ENTRIES_MAX} entries, not {}", self.entries));
        }
        if self.prefetch_bytes > PREFETCH_BYTES_MAX {
            return refuse(format!("at most {PREFETCH_BYTES_MAX} bytes are prefetched, not {}", self.prefetch_bytes));
        }
        if self.prefetch_extents > PREFETCH_EXTENTS_MAX {
            return refuse(format!(
                "a prefetch inserts at most {PREFETCH_EXTENTS_MAX} extents, not {}",
                self.prefetch_extents
            ));
        }
        Ok(())
    }
}

/// A shard on its own cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Padded(Mutex<Shard>);

#[derive(Default)]
struct Counters {
    evictions: AtomicU64,
    walks: AtomicU64,
    walk_levels: AtomicU64,
    walk_levels_max: AtomicU64,
    prefetched: AtomicU64,
    unused: AtomicU64,
}

/// Counter values at the last adjustment.
#[derive(Default)]
struct Judged {
    used: u64,
    unused: u64,
    paid: u64,
    wasted: u64,
}

/// The cache of one chain.
pub(crate) struct MetadataCache {
    shards: [Padded; SHARDS],
    total: AtomicUsize,
    /// The shard that the eviction hand sweeps next.
    hand: AtomicUsize,
    entries_max: AtomicUsize,
    prefetch_bytes: AtomicU64,
    prefetch_extents: AtomicUsize,
    /// The present limit on prefetched extents.
    effort: AtomicUsize,
    /// Whether surveys were useful lately.
    surveys: AtomicBool,
    /// Counters of prefetches and surveys at the last adjustment.
    judged: Mutex<Judged>,
    counters: Counters,
}

fn sectors(range: &Range<u64>) -> (u64, u64) {
    (range.start / SECTOR, range.end.div_ceil(SECTOR))
}

fn shard_of(address: u64) -> usize {
    (address / REGION) as usize % SHARDS
}

/// Cuts a range at region boundaries.
fn regions(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let start = at;
        (start < range.end).then(|| {
            at = ((start / REGION + 1) * REGION).min(range.end);
            start..at
        })
    })
}

impl MetadataCache {
    pub fn new(tunables: Tunables) -> Result<Self> {
        tunables.check()?;
        let cache = Self {
            shards: std::array::from_fn(|_| Padded::default()),
            total: AtomicUsize::new(0),
            hand: AtomicUsize::new(0),
            entries_max: AtomicUsize::new(tunables.entries),
            prefetch_bytes: AtomicU64::new(tunables.prefetch_bytes),
            prefetch_extents: AtomicUsize::new(tunables.prefetch_extents),
            effort: AtomicUsize::new(tunables.prefetch_extents),
            surveys: AtomicBool::new(true),
            judged: Mutex::default(),
            counters: Counters::default(),
        };
        cache.set_holders(tunables.entries);
        Ok(cache)
    }

    fn set_holders(&self, entries: usize) {
        for shard in &self.shards {
            shard.0.lock().holders.set_size(entries, SHARDS);
        }
    }

    pub fn tunables(&self) -> Tunables {
        Tunables {
            entries: self.entries_max.load(Ordering::Relaxed),
            prefetch_bytes: self.prefetch_bytes.load(Ordering::Relaxed),
            prefetch_extents: self.prefetch_extents.load(Ordering::Relaxed),
        }
    }

    /// Changes the settings at once: if the limit shrinks, surplus entries are evicted before the return.
    pub fn set_tunables(&self, tunables: Tunables) -> Result<()> {
        tunables.check()?;
        if self.entries_max.swap(tunables.entries, Ordering::Relaxed) != tunables.entries {
            self.set_holders(tunables.entries);
        }
        self.prefetch_bytes.store(tunables.prefetch_bytes, Ordering::Relaxed);
        self.prefetch_extents.store(tunables.prefetch_extents, Ordering::Relaxed);
        self.effort.store(tunables.prefetch_extents, Ordering::Relaxed);
        self.evict();
        Ok(())
    }

    fn is_off(&self) -> bool {
        self.entries_max.load(Ordering::Relaxed) == 0
    }

    /// Runs `work` on a shard, and updates the total count.
    fn with<T>(&self, index: usize, work: impl FnOnce(&mut Shard) -> T) -> T {
        let mut shard = self.shards[index].0.lock();
        let before = shard.entries;
        let result = work(&mut shard);
        let after = shard.entries;
        if after > before {
            self.total.fetch_add(after - before, Ordering::Relaxed);
        } else if before > after {
            self.total.fetch_sub(before - after, Ordering::Relaxed);
        }
        result
    }

    /// Runs `work` on each shard that can have entries of `range`.
    fn with_each(&self, range: &Range<u64>, mut work: impl FnMut(&mut Shard)) {
        let first = range.start / REGION;
        let last = range.end.div_ceil(REGION).min(first + SHARDS as u64);
        for region in first..last {
            self.with(region as usize % SHARDS, &mut work);
        }
    }

    /// Appends the cached extents of `range`; returns false, and appends nothing, if any part is not cached.
    pub fn lookup(&self, range: &Range<u64>, out: &mut Vec<Mapping>) -> bool {
        let before = out.len();
        for part in regions(range.clone()) {
            let (from, to) = sectors(&part);
            let mut shard = self.shards[shard_of(part.start)].0.lock();
            if !shard.lookup(from, to, out) {
                shard.misses += 1;
                drop(shard);
                out.truncate(before);
                return false;
            }
            if part.end == range.end {
                shard.hits += 1;
            }
        }
        // A partial last sector was looked up as a whole sector.
        if let Some(last) = out.last_mut()
            && last.end() > range.end
        {
            last.length = range.end - last.start;
        }
        true
    }

    fn knows(&self, address: u64) -> bool {
        let sector = address / SECTOR;
        !self.shards[shard_of(address)].0.lock().is_free(sector, sector + 1)
    }

    /// The range to look up together with `demand`, and the most extents to insert outside `demand`.
    pub fn window(&self, demand: &Range<u64>, capacity: u64) -> (Range<u64>, usize) {
        let bytes = self.prefetch_bytes.load(Ordering::Relaxed).next_multiple_of(SECTOR);
        let mut most = self.effort.load(Ordering::Relaxed).min(self.prefetch_extents.load(Ordering::Relaxed));
        if most == 0 && self.counters.walks.load(Ordering::Relaxed).is_multiple_of(TRY_EVERY) {
            most = TRY_EXTENTS.min(self.prefetch_extents.load(Ordering::Relaxed));
        }
        if bytes == 0 || most == 0 || self.is_off() {
            return (demand.clone(), 0);
        }
        // In a sequential read the preceding extents are cached already, so only the following ones are prefetched.
        let streams = demand.start >= SECTOR && self.knows(demand.start - SECTOR);
        let start = if streams { demand.start } else { demand.start / bytes * bytes };
        let end = demand.end.div_ceil(bytes).saturating_mul(bytes).min(capacity).max(demand.end);
        (start..end, most)
    }

    /// Which level stores `range`, after a miss without prefetching.
    pub fn holder(&self, range: &Range<u64>) -> Holder {
        if range.start / SPAN != (range.end - 1) / SPAN {
            return Holder::Unknown;
        }
        let (from, to) = sectors(range);
        match self.shards[shard_of(range.start)].0.lock().holders.get(from, to) {
            Holder::Missing if !self.surveys_pay() => Holder::Unknown,
            found => found,
        }
    }

    fn surveys_pay(&self) -> bool {
        self.surveys.load(Ordering::Relaxed) || self.counters.walks.load(Ordering::Relaxed).is_multiple_of(SURVEY_EVERY)
    }

    /// Inserts the result of a survey of the span that begins at `start`, unless the span changed meanwhile.
    pub fn fill_holders(&self, changes: &Changes, token: &Token, start: u64, levels: &[u8; SPAN_BLOCKS]) {
        let mut shard = self.shards[shard_of(start)].0.lock();
        if changes.unchanged(token, &(start..start + SPAN)) {
            shard.holders.put(start / SECTOR, levels);
        }
    }

    /// Inserts the result of a walk over `levels` levels, for `demand` and the range around it, except ranges that
    /// changed meanwhile.
    pub fn fill(&self, changes: &Changes, token: &Token, demand: &Range<u64>, found: &[Mapping], levels: usize) {
        let counters = &self.counters;
        if counters.walks.fetch_add(1, Ordering::Relaxed).is_multiple_of(JUDGE_EVERY) {
            self.judge();
        }
        counters.walk_levels.fetch_add(levels as u64, Ordering::Relaxed);
        counters.walk_levels_max.fetch_max(levels as u64, Ordering::Relaxed);
        if self.is_off() {
            return;
        }
        let mut prefetched = 0;
        for mapping in found {
            let asked = mapping.start < demand.end && demand.start < mapping.end();
            for part in regions(mapping.start..mapping.end()) {
                let (from, to) = sectors(&part);
                let Some(mut entry) = CachedExtent::new(&mapping.clipped(part.start, part.end)) else { continue };
                entry.set_seen(asked);
                entry.set_prefetched(!asked);
                self.with(shard_of(part.start), |shard| {
                    if !changes.unchanged(token, &part) || (!asked && !shard.is_free(from, to)) {
                        return;
                    }
                    if asked {
                        shard.remove(from, to);
                        if let Some(level) = entry.level() {
                            shard.holders.learn(from, to, level);
                        }
                    }
                    shard.insert(entry);
                    prefetched += u64::from(!asked);
                });
            }
        }
        counters.prefetched.fetch_add(prefetched, Ordering::Relaxed);
        self.evict();
    }

    /// Called before a change if the level reuses grains: drops the entries of `range`.
    pub fn forget(&self, range: &Range<u64>) {
        let (from, to) = sectors(range);
        self.with_each(range, |shard| {
            shard.remove(from, to);
            shard.holders.forget(from, to);
        });
        // Removing the middle of an entry makes two entries, so the limit may be exceeded.
        self.evict();
    }

    /// As [`MetadataCache::forget`], only for extents in level `number`.
    pub fn forget_level(&self, range: &Range<u64>, number: u8) {
        let (from, to) = sectors(range);
        self.with_each(range, |shard| {
            for (from, to) in shard.parts_of(from, to, |level| level == number) {
                shard.remove(from, to);
            }
        });
        self.evict();
    }

    /// Called after a change: `found` is the new content of `range`; parts of `range` without an extent become unknown.
    pub fn replace(&self, range: &Range<u64>, found: &[Mapping]) {
        if self.is_off() || range.end - range.start > UPDATE_BYTES_MAX {
            return self.forget(range);
        }
        let mut at = range.start;
        for mapping in found {
            for part in regions(mapping.start..mapping.end()) {
                let entry = CachedExtent::new(&mapping.clipped(part.start, part.end));
                self.with(shard_of(part.start), |shard| {
                    let (from, to) = sectors(&part);
                    shard.remove(from, to);
                    shard.holders.forget(from, to);
                    if let Some(mut entry) = entry {
                        entry.set_seen(true);
                        if let Some(level) = entry.level() {
                            shard.holders.learn(from, to, level);
                        }
                        shard.insert(entry);
                    }
                });
            }
            if mapping.start > at {
                self.forget(&(at..mapping.start));
            }
            at = mapping.end();
        }
        if at < range.end {
            self.forget(&(at..range.end));
        }
        self.evict();
    }

    /// Called after a merge copied `range`: extents in a level of `from` are replaced by those in `found`.
    pub fn retarget(&self, range: &Range<u64>, from: Numbers, found: &[Mapping]) {
        for part in regions(range.clone()) {
            let (start, end) = sectors(&part);
            self.with(shard_of(part.start), |shard| {
                shard.holders.forget_where(start, end, |level| from.contains(level));
                for (start, end) in shard.parts_of(start, end, |level| from.contains(level)) {
                    shard.remove(start, end);
                    let (start, end) = (start * SECTOR, end * SECTOR);
                    for mapping in found.iter().filter(|found| found.start < end && start < found.end()) {
                        if let Some(mut entry) = CachedExtent::new(&mapping.clipped(start, end)) {
                            entry.set_seen(true);
                            shard.insert(entry);
                        }
                    }
                }
            });
        }
        self.evict();
    }

    /// Drops all extents in level `number`.
    pub fn purge(&self, number: u8) {
        for index in 0..SHARDS {
            self.with(index, |shard| {
                shard.purge(number);
                shard.holders.purge(number);
            });
        }
    }

    /// Reduces the number of entries to the maximum.
    fn evict(&self) {
        let maximum = self.entries_max.load(Ordering::Relaxed);
        // The first round clears the marks of use, the second evicts.
        for _ in 0..3 * SHARDS {
            let excess = self.total.load(Ordering::Relaxed).saturating_sub(maximum);
            if excess == 0 {
                return;
            }
            let index = self.hand.load(Ordering::Relaxed) % SHARDS;
            let swept = self.with(index, |shard| shard.sweep(excess));
            if swept.round {
                let _ = self.hand.compare_exchange(index, (index + 1) % SHARDS, Ordering::Relaxed, Ordering::Relaxed);
            }
            if swept.evicted > 0 {
                self.counters.evictions.fetch_add(swept.evicted as u64, Ordering::Relaxed);
                self.counters.unused.fetch_add(swept.unused as u64, Ordering::Relaxed);
            }
        }
    }

    /// Adjusts the amount of prefetching, and decides whether to survey.
    fn judge(&self) {
        let Some(mut judged) = self.judged.try_lock() else { return };
        let mut now = Judged { unused: self.counters.unused.load(Ordering::Relaxed), ..Judged::default() };
        for shard in &self.shards {
            let shard = shard.0.lock();
            now.used += shard.used;
            now.paid += shard.holders.paid;
            now.wasted += shard.holders.wasted;
        }
        let (paid, wasted) = (now.paid.saturating_sub(judged.paid), now.wasted.saturating_sub(judged.wasted));
        if paid + wasted >= OUTCOMES {
            (judged.paid, judged.wasted) = (now.paid, now.wasted);
            self.surveys.store(paid > wasted, Ordering::Relaxed);
        }
        let (good, bad) = (now.used.saturating_sub(judged.used), now.unused.saturating_sub(judged.unused));
        if good + bad < OUTCOMES {
            return;
        }
        (judged.used, judged.unused) = (now.used, now.unused);
        let allowed = self.prefetch_extents.load(Ordering::Relaxed);
        let effort = self.effort.load(Ordering::Relaxed);
        let next = if good * 4 < bad {
            effort / 2
        } else if good > bad {
            (effort * 2).clamp(TRY_EXTENTS.min(allowed), allowed)
        } else {
            effort
        };
        self.effort.store(next, Ordering::Relaxed);
    }

    pub fn statistics(&self) -> MetadataStatistics {
        let counters = &self.counters;
        let mut statistics = MetadataStatistics {
            evictions: counters.evictions.load(Ordering::Relaxed),
            walks: counters.walks.load(Ordering::Relaxed),
            walk_levels: counters.walk_levels.load(Ordering::Relaxed),
            walk_levels_max: counters.walk_levels_max.load(Ordering::Relaxed),
            prefetched: counters.prefetched.load(Ordering::Relaxed),
            memory: size_of::<Self>() as u64,
            ..MetadataStatistics::default()
        };
        for shard in &self.shards {
            let shard = shard.0.lock();
            statistics.hits += shard.hits;
            statistics.misses += shard.misses;
            statistics.prefetched_used += shard.used;
            statistics.entries += shard.entries as u64;
            statistics.memory += (shard.memory() + shard.holders.memory()) as u64;
        }
        statistics
    }
}
