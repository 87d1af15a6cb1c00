//! Snapshots: a new top level at one point in time, while requests continue.
//!
//! The owner of the chain first creates the new, empty delta, and durably records the delta as the top. Only then does
//! it call [`Chain::push`]. After a crash between these steps, the chain has an empty top, which does not change the
//! chain's content. So no step has to be undone.
//!
//! ```text
//!   writers:   ... inside the old gate ............ inside the new gate ...
//!   push:             | publish |  drain the old gate  | flush |  done
//! ```
//!
//! 1. A write that begins after `publish` is made in the new level and does not wait. A write that was inside the old
//!    gate has ended before `push` returns. So writes acknowledged before `push` are in the levels below, writes that
//!    begin after it are in the new level, and once `push` has returned, the level below never changes again.
//! 2. Two writes to the same bytes, one through each stack, run one after the other: ranges are locked in the chain,
//!    not in a level.
//! 3. A snapshot of several disks at one point in time: [`Chain::freeze`] on each (always in the same order), then push
//!    on each. Writes of a disk wait from the first freeze until the push of that disk; reads and flushes do not.

use crate::chain::Chain;
use crate::levels::{Level, LevelKey, Levels};
use crate::{Error, ErrorKind, Result};
use layer::Layer;
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A chain in which writers wait. If this value is dropped without a push, the writers continue as before.
pub struct Frozen<'a> {
    chain: &'a Chain,
    levels: Arc<Levels>,
    since: Instant,
    _control: MutexGuard<'a, ()>,
}

impl Chain {
    /// Adds an empty layer, open for writing, on top. The levels below are a snapshot from now on, and durable on
    /// return. Returns the new level, and the longest time for which writers waited.
    pub fn push(&self, layer: Arc<dyn Layer>) -> Result<(LevelKey, Duration)> {
        let pushed = self.push_unflushed(layer)?;
        self.flush()?;
        Ok(pushed)
    }

    /// As [`Chain::push`], without the flush. If this fails, the chain is unchanged; once it has succeeded, writes are
    /// made in the new level, whether the flush succeeds or not.
    pub fn push_unflushed(&self, layer: Arc<dyn Layer>) -> Result<(LevelKey, Duration)> {
        let _control = self.control.lock();
        let level = self.prepare(layer)?;
        let key = level.key();
        let pause = self.publish_top(level);
        Ok((key, pause))
    }

    /// Makes new writes wait, and waits for the end of writes under way.
    pub fn freeze(&self) -> Result<Frozen<'_>> {
        self.check_writable()?;
        let control = self.control.lock();
        let levels = self.levels();
        let since = Instant::now();
        levels.gate.close();
        Ok(Frozen { chain: self, levels, since, _control: control })
    }

    fn prepare(&self, layer: Arc<dyn Layer>) -> Result<Arc<Level>> {
        self.check_writable()?;
        self.check_room()?;
        if !layer.writable() {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{}: a new top layer has to be open for writing", self.name),
            ));
        }
        self.new_level(layer)
    }

    fn publish_top(&self, level: Arc<Level>) -> Duration {
        let old = self.levels();
        let mut stack = Vec::with_capacity(old.stack.len() + 1);
        stack.push(level);
        stack.extend(old.stack.iter().cloned());
        self.publish(stack, old.job.clone()).1
    }
}

impl Frozen<'_> {
    /// As [`Chain::push`], without the flush: the caller flushes once all disks have been pushed.
    pub fn push(self, layer: Arc<dyn Layer>) -> Result<(LevelKey, Duration)> {
        let level = self.chain.prepare(layer)?;
        let key = level.key();
        self.chain.publish_top(level);
        Ok((key, self.since.elapsed()))
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        // A writer that waits at the gate of a replaced stack is refused there, and tries again with the current stack.
        self.levels.gate.open();
    }
}
