//! Random histories of packing and sharing with power cuts: afterwards each sector of each disk, snapshot and clone has
//! content that was durable last, or was written later.
//!
//! `LAMINA_CUT` sets the number of random histories, `LAMINA_CUT_FROM` the first seed.

use super::packed::mixed;
use super::*;
use crate::engine::log::{VERSION_SHARED_PACKS, VERSION_WRITES_TO_PACKS};
use crate::pack::{Codec, Packer};
use backend::simulated::SimulatedOptions;
use std::collections::BTreeMap;
use testkit::environment::number;

const DISK_BLOCKS: u64 = 300;
const SECTOR: usize = 512;

/// The contents that each block of an object may have after a power cut. The last one is what reads return.
type Contents = Vec<Vec<Arc<[u8]>>>;

struct History {
    random: Random,
    disk: SimulatedDisk,
    engine: Arc<Engine>,
    model: BTreeMap<u64, Contents>,
    names: u64,
    features: Features,
    pass: Option<SharePass>,
    done: Histories,
}

/// What histories do beside packing and writing.
#[derive(Clone, Copy, Default)]
pub(super) struct Features {
    /// Equal blocks are shared.
    pub shares: bool,
    /// New blocks are compressed when they are written.
    pub packs_writes: bool,
    /// Writes of data that is stored already are mapped to it.
    pub maps_writes: bool,
}

/// What was done in histories.
#[derive(Clone, Copy, Default)]
pub(super) struct Histories {
    pub packed: u64,
    pub repacked: u64,
    pub shared: u64,
    /// Blocks that were found in packs after power cuts.
    pub found_packed: u64,
    /// Histories in which several logical blocks mapped one block of a pack.
    pub shared_packs: u64,
    /// Blocks of data that were not written, because they were stored already.
    pub mapped: u64,
    /// Histories in which writes were mapped to packs.
    pub mapped_packs: u64,
}

#[test]
fn power_cuts_between_packing_and_writes_lose_nothing_durable() {
    let from = number("LAMINA_CUT_FROM", 0);
    let seeds = from..from + number("LAMINA_CUT", 3);
    let Histories { packed, repacked, .. } = cut_histories(seeds.clone(), Features::default());
    assert!(packed > 1000 && repacked > 10, "{packed} {repacked}");
    let Histories { found_packed, .. } = cut_histories(seeds, Features { packs_writes: true, ..Features::default() });
    assert!(found_packed > 1000, "{found_packed}");
}

pub(super) fn cut_histories(seeds: std::ops::Range<u64>, features: Features) -> Histories {
    let mut done = Histories::default();
    for seed in seeds {
        let disk = format(SimulatedDisk::new(seed, SimulatedOptions::default()));
        let engine = open(&disk).unwrap();
        let (random, model) = (Random(seed), BTreeMap::new());
        let mut history = History { random, disk, engine, model, names: 0, features, pass: None, done };
        for _ in 0..2 {
            let zeros: Arc<[u8]> = vec![0; BLOCK_SIZE].into();
            let name = history.name();
            let id = add_disk(&history.engine, &name, DISK_BLOCKS, Provisioning::Thin);
            history.model.insert(id, vec![vec![zeros]; DISK_BLOCKS as usize]);
        }
        for round in 0..25 {
            history.control();
            history.pack_writes();
            history.map_writes();
            history.data();
            history.done.mapped += history.engine.shared_writes();
            history.cut(&format!("seed {seed}, round {round}"));
        }
        done = history.done;
        let version = history.engine.log.version();
        done.shared_packs += u64::from(version >= VERSION_SHARED_PACKS);
        done.mapped_packs += u64::from(version >= VERSION_WRITES_TO_PACKS);
    }
    done
}

impl History {
    fn name(&mut self) -> String {
        self.names += 1;
        format!("o{}", self.names)
    }

    fn pick(&mut self, snapshots: Option<bool>) -> Option<u64> {
        let is_snapshot = |id: u64| self.engine.with_catalog(|catalog| catalog.get(id).unwrap().is_snapshot());
        let all: Vec<u64> =
            self.model.keys().copied().filter(|id| snapshots.is_none_or(|wanted| wanted == is_snapshot(*id))).collect();
        if all.is_empty() { None } else { Some(all[self.random.index(all.len())]) }
    }

    /// Everything that was written is durable.
    fn settled(&mut self) {
        for contents in self.model.values_mut().flatten() {
            contents.drain(..contents.len() - 1);
        }
    }

    /// Compresses what is written to the disks from now on, or some of them.
    fn pack_writes(&mut self) {
        if !self.features.packs_writes {
            return;
        }
        let codec = if self.random.percent(50) { Codec::Lz4 } else { Codec::Zstd(3) };
        let disks = self.engine.with_catalog(|catalog| catalog.disks().map(|disk| disk.id).collect::<Vec<u64>>());
        let some: Vec<_> = disks.into_iter().filter(|_| self.random.percent(80)).map(|disk| (disk, codec)).collect();
        self.engine.pack_writes_of(&some).unwrap();
    }

    /// Maps what is written to the disks from now on, or to some of them, to stored blocks with the same content.
    fn map_writes(&mut self) {
        if !self.features.maps_writes {
            return;
        }
        let disks = self.engine.with_catalog(|catalog| catalog.disks().map(|disk| disk.id).collect::<Vec<u64>>());
        let some: Vec<_> =
            disks.into_iter().filter(|_| self.random.percent(80)).map(|disk| (disk, "d".into())).collect();
        self.engine.share_writes_of(&some, 1 << 16);
    }

    /// Snapshots, clones, reverts and deletions, without a cut.
    fn control(&mut self) {
        for _ in 0..2 {
            let name = self.name();
            let disk = self.pick(Some(false)).unwrap();
            let snapshot = self.pick(Some(true));
            match (self.random.below(6), snapshot) {
                (0 | 1, _) if self.model.len() < 8 => {
                    let taken = take(&self.engine, disk, &name);
                    self.engine.flush().unwrap();
                    self.engine.wait_sealed(taken).unwrap();
                    self.model.insert(taken, self.model[&disk].clone());
                }
                (2, Some(origin)) if self.model.len() < 8 => {
                    let made = self.engine.clone_snapshot(origin, &[new_disk(&name, DISK_BLOCKS)]).unwrap()[0];
                    self.engine.detach(made).unwrap();
                    self.model.insert(made, self.model[&origin].clone());
                }
                (3 | 4, Some(gone)) => {
                    self.engine.delete_snapshot(gone).unwrap();
                    self.model.remove(&gone);
                }
                _ => {}
            }
            self.engine.flush().unwrap();
            self.settled();
        }
    }

    /// Packing and writes, until the power is cut or for a number of steps.
    fn data(&mut self) {
        let most = if self.random.percent(50) { 60 } else { 600 };
        self.disk.cut_after(self.disk.operations() + self.random.below(most));
        for _ in 0..60 {
            if let Err(error) = self.step() {
                assert!(self.disk.is_off(), "{error}");
                return;
            }
        }
    }

    fn step(&mut self) -> Result<()> {
        let on = self.pick(Some(false)).unwrap();
        let start = self.random.below(DISK_BLOCKS);
        let most = if self.features.packs_writes { 120 } else { 40 };
        let length = 1 + if self.random.percent(40) { self.random.below(most) } else { self.random.below(4) };
        let range = start..(start + length).min(DISK_BLOCKS);
        match self.random.below(20) {
            0..=2 => {
                self.engine.flush()?;
                self.settled();
            }
            3 => self.engine.checkpoint()?,
            4 => {
                self.engine.drop_all_trash()?;
            }
            5 => self.engine.settle(&self.engine.head(on))?,
            6 => {
                self.engine.pump()?;
            }
            7 => {
                let zeros: Arc<[u8]> = vec![0; BLOCK_SIZE].into();
                self.write(on, &range, &zeros);
                self.engine.discard_blocks(&self.engine.head(on), range)?;
            }
            8..=11 if self.features.shares && self.random.percent(80) => {
                if self.random.percent(50) {
                    self.engine.settle(&self.engine.head(on))?;
                }
                for _ in 0..1 + self.random.below(100) {
                    let objects = || self.model.keys().map(|object| (*object, DISK_BLOCKS)).collect();
                    let pass = self.pass.get_or_insert_with(|| SharePass::new(objects(), PRINTS_MAX));
                    let step = self.engine.share_step(pass)?;
                    self.done.shared += step.shared;
                    if step.ended {
                        self.pass = None;
                    }
                }
            }
            9..=11 if self.features.packs_writes && !(self.features.shares && self.random.percent(50)) => {
                self.engine.settle(&self.engine.head(on))?
            }
            8..=11 => {
                let object = self.pick(None).unwrap();
                self.engine.settle(&self.engine.head(on))?;
                let codec = if self.random.percent(50) { Codec::Lz4 } else { Codec::Zstd(3) };
                let mut pass = PackPass::new(Packer::new(codec)?, 1 << 20, Vec::new());
                let mut at = 0;
                while at < DISK_BLOCKS {
                    let step = self.engine.pack_step(object, at..DISK_BLOCKS, &mut pass)?;
                    self.done.packed += step.packed;
                    // A step that packs a pack again does not go on to the next blocks.
                    self.done.repacked += u64::from(step.packed > 0 && step.next == at);
                    at = step.next;
                }
            }
            _ => {
                let value = 1 + self.random.below(if self.features.maps_writes { 5 } else { 255 }) as u8;
                let blocks = (range.end - range.start) as usize;
                let is_mixed = self.random.percent(80);
                let data = match is_mixed {
                    // Whole windows are stored in packs first, and found later at other places.
                    true if self.features.packs_writes && self.features.maps_writes => {
                        let first = self.random.below(200) as u8;
                        mixed((0..blocks).map(|at| 6 + ((u64::from(first) + at as u64) % 240) as u8))
                    }
                    true => mixed(std::iter::repeat_n(value, blocks)),
                    false => slice(value, blocks),
                };
                for (block, content) in range.clone().zip(data.chunks_exact(BLOCK_SIZE)) {
                    self.write(on, &(block..block + 1), &Arc::from(content));
                }
                self.engine.write_blocks(&self.engine.head(on), range.start, data)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, disk: u64, range: &std::ops::Range<u64>, content: &Arc<[u8]>) {
        let contents = self.model.get_mut(&disk).unwrap();
        contents[range.start as usize..range.end as usize].iter_mut().for_each(|block| block.push(content.clone()));
    }

    /// Cuts the power, and compares what is found afterwards.
    fn cut(&mut self, at: &str) {
        self.pass = None;
        self.disk = self.disk.crash();
        if self.random.percent(30) {
            // The power is cut again while the store is opened.
            self.disk.cut_after(self.disk.operations() + self.random.below(60));
            let _ = open(&self.disk);
            self.disk = self.disk.crash();
        }
        self.engine = open(&self.disk).unwrap();
        let engine = &self.engine;
        for (id, contents) in &mut self.model {
            let snapshot = engine.with_catalog(|catalog| catalog.get(*id).unwrap().is_snapshot());
            let plan = |range| match snapshot {
                true => engine.plan_snapshot(*id, range),
                false => engine.plan_head(&engine.head(*id), range),
            };
            let found = engine.read_blocks("object", 0..DISK_BLOCKS, &plan).unwrap();
            for (number, (found, possible)) in found.chunks_exact(BLOCK_SIZE).zip(contents).enumerate() {
                for sector in (0..BLOCK_SIZE).step_by(SECTOR).map(|at| at..at + SECTOR) {
                    let is_known = possible.iter().any(|block| block[sector.clone()] == found[sector.clone()]);
                    assert!(is_known, "{at}, object {id}, block {number}, bytes {sector:?}");
                }
                *possible = vec![Arc::from(found)];
            }
            if engine.with_catalog(|catalog| catalog.get(*id).unwrap().root.is_some()) {
                self.done.found_packed += packed_blocks(engine, *id);
            }
        }
        is_whole(&self.engine);
    }
}

/// The blocks of an object that are in packs.
fn packed_blocks(engine: &Engine, object: u64) -> u64 {
    let mut meta = engine.meta.lock();
    let root = meta.catalog.get(object).unwrap().root.unwrap();
    let mut extents = Vec::new();
    crate::tree::lookup(&mut meta.nodes(&mut Default::default()), root, 0..DISK_BLOCKS, &mut extents).unwrap();
    extents.iter().filter(|extent| extent.packed.is_some()).map(|extent| extent.blocks).sum()
}
