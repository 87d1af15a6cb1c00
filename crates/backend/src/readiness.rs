//! The descriptors that a queue without io_uring watches: one-shot, by poll(2).

use crate::Completion;
use crate::queue::{QUEUE_POLLS_MAX, too_many_polls};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Watched descriptors, each with the token of its completion.
#[derive(Default)]
pub(crate) struct Watched {
    entries: Vec<(RawFd, u64)>,
}

impl Watched {
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Watches a descriptor until it is readable; returns a completion with an error when there is no room.
    pub(crate) fn add(&mut self, descriptor: RawFd, token: u64) -> Option<Completion> {
        let error = if self.entries.len() >= QUEUE_POLLS_MAX {
            too_many_polls()
        } else if descriptor < 0 {
            rustix::io::Errno::BADF.into()
        } else {
            self.entries.push((descriptor, token));
            return None;
        };
        Some(Completion { token, result: Err(error), buffer: None })
    }

    /// Waits until a watched descriptor or `wake` is readable, at most for `timeout`, and moves the readable
    /// descriptors to `completions`. A signal ends the wait early.
    pub(crate) fn wait(
        &mut self,
        wake: Option<BorrowedFd<'_>>,
        timeout: Option<Duration>,
        completions: &mut Vec<Completion>,
    ) -> io::Result<()> {
        let mut watched: Vec<PollFd<'_>> = Vec::with_capacity(self.entries.len() + 1);
        for &(descriptor, _) in &self.entries {
            // SAFETY: the descriptor is not negative (checked in `add`), and the caller of `Queue::poll_readable` keeps
            // it open until its completion. If the caller does not, poll(2) returns POLLNVAL or watches another file,
            // and touches no memory.
            let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
            watched.push(PollFd::from_borrowed_fd(borrowed, PollFlags::IN));
        }
        if let Some(wake) = &wake {
            watched.push(PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN));
        }
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        match poll(&mut watched, timeout.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let events: Vec<PollFlags> = watched[..self.entries.len()].iter().map(PollFd::revents).collect();
        let mut events = events.into_iter();
        self.entries.retain(|&(_, token)| {
            let happened = events.next().unwrap_or(PollFlags::empty());
            if happened.is_empty() {
                return true;
            }
            let result = match happened.contains(PollFlags::NVAL) {
                true => Err(rustix::io::Errno::BADF.into()),
                false => Ok(()),
            };
            completions.push(Completion { token, result, buffer: None });
            false
        });
        Ok(())
    }
}
