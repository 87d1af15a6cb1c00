//! The stack of levels at one point in time.
//!
//! 1. A [`Levels`] never changes; a snapshot or a merge publishes a new one. A request holds a reference to the stack
//!    that it uses, so a merge can wait until no request reads through an older stack ([`Replaced`]).
//! 2. The caches identify a level by a number from 0 to 255. A number is reused only after the last reference to its
//!    old level is gone and the caches have dropped it, so a cached extent never refers to another level.
//! 3. A level hides its bytes past its own capacity, and past the capacity of any level above it, from the levels
//!    above.

use crate::consolidate::Job;
use crate::gate::Gate;
use crate::limits::GRAIN_MAX;
use crate::mapping::Mapping;
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, IoMode};
use layer::{Layer, SECTOR};
use parking_lot::Mutex;
use std::any::Any;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};

/// How many level numbers there are.
const NUMBERS: usize = 256;

/// The key of a level in one open chain; it stays the same when the level's position in the stack changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LevelKey(pub(crate) u64);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// The number was never used, or the caches have dropped it.
    Free,
    Taken,
    /// The number was released; the caches may still have extents with it.
    Left,
}

/// Assigns numbers to levels.
pub(crate) struct Identities {
    numbers: Mutex<[Use; NUMBERS]>,
    next_key: AtomicU64,
}

/// The number of a level in the caches, and its key in the public interface.
pub(crate) struct Identity {
    pub number: u8,
    pub key: LevelKey,
    pool: Arc<Identities>,
}

impl Identities {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { numbers: Mutex::new([Use::Free; NUMBERS]), next_key: AtomicU64::new(1) })
    }

    /// Assigns an unused number; `purge` makes the caches drop a number that another level had before.
    pub fn take(self: &Arc<Self>, purge: impl FnOnce(u8)) -> Result<Arc<Identity>> {
        let mut numbers = self.numbers.lock();
        let free = numbers.iter().position(|state| *state == Use::Free);
        let number = free.or_else(|| numbers.iter().position(|state| *state == Use::Left)).ok_or_else(|| {
            Error::new(ErrorKind::Busy, "too many levels of this chain are still being read; try again in a moment")
        })?;
        if numbers[number] == Use::Left {
            purge(number as u8);
        }
        numbers[number] = Use::Taken;
        let key = LevelKey(self.next_key.fetch_add(1, Ordering::Relaxed));
        Ok(Arc::new(Identity { number: number as u8, key, pool: Arc::clone(self) }))
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        self.pool.numbers.lock()[self.number as usize] = Use::Left;
    }
}

/// One layer, with the state that the chain keeps about it.
pub(crate) struct Level {
    pub identity: Arc<Identity>,
    pub layer: Arc<dyn Layer>,
    /// Whether a change has ended since the last flush of this level began.
    pub unflushed: AtomicBool,
    /// Whether the layer may reuse freed grains.
    pub reuses: bool,
    pub grain: u64,
}

impl Level {
    pub fn new(identity: Arc<Identity>, layer: Arc<dyn Layer>) -> Result<Self> {
        let grain = layer.grain();
        if grain == 0 || grain > GRAIN_MAX || !(grain.is_multiple_of(SECTOR) || SECTOR.is_multiple_of(grain)) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("a {} image with grains of {grain} bytes cannot be part of a chain", layer.format()),
            ));
        }
        let reuses = layer.epoch().is_some();
        // The chain never queries a layer for less than a sector, so a smaller grain counts as a sector.
        let grain = grain.max(SECTOR);
        Ok(Self { identity, layer, unflushed: AtomicBool::new(false), reuses, grain })
    }

    pub fn key(&self) -> LevelKey {
        self.identity.key
    }

    /// A guard that the caller holds during a change of the layer.
    pub fn changing(&self) -> Changing<'_> {
        Changing(self)
    }

    pub fn number(&self) -> u8 {
        self.identity.number
    }

    /// `range` widened to whole grains of this level.
    pub fn widened(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.div_ceil(self.grain).saturating_mul(self.grain);
        range.start / self.grain * self.grain..end.min(self.layer.capacity()).max(range.end)
    }
}

/// A change of a layer under way. Its end marks the level as unflushed: a flush during the change may not cover it, so
/// this mark is set after the change.
pub(crate) struct Changing<'a>(&'a Level);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        // A plain load first: the cache line is shared by all writers.
        if !self.0.unflushed.load(Ordering::SeqCst) {
            self.0.unflushed.store(true, Ordering::SeqCst);
        }
    }
}

/// Keeps the file locations in a plan from being reused.
pub(crate) struct Guard {
    pub levels: Arc<Levels>,
    _top: Option<Arc<dyn Any + Send + Sync>>,
    _target: Option<Arc<dyn Any + Send + Sync>>,
    _moving: Option<Arc<dyn Any + Send + Sync>>,
    _leaving: Vec<Arc<dyn Any + Send + Sync>>,
}

/// A stack of levels.
pub(crate) struct Levels {
    pub generation: u64,
    /// Newest first; never empty.
    pub stack: Vec<Arc<Level>>,
    /// The position in the stack by number; 255 for none.
    by_number: [u8; NUMBERS],
    /// For each level, the least capacity among the levels from the top down to this one.
    visible: Vec<u64>,
    pub gate: Gate,
    /// Levels that requests inside an older gate may still write.
    leaving: Vec<Arc<Level>>,
    /// The level in which other work than writes moves grains. None of its extents is cached.
    pub moving: Option<LevelKey>,
    /// The merge that is under way.
    pub job: Option<Arc<Job>>,
    /// Whether the top is a source of the merge, so that writes have to be reported to the merge.
    pub job_is_live: bool,
    /// The alignment to which reads are widened, because some file is open for direct I/O.
    pub alignment: u64,
}

impl Levels {
    pub fn new(
        generation: u64,
        stack: Vec<Arc<Level>>,
        job: Option<Arc<Job>>,
        moving: Option<LevelKey>,
        leaving: Vec<Arc<Level>>,
    ) -> Self {
        let mut by_number = [u8::MAX; NUMBERS];
        let mut visible = Vec::with_capacity(stack.len());
        let mut least = u64::MAX;
        for (index, level) in stack.iter().enumerate() {
            by_number[level.number() as usize] = index as u8;
            least = least.min(level.layer.capacity());
            visible.push(least);
        }
        let direct = |level: &Arc<Level>| level.layer.file(0).is_ok_and(|file| file.mode() == IoMode::Direct);
        let alignment = if stack.iter().any(direct) { BLOCK_SIZE as u64 } else { SECTOR };
        let job_is_live = job.as_ref().is_some_and(|job| job.sources.contains(&stack[0].key()));
        let gate = Gate::default();
        Self { generation, stack, by_number, visible, gate, leaving, moving, job, job_is_live, alignment }
    }

    pub fn top(&self) -> &Arc<Level> {
        &self.stack[0]
    }

    pub fn capacity(&self) -> u64 {
        self.visible[0]
    }

    /// The level with this number, if it is in this stack.
    pub fn level(&self, number: u8) -> Option<&Arc<Level>> {
        self.stack.get(self.by_number[number as usize] as usize)
    }

    /// The position in the stack of the level with this number.
    pub fn index(&self, number: u8) -> Option<usize> {
        let index = self.by_number[number as usize] as usize;
        (index < self.stack.len()).then_some(index)
    }

    pub fn position(&self, key: LevelKey) -> Option<usize> {
        self.stack.iter().position(|level| level.key() == key)
    }

    /// The merge to which writes have to be reported.
    pub fn live_job(&self) -> Option<&Arc<Job>> {
        self.job.as_ref().filter(|_| self.job_is_live)
    }

    fn moving_level(&self) -> Option<&Arc<Level>> {
        self.moving.and_then(|key| self.stack.iter().find(|level| level.key() == key))
    }

    /// The extents that may be cached: all except those in a level in which grains are moved.
    pub fn lasting<'a>(&self, found: &'a [Mapping]) -> Cow<'a, [Mapping]> {
        match self.moving_level().map(|level| level.number()) {
            None => Cow::Borrowed(found),
            Some(number) => found.iter().filter(|found| found.to.level() != Some(number)).copied().collect(),
        }
    }

    /// How many bytes of level `index` are visible through the levels from `from` on.
    pub fn visible(&self, from: usize, index: usize) -> u64 {
        if from == 0 {
            return self.visible[index];
        }
        self.stack[from..=index].iter().map(|level| level.layer.capacity()).min().unwrap_or(0)
    }

    /// A guard for file locations. It is taken before a lookup, and held while the locations are used.
    pub fn guard(self: Arc<Self>) -> Guard {
        let epoch = |level: &Level| if level.reuses { level.layer.epoch() } else { None };
        let top = epoch(self.top());
        let target = self.job.as_ref().and_then(|job| epoch(&job.target));
        let moving = self.moving_level().and_then(|level| epoch(level));
        let leaving = self.leaving.iter().filter_map(|level| epoch(level)).collect();
        Guard { levels: self, _top: top, _target: target, _moving: moving, _leaving: leaving }
    }
}

/// Stacks that are no longer current and may still be in use. A request may hold a stack while several newer ones are
/// published, so a caller that waits for older requests has to wait for all stacks up to a generation.
#[derive(Default)]
pub(crate) struct Replaced(Mutex<Vec<(u64, Weak<Levels>)>>);

impl Replaced {
    /// Adds a stack that was just replaced. Entries of stacks that no request uses any more are removed, so the list
    /// stays short.
    pub fn add(&self, levels: &Arc<Levels>) {
        let mut stacks = self.0.lock();
        stacks.retain(|(_, levels)| levels.strong_count() > 0);
        stacks.push((levels.generation, Arc::downgrade(levels)));
    }

    /// Whether a stack of `generation` or an older one is in use.
    pub fn in_use(&self, generation: u64) -> bool {
        let stacks = self.0.lock();
        let used = stacks.iter().any(|(number, levels)| *number <= generation && levels.strong_count() > 0);
        // Reading the count does not order the last holder's accesses before those of the caller; this fence does.
        fence(Ordering::Acquire);
        used
    }
}
