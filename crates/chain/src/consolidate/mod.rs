//! Merging levels while the disk is in use.
//!
//! **Down** ([`Chain::merge_down`]): the content of consecutive levels is copied into the level below them, and then
//! these levels are removed. If these levels are all above the base, this consolidates the whole chain. **Up**
//! ([`Chain::merge_up`]): the visible content of the levels directly below a level is copied into that level, and then
//! these lower levels are removed.
//!
//! ```text
//!          down, the top among the sources                      writes are made in
//!   bulk     copy the content of the sources, front to back     top, and mark the dirty log
//!   passes   copy the ranges in the log, while it shrinks       top, and mark the dirty log
//!   mirror   wait for writers under way; copy the log's rest    top, then target
//!   commit   flush both; replace the owner's record             top, then target
//!   swap     publish the levels without the sources             target
//! ```
//!
//! 1. **No visible change before the commit.** Down: the sources cover every range that is written into the target. Up:
//!    only absent ranges of the target are filled, with the content that was visible there. So a crash, an error or an
//!    interruption before the commit leaves a chain that reads as before, and the merge may be repeated from its last
//!    checkpoint.
//! 2. **A merge ends** under any load: once every write is made in top and target, the amount left to copy only
//!    shrinks, and writers wait only while the stack is swapped. The passes before keep this amount small, and so also
//!    the time in which every write is made twice.
//! 3. **No flushed write is lost.** The last flush before the commit covers top and target, so the target durably has
//!    everything acknowledged before. Later writes are made in both, and after the swap in the target.
//! 4. A step copies at most [`COPY_STEP`] with that range locked, so a write waits for at most one step. A mirrored
//!    write locks its range, rounded outwards to whole grains of both levels.
//! 5. A target that reuses grains is changed only after every plan that does not hold the target's epoch has ended.
//!    This includes plans of stacks that snapshots replaced before the merge began.
//! 6. When a merge begins, the snapshot at the level of the target (down) or of a source (up) is lost. The owner of the
//!    chain ensures that no other chain has this level open. If a merge should be resumed after a crash, the owner
//!    records its beginning.

mod copy;
mod dirty;

use crate::chain::Chain;
use crate::levels::{Level, LevelKey, Levels};
use crate::limits::{COPY_CHECKPOINT, COPY_PASSES_MAX, COPY_REST, COPY_STEP};
use crate::mapping::Numbers;
use crate::{Error, ErrorKind, Result};
use copy::{Copied, Side};
pub(crate) use dirty::DirtyLog;
use layer::{Layer, SECTOR};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use work::{NoProgress, Progress, Throttle};

/// The result of a merge.
pub struct Merged {
    /// The layers that are no longer part of the chain, newest first. Their files may be removed: requests still
    /// reading them keep them open.
    pub removed: Vec<Arc<dyn Layer>>,
    /// Bytes copied, including those copied again.
    pub copied: u64,
    /// Passes over the dirty log.
    pub passes: u32,
    /// The longest time for which writers had to wait.
    pub pause: Duration,
}

/// The state of a merge that writers read.
pub(crate) struct Job {
    side: Side,
    pub target: Arc<Level>,
    pub sources: Vec<LevelKey>,
    /// The level numbers of the sources.
    pub numbers: Numbers,
    pub dirty: DirtyLog,
    mirroring: AtomicBool,
    committing: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Job {
    /// True when writes are made in the top and in the target.
    pub fn mirrors(&self) -> bool {
        self.mirroring.load(Ordering::SeqCst)
    }

    /// True while a lost write to the target loses no flushed data.
    pub fn leaves_target_out(&self) -> bool {
        self.side == Side::Down && !self.commits()
    }

    /// True when the owner's record may change at any moment: from then on a flush has to make writes durable in the
    /// target too.
    fn commits(&self) -> bool {
        self.committing.load(Ordering::SeqCst)
    }

    /// Handles a change of `range` after which the target may differ from the top: the merge ends with `error`, unless
    /// the owner's record has been replaced already. In the commit phase, the client's change fails with `error` too.
    pub fn fail(&self, error: Error, range: &Range<u64>) -> Result<()> {
        self.dirty.mark(range);
        self.failure.lock().get_or_insert_with(|| error.repeated());
        if self.commits() { Err(error) } else { Ok(()) }
    }

    /// Whether [`Job::check`] would fail.
    fn is_to_end(&self, progress: &dyn Progress) -> bool {
        self.failure.lock().is_some() || progress.cancelled()
    }

    fn check(&self, progress: &dyn Progress) -> Result<()> {
        if let Some(error) = self.failure.lock().take() {
            return Err(error);
        }
        if progress.cancelled() {
            return Err(Error::new(ErrorKind::Interrupted, "the merge was stopped; the chain is as before"));
        }
        Ok(())
    }
}

impl Chain {
    /// Merges the levels from `newest` down to the one directly above `into` into level `into`, starting at byte `from`
    /// (a checkpoint of an earlier attempt, or 0). `commit` is called once, at the end: it durably replaces the owner's
    /// record by one without the sources.
    pub fn merge_down(
        &self,
        newest: LevelKey,
        into: LevelKey,
        from: u64,
        progress: &dyn Progress,
        commit: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Merged> {
        self.merge(Side::Down, newest, into, from, progress, commit)
    }

    /// Merges the levels from the one directly below `into` down to `oldest` into level `into`. Otherwise as
    /// [`Chain::merge_down`].
    pub fn merge_up(
        &self,
        into: LevelKey,
        oldest: LevelKey,
        from: u64,
        progress: &dyn Progress,
        commit: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Merged> {
        self.merge(Side::Up, into, oldest, from, progress, commit)
    }

    /// Merges the whole chain into its base.
    pub fn consolidate(&self, progress: &dyn Progress, commit: &mut dyn FnMut() -> Result<()>) -> Result<Merged> {
        let keys = self.keys();
        match keys.as_slice() {
            [newest, .., base] => self.merge_down(*newest, *base, 0, progress, commit),
            _ => Err(Error::new(ErrorKind::Invalid, format!("{}: there is only one level", self.name))),
        }
    }

    /// Replaces the layer of a level by another opening of the same image: one for writing before a merge into the
    /// level, or one for reading afterwards. Waits until no request reads through the old opening, so a caller that
    /// holds a [`crate::Plan`] of this chain would wait forever.
    pub fn replace(&self, key: LevelKey, layer: Arc<dyn Layer>) -> Result<()> {
        let control = self.control.lock();
        let levels = self.levels();
        let index = levels.position(key).filter(|index| *index > 0).ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("{}: only a level below the top can be replaced", self.name))
        })?;
        let old = &levels.stack[index];
        // The format name of a flat disk includes its provisioning type, which writing changes.
        if layer.capacity() != old.layer.capacity() || layer.grain().max(SECTOR) != old.grain {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{}: a level can be replaced by another opening of the same image only", self.name),
            ));
        }
        let level = Arc::new(Level::new(Arc::clone(&old.identity), layer)?);
        let mut stack = levels.stack.clone();
        stack[index] = level;
        let (old, _) = self.publish(stack, levels.job.clone());
        drop(levels);
        drop(control);
        self.wait_unused(old, &NoProgress)
    }

    /// Closes the layer of a level that no operation is changing. Afterwards, nothing of the level is left to flush.
    pub fn close_level(&self, key: LevelKey) -> Result<()> {
        let levels = self.levels();
        let Some(level) = levels.stack.iter().find(|level| level.key() == key) else { return Ok(()) };
        level.layer.close()?;
        level.unflushed.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Runs work that moves the grains of a level: wiping, shrinking. A layer reuses a freed grain once no plan holds
    /// an epoch from before the move, but cache entries hold no epoch. So during the work no extent of the level is
    /// cached, and every reader holds the level's epoch, wherever in the stack the level is.
    pub fn while_moving<T>(&self, key: LevelKey, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let _operation = self.operation.try_lock().ok_or_else(|| {
            Error::new(ErrorKind::Busy, format!("{}: a merge or other work on this disk is under way", self.name))
        })?;
        let old = {
            let _control = self.control.lock();
            let levels = self.levels();
            if levels.position(key).is_none() {
                return Err(Error::new(ErrorKind::NotFound, format!("{}: the level is not in the chain", self.name)));
            }
            self.publish_moving(levels.stack.clone(), levels.job.clone(), Some(key)).0
        };
        // A request that began before may still insert extents of this level into the cache, and holds no epoch of the
        // level.
        self.wait_unused(old, &NoProgress)?;
        if let Some(level) = self.levels().stack.iter().find(|level| level.key() == key) {
            self.metadata.purge(level.number());
        }
        let result = work();
        let _control = self.control.lock();
        let levels = self.levels();
        self.publish_moving(levels.stack.clone(), levels.job.clone(), None);
        result
    }

    fn merge(
        &self,
        side: Side,
        upper: LevelKey,
        lower: LevelKey,
        from: u64,
        progress: &dyn Progress,
        commit: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Merged> {
        let _operation = self.operation.try_lock().ok_or_else(|| {
            Error::new(ErrorKind::Busy, format!("{}: another merge of this disk is under way", self.name))
        })?;
        let (job, old) = self.begin(side, upper, lower)?;
        let ready = if job.target.reuses { self.wait_unused(old, progress) } else { Ok(()) };
        let result = ready.and_then(|()| self.carry_out(&job, from, progress, commit));
        result.inspect_err(|error| {
            if job.target.layer.has_stopped() {
                self.stop(error);
            }
            // Cached extents may already refer to copies in the target, which may be lost after a failed flush.
            self.metadata.purge(job.target.number());
            let _control = self.control.lock();
            self.copies_until.store(self.levels().generation, Ordering::SeqCst);
            self.publish(self.levels().stack.clone(), None);
        })
    }

    /// Checks the request for a merge, and publishes the job, so that writers find it.
    fn begin(&self, side: Side, upper: LevelKey, lower: LevelKey) -> Result<(Arc<Job>, Arc<Levels>)> {
        let _control = self.control.lock();
        self.check_running()?;
        let levels = self.levels();
        let refuse = |kind, what: &str| Err(Error::new(kind, format!("{}: {what}", self.name)));
        let (Some(upper), Some(lower)) = (levels.position(upper), levels.position(lower)) else {
            return refuse(ErrorKind::NotFound, "a level to merge is not in the chain");
        };
        if upper >= lower {
            return refuse(ErrorKind::Invalid, "there is nothing to merge between these levels");
        }
        let (target, sources) = match side {
            Side::Down => (lower, upper..lower),
            Side::Up => (upper, upper + 1..lower + 1),
        };
        let target = &levels.stack[target];
        if !target.layer.writable() {
            return refuse(ErrorKind::ReadOnly, "the image to merge into is open for reading only");
        }
        if side == Side::Down {
            let below = target.layer.capacity();
            let newest = levels.stack[upper].layer.capacity();
            if newest > below || (upper == 0 && newest != below) {
                return refuse(
                    ErrorKind::Unsupported,
                    &format!(
                        "a layer of {newest} bytes cannot be merged into one of {below}; merge it the other way, or \
                         convert the disk"
                    ),
                );
            }
        }
        let mut numbers = Numbers::default();
        levels.stack[sources.clone()].iter().for_each(|level| numbers.insert(level.number()));
        let job = Arc::new(Job {
            side,
            target: Arc::clone(target),
            sources: levels.stack[sources].iter().map(|level| level.key()).collect(),
            numbers,
            dirty: DirtyLog::new(levels.capacity()),
            mirroring: AtomicBool::new(false),
            committing: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        self.copies_until.store(u64::MAX, Ordering::SeqCst);
        // From here on every write marks the dirty log.
        let (old, _) = self.publish(levels.stack.clone(), Some(Arc::clone(&job)));
        Ok((job, old))
    }

    /// Waits until no request uses `old`, or an older stack.
    fn wait_unused(&self, old: Arc<Levels>, progress: &dyn Progress) -> Result<()> {
        let generation = old.generation;
        drop(old);
        while self.replaced.in_use(generation) {
            if progress.cancelled() {
                return Err(Error::new(ErrorKind::Interrupted, format!("{}: stopped before it began", self.name)));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    fn carry_out(
        &self,
        job: &Arc<Job>,
        from: u64,
        progress: &dyn Progress,
        commit: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Merged> {
        let capacity = job.target.layer.capacity();
        let mut merged = Merged { removed: Vec::new(), copied: 0, passes: 0, pause: Duration::ZERO };
        let throttle = Throttle::new(progress);
        let mut unflushed = 0;
        // The top may have been written since the checkpoint, and the dirty log of the earlier attempt is lost.
        let from = if self.levels().job_is_live { 0 } else { from };
        // From the end on nothing is left, also not of a last grain that the capacity cuts.
        let mut at = if from >= capacity { capacity } else { from / job.target.grain * job.target.grain };
        while at < capacity {
            self.check_merge(job, progress)?;
            progress.update(at, capacity);
            let Copied { next, bytes } = self.copy_up_to_damage(job, at)?;
            at = next;
            merged.copied += bytes;
            unflushed += bytes;
            if unflushed >= COPY_CHECKPOINT {
                unflushed = 0;
                self.flush_target(job)?;
                progress.durable(at);
            }
            throttle.wait_unless(bytes, || self.is_merge_to_end(job, progress));
        }
        progress.update(capacity, capacity);
        if job.side == Side::Down {
            self.follow_writes(job, &mut merged, &throttle, progress)?;
        }
        self.hide_tail(job)?;
        self.flush_target(job)?;
        // From here on a write fails if it fails in the target, and every flush covers the target: so the target has
        // every acknowledged write.
        job.committing.store(true, Ordering::SeqCst);
        self.pass_writers(&mut merged);
        self.flush()?;
        job.check(progress)?;
        commit()?;
        let missed = self.copy_missed(job);
        let _control = self.control.lock();
        // All copies are flushed, except those of missed changes, which are noted like changes of the target.
        self.copies_until.store(self.levels().generation, Ordering::SeqCst);
        let stays = |level: &&Arc<Level>| !job.sources.contains(&level.key());
        let (old, pause) = self.publish(self.levels().stack.iter().filter(stays).cloned().collect(), None);
        merged.pause = merged.pause.max(pause);
        self.stop_over_missed(job, missed);
        let gone = old.stack.iter().filter(|level| job.sources.contains(&level.key()));
        merged.removed = gone.map(|level| Arc::clone(&level.layer)).collect();
        Ok(merged)
    }

    /// Fails if a merge has to end: because of the merge itself, or because the chain has stopped.
    fn check_merge(&self, job: &Job, progress: &dyn Progress) -> Result<()> {
        job.check(progress)?;
        self.check_running()
    }

    /// Whether [`Chain::check_merge`] would fail.
    fn is_merge_to_end(&self, job: &Job, progress: &dyn Progress) -> bool {
        job.is_to_end(progress) || self.check_running().is_err()
    }

    /// Copies the next range. If a part of it is damaged, copies what is before that part, so that a merge that fails
    /// has copied everything up to the first damaged grain.
    fn copy_up_to_damage(&self, job: &Job, at: u64) -> Result<Copied> {
        let mut most = COPY_STEP;
        loop {
            match self.copy_next(job, at, most) {
                Err(error) if error.kind() == ErrorKind::Corrupt && most > job.target.grain => most /= 2,
                copied => return copied,
            }
        }
    }

    /// After the last check, further changes may have failed in the target, or been executed only partly in the top.
    /// This copies their ranges, because from the swap on, reads of these ranges are made in the target.
    fn copy_missed(&self, job: &Arc<Job>) -> Result<()> {
        let mut at = 0;
        while let Some(piece) = job.dirty.take(at) {
            at = piece.end;
            let mut start = piece.start;
            while start < piece.end {
                let copied = self.copy_within(job, start..piece.end, COPY_STEP);
                start = copied.inspect_err(|_| job.dirty.mark(&piece))?.next;
            }
        }
        Ok(())
    }

    /// Stops the chain if the target still lacks a change: until the chain is opened again, the range of that change is
    /// not read, so that no reader gets content older than what it has read before.
    fn stop_over_missed(&self, job: &Job, missed: Result<()>) {
        let failure = job.failure.lock().take();
        let mut at = 0;
        while let Some(piece) = job.dirty.take(at) {
            at = piece.end;
            self.rearranged.note(&piece);
        }
        if at > 0 {
            let unknown = || Error::new(ErrorKind::Io, "a change failed at the end of a merge");
            self.stop(&missed.err().or(failure).unwrap_or_else(unknown));
        }
    }

    /// Waits until all writes that began before this call have ended; new writes may begin meanwhile.
    fn pass_writers(&self, merged: &mut Merged) {
        let _control = self.control.lock();
        let levels = self.levels();
        let (_, pause) = self.publish(levels.stack.clone(), levels.job.clone());
        merged.pause = merged.pause.max(pause);
    }

    /// Copies the ranges that were written during the merge, until the target equals the sources and every write is
    /// made in both.
    fn follow_writes(
        &self,
        job: &Arc<Job>,
        merged: &mut Merged,
        throttle: &Throttle<&dyn Progress>,
        progress: &dyn Progress,
    ) -> Result<()> {
        // Writers that were faster than half of the first pass would be as fast as the second one, so it is the last.
        let mut before = merged.copied;
        let (capacity, mut followed) = (self.capacity(), 0);
        loop {
            let left = job.dirty.bytes();
            let total = capacity + followed + left;
            let last = left <= COPY_REST || left > before / 2 || merged.passes >= COPY_PASSES_MAX;
            if last {
                // The target is flushed before mirroring begins, so that later flushes are short while every write is
                // made twice.
                self.flush_target(job)?;
                job.mirroring.store(true, Ordering::SeqCst);
                self.pass_writers(merged);
            }
            merged.passes += 1;
            let mut at = 0;
            while let Some(piece) = job.dirty.take(at) {
                at = piece.end;
                let mut start = piece.start;
                while start < piece.end {
                    self.check_merge(job, progress)?;
                    let Copied { next, bytes } = self.copy_within(job, start..piece.end, COPY_STEP)?;
                    start = next;
                    merged.copied += bytes;
                    followed += bytes;
                    progress.update(capacity + followed, total.max(capacity + followed));
                    throttle.wait_unless(bytes, || self.is_merge_to_end(job, progress));
                }
            }
            if last {
                return Ok(());
            }
            before = left;
        }
    }
}
