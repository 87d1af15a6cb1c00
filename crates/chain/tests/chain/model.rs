//! Random histories of reads, writes, discards, zeroings, snapshots and merges, up to 32 levels, against a plain
//! vector.
//!
//! Besides the content of the disk, the model has the content that each level shows without the levels above. So the
//! test detects a merge that damages a snapshot, or that exposes hidden content.

use crate::mock::{Manner, Mock};
use chain::{Chain, Condition, Options, Tunables};
use layer::Layer;
use std::sync::{Arc, Mutex};
use testkit::Random;
use work::{NoProgress, Progress};

const CAPACITIES: [u64; 4] = [300 * 1024 + 512, 1 << 20, 777 * 512, 123_457];
const LEVELS_MAX: usize = 32;

struct History {
    random: Random,
    chain: Chain,
    /// Newest first: each level, and the content that it shows.
    levels: Vec<(Arc<Mock>, Vec<u8>)>,
}

fn manner(random: &mut Random, capacity: u64) -> Manner {
    let mut manner = Manner::new(capacity, *random.pick(&[512, 512, 1024, 4096, 4096, 65536]));
    manner.moves = random.percent(50);
    manner.overwrites = random.percent(50);
    manner
}

fn tunables(random: &mut Random) -> Tunables {
    Tunables {
        entries: *random.pick(&[0, 1, 7, 64, 1000, 65_536]),
        prefetch_bytes: *random.pick(&[0, 4096, 10_000, 1 << 20, 4 << 20]),
        prefetch_extents: *random.pick(&[0, 1, 8, 64, 128]),
    }
}

/// A base with content, made by another chain; sometimes encoded.
fn base(random: &mut Random, capacity: u64) -> (Arc<Mock>, Vec<u8>) {
    let mut content = vec![0; capacity as usize];
    let layer = Mock::new(manner(random, capacity));
    let chain = Chain::open("base", vec![layer.clone() as Arc<dyn Layer>], Options::default()).unwrap();
    for _ in 0..random.below(20) {
        let (start, end) = range(random, capacity);
        random.fill(&mut content[start..end]);
        chain.write(start as u64, &content[start..end]).unwrap();
    }
    (layer, content)
}

fn range(random: &mut Random, capacity: u64) -> (usize, usize) {
    let unit = *random.pick(&[1, 512, 512, 4096]);
    let longest = *random.pick(&[1, 2, 16, 64]) * unit.max(512);
    let start = random.below(capacity) / unit * unit;
    let length = (1 + random.below(longest)).next_multiple_of(unit);
    (start as usize, (start + length).min(capacity) as usize)
}

impl History {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let capacity = *random.pick(&CAPACITIES);
        let (layer, content) = base(&mut random, capacity);
        let options = Options {
            metadata: tunables(&mut random),
            data_cache: *random.pick(&[0, 0, 100_000, 1 << 20]),
            ..Options::default()
        };
        let chain = Chain::open("model", vec![layer.clone() as Arc<dyn Layer>], options).unwrap();
        Self { random, chain, levels: vec![(layer, content)] }
    }

    fn capacity(&self) -> u64 {
        self.levels[0].1.len() as u64
    }

    fn range(&mut self) -> (usize, usize) {
        let capacity = self.capacity();
        range(&mut self.random, capacity)
    }

    fn step(&mut self) {
        let (start, end) = self.range();
        match self.random.below(100) {
            0..35 => {
                let content = &mut self.levels[0].1[start..end];
                self.random.fill(content);
                self.chain.write(start as u64, content).unwrap();
            }
            35..45 => {
                // Sometimes the range extends to the end of the disk.
                let end = if self.random.percent(10) { self.capacity() as usize } else { end };
                let keep = self.random.percent(30);
                self.levels[0].1[start..end].fill(0);
                self.chain.zero(start as u64, (end - start) as u64, keep).unwrap();
            }
            45..85 => {
                let mut out = vec![0xee; end - start];
                self.chain.read(start as u64, &mut out).unwrap();
                assert!(out == self.levels[0].1[start..end], "{start}..{end}");
            }
            85..89 if self.levels.len() < LEVELS_MAX => self.push(),
            89..91 if self.levels.len() > 1 => self.merge(),
            91..93 => self.check_status(start, end),
            93 => self.chain.set_tunables(tunables(&mut self.random)).unwrap(),
            94 => self.chain.set_data_cache(*self.random.pick(&[0, 50_000, 1 << 20])).unwrap(),
            95..97 => self.chain.flush().unwrap(),
            _ => {}
        }
        let statistics = self.chain.statistics();
        assert!(statistics.metadata.entries <= self.chain.tunables().entries as u64);
        assert!(statistics.data.memory <= statistics.data.memory_max);
    }

    fn push(&mut self) {
        let capacity = self.capacity();
        let layer = Mock::new(manner(&mut self.random, capacity));
        self.chain.push(layer.clone()).unwrap();
        self.levels.insert(0, (layer, self.levels[0].1.clone()));
    }

    fn merge(&mut self) {
        let keys = self.chain.keys();
        let upper = self.random.below(keys.len() as u64 - 1) as usize;
        let lower = upper + 1 + self.random.below((keys.len() - upper - 1) as u64) as usize;
        let mut commits = 0;
        let mut commit = || {
            commits += 1;
            Ok(())
        };
        if self.random.percent(50) {
            let merged = self.chain.merge_down(keys[upper], keys[lower], 0, &NoProgress, &mut commit).unwrap();
            assert_eq!(merged.removed.len(), lower - upper);
            self.levels[lower].1 = self.levels[upper].1.clone();
            self.levels.drain(upper..lower);
        } else {
            let merged = self.chain.merge_up(keys[upper], keys[lower], 0, &NoProgress, &mut commit).unwrap();
            assert_eq!(merged.removed.len(), lower - upper);
            self.levels.drain(upper + 1..=lower);
        }
        assert_eq!(commits, 1);
        assert_eq!(self.chain.keys().len(), self.levels.len());
        self.check();
    }

    fn check_status(&self, start: usize, end: usize) {
        let limit = 1 + start % 7;
        let spans = self.chain.status(start as u64, (end - start) as u64, limit).unwrap();
        let mut at = start as u64;
        for span in &spans {
            assert_eq!(span.start, at);
            let content = &self.levels[0].1[at as usize..(at + span.length) as usize];
            assert!(span.condition == Condition::Data || content.iter().all(|byte| *byte == 0));
            at += span.length;
        }
        assert!(at == end as u64 || spans.len() == limit, "{at} of {start}..{end}, {spans:?}");
        let oldest = *self.chain.keys().last().unwrap();
        if self.levels.len() > 1 {
            let base = &self.levels.last().unwrap().1;
            for span in self.chain.changed_above(oldest, start as u64, (end - start) as u64, 1000).unwrap() {
                let bytes = span.start as usize..(span.start + span.length) as usize;
                let same = self.levels[0].1[bytes.clone()] == base[bytes];
                assert!(same || span.condition != Condition::Absent);
            }
        }
    }

    /// Checks the content that every level shows.
    fn check(&self) {
        for index in 0..self.levels.len() {
            let layers = self.levels[index..].iter().map(|(layer, _)| layer.clone() as Arc<dyn Layer>).collect();
            let chain = Chain::open("check", layers, Options { read_only: true, ..Options::default() }).unwrap();
            let mut out = vec![0xee; self.capacity() as usize];
            chain.read(0, &mut out).unwrap();
            assert!(out == self.levels[index].1, "level {index} of {}", self.levels.len());
        }
        let mut out = vec![0xee; self.capacity() as usize];
        self.chain.read(0, &mut out).unwrap();
        assert!(out == self.levels[0].1, "the chain itself");
    }
}

#[test]
fn random_histories_equal_a_byte_vector() {
    for seed in 0..60 {
        let run = std::panic::catch_unwind(|| {
            let mut history = History::new(seed);
            for step in 0..1500 {
                history.step();
                if step % 500 == 499 {
                    history.check();
                }
            }
            history.check();
            history.levels.len()
        });
        assert!(run.is_ok(), "seed {seed}");
    }
}

#[test]
fn thirty_two_levels_of_any_grain_size_equal_a_model() {
    let mut history = History::new(4711);
    while history.levels.len() < LEVELS_MAX {
        for _ in 0..6 {
            let (start, end) = history.range();
            let content = &mut history.levels[0].1[start..end];
            history.random.fill(content);
            history.chain.write(start as u64, content).unwrap();
        }
        history.push();
    }
    history.check();
    let mut commit = || Ok(());
    history.chain.consolidate(&NoProgress, &mut commit).unwrap();
    let (_, content) = history.levels[0].clone();
    let (base, _) = history.levels.pop().unwrap();
    history.levels = vec![(base, content)];
    history.check();
}

#[test]
fn levels_of_different_capacity_show_zeros_past_the_shortest() {
    let mut random = Random::new(3);
    let sizes = [(64u64 << 10) + 512, 40 << 10, 96 << 10, 20 << 10];
    for sizes in [[0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 3, 2], [2, 3, 0]].map(|order| order.map(|index| sizes[index])) {
        for grain in [512, 4096] {
            let make = |random: &mut Random, size: u64| {
                let layer = Mock::new(Manner::new(size, grain));
                let chain = Chain::open("one", vec![layer.clone() as Arc<dyn Layer>], Options::default()).unwrap();
                let mut content = vec![0; size as usize];
                random.fill(&mut content);
                for start in (0..size as usize).step_by(3 * 4096) {
                    let end = (start + 4096).min(size as usize);
                    chain.write(start as u64, &content[start..end]).unwrap();
                }
                layer
            };
            let layers: Vec<Arc<Mock>> = sizes.iter().map(|size| make(&mut random, *size)).collect();
            let open = |from: usize, layers: &[Arc<Mock>]| {
                let layers = layers[from..].iter().map(|layer| layer.clone() as Arc<dyn Layer>).collect();
                Chain::open("sizes", layers, Options::default()).unwrap()
            };
            let content = |from: usize, layers: &[Arc<Mock>]| {
                let chain = open(from, layers);
                let mut out = vec![0; chain.capacity() as usize];
                chain.read(0, &mut out).unwrap();
                out
            };
            // The expected content, level by level from the top: bytes past the shortest level so far read as zeros.
            let mut expected = vec![0; sizes[0] as usize];
            let mut least = u64::MAX;
            let mut known = vec![false; sizes[0] as usize];
            for (layer, size) in layers.iter().zip(sizes) {
                least = least.min(size);
                let alone = content(0, std::slice::from_ref(layer));
                for at in 0..least.min(sizes[0]) as usize {
                    let held = at / 4096 % 3 == 0;
                    if held && !known[at] {
                        (expected[at], known[at]) = (alone[at], true);
                    }
                }
            }
            let before = content(0, &layers);
            if grain == 4096 {
                assert!(before == expected, "{sizes:?}");
            }
            // A merge of the middle up into the top must not expose content of the base.
            let chain = open(0, &layers);
            let keys = chain.keys();
            chain.merge_up(keys[0], keys[1], 0, &NoProgress, &mut || Ok(())).unwrap();
            let mut after = vec![0; chain.capacity() as usize];
            chain.read(0, &mut after).unwrap();
            assert!(after == before, "{sizes:?} up");
            // A merge down needs a target that is as large as the source or larger.
            let layers: Vec<Arc<Mock>> = sizes.iter().map(|size| make(&mut random, *size)).collect();
            let before = content(0, &layers);
            let chain = open(0, &layers);
            let keys = chain.keys();
            let result = chain.merge_down(keys[1], keys[2], 0, &NoProgress, &mut || Ok(()));
            assert_eq!(result.is_ok(), sizes[1] <= sizes[2], "{sizes:?}");
            let mut after = vec![0; chain.capacity() as usize];
            chain.read(0, &mut after).unwrap();
            assert!(after == before, "{sizes:?} down");
            assert!(
                chain
                    .merge_down(chain.keys()[0], *chain.keys().last().unwrap(), 0, &NoProgress, &mut || Ok(()))
                    .is_err()
            );
        }
    }
}

/// A chain of levels with different capacities, and the content that it shows.
struct Uneven {
    chain: Chain,
    layers: Vec<Arc<Mock>>,
    content: Mutex<Vec<u8>>,
    random: Mutex<Random>,
}

impl Uneven {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let capacity = *random.pick(&CAPACITIES);
        let depth = 2 + random.below(5) as usize;
        let mut layers = Vec::new();
        for index in 0..depth {
            // The top and the base have the same capacity, so the whole chain can be merged.
            let whole = index == 0 || index + 1 == depth || random.percent(40);
            let size = if whole { capacity } else { (1 + random.below(capacity / 512)) * 512 };
            let layer = Mock::new(manner(&mut random, size));
            let alone = Chain::open("one", vec![layer.clone() as Arc<dyn Layer>], Options::default()).unwrap();
            for _ in 0..random.below(30) {
                let (start, end) = range(&mut random, size);
                let mut bytes = vec![0; end - start];
                random.fill(&mut bytes);
                alone.write(start as u64, &bytes).unwrap();
            }
            layers.push(layer);
        }
        let chain = Chain::open("uneven", stack(&layers), Options::default()).unwrap();
        let content = Mutex::new(read_whole(&chain));
        Self { chain, layers, content, random: Mutex::new(random) }
    }

    /// A write or a discard, of which the merge copies or mirrors the result.
    fn change(&self) {
        let mut random = self.random.lock().unwrap();
        let mut content = self.content.lock().unwrap();
        let (start, end) = range(&mut random, content.len() as u64);
        let bytes = &mut content[start..end];
        if random.percent(30) {
            bytes.fill(0);
            self.chain.discard(start as u64, (end - start) as u64).unwrap();
        } else {
            random.fill(bytes);
            self.chain.write(start as u64, bytes).unwrap();
        }
    }
}

/// The merge queries the rate at each step, also in the last pass, when writes are made in top and target.
impl Progress for Uneven {
    fn rate(&self) -> u64 {
        let changes = self.random.lock().unwrap().below(3);
        (0..changes).for_each(|_| self.change());
        0
    }
}

fn stack(layers: &[Arc<Mock>]) -> Vec<Arc<dyn Layer>> {
    layers.iter().map(|layer| layer.clone() as Arc<dyn Layer>).collect()
}

fn read_whole(chain: &Chain) -> Vec<u8> {
    let mut out = vec![0xee; chain.capacity() as usize];
    chain.read(0, &mut out).unwrap();
    out
}

#[test]
fn merges_of_several_levels_with_different_capacities_change_no_content() {
    for seed in 0..300 {
        let mut uneven = Uneven::new(seed);
        let (upper, lower, down) = {
            let random = uneven.random.get_mut().unwrap();
            let last = uneven.layers.len() as u64 - 1;
            let upper = random.below(last) as usize;
            let lower = if upper == 0 { last as usize } else { upper + 1 + random.below(last - upper as u64) as usize };
            (upper, lower, random.percent(70))
        };
        let sizes: Vec<u64> = uneven.layers.iter().map(|layer| layer.capacity()).collect();
        if down && sizes[upper] > sizes[lower] {
            continue;
        }
        let keys = uneven.chain.keys();
        let mut commit = || {
            uneven.change();
            Ok(())
        };
        if down {
            uneven.chain.merge_down(keys[upper], keys[lower], 0, &uneven, &mut commit).unwrap();
            uneven.layers.drain(upper..lower);
        } else {
            uneven.chain.merge_up(keys[upper], keys[lower], 0, &uneven, &mut commit).unwrap();
            uneven.layers.drain(upper + 1..=lower);
        }
        let content = uneven.content.lock().unwrap();
        let case = format!("seed {seed}: {sizes:?}, {upper} and {lower}, down: {down}");
        assert!(read_whole(&uneven.chain) == *content, "{case}");
        let options = Options { read_only: true, ..Options::default() };
        let again = Chain::open("again", stack(&uneven.layers), options).unwrap();
        assert!(read_whole(&again) == *content, "{case}");
    }
}
