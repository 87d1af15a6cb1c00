//! Data reduction in the background: compression and deduplication, which must not change any content.

use super::{Checked, Outcome, SimulationRun};
use error::Result;
use std::ops::Range;
use store::Engine;
use store::catalog::{Object, ObjectState, Provisioning};
use store::engine::{PRINTS_MAX, PackPass, SharePass};
use store::pack::{Codec, Packer};

/// Memory for hints: so little that some are replaced.
const HINT_MEMORY: usize = 4096;
/// The most blocks that one operation compresses.
const PACKED_MAX: u64 = 8192;

impl SimulationRun {
    /// Compresses blocks of a disk or snapshot from `at` on, in at most `steps` steps. Which new blocks are compressed
    /// at write-back from then on depends on `steps` too.
    pub(super) fn pack(&mut self, object: u64, at: u64, steps: u64, codec: Codec) -> Checked {
        let objects = reducible(self.datastore()?.engine());
        let Some((id, blocks)) = objects.get((object % objects.len().max(1) as u64) as usize).copied() else {
            return Ok(());
        };
        let first = at % blocks.max(1);
        let range = first..blocks.min(first + PACKED_MAX);
        let packed = self.reduce(|engine, _| {
            pack_writes(engine, steps, codec)?;
            pack(engine, id, range, steps, codec)
        })?;
        self.statistics.packed += packed.unwrap_or(0);
        Ok(())
    }

    /// Makes the next steps of a pass that stores equal blocks of all disks and snapshots once. Which new data is
    /// compared with stored data from then on depends on `steps` too.
    pub(super) fn share(&mut self, steps: u64) -> Checked {
        let shared = self.reduce(|engine, pass| {
            share_writes(engine, steps);
            share(engine, pass, steps)
        })?;
        self.statistics.shared += shared.unwrap_or(0);
        Ok(())
    }

    fn reduce(&mut self, act: impl FnOnce(&Engine, &mut Option<SharePass>) -> Result<u64>) -> Checked<Option<u64>> {
        // An overwrite of a compressed or shared block needs space, although the model knows of no other owner.
        self.reduced = true;
        let datastore = self.datastore()?;
        let result = act(datastore.engine(), &mut self.pass);
        drop(datastore);
        match self.judge(result, None)? {
            Outcome::Done(blocks) => Ok(Some(blocks)),
            Outcome::Restarted => Ok(None),
            Outcome::Refused(error) if self.foretold(&error) => Ok(None),
            Outcome::Refused(error) => Err(format!("data reduction failed: {error}")),
        }
    }
}

/// The thin disks and the snapshots, with the numbers of their blocks.
fn reducible(engine: &Engine) -> Vec<(u64, u64)> {
    let is_reducible = |object: &&Object| match object.state {
        ObjectState::Disk => object.provisioning == Provisioning::Thin,
        ObjectState::Snapshot => true,
        _ => false,
    };
    engine.with_catalog(|catalog| {
        catalog.objects().filter(is_reducible).map(|object| (object.id, object.size_in_blocks())).collect()
    })
}

/// Begins or ends to map new data to equal stored blocks, for all thin disks in one domain or in two. Also begins or
/// ends to reduce it before flushes.
fn share_writes(engine: &Engine, choice: u64) {
    let domain = |id: u64| if choice.is_multiple_of(3) && id.is_multiple_of(2) { "even" } else { "all" };
    let thin = engine.with_catalog(|catalog| {
        let thin = catalog.disks().filter(|disk| disk.provisioning == Provisioning::Thin);
        thin.map(|disk| (disk.id, domain(disk.id).to_owned())).collect::<Vec<_>>()
    });
    let inline: Vec<u64> =
        thin.iter().map(|(disk, _)| *disk).filter(|disk| !(choice + disk).is_multiple_of(3)).collect();
    engine.reduce_inline_of(&inline);
    let thin = if choice.is_multiple_of(4) { &[] } else { &thin[..] };
    engine.share_writes_of(thin, HINT_MEMORY);
}

/// Begins or ends the compression of new blocks at write-back, for all thin disks or some of them.
fn pack_writes(engine: &Engine, choice: u64, codec: Codec) -> Result<()> {
    let thin = engine.with_catalog(|catalog| {
        let thin = catalog.disks().filter(|disk| disk.provisioning == Provisioning::Thin);
        thin.map(|disk| (disk.id, codec)).collect::<Vec<_>>()
    });
    match choice % 4 {
        0 => engine.pack_writes_of(&[]),
        1 => engine.pack_writes_of(&thin[..thin.len() / 2]),
        _ => engine.pack_writes_of(&thin),
    }
}

/// Returns the number of blocks that became free.
fn pack(engine: &Engine, object: u64, range: Range<u64>, steps: u64, codec: Codec) -> Result<u64> {
    let mut pass = PackPass::new(Packer::new(codec)?, 1 << 20, Vec::new());
    let (mut at, mut packed) = (range.start, 0);
    for _ in 0..steps {
        if at >= range.end {
            break;
        }
        let step = engine.pack_step(object, at..range.end, &mut pass)?;
        packed += step.packed;
        at = step.next;
    }
    Ok(packed)
}

/// Returns the number of blocks that became free. The pass remains, so that it goes on with what it knew before the
/// next operations.
fn share(engine: &Engine, pass: &mut Option<SharePass>, steps: u64) -> Result<u64> {
    let mut shared = 0;
    for _ in 0..steps {
        let current = pass.get_or_insert_with(|| SharePass::new(reducible(engine), PRINTS_MAX));
        let step = engine.share_step(current)?;
        shared += step.shared;
        if step.ended {
            *pass = None;
        }
    }
    Ok(shared)
}
