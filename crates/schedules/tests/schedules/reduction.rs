//! The thread that compresses and deduplicates while other threads write, take snapshots and delete.

use crate::store::{Checked, Store};
use error::{ErrorKind, Result};
use scheduled_store::Engine;
use scheduled_store::engine::{PRINTS_MAX, PackPass, SharePass};
use scheduled_store::pack::{Codec, Packer};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use testkit::Random;

/// Memory for hints: so little that some are replaced.
const HINT_MEMORY: usize = 1024;
/// The most steps of one operation.
const STEPS_MAX: u64 = 60;

/// A thread that stores the same contents in less space.
pub struct Reduction {
    /// The store that the thread uses.
    pub store: Arc<Store>,
    /// Chooses the operations of this thread.
    pub random: Random,
    /// Number of operations.
    pub operations: u64,
}

impl Reduction {
    /// Carries out all operations.
    pub fn run(mut self) -> Checked {
        let mut pass = None;
        for _ in 0..self.operations {
            self.share_writes();
            self.compress_writes()?;
            if self.random.percent(40) {
                self.write_back()?;
            }
            let steps = 1 + self.random.below(STEPS_MAX);
            if self.random.percent(50) {
                self.share(&mut pass, steps)?;
            } else {
                self.pack(steps)?;
            }
        }
        Ok(())
    }

    /// Moves what was written from the buffers and the journal to its blocks: other blocks are not reduced.
    fn write_back(&self) -> Checked {
        self.store.flush()?;
        self.store.engine.checkpoint().map_err(|error| self.store.judge(error, "checkpoint"))
    }

    /// The ids of disks and snapshots, and their numbers of blocks. Some may be deleted meanwhile.
    fn objects(&self) -> Vec<(u64, u64)> {
        let model = self.store.model();
        let objects = model.objects.values().filter(|object| object.id > 0);
        objects.map(|object| (object.id, (object.image.sectors.len() / crate::model::SECTORS) as u64)).collect()
    }

    /// Some of the disks.
    fn some_disks(&mut self, percent: u64) -> Vec<u64> {
        let disks: Vec<u64> = self.store.engine.with_catalog(|catalog| catalog.disks().map(|disk| disk.id).collect());
        disks.into_iter().filter(|_| self.random.percent(percent)).collect()
    }

    /// Begins or ends to compress new data, and to let clients wait until new data is reduced, for some of the disks.
    fn compress_writes(&mut self) -> Checked {
        let inline = self.some_disks(50);
        self.store.engine.reduce_inline_of(&inline);
        let packed: Vec<_> = self.some_disks(50).into_iter().map(|disk| (disk, Codec::Lz4)).collect();
        let changed = self.store.engine.pack_writes_of(&packed);
        changed.map_err(|error| self.store.judge(error, "a change of compression"))
    }

    /// Begins or ends to map new data to equal stored blocks, for some of the disks.
    fn share_writes(&mut self) {
        let some: Vec<_> = self.some_disks(75).into_iter().map(|disk| (disk, "all".to_owned())).collect();
        self.store.engine.share_writes_of(&some, HINT_MEMORY);
        self.store.statistics.mapped.fetch_max(self.store.engine.shared_writes(), Ordering::Relaxed);
    }

    fn pack(&mut self, steps: u64) -> Checked {
        let objects = self.objects();
        if objects.is_empty() {
            return Ok(());
        }
        let (object, blocks) = *self.random.pick(&objects);
        let codec = *self.random.pick(&[Codec::Lz4, Codec::Zstd(1)]);
        self.store.note(|| format!("compress object {object} ..."));
        match pack(&self.store.engine, object, blocks, steps, codec) {
            Ok(packed) => {
                self.store.note(|| format!("compressed {packed} blocks of object {object}"));
                self.store.statistics.packed.fetch_add(packed, Ordering::Relaxed);
                Ok(())
            }
            // The object was deleted.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(self.store.judge(error, "compression")),
        }
    }

    fn share(&mut self, pass: &mut Option<SharePass>, steps: u64) -> Checked {
        self.store.note(|| "deduplicate ...".into());
        for _ in 0..steps {
            let current = pass.get_or_insert_with(|| SharePass::new(self.objects(), PRINTS_MAX));
            let step = self.store.engine.share_step(current);
            let step = step.map_err(|error| self.store.judge(error, "deduplication"))?;
            self.store.statistics.shared.fetch_add(step.shared, Ordering::Relaxed);
            if step.ended {
                *pass = None;
            }
        }
        self.store.note(|| "deduplicated".into());
        Ok(())
    }
}

/// Returns the number of blocks that became free.
fn pack(engine: &Engine, object: u64, blocks: u64, steps: u64, codec: Codec) -> Result<u64> {
    let mut pass = PackPass::new(Packer::new(codec)?, 1 << 20, Vec::new());
    let (mut at, mut packed) = (0, 0);
    for _ in 0..steps {
        if at >= blocks {
            break;
        }
        let step = engine.pack_step(object, at..blocks, &mut pass)?;
        packed += step.packed;
        at = step.next;
    }
    Ok(packed)
}
