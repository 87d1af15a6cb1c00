//! The gate of a stack of levels. Any number of writers may be inside. Writers can be made to wait for a moment, and
//! are refused once another stack is current.
//!
//! 1. After [`Gate::close`] has returned no writer is inside, and none enters before [`Gate::open`].
//! 2. After [`Gate::retire`] no writer enters or waits; after [`Gate::drain`] none is inside.
//! 3. Entering and leaving an open gate is one atomic step each.

use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicU64, Ordering};

const CLOSED: u64 = 1 << 63;
const RETIRED: u64 = 1 << 62;
const INSIDE: u64 = RETIRED - 1;

/// The number of writers inside, and whether more may enter.
#[derive(Default)]
pub(crate) struct Gate {
    state: AtomicU64,
    waiting: Mutex<()>,
    changed: Condvar,
}

/// Permission of one writer to be inside the gate, until this value is dropped.
pub(crate) struct Inside<'a>(&'a Gate);

impl Gate {
    /// Enters the gate; waits while it is closed. `None` when it is retired.
    pub fn enter(&self) -> Option<Inside<'_>> {
        let mut state = self.state.load(Ordering::SeqCst);
        loop {
            if state & RETIRED != 0 {
                return None;
            }
            if state & CLOSED != 0 {
                let mut waiting = self.waiting.lock();
                state = self.state.load(Ordering::SeqCst);
                if state & CLOSED != 0 && state & RETIRED == 0 {
                    self.changed.wait(&mut waiting);
                    state = self.state.load(Ordering::SeqCst);
                }
                continue;
            }
            match self.state.compare_exchange_weak(state, state + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(Inside(self)),
                Err(now) => state = now,
            }
        }
    }

    /// Stops writers from entering, and waits until those inside have left. One caller at a time.
    pub fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::SeqCst);
        self.drain();
    }

    /// Lets writers enter again.
    pub fn open(&self) {
        let _waiting = self.waiting.lock();
        self.state.fetch_and(!CLOSED, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Refuses writers from now on, including those that wait to enter.
    pub fn retire(&self) {
        let _waiting = self.waiting.lock();
        self.state.fetch_or(RETIRED, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Waits until no writer is inside a closed or retired gate.
    pub fn drain(&self) {
        let mut waiting = self.waiting.lock();
        while self.state.load(Ordering::SeqCst) & INSIDE != 0 {
            self.changed.wait(&mut waiting);
        }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let state = self.0.state.fetch_sub(1, Ordering::SeqCst) - 1;
        if state & INSIDE == 0 && state != 0 {
            let _waiting = self.0.waiting.lock();
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn no_thread_is_in_a_closed_gate_or_enters_a_retired_one() {
        let (gate, stop) = (Gate::default(), AtomicBool::new(false));
        let inside = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some(_inside) = gate.enter() {
                        assert!(!stop.load(Ordering::SeqCst));
                        inside.fetch_add(1, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
            for _ in 0..5_000 {
                gate.close();
                assert_eq!(inside.load(Ordering::SeqCst), 0);
                gate.open();
            }
            gate.close();
            gate.retire();
            gate.drain();
            stop.store(true, Ordering::SeqCst);
            gate.open();
        });
        assert!(gate.enter().is_none());
    }
}
