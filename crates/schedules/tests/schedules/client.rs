//! Threads that write, read and flush.

use crate::model::{SECTOR, SECTORS, fill};
use crate::store::{Checked, End, Store, content, count};
use backend::BLOCK_SIZE;
use error::ErrorKind;
use scheduled_store::engine::Head;
use std::ops::Range;
use std::sync::Arc;
use testkit::Random;

/// Sectors of a disk that one thread writes.
#[derive(Clone, Debug)]
pub struct Share {
    /// Name of the disk.
    pub disk: String,
    /// Runs of sectors.
    pub runs: Vec<Range<usize>>,
}

/// A thread that reads, writes and flushes.
pub struct Client {
    /// The store that the client uses.
    pub store: Arc<Store>,
    /// The sectors that the client writes.
    pub shares: Vec<Share>,
    /// Chooses the client's operations.
    pub random: Random,
    /// Number of operations.
    pub operations: u64,
    /// Which operations are frequent.
    pub habit: Habit,
}

/// Which operations are frequent in a schedule. Races are found only if operations of one kind overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// All kinds of operations are equally frequent.
    Mixed,
    /// A few blocks are overwritten, flushed and written back again and again.
    Hot,
    /// Large writes bypass the buffer and overwrite mapped blocks.
    Large,
}

impl Client {
    /// Carries out all operations.
    pub fn run(mut self) -> Checked {
        for _ in 0..self.operations {
            let flushes = if self.habit == Habit::Mixed { 18 } else { 30 };
            if self.random.percent(flushes) {
                self.store.flush()?;
                continue;
            }
            let share = self.random.pick(&self.shares).clone();
            if self.habit == Habit::Hot && self.random.percent(25) {
                self.settle(&share.disk)?;
                continue;
            }
            if !self.random.percent(25) {
                self.write(&share)?;
                if self.random.percent(15) {
                    // A write with forced unit access is a write and a flush.
                    self.store.flush()?;
                }
                continue;
            }
            self.read(&share.disk)?;
        }
        Ok(())
    }

    /// Makes a write of a random kind to sectors that this client owns.
    fn write(&mut self, share: &Share) -> Checked {
        let Some((head, generation)) = self.store.enter(&share.disk) else { return Ok(()) };
        let run = self.random.pick(&share.runs).clone();
        let blocks = run.start.div_ceil(SECTORS) as u64..(run.end / SECTORS) as u64;
        if blocks.is_empty() || self.random.percent(20) {
            // A write within one block.
            let start = run.start + self.random.below(run.len() as u64) as usize;
            let end = run.end.min((start / SECTORS + 1) * SECTORS);
            let end = start + 1 + self.random.below((end - start) as u64) as usize;
            return self.change(&share.disk, &head, generation, start..end, Kind::Part);
        }
        let length = blocks.end - blocks.start;
        let whole = if self.habit == Habit::Large { 80 } else { 30 };
        let (first, count) = if self.random.percent(whole) {
            (blocks.start, length)
        } else {
            let count = 1 + self.random.below(length.min(4));
            (blocks.start + self.random.below(length - count + 1), count)
        };
        let sectors = first as usize * SECTORS..(first + count) as usize * SECTORS;
        let kind = match self.random.below(10) {
            0 => Kind::Discard,
            1 => Kind::Zero,
            _ => Kind::Whole,
        };
        self.change(&share.disk, &head, generation, sectors, kind)
    }

    /// Writes back the buffer of a disk.
    fn settle(&mut self, disk: &str) -> Checked {
        let Some((head, generation)) = self.store.enter(disk) else { return Ok(()) };
        match self.store.engine.settle(&head) {
            Ok(()) => Ok(()),
            Err(error) => self.gone(disk, generation, error, "write-back"),
        }
    }

    fn change(&self, disk: &str, head: &Head, generation: u64, sectors: Range<usize>, kind: Kind) -> Checked {
        let engine = &self.store.engine;
        let write = {
            let mut model = self.store.model();
            let number = self.store.content_of(model.number());
            let Some(object) = model.objects.get_mut(disk) else { return Ok(()) };
            if object.image.generation != generation {
                return Ok(());
            }
            let write = if matches!(kind, Kind::Discard | Kind::Zero) { 0 } else { number };
            object.image.begin(sectors.clone(), write);
            write
        };
        let blocks = (sectors.start / SECTORS) as u64..sectors.end.div_ceil(SECTORS) as u64;
        self.store.note(|| format!("{disk}: write {write} of sectors {sectors:?} {kind:?} ..."));
        let outcome = match kind {
            Kind::Whole => {
                engine.write_blocks(head, blocks.start, content(write, blocks.start, blocks.end - blocks.start))
            }
            Kind::Discard => engine.discard_blocks(head, blocks),
            Kind::Zero => engine.zero_blocks(head, blocks),
            Kind::Part => engine.modify_block(head, disk, blocks.start, &|bytes| {
                for sector in sectors.clone() {
                    let at = sector % SECTORS * SECTOR;
                    fill(write, sector, &mut bytes[at..at + SECTOR]);
                }
            }),
        };
        self.store.note(|| format!("{disk}: write {write} of sectors {sectors:?}: {outcome:?}"));
        match outcome {
            Ok(()) => {
                count(&self.store.statistics.operations);
                if let Some(object) = self.store.model().objects.get_mut(disk)
                    && object.image.generation == generation
                {
                    object.image.end(sectors);
                }
                Ok(())
            }
            Err(error) => self.gone(disk, generation, error, "write"),
        }
    }

    /// Reads random blocks of a disk.
    fn read(&mut self, disk: &str) -> Checked {
        let Some((head, generation)) = self.store.enter(disk) else { return Ok(()) };
        let least = {
            let model = self.store.model();
            let Some(object) = model.objects.get(disk).filter(|object| object.image.generation == generation) else {
                return Ok(());
            };
            object.image.acknowledged(0..object.image.sectors.len())
        };
        let blocks = (least.len() / SECTORS) as u64;
        let first = self.random.below(blocks);
        let range = first..first + 1 + self.random.below((blocks - first).min(8));
        let engine = &self.store.engine;
        let found = match engine.read_blocks(disk, range.clone(), &|range| engine.plan_head(&head, range)) {
            Ok(found) => found,
            Err(error) => return self.gone(disk, generation, error, "read"),
        };
        count(&self.store.statistics.operations);
        let mut model = self.store.model();
        let Some(object) = model.objects.get_mut(disk).filter(|object| object.image.generation == generation) else {
            return Ok(());
        };
        let from = first as usize * SECTORS;
        let bytes = &found[..(range.end - range.start) as usize * BLOCK_SIZE];
        let judged = object.image.judge(from, bytes, &least[from..], false);
        judged.map_err(|violation| End::Violation(format!("a read of {disk}: {violation}")))
    }

    /// Classifies an error: a client of a deleted or reverted disk gets `NotFound`; any other error is a violation.
    fn gone(&self, disk: &str, generation: u64, error: error::Error, what: &str) -> Checked {
        let model = self.store.model();
        let ends = match model.objects.get(disk) {
            Some(object) => object.image.generation != generation || !matches!(object.fate, crate::model::Fate::Stays),
            None => true,
        };
        drop(model);
        if ends && error.kind() == ErrorKind::NotFound {
            return Ok(());
        }
        Err(self.store.judge(error, &format!("{what} of {disk}")))
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Whole,
    Part,
    Discard,
    Zero,
}
