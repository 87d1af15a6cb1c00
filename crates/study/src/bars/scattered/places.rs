//! Blocks in random order over a disk, none of them twice: each write is a first write, and the places follow from a
//! seed and a count, so that what was written can be compared without remembering it.

use super::super::BLOCK;
use super::{CAPACITY, DEPTH};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::nbd::{Client, Request};
use std::time::{Duration, Instant};

/// Blocks of the disk; a power of two.
const BLOCKS: u64 = CAPACITY / BLOCK;
/// Blocks compared after a restart.
const COMPARED: u64 = 2000;

/// The place of write `number`: a permutation of all blocks (odd multipliers and shifts are bijections of 28 bits).
fn place(seed: u64, number: u64) -> u64 {
    const HALF: u32 = BLOCKS.trailing_zeros() / 2;
    let mut at = (number ^ seed.wrapping_mul(0x9e37_79b9)) % BLOCKS;
    for factor in [0x2c1b_3c6d, 0x297a_2d39, 0x1b56_c4e9] {
        at = at.wrapping_mul(factor) % BLOCKS;
        at ^= at >> HALF;
    }
    at
}

/// The writes to one disk, in order: `most` first writes, and then the same again.
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

    /// Whether every further write is an overwrite.
    pub(super) fn used_up(&self) -> bool {
        self.next >= self.most
    }

    /// How many were sent.
    pub(super) fn sent(&self) -> u64 {
        self.next
    }

    /// Sends again what was sent after `kept`: it may be lost.
    pub(super) fn go_back(&mut self, kept: u64) {
        self.next = kept;
    }

    fn request(&mut self) -> Request {
        let number = self.next % self.most;
        self.next += 1;
        Request::Stamped { offset: place(self.seed, number) * BLOCK, length: BLOCK as u32, version: 1 }
    }

    /// Writes for a time, or until there is no first write left; adds the microseconds of each.
    pub(super) fn write_first(
        &mut self,
        client: &mut Client,
        time: Duration,
        latencies: &mut Vec<f64>,
    ) -> Result<Duration> {
        self.write_until(client, time, self.most, latencies)
    }

    /// Writes for a time; adds the microseconds of each.
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

    /// Looks at some of the first `written` blocks that lie from `offset` on: how many do not hold what was written.
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
    fn no_place_comes_twice_and_all_lie_on_the_disk() {
        for seed in [0, 1, 77] {
            let places: HashSet<u64> = (0..1 << 20).map(|number| place(seed, number)).collect();
            assert_eq!(places.len(), 1 << 20);
            assert!(places.iter().all(|place| *place < BLOCKS));
            // Scattered: hardly any two are neighbours.
            let neighbours = places.iter().filter(|place| places.contains(&(*place + 1))).count();
            assert!(neighbours < places.len() / 64, "{neighbours}");
        }
    }
}
