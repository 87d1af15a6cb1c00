//! A queue on the calling thread. Operations wait here and are performed in random order, as late as the caller allows,
//! which detects code that relies on the order of pushing.

use super::unflushed::Random;
use crate::queue::QUEUE_DEPTH_MAX;
use crate::readiness::Watched;
use crate::{Buffer, Completion, File, Queue, SharedSlice};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

enum Work {
    Read { offset: u64, buffer: Buffer },
    Write { offset: u64, slices: Vec<SharedSlice>, durable: bool },
    Sync,
}

struct Operation {
    file: Arc<dyn File>,
    token: u64,
    work: Work,
}

impl Operation {
    fn perform(self) -> Completion {
        let Self { file, token, work } = self;
        match work {
            Work::Read { offset, mut buffer } => {
                let result = file.read_at(&mut buffer, offset);
                Completion { token, result, buffer: Some(buffer) }
            }
            Work::Write { offset, slices, durable } => {
                let bytes: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
                Completion { token, result: file.write_at(&bytes, offset, durable), buffer: None }
            }
            Work::Sync => Completion { token, result: file.sync(), buffer: None },
        }
    }
}

pub(super) struct SimulatedQueue {
    depth: usize,
    /// Chooses the next operation; `None` performs everything at once, in order.
    random: Option<Random>,
    waiting: Vec<Operation>,
    finished: Vec<Completion>,
    watched: Watched,
}

impl SimulatedQueue {
    pub(super) fn new(depth: u32, random: Option<Random>) -> Self {
        Self {
            depth: depth.clamp(1, QUEUE_DEPTH_MAX) as usize,
            random,
            waiting: Vec::new(),
            finished: Vec::new(),
            watched: Watched::default(),
        }
    }

    fn push(&mut self, file: &Arc<dyn File>, token: u64, work: Work) {
        if self.waiting.len() >= self.depth {
            self.perform_one();
        }
        self.waiting.push(Operation { file: Arc::clone(file), token, work });
        if self.random.is_none() {
            self.perform_one();
        }
    }

    /// Performs a random one of the waiting operations.
    fn perform_one(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let chosen = match &mut self.random {
            Some(random) => random.below(self.waiting.len() as u64) as usize,
            None => 0,
        };
        let completion = self.waiting.remove(chosen).perform();
        self.finished.push(completion);
    }

    /// How many of the waiting operations to perform now.
    fn some(&mut self) -> u64 {
        self.random.as_mut().map_or(0, |random| random.below(self.waiting.len() as u64 + 1))
    }
}

impl Queue for SimulatedQueue {
    fn in_flight(&self) -> usize {
        self.waiting.len() + self.finished.len()
    }

    fn read(&mut self, file: &Arc<dyn File>, offset: u64, buffer: Buffer, token: u64) {
        self.push(file, token, Work::Read { offset, buffer });
    }

    fn write(&mut self, file: &Arc<dyn File>, offset: u64, slices: Vec<SharedSlice>, durable: bool, token: u64) {
        self.push(file, token, Work::Write { offset, slices, durable });
    }

    fn sync(&mut self, file: &Arc<dyn File>, token: u64) {
        self.push(file, token, Work::Sync);
    }

    fn poll_readable(&mut self, descriptor: RawFd, token: u64) {
        self.finished.extend(self.watched.add(descriptor, token));
    }

    fn submit(&mut self) -> io::Result<()> {
        for _ in 0..self.some() {
            self.perform_one();
        }
        Ok(())
    }

    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> io::Result<()> {
        for _ in 0..1 + self.some() {
            self.perform_one();
        }
        let mut found = std::mem::take(&mut self.finished);
        if !self.watched.is_empty() {
            let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
            loop {
                let left = match (timeout, deadline) {
                    _ if !found.is_empty() => Some(Duration::ZERO),
                    (Some(_), Some(deadline)) => Some(deadline.saturating_duration_since(Instant::now())),
                    _ => None,
                };
                let polled = self.watched.wait(None, left, &mut found);
                if !found.is_empty() || left == Some(Duration::ZERO) {
                    if found.is_empty() {
                        polled?;
                    }
                    break;
                }
                polled?;
            }
        }
        completions.append(&mut found);
        Ok(())
    }
}

impl Drop for SimulatedQueue {
    fn drop(&mut self) {
        while !self.waiting.is_empty() {
            self.perform_one();
        }
    }
}
