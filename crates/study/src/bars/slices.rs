//! Measurements in short slices, in which several disks are measured in turn, so that other activity of the machine
//! affects all of them alike.
//!
//! A slice lasts a fraction of a second, its beginning is not counted, and the requests are the same for every disk. A
//! figure is the median over a disk's slices; a ratio is the median of the ratios within each round. Long consecutive
//! runs would differ by other activity of the machine, which on a small virtual machine exceeds the differences to be
//! measured.

use crate::error::Result;
use crate::fio::Pattern;
use crate::nbd::{Client, Request};
use crate::plan::Plan;
use crate::random::Random;
use crate::statistics::{median, ratio};
use std::time::{Duration, Instant};

/// Time at the beginning of a slice that is not counted, as a part of the slice's length.
const RAMP: f64 = 0.2;

/// The load of a slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slice {
    pub(super) pattern: Pattern,
    pub(super) block: u32,
    pub(super) depth: u32,
    /// Whether a flush follows each write. A write and its flush count as one request.
    pub(super) flush_each: bool,
    /// Capacity of the disk in bytes.
    pub(super) size: u64,
    /// Counted seconds.
    pub(super) seconds: f64,
}

/// Rounds per cell.
pub(super) fn rounds(plan: &Plan) -> usize {
    (2 * plan.runs - 1) as usize
}

/// Seconds of a slice. All slices of a side together have the planned duration.
pub(super) fn seconds(plan: &Plan) -> f64 {
    plan.seconds / rounds(plan) as f64
}

impl Slice {
    /// Seconds during which requests are sent.
    pub(super) fn duration(&self) -> f64 {
        self.seconds * (1.0 + RAMP)
    }

    /// Measures a slice; returns requests per second. The same seed gives the same requests.
    pub(super) fn run(&self, client: &mut Client, seed: u64) -> Result<f64> {
        let began = Instant::now();
        let from = began + Duration::from_secs_f64(self.seconds * RAMP);
        let to = from + Duration::from_secs_f64(self.seconds);
        let mut counted = 0u64;
        let requests = self
            .offsets(seed)
            .flat_map(|offset| std::iter::once(self.request(offset)).chain(self.flush_each.then_some(Request::Flush)));
        client.run(self.depth as usize, requests.take_while(|_| Instant::now() < to), |timing| {
            counted += u64::from(timing.answered >= from && timing.answered < to);
        })?;
        let each = if self.flush_each { 2.0 } else { 1.0 };
        Ok(counted as f64 / self.seconds / each)
    }

    /// Writes or reads this many bytes, with no block used twice. Returns the requests per second without and with a
    /// final flush.
    pub(super) fn run_once(&self, client: &mut Client, bytes: u64, seed: u64) -> Result<[f64; 2]> {
        let all = self.size / u64::from(self.block);
        let count = (bytes / u64::from(self.block)).clamp(1, all);
        let order = match self.pattern.random() {
            true => Random::new(seed).order(u32::try_from(all).unwrap_or(u32::MAX)),
            false => (0..u32::try_from(count).unwrap_or(u32::MAX)).collect(),
        };
        let offsets = order.into_iter().take(count as usize).map(|index| u64::from(index) * u64::from(self.block));
        let began = Instant::now();
        client.run(self.depth as usize, offsets.map(|offset| self.request(offset)), |_| ())?;
        let written = began.elapsed();
        client.flush()?;
        Ok([written, began.elapsed()].map(|time| count as f64 / time.as_secs_f64()))
    }

    /// An endless sequence of offsets: random, or sequential from a random start up to the end and then from the
    /// beginning.
    fn offsets(&self, seed: u64) -> impl Iterator<Item = u64> + use<> {
        let (all, block, random) = (self.size / u64::from(self.block), u64::from(self.block), self.pattern.random());
        let mut numbers = Random::new(seed);
        let mut next = numbers.below(all);
        std::iter::repeat_with(move || {
            next = if random { numbers.below(all) } else { (next + 1) % all };
            next * block
        })
    }

    fn request(&self, offset: u64) -> Request {
        match self.pattern.writes() {
            true => Request::Write { offset, length: self.block },
            false => Request::Read { offset, length: self.block },
        }
    }
}

/// The median of the ratios within each round.
pub(super) fn share(of: &[f64], base: &[f64]) -> f64 {
    median(&of.iter().zip(base).map(|(of, base)| ratio(*of, *base)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_the_median_of_the_ratios_of_the_rounds() {
        assert_eq!(share(&[1.0, 20.0, 300.0], &[2.0, 40.0, 100.0]), 0.5);
        assert_eq!(share(&[1.0], &[0.0]), 0.0);
    }

    #[test]
    fn offsets_are_whole_blocks_and_wrap_at_the_end_of_the_disk() {
        let slice = |pattern| Slice { pattern, block: 4096, depth: 1, flush_each: false, size: 64 << 10, seconds: 1.0 };
        let found: Vec<u64> = slice(Pattern::Read).offsets(7).take(17).collect();
        assert_eq!(found[0], found[16]);
        assert!(found.windows(2).all(|pair| pair[1] == (pair[0] + 4096) % (64 << 10)));
        let random: Vec<u64> = slice(Pattern::RandomWrite).offsets(7).take(200).collect();
        assert!(random.iter().all(|offset| offset % 4096 == 0 && *offset < 64 << 10));
        assert_eq!(random, slice(Pattern::RandomRead).offsets(7).take(200).collect::<Vec<_>>());
    }
}
