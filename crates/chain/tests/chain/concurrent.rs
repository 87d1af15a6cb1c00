//! Many threads on one chain: writers that share grains, and readers that check every sector, while snapshots and
//! merges run.
//!
//! The disk is divided into cells of one sector. A cell has one writer, which stamps it with the cell's number and a
//! count; between two stamps it may be zeroed. A reader notes, before and after each read, which counts had been
//! acknowledged and which had begun. These are errors: the stamp of another cell, an older count than was acknowledged
//! before the read, a count that had not begun.

use crate::mock::{Manner, Mock};
use chain::{Chain, Options, Tunables};
use layer::Layer;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use testkit::Random;
use work::NoProgress;

pub const SECTOR: usize = 512;

/// All cells, with the counts of each.
pub struct Cells {
    pub acknowledged: Vec<AtomicU64>,
    pub begun: Vec<AtomicU64>,
}

fn stamp(cell: usize, count: u64, out: &mut [u8]) {
    for (at, word) in out.chunks_exact_mut(16).enumerate() {
        word[..8].copy_from_slice(&((cell as u64) << 16 | at as u64).to_le_bytes());
        word[8..].copy_from_slice(&count.to_le_bytes());
    }
}

/// Odd counts are zeroings; count 0, before any write, is zeros too.
fn check(cell: usize, bytes: &[u8], from: u64, to: u64) {
    if bytes.iter().all(|byte| *byte == 0) {
        let zeroed = from == 0 || (from..=to).any(|count| count % 2 == 1);
        assert!(zeroed, "cell {cell} is zero, but counts are {from} to {to}");
        return;
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let count = word(8);
    let mut expected = [0; SECTOR];
    stamp(cell, count, &mut expected);
    assert!(bytes == expected, "cell {cell} holds {} at {count}", word(0) >> 16);
    assert!((from..=to).contains(&count) && count % 2 == 0, "cell {cell} is at {count}, not {from} to {to}");
}

impl Cells {
    pub fn new(cells: usize) -> Self {
        let zeros = || (0..cells).map(|_| AtomicU64::new(0)).collect();
        Self { acknowledged: zeros(), begun: zeros() }
    }

    /// Writes or zeroes consecutive cells of this thread.
    pub fn change(&self, chain: &Chain, random: &mut Random, thread: usize, threads: usize) -> Duration {
        // The threads own runs of three cells in turn, so that grains are shared.
        let runs = self.begun.len() / (3 * threads);
        let first = (random.below(runs as u64) as usize * threads + thread) * 3 + random.below(3) as usize;
        let length = 1 + random.below(3 - first as u64 % 3) as usize;
        let zero = random.percent(15);
        let mut bytes = vec![0; length * SECTOR];
        for (cell, out) in (first..).zip(bytes.chunks_exact_mut(SECTOR)) {
            let next = self.begun[cell].load(Ordering::SeqCst) + 1;
            let next = if (next % 2 == 1) == zero { next } else { next + 1 };
            stamp(cell, next, out);
            self.begun[cell].store(next, Ordering::SeqCst);
        }
        let start = Instant::now();
        if zero {
            chain.zero((first * SECTOR) as u64, bytes.len() as u64, random.percent(20)).unwrap();
        } else {
            chain.write((first * SECTOR) as u64, &bytes).unwrap();
        }
        let took = start.elapsed();
        for cell in first..first + length {
            self.acknowledged[cell].store(self.begun[cell].load(Ordering::SeqCst), Ordering::SeqCst);
        }
        took
    }

    pub fn read(&self, chain: &Chain, first: usize, length: usize) {
        let length = length.min(self.begun.len() - first);
        let before: Vec<u64> = (first..first + length).map(|c| self.acknowledged[c].load(Ordering::SeqCst)).collect();
        let mut bytes = vec![0xee; length * SECTOR];
        chain.read((first * SECTOR) as u64, &mut bytes).unwrap();
        for (at, bytes) in bytes.chunks_exact(SECTOR).enumerate() {
            check(first + at, bytes, before[at], self.begun[first + at].load(Ordering::SeqCst));
        }
    }
}

struct Setup {
    grain: u64,
    moves: bool,
    data_cache: u64,
    entries: usize,
    merges: bool,
}

fn run(seed: u64, setup: Setup) {
    const CELLS: usize = 3 * 3 * 200;
    const WRITERS: usize = 3;
    let capacity = (CELLS * SECTOR) as u64;
    let make = |random: &mut Random| {
        let grain = if random.percent(70) { setup.grain } else { *random.pick(&[512, 1024, 4096, 16384]) };
        let layer = Mock::new(Manner { moves: setup.moves, ..Manner::new(capacity, grain) });
        // A delay after a lookup makes it more likely that its result is stale when it is used.
        layer.faults.map_delay.store(*random.pick(&[0, 0, 20]), Ordering::Relaxed);
        layer.faults.write_delay.store(*random.pick(&[0, 0, 20]), Ordering::Relaxed);
        layer
    };
    let mut random = Random::new(seed);
    let options = Options {
        // With few entries and no prefetching, most reads use the table of holders instead of a cached extent.
        metadata: Tunables {
            entries: setup.entries,
            prefetch_extents: if setup.entries == 1000 { 0 } else { 64 },
            ..Tunables::default()
        },
        data_cache: setup.data_cache,
        ..Options::default()
    };
    let chain = Chain::open("threads", vec![make(&mut random) as Arc<dyn Layer>], options).unwrap();
    let cells = Cells::new(CELLS);
    let stop = AtomicBool::new(false);
    let (mut snapshots, mut merges) = (0, 0);
    std::thread::scope(|scope| {
        for thread in 0..WRITERS {
            let (chain, cells, stop) = (&chain, &cells, &stop);
            scope.spawn(move || {
                let _stop = StopOnPanic(stop);
                let mut random = Random::new(seed * 100 + thread as u64);
                while !stop.load(Ordering::Relaxed) {
                    cells.change(chain, &mut random, thread, WRITERS);
                    if random.percent(2) {
                        chain.flush().unwrap();
                    }
                }
            });
        }
        for thread in 0..3 {
            let (chain, cells, stop) = (&chain, &cells, &stop);
            scope.spawn(move || {
                let _stop = StopOnPanic(stop);
                let mut random = Random::new(seed * 100 + 50 + thread);
                while !stop.load(Ordering::Relaxed) {
                    let first = random.below(CELLS as u64) as usize;
                    cells.read(chain, first, 1 + random.below(40) as usize);
                }
            });
        }
        let _stop = StopOnPanic(&stop);
        let until = Instant::now() + Duration::from_millis(1500);
        // On a busy machine the time may end before the first merge.
        let is_enough = |snapshots: u32, merges: usize| snapshots > 0 && (merges > 0 || !setup.merges);
        while (Instant::now() < until || !is_enough(snapshots, merges)) && !stop.load(Ordering::Relaxed) {
            let keys = chain.keys();
            let depth = keys.len() as u64;
            match random.below(4) {
                0 | 1 if depth < 32 => {
                    chain.push(make(&mut random)).unwrap();
                    snapshots += 1;
                }
                2 if setup.merges && depth > 1 => {
                    let upper = random.below(depth - 1) as usize;
                    let lower = upper + 1 + random.below(depth - upper as u64 - 1) as usize;
                    let merged = if random.percent(50) {
                        chain.merge_down(keys[upper], keys[lower], 0, &NoProgress, &mut || Ok(())).unwrap()
                    } else {
                        chain.merge_up(keys[upper], keys[lower], 0, &NoProgress, &mut || Ok(())).unwrap()
                    };
                    merges += merged.removed.len();
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    cells.read(&chain, 0, CELLS);
    let total: u64 = cells.begun.iter().map(|count| count.load(Ordering::Relaxed)).sum();
    println!("{snapshots} snapshots, {merges} merged levels, {total} changes, {:?}", chain.statistics().metadata);
}

/// Makes the other threads stop when a thread panics.
pub struct StopOnPanic<'a>(pub &'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn writes_to_parts_of_grains_under_snapshots_lose_nothing() {
    run(1, Setup { grain: 4096, moves: false, data_cache: 0, entries: 65_536, merges: false });
}

#[test]
fn reads_of_moving_grains_return_their_own_data() {
    run(2, Setup { grain: 1024, moves: true, data_cache: 0, entries: 65_536, merges: true });
    run(3, Setup { grain: 4096, moves: true, data_cache: 0, entries: 100, merges: true });
}

#[test]
fn the_data_cache_returns_no_stale_data() {
    run(4, Setup { grain: 4096, moves: true, data_cache: 1 << 20, entries: 65_536, merges: true });
    run(5, Setup { grain: 512, moves: false, data_cache: 100_000, entries: 1000, merges: true });
}

#[test]
fn merges_under_writes_keep_every_sector() {
    run(6, Setup { grain: 512, moves: false, data_cache: 0, entries: 65_536, merges: true });
    run(7, Setup { grain: 16384, moves: false, data_cache: 0, entries: 0, merges: true });
    run(8, Setup { grain: 512, moves: true, data_cache: 0, entries: 1000, merges: true });
}
