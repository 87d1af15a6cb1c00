//! How the threads of connections share the processors.
//!
//! With many more connections than processors, all threads run with a short scheduling slice, so that each waits
//! milliseconds instead of seconds for a processor. All have the same slice, because the kernel runs a thread with a
//! shorter slice before the others. With few connections, no thread has a short slice: otherwise the thread of a busy
//! connection would preempt the clients on the same host each time its I/O completes. The measurements are in
//! `docs/adr/0009-who-waits-for-whom.md`.

use backend::local::Thread;
use parking_lot::Mutex;

/// Connections for each processor that are served with the default slice.
const FEW_PER_PROCESSOR: usize = 2;

/// The threads of all connections of a server.
pub struct Turns(Mutex<Threads>);

/// While a value of this type exists, one more thread serves a connection.
pub struct Turn<'a> {
    turns: &'a Turns,
    thread: Thread,
}

impl Default for Turns {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self(Mutex::new(Threads { few: processors * FEW_PER_PROCESSOR, threads: Vec::new() }))
    }
}

impl Turns {
    /// Records that `thread`, the calling thread, serves a connection.
    pub fn join(&self, thread: Thread) -> Turn<'_> {
        let mut threads = self.0.lock();
        threads.join(thread).iter().for_each(|thread| thread.set_short_slice(true));
        Turn { turns: self, thread }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut threads = self.turns.0.lock();
        threads.leave(self.thread).iter().for_each(|thread| thread.set_short_slice(false));
    }
}

struct Threads {
    /// Up to this number of threads, all have the default slice.
    few: usize,
    threads: Vec<Thread>,
}

impl Threads {
    /// Adds a thread; returns the threads that must now be given a short slice.
    fn join(&mut self, thread: Thread) -> &[Thread] {
        self.threads.push(thread);
        let count = self.threads.len();
        let changed = match count.saturating_sub(self.few) {
            0 => 0,
            1 => count,
            _ => 1,
        };
        &self.threads[count - changed..]
    }

    /// Removes a thread; returns the threads that must now be given the default slice.
    fn leave(&mut self, thread: Thread) -> &[Thread] {
        self.threads.retain(|other| *other != thread);
        if self.threads.len() == self.few { &self.threads } else { &[] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_have_the_same_time_slice_shorter_if_there_are_many() {
        let some = |count: usize| -> Vec<Thread> {
            (0..count).map(|_| std::thread::spawn(Thread::current).join().expect("a thread that ends")).collect()
        };
        let each = some(5);
        let mut threads = Threads { few: 3, threads: Vec::new() };
        assert_eq!(each[..3].iter().map(|thread| threads.join(*thread).len()).sum::<usize>(), 0);
        assert_eq!(threads.join(each[3]), &each[..4], "one too many: all of them");
        assert_eq!(threads.join(each[4]), &each[4..]);
        assert_eq!(threads.leave(each[0]), &[] as &[Thread], "still many");
        assert_eq!(threads.leave(each[4]), &each[1..4]);
        assert_eq!(threads.leave(each[1]), &[] as &[Thread]);
        assert_eq!(threads.join(each[0]).len(), 0);
    }
}
