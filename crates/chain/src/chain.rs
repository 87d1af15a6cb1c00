//! An open chain: its options, its state, and replacing its levels by a new stack.

use crate::changes::Changes;
use crate::consolidate::Job;
use crate::data::DataCache;
use crate::flush::Flushes;
use crate::levels::{Identities, Level, LevelKey, Levels, Replaced};
use crate::limits::{LEVELS_DEFAULT, LEVELS_MAX};
use crate::metadata::{MetadataCache, Tunables};
use crate::ranges::Ranges;
use crate::statistics::{LevelStatistics, Statistics};
use crate::unflushed::Unflushed;
use crate::{Error, ErrorKind, Result};
use layer::{CAPACITY_MAX, Layer};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How a chain is opened.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether to refuse every change, also when the top layer is open for writing.
    pub read_only: bool,
    /// The most levels, up to [`LEVELS_MAX`].
    pub levels_max: usize,
    /// Settings of the metadata cache.
    pub metadata: Tunables,
    /// Bytes of the data cache; 0 for none.
    pub data_cache: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { read_only: false, levels_max: LEVELS_DEFAULT, metadata: Tunables::default(), data_cache: 0 }
    }
}

/// An open chain. All methods may be called from any thread.
pub struct Chain {
    pub(crate) name: String,
    pub(crate) read_only: bool,
    levels_max: AtomicUsize,
    current: RwLock<Arc<Levels>>,
    /// The generation of the current levels, incremented just before new levels are published.
    generation: AtomicU64,
    /// Stacks that were replaced and that requests may still use.
    pub(crate) replaced: Replaced,
    pub(crate) identities: Arc<Identities>,
    pub(crate) metadata: MetadataCache,
    pub(crate) data: DataCache,
    pub(crate) changes: Changes,
    pub(crate) ranges: Ranges,
    pub(crate) flushes: Flushes,
    pub(crate) unflushed: Unflushed,
    /// Ranges changed by other work than a client's write: filled by a merge up, or moved. Used as `unflushed`, but if
    /// such a change is lost, no acknowledged write is lost.
    pub(crate) rearranged: Unflushed,
    /// Ranges that a merge down has copied since the last flush of its target. The caches lead reads to these copies.
    pub(crate) copied: Unflushed,
    /// Grains of the target that a merge down has completed since the last flush of the target, because the sources
    /// store only a part of them. Reads of the other parts are made in the target, also after the merge.
    pub(crate) completed: Unflushed,
    /// Plans of later generations of levels do not refer to such copies. The largest number while a merge runs.
    pub(crate) copies_until: AtomicU64,
    pub(crate) stopped: AtomicBool,
    /// Whether the chain was closed except for layers that lacked the space to be closed.
    closing: AtomicBool,
    /// The reason for which the chain was stopped or its top refuses changes.
    pub(crate) failure: Mutex<Option<String>>,
    /// Held during a change of the stack, so that only one is made at a time.
    pub(crate) control: Mutex<()>,
    /// Held during a merge or a move of grains, so that only one runs at a time.
    pub(crate) operation: Mutex<()>,
    pub(crate) fills: AtomicU64,
}

impl Chain {
    /// Opens a chain of layers, newest first. The name is for messages.
    pub fn open(name: impl Into<String>, layers: Vec<Arc<dyn Layer>>, options: Options) -> Result<Self> {
        let name = name.into();
        check_limit(&name, options.levels_max)?;
        if layers.is_empty() {
            return Err(Error::new(ErrorKind::Invalid, format!("{name}: a chain needs at least one layer")));
        }
        check_depth(&name, layers.len(), options.levels_max)?;
        let identities = Identities::new();
        let mut stack = Vec::with_capacity(layers.len());
        for layer in layers {
            check_capacity(&name, &*layer)?;
            stack.push(Arc::new(Level::new(identities.take(|_| {})?, layer)?));
        }
        let read_only = options.read_only || !stack[0].layer.writable();
        let capacity = stack[0].layer.capacity();
        Ok(Self {
            read_only,
            levels_max: AtomicUsize::new(options.levels_max),
            current: RwLock::new(Arc::new(Levels::new(0, stack, None, None, Vec::new()))),
            generation: AtomicU64::new(0),
            replaced: Replaced::default(),
            identities,
            metadata: MetadataCache::new(options.metadata)?,
            data: DataCache::new(options.data_cache)?,
            changes: Changes::new(),
            ranges: Ranges::default(),
            flushes: Flushes::default(),
            unflushed: Unflushed::new(if read_only { 0 } else { capacity }),
            rearranged: Unflushed::new(if read_only { 0 } else { capacity }),
            copied: Unflushed::new(if read_only { 0 } else { capacity }),
            completed: Unflushed::new(if read_only { 0 } else { capacity }),
            copies_until: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            failure: Mutex::new(None),
            control: Mutex::new(()),
            operation: Mutex::new(()),
            fills: AtomicU64::new(0),
            name,
        })
    }

    /// The name that was given to [`Chain::open`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Capacity in bytes: that of the top layer.
    pub fn capacity(&self) -> u64 {
        self.levels().capacity()
    }

    /// The smallest range, in bytes, of which the top layer can free the space.
    pub fn grain(&self) -> u64 {
        self.levels().top().grain
    }

    /// True when changes are refused.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The levels, newest first.
    pub fn keys(&self) -> Vec<LevelKey> {
        self.levels().stack.iter().map(|level| level.key()).collect()
    }

    /// The layer of a level.
    pub fn layer(&self, key: LevelKey) -> Option<Arc<dyn Layer>> {
        let levels = self.levels();
        levels.position(key).map(|index| Arc::clone(&levels.stack[index].layer))
    }

    /// The tunables of the metadata cache.
    pub fn tunables(&self) -> Tunables {
        self.metadata.tunables()
    }

    /// Changes the tunables of the metadata cache, at once.
    pub fn set_tunables(&self, tunables: Tunables) -> Result<()> {
        self.metadata.set_tunables(tunables)
    }

    /// The most levels that this chain may have.
    pub fn levels_max(&self) -> usize {
        self.levels_max.load(Ordering::Relaxed)
    }

    /// Sets the most levels, up to [`LEVELS_MAX`]. A chain with more levels keeps them, and accepts no new ones.
    pub fn set_levels_max(&self, levels: usize) -> Result<()> {
        check_limit(&self.name, levels)?;
        self.levels_max.store(levels, Ordering::Relaxed);
        Ok(())
    }

    /// Sets the size of the data cache in bytes, at once; 0 switches it off.
    pub fn set_data_cache(&self, bytes: u64) -> Result<()> {
        self.data.set_size(bytes)
    }

    /// The present statistics.
    pub fn statistics(&self) -> Statistics {
        let levels = self.levels();
        let of_level = |level: &Arc<Level>| LevelStatistics {
            key: level.key(),
            format: level.layer.format(),
            capacity: level.layer.capacity(),
            grain: level.layer.grain(),
            writable: level.layer.writable(),
        };
        Statistics {
            levels: levels.stack.iter().map(of_level).collect(),
            metadata: self.metadata.statistics(),
            data: self.data.statistics(),
            fills: self.fills.load(Ordering::Relaxed),
        }
    }

    /// Flushes, and closes every layer that is open for writing. Later changes fail; reads continue. If the flush fails
    /// for lack of space, the layers stay open and can be closed later. If closing a layer fails for lack of space,
    /// the chain takes no changes, and a later call closes that layer.
    pub fn close(&self) -> Result<()> {
        let _control = self.control.lock();
        let levels = self.levels();
        if !self.closing.load(Ordering::SeqCst) {
            if self.stopped.load(Ordering::SeqCst) {
                // A flush that began before may still write tables.
                self.flushes.wait_idle();
                return Ok(());
            }
            levels.gate.close();
            let result = self.flush();
            match &result {
                Err(error) if error.kind() == ErrorKind::NoSpace => {}
                Err(error) => self.stop(error),
                Ok(()) => self.stopped.store(true, Ordering::SeqCst),
            }
            levels.gate.open();
            result?;
        }
        let mut outcome = Ok(());
        for level in levels.stack.iter().filter(|level| level.layer.writable()) {
            let Err(error) = level.layer.close() else { continue };
            let error = error.context(format_args!("closing {}", self.name));
            // After a lack of space the caller tries again, so any other failure is returned instead.
            if outcome.as_ref().map_or_else(|first: &Error| first.kind() == ErrorKind::NoSpace, |()| true) {
                outcome = Err(error);
            }
        }
        let lacks_space = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace);
        self.closing.store(lacks_space, Ordering::SeqCst);
        outcome.inspect_err(|error| {
            if !lacks_space {
                self.stop(error);
            }
        })
    }

    /// Stops the chain without a flush, for an owner that opens the same layers again. Waits until no change and no
    /// flush is under way; later changes and flushes are refused. Returns whether there were changes since the last
    /// successful flush, which may be lost.
    pub fn abandon(&self) -> bool {
        let _control = self.control.lock();
        self.stopped.store(true, Ordering::SeqCst);
        let levels = self.levels();
        levels.gate.close();
        levels.gate.open();
        self.flushes.wait_idle();
        !self.unflushed.is_empty()
    }

    /// Why the chain refuses changes, if an I/O failure is the reason.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    /// The current levels.
    pub(crate) fn levels(&self) -> Arc<Levels> {
        Arc::clone(&self.current.read())
    }

    /// True while these are the current levels. A reader calls this after it has taken its token: so it never fills a
    /// cache with a result from a stack to which writes no longer go.
    pub(crate) fn is_current(&self, levels: &Levels) -> bool {
        self.generation.load(Ordering::SeqCst) == levels.generation
    }

    /// Makes another stack current, under the control lock. Returns the previous levels, which no write uses any more,
    /// and the time during which no write could begin.
    ///
    /// Until the last writer has left the old gate, guards of the new levels also hold the epochs of the old top and of
    /// the target of the old merge: writes through the old levels may still free and reuse grains of these layers.
    pub(crate) fn publish(&self, stack: Vec<Arc<Level>>, job: Option<Arc<Job>>) -> (Arc<Levels>, Duration) {
        let moving = self.levels().moving;
        self.publish_moving(stack, job, moving)
    }

    /// As [`Chain::publish`]; also sets `moving`, the level in which grains are moved from now on.
    pub(crate) fn publish_moving(
        &self,
        stack: Vec<Arc<Level>>,
        job: Option<Arc<Job>>,
        moving: Option<LevelKey>,
    ) -> (Arc<Levels>, Duration) {
        let old = self.levels();
        let written = [Some(old.top()), old.job.as_ref().map(|job| &job.target)];
        let stays = |level: &Level| {
            level.key() == stack[0].key() || job.as_ref().is_some_and(|job| job.target.key() == level.key())
        };
        let leaving: Vec<Arc<Level>> =
            written.into_iter().flatten().filter(|level| level.reuses && !stays(level)).cloned().collect();
        let begun = Instant::now();
        self.swap(stack.clone(), job.clone(), moving, leaving.clone());
        let pause = begun.elapsed();
        old.gate.drain();
        if !leaving.is_empty() {
            self.swap(stack, job, moving, Vec::new()).gate.drain();
        }
        (old, pause)
    }

    fn swap(
        &self,
        stack: Vec<Arc<Level>>,
        job: Option<Arc<Job>>,
        moving: Option<LevelKey>,
        leaving: Vec<Arc<Level>>,
    ) -> Arc<Levels> {
        let generation = self.generation.load(Ordering::SeqCst) + 1;
        let new = Arc::new(Levels::new(generation, stack, job, moving, leaving));
        let old = {
            let mut current = self.current.write();
            self.generation.store(generation, Ordering::SeqCst);
            current.gate.retire();
            std::mem::replace(&mut *current, new)
        };
        self.replaced.add(&old);
        old
    }

    /// A level for a layer that is added to the chain.
    pub(crate) fn new_level(&self, layer: Arc<dyn Layer>) -> Result<Arc<Level>> {
        check_capacity(&self.name, &*layer)?;
        let identity = self.identities.take(|number| self.metadata.purge(number))?;
        Ok(Arc::new(Level::new(identity, layer)?))
    }

    pub(crate) fn check_room(&self) -> Result<()> {
        check_depth(&self.name, self.levels().stack.len() + 1, self.levels_max())
    }

    pub(crate) fn check_range(&self, capacity: u64, offset: u64, length: u64) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= capacity => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!("{}: {length} bytes at offset {offset} lie past its capacity of {capacity} bytes", self.name),
            )),
        }
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open for reading only", self.name)));
        }
        self.check_running()
    }
}

fn check_limit(name: &str, levels: usize) -> Result<()> {
    if levels == 0 || levels > LEVELS_MAX {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{name}: a chain may be limited to 1 to {LEVELS_MAX} levels, not {levels}"),
        ));
    }
    Ok(())
}

fn check_depth(name: &str, levels: usize, most: usize) -> Result<()> {
    if levels > most {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{name}: a chain of {levels} levels is deeper than the limit of {most}; consolidate it, or raise the \
                 limit (at most {LEVELS_MAX})"
            ),
        ));
    }
    Ok(())
}

fn check_capacity(name: &str, layer: &dyn Layer) -> Result<()> {
    if layer.capacity() > CAPACITY_MAX {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{name}: a {} image of {} bytes is larger than {CAPACITY_MAX}", layer.format(), layer.capacity()),
        ));
    }
    Ok(())
}
