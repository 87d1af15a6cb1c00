//! Blocks of a disk in random order, each once, so that each write is a first write. The blocks are determined by a
//! seed and a count, so that the content can be compared later without a list of the written blocks.

use super::super::BLOCK;
use super::{CAPACITY, DEPTH};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::nbd::{Client, Request};
use std::time::{Duration, Instant};

/// Number of blocks of the disk, a power of two.
const BLOCKS: u64 = CAPACITY / BLOCK;
/// Number of blocks that are compared after a restart.
const COMPARED: u64 = 2000;

/// The block of the write with this number. The function is a permutation of all blocks: odd multipliers and shifts are
/// bijections on 28 bits.
fn place(seed: u64, number: u64) -> u64 {
    const HALF: u32 = BLOCKS.trailing_zeros() / 2;
    let mut at = (number ^ seed.wrapping_mul(0x9e37_79b9)) % BLOCKS;
    for factor in [0x2c1b_3c6d, 0x297a_2d39, 0x1b56_c4e9] {
        at = at.wrapping_mul(factor) % BLOCKS;
        at ^= at >> HALF;
    }
    at
}

/// The writes to one disk in order: `most` first writes, then the same blocks again.
#[derive(Clone, Debug)]
pub(super) struct Places {
    seed: u64,
    most: u64,
    next: u64,
}

impl Places {
    pub(super) fn new(seed: u64, most: u64) -> Places {
        Places { seed, most: most.max(1), next: 0 }
    }

    /// Whether all blocks were written, so that further writes are overwrites.
    pub(super) fn used_up(&self) -> bool {
        self.next >= self.most
    }

    /// Number of writes sent.
    pub(super) fn sent(&self) -> u64 {
        self.next
    }

    /// Repeats all writes after number `kept`, because a kill may have lost them.
    pub(super) fn go_back(&mut self, kept: u64) {
        self.next = kept;
    }

    fn request(&mut self) -> Request {
        let number = self.next % self.most;
        self.next += 1;
        Request::Stamped { offset: place(self.seed, number) * BLOCK, length: BLOCK as u32, version: 1 }
    }

    /// Writes for a time, but makes only first writes. Appends the latency of each in microseconds.
    pub(super) fn write_first(
        &mut self,
        client: &mut Client,
        time: Duration,
        latencies: &mut Vec<f64>,
    ) -> Result<Duration> {
        self.write_until(client, time, self.most, latencies)
    }

    /// Writes for a time; appends the latency of each in microseconds.
    pub(super) fn write(&mut self, client: &mut Client, time: Duration, latencies: &mut Vec<f64>) -> Result<Duration> {
        self.write_until(client, time, u64::MAX, latencies)
    }

    fn write_until(
        &mut self,
        client: &mut Client,
        time: Duration,
        until: u64,
        latencies: &mut Vec<f64>,
    ) -> Result<Duration> {
        let began = Instant::now();
        let requests = std::iter::from_fn(|| (self.next < until && began.elapsed() < time).then(|| self.request()));
        client.run(DEPTH, requests, |timing| latencies.push(timing.microseconds()))?;
        Ok(began.elapsed())
    }

    /// Compares some of the first `written` blocks, among those at offsets from `offset` on. Returns the number of
    /// blocks with another content.
    pub(super) fn lost(&self, endpoint: &Endpoint, written: u64, offset: u64) -> Result<u64> {
        let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
        let written = written.min(self.most);
        let step = (written / COMPARED).max(1);
        let places = (0..written).step_by(step as usize).map(|number| place(self.seed, number) * BLOCK);
        places.filter(|place| *place >= offset).map(|place| client.compare(place, &[1])).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn random_offsets_are_distinct_and_within_the_disk() {
        for seed in [0, 1, 77] {
            let places: HashSet<u64> = (0..1 << 20).map(|number| place(seed, number)).collect();
            assert_eq!(places.len(), 1 << 20);
            assert!(places.iter().all(|place| *place < BLOCKS));
            // The blocks are scattered: few of them are adjacent.
            let neighbours = places.iter().filter(|place| places.contains(&(*place + 1))).count();
            assert!(neighbours < places.len() / 64, "{neighbours}");
        }
    }
}
