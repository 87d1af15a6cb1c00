//! Flushes: everybody who waits for one shares the next.
//!
//! 1. A flush that was asked for is answered by one that **began** after that.
//! 2. One runs at a time. It flushes every level that was written since its last flush, so that what lies in a level
//!    which a snapshot has just put below is covered too.
//! 3. After one failed nothing is known of what was written before; the chain stops.

use crate::chain::Chain;
use crate::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::Ordering;

#[derive(Default)]
struct State {
    asked: u64,
    /// Requests up to this one are answered.
    answered: u64,
    running: bool,
}

/// Who waits for a flush.
#[derive(Default)]
pub(crate) struct Flushes {
    state: Mutex<State>,
    changed: Condvar,
}

impl Chain {
    /// Makes everything written before this call durable.
    pub fn flush(&self) -> Result<()> {
        let flushes = &self.flushes;
        let mut state = flushes.state.lock();
        state.asked += 1;
        let mine = state.asked;
        loop {
            if state.answered >= mine {
                return Ok(());
            }
            self.check_running()?;
            if state.running {
                flushes.changed.wait(&mut state);
                continue;
            }
            state.running = true;
            let upto = state.asked;
            drop(state);
            let result = self.flush_levels();
            state = flushes.state.lock();
            state.running = false;
            if result.is_ok() {
                state.answered = state.answered.max(upto);
            } else {
                self.stopped.store(true, Ordering::SeqCst);
            }
            flushes.changed.notify_all();
            result?;
        }
    }

    fn flush_levels(&self) -> Result<()> {
        let levels = self.levels();
        for level in &levels.stack {
            if level.unflushed.swap(false, Ordering::SeqCst) {
                level.layer.flush().map_err(|error| error.context(format_args!("flushing {}", self.name)))?;
            }
        }
        Ok(())
    }

    /// An error once a flush has failed.
    pub(crate) fn check_running(&self) -> Result<()> {
        if self.stopped.load(Ordering::SeqCst) {
            return Err(Error::new(
                ErrorKind::Stopped,
                format!("{}: an earlier flush failed or the disk was closed; open it again to write", self.name),
            ));
        }
        Ok(())
    }
}
