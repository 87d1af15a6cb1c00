//! How the threads of connections share the processors.
//!
//! With many more sessions than processors, each gets its share in short slices: within milliseconds instead of within
//! seconds. All threads have one slice then, because a thread with a shorter slice than the others gets its turn before
//! them. With few sessions, no thread has a short slice: a session that works all the time would interrupt the clients
//! of other sessions on the same machine whenever the medium completes a request. The measurements are in
//! `docs/adr/0009-who-waits-for-whom.md`.
//!
//! A connection takes part once its export is negotiated. Before that, clients that have no right to any export could
//! change the slices of all others. The thread of a TCP connection has a long slice until then, so that the computation
//! of a TLS handshake delays neither sessions nor local clients.

use backend::local::{Slice, Thread};
use parking_lot::Mutex;

/// Sessions for each processor that are served with the default slice.
const FEW_PER_PROCESSOR: usize = 2;

/// The threads of all sessions of a server.
pub struct Turns(Mutex<Threads>);

/// A thread that serves a session, counted until this value is dropped.
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
    /// `thread`, the calling one, serves a session.
    pub fn join(&self, thread: Thread) -> Turn<'_> {
        let mut threads = self.0.lock();
        threads.join(thread).iter().for_each(|thread| thread.set_slice(Slice::Short));
        Turn { turns: self, thread }
    }

    /// Number of threads that serve sessions.
    pub fn count(&self) -> usize {
        self.0.lock().threads.len()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut threads = self.turns.0.lock();
        threads.leave(self.thread).iter().for_each(|thread| thread.set_slice(Slice::Default));
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
