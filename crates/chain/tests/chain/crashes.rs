//! Power cuts at random points of writes, discards, snapshots and merges. Every flushed byte must be there, every other
//! sector must have its old content or that of a later write, and the merge must be repeatable.
//!
//! The owner's record of the levels is a variable here. It changes in `commit` and before a push, as a rename in a
//! folder would. The guest's writes are made when the merge reports progress, on the merge's thread, so that a seed
//! determines the history. Levels are mocks with every behaviour that the trait permits, or layers of different real
//! formats.

use crate::formats::Format;
use crate::mock::{Manner, Mock, Table};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Directory, IoMode};
use chain::{Chain, LevelKey, Options};
use layer::Layer;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use testkit::Random;
use work::Progress;

const CAPACITY: u64 = 1 << 20;
const SECTOR: usize = 512;

struct World {
    /// Whether the levels are images in real formats instead of mock layers.
    real: bool,
    random: Random,
    disk: SimulatedDisk,
    directory: Arc<dyn Directory>,
    files: u32,
    /// The owner's record of the levels, newest first.
    record: Vec<Owned>,
    /// The content at the last flush, and all contents that each sector has had since.
    flushed: Vec<u8>,
    since: BTreeMap<usize, Vec<Vec<u8>>>,
    content: Vec<u8>,
    dead: bool,
}

#[derive(Clone)]
struct Owned {
    name: String,
    layer: Arc<dyn Layer>,
    how: How,
    key: Option<LevelKey>,
}

/// The parameters for opening a level again.
#[derive(Clone)]
enum How {
    Mock(Arc<Mock>),
    Real(Format, IoMode),
}

impl World {
    fn layer(&mut self) -> Option<Owned> {
        self.files += 1;
        let name = format!("layer-{}", self.files);
        if self.real {
            let flat = self.record.is_empty() && self.random.percent(50);
            let format = if flat { Format::Flat } else { *self.random.pick(&Format::DELTAS) };
            let mode = if self.random.percent(30) { IoMode::Direct } else { IoMode::Buffered };
            let layer = format.create(&*self.directory, &name, CAPACITY, mode).ok()?;
            self.directory.sync().ok()?;
            return Some(Owned { name, layer, how: How::Real(format, mode), key: None });
        }
        let file = self.directory.create(&name, IoMode::Buffered).ok()?;
        self.directory.sync().ok()?;
        let grain = *self.random.pick(&[512, 4096, 16384]);
        let moves = self.random.percent(40);
        let manner = Manner { moves, frees_at_flush: true, ..Manner::new(CAPACITY, grain) };
        let mock = Mock::over(manner, file, Table::default());
        Some(Owned { name, layer: mock.clone(), how: How::Mock(mock), key: None })
    }

    /// A random operation of the guest. The model records every content that may be found afterwards, even if the
    /// operation fails.
    fn act(&mut self, chain: &Chain) {
        if self.dead {
            return;
        }
        let start = self.random.below(CAPACITY) as usize;
        let end = (start + 1 + self.random.below(30_000) as usize).min(CAPACITY as usize);
        match self.random.below(10) {
            0..6 => {
                let mut bytes = vec![0; end - start];
                self.random.fill(&mut bytes);
                self.changed(start, &bytes);
                self.dead |= chain.write(start as u64, &bytes).is_err();
            }
            6 => {
                self.changed(start, &vec![0; end - start]);
                self.dead |= chain.zero(start as u64, (end - start) as u64, false).is_err();
            }
            7 => self.flush(chain),
            _ => {
                let mut out = vec![0xee; end - start];
                match chain.read(start as u64, &mut out) {
                    Ok(()) => assert!(out == self.content[start..end], "{start}..{end}"),
                    Err(_) => self.dead = true,
                }
            }
        }
    }

    fn flush(&mut self, chain: &Chain) {
        match chain.flush() {
            Ok(()) => {
                self.flushed = self.content.clone();
                self.since.clear();
            }
            Err(_) => self.dead = true,
        }
    }

    fn changed(&mut self, start: usize, bytes: &[u8]) {
        self.content[start..start + bytes.len()].copy_from_slice(bytes);
        for sector in start / SECTOR..(start + bytes.len()).div_ceil(SECTOR) {
            let now = self.content[sector * SECTOR..][..SECTOR].to_vec();
            self.since.entry(sector).or_default().push(now);
        }
    }

    /// Restarts the machine with the content that survived, and checks it.
    fn reopen(&mut self) -> Chain {
        self.disk = self.disk.crash();
        self.directory = self.disk.directory();
        for owned in &mut self.record {
            owned.layer = match &mut owned.how {
                How::Mock(mock) => {
                    let file = self.directory.open(&owned.name, IoMode::Buffered).unwrap();
                    *mock = Mock::over(mock.manner(), file, mock.durable());
                    mock.clone()
                }
                How::Real(format, mode) => format.open(&*self.directory, &owned.name, *mode, true).unwrap(),
            };
        }
        let layers = self.record.iter().map(|owned| owned.layer.clone()).collect();
        let chain = Chain::open("again", layers, Options::default()).unwrap();
        for (owned, key) in self.record.iter_mut().zip(chain.keys()) {
            owned.key = Some(key);
        }
        let mut found = vec![0xee; CAPACITY as usize];
        chain.read(0, &mut found).unwrap();
        for (sector, bytes) in found.chunks_exact(SECTOR).enumerate() {
            let old = &self.flushed[sector * SECTOR..][..SECTOR];
            let newer = self.since.get(&sector).is_some_and(|all| all.iter().any(|now| now == bytes));
            assert!(bytes == old || newer, "sector {sector} has neither the flushed content nor one written after it");
        }
        self.content = found;
        self.dead = false;
        self.flush(&chain);
        assert!(!self.dead);
        chain
    }
}

/// Makes guest operations while a merge is under way.
struct Guest<'a> {
    world: &'a Mutex<World>,
    chain: &'a Chain,
}

impl Progress for Guest<'_> {
    fn update(&self, _done: u64, _total: u64) {
        let mut world = self.world.lock();
        if world.random.percent(60) {
            world.act(self.chain);
        }
    }
    fn cancelled(&self) -> bool {
        self.world.lock().dead
    }
}

fn history(seed: u64, real: bool) -> (u32, u32) {
    let mut random = Random::new(seed);
    let disk = SimulatedDisk::new(random.next(), SimulatedOptions::default());
    let zeros = vec![0; CAPACITY as usize];
    let mut world = World {
        real,
        random,
        directory: disk.directory(),
        disk,
        files: 0,
        record: Vec::new(),
        flushed: zeros.clone(),
        since: BTreeMap::new(),
        content: zeros,
        dead: false,
    };
    let base = world.layer().unwrap();
    world.record.push(base);
    let mut chain = world.reopen();
    let (mut merges, mut cuts) = (0, 0);
    for _ in 0..4 {
        let length = 1 + world.random.below(if real { 700 } else { 400 });
        world.disk.cut_after(world.disk.operations() + length);
        while !world.dead {
            for _ in 0..world.random.below(6) {
                world.act(&chain);
            }
            if world.record.len() < 6
                && let Some(mut new) = world.layer()
            {
                // The record changes first: the new top is empty, so a crash before the push changes no content.
                world.record.insert(0, new.clone());
                match chain.push(new.layer.clone()) {
                    Ok((key, _)) => {
                        new.key = Some(key);
                        world.record[0] = new;
                        world.flushed = world.content.clone();
                        world.since.clear();
                    }
                    Err(_) => world.dead = true,
                }
            }
            for _ in 0..world.random.below(6) {
                world.act(&chain);
            }
            let depth = world.record.len() as u64;
            if !world.dead && depth > 1 && world.random.percent(60) {
                let upper = world.random.below(depth - 1) as usize;
                let lower = upper + 1 + world.random.below(depth - upper as u64 - 1) as usize;
                let down = world.random.percent(60);
                let (first, last) = (world.record[upper].key.unwrap(), world.record[lower].key.unwrap());
                let gone = if down { upper..lower } else { upper + 1..lower + 1 };
                let shared = Mutex::new(world);
                let mut commit = || {
                    let mut world = shared.lock();
                    // Data that is flushed now has to be durable with the old and with the new record.
                    for _ in 0..world.random.below(4) {
                        world.act(&chain);
                    }
                    // The guest also flushes directly after the merge, because the flushes above are not reached after
                    // a failed write.
                    if !world.dead && world.random.percent(30) {
                        world.flush(&chain);
                        let soon = world.disk.operations() + world.random.below(6);
                        world.disk.cut_after(soon);
                    }
                    world.record.drain(gone.clone());
                    Ok(())
                };
                let guest = Guest { world: &shared, chain: &chain };
                let merged = if down {
                    chain.merge_down(first, last, 0, &guest, &mut commit)
                } else {
                    chain.merge_up(first, last, 0, &guest, &mut commit)
                };
                merges += u32::from(merged.is_ok());
                world = shared.into_inner();
                world.dead |= merged.is_err();
            }
            if real && !world.dead && world.random.below(100) == 0 {
                world.dead |= chain.close().is_err();
                if !world.dead {
                    world.flushed = world.content.clone();
                    world.since.clear();
                }
                world.dead = true;
            }
            world.dead |= world.disk.is_off();
        }
        cuts += u32::from(world.disk.is_off());
        chain = world.reopen();
    }
    (merges, cuts)
}

fn histories(seeds: std::ops::Range<u64>, real: bool) {
    let (mut merges, mut cuts) = (0, 0);
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let run = std::panic::catch_unwind(|| history(seed, real));
        let (more, cut) = run.unwrap_or_else(|_| panic!("seed {seed}"));
        merges += more;
        cuts += cut;
    }
    println!("{merges} merges, {cuts} cuts");
    assert!(u64::from(merges) > count / 3 && u64::from(cuts) > count * 2);
}

#[test]
fn flushed_data_survives_power_cuts_and_the_chain_opens() {
    histories(0..250, false);
}

#[test]
fn flushed_data_survives_power_cuts_in_chains_of_each_format() {
    histories(0..120, true);
}

#[test]
fn flushed_data_survives_power_cuts_in_more_chains_of_each_format() {
    histories(1000..1120, true);
}
