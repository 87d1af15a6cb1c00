//! The stack of levels at one point in time.
//!
//! 1. A [`Levels`] never changes; a snapshot or merge publishes another one. A request holds the one it works with, so
//!    a merge can wait until no request reads by an older one any more.
//! 2. A level is known to the caches by a number from 0 to 255. A number is given to another level only after the last
//!    reference to the old one is gone and the caches are cleared of it, so a cached place never names another level.
//! 3. What a level does not show to those above it: bytes past its own capacity or past that of any level between.

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
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Numbers that levels can have.
const NUMBERS: usize = 256;

/// The name of a level of one open chain; stays with it wherever in the stack it comes to stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LevelKey(pub(crate) u64);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Never given, or cleared from the caches.
    Free,
    Taken,
    /// Given back; the caches may still name it.
    Left,
}

/// Gives numbers to levels.
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

    /// A number that no level has; `purge` clears the caches of one that a level had before.
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

/// One layer and what the chain keeps about it.
pub(crate) struct Level {
    pub identity: Arc<Identity>,
    pub layer: Arc<dyn Layer>,
    /// Something was written whose end no flush has begun after.
    pub unflushed: AtomicBool,
    /// It may give places to others.
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
        // Below a sector nothing is ever asked of a layer.
        let grain = grain.max(SECTOR);
        Ok(Self { identity, layer, unflushed: AtomicBool::new(false), reuses, grain })
    }

    pub fn key(&self) -> LevelKey {
        self.identity.key
    }

    /// To be held around whatever changes the layer.
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

/// A change of a layer under way. That it needs a flush is noted at its end: a flush in the middle of it need not cover
/// it, and must not take the note away.
pub(crate) struct Changing<'a>(&'a Level);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        // A plain load first: the cache line is shared by all writers.
        if !self.0.unflushed.load(Ordering::SeqCst) {
            self.0.unflushed.store(true, Ordering::SeqCst);
        }
    }
}

/// Keeps what a plan names from becoming something else.
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
    /// Index in the stack by number, 255 where there is none.
    by_number: [u8; NUMBERS],
    /// Least capacity from the top down to each level.
    visible: Vec<u64>,
    pub gate: Gate,
    /// Levels that are still written by the requests inside an older gate.
    leaving: Vec<Arc<Level>>,
    /// The level whose places are given to others beside what is written: nothing in it is cached.
    pub moving: Option<LevelKey>,
    /// The merge that is under way.
    pub job: Option<Arc<Job>>,
    /// It takes from the top, so that it has to know of writes.
    pub job_is_live: bool,
    /// Reads are widened to this, because some file is open past the page cache.
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

    /// The level with a number, if it is in this stack.
    pub fn level(&self, number: u8) -> Option<&Arc<Level>> {
        self.stack.get(self.by_number[number as usize] as usize)
    }

    /// Where in the stack the level with a number is.
    pub fn index(&self, number: u8) -> Option<usize> {
        let index = self.by_number[number as usize] as usize;
        (index < self.stack.len()).then_some(index)
    }

    pub fn position(&self, key: LevelKey) -> Option<usize> {
        self.stack.iter().position(|level| level.key() == key)
    }

    /// The merge that has to know of writes.
    pub fn live_job(&self) -> Option<&Arc<Job>> {
        self.job.as_ref().filter(|_| self.job_is_live)
    }

    fn moving_level(&self) -> Option<&Arc<Level>> {
        self.moving.and_then(|key| self.stack.iter().find(|level| level.key() == key))
    }

    /// What may be kept of an answer: nothing that lies in a level whose places move.
    pub fn lasting<'a>(&self, found: &'a [Mapping]) -> Cow<'a, [Mapping]> {
        match self.moving_level().map(|level| level.number()) {
            None => Cow::Borrowed(found),
            Some(number) => found.iter().filter(|found| found.to.level() != Some(number)).copied().collect(),
        }
    }

    /// How far level `index` can be seen through those from `from` on.
    pub fn visible(&self, from: usize, index: usize) -> u64 {
        if from == 0 {
            return self.visible[index];
        }
        self.stack[from..=index].iter().map(|level| level.layer.capacity()).min().unwrap_or(0)
    }

    /// To be taken before a place is looked for, and held while it is used.
    pub fn guard(self: Arc<Self>) -> Guard {
        let epoch = |level: &Level| if level.reuses { level.layer.epoch() } else { None };
        let top = epoch(self.top());
        let target = self.job.as_ref().and_then(|job| epoch(&job.target));
        let moving = self.moving_level().and_then(|level| epoch(level));
        let leaving = self.leaving.iter().filter_map(|level| epoch(level)).collect();
        Guard { levels: self, _top: top, _target: target, _moving: moving, _leaving: leaving }
    }
}
