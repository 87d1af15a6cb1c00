//! For tests: a progress that calls a function.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use work::Progress;

/// A progress that calls a function with the amounts done and in total; the function returns whether to continue.
pub fn steps<F: FnMut(u64, u64) -> bool + Send>(each: F) -> Steps<F> {
    Steps { each: Mutex::new(each), stopped: AtomicBool::new(false) }
}

/// See [`steps`].
pub struct Steps<F> {
    each: Mutex<F>,
    stopped: AtomicBool,
}

impl<F: FnMut(u64, u64) -> bool + Send> Progress for Steps<F> {
    fn update(&self, done: u64, total: u64) {
        let wanted = (self.each.lock().unwrap())(done, total);
        self.stopped.store(!wanted, Ordering::SeqCst);
    }

    fn cancelled(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}
